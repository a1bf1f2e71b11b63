"""HTTP clients that send random requests: the server logs no error, and serves the next client.

The requests are random changes of valid ones, so that many of them get past the first checks.  A seed makes them the
same in each run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.http.client import HttpClient, request
from tests.http.scripted_server import SSE_PATHS, B, D, E
from tests.http.served import served
from tests.random_json import randomly_changed
from trio_mcp import Context, Limits, Server

JUNK: list[Any] = [
    None, True, -1, 1.5, 1e308, "", [], {}, "x" * 300, {"a": {"b": []}}, "\u2028", 2**70, {"_meta": {}},
    {"progressToken": 1},
]  # fmt: skip
NAMES = [
    "id", "method", "params", "result", "error", "jsonrpc", "cursor", "name", "uri", "arguments", "inputResponses",
    "requestState", "ref", "notifications", "_meta",
]  # fmt: skip
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("tools/call", {"name": "count", "arguments": {"to": 2}}), ("tools/call", {"name": "ask"}), ("tools/list", {}),
    ("initialize", {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}),
    ("server/discover", {}), ("ping", {}), ("subscriptions/listen", {"notifications": {"toolsListChanged": True}}),
    ("resources/read", {"uri": "r://1"}), ("resources/subscribe", {"uri": "r://1"}),
    ("logging/setLevel", {"level": "info"}),
    ("prompts/get", {"name": "p", "arguments": {"x": "1"}}), ("notifications/cancelled", {"requestId": 1}),
    ("completion/complete", {"ref": {"type": "ref/prompt", "name": "p"}, "argument": {"name": "x", "value": "1"}}),
]  # fmt: skip
FIELDS = [
    "Last-Event-ID: 1", "Last-Event-ID: x/1", "Expect: 100-continue", "Connection: close", "Origin: null",
    "Accept: text/*;q=0.1, application/json;q=0", "Content-Type: text/plain", "Mcp-Name: =?base64?!!?=",
    "Mcp-Session-Id: x", "MCP-Protocol-Version: 2099-01-01", "X: \xff", "Upgrade: websocket", "Host: other",
    "Content-Length: 3",
]  # fmt: skip


def busy_server() -> Server:
    server = Server("busy", limits=Limits(parked_seconds=60, session_idle_seconds=100))

    @server.tool
    async def count(to: int, ctx: Context) -> int:
        for number in range(min(to, 3)):
            await ctx.progress(number)
            await ctx.log("info", "x")
            await trio.sleep(1)
        return to

    @server.tool
    async def ask(ctx: Context) -> str:
        return repr(await ctx.elicit("How many?", {"type": "object", "properties": {"n": {"type": "integer"}}}))

    server.resource("r://{x}")(lambda x: x)

    @server.prompt
    def p(x: str) -> str:
        return x

    return server


class RandomClient:
    """A client that sends randomly changed requests."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def request(self, revision: str, session: str | None) -> bytes:
        chance = self.chance
        way = chance.choice(["POST"] * 12 + ["GET"] * 5 + ["DELETE", "OPTIONS", "HEAD", "PUT"])
        method, params = copy.deepcopy(chance.choice(REQUESTS))
        message: Any = request(method, params, chance.choice([1, 2, "a"]), revision=revision, progress=1)
        if method.startswith("notifications/"):
            del message["id"]
        while chance.random() < 0.4:
            message = randomly_changed(self.chance, message, JUNK, NAMES)
        body = json.dumps([message, message] if chance.random() < 0.05 else message).encode()
        fields = ["Host: 127.0.0.1:3000", "Content-Type: application/json", f"MCP-Protocol-Version: {revision}"]
        fields.append(
            chance.choice(["Accept: application/json, text/event-stream", "Accept: text/event-stream", "A: b"])
        )
        fields += [f"Mcp-Session-Id: {session}"] if session else [f"Mcp-Method: {method}"]
        if revision == E and (name := params.get("name", params.get("uri"))):
            fields.append(f"Mcp-Name: {name}")
        if chance.random() < 0.2:
            fields.append(chance.choice(FIELDS))
        elif way == "GET" and chance.random() < 0.5:
            fields.append(chance.choice(FIELDS[:2]))
        if chance.random() < 0.2:
            fields.append("Transfer-Encoding: chunked")
            pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
            body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"
        else:
            fields.append(f"Content-Length: {len(body)}")
        path = chance.choice(["/mcp"] * 12 + ["/sse", "/messages?session=x", "/ws", "/", "*"])
        whole = bytearray("\r\n".join((f"{way} {path} HTTP/1.1", *fields, "", "")).encode("latin-1") + body)
        if chance.random() < 0.1:
            whole[chance.randrange(len(whole))] = chance.randrange(256)
        return bytes(whole[: chance.randrange(len(whole))] if chance.random() < 0.05 else whole)

    async def visit(self, web: HttpClient, revision: str, session: str | None) -> None:
        stream = (await web.link()).stream
        data = b"".join(self.request(revision, session) for _ in range(self.chance.randrange(1, 4)))
        with contextlib.suppress(trio.BrokenResourceError), trio.move_on_after(self.chance.choice([0, 0.5, 5, 200])):
            await stream.send_all(data)
            while await stream.receive_some():
                pass
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 30))])
@pytest.mark.parametrize("revision", [B, D, E])
async def test_random_requests_are_no_errors_of_the_server(
    revision: str, seed: int, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.WARNING, "trio_mcp")
    random_client = RandomClient(seed)
    server = busy_server()
    async with served(server, check=False, **SSE_PATHS) as web:
        session = None if revision == E else await web.initialize(revision)
        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(random_client.visit, web, revision, session)
        answer = await web.call("tools/call", {"name": "count", "arguments": {"to": 1}})
        assert "error" not in answer.message
        await trio.sleep(1000)
        assert (server.statistics().running, server.statistics().parked) == (0, 0)
    assert [each.getMessage() for each in caplog.records] == []
