"""Read HTTP/1.1 responses from bytes, for a client and without I/O.

`ReplyReader` takes the bytes that a server sends in answer to one request.  It returns the head, then the body in
pieces.  The way the bytes are split changes neither the content nor the error.

h11 is not used.  One parser for each response, and one event for each request, cost more than the rest of a small call;
and a client needs little of HTTP/1.1: a status line, header fields, and a body in one of three framings.

The reader is lenient about harmless faults (lines that end with a bare LF, fields folded over several lines).  It is
strict about the end of a response.  If another reader could see that end elsewhere, the connection is not reused.  If
the end cannot be known, reading fails.  Every fault is a `RemoteProtocolError`, whose message contains none of the
received bytes: they may be a secret.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from trio_mcp.core.errors import RemoteProtocolError, shown
from trio_mcp.core.http.chunks import ChunkError, ChunkReader, take
from trio_mcp.core.http.fields import Headers
from trio_mcp.core.messages import Limits

__all__ = ["ReplyHead", "ReplyReader"]


class ReplyHead(NamedTuple):
    status: int
    headers: Headers


class _ReplyPart(Enum):
    """Which part of the response is read next."""

    HEAD = "head"
    LENGTH = "a body of a known length"
    CLOSE = "a body that ends with the connection"
    CHUNKS = "a body in chunks"
    DONE = "done"


class ReplyReader:
    """Read the response to one request.

    Call `head` after each `feed` until it returns a head, then `body` until `done`.  Set `bodiless` if the response has
    no body in spite of its head, as for the methods HEAD and CONNECT.
    """

    __slots__ = (
        "_bodiless", "_buffer", "_chunks", "_ended", "_keep", "_left", "_lines", "_most", "_part", "_seen", "began",
    )  # fmt: skip

    def __init__(self, limits: Limits, *, bodiless: bool = False) -> None:
        self._most = limits.header_bytes
        self._bodiless = bodiless
        self._buffer = bytearray()
        self._seen = 0  # bytes of it already searched for the end of the head
        self._lines = 0  # bytes of heads so far
        self._left = 0  # bytes of the body or of the current chunk that have not arrived
        self._part = _ReplyPart.HEAD
        self._chunks: ChunkReader | None = None
        self._ended = False
        self._keep = False
        self.began = False
        """True after the first byte of the response."""

    def feed(self, data: bytes) -> None:
        """Add received bytes; `b""` means that the connection has ended."""
        self._buffer += data
        if data:
            self.began = True
        else:
            self._ended = True

    @property
    def done(self) -> bool:
        """True if the whole response was returned."""
        return self._part is _ReplyPart.DONE

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
        return self._left

    @property
    def reusable(self) -> bool:
        """True if the connection can carry another request: this response is done, and no other bytes have arrived."""
        return self.done and self._keep and not self._buffer and not self._ended

    # The head.

    def head(self) -> ReplyHead | None:
        """Return the head once it is complete, else None.  Informational responses (1xx) are skipped."""
        while (raw := self._raw_head()) is not None:
            minor, status, headers = _parse(raw)
            if status == 101:
                raise RemoteProtocolError(
                    "the server switched to another protocol (101) although the request did not ask for it"
                )
            if status >= 200:
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
        # Informational responses count too, or a server could send them without end.
        if self._lines + (end or len(buffer)) > self._most:
            raise RemoteProtocolError(f"the head of the reply has more than {self._most} bytes (Limits.header_bytes)")
        self._seen = 0 if end else len(buffer)
        self._lines += end
        return take(self._buffer, end) if end else None

    def _frame(self, minor: str, status: int, headers: Headers) -> None:
        """Determine how the body is framed: RFC 9112, 6.3."""
        coding, length = headers.get("Transfer-Encoding"), headers.get("Content-Length")
        # Keep-alive in HTTP/1.0 differs between implementations, so such a connection is not reused.
        self._keep = minor != "0" and "close" not in _listed(headers.get("Connection", ""))
        if self._bodiless or status in (204, 304):
            self._part = _ReplyPart.DONE
        elif coding is not None:
            if coding.lower() != "chunked":
                raise RemoteProtocolError(f"the reply has the Transfer-Encoding {shown(coding)}; only chunked is read")
            # "A Transfer-Encoding ... overrides the Content-Length", which "ought to be handled as an error"; and
            # HTTP/1.0 has no Transfer-Encoding.  A proxy may have read it the other way.
            self._keep = self._keep and length is None and minor != "0"
            self._part = _ReplyPart.CHUNKS
            self._chunks = ChunkReader(self._most)
        elif length is not None:
            if not _LENGTH.fullmatch(length):  # several different ones were joined to a list
                raise RemoteProtocolError("the Content-Length of the reply is not one number")
            self._left = int(length)
            self._part = _ReplyPart.LENGTH if self._left else _ReplyPart.DONE
        else:
            self._keep = False
            self._part = _ReplyPart.CLOSE

    # The body.

    def body(self) -> bytes:
        """Return the body bytes received since the last call; `b""` if none arrived or the response is done."""
        if self._part is _ReplyPart.LENGTH:
            data = take(self._buffer, self._left)
            self._left -= len(data)
            if not self._left:
                self._part = _ReplyPart.DONE
        elif self._part is _ReplyPart.CLOSE:
            data = take(self._buffer, len(self._buffer))
            if self._ended:
                self._part = _ReplyPart.DONE
        elif self._part is _ReplyPart.CHUNKS:
            data = self._content()
        else:
            data = b""
        if self._ended and not data and not self.done:
            raise RemoteProtocolError("the connection ended in the middle of the reply")
        return data

    def _content(self) -> bytes:
        chunks = self._chunks
        assert chunks is not None
        try:
            data = chunks.read(self._buffer)
        except ChunkError as error:
            raise RemoteProtocolError(f"the reply is malformed: {error}") from None
        self._left = chunks.left
        if chunks.done:
            self._part = _ReplyPart.DONE
        return data


_BLANK = re.compile(rb"\n\r?\n")
_STATUS = re.compile(r"HTTP/1\.(\d) (\d{3})(?: .*)?", re.ASCII)
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FOLD = re.compile(r"\r?\n[ \t]+")
_LENGTH = re.compile(r"\d{1,18}", re.ASCII)  # more digits than any body needs


def _parse(raw: bytes) -> tuple[str, int, Headers]:
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
        if not colon or _TOKEN.fullmatch(name) is None:
            raise RemoteProtocolError(
                "a field of the reply is malformed; it must be a name followed directly by a colon"
            )
        fields.append((name, value))
    return match[1], int(match[2]), Headers(fields)


def _listed(field: str) -> set[str]:
    return {each.strip() for each in field.lower().split(",")}
