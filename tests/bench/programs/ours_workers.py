"""Our server in several processes, with a tool that computes: ``ours_workers.py json|orjson WORKERS``."""

from __future__ import annotations

import os
import sys
import time

CODEC, WORKERS = sys.argv[1], int(sys.argv[2])
if CODEC == "json":
    sys.modules["orjson"] = None  # type: ignore[assignment]  # as without the extra `speed`

from trio_mcp import Server  # noqa: E402

server = Server("bench", version="1")


@server.tool(thread=False)
def burn(seconds: float) -> str:
    """Compute for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return "burnt"


if __name__ == "__main__":
    os.dup2(1, 2)  # the server prints its port on standard error
    server.run(http="127.0.0.1:0", workers=WORKERS)
