"""Workers are reused: a call has a worker of its own while it runs, and leaves no state for the next call."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_mcp.transport import LeftOpen, Worker, WorkerPool
from trio_mcp.transport import workers as workers_module

variable: ContextVar[Any] = ContextVar("variable", default="unset")
Work = Callable[[Any], Awaitable[object]]


class PoolUnderTest:
    """A pool of workers, with the failures of its calls."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.pool = WorkerPool(nursery)
        self.variables = copy_context()
        self.failures: list[BaseException] = []

    def start(self, work: Work, argument: Any = None, name: str = "work") -> Worker:
        async def checked(worker: Worker, argument: Any) -> None:
            try:
                await work(argument)
                worker.check()
            except Exception as error:  # noqa: BLE001
                self.failures.append(error)

        return self.pool.start(checked, argument, name, self.variables.copy())

    async def run_together(self, number: int) -> None:
        """Run this number of calls at the same time."""
        gate = trio.Event()
        for _ in range(number):
            self.start(lambda _: gate.wait())
        await wait_all_tasks_blocked()
        gate.set()
        await wait_all_tasks_blocked()

    async def run(self, work: Work | None = None, argument: Any = None, name: str = "work") -> trio.lowlevel.Task:
        """Run this call to its end, and return the task that ran it."""
        tasks: list[trio.lowlevel.Task] = []

        async def watched(argument: Any) -> None:
            tasks.append(trio.lowlevel.current_task())
            if work is not None:
                await work(argument)

        self.start(watched, argument, name)
        await wait_all_tasks_blocked()
        return tasks[0]


@pytest.fixture
async def tested() -> AsyncIterator[PoolUnderTest]:
    async with trio.open_nursery() as nursery:
        yield PoolUnderTest(nursery)
        nursery.cancel_scope.cancel()


async def test_one_task_runs_one_call_after_the_other(tested: PoolUnderTest) -> None:
    task = await tested.run(name="first")
    assert task.name == "a worker that waits for the next call"
    names = []

    async def look(_: None) -> None:
        names.append(trio.lowlevel.current_task().name)

    assert await tested.run(look, name="second") is task
    assert names == ["second"]


async def test_simultaneous_calls_have_separate_tasks(tested: PoolUnderTest) -> None:
    tasks = set()

    async def wait(gate: trio.Event) -> None:
        tasks.add(trio.lowlevel.current_task())
        await gate.wait()

    gate = trio.Event()
    for _ in range(3):
        tested.start(wait, gate)
    await wait_all_tasks_blocked()
    assert len(tasks) == 3
    gate.set()
    await wait_all_tasks_blocked()
    assert await tested.run() in tasks


async def test_each_call_starts_with_the_context_of_its_pool() -> None:
    seen = []

    async def change(to: Any) -> None:
        seen.append(variable.get())
        variable.set(to)
        await trio.lowlevel.checkpoint()
        seen.append(variable.get())

    variable.set("mine")
    async with trio.open_nursery() as nursery:
        tested = PoolUnderTest(nursery)
        variable.set("changed since")
        task = await tested.run(change, "one")
        assert await tested.run(change, "two") is task
        assert await tested.run(change, "three") is task
        nursery.cancel_scope.cancel()
    assert seen == ["mine", "one", "mine", "two", "mine", "three"]


class Large:
    """An object to which no reference may be kept."""


async def test_an_idle_worker_keeps_no_references(tested: PoolUnderTest) -> None:
    async def use(large: Large) -> None:
        variable.set(large)

    large = Large()
    reference = weakref.ref(large)
    tested.start(use, large)
    del large
    await wait_all_tasks_blocked()
    assert reference() is None


async def test_a_cancelled_call_ends_its_worker(tested: PoolUnderTest) -> None:
    ended = []

    async def wait(_: None) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.lowlevel.current_task())

    worker = tested.start(wait)
    await wait_all_tasks_blocked()
    worker.scope.cancel()
    await wait_all_tasks_blocked()
    assert len(ended) == 1
    assert await tested.run() not in ended


async def test_a_cancellation_that_comes_too_late_ends_the_worker(tested: PoolUnderTest) -> None:
    async def cancel_itself(workers: list[Worker]) -> None:
        workers[0].scope.cancel()  # no checkpoint follows

    workers: list[Worker] = []
    workers.append(tested.start(cancel_itself, workers))
    await wait_all_tasks_blocked()
    await tested.run(trio.sleep, 0)


async def test_a_lock_that_was_not_released_breaks_with_its_worker(tested: PoolUnderTest) -> None:
    async def lock_it(lock: trio.Lock) -> None:
        await lock.acquire()

    lock = trio.Lock()
    task = await tested.run(lock_it, lock)
    assert await tested.run() is not task
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


