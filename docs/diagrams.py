"""Draw the lifecycle tables of the core as Mermaid diagrams: ``python docs/diagrams.py``.

The diagrams stand in docs/architecture.md between the comments ``<!-- diagram: NAME -->`` and ``<!-- end -->``.  This
script writes them anew, and `tests/test_architecture.py` fails if they differ from the tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from trio_mcp.core.requests import CALLING, SERVING, LinkKind
from trio_mcp.core.tasks import TASKS

PAGE = Path(__file__).with_name("architecture.md")

Cells = Mapping[Any, Mapping[Any, Any]]
TABLES: Mapping[str, Cells] = {
    **{f"calling {kind.name}": CALLING[kind] for kind in LinkKind},
    **{f"serving {kind.name}": SERVING[kind] for kind in LinkKind},
    "tasks": TASKS,
}


def words(member: Enum) -> str:
    return member.name.lower().replace("_", " ")


def diagram(cells: Cells) -> str:
    """A state diagram; the events that lead from one state to another with the same action share an arrow."""
    arrows: dict[tuple[str, str, str], list[str]] = {}
    for state, row in cells.items():
        for event, cell in row.items():
            to, action = cell if isinstance(cell, tuple) else (cell, None)
            key = (state.name, to.name, "" if action is None else f" / {words(action)}")
            arrows.setdefault(key, []).append(words(event))
    lines = [f"    {here} --> {there}: {', '.join(events)}{action}" for (here, there, action), events in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    direction LR", *lines, "```"])


def drawn(text: str) -> str:
    """The page with its diagrams drawn anew."""

    def block(found: re.Match[str]) -> str:
        return f"<!-- diagram: {found[1]} -->\n{diagram(TABLES[found[1]])}\n<!-- end -->"

    return re.sub(r"<!-- diagram: ([\w ]+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
