"""Turns: which holder is next when a resource that all clients share is full (see `shares`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from trio_mcp.core.shares import Shares

__all__ = ["FairQueue", "to_make_room"]

T = TypeVar("T", bound=Hashable)


def to_make_room(shares: Shares, holder: Hashable | None, candidates: Iterable[tuple[T, Hashable | None]]) -> T | None:
    """Return the candidate to remove when the holder wants a unit and may not take one.  None: remove no candidate.

    The candidates come with their holders, in the order in which to remove them.  A candidate of the same holder is
    removed first.  A candidate of another holder is removed only if the resource is full and that holder has more
    units; it is then one of the holder with the most units.
    """
    found: T | None = None
    most = shares.of(holder)
    for candidate, other in candidates:
        if other == holder:
            return candidate
        if shares.full and shares.of(other) > most:
            found, most = candidate, shares.of(other)
    return found


class FairQueue(Generic[T]):
    """Queues of items that wait for a unit of a resource, one queue for each holder; the holders take turns.

    Clients of the holder None cannot be distinguished, so each of its items has a turn of its own.
    """

    __slots__ = ("_queues", "_shares")

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        # Ordered dicts find their first entry at once.  A plain dict searches through all its deleted entries.
        self._queues: OrderedDict[Hashable, tuple[Hashable | None, OrderedDict[T, None]]] = OrderedDict()

    def add(self, holder: Hashable | None, item: T) -> None:
        """Add an item to the end of its holder's queue.  An item that waits already keeps its place."""
        key = item if holder is None else holder
        found = self._queues.get(key)
        if found is None:
            found = self._queues[key] = holder, OrderedDict()
        found[1].setdefault(item)

    def discard(self, holder: Hashable | None, item: T) -> None:
        """Remove an item, if it waits."""
        key = item if holder is None else holder
        found = self._queues.get(key)
        if found is not None:
            found[1].pop(item, None)
            if not found[1]:
                del self._queues[key]

    def next(self) -> T | None:
        """Take a unit for the next holder that may have one, and return its item.  None: no holder may take one.

        Each holder is tried at most once; a holder that has its share already is skipped.
        """
        if self._shares.full:
            return None
        for key, (holder, queue) in self._queues.items():
            if self._shares.take(holder):
                item, _ = queue.popitem(last=False)
                if queue:
                    self._queues.move_to_end(key)
                else:
                    del self._queues[key]
                return item
        return None
