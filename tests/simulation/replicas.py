"""Replicas in a world: their shared store, and processes that pause.

Each replica reaches the store through its own `ReplicaStore`, which has a delay, fails for a while, and ends with its
process.

| Rule | When it is checked |
|---|---|
| the outcome of a task is written once | with each write |
| a process writes the outcome of a task only while it holds the task | with each write |
| a session that is in the store the whole time is not lost | when a client says that it is |
| expired rows and streams are deleted from the store | at the end |

The other rules of `monitor` and `tasks` hold here, too, for requests to any replica.
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

from tests.simulation.monitor import Monitor
from tests.simulation.network import caller
from tests.simulation.tasks import ProcessStore

# The records of a store are internal.
from trio_mcp.core.tasks import TaskRecord, TaskStatus
from trio_mcp.stores import MemoryStore, Row, StoreFailed

# The messages of a store are internal, because authors of servers do not need them.
from trio_mcp.stores.channels import Receiver
from trio_mcp.stores.rows import Message  # internal, too

__all__ = ["UNAVAILABLE", "ProcessPauser", "ReplicaStore", "is_store_failure", "leftovers", "sessions_of"]

T = TypeVar("T")
UNAVAILABLE = "the shared store is away"
_SILENT_SECONDS = 3.0  # until a call of a store that does not reply fails


class ReplicaStore(ProcessStore):
    """The access of one process of one replica to the store of all replicas."""

    def __init__(self, store: MemoryStore, monitor: Monitor, lag: float) -> None:
        super().__init__(store)
        self._monitor = monitor
        self._lag = lag
        self._until, self._silent = -inf, False
        self._gaps = 0
        self._waiting: dict[trio.CancelScope, None] = {}
        self._receivers: dict[Receiver, None] = {}
        self._names: set[str] = set()
        """The names under which this process holds rows."""

    # Faults.

    def disconnect(self, seconds: float, *, silent: bool) -> None:
        """Make the store unavailable for some seconds.  Waiting calls fail, and messages are lost."""
        self._until, self._silent = trio.current_time() + seconds, silent
        self._gaps += 1
        for scope in self._waiting:
            scope.cancel()
        for receiver in self._receivers:
            receiver.lose()

    def copy_outage(self, before: ReplicaStore) -> None:
        """Continue the outage of the process before."""
        self._until, self._silent = before._until, before._silent

    def heal(self) -> None:
        self._until = -inf

    @property
    def _unavailable(self) -> bool:
        return trio.current_time() < self._until

    async def _fail(self) -> NoReturn:
        if self._silent:
            await trio.sleep(_SILENT_SECONDS)
        raise StoreFailed(UNAVAILABLE)

    async def _delayed(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the store with a delay of `lag` seconds.  A call that fails in the second half has had its effect."""
        await self._live_store()
        if self._lag:
            await trio.sleep(self._lag / 2)
            await self._live_store()
        if self._unavailable:
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
        await self._live_store()
        if gaps != self._gaps:
            await self._fail()
        return done

    # Rows.

    async def add(self, row: Row, *, each: float = inf, total: float = inf) -> bool:
        return await self._delayed(partial(self.store.add, row, each=each, total=total))

    async def get(self, kind: str, key: str) -> Row | None:
        return await self._delayed(partial(self.store.get, kind, key))

    async def replace(self, row: Row) -> bool:
        return await self._delayed(partial(self._replace, row))

    async def _replace(self, row: Row) -> bool:
        before = self.store._rows.get((row.kind, row.key))
        replaced = await self.store.replace(row)
        if replaced and before is not None and row.kind.startswith("task "):
            self._check_outcome(before, row)
        return replaced

    def _check_outcome(self, before: Row, row: Row) -> None:
        old, new = (TaskRecord.from_text(each.body.partition(b"\n")[0].decode()) for each in (before, row))
        self._monitor.check(not old.terminal, f"the task {row.key} was {old.status.value}, and is written again")
        if new.status in (TaskStatus.COMPLETED, TaskStatus.FAILED):
            held = before.holder in self._names
            self._monitor.check(held, f"a process ends the task {row.key} that another one holds")

    async def delete(self, kind: str, key: str) -> bool:
        return await self._delayed(partial(self.store.delete, kind, key))

    async def list(self, kind: str, owner: str, after: tuple[float, str], limit: int) -> Sequence[Row]:
        return await self._delayed(partial(self.store.list, kind, owner, after, limit))

    async def sweep(self, now: float) -> int:
        return await self._delayed(partial(self.store.sweep, now))

    async def lease(self, holder: str, until: float) -> None:
        self._names.add(holder)
        await self._delayed(partial(self.store.lease, holder, until))

    async def claim(
        self, kind: str, holder: str, now: float, limit: int, **how: Collection[str] | None
    ) -> Sequence[Row]:
        return await self._delayed(partial(self.store.claim, kind, holder, now, limit, **how))

    async def changes(self, after: int) -> tuple[int, Sequence[tuple[str, str]]]:
        return await self._delayed(partial(self.store.changes, after))

    # Streams and messages.

    async def append(self, stream: str, body: bytes, *, owner: str, expires: float, max_bytes: int) -> int:
        return await self._delayed(
            partial(self.store.append, stream, body, owner=owner, expires=expires, max_bytes=max_bytes)
        )

    async def read(self, stream: str, after: int, limit: int) -> tuple[int, Sequence[tuple[int, bytes]]]:
        return await self._delayed(partial(self.store.read, stream, after, limit))

    async def discard(self, stream: str) -> None:
        await self._delayed(partial(self.store.discard, stream))

    async def send(self, channel: str, body: bytes) -> None:
        await self._delayed(partial(self.store.send, channel, body))

    @asynccontextmanager
    async def receive(self, channels: Sequence[str]) -> AsyncIterator[AsyncIterator[Message]]:
        await self._delayed(trio.lowlevel.checkpoint)
        async with self.store.receive(channels) as receiver:
            self._receivers[receiver] = None
            try:
                yield _DelayedMessages(self, receiver, self._gaps)
            finally:
                del self._receivers[receiver]


