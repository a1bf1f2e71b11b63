"""The ASGI application: with scopes made by the test, under Hypercorn's Trio worker, and mounted in Starlette."""

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
session_revisions = pytest.mark.parametrize("revision", SESSIONS)


class ObservedServer:
    """A server with the tools `echo` and `wait`; `steps` records the steps of `wait`."""

    def __init__(self, **options: Any) -> None:
        self.server = Server("watched", **options)
        self.steps: list[str] = []
        self.go_on = trio.Event()
        self.changed = trio.lowlevel.ParkingLot()

        @self.server.tool
        async def echo(text: str) -> str:
            return text

        @self.server.tool
        async def wait(ctx: Context) -> str:
            """Report progress, and wait for `go_on`."""
            self.record("begun")
            try:
                await ctx.progress(1, 2)
                await self.go_on.wait()
            except trio.Cancelled:
                self.record("cancelled")
                raise
            self.record("finished")
            return "waited"

    def record(self, step: str) -> None:
        self.steps.append(step)
        self.changed.unpark_all()

    async def wait_for(self, step: str) -> None:
        with trio.fail_after(60):
            while step not in self.steps:
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
    """The scope of a POST, and its events up to the end of the body."""
    headers = {"Host": "127.0.0.1", **HttpClient(no_connection).headers_for(message, revision, None)}
    body = json.dumps(message).encode()
    return scope_of("POST", path, headers, **more), Events({"type": "http.request", "body": body})


async def no_connection() -> trio.abc.Stream:
    raise AssertionError("this client does not connect")


# The table of rules


REFUSALS = rows(
    [(table, rule) for table, rule in EVERY_ROW if rule.status >= 400],
    lambda table, rule: (table, rule.status, rule.code, rule.session),
    pytest.mark.long,
)


@pytest.mark.parametrize("rule", REFUSALS)
async def test_each_refusal_of_the_table_is_the_same_under_asgi(rule: Rule) -> None:
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
    head = Headers(events.sent[0]["headers"])
    assert events.status == rule.status, events.body
    assert rule.code is None or json.loads(events.body)["error"]["code"] == rule.code
    assert {name: head.get(name) for name in rule.reply} == dict(rule.reply)
    assert session not in events.body.decode()


# Under Hypercorn


@session_revisions
async def test_hypercorn_serves_clients_with_sessions(revision: str) -> None:
    async with hypercorn_of(AsgiApp(ObservedServer().server)) as web:
        session = await web.initialize(revision)
        assert text_of((await web.call("tools/call", echo(), session=session)).result) == "x"
        assert (await web.end(session)).status == 204
        assert (await web.call("tools/list", session=session)).status == 404


async def test_hypercorn_serves_clients_without_sessions() -> None:
    async with hypercorn_of(AsgiApp(ObservedServer().server)) as web:
        answer = await web.call("tools/call", echo())
        assert (answer.status, answer.type, text_of(answer.result)) == (200, "application/json", "x")
        assert (await web.call("no/such")).status == 404


async def test_hypercorn_serves_clients_of_http_sse() -> None:
    async with hypercorn_of(AsgiApp(ObservedServer().server, sse_path="/sse", message_path="/messages")) as web:
        await sse_client(web, "")


async def sse_client(web: HttpClient, prefix: str) -> None:
    """Run a client of 2024-11-05 from its first event to its first answer."""
    async with web.stream(path=f"{prefix}/sse") as stream:
        target = (await stream.event()).data.decode()
        assert target.startswith(f"{prefix}/messages?session=")
        params = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        message = request("initialize", params, revision="2024-11-05")
        # The target has the session.  "" is only the key under which the client keeps its requests.
        how: dict[str, Any] = {"revision": "2024-11-05", "session": "", "headers": {"Mcp-Session-Id": None}}
        assert (await web.post(message, path=target, **how)).status == 202
        assert (await stream.message())["result"]["protocolVersion"] == "2024-11-05"


@pytest.mark.parametrize("revision", [*SESSIONS, LATEST])
async def test_a_progress_report_arrives_before_the_handler_continues(revision: str) -> None:
    observed = ObservedServer()
    async with hypercorn_of(AsgiApp(observed.server)) as web:
        session = None if revision == LATEST else await web.initialize(revision)
        message = web.request("tools/call", {"name": "wait", "arguments": {}}, revision=revision, progress="p")
        async with web.stream(message, session=session, revision=revision) as stream:
            assert (await stream.message())["params"]["progress"] == 1
            assert observed.steps == ["begun"]
            observed.go_on.set()
            assert text_of((await stream.response())["result"]) == "waited"
        assert stream.headers["X-Accel-Buffering"] == "no"


@req("cancel-14")
async def test_closing_the_stream_of_a_modern_call_cancels_it() -> None:
    observed = ObservedServer()
    async with hypercorn_of(AsgiApp(observed.server)) as web:
        async with web.stream(web.request("tools/call", {"name": "wait", "arguments": {}}, progress="p")) as stream:
            await stream.message()
        await observed.wait_for("cancelled")
        assert text_of((await web.call("tools/call", echo())).result) == "x"


