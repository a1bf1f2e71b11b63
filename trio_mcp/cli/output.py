"""What commands write: JSON or lines for people, in the width of the terminal; colours only on a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from trio_mcp.core.errors import printable

__all__ = ["Output", "ReportLines", "compact"]

_CODES = {"title": "1", "name": "1;36", "dim": "2", "bad": "31", "good": "32", "warn": "33", "note": "36"}
_NARROWEST = 40
_BAR = 30


def compact(value: object, limit: int = 60) -> str:
    """Return a value as JSON on one line, cut to `limit` characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class Output:
    """Writes the result of a command to standard output."""

    def __init__(self, as_json: bool, file: TextIO | None = None) -> None:
        self._file = sys.stdout if file is None else file
        self.as_json = as_json
        self._colours = self._file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.width = max(_NARROWEST, shutil.get_terminal_size((100, 24)).columns)

    def json(self, value: object) -> None:
        """Write a value as JSON: indented on a terminal, on one line otherwise."""
        indent = 2 if self._file.isatty() else None
        self._file.write(json.dumps(value, ensure_ascii=False, indent=indent) + "\n")

    def line(self, text: str = "") -> None:
        self._file.write(f"{text}\n")

    def painted(self, text: str, colour: str) -> str:
        """Return the text in this colour, if the output has colours.  Control characters of servers are replaced."""
        clean = printable(text)
        return f"\x1b[{_CODES[colour]}m{clean}\x1b[0m" if self._colours else clean

    def title(self, text: str) -> None:
        self.line(self.painted(text, "title"))

    def paragraph(self, text: str, indent: int, colour: str | None = None) -> None:
        """Write a text in lines of the width of the terminal; paragraphs of the text stay apart."""
        for part in text.strip().splitlines():
            for row in textwrap.wrap(printable(part), self.width - indent - 1) or [""]:
                self.line(" " * indent + (self.painted(row, colour) if colour else row))

    def table(self, rows: Iterable[Sequence[str]], indent: int = 2) -> None:
        """Write rows in columns; the last column is wrapped."""
        cells = [[printable(cell) for cell in row] for row in rows]
        if not cells:
            return
        widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]) - 1)]
        start = indent + sum(width + 2 for width in widths)
        for row in cells:
            head = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
            room = max(_NARROWEST // 2, self.width - start - 1)
            first, *rest = textwrap.wrap(row[-1], room) or [""]
            self.line((" " * indent + self.painted(head, "name") + first).rstrip())
            for more in rest:
                self.line(" " * start + more)


class ReportLines:
    """Shows progress and log messages on standard error: a bar on a terminal, lines otherwise."""

    def __init__(self, quiet: bool = False) -> None:
        self._file = sys.stderr
        self._quiet = quiet
        self._redraws = self._file.isatty() and os.environ.get("TERM") != "dumb"
        self._open = False  # the line of the cursor has a bar
        self._quarter = -1

    def progress(self, progress: float, total: float | None, message: str | None) -> None:
        if self._quiet:
            return
        share = min(1.0, progress / total) if total else 0.0
        full, count = int(share * _BAR), f"{progress:g}" + (f" of {total:g}" if total else "")
        words = f"{count} {printable(message)}" if message else count
        if self._redraws:
            self._file.write(f"\r\x1b[K{'━' * full}{'─' * (_BAR - full)} {words}"[: shutil.get_terminal_size().columns])
            self._open = True
        elif not total or int(share * 4) > self._quarter:
            self._quarter = int(share * 4)
            self._file.write(f"progress: {words}\n")
        self._file.flush()

    def log(self, params: Any) -> None:
        if not self._quiet:
            self.settle()
            data = params.data if isinstance(params.data, str) else compact(params.data, 500)
            where = f"{params.logger}: " if params.logger else ""
            self._file.write(f"{params.level}: {printable(where + data)}\n")
            self._file.flush()

    def settle(self) -> None:
        """End the line of the bar, if there is one."""
        if self._open:
            self._open = False
            self._file.write("\n")
            self._file.flush()
