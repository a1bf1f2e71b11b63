"""A server of somebody else in a process of its own, that says on its standard error where it listens."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import trio

from trio_mcp.transport import open_nursery

__all__ = ["listening"]

_SAID = re.compile(r"running on (http://127\.0\.0\.1:\d+)")


@asynccontextmanager
async def listening(command: Sequence[str], environment: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """Its origin, such as ``http://127.0.0.1:49152``; it is killed at the end of the block, where it must still run."""
    process = await trio.lowlevel.open_process(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **(environment or {})}
    )
    assert process.stderr is not None
    try:
        async with open_nursery() as nursery:
            said = ""
            while (found := _SAID.search(said)) is None:
                more = await process.stderr.receive_some()
                assert more, f"the server did not start:\n{said}"
                said += more.decode()
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
    """So that it can go on writing."""
    async for _ in stream:
        pass
