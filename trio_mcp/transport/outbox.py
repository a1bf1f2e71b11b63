"""The send queue of one wire, and its writer.

A task that has a message to send writes it itself if no write is in progress.  Messages that are queued during a write
are sent together afterwards, by one writer task, which exists only while there are messages.  A cancellation never
interrupts a write: a write that has begun is finished, within `CLOSING` seconds once the connection ends.

The transport decides what one write contains: the bytes of a stream, or a part of one HTTP response.  `Wire` is the
interface that a session uses.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, Protocol, TypeVar

import trio

__all__ = ["CLOSING", "GONE", "Outbox", "Wire"]

T = TypeVar("T")

CLOSING = 1.0
"""Seconds for which a write that has begun may continue when the connection ends."""

GONE = (trio.BrokenResourceError, trio.ClosedResourceError)
"""The exceptions of a stream that the peer, or another task of ours, has closed."""


class Wire(Hashable, Protocol):
    """The destination of messages.  A wire is equal only to itself."""

    def wake(self) -> None:
        """Start a writer: there are messages to send, or a request of this wire has ended without a response."""

    async def flush(self) -> None:
        """Like `wake`, but may write in the caller's task.  For the last step of a task: it may not be a checkpoint."""

    @property
    def mark(self) -> int:
        """The number of the write that will contain the messages queued now."""

    async def written(self, mark: int) -> None:
        """Wait until that write has been sent, so that the peer reads later messages separately."""

    @property
    def full(self) -> bool:
        """Whether the queue is full, so that no message should be added."""

    async def room(self) -> None:
        """Wait while the queue is full.  Always a checkpoint."""

    @property
    def answers_only(self) -> bool:
        """Whether only responses can be sent here: requests fail at once, and notifications are dropped."""

    def hang_up(self, retry: float) -> bool:
        """Ask the client to fetch the rest after `retry` seconds; False if this client or transport cannot do that."""

    def close(self) -> None:
        """Stop receiving and sending: the server has stopped."""


class Outbox(Generic[T]):
    """The send queue of one wire, and its writer.

    `take` returns all queued messages as one write, or None if there are none after all; `queued` counts them.  With
    `limit` messages the queue is full, and with more there is no room.  `send` performs one write; calls never overlap.
    If it raises one of `GONE`, the peer has closed the connection.  Any other exception of `send` or `take` is kept as
    `failure`.  In both cases `gone` is called, and no more writes follow.  The writer runs in the nursery `spawn`; this
    must stay open while there are messages.

    `at_once` writes as much as possible without waiting, and returns the rest for `send`, or None.
    """

    def __init__(
        self,
        send: Callable[[T], Awaitable[None]],
        take: Callable[[], T | None],
        queued: Callable[[], int],
        limit: int,
        gone: Callable[[], object],
        *,
        spawn: trio.Nursery,
        at_once: Callable[[T], T | None] | None = None,
    ) -> None:
        self._send = send
        self._at_once = at_once
        self._take = take
        self._queued = queued
        self._limit = limit
        self._gone = gone
        self._spawn = spawn
        self._scope = trio.CancelScope()  # of the current write
        self._writing = False
        self._writes = 0  # that have ended
        self._written = trio.lowlevel.ParkingLot()
        self._writer = False  # the writer task is starting, or running
        self._over = False
        self.deadline = math.inf
        """The deadline of the last write, once the connection ends."""
        self.broken = False
        """The peer has closed the connection, or a write has failed or was cancelled."""
        self.failure: Exception | None = None
        """The exception of a write, unless it is one of `GONE`."""

    def wake(self) -> None:
        """Start the writer if there are messages to send."""
        if not self._writer and not self._writing and self._has_messages():
            self._writer = True
            self._spawn.start_soon(self._run, name="the writer of a connection")

    async def flush(self) -> None:
        """Like `wake`, but if no write is in progress, write in this task."""
        if self._writing or not await self._write():
            await trio.lowlevel.checkpoint()

    @property
    def mark(self) -> int:
        """The number of the write that will contain the messages queued now."""
        return self._writes + 1 + self._writing

    async def written(self, mark: int) -> None:
        """Wait until that write has been sent, so that later messages go into another; may write in this task."""
        while self._writes < mark and self._has_messages():
            if self._writing:
                await self._written.park()
            else:
                await self._write()

    @property
    def full(self) -> bool:
        """Whether the queue is full.  It is not empty then, so the wait for room ends."""
        return not self._over and 0 < self._queued() >= self._limit

    async def room(self, most: int | None = None) -> None:
        """Wait while more than `most` messages (by default the limit) are queued.  Always a checkpoint."""
        await trio.lowlevel.checkpoint()
        most = self._limit if most is None else most
        while self._queued() > most and not self._over:
            self.wake()
            await self._written.park()

    async def idle(self) -> None:
        """Wait until no write is in progress."""
        while self._writing:
            await self._written.park()

    async def empty(self) -> None:
        """Wait until all messages have been written."""
        while self._has_messages() or self._writing:
            self.wake()
            await self._written.park()

    def _has_messages(self) -> bool:
        return not self._over and self._queued() > 0

    async def _run(self) -> None:
        try:
            while not self._writing and self._has_messages() and await self._write():
                pass
        finally:
            self._writer = False

    async def _write(self, batch: bool = False) -> bool:
        """Write the queued messages; False if there were none.

        `batch`: yield once before writing, so that answers that finish in the same tick share one write, which costs
        more than the yield.
        """
        self._writing = True
        wrote = False
        try:
            if batch:
                await trio.lowlevel.cancel_shielded_checkpoint()
            data = None if self._over else self._take()
            wrote = data is not None
            if data is not None and self._at_once is not None:
                data = self._at_once(data)
            if data is not None:
                with trio.CancelScope(shield=True, deadline=self.deadline) as self._scope:
                    await self._send(data)
                if self._scope.cancelled_caught:  # at the deadline of `finish`
                    self._break()
        except GONE:
            self._break()
        except Exception as error:  # noqa: BLE001  # for the transport: not a fault of the handler that writes here
            self.failure = error
            self._break()
        finally:
            self._writing = False
            self._writes += 1
            if self._written:
                self._written.unpark_all()
            if wrote:
                self.wake()  # for messages queued meanwhile
        return wrote

    def _break(self) -> None:
        self.broken = True
        self.close()

    def close(self) -> None:
        """Stop writing."""
        self._over = True
        self._written.unpark_all()
        self._gone()

    def finish(self) -> None:
        """Set a deadline for the current write: the connection ends, and no more messages are queued."""
        self.deadline = self._scope.deadline = trio.current_time() + CLOSING
