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
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.http.replies import ReplyHead, ReplyReader
from trio_mcp.core.jsonrpc import Limits
from trio_mcp.transport.dial import CONNECTING, Connect, Origin, Proxies, Proxy, dial, locate
from trio_mcp.transport.duplex import Tap
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.outbox import CLOSING, GONE

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

    def of(self, body: bytes) -> bytes:
        if not body and not self.sized:
            return self.before + self.after
        return b"%bContent-Length: %d\r\n%b" % (self.before, len(body), self.after)


class _PreparedRequest(NamedTuple):
    name: str
    head: bytes
    body: bytes
    bodiless: bool
    replayable: bool


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
    ) -> AbstractAsyncContextManager[HttpReply]:
        """Return a block that sends the request on entering, and gives the reply once its head has arrived.

        The fields of the connection (Host, Content-Length and so on) are added here.  `replayable` allows the pool to
        send the request twice.  Raises `UsageError` at once if the request is invalid, and `ConnectionFailed` if the
        environment's proxy is; on entering, `ConnectionFailed` and `ReplyBroken`.  Can be cancelled at any time, which
        closes the connection.
        """
        if self._closed:
            raise UsageError("the pool is closed; make requests before that")
        head = self._heads.get((method, url, fields)) or self._head(method, url, fields)
        request = _PreparedRequest(head.name, head.of(body), body, head.bodiless, replayable)
        return _PooledRequest(self, head.route, request)

    def _head(self, method: str, url: str, fields: Fields) -> _HeadTemplate:
        origin, target = locate(url)
        proxy = self._proxies.between(origin)
        extra = ""
        if proxy is not None and origin.scheme == "http":
            target, extra = f"{origin}{target}", proxy.fields  # RFC 9112, 3.2.2: the absolute form
        before, after = _written(method, target, origin.authority, fields, extra)
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
        while (link := self._take(route)) is not None and not link.quiet():
            await link.close()  # meanwhile other tasks take and return connections
        return link

    def _take(self, route: _Route) -> _PooledConnection | None:
        for index in range(len(self._idle) - 1, -1, -1):
            if self._idle[index].route == route:
                return self._idle.pop(index)
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


# The head of a request.

# These fields control the end of the request and the connection, or ask for features that this client does not have.
_RESERVED = frozenset(
    {
        *("host", "content-length", "transfer-encoding", "te", "trailer", "connection", "keep-alive", "upgrade"),
        *("expect", "accept-encoding", "proxy-authorization", "proxy-connection"),
    }
)
_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_METHOD = re.compile(_TOKEN)
_FIELD = re.compile(rf"({_TOKEN}): [\t\x20-\x7e\x80-\xff]*")


def _written(method: str, target: str, authority: str, fields: Fields, extra: str) -> tuple[bytes, bytes]:
    """Return the bytes of the head before and after the Content-Length field."""
    if _METHOD.fullmatch(method) is None or method == "CONNECT":
        raise UsageError(f"{shown(method)} is not a method that can be sent")
    lines = []
    for name, value in fields:
        line = f"{name}: {value}"
        # The match must cover the whole name: a name with a colon in it would become another field.
        if (match := _FIELD.fullmatch(line)) is None or match[1] != name:
            raise UsageError(
                f"the field {shown(name)} cannot be sent: a name must be a token, a value must be Latin-1 text, and "
                "neither may contain line breaks or other control characters"
            )
        if name.lower() in _RESERVED:
            raise UsageError(f"the field {name} belongs to the connection and cannot be set; leave it out")
        lines.append(line)
    # Without Accept-Encoding the server may use any coding (RFC 9110, 12.5.3).
    first = f"{method} {target} HTTP/1.1\r\nHost: {authority}\r\nAccept-Encoding: identity\r\n{extra}"
    after = "".join([f"{line}\r\n" for line in lines]) + "\r\n"
    return first.encode("latin-1"), after.encode("latin-1")


# One request.


class _PooledRequest(AbstractAsyncContextManager["HttpReply"]):
    """The block of one request."""

    __slots__ = ("_link", "_pool", "_reply", "_request", "_route", "_sent")

    def __init__(self, pool: HttpPool, route: _Route, request: _PreparedRequest) -> None:
        self._pool = pool
        self._route = route
        self._request = request
        self._link: _PooledConnection | None = None
        self._reply: HttpReply | None = None
        self._sent = False  # all of it was sent on an earlier connection

    async def __aenter__(self) -> HttpReply:
        if self._link is not None:
            raise UsageError("a request can be sent only once; call request() again")
        link = await self._pool._take_idle(self._route)
        if link is not None and (head := await self._ask(link, again=True)) is not None:
            return self._begin(link, head)
        self._sent = link is not None and link.written
        try:
            link = await self._pool._open(self._route)
        except ConnectionFailed as error:
            if not self._sent:
                raise
            raise ReplyBroken(f"{self._request.name}: {error}", sent=True) from error
        head = await self._ask(link, again=False)
        assert head is not None
        return self._begin(link, head)

    def _begin(self, link: _PooledConnection, head: ReplyHead) -> HttpReply:
        self._link = link
        self._reply = HttpReply(self._request.name, head, self._pool, link)
        return self._reply

    async def _ask(self, link: _PooledConnection, *, again: bool) -> ReplyHead | None:
        """Return the head of the reply, or None if the request can be sent on another connection."""
        request = self._request
        try:
            return await link.ask(request)
        except RemoteProtocolError as error:
            await link.close()
            began = link.reader.began
            if again and not began and (request.replayable or not link.written):
                return None
            sent = self._sent or link.written or began
            raise ReplyBroken(f"{request.name}: {error}", sent=sent) from error.__cause__
        except BaseException:
            await link.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._reply is not None
        if not self._reply._left:
            await self._reply._end()


