"""One session with a server, over any transport: the requests to the server, and the requests of the server.

`ClientSession` connects the session protocol, which has no I/O, with the tasks of the program.  A subclass carries the
messages over one kind of transport.  Messages come in through `receive`.  Messages to send wait in `session` until the
subclass takes them out.

A task that calls `request` waits there, and all work for its call runs in this task: progress reports, the result, and
errors.  So the cancel scope of the task is the timeout of the call, and an exception of a callback reaches the program
that gave the callback.

| Event of the session | Effect |
|---|---|
| an outcome of a request to the server | the task that waits for it continues |
| progress | the task that waits gets it, in order and before the outcome |
| Call | a new task answers it, in a cancel scope for the server's cancellation |
| Notice | is passed to the `ServerMessageHandler` at once |
| Opened, OpeningFailed | `open` returns or raises |

Errors of a call without a result:

| Reason | Error |
|---|---|
| the server answered with an error | `RequestError` |
| the answer is invalid | `RemoteProtocolError` |
| the connection was lost, or the request could not be sent | the error of the transport, usually a `SessionClosed` |
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, Protocol, TypeAlias, TypeVar

import attrs
import trio

from trio_mcp.client.errors import HandshakeError, failure_of, too_large_questions, too_many_questions
from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    McpError,
    RemoteProtocolError,
    RequestError,
    SessionClosed,
    repeated,
)
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.messages import Batch, Error, Event, Id, JsonObject, Message, Response
from trio_mcp.core.opening import ClientProtocol, OpeningFailed
from trio_mcp.core.requests import (
    Answered,
    LinkKind,
    Outcome,
    PeerComplaint,
    PeerMistake,
    ProgressReported,
    RequestCancelled,
)
from trio_mcp.core.revisions import Role, Terms
from trio_mcp.core.session import Call, Notice, Opened
from trio_mcp.transport.wire import Duplex, Framing, Tap

__all__ = [
    "PAUSES",
    "STABLE",
    "ClientSession",
    "DroppingQueue",
    "OnProgress",
    "Progress",
    "ServerMessageHandler",
    "StreamLink",
    "Timer",
]

T = TypeVar("T")

_log = logging.getLogger("trio_mcp")

OnProgress: TypeAlias = Callable[[float, float | None, str | None], object]
"""Called with progress, total and message; total and message may be None.  If it returns an awaitable, that is awaited.
"""

OnEnd: TypeAlias = Callable[[Outcome, McpError | None], object]
"""Called with the outcome of a request, and the error of the transport if the request ended by it."""

PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each attempt to open a new session without a call, or to subscribe again in the same session.  The
first has no pause: a server that has forgotten its sessions responds at once, and so does one behind a proxy that cuts
idle streams.  A server that restarts has a quarter of a minute."""
STABLE = 8.0
"""Seconds after which a session or a subscription counts as stable, and its attempts are counted from zero.  As long as
the longest pause, because otherwise the client would ask forever if the server ends each one at once."""

_PING = "ping"
_CHECK_INTERVAL = 0.5  # seconds between two checks if the server has begun to read
_SILENCE = 10.0  # seconds of opening after which a warning is logged

# Seconds for which a server may ignore a cancellation and continue to work on the request.
_CANCELLED_SECONDS = 300.0

_QUEUED = 1000  # the most items in a `DroppingQueue`
_QUEUED_CHARACTERS = 1024 * 1024  # the most characters in all of them


class ServerMessageHandler(Protocol):
    """The owner of a session.  It handles the messages that the server sends on its own."""

    async def answer(self, call: Call) -> JsonObject:
        """Return the result of a request of the server, or raise a `RequestError` as its answer."""

    def notice(self, notice: Notice) -> None:
        """Handle a notification that belongs to no request."""

    def answered_late(self, method: str, result: JsonObject) -> None:
        """Handle the result of a request that was cancelled: it is of no use, but the server may go on for it."""

    def missed(self, *, for_good: bool) -> None:
        """Handle a gap: notifications were not received.  `for_good`: no more will come in this session."""

    def mistake(self, why: str) -> None:
        """Handle a harmless violation of the protocol by the server."""

    def connection_lost(self, failure: McpError) -> None:
        """Handle the loss of the connection.  Called once, after all requests have their outcomes."""


