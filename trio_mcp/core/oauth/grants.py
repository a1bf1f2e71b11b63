"""The messages of OAuth 2.1: the authorization URL, the browser's return, and the requests at the token endpoint.

Each function makes or reads one message, independent of the others.  `read_return` contains the rules that keep one
server's code from another server (state, PKCE, RFC 9207).  Their order matters: check first to which request an answer
belongs, then read its content.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from hashlib import sha256
from hmac import compare_digest
from types import MappingProxyType
from urllib.parse import parse_qsl, quote, urlencode

import attrs

from trio_mcp.core.errors import shown
from trio_mcp.core.jsonrpc import Json
from trio_mcp.core.oauth.challenge import BEARER, DPOP, scopes_of
from trio_mcp.core.oauth.clients import IdentityAssertion, is_printable
from trio_mcp.core.oauth.documents import ServerDocument, read_seconds
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame, censored, error_text
from trio_mcp.core.oauth.proofs import Entropy, base64url, token_text
from trio_mcp.core.oauth.records import Tokens
from trio_mcp.core.records import record

__all__ = [
    "JWT_BEARER", "OFFLINE", "PendingAuthorization", "authorization_url", "check_pkce", "client_credentials_grant",
    "code_grant", "exchange_grant", "form", "jwt_grant", "new_authorization", "read_assertion", "read_return",
    "read_tokens", "refresh_grant", "refused",
]  # fmt: skip

OFFLINE = "offline_access"
JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_S256 = "S256"
_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
_ID_JAG = "urn:ietf:params:oauth:token-type:id-jag"


def form(fields: Mapping[str, str | None]) -> bytes:
    """Return the body of a request at the token endpoint, without the fields that are None."""
    return urlencode({name: value for name, value in fields.items() if value is not None}).encode()


# The authorization page.


@record
class PendingAuthorization:
    """auth-100: the facts to check the answer to one authorization request, recorded before the request is made."""

    issuer: str  # as in the parameter `iss` of the answer
    supports_iss: bool
    redirect_uri: str
    state: str = attrs.field(repr=False)
    verifier: str = attrs.field(repr=False)


def new_authorization(server: ServerDocument, redirect_uri: str, entropy: Entropy) -> PendingAuthorization:
    """Make one, with a state and a PKCE verifier of 256 bits each."""
    return PendingAuthorization(
        server.stated_issuer, server.supports_iss, redirect_uri, token_text(entropy), token_text(entropy)
    )


def check_pkce(server: ServerDocument) -> None:
    """auth-85: refuse a server that does not announce PKCE, because it may not support it.

    2025-03-26 requires PKCE but defines no announcement; such a server is accepted without one.
    """
    if server.challenges is None and server.legacy:
        return
    if _S256 not in (server.challenges or ()):
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"the metadata of {shown(server.issuer)} does not list the PKCE method S256",
            "its operator must support and list it, because without it a stolen code is enough to get a token",
        )


def authorization_url(
    server: ServerDocument, client_id: str, authorization: PendingAuthorization, scopes: Collection[str], resource: str
) -> str:
    """Return the URL of the page to open.  Raises `AuthorizationFailed` if the server has no such page."""
    if server.authorization_endpoint is None:
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"the metadata of {shown(server.issuer)} names no authorization endpoint",
            "use a grant without a user, because this server has no page for users",
        )
    fields = {
        "response_type": "code",
        "client_id": client_id,
        "redirect_uri": authorization.redirect_uri,
        "state": authorization.state,
        "code_challenge": base64url(sha256(authorization.verifier.encode()).digest()),
        "code_challenge_method": _S256,
        "scope": " ".join(scopes) or None,
        # OpenID Connect issues a refresh token only if the user is asked for consent.
        "prompt": "consent" if OFFLINE in scopes else None,
        "resource": resource,
    }
    query = urlencode({name: value for name, value in fields.items() if value is not None}, quote_via=quote)
    endpoint = server.authorization_endpoint
    return f"{endpoint}{'&' if '?' in endpoint else '?'}{query}"


_RETURNED = 50  # fields of one answer; a real one has four


def read_return(query: str, authorization: PendingAuthorization) -> str | None:
    """Return the code in the browser's return, or None if it does not answer our request and is to be ignored.

    Raises `AuthorizationFailed` if it does, but has no code that may be used.
    """
    try:
        pairs = parse_qsl(query.removeprefix("?"), keep_blank_values=True, max_num_fields=_RETURNED)
    except ValueError:
        return None
    answer = dict(pairs)
    states = [value for name, value in pairs if name == "state"]
    # auth-55.  The answer to another request must not end the wait for ours, so it is ignored and raises no error.
    if len(states) != 1 or not compare_digest(states[0].encode(errors="replace"), authorization.state.encode()):
        return None
    _check_iss([value for name, value in pairs if name == "iss"], authorization)
    if "error" in answer:
        raise refused(authorization.issuer, answer, 0, (authorization.state, authorization.verifier))
    if not answer.get("code"):
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"{shown(authorization.issuer)} redirected the browser with neither a code nor an error",
            "its operator must fix it",
        )
    return answer["code"]


def _check_iss(named: list[str], authorization: PendingAuthorization) -> None:
    """auth-103 to auth-105: check `iss` before the rest of the answer is read, or shown."""
    if not named and not authorization.supports_iss:
        return
    if named == [authorization.issuer]:  # a plain string comparison, after form decoding
        return
    came = "no issuer, although it promised one" if not named else f"the issuer {shown(named[-1])}"
    raise AuthorizationFailed(
        Blame.AUTHORIZATION_SERVER,
        f"the browser was sent to {shown(authorization.issuer)} and came back with {came}",
        "the answer may come from another server and was not used",
    )


# The token endpoint.


def code_grant(code: str, authorization: PendingAuthorization) -> dict[str, str | None]:
    return {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": authorization.redirect_uri,
        "code_verifier": authorization.verifier,
    }


def refresh_grant(token: str) -> dict[str, str | None]:
    """Omit the scope, so that it stays the same."""
    return {"grant_type": "refresh_token", "refresh_token": token}


def client_credentials_grant(scopes: Collection[str]) -> dict[str, str | None]:
    return {"grant_type": "client_credentials", "scope": " ".join(scopes) or None}


def jwt_grant(assertion: str, scopes: Collection[str]) -> dict[str, str | None]:
    return {"grant_type": JWT_BEARER, "assertion": assertion, "scope": " ".join(scopes) or None}


def exchange_grant(
    grant: IdentityAssertion, assertion: str, issuer: str, resource: str, scopes: Collection[str]
) -> dict[str, str | None]:
    """Return the request to the enterprise's identity provider: an assertion for this issuer and this MCP server."""
    return {
        "grant_type": _EXCHANGE,
        "requested_token_type": _ID_JAG,
        "audience": issuer,
        "resource": resource,
        "scope": " ".join(scopes) or None,
        "subject_token": assertion,
        "subject_token_type": grant.subject_token_type,
    }


