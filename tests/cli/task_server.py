"""A server with tasks for the tests of the command line: ``task_server.py http`` prints its URL."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import trio

from trio_mcp import Accepted, Context, Server, serve_http

server = Server("tasks", version="1.0")


@dataclass
class Size:
    size: str


@server.tool(task="required", structured=False)
async def report(days: int, ctx: Context) -> str:
    """A report, day by day."""
    for day in range(days):
        await ctx.progress(day, days)
        await trio.sleep(0.01)
    return f"{days} days"


@server.tool(task="required", structured=False)
async def ask(ctx: Context) -> str:
    """Ask for a size."""
    answer = await ctx.elicit("Which size?", Size)
    return answer.value.size if isinstance(answer, Accepted) else "none"


@server.tool(task="required", structured=False)
async def agree(ctx: Context) -> str:
    """Ask for yes or no."""
    return repr(await ctx.elicit("Really?", bool))


async def main() -> None:
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, server, "127.0.0.1", 0)
        sys.stdout.write(f"{address.url}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main)
