"""Extensions of a client: requests, notifications, handlers and wrappers, on each transport and in each revision."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.matrix import ROOT, Variant, client_of, each_transport_and_asgi, serve_over
from tests.requirements import req
from trio_mcp import Context, Limits, RequestError, Server, UsageError, open_client
from trio_mcp.client import CallNextRequest, ClientExtension, ExtensionCall
from trio_mcp.core import (
    METHOD_NOT_FOUND,
    MISSING_CLIENT_CAPABILITY,
    Extension,
    ExtensionMethod,
    JsonObject,
    Question,
    Role,
)
from trio_mcp.errors import (
    InputUnavailable,
    NotDeclared,
    NotInThisRevision,
    RemoteProtocolError,
    SubscriptionUnsupported,
)
from trio_mcp.server import DetachedCall, Listener
from trio_mcp.types import CallToolResult, Json, PromptReference

PING = "com.example/ping"
LEGACY = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
LATEST = "2026-07-28"
every_revision = pytest.mark.parametrize("revision", [*LEGACY, LATEST])


@dataclass
class Pong:
    target: str
    times: int = 1


CHANGED = ExtensionMethod("com.example/changed", Role.SERVER, notification=True, subscribed=True)


class Pinging:
    """A server with an extension: a request and a notification in each direction, a filter, and a result type."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.listeners: list[Listener] = []
        self.server = Server("pinging")
        said = ExtensionMethod("com.example/said", Role.SERVER, notification=True)
        ask = ExtensionMethod("com.example/ask", Role.SERVER)
        kinds = {"tools/call": ["later"]}
        self.ext = self.server.extension(
            Extension(PING, {"loud": True}, [said, ask, CHANGED], kinds, revisions=[LATEST]),
            Extension(PING, {"loud": True}, [said, ask], revisions=LEGACY),
        )
        self.ext.method(PING, mcp_name="target")(self.ping)
        self.ext.notification("com.example/heard")(self.hear)
        self.ext.filter("pings")(self.agree)
        self.server.tool(self.work)

    async def ping(self, target: str, ctx: Context) -> Pong:
        settings = ctx.extension(PING)
        assert settings is not None
        if ctx.supports("experimental") or ctx.supports("extensions"):
            await ctx.notify("com.example/said", {"n": 1})
        return Pong(target, settings.get("times", 1))

    async def hear(self, n: int) -> None:
        self.heard.append(n)

    async def agree(self, ctx: Context, asked: Json, listener: Listener) -> Json:
        self.listeners.append(listener)
        return asked

    async def work(self, ctx: Context) -> str:
        return f"asked {(await ctx.send_request('com.example/ask', Pong('moon'), returns=Pong)).times}"


def pinging(said: list[int] | None = None, **settings: Any) -> ClientExtension:
    ext = ClientExtension(PING, settings=settings, mcp_names={PING: "target"})

    @ext.notification("com.example/said")
    def on_said(n: int) -> None:
        if said is not None:
            said.append(n)

    @ext.method("com.example/ask")
    async def ask(params: Pong) -> Pong:
        return Pong(params.target, params.times + 1)

    return ext


@req("ver-05", "ver-06", "type-19", "http-75")
@each_transport_and_asgi(without=("child",))
async def test_an_extension_works_both_ways_on_each_transport(variant: Variant, autojump_clock: MockClock) -> None:
    made, said = Pinging(), list[int]()
    async with client_of(variant, made.server, extensions=[pinging(said, times=7)]) as client:
        assert client.extension(PING) == {"loud": True}
        assert client.extension("com.example/other") is None
        assert await client.request(PING, {"target": "moon"}, returns=Pong) == Pong("moon", 7)
        assert await client.request(PING, Pong("ümlaut")) != {}
        assert await client.notify("com.example/heard", {"n": 3})
        with pytest.raises(RequestError, match="params"):
            await client.request(PING, {"target": 1})
        await trio.sleep(1)
        assert made.heard == [3]
        json_alone = variant.transport == "http json"
        assert said == ([] if json_alone else [1, 1])
        if not variant.modern and not json_alone:
            assert (await client.call_tool("work", returns=str)) == "asked 2"