@session_revisions
async def test_closing_the_stream_of_a_call_in_a_session_does_not_cancel_it(revision: str) -> None:
    observed = ObservedServer()
    async with hypercorn_of(AsgiApp(observed.server)) as web:
        session = await web.initialize(revision)
        message = web.request("tools/call", {"name": "wait", "arguments": {}}, revision=revision, progress="p")
        async with web.stream(message, session=session) as stream:
            await stream.message()
        observed.go_on.set()
        await observed.wait_for("finished")
        async with web.stream(session=session, after=stream.last_event_id) as stream:
            assert text_of((await stream.message())["result"]) == "waited"


async def test_calls_finish_before_hypercorn_shuts_down_if_the_server_drains() -> None:
    observed = ObservedServer()

    async def shut_down() -> None:
        await observed.wait_for("begun")
        async with observed.server.draining(30):
            observed.go_on.set()

    async with hypercorn_of(AsgiApp(observed.server), shut_down) as web:
        message = web.request("tools/call", {"name": "wait", "arguments": {}}, progress="p")
        async with web.stream(message) as stream:
            assert text_of((await stream.response())["result"]) == "waited"


async def test_hypercorn_does_not_start_if_the_lifespan_of_the_server_fails() -> None:
    app = AsgiApp(ObservedServer(lifespan=recording_lifespan([], ValueError("no such database"))).server)

    async def start() -> None:
        async with hypercorn_of(app):
            await trio.sleep_forever()

    with pytest.raises(LifespanFailureError, match="no such database"):
        await start()


async def test_hypercorn_serves_the_application_over_http_2() -> None:
    async with hypercorn_of(AsgiApp(ObservedServer().server)) as web:
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
    async with hypercorn_of(AsgiApp(ObservedServer().server)) as web:
        socket = Socket(await web.connect())
        async with client_on(socket, revision) as wire:
            assert text_of(await wire.call("tools/call", echo("\U0001f3ba \u2028"))) == "\U0001f3ba \u2028"
        assert socket.refused is None


# WebSockets


def websocket_scope(path: str = "/ws", **more: Any) -> Event:
    scope = scope_of("GET", path, {"Host": "127.0.0.1", **more.pop("headers", {})})
    del scope["method"]
    opening = {"subprotocols": ["mcp"], "extensions": {"websocket.http.response": {}}}
    return {**scope, "type": "websocket", **opening, **more}


def receive_event(message: Any) -> Event:
    return {"type": "websocket.receive", "text": message if isinstance(message, str) else json.dumps(message)}


@asynccontextmanager
async def websocket(app: AsgiApp, **scope: Any) -> AsyncIterator[Events]:
    events = Events({"type": "websocket.connect"})
    async with trio.open_nursery() as nursery, lifespan_of(app):
        nursery.start_soon(app, websocket_scope(**scope), events.receive, events.send)
        yield events
        await trio.testing.wait_all_tasks_blocked()


async def test_one_message_of_a_websocket_is_one_event(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    async with websocket(AsgiApp(observed.server)) as events:
        assert (await events.until("websocket.accept"))["subprotocol"] == "mcp"
        events.feed(
            receive_event(request("tools/call", echo("a"), 1)), receive_event(request("tools/call", echo("b"), 2))
        )
        await trio.testing.wait_all_tasks_blocked()
        answers = [json.loads(event["text"]) for event in events.sent[1:]]
        assert sorted(text_of(answer["result"]) for answer in answers) == ["a", "b"]
        events.feed({"type": "websocket.disconnect", "code": 1000})
    assert [event["type"] for event in events.sent] == ["websocket.accept", "websocket.send", "websocket.send"]


async def test_a_long_message_of_a_websocket_is_one_event(autojump_clock: MockClock) -> None:
    texts = ["a" * 70_000, "b", "c" * 200_000]
    async with websocket(AsgiApp(ObservedServer().server)) as events:
        events.feed(*(receive_event(request("tools/call", echo(text), at)) for at, text in enumerate(texts)))
        await trio.testing.wait_all_tasks_blocked()
        answers = [json.loads(event["text"]) for event in events.sent[1:]]
        assert sorted(text_of(answer["result"]) for answer in answers) == texts
        events.feed({"type": "websocket.disconnect", "code": 1000})


async def test_a_websocket_without_a_subprotocol_is_accepted_without_one(autojump_clock: MockClock) -> None:
    async with websocket(AsgiApp(ObservedServer().server), subprotocols=[]) as events:
        assert (await events.until("websocket.accept"))["subprotocol"] is None
        events.feed({"type": "websocket.disconnect", "code": 1000})


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"type": "websocket.receive", "bytes": b"{}"}, 1003),
        ({"type": "websocket.receive", "bytes": b"{}", "text": None}, 1003),
        (receive_event("x" * 1001), 1009),
        (receive_event("\u00fc" * 501), 1009),
    ],
)
async def test_a_websocket_that_breaks_the_rules_is_closed_with_a_code(
    event: Event, code: int, autojump_clock: MockClock
) -> None:
    app = AsgiApp(ObservedServer(limits=Limits(message_bytes=1000)).server)
    async with websocket(app) as events:
        events.feed(event)
    assert events.sent[-1]["type"] == "websocket.close"
    assert events.sent[-1]["code"] == code


