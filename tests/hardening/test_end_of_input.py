"""The end of input closes half of a link: running calls are answered, and only a failed write ends the link."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from tests.server.raw_client import CAPABILITIES, LATEST, REVISION_NAMES, RawClient, connected
from tests.server.streams import NotHalfCloseable
from trio_mcp import Accepted, Context, Server, serve_stream
from trio_mcp.core import META_CLIENT_CAPABILITIES, META_VERSION
from trio_mcp.errors import SessionClosed

Pair = tuple[trio.abc.Stream, trio.abc.Stream]


def sockets() -> Pair:
    ours, theirs = (trio.SocketStream(trio.socket.from_stdlib_socket(each)) for each in socket.socketpair())
    return ours, theirs


HALVES = pytest.mark.parametrize("streams", [memory_stream_pair, lockstep_stream_pair, sockets])
BOTH_ERAS = pytest.mark.parametrize("revision", REVISION_NAMES[-2:])


class Working:
    """A server whose tools note how they end."""

    def __init__(self, **options: Any) -> None:
        self.server = Server("working", **options)
        self.ends: list[tuple[str, float]] = []

        @self.server.tool
        async def slow(seconds: float) -> str:
            try:
                await trio.sleep(seconds)
            except trio.Cancelled:
                self.ends.append(("cancelled", trio.current_time()))
                raise
            self.ends.append(("finished", trio.current_time()))
            return f"after {seconds}"

        @self.server.tool
        async def tell(ctx: Context) -> None:
            try:
                for number in range(1_000_000):
                    await ctx.log("info", number)
                    await trio.sleep(1)
            except trio.Cancelled:
                self.ends.append(("cancelled", trio.current_time()))
                raise


def slow(seconds: float) -> dict[str, Any]:
    return {"name": "slow", "arguments": {"seconds": seconds}}


def text_of(response: dict[str, Any]) -> str:
    if "error" in response:
        return f"error: {response['error']['message']}"
    text: str = response["result"]["content"][0]["text"]
    return text


@HALVES
@BOTH_ERAS
async def test_calls_that_run_at_the_end_of_input_are_answered(
    revision: str, streams: Callable[[], Pair], autojump_clock: MockClock
) -> None:
    working = Working()
    async with connected(working.server, revision, streams=streams) as wire:
        ids = [await wire.start("tools/call", slow(seconds)) for seconds in (2, 1, 3)]
        await wire.close()
        assert [text_of(await wire.response(id)) for id in ids] == ["after 2.0", "after 1.0", "after 3.0"]
        assert trio.current_time() == 3


@BOTH_ERAS
async def test_a_call_that_takes_longer_than_the_grace_is_cancelled_and_the_client_is_told(
    revision: str, autojump_clock: MockClock
) -> None:
    working = Working()
    async with connected(working.server, revision, serve=partial(serve_stream, shutdown_timeout=7)) as wire:
        ids = [await wire.start("tools/call", slow(seconds)) for seconds in (7.5, 6.5, 1000)]
        await wire.close()
        told = [text_of(await wire.response(id)) for id in ids]
        assert trio.current_time() == 7
    assert told[1] == "after 6.5"
    why = "error: this call had not finished 7 seconds after the end of the client's input"
    assert (told[0], told[2]) == (why, why)
    assert working.ends == [("finished", 6.5), ("cancelled", 7), ("cancelled", 7)]


@pytest.mark.parametrize(("shutdown_timeout", "seconds"), [(None, 4.9), (math.inf, 3600), (0, None)])
async def test_the_grace_is_five_seconds_unless_it_is_said(
    shutdown_timeout: float | None, seconds: float | None, autojump_clock: MockClock
) -> None:
    serve = serve_stream if shutdown_timeout is None else partial(serve_stream, shutdown_timeout=shutdown_timeout)
    working = Working()
    async with connected(working.server, LATEST, serve=serve) as wire:
        fast = await wire.start("tools/call", slow(seconds or 0.1))
        late = await wire.start("tools/call", slow(5.1))
        await wire.close()
        assert text_of(await wire.response(fast)).startswith("error" if seconds is None else "after")
        assert text_of(await wire.response(late)).startswith("after" if shutdown_timeout == math.inf else "error")


async def test_a_server_that_nobody_waits_for_ends_at_once(autojump_clock: MockClock) -> None:
    server = Working().server
    async with connected(server, LATEST) as wire:
        await wire.subscribe(tools=True)
        await wire.close()
        assert trio.current_time() == 0
        kinds = [message.get("method", "result" if "result" in message else "error") for message in wire.messages]
        assert kinds[-2:] == ["result", "notifications/cancelled"]  # the subscription ends in good order


@pytest.mark.parametrize("streams", [memory_stream_pair, sockets])
async def test_a_write_that_fails_is_the_end_of_the_link_and_cancels_what_runs(
    streams: Callable[[], Pair], autojump_clock: MockClock
) -> None:
    working, serve = Working(), partial(serve_stream, shutdown_timeout=math.inf)
    async with connected(working.server, LATEST, streams=streams, serve=serve, log_level="info") as wire:
        await wire.start("tools/call", slow(1e6))
        await wire.start("tools/call", {"name": "tell"})
        await wire.note("notifications/message")
        await trio.sleep(0.5)
        await wire.stream.aclose()
    assert [how for how, _ in working.ends] == ["cancelled"] * 2
    assert max(when for _, when in working.ends) <= 2  # a socket takes one more message before it says so


async def test_where_a_stream_has_no_halves_its_end_is_the_end_of_all(autojump_clock: MockClock) -> None:
    def whole() -> Pair:
        ours, theirs = memory_stream_pair()
        return ours, NotHalfCloseable(theirs)

    working = Working()
    async with connected(working.server, LATEST, streams=whole) as wire:
        await wire.start("tools/call", slow(3))
        await wire.call("server/discover")
        await wire.close()
    assert working.ends == [("cancelled", 0)]


@pytest.mark.parametrize(("last", "told"), [(-1, "after 2.0"), (-2, "error")], ids=["whole", "cut"])
async def test_a_last_line_without_its_newline_is_a_message(last: int, told: str, autojump_clock: MockClock) -> None:
    """As in ``printf '{...}' | python server.py``; one that was cut is never JSON."""
    meta = {META_VERSION: LATEST, META_CLIENT_CAPABILITIES: {}}
    calls = [
        {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {**slow(id), "_meta": meta}} for id in (1, 2)
    ]
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, Working().server, theirs)
        await ours.send_all("".join(json.dumps(call) + "\n" for call in calls).encode()[:last])
        await ours.send_eof()
        answers = b"".join([data async for data in ours]).splitlines()
    by_id = {answer.get("id"): text_of(answer) for answer in map(json.loads, answers)}
    assert by_id[1] == "after 1.0"
    assert by_id[2 if told.startswith("after") else None].startswith(told)


# Questions.

QUESTIONS: dict[str, Callable[[Context], Any]] = {
    "elicit": lambda ctx: ctx.elicit("Which?", str),
    "sample": lambda ctx: ctx.sample("Say it", max_tokens=10),
    "roots": lambda ctx: ctx.roots(),
}


METHOD_OF = {"elicit": "elicitation/create", "sample": "sampling/createMessage", "roots": "roots/list"}
ASKABLE = [
    (kind, revision)
    for revision in REVISION_NAMES[:-1]
    for kind in QUESTIONS
    if kind != "elicit" or "elicitation" in CAPABILITIES[revision]
]


class Asking:
    """A server whose tool asks, at once or when the client has closed its side."""

    def __init__(self, kind: str, *, later: bool) -> None:
        self.server = Server("asking")
        self.why: list[str] = []

        async def ask(ctx: Context) -> str:
            if later:
                await trio.sleep(1)
            try:
                await QUESTIONS[kind](ctx)
            except SessionClosed as error:
                self.why.append(str(error))
                raise
            return "answered"

        self.server.tool(ask)
        self.server.tool(name="again", replay=True)(ask)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("kind", "revision"), ASKABLE)
async def test_a_question_after_the_end_of_input_fails_at_once(
    kind: str, later: bool, revision: str, autojump_clock: MockClock
) -> None:
    asking = Asking(kind, later=later)
    async with connected(asking.server, revision, answers={METHOD_OF[kind]: sleep_for_ever}) as wire:
        id = await wire.start("tools/call", {"name": "ask"})
        if not later:
            await wait_all_tasks_blocked()
            assert [method for method, _ in wire.asked] == [METHOD_OF[kind]]
        await wire.close()
        response = await wire.response(id)
        assert trio.current_time() == later
    assert response["result"]["isError"] is True
    (why,) = asking.why
    assert "the client has closed its side of the connection" in why
    assert why in text_of(response)


async def sleep_for_ever(_params: object) -> None:
    await trio.sleep_forever()


async def answered_after_the_end(wire: RawClient, tool: str) -> dict[str, Any]:
    id = await wire.start("tools/call", {"name": tool})
    await wire.close()
    result: dict[str, Any] = (await wire.response(id))["result"]
    return result


async def test_a_modern_question_fails_where_nobody_can_bring_its_answer(autojump_clock: MockClock) -> None:
    asking = Asking("elicit", later=True)
    async with connected(asking.server, LATEST) as wire:
        result = await answered_after_the_end(wire, "ask")
    assert result["isError"] is True
    assert "the client has closed its side of the connection" in result["content"][0]["text"]


async def test_a_modern_question_is_asked_where_another_process_can_go_on(autojump_clock: MockClock) -> None:
    async with connected(Asking("elicit", later=True).server, LATEST) as wire:
        assert (await answered_after_the_end(wire, "again"))["resultType"] == "input_required"


async def test_a_modern_question_is_asked_where_another_connection_can_go_on(autojump_clock: MockClock) -> None:
    server = Server("shared")

    @server.tool
    async def ask(ctx: Context) -> str:
        await trio.sleep(1)
        answer = await ctx.elicit("Which?", bool)
        return f"it is {answer.value}" if isinstance(answer, Accepted) else "nothing"

    async with server.running():
        async with connected(server, LATEST) as first:
            result = await answered_after_the_end(first, "ask")
        async with connected(server, LATEST) as second:
            answers = {key: {"action": "accept", "content": {"value": True}} for key in result["inputRequests"]}
            again = {"name": "ask", "requestState": result["requestState"], "inputResponses": answers}
            assert (await second.call("tools/call", again))["content"][0]["text"] == "it is True"
