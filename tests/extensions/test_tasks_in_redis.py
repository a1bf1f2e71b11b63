"""Servers with tasks in Redis, while Redis stops, restarts or is slow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
import trio
import trio.lowlevel

from tests.ports import unclaimed_port
from tests.redis_server import RedisServer, redis_server
from trio_mcp import RequestError, Server, open_client, serve_http
from trio_mcp.client import ClientOptions
from trio_mcp.extensions.tasks import ClientTask, TaskStatus
from trio_mcp.stores import RedisStore

pytestmark = pytest.mark.full
T = TypeVar("T")
OPTIONS: ClientOptions = {"tasks": True, "revision": "2026-07-28"}
STORE_FAILED = "the store of the tasks does not work; try again later"
CALL_SECONDS = 5.0  # the maximum; a failing call takes at most one second


@asynccontextmanager
async def task_server(url: str) -> AsyncIterator[str]:
    """A server with its tasks in this Redis."""
    server = Server("test", store=RedisStore(url), state_keys=[bytes(32)])

    @server.tool
    async def plain(text: str) -> str:
        await trio.lowlevel.checkpoint()
        return text

    @server.tool(task="required")
    async def work(text: str) -> str:
        await trio.sleep(0.2)
        return text

    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, server)
        yield address.url
        nursery.cancel_scope.cancel()


async def try_call(call: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result of a call, or None if its error says that the store does not work."""
    with trio.fail_after(CALL_SECONDS):
        try:
            return await call()
        except RequestError as error:
            assert STORE_FAILED in str(error)  # noqa: PT017  # other errors are wrong
            return None


async def test_redis_stops_and_starts_under_load() -> None:
    texts: list[str] = []
    known: list[ClientTask] = []
    refused = 0
    stop = trio.Event()

    async def call(url: str) -> None:
        async with open_client(url, **OPTIONS) as client:
            while not stop.is_set():
                with trio.fail_after(CALL_SECONDS):
                    texts.append((await client.call_tool("plain", {"text": "x"})).content[0].text)
                await trio.sleep(0.005)

    async def begin(url: str) -> None:
        nonlocal refused
        async with open_client(url, **OPTIONS) as client:
            while not stop.is_set():
                task = await try_call(lambda: client.start_task("work", {"text": "x"}))
                if task is None:
                    refused += 1
                else:
                    known.append(client.open_task(task.id))
                await trio.sleep(0.02)

    with redis_server() as redis:
        async with task_server(redis.url) as url, open_client(url, **OPTIONS) as client:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(call, url)
                    nursery.start_soon(begin, url)
                for _ in range(2):
                    await wait_for_more(lambda: known, more=10)
                    redis.kill()
                    before = refused
                    await wait_for_more(lambda: texts, more=50)  # calls without tasks still work
                    while refused < before + 5:  # noqa: ASYNC110  # the clients count
                        await trio.sleep(0.01)
                    redis.start()
                await wait_for_more(lambda: known, more=10)
                stop.set()
            for task in known:
                state = await wait_for_end(client.open_task(task.id))
                assert state is TaskStatus.COMPLETED


async def wait_for_more(counted: Callable[[], list[T]], more: int) -> None:
    """Wait until there are `more` items than now."""
    target = len(counted()) + more
    with trio.fail_after(60):
        while len(counted()) < target:  # noqa: ASYNC110  # the clients count
            await trio.sleep(0.01)


async def wait_for_end(task: ClientTask) -> TaskStatus:
    with trio.fail_after(60):
        while True:
            state = await try_call(task.status)
            if state is not None and state.terminal:
                return state.status
            await trio.sleep(0.05)


@asynccontextmanager
async def slow_proxy(redis: RedisServer, port: int, seconds: float) -> AsyncIterator[None]:
    """A proxy on this port that delays the answers of Redis."""

    async def pump(source: trio.abc.ReceiveStream, sink: trio.abc.SendStream, seconds: float) -> None:
        async for data in source:
            await trio.sleep(seconds)
            await sink.send_all(data)
        await sink.aclose()

    async def proxy(client: trio.SocketStream) -> None:
        async with client, await trio.open_unix_socket(redis.path) as upstream, trio.open_nursery() as nursery:
            nursery.start_soon(pump, client, upstream, 0)
            nursery.start_soon(pump, upstream, client, seconds)

    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_tcp, proxy, port)
        yield
        nursery.cancel_scope.cancel()


async def test_calls_without_tasks_do_not_wait_for_a_slow_redis() -> None:
    order: list[str] = []
    with redis_server() as redis:
        port = unclaimed_port()
        async with (
            slow_proxy(redis, port, 0.3),
            task_server(f"redis://127.0.0.1:{port}") as url,
            open_client(url, **OPTIONS) as client,
        ):

            async def begin() -> None:
                task = await client.start_task("work", {"text": "x"})
                order.append("begun")
                await task.result()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(begin)
                for _ in range(10):
                    await client.call_tool("plain", {"text": "x"})
                order.append("plain")
    assert order == ["plain", "begun"]
