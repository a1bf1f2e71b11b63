"""Tasks at the end of a server: some finish in time, some are given back, and some cannot run again."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.matrix import Variant, client_of
from tests.extensions.test_server_tasks import BOTH, CORE, NEWER, begin, client_in_open_run, raw_client, wait_for_status
from tests.server.raw_client import ErrorResponse, RawClient, client_on
from trio_mcp import Limits, Server
from trio_mcp.asgi import AsgiApp
from trio_mcp.core import TaskRecord, TaskStatus
from trio_mcp.stores import MemoryStore

ROOT = Path(__file__).parents[2]
LOST = "the server stopped while this task ran"


class Servers:
    """Servers with a shared store, and the runs of their handlers."""

    def __init__(self, **options: Any) -> None:
        self.store = MemoryStore()
        self.runs: list[str] = []
        self.cleaned: list[float] = []
        self.lease: dict[str, float] = {}  # the leases at the end of a handler
        self.options = options

    def server(self) -> Server:
        server = Server("servers", store=self.store, **self.options)

        @server.tool
        async def plain(seconds: float) -> None:
            await trio.sleep(seconds)

        @server.tool(task="optional")
        async def once(seconds: float) -> str:
            self.runs.append("once")
            await trio.sleep(seconds)
            return "done"

        @server.tool(task="optional", replay=True)
        async def again(seconds: float, text: str = "") -> str:
            self.runs.append("again")
            try:
                await trio.sleep(seconds)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(0.5)
                    self.cleaned.append(trio.current_time())
                    self.lease = dict(self.store._leases)
            return "done again"

        return server

    def records(self) -> dict[str, TaskRecord]:
        found = [TaskRecord.from_text(row.body.decode()) for row in self.store._rows.values()]
        return {each.id: each for each in found}

    def given_back(self, id: str) -> bool:
        """Whether another process may take over the task at once."""
        (row,) = (row for row in self.store._rows.values() if row.key == id)
        return bool(row.holder) and self.store._leases.get(row.holder, 0) <= 0


async def begin_two(wire: RawClient, seconds: float) -> tuple[str, str]:
    once = await begin(wire, "once", {"seconds": seconds})
    return once, await begin(wire, "again", {"seconds": seconds})


def check_given_back(servers: Servers, once: str, again: str) -> None:
    records = servers.records()
    assert records[once].status is TaskStatus.FAILED
    assert LOST in str(records[once].message)
    assert records[again].status is TaskStatus.WORKING
    assert servers.given_back(again)


# A drain


@BOTH
@pytest.mark.parametrize("shared", [False, True])
async def test_a_task_may_finish_while_the_server_drains(
    revision: str, shared: bool, autojump_clock: MockClock
) -> None:
    servers = Servers()
    server = servers.server()
    async with server.running() if shared else nullcontext(), raw_client(revision, server) as wire:
        once, again = await begin_two(wire, 3)
        begun = trio.current_time()
        async with server.draining(10):
            with pytest.raises(ErrorResponse, match="shutting down"):
                await wire.call("tools/call", {"name": "once", "arguments": {"seconds": 0}})
            await wire.ended.wait()  # while tasks run, a client may ask about them, also after their end
        assert trio.current_time() == begun + 5.5
        assert {servers.records()[id].status for id in (once, again)} == {TaskStatus.COMPLETED}


@BOTH
async def test_a_drain_without_tasks_ends_the_connection_at_once(revision: str, autojump_clock: MockClock) -> None:
    servers = Servers()
    server = servers.server()
    async with raw_client(revision, server) as wire:
        await wait_for_status(wire, await begin(wire, "once", {"seconds": 0}))
        begun = trio.current_time()
        async with server.draining(10):
            await wire.ended.wait()
        assert trio.current_time() == begun


@BOTH
async def test_a_client_asks_about_its_tasks_during_a_drain(revision: str, autojump_clock: MockClock) -> None:
    servers = Servers()
    server = servers.server()
    async with raw_client(revision, server) as wire:
        once, again = await begin_two(wire, 3)
        begun = trio.current_time()
        async with server.draining(60):
            assert (await wire.call("tasks/get", {"taskId": once}))["status"] == "working"
            await wire.call("tasks/cancel", {"taskId": again})
            if revision == CORE:
                tasks = (await wire.call("tasks/list"))["tasks"]
                assert {each["taskId"]: each["status"] for each in tasks} == {once: "working", again: "cancelled"}
                await wire.call("tasks/result", {"taskId": once})
            else:
                with pytest.raises(ErrorResponse, match="shutting down"):
                    await wire.call("subscriptions/listen", {"notifications": {"taskIds": [once]}})
                assert (await wait_for_status(wire, once))["result"]["content"][0]["text"] == "done"
            assert trio.current_time() < begun + 3.5
            await wire.ended.wait()
        assert trio.current_time() < begun + 3.5  # at once: the client has the outcome


@NEWER
async def test_a_client_that_listens_hears_the_end_of_its_task_during_a_drain(
    revision: str, autojump_clock: MockClock
) -> None:
    servers = Servers()
    server = servers.server()
    async with raw_client(revision, server) as wire:
        id = await begin(wire, "once", {"seconds": 3})
        listening = await wire.start("subscriptions/listen", {"notifications": {"taskIds": [id]}})
        await trio.sleep(1)
        begun = trio.current_time()
        async with server.draining(60):
            await wire.ended.wait()
        assert trio.current_time() == begun + 2
        (notification,) = wire.noted("notifications/tasks")
        assert (notification["status"], notification["result"]["content"][0]["text"]) == ("completed", "done")
        assert "result" in await wire.response(listening)  # sub-08


@BOTH
@pytest.mark.parametrize("kind", ["http", "asgi"])
async def test_a_client_gets_its_result_during_a_drain_over_http(
    revision: str, kind: str, autojump_clock: MockClock
) -> None:
    servers = Servers()
    server = servers.server()
    async with client_of(Variant(kind, revision), server, tasks=True) as client:
        task = await client.start_task("once", {"seconds": 3})
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def drain() -> None:
                async with server.draining(30):
                    pass

            await trio.sleep(1)
            assert (await task.status()).status is TaskStatus.WORKING
            assert (await task.result()).content[0].text == "done"  # type: ignore[union-attr]


@BOTH
@pytest.mark.parametrize("shared", [False, True])
async def test_a_task_that_outlasts_the_drain_is_given_back(
    revision: str, shared: bool, autojump_clock: MockClock
) -> None:
    servers = Servers()
    server = servers.server()
    async with AsyncExitStack() as stack:
        if shared:  # the program continues, but its run accepts no more connections
            await stack.enter_async_context(server.running())
        async with client_in_open_run(revision, server) as wire:
            once, again = await begin_two(wire, 100)
            begun = trio.current_time()
            async with server.draining(5):
                pass
            await trio.sleep(1)
            assert trio.current_time() <= begun + 7
            check_given_back(servers, once, again)
            assert servers.cleaned[0] < begun + 6
    async with raw_client(revision, servers.server()) as wire:  # the next process
        assert (await wait_for_status(wire, once))["status"] == "failed"
        assert (await wait_for_status(wire, again))["status"] == "completed"
    assert sorted(servers.runs) == ["again", "again", "once"]


@NEWER
async def test_a_server_that_drains_takes_over_no_tasks(revision: str, autojump_clock: MockClock) -> None:
    servers = Servers()
    first, second = servers.server(), servers.server()
    async with second.running(), client_in_open_run(revision, second) as other, trio.open_nursery() as nursery:
        await begin(other, "once", {"seconds": 30})
        async with second.draining(60):
            async with client_in_open_run(revision, first) as wire:
                _, again = await begin_two(wire, 1000)
                nursery.start_soon(wire.close)
            await trio.sleep(25)  # the lease of the first has ended
            assert servers.given_back(again)
        assert servers.runs.count("again") == 1


@BOTH
@pytest.mark.parametrize("closed", [False, True])
async def test_tasks_may_finish_while_an_asgi_application_shuts_down(
    revision: str, closed: bool, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers()
    # At the end of its lifespan the ASGI server has closed all connections.
    monkeypatch.setattr(AsgiApp, "running", lambda app: app._running(closed=closed))
    async with client_of(Variant("asgi", revision), servers.server(), tasks=True) as client:
        await client.start_task("once", {"seconds": 3})
        begun = trio.current_time()
    assert trio.current_time() == begun + 5  # with some time for clients to fetch the result
    assert {each.status for each in servers.records().values()} == {TaskStatus.COMPLETED}


# The end of input


@BOTH
async def test_the_end_of_input_gives_back_tasks_after_the_last_call(revision: str, autojump_clock: MockClock) -> None:
    servers = Servers()
    async with raw_client(revision, servers.server()) as wire:
        once, again = await begin_two(wire, 100)
        call = await wire.start("tools/call", {"name": "plain", "arguments": {"seconds": 2}})
        begun = trio.current_time()
        await wire.close()
        assert wire.answered(call)
    assert trio.current_time() <= begun + 3
    check_given_back(servers, once, again)


@BOTH
async def test_a_server_that_is_cancelled_gives_back_its_tasks_at_once(
    revision: str, autojump_clock: MockClock
) -> None:
    servers = Servers()
    server = servers.server()
    with trio.CancelScope() as scope:
        async with client_in_open_run(revision, server) as wire:
            once, again = await begin_two(wire, 100)
            begun = trio.current_time()
            scope.cancel()
    assert trio.current_time() <= begun + 1
    check_given_back(servers, once, again)
    assert min(servers.lease.values()) > 0  # no other process runs the task while a handler here cleans up


# Bytes


@BOTH
async def test_the_arguments_of_a_task_are_charged_while_it_runs(revision: str, autojump_clock: MockClock) -> None:
    servers = Servers(limits=Limits(bytes_each=1_000_000))
    server = servers.server()
    text = "x" * 600_000
    async with raw_client(revision, server) as wire:
        id = await begin(wire, "again", {"seconds": 10, "text": text})
        await wait_all_tasks_blocked()
        assert 600_000 <= server.statistics().bytes < 700_000
        with pytest.raises(ErrorResponse, match=r"Limits\.bytes_each"):
            await begin(wire, "again", {"seconds": 10, "text": text})
        await wait_for_status(wire, id)
        await wait_all_tasks_blocked()
        assert server.statistics().bytes == 0
        await begin(wire, "again", {"seconds": 1, "text": text})


@NEWER
async def test_tasks_are_recovered_when_the_byte_limit_has_room(revision: str, autojump_clock: MockClock) -> None:
    servers = Servers(limits=Limits(bytes_in_all=1_000_000))
    text = "x" * 400_000
    async with raw_client(revision, servers.server()) as wire:
        ids = [await begin(wire, "again", {"seconds": 50, "text": text}) for _ in range(2)]
        await wire.close()
    servers.options = {"limits": Limits(bytes_in_all=600_000)}
    server = servers.server()
    async with raw_client(revision, server) as wire:
        await trio.sleep(20)
        assert servers.runs.count("again") == 3
        assert server.statistics().bytes < 600_000
        for id in ids:
            assert (await wait_for_status(wire, id))["status"] == "completed"
    assert servers.runs.count("again") == 4


# Real processes

PROGRAM = """
    import sys
    import trio
    from trio_mcp import Server
    from trio_mcp.stores import SQLiteStore

    server = Server("killable", store=SQLiteStore(sys.argv[1]))

    @server.tool(task="required", replay=True)
    async def again(seconds: float) -> str:
        print("run", flush=True)
        await trio.sleep(seconds)
        return "done again"

    @server.tool(task="required")
    async def once(seconds: float) -> str:
        await trio.sleep(seconds)
        return "done"

    server.run(shutdown_timeout=float(sys.argv[2]))
