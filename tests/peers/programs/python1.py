"""What the official Python SDK 1.x sees of a server: ``python1.py URL session|sse [behaviour ...]``."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import anyio
import mcp.types as types
from mcp.client.session import ClientSession
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamablehttp_client
from pydantic import AnyUrl
from report import LARGE, ODD, STEPS, Latest, Report, refused


class Visit:
    def __init__(self, report: Report) -> None:
        self.report = report
        self.logs: list[str] = []
        self.told = Latest()
        self.session: ClientSession

    # What the server may ask, and tell.

    async def sample(self, _: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
        text = f"a model was told {params.messages[0].content.text}"
        return types.CreateMessageResult(
            role="assistant", content=types.TextContent(type="text", text=text), model="none", stopReason="endTurn"
        )

    async def elicit(self, _: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"name": "Ada", "age": 36})

    async def roots(self, _: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri="file:///srv/a", name="a"), types.Root(uri="file:///srv/b")])

    async def log(self, params: types.LoggingMessageNotificationParams) -> None:
        self.logs.append(f"{params.level} {params.data}")

    async def heard(self, message: Any) -> None:
        self.told.add(getattr(message, "root", message))

    # What is looked at.

    async def call(self, name: str, **arguments: Any) -> str:
        result = await self.session.call_tool(name, arguments)
        return result.content[0].text

    async def lists(self) -> Any:
        return {
            "tools": sorted(each.name for each in (await self.session.list_tools()).tools),
            "prompts": sorted(each.name for each in (await self.session.list_prompts()).prompts),
            "resources": sorted(str(each.uri) for each in (await self.session.list_resources()).resources),
            "templates": [
                each.uriTemplate for each in (await self.session.list_resource_templates()).resourceTemplates
            ],
        }

    async def echo(self) -> Any:
        return await self.call("echo", text=ODD) == ODD

    async def structured(self) -> Any:
        return (await self.session.call_tool("add", {"a": 2, "b": 3})).structuredContent

    async def tool_error(self) -> Any:
        result = await self.session.call_tool("fail", {})
        return [result.isError, result.content[0].text]

    async def bad_arguments(self) -> Any:
        result = await self.session.call_tool("add", {"a": "two", "b": 3})
        return result.isError

    async def progress(self) -> Any:
        seen: list[Any] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            seen.append([progress, total, message])

        result = await self.session.call_tool("slow", {"steps": STEPS}, progress_callback=on_progress)
        return [seen, result.content[0].text]

    async def cancel(self) -> Any:
        begun = anyio.Event()

        async def on_progress(*_: Any) -> None:
            begun.set()

        async with anyio.create_task_group() as group:
            id = self.session._request_id  # this SDK has no call that cancels: one sends the notification
            group.start_soon(partial(self.session.call_tool, "wait", {"tag": "cancel"}, progress_callback=on_progress))
            await begun.wait()
            params = types.CancelledNotificationParams(requestId=id, reason="enough")
            notification = types.CancelledNotification(method="notifications/cancelled", params=params)
            await self.session.send_notification(types.ClientNotification(notification))
            group.cancel_scope.cancel()
        return await self.call("gone", tag="cancel")

    async def read(self) -> Any:
        text = (await self.session.read_resource(AnyUrl("peers://greeting"))).contents[0]
        blob = (await self.session.read_resource(AnyUrl("peers://picture"))).contents[0]
        item = (await self.session.read_resource(AnyUrl("peers://item/7"))).contents[0]
        return [text.text, blob.mimeType, blob.blob, item.text]

    async def subscribe(self) -> Any:
        await self.session.subscribe_resource(AnyUrl("peers://greeting"))
        await self.call("touch", uri="peers://greeting")
        update = await self.told.some(types.ResourceUpdatedNotification)
        await self.session.unsubscribe_resource(AnyUrl("peers://greeting"))
        return str(update.params.uri)

    async def list_changed(self) -> Any:
        await self.call("toggle", on=True)
        await self.told.some(types.ToolListChangedNotification)
        names = [each.name for each in (await self.session.list_tools()).tools]
        await self.call("toggle", on=False)
        return "extra" in names

    async def prompt(self) -> Any:
        result = await self.session.get_prompt("compare", {"first": "Oslo", "second": "Rome"})
        return [result.messages[0].role, result.messages[0].content.text]

    async def completion(self) -> Any:
        prompt = types.PromptReference(type="ref/prompt", name="compare")
        result = await self.session.complete(prompt, {"name": "first", "value": "O"})
        return result.completion.values

    async def logging(self) -> Any:
        await self.session.set_logging_level("info")
        await self.call("log")
        return self.logs

    async def large(self) -> Any:
        return await self.call("echo", text=LARGE) == LARGE

    async def parallel(self) -> Any:
        same: list[bool] = []

        async def one(number: int) -> None:
            same.append(await self.call("echo", text=f"number {number}", seconds=0.2) == f"number {number}")

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(one, number)
        return sum(same)

    async def all(self, initialized: types.InitializeResult) -> None:
        look = self.report.look
        self.report.tell("connect", [initialized.protocolVersion, initialized.serverInfo.name])
        await look("list", self.lists)
        await look("call", self.echo)
        await look("structured result", self.structured)
        await look("error result", self.tool_error)
        await look("unknown tool", lambda: refused(self.session.call_tool("nobody", {})))
        await look("bad arguments", self.bad_arguments)
        await look("progress", self.progress)
        await look("cancel", self.cancel)
        await look("read", self.read)
        await look("unknown resource", lambda: refused(self.session.read_resource(AnyUrl("peers://nothing"))))
        await look("subscribe", self.subscribe)
        await look("list changed", self.list_changed)
        await look("prompt", self.prompt)
        await look("unknown prompt", lambda: refused(self.session.get_prompt("nobody", {})))
        await look("completion", self.completion)
        await look("logging", self.logging)
        await look("sampling", lambda: self.call("sample"))
        await look("elicitation", lambda: self.call("ask"))
        await look("roots", lambda: self.call("roots"))
        await look("large", self.large)
        await look("parallel", self.parallel)


async def main(url: str, way: str, *wanted: str) -> None:
    report = Report(list(wanted))
    visit = Visit(report)
    async with (
        (sse_client if way == "sse" else streamablehttp_client)(url) as streams,
        ClientSession(
            *streams[:2],
            sampling_callback=visit.sample,
            elicitation_callback=visit.elicit,
            list_roots_callback=visit.roots,
            logging_callback=visit.log,
            message_handler=visit.heard,
        ) as visit.session,
    ):
        await visit.all(await visit.session.initialize())
    report.tell("end", "clean")


anyio.run(main, *sys.argv[1:])
