"""Who has been silent for too long: streams that need a sign of life, sessions that nobody uses any more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import trio

__all__ = ["IdleOrder"]

T = TypeVar("T")


class IdleOrder(Generic[T]):
    """Things in the order in which something was last heard of them.

    All have the same patience, so the one to look at next is the first in a dict; to be heard of again costs no more
    than a dict's move to the end, and there is one task for all of them.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._heard: dict[T, float] = {}
        self._changed = trio.lowlevel.ParkingLot()  # whether there is anything

    def __len__(self) -> int:
        return len(self._heard)

    def __iter__(self) -> Iterator[T]:
        """From the one that has been silent for longest."""
        return iter(self._heard)

    def touch(self, thing: T) -> None:
        """Something was heard of it: its time begins anew."""
        if not self._heard and self._changed:
            self._changed.unpark_all()
        self._heard.pop(thing, None)
        self._heard[thing] = trio.current_time()

    def forget(self, thing: T) -> None:
        if self._heard.pop(thing, None) is not None and not self._heard and self._changed:
            self._changed.unpark_all()

    async def next(self) -> T:
        """Wait for one that has been silent for as long as the patience lasts; its time begins anew."""
        while True:
            await trio.lowlevel.checkpoint()
            if not self._heard:
                await self._changed.park()
                continue
            thing, heard = next(iter(self._heard.items()))
            if heard + self._patience <= trio.current_time():
                self.touch(thing)
                return thing
            del thing  # it may be forgotten meanwhile
            await trio.sleep_until(heard + self._patience)

    async def empty(self) -> None:
        """Wait until there is nothing."""
        while self._heard:
            await self._changed.park()
