"""A server over HTTP: accepting connections up to the limit, and shutting down.

    address = await nursery.start(serve_http, server)
    print(address.url)  # http://127.0.0.1:49152/mcp

`sockets` opens the listeners.  `serve_http` makes one `Endpoint`, and for each client an `HttpConnection` with its own
task.  A failure of a connection does not affect the others.  A failure to listen is raised at the start.  Later
failures to accept are retried, because a process without free file descriptors gets one when a client disconnects.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Unpack

import attrs
import trio

from trio_mcp.core.errors import UsageError
from trio_mcp.core.http.fields import HttpRequest
from trio_mcp.core.options import show_options
from trio_mcp.core.shares import Shares, holder_of
from trio_mcp.core.turns import to_make_room
from trio_mcp.server.http.connection import HttpConnection, ListenerState, has_input
from trio_mcp.server.http.endpoint import Endpoint, open_endpoint, try_later
from trio_mcp.server.http.options import HttpOptions
from trio_mcp.server.http.sockets import (
    Listener,
    bracketed,
    check_exposure,
    ignore_new,
    listener_of,
    socket_name,
    socket_under,
    tcp_listeners,
    unix_socket,
)
from trio_mcp.server.run import Run
from trio_mcp.server.session import address_of
from trio_mcp.transport.nursery import block, open_nursery
from trio_mcp.transport.wire import Tap, keep_alive

if TYPE_CHECKING:
    from trio_mcp.server.server import Server

__all__ = ["HttpAddress", "HttpService", "leave_to_others", "serve_http", "serve_http_stream"]

_log = logging.getLogger("trio_mcp")

# The errors of accept when the system is out of resources, and the pause before the next try, as in
# `trio.serve_listeners`.
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_RETRY_PAUSE = 0.1
_SETTLE = 1.0  # seconds for a request that was sent before its client knew that this process leaves
_HANDSHAKE = 0.02  # seconds for a connection that a proxy nearby has begun to open
_LOOKED_AT = 1000  # idle connections to look at for one to close
# Connections beyond `Limits.connections` that get a 503 reply at the same time.  Further ones are closed without a
# reply; otherwise refused connections could use more memory than accepted ones.
_MAX_REFUSING = 100


@attrs.frozen
class HttpAddress:
    """The addresses of a running server.  The URLs are for clients, so they begin with `public_url` if it is given.

    The URL of a server on a Unix socket has the host localhost, as in ``curl --unix-socket``.
    """

    url: str
    websocket_url: str | None
    sse_url: str | None
    """The URL of the old HTTP+SSE transport; None if it is off."""
    local_url: str
    """The URL at which this machine listens, without `public_url`."""
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
    """Serve over HTTP on a TCP port, on a Unix socket, or on existing listeners.

    Start it with `nursery.start`, which returns the `HttpAddress`.  Port 0 means any free port.  `unix` is the path of
    a Unix socket; the socket file of a dead server is replaced.  `listeners` are Trio listeners, given instead of an
    address; they are closed at the end.  With `ssl_context` all connections use TLS.  For `options` see `HttpOptions`.
    Inside ``async with server.running()`` it joins that run.

    Returns when the run has ended or was drained (`server.draining`).  During the drain new requests are refused with
    503.  When no call is left, the listeners are closed, then idle connections, then the others after their responses.
    Cancellation is safe: it closes all connections, and current writes have one more second.

    Raises UsageError or CannotServe before the first client is served, if the server cannot listen, an option is
    invalid, a public address has no `allowed_hosts`, or a replica has other `state_keys`.  Never raises because of a
    client.
    """
    if not isinstance(ssl_context, ssl.SSLContext | None):
        raise UsageError(f"ssl_context must be an ssl.SSLContext, got {type(ssl_context).__name__}")
    given = [listeners is not None, unix is not None, (host, port) != ("127.0.0.1", 0)]
    if sum(given) > 1:
        raise UsageError("give only one of host and port, unix, and listeners")
    if not any(given[:2]):
        # Before the lifespan starts and replicas are joined.  The addresses of a name are checked when it is resolved.
        check_exposure([(host, port)], options, server)
    async with server._joined() as run:
        await run.share()
        http_server = HttpService(run, options, tap)
        with contextlib.ExitStack() as undo:
            if listeners is not None:
                bound = list(listeners)
            elif unix is not None:
                bound = [listener_of(undo.enter_context(unix_socket(os.fspath(unix))))]
            else:
                bound = await tcp_listeners(host, port)
            accepting = bound
            try:
                check_exposure([socket_name(each) for each in bound], options, server)
                for each in bound:
                    keep_alive(each)  # accepted sockets inherit it
                if ssl_context is not None:
                    # https_compatible, because browsers and most other clients close without a TLS close_notify.
                    accepting = [trio.SSLListener(each, ssl_context, https_compatible=True) for each in bound]
                address = _address(http_server.endpoint, accepting, None if listeners is not None else host)
                await http_server.serve(accepting, lambda: task_status.started(address), alone=listeners is None)
            finally:
                with trio.CancelScope(shield=True):  # closes all of them, and takes no time
                    for each in accepting:
                        await trio.aclose_forcefully(each)


async def serve_http_stream(
    server: Server, stream: trio.abc.Stream, *, tap: Tap | None = None, **options: Unpack[HttpOptions]
) -> None:
    """Serve one HTTP connection over any Trio stream, as `serve_http` does for each of its connections.

    Returns when the connection has ended, and closes the stream.  Its sessions end with it, because no other connection
    could reach them.  Raises UsageError for an invalid option; never raises because of the client.
    """
    keep_alive(stream)
    try:
        async with server._joined() as run:
            await run.share()
            await HttpService(run, options, tap).serve_stream(stream)
    finally:
        await trio.aclose_forcefully(stream)


show_options(serve_http, HttpOptions)
show_options(serve_http_stream, HttpOptions)


async def leave_to_others(server: Server, seconds: float) -> None:
    """Let other processes that share the store of this server have all new connections; see `HttpService.leave`.

    Returns at once if there are no others.
    """
    services = [each for run in server._runs if run.replica is not None for each in run.connections]
    async with trio.open_nursery() as nursery:
        for each in services:
            if isinstance(each, HttpService):
                nursery.start_soon(each.leave, seconds)


@block
async def _in_run(stack: contextlib.AsyncExitStack, server: HttpService) -> trio.Nursery:
    """Serve as a connection of the run for the duration of the block.  Returns the nursery of the service."""
    server._run.connections[server] = None
    stack.callback(server._run.connections.pop, server, None)
    stack.enter_context(server._scope)
    nursery = await stack.enter_async_context(open_nursery())
    nursery.start_soon(server.endpoint.run, name="HTTP: keep-alives")
    nursery.start_soon(server.run, name="HTTP: idle connections")
    nursery.start_soon(server._hurry, name="HTTP: shutdown")
    return nursery


class HttpService(ListenerState):
    """The HTTP service of one server in one run.  The run sees it as one connection."""

    clients = 0  # the endpoint counts them

    def __init__(self, run: Run, options: HttpOptions, tap: Tap | None) -> None:
        endpoint = open_endpoint(run, options)
        path = endpoint.policy.websocket_path
        super().__init__(endpoint, run.limits, tap=tap, websocket_path=path, upgraded=self._upgraded)
        self._run = run
        self._connections: dict[HttpConnection, str | None] = {}  # the values are their holders
        self._shares = Shares(run.limits.connections)
        self._refusing = 0
        self._scope = trio.CancelScope()
        self._listening: Sequence[Listener] = ()
        self._alone = False  # no other process accepts from the same sockets
        self._leaving = False  # calls may run, or wait for their clients, without a connection
        self._accepting: set[trio.CancelScope] = set()
        self._changed = trio.lowlevel.ParkingLot()  # a listener or a connection has ended

    async def serve(self, listeners: Sequence[Listener], started: Callable[[], object], *, alone: bool = False) -> None:
        async with _in_run(self) as nursery:
            self._listening, self._alone = listeners, alone
            for listener in listeners:
                scope = trio.CancelScope()
                self._accepting.add(scope)
                nursery.start_soon(self._accept, listener, scope, nursery, name="HTTP: listening")
            if self._run.draining:
                self._stop_accepting()
            started()
            await self._all_closed()

    async def serve_stream(self, stream: trio.abc.Stream) -> None:
        async with _in_run(self):
            connection = self._new(stream, address_of(stream))
            if self._run.draining:
                connection.drain()
            await connection.serve()

    async def _hurry(self) -> None:
        """Wait for cancellation, then call `hurry` on all connections: a write cannot notice the cancellation."""
        try:
            await trio.sleep_forever()
        finally:
            for connection in self._connections:
                connection.hurry()

    # Connections.

    async def _accept(self, listener: Listener, scope: trio.CancelScope, nursery: trio.Nursery) -> None:
        full, supervised = False, self._run.server._supervised
        try:
            # The owner of a listener may close it at any time.
            with scope, contextlib.suppress(trio.ClosedResourceError):
                async with listener:
                    while True:
                        try:
                            if supervised is not None:
                                await supervised.turn(listener, self._connections.__len__)
                            stream = await listener.accept()
                        except OSError as error:
                            if error.errno not in _OUT_OF_RESOURCES:
                                raise
                            if not full:
                                _log.warning("cannot accept new connections, retrying: %s", error.strerror)
                            full = True
                            await trio.sleep(_RETRY_PAUSE)
                        else:
                            full = False
                            self._accept_connection(stream, nursery)
        finally:
            self._accepting.discard(scope)
            self._changed.unpark_all()

    def _accept_connection(self, stream: trio.abc.Stream, nursery: trio.Nursery) -> None:
        peer = address_of(stream)
        if self._make_room(holder_of(None, peer)):
            nursery.start_soon(self._new(stream, peer).serve, name="HTTP: a connection")
        elif self._refusing < _MAX_REFUSING:
            self._refusing += 1
            nursery.start_soon(self._refuse_connection, stream, name="HTTP: one connection too many")
        else:
            nursery.start_soon(trio.aclose_forcefully, stream)

    def _make_room(self, holder: str | None) -> bool:
        """Whether this holder may have one more connection.  If needed, close the connection that is idle for
        longest."""
        if self._shares.fits(holder):
            return True
        if (found := to_make_room(self._shares, holder, self._idle())) is not None:
            self._forget(found)  # at once, because its task takes a moment to end
            found.expire()
        return self._shares.fits(holder)

    def _idle(self) -> Iterator[tuple[HttpConnection, str | None]]:
        """Idle connections with their holders, from the one that is idle for longest."""
        for each in tuple(itertools.islice(self.idle, _LOOKED_AT)):
            if each.busy:
                self.idle.forget(each)  # so that the next search does not look at it
            elif each in self._connections:
                yield each, self._connections[each]

    def _new(self, stream: trio.abc.Stream, peer: str | None) -> HttpConnection:
        connection = HttpConnection(self, stream, peer)
        holder = self._connections[connection] = holder_of(None, peer)
        self._shares.take(holder)
        return connection

    def _forget(self, connection: HttpConnection) -> None:
        if connection in self._connections:
            self._shares.give(self._connections.pop(connection))

    def ended(self, connection: HttpConnection) -> None:
        self._forget(connection)
        self._changed.unpark_all()

    def failed(self, error: Exception) -> None:
        if self.tap is not None:
            raise error  # a program with a tap gets the exceptions of that tap
        _log.error("a connection has failed; the others continue", exc_info=error)

    async def _refuse_connection(self, stream: trio.abc.Stream) -> None:
        why = f"{self.limits.connections} connections are open; try again later (Limits.connections)"
        try:
            await HttpConnection(self, stream, address_of(stream)).serve(try_later(503, why))
        finally:
            self._refusing -= 1

    async def _upgraded(self, stream: trio.abc.Stream, request: HttpRequest, trailing: bytes, peer: str | None) -> None:
        from trio_mcp.server.http.websocket import serve_upgrade  # imports wsproto, which most servers never need

        await serve_upgrade(self._run, self.endpoint, stream, request, trailing, peer=peer, tap=self.tap)

    # As a connection of the run.

    async def drain(self) -> None:
        # Keep the listeners open until the endpoint is drained: running calls may wait for answers of their clients,
        # which come in new requests.
        self.draining = True
        await self.endpoint.drain()
        self._stop_accepting()
        await self._all_closed()

    async def leave(self, seconds: float) -> None:
        """Accept no further connection, because other processes accept them, and finish those that are open.

        For at most `seconds` requests are still served.  Each response is the last of its connection.  A connection
        that waits for a request is closed after `_SETTLE` seconds: a request may be on its way, and would be lost.
        """
        self.draining = self.endpoint.leaving = self._leaving = True
        # The system resets connections that wait to be accepted when the last process closes their listener.
        sockets = [found for each in self._listening if (found := socket_under(each)) is not None]
        if self._alone:
            for listening in sockets:
                ignore_new(listening)
        with trio.move_on_after(_SETTLE):
            await trio.sleep(_HANDSHAKE)
            while any(map(has_input, sockets)):
                await trio.lowlevel.checkpoint()
        # In the same step: until the cancelled tasks close the listeners, more connections would come.
        for listening in sockets:
            listening.close()
        self._stop_listening()
        while self._accepting:  # one of them may have a connection that is not yet among ours
            await self._changed.park()
        settled = trio.current_time() + _SETTLE
        with trio.move_on_after(seconds):
            while self._is_busy() or (self._connections and trio.current_time() < settled):
                await trio.sleep(_SETTLE / 4)
                while (idle := self.idle.expired(self.limits.idle_seconds - _SETTLE)) is not None:
                    if not idle.owes_response:
                        idle.expire()
        self._stop_accepting()  # in the step that finds nothing to do: a later request would be refused
        await self.endpoint.cut_subscriptions()
        self._leaving = False
        self._changed.unpark_all()

    def _is_busy(self) -> bool:
        """Whether calls run, or wait for their client, or requests are being read."""
        owes = any(connection.owes_response for connection in self._connections)
        return bool(owes or self._run.running.held or self._run.awaits_retries)

    def abort_pending(self) -> None:
        """Do nothing: the endpoint owns all running calls."""

    def stop(self) -> None:
        self._scope.cancel(reason="the server has stopped")

    def _stop_accepting(self) -> None:
        """Accept no further connection and no further request."""
        self._stop_listening()
        for connection in self._connections:
            connection.drain()

    def _stop_listening(self) -> None:
        for scope in self._accepting:
            scope.cancel(reason="the server is shutting down")

    async def _all_closed(self) -> None:
        while self._accepting or self._connections or self._leaving:
            await self._changed.park()


def _address(endpoint: Endpoint, accepting: Sequence[Listener], host: str | None) -> HttpAddress:
    policy = endpoint.policy
    name = socket_name(accepting[0]) if accepting else None
    scheme = "https" if accepting and isinstance(accepting[0], trio.SSLListener) else "http"
    at = f"{bracketed(host or name[0])}:{name[1]}" if isinstance(name, tuple) else "localhost"
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
