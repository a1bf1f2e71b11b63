"""Extensions of a server: methods, notifications, filters, mounting, and calls that continue without their request."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypedDict

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.requirements import req
from tests.server.checkpoints import one_byte_pipe
from tests.server.raw_client import (
    ACKNOWLEDGED,
    CAPABILITIES,
    ErrorResponse,
    RawClient,
    connected,
    every_revision,
    legacy,
    modern,
)
from trio_mcp import Context, Limits, RequestError, Server, TextContent, UsageError
from trio_mcp.core import (
    INVALID_PARAMS,
    META_SUBSCRIPTION_ID,
    METHOD_NOT_FOUND,
    MISSING_CLIENT_CAPABILITY,
    REVISIONS,
    Extension,
    ExtensionMethod,
    JsonObject,
    Question,
    Request,
    Role,
    Terms,
    ToolExecution,
)
from trio_mcp.errors import NotDeclared, NotInThisRevision
from trio_mcp.extensions import ClientExtension
from trio_mcp.server import ClientGone, DetachedCall, ExtensionRun, Listener
from trio_mcp.types import CallNext, Json, Tool

PING = "com.example/ping"
LATEST = "2026-07-28"


def declaring(revision: str, *ids: str, **settings: Any) -> dict[str, Any]:
    """The capabilities of a client with these extensions."""
    place = "extensions" if revision == LATEST else "experimental"
    return {**CAPABILITIES[revision], place: dict.fromkeys(ids or (PING,), settings)}


def without_protocol(result: JsonObject) -> JsonObject:
    return {name: value for name, value in result.items() if name not in ("_meta", "resultType")}


@dataclass
class Pong:
    target: str
    times: int = 1


class PingParams(TypedDict):
    target: str


def ping_server(**options: Any) -> Server:
    """A server with an extension and with methods of its own."""
    server = Server("pinging", **options)
    ext = server.extension(PING, settings={"loud": True})

    @ext.method(PING)
    async def ping(target: str, times: int = 1) -> Pong:
        return Pong(target, times)

    @server.method("com.example/whole")
    def whole(params: PingParams, ctx: Context) -> dict[str, Any]:
        return {"got": params["target"], "settings": ctx.extension(PING)}

    @server.method("com.example/nothing")
    async def nothing() -> None: ...

    @server.method("com.example/wrong")
    async def wrong() -> Any:
        return [1]

    return server


# Methods.


@pytest.mark.contract
@every_revision
async def test_a_method_takes_typed_params_and_gives_a_typed_result(revision: str, autojump_clock: MockClock) -> None:
    async with connected(ping_server(), revision, capabilities=declaring(revision)) as wire:
        result = await wire.call(PING, {"target": "moon", "of a later version": 1})
        assert without_protocol(result) == {"target": "moon", "times": 1}
        assert without_protocol(await wire.call("com.example/nothing")) == {}
        result = await wire.call("com.example/whole", {"target": "moon", "more": 1})
        assert without_protocol(result) == {"got": "moon", "settings": {}}
        for method, params in ((PING, {"target": 1}), (PING, {}), ("com.example/whole", {"target": None})):
            with pytest.raises(ErrorResponse) as caught:
                await wire.call(method, params)
            assert caught.value.code == INVALID_PARAMS
            assert "target" in caught.value.message


@req("ver-06", "type-19")
@pytest.mark.contract
@every_revision
async def test_a_client_without_the_extension_may_call_the_other_methods_only(
    revision: str, autojump_clock: MockClock
) -> None:
    place = "extensions" if revision == LATEST else "experimental"
    async with connected(ping_server(), revision) as wire:
        with pytest.raises(ErrorResponse) as caught:
            await wire.call(PING, {"target": "moon"})
        assert caught.value.code == MISSING_CLIENT_CAPABILITY
        assert caught.value.data == {"requiredCapabilities": {place: {PING: {}}}}
        result = await wire.call("com.example/whole", {"target": "moon"})
        assert without_protocol(result) == {"got": "moon", "settings": None}
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("com.example/unknown")
        assert caught.value.code == METHOD_NOT_FOUND
        declared = wire.opening if revision != LATEST else await wire.call("server/discover")
        assert declared["capabilities"][place] == {PING: {"loud": True}}


@modern
async def test_a_result_that_is_no_object_is_a_failure_of_the_server(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(ping_server(), revision) as wire:
        with pytest.raises(ErrorResponse, match="wrong failed"):
            await wire.call("com.example/wrong")
    assert "the result of com.example/wrong must be an object" in caplog.text


@every_revision
async def test_a_fallback_serves_all_other_methods(revision: str, autojump_clock: MockClock) -> None:
    server, noted = ping_server(), list[str]()

    @server.fallback
    async def forward(ctx: Context, method: str, params: JsonObject) -> JsonObject:
        noted.append(method)
        return {"method": method, "x": params.get("x")}

    async with connected(server, revision, check=False) as wire:
        assert without_protocol(await wire.call("org.example/any", {"x": 1})) == {"method": "org.example/any", "x": 1}
        await wire.notify("org.example/noted", {"_meta": wire._terms()} if revision == LATEST else {})
        await wait_all_tasks_blocked()
        assert without_protocol(await wire.call("com.example/nothing")) == {}
        assert noted == ["org.example/any", "org.example/noted"]
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("sampling/createMessage")
        assert caught.value.code == METHOD_NOT_FOUND


@req("ver-06")
@every_revision
async def test_a_required_extension_is_required_for_tools_too(revision: str, autojump_clock: MockClock) -> None:
    server = Server("strict")
    server.extension(PING, required=True)

    @server.tool
    async def work() -> str:
        return "worked"

    async with connected(server, revision) as wire:
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("tools/call", {"name": "work"})
        assert caught.value.code == MISSING_CLIENT_CAPABILITY
    async with connected(server, revision, capabilities=declaring(revision)) as wire:
        assert (await wire.call("tools/call", {"name": "work"}))["content"][0]["text"] == "worked"


@every_revision
async def test_an_extension_may_be_added_while_the_server_runs(revision: str, autojump_clock: MockClock) -> None:
    server = Server("growing")
    async with server.running(), connected(server, revision, capabilities=declaring(revision)) as wire:
        ext = server.extension(PING)

        @ext.method(PING)
        async def ping() -> None: ...

        assert without_protocol(await wire.call(PING)) == {}


# Messages to the client.


@every_revision
async def test_a_handler_notifies_on_the_stream_of_its_request(revision: str, autojump_clock: MockClock) -> None:
    server = Server("noting")

    @server.tool
    async def work(ctx: Context) -> str:
        assert await ctx.notify("com.example/said", Pong("moon"))
        return "worked"

    async with connected(server, revision, check=False) as wire:
        await wire.call("tools/call", {"name": "work"})
        assert await wire.note("com.example/said") == {"target": "moon", "times": 1}


@legacy
async def test_a_handler_may_send_a_request_with_a_custom_method(revision: str, autojump_clock: MockClock) -> None:
    server = Server("asking")

    @server.tool
    async def work(ctx: Context) -> list[Any]:
        plain = await ctx.send_request("com.example/ask", {"target": "moon"})
        typed = await ctx.send_request("com.example/ask", Pong("sun"), returns=Pong)
        return [plain, typed]

    async with connected(server, revision, check=False) as wire:
        wire.answers["com.example/ask"] = lambda params: {"target": params["target"], "times": 3}
        await wire.call("tools/call", {"name": "work"})
        assert [params["target"] for _, params in wire.asked] == ["moon", "sun"]


@modern
async def test_a_modern_server_sends_no_requests(revision: str, autojump_clock: MockClock) -> None:
    server, errors = Server("asking"), list[Exception]()

    @server.tool
    async def work(ctx: Context) -> None:
        with pytest.raises(NotInThisRevision):
            await ctx.send_request("com.example/ask")
        errors.append(NotInThisRevision("", ""))

    async with connected(server, revision) as wire:
        await wire.call("tools/call", {"name": "work"})
    assert errors


@every_revision
async def test_a_listed_notification_needs_the_declaration_of_the_client(
    revision: str, autojump_clock: MockClock
) -> None:
    server = Server("noting")
    server.extension(Extension(PING, methods=[ExtensionMethod("com.example/said", Role.SERVER, notification=True)]))

    @server.tool
    async def work(ctx: Context) -> str:
        try:
            await ctx.notify("com.example/said")
        except NotDeclared:
            return "not declared"
        return "sent"

    async def called(**how: Any) -> Any:
        async with connected(server, revision, check=False, **how) as wire:
            return (await wire.call("tools/call", {"name": "work"}))["content"][0]["text"]

    assert await called() == "not declared"
    assert await called(capabilities=declaring(revision)) == "sent"


# Notifications of the client.


async def send_notification(wire: RawClient, method: str, params: JsonObject | None = None) -> None:
    """Send a notification.  In the modern revision, it has the terms of the client."""
    meta = {"_meta": wire._terms()} if wire.modern else {}
    await wire.notify(method, {**(params or {}), **meta})
    await wait_all_tasks_blocked()


@pytest.mark.contract
@every_revision
async def test_a_notification_reaches_its_handler(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server, got = Server("hearing"), list[Any]()
    ext = server.extension(PING)

    @ext.notification("com.example/heard")
    async def on_heard(n: int, ctx: Context) -> None:
        await ctx.progress(n)
        await ctx.log("info", n)
        assert not await ctx.notify("com.example/echo") or revision != LATEST
        got.append(n)
        if n == 3:
            await ctx.elicit("Why?", str)

    caplog.set_level("INFO")
    async with connected(server, revision, capabilities=declaring(revision), check=False) as wire:
        await send_notification(wire, "com.example/heard", {"n": 1})
        await send_notification(wire, "com.example/heard", {"n": "wrong"})
        await send_notification(wire, "com.example/unheard-of")
        await send_notification(wire, "com.example/heard", {"n": 3})
        assert got == [1, 3]
        assert server.statistics().running == 0
    assert "the notification com.example/heard was refused: com.example/heard: params/n" in caplog.text
    assert revision < "2025-06-18" or "it has no answer, so its handler cannot ask the client" in caplog.text


@every_revision
@pytest.mark.parametrize("ends", ["input", "link"])
async def test_the_handler_of_a_notification_ends_with_its_client(
    revision: str, ends: str, autojump_clock: MockClock
) -> None:
    server, left = Server("hearing"), list[BaseException]()

    @server.notification("com.example/heard")
    async def on_heard() -> None:
        try:
            await trio.sleep_forever()
        except BaseException as error:
            left.append(error)
            raise

    async with connected(server, revision) as wire:
        await send_notification(wire, "com.example/heard")
        assert server.statistics().running == 1
        if ends == "input":
            await wire.close()
        else:
            await wire.stream.aclose()
    assert [type(error) for error in left] == [trio.Cancelled]


@legacy
async def test_a_busy_server_drops_notifications(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server, got = Server("busy", limits=Limits(calls=1)), list[int]()

    @server.notification("com.example/heard")
    async def on_heard(n: int) -> None:
        got.append(n)
        await trio.sleep(10)

    async with connected(server, revision) as wire:
        for n in range(3):
            await wire.notify("com.example/heard", {"n": n})
        await wait_all_tasks_blocked()
        assert got == [0]
        await trio.sleep(11)
        await wire.notify("com.example/heard", {"n": 3})
        await wait_all_tasks_blocked()
        assert got == [0, 3]
    assert caplog.text.count("the notification com.example/heard was dropped") == 2


# Results of known methods.


@req("rtype-02")
@modern
async def test_middleware_may_return_a_result_type_of_a_declared_extension(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server("later")
    ext = server.extension(Extension(PING, result_types={"tools/call": ["later"]}))

    @ext.middleware
    async def later(ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        result = await call_next()
        if ctx.method != "tools/call":
            return result
        return {**result, "resultType": "later", "more": 1}

    @server.tool
    async def work() -> str:
        return "worked"

    async with connected(server, revision, capabilities=declaring(revision), check=False) as wire:
        result = await wire.call("tools/call", {"name": "work"})
        assert (result["resultType"], result["more"]) == ("later", 1)
        assert "tools" in await wire.call("tools/list")
    async with connected(server, revision) as wire:
        result = await wire.call("tools/call", {"name": "work"})
        assert result["isError"]
    assert "no extension has it" in caplog.text


# Mounting.


@every_revision
async def test_methods_of_mounted_servers_are_served(revision: str, autojump_clock: MockClock) -> None:
    outer, first, second = Server("outer"), Server("first"), Server("second")
    seen: list[str] = []

    async def watch(ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        seen.append(request.method)
        return await call_next()

    for number, server in enumerate((first, second)):
        ext = server.extension(PING, settings={"of": number})

        async def find(id: int, number: int = number) -> dict[str, int]:
            if id != number:
                raise RequestError(INVALID_PARAMS, f"{number} does not know {id}")
            return {"by": number}

        ext.method("com.example/find")(find)
        ext.method(f"com.example/only-{number}")(lambda: {"only": 1})
        ext.middleware(watch)
        outer.mount(server, prefix=f"{number}_")

    async with connected(outer, revision, capabilities=declaring(revision)) as wire:
        place = "extensions" if revision == LATEST else "experimental"
        declared = wire.opening if revision != LATEST else await wire.call("server/discover")
        assert declared["capabilities"][place] == {PING: {"of": 0}}
        assert without_protocol(await wire.call("com.example/find", {"id": 0})) == {"by": 0}
        assert without_protocol(await wire.call("com.example/find", {"id": 1})) == {"by": 1}
        with pytest.raises(ErrorResponse, match="0 does not know 2"):
            await wire.call("com.example/find", {"id": 2})
        assert without_protocol(await wire.call("com.example/only-1")) == {"only": 1}
        assert seen == ["com.example/find"] * 5 + ["com.example/only-1"]


@modern
async def test_a_method_of_a_mounted_server_comes_before_a_fallback(revision: str, autojump_clock: MockClock) -> None:
    outer, inner = Server("outer"), Server("inner")

    @outer.fallback
    async def any_outer(ctx: Context, method: str, params: JsonObject) -> JsonObject:
        if method == "com.example/odd":
            raise RequestError(7, "odd")
        return {"by": "outer"}

    @inner.method("com.example/inner")
    async def of_inner() -> dict[str, str]:
        return {"by": "inner"}

    outer.mount(inner)
    async with connected(outer, revision) as wire:
        assert without_protocol(await wire.call("com.example/inner")) == {"by": "inner"}
        assert without_protocol(await wire.call("com.example/other")) == {"by": "outer"}
        with pytest.raises(ErrorResponse, match="odd"):
            await wire.call("com.example/odd")


# Registration.


def test_invalid_registrations_are_refused() -> None:
    server = ping_server()
    for wrong, why in (
        (lambda: server.extension(PING), "this server has the extension com.example/ping already"),
        (lambda: server.extension("ping"), "needs a prefix"),
        (lambda: server.extension(7), "the identifier of an extension must be a str, got int"),  # type: ignore[arg-type]
        (lambda: server.extension(Extension("com.example/a"), settings={}), "an Extension has its own settings"),
        (lambda: server.extension(Extension("com.example/a"), Extension("com.example/b")), "have one identifier"),
        (lambda: server.extension("com.example/c", settings=["x"]), "must be an object"),  # type: ignore[arg-type]
        (lambda: server.extension("com.example/d", settings={"x": object()}), "JSON"),
        (lambda: server.method(PING)(lambda: None), "the method com.example/ping is registered already"),
        (lambda: server.method("tools/list")(lambda: None), "tools/list is a method of"),
        (lambda: server.method("com.example/e")(lambda *args: None), "declare each argument"),
        (lambda: server.method("")(lambda: None), "the name of a method must be a text"),
        (lambda: server.notification("")(lambda: None), "the name of a method must be a text"),
        (lambda: ClientExtension("com.example/f").method("")(lambda: None), "the name of a method must be a text"),
    ):
        with pytest.raises(UsageError, match=why):
            wrong()
    server.extension("com.example/d")  # a refused registration leaves its name free
    server.method("com.example/e")(lambda: None)
    server.fallback(lambda ctx, method, params: {})
    with pytest.raises(UsageError, match="has a fallback already"):
        server.fallback(lambda ctx, method, params: {})
    with pytest.raises(UsageError, match="is called by position"):
        Server("x").fallback(lambda ctx: {})
    ext = server.extension("com.example/filters")
    ext.filter("a")(agreed_to)
    for name, why in (
        ("a", "the filter 'a' is registered already"),
        ("toolsListChanged", "the filter toolsListChanged is one of the protocol already"),
        ("", "the name of a filter must be a text"),
        (7, "the name of a filter must be a text"),
    ):
        for _ in range(2):
            with pytest.raises(UsageError, match=why):
                ext.filter(name)(agreed_to)  # type: ignore[arg-type]
    assert ext.id == "com.example/filters"


# The one option of a tool that loads an extension.


class TasksModule(ModuleType):
    def __init__(self) -> None:
        super().__init__("trio_mcp.extensions.tasks")
        self.added: list[tuple[Server, str, str]] = []

    def add_tool(self, server: Server, name: str, task: str) -> None:
        self.added.append((server, name, task))


@req("task-05", "task-07", "task-08")
@every_revision
async def test_a_tool_declares_its_support_for_tasks(
    revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, server = TasksModule(), Server("tasks")
    monkeypatch.setitem(sys.modules, "trio_mcp.extensions.tasks", tasks)
    server.tool(name="plain")(lambda: 1)
    server.tool(name="never", task="forbidden")(lambda: 1)
    assert tasks.added == []
    server.tool(name="maybe", task="optional")(lambda: 1)
    by_hand = Tool("always", {"type": "object"}, execution=ToolExecution("required"))
    server.add_tool(by_hand, lambda ctx, arguments: "1")
    server.add_tool(Tool("not", {"type": "object"}, execution=ToolExecution("forbidden")), lambda ctx, arguments: "1")
    assert tasks.added == [(server, "maybe", "optional"), (server, "always", "required")]
    with pytest.raises(UsageError, match="task of the tool 'x' must be one of forbidden, optional, required"):
        server.tool(name="x", task="sometimes")(lambda: 1)  # type: ignore[call-overload]
    async with connected(server, revision) as wire:
        listed = {each["name"]: each.get("execution") for each in (await wire.call("tools/list"))["tools"]}
    expected = {
        "maybe": {"taskSupport": "optional"},
        "always": {"taskSupport": "required"},
        "not": {"taskSupport": "forbidden"},
    }
    has = expected if revision == "2025-11-25" else {}
    assert listed == {"plain": None, "never": None, "maybe": None, "always": None, "not": None} | has


# Detached calls, which continue without their request.


class Host:
    """A host that records its calls."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []
        self.asked: list[Question] = []
        self.finished = trio.Event()
        self.fails = False

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        self.got.append(("progress", (progress, total, message)))

    async def log(self, level: str, data: Json, logger: str | None) -> None:
        self.got.append(("log", (level, data, logger)))

    async def ask(self, questions: Sequence[Question]) -> Mapping[str, JsonObject]:
        self.asked += questions
        return {each.key: {"action": "accept", "content": {"value": "blue"}} for each in questions}

    async def finish(self, outcome: JsonObject | RequestError) -> None:
        self.finished.set()
        self.got.append(("finish", outcome if isinstance(outcome, RequestError) else outcome["content"][0]["text"]))
        if self.fails:
            raise OSError("the disk is full")


