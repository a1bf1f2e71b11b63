"""One session over one byte stream: read, feed, act; wait, drain, write.

One task reads.  Whoever has something to send writes it at once if nobody is writing, in its own task; what piles up
meanwhile is sent together, by one task.  A write is never cut short by a cancellation: the line that is on its way is
finished, within `CLOSING` seconds, before the stream is closed.

What waits for the wire is bounded: those who report progress or log wait for room, a call that has ended keeps its
place among the running ones until there is room again, and when the client neither reads nor stops sending, it is not
read any more either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import trio

from trio_mcp.conversation import Conversation
from trio_mcp.core.jsonrpc import LineFramer, decode, encode
from trio_mcp.groups import open_nursery
from trio_mcp.running import Run

if TYPE_CHECKING:
    from trio_mcp.server import Server

__all__ = ["CLOSING", "Tap", "serve_stream"]

Tap: TypeAlias = Callable[[str, bytes], object]
"""Called with "in" or "out" and the bytes that were read or are about to be written."""

CLOSING = 1.0
"""Seconds for which a line that has been begun may still be written when everything ends."""

_GONE = (trio.BrokenResourceError, trio.ClosedResourceError)


async def serve_stream(
    server: Server, stream: trio.abc.Stream, *, tap: Tap | None = None, drain: trio.Event | None = None
) -> None:
    """Serve one client over a byte stream, one message a line, until it ends; the stream is closed then.

    Any stream will do: a socket, a pipe, `trio.testing.memory_stream_pair`.  Inside `async with server.running()` all
    connections share that run; otherwise this one has a run of its own, with its own lifespan.  When `drain` is set,
    nothing new is taken, what runs may finish, and then this returns.

    Returns when the client, or the run that it shares, has gone and all its handlers have ended; never raises because
    of it.  What the lifespan, `tap` or `stream` raise otherwise leaves it unchanged.  May be cancelled at any time:
    handlers are cancelled, and a line that was begun is finished.
    """
    try:
        async with server.joined() as run:
            await _Driver(run, stream, tap).serve(drain)
    finally:
        await _close(stream, trio.current_time() + CLOSING)  # a server that could not begin has not closed it


async def _close(stream: trio.abc.Stream, deadline: float) -> None:
    # Streams do close when they are cancelled at it, only less politely.
    with suppress(*_GONE), trio.CancelScope(shield=True, deadline=deadline):
        await stream.aclose()


class _Outbox:
    """What is to be sent, and the right to write.

    `take` gives all that is to be sent and is not yet on its way, `queued` tells how many messages that is.  `gone` is
    called when the client does not take anything any more.
    """

    def __init__(
        self,
        stream: trio.abc.SendStream,
        take: Callable[[], bytes],
        queued: Callable[[], int],
        limit: int,
        gone: Callable[[], object],
    ) -> None:
        self._stream = stream
        self._take = take
        self._queued = queued
        self._limit = limit
        self._gone = gone
        self._scope = trio.CancelScope()  # of the write at hand
        self._writing = False
        self._writes = 0  # that have ended
        self._over = False
        self._wanted = trio.Event()
        self._written = trio.lowlevel.ParkingLot()
        self.deadline = math.inf
        """When what is being written must have been, once nothing more is."""
        self.failure: Exception | None = None
        """What was raised in writing, unless it says that the client has gone."""

    def wake(self) -> None:
        self._wanted.set()

    async def flush(self) -> None:
        if self._writing:
            await trio.lowlevel.checkpoint()
            return
        await self._write()
        if self._waits():
            self.wake()

    @property
    def mark(self) -> int:
        """The write that what is queued now goes out with."""
        return self._writes + 1 + self._writing

    async def written(self, mark: int) -> None:
        while self._writes < mark and self._waits():
            if self._writing:
                await self._written.park()
            else:
                await self._write()

    async def room(self, most: int | None = None) -> None:
        await trio.lowlevel.checkpoint()
        most = self._limit if most is None else most
        while self._queued() > most and not self._over:
            self.wake()
            await self._written.park()

    async def idle(self) -> None:
        """Wait until nothing is being written."""
        while self._writing:
            await self._written.park()

    async def empty(self) -> None:
        """Wait until everything has been written."""
        while self._waits() or self._writing:
            self.wake()
            await self._written.park()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            while self._waits() and not self._writing:
                await self._write()

    def _waits(self) -> bool:
        """Whether there is something that can be sent."""
        return self._queued() > 0 and not self._over

    async def _write(self) -> None:
        self._writing = True
        try:
            data = self._take()
            if data and not self._over:
                with trio.CancelScope(shield=True) as self._scope:  # `finish` gives it a deadline
                    await self._stream.send_all(data)
        except _GONE:
            self.close()
        except Exception as error:  # noqa: BLE001  # raised by `serve`: it is no fault of the handler that writes here
            self.failure = error
            self.close()
        finally:
            self._writing = False
            self._writes += 1
            self._written.unpark_all()

    def close(self) -> None:
        """Nothing more can be written."""
        self._over = True
        self._gone()

    def finish(self) -> None:
        """Nothing more will be queued, and what is being written is to be finished soon."""
        self.deadline = self._scope.deadline = trio.current_time() + CLOSING
        self._written.unpark_all()


class _Driver:
    """One connection, from its first byte to its last."""

    def __init__(self, run: Run, stream: trio.abc.Stream, tap: Tap | None) -> None:
        self._limits = run.limits
        self._stream = stream
        self._tap = tap
        self._open = trio.CancelScope()  # cancelled when the client or the run has gone
        self._outbox = _Outbox(stream, self._take, self._queued, run.limits.outgoing, self._open.cancel)
        self._conversation = Conversation(run, self._outbox)
        self._framer = LineFramer(run.limits.message_bytes)

    async def serve(self, drain: trio.Event | None) -> None:
        try:
            with self._open:
                async with open_nursery() as nursery:
                    nursery.start_soon(self._outbox.run)
                    if drain is not None:
                        nursery.start_soon(self._drained, drain)
                    try:
                        await self._read()
                    finally:
                        # Here, because the nursery waits for a line that is being written.  What was not begun is
                        # dropped: who closed the stream reads nothing more, and some clients stumble over it.
                        self._conversation.lost("the connection has ended")
                        self._outbox.finish()
        finally:
            with trio.CancelScope(shield=True):
                await self._outbox.idle()  # a handler may be the one that writes
            try:
                await _close(self._stream, self._outbox.deadline)
            finally:
                with trio.CancelScope(shield=True):
                    await self._conversation.quiet()
                self._conversation.closed()
        if self._outbox.failure is not None:
            raise self._outbox.failure

    async def _read(self) -> None:
        # Beyond this only what answers the client's own pings and mistakes can pile up, so it is the client's doing.
        most = self._limits.calls + self._limits.outgoing
        while True:
            try:
                data = bytes(await self._stream.receive_some())
            except _GONE:
                return
            if not data:
                return
            if self._tap is not None:
                self._tap("in", data)
            for line in self._framer.feed(data):
                message = line if not isinstance(line, bytes) else decode(line, self._limits)
                self._conversation.hear(message, trio.current_time())
                if self._queued() > most:
                    await self._outbox.room(most)
            if self._queued():
                self._outbox.wake()
                await trio.lowlevel.checkpoint()  # so that it is on its way before an end of the stream is seen

    def _queued(self) -> int:
        return self._conversation.session.queued

    def _take(self) -> bytes:
        session = self._conversation.session
        null_id = session.unreadable_id_is_null
        parts: list[bytes] = []
        for message, _ in session.outgoing():
            parts += encode(message, null_id=null_id), b"\n"
        data = b"".join(parts)
        self._conversation.release()
        if self._tap is not None and data:
            self._tap("out", data)
        return data

    async def _drained(self, drain: trio.Event) -> None:
        await drain.wait()
        await self._conversation.drain()
        await self._outbox.empty()
        self._open.cancel()
