"""One end of a connection that is one stream in both directions, for both roles.

One task reads and passes the messages on; `outbox` decides which task writes.  A `Framing` finds the messages in the
bytes: lines here, WebSocket messages elsewhere.  A `SessionHandler` acts on the messages.

Each task that queues messages limits their number.  If the peer keeps sending and does not read, it is not read either.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias

import trio

from trio_mcp.core.framing import LineFramer
from trio_mcp.core.messages import InvalidMessage, Limits, Message, decode, encode
from trio_mcp.core.pace import Pace
from trio_mcp.core.session import SessionProtocol
from trio_mcp.core.shares import FEW, Account, Charge, weight
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.outbox import GONE, Outbox

__all__ = ["Duplex", "Framing", "Lines", "SessionHandler", "Tap", "close", "keep_alive", "write_now"]

Tap: TypeAlias = Callable[[str, bytes], object]
"""Called with "in" or "out" and the bytes that were read or are about to be written."""

_CONTROL = 127  # bytes of control frames that count as one message: a pong is at most this long
_TURN = 1000  # messages that are handled before other tasks run: some have three bytes, and each needs a response
_COPIED = 64 * 1024  # bytes of the longest line that is copied, in order to write it together with its newline
_PIECE = 16 * 1024  # bytes of one write: progress is measured by writes, because a stream does not report parts


class Framing(Protocol):
    """Finds messages in the bytes of one connection, and writes messages as bytes; without I/O."""

    @property
    def ended(self) -> bool:
        """The peer has ended the framing, or violated it: no more reads, and no more messages sent."""

    @property
    def why(self) -> str:
        """The reason of the end, for the requests that wait for a response."""

    @property
    def stretch(self) -> int | None:
        """The most bytes to feed at once, because no other task runs meanwhile; None: no limit."""

    @property
    def size(self) -> int:
        """The memory for the last message that `feed` returned, in bytes."""

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


async def close(stream: trio.abc.Stream, deadline: float) -> None:
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


class StreamWire(Outbox[Sequence[bytes | memoryview]]):
    """The wire of a session with a stream of its own."""

    answers_only = False
    handler: SessionHandler

    async def flush(self) -> None:
        if not self._writing:
            await self._write(self.handler.session.serving > 0)

    def hang_up(self, retry: float) -> bool:
        return False


class Duplex:
    """One connection, from its first byte to its last.

    The writer task runs in `nursery`, which must outlive the session.  `received` was read from the stream earlier and
    is handled first.  `input_ended` is called when the peer has ended its half of the stream and may still read; the
    connection ends when it returns.  Without `input_ended`, or if the stream cannot be half-closed, the connection ends
    at once.
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
        self._received = received
        self._account = account
        self._sending = 0  # bytes charged to the account for the current write
        # An account of its own, so that with too many running calls, its calls are refused and not the connection.
        self._unfinished = None if account is None else Charge(account.budget.account(account.holder))
        self._unfinished_bytes = 0
        self._input_ended = input_ended if isinstance(stream, trio.abc.HalfCloseableStream) else None
        self._handler = handler
        self._stream = stream
        sending = stream.send_stream if isinstance(stream, trio.StapledStream) else stream
        self._send_now: Callable[[bytes | memoryview], int] | None = getattr(sending, "send_now", None)
        self._framing = framing
        self._limits = limits
        self._tap = tap
        self._open = trio.CancelScope()  # cancelled to end the connection
        limit, gone = limits.outgoing, self._open.cancel
        at_once = None if self._send_now is None else self._at_once
        self.wire = StreamWire(self._send, self._take, self._queued, limit, gone, spawn=nursery, at_once=at_once)
        self.wire.handler = handler
        self._control = b""  # control frames to send
        self.last_data_at = trio.current_time()
        """The time of the last bytes."""
        self._gone = False  # the peer has gone, so no closing frame is sent
        self._half_closed = False  # the peer ended its half in order, and may still read
        self._network = False
        self._reads = Pace(limits.write_seconds, limits.write_rate)  # how fast the peer reads
        self._writes = Pace(limits.body_seconds, limits.body_rate)  # how fast the peer sends a message
        self._piece = trio.CancelScope()  # of the current write
        self._why = ""  # the reason of `give_up`, or of a write that was too slow

    async def run(self, heartbeat: float | None = None, *, network: bool = False) -> None:
        """Transfer messages until one side ends the connection; then close the stream.

        After `heartbeat` seconds without a byte, send a ping, and after as many more seconds, give the peer up.  With a
        heartbeat or on a `network`, the peer must make progress: it must read the messages for it
        (`Limits.write_seconds`, `Limits.write_rate`), and a client must finish each message that it has begun
        (`Limits.body_seconds`, `Limits.body_rate`).  Otherwise the peer may be silent or busy for ever, like a child
        process.  Exceptions of `tap` or of the stream, except those in `GONE`, are kept in `wire.failure`.
        """
        if heartbeat is not None or network:
            self._network = True
            self._reads.begin(trio.current_time())
            self._piece.deadline = self._reads.deadline  # a write may be in progress already
        try:
            with self._open:
                async with open_nursery() as nursery:
                    if heartbeat is not None:
                        nursery.start_soon(self._watch, heartbeat)
                    try:
                        await self._read()
                        if self._half_closed and self._input_ended is not None:
                            await self._input_ended()
                    finally:
                        # Messages that are not being written yet are dropped: the peer reads no more, and some peers
                        # fail on late messages.
                        self._handler.connection_lost(self._why or self._framing.why)
                        self.wire.finish()
        finally:
            with trio.CancelScope(shield=True):
                await self.wire.idle()  # a handler's task may be writing
            self.wire.close()  # from here on only this task writes
            if self._unfinished is not None:
                self._unfinished.set(0)
            try:
                await self._say_farewell()
            finally:
                await close(self._stream, self.wire.deadline)

    async def end(self) -> None:
        """End the connection as soon as all messages have been written."""
        await self.wire.empty()
        self._open.cancel()

    async def _read(self) -> None:
        # Only responses to the peer's own pings and mistakes can exceed this number, so the peer is the cause.
        most = self._limits.calls + self._limits.outgoing
        stretch = self._framing.stretch
        while not self._framing.ended:
            try:
                data, self._received = self._received[:stretch], self._received[stretch or len(self._received) :]
                data = data or await self._receive(stretch)
            except GONE:
                self._gone = True
                return
            if self._framing.ended:
                return
            if not data:
                self._end_input()
                return
            self.last_data_at = trio.current_time()
            if self._tap is not None:
                self._tap("in", data)
            number = 0
            for number, message in enumerate(self._framing.feed(data), 1):
                self._handler.receive(message, self.last_data_at)
                if not number % _TURN:
                    await self.wire.room(most)
            if self._unfinished is not None:
                self._check_unfinished(len(data) if number else 0)
            self._control += self._framing.pending()
            if self._queued():
                self.wire.wake()
                await self.wire.room(most)  # also a checkpoint, so that the write begins before the next read

    async def _receive(self, stretch: int | None) -> bytes:
        if self._writes.deadline == math.inf:
            return bytes(await self._stream.receive_some(stretch))
        with trio.CancelScope(deadline=self._writes.deadline) as scope:
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
            self._writes.begin(self.last_data_at)
            self._writes.move(moved or held - before, self.last_data_at)
        elif self._writes.deadline < math.inf:
            self._writes.end(self.last_data_at)

    def _end_input(self) -> None:
        """Handle the end of the peer's half of the stream."""
        self._gone = self._half_closed = True
        if self._input_ended is not None:
            for message in self._framing.feed(b""):
                self._handler.receive(message, self.last_data_at)

    def _queued(self) -> int:
        queued = self._handler.session.queued
        return queued - -len(self._control) // _CONTROL if self._control else queued

    def _take(self) -> Sequence[bytes] | None:
        session = self._handler.session
        messages = session.outgoing()
        self._sending += session.take_charge()
        self._handler.release()
        if not messages:  # all queued messages have been cancelled
            messages = session.outgoing()
            self._sending += session.take_charge()
        texts = [encode(message) for message, _ in messages]
        pieces = self._framing.frame(texts) if texts and not self._framing.ended else ()
        if self._control:
            pieces, self._control = (*pieces, self._control), b""
        if not pieces:
            self._return_charge()
            return None
        if self._tap is not None:
            self._tap("out", b"".join(pieces))
        return pieces

    def _return_charge(self) -> None:
        """Give back the bytes charged for a write that has ended."""
        if self._sending and self._account is not None:
            self._account.give(self._sending)
        self._sending = 0

    def _at_once(self, pieces: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview] | None:
        assert self._send_now is not None
        for at, piece in enumerate(pieces):
            taken = self._send_now(piece)
            if taken < len(piece):
                return (memoryview(piece)[taken:], *pieces[at + 1 :])
        self._return_charge()
        return None

    async def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        try:
            if self._send_now is not None:  # a stream with `send_now` is not a network, and has no time limit
                for piece in pieces:
                    await self._stream.send_all(piece)
            else:
                await self._send_with_pace(pieces)
        finally:
            self._return_charge()

    async def _send_with_pace(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self._network:
            self._reads.begin(trio.current_time())
        for data in pieces:
            for start in range(0, len(data), _PIECE):
                piece = data if len(data) <= _PIECE else memoryview(data)[start : start + _PIECE]
                with trio.CancelScope(deadline=self._reads.deadline) as self._piece:
                    await self._stream.send_all(piece)
                if self._piece.cancelled_caught:
                    limits = self._limits
                    self._why = (
                        f"the peer read less than {limits.write_rate:g} bytes a second for "
                        f"{limits.write_seconds:g} seconds (Limits.write_rate, Limits.write_seconds)"
                    )
                    raise trio.BrokenResourceError(self._why)
                if self._network:
                    self._reads.move(len(piece), trio.current_time())
        if self._network:
            self._reads.end(trio.current_time())

    async def _say_farewell(self) -> None:
        """Send the closing frame, if the framing has one, and give the peer a moment to send its own."""
        if self._gone or self.wire.broken:
            return  # `farewell` must not be called: the framing would count the closing frame as sent
        data = self._control + self._framing.farewell()
        if not data:
            return
        if self._tap is not None:
            self._tap("out", data)
        with suppress(*GONE), trio.CancelScope(shield=True, deadline=self.wire.deadline):
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
                self.wire.wake()
                await trio.sleep(heartbeat)
            if self.last_data_at == last:
                self.give_up(f"the peer was silent for {2 * heartbeat:g} seconds")
                return

    def give_up(self, why: str) -> None:
        """End the connection without a closing frame, because the peer seems to be gone; `run` returns soon."""
        self._gone = True
        self._why = why
        self._open.cancel(reason=why)
