"""One HTTP/1.1 connection: reads requests one after another, and answers each before it parses the next.

Reading.  One task owns the connection, and continues to read during a response, because only a read shows that the
client has disconnected; that cancels a modern request.  The bytes that come during a response belong to the next
request.  4 KiB of them are buffered, and the rest stays in the system's socket buffer until the response has ended.
While that buffer is full, a read shows no disconnect, so the socket is polled each second with POLLRDHUP, which only
Linux has.  On other systems, and if the socket buffers of both sides are full, the next write shows the disconnect.

A client that closes its sending half counts as disconnected.  RFC 9112, 9.6, lets it wait for its answer, but a
client that has closed both halves looks the same until the next write, and a call may have nothing to write for hours.
Modern clients cancel by closing, and the server must notice that at once (cancel-14).

Writing.  The task that has a part of the response writes it, through an `HttpResponse`.  A cancellation never
interrupts a write.  A write fails if it makes no progress for `Limits.write_seconds`; then the client counts as
disconnected.  When the whole server is cancelled, a task that writes cannot notice it before its write has ended, so
the owner of the connections calls `hurry` on each.  Nearly all writes fit into the socket buffer and need none of this.

| Waiting for | Time limit | Then |
|---|---|---|
| the TLS handshake, and the first byte of a connection | `head_seconds` | closed |
| the rest of a head | `head_seconds` from its first byte | 408, closed |
| the rest of a body | `body_seconds`, extended by received bytes at `body_rate` | 408, closed |
| the response, while its client is connected | none | |
| the end of a response, while its client sends more | none; more than 4 KiB stay unread | |
| the next request | `idle_seconds` | closed |
| the client to read written bytes | `write_seconds`, extended by written bytes at `write_rate` | dropped |

After a refusal the client may still be sending the body.  If at most 64 KiB are to come, they are read and discarded,
and the connection stays open.  Otherwise the sending half is closed, and the rest is read and discarded for 2 seconds:
a system that closes a socket with unread bytes resets the connection, and the client would lose the refusal.
"""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import trio

from trio_mcp.core.errors import INTERNAL_ERROR
from trio_mcp.core.http.fields import Fields, HttpRequest, Reply, listed, refusal
from trio_mcp.core.http.h1 import (
    CONTINUE,
    LAST_CHUNK,
    KnownHeads,
    RequestHead,
    RequestReader,
    UnreadableRequest,
    chunk,
    date,
    head_bytes,
    refused,
)
from trio_mcp.core.messages import Error, Limits
from trio_mcp.core.shares import LONG, Charge, Pace, holder_of
from trio_mcp.server.http.endpoint import log_refusal, over_limit
from trio_mcp.server.http.responses import IdleOrder
from trio_mcp.server.session import socket_of
from trio_mcp.transport.wire import CLOSING, GONE

if TYPE_CHECKING:
    from trio_mcp.server.http.endpoint import Endpoint
    from trio_mcp.transport.wire import Tap

__all__ = ["HttpConnection", "ListenerState", "UpgradedConnection", "has_input"]

_log = logging.getLogger("trio_mcp")
_refusals = logging.getLogger("trio_mcp.http")

_RECEIVE = 64 * 1024  # bytes per read
_RECEIVE_LONG = 256 * 1024  # bytes per read of a long body; a buffer of this size costs more than a short message
# Bytes that count as progress on a stream that is no socket.  It does not report how much of a write is done, so longer
# writes are cut into pieces of this size, and a client that reads 300 bytes a second is still accepted.
_PIECE = 16 * 1024
_COPIED = 64 * 1024  # a body up to this size is copied, to go out in one write together with its head and framing
_DISCARDED = 64 * 1024  # bytes of a refused body that are read and discarded to keep the connection open
_POLLRDHUP = getattr(select, "POLLRDHUP", 0)  # the other end is closed, even if unread bytes are left
_POLL_INTERVAL = 1.0  # seconds between two polls for that
_LINGER = 2.0  # seconds for the client to read the last response before the connection is closed


