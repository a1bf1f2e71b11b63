"""An MCP server on stdio that runs on asyncio: the core is driven by hand, and Trio is not even imported.

    python examples/asyncio_stdio.py

The five steps of driving the core from any event loop are marked below.  Everything that the protocol decides (both
eras, negotiation, capabilities, unknown methods, cancellation races, malformed input) happens in the session; what is
left is bytes in, bytes out, and a task for each call.
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
from trio_mcp.core.jsonrpc import Event, Id, Limits, LineFramer, decode, encode
from trio_mcp.core.peer import RequestCancelled
from trio_mcp.core.session import Call, Offer, ServerSession

OFFER = Offer({"name": "asyncio-example", "version": "1.0"}, {"tools": {}}, instructions="Echo texts, count slowly.")
LIMITS = Limits()
Progress = Callable[[int, int], None]


async def echo(arguments: dict[str, Any], progress: Progress) -> str:
    return str(arguments.get("text", ""))


async def count(arguments: dict[str, Any], progress: Progress) -> str:
    """Counts, reporting as it goes; a cancelled call stops at the next step."""
    to = arguments.get("to", 3)
    if type(to) is not int or to < 0:
        raise RequestError(INVALID_PARAMS, "to must be an integer that is not negative")
    for done in range(1, to + 1):
        await asyncio.sleep(0.01)
        progress(done, to)
    return f"counted to {to}"


TOOLS: dict[str, tuple[Callable[[dict[str, Any], Progress], Awaitable[str]], dict[str, Any]]] = {
    "echo": (echo, {"text": {"type": "string"}}),
    "count": (count, {"to": {"type": "integer", "minimum": 0}}),
}


class Link:
    """One client, from its first byte to its last."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self.session = ServerSession(OFFER, limits=LIMITS)
        self.running: dict[Id, asyncio.Task[dict[str, Any]]] = {}
        self.write = write

    async def run(self, read: Callable[[], Awaitable[bytes]]) -> None:
        framer, now = LineFramer(LIMITS.message_bytes), asyncio.get_running_loop().time
        while data := await read():  # Step 1: read bytes.
            for line in framer.feed(data):  # Step 2: cut them into messages, and feed those to the session.
                message = decode(line, LIMITS) if isinstance(line, bytes) else line
                for event in self.session.receive(message, now()):
                    self.act(event)  # Step 3: act on what happened.
            self.flush()  # Step 4: send whatever piled up.
        for event in self.session.lost(why="standard input was closed"):  # Step 5: say when the link is gone.
            self.act(event)
        await asyncio.gather(*self.running.values(), return_exceptions=True)

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
        if params.get("name") not in TOOLS:
            raise RequestError(INVALID_PARAMS, "unknown tool; tools/list names those there are")

        def progress(done: int, total: int) -> None:
            self.session.progress(call.request.id, done, total)
            self.flush()

        tool, _ = TOOLS[params["name"]]
        text = await tool(params.get("arguments", {}), progress)
        return {"content": [{"type": "text", "text": text}]}

    def flush(self) -> None:
        for message, _ in self.session.outgoing():
            self.write(encode(message, null_id=self.session.unreadable_id_is_null) + b"\n")


def _schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


async def main() -> None:
    # What the server prints, by mistake or not, goes to standard error: only messages may reach the client.
    wire = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with wire:
        await Link(wire.write).run(lambda: reader.read(65536))


if __name__ == "__main__":
    asyncio.run(main())
