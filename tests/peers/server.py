"""The server that real clients visit: one of everything, with the public names only.

``python -m tests.peers.server OPTIONS`` serves on a free port of loopback and prints where, in one line of JSON.  The
options are those of `serve_http`, in JSON.  SIGTERM ends it, and it prints what was still going on.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from trio_mcp import Accepted, Context, Server, TextContent, ToolError, serve_http

PAUSE = 0.01  # between two reports: some clients lose one that comes in the same chunk as the result

server = Server("peers", version="1.0")
ended: dict[str, trio.Event] = defaultdict(trio.Event)  # the calls of `wait` that were cancelled, by their tag


@dataclass
class Sum:
    sum: int


@dataclass
class Person:
    name: str
    age: int


@server.tool
async def echo(text: str, seconds: float = 0) -> str:
    """The same text, after a while."""
    await trio.sleep(seconds)
    return text


@server.tool
async def add(a: int, b: int) -> Sum:
    """The sum of two numbers."""
    return Sum(a + b)


@server.tool
async def fail() -> str:
    """Nothing; it fails."""
    raise ToolError("on purpose")


@server.tool
async def slow(steps: int, ctx: Context, pause: float = PAUSE) -> str:
    """Done, step by step."""
    for step in range(1, steps + 1):
        await ctx.progress(step, steps, f"step {step}")
        await trio.sleep(pause)
    return "done"


@server.tool
async def wait(tag: str, ctx: Context) -> str:
    """Nothing, until it is cancelled."""
    await ctx.progress(1)
    try:
        await trio.sleep_forever()
    finally:
        ended[tag].set()


@server.tool
async def gone(tag: str) -> str:
    """Whether the call of `wait` with this tag was cancelled, as soon as it was."""
    await ended[tag].wait()
    return "gone"


@server.tool
async def ask(ctx: Context) -> str:
    """Who the user is."""
    match await ctx.elicit("Who are you?", Person):
        case Accepted(Person(name=name, age=age)):
            return f"{name}, {age}"
    return "nobody"


@server.tool
async def sample(ctx: Context) -> str:
    """What the client's model makes of it."""
    answer = await ctx.sample("a joke", max_tokens=10)
    content = answer.content[0] if isinstance(answer.content, list | tuple) else answer.content
    assert isinstance(content, TextContent)
    return content.text


@server.tool
async def roots(ctx: Context) -> str:
    """What the client exposes."""
    return ",".join(each.uri for each in (await ctx.roots()))


@server.tool
async def log(ctx: Context) -> str:
    """A message of each level."""
    for level in ("debug", "info", "warning", "error"):
        await ctx.log(level, f"a {level}")
    return "logged"


@server.tool
async def touch(uri: str) -> str:
    """Nothing; who subscribed to the resource hears that it changed."""
    server.updated(uri)
    return "touched"


@server.tool
async def toggle(on: bool) -> str:
    """Nothing; a tool appears or disappears."""
    if on:
        server.tool(extra)
    else:
        server.remove_tool("extra")
    return "on" if on else "off"


async def extra() -> str:
    """There only at times."""
    return "extra"


@server.resource("peers://greeting")
async def greeting() -> str:
    return "hello"


@server.resource("peers://picture", mime_type="image/png")
async def picture() -> bytes:
    return b"\x89PNG"


@server.resource("peers://item/{id}")
async def item(id: str) -> str:
    return f"item {id}"


@server.prompt
async def compare(first: str, second: str) -> str:
    """Compare two cities."""
    return f"Compare {first} and {second}."


@server.completion("compare", "first")
async def cities(value: str) -> list[str]:
    return [each for each in ("Oslo", "Odense", "Rome") if each.startswith(value)]


async def main(**options: Any) -> None:
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            address = await nursery.start(partial(serve_http, server, **options))
            print(json.dumps({"url": address.url, "sse_url": address.sse_url}), flush=True)
            await anext(signals)
        left = server.statistics()
        print(json.dumps({"running": left.running, "parked": left.parked, "listeners": left.listeners}), flush=True)
        async with server.draining(2):
            pass
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(partial(main, **json.loads(sys.argv[1])))
