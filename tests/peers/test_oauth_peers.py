"""OAuth with clients of the official SDKs, which use our protected server.  Their tokens come from the authorization
server of the tests, or from the example of an OAuth proxy.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.http.auth_site import auth_site, protected_by
from tests.peers.installed import PEERS, needs, node, npm
from tests.peers.programs.oauth_browser import Browser
from tests.requirements import req
from tests.server.test_example_oauth_proxy import PROVIDER, proxy_before
from trio_mcp import open_client

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the peer

PATIENCE = 300.0  # seconds for one program, on a busy machine
CLIENTS = [
    ("python-1.30.0", "session"),
    ("python-2.3.0", "session"),
    ("python-2.3.0", "modern"),
    ("typescript-1.32.2", "session"),
    ("typescript-2.4.0", "session"),
    ("typescript-2.4.0", "modern"),
]

# If it has a refresh token, it renews its token instead of requesting the additional scope.
CANNOT_STEP_UP = "typescript-1.32.2"
# A client of 2025-03-26: it expects the authorization server at the origin of the MCP server, and cannot step up.
# The client of 1.12.4 is left out, because with OAuth it sends each request twice.
OLD = "python-1.9.4"


def expected(peer: str, plain: str, more: str, written: str) -> dict[str, Any]:
    """The results of a client.  A call has its text, the number of pages shown to the user, and of token responses."""
    if peer == CANNOT_STEP_UP:
        refused = "Error: Streamable HTTP error: Server returned 403 after trying upscoping"
        seen = {"step up": {"raised": refused, "code": 403}, "refresh": [plain, 1, 3], "scopes": ["notes:read"]}
    else:
        scopes = ["notes:read", "notes:write"]
        seen = {"step up": [written, 2, 2], "refresh": [more, 2, 3], "scopes": scopes}
    return {"call": [plain, 1, 1], **seen, "end": "clean"}


async def seen_by(peer: str, *arguments: str) -> dict[str, Any]:
    """Run the program of an SDK, which must print no error, and return its results."""
    program = "oauth_client.py" if peer.startswith("python") else "oauth_client.mjs"
    command = needs(peer, attrs.evolve(PEERS[peer], program=program).command)
    with trio.fail_after(PATIENCE):
        done = await trio.run_process([*command, *arguments], capture_stdout=True, capture_stderr=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, ""), done.stderr.decode()
    return {each["behaviour"]: each["seen"] for each in map(json.loads, done.stdout.decode().splitlines())}


@req("auth-01", "auth-27", "auth-34", "auth-47", "auth-79", "auth-80")
@pytest.mark.parametrize(("peer", "way"), CLIENTS)
async def test_an_official_client_gets_tokens_steps_up_and_renews(peer: str, way: str) -> None:
    async with auth_site() as site, protected_by(site) as url:
        seen = await seen_by(peer, url, way, "who")
        assert seen == expected(peer, "notes:read", "notes:read notes:write", "milk was written")
        assert [each["resource"] for each in site.server.of("token")] == [url] * 3
        assert len(site.server.of("register")) == 1


@req("auth-30", "auth-31", "auth-57")
@pytest.mark.parametrize(("peer", "way"), CLIENTS)
async def test_an_official_client_gets_its_tokens_from_the_proxy(peer: str, way: str) -> None:
    async with auth_site(**PROVIDER) as site, proxy_before(site) as url:
        seen = await seen_by(peer, url, way, "who_am_i")
        assert seen == expected(peer, "ada", "ada", "ada has 1 notes.")
        assert [each["grant_type"] for each in site.server.of("token")][-1] == "refresh_token"


@req("auth-06", "auth-10", "auth-30")
async def test_a_client_of_2025_03_26_gets_its_tokens_from_the_proxy() -> None:
    async with auth_site(**PROVIDER) as site, proxy_before(site) as url:
        seen = await seen_by(OLD, url, "session", "who_am_i", "notes:read notes:write")
        assert seen == {
            "call": ["ada", 1, 1],
            "step up": ["ada has 1 notes.", 1, 1],
            "refresh": ["ada", 1, 2],
            "scopes": ["notes:read", "notes:write"],
            "end": "clean",
        }


# A host that supports only stdio, with mcp-remote as its OAuth client.

REMOTE = "mcp-remote-0.15.1"
PAGE = re.compile(rb"(http://127\.0\.0\.1:\d+/authorize\?\S+)\n")


async def test_a_stdio_host_gets_its_tokens_through_mcp_remote(tmp_path: Path) -> None:
    program = needs(REMOTE, lambda: npm(REMOTE, PEERS[REMOTE].packages)) / "node_modules/mcp-remote/dist/proxy.js"
    output = bytearray()
    statuses: list[int] = []

    def agree(page: str) -> None:
        browser = Browser()
        statuses.append(browser.ask(browser.visit(page))[0])

    async with auth_site() as site, protected_by(site) as url, trio.open_nursery() as nursery:
        started = False

        def on_stderr(data: bytes) -> None:
            nonlocal started
            output.extend(data)
            if not started and (page := PAGE.search(output)):
                started = True
                nursery.start_soon(trio.to_thread.run_sync, agree, page[1].decode())

        command = [needs("node", node), str(program), url, "--transport", "http-only"]
        with trio.fail_after(PATIENCE):
            async with open_client(command, env={"MCP_REMOTE_CONFIG_DIR": str(tmp_path)}, stderr=on_stderr) as client:
                assert await client.call_tool("who", returns=str) == "notes:read"
                site.server.expire()
                assert await client.call_tool("who", returns=str) == "notes:read"
        assert [each["grant_type"] for each in site.server.of("token")] == ["authorization_code", "refresh_token"]
        assert statuses == [200]
