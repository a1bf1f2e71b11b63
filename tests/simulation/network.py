"""A network in memory: listeners by port, and connections with the line and the faults of a plan.

Programs see the behaviour of sockets: bytes in order, in pieces of any size; writes that block while the window is
full; an end, a reset, or silence.  As with TCP keep-alive, a dead connection is reset after two minutes, so no wait on
it is endless.
"""

from __future__ import annotations

import contextvars
import math
import random
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable

import trio

from tests.simulation.plan import Fault, Line

__all__ = ["End", "Listener", "Network", "caller"]

DEAD_SECONDS = 120.0  # after which a dead connection is reset
SLOW_READS = 6  # the number of reads that a slow reader delays
# Only the first bytes of a connection go in small pieces: they find the mistakes, and a body of 64 KiB byte by byte
# would take long.
SMALL_READS = 40
SMALL_WINDOW = 300

caller: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="")
"""The name of the program that connects.  Tasks inherit it, so that a crash finds the connections of its victim."""


class _Pipe:
    """One direction of a connection."""

    def __init__(self, line: Line, dice: random.Random, faults: list[Fault], on_fault: Callable[[Fault], None]) -> None:
        self._line = line
        self._dice = dice
        self._faults = deque(sorted(faults, key=lambda fault: fault.at))
        self._on_fault = on_fault
        self._segments: deque[tuple[float, bytes]] = deque()
        self._buffered = self._reads = self._slow_reads = 0
        self._earliest = self._slow_seconds = 0.0
        self._changed = trio.lowlevel.ParkingLot()
        self.passed = self.crc = 0
        self.dead = self.ended = self.reset = self.reader_closed = False

    # The sender.

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        await trio.lowlevel.checkpoint()
        while True:
            if self.ended:
                raise trio.ClosedResourceError
            if self.reset or self.reader_closed:
                raise trio.BrokenResourceError
            room = self._room()
            if rest and room > 0:
                self._push(bytes(rest[:room]))
                rest = rest[room:]
                continue
            if not rest:
                return
            await self._changed.park()

    async def wait_for_room(self) -> None:
        await trio.lowlevel.checkpoint()
        while self._room() <= 0 and not (self.ended or self.reset or self.reader_closed):
            await self._changed.park()

    def _room(self) -> int:
        window = self._line.window if self.passed < SMALL_WINDOW else max(self._line.window, 4096)
        room = window - self._buffered
        if self._faults:
            room = min(room, max(self._faults[0].at - self.passed, 0))
            if room == 0 and self.passed >= self._faults[0].at:
                self._on_fault(self._faults.popleft())
                return 0 if self.reset or self.ended else self._room()
        return room

    def _push(self, data: bytes) -> None:
        self.passed += len(data)
        self.crc = zlib.crc32(data, self.crc)
        self._buffered += len(data)
        ready = math.inf if self.dead else max(trio.current_time() + self._line.delay, self._earliest)
        self._segments.append((ready, data))
        self._changed.unpark_all()

    # The reader.

    async def receive(self, max_bytes: int | None) -> bytes:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError("max_bytes must be at least 1")
        await trio.lowlevel.checkpoint()
        if self._slow_reads:
            self._slow_reads -= 1
            await trio.sleep(self._slow_seconds)
        while True:
            if self.reader_closed:
                raise trio.ClosedResourceError
            ready = self._segments[0][0] if self._segments else math.inf
            if ready <= trio.current_time():
                return self._take(max_bytes)
            if not self._segments and self.reset:
                raise trio.BrokenResourceError
            if not self._segments and self.ended:
                return b""
            if ready == math.inf:
                await self._changed.park()
            else:
                with trio.CancelScope(deadline=ready):
                    await self._changed.park()

    def _take(self, max_bytes: int | None) -> bytes:
        self._reads += 1
        size = self._line.chunk if self._reads < SMALL_READS else max(self._line.chunk, 4096)
        if self._line.splits:
            size = self._dice.randint(1, size)
        if max_bytes is not None:
            size = min(size, max_bytes)
        ready, data = self._segments[0]
        if len(data) <= size:
            self._segments.popleft()
        else:
            data, rest = data[:size], data[size:]
            self._segments[0] = (ready, rest)
        self._buffered -= len(data)
        self._changed.unpark_all()
        return data

    # Closing and faults.

    def end(self) -> None:
        self.ended = True
        self._changed.unpark_all()

    def close_reader(self) -> None:
        self.reader_closed = True
        self._changed.unpark_all()

    def cut(self, *, keep_unread: bool) -> None:
        """Reset it.  The bytes on the way are lost, unless `keep_unread`."""
        self.reset = True
        if not keep_unread:
            self._segments.clear()
        self._changed.unpark_all()

    def go_dead(self) -> None:
        self.dead = True
        self._segments = deque((math.inf, data) for _, data in self._segments)

    def stall(self, seconds: float) -> None:
        self._earliest = trio.current_time() + seconds
        self._segments = deque((max(ready, self._earliest), data) for ready, data in self._segments)

    def slow_down(self, seconds: float) -> None:
        self._slow_reads, self._slow_seconds = SLOW_READS, seconds


