"""A server for tests that kill its process.

    python -m tests.extensions.killable_server FOLDER [URL]

Its tasks outlive the process: they are in a file of the folder, or in the Redis at this URL.  With Redis, other
processes notice the end of a process when its lease expires, so the lease is short.  The server prints its URL when it
listens.  Each run of a handler adds a line to the file `runs` of the folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import trio

from trio_mcp import Accepted, Context, Limits, Server, serve_http

# The lease is internal.
from trio_mcp.extensions.tasks import keeper
from trio_mcp.stores import RedisStore, SQLiteStore, Store

LEASE = 3.0  # seconds


def make_server(folder: Path, url: str | None) -> Server:
    store: Store = SQLiteStore(folder / "tasks.db") if url is None else RedisStore(url)
    limits = Limits(tasks=200_000, tasks_each=200_000)
    server = Server("killable", store=store, state_keys=[bytes(32)], limits=limits)
    runs = os.open(folder / "runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @server.tool(task="required")
    async def once(token: str, seconds: float) -> str:
        """Work that cannot be repeated."""
        os.write(runs, f"{token}\n".encode())
        await trio.sleep(seconds)
        return f"done {token}"

    @server.tool(task="required", replay=True)
    async def again(token: str, seconds: float, ctx: Context) -> str:
        """Work that can be repeated, with status messages."""
        os.write(runs, f"{token}\n".encode())
        for number in range(4):
            await ctx.task.status(f"part {number}")
            await trio.sleep(seconds / 4)
        return f"done {token}"

    @server.tool(task="required", replay=True)
    async def asks(token: str, seconds: float, ctx: Context) -> str:
        """Two questions, with work after each."""
        os.write(runs, f"{token}\n".encode())
        answers = []
        for number in range(2):
            answer = await ctx.elicit(f"{token} {number}?", str)
            answers.append(answer.value if isinstance(answer, Accepted) else "nothing")
            await trio.sleep(seconds)
        return f"done {token} {' '.join(answers)}"

    return server


async def main(folder: Path, url: str | None = None) -> None:
    if url is not None:
        keeper.LEASE, keeper._PERIOD = LEASE, LEASE / 3  # type: ignore[misc]  # constants
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, make_server(folder, url))
        sys.stdout.write(f"{address.url}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), *sys.argv[2:])
