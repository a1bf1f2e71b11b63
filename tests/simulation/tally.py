"""The figures of many worlds: calls, faults, and the seeds that broke a rule."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable

import attrs

from tests.simulation.plan import draw
from tests.simulation.world import play

__all__ = ["Tally", "tally"]


@attrs.define
class Tally:
    """The figures of some worlds."""

    worlds: int = 0
    moves: int = 0
    faults: Counter[str] = attrs.field(factory=Counter)
    outcomes: Counter[str] = attrs.field(factory=Counter)
    shares: Counter[str] = attrs.field(factory=Counter)
    broken: dict[int, str] = attrs.field(factory=dict)
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        self.worlds += other.worlds
        self.moves += other.moves
        self.seconds += other.seconds
        self.faults.update(other.faults)
        self.outcomes.update(other.outcomes)
        self.shares.update(other.shares)
        self.broken.update(other.broken)

    def __str__(self) -> str:
        def all_of(counter: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in counter.most_common())

        shares = Counter({name: round(100 * count / self.worlds) for name, count in self.shares.items()})
        return (
            f"{self.worlds} worlds, {self.worlds / self.seconds:.0f} in a second of a core; in each "
            f"{self.moves / self.worlds:.1f} moves and {self.faults.total() / self.worlds:.1f} faults on average\n"
            f"calls: {all_of(self.outcomes)}\nfaults: {all_of(self.faults)}\npercent of the worlds: {all_of(shares)}"
        )


def tally(seeds: Iterable[int]) -> Tally:
    """Play the worlds of these seeds."""
    done, began = Tally(), time.process_time()
    gc.disable()  # collections would add a tenth to the time of each world
    try:
        _play(done, seeds)
    finally:
        gc.enable()
        gc.collect()
    done.seconds = time.process_time() - began
    return done


def _play(done: Tally, seeds: Iterable[int]) -> None:
    for seed in seeds:
        played = play(draw(seed))
        plan = played.plan
        done.worlds += 1
        done.moves += played.moves
        done.faults.update(played.fired)
        done.outcomes.update(played.outcomes)
        extra = ["a relay"] * (plan.behind is not None) + ["oauth"] * plan.oauth + ["replicas"] * (plan.replicas > 1)
        done.shares.update([plan.transport, plan.era, *extra])
        if played.violations:
            done.broken[seed] = played.violations[0]
