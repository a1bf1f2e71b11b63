"""HTTP/1.1 for both roles, without I/O: read requests, replies and chunks from bytes, and write heads and chunks.

`RequestReader` reads the requests of one connection for a server, `ReplyReader` one reply for a client.  The way the
bytes are split changes neither the content nor the error.  The error messages contain none of the received bytes: a
header may be a secret.

If two readers understand the same bytes differently, a request can be smuggled past the one in front.  So requests and
bodies in chunks are read strictly.  One regular expression, stricter than any parser has to be, reads the request heads
that nearly every client sends: they follow the grammar to the letter, repeat no field name and have no
Transfer-Encoding.  Every other head goes to h11 unchanged, with a new parser for each.  So the expression decides only
who reads a head: h11 would read each head that it matches in the same way.

h11 is correct but lenient.  These faults are found before h11 sees the head.  Each is answered by 400 and closes the
connection:

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
not a number, a Transfer-Encoding other than chunked.

Replies are read leniently where a fault is harmless (lines that end with a bare LF, fields folded over several lines),
and strictly at the end of a reply.  If another reader could see that end elsewhere, the connection is not reused.  If
the end cannot be known, reading fails.

The writing half of h11 is not used: its rules guard against mistakes of a server, and cost more than the rest of a
small call.
"""

from __future__ import annotations

import functools
import math
import re
from http import HTTPStatus
from typing import NamedTuple, TypeAlias

import attrs

from trio_mcp.core.errors import INVALID_REQUEST, RemoteProtocolError, UsageError, shown
from trio_mcp.core.http.fields import TOKEN, Fields, Headers, HttpRequest, Reply, listed, refusal, split_target
from trio_mcp.core.messages import Error, Limits

__all__ = [
    "CONTINUE", "LAST_CHUNK", "ChunkError", "ChunkReader", "KnownHeads", "ReplyHead", "ReplyReader", "RequestHead",
    "RequestReader", "UnreadableRequest", "chunk", "date", "head_bytes", "refused", "take",
]  # fmt: skip

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

_DIGITS = 18  # of a length: more than any body needs, fewer than the limits of Python and h11
_FIELD = TOKEN.encode() + rb"+:[\t -~\x80-\xff]*+"


def take(buffer: bytearray, most: int) -> bytes:
    """Remove up to `most` bytes from the front of the buffer and return them.  A slice would copy them once more."""
    if len(buffer) <= most:
        data = bytes(buffer)
        buffer.clear()
        return data
    with memoryview(buffer) as view:
        data = bytes(view[:most])
    del buffer[:most]
    return data


# Bodies in chunks (RFC 9112, 7.1).


class ChunkError(Exception):
    """The body is malformed, or one of its lines is too long.  The message contains none of the received bytes."""


class _ChunkLine(NamedTuple):
    """A line between the contents of chunks."""

    name: str
    grammar: re.Pattern[bytes]
    fault: str


_SIZE = _ChunkLine(
    "header of a chunk",
    re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*+(?:;[\t\x20-\x7e\x80-\xff]*+)?"),
    "a chunk must begin with its size in hexadecimal digits and CRLF",
)
_AFTER = _ChunkLine(
    "header of a chunk",
    re.compile(rb""),
    "a chunk must end with CRLF after as many bytes as its size says",
)
_TRAILER = _ChunkLine(
    "trailer",
    re.compile(rb"(?:" + _FIELD + rb")?"),
    "a field after the last chunk is malformed or does not end with CRLF",
)


