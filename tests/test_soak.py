"""A server process under load for a long time: its memory and its descriptors stop growing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from trio_mcp import Client, open_client

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
SERVER = Path(__file__).parent / "fixtures" / "everything_server.py"
CLIENTS = 8  # clients at a time
WORK = 40  # clients in one round
CALLS = 200
ROUNDS = 5
GROWTH = 1 << 20  # bytes by which the process may grow from the second round to the last


@asynccontextmanager
async def served(way: str) -> AsyncIterator[tuple[str, int]]:
    """The URL and the process id of a server in a separate process."""
    async with trio.open_nursery() as nursery:
        command = [sys.executable, str(SERVER), way, "0"]
        process = await nursery.start(partial(trio.run_process, command, stdout=subprocess.PIPE))
        assert process.stdout is not None
        url = b""
        while not url.endswith(b"\n"):
            url += await process.stdout.receive_some()
        yield url.decode().strip(), process.pid
        process.terminate()


async def work(client: Client) -> None:
    """The work of one client: a list, calls with and without progress, a read, an error, a call that it cancels."""
    await client.list_tools_page()
    for _ in range(CALLS):
        await client.call_tool("test_simple_text")
    await client.call_tool("test_tool_with_progress", on_progress=lambda *_: None)
    assert (await client.call_tool("test_error_handling")).is_error
    await client.read_resource("test://static-text")
    with trio.move_on_after(0.01):
        await client.call_tool("test_tool_with_progress", on_progress=lambda *_: None)


async def one_round(url: str, revision: str) -> None:
    async def clients() -> None:
        for _ in range(WORK // CLIENTS):
            async with open_client(url, revision=revision) as client:
                await work(client)

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(clients)


def used(pid: int) -> tuple[int, int]:
    """The resident bytes and the open descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the figures of a process are read from /proc")
@pytest.mark.parametrize(
    ("way", "revision"),
    [("http", "2026-07-28"), ("http", "2025-11-25"), ("sse", "2024-11-05"), ("ws", "2026-07-28"), ("ws", "2025-11-25")],
)
async def test_a_server_stops_growing_after_two_rounds(way: str, revision: str) -> None:
    seen = []
    async with served(way) as (url, pid):
        for _ in range(ROUNDS):
            await one_round(url, revision)
            await trio.sleep(1)  # the server cleans up its closed connections
            seen.append(used(pid))
    _, (second, handles), *_, (last, left) = seen
    assert left <= handles, seen
    assert last - second <= GROWTH, seen