@req("ver-06")
@each_transport_and_asgi(without=("child",))
async def test_without_the_extension_a_client_is_refused(variant: Variant, autojump_clock: MockClock) -> None:
    server = Server("pinging")
    server.extension(PING).method(PING)(lambda: None)
    server.method("com.example/open")(lambda: {"open": True})
    async with client_of(variant, server) as client:
        assert (await client.request("com.example/open"))["open"]
        with pytest.raises(RequestError) as caught:
            await client.request(PING)
        assert caught.value.code == MISSING_CLIENT_CAPABILITY
        assert "requiredCapabilities" in caught.value.data
        with pytest.raises(RequestError) as caught:
            await client.request("com.example/unknown")
        assert caught.value.code == METHOD_NOT_FOUND


@every_revision
async def test_a_mapping_can_declare_extensions(revision: str, autojump_clock: MockClock) -> None:
    made = Pinging()
    async with open_client(made.server, revision=revision, extensions={PING: {"times": 2}}) as client:
        result = await client.request(PING, {"target": "moon"}, returns=Pong)
        assert result == Pong("moon", 2)
        with pytest.raises(RemoteProtocolError, match="result/times"):
            await client.request(PING, {"target": "moon"}, returns=dict[str, str])


@every_revision
async def test_a_message_of_an_undeclared_extension_is_not_sent(revision: str, autojump_clock: MockClock) -> None:
    async with open_client(Server("plain"), revision=revision, extensions=[pinging()]) as client:
        with pytest.raises(NotDeclared):
            await client.request(PING, {"target": "moon"})
        with pytest.raises(NotInThisRevision):
            await client.request("tools/cal")
        with pytest.raises(NotInThisRevision):
            await client.notify("notifications/roots/changed")
        with pytest.raises(UsageError, match="must be an object, such as"):
            await client.request(PING, 1)


# Messages of the server.


@every_revision
async def test_notifications_without_a_handler_go_to_the_callback_for_all(
    revision: str, autojump_clock: MockClock
) -> None:
    server, got = Server("noting"), list[Any]()

    @server.tool
    async def work(ctx: Context) -> None:
        await ctx.notify("com.example/unheard-of", {"n": 1})
        if revision != LATEST:
            with pytest.raises(RequestError, match="does not support"):
                await ctx.send_request("com.example/ask")

    def callback(method: str, params: JsonObject) -> None:
        got.append((method, params))

    async with open_client(server, revision=revision, on_notification=callback) as client:
        assert not (await client.call_tool("work")).is_error
    assert got == [("com.example/unheard-of", {"n": 1})]


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-11-25"])
async def test_requests_of_extensions_have_a_limit_separate_from_questions(
    revision: str, autojump_clock: MockClock
) -> None:
    server, ext, outcomes = Server("noting"), ClientExtension(PING), list[str]()
    server.extension(PING)

    @server.tool
    async def flood(ctx: Context) -> str:
        async def ask(n: int) -> None:
            try:
                await ctx.send_request("com.example/ask", {"n": n})
                outcomes.append("answered")
            except RequestError as error:
                outcomes.append(error.message)

        async with trio.open_nursery() as nursery:
            for n in range(6):
                nursery.start_soon(ask, n)
            await trio.sleep(1)
            return (await ctx.sample("Why?", max_tokens=10)).content.text  # type: ignore[union-attr]

    @ext.method("com.example/ask")
    async def ask(n: int) -> None:
        await trio.sleep(10)

    limits = Limits(calls=4, questions=1, questions_waiting=0)
    async with open_client(
        server, revision=revision, extensions=[ext], sampling=lambda request: ("because", "a model"), limits=limits
    ) as client:
        assert await client.call_tool("flood", returns=str) == "because"
    why = "the client serves 4 requests of extensions at once (Limits.calls); try again later"
    assert sorted(outcomes) == ["answered"] * 4 + [why] * 2


