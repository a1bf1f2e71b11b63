"""The server keeps no memory, no request and no connection of clients that have left, regularly or not."""

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

Visit = Callable[[HttpClient], Awaitable[object]]


async def session(web: HttpClient) -> None:
    id = await web.initialize(D)
    await web.call("tools/call", play_call()["params"], session=id)
    await web.end(id)


async def abandoned_session(web: HttpClient) -> None:
    id = await web.initialize(D)
    await web.open(session=id)
    await web.open(play_call("progress", "sleep 90"), session=id)


async def session_with_an_unanswered_question(web: HttpClient) -> None:
    id = await web.initialize(D)
    await (await web.open(play_call("ask"), session=id)).message()


async def refusals(web: HttpClient) -> None:
    message = play_call(revision=E)
    for status, how in (
        (403, {"headers": {"Origin": "https://evil.example"}}),
        (406, {"headers": {"Accept": "text/html"}}),
        (415, {"headers": {"Content-Type": "text/plain"}}),
        (400, {"body": b"{"}),
        (400, {"body": b"[" * 1000}),
        (400, {"headers": {"Mcp-Name": "other"}}),
    ):
        assert (await web.post(message, **how)).status == status  # type: ignore[arg-type]
    assert (await web.post(play_call(), session="x" * 32, revision=D)).status == 404
    assert b"400" in (await web.raw(b"junk\r\n\r\n"))[:20]


async def sse_stream(web: HttpClient) -> None:
    opened = await web.open(path="/sse", revision=A)
    await opened.event()


async def modern_call(web: HttpClient) -> None:
    await web.post(play_call("progress", revision=E))


async def abandoned_modern_call(web: HttpClient) -> None:
    await (await web.open(play_call("progress", "wait never", revision=E))).message()


async def subscription(web: HttpClient) -> None:
    message = web.request("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, revision=E)
    await (await web.open(message)).message()


async def unanswered_question(web: HttpClient) -> None:
    await web.post(play_call("ask", revision=E, capabilities={"elicitation": {}}))


async def half_a_request(web: HttpClient) -> None:
    stream = (await web.link()).stream
    await stream.send_all(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n" + b"x" * 70_000)


async def notification_to_an_unknown_session(web: HttpClient) -> None:
    await web.post(notification("notifications/initialized"), revision=D, session="x" * 32)


async def websocket(web: HttpClient) -> None:
    stream = (await web.link()).stream
    lines = ("GET /ws HTTP/1.1", *(f"{name}: {value}" for name, value in HANDSHAKE.items()), "", "")
    await stream.send_all("\r\n".join(lines).replace(HANDSHAKE["Host"], str(web.headers["Host"])).encode())
    await stream.receive_some()


VISITS: tuple[Visit, ...] = (
    session, abandoned_session, session_with_an_unanswered_question, refusals, sse_stream, modern_call,
    abandoned_modern_call, subscription, unanswered_question, half_a_request, notification_to_an_unknown_session,
    websocket,
)  # fmt: skip


async def run_visit(web: HttpClient, visit: Visit) -> None:
    """Run a visit with a client of its own, and close all its connections."""
    own = HttpClient(web.connect, host=str(web.headers["Host"]), check=False)
    try:
        await visit(own)
    finally:
        await own.aclose()


@pytest.mark.parametrize("times", [60, pytest.param(1500, marks=pytest.mark.long)])
@pytest.mark.parametrize("visit", VISITS, ids=[visit.__name__ for visit in VISITS])
async def test_a_client_that_left_costs_no_memory(visit: Visit, times: int, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(parked_seconds=60, session_idle_seconds=60))
    async with served(scripted.server, **SSE_PATHS) as web:
        listener: Any = getattr(web.connect, "__self__", None)  # the listener keeps the connections it made
        counts = []
        for _ in range(3):
            for _ in range(times // 3):
                await run_visit(web, visit)
            await trio.sleep(200)  # longer than the server keeps anything for a client
            await wait_until_idle()
            for record in (scripted.began, scripted.ended, scripted.cancelled, scripted.answers, listener.server_ends):
                record.clear()
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert counts[-1] - counts[0] < times // 3
        assert (scripted.server.statistics().connections, scripted.server.statistics().running) == (0, 0)


async def test_every_connection_closes_its_file_descriptor() -> None:
    scripted = ScriptedServer()
    async with listening(scripted.server, **SSE_PATHS) as web:
        await run_visit(web, modern_call)
        await wait_until_idle()
        before = open_fds()
        for visit in VISITS:
            for _ in range(3):
                await run_visit(web, visit)
        with trio.fail_after(60):
            while open_fds() != before:
                await trio.lowlevel.checkpoint()
