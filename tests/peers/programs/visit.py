"""The behaviours that the programs for clients in Python try, in this order.  Each program adapts its client."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import chain
from typing import Any

import anyio
from mcp.client import stdio
from report import LARGE, ODD, PATIENCE, Received, Report, refused

# The SDK waits two seconds for a server to exit after the end of its input, then sends a signal.  On a busy machine a
# server may need longer.
if hasattr(stdio, "PROCESS_TERMINATION_TIMEOUT"):  # older versions wait without a limit, or not at all
    stdio.PROCESS_TERMINATION_TIMEOUT = PATIENCE

Json = dict[str, Any]
KINDS = {  # the kind of a list: its field in the result, and the field that names an entry
    "tools": ("tools", "name"),
    "resources": ("resources", "uri"),
    "templates": ("resourceTemplates", "uriTemplate"),
    "prompts": ("prompts", "name"),
}
DYNAMIC = {"tools": "interop_dynamic", "resources": "test://interop-dynamic", "prompts": "interop_dynamic"}
CHANGED = {kind: f"notifications/{kind}/list_changed" for kind in DYNAMIC}
UPDATED = "notifications/resources/updated"
PROMPT = {"type": "ref/prompt", "name": "test_prompt_with_arguments"}
TEMPLATE = {"type": "ref/resource", "uri": "test://template/{id}/data"}

# The answers of the user and of the model of the client, and its roots.
FILLED_IN = {"response": "blue"}
ROOTS = [{"uri": "file:///srv/a", "name": "a"}, {"uri": "file:///srv/b"}]


def sampled(prompt: str) -> Json:
    text = f"a model was told {prompt}"
    return {"role": "assistant", "content": {"type": "text", "text": text}, "model": "none", "stopReason": "endTurn"}


@asynccontextmanager
async def changes_by_subscription(
    notifications: Received, of: str, subscribe: Callable[[], Awaitable[Any]], unsubscribe: Callable[[], Awaitable[Any]]
) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """`Client.changes` for a connection that gets all changes of lists, and the updates of subscribed URIs."""
    if of in CHANGED:
        yield lambda: notifications.first(CHANGED[of])
        return

    async def updated() -> Any:
        return (await notifications.first(UPDATED))["uri"]

    await subscribe()
    yield updated
    await unsubscribe()


@asynccontextmanager
async def changes_by_listen(
    listen: Callable[..., AbstractAsyncContextManager[Any]], of: str
) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """`Client.changes` in 2026-07-28, with the `listen` of the official SDK."""
    wanted: Json = {f"{of}_list_changed": True} if of in CHANGED else {"resource_subscriptions": [of]}
    async with listen(**wanted) as changes:

        async def change() -> Any:
            return getattr(await anext(changes), "uri", None)

        yield change


class Client(ABC):
    """The operations that differ between the clients; results are in their JSON form."""

    cannot: frozenset[str] = frozenset()
    """The behaviours that this client does not support."""

    @abstractmethod
    def opened(self) -> list[str | None]:
        """The revision, and the server's instructions."""

    @abstractmethod
    async def tool(self, name: str, arguments: Json, on_progress: Callable[..., Awaitable[None]] | None = None) -> Json:
        """The result of a call."""

    @abstractmethod
    async def page(self, kind: str, cursor: str | None) -> Json:
        """The result of a list request."""

    @abstractmethod
    async def read(self, uri: str) -> Json: ...

    @abstractmethod
    async def prompt(self, name: str, arguments: Mapping[str, str]) -> Json: ...

    @abstractmethod
    async def complete(self, ref: Json, name: str, value: str, context: Mapping[str, str] | None) -> list[str]: ...

    async def stop(self) -> None:  # noqa: B027  # optional
        """Cancel the last request, if the client does not do so when the scope of the call is cancelled."""

    @abstractmethod
    def changes(self, of: str) -> AbstractAsyncContextManager[Callable[[], Awaitable[Any]]]:
        """A block with changes of a kind or of a URI.  It yields a function that waits for one and returns its URI."""

    @abstractmethod
    async def logged(self) -> list[str]:
        """The log messages of a call of `interop_log` from level notice on, in the form of `Logs`."""