@pytest.mark.parametrize("text", ["", "junk", "[]"])
async def test_an_invalid_message_is_answered_and_the_websocket_stays_open(
    text: str, autojump_clock: MockClock
) -> None:
    async with websocket(AsgiApp(ObservedServer().server)) as events:
        events.feed(receive_event(text), receive_event(request("tools/call", echo())))
        await trio.testing.wait_all_tasks_blocked()
        assert [("error" in json.loads(event["text"])) for event in events.sent[1:]] == [True, False]
        events.feed({"type": "websocket.disconnect", "code": 1000})


async def test_the_end_of_a_websocket_cancels_its_calls(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    async with websocket(AsgiApp(observed.server)) as events:
        events.feed(receive_event(request("tools/call", {"name": "wait", "arguments": {}})))
        await observed.wait_for("begun")
        events.feed({"type": "websocket.disconnect", "code": 1006})
        await observed.wait_for("cancelled")


async def test_a_server_that_is_drained_closes_its_websockets(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    async with websocket(AsgiApp(observed.server)) as events:
        await events.until("websocket.accept")
        events.feed(receive_event(request("tools/call", {"name": "wait", "arguments": {}})))
        await observed.wait_for("begun")
        async with observed.server.draining(60):
            observed.go_on.set()
            await events.until("websocket.close")
    assert text_of(json.loads(events.sent[1]["text"])["result"]) == "waited"
    assert events.sent[-1]["code"] == 1001


async def test_the_calls_of_a_websocket_have_the_shutdown_timeout(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    began = trio.current_time()

    async def a_second_later() -> None:
        await trio.sleep(1)
        observed.go_on.set()

    async with trio.open_nursery() as nursery, websocket(AsgiApp(observed.server, shutdown_timeout=7)) as events:
        events.feed(receive_event(request("tools/call", {"name": "wait", "arguments": {}})))
        await observed.wait_for("begun")
        nursery.start_soon(a_second_later)
    assert text_of(json.loads(events.sent[1]["text"])["result"]) == "waited"
    assert events.sent[-1]["code"] == 1001
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
async def test_a_websocket_is_refused_with_a_reason_if_asgi_allows_one(
    status: int, scope: dict[str, Any], extended: bool, autojump_clock: MockClock
) -> None:
    if not extended:
        scope = {**scope, "extensions": None}
    async with websocket(AsgiApp(ObservedServer().server), **scope) as events:
        pass
    if not extended:
        assert events.sent == [{"type": "websocket.close"}]
        return
    assert events.status == status
    assert json.loads(events.body)["error"]["code"] == -32600


async def test_a_websocket_is_refused_when_the_server_does_not_run(autojump_clock: MockClock) -> None:
    app = AsgiApp(ObservedServer().server)
    async with lifespan_of(app):
        pass
    events = Events({"type": "websocket.connect"})
    await app(websocket_scope(), events.receive, events.send)
    assert events.status == 503


@pytest.mark.parametrize("path", ["/ws", "/other"])
async def test_a_client_can_disconnect_before_its_websocket_is_accepted(path: str, autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        raise OSError("gone")

    app = AsgiApp(ObservedServer().server)
    events = Events({"type": "websocket.connect"})
    events.before = send
    await app(websocket_scope(path), events.receive, events.send)
    assert events.sent == []


async def test_an_unauthenticated_websocket_is_refused(autojump_clock: MockClock) -> None:
    async def refuse(request: HttpRequest) -> None:
        return None

    async with websocket(AsgiApp(ObservedServer().server, authenticate=refuse)) as events:
        pass
    assert events.status == 401


async def test_a_handler_of_a_websocket_has_the_principal_and_the_headers(autojump_clock: MockClock) -> None:
    server = Server("who")

    @server.tool
    def who(ctx: Context) -> str:
        return f"{ctx.principal} {ctx.headers['X-Seen']}"

    async def authenticate(request: HttpRequest) -> str:
        return "ada"

    app = AsgiApp(server, authenticate=authenticate)
    async with websocket(app, headers={"Host": "127.0.0.1", "X-Seen": "yes"}) as events:
        events.feed(receive_event(request("tools/call", {"name": "who", "arguments": {}})))
        event = await events.until("websocket.send")
        assert text_of(json.loads(event["text"])["result"]) == "ada yes"
        events.feed({"type": "websocket.disconnect", "code": 1000})


# The run of the server


def recording_lifespan(seen: list[str], fails: BaseException | None = None) -> Any:
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
    """Send one request, and return its events with the answer."""
    scope, events = posted(message or request("tools/call", echo()), **how)
    await app(scope, events.receive, events.send)
    return events


async def test_the_server_runs_for_the_duration_of_the_lifespan(autojump_clock: MockClock) -> None:
    seen: list[str] = []
    app = AsgiApp(ObservedServer(lifespan=recording_lifespan(seen)).server)
    async with lifespan_of(app) as life:
        assert seen == ["begins"]
        assert [(await ask(app)).status for _ in range(2)] == [200, 200]
        assert seen == ["begins"]
    assert seen == ["begins", "ends"]
    assert [event["type"] for event in life.sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    refused = await ask(app)
    assert refused.status == 503
    assert seen == ["begins", "ends"]


async def test_a_lifespan_that_fails_ends_the_start(caplog: pytest.LogCaptureFixture) -> None:
    app = AsgiApp(ObservedServer(lifespan=recording_lifespan([], ValueError("no such database"))).server)
    events = Events({"type": "lifespan.startup"})
    await app({"type": "lifespan"}, events.receive, events.send)
    (event,) = events.sent
    assert event == {"type": "lifespan.startup.failed", "message": "ValueError: no such database"}
    assert "no such database" in caplog.text
    assert (await ask(app)).status == 503


@pytest.mark.parametrize(
    "options", [{"path": "mcp"}, {"sse_path": "/sse"}, {"keep_alive": 0}, {"public_url": "nowhere"}, {"paht": "/mcp"}]
)
async def test_invalid_options_fail_the_startup(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    app = AsgiApp(ObservedServer().server, **options)
    events = Events({"type": "lifespan.startup"})
    await app({"type": "lifespan"}, events.receive, events.send)
    (event,) = events.sent
    assert event["type"] == "lifespan.startup.failed"
    assert next(iter(options)) in event["message"]


def test_the_shutdown_timeout_is_a_number_of_seconds() -> None:
    with pytest.raises(UsageError, match="shutdown_timeout must be a number of seconds"):
        AsgiApp(ObservedServer().server, shutdown_timeout=-1)


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

    app = AsgiApp(ObservedServer(lifespan=lifespan).server)

    async def run() -> None:
        with unwrapped():
            async with lifespan_of(app):
                failing.set()
                await trio.sleep_forever()

    with pytest.raises(ValueError, match="in the middle"):
        await run()
    assert (await ask(app)).status == 503


async def test_running_calls_have_the_shutdown_timeout(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, 1, progress="p"))
    app = AsgiApp(observed.server, shutdown_timeout=7)
    async with trio.open_nursery() as nursery:
        async with lifespan_of(app):
            nursery.start_soon(app, scope, events.receive, events.send)
            await observed.wait_for("begun")
            began = trio.current_time()
        assert trio.current_time() - began == 7
    assert observed.steps == ["begun", "cancelled"]
    assert (await ask(app)).status == 503


async def test_a_shutdown_waits_no_longer_than_for_the_last_call(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, 1, progress="p"))
    app = AsgiApp(observed.server, shutdown_timeout=7)
    began = trio.current_time()

    async def a_second_later() -> None:
        await trio.sleep(1)
        assert (await ask(app)).status == 503  # new requests are refused
        observed.go_on.set()

    async with trio.open_nursery() as nursery, lifespan_of(app):
        nursery.start_soon(app, scope, events.receive, events.send)
        await observed.wait_for("begun")
        nursery.start_soon(a_second_later)
    assert trio.current_time() - began == 1
    assert b'"waited"' in events.body
    assert events.sent[-1] == {"type": "http.response.body", "body": events.sent[-1]["body"], "more_body": False}


async def test_without_a_lifespan_the_first_requests_begin_the_run_together(autojump_clock: MockClock) -> None:
    seen: list[str] = []
    app = AsgiApp(ObservedServer(lifespan=recording_lifespan(seen)).server)
    answers: list[Events] = []

    async def one() -> None:
        answers.append(await ask(app))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(one)
    assert [answer.status for answer in answers] == [200] * 5
    assert (await ask(app)).status == 200
    assert seen == ["begins"]


def test_a_run_started_by_a_request_ends_with_its_event_loop() -> None:
    seen: list[str] = []
    app = AsgiApp(ObservedServer(lifespan=recording_lifespan(seen)).server)
    for _ in range(2):
        assert trio.run(ask, app).status == 200
    assert seen == ["begins", "ends"] * 2


def test_a_run_that_cannot_start_gives_503_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    app = AsgiApp(ObservedServer(lifespan=recording_lifespan(seen, ValueError("no such database"))).server)

    async def main() -> None:
        for _ in range(2):
            refused = await ask(app)
            assert refused.status == 503
            assert "database" not in refused.body.decode()

    trio.run(main)
    assert seen == ["begins", "begins"]  # the second request tries again
    assert caplog.text.count("ValueError: no such database") == 2


def test_a_failure_at_the_end_of_a_run_started_by_a_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        try:
            yield
        finally:
            raise ValueError("at the end")

    app = AsgiApp(ObservedServer(lifespan=lifespan).server)
    assert trio.run(ask, app).status == 200
    assert "ValueError: at the end" in caplog.text


def test_a_keyboard_interrupt_in_a_handler_reaches_the_program() -> None:
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


async def test_a_larger_application_can_run_the_application_itself(autojump_clock: MockClock) -> None:
    seen: list[str] = []
    app = AsgiApp(ObservedServer(lifespan=recording_lifespan(seen)).server)
    async with app.running():
        assert (await ask(app)).status == 200
        with pytest.raises(UsageError, match="running already"):
            await app.running().__aenter__()
        assert (await ask(app)).status == 200
    assert (await ask(app)).status == 503
    async with app.running():
        assert (await ask(app)).status == 200
    assert seen == ["begins", "ends"] * 2


async def test_an_exception_in_the_block_of_a_run_leaves_it_at_once_unchanged(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}))
    app = AsgiApp(observed.server)
    began, error = trio.current_time(), ZeroDivisionError()
    async with trio.open_nursery() as nursery:

        async def block() -> None:
            async with app.running():
                nursery.start_soon(app, scope, events.receive, events.send)
                await observed.wait_for("begun")
                raise error

        with pytest.raises(ZeroDivisionError) as raised:
            await block()
    assert raised.value is error
    assert observed.steps == ["begun", "cancelled"]
    assert trio.current_time() == began


async def test_an_application_finishes_its_calls_when_it_ends_before_the_server(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    app = AsgiApp(observed.server, shutdown_timeout=7)
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}))

    async def finish_later() -> None:
        await trio.sleep(1)
        assert (await ask(app)).status == 503
        assert (await ask(other)).status == 200
        observed.go_on.set()

    other = AsgiApp(observed.server)
    async with observed.server.running(), trio.open_nursery() as nursery, other.running():
        async with app.running():
            nursery.start_soon(app, scope, events.receive, events.send)
            await observed.wait_for("begun")
            nursery.start_soon(finish_later)
        assert text_of(json.loads(events.body)["result"]) == "waited"
        assert (await ask(other)).status == 200


