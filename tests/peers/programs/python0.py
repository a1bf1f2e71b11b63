"""What the first release of the official Python SDK sees of a server: ``python0.py URL sse [behaviour ...]``.

It speaks 2024-11-05 and nothing else.  It has no way to ask for progress or to cancel, no structured results, and no
templates in its interface; what it is told and asked comes on a stream.
"""

from __future__ import annotations

import sys
from typing import Any

import anyio
import mcp.types as types
from mcp.client.session import ClientSession
from mcp.client.sse import sse_client
from pydantic import AnyUrl
from report import LARGE, ODD, Latest, Report, refused


class Visit:
    def __init__(self, report: Report, session: ClientSession) -> None:
        self.report = report
        self.session = session
        self.told = Latest()

    async def listen(self) -> None:
        async for message in self.session.incoming_messages:
            if isinstance(message, types.ServerNotification):
                self.told.add(message.root)
            else:  # the one request that it may get is for its roots
                found = [types.Root(uri="file:///srv/a", name="a"), types.Root(uri="file:///srv/b")]
                await message.respond(types.ClientResult(types.ListRootsResult(roots=found)))

    async def call(self, name: str, **arguments: Any) -> str:
        result = await self.session.call_tool(name, arguments)
        return result.content[0].text

    async def lists(self) -> Any:
        templates = types.ListResourceTemplatesRequest(method="resources/templates/list")
        found = await self.session.send_request(types.ClientRequest(templates), types.ListResourceTemplatesResult)
        return {
            "tools": sorted(each.name for each in (await self.session.list_tools()).tools),
            "prompts": sorted(each.name for each in (await self.session.list_prompts()).prompts),
            "resources": sorted(str(each.uri) for each in (await self.session.list_resources()).resources),
            "templates": [each.uriTemplate for each in found.resourceTemplates],
        }

    async def echo(self) -> Any:
        return await self.call("echo", text=ODD) == ODD

    async def tool_error(self) -> Any:
        result = await self.session.call_tool("fail", {})
        return [result.isError, result.content[0].text]

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
        return (await self.session.complete(prompt, {"name": "first", "value": "O"})).completion.values

    async def logging(self) -> Any:
        await self.session.set_logging_level("info")
        await self.call("log")
        await self.told.some(types.LoggingMessageNotification)
        messages = [each for each in self.told.seen if isinstance(each, types.LoggingMessageNotification)]
        return [f"{each.params.level} {each.params.data}" for each in messages]

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
        await look("structured result", lambda: self.call("add", a=2, b=3))
        await look("error result", self.tool_error)
        await look("unknown tool", lambda: refused(self.session.call_tool("nobody", {})))
        await look("bad arguments", lambda: refused(self.session.call_tool("add", {"a": "two", "b": 3})))
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


async def main(url: str, _: str, *wanted: str) -> None:
    report = Report(list(wanted))
    async with sse_client(url) as streams, ClientSession(*streams) as session, anyio.create_task_group() as group:
        visit = Visit(report, session)
        group.start_soon(visit.listen)
        await visit.all(await session.initialize())
        group.cancel_scope.cancel()
    report.tell("end", "clean")


anyio.run(main, *sys.argv[1:])
