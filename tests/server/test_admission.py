"""How many requests run at once, who waits, who is refused, and whose turn it is."""

from __future__ import annotations

import gc
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.server.checkpoints import pipe_pair
from tests.server.wire import LATEST, Wire, connected, everywhere, modern
from trio_mcp import Context, Limits, Server, serve_stream
from trio_mcp.server import Admission, RequestQueue

# By itself, against a model.


class Model(RuleBasedStateMachine):
    """Three connections that come and go as they like.  What is known of each: what waits, in order, and what runs."""

    HOLDERS: tuple[str | None, ...] = (None, None, None)
    CALLS, IN_ALL, WAITING, WAITING_IN_ALL = 3, 4, 4, 8
    who = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        limits = Limits(
            calls=self.CALLS,
            calls_in_all=self.IN_ALL,
            waiting=self.WAITING,
            waiting_in_all=self.WAITING_IN_ALL,
        )
        self.admission = Admission(limits)
        self.shares: list[RequestQueue[int]] = [
            RequestQueue(self.admission, lambda work, who=who: self.start(who, work), self.HOLDERS[who])
            for who in range(3)
        ]
        self.waiting: list[list[int]] = [[], [], []]
        self.running: list[list[int]] = [[], [], []]
        self.entering: int | None = None
        self.work = itertools.count()
        # Since when somebody could have been given a turn: who had one in the meantime.
        self.passed: list[set[int] | None] = [None, None, None]

    def start(self, who: int, work: int) -> None:
        if work == self.entering:  # at once: nobody may have been waiting for this place
            assert not any(self.could(each) and self.may_run(each) for each in range(3) if each != who)
            assert not self.waiting[who]
        else:
            assert self.waiting[who].pop(0) == work, "in the order in which they came"
            for each in range(3):
                served = self.passed[each]
                if each != who and served is not None and self.HOLDERS == (None, None, None):
                    assert who not in served, "twice, while another waited"
                    served.add(who)
            self.passed[who] = None
        self.running[who].append(work)

    def could(self, who: int) -> bool:
        """Whether only the bound on all keeps this one from having a turn."""
        return bool(self.waiting[who]) and len(self.running[who]) < self.CALLS

    def may_run(self, who: int) -> bool:
        """Whether there is a place, and the holder has not its share of them."""
        free = self.IN_ALL - sum(map(len, self.running)) - 1
        holder = self.HOLDERS[who]
        has = sum(len(self.running[each]) for each in range(3) if self.HOLDERS[each] == holder)
        return free >= 0 and (holder is None or not has or has + 1 <= 3 * free)

    def may_wait(self, who: int) -> bool:
        free = self.WAITING_IN_ALL - sum(map(len, self.waiting)) - 1
        holder = self.HOLDERS[who]
        has = sum(len(self.waiting[each]) for each in range(3) if self.HOLDERS[each] == holder)
        return free >= 0 and (holder is None or not has or has + 1 <= 3 * free)

    def note(self) -> None:
        for who in range(3):
            if not self.could(who):
                self.passed[who] = None
            elif self.passed[who] is None:
                self.passed[who] = set()

    @rule(who=who)
    def enter(self, who: int) -> None:
        self.entering = work = next(self.work)
        full = len(self.running[who]) >= self.CALLS or not self.may_run(who)
        may_wait = self.may_wait(who)
        why = self.shares[who].enter(work, work)
        self.entering = None
        if not full:
            assert why is None
            assert work in self.running[who]
        elif len(self.waiting[who]) == self.WAITING:
            assert why is not None
            assert "Limits.waiting)" in why
            assert str(self.WAITING) in why
        elif not may_wait:
            assert why is not None
            assert "Limits.waiting_in_all" in why
        else:
            assert why is None
            self.waiting[who].append(work)
        self.note()

    @rule(who=who, at=st.integers(0, 3))
    def leave(self, who: int, at: int) -> None:
        if self.running[who]:
            del self.running[who][at % len(self.running[who])]
            # It has room from this moment on, so its turn is counted from here.
            if self.could(who) and self.passed[who] is None:
                self.passed[who] = set()
            self.shares[who].leave()
            self.note()

    @rule(who=who, at=st.integers(0, 3))
    def withdraw(self, who: int, at: int) -> None:
        if self.waiting[who]:
            work = self.waiting[who].pop(at % len(self.waiting[who]))
            assert self.shares[who].withdraw(work) == work
        assert self.shares[who].withdraw("unknown") is None
        if self.running[who]:
            assert self.shares[who].withdraw(self.running[who][0]) is None  # too late
        self.note()

    @rule(who=who)
    def clear(self, who: int) -> None:
        assert self.shares[who].clear() == self.waiting[who]
        self.waiting[who].clear()
        self.note()

    @invariant()
    def counts_are_right(self) -> None:
        assert [share.running for share in self.shares] == [len(running) for running in self.running]
        assert self.admission.running.held == sum(map(len, self.running))
        assert self.admission.waiting.held == sum(map(len, self.waiting))

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        assert all(len(running) <= self.CALLS for running in self.running)
        assert self.admission.running.held <= self.IN_ALL
        assert not any(self.could(who) and self.may_run(who) for who in range(3))
        hungry = {share for _, queue in self.admission.hungry._queues.values() for share in queue}
        assert hungry == {self.shares[who] for who in range(3) if self.could(who)}


