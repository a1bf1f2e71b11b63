"""The queue of one wire: which task writes, when, how many messages in one write, and the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from trio_mcp.core import Limits
from trio_mcp.transport import CLOSING, GONE, Duplex, Lines


class HandlerStub:
    """A substitute for a `SessionHandler` and its session, with the messages of a connection."""

    def __init__(self, connection: SlowConnection) -> None:
        self.session = self
        self.connection = connection

    @property
    def queue(self) -> list[str]:
        return self.connection.waiting


class SlowDuplex(Duplex):
    """A `Duplex` that writes to a `SlowConnection`."""

    def __init__(self, connection: SlowConnection, limit: int) -> None:
        limits = Limits(outgoing=limit)
        stream, _ = memory_stream_pair()
        super().__init__(cast(Any, HandlerStub(connection)), stream, Lines(limits), limits, nursery=connection.nursery)
        self.connection = connection

    def _take(self) -> Any:
        return self.connection.take()

    async def _send(self, batch: Any) -> None:
        await self.connection.send(batch)

    def close(self) -> None:
        super().close()
        self.connection.on_close()


class SlowConnection:
    """Each write takes a second.  `written` has the task and the messages of each write."""

    def __init__(self, nursery: trio.Nursery, limit: int = 3) -> None:
        self.waiting: list[str] = []
        self.written: list[tuple[str, list[str]]] = []
        self.cut: list[list[str]] = []
        self.error: Exception | None = None
        self.closes = 0
        self.nursery = nursery
        self.outbox = SlowDuplex(self, limit)

    def on_close(self) -> None:
        self.closes += 1

    def take(self) -> list[str] | None:
        taken, self.waiting = self.waiting, []
        return [each for each in taken if each != "dropped"] or None

    async def send(self, batch: list[str]) -> None:
        if self.error is not None:
            raise self.error
        try:
            await trio.sleep(1)
        except trio.Cancelled:
            self.cut.append(batch)
            raise
        self.written.append((trio.lowlevel.current_task().name, batch))

    def put(self, *batch: str) -> None:
        self.waiting += batch
        self.outbox.wake()

    async def put_and_flush(self, *batch: str) -> None:
        self.waiting += batch
        await self.outbox.flush()

    @property
    def batches(self) -> list[list[str]]:
        return [batch for _, batch in self.written]


@asynccontextmanager
async def slow_connection(limit: int = 3) -> AsyncIterator[SlowConnection]:
    async with trio.open_nursery() as nursery:
        yield SlowConnection(nursery, limit)


async def test_queued_messages_are_written_together_after_the_current_write(autojump_clock: MockClock) -> None:
    async with slow_connection() as connection, trio.open_nursery() as nursery:
        for word in ("a", "b", "c"):
            nursery.start_soon(connection.put_and_flush, word, name=word)
            await wait_all_tasks_blocked()
    assert connection.batches == [["a"], ["b", "c"]]
    assert connection.written[0][0] == "a"
    assert connection.written[1][0] == "the writer of a connection"
    assert trio.current_time() == 2


async def test_a_writer_task_exists_only_while_there_are_messages(autojump_clock: MockClock) -> None:
    async with slow_connection() as connection:
        connection.outbox.wake()
        assert not connection.nursery.child_tasks
        for _ in range(2):
            connection.put("a")
            connection.put("b")
            assert len(connection.nursery.child_tasks) == 1
            await trio.sleep(0.5)
            connection.put("c")
            assert len(connection.nursery.child_tasks) == 1
            await trio.sleep(2)
            assert not connection.nursery.child_tasks
    assert connection.batches == [["a", "b"], ["c"]] * 2


async def test_no_writer_task_starts_during_a_write(autojump_clock: MockClock) -> None:
    async with slow_connection() as connection, trio.open_nursery() as nursery:
        nursery.start_soon(connection.put_and_flush, "a")
        await wait_all_tasks_blocked()
        connection.put("b")
        assert not connection.nursery.child_tasks
    assert connection.batches == [["a"], ["b"]]


async def test_a_late_writer_task_does_not_write_at_the_same_time(autojump_clock: MockClock) -> None:
    class Busy(SlowConnection):
        at_work = 0

        async def send(self, batch: list[str]) -> None:
            if not self.written:
                self.waiting.append("c")  # a message for the writer task
            self.at_work += 1
            assert self.at_work == 1
            await super().send(batch)
            self.at_work -= 1

    async with trio.open_nursery() as nursery:
        connection = Busy(nursery)
        connection.put("a")  # a writer task starts
        await connection.put_and_flush("b")
    assert connection.outbox.failure is None
    assert connection.batches == [["a", "b"], ["c"]]


async def test_written_does_not_wait_for_messages_after_the_mark(autojump_clock: MockClock) -> None:
    async with slow_connection() as connection:
        connection.waiting.append("a")
        mark = connection.outbox.mark
        await connection.outbox.flush()
        connection.put("b")
        await trio.sleep(0.5)
        connection.put("c")  # while b is being written
        await connection.outbox.written(mark)
        assert trio.current_time() == 1.5
    assert connection.batches == [["a"], ["b"], ["c"]]


async def test_an_empty_batch_is_not_written(autojump_clock: MockClock) -> None:
    async with slow_connection() as connection:
        connection.put("dropped")
        await wait_all_tasks_blocked()
        await connection.put_and_flush("dropped")
        assert not connection.written
        await connection.put_and_flush("a")
    assert connection.batches == [["a"]]


async def test_a_write_is_finished_although_its_task_is_cancelled(autojump_clock: MockClock) -> None:
    async with slow_connection() as connection:
        with trio.move_on_after(0.1) as scope:
            await connection.put_and_flush("a")
            await trio.sleep_forever()
        assert scope.cancelled_caught
        assert trio.current_time() == 1
    assert connection.batches == [["a"]]


async def test_messages_queued_during_a_write_are_written_after_it(autojump_clock: MockClock) -> None:
    async with slow_connection() as connection:
        mark = connection.outbox.mark
        connection.waiting.append("a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.outbox.written, mark)
            await wait_all_tasks_blocked()
            connection.put("b")
    assert connection.batches == [["a"], ["b"]]


@pytest.mark.parametrize("busy", [False, True])
async def test_messages_after_a_mark_are_written_separately(busy: bool, autojump_clock: MockClock) -> None:
    async with slow_connection() as connection:
        if busy:
            connection.put("first")
            await wait_all_tasks_blocked()
        connection.waiting.append("a")
        mark = connection.outbox.mark
        for _ in range(2):
            await connection.outbox.written(mark)
            assert trio.current_time() == 1
        connection.put("b")
        await connection.outbox.empty()
    assert connection.batches == [["first"], ["a"], ["b"]][not busy :]


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_the_queue_is_full_at_its_limit_and_room_waits_for_a_write(limit: int, autojump_clock: MockClock) -> None:
    async with slow_connection(limit) as connection:
        assert not connection.outbox.full
        connection.waiting += ["x"] * max(limit, 1)
        assert connection.outbox.full
        if limit:
            await connection.outbox.room()
            assert not connection.written
            connection.waiting.append("x")
        await connection.outbox.room()
        assert not connection.outbox.full
        assert len(connection.batches) == 1
        connection.waiting += ["x"] * 10
        await connection.outbox.room(10)
        assert len(connection.batches) == 1
        await connection.outbox.empty()
        assert len(connection.batches) == 2


async def test_idle_waits_for_the_write_and_empty_for_all_messages(autojump_clock: MockClock) -> None:
    async with slow_connection() as connection:
        await connection.outbox.idle()
        await connection.outbox.empty()
        connection.put("a")
        await trio.sleep(0.5)
        await connection.outbox.idle()
        assert trio.current_time() == 1
        connection.waiting.append("b")
        await connection.outbox.empty()
        assert trio.current_time() == 2


Wait = Callable[[SlowDuplex], object]
WAITS: dict[str, Wait] = {
    "room": lambda outbox: outbox.room(0),
    "written": lambda outbox: outbox.written(10),
    "empty": lambda outbox: outbox.empty(),
}


@pytest.mark.parametrize("end", [*GONE, ValueError, "closed"])
@pytest.mark.parametrize("wait", WAITS)
async def test_waits_end_when_the_connection_fails_or_closes(
    wait: str, end: type[Exception] | str, autojump_clock: MockClock
) -> None:
    async with slow_connection() as connection:
        connection.put("a")
        await wait_all_tasks_blocked()
        connection.waiting += ["b"] * 5
        async with trio.open_nursery() as nursery:
            nursery.start_soon(WAITS[wait], connection.outbox)
            await wait_all_tasks_blocked()
            if isinstance(end, str):
                connection.outbox.close()
            else:
                connection.error = end("no more")
        assert trio.current_time() == (1 if end != "closed" or wait == "empty" else 0)
        assert connection.closes == 1
        assert not connection.outbox.full
        assert connection.outbox.broken is (end != "closed")
        assert (connection.outbox.failure is not None) is (end is ValueError)
        for word in ("c", "d"):
            connection.put(word)
            await connection.put_and_flush(word)
        await connection.outbox.room()
    assert connection.batches == [["a"]]


@pytest.mark.parametrize("begun", ["before", "after"])
async def test_finish_gives_a_write_some_time_and_then_cuts_it(begun: str, autojump_clock: MockClock) -> None:
    async with slow_connection() as connection:
        connection.send = _never  # type: ignore[method-assign]
        if begun == "before":
            connection.put("a")
            await trio.sleep(10)
        start = trio.current_time()
        connection.outbox.finish()
        assert connection.outbox.deadline == start + CLOSING
        if begun == "after":
            connection.put("a")
        await wait_all_tasks_blocked()
        await connection.outbox.idle()
        assert trio.current_time() == start + CLOSING
        assert connection.outbox.broken
        assert connection.outbox.failure is None
        connection.put("b")
        await connection.outbox.empty()
    assert not connection.written


async def _never(_: list[str]) -> None:
    await trio.sleep_forever()
