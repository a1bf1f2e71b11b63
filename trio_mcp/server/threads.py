"""Worker threads: the handlers that are plain functions run in them.

A server loads this with the first call of one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar, cast

import trio

from trio_mcp.core.shares import Shares
from trio_mcp.core.turns import FairQueue

__all__ = ["Threads", "no_threads"]

T = TypeVar("T")
_inline = False  # see `no_threads`


@contextmanager
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
    """Places for `total` worker threads, in which handlers run that are plain functions.

    A thread cannot be stopped: when its call is cancelled, it goes on and keeps its place.  So places are a resource
    that clients share (see `core.shares`), and a call waits for a place in the queue of its client.  Trio's own limiter
    has one queue for all: forty calls of one client, each cancelled at once, would make all other clients wait.
    """

    def __init__(self, total: float) -> None:
        self._places = Shares(total)
        self._turns: FairQueue[trio.Event] = FairQueue(self._places)

    async def run(self, call: Callable[[], T], holder: Hashable | None, *, abandon_on_cancel: bool) -> T:
        """Run `call` in a thread and return its result.

        If this is cancelled, it waits for the thread, or abandons the thread with `abandon_on_cancel`.
        """
        place = _ThreadPlace(self._places, self._turns, holder)
        if _inline:
            await place.acquire_on_behalf_of(None)
            try:
                return copy_context().run(call)  # its context variables are a copy, as in a thread
            finally:
                place.release_on_behalf_of(None)
        # Trio calls only the two methods of the limiter that `_ThreadPlace` has.
        limiter = cast("trio.CapacityLimiter", place)
        return await trio.to_thread.run_sync(call, abandon_on_cancel=abandon_on_cancel, limiter=limiter)


class _ThreadPlace:
    """A place for one thread of a client, as a `trio.CapacityLimiter`."""

    __slots__ = ("_holder", "_places", "_turns")

    def __init__(self, places: Shares, turns: FairQueue[trio.Event], holder: Hashable | None) -> None:
        self._places = places
        self._turns = turns
        self._holder = holder

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        # If a place is free here, no call waits for it: free places always go to waiting calls first.
        if self._places.take(self._holder):
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        turn = trio.Event()
        self._turns.add(self._holder, turn)
        try:
            await turn.wait()
        except trio.Cancelled:
            if turn.is_set():  # its turn has come between the cancellation and this line: the next call gets the place
                self.release_on_behalf_of(borrower)
            else:
                self._turns.discard(self._holder, turn)
            raise

    def release_on_behalf_of(self, borrower: object) -> None:
        self._places.give(self._holder)
        while (turn := self._turns.next()) is not None:
            turn.set()
