"""What an application needs that shows servers to users and models: limits of its own, and errors to tell apart."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

from tests.client.everywhere import nothing_left
from tests.client.house import build
from tests.client.test_client_faults import DISCOVERED, played
from tests.http.stage import D, E
from tests.requirements import req
from trio_mcp import Context, McpError, PromptReference, RequestError, Server, open_client, serve_stream
from trio_mcp.answering import FormRequest, SamplingRequest
from trio_mcp.core.content import TextContent
from trio_mcp.core.errors import ConnectionFailed, LocalProtocolError, RemoteProtocolError, SessionClosed
from trio_mcp.core.models import CreateMessageResult
from trio_mcp.testing import open_memory_pair

BOTH = pytest.mark.parametrize("revision", [D, E])


@req("core-26")
@pytest.mark.parametrize("ours", [SessionClosed, RemoteProtocolError, LocalProtocolError, ConnectionFailed])
def test_what_happened_here_is_never_an_error_that_was_received(ours: type[McpError]) -> None:
    assert issubclass(ours, McpError)
    assert not issubclass(ours, RequestError)
    assert not issubclass(ours, trio.TooSlowError)


@BOTH
@req("time-06")
async def test_progress_does_not_put_off_the_end_of_a_callers_patience(
    revision: str, autojump_clock: MockClock
) -> None:
    server = Server("tireless")

    @server.tool
    async def work(ctx: Context) -> None:
        for step in range(1000):
            await ctx.progress(step, 1000)
            await trio.sleep(1)

    heard: list[float] = []
    async with nothing_left(), open_memory_pair(server, revision=revision) as pair:
        start = trio.current_time()
        with trio.move_on_after(60) as scope:
            await pair.client.call_tool("work", on_progress=lambda done, total, message: heard.append(done))
        assert scope.cancelled_caught
        assert trio.current_time() - start == pytest.approx(60)
    assert len(heard) > 10


@BOTH
@req("tool-09")
async def test_a_call_has_a_timeout_and_all_that_was_said_can_be_kept(revision: str, autojump_clock: MockClock) -> None:
    said: list[tuple[str, bytes]] = []
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, build(), theirs)
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
async def test_how_often_a_server_may_ask_is_for_a_callback_to_say(revision: str, autojump_clock: MockClock) -> None:
    """It may wait as long as it likes, and the server is only told when it has returned."""
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

    async def fill(form: FormRequest) -> dict[str, str]:
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


@req("tool-29", "tool-15")
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

    async with played(answer) as (stream, _), open_client(stream) as client:
        assert [each.name async for each in client.tools()] == ["t"]
        result = await client.call_tool("t")
        assert result.structured_content == {"x": 1}
        assert any(f'"{reference}" leads to nothing in the schema' in each for each in client.deviations)


@req("cmpl-03")
@pytest.mark.parametrize(
    ("completion", "more"),
    [({"values": []}, None), ({"values": ["a"]}, None), ({"values": ["a"], "hasMore": True}, True)],
)
async def test_a_completion_may_be_a_part_of_what_there_is_or_nothing(
    completion: dict[str, Any], more: bool | None, autojump_clock: MockClock
) -> None:
    def answer(message: dict[str, Any]) -> Any:
        found = {**DISCOVERED, "capabilities": {"completions": {}, "prompts": {}}}
        if message["method"] != "server/discover":
            found = {"completion": completion, "resultType": "complete"}
        yield {"id": message["id"], "result": found}

    async with played(answer) as (stream, _), open_client(stream) as client:
        found = await client.complete(PromptReference("p"), "a", "v")
    assert list(found.values) == completion["values"]
    assert found.has_more is more


@BOTH
@req("elic-42")
async def test_what_looks_like_a_url_in_a_form_is_text(revision: str, autojump_clock: MockClock) -> None:
    """Nobody looks at it or changes it: what is shown, and how, is the callback's."""
    server = Server("linking")
    said = "See https://pay.example/?a=1&b=<2> first"
    asked = {"type": "object", "properties": {"name": {"type": "string", "description": said, "default": said}}}

    @server.tool
    async def link(ctx: Context) -> None:
        await ctx.elicit(said, asked)

    heard: list[FormRequest] = []

    async def decline(form: FormRequest) -> None:
        heard.append(form)

    async with open_memory_pair(server, revision=revision, elicitation=decline) as pair:
        await pair.client.call_tool("link")
    assert heard[0].message == said
    assert heard[0].defaults == {"name": said}
