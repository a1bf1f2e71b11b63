"""An HTTP/1.1 client: requests, their replies, and a pool of idle connections.

    async with HttpPool(limits=Limits()) as pool:
        async with pool.request("POST", "http://127.0.0.1:3000/mcp", fields, body) as reply:
            if reply.status == 200:
                data = await reply.read(limits.message_bytes)

The caller interprets the status: the pool does not follow redirects, does not authorise requests, and does not decode
compressed bodies.  A request owns its connection until the end of its block.  The pool has no background tasks, so
every error is raised in the task of its request.  The number of connections in use is not limited.

A connection is kept if the reply was read to its end and both sides allow it.  The server may close it at any time, and
may or may not have read a request sent at that moment.  So a connection on which data has arrived is not used again.
And a request whose connection ended before the first byte of the reply is sent again, on a new connection, only if the
caller declares it replayable, or if not all of it had been sent (RFC 9110, 9.2.2).

The caller limits the time for the reply, with a cancel scope; leaving the block closes the connection at once.  This
module limits the rest: `CONNECTING` seconds for opening a connection, `Limits.write_seconds` for a server that does
not read, `IDLE_SECONDS` seconds for an idle connection.
"""

from __future__ import annotations

import math
import os
import re
import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import NamedTuple

import trio

from trio_mcp.core.errors import ConnectionFailed, McpError, RemoteProtocolError, UsageError, shown
from trio_mcp.core.http.fields import TOKEN, Fields, Headers
from trio_mcp.core.http.h1 import ReplyHead, ReplyReader
from trio_mcp.core.messages import Limits
from trio_mcp.transport.dial import CONNECTING, Connect, Origin, Proxies, Proxy, dial, locate
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.wire import CLOSING, GONE, Tap

__all__ = ["CONNECTING", "IDLE_SECONDS", "HttpPool", "HttpReply", "ReplyBroken", "ReplyTooLong"]

IDLE_SECONDS = 50.0
"""Seconds for which an idle connection is kept.  Proxies usually close theirs after 60, and our server after 75
(`Limits.idle_seconds`).  The client should close first: a call that is sent while the server closes the connection must
not be sent again.  If a server closes after 5 seconds, the pool nearly always sees it before the next request."""

# Idle connections per origin; more are open only while more calls run at once.  With fewer, a program that makes some
# calls at a time would close most of its connections after each round, and a new one costs as much as several calls.
_IDLE_EACH = 32
_IDLE_IN_ALL = 64  # idle connections in all; one costs a file descriptor, and with TLS some tens of KiB
_PIECE = 64 * 1024  # bytes of one write with a time limit: they fit into the buffers of most systems
_SMALL = 4096  # bytes that every system accepts at once on a TCP connection with an empty send buffer
_HEADS, _HEAD = 64, 2048  # encoded heads that are cached, and the bytes of the longest

# These fields control the end of the request and the connection, or ask for features that this client does not have.
_RESERVED = frozenset(
    {
        *("host", "content-length", "transfer-encoding", "te", "trailer", "connection", "keep-alive", "upgrade"),
        *("expect", "accept-encoding", "proxy-authorization", "proxy-connection"),
    }
)
_METHOD = re.compile(TOKEN)
_FIELD = re.compile(rf"({TOKEN}): [\t\x20-\x7e\x80-\xff]*")


class ReplyBroken(McpError):
    """There is no reply, or only a part of it: the connection ended, or the data is not HTTP.

    `sent` tells whether the server may have acted on the request.
    """

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class ReplyTooLong(McpError):
    """The body of a reply is longer than its reader allows."""


class _Route(NamedTuple):
    """The endpoint of a connection: requests with the same route can share it."""

    origin: Origin
    proxy: Proxy | None


class _HeadTemplate(NamedTuple):
    """The head of requests that differ only in their bodies."""

    route: _Route
    name: str  # for error messages
    before: bytes  # up to the Content-Length field
    after: bytes  # from there on
    sized: bool  # Content-Length is sent even if the body is empty
    bodiless: bool  # the reply has no body, even if its fields announce one


