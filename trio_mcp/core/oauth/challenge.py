"""Read WWW-Authenticate: the challenges of a refused request.

The field is a list of challenges.  Each is a scheme with parameters, and commas separate both challenges and
parameters.  The reader tells them apart by one rule: a parameter has ``=``.  It accepts the faults of real servers:
missing quotes and missing commas.  A challenge is not trusted: its URL is one more place to look for metadata, and its
scopes are only requested.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from trio_mcp.core.records import record

__all__ = [
    "BEARER",
    "DPOP",
    "AuthChallenge",
    "Challenge",
    "read_auth_challenge",
    "read_challenges",
    "scopes_of",
    "union",
]

BEARER = "Bearer"
DPOP = "DPoP"
_SCHEMES = {BEARER.lower(): BEARER, DPOP.lower(): DPOP}

# Longer fields are cut.  A field of ten challenges has 1 KB, and the head of a response has a limit of its own.
_LENGTH = 8192
_SCOPES = 200
_SCOPE_TOKEN = r"[!#-\[\]-~]{1,256}"
_ITEM = r"""([!#$%&'*+\-.^_`|~0-9A-Za-z]+)(?:[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*)))?"""


@record
class Challenge:
    """One challenge: the scheme and the parameter names are in lower case."""

    scheme: str
    parameters: Mapping[str, str] = MappingProxyType({})


@record
class AuthChallenge:
    """The demand of a 401 or 403, as far as the server states it.

    `schemes`: the accepted ones of Bearer and DPoP, which are the schemes supported here.
    """

    status: int
    schemes: tuple[str, ...] = ()
    error: str = ""
    scopes: tuple[str, ...] = ()
    metadata_url: str | None = attrs.field(default=None)


def read_challenges(value: str) -> tuple[Challenge, ...]:
    """Return the challenges in order.  Text that is no challenge is skipped."""
    found: list[tuple[str, dict[str, str]]] = []
    for match in re.finditer(_ITEM, value[:_LENGTH]):
        name, quoted, plain = match.groups()
        if quoted is None and plain is None:
            found.append((name.lower(), {}))
        elif found:
            text = plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            found[-1][1].setdefault(name.lower(), text)
    return tuple(Challenge(scheme, parameters) for scheme, parameters in found)


def read_auth_challenge(status: int, value: str | None) -> AuthChallenge | None:
    """Return the demand of a 401 or 403.  Returns None if all its challenges have other schemes (auth-40).

    A 401 without any challenge is a demand too: the metadata is at a well-known URL (auth-41).
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
    """Return the scopes in a string, or in a list of strings.  Invalid ones are left out."""
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, list | tuple):
        return ()
    good = [each for each in value if isinstance(each, str) and re.fullmatch(_SCOPE_TOKEN, each)]
    return tuple(dict.fromkeys(good))[:_SCOPES]


def union(*scopes: Iterable[str]) -> tuple[str, ...]:
    """auth-112: return all scopes, each once, in order of first appearance."""
    return tuple(dict.fromkeys(scope for each in scopes for scope in each))
