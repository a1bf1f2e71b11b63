"""Tasks that are used again: each piece of work has one to itself while it runs, and leaves nothing to the next."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_mcp import crew
from trio_mcp.crew import Crew

variable: ContextVar[Any] = ContextVar("variable", default="unset")


class Bench:
    """A crew, and what was seen of it."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.crew = Crew(nursery)
        self.seen: list[Any] = []

    async def do(self, work: Callable[..., Any] | None = None, *args: Any, name: str = "work") -> trio.lowlevel.Task:
        """Have this done to its end; the task that did it."""
        tasks: list[trio.lowlevel.Task] = []

        async def watched() -> None:
            tasks.append(trio.lowlevel.current_task())
            if work is not None:
                await work(*args)

        self.crew.start_soon(watched, variables=copy_context(), name=name)
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

    async def look() -> None:
        names.append(trio.lowlevel.current_task().name)

    assert await bench.do(look, name="second") is task
    assert names == ["second"]


async def test_what_goes_on_at_once_has_tasks_of_its_own(bench: Bench) -> None:
    gate, tasks = trio.Event(), set()

    async def wait() -> None:
        tasks.add(trio.lowlevel.current_task())
        await gate.wait()

    for _ in range(3):
        bench.crew.start_soon(wait, variables=copy_context(), name="waits")
    await wait_all_tasks_blocked()
    assert len(tasks) == 3
    gate.set()
    await wait_all_tasks_blocked()
    assert await bench.do() in tasks


async def test_variables_are_those_of_who_starts_it_and_of_nobody_before(bench: Bench) -> None:
    async def change(to: Any) -> None:
        bench.seen.append(variable.get())
        variable.set(to)
        await trio.lowlevel.checkpoint()
        bench.seen.append(variable.get())

    task = await bench.do(change, "one")
    assert await bench.do(change, "two") is task
    mine = copy_context()
    mine.run(variable.set, "mine")
    bench.crew.start_soon(change, "three", variables=mine, name="work")
    await wait_all_tasks_blocked()
    assert bench.seen == ["unset", "one", "unset", "two", "mine", "three"]
    assert mine[variable] == "mine"  # it had a copy


class Large:
    """What somebody would not want to be kept."""


async def test_nothing_that_was_used_is_kept_by_a_task_that_waits(bench: Bench) -> None:
    async def use(what: Large) -> None:
        variable.set(what)

    large = Large()
    gone = weakref.ref(large)
    bench.crew.start_soon(use, large, variables=copy_context(), name="work")
    del large
    await wait_all_tasks_blocked()
    assert gone() is None


async def test_what_was_cancelled_takes_its_task_along(bench: Bench) -> None:
    ended = []

    async def wait() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.lowlevel.current_task())

    scope = bench.crew.start_soon(wait, variables=copy_context(), name="waits")
    await wait_all_tasks_blocked()
    scope.cancel()
    await wait_all_tasks_blocked()
    assert len(ended) == 1
    assert await bench.do(trio.sleep, 0) not in ended


async def test_a_cancellation_that_came_too_late_takes_the_task_along(bench: Bench) -> None:
    async def cancel_itself() -> None:
        scope.cancel()  # and nothing after it would notice

    scope = bench.crew.start_soon(cancel_itself, variables=copy_context(), name="work")
    await wait_all_tasks_blocked()
    await bench.do(trio.lowlevel.checkpoint)


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


async def test_few_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_SPARE", 2)
    gate = trio.Event()
    for _ in range(5):
        bench.crew.start_soon(gate.wait, variables=copy_context(), name="waits")
    await wait_all_tasks_blocked()
    before = len(bench.nursery.child_tasks)
    gate.set()
    await wait_all_tasks_blocked()
    assert len(bench.nursery.child_tasks) == before - 3


async def test_what_comes_when_all_of_it_is_cancelled_is_cancelled_too() -> None:
    seen = []

    async def work() -> None:
        seen.append("begun")
        await trio.lowlevel.checkpoint()
        seen.append("went on")

    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        await bench.do()
        nursery.cancel_scope.cancel()
        bench.crew.start_soon(work, variables=copy_context(), name="work")
    assert seen == ["begun"]
    assert not nursery.child_tasks
