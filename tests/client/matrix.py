"""Tests of a client on each transport, in each revision that the transport has.

    @each_transport()
    async def test_a_tool_is_called(variant: Variant, clock: MockClock) -> None:
        async with client_of(variant) as client:
            assert await client.call_tool("add", {"a": 1, "b": 2}, returns=int) == 3

All transports are in memory and under a mock clock, except the child process: it is a real process, under a real clock.
In the default suite a test has only one revision on the child, which is chosen by the name of the test.  When the block
of `client_of` ends, no task may be left.

`each_transport_and_asgi` adds one transport: the ASGI application.
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

from tests.client.sample_server import sample_server
from tests.http.asgi_servers import _connection
from tests.http.scripted_server import SSE_PATHS, A, B, C, D, E
from tests.http.served import MemoryListener
from tests.server.checkpoints import running_tasks, task_positions
from trio_mcp import Server, serve_http
from trio_mcp.asgi import AsgiApp
from trio_mcp.client import Client, open_client
from trio_mcp.transport import open_nursery

__all__ = [
    "ROOT",
    "Variant",
    "client_of",
    "each_transport",
    "each_transport_and_asgi",
    "no_tasks_left",
    "serve_over",
    "tcp_connects_to",
]

T = TypeVar("T", bound=Callable[..., Any])
ROOT = Path(__file__).parents[2]
CHILD = [sys.executable, "-m", "tests.client.sample_server"]
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


class Variant(NamedTuple):
    """One transport in one revision."""

    transport: str
    revision: str

    @property
    def modern(self) -> bool:
        return self.revision == E

    @property
    def exchanges(self) -> bool:
        """Whether each request is an HTTP exchange of its own, without a session."""
        return self.modern and self.transport in ("http", "http json", "asgi")


def each_transport(
    *,
    revisions: Collection[str] = _ALL,
    without: Collection[str] = (),
    legacy_without: Collection[str] = (),
    among: Mapping[str, Collection[str]] = _REVISIONS,
) -> Callable[[T], Any]:
    """Parametrize a test by `variant`: all transports and the revisions that each has.

    The transports of `without` are left out.  Those of `legacy_without` are left out in the legacy revisions.
    """

    def decorate(test: T) -> Any:
        found = [
            Variant(transport, revision)
            for transport, known in among.items()
            if transport not in without
            for revision in known
            if revision in revisions and (revision == E or transport not in legacy_without)
        ]
        children = [each for each in found if each.transport == "child"]
        by_default = children[zlib.crc32(test.__name__.encode()) % len(children)] if children else None
        params = [pytest.param(each, id=" ".join(each), marks=_speed(each, by_default)) for each in found]
        return pytest.mark.parametrize("variant", params)(test)

    return decorate


each_transport_and_asgi = functools.partial(each_transport, among=_CONTRACT)


def _speed(variant: Variant, by_default: Variant | None) -> Collection[pytest.MarkDecorator]:
    """Exceptions to the rule of `tests.speeds`: a process is slow, and HTTP+SSE belongs to the oldest revision."""
    if variant.transport == "child":
        return (pytest.mark.default if variant == by_default else pytest.mark.full,)
    return (pytest.mark.default,) if variant == ("http+sse", A) else ()


@contextlib.asynccontextmanager
async def no_tasks_left() -> AsyncIterator[None]:
    """Fail if a task outlives the block."""
    before = running_tasks()
    yield
    await wait_all_tasks_blocked()
    left = running_tasks() - before - {trio.lowlevel.current_task()}
    assert not left, f"tasks were left: {sorted(task.name for task in left)}\n{task_positions()}"


@contextlib.contextmanager
def tcp_connects_to(connect: Callable[[], Awaitable[trio.abc.Stream]]) -> Any:
    """Replace TCP: `trio.open_tcp_stream` returns a stream of `connect`."""

    async def dial(host: str, port: int) -> trio.abc.Stream:
        return await connect()

    with mock.patch.object(trio, "open_tcp_stream", dial), mock.patch.dict(os.environ, {"NO_PROXY": "*"}):
        yield


@contextlib.asynccontextmanager
async def serve_over(transport: str, server: Server, **http: Any) -> AsyncIterator[Any]:
    """Serve the server over the transport; yield the target for a client.  `http`: options of `serve_http`."""
    if transport == "memory":
        yield server
    elif transport == "child":
        yield CHILD
    elif transport == "asgi":
        app, listener = AsgiApp(server, allowed_hosts=["127.0.0.1"], **http), MemoryListener()
        async with app.running(), open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, functools.partial(_connection, app, {}), [listener])
            with tcp_connects_to(listener.connect):
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
            with tcp_connects_to(listener.connect):
                yield _URLS[transport]


@contextlib.asynccontextmanager
async def client_of(variant: Variant, server: Server | None = None, **options: Any) -> AsyncIterator[Client]:
    """Open a client of the sample server, or of `server`, which must be in this process."""
    assert server is None or variant.transport != "child"
    if variant.transport == "child":
        options.setdefault("cwd", ROOT)
    options.setdefault("revision", variant.revision)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(no_tasks_left())
        target = await stack.enter_async_context(serve_over(variant.transport, server or sample_server()))
        yield await stack.enter_async_context(open_client(target, **options))
