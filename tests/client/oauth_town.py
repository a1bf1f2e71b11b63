"""A server that wants tokens, the authorization server that gives them, and a user with a browser: all in memory.

    async with town() as at:
        async with at.client(revision="2025-11-25") as client:
            assert await client.call_tool("add", {"a": 1, "b": 2}, returns=int) == 3
        assert len(at.pages) == 1

What is sent is real HTTP; the MCP server is ours, and its tokens are those of `tests.core.auth_server`.  `at.now` is
the time of day, which a test sets; what happens meanwhile takes the time of the mock clock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any
from unittest import mock

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from tests.client.house import build
from tests.client.http_script import Asked, Out, Script
from tests.core.auth_server import CALLBACK, NOW, AuthServer
from tests.http.served import MemoryListener
from tests.http.stage import OLD
from tests.server.checkpoints import Pair, running_tasks, unwrapped, where_all_stand, wide
from trio_mcp import Application, Client, OAuth, Principal, Server, open_client, serve_http
from trio_mcp.core.auth_deeds import SendRequest
from trio_mcp.core.headers import Headers

__all__ = ["ISSUER", "RESOURCE", "URLS", "Town", "quiet", "town"]

RESOURCE = "http://127.0.0.1:3000"  # of which each of the URLs is a part
ISSUER = "http://127.0.0.1:4000"
URLS = {"http": f"{RESOURCE}/mcp", "http+sse": f"{RESOURCE}/sse", "websocket": "ws://127.0.0.1:3000/ws"}

Step = Callable[[SendRequest], Awaitable[None]]


@attrs.define(eq=False)
class Town:
    """Who is where.  `pages` are those that the user was shown, `seen` is each request with its credentials."""

    url: str
    authority: AuthServer
    now: float = NOW
    revoked: set[str] = attrs.field(factory=set)
    pages: list[str] = attrs.field(factory=list)
    seen: list[tuple[str, Headers]] = attrs.field(factory=list)
    exchanges: list[SendRequest] = attrs.field(factory=list)
    # What is done before each exchange with the authorization server, and before the user agrees.
    before: Step | None = None
    thinks: Callable[[], Awaitable[None]] | None = None

    def auth(self, application: Application | str = "Visitor", **options: Any) -> OAuth:
        given = {"visit": self.visit, "redirect_uri": CALLBACK, "http_on_loopback": True, **options}
        return OAuth(application, **given)

    def client(self, auth: OAuth | None = None, **options: Any) -> AbstractAsyncContextManager[Client]:
        return open_client(self.url, auth=auth or self.auth(), **options)

    async def visit(self, url: str) -> str:
        self.pages.append(url)
        if self.thinks is not None:
            await self.thinks()
        return f"{CALLBACK}?{self.authority.browse(url)}"

    def verify(self, token: str) -> Principal | None:
        granted = self.authority.tokens.get(token)
        if granted is None or token in self.revoked:
            return None
        return Principal("ada", granted.scopes)

    def expire(self) -> None:
        """No token that was given until now is good any more."""
        self.revoked |= self.authority.tokens.keys()

    async def answer(self, asked: Asked, out: Out) -> None:
        """As the authorization server."""
        request = SendRequest(asked.method, f"{ISSUER}{asked.target}", tuple(asked.headers.items()), asked.body)
        self.exchanges.append(request)
        if self.before is not None:
            await self.before(request)
        reply = self.authority.answer(request)
        headers = dict(reply.headers)
        await out.reply(reply.status, reply.body, headers, "application/json")

    def kinds(self) -> list[str]:
        """What the authorization server was asked, in order."""
        return [each.kind for each in self.authority.asked]


@contextlib.asynccontextmanager
async def town(
    transport: str = "http",
    server: Server | None = None,
    *,
    scopes: tuple[str, ...] = (),
    streams: Callable[[], Pair] = wide,
    **authority: Any,
) -> AsyncIterator[Town]:
    """`server` is protected; `authority` are settings of the authorization server."""
    server = server or build()
    at = Town(URLS[transport], AuthServer(ISSUER, **{"iss": ISSUER, **authority}))
    server.protect(verify=at.verify, resource=RESOURCE, authorization_servers=[ISSUER], scopes=scopes)
    listener = MemoryListener(streams)
    options = OLD if transport == "http+sse" else {}
    with unwrapped():
        async with trio.open_nursery() as nursery:
            issuer = Script(at.answer, nursery, streams)

            async def dial(host: str, port: int) -> trio.abc.Stream:
                return await (listener.connect if port == 3000 else issuer.connect)()

            await nursery.start(
                lambda task_status: serve_http(
                    server, listeners=[listener], allowed_hosts=["127.0.0.1"], task_status=task_status, **options
                )
            )
            with (
                mock.patch.object(trio, "open_tcp_stream", dial),
                mock.patch.dict(os.environ, {"NO_PROXY": "*"}),
                mock.patch("time.time", side_effect=lambda: at.now),
            ):
                yield at
            nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def quiet() -> AsyncIterator[None]:
    """No task outlives the block, also none of Trio's own nursery."""
    before = running_tasks()
    yield
    await wait_all_tasks_blocked()
    left = running_tasks() - before - {trio.lowlevel.current_task()}
    assert not left, f"tasks were left: {sorted(task.name for task in left)}\n{where_all_stand()}"