async def test_an_application_joins_an_existing_run_of_the_server(autojump_clock: MockClock) -> None:
    seen: list[str] = []
    server = ObservedServer(lifespan=recording_lifespan(seen)).server
    async with server.running():
        for path in ("/a", "/b"):
            app = AsgiApp(server, path=path)
            async with lifespan_of(app):
                assert (await ask(app, path=path)).status == 200
        assert seen == ["begins"]


# Mounted applications


@pytest.mark.parametrize("explicitly", [True, False])
async def test_a_starlette_application_mounts_it_under_a_prefix(explicitly: bool) -> None:
    seen: list[str] = []
    observed = ObservedServer(lifespan=recording_lifespan(seen))
    app = AsgiApp(observed.server, sse_path="/sse", message_path="/messages")

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
        await sse_client(web, "/tools")
        socket = Socket(await web.connect(), target="/tools/ws")
        async with client_on(socket, LATEST) as wire:
            assert text_of(await wire.call("tools/call", echo())) == "x"
        assert (await web.send("GET", "/mcp")).status == 404
        assert seen == ["begins"]
    assert seen == (["begins", "ends"] if explicitly else ["begins"])


async def test_a_route_of_starlette_serves_it_at_exactly_one_path() -> None:
    async with hypercorn_of(Starlette(routes=[Route("/mcp", AsgiApp(ObservedServer().server))])) as web:
        assert text_of((await web.call("tools/call", echo())).result) == "x"


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("", "/mcp"),
        ("", "/mcp/"),
        ("/api", "/api/mcp"),  # as the ASGI specification says now
        ("/api", "/mcp"),  # as older servers send it
        ("/api/", "/api/mcp/"),
        ("/api", "/mcp/"),
        ("/mcp", "/mcp"),  # an older server, for /mcp/mcp
        ("/mcp", "/mcp/mcp"),
        ("/mcp", "/mcp/"),  # a newer server; only the endpoint can be meant
        ("/m", "/mcp"),
        ("/caf\u00e9", "/caf\u00e9/mcp"),
    ],
)
async def test_the_endpoint_is_found_with_each_form_of_root_path(
    root: str, path: str, autojump_clock: MockClock
) -> None:
    app = AsgiApp(ObservedServer().server)
    assert (await ask(app, path=path, root_path=root)).status == 200


