"""Messages on a stream beyond the limit of the receiver: the call fails, and the link goes on."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.memory_links import Link, open_link, open_scripted_link
from tests.http.scripted_server import A, B, C, D, E
from tests.server.checkpoints import wait_or_fail
from trio_mcp import Server, open_client
from trio_mcp.core import Limits, McpError, RemoteProtocolError, RequestError
from trio_mcp.transport import open_nursery

SMALL_LIMIT = Limits(message_bytes=6000)
LONG = {"x": ["y" * 10_000]}
WHY = r"the answer is longer than 6000 bytes \(Limits.message_bytes\)"
ALL = pytest.mark.parametrize("revision", [A, B, C, D, E])

# The positions of the id in messages of different implementations.
ORDERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "first": lambda id: {"jsonrpc": "2.0", "id": id, "result": LONG},
    "last": lambda id: {"result": LONG, "jsonrpc": "2.0", "id": id},
    "before the version": lambda id: {"result": LONG, "id": id, "jsonrpc": "2.0"},
    "first, of an error": lambda id: {"id": id, "error": {"code": 1, "message": "no", "data": LONG}, "jsonrpc": "2.0"},
}


class Calls:
    """Concurrent calls of tools, by name, and their outcomes."""

    def __init__(self, link: Link, nursery: trio.Nursery) -> None:
        self._link = link
        self._nursery = nursery
        self._ended: dict[str, trio.Event] = {}
        self._outcomes: dict[str, Any] = {}

    def start(self, name: str) -> None:
        self._ended[name] = trio.Event()

        async def call() -> None:
            try:
                self._outcomes[name] = await self._link.caller.request("tools/call", {"name": name})
            except McpError as error:
                self._outcomes[name] = error
            self._ended[name].set()

        self._nursery.start_soon(call)

    async def outcome(self, name: str) -> Any:
        await wait_or_fail(self._ended[name].wait, name)
        return self._outcomes[name]


def wire(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


@ALL
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
async def test_an_answer_beyond_the_limit_fails_its_call_alone(
    revision: str, order: Callable[[Any], dict[str, Any]], autojump_clock: MockClock
) -> None:
    async with (
        open_scripted_link(revision, {"tools": {}}, limits=SMALL_LIMIT) as (link, peer),
        open_nursery() as nursery,
    ):
        calls = Calls(link, nursery)
        asked = {}
        for name in ("before", "this", "after"):
            calls.start(name)
            asked[name] = await peer.take("tools/call")
        await peer.stream.send_all(wire(order(asked["this"]["id"])))
        failed = await calls.outcome("this")
        assert isinstance(failed, RemoteProtocolError)
        assert failed.args[0].endswith(WHY.replace("\\", ""))
        for name in ("before", "after"):
            await peer.answer(asked[name], {"content": []})
            assert (await calls.outcome(name))["content"] == []
        assert link.recorder.mistakes == []


@ALL
async def test_an_answer_without_an_id_is_for_the_only_call_that_waits(
    revision: str, autojump_clock: MockClock
) -> None:
    too_long = wire({"result": LONG, "jsonrpc": "2.0"})
    refused = wire({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "too much"}})
    async with (
        open_scripted_link(revision, {"tools": {}}, limits=SMALL_LIMIT) as (link, peer),
        open_nursery() as nursery,
    ):
        calls = Calls(link, nursery)
        calls.start("one")
        one = await peer.take("tools/call")
        calls.start("two")
        two = await peer.take("tools/call")
        await peer.stream.send_all(too_long + refused)
        for name, asked in (("one", one), ("two", two)):
            await peer.answer(asked)
            assert not isinstance(await calls.outcome(name), McpError)
        assert len(link.recorder.mistakes) == 2
        for said, kind in ((too_long, RemoteProtocolError), (refused, RequestError)):
            calls.start("three")
            await peer.take("tools/call")
            await peer.stream.send_all(said)
            assert type(await calls.outcome("three")) is kind
        assert len(link.recorder.mistakes) == 2


@pytest.mark.parametrize("revision", [A, B, C, D])
async def test_an_error_about_the_end_of_the_handshake_fails_no_call(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted_link(revision, {"tools": {}}) as (link, peer), open_nursery() as nursery:
        calls = Calls(link, nursery)
        calls.start("first")
        asked = await peer.take("tools/call")
        for said in (
            {"error": {"code": -32601, "message": "notifications/initialized: unknown"}},
            {"result": {}},
        ):
            await peer.send({"id": None, **said})
        await peer.answer(asked, {"content": []})
        assert (await calls.outcome("first"))["content"] == []
        assert len(link.recorder.mistakes) == 2


@ALL
async def test_a_request_beyond_the_limit_of_a_server_is_refused_with_its_id(
    revision: str, autojump_clock: MockClock
) -> None:
    server = Server("s", version="1", limits=SMALL_LIMIT)
    gate = trio.Event()

    @server.tool
    async def wait() -> int:
        await gate.wait()
        return 3

    async with open_link(server, revision) as link, open_nursery() as nursery:
        calls = Calls(link, nursery)
        calls.start("wait")
        with pytest.raises(RequestError, match="longer than 6000 bytes") as refused:
            await call_or_fail(lambda: link.caller.request("tools/call", {"name": "wait", "arguments": LONG}))
        assert refused.value.code == -32600
        gate.set()
        assert (await calls.outcome("wait"))["content"][0]["text"] == "3"


async def call_or_fail(call: Callable[[], Awaitable[Any]]) -> Any:
    with trio.fail_after(60):
        return await call()


@pytest.mark.parametrize("revision", [A, B, C, D])
async def test_a_question_beyond_the_limit_of_a_client_is_refused_with_its_id(
    revision: str, autojump_clock: MockClock
) -> None:
    async with open_scripted_link(revision, {}, limits=SMALL_LIMIT) as (_, peer):
        await peer.send({"id": "q-1", "method": "roots/list", "params": LONG})
        await peer.send({"method": "roots/list", "params": LONG, "id": "q-2"})
        for id in ("q-1", "q-2"):
            refused = await next_message(peer)
            assert refused["id"] == id
            assert "longer than 6000 bytes" in refused["error"]["message"]


async def next_message(peer: Any) -> Any:
    await wait_all_tasks_blocked()
    return peer.messages.pop(0)


@pytest.mark.parametrize("revision", [A, E])
async def test_a_call_to_a_server_in_the_same_process_fails_at_the_limit(
    revision: str, autojump_clock: MockClock
) -> None:
    server = Server("s", version="1")

    @server.tool
    async def big(size: int) -> str:
        return "y" * size

    async with open_client(server, revision=revision, limits=SMALL_LIMIT) as client:
        with pytest.raises(RemoteProtocolError, match=WHY):
            await call_or_fail(lambda: client.call_tool("big", {"size": 10_000}))
        assert await client.call_tool("big", {"size": 3}, returns=str) == "yyy"


@pytest.mark.parametrize("revision", [A, E])
async def test_a_stray_print_of_a_server_is_reported_and_not_sent_back(
    revision: str, autojump_clock: MockClock
) -> None:
    async with open_scripted_link(revision, {}) as (link, peer):
        await peer.stream.send_all(b"Starting up...\r\n")
        await wait_all_tasks_blocked()
        [mistake] = link.recorder.mistakes
        assert "it begins with 'Starting up...'" in mistake
        assert len(peer.messages) == (revision != E)  # only in revisions in which a client may answer
        assert "Starting" not in json.dumps(peer.messages)
