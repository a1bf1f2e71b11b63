"""Our server with the tools of the bench: ``ours.py json|orjson stdio|http TOOLS``.

It is an ordinary server, with the default settings and TOOLS tools.  Over HTTP it prints its address on standard
output.
"""

from __future__ import annotations

import os
import sys

CODEC, TRANSPORT, TOOLS = sys.argv[1], sys.argv[2], int(sys.argv[3])
if CODEC == "json":
    sys.modules["orjson"] = None  # type: ignore[assignment]  # as without the extra `speed`

import trio  # noqa: E402

from trio_mcp import Context, Server  # noqa: E402

server = Server("bench", version="1")


async def echo(text: str) -> str:
    """Say the same again."""
    return text


async def wait(seconds: float, burden: str = "") -> str:
    """Wait for so long, and hold the burden."""
    await trio.sleep(seconds)
    return "waited"


async def report(number: int, *, ctx: Context) -> str:
    """Report progress so many times."""
    for done in range(1, number + 1):
        await ctx.progress(done, number)
    return "reported"


def forecast(city: str, days: int = 3, units: str = "metric") -> str:
    """One of many tools that make the list very long."""
    return city


for tool in (echo, wait, report)[:TOOLS]:
    server.tool(tool)
for each in range(3, TOOLS):
    server.tool(name=f"forecast_{each}", title=f"The forecast by the station {each}")(forecast)


if __name__ == "__main__":
    if TRANSPORT == "stdio":
        server.run()
    else:
        os.dup2(1, 2)  # the server prints its address on standard error
        server.run(http="127.0.0.1:0")