# Advice by error code.  None blames the server that sent the code; so do unknown codes.
_MEANINGS: Mapping[str, tuple[Blame | None, str]] = MappingProxyType(
    {
        "access_denied": (Blame.USER, "the user must allow it there"),
        "invalid_client": (Blame.APPLICATION, "its client id, secret or key is not the registered one"),
        "unauthorized_client": (Blame.APPLICATION, "its registration there must allow this grant"),
        "invalid_grant": (Blame.APPLICATION, "its code, token or assertion is no longer valid; start again"),
        "invalid_scope": (None, "the scopes that the MCP server names must be known there"),
        "temporarily_unavailable": (None, "try again later"),
        "server_error": (None, "try again later"),
    }
)


def refused(
    issuer: str,
    answer: Mapping[str, Json] | None,
    status: int,
    secrets: Collection[str | None],
    blame: Blame = Blame.AUTHORIZATION_SERVER,
) -> AuthorizationFailed:
    """Make the error of a server's refusal; `answer` is None if its body was no JSON object."""
    error = answer.get("error") if answer else None
    code = error if isinstance(error, str) else ""
    blamed, advice = _MEANINGS.get(code, (None, "its operator can say why"))
    return AuthorizationFailed(
        blamed or blame,
        f"{shown(issuer)} issued no token: {censored(error_text(answer, status), secrets)}",
        advice,
        code,
    )


def read_tokens(
    answer: Mapping[str, Json] | None, issuer: str, requested: tuple[str, ...], now: float, *, proven: bool
) -> Tokens:
    """Read the tokens of a successful answer; `proven`: the request had a DPoP proof."""
    access = answer.get("access_token") if answer else None
    if answer is None or not isinstance(access, str) or not re.fullmatch(r"[!-~]{1,32768}", access):
        raise _bad_answer(issuer, "no access token that fits into a header")
    named = answer.get("token_type")
    kind = {each.lower(): each for each in (BEARER, DPOP)}.get(str(named).lower())
    if kind is None or (kind == DPOP and not proven):
        raise _bad_answer(issuer, f"a token of the type {censored(named, (access,))}, which was not requested")
    refresh = answer.get("refresh_token")
    lifetime = read_seconds(answer.get("expires_in"))
    granted = answer.get("scope")
    return Tokens(
        access,
        kind,
        refresh if is_printable(refresh) else None,  # auth-109: there may be none
        None if lifetime is None else now + lifetime,
        scopes_of(granted) if isinstance(granted, str) else requested,
    )


def read_assertion(answer: Mapping[str, Json] | None, provider: str) -> str:
    """Read the assertion that an identity provider returned from an exchange."""
    assertion = answer.get("access_token") if answer else None
    if answer is None or not is_printable(assertion) or answer.get("issued_token_type") != _ID_JAG:
        raise AuthorizationFailed(
            Blame.IDENTITY_PROVIDER,
            f"{shown(provider)} exchanged the user's assertion for another type of token than requested",
            "its operator must allow the exchange for an ID-JAG",
        )
    return str(assertion)


def _bad_answer(issuer: str, what: str) -> AuthorizationFailed:
    return AuthorizationFailed(
        Blame.AUTHORIZATION_SERVER, f"{shown(issuer)} answered with {what}", "its operator must fix it"
    )
