"""A server by HTTP: where it listens, who finds a place, and how it ends.

    address = await nursery.start(serve_http, server)
    print(address.url)  # http://127.0.0.1:49152/mcp

`serve_http` makes one `Endpoint`, and a `HttpConnection` with a task of its own for each client.  What goes wrong with
a connection stays there; what goes wrong with listening is told when it begins, or else waited out: a process that has
no file descriptor left today may have one when a client leaves.

Where a server is reached from elsewhere, it must be said under which names: a page that has its own name point to this
address could talk to it otherwise (DNS rebinding).  So an address beyond loopback without `allowed_hosts`, or a
`public_url`, is an error from the start, and not a riddle for the first client.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import logging
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import attrs
import trio

from trio_mcp.core.errors import CannotServe, UsageError
from trio_mcp.core.http.verdicts import HttpRequest
from trio_mcp.core.shares import Shares, holder_of, to_make_room
from trio_mcp.server.driver import address_of
from trio_mcp.server.http.connection import HttpConnection, ListenerState
from trio_mcp.server.http.endpoint import Endpoint, HttpOptions, busy
from trio_mcp.server.run import Run
from trio_mcp.transport.duplex import Tap, keep_alive
from trio_mcp.transport.nursery import open_nursery

if TYPE_CHECKING:
    from trio_mcp.server.server import Server

__all__ = ["HttpAddress", "serve_http", "serve_http_stream"]

_log = logging.getLogger("trio_mcp")

Listener: TypeAlias = trio.abc.Listener[trio.abc.Stream]

# What accept says when there is too much of everything, and how long to wait then; as `trio.serve_listeners` has it.
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_AGAIN = 0.1
_LOOKED_AT = 1000  # idle connections, for one that makes room
# Connections beyond `Limits.connections` that are told so at the same time.  The others are closed without a word:
# else those that find no place would need more of it than those that do.
_TURNED_AWAY = 100
_PORTS = 10  # tries to find a port that is free for all addresses of one name


@attrs.frozen
class HttpAddress:
    """Where a server listens.  The URLs are those for clients: under `public_url`, if there is one.

    A server on a Unix socket has the URL that goes with any name for this machine, as in ``curl --unix-socket``.
    """

    url: str
    websocket_url: str | None
    sse_url: str | None
    """Of the old HTTP+SSE transport, where it is served."""
    local_url: str
    """`url` without `public_url`: where this machine listens."""
    listeners: tuple[Listener, ...] = attrs.field(repr=False)


async def serve_http(
    server: Server,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    listeners: Sequence[Listener] | None = None,
    unix: str | os.PathLike[str] | None = None,
    ssl_context: ssl.SSLContext | None = None,
    tap: Tap | None = None,
    task_status: trio.TaskStatus[HttpAddress] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[HttpOptions],
) -> None:
    """Serve by HTTP: on a port, on a Unix socket, or on listeners that there are; `nursery.start` gives the address.

    Port 0 is any free one.  `listeners` may be any of Trio's, are closed at the end, and are given instead of an
    address; a file of a dead server at `unix` is replaced.  With `ssl_context` each connection speaks TLS.  `options`
    are those of `HttpOptions`.  Inside `async with server.running()` this is part of that run.

    Returns when the run has ended or was drained (`server.draining`).  While it is, new requests are answered by 503;
    when no call is left that may wait for an answer of its client, nobody is listened to any more, connections without
    a request are closed, and the others after their response.  Raises UsageError, before anybody is served, for
    what cannot be served or would not be safe; never because of a client.  When cancelled, it closes everything; what
    is just being written may go on for a second.
    """
    if not isinstance(ssl_context, ssl.SSLContext | None):
        raise UsageError(f"ssl_context is an ssl.SSLContext, not {type(ssl_context).__name__}")
    given = [listeners is not None, unix is not None, (host, port) != ("127.0.0.1", 0)]
    if sum(given) > 1:
        raise UsageError("a server listens at a host and port, at a unix socket, or at listeners; give one")
    async with server.joined() as run:
        web = _HttpServer(run, options, tap)
        with contextlib.ExitStack() as undo:
            if listeners is not None:
                bound = list(listeners)
            elif unix is not None:
                bound = [undo.enter_context(_unix_listener(os.fspath(unix)))]
            else:
                bound = await _tcp_listeners(host, port)
            accepting = bound
            try:
                _check_exposure(bound, options, server)
                for each in bound:
                    keep_alive(each)  # which holds for what it accepts
                if ssl_context is not None:
                    accepting = [_secure(each, ssl_context) for each in bound]
                address = _address(web.endpoint, accepting, None if listeners is not None else host)
                await web.serve(accepting, lambda: task_status.started(address))
            finally:
                await _close(accepting)


async def serve_http_stream(
    server: Server, stream: trio.abc.Stream, *, tap: Tap | None = None, **options: Unpack[HttpOptions]
) -> None:
    """Serve one client by HTTP over any stream, as one of the connections of `serve_http`; the stream is closed then.

    Sessions end with it, for nobody else could reach them.
    """
    keep_alive(stream)
    try:
        async with server.joined() as run:
            await _HttpServer(run, options, tap).serve_stream(stream)
    finally:
        await trio.aclose_forcefully(stream)


class _HttpServer:
    """One server by HTTP, in one run; a `Connection` of it, whose clients its endpoint counts."""

    clients = 0

    def __init__(self, run: Run, options: HttpOptions, tap: Tap | None) -> None:
        self._run = run
        self._tap = tap
        self.endpoint = Endpoint(run, **options)
        path = self.endpoint.policy.websocket_path
        self._shared = ListenerState(self.endpoint, run.limits, tap=tap, websocket_path=path, upgraded=self._upgraded)
        self._connections: dict[HttpConnection, str | None] = {}  # with their holders
        self._shares = Shares(run.limits.connections)
        self._turned_away = 0
        self._scope = trio.CancelScope()
        self._accepting: set[trio.CancelScope] = set()
        self._changed = trio.lowlevel.ParkingLot()  # a listener or a connection has ended

    async def serve(self, listeners: Sequence[Listener], started: Callable[[], object]) -> None:
        async def listen(nursery: trio.Nursery) -> None:
            for listener in listeners:
                scope = trio.CancelScope()
                self._accepting.add(scope)
                nursery.start_soon(self._accept, listener, scope, nursery, name="HTTP: listening")
            if self._run.draining:
                self._hang_up()
            started()
            await self._all_gone()

        await self._take_part(listen)

    async def serve_stream(self, stream: trio.abc.Stream) -> None:
        async def serve(_nursery: trio.Nursery) -> None:
            connection = self._new(stream, address_of(stream))
            if self._run.draining:
                connection.drain()
            await self._serve(connection)

        await self._take_part(serve)

    async def _take_part(self, work: Callable[[trio.Nursery], Awaitable[None]]) -> None:
        self._run.connections[self] = None
        try:
            with self._scope:
                async with open_nursery() as nursery:
                    nursery.start_soon(self.endpoint.run, name="HTTP: signs of life")
                    nursery.start_soon(self._shared.run, name="HTTP: connections that idle")
                    nursery.start_soon(self._hurry, name="HTTP: the end")
                    await work(nursery)
        finally:
            self._run.connections.pop(self, None)

    async def _hurry(self) -> None:
        """Tell every connection when all of this is cancelled, which one that is writing cannot see."""
        try:
            await trio.sleep_forever()
        finally:
            for connection in self._connections:
                connection.hurry()

    # Connections.

    async def _accept(self, listener: Listener, scope: trio.CancelScope, nursery: trio.Nursery) -> None:
        full = False
        try:
            with scope, contextlib.suppress(trio.ClosedResourceError):  # its owner may close a listener at any time
                async with listener:
                    while True:
                        try:
                            stream = await listener.accept()
                        except OSError as error:
                            if error.errno not in _FULL:
                                raise
                            if not full:
                                _log.warning("new connections have to wait: %s", error.strerror)
                            full = True
                            await trio.sleep(_AGAIN)
                        else:
                            full = False
                            self._welcome(stream, nursery)
        finally:
            self._accepting.discard(scope)
            self._changed.unpark_all()

    def _welcome(self, stream: trio.abc.Stream, nursery: trio.Nursery) -> None:
        peer = address_of(stream)
        if self._make_room(holder_of(None, peer)):
            nursery.start_soon(self._serve, self._new(stream, peer), name="HTTP: a connection")
        elif self._turned_away < _TURNED_AWAY:
            self._turned_away += 1
            nursery.start_soon(self._turn_away, stream, name="HTTP: one connection too many")
        else:
            nursery.start_soon(trio.aclose_forcefully, stream)

    def _make_room(self, holder: str | None) -> bool:
        """Whether this holder may have one more, be it in the place of one that was idle for longest."""
        if self._shares.fits(holder):
            return True
        if (found := to_make_room(self._shares, holder, self._idle())) is not None:
            self._forget(found)  # before it has ended, which takes a moment
            found.expire()
        return self._shares.fits(holder)

    def _idle(self) -> Iterator[tuple[HttpConnection, str | None]]:
        """Some connections that idle, from the one that does so for longest."""
        for each in tuple(itertools.islice(self._shared.idle, _LOOKED_AT)):
            if each.busy:
                self._shared.idle.forget(each)  # so that it is not in the way of others the next time
            elif each in self._connections:
                yield each, self._connections[each]

    def _new(self, stream: trio.abc.Stream, peer: str | None) -> HttpConnection:
        connection = HttpConnection(self._shared, stream, peer)
        holder = self._connections[connection] = holder_of(None, peer)
        self._shares.take(holder)
        return connection

    def _forget(self, connection: HttpConnection) -> None:
        if connection in self._connections:
            self._shares.give(self._connections.pop(connection))

    async def _serve(self, connection: HttpConnection) -> None:
        try:
            await connection.serve()
        except Exception:
            if self._tap is not None:
                raise  # who taps hears of it
            _log.exception("a connection has failed, which costs the others nothing")
        finally:
            self._forget(connection)
            self._changed.unpark_all()

    async def _turn_away(self, stream: trio.abc.Stream) -> None:
        most = self._run.limits.connections
        try:
            await HttpConnection(self._shared, stream, address_of(stream)).serve(
                busy(503, f"{most} connections are open; try again later (Limits.connections)")
            )
        finally:
            self._turned_away -= 1

    async def _upgraded(self, stream: trio.abc.Stream, request: HttpRequest, trailing: bytes, peer: str | None) -> None:
        from trio_mcp.server.http.websocket import serve_upgrade  # with wsproto, which most servers never need

        await serve_upgrade(self._run, self.endpoint, stream, request, trailing, peer=peer, tap=self._tap)

    # As a connection of the run.

    async def drain(self) -> None:
        # Until then nothing new is served, but calls that run may wait for what their clients have yet to bring.
        self._shared.draining = True
        await self.endpoint.drain()
        self._hang_up()
        await self._all_gone()

    def abort_pending(self) -> None:
        """What runs is its endpoint's."""

    def stop(self) -> None:
        self._scope.cancel(reason="the server has stopped")

    def _hang_up(self) -> None:
        """No further connection, and no further request."""
        for scope in self._accepting:
            scope.cancel(reason="the server is shutting down")
        for connection in self._connections:
            connection.drain()

    async def _all_gone(self) -> None:
        while self._accepting or self._connections:
            await self._changed.park()


