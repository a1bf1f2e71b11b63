"""Our client with protected servers of the official SDKs and FastMCP, old and new.  Their authorization servers are at
the same origin or at another one.
"""

from __future__ import annotations

import attrs
import pytest
import trio

from tests.peers.installed import PEERS, needs
from tests.peers.listening import listening
from tests.peers.programs.oauth_browser import Browser
from tests.requirements import req
from trio_mcp import Client, OAuth, open_client
from trio_mcp.oauth import MemoryTokenStore

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the peer

CALLBACK = "http://127.0.0.1:9/callback"
PATIENCE = 300.0  # seconds for one visit, on a busy machine
SERVERS = [
    ("python-1.30.0", "oauth_server.py", "together", "2025-11-25"),
    ("python-1.30.0", "oauth_server.py", "apart", "2025-11-25"),
    ("python-2.3.0", "oauth_server.py", "together", "2025-11-25"),
    ("python-2.3.0", "oauth_server.py", "apart", "2025-11-25"),
    ("python-2.3.0", "oauth_server.py", "together", "2026-07-28"),
    ("python-2.3.0", "oauth_server.py", "apart", "2026-07-28"),
    ("typescript-1.32.2", "oauth_server.mjs", "together", "2025-11-25"),
    ("fastmcp-4.1.2", "oauth_fastmcp4.py", "together", "2025-11-25"),
    ("fastmcp-4.1.2", "oauth_fastmcp4.py", "together", "2026-07-28"),
]


@req("auth-16", "auth-17", "auth-35", "auth-54")
@pytest.mark.parametrize(("peer", "program", "where", "revision"), SERVERS)
async def test_our_client_gets_tokens_from_a_real_server(peer: str, program: str, where: str, revision: str) -> None:
    command = needs(peer, attrs.evolve(PEERS[peer], program=program).command)
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
                if not peer.startswith("fastmcp"):  # FastMCP does not show the audience
                    assert await ask(client, "audience") == url
                await client.call_tool("expire")
                assert await ask(client, "who") == "notes:read"
                assert client.deviations == ()
            async with open_client(
                url, auth=auth(), revision=revision
            ) as client:  # like a new process, with the stored tokens
                assert await ask(client, "expire") == "authorization_code refresh_token"
                assert len(pages) == 1
                assert await ask(client, "who") == "notes:read"
                await client.call_tool("forget")
                assert await ask(client, "who") == "notes:read"  # after a new registration and authorization
            assert len(pages) == 2
