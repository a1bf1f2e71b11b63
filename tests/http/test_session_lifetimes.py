"""Sessions over HTTP from the first to the last request, their principals, and the end of a server."""

from __future__ import annotations

import json
from typing import Any

import h11
import pytest
import trio
from trio.testing import MockClock

from tests.http.client import Cut, HttpClient, notification, request
from tests.http.scripted_server import (
    QUESTIONS,
    SESSIONS,
    SSE_PATHS,
    A,
    D,
    E,
    ScriptedServer,
    begin_post,
    methods,
    open_session,
    play_call,
    session_revisions,
    small_pipe,
    streamable_revisions,
    text_of,
    wait_until_idle,
)
from tests.http.served import bearer, by_token, listening, served
from tests.requirements import req
from tests.server.raw_client import PROGRESS, REVISION_NAMES
from trio_mcp import Context, Limits, Server
from trio_mcp.transport import CLOSING

# Sessions and their end


@req("http-53", "http-54", "http-52")
async def test_session_ids_are_random_and_valid_in_a_header(autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server) as web:
        ids = {await web.initialize(revision) for revision in SESSIONS for _ in range(20)}
        assert len(ids) == 60
        assert all(len(id) >= 22 and all("!" <= each <= "~" for each in id) for id in ids)
        assert not any(id[:8] == other[:8] for id in ids for other in ids if id != other)


