"""Sessions over Streamable HTTP: one POST for each message, and how the messages of the server are received.

The task that waits for an answer also sends its request and reads the reply.  Other messages have tasks of their own:
those without a waiting task, and requests whose caller may be busy with progress reports.  `core.http.client_rules`
decides the meaning of a reply.  `http_sender` sends a message again where that helps; this file acts on the verdict:

| Verdict | Action |
|---|---|
| an answer | it goes to the session |
| TryInitialize | opening continues with the legacy handshake |
| TrySse | the connection ends with `NeedsSse` |
| SessionGone | the connection ends with `SessionLost`, which says if the request may have run |
| RefreshTools, Challenged, ReplyLost | the request fails with an error of its own |

A request that cannot be answered any more fails at once, alone, with the cause chained; while the session is being
opened, the connection ends, too.  Messages without an answer that do not arrive (a notification, an answer that the
server refuses) are reported as mistakes.  So nothing here needs a timeout: the end of a connection is noticed, and the
caller's scope limits how long the server may take.

Messages may overtake each other, with one exception: until the server has received ``notifications/initialized``, only
messages that may precede it are sent, because servers judge by the order of arrival.

A server may ask faster than it receives the answers.  So only `_ANSWER_TASKS` answers are sent at once, and while more
than `Limits.outgoing` others wait, the server's streams are not read.

Each POST has its own answer, as a body or as a stream.  Messages on the stream are
processed as they come; nothing more is read after the answer.  If a stream of the legacy era breaks before its answer,
it is resumed as `StreamResumption` says.  In the modern era a broken stream ends its request, and closing the stream
from here cancels it.  In the legacy era one more stream carries messages that belong to no request.  When a call of the
legacy era is cancelled, its stream is still read for a while: a gateway may use it for messages of other requests, or
of none.

A stream that has sent keep-alives counts as broken after a silence of three of their intervals.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import trio

from trio_mcp.client.errors import HeadersRefused, NoResponse, SessionLost
from trio_mcp.client.http_sender import ACKNOWLEDGE_TIMEOUT, INITIALIZED, HttpSender, drain, is_initialized, title_of
from trio_mcp.client.session import ClientSession, ServerMessageHandler
from trio_mcp.core.errors import ConnectionFailed, McpError, RemoteProtocolError, SessionClosed
from trio_mcp.core.http import client_rules as rules
from trio_mcp.core.http.fields import Fields, Mirror
from trio_mcp.core.http.sse import EventReader, Oversized, SseEvent
from trio_mcp.core.messages import PROGRESS, Batch, Error, Id, Message, Notification, Request, Response, decode
from trio_mcp.core.oauth.errors import AuthorizationFailed, is_final
from trio_mcp.core.opening import ClientProtocol, Phase
from trio_mcp.core.revisions import META_VERSION, REVISIONS, Revision
from trio_mcp.core.shares import weight
from trio_mcp.transport.http_pool import HttpPool, HttpReply, ReplyBroken

if TYPE_CHECKING:
    from trio_mcp.oauth.client import TokenSource

__all__ = ["AUTH_ADVICE", "CLOSED_HERE", "HttpLink", "NeedsSse"]

AUTH_ADVICE = "use the option auth to get a token by OAuth, or headers to send a token that you have"
CLOSED_HERE = "the connection was closed by this side"

_LAST_CANCELLATIONS = 1.0  # seconds for the last cancellations of a session
_DELETE_TIMEOUT = 2.0  # seconds for its DELETE, which follows them
_ANSWER_TASKS = 32  # answers that are sent at once, each on a connection
_GONE_SECONDS = 1.0  # seconds, at least, for other requests to a lost session to be refused, too

# The most streams of cancelled calls that are still read, and the limits of each in seconds: without a message about
# another request, and in all.  Each is a connection, which the server may keep open because it does not answer
# cancelled calls.
_MAX_ABANDONED = 8
_ABANDONED_SILENT, _ABANDONED_TOTAL = 300.0, 3600.0

_OPENING = frozenset({"initialize", "server/discover"})
_EARLY = _OPENING | {INITIALIZED}  # these may precede the end of the handshake


class NeedsSse(McpError):
    """The server refuses `initialize` at this URL.  It may be an HTTP+SSE server, whose sessions begin with a GET."""


@attrs.define(eq=False, repr=False)
class _InFlight:
    """A message that is being sent; for a request, until it has its answer."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    sent_at: float = math.inf  # until it is sent
    streaming: bool = False  # the response is a stream that has begun
    answered: bool = False  # the answer came on another stream


