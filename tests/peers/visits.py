"""Visits of real clients: a process with our server, a program that drives a client, and the results it prints."""

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
PATIENCE = 300.0  # seconds for all behaviours, on a busy machine; the Inspector starts a process for each of them


@attrs.frozen
class Served:
    """A server process, and its URLs."""

    url: str
    sse_url: str | None
    websocket_url: str | None
    process: subprocess.Popen[str] = attrs.field(repr=False)

    def target(self, way: str) -> str:
        """The URL for clients that use this way."""
        found = {"sse": self.sse_url, "ws": self.websocket_url}.get(way, self.url)
        assert found is not None
        return found


@attrs.frozen
class Visit:
    """The results of a program, its exit status, and the exit status of the server."""

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
            process.kill()  # does nothing if the process has ended


def stdio_server(page_size: int | None, ended: Path) -> list[str]:
    """The command of the everything server; the command writes its exit status into the file `ended`.

    The command sets the variables that the server needs, because most clients do not pass on unknown variables.
    """
    env = shutil.which("env")
    assert env is not None
    page = [f"INTEROP_PAGE_SIZE={page_size}"] if page_size else []
    server = [sys.executable, str(ROOT / "tests" / "fixtures" / "everything_server.py"), "stdio"]
    return [sys.executable, str(PROGRAMS / "record_exit.py"), str(ended), env, *page, *server]


def visited(
    peer: str,
    way: str,
    *behaviours: str,
    page_size: int | None = PAGE_SIZE,
    behind_nginx: bool = False,
    **options: Any,
) -> Visit:
    """Start a server, run the program of this peer, and return the visit."""
    command = needs(peer, PEERS[peer].command)
    if way.startswith("stdio"):
        return _visited_over_stdio(command, way, behaviours, page_size)
    if PEERS[peer].origin:
        options = {"allowed_origins": [PEERS[peer].origin], **options}
    if way == "sse":
        options |= {"sse_path": "/sse", "message_path": "/messages"}
    with served_by_process(page_size=page_size, **options) as served, contextlib.ExitStack() as stack:
        target = served.target(way)
        if behind_nginx:
            url = urlsplit(target)
            assert url.port is not None
            target = url._replace(netloc=f"127.0.0.1:{stack.enter_context(proxied(url.port))}").geturl()
        done = _run([*command, target, way, *behaviours])
        served.process.send_signal(signal.SIGTERM)
        left, server_errors = served.process.communicate(timeout=PATIENCE)
    visit = _visit(done, served.process.returncode, server_errors)
    kept = [f"{number} {kind}" for kind, number in json.loads(left or "{}").items() if number]
    return _with_server_end(visit, f"the server was left with {', '.join(kept)}") if kept else visit


def _visited_over_stdio(command: Sequence[str], way: str, behaviours: Sequence[str], page_size: int | None) -> Visit:
    """A visit over stdio.  The server is a child of the client, and shares its standard error."""
    with tempfile.TemporaryDirectory() as folder:
        ended = Path(folder) / "ended"
        done = _run([*command, json.dumps(stdio_server(page_size, ended)), way, *behaviours])
        visit = _visit(done, 0, "")
        status = ended.read_text() if ended.exists() else "an unknown status"
    return _with_server_end(visit, f"the server ended with {status}") if status != "0" else visit


def _with_server_end(visit: Visit, how: str) -> Visit:
    """Add the end of the server to the result of the behaviour `end`, if the client has reached it."""
    if "end" not in visit.seen:
        return visit
    return attrs.evolve(visit, seen={**visit.seen, "end": f"{visit.seen['end']}, but {how}"})


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def _visit(done: subprocess.CompletedProcess[str], server_status: int, server_errors: str) -> Visit:
    seen = {each["behaviour"]: each["seen"] for each in map(json.loads, done.stdout.splitlines())}
    return Visit(seen, done.returncode, done.stderr, server_status, server_errors)
