"""`Connection`, the main interface of the core: bytes in, events out, bytes out.

A `Connection` is one end of a byte stream: standard input and output, a pipe, a TCP connection.  It joins three parts
of the core: `LineFramer` splits the bytes into lines, `decode` and `encode` convert between lines and messages, and a
session checks each message and keeps the state.  The program does the rest: it reads, writes, runs handlers and has
the clock.  The loop is the same on every event loop, and with threads:

    data = read()                             # b"" is the end of input
    connection.receive_data(data)
    for event in connection.events():
        handle(event)                         # start a handler, stop a handler, take an answer
    write(connection.data_to_send())

The state is the session, the incomplete line, and the events that were not read yet.  These rules hold:

- `receive_data` never raises for the bytes of the peer.  Bytes that are not a message get an error reply or a
  `PeerMistake`, and the connection goes on.
- All state changes before `receive_data` returns.  The events are a report: each event is returned once, and an event
  that is never read has no effect.
- The same bytes give the same events and the same replies, in any chunks.
- Only the program sends.  After a call that may queue a message, write `data_to_send()`.
- The queues have no limit of their own.  A program that handles its events and writes its bytes before it reads again
  holds little more than one read.

HTTP is not one byte stream: each POST carries one message, and each response is a stream of its own.  For HTTP,
`core.http` checks the requests, and the messages go to a session directly.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Generic, TypeVar

from trio_mcp.core.errors import RequestError, UsageError
from trio_mcp.core.framing import LineFramer
from trio_mcp.core.messages import Event, Id, InvalidMessage, JsonObject, decode, encode
from trio_mcp.core.requests import LinkKind
from trio_mcp.core.session import SessionProtocol

__all__ = ["Connection"]

S = TypeVar("S", bound=SessionProtocol)


class Connection(Generic[S]):
    """One end of a byte stream, for both roles and all revisions.

    `session` is a new `ServerProtocol` or `ClientProtocol`.  A server waits for its client.  A client starts with
    ``connection.session.open()``; the event `Opened` or `OpeningFailed` ends the opening.  The limits are those of the
    session.  Raises `UsageError` if the session is for HTTP.

    Threads that share a connection need one lock.  Hold it around each call together with `data_to_send` and the write.
    """

    def __init__(self, session: S) -> None:
        if session.link is not LinkKind.DUPLEX:
            raise UsageError("a Connection needs a session with link=LinkKind.DUPLEX: it carries one byte stream")
        self.session = session
        self._framer = LineFramer(session.limits.message_bytes)
        self._events: list[Event] = []

    # Input.

    def receive_data(self, data: bytes | bytearray | memoryview, now: float = -inf) -> None:
        """Process bytes of the peer, in chunks of any size.  Empty `data` is the end of input, as in `receive_eof`.

        `now` is the time of a monotonic clock.  Only a program that sets deadlines needs it; see `tick`.  The bytes are
        ignored if the connection is lost or its opening has failed.  Raises `UsageError` for bytes after the end of
        input.
        """
        if self.session.closed:
            return
        if not data:
            self.receive_eof(now)
            return
        if self.session.half_closed:
            raise UsageError(f"the input has ended, and {len(data)} bytes came after its end")
        self._receive(self._framer.feed(bytes(data)), now)

    def receive_eof(self, now: float = -inf) -> None:
        """Report that the peer has closed its half of the stream.  The peer may still read.

        A last line without a newline counts as a line.  Our requests end with the event `ConnectionLost`, and new ones
        raise `SessionClosed`.  Handlers go on, and their answers are sent.  Call `connection_lost` after the last
        handler has ended, or when there is no more time.  A second call has no effect.
        """
        self._receive(self._framer.close(), now)
        self._events += self.session.input_ended()

    def connection_lost(self, why: str = "the connection was lost") -> None:
        """Report that the stream is lost in both directions: a write has failed, or the program has closed the stream.

        Our open requests end with `ConnectionLost`, each running handler gets `RequestCancelled`, and no more messages
        are sent.  A second call has no effect.
        """
        self._events += self.session.connection_lost(why=why)

    def tick(self, now: float) -> None:
        """End our requests whose deadline has passed: each gets the event `TimedOut`."""
        self._events += self.session.tick(now)

    def next_deadline(self) -> float | None:
        """Return the time for the next `tick`, or None if there is no deadline."""
        return self.session.next_deadline()

    def _receive(self, lines: Iterable[bytes | InvalidMessage], now: float) -> None:
        for line in lines:
            message = decode(line, self.session.limits) if isinstance(line, bytes) else line
            self._events += self.session.receive(message, now)

    # Output.

    def events(self) -> list[Event]:
        """Return the events since the last call, in order.

        `Call` is a request to serve: end it with `answer` or `refuse`.  `RequestCancelled` means that the handler of a
        `Call` must stop.  `Notice` is a notification.  An `Outcome` (`Answered`, `Refused`, `TimedOut`,
        `ConnectionLost`, ...) ends a request of ours.  The other events are for information and need no action.
        """
        events, self._events = self._events, []
        return events

    def data_to_send(self) -> bytes:
        """Return the bytes to write now.  Empty bytes mean that there is no message to send."""
        return b"\n".join([*(encode(message) for message, _ in self.session.outgoing()), b""])

    # Messages to send.  Each method queues one; `data_to_send` returns its bytes.

    def answer(self, id: Id, result: JsonObject) -> bool:
        """Answer a `Call` with a result.

        False: the answer is not sent, because the request was cancelled or the connection is lost.  Call `answer` or
        `refuse` for a cancelled request too, after its handler has ended: this frees the id.  Raises `UsageError` if
        the result cannot be written as JSON; the request then still waits.
        """
        return self.session.answer(id, result)

    def refuse(self, id: Id, error: RequestError) -> bool:
        """Answer a `Call` with an error.  Returns and raises as `answer`."""
        return self.session.refuse(id, error)

    def progress(self, id: Id, progress: float, total: float | None = None, message: str | None = None) -> bool:
        """Report the progress of a `Call`.  False: the peer did not ask for progress, or the request has ended."""
        return self.session.progress(id, progress, total, message)

    def request(
        self,
        method: str,
        params: JsonObject | None = None,
        *,
        deadline: float | None = None,
        progress: bool = False,
        about: Id | None = None,
    ) -> int:
        """Queue a request and return its id.  One `Outcome` with this id will follow, unless `cancel` is called first.

        `deadline` is a time of the clock that `tick` gets.  `progress` asks for `ProgressReported` events.  `about` is
        the id of the `Call` whose handler needs the answer.  Raises `SessionClosed` after the end of input, and
        `UsageError` for a request that the session does not allow.
        """
        return self.session.request(method, params, deadline=deadline, progress=progress, about=about)

    def notify(self, method: str, params: JsonObject | None = None, *, about: Id | None = None) -> bool:
        """Queue a notification.  `about` is the id of the `Call` that it belongs to, if there is one.

        False: it is not sent, because the connection is lost, that request has ended, or the handshake has not ended.
        Raises `UsageError` for a notification that the session does not allow.
        """
        return self.session.notify(method, params, about=about)

    def cancel(self, id: int, reason: str = "") -> bool:
        """Cancel a request of ours.  A late answer is dropped.  False: the request had ended already."""
        return self.session.cancel(id, reason)
