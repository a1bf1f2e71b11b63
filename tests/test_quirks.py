"""docs/quirks.md: each row names a peer, the code, and tests that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "quirks.md").read_text(encoding="utf-8")
COLUMNS = ["Peer", "Behaviour", "Answer of trio_mcp", "Code", "Test"]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| Peer |")
]


@cache
def names_in(file: str) -> set[str]:
    return set(re.findall(r"^(?:async )?def (\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_table_has_the_same_columns() -> None:
    heads = re.findall(r"^\| Peer .*$", PAGE, re.MULTILINE)
    assert {tuple(cell.strip() for cell in head.strip("|").split("|")) for head in heads} == {tuple(COLUMNS)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}"[:60])
def test_a_row_is_whole_and_names_tests_that_exist(row: list[str]) -> None:
    assert len(row) == len(COLUMNS)
    assert all(row)
    named = [each.split("::") for each in re.findall(r"`(tests/[^`]+)`", row[-1])]
    assert named
    for file, name in named:
        assert name in names_in(file), f"{file} has no test {name}"