LATER: JsonObject = {"content": [{"type": "text", "text": "later"}]}


class DetachingServer:
    """A server with a tool that detaches its call.  `host` gets the later messages, and `call` cancels the call."""

    def __init__(self) -> None:
        self.host = Host()
        self.call: DetachedCall | None = None
        self.left: BaseException | None = None
        self.server = Server("detaching")
        self.server.tool(self.work)

    async def work(self, how: str, ctx: Context) -> str:
        await ctx.progress(1)
        self.call = await ctx.detach(self.host, LATER)
        try:
            await trio.sleep(10)
            await ctx.progress(2, 3, "half")
            await ctx.log("info", {"a": 1}, logger="x")
            if how == "fails":
                raise RequestError(7, "broken")
            if how == "asks":
                return str(await ctx.elicit("Which?", str))
            if how == "asks the model":
                await ctx.send_request("com.example/ask")
            if how == "twice":
                await ctx.detach(self.host, LATER)
            return how
        except BaseException as error:
            self.left = error
            raise


@pytest.mark.contract
@every_revision
async def test_a_detached_call_is_answered_at_once_and_continues(revision: str, autojump_clock: MockClock) -> None:
    made = DetachingServer()
    async with made.server.running(), connected(made.server, revision) as wire:
        result = await wire.call("tools/call", {"name": "work", "arguments": {"how": "returns"}}, progress="p")
        assert result["content"][0]["text"] == "later"
        assert made.host.got == []
        await wait_all_tasks_blocked()
        assert made.server.statistics().running == 0
        await made.host.finished.wait()
        await wait_all_tasks_blocked()
        assert made.host.got == [
            ("progress", (2, 3, "half")),
            ("log", ("info", {"a": 1}, "x")),
            ("finish", "returns"),
        ]
        assert [params["progress"] for params in wire.noted("notifications/progress")] == [1]


