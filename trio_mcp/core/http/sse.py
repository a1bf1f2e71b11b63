"""Event streams (`text/event-stream`) to and from bytes.

The format is the WHATWG one; what MCP adds is only how it is used: one JSON-RPC message is the data of one event, ids
make a stream resumable, and an event with an id and empty data ("priming") names a place to resume from before there
is a message.  Which revision may use ids, and when a stream ends, is for `http` and `replay` to say.

Data is bytes in both directions.  The reader looks at line ends and field names, all of them ASCII, and hands on the
rest as it came, so bytes that are no UTF-8 get the answer they get on every other wire: the one of `jsonrpc`.
(Replacing them, as a browser does, would hand a silently damaged message to its reader.)

An id is narrower here than in the format: it has to fit into a header, Last-Event-ID, which is all it is for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import repeat

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.records import record

__all__ = [
    "KEEP_ALIVE", "EventReader", "Oversized", "SseEvent", "encode_event", "encode_message", "encode_messages",
    "priming_event",
]  # fmt: skip

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: every reader ignores it, and it keeps proxies from taking a quiet stream for a dead one."""

_BOM = b"\xef\xbb\xbf"
_NAME = b"data: "
# What h11 and its like would send, and what proxies let pass: printable ASCII without spaces around it, up to 1 KiB.
_ID = re.compile(r"(?! )[ -~]{0,1024}(?<! )")


@record
class SseEvent:
    """One event.  `id` is the event's own: None when it has none, which leaves the reader's last id as it was."""

    data: bytes
    event: str = "message"
    id: str | None = None
    retry: int | None = None  # milliseconds to wait before reconnecting, from here on


@record
class Oversized:
    """An event whose data is longer than `limit` bytes.  It was skipped; the stream goes on with the next one."""

    limit: int


def encode_event(event: SseEvent) -> bytes:
    """The event as it goes on the wire.

    Line ends of any kind in the data become separate `data` lines, which a reader joins with LF.
    """
    if not event.event or "\r" in event.event or "\n" in event.event:
        raise UsageError(f"an event name must be one line and not empty; got {shown(event.event)}")
    # The name is written even where it is the default: some clients wait for a literal "message".
    lines = [b"event: " + event.event.encode()]
    if event.id is not None:
        lines.append(b"id: %b" % _as_sent((event.id,))[0])
    if event.retry is not None:
        if event.retry < 0:
            raise UsageError(f"retry is a number of milliseconds from 0 up; got {event.retry}")
        lines.append(b"retry: %d" % event.retry)
    data = event.data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    lines += [_NAME + line for line in data.split(b"\n")]
    return b"\n".join(lines) + b"\n\n"


def _as_sent(ids: Sequence[str]) -> list[bytes]:
    for id in ids:
        if _ID.fullmatch(id) is None:
            raise UsageError(f"an event id is at most 1024 printable ASCII characters; got {shown(id)}")
    return list(map(str.encode, ids))


def encode_message(text: bytes, id: str | None = None) -> bytes:
    """The event that carries one JSON text.

    U+0085, U+2028 and U+2029 are written as escapes: they may stand in JSON strings, and some clients (httpx-sse up to
    0.4.0) take them for line ends and lose the message.  In UTF-8 these byte sequences cannot be part of another
    character, and in JSON these characters can only be inside a string.
    """
    if not text.isascii():
        text = text.replace(b"\xc2\x85", rb"\u0085")
        text = text.replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029")
    if b"\n" in text or b"\r" in text:
        return encode_event(SseEvent(text, id=id))
    if id is None:  # as `encode_event` has it
        return b"event: message\ndata: %b\n\n" % text
    return b"event: message\nid: %b\ndata: %b\n\n" % (*_as_sent((id,)), text)


