"""A client of the official Python SDK 1.x or 2.x that gets its tokens by OAuth: ``oauth_client.py URL WAY TOOL SCOPE``.

The ways are session, which opens with a handshake, and modern.  The server has the tool TOOL, and a tool `write`, which
needs another scope.  Older SDKs request all scopes in advance: SCOPE.  The program prints its results like the other
programs.
"""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import anyio
from mcp.client.auth import OAuthClientProvider
from mcp.shared.auth import OAuthClientMetadata
from oauth_browser import Browser
from report import Report

CALLBACK = "http://127.0.0.1:9/callback"


class Storage:
    """The storage of the SDK.  It keeps all tokens, so that the program can count them."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.clients: list[Any] = []

    async def get_tokens(self) -> Any:
        return self.tokens[-1] if self.tokens else None

    async def set_tokens(self, tokens: Any) -> None:
        self.tokens.append(tokens)

    async def get_client_info(self) -> Any:
        return self.clients[-1] if self.clients else None

    async def set_client_info(self, client_info: Any) -> None:
        self.clients.append(client_info)


class User:
    """The user: opens the pages of the authorization server."""

    def __init__(self) -> None:
        self.visits = 0
        self._back: dict[str, str] = {}
        self._browser = Browser()

    async def open_page(self, url: str) -> None:
        self.visits += 1
        back = await anyio.to_thread.run_sync(self._browser.visit, url)
        self._back = dict(parse_qsl(urlsplit(back).query))

    async def callback(self) -> Any:
        try:
            from mcp.shared.auth import AuthorizationCodeResult
        except ImportError:  # older versions do not check the issuer
            return self._back["code"], self._back.get("state")
        return AuthorizationCodeResult.model_validate(self._back)


@asynccontextmanager
async def transport_of(url: str, provider: OAuthClientProvider) -> Any:
    """The transport for a client."""
    try:
        from mcp.client.streamable_http import streamable_http_client
    except ImportError:
        from mcp.client.streamable_http import streamablehttp_client

        yield streamablehttp_client(url, auth=provider)
    else:
        from mcp.shared._httpx_utils import create_mcp_http_client

        async with create_mcp_http_client(auth=provider) as http:
            yield streamable_http_client(url, http_client=http)


@asynccontextmanager
async def session_of(url: str, way: str, provider: OAuthClientProvider) -> Any:
    async with transport_of(url, provider) as transport:
        try:
            from mcp.client import Client
        except ImportError:
            from mcp import ClientSession

            async with transport as streams, ClientSession(*streams[:2]) as session:
                await session.initialize()
                yield session
        else:
            async with Client(transport, mode="auto" if way == "modern" else "legacy") as client:
                yield client


def expire_access_token(provider: Any) -> None:
    """Set the expiry time of the access token to the past."""
    if hasattr(provider, "context"):
        provider.context.token_expiry_time = 1.0
    else:
        provider._token_expiry_time = 1.0


async def main(url: str, way: str, plain: str, scope: str = "") -> None:
    report, user, storage = Report([]), User(), Storage()
    metadata = OAuthClientMetadata.model_validate(
        {
            "client_name": "Peer",
            "redirect_uris": [CALLBACK],
            "token_endpoint_auth_method": "none",
            "scope": scope or None,
        }
    )
    provider = OAuthClientProvider(url, metadata, storage, user.open_page, user.callback)
    async with session_of(url, way, provider) as session:

        async def call(tool: str, **arguments: str) -> list[Any]:
            """The text of the result, the number of pages that the user has seen, and the number of token responses."""
            result = await session.call_tool(tool, arguments)
            return [result.content[0].text, user.visits, len(storage.tokens)]

        await report.look("call", lambda: call(plain))
        await report.look("step up", lambda: call("write", text="milk"))
        expire_access_token(provider)
        await report.look("refresh", lambda: call(plain))
        await report.look("scopes", lambda: _scopes(storage))
    report.tell("end", "clean")


async def _scopes(storage: Storage) -> list[str]:
    return sorted(storage.tokens[-1].scope.split())


anyio.run(main, *sys.argv[1:])
