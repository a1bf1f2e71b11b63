"""A server process under load for a long time: its memory and its descriptors stay what they were."""

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
CLIENTS = 8  # at once; each is one of WORK clients, one after the other
WORK = 40
CALLS = 200
ROUNDS = 5
GROWTH = 1 << 20  # bytes that the process may grow by from the second round to the last


@asynccontextmanager
async def served(way: str) -> AsyncIterator[tuple[str, int]]:
    """The URL of a server in a process of its own, and the number of that process."""
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
    """What a client may do: lists, calls with and without progress, reads, an error, a call that it leaves."""
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


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="a process is measured in /proc")
@pytest.mark.parametrize(
    ("way", "revision"),
    [("http", "2026-07-28"), ("http", "2025-11-25"), ("sse", "2024-11-05"), ("ws", "2026-07-28"), ("ws", "2025-11-25")],
)
async def test_a_server_grows_no_more_after_its_first_clients(way: str, revision: str) -> None:
    seen = []
    async with served(way) as (url, pid):
        for _ in range(ROUNDS):
            await one_round(url, revision)
            await trio.sleep(1)  # closed connections are taken down
            seen.append(used(pid))
    _, (second, handles), *_, (last, left) = seen
    assert left <= handles, seen
    assert last - second <= GROWTH, seen
