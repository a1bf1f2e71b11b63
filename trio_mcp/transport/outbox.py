"""What waits for one wire, and the right to write to it.

Whoever has something to send writes it at once if nobody is writing, in its own task; what piles up meanwhile is sent
together, by one task, which is there for as long as there is something to send.  A write is never cut short by a
cancellation: what is on its way is finished, within `CLOSING` seconds once everything ends.

What one write carries is the transport's business: the bytes of a stream, a part of one HTTP response.  A `Wire` is
what a conversation sees of it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, Protocol, TypeVar

import trio

__all__ = ["CLOSING", "GONE", "Outbox", "Wire"]

T = TypeVar("T")

CLOSING = 1.0
"""Seconds for which a write that has been begun may still go on when everything ends."""

GONE = (trio.BrokenResourceError, trio.ClosedResourceError)
"""What a stream raises when the other side has gone, or our own was closed meanwhile."""


class Wire(Hashable, Protocol):
    """Where messages go.  Wires are told apart: each is equal to itself only."""

    def wake(self) -> None:
        """There is something to send, or a request that came in here has ended without an answer."""

    async def flush(self) -> None:
        """As `wake`; the caller may be used to write.  For the last step of a task: it need not be a checkpoint."""

    @property
    def mark(self) -> int:
        """The write that what is queued now goes out with."""

    async def written(self, mark: int) -> None:
        """Wait until that write is on its way, so that what comes after it is read apart from it."""

    @property
    def full(self) -> bool:
        """Whether so much waits to be sent that nothing should be added."""

    async def room(self) -> None:
        """Wait while it is full.  Always a checkpoint."""

    @property
    def answers_only(self) -> bool:
        """Whether nothing but answers can be sent here: questions fail at once, and reports are dropped."""

    def hang_up(self, retry: float) -> bool:
        """Ask the client to come back for the rest after `retry` seconds; False where it would not, or could not."""

    def close(self) -> None:
        """Nothing more will be heard or sent: the server has stopped."""


class Outbox(Generic[T]):
    """What is to be sent, and the right to write.

    `take` gives all that is to be sent and is not yet on its way, or None if that is nothing after all; `queued` tells
    how many messages that is.  With `limit` of them it is full, and with more there is no room.  `send` carries one
    write, and is never called twice at the same time: when it raises one of `GONE`, the client has gone; whatever else
    it or `take` raises is kept as `failure`.  Either way `gone` is called, and nothing is written any more.  `spawn` is
    where the writer runs; it must stay open until there is nothing more to send.

    `at_once` carries as much of a write as can go without waiting, and gives what is left of it, if anything is; that
    is for `send`.
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
        self._scope = trio.CancelScope()  # of the write at hand
        self._writing = False
        self._writes = 0  # that have ended
        self._written = trio.lowlevel.ParkingLot()
        self._writer = False  # is on its way, or at work
        self._over = False
        self.deadline = math.inf
        """When what is being written must have been, once nothing more is."""
        self.broken = False
        """The client has gone, or a write has failed or was cut short."""
        self.failure: Exception | None = None
        """What was raised in writing, unless it says that the client has gone."""

    def wake(self) -> None:
        """There is something to send, perhaps."""
        if not self._writer and not self._writing and self._waits():
            self._writer = True
            self._spawn.start_soon(self._run, name="the writer of a connection")

    async def flush(self) -> None:
        """As `wake`, but if nobody is writing, it is written here and now."""
        if self._writing or not await self._write():
            await trio.lowlevel.checkpoint()

    @property
    def mark(self) -> int:
        """The write that what is queued now goes out with."""
        return self._writes + 1 + self._writing

    async def written(self, mark: int) -> None:
        """Wait until that write is on its way, so that what comes after it is another; the caller may have to write."""
        while self._writes < mark and self._waits():
            if self._writing:
                await self._written.park()
            else:
                await self._write()

    @property
    def full(self) -> bool:
        """Whether what can wait should.  Then something is there that will be sent, so it does not wait for ever."""
        return not self._over and 0 < self._queued() >= self._limit

    async def room(self, most: int | None = None) -> None:
        """Wait while more than this (by default the limit) waits to be sent.  Always a checkpoint."""
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

    def _waits(self) -> bool:
        """Whether there is something that can be sent."""
        return not self._over and self._queued() > 0

    async def _run(self) -> None:
        try:
            while not self._writing and self._waits() and await self._write():
                pass
        finally:
            self._writer = False

    async def _write(self, company: bool = False) -> bool:
        """Write what there is; False if it was nothing.  In `company`, where others may have something to say in the
        same moment, it goes out with that: a write costs more than letting them have their turn."""
        self._writing = True
        something = False
        try:
            if company:
                await trio.lowlevel.cancel_shielded_checkpoint()
            what = None if self._over else self._take()
            something = what is not None
            if what is not None and self._at_once is not None:
                what = self._at_once(what)
            if what is not None:
                with trio.CancelScope(shield=True, deadline=self.deadline) as self._scope:
                    await self._send(what)
                if self._scope.cancelled_caught:  # it was cut short, at the end of everything
                    self._break()
        except GONE:
            self._break()
        except Exception as error:  # noqa: BLE001  # for the transport: it is no fault of the handler that writes here
            self.failure = error
            self._break()
        finally:
            self._writing = False
            self._writes += 1
            if self._written:
                self._written.unpark_all()
            if something:
                self.wake()  # for what was queued meanwhile
        return something

    def _break(self) -> None:
        self.broken = True
        self.close()

    def close(self) -> None:
        """Nothing more can be written."""
        self._over = True
        self._written.unpark_all()
        self._gone()

    def finish(self) -> None:
        """Nothing more will be queued, and what is being written is to be finished soon."""
        self.deadline = self._scope.deadline = trio.current_time() + CLOSING
