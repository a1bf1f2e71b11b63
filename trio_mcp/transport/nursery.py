"""Nurseries that raise a single exception as itself, not in a group.

A Trio nursery puts every exception into a group.  If there is only one, the caller should get the exception that its
own code raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import trio

from trio_mcp.core.errors import UsageError

__all__ = ["Block", "block", "check_trio", "contains_only", "open_nursery", "sole"]

P = ParamSpec("P")
T = TypeVar("T")


def sole(error: BaseException) -> BaseException:
    """Unwrap groups that contain one exception: a handler with a nursery fails like a handler without."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def contains_only(group: BaseException, error: BaseException | None) -> bool:
    """Whether `error` is the only exception in this group."""
    return error is not None and _same(sole(group), sole(error))


def _same(one: BaseException, other: BaseException | None) -> bool:
    """Whether both are the same exception, or copies of one group: Trio copies groups when it filters cancellations."""
    if isinstance(one, BaseExceptionGroup) and isinstance(other, BaseExceptionGroup):
        return len(one.exceptions) == len(other.exceptions) and all(map(_same, one.exceptions, other.exceptions))
    return one is other


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def check_trio() -> None:
    """Raise `UsageError` in a program on another event loop."""
    if not trio.lowlevel.in_trio_task():
        raise UsageError(
            "trio_mcp runs on Trio, and this program, or its ASGI server, on another event loop; "
            "start with trio.run(main), or use Hypercorn with its Trio worker: hypercorn --worker-class trio module:app"
        )


class open_nursery:
    """A nursery for tasks that serve its block: at the end of the block they are cancelled, or with `wait` awaited.

    A single exception is raised as itself; only several make a group.  Cancellations count as one exception: they are
    raised as a plain `trio.Cancelled`, that of the block if it has one.
    """

    # A class, like Trio's own manager.  When a run crashes, a generator would be closed by another task, which must not
    # close a nursery; the error of that would hide the crash.

    __slots__ = ("_manager", "_nursery", "_wait")

    def __init__(self, *, wait: bool = False) -> None:
        self._wait = wait

    async def __aenter__(self) -> trio.Nursery:
        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        return self._nursery

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if error is None and not self._wait:
            self._nursery.cancel_scope.cancel(reason="the block that these tasks serve has ended")
        try:
            return await self._manager.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            cancelled, failures = group.split(trio.Cancelled)
            if failures is None:
                assert cancelled is not None  # a group is not empty
                alone = error if error is not None else _first(cancelled)
            elif len(failures.exceptions) > 1:
                raise
            else:
                alone = failures.exceptions[0]  # a group that the block raised is inside the nursery's group
            del cancelled
        if _same(alone, error):
            return False
        context = alone.__context__
        try:
            raise alone
        finally:
            alone.__context__ = context  # as before, without the exception that left the block
            del alone, error, failures, traceback  # or their own tracebacks would keep them alive


def block(
    enter: Callable[Concatenate[AsyncExitStack, P], Awaitable[T]],
) -> Callable[P, AbstractAsyncContextManager[T]]:
    """Make a function for ``async with`` of one that enters in a stack what the block needs, and returns its value.

    Use this where a block has a nursery, instead of `contextlib.asynccontextmanager`: as in `open_nursery`, there must
    be no generator.  If the stack wraps the exception of the block in a group, it leaves the block as itself.
    """

    @wraps(enter)
    def opened(*args: P.args, **options: P.kwargs) -> AbstractAsyncContextManager[T]:
        return _StackBlock(lambda stack: enter(stack, *args, **options))

    return opened


class _StackBlock(AbstractAsyncContextManager[T]):
    def __init__(self, enter: Callable[[AsyncExitStack], Awaitable[T]]) -> None:
        self._enter = enter

    async def __aenter__(self) -> T:
        async with AsyncExitStack() as stack:
            value = await self._enter(stack)
            self._stack = stack.pop_all()
        return value

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await self._stack.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            if not contains_only(group, error):
                raise
            return False


class Block(_StackBlock[T]):
    """A block as `block` makes it.  Any use other than ``async with`` raises an error that shows the correct code."""

    def __init__(self, enter: Callable[[AsyncExitStack], Awaitable[T]], usage: str) -> None:
        super().__init__(enter)
        self._usage = usage

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no {name!r} yet: write {self._usage}")

    def __await__(self) -> Generator[Any, Any, NoReturn]:
        raise TypeError(f"this cannot be awaited: write {self._usage}")

    def __enter__(self) -> NoReturn:
        raise TypeError(f"`with` must be `async with`: write {self._usage}")

    def __exit__(self, *_: object) -> None:
        """Defined because without it Python would report that this method is missing."""
