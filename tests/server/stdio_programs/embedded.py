"""A program that serves until the end of input or until the tool `leave` is called, and then continues."""
# ruff: noqa: T201

import ctypes
import os
import sys

import trio

from trio_mcp import Server, serve_stdio

server = Server("embedded", version="1")
serving = trio.CancelScope()


@server.tool
async def echo(text: str) -> str:
    ctypes.CDLL(None).puts(b"put by C")
    sys.stdout.write("left in the buffer")
    return text


@server.tool
async def leave() -> None:
    serving.cancel()
    await trio.sleep_forever()


async def main() -> None:
    with serving:
        await serve_stdio(server)
    os.write(2, b"<served>\n")
    print("cancelled" if serving.cancelled_caught else "ended", "and stdin says", repr(sys.stdin.readline()))


trio.run(main)
