"""The recording that the README shows: on a terminal, its commands show the texts of the picture."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PICTURE = (ROOT / "docs/recording.svg").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recording", ROOT / "docs/recording.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_the_commands_show_the_texts_of_the_picture(script: ModuleType) -> None:
    assert script.words_of(script.drawn(script.recorded(script.COMMANDS))) == script.words_of(PICTURE)


def test_the_picture_is_well_formed_and_has_the_commands(script: ModuleType) -> None:
    ElementTree.fromstring(PICTURE)
    shown = [each.removeprefix("$ ") for each in script.words_of(PICTURE) if each.startswith("$")]
    assert shown == [re.sub(r"\d+", "0", command) for command in script.COMMANDS]
    assert len(PICTURE) < 120_000
    assert "docs/recording.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_terminal_shows_colours_and_redrawn_lines(script: ModuleType) -> None:
    terminal = script.Terminal()
    terminal.write("\x1b[1;36mname\x1b[0m <1>\n50 %")
    terminal.now = 2.0
    terminal.write("\r\x1b[K100 %\n")
    assert [(row.text, row.begin, row.end) for row in terminal.rows] == [
        ("name <1>", 0.0, None), ("50 %", script.LINE, 2.0), ("100 %", 2.0, None),
    ]  # fmt: skip
    assert [cell.colour for cell in terminal.rows[0].cells] == ["1;36"] * 4 + [""] * 4
    picture = script.drawn(terminal)
    assert '<text class="s1 s36" x="0" y="13" textLength="31.2">name</text>' in picture
    assert script.words_of(picture) == ["name <0>", "0 %"]