class ChunkReader:
    """Read the chunks of one body.

    Call `read` with the receive buffer each time bytes were appended to it.  A line may have `limit` bytes
    (`Limits.header_bytes`), and so may the whole trailer.  Every line must end with CRLF and contain no control
    character.  This includes chunk extensions and trailers, whose content is otherwise ignored.
    """

    __slots__ = ("_expected", "_limit", "_seen", "_trailer", "consumed", "done", "left", "paused")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._expected = _SIZE  # the next line, after the content of the current chunk
        self._seen = 0  # bytes of the buffer already searched for a line end
        self._trailer = 0  # bytes of the trailer so far
        self.left = 0
        """Bytes of the current chunk that have not arrived."""
        self.consumed = 0
        """Bytes removed from the buffer, including the lines between the contents."""
        self.paused = False
        """True if `read` may return more without new bytes, because it has stopped at its limit or before an error."""
        self.done = False
        """True after the end of the body.  The rest of the buffer belongs to the next message."""

    def read(self, buffer: bytearray, most: float = math.inf) -> bytes:
        """Remove about `most` bytes of the body from the front of the buffer, and return their content.

        Raises `ChunkError`.  Content before the error is returned first; the next call raises.
        """
        content = []
        before = len(buffer)
        try:
            while not self.done and before - len(buffer) < most:
                if self.left:
                    data = take(buffer, self.left)
                    self.left -= len(data)
                    content.append(data)
                if self.left or not self._read_line(buffer):
                    break
        except ChunkError:
            if not any(content):
                raise
        self.paused = not self.done and 0 < len(buffer) < before
        self.consumed += before - len(buffer)
        return b"".join(content)

    def _read_line(self, buffer: bytearray) -> bool:
        """Process and remove one line; False if it has not arrived.  If this raises, the state is unchanged."""
        expected = self._expected
        end = buffer.find(b"\n", self._seen)
        whole = end > 0 and buffer[end - 1] == 0x0D
        length = end - whole if end >= 0 else len(buffer) - buffer.endswith(b"\r")
        if self._trailer + length > self._limit:
            raise ChunkError(f"the {expected.name} has more than {self._limit} bytes (Limits.header_bytes)")
        if not whole:
            if end >= 0 or (expected is _AFTER and length):
                raise ChunkError(expected.fault)
            self._seen = len(buffer)
            return False
        match = expected.grammar.fullmatch(buffer, 0, length)
        if match is None:
            raise ChunkError(expected.fault)
        if expected is _SIZE:
            self.left = int(match[1], 16)
            self._expected = _AFTER if self.left else _TRAILER
        elif expected is _AFTER:
            self._expected = _SIZE
        elif length:
            self._trailer += length + 2
        else:
            self.done = True
        del match  # a match object keeps the buffer from shrinking
        del buffer[: length + 2]
        self._seen = 0
        return True


# Requests.


class UnreadableRequest(Exception):
    """The bytes cannot be read any further.  Send `reply` and close the connection."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def refused(status: int, why: str) -> Reply:
    """Return a refusal by the HTTP server itself."""
    return refusal(status, Error(None, INVALID_REQUEST, why))


def _unreadable(status: int, why: str) -> UnreadableRequest:
    return UnreadableRequest(refused(status, why))


@attrs.frozen(eq=False, kw_only=True)
class RequestHead(HttpRequest):
    """A request before its body, and the consequences of its head for the connection."""

    accepts_chunks: bool  # True if the client reads chunks: HTTP/1.1
    keep_alive: bool  # True if the client wants to keep the connection open
    length: int | None  # of the body; None if it comes in chunks
    expects_continue: bool  # True if the client may wait for 100 before it sends the body
    usual: bool = False  # True: equal heads are this same object, so a server can remember its verdict

    @property
    def has_body(self) -> bool:
        return self.length != 0

    @property
    def path(self) -> str:
        """The path of the target.  A scheme and a host may precede it in the target (RFC 9112, 3.2.2)."""
        host, path = split_target(self.target)
        return path if host is None else path or "/"


KnownHeads: TypeAlias = dict[bytes, RequestHead]
"""Plain heads as they came, and as they were read.

