"""The README is true: its code runs, its demo runs, and its map names every module there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_code_blocks_run_one_after_another() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), "README.md", "exec"), {})


def test_the_demo_runs() -> None:
    (script,) = re.findall(r"^<!-- demo -->\n```sh\n.* \.venv/bin/python (\S+)\n```", README, re.MULTILINE)
    shown = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.count("the client has: Hello, Trio!") == 2
    assert "agreed on 2025-11-25" in shown.stdout
    assert "agreed on 2026-07-28" in shown.stdout


def test_the_map_names_every_module_of_the_core() -> None:
    (table,) = re.findall(r"^\| Module.*?\n\n", README, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(\w+)`", table.split("\n", 2)[2]))
    assert named == {path.stem for path in (ROOT / "trio_mcp" / "core").glob("*.py")} - {"__init__"}
