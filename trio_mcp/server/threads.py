"""Worker threads for handlers that are plain functions, shared fairly between clients.

A thread cannot be stopped: when its call is cancelled, it goes on and keeps its place.  So places are a resource that
clients share (see `core.shares`), and a call waits for a place in the queue of its client.  Trio's own limiter has one
queue for all: forty calls of one client, each cancelled at once, would make all other clients wait for them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeVar, cast

import trio

from trio_mcp.core.shares import FairQueue, Shares

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Threads", "no_threads"]

T = TypeVar("T")

_inline = False


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """A block in which plain functions run in the event loop.

    The operating system decides the order of threads, and a test that repeats a run must decide it itself.
    """
    global _inline
    before, _inline = _inline, True
    try:
        yield
    finally:
        _inline = before


class Threads:
    """Places for `total` threads in one run of a server."""

    def __init__(self, total: float) -> None:
        self._places = Shares(total)
        self._turns: FairQueue[trio.Event] = FairQueue(self._places)

    async def run(self, call: Callable[[], T], holder: Hashable | None, *, abandon_on_cancel: bool) -> T:
        """Run `call` in a thread and return its result.

        If this is cancelled, it waits for the thread, or abandons the thread with `abandon_on_cancel`.
        """
        if _inline:
            await self.acquire(holder)
            try:
                return contextvars.copy_context().run(call)  # its context variables are a copy, as in a thread
            finally:
                self.release(holder)
        # Trio calls only the two methods of the limiter that `_Limiter` has.
        limiter = cast("trio.CapacityLimiter", _Limiter(self, holder))
        return await trio.to_thread.run_sync(call, abandon_on_cancel=abandon_on_cancel, limiter=limiter)

    async def acquire(self, holder: Hashable | None) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        # If a place is free here, no call waits for it: free places always go to waiting calls first.
        if self._places.take(holder):
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        turn = trio.Event()
        self._turns.add(holder, turn)
        try:
            await turn.wait()
        except trio.Cancelled:  # then it has no turn: only one of the two happens
            self._turns.discard(holder, turn)
            raise

    def release(self, holder: Hashable | None) -> None:
        self._places.give(holder)
        while (turn := self._turns.next()) is not None:
            turn.set()


class _Limiter:
    """The two methods of a `trio.CapacityLimiter` that `trio.to_thread.run_sync` calls."""

    __slots__ = ("_holder", "_threads")

    def __init__(self, threads: Threads, holder: Hashable | None) -> None:
        self._threads = threads
        self._holder = holder

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self._threads.acquire(self._holder)

    def release_on_behalf_of(self, borrower: object) -> None:
        self._threads.release(self._holder)
