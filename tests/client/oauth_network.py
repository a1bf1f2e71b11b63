"""A server that requires tokens, the authorization server that issues them, and a user with a browser: all in memory.

    async with oauth_network() as network:
        async with network.client(revision="2025-11-25") as client:
            assert await client.call_tool("add", {"a": 1, "b": 2}, returns=int) == 3
        assert len(network.pages) == 1

The messages are real HTTP.  The MCP server is a `Server`, and its tokens are those of `tests.core.auth_server`.  A test
sets the time of day, `network.now`; waiting takes the time of the mock clock.
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

from tests.client.http_script import Handler, ReceivedRequest, ResponseWriter, ScriptedHttpServer
from tests.client.sample_server import sample_server
from tests.core.auth_server import CALLBACK, NOW, AuthServer
from tests.http.scripted_server import SSE_PATHS
from tests.http.served import MemoryListener
from tests.server.checkpoints import Pair, PipeEnd, unlimited_pipe, unwrapped
from trio_mcp import Client, OAuth, Principal, Server, open_client, serve_http
from trio_mcp.core.oauth import SendRequest
from trio_mcp.oauth import Application

__all__ = ["ISSUER", "RESOURCE", "URLS", "OAuthNetwork", "oauth_network"]

RESOURCE = "http://127.0.0.1:3000"  # the origin of each of the URLs
ISSUER = "http://127.0.0.1:4000"
URLS = {"http": f"{RESOURCE}/mcp", "http+sse": f"{RESOURCE}/sse", "websocket": "ws://127.0.0.1:3000/ws"}

Step = Callable[[SendRequest], Awaitable[None]]


@attrs.define(eq=False)
class OAuthNetwork:
    """The servers and the user, and records of their exchanges.

    `pages`: pages that were shown to the user.  `refused`: tokens that the MCP server refused.  `exchanges`: requests
    of the OAuth client.  `ports`: ports to which the client has connected.
    """

    url: str
    authority: AuthServer
    now: float = NOW
    revoked: set[str] = attrs.field(factory=set)
    pages: list[str] = attrs.field(factory=list)
    refused: list[str] = attrs.field(factory=list)
    auths: list[OAuth] = attrs.field(factory=list)
    accepts_tokens: bool = True  # False: each token is refused
    ports: set[int] = attrs.field(factory=set)
    listener: MemoryListener = attrs.field(factory=MemoryListener)
    lifetime: float | None = None  # seconds for which a token is valid, by the clock of the run
    exchanges: list[SendRequest] = attrs.field(factory=list)
    # Called before each exchange of the OAuth client, and before the user consents.
    before_exchange: Step | None = None
    before_consent: Callable[[], Awaitable[None]] | None = None

    def auth(self, application: Application | str = "Visitor", **options: Any) -> OAuth:
        given = {"visit": self.visit, "redirect_uri": CALLBACK, "http_on_loopback": True, **options}
        self.auths.append(OAuth(application, **given))
        return self.auths[-1]

    def client(self, auth: OAuth | None = None, **options: Any) -> AbstractAsyncContextManager[Client]:
        return open_client(self.url, auth=auth or self.auth(), **options)

    async def visit(self, url: str) -> str:
        self.pages.append(url)
        if self.before_consent is not None:
            await self.before_consent()
        return f"{CALLBACK}?{self.authority.browse(url)}"

    async def verify_later(self, token: str) -> Principal | None:
        return self.verify(token)

    def verify(self, token: str) -> Principal | None:
        granted = self.authority.tokens.get(token)
        if granted is None or token in self.revoked or not self.accepts_tokens:
            self.refused.append(token)
            return None
        expires = None if self.lifetime is None else self.now + self.lifetime
        return Principal("ada", granted.scopes, expires)

    @property
    def metadata_requests(self) -> list[str]:
        """The requests for metadata that the MCP server received, with their headers."""
        received = [each.heard.decode("latin-1") for each in self.listener.server_ends if isinstance(each, PipeEnd)]
        return [found for each in received for found in re.findall(r"GET /\.well-known/.*?\r\n\r\n", each, re.DOTALL)]

    @property
    def http_url(self) -> str:
        return self.url.replace("ws://", "http://")

    def delay_tokens(self, seconds: float) -> Step:
        """A step that delays each token request by these seconds."""

        async def step(request: SendRequest) -> None:
            if request.url.endswith("/token"):
                await trio.sleep(seconds)

        return step

    def revoke_tokens(self) -> None:
        """Revoke all tokens that were issued until now."""
        self.revoked |= self.authority.tokens.keys()

    def require_token(self, handle: Handler) -> Handler:
        """Protect the handler of an MCP server: serve its metadata, and require a token for all other requests."""

        async def handle_protected(received: ReceivedRequest, out: ResponseWriter) -> None:
            scheme, _, token = received.headers.get("Authorization", "").partition(" ")
            if received.target.startswith("/.well-known/"):
                request = SendRequest(received.method, f"{RESOURCE}{received.target}")
                self.exchanges.append(request)
                if self.before_exchange is not None:
                    await self.before_exchange(request)
                await out.json({"resource": RESOURCE, "authorization_servers": [ISSUER]})
            elif scheme == "Bearer" and self.verify(token) is not None:
                await handle(received, out)
            else:
                await out.reply(401, headers={"WWW-Authenticate": "Bearer"})

        return handle_protected

    async def answer(self, received: ReceivedRequest, out: ResponseWriter) -> None:
        """Answer as the authorization server."""
        request = SendRequest(
            received.method, f"{ISSUER}{received.target}", tuple(received.headers.items()), received.body
        )
        self.exchanges.append(request)
        if self.before_exchange is not None:
            await self.before_exchange(request)
        reply = self.authority.answer(request)
        headers = dict(reply.headers)
        await out.reply(reply.status, reply.body, headers, "application/json")

    def exchange_kinds(self) -> list[str]:
        """The kinds of the requests to the authorization server, in order."""
        return [each.kind for each in self.authority.asked]


@contextlib.asynccontextmanager
async def oauth_network(
    transport: str = "http",
    server: Server | None = None,
    *,
    scopes: tuple[str, ...] = (),
    streams: Callable[[], Pair] = unlimited_pipe,
    protected: bool = True,
    plain_verify: bool = True,
    front: Callable[[OAuthNetwork], Handler] | None = None,
    lifetime: float | None = None,
    **authority: Any,
) -> AsyncIterator[OAuthNetwork]:
    """Run the network.

    `server` is protected, unless `protected` is false.  `front` answers in place of `server`.  `authority`: settings of
    the authorization server.
    """
    server = server or sample_server()
    network = OAuthNetwork(URLS[transport], AuthServer(ISSUER, **{"iss": ISSUER, **authority}), lifetime=lifetime)
    if protected:
        verify = network.verify if plain_verify else network.verify_later
        server.protect(verify=verify, resource=RESOURCE, authorization_servers=[ISSUER], scopes=scopes)
    listener = network.listener = MemoryListener(streams)
    options = SSE_PATHS if transport == "http+sse" else {}
    with unwrapped():
        async with trio.open_nursery() as nursery:
            issuer = ScriptedHttpServer(network.answer, nursery, streams)
            mcp = listener if front is None else ScriptedHttpServer(front(network), nursery, streams)

            async def dial(host: str, port: int) -> trio.abc.Stream:
                network.ports.add(port)
                return await (mcp.connect if port == 3000 else issuer.connect)()

            await nursery.start(
                lambda task_status: serve_http(
                    server, listeners=[listener], allowed_hosts=["127.0.0.1"], task_status=task_status, **options
                )
            )
            with (
                mock.patch.object(trio, "open_tcp_stream", dial),
                mock.patch.dict(os.environ, {"NO_PROXY": "*"}),
                mock.patch("time.time", side_effect=lambda: network.now),
            ):
                yield network
            nursery.cancel_scope.cancel()
