"""Visits between our client or server and third-party peers: the common rules, and the file with the results.

**Programs.**  A third-party client is driven by a program in `programs`: ``PROGRAM TARGET WAY [behaviour ...]``.  The
way, a transport and its era, is one of `WAYS`.  The target is a URL, or the command of a stdio server as a JSON array.
The program tries one behaviour after another (all of them, if the command names no behaviour) and prints a line of JSON
for each result at once: ``{"behaviour": "call", "seen": true}``.  An error of the client is a result as well:
``{"raised": text, "code": code}``.  The last behaviour is ``end``; it is printed after everything is closed.  Standard
error stays empty, and the exit status is 0.  A third-party server is the program ``SERVER WAY``, with the same content
as our fixture; `our_client` visits it with our client.

**Behaviours.**  `BEHAVIOURS` names them in their order.  `behaviours.py` says how a client tries each behaviour, and
which result our fixture gives in each revision.

**Gaps.**  If a pair differs from the table, a `Gap` has the actual result (`NOT_TRIED` if the program does not try the
behaviour), the reason, and the side that has the gap.  `differences` is strict in both directions: the result must be
the result of the gap, and a gap that is equal to the table is closed and must be removed.  Gaps are listed by pair,
then by behaviour: `python_gaps.py` for clients in Python, `typescript_gaps.py` for clients on Node, `server_gaps.py`
for servers.

**Collecting.**  A `ResultTable` is one table of `INTEROP.md`.  A test module calls `declare` once, with the pairs and
behaviours of the table.  Each visit calls `record`, which returns the differences; the test asserts that there are no
differences.  At the end of a run `write_file` writes the recorded rows into the file.  It keeps the rows of all other
visits, and removes rows of pairs that are not declared any more.  Rows and footnotes have a fixed order, so that equal
results give an equal file.
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
    "NOT_TRIED",
    "OUR_CLIENT",
    "OUR_SERVER",
    "OUR_TASKS",
    "PEER_TASKS",
    "WAYS",
    "Gap",
    "Pair",
    "ResultTable",
    "differences",
    "merged",
    "with_gaps",
    "write_file",
]

FILE = Path(__file__).parent / "INTEROP.md"
NOT_TRIED = object()  # the program does not try this behaviour

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
Pair = tuple[str, str]  # the name of the peer, and the way


@attrs.frozen
class Gap:
    """A result that differs from the table, the reason, and the side that has the gap."""

    seen: Any
    why: str
    whose: str = "the client's"

    @property
    def note(self) -> str:
        return f"{self.why} ({self.whose})"


def with_gaps(table: Mapping[str, Any], gaps: Mapping[str, Gap]) -> dict[str, Any]:
    """The results that a visit must have: the table, changed by the gaps."""
    seen = {**table, **{name: gap.seen for name, gap in gaps.items()}}
    return {name: result for name, result in seen.items() if result is not NOT_TRIED}


def differences(seen: Mapping[str, Any], table: Mapping[str, Any], gaps: Mapping[str, Gap]) -> dict[str, str]:
    """Describe, by behaviour, each result that differs from table and gaps, and each gap that is closed."""
    wanted = with_gaps(table, gaps)
    wrong = {}
    for name in {**wanted, **seen}:
        if (name in seen, seen.get(name)) != (name in wanted, wanted.get(name)):
            wrong[name] = f"{seen.get(name, 'nothing')!r}, not {wanted.get(name, 'nothing')!r}"
    for name, gap in gaps.items():
        if table.get(name, NOT_TRIED) == gap.seen:
            wrong[name] = f"this gap has gone: {gap.note}"
    return wrong


@attrs.define(eq=False)
class ResultTable:
    """One table of the file, with a row per pair and a column per behaviour, and the results of this run."""

    title: str
    pairs: Sequence[Pair] = ()
    behaviours: Sequence[str] = ()
    not_visited: Mapping[str, str] = attrs.field(factory=dict)
    recorded: dict[Pair, dict[str, str]] = attrs.field(factory=dict, init=False)

    def declare(
        self, pairs: Sequence[Pair], behaviours: Sequence[str], not_visited: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Set the pairs and behaviours, in the order of the table, and the reason for each peer that is not visited."""
        self.pairs, self.behaviours, self.not_visited = pairs, behaviours, not_visited

    def missing_rows(self, text: str) -> list[Pair]:
        """Return the pairs that have no row in the text of the file."""
        return [pair for pair in self.pairs if f"| {_label(pair)} |" not in text]

    def record(
        self,
        pair: Pair,
        seen: Mapping[str, Any],
        table: Mapping[str, Any],
        gaps: Mapping[str, Gap],
        absent: Collection[str] = (),
    ) -> dict[str, str]:
        """Record the results of a visit and return its `differences`.  `absent` is not part of its revision."""
        assert pair in self.pairs, pair
        wrong = differences(seen, table, gaps)
        cells = {name: ABSENT if name in absent else YES for name in table}
        cells |= {name: gap.note for name, gap in gaps.items()} | dict.fromkeys(wrong, NO)
        self.recorded[pair] = {name: cells.get(name, ABSENT) for name in self.behaviours}
        return wrong