# Another task closes the abandoned generator later, and this fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("work", [abandoned_scope, abandoned_nursery])
async def test_a_call_that_leaves_a_scope_open_fails_and_ends_its_worker(tested: PoolUnderTest, work: Work) -> None:
    gate = trio.Event()
    tested.start(lambda _: gate.wait())
    kept: list[Any] = []
    task = await tested.run(work, kept)
    assert [type(error) for error in tested.failures] == [LeftOpen]
    assert await tested.run() is not task
    assert len(tested.nursery.child_tasks) == 2
    gate.set()
    await wait_all_tasks_blocked()
    assert tested.pool.idle == 2


async def test_the_number_of_idle_workers_is_limited(tested: PoolUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    await tested.run_together(5)
    assert tested.pool.idle == len(tested.nursery.child_tasks) == 5
    monkeypatch.setattr(tested.pool, "_most", 8)
    await tested.run_together(10)
    assert tested.pool.idle == len(tested.nursery.child_tasks) == 8


async def test_workers_that_are_not_needed_for_long_end(tested: PoolUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_together(wanted: int, calls: int) -> None:
        for _ in range(calls // wanted):
            await tested.run_together(wanted)

    monkeypatch.setattr(workers_module, "_SPARE", 2)
    monkeypatch.setattr(workers_module, "_PERIOD", 200)
    await run_together(50, 200)
    await run_together(50, 150)
    assert tested.pool.idle == 50  # all workers are needed
    await run_together(5, 400)
    assert tested.pool.idle == 2 + 5
    await run_together(1, 400)
    assert tested.pool.idle == 2 + 1


async def test_trim_ends_the_workers_of_a_burst(tested: PoolUnderTest) -> None:
    await tested.run_together(100)
    assert tested.pool.idle == 100
    tested.pool.trim()
    await wait_all_tasks_blocked()
    assert tested.pool.idle == len(tested.nursery.child_tasks) == 64
    await tested.run_together(100)
    assert tested.pool.idle == 100


async def test_the_end_of_a_pool_ends_idle_workers(tested: PoolUnderTest) -> None:
    gate = trio.Event()
    tested.start(lambda _: gate.wait())
    for _ in range(3):
        tested.start(trio.sleep, 0)
    await wait_all_tasks_blocked()
    assert len(tested.nursery.child_tasks) == 4
    tested.pool.end()
    await wait_all_tasks_blocked()
    assert len(tested.nursery.child_tasks) == 1
    gate.set()
    await wait_all_tasks_blocked()
    assert not tested.nursery.child_tasks


async def test_a_call_that_starts_in_a_cancelled_nursery_is_cancelled() -> None:
    seen = []

    async def work(_: None) -> None:
        seen.append("begun")
        await trio.lowlevel.checkpoint()
        seen.append("went on")

    async with trio.open_nursery() as nursery:
        tested = PoolUnderTest(nursery)
        await tested.run()
        nursery.cancel_scope.cancel()
        tested.start(work)
    assert seen == ["begun"]
    assert not nursery.child_tasks


# `WorkerPool.call`: a task waits for a function.


async def test_a_function_shares_the_context_variables_of_its_caller(tested: PoolUnderTest) -> None:
    async def change(to: str) -> Any:
        before = variable.get()
        await trio.lowlevel.checkpoint()
        variable.set(to)
        return before

    variable.set("mine")
    for before, after in (("mine", "one"), ("one", "two")):  # in a new worker, and in a reused worker
        assert await tested.pool.call(partial(change, after), "change") == before
        assert variable.get() == after


async def test_an_exception_of_a_function_is_raised_in_its_caller(tested: PoolUnderTest) -> None:
    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("wrong")

    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            await tested.pool.call(fail, "fail")
    assert tested.pool.idle == 1


async def test_a_function_is_cancelled_with_its_caller_and_not_awaited(
    tested: PoolUnderTest, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    ended = []

    async def shielded(seconds: float) -> None:
        try:
            await trio.sleep(60)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
            ended.append(trio.current_time())
            raise ValueError("too late")

    start = trio.current_time()
    with trio.move_on_after(1):
        await tested.pool.call(partial(shielded, 5), "shielded")
    assert (trio.current_time() - start, ended) == (1, [])
    await trio.sleep(10)
    assert [time - start for time in ended] == [6]
    assert "shielded failed while it was being stopped" in caplog.text
    assert not tested.nursery.child_tasks


async def test_a_function_ends_with_the_nursery_of_the_workers(tested: PoolUnderTest) -> None:
    async with trio.open_nursery() as nursery:
        inner = PoolUnderTest(nursery)

        async def call() -> None:
            with pytest.raises(workers_module.RunStopped):
                await inner.pool.call(trio.sleep_forever, "forever")

        tested.start(lambda _: call())
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    await wait_all_tasks_blocked()
    assert not tested.failures
    assert tested.pool.idle == 1
