"""A failure of one call, one client or one stream affects no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.server.checkpoints import one_byte_pipe
from tests.server.raw_client import LATEST, connected, every_revision, legacy
from trio_mcp import Context, Limits, ListRoots, RequestError, Server, ToolError, UsageError
from trio_mcp.errors import RemoteProtocolError
from trio_mcp.server import serve_stream
from trio_mcp.types import ImageContent


class ErrorWithoutContent(ToolError):
    def __init__(self) -> None:
        pass  # without the base constructor, there is no content


class ErrorWithoutText(RemoteProtocolError):
    def __str__(self) -> str:
        raise ValueError("no text")


class UnreadableList(list[Any]):
    def __iter__(self) -> Any:
        raise ValueError("the database has gone")


FAILURES: dict[str, Callable[[], BaseException]] = {
    "content of the wrong type": lambda: ToolError([ImageContent("aGVsbG8=", "image/png")]),  # type: ignore[arg-type]
    "an error without content": ErrorWithoutContent,
    "an error without text": lambda: ErrorWithoutText("?"),
    "data that cannot be read": lambda: RequestError(1, "x", UnreadableList([1])),
    "content that cannot be read": lambda: ToolError(UnreadableList(["text"])),
    "another loop's cancellation": asyncio.CancelledError,
    "the end of the process": lambda: SystemExit(3),
    "a group of several": lambda: BaseExceptionGroup("all", [asyncio.CancelledError(), ValueError()]),
}


@pytest.mark.contract
@every_revision
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failure_fails_only_its_own_call(revision: str, failure: str, autojump_clock: MockClock) -> None:
    server = Server("failing")

    @server.tool
    async def fail() -> str:
        raise FAILURES[failure]()

    @server.tool
    async def work() -> str:
        return "done"

    async with connected(server, revision) as wire:
        answer = await wire.exchange("tools/call", {"name": "fail"})
        assert "error" in answer or answer["result"]["isError"]
        assert "database" not in str(answer)
        assert (await wire.call("tools/call", {"name": "work"}))["content"][0]["text"] == "done"


async def test_a_filter_error_that_is_no_json_fails_only_its_request(autojump_clock: MockClock) -> None:
    def refuse(principal: Any, item: Any) -> bool:
        raise RequestError(1, "x", object())

    server = Server("filtered", filter=refuse)
    server.resource("notes://one")(lambda: "one")
    async with connected(server, LATEST) as wire:
        asked = {"notifications": {"resourceSubscriptions": ["notes://one"]}}
        assert "error" in await wire.exchange("subscriptions/listen", asked)
        assert (await wire.about())["capabilities"]


@pytest.mark.contract
@every_revision
async def test_a_drain_refuses_a_call_with_an_unknown_request_state(revision: str, autojump_clock: MockClock) -> None:
    server, drain, begun = Server("draining"), trio.Event(), []

    @server.tool
    async def slow() -> str:
        begun.append(trio.current_time())
        await trio.sleep(10)
        return "done"

    async with connected(server, revision, drain=drain) as wire:
        first = await wire.start("tools/call", {"name": "slow"})
        await wait_all_tasks_blocked()
        drain.set()
        again = await wire.exchange("tools/call", {"name": "slow", "requestState": "x"})
        assert "error" in again
        assert "result" in await wire.response(first)
    assert len(begun) == 1


@legacy
async def test_the_last_of_subscribe_and_unsubscribe_counts(revision: str, autojump_clock: MockClock) -> None:
    server = Server("noted")
    server.resource("notes://one")(lambda: "one")
    async with connected(server, revision) as wire:
        for _ in range(20):
            ids = [
                await wire.start(f"resources/{verb}", {"uri": "notes://one"})
                for verb in ("subscribe", "unsubscribe", "subscribe", "unsubscribe")
            ]
            for id in ids:
                await wire.response(id)
            server.notify_resource_updated("notes://one")
            await trio.sleep(1)
        assert wire.noted("notifications/resources/updated") == []


@pytest.mark.contract
async def test_an_ended_call_sends_no_message_for_a_later_one(autojump_clock: MockClock) -> None:
    server, old = Server("ids"), []

    @server.tool
    async def first(ctx: Context) -> str:
        old.append(ctx)
        await trio.sleep_forever()
        return "never"

    @server.tool
    async def second(ctx: Context) -> str:
        await old[0].progress(50)
        await old[0].log("alert", "from the grave")
        await ctx.progress(1)
        return "done"

    async with connected(server, LATEST, log_level="debug") as wire:
        await wire.start("tools/call", {"name": "first"}, id=7, progress="one")
        await wait_all_tasks_blocked()
        await wire.cancel(7)
        await wait_all_tasks_blocked()
        await wire.call("tools/call", {"name": "second"}, id=8, progress="two")
        assert [params["progress"] for method, params in wire.notes if method.endswith("progress")] == [1]
        assert not wire.noted("notifications/message")


async def test_progress_must_rise_also_without_a_token(autojump_clock: MockClock) -> None:
    server, raised = Server("falling"), []

    @server.tool
    async def fall(ctx: Context) -> str:
        await ctx.progress(2)
        await ctx.progress(2)
        for value in (1, "3", True, float("nan"), float("inf")):
            with pytest.raises(UsageError, match="progress must be a number that rises from 2, got"):
                await ctx.progress(value)  # type: ignore[arg-type]
            raised.append(value)
        return "fell"

    async with connected(server, LATEST) as wire:
        await wire.call("tools/call", {"name": "fall"})
    assert len(raised) == 5


async def test_a_stream_that_fails_to_close_leaves_no_connection(autojump_clock: MockClock) -> None:
    class Stubborn(trio.abc.Stream):
        async def send_all(self, data: bytes | bytearray | memoryview) -> None: ...

        async def wait_send_all_might_not_block(self) -> None: ...

        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            await trio.lowlevel.checkpoint()
            return b""

        async def aclose(self) -> None:
            raise OSError("it will not")

    server = Server("closing")
    async with server.running():
        for _ in range(3):
            with pytest.raises(OSError, match="it will not"):
                await serve_stream(server, Stubborn())
        assert server.statistics().connections == 0


async def test_a_question_that_is_no_json_leaves_no_parked_call(autojump_clock: MockClock) -> None:
    class Unreadable(ListRoots):
        def params(self, revision: Any) -> dict[str, Any]:
            return {"rows": UnreadableList([1])}

    server = Server("asking")

    @server.tool
    async def ask(ctx: Context) -> str:
        await ctx.ask(rows=Unreadable())
        return "asked"

    async with server.running(), connected(server, LATEST) as wire:
        assert (await wire.call("tools/call", {"name": "ask"}))["isError"]
        assert server.statistics().parked == 0


@every_revision
async def test_progress_may_be_a_subclass_of_float_while_the_client_is_slow(
    revision: str, autojump_clock: MockClock
) -> None:
    class Float(float):
        """Like the floats of numpy."""

    server = Server("floats", limits=Limits(outgoing=1))

    @server.tool
    async def count(ctx: Context) -> str:
        for done in range(1, 5):
            await ctx.progress(Float(done), Float(4))
        return "counted"

    async with connected(server, revision, streams=one_byte_pipe) as wire:
        with wire.not_reading():
            id = await wire.start("tools/call", {"name": "count", "arguments": {}}, progress="p")
            await trio.sleep(5)
        answer = await wire.response(id)
        assert answer["result"]["content"][0]["text"] == "counted"
