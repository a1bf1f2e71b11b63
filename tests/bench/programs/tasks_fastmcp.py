"""The server of FastMCP 4 with a tool that runs as a task, on stdio; its queue is in memory."""

import os

os.environ["FASTMCP_LOG_LEVEL"] = "ERROR"

from fastmcp import FastMCP
from fastmcp_tasks import TasksExtension

server = FastMCP("bench")
server.add_extension(TasksExtension(url="memory://"))


@server.tool(task=True)
async def echo(text: str) -> str:
    """Say the same again."""
    return text


server.run(show_banner=False)
