"""One client of a running server over one byte stream.

The link is a `Duplex`, and what is said by it a `Conversation`.  Those who report progress or log wait for room on the
wire, and a call that has ended keeps its place among the running ones until there is room again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import trio

from trio_mcp.conversation import UNFINISHED, Conversation
from trio_mcp.core.jsonrpc import Message
from trio_mcp.core.session import Session
from trio_mcp.core.terms import NOTHING
from trio_mcp.duplex import Duplex, Framing, Lines, Tap, close
from trio_mcp.groups import open_nursery
from trio_mcp.outbox import CLOSING
from trio_mcp.running import Run

if TYPE_CHECKING:
    from trio_mcp.server import Server

__all__ = ["converse", "serve_stream"]


async def serve_stream(server: Server, stream: trio.abc.Stream, *, tap: Tap | None = None) -> None:
    """Serve one client over a byte stream, one message a line, until it ends; the stream is closed then.

    Any stream will do: a socket, a pipe, `trio.testing.memory_stream_pair`.  Inside `async with server.running()` all
    connections share that run; otherwise this one has a run of its own, with its own lifespan.

    Returns when the client, or the run that it shares, has gone and all its handlers have ended; never raises because
    of it.  What the lifespan, `tap` or `stream` raise otherwise leaves it unchanged.  May be cancelled at any time:
    handlers are cancelled, and a line that was begun is finished.
    """
    try:
        async with server.joined() as run:
            await converse(run, stream, Lines(run.limits), tap=tap)
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
) -> None:
    """As `serve_stream`, in a run that there is, with any framing; the stream is closed at the end.

    `headers` and `principal` are those of every message.  After `heartbeat` seconds without a byte the client is asked
    for a sign of life, and after as many more it is given up.
    """
    await _Client(run, stream, framing, tap, headers, principal).serve(heartbeat)


class _Client:
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
    ) -> None:
        self._run = run
        self._headers = headers
        self._principal = principal
        self._duplex = Duplex(self, stream, framing, run.limits, nursery=run.nursery, tap=tap)
        self._conversation = Conversation(run, self._duplex.wire)
        self.session: Session = self._conversation.session
        self._over = trio.Event()

    async def serve(self, heartbeat: float | None) -> None:
        self._run.connections.add(self)
        try:
            async with open_nursery() as nursery:
                if self._run.draining:
                    nursery.start_soon(self._drained)
                await self._duplex.run(heartbeat)
        finally:
            with trio.CancelScope(shield=True):
                await self._conversation.quiet()
            self._run.connections.discard(self)
            self._over.set()
        if self._duplex.wire.failure is not None:
            raise self._duplex.wire.failure

    # As its link has it.

    def hear(self, message: Message, now: float) -> None:
        self._conversation.hear(message, now, headers=self._headers, principal=self._principal)

    def release(self) -> None:
        self._conversation.release()

    def lost(self, why: str) -> None:
        self._conversation.lost(why)

    # As a connection of its run.

    async def drain(self) -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(self._drained)
            await self._over.wait()

    async def _drained(self) -> None:
        await self._conversation.drain()
        await self._duplex.end()

    def dismiss(self) -> None:
        self._conversation.dismiss(UNFINISHED)

    def stop(self) -> None:
        self._conversation.stop()
