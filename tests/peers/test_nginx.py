"""A server behind nginx with its default settings: nginx buffers responses, and uses HTTP/1.0 to the server.

The progress reports of a call must reach the client while the call still runs.  Keep-alive comments and standalone
streams must pass, too, and the server must notice when a client behind the proxy disconnects.  A call here continues
only after its client has the last report, so a proxy that holds a report back stops the test.
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
    """A server with a tool that waits, after each report, until the test has received it."""

    def __init__(self) -> None:
        self.server = Server("paced", capabilities=["tools"])
        self.received: dict[int, trio.Event] = defaultdict(trio.Event)  # the client has received this report
        self.cancelled = trio.Event()
        self.finished = trio.Event()

        @self.server.tool
        async def steps(ctx: Context) -> str:
            try:
                for step in range(1, STEPS + 1):
                    await ctx.progress(step, STEPS)
                    await self.received[step].wait()
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
async def test_each_progress_report_passes_nginx_while_the_call_runs(revision: str) -> None:
    paced = Paced()
    async with behind_nginx(paced.server) as web, calling(web, revision) as stream:
        for step in range(1, STEPS + 1):
            report = await stream.message()
            assert (report["params"]["progress"], list(reports(stream))) == (step, list(range(1, step + 1)))
            assert not paced.finished.is_set()
            paced.received[step].set()
        assert (await stream.response())["result"]["content"] == [{"type": "text", "text": "done"}]
        assert stream.ended


@req("http-113")
@pytest.mark.parametrize("revision", [LEGACY, MODERN])
async def test_keep_alive_comments_pass_nginx(revision: str) -> None:
    paced = Paced()
    async with (
        behind_nginx(paced.server, keep_alive=0.05) as web,
        calling(web, revision, Accept="text/event-stream") as stream,
    ):
        assert (await stream.message())["params"]["progress"] == 1
        data = b""
        while b": " not in data:
            data += await stream.link.chunk() or b""
        assert not paced.finished.is_set()
        for step in range(1, STEPS + 1):
            paced.received[step].set()
        assert "result" in await stream.response()


async def test_the_standalone_stream_of_a_session_passes_nginx() -> None:
    paced = Paced()
    async with behind_nginx(paced.server) as web:
        session = await web.initialize(LEGACY)
        async with web.stream(session=session) as stream:
            for _ in range(2):
                paced.server.notify_list_changed("tools")
                assert (await stream.message())["method"] == "notifications/tools/list_changed"


async def test_a_subscription_passes_nginx() -> None:
    paced = Paced()
    async with behind_nginx(paced.server) as web:
        message = web.request("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        async with web.stream(message) as stream:
            assert (await stream.message())["method"] == "notifications/subscriptions/acknowledged"
            for _ in range(2):
                paced.server.notify_list_changed("tools")
                assert (await stream.message())["method"] == "notifications/tools/list_changed"


@req("cancel-14")
async def test_a_modern_disconnect_behind_nginx_cancels_the_call() -> None:
    paced = Paced()
    async with behind_nginx(paced.server) as web, calling(web, MODERN) as stream:
        await stream.message()
        await stream.aclose()
        await paced.cancelled.wait()


async def test_a_legacy_disconnect_behind_nginx_cancels_no_call() -> None:
    paced = Paced()
    async with behind_nginx(paced.server) as web, calling(web, LEGACY) as stream:
        await stream.message()
        await stream.aclose()
        for step in range(1, STEPS + 1):
            paced.received[step].set()
        await paced.finished.wait()
        assert not paced.cancelled.is_set()
