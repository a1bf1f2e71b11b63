"""A connection with another framing than lines: control frames, a close frame, and a heartbeat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.server.checkpoints import Pair, one_byte_pipe, unlimited_pipe, unwrapped
from tests.server.raw_client import CAPABILITIES, LATEST
from tests.server.streams import recorded_pairs
from trio_mcp import Context, Limits, Server
from trio_mcp.core import META_CLIENT_CAPABILITIES, META_VERSION, Message, decode
from trio_mcp.server import converse
from trio_mcp.transport import CLOSING, Lines


class Frames:
    """One frame per line: a message, ``ping x``, which needs the answer ``pong x``, or ``close``, the last frame.

    Like a WebSocket, it sends no messages after a close frame of either side, only the answer to the close frame.
    """

    why = "there are no frames any more"
    stretch = None
    size = held = 0

    def __init__(self) -> None:
        self.ended = False
        self.closed = False
        self.rest = b""
        self.control = b""

    def feed(self, data: bytes) -> Iterable[Message]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            assert not self.ended, "it was fed after its end"
            if line.startswith(b"ping"):
                self.control += b"pong" + line[4:] + b"\n"
            elif line == b"close":
                self.ended = True
                self.control += self.farewell()
            elif line != b"pong":
                yield decode(line, Limits())

    def frame(self, texts: Sequence[bytes]) -> Sequence[bytes]:
        assert not self.ended, "a message after the close of the other side"
        assert not self.closed, "a message after the close of our own"
        return [text + b"\n" for text in texts]

    def pending(self) -> bytes:
        control, self.control = self.control, b""
        return control

    def ping(self) -> None:
        self.control += b"ping\n"

    def farewell(self) -> bytes:
        if self.closed:
            return b""
        self.closed = True
        return b"close\n"


class Peer:
    """The client's end, which sends and reads lines."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self.heard = b""
        self.ended_at: float | None = None
        self.returned_at: float | None = None

    async def send(self, *lines: str | dict[str, Any]) -> None:
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        await self.stream.send_all(text.encode())

    async def lines_until(self, until: str = "") -> list[str]:
        """All lines so far.  Wait until one of them begins with `until`, or for the end."""
        while True:
            lines = self.heard.decode().split("\n")[:-1]
            if until and any(line.startswith(until) for line in lines):
                return lines
            data = await self.stream.receive_some()
            if not data:
                self.ended_at = trio.current_time()
                return lines
            self.heard += data


def call(id: int, name: str) -> dict[str, Any]:
    meta = {META_VERSION: LATEST, META_CLIENT_CAPABILITIES: CAPABILITIES[LATEST]}
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": name, "_meta": meta}}


def new_server(**options: Any) -> Server:
    server = Server("working", **options)

    @server.tool
    async def quick(ctx: Context) -> str:
        return f"{ctx.principal} {dict(ctx.headers)}"

    @server.tool
    async def slow() -> str:
        await trio.sleep(5)
        return "slow"

    return server


@asynccontextmanager
async def framed(
    server: Server,
    *,
    streams: Callable[[], Pair] = unlimited_pipe,
    scope: trio.CancelScope | None = None,
    **options: Any,
) -> AsyncIterator[Peer]:
    ours, theirs = streams()
    peer = Peer(ours)
    frames = Frames()

    async def serve() -> None:
        with scope or trio.CancelScope():
            async with server._joined() as run:
                await converse(run, theirs, frames, **options)
        peer.returned_at = trio.current_time()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await wait_all_tasks_blocked()
        yield peer
    assert peer.returned_at is not None


async def test_messages_are_framed_and_have_the_principal_of_the_connection(autojump_clock: MockClock) -> None:
    async with framed(new_server(), principal="ada", headers={"x": "1"}) as peer:
        await peer.send(call(1, "quick"), call(2, "quick"))
        for id in (1, 2):  # in any order
            lines = await peer.lines_until(f'{{"jsonrpc":"2.0","id":{id}')
        assert len(lines) == 2
        assert all("ada {'x': '1'}" in line for line in lines)
        await peer.stream.send_eof()


