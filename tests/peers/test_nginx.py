"""Behind nginx as it comes: it buffers responses, and speaks HTTP/1.0 upstream.

What a call tells must get through while it still runs, keep-alive comments and standalone streams too, and a client
that goes away behind the proxy must be known to have gone.  A call here goes on only when its client has what was told,
so a proxy that held something back would stop the test.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
import trio

from tests.http.client import HttpClient, Stream
from tests.http.served import listening
from tests.peers.nginx import proxied
from tests.requirements import req
from trio_mcp import Context, Server

pytestmark = pytest.mark.full

LEGACY, MODERN = "2025-11-25", "2026-07-28"
STEPS = 3


class Paced:
    """A server whose calls wait for their client."""

    def __init__(self) -> None:
        self.server = Server("paced", capabilities=["tools"])
        self.heard: dict[int, trio.Event] = defaultdict(trio.Event)  # the client has this report
        self.cancelled = trio.Event()
        self.finished = trio.Event()

        @self.server.tool
        async def steps(ctx: Context) -> str:
            try:
                for step in range(1, STEPS + 1):
                    await ctx.progress(step, STEPS)
                    await self.heard[step].wait()
            except trio.Cancelled:
                self.cancelled.set()
                raise
            self.finished.set()
            return "done"


@contextlib.asynccontextmanager
async def behind_nginx(server: Server, **options: Any) -> AsyncIterator[HttpClient]:
    with trio.fail_after(60):
        async with listening(server, **options) as direct:
            stream = await direct.connect()
            upstream = stream.socket.getpeername()[1]
            await stream.aclose()
            with proxied(upstream) as port:
                web = HttpClient(partial(trio.open_tcp_stream, "127.0.0.1", port), host=f"proxy.example:{port}")
                try:
                    yield web
                finally:
                    await web.aclose()


@contextlib.asynccontextmanager
async def calling(web: HttpClient, revision: str, **headers: str) -> AsyncIterator[Stream]:
    """The response of a call of `steps`."""
    session = None if revision == MODERN else await web.initialize(revision)
    message = web.request("tools/call", {"name": "steps"}, revision=revision, progress="p")
    async with web.stream(message, revision=revision, session=session, headers=headers) as stream:
        yield stream


def reports(stream: Stream) -> Iterator[int]:
    return (each["params"]["progress"] for each in stream.seen if each.get("method") == "notifications/progress")


@req("http-107", "http-121")
@pytest.mark.parametrize("revision", [LEGACY, MODERN])
async def test_reports_get_through_one_by_one_while_the_call_runs(revision: str) -> None:
    paced = Paced()
    async with behind_nginx(paced.server) as web, calling(web, revision) as stream:
        for step in range(1, STEPS + 1):
            told = await stream.message()
            assert (told["params"]["progress"], list(reports(stream))) == (step, list(range(1, step + 1)))
            assert not paced.finished.is_set()
            paced.heard[step].set()
        assert (await stream.response())["result"]["content"] == [{"type": "text", "text": "done"}]
        assert stream.ended


@req("http-113")
@pytest.mark.parametrize("revision", [LEGACY, MODERN])
async def test_comments_that_keep_a_stream_alive_get_through(revision: str) -> None:
    paced = Paced()
    async with (
        behind_nginx(paced.server, keep_alive=0.05) as web,
        calling(web, revision, Accept="text/event-stream") as stream,
    ):
        assert (await stream.message())["params"]["progress"] == 1
        came = b""
        while b": " not in came:
            came += await stream.link.chunk() or b""
        assert not paced.finished.is_set()
        for step in range(1, STEPS + 1):
            paced.heard[step].set()
        assert "result" in await stream.response()


async def test_a_session_s_own_stream_gets_through() -> None:
    paced = Paced()
    async with behind_nginx(paced.server) as web:
        session = await web.initialize(LEGACY)
        async with web.stream(session=session) as stream:
            for _ in range(2):
                paced.server.notify_list_changed("tools")
                assert (await stream.message())["method"] == "notifications/tools/list_changed"


async def test_a_subscription_gets_through() -> None:
    paced = Paced()
    async with behind_nginx(paced.server) as web:
        message = web.request("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        async with web.stream(message) as stream:
            assert (await stream.message())["method"] == "notifications/subscriptions/acknowledged"
            for _ in range(2):
                paced.server.notify_list_changed("tools")
                assert (await stream.message())["method"] == "notifications/tools/list_changed"


@req("cancel-14")
async def test_a_modern_client_that_goes_away_behind_the_proxy_cancels_its_call() -> None:
    paced = Paced()
    async with behind_nginx(paced.server) as web, calling(web, MODERN) as stream:
        await stream.message()
        await stream.aclose()
        await paced.cancelled.wait()


async def test_a_legacy_client_that_goes_away_behind_the_proxy_cancels_nothing() -> None:
    paced = Paced()
    async with behind_nginx(paced.server) as web, calling(web, LEGACY) as stream:
        await stream.message()
        await stream.aclose()
        for step in range(1, STEPS + 1):
            paced.heard[step].set()
        await paced.finished.wait()
        assert not paced.cancelled.is_set()
