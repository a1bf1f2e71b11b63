"""The outcomes of an elicitation: how a program tells them apart, and that it cannot change them."""

from __future__ import annotations

import attrs
import pytest

from trio_mcp.core import Accepted, Declined, Dismissed, ElicitationOutcome


def summary(outcome: ElicitationOutcome[int]) -> str:
    match outcome:
        case Accepted(value):
            return f"accepted {value}"
        case Declined():
            return "declined"
        case Dismissed():
            return "dismissed"


def test_a_match_statement_tells_the_outcomes_apart() -> None:
    outcomes: list[ElicitationOutcome[int]] = [Accepted(3), Declined(), Dismissed()]
    assert [summary(each) for each in outcomes] == ["accepted 3", "declined", "dismissed"]


def test_outcomes_are_equal_if_class_and_value_are() -> None:
    assert Accepted({"n": 1}) == Accepted({"n": 1}) != Accepted({"n": 2})
    assert len({Accepted(None), Declined(), Declined(), Dismissed(), Dismissed()}) == 3


def test_the_value_of_an_outcome_cannot_be_changed() -> None:
    outcome = Accepted(1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        outcome.value = 2  # type: ignore[misc]
