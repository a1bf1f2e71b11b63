"""The watchdog logs, once, the name of a handler that blocks the event loop."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from contextvars import copy_context
from pathlib import Path

import pytest
import trio
import trio.lowlevel
import trio.testing

from trio_mcp import Server, open_client
from trio_mcp.server import process, watched
from trio_mcp.transport import Worker, WorkerPool, watchdog

ROOT = Path(__file__).parents[2]


class WarningEvent(logging.Handler):
    """A log handler that sets an event at the first warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.once = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.once.set()


def test_a_handler_that_blocks_the_loop_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LOOK", 0.01)
    monkeypatch.setattr(process, "_ANSWER", 0.03)
    server, warned = Server("slow"), WarningEvent()

    @server.tool
    async def block() -> bool:
        await trio.lowlevel.checkpoint()
        return warned.once.wait(10)

    @server.tool
    async def block_again(seconds: float) -> None:
        warned.once.wait(seconds)

    @server.tool
    def in_a_thread() -> None:
        threading.Event().wait(0.2)

    async def main() -> None:
        with watched():
            async with open_client(server) as client:
                await client.call_tool("in_a_thread")
                assert not warned.once.is_set()
                assert await client.call_tool("block", returns=bool) is True
                for seconds in (10, 0.2):
                    warned.once.clear()
                    await client.call_tool("block_again", {"seconds": seconds})

    logger = logging.getLogger("trio_mcp")
    before = threading.active_count()
    logger.addHandler(warned)
    try:
        with caplog.at_level(logging.WARNING, "trio_mcp"):
            trio.run(main)
    finally:
        logger.removeHandler(warned)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("tools/call block has blocked the event loop")
    assert "test_watchdog.py" in first
    assert "return warned.once.wait(10)" in first
    assert f"{ROOT / 'trio_mcp'}{os.sep}" not in first  # the folder of the checkout may have the same name
    assert second.startswith("tools/call block_again has blocked the event loop")
    assert threading.active_count() <= before + 1  # Trio keeps the thread of a plain function for a while


async def test_a_call_counts_before_the_watchdog_is_asked_if_it_sleeps() -> None:
    """Otherwise the watchdog could fall asleep in between, and miss the call."""
    busy: list[bool] = []

    class Watchdog:
        def watch(self, pool: WorkerPool) -> None:
            self.pool = pool

        @property
        def asleep(self) -> bool:
            busy.append(self.pool.busy)
            return False

    async def work(worker: Worker, _: None) -> None:
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        before = watchdog.set(Watchdog())
        pool = WorkerPool(nursery)
        watchdog.reset(before)
        for _ in range(2):  # in a new worker, and in one that waits
            pool.start(work, None, "a call", copy_context())
            await trio.testing.wait_all_tasks_blocked()
        pool.end()
    assert busy == [True, True]


PROGRAM = """
import sys, threading, time
from trio_mcp import Server

server = Server("slow")

@server.tool
async def block() -> list[str]:
    time.sleep(1.2)
    return [thread.name for thread in threading.enumerate()]

server.run()
"""


@pytest.mark.full
def test_a_running_server_logs_a_block_of_a_second() -> None:
    call = (
        '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"block","_meta":{'
        '"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{},'
        '"io.modelcontextprotocol/clientInfo":{"name":"c","version":"1"}}}}\n'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(call)
        process.stdin.flush()
        assert '"result"' in process.stdout.readline()
        process.stdin.close()
        assert "tools/call block has blocked the event loop" in process.stderr.read()
        assert process.wait() == 0
