"""Sessions of servers, and the parts that both sides share: handshake, terms of each request, allowed messages."""

from __future__ import annotations

import json
from itertools import chain, combinations
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.pairs import (
    CLIENT_INFO,
    EVERYTHING_OF_A_CLIENT,
    EVERYTHING_OF_A_SERVER,
    LIMITS,
    SERVER_INFO,
    Pair,
    drain,
    initialize,
    modern,
    opened,
    pair,
)
from tests.requirements import req
from trio_mcp.core import (
    LATEST,
    LATEST_LEGACY,
    LEGACY,
    LOG_LEVELS,
    META_SERVER_INFO,
    META_SUBSCRIPTION_ID,
    MODERN,
    REVISIONS,
    Answered,
    Batch,
    ByteBudget,
    CachedResult,
    Call,
    CapabilityRule,
    ClientProtocol,
    Error,
    Limits,
    LinkKind,
    NotDeclared,
    Notice,
    Notification,
    NotInThisRevision,
    Offer,
    Opened,
    OpeningFailed,
    PeerMistake,
    ProgressReported,
    Refused,
    Request,
    RequestCancelled,
    RequestError,
    Response,
    Revision,
    Role,
    ServerProtocol,
    SessionAgreed,
    SessionClosed,
    Terms,
    UsageError,
    decode,
    encode,
    errors,
    prepare,
)

A, B, C, D, E = REVISIONS.values()
ALL = tuple(REVISIONS.values())
each_legacy = pytest.mark.parametrize("revision", LEGACY, ids=str)
each_revision = pytest.mark.parametrize("revision", ALL, ids=str)
INFO = {"name": "s", "version": "1"}
LOG = {"level": "info", "data": "hello"}
INITIALIZED = Notification("notifications/initialized")


def server(*revisions: Revision, capabilities: Any = EVERYTHING_OF_A_SERVER, **more: Any) -> ServerProtocol:
    return ServerProtocol(Offer(SERVER_INFO, capabilities, revisions or ALL), **more)


def ask(session: ServerProtocol, request: Request) -> Response | Error:
    """The answer to a request that the session answers by itself."""
    events = session.receive(request, 0.0)
    assert not any(isinstance(event, Call) for event in events)
    (answer,) = drain(session)
    assert isinstance(answer, Response | Error)
    assert answer.id == request.id
    return answer


def call(session: ServerProtocol, request: Request, **more: Any) -> Terms:
    """The terms under which a request is handed out."""
    (event,) = session.receive(request, 0.0, **more)
    assert isinstance(event, Call)
    assert event.request == request
    assert not session.outgoing()
    return event.terms


# The handshake.


@req("life-01", "life-02", "life-03", "life-04", "life-07", "life-19", "life-23", "ver-08")
@each_legacy
def test_a_handshake_agrees_on_a_revision_and_exchanges_the_offers(revision: Revision) -> None:
    made = pair(client_speaks=(revision,), server_speaks=ALL, instructions="Be brief.")
    made.client.open()
    made.pump()
    first, second, third = made.sent
    assert isinstance(first, Request)
    assert first.method == "initialize"
    assert first.params == {
        "protocolVersion": revision.name,
        "capabilities": revision.declarable(Role.CLIENT, EVERYTHING_OF_A_CLIENT),
        "clientInfo": made.client.offer.infos[revision],
    }
    assert isinstance(second, Response)
    assert second.result["protocolVersion"] == revision.name
    assert second.result["capabilities"] == revision.declarable(Role.SERVER, EVERYTHING_OF_A_SERVER)
    assert second.result["instructions"] == made.client.instructions == "Be brief."
    assert third == INITIALIZED
    assert made.client.terms is not None
    assert made.server.terms is not None
    assert made.client_saw == [Opened(made.client.terms)]
    assert made.server_saw == [SessionAgreed(made.server.terms), Opened(made.server.terms)]
    assert made.client.terms.revision is made.server.terms.revision is revision
    assert made.client.opened
    assert made.server.opened


UNKNOWN: dict[str, Any] = {"telepathy": {"range": 5}, "tools": {"flavour": "x"}, "sampling": {"flavour": "x"}}


@req("life-21")
@each_revision
def test_an_unknown_capability_has_no_effect(revision: Revision) -> None:
    receiver = server()
    if revision.handshake:
        receiver.receive(initialize(0, revision.name, UNKNOWN), 0.0)
        receiver.receive(INITIALIZED, 0.0)
        drain(receiver)
        assert call(receiver, Request(1, "tools/list")).capabilities == UNKNOWN
    else:
        assert call(receiver, modern(1, "tools/list", clientCapabilities=UNKNOWN)).capabilities == UNKNOWN

    client = ClientProtocol(Offer(CLIENT_INFO, {}, (revision,)))
    client.open()
    (asked,) = drain(client)
    assert isinstance(asked, Request)
    meta = {"_meta": {META_SERVER_INFO: SERVER_INFO}}
    said = {"protocolVersion": revision.name, "serverInfo": SERVER_INFO, "supportedVersions": [revision.name], **meta}
    client.receive(Response(asked.id, {**said, "capabilities": dict(UNKNOWN)}), 0.0)
    assert client.opened
    assert client.terms is not None
    assert client.terms.capabilities == UNKNOWN
    assert client.request("tools/list")


@req("type-02", "life-21", "life-22")
@each_legacy
def test_each_side_declares_only_what_the_revision_defines(revision: Revision) -> None:
    made = opened(revision)
    assert made.client.terms is not None
    assert made.server.terms is not None
    of_client, of_server = made.server.terms.capabilities, made.client.terms.capabilities
    assert of_client == {
        "experimental": {"x": {}},
        "roots": {"listChanged": True},
        "sampling": {} if revision is not D else {"context": {}, "tools": {}},
        **({"elicitation": {}} if revision is C else {"elicitation": {"form": {}, "url": {}}} if revision is D else {}),
    }
    assert of_server == {
        name: value
        for name, value in EVERYTHING_OF_A_SERVER.items()
        if name != "extensions" and (name != "completions" or revision is not A)
    }
    known = {
        A: {"name", "version"},
        B: {"name", "version"},
        C: {"name", "version", "title"},
        D: {*CLIENT_INFO, *SERVER_INFO},
    }[revision]
    assert made.server.terms.identity == {name: value for name, value in CLIENT_INFO.items() if name in known}
    assert made.client.terms.identity == {name: value for name, value in SERVER_INFO.items() if name in known}


@pytest.mark.parametrize(
    ("revision", "offered", "declared"),
    [
        (B, {"form": {}}, None),
        (C, {"url": {}}, None),  # in this revision an elicitation without modes means forms
        (C, {"form": {}, "url": {}}, {}),
        (C, {}, {}),
        (D, {"url": {}}, {"url": {}}),
        (D, {}, {}),
        (E, {"url": {}}, {"url": {}}),
    ],
    ids=str,
)
def test_only_the_modes_of_elicitation_that_a_revision_has_are_declared(
    revision: Revision, offered: Any, declared: Any
) -> None:
    offer = Offer(INFO, {"elicitation": offered})
    assert offer.declared(Role.CLIENT, revision).get("elicitation") == declared


def test_an_offer_needs_an_identity_and_a_revision() -> None:
    for info in ({}, {"name": "s"}, {"name": "s", "version": 1}):
        with pytest.raises(UsageError, match="name and a version"):
            Offer(info)
    with pytest.raises(UsageError, match="at least one revision"):
        Offer(INFO, revisions=())


