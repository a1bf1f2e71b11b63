"""One session over one byte stream: read, feed, act; wait, drain, write.

One task reads; who writes is the business of `outbox`.  How messages lie in the bytes is that of a `Framing`: lines
here, WebSocket messages elsewhere.

What waits for the wire is bounded: those who report progress or log wait for room, a call that has ended keeps its
place among the running ones until there is room again, and when the client neither reads nor stops sending, it is not
read any more either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import trio

from trio_mcp.conversation import UNFINISHED, Conversation
from trio_mcp.core.jsonrpc import Limits, LineFramer, Message, decode, encode
from trio_mcp.core.terms import NOTHING
from trio_mcp.groups import open_nursery
from trio_mcp.outbox import CLOSING, GONE, Outbox
from trio_mcp.running import Run

if TYPE_CHECKING:
    from trio_mcp.server import Server

__all__ = ["Framing", "Tap", "converse", "serve_stream"]

Tap: TypeAlias = Callable[[str, bytes], object]
"""Called with "in" or "out" and the bytes that were read or are about to be written."""

_CONTROL = 127  # bytes that count as one message when a framing has something to say: a pong has no more


class Framing(Protocol):
    """How messages lie in the bytes of a stream; of one connection, and without I/O."""

    @property
    def ended(self) -> bool:
        """The other side said that it ends, or broke the framing: nothing is read, and no message sent, any more."""

    @property
    def why(self) -> str:
        """What is to be said of the end, to whoever waits for an answer."""

    def feed(self, data: bytes) -> Iterable[Message]:
        """The messages that are whole now; also takes in control frames."""

    def frame(self, texts: Sequence[bytes]) -> bytes:
        """These messages, each as JSON, as they go out."""

    def pending(self) -> bytes:
        """What the framing itself has to say now, such as a pong; once."""

    def ping(self) -> None:
        """Ask the other side for a sign of life; the question is `pending`.  Only called where a heartbeat is."""

    def farewell(self) -> bytes:
        """What is said before an end of ours, if anything is; then the other side may say that it ends too."""


class _Lines:
    """One message a line."""

    ended = False
    why = "the connection has ended"

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._framer = LineFramer(limits.message_bytes)

    def feed(self, data: bytes) -> Iterable[Message]:
        for line in self._framer.feed(data):
            yield decode(line, self._limits) if isinstance(line, bytes) else line

    def frame(self, texts: Sequence[bytes]) -> bytes:
        return b"\n".join((*texts, b""))

    def pending(self) -> bytes:
        return b""

    def ping(self) -> None:
        """There is none."""

    def farewell(self) -> bytes:
        return b""


async def serve_stream(server: Server, stream: trio.abc.Stream, *, tap: Tap | None = None) -> None:
    """Serve one client over a byte stream, one message a line, until it ends; the stream is closed then.

    Any stream will do: a socket, a pipe, `trio.testing.memory_stream_pair`.  Inside `async with server.running()` all
    connections share that run; otherwise this one has a run of its own, with its own lifespan.

    Returns when the client, or the run that it shares, has gone and all its handlers have ended; never raises because
    of it.  What the lifespan, `tap` or `stream` raise otherwise leaves it unchanged.  May be cancelled at any time:
    handlers are cancelled, and a line that was begun is finished.
    """
    try:
        async with server.joined() as run:
            await converse(run, stream, _Lines(run.limits), tap=tap)
    finally:
        await _close(stream, trio.current_time() + CLOSING)  # a server that could not begin has not closed it


async def converse(
    run: Run,
    stream: trio.abc.Stream,
    framing: Framing,
    *,
    tap: Tap | None = None,
    headers: Mapping[str, str] = NOTHING,
    principal: Any = None,
    heartbeat: float | None = None,
) -> None:
    """As `serve_stream`, in a run that there is, with any framing; the stream is closed at the end.

    `headers` and `principal` are those of every message.  After `heartbeat` seconds without a byte the client is asked
    for a sign of life, and after as many more it is given up.
    """
    await _Driver(run, stream, framing, tap, headers, principal).serve(heartbeat)


async def _close(stream: trio.abc.Stream, deadline: float) -> None:
    # Streams do close when they are cancelled at it, only less politely.
    with suppress(*GONE), trio.CancelScope(shield=True, deadline=deadline):
        await stream.aclose()


class _StreamWire(Outbox[bytes]):
    """Everything goes on a stream of its own."""

    answers_only = False

    def hang_up(self, retry: float) -> bool:
        return False


class _Driver:
    """One connection, from its first byte to its last."""

    clients = 1

    def __init__(
        self,
        run: Run,
        stream: trio.abc.Stream,
        framing: Framing,
        tap: Tap | None,
        headers: Mapping[str, str],
        principal: Any,
    ) -> None:
        self._run = run
        self._stream = stream
        self._framing = framing
        self._tap = tap
        self._headers = headers
        self._principal = principal
        self._open = trio.CancelScope()  # cancelled when the client or the run has gone
        limit, gone = run.limits.outgoing, self._open.cancel
        self._outbox = _StreamWire(stream.send_all, self._take, self._queued, limit, gone, spawn=run.nursery)
        self._conversation = Conversation(run, self._outbox)
        self._control = b""  # what the framing has to say
        self._heard = trio.current_time()
        self._gone = False  # the client has, so there is nobody to say farewell to
        self._over = trio.Event()

    async def serve(self, heartbeat: float | None) -> None:
        self._run.connections.add(self)
        try:
            with self._open:
                async with open_nursery() as nursery:
                    if self._run.draining:
                        nursery.start_soon(self._drained)
                    if heartbeat is not None:
                        nursery.start_soon(self._watch, heartbeat)
                    try:
                        await self._read()
                    finally:
                        # What was not begun is dropped: who closed the stream reads nothing more, and some clients
                        # stumble over it.
                        self._conversation.lost(self._framing.why)
                        self._outbox.finish()
        finally:
            with trio.CancelScope(shield=True):
                await self._outbox.idle()  # a handler may be the one that writes
            self._outbox.close()  # what is said from here on is said by this task, and no writer beside it
            try:
                try:
                    await self._part()
                finally:
                    await _close(self._stream, self._outbox.deadline)
            finally:
                with trio.CancelScope(shield=True):
                    await self._conversation.quiet()
                self._run.connections.discard(self)
                self._over.set()
        if self._outbox.failure is not None:
            raise self._outbox.failure

    async def _read(self) -> None:
        # Beyond this only what answers the client's own pings and mistakes can pile up, so it is the client's doing.
        most = self._run.limits.calls + self._run.limits.outgoing
        while not self._framing.ended:
            try:
                data = bytes(await self._stream.receive_some())
            except GONE:
                data = b""
            if not data:
                self._gone = True
                return
            self._heard = trio.current_time()
            if self._tap is not None:
                self._tap("in", data)
            for message in self._framing.feed(data):
                self._conversation.hear(message, self._heard, headers=self._headers, principal=self._principal)
                if self._queued() > most:
                    await self._outbox.room(most)
            self._control += self._framing.pending()
            if self._queued():
                self._outbox.wake()
                await self._outbox.room(most)  # also so that it is on its way before an end of the stream is seen

    def _queued(self) -> int:
        return self._conversation.session.queued + -(-len(self._control) // _CONTROL)

    def _take(self) -> bytes | None:
        session = self._conversation.session
        null_id = session.unreadable_id_is_null
        messages = session.outgoing()
        self._conversation.release()
        messages = messages or session.outgoing()  # if all that there was has been cancelled
        texts = [encode(message, null_id=null_id) for message, _ in messages]
        data = self._framing.frame(texts) if texts and not self._framing.ended else b""
        data, self._control = data + self._control, b""
        if not data:
            return None
        if self._tap is not None:
            self._tap("out", data)
        return data

    async def _part(self) -> None:
        """Say farewell, where the framing has one, and give the other side a moment to say it too."""
        if self._gone or self._outbox.broken:
            return  # a framing that was asked for its farewell would believe that it has been said
        data = self._control + self._framing.farewell()
        if not data:
            return
        if self._tap is not None:
            self._tap("out", data)
        with suppress(*GONE), trio.CancelScope(shield=True, deadline=self._outbox.deadline):
            await self._stream.send_all(data)
            while not self._framing.ended and (received := bytes(await self._stream.receive_some())):
                for _ in self._framing.feed(received):
                    pass  # it comes too late

    async def _watch(self, heartbeat: float) -> None:
        """Give the client up when it is silent for too long, or does not read what would have to be sent first."""
        while True:
            heard = self._heard
            await trio.sleep_until(heard + heartbeat)
            if self._heard == heard:
                self._framing.ping()
                self._control += self._framing.pending()
                self._outbox.wake()
                await trio.sleep(heartbeat)
            if self._heard == heard:
                self._gone = True
                self._open.cancel(reason="the client was silent for too long")
                return

    # As a connection of its run.

    async def drain(self) -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(self._drained)
            await self._over.wait()

    async def _drained(self) -> None:
        await self._conversation.drain()
        await self._outbox.empty()
        self._open.cancel()

    def dismiss(self) -> None:
        self._conversation.dismiss(UNFINISHED)

    def stop(self) -> None:
        self._conversation.stop()
