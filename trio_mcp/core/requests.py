"""Requests in flight, in both directions: ids, progress, cancellation and deadlines.

A `Peer` is one end of a link: one stream such as stdio, an HTTP session, or one HTTP exchange (`LinkKind`).  `receive`
takes a message, changes all state before it returns, and returns events.  `outgoing` returns the messages to send.  In
this file "our" requests are those that we made, and "their" requests are those that the other side made and we serve.
For every request, in every revision and both roles, these rules hold:

- A request has exactly one outcome: a result, an error, an invalid answer, a timeout, a lost link, the end of a
  subscription by the server, or our cancellation.
- After the cancellation of a request of theirs was received, no message is sent for it, not even a queued one.
  (Requests that its handler made are ours.  They have their own outcomes, and the code that runs the handler cancels
  them.)
- Our ids only grow.  So an answer to an id that we have used is late if its request has ended, and is dropped.  An
  answer to any other unknown id is a mistake of the peer, and is reported.  Finished requests are not stored.
- If a deadline has passed when a message arrives, the timeout takes effect before the message.

The life cycle of a request is a table with a row for each state and a column for each event.  The cell holds the new
state and the action.  Clients and servers use the same tables: `CALLING` for the requests that we made, `SERVING` for
the requests that the peer made.  The meaning of a lost stream and of a cancellation depends on the kind of link, so
there is one table for each `LinkKind`, and no `if`.  A state has a row only where it differs from OPEN; in the other
tables OPEN is used instead.  So every cell matters: a test fails if any of them changes.  An event without a column in
a row cannot happen in that state: `step` raises, because it is a bug of ours, and changes no state.

`session` decides which method may be sent when, and under which terms.  `messages` reads and writes the bytes.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeGuard

import attrs

from trio_mcp.core import errors
from trio_mcp.core.errors import RequestError, SessionClosed, UsageError, shown
from trio_mcp.core.messages import (
    ABSENT,
    PROGRESS,
    Batch,
    CachedResult,
    Error,
    Event,
    Id,
    InvalidMessage,
    JsonObject,
    Limits,
    Message,
    Notification,
    Request,
    Response,
    mutable_record,
    prepare,
    prepared_progress,
    record,
)
from trio_mcp.core.revisions import REVISIONS, Role, Terms, meta_of
from trio_mcp.core.shares import FEW, Account

__all__ = [
    "ANSWER", "CALLING", "CANCELLED", "GONE", "NOTE", "SERVING", "Action", "Answered", "ConnectionLost",
    "InvalidAnswer", "LinkKind", "Outcome", "Outgoing", "Peer", "PeerComplaint", "PeerMistake", "ProgressReported",
    "Refused", "RequestCancelled", "RequestEvent", "State", "SubscriptionEnded", "Table", "TimedOut", "charged",
    "checked_total", "first_state", "step",
]  # fmt: skip


_RELATED_TASK = "io.modelcontextprotocol/related-task"


class _TableKey(enum.Enum):
    """An enum with a fast hash: each message looks up several members, and the hash of `Enum` is four times as slow."""

    __hash__ = object.__hash__


class LinkKind(_TableKey):
    """The kind of transport.  It decides what a lost stream and a cancellation mean."""

    DUPLEX = enum.auto()  # stdio, WebSocket, HTTP+SSE: one stream; if it is lost, all requests are lost
    SESSION = enum.auto()  # a legacy HTTP session: streams come and go; a lost stream ends no request
    EXCHANGE = enum.auto()  # one modern POST: closing its response stream is the cancellation


class State(_TableKey):
    """The state of a request."""

    OPEN = enum.auto()
    STANDING = enum.auto()  # a subscription: the side that serves it may end it too
    FIXED = enum.auto()  # `initialize` and the probe before it: never cancelled
    CANCELLED = enum.auto()  # only for requests that we serve: cancelled, but the handler has not ended yet
    GONE = enum.auto()  # finished and forgotten: there is no row for it


class RequestEvent(_TableKey):
    """An event in the life of a request."""

    ANSWER = enum.auto()  # a result: from the peer for a request we made, from us for one we serve
    ERROR = enum.auto()
    GARBLED = enum.auto()  # an answer that is not a valid message
    NOTE = enum.auto()  # progress, or another notification that belongs to the request
    CANCEL = enum.auto()  # by the side that made the request
    TEARDOWN = enum.auto()  # a cancellation by the side that serves the request
    EXPIRE = enum.auto()
    STREAM_LOST = enum.auto()
    FAILED = enum.auto()  # our side cannot send the request, or can no longer receive its answer
    INPUT_ENDED = enum.auto()  # half of the link is closed: the peer sends no more messages, but may still read
    LINK_LOST = enum.auto()


class Action(_TableKey):
    """The action that an event requires."""

    NOTHING = enum.auto()
    # For a request that we made:
    REPORT = enum.auto()  # report the outcome or the progress
    SEND_CANCEL = enum.auto()
    SEND_CANCEL_AND_REPORT = enum.auto()
    # For a request that we serve; a message that is not written is dropped:
    STOP_HANDLER = enum.auto()
    WRITE = enum.auto()
    WRITE_AND_TEAR_DOWN = enum.auto()


Row: TypeAlias = Mapping[RequestEvent, tuple[State, Action]]
Table: TypeAlias = dict[State, dict[RequestEvent, tuple[State, Action]]]

# Module names for the members that each message needs: in Python 3.11 the lookup of a member is eight times as slow.
OPEN, STANDING, FIXED, CANCELLED, GONE = State
ANSWER, NOTE, _NOTHING = RequestEvent.ANSWER, RequestEvent.NOTE, Action.NOTHING

# Requests that we made.

_WAITING: Row = {
    RequestEvent.ANSWER: (GONE, Action.REPORT),
    RequestEvent.ERROR: (GONE, Action.REPORT),
    RequestEvent.GARBLED: (GONE, Action.REPORT),
    RequestEvent.NOTE: (OPEN, Action.REPORT),
    RequestEvent.CANCEL: (GONE, Action.SEND_CANCEL),
    RequestEvent.TEARDOWN: (OPEN, Action.NOTHING),  # cancel-13: the serving side may end only a subscription
    RequestEvent.EXPIRE: (GONE, Action.SEND_CANCEL_AND_REPORT),
    # No cancellation is sent: the peer never got the request, or cannot be reached.
    RequestEvent.FAILED: (GONE, Action.REPORT),
    RequestEvent.LINK_LOST: (GONE, Action.REPORT),
}
_SUBSCRIBED: Row = {
    **_WAITING,
    RequestEvent.NOTE: (STANDING, Action.REPORT),
    RequestEvent.TEARDOWN: (GONE, Action.REPORT),
}
_OPENING: Row = {
    **_WAITING,
    RequestEvent.NOTE: (FIXED, Action.REPORT),
    RequestEvent.TEARDOWN: (FIXED, Action.NOTHING),
    # "The initialize request MUST NOT be cancelled by clients": we give up without a message.
    RequestEvent.CANCEL: (GONE, Action.NOTHING),
    RequestEvent.EXPIRE: (GONE, Action.REPORT),
}
# cancel-15: the client closes the response stream and posts no cancellation.
# http-114: a broken stream loses its request.
_BY_ITS_STREAM: Row = {
    RequestEvent.CANCEL: (GONE, Action.NOTHING),
    RequestEvent.EXPIRE: (GONE, Action.REPORT),
    RequestEvent.STREAM_LOST: (GONE, Action.REPORT),
}

# No answer can come.  No cancellation is sent: it only makes sense if the answer could still come.
_UNANSWERABLE: Row = {RequestEvent.INPUT_ENDED: (GONE, Action.REPORT)}

CALLING: dict[LinkKind, Table] = {
    LinkKind.DUPLEX: {
        OPEN: {**_WAITING, **_UNANSWERABLE},
        STANDING: {**_SUBSCRIBED, **_UNANSWERABLE},
        FIXED: {**_OPENING, **_UNANSWERABLE},
    },
    # The answer can still come, if the stream is resumed or with the next GET.
    LinkKind.SESSION: {
        OPEN: {**_WAITING, RequestEvent.STREAM_LOST: (OPEN, Action.NOTHING)},
        FIXED: {**_OPENING, RequestEvent.STREAM_LOST: (FIXED, Action.NOTHING)},
    },
    # No FIXED row: no cancellation is ever sent here, so a request that must not be cancelled is like any other.
    LinkKind.EXCHANGE: {OPEN: {**_WAITING, **_BY_ITS_STREAM}, STANDING: {**_SUBSCRIBED, **_BY_ITS_STREAM}},
}

# Requests that we serve.

_RUNNING: Row = {
    RequestEvent.ANSWER: (GONE, Action.WRITE),
    RequestEvent.ERROR: (GONE, Action.WRITE),
    RequestEvent.NOTE: (OPEN, Action.WRITE),
    RequestEvent.CANCEL: (CANCELLED, Action.STOP_HANDLER),
    RequestEvent.LINK_LOST: (CANCELLED, Action.STOP_HANDLER),
}
_LISTENED: Row = {
    **_RUNNING,
    RequestEvent.NOTE: (STANDING, Action.WRITE),
    # cancel-12: a subscription ends with its result and then, if there is no stream to close, with a cancellation.
    RequestEvent.ANSWER: (GONE, Action.WRITE_AND_TEAR_DOWN),
}
_OPENED: Row = {**_RUNNING, RequestEvent.NOTE: (FIXED, Action.WRITE), RequestEvent.CANCEL: (FIXED, Action.NOTHING)}
# cancel-18: after the cancellation no message is sent for the request.  The request stays until its handler has ended,
# so that a late answer cannot be taken for the answer to a new request with the same id.
_STOPPED: Row = {
    RequestEvent.ANSWER: (GONE, Action.NOTHING),
    RequestEvent.ERROR: (GONE, Action.NOTHING),
    RequestEvent.NOTE: (CANCELLED, Action.NOTHING),
    RequestEvent.CANCEL: (CANCELLED, Action.NOTHING),
    RequestEvent.LINK_LOST: (CANCELLED, Action.NOTHING),
}

SERVING: dict[LinkKind, Table] = {
    # A peer that closes its side of the stream may still read, so handlers go on and their answers are sent.  The owner
    # of the link limits the time for that, and ends the subscriptions, which have no more purpose.
    LinkKind.DUPLEX: {
        OPEN: {**_RUNNING, RequestEvent.INPUT_ENDED: (OPEN, Action.NOTHING)},
        STANDING: {**_LISTENED, RequestEvent.INPUT_ENDED: (STANDING, Action.NOTHING)},
        FIXED: {**_OPENED, RequestEvent.INPUT_ENDED: (FIXED, Action.NOTHING)},
        CANCELLED: {**_STOPPED, RequestEvent.INPUT_ENDED: (CANCELLED, Action.NOTHING)},
    },
    # http-28: a lost connection is not a cancellation; the answer waits in the session.
    LinkKind.SESSION: {
        OPEN: {**_RUNNING, RequestEvent.STREAM_LOST: (OPEN, Action.NOTHING)},
        FIXED: {**_OPENED, RequestEvent.STREAM_LOST: (FIXED, Action.NOTHING)},
        CANCELLED: {**_STOPPED, RequestEvent.STREAM_LOST: (CANCELLED, Action.NOTHING)},
    },
    # cancel-14: a closed response stream cancels its request, whatever its method.
    LinkKind.EXCHANGE: {
        OPEN: {**_RUNNING, RequestEvent.STREAM_LOST: (CANCELLED, Action.STOP_HANDLER)},
        CANCELLED: {**_STOPPED, RequestEvent.STREAM_LOST: (CANCELLED, Action.NOTHING)},
    },
}


# The methods whose requests do not begin as OPEN.  The methods differ by era, so all revisions share one mapping.
_FIRST: Mapping[str, State] = {
    **{method: STANDING for each in REVISIONS.values() for method in each.teardown},
    **{method: FIXED for each in REVISIONS.values() for method in each.uncancellable},
}


def first_state(table: Table, method: str) -> State:
    """Return the initial state of a request for `method`."""
    state = _FIRST.get(method, OPEN)
    return state if state in table else OPEN


def step(table: Table, state: State, event: RequestEvent) -> tuple[State, Action]:
    """Return the new state and the action.  Raises `UsageError` if the event cannot happen in this state."""
    try:
        return table[state][event]
    except KeyError:
        raise UsageError(f"{event.name} cannot happen to a request that is {state.name} on this link") from None


# The events that a `Peer` reports.  The names are from our point of view.


@mutable_record
class Outcome(Event):
    """The outcome of a request of ours.  Every request has exactly one, except a request that we cancel."""

    id: Id
    method: str


@mutable_record
class Answered(Outcome):
    """The answer is a result."""

    result: JsonObject


@record
class Refused(Outcome):
    """The answer is an error."""

    error: Error


@record
class InvalidAnswer(Outcome):
    """The answer is malformed."""

    why: str


@record
class TimedOut(Outcome):
    """The deadline has passed.  The cancellation was sent to the peer, if the protocol allows it."""


@record
class ConnectionLost(Outcome):
    """The stream or the connection is lost, or the request failed on it.  The peer may have executed the request."""

    why: str


@record
class SubscriptionEnded(Outcome):
    """The server ended a subscription without a result."""

    reason: str


@record
class ProgressReported(Event):
    """Progress of a request of ours."""

    id: Id
    progress: float
    total: float | None
    message: str | None


@record
class RequestCancelled(Event):
    """A request that we serve was cancelled.  Its handler must stop, and its answer will be dropped.

    Call `answer` or `refuse` after the handler has ended, as for any request.  The call sends no message, but it frees
    the request.  Until then the request counts against `Limits.requests`, and a new request must not use its id.
    """

    id: Id
    method: str
    reason: str


@record
class PeerComplaint(Event):
    """The peer sent an error without an id: it could not read one of our messages."""

    error: Error


@record
class PeerMistake(Event):
    """The peer broke the protocol without damage: the message was refused, ignored or corrected."""

    why: str


OutgoingMessage: TypeAlias = Request | Notification | Response | Error | Batch
Outgoing: TypeAlias = tuple[OutgoingMessage, Hashable | None]
"""A message, and the label of the request that it belongs to.  The label tells a transport which stream to use.

