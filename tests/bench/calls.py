"""The way of one call through the package: ``python -m tests.bench calls [--list]``.

For one `tools/call` on a stream and over HTTP, of a server alone, and for calls whose two ends are ours, without and
with a question to the user: the files of the package that it enters, the functions, how often functions are called, and
how often the next call is in another file.  The tool and the callback of the client are not of the package, and are not
counted.

A task that goes on after a wait resumes its coroutines from the outside in.  Python reports each resumption as a call,
but it says more about the number of waits than about the length of the way.  So `calls` leaves resumptions out, and
`changes` of file counts them.  Tasks run in the same order each time, so the counts are the same each time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import trio
import trio.testing

import trio_mcp
from tests.bench.http_load import EITHER
from tests.bench.messages import REVISIONS, Template, call, encoded
from trio_mcp import Client, Context, Server, open_client, serve_http, serve_stream

__all__ = ["WAYS", "Way", "main", "walked"]

HOME = f"{Path(trio_mcp.__file__).parent}/"
WARM = 10  # calls before the one that is counted
TEXT = "x"


class Walk:
    """The functions of the package that are called while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.calls: list[CodeType] = []
        """Resumptions among them."""
        self.begun = 0
        """Without resumptions."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(HOME):
            self.calls.append(code)
            self.begun += not _resumed(frame)

    @property
    def files(self) -> list[str]:
        """In the order of their first call."""
        return list(dict.fromkeys(each.co_filename.removeprefix(HOME) for each in self.calls))

    @property
    def changes(self) -> int:
        names = [each.co_filename for each in self.calls]
        return sum(one != other for one, other in pairwise(names))


def _resumed(frame: FrameType) -> bool:
    """Whether a generator or a coroutine goes on.  The argument of the instruction RESUME is 0 at the start of a
    function, and says after which kind of wait it goes on otherwise."""
    return bool(frame.f_code.co_code[frame.f_lasti + 1] & 3)


@dataclass
class Colour:
    name: str


def served() -> Server:
    server = Server("walk", version="1")

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def ask(*, ctx: Context) -> str:
        return repr(await ctx.elicit("Which colour?", Colour))

    return server


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)


async def answered(stream: trio.abc.ReceiveStream, end: bytes) -> None:
    """Read an answer up to its last byte."""
    heard = b""
    while not heard.endswith(end):
        heard += await stream.receive_some()
    assert b'"text":"x"' in heard, heard


async def on_a_stream(walk: Walk) -> None:
    """A server of 2026-07-28 on a stream in memory."""
    ours, theirs = trio.testing.memory_stream_pair()
    template = Template(encoded(call("modern", "echo", {"text": TEXT})) + b"\n")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, served(), theirs)
        async for _ in turns(walk):
            await ours.send_all(template.take())
            await answered(ours, b"\n")
        nursery.cancel_scope.cancel()


async def over_http(walk: Walk) -> None:
    """A server of 2026-07-28 on loopback, which answers by JSON on a connection that is kept."""
    body = encoded(call("modern", "echo", {"text": TEXT}))
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, served(), "127.0.0.1", 0)
        port = address.listeners[0].socket.getsockname()[1]
        fields = {
            "Host": f"127.0.0.1:{port}",
            "Accept": EITHER,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "MCP-Protocol-Version": REVISIONS["modern"],
            "Mcp-Method": "tools/call",
            "Mcp-Name": "echo",
        }
        lines = ("POST /mcp HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", "")
        template = Template("\r\n".join(lines).encode() + body)
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async for _ in turns(walk):
            await stream.send_all(template.take())
            await answered(stream, b"}")
        nursery.cancel_scope.cancel()


async def by_both(tool: str, era: str, walk: Walk) -> None:
    """Our client calls our server in memory."""
    arguments = {"echo": {"text": TEXT}, "ask": {}}[tool]
    async with connected(era) as client:
        async for _ in turns(walk):
            (content,) = (await client.call_tool(tool, arguments)).content
            assert TEXT in content.text, content


@asynccontextmanager
async def connected(era: str) -> AsyncIterator[Client]:
    async def answer(form: Any) -> dict[str, str]:
        return {"name": TEXT}

    async with open_client(served(), revision=REVISIONS[era], elicitation=answer) as client:
        yield client


async def turns(walk: Walk) -> AsyncIterator[None]:
    """Some turns that warm up, and one that is counted with all that follows from it."""
    for number in range(WARM + 1):
        walk.on = number == WARM
        yield
        await settled()
    walk.on = False


Way = Callable[[Walk], Any]
WAYS: dict[str, Way] = {
    "tools/call on a stream, server, modern": on_a_stream,
    "tools/call over HTTP, server, modern": over_http,
    **{f"tools/call, client and server, {era}": partial(by_both, "echo", era) for era in REVISIONS},
    **{f"elicitation, client and server, {era}": partial(by_both, "ask", era) for era in REVISIONS},
}


def walked(name: str) -> Walk:
    walk = Walk()
    # Trio runs what is ready in an order of its own choice: let it be the same one each time.
    trio._core._run._r.seed(0)  # type: ignore[attr-defined]
    sys.setprofile(walk)
    try:
        trio.run(WAYS[name], walk)
    finally:
        sys.setprofile(None)
    return walk


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench calls", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files, in the order of their first call")
    given = parser.parse_args(arguments)
    print(f"{'':<44}{'files':>8}{'functions':>11}{'calls':>8}{'resumed':>9}{'changes':>9}")
    for name in WAYS:
        walk = walked(name)
        resumed = len(walk.calls) - walk.begun
        print(f"{name:<44}{len(walk.files):>8}{len(set(walk.calls)):>11}{walk.begun:>8}{resumed:>9}{walk.changes:>9}")
        if given.list:
            print("    " + ", ".join(walk.files))
    return 0
