"""The messages of OAuth 2.1 that a client sends and reads, each independent of the others.

Credentials belong to one issuer (auth-90, auth-95), and every function here that uses credentials gets only those of
one issuer.  A client id is looked for in the order of auth-69: one that the application brings, then the URL of its
metadata document, then one that was registered earlier or is registered now.

`read_return` contains the rules that keep one server's code from another server (state, PKCE, RFC 9207).  Their order
matters: check first to which request an answer belongs, then read its content.

The core has no cryptography except hashes.  A `Key` brings the function that signs; this module decides the claims, the
audience and the lifetime of client assertions (RFC 7523) and DPoP proofs (RFC 9449).  Random values come in as bytes.
"""

from __future__ import annotations

import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from hmac import compare_digest
from types import MappingProxyType
from typing import TypeAlias
from urllib.parse import parse_qsl, quote, quote_plus, urlencode, urlsplit

import attrs

from trio_mcp.core.errors import UsageError, redacted, shown
from trio_mcp.core.http.fields import Fields, Headers
from trio_mcp.core.messages import Json, record
from trio_mcp.core.oauth.discovery import (
    DPOP,
    SCHEMES,
    ServerDocument,
    check_redirect_uri,
    client_id_fault,
    is_loopback,
    origin_parts,
    read_seconds,
    scopes_of,
)
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame, issuer_failed
from trio_mcp.core.oauth.records import ClientAuthMethod, OAuthClient, Tokens

__all__ = [
    "JWT_BEARER", "Application", "AuthorizationCode", "ClientCredentials", "Entropy", "Grant", "IdentityAssertion",
    "Key", "Nonces", "PendingAuthorization", "WorkloadIdentity", "authenticated", "authorization_url", "censored",
    "check_pkce", "choose_method", "client_document", "dpop_proof", "form", "new_authorization",
    "read_registration", "read_return", "read_tokens", "refused", "registration", "registration_refused",
]  # fmt: skip

OFFLINE = "offline_access"
JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_S256 = "S256"
_ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
# Long enough for clocks that differ, and short enough that a stolen assertion is useless tomorrow.
_ASSERTION_SECONDS = 300

Entropy: TypeAlias = Callable[[int], bytes]
"""Returns that many unpredictable bytes, like `os.urandom`."""

Sign: TypeAlias = Callable[[Mapping[str, Json], Mapping[str, Json]], str]
"""Makes a signed JWT of claims and a header."""


# Keys and proofs.

_SYMMETRIC = ("HS", "none")
_PRIVATE = frozenset({"d", "p", "q", "dp", "dq", "qi", "k", "oth"})


@record
class Key:
    """An asymmetric key: its algorithm, for example ``ES256``, and `sign(claims, header)`, which makes a JWT.

    `jwk` is the public half; DPoP needs it.  `id` is the key's ``kid``, for servers that know several of the client's
    keys.
    """

    algorithm: str
    sign: Sign = attrs.field(repr=False)
    jwk: Mapping[str, Json] = attrs.field(default=MappingProxyType({}), repr=False)
    id: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.algorithm.startswith(_SYMMETRIC):
            raise UsageError(f"a Key must be asymmetric, and {self.algorithm} is not")
        if _PRIVATE & self.jwk.keys():
            raise UsageError("the jwk of a Key must be its public half; this one contains the private half")


def _signed(key: Key, claims: Mapping[str, Json], header: Mapping[str, Json]) -> str:
    try:
        return key.sign(claims, header)
    except Exception as error:  # the program's own function may raise any exception
        raise UsageError(f"a Key could not sign ({type(error).__name__})") from error


