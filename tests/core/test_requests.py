"""One peer, or two peers that exchange bytes: each rule of requests, checked by the events and messages.

`test_races` plays the events of a request in every order.  This module tests each rule by itself.
"""

from __future__ import annotations

import datetime
import enum
import json
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    LOG_LEVELS,
    REVISIONS,
    Answered,
    Batch,
    ByteBudget,
    ConnectionLost,
    Error,
    Event,
    Id,
    InvalidAnswer,
    InvalidMessage,
    Limits,
    LinkKind,
    Message,
    Notification,
    Outcome,
    Peer,
    PeerComplaint,
    PeerMistake,
    ProgressReported,
    Refused,
    Request,
    RequestCancelled,
    RequestError,
    Response,
    Revision,
    Role,
    SessionClosed,
    SubscriptionEnded,
    Terms,
    TimedOut,
    UsageError,
    charged,
    decode,
    encode,
    shown,
)

CLIENT, SERVER = Role.CLIENT, Role.SERVER
DUPLEX, SESSION, EXCHANGE = LinkKind
LISTEN = "subscriptions/listen"
UNCANCELLABLE = ("initialize", "server/discover")
LIMITS = Limits()
BATCHES = Terms(REVISIONS["2025-03-26"])
PARAMS = {"name": "add", "arguments": {"a": 1}}


def sent(peer: Peer) -> list[Message]:
    return [message for message, _ in peer.outgoing()]


def carry(sender: Peer, receiver: Peer, now: float = 0) -> list[Event]:
    """Deliver the queued messages of the sender as bytes.  Return the events that the receiver reports."""
    events: list[Event] = []
    for message in sent(sender):
        events += receiver.receive(decode(encode(message), LIMITS), now)
    return events


def cancellation(id: object, **more: object) -> Notification:
    return Notification("notifications/cancelled", {"requestId": id, **more})


def progress(token: object, value: object, **more: object) -> Notification:
    return Notification("notifications/progress", {"progressToken": token, "progress": value, **more})


def mistakes(events: list[Event]) -> list[str]:
    assert all(isinstance(event, PeerMistake) for event in events)
    return [event.why for event in events if isinstance(event, PeerMistake)]


def serving(peer: Peer, id: Id = 7, method: str = "tools/call", token: object = None) -> Peer:
    """Make `peer` serve this request, and return it."""
    request = Request(id, method, {} if token is None else {"_meta": {"progressToken": token}})
    assert peer.receive(request, 0) == [request]
    return peer


@pytest.fixture(params=Role, ids=lambda role: f"{role.value} sends")
def pair(request: pytest.FixtureRequest) -> tuple[Peer, Peer]:
    """The peer that sends the requests and the peer that serves them, in both assignments of the roles."""
    return Peer(request.param), Peer(request.param.other)


# Requests and their outcomes.


@req("core-09")
def test_a_request_is_answered(pair: tuple[Peer, Peer]) -> None:
    ours, theirs = pair
    id = ours.request("tools/call", PARAMS)
    assert carry(ours, theirs) == [Request(id, "tools/call", PARAMS)]
    assert (ours.waiting, theirs.serving) == (1, 1)
    assert theirs.serves(id)
    assert theirs.answer(id, {"sum": 2}) is True
    assert carry(theirs, ours) == [Answered(id, "tools/call", {"sum": 2})]
    assert (ours.waiting, theirs.serving) == (0, 0)
    assert not theirs.serves(id)


@req("core-17")
@pytest.mark.parametrize("data", [{"left": 1}, [1], "text", 0, False])
def test_a_request_is_refused(pair: tuple[Peer, Peer], data: object) -> None:
    ours, theirs = pair
    id = ours.request("tools/call")
    carry(ours, theirs)
    assert theirs.refuse(id, RequestError(-32602, "no such tool", data)) is True
    assert carry(theirs, ours) == [Refused(id, "tools/call", Error(id, -32602, "no such tool", data))]
    assert (ours.waiting, theirs.serving) == (0, 0)


CIRCULAR: dict[str, Any] = {}
CIRCULAR["again"] = CIRCULAR


UNWRITABLE = {
    "nan": {"a": math.nan},
    "surrogate": {"a": "\ud800"},
    "date": {"a": datetime.date(2026, 7, 28)},
    "circular": CIRCULAR,
}
SENDING: dict[str, Any] = {
    "request": lambda peer, wrong: peer.request("tools/call", wrong),
    "request with all": lambda peer, wrong: peer.request("tools/call", wrong, deadline=5, progress=True, about=7),
    "notify": lambda peer, wrong: peer.notify("notifications/x", wrong),
    "notify about": lambda peer, wrong: peer.notify("notifications/x", wrong, about=7),
    "progress": lambda peer, wrong: peer.progress(7, 1, message=wrong),
    "answer": lambda peer, wrong: peer.answer(7, wrong),
    "answer in a batch": lambda peer, wrong: peer.answer(8, wrong),
    "refuse": lambda peer, wrong: peer.refuse(7, RequestError(1, "no", wrong)),
    "refuse in a batch": lambda peer, wrong: peer.refuse(8, RequestError(1, "no", wrong)),
    "cancel": lambda peer, wrong: peer.cancel(1, wrong),
}


class Stream:
    """A label of a transport for the stream on which a message arrived."""


@pytest.mark.parametrize("link", [SESSION, EXCHANGE])
def test_the_stream_of_a_request_is_forgotten_with_its_answer(link: LinkKind) -> None:
    peer, stream = Peer(SERVER, link=link), Stream()
    gone = weakref.ref(stream)
    peer.receive(Request(7, "tools/call"), 0, about=stream)
    peer.answer(7, {})
    assert [label for _, label in peer.outgoing()] == [stream]
    del stream
    assert gone() is None


@pytest.mark.parametrize("wrong", UNWRITABLE.values(), ids=UNWRITABLE)
@pytest.mark.parametrize("send", SENDING.values(), ids=SENDING)
def test_a_value_that_cannot_be_written_is_refused_and_changes_no_state(send: Any, wrong: Any) -> None:
    peer = serving(Peer(SERVER), token="t")
    peer.terms = BATCHES
    peer.receive(Batch((Request(8, "a"),)), 0)
    peer.terms = None  # terms cannot be pickled
    peer.request("roots/list", about=7, deadline=9)
    before = pickle.dumps(peer)
    with pytest.raises(UsageError, match=r"cannot be written as JSON|must be a string, got"):
        send(peer, wrong)
    assert pickle.dumps(peer) == before


@pytest.mark.parametrize("wrong", [[1], "text", 1])
def test_params_that_are_not_an_object_are_refused_at_the_call(wrong: Any) -> None:
    peer = serving(Peer(SERVER))
    for send in (peer.request, peer.notify, lambda _, params: peer.answer(7, params)):
        with pytest.raises(UsageError, match="must be an object"):
            send("notifications/x", wrong)
    assert (peer.serves(7), peer.waiting, peer.outgoing(), peer.request("ping")) == (True, 0, [], 1)


@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.parametrize("wrong", [None, [], "progressToken", 0])
def test_meta_that_is_not_an_object_is_refused_at_the_call(wrong: Any, progress: bool) -> None:
    peer = serving(Peer(SERVER))
    with pytest.raises(UsageError, match="the params of tools/call must be an object, and the _meta in it"):
        peer.request("tools/call", {"_meta": wrong}, progress=progress)
    for about in (None, 7):
        with pytest.raises(UsageError, match="the params of notifications/x must be"):
            peer.notify("notifications/x", {"_meta": wrong}, about=about)
    assert (peer.waiting, peer.outgoing(), peer.request("ping")) == (0, [], 1)


def test_a_queued_message_does_not_change_after_the_call() -> None:
    peer = serving(serving(Peer(SERVER)), 8)
    result: dict[str, Any] = {"a": [1]}
    peer.answer(7, result)
    peer.request("roots/list", result)
    peer.notify("notifications/x", result, about=8)
    result["a"].append(math.nan)
    lines = [json.loads(encode(message)) for message in sent(peer)]
    assert [line.get("result") or line["params"] for line in lines] == [{"a": [1]}] * 3


def test_an_answer_to_a_cancelled_request_is_dropped_even_if_it_is_invalid() -> None:
    peer = serving(Peer(SERVER), token="t")
    peer.receive(cancellation(7), 0)
    assert peer.progress(7, 1, message="\ud800") is False
    assert peer.notify("notifications/x", {"a": math.nan}, about=7) is False
    assert peer.answer(7, CIRCULAR) is False
    assert (peer.serving, sent(peer)) == (0, [])


def test_an_error_without_data_has_no_data(pair: tuple[Peer, Peer]) -> None:
    serving(pair[1]).refuse(7, RequestError(-32602, "no"))
    assert sent(pair[1]) == [Error(7, -32602, "no")]


@req("core-09")
@pytest.mark.parametrize("id", [0, 1, -1, 2**63, "", "1", "a-b"])
def test_an_answer_has_the_id_of_its_request_in_value_and_type(pair: tuple[Peer, Peer], id: Id) -> None:
    for finish in (lambda peer: peer.answer(id, {}), lambda peer: peer.refuse(id, RequestError(1, "no"))):
        peer = serving(pair[1], id)
        assert finish(peer)
        ((message, about),) = peer.outgoing()
        echoed = json.loads(encode(message))["id"]
        assert (echoed, type(echoed), about) == (id, type(id), id)


