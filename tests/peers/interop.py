"""What real peers see of us, and we of them: the frame of every visit, and the file that shows it.

**Programs.**  A client of others is driven by a program in `programs`: ``PROGRAM TARGET WAY [behaviour ...]``.  The way
is one of `WAYS`; the target is a URL, or the command of the server as a JSON array where the way is stdio.  It looks at
one behaviour after another (all, if none is named) and prints a line of JSON for each, as soon as it was seen:
``{"behaviour": "call", "seen": true}``.  What a client raised is seen as well: ``{"raised": text, "code": code}``.  The
last one is ``end``, told after everything was closed.  Standard error stays empty, the status is 0.  A server of others
is the program ``SERVER WAY``, with the same content as our fixture; `looking` is what our client sees of it.

**Behaviours.**  `BEHAVIOURS` names them in their order.  What a client does for each, and what is seen of our fixture
in each revision, stands in `behaviours.py`.

**Gaps.**  Where a pair falls short, a `Gap` says what is seen instead (`NOTHING`, where the program does not look at
all), why, and whose gap it is.  `shortcomings` is strict both ways: what is seen must be what the gap says, and a gap
that is none, for the table says the same, has gone and must leave the list.  Gaps are by pair, then by behaviour:
`python_gaps.py` for the clients in Python, `typescript_gaps.py` for those on node, `server_gaps.py` for the servers.

**Collecting.**  A `Side` is one table of `INTEROP.md`: a test module says once which pairs and behaviours it `holds`,
and each visit is a `record` there, which gives what is to be asserted.  At the end of a run `write_file` puts what was
recorded into the file, and leaves the rows of all other visits as they are; rows of pairs that are held no longer go.
Rows and footnotes have a fixed order, so that the same results give the same file.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

__all__ = [
    "BEHAVIOURS",
    "BRIDGE",
    "FILE",
    "NOTHING",
    "OUR_CLIENT",
    "OUR_SERVER",
    "TASKS_OF_OTHERS",
    "TASKS_OF_OURS",
    "WAYS",
    "Gap",
    "Pair",
    "Side",
    "expected",
    "merged",
    "shortcomings",
    "write_file",
]

FILE = Path(__file__).parent / "INTEROP.md"
NOTHING = object()  # a program does not look at it

WAYS = {
    "stdio": "stdio",
    "stdio-modern": "stdio, 2026-07-28",
    "session": "streamable HTTP",
    "modern": "streamable HTTP, 2026-07-28",
    "sse": "HTTP+SSE",
    "ws": "WebSocket",
}

BEHAVIOURS = (
    "connect",
    "list",  # with pages
    "call",
    "structured",
    "tool error",
    "unknown tool",
    "bad arguments",
    "progress",
    "cancel",
    "read",
    "unknown resource",
    "subscribe",
    "list changed",
    "prompts",
    "unknown prompt",
    "completion",
    "logging",
    "sampling",
    "elicitation",
    "roots",
    "1 MB",
    "20 at once",
    "end",
)

YES, NO, ABSENT = "yes", "**no**", "–"
Pair = tuple[str, str]  # who, and by which way


@attrs.frozen
class Gap:
    """What is seen instead of what the table says, why, and whose gap it is."""

    seen: Any
    why: str
    whose: str = "the client's"

    @property
    def note(self) -> str:
        return f"{self.why} ({self.whose})"


def expected(table: Mapping[str, Any], gaps: Mapping[str, Gap]) -> dict[str, Any]:
    """What a visit sees, with its gaps."""
    seen = {**table, **{name: gap.seen for name, gap in gaps.items()}}
    return {name: what for name, what in seen.items() if what is not NOTHING}


def shortcomings(seen: Mapping[str, Any], table: Mapping[str, Any], gaps: Mapping[str, Gap]) -> dict[str, str]:
    """What is not as table and gaps say, by behaviour, in words; gaps that are none among them."""
    wanted = expected(table, gaps)
    wrong = {}
    for name in {**wanted, **seen}:
        if (name in seen, seen.get(name)) != (name in wanted, wanted.get(name)):
            wrong[name] = f"{seen.get(name, 'nothing')!r}, not {wanted.get(name, 'nothing')!r}"
    for name, gap in gaps.items():
        if table.get(name, NOTHING) == gap.seen:
            wrong[name] = f"this gap has gone: {gap.note}"
    return wrong


@attrs.define(eq=False)
class Side:
    """One table of the file, with a row for each pair and a column for each behaviour, and what this run has seen."""

    title: str
    pairs: Sequence[Pair] = ()
    behaviours: Sequence[str] = ()
    left_out: Mapping[str, str] = attrs.field(factory=dict)
    recorded: dict[Pair, dict[str, str]] = attrs.field(factory=dict, init=False)

    def holds(
        self, pairs: Sequence[Pair], behaviours: Sequence[str], left_out: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Who is visited and what is looked at, in the order of the table; who cannot be visited, and why."""
        self.pairs, self.behaviours, self.left_out = pairs, behaviours, left_out

    def unseen(self, text: str) -> list[Pair]:
        """The pairs that have no row in the text of the file."""
        return [pair for pair in self.pairs if f"| {_label(pair)} |" not in text]

    def record(
        self,
        pair: Pair,
        seen: Mapping[str, Any],
        table: Mapping[str, Any],
        gaps: Mapping[str, Gap],
        absent: Collection[str] = (),
    ) -> dict[str, str]:
        """A visit has been, with a revision that does not have what is absent.  Gives its `shortcomings`."""
        assert pair in self.pairs, pair
        wrong = shortcomings(seen, table, gaps)
        cells = {name: ABSENT if name in absent else YES for name in table}
        cells |= {name: gap.note for name, gap in gaps.items()} | dict.fromkeys(wrong, NO)
        self.recorded[pair] = {name: cells.get(name, ABSENT) for name in self.behaviours}
        return wrong