@attrs.define(eq=False, repr=False)
class _ResumedStream:
    """An event stream, over all its connections."""

    exchange: rules.Exchange  # the POST that it answers, or the GET for messages outside of requests
    resumption: rules.StreamResumption
    flight: _InFlight | None = None  # the request that it answers
    requested: trio.Event = attrs.field(factory=trio.Event)  # set when the first attempt to open it has ended
    opened: bool = False
    attempts: int = 0  # number of connections by GET
    sent_at: float = math.inf  # the time of the last GET
    seconds_open: float = 0  # duration of the last connection
    done: bool = False  # its answer has come
    reader: EventReader = attrs.field(init=False)  # of the last connection
    keep_alives: rules.KeepAlives = attrs.field(factory=rules.KeepAlives)  # of the last connection
    until: float = 0  # latest time to read it, after its call was cancelled
    error: McpError | None = None  # the error of the last connection, if it broke


class HttpLink(ClientSession):
    """A session over Streamable HTTP, in both eras.

    Its tasks run in `nursery`, which must outlast the session.  `headers` returns the headers of the program for each
    request, and raises only `McpError`; `mirrors` returns the arguments of a tool that are sent in headers, too.
    """

    message_size = 0
    _sse = False

    def __init__(
        self,
        session: ClientProtocol,
        handler: ServerMessageHandler,
        pool: HttpPool,
        url: str,
        *,
        nursery: trio.Nursery,
        headers: Callable[[], Fields],
        mirrors: Callable[[str], Sequence[Mirror]] = lambda tool: (),
        authorization: TokenSource | None = None,
    ) -> None:
        super().__init__(session, handler, nursery=nursery)
        self._limits = session.limits
        self._url = url
        self._sender = HttpSender(
            pool, url, session.limits, headers=headers, mirrors=mirrors, mcp_names=session.offer.mcp_names,
            authorization=authorization, make_room=self._end_abandoned_stream,
        )  # fmt: skip
        self._proposed_revision: Revision | None = None  # until a revision is agreed
        # The URL for POSTs.  sse-14: nothing is sent before the server has sent it.
        self._target: str | None = None if self._sse else url
        self._in_flight: dict[Id, _InFlight] = {}
        self._abandoned: dict[Id, _InFlight] = {}  # cancelled requests whose POST must arrive before the cancellation
        self._probe: Id | None = None  # the last request that opens the session
        self._scopes: dict[trio.CancelScope, bool] = {}  # scopes of all tasks; True: it sends a cancellation
        self._answer_slots = trio.Semaphore(_ANSWER_TASKS)
        # Streams of cancelled calls that are still read; the first one was silent for longest.
        self._abandoned_streams: dict[object, trio.CancelScope] = {}
        self._never_sent: set[Id] = set()  # cancelled before they were sent, so the server need not be told
        self._handshake_done = trio.Event()  # the server knows that the handshake is complete, or there is none
        self._changed = trio.lowlevel.ParkingLot()  # woken when a stream begins or a message is done
        self._closed = False
        self._session_gone = False  # the server has forgotten the session

    # Transport

    def wake(self) -> None:
        for message in self._outgoing():
            self._start(message)

    def send_request(self, id: Id) -> Awaitable[None] | None:
        sending: Awaitable[None] | None = None
        for message in self._outgoing():
            if not isinstance(message, Request) or message.id != id:
                self._start(message)
            elif (flight := self._begin(message)) is not None:
                sending = self._post(message, flight)
        return sending

    def _outgoing(self) -> list[Message]:
        """Return the messages that can be sent now."""
        if self._target is None or self._closed:
            return []
        if self.session.opened and not self._revision.handshake:
            self._handshake_done.set()
        # cancel-01: only requests "believed to be still in-progress" are cancelled.
        messages: list[Message] = [
            each for each, _ in self.session.outgoing() if _cancelled_id(each) not in self._never_sent
        ]
        self._never_sent.clear()  # their notifications are queued before `request_abandoned`
        return messages

    def _start(self, message: Message) -> None:
        """Send a message in a task of its own."""
        if (flight := self._begin(message)) is not None:
            post = self._post_answer if isinstance(message, Response | Error | Batch) else self._post
            self._nursery.start_soon(post, message, flight, name=f"to the server: {title_of(message)}")

    async def _post_answer(self, message: Message, flight: _InFlight) -> None:
        with self._running():
            async with self._answer_slots:
                await self._post(message, flight)

    def _begin(self, message: Message) -> _InFlight | None:
        """Return the state for sending a message, or None if it cannot be sent any more."""
        if self._session_gone:
            if isinstance(message, Request):
                self.fail(message.id, SessionLost(False))
            return None
        flight = _InFlight()
        if isinstance(message, Request):
            if message.method in _OPENING:
                if self._probe is not None:
                    self.request_abandoned(self._probe)  # it took too long, and its answer is of no use now
                params = message.params
                name = params["protocolVersion"] if "protocolVersion" in params else params["_meta"][META_VERSION]
                self._probe, self._sender.session_id, self._proposed_revision = message.id, None, REVISIONS[name]
            self._in_flight[message.id] = flight
        self._scopes[flight.scope] = _cancelled_id(message) is not None
        return flight

    def request_done(self, id: Id) -> None:
        flight = self._in_flight.get(id)
        if flight is not None:  # answered on another stream: end the wait for this one
            flight.answered = True
            self.request_abandoned(id)

    def request_abandoned(self, id: Id) -> None:
        flight = self._in_flight.pop(id, None)
        if flight is None:
            return
        if flight.sent_at == math.inf:
            self._never_sent.add(id)
        elif self._sse:
            # On another connection a cancellation could arrive before its request, and would have no effect.
            flight.scope.deadline = trio.current_time() + ACKNOWLEDGE_TIMEOUT
            self._abandoned[id] = flight
            return
        flight.scope.cancel(reason="no task waits for the answer")

    def abort(self, why: str) -> None:
        self._close(SessionLost(True, why))

    # Sending one message

    async def _post(self, message: Message, flight: _InFlight) -> None:
        id = message.id if isinstance(message, Request) else None
        try:
            with flight.scope:
                if (request := self._abandoned.pop(_cancelled_id(message), None)) is not None:  # type: ignore[arg-type]
                    while request.scope in self._scopes:
                        await self._changed.park()
                if not self._handshake_done.is_set():
                    early = not isinstance(message, Request | Notification) or message.method in _EARLY
                    if not early:
                        await self._handshake_done.wait()
                flight.sent_at = trio.current_time()
                try:
                    verdict = await self._converse(self._exchange(message), flight)
                    if verdict is not None:
                        self._handle_verdict(message, verdict, flight.sent_at)
                except McpError as error:
                    why = error
                    if isinstance(error, SessionLost):
                        self._close(error)
                        return
                    if isinstance(error, ReplyBroken):
                        text = f"{title_of(message)} has no answer: {error}"
                        why = NoResponse(text, request_may_have_run=error.sent)
                        why.__cause__ = error
                    if id is None or self._in_flight.pop(id, None) is not None:
                        self._report_failure(message, why)
                if is_initialized(message):
                    self._handshake_done.set()  # with any result: a server that refused it decides about later messages
        finally:
            del self._scopes[flight.scope]
            self._changed.unpark_all()

    async def _converse(self, exchange: rules.Exchange, flight: _InFlight) -> rules.ReplyVerdict | None:
        """Send a message and return its verdict, or None if the verdict was handled already."""
        message = exchange.message
        pending = self._pending.get(message.id) if isinstance(message, Request) else None
        verdict, exchange, reply = await self._sender.send(exchange, () if pending is None else pending.headers)
        if not isinstance(verdict, rules.Streaming):
            return verdict
        stream = _ResumedStream(exchange, rules.StreamResumption(exchange.revision), flight)
        flight.streaming = True
        self._changed.unpark_all()
        await self._read_connection(stream, reply)
        if not stream.done:
            verdict = await self._resume(stream, stream.resumption.ended(stream.seconds_open))
        if stream.done:
            return None
        if isinstance(verdict, rules.SessionGone):
            self._handle_session_gone(None, stream.sent_at)  # without the id of this request, because it may have run
            return None
        if isinstance(verdict, rules.ReplyLost) and stream.error is not None:
            raise NoResponse(f"{title_of(exchange.message)} has no answer: {verdict.why}") from stream.error
        return verdict

    def _exchange(
        self, message: Message | None, method: str = "POST", url: str | None = None, after: str = ""
    ) -> rules.Exchange:
        assert self._target is not None
        return rules.Exchange(
            url or self._target,
            self._revision,
            message,
            method,
            session=self._sender.session_id,
            probing=self.session.terms is None and not self._sse,
            sse=self._sse,
            last_event_id=after,
        )

    @property
    def _revision(self) -> Revision:
        terms = self.session.terms
        revision = self._proposed_revision if terms is None else terms.revision
        assert revision is not None  # the first message proposes a revision
        return revision

    def _end_abandoned_stream(self, why: str) -> None:
        """End the stream of a cancelled call that was silent for longest, if there is one."""
        if self._abandoned_streams:
            oldest = next(iter(self._abandoned_streams))
            self._abandoned_streams.pop(oldest).cancel(reason=why)

    @contextmanager
    def _running(self, deadline: float = math.inf) -> Iterator[trio.CancelScope]:
        """A scope that is cancelled when the session is over, or at the deadline."""
        with trio.CancelScope(deadline=deadline) as scope:
            self._scopes[scope] = False
            if self._closed:
                scope.cancel(reason="the session is over")
            try:
                yield scope
            finally:
                del self._scopes[scope]

    async def _receive_events(
        self, reply: HttpReply, reader: EventReader, keep_alives: rules.KeepAlives
    ) -> Sequence[SseEvent | Oversized] | None:
        """Return the next events of a stream, or None at its end.

        Raises ReplyBroken if no data came for longer than the keep-alives allow.
        """
        while self._answer_slots.statistics().tasks_waiting > self._limits.outgoing:
            await self._changed.park()
        silence = keep_alives.timeout
        if silence == math.inf:
            data = await reply.receive()
        else:
            with trio.move_on_after(silence) as waiting:
                data = await reply.receive()
            if waiting.cancelled_caught:
                why = f"no data came for {silence:g} seconds, but keep-alives came before: the connection is dead"
                raise ReplyBroken(why, sent=True)
        if not data:
            return None
        comments = reader.comments
        events = reader.feed(data)
        alone = all(
            isinstance(each, SseEvent)
            and each.id is None
            and (not each.data or each.event not in ("message", "endpoint"))
            for each in events
        )
        commented = reader.comments > comments
        keep_alives.received(trio.current_time(), keep_alive=alone and (commented or bool(events)))
        return events

    def _decode(self, event: SseEvent) -> Message:
        message = decode(event.data, self._limits)
        self.message_size = weight(event.data, self._limits.values, message)
        return message

    # Outcomes

    def _deliver(self, message: Message, about: Id | None) -> None:
        self.receive(message, trio.current_time(), about)
        if self.session.queued:
            self.wake()

    def _handle_verdict(self, message: Message | None, verdict: rules.ReplyVerdict, sent_at: float = math.inf) -> None:
        id = message.id if isinstance(message, Request) else None
        if id is not None and self._in_flight.pop(id, None) is None:
            return  # no task waits for it any more
        match verdict:
            case rules.AnswerReceived(answer):
                self._deliver(answer, id)
            case rules.TryInitialize(why):
                self.fall_back(why)
            case rules.SessionGone():
                self._handle_session_gone(id, sent_at)
            case rules.Challenged(status, challenge):
                # A 403 without a challenge has another reason, such as the origin, or a user without access.
                advice = f"; {AUTH_ADVICE}" if status == 401 or challenge else ""
                self._report_failure(message, self._sender.refusal(message, verdict, advice))
            case rules.RefreshTools(answer):
                self._report_failure(message, HeadersRefused(answer.exception))
            case rules.TrySse(why):
                why = f"{title_of(message)} was refused with {why}; the server may use HTTP+SSE"
                self._report_failure(message, NeedsSse(why))
            case rules.ReplyLost(why, status):
                error: McpError = RemoteProtocolError(f"{title_of(message)} has no answer: {why}")
                if status is not None:  # otherwise HTTP worked, but the message was invalid
                    where = rules.url_without_secrets(self._url)
                    error = NoResponse(f"{title_of(message)} has no answer: {why} ({where})", status=status)
                self._report_failure(message, error)
            case _:
                assert isinstance(verdict, rules.ReplyAccepted)

    def _report_failure(self, message: Message | None, error: McpError) -> None:
        if not isinstance(message, Request):
            # The program may want to report it: the server may be waiting for this message.
            self._handler.mistake(f"{title_of(message)} did not reach the server: {error}")
        elif self.session.terms is not None:
            self.fail(message.id, error)
        elif self.session.phase is Phase.PROBING and isinstance(error, RemoteProtocolError):
            self.fall_back(str(error))  # a modern server does not answer the probe like this
        else:
            self._close(error)

    def _handle_session_gone(self, id: Id | None, sent_at: float) -> None:
        """http-58: the server has forgotten the session.  `sent_at` is the time of the message that it has refused.

        Other requests in flight probably get the same reply as soon as this one did, which proves that they have not
        run.  Requests with a response stream may have run.
        """
        first, self._session_gone, self._sender.session_id = not self._session_gone, True, None
        if id is not None:
            self.fail(id, SessionLost(False))
        for other, flight in list(self._in_flight.items()):
            if flight.sent_at == math.inf:
                self.request_abandoned(other)
                self.fail(other, SessionLost(False))
        if all(each.streaming for each in self._in_flight.values()):
            self._close(SessionLost(True))
        elif first:
            seconds = max(_GONE_SECONDS, min(trio.current_time() - sent_at, ACKNOWLEDGE_TIMEOUT))

            async def end() -> None:
                with trio.move_on_after(seconds):
                    while not all(each.streaming for each in self._in_flight.values()):
                        await self._changed.park()
                self._close(SessionLost(True))

            self._nursery.start_soon(end, name="the end of a session")

    def _close(self, failure: McpError) -> None:
        """Stop sending and receiving."""
        self._closed = True
        self._in_flight.clear()
        self.lose(failure)
        for scope in list(self._scopes):
            scope.cancel(reason="the session is over")

    async def aclose(self) -> None:
        """End all requests and tasks, and tell the server that the session is over (http-59).

        Never raises because of the server, and takes at most three seconds.
        """
        # First the cancellations: some servers end a session and go on with its calls.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST_CANCELLATIONS):
            while any(self._scopes.values()):
                await self._changed.park()
        self._close(SessionClosed(CLOSED_HERE))
        if self._sender.session_id is not None:
            delete, self._sender.session_id = self._exchange(None, "DELETE"), None
            deadline = trio.current_time() + _DELETE_TIMEOUT
            with trio.CancelScope(shield=True, deadline=deadline), suppress(McpError):
                await self._sender.send(delete)
        await trio.lowlevel.checkpoint()

    # Receiving messages of the server

    async def run_event_stream(self, ready: trio.Event | None = None) -> None:
        """Receive the messages outside of requests, until the server has no stream for them or the session ends.

        For an open legacy session.  In the modern era there is no such stream: returns at once.  `ready` is set when
        the stream is open, or when it is known that it cannot be opened now.
        """
        ready = trio.Event() if ready is None else ready
        try:
            with self._running():
                if not self._revision.handshake:
                    return
                await self._handshake_done.wait()
                resumption = rules.StreamResumption(self._revision, standalone=True)
                stream = _ResumedStream(self._exchange(None, "GET"), resumption, requested=ready)
                try:
                    verdict = await self._resume(stream, rules.Reconnect(0, ""))
                except McpError as error:
                    verdict = rules.ReplyLost(str(error))
                if isinstance(verdict, rules.SessionGone):
                    if stream.opened:
                        self._handle_session_gone(None, stream.sent_at)
                        return
                    # A 404 to the first GET may only mean that the server has no event stream; a POST shows if the
                    # session is gone.
                    with trio.move_on_after(ACKNOWLEDGE_TIMEOUT), suppress(McpError):
                        await self.request("ping")
                    if self._session_gone:
                        return
                elif not isinstance(verdict, rules.NoStream):
                    self._handler.mistake(f"the event stream of the session is lost: {rules.reason(verdict)}")
                self.missed(for_good=True)
        finally:
            ready.set()

    async def _resume(self, stream: _ResumedStream, plan: rules.Reconnect | rules.ReplyLost) -> rules.ReplyVerdict:
        """Reconnect the stream until its answer has come, or until it cannot be resumed."""
        while isinstance(plan, rules.Reconnect):
            await trio.sleep(plan.seconds)
            stream.attempts += 1
            get = self._exchange(None, "GET", stream.exchange.url, plan.last_event_id)
            try:
                with trio.CancelScope() as scope:
                    if stream.keep_alives.timeout < math.inf:
                        # Servers without keep-alives may send the response head only with the first event.
                        scope.deadline = trio.current_time() + max(stream.keep_alives.timeout, ACKNOWLEDGE_TIMEOUT)
                    stream.sent_at = trio.current_time()
                    verdict, _, reply = await self._sender.send(get)
                    scope.deadline = math.inf
                    if isinstance(verdict, rules.Streaming):
                        if (stream.attempts > 1 or reply.replayed) and not stream.resumption.last_event_id:
                            self.missed(for_good=False)  # the server has stored no messages since the last connection
                        await self._read_connection(stream, reply)
                if scope.cancelled_caught:
                    raise ReplyBroken("the server does not answer, but keep-alives came before", sent=True)
            except (ConnectionFailed, ReplyBroken, AuthorizationFailed) as error:
                if is_final(error):
                    raise
                stream.error = error
                plan = stream.resumption.ended()
                continue
            finally:
                stream.requested.set()
            if stream.done or isinstance(verdict, rules.SessionGone | rules.Challenged):
                return verdict
            if isinstance(verdict, rules.Streaming):
                plan = stream.resumption.ended(stream.seconds_open)
            elif isinstance(verdict, rules.NoStream) and stream.exchange.message is None:
                return verdict
            else:
                plan = stream.resumption.refused(verdict)
                busy = reply.status >= 400 and not isinstance(verdict, rules.NoStream)
                if busy and isinstance(plan, rules.ReplyLost):  # this was the last attempt
                    plan = attrs.evolve(plan, status=reply.status)
        return plan

    async def _read_connection(self, stream: _ResumedStream, reply: HttpReply) -> None:
        """Read one connection of the stream, to its end or to the answer."""
        stream.reader, stream.keep_alives = EventReader(self._limits.message_bytes), rules.KeepAlives()
        stream.opened, stream.error = True, None
        stream.requested.set()
        start = trio.current_time()
        async with reply:
            try:
                await self._read_events(stream, reply)
                # In a task: the call does not wait for the end of the stream.
                if stream.done and not reply.done and not self._closed:
                    self._nursery.start_soon(self._read_rest, reply.leave(), name="the end of a stream")
            except ReplyBroken as error:
                stream.error = error
            except trio.Cancelled:
                abandoned = stream.flight is not None and not stream.flight.answered
                if abandoned and self.session.opened and self._revision.handshake and not self._closed:
                    name = "the stream of a cancelled call"
                    self._nursery.start_soon(self._read_rest, reply.leave(), stream, name=name)
                raise
        stream.seconds_open = trio.current_time() - start

    async def _read_events(self, stream: _ResumedStream, reply: HttpReply) -> None:
        while not stream.done:
            events = await self._receive_events(reply, stream.reader, stream.keep_alives)
            if events is None:
                return
            stream.resumption.received(stream.reader, events)
            for event in events:
                if not stream.done:
                    self._handle_sse_event(stream, event)

    async def _read_rest(self, reply: HttpReply, stream: _ResumedStream | None = None) -> None:
        """Read a reply to its end after its request is over.

        `stream` is the stream of a cancelled request: receive the other messages on it.
        """
        with self._running() as scope:
            async with reply:
                if stream is not None:
                    stream.until = trio.current_time() + _ABANDONED_TOTAL
                    scope.deadline = trio.current_time() + _ABANDONED_SILENT
                    if len(self._abandoned_streams) == _MAX_ABANDONED:
                        self._end_abandoned_stream("too many streams of cancelled calls")
                    self._abandoned_streams[stream] = scope
                try:
                    with suppress(ReplyBroken):
                        if stream is not None:
                            await self._read_events(stream, reply)
                        await drain(reply)
                finally:
                    self._abandoned_streams.pop(stream, None)

    def _handle_sse_event(self, stream: _ResumedStream, event: SseEvent | Oversized) -> None:
        exchange = stream.exchange
        if isinstance(event, Oversized):
            why = f"an event was longer than {event.limit} bytes (Limits.message_bytes)"
            if exchange.message is None:
                self._handler.mistake(f"{why}; skipped")
            else:  # It is probably the answer; otherwise the caller might wait forever.
                stream.done = True
                self._handle_verdict(exchange.message, rules.ReplyLost(why))
            return
        if event.event != "message" or not event.data:
            return  # http-46: an event without a message, to resume from
        message = self._decode(event)
        # An error without an id can only be about the request of this stream.
        if exchange.asked and (exchange.answered_by(message) or (isinstance(message, Error) and message.id is None)):
            stream.done = True
            self._handle_verdict(exchange.message, rules.read_answer(exchange, message))
            return
        about = exchange.message.id if isinstance(exchange.message, Request) else None
        if stream in self._abandoned_streams:
            progress = (
                isinstance(message, Notification)
                and message.method == PROGRESS
                and message.params.get("progressToken") in (about, str(about))
            )
            if not progress:
                # Move it behind the others.
                self._abandoned_streams[stream] = scope = self._abandoned_streams.pop(stream)
                scope.deadline = min(trio.current_time() + _ABANDONED_SILENT, stream.until)
        self._deliver(message, about)


def _cancelled_id(message: Message) -> Id | None:
    """Return the id of the request that this notification cancels, or None."""
    if isinstance(message, Notification) and message.method == "notifications/cancelled":
        id: Id = message.params["requestId"]
        return id
    return None
