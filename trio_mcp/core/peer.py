"""Requests we made, requests we serve, progress, cancellation, deadlines.

A `Peer` is one end of a link.  Messages go in by `receive`, which changes all state before it returns and reports what
happened; what is to be sent comes out of `outgoing`.  It keeps the promises that hold for every request of every
revision, whichever side we are:

- A request has exactly one outcome: answered, refused, garbled, timed out, lost, torn down, or cancelled by us.
- Nothing is sent for a request of theirs once its cancellation was seen, not even what was queued before.  (A request
  that we made in its course is one of ours, with an outcome of its own: its maker cancels it.)
- Our ids only grow.  So an unexpected answer to an id below the next one is late and vanishes, any other is the peer's
  mistake and is reported; nothing about finished requests has to be remembered.
- What was due by the time a message arrives has happened before that message.

Which method may be sent when, and under which terms, is the business of `session`; bytes are that of `jsonrpc`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeAlias, TypeGuard

import attrs

from trio_mcp.core import errors
from trio_mcp.core.errors import RequestError, SessionClosed, UsageError, shown
from trio_mcp.core.jsonrpc import (
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
    bare,
    is_prepared,
    prepare,
    prepared_progress,
    prepared_request,
)
from trio_mcp.core.meta import meta_of
from trio_mcp.core.outcomes import (
    ConnectionLost,
    InvalidAnswer,
    PeerComplaint,
    PeerMistake,
    ProgressReported,
    Refused,
    RequestCancelled,
    SubscriptionEnded,
    TimedOut,
    answered,
)
from trio_mcp.core.revisions import Role
from trio_mcp.core.shares import FEW, Account
from trio_mcp.core.state import (
    ANSWER,
    CALLING,
    CANCELLED,
    GONE,
    NOTE,
    NOTHING,
    SERVING,
    Action,
    LinkKind,
    RequestEvent,
    State,
    first_state,
    step,
)
from trio_mcp.core.terms import Terms

__all__ = [
    "Outgoing",
    "Peer",
    "charged",
]


Outgoing: TypeAlias = tuple[Request | Notification | Response | Error | Batch, Hashable | None]
"""A message, and the label of what it belongs to, by which a transport with several streams finds the right one.

