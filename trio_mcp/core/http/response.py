"""One HTTP response of a server: messages in, parts of the response out.

`server_rules` judges a request.  For the verdicts `Serve` and `OpenStream` the driver makes a `ResponseEncoder`.  It
decides how the messages travel: as one JSON body, or as an event stream.

| | undecided | a stream | JSON only |
|---|---|---|---|
| all requests are answered | one JSON body; the end | their events; the end | one JSON body; the end |
| another message comes first | becomes a stream | an event | is refused |
| all requests were cancelled | 202; the end | the end | 202; the end |
| `keep_alive` | becomes a stream; a comment | a comment | nothing |

A response begins undecided if the client accepts both kinds.  The driver does the rest, in this order:

    response = ResponseEncoder(verdict, session)
    events = session.receive(verdict.message, now, about=response)   # the label of all that belongs to this response
    for message, label in session.outgoing():                        # again after each event of the program
        label.send(message)
    part = response.data_to_send()                                   # again after each `send`

A message with the label None belongs to no request.  It goes to the response of an `OpenStream`.  The events have no
ids, so a client cannot resume a stream; a server that offers this needs an `event_log` too.
"""

from __future__ import annotations

from typing import NamedTuple

from trio_mcp.core.http.fields import Fields, empty, reply_headers
from trio_mcp.core.http.server_rules import Answer, OpenStream, Serve, status_for
from trio_mcp.core.http.sse import KEEP_ALIVE, encode_messages
from trio_mcp.core.messages import Batch, Error, Notification, Request, Response, encode
from trio_mcp.core.session import ServerProtocol

__all__ = ["EncodedPart", "ResponseEncoder"]

_ANSWERS = (Response, Error, Batch)


class EncodedPart(NamedTuple):
    """Bytes to write now.  A JSON body has its Content-Length; for a stream the driver adds chunks."""

    head: tuple[int, Fields] | None
    """Status and header fields, in the first part only."""
    data: bytes
    """The next bytes of the body."""
    more: bool
    """False: the response ends with this part."""


class ResponseEncoder:
    """The response to one POST, or to one GET that opens a stream; see the head of this file.

    A POST ends with the answer to its last request, a GET with its session.
    """

    def __init__(self, verdict: Serve | OpenStream, session: ServerProtocol) -> None:
        self.session_id: str | None = None
        """Set this to the id of the session that `initialize` has opened, before the first `data_to_send`."""
        self._cors = verdict.cors
        self._revision = verdict.revision
        self._session = session
        answer = verdict.answer if isinstance(verdict, Serve) else Answer.STREAM
        self._ids = verdict.ids if isinstance(verdict, Serve) else ()
        self._json_only = answer is Answer.JSON
        self._streams = answer is Answer.STREAM
        self._queue: list[Request | Notification | Response | Error | Batch] = []
        self._silent = self._begun = self._ended = False

    def send(self, message: Request | Notification | Response | Error | Batch) -> bool:
        """Queue a message with the label of this response.

        False: the response cannot carry it, because it has ended or is a JSON body.  A request of ours has no answer
        then: tell the session by `fail`.
        """
        if self._ended or (self._json_only and not isinstance(message, _ANSWERS)):
            return False
        self._queue.append(message)
        return True

    def keep_alive(self) -> None:
        """The response was silent for long: send a comment, so that no proxy closes the connection."""
        self._silent = not self._json_only

    def connection_lost(self) -> None:
        """The client has disconnected: drop the queue, and take no more messages."""
        self._queue.clear()
        self._ended = True

    def data_to_send(self) -> EncodedPart | None:
        """Return the next part to write, or None if there is nothing to write now."""
        if self._ended:
            return None
        done = self._session.closed if not self._ids else self not in map(self._session.label_of, self._ids)
        if done and self._ids and not (self._queue and isinstance(self._queue[-1], _ANSWERS)):
            self._queue.clear()  # cancel-18: nothing more is sent for a cancelled request
        if done and not self._begun and (whole := self._whole()) is not None:
            self._ended = True
            return whole
        self._streams = self._streams or self._silent or bool(self._queue)
        if not self._streams:
            return None
        head = None if self._begun else (200, reply_headers(self._cors, stream=True, session=self.session_id))
        data = encode_messages([encode(message) for message in self._queue]) if self._queue else b""
        if self._silent and not data:
            data = KEEP_ALIVE
        self._queue.clear()
        self._begun, self._silent, self._ended = True, False, done
        return EncodedPart(head, data, not done) if head is not None or data or done else None

    def _whole(self) -> EncodedPart | None:
        """The response as one JSON body, or without a body; None if it must be a stream."""
        if not self._queue:
            reply = empty(202, self._cors)
            return None if self._streams else EncodedPart((reply.status, reply.headers), b"", False)
        message, *rest = self._queue
        status = 200
        if isinstance(message, Error) and self._revision is not None:
            status = status_for(self._revision, message.code)
        # A client that accepts a stream only still gets an error with the status of its code, which a stream has not.
        if rest or (self._streams and status == 200):
            return None
        body = encode(message)
        fields = reply_headers(self._cors, stream=False, session=self.session_id)
        return EncodedPart((status, (*fields, ("Content-Length", str(len(body))))), body, False)
