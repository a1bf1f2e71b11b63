"""The examples of clients, as real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRESS = [sys.executable, str(ROOT / "examples" / "progress.py")]


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (PROGRESS, ["progress 1.0, in 2026-07-28", "tool export: Write a table"], 0),
        (["--call", "export", '{"rows": 5}', *PROGRESS], ["  5 of 5", "it gave:"], 0),
        (["--call", "export", "{}", *PROGRESS], ["it has failed:", "rows"], 0),
        (["http://127.0.0.1:1/mcp"], ["nobody listens there"], 1),
        (["ftp://example.com"], ["a URL begins with http://"], 1),
        ([sys.executable, "-c", "raise SystemExit('no API key')"], ["ended with status 1", "no API key"], 1),
    ],
)
def test_a_server_is_looked_at(words: list[str], said: list[str], status: int, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "look.py"), *words]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in shown.stderr
    for each in said:
        assert each in shown.stdout + shown.stderr
    assert shown.returncode == status