@every_revision
async def test_a_detached_call_does_not_end_with_its_client(revision: str, autojump_clock: MockClock) -> None:
    made = DetachingServer()
    async with made.server.running():
        async with connected(made.server, revision) as wire:
            await wire.call("tools/call", {"name": "work", "arguments": {"how": "returns"}})
            await wire.close()
            assert not made.host.finished.is_set()
            await made.host.finished.wait()
        assert made.host.got[-1] == ("finish", "returns")


@modern
@pytest.mark.parametrize(
    ("how", "end", "kind"),
    [
        ("fails", RequestError, RequestError),
        ("asks the model", "tools/call 'work' failed; the server's log says why", UsageError),
        ("twice", "tools/call 'work' failed; the server's log says why", UsageError),
    ],
)
async def test_the_failure_of_a_detached_call_goes_to_its_host(
    revision: str, how: str, end: Any, kind: type[Exception], autojump_clock: MockClock
) -> None:
    made = DetachingServer()
    async with connected(made.server, revision) as wire:
        await wire.call("tools/call", {"name": "work", "arguments": {"how": how}})
        await made.host.finished.wait()
        await wait_all_tasks_blocked()
    last = made.host.got[-1][1]
    assert isinstance(last, RequestError) if end is RequestError else last == end
    assert isinstance(made.left, kind)


