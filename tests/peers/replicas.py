"""Processes of one server behind an nginx that sends each request to the next process: `running_replicas(store)`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import attrs

from tests.peers.nginx import proxied

__all__ = ["Replicas", "running_replicas"]

KEYS = "00" * 32


@attrs.define
class Replicas:
    """The processes, the port of the proxy, and the ports of the processes."""

    port: int
    ports: list[int]
    processes: list[subprocess.Popen[str]]


@contextmanager
def running_replicas(
    store: str, *, module: str = "tests.fixtures.replica_server", number: int = 3
) -> Iterator[Replicas]:
    """Start the processes of this module, which serves HTTP and prints its URL.

    `store` is the path of a file or the URL of a Redis.
    """
    environment = {**os.environ, "INTEROP_STORE": store, "TRIO_MCP_STATE_KEYS": KEYS}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", module, "http", "0"], env=environment, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(number)
        ]
        for process in processes:
            stack.callback(process.wait, timeout=30)
            stack.callback(process.terminate)
        ports = []
        for process in processes:
            assert process.stdout is not None  # a pipe
            ports.append(int(process.stdout.readline().rpartition(":")[2].partition("/")[0]))
        yield Replicas(stack.enter_context(proxied(*ports)), ports, processes)
