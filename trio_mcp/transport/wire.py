"""Wires: the send queue of one destination, its writer, and a connection that is one stream in both directions.

A task that has a message to send writes it itself if no write is in progress.  Messages that are queued during a write
are sent together afterwards, by one writer task, which exists only while there are messages.  A cancellation never
interrupts a write: a write that has begun is finished, within `CLOSING` seconds once the connection ends.

`Wire` is the interface that a session uses.  A `Duplex` is one end of a connection, for both roles, and its wire.  One
task reads and passes the messages on.  A `Framing` finds the messages in the bytes: lines here, WebSocket messages
elsewhere.  A `SessionHandler` acts on the messages.  Each task that queues messages limits their number.  If the peer
keeps sending and does not read, it is not read either.
"""

from __future__ import annotations

import math
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias

import trio

from trio_mcp.core.framing import LineFramer
from trio_mcp.core.messages import InvalidMessage, Limits, Message, decode, encode
from trio_mcp.core.session import SessionProtocol
from trio_mcp.core.shares import FEW, Account, Charge, Pace, weight
from trio_mcp.transport.nursery import open_nursery

__all__ = [
    "CLOSING", "GONE", "Duplex", "Framing", "Lines", "SessionHandler", "Tap", "Wire", "close_stream",
    "keep_alive", "write_now",
]  # fmt: skip

Tap: TypeAlias = Callable[[str, bytes], object]
"""Called with "in" or "out" and the bytes that were read or are about to be written."""

CLOSING = 1.0
"""Seconds for which a write that has begun may continue when the connection ends."""

GONE = (trio.BrokenResourceError, trio.ClosedResourceError)
"""The exceptions of a stream that the peer, or another task of ours, has closed."""

_CONTROL = 127  # bytes of control frames that count as one message: a pong is at most this long
_TURN = 1000  # messages that are handled before other tasks run: some have three bytes, and each needs a response
_COPIED = 64 * 1024  # bytes of the longest line that is copied, in order to write it together with its newline
_PIECE = 16 * 1024  # bytes of one write: progress is measured by writes, because a stream does not report parts


class Wire(ABC):
    """The destination of messages.  A wire is equal only to itself.

    A subclass defines `wake` and `close`, and if it has a queue and a writer, also `flush`, `full` and `room`.
    """

    __slots__ = ()

    answers_only = False
    """Whether only responses can be sent here: requests fail at once, and notifications are dropped."""

    @abstractmethod
    def wake(self) -> None:
        """Start a writer: there are messages to send, or a request of this wire has ended without a response."""

    async def flush(self, batch: bool = False) -> None:
        """Like `wake`, but may write in the caller's task.  For the last step of a task: it may not be a checkpoint.

        `batch`: other tasks may be about to answer, so one write for all is worth a moment.
        """
        self.wake()
        await trio.lowlevel.checkpoint()

    @property
    def full(self) -> bool:
        """Whether the queue is full, so that no message should be added."""
        return False

    async def room(self) -> None:
        """Wait while the queue is full.  Always a checkpoint."""
        await trio.lowlevel.checkpoint()

    @property
    def mark(self) -> int:
        """The number of the write that will contain the messages queued now."""
        return 0

    async def written(self, mark: int) -> None:
        """Wait until that write has been sent, so that the peer reads later messages separately."""
        await trio.lowlevel.checkpoint()

    def hang_up(self, retry: float) -> bool:
        """Ask the client to fetch the rest after `retry` seconds; False if this client or transport cannot do that."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Stop receiving and sending: the server has stopped."""


class Framing(Protocol):
    """Finds messages in the bytes of one connection, and writes messages as bytes; without I/O."""

    ended: bool
    """The peer has ended the framing, or violated it: no more reads, and no more messages sent."""
    why: str
    """The reason of the end, for the requests that wait for a response."""
    size: int
    """The memory for the last message that `feed` returned, in bytes."""

    @property
    def stretch(self) -> int | None:
        """The most bytes to feed at once, because no other task runs meanwhile; None: no limit."""

    @property
    def held(self) -> int:
        """The bytes received of an incomplete message."""

    def feed(self, data: bytes) -> Iterable[Message]:
        """Return the messages that are now complete; also handles control frames.  Empty data is the end of the
        stream."""

    def give_up(self, why: str, *, late: bool) -> None:
        """Stop receiving: the incomplete message is late, or exceeds a memory limit."""

    def frame(self, texts: Sequence[bytes]) -> Sequence[bytes]:
        """Return these JSON messages as pieces of bytes.  Each piece is one write."""

    def pending(self) -> bytes:
        """Return the control frames to send now, such as a pong; each is returned once."""

    def ping(self) -> None:
        """Add a ping to `pending`.  Only called on connections with a heartbeat."""

    def farewell(self) -> bytes:
        """Return the closing frame to send before our end, or no bytes.  The peer may answer with its own."""


