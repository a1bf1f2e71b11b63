"""Getting tokens: the page that the user is shown, what comes back from it, and what is said at the token endpoint.

Nothing here knows what came before or comes after; each function makes or reads one message of OAuth 2.1.  The rules
that keep one server's code from another server (state, PKCE, RFC 9207) are in `read_return`, in the order in which they
must be asked: whose answer this is comes before what it says.
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
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame, censored, words_of
from trio_mcp.core.oauth.proofs import Entropy, base64url, token_text
from trio_mcp.core.oauth.records import Tokens
from trio_mcp.core.records import record

__all__ = [
    "JWT_BEARER", "OFFLINE", "PendingAuthorization", "authorization_url", "check_pkce", "code_grant",
    "exchange_grant", "form", "jwt_grant", "own_grant", "pending", "read_assertion", "read_return", "read_tokens",
    "refresh_grant", "refused",
]  # fmt: skip

OFFLINE = "offline_access"
JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_S256 = "S256"
_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
_ID_JAG = "urn:ietf:params:oauth:token-type:id-jag"


def form(fields: Mapping[str, str | None]) -> bytes:
    """The body of a request at the token endpoint; what is None is left out."""
    return urlencode({name: value for name, value in fields.items() if value is not None}).encode()


# The page that the user is shown.


@record
class PendingAuthorization:
    """auth-100: what the answer to one authorization request will be judged by, recorded before it is made."""

    issuer: str  # as it will name itself in `iss`
    promises_iss: bool
    redirect_uri: str
    state: str = attrs.field(repr=False)
    verifier: str = attrs.field(repr=False)


def pending(server: ServerDocument, redirect_uri: str, entropy: Entropy) -> PendingAuthorization:
    """A new one, with a state and a PKCE verifier of 256 bits each."""
    return PendingAuthorization(
        server.signs_as, server.promises_iss, redirect_uri, token_text(entropy), token_text(entropy)
    )


def check_pkce(server: ServerDocument) -> None:
    """auth-85: a server that does not say that it can do PKCE is taken for one that cannot.

    2025-03-26 demands PKCE and knows no way of saying so: there, silence is consent.
    """
    if server.challenges is None and server.legacy:
        return
    if _S256 not in (server.challenges or ()):
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"the metadata of {shown(server.issuer)} does not list the PKCE method S256",
            "without it a stolen code would be as good as the user, so its operator must offer and list it",
        )


def authorization_url(
    server: ServerDocument, client_id: str, asked: PendingAuthorization, scopes: Collection[str], resource: str
) -> str:
    """The page to open.  Raises `AuthorizationFailed` where the server has none."""
    if server.authorization_endpoint is None:
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"the metadata of {shown(server.issuer)} names no authorization endpoint",
            "it has no page for users, so the application needs a grant that does without",
        )
    fields = {
        "response_type": "code",
        "client_id": client_id,
        "redirect_uri": asked.redirect_uri,
        "state": asked.state,
        "code_challenge": base64url(sha256(asked.verifier.encode()).digest()),
        "code_challenge_method": _S256,
        "scope": " ".join(scopes) or None,
        # OpenID Connect gives no refresh token unless the user is asked.
        "prompt": "consent" if OFFLINE in scopes else None,
        "resource": resource,
    }
    query = urlencode({name: value for name, value in fields.items() if value is not None}, quote_via=quote)
    endpoint = server.authorization_endpoint
    return f"{endpoint}{'&' if '?' in endpoint else '?'}{query}"


_RETURNED = 50  # fields of one return; a real one has four


def read_return(query: str, asked: PendingAuthorization) -> str | None:
    """The code in the browser's return, or None where this is no answer to our request: it is to be discarded.

    Raises `AuthorizationFailed` where it is one, and has no code that may be used.
    """
    try:
        pairs = parse_qsl(query.removeprefix("?"), keep_blank_values=True, max_num_fields=_RETURNED)
    except ValueError:
        return None
    said = dict(pairs)
    states = [value for name, value in pairs if name == "state"]
    # auth-55.  Somebody else's answer must not end the wait for ours, so it is discarded and no failure.
    if len(states) != 1 or not compare_digest(states[0].encode(errors="replace"), asked.state.encode()):
        return None
    _check_iss([value for name, value in pairs if name == "iss"], asked)
    if "error" in said:
        raise refused(asked.issuer, said, 0, (asked.state, asked.verifier))
    if not said.get("code"):
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"{shown(asked.issuer)} sent the browser back with neither a code nor an error",
            "its operator must mend it",
        )
    return said["code"]


def _check_iss(named: list[str], asked: PendingAuthorization) -> None:
    """auth-103 to auth-105: nothing else in the answer is looked at, or shown, before this holds."""
    if not named and not asked.promises_iss:
        return
    if named == [asked.issuer]:  # a plain string comparison, of what form decoding gave
        return
    came = "no issuer, though it promised to" if not named else f"the issuer {shown(named[-1])}"
    raise AuthorizationFailed(
        Blame.AUTHORIZATION_SERVER,
        f"the browser was sent to {shown(asked.issuer)} and came back with {came}",
        "the answer may be another server's and was not used",
    )


# The token endpoint.


def code_grant(code: str, asked: PendingAuthorization) -> dict[str, str | None]:
    return {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": asked.redirect_uri,
        "code_verifier": asked.verifier,
    }


def refresh_grant(token: str) -> dict[str, str | None]:
    """Without a scope, which means the same ones as before."""
    return {"grant_type": "refresh_token", "refresh_token": token}


def own_grant(scopes: Collection[str]) -> dict[str, str | None]:
    return {"grant_type": "client_credentials", "scope": " ".join(scopes) or None}


def jwt_grant(assertion: str, scopes: Collection[str]) -> dict[str, str | None]:
    return {"grant_type": JWT_BEARER, "assertion": assertion, "scope": " ".join(scopes) or None}


def exchange_grant(
    grant: IdentityAssertion, assertion: str, issuer: str, resource: str, scopes: Collection[str]
) -> dict[str, str | None]:
    """What the enterprise's identity provider is asked for: an assertion for this issuer and this MCP server."""
    return {
        "grant_type": _EXCHANGE,
        "requested_token_type": _ID_JAG,
        "audience": issuer,
        "resource": resource,
        "scope": " ".join(scopes) or None,
        "subject_token": assertion,
        "subject_token_type": grant.subject_token_type,
    }


