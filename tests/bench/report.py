"""The results, as a table and as JSON."""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from tests.bench.measures import Figure
from tests.bench.rows import Aim, Row

__all__ = ["HEAD", "Outcome", "as_json", "shown"]

PEERS = ("typescript", "python")
WIDTH = 76
_COSTS = "".join(f"{each:>9}" for each in ("bare", "ts", "py", "ours"))
_RATIOS = "".join(f"{'ours / ' + each:>26}" for each in ("bare", "ts", "py"))
HEAD = f"{'':<{WIDTH}}{_COSTS}{_RATIOS}{'load':>7}"


@attrs.frozen
class Ratio:
    """The ratio of the best rounds, because noise can only make a round slower; and the range of all rounds."""

    of_best: float
    lowest: float
    highest: float
    at_most: float | None

    @property
    def met(self) -> bool:
        return self.at_most is None or self.of_best <= self.at_most

    def __str__(self) -> str:
        best, lowest, highest = (
            f"{each:.2f}" if each < 10 else f"{each:.1f}" for each in (self.of_best, self.lowest, self.highest)
        )
        aim = "" if self.at_most is None else f" {'<=' if self.met else '>'} {self.at_most:.2f}"
        return f"{best} ({lowest}-{highest}){aim}"


@attrs.frozen
class Outcome:
    """The cost of one of our subjects, and of the subjects that it is compared with."""

    row: Row
    subject: str
    figures: Mapping[str, Sequence[Figure]]

    def cost(self, subject: str) -> float | None:
        return min(each.cost for each in self.figures[subject]) if subject in self.figures else None

    @property
    def aim(self) -> Aim:
        return self.row.aims.get(self.subject, Aim())

    @property
    def bare(self) -> str:
        """The bare subject with the same codec, if it is measured, otherwise `bare`."""
        same = self.subject.replace("ours", "bare")
        return same if same in self.figures else "bare"

    @property
    def peer(self) -> str | None:
        there = [each for each in PEERS if each in self.figures]
        return min(there, key=lambda each: self.cost(each) or 0.0, default=None)

    def ratio(self, other: str | None, at_most: float | None) -> Ratio | None:
        """The ratio to this subject, or None if it was not measured or has no cost."""
        if other not in self.figures:
            return None
        pairs = zip(self.figures[self.subject], self.figures[other], strict=True)
        each = sorted(ours.cost / theirs.cost for ours, theirs in pairs if theirs.cost > 0)
        best = self.cost(other)
        return Ratio((self.cost(self.subject) or 0.0) / best, each[0], each[-1], at_most) if best and each else None

    @property
    def to_bare(self) -> Ratio | None:
        return self.ratio(self.bare, self.aim.bare)

    @property
    def to_peers(self) -> list[Ratio | None]:
        """The ratios to each SDK; the aim applies to the better SDK."""
        return [self.ratio(each, self.aim.peer if each == self.peer else None) for each in PEERS]

    @property
    def to_peer(self) -> Ratio | None:
        return self.ratio(self.peer, self.aim.peer)

    @property
    def met(self) -> bool:
        ratios = all(each is None or each.met for each in (self.to_bare, self.to_peer))
        return ratios and (self.aim.most is None or (self.cost(self.subject) or 0.0) <= self.aim.most)

    @property
    def busy(self) -> float | None:
        """How busy the load was: the median of all rounds."""
        every = [each.busy for rounds in self.figures.values() for each in rounds if each.busy is not None]
        return statistics.median(every) if every else None

    def value(self, subject: str) -> float | None:
        """The figure to show: a cost, or a rate."""
        cost = self.cost(subject)
        return 1000 / cost if cost and self.row.rate else cost


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def shown(outcome: Outcome) -> str:
    """A line of the table."""
    codec = outcome.subject.partition("+")[2]
    most = "" if outcome.aim.most is None else f" (<= {outcome.aim.most:g})"
    name = f"{outcome.row.name}{f', {codec}' if codec else ''}, {outcome.row.unit}{most}"
    values = "".join(f"{_number(outcome.value(each)):>9}" for each in (outcome.bare, *PEERS, outcome.subject))
    ratios = "".join(f"{each or '-'!s:>26}" for each in (outcome.to_bare, *outcome.to_peers))
    busy = "-" if outcome.busy is None else f"{outcome.busy:.0%}"
    return f"{name:<{WIDTH}}{values}{ratios}{busy:>7}{'' if outcome.met else '  missed'}"


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    def ratio(of: Ratio | None) -> Any:
        return None if of is None else {**attrs.asdict(of), "met": of.met}

    return {
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "rows": [
            {
                "row": each.row.name,
                "subject": each.subject,
                "unit": each.row.unit,
                "values": {subject: each.value(subject) for subject in each.figures},
                "bare": ratio(each.to_bare),
                "peer": ratio(each.to_peer),
                "peers": dict(zip(PEERS, map(ratio, each.to_peers), strict=True)),
                "most": each.aim.most,
                "better_peer": each.peer,
                "load": each.busy,
                "met": each.met,
            }
            for each in outcomes
        ],
    }
