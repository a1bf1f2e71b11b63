"""The actions of the demo's client.  The lines of each function are shown and then run, so they are short.

`print` is a method of the screen in place of Python's `print`, so that the code shown looks like a user's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, Unpack

import trio

from trio_mcp import Client, open_client, serve_http
from trio_mcp.cli.demo.server import Star, server
from trio_mcp.core.revisions import REVISIONS
from trio_mcp.types import (
    ClientOptions,
    FormElicitationRequest,
    HttpOptions,
    OnElicitation,
    OnProgress,
    TextResourceContents,
)

__all__ = [
    "Play", "Print", "Scene", "a_change", "a_long_call", "a_question", "a_timeout", "a_typed_call", "a_visit",
    "every_revision", "fills_in",
]  # fmt: skip

Print: TypeAlias = Callable[[object], None]
Scene: TypeAlias = Callable[[Client, Print, OnProgress], Awaitable[None]]
Play: TypeAlias = Callable[[Client], Awaitable[None]]

COMMAND = [sys.executable, "-m", "trio_mcp.cli.demo.server"]
SIRIUS = {"name": "Sirius"}


async def a_visit(play: Play, **options: Unpack[ClientOptions]) -> None:
    # COMMAND is python -m trio_mcp.cli.demo.server
    async with open_client(COMMAND, **options) as client:
        await play(client)


async def a_typed_call(client: Client, print: Print, bar: OnProgress) -> None:
    star = await client.call_tool("find", {"name": "Vega"}, returns=Star)
    print(star)


async def a_long_call(client: Client, print: Print, bar: OnProgress) -> None:
    async with client.stream_tool("expose", {"frames": 24}) as call:
        async for report in call:
            bar(report.progress, report.total, report.message)
        result = await call.result()
    print(result.content)


async def a_timeout(client: Client, print: Print, bar: OnProgress) -> None:
    with trio.move_on_after(0.6) as scope:  # an ordinary scope of Trio
        await client.call_tool("expose", {"frames": 500}, on_progress=bar)
    print(f"left in time: {scope.cancelled_caught}")
    entry = await client.call_tool("last_entry", returns=str)
    print(f"the server's diary: {entry}")


def fills_in(print: Print) -> OnElicitation:
    async def fill_in(form: FormElicitationRequest) -> dict[str, Any]:
        print(f"{form.message} {dict(form.defaults)}")
        return {"night": "tomorrow"}

    return fill_in


async def a_question(client: Client, print: Print, bar: OnProgress) -> None:
    print(await client.call_tool("reserve", returns=str))


async def a_change(client: Client, print: Print, bar: OnProgress) -> None:
    async with client.listen(resources=["sky://tonight"]) as changes:
        await client.call_tool("report", {"sighting": "a comet"})
        change = await anext(changes)
        print(change)
        for content in (await client.read_resource(change.item)).contents:
            assert isinstance(content, TextResourceContents)
            print(content.text)


async def every_revision(nursery: trio.Nursery, print: Print) -> None:
    old: HttpOptions = {"sse_path": "/sse", "message_path": "/post"}
    address = await nursery.start(partial(serve_http, server, **old))
    for name, revision in REVISIONS.items():
        # The oldest revision has another HTTP transport.
        url = address.url if revision.http else address.sse_url
        async with open_client(url, revision=name) as client:
            star = await client.call_tool("find", SIRIUS, returns=Star)
            print(f"{client.revision} at {url}: {star.name}")