@pytest.mark.parametrize(
    ("root", "path"), [("/api", "/apimcp"), ("/api", "/other/mcp"), ("/api", "/api"), ("", "/mcp/mcp"), ("", "mcp")]
)
async def test_other_paths_are_not_served(root: str, path: str, autojump_clock: MockClock) -> None:
    app = AsgiApp(ObservedServer().server)
    assert (await ask(app, path=path, root_path=root)).status == 404


async def test_a_request_to_another_path_gets_the_full_path_of_the_endpoint(autojump_clock: MockClock) -> None:
    events = await ask(AsgiApp(ObservedServer().server), path="/api/other", root_path="/api")
    assert "the MCP endpoint is /api/mcp (path)" in json.loads(events.body)["error"]["message"]


@pytest.mark.parametrize("path", ["/mcp", "/other"])
async def test_a_websocket_at_another_path_gets_the_full_path_of_websockets(
    path: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trio_mcp.http")
    async with websocket(AsgiApp(ObservedServer().server), path=f"/api{path}", root_path="/api") as events:
        pass
    message = json.loads(events.body)["error"]["message"]
    assert "WebSockets are at /api/ws (websocket_path)" in message
    assert message in caplog.text


async def test_the_path_of_the_endpoint_can_be_the_root(autojump_clock: MockClock) -> None:
    app = AsgiApp(ObservedServer().server, path="/")
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
async def test_clients_of_http_sse_get_the_mounted_path_for_posts(
    root: str, options: Any, uri: str, autojump_clock: MockClock
) -> None:
    app = AsgiApp(ObservedServer().server, sse_path="/sse", message_path="/messages", **options)
    scope = scope_of("GET", f"{root}/sse", {"Accept": "text/event-stream"}, root_path=root)
    events = Events({"type": "http.request"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app, scope, events.receive, events.send)
        await trio.testing.wait_all_tasks_blocked()
        assert f"data: {uri}?session=" in events.body.decode()
        events.feed({"type": "http.disconnect"})


# Behaviours of the ASGI server


async def test_a_body_can_come_in_pieces(autojump_clock: MockClock) -> None:
    scope, whole = posted(request("tools/call", echo("in pieces")))
    body = (await whole.receive())["body"]
    events = Events(
        *({"type": "http.request", "body": body[at : at + 1], "more_body": True} for at in range(len(body)))
    )
    events.feed({"type": "http.request"})
    app = AsgiApp(ObservedServer().server)
    await app(scope, events.receive, events.send)
    assert text_of(json.loads(events.body)["result"]) == "in pieces"


async def test_a_body_that_is_too_long_is_not_read_to_its_end(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trio_mcp.http")
    scope, _ = posted({}, client=("10.0.0.1", 4711))
    part = {"type": "http.request", "body": b"x" * 600, "more_body": True}
    events = Events(part, part, part)
    app = AsgiApp(ObservedServer(limits=Limits(message_bytes=1000)).server)
    with trio.fail_after(1):
        await app(scope, events.receive, events.send)
    assert (events.status, json.loads(events.body)["error"]["code"]) == (413, -32600)
    assert caplog.messages[-1].startswith("10.0.0.1: 'POST' '/mcp': 413, ")
    assert await events.receive() == part


async def test_a_body_that_comes_too_slowly_is_refused(autojump_clock: MockClock) -> None:
    limits = Limits(body_seconds=10, body_rate=100)
    app = AsgiApp(ObservedServer(limits=limits).server)
    scope, _ = posted({})
    scope["headers"].append((b"origin", b"http://localhost"))
    events = Events({"type": "http.request", "body": b"x" * 500, "more_body": True})
    began = trio.current_time()
    await app(scope, events.receive, events.send)
    assert trio.current_time() - began == 10
    assert events.status == 408
    assert "Limits.body_seconds" in json.loads(events.body)["error"]["message"]
    assert Headers(events.sent[0]["headers"])["Access-Control-Allow-Origin"] == "http://localhost"


async def test_unfinished_long_bodies_have_a_common_limit(autojump_clock: MockClock) -> None:
    app = AsgiApp(ObservedServer(limits=Limits(bytes_in_all=100_000)).server)
    scope, _ = posted({})
    scope["headers"].append((b"origin", b"http://localhost"))
    pieces = [{"type": "http.request", "body": b"x" * 60_000, "more_body": True} for _ in range(3)]
    events = Events(*pieces)
    await app(scope, events.receive, events.send)
    assert events.status == 503
    assert "Limits.bytes_in_all" in json.loads(events.body)["error"]["message"]
    assert Headers(events.sent[0]["headers"])["Access-Control-Allow-Origin"] == "http://localhost"
    assert (await ask(app)).status == 200  # the bytes are released


async def test_a_client_that_disconnects_within_its_body_gets_no_answer(autojump_clock: MockClock) -> None:
    scope, _ = posted({})
    events = Events({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"})
    await AsgiApp(ObservedServer().server)(scope, events.receive, events.send)
    assert events.sent == []


async def test_a_head_is_refused_before_the_body_is_received(autojump_clock: MockClock) -> None:
    scope, events = posted({}, path="/other")
    await AsgiApp(ObservedServer().server)(scope, events.receive, events.send)
    assert events.status == 404
    assert (await events.receive())["body"] == b"{}"


async def test_an_answer_has_a_content_length_and_a_stream_has_no(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    app = AsgiApp(observed.server)
    answer = await ask(app)
    assert Headers(answer.sent[0]["headers"])["Content-Length"] == str(len(answer.body))
    assert all(name == name.lower() for name, _ in answer.sent[0]["headers"])
    observed.go_on.set()
    streamed = await ask(app, request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))
    assert "Content-Length" not in Headers(streamed.sent[0]["headers"])


async def test_the_answer_to_a_preflight_has_no_content_length(autojump_clock: MockClock) -> None:
    scope = scope_of("OPTIONS", "/mcp", {"Origin": "http://localhost:5173", "Host": "localhost"})
    events = Events({"type": "http.request"})
    await AsgiApp(ObservedServer().server)(scope, events.receive, events.send)
    head = Headers(events.sent[0]["headers"])
    assert (events.status, events.body, head.get("Content-Length")) == (204, b"", None)
    assert head["Access-Control-Allow-Origin"] == "http://localhost:5173"


async def test_the_request_rate_of_each_client_is_limited(autojump_clock: MockClock) -> None:
    app = AsgiApp(ObservedServer(limits=Limits(request_rate=1)).server)
    clients = [("192.0.2.1", 1), ("192.0.2.1", 2), ("192.0.2.2", 1), None, None]
    statuses = [(await ask(app, client=client)).status for client in clients]
    assert statuses == [200, 429, 200, 200, 429]  # all clients without an address count as one


async def test_the_head_of_a_stream_is_sent_before_the_first_message(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    scope, events = posted(request("subscriptions/listen", {"notifications": {}}))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(observed.server), scope, events.receive, events.send)
        await events.until("http.response.body")
        events.feed({"type": "http.disconnect"})


async def test_an_idle_stream_gets_keep_alive_comments(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(observed.server, keep_alive=20), scope, events.receive, events.send)
        await trio.sleep(50)
        assert events.body.count(b": keep-alive\n\n") == 2
        began = trio.current_time()
        events.feed({"type": "http.disconnect"})
    await observed.wait_for("cancelled")
    assert trio.current_time() == began


async def run_abandoned_call(
    send: Callable[[Event], Awaitable[None]], *, limits: Limits | None = None
) -> ObservedServer:
    """Run a modern call that reports progress, with this `send` of the ASGI server, until it is cancelled."""
    observed = ObservedServer(limits=limits or Limits())
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))
    events.before = send
    with trio.fail_after(1000):
        await AsgiApp(observed.server)(scope, events.receive, events.send)
        await observed.wait_for("cancelled")
    return observed


async def test_an_oserror_of_send_counts_as_a_disconnection(autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        raise OSError("gone")

    await run_abandoned_call(send)


@pytest.mark.parametrize(
    "message",
    [notification("notifications/initialized"), request("tools/call", echo()), request("ping", revision="2025-06-18")],
)
async def test_a_client_that_disconnected_before_its_answer_is_no_error(
    message: Any, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def send(event: Event) -> None:
        raise OSError("gone")

    scope, events = posted(message)
    events.before = send
    await AsgiApp(ObservedServer().server)(scope, events.receive, events.send)
    assert caplog.text == ""


async def test_a_failure_of_receive_counts_as_a_disconnection_and_is_logged(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    observed = ObservedServer()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))

    async def receive() -> Event:
        event = await events.receive()
        if event["type"] == "failure":
            raise LookupError("the server's own")
        return event

    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(observed.server), scope, receive, events.send)
        await observed.wait_for("begun")
        events.feed({"type": "http.request"}, {"type": "failure"})
    await observed.wait_for("cancelled")
    assert "LookupError: the server's own" in caplog.text
    assert all(event.get("more_body") is not False for event in events.sent)


async def test_a_client_that_does_not_read_is_abandoned(autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        await trio.sleep_forever()

    began = trio.current_time()
    await run_abandoned_call(send, limits=Limits(write_seconds=12))
    assert trio.current_time() - began == 12


async def test_a_disconnection_ends_a_write_in_progress(autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        events.feed({"type": "http.disconnect"})
        await trio.sleep_forever()

    observed = ObservedServer()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))
    events.before = send
    began = trio.current_time()
    await AsgiApp(observed.server)(scope, events.receive, events.send)
    await observed.wait_for("cancelled")
    assert trio.current_time() == began


async def test_a_client_that_reads_a_long_answer_slowly_is_not_abandoned(autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        await trio.sleep(len(event.get("body", b"")) / 10_000)

    scope, events = posted(request("tools/call", echo("x" * 300_000)))
    events.before = send
    await AsgiApp(ObservedServer(limits=Limits(write_seconds=12)).server)(scope, events.receive, events.send)
    assert text_of(json.loads(events.body)["result"]) == "x" * 300_000


async def test_an_unexpected_exception_of_send_is_logged(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def send(event: Event) -> None:
        raise LookupError("the server's own")

    await run_abandoned_call(send)
    assert "LookupError: the server's own" in caplog.text


async def test_receive_can_fail_during_the_last_write_of_an_answer(
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

    observed = ObservedServer()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}))
    body = iter([await events.receive()])
    events.before = send
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(observed.server), scope, receive, events.send)
        await observed.wait_for("begun")
        observed.go_on.set()
    await events.until("http.response.body")
    assert [event["type"] for event in events.sent] == ["http.response.start", "http.response.body"]
    assert "LookupError: the server's own" in caplog.text


async def test_the_client_can_disconnect_during_the_last_write_of_an_answer(
    autojump_clock: MockClock,
) -> None:
    async def send(event: Event) -> None:
        if event.get("more_body") is False:
            events.feed({"type": "http.disconnect"})
            await trio.testing.wait_all_tasks_blocked()

    observed = ObservedServer()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}, progress="p"))
    events.before = send
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(observed.server), scope, events.receive, events.send)
        await observed.wait_for("begun")
        observed.go_on.set()
    assert b'"waited"' in events.body
    assert events.sent[-1]["more_body"] is False


