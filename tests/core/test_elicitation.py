"""The outcomes of an elicitation: how a program tells them apart; and the checks of forms and URLs."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from trio_mcp.core import Accepted, Declined, Dismissed, ElicitationOutcome, FormCheck, split_url
from trio_mcp.core.schema import InvalidSchema


def summary(outcome: ElicitationOutcome[int]) -> str:
    match outcome:
        case Accepted(value):
            return f"accepted {value}"
        case Declined():
            return "declined"
        case Dismissed():
            return "dismissed"


def test_a_match_statement_distinguishes_the_outcomes() -> None:
    outcomes: list[ElicitationOutcome[int]] = [Accepted(3), Declined(), Dismissed()]
    assert [summary(each) for each in outcomes] == ["accepted 3", "declined", "dismissed"]


def test_outcomes_are_equal_if_class_and_value_are() -> None:
    assert Accepted({"n": 1}) == Accepted({"n": 1}) != Accepted({"n": 2})
    assert len({Accepted(None), Declined(), Declined(), Dismissed(), Dismissed()}) == 3


def test_the_value_of_an_outcome_cannot_be_changed() -> None:
    outcome = Accepted(1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        outcome.value = 2  # type: ignore[misc]


# The checks of both ends


def test_a_form_is_checked_whole_and_field_by_field() -> None:
    field = {"type": "integer", "minimum": 1}
    check = FormCheck({"type": "object", "properties": {"n": field, "name": {"type": "string"}}, "required": ["n"]})
    assert check.errors({"n": 1, "name": "x"}) == []
    assert [(each.path, each.keyword, each.message) for each in check.errors({"name": 3})] == [
        ("/name", "type", "must be of type string, not an integer"),
        ("", "required", 'lacks the member "n"'),
    ]
    assert check.misfit({"n": 1, "name": "x"}) == ""
    assert check.misfit({"name": 3}) == (
        'content/name must be of type string, not an integer; content lacks the member "n"'
    )
    assert check.fields.fits({"name": "x"})
    assert not check.fields.fits({"n": 0})
    assert not check.fields.fits({"name": {1}})
    assert FormCheck({"type": "object", "properties": {}}).errors({}) == []
    with pytest.raises(InvalidSchema):
        FormCheck({"type": "object", "properties": {"n": {"type": "odd"}}})
    for required in (5, "n", [5], [["n"]]):  # the schema may be that of a peer
        with pytest.raises(InvalidSchema, match="/required"):
            FormCheck({"type": "object", "properties": {}, "required": required})


@pytest.mark.parametrize("url", ["https://example.com/a?b#c", "http://127.0.0.1:80/", "x://h"])
def test_a_url_with_a_host_is_split(url: str) -> None:
    parts = split_url(url)
    assert parts is not None
    assert parts.geturl() == url


@pytest.mark.parametrize(
    "url", ["", "/a", "https://", "https://a\\b/", "https://é/", "https://a:0/", "https://a:x/", "https://[a/", None, 3]
)
def test_a_url_that_programs_read_differently_is_not_split(url: Any) -> None:
    assert split_url(url) is None
