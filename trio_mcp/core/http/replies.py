"""HTTP/1.1 replies from bytes, for a client and without I/O.

`ReplyReader` takes what a server sends in answer to one request and gives the head, and the body as it comes.  Any
chunking of the bytes gives the same bytes in the end, and the same fault.

h11 is not used.  A parser for each reply, and the request that it must be told of, cost more than all the rest of a
small call; and of HTTP/1.1 a client reads no more than a status line, fields, and a body in one of three framings.

A client reads leniently what harms nobody (lines that end with a bare LF, fields that go on in the next line), and is
strict about where a reply ends.  Where two readers could differ about that, the connection is not used again; where it
cannot be known, the reply is broken.  A fault is a `RemoteProtocolError`, and says nothing of what came: it may be a
secret.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from trio_mcp.core.errors import RemoteProtocolError, shown
from trio_mcp.core.http.chunks import ChunkError, ChunkReader, take
from trio_mcp.core.http.fields import Headers
from trio_mcp.core.jsonrpc import Limits

__all__ = ["ReplyHead", "ReplyReader"]


class ReplyHead(NamedTuple):
    status: int
    headers: Headers


class _ReplyPart(Enum):
    """Where in the reply we are."""

    HEAD = "head"
    LENGTH = "a body of a known length"
    CLOSE = "a body that ends with the connection"
    CHUNKS = "a body in chunks"
    DONE = "done"


class ReplyReader:
    """The reply to one request.

    Call `head` after each `feed` until it gives one, then `body` in the same way until it is `done`.  `bodiless` tells
    that the request was one whose reply has no body, whatever its head says: HEAD, or CONNECT.
    """

    __slots__ = (
        "_bodiless", "_buffer", "_chunks", "_ended", "_keep", "_left", "_lines", "_most", "_part", "_seen", "began",
    )  # fmt: skip

    def __init__(self, limits: Limits, *, bodiless: bool = False) -> None:
        self._most = limits.header_bytes
        self._bodiless = bodiless
        self._buffer = bytearray()
        self._seen = 0  # bytes of it in which no line, or no head, ends
        self._lines = 0  # bytes of heads so far
        self._left = 0  # bytes of the body, or of the chunk at hand, that have not come
        self._part = _ReplyPart.HEAD
        self._chunks: ChunkReader | None = None
        self._ended = False
        self._keep = False
        self.began = False
        """Whether a single byte of it has come."""

    def feed(self, data: bytes) -> None:
        """What came; nothing is the end of the connection."""
        self._buffer += data
        if data:
            self.began = True
        else:
            self._ended = True

    @property
    def done(self) -> bool:
        """All of the reply was given out."""
        return self._part is _ReplyPart.DONE

    @property
    def ready(self) -> bool:
        """Whether there may be something to give out without more being fed."""
        return bool(self._buffer) or self._ended or self.done

    @property
    def surplus(self) -> bool:
        """Whether something has come that was not given out."""
        return bool(self._buffer)

    @property
    def length(self) -> int:
        """How many bytes of the body are still to be given out at least."""
        return self._left

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another request: this is done, and nothing else has come."""
        return self.done and self._keep and not self._buffer and not self._ended

    # The head.

    def head(self) -> ReplyHead | None:
        """The head of the reply, once all of it is there; those of informational replies are skipped."""
        while (raw := self._raw_head()) is not None:
            minor, status, headers = _parse(raw)
            if status == 101:
                raise RemoteProtocolError("it changed to another protocol (101), which nobody had asked for")
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
            raise RemoteProtocolError(f"what came is no HTTP reply{'; it speaks TLS, so use https://' if tls else ''}")
        match = _BLANK.search(buffer, max(0, self._seen - 2))
        end = 0 if match is None else match.end()
        del match  # while it is there, the buffer cannot shrink
        # Informational replies count too, or somebody could send them for ever.
        if self._lines + (end or len(buffer)) > self._most:
            raise RemoteProtocolError(f"the head of the reply has more than {self._most} bytes (Limits.header_bytes)")
        self._seen = 0 if end else len(buffer)
        self._lines += end
        return take(self._buffer, end) if end else None

    def _frame(self, minor: str, status: int, headers: Headers) -> None:
        """How the body is framed: RFC 9112, 6.3."""
        coding, length = headers.get("Transfer-Encoding"), headers.get("Content-Length")
        # What HTTP/1.0 calls keep-alive is not the same everywhere.
        self._keep = minor != "0" and "close" not in _listed(headers.get("Connection", ""))
        if self._bodiless or status in (204, 304):
            self._part = _ReplyPart.DONE
        elif coding is not None:
            if coding.lower() != "chunked":
                raise RemoteProtocolError(f"the reply has the Transfer-Encoding {shown(coding)}; only chunked is read")
            # "A Transfer-Encoding ... overrides the Content-Length", which "ought to be handled as an error"; and 1.0
            # has none.  Somebody before us may have read the other way.
            self._keep = self._keep and length is None and minor != "0"
            self._part = _ReplyPart.CHUNKS
            self._chunks = ChunkReader(self._most)
        elif length is not None:
            if not _LENGTH.fullmatch(length):  # several that differ are a list here
                raise RemoteProtocolError("the Content-Length of the reply is not one number")
            self._left = int(length)
            self._part = _ReplyPart.LENGTH if self._left else _ReplyPart.DONE
        else:
            self._keep = False
            self._part = _ReplyPart.CLOSE

    # The body.

    def body(self) -> bytes:
        """What has come of the body since; nothing if that is nothing yet, or all of it was given out."""
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
    """The minor version, the status and the fields of a head."""
    text = raw.decode("latin-1")
    if "\0" in text or text.count("\r") != text.count("\r\n"):
        raise RemoteProtocolError("the head of the reply has a control character in it")
    if "\n " in text or "\n\t" in text:
        text = _FOLD.sub(" ", text)  # RFC 9112, 5.2: "replace each received obs-fold with one or more SP octets"
    first, *lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    match = _STATUS.fullmatch(first)
    if match is None:
        raise RemoteProtocolError("what came is no reply of HTTP/1.1: its status line is malformed")
    fields = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or _TOKEN.fullmatch(name) is None:
            raise RemoteProtocolError("a field of the reply is malformed; it has a name, a colon right behind it")
        fields.append((name, value))
    return match[1], int(match[2]), Headers(fields)


def _listed(field: str) -> set[str]:
    return {each.strip() for each in field.lower().split(",")}
