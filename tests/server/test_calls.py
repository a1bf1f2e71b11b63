"""Requests and their answers, in every revision: the outcomes of handlers, and faults of clients."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import trio
import trio.lowlevel
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.requirements import req
from tests.server.raw_client import (
    LATEST,
    MESSAGE,
    PROGRESS,
    ErrorResponse,
    RawClient,
    connected,
    every_revision,
    legacy,
    modern,
    until,
)
from trio_mcp import (
    Context,
    RequestError,
    ResourceNotFound,
    Server,
    TextContent,
    ToolError,
    UsageError,
    file,
    image,
)
from trio_mcp.core import LOG_LEVELS
from trio_mcp.errors import NotDeclared, NotInThisRevision, RemoteProtocolError
from trio_mcp.transport import PathRefused
from trio_mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    Completion,
    EmbeddedResource,
    GetPromptResult,
    ImageContent,
    PromptMessage,
    ReadResourceResult,
    ResourceLink,
    TextResourceContents,
    Tool,
)

Object = dict[str, Any]

SECRET = "hunter2"
PNG = b"\x89PNG"
GENERIC = "failed; the server's log says why"


# A server with one handler, which the test defines.


class ScriptedServer:
    """Each handler calls `action` with the context, and awaits the result if it is awaitable."""

    def __init__(self, **options: Any) -> None:
        self.action: Callable[[Context], Any] = lambda ctx: "done"
        self.server = Server("scripted", **options)
        self.server.tool(self.act)
        self.server.prompt(self.act)
        self.server.resource("act://now", name="now")(self.act_without)
        self.server.resource("acts://{text}", name="each")(self.act)
        self.server.completion("act", "text")(self.complete)

    async def act(self, text: str = "", *, ctx: Context) -> Any:
        return await self.act_without(ctx=ctx)

    async def act_without(self, *, ctx: Context) -> Any:
        done = self.action(ctx)
        return await done if hasattr(done, "__await__") else done

    async def complete(self, value: str, ctx: Context) -> Any:
        return await self.act_without(ctx=ctx)


SURFACES: dict[str, tuple[str, Object]] = {
    "tool": ("tools/call", {"name": "act", "arguments": {"text": SECRET}}),
    "prompt": ("prompts/get", {"name": "act", "arguments": {"text": SECRET}}),
    "resource": ("resources/read", {"uri": "act://now"}),
    "template": ("resources/read", {"uri": "acts://here"}),
    "completion": (
        "completion/complete",
        {"ref": {"type": "ref/prompt", "name": "act"}, "argument": {"name": "text", "value": SECRET}},
    ),
}
each_surface = pytest.mark.parametrize("surface", SURFACES)


async def ask(wire: RawClient, surface: str) -> Object:
    method, params = SURFACES[surface]
    return await wire.call(method, params)


async def still_works(wire: RawClient, scripted: ScriptedServer) -> None:
    scripted.action = lambda ctx: "fine"
    assert (await ask(wire, "tool"))["content"] == [{"type": "text", "text": "fine"}]


def text_of(result: Object) -> str:
    return "\n".join(block["text"] for block in result["content"] if block["type"] == "text")


# Exceptions of handlers: each row of the table in `dispatch`.

Outcome = tuple[int | None, str]
"""The answer to the client: the code of the error (None: a result with isError), and a part of its text."""


def raising(error: Any) -> Callable[[Context], Any]:
    def do(ctx: Context) -> Any:
        raise error() if callable(error) else error

    return do


async def with_nursery(ctx: Context, *errors: Callable[[], BaseException]) -> None:
    def fail(error: Callable[[], BaseException]) -> None:
        raise error()

    async def child(error: Callable[[], BaseException]) -> None:
        fail(error)

    async with trio.open_nursery() as nursery:
        for error in errors:
            nursery.start_soon(child, error)


def secret_error() -> ValueError:
    return ValueError(SECRET)


UNDECLARED = NotDeclared("sampling/createMessage", "client", ("sampling",))
CLIENT_ERRORS: dict[str, tuple[Callable[[Context], Any], Callable[[bool], tuple[Outcome, Outcome]]]] = {
    # The action of the handler and, by era, the outcomes of a tool and of the other handlers.
    "a RequestError": (
        raising(lambda: RequestError(4711, "sold out", {"left": 0})),
        lambda modern: ((4711, "sold out"), (4711, "sold out")),
    ),
    "a RequestError in a nursery": (
        lambda ctx: with_nursery(ctx, lambda: RequestError(4711, "sold out")),
        lambda modern: ((4711, "sold out"), (4711, "sold out")),
    ),
    "a ResourceNotFound": (
        raising(lambda: ResourceNotFound("x://y")),
        lambda modern: ((-32602 if modern else -32002, "not found: 'x://y'"),) * 2,
    ),
    "a ToolError": (
        raising(lambda: ToolError(["sold", image(PNG, mime_type="image/png"), "out"])),
        lambda modern: ((None, "sold\nout"), (-32603, "sold\nout")),
    ),
    "a NotDeclared": (
        raising(UNDECLARED),
        lambda modern: (
            ((-32021, "sampling"),) * 2 if modern else ((None, "client capability sampling"), (-32603, "sampling"))
        ),
    ),
    "a NotInThisRevision": (
        raising(NotInThisRevision("roots/list", "2026-07-28")),
        lambda modern: ((None, "roots/list does not exist in"), (-32603, "does not exist in")),
    ),
    "a PathRefused": (
        raising(PathRefused("it leads outside")),
        lambda modern: ((None, "it leads outside"), (-32602, "it leads outside")),
    ),
    "a RemoteProtocolError": (
        raising(RemoteProtocolError("the answer has no action")),
        lambda modern: ((None, "no action"), (-32603, "no action")),
    ),
}


@req("core-31", "tool-30")
@every_revision
@each_surface
@pytest.mark.parametrize("case", CLIENT_ERRORS)
async def test_errors_meant_for_the_client_reach_it_and_not_the_log(
    case: str, surface: str, revision: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    scripted.action, told = CLIENT_ERRORS[case]
    code, text = told(revision == LATEST)[surface != "tool"]
    async with connected(scripted.server, revision) as wire:
        if code is None:
            result = await ask(wire, surface)
            assert result["isError"] is True
            assert text in text_of(result)
        else:
            with pytest.raises(ErrorResponse) as refused:
                await ask(wire, surface)
            assert (refused.value.code, text in refused.value.message) == (code, True)
        await still_works(wire, scripted)
    assert not caplog.records
    assert not any(SECRET.encode() in line for line in wire.lines)


@every_revision
async def test_the_data_of_an_error_reaches_the_client(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    scripted.action = raising(lambda: RequestError(4711, "sold out", {"left": 0}))
    async with connected(scripted.server, revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await ask(wire, "tool")
    assert refused.value.data == {"left": 0}


@modern
async def test_the_error_names_the_capability_that_is_not_declared(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    scripted.action = raising(UNDECLARED)
    async with connected(scripted.server, revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await ask(wire, "prompt")
    assert refused.value.data == {"requiredCapabilities": {"sampling": {}}}


TOOL_ERRORS: dict[str, tuple[Callable[[Context], Any], str]] = {
    "text": (raising(lambda: ToolError("sold out")), "sold out"),
    "blocks": (raising(lambda: ToolError([TextContent("sold"), "out"])), "sold\nout"),
    "in a nursery": (lambda ctx: with_nursery(ctx, lambda: ToolError("sold out")), "sold out"),
    "in groups of one": (
        raising(lambda: ExceptionGroup("", [ExceptionGroup("", [ToolError("sold out")])])),
        "sold out",
    ),
}


@pytest.mark.contract
@req("tool-30")
@every_revision
@pytest.mark.parametrize("case", TOOL_ERRORS)
async def test_a_tool_error_is_a_result_that_the_model_sees(
    case: str, revision: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    scripted.action, text = TOOL_ERRORS[case]
    async with connected(scripted.server, revision) as wire:
        result = await ask(wire, "tool")
        await still_works(wire, scripted)
    assert (result["isError"], text_of(result)) == (True, text)
    assert not caplog.records


def cycle() -> Object:
    made: Object = {}
    made["itself"] = made
    return made


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(100_000):
        made = [made]
    return made


NOT_JSON: dict[str, Callable[[], Any]] = {
    "a lone surrogate": lambda: ["a\ud800"],
    "NaN": lambda: {"x": math.nan},
    "infinity": lambda: [math.inf],
    "a huge integer": lambda: 10**5000,
    "a cycle": cycle,
    "a great depth": deep,
    "an object": object,
    "an object inside": lambda: {"a": [object()]},
}
FAILURES: dict[str, Callable[[Context], Any]] = {
    "an exception": raising(secret_error),
    "an exception with a cause": raising(lambda: KeyError(SECRET).with_traceback(None)),
    "an exception in a nursery": lambda ctx: with_nursery(ctx, secret_error),
    "two exceptions": lambda ctx: with_nursery(ctx, secret_error, secret_error),
    "a group": raising(lambda: ExceptionGroup(SECRET, [secret_error(), ToolError(SECRET)])),
    "a call to exit": raising(lambda: SystemExit(SECRET)),
    "a call to exit in a nursery": lambda ctx: with_nursery(ctx, lambda: SystemExit(SECRET), secret_error),
    "a UsageError": raising(lambda: UsageError(SECRET)),
    "a timeout": raising(trio.TooSlowError),
    "a RequestError with a string as code": raising(lambda: RequestError("4711", "sold out")),  # type: ignore[arg-type]
    "a RequestError without a message": raising(lambda: RequestError(4711, None)),  # type: ignore[arg-type]
    "a RequestError with an object": raising(lambda: RequestError(4711, "sold out", object())),
    "a ToolError of an exception": raising(lambda: ToolError(secret_error())),  # type: ignore[arg-type]
    "a ToolError of numbers": raising(lambda: ToolError([1])),  # type: ignore[list-item]
    "a ToolError with a lone surrogate": raising(lambda: ToolError("\ud800")),
    **{case: (lambda ctx, make=make: make()) for case, make in NOT_JSON.items()},
}


async def test_a_tool_error_with_only_an_image_is_logged_outside_of_tools(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    scripted.action = raising(lambda: ToolError([image(PNG, mime_type="image/png")]))
    async with connected(scripted.server, LATEST) as wire:
        with pytest.raises(ErrorResponse, match=GENERIC):
            await ask(wire, "prompt")
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert (await ask(wire, "tool"))["isError"] is True


@pytest.mark.contract
@req("core-31", "log-06", "prm-08", "res-05", "res-07", "cmpl-06")
@every_revision
@each_surface
@pytest.mark.parametrize("case", FAILURES)
async def test_a_failure_is_logged_and_the_client_gets_no_details(
    case: str, surface: str, revision: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    scripted.action = FAILURES[case]
    async with connected(scripted.server, revision) as wire:
        if surface == "tool":
            result = await ask(wire, surface)
            assert (result["isError"], text_of(result)) == (True, f"tools/call 'act' {GENERIC}")
        else:
            with pytest.raises(ErrorResponse, match=GENERIC) as refused:
                await ask(wire, surface)
            assert refused.value.code == -32603
        await still_works(wire, scripted)
    assert not any(SECRET.encode() in line for line in wire.lines)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("trio_mcp", logging.ERROR)
    assert record.exc_info or "failed: " in record.getMessage()
    assert SECRET not in record.getMessage()


async def test_the_log_says_that_handlers_run_on_trio(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def sleep(ctx: Context) -> None:
        await asyncio.sleep(1)

    scripted = ScriptedServer()
    scripted.action = sleep
    async with connected(scripted.server, LATEST) as wire:
        assert text_of(await ask(wire, "tool")) == f"tools/call 'act' {GENERIC}"
    (record,) = caplog.records
    assert record.exc_info is not None
    failed = record.exc_info[1]
    assert type(failed) is RuntimeError
    assert failed.__notes__ == ["handlers run on Trio: use `await trio.sleep(1)`, or asyncio.run in a def handler"]


async def test_an_invalid_return_value_is_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    scripted.action = lambda ctx: float("nan")
    async with connected(scripted.server, LATEST) as wire:
        assert (await ask(wire, "tool"))["isError"]
    (record,) = caplog.records
    assert not record.exc_info  # a traceback would have only frames of the library
    why = "a float that is not finite has no JSON form; use None"
    assert record.getMessage() == f"tools/call 'act' failed: the result of the tool 'act': {why}"


@every_revision
@pytest.mark.parametrize("error", [KeyboardInterrupt, lambda: BaseExceptionGroup("", [KeyboardInterrupt()])])
async def test_a_keyboard_interrupt_ends_the_server(revision: str, error: Any, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    scripted.action = raising(error)
    ended: list[BaseException] = []

    async def serve(server: Server, stream: trio.abc.Stream) -> None:
        from trio_mcp import serve_stream

        try:
            await serve_stream(server, stream)
        except BaseException as error:  # noqa: BLE001
            ended.append(error)

    async with connected(scripted.server, revision, serve=serve) as wire:
        await wire.start(*SURFACES["tool"])
        await wire.ended.wait()
    (error,) = ended
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, KeyboardInterrupt)


@until("2024-11-05")
async def test_a_tool_error_with_a_block_of_a_later_revision_names_the_revision(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    scripted.action = raising(lambda: ToolError([AudioContent(PNG, "audio/wav")]))
    async with connected(scripted.server, revision) as wire:
        result = await ask(wire, "tool")
        await still_works(wire, scripted)
    assert result["isError"] is True
    assert "2024-11-05" in text_of(result)


# Return values of handlers, on the wire.


@dataclass
class Forecast:
    city: str
    degrees: float


def text(value: str) -> Object:
    return {"content": [{"type": "text", "text": value}]}


def structured(value: Any, written: str, *, object: bool) -> Callable[[str], Object]:
    """Structured content exists from 2025-06-18 on.  Before 2026-07-28, a value that is not an object is wrapped."""

    def expected(revision: str) -> Object:
        if revision < "2025-06-18":
            return text(written)
        return {**text(written), "structuredContent": value if object or revision == LATEST else {"result": value}}

    return expected


def returns_text() -> str:
    return "sunny"


def returns_nothing() -> None:
    return None


def returns_bytes() -> bytes:
    return PNG


def returns_a_number() -> int:
    return 3


def returns_a_list() -> list[int]:
    return [1, 2]


def returns_a_record() -> Forecast:
    return Forecast("Oslo", 3.5)


def returns_untyped():
    return {"a": None}


def returns_blocks() -> list[Any]:
    return ["look", image(PNG, mime_type="image/png"), file(b"hi", uri="notes://a", mime_type="text/plain")]


def returns_a_link() -> ResourceLink:
    return ResourceLink("a", "notes://a")


def returns_sound() -> AudioContent:
    return AudioContent(PNG, "audio/wav")


def returns_a_result() -> CallToolResult:
    return CallToolResult([TextContent("no")], is_error=True)


def returns_optional() -> Forecast | None:
    return None


BYTES = {"uri": "tool://returns_bytes/result", "mimeType": "application/octet-stream", "blob": "iVBORw=="}
HI = {"uri": "notes://a", "mimeType": "text/plain", "text": "hi"}
RETURNED: dict[Callable[[], Any], Callable[[str], Object | None]] = {
    # None: not in this revision.
    returns_text: lambda revision: text("sunny"),
    returns_nothing: lambda revision: {"content": []},
    returns_bytes: lambda revision: {"content": [{"type": "resource", "resource": BYTES}]},
    returns_a_number: structured(3, "3", object=False),
    returns_a_list: structured([1, 2], "[1, 2]", object=False),
    returns_a_record: structured({"city": "Oslo", "degrees": 3.5}, '{"city": "Oslo", "degrees": 3.5}', object=True),
    returns_untyped: lambda revision: text('{"a": null}'),
    returns_blocks: lambda revision: {
        "content": [
            {"type": "text", "text": "look"},
            {"type": "image", "data": "iVBORw==", "mimeType": "image/png"},
            {"type": "resource", "resource": HI},
        ]
    },
    returns_a_link: lambda revision: (
        {"content": [{"type": "resource_link", "name": "a", "uri": "notes://a"}]} if revision >= "2025-06-18" else None
    ),
    returns_sound: lambda revision: (
        {"content": [{"type": "audio", "data": "iVBORw==", "mimeType": "audio/wav"}]}
        if revision >= "2025-03-26"
        else None
    ),
    returns_a_result: lambda revision: {**text("no"), "isError": True},
    returns_optional: structured(None, "null", object=False),
}


def plain(result: Object) -> Object:
    """The result without the members that every modern result has."""
    return {key: value for key, value in result.items() if key not in ("resultType", "_meta", "ttlMs", "cacheScope")}


@pytest.mark.contract(function=(returns_a_record, returns_blocks))
@req("tool-05", "tool-11", "tool-13", "tool-14", "tool-34", "tool-35")
@every_revision
@pytest.mark.parametrize("function", RETURNED, ids=lambda function: function.__name__)
async def test_the_return_value_of_a_tool_is_its_result(
    function: Callable[[], Any], revision: str, autojump_clock: MockClock
) -> None:
    server = Server("returning")
    server.tool(function)
    expected = RETURNED[function](revision)
    async with connected(server, revision) as wire:
        await wire.call("tools/list")  # its schemas are those of the revision
        result = await wire.call("tools/call", {"name": function.__name__})
    if expected is None:
        assert result["isError"] is True
        assert f"does not exist in {revision}" in text_of(result)
    else:
        assert plain(result) == expected


@pytest.mark.contract
@req("res-12", "res-17")
@every_revision
async def test_return_values_of_prompts_resources_and_completions(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    contents = [TextResourceContents("act://now/1", "one"), TextResourceContents("act://now/2", "two")]
    written = [{"uri": "act://now/1", "text": "one"}, {"uri": "act://now/2", "text": "two"}]
    said = {"type": "text", "text": "hi"}
    cases: list[tuple[str, Any, Object]] = [
        ("prompt", "hi", {"messages": [{"role": "user", "content": said}]}),
        (
            "prompt",
            PromptMessage("assistant", TextContent("hi")),
            {"messages": [{"role": "assistant", "content": said}]},
        ),
        (
            "prompt",
            GetPromptResult([PromptMessage("user", TextContent("hi"))], description="of now"),
            {"messages": [{"role": "user", "content": said}], "description": "of now"},
        ),
        ("resource", "hi", {"contents": [{"uri": "act://now", "mimeType": "text/plain", "text": "hi"}]}),
        (
            "resource",
            PNG,
            {"contents": [{"uri": "act://now", "mimeType": "application/octet-stream", "blob": "iVBORw=="}]},
        ),
        (
            "template",
            {"a": 1},
            {"contents": [{"uri": "acts://here", "mimeType": "application/json", "text": '{"a": 1}'}]},
        ),
        ("resource", contents, {"contents": written}),
        ("resource", ReadResourceResult(contents), {"contents": written}),
        ("completion", ["a", "b"], {"completion": {"values": ["a", "b"], "total": 2, "hasMore": False}}),
        ("completion", Completion(["a"], has_more=True), {"completion": {"values": ["a"], "hasMore": True}}),
    ]
    async with connected(scripted.server, revision) as wire:
        for surface, value, expected in cases:
            scripted.action = lambda ctx, value=value: value
            assert plain(await ask(wire, surface)) == expected


@req("prm-05", "prm-06", "prm-07", "prm-16")
@every_revision
async def test_a_prompt_may_have_images_audio_files_and_links(revision: str, autojump_clock: MockClock) -> None:
    cases: list[tuple[Any, str, Object]] = [
        (
            image(PNG, mime_type="image/png"),
            "2024-11-05",
            {"type": "image", "data": "iVBORw==", "mimeType": "image/png"},
        ),
        (AudioContent(PNG, "audio/wav"), "2025-03-26", {"type": "audio", "data": "iVBORw==", "mimeType": "audio/wav"}),
        (file(b"hi", uri="notes://a", mime_type="text/plain"), "2024-11-05", {"type": "resource", "resource": HI}),
        (
            EmbeddedResource(BlobResourceContents("notes://b", PNG)),
            "2024-11-05",
            {
                "type": "resource",
                "resource": {"uri": "notes://b", "mimeType": "application/octet-stream", "blob": "iVBORw=="},
            },
        ),
        (
            ResourceLink("a", "notes://a"),
            "2025-06-18",
            {"type": "resource_link", "name": "a", "uri": "notes://a"},
        ),
    ]
    scripted = ScriptedServer()
    async with connected(scripted.server, revision) as wire:
        for value, first, expected in cases:
            scripted.action = lambda ctx, value=value: value
            if revision < first:
                with pytest.raises(ErrorResponse, match=f"does not exist in {revision}"):
                    await ask(wire, "prompt")
            else:
                (message,) = (await ask(wire, "prompt"))["messages"]
                assert message == {"role": "user", "content": expected}


@req("prm-05", "prm-06", "prm-07")
@every_revision
@pytest.mark.parametrize(
    "block",
    [
        ImageContent(PNG, "png"),
        AudioContent(PNG, "audio"),
        EmbeddedResource(BlobResourceContents("notes", PNG)),
        EmbeddedResource(TextResourceContents("", "hi")),
    ],
    ids=["an image", "audio", "a file", "a text"],
)
async def test_a_prompt_with_an_invalid_media_type_or_uri_is_not_sent(
    block: Any, revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    scripted.action = lambda ctx: block
    async with connected(scripted.server, revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await ask(wire, "prompt")
        assert refused.value.code == -32603
        await still_works(wire, scripted)


@req("res-09")
@every_revision
@pytest.mark.parametrize("value", [None, [], ReadResourceResult([])], ids=["None", "an empty list", "no contents"])
async def test_a_resource_without_contents_is_an_error(
    value: Any, revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    scripted = ScriptedServer()
    scripted.action = lambda ctx: value
    async with connected(scripted.server, revision) as wire:
        if value == []:  # an empty list is data
            assert (await ask(wire, "resource"))["contents"][0]["text"] == "[]"
        else:
            with pytest.raises(ErrorResponse) as refused:
                await ask(wire, "resource")
            assert refused.value.code == -32603


# Faults of clients.


class Counting:
    """A server with handlers that count their calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.server = Server("counting")

        @self.server.tool
        async def add(number: int, to: int = 0) -> int:
            self.calls += 1
            return number + to

        @self.server.prompt
        async def greet(name: str, greeting: str = "Hello") -> str:
            self.calls += 1
            return f"{greeting}, {name}"

        @self.server.resource("notes://{name}")
        async def note(name: str) -> str:
            self.calls += 1
            return name


