"""The everything server with FastMCP 4: ``server_fastmcp4.py stdio|session|sse``."""

import base64
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional

import anyio
import mcp_types as types
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.prompts import Message, Prompt
from fastmcp.resources import TextResource
from fastmcp.tools import Tool
from pydantic import BaseModel, Field
from report import KEEP_ALIVE

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mO4JGcEAALoASNSXim9AAAAAElFTkSuQmCC")
LEVELS = ("debug", "info", "notice", "warning", "error")
DYNAMIC = "test://interop-dynamic"

server = FastMCP("peer", "interop fixture", list_page_size=2)
cancelled_tags: list[str] = []  # the tags of waits that were cancelled


# Tools.


class Sum(BaseModel):
    sum: float
    label: str


class Reply(BaseModel):
    response: str


@server.tool
def test_simple_text() -> str:
    return "This is a simple text response for testing."


@server.tool
async def interop_echo(text: str, delay_ms: int = 0) -> str:
    await anyio.sleep(delay_ms / 1000)
    return text


@server.tool
def interop_structured(a: int, b: int) -> Sum:
    return Sum(sum=a + b, label=f"{a}+{b}")


@server.tool
def half(number: int) -> Optional[int]:  # noqa: UP045  # the form that most servers use
    return number // 2 if number % 2 == 0 else None


@server.tool
def test_error_handling() -> str:
    raise ToolError("This tool intentionally returns an error for testing")


@server.tool
def interop_check(count: Annotated[int, Field(ge=1, le=10)], label: str) -> str:
    return f"{label}x{count}"


@server.tool
async def test_tool_with_progress(ctx: Context) -> str:
    for done in (0, 50, 100):
        await ctx.report_progress(done, 100)
        await anyio.sleep(0.02)
    return "Progress was reported."


@server.tool
async def interop_wait(seconds: float, tag: str, ctx: Context) -> str:
    await ctx.report_progress(0, seconds)
    try:
        await anyio.sleep(seconds)
    except anyio.get_cancelled_exc_class():
        cancelled_tags.append(tag)
        raise
    return f"waited {tag}"


@server.tool
def interop_cancelled() -> str:
    return json.dumps(cancelled_tags)


@server.tool
async def interop_log(ctx: Context) -> str:
    for level in LEVELS:
        await ctx.log(level, level=level, logger_name="interop")
    return "logged"


@server.tool
async def interop_touch(uri: str, ctx: Context) -> str:
    await ctx.session.send_resource_updated(uri)
    return "touched"


def interop_dynamic() -> str:
    return "there"


@server.tool
async def interop_toggle(kind: Literal["tools", "resources", "prompts"], on: bool, ctx: Context) -> str:
    provider = server.local_provider
    if kind == "tools":
        server.add_tool(Tool.from_function(interop_dynamic)) if on else provider.remove_tool("interop_dynamic")
        await ctx.send_notification(types.ToolListChangedNotification())
    elif kind == "resources":
        there = TextResource(uri=DYNAMIC, name="interop-dynamic", text="there")
        server.add_resource(there) if on else provider.remove_resource(DYNAMIC)
        await ctx.send_notification(types.ResourceListChangedNotification())
    else:
        server.add_prompt(Prompt.from_function(interop_dynamic)) if on else provider.remove_prompt("interop_dynamic")
        await ctx.send_notification(types.PromptListChangedNotification())
    return "on" if on else "off"


async def ask(ctx: Context, request: Any, answer: type[Any], go: Callable[[Any], str]) -> Any:
    """Send a request to the client, or, in 2026-07-28, return a result that contains the request."""
    if ctx.session.protocol_version != "2026-07-28":
        return go(await ctx.session.send_request(request, answer))
    if ctx.input_responses is None:
        return types.InputRequiredResult(input_requests={"answer": request})
    return go(ctx.input_responses["answer"])


@server.tool(output_schema=None)
async def test_sampling(prompt: str, ctx: Context) -> Any:
    messages = [types.SamplingMessage(role="user", content=types.TextContent(text=prompt))]
    request = types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=messages, max_tokens=100))
    return await ask(ctx, request, types.CreateMessageResult, lambda answer: f"LLM response: {answer.content.text}")


@server.tool(output_schema=None)
async def test_elicitation(message: str, ctx: Context) -> Any:
    params = types.ElicitRequestFormParams(message=message, requested_schema=Reply.model_json_schema())
    return await ask(
        ctx,
        types.ElicitRequest(params=params),
        types.ElicitResult,
        lambda answer: f"action={answer.action} {json.dumps(answer.content)}",
    )


@server.tool(output_schema=None)
async def interop_roots(ctx: Context) -> Any:
    return await ask(
        ctx,
        types.ListRootsRequest(),
        types.ListRootsResult,
        lambda answer: ",".join(str(root.uri) for root in answer.roots),
    )


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


@server.prompt
def test_simple_prompt() -> str:
    return "This is a simple prompt for testing."


@server.prompt
def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@server.prompt
def test_prompt_with_embedded_resource(resourceUri: str) -> list[Message]:
    resource = types.TextResourceContents(uri=resourceUri, mime_type="text/plain", text="It is embedded.")
    return [Message(types.EmbeddedResource(resource=resource)), Message("Please process it.")]


@server.prompt
def test_prompt_with_image() -> list[Message]:
    image = types.ImageContent(data=base64.b64encode(PNG).decode(), mime_type="image/png")
    return [Message(image), Message("Please analyze it.")]


@server.completion
def complete(ref: Any, argument: Any, context: Any) -> list[str]:
    known = ["1", "12", "2"]
    if argument.name == "arg1":
        known = ["alpha", "alphabet", "beta", "gamma"]
    elif argument.name == "arg2":
        known = [f"{context.arguments['arg1']}-2"] if context else []
    return [each for each in known if each.startswith(argument.value)]


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run(show_banner=False)
    else:
        way = "sse" if sys.argv[1] == "sse" else "http"
        server.run(way, port=0, show_banner=False, uvicorn_config={"timeout_keep_alive": KEEP_ALIVE})