@pytest.mark.parametrize(
    ("given", "use"),
    [
        (["2025-06-18"], "2025-06-18"),
        ("2025-06-18", "2025-06-18"),
        ((D, "2026-07-28"), "2026-07-28"),
        (["draft"], "2026-07-28"),
        ([{}], "2026-07-28"),
        ([None], "2026-07-28"),
    ],
    ids=str,
)
def test_the_error_about_names_of_revisions_tells_where_the_objects_are(given: Any, use: str) -> None:
    with pytest.raises(UsageError, match=f'must be Revision objects, got .*; use REVISIONS."{use}".'):
        Offer(INFO, revisions=given)


def test_revisions_may_be_any_iterable() -> None:
    for each in ([D, E], {D: 1, E: 2}, iter([D, E]), (D, E)):
        assert Offer(INFO, revisions=each).revisions == (D, E)


def test_an_unknown_capability_is_refused_in_an_offer() -> None:
    with pytest.raises(UsageError, match=r"no capability 'tool'; the capabilities are .*roots.*tools"):
        Offer(INFO, {"tool": {}})
    both = {**EVERYTHING_OF_A_CLIENT, **EVERYTHING_OF_A_SERVER}
    for revision in ALL:  # an old revision leaves out the capabilities of newer ones
        assert Offer(INFO, both, [revision]).revisions == (revision,)
    newer = attrs.evolve(
        E, name="2027-01-01", capabilities={**E.capabilities, Role.SERVER: {"video": CapabilityRule()}}
    )
    assert Offer(INFO, {"video": {}}, [newer]).declared(Role.SERVER, newer) == {"video": {}}


@pytest.mark.parametrize(
    "said",
    [
        {"info": {**INFO, "title": "\ud800"}},
        {"capabilities": {"experimental": {"x": {"y": float("nan")}}}},
        {"capabilities": {"experimental": {"x": {"y": b""}}}},
        {"instructions": "\udfff"},
    ],
    ids=repr,
)
def test_an_offer_that_cannot_be_written_as_json_is_refused(said: Any) -> None:
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        Offer(**{"info": INFO, **said})


def test_an_experimental_capability_is_an_object() -> None:
    with pytest.raises(UsageError, match="the experimental capability 'x' must be an object"):
        Offer(INFO, {"experimental": {"x": True}})


def test_a_handshake_is_refused_if_its_answer_exceeds_the_byte_limit() -> None:
    session = ServerProtocol(Offer(INFO, {}, ALL, instructions="x" * 10_000))
    limits = Limits(bytes_each=20_000, bytes_in_all=20_000)
    session.account = ByteBudget(limits).account("ann")
    assert session.account.take(15_000) is None
    params = {"protocolVersion": D.name, "capabilities": {}, "clientInfo": INFO}
    refusal = ask(session, Request(1, "initialize", params))
    assert isinstance(refusal, Error)
    assert "Limits.bytes_each" in refusal.message


def test_an_offer_finds_its_newest_revisions_in_any_order() -> None:
    offer = Offer(INFO, revisions=(B, E, D, A))
    assert (offer.legacy, offer.modern, offer.versions) == (D, E, [E.name, D.name, B.name, A.name])
    assert (Offer(INFO, revisions=(E,)).legacy, Offer(INFO, revisions=(A,)).modern) == (None, None)
    assert offer.find(D.name, handshake=True) is D
    assert (
        offer.find(D.name, handshake=False)
        is offer.find(C.name, handshake=True)
        is offer.find(7, handshake=True)
        is None
    )


OFFERS = [frozenset(each) for size in (1, 2, 3) for each in combinations((A, C, D, E), size)]


def expected(client: frozenset[Revision], server: frozenset[Revision]) -> Revision | None:
    """The newest modern revision that both speak, or the result of a handshake."""
    if client & server & {E}:
        return E
    ours, theirs = (max((each for each in side if each is not E), key=str, default=None) for side in (client, server))
    if ours is None or theirs is None:
        return None
    if (E in client and E in server) or ours in server:
        return ours
    return theirs if theirs in client else None


@req(
    "life-08",
    "life-09",
    "life-10",
    "life-11",
    "life-12",
    "life-13",
    "life-14",
    "life-17",
    "core-02",
    "core-03",
    "ver-17",
)
@pytest.mark.parametrize("client", OFFERS, ids=lambda each: "+".join(sorted(map(str, each))))
@pytest.mark.parametrize("server", OFFERS, ids=lambda each: "+".join(sorted(map(str, each))))
def test_any_two_offers_agree_on_the_expected_revision_or_fail(
    client: frozenset[Revision], server: frozenset[Revision]
) -> None:
    made = pair({}, {}, client_speaks=tuple(client), server_speaks=tuple(server))
    made.client.open()
    made.pump()
    chosen = expected(client, server)
    if chosen is None:
        assert isinstance(made.client_saw[-1], OpeningFailed)
        assert made.client.closed
    else:
        assert made.client.terms is not None
        assert made.client.terms.revision is chosen
        assert made.client_saw == [Opened(made.client.terms)]
    negotiation = made.client.negotiation
    assert negotiation is not None
    assert negotiation.chosen is chosen
    assert made.client.waiting == made.server.serving == 0


@req("life-09", "life-10", "life-11")
@pytest.mark.parametrize(
    ("serves", "asked", "answered"),
    [
        *[(ALL, each.name, each.name) for each in LEGACY],
        *[(ALL, version, D.name) for version in (E.name, "2024-10-07", "1.0.0", "", "9999-12-31")],
        ((A, B), D.name, B.name),
        ((B, A), D.name, B.name),
        ((A, B), A.name, A.name),
        ((D, E), A.name, D.name),
    ],
)
def test_the_server_agrees_or_offers_its_latest(serves: tuple[Revision, ...], asked: str, answered: str) -> None:
    answer = ask(server(*serves), initialize(version=asked))
    assert isinstance(answer, Response)
    assert answer.result["protocolVersion"] == answered


WRONG = [
    *[("protocolVersion", wrong) for wrong in (None, 7, [], {})],
    *[("capabilities", wrong) for wrong in (None, 7, "", [])],
    *[("clientInfo", wrong) for wrong in (None, 7, "", [], {}, {"name": "c"}, {"name": "c", "version": 1})],
]


@pytest.mark.parametrize(("member", "wrong"), WRONG, ids=repr)
def test_a_malformed_initialize_is_refused_and_may_be_sent_again(member: str, wrong: Any) -> None:
    session = server()
    request = initialize()
    del request.params[member]
    for params in (request.params, {**request.params, member: wrong}):
        answer = ask(session, Request(1, "initialize", params))
        assert isinstance(answer, Error)
        assert (answer.code, session.terms) == (errors.INVALID_PARAMS, None)
    assert isinstance(ask(session, initialize(2)), Response)


def test_a_second_initialize_is_refused_and_changes_nothing() -> None:
    session = server()
    ask(session, initialize(version=A.name))
    before = session.terms
    for id in (1, 2):
        answer = ask(session, initialize(id, version=D.name))
        assert isinstance(answer, Error)
        assert (answer.code, session.terms) == (errors.INVALID_REQUEST, before)
        assert isinstance(session.receive(INITIALIZED, 0.0)[0], Opened if id == 1 else PeerMistake)


