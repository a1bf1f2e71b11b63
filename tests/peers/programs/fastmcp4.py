"""The client of FastMCP 4: ``fastmcp4.py TARGET WAY [behaviour ...]``.

The ways stdio, session and sse open with a handshake; stdio-modern and modern do not.  The client itself cannot
subscribe.  Its attribute `session`, the session of the official SDK, can.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import anyio
import mcp_types as types
from fastmcp import Client as Sdk
from fastmcp.client.transports import SSETransport, StdioTransport, StreamableHttpTransport
from mcp.client.subscriptions import listen
from mcp.shared.exceptions import MCPDeprecationWarning
from report import Logs, Received, Report, wire
from visit import FILLED_IN, ROOTS, Client, Json, Visit, changes_by_listen, changes_by_subscription, sampled

warnings.simplefilter("ignore", MCPDeprecationWarning)  # features that only older revisions have


class FastMcp(Client):
    def __init__(self, modern: bool) -> None:
        self.modern = modern
        self.logs = Logs()
        self.notifications = Received()
        self.sdk: Sdk

    # Requests and notifications of the server.

    async def sample(self, messages: Any, *_: Any) -> types.CreateMessageResult:
        return types.CreateMessageResult.model_validate(sampled(messages[0].content.text))

    async def elicit(self, *_: Any) -> Any:
        return FILLED_IN

    async def log(self, params: types.LoggingMessageNotificationParams) -> None:
        self.logs.add(params.level, params.logger, params.data)

    async def on_message(self, message: Any) -> None:
        if isinstance(message, types.ServerNotification):
            self.notifications.add(message)

    # The behaviours.

    def opened(self) -> list[str | None]:
        return [self.sdk.protocol_version, self.sdk.instructions]

    async def tool(self, name: str, arguments: Json, on_progress: Callable[..., Awaitable[None]] | None = None) -> Json:
        result = await self.sdk.call_tool(name, arguments, progress_handler=on_progress, raise_on_error=False)
        content = [wire(each) for each in result.content]
        return {"content": content, "structuredContent": result.structured_content, "isError": result.is_error}

    async def page(self, kind: str, cursor: str | None) -> Json:
        name = "list_resource_templates_mcp" if kind == "templates" else f"list_{kind}_mcp"
        return wire(await getattr(self.sdk, name)(cursor=cursor))

    async def read(self, uri: str) -> Json:
        return wire(await self.sdk.read_resource_mcp(uri))

    async def prompt(self, name: str, arguments: Mapping[str, str]) -> Json:
        return wire(await self.sdk.get_prompt(name, dict(arguments)))

    async def complete(self, ref: Json, name: str, value: str, context: Mapping[str, str] | None) -> list[str]:
        kind = types.PromptReference if ref["type"] == "ref/prompt" else types.ResourceTemplateReference
        argument = {"name": name, "value": value}
        return (await self.sdk.complete(kind.model_validate(ref), argument, context and dict(context))).values

    def changes(self, of: str) -> AbstractAsyncContextManager[Callable[[], Awaitable[Any]]]:
        session = self.sdk.session
        if self.modern:
            return changes_by_listen(partial(listen, session), of)
        return changes_by_subscription(
            self.notifications, of, partial(session.subscribe_resource, of), partial(session.unsubscribe_resource, of)
        )

    async def logged(self) -> list[str]:
        if self.modern:
            meta = {"io.modelcontextprotocol/logLevel": "notice"}
            await self.sdk.call_tool("interop_log", {}, meta=meta)
        else:
            await self.sdk.set_logging_level("notice")
            await self.tool("interop_log", {})
        return await self.logs.all()


def transport(target: str, way: str) -> Any:
    match way:
        case "stdio" | "stdio-modern":
            command, *args = json.loads(target)
            return StdioTransport(command, args, keep_alive=False)
        case "sse":
            return SSETransport(target)
        case _:
            return StreamableHttpTransport(target)


async def main(target: str, way: str, *wanted: str) -> None:
    report = Report(list(wanted))
    client = FastMcp(way.endswith("modern"))
    async with Sdk(
        transport(target, way),
        mode="auto" if client.modern else "legacy",
        sampling_handler=client.sample,
        elicitation_handler=client.elicit,
        roots=[types.Root.model_validate(each) for each in ROOTS],
        log_handler=client.log,
        message_handler=client.on_message,
    ) as client.sdk:
        await Visit(client, report).all()
    report.tell("end", "clean")


anyio.run(main, *sys.argv[1:])
