"""Tasks of the official Python SDK 1: ``tasks_python1.py serve`` on stdio, ``... serve session`` over HTTP, or
``... visit URL`` or ``... visit COMMAND ...``.

The visit prints one JSON object, with the outcome of each tool that runs as a task.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from mcp import ClientSession, StdioServerParameters, stdio_client, types
from mcp.client.experimental.task_handlers import ExperimentalTaskHandlers
from mcp.client.streamable_http import streamablehttp_client
from mcp.server.experimental.task_context import ServerTaskContext
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import McpError
from mcp.shared.experimental.tasks.helpers import create_task_state
from mcp.types import CallToolResult, TextContent
from starlette.applications import Starlette
from starlette.routing import Mount

server: Server[Any] = Server("tasks")
server.experimental.enable_tasks()
FORM = {"type": "object", "properties": {"confirm": {"type": "boolean"}}, "required": ["confirm"]}
TOOLS: Mapping[str, tuple[str, Mapping[str, str]]] = {  # the task support of each tool, and its arguments
    "greet": ("forbidden", {"name": "string"}),
    "slow_compute": ("optional", {"seconds": "number", "label": "string"}),
    "failing_job": ("required", {}),
    "confirm_delete": ("required", {"filename": "string"}),
}


@server.list_tools()
async def tools() -> list[types.Tool]:
    return [
        types.Tool(
            name=name,
            inputSchema={
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in given.items()},
                "required": list(given),
            },
            execution=types.ToolExecution(taskSupport=support),
        )
        for name, (support, given) in TOOLS.items()
    ]


def text(words: str, failed: bool = False) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=words)], isError=failed)


@server.call_tool()
async def call(name: str, given: dict[str, Any]) -> Any:
    async def work(task: ServerTaskContext) -> CallToolResult:
        if name == "slow_compute":
            await asyncio.sleep(given["seconds"])
            return text(f"{given['label']} took {given['seconds']:g} seconds")
        if name == "confirm_delete":
            answer = await task.elicit(f"Delete {given['filename']}?", FORM)
            return text(f"{given['filename']}: {answer.action} {answer.content}")
        return text("the job has failed", failed=True)

    context = server.request_context
    context.experimental.validate_task_mode(TOOLS[name][0])
    if context.experimental.is_task:
        return await context.experimental.run_task(work)
    return text(f"Hello, {given['name']}!") if name == "greet" else await work(None)  # type: ignore[arg-type]


async def serve() -> None:
    async with stdio_server() as (incoming, outgoing):
        options = server.create_initialization_options(NotificationOptions())
        await server.run(incoming, outgoing, options)


def serve_http() -> None:
    manager = StreamableHTTPSessionManager(server)

    @asynccontextmanager
    async def running(_: Any) -> AsyncIterator[None]:
        async with manager.run():
            yield

    uvicorn.run(Starlette(routes=[Mount("/", manager.handle_request)], lifespan=running), port=0)


async def accepts(*_: Any) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"confirm": True})


class ClientTasks:
    """The tasks of this client, for a server that sends an elicitation as a task."""

    def __init__(self) -> None:
        self.tasks: dict[str, tuple[types.Task, types.ElicitResult]] = {}

    async def create(
        self, _: Any, params: types.ElicitRequestParams, task: types.TaskMetadata
    ) -> types.CreateTaskResult:
        made = create_task_state(task)
        self.tasks[made.taskId] = made, await accepts()
        return types.CreateTaskResult(task=made)

    async def get(self, _: Any, params: types.GetTaskRequestParams) -> types.GetTaskResult:
        task, _answer = self.tasks[params.taskId]
        task.status = "completed"
        return types.GetTaskResult.model_validate(task.model_dump())

    async def result(self, _: Any, params: types.GetTaskPayloadRequestParams) -> types.GetTaskPayloadResult:
        return types.GetTaskPayloadResult.model_validate(self.tasks[params.taskId][1].model_dump())

    @property
    def handlers(self) -> ExperimentalTaskHandlers:
        return ExperimentalTaskHandlers(
            augmented_elicitation=self.create, get_task=self.get, get_task_result=self.result
        )


async def run(session: ClientSession, seen: dict[str, Any], name: str, given: dict[str, Any]) -> list[Any]:
    """Start a tool as a task, poll it until it ends or requires input, and get its result."""
    tasks = session.experimental
    made = await tasks.call_tool_as_task(name, given)
    states = [made.task.status]
    async for status in tasks.poll_task(made.task.taskId):
        states.append(status.status)
        if status.status == "input_required":
            break
    result = await tasks.get_task_result(made.task.taskId, CallToolResult)
    last = await tasks.get_task(made.task.taskId)
    meta = (result.meta or {}).get("io.modelcontextprotocol/related-task", {})
    seen["related"] = meta.get("taskId") == made.task.taskId
    seen["asked"] = seen.get("asked", False) or "input_required" in states
    return [states[0], last.status, result.isError, result.content[0].text]  # type: ignore[union-attr]


async def visit(command: list[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    where = StdioServerParameters(command=command[0], args=command[1:])
    client_tasks = ClientTasks()
    async with (
        stdio_client(where) if command[1:] else streamablehttp_client(command[0]) as streams,
        ClientSession(
            *streams[:2], elicitation_callback=accepts, experimental_task_handlers=client_tasks.handlers
        ) as session,
    ):
        opened = await session.initialize()
        assert opened.capabilities.tasks is not None
        seen["capability"] = opened.capabilities.tasks.model_dump(exclude_none=True)
        seen["support"] = {
            tool.name: tool.execution.taskSupport
            for tool in (await session.list_tools()).tools
            if tool.execution and tool.name in TOOLS and tool.name != "greet"
        }
        seen["greet"] = (await session.call_tool("greet", {"name": "Ada"})).content[0].text  # type: ignore[union-attr]
        seen["slow"] = await run(session, seen, "slow_compute", {"seconds": 0.1, "label": "sum"})
        seen["confirm"] = await run(session, seen, "confirm_delete", {"filename": "a.txt"})
        seen["failing"] = await run(session, seen, "failing_job", {})
        client_tasks.tasks.clear()
        later = await session.call_tool("ask_later", {})
        seen["later"] = [later.content[0].text, len(client_tasks.tasks)]  # type: ignore[union-attr]
        for name, wrong in (("plain_required", "failing_job"), ("task_forbidden", "greet")):
            try:
                if name == "task_forbidden":
                    await session.experimental.call_tool_as_task(wrong, {"name": "Ada"})
                else:
                    plain = await session.call_tool(wrong, {})
                    seen[name] = plain.content[0].text  # type: ignore[union-attr]
            except McpError as error:
                seen[name] = error.error.code
            except ValueError:  # a server of this SDK answers with a result
                seen[name] = "a result"
        tasks = session.experimental
        made = await tasks.call_tool_as_task("slow_compute", {"seconds": 60, "label": "long"})
        listed = [each.taskId for each in (await tasks.list_tasks()).tasks]
        seen["listed"] = made.task.taskId in listed
        seen["cancelled"] = (await tasks.cancel_task(made.task.taskId)).status
        try:
            await tasks.cancel_task(made.task.taskId)
        except McpError as error:
            seen["cancelled_twice"] = error.error.code
        try:
            await tasks.get_task("unknown")
        except McpError as error:
            seen["unknown"] = error.error.code
    return seen


if sys.argv[1:] == ["serve"]:
    asyncio.run(serve())
elif sys.argv[1] == "serve":
    serve_http()
else:
    sys.stdout.write(json.dumps(asyncio.run(visit(sys.argv[2:]))) + "\n")