@each_legacy
def test_a_session_begins_with_the_answer_to_initialize(revision: Revision) -> None:
    session = server()
    assert not any(isinstance(event, SessionAgreed) for event in session.receive(Request(0, "initialize"), 0.0))
    session.outgoing()
    (agreed,) = session.receive(initialize(version=revision.name), 0.0, principal="ann")
    assert agreed == SessionAgreed(Terms(revision, {}, CLIENT_INFO))
    assert [type(message) for message in drain(session)] == [Response]
    assert not session.opened
    assert not any(isinstance(event, SessionAgreed) for event in session.receive(initialize(2), 0.0))
    assert session.receive(INITIALIZED, 0.0) == [Opened(agreed.terms)]


@req("life-18")
@pytest.mark.parametrize("revision", [None, B], ids=str)
def test_initialize_in_a_batch_is_refused(revision: Revision | None) -> None:
    session = server() if revision is None else opened(revision).server
    (event,) = session.receive(Batch((initialize(9),)), 0.0)
    assert isinstance(event, PeerMistake)
    (answer,) = drain(session)
    assert isinstance(answer, Error)
    assert answer.code == errors.INVALID_REQUEST


def test_an_unexpected_initialized_is_a_mistake_without_effect() -> None:
    session = server()
    assert isinstance(session.receive(INITIALIZED, 0.0)[0], PeerMistake)
    assert not session.opened
    for era in (D, E):
        session = server(terms=Terms(era))
        assert isinstance(session.receive(INITIALIZED, 0.0)[0], PeerMistake)
        assert session.opened


# Before the end of the handshake.


@req("life-05", "ping-01")
@each_legacy
def test_before_the_answer_to_initialize_the_client_sends_only_pings(revision: Revision) -> None:
    client = ClientProtocol(Offer(CLIENT_INFO, EVERYTHING_OF_A_CLIENT, (revision,)))
    with pytest.raises(UsageError, match="no revision has been agreed"):
        client.request("ping")
    client.open()
    for method in ("tools/list", "logging/setLevel"):
        with pytest.raises(UsageError, match="handshake has not ended"):
            client.request(method)
    assert not client.notify("notifications/roots/list_changed")
    with pytest.raises(NotInThisRevision):
        client.notify("notifications/roots/listchanged")
    id = client.request("ping")
    session = server(revision)
    for message in drain(client):
        assert not any(isinstance(event, Call | PeerMistake) for event in session.receive(message, 0.0))
    pinged = [event for message in drain(session) for event in client.receive(message, 0.0)]
    assert Answered(id, "ping", {}) in pinged
    assert client.opened


@req("life-05")
def test_while_it_probes_the_client_sends_no_other_messages() -> None:
    client = ClientProtocol(Offer(CLIENT_INFO, EVERYTHING_OF_A_CLIENT))
    client.open()
    client.outgoing()
    assert not client.notify("notifications/roots/list_changed")
    with pytest.raises(UsageError, match=r"must be sent with ClientProtocol\.open"):
        client.notify("notifications/initialized")
    with pytest.raises(UsageError, match="no revision has been agreed"):
        client.request("ping")
    assert not client.outgoing()


@req("life-06", "ping-01")
@each_legacy
def test_before_initialized_the_server_sends_only_pings_and_logs(revision: Revision) -> None:
    session = server(revision)
    for forbidden in (lambda: session.request("ping"), lambda: session.notify("notifications/message", LOG)):
        with pytest.raises(UsageError, match="no revision has been agreed"):
            forbidden()
    ask(session, initialize(version=revision.name, capabilities={"roots": {}, "sampling": {}}))
    for method in ("roots/list", "sampling/createMessage"):
        with pytest.raises(UsageError, match="handshake has not ended"):
            session.request(method)
    assert not session.notify("notifications/tools/list_changed")
    with pytest.raises(NotInThisRevision):
        session.notify("notifications/tools/listchanged")
    assert not session.outgoing()
    session.request("ping")
    assert session.notify("notifications/message", LOG)
    session.receive(INITIALIZED, 0.0)
    session.request("roots/list")
    assert session.notify("notifications/tools/list_changed")
    assert len(session.outgoing()) == 4


@req("ping-01", "life-06")
@pytest.mark.parametrize("speaks", [(D,), ALL], ids=["initializing", "probing"])
def test_during_the_opening_the_client_accepts_only_pings_and_logs(speaks: Any) -> None:
    client = ClientProtocol(Offer(CLIENT_INFO, EVERYTHING_OF_A_CLIENT, speaks))
    client.open()
    client.outgoing()
    assert not client.receive(Request("p", "ping"), 0.0)
    (notice,) = client.receive(Notification("notifications/message", LOG), 0.0)
    assert isinstance(notice, Notice)
    for note in ("notifications/tools/list_changed", "notifications/unheard-of"):
        assert isinstance(client.receive(Notification(note), 0.0)[0], PeerMistake)
    client.receive(Request("r", "roots/list"), 0.0)
    client.receive(Request("x", "no/such"), 0.0)
    pong, early, unknown = drain(client)
    assert pong == Response("p", {})
    assert isinstance(early, Error)
    assert isinstance(unknown, Error)
    assert (early.code, unknown.code) == (errors.INVALID_REQUEST, errors.METHOD_NOT_FOUND)


@req("life-01", "ping-01")
def test_before_initialize_the_server_serves_only_pings() -> None:
    session = server(*LEGACY)
    assert ask(session, Request(1, "ping")) == Response(1, {})
    for id, (method, code) in enumerate(
        {
            "tools/list": errors.INVALID_REQUEST,
            "logging/setLevel": errors.INVALID_REQUEST,
            "no/such": errors.METHOD_NOT_FOUND,
            "server/discover": errors.METHOD_NOT_FOUND,
        }.items()
    ):
        answer = ask(session, Request(id, method))
        assert isinstance(answer, Error)
        assert answer.code == code
    assert session.serving == 0


@each_legacy
def test_the_server_serves_calls_after_its_answer_to_initialize(revision: Revision) -> None:
    session = server()
    ask(session, initialize(version=revision.name))
    assert not session.opened
    assert call(session, Request(1, "tools/list")).revision is revision


# Modern requests.


@req("meta-15", "state-01", "state-02", "state-06", "ver-04")
def test_each_of_the_interleaved_requests_has_its_own_terms() -> None:
    session = server()
    one = call(
        session,
        modern(1, "tools/call", clientCapabilities={"sampling": {}}, logLevel="debug", clientInfo=CLIENT_INFO),
        principal="ann",
        headers={"x": "1"},
    )
    two = call(session, modern(2, "tools/call", logLevel="error"), principal="ben")
    three = call(session, modern(3, "tools/call"))
    assert one == Terms(E, {"sampling": {}}, CLIENT_INFO, "debug", "ann", {"x": "1"})
    assert two == Terms(E, {}, None, "error", "ben", {})
    assert three == Terms(E, {}, None, None, None, {})
    for id, terms in ((1, one), (2, two), (3, three)):
        assert session.terms_of(id) == terms
    assert session.notify("notifications/message", LOG, about=1)
    assert not session.notify("notifications/message", LOG, about=2)
    assert not session.notify("notifications/message", LOG, about=3)
    assert session.terms is None