UpgradedConnection: TypeAlias = Callable[[trio.abc.Stream, HttpRequest, bytes, str | None], Awaitable[None]]
"""Serves a connection after its upgrade from HTTP.  The bytes are those that were read after the request."""


class ListenerState:
    """The state that all connections of one server share."""

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
        """The path of WebSockets; None: there are none, and `upgraded` is not called."""
        self.upgraded = upgraded
        self.draining = False
        """Every response is the last of its connection, so that clients connect to another server."""
        self.idle: IdleOrder[HttpConnection] = IdleOrder(limits.idle_seconds)
        """The connections that wait for their first or next request.  A connection that gets one stays here until its
        timeout, and is checked then: to remove and add it with each request would be slower."""
        self.known_heads: KnownHeads = {}
        self._date = ""
        self._dated = -math.inf

    def ended(self, connection: HttpConnection) -> None:
        """Take note that a connection has ended."""

    def failed(self, error: Exception) -> None:
        """Handle the failure of a connection that its client has not caused."""
        raise error

    async def run(self) -> None:
        """Close connections that are idle for too long, until cancelled."""
        while True:
            (await self.idle.next()).expire()

    def date(self) -> str:
        """The value of the Date header, cached for a second, which is its resolution."""
        now = time.monotonic()
        if now - self._dated >= 1:
            self._date, self._dated = date(*time.gmtime()[:7]), now
        return self._date


def _has_closed(socket: trio.socket.SocketType) -> bool:
    return socket.fileno() < 0 or _polled(socket, _POLLRDHUP)


def has_input(socket: trio.socket.SocketType) -> bool:
    """Whether a socket has bytes that are not read, or a connection that is not accepted."""
    return socket.fileno() >= 0 and _polled(socket, select.POLLIN)


def _polled(socket: trio.socket.SocketType, events: int) -> bool:
    poll = select.poll()
    poll.register(socket.fileno(), events)
    return bool(poll.poll(0))


