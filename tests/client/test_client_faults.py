"""Faults of the peer or of the link: each call of the client ends in one outcome, and no task is left."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.http_script import URL, ReceivedRequest, ResponseWriter, legacy, modern, scripted_server
from tests.client.matrix import ROOT, Variant, client_of, each_transport, no_tasks_left, serve_over, tcp_connects_to
from tests.cuts import Cuts
from tests.http.scripted_server import SSE_PATHS, A, D, E
from tests.http.served import MemoryListener
from tests.requirements import req
from tests.server.checkpoints import (
    Attempt,
    PipeEnd,
    any_task,
    cancel_at_each_step,
    task_positions,
    unlimited_pipe,
    wait_or_fail,
)
from trio_mcp import Context, Server, UsageError, serve_http, serve_stream
from trio_mcp.client import Client, HandshakeError, NoResponse, connect_client, open_client
from trio_mcp.core import McpError
from trio_mcp.errors import ConnectionFailed, SessionClosed
from trio_mcp.transport import CLOSING, ServerExited, open_nursery
from trio_mcp.types import Tool

JUNK = b"\x00\xffjunk\r\n\r\n{]\n"
WS = "ws://127.0.0.1:3000/ws"
SSE = "http://127.0.0.1:3000/sse"
BOUND = 30.0  # seconds for which a call waits for a server that has become silent


@pytest.fixture
def clock(variant: Variant) -> MockClock:
    return MockClock(rate=1.0) if variant.transport == "child" else MockClock(autojump_threshold=0)


def two_tool_server() -> Server:
    """A server with two tools and short schemas, because the tests cut the exchange after each byte."""
    server = Server("s", version="1")

    async def add(ctx: Context, arguments: Any) -> str:
        await ctx.progress(1)  # makes the answer a stream, on transports that have streams
        return str(arguments["a"] + arguments["b"])

    async def think(ctx: Context, arguments: Any) -> str:
        return (await ctx.sample("?", max_tokens=1)).model

    for tool in (add, think):
        server.add_tool(Tool(tool.__name__, {"type": "object"}), tool)
    return server


# Faults at every byte.


@attrs.define
class Fault:
    """One fault, after `left` bytes that the client reads (or writes), counted over all its connections."""

    left: float
    how: str  # "close", "reset", "stall", "junk"
    writing: bool = False
    happened: bool = False
    passed: bytearray = attrs.field(factory=bytearray)


class FaultyStream(trio.abc.HalfCloseableStream):
    """The client's end of a stream that has the fault."""

    def __init__(self, stream: PipeEnd, fault: Fault) -> None:
        self._stream = stream
        self._fault = fault
        self._dead = False

    def _cut(self, data: bytes, writing: bool) -> bytes:
        """The part of the data that passes before the fault."""
        fault = self._fault
        if fault.happened or fault.writing is not writing:
            return data
        if len(data) < fault.left:
            fault.left -= len(data)
            fault.passed += data
            return data
        fault.happened = self._dead = True
        return data[: int(fault.left)]

    async def _die(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if self._fault.how == "stall":
            await trio.sleep_forever()
        self._stream.close()
        if self._fault.how == "reset":
            raise trio.BrokenResourceError
        return b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._dead:
            return await self._die()
        data = await self._stream.receive_some(max_bytes)
        if not data:
            return data
        passed = self._cut(data, False)
        if self._dead and self._fault.how == "junk":
            passed += JUNK
        return passed or await self._die()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if not self._dead:
            await self._stream.send_all(self._cut(bytes(data), True))
        if self._dead:
            await self._die()
            raise trio.BrokenResourceError

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await self._stream.aclose()


@contextlib.asynccontextmanager
async def serve_with_fault(transport: str, fault: Fault, server: Server) -> AsyncIterator[Any]:
    """Serve the server over the transport, with the fault on the client's streams; yield the target."""
    async with open_nursery() as nursery:
        if transport == "stream":
            ours, theirs = unlimited_pipe()
            nursery.start_soon(serve_stream, server, theirs)
            yield FaultyStream(ours, fault)
            return
        listener = MemoryListener()
        options: dict[str, Any] = {"http json": {"json_only": True}, "http+sse": SSE_PATHS}.get(transport, {})

        async def connect() -> trio.abc.Stream:
            stream = await listener.connect()
            assert isinstance(stream, PipeEnd)
            return FaultyStream(stream, fault)

        await nursery.start(
            lambda task_status: serve_http(
                server, listeners=[listener], allowed_hosts=["127.0.0.1"], task_status=task_status, **options
            )
        )
        with tcp_connects_to(connect):
            yield {"websocket": WS, "http+sse": SSE}.get(transport, URL)


async def outcome(call: Callable[[], Awaitable[Any]], fault: Fault) -> str:
    """How a call ends.  A call may stay without an outcome only if it waits for a silent server."""
    with trio.move_on_after(BOUND):
        try:
            await call()
        except McpError as error:
            return "a usage error" if isinstance(error, UsageError) else "an error"
        return "a result"
    # Junk may have taken the place of a question, and the server waits for its answer.
    assert fault.how in ("stall", "junk"), task_positions()
    return "left"


def _add(client: Client) -> Awaitable[str]:
    return client.call_tool("add", {"a": 1, "b": 2}, returns=str, on_progress=lambda *_: None)


async def _call_three(client: Client, fault: Fault, outcomes: list[str]) -> None:
    async def call(request: Callable[[], Awaitable[Any]]) -> None:
        outcomes.append(await outcome(request, fault))

    await call(client.list_tools)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, lambda: client.call_tool("think"))
        nursery.start_soon(call, lambda: _add(client))


