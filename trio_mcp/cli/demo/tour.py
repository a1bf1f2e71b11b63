"""The order of the demo: a client of the newest revision, a client of an old one, and all five revisions at one port.

The first two clients start the same command and run the same code.  Only the messages differ: the demo shows their
names, read from the bytes on the wire.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import trio

from trio_mcp import Client, __version__
from trio_mcp.cli.demo import scenes, server
from trio_mcp.cli.demo.screen import FIRM, Screen
from trio_mcp.testing import Line, Transcript
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.types import ClientOptions

__all__ = ["message_names", "run", "tour"]

OLD = "2025-06-18"  # the oldest in which a server can ask the user

SCENES: tuple[tuple[str, scenes.Scene, tuple[object, ...]], ...] = (
    ("A typed call", scenes.a_typed_call, (server.Star, server.find)),
    ("A long call, and its progress", scenes.a_long_call, (server.expose,)),
    ("A call that takes too long: the timeout is a scope, and the server stops too", scenes.a_timeout, ()),
    ("A question to the user, in the middle of a call", scenes.a_question, (server.Booking, server.reserve)),
    ("A subscription: the client sees a change at once", scenes.a_change, (server.report,)),
)


def run() -> int:
    """Run the demo on standard output, and return the exit status of the process."""
    screen = Screen(sys.stdout, os.environ)
    status = 0
    try:
        status = trio.run(_until_stopped, screen)
    except* BrokenPipeError:
        # The reader has closed the pipe.  With /dev/null in its place, Python's last flush raises no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    if status >= 128:
        screen.settle()
    return status


async def _until_stopped(screen: Screen) -> int:
    """Run the tour until a signal ends it in order: clients are closed, and the processes of their servers awaited."""
    stopped_by = 0
    async with open_nursery() as nursery:

        async def wait_for_signal(task_status: trio.TaskStatus[None]) -> None:
            nonlocal stopped_by
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                task_status.started()
                stopped_by = await anext(signals)
                nursery.cancel_scope.cancel()

        await nursery.start(wait_for_signal)
        await tour(screen)
        nursery.cancel_scope.cancel()
    return 128 + stopped_by if stopped_by else 0


async def tour(screen: Screen) -> None:
    screen.title(f"trio_mcp {__version__}: one server, every revision of MCP")
    screen.note(
        "The client starts the server as a child process, talks to it over pipes, and does five things. "
        "The code that you see is the code that runs, and its output comes from the server."
    )
    await _visit(screen, "A client of the newest revision", {}, with_code=True)
    await _visit(screen, f"A client of {OLD}, with the same code", {"revision": OLD})
    await _every_revision(screen)
    screen.title("The end")
    screen.note("A host starts the same server with: python -m trio_mcp.cli.demo.server")
    screen.note("The README begins with a server and a client to copy.")


async def _visit(screen: Screen, title: str, options: ClientOptions, *, with_code: bool = False) -> None:
    wire, fill_in = Transcript(), scenes.fills_in(screen.print)

    async def play(client: Client) -> None:
        for attempt in client.negotiation.attempts:
            screen.say("tried", f"{attempt.tried}: {attempt.answered}")
        screen.say("chosen", f"{client.revision}, with {client.server['name']} {client.server['version']}")
        screen.say("found", ", ".join([tool.name for tool in await client.list_tools()]))
        screen.say("wire", message_names(wire, screen.glyphs))
        for heading, scene, shown in SCENES:
            before = len(wire)
            screen.head(heading)
            if with_code:
                screen.code("server", *shown)
                if scene is scenes.a_question:
                    screen.code("client", fill_in)
                screen.body("client", scene)
            await scene(client, screen.print, screen.bar)
            screen.settle()
            screen.say("wire", message_names(wire[before:], screen.glyphs))

    screen.title(title)
    if with_code:
        screen.body("client", scenes.a_visit)
    options = {**options, "elicitation": fill_in, "tap": wire.tap}
    screen.say("with", ", ".join(f"{name}={_word(value)}" for name, value in options.items()))
    await scenes.a_visit(play, **options)


async def _every_revision(screen: Screen) -> None:
    """Run the same server inside this process, for clients of every revision at one port."""
    screen.title("All five revisions over HTTP, at one port, as a task of this program")
    screen.body("both", scenes.every_revision)
    async with open_nursery() as nursery:
        await scenes.every_revision(nursery, screen.print)
        nursery.cancel_scope.cancel()


def _word(value: object) -> str:
    return repr(value) if isinstance(value, str) else getattr(value, "__name__", "...")


def message_names(lines: Iterable[Line], glyphs: Mapping[str, str]) -> str:
    """Return the names of these messages in order: ``→ tools/call  ← progress ×24  ← result``.  Lines are not broken
    inside a name."""
    words = []
    for word, same in itertools.groupby(_words(lines, glyphs)):
        count = len(list(same))
        words.append(word if count == 1 else f"{word}{FIRM}{glyphs['times']}{count}")
    return "  ".join(words)


def _words(lines: Iterable[Line], glyphs: Mapping[str, str]) -> Iterator[str]:
    for line in lines:
        message: Any = line.message
        if "method" in message:
            word = message["method"].removeprefix("notifications/")
        elif "error" in message:
            word = f"error {message['error']['code']}"
        else:
            kind = message["result"].get("resultType", "complete") if message["result"] else "complete"
            word = "result" if kind == "complete" else kind
        yield f"{glyphs['out' if line.mark == '>' else 'in']}{FIRM}{word}"