class HttpConnection:
    """One connection; see the head of this file.  `peer` is the client's address, if it has one."""

    def __init__(self, shared: ListenerState, stream: trio.abc.Stream, peer: str | None = None) -> None:
        self._shared = shared
        self._limits = shared.limits
        self._stream = stream
        self._socket = stream.socket if type(stream) is trio.SocketStream and os.name == "posix" else None
        self._peer = peer
        self._reader = RequestReader(shared.limits, shared.known_heads)
        self._read_ahead_limit = min(LONG, shared.limits.header_bytes)  # bytes buffered during a response
        # Encloses all reading.  Its deadline is the time limit of the current wait.  When it is cancelled, this
        # connection reads no more.
        self._scope = trio.CancelScope()
        self._closing = False  # the scope was cancelled by `_stop_reading`, not by its deadline
        self._timeout_message = ""  # the text of the 408 reply when the deadline passes; "": no reply
        self._busy = False  # a request is being read or answered
        self._upgraded = False  # to a WebSocket
        self._close_after = False  # close the connection after the current response
        self._discard_rest = False  # the client may be sending bytes that will not be parsed
        # The current request.
        self._response: _H1Response | None = None
        self._on_disconnect: Callable[[], None] | None = None
        self._reading_ahead = False
        self._read_ahead_scope: trio.CancelScope | None = None
        self._pace = Pace(shared.limits.write_seconds, shared.limits.write_rate)  # how fast the client reads
        # The current write.
        self._writing: trio.CancelScope | None = None
        self._unsent = b""  # the rest of bytes that were to be written at once
        self._written: trio.Event | None = None  # set at its end, if `_end` waits for that
        self._deadline = math.inf  # for all writes, once the server ends
        self._write_closed = False  # no more writes are possible
        self._failure: Exception | None = None  # an exception of `tap` or of the stream

    async def serve(self, refusal_reply: Reply | None = None) -> None:
        """Serve the client until the client or the server ends the connection, and close the stream.

        Never raises because of the client.  With `refusal_reply`, only send that reply: there are too many connections.
        """
        try:
            with self._scope:
                if refusal_reply is not None:
                    self.hurry()
                    await self._refuse(refusal_reply)
                else:
                    await self._begin()
                    await self._serve_requests()
            begun = self._response is not None and self._response.begun  # one request has one response
            if self._scope.cancelled_caught and not self._closing and self._timeout_message and not begun:
                await self._refuse(refused(408, self._timeout_message))
            if (self._discard_rest or self._reader.buffer) and not self._write_closed:
                await self._linger()
        except GONE:
            pass
        except Exception as error:  # noqa: BLE001  # for the owner of the connections
            self._failure = error
        finally:
            try:
                await self._end()
            except Exception as error:  # noqa: BLE001  # as above: a stream of the program may raise any exception
                self._failure = error
            finally:
                self._shared.ended(self)
        if self._failure is not None:
            self._shared.failed(self._failure)

    @property
    def busy(self) -> bool:
        """Whether a request is being read or answered."""
        return self._busy

    @property
    def owes_response(self) -> bool:
        """Whether a request waits to be read or is being read, or its response has not begun."""
        if not self._busy:  # the process may have slept since the request came
            return self._socket is not None and has_input(self._socket)
        return not self._upgraded and (self._response is None or not self._response.begun)

    def drain(self) -> None:
        """Accept no further request; the current one is finished."""
        self._close_after = True
        if not self._busy:
            self._stop_reading()

    def expire(self) -> None:
        """Close the connection if it is idle; called when its idle timeout passes."""
        self._shared.idle.forget(self)
        if not self._busy:
            self._stop_reading()

    def hurry(self) -> None:
        """Limit the current and later writes to `CLOSING` seconds, because the server ends."""
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

    async def _serve_requests(self) -> None:
        """Serve requests one after another."""
        try:
            while (head := self._reader.head() or await self._head()) is not None:
                self._busy = True
                if self._scope.deadline != math.inf:
                    self._scope.deadline = math.inf
                self._close_after = self._close_after or not head.keep_alive
                if head.method == "GET" and self._upgrades(head):
                    assert self._shared.upgraded is not None
                    self._upgraded = True
                    await self._shared.upgraded(self._stream, head, self._reader.rest(), self._peer)
                    self._write_closed = True
                    return
                self._on_disconnect, self._response = None, _H1Response(self, head)
                response = self._response
                self._on_disconnect = await self._answer(head, response)
                del head  # to free memory, because a stream may last for hours
                await self._read_ahead(response)
                del response
                if self._close_after or self._write_closed:
                    return
                if self._busy:  # else `response_ended` has done it already
                    self._become_idle()
        except UnreadableRequest as fault:
            await self._refuse(fault.reply)

    def _become_idle(self) -> None:
        """Reset the state of the last request, and become idle."""
        self._busy, self._timeout_message = False, ""
        self._response = self._on_disconnect = None  # an idle connection keeps no objects of its last request
        self._shared.idle.touch(self)

    async def _head(self) -> RequestHead | None:
        """Read the head of the next request; None if the client disconnects first."""
        reader, charge = self._reader, None
        try:
            while True:
                if reader.buffer and not self._busy:
                    self._busy = True
                    limit = self._limits.head_seconds
                    self._timeout_message = (
                        f"the head of the request did not arrive within {limit:g} seconds (Limits.head_seconds)"
                    )
                    self._scope.deadline = trio.current_time() + limit
                data = await self._receive(_RECEIVE)
                if not data:
                    self._write_closed = True
                    return None
                reader.feed(data)
                if (head := reader.head()) is not None:
                    return head
                if len(reader.buffer) > LONG:
                    charge = charge or Charge(self._shared.endpoint.account(holder_of(None, self._peer)))
                    if (limit_name := charge.set(len(reader.buffer))) is not None:
                        raise UnreadableRequest(over_limit(limit_name))
        finally:
            if charge is not None:
                charge.set(0)

    def _upgrades(self, head: RequestHead) -> bool:
        """Whether this GET asks for a WebSocket.  HTTP/1.0 has no upgrade (RFC 9110, 7.8)."""
        path = self._shared.websocket_path
        if path is None or not head.accepts_chunks or head.has_body:
            return False
        protocols = listed(head.headers.get("Upgrade", "").lower())
        return "websocket" in protocols and head.path.rstrip("/") == path

    async def _answer(self, head: RequestHead, response: _H1Response) -> Callable[[], None] | None:
        """Pass the request to the endpoint.  Returns a function to call if the client disconnects before the end."""
        endpoint = self._shared.endpoint
        request: HttpRequest = head
        try:
            admitted = await endpoint.admit(head, self._peer)
            if isinstance(admitted, Reply):
                await self._refuse_before_body(head, response, admitted)
                return None
            response.cors = admitted.head.cors
            if head.length != 0:
                response.pending_request = head
                body = self._reader.body()
                if body is None:
                    body = await self._body(head, admitted.holder)
                response.pending_request = None
                if body is None:
                    return None
                request = HttpRequest(head.method, head.target, head.headers, body)
            return await endpoint.serve(admitted, request, response)
        except (UnreadableRequest, *GONE):
            raise
        except Exception:  # noqa: BLE001  # for example from an author's event log
            # A failure with one client must not end the server for all clients.
            _log.exception("a request failed in the server itself, and not in a handler")
            if response.begun:
                self._abort()
                return None
            self._discard_rest = True
            raise UnreadableRequest(refusal(500, Error(None, INTERNAL_ERROR, "internal error"))) from None

    async def _body(self, head: RequestHead, holder: str | None) -> bytes | None:
        """Wait for the rest of a body; None if the client disconnects first.  It is charged to `holder` until it is
        complete."""
        reader, limits = self._reader, self._limits
        body: bytes | None = None
        if head.expects_continue and not reader.body_received:
            await self.write(CONTINUE)
        pace = Pace(limits.body_seconds, limits.body_rate)
        pace.begin(trio.current_time())
        held, size = 0, _RECEIVE if (head.length or 0) <= _RECEIVE else _RECEIVE_LONG
        self._timeout_message = (
            f"the body did not arrive in time: send it within {limits.body_seconds:g} seconds, or at "
            f"{limits.body_rate:g} bytes per second or faster (Limits.body_seconds, Limits.body_rate)"
        )
        with Charge(self._shared.endpoint.account(holder)) as charge:
            while body is None:
                if (limit := charge.set(reader.held)) is not None:
                    raise UnreadableRequest(over_limit(limit))
                if reader.held > held:  # chunk headers are not progress
                    pace.move(reader.held - held, trio.current_time())
                    held = reader.held
                self._scope.deadline = pace.deadline
                if reader.has_more:
                    await trio.lowlevel.checkpoint()
                elif data := await self._receive(size):
                    reader.feed(data)
                else:
                    self._write_closed = True
                    return None
                body = reader.body()
        self._scope.deadline = math.inf
        return body

    async def _refuse_before_body(self, head: RequestHead, response: _H1Response, reply: Reply) -> None:
        """Send a reply to a request whose body is not needed, and discard the body."""
        reader = self._reader
        try:
            body_pending = head.has_body and reader.body() is None
        except UnreadableRequest:
            body_pending = self._discard_rest = True
        # A client that expects 100-continue may now send its body or its next request; the two look alike.
        if body_pending and (
            head.expects_continue or head.length is None or head.length - reader.body_received > _DISCARDED
        ):
            self._discard_rest = True
        self._close_after = self._close_after or self._discard_rest
        await response.begin(reply.status, reply.headers, reply.body, more=False)
        if body_pending and not self._discard_rest:
            await self._body(head, holder_of(None, self._peer))

    async def _read_ahead(self, response: _H1Response) -> None:
        """Read during the response.  Always passes a checkpoint, at the latest in the wait for the next request."""
        reader = self._reader
        if response.over and reader.buffer:  # pipelined requests must not block the other tasks
            await trio.lowlevel.checkpoint()
        self._reading_ahead = True
        try:
            while not response.over and not self._write_closed:
                if not reader.buffer:
                    # The end of the response need not wake this task: the next bytes are the next request.
                    data = await self._receive(self._read_ahead_limit)
                else:
                    with trio.CancelScope() as self._read_ahead_scope:
                        data = await self._receive_or_wait(self._read_ahead_limit - len(reader.buffer), response)
                    if self._read_ahead_scope.cancelled_caught:
                        continue
                if not data:
                    self._write_closed = True
                reader.feed(data)
        finally:
            self._reading_ahead, self._read_ahead_scope = False, None

    async def _receive_or_wait(self, limit: int, response: _H1Response) -> bytes:
        """Receive at most `limit` bytes.  If it is 0, wait until the client disconnects; the end of the response
        cancels that."""
        if limit > 0:
            return await self._receive(limit)
        inner = socket_of(self._stream)
        if inner is None or not _POLLRDHUP:
            await trio.sleep_forever()
        while True:
            await trio.sleep(_POLL_INTERVAL)
            # While the last write is running, the client may have read the answer already and have closed properly.
            if not response.ending and _has_closed(inner.socket):
                return b""

    async def _receive(self, limit: int) -> bytes:
        """Call `receive_some`, or return b"" if that fails: in both cases no more bytes will come."""
        socket = self._socket
        try:
            while socket is not None and socket.fileno() >= 0:
                await trio.lowlevel.wait_readable(socket)  # before the read, because mostly no bytes are there yet
                try:
                    data = os.read(socket.fileno(), limit)
                except BlockingIOError:
                    continue
                except OSError:  # reset, or for example the host is unreachable
                    return b""
                break
            else:
                data = bytes(await self._stream.receive_some(limit))
            if data and self._shared.tap is not None:
                self._shared.tap("in", data)
        except GONE:
            return b""
        except Exception as error:  # noqa: BLE001  # raised by `serve`, because the endpoint could not handle it
            self._failure = error
            return b""
        return data

    # Writing.

    async def _refuse(self, reply: Reply) -> None:
        """Send a refusal, and close the connection after it."""
        response = self._response
        if response is None or response.begun:
            response = _H1Response(self)
        log_refusal(reply, response.pending_request, self._peer)
        self._close_after = self._discard_rest = True
        await response.begin(reply.status, (*response.cors, *reply.headers), reply.body, more=False)

    async def write(self, data: bytes, *more: bytes) -> None:
        """Send all bytes.  A cancellation does not interrupt it.  Raises BrokenResourceError if the client has
        disconnected or reads too slowly."""
        if self._write_closed:
            raise trio.BrokenResourceError("the client has disconnected")
        try:
            if self._shared.tap is not None:
                self._shared.tap("out", b"".join((data, *more)))
            if self._unsent:
                data, self._unsent = self._unsent + data, b""
            taken = self._write_now(data)
            if taken == len(data) and not more:
                return
            self._pace.begin(trio.current_time())
            with trio.CancelScope(shield=True) as self._writing:
                await self._write_paced(memoryview(data)[taken:], self._writing)
                for each in more:
                    await self._write_paced(memoryview(each), self._writing)
                self._pace.end(trio.current_time())
                return
        except GONE as error:
            self._abort()
            raise trio.BrokenResourceError("the client has disconnected") from error
        except Exception as error:
            self._failure = error  # raised by `serve`, because the handler whose task writes here is not to blame
            self._abort()
            raise trio.BrokenResourceError("the connection has failed") from error
        finally:
            self._writing = None
            if self._written is not None:
                self._written.set()
        self._abort()
        raise trio.BrokenResourceError("the client reads too slowly (Limits.write_seconds, Limits.write_rate)")

    def write_at_once(self, data: bytes) -> bool:
        """Send all bytes without waiting.  False: the client reads too slowly for that.  Then call `write` next, which
        sends the rest of these bytes first, by the deadline of a write."""
        if self._write_closed or self._writing is not None or self._unsent or self._shared.tap is not None:
            return False
        try:
            taken = self._write_now(data)
        except trio.BrokenResourceError:
            return False  # the next write finds out too, and handles it
        self._unsent = data[taken:] if taken else b""
        return taken == len(data)

    def _write_now(self, data: bytes | memoryview) -> int:
        """Write without waiting.  Returns the number of bytes that the socket buffer took."""
        if self._socket is None:
            return 0
        try:
            return os.write(self._socket.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise trio.BrokenResourceError("the client has disconnected") from error

    async def _write_paced(self, data: memoryview, scope: trio.CancelScope) -> None:
        """Write all bytes, as long as the client reads fast enough."""
        while data:
            scope.deadline = min(self._pace.deadline, self._deadline)
            if self._socket is None:
                size = min(len(data), _PIECE)
                await self._stream.send_all(data[:size])
            else:
                await trio.lowlevel.wait_writable(self._socket)
                size = self._write_now(data)
            data = data[size:]
            self._pace.move(size, trio.current_time())

    def response_ended(self) -> None:
        """Handle the end of the current response."""
        if not self._reading_ahead:
            return  # the task that owns the connection checks for it before it waits
        if self._close_after:
            self._stop_reading()
        else:
            self._become_idle()
            if self._read_ahead_scope is not None:
                self._read_ahead_scope.cancel()

    def _abort(self) -> None:
        """Stop writing and reading."""
        self._write_closed = True
        if self._reading_ahead:
            self._stop_reading()

    def _stop_reading(self) -> None:
        self._closing = True
        self._scope.cancel(reason="the connection is to be closed")

    # The end.

    async def _linger(self) -> None:
        """Give the client time to read the last response."""
        rest = self._limits.message_bytes
        with trio.move_on_after(_LINGER):
            if isinstance(self._stream, trio.abc.HalfCloseableStream):
                await self._stream.send_eof()
            while rest > 0 and (data := await self._receive(_RECEIVE)):
                rest -= len(data)

    async def _end(self) -> None:
        self._write_closed = True
        self._shared.idle.forget(self)
        if self._on_disconnect is not None and self._response is not None and not self._response.over:
            self._on_disconnect()
        self._response = self._on_disconnect = None  # breaks the reference cycle
        # The client may still read the current write, so it gets `CLOSING` seconds before the stream is closed.
        self.hurry()
        if self._writing is not None:
            self._written = trio.Event()
            with trio.CancelScope(shield=True, deadline=self._deadline):
                await self._written.wait()
        # A stream that is cancelled in `aclose` closes as well, only without a proper shutdown.
        with suppress(*GONE), trio.CancelScope(shield=True, deadline=self._deadline):
            await self._stream.aclose()


class _H1Response:
    """The response to the current request: an `HttpResponse` (see `responses`)."""

    __slots__ = (
        "_accepts_chunks", "_bodiless", "_chunked", "_connection", "begun", "cors", "ending", "over", "pending_request",
    )  # fmt: skip

    def __init__(self, connection: HttpConnection, head: RequestHead | None = None) -> None:
        """`head` is that of the request, or None if it could not be read."""
        self._connection = connection
        self._accepts_chunks = head is None or head.accepts_chunks
        self._bodiless = head is not None and head.method == "HEAD"
        self._chunked = False
        self.pending_request: HttpRequest | None = None  # set while its body is being read
        self.cors: Fields = ()  # lets a web page read why its request is refused
        self.begun = False
        self.ending = False  # its last part is being sent, or has been sent
        self.over = False

    async def begin(self, status: int, fields: Fields, body: bytes, *, more: bool) -> None:
        self.begun = True
        head = self._head(status, fields, None if more else len(body))
        await self._write(head, body, more)

    async def send(self, data: bytes, *, more: bool) -> None:
        await self._write(b"", data, more)

    def send_now(self, data: bytes) -> bool:
        return self._connection.write_at_once(chunk(data, last=False) if self._chunked else data)

    def drop(self) -> None:
        self.over = True
        self._connection._abort()

    def _head(self, status: int, fields: Fields, length: int | None) -> bytes:
        connection = self._connection
        framing = []
        if status in (204, 304):
            self._bodiless = True
        elif "content-length" in [name.lower() for name, _ in fields]:
            pass
        elif length is not None:
            framing.append(f"Content-Length: {length}")
        elif self._accepts_chunks:
            framing.append("Transfer-Encoding: chunked")
            self._chunked = True
        else:
            connection._close_after = True  # the end of the connection is the end of the body
        if connection._shared.draining:
            connection._close_after = True
        if connection._close_after:
            framing.append("Connection: close")
        elif not self._accepts_chunks:
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
            self._connection.response_ended()
