"""The number of cases on each transport: `test_server` is the server's half, `test_client_transports` the client's."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attrs
import pytest

from tests.client import test_client_transports
from tests.contract import test_server
from tests.contract.cases import tables_of
from tests.contract.transports import TRANSPORTS
from tests.speeds import DEFAULT, speeds

# The names of transports in the tests of clients.
NAMES = {"child": "stdio", "http": "http stream"}


@attrs.frozen(eq=False)
class Case:
    """The attributes of a `pytest.Item` that `tests.speeds` reads."""

    nodeid: str
    params: dict[str, Any]
    marks: list[pytest.Mark]

    @property
    def callspec(self) -> Case:
        return self

    def iter_markers(self) -> Iterator[pytest.Mark]:
        return iter(self.marks)

    @property
    def transport(self) -> str:
        name: str = self.params["transport"] if "transport" in self.params else self.params["variant"].transport
        return NAMES.get(name, name)


def cases(module: ModuleType) -> Iterator[Case]:
    """The cases that have a transport."""
    for name, test in vars(module).items():
        tables, marks = tables_of(test), getattr(test, "pytestmark", [])
        for rows in itertools.product(*(table.rows for table in tables)):
            params: dict[str, Any] = {}
            for table, row in zip(tables, rows, strict=True):
                params |= table.read(row)
            if params.keys() & {"transport", "variant"}:
                of_rows = [mark for row in rows for mark in row.marks]
                yield Case(f"{module.__name__}::{name}[{params}]", params, [*marks, *of_rows])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_transport_has_about_150_cases_in_the_default_suite(transport: str) -> None:
    both: list[Any] = [*cases(test_server), *cases(test_client_transports)]
    count = Counter(case.transport for case, of in speeds(both).items() if DEFAULT in of)
    assert 120 <= count[transport] <= 180
