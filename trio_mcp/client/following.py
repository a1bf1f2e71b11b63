"""`Client.stream_tool`: a tool call that runs while the block iterates over its progress.

    async with client.stream_tool("forecast", {"city": "Oslo"}) as call:
        async for report in call:
            print(report.progress, report.total, report.message)
        result = await call.result()

The call runs in a task of its own.  `ToolCall` holds its progress reports and its outcome for the block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeVar

import attrs
import trio

from trio_mcp.client.caller import OnProgress, Reports
from trio_mcp.core.errors import SessionClosed
from trio_mcp.core.messages import ABSENT, Absent
from trio_mcp.transport.nursery import open_nursery

__all__ = ["Progress", "ToolCall", "_ToolCallBlock"]

T = TypeVar("T")


@attrs.frozen
class Progress:
    """A progress report of a call."""

    progress: float
    total: float | None = None
    message: str | None = None


class ToolCall(Generic[T]):
    """A running tool call: an asynchronous iterator of `Progress`, made by `Client.stream_tool`.

    One task at a time may iterate.  The iterator ends when the call ends, also if the call fails; `result` then returns
    the result or raises the error.  Waiting may be cancelled; the call goes on until its block ends.
    """

    def __init__(self) -> None:
        self._reports: Reports[Progress] = Reports()
        self._changed = trio.Event()
        self._ended = trio.Event()
        self._result: T | Absent = ABSENT
        self._error: Exception | None = None
        self._error_raised = False  # `result` has raised the error

    def __aiter__(self) -> ToolCall[T]:
        return self

    async def __anext__(self) -> Progress:
        while not self._reports:
            if self._ended.is_set():
                raise StopAsyncIteration
            await self._changed.wait()
            self._changed = trio.Event()
        await trio.lowlevel.checkpoint()
        return self._reports.take()

    async def result(self) -> T:
        """Wait until the call ends, and return its result.

        Raises the same errors as `Client.call_tool`, and SessionClosed if the call was cancelled.
        """
        await self._ended.wait()
        if self._error is not None:
            self._error_raised = True
            raise self._error
        if self._result is ABSENT:  # the block or its nursery was cancelled
            raise SessionClosed("the call was cancelled before it had a result")
        return self._result

    def _add_report(self, progress: float, total: float | None, message: str | None) -> None:
        self._reports.add(Progress(progress, total, message))
        self._changed.set()

    async def _run(self, call: Callable[[OnProgress], Awaitable[T]]) -> None:
        try:
            self._result = await call(self._add_report)
        except Exception as error:  # noqa: BLE001  # `result` raises it
            self._error = error
        finally:
            self._ended.set()
            self._changed.set()


class _ToolCallBlock(Generic[T]):
    """The block of `Client.stream_tool`.  The call is cancelled when the block ends.

    If the call failed and the block did not ask for the result, the end of the block raises the error.  It is a class
    because another task would close a generator that is dropped in a crash, and that task must not close the nursery.
    """

    def __init__(self, call: Callable[[OnProgress], Awaitable[T]], name: str) -> None:
        self._call = call
        self._name = name

    async def __aenter__(self) -> ToolCall[T]:
        self._nursery = open_nursery()
        nursery = await self._nursery.__aenter__()
        self._tool_call: ToolCall[T] = ToolCall()
        nursery.start_soon(self._tool_call._run, self._call, name=self._name)
        return self._tool_call

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        suppress = await self._nursery.__aexit__(kind, error, traceback)
        failure = self._tool_call._error
        if error is None and failure is not None and not self._tool_call._error_raised:
            raise failure
        return suppress
