"""Read HTTP/1.1 requests from bytes, and write responses to bytes, for a server and without I/O.

`RequestReader` takes the bytes of a client and returns heads and bodies, one request after the other.  One regular
expression, stricter than any parser has to be, reads the heads that nearly every client sends: they follow the grammar
to the letter, repeat no field name and have no Transfer-Encoding.  Every other head goes to h11 unchanged.  So the
expression decides only who reads a head: h11 would read each head that it matches in the same way, and a head that it
does not match is read by h11 or refused with a reason.

h11 is used only in this file, with a new parser for each head.  Bodies in chunks are read by `chunks`, which is
stricter than h11.  The writing half of h11 is not used: its rules guard against mistakes of a server, and cost more
than the rest of a small call.  A response is a status line, some fields and a body; `head_bytes` and `chunk` write
them.

h11 is correct but lenient, and if two readers understand the same bytes differently, a request can be smuggled past the
one in front.  So these faults are found before h11 sees the head.  Each is answered by 400 and closes the connection:

| Fault | h11 |
|---|---|
| Content-Length next to Transfer-Encoding | uses the latter |
| several Content-Lengths, or a list | accepts them if they are equal |
| Transfer-Encoding in HTTP/1.0 | accepts it |
| a line that ends with a bare LF | accepts it |
| a field folded over several lines (obs-fold) | accepts it, and leaves no trace of it |
| a control character in a field | accepts all except NUL and white space |
| an invalid Host | accepts it |

h11 refuses the rest: a bad request line or field name, a space before the colon, no Host or several, a length that is
not a number, a Transfer-Encoding other than chunked.  The error messages are written here and contain none of the
received bytes: a header may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus

import attrs
import h11

from trio_mcp.core.errors import INVALID_REQUEST, UsageError
from trio_mcp.core.http.chunks import ChunkError, ChunkReader, take
from trio_mcp.core.http.fields import Fields, Headers
from trio_mcp.core.http.verdicts import Reply, refusal
from trio_mcp.core.messages import Error, Limits

__all__ = [
    "CONTINUE",
    "LAST_CHUNK",
    "RequestHead",
    "RequestReader",
    "UnreadableRequest",
    "chunk",
    "date",
    "head_bytes",
    "refused",
]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class UnreadableRequest(Exception):
    """The bytes cannot be read any further.  Send `reply` and close the connection."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def refused(status: int, why: str) -> Reply:
    """Return a refusal by the HTTP server itself."""
    return refusal(status, Error(None, INVALID_REQUEST, why))


@attrs.define(eq=False)
class RequestHead:
    """The head of a request, and its consequences for the connection."""

    method: str
    target: str = attrs.field(repr=False)  # may contain a session id
    headers: Headers
    accepts_chunks: bool  # True if the client reads chunks: HTTP/1.1
    keep_alive: bool  # True if the client wants to keep the connection open
    length: int | None  # of the body; None if it comes in chunks
    expects_continue: bool  # True if the client may wait for 100 before it sends the body

    @property
    def has_body(self) -> bool:
        return self.length != 0

    @property
    def path(self) -> str:
        """The path of the target.  A scheme and a host may precede it in the target (RFC 9112, 3.2.2)."""
        path = self.target.partition("?")[0]
        scheme, mark, rest = path.partition("://")
        return "/" + rest.partition("/")[2] if mark and "/" not in scheme else path


