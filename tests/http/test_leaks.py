"""Whatever clients do, and however they leave, the server is afterwards what it was before."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.http.client import Web, note
from tests.http.served import listening, served
from tests.http.stage import OLD, A, D, E, Stage, plays, quiet
from tests.http.ws import HANDSHAKE
from tests.server.checkpoints import open_fds
from trio_mcp import Limits

Deed = Callable[[Web], Awaitable[object]]


async def session(web: Web) -> None:
    id = await web.initialize(D)
    await web.call("tools/call", plays()["params"], session=id)
    await web.end(id)


async def abandoned_session(web: Web) -> None:
    id = await web.initialize(D)
    await web.open(session=id)
    await web.open(plays("progress", "sleep 90"), session=id)


async def session_that_is_left_with_a_question(web: Web) -> None:
    id = await web.initialize(D)
    await (await web.open(plays("ask"), session=id)).message()


async def refusals(web: Web) -> None:
    asked = plays(revision=E)
    for status, how in (
        (403, {"headers": {"Origin": "https://evil.example"}}),
        (406, {"headers": {"Accept": "text/html"}}),
        (415, {"headers": {"Content-Type": "text/plain"}}),
        (400, {"body": b"{"}),
        (400, {"body": b"[" * 1000}),
        (400, {"headers": {"Mcp-Name": "other"}}),
    ):
        assert (await web.post(asked, **how)).status == status  # type: ignore[arg-type]
    assert (await web.post(plays(), session="x" * 32, revision=D)).status == 404
    assert b"400" in (await web.raw(b"junk\r\n\r\n"))[:20]


async def old_stream(web: Web) -> None:
    opened = await web.open(path="/sse", revision=A)
    await opened.event()


async def modern_call(web: Web) -> None:
    await web.post(plays("progress", revision=E))


async def modern_call_that_is_left(web: Web) -> None:
    await (await web.open(plays("progress", "wait never", revision=E))).message()


async def subscription(web: Web) -> None:
    asked = web.request("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, revision=E)
    await (await web.open(asked)).message()


async def question_that_is_not_answered(web: Web) -> None:
    await web.post(plays("ask", revision=E, capabilities={"elicitation": {}}))


async def half_a_request(web: Web) -> None:
    stream = (await web.link()).stream
    await stream.send_all(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n" + b"x" * 70_000)


async def note_for_nobody(web: Web) -> None:
    await web.post(note("notifications/initialized"), revision=D, session="x" * 32)


async def websocket(web: Web) -> None:
    stream = (await web.link()).stream
    lines = ("GET /ws HTTP/1.1", *(f"{name}: {value}" for name, value in HANDSHAKE.items()), "", "")
    await stream.send_all("\r\n".join(lines).replace(HANDSHAKE["Host"], str(web.headers["Host"])).encode())
    await stream.receive_some()


DEEDS: tuple[Deed, ...] = (
    session, abandoned_session, session_that_is_left_with_a_question, refusals, old_stream, modern_call,
    modern_call_that_is_left, subscription, question_that_is_not_answered, half_a_request, note_for_nobody, websocket,
)  # fmt: skip


async def done(web: Web, deed: Deed) -> None:
    """By a client of its own, which closes all its connections then."""
    own = Web(web.connect, host=str(web.headers["Host"]), check=False)
    try:
        await deed(own)
    finally:
        await own.aclose()


@pytest.mark.parametrize("times", [60, pytest.param(1500, marks=pytest.mark.long)])
@pytest.mark.parametrize("deed", DEEDS, ids=[deed.__name__ for deed in DEEDS])
async def test_no_client_leaves_anything_behind(deed: Deed, times: int, autojump_clock: MockClock) -> None:
    stage = Stage(limits=Limits(parked_seconds=60, session_idle_seconds=60))
    async with served(stage.server, **OLD) as web:
        listener: Any = getattr(web.connect, "__self__", None)  # it keeps what it has made
        counts = []
        for _ in range(3):
            for _ in range(times // 3):
                await done(web, deed)
            await trio.sleep(200)  # what is kept for a while is over
            await quiet()
            for told in (stage.began, stage.ended, stage.cancelled, stage.answers, listener.theirs):
                told.clear()
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert counts[-1] - counts[0] < times // 3
        assert (stage.server.statistics().connections, stage.server.statistics().running) == (0, 0)


async def test_every_connection_gives_its_file_descriptor_back() -> None:
    stage = Stage()
    async with listening(stage.server, **OLD) as web:
        await done(web, modern_call)
        await quiet()
        before = open_fds()
        for deed in DEEDS:
            for _ in range(3):
                await done(web, deed)
        with trio.fail_after(60):
            while open_fds() != before:
                await trio.lowlevel.checkpoint()