# Listening.


async def _tcp_listeners(host: str, port: int) -> list[Listener]:
    if not isinstance(host, str) or not host or host.count(":") == 1:  # of which IPv6 has more
        raise UsageError(f"host is a name or an address of this machine, without the port; not {host!r}")
    if type(port) is not int or not 0 <= port < 2**16:
        raise UsageError(f"port is a number up to 65535, or 0 for any that is free; not {port!r}")
    tries = _PORTS if port == 0 else 1
    while True:
        tries -= 1
        try:
            bound = await trio.open_tcp_listeners(port, host=host)
            if port == 0 and len(bound) > 1:
                # A name with several addresses.  Each has got a free port of its own; the first shall do for all.
                same: int = bound[0].socket.getsockname()[1]
                await _close(bound)
                bound = await trio.open_tcp_listeners(same, host=host)
            return list(bound)
        except OSError as error:
            if not tries or error.errno != errno.EADDRINUSE:
                raise _cannot_listen(f"{_bracketed(host)}:{port}", error) from error


async def _close(listeners: Sequence[Listener]) -> None:
    with trio.CancelScope(shield=True):  # nothing of it takes time, and each is to be closed
        for each in listeners:
            await trio.aclose_forcefully(each)


_ADVICE = {
    errno.EADDRINUSE: "another program listens there; stop it, or choose another port (0 is any that is free)",
    errno.EACCES: "the system does not allow it; choose a port from 1024 on, or a directory that is yours",
    errno.EADDRNOTAVAIL: "this machine has no such address; choose one that it has, such as 127.0.0.1",
}


