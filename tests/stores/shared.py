"""Helpers of the tests of stores: a row, and open stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import trio

from trio_mcp.stores import Row, Store
from trio_mcp.stores.rows import Message  # authors of servers need neither

Make: TypeAlias = Callable[[], Store]
MOST = 4_000_000  # the largest size of a store, in bytes
NOW = 1000.0
ROW = Row("task", "a", b"{}", "ann", NOW)


@asynccontextmanager
async def opened(make: Make, count: int = 1) -> AsyncIterator[tuple[Store, ...]]:
    """Open the stores of this number of processes."""
    async with AsyncExitStack() as stack:
        yield tuple([await stack.enter_async_context(make()) for _ in range(count)])


async def take(messages: AsyncIterator[Message], count: int) -> list[Message]:
    with trio.fail_after(5):
        return [await anext(messages) for _ in range(count)]
