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


each_half_closeable_stream = pytest.mark.parametrize("streams", [memory_stream_pair, lockstep_stream_pair, sockets])
each_era = pytest.mark.parametrize("revision", REVISION_NAMES[-2:])


class SlowServer:
    """A server with tools that record how they end."""

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


@each_half_closeable_stream
@each_era
async def test_calls_that_run_at_the_end_of_the_input_are_answered(
    revision: str, streams: Callable[[], Pair], autojump_clock: MockClock
) -> None:
    slow_server = SlowServer()
    async with connected(slow_server.server, revision, streams=streams) as wire:
        ids = [await wire.start("tools/call", slow(seconds)) for seconds in (2, 1, 3)]
        await wire.close()
        assert [text_of(await wire.response(id)) for id in ids] == ["after 2.0", "after 1.0", "after 3.0"]
        assert trio.current_time() == 3


@each_era
async def test_a_call_longer_than_the_shutdown_timeout_ends_with_an_error(
    revision: str, autojump_clock: MockClock
) -> None:
    slow_server = SlowServer()
    async with connected(slow_server.server, revision, serve=partial(serve_stream, shutdown_timeout=7)) as wire:
        ids = [await wire.start("tools/call", slow(seconds)) for seconds in (7.5, 6.5, 1000)]
        await wire.close()
        outcome = [text_of(await wire.response(id)) for id in ids]
        assert trio.current_time() == 7
    assert outcome[1] == "after 6.5"
    why = "error: this call had not finished 7 seconds after the end of the client's input"
    assert (outcome[0], outcome[2]) == (why, why)
    assert slow_server.ends == [("finished", 6.5), ("cancelled", 7), ("cancelled", 7)]


@pytest.mark.parametrize(("shutdown_timeout", "seconds"), [(None, 4.9), (math.inf, 3600), (0, None)])
async def test_the_default_shutdown_timeout_is_five_seconds(
    shutdown_timeout: float | None, seconds: float | None, autojump_clock: MockClock
) -> None:
    serve = serve_stream if shutdown_timeout is None else partial(serve_stream, shutdown_timeout=shutdown_timeout)
    slow_server = SlowServer()
    async with connected(slow_server.server, LATEST, serve=serve) as wire:
        fast = await wire.start("tools/call", slow(seconds or 0.1))
        late = await wire.start("tools/call", slow(5.1))
        await wire.close()
        assert text_of(await wire.response(fast)).startswith("error" if seconds is None else "after")
        assert text_of(await wire.response(late)).startswith("after" if shutdown_timeout == math.inf else "error")


async def test_a_server_without_running_calls_ends_at_once(autojump_clock: MockClock) -> None:
    server = SlowServer().server
    async with connected(server, LATEST) as wire:
        await wire.subscribe(tools=True)
        await wire.close()
        assert trio.current_time() == 0
        kinds = [message.get("method", "result" if "result" in message else "error") for message in wire.messages]
        assert kinds[-2:] == [
            "result",
            "notifications/cancelled",
        ]  # the subscription ends with its result and the notice


@pytest.mark.parametrize("streams", [memory_stream_pair, sockets])
async def test_a_failed_write_ends_the_link_and_cancels_the_calls(
    streams: Callable[[], Pair], autojump_clock: MockClock
) -> None:
    slow_server, serve = SlowServer(), partial(serve_stream, shutdown_timeout=math.inf)
    async with connected(slow_server.server, LATEST, streams=streams, serve=serve, log_level="info") as wire:
        await wire.start("tools/call", slow(1e6))
        await wire.start("tools/call", {"name": "tell"})
        await wire.note("notifications/message")
        await trio.sleep(0.5)
        await wire.stream.aclose()
    assert [how for how, _ in slow_server.ends] == ["cancelled"] * 2
    assert max(when for _, when in slow_server.ends) <= 2  # a socket accepts one more message before the error


