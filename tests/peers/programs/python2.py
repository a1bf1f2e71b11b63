"""What the official Python SDK 2.x sees of a server: ``python2.py URL session|modern|sse [behaviour ...]``."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

import anyio
import mcp_types as types
from mcp.client import Client
from mcp.client.sse import sse_client
from mcp.shared.exceptions import MCPDeprecationWarning
from report import LARGE, ODD, STEPS, Latest, Report, refused

warnings.simplefilter("ignore", MCPDeprecationWarning)  # of what the older revisions still have


class Visit:
    def __init__(self, report: Report, modern: bool) -> None:
        self.report = report
        self.modern = modern
        self.logs: list[str] = []
        self.told = Latest()
        self.client: Client

    # What the server may ask, and tell.

    async def sample(self, _: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
        text = f"a model was told {params.messages[0].content.text}"
        content = types.TextContent(type="text", text=text)
        return types.CreateMessageResult(role="assistant", content=content, model="none", stop_reason="endTurn")

    async def elicit(self, _: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"name": "Ada", "age": 36})

    async def roots(self, _: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri="file:///srv/a", name="a"), types.Root(uri="file:///srv/b")])

    async def log(self, params: types.LoggingMessageNotificationParams) -> None:
        self.logs.append(f"{params.level} {params.data}")

    async def heard(self, message: Any) -> None:
        self.told.add(message)

    # What is looked at.

    async def call(self, name: str, **arguments: Any) -> str:
        result = await self.client.call_tool(name, arguments)
        return result.content[0].text

    async def lists(self) -> Any:
        return {
            "tools": sorted(each.name for each in (await self.client.list_tools()).tools),
            "prompts": sorted(each.name for each in (await self.client.list_prompts()).prompts),
            "resources": sorted(str(each.uri) for each in (await self.client.list_resources()).resources),
            "templates": [
                each.uri_template for each in (await self.client.list_resource_templates()).resource_templates
            ],
        }

    async def echo(self) -> Any:
        return await self.call("echo", text=ODD) == ODD

    async def structured(self) -> Any:
        return (await self.client.call_tool("add", {"a": 2, "b": 3})).structured_content

    async def tool_error(self) -> Any:
        result = await self.client.call_tool("fail", {})
        return [result.is_error, result.content[0].text]

    async def bad_arguments(self) -> Any:
        return (await self.client.call_tool("add", {"a": "two", "b": 3})).is_error

    async def progress(self) -> Any:
        seen: list[Any] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            seen.append([progress, total, message])

        result = await self.client.call_tool("slow", {"steps": STEPS}, progress_callback=on_progress)
        return [seen, result.content[0].text]

    async def cancel(self) -> Any:
        begun = anyio.Event()

        async def on_progress(*_: Any) -> None:
            begun.set()

        async with anyio.create_task_group() as group:
            group.start_soon(partial(self.client.call_tool, "wait", {"tag": "cancel"}, progress_callback=on_progress))
            await begun.wait()
            group.cancel_scope.cancel()
        return await self.call("gone", tag="cancel")

    async def read(self) -> Any:
        text = (await self.client.read_resource("peers://greeting")).contents[0]
        blob = (await self.client.read_resource("peers://picture")).contents[0]
        item = (await self.client.read_resource("peers://item/7")).contents[0]
        return [text.text, blob.mime_type, blob.blob, item.text]

    async def subscribe(self) -> Any:
        if self.modern:
            async with self.client.listen(resource_subscriptions=["peers://greeting"]) as changes:
                await self.call("touch", uri="peers://greeting")
                return (await anext(changes)).uri
        await self.client.subscribe_resource("peers://greeting")
        await self.call("touch", uri="peers://greeting")
        update = await self.told.some(types.ResourceUpdatedNotification)
        await self.client.unsubscribe_resource("peers://greeting")
        return str(update.params.uri)

    async def list_changed(self) -> Any:
        if self.modern:
            async with self.client.listen(tools_list_changed=True) as changes:
                await self.call("toggle", on=True)
                await anext(changes)
        else:
            await self.call("toggle", on=True)
            await self.told.some(types.ToolListChangedNotification)
        names = [each.name for each in (await self.client.list_tools()).tools]
        await self.call("toggle", on=False)
        return "extra" in names

    async def prompt(self) -> Any:
        result = await self.client.get_prompt("compare", {"first": "Oslo", "second": "Rome"})
        return [result.messages[0].role, result.messages[0].content.text]

    async def completion(self) -> Any:
        prompt = types.PromptReference(type="ref/prompt", name="compare")
        result = await self.client.complete(prompt, {"name": "first", "value": "O"})
        return result.completion.values

    async def logging(self) -> Any:
        if self.modern:
            await self.client.call_tool("log", {}, meta={"io.modelcontextprotocol/logLevel": "info"})
        else:
            await self.client.set_logging_level("info")
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

    async def all(self) -> None:
        look, client = self.report.look, self.client
        self.report.tell("connect", [client.protocol_version, client.server_info and client.server_info.name])
        await look("list", self.lists)
        await look("call", self.echo)
        await look("structured result", self.structured)
        await look("error result", self.tool_error)
        await look("unknown tool", lambda: refused(client.call_tool("nobody", {})))
        await look("bad arguments", self.bad_arguments)
        await look("progress", self.progress)
        await look("cancel", self.cancel)
        await look("read", self.read)
        await look("unknown resource", lambda: refused(client.read_resource("peers://nothing")))
        await look("subscribe", self.subscribe)
        await look("list changed", self.list_changed)
        await look("prompt", self.prompt)
        await look("unknown prompt", lambda: refused(client.get_prompt("nobody", {})))
        await look("completion", self.completion)
        await look("logging", self.logging)
        await look("sampling", lambda: self.call("sample"))
        await look("elicitation", lambda: self.call("ask"))
        await look("roots", lambda: self.call("roots"))
        await look("large", self.large)
        await look("parallel", self.parallel)


async def main(url: str, way: str, *wanted: str) -> None:
    report = Report(list(wanted))
    visit = Visit(report, way == "modern")
    async with Client(
        sse_client(url) if way == "sse" else url,
        mode="auto" if way == "modern" else "legacy",
        sampling_callback=visit.sample,
        elicitation_callback=visit.elicit,
        list_roots_callback=visit.roots,
        logging_callback=visit.log,
        message_handler=visit.heard,
    ) as visit.client:
        await visit.all()
    report.tell("end", "clean")


anyio.run(main, *sys.argv[1:])