@req("core-09")
def test_the_number_one_and_the_string_one_are_two_requests() -> None:
    peer = serving(serving(Peer(SERVER), 1), "1")
    assert peer.serving == 2
    peer.answer("1", {"as": "text"})
    assert sent(peer) == [Response("1", {"as": "text"})]
    assert peer.serves(1)


@req("core-07", "core-08", "prog-02")
def test_ids_and_progress_tokens_never_repeat(pair: tuple[Peer, Peer]) -> None:
    ours, theirs = pair
    ids = []
    for turn in range(20):
        ids.append(ours.request("tools/call", progress=True, deadline=turn))
        carry(ours, theirs)
        if turn % 4 == 0:
            theirs.answer(ids[-1], {})
        elif turn % 4 == 1:
            ours.cancel(ids[-1])
        elif turn % 4 == 2:
            ours.tick(turn)
        carry(theirs, ours)
    assert len({*ids}) == 20


@req("prog-02")
def test_the_progress_token_of_a_request_is_its_id() -> None:
    peer = Peer(CLIENT)
    params = {"name": "add", "_meta": {"traceparent": "00-1"}}
    id = peer.request("tools/call", params, progress=True)
    other = peer.request("tools/call", params)
    assert sent(peer) == [
        Request(id, "tools/call", {"name": "add", "_meta": {"traceparent": "00-1", "progressToken": id}}),
        Request(other, "tools/call", params),
    ]
    assert params == {"name": "add", "_meta": {"traceparent": "00-1"}}


@req("prog-02")
def test_a_progress_token_chosen_by_the_caller_is_refused() -> None:
    peer = Peer(CLIENT)
    with pytest.raises(UsageError, match="progress=True"):
        peer.request("tools/call", {"_meta": {"progressToken": 1}})
    assert (peer.waiting, sent(peer), peer.request("ping")) == (0, [], 1)


def test_ids_grow_by_one_and_answers_to_other_ids_are_mistakes() -> None:
    peer = Peer(CLIENT)
    assert [peer.request("ping"), peer.request("ping")] == [1, 2]
    assert peer.receive(Response(2, {}), 0) == [Answered(2, "ping", {})]
    assert mistakes(peer.receive(Response(0, {}), 0)) == ["no request of ours has the id 0"]
    assert mistakes(peer.receive(Response(3, {}), 0)) == ["no request of ours has the id 3"]


def test_ids_may_begin_with_another_number() -> None:
    peer = Peer(Role.SERVER)
    peer.count_from(5000)
    assert [peer.request("ping"), peer.request("ping")] == [5000, 5001]
    assert peer.receive(Response(7, {}), 0) == []  # counts as late: another process may have sent request 7


def test_requests_of_both_sides_with_the_same_id_are_kept_apart() -> None:
    one, two = Peer(CLIENT), Peer(SERVER)
    assert one.request("tools/call") == two.request("roots/list") == 1
    carry(one, two)
    carry(two, one)
    assert (one.waiting, one.serving, two.waiting, two.serving) == (1, 1, 1, 1)
    assert one.answer(1, {"roots": []})
    assert carry(one, two) == [Answered(1, "roots/list", {"roots": []})]
    assert two.serves(1)
    assert two.answer(1, {"content": []})
    assert carry(two, one) == [Answered(1, "tools/call", {"content": []})]


@pytest.mark.parametrize("finish", ["answer", "error", "garble", "cancel", "expire", "teardown"])
@req("cancel-05", "cancel-06", "cancel-21")
def test_a_late_answer_is_dropped(finish: str) -> None:
    peer = Peer(CLIENT)
    id = peer.request(LISTEN, deadline=5)
    assert {
        "answer": lambda: peer.receive(Response(id, {}), 0),
        "error": lambda: peer.receive(Error(id, 1, "no"), 0),
        "garble": lambda: peer.receive(InvalidMessage("neither result nor error", answers=id), 0),
        "cancel": lambda: peer.cancel(id),
        "expire": lambda: peer.tick(5),
        "teardown": lambda: peer.receive(cancellation(id), 0),
    }[finish]()
    peer.outgoing()
    assert peer.waiting == 0
    late = [Response(id, {}), Error(id, 1, "no"), InvalidMessage("?", answers=id), progress(id, 1), cancellation(id)]
    assert [event for message in late for event in peer.receive(message, 6)] == []
    assert peer.cancel(id) is False
    assert peer.tick(9) == sent(peer) == []


@pytest.mark.parametrize("id", [0, 2, -1, 10**30, "", "x", "2", "1.0", " 1", "¹", "١", "9" * 30, "9" * 5000])
def test_an_answer_to_an_unknown_id_is_a_mistake(id: Id) -> None:
    peer = Peer(CLIENT)
    peer.request("ping")
    peer.outgoing()
    for message in (Response(id, {}), Error(id, 1, "no"), InvalidMessage("?", answers=id), progress(id, 1)):
        assert mistakes(peer.receive(message, 0)) == [f"no request of ours has the id {shown(id)}"]
    assert (peer.waiting, sent(peer)) == (1, [])


def test_an_id_that_comes_back_as_a_string_is_accepted_and_reported(pair: tuple[Peer, Peer]) -> None:
    ours = pair[0]
    why = PeerMistake("id 1 came back as the string '1'")
    ours.request("tools/call", progress=True)
    assert ours.receive(progress("1", 1), 0) == [why, ProgressReported(1, 1, None, None)]
    assert ours.receive(Response("1", {}), 0) == [why, Answered(1, "tools/call", {})]
    assert ours.receive(Response("1", {}), 0) == [why]
    assert ours.request("tools/call") == 2
    assert ours.receive(Error("2", 1, "no"), 0)[1:] == [Refused(2, "tools/call", Error("2", 1, "no"))]


def test_a_malformed_answer_ends_the_request_with_an_invalid_answer(pair: tuple[Peer, Peer]) -> None:
    ours = pair[0]
    id = ours.request("tools/call")
    garbled = decode(b'{"jsonrpc":"2.0","id":1,"result":[]}', LIMITS)
    (event,) = ours.receive(garbled, 0)
    assert isinstance(event, InvalidAnswer)
    assert (event.id, event.method) == (id, "tools/call")
    assert "must be an object" in event.why
    assert ours.waiting == 0


NAMELESS_ERROR = Error(None, -32700, "not JSON")
NAMELESS_RESULT = InvalidMessage("a result must carry the id of its request", response=True)


@pytest.mark.parametrize("waiting", [0, 2])
def test_an_error_without_an_id_is_a_complaint_unless_one_request_waits(pair: tuple[Peer, Peer], waiting: int) -> None:
    ours = pair[0]
    for _ in range(waiting):
        ours.request("ping")
    ours.outgoing()
    assert ours.receive(NAMELESS_ERROR, 0) == [PeerComplaint(NAMELESS_ERROR)]
    assert mistakes(ours.receive(NAMELESS_RESULT, 0)) == [NAMELESS_RESULT.why]
    assert (ours.waiting, sent(ours)) == (waiting, [])


def test_an_answer_without_an_id_is_for_the_only_request_that_waits(pair: tuple[Peer, Peer]) -> None:
    ours = pair[0]
    id = ours.request("ping")
    assert ours.receive(NAMELESS_ERROR, 0) == [Refused(id, "ping", NAMELESS_ERROR)]
    id = ours.request("tools/call")
    assert ours.receive(NAMELESS_RESULT, 0) == [InvalidAnswer(id, "tools/call", NAMELESS_RESULT.why)]
    ours.request("ping")
    assert mistakes(ours.receive(InvalidMessage("a bad note"), 0)) == ["a bad note"]
    assert ours.waiting == 1


def expire(peer: Peer) -> None:
    peer.request("initialize", deadline=1)  # no cancellation is sent for it
    assert len(peer.tick(1)) == 1


def answer(peer: Peer) -> None:
    assert serving(peer).answer(7, {})


def refuse_an_invalid_message(peer: Peer) -> None:
    peer.receive(InvalidMessage("", Error(None, 1, "no")), 0)


SENT_WITHOUT_ANSWER: dict[str, Callable[[Peer], object]] = {
    "a notification": lambda peer: peer.notify("notifications/x"),
    "progress": lambda peer: serving(peer, token=1).progress(7, 1),
    "an answer": answer,
    "an error without a request": refuse_an_invalid_message,
    "a cancellation": lambda peer: peer.cancel(peer.request("ping")),
    "a request that was given up": expire,
}


@pytest.mark.parametrize("send", SENT_WITHOUT_ANSWER.values(), ids=SENT_WITHOUT_ANSWER.keys())
def test_an_error_without_an_id_may_concern_an_earlier_unanswered_message(
    pair: tuple[Peer, Peer], send: Callable[[Peer], object]
) -> None:
    ours = pair[0]
    earlier = ours.request("ping")
    send(ours)
    assert ours.receive(Response(earlier, {}), 0) == [Answered(earlier, "ping", {})]
    later = ours.request("ping")
    for _ in range(2):
        assert ours.receive(NAMELESS_ERROR, 0) == [PeerComplaint(NAMELESS_ERROR)]
        assert mistakes(ours.receive(NAMELESS_RESULT, 0)) == [NAMELESS_RESULT.why]
    assert ours.receive(Response(later, {}), 0) == [Answered(later, "ping", {})]
    last = ours.request("ping")
    assert ours.receive(NAMELESS_ERROR, 0) == [Refused(last, "ping", NAMELESS_ERROR)]