class HttpPool(trio.abc.AsyncResource):
    """Connections to any number of servers.

    `ssl_context` is for https, and should offer ``http/1.1`` by ALPN; by default the system's certificates are
    trusted.  `connect` opens a stream in place of a TCP connection.  `environ` names the proxies (see `dial`).  `tap`
    is called with the data sent and received, unencrypted.
    """

    def __init__(
        self,
        *,
        ssl_context: ssl.SSLContext | None = None,
        limits: Limits,
        connect: Connect | None = None,
        environ: Mapping[str, str] = os.environ,
        tap: Tap | None = None,
    ) -> None:
        self._tap = tap
        self._ssl_context = ssl_context
        self._limits = limits
        self._connect: Connect = connect or trio.open_tcp_stream
        self._proxies = Proxies(environ)
        self._idle: list[_PooledConnection] = []  # by the time of their last use
        self._heads: dict[tuple[str, str, Fields], _HeadTemplate] = {}
        self._closed = False

    def request(
        self, method: str, url: str, fields: Fields, body: bytes = b"", *, replayable: bool = False
    ) -> HttpReply:
        """Return a block that sends the request on entering, and gives the reply once its head has arrived.

        The fields of the connection (Host, Content-Length and so on) are added here.  `replayable` allows the pool to
        send the request twice.  Raises `UsageError` at once if the request is invalid, and `ConnectionFailed` if the
        environment's proxy is; on entering, `ConnectionFailed` and `ReplyBroken`.  Can be cancelled at any time, which
        closes the connection.
        """
        if self._closed:
            raise UsageError("the pool is closed; make requests before that")
        head = self._heads.get((method, url, fields)) or self._head(method, url, fields)
        return HttpReply(self, head, body, replayable)

    def _head(self, method: str, url: str, fields: Fields) -> _HeadTemplate:
        origin, target = locate(url)
        proxy = self._proxies.between(origin)
        extra = ""
        if proxy is not None and origin.scheme == "http":
            target, extra = f"{origin}{target}", proxy.fields  # RFC 9112, 3.2.2: the absolute form
        if _METHOD.fullmatch(method) is None or method == "CONNECT":
            raise UsageError(f"{shown(method)} is not a method that can be sent")
        lines = []
        for name, value in fields:
            line = f"{name}: {value}"
            # The match must cover the whole name: a name with a colon in it would become another field.
            if (match := _FIELD.fullmatch(line)) is None or match[1] != name:
                raise UsageError(
                    f"the field {shown(name)} cannot be sent: a name must be a token, a value must be Latin-1 text, "
                    "and neither may contain line breaks or other control characters"
                )
            if name.lower() in _RESERVED:
                raise UsageError(f"the field {name} belongs to the connection and cannot be set; leave it out")
            lines.append(f"{line}\r\n")
        # Without Accept-Encoding the server may use any coding (RFC 9110, 12.5.3).
        first = f"{method} {target} HTTP/1.1\r\nHost: {origin.authority}\r\nAccept-Encoding: identity\r\n{extra}"
        before, after = first.encode("latin-1"), "".join((*lines, "\r\n")).encode("latin-1")
        route, sized = _Route(origin, proxy), method in ("POST", "PUT", "PATCH")
        head = _HeadTemplate(route, f"{method} {origin}", before, after, sized, method == "HEAD")
        if len(before) + len(after) <= _HEAD:
            if len(self._heads) >= _HEADS:  # URLs may contain arguments, and then the heads are never used again
                self._heads.clear()
            self._heads[method, url, fields] = head
        return head

    async def aclose(self) -> None:
        """Close the idle connections.  A connection in use closes at the end of its block."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()
        await trio.lowlevel.checkpoint()

    async def _take_idle(self, route: _Route) -> _PooledConnection | None:
        """Take the idle connection that was used last, because it is the least likely to be closed."""
        await self._sweep()
        while (link := next((each for each in reversed(self._idle) if each.route == route), None)) is not None:
            self._idle.remove(link)
            if link.quiet():
                return link
            await link.close()  # meanwhile other tasks take and return connections
        return None

    async def _keep(self, link: _PooledConnection) -> None:
        """Add a connection to the idle ones; close the oldest if there are too many."""
        if self._closed:
            await link.close()
            return
        link.since = trio.current_time()
        self._idle.append(link)
        if len(self._idle) > _IDLE_EACH:
            same = [each for each in self._idle if each.route == link.route]
            if len(same) > _IDLE_EACH or len(self._idle) > _IDLE_IN_ALL:
                oldest = same[0] if len(same) > _IDLE_EACH else self._idle[0]
                self._idle.remove(oldest)
                await oldest.close()
        await self._sweep()

    async def _sweep(self) -> None:
        """Close the connections that have been idle for too long."""
        before = trio.current_time() - IDLE_SECONDS
        while self._idle and self._idle[0].since <= before:
            await self._idle.pop(0).close()

    async def _open(self, route: _Route) -> _PooledConnection:
        stream = await dial(*route, connect=self._connect, context=self._context, limits=self._limits)
        return _PooledConnection(stream, route, self._limits, self._tap)

    def _context(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()  # on first use, because it reads a hundred certificates
            self._ssl_context.set_alpn_protocols(["http/1.1"])
        return self._ssl_context


class HttpReply(AbstractAsyncContextManager["HttpReply"]):
    """One request and the server's reply to it, as a block.  One task reads the reply, inside the block."""

    __slots__ = ("_body", "_head", "_left", "_link", "_over", "_pool", "_replayable", "headers", "replayed", "status")

    status: int
    headers: Headers
    replayed: bool
    """Whether all of the request was also sent on an earlier connection, which broke before the reply began."""

    def __init__(self, pool: HttpPool, head: _HeadTemplate, body: bytes, replayable: bool) -> None:
        self._pool = pool
        self._head = head
        self._body = body
        self._replayable = replayable
        self._link: _PooledConnection | None = None
        self._left = 0  # blocks in which the reply is still to be read
        self._over = False

    async def __aenter__(self) -> HttpReply:
        if self._left:
            return self
        if self._link is not None:
            raise UsageError("a request can be sent only once; call request() again")
        pool, (route, name, before, after, sized, bodiless), body = self._pool, self._head, self._body
        size = b"Content-Length: %d\r\n" % len(body) if body or sized else b""
        sent = False  # all of it was sent on an earlier connection
        link = await pool._take_idle(route)
        while True:
            if new := link is None:
                try:
                    link = await pool._open(route)
                except ConnectionFailed as error:
                    if not sent:
                        raise
                    raise ReplyBroken(f"{name}: {error}", sent=True) from error
            try:
                self.status, self.headers = await link.ask(before + size + after, body, bodiless=bodiless)
            except RemoteProtocolError as error:
                await link.close()
                began, written = link.reader.began, link.written
                if not new and not began and (self._replayable or not written):
                    link, sent = None, written
                    continue
                raise ReplyBroken(f"{name}: {error}", sent=sent or written or began) from error.__cause__
            except BaseException:
                await link.close()
                raise
            self._link, self._left, self.replayed = link, 1, sent
            return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        link = self._link
        assert link is not None
        self._left -= 1
        if not self._left:
            self._over = True
            if link.written and link.reader.reusable:
                await self._pool._keep(link)
            else:
                await link.close()

    @property
    def done(self) -> bool:
        """Whether the whole reply has been read."""
        return self._link is not None and self._link.reader.done

    def leave(self) -> HttpReply:
        """Return a block in which another task reads the rest.  The block of the request then leaves the reply open."""
        self._left += 1
        return self

    async def read(self, limit: int) -> bytes:
        """Return the whole body.  Raises the errors of `receive`, and `ReplyTooLong` as soon as the body is known to be
        longer than `limit` bytes.

        Not a checkpoint if the body came with the head: to receive the head was one.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            link = self._connection()
            if size + link.reader.length > limit:
                raise ReplyTooLong(
                    f"{self._head.name}: the reply is longer than the allowed {limit} bytes (Limits.message_bytes)"
                )
            parts.append(await self._receive(link))
            size += len(parts[-1])
            if link.reader.done and size <= limit:
                return b"".join(parts)

    async def receive(self) -> bytes:
        """Return the next bytes of the body; empty at its end.

        Raises `ReplyBroken` if the connection breaks.  Can be cancelled and called again inside the block: no bytes are
        lost.
        """
        link = self._connection()
        if link.reader.ready:
            await trio.lowlevel.checkpoint()
        return await self._receive(link)

    def _connection(self) -> _PooledConnection:
        if self._over or self._link is None:
            raise UsageError("the block of this request has ended; read its reply inside the block")
        return self._link

    async def _receive(self, link: _PooledConnection) -> bytes:
        reader, coding = link.reader, self.headers.get("Content-Encoding", "identity")
        try:
            if coding.lower() not in ("identity", "") and not reader.done:
                raise RemoteProtocolError(f"the reply has the coding {shown(coding)}; only identity was requested")
            while not (data := reader.body()) and not reader.done:
                reader.feed(await link.receive())
        except RemoteProtocolError as error:
            raise ReplyBroken(f"{self._head.name}: {error}", sent=True) from error.__cause__
        return data


class _PooledConnection:
    """One connection, with one request at a time."""

    __slots__ = ("_limits", "_stream", "_tap", "reader", "route", "since", "written")

    def __init__(self, stream: trio.abc.Stream, route: _Route, limits: Limits, tap: Tap | None) -> None:
        self._stream = stream
        self._tap = tap
        self._limits = limits
        self.route = route
        self.since = math.inf
        self.reader = ReplyReader(limits)
        self.written = False

    def quiet(self) -> bool:
        """Whether the server has neither sent data nor closed the connection.

        This is known only for TCP and TLS streams; on other streams the request finds out.  If a late TLS ticket
        has arrived, the connection is not used again, and no harm is done.
        """
        stream = self._stream
        while isinstance(stream, trio.SSLStream):
            stream = stream.transport_stream
        return not (isinstance(stream, trio.SocketStream) and stream.socket.is_readable())

    async def ask(self, head: bytes, body: bytes, *, bodiless: bool) -> ReplyHead:
        """Send a request and return the head of its reply.  Raises `RemoteProtocolError` if there is no reply."""
        self.reader = ReplyReader(self._limits, bodiless=bodiless)
        self.written = False
        if len(body) <= _PIECE:
            await self._write(head + body)
            if self.written:
                return await self._receive_head()
            with trio.move_on_after(CLOSING):
                return await self._receive_head()
        else:
            # A server may refuse a long request before it has read all of it, and then stop reading.
            async with open_nursery() as nursery:
                with trio.CancelScope() as reading:

                    async def write() -> None:
                        view = memoryview(body)
                        await self._write(
                            head, *(view[start : start + _PIECE] for start in range(0, len(body), _PIECE))
                        )
                        if not self.written:
                            reading.deadline = trio.current_time() + CLOSING

                    nursery.start_soon(write)
                    return await self._receive_head()
        raise RemoteProtocolError("the server did not read the whole request, and sent no reply")

    async def _write(self, *parts: bytes | memoryview) -> None:
        """Send the parts; stop if the server does not accept them.  It may have sent a reply all the same, such as 413,
        but that has arrived by then, so `CLOSING` seconds are enough to wait for it."""
        for part in parts:
            if self._tap is not None:
                self._tap("out", bytes(part))
            try:
                if len(part) <= _SMALL and isinstance(self._stream, trio.SocketStream):
                    await self._stream.send_all(part)  # does not have to wait for the server
                    continue
                with trio.move_on_after(self._limits.write_seconds) as scope:
                    await self._stream.send_all(part)
            except GONE:
                return
            if scope.cancelled_caught:
                return
        self.written = True

    async def _receive_head(self) -> ReplyHead:
        while (head := self.reader.head()) is None:
            self.reader.feed(await self.receive())
        return head

    async def receive(self) -> bytes:
        try:
            data = bytes(await self._stream.receive_some())
        except GONE as error:
            raise RemoteProtocolError("the connection broke") from error
        if self._tap is not None and data:
            self._tap("in", data)
        return data

    async def close(self) -> None:
        """Close the connection at once, even if cancelled: a task that closes several must reach the last."""
        with trio.CancelScope(shield=True, deadline=-math.inf):
            await self._stream.aclose()