ARGUMENTS_REFUSED: list[Any] = [
    {},
    {"number": "3"},
    {"number": True},
    {"number": 3.5},
    {"number": None},
    {"number": 3, "more": 1},
    {"number": [SECRET]},
]


@pytest.mark.contract
@req("tool-06", "tool-32", "tool-33")
@every_revision
@pytest.mark.parametrize("arguments", ARGUMENTS_REFUSED, ids=str)
async def test_invalid_arguments_never_reach_a_tool(
    arguments: Any, revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    counting = Counting()
    async with connected(counting.server, revision) as wire:
        call = wire.call("tools/call", {"name": "add", "arguments": arguments})
        if revision >= "2025-11-25":
            result = await call
            assert result["isError"] is True
            assert "structuredContent" not in result
            said = text_of(result)
        else:
            with pytest.raises(ErrorResponse) as refused:
                await call
            assert refused.value.code == -32602
            said = refused.value.message
        assert ("number" in said) or ("more" in said)  # the message names the argument
    assert counting.calls == 0
    assert not caplog.records
    assert SECRET not in said


MALFORMED: list[tuple[str, Object]] = [
    ("tools/call", {}),
    ("tools/call", {"name": 3}),
    ("tools/call", {"name": None}),
    ("tools/call", {"name": ["add"]}),
    ("tools/call", {"name": "add", "arguments": []}),
    ("tools/call", {"name": "add", "arguments": "3"}),
    ("prompts/get", {}),
    ("prompts/get", {"name": {}}),
    ("prompts/get", {"name": "greet", "arguments": ["Ada"]}),
    ("prompts/get", {"name": "greet", "arguments": {"name": 3}}),
    ("prompts/get", {"name": "greet", "arguments": {"name": None}}),
    ("resources/read", {}),
    ("resources/read", {"uri": 3}),
    ("completion/complete", {}),
    ("completion/complete", {"ref": "greet", "argument": {"name": "name", "value": ""}}),
    ("completion/complete", {"ref": {"type": "ref/tool", "name": "add"}, "argument": {"name": "name", "value": ""}}),
    ("completion/complete", {"ref": {"type": ["ref/prompt"], "name": "greet"}, "argument": {}}),
    ("completion/complete", {"ref": {"type": "ref/prompt"}, "argument": {"name": "name", "value": ""}}),
    ("completion/complete", {"ref": {"type": "ref/prompt", "name": "greet"}}),
    ("completion/complete", {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "name"}}),
    ("completion/complete", {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": 1, "value": ""}}),
    *(
        (
            "completion/complete",
            {
                "ref": {"type": "ref/prompt", "name": "greet"},
                "argument": {"name": "name", "value": ""},
                "context": context,
            },
        )
        for context in (3, [1], {"arguments": 3}, {"arguments": {"greeting": 3}})
    ),
    *((method, {"cursor": 3}) for method in ("tools/list", "prompts/list", "resources/list")),
]
UNKNOWN: list[tuple[str, Object]] = [
    ("tools/call", {"name": "Add", "arguments": {"number": 3}}),  # tool-18
    ("tools/call", {"name": ""}),
    ("tools/call", {"name": "x" * 5000}),
    ("prompts/get", {"name": "nobody"}),
    ("prompts/get", {"name": "greet"}),
    ("prompts/get", {"name": "greet", "arguments": {"greeting": "Hi"}}),
    ("prompts/get", {"name": "greet", "arguments": {"name": "Ada", "more": ""}}),
    ("completion/complete", {"ref": {"type": "ref/prompt", "name": "no"}, "argument": {"name": "name", "value": ""}}),
    ("completion/complete", {"ref": {"type": "ref/resource", "uri": "no:"}, "argument": {"name": "a", "value": ""}}),
    ("completion/complete", {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "no", "value": ""}}),
]


@pytest.mark.contract
@req(
    "core-30", "tool-18", "tool-31", "tool-33", "prm-08", "prm-09", "prm-17", "cmpl-02", "cmpl-04", "cmpl-06", "cmpl-08"
)
@every_revision
@pytest.mark.parametrize(("method", "params"), [*MALFORMED, *UNKNOWN], ids=lambda value: str(value)[:60])
async def test_a_malformed_or_unknown_request_is_refused(
    method: str, params: Object, revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    counting = Counting()
    counting.server.completion(lambda value: [value])
    async with connected(counting.server, revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await wire.call(method, params)
        assert refused.value.code == -32602
        assert len(refused.value.message) < 300
        result = await wire.call("tools/call", {"name": "add", "arguments": {"number": 3}})
        assert text_of(result) == "3"
    assert counting.calls == 1
    assert not caplog.records


@pytest.mark.contract
@req("res-05", "res-06", "res-09", "res-10")
@every_revision
@pytest.mark.parametrize(
    "uri", ["nothing://here", "notes:/a", "notes://", "notes://a/b", "notes://..%2Fa", "", " notes://a", "x" * 10_000]
)
async def test_an_unknown_resource_is_not_found(
    uri: str, revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    counting = Counting()
    async with connected(counting.server, revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await wire.call("resources/read", {"uri": uri})
        assert refused.value.code == (-32602 if revision == LATEST else -32002)
        assert refused.value.data == {"uri": uri}
        assert plain(await wire.call("resources/read", {"uri": "notes://a"}))["contents"][0]["text"] == "a"
    assert not caplog.records


@pytest.mark.contract
@req("core-32", "arch-02", "prm-11", "cmpl-06")
@every_revision
@pytest.mark.parametrize("surface", ["prompt", "resource", "completion"])
async def test_a_method_of_an_absent_feature_is_not_found(
    surface: str, revision: str, autojump_clock: MockClock
) -> None:
    server = Server("bare")
    server.tool(returns_text)
    async with connected(server, revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await ask(wire, surface)
    # cmpl-10: 2024-11-05 has no capability for completion.
    undeclared = surface == "completion" and revision == "2024-11-05"
    assert refused.value.code == (-32602 if undeclared else -32601)


# Arbitrary JSON.

_METHODS = (
    "initialize", "ping", "server/discover", "tools/list", "tools/call", "prompts/list", "prompts/get",
    "resources/list", "resources/templates/list", "resources/read", "resources/subscribe", "resources/unsubscribe",
    "completion/complete", "logging/setLevel", "subscriptions/listen", "tasks/get", "nothing/such",
)  # fmt: skip
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**4000) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
# Plausible values by the name of the parameter.  Each parameter has one of them, other JSON, or is absent.
_PLAUSIBLE: dict[str, list[Any]] = {
    "name": ["act", "nobody"],
    "uri": ["act://now", "acts://here", "acts://", "nothing://"],
    "arguments": [{}, {"text": "hi"}, {"text": 3}],
    "ref": [{"type": "ref/prompt", "name": "act"}, {"type": "ref/resource", "uri": "acts://{text}"}],
    "argument": [{"name": "text", "value": ""}, {"name": "text"}],
    "context": [{"arguments": {"text": "a"}}],
    "level": ["info", "loud"],
    "cursor": ["", "YQ==.Yg=="],
    "notifications": [{"toolsListChanged": True}, {"resourceSubscriptions": ["act://now"]}],
    "protocolVersion": ["2025-06-18", "2026-07-28"],
    "capabilities": [{}],
    "clientInfo": [{"name": "wire", "version": "1"}],
    "requestState": ["", "x"],
    "inputResponses": [{}, {"form": {"action": "accept"}}],
    "_meta": [{}, {"progressToken": 1}, {"traceparent": 1}],
}
_PARAMS = _JSON | st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(sense) | _JSON for name, sense in _PLAUSIBLE.items()}
)


@req("core-30", "core-31", "meta-01")
@every_revision
@hypothesis.settings(max_examples=100)
@hypothesis.given(calls=st.lists(st.tuples(st.sampled_from(_METHODS), _PARAMS), min_size=1, max_size=8))
def test_any_params_get_one_answer_and_no_internal_error(revision: str, calls: list[tuple[str, Any]]) -> None:
    failures: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: failures.append(handler.format(record))  # type: ignore[method-assign]

    async def scenario() -> None:
        scripted = ScriptedServer()
        scripted.action = lambda ctx: ["fine"] if ctx.method == "completion/complete" else "fine"
        async with connected(scripted.server, revision) as wire:
            for number, (method, params) in enumerate(calls):
                await answered_once(wire, f"any-{number}", method, params)
            await still_works(wire, scripted)

    log = logging.getLogger("trio_mcp")
    log.addHandler(handler)
    try:
        trio.run(scenario, clock=MockClock(autojump_threshold=0))
    finally:
        log.removeHandler(handler)
    assert not failures


async def answered_once(wire: RawClient, id: str, method: str, params: Any) -> None:
    message = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
    if wire.modern and isinstance(params, dict) and isinstance(params.get("_meta", {}), dict):
        message["params"] = wire.request(method, params, id=id)["params"]
    elif wire.modern and method == "ping":
        return  # a ping without the metadata is a request of the legacy era
    wire.post(message)
    # All answers come at once.  The answer to this request comes after them.
    await wire.call("tools/list")
    await wait_all_tasks_blocked()
    answers = [each for each in wire.messages if each.get("id") == id]
    if method == "subscriptions/listen" and not answers:
        assert wire.modern  # the server acknowledged it instead, and `wire` has checked that
    else:
        (answer,) = answers
        assert answer.get("error", {}).get("code", -32602) in (-32600, -32601, -32602, -32002, -32022)


# Completion.


def complete(surface: str, value: str = "", **context: str) -> Object:
    ref = {"type": "ref/prompt", "name": "greet"} if surface == "prompt" else {"type": "ref/resource", "uri": surface}
    params: Object = {"ref": ref, "argument": {"name": "name", "value": value}}
    return {**params, "context": {"arguments": context}} if context else params


@pytest.mark.contract
@req("cmpl-01", "cmpl-04", "cmpl-07", "cmpl-08", "cmpl-10")
@every_revision
async def test_completion_gives_the_first_hundred_in_the_handler_s_order(
    revision: str, autojump_clock: MockClock
) -> None:
    counting = Counting()
    names = [f"{number * 7 % 250:03}" for number in range(250)]

    @counting.server.completion("greet", "name")
    async def name(value: str, arguments: dict[str, str], argument: str, ref: Any, ctx: Context) -> list[str]:
        assert (argument, ctx.method) == ("name", "completion/complete")
        found = [each for each in names if each.startswith(value)]
        return [arguments["greeting"], ref.name, *found] if arguments else found

    @counting.server.completion("notes://{name}")
    def note(value: str) -> list[str]:
        return [value + value]

    async def values(params: Object) -> Object:
        result: Object = (await wire.call("completion/complete", params))["completion"]
        return result

    async with connected(counting.server, revision) as wire:
        assert await values(complete("prompt")) == {"values": names[:100], "total": 250, "hasMore": True}
        few = [each for each in names if each.startswith("24")]
        assert await values(complete("prompt", "24")) == {"values": few, "total": 10, "hasMore": False}
        told = await values(complete("prompt", "240", greeting="Hi"))
        assert told["values"] == ["Hi", "greet", "240"]  # the handler gets the other arguments
        for uri in ("notes://{name}", "notes://a"):  # the template, or a URI that it matches
            assert (await values(complete(uri, "b")))["values"] == ["bb"]
        other = {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "greeting", "value": ""}}
        assert await values(other) == {"values": [], "total": 0, "hasMore": False}
        declared = (await wire.about())["capabilities"]
    assert ("completions" in declared) is (revision >= "2025-03-26")


@req("cmpl-07")
@every_revision
async def test_a_completion_never_has_more_than_a_hundred_values(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    values = [str(number) for number in range(101)]
    async with connected(scripted.server, revision) as wire:
        scripted.action = lambda ctx: Completion(values[:100], total=101, has_more=True)
        told = (await ask(wire, "completion"))["completion"]
        assert told == {"values": values[:100], "total": 101, "hasMore": True}
        scripted.action = lambda ctx: Completion(values)
        with pytest.raises(ErrorResponse) as refused:
            await ask(wire, "completion")
        assert refused.value.code == -32603


# The execution of handlers.


def server_that_records_threads() -> tuple[Server, list[Any]]:
    """A server with tools that record their thread and their context variable."""
    server, where = Server("running"), []

    def tell() -> None:
        where.append((threading.get_ident() == main, VARIABLE.get()))
        VARIABLE.set("a handler")

    main = threading.get_ident()

    @server.tool
    async def awaited() -> None:
        tell()

    @server.tool
    def in_a_thread() -> None:
        tell()

    @server.tool(thread=False)
    def inline() -> None:
        tell()

    server.add_tool(Tool("raw", {"type": "object"}), lambda ctx, arguments: tell())
    server.add_tool(Tool("raw_inline", {"type": "object"}), lambda ctx, arguments: tell(), thread=False)
    return server, where


VARIABLE = contextvars.ContextVar("variable", default="unset")


@every_revision
@pytest.mark.parametrize(
    ("name", "in_the_loop"),
    [("awaited", True), ("in_a_thread", False), ("inline", True), ("raw", False), ("raw_inline", True)],
)
async def test_a_handler_runs_as_declared_in_the_context_of_the_serving_task(
    name: str, in_the_loop: bool, revision: str, autojump_clock: MockClock
) -> None:
    server, where = server_that_records_threads()
    VARIABLE.set("the host")
    async with connected(server, revision) as wire:
        for _ in range(2):  # the second handler does not see the value that the first one sets
            assert plain(await wire.call("tools/call", {"name": name})) == {"content": []}
    assert where == [(in_the_loop, "the host")] * 2


@every_revision
async def test_each_connection_has_its_own_context_variables(revision: str, autojump_clock: MockClock) -> None:
    server = Server("small")
    seen: list[str] = []
    gate = trio.Event()

    @server.tool
    async def tell() -> None:
        seen.append(VARIABLE.get())
        VARIABLE.set("a handler")
        await gate.wait()

    async with server.running(), trio.open_nursery() as nursery:
        VARIABLE.set("one")
        async with connected(server, revision) as one:
            VARIABLE.set("two")
            async with connected(server, revision) as two:
                nursery.start_soon(one.call, "tools/call", {"name": "tell"})
                await wait_all_tasks_blocked()
                nursery.start_soon(two.call, "tools/call", {"name": "tell"})
                await wait_all_tasks_blocked()
                gate.set()
                await wait_all_tasks_blocked()
    assert seen == ["one", "two"]


class Blocking:
    """A tool in a thread that waits until the test sets `go_on`."""

    def __init__(self, *, abandon: bool = True, **options: Any) -> None:
        self.go_on = threading.Event()
        self.ended = threading.Event()
        self.server = Server("blocking", **options)
        self.started, self._begun = trio.open_memory_channel[None](math.inf)
        self.server.tool(abandon_on_cancel=abandon)(self.work)

    def work(self) -> str:
        trio.from_thread.run_sync(self.started.send_nowait, None)
        self.go_on.wait()
        self.ended.set()
        return "worked"

    async def begun(self) -> None:
        """Wait until one more thread has begun."""
        await self._begun.receive()

    def begun_now(self) -> int:
        return self._begun.statistics().current_buffer_used


@every_revision
async def test_the_number_of_busy_threads_is_limited(revision: str, autojump_clock: MockClock) -> None:
    blocking = Blocking(threads=2)
    async with connected(blocking.server, revision) as wire:
        ids = [await wire.start("tools/call", {"name": "work"}) for _ in range(5)]
        await blocking.begun()
        await blocking.begun()
        await wait_all_tasks_blocked()
        assert (blocking.begun_now(), blocking.server.statistics().running) == (0, 5)
        assert await wire.call("ping" if not wire.modern else "tools/list") is not None  # the loop is free
        blocking.go_on.set()
        for id in ids:
            assert text_of((await wire.response(id))["result"]) == "worked"


@req("cancel-03", "cancel-17", "cancel-18")
@every_revision
@pytest.mark.parametrize("abandon", [True, False])
async def test_a_cancelled_thread_is_abandoned_only_if_declared(
    abandon: bool, revision: str, autojump_clock: MockClock
) -> None:
    blocking = Blocking(abandon=abandon)
    async with connected(blocking.server, revision) as wire:
        id = await wire.start("tools/call", {"name": "work"})
        await blocking.begun()
        await wire.cancel(id)
        await wait_all_tasks_blocked()
        assert blocking.server.statistics().running == (0 if abandon else 1)
        assert not blocking.ended.is_set()
        blocking.go_on.set()
        while not blocking.ended.is_set():
            await trio.lowlevel.checkpoint()
        result = await wire.call("tools/call", {"name": "work"})
        assert text_of(result) == "worked"
        assert not wire.answered(id)
        await wait_all_tasks_blocked()
        assert blocking.server.statistics().running == 0


@pytest.mark.contract
@req("cancel-03", "cancel-07", "cancel-17", "cancel-18")
@every_revision
async def test_a_cancellation_reaches_one_handler_and_ends_its_messages(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    ends: list[Any] = []

    async def wait(ctx: Context) -> None:
        try:
            await ctx.progress(1)
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            ends.append((ctx.request_id, cancelled.reason))
            with trio.CancelScope(shield=True):
                await ctx.progress(2)
                await ctx.log("info", "too late")
            raise

    scripted.action = wait
    async with connected(scripted.server, revision, log_level="debug") as wire:
        one = await wire.start(*SURFACES["tool"], progress="one")
        two = await wire.start(*SURFACES["prompt"], progress="two")
        await wait_all_tasks_blocked()
        await wire.cancel(one, "changed my mind")
        await wait_all_tasks_blocked()
        assert ends == [(one, "changed my mind")]
        assert scripted.server.statistics().running == 1
        await wire.cancel(two)
        await wait_all_tasks_blocked()
        assert ends[1] == (two, "the client cancelled the request")
        await still_works(wire, scripted)
        assert not wire.answered(one)
        assert not wire.answered(two)
    assert [params["progress"] for params in wire.noted(PROGRESS)] == [1, 1]
    assert not wire.noted(MESSAGE)


@every_revision
@pytest.mark.parametrize(
    ("surface", "name"),
    [
        ("tool", "tools/call act #seven"),
        ("prompt", "prompts/get act #seven"),
        ("resource", "resources/read act://now #seven"),
        ("completion", "completion/complete  #seven"),
    ],
)
async def test_the_task_of_a_request_is_named_after_it(
    surface: str, name: str, revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    names: list[str] = []
    scripted.action = lambda ctx: names.append(trio.lowlevel.current_task().name) or ["fine"]
    async with connected(scripted.server, revision) as wire:
        method, params = SURFACES[surface]
        await wire.call(method, params, id="seven")
    assert names == [name]


# The context of a handler, progress and logs.


@req("meta-09")
@every_revision
@each_surface
async def test_each_handler_gets_the_facts_of_its_request(
    surface: str, revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    facts: list[Any] = []

    def know(ctx: Context) -> Any:
        facts.append((ctx.request_id, ctx.method, ctx.revision, ctx.client, ctx.principal, dict(ctx.headers)))
        facts.append((ctx.trace, ctx.meta["com.example/key"], ctx.lifespan))
        facts.append((ctx.supports("sampling"), ctx.supports("sampling", "tools"), ctx.supports("nothing")))
        return ["fine"]

    scripted.action = know
    trace = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "baggage": "a=b"}
    meta = {**trace, "tracestate": 3, "com.example/key": [None]}
    async with connected(scripted.server, revision) as wire:
        method, params = SURFACES[surface]
        await wire.call(method, params, id="seven", meta=meta)
    assert facts[0] == ("seven", method, revision, {"name": "wire", "version": "1"}, None, {})
    assert facts[1] == (trace, [None], None)
    assert facts[2] == (True, revision >= "2025-11-25", False)


@pytest.mark.contract(token=("token",))
@req("prog-01", "prog-03", "prog-04", "prog-05", "prog-06", "prog-09", "prog-10", "prog-14")
@every_revision
@each_surface
@pytest.mark.parametrize("token", [None, "token", 0, 7])
async def test_progress_is_sent_with_the_token_before_the_answer(
    token: Any, surface: str, revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()

    async def report(ctx: Context) -> Any:
        await ctx.progress(0)
        await ctx.progress(0.5, 2)
        await ctx.progress(2, 2, "nearly")
        return ["done"]

    scripted.action = report
    async with connected(scripted.server, revision) as wire:
        method, params = SURFACES[surface]
        await wire.call(method, params, progress=token)
    said = {} if revision == "2024-11-05" else {"message": "nearly"}
    told = [{"progress": 0}, {"progress": 0.5, "total": 2}, {"progress": 2, "total": 2, **said}]
    assert wire.noted(PROGRESS) == ([] if token is None else [{"progressToken": token, **each} for each in told])
    assert "result" in wire.messages[-1]


@req("prog-03")
@every_revision
@pytest.mark.parametrize("next", [0.5, math.nan, math.inf, True, "2"])
async def test_progress_that_falls_is_a_usage_error_and_not_sent(
    next: Any, revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()

    async def report(ctx: Context) -> str:
        await ctx.progress(1)
        with pytest.raises(UsageError, match="must be a number that rises"):
            await ctx.progress(next)
        await ctx.progress(1)  # the same number again is permitted
        await ctx.progress(1.5)
        return "fine"

    scripted.action = report
    async with connected(scripted.server, revision) as wire:
        method, params = SURFACES["tool"]
        assert text_of(await wire.call(method, params, progress=1)) == "fine"
    assert [params["progress"] for params in wire.noted(PROGRESS)] == [1, 1.5]


async def log_everything(ctx: Context) -> list[str]:
    for level in LOG_LEVELS:
        await ctx.log(level, {"level": level}, logger="tests")  # type: ignore[arg-type]
    return ["fine"]


@pytest.mark.contract(wanted=("warning",))
@req("log-01", "log-08", "log-09", "log-10", "log-11", "log-15")
@every_revision
@each_surface
@pytest.mark.parametrize("wanted", [None, *LOG_LEVELS])
async def test_log_messages_of_the_wanted_levels_are_sent_before_the_answer(
    wanted: str | None, surface: str, revision: str, autojump_clock: MockClock
) -> None:
    assert LOG_LEVELS == ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
    scripted = ScriptedServer()
    scripted.action = log_everything
    async with connected(scripted.server, revision, log_level=wanted) as wire:
        assert (await wire.about())["capabilities"]["logging"] == {}
        await ask(wire, surface)
    if wanted is None:
        levels = () if revision == LATEST else LOG_LEVELS
    else:
        levels = LOG_LEVELS[LOG_LEVELS.index(wanted) :]
    assert wire.noted(MESSAGE) == [{"level": each, "data": {"level": each}, "logger": "tests"} for each in levels]
    assert "result" in wire.messages[-1]


@pytest.mark.contract
@req("log-10", "log-12")
@modern
async def test_a_log_level_counts_only_for_its_request(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    gate = trio.Event()

    async def log(ctx: Context) -> str:
        await gate.wait()
        await ctx.log("info", ctx.request_id)
        return "fine"

    scripted.action = log
    level = {"io.modelcontextprotocol/logLevel": "debug"}
    method, params = SURFACES["tool"]
    async with connected(scripted.server, revision) as wire:
        await wire.subscribe(tools=True)
        ids = [await wire.start(method, params, meta=each) for each in ({}, level, {}, level)]
        gate.set()
        for id in ids:
            await wire.response(id)
    assert wire.noted(MESSAGE) == [{"level": "info", "data": ids[1]}, {"level": "info", "data": ids[3]}]


@pytest.mark.contract
@req("log-09")
@legacy
async def test_a_new_level_counts_for_running_requests(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    gate = trio.Event()

    async def log(ctx: Context) -> str:
        await ctx.log("info", "before")
        await gate.wait()
        await ctx.log("info", "after")
        await ctx.log("error", "after")
        return "fine"

    scripted.action = log
    async with connected(scripted.server, revision) as wire:
        id = await wire.start(*SURFACES["tool"])
        await wire.note(MESSAGE)
        await wire.set_level("error")
        gate.set()
        await wire.response(id)
    assert wire.noted(MESSAGE) == [{"level": "info", "data": "before"}, {"level": "error", "data": "after"}]


@req("log-03", "log-13", "log-15", "log-16")
@every_revision
@pytest.mark.parametrize("level", ["loud", "INFO", "", None, 3, ["info"], {}])
async def test_a_level_that_does_not_exist_is_refused(level: Any, revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with connected(scripted.server, revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await wire.call("logging/setLevel", {"level": level})
        assert refused.value.code == (-32601 if wire.modern else -32602)
        if wire.modern and level is not None:
            with pytest.raises(ErrorResponse) as refused:
                await wire.call("tools/list", meta={"io.modelcontextprotocol/logLevel": level})
            assert refused.value.code == -32602


@req("log-07")
@every_revision
@pytest.mark.parametrize(
    ("level", "data"), [("loud", "x"), ("info", object()), ("info", math.nan), ("info", "\ud800"), ("info", cycle())]
)
async def test_an_invalid_log_message_is_a_usage_error(
    level: Any, data: Any, revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()

    async def log(ctx: Context) -> str:
        with pytest.raises(UsageError):
            await ctx.log(level, data)
        return "fine"

    scripted.action = log
    async with connected(scripted.server, revision, log_level="debug") as wire:
        assert text_of(await ask(wire, "tool")) == "fine"
    assert not wire.noted(MESSAGE)


@req("log-14")
@every_revision
async def test_data_of_any_json_can_be_logged(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    values = [None, True, 3, 0.5, "ü\n", [], {}, {"a": [None]}]

    async def log(ctx: Context) -> str:
        for value in values:
            await ctx.log("info", value)
        return "fine"

    scripted.action = log
    async with connected(scripted.server, revision, log_level="debug") as wire:
        await ask(wire, "tool")
    assert wire.noted(MESSAGE) == [{"level": "info", "data": value} for value in values]
    assert "Deprecated in 2026-07-28" in (Context.log.__doc__ or "")


@every_revision
async def test_a_thread_can_report_progress_and_log(revision: str, autojump_clock: MockClock) -> None:
    server = Server("threads")

    @server.tool
    def work(ctx: Context) -> str:
        trio.from_thread.run(ctx.progress, 1)
        trio.from_thread.run(ctx.log, "info", "halfway")
        return "worked"

    async with connected(server, revision, log_level="info") as wire:
        assert text_of(await wire.call("tools/call", {"name": "work"}, progress="p")) == "worked"
    assert [method for method, _ in wire.notes] == [PROGRESS, MESSAGE]


@req("samp-10", "log-06")
@every_revision
@pytest.mark.parametrize("missing", [None, "model", "role", "content"])
async def test_sampling_messages_and_answers_are_not_logged(
    missing: str | None, revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    scripted = ScriptedServer()
    caplog.set_level(logging.DEBUG, "trio_mcp")
    said = {"role": "assistant", "model": "m", "content": {"type": "text", "text": SECRET}}
    answer = {name: value for name, value in said.items() if name != missing}

    async def sample(ctx: Context) -> str:
        await ctx.sample(SECRET, max_tokens=5)
        return "fine"

    scripted.action = sample
    answers = {"sampling/createMessage": lambda params: answer}
    async with connected(scripted.server, revision, answers=answers) as wire:
        if missing is None:
            assert text_of(await ask(wire, "tool")) == "fine"
        elif wire.modern:  # the client may retry with a valid answer
            with pytest.raises(ErrorResponse) as refused:
                await ask(wire, "tool")
            assert SECRET not in refused.value.message
        else:
            result = await ask(wire, "tool")
            assert result["isError"] is True
            assert SECRET not in text_of(result)
    assert SECRET not in caplog.text


@req("core-24")
@every_revision
@pytest.mark.parametrize("code", [-32042, -32002])
async def test_an_error_code_that_the_revision_forbids_is_replaced(
    code: int, revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    scripted.action = raising(lambda: RequestError(code, "sold out"))
    async with connected(scripted.server, revision) as wire:
        with pytest.raises(ErrorResponse, match="sold out") as refused:
            await ask(wire, "tool")
        kept = revision == "2025-11-25" if code == -32042 else not wire.modern
        assert (refused.value.code == code) is kept
