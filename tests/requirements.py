"""`@req("core-01")` on a test says which rows of requirements.tsv it proves."""

import pytest

req = pytest.mark.req
