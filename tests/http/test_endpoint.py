"""What becomes of a request by HTTP, from its head to the end of its response."""

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


async def opened(door: EndpointClient, revision: str, **how: Any) -> str | None:
    return None if revision == E else await door.initialize(revision, **how)


def listen(id: Any = 1) -> dict[str, Any]:
    return request(LISTEN, {"notifications": {"toolsListChanged": True}}, id)


# Options.


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
async def test_an_option_that_cannot_be_is_an_error_that_says_what_can(
    options: dict[str, Any], error: type[Exception], words: list[str], autojump_clock: MockClock
) -> None:
    async with Server("x").running() as run:
        with pytest.raises(error) as raised:
            Endpoint(run, **options)
        assert all(word in str(raised.value) for word in words)


async def test_a_rate_of_nothing_is_an_error(autojump_clock: MockClock) -> None:
    async with Server("x", limits=Limits(request_rate=0)).running() as run:
        with pytest.raises(UsageError, match=r"Limits\.request_rate"):
            Endpoint(run)


async def test_what_is_not_said_has_a_default(autojump_clock: MockClock) -> None:
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
    async with endpoint_of(ScriptedServer().server, public_url=url) as door:
        assert door.endpoint.public_url == base
        for name, status in ((host, 200), ("localhost", 200), ("example.org", 421)):
            visit = await door.post(request("server/discover"), Host=name)
            assert visit.response.status == status
    async with endpoint_of(ScriptedServer().server, public_url=url, allowed_hosts=["other.org"]) as door:
        for name, status in ((host, 200), ("localhost", 421), ("other.org", 200)):
            visit = await door.post(request("server/discover"), Host=name)
            assert visit.response.status == status


# The head.


async def test_who_asks_is_asked_for_unless_the_head_is_refused(autojump_clock: MockClock) -> None:
    asked: list[str] = []

    async def authenticate(asking: HttpRequest) -> str | None:
        asked.append(asking.method)
        return await by_token(asking)

    async with endpoint_of(ScriptedServer().server, authenticate=authenticate) as door:
        visit = await door.post(request("server/discover"), Origin="http://localhost:1")
        assert visit.response.status == 401
        assert visit.response.headers["WWW-Authenticate"] == "Bearer"
        assert visit.response.headers["Access-Control-Allow-Origin"] == "http://localhost:1"
        assert (await door.post(request("server/discover"), **bearer("ann"))).response.status == 200
        assert asked == ["POST", "POST"]
        await door.post(request("server/discover"), Origin="http://evil.example")
        await door.ask("OPTIONS")
        assert asked == ["POST", "POST"]


async def test_a_websocket_is_admitted_like_anything_else(autojump_clock: MockClock) -> None:
    async with endpoint_of(ScriptedServer().server) as door:
        asking = HttpRequest("GET", "/ws", {"Host": "localhost"})
        admitted = await door.endpoint.admit(asking)
        assert isinstance(admitted, AdmittedRequest)
        assert admitted.head.websocket
        refused = await door.endpoint.admit(HttpRequest("GET", "/ws", {"Host": "evil.example"}))
        assert isinstance(refused, Reply)
        assert refused.status == 421


