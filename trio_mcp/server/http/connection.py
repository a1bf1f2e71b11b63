"""One HTTP/1.1 connection: requests are read one after the other, and each is answered before the next is looked at.

One task has the connection, and goes on reading while a response is under way: only so is it noticed that the client
has gone, which in the modern era cancels what it asked for.  What comes meanwhile is the next request; 4 KiB of it are
kept, and the rest stays with the system until the response has ended.  Then reading tells
nothing any more, so the socket is asked each second whether its other end is closed.  Only Linux can tell, by
POLLRDHUP; elsewhere, and where what was sent fills the buffers of both systems, the next write tells.

A client that closes its half has gone as well.  It might be waiting for its answer (RFC 9112, 9.6, lets it), but a
client that has closed everything looks just the same until something is written, and a call may have nothing to write
for hours.  Closing is how a modern client cancels, and that is to be noticed at once (cancel-14).

The response is written by whichever task has something for it, through a `Response`.  A write is never cut short by a
cancellation, and it is given up when nothing of it gets on for `Limits.write_seconds`: then the client has gone, too.
The task that has the connection may itself be writing when everything is cancelled, and cannot know it before it has
done so: who serves many tells them by `hurry`.  What the system takes at once, which is nearly everything, waits for
nobody and needs nothing of this.

| What is waited for | How long | Then |
|---|---|---|
| the TLS handshake, and the first byte of a connection | `head_seconds` | closed |
| the rest of a head | `head_seconds` from its first byte | 408, closed |
| the rest of a body | `body_seconds`, and again after what `body_rate` makes of these | 408, closed |
| a response, by its client | for ever, as long as the client is there | |
| the end of a response, by a client that goes on sending | for ever, and beyond 4 KiB unread | |
| the next request | `idle_seconds` | closed |
| the client, to take what is written | `write_seconds`, and again after what `write_rate` makes of these | dropped |

After a refusal the client may still be sending.  What it would send up to 64 KiB is read and forgotten, and the
connection kept; else our half is closed, and the rest is read and forgotten for a moment, for a system that closes a
connection with unread bytes in it tells the client to throw away our answer.
"""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import trio

from trio_mcp.core.errors import INTERNAL_ERROR
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.http.verdicts import HttpRequest, Reply, refusal
from trio_mcp.core.http.wire import (
    CONTINUE,
    LAST_CHUNK,
    RequestHead,
    RequestReader,
    UnreadableRequest,
    chunk,
    date,
    head_bytes,
    refused,
)
from trio_mcp.core.jsonrpc import Error, Limits
from trio_mcp.core.pace import Pace
from trio_mcp.core.shares import LONG, Charge, holder_of
from trio_mcp.server.driver import socket_of
from trio_mcp.server.http.endpoint import log_refusal, over_limit
from trio_mcp.server.http.silence import IdleOrder
from trio_mcp.transport.outbox import CLOSING, GONE

if TYPE_CHECKING:
    from trio_mcp.server.http.endpoint import Endpoint
    from trio_mcp.transport.duplex import Tap

__all__ = ["HttpConnection", "ListenerState", "UpgradedConnection"]

_log = logging.getLogger("trio_mcp")
_refusals = logging.getLogger("trio_mcp.http")

_RECEIVE = 64 * 1024  # bytes that are read at once
# Bytes that count as progress.  A stream does not tell how much of a write it has got rid of, so a longer one is cut
# into pieces, and who takes 300 bytes a second is still a reader.
_PIECE = 16 * 1024
_COPIED = 64 * 1024  # bytes of a body that are copied, so as to go out in one write with what is before and after
_FORGOTTEN = 64 * 1024  # bytes of a body that are read for nothing, so as to keep the connection
_POLLRDHUP = getattr(select, "POLLRDHUP", 0)  # the other end is closed, whatever is still to be read
_LOOK = 1.0  # seconds after which it is looked for again
_LINGER = 2.0  # seconds for which the client may read our last words before the connection is closed


class UpgradedConnection(Protocol):
    """What goes on with a connection that leaves HTTP; `trailing` was read already."""

    async def __call__(
        self, stream: trio.abc.Stream, request: HttpRequest, trailing: bytes, peer: str | None
    ) -> None: ...


