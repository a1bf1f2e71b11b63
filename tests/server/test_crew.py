"""Tasks that are used again: each piece of work has one to itself while it runs, and leaves nothing to the next."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_mcp.crew import Crew, Hand, Idle

variable: ContextVar[Any] = ContextVar("variable", default="unset")


class Bench:
    """A crew, and what was seen of it."""

    def __init__(self, nursery: trio.Nursery, spare: int = 64, in_all: Idle | None = None) -> None:
        self.nursery = nursery
        self.in_all = Idle() if in_all is None else in_all
        self.crew = Crew(nursery, spare, self.in_all)
        self.seen: list[Any] = []

    def start(self, work: Callable[[Any], Awaitable[object]], argument: Any = None, name: str = "work") -> Hand:
        hand = self.crew.hire()
        self.crew.start(hand, work, argument, name)
        return hand

    async def at_once(self, number: int) -> None:
        """Have so many at work at the same time."""
        gate = trio.Event()
        for _ in range(number):
            self.start(lambda _: gate.wait())
        await wait_all_tasks_blocked()
        gate.set()
        await wait_all_tasks_blocked()

    async def do(
        self, work: Callable[[Any], Awaitable[object]] | None = None, argument: Any = None, name: str = "work"
    ) -> trio.lowlevel.Task:
        """Have this done to its end; the task that did it."""
        tasks: list[trio.lowlevel.Task] = []

        async def watched(argument: Any) -> None:
            tasks.append(trio.lowlevel.current_task())
            if work is not None:
                await work(argument)

        self.start(watched, argument, name)
        await wait_all_tasks_blocked()
        return tasks[0]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with trio.open_nursery() as nursery:
        yield Bench(nursery)
        nursery.cancel_scope.cancel()


async def test_one_task_does_one_thing_after_the_other(bench: Bench) -> None:
    task = await bench.do(name="first")
    assert task.name == "a handler's task, which waits for the next call"
    names = []

    async def look(_: None) -> None:
        names.append(trio.lowlevel.current_task().name)

    assert await bench.do(look, name="second") is task
    assert names == ["second"]


async def test_what_goes_on_at_once_has_tasks_of_its_own(bench: Bench) -> None:
    tasks = set()

    async def wait(gate: trio.Event) -> None:
        tasks.add(trio.lowlevel.current_task())
        await gate.wait()

    gate = trio.Event()
    for _ in range(3):
        bench.start(wait, gate)
    await wait_all_tasks_blocked()
    assert len(tasks) == 3
    gate.set()
    await wait_all_tasks_blocked()
    assert await bench.do() in tasks


async def test_variables_are_those_of_who_made_it_and_of_nobody_before() -> None:
    seen = []

    async def change(to: Any) -> None:
        seen.append(variable.get())
        variable.set(to)
        await trio.lowlevel.checkpoint()
        seen.append(variable.get())

    variable.set("mine")
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        variable.set("changed since")
        task = await bench.do(change, "one")
        assert await bench.do(change, "two") is task
        assert await bench.do(change, "three") is task
        nursery.cancel_scope.cancel()
    assert seen == ["mine", "one", "mine", "two", "mine", "three"]


class Large:
    """What somebody would not want to be kept."""


async def test_nothing_that_was_used_is_kept_by_a_task_that_waits(bench: Bench) -> None:
    async def use(what: Large) -> None:
        variable.set(what)

    large = Large()
    gone = weakref.ref(large)
    bench.start(use, large)
    del large
    await wait_all_tasks_blocked()
    assert gone() is None


async def test_what_was_cancelled_takes_its_task_along(bench: Bench) -> None:
    ended = []

    async def wait(_: None) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.lowlevel.current_task())

    hand = bench.start(wait)
    await wait_all_tasks_blocked()
    hand.scope.cancel()
    await wait_all_tasks_blocked()
    assert len(ended) == 1
    assert await bench.do() not in ended


async def test_a_cancellation_that_came_too_late_takes_the_task_along(bench: Bench) -> None:
    async def cancel_itself(hands: list[Hand]) -> None:
        hands[0].scope.cancel()  # and nothing after it would notice

    hands: list[Hand] = []
    hands.append(bench.start(cancel_itself, hands))
    await wait_all_tasks_blocked()
    await bench.do(trio.sleep, 0)


async def test_a_lock_that_was_not_given_back_breaks_with_its_task(bench: Bench) -> None:
    async def lock_it(lock: trio.Lock) -> None:
        await lock.acquire()

    lock = trio.Lock()
    task = await bench.do(lock_it, lock)
    assert await bench.do() is not task
    with pytest.raises(trio.BrokenResourceError):
        await lock.acquire()


async def abandoned_scope(kept: list[Any]) -> None:
    async def generator() -> AsyncIterator[None]:
        with trio.move_on_after(60):
            yield

    kept.append(generator())
    await kept[-1].__anext__()


async def abandoned_nursery(kept: list[Any]) -> None:
    @asynccontextmanager
    async def block() -> AsyncIterator[None]:
        async with trio.open_nursery():
            yield

    kept.append(block())
    await kept[-1].__aenter__()


# What was abandoned is closed by whoever finds it, and fails at it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("work", [abandoned_scope, abandoned_nursery])
async def test_what_leaves_something_open_fails_by_itself_and_at_once(work: Callable[..., Any]) -> None:
    kept: list[Any] = []
    went_on = []

    async def next_call() -> None:
        async with trio.open_nursery() as nursery:
            await Bench(nursery).do(work, kept)
            went_on.append("in what was left open")

    with pytest.raises(BaseExceptionGroup) as caught:
        await next_call()
    assert not went_on
    corrupted = caught.value.subgroup(lambda each: "stack corrupted" in str(each) and isinstance(each, RuntimeError))
    assert corrupted is not None


@pytest.mark.parametrize(
    ("spare", "others", "waiting"),
    [(2, 0, 5), (2, 4_997, 3), (2, 4_998, 2), (2, 9_000, 2), (5, 9_000, 5), (0, 0, 0)],
)
async def test_who_has_worked_waits_unless_too_many_do(spare: int, others: int, waiting: int) -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery, spare)
        bench.in_all.hands = others  # of other crews
        await bench.at_once(5)
        assert len(nursery.child_tasks) == waiting
        assert bench.in_all.hands == others + waiting
        nursery.cancel_scope.cancel()
    assert bench.in_all.hands == others


async def test_who_was_not_wanted_for_long_waits_no_more() -> None:
    async def at_once(wanted: int, calls: int) -> None:
        for _ in range(calls // wanted):
            await bench.at_once(wanted)

    async with trio.open_nursery() as nursery:
        bench = Bench(nursery, spare=2)
        await at_once(50, 20_000)
        await at_once(50, 19_950)
        assert len(nursery.child_tasks) == 50  # all of them are wanted
        await at_once(5, 40_000)
        assert len(nursery.child_tasks) == 2 + 5
        await at_once(1, 40_000)
        assert len(nursery.child_tasks) == bench.in_all.hands == 2 + 1
        nursery.cancel_scope.cancel()


async def test_at_the_end_nobody_waits_any_more() -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        gate = trio.Event()
        at_work = bench.start(lambda _: gate.wait())
        for _ in range(3):
            bench.start(trio.sleep, 0)
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 4
        bench.crew.end()
        await wait_all_tasks_blocked()
        assert nursery.child_tasks == {at_work.task}
        gate.set()
        await wait_all_tasks_blocked()
        assert not nursery.child_tasks
        nursery.cancel_scope.cancel()


async def test_what_comes_when_all_of_it_is_cancelled_is_cancelled_too() -> None:
    seen = []

    async def work(_: None) -> None:
        seen.append("begun")
        await trio.lowlevel.checkpoint()
        seen.append("went on")

    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        await bench.do()
        nursery.cancel_scope.cancel()
        bench.start(work)
    assert seen == ["begun"]
    assert not nursery.child_tasks