class End(trio.abc.HalfCloseableStream):
    """One end of a connection."""

    def __init__(self, connection: _Connection, out: _Pipe, into: _Pipe) -> None:
        self._connection, self._out, self._into = connection, out, into
        self._busy: set[str] = set()
        self.closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._begin("sending")
        try:
            await self._out.send(data)
        finally:
            self._busy.discard("sending")

    async def wait_send_all_might_not_block(self) -> None:
        self._begin("sending")
        try:
            await self._out.wait_for_room()
        finally:
            self._busy.discard("sending")

    async def send_eof(self) -> None:
        self._begin("sending")
        self._busy.discard("sending")
        self._out.end()
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self._begin("receiving")
        try:
            return await self._into.receive(max_bytes)
        finally:
            self._busy.discard("receiving")

    def _begin(self, doing: str) -> None:
        if doing in self._busy:
            raise trio.BusyResourceError(f"another task is {doing}")
        self._busy.add(doing)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._out.end()
            self._into.close_reader()
            self._connection.trace_if_closed()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()


class _OneRequestStream(trio.abc.HalfCloseableStream):
    """The end of a connection for one request: it adds `Connection: close` to the head of the request."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._line: bytes | None = b""  # the first line, until it is complete

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        while self._line is not None:
            data = await self._end.receive_some(max_bytes)
            self._line += data
            line, end, rest = self._line.partition(b"\r\n")
            if end or not data:
                self._line = None
                return line + end + (b"Connection: close\r\n" if end else b"") + rest
        return await self._end.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._end.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._end.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._end.send_eof()

    async def aclose(self) -> None:
        await self._end.aclose()


class _Connection:
    """Two pipes, and their faults."""

    def __init__(self, network: Network, number: int, port: int, owner: str, faults: list[Fault]) -> None:
        self.number, self.port, self.owner = number, port, owner
        self._network = network
        dice = random.Random(network.seed * 1000 + number)
        there = _Pipe(network.line, dice, [each for each in faults if not each.back], self._on_fault)
        back = _Pipe(network.line, dice, [each for each in faults if each.back], self._on_fault)
        self._to_server, self._to_client = there, back
        self.client, self.server = End(self, there, back), End(self, back, there)

    @property
    def closed(self) -> bool:
        return self.client.closed and self.server.closed

    @property
    def dead(self) -> bool:
        return self._to_server.dead

    def trace_if_closed(self) -> None:
        if self.closed:
            sums = [f"{pipe.passed} bytes {pipe.crc:08x}" for pipe in (self._to_server, self._to_client)]
            self._network.trace(f"connection {self.number} is closed: {sums[0]} there, {sums[1]} back")

    def cut(self) -> None:
        self._to_server.cut(keep_unread=False)
        self._to_client.cut(keep_unread=False)

    def _on_fault(self, fault: Fault) -> None:
        if self._network.healed:
            return
        self._network.on_fault(fault, f"connection {self.number} of {self.owner}")
        pipe, other = (self._to_client, self._to_server) if fault.back else (self._to_server, self._to_client)
        if fault.kind == "cut":
            pipe.cut(keep_unread=fault.seconds > 1)
            other.cut(keep_unread=False)
        elif fault.kind == "end":
            pipe.end()
            other.cut(keep_unread=fault.seconds > 1)
        elif fault.kind == "dead":
            pipe.go_dead()
            other.go_dead()
            self._network.give_up(self)
        elif fault.kind == "stall":
            pipe.stall(fault.seconds)
        else:
            pipe.slow_down(fault.seconds)


class Listener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts connections at one port as long as it is open.  With `single` each connection has one request."""

    def __init__(self, network: Network, port: int, single: bool) -> None:
        self._network, self._port, self._single = network, port, single
        self._send, self._receive = trio.open_memory_channel[End](math.inf)

    def offer(self, end: End) -> None:
        self._send.send_nowait(end)

    async def accept(self) -> trio.abc.Stream:
        end = await self._receive.receive()
        return _OneRequestStream(end) if self._single else end

    def close(self) -> None:
        self._network.unlisten(self._port, self)
        # The system resets connections that were not accepted.
        while self._receive.statistics().current_buffer_used:
            self._receive.receive_nowait().close()
        self._receive.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()


