"""Visits of real clients: a server process of ours, a program that looks at it, and what that program saw."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs

from tests.peers.installed import PEERS, needs
from tests.peers.nginx import proxied

__all__ = ["Served", "Visit", "served_by_process", "visited"]

ROOT = Path(__file__).parents[2]
PATIENCE = 90.0  # seconds for all that one program looks at, on a busy machine


@attrs.frozen
class Served:
    """A server process, and where it listens."""

    url: str
    sse_url: str | None
    process: subprocess.Popen[str] = attrs.field(repr=False)


@attrs.frozen
class Visit:
    """What a program saw, how it ended, and how the server ended after it."""

    seen: Mapping[str, Any]
    status: int
    errors: str = attrs.field(repr=False)
    left: Mapping[str, int]
    """What was still going on in the server."""
    server_status: int
    server_errors: str = attrs.field(repr=False)


@contextmanager
def served_by_process(**options: Any) -> Iterator[Served]:
    """`tests.peers.server` in a process of its own, which ends with the block at the latest."""
    command = [sys.executable, "-m", "tests.peers.server", json.dumps(options)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise AssertionError(f"the server did not start:\n{process.communicate()[1]}")
            yield Served(**json.loads(line), process=process)
        finally:
            process.kill()  # which does nothing where it has ended


def visited(peer: str, way: str, *behaviours: str, behind_nginx: bool = False, **options: Any) -> Visit:
    """A visit of this peer to a server of its own."""
    command = needs(peer, PEERS[peer].command)
    if way == "sse":
        options |= {"sse_path": "/sse", "message_path": "/messages"}
    with served_by_process(**options) as served, contextlib.ExitStack() as stack:
        url = served.sse_url if way == "sse" else served.url
        if behind_nginx:
            there = urlsplit(url)
            url = there._replace(netloc=f"127.0.0.1:{stack.enter_context(proxied(there.port))}").geturl()
        done = subprocess.run(
            [*command, url, way, *behaviours], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        served.process.send_signal(signal.SIGTERM)
        left, server_errors = served.process.communicate(timeout=PATIENCE)
    seen = {each["behaviour"]: each["seen"] for each in map(json.loads, done.stdout.splitlines())}
    return Visit(seen, done.returncode, done.stderr, json.loads(left or "{}"), served.process.returncode, server_errors)