class Timer:
    """The timeouts of one call, over all of its requests.

    Each request may take `seconds`.  They start again at each progress report, and pause while this side answers the
    server.  The whole call, with all answers, may take `at_most`.  `progress`: ask the server for reports.
    """

    __slots__ = ("_at_most", "_end", "_paused", "_scope", "_seconds", "progress", "running")

    def __init__(self, seconds: float, at_most: float, *, progress: bool) -> None:
        self._seconds = seconds
        self._at_most = at_most
        self._end = trio.current_time() + at_most
        self._scope = trio.CancelScope()
        self.progress = progress and seconds < at_most
        self.running = self._paused = False

    async def run(self, name: str, work: Callable[[], Awaitable[T]], *, request: bool = True) -> T:
        """Return the result of `work`.  Raises `trio.TooSlowError` at the deadline; with `request`, `seconds` count
        too.
        """
        self.running = True
        try:
            with trio.CancelScope() as self._scope:
                self.pause(not request)
                return await work()
        finally:
            self.running = False
        if trio.current_time() >= self._end:
            raise trio.TooSlowError(f"{name} was not complete within {self._at_most:g} seconds (max_timeout)")
        raise trio.TooSlowError(f"{name} had no answer and no progress for {self._seconds:g} seconds (timeout)")

    def pause(self, paused: bool) -> None:
        self._paused = paused
        self.progressed()

    def progressed(self) -> None:
        self._scope.deadline = self._end if self._paused else min(trio.current_time() + self._seconds, self._end)

    def answered(self) -> None:
        """Turn the deadline off.  Only the scope of the program limits the rest, such as progress reports before the
        answer.
        """
        self._scope.deadline = math.inf


@attrs.frozen
class Progress:
    """A progress report of a call."""

    progress: float
    total: float | None = None
    message: str | None = None


class DroppingQueue(Generic[T]):
    """A queue of reports or log messages for a slow reader.

    If it is full, the oldest items are dropped, because the last ones are the most useful.
    """

    __slots__ = ("_characters", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[tuple[T, int]] = deque()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, characters: int) -> None:
        self._waiting.append((item, characters))
        self._characters += characters
        while len(self._waiting) > _QUEUED or (self._characters > _QUEUED_CHARACTERS and len(self._waiting) > 1):
            self.take()

    def take(self) -> T:
        """Remove and return the oldest item."""
        item, characters = self._waiting.popleft()
        self._characters -= characters
        return item


class _PendingRequest:
    """A request to the server, and the task that waits for it."""

    __slots__ = ("failure", "headers", "on_progress", "outcome", "reports", "timer", "waiting")

    def __init__(self, headers: Fields, on_progress: OnProgress | None, timer: Timer | None) -> None:
        self.headers = headers
        self.on_progress = on_progress
        self.timer = timer
        self.reports: DroppingQueue[Progress] | None = None
        self.outcome: Outcome | None = None
        self.failure: McpError | None = None
        # An Event per call would cost more than all other work in this class.
        self.waiting: trio.lowlevel.Task | None = None

    def wake(self) -> None:
        if self.waiting is not None:
            trio.lowlevel.reschedule(self.waiting)
            self.waiting = None

    def abort(self, _: object) -> trio.lowlevel.Abort:
        self.waiting = None
        return trio.lowlevel.Abort.SUCCEEDED


