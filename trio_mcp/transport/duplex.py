"""One end of a link that is one stream for everything: read, feed, act; wait, drain, write.

One task reads; who writes is the business of `outbox`.  How messages lie in the bytes is that of a `Framing`: lines
here, WebSocket messages elsewhere.  What the messages mean is that of a `SessionHandler`, the same for both roles.

What waits for the wire is bounded by whoever queues it; and when the other side neither reads nor stops sending, it is
not read any more either.
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
from trio_mcp.core.jsonrpc import InvalidMessage, Limits, Message, decode, encode
from trio_mcp.core.pace import Pace
from trio_mcp.core.session import SessionProtocol
from trio_mcp.core.shares import FEW, Account, Charge, weight
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.outbox import GONE, Outbox

__all__ = ["Duplex", "Framing", "Lines", "SessionHandler", "Tap", "close", "keep_alive", "write_now"]

Tap: TypeAlias = Callable[[str, bytes], object]
"""Called with "in" or "out" and the bytes that were read or are about to be written."""

_CONTROL = 127  # bytes that count as one message when a framing has something to say: a pong has no more
_TURN = 1000  # messages that are heard before others have their turn: some are three bytes, and each is owed an answer
_COPIED = 64 * 1024  # bytes of a line that is copied rather than written apart from its newline
_PIECE = 16 * 1024  # bytes of a write that count as progress: a stream does not tell how much of one has gone


class Framing(Protocol):
    """How messages lie in the bytes of a stream; of one connection, and without I/O."""

    @property
    def ended(self) -> bool:
        """The other side said that it ends, or broke the framing: nothing is read, and no message sent, any more."""

    @property
    def why(self) -> str:
        """What is to be said of the end, to whoever waits for an answer."""

    @property
    def stretch(self) -> int | None:
        """Bytes that are fed at once at most, for nobody else is served meanwhile; None: as they come."""

    @property
    def size(self) -> int:
        """What the message that `feed` has given last takes while it is held, in bytes."""

    @property
    def held(self) -> int:
        """Bytes of a message that has begun to come and is not whole."""

    def feed(self, data: bytes) -> Iterable[Message]:
        """The messages that are whole now; also takes in control frames.  No data is the end of the stream."""

    def give_up(self, why: str, *, late: bool) -> None:
        """Wait no longer for the message that is not whole, and so for no other: it is late, or finds no room."""

    def frame(self, texts: Sequence[bytes]) -> Sequence[bytes]:
        """These messages, each as JSON, as they go out: pieces, each of which is one write."""

    def pending(self) -> bytes:
        """What the framing itself has to say now, such as a pong; once."""

    def ping(self) -> None:
        """Ask the other side for a sign of life; the question is `pending`.  Only called where a heartbeat is."""

    def farewell(self) -> bytes:
        """What is said before an end of ours, if anything is; then the other side may say that it ends too."""


class Lines:
    """One message a line."""

    stretch = None

    def __init__(self, limits: Limits) -> None:
        self.ended = False
        self.why = "the connection has ended"
        self.size = 0
        self.watch: Callable[[bytes, Message], None] | None = None
        """Called with each line, and the message that it is, before that is heard."""
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
        """What has come of a line that is not whole, which is given up by that."""
        return b"".join([each for each in self._framer.close() if isinstance(each, bytes)])

    def give_up(self, why: str, *, late: bool) -> None:
        self.ended, self.why = True, why

    def frame(self, texts: Sequence[bytes]) -> Sequence[bytes]:
        if max(map(len, texts)) <= _COPIED:
            return (b"\n".join((*texts, b"")),)
        pieces: list[bytes] = []
        lines: list[bytes] = []  # one after the other; what is longer is not copied for the sake of a newline
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
        """There is none."""

    def farewell(self) -> bytes:
        return b""


class SessionHandler(Protocol):
    """Who speaks by the link."""

    @property
    def session(self) -> SessionProtocol:
        """What waits to be sent is in here."""

    def receive(self, message: Message, now: float) -> None:
        """A message has come."""

    def release(self) -> None:
        """What waits is taken out now, so there is room again."""

    def connection_lost(self, why: str) -> None:
        """Nothing more will be heard."""


# A TCP line on which nothing has come for a minute is tried each quarter of a minute, four times: a dead one is noticed
# after two minutes, and a router that forgets idle lines after five is kept from it.
_TCP_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPALIVE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


def keep_alive(line: object) -> None:
    """Have the system notice when the TCP line of this stream is dead, or those that this listener accepts.

    What its owner has set so already stays as it is, and other streams stay as they are.
    """
    line = getattr(line, "transport_stream", line)  # of TLS
    line = getattr(line, "transport_listener", line)
    if not isinstance(line, trio.SocketStream | trio.SocketListener):
        return
    sock = line.socket
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # it may be gone already
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_KEEP_ALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # each system has some of them
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def close(stream: trio.abc.Stream, deadline: float) -> None:
    # Streams do close when they are cancelled at it, only less politely.
    with suppress(*GONE), trio.CancelScope(shield=True, deadline=deadline):
        await stream.aclose()


def write_now(fd: int, data: bytes | memoryview) -> int:
    """How many bytes of it the system takes without anybody having to wait: what a stream's `send_now` is."""
    try:
        return os.write(fd, data)
    except OSError:  # there is no room, or nobody reads: `send_all` waits for the one, and can tell the other
        return 0