What belongs to a request of theirs has the label that `receive` got with it, as `about`: answers, batches of answers,
progress, notices, and the requests that we make in its course, with their cancellations.  So have the errors that are
owed for what came under that label and could not be served, with an id or without.  If `receive` got none, the label
is the request's id (of a batch: the first one in it; of an error: its own).  None: it belongs to nothing that came in.
"""

_CANCELLED = "notifications/cancelled"
_SENDS_CANCEL = frozenset({Action.SEND_CANCEL, Action.SEND_CANCEL_AND_REPORT})
_TEARS_DOWN = Action.WRITE_AND_TEAR_DOWN
_REPORTS = frozenset({Action.REPORT, Action.SEND_CANCEL_AND_REPORT})
_ANSWERS = frozenset({RequestEvent.ANSWER, RequestEvent.ERROR, RequestEvent.GARBLED})
_NO_META: JsonObject = {}
_UNREAD = "too much waits to be read by the other side"
_LIMITS = Limits()


def charged(message: Message) -> int:
    """The bytes that a message in the queue is charged for: all of one that is not short, but for errors."""
    if isinstance(message, Batch):
        return sum(map(charged, message.items))
    if isinstance(message, Error | InvalidMessage):
        return 0
    size = len(getattr(message, "_bytes", b""))  # what is not prepared has not been charged
    return size if size > FEW else 0


def _is_id(value: object) -> TypeGuard[Id]:
    return type(value) in (int, str)


def _number(value: object) -> float | None:
    """`value` as nothing but a number, if progress can be measured by it: not by a bool, nor by infinity, above which
    nothing can rise."""
    if type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if -math.inf < value < math.inf else None
    return int(value) if isinstance(value, int) and type(value) is not bool else None


def _answers(message: Message) -> Id | None:
    """The id of the request of ours that this is the answer to, or was meant to be."""
    if isinstance(message, Response | Error):
        return message.id
    return message.answers if isinstance(message, InvalidMessage) else None


@attrs.define(eq=False, repr=False)
class _OutgoingRequest:
    """A request that we made.  `progress`: the highest value heard, or None if we did not ask for it."""

    id: int
    method: str
    state: State
    about: Id | None
    label: Hashable | None
    progress: float | None


@attrs.define(eq=False, repr=False)
class _BatchReply:
    """Answers that leave together, once all members are received and none is awaited any more."""

    label: Hashable | None = None
    receiving: bool = True
    waiting: set[Id] = attrs.field(factory=set)
    answers: list[Response | Error] = attrs.field(factory=list)


@attrs.define(eq=False, repr=False)
class _Arrival:
    """How a message came: under which label, and in which batch, if in one."""

    label: Hashable | None = None
    batch: _BatchReply | None = None


@attrs.define(eq=False, repr=False)
class _IncomingRequest:
    """A request that we serve.

    `token`: the name they want progress under; `progress`: the last value sent; `queued`: how often the queue had been
    handed out when something of it was last added.
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

    `terms` are those of the whole link, once agreed (None before, and where each request brings its own).  Threads that
    share a peer need one lock, held round each call together with draining `outgoing` and writing what came out: two
    that drain by turns could write in the wrong order.
    """

    def __init__(
        self, role: Role, *, link: LinkKind = LinkKind.DUPLEX, limits: Limits | None = None, first_id: int = 1
    ) -> None:
        self.role = role
        self.link = link
        self.limits = limits if limits is not None else _LIMITS
        self.terms: Terms | None = None
        self.closed = False
        self.half_closed = False
        """The other side sends nothing more: no request of ours can be answered.  What is sent may still be read."""
        self._first_id = self._next_id = first_id
        self._calling: dict[Id, _OutgoingRequest] = {}
        self._serving: dict[Id, _IncomingRequest] = {}
        self._deadlines: list[tuple[float, int]] = []
        # Not bounded here: one message for each that was received, one cancel for each request of ours, and what the
        # caller queues.  Whoever drives the peer stops reading, and queueing, while it cannot write.
        # Each with its label, and the request of theirs with which it would be withdrawn.
        self._outgoing: list[tuple[Request | Notification | Response | Error | Batch, Hashable | None, Id | None]] = []
        self._handed_out = 0  # times
        self._arrival = _Arrival()  # of the message before
        # The next id when we last sent what has no answer, or gave up what has one; 0 once a later request is answered.
        self._doubtful = 0
        self.account: Account | None = None
        """What is not short in the queue is charged here, if it is set; whoever takes the queue out takes that over."""
        self._charged = 0
        # Requests of theirs that were cancelled with something in the queue, and how much of that is older.  So it is
        # never longer than the queue, whatever a peer that does not read cancels.
        self._withdrawn: dict[Id | None, int] = {}

    @property
    def unreadable_id_is_null(self) -> bool:
        """Whether an error for a message whose id could not be read has a null id.  Otherwise it has no id."""
        return self.terms is None or self.terms.revision.unreadable_id_is_null

    # What we do.

    def request(
        self,
        method: str,
        params: JsonObject | None = None,
        *,
        deadline: float | None = None,
        progress: bool = False,
        about: Id | None = None,
    ) -> int:
        """Queue a request and return its id, which comes back in exactly one outcome.

        `deadline` is a time as `tick` gets it; `progress` asks for progress reports; `about` is the request of theirs
        in whose course this one is made.  Raises `SessionClosed` when the link is lost and `UsageError` when
        `about` is over, too many requests are open, or `params` cannot be written or bring a progress token (prog-02:
        ours are unique).
        """
        return self._ask(method, params or {}, None, deadline, progress, about)

    def _ask(
        self,
        method: str,
        params: JsonObject,
        more: CachedResult | None,
        deadline: float | None = None,
        progress: bool = False,
        about: Id | None = None,
    ) -> int:
        """As `request`; `more` goes along with plain params that have none of its members, and no progress with it."""
        if self.closed:
            raise SessionClosed(f"{method} was not sent: the link is closed")
        if self.half_closed:
            raise SessionClosed(f"{method} was not sent: the {self.role.other.value} has closed its side of the link")
        if len(self._calling) >= self.limits.requests:
            raise UsageError(f"{method} was not sent: {self.limits.requests} requests are waiting for answers")
        label = None if about is None else self.label_of(about)
        if about is not None and label is None:
            raise UsageError(f"{method} was not sent: request {shown(about)}, which it belongs to, is over")
        id = self._next_id
        if more is not None or (type(params) is dict and "_meta" not in params and not progress):
            request = prepared_request(id, method, params, more)
        else:
            meta = meta_of(f"what {method} is sent with", params)
            if progress:  # The id is unique among our requests for ever, so it is a unique token too.
                params = {**params, "_meta": {**meta, "progressToken": id}}
            elif "progressToken" in meta:
                why = "say progress=True instead of choosing a progressToken"
                raise UsageError(f"{method} was not sent: {why}")
            request = prepare(Request(id, method, params))
        if (limit := self._charge(request)) is not None:
            raise RequestError(errors.INTERNAL_ERROR, f"{method} was not sent: {_UNREAD} (Limits.{limit})")
        self._next_id += 1
        state = first_state(CALLING[self.link], method)
        self._calling[id] = _OutgoingRequest(id, method, state, about, label, -math.inf if progress else None)
        if deadline is not None:
            self._schedule(deadline, id)
        self._outgoing.append((request, label, None))
        return id

    def notify(self, method: str, params: JsonObject | None = None, *, about: Id | None = None) -> bool:
        """Queue a notification.  False if nothing was sent: the link, or the request that it belongs to, is over, or it
        is long and the other side has too much to read already.

        Raises `UsageError` for what cannot be written, and for cancellations and progress, which only `cancel`
        and `progress` keep in step.
        """
        if method in (_CANCELLED, PROGRESS):
            raise UsageError(f"{method} is sent by Peer.cancel or Peer.progress, not by hand")
        note = Notification(method, params or {})
        meta_of(f"what {method} is sent with", note.params)
        if about is not None:
            serving = self._serving.get(about)
            return serving is not None and self._note(about, serving, note)
        if self.closed or self._charge(prepare(note)) is not None:
            return False
        self._tell(note, None)
        return True

    def progress(self, id: Id, progress: float, total: float | None = None, message: str | None = None) -> bool:
        """Report progress of a request that we serve.  False if nothing was sent: nobody wants it (any more), there is
        no room as in `notify`, or `progress` is the last value again ("The progress value MUST increase").

        Raises `UsageError` when `progress` is no number or falls, and for what cannot be written.
        """
        serving = self._serving.get(id)
        if serving is None or serving.token is None:
            return False
        reached, of = _number(progress), _number(total)
        if reached is None or reached < serving.progress or (total is not None and of is None):
            why = f"from {shown(serving.progress)}, to a number; a total is a number too"
            raise UsageError(f"progress of request {shown(id)} must rise {why}")
        if not (message is None or isinstance(message, str)):
            raise UsageError(f"the message with progress is a string, not {type(message).__name__}")
        # A loop that reports how many items it has done says the same twice where one was skipped.
        if reached == serving.progress:
            return False
        terms = serving.terms or self.terms
        if terms is not None and not terms.revision.progress_message:
            message = None
        if not self._note(id, serving, prepared_progress(serving.token, reached, of, message)):
            return False
        serving.progress = reached
        return True

    def answer(self, id: Id, result: JsonObject) -> bool:
        """Answer a request that we serve.  False if nobody waits for it any more: nothing was sent.

        The result is written here and now: what becomes of the dict later does not matter.  Raises
        `UsageError` for one that cannot be written, and `RequestError` for a long one when the other side has
        too much to read already; the request then still waits for its answer.
        """
        return self._finish(id, Response(id, result), ANSWER)

    def refuse(self, id: Id, error: RequestError) -> bool:
        """Answer a request that we serve with an error.  Returns and raises as `answer`."""
        data = ABSENT if error.data is None else error.data
        return self._finish(id, Error(id, error.code, error.message, data), RequestEvent.ERROR)

    def cancel(self, id: Id, reason: str = "") -> bool:
        """Give up a request of ours, telling the peer where the link wants that.  False if it had already ended.

        Raises `UsageError` for a reason that cannot be written.
        """
        calling = self._calling.get(id)
        if calling is None:
            return False
        self._call_step(calling, RequestEvent.CANCEL, reason)
        return True

    def connection_lost(self, about: Id | None = None, why: str = "the link was lost") -> list[Event]:
        """The link is gone, or (with `about`) the stream that carries the client's request with this id.

        What the loss of a stream means depends on the link: in a session the answer can still come by another, so
        nothing ends, and when no other is to be expected, `fail` says so.  Losing the link again changes nothing.
        Raises `UsageError` for a stream on a link that has none.
        """
        if about is not None:
            return self._lose_stream(about, why)
        self.closed = True
        events = self._end_all(RequestEvent.LINK_LOST, why)
        self._outgoing.clear()
        if self._charged and self.account is not None:
            self.account.give(self.take_charge())
        return events

    def _end_all(self, seen: RequestEvent, why: str) -> list[Event]:
        """Let all requests, of both sides, see the end of the link, or of half of it."""
        events: list[Event] = [
            ConnectionLost(calling.id, calling.method, why)
            for calling in list(self._calling.values())
            if self._call_step(calling, seen)
        ]
        for id, serving in list(self._serving.items()):
            self._stop(id, serving, seen, why, events)
        return events

    def input_ended(self, why: str = "the other side of the link was closed") -> list[Event]:
        """The other side has ended its half of the link: nothing more comes, and what is sent may still be read.

        Requests of ours are `ConnectionLost`, and no other can be made.  Those that we serve go on, and their answers
        are sent.  Raises `UsageError` on a link that is no single stream.
        """
        if RequestEvent.INPUT_ENDED not in CALLING[self.link][State.OPEN]:
            raise UsageError("only a link that is one stream for everything has an end of input")
        self.half_closed = True
        return self._end_all(RequestEvent.INPUT_ENDED, why)

    def fail(self, id: Id, why: str) -> list[Event]:
        """A request of ours can never be answered: its POST was refused, or its stream given up.  Nothing is sent.

        On every kind of link it is `ConnectionLost`, and the others go on.  No event if it had already ended.
        """
        calling = self._calling.get(id)
        if calling is None or not self._call_step(calling, RequestEvent.FAILED):
            return []
        return [ConnectionLost(calling.id, calling.method, why)]

    def serves(self, id: Id) -> bool:
        """Whether a request of theirs still waits for its answer."""
        serving = self._serving.get(id)
        return serving is not None and serving.state is not CANCELLED

    def label_of(self, id: Id | None) -> Hashable | None:
        """The label of a request of theirs that still waits for its answer; None for every other."""
        serving = None if id is None else self._serving.get(id)
        return None if serving is None or serving.state is CANCELLED else serving.label

    def method_of(self, id: Id) -> str | None:
        """What a request of theirs asks for, while it is served."""
        serving = self._serving.get(id)
        return None if serving is None else serving.method

    def terms_of(self, id: Id) -> Terms | None:
        """The terms that a request of theirs is served under, while it is."""
        serving = self._serving.get(id)
        return None if serving is None else serving.terms or self.terms

    @property
    def waiting(self) -> int:
        """How many requests of ours have no outcome yet."""
        return len(self._calling)

    @property
    def serving(self) -> int:
        """How many of their requests have a handler that has not ended."""
        return len(self._serving)

    @property
    def queued(self) -> int:
        """How many messages wait to be handed out."""
        return len(self._outgoing)

    def outgoing(self) -> list[Outgoing]:
        """What is to be sent, in order; each message is handed out once."""
        out, self._outgoing = self._outgoing, []
        self._handed_out += 1
        if not self._withdrawn:
            return [(message, label) for message, label, _ in out]
        withdrawn, self._withdrawn = self._withdrawn, {}
        # cancel-18: what was queued for a request before its cancellation stays here.
        return [(message, label) for at, (message, label, id) in enumerate(out) if at >= withdrawn.get(id, 0)]

    def take_charge(self) -> int:
        """The bytes in `account` of what `outgoing` has just handed out; to be given back when they are written."""
        charged, self._charged = self._charged, 0
        return charged

    def _charge(self, message: Request | Notification | Response | Error) -> str | None:
        """Charge a message that is prepared and about to be queued; or the name of the limit that does not allow it."""
        size = len(message._bytes)
        if size <= FEW or self.account is None:
            return None
        limit = self.account.take(size)
        if limit is None:
            self._charged += size
        return limit

    # Time.

    def next_deadline(self) -> float | None:
        """When `tick` should be called next, if nothing else happens."""
        while self._deadlines and self._deadlines[0][1] not in self._calling:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def tick(self, now: float) -> list[Event]:
        """Let everything happen that is due by `now`."""
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            calling = self._calling.get(heapq.heappop(self._deadlines)[1])
            if calling is not None and self._call_step(calling, RequestEvent.EXPIRE, "timed out"):
                events.append(TimedOut(calling.id, calling.method))
        return events

    def _schedule(self, deadline: float, id: int) -> None:
        heapq.heappush(self._deadlines, (deadline, id))
        # Answered requests leave their entry behind; sweep when those outnumber the live ones.
        if len(self._deadlines) > 2 * len(self._calling) + 16:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._calling]
            heapq.heapify(self._deadlines)

    # What the peer does.

    def receive(self, message: Message, now: float, *, about: Hashable | None = None) -> list[Event]:
        """Take one message in.  Never raises for what the peer did: mistakes are answered, reported, or both.

        `about` is what the transport calls the stream or exchange that the message came on; see `Outgoing`.
        """
        events = self.tick(now) if self._deadlines and self._deadlines[0][0] <= now else []
        if not self.closed:
            arrival = self._arrival
            if about is not arrival.label:
                arrival = _Arrival(about)
                if (
                    self.link is LinkKind.DUPLEX
                ):  # where as a rule all have the same; an exchange is not to outlast its end
                    self._arrival = arrival
            self._RECEIVERS[type(message)](self, message, events, arrival)
        return events

    def _receive_request(self, request: Request, events: list[Event], arrival: _Arrival) -> None:
        id = request.id
        meta = request.params.get("_meta", _NO_META)
        token = meta.get("progressToken") if type(meta) is dict else None
        if id in self._serving:
            why = f"id {shown(id)} belongs to a request that is still being served"
            self._refuse_at_once(Error(id, errors.INVALID_REQUEST, why), events, arrival)
        elif len(self._serving) >= self.limits.requests:
            why = f"{self.limits.requests} requests are being served, which is the limit; try again later"
            self._refuse_at_once(Error(id, errors.INTERNAL_ERROR, why), events, arrival)
        elif type(meta) is not dict or not (token is None or _is_id(token)):
            why = "params._meta must be an object, and its progressToken a string or an integer"
            self._refuse_at_once(Error(id, errors.INVALID_PARAMS, why), events, arrival)
        elif type(token) is str and len(token) > self.limits.id_length:
            why = f"the progressToken is longer than {self.limits.id_length} characters (Limits.id_length)"
            self._refuse_at_once(Error(id, errors.INVALID_PARAMS, why), events, arrival)
        else:
            state = first_state(SERVING[self.link], request.method)
            label, batch = id if arrival.label is None else arrival.label, arrival.batch
            self._serving[id] = _IncomingRequest(request.method, state, label, token, batch)
            if batch is not None:
                batch.label = label if batch.label is None else batch.label
                batch.waiting.add(id)
            events.append(request)

    def _receive_notification(self, note: Notification, events: list[Event], arrival: _Arrival) -> None:
        if note.method == _CANCELLED:
            self._cancelled(note.params, events)
        elif note.method == PROGRESS:
            self._progressed(note.params, events)
        else:
            events.append(note)

    def _receive_result(self, message: Response, events: list[Event], arrival: _Arrival) -> None:
        calling = self._calling.get(message.id) or self._find(message.id, events)
        if calling is not None and self._call_step(calling, ANSWER):
            events.append(answered(calling.id, calling.method, message.result))

    def _receive_error(self, message: Error, events: list[Event], arrival: _Arrival) -> None:
        id = self._meant() if message.id is None else message.id
        if id is None:
            events.append(PeerComplaint(message))
        elif (calling := self._find(id, events)) is not None and self._call_step(calling, RequestEvent.ERROR):
            events.append(Refused(calling.id, calling.method, message))

    def _receive_invalid(self, message: InvalidMessage, events: list[Event], arrival: _Arrival) -> None:
        if message.reply is not None:
            self._refuse_at_once(message.reply, events, arrival, message.why)
        elif (id := self._meant() if message.response and message.answers is None else message.answers) is not None:
            self._garble(id, message.why, events)
        else:
            events.append(PeerMistake(message.why))

    def _receive_batch(self, message: Batch, events: list[Event], arrival: _Arrival) -> None:
        why = self._why_no_batch(message)
        if why:
            self._refuse_at_once(Error(None, errors.INVALID_REQUEST, why), events, arrival)
            for item in message.items:
                if (id := _answers(item)) is not None:  # whoever waits for it is told, rather than left waiting
                    self._garble(id, why, events)
            return
        together = _BatchReply()
        arrival = _Arrival(arrival.label, together)
        for item in message.items:
            self._RECEIVERS[type(item)](self, item, events, arrival)
        together.receiving = False
        self._settle(together)

    _RECEIVERS: ClassVar[dict[type, Callable[[Peer, Any, list[Event], _Arrival], None]]] = {
        Request: _receive_request,
        Notification: _receive_notification,
        Response: _receive_result,
        Error: _receive_error,
        InvalidMessage: _receive_invalid,
        Batch: _receive_batch,
    }

    def _why_no_batch(self, message: Batch) -> str:
        if self.terms is None or not self.terms.revision.batches:
            agreed = self.terms.revision if self.terms else "no revision agreed yet"
            return f"a JSON array is a message in 2025-03-26 only (here: {agreed}); send its members one by one"
        if any(isinstance(item, Request) and item.method == "initialize" for item in message.items):
            return "initialize must not be part of a batch"
        return ""

    def _cancelled(self, params: JsonObject, events: list[Event]) -> None:
        # cancel-08: "Receivers MAY ignore": what is unknown, finished or malformed costs nothing.
        id = params.get("requestId")
        reason = params.get("reason")
        reason = reason if isinstance(reason, str) else ""
        if not _is_id(id):
            events.append(PeerMistake("notifications/cancelled without a requestId"))
        elif (serving := self._serving.get(id)) is not None:
            self._stop(id, serving, RequestEvent.CANCEL, reason, events)
        elif (calling := self._calling.get(id)) is not None and self._call_step(calling, RequestEvent.TEARDOWN):
            events.append(SubscriptionEnded(calling.id, calling.method, reason))

    def _progressed(self, params: JsonObject, events: list[Event]) -> None:
        token, progress = params.get("progressToken"), _number(params.get("progress"))
        total, message = _number(params.get("total")), params.get("message")
        if not _is_id(token) or progress is None:
            events.append(PeerMistake("notifications/progress without a token and a number"))
            return
        calling = self._find(token, events)
        if calling is None or not self._call_step(calling, NOTE):
            return
        if calling.progress is None or progress <= calling.progress:
            why = "was not asked for" if calling.progress is None else f"did not rise above {shown(calling.progress)}"
            events.append(PeerMistake(f"progress of request {calling.id} {why}"))
            return
        calling.progress = progress
        message = message if isinstance(message, str) else None
        events.append(ProgressReported(calling.id, progress, total, message))

    # Shared by both halves.

    def _meant(self) -> Id | None:
        """The request of ours that an answer without a readable id is for, if it can be for no other.

        It must be the only one that waits.  An exchange is about one request, so that is enough there.  On one stream
        for everything the answer may also be a late one, for a request that was given up, or a complaint about what has
        no answer: some servers refuse notifications, that which ends the handshake above all.  But a stream is read in
        order: who has answered a later request has said what there was to say of anything before.  In a session, where
        every exchange may overtake the others, nothing tells.
        """
        sure = self.link is LinkKind.EXCHANGE or (self.link is LinkKind.DUPLEX and not self._doubtful)
        return next(iter(self._calling)) if sure and len(self._calling) == 1 else None

    def _find(self, id: Id, events: list[Event]) -> _OutgoingRequest | None:
        """Our request that an answer or a token names.  A late one is nothing; an unknown one is a mistake."""
        number = id
        if isinstance(id, str) and id.isascii() and id.isdecimal() and len(id) < 20:
            number = int(id)  # Some peers echo our integer as a string.  Put right, and reported.
        if isinstance(number, str) or not self._first_id <= number < self._next_id:
            events.append(PeerMistake(f"no request of ours has the id {shown(id)}"))
            return None
        if number != id:
            events.append(PeerMistake(f"id {number} came back as the string {shown(id)}"))
        return self._calling.get(number)

    def _garble(self, id: Id, why: str, events: list[Event]) -> None:
        calling = self._find(id, events)
        if calling is not None and self._call_step(calling, RequestEvent.GARBLED):
            events.append(InvalidAnswer(calling.id, calling.method, why))

    def _call_step(self, calling: _OutgoingRequest, seen: RequestEvent, reason: str = "") -> bool:
        """Let a request of ours see this; whether it is to be reported."""
        state, deed = step(CALLING[self.link], calling.state, seen)
        if deed in _SENDS_CANCEL:  # first of all, for a reason that cannot be written raises
            # Not on the stream of a request of theirs that is over: nothing more is sent for that one.
            label = calling.label if calling.label == self.label_of(calling.about) else None
            self._send_cancelled(calling.id, reason, label)
        calling.state = state
        if state is GONE:
            del self._calling[calling.id]
            if seen not in _ANSWERS:
                self._doubtful = self._next_id
            elif calling.id >= self._doubtful:
                self._doubtful = 0
        return deed in _REPORTS

    def _serve_step(
        self,
        id: Id,
        serving: _IncomingRequest,
        seen: RequestEvent,
        message: Notification | Response | Error | None = None,
    ) -> Action:
        """Let a request of theirs see this; `message` is what is to be sent then, if anything is."""
        state, deed = step(SERVING[self.link], serving.state, seen)
        if message is not None and deed is not NOTHING:
            if not is_prepared(message):
                prepare(message)  # before anything changes: it raises for what cannot be written
            # Errors are not charged, or nothing could be said of what finds no room.
            if len(message._bytes) > FEW and type(message) is not Error and (limit := self._charge(message)):
                if seen is NOTE:
                    return NOTHING
                raise RequestError(errors.INTERNAL_ERROR, f"the answer was not sent: {_UNREAD} (Limits.{limit})")
        serving.state = state
        if state is GONE:
            del self._serving[id]
        return deed

    def _stop(self, id: Id, serving: _IncomingRequest, seen: RequestEvent, why: str, events: list[Event]) -> None:
        """Let a request of theirs see what may end it from outside."""
        if self._serve_step(id, serving, seen) is not Action.STOP_HANDLER:
            return
        events.append(RequestCancelled(id, serving.method, why))
        if serving.queued == self._handed_out:
            self._withdrawn[id] = len(self._outgoing)
        if (batch := serving.batch) is not None:
            # The others of its batch do not wait for a handler that is winding down.
            batch.waiting.discard(id)
            self._settle(batch)

    def _forget(self, id: Id) -> None:
        """A request of theirs is over without an answer: nobody can be waiting for one."""
        del self._serving[id]

    def _note(self, about: Id, serving: _IncomingRequest, note: Notification) -> bool:
        """Queue something that belongs to this request of theirs, if it may still be sent."""
        if self._serve_step(about, serving, NOTE, note) is NOTHING:
            return False
        self._tell(note, serving.label, about)
        serving.queued = self._handed_out
        return True

    def _finish(self, id: Id, message: Response | Error, seen: RequestEvent) -> bool:
        serving = self._serving.get(id)
        if serving is None:
            return False
        deed = self._serve_step(id, serving, seen, message)
        if deed is NOTHING:
            return False
        if len(message._bytes) > FEW and type(message) is Response:
            message = bare(message)
        if serving.batch is not None:
            serving.batch.answers.append(message)
            serving.batch.waiting.discard(id)
            self._settle(serving.batch)
        else:
            self._tell(message, serving.label)
        if deed is _TEARS_DOWN:
            self._send_cancelled(id, "", serving.label)
        return True

    def _settle(self, batch: _BatchReply) -> None:
        if batch.answers and not batch.waiting and not batch.receiving:
            self._tell(Batch(tuple(batch.answers)), batch.label)

    def _refuse_at_once(self, error: Error, events: list[Event], arrival: _Arrival, why: str = "") -> None:
        events.append(PeerMistake(why or error.message))
        if error.id is not None and self.serves(error.id):
            # Under this id it would be taken for the answer to the request that is still running.
            error = attrs.evolve(error, id=None)
        if error.id is None:
            # Written here: a later message may agree another revision before the queue is sent.
            prepare(error, null_id=self.unreadable_id_is_null)
        label = error.id if arrival.label is None else arrival.label
        if (batch := arrival.batch) is not None:
            batch.label = label if batch.label is None else batch.label
            batch.answers.append(error)
        else:
            self._tell(error, label)

    def _tell(
        self, message: Notification | Response | Error | Batch, label: Hashable | None, withdrawn_with: Id | None = None
    ) -> None:
        """Queue what has no answer."""
        self._outgoing.append((message, label, withdrawn_with))
        self._doubtful = self._next_id

    def _send_cancelled(self, id: Id, reason: str, label: Hashable | None) -> None:
        params: JsonObject = {"requestId": id}
        if reason:
            params["reason"] = reason
        self._tell(prepare(Notification(_CANCELLED, params)), label)

    def _lose_stream(self, about: Id, why: str) -> list[Event]:
        """A stream always carries a request of the client: ours if we are the client, else one that we serve."""
        if RequestEvent.STREAM_LOST not in CALLING[self.link][State.OPEN]:
            raise UsageError("this link is one stream for everything: lose it as a whole, without `about`")
        events: list[Event] = []
        if self.role is Role.SERVER:
            if (serving := self._serving.get(about)) is not None:
                self._stop(about, serving, RequestEvent.STREAM_LOST, why, events)
        elif (calling := self._calling.get(about)) is not None and self._call_step(calling, RequestEvent.STREAM_LOST):
            events.append(ConnectionLost(calling.id, calling.method, why))
        return events
