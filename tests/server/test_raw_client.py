"""The helpers of the other tests: they accept correct servers and find each kind of fault.

Most servers here are stand-ins: functions that write a few lines and break one rule.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, check_half_closeable_stream, lockstep_stream_pair, memory_stream_pair

from tests.requirements import req
from tests.server.checkpoints import (
    PATIENCE,
    Attempt,
    Leak,
    PipeEnd,
    Stuck,
    any_task,
    busy_threads,
    cancel_at_each_step,
    one_byte_pipe,
    pipe_pair,
    unlimited_pipe,
    unwrapped,
)
from tests.server.raw_client import (
    CANCELLED,
    LATEST,
    MESSAGE,
    PROGRESS,
    REVISION_NAMES,
    ErrorResponse,
    ProtocolViolation,
    RawClient,
    connected,
    every_revision,
    legacy,
    modern,
    since,
    until,
)
from trio_mcp.core import TextContent
from trio_mcp.server import Context, Server, serve_stream

Reply = Callable[[Any], bytes]
Ask = Callable[[Any, Any], Awaitable[None]]


# Stand-ins.


async def lines_of(stream: trio.abc.Stream) -> AsyncGenerator[Any, None]:
    rest = b""
    while data := bytes(await stream.receive_some()):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def line(**message: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"


def result(id: Any, **members: Any) -> bytes:
    return line(id=id, result=members)


def handshake(message: Any) -> bytes:
    info = {"name": "small", "version": "1"}
    return result(message["id"], protocolVersion=message["params"]["protocolVersion"], capabilities={}, serverInfo=info)


def replying_with(reply: Reply) -> Any:
    """Serve one client: do the handshake, and send `reply(id)` for each other request."""

    async def serve(_: Any, stream: trio.abc.Stream) -> None:
        async with contextlib.aclosing(lines_of(stream)) as messages:
            async for message in messages:
                if message["method"] == "initialize":
                    await stream.send_all(handshake(message))
                elif "id" in message:
                    await stream.send_all(reply(message["id"]))

    return serve


TEXT = {"content": [{"type": "text", "text": "hi"}]}


# The client with a correct server.


def shop(**options: Any) -> Server:
    server = Server("shop", version="1", instructions="Be kind.", capabilities=["prompts"], **options)

    @server.tool
    async def order(ctx: Context, what: str) -> str:
        """Order something."""
        await ctx.progress(1, 2)
        await ctx.log("info", "asking")
        answer = await ctx.sample(f"How many {what}?", max_tokens=5)
        assert isinstance(answer.content, TextContent)
        await ctx.progress(2, 2)
        return f"{answer.content.text} {what}"

    @server.tool
    async def wait() -> str:
        await trio.sleep_forever()
        raise AssertionError

    @server.resource("stock://apples")
    def apples() -> str:
        return "7"

    return server


def sampled(text: str) -> Callable[[Any], Any]:
    return lambda params: {"role": "assistant", "model": "m", "content": {"type": "text", "text": text}}


@req("stdio-14", "trans-07")
@pytest.mark.parametrize("streams", [memory_stream_pair, lockstep_stream_pair, unlimited_pipe, one_byte_pipe])
@every_revision
async def test_one_body_runs_in_every_revision(
    revision: str, streams: Callable[[], Any], autojump_clock: MockClock
) -> None:
    server = shop()
    async with connected(server, revision, streams=streams, log_level="info") as wire:
        about = await wire.about()
        assert (about["serverInfo"]["name"], about["instructions"]) == ("shop", "Be kind.")
        assert [tool["name"] for tool in (await wire.call("tools/list"))["tools"]] == ["order", "wait"]

        wire.answers["sampling/createMessage"] = sampled("three")
        found = await wire.call("tools/call", {"name": "order", "arguments": {"what": "pears"}}, progress="p")
        assert found["content"] == [{"type": "text", "text": "three pears"}]
        assert [params["progress"] for params in wire.noted(PROGRESS)] == [1, 2]
        assert (await wire.note(MESSAGE))["data"] == "asking"
        [(method, params)] = wire.asked
        assert method == "sampling/createMessage"
        assert params["messages"][0]["content"] == {"type": "text", "text": "How many pears?"}

        with pytest.raises(ErrorResponse) as caught:
            await wire.call("tools/call", {"name": "steal"})
        assert caught.value.code == -32602


@every_revision
async def test_changes_arrive_the_same_way_in_every_revision(revision: str, autojump_clock: MockClock) -> None:
    server = shop()
    async with connected(server, revision) as wire:
        listening = await wire.subscribe(tools=True, uris=["stock://apples"])
        assert listening.agreed == {"tools", "stock://apples"}
        server.notify_list_changed("tools", "prompts")
        server.notify_resource_updated("stock://apples")
        assert {await wire.changed(), await wire.changed()} == {("tools", None), ("updated", "stock://apples")}
        server.notify_resource_updated("stock://apples")
        assert await wire.changed() == ("updated", "stock://apples")
        await listening.end()
        await trio.testing.wait_all_tasks_blocked()
        server.notify_resource_updated("stock://apples")
        before = len(wire.notes)
        await trio.sleep(1)
        assert len(wire.notes) == before


@every_revision
async def test_a_call_can_be_abandoned_and_cancelled(revision: str, autojump_clock: MockClock) -> None:
    async with connected(shop(), revision) as wire:
        id = await wire.start("tools/call", {"name": "wait"}, id="mine")
        with trio.move_on_after(5) as scope:
            await wire.response(id)
        assert scope.cancelled_caught
        await wire.cancel(id, "enough")
        await trio.sleep(1)
        assert not wire.answered("mine")
        assert (await wire.call("tools/list"))["tools"]


@every_revision
async def test_the_log_level_may_change(revision: str, autojump_clock: MockClock) -> None:
    async with connected(shop(), revision, answers={"sampling/createMessage": sampled("1")}) as wire:
        await wire.set_level("error")
        await wire.call("tools/call", {"name": "order", "arguments": {"what": "figs"}})
        assert not wire.noted(MESSAGE)
        await wire.set_level("debug")
        await wire.call("tools/call", {"name": "order", "arguments": {"what": "figs"}})
        assert len(wire.noted(MESSAGE)) == 1


@every_revision
async def test_a_question_may_be_answered_with_an_error(revision: str, autojump_clock: MockClock) -> None:
    async with connected(shop(), revision) as wire:
        wire.answers["sampling/createMessage"] = lambda params: ErrorResponse(-1, "no")
        order = {"name": "order", "arguments": {"what": "figs"}}
        if revision == LATEST:  # it has no error answers: `call` raises
            with pytest.raises(ErrorResponse, match="no"):
                await wire.call("tools/call", order)
        else:
            message = await wire.exchange("tools/call", order)
            assert "error" in message or message["result"]["isError"]


@modern
async def test_rounds_may_be_run_by_hand(revision: str, autojump_clock: MockClock) -> None:
    async with connected(shop(), revision) as wire:
        order = {"name": "order", "arguments": {"what": "figs"}}
        first = await wire.call("tools/call", order, rounds=False)
        assert (first["resultType"], len(first["inputRequests"])) == ("input_required", 1)
        answers = {key: sampled("2")({}) for key in first["inputRequests"]}
        again = {**order, "inputResponses": answers, "requestState": first["requestState"]}
        assert (await wire.call("tools/call", again))["content"][0]["text"] == "2 figs"


@modern
async def test_a_waiting_handler_may_outlive_its_connection_in_a_shared_run(
    revision: str, autojump_clock: MockClock
) -> None:
    server = shop()
    async with server.running():
        async with connected(server, revision) as wire:
            await wire.call("tools/call", {"name": "order", "arguments": {"what": "figs"}}, rounds=False)
        assert server.statistics().parked == 1


@legacy
async def test_a_request_that_the_server_cancels_is_not_answered(revision: str, autojump_clock: MockClock) -> None:
    async with connected(shop(), revision) as wire:

        async def think(params: Any) -> None:
            await trio.sleep_forever()

        wire.answers["sampling/createMessage"] = think
        id = await wire.start("tools/call", {"name": "order", "arguments": {"what": "figs"}})
        await trio.testing.wait_all_tasks_blocked()
        assert len(wire.asked) == 1
        await wire.cancel(id)
        await wire.note(CANCELLED)
        # If the client still answered it, the end of the stream would have to wait for the answer.


@req("stdio-20")
@pytest.mark.parametrize("revision", ["2025-03-26"])
async def test_batches_go_both_ways(revision: str, autojump_clock: MockClock) -> None:
    async with connected(shop(), revision) as wire:
        batch = [wire.request("ping"), wire.request("tools/list")]
        await wire.send(batch)
        assert (await wire.response(batch[0]["id"]))["result"] == {}
        assert (await wire.response(batch[1]["id"]))["result"]["tools"]
        assert wire.lines[-1].startswith(b"[")


@req("stdio-02", "stdio-19")
@pytest.mark.parametrize("revision", [name for name in REVISION_NAMES if name != "2025-03-26"])
async def test_each_line_is_one_message_in_revisions_without_batches(revision: str, autojump_clock: MockClock) -> None:
    async with connected(shop(), revision, answers={"sampling/createMessage": sampled("a\r\nlot of")}) as wire:
        before = len(wire.lines)
        ids = [await wire.start("tools/list") for _ in range(3)]
        found = await wire.call("tools/call", {"name": "order", "arguments": {"what": "figs"}})
        assert found["content"][0]["text"] == "a\r\nlot of figs"
        assert all(wire.answered(id) for id in ids)
        assert all(type(json.loads(line)) is dict for line in wire.lines[before:])
        wire.post_bytes(json.dumps([wire.request("tools/list", id="never")]).encode() + b"\n")
        assert (await wire.call("tools/list"))["tools"]
        assert [message["error"]["code"] for message in wire.unaddressed] == [-32600]


@every_revision
async def test_an_error_that_names_no_request_is_kept(revision: str, autojump_clock: MockClock) -> None:
    async with connected(shop(), revision) as wire:
        wire.post_bytes(b"{\n")
        assert (await wire.call("tools/list"))["tools"]
        assert [message["error"]["code"] for message in wire.unaddressed] == [-32700]


async def test_a_client_may_stop_reading(autojump_clock: MockClock) -> None:
    async with connected(shop(), "2025-11-25", streams=one_byte_pipe) as wire:
        heard = len(wire.lines)
        with wire.not_reading():
            id = await wire.start("ping")
            await trio.sleep(10)
            assert (len(wire.lines), wire.answered(id)) == (heard, False)
        assert (await wire.response(id))["result"] == {}


async def test_an_exception_of_the_block_is_raised_unchanged(autojump_clock: MockClock) -> None:
    mine = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with connected(shop(), LATEST):
            raise mine
    assert caught.value is mine


def test_the_revisions_of_a_test_may_be_chosen() -> None:
    chosen = [mark.args[1] for mark in (since("2025-11-25"), until("2025-03-26"), legacy, modern, every_revision)]
    names = REVISION_NAMES
    assert chosen == [names[3:], names[:2], names[:4], names[4:], names]


# Servers that break a rule.

ACK = {"method": "notifications/subscriptions/acknowledged"}
TAG = {"_meta": {"io.modelcontextprotocol/subscriptionId": 1}}
DONE = {"resultType": "complete", **TEXT}


def note(method: str, **params: Any) -> bytes:
    return line(method=f"notifications/{method}", params=params)


ANY = "2025-11-25"
VIOLATIONS: list[tuple[str, str, str, Reply]] = [
    ("nonsense", ANY, "not JSON", lambda id: b"hello\n"),
    ("an empty line", ANY, "not JSON", lambda id: b"\n"),
    ("bytes that are no UTF-8", ANY, "not JSON", lambda id: b'"\xff"\n'),
    ("a newline within a message", ANY, "not JSON", lambda id: result(id, **TEXT).replace(b", ", b",\n", 1)),
    ("a carriage return", ANY, "carriage return", lambda id: result(id, **TEXT).replace(b"\n", b"\r\n")),
    ("NaN", ANY, "NaN is not JSON", lambda id: result(id, **TEXT, x=float("nan"))),
    ("a duplicate key", ANY, "a duplicate key", lambda id: result(id, **TEXT).replace(b'"id"', b'"id": 1, "id"')),
    ("not an object", ANY, "not a message", lambda id: b"7\n"),
    ("another version", ANY, "not a message", lambda id: result(id, **TEXT).replace(b'"2.0"', b'"1.0"')),
    ("an array", ANY, "an array", lambda id: b"[" + result(id, **TEXT).strip() + b"]\n"),
    ("an empty array", "2025-03-26", "an array", lambda id: b"[]\n"),
    ("a result and an error", ANY, "neither", lambda id: line(id=id, result={}, error={"code": 1, "message": ""})),
    ("two answers", ANY, "without an open request", lambda id: result(id, **TEXT) * 2),
    ("an answer to an unknown id", ANY, "without an open request", lambda id: result(99, **TEXT)),
    ("an answer to an id of another type", ANY, "without an open request", lambda id: result(str(id), **TEXT)),
    ("a result without an id", ANY, "neither", lambda id: line(result={})),
    ("a result with null for an id", ANY, "without an id", lambda id: result(None)),
    ("an invalid result", ANY, "not a valid CallToolResult", lambda id: result(id, content="hi")),
    ("an invalid error", ANY, "not a valid JSONRPCErrorResponse", lambda id: line(id=id, error={"code": "x"})),
    (
        "an invalid error in 2024-11-05",
        "2024-11-05",
        "not a valid JSONRPCError,",
        lambda id: line(id=id, error={"code": "x"}),
    ),
    ("a modern result without its type", LATEST, "not a valid CallToolResult", lambda id: result(id, **TEXT)),
    ("a modern request", LATEST, "a request by the server", lambda id: line(id=1, method="ping")),
    (
        "a request of another revision",
        "2025-03-26",
        "not a request of a server",
        lambda id: line(id=1, method="elicitation/create"),
    ),
    ("a bad request", ANY, "not a valid CreateMessageRequest", lambda id: line(id=1, method="sampling/createMessage")),
    ("an unknown notification", ANY, "not a notification of a server", lambda id: note("weather", sun=1)),
    ("a bad notification", ANY, "not a valid LoggingMessage", lambda id: note("message", level="loud", data=1)),
    ("a client's notification", ANY, "not a notification of a server", lambda id: note("initialized")),
    (
        "progress with an unknown token",
        ANY,
        "without an open request",
        lambda id: note("progress", progressToken="q", progress=1),
    ),
    ("progress that does not increase", ANY, "rise", lambda id: 2 * note("progress", progressToken="p", progress=1)),
    (
        "progress after the response",
        ANY,
        "without an open request",
        lambda id: result(id, **TEXT) + note("progress", progressToken="p", progress=1),
    ),
    ("a log that no request asked for", LATEST, "no request asked", lambda id: note("message", level="info", data=1)),
    ("a change without a subscription", LATEST, "not on a subscription", lambda id: note("tools/list_changed")),
    ("a change tagged with a call", LATEST, "not on a subscription", lambda id: note("tools/list_changed", **TAG)),
    (
        "an acknowledgement of a call",
        LATEST,
        "not on a subscription",
        lambda id: line(**ACK, params={**TAG, "notifications": {}}),
    ),
    ("a tag in an old revision", ANY, "a subscription id", lambda id: note("tools/list_changed", **TAG)),
]


@pytest.mark.parametrize(
    ("revision", "why", "reply"), [row[1:] for row in VIOLATIONS], ids=[row[0] for row in VIOLATIONS]
)
async def test_a_message_that_breaks_a_rule_is_found(
    revision: str, why: str, reply: Reply, shared_schemas: Any, autojump_clock: MockClock
) -> None:
    async def talk() -> None:
        async with connected(None, revision, serve=replying_with(reply)) as wire:
            await wire.exchange("tools/call", {"name": "x"}, progress="p")
            await trio.sleep(1)

    with pytest.raises(ProtocolViolation, match=why):
        await talk()


SUBSCRIPTION_VIOLATIONS: list[tuple[str, str, Reply]] = [
    ("a change before the acknowledgement", "before the ack", lambda id: note("tools/list_changed", **TAG)),
    (
        "more than was asked for",
        "more than the client asked for",
        lambda id: line(**ACK, params={**TAG, "notifications": {"toolsListChanged": True, "promptsListChanged": True}}),
    ),
    (
        "another resource",
        "more than the client asked for",
        lambda id: line(**ACK, params={**TAG, "notifications": {"resourceSubscriptions": ["x://b"]}}),
    ),
    (
        "a change that was not promised",
        "not promised",
        lambda id: line(**ACK, params={**TAG, "notifications": {}}) + note("tools/list_changed", **TAG),
    ),
    ("two acknowledgements", "twice", lambda id: 2 * line(**ACK, params={**TAG, "notifications": {}})),
    ("an end without its id", "without its id", lambda id: result(id, resultType="complete", _meta={"x": 1})),
]


@pytest.mark.parametrize(
    ("why", "reply"), [row[1:] for row in SUBSCRIPTION_VIOLATIONS], ids=[row[0] for row in SUBSCRIPTION_VIOLATIONS]
)
async def test_a_message_that_breaks_a_rule_of_subscriptions_is_found(
    why: str, reply: Reply, autojump_clock: MockClock
) -> None:
    async def talk() -> None:
        async with connected(None, LATEST, serve=replying_with(reply), check=False) as wire:
            await wire.subscribe(tools=True, uris=["x://a"])
            await trio.sleep(1)

    with pytest.raises(ProtocolViolation, match=why):
        await talk()


async def test_a_refused_subscription_raises(autojump_clock: MockClock) -> None:
    refuse: Reply = lambda id: line(id=id, error={"code": -32603, "message": "full"})  # noqa: E731
    async with connected(None, LATEST, serve=replying_with(refuse)) as wire:
        with pytest.raises(ErrorResponse, match="full"):
            await wire.subscribe(tools=True)


async def test_an_incomplete_last_line_is_found(autojump_clock: MockClock) -> None:
    with pytest.raises(ProtocolViolation, match="an incomplete line"):
        async with connected(None, LATEST, serve=replying_with(lambda id: result(id, **DONE) + b'{"jsonr')) as wire:
            await wire.call("tools/call", {"name": "x"})


async def test_endless_rounds_of_a_request_are_found(autojump_clock: MockClock) -> None:
    more: Reply = lambda id: result(id, resultType="input_required", requestState="s")  # noqa: E731
    async with connected(None, LATEST, serve=replying_with(more)) as wire:
        with pytest.raises(ProtocolViolation, match="too many rounds"):
            await wire.call("tools/call", {"name": "x"})


async def test_a_wait_that_cannot_end_raises_stuck(autojump_clock: MockClock) -> None:
    async with connected(None, LATEST, serve=replying_with(lambda id: b"")) as wire:
        with pytest.raises(Stuck, match=r"the wait for the response to 1(.|\n)*the server: "):
            await wire.call("tools/call", {"name": "x"})
        with pytest.raises(Stuck, match="notifications/progress"):
            await wire.note(PROGRESS)


async def test_a_wait_goes_on_while_a_thread_works(autojump_clock: MockClock) -> None:
    release = threading.Event()

    async def serve(_: Any, stream: trio.abc.Stream) -> None:
        message = json.loads(await stream.receive_some())
        await trio.to_thread.run_sync(release.wait, 10)
        await stream.send_all(result(message["id"], **DONE))

    async def let_go() -> None:
        for _ in range(3):
            await trio.sleep(PATIENCE)
        release.set()

    async with connected(None, LATEST, serve=serve) as wire, trio.open_nursery() as nursery:
        nursery.start_soon(let_go)
        assert await wire.call("tools/call", {"name": "x"}) == DONE


async def test_a_wait_for_a_server_that_has_ended_fails_at_once(autojump_clock: MockClock) -> None:
    async def serve(_: Any, stream: trio.abc.Stream) -> None:
        await stream.receive_some()

    async with connected(None, LATEST, serve=serve) as wire:
        with pytest.raises(ProtocolViolation, match="ended before the response"):
            await wire.call("tools/call", {"name": "x"})
        assert wire.ended.is_set()
        assert trio.current_time() == pytest.approx(0, abs=1)


async def test_a_server_that_does_not_return_is_found(autojump_clock: MockClock) -> None:
    async def serve(_: Any, stream: trio.abc.HalfCloseableStream) -> None:
        assert await stream.receive_some() == b""
        await stream.send_eof()
        await trio.sleep_forever()

    with pytest.raises(Stuck, match="the server to return"):
        async with connected(None, LATEST, serve=serve):
            pass


@pytest.mark.parametrize("system", [True, False])
async def test_a_task_that_outlives_its_connection_is_found(system: bool, autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as outer:

        async def serve(_: Any, stream: trio.abc.Stream) -> None:
            if system:
                scopes.append(await started(trio.lowlevel.spawn_system_task))
            else:
                outer.start_soon(trio.sleep_forever)
            assert await stream.receive_some() == b""

        async def started(spawn: Callable[..., Any]) -> trio.CancelScope:
            scope = trio.CancelScope()

            async def sleep() -> None:
                with scope:
                    await trio.sleep_forever()

            spawn(sleep, name="a task without an owner")
            return scope

        scopes: list[trio.CancelScope] = []
        with pytest.raises(AssertionError, match="tasks were left"):
            async with connected(None, LATEST, serve=serve):
                outer.start_soon(trio.sleep_forever, name="a task of the test itself")
        for scope in scopes:
            scope.cancel()
        outer.cancel_scope.cancel()


# Streams.


@pytest.mark.parametrize("capacity", [70_000, float("inf")])
async def test_the_pipes_pass_the_stream_checks_of_trio(capacity: float) -> None:
    async def make() -> tuple[PipeEnd, PipeEnd]:
        return pipe_pair(capacity)

    async def clogged() -> tuple[PipeEnd, PipeEnd]:
        left, right = one_byte_pipe()
        await left.send_all(b"x")
        await right.send_all(b"x")
        return left, right

    await check_half_closeable_stream(make, clogged)


async def test_a_cancelled_send_leaves_the_bytes_that_had_room(autojump_clock: MockClock) -> None:
    left, right = pipe_pair(3)
    with trio.move_on_after(1) as scope:
        await left.send_all(b"abcde")
    assert scope.cancelled_caught
    await left.send_eof()
    assert (await right.receive_some(), await right.receive_some()) == (b"abc", b"")
    assert right.heard == b"abc"


# Cancellation at each step.

Echo = Callable[[trio.abc.Stream, bytes], Awaitable[None]]


async def shielded(stream: trio.abc.Stream, data: bytes) -> None:
    """Finish a line that has begun."""
    await trio.lowlevel.checkpoint()
    with trio.CancelScope(shield=True):
        await stream.send_all(data)


async def unshielded(stream: trio.abc.Stream, data: bytes) -> None:
    await stream.send_all(data)


async def leave_a_task(stream: trio.abc.Stream, data: bytes) -> None:
    try:
        await shielded(stream, data)
    except trio.Cancelled:
        trio.lowlevel.spawn_system_task(trio.sleep_forever, name="a task without an owner")
        raise


pipes: list[int] = []


async def leave_a_file(stream: trio.abc.Stream, data: bytes) -> None:
    ends = os.pipe()
    try:
        await shielded(stream, data)
    except trio.Cancelled:
        pipes.extend(ends)
        raise
    for fd in ends:
        os.close(fd)


def scenario_of(write: Echo, streams: Callable[[], Any]) -> Callable[[Attempt], Awaitable[None]]:
    """A scenario in which the writing of a server is cancelled, and the server then closes the stream."""

    async def scenario(attempt: Attempt) -> None:
        async def serve(_: Any, stream: trio.abc.Stream) -> None:
            with attempt.window():
                async with contextlib.aclosing(lines_of(stream)) as messages:
                    async for message in messages:
                        await write(stream, result(message["id"], **DONE))

        peer, ours = attempt.streams(streams)()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_and_close, serve, ours, name="small server")
            nursery.start_soon(read_to_the_end, peer)
            with contextlib.suppress(trio.BrokenResourceError):
                await peer.send_all(line(id=1, method="tools/call"))
                await peer.send_all(line(id=2, method="tools/call"))
                await peer.send_eof()

    return scenario


async def read_to_the_end(stream: trio.abc.Stream) -> None:
    while await stream.receive_some():
        pass


async def serve_and_close(serve: Any, stream: trio.abc.Stream) -> None:
    await serve(None, stream)
    with trio.CancelScope(shield=True):
        await stream.aclose()


@pytest.mark.parametrize("watch", ["small server", any_task], ids=["its own steps", "all steps"])
@pytest.mark.parametrize("streams", [unlimited_pipe, lambda: pipe_pair(16)], ids=["unlimited", "16 bytes"])
def test_a_server_that_finishes_its_lines_passes(streams: Callable[[], Any], watch: Any) -> None:
    heard: set[int] = set()
    scenario = scenario_of(shielded, streams)
    steps = cancel_at_each_step(scenario, watch=watch, after=lambda a: heard.add(a.ends[0].heard.count(b"\n")))
    assert steps > 4
    assert heard == {0, 1, 2}


@pytest.mark.parametrize(
    ("write", "why"),
    [(unshielded, "a part of a line"), (leave_a_task, "tasks were left"), (leave_a_file, "file descriptors were left")],
)
def test_leftovers_of_a_cancellation_are_found(write: Echo, why: str) -> None:
    if write is leave_a_file and not os.path.isdir("/proc/self/fd"):
        pytest.skip("the system does not list the open files")
    with pytest.raises(Leak, match=why) as caught:
        cancel_at_each_step(scenario_of(write, lambda: pipe_pair(16)), watch=any_task)
    assert re.match(r"with the action at step \d+, .*: .*test_raw_client.py:\d+ ", caught.value.__notes__[0])
    while pipes:
        os.close(pipes.pop())


def test_a_cut_line_may_be_allowed() -> None:
    assert cancel_at_each_step(scenario_of(unshielded, lambda: pipe_pair(16)), watch=any_task, may_cut=True) > 20


def test_a_line_that_is_no_message_is_found() -> None:
    async def babble(stream: trio.abc.Stream, data: bytes) -> None:
        await shielded(stream, b"hello\n")

    with pytest.raises(json.JSONDecodeError):
        cancel_at_each_step(scenario_of(babble, unlimited_pipe), watch="small server")


def test_a_thread_that_is_left_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    offset = iter(range(0, 10**6, 10))
    monkeypatch.setattr(
        time, "monotonic", lambda: float(next(offset))
    )  # the harness waits some real seconds for threads

    async def scenario(attempt: Attempt) -> None:
        with attempt.window():
            await trio.to_thread.run_sync(release.wait, 60, abandon_on_cancel=True)

    with pytest.raises(Leak, match="threads were left"):
        cancel_at_each_step(scenario, watch=any_task, only=1)
    monkeypatch.undo()
    release.set()
    while busy_threads():
        time.sleep(0.001)


@pytest.mark.parametrize("shield", [False, True])
def test_a_scenario_that_does_not_end_is_found(shield: bool) -> None:
    async def scenario(attempt: Attempt) -> None:
        with attempt.window():
            await trio.lowlevel.checkpoint()
        with trio.CancelScope(shield=shield):
            await trio.sleep_forever()

    with pytest.raises(Stuck, match="does not end"):
        cancel_at_each_step(scenario, watch=any_task)


def test_a_failed_assertion_of_the_scenario_is_reported() -> None:
    async def scenario(attempt: Attempt) -> None:
        with attempt.window():
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        assert attempt.n != 2, "it did not go well"

    with pytest.raises(AssertionError, match="it did not go well") as caught:
        cancel_at_each_step(scenario, watch="the scenario")
    assert caught.value.__notes__[0].startswith("with the action at step 2, the scenario: ")


@pytest.mark.parametrize(
    ("watch", "why"),
    [("an absent task", "no step of an absent task"), (any_task, "opened no window")],
    ids=["a name", "no window"],
)
def test_a_harness_that_cancels_nothing_fails(watch: Any, why: str) -> None:
    async def scenario(attempt: Attempt) -> None:
        if watch == "an absent task":
            with attempt.window():
                await trio.lowlevel.checkpoint()

    with pytest.raises(AssertionError, match=why):
        cancel_at_each_step(scenario, watch=watch)


def test_the_number_of_steps_is_limited() -> None:
    async def scenario(attempt: Attempt) -> None:
        with attempt.window():
            for _ in range(10):
                await trio.lowlevel.checkpoint()

    with pytest.raises(AssertionError, match="not at its end after 5"):
        cancel_at_each_step(scenario, watch=any_task, most=5)
    assert cancel_at_each_step(scenario, watch=any_task, most=5, only=3) == 1


def test_a_window_may_have_another_action() -> None:
    async def scenario(attempt: Attempt) -> None:
        send, receive = trio.open_memory_channel[int](1)
        with attempt.window(lambda: send.send_nowait(attempt.n)), trio.move_on_after(10):
            assert await receive.receive() == attempt.n
            await trio.lowlevel.checkpoint()
        assert not attempt.scope.cancel_called

    assert cancel_at_each_step(scenario, watch=any_task) > 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_action_that_fails_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(attempt: Attempt) -> None:
        with attempt.window(lambda: [][0] if attempt.n else None):
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()

    with pytest.raises(AssertionError, match="the action failed"):
        cancel_at_each_step(scenario, watch=any_task)
    assert "IndexError" in caplog.text


def test_steps_are_the_same_in_every_run() -> None:
    places: list[list[str]] = []
    for _ in range(2):
        places.append([])
        cancel_at_each_step(
            scenario_of(shielded, lambda: pipe_pair(32)), watch=any_task, after=lambda a: places[-1].append(a.where)
        )
    assert places[0] == places[1]
    assert len(set(places[0])) > 4


# The server itself, cancelled at each step.  `small_pipe` has room for less than a line.

ERAS = pytest.mark.parametrize("revision", ["2025-11-25", LATEST])
ANSWERS = {"sampling/createMessage": sampled("two")}
ORDER = {"name": "order", "arguments": {"what": "figs"}}


def small_pipe() -> tuple[PipeEnd, PipeEnd]:
    return pipe_pair(40)


STREAMS = pytest.mark.parametrize("streams", [unlimited_pipe, small_pipe])


async def check_link(server: Server, wire: RawClient) -> None:
    """The link still works, and the server keeps no state of earlier requests."""
    assert (await wire.call("tools/list"))["tools"]
    await trio.sleep(1000)  # longer than a handler waits for a retry
    kept = server.statistics()
    assert (kept.running, kept.parked) == (0, 0)


@pytest.mark.full
@STREAMS
@ERAS
def test_a_handler_may_be_interrupted_anywhere(revision: str, streams: Callable[[], Any]) -> None:
    async def scenario(attempt: Attempt) -> None:
        server = shop()

        @server.tool
        async def interrupted(ctx: Context) -> str:
            with attempt.window():
                await ctx.progress(1)
                await ctx.log("info", "a line that is too long for the pipe to take it at once")
                await ctx.sample("How many?", max_tokens=5)
                await ctx.progress(2)
            return "over"

        made = attempt.streams(streams)
        async with connected(server, revision, streams=made, answers=ANSWERS, log_level="info") as wire:
            found = await wire.call("tools/call", {"name": "interrupted"}, progress="p")
            assert found["content"][0]["text"] == "over"
            await check_link(server, wire)

    own = cancel_at_each_step(scenario, watch="tools/call interrupted")
    assert cancel_at_each_step(scenario, watch=any_task) > own > 2  # several reports may share one step


@pytest.mark.full
@req("cancel-17")
@STREAMS
@ERAS
def test_the_client_may_cancel_a_call_anywhere(revision: str, streams: Callable[[], Any]) -> None:
    async def scenario(attempt: Attempt) -> None:
        server = shop()
        made = attempt.streams(streams)
        async with connected(server, revision, streams=made, answers=ANSWERS, log_level="info") as wire:
            first = wire.request("tools/call", ORDER, progress="p")
            cancel = {"jsonrpc": "2.0", "method": CANCELLED, "params": {"requestId": first["id"]}}
            with attempt.window(lambda: wire.post(cancel)), trio.move_on_after(10):
                await wire.send(first)
                await wire.response(first["id"])
            await check_link(server, wire)

    assert cancel_at_each_step(scenario, watch=any_task) > 20


async def use_until_the_end(attempt: Attempt, server: Server, revision: str, **options: Any) -> None:
    """A client that sends several requests at the same time.  The server may end at any time; the client reads to the
    end."""

    async def ignore_the_end(request: Callable[[], Awaitable[Any]]) -> None:
        try:
            await request()
        except (ProtocolViolation, ErrorResponse) as error:
            gone = isinstance(error, ErrorResponse) or "the server ended before" in str(error)
            if not gone or not attempt.fired:
                raise

    async with connected(server, revision, answers=ANSWERS, log_level="info", opened=False, **options) as wire:
        await ignore_the_end(wire.open)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ignore_the_end, lambda: listen(server, wire))
            nursery.start_soon(ignore_the_end, lambda: wire.call("tools/list"))
            nursery.start_soon(ignore_the_end, lambda: wire.call("tools/call", ORDER, progress="p"))
    kept = server.statistics()
    assert (kept.connections, kept.running, kept.listeners) == (0, 0, 0)


async def listen(server: Server, wire: RawClient) -> None:
    await wire.subscribe(tools=True, uris=["stock://apples"])
    server.notify_resource_updated("stock://apples")
    await wire.changed()


@pytest.mark.full
@pytest.mark.parametrize("shared", [False, True], ids=["a run of its own", "a run that goes on"])
@STREAMS
@ERAS
def test_serving_may_be_cancelled_anywhere(revision: str, streams: Callable[[], Any], shared: bool) -> None:
    async def scenario(attempt: Attempt) -> None:
        async def serve(server: Server, stream: trio.abc.Stream) -> None:
            with attempt.window():
                await serve_stream(server, stream)

        server = shop()
        async with server.running() if shared else contextlib.nullcontext():
            await use_until_the_end(attempt, server, revision, streams=attempt.streams(streams), serve=serve)

    assert cancel_at_each_step(scenario, watch=any_task) > 20


@pytest.mark.full
@modern
def test_serving_may_be_cancelled_in_any_order_of_the_woken_tasks(revision: str) -> None:
    async def scenario(attempt: Attempt) -> None:
        async def serve(server: Server, stream: trio.abc.Stream) -> None:
            with attempt.window():
                await serve_stream(server, stream)

        async with connected(shop(), revision, streams=attempt.streams(), serve=serve, answers=ANSWERS) as wire:
            with contextlib.suppress(ProtocolViolation, ErrorResponse):
                await wire.call("tools/call", ORDER)

    # Three tasks wake at the same time: the waiting handler, the client's next request, and the reader of it.
    assert all(cancel_at_each_step(scenario, watch=any_task, seed=seed) > 20 for seed in range(10))


@pytest.mark.full
@STREAMS
@ERAS
def test_the_link_may_be_lost_anywhere(revision: str, streams: Callable[[], Any]) -> None:
    async def scenario(attempt: Attempt) -> None:
        ours, theirs = streams()
        with attempt.window(ours.close):
            await use_until_the_end(attempt, shop(), revision, streams=lambda: (ours, theirs))

    assert cancel_at_each_step(scenario, watch=any_task) > 20


@pytest.mark.full
@STREAMS
@ERAS
def test_draining_may_begin_anywhere(revision: str, streams: Callable[[], Any]) -> None:
    async def scenario(attempt: Attempt) -> None:
        drain = trio.Event()
        with attempt.window(drain.set):
            await use_until_the_end(attempt, shop(), revision, streams=attempt.streams(streams), drain=drain)

    assert cancel_at_each_step(scenario, watch=any_task) > 20


def test_nested_groups_of_one_exception_are_removed() -> None:
    mine = KeyError()
    with pytest.raises(KeyError) as caught, unwrapped():
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [mine])])
    assert caught.value is mine
    with pytest.raises(ExceptionGroup), unwrapped():
        raise ExceptionGroup("two", [mine, KeyError()])


def test_a_client_declares_the_capabilities_of_its_revision() -> None:
    stream, _ = one_byte_pipe()
    assert RawClient(stream, "2024-11-05").capabilities.keys() == {"roots", "sampling"}
    assert RawClient(stream, LATEST, capabilities={}).capabilities == {}