The label is the argument `about` of the `receive` that got the request.  Messages with that label are: the answer, a
batch of answers, progress, notifications, requests that the handler makes, and their cancellations.  The error for a
message that could not be served has the label of that message, even if the error has no id.  If `receive` got no label,
the label is the id of the request, of the first request in a batch, or of the error.  None: the message belongs to no
request of theirs.
"""

_CANCELLED = "notifications/cancelled"
_SENDS_CANCEL = frozenset({Action.SEND_CANCEL, Action.SEND_CANCEL_AND_REPORT})
_TEARS_DOWN = Action.WRITE_AND_TEAR_DOWN
_REPORTS = frozenset({Action.REPORT, Action.SEND_CANCEL_AND_REPORT})
_ANSWERS = frozenset({RequestEvent.ANSWER, RequestEvent.ERROR, RequestEvent.GARBLED})
_NO_META: JsonObject = {}
_QUEUE_FULL = "the other side does not read fast enough, and too much data is queued"
_LIMITS = Limits()


def charged(message: Message) -> int:
    """Return the bytes that a queued message uses in `Peer.account`: its size, or 0 if it is short or an error."""
    if type(message) is Batch:
        return sum(map(charged, message.items))
    size = len(getattr(message, "_bytes", b""))  # a message that is not prepared was not charged
    return size if size > FEW and type(message) is not Error else 0


def _is_id(value: object) -> TypeGuard[Id]:
    return type(value) in (int, str)


def _number(value: object) -> float | None:
    """Return `value` as an int or float.  None: it cannot measure progress, because it is not a finite number.

    A bool is not a number here.  Infinity is refused because no later value could exceed it.
    """
    if type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if -math.inf < value < math.inf else None
    return int(value) if isinstance(value, int) and type(value) is not bool else None


def checked_total(total: object, message: object) -> float | None:
    """Return the total of a progress report.  Raises `UsageError` if it, or the message, has a wrong type."""
    number = total if total is None or type(total) is int else _number(total)
    if total is not None and number is None:
        raise UsageError(f"the total of progress must be a finite number, got {shown(total)}")
    if not (message is None or isinstance(message, str)):
        raise UsageError(f"the message of progress must be a string, got {type(message).__name__}")
    return number


@attrs.define(eq=False, repr=False)
class _OutgoingRequest:
    """A request that we made.  `progress`: the highest value received, or None if we did not ask for progress."""

    id: int
    method: str
    state: State
    about: Id | None
    label: Hashable | None
    progress: float | None


@attrs.define(eq=False, repr=False)
class _BatchReply:
    """The answers to a batch.  They are sent together, after all members were received and no answer is missing.

    `waiting`: the ids of the requests without an answer, and None while the batch is being received.
    """

    label: Hashable | None = None
    waiting: set[Id | None] = attrs.field(factory=lambda: {None})
    answers: list[Response | Error] = attrs.field(factory=list)


@attrs.define(eq=False, repr=False)
class _IncomingRequest:
    """A request that we serve.

    `token`: its progress token, if the peer wants progress.  `progress`: the last value sent.  `queued`: the value of
    `Peer._handed_out` when a message of this request was last queued.
    """

    method: str
    state: State
    label: Hashable
    token: Id | None
    batch: _BatchReply | None
    progress: float = -math.inf
    terms: Terms | None = None
    queued: int = -1


class Peer:
    """One end of a link; see the head of this file.

    `terms` are the terms of the whole link.  They are None before the handshake, and if each request brings its own.
    Threads that share a peer need one lock.  A thread holds it while it calls a method, calls `outgoing` and writes the
    messages.  Otherwise two threads could write in the wrong order.
    """

    # Class attributes, because few peers change these values, and over HTTP each modern request has its own peer.
    half_closed = False
    """The other side sends no more messages, so it cannot answer our requests.  It may still read."""
    account: Account | None = None
    """If set, it counts the bytes of the queued messages that are not short.  See `take_charge`."""
    _charged = 0

    def __init__(self, role: Role, *, link: LinkKind = LinkKind.DUPLEX, limits: Limits | None = None) -> None:
        self.role = role
        self.link = link
        self.limits = limits if limits is not None else _LIMITS
        self.terms: Terms | None = None
        self.closed = False
        self._next_id = 1
        self._calling: dict[Id, _OutgoingRequest] = {}
        self._serving: dict[Id, _IncomingRequest] = {}
        self._deadlines: list[tuple[float, int]] = []
        # The queue: each message with its label, and the request of theirs whose cancellation withdraws the message.
        # The queue has no limit here.  It holds one message for each received one, one cancellation for each request of
        # ours, and the messages of the caller.  While the owner of the peer cannot write, it must stop reading and
        # queueing.
        self.queue: list[tuple[OutgoingMessage, Hashable | None, Id | None]] = []
        """The messages to send, with their labels; use `outgoing`.  A plain list, because its length is read often."""
        self._handed_out = 0  # how many times `outgoing` was called
        # For each cancelled request of theirs that had messages in the queue: the length of the queue when it was
        # cancelled.  There are never more entries than queued messages, even if the peer cancels and does not read.
        self._withdrawn: dict[Id | None, int] = {}
        # An answer without an id may belong to a message that is older than our only open request.  This is set to
        # `_next_id` when we send a message that has no answer, or give up a request.  It is set to 0 when a request
        # that we made later is answered.  See `_only_possible_request`.
        self._ambiguous_before = 0

    @property
    def unreadable_id_is_null(self) -> bool:
        """Whether an error for a message with an unreadable id has a null id.  Otherwise it has no id."""
        return self.terms is None or self.terms.revision.unreadable_id_is_null

    # Messages that we send.

    def request(
        self,
        method: str,
        params: JsonObject | None = None,
        *,
        deadline: float | None = None,
        progress: bool = False,
        about: Id | None = None,
        undeclared: bool = False,
    ) -> int:
        """Queue a request and return its id.  Exactly one outcome will have this id.

        `deadline` is a time on the clock of `tick`.  `progress` asks for progress events.  `about` is the request of
        theirs whose handler makes this request.  Raises `SessionClosed` if the link is lost.  Raises
        `UsageError` if `about` has ended, if too many requests are open, if `params` cannot be written, or if they have
        a progress token (prog-02: tokens must be unique, so we choose them).

        A session also checks the terms.  It raises `NotInThisRevision` if the revision does not have the method, and
        `NotDeclared` if the request needs a capability that the other side did not declare; `undeclared` turns this
        last check off.
        """
        params, more = self._check_call(method, params or {}, progress, about, undeclared)
        return self._send_request(method, params, more, deadline, progress, about)

    def count_from(self, id: int) -> None:
        """Let the ids of our requests begin with this number, if several processes make requests in one session."""
        self._next_id = id

    def _check_call(
        self, method: str, params: JsonObject, progress: bool, about: Id | None, undeclared: bool
    ) -> tuple[JsonObject, CachedResult | None]:
        """Check a request of ours.  Returns its params, and further members that the terms add."""
        return params, None

    def _send_request(
        self,
        method: str,
        params: JsonObject,
        more: CachedResult | None,
        deadline: float | None = None,
        progress: bool = False,
        about: Id | None = None,
    ) -> int:
        """As `request`, without checks.  `more`: members of the params under other names; `progress` is then False."""
        if self.closed:
            raise SessionClosed(f"{method} was not sent: the link is closed")
        if self.half_closed:
            raise SessionClosed(f"{method} was not sent: the {self.role.other.value} has closed its side of the link")
        if len(self._calling) >= self.limits.requests:
            limit_text = f"{self.limits.requests} requests are waiting for answers (Limits.requests)"
            raise UsageError(f"{method} was not sent: {limit_text}")
        label = None if about is None else self.label_of(about)
        if about is not None and label is None:
            raise UsageError(f"{method} was not sent: request {shown(about)}, which it belongs to, has ended")
        id = self._next_id
        if more is None and (progress or type(params) is not dict or "_meta" in params):
            meta = meta_of(f"the params of {method}", params)
            if progress:  # the id is also the token: it is never used again, so it is unique
                params = {**params, "_meta": {**meta, "progressToken": id}}
            elif "progressToken" in meta:
                raise UsageError(f"{method} was not sent: use progress=True instead of a progressToken in _meta")
        request = prepare(Request(id, method, params), more)
        if self.account is not None and (limit := self._charge(request)) is not None:
            raise RequestError(errors.INTERNAL_ERROR, f"{method} was not sent: {_QUEUE_FULL} (Limits.{limit})")
        self._next_id += 1
        state = first_state(CALLING[self.link], method) if method in _FIRST else OPEN
        self._calling[id] = _OutgoingRequest(id, method, state, about, label, -math.inf if progress else None)
        if deadline is not None:
            self._schedule(deadline, id)
        self.queue.append((request, label, None))
        return id

    def notify(self, method: str, params: JsonObject | None = None, *, about: Id | None = None) -> bool:
        """Queue a notification.

        Returns False if it is not sent: the link is lost, the request `about` has ended, or the notification is long
        and too much data is queued.  Raises `UsageError` if the notification cannot be written as JSON.  Also raises it
        for cancellations and progress: use `cancel` and `progress`, which update the request.

        A session also checks the terms.  It raises `NotInThisRevision` if the revision does not have the method, and
        `NotDeclared` if we did not declare the capability.  It returns False for a log message that the client did not
        ask for, and before the end of the handshake if the notification must not be sent yet.  No information is lost:
        the other side has read no data yet that a change could make stale.  In the modern era every notification
        belongs to a request, and change notifications belong to subscriptions.  So a server raises `UsageError` for a
        change notification if `about` is not a subscription, or if it lacks the id of the subscription
        (`ChangeEvent.notification` adds it), and for any other notification if `about` is a subscription.
        """
        params = params or {}
        if not self._may_notify(method, params, about):
            return False
        if method in (_CANCELLED, PROGRESS):
            raise UsageError(f"{method} must be sent with Peer.cancel or Peer.progress")
        note = Notification(method, params)
        meta_of(f"the params of {method}", note.params)
        if about is not None:
            serving = self._serving.get(about)
            return serving is not None and self._notify_about(about, serving, note)
        if self.closed or self._charge(prepare(note)) is not None:
            return False
        self._queue(note, None)
        return True

    def progress_later(
        self, token: Id, progress: float, total: float | None, message: str | None, meta: JsonObject | None = None
    ) -> bool:
        """Report progress of a request that is answered already, under its token (prog-11).  False: it is not sent.

        `meta` is its `_meta`.  The caller checks that the numbers rise.  Raises as `progress` for numbers and a message
        that cannot be written.
        """
        if self.closed:
            return False
        note = prepared_progress(token, progress, total, message)
        if meta:
            note = Notification(PROGRESS, {**note.params, "_meta": meta})
        if self._charge(prepare(note)) is not None:
            return False
        self._queue(note, None)
        return True

    def _may_notify(self, method: str, params: JsonObject, about: Id | None) -> bool:
        """Check a notification of ours.  False: it is not sent now."""
        return True

    def progress(self, id: Id, progress: float, total: float | None = None, message: str | None = None) -> bool:
        """Report progress of a request that we serve.

        Returns False if it is not sent: the request has ended, the peer did not ask for progress, too much data is
        queued, or `progress` equals the last value ("The progress value MUST increase").  Raises `UsageError` if
        `progress` is not a number or is less than the last value, if the message cannot be written as JSON, and for a
        subscription (http-116).
        """
        serving = self._serving.get(id)
        if serving is None:
            return False
        terms = serving.terms or self.terms
        if terms is not None and serving.method in terms.revision.teardown:
            raise UsageError(f"in {terms.revision}, {PROGRESS} is never sent on a subscription")
        if serving.token is None:
            return False
        new_value = progress if type(progress) is int else _number(progress)
        new_total = checked_total(total, message)
        if new_value is None or new_value < serving.progress:
            last = "" if serving.progress == -math.inf else f", at least {shown(serving.progress)}"
            raise UsageError(f"progress of request {shown(id)} must be a finite number{last}, got {shown(progress)}")
        # Not an error: a loop that reports its count of finished items reports the same count after a skipped item.
        if new_value == serving.progress:
            return False
        if terms is not None and not terms.revision.progress_message:
            message = None
        if not self._notify_about(id, serving, prepared_progress(serving.token, new_value, new_total, message)):
            return False
        serving.progress = new_value
        return True

    def answer(self, id: Id, result: JsonObject) -> bool:
        """Answer a request that we serve.  False: the request has ended or was cancelled, and no message is sent.

        The result is written as JSON at once; later changes of the dict have no effect.  Raises `UsageError` if it
        cannot be written, and `RequestError` if it is long and too much data is queued.  After an error the request
        still waits for an answer.
        """
        return self._finish(id, Response(id, result), ANSWER)

    def refuse(self, id: Id, error: RequestError) -> bool:
        """Answer a request that we serve with an error.  Returns and raises as `answer`."""
        data = ABSENT if error.data is None else error.data
        return self._finish(id, Error(id, error.code, error.message, data), RequestEvent.ERROR)

    def cancel(self, id: Id, reason: str = "") -> bool:
        """Cancel a request of ours.  Returns False if it had already ended.

        Queues a cancellation for the peer if the kind of link requires one.  Raises `UsageError` if the reason cannot
        be written.
        """
        calling = self._calling.get(id)
        if calling is None:
            return False
        self._call_step(calling, RequestEvent.CANCEL, reason)
        return True

    # Facts about the link.

    def connection_lost(self, about: Id | None = None, why: str = "the link was lost") -> list[Event]:
        """Report that the link is lost, or (with `about`) only the stream of the client's request with this id.

        The effect of a lost stream depends on the kind of link.  In a session the answer can still come on another
        stream, so the request goes on; call `fail` if no other stream is expected.  A second loss of the link has
        no effect.  Raises `UsageError` for a lost stream if the link has no streams.
        """
        events: list[Event] = []
        if about is not None:
            if RequestEvent.STREAM_LOST not in CALLING[self.link][State.OPEN]:
                raise UsageError("this link is a single stream: call connection_lost without `about`")
            if self.role is Role.CLIENT:
                self._end(self._calling.get(about), RequestEvent.STREAM_LOST, events, ConnectionLost, why)
            elif (serving := self._serving.get(about)) is not None:
                self._stop(about, serving, RequestEvent.STREAM_LOST, why, events)
            return events
        self.closed = True
        self._end_all(RequestEvent.LINK_LOST, why, events)
        self.queue.clear()
        if self._charged and self.account is not None:
            self.account.give(self.take_charge())
        return events

    def input_ended(self, why: str = "the other side of the link was closed") -> list[Event]:
        """Report that the other side has closed its half of the link.  It sends no more messages, but may still read.

        Our requests end with `ConnectionLost`, and no new one can be made.  Their requests go on, and the answers are
        sent.  Raises `UsageError` if the link is not one single stream.
        """
        if RequestEvent.INPUT_ENDED not in CALLING[self.link][State.OPEN]:
            raise UsageError("only a link with a single stream has an end of input (LinkKind.DUPLEX)")
        self.half_closed = True
        events: list[Event] = []
        self._end_all(RequestEvent.INPUT_ENDED, why, events)
        return events

    def _end_all(self, event: RequestEvent, why: str, events: list[Event]) -> None:
        """Apply the end of the link, or of half of it, to all requests of both sides."""
        for our_id in list(self._calling):  # the end of an opening ends the others too
            self._end(self._calling.get(our_id), event, events, ConnectionLost, why)
        for id, serving in list(self._serving.items()):
            self._stop(id, serving, event, why, events)

    def fail(self, id: Id, why: str) -> list[Event]:
        """Report that a request of ours can never be answered: its POST was refused, or its stream is given up.

        The request ends with `ConnectionLost` on every kind of link.  No cancellation is sent, and other requests go
        on.  Returns no event if the request had already ended.
        """
        events: list[Event] = []
        self._end(self._calling.get(id), RequestEvent.FAILED, events, ConnectionLost, why)
        return events

    def serves(self, id: Id) -> bool:
        """Return whether a request of theirs still waits for its answer."""
        return self.label_of(id) is not None

    def label_of(self, id: Id | None) -> Hashable | None:
        """Return the label of a request of theirs that still waits for its answer, otherwise None."""
        serving = None if id is None else self._serving.get(id)
        return None if serving is None or serving.state is CANCELLED else serving.label

    def terms_of(self, id: Id) -> Terms | None:
        """Return the terms of a request of theirs, or None if it is not being served."""
        serving = self._serving.get(id)
        return None if serving is None else serving.terms or self.terms

    @property
    def waiting(self) -> int:
        """The number of our requests that have no outcome yet."""
        return len(self._calling)

    @property
    def serving(self) -> int:
        """The number of their requests whose handler has not ended."""
        return len(self._serving)

    @property
    def queued(self) -> int:
        """The number of messages in the queue."""
        return len(self.queue)

    def outgoing(self) -> list[Outgoing]:
        """Return the messages to send, in order, and empty the queue."""
        out, self.queue = self.queue, []
        self._handed_out += 1
        if not self._withdrawn:
            return [(message, label) for message, label, _ in out]
        withdrawn, self._withdrawn = self._withdrawn, {}
        # cancel-18: messages that were queued for a request before its cancellation are dropped here.
        return [(message, label) for at, (message, label, id) in enumerate(out) if at >= withdrawn.get(id, 0)]

    def take_charge(self) -> int:
        """Return the bytes that `account` was charged for the messages that `outgoing` has just returned.

        The caller gives them back to the account when the messages are written.
        """
        charged, self._charged = self._charged, 0
        return charged

    def _charge(self, message: Request | Notification | Response | Error) -> str | None:
        """Charge a prepared message before it is queued.  Returns the name of the limit that is exceeded, or None."""
        size = len(message._bytes)
        if size <= FEW or self.account is None:
            return None
        limit = self.account.take(size)
        if limit is None:
            self._charged += size
        return limit

    # Time.

    def next_deadline(self) -> float | None:
        """Return the time for the next `tick`, or None if there is no deadline."""
        while self._deadlines and self._deadlines[0][1] not in self._calling:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def tick(self, now: float) -> list[Event]:
        """End our requests whose deadline has passed: each gets the event `TimedOut`."""
        events: list[Event] = []
        due: list[int] = []  # first all, because a client that opens its session then makes its next request
        while self._deadlines and self._deadlines[0][0] <= now:
            due.append(heapq.heappop(self._deadlines)[1])
        for id in due:
            self._end(self._calling.get(id), RequestEvent.EXPIRE, events, TimedOut, reason="timed out")
        return events

    def _schedule(self, deadline: float, id: int) -> None:
        heapq.heappush(self._deadlines, (deadline, id))
        # Entries of answered requests stay in the heap.  They are removed when there are more of them than live ones.
        if len(self._deadlines) > 2 * len(self._calling) + 16:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._calling]
            heapq.heapify(self._deadlines)

    # Messages that the peer sends.

    def receive(self, message: Message, now: float, *, about: Hashable | None = None) -> list[Event]:
        """Process one received message and return its events.

        Never raises for a mistake of the peer.  A mistake is answered, reported, or both.  `about` is the transport's
        label for the stream or exchange that the message came on; see `Outgoing`.
        """
        events = self.tick(now) if self._deadlines and self._deadlines[0][0] <= now else []
        if not self.closed:
            self._RECEIVERS[type(message)](self, message, events, about, None)
        return events

    def _receive_request(
        self, request: Request, events: list[Event], about: Hashable | None, batch: _BatchReply | None
    ) -> None:
        id = request.id
        meta = request.params.get("_meta", _NO_META)
        token = meta.get("progressToken") if type(meta) is dict else None
        if id in self._serving:
            code, why = errors.INVALID_REQUEST, f"id {shown(id)} belongs to a request that is still being served"
        elif len(self._serving) >= self.limits.requests:
            code = errors.INTERNAL_ERROR
            why = f"{self.limits.requests} requests are being served (Limits.requests); try again later"
        elif type(meta) is not dict or not (token is None or _is_id(token)):
            code = errors.INVALID_PARAMS
            why = "params._meta must be an object, and its progressToken a string or an integer"
        elif token is not None and type(token) is str and len(token) > self.limits.id_length:
            code = errors.INVALID_PARAMS
            why = f"the progressToken is longer than {self.limits.id_length} characters (Limits.id_length)"
        else:
            method, label = request.method, id if about is None else about
            state = first_state(SERVING[self.link], method) if method in _FIRST else OPEN
            self._serving[id] = _IncomingRequest(method, state, label, token, batch)
            if batch is not None:
                batch.label = label if batch.label is None else batch.label
                batch.waiting.add(id)
            events.append(request)
            return
        self._refuse_at_once(Error(id, code, why), events, about, batch)

    def _receive_notification(self, note: Notification, events: list[Event], about: Hashable, batch: object) -> None:
        if note.method == _CANCELLED:
            self._cancelled(note.params, events)
        elif note.method == PROGRESS and not self._is_of_task(note.params):
            self._progressed(note.params, events)
        else:
            events.append(note)

    def _is_of_task(self, params: JsonObject) -> bool:
        """Whether progress is that of a task, whose request is answered: "the token stays in use" (prog-11)."""
        meta, token = params.get("_meta"), params.get("progressToken")
        return isinstance(meta, dict) and _RELATED_TASK in meta and _is_id(token) and token not in self._calling

    def _receive_result(self, message: Response, events: list[Event], about: Hashable, batch: object) -> None:
        calling = self._calling.get(message.id) or self._find_request(message.id, events)
        if calling is not None and self._call_step(calling, ANSWER):
            events += self._ended(Answered(calling.id, calling.method, message.result))

    def _receive_error(self, message: Error, events: list[Event], about: Hashable, batch: object) -> None:
        id = self._only_possible_request() if message.id is None else message.id
        if id is None:
            events.append(PeerComplaint(message))
        else:
            self._end(self._find_request(id, events), RequestEvent.ERROR, events, Refused, message)

    def _receive_invalid(
        self, message: InvalidMessage, events: list[Event], about: Hashable | None, batch: _BatchReply | None
    ) -> None:
        id = message.answers
        if id is None and message.response:
            id = self._only_possible_request()
        if message.reply is not None:
            self._refuse_at_once(message.reply, events, about, batch, message.why)
        elif id is None:
            events.append(PeerMistake(message.why))
        else:
            self._end(self._find_request(id, events), RequestEvent.GARBLED, events, InvalidAnswer, message.why)

    def _receive_batch(
        self, message: Batch, events: list[Event], about: Hashable | None, batch: _BatchReply | None
    ) -> None:
        why = ""
        if self.terms is None or not self.terms.revision.batches:
            agreed = self.terms.revision if self.terms else "no revision agreed yet"
            why = f"only 2025-03-26 has batches (here: {agreed}); send the messages one by one"
        elif any(isinstance(item, Request) and item.method == "initialize" for item in message.items):
            why = "initialize must not be part of a batch"
        if why:
            self._refuse_at_once(Error(None, errors.INVALID_REQUEST, why), events, about, None)
            for item in message.items:
                id = item.id if isinstance(item, Response | Error) else getattr(item, "answers", None)
                if id is not None:  # otherwise its caller would wait for ever
                    self._end(self._find_request(id, events), RequestEvent.GARBLED, events, InvalidAnswer, why)
            return
        reply = _BatchReply()
        for item in message.items:
            self._RECEIVERS[type(item)](self, item, events, about, reply)
        reply.waiting.discard(None)
        self._send_if_complete(reply)

    _RECEIVERS: ClassVar[dict[type, Callable[[Peer, Any, list[Event], Hashable, _BatchReply | None], None]]] = {
        Request: _receive_request,
        Notification: _receive_notification,
        Response: _receive_result,
        Error: _receive_error,
        InvalidMessage: _receive_invalid,
        Batch: _receive_batch,
    }

    def _cancelled(self, params: JsonObject, events: list[Event]) -> None:
        # cancel-08: "Receivers MAY ignore" a cancellation that is malformed, or whose request is unknown or finished.
        id = params.get("requestId")
        reason = params.get("reason")
        reason = reason if isinstance(reason, str) else ""
        if not _is_id(id):
            events.append(PeerMistake("notifications/cancelled without a valid requestId"))
        elif (serving := self._serving.get(id)) is not None:
            self._stop(id, serving, RequestEvent.CANCEL, reason, events)
        else:
            self._end(self._calling.get(id), RequestEvent.TEARDOWN, events, SubscriptionEnded, reason)

    def _progressed(self, params: JsonObject, events: list[Event]) -> None:
        token, progress = params.get("progressToken"), _number(params.get("progress"))
        total, message = _number(params.get("total")), params.get("message")
        if not _is_id(token) or progress is None:
            events.append(PeerMistake("notifications/progress without a valid progressToken and progress"))
            return
        calling = self._find_request(token, events)
        if calling is None or not self._call_step(calling, NOTE):
            return
        if calling.progress is None or progress <= calling.progress:
            why = "was not requested" if calling.progress is None else f"did not rise above {shown(calling.progress)}"
            events.append(PeerMistake(f"progress of request {calling.id} {why}"))
            return
        calling.progress = progress
        message = message if isinstance(message, str) else None
        events.append(ProgressReported(calling.id, progress, total, message))

    # Shared by both directions.

    def _only_possible_request(self) -> Id | None:
        """Return the id of our request that an answer without a readable id belongs to, or None if that is not certain.

        It must be our only open request.  The rest depends on the kind of link:

        - An exchange has one request, so the answer is certain.
        - On a duplex link the answer may also belong to a request that was given up, or be an error for a notification:
          some servers refuse notifications, most often `notifications/initialized`.  But the peer reads in order.  If
          it has answered a later request, it sends no more answers to earlier messages.
        - In a session one exchange may overtake another, so the answer is never certain.
        """
        certain = self.link is LinkKind.EXCHANGE or (self.link is LinkKind.DUPLEX and not self._ambiguous_before)
        return next(iter(self._calling)) if certain and len(self._calling) == 1 else None

    def _find_request(self, id: Id, events: list[Event]) -> _OutgoingRequest | None:
        """Return our request with this id or token, or None if it has ended.  Report an id that we never used."""
        number = id
        if isinstance(id, str) and id.isascii() and id.isdecimal() and len(id) < 20:
            number = int(id)  # some peers send our integer back as a string; this is accepted and reported
        if isinstance(number, str) or not 1 <= number < self._next_id:
            events.append(PeerMistake(f"no request of ours has the id {shown(id)}"))
            return None
        if number != id:
            events.append(PeerMistake(f"id {number} came back as the string {shown(id)}"))
        return self._calling.get(number)

    def _end(
        self,
        calling: _OutgoingRequest | None,
        event: RequestEvent,
        events: list[Event],
        outcome: Callable[..., Outcome],
        *details: object,
        reason: str = "",
    ) -> None:
        """Apply an event that may end a request of ours, and report the outcome.  None: it has ended already."""
        if calling is not None and self._call_step(calling, event, reason):
            events += self._ended(outcome(calling.id, calling.method, *details))

    def _ended(self, outcome: Outcome) -> Sequence[Event]:
        """Return the events of an outcome; a client that opens its session takes its next step instead."""
        return (outcome,)

    def _call_step(self, calling: _OutgoingRequest, event: RequestEvent, reason: str = "") -> bool:
        """Apply an event to a request of ours.  Returns whether the caller must report the event."""
        state, action = step(CALLING[self.link], calling.state, event)
        if action in _SENDS_CANCEL:  # before any state changes: this raises if the reason cannot be written
            # If the request of theirs has ended, no label: no message may be sent for that request.
            label = calling.label if calling.label == self.label_of(calling.about) else None
            self._send_cancelled(calling.id, reason, label)
        calling.state = state
        if state is GONE:
            del self._calling[calling.id]
            if event not in _ANSWERS:
                self._ambiguous_before = self._next_id
            elif calling.id >= self._ambiguous_before:
                self._ambiguous_before = 0
        return action in _REPORTS

    def _serve_step(
        self,
        id: Id,
        serving: _IncomingRequest,
        event: RequestEvent,
        message: Notification | Response | Error | None = None,
    ) -> Action:
        """Apply an event to a request of theirs.  `message` is the message to send, if the action allows it."""
        state, action = step(SERVING[self.link], serving.state, event)
        if message is not None and action is not _NOTHING:
            # Before any state changes: this raises if it cannot write the message.
            data = message._bytes or prepare(message)._bytes
            # Errors are not charged.  Otherwise an answer that exceeds the limit could not be replaced by an error.
            if len(data) > FEW and type(message) is not Error and (limit := self._charge(message)):
                if event is NOTE:
                    return _NOTHING
                raise RequestError(errors.INTERNAL_ERROR, f"the answer was not sent: {_QUEUE_FULL} (Limits.{limit})")
        serving.state = state
        if state is GONE:
            del self._serving[id]
        return action

    def _stop(self, id: Id, serving: _IncomingRequest, event: RequestEvent, why: str, events: list[Event]) -> None:
        """Apply an event that may cancel a request of theirs."""
        if self._serve_step(id, serving, event) is not Action.STOP_HANDLER:
            return
        events.append(RequestCancelled(id, serving.method, why))
        if serving.queued == self._handed_out:
            self._withdrawn[id] = len(self.queue)
        if (batch := serving.batch) is not None:
            # The other answers of the batch do not wait for the handler that is being cancelled.
            batch.waiting.discard(id)
            self._send_if_complete(batch)

    def _notify_about(self, about: Id, serving: _IncomingRequest, note: Notification) -> bool:
        """Queue a notification that belongs to this request of theirs, if it may still be sent."""
        if self._serve_step(about, serving, NOTE, note) is _NOTHING:
            return False
        self._queue(note, serving.label, about)
        serving.queued = self._handed_out
        return True

    def _finish(self, id: Id, message: Response | Error, event: RequestEvent) -> bool:
        """Queue the answer to a request of theirs.  False: it is not sent."""
        serving = self._serving.get(id)
        if serving is None:
            return False
        action = self._serve_step(id, serving, event, message)
        if action is _NOTHING:
            return False
        if len(message._bytes) > FEW and type(message) is Response:
            message.result = {}  # the queue must not hold the result twice
        if (batch := serving.batch) is None:
            self._queue(message, serving.label)
        else:
            if self.account is not None:
                self._charged -= charged(message)  # until the batch is sent
            batch.answers.append(message)
            batch.waiting.discard(id)
            self._send_if_complete(batch)
        if action is _TEARS_DOWN:
            self._send_cancelled(id, "", serving.label)
        return True

    def _send_if_complete(self, batch: _BatchReply) -> None:
        if batch.answers and not batch.waiting:
            reply = Batch(tuple(batch.answers))
            if self.account is not None:
                self._charged += charged(reply)
            self._queue(reply, batch.label)

    def _refuse_at_once(
        self, error: Error, events: list[Event], about: Hashable | None, batch: _BatchReply | None, why: str = ""
    ) -> None:
        """Queue an error for a message that is not served, and report it."""
        events.append(PeerMistake(why or error.message))
        if error.id is not None and self.serves(error.id):
            # With this id, the peer would take the error for the answer to the request that is still running.
            error = attrs.evolve(error, id=None)
        if error.id is None:
            # Written as JSON now: before the queue is sent, a later message may select another revision.
            prepare(error, null_id=self.unreadable_id_is_null)
        label = error.id if about is None else about
        if batch is None:
            self._queue(error, label)
        else:
            batch.label = label if batch.label is None else batch.label
            batch.answers.append(error)

    def _queue(self, message: OutgoingMessage, label: Hashable | None, withdrawn_with: Id | None = None) -> None:
        """Queue a message that has no answer."""
        self.queue.append((message, label, withdrawn_with))
        self._ambiguous_before = self._next_id

    def _send_cancelled(self, id: Id, reason: str, label: Hashable | None) -> None:
        params: JsonObject = {"requestId": id, "reason": reason} if reason else {"requestId": id}
        self._queue(prepare(Notification(_CANCELLED, params)), label)