def _base64url(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def dpop_proof(
    key: Key, method: str, url: str, now: float, entropy: Entropy, *, nonce: str | None = None, token: str | None = None
) -> str:
    """Prove, for one request, that the sender has the key.  `token`: the access token, for the MCP server only."""
    parts = urlsplit(url)
    claims: dict[str, Json] = {
        "jti": _base64url(entropy(16)),
        "htm": method,
        "htu": parts._replace(query="", fragment="").geturl(),
        "iat": int(now),
    }
    if nonce is not None:
        claims["nonce"] = nonce
    if token is not None:
        claims["ath"] = _base64url(sha256(token.encode()).digest())
    return _signed(key, claims, {"typ": "dpop+jwt", "alg": key.algorithm, "jwk": dict(key.jwk)})


_NONCE_ORIGINS = 16  # an MCP server and its authorization server need two


class Nonces:
    """The newest DPoP nonce of each origin (RFC 9449, 8 and 9)."""

    def __init__(self) -> None:
        self._by_origin: dict[object, str] = {}

    def note(self, url: str, headers: Headers) -> bool:
        """Store the nonce in these response headers of `url`.  Returns whether there is one."""
        nonce = headers.get("DPoP-Nonce", "")
        if not 0 < len(nonce) <= 1024:
            return False
        self._by_origin.pop(origin_parts(url), None)
        self._by_origin[origin_parts(url)] = nonce
        if len(self._by_origin) > _NONCE_ORIGINS:
            del self._by_origin[next(iter(self._by_origin))]
        return True

    def of(self, url: str) -> str | None:
        return self._by_origin.get(origin_parts(url))


# The application.


@record
class AuthorizationCode:
    """A user allows the access, in a browser."""


@record
class ClientCredentials:
    """The application acts for itself, with its own credentials."""


@record
class IdentityAssertion:
    """An enterprise's identity provider vouches for its user: RFC 8693 at the provider, then RFC 7523.

    `client` is the client at the provider.  The application supplies a new assertion (an ID token, or SAML) each time.
    """

    token_endpoint: str
    client: OAuthClient
    subject_token_type: str = "urn:ietf:params:oauth:token-type:id_token"


@record
class WorkloadIdentity:
    """The platform of the program vouches for it, by a JWT that the application supplies each time."""


Grant: TypeAlias = AuthorizationCode | ClientCredentials | IdentityAssertion | WorkloadIdentity


def _clients(given: Iterable[OAuthClient]) -> tuple[OAuthClient, ...]:
    if isinstance(given, OAuthClient):
        raise UsageError("clients must be a list, even of one: clients=[OAuthClient(...)]")
    return tuple(given)


def _scopes(given: Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return scopes_of(given if isinstance(given, str) else tuple(given))  # OAuth writes a list of scopes as one string


@record
class Application:
    """The program that requests tokens: its settings and credentials.

    `clients` are registrations made beforehand.  `document_url` is the URL where the application publishes the result
    of `client_document`.  `key` signs client assertions, `dpop` signs proofs.  `scopes` are requested if the server's
    challenge names none, instead of all scopes that it supports.  `prefers` lists issuers in order of preference, if a
    server names several.  `offline`: request refresh tokens.
    """

    name: str
    uri: str | None = None
    grant: Grant = AuthorizationCode()
    clients: tuple[OAuthClient, ...] = attrs.field(default=(), converter=_clients)
    document_url: str | None = None
    key: Key | None = None
    dpop: Key | None = None
    scopes: tuple[str, ...] | None = attrs.field(default=None, converter=_scopes)
    prefers: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    offline: bool = True

    @property
    def needs_no_user(self) -> bool:
        return not isinstance(self.grant, AuthorizationCode)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.grant, Grant):
            raise UsageError(
                f"grant must be an instance of a grant, for example ClientCredentials(), not {self.grant!r}"
            )
        if self.document_url is not None and (fault := client_id_fault(self.document_url)):
            raise UsageError(f"the document_url {shown(self.document_url)} {fault}")
        if self.dpop is not None and not self.dpop.jwk:
            raise UsageError("the dpop Key needs its public jwk, which goes into every proof")


def client_document(
    application: Application, redirect_uris: Sequence[str], jwks_uri: str | None = None
) -> dict[str, Json]:
    """Return the metadata document to publish at `application.document_url`.

    Raises `UsageError` without a `document_url`, or if a redirect URI is neither https nor on loopback.
    """
    # auth-72
    if application.document_url is None:
        raise UsageError("a client metadata document needs a document_url, where it is published")
    method = ClientAuthMethod.NONE if jwks_uri is None else ClientAuthMethod.KEY
    return {
        "client_id": application.document_url,
        **_described(application, tuple(redirect_uris), method, None),
        **({} if jwks_uri is None else {"jwks_uri": jwks_uri}),
    }


def _described(
    application: Application, redirect_uris: tuple[str, ...], method: ClientAuthMethod, grants: tuple[str, ...] | None
) -> dict[str, Json]:
    for each in redirect_uris:
        check_redirect_uri(each)
    refreshes = application.offline and (grants is None or "refresh_token" in grants)  # auth-107
    return {
        "client_name": application.name,
        **({} if application.uri is None else {"client_uri": application.uri}),
        "redirect_uris": list(redirect_uris),
        "grant_types": ["authorization_code", *(["refresh_token"] if refreshes else [])],
        "response_types": ["code"],
        "token_endpoint_auth_method": method.value,
        # auth-92, auth-93: an application that listens on loopback is native, even a web application.
        "application_type": "native" if all(is_loopback(each) for each in redirect_uris) else "web",
    }


# Registration (RFC 7591).

_ASKED_FOR = (ClientAuthMethod.NONE, ClientAuthMethod.BASIC, ClientAuthMethod.POST)


def registration(
    application: Application, server: ServerDocument, redirect_uri: str, scopes: Sequence[str]
) -> dict[str, Json]:
    """Return the body of a registration request.  Some servers grant only scopes that are named in it."""
    taken = server.methods
    method = next((each for each in _ASKED_FOR if taken is None or each.value in taken), ClientAuthMethod.NONE)
    named = {"scope": " ".join(scopes)} if scopes else {}
    return {**_described(application, (redirect_uri,), method, server.grants), **named}


def read_registration(answer: Mapping[str, Json], issuer: str, redirect_uri: str) -> OAuthClient:
    """Read the answer to a registration request."""
    client_id = answer.get("client_id")
    if not is_printable(client_id):
        raise issuer_failed(issuer, "accepted the registration but sent no client id")
    secret, method, until = (
        answer.get(name) for name in ("client_secret", "token_endpoint_auth_method", "client_secret_expires_at")
    )
    return OAuthClient(
        str(client_id),
        issuer,
        secret if is_printable(secret) else None,
        next((each for each in ClientAuthMethod if each.value == method), None),
        (redirect_uri,),
        read_seconds(until) or None,  # zero means never
    )


def is_printable(value: Json) -> bool:
    """Return whether the value is a string that RFC 6749 allows for ids, secrets and tokens."""
    return isinstance(value, str) and re.fullmatch(r"[ -~]{1,32768}", value) is not None


def registration_refused(issuer: str, status: int, answer: Mapping[str, Json]) -> AuthorizationFailed:
    """auth-94, auth-116: most refusals are about the redirect URI, and the advice names it."""
    reason = _error_text(answer, status, ())
    if answer.get("error") == "invalid_redirect_uri":
        advice = "it does not accept the redirect URI of the application; use another one, or register by hand"
    else:
        advice = "register the application there by hand, and give it the client id"
    return issuer_failed(issuer, f"refused to register the application: {reason}", advice)


# Authentication at the token endpoint.


def choose_method(client: OAuthClient, key: Key | None, taken: tuple[str, ...] | None) -> ClientAuthMethod:
    """Return the method of the registration, else the best one of `taken`, the methods in the server's metadata."""
    able = [
        *([ClientAuthMethod.KEY] if key is not None else []),
        *([ClientAuthMethod.BASIC, ClientAuthMethod.POST] if client.secret is not None else []),
        ClientAuthMethod.NONE,
    ]
    if client.method is not None and client.method in able:
        return client.method
    if taken is None:
        return ClientAuthMethod.NONE if client.secret is None else ClientAuthMethod.BASIC  # RFC 8414: the default
    for each in able:
        if each.value in taken:
            return each
    raise AuthorizationFailed(
        Blame.APPLICATION,
        f"{shown(client.issuer)} authenticates clients by {shown(', '.join(taken))}, and the application has no "
        "credentials for that",
        "give it a secret or a key that is registered there",
    )


def authenticated(
    client: OAuthClient, key: Key | None, audience: str, now: float, entropy: Entropy
) -> tuple[Fields, dict[str, str]]:
    """Return the header fields and the parameters that authenticate the client, whose method must be set.

    `audience` is the issuer, for a client that signs with a key.
    """
    match client.method:
        case ClientAuthMethod.BASIC:
            # RFC 6749, 2.3.1: both halves are form-encoded first, so that the separating colon is the only one.
            pair = f"{quote_plus(client.client_id)}:{quote_plus(client.secret or '')}"
            fields = (("Authorization", f"Basic {b64encode(pair.encode()).decode()}"),)
            # 3.2.1: the form may contain it as well, and authorization servers by the official SDK for Python look for
            # it there first.
            return fields, {"client_id": client.client_id}
        case ClientAuthMethod.POST:
            return (), {"client_id": client.client_id, "client_secret": client.secret or ""}
        case ClientAuthMethod.KEY:
            if key is None:
                raise AuthorizationFailed(
                    Blame.APPLICATION,
                    f"the client at {shown(client.issuer)} authenticates by a key, but the application has no key now",
                    "give it the registered key",
                )
            claims = {
                "iss": client.client_id,
                "sub": client.client_id,
                "aud": audience,
                "jti": _base64url(entropy(16)),
                "iat": int(now),
                "exp": int(now) + _ASSERTION_SECONDS,
            }
            header = {"typ": "JWT", "alg": key.algorithm, **({} if key.id is None else {"kid": key.id})}
            return (), {"client_assertion_type": _ASSERTION_TYPE, "client_assertion": _signed(key, claims, header)}
        case _:
            return (), {"client_id": client.client_id}


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
        server.stated_issuer, server.supports_iss, redirect_uri, _base64url(entropy(32)), _base64url(entropy(32))
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
        "code_challenge": _base64url(sha256(authorization.verifier.encode()).digest()),
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
    # auth-103 to auth-105: check `iss` before the rest of the answer is read, or shown.  It is a plain comparison of
    # strings, after form decoding.
    named = [value for name, value in pairs if name == "iss"]
    if (named or authorization.supports_iss) and named != [authorization.issuer]:
        came = "no issuer, although it promised one" if not named else f"the issuer {shown(named[-1])}"
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"the browser was sent to {shown(authorization.issuer)} and came back with {came}",
            "the answer may come from another server and was not used",
        )
    if "error" in answer:
        raise refused(authorization.issuer, answer, 0, (authorization.state, authorization.verifier))
    if not answer.get("code"):
        raise issuer_failed(authorization.issuer, "redirected the browser with neither a code nor an error")
    return answer["code"]


