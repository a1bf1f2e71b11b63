"""Each kind of exchange with the server, ended at each step of the server in each way.

After each end: the client has the right answer or no answer, no handler runs, the run of the server goes on, and the
other connections of this run are served.  The harness checks that no task, file descriptor or thread is left, and that
all lines are complete.
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
Exchange = Callable[[RawClient, Server], Awaitable[None]]


def new_server() -> Server:
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


# The exchanges.


class Unanswered(Exception):
    """The server could not send its request, because the client had closed its side."""


def calling(name: str, text: str) -> Exchange:
    async def exchange(wire: RawClient, server: Server) -> None:
        result = await wire.call("tools/call", {"name": name}, id="it", progress="p")
        if "closed its side" in result["content"][0]["text"]:
            raise Unanswered
        assert result["content"][0]["text"] == text
        if name == "tells":
            assert [params["progress"] for params in wire.noted(PROGRESS)] == [1, 2]
            assert len(wire.noted(MESSAGE)) == 1

    return exchange


async def list_tools(wire: RawClient, server: Server) -> None:
    assert len((await wire.call("tools/list", id="it"))["tools"]) == 4


async def read(wire: RawClient, server: Server) -> None:
    assert (await wire.call("resources/read", {"uri": "it://changes"}, id="it"))["contents"][0]["text"] == "7"


async def subscribe(wire: RawClient, server: Server) -> None:
    listening = await wire.subscribe(tools=True, uris=["it://changes"])
    server.notify_list_changed("tools")
    server.notify_resource_updated("it://changes")
    for _ in range(2):
        await wire.changed()
    await listening.end()
    await wire.call("tools/list", id="it")


EXCHANGES: dict[str, Exchange] = {
    "a plain call": calling("plain", "plain"),
    "a call in a thread": calling("thread", "thread"),
    "a call that reports": calling("tells", "tells"),
    "a call that asks": calling("asks", "asks 2"),
    "a list": list_tools,
    "a resource": read,
    "changes": subscribe,
}


# The ways in which an exchange ends.  Each is tried at the n-th step.


class Endings:
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


# The errors of the client: an error response, the end of the server, or the end of its own side, also while a request
# of the server waits.
EXPECTED_ERRORS = (ErrorResponse, ProtocolViolation, trio.ClosedResourceError, Unanswered)
END_NAMES = [name for name in vars(Endings) if name.startswith("the_")]
LINK_GOES_ON = {"the_client_cancels"}  # after this the link goes on


def is_of_the_server(task: trio.lowlevel.Task) -> bool:
    return "client" not in task.name and task.name not in ("the scenario", "the watchdog")


@contextlib.asynccontextmanager
async def ended_when_idle() -> AsyncIterator[None]:
    """End the block when no more messages can come: a cancelled request, for example, has no answer."""

    async def end_when_idle() -> None:
        while True:
            await trio.sleep(100)
            if not awaiting_threads():  # a mock clock does not wait for threads
                nursery.cancel_scope.cancel()

    with unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_when_idle, name="the idle timer of the client")
            yield
            nursery.cancel_scope.cancel()


def small_pipe() -> Pair:
    """A pipe with a buffer that is shorter than a line."""
    return pipe_pair(40)


STREAMS = pytest.mark.parametrize("streams", [unlimited_pipe, pytest.param(small_pipe, marks=pytest.mark.full)])


@STREAMS
@pytest.mark.parametrize("end", END_NAMES)
@pytest.mark.parametrize("exchange", EXCHANGES)
@ERAS
def test_an_exchange_may_end_at_any_step(revision: str, exchange: str, end: str, streams: Callable[[], Pair]) -> None:
    ended_well = set()

    async def scenario(attempt: Attempt) -> None:
        ends, server = Endings(), new_server()

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
                with attempt.window(getattr(ends, end)), contextlib.suppress(*EXPECTED_ERRORS):
                    async with ended_when_idle():
                        await EXCHANGES[exchange](wire, server)
                        ended_well.add(True)
                if not attempt.fired or end in LINK_GOES_ON:
                    assert (await wire.call("tools/list"))["tools"]
                elif end != "the_link_breaks":
                    await wait_or_fail(wire.ended.wait, "the end")
            await wait_all_tasks_blocked()
            drained = attempt.fired and end == "the_server_drains"  # draining ends all its connections
            if drained:
                await wait_or_fail(other.ended.wait, "the end of all others")
            else:
                assert (await other.call("tools/list"))["tools"]
            if server.statistics().parked:  # the client did not send the retry
                await trio.sleep(1000)
            now = server.statistics()
            left = 0 if drained else 1
            assert (now.connections, now.running, now.parked) == (left, 0, 0)
            assert now.listeners == (0 if wire.modern else left)

    # The window itself is a step, and the last run does not reach its step.
    assert cancel_at_each_step(scenario, watch=is_of_the_server, may_cut=end == "the_link_breaks") > 3
    assert ended_well  # at the latest in the last run, in which the exchange is not ended


# The end of the run of the server.


@STREAMS
@ERAS
def test_a_run_may_end_at_any_step(revision: str, streams: Callable[[], Pair]) -> None:
    """Its lifespan, its connections and their tasks end with it."""
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

        server = new_server()
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
            with contextlib.suppress(*EXPECTED_ERRORS):
                async with connected(server, revision, streams=attempt.streams(streams), answers=ANSWERS) as wire:
                    for name in ("plain", "asks"):
                        await wire.call("tools/call", {"name": name})
                    await wire.subscribe(tools=True)
            nursery.cancel_scope.cancel()
        assert server.statistics().connections == 0
        assert not server._runs

    assert cancel_at_each_step(scenario, watch=lambda task: is_of_the_server(task) or "run" in task.name) > 10
    assert entered == left > 0
