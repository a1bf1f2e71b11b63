"""The smallest plan that still breaks the same rule, as a test to paste.

It removes faults, clients and moves, one part after the other, and simplifies the line, as long as the same rule is
broken.  A smaller world takes its steps in another order, so its faults hit other steps.  Therefore each smaller plan
is also tried in a few other orders, and with all faults at earlier steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import attrs

from tests.simulation.plan import Line, Plan, written
from tests.simulation.world import play

__all__ = ["as_test", "rule_of", "shrink"]

ORDERS = 8  # orders in which a smaller plan is tried
MAX_WORLDS = 1500  # worlds that are played to shrink one plan
_DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("behind", None), ("oauth", False), ("line", Line()), ("kept", False), ("replicas", 1), ("scattered", False),
    ("lag", 0.0),
)  # fmt: skip


def rule_of(violation: str) -> str:
    """The first line of a violation without numbers and names, which differ from world to world."""
    return re.sub(r"'[^']*'|c\d+-\d+-\w+|\d+(\.\d+)?", "*", violation.split("\n")[0])[:60]


def shrink(plan: Plan, max_worlds: int = MAX_WORLDS) -> Plan:
    """Return the smallest plan found that breaks the same rule as `plan`."""
    rule = rule_of(play(plan).violations[0])
    left = max_worlds
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _smaller(plan):
            left -= 1
            if rule in map(rule_of, play(candidate).violations):
                plan, smaller = candidate, True
                break
            if left <= 0:
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans without one of their parts, the largest parts first, in several orders and with faults at earlier steps."""
    for order in (plan.order, *range(ORDERS)):
        for factor in (1.0, 0.6, 0.3):
            faults = tuple(attrs.evolve(fault, at=round(fault.at * factor)) for fault in plan.faults)
            if factor < 1.0 and faults != plan.faults:
                yield attrs.evolve(plan, order=order, faults=faults)
            yield from _parts(attrs.evolve(plan, order=order, faults=faults))


def _parts(plan: Plan) -> Iterator[Plan]:
    for name, default in _DEFAULTS:
        if getattr(plan, name) != default:
            yield attrs.evolve(plan, **{name: default})
    for size in (4, 1):
        for at in range(0, len(plan.faults), size):
            yield attrs.evolve(plan, faults=plan.faults[:at] + plan.faults[at + size :])
    for number in range(len(plan.clients)):
        if len(plan.clients) > 1:
            yield attrs.evolve(plan, clients=plan.clients[:number] + plan.clients[number + 1 :])
    for number, client in enumerate(plan.clients):
        for size in (8, 3, 1):
            for at in range(0, len(client.moves), size):
                moves = client.moves[:at] + client.moves[at + size :]
                if moves:
                    yield _with_moves(plan, number, moves)


def _with_moves(plan: Plan, number: int, moves: tuple[object, ...]) -> Plan:
    clients = list(plan.clients)
    clients[number] = attrs.evolve(clients[number], moves=moves)
    return attrs.evolve(plan, clients=tuple(clients))


def as_test(seed: int, plan: Plan) -> str:
    """The source of a test that plays this plan."""
    return (
        "from tests.simulation.plan import Client, Fault, Line, Move, Plan\n"
        "from tests.simulation.world import play\n\n\n"
        f"def test_found_by_seed_{seed}() -> None:\n"
        f"    plan = {written(plan)}\n"
        f"    assert not play(plan).violations\n"
    )
