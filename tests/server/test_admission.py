"""The limits on the number of requests that run at a time, in a connection and in all."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.server.checkpoints import pipe_pair
from tests.server.raw_client import LATEST, RawClient, connected, every_revision, modern
from trio_mcp import Context, Limits, Server, serve_stream

OVERLOADED = "the server is overloaded: it runs as many requests as it may"


class Gates:
    """A server with handlers that wait at gates.  Each gate has a name, and `open` opens it."""

    def __init__(self, **limits: int) -> None:
        self.server = Server("gates", limits=Limits(**limits))
        self.gates: dict[str, trio.Event] = {}
        self.began: list[str] = []
        self.ended: list[str] = []

        @self.server.tool
        async def gate(name: str) -> str:
            self.began.append(name)
            try:
                await self.gates.setdefault(name, trio.Event()).wait()
            finally:
                self.ended.append(name)
            return name

        @self.server.tool
        async def ask(ctx: Context) -> str:
            await ctx.elicit("Shall I go on?", {"type": "object", "properties": {"x": {"type": "string"}}})
            return "asked"

    async def open(self, *names: str) -> None:
        for name in names:
            self.gates.setdefault(name, trio.Event()).set()
        await wait_all_tasks_blocked()

    @property
    def running(self) -> int:
        return self.server.statistics().running


async def ask_for(wire: RawClient, *names: str) -> list[Any]:
    ids = [await wire.start("tools/call", {"name": "gate", "arguments": {"name": name}}) for name in names]
    await wait_all_tasks_blocked()
    return ids


def refusal(message: dict[str, Any]) -> str:
    assert message["error"]["code"] == -32603
    text: str = message["error"]["message"]
    return text


@pytest.mark.contract
@every_revision
async def test_calls_beyond_the_limit_are_refused_at_once(revision: str, autojump_clock: MockClock) -> None:
    gates = Gates(calls=2)
    async with connected(gates.server, revision) as wire:
        ids = await ask_for(wire, *"abcd")
        assert (gates.began, gates.running) == (["a", "b"], 2)
        for id in ids[2:]:
            assert refusal(await wire.response(id)) == f"{OVERLOADED} (Limits.calls); try again later"
        await gates.open("b")
        ids[2:] = await ask_for(wire, "c")
        assert gates.began == ["a", "b", "c"]
        await gates.open("a", "c")
        assert [(await wire.response(id))["result"]["content"][0]["text"] for id in ids] == ["a", "b", "c"]
        assert gates.running == 0


@every_revision
async def test_all_connections_of_a_server_together_have_a_limit(revision: str, autojump_clock: MockClock) -> None:
    gates = Gates(calls=2, calls_in_all=3)
    async with several_clients(gates.server, revision, 3) as (one, two, three):
        await ask_for(one, *"ab")
        await ask_for(two, "c")
        assert (gates.began, gates.running) == (list("abc"), 3)
        [refused] = await ask_for(three, "d")
        assert f"{OVERLOADED} (Limits.calls_in_all)" in refusal(await three.response(refused))
        [refused] = await ask_for(one, "d")
        assert f"{OVERLOADED} (Limits.calls)" in refusal(await one.response(refused))
        await gates.open("a")
        await ask_for(three, "d")
        assert (gates.began, gates.running) == (list("abcd"), 3)
        await gates.open(*"bcd")
        assert gates.running == 0
        assert Counter(gates.began) == Counter(gates.ended)


@asynccontextmanager
async def several_clients(server: Server, revision: str, number: int) -> AsyncIterator[list[RawClient]]:
    async with server.running(), AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connected(server, revision)) for _ in range(number)]


@every_revision
async def test_a_cancelled_call_frees_its_place(revision: str, autojump_clock: MockClock) -> None:
    gates = Gates(calls=1)
    async with connected(gates.server, revision) as wire:
        [first] = await ask_for(wire, "a")
        await wire.cancel(first)
        await wait_all_tasks_blocked()
        [second] = await ask_for(wire, "b")
        assert (gates.running, wire.answered(first), wire.answered(second)) == (1, False, False)
        await gates.open("b")
        assert (gates.began, wire.answered(second)) == (["a", "b"], True)
        # The id of the cancelled call is free again.
        await gates.open("a")
        wire.post(wire.request("tools/call", {"name": "gate", "arguments": {"name": "a"}}, id=first))
        assert (await wire.response(first))["result"]["content"][0]["text"] == "a"


@pytest.mark.contract
@every_revision
async def test_a_client_that_disconnects_frees_its_places(revision: str, autojump_clock: MockClock) -> None:
    gates = Gates(calls=10, calls_in_all=3)
    async with gates.server.running(), connected(gates.server, revision) as stays:
        async with connected(gates.server, revision) as wire:
            await ask_for(wire, *"ab")
            assert gates.running == 2
        assert (gates.began, sorted(gates.ended), gates.running) == (["a", "b"], ["a", "b"], 0)
        await ask_for(stays, "c")
        assert gates.began == ["a", "b", "c"]
        await gates.open("c")


@pytest.mark.contract
@modern
async def test_a_subscription_takes_no_place(revision: str, autojump_clock: MockClock) -> None:
    gates = Gates(calls=1)
    async with connected(gates.server, revision) as wire:
        listening = [await wire.subscribe(tools=True) for _ in range(5)]
        assert (gates.running, gates.server.statistics().listeners) == (0, 5)
        await ask_for(wire, "a")
        assert gates.began == ["a"]
        await listening[0].end()
        await gates.open("a")
        assert (gates.running, gates.server.statistics().listeners) == (0, 4)


@modern
async def test_a_call_takes_no_place_until_its_retry(revision: str, autojump_clock: MockClock) -> None:
    gates = Gates(calls=1)
    async with connected(gates.server, revision) as wire:
        asked = [await wire.call("tools/call", {"name": "ask"}, rounds=False) for _ in range(3)]
        assert (gates.running, gates.server.statistics().parked) == (0, 3)
        await ask_for(wire, "a")
        assert gates.running == 1
        given = {"inputResponses": {"form": {"action": "decline"}}}
        retry = {"name": "ask", **given, "requestState": asked[0]["requestState"]}
        refused = await wire.start("tools/call", retry)
        assert "(Limits.calls)" in refusal(
            await wire.response(refused)
        )  # like every request; the client may retry once more
        await gates.open("a")
        again = await wire.start("tools/call", retry)
        assert (await wire.response(again))["result"]["content"][0]["text"] == "asked"
        assert (gates.running, gates.server.statistics().parked) == (0, 2)


@every_revision
async def test_a_call_keeps_its_place_while_its_answer_waits(revision: str, autojump_clock: MockClock) -> None:
    """Otherwise a server would run calls without end for a client that does not read."""
    gates = Gates(calls=3, outgoing=2)
    async with connected(gates.server, revision, streams=lambda: pipe_pair(1)) as wire:
        with wire.not_reading():
            await gates.open("a")
            await ask_for(wire, *"aaaaaaaaaaaa")
            ran = len(gates.ended)
            assert ran < 10
            await ask_for(wire, *"aaaaaaaaaaaa")
            assert len(gates.ended) == ran
            assert gates.running == 3


@pytest.mark.full
@pytest.mark.parametrize("revision", ["2025-11-25", LATEST])
async def test_a_hundred_thousand_requests_at_once_stay_within_the_limits(
    revision: str, autojump_clock: MockClock
) -> None:
    gates = Gates(calls=20, outgoing=50)
    ours, theirs = pipe_pair(100_000)
    wire = RawClient(ours, revision)
    opening = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    begin = [] if wire.modern else [wire.request("initialize", opening)]
    request = wire.request("tools/call", {"name": "gate", "arguments": {"name": "a"}}, id=0)
    request["id"] = "ID"
    line = json.dumps(request).encode() + b"\n"
    refused = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, gates.server, theirs)
        for message in begin:
            await ours.send_all(json.dumps(message).encode() + b"\n")
        await wait_all_tasks_blocked()
        before = None
        for start in range(0, 100_000, 1000):
            data = b"".join(line.replace(b'"ID"', b"%d" % number) for number in range(start + 100, start + 1100))
            nursery.start_soon(ours.send_all, data)
            heard = bytearray()
            while True:
                with trio.move_on_after(1) as scope:
                    heard += await ours.receive_some()
                if scope.cancelled_caught:
                    break
            refused += heard.count(b'"error"')
            heard.clear()
            ours._into.passed.clear()
            assert gates.running == 20
            if start % 33_000 == 0:
                gc.collect()
                before = before or len(gc.get_objects())
                assert len(gc.get_objects()) < before + 200
        assert refused == 100_000 - 20
        await ours.send_eof()
    assert Counter(gates.ended) == {"a": 20}