def test_in_a_session_an_answer_without_an_id_is_never_for_a_request() -> None:
    peer = Peer(CLIENT, link=SESSION)
    peer.request("ping")
    assert peer.receive(NAMELESS_ERROR, 0) == [PeerComplaint(NAMELESS_ERROR)]
    assert mistakes(peer.receive(NAMELESS_RESULT, 0)) == [NAMELESS_RESULT.why]


def test_on_an_exchange_an_error_without_an_id_is_for_the_only_request() -> None:
    peer = Peer(CLIENT, link=EXCHANGE)
    error = Error(None, -32700, "not JSON")
    assert peer.receive(error, 0) == [PeerComplaint(error)]
    id = peer.request("ping")
    assert peer.receive(error, 0) == [Refused(id, "ping", error)]
    peer.request("ping")
    assert mistakes(peer.receive(Error(9, 1, "no"), 0)) == ["no request of ours has the id 9"]
    peer.request("ping")
    assert peer.receive(error, 0) == [PeerComplaint(error)]


def test_an_answer_to_a_request_that_is_not_served_is_not_sent() -> None:
    peer = serving(Peer(SERVER))
    assert peer.answer(7, {})
    peer.outgoing()
    assert peer.answer(7, {}) is False
    assert peer.refuse(7, RequestError(1, "no")) is False
    assert peer.answer("7", {}) is False
    assert sent(peer) == []


# Notifications.


def test_a_notification_arrives(pair: tuple[Peer, Peer]) -> None:
    ours, theirs = pair
    assert ours.notify("notifications/x", {"a": 1}) is True
    assert ours.notify("notifications/y") is True
    assert carry(ours, theirs) == [Notification("notifications/x", {"a": 1}), Notification("notifications/y")]


def test_a_notification_about_a_request_is_sent_only_while_it_is_served() -> None:
    peer = serving(Peer(SERVER), method=LISTEN)
    note = Notification("notifications/tools/list_changed")
    assert peer.notify(note.method, about=7) is True
    assert peer.outgoing() == [(note, 7)]
    assert peer.notify(note.method, about=8) is False
    peer.answer(7, {})
    peer.outgoing()
    assert peer.notify(note.method, about=7) is False
    assert sent(peer) == []


@req("core-15")
def test_notifications_carry_no_id() -> None:
    peer = serving(Peer(SERVER), token="t")
    peer.notify("notifications/message", {"level": "info"}, about=7)
    peer.notify("notifications/tools/list_changed")
    peer.progress(7, 1)
    peer.cancel(peer.request("roots/list"))
    wire = [json.loads(encode(message)) for message in sent(peer)]
    with_id = [message["method"] for message in wire if "id" in message]
    assert (len(wire), with_id) == (5, ["roots/list"])


@req("core-16")
@pytest.mark.parametrize(
    "line",
    [
        b'{"jsonrpc":"2.0","method":"notifications/unheard-of","params":{"x":1}}',
        b'{"jsonrpc":"2.0","method":"tools/call"}',
        b'{"jsonrpc":"2.0","method":"notifications/message","params":[]}',
        b'{"jsonrpc":"2.0","method":"notifications/cancelled"}',
        b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":{}}}',
        b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":"x"}}',
    ],
)
def test_no_notification_is_answered(pair: tuple[Peer, Peer], line: bytes) -> None:
    for peer in pair:
        (event,) = peer.receive(decode(line, LIMITS), 0)
        assert isinstance(event, Notification | PeerMistake)
        assert sent(peer) == []


@pytest.mark.parametrize("method", ["notifications/cancelled", "notifications/progress"])
@req("cancel-01", "cancel-13", "cancel-19", "prog-05")
def test_cancellations_and_progress_cannot_be_sent_by_hand(pair: tuple[Peer, Peer], method: str) -> None:
    for peer in pair:
        with pytest.raises(UsageError, match=r"must be sent with Peer\.cancel or Peer\.progress"):
            peer.notify(method, {"requestId": 99, "progressToken": 99, "progress": 1})
        assert sent(peer) == []


# Progress.


@req("prog-01", "prog-04", "prog-06", "prog-10")
def test_progress_arrives_with_or_without_total_and_message(pair: tuple[Peer, Peer]) -> None:
    ours, theirs = pair
    id = ours.request("tools/call", progress=True)
    carry(ours, theirs)
    assert theirs.progress(id, 0)
    assert theirs.progress(id, 0.5, 2)
    assert theirs.progress(id, 1.5, 2.5, "nearly")
    assert theirs.progress(id, 10**400, message="far beyond")
    assert carry(theirs, ours) == [
        ProgressReported(id, 0, None, None),
        ProgressReported(id, 0.5, 2, None),
        ProgressReported(id, 1.5, 2.5, "nearly"),
        ProgressReported(id, 10**400, None, "far beyond"),
    ]


@req("prog-01")
@pytest.mark.parametrize("token", [0, 5, -1, "", "abc"])
def test_progress_has_the_token_of_its_request_in_value_and_type(token: Id) -> None:
    peer = serving(Peer(SERVER), token=token)
    assert peer.progress(7, 1)
    ((message, about),) = peer.outgoing()
    echoed = json.loads(encode(message))["params"]["progressToken"]
    assert (echoed, type(echoed), about) == (token, type(token), 7)


@req("prog-01")
@pytest.mark.parametrize("meta", [{"progressToken": bad} for bad in (1.5, True, [], {})] + [None, [], "x", 1])
def test_a_token_that_is_neither_string_nor_integer_is_refused(meta: object) -> None:
    peer = Peer(SERVER)
    (why,) = mistakes(peer.receive(Request(7, "tools/call", {"_meta": meta}), 0))
    assert peer.outgoing() == [(Error(7, INVALID_PARAMS, why), 7)]
    assert peer.serving == 0


@req("prog-05", "prog-06")
def test_progress_that_was_not_requested_is_not_sent() -> None:
    peer = serving(Peer(SERVER))
    assert peer.progress(7, 1) is False
    assert peer.progress(8, 1) is False
    serving(peer, 9, token=None)
    assert peer.receive(Request(10, "x", {"_meta": {"progressToken": None}}), 0)
    assert peer.progress(10, 1) is False
    assert sent(peer) == []


@req("prog-03")
@pytest.mark.parametrize("value", [0.5, -1, math.nan, math.inf, -math.inf, -(10**400), "2", None, True, [2], 2j])
def test_progress_that_falls_is_a_usage_error(value: Any) -> None:
    peer = serving(Peer(SERVER), token="t")
    assert peer.progress(7, 1)
    with pytest.raises(UsageError, match="must be a finite number, at least 1, got "):
        peer.progress(7, value)
    assert peer.progress(7, 2)
    assert [message.params["progress"] for message in sent(peer)] == [1, 2]


class Steps(enum.IntEnum):
    THIRD = 3


class Share(float):
    def __repr__(self) -> str:
        return "half"


def test_progress_of_subclasses_of_numbers_is_written_as_numbers() -> None:
    peer = serving(Peer(SERVER), token="t")
    assert peer.progress(7, Share(0.5), Steps.THIRD)
    assert peer.progress(7, Steps.THIRD, Share(8.5))
    said = [json.loads(encode(message))["params"] for message in sent(peer)]
    assert [(each["progress"], each["total"]) for each in said] == [(0.5, 3), (3, 8.5)]


@req("prog-03")
def test_progress_that_does_not_rise_is_not_sent() -> None:
    peer = serving(Peer(SERVER), token="t")
    assert [peer.progress(7, value, 10) for value in (5, 5, 5.0, 6, 6)] == [True, False, False, True, False]
    assert [message.params["progress"] for message in sent(peer)] == [5, 6]


@pytest.mark.parametrize("total", ["9", True, [9], math.nan, math.inf])
def test_a_total_that_is_not_a_finite_number_is_a_usage_error(total: Any) -> None:
    peer = serving(Peer(SERVER), token="t")
    with pytest.raises(UsageError, match="the total of progress must be a finite number"):
        peer.progress(7, 1, total)
    assert peer.progress(7, 1, 9)


@req("prog-03")
@pytest.mark.parametrize("value", [1, 0.5, -1])
def test_received_progress_that_does_not_rise_is_a_mistake(value: float) -> None:
    peer = Peer(CLIENT)
    peer.request("tools/call", progress=True)
    assert peer.receive(progress(1, 1), 0) == [ProgressReported(1, 1, None, None)]
    assert mistakes(peer.receive(progress(1, value), 0)) == ["progress of request 1 did not rise above 1"]
    assert peer.receive(progress(1, 1.5), 0) == [ProgressReported(1, 1.5, None, None)]


@req("prog-07")
def test_received_progress_that_was_not_requested_is_dropped(pair: tuple[Peer, Peer]) -> None:
    for peer in pair:
        peer.request("tools/call")
        peer.outgoing()
        assert mistakes(peer.receive(progress(1, 1), 0)) == ["progress of request 1 was not requested"]
        for token in (2, "x"):
            assert mistakes(peer.receive(progress(token, 1), 0)) == [f"no request of ours has the id {token!r}"]
        assert (peer.waiting, sent(peer)) == (1, [])


