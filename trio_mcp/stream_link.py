"""A session with a server over one stream: a pipe to a child process, a socket, a WebSocket, memory.

The stream's end is the end of every call.  A child process tells more than its pipe: how it ended, and what it wrote to
standard error, which is most often the answer to why; so there calls end when that is known, a moment later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from trio_mcp.caller import Caller, Failure
from trio_mcp.core.errors import SessionClosed
from trio_mcp.core.jsonrpc import Id, Message
from trio_mcp.core.session import Session
from trio_mcp.duplex import Duplex, Framing, Tap

__all__ = ["StreamLink"]


class StreamLink:
    """A `Carrier`, and the `duplex.Talk` of its stream.

    `explain` finds out how the link came to its end, within a bound of its own; it is shielded from cancellation.
    """

    def __init__(
        self,
        caller: Caller,
        stream: trio.abc.Stream,
        framing: Framing,
        *,
        nursery: trio.Nursery,
        tap: Tap | None = None,
        explain: Callable[[], Awaitable[Failure | None]] | None = None,
    ) -> None:
        self._caller = caller
        self._explain = explain
        self._duplex = Duplex(self, stream, framing, caller.session.limits, nursery=nursery, tap=tap)
        self._why = framing.why
        caller.carry(self)

    async def run(self, heartbeat: float | None = None) -> None:
        """Carry the session until it ends; never raises because of the server, whom the stream is then closed to."""
        try:
            await self._duplex.run(heartbeat)
        finally:
            failure = None
            if self._explain is not None:
                with trio.CancelScope(shield=True):
                    failure = await self._explain()
            self._caller.lost(failure or self._closed)

    async def end(self) -> None:
        """End the link as soon as everything has been written; `run` returns then."""
        await self._duplex.end()

    def _closed(self) -> SessionClosed:
        error = SessionClosed(self._why)
        error.__cause__ = self._duplex.wire.failure
        return error

    # As a carrier.

    def wake(self) -> None:
        self._duplex.wire.wake()

    def forget(self, id: Id) -> None:
        """What there is to say of it is in the queue."""

    # As its stream has it.

    @property
    def session(self) -> Session:
        return self._caller.session

    def hear(self, message: Message, now: float) -> None:
        self._caller.hear(message, now)

    def release(self) -> None:
        self._caller.release()

    def lost(self, why: str) -> None:
        self._why = why
        if self._explain is None:
            self._caller.lost(self._closed)
