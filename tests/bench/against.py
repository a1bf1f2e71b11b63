"""The cost of the package, compared with another commit: ``python -m tests.bench --against COMMIT [words]``.

The rounds of both trees take turns, and the order of the two changes after each round.  A ratio is that of two
neighbouring rounds, so that a machine that becomes slower affects both.  The rounds are divided among several processes
of each tree, because the placement of a process by the system changes its speed by about 2 % for as long as it runs.
The median of all ratios varies less than a ratio of the best rounds, of the lower quartiles or of the means.  A tree
compared with itself, while other programs kept both cores busy, had ratios between 0.992 and 1.025.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import attrs

from tests.bench.measures import Figure
from tests.bench.rows import Row

__all__ = ["HEAD", "LIMIT", "Comparison", "subjects_of"]

LIMIT = 0.03
WIDTH = 76
HEAD = f"{'':<{WIDTH}}{'before':>10}{'now':>10}{'now / before':>14}{'spread':>9}"


def subjects_of(row: Row) -> list[str]:
    """The subjects of this package, each followed by the same subject at the other commit."""
    ours = [each for each in row.subjects if each.startswith("ours")]
    return [name for each in ours for name in (each, each.replace("ours", "before"))]


@attrs.frozen
class Comparison:
    """One row, for one codec."""

    row: Row
    subject: str
    now: Sequence[Figure]
    before: Sequence[Figure]

    @classmethod
    def of(cls, row: Row, figures: Mapping[str, Sequence[Figure]]) -> list[Comparison]:
        pairs = [(each, each.replace("ours", "before")) for each in figures if each.startswith("ours")]
        return [cls(row, ours, figures[ours], figures[before]) for ours, before in pairs if before in figures]

    @property
    def ratios(self) -> list[float]:
        """The ratio of each round.  A round without a cost, as the growth of memory may have, has no ratio."""
        pairs = zip(self.now, self.before, strict=True)
        return [ours.cost / theirs.cost for ours, theirs in pairs if theirs.cost > 0]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios or [math.nan])

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the ratios."""
        if len(self.ratios) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return (high - low) / 2

    def dearer(self, limit: float) -> bool:
        """Whether the row costs more than before, by more than the limit and by more than the spread of the rounds."""
        return self.ratio - 1 > max(limit, self.spread)

    def shown(self, limit: float) -> str:
        codec = self.subject.partition("+")[2]
        name = f"{self.row.name}{f', {codec}' if codec else ''}, {self.row.unit}"
        costs = "".join(f"{statistics.median(each.cost for each in side):>10.4g}" for side in (self.before, self.now))
        return f"{name:<{WIDTH}}{costs}{self.ratio:>14.3f}{self.spread:>9.3f}{'  dearer' if self.dearer(limit) else ''}"
