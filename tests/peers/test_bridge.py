"""Clients of others through `trio-mcp bridge`, as they are used with mcp-remote (from stdio to HTTP) and supergateway
(from HTTP, HTTP+SSE and WebSocket to stdio).

What is seen is what the same client sees of the server itself.  Rows of mcp-remote are in the table of `test_peers`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.peers.behaviours import ABSENT, PAGE_SIZE, seen_in
from tests.peers.installed import PEERS, PROGRAMS, needs
from tests.peers.interop import BEHAVIOURS, BRIDGE, WAYS, Gap
from tests.peers.test_peers import gaps_of, revision_of
from tests.peers.visits import served_by_process, stdio_server

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the client

ROOT = Path(__file__).parents[2]
COMMAND = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "trio_mcp", "bridge")
PATIENCE = 300.0  # seconds for all that one program looks at
CLIENTS = ("python-1.30.0", "python-2.3.0", "typescript-1.32.2", "typescript-2.4.0")
STDIO = ("stdio", "stdio-modern")
# The way of the client, and the way of the bridge to the server.
FROM_STDIO = [
    (peer, way, behind)
    for peer in CLIENTS
    for way in STDIO
    if way in PEERS[peer].ways
    for behind in ("session", "modern", "sse", "ws")
]
TO_STDIO = [(peer, way, "stdio") for peer in CLIENTS for way in PEERS[peer].ways if way not in STDIO]

# One client is enough for the old transport and for the WebSocket, which are those of the bridge.
BRIEF = [
    pytest.param(
        *case, marks=[] if case[2] in ("session", "modern") or case[0] == "typescript-1.32.2" else pytest.mark.long
    )
    for case in FROM_STDIO
]

BRIDGE.holds([(f"{peer} to {WAYS[behind]}", way) for peer, way, behind in FROM_STDIO + TO_STDIO], BEHAVIOURS)


# All clients of 2026-07-28 over HTTP share one session with a server on stdio.  Its log messages do not name their
# call, and those of a call that was cancelled before could be for another client.
DROPPED = "without sessions over HTTP: no log messages for five minutes after a cancelled call"
GAPS = {
    ("python-2.3.0", "modern"): {"logging": Gap({"raised": "TimeoutError: ", "code": None}, DROPPED, "the bridge's")},
    ("typescript-2.4.0", "modern"): {
        "logging": Gap({"raised": "Error: it took too long", "code": None}, DROPPED, "the bridge's")
    },
}


def seen_by(peer: str, target: str, way: str) -> dict[str, object]:
    done = subprocess.run(
        [*needs(peer, PEERS[peer].command), target, way],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return {each["behaviour"]: each["seen"] for each in map(json.loads, done.stdout.splitlines())}


def check(peer: str, way: str, behind: str, seen: dict[str, object]) -> None:
    revision = revision_of(peer, way)
    pair = f"{peer} to {WAYS[behind]}", way
    gaps = {**gaps_of(peer, way), **GAPS.get((peer, way), {})}
    wrong = BRIDGE.record(pair, seen, seen_in(revision), gaps, absent=ABSENT.get(revision, ()))
    assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())


@pytest.mark.parametrize(("peer", "way", "behind"), BRIEF)
def test_a_client_on_stdio_at_a_server_on_http(peer: str, way: str, behind: str, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    with served_by_process(page_size=PAGE_SIZE, sse_path="/sse", message_path="/messages") as served:
        revision = "2026-07-28" if behind == "modern" else "2025-11-25"
        bridge = [*COMMAND, served.target(behind), "--revision", revision]
        command = [sys.executable, str(PROGRAMS / "witness.py"), str(ended), *bridge]
        seen = seen_by(peer, json.dumps(command), way)
        served.process.send_signal(signal.SIGTERM)
        left, errors = served.process.communicate(timeout=PATIENCE)
    check(peer, way, behind, seen)
    assert ended.read_text() == "0"
    assert (json.loads(left), errors) == ({"running": 0, "parked": 0, "listeners": 0}, "")


@contextmanager
def listening(command: Sequence[str]) -> Iterator[tuple[dict[str, str], subprocess.Popen[str]]]:
    with subprocess.Popen(
        [*COMMAND, "--http", "127.0.0.1:0", "--json", "--", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline()), process
        finally:
            process.kill()


@pytest.mark.parametrize(("peer", "way", "behind"), TO_STDIO)
def test_a_client_on_http_at_a_server_on_stdio(peer: str, way: str, behind: str, tmp_path: Path) -> None:
    with listening(stdio_server(PAGE_SIZE, tmp_path / "ended")) as (addresses, process):
        target = addresses[{"sse": "sse_url", "ws": "websocket_url"}.get(way, "url")]
        seen = seen_by(peer, target, way)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    check(peer, way, behind, seen)
    dropped = errors.startswith("log messages of the upstream server are dropped: a call was cancelled")
    assert (process.returncode, dropped) == (143, (peer, way) in GAPS), errors
    assert errors.count("\n") == dropped
    assert (tmp_path / "ended").read_text() == "0"
