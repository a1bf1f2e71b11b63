"""A small server with the installed SDK, FastMCP or an official one, old or new: ``small_server.py stdio|http|sse``."""

import sys
from importlib.util import find_spec

import anyio

if find_spec("fastmcp"):
    from fastmcp import FastMCP as Server
elif find_spec("mcp.server.mcpserver"):
    from mcp.server.mcpserver import MCPServer as Server
else:
    from mcp.server.fastmcp import FastMCP as Server

server = Server("small")
ledger: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    return a + b


@server.tool()
def crash() -> str:
    raise ValueError("a secret")


@server.tool()
async def wait() -> str:
    ledger.append("began")
    await anyio.sleep(60)
    return "waited"


@server.tool(name="ledger")
def read_ledger() -> list[str]:
    return ledger


@server.resource("small://item/{name}")
def item(name: str) -> str:
    return f"item {name}"


@server.prompt()
def greet(name: str) -> str:
    return f"Hello, {name}!"


if __name__ == "__main__":
    way = {"http": "streamable-http"}.get(sys.argv[1], sys.argv[1])
    if way == "stdio":
        server.run()
    elif hasattr(server, "settings") and hasattr(server.settings, "port"):
        server.settings.port = 0
        server.run(way)
    else:
        server.run(way, port=0)