@pytest.mark.parametrize("secret", [False, True])
async def test_equal_heads_of_a_client_are_admitted_once_unless_more_than_the_head_decides(
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
    async with endpoint_of(ScriptedServer().server, **options) as door:
        first = await door.endpoint.admit(head, "10.0.0.1")
        assert isinstance(first, AdmittedRequest)
        assert (await door.endpoint.admit(head, "10.0.0.1") is first) is not secret
        other = await door.endpoint.admit(head, "10.0.0.2")
        assert isinstance(other, AdmittedRequest)
        assert other.peer == "10.0.0.2"
    async with endpoint_of(ScriptedServer().server, allowed_hosts=["example.com"]) as door:
        refused = await door.endpoint.admit(head, "10.0.0.1")
        assert isinstance(refused, Reply)
        assert refused.status == 421


async def test_whoever_runs_the_server_is_told_what_is_refused(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trio_mcp.http")
    async with endpoint_of(ScriptedServer().server, **SSE_PATHS) as door:
        await door.post(request("ping"), path="/messages?session=nobodys")
        await door.ask("PUT")
        await door.post(request("server/discover"))
    first, second = (record.getMessage() for record in caplog.records)
    assert "404" in first
    assert "/messages" in first
    assert "nobodys" not in first
    assert "405" in second


@pytest.mark.parametrize("how", ["initialize", "sse"])
async def test_there_are_no_more_sessions_in_use_than_the_limit(how: str, autojump_clock: MockClock) -> None:
    async with endpoint_of(ScriptedServer(limits=Limits(sessions=1)).server, **SSE_PATHS) as door:
        session = await door.initialize(D)
        standing = await door.get(session)

        async def another() -> RecordedExchange:
            if how == "sse":
                return await door.ask("GET", path="/sse", Accept="text/event-stream")
            return await door.post(request("initialize", OPENING, 0, revision=D), revision=D)

        refused = (await another()).response
        assert refused.status == 503
        assert "Limits.sessions" in refused.json["error"]["message"]
        assert refused.headers["Retry-After"]
        standing.leave()
        assert (await another()).response.status == 200
        assert (await door.post(request("ping", revision=D), session)).response.status == 404


async def test_a_principal_has_a_stable_name(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    async def authenticate(asking: HttpRequest) -> Any:
        return 7

    async with endpoint_of(ScriptedServer().server, authenticate=authenticate) as door:
        assert (await door.post(request("server/discover"))).response.status == 500
    assert "pass a stable, unique name" in caplog.text


async def test_how_often_a_client_asks_is_counted_by_who_it_is_or_where(autojump_clock: MockClock) -> None:
    server = ScriptedServer(limits=Limits(request_rate=2)).server
    async with endpoint_of(server) as door:
        for peer in ("10.0.0.1", "10.0.0.2", None):
            statuses = [(await door.post(request("server/discover"), peer=peer)).response.status for _ in range(3)]
            assert statuses == [200, 200, 429]
        refused = (await door.post(request("server/discover"), peer="10.0.0.1", Origin="http://localhost")).response
        assert refused.headers["Retry-After"] == "1"
        assert "Limits.request_rate" in refused.json["error"]["message"]
        assert refused.headers["Access-Control-Allow-Origin"] == "http://localhost"
        await trio.sleep(1)
        assert (await door.post(request("server/discover"), peer="10.0.0.1")).response.status == 200
    async with endpoint_of(server, authenticate=by_token) as door:
        for name in ("ann", "bob"):
            statuses = [
                (await door.post(request("server/discover"), peer=f"10.0.0.{n}", **bearer(name))).response.status
                for n in range(3)
            ]
            assert statuses == [200, 200, 429]
        # Who guesses may not guess more often.
        statuses = [(await door.post(request("server/discover"), peer="10.1.1.1")).response.status for _ in range(4)]
        assert statuses == [401, 401, 429, 429]


# Requests that stand alone.


@req("cancel-14", "http-115")
@pytest.mark.parametrize("steps", [["wait never"], ["progress", "wait never"]])
async def test_a_modern_request_is_cancelled_by_its_client_that_leaves(
    steps: list[str], autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        visit = await door.post(play_call(*steps, revision=E))
        other = await door.post(play_call("wait go", revision=E))
        assert door.endpoint.clients == 2
        visit.leave()
        await wait_all_tasks_blocked()
        assert scripted.cancelled == [""]
        assert door.endpoint.clients == 1
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        assert other.response.status == 200
        assert scripted.ended == [""]
        visit.gone()
        assert not any(name in visit.response.headers for name in ("Mcp-Session-Id",))
        if visit.response.streams:
            assert all(event.id is None for event in visit.response.events)


@req("cancel-14")
async def test_a_modern_request_whose_answer_cannot_be_written_is_over(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        visit = await door.post(play_call("wait go", "progress", "wait never", revision=E))
        visit.response.cut()
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        assert scripted.cancelled == [""]
        assert door.endpoint.clients == 0
        subscribed = await door.post(listen())
        assert door.run.statistics().listeners == 1
        subscribed.leave()
        assert door.run.statistics().listeners == 0


@session_revisions
async def test_a_legacy_request_without_a_session_runs_to_its_end_and_is_forgotten(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, sessions=False) as door:
        opening = await door.initialize_alone(revision)
        assert "Mcp-Session-Id" not in opening.response.headers
        assert (door.endpoint.clients, door.run.statistics().listeners) == (0, 0)
        visit = await door.post(play_call("progress", "wait go", "progress", revision=revision), revision=revision)
        assert [event.id for event in visit.response.events] == [None]
        visit.leave()
        await trio.sleep(100)
        assert door.endpoint.clients == 1
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        assert scripted.ended == [""]
        assert door.endpoint.clients == 0
        assert (await door.post(notification("notifications/x"), revision=revision)).response.status == 202


@session_revisions
async def test_a_question_without_a_session_fails_at_once_for_nothing_could_bring_the_answer(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server("asks")

    @server.tool
    async def asks(ctx: Context) -> str:
        await ctx.progress(1)
        try:
            await ctx.roots()
        except NotDeclared as error:  # what the client can is not known
            return str(error)
        return "answered"

    async with endpoint_of(server, sessions=False) as door:
        visit = await door.post(
            request("tools/call", {"name": "asks"}, revision=revision, progress=1), revision=revision
        )
        await wait_all_tasks_blocked()
        assert visit.response.ended
        assert methods(visit.response.messages) == [PROGRESS, "the answer"]
        said = visit.response.messages[-1]["result"]["content"][0]["text"]
        assert "sessions=False" in said


@pytest.mark.parametrize("options", [{"sessions": False}, {"json_only": True}])
@session_revisions
async def test_where_nothing_can_be_told_unasked_no_changes_are_promised(
    revision: str, options: dict[str, Any], autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, **options) as door:
        opening = await door.initialize_alone(revision)
        declared = opening.response.json["result"]["capabilities"]
        assert declared["tools"] == declared["resources"] == {}
        session = None if "sessions" in options else await door.initialize(revision)
        subscribe = request("resources/subscribe", {"uri": "r://1"}, revision=revision)
        visit = await door.post(subscribe, session, revision=revision)
        error = visit.response.json["error"]
        assert error["code"] == -32601
        assert "resources.subscribe, which was not declared" in error["message"]


async def test_nothing_keeps_a_request_alive_that_is_over(autojump_clock: MockClock) -> None:
    logging.disable(logging.CRITICAL)  # who captures a log keeps the traceback of what failed
    try:
        await _serve_and_forget()
    finally:
        logging.disable(logging.NOTSET)


async def _serve_and_forget() -> None:
    scripted = ScriptedServer()
    kept: list[Callable[[], Any]] = []
    attach = ResponseStream.attach

    def watched(lane: ResponseStream, *args: Any) -> Any:
        owner = lane.owner
        kept.extend(map(weakref.ref, (lane, owner.server_session, args[0])))
        return attach(lane, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResponseStream, "attach", watched)
        async with endpoint_of(scripted.server) as door:
            gc.collect()
            gc.disable()
            try:
                for steps in (["say x"], ["progress", "sleep 1"], ["ask"], ["fail on purpose"]):
                    await door.post(play_call(*steps, revision=E))
                await door.post(request("no/such"))
                (await door.post(play_call("wait never", revision=E))).leave()
                (await door.post(listen())).leave()
                await trio.sleep(2)
                assert len(kept) == 3 * 7
                # Only a handler that waits for a retry has what it asked by.
                assert sorted(type(each()).__name__ for each in kept if each() is not None) == [
                    "ResponseStream",
                    "ServerSession",
                ]
            finally:
                gc.enable()


# Sessions.


@session_revisions
async def test_what_a_message_is_fed_to(revision: str, autojump_clock: MockClock) -> None:
    """Every verdict once, carried out."""
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        assert (await door.post(request("ping", revision=revision), session)).response.json["result"] == {}
        asked = await door.post(play_call("roots", revision=revision), session)
        (question,) = asked.response.messages
        answered = await door.post(response(question["id"], {"roots": []}), session)
        assert (answered.response.status, answered.response.body) == (202, b"")
        assert scripted.ended == [""]
        standing = await door.get(session)
        assert (standing.response.status, standing.response.streams, standing.response.ended) == (200, True, False)
        assert (await door.ask("DELETE", None, session)).response.status == 204
        await wait_all_tasks_blocked()
        assert standing.response.ended
        assert (await door.post(request("ping", revision=revision), session)).response.status == 404


async def test_initialize_that_is_refused_opens_nothing(autojump_clock: MockClock) -> None:
    made: list[MemoryEventLog] = []

    def make(session: str) -> MemoryEventLog:
        made.append(MemoryEventLog())
        return made[-1]

    async with endpoint_of(ScriptedServer().server, event_log=make) as door:
        for accept in ("application/json", "text/event-stream"):
            visit = await door.post(request("initialize", {}, revision=D), revision=D, Accept=accept)
            assert "Mcp-Session-Id" not in visit.response.headers
            assert visit.response.ended
        assert door.endpoint.clients == 0
        assert all(len(log) == 0 for log in made)
        visit = await door.post(
            request("initialize", OPENING, 0, revision=D),
            revision=D,
            Accept="text/event-stream",
        )
        assert visit.response.headers["Mcp-Session-Id"]
        assert [event.id for event in visit.response.events] == [None]
        assert door.endpoint.clients == 1


@session_revisions
async def test_there_are_no_more_streams_than_the_limit(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(streams=2))
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        first = await door.get(session)
        away = await door.post(play_call("progress", "wait never", revision=revision), session)
        for refused in (await door.get(session), await door.post(request("ping", id=9, revision=revision), session)):
            assert refused.response.status == 429
            assert "Limits.streams" in refused.response.json["error"]["message"]
            assert refused.response.headers["Retry-After"]
        # Who comes back for a stream that seems open takes no more than there was.
        again = await door.get(session, away.response.last_id)
        assert (again.response.status, away.response.dropped) == (200, True)
        again.leave()
        second = await door.get(session)
        assert (await door.get(session, away.response.last_id)).response.status == 429
        second.leave()
        assert (await door.get(session, away.response.last_id)).response.status == 200
        first.leave()
        # Those that have ended take no place either.
        for n in range(3):
            ended = await door.post(play_call("progress", id=f"more {n}", revision=revision), session)
            assert ended.response.messages[-1]["id"] == f"more {n}"


@req("http-42")
@session_revisions
async def test_what_can_not_be_resumed_is_refused_and_what_is_over_is_replayed(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        call = await door.post(play_call("progress", "progress", revision=revision), session)
        ids = [event.id for event in call.response.events]
        whole = await door.get(session, ids[-3])
        assert methods(whole.response.messages) == [PROGRESS, "the answer"]
        assert whole.response.ended
        last = await door.get(session, ids[-1])
        assert (last.response.status, last.response.messages, last.response.ended) == (200, [], True)
        for unknown in ("99-0", "x"):
            refused = await door.get(session, unknown, Origin="http://localhost")
            assert refused.response.status == 400
            assert "without Last-Event-ID" in refused.response.json["error"]["message"]
            assert refused.response.headers["Access-Control-Allow-Origin"] == "http://localhost"


async def test_a_stream_that_broke_off_is_said_to_have(
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
    async with endpoint_of(scripted.server, event_log=Full) as door:
        session = await door.initialize(D)
        call = await door.post(play_call("progress", "sleep 1", "progress"), session)
        await trio.sleep(2)
        assert call.response.dropped
        assert "no space left" in caplog.text
        refused = await door.get(session, call.response.last_id)
        assert refused.response.status == 400
        assert "the stream has failed" in refused.response.json["error"]["message"]
        assert scripted.ended == [""]


# Questions.


@session_revisions
async def test_a_question_fails_with_a_client_that_left_and_cannot_come_back(
    revision: str, autojump_clock: MockClock
) -> None:
    server, failed, go = Server("asks"), [], trio.Event()

    @server.tool
    async def asks(ctx: Context) -> str:
        await go.wait()
        try:
            await ctx.roots()
        except SessionClosed:
            failed.append(trio.current_time())
        return "done"

    async with endpoint_of(server) as door:
        session = await door.initialize(revision)
        visit = await door.post(request("tools/call", {"name": "asks"}, revision=revision), session)
        visit.leave()
        began = trio.current_time()
        go.set()
        await wait_all_tasks_blocked()
        assert failed == [began]


@session_revisions
async def test_a_call_that_fails_with_its_client_that_left_is_nothing_for_the_log(
    revision: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    server, go = Server("asks"), trio.Event()

    @server.tool
    async def asks(ctx: Context) -> None:
        await go.wait()
        await ctx.roots()

    async with endpoint_of(server) as door:
        session = await door.initialize(revision)
        visit = await door.post(request("tools/call", {"name": "asks"}, revision=revision), session)
        visit.leave()
        go.set()
        await wait_all_tasks_blocked()
        assert server.statistics().running == 0
    assert [each.getMessage() for each in caplog.records] == []


@session_revisions
async def test_a_question_waits_for_a_client_that_can_come_back(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        visit = await door.post(play_call("progress", "wait go", "roots", "say good", revision=revision), session)
        visit.leave()
        scripted.go["go"].set()
        await trio.sleep(100)
        back = await door.get(session, visit.response.last_id)
        (question,) = back.response.messages
        await door.post(response(question["id"], {"roots": []}), session)
        assert back.response.messages[-1]["result"]["content"][0]["text"] == "good"
        # And the answer may come from one that has not come back at all.
        visit = await door.post(play_call("sample", id=2, revision=revision), session)
        (question,) = visit.response.messages
        visit.leave()
        model = {"role": "assistant", "content": {"type": "text", "text": "x"}, "model": "m"}
        await door.post(response(question["id"], model), session)
        assert len(scripted.answers) == 2


# Hanging up.


@req("http-47", "http-49", "http-46")
async def test_a_handler_lets_its_client_hang_up_and_come_back_for_the_rest(autojump_clock: MockClock) -> None:
    server, told = Server("polled"), []

    @server.tool
    async def test_reconnection(ctx: Context) -> str:
        told.append(await ctx.hang_up(retry=0.5))
        await trio.sleep(2)
        told.append(await ctx.hang_up())  # it has left already
        return "here again"

    async with endpoint_of(server) as door:
        session = await door.initialize(D)
        call = await door.post(request("tools/call", {"name": "test_reconnection"}, revision=D), session)
        first, last = call.response.events
        assert (first.id, first.data, first.retry) == ("1-0", b"", None)
        assert (last.id, last.data, last.retry) == ("1-1", b"", 500)
        assert call.response.ended
        await trio.sleep(0.5)
        again = await door.get(session, last.id)
        assert again.response.events == []
        await trio.sleep(5)
        assert again.response.messages[0]["result"]["content"][0]["text"] == "here again"
        assert again.response.ended
        assert told == [True, True]  # ... but had come back
    # Hung up while nobody is there, it says so.
    told.clear()
    async with endpoint_of(server) as door:
        session = await door.initialize(D)
        await door.post(request("tools/call", {"name": "test_reconnection"}, revision=D), session)
        await trio.sleep(5)
        assert told == [True, False]


@pytest.mark.parametrize(
    ("revision", "accept"), [(B, None), ("2025-06-18", None), (E, None), (D, "application/json"), (A, None)]
)
async def test_where_nobody_would_come_back_nothing_is_hung_up(
    revision: str, accept: str | None, autojump_clock: MockClock
) -> None:
    server, told = Server("polled"), []

    @server.tool
    async def poll(ctx: Context) -> str:
        for retry in (-1, float("nan"), float("inf"), "1", True):
            with pytest.raises(UsageError, match="retry"):
                await ctx.hang_up(retry=retry)  # type: ignore[arg-type]
        with trio.testing.assert_checkpoints():
            told.append(await ctx.hang_up())
        return "done"

    async with endpoint_of(server, **SSE_PATHS) as door:
        message = request("tools/call", {"name": "poll"}, revision=revision)
        if revision == A:
            stream = await door.ask("GET", path="/sse", revision=A, Accept="text/event-stream")
            uri = stream.response.events[0].data.decode()
            params = {"protocolVersion": A, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
            await door.post(request("initialize", params, 0, revision=A), path=uri)
            await door.post(notification("notifications/initialized"), path=uri)
            await door.post(message, path=uri)
        else:
            session = await opened(door, revision)
            visit = await door.post(message, session, **({"Accept": accept} if accept else {}))
            assert visit.response.json["result"]["content"][0]["text"] == "done"
        assert told == [False]


@every_revision
async def test_on_one_stream_for_everything_nothing_is_hung_up(revision: str, autojump_clock: MockClock) -> None:
    server = Server("polled")

    @server.tool
    async def poll(ctx: Context) -> str:
        return str(await ctx.hang_up())

    async with connected(server, revision) as wire:
        assert (await wire.call("tools/call", {"name": "poll"}))["content"][0]["text"] == "False"


# Draining.


async def test_new_work_is_refused_while_the_server_drains_and_what_goes_on_is_not(autojump_clock: MockClock) -> None:
    scripted, over = ScriptedServer(), []

    async def drain(door: EndpointClient) -> None:
        await door.run.drain()
        over.append(trio.current_time())

    async with endpoint_of(scripted.server, **SSE_PATHS) as door, trio.open_nursery() as nursery:
        session, idle, older = [await door.initialize(each) for each in (D, D, B)]
        call = await door.post(play_call("progress", "roots", "sleep 5", "say all"), session)
        doomed = await door.post(play_call("wait never", id=2, name="doomed"), session)
        parked = await door.post(play_call("ask", "say parked", revision=E))
        held = await door.post(play_call("sleep 9", "ask", "say asked", revision=E))
        nursery.start_soon(drain, door)
        await trio.sleep(1)
        for new in (
            await door.post(play_call(revision=E)),
            await door.post(request("ping", id=9, revision=D), idle),
            await door.post([request("ping", id=9, revision=B)], older),
            await door.post(request("initialize", OPENING, 0, revision=D), revision=D),
            await door.get(idle),
            await door.ask("GET", path="/sse", Accept="text/event-stream"),
            await door.ask("GET", path="/ws"),
        ):
            assert new.response.status == 503
            assert int(new.response.headers["Retry-After"]) > 0
            assert "shutting down" in new.response.json["error"]["message"]
        call.leave()
        back = await door.get(session, call.response.last_id)
        (question,) = [each for each in call.response.messages if each.get("method") == "roots/list"]
        assert (await door.post(response(question["id"], {"roots": []}), session)).response.status == 202
        await door.post(notification(CANCELLED, {"requestId": 2}), session)
        assert (await door.ask("DELETE", None, idle)).response.status == 204
        assert (doomed.response.status, scripted.cancelled) == (202, ["doomed"])
        retried = await retry(door, parked, "say parked")
        assert retried.response.json["result"]["content"][0]["text"] == "parked"
        await trio.sleep(20)
        assert back.response.messages[-1]["result"]["content"][0]["text"] == "all"
        assert not over  # a call that was at work when it began waits for its client
        again = await retry(door, held, "sleep 9", last="say asked")
        assert again.response.json["result"]["content"][0]["text"] == "asked"
        await wait_all_tasks_blocked()
        assert over == [trio.current_time()]
        assert door.endpoint.clients == 0


async def retry(
    door: EndpointClient, visit: RecordedExchange, *steps: str, last: str | None = None
) -> RecordedExchange:
    """The retry of a call that was answered with a question."""
    result = visit.response.json["result"]
    assert result["resultType"] == "input_required"
    (key,) = result["inputRequests"]
    whole = ["ask", *steps] if last is None else [*steps, "ask", last]
    params = {
        **play_params(*whole),
        "requestState": result["requestState"],
        "inputResponses": {key: {"action": "accept", "content": {"size": 3}}},
    }
    return await door.post(request("tools/call", params, 7, progress="token of 1"))


@req("sub-08")
async def test_subscriptions_end_with_their_result_when_the_server_drains(autojump_clock: MockClock) -> None:
    async with endpoint_of(ScriptedServer().server) as door:
        subscribed = await door.post(listen())
        await door.run.drain()
        assert methods(subscribed.response.messages) == [ACKNOWLEDGED, "the answer"]
        assert subscribed.response.messages[-1]["result"]["resultType"] == "complete"
        assert subscribed.response.ended
        await door.run.drain()  # again


@session_revisions
async def test_a_drain_waits_for_who_reads_slowly_and_not_for_ever(revision: str, autojump_clock: MockClock) -> None:
    scripted, over = ScriptedServer(), []
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        call = await door.post(play_call("progress", "wait go", "say all", revision=revision), session)
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


async def test_a_drain_ends_when_the_last_response_has(autojump_clock: MockClock) -> None:
    over: list[float] = []
    async with endpoint_of(ScriptedServer().server) as door:
        session = await door.initialize(D)
        standing = await door.get(session)
        standing.response.hold()

        async def drain() -> None:
            await door.run.drain()
            over.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            await trio.sleep(20)
            assert not over
            standing.leave()
        assert over == [20]


# The end of the run.


@streamable_revisions
async def test_when_the_run_ends_everything_is_dropped(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await opened(door, revision)
        visits = [
            await door.post(play_call(*steps, id=n, revision=revision), session)
            for n, steps in enumerate((["wait never"], ["progress", "wait never"], ["progress", "wait go"]))
        ]
        visits[2].response.hold()
        scripted.go["go"].set()
        if session is not None:
            visits.append(await door.get(session))
            # One of a session that has ended, which is still being read.
            other = await door.initialize(revision)
            visits.append(await door.post(play_call("progress", "wait go now", revision=revision), other))
            visits[-1].response.hold()
            scripted.go["go now"].set()
            await wait_all_tasks_blocked()
            await door.ask("DELETE", None, other)
        door.endpoint.stop()
        await wait_all_tasks_blocked()
        assert all(visit.response.dropped for visit in visits)
        assert not any(visit.response.ended for visit in visits)
        assert scripted.cancelled == ["", ""]
        assert door.endpoint.clients == 0
        if session is not None:
            assert (await door.post(request("ping", revision=revision), session)).response.status == 404
        for visit in visits:
            visit.gone()


async def test_an_endpoint_takes_part_in_its_run_as_long_as_it_runs(autojump_clock: MockClock) -> None:
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


# Clients that go at once, and callers that are cancelled.


async def test_an_endpoint_that_no_longer_runs_serves_nobody_any_more(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with scripted.server.running() as run:
        async with trio.open_nursery() as nursery:
            endpoint = Endpoint(run)
            nursery.start_soon(endpoint.run)
            await wait_all_tasks_blocked()
            door = EndpointClient(endpoint, run)
            session = await door.initialize(D)
            visits = [
                await door.post(play_call("wait never"), session),
                await door.post(play_call("progress", "wait never", revision=E)),
                await door.get(session),
            ]
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert all(visit.response.dropped for visit in visits)
        assert scripted.cancelled == ["", ""]
        assert endpoint.clients == 0


async def test_who_waits_for_a_retry_ends_with_the_run(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        asked = await door.post(play_call("ask", revision=E))
        assert asked.response.ended
        assert (door.endpoint.clients, door.run.statistics().parked) == (0, 1)
        door.run.stop()
        assert door.run.statistics().parked == 0
        await wait_all_tasks_blocked()
        assert scripted.cancelled == [""]


async def test_a_reply_to_who_has_gone_says_so(autojump_clock: MockClock) -> None:
    async with endpoint_of(ScriptedServer().server) as door:
        session = await door.initialize(D)
        for how in (
            lambda gone: door.post(notification("notifications/x"), session, response=gone),
            lambda gone: door.get(session, "x", response=gone),
            lambda gone: door.post(request("ping", revision=D), "nobody's", response=gone),
        ):
            gone = Recorder()
            gone.cut()
            with pytest.raises(trio.BrokenResourceError):
                await how(gone)
        gone = Recorder()
        gone.cut()
        await door.post(request("ping", revision=D), session, response=gone)  # a lane has noticed it itself
        assert door.endpoint._sessions.get(session) is not None


@pytest.mark.parametrize("revision", [D, E])
async def test_the_head_of_a_stream_is_early_unless_the_answer_is_as_early(
    revision: str, autojump_clock: MockClock
) -> None:
    """Whatever order tasks run in."""
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await opened(door, revision)
        for id in range(10):
            waits = await door.ask(
                "POST", play_call("wait go", id=id, revision=revision), session, Accept="text/event-stream"
            )
            assert len(waits.response.writes) == 1
            assert not waits.response.ended
            at_once = await door.post(
                play_call("say hello", id=id + 10, revision=revision), session, Accept="text/event-stream"
            )
            assert len(at_once.response.writes) == 1
            assert at_once.response.ended
            assert methods(at_once.response.messages) == ["the answer"]
            waits.leave()
        scripted.go["go"].set()


@pytest.mark.parametrize("revision", [D, E])
@pytest.mark.parametrize("seed", range(2))
def test_whoever_serves_may_be_cancelled_anywhere(revision: str, seed: int) -> None:
    """What he writes is written, and then he returns, so that he can be told that the client has gone; or he has never
    begun."""
    returned: list[bool] = []

    async def scenario(attempt: Attempt) -> None:
        scripted = ScriptedServer()
        async with endpoint_of(scripted.server) as door:
            session = await opened(door, revision)
            visit = None
            recorder = Recorder()
            with attempt.window():
                visit = await door.ask(
                    "POST", play_call("progress", "wait never", revision=revision), session, response=recorder,
                    Accept="text/event-stream",
                )  # fmt: skip
                await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()
            if visit is not None:
                visit.leave()
            await wait_all_tasks_blocked()
            assert not len(door.endpoint._attached)
            if revision == E:
                assert door.endpoint.clients == 0
                assert scripted.cancelled == scripted.began
                assert door.run.statistics().running == 0
            returned.append(visit is not None)

    assert cancel_at_each_step(scenario, watch=any_task, seed=seed) > 3
    assert returned.count(True) > 2


# The old transport.


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
async def test_the_old_transport_says_where_to_post(
    options: dict[str, Any], prefix: str, uri: str, autojump_clock: MockClock
) -> None:
    async with endpoint_of(ScriptedServer().server, **SSE_PATHS, **options) as door:
        visit = await door.ask("GET", path="/sse", prefix=prefix, Accept="text/event-stream")
        (event,) = visit.response.events
        assert (event.event, event.id) == ("endpoint", None)
        assert event.data.decode().startswith(uri)
        assert len(event.data.decode().removeprefix(uri)) == 32
        visit.leave()


# Many.


async def test_a_thousand_streams_are_open_and_each_is_told(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        visits = []
        for n in range(1000):
            visits.append(await door.ask("POST", listen(n)))
        await wait_all_tasks_blocked()
        scripted.server.notify_list_changed("tools")
        await trio.sleep(16)
        assert all(len(visit.response.messages) == 2 and visit.response.comments == 1 for visit in visits)
        assert door.endpoint.clients == 1000
        for visit in visits:
            visit.leave()
        assert door.endpoint.clients == 0
        assert door.run.statistics().listeners == 0


async def test_a_slow_reader_of_changes_has_them_merged(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(outgoing=2))
    async with endpoint_of(scripted.server) as door:
        subscribed = await door.post(listen())
        subscribed.response.hold()
        for _ in range(100):
            scripted.server.notify_list_changed("tools")
            await trio.sleep(1)
        subscribed.response.go_on()
        await trio.sleep(1)
        assert len(subscribed.response.messages) <= 1 + 1 + 2 + 1
        subscribed.leave()
