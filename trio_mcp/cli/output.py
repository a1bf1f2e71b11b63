"""What commands write: JSON or lines for people, in the width of the terminal; colours only on a terminal."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trio_mcp.core.errors import UsageError, printable

if TYPE_CHECKING:
    from trio_mcp.core.task_states import TaskState

__all__ = ["Output", "ReportLines", "compact", "few_names", "headline", "write_file"]

_CODES = {"title": "1", "name": "1;36", "dim": "2", "bad": "31", "good": "32", "warn": "33", "note": "36"}
_NARROWEST = 40
_BAR = 30
_WIDEST = 40  # a longer cell has its row for itself, so that one long name does not widen all rows
_NAMES = 30  # in an error


def compact(value: object, limit: int = 60) -> str:
    """Return a value as JSON on one line, cut to `limit` characters."""
    text = json.dumps(value, ensure_ascii=False)
    return _escaped(text if len(text) <= limit else f"{text[: limit - 1]}…")


def _escaped(text: str) -> str:
    """Write the control characters in a JSON text as escapes, so that a terminal does not obey them."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)


def few_names(names: Iterable[str]) -> str:
    """Return names for an error, in their order, without the last ones if they are many; empty if there are none."""
    every = sorted(names)
    more = f" and {len(every) - _NAMES} more" if len(every) > _NAMES else ""
    return ", ".join(every[:_NAMES]) + more


def headline(server: Mapping[str, Any], revision: str) -> str:
    """The name and the version of a server, as it states them, and the revision of a connection to it."""
    name, version = server.get("title") or server.get("name", "a server"), server.get("version")
    return f"{name} {version} ({revision})" if version else f"{name} ({revision})"


def write_file(path: Path, data: bytes) -> None:
    """Write a file that the user has named.  Raises `UsageError`."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


class Output:
    """Writes the result of a command to standard output."""

    def __init__(self, as_json: bool) -> None:
        self._file = sys.stdout
        if isinstance(self._file, io.TextIOWrapper):  # a lone surrogate, or a terminal that is not UTF-8
            self._file.reconfigure(errors="backslashreplace")
        self.as_json = as_json
        self._on_terminal = self._file.isatty()
        self._colours = self._on_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.width = max(_NARROWEST, shutil.get_terminal_size((100, 24)).columns)

    def json(self, value: object) -> None:
        """Write a value as JSON: indented on a terminal, on one line otherwise."""
        text = json.dumps(value, ensure_ascii=False, indent=2 if self._on_terminal else None)
        self._file.write(f"{_escaped(text) if self._on_terminal else text}\n")

    def line(self, text: str = "") -> None:
        """Write a line of this command; `content` is for texts of servers."""
        self._file.write(f"{text}\n")

    def content(self, text: str) -> None:
        """Write a text of a server: as it is into a pipe, and without control characters to a terminal."""
        if self._on_terminal:
            text = "\n".join(map(printable, text.replace("\r\n", "\n").split("\n")))
        self.line(text)

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
        widths = [
            max((len(row[at]) for row in cells if len(row[at]) <= _WIDEST), default=0)
            for at in range(len(cells[0]) - 1)
        ]
        start = indent + sum(width + 2 for width in widths)
        for row in cells:
            head = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
            room = max(_NARROWEST // 2, self.width - start - 1)
            rows_of_last = textwrap.wrap(row[-1], room) or [""]
            first = rows_of_last.pop(0) if indent + len(head) <= start else ""
            self.line((" " * indent + self.painted(head, "name") + first).rstrip())
            for more in rows_of_last:
                self.line(" " * start + more)


class ReportLines:
    """Shows progress, log messages and states of a task on standard error: a bar on a terminal, lines otherwise."""

    def __init__(self, quiet: bool = False) -> None:
        self._file = sys.stderr
        self._quiet = quiet
        self._redraws = self._file.isatty() and os.environ.get("TERM") != "dumb"
        self._open = False  # the line of the cursor has a bar
        self._quarter = -1
        self._message: str | None = ""  # of the last state of a task

    def progress(self, progress: float, total: float | None, message: str | None) -> None:
        if self._quiet:
            return
        share = min(1.0, progress / total) if total else 0.0
        full, count = int(share * _BAR), f"{progress:g}" + (f" of {total:g}" if total else "")
        words = f"{count} {printable(message)}" if message else count
        if self._redraws:
            self._redraw(f"{'━' * full}{'─' * (_BAR - full)} {words}")
        elif not total or int(share * 4) > self._quarter:
            self._quarter = int(share * 4)
            self._file.write(f"progress: {words}\n")
        self._file.flush()

    async def state(self, state: TaskState) -> None:
        """Show that the task of a call works, with its message; its questions and its end are shown by others."""
        if self._quiet or state.status.value != "working" or state.message == self._message:
            return
        self._message = state.message
        text = printable(f"task {state.id}: working  {state.message or ''}".rstrip())
        if self._redraws:
            self._redraw(text)
        else:
            self._file.write(f"{text}\n")
        self._file.flush()

    def _redraw(self, text: str) -> None:
        self._file.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns]}")
        self._open = True

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
