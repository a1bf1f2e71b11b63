"""Whole links: a client session and a server session that exchange bytes.  These rules hold for any transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.core.pairs import (
    CLIENT_INFO,
    EVERYTHING_OF_A_CLIENT,
    EVERYTHING_OF_A_SERVER,
    LIMITS,
    SERVER_INFO,
    Pair,
    initialize,
    modern,
    opened,
)
from tests.requirements import req
from trio_mcp.core import (
    ACKNOWLEDGED,
    LATEST,
    LATEST_LEGACY,
    META_CLIENT_CAPABILITIES,
    META_SUBSCRIPTION_ID,
    META_VERSION,
    PROMPTS_CHANGED,
    RESOURCES_CHANGED,
    REVISIONS,
    TOOLS_CHANGED,
    Answered,
    Batch,
    Call,
    ClientProtocol,
    Event,
    InvalidMessage,
    LineFramer,
    LinkKind,
    Listeners,
    Notification,
    NotInThisRevision,
    Offer,
    Request,
    RequestCancelled,
    RequestError,
    Response,
    Revision,
    ServerProtocol,
    SessionAgreed,
    SessionClosed,
    SessionProtocol,
    Subscriptions,
    Terms,
    UsageError,
    change_of,
    decode,
    encode,
    listen_params,
    resource_updated,
)
from trio_mcp.core.http import Exchange, Headers, HttpPolicy, HttpRequest, Serve, judge, request_headers

EVERY_REVISION = pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)


class Pipe:
    """A transport that the package does not know: bytes in chunks of a stated size, one way."""

    def __init__(self, sender: SessionProtocol, receiver: SessionProtocol, chunk: int) -> None:
        self.sender, self.receiver, self.chunk = sender, receiver, chunk
        self.framer = LineFramer(LIMITS.message_bytes)

    def carry(self) -> list[Event]:
        data = b"".join(encode(message) + b"\n" for message, _ in self.sender.outgoing())
        events: list[Event] = []
        for at in range(0, len(data), self.chunk):
            for line in self.framer.feed(data[at : at + self.chunk]):
                message = decode(line, LIMITS) if isinstance(line, bytes) else line
                assert not isinstance(message, InvalidMessage)
                events += self.receiver.receive(message, 0.0)
        return events


@req("trans-01", "trans-02", "trans-03", "core-02", "core-03")
@EVERY_REVISION
@pytest.mark.parametrize("chunk", [1, 7, 100_000])
def test_any_bytes_that_arrive_in_order_carry_the_whole_protocol(revision: Revision, chunk: int) -> None:
    client = ClientProtocol(Offer(CLIENT_INFO, revisions=(revision,)))
    server = ServerProtocol(Offer(SERVER_INFO, {"tools": {}}))
    there, back = Pipe(client, server, chunk), Pipe(server, client, chunk)
    client.open()
    while not client.opened:
        there.carry()
        back.carry()
    first, second = client.request("tools/list"), client.request("tools/call", {"name": "ü"}, progress=True)
    calls = [event for event in there.carry() if isinstance(event, Call)]
    assert [call.request.id for call in calls] == [first, second]
    assert {call.terms.revision for call in calls} == {revision}
    server.progress(second, 1)
    server.answer(second, {"content": []})
    server.answer(first, {"tools": []})
    assert [event.id for event in back.carry() if isinstance(event, Answered)] == [second, first]


@req("http-08", "http-10", "http-11", "http-12", "batch-03")
@EVERY_REVISION
def test_a_client_sends_no_batches(revision: Revision) -> None:
    link = opened(revision)
    ids = [link.client.request("tools/list") for _ in range(3)]
    link.client.cancel(ids[0])
    messages = [message for message, _ in link.client.outgoing()]
    assert [type(message) for message in messages] == [Request, Request, Request, Notification]
    assert all(encode(message).startswith(b"{") for message in messages)


@req("type-14", "meta-10")
@pytest.mark.parametrize("method", LATEST.requests[opened(LATEST).client.role])
def test_every_modern_request_carries_its_terms(method: str) -> None:
    client = opened(LATEST).client
    if method == "server/discover":
        client = ClientProtocol(Offer(CLIENT_INFO, EVERYTHING_OF_A_CLIENT))
        client.open()
    else:
        client.request(method)
    ((message, _),) = client.outgoing()
    assert isinstance(message, Request)
    assert message.method == method
    meta = message.params["_meta"]
    assert meta[META_VERSION] == LATEST.name
    assert meta[META_CLIENT_CAPABILITIES] == LATEST.declarable(client.role, EVERYTHING_OF_A_CLIENT)


@req("http-24", "http-39", "http-121")
def test_messages_of_a_modern_request_are_tagged_with_its_id() -> None:
    server = ServerProtocol(Offer(SERVER_INFO, EVERYTHING_OF_A_SERVER))
    for id in ("a", "b"):
        server.receive(modern(id, "tools/call", {"name": "x"}, logLevel="debug"), 0.0)
    server.notify("notifications/message", {"level": "info", "data": 1}, about="a")
    server.notify("notifications/message", {"level": "info", "data": 2}, about="b")
    server.answer("b", {"content": []})
    server.answer("a", {"content": []})
    assert [about for _, about in server.outgoing()] == ["a", "b", "b", "a"]
    assert server.outgoing() == []


@req("http-25", "mrtr-01", "trans-05")
@pytest.mark.parametrize("method", LATEST.input_requests)
def test_a_modern_server_sends_no_request_on_any_stream(method: str) -> None:
    server = ServerProtocol(Offer(SERVER_INFO, EVERYTHING_OF_A_SERVER), link=LinkKind.EXCHANGE)
    server.receive(modern(1, "tools/call", {"name": "x"}, clientCapabilities=EVERYTHING_OF_A_CLIENT), 0.0)
    with pytest.raises(NotInThisRevision, match="input-required"):
        server.request(method, about=1)
    with pytest.raises(UsageError):
        server.request(method)
    assert server.outgoing() == []


@req("http-36", "http-39", "http-23", "http-35")
def test_in_a_session_only_messages_about_a_request_are_tagged_with_its_id() -> None:
    terms = Terms(LATEST_LEGACY, EVERYTHING_OF_A_CLIENT)
    server = ServerProtocol(Offer(SERVER_INFO, EVERYTHING_OF_A_SERVER), link=LinkKind.SESSION, terms=terms)
    server.receive(Request(1, "tools/call", {"name": "x"}), 0.0)
    server.notify("notifications/tools/list_changed")
    server.request("roots/list")
    server.request("sampling/createMessage", {"messages": [], "maxTokens": 1}, about=1)
    server.answer(1, {"content": []})
    sent = [(type(message), about) for message, about in server.outgoing()]
    assert sent == [(Notification, None), (Request, None), (Request, 1), (Response, 1)]


def test_changes_published_during_the_handshake_are_no_error() -> None:
    server, listeners = ServerProtocol(Offer(SERVER_INFO, EVERYTHING_OF_A_SERVER)), Listeners[int]()

    def publish() -> list[bool]:
        return [server.notify(note.method, note.params) for _, note in listeners.publish(TOOLS_CHANGED)]

    for message in (initialize(), Notification("notifications/initialized")):
        assert not any(publish())
        for event in server.receive(message, 0.0):
            if isinstance(event, SessionAgreed):
                listeners.add_session(0, server.declared(event.terms.revision))
    assert publish() == [True]
    assert [type(message) for message, _ in server.outgoing()] == [Response, Notification]


@req("batch-03", "state-01")
def test_a_modern_request_in_a_batch_is_refused_and_the_others_are_served() -> None:
    server = ServerProtocol(Offer(SERVER_INFO, EVERYTHING_OF_A_SERVER), terms=Terms(REVISIONS["2025-03-26"]))
    modern_ones = (modern(2, "subscriptions/listen", {"notifications": {}}), modern("3", "tools/call", {"name": "x"}))
    events = server.receive(Batch((Request(1, "tools/list"), *modern_ones)), 0.0)
    assert [event.request.id for event in events if isinstance(event, Call)] == [1]
    server.answer(1, {"tools": []})
    ((batch, _),) = server.outgoing()
    assert isinstance(batch, Batch)
    assert [getattr(each, "code", None) for each in batch.items] == [-32600, -32600, None]
    assert [getattr(each, "id", None) for each in batch.items] == [2, "3", 1]


def test_a_wrong_call_of_a_handler_is_refused_and_can_be_corrected() -> None:
    server = ServerProtocol(Offer(SERVER_INFO, EVERYTHING_OF_A_SERVER))
    wanting = modern(1, "tools/call", {"name": "x"})
    wanting.params["_meta"]["progressToken"] = "t"
    server.receive(wanting, 0.0)
    server.receive(modern(2, "tools/call", {"name": "x"}), 0.0)
    wrong: Any = [1]
    with pytest.raises(UsageError):
        server.refuse(1, RequestError(wrong, "a code that is none"))
    with pytest.raises(UsageError, match="must be a string, got list"):
        server.progress(1, 1, message=wrong)
    assert server.refuse(1, RequestError(-32603, "put right"))
    assert server.serves(2)


@req("http-118", "life-17")
@EVERY_REVISION
def test_the_end_of_a_link_sends_no_message(revision: Revision) -> None:
    link = opened(revision)
    waiting = link.client.request("tools/list")
    link.pump()
    (lost,) = link.client.connection_lost()
    assert getattr(lost, "id", None) == waiting
    assert [type(event) for event in link.server.connection_lost()] == [RequestCancelled]
    assert (link.client.outgoing(), link.server.outgoing()) == ([], [])
    with pytest.raises(SessionClosed):
        link.client.request("tools/list")


@req("arch-03")
def test_a_client_session_is_for_one_server() -> None:
    link = opened(LATEST)
    with pytest.raises(UsageError, match="once"):
        link.client.open()


@req("ver-05")
@pytest.mark.parametrize(
    ("capabilities", "why"),
    [({"extensions": {"tasks": {}}}, "prefix"), ({"tools": True}, "tools must be an object")],
)
def test_an_offer_with_malformed_capabilities_is_refused(capabilities: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Offer(SERVER_INFO, capabilities)


@req("ver-15")
def test_a_handshake_holds_for_its_own_link_only() -> None:
    offer = Offer(SERVER_INFO, EVERYTHING_OF_A_SERVER)
    legacy = Pair(ClientProtocol(Offer(CLIENT_INFO, revisions=(LATEST_LEGACY,))), ServerProtocol(offer))
    legacy.client.open()
    legacy.pump()
    assert legacy.server.opened
    other = ServerProtocol(offer)
    other.receive(Request(1, "tools/list"), 0.0)
    ((message, _),) = other.outgoing()
    assert not isinstance(message, Response | Batch)


# Subscriptions over links


def _listening() -> tuple[Pair, Listeners[int], Subscriptions, int]:
    link, listeners, subscriptions = opened(LATEST), Listeners[int](), Subscriptions()
    id = link.client.request("subscriptions/listen", listen_params([TOOLS_CHANGED]))
    subscriptions.ask(id, [TOOLS_CHANGED])
    link.pump()
    (call,) = (event for event in link.server_saw if isinstance(event, Call))
    acknowledged = listeners.listen(0, call.request, EVERYTHING_OF_A_SERVER)
    assert link.server.notify(acknowledged.method, acknowledged.params, about=id)
    link.pump()
    link.forget()
    return link, listeners, subscriptions, id


@req("sub-01", "sub-02", "sub-03", "sub-05", "sub-13")
def test_a_subscription_carries_its_acknowledgement_then_its_own_changes() -> None:
    server, listeners = ServerProtocol(Offer(SERVER_INFO, EVERYTHING_OF_A_SERVER)), Listeners[int | str]()
    asked = {1: [TOOLS_CHANGED], "1": [PROMPTS_CHANGED, TOOLS_CHANGED], 2: [resource_updated("a:b")], 3: []}
    changes = [TOOLS_CHANGED, PROMPTS_CHANGED, RESOURCES_CHANGED, resource_updated("a:b"), resource_updated("a:c")]

    def publish() -> None:
        for change in changes:
            for key, note in listeners.publish(change):
                assert server.notify(note.method, note.params, about=key)

    server.receive(modern("call", "tools/call", {"name": "x"}), 0.0)
    for id, wanted in asked.items():
        publish()
        (event,) = server.receive(modern(id, "subscriptions/listen", listen_params(wanted)), 0.0)
        assert isinstance(event, Call)
        acknowledged = listeners.listen(id, event.request, server.declared(event.terms.revision))
        assert server.notify(acknowledged.method, acknowledged.params, about=id)
    publish()

    sent: dict[Any, list[Notification]] = {id: [] for id in asked}
    for message, about in server.outgoing():
        assert isinstance(message, Notification)
        sent[about].append(message)
    for id, notes in sent.items():
        marks = [note.params["_meta"][META_SUBSCRIPTION_ID] for note in notes]
        assert all((type(mark), mark) == (type(id), id) for mark in marks)
        assert [note.method for note in notes].index(ACKNOWLEDGED) == 0
        assert {change_of(note) for note in notes[1:]} == set(asked[id])
    for change in changes:  # a change is refused on another request, and on no request
        for about in ("call", None):
            with pytest.raises(UsageError):
                server.notify(change.notification("call").method, change.notification("call").params, about=about)


def _methods_after_the_server_ends_it(link: Pair, listeners: Listeners[int], id: int) -> Iterator[str]:
    result = listeners.close(0)
    assert result is not None
    link.server.answer(id, result.result)
    link.pump()
    yield from (event.method for event in link.client_saw if isinstance(event, Answered))
    yield from (message.method for message in link.sent if isinstance(message, Notification))


@req("cancel-12", "sub-08")
def test_ending_a_subscription_on_a_shared_channel_sends_result_and_notice() -> None:
    link, listeners, _, id = _listening()
    assert list(_methods_after_the_server_ends_it(link, listeners, id)) == [
        "subscriptions/listen",
        "notifications/cancelled",
    ]


@req("sub-12", "cancel-16")
def test_a_client_cancels_a_subscription_on_a_shared_channel_by_a_notice() -> None:
    link, listeners, subscriptions, id = _listening()
    subscriptions.close(id)
    assert link.client.cancel(id)
    link.pump()
    assert [type(event) for event in link.server_saw] == [RequestCancelled]
    assert listeners.forget(0)
    assert listeners.publish(TOOLS_CHANGED) == []


@req("sub-10", "state-06")
def test_a_new_link_has_to_subscribe_again() -> None:
    link, listeners, subscriptions, _ = _listening()
    link.server.connection_lost()
    link.client.connection_lost()
    listeners.forget(0)
    (broken,) = subscriptions.connection_lost()
    assert listeners.publish(TOOLS_CHANGED) == []  # nothing is kept for a client that may reconnect
    again = opened(LATEST)
    again.client.request("subscriptions/listen", listen_params(broken.asked))
    again.pump()
    (call,) = (event for event in again.server_saw if isinstance(event, Call))
    listeners.listen(1, call.request, EVERYTHING_OF_A_SERVER)
    assert [key for key, _ in listeners.publish(TOOLS_CHANGED)] == [1]


@req("http-66", "http-74")
@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.request("tools/list"),
        lambda client: client.request("tools/call", {"name": "ünïcode", "arguments": {}}),
        lambda client: client.request("resources/read", {"uri": "file:///a b"}),
    ],
)
def test_requests_of_a_client_session_pass_the_checks_of_an_http_server(ask: Callable[[ClientProtocol], int]) -> None:
    client = opened(LATEST).client
    ask(client)
    ((message, _),) = client.outgoing()
    assert isinstance(message, Request)
    exchange = Exchange("http://127.0.0.1/mcp", LATEST, message)
    headers = Headers([*request_headers(exchange), ("Host", "127.0.0.1")])
    request = HttpRequest("POST", "/mcp", headers, encode(message))
    assert isinstance(judge(HttpPolicy(), request, find_session=lambda _: None), Serve)
