"""The protocol of stores: rows that survive a call, a connection, or the process.

A store keeps `Row`s and does not know their contents: a task, a session, an event of a stream, a spent request state
differ only in `kind`.  So a new use adds a kind and no method.  Every store obeys the same rules:

- *A write that returned has happened.*  It is there after the process was killed, if the store outlives processes.
- *Compare and set.*  `replace` writes only over the version that its caller has read.  If two processes change one row
  at the same time, the second reads again; no update is lost.
- *Claims.*  A row with a `holder` is at work in that process, as long as the process renews its lease.  `claim` gives
  the rows of a process that has gone to another one, each row once.
- *Bounds.*  A store has at most `max_bytes` bytes.  No owner takes more than three times what it leaves free.  `add`
  takes the number of rows that one owner, and all owners together, may have.
- *Time is an argument.*  Stores have no clock of their own; the rows of several processes need wall-clock seconds.

Methods are safe to cancel: a write happens as a whole or not at all.  A cancelled write may have happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from types import TracebackType
from typing import Protocol

from trio_mcp.core.errors import McpError
from trio_mcp.core.messages import record

__all__ = ["Row", "Store", "StoreFailed", "StoreFull", "check_room"]

_FREE = 3  # an owner may have this many times what is free, as in `core.shares`
_ALWAYS = 4096  # bytes by which a row may grow in a full store, so that the failure of a task can be written down


class StoreFull(McpError):
    """The store has no room for a row.  `limit` is the name of the limit."""

    def __init__(self, limit: str) -> None:
        super().__init__(f"the store has no room ({limit}); try again later")
        self.limit = limit


class StoreFailed(McpError):
    """The store does not work: its disk is full, its file is damaged, its server is away.  The cause is chained."""


@record
class Row:
    """One row.  `kind` and `key` name it.

    `owner` is the principal, or "" if there is none.  `version` counts the writes; the store sets it.
    """

    kind: str
    key: str
    body: bytes
    owner: str = ""
    created: float = 0.0
    expires: float = inf
    holder: str = ""
    version: int = 1


class Store(Protocol):
    """A store.  Open it with `async with`; it may be opened several times, and closes with the last block."""

    async def __aenter__(self) -> Store: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def add(self, row: Row, *, each: float = inf, total: float = inf) -> bool:
        """Add a row.  False if its kind and key exist.

        Raises `StoreFull` if its owner then had more than `each` rows of the kind, or all owners more than `total`.
        """

    async def get(self, kind: str, key: str) -> Row | None:
        """Return a row, or None.  A row that has expired is there until it is swept."""

    async def replace(self, row: Row) -> bool:
        """Write `body`, `expires` and `holder` of a row.  False if its version is not the one that is stored."""

    async def delete(self, kind: str, key: str) -> bool:
        """Delete a row.  False if it does not exist."""

    async def list(self, kind: str, owner: str, after: tuple[float, str], limit: int) -> Sequence[Row]:
        """Return the next rows of an owner, in the order of (`created`, `key`)."""

    async def sweep(self, now: float) -> int:
        """Delete rows that have expired, at most a few hundred.  Returns their number."""

    async def lease(self, holder: str, until: float) -> None:
        """This process is at work under the name `holder` until then.  A time in the past ends the lease."""

    async def claim(self, kind: str, holder: str, now: float, limit: int) -> Sequence[Row]:
        """Take the rows of holders whose lease has ended, and return them with their new holder."""

    async def changes(self, after: int) -> tuple[int, Sequence[tuple[str, str]]]:
        """Wait until rows have been written since the change `after`.

        Returns the number of the last change, and kind and key of each written row.  Other processes may write, too.
        A number below 0 asks for the present number and waits for nothing.
        """


def check_room(growth: int, owned: int, held: int, owner: str, most: float) -> None:
    """Raise `StoreFull` if the rows of `owner`, which has `owned` of all `held` bytes, must not grow by so many."""
    if growth <= _ALWAYS and owned:
        return
    free = most - held - growth
    if free < 0 or (owner and owned and owned + growth > _FREE * free):
        raise StoreFull("max_bytes")