READING, WRITING = ("close", "reset", "stall", "junk"), ("close", "reset", "stall")
FAULTS = [*((how, False) for how in READING), *((how, True) for how in WRITING)]
WAYS = [
    ("stream", D), ("stream", E), ("websocket", E), ("http", D), ("http", E), ("http json", E), ("http+sse", A)
]  # fmt: skip


def _recovers(transport: str, how: str) -> bool:
    """Whether the client works after the fault: it opens another connection, or another session."""
    return transport.startswith("http") and (transport, how) != ("http+sse", "stall")


@pytest.mark.parametrize(("how", "writing"), FAULTS)
@pytest.mark.parametrize(("transport", "revision"), WAYS)
async def test_each_call_has_one_outcome_if_the_link_fails_after_any_byte(
    transport: str, revision: str, how: str, writing: bool, cuts: Cuts, autojump_clock: MockClock
) -> None:
    seen: set[str] = set()

    async def run(fault: Fault) -> list[str]:
        outcomes: list[str] = []
        start = trio.current_time()
        async with no_tasks_left(), serve_with_fault(transport, fault, two_tool_server()) as target:
            try:
                async with open_client(target, revision=revision, sampling=lambda asked: ("x", "m")) as client:
                    await _call_three(client, fault, outcomes)
                    assert len(outcomes) == 3
                    if fault.happened and _recovers(transport, how):
                        if transport == "http+sse":  # the client may see the end of the stream only now
                            await outcome(lambda: _add(client), fault)
                        assert await _add(client) == "3"
            except McpError as error:
                seen.add("not opened" if not outcomes else f"after it was opened: {error!r}")
        if "left" not in outcomes and how != "stall":
            assert trio.current_time() - start <= 3 * CLOSING + 1
        return outcomes

    whole = Fault(math.inf, how, writing)
    assert await run(whole) == ["a result"] * 3
    for after in cuts(bytes(whole.passed)):
        fault = Fault(after, how, writing)
        outcomes = await run(fault)
        assert fault.happened or outcomes == ["a result"] * 3
        seen.update(outcomes)
    assert seen - {"left"} <= {"not opened", "a result", "an error"}
    assert {"not opened", "a result"} <= seen


