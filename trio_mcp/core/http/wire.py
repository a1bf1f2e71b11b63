"""HTTP/1.1 to and from bytes, for a server and without I/O.

`RequestReader` takes what a client sends and gives heads and bodies, one request after the other.  A head of HTTP/1.1
that obeys the grammar to the letter, has no name twice and no Transfer-Encoding is what nearly every client sends: one
regular expression reads it, which is stricter than any parser has to be.  Whatever else comes goes to h11 as it came,
so that the expression decides nothing but who reads: what it takes, h11 would take and understand in the same way, and
what it does not take, h11 understands or a refusal explains.  h11 is used in this file and nowhere else, with a new
parser for each head.  It reads no bodies: those in chunks are read by `http_chunks`, which is stricter.  Our half of
h11 is not used.  Its rules are about what a server might get wrong, they cost more than all the rest of a small call,
and a response of ours is a status line, some fields and a body: `head_bytes` and `chunk` write it.

h11 is a good reader, but a lenient one, and what two readers understand differently is how requests are smuggled past
the one in front.  So this is looked at before h11 sees it, and all of it is answered by 400 and the end of the
connection:

| What came | h11 |
|---|---|
| Content-Length next to Transfer-Encoding | takes the latter |
| several Content-Lengths, or a list | takes them if they are equal |
| Transfer-Encoding in HTTP/1.0 | takes it |
| a line that ends with a bare LF | takes it |
| a field that goes on in the next line (obs-fold) | takes it, and no trace is left |
| a control character in a field | takes all but NUL and white space |
| a Host that is none | takes it |

The rest h11 refuses: a bad request line or field name, a space before the colon, no or several Hosts, a length that is
no number, another Transfer-Encoding than chunked.  What is said about it is said here, without a word of
what came: a header may be a secret.
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
from trio_mcp.core.jsonrpc import Error, Limits

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
    """What came cannot be read any further: send `reply` and close."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def refused(status: int, why: str) -> Reply:
    """A refusal by the server of HTTP itself."""
    return refusal(status, Error(None, INVALID_REQUEST, why))


@attrs.define(eq=False)
class RequestHead:
    """The head of a request, and what it says about the connection."""

    method: str
    target: str = attrs.field(repr=False)  # may have a session in it
    headers: Headers
    chunks: bool  # whether the client reads chunks: HTTP/1.1
    keep: bool  # whether it wants the connection to be kept
    length: int | None  # of the body; None where it comes in chunks
    expects: bool  # it may wait for 100 before it sends the body

    @property
    def has_body(self) -> bool:
        return self.length != 0

    @property
    def path(self) -> str:
        """The path of the target, which may have a scheme and a host in front of it (RFC 9112, 3.2.2)."""
        path = self.target.partition("?")[0]
        scheme, mark, rest = path.partition("://")
        return "/" + rest.partition("/")[2] if mark and "/" not in scheme else path


