"""Serve one client over one byte stream.

A `Duplex` reads and writes the stream, and a `ServerSession` handles the messages.  Handlers that report progress or
log wait for room on the wire.  A call that has ended still counts as running until there is room for its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio

from trio_mcp.core.errors import check_seconds
from trio_mcp.core.messages import Message
from trio_mcp.core.revisions import NOTHING
from trio_mcp.core.session import SessionProtocol
from trio_mcp.core.shares import Account, holder_of
from trio_mcp.server.conversation import UNFINISHED, ServerSession
from trio_mcp.server.run import Run
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.wire import CLOSING, Duplex, Framing, Lines, Tap, close_stream, keep_alive

if TYPE_CHECKING:
    from trio_mcp.server.server import Server

__all__ = ["address_of", "converse", "serve_stream", "socket_of"]


def socket_of(stream: trio.abc.Stream) -> trio.SocketStream | None:
    """The socket under a stream; None if it has none."""
    inner = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    return inner if isinstance(inner, trio.SocketStream) else None


def address_of(stream: trio.abc.Stream) -> str | None:
    """The IP address of the client; None if it has none, as on a Unix socket or a pipe."""
    if (inner := socket_of(stream)) is not None:
        with suppress(OSError):  # the client has gone already
            name = inner.socket.getpeername()
            return str(name[0]) if isinstance(name, tuple) else None
    return None


async def serve_stream(
    server: Server, stream: trio.abc.Stream, *, shutdown_timeout: float = 5.0, tap: Tap | None = None
) -> None:
    """Serve one client over a byte stream, one message on a line, then close the stream.

    `stream` is any Trio stream: a socket, a pipe, `trio.testing.memory_stream_pair`.  Inside ``async with
    server.running()`` all connections share one run; otherwise this connection has its own run, with its own lifespan.

    A client that closes its side of the stream may still read, as in ``printf ... | python server.py``.  Calls that run
    then have `shutdown_timeout` seconds to finish (`math.inf`: without a limit), and are answered.  Questions to the
    client fail at once.  A stream without half-close, such as TLS, ends as a whole.

    Returns when the client has gone, or the shared run has ended, and all handlers have ended.  A client that goes away
    raises no exception.  Exceptions of the lifespan, of `tap` and of `stream` pass through unchanged.  Raises
    `UsageError` if `shutdown_timeout` is not a number of seconds.

    It is safe to cancel: handlers are cancelled, and a line that was begun is finished.
    """
    check_seconds("shutdown_timeout", shutdown_timeout)
    keep_alive(stream)
    try:
        async with server._joined() as run:
            account = run.bytes.account(holder_of(None, address_of(stream)))
            network = socket_of(stream) is not None
            await converse(
                run,
                stream,
                Lines(run.limits),
                tap=tap,
                network=network,
                account=account,
                shutdown_timeout=shutdown_timeout,
            )
    finally:
        await close_stream(stream, trio.current_time() + CLOSING)  # if the server could not start, it is open still


async def converse(
    run: Run,
    stream: trio.abc.Stream,
    framing: Framing,
    *,
    tap: Tap | None = None,
    headers: Mapping[str, str] = NOTHING,
    principal: Any = None,
    heartbeat: float | None = None,
    network: bool = False,
    account: Account | None = None,
    shutdown_timeout: float | None = None,
) -> None:
    """Serve one client in an existing run, with any framing, then close the stream.

    `headers` and `principal` hold for every message.  After `heartbeat` seconds without a byte the client is pinged,
    and after as many seconds more the connection is closed.  With `network`, a client that does not read, or does not
    finish a message, is disconnected.  `account` is charged for the bytes that the server holds for the client.
    Without `shutdown_timeout` the end of input ends the connection, as in framings that have a close message.
    """
    account = run.bytes.account(None) if account is None else account
    await _StreamClient(run, stream, framing, tap, headers, principal, account, shutdown_timeout).serve(
        heartbeat, network
    )


class _StreamClient:
    """One client on a byte stream: the `SessionHandler` of its `Duplex`, and a `RunMember` of its run."""

    clients = 1

    def __init__(
        self,
        run: Run,
        stream: trio.abc.Stream,
        framing: Framing,
        tap: Tap | None,
        headers: Mapping[str, str],
        principal: Any,
        account: Account,
        shutdown_timeout: float | None,
    ) -> None:
        self._run = run
        self._shutdown_timeout = shutdown_timeout
        self._headers = headers
        self._principal = principal
        self._framing = framing
        finish = None if shutdown_timeout is None else self._finish
        self._duplex = Duplex(
            self, stream, framing, run.limits, nursery=run.nursery, tap=tap, account=account, input_ended=finish
        )
        self._server_session = ServerSession(run, self._duplex, account=account)
        self.session: SessionProtocol = self._server_session.session
        self._over = trio.Event()

    async def serve(self, heartbeat: float | None, network: bool) -> None:
        self._run.connections[self] = None
        try:
            async with open_nursery() as nursery:
                if self._run.draining:
                    nursery.start_soon(self._drained)
                await self._duplex.run(heartbeat, network=network)
        finally:
            with trio.CancelScope(shield=True):
                await self._server_session.quiet()
            self._run.connections.pop(self, None)
            self._over.set()
        if self._duplex.failure is not None:
            raise self._duplex.failure

    # The methods of a `SessionHandler`.

    def receive(self, message: Message, now: float) -> None:
        self._server_session.receive(
            message, now, headers=self._headers, principal=self._principal, size=self._framing.size
        )

    def release(self) -> None:
        self._server_session.release()

    def connection_lost(self, why: str) -> None:
        self._server_session.connection_lost(why)

    async def _finish(self) -> None:
        """The client has closed its side: give its calls `shutdown_timeout` seconds, and answer them."""
        self._server_session.input_ended()
        assert self._shutdown_timeout is not None
        with trio.move_on_after(self._shutdown_timeout):
            await self._all_answered()
            return
        why = f"this call had not finished {self._shutdown_timeout:g} seconds after the end of the client's input"
        self._server_session.abort_pending(why)
        with trio.move_on_after(CLOSING):
            await self._all_answered()

    async def _all_answered(self) -> None:
        await self._server_session.quiet()
        await self._duplex.empty()

    # The methods of a `RunMember`.

    async def drain(self) -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(self._drained)
            await self._over.wait()

    async def _drained(self) -> None:
        await self._server_session.drain()
        await self._duplex.end()

    def abort_pending(self) -> None:
        self._server_session.abort_pending(UNFINISHED)

    def stop(self) -> None:
        self._server_session.stop()