class ModelWithHolders(Model):
    """Two of the connections belong to one client, so each client has a share."""

    HOLDERS = ("a", "a", "b")


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=200, stateful_step_count=50)
TestModelWithHolders = ModelWithHolders.TestCase
TestModelWithHolders.settings = settings(max_examples=200, stateful_step_count=50)


def test_turns_go_round_among_thousands() -> None:
    limits = Limits(calls=1, calls_in_all=1, waiting=20_000, waiting_in_all=10**6)
    admission = Admission(limits)
    started: list[int] = []
    shares = [RequestQueue(admission, started.append) for _ in range(2000)]
    for work in range(20_000):
        assert shares[0].enter(work, work) is None
    for work, share in enumerate(shares[1:], 20_000):
        assert share.enter(work, work) is None
    for number in range(4000):
        last = started[-1]
        shares[0 if last < 20_000 else last - 20_000 + 1].leave()
        assert len(started) == number + 2
    assert started[:2002] == [0, *range(20_000, 21_999), 1, 2]


# On the wire.


class Gates:
    """A server with handlers that wait until they are let through, each by its name."""

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
    def counts(self) -> tuple[int, int]:
        now = self.server.statistics()
        return now.running, now.waiting


async def ask_for(wire: Wire, *names: str) -> list[Any]:
    ids = [await wire.start("tools/call", {"name": "gate", "arguments": {"name": name}}) for name in names]
    await wait_all_tasks_blocked()
    return ids


def refusal(message: dict[str, Any]) -> str:
    assert message["error"]["code"] == -32603
    text: str = message["error"]["message"]
    return text


@pytest.mark.contract
@everywhere
async def test_so_many_run_so_many_wait_and_the_others_are_refused_at_once(
    revision: str, autojump_clock: MockClock
) -> None:
    gates = Gates(calls=2, waiting=3)
    async with connected(gates.server, revision) as wire:
        ids = await ask_for(wire, *"abcdefg")
        assert (gates.began, gates.counts) == (["a", "b"], (2, 3))
        for id in ids[5:]:
            assert "3 requests wait already (Limits.waiting)" in refusal(await wire.response(id))
        await gates.open("b")
        assert gates.began == ["a", "b", "c"]
        await gates.open(*"acde")
        assert gates.began == list("abcde")
        assert [(await wire.response(id))["result"]["content"][0]["text"] for id in ids[:5]] == list("abcde")
        assert gates.counts == (0, 0)


@everywhere
async def test_all_connections_of_a_server_together_have_a_bound(revision: str, autojump_clock: MockClock) -> None:
    gates = Gates(calls=2, calls_in_all=3, waiting=3, waiting_in_all=4)
    async with many(gates.server, revision, 3) as (one, two, three):
        await ask_for(one, *"ab")
        await ask_for(two, *"cd")
        assert (gates.began, gates.counts) == (list("abc"), (3, 1))
        await ask_for(one, *"eee")
        [refused] = await ask_for(three, "f")
        assert "4 requests wait already (Limits.waiting_in_all)" in refusal(await three.response(refused))
        [refused] = await ask_for(one, "e")
        assert "(Limits.waiting)" in refusal(await one.response(refused))
        assert gates.counts == (3, 4)
        await gates.open(*"abcde")
        assert gates.counts == (0, 0)


@asynccontextmanager
async def many(server: Server, revision: str, number: int) -> AsyncIterator[list[Wire]]:
    async with server.running(), AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connected(server, revision)) for _ in range(number)]


@everywhere
async def test_a_flood_on_one_connection_does_not_keep_another_waiting(
    revision: str, autojump_clock: MockClock
) -> None:
    gates = Gates(calls=10, calls_in_all=4)
    async with many(gates.server, revision, 3) as (flood, quiet, other):
        await ask_for(flood, *(f"flood {number}" for number in range(100)))
        await ask_for(quiet, "quiet 1", "quiet 2")
        await ask_for(other, "other 1")
        assert gates.began == [f"flood {number}" for number in range(4)]
        for number in range(4):
            await gates.open(f"flood {number}")
        # One for each, in turn.
        assert gates.began[4:] == ["flood 4", "quiet 1", "other 1", "flood 5"]
        await gates.open("flood 4")
        assert gates.began[8:] == ["quiet 2"]
        await gates.open(*(f"flood {number}" for number in range(100)), "quiet 1", "quiet 2", "other 1")
        assert gates.counts == (0, 0)
        assert Counter(gates.began) == Counter(gates.ended)


