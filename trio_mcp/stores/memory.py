"""The store in memory: nothing to install, and it ends with its process."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from itertools import chain, islice
from math import inf
from types import TracebackType

import attrs
import trio

from trio_mcp.core.errors import check_amount
from trio_mcp.stores.channels import Channels, Receiver
from trio_mcp.stores.rows import EVENT, ROW, SPARE, Row, Store, StoreFull, check_room

__all__ = ["MemoryStore"]

_SWEPT = 500  # rows in one sweep; the loop must not stop for a long list
_REMEMBERED = 10_000  # changes; a reader that is further behind gets all rows


@attrs.define(eq=False)
class _Stream:
    """The events of a stream, the last of which has the number `number`."""

    owner: str
    expires: float
    number: int = 0
    held: int = 0
    events: deque[bytes] = attrs.field(factory=deque)


class MemoryStore(Store):
    """A store in memory, for one process.  Several servers of the process may share it."""

    def __init__(self, *, max_bytes: float = 256 * 1024 * 1024) -> None:
        check_amount("max_bytes", max_bytes, "bytes")
        self._max_bytes = max_bytes
        self._rows: dict[tuple[str, str], Row] = {}
        self._owned: dict[tuple[str, str], dict[str, None]] = {}  # (kind, owner) -> its keys
        self._numbers: Counter[str] = Counter()  # rows, by kind
        self._bytes: Counter[str] = Counter()  # by owner
        self._held = 0
        self._expiring: list[tuple[float, str, str]] = []
        self._streams: dict[str, _Stream] = {}
        self._ending: list[tuple[float, str]] = []  # once for each stream, with the expiry it had at first
        self._channels = Channels()
        self._leases: dict[str, float] = {}
        self._changed: dict[tuple[str, str], int] = {}  # the last change of each row, oldest first
        self._number = 0
        self._dropped = 0  # the last change that is not remembered
        self._more = trio.Event()

    async def __aenter__(self) -> MemoryStore:
        """The rows stay when the block ends; they belong to the store."""
        await trio.lowlevel.checkpoint()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def add(self, row: Row, *, each: float = inf, total: float = inf) -> bool:
        await trio.lowlevel.checkpoint()
        if (row.kind, row.key) in self._rows:
            return False
        if len(self._owned.get((row.kind, row.owner), ())) >= each:
            raise StoreFull("each")
        if self._numbers[row.kind] >= total:
            raise StoreFull("total")
        check_room(ROW + len(row.body), self._bytes[row.owner], self._held, row.owner, self._max_bytes)
        self._numbers[row.kind] += 1
        self._owned.setdefault((row.kind, row.owner), {})[row.key] = None
        self._put(attrs.evolve(row, version=1), ROW + len(row.body))
        return True

    def _put(self, row: Row, growth: int) -> None:
        name = row.kind, row.key
        old = self._rows.get(name)
        self._rows[name] = row
        self._charge(row.owner, growth)
        if row.expires < inf and (old is None or old.expires != row.expires):
            heapq.heappush(self._expiring, (row.expires, *name))
        self._number += 1
        self._changed.pop(name, None)
        self._changed[name] = self._number
        if len(self._changed) > _REMEMBERED:
            self._dropped = self._changed.pop(next(iter(self._changed)))
        self._more.set()
        self._more = trio.Event()

    def _charge(self, owner: str, growth: int) -> None:
        self._held += growth
        self._bytes[owner] += growth
        if not self._bytes[owner]:
            del self._bytes[owner]

    async def get(self, kind: str, key: str) -> Row | None:
        await trio.lowlevel.checkpoint()
        return self._rows.get((kind, key))

    async def replace(self, row: Row) -> bool:
        await trio.lowlevel.checkpoint()
        old = self._rows.get((row.kind, row.key))
        if old is None or old.version != row.version:
            return False
        growth = len(row.body) - len(old.body)
        if growth > SPARE:
            check_room(growth, self._bytes[old.owner], self._held, old.owner, self._max_bytes)
        written = attrs.evolve(old, body=row.body, expires=row.expires, holder=row.holder, version=old.version + 1)
        self._put(written, growth)
        return True

    async def delete(self, kind: str, key: str) -> bool:
        await trio.lowlevel.checkpoint()
        return self._remove((kind, key))

    def _remove(self, name: tuple[str, str]) -> bool:
        row = self._rows.pop(name, None)
        if row is None:
            return False
        keys = self._owned[row.kind, row.owner]
        del keys[row.key]
        if not keys:
            del self._owned[row.kind, row.owner]
        self._numbers[row.kind] -= 1
        self._charge(row.owner, -ROW - len(row.body))
        return True

    async def list(self, kind: str, owner: str, after: tuple[float, str], limit: int) -> Sequence[Row]:
        await trio.lowlevel.checkpoint()
        rows = [self._rows[kind, key] for key in self._owned.get((kind, owner), ())]
        later = [row for row in rows if (row.created, row.key) > after]
        page = heapq.nsmallest(limit, later, key=lambda row: (row.created, row.key))
        return [attrs.evolve(row, body=row.body.partition(b"\n")[0]) for row in page]

    async def sweep(self, now: float) -> int:
        await trio.lowlevel.checkpoint()
        removed = 0
        while self._expiring and self._expiring[0][0] <= now and removed < _SWEPT:
            expires, *name = heapq.heappop(self._expiring)
            row = self._rows.get((name[0], name[1]))
            if row is not None and row.expires == expires:  # its expiry has not been moved
                self._remove((row.kind, row.key))
                removed += 1
        while self._ending and self._ending[0][0] <= now and removed < _SWEPT:
            _, stream = heapq.heappop(self._ending)
            log = self._streams.get(stream)
            if log is not None and log.expires > now:
                heapq.heappush(self._ending, (log.expires, stream))
            elif log is not None:
                self._forget(stream)
                removed += 1
        return removed

    async def lease(self, holder: str, until: float) -> None:
        await trio.lowlevel.checkpoint()
        self._leases[holder] = until

    async def claim(
        self, kind: str, holder: str, now: float, limit: int, *, known: Collection[str] | None = None
    ) -> Sequence[Row]:
        await trio.lowlevel.checkpoint()

        def free(row: Row) -> bool:
            if row.holder == holder:
                return known is not None and row.key not in known
            return row.holder != "" and self._leases.get(row.holder, -inf) <= now

        ended = (row for row in list(self._rows.values()) if row.kind == kind and free(row))
        claimed = [attrs.evolve(row, holder=holder, version=row.version + 1) for row in islice(ended, limit)]
        for row in claimed:
            self._put(row, 0)
        self._leases = {each: until for each, until in self._leases.items() if until > now}
        return claimed

    async def changes(self, after: int) -> tuple[int, Sequence[tuple[str, str]]]:
        await trio.lowlevel.checkpoint()
        if after < 0:
            return self._number, ()
        while self._number <= after:
            await self._more.wait()
        if after < self._dropped:
            return self._number, tuple(self._rows)
        new = []
        for name in reversed(self._changed):
            if self._changed[name] <= after:
                break
            new.append(name)
        return self._number, new[::-1]

    async def append(self, stream: str, body: bytes, *, owner: str, expires: float, max_bytes: int) -> int:
        await trio.lowlevel.checkpoint()
        log = self._streams.get(stream) or _Stream(owner, expires)
        size, dropped = log.held + EVENT + len(body), 0
        for event in chain(log.events, (body,)):
            if size <= max_bytes:
                break
            size -= EVENT + len(event)
            dropped += 1
        growth = size - log.held + (0 if stream in self._streams else ROW)
        check_room(growth, self._bytes[log.owner], self._held, log.owner, self._max_bytes)
        self._charge(log.owner, growth)
        if stream not in self._streams:
            self._streams[stream] = log
            heapq.heappush(self._ending, (expires, stream))
        log.events.append(body)
        for _ in range(dropped):
            log.events.popleft()
        log.number, log.held, log.expires = log.number + 1, size, max(log.expires, expires)
        self._channels.deliver(stream, b"")
        return log.number

    async def read(self, stream: str, after: int, limit: int) -> tuple[int, Sequence[tuple[int, bytes]]]:
        await trio.lowlevel.checkpoint()
        log = self._streams.get(stream)
        if log is None:
            return 0, ()
        oldest = log.number - len(log.events) + 1
        skipped = max(0, after + 1 - oldest)
        return oldest, list(enumerate(islice(log.events, skipped, skipped + limit), oldest + skipped))

    async def discard(self, stream: str) -> None:
        await trio.lowlevel.checkpoint()
        self._forget(stream)

    def _forget(self, stream: str) -> None:
        log = self._streams.pop(stream, None)
        if log is not None:
            self._charge(log.owner, -ROW - log.held)

    async def send(self, channel: str, body: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self._channels.deliver(channel, body)

    @asynccontextmanager
    async def receive(self, channels: Sequence[str]) -> AsyncIterator[Receiver]:
        await trio.lowlevel.checkpoint()
        with self._channels.open(channels) as receiver:
            yield receiver
