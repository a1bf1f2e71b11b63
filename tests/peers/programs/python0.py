"""A client of the first release of the official Python SDK: ``python0.py TARGET stdio|sse [behaviour ...]``.

It supports only 2024-11-05.  It cannot request progress or cancel a call, has neither structured results nor a method
for templates, and puts the cursor into the wrong place of a request.  Messages from the server arrive on a stream.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import mcp.types as types
from mcp.client.session import ClientSession
from mcp.client.sse import sse_client
from mcp.client.stdio import StdioServerParameters, stdio_client
from pydantic import AnyUrl
from report import Logs, Received, Report, wire
from visit import ROOTS, Client, Json, Visit, changes_by_subscription


class Python0(Client):
    cannot = frozenset({"progress", "cancel"})

    def __init__(self, session: ClientSession, initialized: types.InitializeResult) -> None:
        self.session = session
        self.initialized = initialized
        self.notifications = Received()
        self.logs = Logs()

    async def listen(self) -> None:
        async for message in self.session.incoming_messages:
            if isinstance(message, types.ServerNotification):
                if isinstance(message.root, types.LoggingMessageNotification):
                    params = message.root.params
                    self.logs.add(params.level, params.logger, params.data)
                self.notifications.add(message)
            else:  # the only request that it can get is roots/list
                await message.respond(types.ClientResult(types.ListRootsResult.model_validate({"roots": ROOTS})))

    def opened(self) -> list[str | None]:
        return [self.initialized.protocolVersion, getattr(self.initialized, "instructions", None)]

    async def tool(self, name: str, arguments: Json, on_progress: Callable[..., Awaitable[None]] | None = None) -> Json:
        return wire(await self.session.call_tool(name, arguments))

    async def page(self, kind: str, cursor: str | None) -> Json:
        if kind == "templates":
            request = types.ClientRequest(types.ListResourceTemplatesRequest(method="resources/templates/list"))
            return wire(await self.session.send_request(request, types.ListResourceTemplatesResult))
        return wire(await getattr(self.session, f"list_{kind}")())

    async def read(self, uri: str) -> Json:
        return wire(await self.session.read_resource(AnyUrl(uri)))

    async def prompt(self, name: str, arguments: Mapping[str, str]) -> Json:
        return wire(await self.session.get_prompt(name, dict(arguments)))

    async def complete(self, ref: Json, name: str, value: str, context: Mapping[str, str] | None) -> list[str]:
        kind = types.PromptReference if ref["type"] == "ref/prompt" else types.ResourceReference
        result = await self.session.complete(kind.model_validate(ref), {"name": name, "value": value})
        return result.completion.values

    def changes(self, of: str) -> AbstractAsyncContextManager[Callable[[], Awaitable[Any]]]:
        subscribe, unsubscribe = self.session.subscribe_resource, self.session.unsubscribe_resource
        return changes_by_subscription(
            self.notifications, of, lambda: subscribe(AnyUrl(of)), lambda: unsubscribe(AnyUrl(of))
        )

    async def logged(self) -> list[str]:
        await self.session.set_logging_level("notice")
        await self.tool("interop_log", {})
        return await self.logs.all()


async def main(target: str, way: str, *wanted: str) -> None:
    report = Report(list(wanted))
    if way == "stdio":
        command, *args = json.loads(target)
        transport = stdio_client(StdioServerParameters(command=command, args=args))
    else:
        transport = sse_client(target)
    async with transport as streams, ClientSession(*streams) as session, anyio.create_task_group() as group:
        client = Python0(session, await session.initialize())
        group.start_soon(client.listen)
        await Visit(client, report).all()
        group.cancel_scope.cancel()
    report.tell("end", "clean")


anyio.run(main, *sys.argv[1:])