class Network:
    """All connections of one world.  It calls `trace` for its transcript, and `on_fault` for each fault."""

    def __init__(
        self,
        seed: int,
        line: Line,
        faults: list[Fault],
        nursery: trio.Nursery,
        trace: Callable[[str], None],
        on_fault: Callable[[Fault], None],
    ) -> None:
        self.seed, self.line, self.trace = seed, line, trace
        self._faults: defaultdict[int, list[Fault]] = defaultdict(list)
        for fault in faults:
            self._faults[fault.victim].append(fault)
        self._nursery = nursery
        self._on_fault = on_fault
        self._listeners: dict[int, Listener] = {}
        self._unreachable: dict[int, tuple[float, bool]] = {}  # until this time; True if without a reply
        self._backends: dict[int, deque[int]] = {}  # by the port of a proxy; the last one had the last connection
        self.connections: list[_Connection] = []
        self.healed = False

    def balance(self, port: int, backends: Iterable[int]) -> None:
        """Connect a port to its backends in turn, as a proxy does that skips backends which refuse connections."""
        self._backends[port] = deque(backends)

    def _choose_port(self, port: int) -> int:
        backends = self._backends.get(port)
        if backends is None:
            return port
        for _ in range(len(backends)):
            backends.rotate(-1)
            until, silent = self._unreachable.get(backends[-1], (0.0, False))
            if backends[-1] in self._listeners and (silent or trio.current_time() >= until):
                break
        return backends[-1]

    def listen(self, port: int, *, single: bool = False) -> Listener:
        self._listeners[port] = Listener(self, port, single)
        return self._listeners[port]

    def unlisten(self, port: int, listener: Listener) -> None:
        if self._listeners.get(port) is listener:
            del self._listeners[port]

    async def dial(self, host: str, port: int) -> trio.abc.Stream:
        """Replaces `trio.open_tcp_stream`."""
        await trio.sleep(self.line.delay)
        port = self._choose_port(port)
        until, silent = self._unreachable.get(port, (0.0, False))
        if silent and trio.current_time() < until:
            await trio.sleep_until(until)
        if trio.current_time() < until or port not in self._listeners:
            raise ConnectionRefusedError(f"port {port} is closed")
        number = len(self.connections)
        connection = _Connection(self, number, port, caller.get(), [] if self.healed else self._faults[number])
        self.connections.append(connection)
        self.trace(f"connection {number} of {connection.owner} to {port}")
        self._listeners[port].offer(connection.server)
        return connection.client

    def on_fault(self, fault: Fault, where: str) -> None:
        self.trace(f"{fault.kind} at {where}")
        self._on_fault(fault)

    def give_up(self, connection: _Connection) -> None:
        async def later() -> None:
            await trio.sleep(DEAD_SECONDS)
            connection.cut()

        self._nursery.start_soon(later, name="reset of a dead connection")

    def unreachable(self, port: int, seconds: float, *, silent: bool) -> None:
        self._unreachable[port] = (trio.current_time() + seconds, silent)

    def crash(self, *, port: int | None = None, owner: str | None = None) -> None:
        """Reset the connections of a program: those that it accepted at a port, or those that it made."""
        for connection in self.connections:
            if connection.port == port or connection.owner == owner:
                connection.cut()

    def heal(self) -> None:
        """Stop all faults, and reset the dead connections."""
        self.healed = True
        self._unreachable.clear()
        for connection in self.connections:
            if connection.dead:
                connection.cut()
