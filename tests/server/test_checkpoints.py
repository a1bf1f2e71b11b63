"""Whatever a client wants, and whatever ends it, at every step of the server: whole lines, and nothing left behind.

After each: the client got the right answer or none, nobody is at work any more, the run goes on, and who shares it is
served.  That no task, descriptor or thread is left, and no half of a line, is checked by the harness.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.server.checkpoints import (
    Attempt,
    Pair,
    awaiting_threads,
    cancel_at_each_step,
    pipe_pair,
    unlimited_pipe,
    unwrapped,
    wait_or_fail,
)
from tests.server.raw_client import (
    CANCELLED,
    LATEST,
    MESSAGE,
    PROGRESS,
    ErrorResponse,
    ProtocolViolation,
    RawClient,
    connected,
    draining_when,
)
from trio_mcp import Context, Server, serve_stream

ERAS = pytest.mark.parametrize("revision", ["2025-11-25", LATEST])
Talk = Callable[[RawClient, Server], Awaitable[None]]


def made() -> Server:
    server = Server("everything", change_debounce=0)

    @server.tool
    async def plain() -> str:
        await trio.lowlevel.checkpoint()
        return "plain"

    @server.tool
    def thread() -> str:
        return "thread"

    @server.tool
    async def tells(ctx: Context) -> str:
        await ctx.progress(1)
        await ctx.log("info", "told")
        await ctx.progress(2)
        return "tells"

    @server.tool
    async def asks(ctx: Context) -> str:
        answers = await ctx.ask(one=_sample(), two=_sample())
        return f"asks {len(answers)}"

    @server.resource("it://changes")
    async def changes() -> str:
        await trio.lowlevel.checkpoint()
        return "7"

    return server


def _sample() -> Any:
    from trio_mcp import Sample

    return Sample("How many?", max_tokens=5)


ANSWERS = {
    "sampling/createMessage": lambda _: {"role": "assistant", "model": "m", "content": {"type": "text", "text": "1"}}
}


# What a client wants.


class Unanswered(Exception):
    """The server could not ask, for this client had closed its side."""


def calling(name: str, text: str) -> Talk:
    async def talk(wire: RawClient, server: Server) -> None:
        result = await wire.call("tools/call", {"name": name}, id="it", progress="p")
        if "closed its side" in result["content"][0]["text"]:
            raise Unanswered
        assert result["content"][0]["text"] == text
        if name == "tells":
            assert [params["progress"] for params in wire.noted(PROGRESS)] == [1, 2]
            assert len(wire.noted(MESSAGE)) == 1

    return talk


async def list_(wire: RawClient, server: Server) -> None:
    assert len((await wire.call("tools/list", id="it"))["tools"]) == 4


async def read(wire: RawClient, server: Server) -> None:
    assert (await wire.call("resources/read", {"uri": "it://changes"}, id="it"))["contents"][0]["text"] == "7"


async def hear(wire: RawClient, server: Server) -> None:
    listening = await wire.subscribe(tools=True, uris=["it://changes"])
    server.notify_list_changed("tools")
    server.notify_resource_updated("it://changes")
    for _ in range(2):
        await wire.changed()
    await listening.end()
    await wire.call("tools/list", id="it")


WANTS: dict[str, Talk] = {
    "a plain call": calling("plain", "plain"),
    "a call in a thread": calling("thread", "thread"),
    "a call that tells": calling("tells", "tells"),
    "a call that asks": calling("asks", "asks 2"),
    "a list": list_,
    "a resource": read,
    "changes": hear,
}


# What ends it.  Each is done at the n-th step.


class Ends:
    def __init__(self) -> None:
        self.serving = trio.CancelScope()
        self.drain = trio.Event()
        self.wire: RawClient | None = None
        self.stream: Any = None

    def the_server_is_cancelled(self) -> None:
        self.serving.cancel()

    def the_client_cancels(self) -> None:
        assert self.wire is not None
        self.wire.post({"jsonrpc": "2.0", "method": CANCELLED, "params": {"requestId": "it"}})

    def the_client_ends(self) -> None:
        assert self.wire is not None
        self.wire._outbox.close()

    def the_link_breaks(self) -> None:
        self.stream.close()

    def the_server_drains(self) -> None:
        self.drain.set()


# What a client finds: it was refused, the server has gone, or it has ended its own side, with a question open or not.
LEFT = (ErrorResponse, ProtocolViolation, trio.ClosedResourceError, Unanswered)
ENDS = [name for name in vars(Ends) if name.startswith("the_")]
LASTING = {"the_client_cancels"}  # after this the link goes on


def on_the_server_s_side(task: trio.lowlevel.Task) -> bool:
    return "client" not in task.name and task.name not in ("the scenario", "the watchdog")


@contextlib.asynccontextmanager
async def given_up_in_vain() -> AsyncIterator[None]:
    """Ends the block when nothing more can come, such as the answer to what was cancelled."""

    async def give_up() -> None:
        while True:
            await trio.sleep(100)
            if not awaiting_threads():  # a mock clock does not wait for those
                nursery.cancel_scope.cancel()

    with unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up, name="the client's patience")
            yield
            nursery.cancel_scope.cancel()


def little() -> Pair:
    """Less than a line at a time."""
    return pipe_pair(40)


STREAMS = pytest.mark.parametrize("streams", [unlimited_pipe, pytest.param(little, marks=pytest.mark.full)])


@STREAMS
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("want", WANTS)
@ERAS
def test_it_may_end_at_any_step(revision: str, want: str, end: str, streams: Callable[[], Pair]) -> None:
    ended_well = set()

    async def scenario(attempt: Attempt) -> None:
        ends, server = Ends(), made()

        def pair() -> Any:
            ends.stream, theirs = attempt.streams(streams)()
            return ends.stream, theirs

        async def serve(server: Server, stream: trio.abc.Stream) -> None:
            with ends.serving:
                async with draining_when(server, ends.drain):
                    await serve_stream(server, stream)

        async with server.running(), connected(server, revision) as other:
            options: Any = {"answers": ANSWERS, "log_level": "info"}
            async with connected(server, revision, streams=pair, serve=serve, **options) as wire:
                ends.wire = wire
                with attempt.window(getattr(ends, end)), contextlib.suppress(*LEFT):
                    async with given_up_in_vain():
                        await WANTS[want](wire, server)
                        ended_well.add(True)
                if not attempt.fired or end in LASTING:
                    assert (await wire.call("tools/list"))["tools"]
                elif end != "the_link_breaks":
                    await wait_or_fail(wire.ended.wait, "the end")
            await wait_all_tasks_blocked()
            drained = attempt.fired and end == "the_server_drains"  # with all its connections
            if drained:
                await wait_or_fail(other.ended.wait, "the end of all others")
            else:
                assert (await other.call("tools/list"))["tools"]
            if server.statistics().parked:  # whose client never came back
                await trio.sleep(1000)
            now = server.statistics()
            left = 0 if drained else 1
            assert (now.connections, now.running, now.parked) == (left, 0, 0)
            assert now.listeners == (0 if wire.modern else left)

    # One step is there before all others, and the last is one that nobody takes.
    assert cancel_at_each_step(scenario, watch=on_the_server_s_side, may_cut=end == "the_link_breaks") > 3
    assert ended_well  # without an end, at the latest


# A server's own end.


@STREAMS
@ERAS
def test_a_run_may_end_at_any_step(revision: str, streams: Callable[[], Pair]) -> None:
    """With it end its lifespan, its connections and what is at work for them."""
    entered = left = 0

    async def scenario(attempt: Attempt) -> None:
        @contextlib.asynccontextmanager
        async def lifespan(_: Server) -> Any:
            nonlocal entered, left
            await trio.lowlevel.checkpoint()
            entered += 1
            try:
                yield
            finally:
                left += 1
                with trio.CancelScope(shield=True):
                    await trio.sleep(1)

        server = made()
        server._lifespan = lifespan
        async with trio.open_nursery() as nursery:
            running = trio.Event()

            async def run() -> None:
                with attempt.window():
                    async with server.running():
                        running.set()
                        await trio.sleep_forever()
                running.set()

            nursery.start_soon(run, name="the server's run")
            await running.wait()
            if attempt.fired:
                return
            with contextlib.suppress(*LEFT):
                async with connected(server, revision, streams=attempt.streams(streams), answers=ANSWERS) as wire:
                    for name in ("plain", "asks"):
                        await wire.call("tools/call", {"name": name})
                    await wire.subscribe(tools=True)
            nursery.cancel_scope.cancel()
        assert server.statistics().connections == 0
        assert not server._runs

    assert cancel_at_each_step(scenario, watch=lambda task: on_the_server_s_side(task) or "run" in task.name) > 10
    assert entered == left > 0
