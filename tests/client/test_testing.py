"""The tools of `trio_mcp.testing`: pairs and transcripts."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import json
import textwrap
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.server.checkpoints import Attempt, any_task, cancel_at_each_step
from trio_mcp import Context, Server, testing
from trio_mcp.core import REVISIONS
from trio_mcp.errors import SessionClosed
from trio_mcp.testing import (
    Line,
    Transcript,
    TranscriptMismatch,
    assert_transcript,
    open_memory_pair,
    seeded,
)

in_all = pytest.mark.parametrize("revision", list(REVISIONS))


def adder() -> Server:
    server = Server("adder")

    @server.tool
    async def add(a: int, b: int) -> dict[str, int]:
        return {"result": a + b}

    @server.tool
    async def wait(seconds: float, *, ctx: Context) -> str:
        await ctx.progress(1)
        await trio.sleep(seconds)
        return "waited"

    return server


async def test_the_example_of_the_module_runs(autojump_clock: MockClock) -> None:
    _, _, text = (testing.__doc__ or "").partition("\n\n")
    lines = itertools.takewhile(lambda line: line.startswith("    ") or not line, text.split("\n"))
    names: dict[str, Any] = {}
    exec(textwrap.dedent("\n".join(lines)), names)
    await names["test_that_it_adds"](autojump_clock)


@in_all
async def test_a_pair_uses_the_given_revision(revision: str, autojump_clock: MockClock) -> None:
    async with open_memory_pair(adder(), revision=revision) as pair:
        assert pair.client.revision == revision
        assert (await pair.client.call_tool("wait", {"seconds": 86_400})).content[0].text == "waited"  # type: ignore[union-attr]
    assert trio.current_time() >= 86_400


@in_all
async def test_two_runs_have_the_same_transcript(revision: str) -> None:
    said = []
    for _ in range(2):
        async with open_memory_pair(adder(), revision=revision) as pair:
            for _ in await pair.client.list_tools():
                pass
            await pair.client.call_tool("add", {"a": 1, "b": 2})
        said.append(str(pair.transcript))
    assert said[0] == said[1]
    assert said[0].count("\n") >= 6


async def test_a_dropped_link_ends_calls_and_handlers(autojump_clock: MockClock) -> None:
    async with open_memory_pair(adder()) as pair, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def call() -> None:
            with pytest.raises(SessionClosed):
                await pair.client.call_tool("wait", {"seconds": 3600})

        await wait_all_tasks_blocked()
        assert pair.server.statistics().running == 1
        await pair.drop()
    assert trio.current_time() < 3600


async def test_an_exception_of_the_block_is_raised_unchanged() -> None:
    mine = KeyError("mine")
    with pytest.raises(KeyError) as raised:
        async with open_memory_pair(adder()):
            raise mine
    assert raised.value is mine


@pytest.mark.parametrize("late", [False, True])
async def test_an_exception_of_the_server_is_raised_in_the_test(late: bool, autojump_clock: MockClock) -> None:
    mine = KeyError("mine")

    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        if not late:
            raise mine
        yield
        raise mine

    server = Server("failing", lifespan=lifespan)
    with pytest.raises(KeyError) as raised:  # noqa: PT012  # the block raises when it ends
        async with open_memory_pair(server) as pair:
            await pair.drop()
            await pair.client.request("tools/list")  # raises, too
    assert raised.value is mine


async def test_the_server_shuts_down_regularly(autojump_clock: MockClock) -> None:
    ended: list[float] = []

    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        yield
        await trio.sleep(0.5)
        ended.append(trio.current_time())

    async with open_memory_pair(Server("slow", lifespan=lifespan)):
        pass
    assert ended == [trio.current_time()]


async def test_the_tap_of_the_user_gets_all_messages() -> None:
    received: list[tuple[str, bytes]] = []
    async with open_memory_pair(adder(), tap=lambda *said: received.append(said)) as pair:
        await pair.client.call_tool("add", {"a": 1, "b": 2})
    sent = b"".join(data for direction, data in received if direction == "out").decode().splitlines()
    assert sent == [line.text for line in pair.transcript if line.mark == ">"]


def test_a_pair_can_be_cancelled_at_any_step() -> None:
    async def scenario(attempt: Attempt) -> None:
        with attempt.window():
            async with open_memory_pair(adder()) as pair:
                await pair.client.call_tool("add", {"a": 1, "b": 2})

    assert cancel_at_each_step(scenario, watch=any_task) > 20


# Transcripts.


def test_a_transcript_is_read_as_it_was_written(tmp_path: Path) -> None:
    transcript = Transcript()
    transcript.tap("out", b'{"id":1,"x":"')
    transcript.tap("in", b"junk \xff\n{")
    transcript.tap("out", '\u2028é"}\n'.encode())
    transcript.tap("in", b"}\n")
    transcript.write(tmp_path / "talk.txt")
    again = Transcript.read(tmp_path / "talk.txt")
    assert list(again) == list(transcript)
    assert [(line.mark, line.message) for line in again] == [
        ("<", "junk \udcff"), (">", {"id": 1, "x": "\u2028é"}), ("<", {}),
    ]  # fmt: skip


def test_remarks_are_not_messages_and_invalid_lines_are_refused() -> None:
    assert list(Transcript.parse("# a remark\n\n  > 1\n")) == [Line(">", "1")]
    with pytest.raises(ValueError, match=r"line 2 .* got 'what'"):
        Transcript.parse("> 1\nwhat")


SAID = '> {"a": 1}\n< {"b": [1, {"c": true}]}\n> {"d": 2}\n'


def test_messages_are_compared_as_json() -> None:
    assert_transcript(Transcript.parse(SAID), SAID)
    assert_transcript(Transcript.parse(SAID)[1:], SAID.partition("\n")[2])
    assert_transcript(Transcript.parse('> {"a":1,"b":2}'), '> {"b": 2, "a": 1}')
    assert_transcript(Transcript(), "")


@pytest.mark.parametrize(
    ("expected", "number", "shows"),
    [
        ("", 1, '+  "a": 1'),
        ('> {"a": 2}', 1, '-  "a": 2'),
        ('> {"a": true}', 1, '-  "a": true'),
        ('> {"a": 1, "e": 1}', 1, '-  "e": 1'),
        ("> {}", 1, '+  "a": 1'),
        ('< {"a": 1}', 1, "-the server sends"),
        ('> {"a": 1}\n< {"b": [1, {"c": 1}]}', 2, '-      "c": 1'),
        ('> {"a": 1}\n< {"b": [1]}', 2, '+      "c": true'),
        (SAID + "> 1", 4, "-1"),
        (SAID + "> 1", 4, "+(no more messages)"),
        ('> {"a": 1}', 2, "-(no more messages)"),
    ],
)
def test_a_mismatch_shows_the_difference(expected: str, number: int, shows: str) -> None:
    with pytest.raises(TranscriptMismatch) as raised:
        assert_transcript(Transcript.parse(SAID), expected)
    assert str(raised.value).startswith(f"message {number} ")
    assert shows in str(raised.value).split("\n")


def test_a_transcript_holds_json_of_one_line_each() -> None:
    assert json.loads(Line(">", '{"a": 1}').text) == Line(">", '{"a": 1}').message


def order_of_work(seed: int) -> list[str]:
    """The order in which concurrent calls ran.  Two of them are plain functions."""
    server, ran = Server("work"), list[str]()

    @server.tool
    async def wait(name: str) -> None:
        for _ in range(3):
            ran.append(name)
            await trio.lowlevel.checkpoint()

    @server.tool
    def block(name: str) -> None:
        ran.append(f"{name} in {threading.current_thread().name}")

    async def scenario() -> None:
        async with open_memory_pair(server) as pair, trio.open_nursery() as nursery:
            for name in "abcd":
                tool = "wait" if name < "c" else "block"
                nursery.start_soon(pair.client.call_tool, tool, {"name": name})

    with seeded(seed):
        trio.run(scenario, clock=MockClock(autojump_threshold=0))
    return ran


def test_a_seed_determines_the_order_of_concurrent_work() -> None:
    orders = {tuple(order_of_work(seed)) for seed in range(20)}
    assert len(orders) > 10
    assert orders == {tuple(order_of_work(seed)) for seed in range(20)}
    assert all(f"c in {threading.main_thread().name}" in order for order in orders)


async def test_a_seed_works_within_a_run_and_restores_the_state() -> None:
    inside: Any = trio._core._run
    before = inside._ALLOW_DETERMINISTIC_SCHEDULING, inside._r.getstate()
    orders = []
    for _ in range(2):
        ran: list[int] = []

        async def work(number: int, ran: list[int] = ran) -> None:
            for _ in range(3):
                ran.append(number)
                await trio.lowlevel.checkpoint()

        with seeded(7):
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(work, number)
        orders.append(ran)
    assert orders[0] == orders[1]
    assert (inside._ALLOW_DETERMINISTIC_SCHEDULING, inside._r.getstate()) == before


async def test_a_plain_function_has_its_own_context_variables_also_inline() -> None:
    server, variable = Server("work"), contextvars.ContextVar("variable", default="unset")

    @server.tool
    def put(value: str) -> str:
        before = variable.get()
        variable.set(value)
        return before

    with seeded(1):
        async with open_memory_pair(server) as pair:
            said = [await pair.client.call_tool("put", {"value": value}, returns=str) for value in "ab"]
    assert said == ["unset", "unset"]


def test_a_trio_version_without_a_seed_is_an_error() -> None:
    with (
        mock.patch.object(testing, "_missing", ["_r"]),
        pytest.raises(RuntimeError, match=r"seeded\(\) needs _r of trio._core._run, which Trio .* does not have"),
        seeded(1),
    ):
        pass