@pytest.mark.parametrize(
    ("token", "value"),
    [
        *((token, 1) for token in (None, 1.0, True, [1], {})),
        *((1, value) for value in (None, True, "1", [], math.nan, math.inf, -math.inf)),
    ],
)
def test_malformed_progress_is_dropped(token: object, value: object) -> None:
    peer = Peer(CLIENT)
    peer.request("tools/call", progress=True)
    peer.outgoing()
    assert len(mistakes(peer.receive(progress(token, value), 0))) == 1
    assert (peer.waiting, sent(peer)) == (1, [])


@pytest.mark.parametrize(("total", "message"), [(True, 1), ("9", None), (math.inf, []), (-math.inf, {})])
def test_progress_with_an_invalid_total_or_message_is_used_without_it(total: object, message: object) -> None:
    peer = Peer(CLIENT)
    peer.request("tools/call", progress=True)
    assert peer.receive(progress(1, 1, total=total, message=message), 0) == [ProgressReported(1, 1, None, None)]


@req("prog-09", "prog-05")
@pytest.mark.parametrize("finish", ["answer", "refuse", "cancel", "lose"])
def test_no_progress_is_sent_after_the_end_of_a_request(finish: str) -> None:
    peer = serving(Peer(SERVER), token="t")
    {
        "answer": lambda: peer.answer(7, {}),
        "refuse": lambda: peer.refuse(7, RequestError(1, "no")),
        "cancel": lambda: peer.receive(cancellation(7), 0),
        "lose": lambda: peer.connection_lost(),
    }[finish]()
    peer.outgoing()
    assert peer.progress(7, 1) is False
    assert sent(peer) == []


@req("prog-14", "prog-10")
@pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
@pytest.mark.parametrize("own", [True, False], ids=["of the request", "of the link"])
def test_the_message_of_progress_is_sent_if_the_revision_has_one(revision: Any, own: bool) -> None:
    class Session(Peer):
        def agree(self, id: Id, terms: Terms) -> None:
            self._serving[id].terms = terms

    peer = Session(SERVER)
    serving(peer, token="t")
    assert peer.terms_of(7) is None
    if own:
        peer.terms = Terms(REVISIONS["2024-11-05"])
        peer.agree(7, Terms(revision))
    else:
        peer.terms = Terms(revision)
    assert peer.progress(7, 1, message="half")
    (message,) = sent(peer)
    assert ("message" in message.params) is (revision.name != "2024-11-05")
    assert peer.terms_of(7) == Terms(revision)
    assert peer.terms_of(8) is None


# Cancellation.


@req("cancel-01", "cancel-10", "cancel-16", "cancel-19")
@pytest.mark.parametrize("link", [DUPLEX, SESSION])
def test_cancelling_a_request_notifies_the_other_side_once(pair: tuple[Peer, Peer], link: LinkKind) -> None:
    ours, theirs = (Peer(peer.role, link=link) for peer in pair)
    id = ours.request("tools/call", PARAMS)
    carry(ours, theirs)
    assert ours.cancel(id, "had enough") is True
    assert ours.cancel(id) is False
    assert ours.waiting == 0
    assert carry(ours, theirs) == [RequestCancelled(id, "tools/call", "had enough")]


def test_a_cancellation_without_a_reason_has_no_reason_member() -> None:
    peer = Peer(CLIENT)
    peer.cancel(peer.request("tools/call"))
    assert peer.outgoing()[1:] == [(cancellation(1), None)]


@req("cancel-03", "cancel-18")
def test_nothing_is_sent_for_a_request_after_its_cancellation(pair: tuple[Peer, Peer]) -> None:
    peer = serving(pair[1], token="t")
    assert peer.receive(cancellation(7), 0) == [RequestCancelled(7, "tools/call", "")]
    assert not peer.serves(7)
    assert peer.progress(7, 1) is False
    assert peer.notify("notifications/message", {"level": "info"}, about=7) is False
    with pytest.raises(UsageError, match="has ended"):
        peer.request("sampling/createMessage", about=7)
    assert peer.serving == 1
    assert peer.answer(7, {}) is False
    assert (peer.serving, sent(peer)) == (0, [])


@req("cancel-18")
def test_queued_messages_of_a_cancelled_request_are_not_sent() -> None:
    peer = serving(serving(Peer(SERVER), 7, token="t"), 8, token="u")
    for id in (7, 8):
        peer.progress(id, 1)
        peer.notify("notifications/message", {"of": id}, about=id)
    peer.notify("notifications/tools/list_changed")
    # Nested requests and their cancellations are still sent.
    one, two = peer.request("roots/list", about=7), peer.request("sampling/createMessage", about=7)
    peer.cancel(one)
    assert peer.receive(cancellation(7), 0) == [RequestCancelled(7, "tools/call", "")]
    peer.cancel(two)
    peer.answer(7, {})
    peer.progress(8, 2)
    assert [(getattr(message, "method", None), about) for message, about in peer.outgoing()] == [
        ("notifications/progress", 8),
        ("notifications/message", 8),
        ("notifications/tools/list_changed", None),
        ("roots/list", 7),
        ("sampling/createMessage", 7),
        ("notifications/cancelled", 7),
        ("notifications/cancelled", None),
        ("notifications/progress", 8),
    ]


@pytest.mark.parametrize("between", [True, False])
def test_all_messages_of_a_new_request_with_a_cancelled_id_are_sent(between: bool) -> None:
    peer = serving(Peer(SERVER), token="t")
    peer.progress(7, 1)
    peer.receive(cancellation(7), 0)
    peer.answer(7, {})
    if between:
        assert sent(peer) == []
    serving(peer, token="u")
    peer.progress(7, 1)
    peer.answer(7, {"new": True})
    assert sent(peer) == [progress("u", 1), Response(7, {"new": True})]


@req("cancel-06")
def test_a_queued_answer_is_sent_in_spite_of_a_late_cancellation() -> None:
    peer = serving(Peer(SERVER), token="t")
    peer.progress(7, 1)
    peer.answer(7, {})
    assert peer.receive(cancellation(7), 0) == []
    assert sent(peer) == [progress("t", 1), Response(7, {})]


@req("cancel-04", "cancel-06", "cancel-08", "cancel-20")
@pytest.mark.parametrize("id", [6, "7", "x", -1])
def test_a_cancellation_of_an_unknown_id_is_ignored(id: Id) -> None:
    peer = serving(Peer(SERVER))
    assert peer.receive(cancellation(id), 0) == []
    assert (peer.serves(7), sent(peer)) == (True, [])


@req("cancel-08")
@pytest.mark.parametrize("params", [{}, *({"requestId": bad} for bad in (None, True, 7.0, [7], {}))])
def test_a_malformed_cancellation_is_a_mistake_without_effect(params: dict[str, object]) -> None:
    peer = serving(Peer(SERVER))
    assert len(mistakes(peer.receive(Notification("notifications/cancelled", params), 0))) == 1
    assert (peer.serves(7), sent(peer)) == (True, [])


def test_a_reason_that_is_not_text_is_left_out() -> None:
    peer = serving(Peer(SERVER))
    assert peer.receive(cancellation(7, reason=["x"]), 0) == [RequestCancelled(7, "tools/call", "")]


@req("cancel-06")
def test_a_second_cancellation_changes_nothing() -> None:
    peer = serving(Peer(SERVER))
    assert len(peer.receive(cancellation(7), 0)) == 1
    assert peer.receive(cancellation(7), 0) == []
    assert peer.serving == 1


@req("cancel-02", "cancel-04")
@pytest.mark.parametrize("method", UNCANCELLABLE)
def test_the_opening_is_never_cancelled_by_a_message(method: str) -> None:
    ours, theirs = Peer(CLIENT), Peer(SERVER)
    given_up, expired = ours.request(method), ours.request(method, deadline=5)
    carry(ours, theirs)
    assert ours.cancel(given_up) is True
    assert ours.tick(5) == [TimedOut(expired, method)]
    assert sent(ours) == []
    # A cancellation that is sent in spite of the rule is ignored.
    assert theirs.receive(cancellation(given_up), 0) == []
    assert theirs.answer(given_up, {}) is True
    assert carry(theirs, ours) == []


@req("cancel-15", "time-03")
def test_an_exchange_is_cancelled_without_a_message() -> None:
    peer = Peer(CLIENT, link=EXCHANGE)
    given_up, _ = peer.request("tools/call"), peer.request(LISTEN, deadline=5)
    peer.outgoing()
    assert peer.cancel(given_up) is True
    assert peer.tick(5) == [TimedOut(2, LISTEN)]
    assert sent(peer) == []


def test_a_nested_request_is_cancelled_on_its_stream_while_that_is_open() -> None:
    peer = serving(Peer(SERVER, link=SESSION))
    first, second = peer.request("roots/list", about=7), peer.request("roots/list", about=7)
    peer.cancel(first)
    peer.answer(7, {})
    peer.cancel(second)
    assert [about for message, about in peer.outgoing() if isinstance(message, Notification)] == [7, None]


