"""A client of the official Python SDK 2.x: ``python2.py TARGET WAY [behaviour ...]``.

The ways stdio, session and sse open with a handshake; stdio-modern and modern do not.
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
from mcp.client import Client as Sdk
from mcp.client.sse import sse_client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPDeprecationWarning
from report import Logs, Received, Report, wire
from visit import FILLED_IN, ROOTS, Client, Json, Visit, changes_by_listen, changes_by_subscription, sampled

warnings.simplefilter("ignore", MCPDeprecationWarning)  # features that only older revisions have


class Python2(Client):
    def __init__(self, modern: bool) -> None:
        self.modern = modern
        self.logs = Logs()
        self.notifications = Received()
        self.sdk: Sdk

    # Requests and notifications of the server.

    async def sample(self, _: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
        return types.CreateMessageResult.model_validate(sampled(params.messages[0].content.text))

    async def elicit(self, _: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content=FILLED_IN)

    async def roots(self, _: Any) -> types.ListRootsResult:
        return types.ListRootsResult.model_validate({"roots": ROOTS})

    async def log(self, params: types.LoggingMessageNotificationParams) -> None:
        self.logs.add(params.level, params.logger, params.data)

    async def on_message(self, message: Any) -> None:
        if isinstance(message, types.ServerNotification):
            self.notifications.add(message)

    # The behaviours.

    def opened(self) -> list[str | None]:
        return [self.sdk.protocol_version, self.sdk.instructions]

    async def tool(self, name: str, arguments: Json, on_progress: Callable[..., Awaitable[None]] | None = None) -> Json:
        return wire(await self.sdk.call_tool(name, arguments, progress_callback=on_progress))

    async def page(self, kind: str, cursor: str | None) -> Json:
        name = "list_resource_templates" if kind == "templates" else f"list_{kind}"
        return wire(await getattr(self.sdk, name)(cursor=cursor))

    async def read(self, uri: str) -> Json:
        return wire(await self.sdk.read_resource(uri))

    async def prompt(self, name: str, arguments: Mapping[str, str]) -> Json:
        return wire(await self.sdk.get_prompt(name, dict(arguments)))

    async def complete(self, ref: Json, name: str, value: str, context: Mapping[str, str] | None) -> list[str]:
        kind = types.PromptReference if ref["type"] == "ref/prompt" else types.ResourceTemplateReference
        argument = {"name": name, "value": value}
        result = await self.sdk.complete(kind.model_validate(ref), argument, context and dict(context))
        return result.completion.values

    def changes(self, of: str) -> AbstractAsyncContextManager[Callable[[], Awaitable[Any]]]:
        if self.modern:
            return changes_by_listen(self.sdk.listen, of)
        subscribe, unsubscribe = self.sdk.subscribe_resource, self.sdk.unsubscribe_resource
        return changes_by_subscription(self.notifications, of, partial(subscribe, of), partial(unsubscribe, of))

    async def logged(self) -> list[str]:
        if self.modern:
            await self.sdk.call_tool("interop_log", {}, meta={"io.modelcontextprotocol/logLevel": "notice"})
        else:
            await self.sdk.set_logging_level("notice")
            await self.tool("interop_log", {})
        return await self.logs.all()


def transport(target: str, way: str) -> Any:
    match way:
        case "stdio" | "stdio-modern":
            command, *args = json.loads(target)
            return stdio_client(StdioServerParameters(command=command, args=args))
        case "sse":
            return sse_client(target)
        case _:
            return target


async def main(target: str, way: str, *wanted: str) -> None:
    report = Report(list(wanted))
    client = Python2(way.endswith("modern"))
    async with Sdk(
        transport(target, way),
        mode="auto" if client.modern else "legacy",
        sampling_callback=client.sample,
        elicitation_callback=client.elicit,
        list_roots_callback=client.roots,
        logging_callback=client.log,
        message_handler=client.on_message,
    ) as client.sdk:
        await Visit(client, report).all()
    report.tell("end", "clean")


anyio.run(main, *sys.argv[1:])
