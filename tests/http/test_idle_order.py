"""`IdleOrder`: items that have been idle for too long."""

from __future__ import annotations

import math
import weakref

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from trio_mcp.server.http import IdleOrder


async def watch(order: IdleOrder[str], found: list[tuple[str, float]]) -> None:
    while True:
        found.append((await order.next(), trio.current_time()))


async def test_each_item_is_due_after_its_time_and_then_starts_again(autojump_clock: MockClock) -> None:
    order: IdleOrder[str] = IdleOrder(10)
    found: list[tuple[str, float]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, order, found)
        await trio.sleep(3)
        order.touch("a")  # the watcher waited for the first item
        await trio.sleep(4)
        order.touch("b")
        await trio.sleep(5)  # 12
        order.touch("a")
        await trio.sleep(20.5)  # 32.5
        order.forget("b")
        order.forget("never there")
        await trio.sleep(20)  # 52.5
        order.forget("a")
        await trio.sleep(100)
        order.touch("c")
        await trio.sleep(10.5)
        nursery.cancel_scope.cancel()
    assert found == [("b", 17), ("a", 22), ("b", 27), ("a", 32), ("a", 42), ("a", 52), ("c", 162.5)]
    assert len(order) == 1
    assert list(order) == ["c"]


async def test_items_that_are_due_at_once_come_one_by_one(autojump_clock: MockClock) -> None:
    order: IdleOrder[str] = IdleOrder(1)
    for name in "abcde":
        order.touch(name)
    for name in "abcde":
        with assert_checkpoints():  # also without a wait, because a thousand items may be due
            assert await order.next() == name
    assert trio.current_time() == 1
    assert await order.next() == "a"
    assert trio.current_time() == 2


async def test_with_an_infinite_time_no_item_is_due(autojump_clock: MockClock) -> None:
    order: IdleOrder[str] = IdleOrder(math.inf)
    order.touch("a")
    with trio.move_on_after(1e9) as scope:
        await order.next()
    assert scope.cancelled_caught


async def test_a_forgotten_item_is_not_referenced(autojump_clock: MockClock) -> None:
    class Item:
        pass

    order: IdleOrder[Item] = IdleOrder(10)
    item = Item()
    kept = weakref.ref(item)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(order.next)
        order.touch(item)
        await wait_all_tasks_blocked()
        order.forget(item)
        del item
        assert kept() is None
        nursery.cancel_scope.cancel()


async def test_a_task_can_wait_until_the_order_is_empty(autojump_clock: MockClock) -> None:
    order: IdleOrder[str] = IdleOrder(10)
    over: list[float] = []

    async def wait() -> None:
        await order.empty()
        over.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        await wait()
        order.touch("a")
        order.touch("b")
        nursery.start_soon(wait)
        await trio.sleep(1)
        order.forget("a")
        await trio.sleep(1)
        # The last item goes and another comes before `wait` runs again.
        order.forget("b")
        order.touch("c")
        await trio.sleep(1)
        order.forget("c")
        await wait_all_tasks_blocked()
    assert over == [0, 3]


async def test_the_first_item_has_been_idle_for_longest() -> None:
    order: IdleOrder[str] = IdleOrder(10)
    for name in "abcab":
        order.touch(name)
    assert list(order) == ["c", "a", "b"]


@pytest.mark.parametrize("seconds", [5.0, 30.0])
@given(st.lists(st.tuples(st.sampled_from("hf"), st.sampled_from("abc"), st.floats(0, 12)), max_size=30))
def test_no_item_is_due_too_early_or_too_late(seconds: float, actions: list[tuple[str, str, float]]) -> None:
    """Compares with a model that has the time of the last `touch` of each item."""

    async def main() -> None:
        order: IdleOrder[str] = IdleOrder(seconds)
        touched: dict[str, float] = {}

        async def check() -> None:
            while True:
                name = await order.next()
                assert trio.current_time() == pytest.approx(touched[name] + seconds)
                touched[name] = trio.current_time()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(check)
            for action, name, pause in actions:
                if action == "h":
                    order.touch(name)
                    touched[name] = trio.current_time()
                else:
                    order.forget(name)
                    touched.pop(name, None)
                await trio.sleep(pause)
                assert set(order) == set(touched)
                assert all(then + seconds >= trio.current_time() - 1e-9 for then in touched.values())
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
