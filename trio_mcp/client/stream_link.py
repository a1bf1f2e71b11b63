"""A session with a server over one stream: a pipe to a child process, a socket, a WebSocket, or memory.

`StreamLink` connects a `Caller` with the `Duplex` that reads and writes the stream.  When the stream ends, all waiting
calls end with its error.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from trio_mcp.client.caller import Caller
from trio_mcp.core.errors import McpError, SessionClosed
from trio_mcp.core.messages import Id
from trio_mcp.core.session import SessionProtocol
from trio_mcp.transport.wire import Duplex, Framing, Tap

__all__ = ["StreamLink"]


class StreamLink:
    """The `Transport` of a session over one stream, and the `SessionHandler` of the stream.

    `explain` may know a better reason for the end of the stream, such as the exit status of a child process and its
    last output.
    """

    def __init__(
        self,
        caller: Caller,
        stream: trio.abc.Stream,
        framing: Framing,
        *,
        nursery: trio.Nursery,
        tap: Tap | None = None,
        explain: Callable[[], McpError | None] | None = None,
        received: bytes = b"",
    ) -> None:
        self._caller = caller
        self._explain = explain
        self._framing = framing
        limits = caller.session.limits
        self._duplex = Duplex(self, stream, framing, limits, nursery=nursery, tap=tap, received=received)
        self._why = framing.why
        self.session: SessionProtocol = caller.session
        self.receive = caller.process  # the stream itself looks for messages to send after it has read
        self.wake = self._duplex.wake
        caller.attach(self)

    async def run(self, heartbeat: float | None = None) -> None:
        """Run the session until it ends; the stream is closed then.  Never raises because of the server."""
        await self._duplex.run(heartbeat)

    async def end(self) -> None:
        """Close the stream when all messages have been written; `run` returns then."""
        await self._duplex.end()

    # Transport

    def send_request(self, id: Id) -> None:
        self.wake()

    def request_done(self, id: Id) -> None:
        """Do nothing: no state is kept for a request."""

    def request_abandoned(self, id: Id) -> None:
        """Do nothing: the notification for the server is in the queue."""

    def abort(self, why: str) -> None:
        self._duplex.give_up(why)

    @property
    def last_data_at(self) -> float:
        return self._duplex.last_data_at

    @property
    def message_size(self) -> int:
        return self._framing.size

    # SessionHandler

    def release(self) -> None:
        """Do nothing: no task waits for room in the queue."""

    def connection_lost(self, why: str) -> None:
        self._why = why
        self._caller.connection_lost(self._failure)

    def _failure(self) -> McpError:
        known = None if self._explain is None else self._explain()
        if known is not None:
            return known
        error = SessionClosed(self._why)
        error.__cause__ = self._duplex.failure
        return error
