"""`open_nursery` raises a single exception as itself, from the block or from a task, and several as a group."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trio_mcp.transport import open_nursery, sole

ONE = ValueError("one")
TWO = ExceptionGroup("two", [KeyError(), ValueError()])


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (ONE, ONE),
        (ExceptionGroup("", [ONE]), ONE),
        (BaseExceptionGroup("", [ExceptionGroup("", [ONE])]), ONE),
        (TWO, TWO),
        (ExceptionGroup("", [TWO]), TWO),
    ],
)
def test_the_sole_exception_in_groups_is_found(error: BaseException, found: BaseException) -> None:
    assert sole(error) is found


async def raising(error: BaseException) -> None:
    raise error


async def test_the_tasks_end_with_the_block(autojump_clock: MockClock) -> None:
    reasons: list[str | None] = []

    async def serve() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            reasons.append(cancelled.reason)
            raise

    async with open_nursery() as nursery:
        nursery.start_soon(serve)
        await trio.sleep(1)
    assert trio.current_time() == 1
    assert reasons == ["the block that these tasks serve has ended"]


class Own(Exception):
    pass


ERRORS = [Own(), KeyboardInterrupt(), StopAsyncIteration(), GeneratorExit(), TWO, BaseExceptionGroup("", [Own()])]


@pytest.mark.parametrize("where", ["the block", "a task", "a task while the block ends"])
@pytest.mark.parametrize("error", ERRORS, ids=[type(error).__name__ + str(n) for n, error in enumerate(ERRORS)])
async def test_one_exception_is_raised_unchanged(error: BaseException, where: str, autojump_clock: MockClock) -> None:
    before = LookupError("before")
    error.__context__ = before

    async def late() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            raise error from None

    async def fail() -> None:
        async with open_nursery() as nursery:
            if where == "the block":
                raise error
            if where == "a task":
                nursery.start_soon(raising, error)
                await trio.sleep_forever()
            else:
                nursery.start_soon(late)
                await trio.sleep(1)

    with pytest.raises(type(error)) as caught:
        await fail()
    if isinstance(error, BaseExceptionGroup) and where != "the block":
        # Trio removes the cancellation of the block from the group, which makes new groups.
        assert caught.value.exceptions == error.exceptions  # type: ignore[attr-defined]
    else:
        assert caught.value is error
        assert where == "a task while the block ends" or error.__context__ is before


async def test_several_exceptions_make_a_group(autojump_clock: MockClock) -> None:
    async def fail() -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(raising, KeyError())
            raise Own

    with pytest.raises(BaseExceptionGroup) as caught:
        await fail()
    assert sorted(type(error).__name__ for error in caught.value.exceptions) == ["KeyError", "Own"]


async def test_a_cancellation_from_outside_ends_the_nursery(autojump_clock: MockClock) -> None:
    with trio.move_on_after(1) as scope:
        async with open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_an_error_during_a_cancellation_is_raised(autojump_clock: MockClock) -> None:
    async def late() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise Own

    async def fail() -> None:
        with trio.move_on_after(1):
            async with open_nursery() as nursery:
                nursery.start_soon(late)
                await trio.sleep_forever()

    with pytest.raises(Own):
        await fail()


async def test_no_reference_to_an_exception_is_kept(autojump_clock: MockClock) -> None:
    """Also the frames in its traceback keep no reference to it: this would be a reference cycle."""

    class Watched:
        pass

    async def fail() -> Any:
        watched = Watched()

        async def serve() -> None:
            raise Own(watched)

        try:
            async with open_nursery() as nursery:
                nursery.start_soon(serve)
                await trio.sleep_forever()
        except Own:
            return weakref.ref(watched)

    gc.collect()
    gc.disable()
    try:
        gone = await fail()
        await trio.lowlevel.checkpoint()
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["the block", "tasks", "both"])
async def test_a_cancellation_is_raised_without_a_group(where: str, autojump_clock: MockClock) -> None:
    caught: list[BaseException] = []
    with trio.move_on_after(1):
        try:
            async with open_nursery(wait=True) as nursery:
                if where != "the block":
                    nursery.start_soon(trio.sleep_forever)
                    nursery.start_soon(trio.sleep_forever)
                if where != "tasks":
                    await trio.sleep_forever()
        except BaseException as error:
            caught.append(error)
            raise
    assert [type(error) for error in caught] == [trio.Cancelled]


async def test_a_nursery_with_wait_waits_for_its_tasks(autojump_clock: MockClock) -> None:
    async with open_nursery(wait=True) as nursery:
        nursery.start_soon(trio.sleep, 5)
    assert trio.current_time() == 5
