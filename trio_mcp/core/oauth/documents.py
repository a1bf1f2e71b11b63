"""The documents of discovery: the metadata of a resource and of an authorization server.

Only the needed fields are read.  A field that is missing or has another type counts as absent, unless nothing works
without it; then the error names the document and the field.  Three checks refuse a document before any further request:
its resource must be the MCP server (another resource's tokens could be meant), its issuer must be the one whose URL was
asked (auth-91), and its endpoints must be allowed by the rules of `places`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import NoReturn
from urllib.parse import parse_qsl, urlsplit

from trio_mcp.core.errors import shown
from trio_mcp.core.jsonrpc import Json
from trio_mcp.core.oauth.challenge import scopes_of
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame
from trio_mcp.core.oauth.places import (
    PUBLIC,
    Network,
    UrlRules,
    covers,
    is_trusted,
    issuer_fault,
    network_fault,
    origin_of,
    same_origin,
    trust_advice,
    url_fault,
)
from trio_mcp.core.records import record

__all__ = [
    "ResourceDocument",
    "ServerDocument",
    "default_server",
    "read_object",
    "read_resource",
    "read_seconds",
    "read_server",
]

_ISSUERS = 20  # of one resource that are read; real ones have one


def read_object(body: bytes, limit: int) -> dict[str, Json] | None:
    """Return the JSON object in a body.  None if it is no object, or longer than `limit`."""
    if len(body) > limit:
        return None
    try:
        value = json.loads(str(body, "utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deep
        return None
    return value if isinstance(value, dict) else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def read_seconds(value: Json) -> float | None:
    """Read a time or a lifetime, which some servers write as a string.

    None if it is no number, as if it were absent.
    """
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value):
        value = int(value)
    if type(value) not in (int, float) or not 0 <= value <= 10**12:
        return None
    return float(value)


@record
class ResourceDocument:
    """Protected Resource Metadata (RFC 9728).  `scopes` is None if the document has no list of scopes."""

    resource: str
    issuers: tuple[str, ...]
    scopes: tuple[str, ...] | None = None
    requires_dpop: bool = False


def read_resource(
    document: Mapping[str, Json], server_url: str, rules: UrlRules, networks: Collection[Network] = PUBLIC
) -> ResourceDocument:
    """Read the document of the server at `server_url`.  `networks`: where its issuers may be.

    Raises `AuthorizationFailed` if the document must not be used.
    """
    resource = document.get("resource")
    if not isinstance(resource, str):
        raise _server_fault("the resource metadata of the MCP server names no resource", "its operator must add it")
    if not covers(resource, server_url):
        raise _server_fault(
            f"the resource metadata is for {shown(resource)}, not for the MCP server at {origin_of(server_url)}",
            "its operator must fix the metadata, because tokens for another resource are never requested",
        )
    listed = document.get("authorization_servers")
    named = [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
    fit = [each for each in named[:_ISSUERS] if issuer_fault(each, rules) is None]
    good = [each for each in fit if network_fault(each, rules, networks) is None]
    if not good:
        named_issuer, advice = "none", "its operator must fix it"
        if named:
            named_issuer = f"only {shown(named[0])}, which {issuer_fault(named[0], rules)}"
        if fit:
            named_issuer = f"only {shown(fit[0])}, which {network_fault(fit[0], rules, networks)}"
            advice = trust_advice(fit[0])
        raise _server_fault(
            f"the resource metadata of the MCP server must name its authorization server, and names {named_issuer}",
            advice,
        )
    scopes = document.get("scopes_supported")
    return ResourceDocument(
        resource,
        tuple(dict.fromkeys(good)),
        scopes_of(scopes) if isinstance(scopes, list) else None,
        document.get("dpop_bound_access_tokens_required") is True,
    )


def _server_fault(why: str, advice: str) -> AuthorizationFailed:
    return AuthorizationFailed(Blame.SERVER, why, advice)


@record
class ServerDocument:
    """Authorization Server Metadata (RFC 8414), or that of an OpenID provider: the fields that are used here.

    `issuer` is the issuer whose URL was asked; credentials are stored under it.  `stated_issuer` is the issuer in the
    document, which may differ by a slash in 2025-03-26.  None: the document does not say.
    """

    issuer: str
    stated_issuer: str
    token_endpoint: str
    authorization_endpoint: str | None = None
    registration_endpoint: str | None = None
    scopes: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None
    grants: tuple[str, ...] | None = None
    challenges: tuple[str, ...] | None = None
    supports_iss: bool = False
    supports_client_documents: bool = False
    dpop_algorithms: tuple[str, ...] = ()
    legacy: bool = False


def read_server(
    document: Mapping[str, Json],
    issuer: str,
    rules: UrlRules,
    networks: Collection[Network] = PUBLIC,
    *,
    legacy: bool = False,
) -> ServerDocument:
    """Read the metadata of this issuer.  `networks`: where its endpoints may be.

    Raises `AuthorizationFailed` if it must not be used.  `legacy`: by the rules of 2025-03-26, in which `issuer` is
    only the origin where the document was found.
    """
    stated_issuer = document.get("issuer")
    # 2025-03-26 does not define how the origin is written as an issuer, and some servers add a slash.  No other
    # difference is allowed: a server that names another server's issuer would receive that server's codes (a mix-up).
    if stated_issuer != issuer and not (legacy and stated_issuer == f"{issuer}/"):
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"the metadata of {shown(issuer)} names another issuer, {shown(stated_issuer)}",
            "the two must be equal, letter by letter; its operator or the MCP server's must fix one",
        )
    supports_iss = document.get("authorization_response_iss_parameter_supported") is True
    found = {name: _endpoint(document, name, issuer, rules, networks, supports_iss) for name in _ENDPOINTS}
    token_endpoint, authorization_endpoint, registration_endpoint = found.values()
    if token_endpoint is None:
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"the metadata of {shown(issuer)} names no token endpoint",
            "its operator must add it",
        )
    return ServerDocument(
        issuer,
        str(stated_issuer),
        token_endpoint,
        authorization_endpoint,
        registration_endpoint,
        scopes_of(document.get("scopes_supported")),
        _texts(document.get("token_endpoint_auth_methods_supported")),
        _texts(document.get("grant_types_supported")),
        _texts(document.get("code_challenge_methods_supported")),
        supports_iss,
        document.get("client_id_metadata_document_supported") is True,
        _texts(document.get("dpop_signing_alg_values_supported")) or (),
        legacy,
    )


def default_server(server_url: str) -> ServerDocument:
    """auth-15: the default endpoints of a 2025-03-26 server that publishes no metadata."""
    base = origin_of(server_url)
    return ServerDocument(base, base, f"{base}/token", f"{base}/authorize", f"{base}/register", legacy=True)


_ENDPOINTS = ("token_endpoint", "authorization_endpoint", "registration_endpoint")
# Our parameters for the authorization page.  In the endpoint's own query they could redirect the answer, or replace our
# id.
_OUR_PARAMETERS = frozenset(
    {"client_id", "code_challenge", "code_challenge_method", "redirect_uri", "response_mode", "response_type", "state"}
)


def _endpoint(
    document: Mapping[str, Json],
    name: str,
    issuer: str,
    rules: UrlRules,
    networks: Collection[Network],
    supports_iss: bool,
) -> str | None:
    url = document.get(name)
    if url is None:
        return None
    endpoint, advice = str(url), "its operator must fix the metadata"
    fault = url_fault(url, rules)  # auth-24
    if fault is None and (twice := _OUR_PARAMETERS & {each for each, _ in parse_qsl(urlsplit(endpoint).query)}):
        fault = f"has {min(twice)} in its query, a parameter that only the client may set"
    if fault is None and not is_trusted(issuer, rules):
        if (fault := network_fault(endpoint, rules, networks)) is not None:
            advice = trust_advice(endpoint)
        elif not supports_iss and not same_origin(endpoint, issuer):
            fault = "is at another origin, and its metadata does not promise iss, which protects from a mix-up"
            advice = trust_advice(issuer)
    if fault is not None:
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER, f"the {name} of {shown(issuer)}, {shown(endpoint)}, {fault}", advice
        )
    return endpoint


def _texts(value: Json) -> tuple[str, ...] | None:
    if not isinstance(value, list):
        return None
    return tuple(each for each in value if isinstance(each, str))