OUR_SERVER = ResultTable("Third-party clients with our server")
OUR_CLIENT = ResultTable("Our client with third-party servers")
BRIDGE = ResultTable("Third-party clients through `trio-mcp bridge`")
OUR_TASKS = ResultTable("Third-party clients with the tasks of our server")
PEER_TASKS = ResultTable("Our client with the tasks of third-party servers")
TABLES = (OUR_SERVER, OUR_CLIENT, BRIDGE, OUR_TASKS, PEER_TASKS)


# The file.  `merged` reads it first, to keep the rows of peers that this run has not visited.

HEAD = """\
# Interoperability

The tests in this folder write this file. Each row has the results of the last visit of one program. "yes": the result
agrees with the protocol of that revision, in every detail that the test compares. "–": the revision does not have this
feature. A number is a gap; the note below the table gives the reason and the side that has the gap.
"""
TITLE = re.compile(r"^## (.*)$", re.MULTILINE)
FOOTNOTE = re.compile(r"^(\d+)\. (.*)$", re.MULTILINE)


def merged(text: str, tables: Sequence[ResultTable]) -> str:
    """Return the text of the file, updated with the records of these tables."""
    _, *parts = TITLE.split(text)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    for table in tables:
        if table.recorded:
            sections[table.title] = _section(table, _rows(sections.get(table.title, "")))
    titles = [table.title for table in tables if table.title in sections]
    return HEAD + "".join(f"\n## {title}\n\n{sections[title].strip()}\n" for title in titles)


def write_file(tables: Sequence[ResultTable] = TABLES, file: Path = FILE) -> None:
    """Write the records of this run into the file; only one process at a time does so."""
    if not any(table.recorded for table in tables):
        return
    with open(file, "a+", encoding="utf-8") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        opened.seek(0)
        text = merged(opened.read(), tables)
        opened.truncate(0)
        opened.write(text)


def _label(pair: Pair) -> str:
    return f"{pair[0]}, {WAYS[pair[1]]}"


def _section(table: ResultTable, kept: Mapping[str, Mapping[str, str]]) -> str:
    """The rows of a table, then its footnotes, then the peers that are not visited."""
    rows = {_label(pair): table.recorded.get(pair) or kept.get(_label(pair)) for pair in table.pairs}
    notes: dict[str, int] = {}

    def cell(text: str) -> str:
        return text if text in (YES, NO, ABSENT) else f"[{notes.setdefault(text, len(notes) + 1)}]"

    lines = [["", *table.behaviours], ["---"] * (len(table.behaviours) + 1)]
    lines += [
        [label, *(cell(row.get(name, ABSENT)) for name in table.behaviours)] for label, row in rows.items() if row
    ]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    footnotes = "\n".join(f"{number}. {note}" for note, number in notes.items())
    absent = "\n".join(f"- Not visited: {name}: {why}" for name, why in table.not_visited.items())
    return "\n\n".join(part for part in (body, footnotes, absent) if part)


def _rows(section: str) -> dict[str, dict[str, str]]:
    """Parse the output of `_section`: cells by label and behaviour, with the text of each footnote in its place."""
    notes = {f"[{number}]": note for number, note in FOOTNOTE.findall(section)}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    head, _, *body = lines or [[], []]
    return {
        label: {name: notes.get(text, text) for name, text in zip(head[1:], cells, strict=True)}
        for label, *cells in body
    }
