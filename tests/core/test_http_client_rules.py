"""The decisions of the HTTP client: the headers of a request, and the meaning of a reply."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import (
    LEGACY,
    META_CLIENT_CAPABILITIES,
    META_VERSION,
    REVISIONS,
    Batch,
    Error,
    InvalidMessage,
    Limits,
    Message,
    Notification,
    Request,
    Response,
    Revision,
    UsageError,
    decode,
    encode,
    errors,
    prepare,
)
from trio_mcp.core.http import (
    AnswerReceived,
    Challenged,
    Deliver,
    EndSession,
    EventReader,
    Exchange,
    Headers,
    HttpPolicy,
    HttpRequest,
    KeepAlives,
    MemoryEventLog,
    NoStream,
    OpenStream,
    Oversized,
    Reconnect,
    Redirected,
    RefreshTools,
    Replay,
    ReplyAccepted,
    ReplyLost,
    ReplyVerdict,
    RetryAfter,
    Serve,
    SessionFacts,
    SessionGone,
    SseEvent,
    Streaming,
    StreamResumption,
    TryInitialize,
    TrySse,
    encode_message,
    encode_messages,
    find_mirrors,
    judge,
    priming_event,
    read_answer,
    read_endpoint,
    read_reply,
    reason,
    request_headers,
    url_without_secrets,
)
from trio_mcp.core.http import Reply as Answered

A, B, C, D, E = REVISIONS.values()
URL = "https://example.com/mcp"
SESSION = "fIVvX1WMvj8nT7Wc"
META = {"_meta": {META_VERSION: E.name, META_CLIENT_CAPABILITIES: {}}}
LIST = Request(1, "tools/list")
CALL = Request(1, "tools/call", {"name": "t", "arguments": {"region": "eu"}, **META})
DISCOVER = Request(1, "server/discover", META)
INITIALIZE = Request(1, "initialize", {"protocolVersion": D.name})
NOTE = Notification("notifications/initialized")
MIRRORS = find_mirrors({"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}).rules
JSON = {"Content-Type": "application/json"}
STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}


def exchange(message: Message | None = LIST, revision: Revision = D, **more: Any) -> Exchange:
    return Exchange(URL, revision, message, **more)


def get(revision: Revision = D, **more: Any) -> Exchange:
    return exchange(None, revision, method="GET", **more)


def fault(code: int, message: str = "no", id: Any = 1, data: Any = None) -> Error:
    return Error(id, code, message) if data is None else Error(id, code, message, data)


def reply(asked: Exchange, status: int, body: bytes | Message = b"", **headers: str) -> ReplyVerdict:
    content = body if isinstance(body, bytes) else encode(body)
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    if not isinstance(body, bytes):
        fields = {**JSON, **fields}
    return read_reply(asked, status, Headers(fields.items()), content)


# The headers of a request.


@req("http-09", "http-55", "http-62", "http-63", "http-119")
@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        (exchange(INITIALIZE, D, session=SESSION), {}),
        (exchange(LIST, A, session=SESSION), {"Mcp-Session-Id": SESSION}),
        (exchange(LIST, B, session=SESSION), {"Mcp-Session-Id": SESSION}),
        (exchange(LIST, C, session=SESSION), {"Mcp-Session-Id": SESSION, "MCP-Protocol-Version": C.name}),
        (exchange(NOTE, D, session=SESSION), {"Mcp-Session-Id": SESSION, "MCP-Protocol-Version": D.name}),
        (exchange(Response(1, {}), D, session=SESSION), {"Mcp-Session-Id": SESSION, "MCP-Protocol-Version": D.name}),
        (exchange(LIST, D), {"MCP-Protocol-Version": D.name}),
        (exchange(Batch((LIST, NOTE)), B, session=SESSION), {"Mcp-Session-Id": SESSION}),
    ],
)
def test_a_legacy_message_is_posted_with_its_session_and_version(asked: Exchange, fields: dict[str, str]) -> None:
    wanted = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **fields}
    assert dict(request_headers(asked, mirrors=MIRRORS)) == wanted


@req("http-09", "http-66", "http-67", "http-68", "http-74", "http-75", "http-78", "draft-06")
@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (CALL, {"Mcp-Method": "tools/call", "Mcp-Name": "t", "Mcp-Param-Region": "eu"}),
        (Request(1, "tools/call", {"name": "t", **META}), {"Mcp-Method": "tools/call", "Mcp-Name": "t"}),
        (Request(1, "prompts/get", {"name": "p", **META}), {"Mcp-Method": "prompts/get", "Mcp-Name": "p"}),
        (Request(1, "resources/read", {"uri": "a:b", **META}), {"Mcp-Method": "resources/read", "Mcp-Name": "a:b"}),
        (DISCOVER, {"Mcp-Method": "server/discover"}),
        (NOTE, {"Mcp-Method": "notifications/initialized"}),
    ],
)
def test_a_modern_message_is_mirrored_and_has_no_session_id(message: Message, fields: dict[str, str]) -> None:
    sent = dict(request_headers(exchange(message, E, session=SESSION), mirrors=MIRRORS))
    wanted = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    assert sent == {**wanted, "MCP-Protocol-Version": E.name, **fields}


@req("http-68")
def test_the_version_header_is_the_version_of_the_body() -> None:
    message = Request(1, "tools/list", {"_meta": {META_VERSION: "2099-01-01"}})
    assert dict(request_headers(exchange(message, E)))["MCP-Protocol-Version"] == "2099-01-01"
    for meta in ({}, None, 7):
        message = Request(1, "tools/list", {"_meta": meta})
        assert dict(request_headers(exchange(message, E)))["MCP-Protocol-Version"] == E.name


@req("http-32", "http-41", "http-55", "http-59", "http-62")
def test_streams_are_opened_and_sessions_ended_with_their_id() -> None:
    ours = {"Mcp-Session-Id": SESSION, "MCP-Protocol-Version": D.name}
    assert dict(request_headers(get(session=SESSION))) == {"Accept": "text/event-stream", **ours}
    resumed = request_headers(get(session=SESSION, last_event_id="1-7"))
    assert dict(resumed) == {"Accept": "text/event-stream", **ours, "Last-Event-ID": "1-7"}
    assert dict(request_headers(exchange(None, session=SESSION, method="DELETE"))) == ours
    assert dict(request_headers(get(A, sse=True))) == {"Accept": "text/event-stream"}


@req("http-11", "http-12", "http-13")
@pytest.mark.parametrize(
    ("message", "revision"),
    [
        *((Batch((LIST,)), each) for each in (A, C, D, E)),
        (Response(1, {}), E),
        (fault(-1), E),
    ],
)
def test_posting_a_message_that_the_revision_forbids_is_a_usage_error(message: Message, revision: Revision) -> None:
    with pytest.raises(UsageError):
        request_headers(exchange(message, revision))


def test_an_argument_that_no_header_can_hold_is_a_usage_error() -> None:
    message = Request(1, "tools/call", {"name": "t", "arguments": {"region": []}})
    with pytest.raises(UsageError, match="region"):
        request_headers(exchange(message, E), mirrors=MIRRORS)


@pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
@pytest.mark.parametrize(
    "message", [CALL, DISCOVER, LIST, NOTE, INITIALIZE, Response(1, {})], ids=lambda each: type(each).__name__
)
def test_the_server_accepts_the_messages_of_the_client(message: Message, revision: Revision) -> None:
    if isinstance(message, Request) and message is not INITIALIZE:
        without = {name: value for name, value in message.params.items() if name != "_meta"}
        message = attrs.evolve(message, params=without if revision.handshake else {**without, **META})
    if not revision.handshake and (message is INITIALIZE or isinstance(message, Response)):
        return
    asked = exchange(message, revision, session=SESSION)
    headers = Headers([("Host", "localhost"), *request_headers(asked, mirrors=MIRRORS)])
    verdict = judge(
        HttpPolicy(),
        HttpRequest("POST", "/mcp", headers, encode(message)),
        find_session={SESSION: SessionFacts(revision)}.get,
        find_mirrors={"t": MIRRORS}.get,
    )
    assert isinstance(verdict, Serve | Deliver)
    assert verdict.message == message
    assert verdict.revision is (None if message is INITIALIZE else revision)


@pytest.mark.parametrize("revision", LEGACY, ids=str)
def test_the_server_accepts_get_and_delete_of_the_client(revision: Revision) -> None:
    facts = {SESSION: SessionFacts(revision)}
    for method, wanted in [("GET", OpenStream), ("DELETE", EndSession)]:
        asked = exchange(None, revision, method=method, session=SESSION, last_event_id="1-0")
        headers = Headers([("Host", "localhost"), *request_headers(asked)])
        assert isinstance(judge(HttpPolicy(), HttpRequest(method, "/mcp", headers), find_session=facts.get), wanted)


# The meaning of a reply.


@req("http-19")
@pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
def test_an_answer_comes_as_json_or_as_a_stream(revision: Revision) -> None:
    asked = exchange(revision=revision)
    assert reply(asked, 200, Response(1, {"a": 1})) == AnswerReceived(Response(1, {"a": 1}))
    assert reply(asked, 200, b"unread", **STREAM) == Streaming()
    assert reply(asked, 200, fault(-32602)) == AnswerReceived(fault(-32602))


@req("http-21")
def test_an_answer_to_a_batch_may_be_a_batch() -> None:
    asked = exchange(Batch((LIST, NOTE)), B)
    assert reply(asked, 200, b'[{"jsonrpc":"2.0","id":1,"result":{}}]', **JSON) == AnswerReceived(
        Batch((Response(1, {}),))
    )
    assert reply(exchange(Batch((NOTE,)), B), 202) == ReplyAccepted()
    refused = reply(asked, 200, fault(-32600, id=None))
    assert isinstance(refused, ReplyLost)
    assert "'no' (-32600)" in refused.why


@req("http-126")
def test_an_answer_to_a_batch_must_be_complete() -> None:
    asked = exchange(Batch((LIST, attrs.evolve(LIST, id=2), NOTE)), B)
    whole = Batch((Response(2, {}), fault(-1)))
    assert reply(asked, 200, whole) == AnswerReceived(whole)
    part = Batch((Response(2, {}), NOTE))
    assert isinstance(reply(asked, 200, part), ReplyLost)
    assert isinstance(reply(asked, 200, Response(2, {})), ReplyLost)
    # On a stream, the responses may arrive one by one.
    assert read_answer(asked, Response(2, {})) == AnswerReceived(Response(2, {}))
    assert read_answer(asked, part) == AnswerReceived(part)


@pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
@pytest.mark.parametrize(
    "body",
    [Response(2, {}), Response("x", {}), fault(-1, id=2), NOTE, LIST, Batch((NOTE,)), Batch((Response(2, {}),))],
    ids=repr,
)
def test_a_body_that_answers_another_request_is_a_lost_reply(revision: Revision, body: Any) -> None:
    for status in (200, 201):
        verdict = reply(exchange(revision=revision), status, body)
        assert isinstance(verdict, ReplyLost)
        assert verdict.why
        assert read_answer(exchange(revision=revision), body) == verdict


@pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
def test_a_batch_is_an_answer_in_revisions_with_batches(revision: Revision) -> None:
    answer = Batch((NOTE, Response(1, {})))
    verdict = reply(exchange(revision=revision), 200, answer)
    assert verdict == AnswerReceived(answer) if revision.batches else isinstance(verdict, ReplyLost)


def test_an_id_echoed_as_a_string_must_have_the_same_digits() -> None:
    assert reply(exchange(), 200, Response("1", {})) == AnswerReceived(Response("1", {}))
    assert reply(exchange(), 200, fault(-1, id="1")) == AnswerReceived(fault(-1, id="1"))
    for other in ("01", " 1", "1.0"):
        assert isinstance(reply(exchange(), 200, Response(other, {})), ReplyLost)
    assert isinstance(reply(exchange(Request("1", "tools/list")), 200, Response(1, {})), ReplyLost)


def test_an_exchange_knows_which_messages_answer_it() -> None:
    asked = exchange(Batch((LIST, attrs.evolve(LIST, id="b"), NOTE)), B)
    assert asked.asked == {1, "b"}
    assert asked.answered_by(Batch((Response("b", {}), InvalidMessage("why", answers=1)))) == {1, "b"}
    assert asked.answered_by(InvalidMessage("why", answers=1)) == {1}
    for other in (InvalidMessage("why"), NOTE, LIST, Response(2, {}), fault(-1, id=None)):
        assert asked.answered_by(other) == set()
    assert get().answered_by(Response(1, {})) == set()


def test_an_error_without_an_id_answers_a_single_request() -> None:
    body = encode(prepare(fault(-32603, id=None), null_id=False))
    assert reply(exchange(), 200, body, **JSON) == AnswerReceived(fault(-32603))
    assert read_answer(exchange(), fault(-32603, id=None)) == AnswerReceived(fault(-32603))


def test_an_error_with_status_400_answers_the_request_with_any_id() -> None:
    for id in (None, 7, "server-error"):
        body = encode(prepare(fault(-32600, id=id), null_id=False))
        assert reply(exchange(), 400, body, **JSON) == AnswerReceived(fault(-32600))


@req("ver-14")
@pytest.mark.parametrize("sessions", [True, False])
@pytest.mark.parametrize("body", [DISCOVER, attrs.evolve(DISCOVER, params={}), LIST, CALL], ids=repr)
@pytest.mark.parametrize("named", [True, False])
def test_a_legacy_server_leads_a_probe_to_initialize(sessions: bool, body: Request, named: bool) -> None:
    asked = exchange(body, E, probing=True)
    fields = {"Host": "localhost", **dict(request_headers(asked, mirrors=MIRRORS))}
    if not named:
        del fields["MCP-Protocol-Version"]
    policy = HttpPolicy(revisions=LEGACY, sessions=sessions)
    verdict = judge(policy, HttpRequest("POST", "/mcp", fields, encode(body)), find_mirrors={"t": MIRRORS}.get)
    if sessions or named:
        assert isinstance(verdict, Answered)
        read = read_reply(asked, verdict.status, Headers(verdict.headers), verdict.body)
        assert isinstance(read, TryInitialize)
    else:
        assert isinstance(verdict, Serve)  # as a request of 2025-03-26, so the session replies to the unknown method
        assert verdict.revision is B


@pytest.mark.parametrize("status", [200, 400, 401, 500])
def test_texts_of_the_server_are_cut_in_messages(status: int) -> None:
    for asked in (exchange(NOTE), get(), exchange(Batch((LIST,)), B), exchange()):
        verdict = reply(
            asked, status, fault(-1, "x" * 5000, id=None), Content_Type="y" * 5000 if asked == get() else ""
        )
        if isinstance(verdict, ReplyLost | Challenged):
            assert len(verdict.why) < 300
    assert len(getattr(reply(exchange(), 200, b"", Content_Type="y" * 5000), "why", "")) < 300


def test_the_reply_to_initialize_has_the_session_id() -> None:
    headers = {"Mcp-Session-Id": SESSION}
    asked = exchange(INITIALIZE)
    assert reply(asked, 200, Response(1, {}), **headers) == AnswerReceived(Response(1, {}), SESSION)
    assert reply(asked, 200, **STREAM, **headers) == Streaming(SESSION)
    assert reply(asked, 200, Response(1, {})) == AnswerReceived(Response(1, {}))
    assert reply(exchange(), 200, Response(1, {}), **headers) == AnswerReceived(Response(1, {}))
    assert reply(exchange(DISCOVER, E), 200, Response(1, {}), **headers) == AnswerReceived(Response(1, {}))
    assert isinstance(reply(asked, 200, Response(1, {}), Mcp_Session_Id="a b"), ReplyLost)


@pytest.mark.parametrize(
    ("status", "headers", "body", "why"),
    [
        (200, {"Content-Type": "text/html"}, b"<html>", "'text/html'"),
        (200, {}, b"{}", "no Content-Type"),
        (202, {}, b"", "202"),
        (204, {}, b"", "204"),
        (200, JSON, b"{", "not JSON"),
        (200, JSON, b"", "not JSON"),
        (500, {}, b"oops", "HTTP 500"),
        (404, {}, b"<html>", "HTTP 404"),
        (418, JSON, b'{"jsonrpc":"2.0","id":1,"result":{}}', "HTTP 418"),
    ],
)
def test_the_error_of_an_unusable_reply_says_why(status: int, headers: dict[str, str], body: bytes, why: str) -> None:
    verdict = reply(exchange(), status, body, **headers)
    assert isinstance(verdict, ReplyLost)
    assert why in verdict.why


@req("http-05")
@pytest.mark.parametrize("kind", ["application/json", "text/plain", ""])
def test_an_error_is_read_from_a_body_of_any_content_type(kind: str) -> None:
    for id in (1, None):
        body = encode(prepare(fault(-32600, id=id), null_id=False))
        assert reply(exchange(), 400, body, Content_Type=kind) == AnswerReceived(fault(-32600))


def test_any_success_status_accepts_a_notification() -> None:
    for message in (NOTE, Response(1, {}), fault(1)):
        for status in (200, 202, 204):
            assert reply(exchange(message, session=SESSION), status) == ReplyAccepted()
        refused = reply(exchange(message), 400, fault(-32600, "bad", id=None))
        assert refused == ReplyLost("HTTP 400: 'bad' (-32600)", 400)
    assert reply(exchange(LIST, A, sse=True), 202) == ReplyAccepted()
    assert isinstance(reply(exchange(LIST, A, sse=True), 500), ReplyLost)


@req("http-58")
@pytest.mark.parametrize("revision", LEGACY, ids=str)
def test_a_404_in_a_session_means_that_the_session_has_ended(revision: Revision) -> None:
    body = fault(-32001, "Session not found", id=None)
    for asked in (
        exchange(revision=revision, session=SESSION),
        get(revision, session=SESSION),
        exchange(NOTE, revision, session=SESSION),
    ):
        assert reply(asked, 404, body) == SessionGone()
        assert reply(asked, 404, b"") == SessionGone()
    assert isinstance(reply(exchange(revision=revision), 404), ReplyLost)


@pytest.mark.parametrize("revision", [B, C, D], ids=str)
def test_a_404_with_method_not_found_does_not_end_the_session(revision: Revision) -> None:
    asked = exchange(revision=revision, session=SESSION)
    lacking = fault(errors.METHOD_NOT_FOUND)
    assert reply(asked, 404, lacking) == AnswerReceived(lacking)
    for other in (fault(errors.METHOD_NOT_FOUND, id=None), fault(errors.METHOD_NOT_FOUND, id=7), fault(-32001)):
        assert reply(asked, 404, other) == SessionGone()
    assert reply(exchange(NOTE, revision, session=SESSION), 404, lacking) == SessionGone()
    assert reply(get(revision, session=SESSION), 404, lacking) == SessionGone()


def test_a_404_in_2026_07_28_does_not_concern_a_session() -> None:
    unknown = fault(errors.METHOD_NOT_FOUND)
    assert reply(exchange(LIST, E, session=SESSION), 404, unknown) == AnswerReceived(unknown)


@req("http-60")
def test_a_server_may_refuse_get_and_delete() -> None:
    assert reply(get(), 405) == NoStream()
    assert reply(get(), 404) == NoStream()
    assert reply(get(), 200, **STREAM) == Streaming()
    assert isinstance(reply(get(), 200, **JSON), ReplyLost)
    assert reply(get(), 500) == ReplyLost("GET failed: HTTP 500, without a JSON-RPC error", 500)
    ending = exchange(None, method="DELETE", session=SESSION)
    for status in (200, 202, 204, 404, 405):
        assert reply(ending, status) == ReplyAccepted()
    assert isinstance(reply(ending, 500), ReplyLost)


@req("ver-02", "ver-14")
@pytest.mark.parametrize(
    "supported",
    [None, "2026-07-28", ["2099-01-01"], [[]], [E.name], [B.name, D.name, "2099-01-01", 7], [D.name, E.name]],
)
def test_an_unsupported_version_error_is_passed_to_the_opening(supported: Any) -> None:
    for data in (None, [], {"supported": supported, "requested": E.name}):
        error = fault(errors.UNSUPPORTED_VERSION, data=data)
        for probing in (True, False):
            assert reply(exchange(DISCOVER, E, probing=probing), 400, error) == AnswerReceived(error)
        assert reply(exchange(INITIALIZE, probing=True), 400, error) == AnswerReceived(error)


@req("http-93", "draft-01")
def test_a_header_mismatch_of_a_call_refreshes_the_tools() -> None:
    for code, status in [(errors.HEADER_MISMATCH, 400), (errors.HEADER_MISMATCH, 200), (-32001, 400)]:
        error = fault(code)
        assert reply(exchange(CALL, E), status, error) == RefreshTools(error)
        assert reply(exchange(DISCOVER, E), status, error) == AnswerReceived(error)
        assert reply(exchange(CALL, D), status, error) == AnswerReceived(error)
    assert reply(exchange(CALL, E), 200, fault(-32001)) == AnswerReceived(fault(-32001))


@req("http-109", "ver-14")
@pytest.mark.parametrize("code", [errors.HEADER_MISMATCH, errors.MISSING_CLIENT_CAPABILITY, errors.UNSUPPORTED_VERSION])
@pytest.mark.parametrize("message", [DISCOVER, CALL, INITIALIZE], ids=lambda each: each.method)
def test_a_modern_error_never_leads_to_an_older_protocol(code: int, message: Request) -> None:
    revision = D if message is INITIALIZE else E
    for status in (400, 404, 405, 200):
        verdict = reply(exchange(message, revision, probing=True), status, fault(code))
        assert verdict == AnswerReceived(fault(code))


@req("http-108", "http-109")
@pytest.mark.parametrize("message", [DISCOVER, CALL], ids=lambda each: each.method)
@pytest.mark.parametrize("status", [400, 404, 405, 406, 415, 422])
@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"jsonrpc":"2.0","id":1,"result":{}}'])
def test_a_probe_refused_without_a_modern_error_leads_to_initialize(message: Request, status: int, body: bytes) -> None:
    assert reply(exchange(message, E, probing=True), status, body) == TryInitialize(f"HTTP {status}")
    assert isinstance(reply(exchange(message, E), status, body), ReplyLost)


@req("http-109")
@pytest.mark.parametrize("code", [-32600, -32601, -32602, -32603, -32000, -32001, -32700, 0])
def test_any_other_error_code_leads_a_probe_to_initialize(code: int) -> None:
    error = fault(code)
    for status in (200, 400, 404):
        why = f"HTTP {status}: 'no' ({code})"
        assert reply(exchange(DISCOVER, E, probing=True), status, error) == TryInitialize(why)
    assert reply(exchange(CALL, E, probing=True), 200, error) == AnswerReceived(error)
    assert reply(exchange(CALL, E, probing=True), 400, error) == TryInitialize(f"HTTP 400: 'no' ({code})")


def test_a_404_with_method_not_found_comes_from_a_modern_server() -> None:
    unknown = fault(errors.METHOD_NOT_FOUND)
    assert reply(exchange(CALL, E, probing=True), 404, unknown) == AnswerReceived(unknown)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_a_temporary_failure_causes_no_fallback(status: int) -> None:
    for message, revision in [(DISCOVER, E), (INITIALIZE, D)]:
        asked = exchange(message, revision, probing=True)
        assert isinstance(reply(asked, status), ReplyLost)
        assert reply(asked, status, fault(-32603)) == AnswerReceived(fault(-32603))


@req("sse-10", "sse-11", "sse-12")
@pytest.mark.parametrize("revision", [B, C, D], ids=str)
@pytest.mark.parametrize("status", [400, 402, 404, 405, 406, 415, 500])
def test_a_refused_handshake_leads_to_http_sse_as_its_revision_says(revision: Revision, status: int) -> None:
    falls = status in (400, 404, 405) or (revision is not D and status < 500)
    error = fault(-32600)
    asked = exchange(INITIALIZE, revision, probing=True)
    assert reply(asked, status) == (
        TrySse(f"HTTP {status}") if falls else ReplyLost(f"HTTP {status}, without a JSON-RPC error", status)
    )
    text = f"HTTP {status}: {error.message!r} (-32600)"
    assert reply(asked, status, error) == (TrySse(text) if falls else AnswerReceived(error))
    assert isinstance(reply(attrs.evolve(asked, probing=False), status), ReplyLost)


def test_the_oldest_handshake_falls_back_on_any_refusal() -> None:
    assert reply(exchange(INITIALIZE, A, probing=True), 418) == TrySse("HTTP 418")
    assert isinstance(reply(exchange(INITIALIZE, A, probing=True), 500), ReplyLost)
    assert isinstance(reply(exchange(LIST, D, probing=True), 404), ReplyLost)


def test_each_verdict_on_a_get_without_a_stream_has_a_reason() -> None:
    reasons = [
        reason(each) for each in (ReplyLost("x"), Challenged(401, "", "y"), RetryAfter(7), SessionGone(), NoStream())
    ]
    busy, ended = "the server is busy for 7 seconds", "the session has ended"
    assert reasons == ["x", "y", busy, ended, "the server does not serve GET"]


def test_a_busy_server_is_retried_once_after_retry_after() -> None:
    for status in (429, 503):
        assert reply(exchange(), status, Retry_After="7") == RetryAfter(7)
        assert isinstance(reply(exchange(waited=True), status, Retry_After="7"), ReplyLost)
    assert isinstance(reply(exchange(), 500, Retry_After="7"), ReplyLost)


@pytest.mark.parametrize("after", ["", "-1", "soon", "9" * 10, "1.5", "\u0661", "Fri, 31 Dec 1999 23:59:59 GMT"])
def test_an_invalid_retry_after_is_ignored(after: str) -> None:
    assert isinstance(reply(exchange(), 503, Retry_After=after), ReplyLost)


def test_a_plain_text_of_the_server_is_quoted_and_cut() -> None:
    text = b"Internal Server Error:\n database is down " + b"x" * 10_000
    verdict = reply(exchange(), 500, text)
    assert isinstance(verdict, ReplyLost)
    assert verdict.why.startswith("HTTP 500, with the text 'Internal Server Error:\\n database is down xx")
    assert len(verdict.why) < 250


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (
            "<!DOCTYPE HTML>\n<html><head><title>Error</title></head><style>p {}</style>\n"
            "<body><h1>Error</h1>\n<p>Message: Unsupported method ('POST').</p></body></html>",
            "\"Error Message: Unsupported method ('POST').\"",
        ),
        ("<HTML><HEAD><title>Bad gateway</title><p", "'Bad gateway'"),
        ("<3 and < 5", "'<3 and < 5'"),
    ],
)
def test_the_text_of_an_html_page_is_quoted(page: str, words: str) -> None:
    assert reply(exchange(), 501, page.encode()) == ReplyLost(f"HTTP 501, with the text {words}", 501)
    assert reply(exchange(), 501, b"<html></html>") == ReplyLost("HTTP 501, without a JSON-RPC error", 501)


def test_a_sentence_of_an_error_is_quoted_whole() -> None:
    sentence = "these credentials are not accepted; the Authorization header has to have others, of the same user"
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": sentence}}).encode()
    verdict = reply(exchange(), 401, body)
    assert isinstance(verdict, Challenged)
    assert verdict.why == f"HTTP 401: '{sentence}' (-32600)"


def test_a_url_is_shown_without_user_and_query() -> None:
    assert url_without_secrets("https://me:secret@a.example:8/mcp?token=secret#x") == "https://a.example:8/mcp"


def test_a_400_that_names_the_session_means_that_it_has_ended() -> None:
    text = b"Bad Request: No valid session ID provided"
    assert reply(exchange(session="s"), 400, text) == SessionGone()
    assert isinstance(reply(exchange(), 400, text), ReplyLost)
    assert isinstance(reply(exchange(session="s"), 400, b"Bad Request"), ReplyLost)
    assert reply(exchange(session="s"), 400, fault(-32602, "no such session")) == AnswerReceived(
        fault(-32602, "no such session")
    )


def test_a_challenge_is_passed_on_unchanged() -> None:
    for status in (401, 403):
        for asked in (exchange(), get(), exchange(DISCOVER, E, probing=True)):
            verdict = reply(asked, status, fault(-32600, "no token"), WWW_Authenticate='Bearer scope="a", DPoP')
            assert verdict == Challenged(status, 'Bearer scope="a", DPoP', f"HTTP {status}: 'no token' (-32600)")
    assert reply(exchange(), 401) == Challenged(401, "", "HTTP 401, without a JSON-RPC error")


@req("http-61")
@pytest.mark.parametrize(
    ("status", "method", "location", "url"),
    [
        (307, "POST", "/mcp/", "https://example.com/mcp/"),
        (308, "POST", "https://EXAMPLE.com:443/x", "https://EXAMPLE.com:443/x"),
        (308, "GET", "other", "https://example.com/other"),
        (302, "GET", "/x", "https://example.com/x"),
        (301, "POST", "/x", None),
        (302, "POST", "/x", None),
        (303, "DELETE", "/x", None),
        (300, "GET", "/x", None),
        (304, "GET", "/x", None),
        (307, "POST", "http://example.com/mcp", None),
        (307, "POST", "https://example.com:8443/mcp", None),
        (307, "POST", "https://evil.example/mcp", None),
        (307, "POST", "//evil.example/mcp", None),
        (307, "POST", "https://example.com@evil.example/", None),
        (307, "POST", "https://[evil/", None),
        (307, "POST", "https://example.com:port/", None),
        (307, "POST", "https://user:password@example.com/", None),
        (307, "POST", "/\u00e4", None),
        (307, "POST", "/a\x01b", None),
        (307, "POST", "/a\tb", None),
        (307, "POST", None, None),
    ],
)
def test_only_redirects_to_the_same_origin_are_followed(
    status: int, method: str, location: str | None, url: str | None
) -> None:
    asked = exchange(LIST if method == "POST" else None, method=method, session=SESSION)
    verdict = reply(asked, status, **({} if location is None else {"Location": location}))
    if url is None:
        assert isinstance(verdict, ReplyLost)
        assert SESSION not in repr(verdict)
    else:
        assert verdict == Redirected(url)


@req("http-61")
def test_the_session_id_is_not_shown() -> None:
    headers = {"Mcp-Session-Id": SESSION}
    values = [
        exchange(session=SESSION),
        reply(exchange(INITIALIZE), 200, Response(1, {}), **headers),
        reply(exchange(INITIALIZE), 200, **STREAM, **headers),
        reply(exchange(session=SESSION), 404),
        reply(exchange(session=SESSION), 500),
    ]
    assert SESSION not in repr(values)


def test_an_answer_on_a_stream_is_judged_like_one_in_a_body() -> None:
    error = fault(errors.METHOD_NOT_FOUND)
    assert read_answer(exchange(DISCOVER, E, probing=True), error) == TryInitialize(
        f"HTTP 200: {error.message!r} (-32601)"
    )
    assert read_answer(exchange(CALL, E), fault(errors.HEADER_MISMATCH)) == RefreshTools(fault(errors.HEADER_MISMATCH))
    assert read_answer(exchange(), Response(1, {})) == AnswerReceived(Response(1, {}))
    assert isinstance(read_answer(exchange(), InvalidMessage("why not")), ReplyLost)


@given(
    st.sampled_from([LIST, CALL, DISCOVER, INITIALIZE, NOTE, None]),
    st.sampled_from(list(REVISIONS.values())),
    st.sampled_from(["GET", "POST", "DELETE"]),
    st.integers(200, 599),
    st.dictionaries(
        st.sampled_from(["Content-Type", "Location", "Retry-After", "Mcp-Session-Id", "WWW-Authenticate", "Date"]),
        st.text(max_size=12) | st.sampled_from([*JSON.values(), *STREAM.values(), "//["]),
    ),
    st.binary(max_size=20) | st.sampled_from([encode(fault(code, data=[])) for code in (-32022, -32020, 1)]),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_no_reply_causes_an_exception(
    message: Message | None,
    revision: Revision,
    method: str,
    status: int,
    headers: dict[str, str],
    body: bytes,
    flag: bool,
) -> None:
    asked = Exchange(URL, revision, message, method, session=SESSION if flag else None, probing=flag)
    assert SESSION not in repr(read_reply(asked, status, Headers(headers.items()), body, Limits()))


# HTTP+SSE.


@req("sse-06", "sse-08", "sse-14")
@pytest.mark.parametrize(
    ("event", "url"),
    [
        (SseEvent(b"/messages?session=x", "endpoint"), "https://example.com/messages?session=x"),
        (SseEvent(b"messages?session=x", "endpoint"), "https://example.com/messages?session=x"),
        (SseEvent(b"?session=x", "endpoint"), "https://example.com/sse?session=x"),
        (SseEvent(b"https://example.com/m", "endpoint"), "https://example.com/m"),
        (SseEvent(b"https://evil.example/m", "endpoint"), None),
        (SseEvent(b"http://example.com/m", "endpoint"), None),
        (SseEvent(b"//evil.example/m", "endpoint"), None),
        (SseEvent(b"https://[", "endpoint"), None),
        (SseEvent(b"javascript:1", "endpoint"), None),
        (SseEvent(b"\xff\xfe", "endpoint"), None),
        (SseEvent("/ä".encode(), "endpoint"), None),
        (SseEvent(b"/a b", "endpoint"), None),
        (SseEvent(b"/a\tb", "endpoint"), None),
        (SseEvent(b"/a\x7fb", "endpoint"), None),
        (SseEvent(b"/a\nb", "endpoint"), None),
        (SseEvent(b"https://user:password@example.com/m", "endpoint"), None),
        (SseEvent(b"//user@example.com/m", "endpoint"), None),
        (SseEvent(b"/m?mail=a@b", "endpoint"), "https://example.com/m?mail=a@b"),
        (SseEvent(b"/messages", "message"), None),
        (Oversized(1), None),
    ],
)
def test_the_endpoint_event_has_the_url_for_posts(event: SseEvent | Oversized, url: str | None) -> None:
    found = read_endpoint("https://example.com/sse", event)
    assert found == url or (url is None and isinstance(found, ReplyLost))


# Streams that break.


def feed(resumption: StreamResumption, data: bytes) -> list[SseEvent | Oversized]:
    """Feed the bytes of one connection, from the first to the last."""
    reader = EventReader(1000)
    events = reader.feed(data)
    resumption.received(reader, events)
    return events


@req("http-44", "http-48")
@pytest.mark.parametrize("revision", LEGACY, ids=str)
def test_a_stream_with_an_id_is_resumed_after_it(revision: Revision) -> None:
    resumption = StreamResumption(revision)
    feed(resumption, encode_message(b"1", "7-1") + encode_message(b"2", "7-2"))
    assert resumption.ended() == Reconnect(1.0, "7-2")
    feed(resumption, b"")
    assert resumption.last_event_id == "7-2"
    feed(resumption, b": nothing yet\n\n")
    assert resumption.ended() == Reconnect(2.0, "7-2")


@req("http-114")
def test_a_modern_stream_is_lost_with_its_connection() -> None:
    resumption = StreamResumption(E, standalone=True)
    feed(resumption, encode_message(b"1", "7-1"))
    assert isinstance(resumption.ended(), ReplyLost)


def test_a_stream_without_ids_is_lost_unless_it_is_standalone() -> None:
    assert isinstance(StreamResumption(D).ended(), ReplyLost)
    assert StreamResumption(D, standalone=True).ended() == Reconnect(1.0, "")


@req("http-48", "http-50")
def test_the_pause_is_the_last_retry_value_of_the_server() -> None:
    resumption = StreamResumption(D)
    feed(resumption, priming_event("7-0", 500))
    assert resumption.ended() == Reconnect(0.5, "7-0")
    assert resumption.ended() == Reconnect(0.5, "7-0")
    feed(resumption, priming_event("7-1"))
    assert resumption.ended() == Reconnect(0.5, "7-1")
    feed(resumption, b"retry: 90000\n\n")
    assert resumption.ended() == Reconnect(90, "7-1")


def test_a_stream_without_messages_is_reopened_after_a_pause() -> None:
    resumption = StreamResumption(D)
    for _ in range(20):
        feed(resumption, priming_event("7-0", 0))
        assert resumption.ended() == Reconnect(0.1, "7-0")
    feed(resumption, encode_message(b"1", "7-1"))
    assert resumption.ended() == Reconnect(0, "7-1")
    assert resumption.ended() == Reconnect(0.1, "7-1")
    reader = EventReader(3)
    resumption.received(reader, reader.feed(b"data: 12345\n\n"))
    assert resumption.ended() == Reconnect(0, "7-1")


def test_a_pause_is_at_most_an_hour() -> None:
    resumption = StreamResumption(D)
    feed(resumption, priming_event("7-0", 10**15 - 1))
    assert resumption.ended() == Reconnect(3600, "7-0")
    assert resumption.refused(RetryAfter(999_999_999)) == Reconnect(3600, "7-0")


def test_pauses_grow_and_attempts_count_from_the_last_event() -> None:
    resumption = StreamResumption(D, attempts=6)
    feed(resumption, priming_event("7-0"))
    for _ in range(2):
        waits = [resumption.ended() for _ in range(7)]
        assert waits[:6] == [Reconnect(wait, "7-0") for wait in (1, 2, 4, 8, 16, 30)]
        assert isinstance(waits[6], ReplyLost)
        feed(resumption, encode_message(b"1"))


@pytest.mark.parametrize("sign", [priming_event("7-0"), b"id: 7-1\n\n", b"retry: 1000\n\n", encode_message(b"1")])
def test_each_event_or_field_resets_the_number_of_attempts(sign: bytes) -> None:
    resumption = StreamResumption(D, attempts=1)
    feed(resumption, priming_event("7-0"))
    for _ in range(20):
        assert isinstance(resumption.ended(), Reconnect)
        feed(resumption, sign)


def test_comments_do_not_reset_the_number_of_attempts() -> None:
    resumption = StreamResumption(D, attempts=2)
    feed(resumption, priming_event("7-0"))
    outcomes = []
    for _ in range(3):
        outcomes.append(resumption.ended())
        feed(resumption, b": ping\n\n")
    assert [type(each) for each in outcomes] == [Reconnect, Reconnect, ReplyLost]


@pytest.mark.parametrize("standalone", [False, True])
def test_a_long_connection_resets_the_number_of_attempts(standalone: bool) -> None:
    """A proxy may cut a stream that carries only comments, again and again."""
    resumption = StreamResumption(D, standalone=standalone, attempts=2)
    if not standalone:
        feed(resumption, priming_event("7-0"))
    for _ in range(20):
        feed(resumption, b": ping\n\n")
        assert isinstance(again := resumption.ended(60), Reconnect)
        assert again.seconds == 1


@pytest.mark.parametrize(("sign", "held"), [(encode_message(b"1"), 0), (b"", 60), (b"retry: 0\n\n", 0)])
def test_a_standalone_stream_that_was_of_use_is_never_given_up(sign: bytes, held: float) -> None:
    resumption = StreamResumption(D, standalone=True, attempts=3)
    feed(resumption, sign)
    waits = [
        step.seconds
        for step in [resumption.ended(held), *(resumption.ended() for _ in range(2000))]
        if isinstance(step, Reconnect)
    ]
    assert len(waits) == 2001
    assert set(waits[3:]) == {30}
    unproven = StreamResumption(D, standalone=True, attempts=3)
    feed(unproven, b": ping\n\n")
    assert [type(unproven.ended(1)) for _ in range(4)] == [Reconnect] * 3 + [ReplyLost]


@pytest.mark.parametrize(
    ("arrivals", "patience"),
    [
        # (time in seconds, whether only a keep-alive arrived)
        ([], math.inf),
        ([(15, True)], math.inf),
        ([(15, True), (30, True)], 45),
        ([(15, True), (30, True), (50, True), (66, True), (81, True)], 60),
        (
            [(15, True), (30, True), (50, True), (66, True), (81, True), (96, True)],
            48,
        ),  # the interval of 20 seconds has left the window
        ([(15, True), (15.5, True)], math.inf),  # one keep-alive, in pieces or delayed
        ([(15, True), (15.5, True), (30, True)], 45),
        ([(15, False), (30, False)], math.inf),
        ([(15, True), (20, False), (30, True)], 45),  # a timer that does not depend on messages
        ([(15, True), (3600, False), (3615, True)], 10_800),  # after silence the interval may be an hour
        ([(15, True), (3600, False), (3615, True), (3630, True)], 45),
        ([(15, True), (30, True), (40, False), (55, True)], 45),
    ],
)
def test_a_stream_may_be_silent_for_three_intervals_of_its_keep_alives(
    arrivals: list[tuple[float, bool]], patience: float
) -> None:
    keep_alives = KeepAlives()
    for now, keep_alive in arrivals:
        keep_alives.received(now, keep_alive=keep_alive)
    assert keep_alives.timeout == patience


def test_a_server_that_is_always_busy_is_given_up_after_five_attempts() -> None:
    resumption = StreamResumption(D)
    feed(resumption, priming_event("7-0", 500))
    plans = [resumption.refused(RetryAfter(1)) for _ in range(6)]
    assert plans[:5] == [Reconnect(seconds, "7-0") for seconds in (1, 2, 4, 8, 16)]
    assert isinstance(plans[5], ReplyLost)


def test_a_refused_reconnection_is_final_unless_it_is_temporary() -> None:
    resumption = StreamResumption(D, attempts=3)
    feed(resumption, priming_event("7-0"))
    assert resumption.refused(RetryAfter(9)) == Reconnect(9, "7-0")
    assert resumption.refused(reply(get(), 502)) == Reconnect(2.0, "7-0")
    assert StreamResumption(D, standalone=True).refused(reply(get(), 409)) == Reconnect(1.0, "")
    for status in (400, 404, 405, 401):
        assert isinstance(resumption.refused(reply(get(), status)), ReplyLost)
    resumption.ended()
    assert isinstance(resumption.refused(RetryAfter(9)), ReplyLost)
    assert isinstance(resumption.refused(reply(get(), 502)), ReplyLost)


@req("http-41", "http-42", "http-43", "http-44")
@given(st.integers(1, 8), st.lists(st.integers(0, 120), max_size=12), st.integers(0, 3))
@settings(max_examples=150)
def test_each_message_arrives_once_or_is_reported_lost_after_any_break(count: int, cuts: list[int], room: int) -> None:
    """A server with an event log, a client that resumes, and connections that break after so many bytes."""
    log = MemoryEventLog(Limits(replay_events=count + 1 if room else 2))
    stream, other = log.open(), log.open()
    (primed,) = log.append(stream, [b""])
    wire = priming_event(primed)
    messages = [Notification("n", {"n": n}) for n in range(count)]
    for message in messages:
        data = encode(message)
        wire += encode_messages([data], log.append(stream, [data]))
        if not room:
            log.append(other, [b"not for this stream"])
    log.finish(stream)
    resumption, got, lost = StreamResumption(D, attempts=99), [], False
    for cut in [*cuts, 10_000]:
        got += [
            decode(each.data, Limits())
            for each in feed(resumption, wire[:cut])
            if isinstance(each, SseEvent) and each.data
        ]
        if len(got) == count:
            break
        step = resumption.ended()
        replayed = log.replay(step.last_event_id) if isinstance(step, Reconnect) else step
        if not isinstance(replayed, Replay):
            lost = True
            break
        wire = b"".join(encode_message(each.data, each.id) for each in replayed.events)
    assert got == messages if not lost else got == messages[: len(got)]
    assert lost or len(got) == count


def test_a_body_over_the_limit_is_not_read() -> None:
    body = encode(Response(1, {"a": "x" * 100}))
    verdict = read_reply(exchange(), 200, Headers(JSON.items()), body, Limits(message_bytes=50))
    assert isinstance(verdict, ReplyLost)
    assert json.loads(body)["id"] == 1