@req("http-56", "http-57")
@session_revisions
async def test_delete_ends_a_session_with_its_calls_and_streams(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session, other = await web.initialize(revision), await web.initialize(revision)
        call = await web.open(play_call("progress", "wait never", name="mine"), session=session)
        kept = await web.open(play_call("progress", "wait go", name="other"), session=other)
        changes = await web.open(session=session)
        await call.message()
        await kept.message()
        ended = await web.end(session)
        assert (ended.status, ended.body) == (204, b"")
        (
            refused,
        ) = await call.rest()  # the client of the call gets an answer, although another request ended the session
        assert refused["error"] == {"code": -32603, "message": "the client has ended the session"}
        assert await changes.rest() == []
        assert call.ended
        assert changes.ended
        assert scripted.cancelled == ["mine"]
        assert (await web.call("ping", session=session)).status == 404
        assert (await web.end(session)).status == 404
        fields = {**web.headers_for(None, revision, session), "Content-Type": None}
        for after in (None, "1-0"):
            assert (await web.send("GET", "/mcp", {**fields, "Last-Event-ID": after})).status == 404
        scripted.go["go"].set()
        assert text_of(await kept.response()) == "done"


@req("http-57")
@session_revisions
async def test_an_unused_session_ends(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer(limits=Limits(session_idle_seconds=100)).server) as web:
        session = await web.initialize(revision)
        for _ in range(5):
            await trio.sleep(99)
            assert (await web.call("ping", session=session)).result == {}
        await trio.sleep(101)
        answer = await web.call("ping", session=session)
        assert answer.status == 404
        assert session not in answer.body.decode()


@session_revisions
async def test_a_session_with_an_open_stream_is_in_use(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer(limits=Limits(session_idle_seconds=100)).server) as web:
        session = await web.initialize(revision)
        async with web.stream(session=session):
            await trio.sleep(1000)
            assert (await web.call("ping", session=session)).result == {}
        await trio.sleep(250)
        assert (await web.call("ping", session=session)).status == 404


@session_revisions
async def test_a_running_call_continues_while_its_client_sends_requests(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer(limits=Limits(session_idle_seconds=100))
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        stream = await web.open(play_call("progress", "sleep 1000"), session=session)
        await stream.message()
        await stream.aclose()
        for _ in range(11):
            await trio.sleep(95)
            assert (await web.call("ping", session=session)).status == 200
        async with web.stream(session=session, after=stream.last_event_id) as rest:
            assert text_of(await rest.response()) == "done"
        await trio.sleep(250)
        assert (await web.call("ping", session=session)).status == 404


@session_revisions
async def test_a_posted_notification_keeps_a_session(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer(limits=Limits(session_idle_seconds=100)).server) as web:
        session = await web.initialize(revision)
        for _ in range(5):
            await trio.sleep(99)
            assert (await web.post(notification("notifications/x"), session=session)).status == 202
        await trio.sleep(101)
        assert (await web.post(notification("notifications/x"), session=session)).status == 404


@session_revisions
async def test_a_client_that_did_not_read_its_session_id_leaves_no_session(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, streams=small_pipe) as web:
        params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        link, _ = await begin_post(web, request("initialize", params, revision=revision), None, revision)
        assert scripted.server.statistics().connections == 1
        await link.aclose()
        await wait_until_idle()
        assert scripted.server.statistics().connections == 0


@pytest.mark.parametrize("transport", ["streamable", "http+sse"])
async def test_the_number_of_sessions_is_limited(transport: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(sessions=3, session_idle_seconds=100))
    async with served(scripted.server, **SSE_PATHS) as web:
        streams = [await web.open(path="/sse", revision=A) for _ in range(2)]
        session = await web.initialize(D)
        async with web.stream(session=session):
            await _check_the_limit(web, transport)
        await streams[0].aclose()
        await wait_until_idle()
        another = await web.initialize(D)
        assert (await web.call("ping", session=session)).result == {}
        assert (await web.call("ping", session=another)).result == {}


async def _check_the_limit(web: HttpClient, transport: str) -> None:
    if transport == "streamable":
        params = {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        refused = await web.call("initialize", params, revision=D)
    else:
        refused = await web.send("GET", "/sse", {"Accept": "text/event-stream"})
    assert refused.status == 503
    assert "Limits.sessions" in refused.json["error"]["message"]
    assert int(refused.headers["Retry-After"]) > 0
    assert (await web.call("server/discover")).status == 200  # requests without a session do not count


async def test_the_session_idle_for_longest_makes_room(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(sessions=3))
    async with served(scripted.server) as web:
        oldest, older, old = [await web.initialize(D) for _ in range(3)]
        await web.call("ping", session=oldest)
        await (await web.open(play_call("progress", "sleep 60", name="running"), session=older)).aclose()
        new = await web.initialize(D)
        assert [(await web.call("ping", session=each)).status for each in (oldest, older, old, new)] == [
            200, 200, 404, 200,
        ]  # fmt: skip
        await trio.sleep(100)
        assert scripted.ended == ["running"]


@session_revisions
@pytest.mark.parametrize("step", ["sleep 990", "roots"])
async def test_a_call_of_an_absent_client_ends_with_its_session(
    revision: str, step: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer(limits=Limits(session_idle_seconds=100))
    async with served(scripted.server) as web:
        session = await web.initialize(revision, {"roots": {}})
        stream = await web.open(play_call("progress", step), session=session)
        await stream.message()
        await stream.aclose()
        await trio.sleep(95)
        assert not scripted.cancelled
        await trio.sleep(10)
        assert scripted.cancelled == [""]
        assert (await web.call("ping", session=session)).status == 404


@session_revisions
async def test_a_handshake_that_fails_leaves_no_session(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer(limits=Limits(sessions=1)).server, check=False) as web:
        for _ in range(3):
            answer = await web.call("initialize", {"protocolVersion": 7}, revision=revision)
            assert answer.code is not None
            assert "Mcp-Session-Id" not in answer.headers
        assert await web.initialize(revision)


async def test_a_server_without_room_for_any_session_refuses_them(autojump_clock: MockClock) -> None:
    async with served(ScriptedServer(limits=Limits(sessions=0)).server) as web:
        params = {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        answer = await web.call("initialize", params, revision=D)
        assert answer.status == 503
        assert b"Limits.sessions" in answer.body


@req("http-07", "sse-03")
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_a_session_is_bound_to_the_principal_that_opened_it(method: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, authenticate=by_token) as web:
        session = await web.initialize(D, headers=bearer("ada"))
        fields = web.headers_for(None, D, session)
        body = json.dumps(request("ping", revision=D)).encode() if method == "POST" else None
        anonymous = await web.send(method, "/mcp", fields, body)
        assert anonymous.status == 401
        assert "WWW-Authenticate" in anonymous.headers
        other = await web.send(method, "/mcp", {**fields, **bearer("bob")}, body)
        assert other.status == 403
        for refused in (anonymous, other):
            assert not any(secret in refused.body.decode() for secret in (session, "ada", "bob"))
        assert (await web.call("ping", session=session, headers=bearer("ada"))).result == {}


@req("http-07", "elic-31")
async def test_handlers_have_the_principal_and_the_headers(autojump_clock: MockClock) -> None:
    server = Server("who")

    @server.tool
    async def who(ctx: Context) -> str:
        return f"{ctx.principal} {ctx.headers['x-trace']}"

    async with served(server, authenticate=by_token) as web:
        session = await web.initialize(D, headers=bearer("ada"))
        for revision, opened, name in [(D, session, "ada"), (E, None, "ada"), (E, None, "bob")]:
            fields = {**bearer(name), "X-Trace": f"{revision}"}
            answer = await web.call("tools/call", {"name": "who"}, revision=revision, session=opened, headers=fields)
            assert text_of(answer.message) == f"{name} {revision}"


async def test_a_preflight_needs_no_credentials(autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server, authenticate=by_token, allowed_origins=["https://app.example"]) as web:
        asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        answer = await web.send("OPTIONS", "/mcp", asked)
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
        refused = await web.call("server/discover", headers={"Origin": "https://app.example"})
        assert refused.status == 401
        assert refused.headers["Access-Control-Allow-Origin"] == "https://app.example"


@req("http-118", "http-26", "http-49")
@session_revisions
async def test_a_draining_server_finishes_calls_and_ends_streams(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, ends=False) as web:
        session = await web.initialize(revision)
        changes = await web.open(session=session)
        call = await web.open(play_call("progress", "sleep 3", "progress"), session=session)
        await call.message()
        async with scripted.server.draining(10):
            if revision == D:
                assert (await changes.event()).data == b""  # the priming event
            assert methods(await call.rest()) == [PROGRESS, "the answer"]
            assert [event.data async for event in changes] == ([b""] if revision == D else [])
            assert changes.ended
            assert (changes.retry is not None) is (revision == D)


@req("http-118")
@streamable_revisions
async def test_a_call_over_the_time_of_a_drain_is_cancelled_and_gets_an_error(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, ends=False) as web:
        session = await open_session(web, revision)
        call = await web.open(
            play_call("progress", "wait never", revision=revision), revision=revision, session=session
        )
        await call.message()
        began = trio.current_time()
        async with scripted.server.draining(10):
            pass
        assert trio.current_time() - began == 10
        message = await call.message()
        assert "shut down before this call had finished" in message["error"]["message"]
        await call.rest()
        assert call.ended
    assert scripted.cancelled == [""]


@streamable_revisions
async def test_a_draining_server_waits_until_its_answers_are_read(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, ends=False, streams=small_pipe) as web:
        session = await open_session(web, revision)
        text = "x" * 100_000
        link, _ = await begin_post(web, play_call(f"say {text}", revision=revision), session, revision)
        async with scripted.server.draining(10):
            assert scripted.ended == [""]
            await trio.sleep(5)
            await link.head()
            assert text.encode() in await link.body()


@streamable_revisions
async def test_a_request_that_completes_during_a_drain_is_refused(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, ends=False) as web:
        session = await open_session(web, revision)
        message = play_call(revision=revision)
        body = json.dumps(message).encode()
        link = await web.link()
        fields = {**web.headers, **web.headers_for(message, revision, session), "Content-Length": str(len(body))}
        head = [f"{name}: {value}" for name, value in fields.items() if value is not None]
        await link.stream.send_all("\r\n".join(["POST /mcp HTTP/1.1", *head, "", ""]).encode() + body[:20])
        await wait_until_idle()
        link.h11.send(h11.Request(method="POST", target="/", headers=[("Host", "x")]))
        link.h11.send(h11.EndOfMessage())
        async with scripted.server.draining(10):
            await wait_until_idle()
            await link.stream.send_all(body[20:])
            refused = await link.head()
            fields = dict(refused.headers)
            assert fields[b"connection"] == b"close"
            if revision == E:
                assert refused.status_code == 503
                assert int(fields[b"retry-after"]) > 0
                assert b"shutting down" in await link.body()
            else:
                assert (
                    refused.status_code == 404
                )  # the session has ended, so the client opens another one on another server
    assert scripted.began == []


async def test_a_draining_server_refuses_new_requests(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, ends=False) as web:
        kept = await web.link()
        await kept.ask("POST", "/mcp", {**web.headers, **web.headers_for(play_call(revision=E), E, None)}, b"x")
        await kept.head()
        call = await web.open(play_call("progress", "sleep 3", revision=E), revision=E)
        async with scripted.server.draining(10):
            await wait_until_idle()
            refused = await web.call("server/discover")
            assert (refused.status, refused.code) == (503, -32603)
            assert int(refused.headers["Retry-After"]) > 0
            assert text_of(await call.response()) == "done"
        with pytest.raises((Cut, OSError)):
            await web.call("server/discover")


@session_revisions
async def test_a_question_during_a_drain_gets_its_answer(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, ends=False) as web:
        session = await web.initialize(revision, {"roots": {}})
        call = await web.open(play_call("sleep 1", "roots", id=5), session=session)
        async with scripted.server.draining(10):
            asked = await call.message()
            assert asked["method"] == "roots/list"
            links = len(web.links)
            await web.post({"jsonrpc": "2.0", "id": asked["id"], "result": {"roots": []}}, session=session)
            assert len(web.links) == links + 1  # the answer may come on a new connection
            assert text_of(await call.response()) == "done"
        assert trio.current_time() < 5


@pytest.mark.parametrize("new_client", [False, True])
async def test_a_call_can_be_retried_with_answers_during_a_drain(new_client: bool, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, ends=False) as web:
        asks = play_call("roots", revision=E, capabilities={"roots": {}})
        asked = (await web.post(asks, revision=E)).result
        assert asked["resultType"] == "input_required"
        other = await web.open(play_call("progress", "wait go", revision=E), revision=E)
        await other.message()
        async with scripted.server.draining(10):
            await wait_until_idle()
            back = HttpClient(web.connect) if new_client else web
            (key,) = asked["inputRequests"]
            more = {"inputResponses": {key: {"roots": []}}, "requestState": asked["requestState"]}
            answer = await back.post({**asks, "id": 2, "params": {**asks["params"], **more}}, revision=E)
            assert text_of(answer.message) == "done"
            assert answer.headers["Connection"] == "close"
            scripted.go["go"].set()
        assert trio.current_time() < 5
        await back.aclose()


def retry_with_answers(asks: Any, asked: Any, id: int) -> Any:
    """The retry of a call, with answers to its questions."""
    results = {method: result for method, result, _ in QUESTIONS.values()}
    responses = {key: results[question["method"]] for key, question in asked["inputRequests"].items()}
    more = {"inputResponses": responses, "requestState": asked["requestState"]}
    return {**asks, "id": id, "params": {**asks["params"], **more}}


def add_shielded_tool(scripted: ScriptedServer) -> None:
    """Add a tool that continues when it is cancelled."""

    @scripted.server.tool
    async def stubborn() -> str:
        with trio.CancelScope(shield=True):
            await trio.sleep(30)
        return "at last"


async def test_a_draining_server_waits_for_several_rounds_of_answers(autojump_clock: MockClock) -> None:
    """No other call runs, and each answer comes in its own request."""
    scripted = ScriptedServer()
    async with served(scripted.server, ends=False) as web:
        asks = play_call("roots", "sample", revision=E, capabilities={"roots": {}, "sampling": {}})
        asked = (await web.post(asks, revision=E)).result
        async with scripted.server.draining(10):
            for id in (2, 3):
                await trio.sleep(3)
                answer = await web.post(retry_with_answers(asks, asked, id), revision=E)
                asked = answer.result
            assert text_of(answer.message) == "done"
        assert trio.current_time() == 6


async def test_a_retry_after_the_time_of_a_drain_is_refused(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    add_shielded_tool(scripted)
    async with served(scripted.server) as web:
        asks = play_call("roots", revision=E, capabilities={"roots": {}})
        asked = (await web.post(asks, revision=E)).result
        await begin_post(web, request("tools/call", {"name": "stubborn"}, 7, revision=E), None, E)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def _() -> None:
                async with scripted.server.draining(10):
                    pass

            await trio.sleep(10 + CLOSING / 2)
            answer = await web.post(retry_with_answers(asks, asked, 2), revision=E)
            assert (answer.status, answer.code) == (503, -32603)
        assert scripted.cancelled == [""]


async def test_a_stubborn_call_does_not_cut_off_streams_of_other_sessions(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    add_shielded_tool(scripted)
    async with served(scripted.server) as web:
        session = await web.initialize(D)
        await begin_post(web, request("tools/call", {"name": "stubborn"}, 7, revision=D), session, D)
        other = await web.open(session=await web.initialize(D))
        await other.event()
        async with scripted.server.draining(10):
            pass
        assert [event.data async for event in other] == [b""]
        assert (other.ended, other.retry) == (True, 1000)


@pytest.mark.parametrize("comes", [True, False])
async def test_a_draining_server_waits_for_a_client_that_was_asked_to_reconnect(
    comes: bool, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, ends=False) as web:
        session = await web.initialize(D)
        async with web.stream(play_call("hang-up 2", "sleep 1"), session=session) as stream:
            await stream.rest()
            seen = stream.last_event_id
        async with scripted.server.draining(10):
            if comes:
                await trio.sleep(2)
                back = await web.open(session=session, after=seen)
                assert text_of(await back.response()) == "done"
        assert trio.current_time() == (2 if comes else 3)


# Without sessions


@pytest.mark.parametrize("revision", REVISION_NAMES[:-1])
async def test_without_sessions_legacy_requests_are_independent(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server, sessions=False) as web:
        params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        opened = await web.call("initialize", params, revision=revision)
        assert opened.result["protocolVersion"] == revision
        assert "Mcp-Session-Id" not in opened.headers
        fields = {"MCP-Protocol-Version": revision}
        assert (
            await web.post(notification("notifications/initialized"), revision=revision, headers=fields)
        ).status == 202
        answer = await web.post(play_call("progress", "say hello"), revision=revision, headers=fields)
        assert methods(answer.messages) == [PROGRESS, "the answer"]
        assert all(event.id is None for event in answer.events)
        assert text_of(answer.message) == "hello"


# The default address


@req("http-06", "sse-02")
async def test_only_loopback_is_served_by_default() -> None:
    async with listening(ScriptedServer().server, **SSE_PATHS) as web:
        stream = await web.connect()
        assert isinstance(stream, trio.SocketStream)
        assert stream.socket.getpeername()[0] == "127.0.0.1"
        await stream.aclose()
        assert (await web.call("server/discover")).status == 200
        assert (await web.call("server/discover", headers={"Host": "mcp.example"})).status == 421
