"""A server by the official Python SDK 2.x: ``server2.py stdio|streamable-http|sse``."""

import os
import sys
from typing import Any, Optional

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import InputRequiredResult, ListRootsRequest

server = MCPServer("peer")
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
    raise ToolError("on purpose")


@server.tool(structured_output=False)
async def roots(ctx: Context) -> Any:
    if ctx.protocol_version != "2026-07-28":
        found = await ctx.session.list_roots()
    elif ctx.input_responses is None:
        return InputRequiredResult(input_requests={"roots": ListRootsRequest()})
    else:
        found = ctx.input_responses["roots"]
    return " ".join(str(each.uri) for each in found.roots)


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
    if sys.argv[1] == "stdio":
        server.run()
    else:
        server.run(sys.argv[1], port=0)
