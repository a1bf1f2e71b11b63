"""The server that is attacked: a separate process on loopback, so that its memory can be measured.

    async with victim() as (port, memory, asked): ...

Its tools: `give` answers with 4 MB, `keep` waits, `block` waits in a thread, `thread` answers from a thread, `echo`
answers at once.  A bearer token is the name of its user.  Tokens that begin with ``guess`` are invalid.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

__all__ = ["LATEST", "first_answer", "post", "request", "victim"]

LATEST = "2026-07-28"
PROGRAM = """
import json, sys, time, trio
from trio_mcp import Limits, Server, serve_http

server = Server("victim", limits=Limits(**json.loads(sys.argv[1])))

@server.tool
async def give(size: int = 4_000_000) -> str:
    return "x" * size

@server.tool
async def keep(text: object = "") -> str:
    await trio.sleep_forever()

@server.tool
def block() -> str:
    time.sleep(60)
    return ""

@server.tool
def thread() -> str:
    return "from a thread"

@server.tool
async def echo(text: str = "") -> str:
    return text

asked = 0

async def authenticate(request):
    global asked
    asked += 1
    print(asked, file=sys.stderr, flush=True)
    token = request.headers.get("Authorization", "")[7:]
    return None if token.startswith("guess") else token or "nobody"

async def main():
    async with trio.open_nursery() as nursery:
        address = await nursery.start(lambda task_status: serve_http(
            server, authenticate=authenticate, sse_path="/sse", message_path="/messages", task_status=task_status))
        print(address.listeners[0].socket.getsockname()[1], flush=True)

trio.run(main)
"""


@asynccontextmanager
async def victim(**limits: Any) -> AsyncIterator[tuple[int, Callable[[], float], list[int]]]:
    """Yields its port, a function for its memory in MiB, and a list with the number of calls of `authenticate`."""
    asked = [0]
    command = [sys.executable, "-c", PROGRAM, json.dumps(limits)]
    async with trio.open_nursery() as nursery:
        run = partial(
            trio.run_process,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            check=False,
        )
        process: trio.Process = await nursery.start(run)
        assert process.stdout is not None
        assert process.stderr is not None

        async def count(stream: trio.abc.ReceiveStream) -> None:
            async for lines in stream:
                asked[0] += lines.count(b"\n")

        nursery.start_soon(count, process.stderr)
        port = int(await process.stdout.receive_some())

        def memory() -> float:
            with open(f"/proc/{process.pid}/status", encoding="ascii") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

        yield port, memory, asked
        nursery.cancel_scope.cancel()


def request(name: str, id: int = 1, **arguments: Any) -> bytes:
    meta = {"io.modelcontextprotocol/protocolVersion": LATEST, "io.modelcontextprotocol/clientCapabilities": {}}
    params = {"name": name, "arguments": arguments, "_meta": meta}
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}).encode()


def post(name: str, body: bytes, token: str, size: int | None = None) -> bytes:
    lines = (
        "POST /mcp HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {token}", "Content-Type: application/json",
        "Accept: application/json, text/event-stream", f"MCP-Protocol-Version: {LATEST}", "Mcp-Method: tools/call",
        f"Mcp-Name: {name}", f"Content-Length: {len(body) if size is None else size}", "", "",
    )  # fmt: skip
    return "\r\n".join(lines).encode() + body


async def first_answer(port: int, data: bytes, seconds: float = 20) -> tuple[float, bytes]:
    """The seconds until the first bytes of the answer to another client, and these bytes."""
    began = trio.current_time()
    with trio.move_on_after(seconds):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(data)
        answer = bytes(await stream.receive_some(4000))
        await stream.aclose()
        return trio.current_time() - began, answer
    return seconds, b"nothing"
