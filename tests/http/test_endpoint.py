"""`Endpoint`: HTTP requests from the head to the end of the response."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.http.client import notification, request, response
from tests.http.recorder import EndpointClient, RecordedExchange, Recorder, endpoint_of
from tests.http.scripted_server import (
    SSE_PATHS,
    A,
    B,
    D,
    E,
    ScriptedServer,
    methods,
    play_call,
    play_params,
    session_revisions,
    streamable_revisions,
)
from tests.http.served import bearer, by_token
from tests.requirements import req
from tests.server.checkpoints import Attempt, any_task, cancel_at_each_step
from tests.server.raw_client import ACKNOWLEDGED, CANCELLED, PROGRESS, connected, every_revision
from trio_mcp import Context, Limits, Server
from trio_mcp.core import NotDeclared, SessionClosed, UsageError
from trio_mcp.core.http import HttpRequest, KnownHeads, MemoryEventLog, Reply, RequestReader
from trio_mcp.server.http import AdmittedRequest, Endpoint, ResponseStream
from trio_mcp.transport import CLOSING

LISTEN = "subscriptions/listen"
OPENING = {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}


async def open_session(client: EndpointClient, revision: str, **how: Any) -> str | None:
    return None if revision == E else await client.initialize(revision, **how)


def listen(id: Any = 1) -> dict[str, Any]:
    return request(LISTEN, {"notifications": {"toolsListChanged": True}}, id)


# Options


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"pfad": "/x"}, TypeError, ["'pfad'", "path, sse_path", "keep_alive"]),
        ({"keep_alive": 0}, UsageError, ["keep_alive", "above 0"]),
        ({"keep_alive": float("inf")}, UsageError, ["keep_alive"]),
        ({"keep_alive": "15"}, UsageError, ["keep_alive", "'15'"]),
        ({"keep_alive": True}, UsageError, ["keep_alive"]),
        ({"path": "mcp"}, UsageError, ["slash"]),
        ({"path": "/ws"}, UsageError, ["different"]),
        ({"sse_path": "/sse"}, UsageError, ["message_path"]),
        ({"allowed_hosts": "example.com"}, UsageError, ["allowed_hosts", "list"]),
        (
            {"allowed_hosts": "example.com", "public_url": "https://x.org"},
            UsageError,
            ["allowed_hosts", "list"],
        ),
        *(
            ({"public_url": url}, UsageError, ["public_url", "https://example.com"])
            for url in (
                "example.com",
                "ftp://example.com",
                "https://",
                "https:///x",
                "https://x/?y",
                "https://x/#y",
                "",
            )
        ),
    ],
)
async def test_an_invalid_option_is_an_error_with_the_valid_values(
    options: dict[str, Any], error: type[Exception], words: list[str], autojump_clock: MockClock
) -> None:
    async with Server("x").running() as run:
        with pytest.raises(error) as raised:
            Endpoint(run, **options)
        assert all(word in str(raised.value) for word in words)


async def test_a_request_rate_of_zero_is_an_error(autojump_clock: MockClock) -> None:
    async with Server("x", limits=Limits(request_rate=0)).running() as run:
        with pytest.raises(UsageError, match=r"Limits\.request_rate"):
            Endpoint(run)


async def test_options_have_defaults(autojump_clock: MockClock) -> None:
    async with Server("x").running() as run:
        endpoint = Endpoint(run)
        policy = endpoint.policy
        assert (policy.path, policy.websocket_path, policy.sse_path) == ("/mcp", "/ws", None)
        assert (policy.sessions, policy.json_only) == (True, False)
        assert (endpoint.keep_alive, endpoint.public_url) == (15.0, None)
        assert Endpoint(run, websocket_path=None).policy.websocket_path is None
        assert Endpoint(run, keep_alive=2).keep_alive == 2


@pytest.mark.parametrize(
    ("url", "base", "host"),
    [
        ("https://example.com", "https://example.com", "example.com"),
        ("https://example.com:8443/", "https://example.com:8443", "example.com:8443"),
        ("http://example.com/tools/", "http://example.com/tools", "example.com"),
    ],
)
async def test_the_host_of_the_public_url_is_served(url: str, base: str, host: str, autojump_clock: MockClock) -> None:
    async with endpoint_of(ScriptedServer().server, public_url=url) as client:
        assert client.endpoint.public_url == base
        for name, status in ((host, 200), ("localhost", 200), ("example.org", 421)):
            exchange = await client.post(request("server/discover"), Host=name)
            assert exchange.response.status == status
    async with endpoint_of(ScriptedServer().server, public_url=url, allowed_hosts=["other.org"]) as client:
        for name, status in ((host, 200), ("localhost", 421), ("other.org", 200)):
            exchange = await client.post(request("server/discover"), Host=name)
            assert exchange.response.status == status


# The head of a request


async def test_authenticate_is_called_unless_the_head_is_refused(autojump_clock: MockClock) -> None:
    calls: list[str] = []

    async def authenticate(asking: HttpRequest) -> str | None:
        calls.append(asking.method)
        return await by_token(asking)

    async with endpoint_of(ScriptedServer().server, authenticate=authenticate) as client:
        exchange = await client.post(request("server/discover"), Origin="http://localhost:1")
        assert exchange.response.status == 401
        assert exchange.response.headers["WWW-Authenticate"] == "Bearer"
        assert exchange.response.headers["Access-Control-Allow-Origin"] == "http://localhost:1"
        assert (await client.post(request("server/discover"), **bearer("ann"))).response.status == 200
        assert calls == ["POST", "POST"]
        await client.post(request("server/discover"), Origin="http://evil.example")
        await client.ask("OPTIONS")
        assert calls == ["POST", "POST"]


async def test_a_request_for_a_websocket_is_admitted_like_others(autojump_clock: MockClock) -> None:
    async with endpoint_of(ScriptedServer().server) as client:
        asking = HttpRequest("GET", "/ws", {"Host": "localhost"})
        admitted = await client.endpoint.admit(asking)
        assert isinstance(admitted, AdmittedRequest)
        assert admitted.head.websocket
        refused = await client.endpoint.admit(HttpRequest("GET", "/ws", {"Host": "evil.example"}))
        assert isinstance(refused, Reply)
        assert refused.status == 421


@pytest.mark.parametrize("secret", [False, True])
async def test_equal_heads_of_a_client_are_admitted_once_without_authenticate(
    secret: bool, autojump_clock: MockClock
) -> None:
    async def authenticate(asking: HttpRequest) -> str:
        return "ann"

    raw = b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\r\n"
    known: KnownHeads = {}
    heads = []
    for _ in range(2):
        reader = RequestReader(Limits(), known)
        reader.feed(raw)
        heads.append(reader.head())
    head = heads[0]
    assert head is not None
    assert head is heads[1]
    options: dict[str, Any] = {"authenticate": authenticate} if secret else {}
    async with endpoint_of(ScriptedServer().server, **options) as client:
        first = await client.endpoint.admit(head, "10.0.0.1")
        assert isinstance(first, AdmittedRequest)
        assert (await client.endpoint.admit(head, "10.0.0.1") is first) is not secret
        other = await client.endpoint.admit(head, "10.0.0.2")
        assert isinstance(other, AdmittedRequest)
        assert other.peer == "10.0.0.2"
    async with endpoint_of(ScriptedServer().server, allowed_hosts=["example.com"]) as client:
        refused = await client.endpoint.admit(head, "10.0.0.1")
        assert isinstance(refused, Reply)
        assert refused.status == 421


async def test_refused_requests_are_logged(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_mcp.http")
    async with endpoint_of(ScriptedServer().server, **SSE_PATHS) as client:
        await client.post(request("ping"), path="/messages?session=secret-id")
        await client.ask("PUT")
        await client.post(request("server/discover"))
    first, second = (record.getMessage() for record in caplog.records)
    assert "404" in first
    assert "/messages" in first
    assert "secret-id" not in first
    assert "405" in second


@pytest.mark.parametrize("how", ["initialize", "sse"])
async def test_the_number_of_sessions_in_use_is_limited(how: str, autojump_clock: MockClock) -> None:
    async with endpoint_of(ScriptedServer(limits=Limits(sessions=1)).server, **SSE_PATHS) as client:
        session = await client.initialize(D)
        standing = await client.get(session)

        async def another() -> RecordedExchange:
            if how == "sse":
                return await client.ask("GET", path="/sse", Accept="text/event-stream")
            return await client.post(request("initialize", OPENING, 0, revision=D), revision=D)

        refused = (await another()).response
        assert refused.status == 503
        assert "Limits.sessions" in refused.json["error"]["message"]
        assert refused.headers["Retry-After"]
        standing.disconnect()
        assert (await another()).response.status == 200
        assert (await client.post(request("ping", revision=D), session)).response.status == 404


async def test_a_principal_has_a_stable_name(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    async def authenticate(asking: HttpRequest) -> Any:
        return 7

    async with endpoint_of(ScriptedServer().server, authenticate=authenticate) as client:
        assert (await client.post(request("server/discover"))).response.status == 500
    assert "pass a stable, unique name" in caplog.text


async def test_the_request_rate_is_counted_by_principal_or_by_address(autojump_clock: MockClock) -> None:
    server = ScriptedServer(limits=Limits(request_rate=2)).server
    async with endpoint_of(server) as client:
        for peer in ("10.0.0.1", "10.0.0.2", None):
            statuses = [(await client.post(request("server/discover"), peer=peer)).response.status for _ in range(3)]
            assert statuses == [200, 200, 429]
        refused = (await client.post(request("server/discover"), peer="10.0.0.1", Origin="http://localhost")).response
        assert refused.headers["Retry-After"] == "1"
        assert "Limits.request_rate" in refused.json["error"]["message"]
        assert refused.headers["Access-Control-Allow-Origin"] == "http://localhost"
        await trio.sleep(1)
        assert (await client.post(request("server/discover"), peer="10.0.0.1")).response.status == 200
    async with endpoint_of(server, authenticate=by_token) as client:
        for name in ("ann", "bob"):
            statuses = [
                (await client.post(request("server/discover"), peer=f"10.0.0.{n}", **bearer(name))).response.status
                for n in range(3)
            ]
            assert statuses == [200, 200, 429]
        # Requests without credentials are counted by address, so that guesses are limited too.
        statuses = [(await client.post(request("server/discover"), peer="10.1.1.1")).response.status for _ in range(4)]
        assert statuses == [401, 401, 429, 429]


# Requests without a session


@req("cancel-14", "http-115")
@pytest.mark.parametrize("steps", [["wait never"], ["progress", "wait never"]])
async def test_a_modern_request_is_cancelled_when_its_client_disconnects(
    steps: list[str], autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        exchange = await client.post(play_call(*steps, revision=E))
        other = await client.post(play_call("wait go", revision=E))
        assert client.endpoint.clients == 2
        exchange.disconnect()
        await wait_all_tasks_blocked()
        assert scripted.cancelled == [""]
        assert client.endpoint.clients == 1
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        assert other.response.status == 200
        assert scripted.ended == [""]
        exchange.on_disconnect()
        assert not any(name in exchange.response.headers for name in ("Mcp-Session-Id",))
        if exchange.response.streams:
            assert all(event.id is None for event in exchange.response.events)


@req("cancel-14")
async def test_a_modern_request_ends_when_its_answer_cannot_be_written(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        exchange = await client.post(play_call("wait go", "progress", "wait never", revision=E))
        exchange.response.cut()
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        assert scripted.cancelled == [""]
        assert client.endpoint.clients == 0
        subscribed = await client.post(listen())
        assert client.run.statistics().listeners == 1
        subscribed.disconnect()
        assert client.run.statistics().listeners == 0


@session_revisions
async def test_a_legacy_request_without_a_session_outlives_its_client(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, sessions=False) as client:
        opening = await client.send_initialize(revision)
        assert "Mcp-Session-Id" not in opening.response.headers
        assert (client.endpoint.clients, client.run.statistics().listeners) == (0, 0)
        exchange = await client.post(play_call("progress", "wait go", "progress", revision=revision), revision=revision)
        assert [event.id for event in exchange.response.events] == [None]
        exchange.disconnect()
        await trio.sleep(100)
        assert client.endpoint.clients == 1
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        assert scripted.ended == [""]
        assert client.endpoint.clients == 0
        assert (await client.post(notification("notifications/x"), revision=revision)).response.status == 202


@session_revisions
async def test_a_question_without_a_session_fails_at_once(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server("asks")

    @server.tool
    async def asks(ctx: Context) -> str:
        await ctx.progress(1)
        try:
            await ctx.roots()
        except NotDeclared as error:  # the capabilities of the client are not known
            return str(error)
        return "answered"

    async with endpoint_of(server, sessions=False) as client:
        exchange = await client.post(
            request("tools/call", {"name": "asks"}, revision=revision, progress=1), revision=revision
        )
        await wait_all_tasks_blocked()
        assert exchange.response.ended
        assert methods(exchange.response.messages) == [PROGRESS, "the answer"]
        text = exchange.response.messages[-1]["result"]["content"][0]["text"]
        assert "sessions=False" in text


@pytest.mark.parametrize("options", [{"sessions": False}, {"json_only": True}])
@session_revisions
async def test_no_changes_are_promised_without_a_stream_to_send_them_on(
    revision: str, options: dict[str, Any], autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, **options) as client:
        opening = await client.send_initialize(revision)
        declared = opening.response.json["result"]["capabilities"]
        assert declared["tools"] == declared["resources"] == {}
        session = None if "sessions" in options else await client.initialize(revision)
        subscribe = request("resources/subscribe", {"uri": "r://1"}, revision=revision)
        exchange = await client.post(subscribe, session, revision=revision)
        error = exchange.response.json["error"]
        assert error["code"] == -32601
        assert "resources.subscribe, which was not declared" in error["message"]


async def test_a_finished_request_is_not_referenced(autojump_clock: MockClock) -> None:
    logging.disable(logging.CRITICAL)  # a captured log record keeps the traceback of the failed call
    try:
        await _check_references()
    finally:
        logging.disable(logging.NOTSET)


async def _check_references() -> None:
    scripted = ScriptedServer()
    kept: list[Callable[[], Any]] = []
    attach = ResponseStream.attach

    def attach_and_keep(stream: ResponseStream, *args: Any) -> Any:
        owner = stream.owner
        kept.extend(map(weakref.ref, (stream, owner.server_session, args[0])))
        return attach(stream, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResponseStream, "attach", attach_and_keep)
        async with endpoint_of(scripted.server) as client:
            gc.collect()
            gc.disable()
            try:
                for steps in (["say x"], ["progress", "sleep 1"], ["ask"], ["fail on purpose"]):
                    await client.post(play_call(*steps, revision=E))
                await client.post(request("no/such"))
                (await client.post(play_call("wait never", revision=E))).disconnect()
                (await client.post(listen())).disconnect()
                await trio.sleep(2)
                assert len(kept) == 3 * 7
                # Only the handler that waits for a retry keeps the stream and the session of its question.
                assert sorted(type(each()).__name__ for each in kept if each() is not None) == [
                    "ResponseStream",
                    "ServerSession",
                ]
            finally:
                gc.enable()


# Sessions


@session_revisions
async def test_each_message_of_a_session_reaches_its_receiver(revision: str, autojump_clock: MockClock) -> None:
    """Each verdict on a message occurs once."""
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        assert (await client.post(request("ping", revision=revision), session)).response.json["result"] == {}
        asked = await client.post(play_call("roots", revision=revision), session)
        (question,) = asked.response.messages
        answered = await client.post(response(question["id"], {"roots": []}), session)
        assert (answered.response.status, answered.response.body) == (202, b"")
        assert scripted.ended == [""]
        standing = await client.get(session)
        assert (standing.response.status, standing.response.streams, standing.response.ended) == (200, True, False)
        assert (await client.ask("DELETE", None, session)).response.status == 204
        await wait_all_tasks_blocked()
        assert standing.response.ended
        assert (await client.post(request("ping", revision=revision), session)).response.status == 404


async def test_a_refused_initialize_opens_no_session(autojump_clock: MockClock) -> None:
    made: list[MemoryEventLog] = []

    def make(session: str) -> MemoryEventLog:
        made.append(MemoryEventLog())
        return made[-1]

    async with endpoint_of(ScriptedServer().server, event_log=make) as client:
        for accept in ("application/json", "text/event-stream"):
            exchange = await client.post(request("initialize", {}, revision=D), revision=D, Accept=accept)
            assert "Mcp-Session-Id" not in exchange.response.headers
            assert exchange.response.ended
        assert client.endpoint.clients == 0
        assert all(len(log) == 0 for log in made)
        exchange = await client.post(
            request("initialize", OPENING, 0, revision=D),
            revision=D,
            Accept="text/event-stream",
        )
        assert exchange.response.headers["Mcp-Session-Id"]
        assert [event.id for event in exchange.response.events] == [None]
        assert client.endpoint.clients == 1


@session_revisions
async def test_the_number_of_streams_of_a_session_is_limited(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(streams=2))
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        first = await client.get(session)
        away = await client.post(play_call("progress", "wait never", revision=revision), session)
        for refused in (
            await client.get(session),
            await client.post(request("ping", id=9, revision=revision), session),
        ):
            assert refused.response.status == 429
            assert "Limits.streams" in refused.response.json["error"]["message"]
            assert refused.response.headers["Retry-After"]
        # A client that resumes a stream that seems open replaces it, so the number stays the same.
        again = await client.get(session, away.response.last_id)
        assert (again.response.status, away.response.dropped) == (200, True)
        again.disconnect()
        second = await client.get(session)
        assert (await client.get(session, away.response.last_id)).response.status == 429
        second.disconnect()
        assert (await client.get(session, away.response.last_id)).response.status == 200
        first.disconnect()
        # Streams that have ended do not count.
        for n in range(3):
            ended = await client.post(play_call("progress", id=f"more {n}", revision=revision), session)
            assert ended.response.messages[-1]["id"] == f"more {n}"


@req("http-42")
@session_revisions
async def test_a_finished_stream_is_replayed_and_an_unknown_id_is_refused(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        call = await client.post(play_call("progress", "progress", revision=revision), session)
        ids = [event.id for event in call.response.events]
        whole = await client.get(session, ids[-3])
        assert methods(whole.response.messages) == [PROGRESS, "the answer"]
        assert whole.response.ended
        last = await client.get(session, ids[-1])
        assert (last.response.status, last.response.messages, last.response.ended) == (200, [], True)
        for unknown in ("99-0", "x"):
            refused = await client.get(session, unknown, Origin="http://localhost")
            assert refused.response.status == 400
            assert "without Last-Event-ID" in refused.response.json["error"]["message"]
            assert refused.response.headers["Access-Control-Allow-Origin"] == "http://localhost"


async def test_the_resumption_of_a_failed_stream_is_refused_with_the_reason(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(MemoryEventLog):
        def __init__(self, session: str) -> None:
            super().__init__()

        def append(self, stream: str, data: Sequence[bytes]) -> Sequence[str]:
            if len(self) == 2:
                raise OSError("no space left")
            return super().append(stream, data)

        def finish(self, stream: str) -> None:
            raise OSError("no space left")

    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, event_log=Full) as client:
        session = await client.initialize(D)
        call = await client.post(play_call("progress", "sleep 1", "progress"), session)
        await trio.sleep(2)
        assert call.response.dropped
        assert "no space left" in caplog.text
        refused = await client.get(session, call.response.last_id)
        assert refused.response.status == 400
        assert "the stream has failed" in refused.response.json["error"]["message"]
        assert scripted.ended == [""]


# Questions


@session_revisions
async def test_a_question_fails_if_its_client_left_and_cannot_resume(revision: str, autojump_clock: MockClock) -> None:
    server, failed, go = Server("asks"), [], trio.Event()

    @server.tool
    async def asks(ctx: Context) -> str:
        await go.wait()
        try:
            await ctx.roots()
        except SessionClosed:
            failed.append(trio.current_time())
        return "done"

    async with endpoint_of(server) as client:
        session = await client.initialize(revision)
        exchange = await client.post(request("tools/call", {"name": "asks"}, revision=revision), session)
        exchange.disconnect()
        began = trio.current_time()
        go.set()
        await wait_all_tasks_blocked()
        assert failed == [began]


@session_revisions
async def test_a_call_that_fails_because_its_client_left_is_not_logged(
    revision: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    server, go = Server("asks"), trio.Event()

    @server.tool
    async def asks(ctx: Context) -> None:
        await go.wait()
        await ctx.roots()

    async with endpoint_of(server) as client:
        session = await client.initialize(revision)
        exchange = await client.post(request("tools/call", {"name": "asks"}, revision=revision), session)
        exchange.disconnect()
        go.set()
        await wait_all_tasks_blocked()
        assert server.statistics().running == 0
    assert [each.getMessage() for each in caplog.records] == []


@session_revisions
async def test_a_question_waits_for_a_client_that_can_resume(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        exchange = await client.post(play_call("progress", "wait go", "roots", "say good", revision=revision), session)
        exchange.disconnect()
        scripted.go["go"].set()
        await trio.sleep(100)
        back = await client.get(session, exchange.response.last_id)
        (question,) = back.response.messages
        await client.post(response(question["id"], {"roots": []}), session)
        assert back.response.messages[-1]["result"]["content"][0]["text"] == "good"
        # The client can also answer without resuming the stream.
        exchange = await client.post(play_call("sample", id=2, revision=revision), session)
        (question,) = exchange.response.messages
        exchange.disconnect()
        model = {"role": "assistant", "content": {"type": "text", "text": "x"}, "model": "m"}
        await client.post(response(question["id"], model), session)
        assert len(scripted.answers) == 2


# Hanging up: the handler asks the client to reconnect


@req("http-47", "http-49", "http-46")
async def test_a_handler_asks_its_client_to_reconnect_for_the_rest(autojump_clock: MockClock) -> None:
    server, results = Server("polled"), []

    @server.tool
    async def test_reconnection(ctx: Context) -> str:
        results.append(await ctx.hang_up(retry=0.5))
        await trio.sleep(2)
        results.append(await ctx.hang_up())  # the client is already away
        return "here again"

    async with endpoint_of(server) as client:
        session = await client.initialize(D)
        call = await client.post(request("tools/call", {"name": "test_reconnection"}, revision=D), session)
        first, last = call.response.events
        assert (first.id, first.data, first.retry) == ("1-0", b"", None)
        assert (last.id, last.data, last.retry) == ("1-1", b"", 500)
        assert call.response.ended
        await trio.sleep(0.5)
        again = await client.get(session, last.id)
        assert again.response.events == []
        await trio.sleep(5)
        assert again.response.messages[0]["result"]["content"][0]["text"] == "here again"
        assert again.response.ended
        assert results == [True, True]  # the second call returned True, because the client had come back
    # The second call returns False if the client stays away.
    results.clear()
    async with endpoint_of(server) as client:
        session = await client.initialize(D)
        await client.post(request("tools/call", {"name": "test_reconnection"}, revision=D), session)
        await trio.sleep(5)
        assert results == [True, False]


@pytest.mark.parametrize(
    ("revision", "accept"), [(B, None), ("2025-06-18", None), (E, None), (D, "application/json"), (A, None)]
)
async def test_hang_up_has_no_effect_on_streams_that_cannot_be_resumed(
    revision: str, accept: str | None, autojump_clock: MockClock
) -> None:
    server, results = Server("polled"), []

    @server.tool
    async def poll(ctx: Context) -> str:
        for retry in (-1, float("nan"), float("inf"), "1", True):
            with pytest.raises(UsageError, match="retry"):
                await ctx.hang_up(retry=retry)  # type: ignore[arg-type]
        with trio.testing.assert_checkpoints():
            results.append(await ctx.hang_up())
        return "done"

    async with endpoint_of(server, **SSE_PATHS) as client:
        message = request("tools/call", {"name": "poll"}, revision=revision)
        if revision == A:
            stream = await client.ask("GET", path="/sse", revision=A, Accept="text/event-stream")
            uri = stream.response.events[0].data.decode()
            params = {"protocolVersion": A, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
            await client.post(request("initialize", params, 0, revision=A), path=uri)
            await client.post(notification("notifications/initialized"), path=uri)
            await client.post(message, path=uri)
        else:
            session = await open_session(client, revision)
            exchange = await client.post(message, session, **({"Accept": accept} if accept else {}))
            assert exchange.response.json["result"]["content"][0]["text"] == "done"
        assert results == [False]


@every_revision
async def test_hang_up_has_no_effect_on_transports_without_http(revision: str, autojump_clock: MockClock) -> None:
    server = Server("polled")

    @server.tool
    async def poll(ctx: Context) -> str:
        return str(await ctx.hang_up())

    async with connected(server, revision) as wire:
        assert (await wire.call("tools/call", {"name": "poll"}))["content"][0]["text"] == "False"


# Draining


async def test_a_drain_refuses_new_requests_and_lets_running_ones_finish(autojump_clock: MockClock) -> None:
    scripted, over = ScriptedServer(), []

    async def drain(client: EndpointClient) -> None:
        await client.run.drain()
        over.append(trio.current_time())

    async with endpoint_of(scripted.server, **SSE_PATHS) as client, trio.open_nursery() as nursery:
        session, idle, older = [await client.initialize(each) for each in (D, D, B)]
        call = await client.post(play_call("progress", "roots", "sleep 5", "say all"), session)
        doomed = await client.post(play_call("wait never", id=2, name="doomed"), session)
        parked = await client.post(play_call("ask", "say parked", revision=E))
        held = await client.post(play_call("sleep 9", "ask", "say asked", revision=E))
        nursery.start_soon(drain, client)
        await trio.sleep(1)
        for new in (
            await client.post(play_call(revision=E)),
            await client.post(request("ping", id=9, revision=D), idle),
            await client.post([request("ping", id=9, revision=B)], older),
            await client.post(request("initialize", OPENING, 0, revision=D), revision=D),
            await client.get(idle),
            await client.ask("GET", path="/sse", Accept="text/event-stream"),
            await client.ask("GET", path="/ws"),
        ):
            assert new.response.status == 503
            assert int(new.response.headers["Retry-After"]) > 0
            assert "shutting down" in new.response.json["error"]["message"]
        call.disconnect()
        back = await client.get(session, call.response.last_id)
        (question,) = [each for each in call.response.messages if each.get("method") == "roots/list"]
        assert (await client.post(response(question["id"], {"roots": []}), session)).response.status == 202
        await client.post(notification(CANCELLED, {"requestId": 2}), session)
        assert (await client.ask("DELETE", None, idle)).response.status == 204
        assert (doomed.response.status, scripted.cancelled) == (202, ["doomed"])
        retried = await retry(client, parked, "say parked")
        assert retried.response.json["result"]["content"][0]["text"] == "parked"
        await trio.sleep(20)
        assert back.response.messages[-1]["result"]["content"][0]["text"] == "all"
        assert not over  # a call that ran at the start of the drain waits for the retry of its client
        again = await retry(client, held, "sleep 9", last="say asked")
        assert again.response.json["result"]["content"][0]["text"] == "asked"
        await wait_all_tasks_blocked()
        assert over == [trio.current_time()]
        assert client.endpoint.clients == 0


async def retry(
    client: EndpointClient, exchange: RecordedExchange, *steps: str, last: str | None = None
) -> RecordedExchange:
    """The retry of a call that was answered with a question."""
    result = exchange.response.json["result"]
    assert result["resultType"] == "input_required"
    (key,) = result["inputRequests"]
    whole = ["ask", *steps] if last is None else [*steps, "ask", last]
    params = {
        **play_params(*whole),
        "requestState": result["requestState"],
        "inputResponses": {key: {"action": "accept", "content": {"size": 3}}},
    }
    return await client.post(request("tools/call", params, 7, progress="token of 1"))


@req("sub-08")
async def test_subscriptions_end_with_their_result_when_the_server_drains(autojump_clock: MockClock) -> None:
    async with endpoint_of(ScriptedServer().server) as client:
        subscribed = await client.post(listen())
        await client.run.drain()
        assert methods(subscribed.response.messages) == [ACKNOWLEDGED, "the answer"]
        assert subscribed.response.messages[-1]["result"]["resultType"] == "complete"
        assert subscribed.response.ended
        await client.run.drain()  # a second drain returns at once


@session_revisions
async def test_a_drain_waits_for_a_slow_reader_until_its_timeout(revision: str, autojump_clock: MockClock) -> None:
    scripted, over = ScriptedServer(), []
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        call = await client.post(play_call("progress", "wait go", "say all", revision=revision), session)
        call.response.hold()
        scripted.go["go"].set()
        async with trio.open_nursery() as nursery:

            async def drain() -> None:
                async with scripted.server.draining(60):
                    pass
                over.append(trio.current_time())

            began = trio.current_time()
            nursery.start_soon(drain)
            await trio.sleep(30)
            assert not over
            if revision == B:
                call.response.go_on()
        assert over == [began + (30 if revision == B else 60 + CLOSING)]
        assert (call.response.ended, call.response.dropped) == (revision == B, revision != B)


async def test_a_drain_ends_with_the_last_response(autojump_clock: MockClock) -> None:
    over: list[float] = []
    async with endpoint_of(ScriptedServer().server) as client:
        session = await client.initialize(D)
        standing = await client.get(session)
        standing.response.hold()

        async def drain() -> None:
            await client.run.drain()
            over.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            await trio.sleep(20)
            assert not over
            standing.disconnect()
        assert over == [20]


# The end of the run


@streamable_revisions
async def test_the_end_of_the_run_drops_all_responses(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await open_session(client, revision)
        exchanges = [
            await client.post(play_call(*steps, id=n, revision=revision), session)
            for n, steps in enumerate((["wait never"], ["progress", "wait never"], ["progress", "wait go"]))
        ]
        exchanges[2].response.hold()
        scripted.go["go"].set()
        if session is not None:
            exchanges.append(await client.get(session))
            # A stream of an ended session that the client still reads.
            other = await client.initialize(revision)
            exchanges.append(await client.post(play_call("progress", "wait go now", revision=revision), other))
            exchanges[-1].response.hold()
            scripted.go["go now"].set()
            await wait_all_tasks_blocked()
            await client.ask("DELETE", None, other)
        client.endpoint.stop()
        await wait_all_tasks_blocked()
        assert all(exchange.response.dropped for exchange in exchanges)
        assert not any(exchange.response.ended for exchange in exchanges)
        assert scripted.cancelled == ["", ""]
        assert client.endpoint.clients == 0
        if session is not None:
            assert (await client.post(request("ping", revision=revision), session)).response.status == 404
        for exchange in exchanges:
            exchange.on_disconnect()


async def test_an_endpoint_belongs_to_its_run_while_it_runs(autojump_clock: MockClock) -> None:
    async with ScriptedServer().server.running() as run, trio.open_nursery() as nursery:
        endpoint = Endpoint(run)
        assert endpoint not in run.connections
        nursery.start_soon(endpoint.run)
        await wait_all_tasks_blocked()
        assert endpoint in run.connections
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
        assert endpoint not in run.connections


# Early disconnections and cancelled callers


async def test_an_endpoint_that_stopped_drops_its_responses_and_calls(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with scripted.server.running() as run:
        async with trio.open_nursery() as nursery:
            endpoint = Endpoint(run)
            nursery.start_soon(endpoint.run)
            await wait_all_tasks_blocked()
            client = EndpointClient(endpoint, run)
            session = await client.initialize(D)
            exchanges = [
                await client.post(play_call("wait never"), session),
                await client.post(play_call("progress", "wait never", revision=E)),
                await client.get(session),
            ]
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert all(exchange.response.dropped for exchange in exchanges)
        assert scripted.cancelled == ["", ""]
        assert endpoint.clients == 0


async def test_a_handler_that_waits_for_a_retry_ends_with_the_run(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        asked = await client.post(play_call("ask", revision=E))
        assert asked.response.ended
        assert (client.endpoint.clients, client.run.statistics().parked) == (0, 1)
        client.run.stop()
        assert client.run.statistics().parked == 0
        await wait_all_tasks_blocked()
        assert scripted.cancelled == [""]


async def test_a_reply_to_a_disconnected_client_raises_broken_resource_error(autojump_clock: MockClock) -> None:
    async with endpoint_of(ScriptedServer().server) as client:
        session = await client.initialize(D)
        for how in (
            lambda recorder: client.post(notification("notifications/x"), session, response=recorder),
            lambda recorder: client.get(session, "x", response=recorder),
            lambda recorder: client.post(request("ping", revision=D), "unknown", response=recorder),
        ):
            cut = Recorder()
            cut.cut()
            with pytest.raises(trio.BrokenResourceError):
                await how(cut)
        cut = Recorder()
        cut.cut()
        await client.post(
            request("ping", revision=D), session, response=cut
        )  # the response stream handles the disconnection itself
        assert client.endpoint._sessions.get(session) is not None


@pytest.mark.parametrize("revision", [D, E])
async def test_the_head_of_a_stream_is_sent_early_or_with_an_early_answer(
    revision: str, autojump_clock: MockClock
) -> None:
    """Repeated, because the order of the tasks is random."""
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await open_session(client, revision)
        for id in range(10):
            waits = await client.ask(
                "POST", play_call("wait go", id=id, revision=revision), session, Accept="text/event-stream"
            )
            assert len(waits.response.writes) == 1
            assert not waits.response.ended
            at_once = await client.post(
                play_call("say hello", id=id + 10, revision=revision), session, Accept="text/event-stream"
            )
            assert len(at_once.response.writes) == 1
            assert at_once.response.ended
            assert methods(at_once.response.messages) == ["the answer"]
            waits.disconnect()
        scripted.go["go"].set()


@pytest.mark.parametrize("revision", [D, E])
@pytest.mark.parametrize("seed", range(2))
def test_serve_can_be_cancelled_at_each_step(revision: str, seed: int) -> None:
    """A cancelled `serve` either has not begun, or finishes its write and returns the callback for a disconnection."""
    returned: list[bool] = []

    async def scenario(attempt: Attempt) -> None:
        scripted = ScriptedServer()
        async with endpoint_of(scripted.server) as client:
            session = await open_session(client, revision)
            exchange = None
            recorder = Recorder()
            with attempt.window():
                exchange = await client.ask(
                    "POST", play_call("progress", "wait never", revision=revision), session, response=recorder,
                    Accept="text/event-stream",
                )  # fmt: skip
                await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()
            if exchange is not None:
                exchange.disconnect()
            await wait_all_tasks_blocked()
            assert not len(client.endpoint._attached)
            if revision == E:
                assert client.endpoint.clients == 0
                assert scripted.cancelled == scripted.began
                assert client.run.statistics().running == 0
            returned.append(exchange is not None)

    assert cancel_at_each_step(scenario, watch=any_task, seed=seed) > 3
    assert returned.count(True) > 2


# HTTP+SSE


@req("sse-05")
@pytest.mark.parametrize(
    ("options", "prefix", "uri"),
    [
        ({}, "", "/messages?session="),
        ({}, "/tools", "/tools/messages?session="),
        ({"public_url": "https://example.com/x/"}, "", "https://example.com/x/messages?session="),
        ({"public_url": "https://example.com"}, "/tools", "https://example.com/messages?session="),
    ],
)
async def test_http_sse_sends_the_url_for_posts(
    options: dict[str, Any], prefix: str, uri: str, autojump_clock: MockClock
) -> None:
    async with endpoint_of(ScriptedServer().server, **SSE_PATHS, **options) as client:
        exchange = await client.ask("GET", path="/sse", prefix=prefix, Accept="text/event-stream")
        (event,) = exchange.response.events
        assert (event.event, event.id) == ("endpoint", None)
        assert event.data.decode().startswith(uri)
        assert len(event.data.decode().removeprefix(uri)) == 32
        exchange.disconnect()


# Many streams


async def test_a_thousand_open_streams_each_get_a_change(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        exchanges = []
        for n in range(1000):
            exchanges.append(await client.ask("POST", listen(n)))
        await wait_all_tasks_blocked()
        scripted.server.notify_list_changed("tools")
        await trio.sleep(16)
        assert all(len(exchange.response.messages) == 2 and exchange.response.comments == 1 for exchange in exchanges)
        assert client.endpoint.clients == 1000
        for exchange in exchanges:
            exchange.disconnect()
        assert client.endpoint.clients == 0
        assert client.run.statistics().listeners == 0


async def test_changes_for_a_slow_reader_are_merged(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(outgoing=2))
    async with endpoint_of(scripted.server) as client:
        subscribed = await client.post(listen())
        subscribed.response.hold()
        for _ in range(100):
            scripted.server.notify_list_changed("tools")
            await trio.sleep(1)
        subscribed.response.go_on()
        await trio.sleep(1)
        assert len(subscribed.response.messages) <= 1 + 1 + 2 + 1
        subscribed.disconnect()
