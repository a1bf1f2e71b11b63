"""Who has been silent for too long."""

from __future__ import annotations

import math
import weakref

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from trio_mcp.server.http import IdleOrder


async def watch(silence: IdleOrder[str], found: list[tuple[str, float]]) -> None:
    while True:
        found.append((await silence.next(), trio.current_time()))


async def test_each_is_found_when_its_patience_is_over_and_then_begins_anew(autojump_clock: MockClock) -> None:
    silence: IdleOrder[str] = IdleOrder(10)
    found: list[tuple[str, float]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, silence, found)
        await trio.sleep(3)
        silence.touch("a")  # the watch waited for anything
        await trio.sleep(4)
        silence.touch("b")
        await trio.sleep(5)  # 12
        silence.touch("a")
        await trio.sleep(20.5)  # 32.5
        silence.forget("b")
        silence.forget("never there")
        await trio.sleep(20)  # 52.5
        silence.forget("a")
        await trio.sleep(100)
        silence.touch("c")
        await trio.sleep(10.5)
        nursery.cancel_scope.cancel()
    assert found == [("b", 17), ("a", 22), ("b", 27), ("a", 32), ("a", 42), ("a", 52), ("c", 162.5)]
    assert len(silence) == 1
    assert list(silence) == ["c"]


async def test_many_at_the_same_moment_are_found_one_by_one(autojump_clock: MockClock) -> None:
    silence: IdleOrder[str] = IdleOrder(1)
    for name in "abcde":
        silence.touch(name)
    for name in "abcde":
        with assert_checkpoints():  # also where nobody has to wait: a thousand may be due
            assert await silence.next() == name
    assert trio.current_time() == 1
    assert await silence.next() == "a"
    assert trio.current_time() == 2


async def test_with_patience_for_ever_nobody_is_found(autojump_clock: MockClock) -> None:
    silence: IdleOrder[str] = IdleOrder(math.inf)
    silence.touch("a")
    with trio.move_on_after(1e9) as scope:
        await silence.next()
    assert scope.cancelled_caught


async def test_nobody_keeps_what_was_forgotten(autojump_clock: MockClock) -> None:
    class Thing:
        pass

    silence: IdleOrder[Thing] = IdleOrder(10)
    thing = Thing()
    kept = weakref.ref(thing)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(silence.next)
        silence.touch(thing)
        await wait_all_tasks_blocked()
        silence.forget(thing)
        del thing
        assert kept() is None
        nursery.cancel_scope.cancel()


async def test_one_can_wait_until_there_is_nothing(autojump_clock: MockClock) -> None:
    silence: IdleOrder[str] = IdleOrder(10)
    over: list[float] = []

    async def wait() -> None:
        await silence.empty()
        over.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        await wait()
        silence.touch("a")
        silence.touch("b")
        nursery.start_soon(wait)
        await trio.sleep(1)
        silence.forget("a")
        await trio.sleep(1)
        # Something else took its place before anybody could look.
        silence.forget("b")
        silence.touch("c")
        await trio.sleep(1)
        silence.forget("c")
        await wait_all_tasks_blocked()
    assert over == [0, 3]


async def test_the_first_is_the_one_that_has_been_silent_for_longest() -> None:
    silence: IdleOrder[str] = IdleOrder(10)
    for name in "abcab":
        silence.touch(name)
    assert list(silence) == ["c", "a", "b"]


@pytest.mark.parametrize("patience", [5.0, 30.0])
@given(st.lists(st.tuples(st.sampled_from("hf"), st.sampled_from("abc"), st.floats(0, 12)), max_size=30))
def test_nobody_is_found_too_early_or_too_late(patience: float, deeds: list[tuple[str, str, float]]) -> None:
    """Against a model that knows of each when something was last heard of it."""

    async def main() -> None:
        silence: IdleOrder[str] = IdleOrder(patience)
        heard: dict[str, float] = {}

        async def check() -> None:
            while True:
                name = await silence.next()
                assert trio.current_time() == pytest.approx(heard[name] + patience)
                heard[name] = trio.current_time()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(check)
            for deed, name, pause in deeds:
                if deed == "h":
                    silence.touch(name)
                    heard[name] = trio.current_time()
                else:
                    silence.forget(name)
                    heard.pop(name, None)
                await trio.sleep(pause)
                assert set(silence) == set(heard)
                assert all(then + patience >= trio.current_time() - 1e-9 for then in heard.values())
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
