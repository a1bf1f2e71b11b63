"""Visits of real clients: a server process of ours, a program that looks at it, and what that program saw."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs

from tests.peers.behaviours import PAGE_SIZE
from tests.peers.installed import PEERS, PROGRAMS, needs
from tests.peers.nginx import proxied

__all__ = ["Served", "Visit", "served_by_process", "stdio_server", "visited"]

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0  # seconds for all that one program looks at, on a busy machine; one starts a process for each look


@attrs.frozen
class Served:
    """A server process, and where it listens."""

    url: str
    sse_url: str | None
    websocket_url: str | None
    process: subprocess.Popen[str] = attrs.field(repr=False)

    def target(self, way: str) -> str:
        """Where clients find it that go this way."""
        found = {"sse": self.sse_url, "ws": self.websocket_url}.get(way, self.url)
        assert found is not None
        return found


@attrs.frozen
class Visit:
    """What a program saw, how it ended, and how the server ended after it."""

    seen: Mapping[str, Any]
    status: int
    errors: str = attrs.field(repr=False)
    server_status: int
    server_errors: str = attrs.field(repr=False)


@contextmanager
def served_by_process(**options: Any) -> Iterator[Served]:
    """`tests.peers.serving` in a process of its own, which ends with the block at the latest."""
    command = [sys.executable, "-m", "tests.peers.serving", json.dumps(options)]
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


def stdio_server(page_size: int | None, ended: Path) -> list[str]:
    """The command of the everything server, which leaves its exit status in that file.

    What it needs of the environment is in it: most clients pass nothing on that they do not know.
    """
    env = shutil.which("env")
    assert env is not None
    page = [f"INTEROP_PAGE_SIZE={page_size}"] if page_size else []
    server = [sys.executable, str(ROOT / "tests" / "fixtures" / "everything_server.py"), "stdio"]
    return [sys.executable, str(PROGRAMS / "witness.py"), str(ended), env, *page, *server]


def visited(
    peer: str,
    way: str,
    *behaviours: str,
    page_size: int | None = PAGE_SIZE,
    behind_nginx: bool = False,
    **options: Any,
) -> Visit:
    """A visit of this peer to a server of its own."""
    command = needs(peer, PEERS[peer].command)
    if way.startswith("stdio"):
        return _visited_by_pipe(command, way, behaviours, page_size)
    if PEERS[peer].origin:
        options = {"allowed_origins": [PEERS[peer].origin], **options}
    if way == "sse":
        options |= {"sse_path": "/sse", "message_path": "/messages"}
    with served_by_process(page_size=page_size, **options) as served, contextlib.ExitStack() as stack:
        target = served.target(way)
        if behind_nginx:
            there = urlsplit(target)
            assert there.port is not None
            target = there._replace(netloc=f"127.0.0.1:{stack.enter_context(proxied(there.port))}").geturl()
        done = _run([*command, target, way, *behaviours])
        served.process.send_signal(signal.SIGTERM)
        left, server_errors = served.process.communicate(timeout=PATIENCE)
    visit = _visit(done, served.process.returncode, server_errors)
    kept = [f"{number} {what}" for what, number in json.loads(left or "{}").items() if number]
    return _but(visit, f"the server was left with {', '.join(kept)}") if kept else visit


def _visited_by_pipe(command: Sequence[str], way: str, behaviours: Sequence[str], page_size: int | None) -> Visit:
    """The server is the client's child, and writes to its standard error."""
    with tempfile.TemporaryDirectory() as folder:
        ended = Path(folder) / "ended"
        done = _run([*command, json.dumps(stdio_server(page_size, ended)), way, *behaviours])
        visit = _visit(done, 0, "")
        status = ended.read_text() if ended.exists() else "nobody knows what"
    return _but(visit, f"the server ended with {status}") if status != "0" else visit


def _but(visit: Visit, how: str) -> Visit:
    """The same, with how the server fared, if the client thinks that it has come to its end."""
    if "end" not in visit.seen:
        return visit
    return attrs.evolve(visit, seen={**visit.seen, "end": f"{visit.seen['end']}, but {how}"})


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def _visit(done: subprocess.CompletedProcess[str], server_status: int, server_errors: str) -> Visit:
    seen = {each["behaviour"]: each["seen"] for each in map(json.loads, done.stdout.splitlines())}
    return Visit(seen, done.returncode, done.stderr, server_status, server_errors)
