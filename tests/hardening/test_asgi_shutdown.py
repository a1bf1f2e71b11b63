"""An ASGI server that shuts down: calls have the time that it gives them, and not the application's after that."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.http.asgi_servers import hosted, hypercorn_of, lifespan_of
from tests.http.client import HttpClient
from tests.server.raw_client import legacy
from trio_mcp import Context, Server
from trio_mcp.asgi import AsgiApp


class Working:
    """A server with a call that takes an hour, and a client that has begun it."""

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
async def test_a_call_that_nobody_can_hear_of_any_more_holds_nothing_up(
    revision: str, autojump_clock: MockClock
) -> None:
    """ASGI: lifespan.shutdown comes when the server "has stopped accepting connections and closed all active ones"."""
    working = Working()
    app = AsgiApp(working.server, shutdown_timeout=7)
    async with lifespan_of(app):
        async with hosted(app, lifespan=False) as web:
            await working.begin(web, revision)
        assert working.ended == []  # a client of these revisions may come back for its answer
        began = trio.current_time()
    assert (working.ended, trio.current_time()) == ([began], began)


@legacy
async def test_a_call_whose_client_is_there_has_its_grace(revision: str, autojump_clock: MockClock) -> None:
    working = Working()
    app = AsgiApp(working.server, shutdown_timeout=7)
    async with hosted(app, lifespan=False) as web:
        async with lifespan_of(app):
            session = await web.initialize(revision)
            message = web.request("tools/call", {"name": "work", "arguments": {}}, revision=revision, progress="p")
            link, *_ = await web.begin(message, session=session)
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
        assert (working.ended, trio.current_time()) == ([began + 7], began + 7)
        await link.aclose()


@pytest.mark.full
@legacy
async def test_hypercorn_ends_when_its_own_time_is_over(revision: str) -> None:
    working = Working()
    async with hypercorn_of(AsgiApp(working.server, shutdown_timeout=3600), graceful_timeout=0.1) as web:
        await working.begin(web, revision)
    assert len(working.ended) == 1
