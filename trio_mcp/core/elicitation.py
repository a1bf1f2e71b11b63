"""Elicitation at both ends: the three outcomes, the check of a form, and the check of the URL of a page."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar
from urllib.parse import SplitResult, urlsplit

import attrs

from trio_mcp.core.messages import JsonObject

if TYPE_CHECKING:
    from trio_mcp.core.schema.validation import Problem

__all__ = ["LOOPBACK_HOSTS", "Accepted", "Declined", "Dismissed", "ElicitationOutcome", "FormCheck", "split_url"]

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


class FormCheck:
    """The schema of a form, compiled once, for answers and for single fields.  Raises `InvalidSchema`."""

    __slots__ = ("_required", "fields")

    def __init__(self, schema: JsonObject) -> None:
        from trio_mcp.core.schema.cost import InvalidSchema
        from trio_mcp.core.schema.validation import compile_schema

        required = schema.get("required") or []
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise InvalidSchema("invalid", "the schema of a form is not valid at /required: it must be a list of names")
        self._required: list[str] = required
        self.fields = compile_schema({key: each for key, each in schema.items() if key != "required"})
        """Checks the fields that are there."""

    def errors(self, content: JsonObject) -> list[Problem]:
        """Return the problems of an answer (elic-08, elic-45)."""
        from trio_mcp.core.schema.validation import Problem

        lacking = [json.dumps(name, ensure_ascii=False)[:_SHOWN] for name in self._required if name not in content]
        return [
            *self.fields.errors(content),
            *(Problem("", "required", f"lacks the member {name}") for name in lacking[:_PROBLEMS]),
        ]

    def misfit(self, content: JsonObject) -> str:
        """Return why an answer does not fit the form; "" if it fits."""
        return "; ".join(f"content{each.path} {each.message}" for each in self.errors(content))


# As many problems, and as long names, as in other error messages.
_PROBLEMS = 20
_SHOWN = 200

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
# Only the characters of RFC 3986.  Programs disagree about others: one drops a backslash or a tab, another reads it as
# a slash.
_URL = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+")


def split_url(url: str) -> SplitResult | None:
    """Return the parts of a URL with a host; None unless all programs read the same host from it."""
    try:
        parts = urlsplit(url)
        valid = _URL.fullmatch(url) is not None and bool(parts.hostname) and parts.port != 0
    except (TypeError, ValueError, AttributeError):  # not a str; an unclosed bracket; a port that is not a number
        return None
    return parts if valid else None
