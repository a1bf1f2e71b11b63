"""Our client at protected servers by the official SDK for Python, old and new, with the authorization server that it
makes, at the same origin or at another one.
"""

from __future__ import annotations

import attrs
import pytest
import trio

from tests.peers.installed import PEERS, needs
from tests.peers.listening import listening
from tests.peers.programs.surf import Browser
from tests.requirements import req
from trio_mcp import Client, MemoryTokenStore, OAuth, open_client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first visit installs the peer

CALLBACK = "http://127.0.0.1:9/callback"
PATIENCE = 90.0  # seconds for all of a visit, on a busy machine
SERVERS = [("python-1.30.0", "2025-11-25"), ("python-2.3.0", "2025-11-25"), ("python-2.3.0", "2026-07-28")]


@req("auth-16", "auth-17", "auth-35", "auth-54")
@pytest.mark.parametrize("where", ["together", "apart"])
@pytest.mark.parametrize(("peer", "revision"), SERVERS)
async def test_our_client_gets_tokens_from_an_official_server(peer: str, revision: str, where: str) -> None:
    command = needs(peer, attrs.evolve(PEERS[peer], program="oauth_server.py").command)
    pages: list[str] = []
    store = MemoryTokenStore()

    async def visit(url: str) -> str:
        pages.append(url)
        return await trio.to_thread.run_sync(Browser().visit, url)

    def auth() -> OAuth:
        return OAuth("Visitor", visit=visit, redirect_uri=CALLBACK, store=store, http_on_loopback=True)

    async def ask(client: Client, tool: str) -> str:
        return await client.call_tool(tool, returns=str)

    with trio.fail_after(PATIENCE):
        async with listening([*command, where]) as origin:
            url = f"{origin}/mcp"
            async with open_client(url, auth=auth(), revision=revision) as client:
                assert await ask(client, "who") == "notes:read"
                assert await ask(client, "audience") == url
                await client.call_tool("expire")
                assert await ask(client, "who") == "notes:read"
                assert client.deviations == ()
            async with open_client(url, auth=auth(), revision=revision) as client:  # as a new process would
                assert await client.call_tool("expire", returns=list[str]) == ["authorization_code", "refresh_token"]
                assert len(pages) == 1
                assert await ask(client, "who") == "notes:read"
                await client.call_tool("forget")
                assert await ask(client, "who") == "notes:read"  # and all begins anew
            assert len(pages) == 2
