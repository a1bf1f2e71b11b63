"""The holder of an access token, and the token's scopes.

The author of a server chooses the names of scopes.  This module does not know where a token came from or how it looks:
`resource` does, for HTTP, the only transport with tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import record

__all__ = ["Principal", "declared_scopes", "has_scopes", "name_of_principal"]

_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+")  # RFC 6749, 3.3; no character of it needs quoting in a challenge


def declared_scopes(label: str, scopes: Collection[str]) -> tuple[str, ...]:
    """Check declared scopes, and return each once.  `label` names the setting in errors."""
    if isinstance(scopes, str) or not all(isinstance(each, str) and _SCOPE.fullmatch(each) for each in scopes):
        raise UsageError(f"{label} must be a list of names without blanks and quotes, not {scopes!r}")
    if "offline_access" in scopes:  # auth-110
        raise UsageError(
            f"{label} must not contain offline_access: it is between a client and its authorization server"
        )
    return tuple(dict.fromkeys(scopes))


def _scopes(given: Collection[str]) -> frozenset[str]:
    if isinstance(given, str) or not all(isinstance(each, str) for each in given):
        raise UsageError("the scopes of a principal must be a list of names; split a string that has several")
    return frozenset(given)


@record
class Principal:
    """The holder of an access token, as its verification found.

    `name` must be unique, and must stay the same when the tokens change: sessions belong to it.  `scopes` are the
    token's scopes.  `expires` is the time when the token expires, in seconds since 1970, or None if unknown.  `claims`
    are further facts for handlers (``ctx.claims``); they stay out of the repr.
    """

    name: str
    scopes: frozenset[str] = attrs.field(default=(), converter=_scopes)
    expires: float | None = None
    claims: Mapping[str, Any] = attrs.field(factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        name, expires = self.name, self.expires
        if not isinstance(name, str) or not name:
            came = "an empty one" if name == "" else type(name).__name__
            raise UsageError(f"the name of a principal must be a str with at least one character, not {came}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UsageError(f"the name of a principal must be Unicode text, got {name!a}") from None
        # Comparisons with NaN are always false, so the token would never expire.
        if expires is not None and (type(expires) not in (int, float) or math.isnan(expires)):
            raise UsageError(f"expires must be a time in seconds since 1970, or None, not {expires!r}")


def name_of_principal(principal: Any) -> Any:
    """Return the name of a principal.  One that has no access token is its name, and None is anonymous."""
    return principal.name if isinstance(principal, Principal) else principal


def has_scopes(principal: object, needed: Collection[str]) -> bool:
    """Return whether the principal has all of these scopes."""
    return not needed or (isinstance(principal, Principal) and principal.scopes.issuperset(needed))
