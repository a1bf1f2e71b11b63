"""A protected server with the official Python SDK 1.x or 2.x, and the authorization server that the SDK builds from a
provider: ``oauth_server.py together|apart``, at one origin or at two.

It allows each authorization request without a page.  It prints the URL of the MCP server on standard error.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
from functools import partial
from typing import Any

import anyio
import uvicorn
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    ProviderTokenVerifier,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.routes import create_auth_routes
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions, RevocationOptions
from mcp.shared.auth import OAuthToken
from pydantic import AnyHttpUrl
from starlette.applications import Starlette

try:
    from mcp.server.mcpserver import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server

SCOPES = ["notes:read", "notes:write"]


class Provider:
    def __init__(self) -> None:
        self.forget()
        self.grants: list[str] = []

    def forget(self) -> None:
        self.clients: dict[str, Any] = {}
        self.codes: dict[str, AuthorizationCode] = {}
        self.tokens: dict[str, AccessToken] = {}
        self.refreshes: dict[str, RefreshToken] = {}

    async def get_client(self, client_id: str) -> Any:
        return self.clients.get(client_id)

    async def register_client(self, client_info: Any) -> None:
        self.clients[client_info.client_id] = client_info

    async def authorize(self, client: Any, params: Any) -> str:
        code = AuthorizationCode(
            code=secrets.token_urlsafe(),
            client_id=client.client_id,
            scopes=params.scopes or [],
            expires_at=time.time() + 60,
            code_challenge=params.code_challenge,
            redirect_uri=params.redirect_uri,
            redirect_uri_provided_explicitly=params.redirect_uri_provided_explicitly,
            resource=params.resource,
        )
        self.codes[code.code] = code
        return construct_redirect_uri(str(params.redirect_uri), code=code.code, state=params.state)

    async def load_authorization_code(self, client: Any, authorization_code: str) -> Any:
        return self.codes.get(authorization_code)

    async def exchange_authorization_code(self, client: Any, authorization_code: Any) -> OAuthToken:
        self.grants.append("authorization_code")
        del self.codes[authorization_code.code]
        return self._give(client.client_id, authorization_code.scopes, authorization_code.resource)

    async def load_refresh_token(self, client: Any, refresh_token: str) -> Any:
        return self.refreshes.get(refresh_token)

    async def exchange_refresh_token(self, client: Any, refresh_token: Any, scopes: list[str]) -> OAuthToken:
        self.grants.append("refresh_token")
        del self.refreshes[refresh_token.token]
        return self._give(client.client_id, scopes, refresh_token.resource)

    async def load_access_token(self, token: str) -> Any:
        return self.tokens.get(token)

    async def revoke_token(self, token: Any) -> None:
        self.tokens.pop(token.token, None)
        self.refreshes.pop(token.token, None)

    def _give(self, client_id: str, scopes: list[str], resource: str | None) -> OAuthToken:
        common: dict[str, Any] = {"client_id": client_id, "scopes": scopes}
        if "resource" in RefreshToken.model_fields:
            common["resource"] = resource
        access, refresh = secrets.token_urlsafe(), secrets.token_urlsafe()
        until = int(time.time()) + 3600
        self.tokens[access] = AccessToken(token=access, expires_at=until, **{"resource": resource, **common})
        self.refreshes[refresh] = RefreshToken(token=refresh, **common)
        return OAuthToken(access_token=access, expires_in=3600, refresh_token=refresh, scope=" ".join(scopes))


provider = Provider()


def server_of(issuer: str, origin: str, together: bool) -> Any:
    auth = AuthSettings(
        issuer_url=AnyHttpUrl(issuer),
        resource_server_url=AnyHttpUrl(f"{origin}/mcp"),
        required_scopes=["notes:read"],
        client_registration_options=ClientRegistrationOptions(enabled=True, valid_scopes=SCOPES, default_scopes=SCOPES),
        revocation_options=RevocationOptions(enabled=True),
    )
    known: dict[str, Any] = {"auth_server_provider": provider}
    if not together:
        known = {"token_verifier": ProviderTokenVerifier(provider)}
    server = Server("notes", auth=auth, **known)

    @server.tool()
    def who() -> str:
        token = get_access_token()
        return " ".join(sorted(token.scopes)) if token else "nobody"

    @server.tool()
    def audience() -> str:
        token = get_access_token()
        return str(token and token.resource)

    @server.tool()
    def expire() -> str:
        """Revoke all access tokens; return the grants of all token requests so far."""
        provider.tokens.clear()
        return " ".join(provider.grants)

    @server.tool()
    def forget() -> str:
        """Delete all clients and tokens of the authorization server."""
        provider.forget()
        return "forgotten"

    return server


def listen() -> tuple[socket.socket, str]:
    sock = socket.create_server(("127.0.0.1", 0))
    return sock, f"http://127.0.0.1:{sock.getsockname()[1]}"


async def main(way: str) -> None:
    sock, origin = listen()
    issuing, issuer = (sock, origin) if way == "together" else listen()
    server = server_of(issuer, origin, way == "together")
    async with anyio.create_task_group() as group:
        if way == "apart":
            routes = create_auth_routes(
                provider,
                AnyHttpUrl(issuer),
                client_registration_options=ClientRegistrationOptions(
                    enabled=True, valid_scopes=SCOPES, default_scopes=SCOPES
                ),
            )
            group.start_soon(partial(_serve, Starlette(routes=routes), issuing))
        group.start_soon(partial(_serve, server.streamable_http_app(), sock))
        sys.stderr.write(f"running on {origin}\n")
        sys.stderr.flush()


async def _serve(app: Any, sock: socket.socket) -> None:
    await uvicorn.Server(uvicorn.Config(app, log_level="error")).serve(sockets=[sock])


anyio.run(main, sys.argv[1])