class ListenerState:
    """What all connections of one server have in common."""

    def __init__(
        self,
        endpoint: Endpoint,
        limits: Limits,
        *,
        tap: Tap | None = None,
        websocket_path: str | None = None,
        upgraded: UpgradedConnection | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.limits = limits
        self.tap = tap
        self.websocket_path = websocket_path
        self.upgraded = upgraded
        self.draining = False
        """Every response is the last of its connection, so that clients look for another server by themselves."""
        self.idle: IdleOrder[HttpConnection] = IdleOrder(limits.idle_seconds)
        """Those that wait for their first or next request.  One that has got it stays there until its time is up: to
        forget and to note it with each request would cost more than to look once."""
        self._date = ""
        self._dated = -math.inf

    async def run(self) -> None:
        """Close connections that have been idle for too long; until it is cancelled."""
        while True:
            (await self.idle.next()).expire()

    def date(self) -> str:
        """The time of day; a second old at most, which is all that it says."""
        now = time.monotonic()
        if now - self._dated >= 1:
            self._date, self._dated = date(*time.gmtime()[:7]), now
        return self._date


def _has_closed(socket: trio.socket.SocketType) -> bool:
    if socket.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(socket.fileno(), _POLLRDHUP)
    return bool(poll.poll(0))


class HttpConnection:
    """One connection.  `peer` is the client's address, where it has one."""

    def __init__(self, shared: ListenerState, stream: trio.abc.Stream, peer: str | None = None) -> None:
        self._shared = shared
        self._limits = shared.limits
        self._stream = stream
        self._socket = stream.socket if type(stream) is trio.SocketStream and os.name == "posix" else None
        self._peer = peer
        self._reader = RequestReader(shared.limits)
        self._kept = min(LONG, shared.limits.header_bytes)  # bytes of what comes behind a request at work
        # All reading is done in here.  Its deadline moves with what is waited for; when it is cancelled, nothing more
        # is read on this connection.
        self._scope = trio.CancelScope()
        self._ending = False  # it was cancelled on purpose, and not by its deadline
        self._late = ""  # what a client is told when the deadline passes, if anything
        self._busy = False  # a request is being read or answered
        self._last = False  # the connection is not kept
        self._unread = False  # the client may be sending what we will not look at
        # Of the request at hand.
        self._chunks = False
        self._bodiless = False
        self._cors: Fields = ()  # so that a page may read why it is refused
        self._waiting: HttpRequest | None = None  # while its body is waited for
        self._response: _H1Response | None = None
        self._gone: Callable[[], None] | None = None
        self._attending = False
        self._nap: trio.CancelScope | None = None
        self._pace = Pace(shared.limits.write_seconds, shared.limits.write_rate)  # of the client, as a reader
        # Of the write at hand.
        self._writing: trio.CancelScope | None = None
        self._written: trio.Event | None = None  # where its end is waited for
        self._deadline = math.inf  # of all writes, once everything ends
        self._over = False  # nothing more can be written
        self._failure: Exception | None = None  # what `tap` or the stream raised

    async def serve(self, turned_away: Reply | None = None) -> None:
        """Serve the client until it, or we, have had enough; the stream is closed then.

        Never raises because of the client.  `turned_away` is said to one that finds no place here.
        """
        try:
            with self._scope:
                if turned_away is not None:
                    self.hurry()
                    await self._refuse(turned_away)
                else:
                    await self._begin()
                    await self._converse()
            begun = self._response is not None and self._response.begun  # one request has one response
            if self._scope.cancelled_caught and not self._ending and self._late and not begun:
                await self._refuse(refused(408, self._late))
            if (self._unread or self._reader.waiting) and not self._over:
                await self._linger()
        except GONE:
            pass
        finally:
            await self._end()
        if self._failure is not None:
            raise self._failure

    @property
    def busy(self) -> bool:
        """Whether a request is being read or answered."""
        return self._busy

    def drain(self) -> None:
        """Take no further request: what is under way is finished."""
        self._last = True
        if not self._busy:
            self._hang_up()

    def expire(self) -> None:
        """It has been idle for as long as it may be, unless it is not idle now."""
        self._shared.idle.forget(self)
        if not self._busy:
            self._hang_up()

    def hurry(self) -> None:
        """Everything ends: what is being written, and whatever follows it, must have gone in a moment."""
        self._deadline = min(self._deadline, trio.current_time() + CLOSING)
        if self._writing is not None:
            self._writing.deadline = min(self._writing.deadline, self._deadline)

    # Reading.

    async def _begin(self) -> None:
        self._shared.idle.touch(self)
        self._scope.deadline = trio.current_time() + self._limits.head_seconds
        if isinstance(self._stream, trio.SSLStream):
            try:
                await self._stream.do_handshake()
            except trio.BrokenResourceError as error:
                why = getattr(error.__cause__, "reason", None) or error.__cause__ or error
                _refusals.info("%s: the TLS handshake has failed: %s", self._peer or "a connection", why)
                raise

    async def _converse(self) -> None:
        """One request and its response after the other."""
        try:
            while (head := self._reader.head() or await self._head()) is not None:
                self._look_at(head)
                if head.method == "GET" and self._switches(head):
                    assert self._shared.upgraded is not None
                    request = HttpRequest(head.method, head.target, head.headers)
                    await self._shared.upgraded(self._stream, request, self._reader.rest(), self._peer)
                    self._over = True
                    return
                self._gone, self._response = None, _H1Response(self)
                response = self._response
                self._gone = await self._answer(head, response)
                del head  # a stream may last for hours
                await self._attend(response)
                del response
                if self._last or self._over:
                    return
                if self._busy:  # else the end of the response has told it already
                    self._rest()
        except UnreadableRequest as fault:
            await self._refuse(fault.reply)

    def _rest(self) -> None:
        """The next request is waited for."""
        self._busy, self._late = False, ""
        self._response = self._gone = None  # a connection that idles keeps nothing of its last request
        self._bodiless, self._chunks, self._cors = False, True, ()  # until it is known better: a head may be refused
        self._shared.idle.touch(self)

    async def _head(self) -> RequestHead | None:
        """The head of the next request, which is not there yet."""
        reader, charge = self._reader, None
        try:
            while True:
                if reader.waiting and not self._busy:
                    self._busy = True
                    limit = self._limits.head_seconds
                    self._late = f"the head of the request was not there after {limit:g} seconds (Limits.head_seconds)"
                    self._scope.deadline = trio.current_time() + limit
                data = await self._receive(_RECEIVE)
                if not data:
                    self._over = True
                    return None
                reader.feed(data)
                if (head := reader.head()) is not None:
                    return head
                if reader.waiting > LONG:
                    charge = charge or Charge(self._shared.endpoint.account(holder_of(None, self._peer)))
                    if (beyond := charge.set(reader.waiting)) is not None:
                        raise UnreadableRequest(over_limit(beyond))
        finally:
            if charge is not None:
                charge.set(0)

    def _look_at(self, head: RequestHead) -> None:
        self._busy = True
        if self._scope.deadline != math.inf:
            self._scope.deadline = math.inf
        self._chunks = head.chunks
        self._bodiless = head.method == "HEAD"
        if not head.keep:
            self._last = True

    def _switches(self, head: RequestHead) -> bool:
        """Whether this GET is for who speaks another protocol.  HTTP/1.0 has no upgrade (RFC 9110, 7.8)."""
        path = self._shared.websocket_path
        if path is None or not head.chunks or head.has_body:
            return False
        wanted = head.headers.get("Upgrade", "").lower().split(",")
        return "websocket" in map(str.strip, wanted) and head.path.rstrip("/") == path

    async def _answer(self, head: RequestHead, response: _H1Response) -> Callable[[], None] | None:
        """Have the request answered; gives what is to be called if the client goes before it was."""
        endpoint = self._shared.endpoint
        request = HttpRequest(head.method, head.target, head.headers)
        try:
            admitted = await endpoint.admit(request, self._peer)
            if isinstance(admitted, Reply):
                await self._turn_down(head, response, admitted)
                return None
            self._cors = admitted.head.cors
            if head.has_body:
                self._waiting = request
                body = await self._body(head, admitted.holder)
                self._waiting = None
                if body is None:
                    return None
                request = HttpRequest(head.method, head.target, head.headers, body)
            return await endpoint.serve(admitted, request, response)
        except (UnreadableRequest, *GONE):
            raise
        except Exception:  # noqa: BLE001  # what `authenticate` raises, for one
            # What goes wrong for one client must not end the server for all.
            _log.exception("a request failed in the server itself, and not in a handler")
            if response.begun:
                self._break()
                return None
            self._unread = True
            raise UnreadableRequest(refusal(500, Error(None, INTERNAL_ERROR, "internal error"))) from None

    async def _body(self, head: RequestHead, holder: str | None) -> bytes | None:
        """The body, or None where the client has gone before it was there; it is charged to `holder` until it is."""
        reader, limits = self._reader, self._limits
        body = reader.body()
        if body is not None:
            return body
        if head.expects and not reader.came:
            await self.write(CONTINUE)
        pace = Pace(limits.body_seconds, limits.body_rate)
        pace.begin(trio.current_time())
        held = 0
        self._late = (
            f"the body did not come in time: within {limits.body_seconds:g} seconds it has to be whole, or to go on at "
            f"{limits.body_rate:g} bytes a second (Limits.body_seconds, Limits.body_rate)"
        )
        with Charge(self._shared.endpoint.account(holder)) as charge:
            while body is None:
                if (limit := charge.set(reader.held)) is not None:
                    raise UnreadableRequest(over_limit(limit))
                if reader.held > held:  # the heads of chunks are no progress
                    pace.move(reader.held - held, trio.current_time())
                    held = reader.held
                self._scope.deadline = pace.deadline
                if reader.lags:
                    await trio.lowlevel.checkpoint()
                elif data := await self._receive(_RECEIVE):
                    reader.feed(data)
                else:
                    self._over = True
                    return None
                body = reader.body()
        self._scope.deadline = math.inf
        return body

    async def _turn_down(self, head: RequestHead, response: _H1Response, reply: Reply) -> None:
        """Send a reply to a request whose body was not asked for, and be done with that body."""
        reader = self._reader
        try:
            wanting = head.has_body and reader.body() is None
        except UnreadableRequest:
            wanting = self._unread = True
        # Who waits for 100 may send its body or another request now, and nobody can tell which.
        if wanting and (head.expects or head.length is None or head.length - reader.came > _FORGOTTEN):
            self._unread = True
        self._last = self._last or self._unread
        await response.begin(reply.status, reply.headers, reply.body, more=False)
        if wanting and not self._unread:
            await self._body(head, holder_of(None, self._peer))

    async def _attend(self, response: _H1Response) -> None:
        """Read on while the response is under way.  Always a checkpoint, be it in waiting for the next request."""
        reader = self._reader
        if response.over and reader.waiting:  # several requests that came together are not to hold up all others
            await trio.lowlevel.checkpoint()
        self._attending = True
        try:
            while not response.over and not self._over:
                if not reader.waiting:
                    # The end of the response does not wake us: what comes then is the next request.
                    data = await self._receive(self._kept)
                else:
                    with trio.CancelScope() as self._nap:
                        data = await self._receive_or_wait(self._kept - reader.waiting, response)
                    if self._nap.cancelled_caught:
                        continue
                if not data:
                    self._over = True
                reader.feed(data)
        finally:
            self._attending, self._nap = False, None

    async def _receive_or_wait(self, most: int, response: _H1Response) -> bytes:
        """At most so much; where that is nothing, wait for the end of the response, or of the client."""
        if most > 0:
            return await self._receive(most)
        inner = socket_of(self._stream)
        if inner is None or not _POLLRDHUP:
            await trio.sleep_forever()
        while True:
            await trio.sleep(_LOOK)
            # The client may have all of its answer, before we know it, and have closed in good order.
            if not response.ending and _has_closed(inner.socket):
                return b""

    async def _receive(self, most: int) -> bytes:
        """As `receive_some`, or nothing where that fails: either way no more will come."""
        socket = self._socket
        try:
            while socket is not None and socket.fileno() >= 0:
                await trio.lowlevel.wait_readable(socket)  # at first, for there is mostly nothing yet
                try:
                    data = os.read(socket.fileno(), most)
                except BlockingIOError:
                    continue
                except OSError:  # it may also be out of reach
                    return b""
                break
            else:
                data = bytes(await self._stream.receive_some(most))
            if data and self._shared.tap is not None:
                self._shared.tap("in", data)
        except GONE:
            return b""
        except Exception as error:  # noqa: BLE001  # raised by `serve`: it is nothing that the endpoint could handle
            self._failure = error
            return b""
        return data

    # Writing.

    async def _refuse(self, reply: Reply) -> None:
        """Say why this is the end."""
        log_refusal(reply, self._waiting, self._peer)
        self._last = self._unread = True
        await _H1Response(self).begin(reply.status, (*self._cors, *reply.headers), reply.body, more=False)

    async def write(self, data: bytes, *more: bytes) -> None:
        """Send; raises BrokenResourceError where that is not possible any more, and nothing else cuts it short."""
        if self._over:
            raise trio.BrokenResourceError("the client has gone")
        try:
            if self._shared.tap is not None:
                self._shared.tap("out", b"".join((data, *more)))
            taken = self._write_at_once(data)
            if taken == len(data) and not more:
                return
            self._pace.begin(trio.current_time())
            with trio.CancelScope(shield=True, deadline=self._patience()) as self._writing:
                await self._write_in_pieces(
                    (memoryview(data)[taken:], *[memoryview(each) for each in more]), self._writing
                )
                self._pace.end(trio.current_time())
                return
        except GONE as error:
            self._break()
            raise trio.BrokenResourceError("the client has gone") from error
        except Exception as error:
            self._failure = error  # raised by `serve`: it is no fault of the handler that writes here
            self._break()
            raise trio.BrokenResourceError("the connection has failed") from error
        finally:
            self._writing = None
            if self._written is not None:
                self._written.set()
        self._break()
        raise trio.BrokenResourceError("the client reads too slowly (Limits.write_seconds, Limits.write_rate)")

    def _write_at_once(self, data: bytes) -> int:
        """How many bytes of it the system has taken without anybody having to wait."""
        if self._socket is None:
            return 0
        try:
            return os.write(self._socket.fileno(), data)
        except OSError:  # there is no room, or no client: `send_all` waits for the one, and knows how to tell the other
            return 0

    async def _write_in_pieces(self, pieces: Iterable[memoryview], scope: trio.CancelScope) -> None:
        for data in pieces:
            for start in range(0, len(data), _PIECE):
                scope.deadline = self._patience()
                piece = data[start : start + _PIECE]
                await self._stream.send_all(piece)
                self._pace.move(len(piece), trio.current_time())

    def _patience(self) -> float:
        return min(self._pace.deadline, self._deadline)

    def answered(self) -> None:
        """The response at hand is whole."""
        if not self._attending:
            return  # we shall see
        if self._last:
            self._hang_up()
        else:
            self._rest()
            if self._nap is not None:
                self._nap.cancel()

    def _break(self) -> None:
        """Nothing more can be written, so nothing need be read either."""
        self._over = True
        if self._attending:
            self._hang_up()

    def _hang_up(self) -> None:
        self._ending = True
        self._scope.cancel(reason="the connection is to be closed")

    # The end.

    async def _linger(self) -> None:
        """Let the client read what was said last."""
        rest = self._limits.message_bytes
        with trio.move_on_after(_LINGER):
            if isinstance(self._stream, trio.abc.HalfCloseableStream):
                await self._stream.send_eof()
            while rest > 0 and (data := await self._receive(_RECEIVE)):
                rest -= len(data)

    async def _end(self) -> None:
        self._over = True
        self._shared.idle.forget(self)
        if self._gone is not None and self._response is not None and not self._response.over:
            self._gone()
        self._response = self._gone = None  # or each would keep the other
        # What is being written is for somebody who may still read it, for a moment; then the stream is closed under it.
        self.hurry()
        if self._writing is not None:
            self._written = trio.Event()
            with trio.CancelScope(shield=True, deadline=self._deadline):
                await self._written.wait()
        # Streams do close when they are cancelled at it, only less politely.
        with suppress(*GONE), trio.CancelScope(shield=True, deadline=self._deadline):
            await self._stream.aclose()


class _H1Response:
    """The response to the request at hand, as `lanes` wants it."""

    __slots__ = ("_bodiless", "_chunked", "_connection", "begun", "ending", "over")

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._chunked = False
        self._bodiless = connection._bodiless
        self.begun = False
        self.ending = False  # the last of it is on its way, or has been sent
        self.over = False

    async def begin(self, status: int, fields: Fields, body: bytes, *, more: bool) -> None:
        self.begun = True
        head = self._head(status, fields, None if more else len(body))
        await self._write(head, body, more)

    async def send(self, data: bytes, *, more: bool) -> None:
        await self._write(b"", data, more)

    def drop(self) -> None:
        self.over = True
        self._connection._break()

    def _head(self, status: int, fields: Fields, length: int | None) -> bytes:
        connection = self._connection
        framing = []
        if status in (204, 304):
            self._bodiless = True
        elif "content-length" in [name.lower() for name, _ in fields]:
            pass
        elif length is not None:
            framing.append(f"Content-Length: {length}")
        elif connection._chunks:
            framing.append("Transfer-Encoding: chunked")
            self._chunked = True
        else:
            connection._last = True  # the end of the connection is the end of the body
        if connection._shared.draining:
            connection._last = True
        if connection._last:
            framing.append("Connection: close")
        elif not connection._chunks:
            framing.append("Connection: keep-alive")
        return head_bytes(status, fields, connection._shared.date(), *framing)

    async def _write(self, head: bytes, data: bytes, more: bool) -> None:
        if self.over:
            raise trio.BrokenResourceError("this response has ended")
        after = b""
        if self._bodiless:
            data = b""
        elif len(data) > _COPIED:
            if self._chunked:
                head, after = head + b"%x\r\n" % len(data), b"\r\n" if more else b"\r\n" + LAST_CHUNK
        elif self._chunked:
            data = chunk(data, last=not more)
        self.ending = not more
        try:
            if len(data) > _COPIED:
                await self._connection.write(head, data, after)
            elif head or data:
                await self._connection.write(head + data)
        except BaseException:
            self.over = True
            raise
        if not more:
            self.over = True
            self._connection.answered()
