"""A server by the official Python SDK 1.x: ``server1.py stdio|streamable-http|sse``."""

import os
import sys
from typing import Optional

import anyio
from mcp.server.fastmcp import Context, FastMCP

server = FastMCP("peer", port=0)
ledger: list[str] = []


@server.tool()
async def add(a: int, b: int, ctx: Context) -> int:
    await ctx.report_progress(1, 2)
    await ctx.info("hello")
    return a + b


@server.tool()
def half(number: int) -> Optional[int]:  # noqa: UP045  # as they are written
    return number // 2 if number % 2 == 0 else None


@server.tool()
def fail() -> str:
    raise ValueError("on purpose")


@server.tool()
async def roots(ctx: Context) -> str:
    return " ".join(str(each.uri) for each in (await ctx.session.list_roots()).roots)


@server.tool()
async def wait() -> str:
    ledger.append("began")
    try:
        await anyio.sleep(60)
    except anyio.get_cancelled_exc_class():
        ledger.append("cancelled")
        raise
    return "waited"


@server.tool(name="ledger")
def read_ledger() -> list[str]:
    return ledger


@server.tool()
def pid() -> int:
    return os.getpid()


@server.resource("peers://item/{name}")
def item(name: str) -> str:
    return f"item {name}"


@server.prompt()
def greet(name: str) -> str:
    return f"Hello, {name}!"


if __name__ == "__main__":
    server.run(transport=sys.argv[1])