# None blames the server that said it, as what is not in it does.
_MEANINGS: Mapping[str, tuple[Blame | None, str]] = MappingProxyType(
    {
        "access_denied": (Blame.USER, "it must be allowed there"),
        "invalid_client": (Blame.APPLICATION, "its client id, secret or key is not the one that is known there"),
        "unauthorized_client": (Blame.APPLICATION, "its registration there must allow this grant"),
        "invalid_grant": (Blame.APPLICATION, "what it presented is no longer good, and it must start anew"),
        "invalid_scope": (None, "the scopes that the MCP server names must be known there"),
        "temporarily_unavailable": (None, "it may be tried again later"),
        "server_error": (None, "it may be tried again later"),
    }
)


def refused(
    issuer: str,
    said: Mapping[str, Json] | None,
    status: int,
    secrets: Collection[str | None],
    blame: Blame = Blame.AUTHORIZATION_SERVER,
) -> AuthorizationFailed:
    """What a server's refusal comes to; `said` is None where it was no JSON object."""
    error = said.get("error") if said else None
    code = error if isinstance(error, str) else ""
    blamed, advice = _MEANINGS.get(code, (None, "its operator can say why"))
    return AuthorizationFailed(
        blamed or blame, f"{shown(issuer)} gave no token: {censored(words_of(said, status), secrets)}", advice, code
    )


def read_tokens(
    said: Mapping[str, Json] | None, issuer: str, asked: tuple[str, ...], now: float, *, proven: bool
) -> Tokens:
    """The tokens in a successful answer; `proven`: a DPoP proof went with the request."""
    access = said.get("access_token") if said else None
    if said is None or not isinstance(access, str) or not re.fullmatch(r"[!-~]{1,32768}", access):
        raise _bad_answer(issuer, "no access token that a header can carry")
    named = said.get("token_type")
    kind = {each.lower(): each for each in (BEARER, DPOP)}.get(str(named).lower())
    if kind is None or (kind == DPOP and not proven):
        raise _bad_answer(issuer, f"a token of the type {censored(named, (access,))}, which was not asked for")
    refresh = said.get("refresh_token")
    lifetime = read_seconds(said.get("expires_in"))
    granted = said.get("scope")
    return Tokens(
        access,
        kind,
        refresh if is_printable(refresh) else None,  # auth-109: there may be none
        None if lifetime is None else now + lifetime,
        scopes_of(granted) if isinstance(granted, str) else asked,
    )


def read_assertion(said: Mapping[str, Json] | None, provider: str) -> str:
    """The assertion that an identity provider gave in exchange."""
    assertion = said.get("access_token") if said else None
    if said is None or not is_printable(assertion) or said.get("issued_token_type") != _ID_JAG:
        raise AuthorizationFailed(
            Blame.IDENTITY_PROVIDER,
            f"{shown(provider)} exchanged the user's assertion for something else than was asked for",
            "its operator must allow the exchange for an ID-JAG",
        )
    return str(assertion)


def _bad_answer(issuer: str, what: str) -> AuthorizationFailed:
    return AuthorizationFailed(
        Blame.AUTHORIZATION_SERVER, f"{shown(issuer)} answered with {what}", "its operator must mend it"
    )