def test_each_request_of_a_legacy_session_has_its_own_principal_and_headers() -> None:
    session = server()
    session.receive(initialize(), 0.0, principal="ann", headers={"authorization": "secret"})
    session.outgoing()
    (opened_event,) = session.receive(INITIALIZED, 0.0, principal="ann")
    assert isinstance(opened_event, Opened)
    assert (opened_event.terms.principal, opened_event.terms.headers) == (None, {})
    session.receive(Request(1, "logging/setLevel", {"level": "info"}), 0.0, principal="ben")
    session.outgoing()
    terms = call(session, Request(2, "tools/list"))
    assert (terms.principal, terms.headers, terms.log_level) == (None, {}, "info")
    assert call(session, Request(3, "tools/list"), principal="cy", headers={"h": "1"}).principal == "cy"
    (notice,) = session.receive(Notification("notifications/roots/list_changed"), 0.0, principal="di")
    assert isinstance(notice, Notice)
    assert notice.terms.principal == "di"
    assert session.terms is not None
    assert session.terms.principal is None


@req("meta-11")
@pytest.mark.parametrize(
    "meta",
    [
        {"protocolVersion": None},
        {"protocolVersion": 7},
        {"protocolVersion": ["2026-07-28"]},
        {"clientCapabilities": None},
        {"clientCapabilities": []},
        {"clientCapabilities": "{}"},
        {"logLevel": "loud"},
        {"logLevel": 3},
        {"logLevel": []},
    ],
    ids=str,
)
def test_malformed_metadata_is_refused(meta: Any) -> None:
    session = server()
    request = modern(1, "tools/list")
    request.params["_meta"].update({f"io.modelcontextprotocol/{name}": value for name, value in meta.items()})
    answer = ask(session, request)
    assert isinstance(answer, Error)
    assert answer.code == errors.INVALID_PARAMS


@req("meta-11")
@pytest.mark.parametrize("missing", LATEST.required_meta)
@pytest.mark.parametrize("serves", [ALL, (E,)], ids=["both eras", "modern only"])
def test_required_metadata_that_is_missing_is_named(missing: str, serves: tuple[Revision, ...]) -> None:
    session = server(*serves)
    request = modern(1, "tools/list")
    del request.params["_meta"][missing]
    answer = ask(session, request)
    assert isinstance(answer, Error)
    assert answer.code == errors.INVALID_PARAMS
    assert missing in answer.message
    assert ("initialize" in answer.message) is (serves == ALL and "Version" in missing)


@req("meta-14")
@pytest.mark.parametrize("info", [7, "me", {}, {"name": "c"}, {"name": 1, "version": "1"}], ids=repr)
def test_a_malformed_identity_of_the_client_is_ignored(info: Any) -> None:
    assert call(server(), modern(1, "tools/list", clientInfo=info)).identity is None


@req("ver-01")
@pytest.mark.parametrize("version", ["2025-11-25", "1900-01-01", "", "2027-01-01", "x" * 1000, "2026\n07"])
def test_a_version_that_is_not_served_is_answered_with_those_that_are(version: str) -> None:
    for serves in (ALL, (E,), (E, A)):
        session = server(*serves)
        answer = ask(session, modern("q", "tools/list", version=version))
        assert isinstance(answer, Error)
        assert answer.code == errors.UNSUPPORTED_VERSION
        assert answer.data == {"supported": sorted(map(str, serves), reverse=True), "requested": version[:80]}
        assert len(answer.message) < 200
        assert answer.message.isprintable()


def test_a_legacy_server_has_no_discover_method() -> None:
    answer = ask(server(D), modern(1, "server/discover"))
    assert isinstance(answer, Error)
    assert answer.code == errors.METHOD_NOT_FOUND


@req("core-29", "ping-07", "type-15", "type-02")
@pytest.mark.parametrize(
    "method",
    [
        "ping",
        "initialize",
        "logging/setLevel",
        "resources/subscribe",
        "resources/unsubscribe",
        "roots/list",
        "sampling/createMessage",
        "no/such",
        "",
    ],
)
def test_a_method_that_the_modern_era_lacks_is_not_found(method: str) -> None:
    answer = ask(server(), modern(1, method))
    assert isinstance(answer, Error)
    assert answer.code == errors.METHOD_NOT_FOUND


@req("core-29", "ping-07")
@pytest.mark.parametrize("method", ["ping", "no/such", "logging/setLevel"])
def test_a_missing_method_without_metadata_is_not_found_at_a_modern_server(method: str) -> None:
    answer = ask(server(E), Request(1, method))
    assert isinstance(answer, Error)
    assert answer.code == errors.METHOD_NOT_FOUND


@req("core-29")
@each_legacy
def test_a_method_that_a_legacy_revision_lacks_is_not_found_on_either_side(revision: Revision) -> None:
    made = opened(revision)
    for session, method in ((made.server, "server/discover"), (made.server, "roots/list"), (made.client, "tools/list")):
        (event,) = session.receive(Request("x", method), 0.0)
        assert isinstance(event, PeerMistake)
        (answer,) = drain(session)
        assert isinstance(answer, Error)
        assert answer.code == errors.METHOD_NOT_FOUND


def test_an_error_about_a_long_name_is_short() -> None:
    name = "x" * 1_000_000
    for session in (server(), opened(D).server, opened(D).client):
        for message in (Request("q", name), modern("m", name), Notification(name)):
            for event in session.receive(message, 0.0):
                assert isinstance(event, PeerMistake)
                assert len(event.why) < 300
        assert all(isinstance(answer, Error) and len(answer.message) < 300 for answer in drain(session))


@req("core-32", "arch-02", "core-04")
@each_revision
def test_a_method_of_a_feature_that_the_server_does_not_declare_is_not_found(revision: Revision) -> None:
    for method, row in revision.requests[Role.CLIENT].items():
        if not row.needs:
            continue
        session = server(revision, capabilities={"experimental": {}}, terms=Terms(revision))
        answer = ask(session, Request(1, method) if revision.handshake else modern(1, method))
        assert isinstance(answer, Error)
        assert answer.code == errors.METHOD_NOT_FOUND
        assert ".".join(row.needs) in answer.message


@req("ver-03", "ver-16", "meta-13")
@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_discover_returns_the_whole_offer_of_the_server(instructions: str | None) -> None:
    session = ServerProtocol(Offer(SERVER_INFO, EVERYTHING_OF_A_SERVER, ALL, instructions))
    answer = ask(session, modern(1, "server/discover"))
    assert isinstance(answer, Response)
    assert answer.result == {
        "resultType": "complete",
        "ttlMs": 0,
        "cacheScope": "private",
        "supportedVersions": [each.name for each in reversed(ALL)],
        "capabilities": EVERYTHING_OF_A_SERVER,
        "_meta": {"io.modelcontextprotocol/serverInfo": SERVER_INFO},
        **({} if instructions is None else {"instructions": instructions}),
    }
    assert session.terms is None


