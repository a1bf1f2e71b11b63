"""The lease of a process in a store, which its rows depend on: see "Claims" in `rows`.

A lease that has ended says that its process has gone, unless no process could renew its own: while the store was away,
or while the machine slept.  Then each gets a third of a lease to renew its own, before another one claims its rows.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from trio_mcp.stores.rows import Store

__all__ = ["Lease"]


class Lease:
    """The lease of this process under the name `holder`, for `seconds` from each renewal."""

    def __init__(self, store: Store, holder: str, seconds: float) -> None:
        self._store = store
        self._holder = holder
        self._seconds = seconds
        self._until = inf
        self._claims_from = -inf

    async def renew(self, now: float) -> None:
        """Renew the lease.  Raises `StoreFailed`."""
        if now >= self._until:  # this process slept, or the clock was set
            self.spare_others()
        await self._store.lease(self._holder, now + self._seconds)
        self._until = now + self._seconds

    def spare_others(self) -> None:
        """The store was away: other processes need time to renew their leases."""
        self._claims_from = trio.current_time() + self._seconds / 3

    @property
    def may_claim(self) -> bool:
        """Whether leases that have ended are those of processes that have gone."""
        return trio.current_time() >= self._claims_from

    async def end(self) -> None:
        """Let other processes claim the rows at once.  Raises `StoreFailed`."""
        await self._store.lease(self._holder, -inf)
