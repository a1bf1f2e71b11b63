"""The subjects that are measured, and the CPU and memory of their processes.

- ``ours``: this package with the codec of the standard library, as without the extra `speed`; ``ours+orjson``: with it.
- ``bare``: programs with Trio, json and (for HTTP) h11 alone, which give the same answers; ``bare+orjson`` likewise.
- ``python`` and ``typescript``: the official SDKs.  In the rows about tasks ``python`` is FastMCP 4, with its queue in
  memory: the official SDKs have no tasks of 2026-07-28.
- ``before``: this package at another commit, with the programs of that commit; ``before+orjson`` likewise.

The programs are in `programs`.  Packages of other projects are installed once, into `.peers`.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import attrs

from tests.peers.installed import PEERS, node, npm, python_of

__all__ = [
    "PROGRAMS", "ROOT", "Usage", "checked_out", "client_command", "core_command", "replica_command", "running",
    "server_command", "tasks_command", "workers_command",
]  # fmt: skip

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
BEFORE = ROOT / ".peers" / "before"


@cache
def _orjson() -> str:
    """The folder to import orjson from.  Raises `Unavailable`."""
    (folder,) = python_of("bench-orjson", ("orjson",)).parents[1].glob("lib/*/site-packages")
    return str(folder)


@cache
def official_python() -> str:
    """The Python of the official SDK.  Raises `Unavailable`."""
    return str(python_of("bench-python-2.3.0", ("mcp==2.3.0", "httptools", "uvloop")))


@cache
def _typescript() -> Path:
    """The folder of the official TypeScript SDK, with the program of the bench.  Raises `Unavailable`."""
    folder = npm("typescript-server-2.4.0", PEERS["typescript-server-2.4.0"].packages)
    return Path(shutil.copy(PROGRAMS / "official.mjs", folder))  # a module finds its packages from its own folder


def _python(subject: str, program: str) -> list[str]:
    """The command for one of our programs, with its codec.  -P: files beside the program must not be imported."""
    name, _, codec = subject.partition("+")
    tree, name = (BEFORE, "ours") if name == "before" else (ROOT, name)
    path = str(tree) if codec != "orjson" else os.pathsep.join((str(tree), _orjson()))
    file = tree / PROGRAMS.relative_to(ROOT) / program.format(name)
    if not file.exists():  # an older commit does not have the program: then that of this tree runs with its package
        file = PROGRAMS / program.format(name)
    return ["env", f"PYTHONPATH={path}", sys.executable, "-P", str(file), codec or "json"]


@contextmanager
def checked_out(commit: str) -> Iterator[None]:
    """Within the block, the subject ``before`` is this package at that commit."""
    if BEFORE.exists():  # left by a run that was stopped
        subprocess.run(["git", "worktree", "remove", "--force", str(BEFORE)], cwd=ROOT, check=True)
    subprocess.run(["git", "worktree", "add", "--force", "--detach", str(BEFORE), commit], cwd=ROOT, check=True)
    try:
        # A process that has compiled its modules itself is slower by 1 % than one that reads their bytecode, and our
        # own tree has bytecode.
        subprocess.run([sys.executable, "-m", "compileall", "-q", "trio_mcp", "tests/bench"], cwd=BEFORE, check=True)
        yield
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(BEFORE)], cwd=ROOT, check=True)


def server_command(
    subject: str, transport: str, *, tools: int = 3, style: str = "json", works: bool = False
) -> list[str]:
    """The command that starts the server of this subject, with so many tools.  Over HTTP it answers calls in this
    style, if the client leaves it the choice.  With `works` it serves all requests of `works.py`.  Raises
    `Unavailable`."""
    options = [transport, str(tools), style, *(["works"] if works else [])]
    match subject:
        case "python":
            return [official_python(), str(PROGRAMS / "official.py"), *options]
        case "typescript":
            return [node(), str(_typescript()), *options]
        case _:
            apart = works and not subject.startswith("bare")
            return [*_python(subject, "{}_works.py" if apart else "{}.py"), *options]


def tasks_command(subject: str, store: str) -> list[str]:
    """The command that starts the server with tasks of this subject; our server has them in this store.  Raises
    `Unavailable`."""
    if subject == "python":
        peer = PEERS["fastmcp-tasks-4.1.2"]
        return [str(python_of(peer.name, peer.packages)), str(PROGRAMS / "tasks_fastmcp.py")]
    return [*_python(subject, "ours_tasks.py"), store]


def workers_command(subject: str, workers: int) -> list[str]:
    """The command that starts our server in so many processes, also for `bare`."""
    return [*_python(subject.replace("bare", "ours"), "ours_workers.py"), str(workers)]


def replica_command(subject: str, store: str) -> list[str]:
    """The command that starts our server on this store; for `bare` our server without a store."""
    return [*_python(subject.replace("bare", "ours"), "ours_replica.py"), "none" if subject == "bare" else store]


def client_command(subject: str, *arguments: str) -> list[str]:
    """The command that starts the client of this subject.  Raises `Unavailable`."""
    if subject == "python":
        return [official_python(), str(PROGRAMS / "official_client.py"), *arguments]
    kind = "bare" if subject.startswith("bare") else "ours"
    return [*_python(subject, "callers.py"), kind, *arguments]


def core_command(subject: str, work: str) -> list[str]:
    """The command that does some work of `core.py`."""
    return [*_python(subject, "core_work.py"), work]


@attrs.frozen
class Usage:
    """The CPU and the memory that a process has used so far."""

    process: subprocess.Popen[bytes] = attrs.field(repr=False)

    def cpu(self) -> float:
        """Seconds of CPU of all its threads."""
        return time.clock_gettime(~self.process.pid << 3 | 2)  # clock_getcpuclockid(3), as Linux numbers clocks

    def resident(self) -> float:
        """KiB of resident memory."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 1024


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of this command with pipes, and kill it at the end of the block.

    Python may write its bytecode, as any process does that starts a second time.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONHASHSEED"] = "0"  # otherwise the collisions in dicts differ in each process
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, bufsize=0
    ) as process:
        try:
            yield process
        finally:
            process.kill()
