"""A server behind HTTP and its client: `served` over memory streams, `listening` over loopback sockets.

Both call `serve_http`, so only the streams differ.  An exception leaves the block without a group around it.  After the
block the server must have no tasks left.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import trio

from tests.http.client import HttpClient
from tests.server.checkpoints import running_tasks, task_positions, unlimited_pipe, unwrapped
from trio_mcp.core.http import LOOPBACK_HOSTS, HttpRequest

__all__ = ["MemoryListener", "bearer", "by_token", "listening", "served"]


class MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts the connections that `connect` makes; `streams` makes the two ends of a connection.

    `server_ends` are the server's ends so far.
    """

    def __init__(self, streams: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]] = unlimited_pipe) -> None:
        self._streams = streams
        self._send, self._receive = trio.open_memory_channel[trio.abc.Stream](float("inf"))
        self.server_ends: list[trio.abc.Stream] = []

    async def connect(self) -> trio.abc.Stream:
        ours, theirs = self._streams()
        self.server_ends.append(theirs)
        try:
            self._send.send_nowait(theirs)
        except trio.BrokenResourceError:
            raise OSError("the listener is closed") from None
        await trio.lowlevel.checkpoint()
        return ours

    async def accept(self) -> trio.abc.Stream:
        return await self._receive.receive()

    async def aclose(self) -> None:
        self._receive.close()
        await trio.lowlevel.checkpoint()


async def by_token(request: HttpRequest) -> str | None:
    """Authenticate by the bearer token: the token is the name of the principal."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token or None if kind == "Bearer" else None


def bearer(principal: str) -> dict[str, str | None]:
    """The headers of a request of this principal, for `by_token`."""
    return {"Authorization": f"Bearer {principal}"}


@contextlib.asynccontextmanager
async def served(
    server: Any,
    *,
    streams: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]] = unlimited_pipe,
    check: bool = True,
    ends: bool = True,
    **options: Any,
) -> AsyncIterator[HttpClient]:
    """A client of `server` over memory streams; `options` are those of `serve_http`.

    With `ends=False` the end of the block waits until the server returns without a cancellation, as after a drain.
    """
    from trio_mcp.server.http import serve_http

    listener = MemoryListener(streams)
    options.setdefault("allowed_hosts", LOOPBACK_HOSTS)
    async with _serving(serve_http, server, ends, listeners=[listener], **options) as _:
        web = HttpClient(listener.connect, path=options.get("path", "/mcp"), check=check)
        async with contextlib.aclosing(web):
            yield web


@contextlib.asynccontextmanager
async def listening(server: Any, *, check: bool = True, ends: bool = True, **options: Any) -> AsyncIterator[HttpClient]:
    """A client of `server` over sockets on loopback; `options` are those of `serve_http`."""
    from trio_mcp.server.http import serve_http

    async with _serving(serve_http, server, ends, port=0, **options) as address:
        port = address.listeners[0].socket.getsockname()[1]

        async def connect() -> trio.abc.Stream:
            return await trio.open_tcp_stream("127.0.0.1", port)

        web = HttpClient(connect, path=options.get("path", "/mcp"), host=f"127.0.0.1:{port}", check=check)
        async with contextlib.aclosing(web):
            yield web


@contextlib.asynccontextmanager
async def _serving(serve_http: Any, server: Any, ends: bool, **options: Any) -> AsyncIterator[Any]:
    before = running_tasks()
    with unwrapped():
        async with trio.open_nursery() as nursery:
            address = await nursery.start(lambda task_status: serve_http(server, task_status=task_status, **options))
            yield address
            if ends:
                nursery.cancel_scope.cancel()
    await trio.testing.wait_all_tasks_blocked()  # some tasks may be about to end
    left = {task for task in running_tasks() - before if task is not trio.lowlevel.current_task()}
    assert not left, f"tasks are left: {sorted(task.name for task in left)}\n{task_positions()}"