async def test_a_stream_without_half_close_ends_as_a_whole(autojump_clock: MockClock) -> None:
    def not_half_closeable_pair() -> Pair:
        ours, theirs = memory_stream_pair()
        return ours, NotHalfCloseable(theirs)

    slow_server = SlowServer()
    async with connected(slow_server.server, LATEST, streams=not_half_closeable_pair) as wire:
        await wire.start("tools/call", slow(3))
        await wire.call("server/discover")
        await wire.close()
    assert slow_server.ends == [("cancelled", 0)]


@pytest.mark.parametrize(("last", "outcome"), [(-1, "after 2.0"), (-2, "error")], ids=["whole", "cut"])
async def test_a_last_line_without_its_newline_is_a_message(last: int, outcome: str, autojump_clock: MockClock) -> None:
    """``printf '{...}' | python server.py`` sends no last newline.  A line that was cut is never JSON."""
    meta = {META_VERSION: LATEST, META_CLIENT_CAPABILITIES: {}}
    calls = [
        {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {**slow(id), "_meta": meta}} for id in (1, 2)
    ]
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, SlowServer().server, theirs)
        await ours.send_all("".join(json.dumps(call) + "\n" for call in calls).encode()[:last])
        await ours.send_eof()
        answers = b"".join([data async for data in ours]).splitlines()
    by_id = {answer.get("id"): text_of(answer) for answer in map(json.loads, answers)}
    assert by_id[1] == "after 1.0"
    assert by_id[2 if outcome.startswith("after") else None].startswith(outcome)


# Questions.

QUESTIONS: dict[str, Callable[[Context], Any]] = {
    "elicit": lambda ctx: ctx.elicit("Which?", str),
    "sample": lambda ctx: ctx.sample("Say it", max_tokens=10),
    "roots": lambda ctx: ctx.roots(),
}


METHOD_OF = {"elicit": "elicitation/create", "sample": "sampling/createMessage", "roots": "roots/list"}
KINDS_AND_REVISIONS = [
    (kind, revision)
    for revision in REVISION_NAMES[:-1]
    for kind in QUESTIONS
    if kind != "elicit" or "elicitation" in CAPABILITIES[revision]
]


class AskingServer:
    """A server with a tool that asks, at once or when the client has closed its side."""

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
@pytest.mark.parametrize(("kind", "revision"), KINDS_AND_REVISIONS)
async def test_a_question_after_the_end_of_the_input_fails_at_once(
    kind: str, later: bool, revision: str, autojump_clock: MockClock
) -> None:
    asking_server = AskingServer(kind, later=later)
    async with connected(asking_server.server, revision, answers={METHOD_OF[kind]: never_answer}) as wire:
        id = await wire.start("tools/call", {"name": "ask"})
        if not later:
            await wait_all_tasks_blocked()
            assert [method for method, _ in wire.asked] == [METHOD_OF[kind]]
        await wire.close()
        response = await wire.response(id)
        assert trio.current_time() == later
    assert response["result"]["isError"] is True
    (why,) = asking_server.why
    assert "the client has closed its side of the connection" in why
    assert why in text_of(response)


async def never_answer(_params: object) -> None:
    await trio.sleep_forever()


async def answered_after_the_end(wire: RawClient, tool: str) -> dict[str, Any]:
    id = await wire.start("tools/call", {"name": tool})
    await wire.close()
    result: dict[str, Any] = (await wire.response(id))["result"]
    return result


async def test_a_modern_question_fails_if_no_later_connection_can_answer_it(autojump_clock: MockClock) -> None:
    asking_server = AskingServer("elicit", later=True)
    async with connected(asking_server.server, LATEST) as wire:
        result = await answered_after_the_end(wire, "ask")
    assert result["isError"] is True
    assert "the client has closed its side of the connection" in result["content"][0]["text"]


async def test_a_modern_question_is_sent_if_another_process_can_continue(autojump_clock: MockClock) -> None:
    async with connected(AskingServer("elicit", later=True).server, LATEST) as wire:
        assert (await answered_after_the_end(wire, "again"))["resultType"] == "input_required"


async def test_a_modern_question_is_sent_if_another_connection_can_continue(autojump_clock: MockClock) -> None:
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
