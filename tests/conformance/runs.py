"""Runs of the conformance suite: at our server, all of a revision at once; at our client, a process for each scenario.

Left to itself, the suite starts its clients all at once, and on a small machine that is enough to make them late.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.conformance.suite import Scenario, Suite
from tests.conformance.verdicts import Outcomes, against, log_of, log_of_server, results_of

__all__ = ["play", "run"]

FIXTURES = Path(__file__).parents[1] / "fixtures"
AT_ONCE = 3  # processes of the suite, each of which waits for one of ours most of the time
PATIENCE = 60  # seconds for one scenario, on a busy machine
DEADLINE = 600  # seconds for all; what has not been run by then has failed


async def play(suite: Suite, scenarios: Collection[Scenario], folder: Path) -> Outcomes:
    """What speaks against each of these, of which all is kept in that folder."""
    places = trio.CapacityLimiter(AT_ONCE)
    of_servers = [each for each in scenarios if each.side == "server"]
    visits = {each.revision: each for each in of_servers if each.group != "alone"}  # one stands for all
    alone = [each for each in of_servers if each.group == "alone"]
    with trio.move_on_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            if of_servers:
                nursery.start_soon(_visit_server, suite, [*visits.values(), *alone], folder, places)
            for each in scenarios:
                if each.side == "client":
                    nursery.start_soon(_start_client, suite, each, folder, places)
    return {each: against(each, folder) for each in scenarios}


async def _visit_server(suite: Suite, visits: Sequence[Scenario], folder: Path, places: trio.CapacityLimiter) -> None:
    """One process for all revisions, and one after the other: some scenarios change what every client sees."""
    async with _served(log_of_server(folder)) as url, places:
        for each in visits if url else ():
            which = ["--requirements", each.revision]
            if each.group == "alone":
                which = ["--scenario", each.name, "--spec-version", each.revision, "--force"]
            options = ["--url", url, *which, "-o", str(results_of(each, folder))]
            await run(suite.command("server", *options), log_of(each, folder), 5 * PATIENCE)


async def _start_client(suite: Suite, scenario: Scenario, folder: Path, places: trio.CapacityLimiter) -> None:
    # The suite starts a shell, which makes way, so that what is ended when its time is over is the client itself.
    client = f"exec {shlex.join([sys.executable, str(FIXTURES / 'everything_client.py')])}"
    which = ["--scenario", scenario.name, "--spec-version", scenario.revision, "--force"]
    how = ["--command", client, "--timeout", str(1000 * PATIENCE), "-o", str(results_of(scenario, folder))]
    async with places:
        await run(suite.command("client", *which, *how), log_of(scenario, folder), 2 * PATIENCE)


async def run(command: Sequence[str], log: Path, patience: float) -> None:
    """Run it, in a process group of its own that is ended when its time is over.

    Its status is of no interest: the suite's says no more than what it saves.
    """
    async with await trio.open_file(log, "wb") as said:
        with trio.move_on_after(patience) as scope:
            await trio.run_process(
                command,
                stdout=said.fileno(),
                stderr=said.fileno(),
                check=False,
                start_new_session=True,
                deliver_cancel=_end_group,
            )
        if scope.cancelled_caught:
            await said.write(f"\nended after {patience} seconds\n".encode())


async def _end_group(process: trio.Process) -> None:
    os.killpg(process.pid, signal.SIGKILL)


@asynccontextmanager
async def _served(log: Path) -> AsyncIterator[str]:
    """The URL of our server, which ends with the block; nothing if it does not start."""
    command = [sys.executable, str(FIXTURES / "everything_server.py"), "http", "0"]
    async with await trio.open_file(log, "wb") as said:
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=said.fileno())
    assert process.stdout is not None
    try:
        line: bytes | bytearray = b""
        with trio.move_on_after(PATIENCE):
            line = await process.stdout.receive_some()
        yield line.decode().strip()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()
