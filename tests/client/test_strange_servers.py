"""HTTP servers with random replies: each call returns a result or raises one `McpError`, and no task is left.

The replies are random changes of correct replies, so that many of them reach deep code.  They are the same in each run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.client.matrix import no_tasks_left, tcp_connects_to
from tests.http.scripted_server import B, D, E
from tests.http.served import MemoryListener
from tests.random_json import randomly_changed
from trio_mcp import McpError, connect_client
from trio_mcp.client import Client
from trio_mcp.types import PromptReference

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "x-mcp-header": "A"}}}
CORRECT: dict[str, dict[str, Any]] = {
    "server/discover": {"supportedVersions": [E], "capabilities": {"tools": {}, "resources": {}, "completions": {}}},
    "initialize": {"capabilities": {"tools": {}, "resources": {}, "completions": {}}},
    "tools/list": {"tools": [{"name": "t", "inputSchema": SCHEMA, "outputSchema": {"type": "object"}}]},
    "tools/call": {"content": [{"type": "text", "text": "x"}], "structuredContent": {"a": 1}},
    "resources/read": {"contents": [{"uri": "r://1", "text": "x"}]},
    "completion/complete": {"completion": {"values": ["x"]}},
}
QUESTION = {"method": "elicitation/create", "params": {"message": "m", "requestedSchema": {}}}
JUNK: list[Any] = [None, True, -1, 1.5, "", [], {}, "x" * 300, "\u2028", 2**70, "input_required", {"k": QUESTION}]
NAMES = ["id", "result", "error", "method", "params", "resultType", "inputRequests", "requestState", "nextCursor"]
BEFORE = [
    b":\n\n", b"id: 1\ndata:\n\n", b"retry: 5\n\n", b"event: message\ndata: {}\n\n", b"data: \xff\n\n",
    b'data: {"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,"progress":"x"}}\n\n',
    b'data: {"jsonrpc":"2.0","id":"e","method":"elicitation/create","params":{"message":"m"}}\n\n',
]  # fmt: skip
STATUS = [100, 204, 301, 307, 400, 401, 403, 404, 405, 409, 413, 429, 500, 503, 600]
FIELDS = [
    "Location: /mcp", "Location: //", "Retry-After: 0", "Retry-After: x", "Content-Encoding: gzip", "Content-Type: ;",
    "Mcp-Session-Id: \xff", "Mcp-Session-Id: s", "Transfer-Encoding: gzip", "Content-Length: 3",
]  # fmt: skip


class RandomServer:
    """A server that changes its correct replies at random."""

    def __init__(self, seed: int, revision: str) -> None:
        self.chance = random.Random(seed)
        self.revision = revision

    async def serve(self, stream: trio.abc.Stream) -> None:
        data = b""
        async with stream:
            try:
                while True:
                    while b"\r\n\r\n" not in data:
                        data = await self._more(stream, data)
                    head, _, data = data.partition(b"\r\n\r\n")
                    size = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"Content-Length:"), 0)
                    while len(data) < size:
                        data = await self._more(stream, data)
                    body, data = data[:size], data[size:]
                    await stream.send_all(self.reply(head, json.loads(body or b"{}")))
                    if self.chance.random() < 0.3:
                        return
            except (EOFError, trio.BrokenResourceError):
                return

    async def _more(self, stream: trio.abc.Stream, data: bytes) -> bytes:
        with trio.move_on_after(1):  # the client waits for the rest of a reply that was cut: close the connection
            if more := await stream.receive_some():
                return data + more
        raise EOFError

    def reply(self, head: bytes, request: dict[str, Any]) -> bytes:
        chance = self.chance
        status, fields, body = (405, [], b"") if head.startswith(b"GET") else (202, [], b"")
        if "id" in request and "method" in request:
            status, body = 200, json.dumps(self.answer(request)).encode()
            fields = ["Content-Type: application/json"]
            if chance.random() < 0.5:
                fields = ["Content-Type: text/event-stream"]
                body = (chance.choice(BEFORE) if chance.random() < 0.5 else b"") + b"data: " + body + b"\n\n"
        if chance.random() < 0.06:
            status = chance.choice(STATUS)
        if chance.random() < 0.1:
            fields.append(chance.choice(FIELDS))
        if chance.random() < 0.4:
            fields.append("Transfer-Encoding: chunked")
            body = b"".join(
                b"%x\r\n%b\r\n" % (len(body[at : at + 50]), body[at : at + 50]) for at in range(0, len(body), 50)
            )
            body += b"0\r\n\r\n"
        else:
            fields.append(f"Content-Length: {len(body) + (chance.random() < 0.1)}")
        whole = bytearray("\r\n".join((f"HTTP/1.1 {status} X", *fields, "", "")).encode("latin-1") + body)
        if chance.random() < 0.05:
            whole[chance.randrange(len(whole))] = chance.randrange(256)
        return bytes(whole[: chance.randrange(len(whole))] if chance.random() < 0.05 else whole)

    def answer(self, request: dict[str, Any]) -> Any:
        result = copy.deepcopy(CORRECT.get(request["method"], {}))
        if request["method"] == "initialize":
            result |= {"protocolVersion": self.revision, "serverInfo": {"name": "s", "version": "1"}}
        if self.revision == E:
            result |= {"resultType": "complete", "ttlMs": 5, "cacheScope": "public"}
        answer: Any = {"jsonrpc": "2.0", "id": request["id"], "result": result}
        while self.chance.random() < 0.25:
            answer = randomly_changed(self.chance, answer, JUNK, NAMES)
        return answer


async def attempt(client: Client, call: int) -> None:
    calls = [
        lambda: client.call_tool("t", {"a": "b"}),
        lambda: client.call_tool("t", {"a": "b"}, returns=dict),
        lambda: client.read_resource("r://1"),
        lambda: client.list_tools_page(),
        lambda: client.complete(PromptReference("p"), "a", "b"),
    ]
    with contextlib.suppress(McpError):
        await calls[call % len(calls)]()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 30))])
@pytest.mark.parametrize("revision", [B, D, E])
async def test_each_random_reply_leads_to_a_result_or_an_mcp_error(
    revision: str, seed: int, autojump_clock: MockClock
) -> None:
    server = RandomServer(seed, revision)
    opened = 0
    for visit in range(15):
        listener = MemoryListener()
        async with no_tasks_left(), trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, server.serve, [listener])
            with tcp_connects_to(listener.connect), trio.fail_after(3600):
                pinned: Any = {"revision": revision} if visit % 2 else {}
                try:
                    client = await connect_client(nursery, "http://127.0.0.1:3000/mcp", **pinned)
                except McpError:
                    nursery.cancel_scope.cancel()
                    continue
                opened += 1
                for together in range(1, 9):
                    async with trio.open_nursery() as calling:
                        for call in range(together):
                            calling.start_soon(attempt, client, call)
                await client.aclose()
            nursery.cancel_scope.cancel()
    assert opened
