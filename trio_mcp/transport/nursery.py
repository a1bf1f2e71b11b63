"""Exception groups, where there is one exception only.

A nursery puts whatever went wrong into a group.  Where nothing else went wrong, what a caller wrote and raised should
reach it as it was.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, ClassVar, NoReturn, TypeVar

import trio

from trio_mcp.core.errors import UsageError

__all__ = ["Block", "check_trio", "is_but", "open_nursery", "sole"]

T_co = TypeVar("T_co", covariant=True)


def sole(error: BaseException) -> BaseException:
    """The one exception inside groups of one: a handler with a nursery fails like one without."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def is_but(group: BaseException, error: BaseException | None) -> bool:
    """Whether nothing is in this group but `error`, which somebody's nursery has put there."""
    return error is not None and _same(sole(group), sole(error))


def _same(one: BaseException, other: BaseException | None) -> bool:
    """Whether one is the other, or a copy: Trio copies the groups that it searches for cancellations."""
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
            "trio_mcp runs on Trio, and this program, or the ASGI server that it is part of, on another event loop; "
            "begin by trio.run(main), or use Hypercorn with its Trio worker: hypercorn --worker-class trio module:app"
        )


class open_nursery:
    """A nursery for tasks that serve its block: they are cancelled when it ends; with `wait`, it waits for them.

    If one exception ends it, that leaves as itself; only several make a group.  Cancellations count as one exception:
    they leave as a plain `trio.Cancelled`, that of the block if it has one.
    """

    # A class like Trio's own manager: a generator that is dropped (when a run crashes) would be closed by another task,
    # which must not close a nursery, and so hide what happened.

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
            self._nursery.cancel_scope.cancel(reason="what its tasks served has ended")
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
                alone = failures.exceptions[0]  # a group of the block's own is inside that of the nursery
            del cancelled
        if _same(alone, error):
            return False
        context = alone.__context__
        try:
            raise alone
        finally:
            alone.__context__ = context  # as it was, without what the block was left with
            del alone, error, failures, traceback  # or they would be kept by their own tracebacks


class Block(AbstractAsyncContextManager[T_co]):
    """What is good for nothing but being entered by ``async with``; whoever forgets that is told how it is used."""

    _usage: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no {name!r} yet: write {self._usage}")

    def __await__(self) -> Generator[Any, Any, NoReturn]:
        raise TypeError(f"this is not awaited: write {self._usage}")

    def __enter__(self) -> NoReturn:
        raise TypeError(f"`with` alone cannot wait: write {self._usage}")

    def __exit__(self, *_: object) -> None:
        """There, for without it Python would say that this is what is missing."""
