"""Third-party clients through `trio-mcp bridge`, used like mcp-remote (from stdio to HTTP) and like supergateway (from
HTTP, HTTP+SSE and WebSocket to stdio).

The results must be the results of the same client without a bridge.  The rows of mcp-remote are in the table of
`test_clients`.
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

from tests.peers.behaviours import ABSENT, PAGE_SIZE, expected_results
from tests.peers.installed import PEERS, PROGRAMS, needs
from tests.peers.interop import BEHAVIOURS, BRIDGE, WAYS, Gap
from tests.peers.test_clients import gaps_of, revision_of
from tests.peers.visits import served_by_process, stdio_server

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the client

ROOT = Path(__file__).parents[2]
COMMAND = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "trio_mcp", "bridge")
PATIENCE = 300.0  # seconds for all behaviours of one program
CLIENTS = ("python-1.30.0", "python-2.3.0", "typescript-1.32.2", "typescript-2.4.0")
STDIO = ("stdio", "stdio-modern")
# The client, its way to the bridge, and the way of the bridge to the server.
FROM_STDIO = [
    (peer, way, upstream)
    for peer in CLIENTS
    for way in STDIO
    if way in PEERS[peer].ways
    for upstream in ("session", "modern", "sse", "ws")
]
TO_STDIO = [(peer, way, "stdio") for peer in CLIENTS for way in PEERS[peer].ways if way not in STDIO]

# HTTP+SSE and WebSocket to the server are transports of the bridge, so one client is enough for them.
FROM_STDIO_PARAMS = [
    pytest.param(
        *case, marks=[] if case[2] in ("session", "modern") or case[0] == "typescript-1.32.2" else pytest.mark.long
    )
    for case in FROM_STDIO
]

BRIDGE.declare([(f"{peer} to {WAYS[upstream]}", way) for peer, way, upstream in FROM_STDIO + TO_STDIO], BEHAVIOURS)


# All clients of 2026-07-28 over HTTP share one session with a stdio server.  Its log messages do not name their call,
# so after a cancelled call they could belong to a call of another client.
DROPPED = "without HTTP sessions it drops log messages for five minutes after a cancelled call"
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


def check(peer: str, way: str, upstream: str, seen: dict[str, object]) -> None:
    revision = revision_of(peer, way)
    pair = f"{peer} to {WAYS[upstream]}", way
    gaps = {**gaps_of(peer, way), **GAPS.get((peer, way), {})}
    wrong = BRIDGE.record(pair, seen, expected_results(revision), gaps, absent=ABSENT.get(revision, ()))
    assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())


@pytest.mark.parametrize(("peer", "way", "upstream"), FROM_STDIO_PARAMS)
def test_a_stdio_client_uses_an_http_server_through_the_bridge(
    peer: str, way: str, upstream: str, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    with served_by_process(page_size=PAGE_SIZE, sse_path="/sse", message_path="/messages") as served:
        revision = "2026-07-28" if upstream == "modern" else "2025-11-25"
        bridge = [*COMMAND, served.target(upstream), "--revision", revision]
        command = [sys.executable, str(PROGRAMS / "record_exit.py"), str(ended), *bridge]
        seen = seen_by(peer, json.dumps(command), way)
        served.process.send_signal(signal.SIGTERM)
        left, errors = served.process.communicate(timeout=PATIENCE)
    check(peer, way, upstream, seen)
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


@pytest.mark.parametrize(("peer", "way", "upstream"), TO_STDIO)
def test_an_http_client_uses_a_stdio_server_through_the_bridge(
    peer: str, way: str, upstream: str, tmp_path: Path
) -> None:
    with listening(stdio_server(PAGE_SIZE, tmp_path / "ended")) as (addresses, process):
        target = addresses[{"sse": "sse_url", "ws": "websocket_url"}.get(way, "url")]
        seen = seen_by(peer, target, way)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    check(peer, way, upstream, seen)
    dropped = errors.startswith("log messages of the upstream server are dropped: a call was cancelled")
    assert (process.returncode, dropped) == (143, (peer, way) in GAPS), errors
    assert errors.count("\n") == dropped
    assert (tmp_path / "ended").read_text() == "0"