@req("ver-08", "ver-09", "ver-15", "state-01")
def test_both_eras_are_served_separately_on_one_link() -> None:
    session = server()
    assert call(session, modern(1, "tools/call", logLevel="error")).revision is E
    ask(session, initialize(2, version=B.name, capabilities={"sampling": {}}))
    session.receive(INITIALIZED, 0.0)
    assert call(session, Request(3, "tools/call")) == Terms(
        B, {"sampling": {}}, {name: CLIENT_INFO[name] for name in CLIENT_INFO}
    )
    assert call(session, modern(4, "tools/call")) == Terms(E)
    ask(session, Request(5, "logging/setLevel", {"level": "emergency"}))
    assert session.notify("notifications/message", {"level": "error", "data": 1}, about=1)
    assert not session.notify("notifications/message", {"level": "error", "data": 1}, about=3)
    session.request("sampling/createMessage", about=3)
    with pytest.raises(NotInThisRevision):
        session.request("sampling/createMessage", about=1)
    session.outgoing()
    session.answer(1, {})
    session.answer(3, {})
    new, old = drain(session)
    assert isinstance(new, Response)
    assert new.result["resultType"] == "complete"
    assert old == Response(3, {})


@req("ver-12", "ver-18", "life-17")
@pytest.mark.parametrize("version", ["2025-11-25", None, 7])
def test_a_modern_server_names_its_versions_to_a_legacy_client(version: Any) -> None:
    answer = ask(server(E), Request(1, "initialize", {"protocolVersion": version}))
    assert isinstance(answer, Error)
    assert answer.data["supported"] == [E.name]
    assert E.name in answer.message
    assert answer.code == (errors.UNSUPPORTED_VERSION if isinstance(version, str) else errors.INVALID_PARAMS)


# The requests and notifications that our side may send.


@req("mrtr-01", "trans-05")
@pytest.mark.parametrize("method", ["sampling/createMessage", "roots/list", "elicitation/create", "ping"])
def test_a_modern_server_cannot_send_requests(method: str) -> None:
    session = server(E)
    call(session, modern(1, "tools/call", clientCapabilities=EVERYTHING_OF_A_CLIENT))
    with pytest.raises(NotInThisRevision) as caught:
        session.request(method, about=1)
    assert (caught.value.method, caught.value.revision) == (method, E.name)
    assert caught.value.use == (
        "any other request" if method == "ping" else "an input request in an input-required result"
    )
    with pytest.raises(UsageError):
        session.request(method)
    assert not session.outgoing()


@req("type-02", "life-15", "life-16")
@each_revision
def test_a_method_that_the_revision_lacks_cannot_be_sent(revision: Revision) -> None:
    made = opened(revision)
    for session in (made.client, made.server):
        every = {name for each in ALL for name in each.requests[session.role]} - {"initialize"}
        notes = {name for each in ALL for name in each.notifications[session.role]} - {INITIALIZED.method}
        about = None
        if session is made.server and not revision.handshake:
            made.server.receive(modern(1, "tools/call"), 0.0)
            about = 1
        for method in every - revision.requests[session.role].keys():
            with pytest.raises(NotInThisRevision):
                session.request(method, about=about)
        for method in notes - revision.notifications[session.role].keys():
            with pytest.raises(NotInThisRevision):
                session.notify(method, about=about)
        assert not session.outgoing()


def _requests_that_need_a_capability() -> list[Any]:
    rows = [
        (revision, sender, row) for revision in ALL for sender in Role for row in revision.requests[sender].values()
    ]
    return [pytest.param(*each, id=f"{each[0]}-{each[2].name}") for each in rows if each[2].needs]


@req("arch-02", "core-04", "life-15", "life-16")
@pytest.mark.parametrize(("revision", "sender", "row"), _requests_that_need_a_capability())
def test_a_request_is_sent_only_if_the_receiver_declared_its_capability(
    revision: Revision, sender: Role, row: Any
) -> None:
    for declared in (True, False):
        everything = EVERYTHING_OF_A_CLIENT if sender is Role.SERVER else EVERYTHING_OF_A_SERVER
        theirs = everything if declared else {"experimental": {}}
        made = opened(revision, *((None, theirs) if sender is Role.CLIENT else (theirs, None)))
        session = made.client if sender is Role.CLIENT else made.server
        if declared:
            session.request(row.name)
            continue
        with pytest.raises(NotDeclared) as caught:
            session.request(row.name)
        assert (caught.value.method, caught.value.owner) == (row.name, sender.other.value)
        assert caught.value.capability == row.needs
        assert not session.outgoing()
        session.request(row.name, undeclared=True)  # for peers that support more than they declare
        assert [message.method for message, _ in session.outgoing()] == [row.name]
        with pytest.raises(NotDeclared):
            session.request(row.name)


@req("arch-02", "arch-04")
@each_legacy
def test_a_notification_is_sent_only_if_the_sender_declared_its_capability(revision: Revision) -> None:
    for declared in (True, False):
        made = opened(revision) if declared else opened(revision, {"experimental": {}}, {"experimental": {}})
        for session in (made.client, made.server):
            for row in revision.notifications[session.role].values():
                if not row.needs:
                    continue
                params = LOG if row.name == "notifications/message" else None
                if declared:
                    assert session.notify(row.name, params)
                    continue
                with pytest.raises(NotDeclared) as caught:
                    session.notify(row.name, params)
                assert (caught.value.owner, caught.value.capability) == (session.role.value, row.needs)
                assert not session.outgoing()


MODES = [
    ({"mode": "url"}, {"elicitation": {"form": {}}}, ("elicitation", "url")),
    ({"requestedSchema": {}}, {"elicitation": {"url": {}}}, ("elicitation", "form")),
    ({"mode": "form", "requestedSchema": {}}, {"elicitation": {"url": {}}}, ("elicitation", "form")),
    ({"mode": "form", "requestedSchema": {}}, {"elicitation": {}}, None),
    ({"mode": "url"}, {"elicitation": {"url": {}}}, None),
    ({"mode": ["url"]}, {"elicitation": {}}, None),
    ({"tools": []}, {"sampling": {}}, ("sampling", "tools")),
    ({"toolChoice": {}}, {"sampling": {"tools": False}}, ("sampling", "tools")),
    ({"tools": []}, {"sampling": {"tools": {}}}, None),
]


@req("arch-02")
@pytest.mark.parametrize(("params", "declared", "missing"), MODES, ids=str)
def test_a_mode_needs_its_own_capability(params: Any, declared: Any, missing: Any) -> None:
    method = "elicitation/create" if "elicitation" in declared else "sampling/createMessage"
    made = opened(D, declared)
    if missing is None:
        made.server.request(method, params)
    else:
        with pytest.raises(NotDeclared) as caught:
            made.server.request(method, params)
        assert caught.value.capability == missing
    # A client refuses a request for an undeclared mode.
    (event,) = made.client.receive(Request("q", method, params), 0.0)
    if missing is None:
        assert isinstance(event, Call)
    else:
        (answer,) = drain(made.client)
        assert isinstance(answer, Error)
        assert answer.code == errors.INVALID_PARAMS


@req("core-29", "arch-02")
@each_legacy
def test_a_method_of_a_feature_that_the_client_does_not_declare_is_not_found(revision: Revision) -> None:
    made = opened(revision, {"experimental": {}})
    for method, row in revision.requests[Role.SERVER].items():
        if row.needs:
            made.client.receive(Request(method, method), 0.0)
            (answer,) = drain(made.client)
            assert isinstance(answer, Error)
            assert answer.code == errors.METHOD_NOT_FOUND


@each_legacy
def test_either_side_may_ping_once_the_link_is_open(revision: Revision) -> None:
    made = opened(revision)
    ids = made.client.request("ping"), made.server.request("ping")
    made.pump()
    assert made.client_saw == [Answered(ids[0], "ping", {})]
    assert made.server_saw == [Answered(ids[1], "ping", {})]


