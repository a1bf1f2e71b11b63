"""The client's identity at an authorization server: the application, its registrations, and its authentication.

Credentials belong to one issuer (auth-90, auth-95), and every function here that uses credentials gets only those of
one issuer.  A client id is looked for in the order of auth-69: one that the application brings, then the URL of its
metadata document, then one that was registered earlier or is registered now.
"""

from __future__ import annotations

import enum
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import quote_plus

import attrs

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.jsonrpc import Json
from trio_mcp.core.oauth.challenge import scopes_of
from trio_mcp.core.oauth.documents import ServerDocument, read_seconds
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame, censored, error_text
from trio_mcp.core.oauth.places import client_id_fault, is_loopback, redirect_fault
from trio_mcp.core.oauth.proofs import Entropy, Key, client_assertion
from trio_mcp.core.records import record

__all__ = [
    "Application",
    "AuthorizationCode",
    "ClientAuthMethod",
    "ClientCredentials",
    "Grant",
    "IdentityAssertion",
    "OAuthClient",
    "WorkloadIdentity",
    "authenticated",
    "choose_method",
    "client_document",
    "find_client",
    "find_client_without_user",
    "is_printable",
    "preregistered_client",
    "read_registration",
    "registration",
    "registration_refused",
]  # fmt: skip

_ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"


class ClientAuthMethod(enum.Enum):
    """The ways in which a client authenticates at the token endpoint."""

    NONE = "none"
    BASIC = "client_secret_basic"
    POST = "client_secret_post"
    KEY = "private_key_jwt"


@record
class OAuthClient:
    """A client id at one issuer, with its credentials.

    `issuer` may be None for a client that the application brings.  It then belongs to the first issuer where it is
    used.  The record of that MCP server stores the issuer; for all other MCP servers it is known until the process
    ends.  If `method` is None, the metadata of the server decides.
    """

    client_id: str
    issuer: str | None = None
    secret: str | None = attrs.field(default=None, repr=False)
    method: ClientAuthMethod | None = None
    redirect_uris: tuple[str, ...] = ()  # those of our own registration request
    secret_expires_at: float | None = None


# The grants.


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


def _issuers(given: Iterable[str]) -> tuple[str, ...]:
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
    prefers: tuple[str, ...] = attrs.field(default=(), converter=_issuers)
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
        if fault := redirect_fault(each):
            raise UsageError(f"the redirect URI {shown(each)} {fault}; it must be https, or on loopback")
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


# Which client id to use.


def preregistered_client(application: Application, issuer: str, bound_to: Mapping[str, str]) -> OAuthClient | None:
    """Return the application's own client for this issuer, or None if it brings no clients.

    `bound_to` maps client ids without an issuer to the issuer of their first use.  auth-97: if all clients of the
    application belong to other issuers, this raises, and nothing is registered.
    """
    for each in application.clients:
        if (each.issuer or bound_to.get(each.client_id, issuer)) == issuer:
            return attrs.evolve(each, issuer=issuer)
    if application.clients:
        others = ", ".join(shown(each.issuer or bound_to[each.client_id]) for each in application.clients)
        raise AuthorizationFailed(
            Blame.APPLICATION,
            f"the application is registered at {others}, and the MCP server now uses {shown(issuer)}",
            "register it there too, because credentials are never sent to another issuer",
        )
    return None


def find_client(
    application: Application,
    server: ServerDocument,
    given: OAuthClient | None,
    known: OAuthClient | None,
    redirect_uri: str,
) -> OAuthClient | None:
    """Return the client to use for a user at this server; None if it must be registered first.

    `known` is the client registered earlier at this issuer.  It can be used with the redirect URIs of its registration.
    """
    if given is not None:
        return given
    if (published := _published(application, server)) is not None:
        return published
    if known is not None and redirect_uri in known.redirect_uris:
        return known
    if server.registration_endpoint is None:
        raise _no_client(server.issuer)
    return None


def _published(application: Application, server: ServerDocument) -> OAuthClient | None:
    """auth-77: use the URL of the metadata document as client id, if the server says that it reads these documents."""
    if application.document_url is None or not server.supports_client_documents:
        return None
    signs = application.key is not None and ClientAuthMethod.KEY.value in (server.methods or ())
    return OAuthClient(
        application.document_url, server.issuer, method=ClientAuthMethod.KEY if signs else ClientAuthMethod.NONE
    )


def find_client_without_user(
    application: Application, server: ServerDocument, given: OAuthClient | None
) -> OAuthClient:
    """Return the client to use without a user.  It cannot be registered on the way."""
    client = given or _published(application, server)
    if client is None:
        raise _no_client(server.issuer)
    return client


def _no_client(issuer: str) -> AuthorizationFailed:
    return AuthorizationFailed(
        Blame.APPLICATION,
        f"the application has no client id at {shown(issuer)} and cannot get one by itself",
        "register it there by hand, and give it the client id",
    )


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


def read_registration(answer: Mapping[str, Json] | None, issuer: str, redirect_uri: str) -> OAuthClient:
    """Read the answer to a registration request; None if it was no JSON object."""
    client_id = None if answer is None else answer.get("client_id")
    if answer is None or not is_printable(client_id):
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"{shown(issuer)} accepted the registration but sent no client id",
            "its operator must fix it",
        )
    secret, method, until = (
        answer.get(name) for name in ("client_secret", "token_endpoint_auth_method", "client_secret_expires_at")
    )
    return OAuthClient(
        str(client_id),
        issuer,
        secret if is_printable(secret) else None,
        _method(method),
        (redirect_uri,),
        read_seconds(until) or None,  # zero means never
    )


def is_printable(value: Json) -> bool:
    """Return whether the value is a string that RFC 6749 allows for ids, secrets and tokens."""
    return isinstance(value, str) and re.fullmatch(r"[ -~]{1,32768}", value) is not None


def _method(name: Json) -> ClientAuthMethod | None:
    return next((each for each in ClientAuthMethod if each.value == name), None)


def registration_refused(issuer: str, status: int, answer: Mapping[str, Json] | None) -> AuthorizationFailed:
    """auth-94, auth-116: most refusals are about the redirect URI, and the advice names it."""
    reason = censored(error_text(answer, status), ())
    if answer is not None and answer.get("error") == "invalid_redirect_uri":
        advice = "it does not accept the redirect URI of the application; use another one, or register by hand"
    else:
        advice = "register the application there by hand, and give it the client id"
    return AuthorizationFailed(
        Blame.AUTHORIZATION_SERVER, f"{shown(issuer)} refused to register the application: {reason}", advice
    )


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
    """Return the header fields and the parameters that authenticate the client, whose method must be set."""
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
            assertion = client_assertion(key, client.client_id, audience, now, entropy)
            return (), {"client_assertion_type": _ASSERTION_TYPE, "client_assertion": assertion}
        case _:
            return (), {"client_id": client.client_id}
