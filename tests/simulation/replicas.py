"""Replicas in a world: the store that they share, and processes that stand still.

Each replica has its own way to the store, a `Reached`.  It takes time, fails for a while, and ends with its process.

| Rule | When it is checked |
|---|---|
| the outcome of a task is written once | with each write |
| a process writes the outcome of a task only while it holds the task | with each write |
| a session that the store has the whole time is not lost | when a client says that it is |
| what has expired leaves nothing in the store | at the end |

The other rules of `book` and `tasks` hold here as well, whichever replica serves a request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import NoReturn, TypeVar

import attrs
import trio
from trio._core._run import GLOBAL_RUN_CONTEXT

from tests.simulation.book import Book
from tests.simulation.network import caller
from tests.simulation.tasks import Mounted

# The records of a store are an inner part.
from trio_mcp.core.tasks import TaskRecord, TaskStatus
from trio_mcp.stores import MemoryStore, Row, StoreFailed

# The messages of a store are an inner part: authors of servers need none.
from trio_mcp.stores.channels import Receiver
from trio_mcp.stores.rows import Message  # as above

__all__ = ["AWAY", "Reached", "Standstill", "is_away", "leftovers", "sessions_of"]

T = TypeVar("T")
AWAY = "the shared store is away"
_SILENT = 3.0  # seconds until a call of a store that says nothing fails


class Reached(Mounted):
    """The store of all replicas as one life of one of them reaches it."""

    def __init__(self, store: MemoryStore, book: Book, lag: float) -> None:
        super().__init__(store)
        self._book = book
        self._lag = lag
        self._until, self._silent = -inf, False
        self._gaps = 0
        self._waiting: dict[trio.CancelScope, None] = {}
        self._receivers: dict[Receiver, None] = {}
        self._names: set[str] = set()
        """The names under which this process holds rows."""

    # What goes wrong.

    def lose(self, seconds: float, *, silent: bool) -> None:
        """It cannot be reached for a while.  Calls that wait fail, and messages are lost."""
        self._until, self._silent = trio.current_time() + seconds, silent
        self._gaps += 1
        for scope in self._waiting:
            scope.cancel()
        for receiver in self._receivers:
            receiver.lose()

    def stay_away(self, before: Reached) -> None:
        """As in the life before."""
        self._until, self._silent = before._until, before._silent

    def heal(self) -> None:
        self._until = -inf

    @property
    def _away(self) -> bool:
        return trio.current_time() < self._until

    async def _fail(self) -> NoReturn:
        if self._silent:
            await trio.sleep(_SILENT)
        raise StoreFailed(AWAY)

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        """A call takes `lag` seconds, and may have had its effect if it fails in the second half of them."""
        await self._alive()
        if self._lag:
            await trio.sleep(self._lag / 2)
            await self._alive()
        if self._away:
            await self._fail()
        gaps = self._gaps
        with trio.CancelScope() as scope:
            self._waiting[scope] = None
            try:
                done = await call()
            finally:
                del self._waiting[scope]
        if scope.cancelled_caught:
            await self._fail()
        if self._lag:
            await trio.sleep(self._lag / 2)
        await self._alive()
        if gaps != self._gaps:
            await self._fail()
        return done

    # Rows.

    async def add(self, row: Row, *, each: float = inf, total: float = inf) -> bool:
        return await self._call(partial(self.store.add, row, each=each, total=total))

    async def get(self, kind: str, key: str) -> Row | None:
        return await self._call(partial(self.store.get, kind, key))

    async def replace(self, row: Row) -> bool:
        return await self._call(partial(self._replace, row))

    async def _replace(self, row: Row) -> bool:
        before = self.store._rows.get((row.kind, row.key))
        replaced = await self.store.replace(row)
        if replaced and before is not None and row.kind.startswith("task "):
            self._check_outcome(before, row)
        return replaced

    def _check_outcome(self, before: Row, row: Row) -> None:
        old, new = (TaskRecord.from_text(each.body.partition(b"\n")[0].decode()) for each in (before, row))
        self._book.check(not old.terminal, f"the task {row.key} was {old.status.value}, and is written again")
        if new.status in (TaskStatus.COMPLETED, TaskStatus.FAILED):
            held = before.holder in self._names
            self._book.check(held, f"a process ends the task {row.key} that another one holds")

    async def delete(self, kind: str, key: str) -> bool:
        return await self._call(partial(self.store.delete, kind, key))

    async def list(self, kind: str, owner: str, after: tuple[float, str], limit: int) -> Sequence[Row]:
        return await self._call(partial(self.store.list, kind, owner, after, limit))

    async def sweep(self, now: float) -> int:
        return await self._call(partial(self.store.sweep, now))

    async def lease(self, holder: str, until: float) -> None:
        self._names.add(holder)
        await self._call(partial(self.store.lease, holder, until))

    async def claim(
        self, kind: str, holder: str, now: float, limit: int, **how: Collection[str] | None
    ) -> Sequence[Row]:
        return await self._call(partial(self.store.claim, kind, holder, now, limit, **how))

    async def changes(self, after: int) -> tuple[int, Sequence[tuple[str, str]]]:
        return await self._call(partial(self.store.changes, after))

    # Streams and messages.

    async def append(self, stream: str, body: bytes, *, owner: str, expires: float, max_bytes: int) -> int:
        return await self._call(
            partial(self.store.append, stream, body, owner=owner, expires=expires, max_bytes=max_bytes)
        )

    async def read(self, stream: str, after: int, limit: int) -> tuple[int, Sequence[tuple[int, bytes]]]:
        return await self._call(partial(self.store.read, stream, after, limit))

    async def discard(self, stream: str) -> None:
        await self._call(partial(self.store.discard, stream))

    async def send(self, channel: str, body: bytes) -> None:
        await self._call(partial(self.store.send, channel, body))

    @asynccontextmanager
    async def receive(self, channels: Sequence[str]) -> AsyncIterator[AsyncIterator[Message]]:
        await self._call(trio.lowlevel.checkpoint)
        async with self.store.receive(channels) as receiver:
            self._receivers[receiver] = None
            try:
                yield _Delivered(self, receiver, self._gaps)
            finally:
                del self._receivers[receiver]


class _Delivered:
    """The messages of one block: each is late by half of the lag, and those of a time without the store are lost."""

    def __init__(self, reached: Reached, receiver: Receiver, gaps: int) -> None:
        self._reached, self._receiver, self._gaps = reached, receiver, gaps
        self._taken: Message | None = None  # it is not lost if this task is cancelled

    def __aiter__(self) -> _Delivered:
        return self

    async def __anext__(self) -> Message:
        reached = self._reached
        while True:
            await reached._alive()
            if self._gaps != reached._gaps:
                if reached._away:
                    await trio.sleep_until(reached._until)
                    continue
                self._gaps, self._taken = reached._gaps, None
                self._receiver.lose()
            if self._taken is None:
                self._taken = await anext(self._receiver)
            if reached._lag:
                await trio.sleep(reached._lag / 2)
            if self._gaps == reached._gaps and not reached.killed:
                taken, self._taken = self._taken, None
                return taken


def is_away(error: BaseException) -> bool:
    """Whether this is the failure of the store, and no other."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_away, error.exceptions))
    return isinstance(error, StoreFailed)


