"""The ASGI application: by hand-made scopes, under Hypercorn's Trio worker, and mounted in Starlette."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import h2.connection
import h2.events
import pytest
import trio
from hypercorn.utils import LifespanFailureError
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from trio.testing import MockClock

from tests.core.http_rules import Rule
from tests.http.asgi_servers import Event, Events, hosted, hypercorn_of, lifespan_of
from tests.http.client import Cut, HttpClient, notification, request
from tests.http.scripted_server import ScriptedServer, play_call
from tests.http.test_rules import EVERY_ROW, options_for, rows, server_for, session_for
from tests.http.ws import Socket
from tests.requirements import req
from tests.server.checkpoints import unwrapped
from tests.server.raw_client import LATEST, client_on, every_revision
from trio_mcp import Context, Limits, Server, UsageError
from trio_mcp.asgi import AsgiApp
from trio_mcp.core.http import Headers, HttpRequest

SESSIONS = ("2025-03-26", "2025-06-18", "2025-11-25")
in_sessions = pytest.mark.parametrize("revision", SESSIONS)


class Watched:
    """A server, and what its handlers went through."""

    def __init__(self, **options: Any) -> None:
        self.server = Server("watched", **options)
        self.seen: list[str] = []
        self.go_on = trio.Event()
        self.changed = trio.lowlevel.ParkingLot()

        @self.server.tool
        async def echo(text: str) -> str:
            return text

        @self.server.tool
        async def wait(ctx: Context) -> str:
            """Says that it has begun, and waits."""
            self.see("begun")
            try:
                await ctx.progress(1, 2)
                await self.go_on.wait()
            except trio.Cancelled:
                self.see("cancelled")
                raise
            self.see("finished")
            return "waited"

    def see(self, what: str) -> None:
        self.seen.append(what)
        self.changed.unpark_all()

    async def saw(self, what: str) -> None:
        with trio.fail_after(60):
            while what not in self.seen:
                await self.changed.park()


def echo(text: str = "x") -> dict[str, Any]:
    return {"name": "echo", "arguments": {"text": text}}


def text_of(result: dict[str, Any]) -> str:
    text: str = result["content"][0]["text"]
    return text


def scope_of(method: str, path: str, headers: Any = (), **more: Any) -> Event:
    target, _, query = path.partition("?")
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in dict(headers).items()]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "method": method, "path": target, "query_string": query.encode(),
        "headers": pairs, **more,
    }  # fmt: skip


def posted(message: Any, *, path: str = "/mcp", revision: str = LATEST, **more: Any) -> tuple[Event, Events]:
    """The scope of a POST, and its events as far as the body goes."""
    headers = {"Host": "127.0.0.1", **HttpClient(no_connection).headers_for(message, revision, None)}
    body = json.dumps(message).encode()
    return scope_of("POST", path, headers, **more), Events({"type": "http.request", "body": body})


async def no_connection() -> trio.abc.Stream:
    raise AssertionError("nothing connects here")


# The rules.


REFUSALS = rows(
    [(table, rule) for table, rule in EVERY_ROW if rule.status >= 400],
    lambda table, rule: (table, rule.status, rule.code, rule.session),
    pytest.mark.long,
)


@pytest.mark.parametrize("rule", REFUSALS)
async def test_every_request_is_refused_as_the_table_says(rule: Rule) -> None:
    app = AsgiApp(server_for(rule), **options_for(rule))
    async with hosted(app) as web:
        session = await session_for(rule, web)
        fields = rule.fields(session)
        if rule.principal is not None:
            fields.append(("Authorization", rule.principal))
        scope = scope_of(rule.method, rule.path.replace("{session}", session))
        scope["headers"] = [(name.encode(), value.encode("latin-1")) for name, value in fields]
        events = Events({"type": "http.request", "body": rule.content})
        await app(scope, events.receive, events.send)
    head = Headers(events.said[0]["headers"])
    assert events.status == rule.status, events.body
    assert rule.code is None or json.loads(events.body)["error"]["code"] == rule.code
    assert {name: head.get(name) for name in rule.reply} == dict(rule.reply)
    assert session not in events.body.decode()


# Under Hypercorn.


@in_sessions
async def test_hypercorn_serves_clients_with_sessions(revision: str) -> None:
    async with hypercorn_of(AsgiApp(Watched().server)) as web:
        session = await web.initialize(revision)
        assert text_of((await web.call("tools/call", echo(), session=session)).result) == "x"
        assert (await web.end(session)).status == 204
        assert (await web.call("tools/list", session=session)).status == 404


async def test_hypercorn_serves_clients_without_sessions() -> None:
    async with hypercorn_of(AsgiApp(Watched().server)) as web:
        answer = await web.call("tools/call", echo())
        assert (answer.status, answer.type, text_of(answer.result)) == (200, "application/json", "x")
        assert (await web.call("no/such")).status == 404


async def test_hypercorn_serves_clients_of_the_old_transport() -> None:
    async with hypercorn_of(AsgiApp(Watched().server, sse_path="/sse", message_path="/messages")) as web:
        await old_transport(web, "")


async def old_transport(web: HttpClient, prefix: str) -> None:
    """A client of 2024-11-05, from its first event to its first answer."""
    async with web.stream(path=f"{prefix}/sse") as stream:
        target = (await stream.event()).data.decode()
        assert target.startswith(f"{prefix}/messages?session=")
        params = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        message = request("initialize", params, revision="2024-11-05")
        # The session is in the target; "" is only where the client keeps what it has asked.
        how: dict[str, Any] = {"revision": "2024-11-05", "session": "", "headers": {"Mcp-Session-Id": None}}
        assert (await web.post(message, path=target, **how)).status == 202
        assert (await stream.message())["result"]["protocolVersion"] == "2024-11-05"


@pytest.mark.parametrize("revision", [*SESSIONS, LATEST])
async def test_what_a_handler_reports_is_there_before_it_goes_on(revision: str) -> None:
    watched = Watched()
    async with hypercorn_of(AsgiApp(watched.server)) as web:
        session = None if revision == LATEST else await web.initialize(revision)
        message = web.request("tools/call", {"name": "wait", "arguments": {}}, revision=revision, progress="p")
        async with web.stream(message, session=session, revision=revision) as stream:
            assert (await stream.message())["params"]["progress"] == 1
            assert watched.seen == ["begun"]
            watched.go_on.set()
            assert text_of((await stream.response())["result"]) == "waited"
        assert stream.headers["X-Accel-Buffering"] == "no"


@req("cancel-14")
async def test_closing_the_stream_of_a_modern_call_cancels_it() -> None:
    watched = Watched()
    async with hypercorn_of(AsgiApp(watched.server)) as web:
        async with web.stream(web.request("tools/call", {"name": "wait", "arguments": {}}, progress="p")) as stream:
            await stream.message()
        await watched.saw("cancelled")
        assert text_of((await web.call("tools/call", echo())).result) == "x"


@in_sessions
async def test_closing_the_stream_of_a_call_in_a_session_does_not_cancel_it(revision: str) -> None:
    watched = Watched()
    async with hypercorn_of(AsgiApp(watched.server)) as web:
        session = await web.initialize(revision)
        message = web.request("tools/call", {"name": "wait", "arguments": {}}, revision=revision, progress="p")
        async with web.stream(message, session=session) as stream:
            await stream.message()
        watched.go_on.set()
        await watched.saw("finished")
        async with web.stream(session=session, after=stream.last_event_id) as stream:
            assert text_of((await stream.message())["result"]) == "waited"


async def test_calls_are_finished_before_hypercorn_shuts_down_where_the_server_is_drained_first() -> None:
    watched = Watched()

    async def shut_down() -> None:
        await watched.saw("begun")
        async with watched.server.draining(30):
            watched.go_on.set()

    async with hypercorn_of(AsgiApp(watched.server), shut_down) as web:
        message = web.request("tools/call", {"name": "wait", "arguments": {}}, progress="p")
        async with web.stream(message) as stream:
            assert text_of((await stream.response())["result"]) == "waited"


async def test_hypercorn_does_not_start_where_the_server_cannot_begin() -> None:
    app = AsgiApp(Watched(lifespan=lively([], ValueError("no such database"))).server)

    async def start() -> None:
        async with hypercorn_of(app):
            await trio.sleep_forever()

    with pytest.raises(LifespanFailureError, match="no such database"):
        await start()


async def test_hypercorn_speaks_http_2_for_it() -> None:
    async with hypercorn_of(AsgiApp(Watched().server)) as web:
        stream = await web.connect()
        client = h2.connection.H2Connection()
        client.initiate_connection()
        message = request("tools/call", echo())
        fields = {":method": "POST", ":path": "/mcp", ":scheme": "http", ":authority": web.headers["Host"]}
        fields |= {name.lower(): value for name, value in web.headers_for(message, LATEST, None).items()}
        client.send_headers(1, [(name, value) for name, value in fields.items() if value is not None])
        client.send_data(1, json.dumps(message).encode(), end_stream=True)
        await stream.send_all(client.data_to_send())
        body, ended = b"", False
        while not ended:
            for event in client.receive_data(await stream.receive_some()):
                body += event.data if isinstance(event, h2.events.DataReceived) else b""
                ended = ended or isinstance(event, h2.events.StreamEnded)
        assert text_of(json.loads(body)["result"]) == "x"
        await stream.aclose()


@every_revision
async def test_a_websocket_under_hypercorn_carries_every_revision(revision: str) -> None:
    async with hypercorn_of(AsgiApp(Watched().server)) as web:
        socket = Socket(await web.connect())
        async with client_on(socket, revision) as wire:
            assert text_of(await wire.call("tools/call", echo("\U0001f3ba \u2028"))) == "\U0001f3ba \u2028"
        assert socket.refused is None


# WebSockets.


def websocket_scope(path: str = "/ws", **more: Any) -> Event:
    scope = scope_of("GET", path, {"Host": "127.0.0.1", **more.pop("headers", {})})
    del scope["method"]
    opening = {"subprotocols": ["mcp"], "extensions": {"websocket.http.response": {}}}
    return {**scope, "type": "websocket", **opening, **more}


def received(message: Any) -> Event:
    return {"type": "websocket.receive", "text": message if isinstance(message, str) else json.dumps(message)}


@asynccontextmanager
async def websocket(app: AsgiApp, **scope: Any) -> AsyncIterator[Events]:
    events = Events({"type": "websocket.connect"})
    async with trio.open_nursery() as nursery, lifespan_of(app):
        nursery.start_soon(app, websocket_scope(**scope), events.receive, events.send)
        yield events
        await trio.testing.wait_all_tasks_blocked()


async def test_one_message_of_a_websocket_is_one_event(autojump_clock: MockClock) -> None:
    watched = Watched()
    async with websocket(AsgiApp(watched.server)) as events:
        assert (await events.until("websocket.accept"))["subprotocol"] == "mcp"
        events.tell(received(request("tools/call", echo("a"), 1)), received(request("tools/call", echo("b"), 2)))
        await trio.testing.wait_all_tasks_blocked()
        answers = [json.loads(event["text"]) for event in events.said[1:]]
        assert sorted(text_of(answer["result"]) for answer in answers) == ["a", "b"]
        events.tell({"type": "websocket.disconnect", "code": 1000})
    assert [event["type"] for event in events.said] == ["websocket.accept", "websocket.send", "websocket.send"]


async def test_a_long_message_of_a_websocket_is_one_event_too(autojump_clock: MockClock) -> None:
    texts = ["a" * 70_000, "b", "c" * 200_000]
    async with websocket(AsgiApp(Watched().server)) as events:
        events.tell(*(received(request("tools/call", echo(text), at)) for at, text in enumerate(texts)))
        await trio.testing.wait_all_tasks_blocked()
        answers = [json.loads(event["text"]) for event in events.said[1:]]
        assert sorted(text_of(answer["result"]) for answer in answers) == texts
        events.tell({"type": "websocket.disconnect", "code": 1000})


async def test_a_websocket_without_a_subprotocol_is_accepted_without_one(autojump_clock: MockClock) -> None:
    async with websocket(AsgiApp(Watched().server), subprotocols=[]) as events:
        assert (await events.until("websocket.accept"))["subprotocol"] is None
        events.tell({"type": "websocket.disconnect", "code": 1000})


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"type": "websocket.receive", "bytes": b"{}"}, 1003),
        ({"type": "websocket.receive", "bytes": b"{}", "text": None}, 1003),
        (received("x" * 1001), 1009),
        (received("\u00fc" * 501), 1009),
    ],
)
async def test_a_client_that_breaks_the_rules_of_a_websocket_is_told_why_it_is_closed(
    event: Event, code: int, autojump_clock: MockClock
) -> None:
    app = AsgiApp(Watched(limits=Limits(message_bytes=1000)).server)
    async with websocket(app) as events:
        events.tell(event)
    assert events.said[-1]["type"] == "websocket.close"
    assert events.said[-1]["code"] == code


@pytest.mark.parametrize("text", ["", "junk", "[]"])
async def test_what_is_no_message_is_answered_and_the_websocket_goes_on(text: str, autojump_clock: MockClock) -> None:
    async with websocket(AsgiApp(Watched().server)) as events:
        events.tell(received(text), received(request("tools/call", echo())))
        await trio.testing.wait_all_tasks_blocked()
        assert [("error" in json.loads(event["text"])) for event in events.said[1:]] == [True, False]
        events.tell({"type": "websocket.disconnect", "code": 1000})


async def test_the_end_of_a_websocket_cancels_its_calls(autojump_clock: MockClock) -> None:
    watched = Watched()
    async with websocket(AsgiApp(watched.server)) as events:
        events.tell(received(request("tools/call", {"name": "wait", "arguments": {}})))
        await watched.saw("begun")
        events.tell({"type": "websocket.disconnect", "code": 1006})
        await watched.saw("cancelled")


async def test_a_server_that_is_drained_closes_its_websockets(autojump_clock: MockClock) -> None:
    watched = Watched()
    async with websocket(AsgiApp(watched.server)) as events:
        await events.until("websocket.accept")
        events.tell(received(request("tools/call", {"name": "wait", "arguments": {}})))
        await watched.saw("begun")
        async with watched.server.draining(60):
            watched.go_on.set()
            await events.until("websocket.close")
    assert text_of(json.loads(events.said[1]["text"])["result"]) == "waited"
    assert events.said[-1]["code"] == 1001


async def test_the_calls_of_a_websocket_have_some_seconds_as_well(autojump_clock: MockClock) -> None:
    watched = Watched()
    began = trio.current_time()

    async def a_second_later() -> None:
        await trio.sleep(1)
        watched.go_on.set()

    async with trio.open_nursery() as nursery, websocket(AsgiApp(watched.server, shutdown_timeout=7)) as events:
        events.tell(received(request("tools/call", {"name": "wait", "arguments": {}})))
        await watched.saw("begun")
        nursery.start_soon(a_second_later)
    assert text_of(json.loads(events.said[1]["text"])["result"]) == "waited"
    assert events.said[-1]["code"] == 1001
    assert trio.current_time() - began == 1


@pytest.mark.parametrize(
    ("status", "scope"),
    [
        (403, {"headers": {"Origin": "https://evil.example"}}),
        (421, {"headers": {"Host": "evil.example"}}),
        (404, {"path": "/other"}),
        (400, {"path": "/mcp"}),
        (400, {"subprotocols": ["chat"]}),
    ],
)
@pytest.mark.parametrize("extended", [True, False])
async def test_a_websocket_is_refused_with_a_reason_where_asgi_has_a_way_to_say_it(
    status: int, scope: dict[str, Any], extended: bool, autojump_clock: MockClock
) -> None:
    if not extended:
        scope = {**scope, "extensions": None}
    async with websocket(AsgiApp(Watched().server), **scope) as events:
        pass
    if not extended:
        assert events.said == [{"type": "websocket.close"}]
        return
    assert events.status == status
    assert json.loads(events.body)["error"]["code"] == -32600


async def test_there_is_no_websocket_when_the_server_does_not_run(autojump_clock: MockClock) -> None:
    app = AsgiApp(Watched().server)
    async with lifespan_of(app):
        pass
    events = Events({"type": "websocket.connect"})
    await app(websocket_scope(), events.receive, events.send)
    assert events.status == 503


@pytest.mark.parametrize("path", ["/ws", "/other"])
async def test_a_client_may_go_before_its_websocket_is_there(path: str, autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        raise OSError("gone")

    app = AsgiApp(Watched().server)
    events = Events({"type": "websocket.connect"})
    events.before = send
    await app(websocket_scope(path), events.receive, events.send)
    assert events.said == []


async def test_who_is_not_known_gets_no_websocket(autojump_clock: MockClock) -> None:
    async def nobody(request: HttpRequest) -> None:
        return None

    async with websocket(AsgiApp(Watched().server, authenticate=nobody)) as events:
        pass
    assert events.status == 401


async def test_a_handler_behind_a_websocket_knows_who_asks_and_what_the_request_had(autojump_clock: MockClock) -> None:
    server = Server("who")

    @server.tool
    def who(ctx: Context) -> str:
        return f"{ctx.principal} {ctx.headers['X-Seen']}"

    async def somebody(request: HttpRequest) -> str:
        return "somebody"

    app = AsgiApp(server, authenticate=somebody)
    async with websocket(app, headers={"Host": "127.0.0.1", "X-Seen": "yes"}) as events:
        events.tell(received(request("tools/call", {"name": "who", "arguments": {}})))
        event = await events.until("websocket.send")
        assert text_of(json.loads(event["text"])["result"]) == "somebody yes"
        events.tell({"type": "websocket.disconnect", "code": 1000})


# The run.


def lively(seen: list[str], fails: BaseException | None = None) -> Any:
    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[str]:
        seen.append("begins")
        if fails is not None:
            raise fails
        try:
            yield "alive"
        finally:
            seen.append("ends")

    return lifespan


async def ask(app: AsgiApp, message: Any = None, **how: Any) -> Events:
    """The answer to one request."""
    scope, events = posted(message or request("tools/call", echo()), **how)
    await app(scope, events.receive, events.send)
    return events


async def test_the_run_lives_as_long_as_the_lifespan(autojump_clock: MockClock) -> None:
    seen: list[str] = []
    app = AsgiApp(Watched(lifespan=lively(seen)).server)
    async with lifespan_of(app) as life:
        assert seen == ["begins"]
        assert [(await ask(app)).status for _ in range(2)] == [200, 200]
        assert seen == ["begins"]
    assert seen == ["begins", "ends"]
    assert [event["type"] for event in life.said] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    refused = await ask(app)
    assert refused.status == 503
    assert seen == ["begins", "ends"]


async def test_a_lifespan_that_fails_ends_the_start(caplog: pytest.LogCaptureFixture) -> None:
    app = AsgiApp(Watched(lifespan=lively([], ValueError("no such database"))).server)
    events = Events({"type": "lifespan.startup"})
    await app({"type": "lifespan"}, events.receive, events.send)
    (said,) = events.said
    assert said == {"type": "lifespan.startup.failed", "message": "ValueError: no such database"}
    assert "no such database" in caplog.text
    assert (await ask(app)).status == 503


@pytest.mark.parametrize(
    "options", [{"path": "mcp"}, {"sse_path": "/sse"}, {"keep_alive": 0}, {"public_url": "nowhere"}, {"paht": "/mcp"}]
)
async def test_options_that_cannot_be_end_the_start(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    app = AsgiApp(Watched().server, **options)
    events = Events({"type": "lifespan.startup"})
    await app({"type": "lifespan"}, events.receive, events.send)
    (said,) = events.said
    assert said["type"] == "lifespan.startup.failed"
    assert next(iter(options)) in said["message"]


def test_grace_is_a_number_of_seconds() -> None:
    with pytest.raises(UsageError, match="shutdown_timeout must be a number of seconds"):
        AsgiApp(Watched().server, shutdown_timeout=-1)


async def test_a_failure_in_the_middle_ends_the_lifespan(caplog: pytest.LogCaptureFixture) -> None:
    failing = trio.Event()

    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:

            async def fail() -> None:
                await failing.wait()
                raise ValueError("in the middle")

            nursery.start_soon(fail)
            yield
            nursery.cancel_scope.cancel()

    app = AsgiApp(Watched(lifespan=lifespan).server)

    async def run() -> None:
        with unwrapped():
            async with lifespan_of(app):
                failing.set()
                await trio.sleep_forever()

    with pytest.raises(ValueError, match="in the middle"):
        await run()
    assert (await ask(app)).status == 503


async def test_calls_that_run_have_some_seconds_when_the_application_is_shut_down(autojump_clock: MockClock) -> None:
    watched = Watched()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, 1, progress="p"))
    app = AsgiApp(watched.server, shutdown_timeout=7)
    async with trio.open_nursery() as nursery:
        async with lifespan_of(app):
            nursery.start_soon(app, scope, events.receive, events.send)
            await watched.saw("begun")
            began = trio.current_time()
        assert trio.current_time() - began == 7
    assert watched.seen == ["begun", "cancelled"]
    assert (await ask(app)).status == 503


async def test_a_shutdown_waits_no_longer_than_for_the_last_call(autojump_clock: MockClock) -> None:
    watched = Watched()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, 1, progress="p"))
    app = AsgiApp(watched.server, shutdown_timeout=7)
    began = trio.current_time()

    async def a_second_later() -> None:
        await trio.sleep(1)
        assert (await ask(app)).status == 503  # nothing new
        watched.go_on.set()

    async with trio.open_nursery() as nursery, lifespan_of(app):
        nursery.start_soon(app, scope, events.receive, events.send)
        await watched.saw("begun")
        nursery.start_soon(a_second_later)
    assert trio.current_time() - began == 1
    assert b'"waited"' in events.body
    assert events.said[-1] == {"type": "http.response.body", "body": events.said[-1]["body"], "more_body": False}


async def test_without_a_lifespan_the_first_requests_begin_the_run_together(autojump_clock: MockClock) -> None:
    seen: list[str] = []
    app = AsgiApp(Watched(lifespan=lively(seen)).server)
    answers: list[Events] = []

    async def one() -> None:
        answers.append(await ask(app))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(one)
    assert [answer.status for answer in answers] == [200] * 5
    assert (await ask(app)).status == 200
    assert seen == ["begins"]


def test_a_run_that_a_request_began_ends_with_the_event_loop_and_begins_anew_in_the_next() -> None:
    seen: list[str] = []
    app = AsgiApp(Watched(lifespan=lively(seen)).server)
    for _ in range(2):
        assert trio.run(ask, app).status == 200
    assert seen == ["begins", "ends"] * 2


def test_a_run_that_cannot_begin_is_told_with_503_and_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    app = AsgiApp(Watched(lifespan=lively(seen, ValueError("no such database"))).server)

    async def main() -> None:
        for _ in range(2):
            refused = await ask(app)
            assert refused.status == 503
            assert "database" not in refused.body.decode()

    trio.run(main)
    assert seen == ["begins", "begins"]  # the database may be there the next time
    assert caplog.text.count("ValueError: no such database") == 2


def test_the_end_of_a_run_that_a_request_began_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        try:
            yield
        finally:
            raise ValueError("at the end")

    app = AsgiApp(Watched(lifespan=lifespan).server)
    assert trio.run(ask, app).status == 200
    assert "ValueError: at the end" in caplog.text


def test_an_interrupt_in_a_handler_is_for_the_program_wherever_the_run_is() -> None:
    server = Server("interrupted")

    @server.tool
    async def interrupt() -> str:
        raise KeyboardInterrupt

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, AsgiApp(server), request("tools/call", {"name": "interrupt", "arguments": {}}))
            await trio.sleep_forever()

    with pytest.raises(KeyboardInterrupt), unwrapped():
        trio.run(main)


async def test_a_larger_application_may_say_itself_when_it_runs(autojump_clock: MockClock) -> None:
    seen: list[str] = []
    app = AsgiApp(Watched(lifespan=lively(seen)).server)
    async with app.running():
        assert (await ask(app)).status == 200
        with pytest.raises(UsageError, match="running already"):
            await app.running().__aenter__()
        assert (await ask(app)).status == 200
    assert (await ask(app)).status == 503
    async with app.running():
        assert (await ask(app)).status == 200
    assert seen == ["begins", "ends"] * 2


async def test_what_the_block_of_a_run_raises_leaves_it_at_once_and_unchanged(autojump_clock: MockClock) -> None:
    watched = Watched()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}))
    app = AsgiApp(watched.server)
    began, error = trio.current_time(), ZeroDivisionError()
    async with trio.open_nursery() as nursery:

        async def block() -> None:
            async with app.running():
                nursery.start_soon(app, scope, events.receive, events.send)
                await watched.saw("begun")
                raise error

        with pytest.raises(ZeroDivisionError) as raised:
            await block()
    assert raised.value is error
    assert watched.seen == ["begun", "cancelled"]
    assert trio.current_time() == began


async def test_an_application_that_ends_in_a_run_that_goes_on_finishes_its_own_calls(autojump_clock: MockClock) -> None:
    watched = Watched()
    app = AsgiApp(watched.server, shutdown_timeout=7)
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}))

    async def meanwhile() -> None:
        await trio.sleep(1)
        assert (await ask(app)).status == 503
        assert (await ask(other)).status == 200
        watched.go_on.set()

    other = AsgiApp(watched.server)
    async with watched.server.running(), trio.open_nursery() as nursery, other.running():
        async with app.running():
            nursery.start_soon(app, scope, events.receive, events.send)
            await watched.saw("begun")
            nursery.start_soon(meanwhile)
        assert text_of(json.loads(events.body)["result"]) == "waited"
        assert (await ask(other)).status == 200


async def test_an_application_takes_part_in_a_run_that_there_is(autojump_clock: MockClock) -> None:
    seen: list[str] = []
    server = Watched(lifespan=lively(seen)).server
    async with server.running():
        for path in ("/a", "/b"):
            app = AsgiApp(server, path=path)
            async with lifespan_of(app):
                assert (await ask(app, path=path)).status == 200
        assert seen == ["begins"]


# Mounted.


@pytest.mark.parametrize("explicitly", [True, False])
async def test_a_starlette_application_has_it_under_a_prefix(explicitly: bool) -> None:
    seen: list[str] = []
    watched = Watched(lifespan=lively(seen))
    app = AsgiApp(watched.server, sse_path="/sse", message_path="/messages")

    @asynccontextmanager
    async def lifespan(whole: Starlette) -> AsyncIterator[None]:
        async with app.running() if explicitly else contextlib.nullcontext():
            yield

    starlette = Starlette(routes=[Mount("/tools", app)], lifespan=lifespan)
    async with hypercorn_of(starlette, path="/tools/mcp") as web:
        assert seen == (["begins"] if explicitly else [])
        session = await web.initialize("2025-11-25")
        assert text_of((await web.call("tools/call", echo(), session=session)).result) == "x"
        web.path = "/tools/mcp/"
        assert text_of((await web.call("tools/call", echo())).result) == "x"
        await old_transport(web, "/tools")
        socket = Socket(await web.connect(), target="/tools/ws")
        async with client_on(socket, LATEST) as wire:
            assert text_of(await wire.call("tools/call", echo())) == "x"
        assert (await web.send("GET", "/mcp")).status == 404
        assert seen == ["begins"]
    assert seen == (["begins", "ends"] if explicitly else ["begins"])


async def test_a_route_of_starlette_serves_it_at_exactly_one_path() -> None:
    async with hypercorn_of(Starlette(routes=[Route("/mcp", AsgiApp(Watched().server))])) as web:
        assert text_of((await web.call("tools/call", echo())).result) == "x"


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("", "/mcp"),
        ("", "/mcp/"),
        ("/api", "/api/mcp"),  # as ASGI has it now
        ("/api", "/mcp"),  # as it was
        ("/api/", "/api/mcp/"),
        ("/api", "/mcp/"),
        ("/mcp", "/mcp"),  # older, at /mcp/mcp
        ("/mcp", "/mcp/mcp"),
        ("/mcp", "/mcp/"),  # newer, but what else could be meant
        ("/m", "/mcp"),
        ("/caf\u00e9", "/caf\u00e9/mcp"),
    ],
)
async def test_the_path_is_found_however_the_server_tells_it(root: str, path: str, autojump_clock: MockClock) -> None:
    app = AsgiApp(Watched().server)
    assert (await ask(app, path=path, root_path=root)).status == 200


@pytest.mark.parametrize(
    ("root", "path"), [("/api", "/apimcp"), ("/api", "/other/mcp"), ("/api", "/api"), ("", "/mcp/mcp"), ("", "mcp")]
)
async def test_other_paths_are_not_served(root: str, path: str, autojump_clock: MockClock) -> None:
    app = AsgiApp(Watched().server)
    assert (await ask(app, path=path, root_path=root)).status == 404


async def test_who_misses_the_endpoint_is_told_its_whole_path(autojump_clock: MockClock) -> None:
    events = await ask(AsgiApp(Watched().server), path="/api/other", root_path="/api")
    assert "the MCP endpoint is /api/mcp (path)" in json.loads(events.body)["error"]["message"]


@pytest.mark.parametrize("path", ["/mcp", "/other"])
async def test_who_asks_for_a_websocket_elsewhere_is_told_where_they_are(
    path: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trio_mcp.http")
    async with websocket(AsgiApp(Watched().server), path=f"/api{path}", root_path="/api") as events:
        pass
    message = json.loads(events.body)["error"]["message"]
    assert "WebSockets are at /api/ws (websocket_path)" in message
    assert message in caplog.text


async def test_the_root_itself_may_be_the_path(autojump_clock: MockClock) -> None:
    app = AsgiApp(Watched().server, path="/")
    for root, path in (("", "/"), ("", ""), ("/api", "/api"), ("/api", "/api/"), ("/api", "/")):
        assert (await ask(app, path=path, root_path=root)).status == 200


@pytest.mark.parametrize(
    ("root", "options", "uri"),
    [
        ("", {}, "/messages"),
        ("/api", {}, "/api/messages"),
        ("/caf\u00e9", {}, "/caf%C3%A9/messages"),
        ("/api", {"public_url": "https://mcp.example.com/deep"}, "https://mcp.example.com/deep/messages"),
    ],
)
async def test_clients_of_the_old_transport_are_sent_where_it_is_mounted(
    root: str, options: Any, uri: str, autojump_clock: MockClock
) -> None:
    app = AsgiApp(Watched().server, sse_path="/sse", message_path="/messages", **options)
    scope = scope_of("GET", f"{root}/sse", {"Accept": "text/event-stream"}, root_path=root)
    events = Events({"type": "http.request"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app, scope, events.receive, events.send)
        await trio.testing.wait_all_tasks_blocked()
        assert f"data: {uri}?session=" in events.body.decode()
        events.tell({"type": "http.disconnect"})


# What the server in front does.


async def test_the_body_comes_in_pieces(autojump_clock: MockClock) -> None:
    scope, whole = posted(request("tools/call", echo("in pieces")))
    body = (await whole.receive())["body"]
    events = Events(
        *({"type": "http.request", "body": body[at : at + 1], "more_body": True} for at in range(len(body)))
    )
    events.tell({"type": "http.request"})
    app = AsgiApp(Watched().server)
    await app(scope, events.receive, events.send)
    assert text_of(json.loads(events.body)["result"]) == "in pieces"


async def test_a_body_that_is_too_long_is_not_read_to_its_end(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trio_mcp.http")
    scope, _ = posted({}, client=("10.0.0.1", 4711))
    part = {"type": "http.request", "body": b"x" * 600, "more_body": True}
    events = Events(part, part, part)
    app = AsgiApp(Watched(limits=Limits(message_bytes=1000)).server)
    with trio.fail_after(1):
        await app(scope, events.receive, events.send)
    assert (events.status, json.loads(events.body)["error"]["code"]) == (413, -32600)
    assert caplog.messages[-1].startswith("10.0.0.1: 'POST' '/mcp': 413, ")
    assert await events.receive() == part


async def test_a_body_that_comes_too_slowly_is_refused(autojump_clock: MockClock) -> None:
    limits = Limits(body_seconds=10, body_rate=100)
    app = AsgiApp(Watched(limits=limits).server)
    scope, _ = posted({})
    scope["headers"].append((b"origin", b"http://localhost"))
    events = Events({"type": "http.request", "body": b"x" * 500, "more_body": True})
    began = trio.current_time()
    await app(scope, events.receive, events.send)
    assert trio.current_time() - began == 10
    assert events.status == 408
    assert "Limits.body_seconds" in json.loads(events.body)["error"]["message"]
    assert Headers(events.said[0]["headers"])["Access-Control-Allow-Origin"] == "http://localhost"


async def test_long_bodies_that_are_on_their_way_have_a_bound_together(autojump_clock: MockClock) -> None:
    app = AsgiApp(Watched(limits=Limits(bytes_in_all=100_000)).server)
    scope, _ = posted({})
    scope["headers"].append((b"origin", b"http://localhost"))
    pieces = [{"type": "http.request", "body": b"x" * 60_000, "more_body": True} for _ in range(3)]
    events = Events(*pieces)
    await app(scope, events.receive, events.send)
    assert events.status == 503
    assert "Limits.bytes_in_all" in json.loads(events.body)["error"]["message"]
    assert Headers(events.said[0]["headers"])["Access-Control-Allow-Origin"] == "http://localhost"
    assert (await ask(app)).status == 200  # nothing is held any more


async def test_a_client_that_goes_in_the_middle_of_its_body_is_answered_nothing(autojump_clock: MockClock) -> None:
    scope, _ = posted({})
    events = Events({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"})
    await AsgiApp(Watched().server)(scope, events.receive, events.send)
    assert events.said == []


async def test_a_head_is_refused_before_the_body_is_asked_for(autojump_clock: MockClock) -> None:
    scope, events = posted({}, path="/other")
    await AsgiApp(Watched().server)(scope, events.receive, events.send)
    assert events.status == 404
    assert (await events.receive())["body"] == b"{}"


async def test_an_answer_says_how_long_it_is_and_a_stream_does_not(autojump_clock: MockClock) -> None:
    watched = Watched()
    app = AsgiApp(watched.server)
    answer = await ask(app)
    assert Headers(answer.said[0]["headers"])["Content-Length"] == str(len(answer.body))
    assert all(name == name.lower() for name, _ in answer.said[0]["headers"])
    watched.go_on.set()
    streamed = await ask(app, request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))
    assert "Content-Length" not in Headers(streamed.said[0]["headers"])


async def test_a_preflight_is_answered_without_a_word_about_its_length(autojump_clock: MockClock) -> None:
    scope = scope_of("OPTIONS", "/mcp", {"Origin": "http://localhost:5173", "Host": "localhost"})
    events = Events({"type": "http.request"})
    await AsgiApp(Watched().server)(scope, events.receive, events.send)
    head = Headers(events.said[0]["headers"])
    assert (events.status, events.body, head.get("Content-Length")) == (204, b"", None)
    assert head["Access-Control-Allow-Origin"] == "http://localhost:5173"


async def test_one_client_may_not_ask_more_often_than_it_may(autojump_clock: MockClock) -> None:
    app = AsgiApp(Watched(limits=Limits(request_rate=1)).server)
    clients = [("192.0.2.1", 1), ("192.0.2.1", 2), ("192.0.2.2", 1), None, None]
    statuses = [(await ask(app, client=client)).status for client in clients]
    assert statuses == [200, 429, 200, 200, 429]  # who has no address is one client


async def test_the_head_of_a_stream_is_sent_before_there_is_anything_to_say(autojump_clock: MockClock) -> None:
    watched = Watched()
    scope, events = posted(request("subscriptions/listen", {"notifications": {}}))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(watched.server), scope, events.receive, events.send)
        await events.until("http.response.body")
        events.tell({"type": "http.disconnect"})


async def test_a_silent_stream_gets_a_comment(autojump_clock: MockClock) -> None:
    watched = Watched()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(watched.server, keep_alive=20), scope, events.receive, events.send)
        await trio.sleep(50)
        assert events.body.count(b": keep-alive\n\n") == 2
        began = trio.current_time()
        events.tell({"type": "http.disconnect"})
    await watched.saw("cancelled")
    assert trio.current_time() == began


async def gone_from(send: Callable[[Event], Awaitable[None]], *, limits: Limits | None = None) -> Watched:
    """A modern call that reports progress, on a server whose `send` behaves so."""
    watched = Watched(limits=limits or Limits())
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))
    events.before = send
    with trio.fail_after(1000):
        await AsgiApp(watched.server)(scope, events.receive, events.send)
        await watched.saw("cancelled")
    return watched


async def test_a_server_that_raises_oserror_says_that_the_client_has_gone(autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        raise OSError("gone")

    await gone_from(send)


@pytest.mark.parametrize(
    "message",
    [notification("notifications/initialized"), request("tools/call", echo()), request("ping", revision="2025-06-18")],
)
async def test_a_client_that_is_gone_when_it_is_answered_is_no_error(
    message: Any, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def send(event: Event) -> None:
        raise OSError("gone")

    scope, events = posted(message)
    events.before = send
    await AsgiApp(Watched().server)(scope, events.receive, events.send)
    assert caplog.text == ""


async def test_a_server_that_fails_to_say_whether_the_client_is_there_has_lost_it(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    watched = Watched()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))

    async def receive() -> Event:
        event = await events.receive()
        if event["type"] == "failure":
            raise LookupError("the server's own")
        return event

    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(watched.server), scope, receive, events.send)
        await watched.saw("begun")
        events.tell({"type": "http.request"}, {"type": "failure"})
    await watched.saw("cancelled")
    assert "LookupError: the server's own" in caplog.text
    assert all(event.get("more_body") is not False for event in events.said)


async def test_a_client_that_takes_nothing_is_given_up(autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        await trio.sleep_forever()

    began = trio.current_time()
    await gone_from(send, limits=Limits(write_seconds=12))
    assert trio.current_time() - began == 12


async def test_a_client_that_leaves_is_not_written_to_any_longer(autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        events.tell({"type": "http.disconnect"})
        await trio.sleep_forever()

    watched = Watched()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))
    events.before = send
    began = trio.current_time()
    await AsgiApp(watched.server)(scope, events.receive, events.send)
    await watched.saw("cancelled")
    assert trio.current_time() == began


async def test_a_client_that_takes_a_long_answer_slowly_is_not_given_up(autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        await trio.sleep(len(event.get("body", b"")) / 10_000)

    scope, events = posted(request("tools/call", echo("x" * 300_000)))
    events.before = send
    await AsgiApp(Watched(limits=Limits(write_seconds=12)).server)(scope, events.receive, events.send)
    assert text_of(json.loads(events.body)["result"]) == "x" * 300_000


async def test_a_server_that_fails_in_its_own_way_is_told_to_the_log(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def send(event: Event) -> None:
        raise LookupError("the server's own")

    await gone_from(send)
    assert "LookupError: the server's own" in caplog.text


async def test_a_server_may_fail_while_the_last_of_an_answer_is_on_its_way(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    failing = trio.Event()

    async def send(event: Event) -> None:
        if event.get("more_body") is False:
            failing.set()
            await trio.testing.wait_all_tasks_blocked()

    async def receive() -> Event:
        if event := next(body, None):
            return event
        await failing.wait()
        raise LookupError("the server's own")

    watched = Watched()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}))
    body = iter([await events.receive()])
    events.before = send
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(watched.server), scope, receive, events.send)
        await watched.saw("begun")
        watched.go_on.set()
    await events.until("http.response.body")
    assert [event["type"] for event in events.said] == ["http.response.start", "http.response.body"]
    assert "LookupError: the server's own" in caplog.text


async def test_a_server_may_say_that_the_client_has_gone_while_the_last_of_an_answer_is_on_its_way(
    autojump_clock: MockClock,
) -> None:
    async def send(event: Event) -> None:
        if event.get("more_body") is False:
            events.tell({"type": "http.disconnect"})
            await trio.testing.wait_all_tasks_blocked()

    watched = Watched()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))
    events.before = send
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(watched.server), scope, events.receive, events.send)
        await watched.saw("begun")
        watched.go_on.set()
    assert b'"waited"' in events.body
    assert events.said[-1]["more_body"] is False


async def test_a_request_that_the_server_cancels_is_a_client_that_has_gone(autojump_clock: MockClock) -> None:
    watched = Watched()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(watched.server), scope, events.receive, events.send)
        await watched.saw("begun")
        nursery.cancel_scope.cancel()
    await watched.saw("cancelled")


async def test_a_request_that_is_cancelled_as_its_handler_begins_is_one_as_well(autojump_clock: MockClock) -> None:
    watched = Watched()
    app = AsgiApp(watched.server)
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))
    (body,) = [await events.receive()]

    async def receive() -> Event:
        await trio.lowlevel.checkpoint()
        cancelling.cancel()
        return body

    async with app.running():
        with trio.CancelScope() as cancelling:
            await app(scope, receive, events.send)
        assert cancelling.cancelled_caught
        await trio.testing.wait_all_tasks_blocked()
    # Whoever hears of it first: the handler, before it has begun anything, or while it is at it.
    assert watched.seen in ([], ["begun", "cancelled"])
    assert events.said == []


# What is answered at once is written by the task of the request itself, and what was begun may go on for a second.
TAKES_NOTHING = {
    "a refusal": (request("no/such"), 1),
    "the head of a stream": (request("subscriptions/listen", {"notifications": {"toolsListChanged": True}}), 1),
    "the answer of a handler": (request("tools/call", echo()), 0),
    "no answer": (notification("notifications/initialized"), 1),
}


@pytest.mark.parametrize(("message", "seconds"), TAKES_NOTHING.values(), ids=TAKES_NOTHING)
async def test_a_client_that_takes_nothing_holds_up_who_cancels_its_request_for_a_second_at_most(
    message: Any, seconds: float, autojump_clock: MockClock
) -> None:
    async def send(event: Event) -> None:
        await trio.sleep_forever()

    app = AsgiApp(Watched().server)
    scope, events = posted(message)
    events.before = send
    async with app.running():
        began = trio.current_time()
        with trio.move_on_after(10):
            await app(scope, events.receive, events.send)
        assert trio.current_time() - began == 10 + seconds


async def test_what_is_on_its_way_when_a_request_is_cancelled_may_get_there(autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        await trio.sleep(0.4)

    app = AsgiApp(Watched().server)
    scope, events = posted(request("no/such"))
    events.before = send
    async with app.running():
        with trio.move_on_after(0.1):
            await app(scope, events.receive, events.send)
    assert json.loads(events.body)["error"]["code"] == -32601


async def test_a_client_whose_stream_is_carried_on_elsewhere_is_let_go(autojump_clock: MockClock) -> None:
    watched = Watched()
    async with hosted(AsgiApp(watched.server)) as web:
        session = await web.initialize("2025-11-25")
        message = web.request("tools/call", {"name": "wait", "arguments": {}}, revision="2025-11-25", progress="p")
        async with web.stream(message, session=session) as first:
            await first.message()
            async with web.stream(session=session, after=first.last_event_id) as second:
                with pytest.raises(Cut):
                    await first.event()
                watched.go_on.set()
                assert text_of((await second.message())["result"]) == "waited"


async def test_what_fails_outside_of_handlers_is_an_internal_error(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def authenticate(request: HttpRequest) -> str:
        raise LookupError("no such table")

    answer = await ask(AsgiApp(Watched().server, authenticate=authenticate))
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (500, "internal error")
    assert "LookupError: no such table" in caplog.text


async def test_a_page_may_read_that_its_request_has_failed(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    def event_log(session: str) -> Any:
        raise LookupError("no such table")

    app = AsgiApp(Watched().server, event_log=event_log, allowed_origins=["https://app.example"])
    params = {"protocolVersion": SESSIONS[-1], "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    async with hosted(app) as web:
        fields = {"Origin": "https://app.example"}
        answer = await web.call("initialize", params, revision=SESSIONS[-1], headers=fields)
    assert (answer.status, answer.json["error"]["message"]) == (500, "internal error")
    assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert "LookupError: no such table" in caplog.text


# Other event loops.


@pytest.mark.parametrize("of", [lambda server: server, AsgiApp])
def test_on_another_event_loop_a_run_says_what_to_use(of: Any) -> None:
    async def main() -> None:
        async with of(Watched().server).running():
            raise AssertionError

    with pytest.raises(UsageError, match="hypercorn --worker-class trio"):
        asyncio.run(main())


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_on_another_event_loop_a_request_says_what_to_use(kind: str) -> None:
    async def never(*event: Any) -> Any:
        raise AssertionError(event)

    with pytest.raises(UsageError, match="hypercorn --worker-class trio"):
        asyncio.run(AsgiApp(Watched().server)({"type": kind}, never, never))


def test_on_another_event_loop_the_start_says_what_to_use() -> None:
    async def receive() -> Event:
        return {"type": "lifespan.startup"}

    async def send(event: Any) -> None:
        said.append(event)

    said: list[Any] = []
    asyncio.run(AsgiApp(Watched().server)({"type": "lifespan"}, receive, send))
    (event,) = said
    assert event["type"] == "lifespan.startup.failed"
    assert "hypercorn --worker-class trio" in event["message"]


async def test_another_kind_of_scope_is_refused() -> None:
    events = Events()
    with pytest.raises(UsageError, match="'email'"):
        await AsgiApp(Watched().server)({"type": "email"}, events.receive, events.send)


# What is cut off, and what is not.


async def test_a_call_that_does_not_end_in_its_grace_is_told_so(autojump_clock: MockClock) -> None:
    watched = Watched()
    app = AsgiApp(watched.server, shutdown_timeout=2)
    async with trio.open_nursery() as nursery:
        async with app.running():
            scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}))
            nursery.start_soon(app, scope, events.receive, events.send)
            await watched.saw("begun")
        assert b"shut down before this call had finished" in events.said[-1]["body"]
    assert trio.current_time() == 2


@pytest.mark.parametrize("shared", [False, True])
async def test_answers_still_come_in_while_calls_have_their_grace(shared: bool, autojump_clock: MockClock) -> None:
    scripted, told = ScriptedServer(), []
    app = AsgiApp(scripted.server, shutdown_timeout=5)
    running = scripted.server.running() if shared else contextlib.nullcontext()
    async with running, trio.open_nursery() as nursery, app.running():
        asks = play_call("roots", revision=LATEST, capabilities={"roots": {}})
        scope, events = posted(asks)
        await app(scope, events.receive, events.send)
        asked = json.loads(events.said[-1]["body"])["result"]

        @nursery.start_soon
        async def _() -> None:
            await trio.sleep(1)
            (key,) = asked["inputRequests"]
            more = {"inputResponses": {key: {"roots": []}}, "requestState": asked["requestState"]}
            scope, events = posted({**asks, "id": 2, "params": {**asks["params"], **more}})
            await app(scope, events.receive, events.send)
            told.append(text_of(json.loads(events.said[-1]["body"])["result"]))

    assert (told, trio.current_time()) == (["done"], 1)
