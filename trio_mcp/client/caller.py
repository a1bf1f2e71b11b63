"""One server, whatever carries its messages: what is asked of it, and what it asks.

The client's half of a `Conversation`.  Messages go in by `hear`; what is to be sent waits in the session until the
`Transport` takes it out.  Whoever calls `request` waits in its own task, and everything that concerns the call happens
there: reports of progress, the result, and whatever went wrong.  So a caller's cancel scope is its timeout, and what a
callback raises reaches whoever gave it.

| The session reports | What happens |
|---|---|
| an outcome of a request of ours | whoever asked goes on |
| progress | whoever asked hears of it, in order and before the outcome |
| Call | it is answered in a task of its own, with a scope that the server's cancellation reaches |
| Notice | it is handed on at once |
| Opened, OpeningFailed | whoever opens goes on |

How a call ends that has no answer:

| What happened | What is raised |
|---|---|
| the server answered with an error | `RequestError` |
| what it answered cannot be read | `RemoteProtocolError` |
| the link was lost, or the call could not be sent | what its carrier says: a `SessionClosed`, mostly |
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import attrs
import trio

from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    McpError,
    RemoteProtocolError,
    RequestError,
    SessionClosed,
)
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.jsonrpc import ABSENT, Batch, Error, Event, Id, JsonObject, Limits, Message, Response
from trio_mcp.core.opening import ClientProtocol, Negotiation, OpeningFailed
from trio_mcp.core.outcomes import (
    Answered,
    InvalidAnswer,
    Outcome,
    PeerComplaint,
    PeerMistake,
    ProgressReported,
    Refused,
    RequestCancelled,
    SubscriptionEnded,
)
from trio_mcp.core.revisions import Role
from trio_mcp.core.session import Call, Notice, Opened
from trio_mcp.core.state import LinkKind

__all__ = [
    "Caller",
    "Failure",
    "HandshakeError",
    "HeadersRefused",
    "NoResponse",
    "OnProgress",
    "Reports",
    "ServerMessageHandler",
    "SessionLost",
    "Timer",
    "Transport",
    "Unauthorized",
    "failure_of",
    "retries_exhausted",
    "too_many_questions",
]  # fmt: skip

T = TypeVar("T")


class _Report(Protocol):
    """A report of progress."""

    @property
    def message(self) -> str | None:
        """What the server says about it."""


R = TypeVar("R", bound=_Report)

_log = logging.getLogger("trio_mcp")

OnProgress: TypeAlias = Callable[[float, float | None, str | None], object]
"""Called with progress, total and message, as far as they were told.  What it returns is awaited if it can be."""

Failure: TypeAlias = Callable[[], McpError]
"""Makes the error for one call that has no answer; each has its own, with its own traceback."""

_PING = "ping"
_LOOK = 0.5  # seconds from one look whether a server has begun to read to the next
_SILENCE = 10.0  # seconds after which it is told that a server is still waited for

# Seconds for which a server may work on a request after its cancellation, which it may ignore.
_IGNORED = 300.0

_REPORTS = 1000  # of progress that wait for a slow callback, or to be iterated over
_CHARACTERS = 1024 * 1024  # of their messages


class HandshakeError(McpError):
    """The server and this client have found no way to speak with each other.

    `negotiation` is what was tried, what came back, and why it ended; `error` what the server refused with, if it did.
    `told` means that another error says why, and has this one as its cause.
    """

    def __init__(self, negotiation: Negotiation, error: RequestError | None = None, *, told: bool = False) -> None:
        super().__init__(negotiation.why)
        self.negotiation = negotiation
        self.error = error
        self._told = told

    def __str__(self) -> str:
        why = self.negotiation.why  # said once: it may be all that a server wrote before it died
        attempts = [(each.tried, each.answered) for each in self.negotiation.attempts]
        tried = "; ".join(deed if said == why else f"{deed}: {said}" for deed, said in attempts)
        said = "the connection could not be opened" + ("" if self._told else f": {why}")
        return said + (f" (tried {tried})" if tried else "")


class SessionLost(SessionClosed):
    """The server has ended or forgotten the session.  A request that surely has not run can be made in a new one."""

    def __init__(self, request_may_have_run: bool, why: str = "the server does not know the session any more") -> None:
        has = "may have been carried out" if request_may_have_run else "has not been carried out"
        super().__init__(f"{why}; the request {has}")
        self.request_may_have_run = request_may_have_run


class NoResponse(SessionClosed):
    """One request has no answer, and will have none; the session goes on.

    `status` is that of the reply, where it was one that says so.  `request_may_have_run` is False if nothing of the
    call has run: neither this request nor an earlier round of the same call.
    """

    def __init__(self, why: str, *, status: int | None = None, request_may_have_run: bool = True) -> None:
        super().__init__(why)
        self.status = status
        self.request_may_have_run = request_may_have_run


class HeadersRefused(McpError):
    """The headers that mirror arguments do not fit the tool (any more): list the tools anew, and call once more."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(f"the server refused the headers of the call: {error}")
        self.error = error