@modern
async def test_a_detached_call_asks_its_host(revision: str, autojump_clock: MockClock) -> None:
    made = DetachingServer()
    async with connected(made.server, revision) as wire:
        await wire.call("tools/call", {"name": "work", "arguments": {"how": "asks"}})
        await made.host.finished.wait()
        await wait_all_tasks_blocked()
    assert made.host.got[-1] == ("finish", "Accepted(value='blue')")
    assert [(each.key, each.method) for each in made.host.asked] == [("form", "elicitation/create")]


@modern
async def test_a_tool_may_ask_before_it_is_detached(revision: str, autojump_clock: MockClock) -> None:
    server, host = Server("asking"), Host()

    @server.tool
    async def work(ctx: Context) -> str:
        first = await ctx.elicit("First?", str)
        await ctx.detach(host, LATER)
        return f"{first} {await ctx.elicit('Second?', str)}"

    async with connected(server, revision) as wire:
        wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"value": "red"}}
        result = await wire.call("tools/call", {"name": "work"})
        assert result["content"][0]["text"] == "later"
        await host.finished.wait()
        await wait_all_tasks_blocked()
    assert host.got == [("finish", "Accepted(value='red') Accepted(value='blue')")]
    assert [each.key for each in host.asked] == ["form-2"]


@every_revision
async def test_a_detached_call_is_cancelled_by_its_extension(revision: str, autojump_clock: MockClock) -> None:
    made = DetachingServer()
    async with connected(made.server, revision) as wire:
        await wire.call("tools/call", {"name": "work", "arguments": {"how": "returns"}})
        assert made.call is not None
        made.call.cancel("the task was cancelled")
        await wait_all_tasks_blocked()
        assert isinstance(made.left, trio.Cancelled)
        made.call.cancel("again")
        await wire.call("tools/list")
    assert made.host.got == []


