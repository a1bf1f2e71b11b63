"""A client's session over HTTP: with a real server in each revision, and with faulty servers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.http_script import (
    SESSION,
    URL,
    Bench,
    Handler,
    ReceivedRequest,
    ResponseWriter,
    legacy,
    modern,
    open_http_link,
    scripted_server,
)
from tests.cuts import Cuts
from tests.http.scripted_server import QUESTIONS, SSE_PATHS, TOOLS, A, B, C, D, E, ScriptedServer, play_params
from tests.http.served import listening, served
from tests.requirements import req
from tests.server.checkpoints import Attempt, any_task, cancel_at_each_step, wait_or_fail
from tests.server.raw_client import CAPABILITIES
from trio_mcp.client import HandshakeError, HeadersRefused, NeedsSse, NoResponse, SessionLost, Unauthorized
from trio_mcp.core import META_VERSION, Limits, McpError, RemoteProtocolError, RequestError, SessionClosed, UsageError
from trio_mcp.core.http import SseEvent, encode_event, find_mirrors
from trio_mcp.core.oauth import AuthorizationFailed, Blame
from trio_mcp.errors import ConnectionFailed
from trio_mcp.transport import ReplyBroken, ReplyTooLong

SESSIONS = (B, C, D)
in_all = pytest.mark.parametrize("revision", [A, B, C, D, E])
streamable = pytest.mark.parametrize("revision", [*SESSIONS, E])
in_sessions = pytest.mark.parametrize("revision", SESSIONS)
RESULT = {"content": [{"type": "text", "text": "done"}]}


def opened_by(revision: str, handle: Handler) -> Handler:
    return modern(handle) if revision == E else legacy(handle)


async def unexpected(received: ReceivedRequest, out: ResponseWriter) -> None:
    raise AssertionError(f"{received.operation} was not to come")


async def error_of(bench: Bench, method: str = "tools/list", params: Any = None) -> McpError:
    with pytest.raises(McpError) as failed:
        await wait_or_fail(partial(bench.caller.request, method, params), "an outcome")
    return failed.value


# With a real server.


@contextlib.asynccontextmanager
async def open_link_to(
    scripted: ScriptedServer, revision: str, *, over: Any = served, sse: bool = False, **options: Any
) -> AsyncIterator[Bench]:
    """A link to a real server.  The oldest revision has only HTTP+SSE."""
    sse = sse or revision == A
    async with over(scripted.server, **(SSE_PATHS if sse else {}), **options) as web:
        url = f"http://{web.headers['Host']}{'/sse' if sse else '/mcp'}"
        capabilities = CAPABILITIES[revision]
        async with open_http_link(web.connect, [revision], url=url, sse=sse, capabilities=capabilities) as bench:
            yield bench


def text_of(result: dict[str, Any]) -> str:
    text: str = result["content"][0]["text"]
    return text


@req("http-08", "http-09", "http-19", "http-66", "http-67")
@in_all
async def test_calls_are_answered_in_every_revision(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with open_link_to(scripted, revision) as bench:
        reports: list[float] = []
        result = await bench.caller.request("tools/list")
        assert [each["name"] for each in result["tools"]] == ["play"]
        result = await bench.caller.request(
            "tools/call",
            play_params("progress", "progress", "say hello"),
            on_progress=lambda *report: reports.append(report[0]),
        )
        assert text_of(result) == "hello"
        assert reports == [1, 2]
        with pytest.raises(RequestError):
            await bench.caller.request("resources/read", {"uri": "nowhere://1"})
        assert bench.recorder.mistakes == []


@in_sessions
async def test_calls_over_http_sse_are_answered_in_newer_revisions(revision: str, autojump_clock: MockClock) -> None:
    async with open_link_to(ScriptedServer(), revision, sse=True) as bench:
        assert text_of(await bench.caller.request("tools/call", play_params("say hello"))) == "hello"


@in_all
async def test_calls_are_answered_over_sockets(revision: str) -> None:
    async with open_link_to(ScriptedServer(), revision, over=listening) as bench:
        results: list[str] = []

        async def call(number: int) -> None:
            results.append(text_of(await bench.caller.request("tools/call", play_params(f"say {number}"))))

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(call, number)
        assert sorted(map(int, results)) == list(range(20))


@req("cancel-11")
@in_all
async def test_leaving_a_call_stops_its_handler_and_the_session_goes_on(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with open_link_to(scripted, revision) as bench:
        with trio.move_on_after(5):
            await bench.caller.request("tools/call", play_params("wait x", name="long"))
        await wait_all_tasks_blocked()
        assert scripted.cancelled == ["long"]
        assert text_of(await bench.caller.request("tools/call", play_params("say still"))) == "still"


@req("http-125")
@pytest.mark.parametrize("revision", [A, *SESSIONS])
async def test_questions_of_a_server_in_a_call_are_answered(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    method, answer, _ = QUESTIONS["sample"]
    async with open_link_to(scripted, revision) as bench:
        bench.recorder.answers[method] = lambda call: answer
        result = await bench.caller.request(
            "tools/call", play_params("sample", "say asked"), on_progress=lambda *_: None
        )
        assert text_of(result) == "asked"
        assert len(scripted.answers) == 1


@req("http-31", "http-32")
@in_sessions
async def test_messages_without_a_request_arrive_on_the_event_stream(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with open_link_to(scripted, revision) as bench:
        bench.nursery.start_soon(bench.link.run_event_stream)
        await wait_all_tasks_blocked()
        scripted.server.notify_list_changed("tools")
        await trio.sleep(5)
        assert [each.notification.method for each in bench.recorder.notices] == [TOOLS]


async def test_a_modern_session_has_no_event_stream(autojump_clock: MockClock) -> None:
    async with open_link_to(ScriptedServer(), E) as bench:
        await bench.link.run_event_stream()  # returns


@req("http-41", "http-44", "http-48", "http-50")
async def test_a_call_resumes_after_the_server_closed_its_stream(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with open_link_to(scripted, D) as bench:
        reports: list[float] = []
        start = trio.current_time()
        steps = play_params("progress", "hang-up 7", "progress", "say back")
        result = await bench.caller.request("tools/call", steps, on_progress=lambda *report: reports.append(report[0]))
        assert text_of(result) == "back"
        assert reports == [1, 2]
        assert scripted.answers == [True]
        assert trio.current_time() - start >= 7


@req("http-59")
@in_sessions
async def test_closing_ends_the_session_at_the_server(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web, open_http_link(web.connect, [revision]) as bench:
        await bench.caller.request("tools/list")
        id = bench.link._sender.session_id
        await bench.link.aclose()
        await bench.link.aclose()
        answer = await web.post({"jsonrpc": "2.0", "id": 1, "method": "ping"}, session=id, revision=revision)
        assert answer.status == 404
        with pytest.raises(SessionClosed):
            await bench.caller.request("tools/list")
        await bench.link.run_event_stream()  # returns


@in_all
async def test_closing_ends_every_call_at_once(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with open_link_to(scripted, revision) as bench:
        ended: list[str] = []

        async def call() -> None:
            with pytest.raises(SessionClosed, match="closed by this side"):
                await bench.caller.request("tools/call", play_params("wait x"), on_progress=lambda *_: None)
            ended.append("call")

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(call)
            await wait_all_tasks_blocked()
            start = trio.current_time()
            await bench.link.aclose()
        assert ended == ["call"] * 3
        assert trio.current_time() == start


@in_sessions
async def test_a_session_that_the_server_ended_is_lost(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web, open_http_link(web.connect, [revision]) as bench:
        gone = await web.end(bench.link._sender.session_id)
        assert gone.status in (200, 202, 204)
        failed = await error_of(bench)
        assert isinstance(failed, SessionLost)
        assert failed.request_may_have_run is False
        assert isinstance(bench.recorder.failure, SessionLost)


@in_all
async def test_own_headers_are_sent_with_each_request(revision: str, autojump_clock: MockClock) -> None:
    seen: list[Any] = []

    async def authenticate(request: Any) -> str | None:
        seen.append(request.headers.get("Authorization"))
        return "ann" if request.headers.get("Authorization") else None

    scripted, sse = ScriptedServer(), revision == A
    tokens = iter(range(100))
    options = {"authenticate": authenticate, **(SSE_PATHS if sse else {})}
    async with served(scripted.server, **options) as web:
        url = URL if not sse else "http://127.0.0.1:3000/sse"
        headers = lambda: (("Authorization", f"Bearer {next(tokens)}"),)  # noqa: E731
        async with open_http_link(web.connect, [revision], url=url, sse=sse, headers=headers) as bench:
            await bench.caller.request("tools/list")
            await bench.caller.request("tools/list", headers=(("authorization", "Bearer own"),))
    assert "Bearer own" in seen
    assert None not in seen
    assert len(set(seen)) == len(seen)  # the headers function is called for each request


# Requests.


@pytest.mark.parametrize(
    "name", ["Accept", "content-type", "MCP-SESSION-ID", "Mcp-Protocol-Version", "Mcp-Method", "Mcp-Param-x", "Host"]
)
@pytest.mark.parametrize("of", ["all", "one"])
async def test_a_caller_cannot_replace_the_headers_of_the_protocol(name: str, of: str) -> None:
    async with scripted_server(modern(unexpected)) as server:
        mine: list[tuple[str, str]] = []
        async with open_http_link(server.connect, [E], headers=lambda: tuple(mine)) as bench:
            given = ((name, "s3cret"),)
            mine.extend(given if of == "all" else ())
            with pytest.raises(UsageError, match=name) as failed:
                await bench.caller.request("tools/list", headers=given if of == "one" else ())
            assert "s3cret" not in str(failed.value)
            mine.clear()


@req("http-78", "http-97", "http-74", "http-75", "http-68")
async def test_arguments_of_a_tool_go_into_headers() -> None:
    async def answer(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.json(received.answer({"resultType": "complete", **RESULT}))

    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    rules = {"t": find_mirrors(schema).rules}
    async with (
        scripted_server(modern(answer)) as server,
        open_http_link(server.connect, [E], mirrors=lambda tool: rules.get(tool, ())) as bench,
    ):
        await bench.caller.request("tools/call", {"name": "t", "arguments": {"region": "eu"}})
        await bench.caller.request("tools/call", {"name": "t", "arguments": {"region": None}})
        await bench.caller.request("tools/call", {"name": "other", "arguments": {"region": "eu"}})
    calls = [each for each in server.requests if each.operation == "tools/call"]
    assert [each.headers.get("Mcp-Param-Region") for each in calls] == ["eu", None, None]
    assert [(each.headers["Mcp-Method"], each.headers["Mcp-Name"]) for each in calls] == [
        ("tools/call", "t"), ("tools/call", "t"), ("tools/call", "other"),
    ]  # fmt: skip
    for each in server.requests:
        assert each.headers["MCP-Protocol-Version"] == each.message["params"]["_meta"][META_VERSION] == E


@req("http-55", "http-61", "http-62", "http-63", "http-119", "http-32")
@in_sessions
async def test_session_id_and_version_are_sent_with_each_later_request(revision: str) -> None:
    async def answer(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "GET":
            await out.reply(405)
        else:
            await out.json(received.answer({"tools": []}))

    async with scripted_server(legacy(answer)) as server, open_http_link(server.connect, [revision]) as bench:
        await bench.caller.request("tools/list")
        await bench.link.run_event_stream()
        assert SESSION not in repr(bench.link) + repr(vars(bench.link)["_in_flight"])
    assert server.operations == ["initialize", "notifications/initialized", "tools/list", "GET", "DELETE"]
    opening, *rest = server.requests
    assert "Mcp-Session-Id" not in opening.headers
    assert "MCP-Protocol-Version" not in opening.headers
    assert [each.headers["Mcp-Session-Id"] for each in rest] == [SESSION] * 4
    assert [each.headers.get("MCP-Protocol-Version") for each in rest] == [None if revision == B else revision] * 4
    assert bench.recorder.mistakes == []


async def test_no_message_overtakes_the_end_of_the_handshake(autojump_clock: MockClock) -> None:
    go = trio.Event()

    async def handle_all(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "notifications/initialized":
            await go.wait()
            await out.reply(202)
        else:
            await legacy(answer)(received, out)

    async def answer(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.json(received.answer({"tools": []}))

    async with scripted_server(handle_all) as server, open_http_link(server.connect, [D]) as bench:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.caller.request, "tools/list")
            with trio.move_on_after(1):
                await bench.caller.request("ping")  # is cancelled before it is sent
            await wait_all_tasks_blocked()
            assert server.operations == ["initialize", "notifications/initialized"]
            go.set()
        # The server gets no cancellation of a request that was never sent.
        assert server.operations == ["initialize", "notifications/initialized", "tools/list"]


@req("cancel-15", "cancel-19", "http-29")
@streamable
async def test_cancelling_closes_the_response_and_notifies_legacy_servers(
    revision: str, autojump_clock: MockClock
) -> None:
    async def hold(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "notifications/cancelled":
            await out.reply(202)
        else:
            await out.begin()
            await out.wait_for_close()

    async with (
        scripted_server(opened_by(revision, hold)) as server,
        open_http_link(server.connect, [revision]) as bench,
    ):
        with trio.move_on_after(3):
            await bench.caller.request("tools/list")
        await wait_all_tasks_blocked()
        told = [each.message["params"] for each in server.requests if each.operation == "notifications/cancelled"]
        [id] = [each.id for each in server.requests if each.operation == "tools/list"]
        assert [each["requestId"] for each in told] == ([] if revision == E else [id])
        # The connection is closed in the modern era.  In the legacy era it is read on: a gateway may send more on it.
        assert server.abandoned == (["tools/list"] if revision == E else [])


@req("http-13")
async def test_a_request_of_a_modern_server_is_not_answered() -> None:
    async def ask(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.begin()
        await out.event({"jsonrpc": "2.0", "id": 7, "method": "ping"})
        await out.event(received.answer({"tools": [], "resultType": "complete"}))
        await out.end()

    async with scripted_server(modern(ask)) as server, open_http_link(server.connect, [E]) as bench:
        await bench.caller.request("tools/list")
        await wait_all_tasks_blocked()
        assert server.operations == ["server/discover", "tools/list"]
        assert len(bench.recorder.mistakes) == 1


# Invalid replies.


def event(value: Any) -> bytes:
    return encode_event(SseEvent(value if isinstance(value, bytes) else json.dumps(value).encode()))


def reply(status: int, body: bytes = b"", kind: str = "application/json", **headers: str) -> Handler:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.reply(status, body, headers, kind)

    return handle


def stream(*pieces: bytes, ends: bool = True, cut: bool = False) -> Handler:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.begin()
        for each in pieces:
            await out.chunk(each)
        if cut:
            out.close()
        elif ends:
            await out.end()
        else:
            await out.wait_for_close()

    return handle


def raw_reply(raw_stream: bytes) -> Handler:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.write(raw_stream)
        out.close()

    return handle


def answers(make: Callable[[ReceivedRequest], Any], status: int = 200) -> Handler:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.json(make(received), status)

    return handle


REPORT = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}

BAD = {
    "204": (reply(204, kind=""), RemoteProtocolError, "no Content-Type"),
    "202": (reply(202, kind=""), RemoteProtocolError, "no Content-Type"),
    "html": (reply(200, b"<html>", "text/html"), RemoteProtocolError, "text/html"),
    "no JSON": (reply(200, b"{"), RemoteProtocolError, "not JSON"),
    "not UTF-8": (reply(200, b'{"\xff": 1}'), RemoteProtocolError, "UTF-8"),
    "empty": (reply(200), RemoteProtocolError, "JSON"),
    "another id": (
        answers(lambda received: {**received.answer(), "id": 999}), RemoteProtocolError, "not answer the request",
    ),
    "a notification": (answers(lambda received: REPORT), RemoteProtocolError, "does not answer the request"),
    "no result": (answers(lambda received: {**received.answer(), "result": 3}), RemoteProtocolError, "an object"),
    "400": (reply(400, b"bad", "text/plain"), NoResponse, "HTTP 400"),
    "500": (reply(500, b"", ""), NoResponse, "HTTP 500"),
    "502": (reply(502, b"<html>", "text/html"), NoResponse, "HTTP 502"),
    "413": (reply(413), NoResponse, "HTTP 413"),
    "401": (reply(401, **{"WWW-Authenticate": "Bearer"}), Unauthorized, "HTTP 401"),
    "403": (reply(403), Unauthorized, "HTTP 403"),
    "error": (answers(lambda received: received.error(-32603, "oh"), 500), RequestError, "oh"),
    "error of no id": (answers(lambda received: {**received.error(-32600, "oh"), "id": None}, 400), RequestError, "oh"),
    "other origin": (reply(307, Location="http://example.com/mcp"), RemoteProtocolError, "another origin"),
    "redirect without a location": (reply(308), RemoteProtocolError, "Location"),
    "redirect for GET": (reply(303, Location="/other"), RemoteProtocolError, "a POST cannot follow a redirect"),
    "redirect in circles": (reply(307, Location="/mcp"), RemoteProtocolError, "more than 5 times"),
    "too busy": (reply(503, **{"Retry-After": "3600"}), NoResponse, "3600 seconds"),
    "always busy": (reply(429, **{"Retry-After": "2"}), NoResponse, "HTTP 429"),
    "closed": (raw_reply(b""), NoResponse, "tools/list has no answer"),
    "no HTTP": (raw_reply(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), NoResponse, "tools/list has no answer"),
    "half a head": (raw_reply(b"HTTP/1.1 200 OK\r\nContent-"), NoResponse, "tools/list has no answer"),
    "half a body": (
        raw_reply(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"), NoResponse, "tools/list has no answer",
    ),
    "empty stream": (stream(), RemoteProtocolError, "the stream ended before the answer"),
    "stream cut": (stream(event(REPORT), cut=True), NoResponse, "the stream ended before the answer"),
    "stream of junk": (stream(event(b"junk"), b"data\r\r\n\n: \xff"), RemoteProtocolError, "the stream ended"),
    "half an event": (stream(b"data: {}\n"), RemoteProtocolError, "the stream ended before the answer"),
    "no answer on it": (stream(event(REPORT)), RemoteProtocolError, "the stream ended before the answer"),
    "error of no id, on a stream": (
        stream(event({"jsonrpc": "2.0", "error": {"code": -32600, "message": "oh"}}), ends=False), RequestError, "oh",
    ),
    "packed": (reply(200, b"{}", **{"Content-Encoding": "gzip"}), NoResponse, "coding"),
}  # fmt: skip


@req("http-05", "http-114")
@pytest.mark.parametrize("revision", [D, E])
@pytest.mark.parametrize("case", BAD)
async def test_a_call_with_an_invalid_reply_fails_alone_with_the_reason(
    case: str, revision: str, autojump_clock: MockClock
) -> None:
    bad, kind, why = BAD[case]
    good = False

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "answer":  # the answer to an invalid request
            await out.reply(202)
        else:
            await (answers(lambda received: received.answer({"tools": []})) if good else bad)(received, out)

    async with (
        scripted_server(opened_by(revision, handle)) as server,
        open_http_link(server.connect, [revision]) as bench,
    ):
        start = trio.current_time()
        failed = await error_of(bench)
        assert type(failed) is kind
        assert why in str(failed)
        if case.isdigit() and hasattr(failed, "status"):
            assert failed.status == int(case)
        assert getattr(failed, "challenge", "") == ("Bearer" if case == "401" else "")
        assert ("headers to send a token" in str(failed)) is (case == "401")  # only there a token can help
        assert SESSION not in str(failed)
        assert trio.current_time() - start <= (2 if case == "always busy" else 0)
        good = True
        assert await bench.caller.request("tools/list") == {"tools": []}


@pytest.mark.parametrize("revision", [D, E])
async def test_the_fault_of_a_connection_is_the_cause_of_the_error(revision: str) -> None:
    async with (
        scripted_server(opened_by(revision, raw_reply(b""))) as server,
        open_http_link(server.connect, [revision]) as bench,
    ):
        failed = await error_of(bench)
        assert isinstance(failed, NoResponse)
        assert failed.request_may_have_run
        assert isinstance(failed.__cause__, ReplyBroken)
        server.refuses_connections = True
        refused = await error_of(bench)
        assert isinstance(refused, ConnectionFailed)
        server.refuses_connections = False
        bench.link._sender.session_id = None  # no session to end


@pytest.mark.parametrize("revision", [D, E])
@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_beyond_the_limit_fails_its_call_alone(revision: str, streams: bool) -> None:
    long = True

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        result = received.answer({"tools": ["x" * 5000 if long else "x"]})
        await (stream(event(result), ends=not long) if streams else answers(lambda received: result))(received, out)

    limits = Limits(message_bytes=4000)
    async with (
        scripted_server(opened_by(revision, handle)) as server,
        open_http_link(server.connect, [revision], limits=limits) as bench,
    ):
        failed = await error_of(bench)
        assert isinstance(failed, RemoteProtocolError if streams else ReplyTooLong)
        assert "4000" in str(failed)
        long = False
        assert await bench.caller.request("tools/list") == {"tools": ["x"]}


@pytest.mark.parametrize("revision", [D, E])
@pytest.mark.parametrize("streams", [False, True])
async def test_an_id_returned_as_a_string_is_accepted_as_a_deviation(revision: str, streams: bool) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        result = {**received.answer({"tools": []}), "id": str(received.id)}
        await (stream(event(result)) if streams else answers(lambda received: result))(received, out)

    async with (
        scripted_server(opened_by(revision, handle)) as server,
        open_http_link(server.connect, [revision]) as bench,
    ):
        assert await bench.caller.request("tools/list") == {"tools": []}
        assert "as the string" in bench.recorder.mistakes[0]


@req("http-112")
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_events_may_be_split_anywhere_and_comments_are_ignored(size: int) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        result = received.answer({"tools": [], "text": "\u2028 \u2029 \x85 \n"})
        data = b"\xef\xbb\xbf: hello\n\n" + b"".join(map(event, [REPORT, REPORT]))
        data += b"event: ping\ndata: 3\n\n: keep-alive\n\n"
        data += b"data: " + json.dumps(result, ensure_ascii=False).encode() + b"\r\n\r\n" + event(REPORT)
        await stream(*(data[open_link_to : open_link_to + size] for open_link_to in range(0, len(data), size)))(
            received, out
        )

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        assert await bench.caller.request("tools/list") == {"tools": [], "text": "\u2028 \u2029 \x85 \n"}
        # Events after the answer are ignored.
        assert [each.notification.method for each in bench.recorder.notices] == ["notifications/message"] * 2


async def test_a_connection_is_kept_when_its_stream_ends_soon_after_the_answer(autojump_clock: MockClock) -> None:
    pause = 0.0

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.begin()
        await out.event(received.answer({"tools": []}))
        await trio.sleep(pause)
        await out.end()

    async with scripted_server(modern(handle)) as server, open_http_link(server.connect, [E]) as bench:
        for seconds, count in ((0.5, 1), (5, 1), (0, 2)):
            pause = seconds
            start = trio.current_time()
            await bench.caller.request("tools/list")
            assert trio.current_time() == start  # the answer does not wait for the end of its stream
            await trio.sleep(10)
            assert len(server.connections) == count


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_gets_one_more_request_after_its_retry_time(status: int, autojump_clock: MockClock) -> None:
    then = answers(lambda received: received.answer({"tools": []}))
    handle = first(reply(status, **{"Retry-After": "5"}), then=then)
    async with scripted_server(modern(handle)) as server, open_http_link(server.connect, [E]) as bench:
        start = trio.current_time()
        assert await bench.caller.request("tools/list") == {"tools": []}
        assert trio.current_time() == start + 5
        assert server.operations == ["server/discover", "tools/list", "tools/list"]


async def test_a_session_that_ended_while_its_server_was_busy_is_lost(autojump_clock: MockClock) -> None:
    handle = legacy(first(reply(503, **{"Retry-After": "5"}), then=reply(404)))
    async with scripted_server(handle) as server, open_http_link(server.connect, [D]) as bench:
        lost = await error_of(bench)
        assert isinstance(lost, SessionLost)
        assert not lost.request_may_have_run


async def test_a_header_mismatch_after_a_busy_reply_is_recognized(autojump_clock: MockClock) -> None:
    refused = answers(lambda received: received.error(-32020), 400)
    handle = modern(first(reply(503, **{"Retry-After": "5"}), then=refused))
    async with scripted_server(handle) as server, open_http_link(server.connect, [E]) as bench:
        assert isinstance(await error_of(bench, "tools/call", {"name": "t"}), HeadersRefused)


@pytest.mark.parametrize("through", [True, False])
async def test_an_answer_is_sent_after_the_retry_time_and_its_reply_has_a_timeout(
    through: bool, autojump_clock: MockClock
) -> None:
    busy, open_link_to = reply(429, **{"Retry-After": "40"}), list[float]()

    async def silent(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.wait_for_close()

    posts = first(busy, then=reply(202) if through else silent)

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        open_link_to.append(trio.current_time())
        await posts(received, out)

    roots = {"roots": {"listChanged": True}}
    async with (
        scripted_server(legacy(handle)) as server,
        open_http_link(server.connect, [D], capabilities=roots) as bench,
    ):
        start = trio.current_time()
        bench.caller.notify("notifications/roots/list_changed")
        await trio.sleep(40 + 29)
        assert open_link_to == [start, start + 40]
        assert bench.recorder.mistakes == []
        await trio.sleep(2)
        assert len(bench.recorder.mistakes) == (not through)


@pytest.mark.parametrize(
    ("status", "fields", "times"),
    [
        *((status, {}, [0, 0, 1, 3]) for status in (408, 429, 502, 503, 504)),
        (503, {"Retry-After": "1"}, [0, 1, 1, 2]),  # as a server without its store replies
    ],
)
async def test_an_answer_is_sent_again_while_the_server_is_unavailable(
    status: int, fields: dict[str, str], times: list[float], autojump_clock: MockClock
) -> None:
    away, open_link_to, answered = reply(status, **fields), list[float](), trio.Event()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "answer":
            open_link_to.append(trio.current_time())
            await (away if len(open_link_to) < 4 else reply(202))(received, out)
            if len(open_link_to) == 4:
                answered.set()
        elif received.operation == "tools/list":
            await out.begin()
            await out.event({"jsonrpc": "2.0", "id": "s", "method": "ping"})
            await answered.wait()
            await out.event(received.answer({"tools": []}))
            await out.end()
        else:
            await legacy(unexpected)(received, out)

    async with scripted_server(handle) as server, open_http_link(server.connect, [D]) as bench:
        with trio.fail_after(60):
            assert await bench.caller.request("tools/list") == {"tools": []}
        assert [seconds - open_link_to[0] for seconds in open_link_to] == times
        assert bench.recorder.mistakes == []


@pytest.mark.parametrize("fields", [{}, {"Retry-After": "1"}])
async def test_an_answer_refused_each_time_ends_the_session(fields: dict[str, str], autojump_clock: MockClock) -> None:
    open_link_to: list[float] = []

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "answer":
            open_link_to.append(trio.current_time())
            await reply(503, **fields)(received, out)
        elif received.operation == "tools/list":
            await out.begin()
            await out.event({"jsonrpc": "2.0", "id": "s", "method": "ping"})
            await trio.sleep_forever()
        else:
            await legacy(unexpected)(received, out)

    async with scripted_server(handle) as server, open_http_link(server.connect, [D]) as bench:
        with trio.fail_after(100), pytest.raises(SessionLost, match="an answer did not reach the server: HTTP 503"):
            await bench.caller.request("tools/list")
        assert len(open_link_to) in (9, 10)
        assert 60 <= open_link_to[-1] - open_link_to[0] <= 61


@pytest.mark.parametrize("times", [1, 3, 4])
async def test_the_end_of_the_handshake_is_repeated_while_unavailable(times: int, autojump_clock: MockClock) -> None:
    open_link_to: list[float] = []

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "notifications/initialized":
            open_link_to.append(trio.current_time())
            await reply(502 if len(open_link_to) <= times else 202)(received, out)
        else:
            await legacy(answers(lambda received: received.answer({"tools": []})))(received, out)

    async with scripted_server(handle) as server, open_http_link(server.connect, [D]) as bench:
        assert await bench.caller.request("tools/list") == {"tools": []}
        assert [seconds - open_link_to[0] for seconds in open_link_to] == [0, 0, 1, 3][: times + 1]
        assert len(bench.recorder.mistakes) == (times == 4)


@pytest.mark.parametrize(
    ("ways", "times", "mistakes"),
    [
        (["cut", "400"], [0, 0], 1),
        (["silent"] * 4, [0, 7.5, 15, 22.5], 1),
        (["refused"] * 3 + ["cut", "202"], [0, 0, 1, 3, 7], 0),
        (["cut"] * 3 + ["refused", "202"], [0, 0, 1, 3, 7], 0),
    ],
)
async def test_attempts_to_end_the_handshake_count_if_the_server_may_have_received_them(
    ways: list[str], times: list[float], mistakes: int, autojump_clock: MockClock
) -> None:
    opened, open_link_to = False, list[float]()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        nonlocal opened
        if received.operation == "initialize":
            await legacy(unexpected)(received, out)
            opened = True
            out.close()  # so that each attempt needs a connection
        elif received.operation == "notifications/initialized":
            way = ways[len(open_link_to)]
            open_link_to.append(trio.current_time())
            if way == "silent":
                await out.wait_for_close()
            elif way != "cut":
                await reply(int(way))(received, out)
            out.close()
        else:
            await legacy(answers(lambda received: received.answer({"tools": []})))(received, out)

    async with scripted_server(handle) as server:

        async def connect() -> trio.abc.Stream:
            if opened and len(open_link_to) < len(ways) and ways[len(open_link_to)] == "refused":
                open_link_to.append(trio.current_time())
                raise OSError("connection refused")
            return await server.connect()

        async with open_http_link(connect, [D]) as bench:
            assert await bench.caller.request("tools/list") == {"tools": []}
            assert [seconds - open_link_to[0] for seconds in open_link_to] == times
            assert len(bench.recorder.mistakes) == mistakes


@pytest.mark.parametrize(("blame", "attempts"), [(Blame.NETWORK, 3), (Blame.USER, 1)])
async def test_an_answer_without_a_token_is_sent_again_only_if_there_may_be_one_later(
    blame: Blame, attempts: int, autojump_clock: MockClock
) -> None:
    asked_for: list[str] = []

    class Tokens:
        refused = False

        def credentials(self, method: str, url: str, operation: str) -> Tokens:
            return self

        async def get(self) -> None:
            await trio.lowlevel.checkpoint()
            asked_for.append("token")
            if len(asked_for) < 3:
                raise AuthorizationFailed(blame, "there is no token", "wait")

        def replied(self, status: int, headers: Any) -> None:
            pass

        def beside(self, given: Any) -> Any:
            return given

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/list":
            bench.link._sender._authorization = Tokens()
            await out.begin()
            await out.event({"jsonrpc": "2.0", "id": "s", "method": "ping"})
            await trio.sleep(5)
            await out.event(received.answer({"tools": []}))
            await out.end()
        else:
            await reply(202)(received, out)

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        assert await bench.caller.request("tools/list") == {"tools": []}
        bench.link._sender._authorization = None
        assert len(asked_for) == attempts
        assert len(bench.recorder.mistakes) == (attempts == 1)
        assert ("answer" in server.operations) == (attempts == 3)


async def test_cancelling_a_call_closes_its_connection_to_a_busy_server(autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/call":
            await out.begin()
            await out.wait_for_close()
        elif received.operation == "tools/list" and not server.abandoned:
            await reply(503, **{"Retry-After": "1"})(received, out)
        elif received.operation == "tools/list":
            await answers(lambda received: received.answer({"tools": []}))(received, out)
        else:
            await reply(202)(received, out)

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        with trio.move_on_after(1):
            await bench.caller.request("tools/call", {"name": "slow"})
        assert server.abandoned == []
        assert await bench.caller.request("tools/list") == {"tools": []}
        assert server.abandoned == ["tools/call"]


async def test_a_batch_of_answers_is_sent_again(autojump_clock: MockClock) -> None:
    open_link_to, answered = list[float](), trio.Event()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/list":
            await out.begin()
            await out.event([{"jsonrpc": "2.0", "id": id, "method": "ping"} for id in "st"])
            await answered.wait()
            await out.event(received.answer({"tools": []}))
            await out.end()
        else:  # the batch
            open_link_to.append(trio.current_time())
            await reply(503 if len(open_link_to) < 3 else 202)(received, out)
            if len(open_link_to) == 3:
                answered.set()

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [B]) as bench:
        with trio.fail_after(60):
            assert await bench.caller.request("tools/list") == {"tools": []}
        assert [seconds - open_link_to[0] for seconds in open_link_to] == [0, 0, 1]
        assert bench.recorder.mistakes == []


@streamable
async def test_a_redirect_within_the_origin_is_followed(revision: str) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.target == "/mcp":
            await out.reply(307, headers={"Location": "/mcp/"})
        else:
            await opened_by(revision, answers(lambda received: received.answer({"tools": []})))(received, out)

    async with scripted_server(handle) as server, open_http_link(server.connect, [revision]) as bench:
        assert await bench.caller.request("tools/list") == {"tools": []}
    assert {each.target for each in server.requests} == {"/mcp", "/mcp/"}


@pytest.mark.parametrize("times", [5, 6])
async def test_at_most_five_redirects_are_followed(times: int) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if (number := len(received.target) - len("/mcp")) < times:
            await out.reply(307, headers={"Location": f"/mcp{'/' * (number + 1)}"})
        else:
            await answers(lambda received: received.answer({"tools": []}))(received, out)

    async def handle_all(received: ReceivedRequest, out: ResponseWriter) -> None:
        await (handle if received.operation == "tools/list" else modern(unexpected))(received, out)

    async with scripted_server(handle_all) as server, open_http_link(server.connect, [E]) as bench:
        if times == 5:
            assert await bench.caller.request("tools/list") == {"tools": []}
        else:
            assert "redirects more than 5 times" in str(await error_of(bench))
    assert server.operations.count("tools/list") == 6


async def test_a_header_mismatch_is_a_distinct_error(autojump_clock: MockClock) -> None:
    refuse = answers(lambda received: received.error(-32020, "Mcp-Param-Region is missing"), 400)
    async with scripted_server(modern(refuse)) as server, open_http_link(server.connect, [E]) as bench:
        failed = await error_of(bench, "tools/call", {"name": "t"})
        assert isinstance(failed, HeadersRefused)
        assert failed.error.code == -32020
        assert isinstance(await error_of(bench, "tools/list"), RequestError)


# Sessions.


async def test_a_lost_session_knows_which_requests_have_not_run(autojump_clock: MockClock) -> None:
    gone = trio.Event()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        name = received.message["params"]["name"]
        if name == "streaming":
            await out.begin()
            await out.wait_for_close()
        elif name == "silent":
            await out.wait_for_close()
        else:
            await gone.wait()
            await out.reply(404, b'{"jsonrpc":"2.0","error":{"code":-32001,"message":"Session not found"}}')

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        ran: dict[str, bool] = {}

        async def call(name: str) -> None:
            failed = await error_of(bench, "tools/call", {"name": name})
            assert isinstance(failed, SessionLost)
            ran[name] = failed.request_may_have_run

        async with trio.open_nursery() as nursery:
            for name in ("streaming", "silent", "one", "two", "three"):
                nursery.start_soon(call, name)
            await wait_all_tasks_blocked()
            start = trio.current_time()
            gone.set()
            await wait_all_tasks_blocked()
            assert ran == {"one": False, "two": False, "three": False}
            await call("late")  # the outcome of the others is not known yet
        assert ran == {"one": False, "two": False, "three": False, "late": False, "streaming": True, "silent": True}
        assert trio.current_time() - start <= 1
    assert "DELETE" not in server.operations


def streams_in_turn(*connections: Handler) -> tuple[Handler, list[ReceivedRequest]]:
    """A handler that calls one handler after the other, and the list of the GET requests."""
    rest, gets = list(connections), list[ReceivedRequest]()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.method == "GET":
            gets.append(received)
        await rest.pop(0)(received, out)

    return handle, gets


def with_id(id: str, value: Any = None, retry: int | None = None) -> bytes:
    return encode_event(SseEvent(b"" if value is None else json.dumps(value).encode(), id=id, retry=retry))


ANSWER = {"jsonrpc": "2.0", "id": 2, "result": {"tools": []}}  # initialize had the first id


@req("http-41", "http-44", "http-48", "http-50")
@in_sessions
@pytest.mark.parametrize(("cut", "away"), [(False, 503), (True, 503), (True, 408)])
async def test_a_broken_stream_is_resumed_after_its_last_event(
    revision: str, cut: bool, away: int, autojump_clock: MockClock
) -> None:
    handle, gets = streams_in_turn(
        stream(with_id("e1", retry=3000), with_id("e2", REPORT), cut=cut),
        reply(away),
        stream(cut=cut),
        stream(with_id("e3", REPORT), with_id("e4", ANSWER)),
    )
    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [revision]) as bench:
        start = trio.current_time()
        assert await bench.caller.request("tools/list") == {"tools": []}
        assert trio.current_time() == start + 9
        assert [each.headers["Last-Event-ID"] for each in gets] == ["e2"] * 3
        assert [each.headers["Accept"] for each in gets] == ["text/event-stream"] * 3
        assert len(bench.recorder.notices) == 2


@req("http-114")
async def test_a_modern_stream_is_not_resumed(autojump_clock: MockClock) -> None:
    handle, gets = streams_in_turn(stream(with_id("e1", REPORT), cut=True))
    async with scripted_server(modern(handle)) as server, open_http_link(server.connect, [E]) as bench:
        failed = await error_of(bench)
        assert isinstance(failed, NoResponse)
        assert isinstance(failed.__cause__, ReplyBroken)
        assert gets == []


async def test_resuming_a_stream_ends_if_the_server_does_not_come_back(autojump_clock: MockClock) -> None:
    handle, gets = streams_in_turn(stream(with_id("e1", REPORT), cut=True))
    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        start = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                failed = await error_of(bench)
                assert isinstance(failed, NoResponse)
                assert isinstance(failed.__cause__, ConnectionFailed)

            nursery.start_soon(call)
            await wait_all_tasks_blocked()
            server.refuses_connections = True
        assert trio.current_time() - start == 1 + 2 + 4 + 8 + 16
        assert gets == []
        server.refuses_connections = False


@pytest.mark.parametrize(("status", "kind"), [(404, SessionLost), (401, Unauthorized), (405, RemoteProtocolError)])
async def test_a_stream_that_cannot_be_resumed_ends_its_call(
    status: int, kind: type, autojump_clock: MockClock
) -> None:
    handle, gets = streams_in_turn(stream(with_id("e1", REPORT)), reply(status))
    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        failed = await error_of(bench)
        assert type(failed) is kind
        if isinstance(failed, SessionLost):
            assert failed.request_may_have_run
        assert len(gets) == 1


@pytest.mark.parametrize(("fields", "seconds"), [({"Retry-After": "1"}, 31), ({}, 31)])
async def test_a_stream_of_a_server_that_stays_busy_ends_its_call(
    fields: dict[str, str], seconds: float, autojump_clock: MockClock
) -> None:
    handle, gets = streams_in_turn(stream(with_id("e1", REPORT)), *[reply(503, **fields)] * 9)
    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        start = trio.current_time()
        failed = await error_of(bench)
        assert isinstance(failed, NoResponse)
        assert (failed.status, failed.request_may_have_run) == (503, True)
        assert (len(gets), trio.current_time() - start) == (5, seconds)


@req("http-37")
async def test_the_event_stream_is_opened_again(autojump_clock: MockClock) -> None:
    note = {"jsonrpc": "2.0", "method": TOOLS}
    handle, gets = streams_in_turn(
        stream(event(note)), stream(with_id("a", note), cut=True), stream(with_id("b", note)), reply(405)
    )
    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        await bench.link.run_event_stream()
        assert len(bench.recorder.notices) == 3
        assert [each.headers.get("Last-Event-ID") for each in gets] == [None, None, "a", "b"]
        assert bench.recorder.missed_for_good == [False, True]  # events that the server has kept are no gap
        assert bench.recorder.mistakes == []


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("reports", [False, True])
async def test_an_answer_on_another_stream_ends_the_wait(begun: bool, reports: bool, autojump_clock: MockClock) -> None:
    asks, on_progress = trio.Event(), (lambda *report: None) if reports else None

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "GET":
            await out.begin()
            await asks.wait()
            await out.event({"jsonrpc": "2.0", "id": server.requests[-1].id, "result": {"tools": []}})
        elif begun:
            await out.begin()
        asks.set()
        await out.wait_for_close()

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        bench.nursery.start_soon(bench.link.run_event_stream)
        await wait_all_tasks_blocked()
        start = trio.current_time()
        with trio.fail_after(1):
            assert await bench.caller.request("tools/list", on_progress=on_progress) == {"tools": []}
        assert trio.current_time() == start
        assert bench.link._in_flight == {}
        await wait_all_tasks_blocked()
        assert server.abandoned == ["tools/list"]
        assert bench.recorder.mistakes == []


async def test_an_answer_on_another_stream_ends_a_request_without_a_task(autojump_clock: MockClock) -> None:
    asks, outcomes = trio.Event(), list[Any]()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "GET":
            await out.begin()
            await asks.wait()
            await out.event({"jsonrpc": "2.0", "id": server.requests[-1].id, "result": {"tools": []}})
        asks.set()
        await out.wait_for_close()

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        bench.nursery.start_soon(bench.link.run_event_stream)
        await wait_all_tasks_blocked()
        bench.caller.begin("tools/list", on_end=lambda outcome, failure: outcomes.append(outcome.result))
        bench.caller.handle_events(())
        await wait_all_tasks_blocked()
        assert outcomes == [{"tools": []}]
        assert bench.link._in_flight == {}
        assert server.abandoned == ["tools/list"]


async def test_a_server_that_does_not_serve_get_cannot_resume(autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "GET":
            await out.reply(405)
        else:
            await stream(with_id("1"))(received, out)

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        failed = await error_of(bench)
        assert str(failed).endswith("the server does not resume the stream: the server does not serve GET")


async def test_a_server_without_an_event_stream_may_leave_pings_unanswered(
    autojump_clock: MockClock,
) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "GET":
            await out.reply(404)
        else:
            await out.wait_for_close()

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        with trio.fail_after(60):
            await bench.link.run_event_stream()
        assert bench.recorder.missed_for_good == [True]


async def test_the_error_of_an_invalid_answer_does_not_show_the_token(autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.reply(200, f"you sent {received.headers['Authorization']}".encode(), kind="application/json")

    headers = (("Authorization", "Bearer abcdefghijkl"),)
    async with (
        scripted_server(legacy(handle)) as server,
        open_http_link(server.connect, [D], headers=lambda: headers) as bench,
    ):
        assert "it begins with 'you sent Bearer [secret]'" in str(await error_of(bench))


async def test_the_error_of_an_invalid_event_stream_does_not_show_the_token(autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.reply(200, f"you sent {received.headers['Authorization']}".encode(), kind="text/plain")

    headers = (("Authorization", "Bearer abcdefghijkl"),)
    async with (
        scripted_server(legacy(handle)) as server,
        open_http_link(server.connect, [D], headers=lambda: headers) as bench,
    ):
        await bench.link.run_event_stream()
        assert "you sent Bearer [secret]" in bench.recorder.mistakes[0]


@pytest.mark.parametrize(
    ("connections", "told", "lost"),
    [
        (
            [reply(404), answers(lambda received: received.answer())],
            False,
            False,
        ),  # the server has no event stream, but the session exists
        ([reply(404)] * 2, False, True),
        ([reply(405)], False, False),
        ([stream(), reply(404)], False, True),
        ([reply(401)], True, False),
        ([reply(500)] * 6, True, False),
        ([raw_reply(b"")] * 7, True, False),
        ([stream()] * 6, True, False),
    ],
)
async def test_the_event_stream_may_be_abandoned_without_ending_the_session(
    connections: list[Handler], told: bool, lost: bool, autojump_clock: MockClock
) -> None:
    handle, _ = streams_in_turn(*connections, answers(lambda received: received.answer({"tools": []})))
    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        await bench.link.run_event_stream()
        assert bool(bench.recorder.mistakes) is told
        assert (bench.recorder.failure is not None) is lost
        assert (True in bench.recorder.missed_for_good) is bench.caller.notifications_lost is not lost
        if not lost:
            assert await bench.caller.request("tools/list") == {"tools": []}


@pytest.mark.parametrize("how", ["silent", "500", "404", "gone", "cut"])
async def test_closing_takes_two_seconds_at_most_and_never_raises(how: str, autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.method != "DELETE":
            await legacy(unexpected)(received, out)
        elif how == "silent":
            await out.wait_for_close()
        elif how == "cut":
            out.close()
        else:
            await out.reply(int(how))

    async with scripted_server(handle) as server, open_http_link(server.connect, [D]) as bench:
        server.refuses_connections = how == "gone"
        if server.refuses_connections:
            for each in server.connections:
                each.close()
        start = trio.current_time()
        await bench.link.aclose()
        assert trio.current_time() - start == (2 if how == "silent" else 0)


async def test_closing_sends_one_delete_also_when_cancelled(autojump_clock: MockClock) -> None:
    async with scripted_server(legacy(unexpected)) as server, open_http_link(server.connect, [D]) as bench:
        with trio.CancelScope() as scope:
            scope.cancel()
            await bench.link.aclose()
        assert scope.cancelled_caught
        await bench.link.aclose()
        assert server.operations.count("DELETE") == 1


@pytest.mark.parametrize("answered", [True, False])
async def test_a_cancellation_precedes_the_end_of_its_session(answered: bool, autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/call" or not answered:
            await out.wait_for_close()
        else:
            await trio.sleep(0.5)  # the server is slow, and the DELETE waits for it
            server.requests.append(received)
            await out.reply(202)

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        with trio.move_on_after(1) as scope:
            await bench.caller.request("tools/call", {"name": "t"})
        assert scope.cancelled_caught
        start = trio.current_time()
        await bench.link.aclose()
        assert trio.current_time() - start == (0.5 if answered else 1)
    told = ["notifications/cancelled"] * (2 if answered else 1)
    assert server.operations == ["initialize", "notifications/initialized", "tools/call", *told, "DELETE"]


async def test_a_notification_that_cannot_be_sent_is_only_a_deviation() -> None:
    refused = reply(400, b'{"jsonrpc":"2.0","error":{"code":-32600,"message":"not now"}}')

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation in ("notifications/initialized", "answer", "notifications/roots/list_changed"):
            await refused(received, out)
        else:
            await legacy(ask)(received, out)

    async def ask(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.begin()
        await out.event({"jsonrpc": "2.0", "id": "s", "method": "ping"})
        await out.event(received.answer({"tools": []}))
        await out.end()

    roots = {"roots": {"listChanged": True}}
    async with scripted_server(handle) as server, open_http_link(server.connect, [D], capabilities=roots) as bench:
        assert await bench.caller.request("tools/list") == {"tools": []}
        assert bench.caller.notify("notifications/roots/list_changed")
        await wait_all_tasks_blocked()
        assert len(bench.recorder.mistakes) == 3
        assert all("not now" in each for each in bench.recorder.mistakes)
        assert sorted(server.operations)[:2] == ["answer", "initialize"]


@pytest.mark.parametrize("then", ["cut", "streams"])
async def test_a_lost_session_ends_when_all_its_requests_have_an_outcome(then: str, autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.message["params"]["name"] == "gone":
            await out.reply(404)
            return
        await trio.sleep(0.5)
        if then == "cut":
            out.close()
        else:
            await out.begin()
            await out.wait_for_close()

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        ends: dict[str, tuple[type, bool, float]] = {}

        async def call(name: str) -> None:
            failed: Any = await error_of(bench, "tools/call", {"name": name})
            ends[name] = type(failed), failed.request_may_have_run, trio.current_time()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, "running")
            nursery.start_soon(call, "gone")
        assert ends == {
            "gone": (SessionLost, False, 0),
            "running": (NoResponse if then == "cut" else SessionLost, True, 0.5),
        }
        await wait_all_tasks_blocked()
        assert bench.recorder.failure is not None
        assert trio.current_time() == 0.5


@pytest.mark.parametrize(("second", "ends", "may_have_run"), [(23, 23, False), (30, 24, True)])
async def test_a_request_to_a_lost_session_may_be_refused_as_slowly_as_the_first(
    second: float, ends: float, may_have_run: bool, autojump_clock: MockClock
) -> None:
    """The first refusal comes at 20 s, after four seconds; the link waits as long for the second."""

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await trio.sleep_until({"first": 20, "second": second}[received.message["params"]["name"]])
        await out.reply(404)

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:

        async def call(name: str, open_link_to: float) -> None:
            await trio.sleep_until(open_link_to)
            failed = await error_of(bench, "tools/call", {"name": name})
            assert isinstance(failed, SessionLost)
            assert failed.request_may_have_run is (name == "second" and may_have_run)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, "first", 16)
            nursery.start_soon(call, "second", 19)
        assert trio.current_time() == ends


async def test_a_request_not_sent_to_a_lost_session_has_not_run(autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "notifications/initialized":
            await trio.sleep(1)
            await out.reply(404)
        else:
            await legacy(unexpected)(received, out)

    async with scripted_server(handle) as server, open_http_link(server.connect, [D]) as bench:
        failed = await error_of(bench)
        assert isinstance(failed, SessionLost)
        assert not failed.request_may_have_run
        assert bench.recorder.failure is not None


@pytest.mark.parametrize(("method", "times"), [("tools/list", 2), ("tools/call", 1)])
async def test_a_tool_is_not_called_twice_because_a_connection_was_closed(method: str, times: int) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if server.operations.count(received.operation) == times:
            await out.json(received.answer())
        out.close()

    async with scripted_server(modern(handle)) as server, open_http_link(server.connect, [E]) as bench:
        if times == 1:
            server._handle = modern(raw_reply(b""))
            failed = await error_of(bench, method, {"name": "t"})
            assert isinstance(failed, NoResponse)
            assert failed.request_may_have_run
        else:
            assert await bench.caller.request(method) == {}
        assert server.operations == ["server/discover", *[method] * times]


@pytest.mark.parametrize("body", ["whole", "cut", "stalls"])
async def test_the_body_of_an_accepted_notification_is_ignored(body: str, autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation != "notifications/initialized":
            await legacy(answers(lambda received: received.answer({"tools": []})))(received, out)
        elif body == "whole":
            await out.reply(202, b"Accepted", kind="text/plain")
        else:
            await out.write(b"HTTP/1.1 202 X\r\nContent-Length: 8\r\n\r\nAcc")
            if body == "cut":
                out.close()
            else:
                await out.wait_for_close()

    async with scripted_server(handle) as server, open_http_link(server.connect, [D]) as bench:
        assert await bench.caller.request("tools/list") == {"tools": []}
        assert trio.current_time() == (1 if body == "stalls" else 0)
        assert len(server.connections) == (1 if body == "whole" else 2)
        assert bench.recorder.mistakes == []


async def test_a_redirected_stream_is_resumed_at_its_new_url(autojump_clock: MockClock) -> None:
    handle, gets = streams_in_turn(
        reply(308, Location="/other"), stream(with_id("e1", REPORT)), stream(with_id("e2", ANSWER)),
    )  # fmt: skip
    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [D]) as bench:
        assert await bench.caller.request("tools/list") == {"tools": []}
        assert [each.target for each in gets] == ["/other"]


@req("http-21")
@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_may_be_in_a_batch_in_the_revision_with_batches(streams: bool) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        batch = [REPORT, received.answer({"tools": []})]
        await (stream(event([REPORT]), event(batch)) if streams else answers(lambda received: batch))(received, out)

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [B]) as bench:
        assert await bench.caller.request("tools/list") == {"tools": []}
        assert len(bench.recorder.notices) == 1 + streams
        assert bench.recorder.mistakes == []


# Opening.


def first(*replies: Handler, then: Handler) -> Handler:
    rest = list(replies)

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await (rest.pop(0) if rest else then)(received, out)

    return handle


@req("http-108", "http-109")
@pytest.mark.parametrize(
    "probe",
    [
        reply(400), reply(404, b"", ""), reply(405), reply(400, b"Bad Request: no session", "text/plain"),
        answers(lambda received: received.error(-32601)), answers(lambda received: received.error(-32600), 400),
        answers(lambda received: received.error(-32000, "Server not initialized"), 400),
        stream(event({"jsonrpc": "2.0", "id": 1, "error": {"code": -32602, "message": "?"}})),
        reply(202, b"", ""), reply(200, b"<html>", "text/html"), reply(200, b"{"), stream(),
    ],
)  # fmt: skip
async def test_a_server_without_discovery_is_initialized(probe: Handler) -> None:
    then = legacy(answers(lambda received: received.answer({"tools": []})))
    async with scripted_server(first(probe, then=then)) as server, open_http_link(server.connect, [D, E]) as bench:
        assert bench.caller.session.terms is not None
        assert bench.caller.session.terms.revision.name == D
        assert await bench.caller.request("tools/list") == {"tools": []}
    assert server.operations == ["server/discover", "initialize", "notifications/initialized", "tools/list", "DELETE"]
    assert "Mcp-Session-Id" not in server.requests[1].headers


@req("http-119")
async def test_each_initialize_begins_without_a_session() -> None:
    async def refuse(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.json(received.error(-32602, data={"supported": [B]}), headers={"Mcp-Session-Id": "old"})

    then = legacy(answers(lambda received: received.answer({"tools": []})), session=None)
    async with scripted_server(first(refuse, then=then)) as server, open_http_link(server.connect, [B, D]) as bench:
        assert await bench.caller.request("tools/list") == {"tools": []}
    assert server.operations == ["initialize", "initialize", "notifications/initialized", "tools/list"]
    assert ["Mcp-Session-Id" in each.headers for each in server.requests] == [False] * 4


async def test_a_ping_before_the_answer_to_initialize_is_answered(autojump_clock: MockClock) -> None:
    answered = trio.Event()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "answer":
            assert received.headers["Mcp-Session-Id"] == SESSION
            answered.set()
            await out.reply(202)
        elif received.operation == "initialize":
            await out.begin({"Mcp-Session-Id": SESSION})
            await out.event({"jsonrpc": "2.0", "id": "s", "method": "ping"})
            await answered.wait()
            result = {"protocolVersion": D, "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
            await out.event(received.answer(result))
            await out.end()
        else:
            await legacy(unexpected)(received, out)

    async with scripted_server(handle) as server, open_http_link(server.connect, [D], opens=False) as bench:
        await wait_or_fail(bench.caller.open, "an opening")
        assert server.operations[:2] == ["initialize", "answer"]


@pytest.mark.parametrize(
    ("opening", "cause"),
    [
        (reply(500), NoResponse), (reply(401), Unauthorized), (raw_reply(b""), NoResponse), (reply(503), NoResponse),
        (stream(cut=True), NoResponse), (reply(302, Location="/x"), RemoteProtocolError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("revisions", [[D], [E], [D, E]])
async def test_the_error_of_a_failed_opening_has_the_reason(
    opening: Handler, cause: type, revisions: list[str]
) -> None:
    async with scripted_server(opening) as server, open_http_link(server.connect, revisions, opens=False) as bench:
        with pytest.raises(McpError) as failed:
            await bench.caller.open()
        # A wrong redirect of the probe proves no era, so the client sends initialize.
        silent = cause is RemoteProtocolError and revisions == [E]
        assert type(failed.value) is (HandshakeError if silent else cause)
        if isinstance(failed.value, Unauthorized | NoResponse):  # the link ends with this error
            later = await error_of(bench)
            assert later is not failed.value  # a shared error would collect the tracebacks of all raises
            assert (type(later), str(later)) == (type(failed.value), str(failed.value))
            assert vars(later) == vars(failed.value)


async def test_an_opening_without_a_connection_is_an_error() -> None:
    async with scripted_server(unexpected) as server, open_http_link(server.connect, [D, E], opens=False) as bench:
        server.refuses_connections = True
        with pytest.raises(ConnectionFailed):
            await bench.caller.open()


@pytest.mark.parametrize("revision", [B, C, D])
@pytest.mark.parametrize("status", [400, 404, 405, 409])
async def test_a_server_that_refuses_initialize_may_use_http_sse(revision: str, status: int) -> None:
    async with (
        scripted_server(reply(status)) as server,
        open_http_link(server.connect, [revision], opens=False) as bench,
    ):
        with pytest.raises(NoResponse if (revision, status) == (D, 409) else NeedsSse):
            await bench.caller.open()


async def test_the_version_that_a_modern_server_supports_is_used() -> None:
    refuse = answers(lambda received: received.error(-32022, "no", data={"supported": [D]}), 400)
    then = legacy(answers(lambda received: received.answer({"tools": []})))
    async with scripted_server(first(refuse, then=then)) as server, open_http_link(server.connect, [C, D, E]) as bench:
        assert await bench.caller.request("tools/list") == {"tools": []}
    assert server.requests[1].message["params"]["protocolVersion"] == D


async def test_a_probe_that_takes_too_long_is_dropped(autojump_clock: MockClock) -> None:
    async def hold(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.wait_for_close()

    async with (
        scripted_server(first(hold, then=legacy(unexpected))) as server,
        open_http_link(server.connect, [D, E], opens=False) as bench,
    ):
        await bench.caller.open(probe=5)
        await wait_all_tasks_blocked()
        assert server.abandoned == ["server/discover"]
        assert trio.current_time() == 5


# HTTP+SSE.


class OldServer:
    """A server over HTTP+SSE: `posts` are the messages that it received, and `say` writes to its stream."""

    def __init__(self, on_get: Handler | None = None, on_post: Handler | None = None) -> None:
        self.on_get = on_get
        self.on_post = on_post or reply(202, b"Accepted", "text/plain")
        self.out: ResponseWriter | None = None
        self.posts: list[ReceivedRequest] = []

    async def handle(self, received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.method == "POST":
            self.posts.append(received)
            if received.operation == "initialize":
                result = {
                    "protocolVersion": A,
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "o", "version": "1"},
                }
                await self.send(received.answer(result))
            await (reply(202) if received.operation in ("initialize", "notifications/initialized") else self.on_post)(
                received, out
            )
        elif self.on_get is not None:
            await self.on_get(received, out)
        else:
            self.out = out
            await out.begin()
            await out.chunk(b"event: endpoint\ndata: /messages?session=s3cret\n\n")
            await out.wait_for_close()

    async def send(self, value: Any) -> None:
        assert self.out is not None
        await self.out.event(value)


def raw_stream(*pieces: bytes, ends: bool = True) -> Handler:
    return stream(*pieces, ends=ends)


@req("sse-06", "sse-08", "sse-14")
async def test_messages_are_posted_to_the_url_of_the_endpoint_event(autojump_clock: MockClock) -> None:
    old = OldServer()
    async with scripted_server(old.handle) as server, open_http_link(server.connect, [A], sse=True) as bench:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.caller.request, "tools/list")
            await wait_all_tasks_blocked()
            assert old.out is not None
            await old.out.chunk(b"event: ping\ndata: 12:00\n\n: hello\n\n")
            await old.send(old.posts[-1].answer({"tools": []}))
        assert server.operations == ["GET", "initialize", "notifications/initialized", "tools/list"]
        assert {each.target for each in old.posts} == {"/messages?session=s3cret"}
        assert bench.recorder.mistakes == []


@req("sse-14", "sse-08")
@pytest.mark.parametrize(
    ("on_get", "kind", "why"),
    [
        (raw_stream(event(REPORT), ends=False), RemoteProtocolError, "endpoint event"),
        (
            raw_stream(b"event: endpoint\ndata: http://example.com/m\n\n", ends=False),
            RemoteProtocolError,
            "stream's origin",
        ),
        (raw_stream(), RemoteProtocolError, "ended before"),
        (raw_stream(ends=False), RemoteProtocolError, "within 10 seconds"),
        (stream(cut=True), ReplyBroken, "connection"),
        (raw_reply(b""), ReplyBroken, "connection"),
        (reply(404), NoResponse, "no event stream"),
        (reply(405), NoResponse, "no event stream"),
        (reply(200, b"{}"), NoResponse, "no event stream"),
        (reply(500), NoResponse, "HTTP 500"),
        (reply(401), Unauthorized, "HTTP 401"),
    ],
)
async def test_a_stream_without_a_valid_endpoint_event_is_an_error(
    on_get: Handler, kind: type, why: str, autojump_clock: MockClock
) -> None:
    old = OldServer(on_get)
    async with (
        scripted_server(old.handle) as server,
        open_http_link(server.connect, [A], sse=True, opens=False) as bench,
    ):
        with pytest.raises(kind, match=why):
            await bench.nursery.start(bench.link.run)
        assert trio.current_time() <= 10
        assert server.operations == ["GET"]


@pytest.mark.parametrize("how", ["end", "cut", "too long"])
async def test_the_end_of_the_stream_ends_the_session(how: str, autojump_clock: MockClock) -> None:
    old = OldServer()
    limits = Limits(message_bytes=4000)
    async with (
        scripted_server(old.handle) as server,
        open_http_link(server.connect, [A], sse=True, limits=limits) as bench,
    ):
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                failed = await error_of(bench)
                assert isinstance(failed, SessionLost)
                assert failed.request_may_have_run
                assert (failed.__cause__ is None) is (how == "end")

            for _ in range(3):
                nursery.start_soon(call)
            await wait_all_tasks_blocked()
            await trio.sleep(60)  # the calls wait without a timeout
            assert old.out is not None
            if how == "end":
                await old.out.end()
            elif how == "cut":
                old.out.close()
            else:
                await old.send({"x": "y" * 5000})
        with pytest.raises(SessionClosed):
            await bench.caller.request("tools/list")


@pytest.mark.parametrize(
    ("on_post", "kind"),
    [
        (reply(404), NoResponse), (reply(500), NoResponse), (raw_reply(b""), NoResponse), (reply(401), Unauthorized),
        (answers(lambda received: received.error(-32602, "no"), 400), RequestError),
    ],
)  # fmt: skip
async def test_a_post_that_is_refused_fails_its_request_alone(on_post: Handler, kind: type) -> None:
    old = OldServer(on_post=on_post)
    async with scripted_server(old.handle) as server, open_http_link(server.connect, [A], sse=True) as bench:
        assert type(await error_of(bench)) is kind
        old.on_post = reply(202)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.caller.request, "tools/list")
            await wait_all_tasks_blocked()
            await old.send(old.posts[-1].answer({"tools": []}))


async def test_messages_wait_for_the_endpoint_event() -> None:
    old = OldServer()
    async with (
        scripted_server(old.handle) as server,
        open_http_link(server.connect, [A], sse=True, opens=False) as bench,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(bench.caller.open)
        await wait_all_tasks_blocked()
        assert server.operations == []
        await bench.nursery.start(bench.link.run)


async def test_a_refused_initialize_over_http_sse_is_an_error() -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await (reply(400) if received.method == "POST" else OldServer().handle)(received, out)

    async with scripted_server(handle) as server, open_http_link(server.connect, [A], sse=True, opens=False) as bench:
        await bench.nursery.start(bench.link.run)
        with pytest.raises(NoResponse, match="HTTP 400"):
            await bench.caller.open()


async def test_a_stream_may_be_closed_before_it_has_begun() -> None:
    old = OldServer(raw_stream(ends=False))
    async with (
        scripted_server(old.handle) as server,
        open_http_link(server.connect, [A], sse=True, opens=False) as bench,
        trio.open_nursery() as nursery,
    ):

        async def run() -> None:
            with pytest.raises(SessionClosed, match="closed by this side"):
                await bench.link.run()

        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        await bench.link.aclose()
        await run()  # it cannot be opened again
        assert server.operations == ["GET"]


# Faults at every byte, and cancelling at every step.


def whole_response(revision: str, streams: bool) -> bytes:
    """A response to a call, from its first byte to its last."""
    answer = json.dumps({"jsonrpc": "2.0", "id": 2, "result": RESULT}).encode()
    if not streams:
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
            len(answer),
            answer,
        )
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    events = [b": hello\n\n", event(REPORT), b"data: " + answer + b"\n\n"]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in events) + b"0\r\n\r\n"


@pytest.mark.parametrize("fault", [b"", b"\x00junk\r\n\r\n"])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("revision", [D, E])
async def test_a_fault_after_any_byte_leads_to_one_outcome_at_once(
    revision: str, streams: bool, fault: bytes, cuts: Cuts, autojump_clock: MockClock
) -> None:
    whole = whole_response(revision, streams)
    open_link_to = 0

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await raw_reply(whole[:open_link_to] + fault)(received, out)

    outcomes: dict[int, str] = {}
    for open_link_to in cuts(whole):
        async with (
            scripted_server(opened_by(revision, handle)) as server,
            open_http_link(server.connect, [revision]) as bench,
        ):
            start = trio.current_time()
            try:
                assert await bench.caller.request("tools/call", {"name": "t"}) == RESULT
                outcomes[open_link_to] = "result"
            except (NoResponse, RemoteProtocolError):
                outcomes[open_link_to] = "error"
            assert trio.current_time() == start
    assert set(outcomes.values()) == {"result", "error"}
    first = min(open_link_to for open_link_to, outcome in outcomes.items() if outcome == "result")
    assert first >= whole.index(RESULT["content"][0]["text"].encode())


@pytest.mark.parametrize("revision", [D, E])
@pytest.mark.parametrize(
    ("watch", "reports"),
    [("the scenario", False), ("the scenario", True), ("to the server", True), (any_task, False), (any_task, True)],
)
def test_a_call_cancelled_at_any_step_leaves_no_task_and_the_session_works(
    revision: str, watch: Any, reports: bool
) -> None:
    """The waiting task runs the request.  If that task also gets progress reports, another task runs the request."""

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "notifications/cancelled":
            await out.reply(202)
            return
        await out.begin()
        await out.event(REPORT)
        await out.event(received.answer({"tools": []}))
        await out.end()

    async def scenario(attempt: Attempt) -> None:
        async with (
            scripted_server(opened_by(revision, handle)) as server,
            open_http_link(server.connect, [revision]) as bench,
        ):
            with attempt.window():
                await bench.caller.request("tools/list", on_progress=(lambda *report: None) if reports else None)
            assert await bench.caller.request("tools/list") == {"tools": []}
            await wait_all_tasks_blocked()
            assert bench.link._in_flight == {}
            assert not bench.link._scopes
            assert bench.recorder.mistakes == []

    assert cancel_at_each_step(scenario, watch=watch) > 1


@pytest.mark.parametrize("probe", [reply(400), stream(), stream(event({"jsonrpc": "2.0", "id": 1, "result": {}}))])
def test_a_probe_may_end_at_any_step_of_its_answer(probe: Handler) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await (probe if received.operation == "server/discover" else legacy(unexpected))(received, out)

    async def scenario(attempt: Attempt) -> None:
        async with (
            scripted_server(handle) as server,
            open_http_link(server.connect, [D, E], opens=False) as bench,
        ):

            def late() -> None:
                bench.caller.handle_events(bench.caller.session.tick(1000))

            with attempt.window(late):
                await bench.caller.open(probe=1000)
            assert bench.caller.session.terms is not None
            assert bench.caller.session.terms.revision.name == D
            await wait_all_tasks_blocked()
            assert server.operations[-2:] == ["initialize", "notifications/initialized"]
            assert server.operations.count("initialize") == 1

    assert cancel_at_each_step(scenario, watch="to the server") > 3


@pytest.mark.parametrize("kind", ["sessions", "modern", "http+sse"])
def test_a_session_cancelled_at_any_step_leaves_no_tasks(kind: str) -> None:
    stage_of = {"sessions": D, "modern": E, "http+sse": A}

    async def scenario(attempt: Attempt) -> None:
        scripted = ScriptedServer()
        async with served(scripted.server, check=False, **(SSE_PATHS if kind == "http+sse" else {})) as web:
            url = "http://127.0.0.1:3000/sse" if kind == "http+sse" else URL
            with attempt.window():
                async with open_http_link(web.connect, [stage_of[kind]], url=url, sse=kind == "http+sse") as bench:
                    if kind == "sessions":
                        bench.nursery.start_soon(bench.link.run_event_stream)
                    await bench.caller.request(
                        "tools/call", play_params("progress", "progress"), on_progress=lambda *_: None
                    )

    assert cancel_at_each_step(scenario, watch="the scenario") > 5