def _cannot_listen(where: str, error: OSError) -> CannotServe:
    advice = _ADVICE.get(error.errno or 0, "choose another place")
    if isinstance(error, socket.gaierror):  # whose numbers are others
        advice = "no such name is known; choose one of this machine, or an address such as 127.0.0.1"
    return CannotServe(f"cannot listen at {where}: {error.strerror or error}; {advice}")


@contextlib.contextmanager
def _unix_listener(path: str) -> Iterator[Listener]:
    """Listens at a socket file, which is there as long as the block, and may be reached as the umask allows."""
    if not hasattr(socket, "AF_UNIX"):
        raise UsageError("this system has no Unix sockets; listen at a host and port")
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        try:
            _remove_what_is_dead(path)
            ours.bind(path)
            made = os.lstat(path)
            ours.listen(128)
        except OSError as error:
            raise _cannot_listen(path, error) from error
        try:
            yield trio.SocketListener(trio.socket.from_stdlib_socket(ours))
        finally:
            with contextlib.suppress(OSError):  # whoever has removed it has done our work
                if os.path.samestat(os.lstat(path), made):
                    os.unlink(path)


def _remove_what_is_dead(path: str) -> None:
    """Remove the socket of a server that did not end in good order."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise CannotServe(f"cannot listen at {path}: there is a file that is no socket; choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except BlockingIOError:
            pass  # somebody listens, and is busy: it will be said by `bind`


def _secure(listener: Listener, context: ssl.SSLContext) -> Listener:
    # Browsers and most other clients do not wait for the end of TLS before they close: https_compatible.
    return trio.SSLListener(listener, context, https_compatible=True)


# Addresses.


def _name(listener: Listener) -> Any:
    """What the system calls the socket of this listener; None where it has none."""
    inner = listener.transport_listener if isinstance(listener, trio.SSLListener) else listener
    return inner.socket.getsockname() if isinstance(inner, trio.SocketListener) else None


def _check_exposure(bound: Sequence[Listener], options: HttpOptions, server: Server) -> None:
    named = server.protection is not None and server.protection.host is not None
    if named or "allowed_hosts" in options or "public_url" in options:
        return
    for listener in bound:
        name = _name(listener)
        if isinstance(name, tuple) and not ipaddress.ip_address(name[0].partition("%")[0]).is_loopback:
            raise UsageError(
                f"{name[0]} can be reached from other machines; say under which names, by allowed_hosts such as "
                "['mcp.example.com'], or by public_url"
            )


def _address(endpoint: Endpoint, accepting: Sequence[Listener], host: str | None) -> HttpAddress:
    policy = endpoint.policy
    name = _name(accepting[0]) if accepting else None
    scheme = "https" if accepting and isinstance(accepting[0], trio.SSLListener) else "http"
    at = f"{_bracketed(host or name[0])}:{name[1]}" if isinstance(name, tuple) else "localhost"
    local = f"{scheme}://{at}"
    base = local if endpoint.public_url is None else endpoint.public_url
    path = policy.path or "/"
    return HttpAddress(
        base + path,
        None if policy.websocket_path is None else "ws" + base.removeprefix("http") + (policy.websocket_path or "/"),
        None if policy.sse_path is None else base + (policy.sse_path or "/"),
        local + path,
        tuple(each.transport_listener if isinstance(each, trio.SSLListener) else each for each in accepting),
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
