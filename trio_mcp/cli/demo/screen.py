"""The output of the demo: colours and a growing bar in a terminal, plain lines in a pipe."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import TextIO

__all__ = ["FIRM", "WIDTH", "Screen"]

WIDTH = 79
"""Characters of a line at most, in a terminal of 80 columns: some terminals wrap a full line."""
FIRM = "\xa0"
"""A space at which lines are not broken.  It is written as a normal space, because not every terminal has it."""

_LABEL = 6
_BAR = 30
_RESET = "\x1b[0m"
_COLOURS = {"title": "1;7", "head": "1;36", "label": "2", "value": "1;32", "wire": "2", "note": "3"}
_LOOK = {"keyword": "35", "string": "33", "comment": "2;3", "decorator": "36"}
_TOKENS = re.compile(
    r"(?P<comment>#.*)|(?P<string>f?\"[^\"]*\")|(?P<decorator>^ *@[\w.]+)"
    r"|\b(?P<keyword>async|await|as|case|class|def|finally|for|if|in|match|not|raise|return|try|while|with)\b"
)
_FANCY = {"rule": "│", "full": "━", "rest": "─", "out": "→", "in": "←", "times": "×"}
_PLAIN = {"rule": "|", "full": "#", "rest": "-", "out": "->", "in": "<-", "times": "x"}


class Screen:
    """Writes to `file` and flushes each line, so that the user sees it at once."""

    def __init__(self, file: TextIO, environ: Mapping[str, str]) -> None:
        self._file = file
        self._redraws = file.isatty() and environ.get("TERM") != "dumb"
        self._colours = self._redraws and not environ.get("NO_COLOR")  # see no-color.org
        self.glyphs = _FANCY if _can_write(file, "".join(_FANCY.values())) else _PLAIN
        self._growing = False  # the line of the cursor contains a bar
        self._quarter = 0  # the last quarter of progress that was written, if the bar cannot be redrawn

    def title(self, text: str) -> None:
        self._write("")
        self._write(self._painted(f" {text}".ljust(WIDTH), "title") if self._colours else f"== {text}")

    def head(self, text: str) -> None:
        self._write("")
        self._write(self._painted(text, "head"))

    def note(self, text: str) -> None:
        for line in textwrap.wrap(text, WIDTH):
            self._write(self._painted(line, "note"))

    def code(self, label: str, *objects: object) -> None:
        """Show the source of these functions and classes."""
        for each in objects:
            self._lines(label, _source(each))

    def body(self, label: str, function: object) -> None:
        """Show the source of a function without its first line."""
        self._lines(label, textwrap.dedent(_source(function).partition("\n")[2]))

    def _lines(self, label: str, source: str) -> None:
        for number, line in enumerate(source.splitlines()):
            self._labelled("" if number else label, line, self._highlighted(line))

    def print(self, value: object) -> None:
        """Show a value that the client prints."""
        self._wrapped("prints", str(value), "value")

    def say(self, label: str, text: str) -> None:
        self._wrapped(label, text, "wire")

    def bar(self, progress: float, total: float | None, message: str | None) -> None:
        """Show a progress report of a call; if the bar cannot be redrawn, one line for each quarter."""
        share = min(1.0, progress / total) if total else 0.0
        full, quarter = int(share * _BAR), int(share * 4)
        bar = self.glyphs["full"] * full + self.glyphs["rest"] * (_BAR - full)
        text = f"{bar} {progress:g} of {total or '?'}"
        if self._redraws:
            self._file.write(f"\r{self._with_rule('bar', text, self._painted(text, 'value'))}")
            self._file.flush()
            self._growing = True
        elif quarter > self._quarter:
            self._labelled("bar", text, text)
            self._quarter = quarter

    def settle(self) -> None:
        """End the line of the bar, if there is one; the next output starts on a new line."""
        self._quarter = 0
        if self._growing:
            self._growing = False
            self._file.write("\n")
            self._file.flush()

    def _wrapped(self, label: str, text: str, colour: str) -> None:
        room = WIDTH - _LABEL - 3
        for number, wrapped in enumerate(textwrap.wrap(text, room, break_on_hyphens=False) or [""]):
            line = wrapped.replace(FIRM, " ")
            self._labelled("" if number else label, line, self._painted(line, colour))

    def _labelled(self, label: str, line: str, painted: str) -> None:
        self._write(self._with_rule(label, line, painted))

    def _with_rule(self, label: str, line: str, painted: str) -> str:
        before = self._painted(f"{label:>{_LABEL}} {self.glyphs['rule']}", "label")
        return f"{before} {painted}" if line else before

    def _write(self, line: str) -> None:
        self.settle()
        self._file.write(f"{line}\n")
        self._file.flush()

    def _painted(self, text: str, colour: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}{_RESET}" if self._colours else text

    def _highlighted(self, line: str) -> str:
        if not self._colours:
            return line
        return _TOKENS.sub(lambda found: f"\x1b[{_LOOK[found.lastgroup or '']}m{found[0]}{_RESET}", line)


def _source(each: object) -> str:
    try:
        return textwrap.dedent(inspect.getsource(each))  # type: ignore[arg-type]
    except OSError:  # an installation without sources
        return ""


def _can_write(file: TextIO, text: str) -> bool:
    try:
        text.encode(file.encoding or "ascii")
    except (LookupError, UnicodeError):
        return False
    return True
