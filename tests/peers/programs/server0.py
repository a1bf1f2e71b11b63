"""A server by the first release of the official Python SDK, on stdio: ``server0.py stdio``.

It ends when its first message is one that it does not know, takes one request after another, and cancels none.
"""

from __future__ import annotations

import json
import os
from typing import Any

import anyio
import mcp.types as types
from mcp.server import Server
from mcp.server.stdio import stdio_server

server = Server("peer")


def tool(name: str, **properties: str) -> types.Tool:
    schema = {"type": "object", "properties": {each: {"type": kind} for each, kind in properties.items()}}
    return types.Tool(name=name, description=name, inputSchema=schema)


@server.list_tools()
async def list_tools() -> list[types.Tool]:
    return [
        tool("add", a="integer", b="integer"),
        tool("fail"),
        tool("half", number="integer"),
        tool("pid"),
        tool("roots"),
    ]


@server.call_tool()
async def call_tool(name: str, arguments: dict[str, Any]) -> list[types.TextContent]:
    said: Any = None
    session = server.request_context.session
    if name == "add":
        await session.send_log_message("info", "hello")
        said = arguments["a"] + arguments["b"]
    elif name == "half":
        said = arguments["number"] // 2 if arguments["number"] % 2 == 0 else None
    elif name == "roots":
        found = await session.list_roots()
        return [types.TextContent(type="text", text=" ".join(str(each.uri) for each in found.roots))]
    elif name == "pid":
        said = os.getpid()
    else:
        raise ValueError("on purpose")
    return [types.TextContent(type="text", text=json.dumps(said))]


@server.set_logging_level()
async def set_logging_level(level: str) -> None:
    pass


@server.list_resources()
async def list_resources() -> list[types.Resource]:
    return [types.Resource(uri="peers://item/7", name="item")]


@server.read_resource()
async def read_resource(uri: Any) -> str:
    return f"item {str(uri)[-1]}"


@server.list_prompts()
async def list_prompts() -> list[types.Prompt]:
    return [types.Prompt(name="greet", arguments=[types.PromptArgument(name="name", required=True)])]


@server.get_prompt()
async def get_prompt(name: str, arguments: dict[str, str] | None) -> types.GetPromptResult:
    text = types.TextContent(type="text", text=f"Hello, {(arguments or {})['name']}!")
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=text)])


async def main() -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(main)