@req("cancel-12")
def test_a_server_ends_a_subscription_with_its_result_and_then_the_notice() -> None:
    ours, theirs = Peer(CLIENT), Peer(SERVER)
    id = ours.request(LISTEN)
    carry(ours, theirs)
    assert theirs.answer(id, {"resultType": "complete"}) is True
    assert theirs.outgoing() == [(Response(id, {"resultType": "complete"}), id), (cancellation(id), id)]
    assert ours.receive(Response(id, {}), 0) == [Answered(id, LISTEN, {})]
    assert ours.receive(cancellation(id), 0) == []


@req("cancel-12")
def test_on_an_exchange_the_end_of_a_subscription_needs_no_notice() -> None:
    peer = serving(Peer(SERVER, link=EXCHANGE), method=LISTEN)
    peer.answer(7, {})
    assert sent(peer) == [Response(7, {})]


@pytest.mark.parametrize("link", [DUPLEX, EXCHANGE])
def test_a_notice_ends_a_subscription_and_its_late_result_is_dropped(link: LinkKind) -> None:
    peer = Peer(CLIENT, link=link)
    id = peer.request(LISTEN)
    assert peer.receive(cancellation(id, reason="restarting"), 0) == [SubscriptionEnded(id, LISTEN, "restarting")]
    assert peer.receive(Response(id, {}), 0) == []


def test_a_subscription_that_is_refused_ends_without_a_notice() -> None:
    peer = serving(Peer(SERVER), method=LISTEN)
    peer.refuse(7, RequestError(INVALID_PARAMS, "no filter"))
    assert sent(peer) == [Error(7, INVALID_PARAMS, "no filter")]


@req("cancel-13")
@pytest.mark.parametrize("method", ["tools/call", *UNCANCELLABLE])
@pytest.mark.parametrize("link", LinkKind)
def test_only_a_subscription_can_be_ended_by_its_server(link: LinkKind, method: str) -> None:
    peer = Peer(CLIENT, link=link)
    id = peer.request(method)
    assert peer.receive(cancellation(id), 0) == []
    assert peer.receive(Response(id, {}), 0) == [Answered(id, method, {})]
    served = serving(Peer(SERVER, link=link), method=method)
    served.answer(7, {})
    assert sent(served) == [Response(7, {})]


# Deadlines.


@req("time-02", "time-03", "time-04")
def test_each_request_has_its_own_deadline(pair: tuple[Peer, Peer]) -> None:
    ours, theirs = pair
    late, never, soon = ours.request("a", deadline=9), ours.request("b"), ours.request("c", deadline=4.5)
    carry(ours, theirs)
    assert ours.next_deadline() == 4.5
    assert ours.tick(4) == []
    assert ours.tick(4.5) == [TimedOut(soon, "c")]
    assert ours.next_deadline() == 9
    assert carry(ours, theirs) == [RequestCancelled(soon, "c", "timed out")]
    assert ours.tick(100) == [TimedOut(late, "a")]
    assert (ours.waiting, ours.next_deadline()) == (1, None)
    theirs.answer(never, {})
    assert carry(theirs, ours) == [Answered(never, "b", {})]


@settings(max_examples=50)
@given(st.permutations(range(40)), st.sets(st.integers(1, 40), min_size=3, max_size=8))
def test_requests_expire_in_order_if_others_are_answered_in_between(deadlines: list[int], kept: set[int]) -> None:
    peer = Peer(CLIENT)
    for deadline in deadlines:
        id = peer.request("a", deadline=deadline)
        if id not in kept:
            peer.receive(Response(id, {}), -1)
    live = [(deadlines[id - 1], id) for id in kept]
    assert peer.next_deadline() == min(live)[0]
    assert [event.id for event in peer.tick(50)] == [id for _, id in sorted(live)]


def test_requests_that_are_due_together_expire_in_order() -> None:
    peer = Peer(CLIENT)
    ids = [peer.request("a", deadline=deadline) for deadline in (3, 1, 2, 1)]
    assert [event.id for event in peer.tick(3)] == [ids[1], ids[3], ids[2], ids[0]]


def test_a_due_timeout_is_reported_before_a_later_message() -> None:
    peer = Peer(CLIENT)
    first, second = peer.request("a", deadline=5), peer.request("b", deadline=6)
    assert peer.receive(Response(second, {}), 5) == [TimedOut(first, "a"), Answered(second, "b", {})]
    third = peer.request("c", deadline=7)
    assert peer.receive(Response(third, {}), 7) == [TimedOut(third, "c")]


def test_an_answered_request_does_not_expire() -> None:
    peer = Peer(CLIENT)
    peer.receive(Response(peer.request("a", deadline=5), {}), 0)
    assert peer.tick(6) == []
    peer.receive(Response(peer.request("a", deadline=5), {}), 0)
    assert peer.next_deadline() is None


@pytest.mark.parametrize("end", ["answer", "cancel"])
def test_deadlines_of_finished_requests_are_not_kept(end: str) -> None:
    peer = Peer(CLIENT)
    kept = peer.request("kept", deadline=1e9)
    size = []
    for _ in range(20_000):
        id = peer.request("a", deadline=1e9 + 1)
        if end == "answer":
            peer.receive(Response(id, {}), 0)
        else:
            peer.cancel(id)
        peer.outgoing()
        if id in (100, 20_000):
            size.append(len(pickle.dumps(peer)))
    assert size[1] < size[0] + 1000
    assert peer.next_deadline() == 1e9
    assert peer.tick(1e9) == [TimedOut(kept, "kept")]


# Loss.


@pytest.mark.parametrize("link", LinkKind)
def test_a_lost_link_ends_all_requests(link: LinkKind) -> None:
    for role in Role:
        peer = serving(Peer(role, link=link), 7)
        serving(peer, 8, token="t")
        peer.receive(cancellation(8), 0)
        ids = [peer.request("a", deadline=5), peer.request("initialize")]
        assert peer.connection_lost(why="pipe closed") == [
            ConnectionLost(ids[0], "a", "pipe closed"),
            ConnectionLost(ids[1], "initialize", "pipe closed"),
            RequestCancelled(7, "tools/call", "pipe closed"),
        ]
        assert (peer.closed, peer.waiting, peer.serving, peer.next_deadline(), sent(peer)) == (True, 0, 2, None, [])
        assert [peer.answer(7, {}), peer.refuse(8, RequestError(1, "no"))] == [False, False]
        assert peer.serving == 0


def test_a_closed_peer_ignores_messages_and_sends_no_more() -> None:
    peer = serving(Peer(SERVER), token="t")
    id = peer.request("a", deadline=5)
    peer.connection_lost()
    with pytest.raises(SessionClosed, match="the link is closed"):
        peer.request("b")
    assert peer.notify("notifications/x") is False
    assert peer.notify("notifications/x", about=7) is False
    assert peer.progress(7, 1) is False
    assert peer.cancel(id) is False
    for message in (Request(1, "x"), Notification("x"), Response(id, {}), Error(None, 1, "no"), cancellation(7)):
        assert peer.receive(message, 9) == []
    assert peer.connection_lost() == peer.tick(99) == sent(peer) == []


@pytest.mark.parametrize("role", Role)
def test_the_end_of_input_fails_our_requests_and_keeps_the_served_ones(role: Role) -> None:
    peer = serving(Peer(role), 7, token="t")
    serving(peer, 8)
    peer.receive(cancellation(8), 0)
    ids = [peer.request("a", deadline=5), peer.request("initialize")]
    peer.outgoing()
    ended = [ConnectionLost(ids[0], "a", "stdin was closed"), ConnectionLost(ids[1], "initialize", "stdin was closed")]
    assert peer.input_ended("stdin was closed") == ended
    assert (peer.closed, peer.half_closed, peer.waiting, peer.serving) == (False, True, 0, 2)
    with pytest.raises(SessionClosed, match=f"b was not sent: the {role.other.value} has closed its side of the link"):
        peer.request("b", about=7)
    assert peer.input_ended() == peer.tick(9) == []
    assert (peer.notify("notifications/x"), peer.progress(7, 1), peer.progress(8, 1)) == (True, True, False)
    assert (peer.answer(7, {}), peer.answer(8, {})) == (True, False)
    told = [getattr(message, "method", type(message).__name__) for message in sent(peer)]
    assert told == ["notifications/x", "notifications/progress", "Response"]
    assert peer.connection_lost() == []


@pytest.mark.parametrize("link", [SESSION, EXCHANGE])
def test_input_ended_is_refused_on_links_with_several_streams(link: LinkKind) -> None:
    peer = Peer(CLIENT, link=link)
    peer.request("a")
    with pytest.raises(UsageError, match="only a link with a single stream"):
        peer.input_ended()
    assert (peer.half_closed, peer.waiting) == (False, 1)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("about", [1, 2])
def test_the_loss_of_one_stream_is_refused_on_a_duplex(role: Role, about: int) -> None:
    peer = serving(Peer(role), 1)
    peer.request("a")
    with pytest.raises(UsageError, match="this link is a single stream"):
        peer.connection_lost(about=about)
    assert (peer.closed, peer.waiting, peer.serves(1)) == (False, 1, True)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("method", ["tools/call", "initialize", LISTEN])
