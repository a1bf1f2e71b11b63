"""OAuth's resource server, as decisions: the challenges, the checks and the metadata of a protected server.

This module does not verify tokens, and does no I/O.  It finds faults in the way a request carries its token, missing
scopes, and the response to send.  The HTTP driver

1. answers requests for the resource's metadata (RFC 9728) by `ResourceServer.document`; they need no token;
2. takes the `token` of every other request, has it verified by the author's function, and passes the principal to
   `granted`, or answers with `unauthorized`;
3. answers with `insufficient` if the principal lacks a scope that the message needs.

What surprises:

- All published URLs come from the author's configuration.  A proxy, or an attacker, chooses the scheme and host of a
  request.
- The challenge names the metadata URL at the endpoint's public URL: below the prefix of a gateway, if there is one.
  Clients that ignore it look below the root of the host, so the document is served under all its possible paths here.
  A gateway that also forwards the root serves these clients too.
- A challenge names all scopes of its request, also those that the token has: a client that requests exactly these
  succeeds, and a client that requests more loses nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias
from urllib.parse import unquote_plus

import attrs

from trio_mcp.core.errors import INVALID_REQUEST, McpError, UsageError
from trio_mcp.core.http.fields import JSON, Fields, HttpRequest, Reply, refusal
from trio_mcp.core.messages import Error, Id, record
from trio_mcp.core.oauth.discovery import is_loopback, scopes_of
from trio_mcp.core.principals import Principal, declared_scopes

__all__ = [
    "WELL_KNOWN", "CannotVerify", "Protection", "ResourceServer", "Verify", "canonical", "claims_fault", "scopes_in",
]  # fmt: skip

WELL_KNOWN = "/.well-known/oauth-protected-resource"

Verify: TypeAlias = Callable[[str], Principal | Awaitable[Principal | None] | None]
"""Returns the holder of a token, or None if the token is not accepted."""


class CannotVerify(McpError):
    """Raised by `verify` if it cannot decide now whether a token is valid.

    The request is answered with 503, because a client that gets 401 discards a token that may be valid.
    """


# The author's settings.

_SITE = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?"
_URL = re.compile(rf"([Hh][Tt][Tt][Pp][Ss]?)://({_SITE})((?:/[A-Za-z0-9._~%!$&'()*+,;=:@-]*)*)")


def _url(label: str, url: object) -> tuple[str, str]:
    """Return the origin in lower case, and the path (auth-45).

    auth-24, auth-53: "All authorization server endpoints MUST be served over HTTPS", and so must a server that receives
    tokens.  On loopback, where the network cannot be read, http is allowed.
    """
    match = _URL.fullmatch(url) if isinstance(url, str) else None
    if match is None:
        raise UsageError(f"{label} must be a URL like 'https://example.com/mcp', without a query, not {url!r}")
    scheme, site = match[1].lower(), match[2].lower()
    if scheme == "http" and not is_loopback(f"http://{site}"):
        raise UsageError(
            f"{label} must be https, because tokens are sent there; plain http is only for loopback: {url}"
        )
    return f"{scheme}://{site}", match[3]


def canonical(uri: str) -> str:
    """Return the canonical form for comparing resources: auth-45, auth-46.

    Other strings than http URLs stay unchanged.
    """
    match = _URL.fullmatch(uri)
    return uri if match is None else f"{match[1].lower()}://{match[2].lower()}{match[3].rstrip('/')}"


def _scopes(given: Collection[str]) -> tuple[str, ...]:
    return declared_scopes("scopes", given)


def _servers(given: object) -> tuple[str, ...]:
    """auth-37."""
    if isinstance(given, str) or not isinstance(given, Collection) or not given:
        raise UsageError(
            "authorization_servers must be a list of at least one issuer, a URL, such as ['https://auth.example.com']; "
            f"got {given!r}"
        )
    for each in given:
        _url("an authorization server", each)
    return tuple(given)  # unchanged: issuers are compared letter by letter


def _implied(given: Mapping[str, Collection[str]]) -> Mapping[str, tuple[str, ...]]:
    return MappingProxyType({each: declared_scopes(f"the scopes that {each!r} implies", given[each]) for each in given})


@record
class Protection:
    """The demands on clients of a protected server; see `Server.protect`."""

    verify: Verify = attrs.field(repr=False)
    authorization_servers: Sequence[str] = attrs.field(converter=_servers)
    resource: str | None = None
    scopes: Sequence[str] = attrs.field(default=(), converter=_scopes)
    implies: Mapping[str, Sequence[str]] = attrs.field(factory=dict, converter=_implied)

    def __attrs_post_init__(self) -> None:
        if not callable(self.verify):
            raise UsageError(f"verify must be a function of a token, not {type(self.verify).__name__}")
        if self.resource is not None:
            _url("resource", self.resource)

    @property
    def host(self) -> str | None:
        """The host in the public URL of the resource, if `resource` is set."""
        return None if self.resource is None else _url("resource", self.resource)[0].partition("://")[2]

    def granted(self, principal: Principal) -> Principal:
        """Return the principal with all scopes that its own imply (auth-111)."""
        scopes: set[str] = set(principal.scopes)
        unseen = list(scopes)
        while unseen:
            for each in self.implies.get(unseen.pop(), ()):
                if each not in scopes:
                    scopes.add(each)
                    unseen.append(each)
        return attrs.evolve(principal, scopes=scopes)


# Responses.

_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # RFC 6750, 2.1
_ANY_ORIGIN: Fields = (
    ("Access-Control-Allow-Origin", "*"),
)  # the document is public, so pages of any origin may read it
_METHODS = "GET, HEAD, OPTIONS"


class ResourceServer:
    """One protected endpoint.

    `path` is the path of the endpoint; `public_url` is the public URL of "/".  Raises `UsageError` if neither
    `Protection.resource` nor `public_url` is set.
    """

    def __init__(self, protection: Protection, *, path: str, public_url: str | None) -> None:
        self.protection = protection
        resource = protection.resource
        if resource is None:
            if public_url is None:
                raise UsageError("a protected server needs its public URL: set resource=... or public_url")
            resource = public_url + path
        site, public_path = _url("resource", resource)
        public_path = public_path.rstrip("/")
        self.resource = site + public_path  # auth-46
        """The canonical URL of the endpoint, which is the audience of its tokens."""
        place = WELL_KNOWN + public_path
        self.metadata_url = site + place
        if public_url is not None:
            self.metadata_url = "".join(_url("public_url", public_url)) + WELL_KNOWN + path
        elif public_path.endswith(path):
            self.metadata_url = site + public_path.removesuffix(path) + WELL_KNOWN + path
        self.paths = frozenset({WELL_KNOWN, WELL_KNOWN + path, place})
        """The paths of the document on this server."""
        content: dict[str, Any] = {
            "resource": self.resource,
            "authorization_servers": list(protection.authorization_servers),
            "bearer_methods_supported": ["header"],
        }
        if protection.scopes:
            content["scopes_supported"] = list(protection.scopes)
        self._document = json.dumps(content).encode()

    def document(self, request: HttpRequest) -> Reply | None:
        """Return the response to a request for the metadata; None for other paths (auth-34, auth-39)."""
        if request.target.partition("?")[0].rstrip("/") not in self.paths:
            return None
        if "websocket" in request.headers.get("Upgrade", "").lower():
            return None  # no WebSocket is served here
        if request.method == "OPTIONS":
            fields = (*_ANY_ORIGIN, ("Access-Control-Allow-Methods", _METHODS), ("Access-Control-Allow-Headers", "*"))
            return Reply(204, (("Allow", _METHODS), *fields))
        if request.method not in ("GET", "HEAD"):
            error = Error(None, INVALID_REQUEST, f"the metadata of the resource allows only {_METHODS}")
            return refusal(405, error, _ANY_ORIGIN, (("Allow", _METHODS),))
        length = str(len(self._document))
        fields = (("Content-Type", JSON), ("Cache-Control", "max-age=300"), ("Content-Length", length), *_ANY_ORIGIN)
        return Reply(200, fields, b"" if request.method == "HEAD" else self._document)

    def token(self, request: HttpRequest, cors: Fields) -> str | Reply:
        """Return the token of a request, or the refusal if it has no readable token (auth-27).

        It never repeats the token.
        """
        query = request.target.partition("?")[2]
        if any(unquote_plus(each.partition("=")[0]) == "access_token" for each in query.split("&")):
            why = "a token in the query ends up in logs; send it in the Authorization header"
            return self._challenge(400, why, cors, error="invalid_request")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            got = "a token that is bound to a key (DPoP)" if scheme.lower() == "dpop" else "no access token"
            return self._challenge(401, f"the request has {got}; send one as Authorization: Bearer", cors)
        token = token.strip(" ")
        if not _TOKEN.fullmatch(token):
            why = "the Authorization header must be Bearer and one token"
            return self._challenge(400, why, cors, error="invalid_request")
        return token

    def unauthorized(self, cors: Fields) -> Reply:
        """Refuse a token (auth-20, auth-21): it is expired, revoked, for another server, or no token."""
        why = "the access token is not accepted: it is invalid, has expired, or is not for this server"
        return self._challenge(401, why, cors, error="invalid_token")

    def insufficient(self, needed: Sequence[str], cors: Fields, id: Id | None = None) -> Reply:
        """auth-79, auth-80: refuse for a missing scope.

        `needed`: all scopes of the request, the server's first (auth-65).
        """
        why = f"the access token lacks a scope; this request needs {' '.join(needed)}"
        return self._challenge(403, why, cors, error="insufficient_scope", scopes=needed, id=id)

    def _challenge(
        self,
        status: int,
        why: str,
        cors: Fields,
        *,
        error: str | None = None,
        scopes: Sequence[str] | None = None,
        id: Id | None = None,
    ) -> Reply:
        """auth-12, auth-38, auth-62.  RFC 6750, 3.1: the challenge for a request without a token contains no error."""
        parameters = {"resource_metadata": self.metadata_url}
        if needed := self.protection.scopes if scopes is None else scopes:
            parameters["scope"] = " ".join(needed)
        if error is not None:
            parameters = {"error": error, **parameters, "error_description": why}
        challenge = ", ".join(f'{name}="{value}"' for name, value in parameters.items())
        return refusal(status, Error(id, INVALID_REQUEST, why), cors, (("WWW-Authenticate", f"Bearer {challenge}"),))


# The claims of a JWT whose signature is valid.


def claims_fault(
    claims: Mapping[str, Any], *, issuer: str, audiences: Collection[str], now: float, leeway: float
) -> str | None:
    """Return the fault in the claims of an access token, or None.  `audiences` must be canonical.

    auth-47: accept only tokens of this issuer, for one of these audiences, that are valid now.
    """
    if claims.get("iss") != issuer:
        return "it has another issuer"
    named = claims.get("aud")
    named = [named] if isinstance(named, str) else named
    if not isinstance(named, list) or not any(isinstance(each, str) and canonical(each) in audiences for each in named):
        return "it is for another audience"
    expires: Any = claims.get("exp")
    begins: Any = claims.get("nbf", now)
    if not _is_time(expires) or not _is_time(begins):
        return "its exp or nbf is missing or not a number"
    if now >= expires + leeway:
        return "it has expired"
    if now < begins - leeway:
        return "it is not valid yet"
    subject = claims.get("sub")
    return None if isinstance(subject, str) and subject else "it has no subject"


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e12  # not NaN: comparisons with it are always false


def scopes_in(claims: Mapping[str, Any]) -> frozenset[str]:
    """RFC 9068 has the scopes in `scope`, separated by blanks; other servers use `scp`, as a list or a string."""
    return frozenset(scopes_of(claims.get("scope", claims.get("scp"))))
