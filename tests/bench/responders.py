"""The servers of the bench that run on Trio: ``python -m tests.bench.responders ours|bare``.

Both print the port they listen on.  `bare` is what Trio and h11 alone must do to give the same answers: parse the
request with h11, its body with json, and write the reply with both, in as few sends as the answer has parts.  It checks
nothing.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import h11
import trio

from trio_mcp import Context, Server, serve_http

TEXT = "Mostly sunny, 21 degrees, light wind from the west."

# Ours.

server = Server("bench", version="1")


@server.tool
async def forecast(city: str, days: int, units: str) -> str:
    """The forecast."""
    return TEXT


@server.tool
async def report(city: str, days: int, units: str, ctx: Context) -> str:
    """The forecast, with a report before it."""
    await ctx.progress(1, 2)
    return TEXT


async def ours(task_status: trio.TaskStatus[int]) -> None:
    async with trio.open_nursery() as nursery:
        address = await nursery.start(partial(serve_http, server, "127.0.0.1", 0))
        task_status.started(address.listeners[0].socket.getsockname()[1])


# Bare.

INITIALIZED = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "bench", "version": "1"},
}
# What a modern result also has to say, so that it may be kept for no time at all.
UNKEPT = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
DISCOVERED = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, **UNKEPT}
TOOLS = {"tools": [{"name": "forecast", "inputSchema": {"type": "object"}}], **UNKEPT}


def answer(body: bytes) -> tuple[list[bytes], bool]:
    """The messages that answer this one, as JSON, and whether they are a stream."""
    message: dict[str, Any] = json.loads(body)
    reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message.get("id")}
    match message:
        case {"method": "tools/call", "params": {"name": name, "arguments": {}, **params}}:
            reply["result"] = {"content": [{"type": "text", "text": TEXT}], "resultType": "complete"}
            if name == "report":
                told = {"progressToken": params["_meta"]["progressToken"], "progress": 1, "total": 2}
                progress = {"jsonrpc": "2.0", "method": "notifications/progress", "params": told}
                return [json.dumps(progress).encode(), json.dumps(reply).encode()], True
        case {"method": "initialize"}:
            reply["result"] = INITIALIZED
        case {"method": "server/discover"}:
            reply["result"] = DISCOVERED
        case {"method": "tools/list"}:
            reply["result"] = TOOLS
        case _:
            return [], False
    return [json.dumps(reply).encode()], False


async def converse(stream: trio.SocketStream) -> None:
    connection = h11.Connection(h11.SERVER)

    async def event() -> Any:
        while (got := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some())
        return got

    def send(*events: Any) -> bytes:
        return b"".join(connection.send(each) or b"" for each in events)

    while isinstance(request := await event(), h11.Request):
        body = bytearray()
        while isinstance(data := await event(), h11.Data):
            body += data.data
        headers = [("Mcp-Session-Id", "bench"), ("Content-Type", "text/event-stream")]
        if request.method == b"GET":
            await stream.send_all(send(h11.Response(status_code=200, headers=headers)))
            await stream.receive_some()  # until the client has gone
            return
        parts, streams = answer(bytes(body))
        if streams:
            before, last = (b"event: message\ndata: %s\n\n" % each for each in parts)
            await stream.send_all(send(h11.Response(status_code=200, headers=headers), h11.Data(data=before)))
            await stream.send_all(send(h11.Data(data=last), h11.EndOfMessage()))
        else:
            reply = parts[0] if parts else b""
            headers[1:] = [("Content-Type", "application/json"), ("Content-Length", str(len(reply)))]
            response = h11.Response(status_code=200 if parts else 202, headers=headers)
            await stream.send_all(send(response, h11.Data(data=reply), h11.EndOfMessage()))
        connection.start_next_cycle()


async def guarded(stream: trio.SocketStream) -> None:
    try:
        await converse(stream)
    except (trio.BrokenResourceError, h11.RemoteProtocolError):
        pass  # the bench closes its connections without ceremony
    finally:
        await trio.aclose_forcefully(stream)


async def bare(task_status: trio.TaskStatus[int]) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=5000)
    task_status.started(listeners[0].socket.getsockname()[1])
    await trio.serve_listeners(guarded, listeners)


async def main(which: str) -> None:
    async with trio.open_nursery() as nursery:
        print(await nursery.start({"ours": ours, "bare": bare}[which]), flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
