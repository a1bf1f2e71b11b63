"""Worlds break no rule, and deliberate mistakes break one; the effect of a seed; smaller worlds; the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

from tests.simulation.mistakes import MISTAKES, MISTAKES_OF_REPLICAS
from tests.simulation.plan import ERAS, LEGACY, MODERN, TRANSPORTS, Client, Fault, Line, Move, Plan, draw, written
from tests.simulation.shrink import as_test, rule_of, shrink
from tests.simulation.tally import tally
from tests.simulation.world import play
from trio_mcp import Context, Server

# The patch needs an internal module.
from trio_mcp.relay.tasks import RelayTasks

ROOT = Path(__file__).parents[2]
PART, PARTS = 20, 2  # worlds of the default suite


@pytest.mark.parametrize("part", range(PARTS))
def test_no_world_breaks_a_rule(part: int) -> None:
    done = tally(range(part * PART, (part + 1) * PART))
    assert done.broken == {}
    # Worlds with few moves or few faults would find few mistakes.
    assert done.moves / done.worlds >= 20
    assert done.faults.total() / done.worlds >= 3


def test_each_transport_and_era_has_its_share_of_the_worlds() -> None:
    plans = [draw(seed) for seed in range(1000)]
    shares = Counter((plan.transport, plan.era) for plan in plans)
    assert len(shares) == len(TRANSPORTS) * len(ERAS) - 1  # HTTP+SSE is in one era only
    assert all(count >= 50 for count in shares.values()), shares
    assert sum(plan.oauth for plan in plans) >= 50
    assert sum(plan.behind is not None for plan in plans) >= 50
    assert sum(plan.replicas > 1 for plan in plans) >= 100
    assert sum(plan.scattered for plan in plans) >= 50


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_deliberate_mistake_is_found(mistake: str) -> None:
    make, first = MISTAKES[mistake]
    with make():
        found = next((seed for seed in (first, *range(2000)) if play(draw(seed)).violations), None)
    assert found is not None


def _scattered(era: str, moves: Sequence[tuple[Move, ...]], *faults: Fault) -> list[Plan]:
    """Worlds in which consecutive requests often go to different replicas."""
    clients = tuple(map(Client, moves))
    return [
        Plan(order, "http", era, clients, faults=(fault,) if fault else (), kept=True, replicas=replicas,
             scattered=True, lag=0.02)
        for fault in faults or (None,)
        for order in range(2)
        for replicas in ((2,) if fault else (2, 3))
    ]  # fmt: skip


def _pauses(*at: int) -> list[Fault]:
    """Pauses that are longer than all leases."""
    return [Fault("pause", each, victim, seconds=50.0) for each in at for victim in range(2)]


_STAY = (Move("echo", wait=45.0),) * 2
_CALLS = _scattered(LEGACY, [(Move("hold", size=2), Move("hold", size=3), Move("ask"), Move("ask"), *_STAY)])
_CHANGES = [
    plan for era in ERAS for plan in _scattered(era, [(Move("listen", size=40),), (Move("put", wait=5.0), Move("put"))])
]
_GAPS = _scattered(
    LEGACY,
    [(Move("listen", size=40),), (Move("put", wait=2.0), *(Move("put", wait=0.3),) * 12)],
    *(Fault("away", at=500, victim=victim, seconds=4.0) for victim in range(2)),
)
_JOBS = _scattered(MODERN, [(Move("errand", size=40), Move("errand", size=40), *_STAY)], *_pauses(90, 120))
_QUIZZES = _scattered(MODERN, [(Move("errand", size=41), Move("fetch", wait=1.0))], *_pauses(780, 840, 900))
# The token of this errand has a length for which its tool reports no progress: a report would be refused first.
_LATE = _scattered(
    MODERN, [(*(Move("tools"),) * 9, Move("errand", wait=1.0, size=40), *_STAY)],
    *_pauses(700, 720, 740, 640, 660, 680),  # the most effective one first
)  # fmt: skip
# A replica that has accepted an answer ends before it reaches the store again.
_ENDS = [
    Plan(
        0, "http", LEGACY, (Client((Move("ask", wait=0.3), Move("ask", wait=2.0), Move("ask"), Move("ask"))),),
        faults=(Fault("away", at, victim, 8.0), Fault("crash", end, victim, 2.0)), kept=True, replicas=3,
        scattered=True,
    )
    for at, end, victim in ((393, 549, 2), (423, 500, 0), (305, 443, 1))
]  # fmt: skip
# The replica that sends notifications of changes has no room for a second subscription.
_FULL = [
    Plan(
        order, "http", LEGACY, (Client((Move("listen", size=9), Move("put", wait=0.3), Move("put", wait=0.3))),),
        tight=True, replicas=3, scattered=True,
    )
    for order in range(4)
]  # fmt: skip
_PLANS = {
    "a session that another replica does not know": _CALLS,
    "an answer that stays in a replica": _CALLS,
    "a cancellation that stays in a replica": _CALLS,
    "an answer that is accepted too early": _ENDS,
    "a subscription that is accepted too early": _FULL,
    "a change that stays in a replica": _CHANGES,
    "a gap that is not seen": _GAPS,
    "a task that another replica holds": _QUIZZES,
    "an outcome over another": _LATE,
    "a handler that runs again": _JOBS,
    "a store that is not swept": _CALLS,
}


_ALL = (_CALLS, _CHANGES, _GAPS, _JOBS, _QUIZZES, _LATE, _ENDS, _FULL)


@pytest.mark.parametrize(
    "plans", [*(each[:1] for each in _ALL), *(pytest.param(each[1:], marks=pytest.mark.full) for each in _ALL)]
)
def test_replicas_behave_like_one_server(plans: list[Plan]) -> None:
    for plan in plans:
        assert not play(plan).violations


@pytest.mark.full  # it tests the simulation, and not the package
@pytest.mark.parametrize("mistake", MISTAKES_OF_REPLICAS)
def test_a_mistake_between_replicas_breaks_its_rule(mistake: str) -> None:
    make, words = MISTAKES_OF_REPLICAS[mistake]
    with make():
        assert any(words in rule for plan in _PLANS[mistake] for rule in play(plan).violations)


def test_a_relay_that_forgets_its_tasks_is_found() -> None:
    async def forget(self: RelayTasks, shown_id: str, ctx: Context) -> None:
        await trio.lowlevel.checkpoint()

    moves = (Move("errand", size=20), Move("echo", wait=45.0), Move("fetch", wait=2.0))
    crash = Fault("crash", at=300, victim=1, seconds=0.5)  # victim 1 is the relay
    for era in ERAS:
        plan = Plan(
            order=1, transport="http", era=MODERN, clients=(Client(moves),), faults=(crash,), behind="http",
            behind_era=era,
        )  # fmt: skip
        assert not play(plan).violations
        with mock.patch.object(RelayTasks, "_adopt", forget):
            assert [rule for rule in play(plan).violations if "is lost" in rule]


# The effect of a seed.


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 200), marks=pytest.mark.full)])
def test_the_same_seed_makes_the_same_world(seeds: range) -> None:
    for seed in seeds:
        assert play(draw(seed)) == play(draw(seed))


@pytest.mark.full
def test_the_same_seed_makes_the_same_world_in_another_process() -> None:
    program = (
        "import zlib; from tests.simulation.plan import draw; from tests.simulation.world import play\n"
        "for seed in range(40): print(seed, zlib.crc32(repr(play(draw(seed)).transcript).encode()))"
    )
    output = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            capture_output=True,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(output) == 1


def test_other_seeds_make_other_worlds() -> None:
    plan = Plan(0, "stream", ERAS[1], (Client((Move("echo"), Move("count", size=4), Move("plain"))),) * 2)
    worlds = {play(Plan(order, plan.transport, plan.era, plan.clients)).transcript for order in range(10)}
    assert len(worlds) > 5


# Smaller worlds.


@pytest.fixture
def large() -> Plan:
    """A plan of which only one cancelled call is needed."""
    moves = (Move("echo"), Move("hold", size=2), Move("plain"))
    faults = (Fault("hostile", at=30), Fault("slow", at=400, seconds=0.5))
    return Plan(7, "http", ERAS[1], (Client(moves), Client(moves[:1])), Line(chunk=64), faults)


def test_a_world_is_made_smaller(large: Plan) -> None:
    with MISTAKES["a leaked task"][0]():
        small = shrink(large)
        assert rule_of(play(small).violations[0]) == rule_of(play(large).violations[0])
    assert (small.faults, small.line) == ((), Line())
    assert small.clients == (Client((Move("hold", size=2),)),)


def test_a_printed_test_can_be_pasted(large: Plan) -> None:
    names: dict[str, Any] = {}
    exec(as_test(7, large), names)
    names["test_found_by_seed_7"]()
    assert eval(written(large), names) == large
    with MISTAKES["a leaked task"][0](), pytest.raises(AssertionError):
        names["test_found_by_seed_7"]()


@pytest.mark.full
def test_the_command_plays_worlds_and_prints_figures() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "60", "--from", "0", "--jobs", "2"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.startswith("--seeds 60 --from 0\n")
    assert "60 worlds" in output
    assert output.endswith("0 seeds broke a rule: []\n")


# The page.


@pytest.fixture
def example() -> Any:
    page = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    return names["simulate"]


def test_the_simulation_of_the_page_finds_a_rare_error(example: Any) -> None:
    def good() -> Server:
        server = Server("weather")

        @server.tool
        async def forecast(city: str) -> str:
            return f"{city}: rain"

        return server

    example(good, range(30))

    def bad() -> Server:
        server, last = Server("weather"), [""]

        @server.tool
        async def forecast(city: str) -> str:
            last[0] = city
            await trio.lowlevel.checkpoint()
            return f"{last[0]}: rain"

        return server

    with pytest.raises((AssertionError, ExceptionGroup)):
        example(bad, range(30))
