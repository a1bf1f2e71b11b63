"""Event streams (`text/event-stream`) to and from bytes.

The format is the WHATWG one.  MCP defines only its use: the data of one event is one JSON-RPC message, ids make a
stream resumable, and a "priming" event with an id and empty data gives the client an id to resume from before the first
message.  `server_rules` and `response` decide when a stream ends, and `event_log` assigns the ids.

Data is bytes in both directions.  The reader looks only at line ends and field names, all of them ASCII, and returns
the rest unchanged.  So invalid UTF-8 gets the same answer as on every other transport: that of `messages`.  (Replacing
it, as a browser does, would silently damage a message.)

An id is narrower here than in the format: its only use is the header Last-Event-ID, so it must fit into a header.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import repeat

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.messages import record

__all__ = [
    "KEEP_ALIVE", "EventReader", "Oversized", "SseEvent", "encode_event", "encode_message", "encode_messages",
    "priming_event",
]  # fmt: skip

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: every reader ignores it, and it stops proxies from closing a quiet stream."""

_NAME = b"data: "
# As h11 and other HTTP writers would send it, and as proxies pass it on: printable ASCII without spaces around it, up
# to 1 KiB.
_ID = re.compile(r"(?! )[ -~]{0,1024}(?<! )")


@record
class SseEvent:
    """One event.  `id` is the event's own; None leaves the reader's last id unchanged."""

    data: bytes
    event: str = "message"
    id: str | None = None
    retry: int | None = None  # milliseconds to wait before each later reconnection


@record
class Oversized:
    """An event whose data is longer than `limit` bytes.  It was skipped; the stream continues with the next event."""

    limit: int


def encode_event(event: SseEvent) -> bytes:
    """Encode an event.

    Each line of the data, whatever its line end, becomes one `data` line; a reader joins them with LF.
    """
    if not event.event or "\r" in event.event or "\n" in event.event:
        raise UsageError(f"an event name must be one line and not empty; got {shown(event.event)}")
    # The name is written even if it is the default: some clients wait for a literal "message".
    lines = [b"event: " + event.event.encode()]
    if event.id is not None:
        lines.append(b"id: %b" % _as_sent((event.id,))[0])
    if event.retry is not None:
        if event.retry < 0:
            raise UsageError(f"retry must be a number of milliseconds, at least 0; got {event.retry}")
        lines.append(b"retry: %d" % event.retry)
    data = event.data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    lines += [_NAME + line for line in data.split(b"\n")]
    return b"\n".join(lines) + b"\n\n"


def _as_sent(ids: Sequence[str]) -> list[bytes]:
    for id in ids:
        if _ID.fullmatch(id) is None:
            raise UsageError(f"an event id must be at most 1024 printable ASCII characters; got {shown(id)}")
    return list(map(str.encode, ids))


def encode_message(text: bytes, id: str | None = None) -> bytes:
    """Encode one JSON text as an event.

    U+0085, U+2028 and U+2029 are written as escapes.  JSON strings may contain them, and some clients (httpx-sse up to
    0.4.0) take them for line ends and lose the message.  In UTF-8 these byte sequences cannot be part of another
    character, and in JSON these characters can only be inside a string.
    """
    if not text.isascii():
        text = text.replace(b"\xc2\x85", rb"\u0085")
        text = text.replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029")
    if b"\n" in text or b"\r" in text:
        return encode_event(SseEvent(text, id=id))
    if id is None:  # the same bytes as `encode_event`
        return b"event: message\ndata: %b\n\n" % text
    return b"event: message\nid: %b\ndata: %b\n\n" % (*_as_sent((id,)), text)


def encode_messages(texts: Sequence[bytes], ids: Sequence[str] | None = None) -> bytes:
    """Encode JSON texts as events, each with its id if `ids` is given.  Same bytes as `encode_message`, but faster."""
    if ids is None:
        lines, events = 3, b"event: message\ndata: %b\n\n" % b"\n\nevent: message\ndata: ".join(texts)
    else:
        named = zip(_as_sent(ids), texts, strict=True)
        lines, events = 4, b"".join([b"event: message\nid: %b\ndata: %b\n\n" % each for each in named])
    if events.isascii() and events.count(b"\n") == lines * len(texts) and b"\r" not in events:
        return events  # true for nearly all batches, and cheap to test
    return b"".join(map(encode_message, texts, repeat(None) if ids is None else ids))


