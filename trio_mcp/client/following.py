"""A call that is followed while it runs: its progress is iterated over, and its result waited for.

async with client.stream_tool("forecast", {"city": "Oslo"}) as call:
    async for report in call:
        print(report.progress, report.total, report.message)
    result = await call.result()
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeVar

import attrs
import trio

from trio_mcp.client.caller import OnProgress, Reports
from trio_mcp.core.errors import SessionClosed
from trio_mcp.core.jsonrpc import ABSENT, Absent
from trio_mcp.transport.nursery import open_nursery

__all__ = ["Progress", "ToolCall", "_ToolCallBlock"]

T = TypeVar("T")


@attrs.frozen
class Progress:
    """How far a call has got."""

    progress: float
    total: float | None = None
    message: str | None = None


class ToolCall(Generic[T]):
    """An asynchronous iterator of `Progress`, for one task at a time; it ends with the call, well or not."""

    def __init__(self) -> None:
        self._reports: Reports[Progress] = Reports()
        self._news = trio.Event()
        self._over = trio.Event()
        self._result: T | Absent = ABSENT
        self._error: Exception | None = None
        self._told = False  # somebody has heard of the error

    def __aiter__(self) -> ToolCall[T]:
        return self

    async def __anext__(self) -> Progress:
        while not self._reports:
            if self._over.is_set():
                raise StopAsyncIteration
            await self._news.wait()
            self._news = trio.Event()
        await trio.lowlevel.checkpoint()
        return self._reports.take()

    async def result(self) -> T:
        """The result of the call, once it has ended.  Raises as the call does; SessionClosed if that was cancelled."""
        await self._over.wait()
        if self._error is not None:
            self._told = True
            raise self._error
        if self._result is ABSENT:  # its block was left, or the nursery around it
            raise SessionClosed("the call was left before it had a result")
        return self._result

    def _reported(self, progress: float, total: float | None, message: str | None) -> None:
        self._reports.add(Progress(progress, total, message))
        self._news.set()

    async def _run(self, call: Callable[[OnProgress], Awaitable[T]]) -> None:
        try:
            self._result = await call(self._reported)
        except Exception as error:  # noqa: BLE001  # it is for whoever waits for the result
            self._error = error
        finally:
            self._over.set()
            self._news.set()


class _ToolCallBlock(Generic[T]):
    """The block of a followed call; a class, as `groups.open_nursery` is one.  Its end cancels the call.

    What a call has failed with is raised at the end of a block that did not ask for the result.
    """

    def __init__(self, call: Callable[[OnProgress], Awaitable[T]], name: str) -> None:
        self._call = call
        self._name = name

    async def __aenter__(self) -> ToolCall[T]:
        self._nursery = open_nursery()
        nursery = await self._nursery.__aenter__()
        self._followed: ToolCall[T] = ToolCall()
        nursery.start_soon(self._followed._run, self._call, name=self._name)
        return self._followed

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        left = await self._nursery.__aexit__(kind, error, traceback)
        failure = self._followed._error
        if error is None and failure is not None and not self._followed._told:
            raise failure
        return left