def test_a_lost_stream_changes_no_state_in_a_session(role: Role, method: str) -> None:
    peer = serving(Peer(role, link=SESSION), 1, method=method, token="t")
    peer.request(method, progress=True)
    before = pickle.dumps(peer)
    assert peer.connection_lost(about=1) == peer.connection_lost(about=2) == []
    assert pickle.dumps(peer) == before
    assert peer.progress(1, 1)
    assert peer.answer(1, {})
    assert peer.receive(Response(1, {}), 0) == [Answered(1, method, {})]


@pytest.mark.parametrize("method", ["tools/call", "server/discover", LISTEN])
def test_on_an_exchange_a_lost_stream_ends_the_request_of_the_client(method: str) -> None:
    peer = Peer(CLIENT, link=EXCHANGE)
    id, other = peer.request(method), peer.request(method)
    peer.outgoing()
    assert peer.connection_lost(about=id, why="reset") == [ConnectionLost(id, method, "reset")]
    assert peer.connection_lost(about=id) == []
    assert (peer.closed, peer.waiting, sent(peer)) == (False, 1, [])
    assert peer.receive(Response(other, {}), 0) == [Answered(other, method, {})]


@req("cancel-14")
@pytest.mark.parametrize("method", ["tools/call", "server/discover", LISTEN])
def test_on_an_exchange_a_closed_stream_cancels_the_request_at_the_server(method: str) -> None:
    peer = serving(Peer(SERVER, link=EXCHANGE), method=method, token="t")
    peer.progress(7, 1)
    assert peer.connection_lost(about=7, why="the client went away") == [
        RequestCancelled(7, method, "the client went away")
    ]
    assert peer.connection_lost(about=7) == peer.connection_lost(about=8) == []
    assert peer.answer(7, {}) is False
    assert (peer.closed, peer.serving, sent(peer)) == (False, 0, [])


@pytest.mark.parametrize("link", LinkKind)
@pytest.mark.parametrize("method", ["tools/call", "initialize", LISTEN])
@pytest.mark.parametrize("role", Role)
def test_fail_ends_one_request_and_no_other(role: Role, method: str, link: LinkKind) -> None:
    peer = Peer(role, link=link)
    id, other = peer.request(method, deadline=5), peer.request(method)
    peer.outgoing()
    assert peer.fail(id, "the POST was answered with 503") == [
        ConnectionLost(id, method, "the POST was answered with 503")
    ]
    assert peer.fail(id, "again") == peer.fail(9, "unknown") == peer.tick(9) == sent(peer) == []
    assert (peer.closed, peer.waiting, peer.cancel(id)) == (False, 1, False)
    assert peer.receive(Response(id, {}), 0) == []
    assert peer.receive(Response(other, {}), 0) == [Answered(other, method, {})]


def test_fail_does_not_end_a_served_request() -> None:
    peer = serving(Peer(SERVER), token="t")
    assert peer.fail(7, "mistaken") == []
    assert peer.answer(7, {})


# Limits, duplicates, bad messages.


def test_the_number_of_waiting_requests_is_limited() -> None:
    peer = Peer(CLIENT, limits=Limits(requests=2))
    first = peer.request("a")
    peer.request("b")
    with pytest.raises(UsageError, match="2 requests are waiting"):
        peer.request("c")
    peer.cancel(first)
    assert peer.request("c") == 3


def test_the_number_of_served_and_of_cancelled_running_requests_is_limited() -> None:
    peer = serving(serving(Peer(SERVER, limits=Limits(requests=2)), 1), 2)
    peer.receive(cancellation(1), 0)
    (why,) = mistakes(peer.receive(Request(3, "tools/call"), 0))
    assert peer.outgoing() == [(Error(3, INTERNAL_ERROR, why), 3)]
    assert "2 requests" in why
    peer.answer(1, {})
    serving(peer, 3)


def test_the_length_of_a_progress_token_is_limited() -> None:
    peer = serving(Peer(SERVER, limits=Limits(id_length=3)), token="abc")
    assert peer.progress(7, 1)
    assert sent(peer) == [progress("abc", 1)]
    (why,) = mistakes(peer.receive(Request(8, "a", {"_meta": {"progressToken": "abcd"}}), 0))
    assert peer.outgoing() == [(Error(8, INVALID_PARAMS, why), 8)]
    assert "3 characters" in why
    serving(peer, 9, token=10**9)


def test_messages_show_only_the_start_of_a_long_id() -> None:
    peer, id = Peer(SERVER), "x" * 1024
    serving(peer, id)
    peer.receive(Request(id, "a"), 0)
    ((error, _),) = peer.outgoing()
    assert isinstance(error, Error)
    assert len(error.message) < 200
    for message in (Response(id, {}), Response("9" * 19, {}), progress("0" * 19, 1)):
        assert all(len(why) < 200 for why in mistakes(peer.receive(message, 0)))
    peer.answer(id, {})
    with pytest.raises(UsageError) as caught:
        peer.request("roots/list", about=id)
    assert len(str(caught.value)) < 200
    asking = Peer(CLIENT)
    asking.request("a", progress=True)
    assert asking.receive(progress(1, 10**4000), 0) == [ProgressReported(1, 10**4000, None, None)]
    assert all(len(why) < 200 for why in mistakes(asking.receive(progress(1, 1), 0)))


def test_an_id_that_is_still_served_is_not_served_twice() -> None:
    peer = serving(Peer(SERVER))
    (why,) = mistakes(peer.receive(Request(7, "tools/list"), 0))
    # With the id the error would look like the answer to the first request.
    assert peer.outgoing() == [(Error(None, INVALID_REQUEST, why), None)]
    assert peer.serving == 1
    assert peer.answer(7, {})
    assert sent(peer) == [Response(7, {})]
    assert peer.serving == 0


def test_the_id_of_a_cancelled_request_that_still_runs_is_refused() -> None:
    peer = serving(Peer(SERVER))
    peer.receive(cancellation(7), 0)
    (why,) = mistakes(peer.receive(Request(7, "tools/list"), 0))
    assert peer.outgoing() == [(Error(7, INVALID_REQUEST, why), 7)]
    assert peer.answer(7, {}) is False
    serving(peer, 7)


def test_an_id_may_be_used_again_after_its_answer() -> None:
    peer = serving(Peer(SERVER))
    peer.answer(7, {"first": True})
    serving(peer).answer(7, {"second": True})
    assert sent(peer) == [Response(7, {"first": True}), Response(7, {"second": True})]


@pytest.mark.parametrize(
    ("line", "id"),
    [
        (b"{", None),
        (b'{"jsonrpc":"2.0","id":9,"method":5}', 9),
        (b'{"jsonrpc":"2.0","id":"x","method":"tools/call","params":[]}', "x"),
        (b'{"jsonrpc":"2.0","id":7,"method":5}', None),  # 7 is being served, and must not seem answered
    ],
)
def test_an_invalid_message_is_refused_with_its_id_if_that_is_free(line: bytes, id: Id | None) -> None:
    peer = serving(Peer(SERVER))
    (why,) = mistakes(peer.receive(decode(line, LIMITS), 0))
    ((error, about),) = peer.outgoing()
    assert isinstance(error, Error)
    assert (error.id, error.message, about) == (id, why, id)
    assert peer.serves(7)


def test_a_nested_request_is_refused_after_its_outer_request_has_ended() -> None:
    peer = serving(Peer(SERVER))
    assert peer.request("roots/list", about=7) == 1
    assert peer.outgoing() == [(Request(1, "roots/list"), 7)]
    peer.answer(7, {})
    for about in (7, 8):
        with pytest.raises(UsageError, match=f"request {about}, which it belongs to, has ended"):
            peer.request("roots/list", about=about)
    assert peer.waiting == 1


def test_a_served_request_can_be_forgotten_without_an_answer() -> None:
    class Session(Peer):
        def forget(self, id: Id) -> None:
            del self._serving[id]

    peer = Session(CLIENT)
    serving(peer)
    peer.forget(7)
    assert (peer.serving, peer.answer(7, {}), sent(peer)) == (0, False, [])


# Labels.


def labels(peer: Peer) -> list[object]:
    return [label for _, label in peer.outgoing()]


@pytest.mark.parametrize("label", ["stream 5", 0, "", ("a", 1), 8], ids=repr)
def test_messages_about_a_request_have_its_label(label: Any) -> None:
    peer = Peer(SERVER, link=SESSION)
    for id in (7, 8):
        request = Request(id, LISTEN, {"_meta": {"progressToken": "t"}})
        assert peer.receive(request, 0, about=label if id == 7 else None) == [request]
    peer.progress(7, 1)
    peer.notify("notifications/message", about=7)
    first, second = peer.request("roots/list", about=7), peer.request("roots/list", about=7, deadline=5)
    peer.cancel(first)
    peer.tick(5)
    assert peer.waiting == 0 < second
    assert peer.answer(7, {})
    assert labels(peer) == [label] * 7
    peer.progress(8, 1)
    peer.request("roots/list", about=8)
    peer.refuse(8, RequestError(1, "no"))
    assert labels(peer) == [8] * 3
    peer.notify("notifications/tools/list_changed")
    peer.request("ping")
    assert labels(peer) == [None] * 2


