"""Serve one client on standard input and output.

`serve_stdio` serves within the caller's program and touches no signal.  `run` is a whole process (see `process`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from trio_mcp.server.driver import serve_stream
from trio_mcp.server.process import ProcessLife, live
from trio_mcp.transport.duplex import Tap
from trio_mcp.transport.nursery import check_trio
from trio_mcp.transport.stdio import own_stdio, owned_stdio

if TYPE_CHECKING:
    from trio_mcp.server.server import Server

__all__ = ["run", "serve_stdio"]


async def serve_stdio(server: Server, *, shutdown_timeout: float = 5.0, tap: Tap | None = None) -> None:
    """Serve one client on standard input and output.

    Returns at the end of input, when the calls that run then are answered; they have `shutdown_timeout` seconds for it
    (`math.inf`: as long as they take).  To be cancelled like anything else.  No signal handler is installed, and what
    is printed afterwards is on standard output again: a process that does nothing but serve calls `run`.
    """
    check_trio()
    async with own_stdio() as stream:
        await serve_stream(server, stream, shutdown_timeout=shutdown_timeout, tap=tap)


def run(server: Server, *, shutdown_timeout: float = 5.0, tap: Tap | None = None) -> None:
    """Serve one client on standard input and output as the purpose of this process.

    Returns after the end of input; raises SystemExit(130) after Ctrl-C and SystemExit(143) after SIGTERM.  Calls that
    run at the end of input, or when SIGTERM comes, have `shutdown_timeout` seconds (`math.inf`: as long as they take);
    what has not ended three seconds later is left.  Signals that the program has ignored or handles already are left to
    it, and so are all of them outside the main thread.
    """

    async def serve(life: ProcessLife) -> None:
        with owned_stdio(life) as stream:
            await serve_stream(server, stream, shutdown_timeout=shutdown_timeout, tap=tap)

    _greet(server)
    live(server, serve, shutdown_timeout=shutdown_timeout)


def _greet(server: Server) -> None:
    """Tell whoever has started this by hand why nothing happens; what a host gives it is no terminal."""
    if sys.__stderr__ is not None and os.isatty(0):
        name = server.offer().info["name"]
        line = f"{name} waits for a client on standard input, which hosts are: give one this command (Ctrl-C ends it)\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="replace"))