class RequestReader:
    """What one client sends.  Any chunking of the bytes gives the same.

    For each request call `head` after each `feed` until it gives one, then `body` in the same way.  Both raise
    `UnreadableRequest`, after which nothing can be read any more.
    """

    __slots__ = ("_buffer", "_chunked", "_chunks", "_content", "_lags", "_length", "_limits", "_seen")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._seen = 0  # bytes of it that are no end of a head
        self._length = 0
        self._chunks: ChunkReader | None = None
        self._lags = False
        self._content = bytearray()  # of a body that comes in chunks
        self._chunked = 0  # bytes that were read of it, chunk headers and all

    @property
    def waiting(self) -> int:
        """How many bytes have come that were not given out yet."""
        return len(self._buffer)

    @property
    def held(self) -> int:
        """How many bytes are kept: those that wait, and what has come of a body in chunks."""
        return len(self._buffer) + len(self._content)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def rest(self) -> bytes:
        """All that has come after the last request; for the protocol that follows HTTP."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    # The head.

    def head(self) -> RequestHead | None:
        """The head of the next request, once all of it is there."""
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
        """Refuse what cannot become a head any more, instead of waiting for its end."""
        seen = self._seen
        new = buffer[seen - 1 if buffer[seen - 1 : seen] == b"\r" else seen :]
        if new.count(b"\n") != new.count(b"\r\n"):
            raise UnreadableRequest(refused(400, _LINES))
        self._seen = len(buffer)
        if self._seen > self._limits.header_bytes:
            raise UnreadableRequest(self._too_long())

    def _too_long(self) -> Reply:
        most = self._limits.header_bytes
        return refused(431, f"the request line and the headers have more than {most} bytes (Limits.header_bytes)")

    def _parse(self, raw: bytes) -> RequestHead:
        head = _plain(raw)
        if head is None:
            return self._parse_by_h11(raw)
        assert head.length is not None
        self._chunks, self._length = None, head.length
        return head

    def _parse_by_h11(self, raw: bytes) -> RequestHead:
        if raw.count(b"\n") > _FIELDS + 2:
            raise UnreadableRequest(refused(431, f"the request has more than {_FIELDS} headers"))
        length = _look(raw)
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.header_bytes)
        parser.receive_data(raw)
        try:
            request = parser.next_event()
        except h11.RemoteProtocolError as error:
            raise UnreadableRequest(_in_our_words(error)) from None
        assert isinstance(request, h11.Request)
        major, minor = request.http_version[:1], request.http_version[2:]
        if major != b"1":
            version = request.http_version.decode()
            raise UnreadableRequest(refused(505, f"HTTP/{version} is not served here; HTTP/1.1 and HTTP/1.0 are"))
        headers = Headers(request.headers)
        there = set(headers)  # to look for what is mostly not there, and cheaply
        modern = minor != b"0"
        _check_host(headers["Host"] if "host" in there else None, modern)
        coded = "transfer-encoding" in there
        if coded and (length is not None or not modern):
            why = "Transfer-Encoding" + (" next to Content-Length" if modern else " in HTTP/1.0")
            raise UnreadableRequest(refused(400, f"{why} is ambiguous; send one Content-Length, or chunks in HTTP/1.1"))
        self._chunks = ChunkReader(self._limits.header_bytes) if coded else None
        self._length = length or 0
        wishes = _wishes(headers["Connection"]) if "connection" in there else ()
        return RequestHead(
            request.method.decode(),
            request.target.decode(),
            headers,
            chunks=modern,
            keep="close" not in wishes and (modern or "keep-alive" in wishes),
            length=None if coded else self._length,
            expects=modern and "expect" in there and headers["Expect"].lower() == "100-continue",
        )

    # The body.

    @property
    def came(self) -> int:
        """How many bytes of the body have come."""
        return len(self._buffer) if self._chunks is None else self._chunked

    @property
    def lags(self) -> bool:
        """Whether `body` may give more without being fed: chunks are looked at a few at a time."""
        return self._lags

    def body(self) -> bytes | None:
        """The body of the request whose head was given last, once all of it is there; only once.

        Call it again, after others had their turn, as long as it `lags`.
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
            self._content += chunks.read(buffer, _STRETCH)
        except ChunkError as error:
            raise UnreadableRequest(refused(400, str(error))) from None
        self._chunked += before - len(buffer)
        size = len(self._content)
        if size + chunks.left > most:
            raise UnreadableRequest(_too_large("the body comes in chunks, and is too long", most))
        # A client could wrap each byte into a chunk header of some KiB.
        if self._chunked - size > self._limits.header_bytes + _WRAPPING * size:
            raise UnreadableRequest(refused(400, "the chunks have more headers than content"))
        self._lags = not chunks.done and 0 < len(buffer) < before
        if not chunks.done:
            return None
        body = bytes(self._content)
        self._chunks, self._content, self._chunked = None, bytearray(), 0
        return body


def _check_start(buffer: bytearray) -> None:
    """What does not begin like a request may do so after empty lines."""
    while buffer[:2] == b"\r\n":
        del buffer[:2]  # RFC 9112, 2.2: "SHOULD ignore at least one empty line ... received prior to the request"
    if buffer and not b"!" <= buffer[:1] <= b"~" and buffer != b"\r":
        why = "no request begins so; the client speaks TLS, and this server does not (ssl_context)"
        raise UnreadableRequest(refused(400, why if buffer[0] == 22 else "what came is no HTTP request"))


# Bytes of chunks that are looked at in one call of `body`: each may hold a byte, and nobody else is served meanwhile.
_STRETCH = 8 * 1024
_WRAPPING = 16  # bytes around one byte of content: a chunk for each needs 5

_FIELDS = 256  # headers of one request: each costs many times what its bytes do, and no client has half as many

_LINES = "a line of the head does not end with CRLF, or goes on in the next one; each field is one line"
_LENGTH = b"\r\ncontent-length:"
_DIGITS = 18  # more than any body needs, and fewer than Python, or h11, refuses to read
_CONTROLS = bytes([*range(9), 11, 12, *range(14, 32), 127])


def _too_large(came: str, most: int) -> Reply:
    return refused(413, f"{came}; {most} are allowed (Limits.message_bytes)")