class _RestOfReply(AbstractAsyncContextManager["HttpReply"]):
    """The block of a reply after `leave`."""

    def __init__(self, reply: HttpReply) -> None:
        self._reply = reply

    async def __aenter__(self) -> HttpReply:
        return self._reply

    async def __aexit__(self, *_: object) -> None:
        await self._reply._end()


class HttpReply:
    """The server's reply.  One task reads it, inside the block of the request."""

    __slots__ = ("_left", "_link", "_name", "_over", "_pool", "headers", "status")

    def __init__(self, name: str, head: ReplyHead, pool: HttpPool, link: _PooledConnection) -> None:
        self.status, self.headers = head
        self._name = name
        self._pool = pool
        self._link = link
        self._left = False
        self._over = False

    @property
    def done(self) -> bool:
        """Whether the whole reply has been read."""
        return self._link.reader.done

    def leave(self) -> AbstractAsyncContextManager[HttpReply]:
        """Return a block in which another task reads the rest.  The block of the request then leaves the reply open."""
        self._left = True
        return _RestOfReply(self)

    async def _end(self) -> None:
        self._over = True
        if self._link.written and self._link.reader.reusable:
            await self._pool._keep(self._link)
        else:
            await self._link.close()

    async def read(self, limit: int) -> bytes:
        """Return the whole body.  Raises the errors of `receive`, and `ReplyTooLong` as soon as the body is known to be
        longer than `limit` bytes.

        Not a checkpoint if the body came with the head: to receive the head was one.
        """
        reader = self._link.reader
        parts: list[bytes] = []
        size = 0
        while True:
            if size + reader.length > limit:
                raise ReplyTooLong(
                    f"{self._name}: the reply is longer than the allowed {limit} bytes (Limits.message_bytes)"
                )
            parts.append(await self._receive())
            size += len(parts[-1])
            if reader.done and size <= limit:
                return b"".join(parts)

    async def receive(self) -> bytes:
        """Return the next bytes of the body; empty at its end.

        Raises `ReplyBroken` if the connection breaks.  Can be cancelled and called again inside the block: no bytes are
        lost.
        """
        if self._link.reader.ready:
            await trio.lowlevel.checkpoint()
        return await self._receive()

    async def _receive(self) -> bytes:
        if self._over:
            raise UsageError("the block of this request has ended; read its reply inside the block")
        reader = self._link.reader
        try:
            self._check_coding()
            while not (data := reader.body()) and not reader.done:
                reader.feed(await self._link.receive())
        except RemoteProtocolError as error:
            raise ReplyBroken(f"{self._name}: {error}", sent=True) from error.__cause__
        return data

    def _check_coding(self) -> None:
        coding = self.headers.get("Content-Encoding", "identity")
        if coding.lower() not in ("identity", "") and not self._link.reader.done:
            raise RemoteProtocolError(f"the reply has the coding {shown(coding)}; only identity was requested")


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

    async def ask(self, request: _PreparedRequest) -> ReplyHead:
        """Send the request and return the head of its reply.  Raises `RemoteProtocolError` if there is no reply."""
        self.reader = ReplyReader(self._limits, bodiless=request.bodiless)
        self.written = False
        if len(request.body) <= _PIECE:
            await self._write(request.head + request.body)
            if self.written:
                return await self._head()
            with trio.move_on_after(CLOSING):
                return await self._head()
            raise RemoteProtocolError(_NOT_TAKEN)
        # A server may refuse a long request before it has read all of it, and then stop reading.
        async with open_nursery() as nursery:
            with trio.CancelScope() as scope:
                nursery.start_soon(self._write_long, request, scope)
                return await self._head()
        raise RemoteProtocolError(_NOT_TAKEN)

    async def _write_long(self, request: _PreparedRequest, reading: trio.CancelScope) -> None:
        body = memoryview(request.body)
        await self._write(request.head, *(body[start : start + _PIECE] for start in range(0, len(body), _PIECE)))
        if not self.written:
            reading.deadline = trio.current_time() + CLOSING

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

    async def _head(self) -> ReplyHead:
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


_NOT_TAKEN = "the server did not read the whole request, and sent no reply"
