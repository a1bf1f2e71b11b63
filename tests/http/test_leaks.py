"""Whatever clients do, and however they leave, the server is afterwards what it was before."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.http.client import HttpClient, notification
from tests.http.scripted_server import SSE_PATHS, A, D, E, ScriptedServer, play_call, wait_until_idle
from tests.http.served import listening, served
from tests.http.ws import HANDSHAKE
from tests.server.checkpoints import open_fds
from trio_mcp import Limits

pytestmark = pytest.mark.usefixtures("frozen_heap")

Deed = Callable[[HttpClient], Awaitable[object]]


async def session(web: HttpClient) -> None:
    id = await web.initialize(D)
    await web.call("tools/call", play_call()["params"], session=id)
    await web.end(id)


async def abandoned_session(web: HttpClient) -> None:
    id = await web.initialize(D)
    await web.open(session=id)
    await web.open(play_call("progress", "sleep 90"), session=id)


async def session_that_is_left_with_a_question(web: HttpClient) -> None:
    id = await web.initialize(D)
    await (await web.open(play_call("ask"), session=id)).message()


async def refusals(web: HttpClient) -> None:
    asked = play_call(revision=E)
    for status, how in (
        (403, {"headers": {"Origin": "https://evil.example"}}),
        (406, {"headers": {"Accept": "text/html"}}),
        (415, {"headers": {"Content-Type": "text/plain"}}),
        (400, {"body": b"{"}),
        (400, {"body": b"[" * 1000}),
        (400, {"headers": {"Mcp-Name": "other"}}),
    ):
        assert (await web.post(asked, **how)).status == status  # type: ignore[arg-type]
    assert (await web.post(play_call(), session="x" * 32, revision=D)).status == 404
    assert b"400" in (await web.raw(b"junk\r\n\r\n"))[:20]


async def old_stream(web: HttpClient) -> None:
    opened = await web.open(path="/sse", revision=A)
    await opened.event()


async def modern_call(web: HttpClient) -> None:
    await web.post(play_call("progress", revision=E))


async def modern_call_that_is_left(web: HttpClient) -> None:
    await (await web.open(play_call("progress", "wait never", revision=E))).message()


async def subscription(web: HttpClient) -> None:
    asked = web.request("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, revision=E)
    await (await web.open(asked)).message()


async def question_that_is_not_answered(web: HttpClient) -> None:
    await web.post(play_call("ask", revision=E, capabilities={"elicitation": {}}))


async def half_a_request(web: HttpClient) -> None:
    stream = (await web.link()).stream
    await stream.send_all(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n" + b"x" * 70_000)


async def note_for_nobody(web: HttpClient) -> None:
    await web.post(notification("notifications/initialized"), revision=D, session="x" * 32)


async def websocket(web: HttpClient) -> None:
    stream = (await web.link()).stream
    lines = ("GET /ws HTTP/1.1", *(f"{name}: {value}" for name, value in HANDSHAKE.items()), "", "")
    await stream.send_all("\r\n".join(lines).replace(HANDSHAKE["Host"], str(web.headers["Host"])).encode())
    await stream.receive_some()


DEEDS: tuple[Deed, ...] = (
    session, abandoned_session, session_that_is_left_with_a_question, refusals, old_stream, modern_call,
    modern_call_that_is_left, subscription, question_that_is_not_answered, half_a_request, note_for_nobody, websocket,
)  # fmt: skip


async def done(web: HttpClient, deed: Deed) -> None:
    """By a client of its own, which closes all its connections then."""
    own = HttpClient(web.connect, host=str(web.headers["Host"]), check=False)
    try:
        await deed(own)
    finally:
        await own.aclose()


@pytest.mark.parametrize("times", [60, pytest.param(1500, marks=pytest.mark.long)])
@pytest.mark.parametrize("deed", DEEDS, ids=[deed.__name__ for deed in DEEDS])
async def test_no_client_leaves_anything_behind(deed: Deed, times: int, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(parked_seconds=60, session_idle_seconds=60))
    async with served(scripted.server, **SSE_PATHS) as web:
        listener: Any = getattr(web.connect, "__self__", None)  # it keeps what it has made
        counts = []
        for _ in range(3):
            for _ in range(times // 3):
                await done(web, deed)
            await trio.sleep(200)  # what is kept for a while is over
            await wait_until_idle()
            for told in (scripted.began, scripted.ended, scripted.cancelled, scripted.answers, listener.server_ends):
                told.clear()
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert counts[-1] - counts[0] < times // 3
        assert (scripted.server.statistics().connections, scripted.server.statistics().running) == (0, 0)


async def test_every_connection_gives_its_file_descriptor_back() -> None:
    scripted = ScriptedServer()
    async with listening(scripted.server, **SSE_PATHS) as web:
        await done(web, modern_call)
        await wait_until_idle()
        before = open_fds()
        for deed in DEEDS:
            for _ in range(3):
                await done(web, deed)
        with trio.fail_after(60):
            while open_fds() != before:
                await trio.lowlevel.checkpoint()
