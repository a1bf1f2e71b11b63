"""The growth of the cost of a call: ``python -m tests.bench growth [--plot FILE]``.

It measures our server with 1 to 5,000 tools, with 1 to 5,000 open calls, and with a large message in flight beside the
calls.  On stdio that message is an open call with large arguments; over HTTP it is a request on another connection,
half of which was sent.  The points of a curve take turns, and the best round of each counts.
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
from tests.bench.stdio_load import Spent, started_server
from tests.bench.subjects import server_command

__all__ = ["main"]

Measure = Callable[[float], float]

ERA, TOGETHER, FOREVER = "modern", 16, 3600.0


@attrs.frozen
class Background:
    """The load of the server in addition to the calls that are measured."""

    tools: int = 3
    waiting: int = 0
    """The number of open calls."""
    burden: int = 0
    """The bytes of a message in flight."""


@attrs.frozen
class Curve:
    title: str
    axis: str
    points: Sequence[tuple[int, Background]]


CURVES = [
    Curve("Tools", "tools of the server", [(each, Background(tools=each)) for each in (1, 10, 100, 1000, 5000)]),
    # The number includes the calls that are measured.
    Curve(
        "Open requests",
        "requests open at once",
        [(each, Background(waiting=max(0, each - TOGETHER))) for each in (1, 100, 1000, 5000)],
    ),
    Curve(
        "A large neighbour",
        "KB of a message in flight beside",
        [(each, Background(burden=each * 1000)) for each in (1, 10, 100, 1000, 5000)],
    ),
]


def by_stdio(background: Background, stack: ExitStack) -> Measure:
    pipes = stack.enter_context(started_server(server_command("ours", "stdio", tools=background.tools), ERA))
    template = Template(encoded(call(ERA)) + b"\n")
    burden = {"burden": "x" * background.burden} if background.burden else {}
    waits = Template(encoded(call(ERA, "wait", {"seconds": FOREVER, **burden})) + b"\n", template.ids)
    for _ in range(1 if burden else background.waiting):
        pipes.say(waits.take())

    def spend(number: int) -> Spent:
        return pipes.calls([template.take() for _ in range(number)], TOGETHER)[0]

    return _measure(spend)


def by_http(background: Background, stack: ExitStack) -> Measure:
    usage, port = stack.enter_context(http_load.listening(server_command("ours", "http", tools=background.tools)))

    def connected() -> http_load.Caller:
        caller = http_load.Caller(port, ERA)
        stack.callback(caller.socket.close)
        return caller

    callers = [connected() for _ in range(TOGETHER)]
    for each in callers:
        each.prepare(call(ERA))
    for _ in range(background.waiting):
        connected().begin(call(ERA, "wait", {"seconds": FOREVER}))
    if background.burden:
        connected().begin(call(ERA, "echo", {"text": "x" * background.burden}), share=0.5)
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


def measured(
    curve: Curve, prepare: Callable[[Background, ExitStack], Measure], rounds: int, seconds: float
) -> list[float]:
    """The cost of a call at each point of the curve."""
    with ExitStack() as stack:
        measures = [prepare(background, stack) for _, background in curve.points]
        each = [[measure(seconds) for measure in measures] for _ in range(rounds)]
    return [min(costs) for costs in zip(*each, strict=True)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench growth", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="approximate seconds of each round")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the curves to this file, as SVG")
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