@everywhere
async def test_what_waits_and_is_cancelled_frees_its_place_and_never_starts(
    revision: str, autojump_clock: MockClock
) -> None:
    gates = Gates(calls=1, waiting=2)
    async with connected(gates.server, revision) as wire:
        first, second, third = await ask_for(wire, *"abc")
        await wire.cancel(second)
        [fourth] = await ask_for(wire, "d")
        assert (gates.counts, wire.answered(fourth)) == ((1, 2), False)
        await gates.open(*"abcd")
        assert gates.began == list("acd")
        assert [wire.answered(id) for id in (first, second, third, fourth)] == [True, False, True, True]
        # Its id is free again.
        wire.post(wire.request("tools/call", {"name": "gate", "arguments": {"name": "a"}}, id=second))
        assert (await wire.response(second))["result"]["content"][0]["text"] == "a"


@pytest.mark.contract
@everywhere
async def test_what_waits_when_its_client_goes_never_starts(revision: str, autojump_clock: MockClock) -> None:
    gates = Gates(calls=10, calls_in_all=1)
    async with gates.server.running(), connected(gates.server, revision) as stays:
        async with connected(gates.server, revision) as wire:
            await ask_for(wire, *"abc")
            await ask_for(stays, "d")
            assert gates.counts == (1, 3)
        assert (gates.began, gates.ended, gates.counts) == (["a", "d"], ["a"], (1, 0))


@pytest.mark.contract
@modern
async def test_who_listens_takes_no_place(revision: str, autojump_clock: MockClock) -> None:
    gates = Gates(calls=1, waiting=1)
    async with connected(gates.server, revision) as wire:
        listening = [await wire.subscribe(tools=True) for _ in range(5)]
        assert (gates.counts, gates.server.statistics().listeners) == ((0, 0), 5)
        await ask_for(wire, "a")
        assert gates.began == ["a"]
        await listening[0].end()
        await gates.open("a")
        assert (gates.counts, gates.server.statistics().listeners) == ((0, 0), 4)


@modern
async def test_who_waits_for_a_retry_takes_no_place_and_the_retry_gives_it_one(
    revision: str, autojump_clock: MockClock
) -> None:
    gates = Gates(calls=1, waiting=1)
    async with connected(gates.server, revision) as wire:
        asked = [await wire.call("tools/call", {"name": "ask"}, rounds=False) for _ in range(3)]
        assert (gates.counts, gates.server.statistics().parked) == ((0, 0), 3)
        await ask_for(wire, "a")
        assert gates.counts == (1, 0)
        given = {"inputResponses": {"form": {"action": "decline"}}}
        retries = [
            await wire.start("tools/call", {"name": "ask", **given, "requestState": each["requestState"]})
            for each in asked[:2]
        ]
        await wait_all_tasks_blocked()
        assert gates.counts == (1, 1)  # one retry waits its turn like every request
        assert "Limits.waiting" in refusal(await wire.response(retries[1]))
        await gates.open("a")
        assert (await wire.response(retries[0]))["result"]["content"][0]["text"] == "asked"
        assert (gates.counts, gates.server.statistics().parked) == ((0, 0), 2)


@everywhere
async def test_a_call_whose_answer_waits_for_the_wire_keeps_its_place(revision: str, autojump_clock: MockClock) -> None:
    """Or a client that does not read would be served without end."""
    gates = Gates(calls=3, waiting=2, outgoing=2)
    async with connected(gates.server, revision, streams=lambda: pipe_pair(1)) as wire:
        with wire.deaf():
            await gates.open("a")
            await ask_for(wire, *"aaaaaaaaaaaa")
            ran = len(gates.ended)
            assert ran < 10
            await ask_for(wire, *"aaaaaaaaaaaa")
            assert len(gates.ended) == ran
            assert gates.counts == (3, 2)


@pytest.mark.full
@pytest.mark.parametrize("revision", ["2025-11-25", LATEST])
async def test_a_hundred_thousand_requests_at_once_hold_no_more_than_is_allowed(
    revision: str, autojump_clock: MockClock
) -> None:
    gates = Gates(calls=20, waiting=30, outgoing=50)
    ours, theirs = pipe_pair(100_000)
    wire = Wire(ours, revision)
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
            assert gates.counts == (20, 30)
            if start % 33_000 == 0:
                gc.collect()
                before = before or len(gc.get_objects())
                assert len(gc.get_objects()) < before + 200
        assert refused == 100_000 - 50
        await ours.send_eof()
    assert Counter(gates.ended) == {"a": 20}