class RequestReader:
    """Read the requests of one connection.  The way the bytes are split does not change the result.

    For each request call `head` after each `feed` until it returns a head, then `body` in the same way.  Both raise
    `UnreadableRequest`; after that, nothing more can be read.
    """

    __slots__ = ("_buffer", "_chunked", "_chunks", "_content", "_has_more", "_length", "_limits", "_seen")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._seen = 0  # bytes of it already searched for the end of the head
        self._length = 0
        self._chunks: ChunkReader | None = None
        self._has_more = False
        self._content = bytearray()  # of a body in chunks
        self._chunked = 0  # bytes read of this body, including chunk headers

    @property
    def waiting(self) -> int:
        """The number of received bytes that were not returned yet."""
        return len(self._buffer)

    @property
    def held(self) -> int:
        """The number of bytes in memory: those not returned yet, and the content of an unfinished body in chunks."""
        return len(self._buffer) + len(self._content)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def rest(self) -> bytes:
        """Remove and return all bytes after the last request, for the protocol that follows HTTP."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    # The head.

    def head(self) -> RequestHead | None:
        """Return the head of the next request once it is complete, else None."""
        buffer = self._buffer
        if buffer and not 0x21 <= buffer[0] <= 0x7E:
            _check_start(buffer)
        end = buffer.find(b"\r\n\r\n", max(0, self._seen - 3)) + 4
        if end < 4:
            self._unfinished(buffer)
            return None
        self._seen = 0
        if end > self._limits.header_bytes:
            raise UnreadableRequest(self._too_long())
        return self._parse(take(self._buffer, end))

    def _unfinished(self, buffer: bytearray) -> None:
        """Refuse bytes that cannot become a valid head, instead of waiting for its end."""
        seen = self._seen
        new = buffer[seen - 1 if buffer[seen - 1 : seen] == b"\r" else seen :]
        if new.count(b"\n") != new.count(b"\r\n"):
            raise UnreadableRequest(refused(400, _BAD_LINE))
        self._seen = len(buffer)
        if self._seen > self._limits.header_bytes:
            raise UnreadableRequest(self._too_long())

    def _too_long(self) -> Reply:
        most = self._limits.header_bytes
        return refused(431, f"the request line and the headers have more than {most} bytes (Limits.header_bytes)")

    def _parse(self, raw: bytes) -> RequestHead:
        head = _parse_plain(raw)
        if head is None:
            return self._parse_by_h11(raw)
        assert head.length is not None
        self._chunks, self._length = None, head.length
        return head

    def _parse_by_h11(self, raw: bytes) -> RequestHead:
        if raw.count(b"\n") > _MAX_FIELDS + 2:
            raise UnreadableRequest(refused(431, f"the request has more than {_MAX_FIELDS} headers"))
        length = _check_head(raw)
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.header_bytes)
        parser.receive_data(raw)
        try:
            request = parser.next_event()
        except h11.RemoteProtocolError as error:
            raise UnreadableRequest(_h11_refusal(error)) from None
        assert isinstance(request, h11.Request)
        major, minor = request.http_version[:1], request.http_version[2:]
        if major != b"1":
            version = request.http_version.decode()
            raise UnreadableRequest(refused(505, f"HTTP/{version} is not served here; HTTP/1.1 and HTTP/1.0 are"))
        headers = Headers(request.headers)
        there = set(headers)  # a cheap test for fields that are usually absent
        modern = minor != b"0"
        _check_host(headers["Host"] if "host" in there else None, modern)
        coded = "transfer-encoding" in there
        if coded and (length is not None or not modern):
            why = "Transfer-Encoding" + (" next to Content-Length" if modern else " in HTTP/1.0")
            raise UnreadableRequest(refused(400, f"{why} is ambiguous; send one Content-Length, or chunks in HTTP/1.1"))
        self._chunks = ChunkReader(self._limits.header_bytes) if coded else None
        self._length = length or 0
        options = _connection_options(headers["Connection"]) if "connection" in there else ()
        return RequestHead(
            request.method.decode(),
            request.target.decode(),
            headers,
            accepts_chunks=modern,
            keep_alive="close" not in options and (modern or "keep-alive" in options),
            length=None if coded else self._length,
            expects_continue=modern and "expect" in there and headers["Expect"].lower() == "100-continue",
        )

    # The body.

    @property
    def body_received(self) -> int:
        """The number of received body bytes."""
        return len(self._buffer) if self._chunks is None else self._chunked

    @property
    def has_more(self) -> bool:
        """True if `body` may return more without another `feed`: each call reads only some of the chunks."""
        return self._has_more

    def body(self) -> bytes | None:
        """Return the body of the current request once it is complete, else None.  It is returned only once.

        While `has_more` is true, call it again after other tasks had a turn.
        """
        if self._chunks is not None:
            return self._body_in_chunks(self._chunks)
        if self._length > self._limits.message_bytes:
            raise UnreadableRequest(_too_large(f"the body has {self._length} bytes", self._limits.message_bytes))
        return None if len(self._buffer) < self._length else take(self._buffer, self._length)

    def _body_in_chunks(self, chunks: ChunkReader) -> bytes | None:
        buffer, most = self._buffer, self._limits.message_bytes
        before = len(buffer)
        try:
            self._content += chunks.read(buffer, _BYTES_PER_CALL)
        except ChunkError as error:
            raise UnreadableRequest(refused(400, str(error))) from None
        self._chunked += before - len(buffer)
        size = len(self._content)
        if size + chunks.left > most:
            raise UnreadableRequest(_too_large("the body comes in chunks, and is too long", most))
        # A client could wrap each byte into a chunk header of some KiB.
        if self._chunked - size > self._limits.header_bytes + _WRAPPING * size:
            raise UnreadableRequest(refused(400, "the chunks have more headers than content"))
        self._has_more = not chunks.done and 0 < len(buffer) < before
        if not chunks.done:
            return None
        body = bytes(self._content)
        self._chunks, self._content, self._chunked = None, bytearray(), 0
        return body


def _check_start(buffer: bytearray) -> None:
    """Skip empty lines before a request, and refuse bytes that cannot begin one."""
    while buffer[:2] == b"\r\n":
        del buffer[:2]  # RFC 9112, 2.2: "SHOULD ignore at least one empty line ... received prior to the request"
    if buffer and not b"!" <= buffer[:1] <= b"~" and buffer != b"\r":
        why = "the client speaks TLS, and this server does not (ssl_context)"
        raise UnreadableRequest(refused(400, why if buffer[0] == 22 else "the client sent no HTTP request"))


# Bytes of chunks that one call of `body` reads.  Each chunk may hold a single byte, and other connections wait
# meanwhile.
_BYTES_PER_CALL = 8 * 1024
_WRAPPING = 16  # bytes around one byte of content: a chunk of one byte needs 5

_MAX_FIELDS = 256  # headers of one request: each costs far more than its bytes, and no client sends half as many

_BAD_LINE = "a line of the head does not end with CRLF or is folded; each field must be one line"
_LENGTH = b"\r\ncontent-length:"
_DIGITS = 18  # more than any body needs, fewer than the limits of Python and h11
_CONTROLS = bytes([*range(9), 11, 12, *range(14, 32), 127])


def _too_large(came: str, most: int) -> Reply:
    return refused(413, f"{came}; {most} are allowed (Limits.message_bytes)")


def _check_head(raw: bytes) -> int | None:
    """Refuse the faults that h11 accepts.  Return the Content-Length, or None if there is none."""
    lines = raw.count(b"\n")
    if not lines == raw.count(b"\r") == raw.count(b"\r\n") or b"\n " in raw or b"\n\t" in raw:
        raise UnreadableRequest(refused(400, _BAD_LINE))
    if len(raw.translate(None, _CONTROLS)) != len(raw):
        raise UnreadableRequest(refused(400, "a header has a control character in it"))
    lowered = raw.lower()
    start = lowered.find(_LENGTH)
    if start < 0:
        return None
    length = lowered[start + len(_LENGTH) : lowered.index(b"\r", start + 2)].strip(b" \t")
    if lowered.count(_LENGTH) > 1 or not length.isdigit() or len(length) > _DIGITS:
        raise UnreadableRequest(refused(400, f"a request must have one Content-Length of at most {_DIGITS} digits"))
    return int(length)


# The heads that nearly every client sends, by the grammar of RFC 9112, 3 and 5, and RFC 9110, 5.5 and 5.6.2: a method
# and a field name are tokens, a field value consists of visible characters, spaces and tabs, and every line ends with
# CRLF.  The expression never backtracks: a character out of place ends the match.
_PLAIN_HEAD = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]++) ([!-~]++) HTTP/1\.1\r\n"
    rb"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t -~\x80-\xff]*+\r\n)++)\r\n"
)


def _parse_plain(raw: bytes) -> RequestHead | None:
    """Read a head that matches `_PLAIN_HEAD`; None if h11 must read it."""
    match = _PLAIN_HEAD.fullmatch(raw)
    if match is None:
        return None
    method, target, block = match.groups()
    lines = block.decode("latin-1").split("\r\n")
    lines.pop()  # the empty string after the last line
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name.lower()] = value.strip(" \t")
    size = fields.get("content-length", "0")
    host = fields.get("host")
    if (
        len(fields) < len(lines)  # a name came twice
        or len(lines) > _MAX_FIELDS
        or host is None
        or _HOST.fullmatch(host) is None
        or "transfer-encoding" in fields
        or not (size.isascii() and size.isdigit() and len(size) <= _DIGITS)
    ):
        return None
    return RequestHead(
        method.decode(),
        target.decode(),
        Headers.of(fields),
        accepts_chunks=True,
        keep_alive="connection" not in fields or "close" not in _connection_options(fields["connection"]),
        length=int(size),
        expects_continue="expect" in fields and fields["expect"].lower() == "100-continue",
    )


# A name, or an address in brackets, then an optional port (RFC 3986, 3.2.2).
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w\-.~!$&'()*+;=%]*)(:\d*)?", re.ASCII)


def _check_host(host: str | None, modern: bool) -> None:
    # RFC 9112, 3.2: "a server MUST respond with 400 ... to any request message that contains ... a Host header field
    # with an invalid field value", and if it is missing.  h11 requires a Host in 1.1 only; 1.2 would need one too.
    if host is None and modern:
        raise UnreadableRequest(refused(400, _H11_MESSAGES["Missing mandatory Host"]))
    if host is not None and _HOST.fullmatch(host) is None:
        raise UnreadableRequest(
            refused(400, "the Host header is malformed; it must be a name or an address with an optional port")
        )


def _connection_options(connection: str) -> Sequence[str]:
    return [each.strip() for each in connection.lower().split(",")]


# Our messages, by the beginning of h11's.  After its first colon h11 repeats the received bytes.
_H11_MESSAGES = {
    "illegal request line": "the request line is malformed; it must be a method, a target and HTTP/1.1",
    "illegal header line": "a header is malformed; it must be a name followed directly by a colon, then a value",
    "Missing mandatory Host": "the Host header is missing; HTTP/1.1 requires it",
    "Found multiple Host": "there are several Host headers; send one",
    "multiple Transfer-Encoding headers": "there are several Transfer-Encodings; send chunked only",
    "Only Transfer-Encoding": "the only supported Transfer-Encoding is chunked",
}


def _h11_refusal(error: h11.RemoteProtocolError) -> Reply:
    return refused(400, _H11_MESSAGES.get(str(error).partition(":")[0], "the request is malformed"))


# Write responses.

_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\nDate: " for each in HTTPStatus}


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def date(year: int, month: int, day: int, hour: int, minute: int, second: int, weekday: int) -> str:
    """Format a time as HTTP requires (RFC 9110, 5.6.7), independent of the system's language."""
    return f"{_DAYS[weekday]}, {day:02} {_MONTHS[month - 1]} {year:04} {hour:02}:{minute:02}:{second:02} GMT"


def head_bytes(status: int, fields: Fields, date: str, *framing: str) -> bytes:
    """Return the head of a response.  `framing`: further lines of the server, for example ``Connection: close``."""
    lines = [f"{name}: {value}" for name, value in fields]
    lines += framing
    text = "\r\n".join([_STATUS_LINES[status] + date, *lines, "\r\n"])
    # No caller passes unchecked input of a client.  If one ever did, the input must not begin a line of its own.
    if text.count("\n") != len(lines) + 3 or text.count("\r") != len(lines) + 3:
        raise UsageError("a header field has a line break in it")
    return text.encode("latin-1")


def chunk(data: bytes, *, last: bool) -> bytes:
    """Return `data` as one chunk, followed by the end of the body if it is the last.  `data` may be empty."""
    wrapped = b"%x\r\n%b\r\n" % (len(data), data) if data else b""  # an empty chunk would end the body
    return wrapped + LAST_CHUNK if last else wrapped
