"""The everything server with the first release of the official Python SDK: ``server0.py stdio|sse|ws``.

It exits if its first message is unknown to it.  It handles one request after another, and cannot cancel them.
"""

import base64
import json
import sys
from typing import Any

import anyio
import mcp.types as types
import uvicorn
from mcp.server import NotificationOptions, Server
from mcp.server.sse import SseServerTransport
from mcp.server.stdio import stdio_server
from mcp.server.websocket import websocket_server
from report import KEEP_ALIVE

# The last bytes have different forms in base64 and base64url.  This release encodes resources in base64url by mistake.
PNG = (
    base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mO4JGcEAALoASNSXim9AAAAAElFTkSuQmCC")
    + b"\xfb\xff\xbf"
)
IMAGE = types.ImageContent(type="image", data=base64.b64encode(PNG).decode(), mimeType="image/png")
LEVELS = ("debug", "info", "notice", "warning", "error")
DYNAMIC = {"tools": "interop_dynamic", "resources": "test://interop-dynamic", "prompts": "interop_dynamic"}

server = Server("peer")
shown: set[str] = set()
wanted = {"level": "debug"}


def session() -> Any:
    return server.request_context.session


def text(words: str) -> types.TextContent:
    return types.TextContent(type="text", text=words)


def with_dynamic(kind: str, names: Any) -> list[str]:
    return [*names, *([DYNAMIC[kind]] if kind in shown else [])]


# Tools, each with the types of its arguments.


async def test_simple_text() -> str:
    return "This is a simple text response for testing."


async def interop_echo(text: str, delay_ms: int = 0) -> str:
    await anyio.sleep(delay_ms / 1000)
    return text


async def half(number: int) -> str:
    return json.dumps(number // 2 if number % 2 == 0 else None)


async def test_error_handling() -> str:
    raise ValueError("This tool intentionally returns an error for testing")


async def interop_check(count: Any, label: str) -> str:
    if not isinstance(count, int):
        raise ValueError("the count is no number")
    return f"{label}x{count}"


async def test_tool_with_progress() -> str:
    meta = server.request_context.meta
    for done in (0, 50, 100) if meta else ():
        await session().send_progress_notification(meta.progressToken, done, 100)
    return "Progress was reported, if somebody asked for it."


async def interop_log() -> str:
    for level in LEVELS[LEVELS.index(wanted["level"]) :]:
        await session().send_log_message(level, {"level": level}, "interop")
    return "logged"


async def interop_toggle(kind: str, on: bool) -> str:
    shown.add(kind) if on else shown.remove(kind)
    await getattr(session(), f"send_{kind.removesuffix('s')}_list_changed")()
    return "on" if on else "off"


async def test_sampling(prompt: str) -> str:
    answer = await session().create_message([types.SamplingMessage(role="user", content=text(prompt))], max_tokens=100)
    return f"LLM response: {answer.content.text}"


async def interop_roots() -> str:
    return ",".join(str(each.uri) for each in (await session().list_roots()).roots)


TOOLS: dict[Any, dict[str, str]] = {
    test_simple_text: {},
    interop_echo: {"text": "string", "delay_ms": "integer"},
    half: {"number": "integer"},
    test_error_handling: {},
    interop_check: {"count": "integer", "label": "string"},
    test_tool_with_progress: {},
    interop_log: {},
    interop_toggle: {"kind": "string", "on": "boolean"},
    test_sampling: {"prompt": "string"},
    interop_roots: {},
}


@server.list_tools()
async def list_tools() -> list[types.Tool]:
    typed = {tool.__name__: properties for tool, properties in TOOLS.items()}
    return [
        types.Tool(
            name=name,
            description=name,
            inputSchema={
                "type": "object",
                "properties": {each: {"type": kind} for each, kind in typed.get(name, {}).items()},
            },
        )
        for name in with_dynamic("tools", typed)
    ]


@server.call_tool()
async def call_tool(name: str, arguments: dict[str, Any]) -> list[types.TextContent]:
    tool = {each.__name__: each for each in TOOLS}[name]
    return [text(await tool(**arguments))]


# Resources: texts, and a picture without its MIME type.

RESOURCES = {
    "test://static-text": "This is the content of the static text resource.",
    "test://static-binary": PNG,
    "test://watched-resource": "This is the content of the watched resource.",
    "test://template/7/data": json.dumps({"id": "7", "templateTest": True, "data": "Data for ID: 7"}),
}


@server.list_resources()
async def list_resources() -> list[types.Resource]:
    return [types.Resource(uri=uri, name=uri) for uri in with_dynamic("resources", RESOURCES)]


@server.read_resource()
async def read_resource(uri: Any) -> str | bytes:
    return RESOURCES[str(uri)]


# Prompts, each with its arguments and its messages.


def embedded(uri: str) -> types.EmbeddedResource:
    resource = types.TextResourceContents(uri=uri, mimeType="text/plain", text="It is embedded.")
    return types.EmbeddedResource(type="resource", resource=resource)


PROMPTS: dict[str, tuple[list[str], Any]] = {
    "test_simple_prompt": ([], lambda: [text("This is a simple prompt for testing.")]),
    "test_prompt_with_arguments": (
        ["arg1", "arg2"],
        lambda arg1, arg2: [text(f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'")],
    ),
    "test_prompt_with_embedded_resource": (
        ["resourceUri"],
        lambda resourceUri: [embedded(resourceUri), text("Please process it.")],
    ),
    "test_prompt_with_image": ([], lambda: [IMAGE, text("Please analyze it.")]),
}


@server.list_prompts()
async def list_prompts() -> list[types.Prompt]:
    needed = {name: arguments for name, (arguments, _) in PROMPTS.items()}
    return [
        types.Prompt(
            name=name,
            arguments=[types.PromptArgument(name=each, required=True) for each in needed.get(name, [])],
        )
        for name in with_dynamic("prompts", PROMPTS)
    ]


@server.get_prompt()
async def get_prompt(name: str, arguments: dict[str, str] | None) -> types.GetPromptResult:
    said = PROMPTS[name][1](**(arguments or {}))
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=each) for each in said])


@server.completion()
async def complete(ref: Any, argument: Any) -> types.Completion:
    known = {"arg1": ["alpha", "alphabet", "beta", "gamma"], "id": ["1", "12", "2"]}.get(argument.name, [])
    return types.Completion(values=[each for each in known if each.startswith(argument.value)])


@server.set_logging_level()
async def set_logging_level(level: str) -> None:
    wanted["level"] = level


# Serving.


async def run(streams: Any) -> None:
    changing = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
    await server.run(*streams, server.create_initialization_options(changing))


async def over_stdio() -> None:
    async with stdio_server() as streams:
        await run(streams)


sse = SseServerTransport("/messages")


async def by_sse(scope: Any, receive: Any, send: Any) -> None:
    if scope["method"] == "GET":
        async with sse.connect_sse(scope, receive, send) as streams:
            await run(streams)
    elif scope["path"] == "/messages":
        await sse.handle_post_message(scope, receive, send)
    else:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body"})


async def by_websocket(scope: Any, receive: Any, send: Any) -> None:
    async with websocket_server(scope, receive, send) as streams:
        await run(streams)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        anyio.run(over_stdio)
    else:
        app = by_sse if sys.argv[1] == "sse" else by_websocket
        uvicorn.run(app, port=0, ws_max_size=2**24, lifespan="off", timeout_keep_alive=KEEP_ALIVE)