@pytest.mark.parametrize("status", [400, 404])
async def test_an_answer_received_before_its_connection_broke_is_no_deviation(
    status: int, autojump_clock: MockClock
) -> None:
    """The server refuses the second sending, because it waits for no answer.  The session goes on."""
    answered = trio.Event()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/call":
            await out.begin()
            sample = {"messages": [], "maxTokens": 1}
            await out.event({"jsonrpc": "2.0", "id": 1, "method": "sampling/createMessage", "params": sample})
            await answered.wait()
            await out.event(received.answer({"content": []}))
            await out.end()
        elif received.operation == "GET":
            await out.reply(405)
        elif received.operation == "answer" and not answered.is_set():
            answered.set()
            out.close()
        else:
            await out.reply(status)

    async with no_tasks_left(), scripted_server(legacy(handle)) as server:
        with tcp_connects_to(server.connect):
            async with open_client(URL, revision=D, sampling=lambda asked: ("x", "m")) as client:
                with trio.fail_after(BOUND):
                    await client.call_tool("t")
                await wait_all_tasks_blocked()
                assert client.deviations == ()
        assert server.operations.count("answer") == 2
        assert server.operations.count("initialize") == 1


@pytest.mark.parametrize("cuts", [1, 2, 5])
async def test_an_answer_is_sent_again_if_its_connection_breaks(cuts: int, autojump_clock: MockClock) -> None:
    answered = trio.Event()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/call":
            await out.begin()
            sample = {"messages": [], "maxTokens": 1}
            await out.event({"jsonrpc": "2.0", "id": 1, "method": "sampling/createMessage", "params": sample})
            await answered.wait()
            await out.event(received.answer({"content": []}))
            await out.end()
        elif received.operation == "GET":  # keeps this connection busy, so that the answer needs a new one
            await out.begin()
            await out.wait_for_close()
        elif received.operation == "answer" and server.operations.count("answer") <= cuts:
            out.close()
        else:
            await out.reply(202)
            answered.set()

    async with no_tasks_left(), scripted_server(legacy(handle)) as server:
        with tcp_connects_to(server.connect):
            async with open_client(URL, revision=D, sampling=lambda asked: ("x", "m")) as client:
                await wait_all_tasks_blocked()  # until it listens
                with trio.fail_after(BOUND):
                    await client.call_tool("t")
                assert server.operations.count("answer") == cuts + 1
                assert client.deviations == ()


# Cancelling at every step, and ends at every step.


CANCELLED = {"memory": (D, E), "websocket": (E,), "http": (D, E), "http+sse": (A,)}


@pytest.mark.parametrize(
    "variant", [Variant(transport, each) for transport, known in CANCELLED.items() for each in known], ids=" ".join
)
@pytest.mark.parametrize("watch", ["the scenario", any_task], ids=["its task", "any task"])
def test_a_client_may_be_cancelled_at_any_step(variant: Variant, watch: Any) -> None:
    async def scenario(attempt: Attempt) -> None:
        options: dict[str, Any] = {"revision": variant.revision, "sampling": lambda asked: ("x", "m")}
        server = two_tool_server()
        async with serve_over(variant.transport, server) as target:
            with attempt.window():
                async with open_client(target, **options) as client, client.listen(tools=True) as changes:
                    await client.call_tool("think")
                    server.notify_list_changed("tools")
                    await anext(changes)
            await wait_all_tasks_blocked()

    assert cancel_at_each_step(scenario, watch=watch) > 5


@pytest.mark.parametrize("revision", [D, E])
def test_the_link_may_end_at_any_step_and_no_call_waits(revision: str) -> None:
    async def listen(client: Client) -> None:
        async with client.listen(tools=True) as changes:
            await anext(changes)

    async def scenario(attempt: Attempt) -> None:
        server = Server("s", capabilities=["tools"])
        ours, theirs = unlimited_pipe()
        async with open_nursery() as nursery:
            nursery.start_soon(serve_stream, server, theirs)
            with attempt.window(ours.close), contextlib.suppress(McpError):
                async with open_client(ours, revision=revision) as client:
                    await outcome(client.list_tools, Fault(0, "close"))
                    if attempt.fired:
                        with pytest.raises(McpError):
                            await wait_or_fail(lambda: listen(client), "the end")

    assert cancel_at_each_step(scenario, watch=any_task) > 5


async def test_an_exception_of_a_cancelled_block_is_not_lost(autojump_clock: MockClock) -> None:
    own = KeyError("mine")

    async def block() -> None:
        with trio.CancelScope() as scope:
            async with open_client(two_tool_server()) as client:
                await client.list_tools_page()
                scope.cancel()
                raise own

    with pytest.raises(KeyError) as raised:
        await block()
    assert raised.value is own


