"""A server that has a tool, resource or prompt for each operation of a client.

As a program it serves its standard input and output.  Its tool `ledger` reports the events of its handlers, so that a
test can examine a server in another process in the same way as a server in its own process.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import trio

from trio_mcp import Context, RequestError, Server, ToolError
from trio_mcp.types import Resource

__all__ = ["Forecast", "Size", "sample_server"]


@dataclass
class Forecast:
    city: str
    degrees: list[int]


@dataclass
class Size:
    size: int
    colour: str = "red"


def sample_server(**options: Any) -> Server:
    """A new server.  Its lists have several pages."""
    options = {"version": "7", "instructions": "Knock first.", "page_size": 3, "change_debounce": 0, **options}
    server = Server("house", capabilities=("tools", "prompts", "resources"), **options)
    _add_calls(server)
    _add_waits(server)
    _add_questions(server)
    _add_lists(server)
    return server


def _add_calls(server: Server) -> None:
    @server.tool
    async def add(a: int, b: int) -> int:
        return a + b

    @server.tool
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    @server.tool
    async def words(count: int) -> list[str]:
        return [f"word {number}" for number in range(count)]

    @server.tool
    async def forecast(city: str) -> Forecast:
        return Forecast(city, [1, 2, 3])

    @server.tool
    async def fail(why: str) -> int:
        raise ToolError(why)

    @server.tool
    async def refuse(code: int) -> None:
        raise RequestError(code, "not today", {"why": "closed"})

    @server.tool
    async def swap(text: str) -> str:
        return text[::-1]

    @server.tool
    async def count(to: int, ctx: Context) -> int:
        for number in range(to):
            await ctx.progress(number, to, message=f"number {number}")
        return to

    @server.tool
    async def talk(ctx: Context) -> str:
        await ctx.log("debug", "a whisper")
        await ctx.log("warning", {"loud": True}, logger="house")
        return "talked"

    @server.tool
    async def meta(ctx: Context) -> dict[str, Any]:
        return {name: value for name, value in ctx.request.params["_meta"].items() if "modelcontext" not in name}


def _add_waits(server: Server) -> None:
    gates: defaultdict[str, trio.Event] = defaultdict(trio.Event)
    ledger: list[str] = []

    @server.tool
    async def hold(name: str) -> str:
        """Wait until `let` is called, or the call is cancelled."""
        ledger.append(f"{name} began")
        try:
            await gates[name].wait()
        except trio.Cancelled:
            ledger.append(f"{name} was cancelled")
            raise
        ledger.append(f"{name} ended")
        return name

    @server.tool
    async def let(name: str) -> None:
        gates[name].set()

    @server.tool(name="ledger")
    async def read_ledger() -> list[str]:
        return ledger


def _add_questions(server: Server) -> None:
    @server.tool
    async def order(ctx: Context) -> str:
        answer = await ctx.elicit("Which size?", Size)
        return repr(getattr(answer, "value", type(answer).__name__))

    @server.tool
    async def visit(ctx: Context) -> str:
        return type(await ctx.elicit_url("Pay there, please", "https://pay.example/7")).__name__

    @server.tool
    async def think(ctx: Context) -> str:
        thought = await ctx.sample("What is new?", max_tokens=9)
        return f"{thought.model}: {thought.content.text}"  # type: ignore[union-attr]  # the tests answer with one text

    @server.tool
    async def rooms(ctx: Context) -> list[str]:
        return [root.uri for root in await ctx.roots()]


def _add_lists(server: Server) -> None:
    for name in ("one", "two", "three", "four"):
        server.add_resource(Resource(name, f"house://{name}"), lambda ctx, uri: f"inside {uri}")

    @server.resource("rooms://{name}")
    async def room(name: str) -> str:
        return f"the room {name}"

    for kind in ("door", "window", "wall", "roof"):
        server.resource(f"{kind}s://{{number}}")(_part)

    @server.prompt
    async def review(code: str, language: str = "python") -> str:
        return f"Review this {language}: {code}"

    for name in ("short", "long", "wide"):
        server.prompt(name=name)(_nothing)

    @server.completion("review", "language")
    async def languages(value: str, arguments: dict[str, str]) -> list[str]:
        known = ["python", "pascal", *arguments.values()]
        return [each for each in known if each.startswith(value)]

    @server.tool
    async def touch(uri: str) -> None:
        server.notify_resource_updated(uri)

    @server.tool
    async def grow(ctx: Context) -> None:
        server.notify_list_changed("tools", "prompts", "resources")


async def _part(number: str) -> str:
    return number


async def _nothing() -> str:
    return "nothing"


if __name__ == "__main__":
    sample_server().run()
