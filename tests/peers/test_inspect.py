"""The real Inspector, started by `trio-mcp inspect`: its command line, and its page in a browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers.installed import CACHE, node, tool
from tests.peers.test_inspector_page import PAGE, PATIENCE, SEEN, browse, environment, installed, started
from tests.peers.visits import served_by_process

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the Inspector

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "over_http.py")
INSPECT = [sys.executable, "-m", "trio_mcp", "inspect"]


def with_node(folder: Path) -> dict[str, str]:
    """An environment with our node, in which npx finds the installed Inspector in the working directory."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "node").symlink_to(node())
    bundled = Path(node()).parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npx-cli.js"
    (programs / "npx").symlink_to(bundled if bundled.exists() else tool("npx"))
    return {
        **environment(folder),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "npm_config_offline": "true",
    }


def printed(folder: Path, *arguments: str) -> list[str]:
    """The names of the tools that the command line of the Inspector prints."""
    shown = subprocess.run(
        [*INSPECT, *arguments, "--cli", "tools/list"],
        cwd=installed(), env=with_node(folder), capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    return [tool["name"] for tool in json.loads(shown.stdout)["tools"]]


@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
def test_the_command_line_at_a_file(revision: str, tmp_path: Path) -> None:
    assert printed(tmp_path, EXAMPLE, "--revision", revision) == ["count"]


@pytest.mark.parametrize("way", ["session", "sse"])
def test_the_command_line_at_a_url(way: str, tmp_path: Path) -> None:
    with served_by_process(sse_path="/sse", message_path="/messages") as served:
        assert "interop_echo" in printed(tmp_path, served.target(way))


def test_the_page_at_a_url(tmp_path: Path) -> None:
    with started([sys.executable, EXAMPLE, "0"], r"listening at (\S+)") as (url, _):
        command = [*INSPECT, url, "--revision", "2026-07-28"]
        with started(command, PAGE, env=with_node(tmp_path), cwd=installed()) as (page, process):
            seen = browse(page, CACHE / "inspect.png")
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE)
    assert seen == {**SEEN, "revision": "2026-07-28"}
    assert not list(tmp_path.glob("trio-mcp-*"))