async def test_control_frames_are_answered_between_messages(autojump_clock: MockClock) -> None:
    taps: list[tuple[str, bytes]] = []
    async with framed(new_server(), tap=lambda *seen: taps.append(seen)) as peer:
        await peer.send("ping a", call(1, "slow"), "ping b")
        await trio.sleep(1)
        await peer.send("ping c")
        lines = await peer.lines_until("{")
        assert lines[:3] == ["pong a", "pong b", "pong c"]
        await peer.stream.send_eof()
    assert b"".join(data for direction, data in taps if direction == "out") == peer.heard


async def test_the_close_of_the_other_side_is_answered_and_ends_the_connection(autojump_clock: MockClock) -> None:
    async with framed(new_server()) as peer:
        await peer.send(call(1, "slow"), "ping", call(2, "quick"), "close")
        lines = await peer.lines_until()
        assert lines == ["pong", "close"]  # a side that has closed reads no more messages
        assert peer.ended_at == 0
    assert peer.returned_at == 0


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("end", ["drained", "stopped", "cancelled"])
async def test_the_server_sends_a_close_frame_and_waits_for_the_answer(
    end: str, answers: bool, autojump_clock: MockClock
) -> None:
    server, scope = new_server(), trio.CancelScope()
    async with framed(server, scope=scope) as peer, trio.open_nursery() as nursery:
        await peer.send(call(1, "slow"), "ping")
        assert await peer.lines_until("pong") == ["pong"]
        if end == "cancelled":
            scope.cancel()
        else:
            nursery.start_soon(drain, server, 10 if end == "drained" else 1)
        lines = await peer.lines_until("close")
        at = {"drained": 5, "stopped": 1, "cancelled": 0}[end]
        assert trio.current_time() == at
        assert lines[-1] == "close"
        # The call has its result only if it had its time.  Without it, there is an error, except after a cancellation.
        assert len(lines) == (2 if end == "cancelled" else 3)
        assert ("shut down" in lines[1]) == (end == "stopped")
        if answers:
            await peer.send(call(2, "quick"), "close")
        assert (await peer.lines_until())[-1] == "close"
        assert peer.ended_at == at + (0 if answers else CLOSING)


async def drain(server: Server, seconds: float) -> None:
    async with server.draining(seconds):
        pass


async def test_a_client_that_has_ended_gets_no_close_frame(autojump_clock: MockClock) -> None:
    async with framed(new_server()) as peer:
        await peer.send(call(1, "slow"))
        await peer.stream.send_eof()
        assert await peer.lines_until() == []


@pytest.mark.parametrize("reads_in_time", [True, False])
async def test_there_is_no_close_frame_after_an_incomplete_frame(
    reads_in_time: bool, autojump_clock: MockClock
) -> None:
    server = new_server()
    async with framed(server, streams=one_byte_pipe) as peer:
        await peer.send(call(1, "quick"))
        await drain(server, 1)
        await trio.sleep(CLOSING * (0.5 if reads_in_time else 2))
        lines = await peer.lines_until()
        assert lines[1:] == (["close"] if reads_in_time else [])
        assert peer.heard.endswith(b"\n") is reads_in_time


async def test_there_is_no_close_frame_after_a_failed_write(autojump_clock: MockClock) -> None:
    streams, made = recorded_pairs()
    error = RuntimeError("not of this stream's kind")

    async def talk() -> None:
        async with framed(new_server(), streams=streams) as peer:
            made[0].fail_with(error)
            await peer.send(call(1, "quick"))
            await trio.sleep_forever()

    with pytest.raises(RuntimeError) as caught, unwrapped():
        await talk()
    assert caught.value is error
    assert len(made[0].writes) == 1


