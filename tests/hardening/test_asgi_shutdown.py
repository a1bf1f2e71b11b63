"""Shutdown of an ASGI server: calls have the time of the server, and not the time of the application in addition."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.http.asgi_servers import hosted, hypercorn_of, lifespan_of
from tests.http.client import HttpClient
from tests.server.raw_client import legacy
from trio_mcp import Context, Server
from trio_mcp.asgi import AsgiApp


class SlowServer:
    """A server with a tool that takes an hour, and a function that starts a call of it."""

    def __init__(self) -> None:
        self.server = Server("working")
        self.ended: list[float] = []

        @self.server.tool
        async def work(ctx: Context) -> None:
            await ctx.progress(1)
            try:
                await trio.sleep(3600)
            finally:
                self.ended.append(trio.current_time())

    async def begin(self, web: HttpClient, revision: str) -> None:
        session = await web.initialize(revision)
        message = web.request("tools/call", {"name": "work", "arguments": {}}, revision=revision, progress="p")
        async with web.stream(message, session=session) as stream:
            await stream.message()


@legacy
async def test_a_call_without_connections_does_not_delay_the_shutdown(revision: str, autojump_clock: MockClock) -> None:
    """ASGI: lifespan.shutdown comes when the server "has stopped accepting connections and closed all active ones"."""
    slow = SlowServer()
    app = AsgiApp(slow.server, shutdown_timeout=7)
    async with lifespan_of(app):
        async with hosted(app, lifespan=False) as web:
            await slow.begin(web, revision)
        assert slow.ended == []  # a client of these revisions may come back for its answer
        began = trio.current_time()
    assert (slow.ended, trio.current_time()) == ([began], began)


@legacy
async def test_a_call_of_a_connected_client_has_the_shutdown_timeout(revision: str, autojump_clock: MockClock) -> None:
    slow = SlowServer()
    app = AsgiApp(slow.server, shutdown_timeout=7)
    async with hosted(app, lifespan=False) as web:
        async with lifespan_of(app):
            session = await web.initialize(revision)
            message = web.request("tools/call", {"name": "work", "arguments": {}}, revision=revision, progress="p")
            link, *_ = await web.begin(message, session=session)
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
        assert (slow.ended, trio.current_time()) == ([began + 7], began + 7)
        await link.aclose()


@pytest.mark.full
@legacy
async def test_hypercorn_ends_after_its_own_timeout(revision: str) -> None:
    slow = SlowServer()
    async with hypercorn_of(AsgiApp(slow.server, shutdown_timeout=3600), graceful_timeout=0.1) as web:
        await slow.begin(web, revision)
    assert len(slow.ended) == 1
