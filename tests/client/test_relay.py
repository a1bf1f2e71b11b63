"""A relay: a server that forwards to an upstream server, with each revision downstream and upstream."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.client.memory_links import Peer
from tests.client.sample_server import sample_server
from tests.server.checkpoints import Attempt, any_task, cancel_at_each_step, wait_or_fail
from trio_mcp import (
    Accepted,
    Context,
    Declined,
    Elicit,
    ElicitUrl,
    RequestError,
    Sample,
    Server,
    UsageError,
    serve_http,
    serve_stream,
)
from trio_mcp.client import Client, open_client
from trio_mcp.core import METHOD_NOT_FOUND, MISSING_CLIENT_CAPABILITY, REVISIONS, LoggingMessageParams
from trio_mcp.errors import SessionClosed
from trio_mcp.relay import open_relay
from trio_mcp.relay.relay import ASKS, Relay  # the command line opens its own relay
from trio_mcp.transport.nursery import Block  # it opens the relay
from trio_mcp.types import CallToolResult, PromptReference, ResourceReference, Tool

A, B, C, D, E = REVISIONS
HERE = Path(__file__).parent
each_server_revision = pytest.mark.parametrize("server_revision", list(REVISIONS))
each_client_revision = pytest.mark.parametrize("client_revision", list(REVISIONS))


@contextlib.asynccontextmanager
async def relayed(
    server: Server, server_revision: str, client_revision: str, relay: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Client]:
    """A client of a relay of the server, with a revision for the client and another for the server."""
    async with (
        open_relay(server, revision=server_revision, **(relay or {})) as relay_server,
        open_client(relay_server, revision=client_revision, **options) as client,
    ):
        yield client


def text_of(result: CallToolResult) -> str:
    said: str = result.content[0].text  # type: ignore[union-attr]  # all content of the sample server is text
    return said


# The features that a client gets through a relay, with each pair of revisions.


async def identity(client: Client, oldest: str) -> None:
    assert client.server["name"] == "house"
    assert client.server["version"] == "7"
    assert client.instructions == "Knock first."


async def lists_page_by_page(client: Client, oldest: str) -> None:
    tools = [tool.name for tool in await client.list_tools()]
    assert tools == [name for name in TOOLS if name in tools]
    assert len(tools) == len(TOOLS)
    page = await client.list_tools_page()
    assert len(page.tools) == 3
    assert page.next_cursor is not None
    assert [each.name for each in await client.list_resources()] == ["one", "two", "three", "four"]
    assert "rooms://{name}" in [each.uri_template for each in await client.list_resource_templates()]
    assert [each.name for each in await client.list_prompts()] == ["review", "short", "long", "wide"]


async def results(client: Client, oldest: str) -> None:
    assert text_of(await client.call_tool("add", {"a": 1, "b": 2})) == "3"
    assert await client.call_tool("words", {"count": 2}, returns=list[str]) == ["word 0", "word 1"]
    found = await client.call_tool("forecast", {"city": "Oslo"})
    if oldest >= C:
        assert found.structured_content == {"city": "Oslo", "degrees": [1, 2, 3]}
    assert '"Oslo"' in text_of(found)


async def failures(client: Client, oldest: str) -> None:
    failed = await client.call_tool("fail", {"why": "rain"})
    assert failed.is_error
    assert text_of(failed) == "rain"


async def errors_with_their_codes(client: Client, oldest: str) -> None:
    with pytest.raises(RequestError) as raised:
        await client.call_tool("refuse", {"code": 7})
    assert (raised.value.code, raised.value.message) == (7, "not today")
    assert raised.value.data == {"why": "closed"}
    with pytest.raises(RequestError) as raised:
        await client.call_tool("nothing")
    assert raised.value.code == -32602
    with pytest.raises(RequestError) as raised:
        await client.get_prompt("nothing")
    assert raised.value.code == -32602
    with pytest.raises(RequestError):
        await client.list_tools_page(cursor="nonsense")


async def resources(client: Client, oldest: str) -> None:
    assert (await client.read_resource("house://one")).contents[0].text == "inside house://one"  # type: ignore[union-attr]
    assert (await client.read_resource("rooms://red")).contents[0].text == "the room red"  # type: ignore[union-attr]
    with pytest.raises(RequestError) as raised:
        await client.read_resource("house://nowhere")
    assert raised.value.code == (-32602 if client.revision == E else -32002)


async def prompts_and_completions(client: Client, oldest: str) -> None:
    filled = await client.get_prompt("review", {"code": "x = 1"})
    assert filled.messages[0].content.text == "Review this python: x = 1"  # type: ignore[union-attr]
    completed = await client.complete(PromptReference("review"), "language", "pa")
    assert list(completed.values) == ["pascal"]


async def progress(client: Client, oldest: str) -> None:
    received: list[Any] = []
    await client.call_tool("count", {"to": 3}, on_progress=lambda *said: received.append(said))
    assert [said[:2] for said in received] == [(0, 3), (1, 3), (2, 3)]
    if oldest >= B:
        assert received[2][2] == "number 2"


async def meta(client: Client, oldest: str) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    said = await client.call_tool("meta", meta={"com.example/x": [1], "traceparent": trace})
    assert '"com.example/x": [1]' in text_of(said)
    assert trace in text_of(said)
    assert "progressToken" not in text_of(said)
    mine = {"io.modelcontextprotocol/serverInfo"} if client.revision == E else set()
    assert (said.meta or {}).keys() == mine


async def cancellation(client: Client, oldest: str) -> None:
    with trio.move_on_after(1) as scope:
        await client.call_tool("hold", {"name": "mine"})
    assert scope.cancelled_caught
    await trio.sleep(1)
    assert await client.call_tool("ledger", returns=list[str]) == ["mine began", "mine was cancelled"]


async def concurrent_calls(client: Client, oldest: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.call_tool, "hold", {"name": "one"})
        await wait_all_tasks_blocked()
        await client.call_tool("let", {"name": "one"})


async def changes_of_lists(client: Client, oldest: str) -> None:
    async with client.listen(tools=True, prompts=True, resources=True) as changes:
        await wait_all_tasks_blocked()
        await client.call_tool("grow")
        received = {(await wait_or_fail(changes.__anext__, "a change")).kind.name for _ in range(3)}
    assert received == {"TOOLS", "PROMPTS", "RESOURCES"}


async def changes_of_resources(client: Client, oldest: str) -> None:
    async with client.listen(resources="house://one") as changes:
        await wait_all_tasks_blocked()
        await client.call_tool("touch", {"uri": "house://two"})
        await client.call_tool("touch", {"uri": "house://one"})
        assert (await wait_or_fail(changes.__anext__, "a change")).item == "house://one"
    await wait_all_tasks_blocked()
    async with client.listen(resources="house://one") as changes:  # again, after a time without a subscription
        await wait_all_tasks_blocked()
        await client.call_tool("touch", {"uri": "house://one"})
        assert (await wait_or_fail(changes.__anext__, "a change")).item == "house://one"


TOOLS = [
    "add", "greet", "words", "forecast", "fail", "refuse", "swap", "count", "talk", "meta", "hold", "let", "ledger",
    "order", "visit", "think", "rooms", "touch", "grow",
]  # fmt: skip


@each_server_revision
@each_client_revision
async def test_a_value_that_the_upstream_server_wrapped_is_not_wrapped_again(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    async with relayed(sample_server(), server_revision, client_revision) as client:
        assert await client.call_tool("add", {"a": 1, "b": 2}, returns=int) == 3
        result = await client.call_tool("add", {"a": 1, "b": 2})
    boxed = C <= server_revision <= D
    carried = server_revision >= C and (client_revision == E or (client_revision >= C and boxed))
    assert result.has_structured_content is carried
    assert result.structured_content == (({"result": 3} if boxed else 3) if carried else None)


@each_server_revision
@each_client_revision
@pytest.mark.parametrize(
    "check",
    [
        identity, lists_page_by_page, results, failures, errors_with_their_codes, resources,
        prompts_and_completions, progress, meta, cancellation, concurrent_calls, changes_of_lists,
        changes_of_resources,
    ],
)  # fmt: skip
async def test_a_client_of_a_relay_gets_the_same_as_a_client_of_the_server(
    server_revision: str,
    client_revision: str,
    check: Callable[[Client, str], Awaitable[None]],
    autojump_clock: MockClock,
) -> None:
    async with relayed(sample_server(), server_revision, client_revision) as client:
        assert client.revision == client_revision
        await check(client, min(server_revision, client_revision))


# Questions of the upstream server.


@each_server_revision
@each_client_revision
async def test_questions_go_to_the_client_that_made_the_call(server_revision: str, client_revision: str) -> None:
    answers: dict[str, Any] = {
        "elicitation": lambda asked: {"size": 7},
        "elicitation_url": lambda asked: asked.url == "https://pay.example/7",
        "sampling": lambda asked: ("nothing", "a model"),
        "roots": ["/tmp/one"],
    }
    async with relayed(sample_server(), server_revision, client_revision, **answers) as client:
        assert text_of(await client.call_tool("think")) == "a model: nothing"
        assert "file:///tmp/one" in text_of(await client.call_tool("rooms"))
        ordered = await client.call_tool("order")
        if min(server_revision, client_revision) >= C:
            assert text_of(ordered) == "Size(size=7, colour='red')"
        else:
            assert ordered.is_error
        visited = await client.call_tool("visit")
        if min(server_revision, client_revision) >= D:
            assert text_of(visited) == "Accepted"
        else:
            assert visited.is_error


@each_server_revision
@each_client_revision
async def test_a_client_without_the_capability_gets_no_question(server_revision: str, client_revision: str) -> None:
    async with relayed(sample_server(), server_revision, client_revision) as client:
        if client_revision == server_revision == E:  # the client gets the same error as from the server itself
            with pytest.raises(RequestError) as raised:
                await client.call_tool("think")
            assert raised.value.code == -32021
            assert raised.value.data == {"requiredCapabilities": {"sampling": {}}}
        else:
            said = await error_text(client, "think")
            assert "sampling" in said


async def error_text(client: Client, name: str) -> str:
    try:
        result = await client.call_tool(name)
    except RequestError as error:
        return str(error)
    assert result.is_error
    return text_of(result)


@pytest.mark.parametrize("server_revision", [C, E])
@pytest.mark.parametrize("client_revision", [C, E])
async def test_a_declined_form_reaches_the_server(server_revision: str, client_revision: str) -> None:
    async with relayed(
        sample_server(), server_revision, client_revision, elicitation=lambda asked: Declined()
    ) as client:
        assert "Declined" in text_of(await client.call_tool("order"))


@pytest.mark.parametrize("server_revision", [D, E])
@pytest.mark.parametrize("client_revision", [D, E])
async def test_an_omitted_field_stays_omitted(server_revision: str, client_revision: str) -> None:
    server = Server("asks")
    form = {
        "type": "object",
        "properties": {"a": {"type": "string", "default": "x"}, "b": {"type": "string"}, "c": {"type": "integer"}},
    }

    @server.tool
    async def ask(ctx: Context) -> str:
        answer = await ctx.elicit("What?", form)
        assert isinstance(answer, Accepted)
        return repr(sorted(answer.value.items()))

    async with relayed(
        server, server_revision, client_revision, elicitation=lambda asked: {"a": None, "c": 1}
    ) as client:
        assert text_of(await client.call_tool("ask")) == "[('c', 1)]"


@pytest.mark.parametrize("server_revision", [D, E])
@pytest.mark.parametrize("client_revision", [D, E])
async def test_concurrent_questions_are_all_answered(server_revision: str, client_revision: str) -> None:
    server = Server("asks")

    @server.tool
    async def ask(ctx: Context) -> str:
        said = await ctx.ask(a=Sample("A?", max_tokens=1), b=Sample("B?", max_tokens=1), c=Elicit("C?", bool))
        return f"{said['a'].content.text} {said['b'].content.text} {said['c'].value}"

    async def answer(asked: Any) -> tuple[str, str]:
        return asked.params.messages[0].content.text.lower(), "model"

    async with relayed(
        server, server_revision, client_revision, sampling=answer, elicitation=lambda asked: {"value": True}
    ) as client:
        assert text_of(await client.call_tool("ask")) == "a? b? True"


@contextlib.asynccontextmanager
async def two_clients(
    relay_server: Server, client_revision: str, name: str, **options: Any
) -> AsyncIterator[tuple[Client, Client]]:
    """Two clients of a relay.  A call of the first one is running."""
    async with (
        relay_server.running(),
        open_client(relay_server, revision=client_revision, **options) as first,
        open_client(relay_server, revision=client_revision, sampling=lambda asked: ("for two", "model")) as second,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(first.call_tool, name, {"name": "first"})
        await wait_all_tasks_blocked()
        yield first, second
        await second.call_tool("let", {"name": "first"})


@contextlib.asynccontextmanager
async def single_use_target(server: Server) -> AsyncIterator[trio.abc.Stream]:
    """A target that can be opened once, so that all clients share one session with the upstream server."""
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, theirs)
        yield ours


@each_server_revision
@each_client_revision
async def test_a_question_never_goes_to_another_client(server_revision: str, client_revision: str) -> None:
    async with (
        single_use_target(sample_server()) as target,
        open_relay(target, revision=server_revision) as relay_server,
        two_clients(relay_server, client_revision, "hold") as (_, second),
    ):
        if server_revision == E:  # in this revision a question belongs to a call
            assert text_of(await second.call_tool("think")) == "model: for two"
        else:
            assert "calls of several clients are running" in await error_text(second, "think")


@each_server_revision
@each_client_revision
async def test_a_client_gets_questions_while_its_other_calls_run(server_revision: str, client_revision: str) -> None:
    async with (
        relayed(sample_server(), server_revision, client_revision, sampling=lambda asked: ("hm", "model")) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(client.call_tool, "hold", {"name": "one"})
        await wait_all_tasks_blocked()
        assert text_of(await client.call_tool("think")) == "model: hm"
        await client.call_tool("let", {"name": "one"})


@pytest.mark.parametrize("server_revision", [C, D])
async def test_an_unanswered_question_does_not_block_other_clients(
    server_revision: str, autojump_clock: MockClock
) -> None:
    async def never(asked: Any) -> Any:
        await trio.sleep_forever()

    async with (
        open_relay(sample_server(), revision=server_revision) as relay_server,
        relay_server.running(),
        open_client(relay_server, revision=E, elicitation=never) as one,
        open_client(relay_server, revision=E, elicitation=lambda asked: {"size": 7}) as other,
    ):
        for _ in range(2):
            with trio.move_on_after(5) as patience:
                await one.call_tool("order")
            assert patience.cancelled_caught
            start = trio.current_time()
            assert text_of(await other.call_tool("order")) == "Size(size=7, colour='red')"
            assert trio.current_time() == start


@pytest.mark.parametrize("server_revision", [C, D])
async def test_log_messages_of_a_waiting_call_do_not_reach_other_clients(
    server_revision: str, autojump_clock: MockClock
) -> None:
    received: list[LoggingMessageParams] = []
    server, asked, talked = sample_server(), trio.Event(), trio.Event()

    @server.tool
    async def ask_and_talk(ctx: Context) -> None:
        async def talk() -> None:
            await asked.wait()
            await trio.sleep(1)
            await ctx.log("warning", "a secret")
            talked.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk)
            await ctx.elicit("Well?", bool)

    async def answer(question: Any) -> Any:
        asked.set()
        await trio.sleep(5)
        return {"value": True}

    async with (
        open_relay(server, revision=server_revision) as relay_server,
        relay_server.running(),
        open_client(relay_server, revision=E, elicitation=answer) as one,
        open_client(relay_server, revision=E, on_log=received.append, log_level="debug") as other,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(one.call_tool, "ask_and_talk")
        await asked.wait()
        nursery.start_soon(other.call_tool, "hold", {"name": "other"})
        await talked.wait()
        await other.call_tool("let", {"name": "other"})
        await wait_all_tasks_blocked()
    assert received == []


async def test_a_client_without_a_tool_call_gets_no_question(autojump_clock: MockClock) -> None:
    server = sample_server()

    @server.completion
    async def slowly() -> list[str]:
        await trio.sleep(60)
        return []

    async with (
        single_use_target(server) as target,
        open_relay(target, revision=D) as relay_server,
        relay_server.running(),
        open_client(relay_server, sampling=lambda asked: ("for one", "model")) as one,
        open_client(relay_server) as other,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(other.complete, PromptReference("review"), "code", "x")
        await wait_all_tasks_blocked()
        assert text_of(await one.call_tool("think")) == "model: for one"


@pytest.mark.parametrize("client_revision", [D, E])
async def test_a_question_outside_of_any_call_is_refused(client_revision: str) -> None:
    async with (
        relay_of_peer(D, {"tools": {}}) as (peer, relay_server),
        open_client(relay_server, revision=client_revision, roots=["/tmp"]),
    ):
        await peer.send({"id": 5, "method": "roots/list"})
        await wait_all_tasks_blocked()
        why = "the question was not forwarded: no call is running"
        assert [message["error"]["message"] for message in peer.messages] == [why]


@contextlib.asynccontextmanager
async def relay_of_peer(revision: str, capabilities: Any, **options: Any) -> AsyncIterator[tuple[Peer, Server]]:
    """A relay of a server that the test controls."""
    ours, theirs = memory_stream_pair()
    peer = Peer(theirs, revision, capabilities)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.run)
        async with open_relay(ours, revision=revision, **options) as relay_server:
            yield peer, relay_server
        await theirs.aclose()


async def test_an_own_callback_of_the_relay_answers_questions() -> None:
    relay = {"sampling": lambda asked: ("the relay", "mine")}
    async with relayed(sample_server(), D, D, relay) as client:
        assert text_of(await client.call_tool("think")) == "mine: the relay"


@pytest.mark.parametrize("server_revision", [D, E])
async def test_the_upstream_server_gets_the_capabilities_for_questions(server_revision: str) -> None:
    server, asked = Server("asks"), list[list[Any]]()

    @server.tool
    async def supported(ctx: Context) -> None:
        asked.append([name for name in ("sampling", "elicitation", "roots") if ctx.supports(name)])
        asked[-1] += ["tools"] * ctx.supports("sampling", "tools")
        asked.append([ctx.supports("elicitation", mode) for mode in ("form", "url")])

    for relay in ({}, {"asks": ["roots", "elicitation_url"]}, {"asks": ()}):
        async with relayed(server, server_revision, E, relay) as client:
            await client.call_tool("supported")
    assert asked == [
        ["sampling", "elicitation", "roots", "tools"],
        [True, True],
        ["elicitation", "roots"],
        [False, True],
        [],
        [False, False],
    ]


async def test_the_completion_of_a_page_goes_to_the_client_that_has_it() -> None:
    server, pages, done = Server("pays"), [], []

    @server.tool
    async def pay(ctx: Context) -> None:
        page = ElicitUrl("Pay there, please", "https://pay.example/7")
        await ctx.ask(page=page)
        pages.append(partial(ctx.completed, page))

    options: Any = {
        "elicitation_url": lambda asked: True,
        "on_elicitation_complete": lambda page: done.append(page.url),
    }
    async with relayed(server, D, D, **options) as client:
        await client.call_tool("pay")
        await pages[0]()
        await wait_all_tasks_blocked()
        assert done == ["https://pay.example/7"]


@each_server_revision
async def test_meta_names_reserved_in_another_revision_are_not_forwarded(server_revision: str) -> None:
    async with relayed(sample_server(), server_revision, A) as client:  # this revision reserves no names
        kept = {"mcp.dev/x": 1, "com.mcp.tools/x": 2, "io.modelcontextprotocol/x": 3, "com.example/x": 4}
        said = text_of(await client.call_tool("meta", meta=kept))
        assert json.loads(said) == {"com.example/x": 4} | ({} if server_revision == C else {"mcp.dev/x": 1})


@pytest.mark.parametrize("server_revision", [A, D, E])
@pytest.mark.parametrize("client_revision", [A, D, E])
async def test_prompts_can_report_progress(server_revision: str, client_revision: str) -> None:
    server, received = Server("slow"), list[Any]()

    @server.prompt
    async def think(ctx: Context) -> str:
        await ctx.progress(1, 2)
        return json.dumps(dict(ctx.meta))

    async with relayed(server, server_revision, client_revision) as client:
        filled = await client.request(
            "prompts/get", {"name": "think"}, on_progress=lambda *said: received.append(said[:2])
        )
        again = await client.request("prompts/get", {"name": "think"}, meta={"com.example/x": 1})
    assert received == [(1, 2)]
    told, also = (json.loads(each["messages"][0]["content"]["text"]) for each in (filled, again))
    own = {key for key in told if key.startswith("io.modelcontextprotocol/")}
    assert bool(own) is (server_revision == E)  # meta of the relay itself
    assert told.keys() - own == {"progressToken"}
    assert also.keys() - own == {"com.example/x"}


@pytest.mark.parametrize("client_revision", [D, E])
async def test_a_result_waits_until_its_question_is_answered(client_revision: str, autojump_clock: MockClock) -> None:
    """The upstream server need not wait for the answer.  Without the wait the answer would belong to no call."""

    async def slowly(asked: Any) -> tuple[str, str]:
        await trio.sleep(60)
        return "done", "model"

    async with client_of_relayed_peer(D, client_revision, sampling=slowly) as (peer, client):

        async def serve() -> None:
            asked = await peer.take("tools/call")
            await peer.send({"id": 5, "method": "sampling/createMessage", "params": SAMPLING})
            await trio.sleep(1)
            await peer.answer(asked, {"content": []})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await client.call_tool("any")
        assert trio.current_time() >= 60
        await wait_all_tasks_blocked()
        assert [message["result"]["content"]["text"] for message in peer.messages] == ["done"]


SAMPLING = {"messages": [{"role": "user", "content": {"type": "text", "text": "?"}}], "maxTokens": 1}
PAGE = {"mode": "url", "message": "There", "url": "https://pay.example/7", "elicitationId": "1"}


@pytest.mark.parametrize("client_revision", [D, E])
@pytest.mark.parametrize(
    ("method", "params", "code"),
    [("sampling/createMessage", SAMPLING, -32601), ("roots/list", {}, -32601), ("elicitation/create", PAGE, -32602)],
)
async def test_a_question_of_the_server_is_refused_as_by_the_client(
    client_revision: str, method: str, params: Any, code: int
) -> None:
    async with (
        client_of_relayed_peer(D, client_revision, elicitation=lambda asked: None) as (peer, client),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(client.call_tool, "any")
        asked = await peer.take("tools/call")
        await peer.send({"id": 5, "method": method, "params": params})
        await wait_all_tasks_blocked()
        assert [message["error"]["code"] for message in peer.messages] == [code]
        await peer.answer(asked, {"content": []})


@contextlib.asynccontextmanager
async def client_of_relayed_peer(
    server_revision: str, client_revision: str, **options: Any
) -> AsyncIterator[tuple[Peer, Client]]:
    """A client of a relay of a server that the test controls."""
    async with (
        relay_of_peer(server_revision, {"tools": {"listChanged": True}}) as (peer, relay_server),
        open_client(relay_server, revision=client_revision, **options) as client,
    ):
        yield peer, client


async def test_the_oldest_uncompleted_pages_are_forgotten() -> None:
    done: list[str] = []
    options: Any = {
        "elicitation_url": lambda asked: True,
        "on_elicitation_complete": lambda page: done.append(page.url),
    }
    async with client_of_relayed_peer(D, D, **options) as (peer, client), trio.open_nursery() as nursery:
        nursery.start_soon(client.call_tool, "any")
        asked = await peer.take("tools/call")
        for number in range(101):
            page = {
                "mode": "url",
                "message": "There",
                "url": f"https://pay.example/{number}",
                "elicitationId": f"{number}",
            }
            await peer.send({"id": 5 + number, "method": "elicitation/create", "params": page})
            await wait_all_tasks_blocked()
        for number in (0, 1, 100):
            await peer.notify("notifications/elicitation/complete", {"elicitationId": f"{number}"})
        await wait_all_tasks_blocked()
        await peer.answer(asked, {"content": []})
    assert sorted(done) == ["https://pay.example/1", "https://pay.example/100"]  # in any order


# Log messages.


@pytest.mark.parametrize("client_revision", [D, E])
async def test_messages_sent_before_a_result_arrive_before_it(client_revision: str) -> None:
    received: list[Any] = []
    options: Any = {"on_log": lambda message: received.append(message.data), "log_level": "info"}
    async with client_of_relayed_peer(D, client_revision, **options) as (peer, client), trio.open_nursery() as nursery:

        @nursery.start_soon
        async def serve() -> None:
            asked = await peer.take("tools/call")
            for number in range(9):
                await peer.notify("notifications/message", {"level": "info", "data": number})
            await peer.answer(asked, {"content": []})

        await client.call_tool("any")
        assert received == list(range(9))


@each_server_revision
@each_client_revision
async def test_log_messages_come_before_the_result_of_their_call(server_revision: str, client_revision: str) -> None:
    received: list[LoggingMessageParams] = []
    async with relayed(
        sample_server(), server_revision, client_revision, on_log=received.append, log_level="info"
    ) as client:
        await client.call_tool("talk")
        assert [(each.level, each.data, each.logger) for each in received] == [("warning", {"loud": True}, "house")]


@pytest.mark.parametrize("server_revision", [D, E])
async def test_log_messages_of_unknown_calls_are_dropped(server_revision: str) -> None:
    received: list[LoggingMessageParams] = []
    async with (
        single_use_target(sample_server()) as target,
        open_relay(target, revision=server_revision) as relay_server,
        two_clients(relay_server, D, "hold", on_log=received.append) as (_, second),
    ):
        await second.call_tool("talk")
        await wait_all_tasks_blocked()
    assert received == []


async def test_a_relay_does_not_extend_the_lifetime_of_results() -> None:
    capabilities: Any = {"tools": {}}
    async with relay_of_peer(E, capabilities) as (peer, relay_server), trio.open_nursery() as nursery:
        for _ in range(2):  # two clients with separate caches
            async with open_client(relay_server, revision=E) as client:
                listed: list[Any] = []

                async def look(client: Client = client, listed: list[Any] = listed) -> None:
                    listed.append(await client.list_tools_page())

                nursery.start_soon(look)
                asked = await peer.take("tools/list")
                await peer.answer(asked, {"tools": [], "ttlMs": 1000, "cacheScope": "public"})
                await wait_all_tasks_blocked()
                assert listed[0].ttl_ms == 1000


# The end of the upstream server.


@each_server_revision
@each_client_revision
async def test_without_the_upstream_server_each_call_is_refused_at_once(
    server_revision: str, client_revision: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, sample_server(), theirs)
        async with (
            open_relay(ours, revision=server_revision) as relay_server,
            open_client(relay_server, revision=client_revision) as client,
        ):
            async with trio.open_nursery() as calls:
                calls.start_soon(refused, client, "tools/call", {"name": "hold", "arguments": {"name": "one"}})
                await wait_all_tasks_blocked()
                await theirs.aclose()
            await refused(client, "tools/list", {})
            await refused(client, "resources/read", {"uri": "house://one"})
    assert trio.current_time() < 1
    assert "got no answer from the upstream server" in caplog.text


async def refused(client: Client, method: str, params: Any) -> None:
    with pytest.raises(RequestError, match="did not answer") as raised:
        await client.request(method, params)
    assert raised.value.code == -32603


@pytest.mark.parametrize("client_revision", [D, E])
async def test_a_relay_served_after_its_block_refuses_requests(client_revision: str) -> None:
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        async with open_relay(sample_server()) as relay_server:
            nursery.start_soon(serve_stream, relay_server, theirs)
            await wait_all_tasks_blocked()
        async with open_client(ours, revision=client_revision) as client:
            await refused(client, "tools/call", {"name": "greet", "arguments": {"name": "you"}})
            if client_revision == D:
                with pytest.raises(RequestError, match="the relay has ended"):
                    await client.request("resources/subscribe", {"uri": "house://one"})


@pytest.mark.full
def test_a_relay_can_be_cancelled_at_any_step() -> None:
    async def scenario(attempt: Attempt) -> None:
        server = sample_server()
        # If a link is cancelled while it is opened, the opening task may see first that the link has ended.
        with attempt.window(), contextlib.suppress(SessionClosed):
            async with relayed(server, D, E, sampling=lambda asked: ("hm", "model")) as client:
                await client.call_tool("think")
        await wait_all_tasks_blocked()
        assert server.statistics().connections == 0

    assert cancel_at_each_step(scenario, watch=any_task) > 50


async def test_an_exception_of_the_block_is_raised_unchanged() -> None:
    mine = KeyError("mine")
    with pytest.raises(KeyError) as raised:
        async with open_relay(sample_server()):
            raise mine
    assert raised.value is mine


@pytest.mark.parametrize("options", [{"asks": ["money"]}, {"revisions": ["2020-01-01"]}, {"asks": "roots"}])
def test_invalid_options_of_a_relay_are_refused_before_opening(options: Any) -> None:
    with pytest.raises(UsageError, match=r"asks must be one of|unknown revision|asks must be a list"):
        open_relay(sample_server(), **options)


async def test_a_relay_refuses_entries_of_its_own() -> None:
    async def mine() -> str:
        return ""

    async with open_relay(sample_server()) as relay_server:
        for add in (
            relay_server.tool,
            relay_server.prompt,
            relay_server.completion,
            lambda function: relay_server.mount(Server("other")),
        ):
            with pytest.raises(UsageError, match="a relay only has the features of its upstream server"):
                add(mine)


# Mounted in another server.


@contextlib.asynccontextmanager
async def mounting(*relays: tuple[str, Server], **options: Any) -> AsyncIterator[Server]:
    """A server with a tool, a prompt and a resource of its own, in which relays are mounted."""
    front = Server("front", page_size=2, change_debounce=0, **options)
    front.tool(name="own")(lambda: "mine")
    front.prompt(name="own")(lambda: "mine")
    front.resource("own://one", name="own")(lambda: "mine")
    async with contextlib.AsyncExitStack() as stack:
        for prefix, server in relays:
            front.mount(await stack.enter_async_context(open_relay(server)), prefix=prefix)
        yield front


@pytest.mark.parametrize("client_revision", [A, D, E])
async def test_the_entries_of_a_mounted_relay_are_listed_after_those_of_the_server(client_revision: str) -> None:
    async with mounting(("house_", sample_server())) as front, open_client(front, revision=client_revision) as client:
        assert [tool.name for tool in await client.list_tools()] == ["own", *(f"house_{name}" for name in TOOLS)]
        assert [each.name for each in await client.list_prompts()] == [
            "own", "house_review", "house_short", "house_long", "house_wide",
        ]  # fmt: skip
        uris = [each.uri for each in await client.list_resources()]
        assert uris == ["own://one", *(f"house://{name}" for name in ("one", "two", "three", "four"))]
        templates = [each.uri_template for each in await client.list_resource_templates()]
        assert templates[0] == "rooms://{name}"
        assert len(templates) == 5
        for cursor in ("@7.", "@x.", "@0.nonsense"):
            with pytest.raises(RequestError) as raised:
                await client.list_tools_page(cursor=cursor)
            assert raised.value.code == -32602


@pytest.mark.parametrize("client_revision", [A, D, E])
async def test_requests_for_the_entries_of_a_mounted_relay_go_upstream(client_revision: str) -> None:
    async with (
        mounting(("house_", sample_server())) as front,
        open_client(front, revision=client_revision, sampling=lambda asked: ("hm", "model")) as client,
    ):
        assert text_of(await client.call_tool("own")) == "mine"
        assert text_of(await client.call_tool("house_add", {"a": 1, "b": 2})) == "3"
        filled = await client.get_prompt("house_review", {"code": "x = 1"})
        assert filled.messages[0].content.text == "Review this python: x = 1"  # type: ignore[union-attr]
        await resources(client, client_revision)
        completed = await client.complete(PromptReference("house_review"), "language", "pa")
        assert list(completed.values) == ["pascal"]
        if client_revision >= D:
            assert text_of(await client.call_tool("house_think")) == "model: hm"
        for name in ("add", "house_nothing", "house_own", "HOUSE_add"):
            with pytest.raises(RequestError) as raised:
                await client.call_tool(name)
            assert raised.value.code == -32602
            with pytest.raises(RequestError) as raised:
                await client.get_prompt(name)
            assert raised.value.code == -32602


@pytest.mark.parametrize("client_revision", [D, E])
async def test_changes_of_a_mounted_relay_reach_the_clients_of_the_server(client_revision: str) -> None:
    async with (
        mounting(("house_", sample_server())) as front,
        front.running(),
        open_client(front, revision=client_revision) as client,
        client.listen(tools=True, resources=["house://one", "own://one"]) as changes,
    ):
        await wait_all_tasks_blocked()
        await client.call_tool("house_touch", {"uri": "house://one"})
        assert (await wait_or_fail(changes.__anext__, "a change")).item == "house://one"
        await client.call_tool("house_grow")
        # In 2026-07-28 the relay reports a resource once more: it may have changed before the upstream server agreed.
        while (change := await wait_or_fail(changes.__anext__, "a change")).item == "house://one":
            pass
        assert change.kind.name == "TOOLS"
        front.notify_resource_updated("own://one")
        assert (await wait_or_fail(changes.__anext__, "a change")).item == "own://one"


@pytest.mark.parametrize("client_revision", [D, E])
async def test_a_relay_may_be_mounted_in_a_server_that_is_mounted(client_revision: str) -> None:
    passed: list[Any] = []

    def note(name: str) -> Any:
        async def middleware(ctx: Context, request: Any, call_next: Any) -> Any:
            passed.append((name, request.params.get("name")))
            return await call_next()

        return middleware

    outer = Server("outer", middleware=[note("outer")])
    outer.tool(name="own")(lambda: "outer's")
    async with mounting(("house_", sample_server()), middleware=[note("front")]) as front:
        outer.mount(front, prefix="front.")
        async with open_client(outer, revision=client_revision) as client:
            names = [tool.name for tool in await client.list_tools()]
            assert names == ["own", "front.own", *(f"front.house_{name}" for name in TOOLS)]
            passed.clear()
            assert text_of(await client.call_tool("front.house_greet", {"name": "you"})) == "Hello, you!"
            assert passed == [("outer", "front.house_greet"), ("front", "house_greet")]
            assert text_of(await client.call_tool("front.own")) == "mine"
            await resources(client, client_revision)
            with pytest.raises(RequestError, match=r"there is no tool 'front\.greet'"):
                await client.call_tool("front.greet", {"name": "you"})
            assert passed[-1] == ("outer", "front.greet")


async def test_several_relays_have_prefixes_and_get_requests_for_uris_in_turn() -> None:
    other = Server("other")
    other.tool(name="add")(lambda: "other's")
    other.tool(name="own")(lambda: "hidden")
    other.resource("other://one", name="one")(lambda: "other's")
    other.resource("broken://one", name="broken")(_broken)
    async with mounting(("house_", sample_server()), ("", other)) as front, open_client(front, revision=E) as client:
        tools = [tool.name for tool in await client.list_tools()]
        assert tools == ["own", *(f"house_{name}" for name in TOOLS), "add"]  # an own tool hides that of a relay
        assert text_of(await client.call_tool("add")) == "other's"
        assert text_of(await client.call_tool("own")) == "mine"
        assert text_of(await client.call_tool("house_add", {"a": 1, "b": 2})) == "3"
        for uri, words in (("house://one", "inside house://one"), ("other://one", "other's"), ("own://one", "mine")):
            assert (await client.read_resource(uri)).contents[0].text == words  # type: ignore[union-attr]
        with pytest.raises(RequestError, match="nowhere"):
            await client.read_resource("nowhere://one")
        with pytest.raises(RequestError) as raised:
            await client.read_resource("broken://one")
        assert raised.value.code == -32603


def _broken() -> str:
    raise ValueError


async def test_a_relay_gets_only_requests_that_its_server_declares() -> None:
    async with mounting() as front, relay_of_peer(D, {"tools": {}}) as (_, relay_server):
        front.mount(relay_server, prefix="x_")
        async with open_client(front, revision=D) as client:
            assert [each.name for each in await client.list_prompts()] == ["own"]
            with pytest.raises(RequestError, match="there is no prompt 'x_y'"):
                await client.get_prompt("x_y")
            with pytest.raises(RequestError, match="not found"):
                await client.read_resource("x://y")


async def test_a_subscription_goes_to_the_relay_that_has_the_resource() -> None:
    server, other = sample_server(filter=lambda principal, item: getattr(item, "name", "") != "one"), Server("other")
    other.resource("other://one", name="one")(lambda: "")
    async with (
        mounting(("", server), ("o_", other)) as front,
        front.running(),
        open_client(front, revision=D) as client,
    ):
        for uri in ("house://two", "other://one", "own://one"):
            await client.request("resources/subscribe", {"uri": uri})
        assert subscription_count(server) == 1
        await client.request("resources/unsubscribe", {"uri": "house://two"})
        await wait_all_tasks_blocked()
        assert subscription_count(server) == 0


async def test_relays_without_distinct_prefixes_or_with_a_filter_are_not_mounted() -> None:
    async with mounting(("x_", sample_server())) as front, open_relay(sample_server()) as relay_server:
        with pytest.raises(UsageError, match="a relay is mounted here already with the prefix 'x_'"):
            front.mount(relay_server, prefix="x_")
        filtering = Server("filtering", filter=lambda principal, item: True)
        with pytest.raises(UsageError, match="a server with a filter cannot show the entries of a relay"):
            filtering.mount(relay_server, prefix="y_")
        with pytest.raises(UsageError, match="a server with a filter cannot show the entries of a relay"):
            filtering.mount(front)
        middle = Server("middle")
        filtering.mount(middle)
        with pytest.raises(UsageError, match="a server with a filter cannot show the entries of a relay"):
            middle.mount(relay_server)


async def test_arguments_in_headers_of_a_mounted_relay_are_checked() -> None:
    server = Server("mirrors")
    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    server.add_tool(Tool("ask", schema), lambda ctx, arguments: arguments["region"])
    async with (
        mounting(("far_", server)) as front,
        over_http(front) as url,
        open_client(url) as client,
        open_client(url) as ignorant,
    ):
        assert "far_ask" in [tool.name for tool in await client.list_tools()]
        assert text_of(await client.call_tool("far_ask", {"region": "south"})) == "south"
        with pytest.raises(RequestError, match="Mcp-Param-Region header is missing"):
            await ignorant.request("tools/call", {"name": "far_ask", "arguments": {"region": "west"}})


# Subscriptions.


@pytest.mark.parametrize("server_revision", [D, E])
@pytest.mark.parametrize("client_revision", [D, E])
async def test_the_upstream_subscription_lasts_as_long_as_a_client_listens(
    server_revision: str, client_revision: str
) -> None:
    server = sample_server()
    async with (
        single_use_target(server) as target,
        open_relay(target, revision=server_revision) as relay_server,
        relay_server.running(),
        open_client(relay_server, revision=client_revision) as one,
        open_client(relay_server, revision=client_revision) as other,
    ):
        assert subscription_count(server) == 0
        async with one.listen(resources="house://one"):
            async with other.listen(resources=["house://one", "house://two"]):
                await wait_all_tasks_blocked()
                assert subscription_count(server) == 2
            await wait_all_tasks_blocked()
            assert subscription_count(server) == 1
        await wait_all_tasks_blocked()
        assert subscription_count(server) == 0


def subscription_count(server: Server) -> int:
    """The number of resources with a subscription at the server."""
    (run,) = server._runs
    return sum(change.item != "" for change in run.publisher.listeners._by_change)


async def test_a_subscription_refused_upstream_is_refused() -> None:
    server = sample_server(filter=lambda principal, item: getattr(item, "name", "") != "one")
    async with relayed(server, D, D) as client:
        for _ in range(2):
            with pytest.raises(RequestError) as raised:
                await client.request("resources/subscribe", {"uri": "house://one"})
            assert raised.value.code == -32002
        await client.request("resources/subscribe", {"uri": "house://two"})


@pytest.mark.parametrize("client_revision", [D, E])
async def test_a_relay_declares_only_the_upstream_capabilities(client_revision: str) -> None:
    async with (
        relay_of_peer(D, {"tools": {}, "resources": {"listChanged": False}}) as (_, relay_server),
        open_client(relay_server, revision=client_revision) as client,
    ):
        assert client.capabilities == {"logging": {}, "tools": {}, "resources": {}}


async def test_a_change_before_the_upstream_agreement_is_reported() -> None:
    async with client_of_relayed_peer(E, D) as (peer, client), client.listen(tools=True) as changes:
        listening = await peer.take("subscriptions/listen")
        kinds = {"notifications": {"toolsListChanged": True}}
        await peer.notify("notifications/subscriptions/acknowledged", kinds, subscription=listening)
        assert (await wait_or_fail(changes.__anext__, "a change")).kind.name == "TOOLS"


# Special cases.


async def test_messages_between_equal_revisions_are_not_changed() -> None:
    """This includes members that the revision does not have, which a newer revision would remove."""
    async with client_of_relayed_peer(A, A) as (peer, client), trio.open_nursery() as nursery:
        tool = {"name": "x", "title": "X", "inputSchema": {"type": "object"}, "outputSchema": {"type": "object"}}

        @nursery.start_soon
        async def ask() -> None:
            assert await client.request("tools/list") == {"tools": [tool]}

        await peer.answer(await peer.take("tools/list"), {"tools": [tool]})


@pytest.mark.parametrize("client_revision", [C, D])
async def test_invalid_entries_are_forwarded_unchanged(client_revision: str) -> None:
    async with relay_of_peer(D, {"tools": {}}) as (peer, relay_server):
        async with open_client(relay_server, revision=client_revision) as client, trio.open_nursery() as nursery:
            page: list[Any] = []

            @nursery.start_soon
            async def ask() -> None:
                page.append(await client.request("tools/list"))

            asked = await peer.take("tools/list")
            odd = [{"name": 7}, {"name": "odd name!", "inputSchema": {"type": "object", "x-y": 1}, "z": [None]}]
            await peer.answer(asked, {"tools": odd, "_meta": {"com.example/x": 1}})
        assert page == [{"tools": odd, "_meta": {"com.example/x": 1}}]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("tools/call", {"name": 7}),
        ("tools/call", {"name": "add", "arguments": [1]}),
        ("tools/list", {"cursor": 7}),
        ("resources/read", {}),
        ("prompts/get", {"name": "review", "arguments": {"code": 1}}),
        ("completion/complete", {"ref": {"type": "ref/nothing"}, "argument": {"name": "x", "value": ""}}),
    ],
)
async def test_invalid_params_are_refused_by_the_relay(method: str, params: Any) -> None:
    async with relayed(sample_server(), D, D) as client:
        with pytest.raises(RequestError) as raised:
            await client.request(method, params)
        assert raised.value.code == -32602


async def test_content_that_a_revision_lacks_is_an_error() -> None:
    async with (
        relay_of_peer(D, {"tools": {}}) as (peer, relay_server),
        open_client(relay_server, revision=A) as client,
        trio.open_nursery() as nursery,
    ):

        @nursery.start_soon
        async def ask() -> None:
            assert "AudioContent does not exist in 2024-11-05" in await error_text(client, "sing")

        asked = await peer.take("tools/call")
        await peer.answer(asked, {"content": [{"type": "audio", "data": "AA==", "mimeType": "audio/wav"}]})


async def test_a_middleware_gets_the_relayed_requests() -> None:
    seen: list[str] = []

    async def mine(ctx: Context, request: Any, call_next: Any) -> Any:
        seen.append(request.method)
        return await call_next(request)

    async with relayed(sample_server(), D, E, {"middleware": [mine]}) as client:
        await client.call_tool("greet", {"name": "you"})
        await client.complete(ResourceReference("rooms://{name}"), "name", "")
    assert seen == ["tools/call", "completion/complete"]


async def test_a_relay_can_relay_a_relay() -> None:
    async with (
        open_relay(sample_server(), revision=A) as inner,
        open_relay(inner, revision=E) as relay_server,
        open_client(relay_server, revision=C, sampling=lambda asked: ("far away", "model")) as client,
    ):
        assert text_of(await client.call_tool("think")) == "model: far away"
        assert text_of(await client.call_tool("add", {"a": 1, "b": 2})) == "3"
        assert client.server["name"] == "house"


# Over processes and sockets.


@pytest.mark.parametrize("client_revision", [B, C, D, E])
async def test_a_relay_serves_a_stdio_server_over_http(client_revision: str) -> None:
    command = [sys.executable, "-m", "tests.client.sample_server"]
    async with (
        open_relay(command, cwd=HERE.parent.parent) as relay_server,
        over_http(relay_server) as url,
        open_client(url, revision=client_revision, sampling=lambda asked: ("hm", "model")) as client,
    ):
        await lists_page_by_page(client, client_revision)
        await progress(client, client_revision)
        assert text_of(await client.call_tool("think")) == "model: hm"


@contextlib.asynccontextmanager
async def over_http(server: Server) -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        address = await nursery.start(partial(serve_http, server, "127.0.0.1", 0))
        yield address.local_url
        nursery.cancel_scope.cancel()


PROGRAM = """
import sys, trio
from trio_mcp import serve_stdio
from trio_mcp.relay.relay import open_relay

