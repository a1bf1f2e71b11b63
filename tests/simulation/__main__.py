"""python -m tests.simulation --seeds 1000 --from 0 --jobs 2

Plays the worlds of these seeds, prints their figures, and shrinks each world that breaks a rule.  Without `--from`
the first seed is a random one, and is printed.  Ends with status 1 if a rule was broken.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.plan import draw
from tests.simulation.shrink import as_test, shrink
from tests.simulation.tally import Tally, tally

PART = 50  # worlds that a process plays before it reports them


def _parts(first: int, count: int) -> list[range]:
    return [range(start, min(start + PART, first + count)) for start in range(first, first + count, PART)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds; 1000 by default")
    parser.add_argument("--from", type=int, dest="first", help="the first seed; a random one by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes that play at the same time")
    parser.add_argument("--no-shrink", action="store_true", help="only tell which seeds break a rule")
    given = parser.parse_args()
    # The order of a set of text differs between processes, unless PYTHONHASHSEED is set before the process starts.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    first = random.randrange(10**9) if given.first is None else given.first
    print(f"--seeds {given.seeds} --from {first}", flush=True)
    total = Tally()
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        for part in pool.map(tally, _parts(first, given.seeds)):
            total.add(part)
            for seed, violation in part.broken.items():
                print(f"\nseed {seed}: {violation}", flush=True)
                if not given.no_shrink:
                    print(f"\n{as_test(seed, shrink(draw(seed)))}", flush=True)
    print(f"\n{total}\n{len(total.broken)} seeds broke a rule: {sorted(total.broken)}")
    return 1 if total.broken else 0


if __name__ == "__main__":
    sys.exit(main())
