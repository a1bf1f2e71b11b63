"""What a server costs to start.

Both processes have their bytecode, as after any second start; compiling is measured by nobody who uses a server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
LINES = [
    {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO},
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
    {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "echo", "arguments": {"text": "hello"}}},
]
MODULES, MEBIBYTES = 330, 34  # the most that importing may cost
COST = """
import os, sys
{statement}
pages = int(open("/proc/self/statm").read().split()[1]) if os.path.exists("/proc/self/statm") else 0
print(len(sys.modules), pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
"""


def starters(cache: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """Seconds from the start of examples/echo.py to its first answer to a call; and those of a bare `import trio`."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    asked = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)

    def server() -> float:
        begin = time.perf_counter()
        command = [sys.executable, str(ROOT / "examples" / "echo.py")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(asked)
            process.stdin.flush()
            process.stdout.readline()
            answer = json.loads(process.stdout.readline())
            seconds = time.perf_counter() - begin
            process.stdin.close()
        assert answer["result"]["content"] == [{"type": "text", "text": "hello"}]
        return seconds

    def bare() -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import trio"], env=environment, check=True)
        return time.perf_counter() - begin

    return server, bare


def imported(statement: str) -> tuple[int, float]:
    """The modules and the MiB of a process after this statement (0 MiB where the system does not tell)."""
    command = [sys.executable, "-c", COST.format(statement=statement)]
    modules, size = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(modules), float(size)


def rows() -> Iterator[tuple[str, str, float, tuple[float, float, float]]]:
    """As the rows of the core."""
    with tempfile.TemporaryDirectory() as cache:
        server, bare = starters(cache)
        server(), bare()  # which leave their bytecode behind
        pairs = [(server(), bare()) for _ in range(15)]
    each = sorted(one / other for one, other in pairs)
    best = min(one for one, _ in pairs) / min(other for _, other in pairs)
    yield "start of examples/echo.py to its first answer", "import trio", 1.5, (best, each[0], each[-1])
    for statement in ("import trio_mcp", "from trio_mcp import Server, serve_stdio"):
        modules, size = imported(statement)
        yield statement, f"{MODULES} modules", 1.0, (modules / MODULES,) * 3
        yield statement, f"{MEBIBYTES} MiB", 1.0, (size / MEBIBYTES,) * 3
