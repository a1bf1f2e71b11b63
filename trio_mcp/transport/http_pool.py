"""An HTTP/1.1 client: requests, their replies, and the connections that are kept between them.

    async with HttpPool(limits=Limits()) as pool:
        async with pool.request("POST", "http://127.0.0.1:3000/mcp", fields, body) as reply:
            if reply.status == 200:
                data = await reply.read(limits.message_bytes)

What a status means is for the caller: nothing is followed, authorised or unpacked here.  A request has a connection to
itself until the end of its block, and there is no task behind any of it, so whatever goes wrong is raised where
somebody waits, as itself.  There is no limit to the connections in use.

A connection is kept if the reply was read to its end and both sides want it.  The server may close it at any time, and
what was sent at that moment may have been read or not.  So a connection on which anything has come is not used again;
and a request whose connection ended before a single byte of a reply goes out a second time, on a fresh one, only if the
caller says that twice is as good as once, or if not all of it had been sent (RFC 9110, 9.2.2).

How long a reply takes is for the caller to bound, with a cancel scope; leaving the block for it closes the connection
at once.  The rest is bounded here: `CONNECTING` seconds for a connection, `Limits.write_seconds` for a server that does
not read, `KEPT` seconds for a connection that idles.
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

from trio_mcp.core.errors import McpError, RemoteProtocolError, UsageError, shown
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.http.replies import ReplyHead, ReplyReader
from trio_mcp.core.jsonrpc import Limits
from trio_mcp.transport.dial import CONNECTING, Connect, ConnectionFailed, Origin, Proxies, Proxy, dial, locate
from trio_mcp.transport.duplex import Tap
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.outbox import CLOSING, GONE

__all__ = ["CONNECTING", "KEPT", "ConnectionFailed", "HttpPool", "HttpReply", "ReplyBroken", "ReplyTooLong"]

KEPT = 50.0
"""Seconds for which a connection is kept without a request.  Proxies close theirs after 60 as a rule, and our server
after 75 (`Limits.idle_seconds`): who closes first loses no request, and a call that is sent as the server closes may
not be sent again.  Of servers that close after 5 the end is nearly always seen before the next request."""

# Kept for one origin: more are open only while as many calls run at once.  A program that has some calls at a time
# would else close most of its connections with each round of them, and a new one costs as much as several calls.
_IDLE_EACH = 32
_IDLE_IN_ALL = 64  # kept for all of them; one costs a file descriptor, and with TLS some tens of KiB
_PIECE = 64 * 1024  # bytes that one write must get on with: what fits into the buffers of most systems
_SMALL = 4096  # bytes that every system takes at once for a TCP connection on which nothing else waits to be sent
_HEADS, _HEAD = 64, 2048  # heads that are kept as they were written, and bytes of the longest


class ReplyBroken(McpError):
    """There is no reply, or not all of it: the connection ended, or what came is not HTTP.

    `sent` tells whether the server may have acted on the request.
    """

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class ReplyTooLong(McpError):
    """The body of a reply is longer than its reader allows."""


class _Route(NamedTuple):
    """What a connection is good for."""

    origin: Origin
    proxy: Proxy | None


class _HeadTemplate(NamedTuple):
    """The head of requests that differ in their bodies alone."""

    route: _Route
    name: str  # for messages of ours
    before: bytes
    after: bytes  # the length of the body
    sized: bool  # it is told even if it is nothing
    bodiless: bool  # the reply is, whatever it says

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

    `ssl_context` is for https, and should offer ``http/1.1`` by ALPN; without one the system's certificates are
    trusted.  `connect` opens what would be a TCP connection.  `environ` is where proxies are named (see `http_proxy`).
    `tap` sees what is sent and received, after TLS was taken off.
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
        """Send a request on entering, and give its reply once the head of it is there.

        The fields that carry the request (Host, Content-Length and so on) are added here.  `replayable` allows it to be
        sent twice.  Raises `UsageError` for what cannot be sent, and `ConnectionFailed` for a proxy that cannot
        be used, at once; on entering, `ConnectionFailed` and `ReplyBroken`.  May be cancelled at any time: the
        connection is closed then.
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
            if len(self._heads) >= _HEADS:  # they may have arguments in them, and never come again
                self._heads.clear()
            self._heads[method, url, fields] = head
        return head

    async def aclose(self) -> None:
        """Close what idles.  A connection in use ends with its own block."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()
        await trio.lowlevel.checkpoint()

    async def _kept(self, route: _Route) -> _PooledConnection | None:
        """A connection that was used before, the one used last first: it is the least likely to be closed."""
        await self._sweep()
        while (link := self._take(route)) is not None and not link.quiet():
            await link.close()  # and meanwhile others take and keep some
        return link

    def _take(self, route: _Route) -> _PooledConnection | None:
        for index in range(len(self._idle) - 1, -1, -1):
            if self._idle[index].route == route:
                return self._idle.pop(index)
        return None

    async def _keep(self, link: _PooledConnection) -> None:
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
        """Close what has idled for too long."""
        before = trio.current_time() - KEPT
        while self._idle and self._idle[0].since <= before:
            await self._idle.pop(0).close()

    async def _fresh(self, route: _Route) -> _PooledConnection:
        stream = await dial(*route, connect=self._connect, context=self._context, limits=self._limits)
        return _PooledConnection(stream, route, self._limits, self._tap)

    def _context(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()  # reads a hundred certificates: not before there is need
            self._ssl_context.set_alpn_protocols(["http/1.1"])
        return self._ssl_context


# The head of a request.

# These say where a request ends and what becomes of the connection, or ask for what is not done here.
_OURS = frozenset(
    {
        *("host", "content-length", "transfer-encoding", "te", "trailer", "connection", "keep-alive", "upgrade"),
        *("expect", "accept-encoding", "proxy-authorization", "proxy-connection"),
    }
)
_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_METHOD = re.compile(_TOKEN)
_FIELD = re.compile(rf"({_TOKEN}): [\t\x20-\x7e\x80-\xff]*")


def _written(method: str, target: str, authority: str, fields: Fields, extra: str) -> tuple[bytes, bytes]:
    """What stands before and after the length of the body, in bytes."""
    if _METHOD.fullmatch(method) is None or method == "CONNECT":
        raise UsageError(f"{shown(method)} is no method that can be used here")
    lines = []
    for name, value in fields:
        line = f"{name}: {value}"
        # The name in the line must be all of the name: one with a colon in it would be a field of its own.
        if (match := _FIELD.fullmatch(line)) is None or match[1] != name:
            raise UsageError(
                f"the field {shown(name)} cannot be sent: a name is a token, a value has characters of Latin-1, and "
                "neither has line breaks or other control characters"
            )
        if name.lower() in _OURS:
            raise UsageError(f"the field {name} is not the caller's to set: it is about the connection")
        lines.append(line)
    # Without Accept-Encoding any coding would do (RFC 9110, 12.5.3).
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
        self._sent = False  # all of it, on a connection before

    async def __aenter__(self) -> HttpReply:
        if self._link is not None:
            raise UsageError("a request is sent once; make another")
        link = await self._pool._kept(self._route)
        if link is not None and (head := await self._ask(link, again=True)) is not None:
            return self._begin(link, head)
        self._sent = link is not None and link.written
        try:
            link = await self._pool._fresh(self._route)
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
        """The head of the reply; None if the request can be sent on another connection."""
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
    """A block for what is left of a reply."""

    def __init__(self, reply: HttpReply) -> None:
        self._reply = reply

    async def __aenter__(self) -> HttpReply:
        return self._reply

    async def __aexit__(self, *_: object) -> None:
        await self._reply._end()


class HttpReply:
    """What the server answered.  It is read inside the block of its request, by one task."""

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
        """Whether all of it was read, so that nothing can be left."""
        return self._link.reader.done

    def leave(self) -> AbstractAsyncContextManager[HttpReply]:
        """A block for what is left of it, for another task to enter; that of the request ends without it."""
        self._left = True
        return _RestOfReply(self)

    async def _end(self) -> None:
        self._over = True
        if self._link.written and self._link.reader.reusable:
            await self._pool._keep(self._link)
        else:
            await self._link.close()

    async def read(self, limit: int) -> bytes:
        """The whole body.  Raises as `receive`, and `ReplyTooLong` once it is known to have more bytes than this.

        No checkpoint if all of it came with the head: to get that was one.
        """
        reader = self._link.reader
        parts: list[bytes] = []
        size = 0
        while True:
            if size + reader.length > limit:
                raise ReplyTooLong(
                    f"{self._name}: the reply is too long; {limit} bytes are allowed (Limits.message_bytes)"
                )
            parts.append(await self._receive())
            size += len(parts[-1])
            if reader.done and size <= limit:
                return b"".join(parts)

    async def receive(self) -> bytes:
        """What comes next of the body; nothing at its end.

        Raises `ReplyBroken` if it breaks off.  May be cancelled; nothing is lost by that inside the block.
        """
        if self._link.reader.ready:
            await trio.lowlevel.checkpoint()
        return await self._receive()

    async def _receive(self) -> bytes:
        if self._over:
            raise UsageError("the reply is over with the block of its request; read it there")
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
            raise RemoteProtocolError(f"the reply came packed as {shown(coding)}, though only identity was asked for")


class _PooledConnection:
    """One connection, and on it one request at a time."""

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
        """Whether nothing has come: the server has neither closed it nor said anything.

        A stream of another kind than TCP and TLS cannot be asked, and then the request finds out.  A late session
        ticket of TLS costs a connection, and no more.
        """
        stream = self._stream
        while isinstance(stream, trio.SSLStream):
            stream = stream.transport_stream
        return not (isinstance(stream, trio.SocketStream) and stream.socket.is_readable())

    async def ask(self, request: _PreparedRequest) -> ReplyHead:
        """Send it, and give the head of the reply.  Raises `RemoteProtocolError` if there is none."""
        self.reader = ReplyReader(self._limits, bodiless=request.bodiless)
        self.written = False
        if len(request.body) <= _PIECE:
            await self._write(request.head + request.body)
            if self.written:
                return await self._head()
            with trio.move_on_after(CLOSING):
                return await self._head()
            raise RemoteProtocolError(_NOT_TAKEN)
        # A server may refuse what is long before all of it has come, and read no more.
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
        """Send all of it, unless the server does not take it.  There may be a reply all the same, such as 413, but
        that has come by then, so that it need not be awaited for longer than `CLOSING` seconds."""
        for part in parts:
            if self._tap is not None:
                self._tap("out", bytes(part))
            try:
                if len(part) <= _SMALL and isinstance(self._stream, trio.SocketStream):
                    await self._stream.send_all(part)  # which does not have to wait for the server
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
            raise RemoteProtocolError("the connection was broken off") from error
        if self._tap is not None and data:
            self._tap("in", data)
        return data

    async def close(self) -> None:
        """Close it at once, also when cancelled: whoever closes several must get to the last."""
        with trio.CancelScope(shield=True, deadline=-math.inf):
            await self._stream.aclose()


_NOT_TAKEN = "the server has not taken all of the request, and gave no reply"
