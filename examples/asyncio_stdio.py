"""An MCP server on stdio that runs on asyncio: the core is driven by hand, and Trio is not even imported.

    python examples/asyncio_stdio.py

Standard input and output are two pipes or two sockets, as hosts make them.  The five steps of driving the core from any
event loop are marked below.  What the protocol decides (both eras, negotiation, capabilities, unknown
methods, cancellation races, malformed input) happens in the session; left are bytes in, bytes out, and a task a call.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_PARAMS, RequestError
from trio_mcp.core.framing import LineFramer
from trio_mcp.core.jsonrpc import Event, Id, InvalidMessage, Limits, decode, encode
from trio_mcp.core.outcomes import RequestCancelled
from trio_mcp.core.session import Call, Offer, ServerProtocol

OFFER = Offer({"name": "asyncio-example", "version": "1.0"}, {"tools": {}}, instructions="Echo texts, count slowly.")
LIMITS = Limits()
Progress = Callable[[int, int], None]


async def echo(arguments: dict[str, Any], progress: Progress) -> str:
    text = arguments.get("text")
    if not isinstance(text, str):
        raise RequestError(INVALID_PARAMS, "text must be a string")
    return text


async def divide(arguments: dict[str, Any], progress: Progress) -> str:
    """Trusts its arguments, so that a failure nobody thought of can be seen: it costs its own call only."""
    return str(arguments["a"] / arguments["b"])


async def count(arguments: dict[str, Any], progress: Progress) -> str:
    to = arguments.get("to", 3)
    if type(to) is not int or to < 0:
        raise RequestError(INVALID_PARAMS, "to must be an integer that is not negative")
    for done in range(1, to + 1):
        await asyncio.sleep(0.01)
        progress(done, to)
    return f"counted to {to}"


TOOLS: dict[str, tuple[Callable[[dict[str, Any], Progress], Awaitable[str]], dict[str, Any]]] = {
    "echo": (echo, {"text": {"type": "string"}}),
    "divide": (divide, {"a": {"type": "number"}, "b": {"type": "number"}}),
    "count": (count, {"to": {"type": "integer", "minimum": 0}}),
}


class Link:
    """One client, from its first byte to its last."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.session = ServerProtocol(OFFER, limits=LIMITS)
        self.running: dict[Id, asyncio.Task[dict[str, Any]]] = {}
        self.reader, self.writer = reader, writer

    async def run(self) -> None:
        framer = LineFramer(LIMITS.message_bytes)
        while data := await self.reader.read(65536):  # Step 1: read bytes.
            self.hear(framer.feed(data))
            await self.writer.drain()  # A client that does not read is not listened to either.
        # What is left in the framer is half a line, from somebody who no longer waits for an answer.
        for event in self.session.connection_lost(
            why="standard input was closed"
        ):  # Step 5: say when the link is gone.
            self.act(event)
        await asyncio.gather(*self.running.values(), return_exceptions=True)

    def hear(self, lines: list[bytes | InvalidMessage]) -> None:
        now = asyncio.get_running_loop().time()
        for line in lines:  # Step 2: bytes, cut into lines, become messages; feed those to the session.
            message = decode(line, LIMITS) if isinstance(line, bytes) else line
            for event in self.session.receive(message, now):
                self.act(event)  # Step 3: act on what happened.
        self.flush()  # Step 4: send whatever piled up.

    def act(self, event: Event) -> None:
        match event:
            case Call(request=request):
                task = asyncio.create_task(self.result(event), name=f"{request.method} #{request.id}")
                self.running[request.id] = task
                task.add_done_callback(functools.partial(self.finish, request.id))
            case RequestCancelled(id=id):
                self.running[id].cancel()
            case _:  # Notices, mistakes of the client, the end of the handshake: nothing to do here.
                pass

    def finish(self, id: Id, task: asyncio.Task[dict[str, Any]]) -> None:
        """However the handler ended, the session is told; for a cancelled call it sends nothing."""
        del self.running[id]
        error = RequestError(INTERNAL_ERROR, "cancelled") if task.cancelled() else task.exception()
        if error is None:
            self.session.answer(id, task.result())
        elif isinstance(error, RequestError):
            self.session.refuse(id, error)
        else:  # The text may hold secrets: it is for our log, not for the client.
            traceback.print_exception(error)
            self.session.refuse(id, RequestError(INTERNAL_ERROR, "the tool failed"))
        self.flush()

    async def result(self, call: Call) -> dict[str, Any]:
        params = call.request.params
        if call.request.method == "tools/list":
            return {"tools": [{"name": name, "inputSchema": _schema(props)} for name, (_, props) in TOOLS.items()]}
        name, arguments = params.get("name"), params.get("arguments", {})
        if not isinstance(name, str) or name not in TOOLS:
            raise RequestError(INVALID_PARAMS, "unknown tool; tools/list names those there are")
        if not isinstance(arguments, dict):
            raise RequestError(INVALID_PARAMS, "arguments must be an object")

        def progress(done: int, total: int) -> None:
            self.session.progress(call.request.id, done, total)
            self.flush()

        tool, _ = TOOLS[name]
        return {"content": [{"type": "text", "text": await tool(arguments, progress)}]}

    def flush(self) -> None:
        for message, _ in self.session.outgoing():
            self.writer.write(encode(message) + b"\n")


def _schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


async def main() -> None:
    # What the server prints, by mistake or not, goes to standard error: only messages may reach the client.
    wire = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    transport, _ = await loop.connect_write_pipe(lambda: protocol, wire)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    await Link(reader, writer).run()
    writer.close()
    await writer.wait_closed()


if __name__ == "__main__":
    asyncio.run(main())
