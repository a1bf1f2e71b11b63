"""Replicas under load while processes are killed, suspended or restarted, or while their Redis is down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager

import attrs
import pytest
import trio

from tests.peers.nginx import proxied
from tests.peers.replica_load import Load
from tests.peers.replicas import KEYS
from tests.ports import unclaimed_port
from tests.redis_server import RedisServer, redis_server
from trio_mcp.server import LEASE

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CLIENTS = int(os.environ.get("REPLICA_CLIENTS", "50"))
TIMES = int(os.environ.get("REPLICA_TIMES", "10"))


@attrs.define
class ReplicaProcesses:
    """Three processes at fixed ports, which can be restarted."""

    redis: RedisServer
    ports: list[int]
    processes: list[subprocess.Popen[bytes]]

    def start(self, index: int) -> None:
        environment = {**os.environ, "INTEROP_STORE": self.redis.url, "TRIO_MCP_STATE_KEYS": KEYS}
        command = [sys.executable, "-m", "tests.fixtures.replica_server", "run", str(self.ports[index])]
        self.processes[index] = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    async def listens(self, index: int) -> None:
        while True:
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", self.ports[index])
            except OSError:
                await trio.sleep(0.05)
            else:
                await stream.aclose()
                return


@contextmanager
def replica_processes() -> Iterator[ReplicaProcesses]:
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        replicas = ReplicaProcesses(redis, [unclaimed_port() for _ in range(3)], [None] * 3)  # type: ignore[list-item]
        for index in range(3):
            replicas.start(index)
        try:
            yield replicas
        finally:
            for process in replicas.processes:
                process.kill()
                process.wait()


async def kill(replicas: ReplicaProcesses, index: int) -> None:
    replicas.processes[index].kill()
    replicas.processes[index].wait()
    replicas.start(index)
    await replicas.listens(index)


async def restart(replicas: ReplicaProcesses, index: int) -> None:
    replicas.processes[index].terminate()
    assert await trio.to_thread.run_sync(replicas.processes[index].wait) == 143
    replicas.start(index)
    await replicas.listens(index)


async def suspend(replicas: ReplicaProcesses, index: int) -> None:
    replicas.processes[index].send_signal(signal.SIGSTOP)
    await trio.sleep(20)  # longer than its lease
    replicas.processes[index].send_signal(signal.SIGCONT)


async def lose_redis(replicas: ReplicaProcesses, index: int) -> None:
    replicas.redis.kill()
    await trio.sleep(4)
    await trio.to_thread.run_sync(replicas.redis.start)


@pytest.mark.parametrize(("fault", "times"), [(kill, TIMES), (restart, TIMES), (suspend, 3), (lose_redis, 3)])
async def test_every_call_ends(fault: Callable[[ReplicaProcesses, int], Awaitable[None]], times: int) -> None:
    with replica_processes() as replicas, proxied(*replicas.ports) as port:
        for index in range(3):
            await replicas.listens(index)
        load = Load(port)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run, CLIENTS)
            for number in range(times):
                await trio.sleep(3)
                await fault(replicas, number % 3)
            await trio.sleep(LEASE + 5)  # the calls of dead processes have ended
            before = load.tally.copy()
            await trio.sleep(3)
            after = load.tally - before  # calls succeed again; some may fail if the machine is slow
            assert after["answered"] > 10 * after["refused"], after
            load.stopped = True
        assert load.tally["no end"] == 0, load.tally
        assert load.tally["answered"] > 100, load.tally
        assert all(process.poll() is None for process in replicas.processes)
        if fault is restart:
            assert load.tally["refused"] == 0, load.tally
