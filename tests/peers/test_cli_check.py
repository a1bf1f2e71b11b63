"""`trio-mcp check` with published servers: each deviation that it reports is known, and was verified by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers.installed import PUBLISHED_SERVERS, ROOT, needs

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the server

# The official SDK for TypeScript, version 1: no answer to an invalid request, -32603 for invalid params, and results
# for unknown tools.  Both SDKs ignore cursors, unless the server has pages.
TYPESCRIPT1 = {"core-28", "core-30", "tool-31", "page-03"}
PYTHON2 = {"core-28", "page-03", "page-09", "prm-08"}
FOUND = {
    "server-everything": TYPESCRIPT1 | {"log-03", "res-05"},
    "server-filesystem": TYPESCRIPT1,
    "server-memory": TYPESCRIPT1 | {"page-09", "res-05"},
    "mcp-server-time": PYTHON2,
    "mcp-server-git": PYTHON2,
    "mcp-server-sqlite": {"core-28", "core-29", "tool-31", "page-03", "res-05", "prm-08"},
}


@pytest.mark.parametrize("name", FOUND)
def test_check_reports_the_known_deviations(name: str, tmp_path: Path) -> None:
    command = needs(name, PUBLISHED_SERVERS[name].command)
    more = {"server-filesystem": [str(tmp_path)], "mcp-server-sqlite": ["--db-path", str(tmp_path / "a.db")]}
    shown = subprocess.run(
        [sys.executable, "-m", "trio_mcp", "check", "--json", "--", *command, *more.get(name, ())],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    report = json.loads(shown.stdout)
    assert {each["requirement"] for each in report["deviations"]} == FOUND[name]
    assert shown.returncode == 1