def test_the_end_of_a_subscription_has_its_label() -> None:
    peer = Peer(SERVER)
    peer.receive(Request(7, LISTEN), 0, about="here")
    peer.answer(7, {})
    assert peer.outgoing() == [(Response(7, {}), "here"), (cancellation(7), "here")]


@pytest.mark.parametrize(
    ("message", "id"),
    [
        (Request(7, "tools/list"), None),
        (Request(9, "tools/list", {"_meta": 0}), 9),
        (decode(b"{", LIMITS), None),
        (decode(b'{"jsonrpc":"2.0","id":"x","method":5}', LIMITS), "x"),
        (Batch((Request(1, "a"), Request(2, "b"))), None),
        (decode(b"[]", LIMITS), None),
    ],
)
def test_the_error_of_a_refused_message_has_the_label_of_that_message(message: Message, id: Id | None) -> None:
    peer = Peer(SERVER)
    peer.receive(Request(7, "tools/call"), 0, about="stream 1")
    peer.receive(message, 0, about="stream 2")
    ((error, label),) = peer.outgoing()
    assert isinstance(error, Error)
    assert (error.id, label) == (id, "stream 2")
    peer.receive(message, 0)
    assert labels(peer) == [id]
    peer.answer(7, {})
    assert labels(peer) == ["stream 1"]


def test_a_message_without_a_label_does_not_get_the_previous_label() -> None:
    peer = Peer(SERVER)
    peer.receive(Request(1, "a"), 0, about="stream 1")
    peer.receive(Request(2, "a"), 0)
    peer.receive(decode(b"{", LIMITS), 0)
    peer.answer(2, {})
    peer.answer(1, {})
    assert labels(peer) == [None, 2, "stream 1"]


def test_a_cancellation_does_not_use_the_label_of_a_later_request() -> None:
    peer = Peer(SERVER, link=SESSION)
    peer.receive(Request(7, "tools/call"), 0, about="stream 1")
    early, late = peer.request("roots/list", about=7), peer.request("roots/list", about=7)
    peer.cancel(early)
    peer.receive(cancellation(7), 0)
    peer.answer(7, {})
    peer.receive(Request(7, "tools/call"), 0, about="stream 2")
    peer.cancel(late)
    assert labels(peer) == ["stream 1", "stream 1", "stream 1", None]


def test_a_cancellation_removes_only_the_messages_of_its_request() -> None:
    peer = Peer(SERVER)
    for id in (7, 8):
        peer.receive(Request(id, "tools/call", {"_meta": {"progressToken": id}}), 0, about=8)
        peer.progress(id, 1)
    peer.notify("notifications/message", about=8)
    peer.receive(cancellation(7), 0)
    assert peer.outgoing() == [(progress(8, 1), 8), (Notification("notifications/message"), 8)]


def test_cancelled_requests_without_queued_messages_use_no_memory() -> None:
    peer = Peer(SERVER)
    peer.receive(Request("told", "tools/call", {"_meta": {"progressToken": 0}}), 0)
    peer.progress("told", 1)
    peer.outgoing()
    peer.notify("notifications/message")  # it stays in the queue, because the other side stops reading

    def held() -> int:
        return sum(len(value) for value in vars(peer).values() if isinstance(value, dict | list))

    peer.receive(cancellation("told"), 0)  # its progress was sent already
    peer.answer("told", {})
    before = held()
    for id in range(50):
        peer.receive(Request(id, "tools/call"), 0)
        peer.receive(cancellation(id), 0)
        peer.answer(id, {})
    assert before == held() == 1
    assert peer.outgoing() == [(Notification("notifications/message"), None)]


def test_a_cancellation_keeps_the_messages_of_earlier_requests_with_its_id(batched: Peer) -> None:
    batched.receive(Batch((Request(7, "a"), Request(8, "b"))), 0)
    batched.answer(7, {"turn": 1})
    batched.answer(8, {})
    serving(batched).answer(7, {"turn": 2})
    serving(batched).refuse(7, RequestError(1, "turn 3"))
    batched.receive(Request(7, "again", {"_meta": 0}), 0)
    serving(batched)
    assert batched.receive(cancellation(7), 0) == [RequestCancelled(7, "tools/call", "")]
    kinds = [(type(message), label) for message, label in batched.outgoing()]
    assert kinds == [(Batch, 7), (Response, 7), (Error, 7), (Error, 7)]


# Batches.


@pytest.fixture
def batched() -> Peer:
    peer = Peer(SERVER)
    peer.terms = BATCHES
    return peer


@req("batch-01", "batch-04")
def test_a_batch_is_served_member_by_member_and_answered_as_one(batched: Peer) -> None:
    requests = [Request(1, "a"), Notification("notifications/x"), Request("2", "b"), Request(3, "c")]
    assert batched.receive(Batch(tuple(requests)), 0) == requests
    assert batched.answer("2", {"of": "b"})
    assert batched.answer(1, {"of": "a"})
    assert batched.outgoing() == []
    assert batched.refuse(3, RequestError(-32602, "no"))
    answers = (Response("2", {"of": "b"}), Response(1, {"of": "a"}), Error(3, -32602, "no"))
    assert batched.outgoing() == [(Batch(answers), 1)]
    assert (batched.serving, batched.outgoing()) == (0, [])


@pytest.mark.parametrize("nonsense", ["first", "last"])
def test_the_answers_to_a_batch_have_its_label(batched: Peer, nonsense: str) -> None:
    members: list[Any] = [Request(1, "a", {"_meta": {"progressToken": "t"}}), Request(2, "b")]
    members.insert(0 if nonsense == "first" else 2, InvalidMessage("", Error(9, INVALID_REQUEST, "no method")))
    batched.receive(Batch(tuple(members)), 0, about="stream 5")
    batched.progress(1, 1)
    batched.answer(2, {})
    batched.answer(1, {})
    assert [(type(message), label) for message, label in batched.outgoing()] == [
        (Notification, "stream 5"),
        (Batch, "stream 5"),
    ]


@req("batch-04")
def test_a_batch_of_notifications_is_not_answered(batched: Peer) -> None:
    notes = [Notification("notifications/x"), Notification("notifications/y")]
    assert batched.receive(Batch(tuple(notes)), 0) == notes
    assert sent(batched) == []


def test_progress_of_a_member_does_not_wait_for_the_batch(batched: Peer) -> None:
    batched.receive(Batch((Request(1, "a", {"_meta": {"progressToken": "t"}}), Request(2, "b"))), 0)
    assert batched.progress(1, 1)
    assert batched.outgoing() == [(progress("t", 1), 1)]


@pytest.mark.parametrize("order", ["cancel first", "answer first", "cancel inside", "cancel all"])
@req("batch-04", "cancel-03")
def test_the_answer_to_a_batch_does_not_wait_for_a_cancelled_member(batched: Peer, order: str) -> None:
    members: list[Any] = [Request(1, "a"), Request(2, "b")]
    if order == "cancel inside":
        members.append(cancellation(1))
    batched.receive(Batch(tuple(members)), 0)
    if order == "answer first":
        batched.answer(2, {})
        assert sent(batched) == []
    if order != "cancel inside":
        assert batched.receive(cancellation(1), 0) == [RequestCancelled(1, "a", "")]
    if order == "cancel all":
        batched.receive(cancellation(2), 0)
    if order != "answer first":
        assert sent(batched) == []
        assert batched.answer(2, {}) is (order != "cancel all")
    assert batched.outgoing() == ([] if order == "cancel all" else [(Batch((Response(2, {}),)), 1)])
    assert batched.answer(1, {}) is False
    assert (batched.serving, sent(batched)) == (0, [])


def test_a_batch_whose_only_request_it_cancels_is_not_answered(batched: Peer) -> None:
    batched.receive(Batch((Request(1, "a"), cancellation(1))), 0)
    assert batched.answer(1, {}) is False
    assert sent(batched) == []


def test_a_batch_is_not_answered_before_all_of_it_was_read(batched: Peer) -> None:
    wrong = Error(8, INVALID_REQUEST, "no method")
    batched.receive(Batch((InvalidMessage("", wrong), Request(1, "a"), cancellation(1), Request(2, "b"))), 0)
    assert sent(batched) == []
    batched.answer(2, {})
    assert batched.outgoing() == [(Batch((wrong, Response(2, {}))), 8)]


def test_refused_members_of_a_batch_are_answered_with_the_others(batched: Peer) -> None:
    serving(batched, 9)
    line = b"""[{"jsonrpc":"2.0","id":8,"method":5}, {"jsonrpc":"2.0","id":1,"method":"a"}, 7,
        {"jsonrpc":"2.0","id":9,"method":"a"}, {"jsonrpc":"2.0","id":1,"method":"again"},
        {"jsonrpc":"2.0","id":3,"method":"a","params":{"_meta":0}}, {"jsonrpc":"2.0","method":"n"},
        {"jsonrpc":"2.0","method":5,"params":5}]"""
    events = batched.receive(decode(line, LIMITS), 0)
    assert [event for event in events if not isinstance(event, PeerMistake)] == [Request(1, "a"), Notification("n")]
    assert sent(batched) == []
    batched.answer(1, {})
    ((batch, about),) = batched.outgoing()
    assert isinstance(batch, Batch)
    ids = [answer.id for answer in batch.items if isinstance(answer, Response | Error)]
    assert (ids, about) == ([8, None, None, None, 3, None, 1], 8)
    assert batched.serving == 1


