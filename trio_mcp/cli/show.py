"""``trio-mcp show``: a recording as a sequence diagram, on the terminal, as JSON, or as one page for a browser.

The page loads nothing: its style, its script and the frames are in one file, and its policy forbids connections.
"""

from __future__ import annotations

import argparse
import json
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trio_mcp.cli.exchange import DiagramRow, as_json, counts, matching, rows_of
from trio_mcp.cli.output import Output
from trio_mcp.cli.recording import Recording, read_recording
from trio_mcp.core.errors import UsageError, printable

__all__ = ["add_arguments", "page", "run"]

_TIME = 9  # columns
_COLOURS = {"ok": "good", "error": "bad", "cancelled": "warn", "open": "warn"}
_MARKS = {"ok": "✓", "error": "✗", "cancelled": "⊘", "open": "…"}
_PLAIN = ("stderr", "end", "http")  # no message: no arrow


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recording of tap, or a transcript of trio_mcp.testing")
    parser.add_argument(
        "--method", action="append", default=[], metavar="PATTERN", help="only these methods, such as tools/*"
    )
    parser.add_argument("--full", action="store_true", help="show whole frames, and HTTP")
    parser.add_argument("--html", metavar="OUT", help="write a page for a browser")
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(arguments: argparse.Namespace) -> int:
    recording = read_recording(arguments.file)
    rows = matching(rows_of(recording), arguments.method)
    if arguments.html:
        _write_page(arguments.html, recording, rows)
        return 0
    output = Output(arguments.json)
    if output.as_json:
        output.json({"about": recording.about, "counts": counts(rows), "frames": [as_json(row) for row in rows]})
        return 0
    _diagram(recording, rows, output, full=arguments.full)
    return 0


# The page.


def page(recording: Recording, rows: Sequence[DiagramRow]) -> str:
    """Return the page as text.  The numbers of rows are positions in `rows`, so all rows must be given."""
    value = {"about": recording.about, "counts": counts(rows), "rows": [as_json(row) for row in rows]}
    text = json.dumps(value, separators=(",", ":")).replace("<", r"\u003c")  # no text of a frame can end the script
    return Path(__file__).with_name("show.html").read_text(encoding="utf-8").replace("/*DATA*/", text)


def _write_page(path: str, recording: Recording, rows: list[DiagramRow]) -> None:
    kept = {id(row) for row in rows}
    for number, row in enumerate(rows):
        row.number = number
        if row.answer is not None and id(row.answer) not in kept:
            row.answer = None
    try:
        Path(path).write_text(page(recording, rows), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    sys.stderr.write(f"{path}: {len(rows)} frames; open it in a browser\n")


# The terminal.


def _diagram(recording: Recording, rows: Sequence[DiagramRow], output: Output, *, full: bool) -> None:
    about = recording.about
    output.title(" · ".join(str(about[key]) for key in ("server", "kind", "began") if about.get(key)) or "an exchange")
    inner = output.width - _TIME - 3  # between the two lanes; the last column stays empty
    output.line(output.painted(f"{'':{_TIME}}{'client':<{inner - 4}}server", "dim"))
    for row in rows:
        if full or not _is_routine(row):
            output.line(_drawn(row, inner, output))
        if full and row.frame is not None:
            _unfold(row.frame, output)
    found = counts(rows)
    words = [f"{number} {_COUNTED.get(name, name)}" for name, number in found.items()]
    if found["requests"] == 1:
        words[0] = "1 request"
    output.line(f"{', '.join(words)}; {rows[-1].at if rows else 0:.3f} s")


_COUNTED = {"ok": "answered", "error": "failed", "open": "without an answer"}


def _is_routine(row: DiagramRow) -> bool:
    """HTTP without a message is of interest only if it is an error or ends a request."""
    return row.status != "error" and (row.kind == "http" or (row.kind == "end" and row.title == "HTTP"))


def _drawn(row: DiagramRow, inner: int, output: Output) -> str:
    """One row: the time, the lane of the client, an arrow with its words, the lane of the server."""
    title, rest = _words(row)
    room = inner - 5
    title = _cut(title, room)
    rest = _cut(f" {rest}", room - _width(title)) if rest and room - _width(title) > 4 else ""
    fill = (" " if row.kind in _PLAIN else "─") * (inner - 4 - _width(title + rest))
    colour = _colour(row)
    label = output.painted(title, colour) + output.painted(rest, "dim")
    lane = output.painted("│", "dim")
    if row.kind in _PLAIN:
        body = f"  {label}{fill}  " if row.sender == "client" else f"  {fill}{label}  "
    elif row.sender == "client":
        body = f"{output.painted('─ ', colour)}{label}{output.painted(f' {fill}▶', colour)}"
    else:
        body = f"{output.painted(f'◀{fill} ', colour)}{label}{output.painted(' ─', colour)}"
    return f"{output.painted(f'{row.at:{_TIME - 2}.3f}  ', 'dim')}{lane}{body}{lane}"


def _words(row: DiagramRow) -> tuple[str, str]:
    """The title and the rest of a row."""
    id = "" if row.id is None else f" #{printable(str(row.id))}"
    marks = row.kind == "answer" or (row.kind == "request" and row.status != "ok")
    mark = f"{_MARKS[row.status]} " if marks and row.status in _MARKS else ""
    took = f" {_seconds(row.seconds)}" if row.kind == "answer" and row.seconds is not None else ""
    return f"{mark}{printable(row.title)}{id}{took}", printable(row.summary)


def _colour(row: DiagramRow) -> str:
    if row.kind in ("request", "answer"):
        return _COLOURS.get(row.status, "name")
    if row.status == "error" or row.kind == "text":
        return "bad"
    return {"cancelled": "warn", "stderr": "warn", "progress": "note"}.get(row.kind, "dim")


def _unfold(frame: Any, output: Output) -> None:
    text = frame if isinstance(frame, str) else json.dumps(frame, indent=2, ensure_ascii=False)
    for line in text.split("\n"):
        output.line(" " * (_TIME + 2) + output.painted(line, "dim"))


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms" if value < 0.1 else f"{value * 1000:.0f} ms"


def _width(text: str) -> int:
    """The columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(unicodedata.combining(each) > 0 for each in text)


def _cut(text: str, room: int) -> str:
    """The text, cut to this many columns."""
    if _width(text) <= room:
        return text
    while _width(text) > room - 1:
        text = text[: min(len(text) - 1, room - 1)]
    return f"{text}…"
