"""The command line compared with a program written by hand: a list of tools, and round trips through `tap`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

from tests.bench.measures import Figure, Measure, Pace
from tests.bench.messages import TEXT, Template, call, encoded
from tests.bench.stdio_load import Spent, started_server
from tests.bench.subjects import BEFORE, PROGRAMS, ROOT, server_command

__all__ = ["listed", "tapped"]

TOOLS = 3


def _python(subject: str) -> list[str]:
    return ["env", f"PYTHONPATH={BEFORE if subject == 'before' else ROOT}", sys.executable, "-P"]


def listed(stack: ExitStack, subject: str) -> Measure:
    """Milliseconds by the clock until the tools of a server are printed.  The server is the same for all subjects, and
    its start is part of the time."""
    server = server_command("ours", "stdio", tools=TOOLS)
    client = [str(PROGRAMS / "bare_list.py")] if subject == "bare" else ["-m", "trio_mcp", "list", "--"]
    command = [*_python(subject), *client, *server]

    def measure(seconds: float) -> Figure:
        begun = time.perf_counter()
        shown = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60).stdout
        spent = time.perf_counter() - begun
        assert shown.count(b"echo") == 1, shown
        return Figure(spent * 1e3)

    measure(0)  # writes the bytecode
    return measure


def tapped(in_flight: int, stack: ExitStack, subject: str) -> Measure:
    """Microseconds by the clock for an echo of the bare server: the median for one call at a time, otherwise the mean.

    For `ours` a tap is in between; for `bare` the server is called directly.
    """
    server = server_command("bare", "stdio")
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    tap = [*_python(subject), "-m", "trio_mcp", "tap", "-o", f"{folder}/talk.jsonl", "--limit", "64", "--"]
    pipes = stack.enter_context(started_server(server if subject == "bare" else [*tap, *server], "modern"))
    template, pace = Template(encoded(call("modern")) + b"\n"), Pace(300)

    def measure(seconds: float) -> Figure:
        number = pace.calls(seconds)
        lines = [template.take() for _ in range(number)]
        spent: Spent
        if in_flight == 1:
            spent, each = pipes.latencies(lines)
            cost = statistics.median(each)
        else:
            spent, output = pipes.calls(lines, in_flight)
            assert output.count(TEXT.encode()) == number
            cost = spent.wall / number
        pace.seen(number, spent)
        return Figure(cost * 1e6, spent.busy)

    measure(0)
    return measure