async def main():
    async with open_relay(sys.argv[1]) as server:
        await serve_stdio(server)

trio.run(main)
"""


@pytest.mark.parametrize("client_revision", [A, D, E])
async def test_a_relay_serves_an_http_server_over_stdio(client_revision: str) -> None:
    async with (
        over_http(sample_server()) as url,
        open_client(
            [sys.executable, "-c", PROGRAM, url],
            revision=client_revision,
            cwd=HERE.parent.parent,
            sampling=lambda asked: ("hm", "model"),
        ) as client,
    ):
        await lists_page_by_page(client, client_revision)
        await progress(client, client_revision)
        assert text_of(await client.call_tool("think")) == "model: hm"


async def test_arguments_in_headers_are_those_of_the_upstream_tool() -> None:
    server, called = Server("mirrors"), []
    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    server.add_tool(Tool("ask", schema), lambda ctx, arguments: called.append((arguments, ctx.headers)))
    async with (
        over_http(server) as far,
        open_relay(far) as relay_server,
        over_http(relay_server) as url,
        open_client(url) as client,
        open_client(url) as ignorant,
    ):
        await client.call_tool("ask", {"region": "north"})  # the upstream client has to look up the schema
        for _ in await client.list_tools():
            pass
        await client.call_tool("ask", {"region": "south"})
        with pytest.raises(RequestError, match="Mcp-Param-Region header is missing"):
            await ignorant.request("tools/call", {"name": "ask", "arguments": {"region": "west"}})
        await ignorant.call_tool("ask", {"region": "east"})
        async with client.listen(tools=True) as changes:
            server.remove_tool("ask")
            server.add_tool(Tool("ask", {"type": "object"}), lambda ctx, arguments: None)
            async for _ in changes:
                if [tool.input_schema for tool in await client.list_tools()] == [{"type": "object"}]:
                    break
        await ignorant.request("tools/call", {"name": "ask"})
    assert [(arguments["region"], headers["Mcp-Param-Region"]) for arguments, headers in called] == [
        ("north", "north"),
        ("south", "south"),
        ("east", "east"),
    ]


# Extensions.


@each_server_revision
@each_client_revision
async def test_methods_of_extensions_are_passed_on(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server, received, said = Server("extended"), list[Any](), list[Any]()
    ext = server.extension("com.example/ping", settings={"loud": True})

    @ext.method("com.example/ping")
    async def ping(target: str, ctx: Context) -> dict[str, Any]:
        await ctx.notify("com.example/said", {"target": target})
        return {"target": target, "meta": dict(ctx.meta).get("com.example/x")}

    @server.method("com.example/open")
    async def open_to_all() -> None: ...

    @server.notification("com.example/heard")
    async def on_heard(n: int) -> None:
        received.append(n)

    options: Any = {"on_notification": lambda method, params: said.append((method, params))}
    declares: Any = {"extensions": {"com.example/ping": {}}}
    async with relayed(server, server_revision, client_revision, declares, **declares, **options) as client:
        assert client.extensions == {"com.example/ping": {"loud": True}}
        result = await client.request("com.example/ping", {"target": "moon"}, meta={"com.example/x": 7})
        assert (result["target"], result["meta"]) == ("moon", 7)
        assert said == [("com.example/said", {"target": "moon"})]
        assert await client.notify("com.example/heard", {"n": 1})
        await trio.sleep(1)
        assert received == [1]
        with pytest.raises(RequestError) as caught:
            await client.request("com.example/unknown")
        assert caught.value.code == METHOD_NOT_FOUND
    async with relayed(server, server_revision, client_revision) as client:
        assert client.extensions == {}
        await client.request("com.example/open")
        with pytest.raises(RequestError) as caught:
            await client.request("com.example/ping", {"target": "moon"})
        assert caught.value.code == MISSING_CLIENT_CAPABILITY


async def test_a_middleware_that_changes_a_list_with_a_mounted_relay_changes_no_entry() -> None:
    async def louder(ctx: Context, request: Any, call_next: Any) -> Any:
        page = await call_next()
        for tool in page.get("tools", ()):
            tool["title"] = f"{tool.get('title', 'x')}!"
        return page

    async with mounting(("house_", sample_server()), middleware=[louder]) as front, open_client(front) as client:
        for _ in range(3):
            assert {tool.title for tool in await client.list_tools()} == {"x!"}


async def test_a_mounted_relay_gets_methods_unknown_to_the_other_servers(autojump_clock: MockClock) -> None:
    upstream, outer, received = Server("upstream"), Server("outer"), list[int]()
    upstream.method("com.example/both")(lambda: {"by": "upstream"})
    upstream.method("com.example/one")(lambda: {"by": "upstream"})

    async def hear(n: int) -> None:  # not in a thread: the clock does not wait for threads
        received.append(n)

    upstream.notification("com.example/heard")(hear)
    outer.method("com.example/both")(lambda: {"by": "outer"})
    async with open_relay(upstream) as relay_server:
        outer.mount(relay_server, prefix="up_")
        async with open_client(outer) as client:
            assert (await client.request("com.example/both"))["by"] == "outer"
            assert (await client.request("com.example/one"))["by"] == "upstream"
            with pytest.raises(RequestError) as caught:
                await client.request("com.example/none")
            assert caught.value.code == METHOD_NOT_FOUND
            await client.notify("com.example/heard", {"n": 1})
            await trio.sleep(1)
            assert received == [1]


@each_client_revision
async def test_all_sessions_are_opened_again_after_a_change_of_the_program(
    client_revision: str, autojump_clock: MockClock
) -> None:
    old, new, begun = Server("house"), Server("house", version="2"), trio.Event()

    @old.tool
    async def wait() -> str:
        begun.set()
        await trio.sleep_forever()
        return ""

    new.tool(lambda: "yes", name="ready", description="")
    relay = Relay(old, ASKS, (), tuple(REVISIONS), {})
    async with (
        Block(relay.open, "") as relay_server,
        open_client(relay_server, revision=client_revision) as one,
        open_client(relay_server, revision=client_revision) as two_clients,
        one.listen(tools=True) as changes,
        trio.open_nursery() as nursery,
    ):
        assert [tool.name for tool in await two_clients.list_tools()] == ["wait"]

        async def call() -> None:
            with pytest.raises(RequestError, match="the upstream server did not answer"):
                await one.call_tool("wait")

        nursery.start_soon(call)
        await begun.wait()
        for _ in range(3):  # each time without a pause
            relay.target = new
            await relay.reopen()
        await anext(changes)
        for client in (one, two_clients):
            assert [tool.name for tool in await client.list_tools()] == ["ready"]
            assert text_of(await client.call_tool("ready")) == "yes"


async def test_a_session_that_is_being_closed_is_not_opened_again(autojump_clock: MockClock) -> None:
    relay = Relay(sample_server(), ASKS, (), tuple(REVISIONS), {})
    async with Block(relay.open, "") as relay_server, open_client(relay_server, revision=E) as client:
        await client.list_tools()
        (upstream,) = relay._upstreams.values()
        upstream.close()
        await upstream.reopen()
        assert upstream.closing
        assert text_of(await client.call_tool("add", {"a": 1, "b": 2})) == "3"


async def test_a_session_is_closed_if_its_client_leaves_meanwhile(autojump_clock: MockClock) -> None:
    for number in range(0, 60, 6):  # steps after the beginning
        relay = Relay(sample_server(), ASKS, (), tuple(REVISIONS), {})
        async with (
            Block(relay.open, "") as relay_server,
            open_client(relay_server) as one,
            trio.open_nursery() as nursery,
        ):
            async with open_client(relay_server) as two_clients:
                for client in (one, two_clients):
                    await client.list_tools()
                assert len(relay._upstreams) == 2
                nursery.start_soon(relay.reopen)
                for _ in range(number):
                    await trio.lowlevel.checkpoint()
            await trio.sleep(10)
            assert len(relay._upstreams) == 1
            assert text_of(await one.call_tool("add", {"a": 1, "b": 2})) == "3"
