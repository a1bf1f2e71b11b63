"""A protected server with FastMCP and its authorization server for tests: ``oauth_fastmcp4.py together``.

It allows each authorization request without a page.  It prints its URL on standard error.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from fastmcp.server.auth.auth import ClientRegistrationOptions
from fastmcp.server.auth.providers.in_memory import InMemoryOAuthProvider
from fastmcp.server.dependencies import get_access_token

SCOPES = ["notes:read"]
grants: list[str] = []


class Provider(InMemoryOAuthProvider):
    async def exchange_authorization_code(self, client: Any, authorization_code: Any) -> Any:
        grants.append("authorization_code")
        return await super().exchange_authorization_code(client, authorization_code)

    async def exchange_refresh_token(self, client: Any, refresh_token: Any, scopes: list[str]) -> Any:
        grants.append("refresh_token")
        return await super().exchange_refresh_token(client, refresh_token, scopes)


sock = socket.create_server(("127.0.0.1", 0))
origin = f"http://127.0.0.1:{sock.getsockname()[1]}"
provider = Provider(
    base_url=origin,
    required_scopes=SCOPES,
    client_registration_options=ClientRegistrationOptions(enabled=True, valid_scopes=SCOPES, default_scopes=SCOPES),
)
server = FastMCP("notes", auth=provider)


@server.tool
def who() -> str:
    token = get_access_token()
    return " ".join(token.scopes) if token else "nobody"


@server.tool
def expire() -> str:
    """Revoke all access tokens; return the grants of all token requests so far."""
    provider.access_tokens.clear()
    return " ".join(grants)


@server.tool
def forget() -> str:
    """Delete all clients and tokens of the authorization server."""
    for each in (provider.clients, provider.auth_codes, provider.access_tokens, provider.refresh_tokens):
        each.clear()
    return "forgotten"


sys.stderr.write(f"running on {origin}\n")
sys.stderr.flush()
uvicorn.Server(uvicorn.Config(server.http_app(), log_level="error")).run(sockets=[sock])
