"""The server of the official Python SDK with the tools of the bench: ``official.py stdio|http TOOLS json|sse``.

By HTTP it runs under uvicorn, with httptools and uvloop, and prints the port it listens on.  Runs in an environment of
its own, where nothing of this project is installed.
"""

from __future__ import annotations

import socket
import sys

import anyio
from mcp.server.mcpserver import Context, MCPServer

TRANSPORT, TOOLS, STYLE = sys.argv[1:4]
server = MCPServer("bench", log_level="ERROR")


@server.tool(structured_output=False)
async def echo(text: str) -> str:
    """Say the same again."""
    return text


@server.tool(structured_output=False)
async def wait(seconds: float) -> str:
    """Take that long."""
    await anyio.sleep(seconds)
    return "waited"


@server.tool(structured_output=False)
async def report(number: int, ctx: Context) -> str:
    """Report progress so many times."""
    for done in range(1, number + 1):
        await ctx.report_progress(done, number)
    return "reported"


async def forecast(city: str, days: int = 3, units: str = "metric") -> str:
    """What there are many of, so that there are many."""
    return city


for each in range(3, int(TOOLS)):
    title = f"The forecast by the station {each}"
    server.add_tool(forecast, name=f"forecast_{each}", title=title, structured_output=False)


def by_http() -> None:
    import uvicorn

    # What it accepts by default is less than the largest of the bench.
    app = server.streamable_http_app(json_response=STYLE == "json", max_request_body_size=16 * 1024 * 1024)
    with socket.create_server(("127.0.0.1", 0), backlog=5000) as listener:
        print(listener.getsockname()[1], flush=True)
        # Its load takes turns with others, and connections may wait for so long.
        quiet = {"log_level": "warning", "access_log": False, "timeout_keep_alive": 600}
        config = uvicorn.Config(app, loop="uvloop", http="httptools", **quiet)
        uvicorn.Server(config).run(sockets=[listener])


if TRANSPORT == "stdio":
    anyio.run(server.run_stdio_async, backend_options={"use_uvloop": True})
else:
    by_http()