@modern
async def test_a_request_that_is_cancelled_is_not_detached(revision: str, autojump_clock: MockClock) -> None:
    server, host, errors = Server("late"), Host(), list[BaseException]()

    @server.tool
    async def work(ctx: Context) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(5)
            try:
                await ctx.detach(host, LATER)
            except BaseException as error:
                errors.append(error)
                raise

    async with connected(server, revision) as wire:
        id = await wire.start("tools/call", {"name": "work"})
        await wait_all_tasks_blocked()
        await wire.cancel(id)
        await trio.sleep(10)
    assert [type(error) for error in errors] == [ClientGone]
    assert not host.finished.is_set()


@modern
async def test_an_extension_that_cannot_take_a_result_is_reported(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    made = DetachingServer()
    made.host.fails = True
    async with connected(made.server, revision) as wire:
        await wire.call("tools/call", {"name": "work", "arguments": {"how": "returns"}})
        await made.host.finished.wait()
        await wire.call("tools/list")
    assert "the extension could not take the result of tools/call" in caplog.text


@legacy
async def test_a_detached_call_may_still_notify_its_session(revision: str, autojump_clock: MockClock) -> None:
    made = DetachingServer()
    async with made.server.running(), connected(made.server, revision, check=False) as wire:
        await wire.call("tools/call", {"name": "work", "arguments": {"how": "returns"}}, progress="p")
        assert made.call is not None
        assert made.call.notify("com.example/said", {"n": 1})
        assert await wire.note("com.example/said") == {"n": 1}
        await wire.close()
        assert not made.call.notify("com.example/said")
        assert not made.call.progress("p", 3)
        await made.host.finished.wait()


# Work beside the server.


@every_revision
async def test_an_extension_runs_beside_the_server_and_starts_calls(revision: str, autojump_clock: MockClock) -> None:
    server, host, began = Server("beside"), Host(), list[str]()
    ext = server.extension(PING)

    @server.tool
    async def work(n: int) -> list[TextContent]:
        return [TextContent(f"worked {n}")]

    @ext.background
    async def run_again(run: ExtensionRun) -> None:
        began.append("first")
        request = Request("", "tools/call", {"name": "work", "arguments": {"n": 7}})
        call = run.start(request, Terms(REVISIONS[revision]), host)
        assert not call.notify("com.example/said")
        assert not call.progress("p", 1)
        await trio.sleep_forever()

    async with server.running():
        await host.finished.wait()

        @ext.background
        async def later(run: ExtensionRun) -> None:
            began.append("second")

        await wait_all_tasks_blocked()
    assert host.got == [("finish", "worked 7")]
    assert began == ["first", "second"]


class FailingServer:
    """A server with an extension that fails after three seconds, and a handler that runs meanwhile."""

    def __init__(self) -> None:
        self.server = Server("broken")
        self.cancelled = False
        self.server.tool(self.work)
        self.server.extension(PING).background(self.fail)

    async def work(self) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            self.cancelled = True
            raise

    async def fail(self, run: ExtensionRun) -> None:
        await trio.sleep(3)
        raise OSError("the disk is gone")


@modern
@pytest.mark.parametrize("shared", [True, False])
async def test_an_extension_that_fails_ends_the_run_with_its_error(
    revision: str, shared: bool, autojump_clock: MockClock
) -> None:
    made = FailingServer()

    async def serve() -> None:
        running = made.server.running() if shared else contextlib.nullcontext()
        async with running, connected(made.server, revision) as wire:
            await wire.start("tools/call", {"name": "work", "arguments": {}})
            await trio.sleep_forever()

    with pytest.raises(OSError, match="the disk is gone") as caught:
        await serve()
    assert trio.current_time() == pytest.approx(3, abs=2)
    assert caught.value.__notes__ == [f"The background of the extension {PING} has raised this, and ends the server."]
    assert made.cancelled


@modern
async def test_background_work_ends_with_the_handlers(revision: str, autojump_clock: MockClock) -> None:
    server, ended = Server("beside"), list[float]()

    @server.extension(PING).background
    async def beside(run: ExtensionRun) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())

    async with server.running():
        begun = trio.current_time()
        async with server.draining(5):
            await trio.sleep(2)
            assert ended == []
        await trio.sleep(1)
        assert ended == [begun + 2]  # also if the program continues


