"""Extensions of the protocol: their declaration in each revision, the methods served, and the peers refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.core.pairs import CLIENT_INFO, SERVER_INFO, Pair, drain
from tests.requirements import req
from trio_mcp.core import (
    LEGACY,
    META_CLIENT_CAPABILITIES,
    META_SUBSCRIPTION_ID,
    META_VERSION,
    METHOD_NOT_FOUND,
    MISSING_CLIENT_CAPABILITY,
    REVISIONS,
    Answered,
    ByteBudget,
    Call,
    ClientProtocol,
    Error,
    Extension,
    ExtensionMethod,
    Extensions,
    JsonObject,
    Limits,
    NotDeclared,
    Notice,
    Notification,
    NotInThisRevision,
    Offer,
    Opened,
    PeerMistake,
    ProgressReported,
    Refused,
    RemoteProtocolError,
    Request,
    RequestError,
    Revision,
    Role,
    Rounds,
    ServerProtocol,
    Terms,
    UsageError,
)
from trio_mcp.core.http import Headers, standard_fault, standard_headers

PING = "com.example/ping"
LATEST = "2026-07-28"
each_revision = pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
each_legacy = pytest.mark.parametrize("revision", LEGACY, ids=str)


def ping(**given: Any) -> Extension:
    """An extension with requests and notifications in both directions, and a result type for tools/call."""
    methods = [
        ExtensionMethod(PING, Role.CLIENT, mcp_name="target"),
        ExtensionMethod("com.example/ask", Role.SERVER),
        ExtensionMethod("com.example/heard", Role.CLIENT, notification=True),
        ExtensionMethod("com.example/said", Role.SERVER, notification=True),
        ExtensionMethod("com.example/changed", Role.SERVER, notification=True, subscribed=True),
    ]
    return Extension(
        PING,
        **{"settings": {"loud": True}, "methods": methods, "result_types": {"tools/call": ["later"]}, **given},
    )


def opened_pair(
    revision: Revision, *, client: Extensions | None = None, server: Extensions | None = None, tools: bool = True
) -> Pair:
    """A client and a server with an open session of this revision."""
    capabilities: dict[str, Any] = {"tools": {}} if tools else {}
    pair = Pair(
        ClientProtocol(Offer(CLIENT_INFO, {}, (revision,), extensions=client)),
        ServerProtocol(Offer(SERVER_INFO, capabilities, (revision,), extensions=server)),
    )
    pair.client.open()
    pair.pump()
    assert any(isinstance(event, Opened) for event in pair.client_saw)
    pair.forget()
    return pair


BOTH = Extensions([ping()])


def call_server(pair: Pair, method: str, params: JsonObject | None = None, **options: Any) -> Request | Error:
    """The request that the server gets, or the error that the client gets."""
    pair.client.request(method, params, **options)
    pair.pump()
    (event,) = [event for event in pair.server_saw if isinstance(event, Call)] or [
        event for event in pair.client_saw if isinstance(event, Refused)
    ]
    return event.request if isinstance(event, Call) else event.error


# Values.


@req("ver-05")
@pytest.mark.parametrize("id", ["ping", "", "com..example/ping", "com.example/-ping"])
def test_an_identifier_has_a_prefix(id: str) -> None:
    with pytest.raises(UsageError):
        Extension(id)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"settings": ["loud"]}, "the settings of com.example/ping must be an object, got list"),
        ({"revisions": ["2027-01-01"]}, "com.example/ping: unknown revision '2027-01-01'"),
        ({"filters": ["toolsListChanged"]}, "the filter toolsListChanged is one of the protocol already"),
        ({"filters": ["a", "resourceSubscriptions"]}, "the filter resourceSubscriptions is one of the protocol"),
        ({"filters": [""]}, "the name of a filter must be a text"),
        ({"filters": [7]}, "the name of a filter must be a text, .* got 7"),
    ],
)
def test_an_invalid_extension_is_refused(given: Mapping[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ping(**given)


@pytest.mark.parametrize("name", ["", None, 7, ["a"]])
def test_a_method_has_a_name(name: Any) -> None:
    with pytest.raises(UsageError, match=r"the name of a method must be a text, such as com.example/ping, got"):
        ExtensionMethod(name, Role.CLIENT)


def test_an_extension_and_a_method_are_given_once() -> None:
    request = ExtensionMethod("com.example/other", Role.CLIENT)
    Extensions([ping(revisions=["2025-11-25"]), ping(revisions=[LATEST])], methods=[request])
    with pytest.raises(UsageError, match=r"the extension com.example/ping is given twice for 2024-11-05"):
        Extensions([ping(), ping()])
    with pytest.raises(UsageError, match=r"the method com.example/other is given twice for 2024-11-05"):
        Extensions(methods=[request, request])
    with pytest.raises(UsageError, match="tools/list is a method of 2024-11-05 already"):
        Extensions(methods=[ExtensionMethod("tools/list", Role.CLIENT)])


# Capabilities.


@req("type-19", "xtask-50")
@each_revision
def test_an_extension_is_declared_in_the_member_of_its_revision(revision: Revision) -> None:
    place = "experimental" if revision.handshake else "extensions"
    pair = opened_pair(revision, client=BOTH, server=BOTH)
    for session in (pair.client, pair.server):
        assert session.declared(revision)[place] == {PING: {"loud": True}}
        assert ("extensions" in session.declared(revision)) is not revision.handshake
    terms = pair.client.terms
    assert terms is not None
    assert terms.extension(PING) == {"loud": True}
    assert terms.extension("com.example/other") is None


def test_a_form_of_an_extension_may_be_a_core_capability() -> None:
    older = Extension(PING, {"list": {}}, revisions=["2025-11-25"], capability="tasks")
    both = Extensions([older, ping(revisions=[LATEST])])
    declared = {
        name: Offer(SERVER_INFO, {}, (each,), extensions=both).declared(Role.SERVER, each)
        for name, each in REVISIONS.items()
    }
    assert declared["2025-06-18"] == {}
    assert declared["2025-11-25"] == {"tasks": {"list": {}}}
    assert declared[LATEST] == {"extensions": {PING: {"loud": True}}}
    assert older.declared_in(Terms(REVISIONS["2025-11-25"], {"tasks": {}}))
    assert not older.declared_in(Terms(REVISIONS["2025-11-25"], {"extensions": {PING: {}}}))
    assert not older.declared_in(Terms(REVISIONS["2025-06-18"], {"tasks": {}}))


@pytest.mark.parametrize("place", ["extensions", "experimental"])
@pytest.mark.parametrize(
    ("value", "settings"), [({"a": 1}, {"a": 1}), ({}, {}), (True, {}), (False, None), (None, None)]
)
def test_settings_of_the_peer_are_read_in_both_places(place: str, value: Any, settings: Any) -> None:
    for revision in REVISIONS.values():
        assert Terms(revision, {place: {PING: value}}).extension(PING) == settings
    assert Terms(revision, {place: [PING]}).extension(PING) is None


def test_capabilities_given_by_hand_stay_beside_those_of_extensions() -> None:
    given = {"extensions": {"com.example/x": {}}, "experimental": {"y": {}}}
    offer = Offer(SERVER_INFO, given, extensions=BOTH)
    assert offer.declared(Role.SERVER, REVISIONS[LATEST]) == {
        "extensions": {"com.example/x": {}, PING: {"loud": True}},
        "experimental": {"y": {}},
    }


# Requests.


@each_revision
def test_a_request_of_an_extension_reaches_the_other_side(revision: Revision) -> None:
    pair = opened_pair(revision, client=BOTH, server=BOTH)
    got = call_server(pair, PING, {"target": "moon"})
    assert isinstance(got, Request)
    assert (got.method, got.params["target"]) == (PING, "moon")
    assert pair.server.answer(got.id, {"back": 1})
    pair.pump()
    (answer,) = [event for event in pair.client_saw if isinstance(event, Answered)]
    assert answer.result["back"] == 1
    assert answer.result.get("resultType") == ("complete" if revision.result_type else None)


@req("ver-06")
@each_revision
def test_a_client_that_did_not_declare_the_extension_is_refused(revision: Revision) -> None:
    pair = opened_pair(revision, server=BOTH)
    error = call_server(pair, PING)
    assert isinstance(error, Error)
    assert error.code == MISSING_CLIENT_CAPABILITY
    place = "experimental" if revision.handshake else "extensions"
    assert error.data == {"requiredCapabilities": {place: {PING: {}}}}
    assert f"needs the client capability {place}.{PING}" in error.message


@req("ver-06")
@each_revision
def test_a_server_without_the_extension_does_not_know_its_methods(revision: Revision) -> None:
    pair = opened_pair(revision, client=BOTH)
    with pytest.raises(NotDeclared, match=r"com\.example/ping needs the server capability"):
        pair.client.request(PING)
    error = call_server(pair, PING, undeclared=True)
    assert isinstance(error, Error)
    assert error.code == METHOD_NOT_FOUND


@req("ver-06")
@each_legacy
def test_requests_of_a_server_have_the_same_rules(revision: Revision) -> None:
    pair = opened_pair(revision, client=BOTH, server=BOTH)
    pair.server.request("com.example/ask", {"what": 1})
    pair.pump()
    (call,) = [event for event in pair.client_saw if isinstance(event, Call)]
    assert call.request.params["what"] == 1

    with pytest.raises(NotDeclared, match="needs the client capability"):
        opened_pair(revision, server=BOTH).server.request("com.example/ask")
    unknowing = opened_pair(revision, client=BOTH)
    unknowing.server.request("com.example/ask")
    unknowing.pump()
    (refused,) = [event for event in unknowing.server_saw if isinstance(event, Refused)]
    assert refused.error.code == METHOD_NOT_FOUND
    assert "the server has not declared" in refused.error.message


def test_a_modern_server_sends_no_requests_of_extensions_either() -> None:
    pair = opened_pair(REVISIONS[LATEST], client=BOTH, server=BOTH)
    call = call_server(pair, PING)
    assert isinstance(call, Request)
    with pytest.raises(NotInThisRevision):
        pair.server.request("com.example/ask", about=call.id)


@each_revision
def test_a_method_without_an_extension_needs_no_declaration(revision: Revision) -> None:
    pair = opened_pair(revision, server=Extensions(methods=[ExtensionMethod(PING, Role.CLIENT)]))
    assert isinstance(call_server(pair, PING), Request)


def test_a_method_of_another_form_of_the_extension_does_not_exist() -> None:
    modern = Extensions([ping(revisions=[LATEST])])
    pair = opened_pair(REVISIONS["2025-11-25"], client=modern, server=modern)
    with pytest.raises(NotInThisRevision):
        pair.client.request(PING)
    other = opened_pair(REVISIONS["2025-11-25"], server=modern)
    error = call_server(other, PING)
    assert isinstance(error, Error)
    assert error.code == METHOD_NOT_FOUND


@each_revision
@pytest.mark.parametrize("method", ["tools/cal", "notifications/tools/changed", "initialize/again"])
def test_an_unknown_name_in_the_namespace_of_the_protocol_is_not_sent(revision: Revision, method: str) -> None:
    pair = opened_pair(revision)
    with pytest.raises(NotInThisRevision):
        pair.client.request(method)
    with pytest.raises(NotInThisRevision):
        pair.client.notify(method)
    assert isinstance(call_server(pair, method, undeclared=True), Error)


@each_revision
def test_the_fallback_receives_unknown_methods(revision: Revision) -> None:
    others = [name for name in REVISIONS if name != revision.name]
    pair = opened_pair(revision, client=BOTH, server=Extensions([ping(revisions=others)], fallback=True))
    got = call_server(pair, "org.example/unheard-of")
    assert isinstance(got, Request)
    pair.client.notify("org.example/unheard-of")
    pair.pump()
    assert any(isinstance(event, Notice) for event in pair.server_saw)
    pair.forget()
    wrong_revision = "server/discover" if revision.handshake else "ping"
    with pytest.raises(NotInThisRevision):
        pair.client.request(wrong_revision)
    meta = {META_VERSION: LATEST, META_CLIENT_CAPABILITIES: {}}
    params: JsonObject = {} if revision.handshake else {"_meta": meta}
    for method in (wrong_revision, PING):  # known methods: one of the protocol, one of an extension of the server
        pair.server.receive(Request("r", method, params), 0.0)
        (answer,) = drain(pair.server)
        assert isinstance(answer, Error)
        assert answer.code == METHOD_NOT_FOUND


@each_legacy
def test_before_the_handshake_a_method_of_an_extension_is_refused(revision: Revision) -> None:
    server = ServerProtocol(Offer(SERVER_INFO, {}, (revision,), extensions=BOTH))
    server.receive(Request(1, PING), 0.0)
    (answer,) = drain(server)
    assert isinstance(answer, Error)
    assert "must not be sent before the end of initialize" in answer.message
    client = ClientProtocol(Offer(CLIENT_INFO, {}, (revision,), extensions=BOTH))
    client.open()
    with pytest.raises(UsageError, match="the handshake has not ended"):
        client.request(PING)
    assert not client.notify("org.example/early")


def test_a_modern_request_of_an_extension_needs_its_metadata() -> None:
    server = ServerProtocol(Offer(SERVER_INFO, {}, extensions=BOTH))
    server.receive(Request(1, PING), 0.0)
    (answer,) = drain(server)
    assert isinstance(answer, Error)
    assert META_VERSION in answer.message


# An extension that a server requires.


@req("ver-06")
@each_revision
def test_a_required_extension_is_required_for_every_request(revision: Revision) -> None:
    needed = Extensions([ping(required=True)])
    assert isinstance(call_server(opened_pair(revision, client=BOTH, server=needed), "tools/list"), Request)
    pair = opened_pair(revision, server=needed)  # the session opens, so that the client learns the name of the server
    error = call_server(pair, "tools/list")
    assert isinstance(error, Error)
    assert error.code == MISSING_CLIENT_CAPABILITY
    place = "experimental" if revision.handshake else "extensions"
    assert error.data == {"requiredCapabilities": {place: {PING: {}}}}
    pair.forget()
    if revision.handshake:
        pair.client.request("ping")
        pair.pump()
        assert any(isinstance(event, Answered) for event in pair.client_saw)


# Notifications.


@req("ver-06")
@each_revision
def test_a_notification_of_the_client_needs_the_declaration_of_both(revision: Revision) -> None:
    pair = opened_pair(revision, client=BOTH, server=BOTH)
    assert pair.client.notify("com.example/heard", {"n": 1, "_meta": {"com.example/x": 2}})
    pair.pump()
    (heard,) = [event for event in pair.server_saw if isinstance(event, Notice)]
    assert heard.terms.revision is revision
    assert heard.terms.extension(PING) == {"loud": True}
    assert heard.notification.params["n"] == 1
    assert heard.notification.params["_meta"]["com.example/x"] == 2
    with pytest.raises(NotDeclared, match="needs the server capability"):
        opened_pair(revision, client=BOTH).client.notify("com.example/heard")


@pytest.mark.parametrize("meta", [{}, {META_VERSION: "2099-01-01"}, {META_VERSION: LATEST}])
def test_a_modern_notification_without_terms_is_ignored(meta: JsonObject) -> None:
    server = ServerProtocol(Offer(SERVER_INFO, {}, extensions=Extensions(fallback=True)))
    (mistake,) = server.receive(Notification("com.example/heard", {"_meta": meta}), 0.0)
    assert isinstance(mistake, PeerMistake)


@req("ver-06")
@each_legacy
def test_a_notification_of_the_server_needs_the_declaration_of_both(revision: Revision) -> None:
    pair = opened_pair(revision, client=BOTH, server=BOTH)
    pair.server.notify("com.example/said", {"n": 2})
    pair.pump()
    (said,) = [event for event in pair.client_saw if isinstance(event, Notice)]
    assert said.notification.params["n"] == 2
    with pytest.raises(NotDeclared, match="needs the client capability"):
        opened_pair(revision, server=BOTH).server.notify("com.example/said")
    (mistake,) = opened_pair(revision, server=BOTH).server.receive(Notification("com.example/heard"), 0.0)
    assert isinstance(mistake, PeerMistake)
    assert mistake.why == "com.example/heard belongs to com.example/ping, which the client has not declared; ignored"
    (unknown,) = opened_pair(revision, server=BOTH).server.receive(Notification("com.example/unheard-of"), 0.0)
    assert isinstance(unknown, PeerMistake)


def test_a_modern_notification_belongs_to_a_request() -> None:
    pair = opened_pair(REVISIONS[LATEST], client=BOTH, server=BOTH)
    call = call_server(pair, PING)
    assert isinstance(call, Request)
    assert pair.server.notify("com.example/said", {"n": 2}, about=call.id)
    with pytest.raises(UsageError, match="only sent on a subscription"):
        pair.server.notify("com.example/changed", about=call.id)
    pair.pump()
    assert any(isinstance(event, Notice) for event in pair.client_saw)


@req("sub-05")
def test_a_notification_of_a_subscription_carries_its_id() -> None:
    pair = opened_pair(REVISIONS[LATEST], client=BOTH, server=BOTH)
    pair.client.request("subscriptions/listen", {"notifications": {}})
    pair.pump()
    (call,) = [event for event in pair.server_saw if isinstance(event, Call)]
    id = call.request.id
    with pytest.raises(UsageError, match="never sent on a subscription"):
        pair.server.notify("com.example/said", about=id)
    with pytest.raises(UsageError, match="must be the id of the subscription"):
        pair.server.notify("com.example/changed", about=id)
    assert pair.server.notify("com.example/changed", {"_meta": {META_SUBSCRIPTION_ID: id}}, about=id)


@req("xtask-37")
def test_a_filter_of_an_extension_needs_the_declaration_of_the_client() -> None:
    extensions = Extensions([ping(filters=["pings", "pongs"], revisions=[LATEST])])
    asked = {"notifications": {"pings": ["a"], "toolsListChanged": True}}
    declaring = Terms(REVISIONS[LATEST], {"extensions": {PING: {}}})
    assert extensions.asked(asked, declaring) == {"pings": ["a"]}
    assert extensions.asked({"notifications": {"toolsListChanged": True}}, Terms(REVISIONS[LATEST])) == {}
    assert extensions.asked({"notifications": ["pings"]}, declaring) == {}
    assert extensions.asked(asked, Terms(REVISIONS["2025-11-25"])) == {}
    with pytest.raises(RequestError, match="subscriptions/listen needs the client capability") as caught:
        extensions.asked(asked, Terms(REVISIONS[LATEST]))
    assert caught.value.code == MISSING_CLIENT_CAPABILITY
    assert caught.value.data == {"requiredCapabilities": {"extensions": {PING: {}}}}


# Results.


@req("rtype-02")
def test_a_result_type_needs_an_extension_that_both_sides_declare() -> None:
    latest = REVISIONS[LATEST]
    agreed = opened_pair(latest, client=BOTH, server=BOTH)
    call = call_server(agreed, "tools/call", {"name": "x"})
    assert isinstance(call, Request)
    with pytest.raises(UsageError, match="the result type 'sooner': no extension has it"):
        agreed.server.answer(call.id, {"resultType": "sooner"})
    assert agreed.server.answer(call.id, {"resultType": "later", "id": 7})
    agreed.pump()
    (answer,) = [event for event in agreed.client_saw if isinstance(event, Answered)]
    assert answer.result["id"] == 7
    assert "ttlMs" not in answer.result

    undeclared = opened_pair(latest, server=BOTH)
    call = call_server(undeclared, "tools/call", {"name": "x"})
    assert isinstance(call, Request)
    with pytest.raises(UsageError, match="no extension has it"):
        undeclared.server.answer(call.id, {"resultType": "later"})


@req("rtype-02")
@pytest.mark.parametrize(("declares", "accepted"), [(True, {"later"}), (False, set())])
def test_a_client_accepts_the_result_types_that_both_sides_declare(declares: bool, accepted: set[str]) -> None:
    latest = REVISIONS[LATEST]
    client = opened_pair(latest, client=BOTH, server=BOTH if declares else None).client
    assert client.terms is not None
    assert client.result_types("tools/call", client.terms) == accepted
    assert client.result_types("prompts/get", client.terms) == set()
    assert opened_pair(latest).client.result_types("tools/call", client.terms) == set()
    rounds = Rounds(latest, "tools/call", {}, {}, extensions=client.result_types("tools/call", client.terms))
    if declares:
        assert rounds.receive({"resultType": "later"}) is None
    else:
        with pytest.raises(RemoteProtocolError):
            rounds.receive({"resultType": "later"})


# Progress after the response.


def test_progress_may_follow_the_response() -> None:
    pair = opened_pair(REVISIONS["2025-11-25"])
    assert pair.server.progress_later("p", 1, 2, "half", {"com.example/of": 1})
    (note,) = drain(pair.server)
    params = {"progressToken": "p", "progress": 1, "total": 2, "message": "half"}
    assert note == Notification("notifications/progress", {**params, "_meta": {"com.example/of": 1}})
    assert pair.server.progress_later("p", 1, 2, "half")
    assert drain(pair.server) == [Notification("notifications/progress", params)]
    budget = ByteBudget(Limits(bytes_each=100_000))
    pair.server.account = budget.account("holder")
    assert pair.server.progress_later("p", 2, None, "x" * 80_000)
    assert not pair.server.progress_later("p", 3, None, "x" * 80_000)
    pair.server.connection_lost()
    assert not pair.server.progress_later("p", 4, None, None)


@req("prog-11")
def test_progress_of_a_task_is_a_notice_once_the_request_has_ended() -> None:
    pair = opened_pair(REVISIONS["2025-11-25"])
    id = pair.client.request("tools/call", {"name": "t"}, progress=True)
    pair.pump()
    of_task = {"io.modelcontextprotocol/related-task": {"taskId": "t"}}
    assert pair.server.progress_later(id, 1, None, None, of_task)
    pair.pump()
    assert [type(event) for event in pair.client_saw] == [ProgressReported]  # the request is still open
    pair.server.answer(id, {"task": {"taskId": "t"}})
    pair.forget()
    for token, meta in ((id, of_task), ("of another session", of_task), (id, {"a/b": 1})):
        assert pair.server.progress_later(token, 2, None, None, meta)
    pair.pump()
    told = [event.notification.params["progressToken"] for event in pair.client_saw if isinstance(event, Notice)]
    assert told == [id, "of another session"]


# HTTP.


def test_the_name_header_repeats_the_parameter_of_the_extension() -> None:
    offer = Offer(SERVER_INFO, {}, extensions=BOTH)
    assert offer.mcp_names == {PING: "target"}
    assert Offer(SERVER_INFO, {}).mcp_names == {}
    request = Request(1, PING, {"target": "moon"})
    sent = standard_headers(request, offer.mcp_names)
    assert dict(sent) == {"Mcp-Method": PING, "Mcp-Name": "moon"}
    assert dict(standard_headers(request)) == {"Mcp-Method": PING}

    def fault(fields: Mapping[str, str]) -> str | None:
        return standard_fault(Headers(list(fields.items())), request, required=True, more=offer.mcp_names)

    assert fault(dict(sent)) is None
    assert fault({**dict(sent), "Mcp-Name": "sun"}) == "the Mcp-Name header says 'sun', params.target is 'moon'"
    assert fault({"Mcp-Method": PING}) is None  # only an intermediary needs it