def test_a_batch_of_invalid_members_is_answered_at_once(batched: Peer) -> None:
    batched.receive(decode(b"[1, 2]", LIMITS), 0)
    ((batch, about),) = batched.outgoing()
    assert isinstance(batch, Batch)
    assert ([type(answer) for answer in batch.items], about) == ([Error, Error], None)


def test_answers_may_come_in_a_batch(batched: Peer) -> None:
    ids = [batched.request("a"), batched.request("b"), batched.request("c")]
    batched.outgoing()
    batch = Batch(
        (
            Response(ids[1], {}),
            Error(ids[0], 1, "no"),
            InvalidMessage("?", answers=ids[2]),
            InvalidMessage("a bad note"),
        )
    )
    assert batched.receive(batch, 0) == [
        Answered(ids[1], "b", {}),
        Refused(ids[0], "a", Error(ids[0], 1, "no")),
        InvalidAnswer(ids[2], "c", "?"),
        PeerMistake("a bad note"),
    ]
    assert (batched.waiting, sent(batched)) == (0, [])


def test_a_batch_may_hold_requests_and_answers_at_once(batched: Peer) -> None:
    id = batched.request("roots/list")
    batched.outgoing()
    events = batched.receive(Batch((Request(1, "a"), Response(id, {}))), 0)
    assert events == [Request(1, "a"), Answered(id, "roots/list", {})]
    batched.answer(1, {})
    assert sent(batched) == [Batch((Response(1, {}),))]


def test_a_due_timeout_is_reported_before_a_batch(batched: Peer) -> None:
    id = batched.request("a", deadline=5)
    assert batched.receive(Batch((Response(id, {}),)), 5) == [TimedOut(id, "a")]


def test_the_answers_of_a_batch_are_lost_with_the_link(batched: Peer) -> None:
    batched.receive(Batch((Request(1, "a"), Request(2, "b"))), 0)
    batched.answer(1, {})
    assert batched.connection_lost() == [RequestCancelled(2, "b", "the link was lost")]
    assert batched.answer(2, {}) is False
    assert sent(batched) == []


@req("life-18")
def test_a_batch_with_initialize_in_it_is_refused_as_a_whole(batched: Peer) -> None:
    (why,) = mistakes(batched.receive(Batch((Request(1, "ping"), Request(2, "initialize"))), 0))
    assert batched.outgoing() == [(Error(None, INVALID_REQUEST, why), None)]
    assert (batched.serving, "initialize" in why) == (0, True)


@req("batch-03", "life-18")
@pytest.mark.parametrize(
    "revision", [None, *(each for each in REVISIONS.values() if each.name != "2025-03-26")], ids=str
)
def test_a_batch_is_refused_in_other_revisions_and_fails_its_requests(revision: Any) -> None:
    peer = Peer(CLIENT)
    peer.terms = None if revision is None else Terms(revision)
    ids = [peer.request("a"), peer.request("b"), peer.request("c")]
    peer.outgoing()
    batch = Batch(
        (
            Request(1, "initialize"),
            Response(ids[0], {}),
            Error(ids[1], 1, "no"),
            InvalidMessage("?", answers=ids[2]),
            Error(None, 1, "no"),
            InvalidMessage("?", reply=Error(5, 1, "no")),
            Notification("notifications/x"),
        )
    )
    refused, *told = peer.receive(batch, 0)
    (why,) = mistakes([refused])
    assert told == [InvalidAnswer(id, method, why) for id, method in zip(ids, "abc", strict=True)]
    assert peer.outgoing() == [(Error(None, INVALID_REQUEST, why), None)]
    assert (peer.waiting, peer.serving) == (0, 0)
    assert str(revision or "no revision agreed") in why


# Any sequence of messages.

IDS = st.sampled_from([1, 2, 3, "1", "x", 9])
ANY_VALUE = st.sampled_from([None, True, 1.5, "x", 1, 2, [], {}, {"progressToken": 1}, {"progressToken": []}])
ANY_PARAMS = st.dictionaries(
    st.sampled_from(["_meta", "requestId", "reason", "progressToken", "progress", "total", "message"]), ANY_VALUE
)
SINGLE = st.one_of(
    st.builds(Request, IDS, st.sampled_from(["a", "initialize", LISTEN]), ANY_PARAMS),
    st.builds(Notification, st.sampled_from(["n", "notifications/cancelled", "notifications/progress"]), ANY_PARAMS),
    st.builds(Response, IDS, st.just({})),
    st.builds(Error, st.none() | IDS, st.integers(), st.text()),
    st.builds(InvalidMessage, st.text(), answers=st.none() | IDS),
    st.builds(InvalidMessage, st.text(), reply=st.builds(Error, st.none() | IDS, st.integers(), st.text())),
)


@req("cancel-06")
@settings(max_examples=150)
@given(
    link=st.sampled_from(LinkKind),
    role=st.sampled_from(Role),
    revision=st.sampled_from([None, *REVISIONS.values()]),
    heard=st.lists(SINGLE | st.builds(Batch, st.lists(SINGLE, min_size=1, max_size=5).map(tuple)), max_size=12),
    deadline=st.integers(0, 12),
)
def test_any_messages_give_each_request_one_outcome(
    link: LinkKind, role: Role, revision: Revision | None, heard: list[Message], deadline: int
) -> None:
    peer = Peer(role, link=link)
    peer.terms = None if revision is None else Terms(revision)
    asked = [peer.request("a", progress=True), peer.request(LISTEN, deadline=deadline), peer.request("initialize")]
    events = [event for now, message in enumerate(heard) for event in peer.receive(message, now)]
    running = [event.id for event in events if isinstance(event, Request)]
    assert peer.serving == len(running) == len({*running})
    for id in running:
        peer.answer(id, {})
    events += peer.connection_lost()
    ended = [event.id for event in events if isinstance(event, Outcome)]
    assert sorted(ended) == asked
    assert (peer.waiting, peer.serving) == (0, 0)


# Terms.


def test_terms_tell_the_declared_capabilities_of_the_other_side() -> None:
    terms = Terms(BATCHES.revision, {"resources": {"subscribe": True}, "tools": {}})
    assert terms.declares("tools")
    assert terms.declares("resources", "subscribe")
    assert not terms.declares("resources", "listChanged")
    assert not terms.declares("prompts")


@pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
def test_terms_tell_which_log_messages_are_wanted(revision: Revision) -> None:
    assert {Terms(revision).wants_log(level) for level in LOG_LEVELS} == {revision.handshake}
    terms = Terms(revision, log_level="error")
    assert [level for level in LOG_LEVELS if terms.wants_log(level)] == ["error", "critical", "alert", "emergency"]
    with pytest.raises(UsageError, match="level must be one of debug, "):
        terms.wants_log("loud")


def test_the_number_of_queued_messages_is_known() -> None:
    peer = Peer(CLIENT)
    assert peer.queued == 0
    peer.request("tools/call", PARAMS)
    peer.notify("notifications/initialized")
    assert peer.queued == 2
    peer.outgoing()
    assert peer.queued == 0


# Messages in the queue are charged to the account.


def test_queued_messages_are_charged_until_they_are_taken_or_lost() -> None:
    account = ByteBudget(Limits(bytes_in_all=12_000)).account("a")
    peer = Peer(Role.SERVER)
    peer.account = account
    long = {"text": "x" * 2000}
    for id in range(1, 6):
        peer.receive(Request(id, "tools/call"), 0)
    peer.answer(1, long)
    peer.notify("notifications/message", long)
    peer.request("sampling/createMessage", long)
    peer.refuse(2, RequestError(1, "x" * 2000))
    held = account.held
    assert held > 6000
    taken = peer.outgoing()
    assert peer.take_charge() == held == sum(charged(message) for message, _ in taken)
    assert charged(Batch(tuple(message for message, _ in taken if not isinstance(message, Request)))) < held
    account.give(held)
    longer = {"text": "x" * 20_000}
    assert not peer.notify("notifications/message", longer)
    assert not peer.notify("notifications/message", longer, about=3)
    peer.receive(Request(6, "tools/call", {"_meta": {"progressToken": "p"}}), 0)
    assert not peer.progress(6, 1, None, "x" * 20_000)
    with pytest.raises(RequestError, match="bytes_in_all"):
        peer.request("sampling/createMessage", longer)
    with pytest.raises(RequestError, match="bytes_in_all"):
        peer.answer(3, longer)
    peer.answer(3, long)
    peer.connection_lost()
    assert account.held == 0


@pytest.mark.parametrize("lost", [False, True])
def test_the_answers_of_a_batch_are_charged_until_the_batch_is_sent(batched: Peer, lost: bool) -> None:
    account = batched.account = ByteBudget(Limits()).account("a")
    batched.receive(Batch((Request(1, "a"), Request(2, "b"))), 0)
    batched.answer(1, {"text": "x" * 5000})
    assert account.held > 5000
    assert batched.outgoing() == []
    assert batched.take_charge() == 0  # the charge of other messages, which leave the queue before the batch
    if lost:
        batched.connection_lost()
        assert account.held == 0
        return
    batched.answer(2, {})
    [(batch, _)] = batched.outgoing()
    assert batched.take_charge() == charged(batch) == account.held
