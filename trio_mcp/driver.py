"""One session over one byte stream: read, feed, act; wait, drain, write.

One task reads.  Whoever has something to send writes it at once if nobody is writing, in its own task; what piles up
meanwhile is sent together by one writer.  A write is never cut short by a cancellation: the line that is on its way is
finished, within `CLOSING` seconds, before the stream is closed.

What waits for the wire is bounded: those who report progress or log wait for room, a call that has ended keeps its
place among the running ones until there is room again, and when the client neither reads nor stops sending, it is not
read any more either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import trio

from trio_mcp.conversation import Conversation
from trio_mcp.core.jsonrpc import LineFramer, decode, encode
from trio_mcp.groups import open_nursery
from trio_mcp.running import Run

if TYPE_CHECKING:
    from trio_mcp.server import Server

__all__ = ["Tap", "serve_stream"]

Tap: TypeAlias = Callable[[str, bytes], object]
"""Called with "in" or "out" and the bytes that were read or are about to be written."""

CLOSING = 1.0
"""Seconds for which a line that has been begun may still be written when everything ends."""


async def serve_stream(
    server: Server, stream: trio.abc.Stream, *, tap: Tap | None = None, drain: trio.Event | None = None
) -> None:
    """Serve one client over a byte stream, one message a line, until it ends; the stream is closed then.

    Any stream will do: a socket, a pipe, `trio.testing.memory_stream_pair`.  Inside `async with server.running()` all
    connections share that run; otherwise this one has a run of its own, with its own lifespan.  When `drain` is set,
    nothing new is taken, what runs may finish, and then this returns.

    Returns when the client has gone and all its handlers have ended; never raises because of it.  May be cancelled at
    any time: handlers are cancelled, and a line that was begun is finished.
    """
    async with server.joined() as run:
        await _Driver(run, stream, tap).serve(drain)


class _Outbox:
    """What is to be sent, and the right to write."""

    def __init__(self, stream: trio.abc.SendStream, take: Callable[[], bytes], queued: Callable[[], int], limit: int):
        self._stream = stream
        self._take = take
        self._queued = queued
        self._limit = limit
        self._shield = trio.CancelScope(shield=True)
        self._writing = False
        self._wanted = trio.Event()
        self._written = trio.lowlevel.ParkingLot()
        self.gone = trio.Event()
        """The client does not take anything any more."""

    def wake(self) -> None:
        self._wanted.set()

    async def flush(self) -> None:
        if self._writing:
            await trio.lowlevel.checkpoint()
            return
        await self._write()
        if self._queued():
            self.wake()

    async def room(self, more: int = 0) -> None:
        await trio.lowlevel.checkpoint()
        while self._queued() > self._limit + more and not self.gone.is_set():
            await self._written.park()

    async def empty(self) -> None:
        """Wait until everything was written."""
        while (self._queued() or self._writing) and not self.gone.is_set():
            self.wake()
            await self._written.park()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            while self._queued() and not self._writing:
                await self._write()

    async def _write(self) -> None:
        data = self._take()
        if not data or self.gone.is_set():
            return
        self._writing = True
        try:
            with self._shield:
                await self._stream.send_all(data)
            if self._shield.cancelled_caught:
                self.gone.set()
            else:
                self._shield = trio.CancelScope(shield=True, deadline=self._shield.deadline)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.gone.set()
        finally:
            self._writing = False
            self._written.unpark_all()

    def close_within(self, seconds: float) -> None:
        self._shield.deadline = trio.current_time() + seconds


class _Driver:
    """One connection, from its first byte to its last."""

    def __init__(self, run: Run, stream: trio.abc.Stream, tap: Tap | None) -> None:
        self._limits = run.limits
        self._stream = stream
        self._tap = tap
        self._outbox = _Outbox(stream, self._take, lambda: self._conversation.session.queued, run.limits.outgoing)
        self._conversation = Conversation(run, self._outbox)
        self._framer = LineFramer(run.limits.message_bytes)

    async def serve(self, drain: trio.Event | None) -> None:
        try:
            async with open_nursery() as nursery:
                nursery.start_soon(self._outbox.run)
                nursery.start_soon(self._until_gone, nursery.cancel_scope)
                if drain is not None:
                    nursery.start_soon(self._drained, drain, nursery.cancel_scope)
                try:
                    await self._read()
                finally:
                    # Here, because the nursery waits for a line that is being written.  What was not begun is dropped:
                    # who closed the stream reads nothing more, and some clients stumble over it.
                    self._outbox.close_within(CLOSING)
                    self._conversation.lost("the connection has ended")
        finally:
            with trio.CancelScope(shield=True):
                await self._conversation.quiet()
            self._conversation.closed()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSING):
                await self._stream.aclose()

    async def _read(self) -> None:
        # Beyond this only what answers the client's own pings and mistakes can pile up, so it is the client's doing.
        most = self._limits.calls + self._limits.outgoing
        while True:
            try:
                data = await self._stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not data:
                return
            if self._tap is not None:
                self._tap("in", bytes(data))
            now = trio.current_time()
            for line in self._framer.feed(bytes(data)):
                self._conversation.hear(line if not isinstance(line, bytes) else decode(line, self._limits), now)
            if self._conversation.session.queued:
                self._outbox.wake()
                await self._outbox.room(most)

    def _take(self) -> bytes:
        session = self._conversation.session
        null_id = session.unreadable_id_is_null
        data = b"".join([encode(message, null_id=null_id) + b"\n" for message, _ in session.outgoing()])
        self._conversation.release()
        if self._tap is not None and data:
            self._tap("out", data)
        return data

    async def _until_gone(self, scope: trio.CancelScope) -> None:
        await self._outbox.gone.wait()
        scope.cancel()

    async def _drained(self, drain: trio.Event, scope: trio.CancelScope) -> None:
        await drain.wait()
        await self._conversation.drain()
        await self._outbox.empty()
        scope.cancel()
