"""A server with a tool that runs the steps in its arguments, and helpers for requests to it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.http.client import HttpClient, request
from tests.server.checkpoints import Pair, pipe_pair
from tests.server.raw_client import REVISION_NAMES
from trio_mcp import Context, Server

__all__ = [
    "KEEP_ALIVE", "QUESTIONS", "SESSIONS", "SSE_PATHS", "TOOLS", "UPDATED", "A", "B", "C", "D", "E", "ScriptedServer",
    "begin_post", "methods", "open_session", "play_call", "play_params", "session_revisions", "small_pipe",
    "streamable_revisions", "text_of", "wait_until_idle",
]  # fmt: skip

A, B, C, D, E = REVISION_NAMES
SESSIONS = (B, C, D)
KEEP_ALIVE = 15.0
TOOLS, UPDATED = "notifications/tools/list_changed", "notifications/resources/updated"
SSE_PATHS = {"sse_path": "/sse", "message_path": "/messages"}

session_revisions = pytest.mark.parametrize("revision", SESSIONS)
streamable_revisions = pytest.mark.parametrize("revision", [*SESSIONS, E])


@dataclass
class Size:
    size: int


class ScriptedServer:
    """A server with a tool `play` that runs the steps in its arguments, and records how each call ended.

    The steps are "progress", "log", "ask", "sample", "roots", "sleep 7", "wait x" (for the event `go["x"]`), "say x"
    (sets the result), "fail", "touch r://1" (reports an update of the resource), "tools" (reports that the list has
    changed), "many 9" (9 progress reports) and "hang-up 2" (the client disconnects, and returns after 2 seconds).
    """

    def __init__(self, **options: Any) -> None:
        self.server = Server("stage", version="1", capabilities=["tools", "resources"], **options)
        self.go: defaultdict[str, trio.Event] = defaultdict(trio.Event)
        self.began: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self.answers: list[Any] = []
        self.reported = 0
        self.server.tool(self.play)
        self.server.resource("r://{name}")(lambda name: name)

    async def play(self, steps: list[str], ctx: Context, name: str = "") -> str:
        self.began.append(name)
        result = "done"
        try:
            for step in steps:
                kind, _, detail = step.partition(" ")
                if kind == "say":
                    result = detail
                else:
                    await self._do(kind, detail, ctx)
        except trio.Cancelled:
            self.cancelled.append(name)
            raise
        self.ended.append(name)
        return result

    async def _do(self, kind: str, detail: str, ctx: Context) -> None:
        actions: dict[str, Callable[[], Any]] = {
            "progress": lambda: self._report(ctx),
            "log": lambda: ctx.log("info", detail),
            "ask": lambda: ctx.elicit("Which size?", Size),
            "sample": lambda: ctx.sample("Say something", max_tokens=10),
            "roots": ctx.roots,
            "sleep": lambda: trio.sleep(float(detail)),  # noqa: ASYNC105  # awaited below
            "hang-up": lambda: ctx.hang_up(retry=float(detail)),
            "wait": lambda: self.go[detail].wait(),
            "many": lambda: self._many(ctx, int(detail)),
        }
        if kind == "touch":
            self.server.notify_resource_updated(detail)
        elif kind == "tools":
            self.server.notify_list_changed("tools")
        elif kind == "fail":
            raise RuntimeError(detail)
        else:
            outcome = await actions[kind]()
            if kind in ("ask", "sample", "roots", "hang-up"):
                self.answers.append(outcome)

    async def _report(self, ctx: Context) -> None:
        self.reported += 1
        await ctx.progress(self.reported)

    async def _many(self, ctx: Context, count: int) -> None:
        for _ in range(count):
            await self._report(ctx)


def play_params(*steps: str, name: str = "") -> dict[str, Any]:
    return {"name": "play", "arguments": {"steps": list(steps), "name": name}}


def play_call(*steps: str, id: Any = 1, revision: str = D, name: str = "", **how: Any) -> dict[str, Any]:
    how.setdefault("progress", f"token of {id}")
    return request("tools/call", play_params(*steps, name=name), id, revision=revision, **how)


def text_of(message: dict[str, Any]) -> str:
    text: str = message["result"]["content"][0]["text"]
    return text


def methods(messages: list[dict[str, Any]]) -> list[str]:
    return [each.get("method", "the answer") for each in messages]


async def open_session(web: HttpClient, revision: str) -> str | None:
    """Open a session; the modern revision has no sessions, so the result is None."""
    return None if revision == E else await web.initialize(revision)


async def wait_until_idle() -> None:
    """Wait until the server has done all that it can do now."""
    await wait_all_tasks_blocked()


async def begin_post(web: HttpClient, message: Any, session: str | None, revision: str = D) -> tuple[Any, bytes]:
    """Post a message without reading the response; return the connection and the body that was sent."""
    fields = web.headers_for(message, revision, session)
    body = json.dumps(message).encode()
    link = await web.link()
    await link.ask("POST", web.path, {**web.headers, **fields}, body)
    await wait_until_idle()
    return link, body


QUESTIONS = {
    "ask": ("elicitation/create", {"action": "accept", "content": {"size": 3}}, C),
    "sample": (
        "sampling/createMessage",
        {"role": "assistant", "content": {"type": "text", "text": "something"}, "model": "m"},
        B,
    ),
    "roots": ("roots/list", {"roots": [{"uri": "file:///tmp"}]}, B),
}


def small_pipe() -> Pair:
    return pipe_pair(200)
