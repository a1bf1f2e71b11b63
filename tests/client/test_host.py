"""The needs of a host application, which shows servers to users and models: its own limits, and distinct errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.client.matrix import no_tasks_left
from tests.client.sample_server import sample_server
from tests.client.test_client_faults import DISCOVERED, INITIALIZED, scripted_stream
from tests.http.scripted_server import D, E
from tests.requirements import req
from trio_mcp import (
    Client,
    Context,
    McpError,
    RequestError,
    ResourceNotFound,
    Server,
    connect_client,
    open_client,
    serve_stream,
)
from trio_mcp.client import FormElicitationRequest, SamplingRequest
from trio_mcp.core import (
    ConnectionFailed,
    CreateMessageResult,
    RemoteProtocolError,
    SessionClosed,
    TextContent,
    Tool,
    UsageError,
)
from trio_mcp.testing import open_memory_pair
from trio_mcp.types import PromptReference

BOTH = pytest.mark.parametrize("revision", [D, E])


@req("core-26")
@pytest.mark.parametrize("ours", [SessionClosed, RemoteProtocolError, UsageError, ConnectionFailed])
def test_local_errors_are_not_request_errors(ours: type[McpError]) -> None:
    assert issubclass(ours, McpError)
    assert not issubclass(ours, RequestError)
    assert not issubclass(ours, trio.TooSlowError)


@BOTH
@req("time-06")
async def test_progress_does_not_extend_the_timeout_of_the_caller(revision: str, autojump_clock: MockClock) -> None:
    server = Server("tireless")

    @server.tool
    async def work(ctx: Context) -> None:
        for step in range(1000):
            await ctx.progress(step, 1000)
            await trio.sleep(1)

    received: list[float] = []
    async with no_tasks_left(), open_memory_pair(server, revision=revision) as pair:
        start = trio.current_time()
        with trio.move_on_after(60) as scope:
            await pair.client.call_tool("work", on_progress=lambda done, total, message: received.append(done))
        assert scope.cancelled_caught
        assert trio.current_time() - start == pytest.approx(60)
    assert len(received) > 10


@BOTH
@req("tool-09")
async def test_a_call_can_have_a_timeout_and_the_tap_gets_all_messages(
    revision: str, autojump_clock: MockClock
) -> None:
    said: list[tuple[str, bytes]] = []
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, sample_server(), theirs)
        async with open_client(
            ours, revision=revision, tap=lambda way, data: said.append((way, bytes(data)))
        ) as client:
            with pytest.raises(trio.TooSlowError), trio.fail_after(3):
                await client.call_tool("hold", {"name": "for the record"})
    out = b"".join(data for way, data in said if way == "out")
    assert b"for the record" in out
    assert b"notifications/cancelled" in out


@BOTH
@req("samp-09", "elic-09")
async def test_a_callback_can_limit_the_rate_of_questions(revision: str, autojump_clock: MockClock) -> None:
    """A callback may wait as long as it needs.  The server gets the answer when the callback returns."""
    server = Server("curious")

    @server.tool
    async def wonder(ctx: Context, number: int) -> str:
        await ctx.elicit("A name?", {"type": "object", "properties": {"name": {"type": "string"}}})
        return (await ctx.sample(f"question {number}", max_tokens=9)).model

    one_at_a_time = trio.CapacityLimiter(1)
    times: list[float] = []

    async def think(request: SamplingRequest) -> CreateMessageResult:
        async with one_at_a_time:
            times.append(trio.current_time())
            await trio.sleep(10)
        return CreateMessageResult("assistant", TextContent("so"), "a model")

    async def fill(form: FormElicitationRequest) -> dict[str, str]:
        async with one_at_a_time:
            times.append(trio.current_time())
            await trio.sleep(10)
        return {"name": "Ada"}

    async with (
        open_memory_pair(server, revision=revision, sampling=think, elicitation=fill) as pair,
        trio.open_nursery() as nursery,
    ):
        for number in range(3):
            nursery.start_soon(pair.client.call_tool, "wonder", {"number": number})
    assert [round(after - before) for before, after in itertools.pairwise(times)] == [10] * 5


@req("tool-29")
@pytest.mark.parametrize("reference", ["http://127.0.0.1:9/a.json", "file:///etc/hostname", "other.json"])
async def test_no_reference_in_a_servers_schema_is_fetched(reference: str, autojump_clock: MockClock) -> None:
    tool = {"name": "t", "inputSchema": {"type": "object"}, "outputSchema": {"type": "object", "$ref": reference}}

    def answer(message: dict[str, Any]) -> Any:
        results: dict[str, dict[str, Any]] = {
            "server/discover": DISCOVERED,
            "tools/list": {"tools": [tool], "resultType": "complete"},
            "tools/call": {"content": [], "structuredContent": {"x": 1}, "resultType": "complete"},
        }
        yield {"id": message["id"], "result": results[message["method"]]}

    async with scripted_stream(answer) as (stream, _), open_client(stream) as client:
        assert [each.name for each in await client.list_tools()] == ["t"]
        result = await client.call_tool("t")
        assert result.structured_content == {"x": 1}
        assert any(f'"{reference}" has no target in the schema' in each for each in client.deviations)


@req("cmpl-03")
@pytest.mark.parametrize(
    ("completion", "more"),
    [({"values": []}, None), ({"values": ["a"]}, None), ({"values": ["a"], "hasMore": True}, True)],
)
async def test_a_completion_may_be_partial_or_empty(
    completion: dict[str, Any], more: bool | None, autojump_clock: MockClock
) -> None:
    def answer(message: dict[str, Any]) -> Any:
        found = {**DISCOVERED, "capabilities": {"completions": {}, "prompts": {}}}
        if message["method"] != "server/discover":
            found = {"completion": completion, "resultType": "complete"}
        yield {"id": message["id"], "result": found}

    async with scripted_stream(answer) as (stream, _), open_client(stream) as client:
        found = await client.complete(PromptReference("p"), "a", "v")
    assert list(found.values) == completion["values"]
    assert found.has_more is more


@BOTH
@req("elic-42")
async def test_a_url_in_a_form_is_plain_text(revision: str, autojump_clock: MockClock) -> None:
    """The client neither follows nor changes it.  The callback decides how to show it."""
    server = Server("linking")
    said = "See https://pay.example/?a=1&b=<2> first"
    asked = {"type": "object", "properties": {"name": {"type": "string", "description": said, "default": said}}}

    @server.tool
    async def link(ctx: Context) -> None:
        await ctx.elicit(said, asked)

    received: list[FormElicitationRequest] = []

    async def decline(form: FormElicitationRequest) -> None:
        received.append(form)

    async with open_memory_pair(server, revision=revision, elicitation=decline) as pair:
        await pair.client.call_tool("link")
    assert received[0].message == said
    assert received[0].defaults == {"name": said}


@BOTH
@req("tool-01")
async def test_an_application_can_confirm_or_deny_a_call_before_it_is_sent(
    revision: str, autojump_clock: MockClock
) -> None:
    """The application knows the call and the description of the tool before a message is sent.  A denied call is not
    sent, and the server does not learn of it."""
    shown: list[tuple[str, str | None, dict[str, Any]]] = []

    def confirmed(tool: Tool, arguments: dict[str, Any]) -> bool:
        shown.append((tool.name, tool.description, arguments))
        return "rm" not in arguments["command"]

    server = Server("shell")

    @server.tool
    async def run(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    ran = []
    async with open_memory_pair(server, revision=revision) as pair:
        tools = {tool.name: tool for tool in await pair.client.list_tools()}
        wanted: list[tuple[str, dict[str, Any]]] = [("run", {"command": "ls"}), ("run", {"command": "rm -r /"})]
        for name, arguments in wanted:
            await wait_all_tasks_blocked()
            before = len(pair.transcript)
            allowed = confirmed(tools[name], arguments)
            assert len(pair.transcript) == before
            if allowed:
                ran.append(await pair.client.call_tool(name, arguments, returns=str))
    assert shown == [(name, "Run a command.", arguments) for name, arguments in wanted]
    assert ran == ["ran ls"]
    assert "rm -r" not in str(pair.transcript)


@req("ping-03", "ping-04", "ping-05")
@pytest.mark.parametrize(("every", "patience"), [(30, 10), (2, 0.5)])
async def test_an_application_can_ping_with_its_own_interval_and_timeout(
    every: float, patience: float, autojump_clock: MockClock
) -> None:
    """The client sends no ping by itself.  The application pings in a loop in its own nursery."""
    asleep = trio.Event()

    def pings(received: list[dict[str, Any]]) -> int:
        return [message["method"] for message in received].count("ping")

    def answer(message: dict[str, Any]) -> Any:
        if "id" in message and not asleep.is_set():
            yield {"id": message["id"], "result": INITIALIZED if message["method"] == "initialize" else {}}

    async def watch(client: Client) -> None:
        while True:
            with trio.move_on_after(patience) as scope:
                await client.ping()
            if scope.cancelled_caught:
                await client.aclose()
                return
            await trio.sleep(every)

    async with scripted_stream(answer) as (stream, received), trio.open_nursery() as nursery:
        client = await connect_client(nursery, stream, revision=D)
        await trio.sleep(1000)
        assert pings(received) == 0
        nursery.start_soon(watch, client)
        await trio.sleep(10 * every - 1)
        assert pings(received) == 10
        asleep.set()
        start = trio.current_time()
        with pytest.raises(SessionClosed):
            await client.call_tool("t")
        assert trio.current_time() - start <= every + patience
        nursery.cancel_scope.cancel()


@req("res-08")
@pytest.mark.parametrize(
    ("revision", "code", "missing"),
    [(D, -32002, True), (D, -32602, True), (E, -32602, True), (E, -32002, True), (E, -32603, False)],
)
async def test_a_missing_resource_is_recognized_by_the_codes_of_both_eras(
    revision: str, code: int, missing: bool, autojump_clock: MockClock
) -> None:
    def answer(message: dict[str, Any]) -> Any:
        if message["method"] == "resources/read":
            yield {"id": message["id"], "error": {"code": code, "message": "gone", "data": {"since": 2}}}
        elif "id" in message:
            opened = INITIALIZED if message["method"] == "initialize" else DISCOVERED
            yield {"id": message["id"], "result": {**opened, "capabilities": {"resources": {}}}}

    async with scripted_stream(answer) as (stream, _), open_client(stream, revision=revision) as client:
        with pytest.raises(RequestError) as refused:
            await client.read_resource("notes://gone")
    assert isinstance(refused.value, ResourceNotFound) is missing
    assert (refused.value.code, refused.value.message, refused.value.data) == (code, "gone", {"since": 2})


@req("log-07")
@pytest.mark.parametrize(
    "params", [{"level": "loud", "data": 1}, {"level": "info"}, {"data": 1}, {"level": 3, "data": 1}]
)
async def test_an_invalid_log_message_is_a_deviation_and_reaches_no_callback(
    params: dict[str, Any], autojump_clock: MockClock
) -> None:
    def answer(message: dict[str, Any]) -> Any:
        if message["method"] == "initialize":
            yield {"id": message["id"], "result": {**INITIALIZED, "capabilities": {"logging": {}, "tools": {}}}}
        elif message["method"] == "tools/call":
            yield {"method": "notifications/message", "params": params}
            yield {"method": "notifications/message", "params": {"level": "info", "data": {"a": 1}, "logger": "here"}}
            yield {"id": message["id"], "result": {"content": []}}
        elif "id" in message:
            yield {"id": message["id"], "result": {}}

    received: list[Any] = []
    said: list[bytes] = []
    async with (
        scripted_stream(answer) as (stream, _),
        open_client(
            stream, revision=D, on_log=received.append, tap=lambda way, data: said.append(bytes(data))
        ) as client,
    ):
        await client.call_tool("t")
        assert [(each.level, each.data, each.logger) for each in received] == [("info", {"a": 1}, "here")]
        assert any("LoggingMessage" in each for each in client.deviations)
    assert b"".join(said).count(b"notifications/message") == 2
