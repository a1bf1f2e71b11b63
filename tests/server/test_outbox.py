"""What waits for one wire: who writes, when, how much at once, and how that ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from trio_mcp.core import Limits
from trio_mcp.transport import CLOSING, GONE, Duplex, Lines


class Held:
    """A `SessionHandler`, and its session, with the messages of a `Wire`."""

    def __init__(self, wire: Wire) -> None:
        self.session = self
        self.wire = wire

    @property
    def queue(self) -> list[str]:
        return self.wire.waiting


class Queue(Duplex):
    """The queue of a `Wire`."""

    def __init__(self, wire: Wire, limit: int) -> None:
        limits = Limits(outgoing=limit)
        stream, _ = memory_stream_pair()
        super().__init__(cast(Any, Held(wire)), stream, Lines(limits), limits, nursery=wire.nursery)
        self.at = wire

    def _take(self) -> Any:
        return self.at.take()

    async def _send(self, what: Any) -> None:
        await self.at.send(what)

    def close(self) -> None:
        super().close()
        self.at.left()


class Wire:
    """Takes a second for each write.  `written` says which task wrote what."""

    def __init__(self, nursery: trio.Nursery, limit: int = 3) -> None:
        self.waiting: list[str] = []
        self.written: list[tuple[str, list[str]]] = []
        self.cut: list[list[str]] = []
        self.error: Exception | None = None
        self.gone = 0
        self.nursery = nursery
        self.outbox = Queue(self, limit)

    def left(self) -> None:
        self.gone += 1

    def take(self) -> list[str] | None:
        taken, self.waiting = self.waiting, []
        return [each for each in taken if each != "nothing after all"] or None

    async def send(self, what: list[str]) -> None:
        if self.error is not None:
            raise self.error
        try:
            await trio.sleep(1)
        except trio.Cancelled:
            self.cut.append(what)
            raise
        self.written.append((trio.lowlevel.current_task().name, what))

    def put(self, *what: str) -> None:
        self.waiting += what
        self.outbox.wake()

    async def say(self, *what: str) -> None:
        self.waiting += what
        await self.outbox.flush()

    @property
    def words(self) -> list[list[str]]:
        return [what for _, what in self.written]


@asynccontextmanager
async def wired(limit: int = 3) -> AsyncIterator[Wire]:
    async with trio.open_nursery() as nursery:
        yield Wire(nursery, limit)


async def test_who_has_something_writes_it_and_what_piles_up_is_written_together(autojump_clock: MockClock) -> None:
    async with wired() as wire, trio.open_nursery() as nursery:
        for word in ("a", "b", "c"):
            nursery.start_soon(wire.say, word, name=word)
            await wait_all_tasks_blocked()
    assert wire.words == [["a"], ["b", "c"]]
    assert wire.written[0][0] == "a"
    assert wire.written[1][0] == "the writer of a connection"
    assert trio.current_time() == 2


async def test_a_writer_is_there_only_while_there_is_something_to_write(autojump_clock: MockClock) -> None:
    async with wired() as wire:
        wire.outbox.wake()
        assert not wire.nursery.child_tasks
        for _ in range(2):
            wire.put("a")
            wire.put("b")
            assert len(wire.nursery.child_tasks) == 1
            await trio.sleep(0.5)
            wire.put("c")
            assert len(wire.nursery.child_tasks) == 1
            await trio.sleep(2)
            assert not wire.nursery.child_tasks
    assert wire.words == [["a", "b"], ["c"]] * 2


async def test_no_writer_is_sent_for_while_somebody_writes(autojump_clock: MockClock) -> None:
    async with wired() as wire, trio.open_nursery() as nursery:
        nursery.start_soon(wire.say, "a")
        await wait_all_tasks_blocked()
        wire.put("b")
        assert not wire.nursery.child_tasks
    assert wire.words == [["a"], ["b"]]


async def test_a_writer_that_comes_late_does_not_write_beside_somebody_else(autojump_clock: MockClock) -> None:
    class Busy(Wire):
        at_work = 0

        async def send(self, what: list[str]) -> None:
            if not self.written:
                self.waiting.append("c")  # so that there is something for the writer
            self.at_work += 1
            assert self.at_work == 1
            await super().send(what)
            self.at_work -= 1

    async with trio.open_nursery() as nursery:
        wire = Busy(nursery)
        wire.put("a")  # a writer is sent for
        await wire.say("b")
    assert wire.outbox.failure is None
    assert wire.words == [["a", "b"], ["c"]]


async def test_what_was_put_after_a_mark_is_not_waited_for(autojump_clock: MockClock) -> None:
    async with wired() as wire:
        wire.waiting.append("a")
        mark = wire.outbox.mark
        await wire.outbox.flush()
        wire.put("b")
        await trio.sleep(0.5)
        wire.put("c")  # while b is on its way
        await wire.outbox.written(mark)
        assert trio.current_time() == 1.5
    assert wire.words == [["a"], ["b"], ["c"]]


async def test_what_is_nothing_after_all_is_not_written(autojump_clock: MockClock) -> None:
    async with wired() as wire:
        wire.put("nothing after all")
        await wait_all_tasks_blocked()
        await wire.say("nothing after all")
        assert not wire.written
        await wire.say("a")
    assert wire.words == [["a"]]


async def test_a_write_goes_on_when_the_one_who_writes_is_cancelled(autojump_clock: MockClock) -> None:
    async with wired() as wire:
        with trio.move_on_after(0.1) as scope:
            await wire.say("a")
            await trio.sleep_forever()
        assert scope.cancelled_caught
        assert trio.current_time() == 1
    assert wire.words == [["a"]]


async def test_what_was_queued_meanwhile_is_written_though_nobody_else_says_so(autojump_clock: MockClock) -> None:
    async with wired() as wire:
        mark = wire.outbox.mark
        wire.waiting.append("a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.outbox.written, mark)
            await wait_all_tasks_blocked()
            wire.put("b")
    assert wire.words == [["a"], ["b"]]


@pytest.mark.parametrize("busy", [False, True])
async def test_what_comes_after_a_mark_goes_out_apart_from_it(busy: bool, autojump_clock: MockClock) -> None:
    async with wired() as wire:
        if busy:
            wire.put("first")
            await wait_all_tasks_blocked()
        wire.waiting.append("a")
        mark = wire.outbox.mark
        for _ in range(2):
            await wire.outbox.written(mark)
            assert trio.current_time() == 1
        wire.put("b")
        await wire.outbox.empty()
    assert wire.words == [["first"], ["a"], ["b"]][not busy :]


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_it_is_full_with_so_much_and_there_is_room_when_there_is_not_more(
    limit: int, autojump_clock: MockClock
) -> None:
    async with wired(limit) as wire:
        assert not wire.outbox.full
        wire.waiting += ["x"] * max(limit, 1)
        assert wire.outbox.full
        if limit:
            await wire.outbox.room()
            assert not wire.written
            wire.waiting.append("x")
        await wire.outbox.room()
        assert not wire.outbox.full
        assert len(wire.words) == 1
        wire.waiting += ["x"] * 10
        await wire.outbox.room(10)
        assert len(wire.words) == 1
        await wire.outbox.empty()
        assert len(wire.words) == 2


async def test_idle_is_when_nobody_writes_and_empty_when_nothing_is_left(autojump_clock: MockClock) -> None:
    async with wired() as wire:
        await wire.outbox.idle()
        await wire.outbox.empty()
        wire.put("a")
        await trio.sleep(0.5)
        await wire.outbox.idle()
        assert trio.current_time() == 1
        wire.waiting.append("b")
        await wire.outbox.empty()
        assert trio.current_time() == 2


Wait = Callable[[Queue], object]
WAITS: dict[str, Wait] = {
    "room": lambda outbox: outbox.room(0),
    "written": lambda outbox: outbox.written(10),
    "empty": lambda outbox: outbox.empty(),
}


@pytest.mark.parametrize("end", [*GONE, ValueError, "closed"])
@pytest.mark.parametrize("wait", WAITS)
async def test_nobody_waits_for_what_will_never_be_written(
    wait: str, end: type[Exception] | str, autojump_clock: MockClock
) -> None:
    async with wired() as wire:
        wire.put("a")
        await wait_all_tasks_blocked()
        wire.waiting += ["b"] * 5
        async with trio.open_nursery() as nursery:
            nursery.start_soon(WAITS[wait], wire.outbox)
            await wait_all_tasks_blocked()
            if isinstance(end, str):
                wire.outbox.close()
            else:
                wire.error = end("no more")
        assert trio.current_time() == (1 if end != "closed" or wait == "empty" else 0)
        assert wire.gone == 1
        assert not wire.outbox.full
        assert wire.outbox.broken is (end != "closed")
        assert (wire.outbox.failure is not None) is (end is ValueError)
        for word in ("c", "d"):
            wire.put(word)
            await wire.say(word)
        await wire.outbox.room()
    assert wire.words == [["a"]]


@pytest.mark.parametrize("begun", ["before", "after"])
async def test_at_the_end_a_write_has_a_moment_and_is_cut_short_then(begun: str, autojump_clock: MockClock) -> None:
    async with wired() as wire:
        wire.send = _never  # type: ignore[method-assign]
        if begun == "before":
            wire.put("a")
            await trio.sleep(10)
        start = trio.current_time()
        wire.outbox.finish()
        assert wire.outbox.deadline == start + CLOSING
        if begun == "after":
            wire.put("a")
        await wait_all_tasks_blocked()
        await wire.outbox.idle()
        assert trio.current_time() == start + CLOSING
        assert wire.outbox.broken
        assert wire.outbox.failure is None
        wire.put("b")
        await wire.outbox.empty()
    assert not wire.written


async def _never(_: list[str]) -> None:
    await trio.sleep_forever()