class ClientSession:
    """One session with a server; see the head of this file.  A subclass carries its messages.

    Requests of the server are answered in tasks of `nursery`, which must outlast the connection.
    """

    def __init__(self, session: ClientProtocol, handler: ServerMessageHandler, *, nursery: trio.Nursery) -> None:
        self.session = session
        self._handler = handler
        self._nursery = nursery
        self._pending: dict[Id, _PendingRequest] = {}
        self._begun: dict[Id, OnEnd] = {}  # requests without a task that waits
        self._timers: set[Timer] = set()  # timers of the pending requests
        # Cancelled requests without an answer: the time of the cancellation, and the method.
        self._cancelled: dict[Id, tuple[float, str]] = {}
        self._overflowed_at = -math.inf  # the last time when there were too many to store
        self._serving: dict[Id, trio.CancelScope] = {}
        self._serving_bytes = 0  # the memory for their requests
        self._places = Counter[bool]()  # the numbers of questions (True) and of other requests
        self._opening_done = trio.Event()  # the opening has succeeded or failed
        self._opening_failure: OpeningFailed | None = None
        self.failure: McpError | None = None
        """The error of the connection, after it is lost.  Raise `loss()`."""
        self.notifications_lost = False
        """True if no notifications outside of requests can come in this session."""
        self.closed = trio.Event()
        """Set when the connection is lost."""
        self.last_message_at = -math.inf
        """The time of the last message from the server."""

    @property
    def terms(self) -> Terms:
        """The terms of the open session."""
        assert self.session.terms is not None
        return self.session.terms

    # The transport

    def wake(self) -> None:
        """Called when the session has a message to send."""
        raise NotImplementedError

    def send_request(self, id: Id) -> Awaitable[None] | None:
        """Send messages like `wake`.  May return an awaitable for the caller's task, which sends this request and gets
        its answer.
        """
        self.wake()
        return None

    def request_done(self, id: Id) -> None:
        """Called when this request has its outcome, on any path."""

    def request_abandoned(self, id: Id) -> None:
        """Called when no task waits for this request any more.  The notification for the server is already queued."""

    def abort(self, why: str) -> None:
        """Close the connection, because the server does not respond."""
        raise NotImplementedError

    @property
    def last_data_at(self) -> float:
        """The time of the last bytes on a stream that carries all messages; -inf where each answer has its own."""
        return -math.inf

    @property
    def message_size(self) -> int:
        """The memory for the message that is being received, in bytes."""
        raise NotImplementedError

    # Called by the transport

    def receive(self, message: Message, now: float, about: Id | None = None) -> None:
        """Process a message; then wake the transport.  `about` is the request in whose HTTP response it came."""
        self.last_message_at = now
        if self._cancelled:
            for each in message.items if isinstance(message, Batch) else (message,):
                if isinstance(each, Response | Error):
                    late = self._cancelled.pop(each.id, None)  # type: ignore[arg-type]  # None is no id of a request
                    if late is not None and isinstance(each, Response):
                        self._handler.answered_late(late[1], each.result)
        for event in self.session.receive(message, now, about=about):
            if type(event) is Answered:
                self._finish(event, None)
            else:
                self._handle_event(event, None)

    def lose(self, failure: McpError) -> None:
        """End all calls with this error, because the connection is lost; later calls raise it, too."""
        if self.failure is None:
            self.failure = failure
            self.closed.set()
            self.handle_events(self.session.connection_lost(why=str(failure)), failure)
            self._handler.connection_lost(failure)

    def loss(self) -> McpError:
        """Return the error of the lost connection, for one more task to raise."""
        assert self.failure is not None
        return repeated(self.failure)

    def fail(self, id: Id, failure: McpError) -> None:
        """End one request, because it cannot be answered any more.  The connection continues."""
        self.handle_events(self.session.fail(id, str(failure)), failure)

    def missed(self, *, for_good: bool) -> None:
        """Report that notifications were not received.  `for_good`: no more will come.  The connection continues."""
        self.notifications_lost = for_good
        self._handler.missed(for_good=for_good)

    def handle_events(self, events: Iterable[Event], failure: McpError | None = None) -> None:
        """Handle events of the session, and wake the transport.  `failure`: the error of requests that end by them."""
        for event in events:
            self._handle_event(event, failure)
        if self.session.queued:
            self.wake()

    def _handle_event(self, event: Event, failure: McpError | None) -> None:
        if isinstance(event, Outcome):
            self._finish(event, failure)
        elif isinstance(event, ProgressReported):
            self._add_report(event)
        elif isinstance(event, Call):
            self._start_serving(event)
        elif isinstance(event, RequestCancelled):
            if (serving := self._serving.get(event.id)) is not None:  # otherwise it has just ended
                serving.cancel(reason=event.reason or "the server cancelled its request")
        elif isinstance(event, Notice):
            self._handler.notice(event)
        elif isinstance(event, Opened | OpeningFailed):
            self._opening_failure = event if isinstance(event, OpeningFailed) else None
            self._opening_done.set()
        elif isinstance(event, PeerMistake):
            self._handler.mistake(event.why)
        elif isinstance(event, PeerComplaint):
            self._handler.mistake(f"the server could not read a message: {event.error.message!r} ({event.error.code})")

    def _finish(self, outcome: Outcome, failure: McpError | None) -> None:
        pending = self._pending.pop(outcome.id, None)
        if pending is not None:
            pending.outcome, pending.failure = outcome, failure
            if pending.timer is not None:
                self._timers.discard(pending.timer)  # a question of the server must not start it again
                pending.timer.answered()
            pending.wake()
        elif (on_end := self._begun.pop(outcome.id, None)) is not None:
            on_end(outcome, failure)
        self.request_done(outcome.id)

    def _add_report(self, report: ProgressReported) -> None:
        pending = self._pending.get(report.id)
        if pending is None:
            return
        if pending.timer is not None:
            pending.timer.progressed()
        if pending.on_progress is not None:
            if pending.reports is None:
                pending.reports = DroppingQueue()
            progress = Progress(report.progress, report.total, report.message)
            pending.reports.add(progress, len(report.message or ""))
            pending.wake()

    # Opening

    async def open(
        self,
        *,
        probe: float | None = None,
        within: float | None = None,
        unread: Callable[[], bool] | None = None,
    ) -> None:
        """Open the session.  A server that does not answer the probe within `probe` seconds is treated as a legacy
        server.

        `unread` returns True as long as no process has read the probe; the seconds start after that.

        Raises `HandshakeError` if there is no revision in common, or if opening takes more than `within` seconds, and
        the error of the transport if the connection is lost.
        """
        now = trio.current_time()
        self.session.open(
            probe_until=None if probe is None else now + probe, deadline=None if within is None else now + within
        )
        self.wake()
        warn_at = now + _SILENCE
        while not self._opening_done.is_set():
            deadline = self.session.next_deadline()
            next_check = trio.current_time() + (3600 if unread is None else _CHECK_INTERVAL)
            with trio.move_on_at(min(warn_at, next_check if deadline is None else min(next_check, deadline))):
                await self._opening_done.wait()
            if unread is not None and probe is not None:
                if unread():
                    self.session.put_off(trio.current_time() + probe)
                else:
                    unread = None
            if trio.current_time() >= warn_at:
                warn_at = math.inf
                _log.warning("the server has not answered for %g seconds; still waiting", _SILENCE)
            self.handle_events(self.session.tick(trio.current_time()))
        if self._opening_failure is None:
            return
        negotiation, refused = self._opening_failure.negotiation, self._opening_failure.error
        if self.failure is not None:
            error = self.loss()
            error.__cause__ = error.__cause__ or HandshakeError(negotiation, refused, nested=True)
            raise error
        if within is not None and trio.current_time() >= now + within:
            why = f"{negotiation.why}, which was {within:g} seconds; use a cancel scope for a shorter time"
            negotiation = attrs.evolve(negotiation, why=why)
        raise HandshakeError(negotiation, refused)

    def fall_back(self, why: str) -> None:
        """Continue with the legacy handshake: the transport has found that the server is not modern."""
        self.handle_events(self.session.fall_back(why))

    # Requests to the server

    async def request(
        self,
        method: str,
        params: JsonObject | None = None,
        *,
        on_progress: OnProgress | None = None,
        headers: Fields = (),
        timer: Timer | None = None,
    ) -> JsonObject:
        """Send a request, and return its result.  Raises the errors of the table above, and those of
        `SessionProtocol.request`.

        If this is cancelled, the server is told in the way of the transport and the revision, and a late answer is
        dropped.  `timer` is already running; it is told of progress.
        """
        # Otherwise a lost connection would be raised instead of the cancellation.
        await trio.lowlevel.checkpoint_if_cancelled()
        progress = on_progress is not None or (timer is not None and timer.progress)
        id = self.begin(method, params, progress=progress)
        pending = self._pending[id] = _PendingRequest(headers, on_progress, timer)
        if timer is not None:
            self._timers.add(timer)
            timer.pause(bool(self._serving))
        try:
            if on_progress is not None:
                # This task cannot read the response, because it may be busy with a progress report.
                self.wake()
            elif (sending := self.send_request(id)) is not None:
                await sending
            while pending.outcome is None or pending.reports:
                if pending.reports:
                    assert on_progress is not None  # without it no report is queued
                    report = pending.reports.take()
                    called = on_progress(report.progress, report.total, report.message)
                    if inspect.isawaitable(called):
                        await called
                else:
                    pending.waiting = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(pending.abort)
        except BaseException:  # a cancellation in the step in which the answer comes, or a progress callback that fails
            if type(pending.outcome) is Answered:
                self._handler.answered_late(method, pending.outcome.result)
            raise
        finally:
            if timer is not None:
                self._timers.discard(timer)
            if pending.outcome is None:
                del self._pending[id]
                self._remember_cancelled(id, method)
                self.cancel(id)
        if type(pending.outcome) is Answered:
            return pending.outcome.result
        await trio.lowlevel.checkpoint_if_cancelled()  # the cancellation may be the reason why the connection is lost
        raise repeated(failure_of(pending.outcome, pending.failure))

    def begin(
        self,
        method: str,
        params: JsonObject | None = None,
        *,
        progress: bool = False,
        undeclared: bool = False,
        on_end: OnEnd | None = None,
    ) -> int:
        """Queue a request without a task that waits.  Raises the same errors as `request`.

        `on_end` is called with the outcome and the error of the transport; see `failure_of`.  Wake the transport after
        this.  With `undeclared`, the server need not have declared the capability.
        """
        if self.failure is not None:
            raise self.loss()
        id = self.session.request(method, params, progress=progress, undeclared=undeclared)
        if on_end is not None:
            self._begun[id] = on_end
        return id

    async def watch(self, seconds: float) -> None:
        """Ping the server at this interval; if no message comes within the same time, close the connection.

        Bytes of a message that is not whole count as a sign of life, because the answer to the ping follows them.

        Returns when the connection is lost, and at once if the revision has no ping.
        """
        if self.terms.revision.request(Role.CLIENT, _PING) is None:
            return
        while not self.closed.is_set():
            with trio.move_on_after(seconds):
                await self.closed.wait()
                return
            pinged_at = trio.current_time()
            with trio.move_on_after(seconds) as waiting:
                try:
                    await self.request(_PING)
                except (RequestError, RemoteProtocolError):
                    pass  # an error is an answer, too
                except McpError as error:
                    _log.warning("a ping has failed: %s", error)
                    await self.closed.wait()  # until it is closed, or another message has come
            if waiting.cancelled_caught and max(self.last_message_at, self.last_data_at) <= pinged_at:
                why = f"the server did not answer a ping within {seconds:g} seconds (ping_seconds)"
                _log.warning("%s: the connection is closed", why)
                self.abort(why)

    def _remember_cancelled(self, id: Id, method: str) -> None:
        """Store a cancelled request that the server may continue to work on.

        It cannot if the cancellation closes the response stream.
        """
        terms = self.session.terms
        if terms is None or not (terms.revision.handshake or self.session.link is LinkKind.DUPLEX):
            return
        self._cancelled[id] = trio.current_time(), method
        if len(self._cancelled) > self.session.limits.requests:
            del self._cancelled[next(iter(self._cancelled))]
            self._overflowed_at = trio.current_time()

    @property
    def ignored(self) -> bool:
        """True if the server may still work on a recently cancelled request, because it has not answered it."""
        latest = max([self._overflowed_at, *(at for at, _ in self._cancelled.values())])
        return trio.current_time() < latest + _CANCELLED_SECONDS

    def cancel(self, id: Id) -> None:
        """Cancel a request: its outcome is of no use any more."""
        self._begun.pop(id, None)
        if self.session.cancel(id):
            self.request_abandoned(id)
            self.wake()

    def notify(self, method: str, params: JsonObject | None = None) -> bool:
        """Send a notification.  Returns False if the server cannot receive it any more."""
        sent = self.session.notify(method, params)
        self.wake()
        return sent

    # Requests of the server

    def _start_serving(self, call: Call) -> None:
        limits, id = self.session.limits, call.request.id
        # The handler has the same limits, for all sessions.  These here keep a flood of questions from starting a task
        # each.
        size = self.message_size
        # Requests of extensions, such as polls of a question that is answered later, take no place of a question.
        asks = call.terms.revision.request(Role.SERVER, call.request.method) is not None
        if asks and self._places[asks] >= limits.questions + limits.questions_waiting:
            self.session.refuse(id, too_many_questions(limits))
        elif not asks and self._places[asks] >= limits.calls:
            why = f"the client serves {limits.calls} requests of extensions at once (Limits.calls); try again later"
            self.session.refuse(id, RequestError(INTERNAL_ERROR, why))
        elif self._serving and self._serving_bytes + size > limits.bytes_each:
            self.session.refuse(id, too_large_questions())
        else:
            for timer in self._timers:  # on a stream a question does not say which request it belongs to
                timer.pause(True)
            self._serving_bytes += size
            self._places[asks] += 1
            scope = self._serving[id] = trio.CancelScope()  # the server may cancel it before it starts
            name = f"the server asks: {call.request.method}"
            self._nursery.start_soon(self._serve, call, scope, size, asks, name=name)

    async def _serve(self, call: Call, scope: trio.CancelScope, size: int, asks: bool) -> None:
        id, method = call.request.id, call.request.method
        # Not sent: the request is cancelled.
        outcome: JsonObject | RequestError = RequestError(INTERNAL_ERROR, "cancelled")
        try:
            with scope:
                await trio.lowlevel.checkpoint_if_cancelled()
                outcome = await self._handler.answer(call)
        except RequestError as error:
            outcome = error
        except Exception:  # noqa: BLE001  # a callback may raise anything, and the connection continues
            _log.exception("the callback for %s has failed", method)
            outcome = RequestError(INTERNAL_ERROR, f"the client's callback for {method} has failed")
        finally:
            del self._serving[id]
            self._serving_bytes -= size
            self._places[asks] -= 1
            if not self._serving:
                for timer in self._timers:
                    timer.pause(False)
        try:
            if isinstance(outcome, RequestError):
                self.session.refuse(id, outcome)
            else:
                self.session.answer(id, outcome)
        except Exception as error:  # noqa: BLE001  # an object of the program may raise anything when it is written
            _log.error("the answer to %s cannot be written: %s", method, error)
            self.session.refuse(id, RequestError(INTERNAL_ERROR, "the client's answer could not be written"))
        self.wake()


