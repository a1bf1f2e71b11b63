"""Runs of the conformance suite: one run per revision for the server, one process per scenario for the client.

Without a limit, the suite starts all its clients at the same time, and on a small machine they are then too late.
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
from tests.conformance.verdicts import Outcomes, faults, log_of, log_of_server, results_of

__all__ = ["run_command", "run_scenarios"]

FIXTURES = Path(__file__).parents[1] / "fixtures"
AT_ONCE = 3  # processes of the suite at a time; each mostly waits for a process of ours
TIMEOUT = 60  # seconds for one scenario, on a busy machine
DEADLINE = 600  # seconds for all scenarios; a scenario that has not run by then has failed


async def run_scenarios(suite: Suite, scenarios: Collection[Scenario], folder: Path) -> Outcomes:
    """Run these scenarios, and return the faults of each.  All results are kept in the folder."""
    places = trio.CapacityLimiter(AT_ONCE)
    of_servers = [each for each in scenarios if each.side == "server"]
    visits = {each.revision: each for each in of_servers if each.group != "alone"}  # one run has all of a revision
    alone = [each for each in of_servers if each.group == "alone"]
    with trio.move_on_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            if of_servers:
                nursery.start_soon(_visit_server, suite, [*visits.values(), *alone], folder, places)
            for each in scenarios:
                if each.side == "client":
                    nursery.start_soon(_start_client, suite, each, folder, places)
    return {each: faults(each, folder) for each in scenarios}


async def _visit_server(suite: Suite, visits: Sequence[Scenario], folder: Path, places: trio.CapacityLimiter) -> None:
    """One process for all revisions, and one run at a time: some scenarios change the server for all its clients."""
    async with _served(log_of_server(folder)) as url, places:
        for each in visits if url else ():
            which = ["--requirements", each.revision]
            if each.group == "alone":
                which = ["--scenario", each.name, "--spec-version", each.revision, "--force"]
            options = ["--url", url, *which, "-o", str(results_of(each, folder))]
            await run_command(suite.command("server", *options), log_of(each, folder), 5 * TIMEOUT)


async def _start_client(suite: Suite, scenario: Scenario, folder: Path, places: trio.CapacityLimiter) -> None:
    # The suite starts a shell.  With exec, the client replaces the shell, so the suite ends the client at the timeout.
    client = f"exec {shlex.join([sys.executable, str(FIXTURES / 'everything_client.py')])}"
    which = ["--scenario", scenario.name, "--spec-version", scenario.revision, "--force"]
    how = ["--command", client, "--timeout", str(1000 * TIMEOUT), "-o", str(results_of(scenario, folder))]
    async with places:
        await run_command(suite.command("client", *which, *how), log_of(scenario, folder), 2 * TIMEOUT)


async def run_command(command: Sequence[str], log: Path, seconds: float) -> None:
    """Run a command in its own process group, which is killed at the timeout.

    The exit status is ignored: the results that the suite saves say the same.
    """
    async with await trio.open_file(log, "wb") as said:
        with trio.move_on_after(seconds) as scope:
            await trio.run_process(
                command,
                stdout=said.fileno(),
                stderr=said.fileno(),
                check=False,
                start_new_session=True,
                deliver_cancel=_end_group,
            )
        if scope.cancelled_caught:
            await said.write(f"\nended after {seconds} seconds\n".encode())


async def _end_group(process: trio.Process) -> None:
    os.killpg(process.pid, signal.SIGKILL)


@asynccontextmanager
async def _served(log: Path) -> AsyncIterator[str]:
    """The URL of our server, which ends with the block.  Empty if the server does not start."""
    command = [sys.executable, str(FIXTURES / "everything_server.py"), "http", "0"]
    async with await trio.open_file(log, "wb") as said:
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=said.fileno())
    assert process.stdout is not None
    try:
        line: bytes | bytearray = b""
        with trio.move_on_after(TIMEOUT):
            line = await process.stdout.receive_some()
        yield line.decode().strip()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()
