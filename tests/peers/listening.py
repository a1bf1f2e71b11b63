"""A third-party server in a process of its own, which prints its address on standard error."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import trio

from trio_mcp.transport import open_nursery

__all__ = ["listening"]

_ADDRESS = re.compile(r"running on (http://127\.0\.0\.1:\d+)")


@asynccontextmanager
async def listening(command: Sequence[str], environment: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """Start the server and yield its origin, for example ``http://127.0.0.1:49152``.

    The server must still run at the end of the block, and is killed there.
    """
    process = await trio.lowlevel.open_process(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **(environment or {})}
    )
    assert process.stderr is not None
    try:
        async with open_nursery() as nursery:
            output = ""
            while (found := _ADDRESS.search(output)) is None:
                more = await process.stderr.receive_some()
                assert more, f"the server did not start:\n{output}"
                output += more.decode()
            nursery.start_soon(_drain, process.stderr)
            yield found[1]
            assert process.poll() is None, "the server has ended"
            nursery.cancel_scope.cancel()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stderr.aclose()


async def _drain(stream: trio.abc.ReceiveStream) -> None:
    """Read the rest of standard error, so that a full pipe never blocks the server."""
    async for _ in stream:
        pass