class Lines:
    """The framing of one message per line."""

    stretch = None

    def __init__(self, limits: Limits) -> None:
        self.ended = False
        self.why = "the connection has ended"
        self.size = 0
        self.watch: Callable[[bytes, Message], None] | None = None
        """Called with each line and its message, before the message is handled."""
        self._limits = limits
        self._framer = LineFramer(limits.message_bytes)

    @property
    def held(self) -> int:
        return self._framer.held

    def feed(self, data: bytes) -> Iterable[Message]:
        limits = self._limits
        for line in self._framer.feed(data) if data else self._framer.close():
            if isinstance(line, bytes):
                message = decode(line, limits)
                self.size = size = len(line)
                if size > FEW and type(message) is not InvalidMessage:
                    self.size = weight(line, limits.values, message)
            else:
                self.size = 0
                message, line = line, b""
            if self.watch is not None:
                self.watch(line, message)
            yield message

    def rest(self) -> bytes:
        """Return and discard the bytes of an incomplete line."""
        return b"".join([each for each in self._framer.close() if isinstance(each, bytes)])

    def give_up(self, why: str, *, late: bool) -> None:
        self.ended, self.why = True, why

    def frame(self, texts: Sequence[bytes]) -> Sequence[bytes]:
        if max(map(len, texts)) <= _COPIED:
            return (b"\n".join((*texts, b"")),)
        pieces: list[bytes] = []
        lines: list[bytes] = []  # joined into one write; a longer line is not copied just to append a newline
        for text in texts:
            if len(text) <= _COPIED:
                lines.append(text)
            else:
                pieces += (b"\n".join((*lines, b"")), text) if lines else (text,)
                lines = [b""]
        return (*pieces, b"\n".join((*lines, b"")))

    def pending(self) -> bytes:
        return b""

    def ping(self) -> None:
        """Do nothing: this framing has no ping."""

    def farewell(self) -> bytes:
        return b""


class SessionHandler(Protocol):
    """The client or server session that uses the connection."""

    @property
    def session(self) -> SessionProtocol:
        """The protocol state, with the queue of messages to send."""

    def receive(self, message: Message, now: float) -> None:
        """Handle a message."""

    def release(self) -> None:
        """Take note that the queue has been emptied, so there is room again."""

    def connection_lost(self, why: str) -> None:
        """Take note that no more messages will arrive."""


# The system probes a TCP connection after an idle minute, four times at intervals of 15 seconds.  So a dead connection
# is detected after two minutes, and a router that forgets idle connections after five minutes does not forget ours.
_TCP_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPALIVE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


def keep_alive(endpoint: object) -> None:
    """Switch on TCP keep-alive for this stream, or for the connections that this listener accepts.

    If its owner has switched it on already, the settings stay the same.  Has no effect on streams other than TCP.
    """
    endpoint = getattr(endpoint, "transport_stream", endpoint)  # of TLS
    endpoint = getattr(endpoint, "transport_listener", endpoint)
    if not isinstance(endpoint, trio.SocketStream | trio.SocketListener):
        return
    sock = endpoint.socket
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # it may be closed already
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_KEEP_ALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # each system has some of them
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def close_stream(stream: trio.abc.Stream, deadline: float) -> None:
    """Close the stream by the deadline."""
    # A stream whose `aclose` is cancelled closes too, but without a closing handshake.
    with suppress(*GONE), trio.CancelScope(shield=True, deadline=deadline):
        await stream.aclose()


def write_now(fd: int, data: bytes | memoryview) -> int:
    """Write as many bytes as possible without waiting, and return their number.  Implements a stream's `send_now`."""
    try:
        return os.write(fd, data)
    except OSError:  # there is no room, or the reader has gone: `send_all` waits for room, and raises for the other
        return 0


