"""The protocol of stores: rows that survive a call, a connection, or the process, and what processes tell each other.

A store keeps `Row`s and does not know their contents: a task, a session, a spent request state differ only in `kind`.
So a new use adds a kind and no method.  Beside rows it has two things that rows would do badly:

- *Streams* of numbered events.  `append` adds one and drops the oldest beyond a bound, in one step.
- *Messages* on channels.  `send` reaches all that `receive` at that moment, and leaves nothing behind.  A message may
  be lost; a receiver then gets `Resync`.  So what must not be lost is written first, in a row or a stream.

Every store obeys the same rules:

- *A write that returned has happened.*  It is there after the process was killed, if the store outlives processes.
- *Compare and set.*  `replace` writes only over the version that its caller has read.  If two processes change one row
  at the same time, the second reads again; no update is lost.
- *Claims.*  A row with a `holder` is at work in that process, as long as the process renews its lease.  `claim` gives
  the rows of a process that has gone to another one, each row once.
- *Bounds.*  A store has at most `max_bytes` bytes of rows and events, also without bodies (`ROW`, `EVENT`).  No owner
  takes more than three times what it leaves free.  `add` takes the number of rows that one owner, and all owners
  together, may have.
- *Time is an argument.*  Stores have no clock of their own; the rows of several processes need wall-clock seconds.

Methods are safe to cancel: a write happens as a whole or not at all.  A cancelled write may have happened.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from math import inf
from types import TracebackType
from typing import Final, Protocol, TypeAlias

from trio_mcp.core.errors import McpError
from trio_mcp.core.messages import record

__all__ = [
    "EVENT", "FREE", "ROW", "SPARE", "Message", "Resync", "Row", "Store", "StoreFailed", "StoreFull", "check_room",
    "wall_time",
]  # fmt: skip

FREE: Final = 3
"""An owner may have this many times what is free, as in `core.shares`."""
SPARE: Final = 4096
"""Bytes by which `replace` may grow a row of a full store, so that the failure of a task can be written down."""
EVENT: Final = 64
"""Bytes that each event and each message counts beside its body; otherwise empty ones would be free."""

ROW: Final = 2048
"""Bytes that each row counts beside its body, and each stream beside its events: in Redis a row has 1,600 bytes of
names and indexes.  Otherwise rows without bodies, such as those of spent request states, would have no bound."""

wall = time.time  # a test replaces it


def wall_time() -> float:
    """The time of rows, in seconds since the epoch, for those who call a store."""
    return wall()


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


@record
class Resync:
    """Messages may have been lost; look again at all that they could be about."""


Message: TypeAlias = tuple[str, bytes] | Resync
"""A channel and a body, or the news that some are missing."""


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
        """Return the next rows of an owner, in the order of (`created`, `key`).

        Of each body only the first line, because a page of long bodies would need much memory.
        """

    async def sweep(self, now: float) -> int:
        """Delete rows and streams that have expired, at most a few hundred.  Returns their number."""

    async def lease(self, holder: str, until: float) -> None:
        """This process is at work under the name `holder` until then.  A time in the past ends the lease."""

    async def claim(
        self, kind: str, holder: str, now: float, limit: int, *, known: Collection[str] | None = None
    ) -> Sequence[Row]:
        """Take the rows of holders whose lease has ended, and return them with their new holder.

        With `known`, also return the rows of `holder` itself, except those with these keys: a call that failed may have
        had its effect.
        """

    async def changes(self, after: int) -> tuple[int, Sequence[tuple[str, str]]]:
        """Wait until rows have been written since the change `after`.

        Returns the number of the last change, and kind and key of each written row.  Other processes may write, too.
        A number below 0 asks for the present number and waits for nothing.
        """

    async def append(self, stream: str, body: bytes, *, owner: str, expires: float, max_bytes: int) -> int:
        """Add an event to a stream, and return its number: 1, 2, 3, ...  A stream begins with its first event.

        The oldest events go if the stream then has more than `max_bytes` bytes, each with `EVENT` bytes beside its
        body; also the new event, if it is larger.  They count as bytes of the owner of the first event.  The whole
        stream expires at the latest `expires`.  Those that receive on the channel `stream` get an empty message.

        Raises `StoreFull`; then nothing has changed.
        """

    async def read(self, stream: str, after: int, limit: int) -> tuple[int, Sequence[tuple[int, bytes]]]:
        """Return the next events after a number, and the number of the oldest event that is still there.

        Events are lost to this reader if the oldest one is later than `after + 1`.  If all events are gone, the oldest
        one is the next to come.  It is 0 if there is no such stream: it has not begun, was discarded, or has expired.
        """

    async def discard(self, stream: str) -> None:
        """Delete a stream.  A new one of this name begins with the number 1."""

    async def send(self, channel: str, body: bytes) -> None:
        """Send a message to all that receive on a channel now, in this process and in others.  It may be lost."""

    def receive(self, channels: Sequence[str]) -> AbstractAsyncContextManager[AsyncIterator[Message]]:
        """Receive the messages on some channels, in a block: ``async with store.receive([...]) as messages``.

        The block gets all messages that are sent after it has begun, in the order of each sender.  A receiver that does
        not read, or a connection that breaks, costs messages: the next one is `Resync`.  The iterator does not end.
        """


def check_room(growth: int, owned: int, held: int, owner: str, most: float) -> None:
    """Raise `StoreFull` if `owner`, which has `owned` of all `held` bytes, must not have so many more."""
    free = most - held - growth
    if growth > 0 and (free < 0 or (owner and owned and owned + growth > FREE * free)):
        raise StoreFull("max_bytes")