def test_no_message_is_sent_about_an_ended_request_or_on_a_lost_link() -> None:
    made = opened(D)
    made.client.request("tools/list")
    made.pump()
    made.server.answer(2, {})
    assert not made.server.notify("notifications/message", LOG, about=2)
    with pytest.raises(UsageError, match="request 2 has ended"):
        made.server.request("roots/list", about=2)
    for session in (made.client, made.server):
        session.connection_lost()
        with pytest.raises(SessionClosed):
            session.request("ping")
        assert not session.notify("notifications/progress")


# Logging.


@each_legacy
def test_in_the_legacy_era_the_session_has_a_log_level(revision: Revision) -> None:
    made = opened(revision)
    sent = [level for level in LOG_LEVELS if made.server.notify("notifications/message", {"level": level, "data": 1})]
    assert sent == list(LOG_LEVELS)  # until the client sets a level, the server chooses
    for at, level in enumerate(LOG_LEVELS):
        made.client.request("logging/setLevel", {"level": level})
        made.pump()
        sent = [each for each in LOG_LEVELS if made.server.notify("notifications/message", {"level": each, "data": 1})]
        assert sent == list(LOG_LEVELS[at:])
    made.pump()
    assert isinstance(made.client_saw[-1], Notice)


@pytest.mark.parametrize("level", ["loud", "", None, 3, [], "INFO"], ids=repr)
def test_a_log_level_that_does_not_exist_is_refused_and_changes_nothing(level: Any) -> None:
    session = opened(D).server
    before = session.terms
    answer = ask(session, Request(1, "logging/setLevel", {"level": level}))
    assert isinstance(answer, Error)
    assert (answer.code, session.terms) == (errors.INVALID_PARAMS, before)
    with pytest.raises(UsageError, match="level must be one of debug, "):
        session.notify("notifications/message", {"level": level, "data": 1})


@pytest.mark.parametrize("asked", [None, *LOG_LEVELS])
def test_each_modern_request_has_its_own_log_level(asked: str | None) -> None:
    made = opened(E)
    made.client.log_level = asked
    made.client.request("tools/call")
    other = made.client.request("tools/call", {"_meta": {"io.modelcontextprotocol/logLevel": "alert"}})
    made.pump()
    sent = [
        level
        for level in LOG_LEVELS
        if made.server.notify("notifications/message", {"level": level, "data": 1}, about=other - 1)
    ]
    assert sent == ([] if asked is None else list(LOG_LEVELS[LOG_LEVELS.index(asked) :]))
    assert made.server.notify("notifications/message", {"level": "alert", "data": 1}, about=other)
    assert not made.server.notify("notifications/message", {"level": "critical", "data": 1}, about=other)
    with pytest.raises(UsageError, match="no revision has been agreed"):
        made.server.notify("notifications/message", LOG)


# Streams and their messages.


@req("sub-13", "http-116", "type-16", "prog-13")
def test_changes_are_sent_only_on_subscriptions_which_carry_only_changes() -> None:
    session = server(E)
    call(session, modern("call", "tools/call", logLevel="debug", clientCapabilities={}))
    listen = modern("listen", "subscriptions/listen", logLevel="debug")
    listen.params["_meta"]["progressToken"] = "t"
    call(session, listen)
    for method in sorted(E.on_subscriptions):
        with pytest.raises(UsageError, match="only sent on a subscription"):
            session.notify(method, about="call")
        with pytest.raises(UsageError, match="no revision has been agreed"):
            session.notify(method)
        assert session.notify(method, {"_meta": {META_SUBSCRIPTION_ID: "listen"}}, about="listen")
    with pytest.raises(UsageError, match="never sent on a subscription"):
        session.notify("notifications/message", LOG, about="listen")
    with pytest.raises(UsageError, match="never sent on a subscription"):
        session.progress("listen", 1)
    assert session.notify("notifications/message", LOG, about="call")
    assert {about for _, about in session.outgoing()[:-1]} == {"listen"}
    assert not session.progress("gone", 1)


@req("sub-05")
@pytest.mark.parametrize("id", [1, "1"], ids=repr)
@pytest.mark.parametrize("mark", [None, 1, "1", 1.0, True, 2, [1]], ids=repr)
def test_a_notification_on_a_subscription_must_have_the_id_in_value_and_type(id: Any, mark: Any) -> None:
    session = server(E)
    call(session, modern(id, "subscriptions/listen"))
    params = {"_meta": {META_SUBSCRIPTION_ID: mark}}
    for method in sorted(E.on_subscriptions):
        if (type(mark), mark) == (type(id), id):
            assert session.notify(method, params, about=id)
            continue
        with pytest.raises(UsageError, match="must be the id of the subscription, "):
            session.notify(method, params, about=id)
        with pytest.raises(UsageError, match="must be the id of the subscription, "):
            session.notify(method, about=id)
        assert not session.outgoing()


@pytest.mark.parametrize("params", [[], 7, {"_meta": None}, {"_meta": []}, {"_meta": "x"}], ids=repr)
def test_params_and_results_that_cannot_hold_metadata_are_refused(params: Any) -> None:
    made = opened(E)
    made.client.request("tools/call")
    made.client.request("subscriptions/listen")
    made.pump()
    acts: list[Any] = [lambda: made.server.answer(2, params)]
    if params:
        acts += [
            lambda: made.client.request("tools/call", params),
            lambda: made.server.notify("notifications/tools/list_changed", params, about=3),
            lambda: made.server.notify("notifications/message", params, about=2),
        ]
    for act in acts:
        with pytest.raises(UsageError, match="must be an object"):
            act()
    assert not made.client.outgoing()
    assert not made.server.outgoing()
    assert made.server.answer(2, {})


@pytest.mark.parametrize("revision", [B, E], ids=str)
def test_an_answer_is_sent_on_the_stream_of_its_request(revision: Revision) -> None:
    session = server(terms=Terms(revision))
    ask = modern if revision is E else Request
    for message in (ask(1, "no/such"), ask(2, "tools/call"), ask(3, "tools/list")):
        session.receive(message, 0.0, about=f"stream {message.id}", principal="ann")
    session.receive(Request(4, "tools/list", {"_meta": 7}), 0.0, about="stream 4")
    session.answer(3, {"tools": []})
    session.notify("notifications/message", LOG, about=2)
    session.answer(2, {"content": []})
    where = [(getattr(message, "id", None), about) for message, about in session.outgoing()]
    noted = [] if revision is E else [(None, "stream 2")]  # a modern request without a log level gets no logs
    assert where == [(1, "stream 1"), (4, "stream 4"), (3, "stream 3"), *noted, (2, "stream 2")]


@req("prog-13", "type-16")
def test_only_a_modern_server_sends_progress() -> None:
    made = opened(E)
    id = made.client.request("tools/call", progress=True)
    made.pump()
    made.server.progress(id, 0.5)
    made.pump()
    assert made.client_saw == [ProgressReported(id, 0.5, None, None)]
    assert not made.client.progress(id, 0.5)
    assert drain(made.client) == []
    # A client has one notification left, a cancellation, which `Peer.cancel` sends.
    for note in E.notifications[Role.SERVER].keys() - {"notifications/cancelled"}:
        with pytest.raises(NotInThisRevision):
            made.client.notify(note)
        (event,) = made.server.receive(Notification(note, {"progressToken": id, "progress": 0.5}), 0.0)
        assert isinstance(event, PeerMistake)


