"""`inspect`: how it starts npx.  `tests/peers/test_inspect.py` runs the real Inspector."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SERVER = str(Path(__file__).parent / "servers.py")
INSPECT = (sys.executable, "-m", "trio_mcp", "inspect")
NPX = f"""\
#!{sys.executable}
import json, os, signal, sys
file = sys.argv[sys.argv.index("--config") + 1]
mode = os.stat(file).st_mode & 0o777, os.stat(os.path.dirname(file)).st_mode & 0o777
started = {{"arguments": sys.argv[1:], "mode": mode, "config": json.load(open(file))}}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(json.dumps(started), flush=True)
if os.environ.get("WAITS"):
    signal.pause()
sys.exit(5)
"""


def environ(folder: Path, *programs: str) -> dict[str, str]:
    """An environment with a PATH that has only these programs."""
    for name in programs:
        (folder / name).write_text(NPX)
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": str(folder), "HOME": str(folder)}


def inspect(folder: Path, *arguments: str) -> tuple[dict[str, Any], int]:
    shown = subprocess.run(
        [*INSPECT, *arguments], cwd=ROOT, env=environ(folder, "node", "npx"), capture_output=True, text=True, timeout=60
    )
    return json.loads(shown.stdout), shown.returncode


def test_the_server_is_passed_in_a_private_file(tmp_path: Path) -> None:
    started, status = inspect(tmp_path, SERVER, "--env", "KEY=sesame", "--revision", "2026-07-28")
    assert status == 5
    assert started["arguments"][:3] == ["-y", "@modelcontextprotocol/inspector", "--config"]
    assert len(started["arguments"]) == 4
    assert "sesame" not in str(started["arguments"])
    assert started["mode"][1] == 0o700
    assert not os.path.exists(started["arguments"][3])  # it has been deleted
    command = {"command": sys.executable, "args": ["-m", "trio_mcp", "run", SERVER]}
    entry = {"type": "stdio", **command, "env": {"KEY": "sesame"}, "protocolEra": "modern"}
    assert started["config"] == {"mcpServers": {"servers.py": entry}}


@pytest.mark.parametrize(
    ("url", "revision", "kind", "era"),
    [
        ("https://a.example/mcp", (), "streamable-http", "auto"),
        ("https://a.example/sse", ("--revision", "2024-11-05"), "sse", "legacy"),
    ],
)
def test_a_url_has_its_transport(url: str, revision: Sequence[str], kind: str, era: str, tmp_path: Path) -> None:
    started, _ = inspect(tmp_path, url, "--header", "Authorization: Bearer sesame", *revision, "--cli", "tools/list")
    assert started["arguments"][2] == "--cli"  # it must come first; otherwise the Inspector opens its page
    assert started["arguments"][5:] == ["--server", "a.example", "--method", "tools/list"]
    headers = {"Authorization": "Bearer sesame"}
    entry = {"type": kind, "url": url, "headers": headers, "protocolEra": era}
    assert started["config"] == {"mcpServers": {"a.example": entry}}


@pytest.mark.parametrize(
    ("programs", "arguments", "status", "message"),
    [
        ("", (SERVER,), 3, "there is no node in PATH; the Inspector needs Node.js"),
        ("node", (SERVER,), 3, "there is no npx in PATH; the Inspector needs Node.js"),
        ("node npx", ("ws://127.0.0.1:9/ws",), 2, "the Inspector does not speak WebSocket; start trio-mcp bridge"),
        ("node npx", (SERVER, "--revision", "2020"), 2, "there is no revision '2020'; the revisions are 2024-11-05,"),
    ],
)
def test_mistakes_are_one_line(
    programs: str, arguments: Sequence[str], status: int, message: str, tmp_path: Path
) -> None:
    env = environ(tmp_path, *programs.split())
    shown = subprocess.run([*INSPECT, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout) == (status, "")
    assert shown.stderr.startswith(f"trio-mcp: {message}")
    assert shown.stderr.count("\n") == 1


def test_the_address_may_be_json_without_the_token(tmp_path: Path) -> None:
    env = environ(tmp_path, "node", "npx")
    script = "print('Starting\\n   http://127.0.0.1:6274?TOKEN=sesame\\n   http://127.0.0.1:6275/')"
    (tmp_path / "npx").write_text(f"#!{sys.executable}\n{script}\n")
    shown = subprocess.run([*INSPECT, SERVER, "--json"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    started = json.loads(shown.stdout)
    assert (started.pop("pid") > 0, started) == (True, {"url": "http://127.0.0.1:6274", "server": "servers.py"})
    assert shown.stderr.splitlines()[1:] == ["   http://127.0.0.1:6274?TOKEN=sesame", "   http://127.0.0.1:6275/"]


def test_signals_reach_the_inspector(tmp_path: Path) -> None:
    env = {**environ(tmp_path, "node", "npx"), "WAITS": "1"}
    with subprocess.Popen([*INSPECT, SERVER], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 7
    assert not os.path.exists(started["arguments"][3])
