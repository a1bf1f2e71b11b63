"""The front door of the core: bytes in, events out, bytes out.

A `Connection` is one end of a byte stream: standard input and output, a pipe, a TCP connection.  It joins three parts
of the core: `LineFramer` cuts the bytes into lines, `decode` and `encode` turn a line into a message and back, and a
session gives each message its meaning.  The program does the rest: it reads, writes, runs handlers and has the clock.
The loop is the same on every event loop, with threads and without either:

    data = read()                             # b"" is the end of input
    connection.receive_data(data)
    for event in connection.events():
        handle(event)                         # start a handler, stop a handler, take an answer
    write(connection.data_to_send())

The state is the session, the line that is not complete yet, and the events that wait.  These rules hold:

- `receive_data` never raises for the bytes of the peer.  Bytes that are no message get an error reply or a
  `PeerMistake`, and the connection goes on.
- All state changes before `receive_data` returns.  The events are a report: each is handed out once, and an event that
  is never read changes nothing.
- The same bytes give the same events and the same replies, in whatever chunks they come.
- Nothing is sent without the program.  After a call that may queue a message, write `data_to_send()`.
- The queues have no limit of their own.  A program that handles its events and writes its bytes before it reads again
  holds little more than one read.

HTTP is not one byte stream: each POST carries one message, and each response is a stream of its own.  `core.http`
judges the request there, and the message goes to a session.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Generic, TypeVar

from trio_mcp.core.errors import RequestError, UsageError
from trio_mcp.core.framing import LineFramer
from trio_mcp.core.jsonrpc import Event, Id, InvalidMessage, JsonObject, decode, encode
from trio_mcp.core.session import SessionProtocol
from trio_mcp.core.state import LinkKind

__all__ = ["Connection"]

S = TypeVar("S", bound=SessionProtocol)


class Connection(Generic[S]):
    """One end of a byte stream, for both roles and all revisions; see the head of this file.

    `session` is a new `ServerProtocol` or `ClientProtocol`.  A server waits for its client.  A client begins with
    ``connection.session.open()``; the outcome is the event `Opened` or `OpeningFailed`.  The limits are those of the
    session.  Raises `UsageError` for a session of HTTP, which is not one stream.

    Threads share a connection under one lock, held around each call together with `data_to_send` and the write.
    """

    def __init__(self, session: S) -> None:
        if session.link is not LinkKind.DUPLEX:
            raise UsageError("a Connection needs a session with link=LinkKind.DUPLEX: it carries one byte stream")
        self.session = session
        self._framer = LineFramer(session.limits.message_bytes)
        self._events: list[Event] = []

    # Input.

    def receive_data(self, data: bytes | bytearray | memoryview, now: float = -inf) -> None:
        """Take bytes of the peer, in chunks of any size.  No bytes are the end of input, as with `receive_eof`.

        `now` is the time of a monotonic clock.  Only a program that sets deadlines needs it; see `tick`.  A connection
        that is lost, or whose opening has failed, ignores the bytes.  Raises `UsageError` for bytes after the
        end of input.
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
        """The peer has closed its half of the stream.  The peer may still read.

        A last line without a newline counts.  Our requests end with the event `ConnectionLost`, and new ones raise
        `SessionClosed`.  Handlers go on, and their answers are sent.  Call `connection_lost` when they have ended, or
        when there is no more time for them.  A second call changes nothing.
        """
        self._receive(self._framer.close(), now)
        self._events += self.session.input_ended()

    def connection_lost(self, why: str = "the connection was lost") -> None:
        """The stream is gone in both directions: a write has failed, or the program has closed the stream.

        Every request of ours that has no outcome ends with `ConnectionLost`, every handler with `RequestCancelled`, and
        nothing is sent any more.  A second call changes nothing.
        """
        self._events += self.session.connection_lost(why=why)

    def tick(self, now: float) -> None:
        """End our requests that have passed their deadline: each gets the event `TimedOut`."""
        self._events += self.session.tick(now)

    def next_deadline(self) -> float | None:
        """The time for the next `tick`, or None if no deadline is set."""
        return self.session.next_deadline()

    def _receive(self, lines: Iterable[bytes | InvalidMessage], now: float) -> None:
        for line in lines:
            message = decode(line, self.session.limits) if isinstance(line, bytes) else line
            self._events += self.session.receive(message, now)

    # Output.

    def events(self) -> list[Event]:
        """Return the events since the last call, in order.

        `Call` is a request to serve: end it with `answer` or `refuse`.  `RequestCancelled` tells that its handler must
        stop.  `Notice` is a notification.  An `Outcome` (`Answered`, `Refused`, `TimedOut`, `ConnectionLost`, ...) ends
        a request of ours.  The other events inform, and need no action.
        """
        events, self._events = self._events, []
        return events

    def data_to_send(self) -> bytes:
        """Return the bytes to write now, in order.  No bytes: nothing is to be written."""
        return b"\n".join([*(encode(message) for message, _ in self.session.outgoing()), b""])

    # Messages to send.  Each method queues one; `data_to_send` returns its bytes.

    def answer(self, id: Id, result: JsonObject) -> bool:
        """Answer a `Call` with a result.  False: the request was cancelled or the connection is lost; nothing is sent.

        The handler of a cancelled request calls `answer` or `refuse` too, when it has ended: that frees the id.  Raises
        `UsageError` for a result that JSON cannot carry; the request still waits then.
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
        """Send a request and return its id.  One `Outcome` with this id will follow, unless `cancel` comes first.

        `deadline` is a time of the clock that `tick` gets.  `progress` asks for `ProgressReported` events.  `about` is
        the id of the `Call` that needs the answer.  Raises `SessionClosed` after the end of input, and
        `UsageError` for a request that the session does not allow.
        """
        return self.session.request(method, params, deadline=deadline, progress=progress, about=about)

    def notify(self, method: str, params: JsonObject | None = None, *, about: Id | None = None) -> bool:
        """Send a notification; `about` is the id of the `Call` that it belongs to, if any.

        False: nothing is sent, because the connection or that request has ended, or the handshake has not.  Raises
        `UsageError` for a notification that the session does not allow.
        """
        return self.session.notify(method, params, about=about)

    def cancel(self, id: int, reason: str = "") -> bool:
        """Cancel a request of ours; a late answer is dropped.  False: it had its outcome already."""
        return self.session.cancel(id, reason)
