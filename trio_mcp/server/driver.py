"""One client of a running server over one byte stream.

The link is a `Duplex`, and what is said by it a `ServerSession`.  Those who report progress or log wait for room on the
wire, and a call that has ended keeps its place among the running ones until there is room again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio

from trio_mcp.core.errors import check_seconds
from trio_mcp.core.jsonrpc import Message
from trio_mcp.core.session import SessionProtocol
from trio_mcp.core.shares import Account, holder_of
from trio_mcp.core.terms import NOTHING
from trio_mcp.server.conversation import UNFINISHED, ServerSession
from trio_mcp.server.run import Run
from trio_mcp.transport.duplex import Duplex, Framing, Lines, Tap, close, keep_alive
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.outbox import CLOSING

if TYPE_CHECKING:
    from trio_mcp.server.server import Server

__all__ = ["address_of", "converse", "serve_stream", "socket_of"]


def socket_of(stream: trio.abc.Stream) -> trio.SocketStream | None:
    """The socket below a stream, if that is what is below."""
    inner = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    return inner if isinstance(inner, trio.SocketStream) else None


def address_of(stream: trio.abc.Stream) -> str | None:
    """The address of the client, if it has one that tells it from others."""
    if (inner := socket_of(stream)) is not None:
        with suppress(OSError):  # it has gone already
            name = inner.socket.getpeername()
            return str(name[0]) if isinstance(name, tuple) else None
    return None


async def serve_stream(
    server: Server, stream: trio.abc.Stream, *, shutdown_timeout: float = 5.0, tap: Tap | None = None
) -> None:
    """Serve one client over a byte stream, one message a line, until it ends; the stream is closed then.

    Any stream will do: a socket, a pipe, `trio.testing.memory_stream_pair`.  Inside `async with server.running()` all
    connections share that run; otherwise this one has a run of its own, with its own lifespan.

    A client that closes its side of the stream may still read, as in ``printf ... | python server.py``.  Calls that run
    then have `shutdown_timeout` seconds to finish (`math.inf`: as long as they take), and are answered; questions to
    the client fail at once.  A stream with no sides of its own, as one by TLS, ends as a whole.

    Returns when the client, or the run that it shares, has gone and all its handlers have ended; never raises because
    of it.  What the lifespan, `tap` or `stream` raise otherwise leaves it unchanged.  May be cancelled at any time:
    handlers are cancelled, and a line that was begun is finished.
    """
    check_seconds("shutdown_timeout", shutdown_timeout)
    keep_alive(stream)
    try:
        async with server.joined() as run:
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
        await close(stream, trio.current_time() + CLOSING)  # a server that could not begin has not closed it


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
    """As `serve_stream`, in a run that there is, with any framing; the stream is closed at the end.

    `headers` and `principal` are those of every message.  After `heartbeat` seconds without a byte the client is asked
    for a sign of life, and after as many more it is given up; on a `network` it has to read, and to finish the messages
    that it has begun.  What it makes the server hold is in its `account`.  Without `shutdown_timeout` the end of
    input is the end of the link, as where the framing has an end of its own.
    """
    account = run.bytes.account(None) if account is None else account
    await _StreamClient(run, stream, framing, tap, headers, principal, account, shutdown_timeout).serve(
        heartbeat, network
    )


class _StreamClient:
    """The client at the other end; a `Talk` for its link, and a `Connection` of its run."""

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
        self._conversation = ServerSession(run, self._duplex.wire, account=account)
        self.session: SessionProtocol = self._conversation.session
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
                await self._conversation.quiet()
            self._run.connections.pop(self, None)
            self._over.set()
        if self._duplex.wire.failure is not None:
            raise self._duplex.wire.failure

    # As its link has it.

    def receive(self, message: Message, now: float) -> None:
        self._conversation.receive(
            message, now, headers=self._headers, principal=self._principal, size=self._framing.size
        )

    def release(self) -> None:
        self._conversation.release()

    def connection_lost(self, why: str) -> None:
        self._conversation.connection_lost(why)

    async def _finish(self) -> None:
        """The client sends nothing more: its calls may finish in their time, and are answered."""
        self._conversation.input_ended()
        assert self._shutdown_timeout is not None
        with trio.move_on_after(self._shutdown_timeout):
            await self._all_said()
            return
        why = f"this call had not finished {self._shutdown_timeout:g} seconds after the end of the client's input"
        self._conversation.abort_pending(why)
        with trio.move_on_after(CLOSING):
            await self._all_said()

    async def _all_said(self) -> None:
        await self._conversation.quiet()
        await self._duplex.wire.empty()

    # As a connection of its run.

    async def drain(self) -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(self._drained)
            await self._over.wait()

    async def _drained(self) -> None:
        await self._conversation.drain()
        await self._duplex.end()

    def abort_pending(self) -> None:
        self._conversation.abort_pending(UNFINISHED)

    def stop(self) -> None:
        self._conversation.stop()
