"""Sessions over HTTP: how the messages of the server are received, for both HTTP transports.

Streamable HTTP (`HttpLink`): each POST has its own answer, as a body or as a stream.  Messages on the stream are
processed as they come; nothing more is read after the answer.  If a stream of the legacy era breaks before its answer,
it is resumed as `StreamResumption` says.  In the modern era a broken stream ends its request, and closing the stream
from here cancels it.  In the legacy era one more stream carries messages that belong to no request.

HTTP+SSE of 2024-11-05 (`SseLink`): one stream carries all messages of the server, and the reply to a POST only says if
the message was accepted.

A stream that has sent keep-alives counts as broken after a silence of three of their intervals.

When a call of the legacy era is cancelled, its stream is still read for a while: a gateway may use it for messages of
other requests, or of none.

`http_posts` sends the messages, for both transports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING

import attrs
import trio

from trio_mcp.client.caller import Caller, SessionLost
from trio_mcp.client.http_posts import (
    ACKNOWLEDGE_TIMEOUT,
    InFlight,
    NeedsSse,
    NoResponse,
    OnStream,
    PostTransport,
    Unauthorized,
    cancelled_id,
    closed_here,
    drain,
    name_of,
)
from trio_mcp.core.errors import ConnectionFailed, McpError, RemoteProtocolError, SessionClosed, repeated
from trio_mcp.core.http.client_rules import (
    Challenged,
    Exchange,
    KeepAlives,
    NoStream,
    Reconnect,
    ReplyLost,
    ReplyVerdict,
    SessionGone,
    Streaming,
    StreamResumption,
    read_answer,
    read_endpoint,
)
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.http.sse import EventReader, Oversized, SseEvent
from trio_mcp.core.messages import PROGRESS, Error, Id, Message, Notification, Request, decode
from trio_mcp.core.oauth.errors import AuthorizationFailed
from trio_mcp.core.requests import PeerMistake
from trio_mcp.core.revisions import LEGACY
from trio_mcp.core.shares import weight
from trio_mcp.transport.http_pool import HttpPool, HttpReply, ReplyBroken

if TYPE_CHECKING:
    from trio_mcp.oauth.client import Credentials, TokenSource

__all__ = ["ENDPOINT", "HttpLink", "NeedsSse", "NoResponse", "SseLink", "Unauthorized"]

ENDPOINT = 10.0
"""Seconds for the first event of an HTTP+SSE stream: another kind of stream may never send one."""

_DELETE_TIMEOUT = 2.0  # seconds for the DELETE of a session

# The most streams of cancelled calls that are still read, and the limits of each in seconds: without a message about
# another request, and in all.  Each is a connection, which the server may keep open because it does not answer
# cancelled calls.
_MAX_ABANDONED = 8
_ABANDONED_SILENT, _ABANDONED_TOTAL = 300.0, 3600.0


@attrs.define(eq=False, repr=False)
class _ResumedStream:
    """An event stream, over all its connections."""

    exchange: Exchange  # the POST that it answers, or the GET for messages outside of requests
    resumption: StreamResumption
    flight: InFlight | None = None  # the request that it answers
    requested: trio.Event = attrs.field(factory=trio.Event)  # set when the first attempt to open it has ended
    opened: bool = False
    attempts: int = 0  # number of connections by GET
    seconds_open: float = 0  # duration of the last connection
    done: bool = False  # its answer has come
    reader: EventReader = attrs.field(init=False)  # of the last connection
    keep_alives: KeepAlives = attrs.field(factory=KeepAlives)  # of the last connection
    until: float = 0  # latest time to read it, after its call was cancelled
    error: McpError | None = None  # the error of the last connection, if it broke


class HttpLink(PostTransport):
    """A session over Streamable HTTP, in both eras, as a `Transport`.

    Its tasks run in `nursery`, which must outlast the session.  `headers` returns the headers of the program for each
    request; `mirrors` returns the arguments of a tool that are sent in headers, too.
    """

    async def run_event_stream(self, ready: trio.Event | None = None) -> None:
        """Receive the messages outside of requests, until the server has no stream for them or the session ends.

        For an open legacy session.  In the modern era there is no such stream: returns at once.  `ready` is set when
        the stream is open, or when it is known that it cannot be opened now.
        """
        if ready is None:
            ready = trio.Event()
        try:
            with self._running():
                if self._revision.handshake:
                    await self._handshake_done.wait()
                    await self._run_event_stream(ready)
        finally:
            ready.set()

    async def _run_event_stream(self, ready: trio.Event) -> None:
        resumption = StreamResumption(self._revision, standalone=True)
        stream = _ResumedStream(self._exchange(None, "GET"), resumption, requested=ready)
        try:
            verdict = await self._resume(stream, Reconnect(0, ""))
        except McpError as error:
            verdict = ReplyLost(str(error))
        if isinstance(verdict, SessionGone):
            if stream.opened:
                self._handle_session_gone(None)
                return
            # A 404 to the first GET may only mean that the server has no event stream; a POST shows if the session is
            # gone.
            with suppress(McpError):
                await self._caller.request("ping")
            if self._session_gone:
                return
        elif not isinstance(verdict, NoStream):
            why = getattr(verdict, "why", "")
            self._caller.handle_events([PeerMistake(f"the event stream of the session is lost: {why}")])
        self._caller.missed(for_good=True)

    async def aclose(self) -> None:
        """End all requests, and tell the server that the session is over (http-59).

        Never raises because of the server, and takes at most two seconds.
        """
        self._close(closed_here)
        if self._session_id is not None:
            delete, self._session_id = self._exchange(None, "DELETE"), None
            deadline = trio.current_time() + _DELETE_TIMEOUT
            with trio.CancelScope(shield=True, deadline=deadline), suppress(McpError):
                await self._send_exchange(delete)
        await trio.lowlevel.checkpoint()

    async def _get_verdict(self, exchange: Exchange, flight: InFlight) -> ReplyVerdict | None:
        stream: _ResumedStream | None = None

        async def on_stream(exchange: Exchange, reply: HttpReply) -> None:
            nonlocal stream
            stream = _ResumedStream(exchange, StreamResumption(exchange.revision), flight)
            flight.streaming = True
            self._changed.unpark_all()
            await self._read_connection(stream, reply)

        verdict = await self._send_exchange(exchange, on_stream)
        if stream is None:
            return verdict
        if not stream.done:
            verdict = await self._resume(stream, stream.resumption.ended(stream.seconds_open))
        if stream.done:
            return None
        if isinstance(verdict, SessionGone):
            self._handle_session_gone(None)  # without the id of this request, because it may have run
            return None
        if isinstance(verdict, ReplyLost) and stream.error is not None:
            raise NoResponse(f"{name_of(exchange.message)} has no answer: {verdict.why}") from stream.error
        return verdict

    async def _resume(self, stream: _ResumedStream, plan: Reconnect | ReplyLost) -> ReplyVerdict:
        """Reconnect the stream until its answer has come, or until it cannot be resumed."""

        async def on_stream(exchange: Exchange, reply: HttpReply) -> None:
            scope.deadline = math.inf
            if stream.attempts > 1 and not stream.resumption.last_event_id:
                self._caller.missed(for_good=False)  # the server has stored no messages since the last connection
            await self._read_connection(stream, reply)

        while isinstance(plan, Reconnect):
            await trio.sleep(plan.seconds)
            stream.attempts += 1
            get = self._exchange(None, "GET", stream.exchange.url)
            try:
                with trio.CancelScope() as scope:
                    if stream.keep_alives.timeout < math.inf:
                        # Servers without keep-alives may send the response head only with the first event.
                        scope.deadline = trio.current_time() + max(stream.keep_alives.timeout, ACKNOWLEDGE_TIMEOUT)
                    verdict = await self._send_exchange(get, on_stream, after=plan.last_event_id)
                if scope.cancelled_caught:
                    raise ReplyBroken("the server does not answer, but keep-alives came before", sent=True)
            except (ConnectionFailed, ReplyBroken, AuthorizationFailed) as error:
                if isinstance(error, AuthorizationFailed) and not error.passes:
                    raise
                stream.error = error
                plan = stream.resumption.ended()
                continue
            finally:
                stream.requested.set()
            if stream.done or isinstance(verdict, SessionGone | Challenged):
                return verdict
            if isinstance(verdict, Streaming):
                plan = stream.resumption.ended(stream.seconds_open)
            elif isinstance(verdict, NoStream) and stream.exchange.message is None:
                return verdict
            else:
                plan = stream.resumption.refused(verdict)
        return plan

    async def _read_connection(self, stream: _ResumedStream, reply: HttpReply) -> None:
        """Read one connection of the stream, to its end or to the answer."""
        stream.reader, stream.keep_alives = EventReader(self._limits.message_bytes), KeepAlives()
        stream.opened, stream.error = True, None
        stream.requested.set()
        start = trio.current_time()
        try:
            await self._read_events(stream, reply)
            # In a task: the call does not wait for the end of the stream.
            if stream.done and not reply.done and not self._closed:
                self._nursery.start_soon(self._drain, reply.leave(), name="the end of a stream")
        except ReplyBroken as error:
            stream.error = error
        except trio.Cancelled:
            abandoned = stream.flight is not None and not stream.flight.answered
            if abandoned and self._session.opened and self._revision.handshake and not self._closed:
                name = "the stream of a cancelled call"
                self._nursery.start_soon(self._read_abandoned, stream, reply.leave(), name=name)
            raise
        stream.seconds_open = trio.current_time() - start

    async def _read_events(self, stream: _ResumedStream, reply: HttpReply) -> None:
        reader, keep_alives = stream.reader, stream.keep_alives
        while not stream.done and (data := await self._receive(reply, keep_alives.timeout)):
            comments = reader.comments
            events = reader.feed(data)
            stream.resumption.received(reader, events)
            keep_alives.received(trio.current_time(), keep_alive=_is_keep_alive(reader.comments > comments, events))
            for event in events:
                if not stream.done:
                    self._handle_event(stream, event)
            await self._wait_for_room()

    async def _read_abandoned(self, stream: _ResumedStream, block: AbstractAsyncContextManager[HttpReply]) -> None:
        """Receive other messages on the stream of a cancelled request."""
        start = trio.current_time()
        stream.until = start + _ABANDONED_TOTAL
        with self._running(start + _ABANDONED_SILENT) as scope:
            async with block as reply:
                if len(self._abandoned_streams) == _MAX_ABANDONED:
                    self._end_abandoned_stream("too many streams of cancelled calls")
                self._abandoned_streams[stream] = scope
                try:
                    with suppress(ReplyBroken):
                        await self._read_events(stream, reply)
                        await drain(reply)
                finally:
                    self._abandoned_streams.pop(stream, None)

    async def _drain(self, block: AbstractAsyncContextManager[HttpReply]) -> None:
        with self._running():
            async with block as reply:
                await drain(reply)

    def _handle_event(self, stream: _ResumedStream, event: SseEvent | Oversized) -> None:
        exchange = stream.exchange
        if isinstance(event, Oversized):
            self._skip_oversized(stream, event)
            return
        if event.event != "message" or not event.data:
            return  # http-46: an event without a message, to resume from
        message = decode(event.data, self._limits)
        # An error without an id can only be about the request of this stream.
        if exchange.asked and (exchange.answered_by(message) or (isinstance(message, Error) and message.id is None)):
            stream.done = True
            self._handle_verdict(exchange.message, read_answer(exchange, message))
        else:
            about = exchange.message.id if isinstance(exchange.message, Request) else None
            if stream in self._abandoned_streams and not _is_progress(message, about):
                # Move it behind the others.
                self._abandoned_streams[stream] = scope = self._abandoned_streams.pop(stream)
                scope.deadline = min(trio.current_time() + _ABANDONED_SILENT, stream.until)
            self.message_size = weight(event.data, self._limits.values, message)
            self._caller.receive(message, trio.current_time(), about=about)

    def _skip_oversized(self, stream: _ResumedStream, event: Oversized) -> None:
        why = f"an event was longer than {event.limit} bytes (Limits.message_bytes)"
        if stream.exchange.message is None:
            self._caller.handle_events([PeerMistake(f"{why}; skipped")])
        else:  # It is probably the answer; otherwise the caller might wait forever.
            stream.done = True
            self._handle_verdict(stream.exchange.message, ReplyLost(why))


def _is_keep_alive(commented: bool, events: Sequence[SseEvent | Oversized]) -> bool:
    """Return whether the data with these events contains keep-alives only."""
    return (commented or bool(events)) and all(
        isinstance(each, SseEvent) and each.id is None and (not each.data or each.event not in ("message", "endpoint"))
        for each in events
    )


def _is_progress(message: Message, id: Id | None) -> bool:
    """Return whether this is a progress notification for that request."""
    if not isinstance(message, Notification) or message.method != PROGRESS:
        return False
    return message.params.get("progressToken") in (id, str(id))


class SseLink(PostTransport):
    """A session over HTTP+SSE (2024-11-05), as a `Transport`: messages are sent by POST and received on one stream.

    Its session is one of `LinkKind.DUPLEX`: when the stream ends, all requests are lost, and they may have run.
    """

    _sse = True

    def __init__(
        self,
        caller: Caller,
        pool: HttpPool,
        url: str,
        *,
        nursery: trio.Nursery,
        headers: Callable[[], Fields],
        authorization: TokenSource | None = None,
    ) -> None:
        super().__init__(
            caller, pool, url, nursery=nursery, headers=headers, mirrors=lambda tool: (), authorization=authorization
        )
        self._target = None  # sse-14: nothing is sent before the server has sent the URL
        self._scope = trio.CancelScope()  # the scope of the stream
        self._abandoned: dict[Id, InFlight] = {}  # cancelled requests whose POST has no reply yet

    async def _send_once(
        self,
        exchange: Exchange,
        body: bytes,
        on_stream: OnStream | None,
        after: str,
        credentials: Credentials | None,
    ) -> tuple[int, ReplyVerdict]:
        if exchange.method != "GET":
            return await super()._send_once(exchange, body, on_stream, after, credentials)
        self._scope.deadline = trio.current_time() + ENDPOINT
        try:
            return await super()._send_once(exchange, body, on_stream, after, credentials)
        finally:
            self._scope.deadline = math.inf  # the user may need longer to allow access

    def send_request(self, id: Id) -> None:
        self.wake()  # the reply to a POST has no answer

    def _abandon(self, id: Id, flight: InFlight) -> None:
        if flight.sent:
            flight.scope.deadline = trio.current_time() + ACKNOWLEDGE_TIMEOUT
            self._abandoned[id] = flight
        else:
            super()._abandon(id, flight)

    async def _post(self, message: Message, flight: InFlight) -> None:
        # On another connection a cancellation could arrive before its request, and would have no effect.
        if (id := cancelled_id(message)) is not None and (request := self._abandoned.pop(id, None)) is not None:
            with self._running():
                while request.scope in self._scopes:
                    await self._changed.park()
        await super()._post(message, flight)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the session until its stream ends; it is started when the server has sent the URL for POSTs.

        Before that it raises `Unauthorized`, `NoResponse`, `RemoteProtocolError`, and the errors of the pool.
        """
        get = Exchange(self._url, LEGACY[0], method="GET", sse=True)
        verdict: ReplyVerdict | None = None
        cause: McpError | None = None
        with self._running() as scope:

            async def on_stream(exchange: Exchange, reply: HttpReply) -> None:
                await self._read_connection(exchange, reply, scope, task_status)

            try:
                self._scope = scope
                verdict = await self._send_exchange(get, on_stream)
            except McpError as error:
                if self._target is None:
                    raise
                cause = error
        if self._target is None:
            raise closed_here() if self._closed else _no_endpoint(verdict)
        how = "the server ended the event stream of the session"
        ended = SessionClosed(how if cause is None else f"the event stream of the session broke: {cause}")
        if self._session.terms is not None:
            ended = SessionLost(True, str(ended))  # a new session can be opened
        ended.__cause__ = cause
        self._close(repeated(ended))

    async def _read_connection(
        self, exchange: Exchange, reply: HttpReply, scope: trio.CancelScope, task_status: trio.TaskStatus[None]
    ) -> None:
        reader, keep_alives = EventReader(self._limits.message_bytes), KeepAlives()
        while data := await self._receive(reply, keep_alives.timeout):
            comments = reader.comments
            events = reader.feed(data)
            keep_alives.received(trio.current_time(), keep_alive=_is_keep_alive(reader.comments > comments, events))
            for event in events:
                if self._target is None:
                    target = read_endpoint(exchange.url, event)
                    if isinstance(target, ReplyLost):
                        raise RemoteProtocolError(target.why)
                    self._target = target
                    scope.deadline = math.inf
                    task_status.started()
                    self.wake()
                elif isinstance(event, Oversized):
                    # It is unknown whose answer it was, and its caller would wait forever.
                    why = f"an event was longer than {event.limit} bytes (Limits.message_bytes)"
                    raise RemoteProtocolError(why)
                elif event.event == "message" and event.data:
                    message = decode(event.data, self._limits)
                    self.message_size = weight(event.data, self._limits.values, message)
                    self._caller.receive(message, trio.current_time())
            await self._wait_for_room()


def _no_endpoint(verdict: ReplyVerdict | None) -> McpError:
    """Return why there is no session over HTTP+SSE."""
    if verdict is None:
        return RemoteProtocolError(f"no endpoint event came within {ENDPOINT:g} seconds")
    if isinstance(verdict, Streaming):
        return RemoteProtocolError("the event stream ended before its endpoint event")
    if isinstance(verdict, Challenged):
        return Unauthorized(f"the event stream was refused: {verdict.why}", verdict.status, verdict.challenge)
    status = verdict.status if isinstance(verdict, ReplyLost) else None
    return NoResponse(
        f"there is no event stream at this URL: {getattr(verdict, 'why', 'GET is not served')}", status=status
    )
