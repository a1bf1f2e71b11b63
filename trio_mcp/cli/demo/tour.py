"""The order of the demo, and its output: a client of the newest revision, one of an old revision, and all five at once.

The first two clients start the same command and run the same code.  Only the messages differ: the demo shows their
names, read from the bytes on the wire.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

import trio

from trio_mcp import Client, __version__
from trio_mcp.cli.demo import scenes, server
from trio_mcp.cli.target import until_signal
from trio_mcp.testing import Line, Transcript
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.types import ClientOptions

__all__ = ["WIDTH", "Screen", "message_names", "run"]

OLD = "2025-06-18"  # the oldest in which a server can ask the user

SCENES: tuple[tuple[str, scenes.Scene, tuple[object, ...]], ...] = (
    ("A typed call", scenes.a_typed_call, (server.Star, server.find)),
    ("A long call, and its progress", scenes.a_long_call, (server.expose,)),
    ("A call that takes too long: the timeout is a scope, and the server stops too", scenes.a_timeout, ()),
    ("A question to the user, in the middle of a call", scenes.a_question, (server.Booking, server.reserve)),
    ("A subscription: the client sees a change at once", scenes.a_change, (server.report,)),
)

WIDTH = 79
"""Characters of a line at most, in a terminal of 80 columns: some terminals wrap a full line."""

_LABEL = 6
_BAR = 30
_FIRM = "\xa0"  # a space at which lines are not broken; written as a normal space: not every terminal has it
_COLOURS = {"title": "1;7", "head": "1;36", "label": "2", "code": "0", "value": "1;32", "wire": "2", "note": "3"}
_FANCY = {"rule": "│", "full": "━", "rest": "─", "out": "→", "in": "←", "times": "×"}
_PLAIN = {"rule": "|", "full": "#", "rest": "-", "out": "->", "in": "<-", "times": "x"}


class Screen:
    """Writes to `file` and flushes each line: colours and a growing bar in a terminal, plain lines in a pipe."""

    def __init__(self, file: TextIO, environ: Mapping[str, str]) -> None:
        self._file = file
        self._redraws = file.isatty() and environ.get("TERM") != "dumb"
        self._colours = self._redraws and not environ.get("NO_COLOR")  # see no-color.org
        self.glyphs = _FANCY
        try:
            "".join(_FANCY.values()).encode(file.encoding or "ascii")
        except (LookupError, UnicodeError):
            self.glyphs = _PLAIN
        self._growing = False  # the line of the cursor contains a bar
        self._quarter = 0  # the last quarter of progress that was written, if the bar cannot be redrawn

    def title(self, text: str) -> None:
        self._write("", self._painted(f" {text}".ljust(WIDTH), "title") if self._colours else f"== {text}")

    def head(self, text: str) -> None:
        self._write("", self._painted(text, "head"))

    def note(self, text: str) -> None:
        self._write(*(self._painted(line, "note") for line in textwrap.wrap(text, WIDTH)))

    def code(self, label: str, *objects: Any, first: int = 0) -> None:
        """Show the source of these functions and classes, from the line `first`."""
        for each in objects:
            try:
                source = inspect.getsource(each)
            except OSError:  # an installation without sources
                continue
            lines = textwrap.dedent("".join(source.splitlines(keepends=True)[first:])).splitlines()
            self._labelled(label, lines, "code")

    def print(self, value: object) -> None:
        """Show a value that the client prints."""
        self.say("prints", str(value), "value")

    def say(self, label: str, text: str, colour: str = "wire") -> None:
        lines = textwrap.wrap(text, WIDTH - _LABEL - 3, break_on_hyphens=False) or [""]
        self._labelled(label, [line.replace(_FIRM, " ") for line in lines], colour)

    def bar(self, progress: float, total: float | None, message: str | None) -> None:
        """Show a progress report of a call; if the bar cannot be redrawn, one line for each quarter."""
        share = min(1.0, progress / total) if total else 0.0
        full, quarter = int(share * _BAR), int(share * 4)
        text = f"{self.glyphs['full'] * full}{self.glyphs['rest'] * (_BAR - full)} {progress:g} of {total or '?'}"
        if self._redraws:
            self._file.write(f"\r{self._with_rule('bar', text, 'value')}")
            self._file.flush()
            self._growing = True
        elif quarter > self._quarter:
            self._labelled("bar", [text], "code")
            self._quarter = quarter

    def settle(self) -> None:
        """End the line of the bar, if there is one; the next output starts on a new line."""
        self._quarter = 0
        if self._growing:
            self._growing = False
            self._file.write("\n")
            self._file.flush()

    def _labelled(self, label: str, lines: Iterable[str], colour: str) -> None:
        for number, line in enumerate(lines):
            self._write(self._with_rule("" if number else label, line, colour))

    def _with_rule(self, label: str, line: str, colour: str) -> str:
        before = self._painted(f"{label:>{_LABEL}} {self.glyphs['rule']}", "label")
        return f"{before} {self._painted(line, colour)}" if line else before

    def _write(self, *lines: str) -> None:
        self.settle()
        for line in lines:
            self._file.write(f"{line}\n")
            self._file.flush()

    def _painted(self, text: str, colour: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self._colours else text


class JsonScreen(Screen):
    """Writes a JSON line for each part: its kind, which is the label if there is one, and its text."""

    def title(self, text: str) -> None:
        self.say("title", text)

    def head(self, text: str) -> None:
        self.say("head", text)

    def note(self, text: str) -> None:
        self.say("note", text)

    def say(self, label: str, text: str, colour: str = "wire") -> None:
        self._write(json.dumps({"kind": label, "text": text.replace(_FIRM, " ")}))

    def bar(self, progress: float, total: float | None, message: str | None) -> None:
        self.say("progress", f"{progress:g} of {total or '?'}")

    def _labelled(self, label: str, lines: Iterable[str], colour: str) -> None:
        self.say(f"code of {label}", "\n".join(lines))


def run(*, as_json: bool = False) -> int:
    """Run the demo on standard output, and return the exit status of the process."""
    screen = (JsonScreen if as_json else Screen)(sys.stdout, os.environ)
    status = 0
    try:
        status = trio.run(_until_stopped, screen)
    except* BrokenPipeError:
        # The reader has closed the pipe.  With /dev/null in its place, Python's last flush raises no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    if status >= 128:
        screen.settle()
    return status


async def _until_stopped(screen: Screen) -> int:
    """Run the tour until a signal ends it in order: clients are closed, and the processes of their servers awaited."""
    async with until_signal() as stopped:
        await _tour(screen)
    return 128 + stopped.signal if stopped.signal else 0


async def _tour(screen: Screen) -> None:
    screen.title(f"trio_mcp {__version__}: one server, every revision of MCP")
    screen.note(
        "The client starts the server as a child process, talks to it over pipes, and does five things. "
        "The code that you see is the code that runs, and its output comes from the server."
    )
    await _visit(screen, "A client of the newest revision", {}, with_code=True)
    await _visit(screen, f"A client of {OLD}, with the same code", {"revision": OLD})
    screen.title("All five revisions over HTTP, at one port, as a task of this program")
    screen.code("both", scenes.every_revision, first=1)
    async with open_nursery() as nursery:
        await scenes.every_revision(nursery, screen.print)
        nursery.cancel_scope.cancel()
    screen.title("The end")
    screen.note("A host starts the same server with: python -m trio_mcp.cli.demo.server")
    screen.note("A project of your own: trio-mcp new my-notes")


async def _visit(screen: Screen, title: str, options: ClientOptions, *, with_code: bool = False) -> None:
    wire, fill_in = Transcript(), scenes.fills_in(screen.print)

    async def play(client: Client) -> None:
        for attempt in client.negotiation.attempts:
            screen.say("tried", f"{attempt.tried}: {attempt.answered}")
        screen.say("chosen", f"{client.revision}, with {client.server['name']} {client.server['version']}")
        screen.say("found", ", ".join([tool.name for tool in await client.list_tools()]))
        screen.say("wire", message_names(wire, screen.glyphs))
        for heading, scene, shown in SCENES:
            before = len(wire)
            screen.head(heading)
            if with_code:
                screen.code("server", *shown)
                screen.code("client", *([fill_in] if scene is scenes.a_question else []))
                screen.code("client", scene, first=1)
            await scene(client, screen.print, screen.bar)
            screen.settle()
            screen.say("wire", message_names(wire[before:], screen.glyphs))

    screen.title(title)
    if with_code:
        screen.code("client", scenes.a_visit, first=1)
    options = {**options, "elicitation": fill_in, "tap": wire.tap}
    words = {name: repr(each) if isinstance(each, str) else each.__name__ for name, each in options.items()}  # type: ignore[attr-defined]
    screen.say("with", ", ".join(f"{name}={word}" for name, word in words.items()))
    await scenes.a_visit(play, **options)


def message_names(lines: Iterable[Line], glyphs: Mapping[str, str]) -> str:
    """Return the names of these messages in order: ``→ tools/call  ← progress ×24  ← result``.  Lines are not broken
    inside a name."""
    words = []
    for word, same in itertools.groupby(_words(lines, glyphs)):
        count = len(list(same))
        words.append(word if count == 1 else f"{word}{_FIRM}{glyphs['times']}{count}")
    return "  ".join(words)


def _words(lines: Iterable[Line], glyphs: Mapping[str, str]) -> Iterator[str]:
    for line in lines:
        message: Any = line.message
        if "method" in message:
            word = message["method"].removeprefix("notifications/")
        elif "error" in message:
            word = f"error {message['error']['code']}"
        else:
            kind = (message["result"] or {}).get("resultType", "complete")
            word = "result" if kind == "complete" else kind
        yield f"{glyphs['out' if line.mark == '>' else 'in']}{_FIRM}{word}"