def encode_messages(texts: Sequence[bytes], ids: Sequence[str] | None = None) -> bytes:
    """The events that carry these JSON texts, of which each may have an id, as `encode_message` has them."""
    if ids is None:
        lines, events = 3, b"event: message\ndata: %b\n\n" % b"\n\nevent: message\ndata: ".join(texts)
    else:
        named = zip(_as_sent(ids), texts, strict=True)
        lines, events = 4, b"".join([b"event: message\nid: %b\ndata: %b\n\n" % each for each in named])
    if events.isascii() and events.count(b"\n") == lines * len(texts) and b"\r" not in events:
        return events  # nearly all are so, and it is seen at once
    return b"".join(map(encode_message, texts, repeat(None) if ids is None else ids))


def priming_event(id: str, retry: int | None = None) -> bytes:
    """http-46: "an event consisting of an event ID and an empty data field", to resume from before there is a message.

    With `retry` it is also what a server sends before it closes a connection early.
    """
    return encode_message(b"", id) if retry is None else encode_event(SseEvent(b"", id=id, retry=retry))


class EventReader:
    """Bytes in, events out, in any chunks.

    An event without data lines is no event, but its id and `retry` count all the same.  One with an empty data line
    (the priming event) is an `SseEvent` with empty data, and no message.  What follows the last blank line when the
    stream ends was never a whole event; drop the reader and it is gone.

    The data of one event is limited to `limit` bytes, and so is the rest of what is kept: one line, one id, one event
    name.  Beyond it the event is skipped and reported, and the stream goes on, because the next event can be found; the
    id of a skipped event counts, or resuming would ask for that same event for ever.  Comments may have any length.

    An id that no Last-Event-ID could hold (characters outside 0x20-0x7E, spaces around it, more than 1 KiB) is ignored:
    HTTP could not send it, so a stream is resumed from the id before, and brings some messages twice.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.last_event_id = ""  # of the last whole event that named one; "" as long as there is none
        self.retry: int | None = None  # the last one seen, in milliseconds
        self.comments = 0  # that have begun
        self._at_start = True
        self._after_cr = False
        self._line = bytearray()  # the current line, as far as it came
        self._dropping = False  # the rest of the current line does not matter
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
        # bytes.splitlines() knows CR, LF and CRLF and, unlike its namesake of str, nothing else.
        for piece in data.splitlines(keepends=True):
            part = piece.rstrip(b"\r\n")
            self._extend_line(part, found)
            if len(part) < len(piece):
                self._end_line(found)
        return found

    def _extend_line(self, part: bytes, found: list[SseEvent | Oversized]) -> None:
        if self._dropping:
            return
        self._line += part
        if self._line.startswith(b":"):  # http-112: comments are ignored
            self.comments += 1
            self._dropping = True
            self._line.clear()
        elif len(self._data) + len(self._line) > self._limit + len(_NAME):
            self._dropping = True
            self._line.clear()
            self._data.clear()
            if not self._oversized:
                found.append(Oversized(self._limit))
            self._oversized = True

    def _end_line(self, found: list[SseEvent | Oversized]) -> None:
        line, self._line = bytes(self._line), bytearray()
        dropped, self._dropping = self._dropping, False
        if self._at_start:
            line = line.removeprefix(_BOM)
            self._at_start = False
        if dropped:
            return
        if line:
            name, _, value = line.partition(b":")
            self._take_field(name, value.removeprefix(b" "))
        else:
            self._end_event(found)

    def _take_field(self, name: bytes, value: bytes) -> None:
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
                # More than fifteen digits are no time anybody means, and thousands of them int() refuses to read.
                if value.isdigit() and len(value) <= 15:
                    self.retry = self._retry = int(value)
            case _:
                pass  # "The field is ignored."

    def _end_event(self, found: list[SseEvent | Oversized]) -> None:
        # The id counts from here on, not from its line on: an event cut off in the middle must be sent again.
        if self._id is not None:
            self.last_event_id = self._id
        if self._data and not self._oversized:
            self._data.pop()
            found.append(SseEvent(bytes(self._data), self._event or "message", self._id, self._retry))
        self._clear()
