"""The web page of the MCP Inspector, in a real browser, with one of our examples over HTTP.

The page never sends a request to our server.  It sends its requests to the backend of the Inspector, which is the
client.  So our server gets no request of a browser and need not allow an Origin; the test checks that, too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.peers.installed import CACHE, PEERS, needs, node, npm
from tests.ports import unclaimed_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the Inspector

ROOT = Path(__file__).parents[2]
INSPECTOR = PEERS["inspector-2.12.0"]
BROWSER = PEERS["chromium-typescript-2.4.0"]  # its folder has the package that drives a browser
LAUNCHER = "node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js"
PAGE = r"^\s*(http://\S+TOKEN=\S+)"  # the URL of the page, in a line of the output
PATIENCE = 300.0  # seconds for all steps in the page, on a busy machine

SEEN = {
    "name": "heart",
    "tools": "Tools (1)",
    "progress": True,
    "result": "20 beats",
    "asked": ["itself"],
    "end": "clean",
}


@contextmanager
def started(command: Sequence[str], pattern: str, **options: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a process and yield the first match of the pattern in its output.  The process ends with the block."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(pattern, line):
                    yield found[1], process
                    return
            raise AssertionError(f"it did not start:\n{process.communicate()[1]}")
        finally:
            process.kill()


def installed() -> Path:
    """The folder of the Inspector."""
    folder = needs(INSPECTOR.name, lambda: npm(INSPECTOR.name, INSPECTOR.packages))
    assert isinstance(folder, Path)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """An environment in which the Inspector has its own files, ports and secrets."""
    own = {
        "HOME": str(folder),
        "CLIENT_PORT": str(unclaimed_port()),  # the Inspector does not choose a free port by itself
        "MCP_SANDBOX_PORT": "0",
        "MCP_APP_ORIGIN_PORT": "0",
        "MCP_AUTO_OPEN_ENABLED": "false",
        "MCP_STORAGE_DIR": str(folder / "storage"),
        "MCP_INSPECTOR_SECRET_STORE": "memory",
        "MCP_INSPECTOR_API_TOKEN": "of-this-visit",
    }
    return {**os.environ, **own}


def browse(page: str, screenshot: Path) -> dict[str, Any]:
    """The results of the program in that page."""
    *browser, program = needs(BROWSER.name, BROWSER.command)
    command = [*browser, str(Path(program).with_name("inspector_page.mjs")), page, str(screenshot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return {each["behaviour"]: each["seen"] for each in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("era", "revision", "screenshot"),
    [("legacy", "2025-11-25", "inspector.png"), ("modern", "2026-07-28", "inspector-modern.png")],
)
def test_the_page_connects_lists_and_calls_with_progress(
    era: str, revision: str, screenshot: str, tmp_path: Path
) -> None:
    example = [sys.executable, str(ROOT / "examples" / "over_http.py"), "0"]
    with started(example, r"listening at (\S+)") as (server, process):
        command = [node(), str(installed() / LAUNCHER), "--web", "--transport", "http", "--server-url", server]
        command += ["--protocol-era", era]
        with started(command, PAGE, env=environment(tmp_path), cwd=tmp_path) as (page, _):
            seen = browse(page, CACHE / screenshot)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    assert seen == {**SEEN, "revision": revision}
    assert (process.returncode, errors) == (0, "")
