"""The everything server with the official Python SDK 2.x: ``server2.py stdio|session|sse``.

It is an `MCPServer`.  In the handshake of older revisions an `MCPServer` declares less than it supports; the program
corrects this with the low-level server.
"""

from __future__ import annotations

import base64
import json
import sys
from functools import partial
from typing import Annotated, Any, Literal, Optional

import anyio
import mcp_types as types
import uvicorn
from mcp.server.lowlevel import NotificationOptions
from mcp.server.mcpserver import (
    Context,
    Elicit,
    ElicitationResult,
    ListRoots,
    MCPServer,
    Resolve,
    Sample,
    UserMessage,
)
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.prompts import Prompt
from mcp.server.mcpserver.resources import TextResource
from pydantic import BaseModel, Field
from report import KEEP_ALIVE

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mO4JGcEAALoASNSXim9AAAAAElFTkSuQmCC")
LEVELS = ("debug", "info", "notice", "warning", "error")
DYNAMIC = "test://interop-dynamic"

server = MCPServer("peer", instructions="interop fixture", log_level="ERROR")
lowlevel_server = server._lowlevel_server
# Without this the server declares that its lists never change.
lowlevel_server.create_initialization_options = partial(  # type: ignore[method-assign]
    lowlevel_server.create_initialization_options,
    NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True),
)
cancelled_tags: list[str] = []  # the tags of waits that were cancelled
wanted = {"level": "debug"}


# Tools.


class Sum(BaseModel):
    sum: float
    label: str


class Reply(BaseModel):
    response: str


@server.tool()
def test_simple_text() -> str:
    return "This is a simple text response for testing."


@server.tool()
async def interop_echo(text: str, delay_ms: int = 0) -> str:
    await anyio.sleep(delay_ms / 1000)
    return text


@server.tool()
def interop_structured(a: int, b: int) -> Sum:
    return Sum(sum=a + b, label=f"{a}+{b}")


@server.tool()
def half(number: int) -> Optional[int]:  # noqa: UP045  # the form that most servers use
    return number // 2 if number % 2 == 0 else None


@server.tool()
def test_error_handling() -> str:
    raise ToolError("This tool intentionally returns an error for testing")


@server.tool()
def interop_check(count: Annotated[int, Field(ge=1, le=10)], label: str) -> str:
    return f"{label}x{count}"


@server.tool()
async def test_tool_with_progress(ctx: Context) -> str:
    for done in (0, 50, 100):
        await ctx.report_progress(done, 100)
        await anyio.sleep(0.02)
    return "Progress was reported."


@server.tool()
async def interop_wait(seconds: float, tag: str, ctx: Context) -> str:
    await ctx.report_progress(0, seconds)
    try:
        await anyio.sleep(seconds)
    except anyio.get_cancelled_exc_class():
        cancelled_tags.append(tag)
        raise
    return f"waited {tag}"


@server.tool()
def interop_cancelled() -> str:
    return json.dumps(cancelled_tags)


@server.tool()
async def interop_log(ctx: Context) -> str:
    for level in LEVELS[LEVELS.index(wanted["level"]) :]:
        await ctx.log(level, {"level": level}, logger_name="interop")
    return "logged"


@server.tool()
async def interop_touch(uri: str, ctx: Context) -> str:
    await ctx.session.send_resource_updated(uri)
    await ctx.notify_resource_updated(uri)
    return "touched"


def interop_dynamic() -> str:
    return "there"


@server.tool()
async def interop_toggle(kind: Literal["tools", "resources", "prompts"], on: bool, ctx: Context) -> str:
    if kind == "tools":
        server.add_tool(interop_dynamic) if on else server.remove_tool("interop_dynamic")
        await ctx.session.send_tool_list_changed()
        await ctx.notify_tools_changed()
    elif kind == "resources":
        there = TextResource(uri=DYNAMIC, name="interop-dynamic", text="there")
        server.add_resource(there) if on else server._resource_manager._resources.pop(DYNAMIC)
        await ctx.session.send_resource_list_changed()
        await ctx.notify_resources_changed()
    else:
        server.add_prompt(Prompt.from_function(interop_dynamic)) if on else server.remove_prompt("interop_dynamic")
        await ctx.session.send_prompt_list_changed()
        await ctx.notify_prompts_changed()
    return "on" if on else "off"


async def ask_model(prompt: str) -> Sample:
    said = types.TextContent(text=prompt)
    return Sample([types.SamplingMessage(role="user", content=said)], max_tokens=100)


@server.tool()
async def test_sampling(prompt: str, answer: Annotated[types.CreateMessageResult, Resolve(ask_model)]) -> str:
    return f"LLM response: {answer.content.text}"


async def ask_user(message: str) -> Elicit[Reply]:
    return Elicit(message, Reply)


@server.tool()
async def test_elicitation(message: str, answer: Annotated[ElicitationResult[Reply], Resolve(ask_user)]) -> str:
    return f"action={answer.action} {answer.data.model_dump_json()}"


async def ask_roots() -> ListRoots:
    return ListRoots()


@server.tool()
async def interop_roots(found: Annotated[types.ListRootsResult, Resolve(ask_roots)]) -> str:
    return ",".join(str(root.uri) for root in found.roots)


# Resources.


@server.resource("test://static-text", mime_type="text/plain")
def static_text() -> str:
    return "This is the content of the static text resource."


@server.resource("test://static-binary", mime_type="image/png")
def static_binary() -> bytes:
    return PNG


@server.resource("test://watched-resource", mime_type="text/plain")
def watched() -> str:
    return "This is the content of the watched resource."


@server.resource("test://template/{id}/data", mime_type="application/json")
def template(id: str) -> str:
    return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


# Prompts.


@server.prompt()
def test_simple_prompt() -> str:
    return "This is a simple prompt for testing."


@server.prompt()
def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@server.prompt()
def test_prompt_with_embedded_resource(resourceUri: str) -> Any:
    resource = types.TextResourceContents(uri=resourceUri, mime_type="text/plain", text="It is embedded.")
    return [UserMessage(types.EmbeddedResource(resource=resource)), UserMessage("Please process it.")]


@server.prompt()
def test_prompt_with_image() -> Any:
    image = types.ImageContent(data=base64.b64encode(PNG).decode(), mime_type="image/png")
    return [UserMessage(image), UserMessage("Please analyze it.")]


@server.completion()
async def complete(ref: Any, argument: Any, context: Any) -> types.Completion:
    known = ["1", "12", "2"]
    if argument.name == "arg1":
        known = ["alpha", "alphabet", "beta", "gamma"]
    elif argument.name == "arg2":
        known = [f"{context.arguments['arg1']}-2"] if context else []
    return types.Completion(values=[each for each in known if each.startswith(argument.value)])


# Handlers of the low-level server.


async def set_level(ctx: Any, params: types.SetLevelRequestParams) -> types.EmptyResult:
    wanted["level"] = params.level
    return types.EmptyResult()


async def subscribe(ctx: Any, params: Any) -> types.EmptyResult:
    return types.EmptyResult()


lowlevel_server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_level)
lowlevel_server.add_request_handler("resources/subscribe", types.SubscribeRequestParams, subscribe)
lowlevel_server.add_request_handler("resources/unsubscribe", types.UnsubscribeRequestParams, subscribe)


def main(way: str) -> None:
    if way == "stdio":
        server.run()
    else:
        app = server.sse_app() if way == "sse" else server.streamable_http_app()
        uvicorn.run(app, port=0, timeout_keep_alive=KEEP_ALIVE)


if __name__ == "__main__":
    main(sys.argv[1])