async def test_a_request_cancelled_by_the_asgi_server_counts_as_a_disconnection(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AsgiApp(observed.server), scope, events.receive, events.send)
        await observed.wait_for("begun")
        nursery.cancel_scope.cancel()
    await observed.wait_for("cancelled")


async def test_a_request_can_be_cancelled_while_its_handler_begins(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    app = AsgiApp(observed.server)
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
    # The cancellation reaches the handler before it begins or while it waits.
    assert observed.steps in ([], ["begun", "cancelled"])
    assert events.sent == []


# The task of the request writes an immediate answer itself.  A write in progress has one second after a cancellation.
UNREAD_ANSWERS = {
    "a refusal": (request("no/such"), 1),
    "the head of a stream": (request("subscriptions/listen", {"notifications": {"toolsListChanged": True}}), 1),
    "the answer of a handler": (request("tools/call", echo()), 0),
    "no answer": (notification("notifications/initialized"), 1),
}


@pytest.mark.parametrize(("message", "seconds"), UNREAD_ANSWERS.values(), ids=UNREAD_ANSWERS)
async def test_a_client_that_does_not_read_delays_a_cancellation_by_one_second(
    message: Any, seconds: float, autojump_clock: MockClock
) -> None:
    async def send(event: Event) -> None:
        await trio.sleep_forever()

    app = AsgiApp(ObservedServer().server)
    scope, events = posted(message)
    events.before = send
    async with app.running():
        began = trio.current_time()
        with trio.move_on_after(10):
            await app(scope, events.receive, events.send)
        assert trio.current_time() - began == 10 + seconds


async def test_a_write_in_progress_can_finish_after_a_cancellation(autojump_clock: MockClock) -> None:
    async def send(event: Event) -> None:
        await trio.sleep(0.4)

    app = AsgiApp(ObservedServer().server)
    scope, events = posted(request("no/such"))
    events.before = send
    async with app.running():
        with trio.move_on_after(0.1):
            await app(scope, events.receive, events.send)
    assert json.loads(events.body)["error"]["code"] == -32601


async def test_a_stream_that_continues_on_another_connection_ends_the_first(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    async with hosted(AsgiApp(observed.server)) as web:
        session = await web.initialize("2025-11-25")
        message = web.request("tools/call", {"name": "wait", "arguments": {}}, revision="2025-11-25", progress="p")
        async with web.stream(message, session=session) as first:
            await first.message()
            async with web.stream(session=session, after=first.last_event_id) as second:
                with pytest.raises(Cut):
                    await first.event()
                observed.go_on.set()
                assert text_of((await second.message())["result"]) == "waited"


async def test_an_exception_outside_of_handlers_is_an_internal_error(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def authenticate(request: HttpRequest) -> str:
        raise LookupError("no such table")

    answer = await ask(AsgiApp(ObservedServer().server, authenticate=authenticate))
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (500, "internal error")
    assert "LookupError: no such table" in caplog.text


async def test_a_web_page_can_read_that_its_request_has_failed(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    def event_log(session: str) -> Any:
        raise LookupError("no such table")

    app = AsgiApp(ObservedServer().server, event_log=event_log, allowed_origins=["https://app.example"])
    params = {"protocolVersion": SESSIONS[-1], "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    async with hosted(app) as web:
        fields = {"Origin": "https://app.example"}
        answer = await web.call("initialize", params, revision=SESSIONS[-1], headers=fields)
    assert (answer.status, answer.json["error"]["message"]) == (500, "internal error")
    assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert "LookupError: no such table" in caplog.text


# Other event loops


@pytest.mark.parametrize("of", [lambda server: server, AsgiApp])
def test_a_run_on_another_event_loop_fails_with_advice(of: Any) -> None:
    async def main() -> None:
        async with of(ObservedServer().server).running():
            raise AssertionError

    with pytest.raises(UsageError, match="hypercorn --worker-class trio"):
        asyncio.run(main())


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_request_on_another_event_loop_fails_with_advice(kind: str) -> None:
    async def never(*event: Any) -> Any:
        raise AssertionError(event)

    with pytest.raises(UsageError, match="hypercorn --worker-class trio"):
        asyncio.run(AsgiApp(ObservedServer().server)({"type": kind}, never, never))


def test_a_startup_on_another_event_loop_fails_with_advice() -> None:
    async def receive() -> Event:
        return {"type": "lifespan.startup"}

    async def send(event: Any) -> None:
        sent.append(event)

    sent: list[Any] = []
    asyncio.run(AsgiApp(ObservedServer().server)({"type": "lifespan"}, receive, send))
    (event,) = sent
    assert event["type"] == "lifespan.startup.failed"
    assert "hypercorn --worker-class trio" in event["message"]


async def test_an_unknown_type_of_scope_is_refused() -> None:
    events = Events()
    with pytest.raises(UsageError, match="'email'"):
        await AsgiApp(ObservedServer().server)({"type": "email"}, events.receive, events.send)


# The shutdown timeout


async def test_a_call_that_exceeds_the_shutdown_timeout_gets_an_error(autojump_clock: MockClock) -> None:
    observed = ObservedServer()
    app = AsgiApp(observed.server, shutdown_timeout=2)
    async with trio.open_nursery() as nursery:
        async with app.running():
            scope, events = posted(request("tools/call", {"name": "wait", "arguments": {}}))
            nursery.start_soon(app, scope, events.receive, events.send)
            await observed.wait_for("begun")
        assert b"shut down before this call had finished" in events.sent[-1]["body"]
    assert trio.current_time() == 2


@pytest.mark.parametrize("shared", [False, True])
async def test_answers_are_accepted_during_the_shutdown_timeout(shared: bool, autojump_clock: MockClock) -> None:
    scripted, results = ScriptedServer(), []
    app = AsgiApp(scripted.server, shutdown_timeout=5)
    running = scripted.server.running() if shared else contextlib.nullcontext()
    async with running, trio.open_nursery() as nursery, app.running():
        asks = play_call("roots", revision=LATEST, capabilities={"roots": {}})
        scope, events = posted(asks)
        await app(scope, events.receive, events.send)
        asked = json.loads(events.sent[-1]["body"])["result"]

        @nursery.start_soon
        async def _() -> None:
            await trio.sleep(1)
            (key,) = asked["inputRequests"]
            more = {"inputResponses": {key: {"roots": []}}, "requestState": asked["requestState"]}
            scope, events = posted({**asks, "id": 2, "params": {**asks["params"], **more}})
            await app(scope, events.receive, events.send)
            results.append(text_of(json.loads(events.sent[-1]["body"])["result"]))

    assert (results, trio.current_time()) == (["done"], 1)
