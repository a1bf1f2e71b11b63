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
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any
from unittest import mock

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from tests.client.house import build
from tests.client.http_script import Asked, Out, Play, Script
from tests.core.auth_server import CALLBACK, NOW, AuthServer
from tests.http.scripted_server import SSE_PATHS
from tests.http.served import MemoryListener
from tests.server.checkpoints import Pair, PipeEnd, running_tasks, task_positions, unlimited_pipe, unwrapped
from trio_mcp import Client, OAuth, Principal, Server, open_client, serve_http
from trio_mcp.core.oauth import SendRequest
from trio_mcp.oauth import Application

__all__ = ["ISSUER", "RESOURCE", "URLS", "Town", "quiet", "town"]

RESOURCE = "http://127.0.0.1:3000"  # of which each of the URLs is a part
ISSUER = "http://127.0.0.1:4000"
URLS = {"http": f"{RESOURCE}/mcp", "http+sse": f"{RESOURCE}/sse", "websocket": "ws://127.0.0.1:3000/ws"}

Step = Callable[[SendRequest], Awaitable[None]]


@attrs.define(eq=False)
class Town:
    """Who is where.

    `pages` are those that the user was shown, `refused` the tokens that the MCP server did not take, `exchanges` what
    the authorization server was asked, and `ports` whoever was asked for anything.
    """

    url: str
    authority: AuthServer
    now: float = NOW
    revoked: set[str] = attrs.field(factory=set)
    pages: list[str] = attrs.field(factory=list)
    refused: list[str] = attrs.field(factory=list)
    auths: list[OAuth] = attrs.field(factory=list)
    satisfied: bool = True  # by any token at all
    ports: set[int] = attrs.field(factory=set)
    listener: MemoryListener = attrs.field(factory=MemoryListener)
    lifetime: float | None = None  # seconds for which a token is good, by the clock of the run
    exchanges: list[SendRequest] = attrs.field(factory=list)
    # What is done before each exchange with the authorization server, and before the user agrees.
    before: Step | None = None
    thinks: Callable[[], Awaitable[None]] | None = None

    def auth(self, application: Application | str = "Visitor", **options: Any) -> OAuth:
        given = {"visit": self.visit, "redirect_uri": CALLBACK, "http_on_loopback": True, **options}
        self.auths.append(OAuth(application, **given))
        return self.auths[-1]

    def client(self, auth: OAuth | None = None, **options: Any) -> AbstractAsyncContextManager[Client]:
        return open_client(self.url, auth=auth or self.auth(), **options)

    async def visit(self, url: str) -> str:
        self.pages.append(url)
        if self.thinks is not None:
            await self.thinks()
        return f"{CALLBACK}?{self.authority.browse(url)}"

    async def verify_later(self, token: str) -> Principal | None:
        return self.verify(token)

    def verify(self, token: str) -> Principal | None:
        granted = self.authority.tokens.get(token)
        if granted is None or token in self.revoked or not self.satisfied:
            self.refused.append(token)
            return None
        expires = None if self.lifetime is None else self.now + self.lifetime
        return Principal("ada", granted.scopes, expires)

    @property
    def documents(self) -> list[str]:
        """What the MCP server was asked for beside the protocol, with the headers of it."""
        heard = [each.heard.decode("latin-1") for each in self.listener.server_ends if isinstance(each, PipeEnd)]
        return [found for each in heard for found in re.findall(r"GET /\.well-known/.*?\r\n\r\n", each, re.DOTALL)]

    @property
    def as_http(self) -> str:
        return self.url.replace("ws://", "http://")

    def taking(self, seconds: float) -> Step:
        """Each token takes so long."""

        async def step(request: SendRequest) -> None:
            if request.url.endswith("/token"):
                await trio.sleep(seconds)

        return step

    def expire(self) -> None:
        """No token that was given until now is good any more."""
        self.revoked |= self.authority.tokens.keys()

    def door(self, play: Play) -> Play:
        """Before an MCP server that is played: it wants tokens, and its metadata can be had."""

        async def playing(asked: Asked, out: Out) -> None:
            scheme, _, token = asked.headers.get("Authorization", "").partition(" ")
            if asked.target.startswith("/.well-known/"):
                request = SendRequest(asked.method, f"{RESOURCE}{asked.target}")
                self.exchanges.append(request)
                if self.before is not None:
                    await self.before(request)
                await out.json({"resource": RESOURCE, "authorization_servers": [ISSUER]})
            elif scheme == "Bearer" and self.verify(token) is not None:
                await play(asked, out)
            else:
                await out.reply(401, headers={"WWW-Authenticate": "Bearer"})

        return playing

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
    streams: Callable[[], Pair] = unlimited_pipe,
    protected: bool = True,
    plain_verify: bool = True,
    front: Callable[[Town], Play] | None = None,
    lifetime: float | None = None,
    **authority: Any,
) -> AsyncIterator[Town]:
    """`server` is protected; `authority` are settings of the authorization server.  `front` answers in its place."""
    server = server or build()
    at = Town(URLS[transport], AuthServer(ISSUER, **{"iss": ISSUER, **authority}), lifetime=lifetime)
    if protected:
        verify = at.verify if plain_verify else at.verify_later
        server.protect(verify=verify, resource=RESOURCE, authorization_servers=[ISSUER], scopes=scopes)
    listener = at.listener = MemoryListener(streams)
    options = SSE_PATHS if transport == "http+sse" else {}
    with unwrapped():
        async with trio.open_nursery() as nursery:
            issuer = Script(at.answer, nursery, streams)
            mcp = listener if front is None else Script(front(at), nursery, streams)

            async def dial(host: str, port: int) -> trio.abc.Stream:
                at.ports.add(port)
                return await (mcp.connect if port == 3000 else issuer.connect)()

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
    assert not left, f"tasks were left: {sorted(task.name for task in left)}\n{task_positions()}"
