"""The three outcomes of an elicitation, for handlers of a server and callbacks of a client."""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

import attrs

__all__ = ["Accepted", "Declined", "Dismissed", "ElicitationOutcome"]

T = TypeVar("T")


@attrs.frozen
class Accepted(Generic[T]):
    """The user agreed.  `value` is the form as it was filled in; nothing for a page to visit."""

    value: T


@attrs.frozen
class Declined:
    """The user said no."""


@attrs.frozen
class Dismissed:
    """The user made no choice: closed the dialogue, went away."""


ElicitationOutcome: TypeAlias = Accepted[T] | Declined | Dismissed
