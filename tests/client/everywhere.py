"""One house, and a client of it wherever a client can be: over each transport, in each revision that it has.

    @everywhere()
    async def test_a_tool_is_called(where: Where, clock: MockClock) -> None:
        async with visiting(where) as client:
            assert await client.call_tool("add", {"a": 1, "b": 2}, returns=int) == 3

Everything is in memory and under a mock clock but for the child process, which is a real one, under a real clock.  On
the child each test has one revision in the default suite, chosen by the test's name.  Nothing may be left when the
block ends.

`contract` is as `everywhere`, with one transport more: the ASGI application.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.client.house import build
from tests.http.asgi_servers import _connection
from tests.http.scripted_server import SSE_PATHS, A, B, C, D, E
from tests.http.served import MemoryListener
from tests.server.checkpoints import running_tasks, task_positions
from trio_mcp import Server, serve_http
from trio_mcp.asgi import AsgiApp
from trio_mcp.client import Client, open_client
from trio_mcp.transport import open_nursery

__all__ = ["ROOT", "Where", "at_home", "contract", "everywhere", "nothing_left", "reachable", "visiting"]

T = TypeVar("T", bound=Callable[..., Any])
ROOT = Path(__file__).parents[2]
CHILD = [sys.executable, "-m", "tests.client.house"]
_ALL = (A, B, C, D, E)
_REVISIONS = {
    "memory": _ALL, "child": _ALL, "websocket": _ALL,
    "http json": (B, C, D, E), "http": (B, C, D, E), "http+sse": (A, B, C, D),
}  # fmt: skip
_CONTRACT = {**_REVISIONS, "asgi": (B, C, D, E)}
_OPTIONS: dict[str, dict[str, Any]] = {
    "http json": {"json_only": True},
    "http": {},
    "http+sse": SSE_PATHS,
    "websocket": {},
}
_URLS = {
    "http json": "http://127.0.0.1:3000/mcp", "http": "http://127.0.0.1:3000/mcp",
    "http+sse": "http://127.0.0.1:3000/sse", "websocket": "ws://127.0.0.1:3000/ws", "asgi": "http://127.0.0.1:3000/mcp",
}  # fmt: skip


class Where(NamedTuple):
    transport: str
    revision: str

    @property
    def modern(self) -> bool:
        return self.revision == E

    @property
    def exchanges(self) -> bool:
        """Each request is an exchange of its own."""
        return self.modern and self.transport in ("http", "http json", "asgi")


def everywhere(
    *,
    revisions: Collection[str] = _ALL,
    without: Collection[str] = (),
    legacy_without: Collection[str] = (),
    among: Mapping[str, Collection[str]] = _REVISIONS,
) -> Callable[[T], Any]:
    """Over all transports but these, in the revisions that they have; over some not in the legacy ones."""

    def decorate(test: T) -> Any:
        found = [
            Where(transport, revision)
            for transport, known in among.items()
            if transport not in without
            for revision in known
            if revision in revisions and (revision == E or transport not in legacy_without)
        ]
        children = [each for each in found if each.transport == "child"]
        lucky = children[zlib.crc32(test.__name__.encode()) % len(children)] if children else None
        params = [pytest.param(each, id=" ".join(each), marks=_speed(each, lucky)) for each in found]
        return pytest.mark.parametrize("where", params)(test)

    return decorate


contract = functools.partial(everywhere, among=_CONTRACT)


def _speed(where: Where, lucky: Where | None) -> Collection[pytest.MarkDecorator]:
    """Exceptions to the rule of the suite: a process takes its time, and HTTP+SSE is of the oldest revision."""
    if where.transport == "child":
        return (pytest.mark.default if where == lucky else pytest.mark.full,)
    return (pytest.mark.default,) if where == ("http+sse", A) else ()


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """No task outlives the block."""
    before = running_tasks()
    yield
    await wait_all_tasks_blocked()
    left = running_tasks() - before - {trio.lowlevel.current_task()}
    assert not left, f"tasks were left: {sorted(task.name for task in left)}\n{task_positions()}"


@contextlib.contextmanager
def reachable(connect: Callable[[], Awaitable[trio.abc.Stream]]) -> Any:
    """What would be a TCP connection is one of these."""

    async def dial(host: str, port: int) -> trio.abc.Stream:
        return await connect()

    with mock.patch.object(trio, "open_tcp_stream", dial), mock.patch.dict(os.environ, {"NO_PROXY": "*"}):
        yield


@contextlib.asynccontextmanager
async def at_home(transport: str, server: Server, **http: Any) -> AsyncIterator[Any]:
    """A target at which this server is; `http` are options of `serve_http`."""
    if transport == "memory":
        yield server
    elif transport == "child":
        yield CHILD
    elif transport == "asgi":
        app, listener = AsgiApp(server, allowed_hosts=["127.0.0.1"], **http), MemoryListener()
        async with app.running(), open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, functools.partial(_connection, app, {}), [listener])
            with reachable(listener.connect):
                yield _URLS[transport]
            nursery.cancel_scope.cancel()
    else:
        listener = MemoryListener()
        options = {**_OPTIONS[transport], **http}
        async with open_nursery() as nursery:
            await nursery.start(
                lambda task_status: serve_http(
                    server, listeners=[listener], allowed_hosts=["127.0.0.1"], task_status=task_status, **options
                )
            )
            with reachable(listener.connect):
                yield _URLS[transport]


@contextlib.asynccontextmanager
async def visiting(where: Where, server: Server | None = None, **options: Any) -> AsyncIterator[Client]:
    """A client of the house, or of another server in this process."""
    assert server is None or where.transport != "child"
    if where.transport == "child":
        options.setdefault("cwd", ROOT)
    options.setdefault("revision", where.revision)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(nothing_left())
        target = await stack.enter_async_context(at_home(where.transport, server or build()))
        yield await stack.enter_async_context(open_client(target, **options))
