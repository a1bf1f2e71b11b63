"""The server of the bench with Trio alone: ``bare.py json|orjson stdio|http TOOLS json|sse``.

It parses each message, does the work of the tool in a task of its own, and writes the answer.  It checks no message and
knows no protocol.  On stdio, answers that are ready together are one write, and an answer to an idle pipe is written at
once.  Over HTTP, h11 reads requests and writes responses, with one send for each part of an answer.  The list has TOOLS
tools.  Over HTTP it prints its port, and answers calls by JSON or by event streams.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import trio

CODEC, TRANSPORT, TOOLS, STYLE, *_ = sys.argv[1:]
if CODEC == "orjson":
    from orjson import dumps, loads
else:
    import json

    loads = json.JSONDecoder().decode
    write = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

    def dumps(value: Any) -> bytes:
        return write(value).encode()


INITIALIZED = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "bench", "version": "1"},
}
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer", "default": 3},
    "units": {"type": "string", "default": "metric"},
}
LIST = [
    {
        "name": f"forecast_{each}",
        "title": f"The forecast by the station {each}",
        "description": "One of many tools that make the list very long.",
        "inputSchema": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
    }
    for each in range(int(TOOLS))
]
CHUNK = 1 << 16
WEATHER = {"degrees": 21.5, "humidity": 40, "rain": False, "wind": {"speed": 3.5, "direction": "west"}}
NOTE = "Mostly sunny, 21 degrees, light wind from the west."


async def result(message: dict[str, Any], tell: Callable[[dict[str, Any]], Awaitable[None]]) -> dict[str, Any]:
    """The result of this request; reports progress in the meantime."""
    match message["method"]:
        case "tools/list":
            return {"tools": LIST}
        case "initialize":
            return INITIALIZED
    params = message["params"]
    if (work := WORKS.get(params.get("name", message["method"]))) is not None:
        return {**work(params), "resultType": "complete"}
    arguments, text = params["arguments"], "waited"
    match params["name"]:
        case "echo":
            text = arguments["text"]
        case "wait":
            await trio.sleep(arguments["seconds"])
        case "report":
            token, number, text = params["_meta"]["progressToken"], arguments["number"], "reported"
            for done in range(1, number + 1):
                progress = {"progressToken": token, "progress": done, "total": number}
                await tell({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress})
    return {"content": [{"type": "text", "text": text}], "resultType": "complete"}


# The requests of `tests.bench.works`.


def content(*texts: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": each} for each in texts]}


def added(params: dict[str, Any]) -> dict[str, Any]:
    total = params["arguments"]["a"] + params["arguments"]["b"]
    return {**content(str(total)), "structuredContent": {"result": total}}


def weather(params: dict[str, Any]) -> dict[str, Any]:
    found = {"city": params["arguments"]["city"], **WEATHER}
    return {**content(dumps(found).decode()), "structuredContent": found}


def greeting(params: dict[str, Any]) -> dict[str, Any]:
    text = f"Say hello to {params['arguments']['name']}."
    return {"messages": [{"role": "user", "content": {"type": "text", "text": text}}]}


WORKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "blocks": lambda params: content(f"Weather in {params['arguments']['city']}", "Light wind from the west."),
    "add": added,
    "weather": weather,
    "book": lambda params: content(f"booked for {params['arguments']['guest']['name']}"),
    "resources/read": lambda params: {"contents": [{"uri": params["uri"], "mimeType": "text/plain", "text": NOTE}]},
    "greet": greeting,
}


async def reply(message: dict[str, Any], tell: Callable[[dict[str, Any]], Awaitable[None]]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message["id"], "result": await result(message, tell)}


# By stdio.


class Pipes:
    """Standard input and output."""

    def __init__(self) -> None:
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self.waiting: list[bytes] = []
        self.writing = False

    async def lines(self) -> AsyncIterator[list[bytes]]:
        """Lines that arrive together."""
        parts: list[bytes] = []  # of a line that has not ended
        while True:
            try:
                data = os.read(0, CHUNK)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(0)
                continue
            if not data:
                return
            if b"\n" not in data:
                parts.append(data)
                continue
            *lines, rest = b"".join([*parts, data]).split(b"\n")
            parts = [rest] if rest else []
            yield lines

    async def say(self, message: dict[str, Any]) -> None:
        """Write this message, together with messages of other tasks that are ready."""
        self.waiting += (dumps(message), b"\n")
        if not self.writing:
            self.writing = True
            await trio.lowlevel.checkpoint()  # tasks that can run now will write as well
            await self.flush()
            self.writing = False

    async def tell(self, report: dict[str, Any]) -> None:
        """Write this report together with the next messages: more reports, or the answer."""
        self.waiting += (dumps(report), b"\n")
        if len(self.waiting) > 128 and not self.writing:
            self.writing = True
            await self.flush()
            self.writing = False

    async def flush(self) -> None:
        while self.waiting:
            left = memoryview(b"".join(self.waiting))
            self.waiting.clear()
            while left:
                try:
                    left = left[os.write(1, left) :]
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(1)

    async def answer(self, line: bytes) -> None:
        message = loads(line.decode())
        if "id" in message:
            await self.say(await reply(message, self.tell))


async def by_stdio() -> None:
    pipes = Pipes()
    async with trio.open_nursery() as nursery:
        async for lines in pipes.lines():
            for line in lines:
                nursery.start_soon(pipes.answer, line)


# By HTTP.


async def converse(stream: trio.SocketStream) -> None:
    import h11

    connection = h11.Connection(h11.SERVER)

    async def event() -> Any:
        while (got := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some())
        return got

    async def send(*events: Any) -> None:
        await stream.send_all(b"".join(connection.send(each) or b"" for each in events))

    streaming = [("Mcp-Session-Id", "bench"), ("Content-Type", "text/event-stream")]
    while isinstance(request := await event(), h11.Request):
        body = bytearray()
        while isinstance(data := await event(), h11.Data):
            body += data.data
        if request.method == b"GET":
            await send(h11.Response(status_code=200, headers=streaming))
            await stream.receive_some()  # until the client has gone
            return
        message = loads(body.decode())
        if "id" not in message:
            headers = [("Mcp-Session-Id", "bench"), ("Content-Length", "0")]
            await send(h11.Response(status_code=202, headers=headers), h11.EndOfMessage())
        elif STYLE == "json":
            output = dumps(await reply(message, send_nothing))
            headers = [*streaming[:1], ("Content-Type", "application/json"), ("Content-Length", str(len(output)))]
            await send(h11.Response(status_code=200, headers=headers), h11.Data(data=output), h11.EndOfMessage())
        else:
            head = [h11.Response(status_code=200, headers=streaming)]

            async def tell(report: dict[str, Any], head: list[h11.Response] = head) -> None:
                await send(*head, event_of(report))
                head.clear()

            last = event_of(await reply(message, tell))
            await send(*head, last, h11.EndOfMessage())
        connection.start_next_cycle()


async def send_nothing(report: dict[str, Any]) -> None:
    """Drop a report, because a JSON response has only the answer."""


def event_of(message: dict[str, Any]) -> Any:
    import h11

    return h11.Data(data=b"event: message\ndata: %b\n\n" % dumps(message))


async def guarded(stream: trio.SocketStream) -> None:
    try:
        await converse(stream)
    except trio.BrokenResourceError:
        pass  # the bench closes its connections without waiting
    finally:
        await trio.aclose_forcefully(stream)


async def by_http() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=5000)
    print(listeners[0].socket.getsockname()[1], flush=True)
    await trio.serve_listeners(guarded, listeners)


if __name__ == "__main__":
    trio.run({"stdio": by_stdio, "http": by_http}[TRANSPORT])
