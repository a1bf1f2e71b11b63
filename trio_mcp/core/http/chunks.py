"""Read HTTP bodies in chunked framing (RFC 9112, 7.1), for both roles and without I/O.

The reader is strict.  If two readers of the same bytes disagree about the end of a body, a request or a response can be
smuggled past one of them.  So every line must end with CRLF and contain no control character.  This includes chunk
extensions and trailers, whose content is otherwise ignored.
"""

from __future__ import annotations

import math
import re
from enum import Enum

__all__ = ["ChunkError", "ChunkReader", "take"]


class ChunkError(Exception):
    """The body is malformed, or one of its lines is too long.  The message contains none of the received bytes."""


class _ChunkPart(Enum):
    SIZE = "the size of a chunk"
    CONTENT = "its content"
    AFTER = "the line break after it"
    TRAILER = "the fields after the last chunk"
    DONE = "done"


class ChunkReader:
    """Read the chunks of one body.

    Call `read` with the receive buffer each time bytes were appended to it.  The way the bytes are split changes
    neither the content nor the error.  A line may have `limit` bytes (`Limits.header_bytes`), and so may the whole
    trailer.
    """

    __slots__ = ("_limit", "_part", "_seen", "_trailer", "left")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._part = _ChunkPart.SIZE
        self._seen = 0  # bytes of the buffer already searched for a line end
        self._trailer = 0  # bytes of the trailer so far
        self.left = 0
        """Bytes of the current chunk that have not arrived."""

    @property
    def done(self) -> bool:
        """True after the end of the body.  The rest of the buffer belongs to the next message."""
        return self._part is _ChunkPart.DONE

    def read(self, buffer: bytearray, most: float = math.inf) -> bytes:
        """Remove about `most` bytes of the body from the front of the buffer, and return their content.

        Raises `ChunkError`.  Content before the error is returned first; the next call raises.
        """
        content = []
        rest = len(buffer) - most
        while self._part is not _ChunkPart.DONE and len(buffer) > rest:
            if self._part is _ChunkPart.CONTENT:
                data = take(buffer, self.left)
                self.left -= len(data)
                content.append(data)
                if self.left:
                    break
                self._part = _ChunkPart.AFTER
            try:
                line = self._line(buffer)
                if line is None:
                    break
                self._next(line)
            except ChunkError:
                if not any(content):
                    raise
                break
            self._seen = 0
            del buffer[: len(line) + 2]
        return b"".join(content)

    def _line(self, buffer: bytearray) -> bytes | None:
        end = buffer.find(b"\n", self._seen)
        whole = end > 0 and buffer[end - 1] == 0x0D
        length = end - whole if end >= 0 else len(buffer) - buffer.endswith(b"\r")
        if self._trailer + length > self._limit:
            which = "trailer" if self._part is _ChunkPart.TRAILER else "header of a chunk"
            raise ChunkError(f"the {which} has more than {self._limit} bytes (Limits.header_bytes)")
        if whole:
            return bytes(buffer[:length])
        if end >= 0 or (self._part is _ChunkPart.AFTER and length):
            raise ChunkError(_FAULTS[self._part])
        self._seen = len(buffer)
        return None

    def _next(self, line: bytes) -> None:
        """Process one line.  If this raises, the state is unchanged."""
        match = _LINES[self._part].fullmatch(line)
        if match is None:
            raise ChunkError(_FAULTS[self._part])
        if self._part is _ChunkPart.SIZE:
            self.left = int(match[1], 16)
            self._part = _ChunkPart.CONTENT if self.left else _ChunkPart.TRAILER
        elif self._part is _ChunkPart.AFTER:
            self._part = _ChunkPart.SIZE
        elif line:
            self._trailer += len(line) + 2
        else:
            self._part = _ChunkPart.DONE


_LINES = {
    _ChunkPart.SIZE: re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*+(?:;[\t\x20-\x7e\x80-\xff]*+)?"),
    _ChunkPart.AFTER: re.compile(rb""),
    _ChunkPart.TRAILER: re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t\x20-\x7e\x80-\xff]*+)?"),
}
_FAULTS = {
    _ChunkPart.SIZE: "a chunk must begin with its size in hexadecimal digits and CRLF",
    _ChunkPart.AFTER: "a chunk must end with CRLF after as many bytes as its size says",
    _ChunkPart.TRAILER: "a field after the last chunk is malformed or does not end with CRLF",
}


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
