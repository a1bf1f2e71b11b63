"""`Connection`: events do not depend on chunk boundaries, any bytes are handled, and two connections work together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.pairs import (
    CLIENT_INFO,
    EVERYTHING_OF_A_CLIENT,
    EVERYTHING_OF_A_SERVER,
    SERVER_INFO,
    initialize,
    modern,
)
from tests.requirements import req
from trio_mcp.core import (
    LEGACY,
    REVISIONS,
    Answered,
    Call,
    ClientProtocol,
    Connection,
    ConnectionLost,
    Event,
    InvalidAnswer,
    InvalidMessage,
    Limits,
    LinkKind,
    Message,
    Notice,
    Notification,
    NotInThisRevision,
    Offer,
    Opened,
    OpeningFailed,
    Outcome,
    PeerMistake,
    ProgressReported,
    Refused,
    RequestCancelled,
    RequestError,
    Response,
    Revision,
    ServerProtocol,
    SessionAgreed,
    SessionClosed,
    TimedOut,
    UsageError,
    decode,
    encode,
)

SMALL = Limits(message_bytes=400)
each_revision = pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
each_chunk = pytest.mark.parametrize("size", [1, 7, 100_000])


def server(**more: Any) -> Connection[ServerProtocol]:
    return Connection(ServerProtocol(Offer(SERVER_INFO, EVERYTHING_OF_A_SERVER), **more))


def client(*revisions: Revision, **more: Any) -> Connection[ClientProtocol]:
    offer = Offer(CLIENT_INFO, EVERYTHING_OF_A_CLIENT, revisions or tuple(REVISIONS.values()))
    return Connection(ClientProtocol(offer, **more))


def sent(connection: Connection[Any]) -> list[Any]:
    """The messages to write, as JSON."""
    return [json.loads(line) for line in connection.data_to_send().splitlines()]


@attrs.define
class ConnectionPair:
    """Two connections that exchange bytes in chunks of one size."""

    client: Connection[ClientProtocol]
    server: Connection[ServerProtocol]
    size: int = 100_000
    client_saw: list[Event] = attrs.field(factory=list)
    server_saw: list[Event] = attrs.field(factory=list)

    def carry(self) -> tuple[list[Event], list[Event]]:
        """Carry bytes both ways until no side sends more.  Returns the new events of the client and of the server."""
        while self._one_way(self.client, self.server) or self._one_way(self.server, self.client):
            self.client_saw += self.client.events()
            self.server_saw += self.server.events()
        saw = self.client_saw, self.server_saw
        self.client_saw, self.server_saw = [], []
        return saw

    def _one_way(self, sender: Connection[Any], receiver: Connection[Any]) -> bool:
        data = sender.data_to_send()
        for at in range(0, len(data), self.size):
            receiver.receive_data(data[at : at + self.size])
        return data != b""


def opened_pair(revision: Revision, size: int = 100_000) -> ConnectionPair:
    pair = ConnectionPair(client(revision), server(), size)
    pair.client.session.open()
    client_saw, server_saw = pair.carry()
    assert client_saw == [Opened(pair.client.session.terms)]  # type: ignore[arg-type]
    assert [type(event) for event in server_saw] == ([SessionAgreed, Opened] if revision.handshake else [])
    return pair


# Both roles.


@req("trans-01", "trans-02", "trans-03")
@each_revision
@each_chunk
def test_two_connections_serve_a_call_with_progress(revision: Revision, size: int) -> None:
    pair = opened_pair(revision, size)
    first = pair.client.request("tools/list")
    second = pair.client.request("tools/call", {"name": "ü\u2028"}, progress=True)
    _, calls = pair.carry()
    assert [each.request.id for each in calls if isinstance(each, Call)] == [first, second]
    assert {each.terms.revision for each in calls if isinstance(each, Call)} == {revision}
    assert pair.server.progress(second, 1, 2, "half")
    assert pair.server.answer(second, {"content": []})
    assert pair.server.refuse(first, RequestError(-32603, "no"))
    saw, _ = pair.carry()
    assert saw[0] == ProgressReported(second, 1, 2, "half" if revision.progress_message else None)
    assert [type(each) for each in saw[1:]] == [Answered, Refused]
    assert [each.id for each in saw if isinstance(each, Outcome)] == [second, first]


@pytest.mark.parametrize("revision", LEGACY, ids=str)
def test_each_side_sends_requests_and_notifications_in_a_session(revision: Revision) -> None:
    pair = opened_pair(revision)
    for asks, serves, method in (
        (pair.client, pair.server, "tools/list"),
        (pair.server, pair.client, "roots/list"),
    ):
        id = asks.request(method)
        pair.carry()
        assert serves.answer(id, {})
        saw = [event for each in pair.carry() for event in each]
        assert [type(event) for event in saw] == [Answered]
    assert pair.server.notify("notifications/tools/list_changed")
    assert pair.client.notify("notifications/roots/list_changed")
    saw = [event for each in pair.carry() for event in each]
    assert [event.notification.method for event in saw if isinstance(event, Notice)] == [
        "notifications/tools/list_changed",
        "notifications/roots/list_changed",
    ]


def test_a_modern_server_notifies_about_a_request_and_sends_no_requests() -> None:
    pair = opened_pair(REVISIONS["2026-07-28"])
    pair.client.session.log_level = "info"
    id = pair.client.request("tools/call", {"name": "x"})
    pair.carry()
    assert pair.server.notify("notifications/message", {"level": "info", "data": 1}, about=id)
    with pytest.raises(NotInThisRevision):
        pair.server.request("roots/list", about=id)
    assert [type(event) for event in pair.carry()[0]] == [Notice]


@each_revision
def test_a_cancelled_call_is_stopped_and_its_late_answer_is_dropped(revision: Revision) -> None:
    pair = opened_pair(revision)
    early, late = pair.client.request("tools/call", {"name": "a"}), pair.client.request("tools/call", {"name": "b"})
    pair.carry()
    assert pair.server.answer(late, {"content": []})
    in_flight = pair.server.data_to_send()
    for id in (early, late):
        assert pair.client.cancel(id, "enough")
        assert not pair.client.cancel(id)
    pair.client.receive_data(in_flight)
    assert pair.client.events() == []
    assert pair.carry()[1] == [RequestCancelled(early, "tools/call", "enough")]
    assert not pair.server.answer(early, {"content": []})
    assert pair.server.data_to_send() == b""


def test_a_response_without_a_request_is_reported() -> None:
    pair = opened_pair(REVISIONS["2025-11-25"])
    pair.client.receive_data(b'{"jsonrpc":"2.0","id":99,"result":{}}\n')
    assert [type(event) for event in pair.client.events()] == [PeerMistake]
    assert pair.client.data_to_send() == b""


def test_each_side_answers_a_ping_itself() -> None:
    pair = opened_pair(REVISIONS["2025-06-18"])
    for connection in (pair.client, pair.server):
        connection.receive_data(b'{"jsonrpc":"2.0","id":"p","method":"ping"}\n')
        assert connection.events() == []
        assert sent(connection) == [{"jsonrpc": "2.0", "id": "p", "result": {}}]


def test_a_connection_refuses_the_links_of_http() -> None:
    for link in (LinkKind.SESSION, LinkKind.EXCHANGE):
        with pytest.raises(UsageError, match="one byte stream"):
            server(link=link)


# Bytes.

LONG = b'{"jsonrpc":"2.0","id":"long","method":"tools/list","params":{"x":"' + b"y" * 500 + b'"}}'


def lines(*messages: bytes | Message) -> bytes:
    return b"".join((each if isinstance(each, bytes) else encode(each)) + b"\n" for each in messages)  # type: ignore[arg-type]


HANDSHAKE: Sequence[bytes | Message] = (
    b"stray print",
    initialize(0, "2025-03-26"),
    b'{"jsonrpc":"2.0","method":"notifications/initialized"}\r',
    b"\xff\xfe",
    b" ",
    encode(modern("ü", "tools/call", {"name": "x"})),
    LONG,
    b'[{"jsonrpc":"2.0","id":2,"method":"tools/list"},{"jsonrpc":"2.0","id":3,"method":"ping"},7]',
    Notification("notifications/cancelled", {"requestId": 2}),
    Response(7, {}),
    b'{"jsonrpc":"2.0","id":4,"method":"no/such"}',
    b"[]",
)
# Its last line has no newline.
WHOLE = lines(*HANDSHAKE) + b'{"jsonrpc":"2.0","id":5,"method":"prompts/list"}'


def run_server(data: bytes, cuts: Sequence[int]) -> tuple[list[Event], bytes]:
    connection = server(limits=SMALL)
    for start, end in pairwise([0, *cuts, len(data)]):
        connection.receive_data(memoryview(data)[start:end])
    connection.receive_eof()
    return connection.events(), connection.data_to_send()


cuts = st.sets(st.integers(1, len(WHOLE) - 1)).map(sorted)


@given(cuts)
@settings(max_examples=150)
def test_the_same_bytes_give_the_same_events_and_replies_in_any_chunks(cuts: Sequence[int]) -> None:
    assert run_server(WHOLE, cuts) == run_server(WHOLE, ())


def test_the_bytes_of_that_test_cause_all_kinds_of_events_and_errors() -> None:
    events, replies = run_server(WHOLE, ())
    assert {type(event) for event in events} == {SessionAgreed, Opened, Call, RequestCancelled, PeerMistake}
    assert [event.request.id for event in events if isinstance(event, Call)] == ["ü", 2, 5]
    answered = [json.loads(line) for line in replies.splitlines()]
    errors = [each for each in answered if isinstance(each, dict) and "error" in each]
    assert [(each["error"]["code"], each["id"]) for each in errors] == [
        (-32700, None), (-32700, None), (-32600, "long"), (-32601, 4), (-32600, None),
    ]  # fmt: skip
    assert [[each["id"] for each in batch] for batch in answered if isinstance(batch, list)] == [[None, 3]]


ANSWERS = lines(
    b"a banner",
    b'{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},'
    b'"serverInfo":{"name":"s","version":"1"}}}',
    b'{"jsonrpc":"2.0","id":"p","method":"ping"}',
    b'{"jsonrpc":"2.0","id":"r","method":"roots/list"}',
    b'{"jsonrpc":"2.0","id":2,"result":{}}',
    b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}',
    LONG,
)


def run_client(cuts: Sequence[int]) -> tuple[list[Event], bytes]:
    connection = client(REVISIONS["2025-06-18"], limits=SMALL)
    connection.session.open()
    for start, end in pairwise([0, *cuts, len(ANSWERS)]):
        connection.receive_data(ANSWERS[start:end])
    return connection.events(), connection.data_to_send()


@given(st.sets(st.integers(1, len(ANSWERS) - 1)).map(sorted))
@settings(max_examples=100)
def test_the_same_bytes_give_a_client_the_same_events_in_any_chunks(cuts: Sequence[int]) -> None:
    events, sent = run_client(cuts)
    assert (events, sent) == run_client(())
    assert [type(event) for event in events if not isinstance(event, PeerMistake)] == [Opened, Call, Notice]


pieces = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"\n", b"\r\n", b"{", b"}", b"[", b'"', *lines(*HANDSHAKE).splitlines(keepends=True)]),
)


@given(st.lists(st.lists(pieces, max_size=4).map(b"".join), max_size=8), st.booleans())
@settings(max_examples=300)
def test_any_bytes_give_events_or_replies_but_no_exception(chunks: Sequence[bytes], serves: bool) -> None:
    connection: Connection[Any] = server(limits=SMALL) if serves else client(limits=SMALL)
    if not serves:
        connection.session.open(probe_until=1.0)
    for now, chunk in enumerate(chunks):
        if chunk:
            connection.receive_data(chunk, now)
    connection.receive_eof(len(chunks))
    assert all(isinstance(event, Event) for event in connection.events())
    assert not any(
        isinstance(decode(line, Limits()), InvalidMessage) for line in connection.data_to_send().splitlines()
    )


@given(st.binary(max_size=60).filter(lambda line: line.strip() and b"\n" not in line))
def test_a_line_that_is_no_message_gets_one_error_and_the_next_is_read(line: bytes) -> None:
    connection = server()
    connection.receive_data(line + b"\n" + encode(modern(1, "tools/list")) + b"\n")
    *mistakes, call = connection.events()
    assert isinstance(call, Call)
    assert [type(event) for event in mistakes] == [PeerMistake]
    assert [each["error"]["code"] in (-32700, -32600) for each in sent(connection)] == [True]


@req("core-10")
def test_an_error_without_an_id_is_written_for_the_revision_at_that_time() -> None:
    junk, opening = b"junk\n", lines(initialize(1, "2025-11-25"))
    at_once, one_by_one = server(), server()
    at_once.receive_data(junk + opening + junk)
    for each in (junk, opening, junk):
        one_by_one.receive_data(each)
    first, _, last = answers = sent(at_once)
    assert answers == sent(one_by_one)
    assert first["id"] is None
    assert "id" not in last


def test_a_message_that_is_too_long_is_refused_by_its_id() -> None:
    connection = server(limits=SMALL)
    connection.receive_data(LONG[:450])
    assert [error["id"] for error in sent(connection)] == ["long"]  # before the end of the message
    connection.receive_data(LONG[450:] + b"\n" + encode(modern(2, "tools/list")) + b"\n")
    assert [type(event) for event in connection.events()] == [PeerMistake, Call]
    assert connection.data_to_send() == b""


def test_an_answer_that_is_too_long_ends_its_request() -> None:
    pair = ConnectionPair(client(limits=Limits(message_bytes=4000)), server())
    pair.client.session.open()
    pair.carry()
    id = pair.client.request("tools/list")
    pair.carry()
    pair.server.answer(id, {"tools": [], "x": "y" * 4000})
    (outcome,) = pair.carry()[0]
    assert isinstance(outcome, InvalidAnswer)
    assert (outcome.id, outcome.method) == (id, "tools/list")
    assert "4000 bytes (Limits.message_bytes)" in outcome.why


def test_events_are_returned_once_and_need_not_be_read() -> None:
    connection = server()
    connection.receive_data(lines(modern(1, "tools/list")))
    assert connection.answer(1, {"tools": []})
    assert [message["id"] for message in sent(connection)] == [1]
    assert [type(event) for event in connection.events()] == [Call]
    assert connection.events() == []
    assert connection.data_to_send() == b""


def test_a_value_that_cannot_be_written_is_refused_without_effect() -> None:
    connection = server()
    connection.receive_data(lines(modern(1, "tools/list")))
    with pytest.raises(UsageError):
        connection.answer(1, {"tools": {object()}})
    assert connection.data_to_send() == b""
    assert connection.answer(1, {"tools": []})


# Deadlines.


def test_a_deadline_is_noticed_by_a_tick_or_by_later_bytes() -> None:
    pair = opened_pair(REVISIONS["2025-11-25"])
    assert pair.client.next_deadline() is None
    first, second = pair.client.request("tools/list", deadline=1.0), pair.client.request("tools/list", deadline=2.0)
    assert pair.client.next_deadline() == 1.0
    pair.client.receive_data(b"\n")
    pair.client.tick(0.9)
    assert pair.client.events() == []
    pair.client.tick(1.0)
    pair.client.receive_data(b'{"jsonrpc":"2.0","id":99,"method":"ping"}\n', 2.0)
    assert pair.client.events() == [TimedOut(first, "tools/list"), TimedOut(second, "tools/list")]
    assert pair.client.next_deadline() is None
    third = pair.client.request("tools/list", deadline=3.0)
    pair.client.receive_data(b'{"jsonrpc":"2.0","id":98,"method":"ping"}')
    pair.client.receive_eof(3.0)
    assert pair.client.events() == [TimedOut(third, "tools/list")]


# The end of the connection.


@pytest.mark.parametrize("eof", ["receive_eof", "no bytes"])
def test_at_the_end_of_input_a_server_still_answers_open_requests(eof: str) -> None:
    connection = server()
    connection.receive_data(encode(modern(1, "tools/list")))  # without a newline
    assert connection.events() == []
    for _ in range(2):
        connection.receive_eof() if eof == "receive_eof" else connection.receive_data(b"")
    assert [type(event) for event in connection.events()] == [Call]
    assert connection.answer(1, {"tools": []})
    assert [message["id"] for message in sent(connection)] == [1]
    with pytest.raises(UsageError, match="4 bytes came after its end"):
        connection.receive_data(b"more")
    connection.connection_lost()
    assert connection.events() == []


def test_at_the_end_of_input_the_requests_of_a_client_are_lost() -> None:
    pair = opened_pair(REVISIONS["2025-11-25"])
    id = pair.client.request("tools/list")
    pair.client.receive_eof()
    (lost,) = pair.client.events()
    assert isinstance(lost, ConnectionLost)
    assert lost.id == id
    with pytest.raises(SessionClosed):
        pair.client.request("tools/list")


@pytest.mark.parametrize("end", ["receive_eof", "connection_lost"])
@each_revision
def test_an_opening_that_the_peer_does_not_answer_fails(revision: Revision, end: str) -> None:
    connection = client(revision)
    connection.session.open()
    getattr(connection, end)()
    (failed,) = connection.events()
    assert isinstance(failed, OpeningFailed)
    connection.receive_data(b"junk\n")
    connection.receive_eof()
    assert connection.events() == []


@each_revision
def test_a_lost_connection_ends_each_request_once(revision: Revision) -> None:
    pair = opened_pair(revision)
    id = pair.client.request("tools/call", {"name": "x"})
    pair.carry()
    for connection in (pair.client, pair.server):
        connection.connection_lost("a write failed")
        connection.connection_lost()
    assert pair.client.events() == [ConnectionLost(id, "tools/call", "a write failed")]
    assert pair.server.events() == [RequestCancelled(id, "tools/call", "a write failed")]
    assert not pair.server.answer(id, {})
    assert not pair.server.notify("notifications/tools/list_changed")
    for connection in (pair.client, pair.server):
        connection.receive_data(b"junk\n")
        connection.receive_eof()
        assert (connection.events(), connection.data_to_send()) == ([], b"")
