"""The requirement table against the tests, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.requirements import HERE, TABLE, WAIVED, read, references
from tests.speeds import DEFAULT

LAYERS = sorted({row["layer"] for row in read(TABLE).values()})


def test_every_id_that_a_test_names_is_in_the_table() -> None:
    rows = read(TABLE)
    assert {(id, file) for id, file in references() if id not in rows} == set()


@pytest.mark.parametrize("layer", LAYERS)
def test_every_must_is_proven_or_waived(layer: str) -> None:
    musts = {id for id, row in read(TABLE).items() if row["layer"] == layer and row["level"] == "MUST"}
    assert musts - {id for id, _ in references()} - read(WAIVED).keys() == set()


def test_nine_in_ten_of_the_shoulds_are_proven() -> None:
    shoulds = {id for id, row in read(TABLE).items() if row["level"] == "SHOULD"}
    assert len(shoulds & {id for id, _ in references()}) >= 0.9 * len(shoulds)


def test_every_row_with_a_test_has_one_in_the_default_suite(request: pytest.FixtureRequest) -> None:
    config = request.config
    folders = {(config.invocation_params.dir / name).resolve() for name in config.args}
    options = ("keyword", "markexpr", "part", "deselect", "ignore", "ignore_glob")
    some = any(map(config.getoption, options)) or not folders <= {HERE, HERE.parent}
    if some or config.getoption("speed") != DEFAULT:
        pytest.skip("it looks at a run of the whole default suite")
    here = {id for item in request.session.items for mark in item.iter_markers("req") for id in mark.args}
    assert {id for id, _ in references()} - here == set()


def test_a_waived_row_has_a_reason_and_no_test() -> None:
    waived = read(WAIVED)
    assert waived.keys() <= read(TABLE).keys()
    assert all(row["reason"] for row in waived.values())
    assert waived.keys() & {id for id, _ in references()} == set()


def test_the_table_is_the_official_one(shared_schemas: Path) -> None:
    assert TABLE.read_bytes() == (shared_schemas / "requirements.tsv").read_bytes()