def priming_event(id: str, retry: int | None = None) -> bytes:
    """http-46: "an event consisting of an event ID and an empty data field".  The client can resume from it.

    With `retry`, a server also sends it before it closes a connection early.
    """
    return encode_message(b"", id) if retry is None else encode_event(SseEvent(b"", id=id, retry=retry))


class EventReader:
    """Read events from bytes, however the bytes are split.

    An event without data lines is not returned, but its id and `retry` take effect.  An event with an empty data line
    (the priming event) is returned as an `SseEvent` with empty data, and is not a message.  Bytes after the last blank
    line are an incomplete event when the stream ends; dropping the reader drops them.

    `limit` bounds the data of one event in bytes, and also one line, one id and one event name.  A longer event is
    skipped and reported as `Oversized`, and the stream continues, because the next event can be found.  The id of a
    skipped event counts; without it, resuming would request the same event again for ever.  Comments may have any
    length.

    An id that does not fit into Last-Event-ID (characters outside 0x20-0x7E, spaces around it, more than 1 KiB) is
    ignored.  HTTP could not send it, so the stream resumes from the id before, and repeats some messages.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.last_event_id = ""  # of the last complete event with an id; "" before the first
        self.retry: int | None = None  # the latest value, in milliseconds
        self.comments = 0  # comments begun so far
        self._bom = b"\xef\xbb\xbf"  # until the end of the first line
        self._after_cr = False
        self._line = bytearray()  # the received part of the current line
        self._dropping = False  # the rest of the current line is ignored
        self._clear()

    def _clear(self) -> None:
        self._data = bytearray()  # the data lines of the current event, each with its LF
        self._event = ""
        self._id: str | None = None
        self._retry: int | None = None
        self._oversized = False

    def feed(self, data: bytes) -> list[SseEvent | Oversized]:
        found: list[SseEvent | Oversized] = []
        if not data:
            return found
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r")
        # bytes.splitlines() splits only at CR, LF and CRLF; str.splitlines() would split at other characters too.
        for piece in data.splitlines(keepends=True):
            part = piece.rstrip(b"\r\n")
            if not self._dropping:
                self._line += part
                comment = self._line.startswith(b":")  # http-112: comments are ignored
                self.comments += comment
                oversized = not comment and len(self._data) + len(self._line) > self._limit + len(_NAME)
                if oversized:
                    self._data.clear()
                    if not self._oversized:
                        found.append(Oversized(self._limit))
                    self._oversized = True
                if comment or oversized:
                    self._dropping = True
                    self._line.clear()
            if len(part) < len(piece):
                self._end_line(found)
        return found

    def _end_line(self, found: list[SseEvent | Oversized]) -> None:
        line, self._line = bytes(self._line), bytearray()
        dropped, self._dropping = self._dropping, False
        line, self._bom = line.removeprefix(self._bom), b""
        if dropped:
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                if not self._oversized:
                    self._data += value + b"\n"
            case b"event":
                self._event = value.decode(errors="replace")
            case b"id":
                if _ID.fullmatch(id := value.decode("latin-1")):
                    self._id = id
            case b"retry":
                # No real time has more than fifteen digits, and int() raises for thousands of them.
                if value.isdigit() and len(value) <= 15:
                    self.retry = self._retry = int(value)
            case b"" if not line:  # the end of the event
                # The id takes effect here, not at its own line: an event that was cut off must be sent again.
                if self._id is not None:
                    self.last_event_id = self._id
                if self._data and not self._oversized:
                    self._data.pop()
                    found.append(SseEvent(bytes(self._data), self._event or "message", self._id, self._retry))
                self._clear()
            case _:
                pass  # "The field is ignored."
