"""The requirement table, and which tests prove which of its rows.

`@req("core-01")` on a test says which rows of requirements.tsv it proves.
"""

from __future__ import annotations

import ast
import csv
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TABLE = HERE / "requirements.tsv"
WAIVED = HERE / "requirements-waived.tsv"

req = pytest.mark.req


def read(path: Path) -> dict[str, dict[str, str]]:
    """The rows of a table by their id."""
    with open(path, encoding="utf-8", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}


@functools.cache  # to read all tests takes seconds
def references() -> frozenset[tuple[str, str]]:
    """Every id that a call of `req` names, with the file that does."""
    return frozenset(_references())


def _references() -> Iterator[tuple[str, str]]:
    for path in sorted(HERE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "req":
                for part in (part for argument in node.args for part in ast.walk(argument)):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value, path.name
