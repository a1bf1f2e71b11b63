"""The path of one call through the package: ``python -m tests.bench calls [--list]``.

The scenarios are one `tools/call` to a server on a stream and over HTTP, and calls from our client to our server, with
and without a question to the user.  The command counts the files of the package that the call enters, the functions,
the calls of functions, and the changes of file from one call to the next.  The tool and the callback of the client are
not part of the package, so they are not counted.

A task that continues after a wait resumes its coroutines, from the outermost to the innermost.  Python reports each
resumption as a call, but it tells more about the number of waits than about the length of the path.  So the count of
calls excludes resumptions; the count of changes includes them.  Tasks run in the same order each time, so the counts
are always the same.
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

__all__ = ["SCENARIOS", "Scenario", "main", "traced"]

HOME = f"{Path(trio_mcp.__file__).parent}/"
WARM = 10  # calls before the one that is counted
TEXT = "x"


class CallTrace:
    """A profile function that records the calls of functions of the package while `on` is true."""

    def __init__(self) -> None:
        self.on = False
        self.calls: list[CodeType] = []
        """With resumptions."""
        self.begun = 0
        """Without resumptions."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(HOME):
            self.calls.append(code)
            self.begun += not _resumed(frame)

    @property
    def files(self) -> list[str]:
        """The files, in the order of their first call."""
        return list(dict.fromkeys(each.co_filename.removeprefix(HOME) for each in self.calls))

    @property
    def changes(self) -> int:
        names = [each.co_filename for each in self.calls]
        return sum(one != other for one, other in pairwise(names))


def _resumed(frame: FrameType) -> bool:
    """Whether a generator or a coroutine continues.  The argument of the instruction RESUME is 0 at the start of a
    function; otherwise it gives the kind of wait before."""
    return bool(frame.f_code.co_code[frame.f_lasti + 1] & 3)


@dataclass
class Colour:
    name: str


def example_server() -> Server:
    server = Server("walk", version="1")

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def ask(*, ctx: Context) -> str:
        return repr(await ctx.elicit("Which colour?", Colour))

    return server


async def wait_until_idle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)


async def read_answer(stream: trio.abc.ReceiveStream, end: bytes) -> None:
    """Read a response up to its last byte."""
    output = b""
    while not output.endswith(end):
        output += await stream.receive_some()
    assert b'"text":"x"' in output, output


async def on_a_stream(trace: CallTrace) -> None:
    """A server of 2026-07-28 on a stream in memory."""
    ours, theirs = trio.testing.memory_stream_pair()
    template = Template(encoded(call("modern", "echo", {"text": TEXT})) + b"\n")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, example_server(), theirs)
        async for _ in turns(trace):
            await ours.send_all(template.take())
            await read_answer(ours, b"\n")
        nursery.cancel_scope.cancel()


async def over_http(trace: CallTrace) -> None:
    """A server of 2026-07-28 on loopback, which replies with JSON on a persistent connection."""
    body = encoded(call("modern", "echo", {"text": TEXT}))
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, example_server(), "127.0.0.1", 0)
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
        async for _ in turns(trace):
            await stream.send_all(template.take())
            await read_answer(stream, b"}")
        nursery.cancel_scope.cancel()


async def between_our_client_and_server(tool: str, era: str, trace: CallTrace) -> None:
    """Our client calls our server in memory."""
    arguments = {"echo": {"text": TEXT}, "ask": {}}[tool]
    async with connected(era) as client:
        async for _ in turns(trace):
            (content,) = (await client.call_tool(tool, arguments)).content
            assert TEXT in content.text, content


@asynccontextmanager
async def connected(era: str) -> AsyncIterator[Client]:
    async def answer(form: Any) -> dict[str, str]:
        return {"name": TEXT}

    async with open_client(example_server(), revision=REVISIONS[era], elicitation=answer) as client:
        yield client


async def turns(trace: CallTrace) -> AsyncIterator[None]:
    """Some turns to warm up, and one turn that is traced, until all tasks wait again."""
    for number in range(WARM + 1):
        trace.on = number == WARM
        yield
        await wait_until_idle()
    trace.on = False


Scenario = Callable[[CallTrace], Any]
SCENARIOS: dict[str, Scenario] = {
    "tools/call on a stream, server, modern": on_a_stream,
    "tools/call over HTTP, server, modern": over_http,
    **{
        f"tools/call, client and server, {era}": partial(between_our_client_and_server, "echo", era)
        for era in REVISIONS
    },
    **{
        f"elicitation, client and server, {era}": partial(between_our_client_and_server, "ask", era)
        for era in REVISIONS
    },
}


def traced(name: str) -> CallTrace:
    trace = CallTrace()
    # Trio runs tasks that are ready in a random order; the seed makes it the same order each time.
    trio._core._run._r.seed(0)  # type: ignore[attr-defined]
    sys.setprofile(trace)
    try:
        trio.run(SCENARIOS[name], trace)
    finally:
        sys.setprofile(None)
    return trace


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench calls", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files, in the order of their first call")
    given = parser.parse_args(arguments)
    print(f"{'':<44}{'files':>8}{'functions':>11}{'calls':>8}{'resumed':>9}{'changes':>9}")
    for name in SCENARIOS:
        trace = traced(name)
        resumed = len(trace.calls) - trace.begun
        print(
            f"{name:<44}{len(trace.files):>8}{len(set(trace.calls)):>11}{trace.begun:>8}{resumed:>9}{trace.changes:>9}"
        )
        if given.list:
            print("    " + ", ".join(trace.files))
    return 0