@req("cancel-12", "cancel-13")
def test_a_server_cancels_only_subscriptions() -> None:
    made = opened(E)
    made.client.request("tools/call")
    listen = made.client.request("subscriptions/listen")
    made.pump()
    made.forget()
    for id in (listen - 1, listen):
        with pytest.raises(UsageError):
            made.server.notify("notifications/cancelled", {"requestId": id}, about=id)
        assert made.server.answer(id, {})
    made.pump()
    assert [message.params["requestId"] for message in made.sent if isinstance(message, Notification)] == [listen]


def test_a_cancelled_request_gets_no_answer_in_both_eras() -> None:
    for revision in (D, E):
        made = opened(revision)
        id = made.client.request("tools/call")
        made.pump()
        made.client.cancel(id)
        made.pump()
        assert made.server_saw[-1] == RequestCancelled(id, "tools/call", "")
        assert not made.server.answer(id, {})
        assert not made.server.answer(id, {})
        assert not made.server.refuse(id, RequestError(1, "late"))
        assert not made.server.outgoing()


# Answers.


@req("rtype-01", "meta-13", "type-02")
@each_revision
def test_each_result_has_the_members_that_its_revision_requires(revision: Revision) -> None:
    for method in revision.requests[Role.CLIENT]:
        if method in ("initialize", "ping", "server/discover", "logging/setLevel"):
            continue
        made = opened(revision)
        made.client.request(method)
        made.pump()
        id = made.server_saw[-1].request.id  # type: ignore[attr-defined]
        made.server.answer(id, {"x": 1})
        made.pump()
        answered = next(event for event in made.client_saw if isinstance(event, Answered))
        expected: dict[str, Any] = {"x": 1}
        if revision is E:
            expected |= {"resultType": "complete", "_meta": {"io.modelcontextprotocol/serverInfo": SERVER_INFO}}
            if method in E.cacheable:
                expected |= {"ttlMs": 0, "cacheScope": "private"}
        assert answered.result == expected


def test_members_of_a_result_override_the_defaults() -> None:
    session = server(E)
    call(session, modern(1, "tools/list"))
    mine = {"resultType": "complete", "ttlMs": 5, "cacheScope": "public", "_meta": {"a": 1}}
    session.answer(1, mine)
    (answer,) = drain(session)
    assert isinstance(answer, Response)
    assert answer.result == {**mine, "_meta": {"io.modelcontextprotocol/serverInfo": SERVER_INFO, "a": 1}}
    assert mine["_meta"] == {"a": 1}
    # This includes the identity of the server: a gateway passes on the result of another server.
    call(session, modern(2, "tools/call"))
    session.answer(2, {"_meta": {META_SERVER_INFO: {"name": "behind", "version": "9"}}})
    (answer,) = drain(session)
    assert isinstance(answer, Response)
    assert answer.result["_meta"] == {META_SERVER_INFO: {"name": "behind", "version": "9"}}


@req("mrtr-03", "mrtr-04")
@each_revision
def test_only_some_methods_may_ask_for_input(revision: Revision) -> None:
    wants = {"resultType": "input_required", "requestState": "s"}
    for method, row in revision.requests[Role.CLIENT].items():
        session = server(revision, terms=Terms(revision))
        if not session.receive(Request(1, method) if revision.handshake else modern(1, method), 0.0) or row.early:
            continue
        if not session.serves(1):
            continue
        if method in revision.input_required:
            assert session.answer(1, wants)
            (answer,) = drain(session)
            assert isinstance(answer, Response)
            assert answer.result.keys() == {"resultType", "requestState", "_meta"}
        else:
            with pytest.raises(UsageError, match="input-required"):
                session.answer(1, wants)
            assert session.answer(1, {})
    assert revision.input_required == ({"tools/call", "prompts/get", "resources/read"} if revision is E else set())


@req("core-20", "core-21", "core-23", "core-24")
@pytest.mark.parametrize("code", range(-32100, -31998))
def test_a_modern_server_replaces_reserved_error_codes(code: int) -> None:
    session = server(E)
    call(session, modern(1, "tools/call"))
    session.refuse(1, RequestError(code, "no", {"why": 1}))
    (answer,) = drain(session)
    assert isinstance(answer, Error)
    if code == -32002:
        assert answer.code == errors.INVALID_PARAMS
    elif -32099 <= code <= -32000 and code not in (-32020, -32021, -32022):
        assert answer.code == errors.INTERNAL_ERROR
    else:
        assert answer.code == code
    assert (answer.message, answer.data) == ("no", {"why": 1})


@pytest.mark.parametrize(
    ("revision", "code", "sent"),
    [
        (A, -32002, -32002),
        (D, -32002, -32002),
        (E, -32002, -32602),
        (A, -32042, -32603),
        (C, -32042, -32603),
        (D, -32042, -32042),
        (E, -32042, -32603),
        (A, -32000, -32000),
        (E, -32602, -32602),
        (E, 7, 7),
    ],
    ids=str,
)
def test_an_error_code_is_replaced_by_the_one_of_the_revision(revision: Revision, code: int, sent: int) -> None:
    made = opened(revision)
    id = made.client.request("tools/call")
    made.pump()
    made.server.refuse(id, RequestError(code, "no"))
    made.pump()
    (refused,) = made.client_saw
    assert isinstance(refused, Refused)
    assert refused.error.code == sent


@req("core-22")
@pytest.mark.parametrize("code", [*range(-32019, -31999)])
def test_received_codes_of_the_old_server_range_are_not_changed(code: int) -> None:
    made = opened(E)
    id = made.client.request("tools/call")
    error = Error(id, code, "whatever")
    assert made.client.receive(error, 0.0) == [Refused(id, "tools/call", error)]


def test_an_answer_or_refusal_of_an_unknown_request_is_dropped() -> None:
    session = server()
    assert not session.refuse(1, RequestError(1, "x"))
    assert not session.answer(1, {})


# Sessions that are open from the start.


@each_revision
def test_a_session_can_start_with_given_terms(revision: Revision) -> None:
    terms = Terms(revision, {"roots": {}}, principal="ann")
    session = server(link=LinkKind.EXCHANGE, terms=terms)
    assert session.opened
    if revision.handshake:
        assert call(session, Request(1, "tools/list")) == terms
        assert call(session, Request(2, "tools/list"), principal="ben").principal == "ben"
    client = ClientProtocol(Offer(CLIENT_INFO), link=LinkKind.EXCHANGE, terms=Terms(revision, {"tools": {}}))
    client.request("tools/list")
    (sent,) = drain(client)
    assert isinstance(sent, Request)
    assert call(server(terms=terms), sent).revision is revision


def test_a_session_cannot_start_with_a_revision_that_is_not_offered() -> None:
    with pytest.raises(UsageError, match="not offered"):
        server(D, terms=Terms(E))
    with pytest.raises(UsageError, match="not offered"):
        ClientProtocol(Offer(CLIENT_INFO, revisions=(E,)), terms=Terms(D))


@pytest.mark.parametrize(
    ("offered", "terms", "null"),
    [(ALL, None, True), ((E,), None, False), ((D, E), None, False), (ALL, A, True), (ALL, D, False), (ALL, E, False)],
    ids=str,
)
def test_the_revision_decides_the_id_of_an_error_about_an_unreadable_id(offered: Any, terms: Any, null: bool) -> None:
    session = server(*offered, terms=None if terms is None else Terms(terms))
    assert session.unreadable_id_is_null is null
    session.receive(decode(b"junk", LIMITS), 0.0)
    ((message, _),) = session.outgoing()
    assert (b'"id":null' in encode(message)) is null