class StreamWire(Outbox[Sequence[bytes | memoryview]]):
    """Everything goes on a stream of its own."""

    answers_only = False
    talk: SessionHandler

    async def flush(self) -> None:
        if not self._writing:
            await self._write(self.talk.session.serving > 0)

    def hang_up(self, retry: float) -> bool:
        return False


class Duplex:
    """One connection, from its first byte to its last.

    `nursery` is where the writer runs when nobody else does its work; it must outlast whoever speaks.  `received` came
    on the stream before, and is the first of what is read.  `input_ended` is called when the other side has ended its
    half of the stream and may still read; the link ends when it returns.  Without it, and on a stream that has no
    halves, that is the end of the link at once.
    """

    def __init__(
        self,
        talk: SessionHandler,
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
        self._sending = 0  # bytes in it of what is being written
        # It has an account of its own: if too many calls run, the calls that it brings are refused, not the connection.
        self._unfinished = None if account is None else Charge(account.budget.account(account.holder))
        self._unfinished_bytes = 0
        self._input_ended = input_ended if isinstance(stream, trio.abc.HalfCloseableStream) else None
        self._talk = talk
        self._stream = stream
        sending = stream.send_stream if isinstance(stream, trio.StapledStream) else stream
        self._send_now: Callable[[bytes | memoryview], int] | None = getattr(sending, "send_now", None)
        self._framing = framing
        self._limits = limits
        self._tap = tap
        self._open = trio.CancelScope()  # cancelled when this is to end
        limit, gone = limits.outgoing, self._open.cancel
        at_once = None if self._send_now is None else self._at_once
        self.wire = StreamWire(self._send, self._take, self._queued, limit, gone, spawn=nursery, at_once=at_once)
        self.wire.talk = talk
        self._control = b""  # what the framing has to say
        self.last_data_at = trio.current_time()
        """The time of the last bytes."""
        self._gone = False  # the other side has, so there is nobody to say farewell to
        self._half_closed = False  # it was in good order, and may still read
        self._network = False
        self._reads = Pace(limits.write_seconds, limits.write_rate)  # how the other side does
        self._writes = Pace(limits.body_seconds, limits.body_rate)
        self._piece = trio.CancelScope()  # of the write at hand
        self._why = ""  # it was given up

    async def run(self, heartbeat: float | None = None, *, network: bool = False) -> None:
        """Carry messages until the other side, or this one, ends the link; the stream is closed then.

        After `heartbeat` seconds without a byte the other side is asked for a sign of life, and after as many more it
        is given up.  With a heartbeat, and on a `network`, it has to make progress: in reading what waits for it
        (`Limits.write_seconds`, `Limits.write_rate`), and towards a server in finishing a message that it has begun
        (`Limits.body_seconds`, `Limits.body_rate`).  Else it may be silent, and busy, for ever, as a child process may.
        What `tap` or the stream raise, other than that it has gone, is `wire.failure`.
        """
        if heartbeat is not None or network:
            self._network = True
            self._reads.begin(trio.current_time())
            self._piece.deadline = self._reads.deadline  # somebody may be writing already
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
                        # What was not begun is dropped: the other side reads nothing more, and some peers stumble
                        # over it.
                        self._talk.connection_lost(self._why or self._framing.why)
                        self.wire.finish()
        finally:
            with trio.CancelScope(shield=True):
                await self.wire.idle()  # a handler may be the one that writes
            self.wire.close()  # what is said from here on is said by this task, and no writer beside it
            if self._unfinished is not None:
                self._unfinished.set(0)
            try:
                await self._part()
            finally:
                await close(self._stream, self.wire.deadline)

    async def end(self) -> None:
        """End the link as soon as everything has been written."""
        await self.wire.empty()
        self._open.cancel()

    async def _read(self) -> None:
        # Beyond this only what answers the other side's own pings and mistakes can pile up, so it is its doing.
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
                self._talk.receive(message, self.last_data_at)
                if not number % _TURN:
                    await self.wire.room(most)
            if self._unfinished is not None:
                self._look_at_unfinished(len(data) if number else 0)
            self._control += self._framing.pending()
            if self._queued():
                self.wire.wake()
                await self.wire.room(most)  # also so that it is on its way before an end of the stream is seen

    async def _receive(self, stretch: int | None) -> bytes:
        if self._writes.deadline == math.inf:
            return bytes(await self._stream.receive_some(stretch))
        with trio.CancelScope(deadline=self._writes.deadline) as scope:
            return bytes(await self._stream.receive_some(stretch))
        if scope.cancelled_caught:
            limits = self._limits
            why = (
                f"a message was not whole within {limits.body_seconds:g} seconds, and did not go on at "
                f"{limits.body_rate:g} bytes a second (Limits.body_seconds, Limits.body_rate)"
            )
            self._framing.give_up(why, late=True)
            self._control += self._framing.pending()
        return b""

    def _look_at_unfinished(self, moved: int) -> None:
        """Charge what has come of a message that is not whole, and see to it that it goes on.

        `moved` are bytes that have made a message whole.  Else only what becomes a part of it is progress: pings and
        empty frames are not.
        """
        before, held = self._unfinished_bytes, self._framing.held
        self._unfinished_bytes = held
        assert self._unfinished is not None
        if (held or self._unfinished.held) and (limit := self._unfinished.set(held)) is not None:
            self._unfinished.set(0)
            self._framing.give_up(f"too much waits that the other side has sent (Limits.{limit})", late=False)
        if not self._network:
            return
        if held:
            self._writes.begin(self.last_data_at)
            self._writes.move(moved or held - before, self.last_data_at)
        elif self._writes.deadline < math.inf:
            self._writes.end(self.last_data_at)

    def _end_input(self) -> None:
        """The other side has ended its half of the stream in good order."""
        self._gone = self._half_closed = True
        if self._input_ended is not None:
            for message in self._framing.feed(b""):
                self._talk.receive(message, self.last_data_at)

    def _queued(self) -> int:
        queued = self._talk.session.queued
        return queued - -len(self._control) // _CONTROL if self._control else queued

    def _take(self) -> Sequence[bytes] | None:
        session = self._talk.session
        messages = session.outgoing()
        self._sending += session.take_charge()
        self._talk.release()
        if not messages:  # all that there was has been cancelled
            messages = session.outgoing()
            self._sending += session.take_charge()
        texts = [encode(message) for message, _ in messages]
        pieces = self._framing.frame(texts) if texts and not self._framing.ended else ()
        if self._control:
            pieces, self._control = (*pieces, self._control), b""
        if not pieces:
            self._written()
            return None
        if self._tap is not None:
            self._tap("out", b"".join(pieces))
        return pieces

    def _written(self) -> None:
        """What was taken is with the other side, or never will be."""
        if self._sending and self._account is not None:
            self._account.give(self._sending)
        self._sending = 0

    def _at_once(self, pieces: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview] | None:
        assert self._send_now is not None
        for at, piece in enumerate(pieces):
            taken = self._send_now(piece)
            if taken < len(piece):
                return (memoryview(piece)[taken:], *pieces[at + 1 :])
        self._written()
        return None

    async def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        try:
            if self._send_now is not None:  # what can do that is no network, and may take as long as it likes
                for piece in pieces:
                    await self._stream.send_all(piece)
            else:
                await self._send_at_a_pace(pieces)
        finally:
            self._written()

    async def _send_at_a_pace(self, pieces: Sequence[bytes | memoryview]) -> None:
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
                        f"the other side took less than {limits.write_rate:g} bytes a second for "
                        f"{limits.write_seconds:g} seconds (Limits.write_rate, Limits.write_seconds)"
                    )
                    raise trio.BrokenResourceError(self._why)
                if self._network:
                    self._reads.move(len(piece), trio.current_time())
        if self._network:
            self._reads.end(trio.current_time())

    async def _part(self) -> None:
        """Say farewell, where the framing has one, and give the other side a moment to say it too."""
        if self._gone or self.wire.broken:
            return  # a framing that was asked for its farewell would believe that it has been said
        data = self._control + self._framing.farewell()
        if not data:
            return
        if self._tap is not None:
            self._tap("out", data)
        with suppress(*GONE), trio.CancelScope(shield=True, deadline=self.wire.deadline):
            await self._stream.send_all(data)
            while not self._framing.ended and (received := bytes(await self._stream.receive_some())):
                for _ in self._framing.feed(received):
                    pass  # it comes too late

    async def _watch(self, heartbeat: float) -> None:
        """Give the other side up when it is silent for too long, or does not read what would have to be sent first."""
        while True:
            heard = self.last_data_at
            await trio.sleep_until(heard + heartbeat)
            if self.last_data_at == heard:
                self._framing.ping()
                self._control += self._framing.pending()
                self.wire.wake()
                await trio.sleep(heartbeat)
            if self.last_data_at == heard:
                self.give_up(f"the other side was silent for {2 * heartbeat:g} seconds")
                return

    def give_up(self, why: str) -> None:
        """The other side is not there any more, though it has not said so; `run` returns soon."""
        self._gone = True
        self._why = why
        self._open.cancel(reason=why)