class Unauthorized(McpError):
    """The server wants to know who asks (401), or that one may not (403).  `challenge` is its WWW-Authenticate."""

    def __init__(self, why: str, status: int, challenge: str) -> None:
        super().__init__(why)
        self.status = status
        self.challenge = challenge


def failure_of(outcome: Outcome, failure: Failure | None) -> Failure:
    """What to raise for a request without a result; `failure` is what its carrier said of it, if it did."""
    if isinstance(outcome, Refused):
        error = outcome.error
        return lambda: RequestError(error.code, error.message, None if error.data is ABSENT else error.data)
    if isinstance(outcome, InvalidAnswer):
        garbled = f"the server's answer to {outcome.method} is none: {outcome.why}"
        return lambda: RemoteProtocolError(garbled)
    if failure is not None:
        return failure
    why = outcome.reason if isinstance(outcome, SubscriptionEnded) else getattr(outcome, "why", "no answer in time")
    return lambda: SessionClosed(f"{outcome.method} has no answer: {why}")


def retries_exhausted(last: Failure, why: str) -> Failure:
    """What to raise for something that was tried again and again, with what came of it at last as the cause."""

    def failure() -> McpError:
        cause = last()
        if isinstance(cause, RemoteProtocolError):
            return cause  # it says what the server does, which does that each time
        error = SessionClosed(f"{why}; last error: {cause}")
        error.__cause__ = cause
        return error

    return failure


class Transport(Protocol):
    """What carries the messages of one session."""

    def wake(self) -> None:
        """There is something to send."""

    def bring(self, id: Id) -> Awaitable[None] | None:
        """As `wake`; the caller, which waits for the answer to this request, may be used to get it."""

    def settled(self, id: Id) -> None:
        """This request of ours has its outcome, whatever way that came."""

    def forget(self, id: Id) -> None:
        """Nobody waits for the answer to this request of ours any more; what is to be told the server is queued."""

    def give_up(self, why: str) -> None:
        """The server is not there any more: lose the link."""

    @property
    def size(self) -> int:
        """What the message that is being heard takes while it is held, in bytes."""


class ServerMessageHandler(Protocol):
    """What the owner of a caller does with what the server says of itself."""

    async def answer(self, call: Call) -> JsonObject:
        """The result of a request of the server; a `RequestError` is the answer, too."""

    def notice(self, notice: Notice) -> None:
        """The server has told something that belongs to no request."""

    def ended(self, outcome: Outcome, failure: Failure | None) -> None:
        """A request that was made by `begin` has its outcome; see `failure_of`."""

    def missed(self, *, for_good: bool) -> None:
        """What the server said outside of requests was not heard for a while, or will not be in this session."""

    def mistake(self, why: str) -> None:
        """The server did something off the protocol that cost nothing."""

    def connection_lost(self, failure: Failure) -> None:
        """The link is gone; called once, after everybody who waited has been told."""