class _DelayedMessages:
    """The messages of one block.  Each is delayed by half of the lag, and those of an outage are lost."""

    def __init__(self, store: ReplicaStore, receiver: Receiver, gaps: int) -> None:
        self._store, self._receiver, self._gaps = store, receiver, gaps
        self._taken: Message | None = None  # kept here, so that it is not lost if this task is cancelled

    def __aiter__(self) -> _DelayedMessages:
        return self

    async def __anext__(self) -> Message:
        store = self._store
        while True:
            await store._live_store()
            if self._gaps != store._gaps:
                if store._unavailable:
                    await trio.sleep_until(store._until)
                    continue
                self._gaps, self._taken = store._gaps, None
                self._receiver.lose()
            if self._taken is None:
                self._taken = await anext(self._receiver)
            if store._lag:
                await trio.sleep(store._lag / 2)
            if self._gaps == store._gaps and not store.killed:
                taken, self._taken = self._taken, None
                return taken


def is_store_failure(error: BaseException) -> bool:
    """Whether this is a failure of the store, or a group of only those."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_store_failure, error.exceptions))
    return isinstance(error, StoreFailed)


def leftovers(store: MemoryStore) -> list[str]:
    """Return the rows and streams in a store, except those of tasks and of running replicas."""
    rows = [f"{kind} {key}" for kind, key in store._rows if not kind.startswith(("task ", "replica "))]
    return rows + list(store._streams)


def sessions_of(store: MemoryStore, client: str, now: float) -> set[str]:
    """Return the names of the sessions of a client in the store."""
    rows = [row for row in store._rows.values() if row.kind.startswith("session ") and row.expires > now]
    return {row.key for row in rows if json.loads(row.body)["principal"] == client}


@attrs.define(eq=False)
class ProcessPauser(trio.abc.Instrument):
    """Pauses processes: none of their tasks takes a step, while the rest of the world continues.

    A task belongs to the program named by the context variable `caller`, which its child tasks inherit.
    """

    _held: dict[str, list[trio.lowlevel.Task]] = attrs.field(factory=dict)

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        if self._held and (held := self._held.get(task.context.get(caller, ""))) is not None:
            assert GLOBAL_RUN_CONTEXT.runner.runq.pop() is task
            held.append(task)

    def pause(self, name: str) -> None:
        self._held.setdefault(name, [])

    def resume(self, name: str) -> None:
        GLOBAL_RUN_CONTEXT.runner.runq.extend(self._held.pop(name, ()))
