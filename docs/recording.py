"""Record commands on a terminal, and draw them as an animated picture: ``python docs/recording.py``.

The picture is docs/recording.svg, which the README shows.  The commands run on a pseudo-terminal, in a new folder that
has the server of the README, slowed down so that its progress can be seen.  `tests/test_recording.py` runs them again,
and fails if the picture shows other texts.  Times and ports may differ.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from html import escape, unescape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PICTURE = Path(__file__).with_name("recording.svg")

COMMANDS = (
    "trio-mcp call weather.py forecast city=Oslo days=5",
    "trio-mcp call forecast city=Oslo -- trio-mcp tap -o talk.jsonl weather.py",
    "trio-mcp show talk.jsonl",
    "trio-mcp demo",
)
COLUMNS, LINES = 88, 26
WIDTH, HEIGHT, SIZE, EDGE = 7.8, 17, 13, 12  # of a character, a line, the font and the margin, in pixels
THINKING, READING, LINE = 0.8, 2.5, 0.11  # seconds before a command, after its output, and of each line at least
LONGEST = 0.4  # seconds that a pause of a command takes in the picture

STYLE = """\
text{font:SIZEpx ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#1f2328;white-space:pre}
.paper{fill:#f6f8fa;stroke:#d1d9e0}.ink{fill:#1f2328}.s1{font-weight:bold}.s2{fill:#656d76}.s3{font-style:italic}
.s7{fill:#f6f8fa}.s31{fill:#c4202b}.s32{fill:#167a34}.s33{fill:#8a5a00}.s36{fill:#0a5c9e}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.paper{fill:#0d1117;stroke:#30363d}.ink{fill:#e6edf3}
.s2{fill:#8d96a0}.s7{fill:#0d1117}.s31{fill:#ff7b72}.s32{fill:#56d364}.s33{fill:#e3b341}.s36{fill:#79c0ff}}"""


class Cell(NamedTuple):
    """A character, and its colour as in the escape sequence of a terminal."""

    char: str
    colour: str


class Row:
    """One line of the terminal from `begin` to `end`; None: as long as it is on the screen."""

    def __init__(self, number: int, begin: float, cells: Sequence[Cell]) -> None:
        self.number = number
        self.begin = begin
        self.end: float | None = None
        self.cells = tuple(cells)

    @property
    def text(self) -> str:
        return "".join(cell.char for cell in self.cells).rstrip()


class Terminal:
    """As much of a terminal as the commands need: colours, the return to the beginning of a line, and its erasure."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rows: list[Row] = []
        self._cells: list[Cell] = []
        self._at = self._number = 0
        self._colour = ""

    def write(self, text: str) -> None:
        """Show a text.  Each new line takes a moment, or the picture would be too fast to read."""
        for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
            if part == "\n":
                self._show()
                self._cells, self._at, self._number = [], 0, self._number + 1
                self.now += LINE
            elif part == "\r":
                self._at = 0
            elif part == "\x1b[K":
                del self._cells[self._at :]
            elif part.startswith("\x1b"):
                self._colour = "" if part == "\x1b[0m" else part[2:-1]
            else:
                self._cells[self._at : self._at + len(part)] = [Cell(each, self._colour) for each in part]
                self._at += len(part)
        self._show()

    def _show(self) -> None:
        last = self.rows[-1] if self.rows and self.rows[-1].number == self._number else None
        if not self._cells or (last is not None and last.cells == tuple(self._cells)):
            return
        if last is not None:
            last.end = self.now
        self.rows.append(Row(self._number, self.now, self._cells))


def recorded(commands: Sequence[str]) -> Terminal:
    """Run the commands, and return a terminal that has shown them."""
    terminal = Terminal()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "weather.py").write_text(_server())
        python = Path(sys.executable).with_name("python")  # the picture has its name, and `pytest` may use `python3`
        for program, command in (("python", ""), ("trio-mcp", " -m trio_mcp")):
            file = folder / program
            file.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{python}"{command} "$@"\n')
            file.chmod(0o755)
        for number, command in enumerate(commands):
            terminal.write(("\n" if number else "") + "\x1b[32m$\x1b[0m ")
            terminal.now += THINKING
            terminal.write(f"\x1b[1m{command}\x1b[0m\n")
            for pause, text in _output(command.split(), folder):
                terminal.now += min(pause, LONGEST)
                terminal.write(text)
            terminal.now += READING
    return terminal


def _server() -> str:
    """The server of the README, which takes its time."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^<!-- weather.py -->\n```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    step = "        await ctx.progress("
    assert step in code
    return "import trio\n" + code.replace(step, f"        await trio.sleep(0.3)\n{step}")


def _output(command: Sequence[str], folder: Path) -> Iterator[tuple[float, str]]:
    """Run a command on a terminal.  Gives each piece of its output, with the seconds before it."""
    environ = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environ |= {"TERM": "xterm", "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONIOENCODING": "utf-8"}
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        os.chdir(folder)
        os.execvpe(command[0], command, {k: v for k, v in environ.items() if k not in ("COLUMNS", "LINES")})
    rest, before = b"", time.monotonic()
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        whole, now = rest + data, time.monotonic()
        text = whole.decode(errors="ignore")
        rest = whole[len(text.encode()) :]  # half of a character
        yield now - before, text.replace("\r\n", "\n")
        before = now
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, (command, status)


def drawn(terminal: Terminal) -> str:
    """The picture: each line once, shown from its time on, in a sheet that moves up when the screen is full."""
    total = terminal.now
    wide, high = COLUMNS * WIDTH + 2 * EDGE, LINES * HEIGHT + 2 * EDGE
    moves = {0.0: 0}
    for row in terminal.rows:
        moves[row.begin] = max(0, row.number + 1 - LINES)
    shifts = [
        (at, shift)
        for (at, shift), before in zip(moves.items(), [-1, *moves.values()], strict=False)
        if shift != before
    ]
    values = ";".join(f"0 {-shift * HEIGHT}" for _, shift in shifts)
    times = ";".join(f"{at / total:.4f}" for at, _ in shifts)
    loop = f'dur="{total:.1f}s" calcMode="discrete" repeatCount="indefinite"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high}" width="{wide:g}" height="{high}">',
        f"<title>{escape(', '.join(COMMANDS))}</title>",
        f"<style>{STYLE.replace('SIZE', str(SIZE))}</style>",
        f'<rect class="paper" x=".5" y=".5" width="{wide - 1:g}" height="{high - 1}" rx="6"/>',
        f'<svg x="{EDGE}" y="{EDGE}" width="{wide - 2 * EDGE:g}" height="{LINES * HEIGHT}"><g>',
        f'<animateTransform attributeName="transform" type="translate" values="{values}" keyTimes="{times}" {loop}/>',
    ]
    parts += [_drawn_row(row, total, loop) for row in terminal.rows]
    return "\n".join([*parts, "</g></svg></svg>\n"])


def _drawn_row(row: Row, total: float, loop: str) -> str:
    states, times = ["hidden", "visible"], [0.0, row.begin]
    if row.end is not None:
        states.append("hidden")
        times.append(row.end)
    keys = ";".join(f"{each / total:.4f}" for each in times)
    shown = f'<animate attributeName="visibility" values="{";".join(states)}" keyTimes="{keys}" {loop}/>'
    kind = ' class="gone"' if row.end is not None else ""
    return f"<g{kind} visibility='hidden'>{shown}{''.join(_drawn_pieces(row))}</g>"


def _drawn_pieces(row: Row) -> Iterator[str]:
    y, at = row.number * HEIGHT, 0
    while at < len(row.cells):
        colour, start = row.cells[at].colour, at
        while at < len(row.cells) and row.cells[at].colour == colour:
            at += 1
        text = "".join(cell.char for cell in row.cells[start:at])
        codes = colour.split(";") if colour else []
        if "7" in codes:
            yield f'<rect class="ink" x="{start * WIDTH:g}" y="{y}" width="{len(text) * WIDTH:.4g}" height="{HEIGHT}"/>'
        first = start + len(text) - len(text.lstrip())
        if text := text.strip():
            style = f' class="{" ".join(f"s{code}" for code in codes)}"' if codes else ""
            place = f'x="{first * WIDTH:.5g}" y="{y + SIZE}" textLength="{len(text) * WIDTH:.5g}"'
            yield f"<text{style} {place}>{escape(text, quote=False)}</text>"


def words_of(picture: str) -> list[str]:
    """The lines of text that a picture leaves on the screen, without numbers, and without the lengths of arrows."""
    lines = re.findall(r"^<g visibility.*</g>$", picture, re.MULTILINE)
    return [_comparable(" ".join(re.findall(r"<text[^>]*>(.*?)</text>", line))) for line in lines]


def _comparable(text: str) -> str:
    text = re.sub(r"\d[\d.,:T+-]*( ms| s\b)?", "0", unescape(text))
    text = re.sub(r"[─━\s]+", " ", text).strip()
    return text.partition("…")[0][:40] if "…" in text else text


if __name__ == "__main__":
    PICTURE.write_text(drawn(recorded(COMMANDS)), encoding="utf-8")
