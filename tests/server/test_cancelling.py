"""Cancellation of requests by the client: at any time, and with any reaction of the handler."""

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

# A question without an outcome raises `ClientGone` only under a shield.  No server can cause this, so no test has it.

Body = Callable[[Context], Awaitable[Any]]
CALL = {"name": "work"}


def new_server(body: Body, **options: Any) -> Server:
    """A server with a tool that runs `body`, and a tool that answers at once."""
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


async def check_server(wire: RawClient, server: Server) -> None:
    assert (await wire.call("tools/call", {"name": "quick"}))["content"][0]["text"] == "quick"
    await wait_all_tasks_blocked()
    assert server.statistics().running == 0


# Reactions of handlers.


class Bodies:
    """Reactions of a handler to its cancellation.  Each appends to `log` when it ends."""

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
async def test_a_cancelled_handler_sends_no_message_and_affects_no_other(
    revision: str, name: str, autojump_clock: MockClock
) -> None:
    bodies = Bodies()
    server = new_server(getattr(bodies, name))
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
        await check_server(wire, server)


@pytest.mark.contract
@every_revision
async def test_a_handler_that_asks_or_reports_can_be_cancelled(revision: str, autojump_clock: MockClock) -> None:
    ends = []

    async def body(ctx: Context) -> None:
        try:
            await ctx.progress(1)
            await ctx.sample("How many?", max_tokens=5)
        finally:
            ends.append(trio.current_effective_deadline())

    server = new_server(body)

    async def think(params: Any) -> None:
        await trio.sleep_forever()

    async with connected(server, revision, answers={"sampling/createMessage": think}) as wire:
        id = await wire.start("tools/call", CALL, progress="p")
        await wait_all_tasks_blocked()
        if wire.modern:  # the question is the answer, so it is too late to cancel: the handler waits for a retry
            assert wire.answered(id)
            await wire.cancel(id)
            await wait_all_tasks_blocked()
            assert (ends, server.statistics().parked) == ([], 1)
        else:
            await wire.cancel(id)
            assert (await wire.note(CANCELLED))["requestId"] == 1  # the server cancels its question
            assert ends == [-float("inf")]
        await check_server(wire, server)


# The time of the cancellation.


@every_revision
async def test_a_request_cancelled_in_the_same_read_never_begins(revision: str, autojump_clock: MockClock) -> None:
    began = []

    async def body(ctx: Context) -> None:
        began.append(ctx.request_id)

    server = new_server(body)

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
        await check_server(wire, server)
        assert began == []


@pytest.mark.contract
@req("cancel-06", "cancel-08")
@every_revision
async def test_a_late_or_invalid_cancellation_is_ignored(revision: str, autojump_clock: MockClock) -> None:
    async def body(ctx: Context) -> None: ...

    server = new_server(body)
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
        await check_server(wire, server)


@req("cancel-06")
@every_revision
async def test_a_cancellation_may_cross_the_answer(revision: str, autojump_clock: MockClock) -> None:
    """At each step of the end of the handler, there is one answer or no answer."""
    seen = set()
    for steps in range(20):
        go_on = trio.Event()

        async def body(ctx: Context, steps: int = steps, go_on: trio.Event = go_on) -> None:
            go_on.set()
            for _ in range(steps):
                await trio.lowlevel.checkpoint()

        server = new_server(body)
        async with connected(server, revision) as wire:
            id = await wire.start("tools/call", CALL)
            await go_on.wait()
            await wire.cancel(id)
            await wait_all_tasks_blocked()
            seen.add(wire.answered(id))
            await check_server(wire, server)
    assert seen == {True, False}


@every_revision
async def test_messages_queued_for_a_request_are_dropped_at_its_cancellation(
    revision: str, autojump_clock: MockClock
) -> None:
    async def body(ctx: Context) -> None:
        for number in range(5):
            await ctx.progress(number)
        await trio.sleep_forever()

    server = new_server(body)
    async with connected(server, revision, streams=one_byte_pipe) as wire:
        with wire.not_reading():
            other = await wire.start("tools/call", {"name": "quick"})
            await wait_all_tasks_blocked()  # the wire is busy now
            id = await wire.start("tools/call", CALL, progress="p")
            await wait_all_tasks_blocked()
            await wire.cancel(id)
            await wait_all_tasks_blocked()
        await wire.response(other)
        await check_server(wire, server)
        assert not wire.noted(PROGRESS)


