"""A client of the official Python SDK 1.x: ``python1.py TARGET stdio|session|sse|ws [behaviour ...]``."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import mcp.types as types
from mcp.client.session import ClientSession
from pydantic import AnyUrl
from report import Logs, Received, Report, wire
from visit import FILLED_IN, ROOTS, Client, Json, Visit, changes_by_subscription, sampled

warnings.simplefilter("ignore", DeprecationWarning)  # newer versions deprecate names of older ones


class Python1(Client):
    def __init__(self) -> None:
        self.logs = Logs()
        self.notifications = Received()
        self.session: ClientSession
        self.initialized: types.InitializeResult

    # Requests and notifications of the server.

    async def sample(self, _: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
        return types.CreateMessageResult.model_validate(sampled(params.messages[0].content.text))

    async def elicit(self, _: Any, params: Any) -> Any:
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
        return [self.initialized.protocolVersion, self.initialized.instructions]

    async def tool(self, name: str, arguments: Json, on_progress: Callable[..., Awaitable[None]] | None = None) -> Json:
        return wire(await self.session.call_tool(name, arguments, progress_callback=on_progress))

    async def page(self, kind: str, cursor: str | None) -> Json:
        name = "list_resource_templates" if kind == "templates" else f"list_{kind}"
        return wire(await getattr(self.session, name)(cursor))

    async def read(self, uri: str) -> Json:
        return wire(await self.session.read_resource(AnyUrl(uri)))

    async def prompt(self, name: str, arguments: Mapping[str, str]) -> Json:
        return wire(await self.session.get_prompt(name, dict(arguments)))

    async def complete(self, ref: Json, name: str, value: str, context: Mapping[str, str] | None) -> list[str]:
        template = getattr(types, "ResourceTemplateReference", None) or types.ResourceReference
        kind = types.PromptReference if ref["type"] == "ref/prompt" else template
        more = {"context_arguments": context} if context and _has_context(self.session.complete) else {}
        result = await self.session.complete(kind.model_validate(ref), {"name": name, "value": value}, **more)
        return result.completion.values

    async def stop(self) -> None:
        """This SDK has no method that cancels a request; a program sends the notification."""
        params = types.CancelledNotificationParams(requestId=self.session._request_id - 1, reason="enough")
        notification = types.CancelledNotification(method="notifications/cancelled", params=params)
        await self.session.send_notification(types.ClientNotification(notification))

    def changes(self, of: str) -> AbstractAsyncContextManager[Callable[[], Awaitable[Any]]]:
        subscribe, unsubscribe = self.session.subscribe_resource, self.session.unsubscribe_resource
        return changes_by_subscription(
            self.notifications, of, lambda: subscribe(AnyUrl(of)), lambda: unsubscribe(AnyUrl(of))
        )

    async def logged(self) -> list[str]:
        await self.session.set_logging_level("notice")
        await self.tool("interop_log", {})
        return await self.logs.all()


def _has_context(complete: Any) -> bool:
    """Whether this version has the context of completions, which came with 2025-06-18."""
    return "context_arguments" in inspect.signature(complete).parameters


def transport(target: str, way: str) -> Any:
    match way:
        case "stdio":
            from mcp.client.stdio import StdioServerParameters, stdio_client

            command, *args = json.loads(target)
            return stdio_client(StdioServerParameters(command=command, args=args))
        case "session":
            from mcp.client.streamable_http import streamablehttp_client

            return streamablehttp_client(target)
        case "sse":
            from mcp.client.sse import sse_client

            return sse_client(target)
        case _:
            from mcp.client.websocket import websocket_client

            return websocket_client(target)


async def main(target: str, way: str, *wanted: str) -> None:
    report = Report(list(wanted))
    client = Python1()
    callbacks: dict[str, Any] = {"sampling_callback": client.sample, "list_roots_callback": client.roots}
    if hasattr(types, "ElicitResult"):  # which came with 2025-06-18
        callbacks["elicitation_callback"] = client.elicit
    async with (
        transport(target, way) as streams,
        ClientSession(
            *streams[:2], **callbacks, logging_callback=client.log, message_handler=client.on_message
        ) as client.session,
    ):
        client.initialized = await client.session.initialize()
        await Visit(client, report).all()
    report.tell("end", "clean")


anyio.run(main, *sys.argv[1:])
