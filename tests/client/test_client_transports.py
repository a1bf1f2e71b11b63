"""The operations of a client on each transport, in each revision."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.matrix import ROOT, Variant, client_of, each_transport_and_asgi, no_tasks_left, serve_over
from tests.client.sample_server import Forecast, sample_server
from tests.http.scripted_server import A, B, C, D, E
from tests.requirements import req
from tests.server.checkpoints import wait_or_fail
from trio_mcp import Context, Declined, RequestError, Server, UsageError
from trio_mcp.client import Client, HandshakeError, ToolFailed, connect_client, open_client
from trio_mcp.core import (
    PROMPTS_CHANGED,
    RESOURCES_CHANGED,
    TOOLS_CHANGED,
    InputUnavailable,
    McpError,
    resource_updated,
)
from trio_mcp.errors import NotDeclared, NotInThisRevision, RemoteProtocolError, SessionClosed
from trio_mcp.types import PromptReference, ResourceReference


@pytest.fixture
def clock(variant: Variant) -> MockClock:
    """A mock clock, except for a child process, which needs the real one."""
    return MockClock(rate=1.0) if variant.transport == "child" else MockClock(autojump_threshold=0)


async def ledger_up_to(client: Client, last: str) -> list[str]:
    """The ledger of the sample server, as soon as its last entry is `last`."""
    while True:
        entries = await client.call_tool("ledger", returns=list[str])
        if entries and entries[-1] == last:
            return entries
        await trio.sleep(0.01)


def text_of(result: Any) -> str:
    text: str = result.content[0].text
    return text


# Opening and closing.


@each_transport_and_asgi()
@req("stdio-01")
async def test_a_revision_can_be_pinned_and_the_client_tells_what_was_agreed(
    variant: Variant, clock: MockClock
) -> None:
    async with client_of(variant) as client:
        assert client.revision == variant.revision
        assert client.negotiation.chosen is not None
        assert client.negotiation.chosen.name == variant.revision
        assert client.negotiation.why
        how = "server/discover in" if variant.modern else "initialize with"
        assert client.negotiation.attempts[-1].tried == f"{how} {variant.revision}"
        assert client.server["name"] == "house"
        assert client.server["version"] == "7"
        assert client.instructions == "Knock first."
        assert client.capabilities["tools"] == {"listChanged": True} or variant.transport == "http json"
        assert client.deviations == ()


@each_transport_and_asgi(without=["child"])  # its program always supports all revisions
@req("http-124")
async def test_the_newest_revision_that_both_have_is_found(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant, sample_server(revisions=[variant.revision]), revision=None) as client:
        assert client.revision == variant.revision
        tried = [each.tried for each in client.negotiation.attempts]
        assert tried[0] == f"server/discover in {E}"
        assert variant.modern or len(tried) > 1


@each_transport_and_asgi(without=["child"])
async def test_an_unsupported_revision_is_a_plain_error_without_an_exception_group(
    variant: Variant, clock: MockClock
) -> None:
    others = [each for each in (A, B, C, D, E) if each != variant.revision]
    async with no_tasks_left(), serve_over(variant.transport, sample_server(revisions=others)) as target:
        with pytest.raises(McpError) as refused:
            async with open_client(target, revision=variant.revision):
                raise AssertionError("it was opened")
        assert isinstance(refused.value, HandshakeError) or isinstance(refused.value.__cause__, HandshakeError)


@each_transport_and_asgi()
@pytest.mark.parametrize("grouped", [False, True])
async def test_an_exception_of_the_block_is_raised_as_the_same_object(
    variant: Variant, grouped: bool, clock: MockClock
) -> None:
    own: BaseException = ExceptionGroup("mine", [KeyError("x")]) if grouped else KeyError("x")

    async def block() -> None:
        async with client_of(variant) as client:
            await client.call_tool("greet", {"name": "you"})
            raise own

    with pytest.raises(type(own)) as raised:
        await block()
    assert raised.value is own


@each_transport_and_asgi()
@req("state-04")
async def test_ten_clients_are_closed_in_any_order_by_any_task(variant: Variant, clock: MockClock) -> None:
    order = list(range(2 if variant.transport == "child" else 10))
    random.Random(str(variant)).shuffle(order)
    options: dict[str, Any] = {"cwd": ROOT} if variant.transport == "child" else {}
    async with (
        no_tasks_left(),
        serve_over(variant.transport, sample_server()) as target,
        trio.open_nursery() as nursery,
    ):
        clients: list[Client] = []

        async def connect() -> None:
            clients.append(await connect_client(nursery, target, revision=variant.revision, **options))

        async with trio.open_nursery() as several:
            for _ in order:
                several.start_soon(connect)
        async with trio.open_nursery() as several:
            for number in order:
                several.start_soon(clients[number].aclose)
        for client in clients:
            await client.aclose()
            with pytest.raises(SessionClosed, match="closed"):
                await client.call_tool("greet", {"name": "you"})


@pytest.mark.full  # ten clients are in the default suite
async def test_a_thousand_clients_are_closed_in_any_order_by_any_task(autojump_clock: MockClock) -> None:
    order, shuffled, server = list(range(10)), random.Random(1), sample_server()
    async with no_tasks_left(), trio.open_nursery() as nursery, trio.open_nursery() as closers:
        for _ in range(100):
            clients = [await connect_client(nursery, server) for _ in order]
            shuffled.shuffle(order)
            for number in order:
                closers.start_soon(clients[number].aclose)


@each_transport_and_asgi()
async def test_closing_ends_every_call_and_every_listener(variant: Variant, clock: MockClock) -> None:
    ended: list[str] = []

    async def call(client: Client) -> None:
        with pytest.raises(SessionClosed):
            await client.call_tool("hold", {"name": "x"})
        ended.append("a call")

    async def listen(client: Client, task_status: trio.TaskStatus[None]) -> None:
        async with client.listen(tools=True) as changes:
            task_status.started()
            async for _ in changes:
                raise AssertionError("nothing has changed")
        ended.append("a listener")

    async with trio.open_nursery() as nursery, client_of(variant) as client:
        nursery.start_soon(call, client)
        if variant.transport != "http json":
            await nursery.start(listen, client)
        await ledger_up_to(client, "x began")
        with trio.fail_after(60):
            await client.aclose()
    assert sorted(ended) == (["a call"] if variant.transport == "http json" else ["a call", "a listener"])


# Lists.


@req("prm-10")
@each_transport_and_asgi()
async def test_lists_are_read_over_all_their_pages(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        tools = [tool.name for tool in await client.list_tools()]
        assert len(tools) > 15
        assert {"add", "grow"} < set(tools)
        assert [each.name for each in await client.list_resources()] == ["one", "two", "three", "four"]
        assert [each.uri_template for each in await client.list_resource_templates()] == [
            *("rooms://{name}", "doors://{number}", "windows://{number}", "walls://{number}", "roofs://{number}")
        ]
        assert [each.name for each in await client.list_prompts()] == ["review", "short", "long", "wide"]


def _names(items: Iterable[Any]) -> list[str]:
    return [each.name for each in items]


@each_transport_and_asgi()
async def test_a_page_is_requested_with_the_cursor_of_the_page_before(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        first = await client.list_resources_page()
        assert _names(first.resources) == ["one", "two", "three"]
        assert isinstance(first.next_cursor, str)
        second = await client.list_resources_page(first.next_cursor)
        assert _names(second.resources) == ["four"]
        assert second.next_cursor is None
        assert len((await client.list_tools_page()).tools) == 3
        assert len((await client.list_resource_templates_page()).resource_templates) == 3
        assert len((await client.list_prompts_page()).prompts) == 3
        with pytest.raises(RequestError):
            await client.list_tools_page("no cursor of theirs")


# Calls.


@req("tool-42")
@each_transport_and_asgi()
async def test_a_result_has_all_members_of_its_revision(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        result = await client.call_tool("forecast", {"city": "Oslo"})
        assert "Oslo" in text_of(result)
        assert not result.is_error
        if variant.revision >= C:
            assert result.structured_content == {"city": "Oslo", "degrees": [1, 2, 3]}
        assert text_of(await client.call_tool("greet", {"name": "Ærøskøbing"})) == "Hello, Ærøskøbing!"


CALLS: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "a dataclass": ("forecast", {"city": "Oslo"}, Forecast, Forecast("Oslo", [1, 2, 3])),
    "a list": ("words", {"count": 2}, list[str], ["word 0", "word 1"]),
    "an int": ("add", {"a": 1, "b": 2}, int, 3),
    "a str": ("greet", {"name": "you"}, str, "Hello, you!"),
    "a dict": ("forecast", {"city": "Oslo"}, dict[str, Any], {"city": "Oslo", "degrees": [1, 2, 3]}),
}


@each_transport_and_asgi()
async def test_a_structured_value_is_converted_to_the_given_type(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        for name, arguments, returns, value in CALLS.values():
            assert await client.call_tool(name, arguments, returns=returns) == value
        with pytest.raises(RemoteProtocolError, match="add"):
            await client.call_tool("add", {"a": 1, "b": 2}, returns=Forecast)


@req("tool-20", "tool-21", "tool-44")
@each_transport_and_asgi()
async def test_a_tool_that_fails_has_a_result_and_a_refusal_is_an_error(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        result = await client.call_tool("fail", {"why": "no bread"})
        assert result.is_error
        assert text_of(result) == "no bread"
        with pytest.raises(ToolFailed, match="no bread") as failed:
            await client.call_tool("fail", {"why": "no bread"}, returns=int)
        assert failed.value.result.is_error
        with pytest.raises(RequestError) as refused:
            await client.call_tool("refuse", {"code": -31999})
        assert (refused.value.code, refused.value.message, refused.value.data) == (
            -31999, "not today", {"why": "closed"}
        )  # fmt: skip
        with pytest.raises(RequestError) as unknown:
            await client.call_tool("nobody")
        assert unknown.value.code == -32602


@req("tool-18")
@each_transport_and_asgi()
async def test_names_of_tools_are_case_sensitive(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        with pytest.raises(RequestError):
            await client.call_tool("Add", {"a": 1, "b": 2})


@each_transport_and_asgi()
async def test_twenty_calls_at_once_each_have_their_own_answer(variant: Variant, clock: MockClock) -> None:
    answers: dict[int, int] = {}

    async def call(client: Client, number: int) -> None:
        answers[number] = await client.call_tool("add", {"a": number, "b": number}, returns=int)

    async with client_of(variant) as client, trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(call, client, number)
    assert answers == {number: 2 * number for number in range(20)}


@each_transport_and_asgi()
async def test_three_megabytes_are_sent_and_returned(variant: Variant, clock: MockClock) -> None:
    text = "0123456789abcdef" * (3 * 2**16)
    async with client_of(variant) as client:
        assert await client.call_tool("swap", {"text": text}, returns=str) == text[::-1]


@each_transport_and_asgi()
async def test_meta_is_sent_with_one_call_or_with_all(variant: Variant, clock: MockClock) -> None:
    trace = f"00-{7:032x}-{7:016x}-01"
    async with client_of(variant, meta=lambda: {"traceparent": trace, "example.org/of": "all"}) as client:
        meta = await client.call_tool("meta", meta={"example.org/of": "one"}, returns=dict[str, Any])
        assert meta == {"traceparent": trace, "example.org/of": "one"}


# Progress and logs.


@req("prog-10")
@each_transport_and_asgi(without=["http json"])
async def test_progress_comes_in_order_and_before_the_result(variant: Variant, clock: MockClock) -> None:
    received: list[tuple[float, float | None, str | None]] = []

    async def later(*report: Any) -> None:
        await trio.lowlevel.checkpoint()
        received.append(report)

    def say(number: int) -> str | None:
        return None if variant.revision == A else f"number {number}"

    async with client_of(variant) as client:
        await client.call_tool("count", {"to": 5}, on_progress=lambda *report: received.append(report))
        assert received == [(number, 5, say(number)) for number in range(5)]
        received.clear()
        assert await client.call_tool("count", {"to": 3}, on_progress=later, returns=int) == 3
        assert received == [(number, 3, say(number)) for number in range(3)]


@each_transport_and_asgi(without=["child"])
@pytest.mark.parametrize("reports", [True, False], ids=["reporting", "silent"])
async def test_a_call_of_ten_minutes_has_its_answer(reports: bool, variant: Variant, clock: MockClock) -> None:
    """No timer of the client or of the server ends the call.  A silent peer only gets pings."""
    server = Server("patient")

    @server.tool
    async def bake(ctx: Context) -> str:
        for minute in range(10):
            await trio.sleep(60)
            if reports:
                await ctx.progress(minute)
        return "baked"

    received: list[float] = []
    async with client_of(variant, server) as client:
        start = trio.current_time()
        on_progress = (lambda done, total, message: received.append(done)) if reports else None
        assert await client.call_tool("bake", on_progress=on_progress, returns=str) == "baked"
        assert trio.current_time() - start == pytest.approx(600, abs=1)
    assert received == ([*range(10)] if reports and variant.transport != "http json" else [])


@settings(max_examples=200)
@given(text=st.text())
@example(text="12345").via("text like a number")
@example(text='{"a": 1}').via("text like JSON")
@example(text="\u2028\u2029\x85\x00\r\n")
def test_a_tool_gets_exactly_the_text_that_was_sent(text: str) -> None:
    got: list[Any] = []
    server = Server("exact")

    @server.tool
    async def take(text: str) -> str:
        got.append(text)
        return text

    async def main() -> None:
        async with open_client(server) as client:
            got.append(await client.call_tool("take", {"text": text}, returns=str))

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert got == [text, text]
    assert {type(each) for each in got} == {str}


@each_transport_and_asgi(without=["http json"])
async def test_an_exception_of_a_progress_callback_ends_only_its_call(variant: Variant, clock: MockClock) -> None:
    own = KeyError("mine")

    def stumble(*report: Any) -> None:
        raise own

    async with client_of(variant) as client:
        with pytest.raises(KeyError) as raised:
            await client.call_tool("count", {"to": 5}, on_progress=stumble)
        assert raised.value is own
        assert await client.call_tool("add", {"a": 1, "b": 1}, returns=int) == 2


@req("log-02", "log-05", "log-15")
@each_transport_and_asgi(without=["http json"])
async def test_logs_are_delivered_from_the_requested_level_on(variant: Variant, clock: MockClock) -> None:
    received: list[Any] = []
    async with client_of(variant, on_log=received.append, log_level="warning") as client:
        await client.call_tool("talk")
        assert [(each.level, each.logger, each.data) for each in received] == [("warning", "house", {"loud": True})]
        received.clear()
        await client.set_log_level("debug")
        await client.call_tool("talk")
        assert [each.level for each in received] == ["debug", "warning"]
        with pytest.raises(UsageError):
            await client.set_log_level("loud")  # type: ignore[arg-type]


@each_transport_and_asgi(without=["http json", "child"])
async def test_a_failing_log_callback_does_not_fail_the_call(
    variant: Variant, caplog: pytest.LogCaptureFixture, clock: MockClock
) -> None:
    def stumble(message: Any) -> None:
        raise KeyError(message.level)

    async with client_of(variant, on_log=stumble, log_level="debug") as client:
        assert await client.call_tool("talk", returns=str) == "talked"
    assert "a callback of the client has failed" in caplog.text


# Resources, prompts, completion, ping.


@each_transport_and_asgi()
async def test_a_resource_is_read(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        (content,) = (await client.read_resource("house://one")).contents
        assert content.text == "inside house://one"  # type: ignore[union-attr]
        (content,) = (await client.read_resource("rooms://7")).contents
        assert content.text == "the room 7"  # type: ignore[union-attr]
        with pytest.raises(RequestError) as missing:
            await client.read_resource("nowhere://at/all")
        assert missing.value.code == (-32602 if variant.modern else -32002)


@each_transport_and_asgi()
async def test_a_prompt_is_filled_in(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        result = await client.get_prompt("review", {"code": "x = 1", "language": "awk"})
        assert result.messages[0].content.text == "Review this awk: x = 1"  # type: ignore[union-attr]
        with pytest.raises(RequestError):
            await client.get_prompt("review", {})


@req("cmpl-09")
@each_transport_and_asgi()
async def test_a_value_is_completed(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        ref = PromptReference("review")
        assert (await client.complete(ref, "language", "p")).values == ["python", "pascal"]
        context = {"code": "perl"}
        if variant.revision >= C:
            completion = await client.complete(ref, "language", "pe", context=context)
            assert completion.values == ["perl"]
        else:
            completion = await client.complete(ref, "language", "pe", context=context)
            assert completion.values == []  # this revision has no context
        assert (await client.complete(ResourceReference("rooms://{name}"), "name", "x")).values == []


@req("ping-07")
@each_transport_and_asgi()
async def test_a_ping_is_answered_in_revisions_with_ping(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        if variant.modern:
            with pytest.raises(NotInThisRevision):
                await client.ping()
        else:
            await client.ping()


# Cancelling.


@req("cancel-11", "cancel-16", "time-03", "time-04")
@each_transport_and_asgi()
async def test_leaving_a_scope_stops_the_handler_and_the_connection_goes_on(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.call_tool, "hold", {"name": "x"})
                await ledger_up_to(client, "x began")
                scope.cancel()
        assert scope.cancelled_caught
        assert await ledger_up_to(client, "x was cancelled") == ["x began", "x was cancelled"]
        assert await client.call_tool("add", {"a": 1, "b": 1}, returns=int) == 2
        assert client.deviations == ()


@req("cancel-05", "cancel-06", "cancel-21")
@each_transport_and_asgi(without=["child"])
async def test_an_answer_that_crosses_its_cancellation_is_ignored(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        for steps in range(12):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.call_tool, "greet", {"name": "you"})
                    for _ in range(steps):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
        assert await client.call_tool("add", {"a": 1, "b": 1}, returns=int) == 2
        await wait_all_tasks_blocked()
        assert client.deviations == ()


# Questions.

QUESTIONS = [  # the tool that asks, the revisions that have the question, and the text of the result
    ("order", (C, D, E), "Size(size=7, colour='red')"),
    ("order", (C, D, E), "'Declined'"),
    ("visit", (D, E), "Accepted"),
    ("think", (A, B, C, D, E), "m-1: nothing"),
]


@req("mrtr-18", "mrtr-26")
@each_transport_and_asgi(legacy_without=["http json"])
async def test_a_question_of_a_handler_is_answered_by_its_callback(variant: Variant, clock: MockClock) -> None:
    forms: Iterator[Any] = iter([{"size": 7}, Declined()])
    callbacks: dict[str, Any] = {
        "elicitation": lambda form: next(forms),
        "elicitation_url": lambda page: page.host == "pay.example",
        "sampling": lambda asked: ("nothing", "m-1"),
    }
    async with client_of(variant, **callbacks) as client:
        for tool, revisions, said in QUESTIONS:
            if variant.revision in revisions:
                assert text_of(await client.call_tool(tool)) == said
        assert client.deviations == ()


@req("root-01", "root-02", "root-03", "root-16")
@each_transport_and_asgi(legacy_without=["http json"])
async def test_the_roots_are_sent_and_sent_again_when_they_change(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant, roots=["/srv"]) as client:
        assert await client.call_tool("rooms", returns=list[str]) == ["file:///srv"]
        await client.set_roots(["/home"])
        await wait_all_tasks_blocked()  # over HTTP the next call may overtake the notification
        assert await client.call_tool("rooms", returns=list[str]) == ["file:///home"]


@each_transport_and_asgi(legacy_without=["http json"])
async def test_a_question_without_a_callback_ends_only_its_call(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        for tool in ("think", "rooms"):
            try:
                result = await client.call_tool(tool)
            except RequestError:
                pass
            else:
                assert result.is_error
        assert await client.call_tool("add", {"a": 1, "b": 1}, returns=int) == 2


@each_transport_and_asgi(legacy_without=["http json"])
async def test_a_callback_that_fails_ends_the_call_that_asked(variant: Variant, clock: MockClock) -> None:
    own = KeyError("mine")

    def stumble(asked: Any) -> Any:
        raise own

    async with client_of(variant, sampling=stumble) as client:
        if variant.modern:
            with pytest.raises(InputUnavailable) as raised:
                await client.call_tool("think")
            assert raised.value.__cause__ is own
        else:
            assert (await client.call_tool("think")).is_error
        assert await client.call_tool("add", {"a": 1, "b": 1}, returns=int) == 2


@each_transport_and_asgi(legacy_without=["http json"])
@req("elic-25", "elic-48")
async def test_cancelling_a_call_cancels_its_question(variant: Variant, clock: MockClock) -> None:
    asked, dropped = trio.Event(), trio.Event()

    async def ponder(request: Any) -> Any:
        asked.set()
        try:
            await trio.sleep_forever()
        finally:
            dropped.set()

    async with client_of(variant, sampling=ponder) as client:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.call_tool, "think")
                await asked.wait()
                scope.cancel()
        await wait_or_fail(dropped.wait, "the callback's end")
        assert await client.call_tool("add", {"a": 1, "b": 1}, returns=int) == 2


# Changes.


@each_transport_and_asgi(without=["http json"])
async def test_changes_are_received_as_long_as_the_block_runs(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant) as client:
        async with client.listen(RESOURCES_CHANGED, tools=True, prompts=True, resources="house://one") as changes:
            await client.call_tool("touch", {"uri": "house://one"})
            assert await anext(changes) == resource_updated("house://one")
            await client.call_tool("grow")
            lists = {await anext(changes) for _ in range(3)}
            assert lists == {TOOLS_CHANGED, PROMPTS_CHANGED, RESOURCES_CHANGED}
        await client.call_tool("grow")
        async with client.listen(tools=True) as changes:
            await client.call_tool("grow")
            assert await anext(changes) == TOOLS_CHANGED
        assert client.deviations == ()


# Undeclared capabilities.


@req("arch-02", "life-15", "life-16", "prm-11")
@each_transport_and_asgi(without=["child"])
async def test_an_undeclared_capability_is_not_requested(variant: Variant, clock: MockClock) -> None:
    async with client_of(variant, Server("bare")) as client:
        for ask in (client.list_tools, client.list_prompts, client.list_resources):
            with pytest.raises(NotDeclared):
                await ask()


def test_the_default_suite_has_the_child_in_every_revision() -> None:
    met = {
        param.values[0].revision
        for test in list(globals().values())
        for mark in getattr(test, "pytestmark", ())
        if mark.name == "parametrize" and mark.args[0] == "variant"
        for param in mark.args[1]
        if param.values[0].transport == "child" and pytest.mark.default in param.marks
    }
    assert met == {A, B, C, D, E}
