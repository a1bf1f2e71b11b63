"""The tools of two servers, asyncio_stdio.py and asyncio_http.py.  This file does not depend on the transport."""

import asyncio
from collections.abc import Callable

from trio_mcp.core.errors import INVALID_PARAMS, METHOD_NOT_FOUND, RequestError
from trio_mcp.core.messages import Id, JsonObject, Request
from trio_mcp.core.session import Offer

OFFER = Offer({"name": "asyncio-example", "version": "1.0"}, {"tools": {}}, instructions="Echo texts, count slowly.")
PARAMETERS = {"echo": {"text": "string"}, "divide": {"a": "number", "b": "number"}, "count": {"to": "integer"}}

Progress = Callable[[Id, int, int], None]  # the id of the request, the steps that are done, the number of steps


async def result_of(request: Request, progress: Progress) -> JsonObject:
    if request.method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": schema_of(types)} for name, types in PARAMETERS.items()]}
    if request.method != "tools/call":
        raise RequestError(METHOD_NOT_FOUND, f"{request.method} is not served here")
    return {"content": [{"type": "text", "text": await call_tool(request, progress)}]}


async def call_tool(request: Request, progress: Progress) -> str:
    match request.params:
        case {"name": "echo", "arguments": {"text": str(text)}}:
            return text
        case {"name": "divide", "arguments": {"a": a, "b": b}}:  # unchecked: an exception fails this call only
            return str(a / b)
        case {"name": "count", "arguments": {"to": int(to)}}:
            for done in range(1, to + 1):
                await asyncio.sleep(0.01)
                progress(request.id, done, to)
            return f"counted to {to}"
    raise RequestError(INVALID_PARAMS, f"call one of these tools with these arguments: {PARAMETERS}")


def schema_of(types: dict[str, str]) -> JsonObject:
    return {"type": "object", "properties": {name: {"type": type} for name, type in types.items()}}
