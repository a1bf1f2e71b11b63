"""The cost of calls, compared with the smallest possible cost and with other SDKs: ``python -m tests.bench [words]``.

Without words it measures all rows that have an aim.  With words it measures the rows whose names have all of them, for
example ``stdio echo 64`` or ``client HTTP``; ``--list`` prints the names.  ``--against COMMIT`` compares the package
with itself: `against.py`.  ``growth`` and ``calls`` are other measurements: `growth.py`, `calls.py`.

Each row is measured for several subjects (`subjects.py`).  Their rounds take turns, so that a disturbance affects all
of them.  Absolute times depend more on the machine than on the code, so the ratios of the best rounds count: noise can
only make a round slower.  The load is this process; the report also shows how busy it was.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from tests.bench import calls, growth
from tests.bench.against import HEAD as HEAD_AGAINST
from tests.bench.against import LIMIT, Comparison, subjects_of
from tests.bench.http_load import Refused
from tests.bench.measures import Figure
from tests.bench.report import HEAD, Outcome, as_json, shown
from tests.bench.rows import ROWS, Row, chosen
from tests.bench.subjects import checked_out
from tests.peers.installed import Unavailable

ROUNDS, AGAINST_ROUNDS, SECONDS = 7, 20, 0.3
# The number of processes of each tree: two processes of the same tree differ by up to 2 % for as long as they run.
# Each has an even number of rounds, and is the first one in half of them.
PROCESSES = 5
AGAINST_WARM_UP = 1.0  # seconds: by then the garbage collector has visited the objects that were created at the start
WARM_UP = 3.0  # seconds: by then node has compiled the functions that it calls most, and needs a third of the CPU
FILES = 16_384  # for 5,000 streams and all other files
PAGES = {"growth": growth.main, "calls": calls.main}
# The subject cannot be installed, refuses so many streams, gave a wrong answer, or has ended.
FAILURES = (Unavailable, Refused, AssertionError, OSError)


def measured(
    row: Row, subjects: Sequence[str], rounds: int, seconds: float, warm_up: float, processes: int = 1
) -> dict[str, list[Figure]]:
    """The figures of each round, after `warm_up` seconds, for each subject that is available.

    The rounds are divided among several processes of each subject, one process after the other.
    """
    figures: dict[str, list[Figure]] = {each: [] for each in subjects}
    rounds = min(rounds, row.rounds or rounds)
    processes = (
        1 if row.rounds else min(processes, rounds)
    )  # these rows take long to prepare, or start processes themselves
    for number in range(processes):
        measure_rounds(
            row, figures, range(rounds * number // processes, rounds * (number + 1) // processes), seconds, warm_up
        )
    return {each: found for each, found in figures.items() if found}


def measure_rounds(
    row: Row, figures: dict[str, list[Figure]], rounds: Sequence[int], seconds: float, warm_up: float
) -> None:
    """Measure some rounds with one process of each subject.  A subject that fails is removed from the figures."""
    with ExitStack() as stack:
        measures = {}

        def attempt(subject: str, work: Callable[[], None]) -> None:
            try:
                work()
            except FAILURES as reason:
                report_failure(row, subject, reason)
                measures.pop(subject, None)
                del figures[subject]

        def prepare(subject: str) -> None:
            measures[subject] = row.prepare(stack, subject)
            begun = time.monotonic()
            while row.warm and time.monotonic() - begun < warm_up:
                measures[subject](seconds)

        for each in list(figures):
            attempt(each, partial(prepare, each))
        for number in rounds:
            turns = list(measures)
            for each in reversed(turns) if number % 2 else turns:
                attempt(each, lambda each=each: figures[each].append(measures[each](seconds)))  # type: ignore[misc]


def report_failure(row: Row, subject: str, reason: Exception) -> None:
    """Report a subject that failed.  The other subjects are still measured."""
    print(f"{row.name}: without {subject}: {type(reason).__name__}: {str(reason)[-300:]}", file=sys.stderr)


def against(commit: str, rows: Sequence[Row], rounds: int, seconds: float, limit: float) -> int:
    """Compare the package with itself at another commit.  Returns 1 if a row costs more now."""
    dearer = 0
    with checked_out(commit):
        print(HEAD_AGAINST, flush=True)
        for row in rows:
            figures = measured(row, subjects_of(row), rounds, seconds, AGAINST_WARM_UP, PROCESSES)
            for each in Comparison.of(row, figures):
                dearer += each.dearer(limit)
                print(each.shown(limit), flush=True)
    return 1 if dearer else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("words", nargs="*", help="words of the names of rows")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    known = sorted({subject for row in ROWS for subject in row.subjects})
    parser.add_argument(
        "--only", nargs="+", choices=known, metavar="SUBJECT", help=f"after the words, of {', '.join(known)}"
    )
    parser.add_argument("--against", metavar="COMMIT", help="compare the package with itself at that commit")
    parser.add_argument("--limit", type=float, default=LIMIT, help="how much more a row may cost (%(default)s)")
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS}, and {AGAINST_ROUNDS} with --against")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="approximate seconds of each round")
    parser.add_argument(
        "--warm-up", type=float, default=WARM_UP, help="seconds of load before the rounds (%(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(row.name for row in ROWS))
        return 0
    rows = chosen(given.words)
    if not rows:
        parser.error(f"no row has all these words: {' '.join(given.words)}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the servers inherit the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES if hard == resource.RLIM_INFINITY else min(hard, FILES), hard))
    if given.against:
        return against(given.against, rows, given.rounds or AGAINST_ROUNDS, given.seconds, given.limit)
    outcomes, missing = [], False
    print(HEAD, flush=True)
    for row in rows:
        subjects = [each for each in row.subjects if given.only is None or each in given.only]
        figures = measured(row, subjects, given.rounds or ROUNDS, given.seconds, given.warm_up)
        missing |= "ours" not in figures
        for subject in figures:
            if subject.startswith("ours"):
                outcomes.append(Outcome(row, subject, figures))
                print(shown(outcomes[-1]), flush=True)
        if given.json:
            with open(given.json, "w") as file:
                json.dump(as_json(outcomes), file, indent=1)
    return 0 if all(each.met for each in outcomes) and not missing else 1


if __name__ == "__main__":
    if (page := PAGES.get(sys.argv[1] if sys.argv[1:] else "")) is not None:
        sys.exit(page(sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
