"""Split a byte stream into lines.  Each line is one message.

The framer knows only newlines and the size limit; `messages` parses the lines.  A line that exceeds the limit is not
kept, but its id is searched for, so that the error reply can name the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio_mcp.core as room  # it loads `unparsed` with the first line that is too long
from trio_mcp.core.messages import EDGE, InvalidMessage

if TYPE_CHECKING:
    from trio_mcp.core.unparsed import MessageKind

__all__ = ["LineFramer"]

_SHORT = 4096  # bytes; copying a piece up to this size costs less than avoiding the copy


class LineFramer:
    """Split bytes into lines, for stdio and every other stream whose messages end with a newline.

    The same bytes give the same lines in any chunks, in time linear in the bytes.  The framer holds at most one line,
    and at most `limit` bytes of it.  Of a longer line it holds only the last few KiB, which may contain the id.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The incomplete line: its long pieces, which are joined once at its end, then the short pieces since the last
        # long one.
        self._pieces: list[bytes] = []
        self._line = bytearray()
        self.held = 0
        """The number of bytes of the incomplete line."""
        self._skipping = False  # the line is too long, and the rest is dropped
        # The kind of a skipped line that is reported at its end, because the end may contain the id.
        self._skipped_kind: MessageKind | None = None

    def feed(self, data: bytes) -> list[bytes | InvalidMessage]:
        """Return the lines that `data` completes, without terminators (LF or CRLF).  Blank lines are skipped.

        A line longer than the limit becomes one `InvalidMessage`.  It is reported as soon as it is too long, or at its
        end if it begins like a message whose id may follow.
        """
        lines: list[bytes | InvalidMessage] = []
        end = data.find(b"\n")  # `find` is faster than `split`, which looks at every byte
        if end < 0:
            ended, rest = [], data
        elif end == len(data) - 1:
            ended, rest = [data[:end]], b""
        else:
            *ended, rest = data.split(b"\n")
        for piece in ended:
            # The fast path: nearly every piece is a whole line, and ends with the brace of an object.
            if not self.held and not self._skipping and piece[-1:] == b"}" and len(piece) <= self._limit:
                lines.append(piece)
                continue
            if piece:
                self._extend(piece, lines)
            self._end(lines)
        if rest:
            self._extend(rest, lines)
        return lines

    def close(self) -> list[bytes | InvalidMessage]:
        """Handle the end of the stream: a last line without a newline counts as a line.

        This is safe, because a truncated object or array is never valid JSON.  It helps users of ``echo -n``.
        """
        lines: list[bytes | InvalidMessage] = []
        self._end(lines)
        return lines

    def _extend(self, piece: bytes, lines: list[bytes | InvalidMessage]) -> None:
        if self._skipping:
            if self._skipped_kind is not None:
                self._line += piece[-EDGE:]
                if len(self._line) > 2 * EDGE:  # deleting at each piece would make single bytes take quadratic time
                    del self._line[:-EDGE]
            return
        self.held += len(piece)
        if len(piece) <= _SHORT:
            self._line += piece
        else:
            self._pieces += (bytes(self._line), piece) if self._line else (piece,)
            self._line.clear()
        # A CR at the end may be half of the terminator, so it does not count yet.
        if self.held > self._limit and self.held - (self._line or piece).endswith(b"\r") > self._limit:
            self._skip(lines)

    def _skip(self, lines: list[bytes | InvalidMessage]) -> None:
        line = self._take_line()
        self._skipping = True
        kind, id = room.beginning(line, self._limit)
        if kind is room.MessageKind.UNKNOWN or id is not None:
            lines.append(self._too_long(kind, id))
        else:
            self._skipped_kind = kind
            self._line += line[-EDGE:]

    def _end(self, lines: list[bytes | InvalidMessage]) -> None:
        line = self._take_line()
        if self._skipped_kind is not None:
            lines.append(self._too_long(self._skipped_kind, room.ending(line)))
        elif line and not line.isspace():
            lines.append(line.removesuffix(b"\r"))
        self._skipping, self._skipped_kind = False, None

    def _too_long(self, kind: MessageKind, id: int | str | None) -> InvalidMessage:
        return room.too_long(f"is longer than {self._limit} bytes (Limits.message_bytes)", kind, id)

    def _take_line(self) -> bytes:
        """Return the bytes of the incomplete line, and clear it."""
        line = b"".join((*self._pieces, self._line))
        self._pieces.clear()
        self._line.clear()
        self.held = 0
        return line