@every_revision
async def test_a_message_that_does_not_fit_its_handler_is_a_deviation(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server, ext, received = Server("noting"), ClientExtension(PING), list[int]()
    server.extension(PING)

    @server.tool
    async def work(ctx: Context) -> None:
        await ctx.notify("com.example/said", {"n": "one"})
        await ctx.notify("com.example/said", {"n": 0})
        await ctx.notify("com.example/said", {"n": 1})
        if revision != LATEST:
            with pytest.raises(RequestError, match="ask: params: lacks"):
                await ctx.send_request("com.example/ask")
            with pytest.raises(RequestError, match="failed"):
                await ctx.send_request("com.example/ask", {"n": 0})

    @ext.notification("com.example/said")
    def said(n: int) -> None:
        received.append(1 // n)

    @ext.method("com.example/ask")
    def ask(n: int) -> None:
        raise ValueError(n)

    async with open_client(server, revision=revision, extensions=[ext]) as client:
        assert not (await client.call_tool("work")).is_error
        assert received == [1]
        assert any("com.example/said: params/n" in each for each in client.deviations)
    assert "a callback of the client has failed" in caplog.text


# Wrappers.


class Later:
    """A server that answers a call with a result of its own, and gives the final one to another request."""

    def __init__(self) -> None:
        self.server = Server("later")
        kinds = {"tools/call": ["later"]}
        self.ext = self.server.extension(Extension(PING, result_types=kinds, revisions=[LATEST]))
        self.result = trio.Event()
        self.outcome: JsonObject | RequestError | None = None
        self.server.tool(self.work)
        self.ext.method("com.example/result")(self.get)

    async def work(self, ctx: Context, ask: bool = False) -> str:
        if ctx.extension(PING) is None:
            return "now"
        first = await ctx.elicit("First?", str) if ask else None
        await ctx.detach(self, {"resultType": "later", "id": "7"})
        await trio.sleep(60)
        return f"later {first}" if ask else "later"

    async def get(self, id: str) -> dict[str, Any]:
        with trio.move_on_after(5):
            await self.result.wait()
        return {"result": self.outcome}

    async def progress(self, progress: float, total: float | None, message: str | None) -> None: ...

    async def log(self, level: str, data: Json, logger: str | None) -> None: ...

    async def ask(self, questions: Sequence[Question]) -> Mapping[str, JsonObject]:
        raise NotImplementedError

    async def finish(self, outcome: JsonObject | RequestError) -> None:
        self.outcome = outcome
        self.result.set()


def waiting() -> ClientExtension:
    """An extension that waits for the final result."""
    ext = ClientExtension(Extension(PING, result_types={"tools/call": ["later"]}, revisions=[LATEST]))

    @ext.around("tools/call")
    async def wait(call: ExtensionCall, call_next: CallNextRequest) -> JsonObject:
        result = await call_next()
        while result.get("resultType") == "later":
            polled = await call.request("com.example/result", {"id": result["id"]})
            result = polled["result"] or result
        return result

    return ext


@req("rtype-02", "xtask-51", "xtask-03")
@each_transport_and_asgi(without=("child",))
async def test_a_wrapper_drives_a_result_to_its_end(variant: Variant, autojump_clock: MockClock) -> None:
    async with client_of(variant, Later().server, extensions=[waiting()]) as client:
        assert await client.call_tool("work", returns=str) == ("later" if variant.modern else "now")


async def test_a_wrapper_gets_the_result_after_the_questions(autojump_clock: MockClock) -> None:
    options: Any = {"extensions": [waiting()], "elicitation": lambda request: {"value": "blue"}}
    async with open_client(Later().server, revision=LATEST, **options) as client:
        assert await client.call_tool("work", {"ask": True}, returns=str) == "later Accepted(value='blue')"


@req("rtype-02")
async def test_a_result_type_of_an_extension_that_is_not_declared_is_invalid(autojump_clock: MockClock) -> None:
    made = Later()
    other = ClientExtension(Extension(PING, revisions=[LATEST]))
    async with open_client(made.server, revision=LATEST, extensions=[other]) as client:
        with pytest.raises(RemoteProtocolError, match="a result of unknown type 'later'"):
            await client.call_tool("work")
    known = ClientExtension(Extension(PING, result_types={"tools/call": ["later"]}))
    async with open_client(made.server, revision=LATEST, extensions=[known]) as client:
        assert (await client.request("tools/call", {"name": "work"}))["resultType"] == "later"


async def test_wrappers_nest_and_the_timeout_of_the_caller_applies(autojump_clock: MockClock) -> None:
    server, order = Server("plain"), list[Any]()
    server.extension(PING)
    server.extension("com.example/other")

    @server.tool
    async def echo(text: str, ctx: Context) -> str:
        await ctx.progress(1)
        return text

    outer, inner = ClientExtension(PING), ClientExtension("com.example/other")

    @outer.around("tools/call")
    async def first(call: ExtensionCall, call_next: CallNextRequest) -> JsonObject:
        assert call.client.revision == call.terms.revision.name
        order.append(call.params["arguments"])
        return await call_next({**call.params, "arguments": {"text": "changed"}})

    @inner.around("tools/call")
    async def second(call: ExtensionCall, call_next: CallNextRequest) -> JsonObject:
        order.append((call.params["arguments"], call.on_progress is not None))
        return await call_next()

    async with open_client(server, extensions=[outer, inner]) as client:
        reports: list[float] = []
        result = await client.call_tool("echo", {"text": "x"}, on_progress=lambda *report: reports.append(report[0]))
        assert result.content[0].text == "changed"  # type: ignore[union-attr]
        assert order == [{"text": "x"}, ({"text": "changed"}, True)]
        assert reports == [1]
    slow = ClientExtension(PING)

    @slow.around("tools/call")
    async def poll(call: ExtensionCall, call_next: CallNextRequest) -> JsonObject:
        while True:
            await call.request("tools/list")
            await trio.sleep(1)

    async with open_client(server, extensions=[slow]) as client:
        with pytest.raises(trio.TooSlowError):
            await client.call_tool("echo", {"text": "x"}, max_timeout=5)


async def test_a_wrapper_asks_the_callbacks_of_the_program(autojump_clock: MockClock) -> None:
    server, ext = Server("plain"), ClientExtension(PING)
    server.extension(PING)
    server.tool(name="work")(lambda: 1)
    form = {"message": "Which?", "requestedSchema": {"type": "object", "properties": {"value": {"type": "string"}}}}

    @ext.around("tools/call")
    async def ask(call: ExtensionCall, call_next: CallNextRequest) -> JsonObject:
        method = call.params["arguments"]["method"]
        answers = await call.answer([Question("a", method, form)])
        return {"content": [{"type": "text", "text": str(answers["a"]["content"])}]}

    options: Any = {"extensions": [ext], "elicitation": lambda request: {"value": "blue"}}
    async with open_client(server, **options) as client:
        result: CallToolResult = await client.call_tool("work", {"method": "elicitation/create"})
        assert result.content[0].text == "{'value': 'blue'}"  # type: ignore[union-attr]
        await client.call_tool("work", {"method": "elicitation/create"}, timeout=5)
        with pytest.raises(InputUnavailable):
            await client.call_tool("work", {"method": "roots/list"})


async def test_an_exception_of_a_wrapper_reaches_each_caller_and_the_client_goes_on(autojump_clock: MockClock) -> None:
    server, ext = Server("plain"), ClientExtension(PING)
    server.extension(PING)
    server.prompt(name="visit")(lambda city: city)
    server.completion("visit", "city")(lambda value: [value])
    errors = []

    @ext.around("completion/complete")
    async def fail(call: ExtensionCall, call_next: CallNextRequest) -> JsonObject:
        await trio.sleep(1)
        raise ZeroDivisionError

    async with open_client(server, extensions=[ext]) as client:

        async def complete() -> None:
            try:
                await client.complete(PromptReference("visit"), "city", "Os")
            except ZeroDivisionError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(complete)
            nursery.start_soon(complete)
        assert len(errors) == 2
        assert len(await client.list_prompts()) == 1


# Filters.


@each_transport_and_asgi(without=("child", "http json"))
async def test_a_client_listens_to_an_extension(variant: Variant, autojump_clock: MockClock) -> None:
    made, received = Pinging(), list[int]()
    ext = ClientExtension(
        Extension(PING, methods=[CHANGED], revisions=[LATEST]), Extension(PING, revisions=["2025-11-25"])
    )

    @ext.notification("com.example/changed")
    def changed(n: int) -> None:
        received.append(n)

    async with client_of(variant, made.server, extensions=[ext]) as client:
        if not variant.modern:
            with pytest.raises(SubscriptionUnsupported, match="pings"):
                async with client.listen(filters={"pings": ["a"]}):
                    pass
            return
        async with client.listen(tools=True, filters={"pings": ["a"], "other": 1}) as changes:
            assert changes.agreed == {"pings": ["a"]}
            assert changes.missing == ()
            (listener,) = made.listeners
            listener.notify("com.example/changed", {"n": 5})
            await trio.sleep(1)
            assert received == [5]
        async with client.listen(filters={"pings": ["b"]}) as changes:
            assert changes.agreed == {"pings": ["b"]}
        with pytest.raises(SubscriptionUnsupported, match="other"):
            async with client.listen(filters={"other": ["b"]}):
                pass
        with pytest.raises(UsageError, match="listen needs at least one change"):
            async with client.listen():
                pass


# The page of the documentation.


@each_transport_and_asgi(without=("child",))
async def test_the_extension_of_the_documentation_runs(
    variant: Variant, autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "extensions.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 30
    names: dict[str, Any] = {"__name__": "greeter"}
    exec(compile(code, "extensions.md", "exec", dont_inherit=True), names)
    async with serve_over(variant.transport, names["server"]) as target:

        def opened(_: object, **options: Any) -> Any:
            return open_client(target, revision=variant.revision, **options)

        names["open_client"] = opened
        await names["main"]()
    greeted = [] if variant.transport == "http json" else ["Ada was greeted"]  # plain JSON has no room for it
    assert capsys.readouterr().out.splitlines() == [
        "{'languages': ['en', 'de']}", *greeted, "Greeting(text='Hallo Ada')"
    ]  # fmt: skip


# Calls of 2025-11-25 that go on.


async def test_progress_may_come_after_the_answer(autojump_clock: MockClock) -> None:
    server, calls, lines = Server("later"), list[DetachedCall](), list[bytes]()

    @server.tool
    async def work(ctx: Context) -> None:
        calls.append(await ctx.detach(Later(), {"content": []}))
        await trio.sleep(10)

    def tap(direction: str, data: bytes) -> None:
        if direction == "in":
            lines.append(data)

    async with open_client(server, revision="2025-11-25", tap=tap) as client:
        await client.call_tool("work", on_progress=lambda *report: None)
        assert calls[0].progress("late", 2, 3, "half")
        await wait_all_tasks_blocked()
    assert any(b'"progressToken":"late"' in line for line in lines)


# Options.


def test_an_invalid_declaration_is_refused() -> None:
    def two_forms() -> ClientExtension:
        return ClientExtension(Extension("com.example/a"), Extension("com.example/b"))

    async def awaited(n: int) -> None: ...

    ext = pinging()
    ext.around("tools/call")(Wrapper())
    for wrong, why in (
        (lambda: ClientExtension("ping"), "needs a prefix"),
        (lambda: ClientExtension(Extension(PING), settings={}), "an Extension has its own settings"),
        (two_forms, "have one identifier"),
        (lambda: ext.method("com.example/ask")(lambda: None), "has a handler for com.example/ask already"),
        (lambda: ext.method("com.example/x")(7), "a handler must be a function, got int"),
        (lambda: ext.notification("com.example/y")(awaited), "must be a plain function"),
        (lambda: ext.around("tools/call")(Wrapper()), "wraps tools/call already"),
        (lambda: open_client(["x"], extensions=[1]), "extensions must be a list of ClientExtension"),  # type: ignore[list-item]
        (lambda: open_client(["x"], extensions=[pinging(), pinging()]), "is given twice"),
        (lambda: open_client(["x"], extensions={"ping": {}}), "needs a prefix"),
    ):
        with pytest.raises(UsageError, match=why):
            wrong()
    assert ext.id == PING


class Wrapper:
    async def __call__(self, call: ExtensionCall, call_next: CallNextRequest) -> JsonObject:
        return None  # type: ignore[return-value]


async def test_a_wrapper_returns_a_result(autojump_clock: MockClock) -> None:
    server, ext = Server("plain"), ClientExtension(PING)
    server.extension(PING)
    server.tool(name="work")(lambda: 1)
    ext.around("tools/call")(Wrapper())
    async with open_client(server, extensions=[ext]) as client:
        with pytest.raises(UsageError, match="the wrapper of tools/call must return a result, got NoneType"):
            await client.call_tool("work")
