"""The everything server with the official Python SDK 1.x: ``server1.py stdio|session|sse|ws``.

It is a `FastMCP`, like most servers.  Features that `FastMCP` lacks use its low-level server, as its users do; features
that the low-level server lacks, too, are cancelled_tags out.  Older versions cannot read annotations that are strings.
"""

import base64
import json
import sys
from functools import partial
from typing import Annotated, Any, Literal, Optional

import anyio
import uvicorn
from mcp import types
from mcp.server.fastmcp import Context, FastMCP
from mcp.server.fastmcp.prompts import Prompt
from mcp.server.fastmcp.resources import TextResource
from mcp.server.lowlevel import NotificationOptions
from pydantic import BaseModel, Field
from report import KEEP_ALIVE

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mO4JGcEAALoASNSXim9AAAAAElFTkSuQmCC")
IMAGE = types.ImageContent(type="image", data=base64.b64encode(PNG).decode(), mimeType="image/png")
LEVELS = ("debug", "info", "notice", "warning", "error")

server = FastMCP("peer", "interop fixture", port=0, log_level="WARNING")
lowlevel_server = server._mcp_server
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
    raise ValueError("This tool intentionally returns an error for testing")


@server.tool()
def interop_check(count: Annotated[int, Field(ge=1, le=10)], label: str) -> str:
    return f"{label}x{count}"


@server.tool()
async def test_tool_with_progress(ctx: Context) -> str:
    for done in (0, 50, 100):
        await ctx.report_progress(done, 100)
    # Over HTTP the reports use another stream than the result.  The ping makes sure that the client has them first.
    await ctx.session.send_ping()
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
        await ctx.session.send_log_message(level, {"level": level}, "interop", related_request_id=ctx.request_id)
    return "logged"


@server.tool()
async def interop_touch(uri: str, ctx: Context) -> str:
    await ctx.session.send_resource_updated(uri)
    return "touched"


def interop_dynamic() -> str:
    return "there"


@server.tool()
async def interop_toggle(kind: Literal["tools", "resources", "prompts"], on: bool, ctx: Context) -> str:
    if kind == "tools":
        server.add_tool(interop_dynamic) if on else server._tool_manager._tools.pop("interop_dynamic")
        await ctx.session.send_tool_list_changed()
    elif kind == "resources":
        there = TextResource(uri="test://interop-dynamic", name="interop-dynamic", text="there")
        server.add_resource(there) if on else server._resource_manager._resources.pop(str(there.uri))
        await ctx.session.send_resource_list_changed()
    else:
        prompt = Prompt.from_function(interop_dynamic)
        server.add_prompt(prompt) if on else server._prompt_manager._prompts.pop(prompt.name)
        await ctx.session.send_prompt_list_changed()
    return "on" if on else "off"


@server.tool()
async def test_sampling(prompt: str, ctx: Context) -> str:
    question = types.TextContent(type="text", text=prompt)
    answer = await ctx.session.create_message(
        [types.SamplingMessage(role="user", content=question)], max_tokens=100, related_request_id=ctx.request_id
    )
    return f"LLM response: {answer.content.text}"


if hasattr(Context, "elicit"):

    @server.tool()
    async def test_elicitation(message: str, ctx: Context) -> str:
        answer = await ctx.elicit(message, Reply)
        return f"action={answer.action} {answer.data.model_dump_json()}"


@server.tool()
async def interop_roots(ctx: Context) -> str:
    return ",".join(str(root.uri) for root in (await ctx.session.list_roots()).roots)


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
    resource = types.TextResourceContents(uri=resourceUri, mimeType="text/plain", text="It is embedded.")
    embedded = types.EmbeddedResource(type="resource", resource=resource)
    return [{"role": "user", "content": embedded}, {"role": "user", "content": "Please process it."}]


@server.prompt()
def test_prompt_with_image() -> Any:
    return [{"role": "user", "content": IMAGE}, {"role": "user", "content": "Please analyze it."}]


# Handlers of the low-level server.


@lowlevel_server.set_logging_level()
async def set_logging_level(level: types.LoggingLevel) -> None:
    wanted["level"] = level


@lowlevel_server.completion()
async def complete(ref: Any, argument: Any, context: Any = None) -> types.Completion:
    known = ["1", "12", "2"]
    if argument.name == "arg1":
        known = ["alpha", "alphabet", "beta", "gamma"]
    elif argument.name == "arg2":
        known = [f"{context.arguments['arg1']}-2"] if context else []
    return types.Completion(values=[each for each in known if each.startswith(argument.value)])


# Serving.


async def by_websocket(scope: Any, receive: Any, send: Any) -> None:
    from mcp.server.websocket import websocket_server

    async with websocket_server(scope, receive, send) as (read, write):
        await lowlevel_server.run(read, write, lowlevel_server.create_initialization_options())


def main(way: str) -> None:
    if way == "stdio":
        server.run()
    elif way == "ws":
        uvicorn.run(by_websocket, port=0, ws_max_size=2**24, lifespan="off")
    else:
        app = server.sse_app() if way == "sse" else server.streamable_http_app()
        uvicorn.run(app, port=0, timeout_keep_alive=KEEP_ALIVE)


if __name__ == "__main__":
    main(sys.argv[1])
