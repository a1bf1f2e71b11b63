"""A drain of a server: new requests are refused, running calls may finish until a deadline, and the rest is stopped."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.server.checkpoints import unlimited_pipe, unwrapped
from tests.server.raw_client import LATEST, ErrorResponse, ProtocolViolation, connected, every_revision, modern
from trio_mcp import Context, Server, UsageError, serve_http, serve_stream
from trio_mcp.server import Run


def working_server(**options: Any) -> Server:
    server = Server("working", **options)

    @server.tool
    async def work(seconds: float) -> str:
        await trio.sleep(seconds)
        return "done"

    @server.tool
    async def asks(ctx: Context) -> str:
        return str(await ctx.elicit("Sure?", bool))

    return server


def work(seconds: float) -> dict[str, Any]:
    return {"name": "work", "arguments": {"seconds": seconds}}


@pytest.mark.contract
@every_revision
async def test_a_drain_refuses_new_requests_and_lets_calls_finish(revision: str, autojump_clock: MockClock) -> None:
    server = working_server()
    async with (
        server.running(),
        connected(server, revision) as busy,
        connected(server, revision) as idle,
        connected(server, revision) as other,
    ):
        calls = [await wire.start("tools/call", work(5)) for wire in (busy, other)]
        await wait_all_tasks_blocked()
        start = trio.current_time()
        async with server.draining(10):
            for wire in (busy, other):
                with pytest.raises(ErrorResponse, match="shutting down"):
                    await wire.call("tools/call", work(0))
            await idle.ended.wait()
            assert trio.current_time() == start
            async with connected(server, revision, opened=False) as late:
                await late.ended.wait()
            assert trio.current_time() == start
        assert trio.current_time() == start + 5
        await wait_all_tasks_blocked()
        assert server.statistics().connections == 0
        for wire, id in zip((busy, other), calls, strict=True):
            assert "result" in await wire.response(id)
        # New connections are refused for the rest of this run.
        async with connected(server, revision, opened=False) as late:
            await late.ended.wait()


@pytest.mark.contract(inside=(3,))
@pytest.mark.parametrize("inside", [0, 3, 20])
@every_revision
async def test_calls_are_stopped_at_the_deadline_which_counts_from_the_start(
    revision: str, inside: int, autojump_clock: MockClock
) -> None:
    server = working_server()
    async with server.running(), connected(server, revision) as wire:
        id = await wire.start("tools/call", work(100))
        await wait_all_tasks_blocked()
        start = trio.current_time()
        async with server.draining(10):
            await trio.sleep(inside)
            assert not wire.ended.is_set()
        assert trio.current_time() == start + max(inside, 10)
        await wire.ended.wait()
        assert trio.current_time() == start + max(inside, 10)
        error = (await wire.response(id))["error"]
        assert (error["code"], error["message"]) == (-32603, "the server has shut down before this call had finished")
        await wait_all_tasks_blocked()
        now = server.statistics()
        assert (now.connections, now.running) == (0, 0)


async def test_a_drain_waits_for_the_lifespan_of_a_connection(autojump_clock: MockClock) -> None:
    """A drain is no cancellation: the lifespan has time to end."""
    ended = []

    @contextlib.asynccontextmanager
    async def lifespan(_: Server) -> AsyncIterator[None]:
        yield
        await trio.sleep(50)
        ended.append(trio.current_time())

    server = working_server(lifespan=lifespan)
    async with connected(server, LATEST) as wire:
        await wire.start("tools/call", work(100))
        await wait_all_tasks_blocked()
        async with server.draining(10):
            pass
        await wire.ended.wait()
    assert ended == [60]


async def test_a_drain_waits_for_the_lifespan_of_an_http_server(autojump_clock: MockClock) -> None:
    ended = []

    @contextlib.asynccontextmanager
    async def lifespan(_: Server) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await trio.sleep(3)
            ended.append(trio.current_time())

    server = working_server(lifespan=lifespan)
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_http, server)
        async with server.draining(10):
            await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert ended == [3]


async def test_a_drain_with_an_infinite_deadline_waits_for_all_calls(autojump_clock: MockClock) -> None:
    server = working_server()
    async with connected(server, LATEST) as wire:
        await wire.start("tools/call", work(10_000))
        await wait_all_tasks_blocked()
        async with server.draining(math.inf):
            pass
        assert trio.current_time() == 10_000


async def test_a_server_that_does_not_run_is_drained_at_once(autojump_clock: MockClock) -> None:
    async with working_server().draining(10):
        pass
    assert trio.current_time() == 0


@pytest.mark.parametrize("end", ["cancelled", "raises"])
async def test_a_failure_in_the_block_of_a_drain_stops_all_calls_at_once(end: str, autojump_clock: MockClock) -> None:
    server, error = working_server(), ValueError("mine")

    async def drain() -> None:
        async with server.draining(10):
            await trio.sleep(1)
            raise error

    async with server.running(), connected(server, LATEST) as wire:
        await wire.start("tools/call", work(100))
        await wait_all_tasks_blocked()
        if end == "cancelled":
            with trio.move_on_after(1):
                async with server.draining(10):
                    pass
        else:
            with pytest.raises(ValueError, match="mine") as caught:
                await drain()
            assert caught.value is error
        assert trio.current_time() == 1
        await wire.ended.wait()
        assert trio.current_time() == 1


@modern
async def test_a_drain_waits_for_parked_calls_until_the_deadline(revision: str, autojump_clock: MockClock) -> None:
    server = working_server()
    async with server.running(), connected(server, revision) as wire:
        asked = await wire.call("tools/call", {"name": "asks"}, rounds=False)
        async with server.draining(10):
            answers = {key: {"action": "decline"} for key in asked["inputRequests"]}
            again = {"name": "asks", "requestState": asked["requestState"], "inputResponses": answers}
            assert "Declined" in str(await wire.call("tools/call", again))
        assert trio.current_time() == 0
    async with server.running(), connected(server, revision) as wire:
        await wire.call("tools/call", {"name": "asks"}, rounds=False)
        assert server.statistics().parked == 1
        async with server.draining(10):
            pass
        assert (trio.current_time(), server.statistics().parked) == (10, 0)


async def test_a_drain_does_not_wait_for_a_client_that_has_disconnected(autojump_clock: MockClock) -> None:
    server = working_server()
    async with server.running():
        async with connected(server, LATEST) as wire, trio.open_nursery() as nursery:
            await wire.call("tools/call", {"name": "asks"}, rounds=False)
            nursery.start_soon(drained, server, 10)
            await trio.sleep(1)
            assert not wire.ended.is_set()
            await wire.close()
            await trio.sleep(1)
        assert trio.current_time() == 2


async def drained(server: Server, seconds: float) -> None:
    async with server.draining(seconds):
        pass


async def test_the_first_deadline_of_two_drains_counts(autojump_clock: MockClock) -> None:
    server = working_server()
    async with server.running(), connected(server, LATEST) as wire:
        await wire.start("tools/call", work(100))
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drained, server, 10)
            nursery.start_soon(drained, server, 20)
        assert trio.current_time() == 10


async def test_a_server_that_was_drained_may_run_again(autojump_clock: MockClock) -> None:
    server = working_server()
    async with server.draining(5), server.running(), connected(server, LATEST, opened=False) as late:
        await late.ended.wait()  # the server does not serve before the end of the drain
    async with connected(server, LATEST) as wire:
        assert await wire.call("tools/call", work(1))


async def test_a_mounted_server_drains_only_its_own_connections(autojump_clock: MockClock) -> None:
    inner, outer = working_server(), Server("outer")
    outer.mount(inner, prefix="inner_")
    async with connected(outer, LATEST) as above, connected(inner, LATEST) as alone:
        async with inner.draining(10):
            pass
        await alone.ended.wait()
        assert await above.call("tools/call", {**work(1), "name": "inner_work"})


@pytest.mark.parametrize("seconds", [-1, math.nan, "5", None, True])
async def test_invalid_seconds_are_refused(seconds: Any, autojump_clock: MockClock) -> None:
    server = working_server()
    async with connected(server, LATEST) as wire:
        with pytest.raises(UsageError, match="seconds, 0 or more"):
            server.draining(seconds)
        assert await wire.call("tools/call", work(0))


async def test_a_drain_ends_a_connection_of_any_kind(autojump_clock: MockClock) -> None:
    """An endpoint of another transport joins the run, and counts its own clients."""
    heard = []

    class Endpoint:
        clients = 7

        async def drain(self) -> None:
            heard.append("drain")
            await trio.sleep(3)

        def stop(self) -> None:
            heard.append("stop")

    server = working_server()
    async with server.running(), server._joined() as run:
        assert isinstance(run, Run)
        run.connections[Endpoint()] = None
        assert server.statistics().connections == 7
        async with server.draining(10):
            assert run.draining  # from the start of the block
            await wait_all_tasks_blocked()
            assert heard == ["drain"]
        assert trio.current_time() == 3
    assert heard == ["drain", "stop", "stop"]  # one `stop` is for the drain, one is for the end of the run


async def test_a_stream_that_is_served_during_a_drain_is_closed_at_once(autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    server = working_server()
    async with server.draining(10):
        await serve_stream(server, theirs)
        assert await ours.receive_some() == b""
    assert trio.current_time() == 0


async def test_the_error_of_a_draining_connection_is_raised_where_it_is_served(autojump_clock: MockClock) -> None:
    server = working_server()

    def tap(direction: str, data: bytes) -> None:
        if b"result" in data:
            raise ValueError("a tap that fails")

    async def talk() -> None:
        async with connected(server, LATEST, tap=tap) as wire:
            await wire.start("tools/call", work(5))
            await wait_all_tasks_blocked()
            with contextlib.suppress(ProtocolViolation):
                async with server.draining(10):
                    await wire.ended.wait()
            assert trio.current_time() == 5

    with pytest.raises(ValueError, match="a tap that fails"), unwrapped():
        await talk()
