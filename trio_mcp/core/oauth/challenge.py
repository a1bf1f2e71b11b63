"""What a refused request says: reading WWW-Authenticate.

The field is a list of challenges, each a scheme and its parameters, and commas stand between challenges as well as
between parameters.  The reader tells them apart by one rule, a parameter has ``=``, and forgives what servers really
send: values without quotes that need them, and commas that are missing.  Nothing in a challenge is trusted: its URL is
one place more to ask, and its scopes are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from trio_mcp.core.records import record

__all__ = ["BEARER", "DPOP", "AuthChallenge", "Challenge", "read_challenges", "read_demand", "scopes_of", "union"]

BEARER = "Bearer"
DPOP = "DPoP"
_SCHEMES = {BEARER.lower(): BEARER, DPOP.lower(): DPOP}

# Longer ones are cut: a field of ten challenges has 1 KB, and the head of a reply is bounded anyway.
_LENGTH = 8192
_SCOPES = 200
_SCOPE_TOKEN = r"[!#-\[\]-~]{1,256}"
_ITEM = r"""([!#$%&'*+\-.^_`|~0-9A-Za-z]+)(?:[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*)))?"""


@record
class Challenge:
    """One challenge: the scheme in lower case, and the parameters by their names in lower case."""

    scheme: str
    parameters: Mapping[str, str] = MappingProxyType({})


@record
class AuthChallenge:
    """What the server wants before it answers, as far as it says so.

    `schemes` are those it takes, of the two that can be had here.
    """

    status: int
    schemes: tuple[str, ...] = ()
    error: str = ""
    scopes: tuple[str, ...] = ()
    metadata_url: str | None = attrs.field(default=None)


def read_challenges(value: str) -> tuple[Challenge, ...]:
    """The challenges in order.  What is no challenge is passed over."""
    found: list[tuple[str, dict[str, str]]] = []
    for match in re.finditer(_ITEM, value[:_LENGTH]):
        name, quoted, plain = match.groups()
        if quoted is None and plain is None:
            found.append((name.lower(), {}))
        elif found:
            text = plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            found[-1][1].setdefault(name.lower(), text)
    return tuple(Challenge(scheme, parameters) for scheme, parameters in found)


def read_demand(status: int, value: str | None) -> AuthChallenge | None:
    """What a 401 or 403 demands; None where its challenges are all of other schemes (auth-40).

    A 401 without any challenge is a demand too: what is missing is well known (auth-41).
    """
    challenges = read_challenges(value or "")
    ours = [each for each in challenges if each.scheme in _SCHEMES]
    if challenges and not ours:
        return None
    said: dict[str, str] = {}
    for each in ours:
        said = {**each.parameters, **said}
    return AuthChallenge(
        status,
        tuple(dict.fromkeys(_SCHEMES[each.scheme] for each in ours)),
        said.get("error", ""),
        scopes_of(said.get("scope")),
        said.get("resource_metadata"),
    )


def scopes_of(value: object) -> tuple[str, ...]:
    """The scopes in a string, or in a list of strings; what is no scope is left out."""
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, list | tuple):
        return ()
    good = [each for each in value if isinstance(each, str) and re.fullmatch(_SCOPE_TOKEN, each)]
    return tuple(dict.fromkeys(good))[:_SCOPES]


def union(*scopes: Iterable[str]) -> tuple[str, ...]:
    """auth-112: all of them, each once, in the order in which they came up."""
    return tuple(dict.fromkeys(scope for each in scopes for scope in each))