OUR_SERVER = Side("Clients of others at our server")
OUR_CLIENT = Side("Our client at servers of others")
BRIDGE = Side("Clients of others through `trio-mcp bridge`")
TASKS_OF_OURS = Side("Clients of others at the tasks of our server")
TASKS_OF_OTHERS = Side("Our client at the tasks of servers of others")
SIDES = (OUR_SERVER, OUR_CLIENT, BRIDGE, TASKS_OF_OURS, TASKS_OF_OTHERS)


# The file.  It is read back, to keep the rows of those who were not visited this time.

HEAD = """\
# Who gets along with whom

The tests in this folder write this file: each row is what one program saw in its last visit. "yes" is what the
protocol says of that revision, in every detail that the test compares; "–" is what that revision does not have; a
number is a gap, which is explained below the table, with whose it is.
"""
TITLE = re.compile(r"^## (.*)$", re.MULTILINE)
FOOTNOTE = re.compile(r"^(\d+)\. (.*)$", re.MULTILINE)


def merged(text: str, sides: Sequence[Side]) -> str:
    """The text of the file, with what these sides have recorded."""
    _, *parts = TITLE.split(text)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    for side in sides:
        if side.recorded:
            sections[side.title] = _section(side, _rows(sections.get(side.title, "")))
    titles = [side.title for side in sides if side.title in sections]
    return HEAD + "".join(f"\n## {title}\n\n{sections[title].strip()}\n" for title in titles)


def write_file(sides: Sequence[Side] = SIDES, file: Path = FILE) -> None:
    """Put what this run has recorded into the file; one process at a time."""
    if not any(side.recorded for side in sides):
        return
    with open(file, "a+", encoding="utf-8") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        opened.seek(0)
        text = merged(opened.read(), sides)
        opened.truncate(0)
        opened.write(text)


def _label(pair: Pair) -> str:
    return f"{pair[0]}, {WAYS[pair[1]]}"


def _section(side: Side, kept: Mapping[str, Mapping[str, str]]) -> str:
    """The table of a side, then its footnotes, then who is not in it."""
    rows = {_label(pair): side.recorded.get(pair) or kept.get(_label(pair)) for pair in side.pairs}
    notes: dict[str, int] = {}

    def cell(said: str) -> str:
        return said if said in (YES, NO, ABSENT) else f"[{notes.setdefault(said, len(notes) + 1)}]"

    lines = [["", *side.behaviours], ["---"] * (len(side.behaviours) + 1)]
    lines += [[label, *(cell(row.get(name, ABSENT)) for name in side.behaviours)] for label, row in rows.items() if row]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    footnotes = "\n".join(f"{number}. {note}" for note, number in notes.items())
    absent = "\n".join(f"- Not visited: {name}: {why}" for name, why in side.left_out.items())
    return "\n\n".join(part for part in (table, footnotes, absent) if part)


def _rows(section: str) -> dict[str, dict[str, str]]:
    """What `_section` wrote: by label and behaviour, with the text of each footnote in its place."""
    notes = {f"[{number}]": note for number, note in FOOTNOTE.findall(section)}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    head, _, *body = lines or [[], []]
    return {
        label: {name: notes.get(said, said) for name, said in zip(head[1:], cells, strict=True)}
        for label, *cells in body
    }