class Timer:
    """The time that one call may take, over all of its requests.

    Each request may take `seconds`, which begin anew with each report of progress, and do not pass while this side
    answers the server; the whole call, with all answers, may take `at_most`.  `progress`: reports are asked for.
    """

    __slots__ = ("_at_most", "_end", "_paused", "_scope", "_seconds", "progress", "running")

    def __init__(self, seconds: float, at_most: float, *, progress: bool) -> None:
        self._seconds = seconds
        self._at_most = at_most
        self._end = trio.current_time() + at_most
        self._scope = trio.CancelScope()
        self.progress = progress and seconds < at_most
        self.running = self._paused = False

    async def run(self, what: str, work: Callable[[], Awaitable[T]], *, request: bool = True) -> T:
        """The result of `work`.  Raises `trio.TooSlowError` when its time is over, which for a request is shorter."""
        self.running = True
        try:
            with trio.CancelScope() as self._scope:
                self.pause(not request)
                return await work()
        finally:
            self.running = False
        if trio.current_time() >= self._end:
            raise trio.TooSlowError(f"{what} was not complete within {self._at_most:g} seconds (max_timeout)")
        raise trio.TooSlowError(f"{what} had neither answer nor progress for {self._seconds:g} seconds (timeout)")

    def pause(self, paused: bool) -> None:
        self._paused = paused
        self.progressed()

    def progressed(self) -> None:
        self._scope.deadline = self._end if self._paused else min(trio.current_time() + self._seconds, self._end)

    def answered(self) -> None:
        """What is left to do with the answer, such as to tell of progress before it, is for the caller to bound."""
        self._scope.deadline = math.inf


class Reports(Generic[R]):
    """Reports of progress that wait to be taken.  Beyond a bound the oldest are left out: the last says it all."""

    __slots__ = ("_characters", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[R] = deque()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, report: R) -> None:
        self._waiting.append(report)
        self._characters += len(report.message or "")
        while len(self._waiting) > _REPORTS or (self._characters > _CHARACTERS and len(self._waiting) > 1):
            self.take()

    def take(self) -> R:
        """The oldest of them."""
        report = self._waiting.popleft()
        self._characters -= len(report.message or "")
        return report


class _PendingRequest:
    """A request of ours, as whoever made it waits for it."""

    __slots__ = ("failure", "headers", "on_progress", "outcome", "reports", "timer", "waiting")

    def __init__(self, headers: Fields, on_progress: OnProgress | None, timer: Timer | None) -> None:
        self.headers = headers
        self.on_progress = on_progress
        self.timer = timer
        self.reports: Reports[ProgressReported] | None = None
        self.outcome: Outcome | None = None
        self.failure: Failure | None = None
        self.waiting: trio.lowlevel.Task | None = None  # an event for each call would cost more than all else here

    def reported(self, report: ProgressReported) -> None:
        if self.timer is not None:
            self.timer.progressed()
            if self.on_progress is None:
                return
        if self.reports is None:
            self.reports = Reports()
        self.reports.add(report)
        self.wake()

    def wake(self) -> None:
        if self.waiting is not None:
            trio.lowlevel.reschedule(self.waiting)
            self.waiting = None

    def abort(self, _: object) -> trio.lowlevel.Abort:
        self.waiting = None
        return trio.lowlevel.Abort.SUCCEEDED

    async def tell(self) -> None:
        """Tell what was reported meanwhile."""
        while self.reports:
            each = self.reports.take()
            assert self.on_progress is not None  # or none would be kept
            said = self.on_progress(each.progress, each.total, each.message)
            if inspect.isawaitable(said):
                await said