async def test_a_tap_that_fails_at_the_close_frame_ends_only_its_connection(autojump_clock: MockClock) -> None:
    def tap(direction: str, data: bytes) -> None:
        if data == b"close\n":
            raise ValueError("a tap that fails")

    server, peers = new_server(), []

    async def talk() -> None:
        async with framed(server, tap=tap) as peer:
            peers.append(peer)
            await drain(server, 1)

    async with server.running():
        with pytest.raises(ValueError, match="a tap that fails"), unwrapped():
            await talk()
        assert await peers[0].lines_until() == []  # the stream is closed
        assert server.statistics().connections == 0


async def test_a_client_that_sends_pings_must_read_the_pongs(autojump_clock: MockClock) -> None:
    server = new_server(limits=Limits(outgoing=2, calls=2))
    sent = 0
    async with framed(server, streams=one_byte_pipe) as peer:

        async def flood() -> None:
            nonlocal sent
            while True:
                await peer.send(*["ping " + "x" * 100] * 10)
                sent += 10

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await trio.sleep(100)
            nursery.cancel_scope.cancel()
        assert sent < 100
        await peer.stream.aclose()


@pytest.mark.parametrize("heartbeat", [None, 10])
async def test_with_a_heartbeat_a_client_must_read(heartbeat: float | None, autojump_clock: MockClock) -> None:
    async with framed(new_server(), streams=one_byte_pipe, heartbeat=heartbeat) as peer:
        await peer.send(call(1, "quick"))
        for _ in range(100):
            with suppress(trio.BrokenResourceError):
                await peer.send("pong")
            await trio.sleep(5)
        assert peer.returned_at == (None if heartbeat is None else 60)
        await peer.stream.send_eof()
        assert [line[:1] for line in await peer.lines_until()] == ["{"] * (heartbeat is None)


async def test_a_silent_client_gets_a_ping_and_is_disconnected(autojump_clock: MockClock) -> None:
    async with framed(new_server(), heartbeat=10) as peer:
        await trio.sleep(6)
        await peer.send("pong")  # the client is not silent
        assert await peer.lines_until("ping") == ["ping"]
        assert trio.current_time() == 16
        await peer.send("pong")
        peer.heard = b""
        assert await peer.lines_until("ping") == ["ping"]
        assert trio.current_time() == 26
        assert await peer.lines_until() == ["ping"]  # a lost client gets no close frame
        assert peer.ended_at == 36


async def test_an_active_client_gets_no_ping(autojump_clock: MockClock) -> None:
    async with framed(new_server(), heartbeat=10) as peer:
        for _ in range(10):
            await trio.sleep(9)
            await peer.send("pong")
        await peer.stream.send_eof()
        assert await peer.lines_until() == []


async def test_a_client_that_answers_pings_may_wait_for_a_long_call(autojump_clock: MockClock) -> None:
    async with framed(new_server(), heartbeat=2) as peer:
        await peer.send(call(1, "slow"))
        for _ in range(2):
            peer.heard = b""
            await peer.lines_until("ping")
            await peer.send("pong")
        assert any("slow" in line for line in await peer.lines_until("{"))
        await peer.stream.send_eof()


# Lines.


@pytest.mark.parametrize(
    "sizes", [(1,), (1, 2, 3), (70_000,), (70_000, 80_000), (1, 70_000, 2, 3, 80_000), (0, 65_536)]
)
def test_short_lines_are_joined_into_one_piece(sizes: tuple[int, ...]) -> None:
    texts = [b"x" * size for size in sizes]
    pieces = Lines(Limits()).frame(texts)
    assert b"".join(pieces) == b"".join(text + b"\n" for text in texts)
    assert all(pieces)
    long = [text for text in texts if len(text) > 65_536]
    assert [piece for piece in pieces if len(piece) > 65_600] == long
    assert len(pieces) <= 2 * len(long) + 1
