"""One end of a link that is one stream for everything: read, feed, act; wait, drain, write.

One task reads; who writes is the business of `outbox`.  How messages lie in the bytes is that of a `Framing`: lines
here, WebSocket messages elsewhere.  What the messages mean is that of a `Talk`, the same for both roles.

What waits for the wire is bounded by whoever queues it; and when the other side neither reads nor stops sending, it is
not read any more either.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias

import trio

from trio_mcp.core.jsonrpc import Limits, Message, decode, encode
from trio_mcp.core.lines import LineFramer
from trio_mcp.core.session import Session
from trio_mcp.groups import open_nursery
from trio_mcp.outbox import GONE, Outbox

__all__ = ["Duplex", "Framing", "Lines", "Talk", "Tap", "close", "write_now"]

Tap: TypeAlias = Callable[[str, bytes], object]
"""Called with "in" or "out" and the bytes that were read or are about to be written."""

_CONTROL = 127  # bytes that count as one message when a framing has something to say: a pong has no more
_TURN = 1000  # messages that are heard before others have their turn: some are three bytes, and each is owed an answer
_PIECE = 64 * 1024  # bytes of a write that must have gone within `Limits.write_seconds`, where there is a heartbeat


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

    def feed(self, data: bytes) -> Iterable[Message]:
        """The messages that are whole now; also takes in control frames."""

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

    ended = False
    why = "the connection has ended"
    stretch = None

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._framer = LineFramer(limits.message_bytes)

    def feed(self, data: bytes) -> Iterable[Message]:
        for line in self._framer.feed(data):
            yield decode(line, self._limits) if isinstance(line, bytes) else line

    def frame(self, texts: Sequence[bytes]) -> Sequence[bytes]:
        if max(map(len, texts)) <= _PIECE:
            return (b"\n".join((*texts, b"")),)
        pieces: list[bytes] = []
        lines: list[bytes] = []  # one after the other; what is longer is not copied for the sake of a newline
        for text in texts:
            if len(text) <= _PIECE:
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


class Talk(Protocol):
    """Who speaks by the link."""

    @property
    def session(self) -> Session:
        """What waits to be sent is in here."""

    def hear(self, message: Message, now: float) -> None:
        """A message has come."""

    def release(self) -> None:
        """What waits is taken out now, so there is room again."""

    def lost(self, why: str) -> None:
        """Nothing more will be heard."""


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
    talk: Talk

    async def flush(self) -> None:
        if not self._writing:
            await self._write(self.talk.session.serving > 0)

    def hang_up(self, retry: float) -> bool:
        return False


class Duplex:
    """One connection, from its first byte to its last.

    `nursery` is where the writer runs when nobody else does its work; it must outlast whoever speaks.  `received` came
    on the stream before, and is the first of what is read.
    """

    def __init__(
        self,
        talk: Talk,
        stream: trio.abc.Stream,
        framing: Framing,
        limits: Limits,
        *,
        nursery: trio.Nursery,
        tap: Tap | None = None,
        received: bytes = b"",
    ) -> None:
        self._received = received
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
        self._heard = trio.current_time()
        self._gone = False  # the other side has, so there is nobody to say farewell to
        self._patience = math.inf  # seconds for a piece of a write
        self._piece = trio.CancelScope()  # of the one at hand
        self._why = ""  # it was given up

    async def run(self, heartbeat: float | None = None) -> None:
        """Carry messages until the other side, or this one, ends the link; the stream is closed then.

        After `heartbeat` seconds without a byte the other side is asked for a sign of life, and after as many more it
        is given up; and so it is when it takes nothing of what is sent for `Limits.write_seconds`.  Without a heartbeat
        it may be silent, and busy, for ever, as a child process may.  What `tap` or the stream raise, other than that
        it has gone, is `wire.failure`.
        """
        if heartbeat is not None:
            self._patience = self._limits.write_seconds
            self._piece.deadline = trio.current_time() + self._patience  # somebody may be writing already
        try:
            with self._open:
                async with open_nursery() as nursery:
                    if heartbeat is not None:
                        nursery.start_soon(self._watch, heartbeat)
                    try:
                        await self._read()
                    finally:
                        # What was not begun is dropped: who closed the stream reads nothing more, and some peers
                        # stumble over it.
                        self._talk.lost(self._why or self._framing.why)
                        self.wire.finish()
        finally:
            with trio.CancelScope(shield=True):
                await self.wire.idle()  # a handler may be the one that writes
            self.wire.close()  # what is said from here on is said by this task, and no writer beside it
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
                data = data or bytes(await self._stream.receive_some(stretch))
            except GONE:
                data = b""
            if not data:
                self._gone = True
                return
            self._heard = trio.current_time()
            if self._tap is not None:
                self._tap("in", data)
            for number, message in enumerate(self._framing.feed(data), 1):
                self._talk.hear(message, self._heard)
                if not number % _TURN:
                    await self.wire.room(most)
            self._control += self._framing.pending()
            if self._queued():
                self.wire.wake()
                await self.wire.room(most)  # also so that it is on its way before an end of the stream is seen

    def _queued(self) -> int:
        queued = self._talk.session.queued
        return queued - -len(self._control) // _CONTROL if self._control else queued

    def _take(self) -> Sequence[bytes] | None:
        session = self._talk.session
        null_id = session.unreadable_id_is_null
        messages = session.outgoing()
        self._talk.release()
        messages = messages or session.outgoing()  # if all that there was has been cancelled
        texts = [encode(message, null_id=null_id) for message, _ in messages]
        pieces = self._framing.frame(texts) if texts and not self._framing.ended else ()
        if self._control:
            pieces, self._control = (*pieces, self._control), b""
        if not pieces:
            return None
        if self._tap is not None:
            self._tap("out", b"".join(pieces))
        return pieces

    def _at_once(self, pieces: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview] | None:
        assert self._send_now is not None
        for at, piece in enumerate(pieces):
            taken = self._send_now(piece)
            if taken < len(piece):
                return (memoryview(piece)[taken:], *pieces[at + 1 :])
        return None

    async def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self._send_now is not None:  # what can do that is no network, and may take as long as it likes
            for piece in pieces:
                await self._stream.send_all(piece)
            return
        for data in pieces:
            for start in range(0, len(data), _PIECE):
                with trio.CancelScope(deadline=trio.current_time() + self._patience) as self._piece:
                    await self._stream.send_all(data[start : start + _PIECE])
                if self._piece.cancelled_caught:
                    self._why = f"the other side took nothing for {self._patience:g} seconds (Limits.write_seconds)"
                    raise trio.BrokenResourceError(self._why)

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
            heard = self._heard
            await trio.sleep_until(heard + heartbeat)
            if self._heard == heard:
                self._framing.ping()
                self._control += self._framing.pending()
                self.wire.wake()
                await trio.sleep(heartbeat)
            if self._heard == heard:
                self._gone = True
                self._why = f"the other side was silent for {2 * heartbeat:g} seconds"
                self._open.cancel(reason=self._why)
                return
