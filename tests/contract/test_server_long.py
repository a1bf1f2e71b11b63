"""All tests of the modules that `cases` names, over every transport, in all revisions, with all rows.

`conftest.py` collects these 25,000 cases with `--speed long` only.
"""

from __future__ import annotations

from tests.contract.cases import copies

globals().update(copies(contract=False))
