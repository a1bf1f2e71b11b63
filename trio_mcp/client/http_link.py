"""A session with a server by HTTP, in all its kinds: how what the server says is heard.

Streamable HTTP answers each POST by itself, with a body or with a stream of its own.  What is on the stream is heard as
it comes, and nothing more is read once the answer has come.  A stream of the legacy era that breaks before is taken up
again as `StreamResumption` says; in the modern era that is the end of its request, and closing it, by us, is its
cancellation.  What belongs to no request comes by one more stream, in the legacy era alone.

HTTP+SSE, the transport of 2024-11-05, has one stream for all, and nothing comes back by a POST but whether it was
taken.

A stream that has sent keep-alives, and is then silent for three of their intervals, is broken.

When a call of the legacy era is cancelled, its stream is read on for a while: a gateway may have nothing else to send
by what belongs to other requests, or to none.

How messages are sent is the same for both, and stands in `http_posts`.
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
    ACKNOWLEDGED,
    InFlight,
    Listen,
    NeedsSse,
    NoResponse,
    PostTransport,
    Unauthorized,
    closed_here,
    drain,
    name_of,
)
from trio_mcp.core.errors import McpError, RemoteProtocolError, SessionClosed, repeated
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
from trio_mcp.core.jsonrpc import PROGRESS, Error, Id, Message, Notification, Request, decode
from trio_mcp.core.oauth.errors import AuthorizationFailed
from trio_mcp.core.outcomes import PeerMistake
from trio_mcp.core.revisions import LEGACY
from trio_mcp.core.shares import weight
from trio_mcp.transport.http_pool import ConnectionFailed, HttpPool, HttpReply, ReplyBroken

if TYPE_CHECKING:
    from trio_mcp.oauth.client import Credentials, TokenSource

__all__ = ["ENDPOINT", "HttpLink", "NeedsSse", "NoResponse", "SseLink", "Unauthorized"]

ENDPOINT = 10.0
"""Seconds in which an HTTP+SSE stream has to begin: what is none may be a stream that never says a word."""

_GOODBYE = 2.0  # seconds for the DELETE of a session

# Streams of cancelled calls that are read on at once, and seconds for each: since something came that was not about the
# call, and in all.  Each is a connection, which the server may keep open because it answers no cancelled call.
_LEFT = 8
_LEFT_SILENT, _LEFT_IN_ALL = 300.0, 3600.0


@attrs.define(eq=False, repr=False)
class _ResumedStream:
    """An event stream over all its connections."""

    exchange: Exchange  # the POST that it answers; the GET, if it is for what belongs to no request
    resumption: StreamResumption
    flight: InFlight | None = None  # of the request that it answers
    begun: trio.Event = attrs.field(factory=trio.Event)  # it has been asked for, however that went
    opened: bool = False
    tried: int = 0  # connections by GET
    held: float = 0  # seconds, of the last connection
    settled: bool = False  # what was asked for has come
    reader: EventReader = attrs.field(init=False)  # of the last connection
    keep_alives: KeepAlives = attrs.field(factory=KeepAlives)  # likewise
    until: float = 0  # when it is not read on any more, once nobody waits for the answer
    broken: McpError | None = None  # how its last connection ended, unless in good order


class HttpLink(PostTransport):
    """A session by Streamable HTTP, in both eras, as a `Carrier`.

    Tasks run in `nursery`, which must outlast the session.  `headers` gives the caller's own headers for each request,
    `mirrors` what goes into headers of the arguments of a tool.
    """

    async def stand(self, standing: trio.Event | None = None) -> None:
        """Hear what the server says outside of requests, until it has no stream for that, or the session ends.

        For a legacy session that has opened; in the modern era there is none, and this returns at once.  `standing` is
        set as soon as something can be heard, or cannot be at once.
        """
        if standing is None:
            standing = trio.Event()
        try:
            with self._running():
                if self._revision.handshake:
                    await self._ready.wait()
                    await self._stand(standing)
        finally:
            standing.set()

    async def _stand(self, standing: trio.Event) -> None:
        resumption = StreamResumption(self._revision, standalone=True)
        stream = _ResumedStream(self._exchange(None, "GET"), resumption, begun=standing)
        try:
            verdict = await self._follow(stream, Reconnect(0, ""))
        except McpError as error:
            verdict = ReplyLost(str(error))
        if isinstance(verdict, SessionGone):
            if stream.opened:
                self._forgotten(None)
                return
            # A 404 to the first GET may be that of a server which has no such thing; any POST will tell.
            with suppress(McpError):
                await self._caller.request("ping")
            if self._gone:
                return
        elif not isinstance(verdict, NoStream):
            why = getattr(verdict, "why", "")
            self._caller.handle_events(
                [PeerMistake(f"what the server says outside of requests is not heard any more: {why}")]
            )
        self._caller.missed(for_good=True)

    async def aclose(self) -> None:
        """End everything in flight, and tell the server that the session is over (http-59).

        Never raises because of the server, and takes two seconds at most.
        """
        self._lose(closed_here)
        if self._id is not None:
            goodbye, self._id = self._exchange(None, "DELETE"), None
            deadline = trio.current_time() + _GOODBYE
            with trio.CancelScope(shield=True, deadline=deadline), suppress(McpError):
                await self._ask(goodbye)
        await trio.lowlevel.checkpoint()

    async def _answer(self, exchange: Exchange, flight: InFlight) -> ReplyVerdict | None:
        stream: _ResumedStream | None = None

        async def listen(exchange: Exchange, reply: HttpReply) -> None:
            nonlocal stream
            stream = _ResumedStream(exchange, StreamResumption(exchange.revision), flight)
            flight.streams = True
            self._news.unpark_all()
            await self._listen(stream, reply)

        verdict = await self._ask(exchange, listen)
        if stream is None:
            return verdict
        if not stream.settled:
            verdict = await self._follow(stream, stream.resumption.ended(stream.held))
        if stream.settled:
            return None
        if isinstance(verdict, SessionGone):
            self._forgotten(None)  # and not with this id, for it may have run
            return None
        if isinstance(verdict, ReplyLost) and stream.broken is not None:
            raise NoResponse(f"{name_of(exchange.message)} has no answer: {verdict.why}") from stream.broken
        return verdict

    async def _follow(self, stream: _ResumedStream, plan: Reconnect | ReplyLost) -> ReplyVerdict:
        """Take the stream up again, until what was asked for has come, or it is over."""

        async def listen(exchange: Exchange, reply: HttpReply) -> None:
            scope.deadline = math.inf
            if stream.tried > 1 and not stream.resumption.last_event_id:
                self._caller.missed(for_good=False)  # nothing was kept for us since the last one
            await self._listen(stream, reply)

        while isinstance(plan, Reconnect):
            await trio.sleep(plan.seconds)
            stream.tried += 1
            get = self._exchange(None, "GET", stream.exchange.url)
            try:
                with trio.CancelScope() as scope:
                    if stream.keep_alives.patience < math.inf:
                        # Other servers may send the head of a stream not before its first event.
                        scope.deadline = trio.current_time() + max(stream.keep_alives.patience, ACKNOWLEDGED)
                    verdict = await self._ask(get, listen, after=plan.last_event_id)
                if scope.cancelled_caught:
                    raise ReplyBroken("the server does not answer, which sent keep-alives before", sent=True)
            except (ConnectionFailed, ReplyBroken, AuthorizationFailed) as error:
                if isinstance(error, AuthorizationFailed) and not error.passes:
                    raise
                stream.broken = error
                plan = stream.resumption.ended()
                continue
            finally:
                stream.begun.set()
            if stream.settled or isinstance(verdict, SessionGone | Challenged):
                return verdict
            if isinstance(verdict, Streaming):
                plan = stream.resumption.ended(stream.held)
            elif isinstance(verdict, NoStream) and stream.exchange.message is None:
                return verdict
            else:
                plan = stream.resumption.refused(verdict)
        return plan

    async def _listen(self, stream: _ResumedStream, reply: HttpReply) -> None:
        """Read one connection of the stream, to its end or to the answer."""
        stream.reader, stream.keep_alives = EventReader(self._limits.message_bytes), KeepAlives()
        stream.opened, stream.broken = True, None
        stream.begun.set()
        start = trio.current_time()
        try:
            await self._read(stream, reply)
            if stream.settled and not reply.done and not self._over:  # nobody is to wait for its end
                self._nursery.start_soon(self._finish, reply.leave(), name="the end of a stream")
        except ReplyBroken as error:
            stream.broken = error
        except trio.Cancelled:
            given_up = stream.flight is not None and not stream.flight.answered
            if given_up and self._session.opened and self._revision.handshake and not self._over:
                self._nursery.start_soon(self._read_on, stream, reply.leave(), name="the stream of a cancelled call")
            raise
        stream.held = trio.current_time() - start

    async def _read(self, stream: _ResumedStream, reply: HttpReply) -> None:
        reader, keep_alives = stream.reader, stream.keep_alives
        while not stream.settled and (data := await self._receive(reply, keep_alives.patience)):
            comments = reader.comments
            events = reader.feed(data)
            stream.resumption.heard(reader, events)
            keep_alives.heard(trio.current_time(), keep_alive=_is_keep_alive(reader.comments > comments, events))
            for event in events:
                if not stream.settled:
                    self._take(stream, event)
            await self._has_room()

    async def _read_on(self, stream: _ResumedStream, block: AbstractAsyncContextManager[HttpReply]) -> None:
        """Hear what else is said on the stream of a request that nobody waits for any more."""
        start = trio.current_time()
        stream.until = start + _LEFT_IN_ALL
        with self._running(start + _LEFT_SILENT) as scope:
            async with block as reply:
                if len(self._left) == _LEFT:
                    self._left.pop(next(iter(self._left))).cancel(reason="too many streams of cancelled calls")
                self._left[stream] = scope
                try:
                    with suppress(ReplyBroken):
                        await self._read(stream, reply)
                        await drain(reply)
                finally:
                    self._left.pop(stream, None)

    async def _finish(self, block: AbstractAsyncContextManager[HttpReply]) -> None:
        with self._running():
            async with block as reply:
                await drain(reply)

    def _take(self, stream: _ResumedStream, event: SseEvent | Oversized) -> None:
        exchange = stream.exchange
        if isinstance(event, Oversized):
            self._skip(stream, event)
            return
        if event.event != "message" or not event.data:
            return  # http-46: a place to resume from, and no message
        message = decode(event.data, self._limits)
        # An error without an id can mean nothing else than the request whose stream this is.
        if exchange.asked and (exchange.answered_by(message) or (isinstance(message, Error) and message.id is None)):
            stream.settled = True
            self._settle(exchange.message, read_answer(exchange, message))
        else:
            about = exchange.message.id if isinstance(exchange.message, Request) else None
            if stream in self._left and not _is_progress(message, about):
                self._left[stream] = scope = self._left.pop(stream)  # behind the others
                scope.deadline = min(trio.current_time() + _LEFT_SILENT, stream.until)
            self.message_size = weight(event.data, self._limits.values, message)
            self._caller.receive(message, trio.current_time(), about=about)

    def _skip(self, stream: _ResumedStream, event: Oversized) -> None:
        why = f"an event was longer than {event.limit} bytes (Limits.message_bytes)"
        if stream.exchange.message is None:
            self._caller.handle_events([PeerMistake(f"{why}; skipped")])
        else:  # It is the answer, most likely, and who waited for another might wait for ever.
            stream.settled = True
            self._settle(stream.exchange.message, ReplyLost(why))


def _is_keep_alive(commented: bool, events: Sequence[SseEvent | Oversized]) -> bool:
    """Whether what came with these events says that the server is there, and nothing else."""
    return (commented or bool(events)) and all(
        isinstance(each, SseEvent) and each.id is None and (not each.data or each.event not in ("message", "endpoint"))
        for each in events
    )


def _is_progress(message: Message, id: Id | None) -> bool:
    """Whether this is nothing but progress of that request of ours."""
    if not isinstance(message, Notification) or message.method != PROGRESS:
        return False
    return message.params.get("progressToken") in (id, str(id))


class SseLink(PostTransport):
    """A session by HTTP+SSE (2024-11-05), as a `Carrier`: what is sent is posted, what is heard comes by one stream.

    The session is one of `Link.DUPLEX`: with the stream everything is lost, and what was asked may have run.
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
        self._target = None  # sse-14: nothing is sent before the server has said where to
        self._scope = trio.CancelScope()  # of the stream

    async def _once(
        self, exchange: Exchange, body: bytes, listen: Listen | None, after: str, credentials: Credentials | None
    ) -> tuple[int, ReplyVerdict]:
        if exchange.method != "GET":
            return await super()._once(exchange, body, listen, after, credentials)
        self._scope.deadline = trio.current_time() + ENDPOINT
        try:
            return await super()._once(exchange, body, listen, after, credentials)
        finally:
            self._scope.deadline = math.inf  # a user who is asked for access may take longer

    def send_request(self, id: Id) -> None:
        self.wake()  # what is posted brings no answer

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry the session until its stream ends; started once the server has said where to post.

        Raises what went wrong before that: `Unauthorized`, `NoResponse`, `RemoteProtocolError`, and as the pool does.
        """
        get = Exchange(self._url, LEGACY[0], method="GET", sse=True)
        verdict: ReplyVerdict | None = None
        cause: McpError | None = None
        with self._running() as scope:

            async def listen(exchange: Exchange, reply: HttpReply) -> None:
                await self._listen(exchange, reply, scope, task_status)

            try:
                self._scope = scope
                verdict = await self._ask(get, listen)
            except McpError as error:
                if self._target is None:
                    raise
                cause = error
        if self._target is None:
            raise closed_here() if self._over else _no_endpoint(verdict)
        how = "the server has ended the event stream of the session"
        ended = SessionClosed(how if cause is None else f"the event stream of the session has broken: {cause}")
        if self._session.terms is not None:
            ended = SessionLost(True, str(ended))  # but another may be had
        ended.__cause__ = cause
        self._lose(repeated(ended))

    async def _listen(
        self, exchange: Exchange, reply: HttpReply, scope: trio.CancelScope, task_status: trio.TaskStatus[None]
    ) -> None:
        reader, keep_alives = EventReader(self._limits.message_bytes), KeepAlives()
        while data := await self._receive(reply, keep_alives.patience):
            comments = reader.comments
            events = reader.feed(data)
            keep_alives.heard(trio.current_time(), keep_alive=_is_keep_alive(reader.comments > comments, events))
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
                    # Whose answer it was cannot be told, and who waited for it would wait for ever.
                    why = f"an event was longer than {event.limit} bytes (Limits.message_bytes)"
                    raise RemoteProtocolError(why)
                elif event.event == "message" and event.data:
                    message = decode(event.data, self._limits)
                    self.message_size = weight(event.data, self._limits.values, message)
                    self._caller.receive(message, trio.current_time())
            await self._has_room()


def _no_endpoint(verdict: ReplyVerdict | None) -> McpError:
    """Why there is no session by HTTP+SSE."""
    if verdict is None:
        return RemoteProtocolError(f"no endpoint event came within {ENDPOINT:g} seconds")
    if isinstance(verdict, Streaming):
        return RemoteProtocolError("the event stream has ended before its endpoint event")
    if isinstance(verdict, Challenged):
        return Unauthorized(f"the event stream was refused: {verdict.why}", verdict.status, verdict.challenge)
    status = verdict.status if isinstance(verdict, ReplyLost) else None
    return NoResponse(f"there is no event stream here: {getattr(verdict, 'why', 'GET is not served')}", status=status)