"""


@asynccontextmanager
async def running_process(folder: Path, shutdown_timeout: float) -> AsyncIterator[tuple[trio.Process, RawClient]]:
    """A server process and its client.  The process has ended at the end of the block."""
    program = folder / "killable.py"
    program.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    process = await trio.lowlevel.open_process(
        [sys.executable, str(program), str(folder / "tasks.db"), str(shutdown_timeout)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with client_on(trio.StapledStream(process.stdin, process.stdout), CORE, check=False) as wire:
            yield process, wire
        await process.wait()
    finally:
        process.kill()


@pytest.mark.full
async def test_sigterm_lets_tasks_finish_or_gives_them_back(tmp_path: Path) -> None:
    with trio.fail_after(60):
        async with running_process(tmp_path, 2) as (process, wire):
            short, long = await begin(wire, "once", {"seconds": 1}), await begin(wire, "once", {"seconds": 60})
            again = await begin(wire, "again", {"seconds": 3})
            process.send_signal(signal.SIGTERM)
        assert process.returncode == 143
        async with running_process(tmp_path, 0) as (process, wire):
            assert (await wait_for_status(wire, short))["status"] == "completed"
            assert LOST in (await wait_for_status(wire, long))["statusMessage"]
            assert (await wire.call("tasks/get", {"taskId": again}))["status"] == "working"
            assert (await wait_for_status(wire, again))["status"] == "completed"
        assert process.returncode == 0
        assert process.stderr is not None
        assert await process.stderr.receive_some() == b"run\n"
