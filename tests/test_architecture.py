"""docs/architecture.md agrees with the code: the diagrams, the rooms and the files that it and CONTRIBUTING.md name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from tests.test_imports import PACKAGE, ROOMS

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_diagrams_are_those_of_the_tables() -> None:
    spec = importlib.util.spec_from_file_location("diagrams", ROOT / "docs" / "diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    diagrams = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diagrams)
    assert PAGE.count("stateDiagram-v2") == len(diagrams.TABLES)
    assert diagrams.drawn(PAGE) == PAGE


def test_the_table_names_every_room() -> None:
    (table,) = re.findall(r"^\| Room .*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    named = re.findall(r"^\| `([\w/]+)`", table, re.MULTILINE)
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")}
    assert set(named) | {"."} >= rooms - {"cli/demo"}
    order = [name for name in named if "/" not in name]
    assert order == [room for room in ROOMS if room in order]


def test_the_files_that_the_pages_name_exist() -> None:
    named = set(re.findall(r"`((?:core|transport|server|client|oauth)/[\w/]+\.py)`", PAGE + MAP))
    assert len(named) > 20
    assert {name for name in named if not (PACKAGE / name).exists()} == set()
