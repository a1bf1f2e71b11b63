"""A stream that records each write with the task that made it, and can let a write fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import trio

from tests.server.checkpoints import Pair, unlimited_pipe

__all__ = ["NotHalfCloseable", "RecordedStream", "Write", "lines_in", "recorded_pairs"]


class Write(NamedTuple):
    task: str
    data: bytes


class NotHalfCloseable(trio.abc.Stream):
    """A stream without half-close, like TLS: its end is the end of both directions."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self.stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self.stream.aclose()


class RecordedStream(trio.abc.HalfCloseableStream):
    """The server's end.  `fails` is called before each write with its number, from 1; it may return an exception, which
    the write raises."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self.writes: list[Write] = []
        self.read = 0  # bytes
        self.closed_at: float | None = None
        self.fails: Callable[[int], BaseException | None] = lambda number: None

    def fail_with(self, error: BaseException) -> None:
        self.fails = lambda number: error

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(Write(trio.lowlevel.current_task().name, bytes(data)))
        error = self.fails(len(self.writes))
        if error is not None:
            await trio.lowlevel.checkpoint()
            raise error
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self.stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self.stream.receive_some(max_bytes)
        self.read += len(data)
        return data

    async def aclose(self) -> None:
        if self.closed_at is None:
            self.closed_at = trio.current_time()
        await self.stream.aclose()


def recorded_pairs(make: Callable[[], Pair] = unlimited_pipe) -> tuple[Callable[[], Any], list[RecordedStream]]:
    """A function that makes pairs for `connected`, and the list of the server's ends that it has made so far."""
    made: list[RecordedStream] = []

    def pair() -> tuple[trio.abc.Stream, RecordedStream]:
        ours, theirs = make()
        made.append(RecordedStream(theirs))
        return ours, made[-1]

    return pair, made


def lines_in(data: bytes) -> int:
    return data.count(b"\n")