# The token endpoint.


def form(fields: Mapping[str, str | None]) -> bytes:
    """Return the body of a request at the token endpoint, without the fields that are None."""
    return urlencode({name: value for name, value in fields.items() if value is not None}).encode()


def censored(text: object, secrets: Iterable[str | None], limit: int = 200) -> str:
    """Return a server's text as our errors may repeat it: cut, on one line, without secrets that it has echoed."""
    return shown(redacted(text if isinstance(text, str) else repr(text), secrets), limit)


def _error_text(answer: Mapping[str, Json], status: int, secrets: Iterable[str | None]) -> str:
    """Return the error code and the description of a refusal.

    Only strings: other values may be nested too deep to show.
    """
    texts = [answer.get(name) for name in ("error", "error_description")]
    text = ": ".join(each for each in texts if isinstance(each, str) and each)
    return censored(text or f"status {status}", secrets)


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
    answer: Mapping[str, Json],
    status: int,
    secrets: Collection[str | None],
    blame: Blame = Blame.AUTHORIZATION_SERVER,
) -> AuthorizationFailed:
    """Make the error of a server's refusal."""
    error = answer.get("error")
    code = error if isinstance(error, str) else ""
    blamed, advice = _MEANINGS.get(code, (None, "its operator can say why"))
    why = f"{shown(issuer)} issued no token: {_error_text(answer, status, secrets)}"
    return AuthorizationFailed(blamed or blame, why, advice, code)


def read_tokens(
    answer: Mapping[str, Json], issuer: str, requested: tuple[str, ...], now: float, *, proven: bool
) -> Tokens:
    """Read the tokens of a successful answer; `proven`: the request had a DPoP proof."""
    access = answer.get("access_token")
    if not isinstance(access, str) or not re.fullmatch(r"[!-~]{1,32768}", access):
        raise issuer_failed(issuer, "answered with no access token that fits into a header")
    named = answer.get("token_type")
    kind = SCHEMES.get(str(named).lower())
    if kind is None or (kind == DPOP and not proven):
        raise issuer_failed(
            issuer, f"answered with a token of the type {censored(named, (access,))}, which was not requested"
        )
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
