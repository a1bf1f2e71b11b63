"""Whether a call costs more where there is more of everything: ``python -m tests.bench growth [--plot FILE]``.

Our server alone, with 1 to 5,000 tools, with 1 to 5,000 calls open, and with a large message in flight beside the
calls: by stdio an open call that was given so much, by HTTP a request on another connection half of which has come.
The points of a curve take turns, and count in their best rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

from tests.bench import http_load
from tests.bench.measures import Pace
from tests.bench.messages import TEXT, Template, call, encoded
from tests.bench.plot import Panel, drawn
from tests.bench.stdio_load import Spent, spoken_to
from tests.bench.subjects import server_command

__all__ = ["main"]

Measure = Callable[[float], float]

ERA, TOGETHER, FOREVER = "modern", 16, 3600.0


@attrs.frozen
class Beside:
    """What there is beside the calls that are measured."""

    tools: int = 3
    waiting: int = 0
    """Calls."""
    burden: int = 0
    """Bytes of a message."""


@attrs.frozen
class Curve:
    title: str
    axis: str
    points: Sequence[tuple[int, Beside]]


CURVES = [
    Curve("Tools", "tools of the server", [(each, Beside(tools=each)) for each in (1, 10, 100, 1000, 5000)]),
    # Those that are measured are among them.
    Curve(
        "Open requests",
        "requests open at once",
        [(each, Beside(waiting=max(0, each - TOGETHER))) for each in (1, 100, 1000, 5000)],
    ),
    Curve(
        "A large neighbour",
        "KB of a message in flight beside",
        [(each, Beside(burden=each * 1000)) for each in (1, 10, 100, 1000, 5000)],
    ),
]


def by_stdio(beside: Beside, stack: ExitStack) -> Measure:
    pipes = stack.enter_context(spoken_to(server_command("ours", "stdio", tools=beside.tools), ERA))
    template = Template(encoded(call(ERA)) + b"\n")
    burden = {"burden": "x" * beside.burden} if beside.burden else {}
    waits = Template(encoded(call(ERA, "wait", {"seconds": FOREVER, **burden})) + b"\n", template.ids)
    for _ in range(1 if burden else beside.waiting):
        pipes.say(waits.take())

    def spend(number: int) -> Spent:
        return pipes.calls([template.take() for _ in range(number)], TOGETHER)[0]

    return _measure(spend)


def by_http(beside: Beside, stack: ExitStack) -> Measure:
    usage, port = stack.enter_context(http_load.listening(server_command("ours", "http", tools=beside.tools)))

    def connected() -> http_load.Caller:
        caller = http_load.Caller(port, ERA)
        stack.callback(caller.socket.close)
        return caller

    callers = [connected() for _ in range(TOGETHER)]
    for each in callers:
        each.prepare(call(ERA))
    for _ in range(beside.waiting):
        connected().begin(call(ERA, "wait", {"seconds": FOREVER}))
    if beside.burden:
        connected().begin(call(ERA, "echo", {"text": "x" * beside.burden}), share=0.5)
    return _measure(lambda number: http_load.calls(usage, callers, number, TEXT.encode()))


def _measure(spend: Callable[[int], Spent]) -> Measure:
    """CPU of the server for an echo, in µs."""
    pace = Pace(300)

    def measure(seconds: float) -> float:
        number = pace.calls(seconds)
        spent = spend(number)
        pace.seen(number, spent)
        return spent.cpu / number * 1e6

    measure(0)
    return measure


def measured(curve: Curve, prepare: Callable[[Beside, ExitStack], Measure], rounds: int, seconds: float) -> list[float]:
    """The cost of a call at each of its points."""
    with ExitStack() as stack:
        measures = [prepare(beside, stack) for _, beside in curve.points]
        each = [[measure(seconds) for measure in measures] for _ in range(rounds)]
    return [min(costs) for costs in zip(*each, strict=True)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench growth", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each round, about")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the curves there, as SVG")
    given = parser.parse_args(arguments)
    panels = []
    for curve in CURVES:
        at = [point for point, _ in curve.points]
        head = "".join(f"{each:>9,}" for each in at)
        print(f"\nµs of CPU for a call, by {curve.axis}\n{'':8}{head}{'last / first':>16}")
        lines = {}
        for name, prepare in (("stdio", by_stdio), ("HTTP", by_http)):
            costs = measured(curve, prepare, given.rounds, given.seconds)
            lines[name] = costs
            print(f"{name:8}{''.join(f'{each:>9.1f}' for each in costs)}{costs[-1] / costs[0]:>16.2f}", flush=True)
        panels.append(Panel(curve.title, curve.axis, at, lines))
    if given.plot:
        given.plot.write_text(drawn(panels, "µs of CPU for a call"), encoding="utf-8")
    return 0