class Visit:
    def __init__(self, client: Client, report: Report) -> None:
        self.client = client
        self.report = report

    async def all(self) -> None:
        self.report.tell("connect", self.client.opened())
        looks = {
            "list": self.lists,
            "call": lambda: self.same(ODD),
            "structured": self.structured,
            "tool error": self.tool_error,
            "unknown tool": lambda: refused(self.client.tool("interop_nothing", {})),
            "bad arguments": lambda: refused(self.client.tool("interop_check", {"count": "two", "label": "x"})),
            "progress": self.progress,
            "cancel": self.cancel,
            "read": self.read,
            "unknown resource": lambda: refused(self.client.read("test://no-such-resource")),
            "subscribe": self.subscribe,
            "list changed": self.list_changed,
            "prompts": self.prompts,
            "unknown prompt": lambda: refused(self.client.prompt("interop_nothing", {})),
            "completion": self.completion,
            "logging": self.client.logged,
            "sampling": lambda: self.call("test_sampling", prompt="a joke"),
            "elicitation": lambda: self.call("test_elicitation", message="Which?"),
            "roots": lambda: self.call("interop_roots"),
            "1 MB": lambda: self.same(LARGE),
            "20 at once": self.many,
        }
        for behaviour, at in looks.items():
            if behaviour not in self.client.cannot:
                await self.report.look(behaviour, at)

    async def call(self, name: str, **arguments: Any) -> str:
        return (await self.client.tool(name, arguments))["content"][0]["text"]

    async def same(self, text: str, delay_ms: int = 0) -> bool:
        return await self.call("interop_echo", text=text, delay_ms=delay_ms) == text

    async def listed(self, kind: str) -> list[list[str]]:
        """The names on each page."""
        field, name = KINDS[kind]
        pages, cursor = [], None
        while True:
            page = await self.client.page(kind, cursor)
            pages.append([each[name] for each in page[field]])
            cursor = page.get("nextCursor")
            if cursor is None:
                return pages

    async def lists(self) -> Any:
        pages = {kind: await self.listed(kind) for kind in KINDS}
        names = {kind: sorted(chain.from_iterable(found)) for kind, found in pages.items()}
        return {**names, "paged": sorted(kind for kind, found in pages.items() if len(found) > 1)}

    async def structured(self) -> Any:
        result = await self.client.tool("interop_structured", {"a": 2, "b": 3})
        return [result.get("structuredContent"), json.loads(result["content"][0]["text"])]

    async def tool_error(self) -> Any:
        result = await self.client.tool("test_error_handling", {})
        return [result["isError"], result["content"][0]["text"]]

    async def progress(self) -> Any:
        seen: list[Any] = []
        complete = anyio.Event()

        async def on_progress(progress: float, total: float | None, *_: Any) -> None:
            seen.append([progress, total])
            if len(seen) == 3:
                complete.set()

        async with anyio.create_task_group() as group:
            group.start_soon(self.client.tool, "interop_progress", {}, on_progress)
            await complete.wait()
            await self.call("interop_heard")
        return seen

    async def cancel(self) -> Any:
        begun = anyio.Event()

        async def on_progress(*_: Any) -> None:
            begun.set()

        async with anyio.create_task_group() as group:
            group.start_soon(self.client.tool, "interop_wait", {"seconds": 60, "tag": "cancel"}, on_progress)
            await begun.wait()
            await self.client.stop()
            group.cancel_scope.cancel()
        while "cancel" not in json.loads(await self.call("interop_cancelled")):
            pass
        return True

    async def read(self) -> Any:
        text = (await self.client.read("test://static-text"))["contents"][0]
        picture = (await self.client.read("test://static-binary"))["contents"][0]
        item = (await self.client.read("test://template/7/data"))["contents"][0]
        return [text["text"], picture["mimeType"], json.loads(item["text"])]

    async def subscribe(self) -> Any:
        uri = "test://watched-resource"
        async with self.client.changes(uri) as change:
            await self.call("interop_touch", uri=uri)
            return await change()

    async def list_changed(self) -> Any:
        seen = []
        for kind, name in DYNAMIC.items():
            async with self.client.changes(kind) as change:
                await self.call("interop_toggle", kind=kind, on=True)
                await change()
            if any(name in page for page in await self.listed(kind)):
                seen.append(kind)
            await self.call("interop_toggle", kind=kind, on=False)
        return seen

    async def prompts(self) -> Any:
        async def contents(name: str, **arguments: str) -> list[Json]:
            return [each["content"] for each in (await self.client.prompt(name, arguments))["messages"]]

        simple = await contents("test_simple_prompt")
        filled = await contents("test_prompt_with_arguments", arg1="a", arg2="b")
        resource = await contents("test_prompt_with_embedded_resource", resourceUri="test://static-text")
        image = await contents("test_prompt_with_image")
        types = [[each["type"] for each in some] for some in (resource, image)]
        return [simple[0]["text"], filled[0]["text"], *types]

    async def completion(self) -> Any:
        return [
            await self.client.complete(PROMPT, "arg1", "alp", None),
            await self.client.complete(PROMPT, "arg2", "", {"arg1": "v"}),
            await self.client.complete(TEMPLATE, "id", "1", None),
        ]

    async def many(self) -> Any:
        same: list[bool] = []

        async def one(number: int) -> None:
            same.append(await self.same(f"number {number}", delay_ms=200))

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(one, number)
        return sum(same)
