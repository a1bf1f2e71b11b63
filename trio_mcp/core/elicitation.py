"""The three outcomes of an elicitation, for handlers on a server and callbacks on a client."""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

import attrs

__all__ = ["Accepted", "Declined", "Dismissed", "ElicitationOutcome"]

T = TypeVar("T")


@attrs.frozen
class Accepted(Generic[T]):
    """The user agreed.  `value` holds the values of the form; None if the user was asked to visit a page."""

    value: T


@attrs.frozen
class Declined:
    """The user said no."""


@attrs.frozen
class Dismissed:
    """The user made no choice, for example closed the dialogue."""


ElicitationOutcome: TypeAlias = Accepted[T] | Declined | Dismissed