@each_transport()
async def test_a_cancelled_client_leaves_no_tasks(variant: Variant, clock: MockClock) -> None:
    with trio.CancelScope() as scope:
        async with client_of(variant) as client:
            await client.call_tool("greet", {"name": "you"})
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught


# No server, or a silent one.


async def _refuse_connection() -> trio.abc.Stream:
    await trio.lowlevel.checkpoint()
    raise OSError("connection refused")


async def _connect_to_silent_peer() -> trio.abc.Stream:
    await trio.lowlevel.checkpoint()
    return unlimited_pipe()[0]


@pytest.mark.parametrize("url", [URL, WS])
async def test_connecting_to_a_closed_port_fails_at_once(url: str, autojump_clock: MockClock) -> None:
    async with no_tasks_left():
        start = trio.current_time()
        with tcp_connects_to(_refuse_connection):
            with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:3000.*connection refused"):
                async with open_client(url):
                    raise AssertionError("it was opened")
            async with trio.open_nursery() as nursery:
                with pytest.raises(ConnectionFailed):
                    await connect_client(nursery, url)
        assert trio.current_time() == start


@pytest.mark.parametrize("target", [URL, WS, "a stream"])
async def test_opening_a_silent_server_ends_with_an_error(target: str, autojump_clock: MockClock) -> None:
    async with no_tasks_left():
        start = trio.current_time()
        with (
            tcp_connects_to(_connect_to_silent_peer),
            pytest.raises(McpError, match=r"in time|within|silent") as given_up,
        ):
            async with open_client(unlimited_pipe()[0] if target == "a stream" else target):
                raise AssertionError("it was opened")
        assert isinstance(given_up.value, ConnectionFailed if target == WS else HandshakeError)
        assert trio.current_time() - start <= 300 + CLOSING


@pytest.mark.parametrize("target", ["http://", "http://[", "https://x:99999", "ftp://x", "ws://[", "server.py", [], 7])
async def test_an_invalid_target_is_refused(target: Any) -> None:
    with pytest.raises(UsageError):
        async with open_client(target):
            raise AssertionError("it was opened")


# A child process.


async def test_the_error_of_a_server_that_exits_early_has_its_status_and_stderr() -> None:
    program = "import sys; print('no API key', file=sys.stderr); sys.exit(3)"
    async with no_tasks_left():
        with pytest.raises(ServerExited, match="no API key") as exited:
            async with open_client([sys.executable, "-c", program]):
                raise AssertionError("it was opened")
        assert "".join(traceback.format_exception(exited.value)).count("its last lines on stderr:\n  no API key") == 1
        assert exited.value.status == 3
        assert exited.value.stderr_tail == "no API key\n"


@req("stdio-12")
async def test_a_server_that_exits_in_a_call_ends_all_calls_with_that_error() -> None:
    program = (
        "import sys, trio, os\nfrom trio_mcp import Server\ns = Server('s')\n"
        "async def die() -> None:\n    os.write(2, b'out of bread'); os._exit(9)\n"
        "async def wait() -> None:\n    await trio.sleep_forever()\n"
        "s.tool(die); s.tool(wait); s.run()"
    )
    errors: list[McpError] = []

    async def call(client: Client, name: str) -> None:
        with pytest.raises(ServerExited) as exited:
            await client.call_tool(name)
        errors.append(exited.value)

    async with no_tasks_left(), open_client([sys.executable, "-c", program], cwd=ROOT) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, client, "wait")
            nursery.start_soon(call, client, "wait")
            await wait_all_tasks_blocked()
            nursery.start_soon(call, client, "die")
        await call(client, "wait")
        with pytest.raises(ServerExited):
            async with client.listen(tools=True):
                raise AssertionError("the server has exited")
    assert len({id(error) for error in errors}) == 4
    assert {error.status for error in errors if isinstance(error, ServerExited)} == {9}
    assert "out of bread" in str(errors[0])


async def test_the_exit_status_is_reported_after_stdout_was_closed_first() -> None:
    program = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        result = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
    elif asked["method"] == "ping":
        os.close(1); time.sleep(0.8); os.write(2, b"out of bread"); os._exit(7)