# Filters.


async def agreed_to(ctx: Context, asked: Json, listener: Listener) -> Json:
    return asked


class FilteringServer:
    """A server with an extension that has a filter."""

    def __init__(self, **options: Any) -> None:
        self.listeners: list[Listener] = []
        self.server = Server("watched", middleware=[self.passes], **options)
        note = ExtensionMethod("com.example/changed", Role.SERVER, notification=True, subscribed=True)
        ext = self.server.extension(Extension(PING, methods=[note], revisions=[LATEST]))
        ext.filter("pings")(self.agree)
        self.server.tool(self.work)

    async def passes(self, ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        return await call_next()

    async def work(self) -> None: ...

    async def agree(self, ctx: Context, asked: Json, listener: Listener) -> Json:
        await trio.sleep(1)
        if not isinstance(asked, list):
            raise RequestError(INVALID_PARAMS, "pings must be a list")
        self.listeners.append(listener)
        return [each for each in asked if each != "secret"] or None


async def listening(wire: RawClient, filter: JsonObject) -> Any:
    id = await wire.start("subscriptions/listen", {"notifications": filter})
    return id, await wire.note(ACKNOWLEDGED)


@req("xtask-49")
@pytest.mark.contract
@modern
async def test_an_extension_agrees_to_its_part_of_a_filter(revision: str, autojump_clock: MockClock) -> None:
    made = FilteringServer()
    async with connected(made.server, revision, capabilities=declaring(revision), check=False) as wire:
        id, acknowledged = await listening(wire, {"pings": ["a", "secret"], "toolsListChanged": True})
        assert acknowledged["notifications"] == {"toolsListChanged": True, "pings": ["a"]}
        (listener,) = made.listeners
        listener.notify("com.example/changed", {"n": 1, "_meta": {"com.example/x": 2}})
        said = await wire.note("com.example/changed")
        assert said["n"] == 1
        assert said["_meta"] == {"com.example/x": 2, META_SUBSCRIPTION_ID: id}
        assert made.server.statistics().running == 0
        assert not listener.ended.is_set()
        await wire.cancel(id)
        await wait_all_tasks_blocked()
        assert listener.ended.is_set()
        listener.notify("com.example/changed", {"n": 2})
        _, acknowledged = await listening(wire, {"pings": ["secret"]})
        assert acknowledged["notifications"] == {}
        _, acknowledged = await listening(wire, {"toolsListChanged": True})
        assert acknowledged["notifications"] == {"toolsListChanged": True}
        assert len(made.listeners) == 2


@req("xtask-37")
@modern
async def test_a_filter_that_the_extension_refuses_is_refused(revision: str, autojump_clock: MockClock) -> None:
    made = FilteringServer()
    async with connected(made.server, revision, capabilities=declaring(revision), check=False) as wire:
        with pytest.raises(ErrorResponse, match="pings must be a list"):
            await wire.call("subscriptions/listen", {"notifications": {"pings": 1}})
    async with connected(made.server, revision, check=False) as wire:
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("subscriptions/listen", {"notifications": {"pings": ["a"]}})
        assert caught.value.code == MISSING_CLIENT_CAPABILITY
        assert caught.value.data == {"requiredCapabilities": {"extensions": {PING: {}}}}


@modern
async def test_a_listen_request_may_be_cancelled_while_the_filter_runs(
    revision: str, autojump_clock: MockClock
) -> None:
    made = FilteringServer()
    async with connected(made.server, revision, capabilities=declaring(revision), check=False) as wire:
        id = await wire.start("subscriptions/listen", {"notifications": {"pings": ["a"]}})
        await wait_all_tasks_blocked()
        await wire.cancel(id)
        await trio.sleep(5)
        assert made.listeners == []
        assert made.server.statistics().listeners == 0
        assert made.server.statistics().running == 0


@modern
async def test_a_client_that_does_not_read_gets_the_newest_notification_of_each_key(
    revision: str, autojump_clock: MockClock
) -> None:
    made = FilteringServer(limits=Limits(outgoing=4))
    options: Any = {"capabilities": declaring(revision), "check": False, "streams": one_byte_pipe}
    async with connected(made.server, revision, **options) as wire:
        await listening(wire, {"pings": ["a"]})
        (listener,) = made.listeners
        with wire.not_reading():
            for n in range(100):
                listener.notify("com.example/changed", {"n": n}, key=str(n % 2))
                await wait_all_tasks_blocked()
            listener.notify("com.example/changed", {"n": "long", "fill": "x" * 100_000}, key="long")
        await wait_all_tasks_blocked()
        got = [params["n"] for params in wire.noted("com.example/changed")]
        assert len(got) < 20
        assert set(got[-2:]) == {98, 99}


@modern
async def test_a_stream_ends_with_its_listeners(revision: str, autojump_clock: MockClock) -> None:
    made = FilteringServer()
    async with connected(made.server, revision, capabilities=declaring(revision), check=False) as wire:
        await listening(wire, {"pings": ["a"]})
    (listener,) = made.listeners
    assert listener.ended.is_set()


@modern
async def test_a_listener_ends_with_a_subscription_that_does_not_begin(
    revision: str, autojump_clock: MockClock
) -> None:
    made, other = FilteringServer(), "com.example/other"
    listeners: list[Listener] = []

    async def refuses(ctx: Context, asked: Json, listener: Listener) -> Json:
        listeners.append(listener)
        await trio.sleep(3)
        raise RequestError(INVALID_PARAMS, "no others here")

    made.server.extension(other).filter("others")(refuses)
    filter: JsonObject = {"pings": ["a"], "others": True}
    async with connected(made.server, revision, capabilities=declaring(revision, PING, other), check=False) as wire:
        with pytest.raises(ErrorResponse, match="no others here"):
            await wire.call("subscriptions/listen", {"notifications": filter})
        id = await wire.start("subscriptions/listen", {"notifications": filter})
        await trio.sleep(2)
        await wire.cancel(id)
        await wait_all_tasks_blocked()
        assert made.listeners == listeners
        assert [listener.ended.is_set() for listener in listeners] == [True, True]


@legacy
async def test_an_invented_method_is_one_short_line_in_the_log(
    revision: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    server, names = Server("other", limits=Limits(call_rate=2)), []

    @server.fallback
    async def any_method(ctx: Context, method: str, params: Any) -> None:
        names.append(trio.lowlevel.current_task().name)
        raise ValueError(method)

    made_up = "com.example/x\nERROR forged" + "x" * 500
    async with connected(server, revision, check=False) as wire:
        with pytest.raises(ErrorResponse):
            await wire.call(made_up, {})
        for _ in range(3):
            await wire.notify(made_up, {})
        await wait_all_tasks_blocked()
    lines = [*names, *(record.getMessage() for record in caplog.records)]
    assert len(lines) > 3
    for line in lines:
        assert "ERROR forged" in line
        assert line.isprintable()
        assert len(line) < 200
