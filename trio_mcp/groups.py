"""Exception groups, where there is one exception only.

A nursery puts whatever went wrong into a group.  Where nothing else went wrong, what a caller wrote and raised should
reach it as it was.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

__all__ = ["open_nursery", "sole"]


def sole(error: BaseException) -> BaseException:
    """The one exception inside groups of one: a handler with a nursery fails like one without."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def open_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery for tasks that serve its block: they are cancelled when it ends.

    If one exception ends it, that leaves as itself; only several make a group.
    """
    alone: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        alone = group.exceptions[0]  # a group of the block's own is inside that of the nursery
    if alone is not None:
        raise alone  # not in the `except`, which would change what is chained to it
