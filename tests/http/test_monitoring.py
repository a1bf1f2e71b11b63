"""Probes and metrics of a server in one process; `tests/hardening/test_workers.py` has several."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.http.asgi_servers import hypercorn_of
from tests.http.served import by_token, served
from trio_mcp import Context, Server, UsageError
from trio_mcp.asgi import AsgiApp


def counting() -> tuple[Server, trio.Event]:
    server, go_on = Server("counting"), trio.Event()

    @server.tool
    async def wait(ctx: Context) -> str:
        await go_on.wait()
        return "done"

    return server, go_on


async def test_probes_and_metrics_need_no_headers_and_no_credentials(autojump_clock: MockClock) -> None:
    server, go_on = counting()
    async with served(server, monitoring=True, authenticate=by_token) as web, trio.open_nursery() as nursery:
        bearer = {"Authorization": "Bearer ann"}
        nursery.start_soon(lambda: web.call("tools/call", {"name": "wait"}, headers=bearer))
        await wait_all_tasks_blocked()
        for path in ("/healthz", "/readyz"):
            answer = await web.send("GET", path)
            assert (answer.status, answer.type, answer.body) == (200, "text/plain", b"ok\n")
            assert answer.headers["Cache-Control"] == "no-store"
        answer = await web.send("GET", "/metrics")
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert [line for line in answer.body.decode().splitlines() if not line.startswith("#")] == [
            "trio_mcp_connections 1",
            "trio_mcp_running_requests 1",
            "trio_mcp_parked_handlers 0",
            "trio_mcp_listeners 0",
            "trio_mcp_held_bytes 0",
            "trio_mcp_workers 1",
            "trio_mcp_silent_workers 0",
            "trio_mcp_worker_failures_total 0",
        ]
        head = await web.ask("HEAD", "/metrics")
        assert head[1].status_code == 200
        go_on.set()


async def test_a_server_that_drains_is_not_ready(autojump_clock: MockClock) -> None:
    server, go_on = counting()
    async with served(server, monitoring=True, ends=False) as web, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: web.call("tools/call", {"name": "wait"}))
        await wait_all_tasks_blocked()
        async with server.draining(10):
            assert [(await web.send("GET", path)).status for path in ("/readyz", "/healthz")] == [503, 200]
            go_on.set()


async def test_without_the_option_probes_and_metrics_are_not_served() -> None:
    async with served(Server("plain")) as web:
        assert (await web.send("GET", "/metrics")).status == 404
    with pytest.raises(UsageError, match="monitoring must be True or False"):
        async with served(Server("plain"), monitoring="yes"):
            pass


async def test_an_asgi_application_serves_probes_and_metrics() -> None:
    async with hypercorn_of(AsgiApp(Server("mounted"), monitoring=True)) as web:
        assert (await web.send("GET", "/readyz")).body == b"ok\n"
        assert b"trio_mcp_workers 1\n" in (await web.send("GET", "/metrics")).body
