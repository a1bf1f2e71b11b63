"""What a call costs the client: ``python -m tests.bench client [words of the rows wanted]``.

Each row is measured at three clients that take turns, each a process of its own: ours, a bare one (both in
`callers.py`), and that of the official Python SDK with uvloop (`official_client.py`), where it can be installed.  At
the other end is a server that answers as fast as it can (`scripted.py`): by stdio each client has its own, by HTTP they
share one.

The ratios are those of the CPU time of the client process for one call, all its threads, and then those by the clock,
of the best rounds; the spread is that of the ratios of all rounds.  Calls in a second are those of the best round.  A
client that waits for the server, or for its turn on this machine, shows as less busy than a whole core.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import attrs

from tests.bench.http import HERE, official_python, ratio

ROOT = HERE.parents[1]
ROUNDS, CALLS = 7, 640
RESPONDER = [sys.executable, "-m", "tests.bench.scripted"]


@attrs.frozen
class Round:
    """The microseconds that a call took."""

    cpu: float
    wall: float


@attrs.frozen
class Subject:
    """A client process that is connected."""

    name: str
    process: subprocess.Popen[str] = attrs.field(repr=False)

    def heard(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client {self.name!r} has ended")
        return line

    def measure(self, calls: int) -> Round:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{calls}\n")
        self.process.stdin.flush()
        wall, cpu = map(float, self.heard().split())
        return Round(cpu / calls * 1e6, wall / calls * 1e6)


@attrs.frozen
class Row:
    transport: str  # stdio, http
    era: str  # session, modern
    in_flight: int

    def __str__(self) -> str:
        return f"{self.transport}, {self.era}, {self.in_flight} in flight"

    def measure(self, names: Sequence[str], rounds: int, calls: int) -> dict[str, list[Round]]:
        """For each client, what each round gave."""
        with ExitStack() as stack:
            target = stack.enter_context(_target(self.transport))
            subjects = [stack.enter_context(self._calling(name, target)) for name in names]
            for each in subjects:
                each.measure(max(200, self.in_flight))  # until everything is warm
            figures: dict[str, list[Round]] = {name: [] for name in names}
            for _ in range(rounds):
                for each in subjects:
                    figures[each.name].append(each.measure(calls))
        return figures

    @contextmanager
    def _calling(self, name: str, target: str) -> Iterator[Subject]:
        if name == "official":
            # -P: beside the program lies a module named http, which is not the one that its libraries mean.
            command = [str(official_python()), "-P", str(HERE / "official_client.py")]
        else:
            command = [sys.executable, "-m", "tests.bench.callers", name]
        command += [target, self.era, str(self.in_flight)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
        ) as process:
            subject = Subject(name, process)
            subject.heard()
            yield subject
            assert process.stdin is not None
            process.stdin.close()  # which ends it in good order, with the server that it has started


@contextmanager
def _target(transport: str) -> Iterator[str]:
    if transport == "stdio":
        yield json.dumps([*RESPONDER, "stdio"])
        return
    with subprocess.Popen([*RESPONDER, "http"], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield json.dumps(f"http://127.0.0.1:{int(process.stdout.readline())}/mcp")
        finally:
            process.kill()


def rows() -> Iterator[Row]:
    for transport in ("stdio", "http"):
        for era in ("session", "modern"):
            for in_flight in (1, 16, 64):
                yield Row(transport, era, in_flight)


def show(row: Row, figures: dict[str, list[Round]]) -> None:
    def against(one: str, other: str) -> tuple[str, str]:
        if one not in figures:
            return "-", "-"
        pair = figures[one], figures[other]
        by_clock = min(each.wall for each in pair[0]) / min(each.wall for each in pair[1])
        return ratio(*([each.cpu for each in rounds] for rounds in pair)), f"{by_clock:.2f}"

    (ours, ours_by_clock), (theirs, theirs_by_clock) = against("ours", "bare"), against("official", "ours")
    rates = "/".join(f"{1e6 / min(each.wall for each in rounds):.0f}" for rounds in figures.values())
    busy = "/".join(f"{statistics.median(each.cpu / each.wall for each in rounds):.0%}" for rounds in figures.values())
    print(
        f"{row!s:<28}{ours:>18}{theirs:>18}{f'{ours_by_clock}, {theirs_by_clock}':>15}{rates:>17}{busy:>16}", flush=True
    )


def main(wanted: Sequence[str]) -> int:
    from tests.peers.installed import NotHere

    names = ["ours", "bare", "official"]
    try:
        official_python()
    except NotHere as reason:
        names.remove("official")
        print(f"without the official SDK, which cannot be installed here: {reason}")
    print(
        f"{'CPU of the client for a call':<28}{'ours / bare':>18}{'official / ours':>18}"
        f"{'by the clock':>15}{'calls/s, each':>17}{'busy':>16}"
    )
    for row in rows():
        if {word.lower() for word in wanted} <= set(str(row).replace(",", " ").split()):
            show(row, row.measure(names, ROUNDS, CALLS))
    return 0
