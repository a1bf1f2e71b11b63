"""Bytes into lines, each of which is a message."""

from __future__ import annotations

from trio_mcp.core.glimpse import KEPT, MessageKind, beginning, ending
from trio_mcp.core.jsonrpc import InvalidMessage, too_long

__all__ = ["LineFramer"]

_SHORT = 4096  # bytes that are copied sooner than anything that would spare it is done


class LineFramer:
    """Bytes into lines, for stdio and every other stream whose messages end with a newline.

    Any chunking gives the same lines, in time linear in the bytes.  What is held is never more than one line, and never
    more than `limit` bytes of it, or the few KiB at the end of a longer one in which its id may stand.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Of the line: what came in long pieces, which are copied once, at its end; and what came in short ones since.
        self._pieces: list[bytes] = []
        self._line = bytearray()
        self._length = 0
        self._skipping = False  # the line is too long, and the rest is dropped
        self._nameless: MessageKind | None = (
            None  # of a line that is skipped and not reported: its id may be at its end
        )

    @property
    def held(self) -> int:
        """Bytes of a line whose end has not come."""
        return self._length

    def feed(self, data: bytes) -> list[bytes | InvalidMessage]:
        """The lines that `data` completes, without their terminators (LF or CRLF); blank ones are skipped.

        A line longer than the limit is one `InvalidMessage`: as soon as it is too long, or, if it begins as a message
        whose id may follow, at its end.
        """
        lines: list[bytes | InvalidMessage] = []
        end = data.find(b"\n")  # leaps, where `split` looks at every byte
        if end < 0:
            ended, rest = [], data
        elif end == len(data) - 1:
            ended, rest = [data[:end]], b""
        else:
            *ended, rest = data.split(b"\n")
        for piece in ended:
            # Nearly all are whole, and end as an object does.
            if not self._length and not self._skipping and piece[-1:] == b"}" and len(piece) <= self._limit:
                lines.append(piece)
                continue
            if piece:
                self._extend(piece, lines)
            self._end(lines)
        if rest:
            self._extend(rest, lines)
        return lines

    def close(self) -> list[bytes | InvalidMessage]:
        """The stream has ended: a last line without a newline is handed over as if it had one.

        That is safe, since an object or array that was cut is never JSON, and kind to ``echo -n``.
        """
        lines: list[bytes | InvalidMessage] = []
        self._end(lines)
        return lines

    def _extend(self, piece: bytes, lines: list[bytes | InvalidMessage]) -> None:
        if self._skipping:
            if self._nameless is not None:
                self._line += piece[-KEPT:]
                if len(self._line) > 2 * KEPT:  # and not at once, or single bytes would take quadratic time
                    del self._line[:-KEPT]
            return
        self._length += len(piece)
        if len(piece) <= _SHORT:
            self._line += piece
        else:
            self._pieces += (bytes(self._line), piece) if self._line else (piece,)
            self._line.clear()
        # A CR at the end may turn out to be half of the terminator, so it does not count yet.
        if self._length > self._limit and self._length - (self._line or piece).endswith(b"\r") > self._limit:
            self._skip(lines)

    def _skip(self, lines: list[bytes | InvalidMessage]) -> None:
        line = self._gathered()
        self._skipping = True
        shape, id = beginning(line, self._limit)
        if shape is MessageKind.UNKNOWN or id is not None:
            lines.append(too_long(self._limit, shape, id))
        else:
            self._nameless = shape
            self._line += line[-KEPT:]

    def _end(self, lines: list[bytes | InvalidMessage]) -> None:
        line = self._gathered()
        if self._nameless is not None:
            lines.append(too_long(self._limit, self._nameless, ending(line)))
        elif line and not line.isspace():
            lines.append(line.removesuffix(b"\r"))
        self._skipping, self._nameless = False, None

    def _gathered(self) -> bytes:
        """What is held of the line; nothing is any more."""
        line = b"".join((*self._pieces, self._line))
        self._pieces.clear()
        self._line.clear()
        self._length = 0
        return line
