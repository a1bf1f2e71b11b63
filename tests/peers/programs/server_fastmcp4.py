"""A server by FastMCP 4: ``server_fastmcp4.py stdio|http|sse``."""

import os
import sys
from typing import Any, Optional

import anyio
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from mcp_types import InputRequiredResult, ListRootsRequest

server = FastMCP("peer")
ledger: list[str] = []


@server.tool
async def add(a: int, b: int, ctx: Context) -> int:
    await ctx.report_progress(1, 2)
    await ctx.info("hello")
    return a + b


@server.tool
def half(number: int) -> Optional[int]:  # noqa: UP045  # as they are written
    return number // 2 if number % 2 == 0 else None


@server.tool
def fail() -> str:
    raise ToolError("on purpose")


@server.tool(output_schema=None)
async def roots(ctx: Context) -> Any:
    if ctx.session.protocol_version != "2026-07-28":
        found = await ctx.session.list_roots()
    elif ctx.input_responses is None:
        return InputRequiredResult(input_requests={"roots": ListRootsRequest()})
    else:
        found = ctx.input_responses["roots"]
    return " ".join(str(each.uri) for each in found.roots)


@server.tool
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


@server.tool
def pid() -> int:
    return os.getpid()


@server.resource("peers://item/{name}")
def item(name: str) -> str:
    return f"item {name}"


@server.prompt
def greet(name: str) -> str:
    return f"Hello, {name}!"


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run(show_banner=False)
    else:
        server.run(sys.argv[1], port=0, show_banner=False)
