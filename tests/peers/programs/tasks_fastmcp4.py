"""Tasks of FastMCP 4: ``tasks_fastmcp4.py serve`` on stdio, ``... serve modern`` over HTTP, or ``... visit URL`` or
``... visit COMMAND ...``.

The visit prints one JSON object, with the outcome of each tool that runs as a task.
"""

import json
import sys
from collections.abc import Awaitable
from typing import Any

import anyio
import mcp_types as types
from fastmcp import Client, Context, FastMCP
from fastmcp.client.transports import StdioTransport
from fastmcp.exceptions import ToolError
from fastmcp_tasks import TasksExtension, call_tool_task
from mcp.shared.exceptions import MCPError

server = FastMCP("tasks")
server.add_extension(TasksExtension(url="memory://"))


@server.tool
async def greet(name: str) -> str:
    return f"Hello, {name}!"


@server.tool(task=True)
async def slow_compute(seconds: float, label: str) -> str:
    await anyio.sleep(seconds)
    return f"{label} took {seconds:g} seconds"


@server.tool(task=True)
async def failing_job() -> str:
    raise ToolError("the job has failed")


@server.tool(task=True)
async def confirm_delete(filename: str, ctx: Context) -> str | types.InputRequiredResult:
    if ctx.input_responses is None:
        form = {"type": "object", "properties": {"confirm": {"type": "boolean"}}, "required": ["confirm"]}
        params = types.ElicitRequestFormParams(message=f"Delete {filename}?", requested_schema=form)
        return types.InputRequiredResult(input_requests={"sure": types.ElicitRequest(params=params)})
    answer = types.ElicitResult.model_validate(ctx.input_responses["sure"], from_attributes=True)
    return f"{filename}: {answer.action} {answer.content}"


async def accepts(*_: Any) -> dict[str, Any]:
    return {"confirm": True}


async def text_of(call: Awaitable[Any]) -> Any:
    result = await call
    return [result.is_error, result.content[0].text]


async def visit(command: list[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    where: Any = StdioTransport(command[0], command[1:]) if command[1:] else command[0]
    async with Client(where, elicitation_handler=accepts) as client:
        seen["greet"] = await text_of(client.call_tool("greet", {"name": "Ada"}))
        seen["slow"] = await text_of(client.call_tool("slow_compute", {"seconds": 0.1, "label": "sum"}))
        seen["confirm"] = await text_of(client.call_tool("confirm_delete", {"filename": "a.txt"}))
        seen["failing"] = await text_of(client.call_tool("failing_job", {}, raise_on_error=False))
        try:
            await client.call_tool("protocol_error_job", {})
        except (ToolError, MCPError) as error:
            seen["protocol_error"] = type(error).__name__
        task = await call_tool_task(client, "slow_compute", {"seconds": 60, "label": "long"})
        seen["started"] = (await task.status()).status
        await task.cancel()
        seen["cancelled"] = (await task.wait(timeout=10)).status
    return seen


if sys.argv[1:] == ["serve"]:
    server.run(show_banner=False)
elif sys.argv[1] == "serve":
    server.run("http", port=0, show_banner=False)
else:
    sys.stdout.write(json.dumps(anyio.run(visit, sys.argv[2:])) + "\n")
