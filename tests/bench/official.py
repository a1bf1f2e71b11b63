"""The official Python SDK under uvicorn, with the two tools of the bench: ``official.py PORT json|sse``.

Runs in an environment of its own, where nothing of this project is installed.
"""

from __future__ import annotations

import sys

import uvicorn
from mcp.server.mcpserver import Context, MCPServer

TEXT = "Mostly sunny, 21 degrees, light wind from the west."

server = MCPServer("bench", log_level="WARNING")


@server.tool(structured_output=False)
async def forecast(city: str, days: int, units: str) -> str:
    return TEXT


@server.tool(structured_output=False)
async def report(city: str, days: int, units: str, ctx: Context) -> str:
    await ctx.report_progress(1, 2)
    return TEXT


app = server.streamable_http_app(json_response=sys.argv[2] == "json")
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