"""
    error: SessionClosed | None = None
    async with no_tasks_left(), open_client([sys.executable, "-c", program], revision="2025-11-25") as client:
        with trio.fail_after(10):
            while not isinstance(error, ServerExited):
                with pytest.raises(SessionClosed) as lost:
                    await client.ping()
                error = lost.value
                await trio.sleep(0.05)
    assert error.status == 7
    assert "out of bread" in str(error)


# The messages that a client writes to a stream.


@contextlib.asynccontextmanager
async def scripted_stream(answer: Callable[[dict[str, Any]], Iterator[Any]], **options: Any) -> AsyncIterator[Any]:
    """A stream target that answers each message by `answer`, and the list of the messages that it received."""
    ours, theirs = unlimited_pipe()
    sent: list[Any] = []

    async def respond() -> None:
        rest = b""
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await theirs.receive_some():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    sent.append(json.loads(line))
                    for said in answer(sent[-1]):
                        raw = said if isinstance(said, bytes) else json.dumps({"jsonrpc": "2.0", **said}).encode()
                        await theirs.send_all(raw + b"\n")

    async with open_nursery() as nursery:
        nursery.start_soon(respond)
        yield ours, sent


INITIALIZED = {"protocolVersion": D, "capabilities": {"tools": {}}, "serverInfo": {"name": "p", "version": "1"}}
DISCOVERED = {"supportedVersions": [E], "capabilities": {"tools": {}}, "resultType": "complete"}


def error_of(code: int, data: Any = None) -> dict[str, Any]:
    return {"error": {"code": code, "message": "what?", **({} if data is None else {"data": data})}}


@req("stdio-17", "stdio-16")
@pytest.mark.parametrize(
    "probed",
    [
        *(error_of(code) for code in (-32601, -32600, -32602, -32603, -32700, -32000, -32001, 0, 1, -31999)),
        {"result": {}}, {"result": {"protocolVersion": D}}, {"result": 7}, None,
    ],
)  # fmt: skip
async def test_any_non_modern_answer_to_the_probe_leads_to_initialize(probed: Any, autojump_clock: MockClock) -> None:
    def answer(message: dict[str, Any]) -> Iterator[Any]:
        if message["method"] == "server/discover" and probed is not None:
            yield {"id": message["id"], **probed}
        elif message["method"] == "initialize":
            yield {"id": message["id"], "result": INITIALIZED}

    async with no_tasks_left(), scripted_stream(answer) as (stream, sent):
        start = trio.current_time()
        async with open_client(stream) as client:
            assert client.revision == D
            assert trio.current_time() - start == (5 if probed is None else 0)
        assert [each["method"] for each in sent if each["method"] != "notifications/cancelled"] == [
            "server/discover", "initialize", "notifications/initialized"
        ]  # fmt: skip


@req("ver-14", "stdio-18")
@pytest.mark.parametrize(
    "refusal", [error_of(-32022, {"supported": ["2030-01-01"], "requested": E}), error_of(-32021), error_of(-32020)]
)
async def test_a_modern_server_that_refuses_the_probe_is_never_initialized(
    refusal: Any, autojump_clock: MockClock
) -> None:
    def answer(message: dict[str, Any]) -> Iterator[Any]:
        yield {"id": message["id"], **refusal}

    async with no_tasks_left(), scripted_stream(answer) as (stream, sent):
        with pytest.raises(HandshakeError) as refused:
            async with open_client(stream):
                raise AssertionError("it was opened")
        assert "seconds" not in str(refused.value)  # this word is in the error of an answer that is too late
        assert [each["method"] for each in sent] == ["server/discover"]


@req("stdio-13")
async def test_a_modern_server_is_never_sent_a_response(autojump_clock: MockClock) -> None:
    def answer(message: dict[str, Any]) -> Iterator[Any]:
        if message.get("method") == "server/discover":
            yield {"id": message["id"], "result": DISCOVERED}
            return
        yield b"{ no JSON"
        yield {"id": 7, "method": "ping"}
        yield {"id": "x", "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}
        yield {"id": 8, "method": 9}
        yield {"id": message["id"], "result": {"resultType": "complete", "content": []}}

    async with (
        scripted_stream(answer) as (stream, sent),
        open_client(stream, sampling=lambda asked: ("x", "m")) as client,
    ):
        await client.call_tool("t")
        await client.call_tool("t")
        await wait_all_tasks_blocked()
        assert len(client.deviations) == 2 * 4
        assert [each["method"] for each in sent] == ["server/discover", "tools/call", "tools/call"]


@req("stdio-04")
@each_transport(without=["http", "http json", "http+sse", "websocket"])
async def test_only_messages_are_written_to_the_input_of_a_server(variant: Variant, clock: MockClock) -> None:
    said = bytearray()

    def tap(direction: str, data: bytes) -> None:
        if direction == "out":
            said.extend(data)

    async with client_of(variant, tap=tap, sampling=lambda asked: ("x", "m"), roots=["/srv"]) as client:
        await client.call_tool("think")
        await client.call_tool("greet", {"name": "one\ntwo"})
        with trio.move_on_after(0):
            await client.call_tool("greet", {"name": "x"})
        await client.set_roots(["/home"])
    *lines, rest = bytes(said).split(b"\n")
    assert rest == b""
    messages = [json.loads(line) for line in lines]
    assert len(messages) > 3
    assert all(each["jsonrpc"] == "2.0" and ("method" in each or "id" in each) for each in messages)


# Descriptions of tools.

HINTS = {"readOnlyHint": True, "idempotentHint": True, "destructiveHint": False}


@req("tool-10")
@pytest.mark.parametrize("annotations", [HINTS, {}, None])
async def test_annotations_of_a_tool_do_not_change_the_calls(annotations: Any, autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/list":
            tool = {"name": "t", "inputSchema": {"type": "object"}}
            tools = [tool if annotations is None else {**tool, "annotations": annotations}]
            await out.json(received.answer({"tools": tools, "resultType": "complete"}))
        else:
            out.close()  # perhaps it has run

    async with no_tasks_left(), scripted_server(modern(handle)) as server:
        with tcp_connects_to(server.connect):
            async with open_client(URL) as client:
                assert [tool.name for tool in await client.list_tools()] == ["t"]
                with pytest.raises(NoResponse) as lost:
                    await client.call_tool("t")
                assert lost.value.request_may_have_run
        assert server.operations.count("tools/call") == 1  # also if the annotations say that a repetition is harmless


HEADERS: dict[str, Any] = {
    "not a name": {"type": "string", "x-mcp-header": "no name"},
    "empty": {"type": "string", "x-mcp-header": ""},
    "no string": {"type": "string", "x-mcp-header": 7},
    "of an object": {"type": "object", "x-mcp-header": "Region"},
    "below": {"type": "array", "items": {"type": "string", "x-mcp-header": "Region"}},
}


@req("http-85", "http-86")
@pytest.mark.parametrize("fault", [*HEADERS, "twice"])
async def test_a_tool_with_invalid_headers_is_left_out_over_http_only(
    fault: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    good = {"type": "string", "x-mcp-header": "Region"}
    properties = {"a": good, "b": {**good, "x-mcp-header": "region"}} if fault == "twice" else {"a": HEADERS[fault]}
    tools = [
        {"name": "before", "inputSchema": {"type": "object", "properties": {"a": good}}},
        {"name": "bad", "inputSchema": {"type": "object", "properties": properties}},
        {"name": "after", "inputSchema": {"type": "object"}},
    ]

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.json(received.answer({"tools": tools, "resultType": "complete"}))

    def answer(message: dict[str, Any]) -> Iterator[Any]:
        found = DISCOVERED if message["method"] == "server/discover" else {"tools": tools, "resultType": "complete"}
        yield {"id": message["id"], "result": found}

    async with scripted_server(modern(handle)) as server:
        with tcp_connects_to(server.connect):
            async with open_client(URL) as client:
                assert [tool.name for tool in await client.list_tools()] == ["before", "after"]
                assert any("'bad'" in each for each in client.deviations)
                assert any(
                    "'bad' is left out" in each.message for each in caplog.records if each.levelname == "WARNING"
                )
    async with scripted_stream(answer) as (stream, _), open_client(stream) as client:
        assert [tool.name for tool in await client.list_tools()] == ["before", "bad", "after"]
        assert client.deviations == ()