Clients send few different heads, so usual ones are remembered.  None has a field that may be a secret or that names a
session.  A client that sends other heads on purpose can take little memory, and can cost the others only the time that
this saves.
"""


class RequestReader:
    """Read the requests of one connection.  The readers of one server can share the heads that they know.

    For each request call `head` after each `feed` until it returns a head, then `body` in the same way.  Both raise
    `UnreadableRequest`; after that, nothing more can be read.
    """

    __slots__ = ("_chunks", "_content", "_known", "_length", "_limits", "_seen", "buffer")

    def __init__(self, limits: Limits, known: KnownHeads | None = None) -> None:
        self._limits = limits
        self._known = {} if known is None else known
        self.buffer = bytearray()
        """The received bytes that were not returned yet."""
        self._seen = 0  # bytes of it already searched for the end of the head
        self._length = 0
        self._chunks: ChunkReader | None = None
        self._content = bytearray()  # of a body in chunks

    @property
    def held(self) -> int:
        """The number of bytes in memory: those not returned yet, and the content of an unfinished body in chunks."""
        return len(self.buffer) + len(self._content)

    def feed(self, data: bytes) -> None:
        self.buffer += data

    def rest(self) -> bytes:
        """Remove and return all bytes after the last request, for the protocol that follows HTTP."""
        return take(self.buffer, len(self.buffer))

    def head(self) -> RequestHead | None:
        """Return the head of the next request once it is complete, else None."""
        buffer, most = self.buffer, self._limits.header_bytes
        if buffer and not 0x21 <= buffer[0] <= 0x7E:
            _check_start(buffer)
        seen = self._seen
        end = buffer.find(b"\r\n\r\n", max(0, seen - 3)) + 4
        if end < 4:
            # Refuse bytes that cannot become a valid head, instead of waiting for its end.
            new = buffer[seen - 1 if buffer[seen - 1 : seen] == b"\r" else seen :]
            if new.count(b"\n") != new.count(b"\r\n"):
                raise _unreadable(400, _BAD_LINE)
            self._seen = end = len(buffer)
        else:
            self._seen = 0
        if end > most:
            raise _unreadable(
                431, f"the request line and the headers have more than {most} bytes (Limits.header_bytes)"
            )
        if self._seen or not end:
            return None
        raw = take(buffer, end)
        head = self._known.get(raw) or self._parse(raw)
        self._chunks, self._length = None, head.length or 0
        if head.length is None:
            self._chunks = ChunkReader(most)
        return head

    def _parse(self, raw: bytes) -> RequestHead:
        head = _parse_plain(raw)
        if head is None:
            return self._parse_by_h11(raw)
        # A query differs from client to client: that of HTTP+SSE names the session.
        if len(raw) <= _USUAL and "?" not in head.target and head.headers.by_name.keys() <= _USUAL_FIELDS:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[raw] = head = attrs.evolve(head, usual=True)
        return head

    def _parse_by_h11(self, raw: bytes) -> RequestHead:
        import h11  # 5 ms, for servers of clients that send other than plain heads

        if raw.count(b"\n") > _MAX_FIELDS + 2:
            raise _unreadable(431, f"the request has more than {_MAX_FIELDS} headers")
        length = _check_head(raw)
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.header_bytes)
        parser.receive_data(raw)
        try:
            request = parser.next_event()
        except h11.RemoteProtocolError as error:
            # After its first colon the message of h11 repeats the received bytes.
            raise _unreadable(400, _H11_FAULTS.get(str(error).partition(":")[0], "the request is malformed")) from None
        assert isinstance(request, h11.Request)
        version = request.http_version.decode()
        if version[0] != "1":
            raise _unreadable(505, f"HTTP/{version} is not served here; HTTP/1.1 and HTTP/1.0 are")
        modern, headers = version != "1.0", Headers(request.headers)
        _check_host(headers.get("Host"), modern)
        coded = "Transfer-Encoding" in headers
        if coded and (length is not None or not modern):
            why = "Transfer-Encoding" + (" next to Content-Length" if modern else " in HTTP/1.0")
            raise _unreadable(400, f"{why} is ambiguous; send one Content-Length, or chunks in HTTP/1.1")
        options = listed(headers.get("Connection", "").lower())
        return RequestHead(
            request.method.decode(),
            request.target.decode(),
            headers,
            accepts_chunks=modern,
            keep_alive="close" not in options and (modern or "keep-alive" in options),
            length=None if coded else length or 0,
            expects_continue=modern and headers.get("Expect", "").lower() == "100-continue",
        )

    @property
    def body_received(self) -> int:
        """The number of received body bytes."""
        return len(self.buffer) if self._chunks is None else self._chunks.consumed

    @property
    def has_more(self) -> bool:
        """True if `body` may return more without another `feed`: each call reads only some of the chunks."""
        return self._chunks is not None and self._chunks.paused

    def body(self) -> bytes | None:
        """Return the body of the current request once it is complete, else None.  It is returned only once.

        While `has_more` is true, call it again after other tasks had a turn.
        """
        buffer, chunks, most = self.buffer, self._chunks, self._limits.message_bytes
        if chunks is None:
            if self._length > most:
                raise _unreadable(413, f"the body has {self._length} bytes; {_ALLOWED.format(most)}")
            return None if len(buffer) < self._length else take(buffer, self._length)
        try:
            self._content += chunks.read(buffer, _BYTES_PER_CALL)
        except ChunkError as error:
            raise _unreadable(400, str(error)) from None
        size = len(self._content)
        if size + chunks.left > most:
            raise _unreadable(413, f"the body comes in chunks, and is too long; {_ALLOWED.format(most)}")
        # A client could wrap each byte into a chunk header of some KiB.
        if chunks.consumed - size > self._limits.header_bytes + _WRAPPING * size:
            raise _unreadable(400, "the chunks have more headers than content")
        if not chunks.done:
            return None
        self._chunks = None
        return take(self._content, size)


# Bytes of chunks that one call of `body` reads.  Each chunk may hold a single byte, and other connections wait
# meanwhile.
_BYTES_PER_CALL = 8 * 1024
_REMEMBERED, _USUAL = 256, 1024  # heads, and the bytes of the longest
_USUAL_FIELDS = frozenset(
    {
        *("accept", "accept-encoding", "accept-language", "connection", "content-length", "content-type", "host"),
        *("mcp-method", "mcp-name", "mcp-protocol-version", "origin", "sec-fetch-mode", "user-agent"),
    }
)
_WRAPPING = 16  # bytes around one byte of content: a chunk of one byte needs 5
_MAX_FIELDS = 256  # headers of one request: each costs far more than its bytes, and no client sends half as many

_ALLOWED = "{} are allowed (Limits.message_bytes)"
_BAD_LINE = "a line of the head does not end with CRLF or is folded; each field must be one line"
_NO_HOST = "the Host header is missing; HTTP/1.1 requires it"
_H11_FAULTS = {
    "illegal request line": "the request line is malformed; it must be a method, a target and HTTP/1.1",
    "illegal header line": "a header is malformed; it must be a name followed directly by a colon, then a value",
    "Missing mandatory Host": _NO_HOST,
    "Found multiple Host": "there are several Host headers; send one",
    "multiple Transfer-Encoding headers": "there are several Transfer-Encodings; send chunked only",
    "Only Transfer-Encoding": "the only supported Transfer-Encoding is chunked",
}
"""Our messages, by the beginning of those of h11."""

# A name, or an address in brackets, then an optional port (RFC 3986, 3.2.2).
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w\-.~!$&'()*+;=%]*)(:\d*)?", re.ASCII)
_LENGTH = b"\r\ncontent-length:"
_CONTROLS = bytes([*range(9), 11, 12, *range(14, 32), 127])


def _check_start(buffer: bytearray) -> None:
    """Skip empty lines before a request, and refuse bytes that cannot begin one."""
    while buffer[:2] == b"\r\n":
        del buffer[:2]  # RFC 9112, 2.2: "SHOULD ignore at least one empty line ... received prior to the request"
    if buffer and not 0x21 <= buffer[0] <= 0x7E and buffer != b"\r":  # the LF may still come
        why = "the client speaks TLS, and this server does not (ssl_context)"
        raise _unreadable(400, why if buffer[0] == 22 else "the client sent no HTTP request")


def _check_head(raw: bytes) -> int | None:
    """Refuse the faults that h11 accepts.  Return the Content-Length, or None if there is none."""
    lines = raw.count(b"\n")
    if not lines == raw.count(b"\r") == raw.count(b"\r\n") or b"\n " in raw or b"\n\t" in raw:
        raise _unreadable(400, _BAD_LINE)
    if len(raw.translate(None, _CONTROLS)) != len(raw):
        raise _unreadable(400, "a header has a control character in it")
    lowered = raw.lower()
    start = lowered.find(_LENGTH)
    if start < 0:
        return None
    length = lowered[start + len(_LENGTH) : lowered.index(b"\r", start + 2)].strip(b" \t")
    if lowered.count(_LENGTH) > 1 or not length.isdigit() or len(length) > _DIGITS:
        raise _unreadable(400, f"a request must have one Content-Length of at most {_DIGITS} digits")
    return int(length)


def _check_host(host: str | None, modern: bool) -> None:
    # RFC 9112, 3.2: "a server MUST respond with 400 ... to any request message that contains ... a Host header field
    # with an invalid field value", and if it is missing.  h11 requires a Host in 1.1 only; 1.2 would need one too.
    if host is None and modern:
        raise _unreadable(400, _NO_HOST)
    if host is not None and _HOST.fullmatch(host) is None:
        raise _unreadable(400, "the Host header is malformed; it must be a name or an address with an optional port")


# The heads that nearly every client sends, by the grammar of RFC 9112, 3 and 5, and RFC 9110, 5.5 and 5.6.2: a method
# and a field name are tokens, a field value consists of visible characters, spaces and tabs, and every line ends with
# CRLF.  The expression never backtracks: a character out of place ends the match.
_PLAIN_HEAD = re.compile(
    rb"(" + TOKEN.encode() + rb"+) ([!-~]++) HTTP/1\.1\r\n((?:" + _FIELD + rb"\r\n)++)\r\n",
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
        keep_alive="connection" not in fields or "close" not in listed(fields["connection"].lower()),
        length=int(size),
        expects_continue="expect" in fields and fields["expect"].lower() == "100-continue",
    )


# Replies.


class ReplyHead(NamedTuple):
    status: int
    headers: Headers


class ReplyReader:
    """Read the reply to one request.  Every fault is a `RemoteProtocolError`.

    Call `head` after each `feed` until it returns a head, then `body` until `done`.  Set `bodiless` if the reply has no
    body in spite of its head, as for the methods HEAD and CONNECT.  Set `upgrades` if the request asks for another
    protocol; after a reply with the status 101, `rest` returns the bytes of that protocol.
    """

    __slots__ = (
        "_bodiless", "_buffer", "_chunks", "_ended", "_keep", "_left", "_lines", "_most", "_seen", "_until_close",
        "_upgrades", "began", "done",
    )  # fmt: skip

    def __init__(self, limits: Limits, *, bodiless: bool = False, upgrades: bool = False) -> None:
        self._most = limits.header_bytes
        self._bodiless = bodiless
        self._upgrades = upgrades
        self._buffer = bytearray()
        self._seen = 0  # bytes of it already searched for the end of the head
        self._lines = 0  # bytes of heads so far
        self._left = 0  # bytes of a body with a length that have not arrived
        self._chunks: ChunkReader | None = None
        self._until_close = False  # the body ends with the connection
        self._ended = False
        self._keep = False
        self.began = False
        """True after the first byte of the reply."""
        self.done = False
        """True if the whole reply was returned."""

    def feed(self, data: bytes) -> None:
        """Add received bytes; `b""` means that the connection has ended."""
        self._buffer += data
        if data:
            self.began = True
        else:
            self._ended = True

    @property
    def ready(self) -> bool:
        """True if `head` or `body` may return more without another `feed`."""
        return bool(self._buffer) or self._ended or self.done

    @property
    def surplus(self) -> bool:
        """True if there are received bytes that were not returned."""
        return bool(self._buffer)

    @property
    def length(self) -> int:
        """The number of body bytes known to follow."""
        return self._left if self._chunks is None else self._chunks.left

    @property
    def reusable(self) -> bool:
        """True if the connection can carry another request: this reply is done, and no other bytes have arrived."""
        return self.done and self._keep and not self._buffer and not self._ended

    def rest(self) -> bytes:
        """Remove and return all bytes that were not returned."""
        return take(self._buffer, len(self._buffer))

    def head(self) -> ReplyHead | None:
        """Return the head once it is complete, else None.  Informational replies (1xx) are skipped."""
        while (raw := self._raw_head()) is not None:
            minor, status, headers = _parse_reply(raw)
            if status == 101 and not self._upgrades:
                raise RemoteProtocolError(
                    "the server switched to another protocol (101) although the request did not ask for it"
                )
            if status == 101 or status >= 200:
                self._frame(minor, status, headers)
                return ReplyHead(status, headers)
        if self._ended:
            where = "in the middle of the head of the reply" if self.began else "before there was a reply"
            raise RemoteProtocolError(f"the connection ended {where}")
        return None

    def _raw_head(self) -> bytes | None:
        buffer = self._buffer
        if not b"HTTP/".startswith(buffer[:5]):
            tls = buffer[0] in (21, 22)  # an alert, or a handshake
            hint = "; it speaks TLS, so use https://" if tls else ""
            raise RemoteProtocolError(f"the server sent no HTTP reply{hint}")
        match = _BLANK.search(buffer, max(0, self._seen - 2))
        end = 0 if match is None else match.end()
        del match  # a match object keeps the buffer from shrinking
        # Informational replies count too, or a server could send them without end.
        if self._lines + (end or len(buffer)) > self._most:
            raise RemoteProtocolError(f"the head of the reply has more than {self._most} bytes (Limits.header_bytes)")
        self._seen = 0 if end else len(buffer)
        self._lines += end
        return take(self._buffer, end) if end else None

    def _frame(self, minor: str, status: int, headers: Headers) -> None:
        """Determine how the body is framed: RFC 9112, 6.3."""
        coding, length = headers.get("Transfer-Encoding"), headers.get("Content-Length")
        # Keep-alive in HTTP/1.0 differs between implementations, so such a connection is not reused.
        self._keep = minor != "0" and "close" not in listed(headers.get("Connection", "").lower())
        if self._bodiless or status in (101, 204, 304):
            self.done = True
        elif coding is not None:
            if coding.lower() != "chunked":
                raise RemoteProtocolError(f"the reply has the Transfer-Encoding {shown(coding)}; only chunked is read")
            # "A Transfer-Encoding ... overrides the Content-Length", which "ought to be handled as an error"; and
            # HTTP/1.0 has no Transfer-Encoding.  A proxy may have read it the other way.
            self._keep = self._keep and length is None and minor != "0"
            self._chunks = ChunkReader(self._most)
        elif length is not None:
            if not (length.isascii() and length.isdigit() and len(length) <= _DIGITS):
                # Several different ones were joined to a list.
                raise RemoteProtocolError("the Content-Length of the reply is not one number")
            self._left = int(length)
            self.done = not self._left
        else:
            self._keep, self._until_close = False, True

    def body(self) -> bytes:
        """Return the body bytes received since the last call; `b""` if none arrived or the reply is done."""
        if self.done:
            return b""
        if self._until_close:
            data, self.done = self.rest(), self._ended
        elif self._chunks is None:
            data = take(self._buffer, self._left)
            self._left -= len(data)
            self.done = not self._left
        else:
            try:
                data = self._chunks.read(self._buffer)
            except ChunkError as error:
                raise RemoteProtocolError(f"the reply is malformed: {error}") from None
            self.done = self._chunks.done
        if self._ended and not data and not self.done:
            raise RemoteProtocolError("the connection ended in the middle of the reply")
        return data


_BLANK = re.compile(rb"\n\r?\n")
_STATUS = re.compile(r"HTTP/1\.(\d) (\d{3})(?: .*)?", re.ASCII)
_NAME = re.compile(TOKEN)
_FOLD = re.compile(r"\r?\n[ \t]+")


def _parse_reply(raw: bytes) -> tuple[str, int, Headers]:
    """Return the minor version, the status and the fields of a head."""
    text = raw.decode("latin-1")
    if "\0" in text or text.count("\r") != text.count("\r\n"):
        raise RemoteProtocolError("the head of the reply has a control character in it")
    if "\n " in text or "\n\t" in text:
        text = _FOLD.sub(" ", text)  # RFC 9112, 5.2: "replace each received obs-fold with one or more SP octets"
    first, *lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    match = _STATUS.fullmatch(first)
    if match is None:
        raise RemoteProtocolError("the server sent no HTTP/1.1 reply: its status line is malformed")
    fields = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or _NAME.fullmatch(name) is None:
            raise RemoteProtocolError(
                "a field of the reply is malformed; it must be a name followed directly by a colon"
            )
        fields.append((name, value))
    return match[1], int(match[2]), Headers(fields)


# Write replies.

_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}" for each in HTTPStatus}

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def date(year: int, month: int, day: int, hour: int, minute: int, second: int, weekday: int) -> str:
    """Format a time as HTTP requires (RFC 9110, 5.6.7), independent of the system's language."""
    return f"{_DAYS[weekday]}, {day:02} {_MONTHS[month - 1]} {year:04} {hour:02}:{minute:02}:{second:02} GMT"


def head_bytes(status: int, fields: Fields, date: str | None, *framing: str) -> bytes:
    """Return the head of a reply.  `framing`: further lines of the server, for example ``Connection: close``."""
    dated = "" if date is None else f"Date: {date}\r\n"
    own = "".join([f"{line}\r\n" for line in framing])
    return f"{_STATUS_LINES[status]}\r\n{dated}{_field_lines(fields)}{own}\r\n".encode("latin-1")


@functools.lru_cache(32)  # nearly all replies of a server have one of a few tuples of fields
def _field_lines(fields: Fields) -> str:
    text = "".join([f"{name}: {value}\r\n" for name, value in fields])
    # No caller passes unchecked input of a client.  If one ever did, the input must not begin a line of its own.
    if text.count("\n") != len(fields) or text.count("\r") != len(fields):
        raise UsageError("a header field has a line break in it")
    return text


def chunk(data: bytes, *, last: bool) -> bytes:
    """Return `data` as one chunk, followed by the end of the body if it is the last.  `data` may be empty."""
    wrapped = b"%x\r\n%b\r\n" % (len(data), data) if data else b""  # an empty chunk would end the body
    return wrapped + LAST_CHUNK if last else wrapped