class Caller:
    """One session with a server; see the head of this file.

    `nursery` is where requests of the server are answered; it must outlast the link.  The carrier is given by `carry`.
    """

    def __init__(self, session: ClientProtocol, talk: ServerMessageHandler, *, nursery: trio.Nursery) -> None:
        self.session = session
        self._talk = talk
        self._nursery = nursery
        self._carrier: Transport | None = None
        self._asked: dict[Id, _PendingRequest] = {}
        self._timers: set[Timer] = set()  # of requests that wait
        self._given_up: dict[Id, float] = {}  # requests of ours without an answer, and when they were cancelled
        self._overflowed_at = -math.inf  # when there were too many of them to keep one more
        self._serving: dict[Id, trio.CancelScope] = {}
        self._serving_bytes = 0  # that their requests take
        self._settled = trio.Event()  # the opening has ended, well or not
        self._failed: OpeningFailed | None = None
        self.failure: Failure | None = None
        """Why the link is gone, once it is."""
        self.deaf = False
        """Whether nothing can be heard that the server says outside of requests."""
        self.over = trio.Event()
        """Set when the link is gone."""
        self.heard_at = -math.inf
        """When the last message came."""

    # For the carrier.

    def carry(self, carrier: Transport) -> None:
        self._carrier = carrier

    def receive(self, message: Message, now: float, *, about: Id | None = None) -> None:
        """Take in what came; `about` is the request of ours in whose reply it came, where there is one."""
        self.take(message, now, about)
        if self.session.queued:
            self._wake()

    def take(self, message: Message, now: float, about: Id | None = None) -> None:
        """As `hear`, for a carrier that looks itself whether there is something to send."""
        self.heard_at = now
        if self._given_up:
            for each in message.items if isinstance(message, Batch) else (message,):
                if isinstance(each, Response | Error):
                    self._given_up.pop(each.id, None)  # type: ignore[arg-type]  # None is no id of ours
        for event in self.session.receive(message, now, about=about):
            if type(event) is Answered:
                self._over(event, None)
            else:
                self._act(event, None)

    def connection_lost(self, failure: Failure) -> None:
        """The link is gone: every call that waits ends with such an error, and so does every later one."""
        if self.failure is None:
            self.failure = failure
            self.over.set()
            self.act(self.session.connection_lost(why=str(failure())), failure)
            self._talk.connection_lost(failure)

    def fail(self, id: Id, failure: Failure) -> None:
        """This request can never be answered; the link goes on."""
        self.act(self.session.fail(id, str(failure())), failure)

    def missed(self, *, for_good: bool) -> None:
        """What the server said outside of requests was not heard for a while, or will not be; the link goes on."""
        self.deaf = for_good
        self._talk.missed(for_good=for_good)

    def headers_of(self, id: Id) -> Fields:
        """What the caller wants to be sent along with this request, on a link that has headers."""
        asked = self._asked.get(id)
        return () if asked is None else asked.headers

    def act(self, events: Iterable[Event], failure: Failure | None = None) -> None:
        """Do what follows from these; `failure` is why requests of ours have ended, if they have by that."""
        for event in events:
            self._act(event, failure)
        if self.session.queued:
            self._wake()

    def _wake(self) -> None:
        if self._carrier is not None:
            self._carrier.wake()

    def _act(self, event: Event, failure: Failure | None) -> None:
        if isinstance(event, Outcome):
            self._over(event, failure)
        elif isinstance(event, ProgressReported):
            if (asked := self._asked.get(event.id)) is not None:
                asked.reported(event)
        elif isinstance(event, Call):
            self._answer(event)
        elif isinstance(event, RequestCancelled):
            if (serving := self._serving.get(event.id)) is not None:  # else it has just come to its end
                serving.cancel(reason=event.reason or "the server cancelled its request")
        elif isinstance(event, Notice):
            self._talk.notice(event)
        elif isinstance(event, Opened | OpeningFailed):
            self._failed = event if isinstance(event, OpeningFailed) else None
            self._settled.set()
        elif isinstance(event, PeerMistake):
            self._talk.mistake(event.why)
        elif isinstance(event, PeerComplaint):
            self._talk.mistake(f"the server could not read something: {event.error.message!r} ({event.error.code})")

    def _over(self, outcome: Outcome, failure: Failure | None) -> None:
        asked = self._asked.pop(outcome.id, None)
        if asked is None:
            self._talk.ended(outcome, failure)
            return
        asked.outcome, asked.failure = outcome, failure
        if asked.timer is not None:
            asked.timer.answered()
        asked.wake()
        if self._carrier is not None:
            self._carrier.settled(outcome.id)

    # Opening.

    async def open(
        self,
        *,
        probe: float | None = None,
        within: float | None = None,
        unread: Callable[[], bool] | None = None,
    ) -> None:
        """Find out what the server speaks.  One that does not answer for `probe` seconds is taken for a legacy one.

        Where `unread` can tell that nobody has read the question yet, these begin when somebody has.

        Raises `HandshakeError` if that is nothing we speak, or it took longer than `within` seconds; if the link was
        lost, what its carrier says of it.
        """
        now = trio.current_time()
        self.session.open(
            probe_until=None if probe is None else now + probe, deadline=None if within is None else now + within
        )
        self._wake()
        silence = now + _SILENCE
        while not self._settled.is_set():
            deadline = self.session.next_deadline()
            look = trio.current_time() + (3600 if unread is None else _LOOK)
            with trio.move_on_at(min(silence, look if deadline is None else min(look, deadline))):
                await self._settled.wait()
            if unread is not None and probe is not None:
                if unread():
                    self.session.put_off(trio.current_time() + probe)
                else:
                    unread = None
            if trio.current_time() >= silence:
                silence = math.inf
                _log.warning("the server has not answered for %g seconds, and is still waited for", _SILENCE)
            self.act(self.session.tick(trio.current_time()))
        if self._failed is None:
            return
        negotiation, refused = self._failed.negotiation, self._failed.error
        if self.failure is not None:
            error = self.failure()
            error.__cause__ = error.__cause__ or HandshakeError(negotiation, refused, told=True)
            raise error
        if within is not None and trio.current_time() >= now + within:
            why = f"{negotiation.why}, which was {within:g} seconds; a cancel scope around the opening can make it less"
            negotiation = attrs.evolve(negotiation, why=why)
        raise HandshakeError(negotiation, refused)

    def fall_back(self, why: str) -> None:
        """The carrier has seen that the server which is being probed is not modern."""
        self.act(self.session.fall_back(why))

    # Calls.

    async def request(
        self,
        method: str,
        params: JsonObject | None = None,
        *,
        on_progress: OnProgress | None = None,
        headers: Fields = (),
        timer: Timer | None = None,
    ) -> JsonObject:
        """The result of a request.  Raises as the table at the head of this file has it, and as `Session.request`.

        When it is cancelled the server is told, as link and revision want it, and a late answer is forgotten.  A
        `timer` is running already, and hears of progress.
        """
        await trio.lowlevel.checkpoint_if_cancelled()  # or the end of a link would be told instead of the cancellation
        progress = on_progress is not None or (timer is not None and timer.progress)
        id = self.begin(method, params, progress=progress)
        asked = self._asked[id] = _PendingRequest(headers, on_progress, timer)
        if timer is not None:
            self._timers.add(timer)
            timer.pause(bool(self._serving))
        try:
            if on_progress is not None or self._carrier is None:
                self._wake()  # this task may be busy with what is reported while there is more to be heard
            elif (brought := self._carrier.bring(id)) is not None:
                await brought
            while asked.outcome is None or asked.reports:
                if asked.reports:
                    await asked.tell()
                else:
                    asked.waiting = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(asked.abort)
        finally:
            if timer is not None:
                self._timers.discard(timer)
            if asked.outcome is None:
                del self._asked[id]
                self._remember(id)
                self.give_up(id)
        if type(asked.outcome) is Answered:
            return asked.outcome.result
        await trio.lowlevel.checkpoint_if_cancelled()  # the link may be gone because of that
        raise failure_of(asked.outcome, asked.failure)()

    def begin(
        self, method: str, params: JsonObject | None = None, *, progress: bool = False, undeclared: bool = False
    ) -> int:
        """Make a request whose outcome goes to `ServerMessageHandler.ended`; `carrier.wake` is to follow.  Raises as
        `request`.

        With `undeclared` the server need not have declared the capability for it.
        """
        if self.failure is not None:
            raise self.failure()
        return self.session.request(method, params, progress=progress, undeclared=undeclared)

    async def watch(self, seconds: float) -> None:
        """Ping the server every so many seconds; when nothing comes for as long after that, the link is lost.

        Returns when the link is gone, and at once where there is no such request.
        """
        terms = self.session.terms
        if terms is None or terms.revision.request(Role.CLIENT, _PING) is None:
            return
        while not self.over.is_set():
            with trio.move_on_after(seconds):
                await self.over.wait()
            asked = trio.current_time()
            if self.over.is_set() or await self._answers_ping(seconds) or self.heard_at > asked:
                continue
            why = f"the server did not answer a ping within {seconds:g} seconds (ping_seconds)"
            _log.warning("%s: the connection is given up", why)
            if self._carrier is not None:
                self._carrier.give_up(why)

    async def _answers_ping(self, seconds: float) -> bool:
        with trio.move_on_after(seconds):
            try:
                await self.request(_PING)
            except (RequestError, RemoteProtocolError):
                pass  # which is an answer
            except McpError as error:
                _log.warning("a ping has failed: %s", error)
                await self.over.wait()  # or the server says something else meanwhile
            return True
        return False

    def _remember(self, id: Id) -> None:
        """The server may ignore that this request is cancelled, unless its response stream is closed with that."""
        terms = self.session.terms
        if terms is None or not (terms.revision.handshake or self.session.link is LinkKind.DUPLEX):
            return
        now = trio.current_time()
        self._forget_ignored(now)
        if len(self._given_up) < self.session.limits.requests:
            self._given_up[id] = now
        else:
            self._overflowed_at = now

    def _forget_ignored(self, now: float) -> None:
        for id in [*itertools.takewhile(lambda id: self._given_up[id] + _IGNORED <= now, self._given_up)]:
            del self._given_up[id]

    @property
    def ignored(self) -> bool:
        """Whether the server may still work on a cancelled request: it has not answered, and it is not long ago."""
        now = trio.current_time()
        self._forget_ignored(now)
        return bool(self._given_up) or now < self._overflowed_at + _IGNORED

    def give_up(self, id: Id) -> None:
        """Nobody waits for this request any more."""
        if self.session.cancel(id):
            if self._carrier is not None:
                self._carrier.forget(id)
            self._wake()

    def notify(self, method: str, params: JsonObject | None = None) -> bool:
        """Tell the server; False if it cannot hear it any more."""
        told = self.session.notify(method, params)
        self._wake()
        return told

    # Requests of the server.

    def _answer(self, call: Call) -> None:
        limits = self.session.limits
        # Whoever answers has the same bounds, for all sessions.  Here they keep a flood from being a task each.
        size = 0 if self._carrier is None else self._carrier.size
        if len(self._serving) >= limits.questions + limits.questions_waiting:
            self.session.refuse(call.request.id, too_many_questions(limits))
            return
        if self._serving and self._serving_bytes + size > limits.bytes_each:
            why = "the client holds as many bytes of questions as it may (Limits.bytes_each); ask again later"
            self.session.refuse(call.request.id, RequestError(INTERNAL_ERROR, why))
            return
        self._pause(True)
        self._serving_bytes += size
        scope = self._serving[call.request.id] = trio.CancelScope()  # it may be cancelled before it begins
        self._nursery.start_soon(self._serve, call, scope, size, name=f"the server asks: {call.request.method}")

    async def _serve(self, call: Call, scope: trio.CancelScope, size: int) -> None:
        id = call.request.id
        outcome: JsonObject | RequestError = RequestError(INTERNAL_ERROR, "cancelled")  # to nobody
        try:
            with scope:
                await trio.lowlevel.checkpoint_if_cancelled()
                outcome = await _outcome(self._talk.answer, call)
        finally:
            del self._serving[id]
            self._serving_bytes -= size
            if not self._serving:
                self._pause(False)
        try:
            self._say(id, outcome)
        except Exception as error:  # noqa: BLE001  # an author's object may raise anything when it is written
            _log.error("the answer to %s cannot be written: %s", call.request.method, error)
            self._say(id, RequestError(INTERNAL_ERROR, "the client's answer could not be written"))
        self._wake()

    def _pause(self, paused: bool) -> None:
        # Which request of ours a question belongs to is not told on a stream, so it may be any.
        for timer in self._timers:
            timer.pause(paused)

    def _say(self, id: Id, outcome: JsonObject | RequestError) -> None:
        if isinstance(outcome, RequestError):
            self.session.refuse(id, outcome)
        else:
            self.session.answer(id, outcome)


def too_many_questions(limits: Limits) -> RequestError:
    """What a question is refused with that finds no room to wait."""
    return RequestError(
        INTERNAL_ERROR,
        f"the client answers {limits.questions} questions of its server at once (Limits.questions), and as many as may "
        f"wait do so: {limits.questions_waiting} (Limits.questions_waiting); ask again later",
    )


async def _outcome(answer: Callable[[Call], Awaitable[JsonObject]], call: Call) -> Any:
    try:
        return await answer(call)
    except RequestError as error:
        return error
    except Exception:  # noqa: BLE001  # an author's callback may raise anything, and the link goes on
        _log.exception("the callback for %s has failed", call.request.method)
        return RequestError(INTERNAL_ERROR, f"the client's callback for {call.request.method} has failed")