class StreamLink(ClientSession):
    """A session over one stream: a pipe to a child process, a socket, a WebSocket, or memory.

    It is the `SessionHandler` of the stream, which looks itself for messages to send after it has read.  When the
    stream ends, all waiting calls end with its error.  `explain` may know a better reason for the end, such as the exit
    status of a child process and its last output.
    """

    def __init__(
        self,
        session: ClientProtocol,
        handler: ServerMessageHandler,
        stream: trio.abc.Stream,
        framing: Framing,
        *,
        nursery: trio.Nursery,
        tap: Tap | None = None,
        explain: Callable[[], McpError | None] | None = None,
        received: bytes = b"",
    ) -> None:
        super().__init__(session, handler, nursery=nursery)
        self._explain = explain
        self._framing = framing
        self._duplex = Duplex(self, stream, framing, session.limits, nursery=nursery, tap=tap, received=received)
        self.run, self.end = self._duplex.run, self._duplex.end
        self.wake, self.abort = self._duplex.wake, self._duplex.give_up  # type: ignore[method-assign]

    @property
    def last_data_at(self) -> float:
        return self._duplex.last_data_at

    @property
    def message_size(self) -> int:
        return self._framing.size

    def release(self) -> None:
        """Do nothing: no task waits for room in the queue."""

    def connection_lost(self, why: str) -> None:
        failure = None if self._explain is None else self._explain()
        if failure is None:
            failure = SessionClosed(why)
            failure.__cause__ = self._duplex.failure
        self.lose(failure)

    def loss(self) -> McpError:
        known = None if self._explain is None else self._explain()  # the process may have exited since
        return known or super().loss()
