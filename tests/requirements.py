"""The requirement table, and the rows that each test proves.

`@req("core-01")` on a test names the rows of requirements.tsv that it proves.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import functools
import re
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


@functools.cache
def references() -> frozenset[tuple[str, str]]:
    """Each id in a call of `req`, with the name of the file."""
    return frozenset(_references())


def _references() -> Iterator[tuple[str, str]]:
    for path in sorted(set(HERE.rglob("*.py")) - {Path(__file__)}):
        text = path.read_text(encoding="utf-8")
        for call in re.finditer(r"\breq\(", text):  # faster than to parse all tests, which takes seconds
            for part in ast.walk(_call(text, call.start())):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value, path.name


def _call(text: str, start: int) -> ast.expr:
    end = start
    while True:
        end = text.index(")", end) + 1
        with contextlib.suppress(SyntaxError):  # the bracket was inside the call
            return ast.parse(text[start:end], mode="eval").body