@every_revision
async def test_a_call_that_has_ended_and_waits_for_the_wire_can_still_be_cancelled(
    revision: str, autojump_clock: MockClock
) -> None:
    """Its answer waits until its progress has been written."""
    server = Server("reporting", limits=Limits(calls=1))

    @server.tool
    async def report(ctx: Context, times: int) -> str:
        for number in range(times):
            await ctx.progress(number)
            await wait_all_tasks_blocked()  # the first report is being written
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
async def test_initialize_cannot_be_cancelled(revision: str, autojump_clock: MockClock) -> None:
    async def body(ctx: Context) -> None: ...

    server = new_server(body)
    async with connected(server, revision, opened=False) as wire:
        params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        wire.post(wire.request("initialize", params, id="open"))
        wire.post(cancel("open"))
        assert (await wire.response("open"))["result"]["protocolVersion"] == revision
        await wire.notify("notifications/initialized")
        await check_server(wire, server)


# Ids.


@pytest.mark.contract
@every_revision
async def test_a_second_request_with_an_id_in_use_is_refused(revision: str, autojump_clock: MockClock) -> None:
    gate, began = trio.Event(), []

    async def body(ctx: Context) -> None:
        began.append(ctx.request_id)
        await gate.wait()

    server = new_server(body)
    async with connected(server, revision) as wire:
        first = await wire.start("tools/call", CALL, id="same")
        await wait_all_tasks_blocked()
        again = wire.request("tools/call", CALL, id="same")
        wire.post_bytes(json.dumps(again).encode() + b"\n")
        await wait_all_tasks_blocked()
        # The client must not take the refusal for the answer to the first request.
        [refused] = wire.unaddressed
        assert (refused["error"]["code"], began, wire.answered(first)) == (-32600, ["same"], False)
        gate.set()
        assert (await wire.response(first))["result"]["content"][0]["text"] == "worked"
        await check_server(wire, server)


@every_revision
async def test_an_id_is_in_use_until_its_cancelled_handler_has_ended(revision: str, autojump_clock: MockClock) -> None:
    bodies = Bodies()
    server = new_server(bodies.cleans_up_for_a_while)
    async with connected(server, revision) as wire:
        await wire.start("tools/call", CALL, id=7)
        await wait_all_tasks_blocked()
        await wire.cancel(7)
        wire.post_bytes(json.dumps(wire.request("tools/list", id=7)).encode() + b"\n")
        await wait_all_tasks_blocked()
        # The cancelled request gets no answer, so the error may name the id.
        assert (await wire.response(7))["error"]["code"] == -32600
        await trio.sleep(100)
        await wire.start("tools/call", {"name": "quick"}, id=7)
        assert (await wire.response(7))["result"]["content"][0]["text"] == "quick"
        await check_server(wire, server)


@every_revision
async def test_an_id_that_is_used_again_names_only_the_new_request(revision: str, autojump_clock: MockClock) -> None:
    """Also while the line with the old answer is still being written."""
    ends = []

    async def body(ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ends.append(ctx.request_id)

    server = new_server(body, limits=Limits(calls=2))
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
        # The end of the old request, when its line is written, does not end the new request.
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
        await check_server(wire, server)


@modern
async def test_a_cancelled_subscription_gets_no_more_changes(revision: str, autojump_clock: MockClock) -> None:
    async def body(ctx: Context) -> None: ...

    server = new_server(body, change_debounce=0)
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
        await check_server(wire, server)


@every_revision
async def test_a_cancelled_handler_can_read_the_reason_and_is_not_logged(
    revision: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    reasons = []

    async def body(ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            reasons.append(cancelled.reason)
            raise

    server = new_server(body)
    async with connected(server, revision) as wire:
        for reason in ("the user went home", None, "", "x" * 10_000):
            id = await wire.start("tools/call", CALL)
            await wait_all_tasks_blocked()
            await wire.cancel(id, reason)
        for odd in (7, {"why": 1}, None):
            id = await wire.start("tools/call", CALL)
            await wait_all_tasks_blocked()
            wire.post(cancel(id, reason=odd))
        await check_server(wire, server)
    usual = "the client cancelled the request"
    assert reasons == ["the user went home", usual, usual, "x" * 10_000, usual, usual, usual]
    assert not caplog.records


@every_revision
async def test_the_end_of_the_client_cancels_its_handlers_with_a_reason(
    revision: str, autojump_clock: MockClock
) -> None:
    reasons = []

    async def body(ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            reasons.append(cancelled.reason)
            raise

    async with connected(new_server(body), revision) as wire:
        await wire.start("tools/call", CALL)
        await wait_all_tasks_blocked()
    assert reasons == ["this call had not finished 5 seconds after the end of the client's input"]


# Cancellation with the connection or the question.


@legacy
async def test_requests_that_wait_for_their_turn_end_with_their_connection(
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
async def test_a_lost_question_raises_client_gone(cancelled: bool, autojump_clock: MockClock) -> None:
    """As on a transport with one stream per call.  If the call is cancelled at the same time, it raises `Cancelled`."""
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
