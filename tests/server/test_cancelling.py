"""Requests that their client takes back: whenever it does, and whatever their handlers make of it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.requirements import req
from tests.server.checkpoints import one_byte_pipe, unwrapped
from tests.server.raw_client import CANCELLED, MESSAGE, PROGRESS, RawClient, connected, every_revision, legacy, modern
from trio_mcp import Context, Limits, Server, serve_stream
from trio_mcp.core import ConnectionLost
from trio_mcp.errors import SessionClosed
from trio_mcp.server import ClientGone, PendingQuestion

# A question without an outcome ends only under a shield, which no server can bring about.

Body = Callable[[Context], Awaitable[Any]]
CALL = {"name": "work"}


def working(body: Body, **options: Any) -> Server:
    """A server with a tool that does what `body` does, and one that just answers."""
    server = Server("working", **options)

    @server.tool
    async def work(ctx: Context) -> str:
        await body(ctx)
        return "worked"

    @server.tool
    async def quick() -> str:
        return "quick"

    return server


def cancel(id: Any, **more: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": CANCELLED, "params": {"requestId": id, **more}}


async def works(wire: RawClient, server: Server) -> None:
    assert (await wire.call("tools/call", {"name": "quick"}))["content"][0]["text"] == "quick"
    await wait_all_tasks_blocked()
    assert server.statistics().running == 0


# What handlers make of it.


class Bodies:
    """Ways to take a cancellation.  `log`: what happened."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def passes_it_on(self, ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.log.append("finally")

    async def cleans_up_for_a_while(self, ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await ctx.progress(50)
                await ctx.log("error", "cleaning up")
                await trio.sleep(10)
            self.log.append("finally")

    async def swallows_it(self, ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            self.log.append("finally")

    async def swallows_it_and_goes_on(self, ctx: Context) -> None:
        for _ in range(3):
            with trio.CancelScope() as scope:
                try:
                    await trio.sleep_forever()
                except trio.Cancelled:
                    scope.cancel()
        self.log.append("finally")

    async def fails_instead(self, ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            self.log.append("finally")
            raise ValueError("could not clean up") from None

    async def fails_in_a_nursery(self, ctx: Context) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.fails_instead, ctx)
            await trio.sleep_forever()

    async def exits(self, ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            self.log.append("finally")
            raise SystemExit(3) from None

    async def is_in_a_shield(self, ctx: Context) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(10)
        self.log.append("finally")


BODIES = [name for name in vars(Bodies) if not name.startswith("_")]


@pytest.mark.contract
@req("cancel-03", "cancel-17", "cancel-18")
@pytest.mark.parametrize("name", BODIES)
@every_revision
async def test_whatever_a_handler_makes_of_it_nothing_is_sent_and_the_others_go_on(
    revision: str, name: str, autojump_clock: MockClock
) -> None:
    bodies = Bodies()
    server = working(getattr(bodies, name))
    async with connected(server, revision, log_level="debug") as wire:
        one = await wire.start("tools/call", CALL, progress="one")
        two = await wire.start("tools/call", CALL, progress="two")
        await wait_all_tasks_blocked()
        await wire.cancel(one)
        await trio.sleep(100)
        if name != "is_in_a_shield":
            assert bodies.log == ["finally"]
            assert server.statistics().running == 1
            await wire.cancel(two)
        await trio.sleep(100)
        assert bodies.log == ["finally"] * 2
        heard = [wire.answered(id) for id in (one, two)]
        assert heard == [False, name == "is_in_a_shield"]
        assert not wire.noted(PROGRESS)
        assert not wire.noted(MESSAGE)
        await works(wire, server)


@pytest.mark.contract
@every_revision
async def test_a_handler_that_asks_or_reports_is_reached_there(revision: str, autojump_clock: MockClock) -> None:
    ends = []

    async def body(ctx: Context) -> None:
        try:
            await ctx.progress(1)
            await ctx.sample("How many?", max_tokens=5)
        finally:
            ends.append(trio.current_effective_deadline())

    server = working(body)

    async def think(params: Any) -> None:
        await trio.sleep_forever()

    async with connected(server, revision, answers={"sampling/createMessage": think}) as wire:
        id = await wire.start("tools/call", CALL, progress="p")
        await wait_all_tasks_blocked()
        if wire.modern:  # it has its answer: the question.  Who asked is nobody's to cancel now, and waits for long.
            assert wire.answered(id)
            await wire.cancel(id)
            await wait_all_tasks_blocked()
            assert (ends, server.statistics().parked) == ([], 1)
        else:
            await wire.cancel(id)
            assert (await wire.note(CANCELLED))["requestId"] == 1  # our question is taken back
            assert ends == [-float("inf")]
        await works(wire, server)


# When.


@every_revision
async def test_what_is_cancelled_in_the_same_breath_never_begins(revision: str, autojump_clock: MockClock) -> None:
    began = []

    async def body(ctx: Context) -> None:
        began.append(ctx.request_id)

    server = working(body)

    @server.tool(thread=False)
    def inline(ctx: Context) -> None:
        began.append(ctx.request_id)

    @server.tool
    def thread(ctx: Context) -> None:
        began.append(ctx.request_id)

    async with connected(server, revision) as wire:
        for name in ("work", "inline", "thread"):
            request = wire.request("tools/call", {"name": name})
            both = [json.dumps(each).encode() + b"\n" for each in (request, cancel(request["id"]))]
            wire.post_bytes(b"".join(both))
        await works(wire, server)
        assert began == []


@pytest.mark.contract
@req("cancel-06", "cancel-08")
@every_revision
async def test_what_is_cancelled_too_late_or_never_was_is_ignored(revision: str, autojump_clock: MockClock) -> None:
    async def body(ctx: Context) -> None: ...

    server = working(body)
    async with connected(server, revision) as wire:
        done = await wire.start("tools/call", CALL)
        await wire.response(done)
        heard = len(wire.lines)
        for id in (done, 9999, "unknown", str(done), -1, ""):
            await wire.cancel(id, "too late")
            await wire.cancel(id)
        for params in ({}, {"requestId": None}, {"requestId": [1]}, {"requestId": {}}, {"requestId": 1.5}):
            await wire.notify(CANCELLED, params)
        await wait_all_tasks_blocked()
        assert len(wire.lines) == heard
        await works(wire, server)


@req("cancel-06")
@every_revision
async def test_a_cancellation_may_cross_the_answer(revision: str, autojump_clock: MockClock) -> None:
    """At whichever step of the handler's end it arrives: there is one answer, or none."""
    seen = set()
    for steps in range(20):
        go_on = trio.Event()

        async def body(ctx: Context, steps: int = steps, go_on: trio.Event = go_on) -> None:
            go_on.set()
            for _ in range(steps):
                await trio.lowlevel.checkpoint()

        server = working(body)
        async with connected(server, revision) as wire:
            id = await wire.start("tools/call", CALL)
            await go_on.wait()
            await wire.cancel(id)
            await wait_all_tasks_blocked()
            seen.add(wire.answered(id))
            await works(wire, server)
    assert seen == {True, False}


@every_revision
async def test_what_was_queued_for_a_request_is_not_sent_after_its_cancellation(
    revision: str, autojump_clock: MockClock
) -> None:
    async def body(ctx: Context) -> None:
        for number in range(5):
            await ctx.progress(number)
        await trio.sleep_forever()

    server = working(body)
    async with connected(server, revision, streams=one_byte_pipe) as wire:
        with wire.not_reading():
            other = await wire.start("tools/call", {"name": "quick"})
            await wait_all_tasks_blocked()  # the wire is busy now
            id = await wire.start("tools/call", CALL, progress="p")
            await wait_all_tasks_blocked()
            await wire.cancel(id)
            await wait_all_tasks_blocked()
        await wire.response(other)
        await works(wire, server)
        assert not wire.noted(PROGRESS)


@every_revision
async def test_a_call_that_has_ended_and_waits_for_the_wire_can_still_be_cancelled(
    revision: str, autojump_clock: MockClock
) -> None:
    """It waits for its progress to be on its way before its answer is."""
    server = Server("reporting", limits=Limits(calls=1))

    @server.tool
    async def report(ctx: Context, times: int) -> str:
        for number in range(times):
            await ctx.progress(number)
            await wait_all_tasks_blocked()  # the first is being written then
        return "reported"

    async with connected(server, revision, streams=one_byte_pipe) as wire:
        with wire.not_reading():
            first = await wire.start("tools/call", {"name": "report", "arguments": {"times": 2}}, progress="p")
            await wait_all_tasks_blocked()
            assert server.statistics().running == 1
            await wire.cancel(first)
            await wait_all_tasks_blocked()
            assert server.statistics().running == 0
            second = await wire.start("tools/call", {"name": "report", "arguments": {"times": 0}})
        assert (await wire.response(second))["result"]["content"][0]["text"] == "reported"
        assert not wire.answered(first)


@legacy
async def test_initialize_is_answered_whatever_is_cancelled(revision: str, autojump_clock: MockClock) -> None:
    async def body(ctx: Context) -> None: ...

    server = working(body)
    async with connected(server, revision, opened=False) as wire:
        params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        wire.post(wire.request("initialize", params, id="open"))
        wire.post(cancel("open"))
        assert (await wire.response("open"))["result"]["protocolVersion"] == revision
        await wire.notify("notifications/initialized")
        await works(wire, server)


# Ids.


@pytest.mark.contract
@every_revision
async def test_an_id_in_use_is_refused_to_another_and_the_first_goes_on(
    revision: str, autojump_clock: MockClock
) -> None:
    gate, began = trio.Event(), []

    async def body(ctx: Context) -> None:
        began.append(ctx.request_id)
        await gate.wait()

    server = working(body)
    async with connected(server, revision) as wire:
        first = await wire.start("tools/call", CALL, id="same")
        await wait_all_tasks_blocked()
        again = wire.request("tools/call", CALL, id="same")
        wire.post_bytes(json.dumps(again).encode() + b"\n")
        await wait_all_tasks_blocked()
        # The refusal must not be taken for the answer of the first.
        [refused] = wire.unaddressed
        assert (refused["error"]["code"], began, wire.answered(first)) == (-32600, ["same"], False)
        gate.set()
        assert (await wire.response(first))["result"]["content"][0]["text"] == "worked"
        await works(wire, server)


@every_revision
async def test_an_id_is_in_use_until_its_cancelled_handler_has_ended_and_free_then(
    revision: str, autojump_clock: MockClock
) -> None:
    bodies = Bodies()
    server = working(bodies.cleans_up_for_a_while)
    async with connected(server, revision) as wire:
        await wire.start("tools/call", CALL, id=7)
        await wait_all_tasks_blocked()
        await wire.cancel(7)
        wire.post_bytes(json.dumps(wire.request("tools/list", id=7)).encode() + b"\n")
        await wait_all_tasks_blocked()
        # Its answer goes to nobody any more, so the id may be named.
        assert (await wire.response(7))["error"]["code"] == -32600
        await trio.sleep(100)
        await wire.start("tools/call", {"name": "quick"}, id=7)
        assert (await wire.response(7))["result"]["content"][0]["text"] == "quick"
        await works(wire, server)


@every_revision
async def test_an_id_that_is_used_again_names_the_new_request_alone(revision: str, autojump_clock: MockClock) -> None:
    """Also while the line with the old one's answer is still on its way."""
    ends = []

    async def body(ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ends.append(ctx.request_id)

    server = working(body, limits=Limits(calls=2))
    async with connected(server, revision, streams=one_byte_pipe) as wire:
        with wire.not_reading():
            await wire.start("tools/call", {"name": "quick"}, id=1)
            await wait_all_tasks_blocked()
            assert server.statistics().running == 1  # it is being written
            wire.post_bytes(json.dumps(wire.request("tools/call", CALL, id=1)).encode() + b"\n")
            await wait_all_tasks_blocked()
            assert server.statistics().running == 2
            await wire.cancel(1)
            await wait_all_tasks_blocked()
            assert (ends, server.statistics().running) == ([1], 1)
        assert (await wire.response(1))["result"]["content"][0]["text"] == "quick"
        # And the old one's end, when its line is written, is not that of the new one.
        with wire.not_reading():
            await wire.start("tools/call", {"name": "quick"}, id=3)
            await wait_all_tasks_blocked()
            wire.post_bytes(json.dumps(wire.request("tools/call", CALL, id=3)).encode() + b"\n")
            await wait_all_tasks_blocked()
            assert server.statistics().running == 2
        assert (await wire.response(3))["result"]["content"][0]["text"] == "quick"
        await wait_all_tasks_blocked()
        await wire.cancel(3)
        await wait_all_tasks_blocked()
        assert ends == [1, 3]
        await works(wire, server)


@modern
async def test_a_subscription_ends_when_it_is_cancelled_and_is_told_nothing_more(
    revision: str, autojump_clock: MockClock
) -> None:
    async def body(ctx: Context) -> None: ...

    server = working(body, change_debounce=0)
    async with connected(server, revision) as wire:
        listening = await wire.subscribe(tools=True)
        server.notify_list_changed("tools")
        assert await wire.changed() == ("tools", None)
        await wire.cancel(listening.id)
        await wait_all_tasks_blocked()
        assert server.statistics().listeners == 0
        server.notify_list_changed("tools")
        await trio.sleep(1)
        assert not wire.answered(listening.id)
        again = await wire.subscribe(tools=True)  # an id may come again
        assert again.agreed == {"tools"}
        await works(wire, server)


@every_revision
async def test_a_cancelled_handler_is_no_failure_and_its_reason_is_there_to_be_read(
    revision: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    reasons = []

    async def body(ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            reasons.append(cancelled.reason)
            raise

    server = working(body)
    async with connected(server, revision) as wire:
        for reason in ("the user went home", None, "", "x" * 10_000):
            id = await wire.start("tools/call", CALL)
            await wait_all_tasks_blocked()
            await wire.cancel(id, reason)
        for odd in (7, {"why": 1}, None):
            id = await wire.start("tools/call", CALL)
            await wait_all_tasks_blocked()
            wire.post(cancel(id, reason=odd))
        await works(wire, server)
    usual = "the client cancelled the request"
    assert reasons == ["the user went home", usual, usual, "x" * 10_000, usual, usual, usual]
    assert not caplog.records


@every_revision
async def test_when_the_client_goes_its_handlers_hear_why(revision: str, autojump_clock: MockClock) -> None:
    reasons = []

    async def body(ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            reasons.append(cancelled.reason)
            raise

    async with connected(working(body), revision) as wire:
        await wire.start("tools/call", CALL)
        await wait_all_tasks_blocked()
    assert reasons == ["this call had not finished 5 seconds after the end of the client's input"]


# With more than the request.


@legacy
async def test_what_waits_for_another_of_its_kind_ends_with_its_connection(
    revision: str, autojump_clock: MockClock
) -> None:
    """Subscriptions are served in the order in which they came."""
    began = []

    async def slowly(ctx: Context, request: Any, call_next: Any) -> Any:
        if request.method == "resources/subscribe":
            began.append(request.params["uri"])
            await trio.sleep(100)
        return await call_next(request)

    server = Server("slow", middleware=[slowly], capabilities=["resources"])
    for shared in (False, True):
        scope = trio.CancelScope()

        async def serve(server: Server, stream: Any, scope: trio.CancelScope = scope) -> None:
            with scope:
                await serve_stream(server, stream)

        async with server.running() if shared else nullcontext(), connected(server, revision, serve=serve) as wire:
            for uri in ("it://one", "it://two", "it://three"):
                await wire.start("resources/subscribe", {"uri": uri})
            await trio.sleep(10)
            assert server.statistics().running == 3
            scope.cancel()
            await wire.ended.wait()
            await wait_all_tasks_blocked()
            assert server.statistics().running == 0
    assert began == ["it://one"] * 2


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_question_that_is_lost_while_its_call_goes_on_says_so(
    cancelled: bool, autojump_clock: MockClock
) -> None:
    """As where each call has a stream of its own; when it is cancelled at the same moment, that says it better."""
    asked, ends = PendingQuestion(1), []

    async def ask() -> None:
        try:
            await asked.result()
        except BaseException as error:
            ends.append(type(error))
            raise

    with trio.CancelScope() as scope, suppress(SessionClosed), unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            asked.outcome = ConnectionLost(1, "sampling/createMessage", "its stream is gone")
            asked.done.set()
            if cancelled:
                scope.cancel()
    assert ends == [trio.Cancelled if cancelled else ClientGone]