def test_an_error_about_an_unreadable_id_is_written_before_the_next_message_is_read() -> None:
    session = server()
    session.receive(decode(b"junk", LIMITS), 0.0)
    session.receive(initialize(1, D.name), 0.0)
    session.receive(decode(b"junk", LIMITS), 0.0)
    written = [encode(message) for message, _ in session.outgoing()]
    assert [b'"id"' in each for each in written] == [True, True, False]


def test_terms_tell_the_declared_capabilities_of_the_other_side() -> None:
    terms = Terms(LATEST_LEGACY, {"roots": {"listChanged": True}, "sampling": {}, "elicitation": {}})
    assert terms.declares("roots", "listChanged")
    assert terms.declares("sampling")
    assert terms.declares("elicitation", "form")
    assert not terms.declares("elicitation", "url")
    assert not terms.declares("sampling", "tools")
    assert not Terms(LATEST).declares("roots")
    assert terms == attrs.evolve(terms)
    assert [*chain(LEGACY, MODERN)] == [*ALL]
    assert isinstance(opened(E), Pair)


# Any sequence of messages.

NAMES = st.sampled_from(
    sorted({name for each in ALL for role in Role for name in (*each.requests[role], *each.notifications[role])})
)
WORDS = st.sampled_from([each.name for each in ALL] + ["info", "url", "", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
MEMBERS = st.sampled_from(
    ["protocolVersion", "capabilities", "clientInfo", "level", "requestId", "progressToken", "mode", "tools"]
)
META = JSON | st.fixed_dictionaries(
    {"io.modelcontextprotocol/protocolVersion": JSON, "io.modelcontextprotocol/clientCapabilities": JSON},
    optional={f"io.modelcontextprotocol/{name}": JSON for name in ("clientInfo", "logLevel")},
)
PARAMS = st.dictionaries(MEMBERS, JSON, max_size=4) | st.fixed_dictionaries(
    {"_meta": META}, optional={"protocolVersion": JSON, "capabilities": JSON}
)
IDS = st.integers(0, 3) | st.sampled_from(["a", "1"])
MESSAGES = st.one_of(
    st.builds(Request, IDS, NAMES | WORDS, PARAMS),
    st.builds(Notification, NAMES | WORDS, PARAMS),
    st.builds(Response, IDS, st.dictionaries(MEMBERS | st.just("supportedVersions"), JSON, max_size=3)),
    st.builds(Error, IDS, st.integers(-32023, -32019), WORDS, st.fixed_dictionaries({"supported": JSON})),
    st.just(INITIALIZED),
    st.just(initialize()),
)


@settings(max_examples=150)
@given(st.sampled_from(OFFERS), st.sampled_from(list(Role)), st.lists(MESSAGES, max_size=8))
def test_a_session_accepts_any_messages_and_writes_readable_ones(
    offer: frozenset[Revision], role: Role, messages: list[Any]
) -> None:
    declared = {**EVERYTHING_OF_A_CLIENT, **EVERYTHING_OF_A_SERVER}
    kind: Any = ServerProtocol if role is Role.SERVER else ClientProtocol
    session = kind(Offer(INFO, declared, tuple(offer)))
    if isinstance(session, ClientProtocol):
        session.open()
    for message in messages:
        before = {id: session.terms_of(id) for id in (0, 1, 2, 3, "a", "1") if session.serves(id)}
        for event in session.receive(message, 0.0):
            if isinstance(event, Call):
                assert event.terms.revision in offer
                assert session.serves(event.request.id)
                assert event.terms.revision.request(role.other, event.request.method) is not None
        for id, terms in before.items():  # a later message may change only the log level in the terms of a request
            if session.serves(id) and terms is not None:
                after = session.terms_of(id)
                assert after is not None
                assert attrs.evolve(after, log_level=None) == attrs.evolve(terms, log_level=None)
        drain(session)


# Cached results.


def test_a_cached_result_is_written_once_for_all_requests_of_a_revision() -> None:
    page = CachedResult({"tools": ["a"]})
    for revision in (E, D, E):
        session = opened(D).server if revision is D else server(E)
        for id in (1, "two", 3):
            request = Request(id, "tools/list") if revision is D else modern(id, "tools/list")
            call(session, request)
            assert session.answer(id, page)
            ((answer, _),) = session.outgoing()
            expected: dict[str, Any] = {"tools": ["a"]}
            if revision is E:
                expected |= {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
                expected |= {"_meta": {META_SERVER_INFO: SERVER_INFO}}
            assert json.loads(encode(answer)) == {"jsonrpc": "2.0", "id": id, "result": expected}
    assert page == {"tools": ["a"]}
    assert page.text is page.text


def test_a_cached_result_may_have_members_that_are_only_written() -> None:
    for result in ({"taskId": "t"}, {"taskId": "t", "ttlMs": 5}, {}):
        kept = CachedResult(result, b'"result":{"a":[1]},"b":2')
        assert kept == result
        for revision in (E, D):
            session = opened(D).server if revision is D else server(E)
            for id in (1, "two"):
                request = Request(id, "tools/list") if revision is D else modern(id, "tools/list")
                call(session, request)
                assert session.answer(id, kept)
                ((answer, _),) = session.outgoing()
                sent = json.loads(encode(answer))
                assert sent["id"] == id
                assert {"result": {"a": [1]}, "b": 2, **result}.items() <= sent["result"].items()
                assert ("resultType" in sent["result"]) is (revision is E)


def test_params_of_a_notification_may_have_members_that_are_only_written() -> None:
    params = CachedResult({"taskId": "t"}, b'"result":{"a":[1]}').with_members({"_meta": {"b": 2}})
    assert params == {"taskId": "t", "_meta": {"b": 2}}
    note = Notification("com.example/changed", params)
    for each in (note, prepare(note)):
        assert json.loads(encode(each)) == {
            "jsonrpc": "2.0",
            "method": "com.example/changed",
            "params": {"taskId": "t", "_meta": {"b": 2}, "result": {"a": [1]}},
        }


def test_the_extended_copy_of_a_cached_result_is_cached_for_its_source() -> None:
    page, one, other = CachedResult({"tools": []}), object(), object()
    first = page.with_more("hints", one, lambda: {"ttlMs": 1})
    assert page.with_more("hints", one, lambda: {"ttlMs": 2}) is first
    assert page.with_more("hints", other, lambda: {"ttlMs": 3}) == {"ttlMs": 3}
    assert page.with_more("hints", one, lambda: {"ttlMs": 4}) == {"ttlMs": 4}


def test_modern_requests_with_equal_metadata_share_their_terms() -> None:
    session = server(E)
    first = call(session, modern(1, "tools/list"))
    assert call(session, modern(2, "tools/list")) is first
    for id, more in enumerate(({"principal": "ann"}, {"headers": {"a": "b"}}), 3):
        terms = call(session, modern(id, "tools/list"), **more)
        assert (terms.principal, terms.headers) == (more.get("principal"), more.get("headers", {}))
    assert call(session, modern(5, "tools/list")) is first
    level = modern(6, "tools/list", logLevel="error")
    assert call(session, level).log_level == "error"
    assert call(session, modern(7, "tools/list")) == first
