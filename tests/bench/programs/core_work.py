"""Work of the core: ``core_work.py json|orjson WORK``.  For each line that it reads, it does the work once, and prints
the cost.
"""

from __future__ import annotations

import sys

if sys.argv[1] == "json":
    sys.modules["orjson"] = None  # type: ignore[assignment]  # as without the extra `speed`

from tests.bench.core import WORKS, cost

work = WORKS[sys.argv[2]]()
for _ in sys.stdin:
    print(cost(work), flush=True)
