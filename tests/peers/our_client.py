"""Visit a server with our client, and return the result of each behaviour, in the form of `behaviours`.

The visit uses only the public interface.  The result of an error response is its code; the result of an error that our
client raises by itself is the name of the exception.  A behaviour that takes too long has the result `TOO_LATE`.  For a
behaviour that is known to end so (`expected_late`), the time limit is short.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from tests.peers.programs.report import LARGE, ODD
from trio_mcp import Client, McpError, RequestError, TextContent, open_client
from trio_mcp.types import (
    BlobResourceContents,
    CallToolResult,
    ChangeEvent,
    EmbeddedResource,
    FormElicitationRequest,
    ImageContent,
    LoggingMessageParams,
    PromptReference,
    ResourceReference,
    Root,
    SamplingMessage,
    SamplingRequest,
    TextResourceContents,
)

__all__ = ["TOO_LATE", "Visitor", "visiting"]

TOO_LATE = "too late"
PATIENCE = 60.0  # seconds for one behaviour, on a busy machine
SHORT_PATIENCE = 1.0  # seconds for a behaviour that is known to give no result
WATCHED = "test://watched-resource"
PROMPT = PromptReference("test_prompt_with_arguments")
TEMPLATE = ResourceReference("test://template/{id}/data")
# For each kind: the method that lists a page, the field of the page, and the attribute that names an entry.
KINDS = {
    "tools": ("list_tools_page", "tools", "name"),
    "resources": ("list_resources_page", "resources", "uri"),
    "templates": ("list_resource_templates_page", "resource_templates", "uri_template"),
    "prompts": ("list_prompts_page", "prompts", "name"),
}
TYPES = {TextContent: "text", ImageContent: "image", EmbeddedResource: "resource"}  # the types in JSON
# The entry of each kind that `interop_toggle` adds and removes.
DYNAMIC = {"tools": "interop_dynamic", "resources": "test://interop-dynamic", "prompts": "interop_dynamic"}


# The answers of the user and of the model of our client, and its roots.


def sample(request: SamplingRequest) -> tuple[str, str]:
    [message] = request.params.messages
    assert isinstance(message, SamplingMessage)
    assert isinstance(message.content, TextContent)
    return f"a model was told {message.content.text}", "none"


def fill_in(form: FormElicitationRequest) -> dict[str, Any]:
    assert form.message == "Which?"
    return {"response": "blue"}


ROOTS = [Root("file:///srv/a", name="a"), Root("file:///srv/b")]


@asynccontextmanager
async def visiting(target: Any, **options: Any) -> AsyncIterator[Visitor]:
    """A client of this server with all callbacks, which asks for log messages from level notice on."""
    send_log, logs = trio.open_memory_channel[LoggingMessageParams](100)
    async with open_client(
        target,
        sampling=sample,
        elicitation=fill_in,
        roots=ROOTS,
        log_level="notice",
        on_log=send_log.send_nowait,
        **options,
    ) as client:
        yield Visitor(client, logs)


@attrs.frozen
class Visitor:
    """A client, and the log messages that it receives."""

    client: Client
    logs: trio.MemoryReceiveChannel[LoggingMessageParams]

    async def observe(self, names: Collection[str], expected_late: Collection[str] = ()) -> dict[str, Any]:
        """Try these behaviours, in the order of `interop.BEHAVIOURS`, and return their results."""
        checks: Mapping[str, Callable[[], Awaitable[Any]]] = {
            "connect": self.opened,
            "list": self.lists,
            "call": lambda: self.same(ODD),
            "structured": self.structured,
            "optional": self.optional,
            "tool error": self.tool_error,
            "unknown tool": lambda: self.refused(self.client.call_tool("interop_nothing")),
            "bad arguments": lambda: self.refused(
                self.client.call_tool("interop_check", {"count": "two", "label": "x"})
            ),
            "progress": self.progress,
            "cancel": self.cancel,
            "read": self.read,
            "unknown resource": lambda: self.refused(self.client.read_resource("test://no-such-resource")),
            "subscribe": self.subscribe,
            "list changed": self.list_changed,
            "prompts": self.prompts,
            "unknown prompt": lambda: self.refused(self.client.get_prompt("interop_nothing")),
            "completion": self.completion,
            "logging": self.logging,
            "sampling": lambda: self.text("test_sampling", prompt="a joke"),
            "elicitation": lambda: self.text("test_elicitation", message="Which?"),
            "roots": lambda: self.text("interop_roots"),
            "1 MB": lambda: self.same(LARGE),
            "20 at once": self.many,
        }
        return {
            name: await _observe(check, SHORT_PATIENCE if name in expected_late else PATIENCE)
            for name, check in checks.items()
            if name in names
        }

    async def opened(self) -> list[str | None]:
        return [self.client.revision, self.client.instructions]

    async def result(self, name: str, **arguments: Any) -> tuple[CallToolResult, str]:
        """The result of a call, and the text with which it begins."""
        result = await self.client.call_tool(name, arguments)
        block = result.content[0]
        assert isinstance(block, TextContent)
        return result, block.text

    async def text(self, name: str, **arguments: Any) -> str:
        return (await self.result(name, **arguments))[1]

    async def same(self, text: str, delay_ms: int = 0) -> bool:
        return await self.text("interop_echo", text=text, delay_ms=delay_ms) == text

    async def listed(self, kind: str) -> list[list[str]]:
        """The names on each page."""
        ask, field, name = KINDS[kind]
        pages, cursor = [], None
        while True:
            page: Any = await getattr(self.client, ask)(cursor)
            pages.append([getattr(each, name) for each in getattr(page, field)])
            cursor = page.next_cursor
            if cursor is None:
                return pages

    async def lists(self) -> Any:
        """The names of each kind, or the code of the error if the server has no list of this kind."""
        seen: dict[str, Any] = {}
        paged = []
        for kind in KINDS:
            try:
                pages = await self.listed(kind)
            except RequestError as error:
                seen[kind] = error.code
                continue
            seen[kind] = sorted(each for page in pages for each in page)
            if len(pages) > 1:
                paged.append(kind)
        return {**seen, "paged": sorted(paged)}

    async def structured(self) -> Any:
        result, text = await self.result("interop_structured", a=2, b=3)
        value = result.structured_content
        return [value if isinstance(value, dict) else None, json.loads(text)]

    async def optional(self) -> Any:
        """Two results of a tool that returns a number or None."""
        return [await self.client.call_tool("half", {"number": number}, returns=int | None) for number in (4, 3)]

    async def tool_error(self) -> Any:
        result, text = await self.result("test_error_handling")
        return [result.is_error, text]

    async def refused(self, call: Awaitable[Any]) -> Any:
        """The result of a call that must be refused.  `_observe` handles errors; this handles a result with isError."""
        answer = await call
        return "isError" if getattr(answer, "is_error", False) else f"no error: {answer}"

    async def progress(self) -> Any:
        seen: list[Any] = []
        await self.client.call_tool(
            "test_tool_with_progress", on_progress=lambda done, total, message: seen.append([done, total])
        )
        return seen

    async def cancel(self) -> Any:
        with trio.CancelScope() as scope:
            arguments = {"seconds": 60, "tag": "cancel"}
            await self.client.call_tool("interop_wait", arguments, on_progress=lambda *_: scope.cancel())
        if not scope.cancelled_caught:
            return "the call had ended before"
        while "cancel" not in json.loads(await self.text("interop_cancelled")):
            pass
        return True

    async def read(self) -> Any:
        [text] = (await self.client.read_resource("test://static-text")).contents
        [picture] = (await self.client.read_resource("test://static-binary")).contents
        [item] = (await self.client.read_resource("test://template/7/data")).contents
        assert isinstance(text, TextResourceContents)
        assert isinstance(picture, BlobResourceContents)
        assert isinstance(item, TextResourceContents)
        return [text.text, picture.mime_type, json.loads(item.text)]

    async def subscribe(self) -> Any:
        async with self.client.listen(resources=[WATCHED]) as changes:
            await self.text("interop_touch", uri=WATCHED)
            change: ChangeEvent = await anext(changes)
            return change.item

    async def list_changed(self) -> Any:
        seen = []
        for kind, name in DYNAMIC.items():
            async with self.client.listen(**{kind: True}) as changes:
                await self.text("interop_toggle", kind=kind, on=True)
                await anext(changes)
            if any(name in page for page in await self.listed(kind)):
                seen.append(kind)
            await self.text("interop_toggle", kind=kind, on=False)
        return seen

    async def prompts(self) -> Any:
        async def contents(name: str, **arguments: str) -> list[Any]:
            messages: Any = (await self.client.get_prompt(name, arguments)).messages
            return [each.content for each in messages]

        simple = await contents("test_simple_prompt")
        filled = await contents("test_prompt_with_arguments", arg1="a", arg2="b")
        resource = await contents("test_prompt_with_embedded_resource", resourceUri="test://static-text")
        image = await contents("test_prompt_with_image")
        return [simple[0].text, filled[0].text, *([TYPES[type(each)] for each in some] for some in (resource, image))]

    async def completion(self) -> Any:
        context = None if self.client.revision < "2025-06-18" else {"arg1": "v"}
        found = [
            await self.client.complete(PROMPT, "arg1", "alp"),
            await self.client.complete(PROMPT, "arg2", "", context=context),
            await self.client.complete(TEMPLATE, "id", "1"),
        ]
        return [list(each.values) for each in found]

    async def logging(self) -> Any:
        """The log messages up to the last one.  Over HTTP it may arrive after the result, on another stream."""
        seen: list[str] = []
        await self.text("interop_log")
        while not seen or not seen[-1].startswith("error"):
            message = await self.logs.receive()
            data: Any = message.data
            seen.append(f"{message.level} {message.logger} {data.get('level', data)}")
        return seen

    async def many(self) -> Any:
        same: list[bool] = []

        async def one(number: int) -> None:
            same.append(await self.same(f"number {number}", delay_ms=200))

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(one, number)
        return sum(same)


async def _observe(check: Callable[[], Awaitable[Any]], patience: float) -> Any:
    with trio.move_on_after(patience):
        try:
            return await check()
        except RequestError as error:
            return error.code
        except McpError as error:
            return type(error).__name__
    return TOO_LATE
