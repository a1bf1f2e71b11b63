"""A redis-server process with its own folder and socket: `RedisServer()`.

It keeps its data as the documentation asks for, with ``appendonly yes``, so the data is there after a restart.  It
never waits for the disk: the tests kill the process, but not the machine.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.peers.installed import Unavailable, needs, tool
from tests.ports import unclaimed_port

__all__ = ["RedisServer", "cluster", "redis_server", "started_redis"]

TIMEOUT = 20.0  # seconds, to start or to stop


class RedisServer:
    """A process; `start` starts it, also after `kill`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.path = folder / "redis.sock"
        self.url = f"unix://{self.path}"
        self._command = [
            *(_program(), "--port", "0", "--unixsocket", str(self.path)),
            *("--dir", str(folder), "--appendonly", "yes", "--appendfsync", "no"),
            *("--save", "", "--logfile", str(folder / "log"), *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + TIMEOUT
        while not self._answers():
            assert self._process.poll() is None, self._log()
            assert time.monotonic() < deadline, self._log()
            time.sleep(0.005)

    def _answers(self) -> bool:
        try:
            return self.ask("PING").startswith((b"+PONG", b"-NOAUTH"))  # it may be loading
        except OSError:
            return False

    def ask(self, command: str) -> bytes:
        """Send a command, and return the first bytes of the reply."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(TIMEOUT)
            client.connect(str(self.path))
            client.sendall(f"{command}\r\n".encode())
            return client.recv(4096)

    def _log(self) -> str:
        return (self.path.parent / "log").read_text()

    def stop(self) -> None:
        """Suspend the process until `go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(TIMEOUT)
            self._process = None
            self.path.unlink(missing_ok=True)


def cluster() -> list[str]:
    """The options of a node of a cluster, with ports that no other process takes by chance."""
    return ["--cluster-enabled", "yes", "--port", str(unclaimed_port()), "--cluster-port", str(unclaimed_port())]


def _program() -> str:
    """The path of redis-server.  Raises `Unavailable` if there is no redis-server or no coredis."""
    if find_spec("coredis") is None:
        raise Unavailable("there is no coredis in this environment")
    return tool("redis-server")


@contextmanager
def started_redis(*options: str) -> Iterator[RedisServer]:
    """A started server, for the length of a block.  Raises `Unavailable`."""
    folder = Path(tempfile.mkdtemp(prefix="redis-"))
    try:
        server = RedisServer(folder, *options)
        try:
            server.start()
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A started server, for the length of a block.  Skips the test if Redis is not installed."""
    needs("Redis", _program)
    with started_redis(*options) as server:
        yield server
