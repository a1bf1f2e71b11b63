"""Serve one client on standard input and output.

`serve_stdio` serves inside the caller's Trio program and handles no signals.  `run` is a whole process (see `process`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from trio_mcp.server.process import ProcessLife, live
from trio_mcp.server.session import serve_stream
from trio_mcp.transport.nursery import check_trio
from trio_mcp.transport.stdio import own_stdio, owned_stdio
from trio_mcp.transport.wire import Tap

if TYPE_CHECKING:
    from trio_mcp.server.server import Server

__all__ = ["run", "serve_stdio"]


async def serve_stdio(server: Server, *, shutdown_timeout: float = 5.0, tap: Tap | None = None) -> None:
    """Serve one client on standard input and output.

    Call it inside a Trio program; a script that only serves calls `server.run()`.  While it serves, `print` writes to
    stderr, because stdout belongs to the protocol.

    Returns after the end of stdin, when the running calls are answered.  They have `shutdown_timeout` seconds
    (`math.inf`: without a limit).  `tap(direction, data)` sees all messages.  It is safe to cancel, and installs no
    signal handler.  Raises `UsageError` outside of Trio, and `CannotServe` if stdin or stdout cannot be used.
    """
    check_trio()
    async with own_stdio() as stream:
        await serve_stream(server, stream, shutdown_timeout=shutdown_timeout, tap=tap)


def run(server: Server, *, shutdown_timeout: float = 5.0, tap: Tap | None = None) -> None:
    """Serve one client on standard input and output until the process ends.

    Returns after the end of input; raises SystemExit(130) after Ctrl-C and SystemExit(143) after SIGTERM.  Calls that
    run at the end of input, or when SIGTERM arrives, have `shutdown_timeout` seconds (`math.inf`: without a limit).
    Three seconds later the process ends without them.  Signals that the program ignores or handles already are not
    touched, and no signal is outside the main thread.
    """

    async def serve(life: ProcessLife) -> None:
        with owned_stdio(life) as stream:
            await serve_stream(server, stream, shutdown_timeout=shutdown_timeout, tap=tap)

    _greet(server)
    live(server, serve, shutdown_timeout=shutdown_timeout)


def _greet(server: Server) -> None:
    """Explain on stderr what the server waits for, if a person has started it in a terminal.  Hosts use pipes."""
    if sys.__stderr__ is not None and os.isatty(0):
        name = server._current_offer().info["name"]
        advice = "Add this command to your host's configuration. Press Ctrl-C to stop."
        line = f"{name} is waiting for an MCP client on stdin. {advice}\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="replace"))