class Duplex(Wire):
    """One connection, from its first byte to its last; also the wire of its session.

    The writer task runs in `nursery`, which must outlive the session.  If the peer has closed the connection, no more
    writes follow; the same holds after another exception of a write, which is kept as `failure`.

    `received` was read from the stream earlier and is handled first.  `input_ended` is called when the peer has ended
    its half of the stream and may still read; the connection ends when it returns.  Without `input_ended`, or if the
    stream cannot be half-closed, the connection ends at once.
    """

    def __init__(
        self,
        handler: SessionHandler,
        stream: trio.abc.Stream,
        framing: Framing,
        limits: Limits,
        *,
        nursery: trio.Nursery,
        tap: Tap | None = None,
        received: bytes = b"",
        account: Account | None = None,
        input_ended: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._handler = handler
        self._stream = stream
        self._framing = framing
        self._limits = limits
        self._tap = tap
        self._received = received
        self._account = account
        self._sending = 0  # bytes charged to the account for the current write
        # An account of its own, so that with too many running calls, its calls are refused and not the connection.
        self._unfinished = None if account is None else Charge(account.budget.account(account.holder))
        self._unfinished_bytes = 0
        self._input_ended = input_ended if isinstance(stream, trio.abc.HalfCloseableStream) else None
        sending = stream.send_stream if isinstance(stream, trio.StapledStream) else stream
        self._send_now: Callable[[bytes | memoryview], int] | None = getattr(sending, "send_now", None)
        self._open = trio.CancelScope()  # cancelled to end the connection
        # The queue and its writer.
        self._limit = limits.outgoing  # with so many messages the queue is full; with more there is no room
        self._nursery = nursery
        self._scope = trio.CancelScope()  # of the current write
        self._writing = False
        self._writes = 0  # that have ended
        self._written = trio.lowlevel.ParkingLot()
        self._writer = False  # the writer task is starting, or running
        self._over = False
        self._was_full = False  # since the last release: senders hold messages
        self.deadline = math.inf
        """The deadline of the last write, once the connection ends."""
        self.broken = False
        """The peer has closed the connection, or a write has failed or was cancelled."""
        self.failure: Exception | None = None
        """The exception of a write, unless it is one of `GONE`."""
        self._control = b""  # control frames to send
        self.last_data_at = trio.current_time()
        """The time of the last bytes."""
        self._gone = False  # the peer has gone, so no closing frame is sent
        self._network = False
        self._read_pace = Pace(limits.write_seconds, limits.write_rate)  # how fast the peer reads
        self._write_pace = Pace(limits.body_seconds, limits.body_rate)  # how fast the peer sends a message
        self._piece = trio.CancelScope()  # of the current write
        self._why = ""  # the reason of `give_up`, or of a write that was too slow

    async def run(self, heartbeat: float | None = None, *, network: bool = False) -> None:
        """Transfer messages until one side ends the connection; then close the stream.

        After `heartbeat` seconds without a byte, send a ping, and after as many more seconds, give the peer up.  With a
        heartbeat or on a `network`, the peer must make progress: it must read the messages for it
        (`Limits.write_seconds`, `Limits.write_rate`), and a client must finish each message that it has begun
        (`Limits.body_seconds`, `Limits.body_rate`).  Otherwise the peer may be silent or busy for ever, like a child
        process.  Exceptions of `tap` or of the stream, except those in `GONE`, are kept in `failure`.
        """
        if heartbeat is not None or network:
            self._network = True
            self._read_pace.begin(trio.current_time())
            self._piece.deadline = self._read_pace.deadline  # a write may be in progress already
        try:
            with self._open:
                async with open_nursery() as nursery:
                    if heartbeat is not None:
                        nursery.start_soon(self._watch, heartbeat)
                    try:
                        if await self._read() and self._input_ended is not None:
                            await self._input_ended()
                    finally:
                        # Messages that are not being written yet are dropped: the peer reads no more, and some peers
                        # fail on late messages.
                        self._handler.connection_lost(self._why or self._framing.why)
                        self.finish()
        finally:
            with trio.CancelScope(shield=True):
                await self.idle()  # a handler's task may be writing
            self.close()  # from here on only this task writes
            if self._unfinished is not None:
                self._unfinished.set(0)
            try:
                await self._say_farewell()
            finally:
                await close_stream(self._stream, self.deadline)

    async def end(self) -> None:
        """End the connection as soon as all messages have been written."""
        await self.empty()
        self._open.cancel()

    async def _read(self) -> bool:
        """Read and handle messages.  Return True if the peer has ended its half of the stream and may still read."""
        # Only responses to the peer's own pings and mistakes can exceed this number, so the peer is the cause.
        most = self._limits.calls + self._limits.outgoing
        stretch = self._framing.stretch
        while not self._framing.ended:
            try:
                data, self._received = self._received[:stretch], self._received[stretch or len(self._received) :]
                if not data and self._write_pace.deadline == math.inf:
                    data = bytes(await self._stream.receive_some(stretch))
                elif not data:
                    data = await self._receive_in_time(stretch)
            except GONE:
                self._gone = True
                break
            if self._framing.ended:
                break
            if not data:
                return self._end_input()
            self.last_data_at = trio.current_time()
            if self._tap is not None:
                self._tap("in", data)
            number = 0
            for number, message in enumerate(self._framing.feed(data), 1):
                self._handler.receive(message, self.last_data_at)
                if not number % _TURN:
                    await self.room(most)
            if self._unfinished is not None:
                self._check_unfinished(len(data) if number else 0)
            self._control += self._framing.pending()
            if self._handler.session.queue or self._control:
                self.wake()
                await self.room(most)  # also a checkpoint, so that the write begins before the next read
        return False

    def _end_input(self) -> bool:
        """Handle the end of the peer's half of the stream, which may be the end of a message."""
        self._gone = True
        if self._input_ended is not None:
            for message in self._framing.feed(b""):
                self._handler.receive(message, self.last_data_at)
        return True

    async def _receive_in_time(self, stretch: int | None) -> bytes:
        """Read the rest of a message, which must make progress."""
        with trio.CancelScope(deadline=self._write_pace.deadline) as scope:
            return bytes(await self._stream.receive_some(stretch))
        if scope.cancelled_caught:
            limits = self._limits
            why = (
                f"a message was not complete within {limits.body_seconds:g} seconds, and arrived at less than "
                f"{limits.body_rate:g} bytes a second (Limits.body_seconds, Limits.body_rate)"
            )
            self._framing.give_up(why, late=True)
            self._control += self._framing.pending()
        return b""

    def _check_unfinished(self, moved: int) -> None:
        """Charge the bytes of an incomplete message to the account, and check that the message makes progress.

        `moved` is the number of bytes read, if they completed a message.  Otherwise only bytes that become part of a
        message are progress: pings and empty frames are not.
        """
        before, held = self._unfinished_bytes, self._framing.held
        self._unfinished_bytes = held
        assert self._unfinished is not None
        if (held or self._unfinished.held) and (limit := self._unfinished.set(held)) is not None:
            self._unfinished.set(0)
            self._framing.give_up(f"the peer has sent too much data that is still held (Limits.{limit})", late=False)
        if not self._network:
            return
        if held:
            self._write_pace.begin(self.last_data_at)
            self._write_pace.move(moved or held - before, self.last_data_at)
        elif self._write_pace.deadline < math.inf:
            self._write_pace.end(self.last_data_at)

    # The wire: the queue and its writer.

    def wake(self) -> None:
        # Whether messages wait is asked here and below without a call: `_queued` counts them.
        if not (self._writer or self._writing or self._over) and (self._handler.session.queue or self._control):
            self._writer = True
            self._nursery.start_soon(self._write_all, name="the writer of a connection")

    async def flush(self, batch: bool = False) -> None:
        if not self._writing:
            await self._write(batch)

    @property
    def mark(self) -> int:
        return self._writes + 1 + self._writing

    async def written(self, mark: int) -> None:
        while self._writes < mark and not self._over and self._handler.session.queue:
            if self._writing:
                await self._written.park()
            else:
                await self._write()

    @property
    def full(self) -> bool:
        # A queue that is full is never empty, so the wait for room ends.
        if self._over or not 0 < self._queued() >= self._limit:
            return False
        self._was_full = True
        return True

    async def room(self, most: int | None = None) -> None:
        """Wait while more than `most` messages (by default the limit) are queued.  Always a checkpoint."""
        await trio.lowlevel.checkpoint()
        most = self._limit if most is None else most
        while self._queued() > most and not self._over:
            self.wake()
            await self._written.park()

    async def idle(self) -> None:
        """Wait until no write is in progress."""
        while self._writing:
            await self._written.park()

    async def empty(self) -> None:
        """Wait until all messages have been written."""
        while self._writing or (not self._over and (self._handler.session.queue or self._control)):
            self.wake()
            await self._written.park()

    async def _write_all(self) -> None:
        try:
            while not (self._writing or self._over) and (self._handler.session.queue or self._control):
                await self._write()
        finally:
            self._writer = False

    async def _write(self, batch: bool = False) -> bool:
        """Write the queued messages; False if there were none.

        `batch`: yield once before writing, so that answers that finish in the same tick share one write, which costs
        more than the yield.
        """
        self._writing = True
        wrote = False
        try:
            if batch:
                await trio.lowlevel.cancel_shielded_checkpoint()
            data: Sequence[bytes | memoryview] | None = None if self._over else self._take()
            wrote = data is not None
            if data is not None and self._send_now is not None:
                data = self._send_at_once(data)
            if data is not None:
                with trio.CancelScope(shield=True, deadline=self.deadline) as self._scope:
                    await self._send(data)
                if self._scope.cancelled_caught:  # at the deadline of `finish`
                    self._break()
        except GONE:
            self._break()
        except Exception as error:  # noqa: BLE001  # for the transport: not a fault of the handler that writes here
            self.failure = error
            self._break()
        finally:
            self._writing = False
            self._writes += 1
            if self._sending and self._account is not None:
                self._account.give(self._sending)
            self._sending = 0
            if self._written:
                self._written.unpark_all()
            if wrote:
                self.wake()  # for messages queued meanwhile
        return wrote

    def _break(self) -> None:
        self.broken = True
        self.close()

    def close(self) -> None:
        """Stop writing."""
        self._over = True
        self._written.unpark_all()
        self._open.cancel()

    def finish(self) -> None:
        """Set a deadline for the current write: the connection ends, and no more messages are queued."""
        self.deadline = self._scope.deadline = trio.current_time() + CLOSING

    def _queued(self) -> int:
        queued = len(self._handler.session.queue)
        return queued - -len(self._control) // _CONTROL if self._control else queued

    def _take(self) -> Sequence[bytes] | None:
        session = self._handler.session
        messages = session.outgoing()
        self._sending += session.take_charge()
        if self._was_full:
            self._handler.release()
            self._was_full = len(session.queue) >= self._limit
        if not messages:  # all queued messages have been cancelled
            messages = session.outgoing()
            self._sending += session.take_charge()
        texts = [encode(message) for message, _ in messages]
        pieces = self._framing.frame(texts) if texts and not self._framing.ended else ()
        if self._control:
            pieces, self._control = (*pieces, self._control), b""
        if not pieces:
            return None
        if self._tap is not None:
            self._tap("out", b"".join(pieces))
        return pieces

    def _send_at_once(self, pieces: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview] | None:
        assert self._send_now is not None
        for at, piece in enumerate(pieces):
            taken = self._send_now(piece)
            if taken < len(piece):
                return (memoryview(piece)[taken:], *pieces[at + 1 :])
        return None

    async def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self._send_now is not None:  # a stream with `send_now` is not a network, and has no time limit
            for piece in pieces:
                await self._stream.send_all(piece)
            return
        if self._network:
            self._read_pace.begin(trio.current_time())
        for data in pieces:
            for start in range(0, len(data), _PIECE):
                piece = data if len(data) <= _PIECE else memoryview(data)[start : start + _PIECE]
                with trio.CancelScope(deadline=self._read_pace.deadline) as self._piece:
                    await self._stream.send_all(piece)
                if self._piece.cancelled_caught:
                    limits = self._limits
                    self._why = (
                        f"the peer read less than {limits.write_rate:g} bytes a second for "
                        f"{limits.write_seconds:g} seconds (Limits.write_rate, Limits.write_seconds)"
                    )
                    raise trio.BrokenResourceError(self._why)
                if self._network:
                    self._read_pace.move(len(piece), trio.current_time())
        if self._network:
            self._read_pace.end(trio.current_time())

    async def _say_farewell(self) -> None:
        """Send the closing frame, if the framing has one, and give the peer a moment to send its own."""
        if self._gone or self.broken:
            return  # `farewell` must not be called: the framing would count the closing frame as sent
        data = self._control + self._framing.farewell()
        if not data:
            return
        if self._tap is not None:
            self._tap("out", data)
        with suppress(*GONE), trio.CancelScope(shield=True, deadline=self.deadline):
            await self._stream.send_all(data)
            while not self._framing.ended and (received := bytes(await self._stream.receive_some())):
                for _ in self._framing.feed(received):
                    pass  # messages arrive too late

    async def _watch(self, heartbeat: float) -> None:
        """Give the peer up if it is silent for too long, or does not read the data queued before the ping."""
        while True:
            last = self.last_data_at
            await trio.sleep_until(last + heartbeat)
            if self.last_data_at == last:
                self._framing.ping()
                self._control += self._framing.pending()
                self.wake()
                await trio.sleep(heartbeat)
            if self.last_data_at == last:
                self.give_up(f"the peer was silent for {2 * heartbeat:g} seconds")
                return

    def give_up(self, why: str) -> None:
        """End the connection without a closing frame, because the peer seems to be gone; `run` returns soon."""
        self._gone = True
        self._why = why
        self._open.cancel(reason=why)
