"""The authorization server of the tests over HTTP, so that real programs reach it: `AuthServer`, with network faults.

    async with auth_site(expires_in=60) as site, protected_by(site) as url:
        ...  # an MCP server at this URL takes its tokens

It listens on loopback, or on any of Trio's listeners.  `site.server` has the settings and the received requests.  A
browser that visits the authorization endpoint is redirected back at once, because the user agrees to everything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import attrs
import h11
import trio

from tests.core.auth_server import AuthServer, reply
from trio_mcp import Context, Principal, Server, serve_http
from trio_mcp.core.oauth import Replied, SendRequest

__all__ = ["AuthSite", "Hold", "auth_site", "protected_by"]


@attrs.frozen
class Hold:
    """Holds a request: `arrived` is set when the request is there, and it waits for `release`."""

    arrived: trio.Event = attrs.field(factory=trio.Event)
    release: trio.Event = attrs.field(factory=trio.Event)


@attrs.define
class AuthSite:
    """An `AuthServer` with faults for chosen endpoints, named by the last part of the path (token, register, ...).

    A request to an endpoint in `held` waits, one in `unavailable` gets 503, and one in `unanswered` gets no response.
    """

    server: AuthServer
    held: dict[str, Hold] = attrs.field(factory=dict)
    unavailable: set[str] = attrs.field(factory=set)
    unanswered: set[str] = attrs.field(factory=set)

    @property
    def issuer(self) -> str:
        return self.server.issuer

    def verifier(self, resource: str) -> Callable[[str], Principal | None]:
        """For `Server.protect`: a token is valid if it was issued for this resource and the server still has it."""

        def verify(token: str) -> Principal | None:
            granted = self.server.tokens.get(token)
            if granted is None or granted.resource != resource:
                return None
            return Principal(granted.client_id, granted.scopes)

        return verify

    async def answer(self, stream: trio.abc.Stream) -> None:
        """Serve one request, and close the connection."""
        async with stream:
            http = h11.Connection(h11.SERVER)
            try:
                request = await _read(http, stream, self.server.origin)
            except (h11.RemoteProtocolError, trio.BrokenResourceError):
                return  # the client has gone
            kind = urlsplit(request.url).path.rpartition("/")[2]
            if kind in self.held:
                self.held[kind].arrived.set()
                await self.held[kind].release.wait()
            if kind in self.unanswered:
                return
            response = reply(503) if kind in self.unavailable else self._answered(kind, request)
            fields = [*response.headers.items(), ("Content-Length", str(len(response.body))), ("Connection", "close")]
            answered = http.send(h11.Response(status_code=response.status, headers=fields)) or b""
            try:
                await stream.send_all(answered + (http.send(h11.Data(data=response.body)) or b""))
            except trio.BrokenResourceError:
                return

    def _answered(self, kind: str, request: SendRequest) -> Replied:
        if kind != "authorize":
            return self.server.answer(request)
        back = self.server.authorize(request.url)
        if back is None:
            return reply(400, {"error": "invalid_request"})
        (redirect_uri,) = parse_qs(urlsplit(request.url).query)["redirect_uri"]
        return reply(302, None, Location=f"{redirect_uri}{'&' if '?' in redirect_uri else '?'}{back}")


async def _read(http: h11.Connection, stream: trio.abc.Stream, origin: str) -> SendRequest:
    head, body = None, b""
    while not isinstance(event := http.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            http.receive_data(bytes(await stream.receive_some()))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            raise h11.RemoteProtocolError("it was closed")
    assert head is not None
    headers = tuple((name.decode(), value.decode()) for name, value in head.headers)
    return SendRequest(head.method.decode(), origin + head.target.decode(), headers, body)


@asynccontextmanager
async def auth_site(
    listener: trio.abc.Listener[Any] | None = None, *, issuer: str | None = None, **settings: Any
) -> AsyncIterator[AuthSite]:
    """An authorization server with these settings of `AuthServer`.

    `issuer` is the issuer it states, whether or not it listens there; HERE in it stands for the origin it listens at.
    """
    if listener is None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        where = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    else:
        where = "http://127.0.0.1:9"  # the test connects clients to the listener itself
    issuer = where if issuer is None else issuer.replace("HERE", where)
    site = AuthSite(AuthServer(**{"issuer": issuer, "iss": issuer, **settings}))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, site.answer, [listener])
        yield site
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def protected_by(site: AuthSite) -> AsyncIterator[str]:
    """The URL, on loopback, of an MCP server that accepts the tokens of this site.

    Its tool `who` returns the scopes of the token.  Its tool `write` needs one more scope than the other requests.
    """
    server = Server("notes")

    @server.tool
    async def who(ctx: Context) -> str:
        return " ".join(sorted(ctx.scopes))

    @server.tool(scopes=["notes:write"])
    async def write(text: str) -> str:
        return f"{text} was written"

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/mcp"
    server.protect(verify=site.verifier(url), resource=url, authorization_servers=[site.issuer], scopes=["notes:read"])
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_http, server, listeners=[listener]))
        yield url
        nursery.cancel_scope.cancel()
