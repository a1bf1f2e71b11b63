"""Our client and our server with mcp-remote between them, which uses stdio to the client and HTTP to the server.

The results of the official clients through mcp-remote are in `test_clients`.  Here client and server share a process,
so that the tests can check the requests of the proxy: how it connects a legacy client to a server of 2026-07-28, and
that it does not cancel a call there.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.fixtures.everything_server import make_server
from tests.peers.installed import PEERS, needs, node, npm
from trio_mcp import Client, open_client, serve_http
from trio_mcp.core import resource_updated
from trio_mcp.types import FormElicitationRequest, SamplingRequest

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first test installs the proxy

PROXY = "node_modules/mcp-remote/dist/proxy.js"
PATIENCE = 300.0  # seconds for one visit, on a busy machine
WATCHED = "test://watched-resource"


class ServerInput:
    """The bytes that the server has received."""

    def __init__(self) -> None:
        self._sent = bytearray()
        self._more = trio.Event()

    def tap(self, direction: str, data: bytes) -> None:
        if direction == "in":
            self._sent += data
            self._more.set()
            self._more = trio.Event()

    def headers(self, name: str) -> set[str]:
        """The values of this header in all requests so far."""
        return {each.decode() for each in re.findall(rb"(?im)^%s: (.*?)\r$" % name.encode(), self._sent)}

    async def shows(self, name: str, value: str) -> None:
        while value not in self.headers(name):
            await self._more.wait()


@asynccontextmanager
async def through_mcp_remote(
    folder: Path, *arguments: str, **options: Any
) -> AsyncIterator[tuple[Client, ServerInput]]:
    peer = PEERS["mcp-remote-0.15.1"]
    proxy = needs(peer.name, lambda: npm(peer.name, peer.packages)) / PROXY
    received = ServerInput()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            serve = partial(serve_http, make_server(), tap=received.tap, sse_path="/sse", message_path="/messages")
            address = await nursery.start(serve)
            url = address.sse_url if "sse-only" in arguments else address.url
            command = [node(), str(proxy), url, "--silent", "--transport", *arguments]
            async with open_client(command, env={"MCP_REMOTE_CONFIG_DIR": str(folder)}, **options) as client:
                yield client, received
            nursery.cancel_scope.cancel()


def fill_in(form: FormElicitationRequest) -> Mapping[str, Any]:
    return {"response": "blue"}


def sample(request: SamplingRequest) -> tuple[str, str]:
    return "a joke", "no-model"


async def cancelled_call(client: Client) -> None:
    """Call `interop_wait` and cancel the call as soon as the tool waits."""
    scope = trio.CancelScope()
    with scope:
        arguments = {"seconds": 60, "tag": "left"}
        await client.call_tool("interop_wait", arguments, on_progress=lambda *_: scope.cancel())
    assert scope.cancelled_caught


async def touch_repeatedly(client: Client) -> None:
    while True:
        await client.call_tool("interop_touch", {"uri": WATCHED})


@pytest.mark.parametrize(
    ("strategy", "revision"), [("http-only", "2026-07-28"), ("http-only", "2025-11-25"), ("sse-only", "2025-11-25")]
)
async def test_calls_and_server_requests_pass_mcp_remote(strategy: str, revision: str, tmp_path: Path) -> None:
    options = {"revision": revision, "elicitation": fill_in, "sampling": sample, "roots": ["/srv/a"]}
    async with through_mcp_remote(tmp_path, strategy, **options) as (client, _):
        assert client.revision == revision
        assert await client.call_tool("interop_echo", {"text": "東京\u2028\x01"}, returns=str) == "東京\u2028\x01"
        text = await client.call_tool("test_elicitation", {"message": "Which?"}, returns=str)
        assert text == 'action=accept content={"response": "blue"}'
        assert await client.call_tool("test_sampling", {"prompt": "?"}, returns=str) == "LLM response: a joke"
        assert await client.call_tool("interop_roots", returns=str) == "file:///srv/a"
        if revision == "2025-11-25":
            await cancelled_call(client)
            while await client.call_tool("interop_cancelled", returns=str) != '["left"]':
                pass
        assert client.deviations == ()


async def test_a_cancelled_modern_call_goes_on_behind_mcp_remote(tmp_path: Path) -> None:
    # The proxy leaves the stream of the call open and posts notifications/cancelled.  This revision does not have that
    # notification over HTTP, because ids of different clients may be equal.
    async with through_mcp_remote(tmp_path, "http-only", revision="2026-07-28") as (client, received):
        await cancelled_call(client)
        await received.shows("mcp-method", "notifications/cancelled")
        assert await client.call_tool("interop_cancelled", returns=str) == "[]"


async def test_mcp_remote_connects_a_legacy_client_to_a_modern_server(tmp_path: Path) -> None:
    logs: list[Any] = []
    options = {"elicitation": fill_in, "sampling": sample, "roots": ["/srv/a"], "log_level": "notice"}
    async with through_mcp_remote(
        tmp_path, "http-only", "--protocol", "auto", revision="2025-11-25", on_log=logs.append, **options
    ) as (client, received):
        assert client.instructions == "interop fixture"
        text = await client.call_tool("test_elicitation", {"message": "Which?"}, returns=str)
        assert text == 'action=accept content={"response": "blue"}'
        assert await client.call_tool("test_sampling", {"prompt": "?"}, returns=str) == "LLM response: a joke"
        assert await client.call_tool("interop_roots", returns=str) == "file:///srv/a"
        assert await client.call_tool("interop_log", returns=str) == "logged"
        assert [each.level for each in logs] == ["notice", "warning", "error"]
        async with client.listen(resources=[WATCHED]) as changes, trio.open_nursery() as nursery:
            nursery.start_soon(touch_repeatedly, client)  # the proxy acknowledges the subscription before it listens
            assert await anext(changes) == resource_updated(WATCHED)
            nursery.cancel_scope.cancel()
        assert received.headers("mcp-protocol-version") == {"2026-07-28"}
        assert received.headers("mcp-session-id") == set()
