"""Tasks between real peers: clients of others at our server, and our client at servers of others.

The official SDKs have the tasks of 2025-11-25, FastMCP 4 those of 2026-07-28.  A program in `programs` serves tools
that run as tasks, or visits such tools and prints one JSON object.  A gap says where a peer differs, as in `interop`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import pytest

from tests.peers.installed import PEERS, Peer, needs, visits
from tests.peers.interop import FILE, TASKS_OF_OURS, Gap, Pair
from tests.peers.visits import ROOT, served_by_process

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the peer

PATIENCE = 120.0  # seconds for one visit, on a busy machine
OURS = [sys.executable, str(ROOT / "tests" / "fixtures" / "everything_server.py"), "stdio"]
PYTHON, TYPESCRIPT, FASTMCP = NAMES = ("python-1.30.0", "typescript-1.32.2", "fastmcp-tasks-4.1.2")
PROGRAMS = dict(zip(NAMES, ("tasks_python1.py", "tasks_typescript1.mjs", "tasks_fastmcp4.py"), strict=True))
WAYS = {PYTHON: ("stdio", "session"), TYPESCRIPT: ("stdio", "session"), FASTMCP: ("stdio-modern", "modern")}
VISITS: list[Pair] = [(name, way) for name in NAMES for way in WAYS[name]]


def peer_of(name: str) -> Peer:
    return attrs.evolve(PEERS[name], program=PROGRAMS[name])


# Clients of others at our server.

# What clients see of the everything server: of a task its first and its last status, isError and the text.
CORE = {
    "capability": {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}},
    "support": {"slow_compute": "optional", "failing_job": "required", "confirm_delete": "optional"},
    "greet": "Hello, Ada!",
    "slow": ["working", "completed", False, "computed sum"],
    "asked": True,
    "confirm": ["working", "completed", False, "deleted a.txt"],
    "failing": ["working", "failed", True, "the job has failed"],
    "related": True,
    "plain_required": -32601,
    "task_forbidden": -32601,
    "listed": True,
    "cancelled": "cancelled",
    "cancelled_twice": -32602,
    "unknown": -32602,
}
EXTENSION = {
    "greet": [False, "Hello, Ada!"],
    "slow": [False, "computed sum"],
    "confirm": [False, "deleted a.txt"],
    "failing": [True, "the job has failed"],
    "protocol_error": "ToolError",
    "started": "working",
    "cancelled": "cancelled",
}
SEEN = {PYTHON: CORE, TYPESCRIPT: CORE, FASTMCP: EXTENSION}
CLIENT_GAPS = {
    TYPESCRIPT: {"plain_required": Gap(-32600, "it does not send a plain call of a tool that requires a task")},
}

TASKS_OF_OURS.holds(VISITS, tuple({**CORE, **EXTENSION}))


def printed(command: Sequence[str], *target: str) -> dict[str, Any]:
    """The object that a visit prints."""
    done = subprocess.run([*command, "visit", *target], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.mark.parametrize(("name", "way"), visits(VISITS))
def test_a_real_client_runs_tools_of_ours_as_tasks(name: str, way: str) -> None:
    command = needs(name, peer_of(name).command)
    with ExitStack() as stack:
        by_pipe = way.startswith("stdio")
        target = OURS if by_pipe else [stack.enter_context(served_by_process()).target(way)]
        seen = printed(command, *target)
    wrong = TASKS_OF_OURS.record((name, way), seen, SEEN[name], CLIENT_GAPS.get(name, {}))
    assert not wrong


def test_each_visit_to_tasks_of_ours_has_its_row_in_the_file() -> None:
    _, _, ours = FILE.read_text(encoding="utf-8").partition(f"## {TASKS_OF_OURS.title}")
    assert TASKS_OF_OURS.unseen(ours) == []