def _look(raw: bytes) -> int | None:
    """Refuse what h11 would let pass, and give the Content-Length, if there is one."""
    lines = raw.count(b"\n")
    if not lines == raw.count(b"\r") == raw.count(b"\r\n") or b"\n " in raw or b"\n\t" in raw:
        raise UnreadableRequest(refused(400, _LINES))
    if len(raw.translate(None, _CONTROLS)) != len(raw):
        raise UnreadableRequest(refused(400, "a header has a control character in it"))
    lowered = raw.lower()
    start = lowered.find(_LENGTH)
    if start < 0:
        return None
    length = lowered[start + len(_LENGTH) : lowered.index(b"\r", start + 2)].strip(b" \t")
    if lowered.count(_LENGTH) > 1 or not length.isdigit() or len(length) > _DIGITS:
        raise UnreadableRequest(
            refused(400, f"Content-Length must be there once, and be one number of up to {_DIGITS} digits")
        )
    return int(length)


# What nearly every client sends, by the grammar of RFC 9112, 3 and 5, and RFC 9110, 5.5 and 5.6.2: a method and a field
# name are tokens, a field value is made of visible characters, spaces and tabs, and every line ends with CRLF.  Nothing
# is tried twice: a character that does not belong where it stands ends it.
_PLAIN = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]++) ([!-~]++) HTTP/1\.1\r\n"
    rb"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t -~\x80-\xff]*+\r\n)++)\r\n"
)


def _plain(raw: bytes) -> RequestHead | None:
    """A head that is plain, or None, which says nothing about it but that another has to look."""
    match = _PLAIN.fullmatch(raw)
    if match is None:
        return None
    method, target, block = match.groups()
    lines = block.decode("latin-1").split("\r\n")
    lines.pop()  # what follows the last line's end
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name.lower()] = value.strip(" \t")
    size = fields.get("content-length", "0")
    host = fields.get("host")
    if (
        len(fields) < len(lines)  # a name came twice
        or len(lines) > _FIELDS
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
        chunks=True,
        keep="connection" not in fields or "close" not in _wishes(fields["connection"]),
        length=int(size),
        expects="expect" in fields and fields["expect"].lower() == "100-continue",
    )


# A name, or an address in brackets, and maybe a port (RFC 3986, 3.2.2).
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w\-.~!$&'()*+;=%]*)(:\d*)?", re.ASCII)


def _check_host(host: str | None, modern: bool) -> None:
    # RFC 9112, 3.2: "a server MUST respond with 400 ... to any request message that contains ... a Host header field
    # with an invalid field value", and where there is none; h11 looks for one in 1.1 only, and 1.2 would have one too.
    if host is None and modern:
        raise UnreadableRequest(refused(400, _WORDS["Missing mandatory Host"]))
    if host is not None and _HOST.fullmatch(host) is None:
        raise UnreadableRequest(
            refused(400, "the Host header is malformed; it is a name or an address, and maybe a port")
        )


def _wishes(connection: str) -> Sequence[str]:
    return [each.strip() for each in connection.lower().split(",")]


# h11's words for a fault, up to the first colon: what follows is what came.
_WORDS = {
    "illegal request line": "the request line is malformed; it has a method, a target and HTTP/1.1",
    "illegal header line": "a header is malformed; it has a name, a colon right behind it and a value",
    "Missing mandatory Host": "the Host header is missing, which every request of HTTP/1.1 has",
    "Found multiple Host": "there are several Host headers; each request has one",
    "multiple Transfer-Encoding headers": "there are several Transfer-Encodings; the only one understood is chunked",
    "Only Transfer-Encoding": "the only Transfer-Encoding that is understood is chunked",
}


def _in_our_words(error: h11.RemoteProtocolError) -> Reply:
    return refused(400, _WORDS.get(str(error).partition(":")[0], "the request is malformed"))


# What goes back.

_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\nDate: " for each in HTTPStatus}


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def date(year: int, month: int, day: int, hour: int, minute: int, second: int, weekday: int) -> str:
    """A time of day as HTTP has it (RFC 9110, 5.6.7), in whatever language the system is."""
    return f"{_DAYS[weekday]}, {day:02} {_MONTHS[month - 1]} {year:04} {hour:02}:{minute:02}:{second:02} GMT"


def head_bytes(status: int, fields: Fields, date: str, *framing: str) -> bytes:
    """The head of a response.  `framing` are lines of the server's own, such as ``Connection: close``."""
    lines = [f"{name}: {value}" for name, value in fields]
    lines += framing
    text = "\r\n".join([_STATUS_LINES[status] + date, *lines, "\r\n"])
    # Nothing that we were sent gets here unread.  Should it ever, it must not begin a line of its own.
    if text.count("\n") != len(lines) + 3 or text.count("\r") != len(lines) + 3:
        raise UsageError("a header field has a line break in it")
    return text.encode("latin-1")


def chunk(data: bytes, *, last: bool) -> bytes:
    """`data` as one chunk, which may be empty, and the end of the body if it is the last one."""
    wrapped = b"%x\r\n%b\r\n" % (len(data), data) if data else b""  # a chunk without content would be that end
    return wrapped + LAST_CHUNK if last else wrapped
