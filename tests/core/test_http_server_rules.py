"""The decisions of the HTTP server: the table of `http_rules`, and the cases that do not fit into a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.http_rules import (
    BASE,
    EVIL,
    RULES,
    SCHEMA,
    SSE,
    TOOL,
    WEBSOCKETS,
    Rule,
    in_session,
    meta,
    modern,
    notification,
    request,
)
from tests.requirements import req
from trio_mcp.core import (
    LATEST,
    LEGACY,
    REVISIONS,
    Batch,
    Error,
    InvalidMessage,
    LinkKind,
    Notification,
    Offer,
    Request,
    Response,
    ServerProtocol,
    Terms,
    UsageError,
    encode,
    errors,
)
from trio_mcp.core.http import (
    LOOPBACK_HOSTS,
    LOOPBACK_ORIGINS,
    Answer,
    Deliver,
    EndSession,
    Headers,
    HttpPolicy,
    HttpRequest,
    OpenLegacyStream,
    OpenStream,
    Reply,
    Screened,
    Serve,
    SessionFacts,
    Verdict,
    check_session,
    endpoint_uri,
    find_mirrors,
    judge,
    refusal,
    reply_headers,
    screen,
    session_id,
    status_for,
)

A, B, C, D, E = REVISIONS.values()
SESSION = "fIVvX1WMvj8nT7Wc"
MIRRORS = {TOOL: find_mirrors(SCHEMA).rules}


def http_request(rule: Rule) -> HttpRequest:
    path = rule.path.replace("{session}", SESSION)
    return HttpRequest(rule.method, path, Headers(rule.fields(SESSION)), rule.content)


def sessions_of(rule: Rule) -> Mapping[str, SessionFacts]:
    if rule.session is None:
        return {}
    legacy_stream = rule.path.startswith(SSE["message_path"])
    return {SESSION: SessionFacts(REVISIONS[rule.session], legacy_stream=legacy_stream)}


def verdict_on(rule: Rule) -> Verdict:
    return judge(
        HttpPolicy(**rule.policy),
        http_request(rule),
        find_session=sessions_of(rule).get,
        find_mirrors=MIRRORS.get,
        principal=rule.principal,
    )


def as_reply(verdict: Verdict) -> tuple[Reply, str]:
    """The reply that a driver sends, and the kind of response that it may choose."""
    match verdict:
        case Reply():
            return verdict, ""
        case Deliver() | EndSession():
            return verdict.reply, ""
        case Serve():
            return Reply(200, reply_headers(verdict.cors, stream=verdict.answer is Answer.STREAM)), verdict.answer.name
        case OpenStream() | OpenLegacyStream():
            return Reply(200, reply_headers(verdict.cors, stream=True)), Answer.STREAM.name


def all_rules() -> Iterator[object]:
    for table, rules in RULES.items():
        for rule in rules:
            yield pytest.param(rule, id=f"{table}: {rule.about}", marks=rule.proves)


@pytest.mark.parametrize("rule", list(all_rules()))
def test_each_request_gets_the_reply_of_the_table(rule: Rule) -> None:
    reply, answer = as_reply(verdict_on(rule))
    assert reply.status == rule.status
    headers = Headers(reply.headers)
    for name, value in rule.reply.items():
        assert headers.get(name) == value, name
    if reply.status == 200:
        assert answer == rule.answer
    assert (reply.error and reply.error.code) == (rule.code if rule.method != "HEAD" else errors.INVALID_REQUEST)
    if rule.code is not None:
        body = json.loads(reply.body)
        assert body["error"]["code"] == rule.code
        assert body.get("id") == rule.id
        assert all(part in body["error"]["message"] for part in rule.says), body
        assert headers["Content-Type"] == "application/json"
        assert headers["Content-Length"] == str(len(reply.body))
        assert SESSION not in reply.body.decode()
    else:
        assert reply.body == b""


@pytest.mark.parametrize("rule", list(all_rules()))
def test_a_session_that_is_refused_is_refused_before_the_body(rule: Rule) -> None:
    policy, bodiless = HttpPolicy(**rule.policy), attrs.evolve(http_request(rule), body=b"")
    head = screen(policy, bodiless)
    if isinstance(head, Reply):
        return
    reply = check_session(policy, bodiless, head, find_session=sessions_of(rule).get, principal=rule.principal)
    if reply is None:
        assert rule.status not in (403, 404)
    else:
        assert reply == verdict_on(rule)


@pytest.mark.parametrize(
    "place", [{}, {"session": A.name, "path": "/messages?session={session}", "policy": SSE}], ids=["endpoint", "sse"]
)
def test_a_malformed_response_is_refused_but_ends_its_request(place: dict[str, Any]) -> None:
    verdict = verdict_on(in_session("malformed", 400, body={"jsonrpc": "2.0", "id": 7, "result": 1}, **place))
    assert isinstance(verdict, Deliver)
    assert isinstance(verdict.message, InvalidMessage)
    assert verdict.message.answers == 7
    assert verdict.session == SESSION
    assert verdict.reply.status == 400


@req("http-126")
def test_a_batch_is_answered_by_all_its_responses_in_one_array() -> None:
    verdict = verdict_on(in_session("batch", 200, session=B.name, body=[request("ping", id=n) for n in (1, 2)] + [1]))
    assert isinstance(verdict, Serve)
    assert verdict.answer is Answer.EITHER
    session = ServerProtocol(
        Offer({"name": "s", "version": "1"}), link=LinkKind.SESSION, terms=Terms(verdict.revision or LATEST)
    )
    session.receive(verdict.message, 0.0)
    ((answers, _),) = session.outgoing()
    body = json.loads(encode(answers))
    assert {each["id"]: "result" in each for each in body} == {1: True, 2: True, None: False}


def test_headers_may_come_as_pairs_or_as_a_mapping() -> None:
    fields = {"Host": "localhost", "ORIGIN": EVIL}
    for headers in (
        fields,
        list(fields.items()),
        Headers(fields),
        [(b"host", b"localhost"), (b"origin", EVIL.encode())],
    ):
        verdict = judge(HttpPolicy(), HttpRequest("POST", "/mcp", headers))
        assert isinstance(verdict, Reply)
        assert verdict.status == 403


def test_without_a_lookup_no_session_is_known() -> None:
    verdict = judge(HttpPolicy(), HttpRequest("DELETE", "/mcp", {"Host": "localhost", "Mcp-Session-Id": "s"}))
    assert isinstance(verdict, Reply)
    assert verdict.status == 404


def test_the_table_has_no_row_twice() -> None:
    names = [(table, rule.about, rule.session, rule.policy) for table, rules in RULES.items() for rule in rules]
    assert len(names) == len({repr(each) for each in names})


def test_screening_first_gives_the_same_verdict() -> None:
    for rule in (rule for rules in RULES.values() for rule in rules):
        policy, asked = HttpPolicy(**rule.policy), http_request(rule)
        head = screen(policy, attrs.evolve(asked, body=b""))
        if isinstance(head, Reply):
            assert head == verdict_on(rule)
        elif rule.session is None:
            again = judge(
                policy, asked, find_session={}.get, find_mirrors=MIRRORS.get, principal=rule.principal, screened=head
            )
            assert again == verdict_on(rule)


def test_a_verdict_to_serve_has_the_terms_of_the_request() -> None:
    message = request("tools/list", {"_meta": meta()})
    served = verdict_on(modern("modern", 200, body=message))
    assert served == Serve(Request(1, "tools/list", message["params"]), E, None, False, Answer.EITHER, ())
    opening = verdict_on(Rule("handshake", 200, body=request("initialize", {})))
    assert opening == Serve(Request(1, "initialize", {}), None, None, True, Answer.EITHER, ())
    alone = verdict_on(Rule("handshake", 200, body=request("initialize", {}), policy={"sessions": False}))
    assert alone == Serve(Request(1, "initialize", {}), None, None, False, Answer.EITHER, ())
    legacy = verdict_on(in_session("legacy", 200, session=C.name))
    assert legacy == Serve(Request(1, "tools/list", {}), C, SESSION, False, Answer.EITHER, ())
    batch = verdict_on(in_session("batch", 200, session=B.name, body=[request("ping"), notification("x")]))
    assert batch == Serve(Batch((Request(1, "ping"), Notification("x"))), B, SESSION, False, Answer.EITHER, ())


def test_a_verdict_to_deliver_has_the_terms_of_the_message() -> None:
    note = notification("notifications/cancelled", {"requestId": 1})
    assert verdict_on(modern("modern", 202, body=note)) == Deliver(
        Notification("notifications/cancelled", {"requestId": 1}), E, None, ()
    )
    result = {"jsonrpc": "2.0", "id": "a", "result": {}}
    assert verdict_on(in_session("legacy", 202, body=result)) == Deliver(Response("a", {}), D, SESSION, ())
    mixed = in_session("mixed", 400, session=B.name, body=[1, result])
    assert verdict_on(mixed) == Deliver(
        Batch((Response("a", {}),)), B, SESSION, (), Error(None, -32600, "a message must be an object, not an integer")
    )
    streamed = Rule("old", 202, path="/messages?session={session}", session=A.name, body=result, policy=SSE)
    assert verdict_on(streamed) == Deliver(Response("a", {}), A, SESSION, ())


@req("http-64")
@pytest.mark.parametrize(("header", "revision"), [(None, B), *((each.name, each) for each in LEGACY)])
def test_without_sessions_the_header_names_the_revision(header: str | None, revision: object) -> None:
    headers = {} if header is None else {"MCP-Protocol-Version": header}
    verdict = verdict_on(Rule("alone", 200, headers=headers, body=request("tools/list"), policy={"sessions": False}))
    assert isinstance(verdict, Serve)
    assert verdict.revision is revision
    assert verdict.session is None


def test_the_revision_of_the_session_overrides_the_header() -> None:
    verdict = verdict_on(in_session("confused", 200, headers={"MCP-Protocol-Version": B.name}))
    assert isinstance(verdict, Serve)
    assert verdict.revision is D


def test_a_get_names_the_stream_it_resumes() -> None:
    headers = {"Last-Event-ID": "7-3"}
    assert verdict_on(in_session("resume", 200, method="GET", headers=headers)) == OpenStream(SESSION, D, "7-3", ())
    assert verdict_on(in_session("fresh", 200, method="GET")) == OpenStream(SESSION, D, None, ())
    assert verdict_on(in_session("empty", 200, method="GET", headers={"Last-Event-ID": ""})) == OpenStream(
        SESSION, D, None, ()
    )
    assert verdict_on(in_session("end", 204, method="DELETE")) == EndSession(SESSION, ())


def test_a_server_without_an_event_log_refuses_to_resume_a_stream() -> None:
    resume = in_session("resume", 200, method="GET", headers={"Last-Event-ID": "7-3"})
    refused = verdict_on(attrs.evolve(resume, policy={"resumable": False}))
    assert isinstance(refused, Reply)
    assert (refused.status, refused.error and refused.error.code) == (400, -32600)
    fresh = attrs.evolve(in_session("fresh", 200, method="GET"), policy={"resumable": False})
    assert verdict_on(fresh) == OpenStream(SESSION, D, None, ())


@req("http-117", "sse-04")
def test_the_sessions_of_the_two_legacy_transports_do_not_mix() -> None:
    facts = {"old": SessionFacts(A, legacy_stream=True), "new": SessionFacts(D)}
    policy = HttpPolicy(**SSE)
    body = json.dumps(request("ping")).encode()
    for path, session in [("/mcp", "old"), ("/messages?session=new", "new")]:
        asked = HttpRequest("POST", path, Headers([*BASE.items(), ("Mcp-Session-Id", session)]), body)
        verdict = judge(policy, asked, find_session=facts.get)
        assert isinstance(verdict, Reply)
        assert verdict.status == 404


def test_a_session_is_for_its_own_principal() -> None:
    facts = {SESSION: SessionFacts(D, principal="alice")}
    asked = HttpRequest(
        "POST", "/mcp", Headers([*BASE.items(), ("Mcp-Session-Id", SESSION)]), json.dumps(request("ping")).encode()
    )
    assert isinstance(judge(HttpPolicy(), asked, find_session=facts.get, principal="alice"), Serve)
    for other in ("bob", None):
        verdict = judge(HttpPolicy(), asked, find_session=facts.get, principal=other)
        assert isinstance(verdict, Reply)
        assert verdict.status == 403
        assert "alice" not in verdict.body.decode()


@req("http-70", "http-65", "ver-01", "ver-12")
@pytest.mark.parametrize(
    ("rule", "requested"),
    [
        (
            modern(
                "unknown",
                400,
                headers={"MCP-Protocol-Version": "2099-01-01"},
                params={"_meta": meta("2099-01-01")},
            ),
            "2099-01-01",
        ),
        (in_session("legacy", 400, headers={"MCP-Protocol-Version": "2099-01-01"}), "2099-01-01"),
        (
            Rule("handshake", 400, body=request("initialize", {"protocolVersion": D.name}), policy={"revisions": [E]}),
            D.name,
        ),
    ],
    ids=lambda each: getattr(each, "about", ""),
)
def test_the_error_of_an_unserved_version_lists_the_served_ones(rule: Rule, requested: str) -> None:
    reply, _ = as_reply(verdict_on(rule))
    assert reply.error is not None
    served = HttpPolicy(**rule.policy).revisions
    assert reply.error.data == {"supported": [each.name for each in reversed(served)], "requested": requested}


@pytest.mark.parametrize("name", ["Mcp-Session-Id", "MCP-Protocol-Version", "Mcp-Method", "Mcp-Name", "Last-Event-ID"])
def test_an_allowed_page_may_send_and_read_the_headers_of_mcp(name: str) -> None:
    headers = Headers([("Host", "localhost"), ("Origin", "http://localhost:5173")])
    preflight = screen(HttpPolicy(), HttpRequest("OPTIONS", "/mcp", headers))
    assert isinstance(preflight, Reply)
    sent = Headers(preflight.headers)
    assert name in sent["Access-Control-Allow-Headers"].split(", ")
    assert name in sent["Access-Control-Expose-Headers"].split(", ")
    assert "WWW-Authenticate" in sent["Access-Control-Expose-Headers"].split(", ")


def test_options_without_an_origin_is_no_preflight() -> None:
    reply = screen(HttpPolicy(), HttpRequest("OPTIONS", "/mcp", Headers([("Host", "localhost")])))
    assert reply == Reply(204, (("Allow", "GET, POST, DELETE, OPTIONS"),))


def test_each_reply_to_an_allowed_page_has_cors_headers() -> None:
    origin = {"Origin": "http://localhost:5173"}
    for rule in [
        modern("served", 200, headers=origin),
        modern("accepted", 202, headers=origin, body=notification("notifications/cancelled")),
        modern("refused", 400, headers={**origin, "Mcp-Method": None}),
        in_session("stream", 200, method="GET", headers=origin),
        in_session("end", 204, method="DELETE", headers=origin),
        Rule("old stream", 200, method="GET", path="/sse", headers=origin, policy=SSE),
    ]:
        reply, _ = as_reply(verdict_on(rule))
        assert Headers(reply.headers)["Access-Control-Allow-Origin"] == origin["Origin"], rule.about


@req("http-107")
def test_the_headers_of_a_reply() -> None:
    stream = Headers(reply_headers((), stream=True))
    assert stream["Content-Type"] == "text/event-stream"
    assert stream["X-Accel-Buffering"] == "no"
    assert "no-transform" in stream["Cache-Control"]
    plain = Headers(reply_headers((), stream=False))
    assert plain["Content-Type"] == "application/json"
    assert "Mcp-Session-Id" not in plain
    opened = Headers(reply_headers((("Vary", "Origin"),), stream=False, session=SESSION))
    assert opened["Mcp-Session-Id"] == SESSION
    assert opened["Vary"] == "Origin"


@req("http-71", "http-106", "http-102", "http-70")
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (errors.METHOD_NOT_FOUND, 404),
        (errors.MISSING_CLIENT_CAPABILITY, 400),
        (errors.HEADER_MISMATCH, 400),
        (errors.UNSUPPORTED_VERSION, 400),
        (errors.INVALID_PARAMS, 200),
        (errors.INTERNAL_ERROR, 200),
    ],
)
def test_the_status_of_an_error_depends_on_the_revision(code: int, status: int) -> None:
    assert status_for(LATEST, code) == status
    assert {status_for(each, code) for each in LEGACY} == {200}


def test_a_driver_can_build_its_own_refusal() -> None:
    reply = refusal(429, Error(None, -32600, "too many sessions"), (("Vary", "Origin"),), (("Retry-After", "5"),))
    assert reply.status == 429
    assert Headers(reply.headers)["Retry-After"] == "5"
    assert json.loads(reply.body) == {"jsonrpc": "2.0", "error": {"code": -32600, "message": "too many sessions"}}


@req("http-53", "http-54")
@given(st.binary(min_size=16, max_size=64))
@settings(max_examples=30)
def test_a_session_id_is_visible_ascii_and_keeps_all_randomness(random: bytes) -> None:
    made = session_id(random)
    assert all(0x21 <= ord(each) <= 0x7E for each in made)
    assert len(made) * 6 >= len(random) * 8
    assert made != session_id(bytes(each ^ 1 for each in random))


def test_too_little_randomness_is_refused() -> None:
    with pytest.raises(UsageError, match="16"):
        session_id(b"x" * 15)


@req("sse-05")
def test_the_endpoint_event_leads_to_the_message_path() -> None:
    policy = HttpPolicy(sse_path="/sse/", message_path="/messages/")
    made = session_id(bytes(range(16)))
    assert endpoint_uri(policy, made) == f"/messages?session={made}"
    target = endpoint_uri(policy, made, "/prefix").removeprefix("/prefix")
    asked = HttpRequest("POST", target, Headers(BASE.items()), json.dumps(request("ping")).encode())
    verdict = judge(policy, asked, find_session={made: SessionFacts(A, legacy_stream=True)}.get)
    assert isinstance(verdict, Deliver)
    assert verdict.session == made


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"path": "mcp"}, "slash"),
        ({"path": "/mcp?x=1"}, "query"),
        ({"sse_path": "/sse"}, "together"),
        ({"message_path": "/messages"}, "together"),
        ({"sse_path": "/mcp/", "message_path": "/messages"}, "path, sse_path, message_path must all be different"),
        ({"sse_path": "/sse", "message_path": "/sse"}, "different"),
        ({"websocket_path": "/mcp"}, "path, websocket_path must all be different"),
        ({"websocket_path": "ws"}, "slash"),
        ({"allowed_origins": ["example.com"]}, "allowed_origins"),
        ({"allowed_origins": ["http://example.com/"]}, "allowed_origins"),
        ({"allowed_hosts": ["http://example.com"]}, "allowed_hosts"),
        ({"allowed_hosts": ["null"]}, None),
        ({"allowed_hosts": [""]}, "allowed_hosts"),
        ({"allowed_hosts": "example.com"}, "list"),
    ],
)
def test_the_error_of_an_invalid_setting_names_it(settings: dict[str, object], word: str | None) -> None:
    if word is None:
        HttpPolicy(**settings)  # type: ignore[arg-type]
    else:
        with pytest.raises(UsageError, match=word):
            HttpPolicy(**settings)  # type: ignore[arg-type]


def test_by_default_only_loopback_is_served() -> None:
    policy = HttpPolicy()
    assert (policy.allowed_hosts, policy.allowed_origins) == (LOOPBACK_HOSTS, LOOPBACK_ORIGINS)
    assert attrs.evolve(policy, json_only=True).allowed_hosts == LOOPBACK_HOSTS


def test_secrets_are_not_shown() -> None:
    rule = in_session("secret", 200, headers={"Authorization": "Bearer hunter2"})
    asked = http_request(rule)
    shown = repr((asked, verdict_on(rule), verdict_on(in_session("s", 200, method="GET"))))
    shown += repr(verdict_on(in_session("end", 204, method="DELETE")))
    shown += repr(http_request(Rule("old", 202, path="/messages?session={session}")))
    assert SESSION not in shown
    assert "hunter2" not in shown


LONG = "x" * 5000


@pytest.mark.parametrize(
    "rule",
    [
        Rule("path", 404, path=f"/{LONG}"),
        Rule("origin", 403, headers={"Origin": f"http://{LONG}"}),
        Rule("host", 421, headers={"Host": LONG}),
        modern("method", 400, LONG, headers={"Mcp-Method": None}),
        modern("version", 400, headers={"MCP-Protocol-Version": LONG}),
        Rule("initialize", 400, body=request("initialize", {"protocolVersion": LONG}), policy={"revisions": [E]}),
        Rule("initialize", 400, body=request("initialize", {"protocolVersion": [LONG]}), policy={"revisions": [E]}),
    ],
    ids=lambda each: each.about,
)
def test_long_values_are_cut_in_messages(rule: Rule) -> None:
    verdict = verdict_on(rule)
    assert isinstance(verdict, Reply)
    assert verdict.status == rule.status
    assert len(verdict.body) < 600


@given(
    st.sampled_from(["GET", "POST", "DELETE", "OPTIONS", "HEAD", "PATCH"]),
    st.text(max_size=20) | st.sampled_from(["/mcp", "/sse", "/messages", "/messages?session=s", "/mcp/"]),
    st.dictionaries(
        st.sampled_from(
            [*BASE, "Origin", "Mcp-Session-Id", "MCP-Protocol-Version", "Mcp-Method", "Mcp-Name", "Mcp-Param-Region"]
        ),
        st.sampled_from(["", "s", E.name, D.name, "tools/call", TOOL, "=?base64?x?="]) | st.text(max_size=9),
    ),
    st.binary(max_size=30)
    | st.sampled_from([[], [1], {}, request("tools/call", {"name": TOOL, "arguments": {"region": "x"}})]).map(
        lambda value: json.dumps(value).encode()
    ),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_request_causes_an_exception(
    method: str, target: str, headers: dict[str, str], body: bytes, right: bool
) -> None:
    fields = {**(BASE if right else {}), **headers}
    asked = HttpRequest(method, target, Headers(fields.items()), body)
    policy = HttpPolicy(**SSE)
    verdict = judge(policy, asked, find_session={"s": SessionFacts(D)}.get, find_mirrors=MIRRORS.get)
    reply, _ = as_reply(verdict)
    assert 200 <= reply.status < 500


def test_screening_needs_only_the_head() -> None:
    head = screen(HttpPolicy(), HttpRequest("POST", "/mcp", Headers(BASE.items())))
    assert isinstance(head, Screened)
    assert head.answer is Answer.EITHER
    assert not head.websocket


def test_screening_marks_a_request_at_the_websocket_path() -> None:
    for path in ("/ws", "/ws/", "/ws?token=x"):
        asked = HttpRequest("GET", path, {"Host": "localhost", "Origin": "http://localhost:5173"})
        head = screen(HttpPolicy(**WEBSOCKETS), asked)
        assert isinstance(head, Screened)
        assert head.websocket
        assert Headers(head.cors)["Access-Control-Allow-Origin"] == "http://localhost:5173"
    assert isinstance(screen(HttpPolicy(), HttpRequest("GET", "/ws", {"Host": "localhost"})), Reply)


def test_a_plain_get_at_the_websocket_path_is_told_the_endpoint() -> None:
    asked = HttpRequest("GET", "/ws", {"Host": "localhost"})
    verdict = judge(HttpPolicy(path="/tools", **WEBSOCKETS), asked)
    assert isinstance(verdict, Reply)
    assert Headers(verdict.headers)["Connection"] == "Upgrade"
    assert b"/ws accepts WebSockets only; the MCP endpoint is /tools" in verdict.body


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (HttpPolicy(**WEBSOCKETS), b"WebSockets are at /ws (websocket_path)"),
        (HttpPolicy(websocket_path="/"), b"WebSockets are at / (websocket_path)"),
        (HttpPolicy(json_only=True), b"this server offers no WebSockets (websocket_path)"),
    ],
)
@pytest.mark.parametrize("path", ["/mcp", "/socket"])
def test_an_upgrade_at_another_path_is_told_the_websocket_path(policy: HttpPolicy, text: bytes, path: str) -> None:
    asked = HttpRequest("GET", path, {"Host": "localhost", "Upgrade": "WebSocket", "Connection": "Upgrade"})
    verdict = judge(policy, asked)
    assert isinstance(verdict, Reply)
    assert verdict.status in (400, 404, 405)
    assert text in verdict.body
    for other in (attrs.evolve(asked, headers={"Host": "localhost"}), attrs.evolve(asked, method="PUT")):
        verdict = judge(policy, other)
        assert isinstance(verdict, Reply)
        assert b"WebSockets" not in verdict.body


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/elsewhere"), ("POST", "/ws"), ("GET", "/ws"), ("POST", "/sse"), ("GET", "/messages")]
)
def test_a_request_at_another_path_is_told_the_mounted_endpoint(method: str, path: str) -> None:
    asked = HttpRequest(method, path, {**BASE, "Accept": "*/*"})
    verdict = judge(HttpPolicy(**SSE, **WEBSOCKETS), attrs.evolve(asked, prefix="/tools"))
    assert isinstance(verdict, Reply)
    assert b"the MCP endpoint is /tools/mcp" in verdict.body


@pytest.mark.parametrize("policy", [HttpPolicy(), HttpPolicy(json_only=True), HttpPolicy(sessions=False)])
def test_a_browser_is_told_that_this_is_an_mcp_endpoint(policy: HttpPolicy) -> None:
    accept = "text/html,application/xhtml+xml,*/*;q=0.8"
    verdict = judge(policy, HttpRequest("GET", "/mcp", {"Host": "localhost", "Accept": accept}))
    assert isinstance(verdict, Reply)
    assert b"this is an MCP endpoint, not a web page: give its URL to an MCP client" in verdict.body
    for more in ({"Accept": "text/event-stream"}, {"Accept": accept, "Mcp-Session-Id": "unknown"}):
        verdict = judge(policy, HttpRequest("GET", "/mcp", {"Host": "localhost", **more}))
        assert isinstance(verdict, Reply)
        assert b"page" not in verdict.body


def test_the_error_names_the_version_that_is_not_served() -> None:
    rule = modern("unknown", 400, headers={"MCP-Protocol-Version": "2099"}, params={"_meta": meta("2099")})
    reply, _ = as_reply(verdict_on(rule))
    assert reply.error is not None
    assert "'2099'" in reply.error.message


def test_headers_seen_before_are_screened_with_the_new_request() -> None:
    headers, policy = Headers(BASE.items()), HttpPolicy()
    good = screen(policy, HttpRequest("POST", "/mcp", headers))
    assert screen(policy, HttpRequest("POST", "/mcp", headers)) == good
    for asked, method, path, status in (
        (policy, "PUT", "/mcp", 405),
        (policy, "POST", "/other", 404),
        (HttpPolicy(allowed_hosts=["example.com"]), "POST", "/mcp", 421),
    ):
        refused = screen(asked, HttpRequest(method, path, headers))
        assert isinstance(refused, Reply)
        assert refused.status == status
