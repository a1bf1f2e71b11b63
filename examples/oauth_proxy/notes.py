"""The protected MCP server, and the ASGI application with this server and its authorization server."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import Mount

from trio_mcp import Context, Server, ToolError
from trio_mcp.asgi import AsgiApp

from .proxy import Proxy
from .upstream import Refused, Unavailable, Upstream
from .wire import OAuthError, error_response

SCOPES = {"notes:read": "read your notes", "notes:write": "write notes in your name"}


def make_server(proxy: Proxy) -> Server:
    server = Server("notes", version="1.0")
    notes: dict[str | None, list[str]] = {}

    @server.tool
    async def read(ctx: Context) -> list[str]:
        """All notes of this user."""
        return notes.get(ctx.principal, [])

    @server.tool(scopes=["notes:write"])
    async def write(text: str, ctx: Context) -> str:
        """Write a note."""
        notes.setdefault(ctx.principal, []).append(text)
        return f"{ctx.principal} has {len(notes[ctx.principal])} notes."

    @server.tool
    async def who_am_i(ctx: Context) -> str:
        """Ask the identity provider for the name of the user."""
        try:  # with the provider's token of this grant, which stays in this program
            return await proxy.user_of(ctx.claims["grant"])
        except Refused:
            raise ToolError("The identity provider does not know you any more; sign in again.") from None
        except Unavailable:
            raise ToolError("The identity provider cannot be asked now; try again later.") from None

    server.protect(
        verify=proxy.verify,
        resource=proxy.resource,
        authorization_servers=[proxy.issuer],
        scopes=["notes:read"],
        implies={"notes:write": ["notes:read"]},
    )
    return server


def make_app(public_url: str, upstream: Upstream) -> tuple[Starlette, Server]:
    proxy = Proxy(public_url, f"{public_url}/mcp", SCOPES, upstream)
    server = make_server(proxy)
    mcp = AsgiApp(server, public_url=public_url)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        async with mcp.running():
            yield

    routes = [*proxy.routes(), Mount("/", mcp)]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={OAuthError: error_response})
    app.state.proxy = proxy
    return app, server