def leftovers(store: MemoryStore) -> list[str]:
    """What is in a store, except what belongs to tasks and to replicas that live."""
    rows = [f"{kind} {key}" for kind, key in store._rows if not kind.startswith(("task ", "replica "))]
    return rows + list(store._streams)


def sessions_of(store: MemoryStore, client: str, now: float) -> set[str]:
    """The names of the sessions of a client in the store."""
    rows = [row for row in store._rows.values() if row.kind.startswith("session ") and row.expires > now]
    return {row.key for row in rows if json.loads(row.body)["principal"] == client}


@attrs.define(eq=False)
class Standstill(trio.abc.Instrument):
    """Processes that stand still: none of their tasks takes a step, while the world around them goes on.

    A task belongs to the program in whose name it connects (`caller`), which the tasks that it starts inherit.
    """

    _held: dict[str, list[trio.lowlevel.Task]] = attrs.field(factory=dict)

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        if self._held and (held := self._held.get(task.context.get(caller, ""))) is not None:
            assert GLOBAL_RUN_CONTEXT.runner.runq.pop() is task
            held.append(task)

    def stop(self, name: str) -> None:
        self._held.setdefault(name, [])

    def go_on(self, name: str) -> None:
        GLOBAL_RUN_CONTEXT.runner.runq.extend(self._held.pop(name, ()))
