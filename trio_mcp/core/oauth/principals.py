"""Who holds an access token, and what it is good for.

Scopes are names whose meaning is the author's own.  Nothing here knows where a token came from or what it looks like:
`resource_server` has that for HTTP, which is the only place where tokens are asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.records import record

__all__ = ["Principal", "declared_scopes", "has_scopes"]

_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+")  # RFC 6749, 3.3; none of it needs quoting in a challenge


def declared_scopes(what: str, scopes: Collection[str]) -> tuple[str, ...]:
    """Scopes that were declared, each once."""
    if isinstance(scopes, str) or not all(isinstance(each, str) and _SCOPE.fullmatch(each) for each in scopes):
        raise UsageError(f"{what} are a list of names without blanks and quotes; not {scopes!r}")
    if "offline_access" in scopes:  # auth-110
        raise UsageError(f"{what} have no offline_access: it is between a client and its authorization server")
    return tuple(dict.fromkeys(scopes))


def _scopes(given: Collection[str]) -> frozenset[str]:
    if isinstance(given, str) or not all(isinstance(each, str) for each in given):
        raise UsageError("the scopes of a principal are a list of names; split what has several in one text")
    return frozenset(given)


def _name(principal: Principal, field: Any, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise UsageError(f"a principal has a stable name, a str that is not empty; not {type(name).__name__}")


def _expires(principal: Principal, field: Any, expires: Any) -> None:
    # What is no number is neither before nor after anything, and the token would be good for ever.
    if expires is not None and (type(expires) not in (int, float) or math.isnan(expires)):
        raise UsageError(f"expires is a time in seconds since 1970, or None; not {expires!r}")


@record
class Principal:
    """Who holds an access token, as its verification found.

    `name` tells it from all others, and stays the same when its tokens change: sessions belong to it.  `scopes` are
    what the token is good for, and `expires` is when that ends, in seconds since 1970, if it is known.  `claims` is
    whatever else a handler may want to know (``ctx.terms.principal.claims``); it stays out of the repr.
    """

    name: str = attrs.field(validator=_name)
    scopes: frozenset[str] = attrs.field(default=(), converter=_scopes)
    expires: float | None = attrs.field(default=None, validator=_expires)
    claims: Mapping[str, Any] = attrs.field(factory=dict, repr=False)


def has_scopes(who: object, needed: Collection[str]) -> bool:
    """Whether whoever asks has all of these scopes."""
    return not needed or (isinstance(who, Principal) and who.scopes.issuperset(needed))
