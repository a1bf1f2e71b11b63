"""An order of items by their last activity: streams that need a keep-alive, idle sessions and connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import trio

__all__ = ["IdleOrder"]

T = TypeVar("T")


class IdleOrder(Generic[T]):
    """Items in the order of their last activity, with one timeout for all.

    Because the timeout is the same for all items, the next one to expire is always the first in a dict.  An activity
    costs one move to the end of that dict, and one task serves all items.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._last_active: dict[T, float] = {}
        self._changed = trio.lowlevel.ParkingLot()  # wakes tasks when the order becomes empty or non-empty

    def __len__(self) -> int:
        return len(self._last_active)

    def __iter__(self) -> Iterator[T]:
        """Iterate from the item that is idle for longest."""
        return iter(self._last_active)

    def touch(self, item: T) -> None:
        """Record an activity of `item`: its timeout starts again."""
        if not self._last_active and self._changed:
            self._changed.unpark_all()
        self._last_active.pop(item, None)
        self._last_active[item] = trio.current_time()

    def forget(self, item: T) -> None:
        if self._last_active.pop(item, None) is not None and not self._last_active and self._changed:
            self._changed.unpark_all()

    async def next(self) -> T:
        """Wait for an item that is idle for the whole timeout, and return it; its timeout starts again."""
        while True:
            await trio.lowlevel.checkpoint()
            if not self._last_active:
                await self._changed.park()
                continue
            item, last_active = next(iter(self._last_active.items()))
            if last_active + self._timeout <= trio.current_time():
                self.touch(item)
                return item
            del item  # the caller may forget it during the sleep, and then it must not be kept alive here
            await trio.sleep_until(last_active + self._timeout)

    async def empty(self) -> None:
        """Wait until no item is left."""
        while self._last_active:
            await self._changed.park()
