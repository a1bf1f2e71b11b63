"""Who we are to an authorization server: the application, its registrations, and how it authenticates.

Credentials belong to the issuer that they are for (auth-90, auth-95), and every function here that uses them is given
only those of one issuer.  The order in which a client id is looked for is that of auth-69: one that the application
brings, then the URL of its metadata document, then one that was registered, or is now.
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
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame, censored, words_of
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
    "find_own_client",
    "given_client",
    "is_printable",
    "read_registration",
    "registration",
    "registration_refused",
]  # fmt: skip

_ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"


class ClientAuthMethod(enum.Enum):
    """How a client authenticates at the token endpoint."""

    NONE = "none"
    BASIC = "client_secret_basic"
    POST = "client_secret_post"
    KEY = "private_key_jwt"


@record
class OAuthClient:
    """A client id at one issuer, and what proves that it is ours.

    One that the application brings may leave `issuer` out, if it was not told: it then belongs to the first issuer that
    it is used at, as long as that is known, which is as long as the process for all servers that it goes to, and for
    ever for the one that it was used for.  `method` is None where the server's metadata is to decide.
    """

    client_id: str
    issuer: str | None = None
    secret: str | None = attrs.field(default=None, repr=False)
    method: ClientAuthMethod | None = None
    redirect_uris: tuple[str, ...] = ()  # what it was registered with, by us
    secret_expires_at: float | None = None


# What is presented for a token.


@record
class AuthorizationCode:
    """A user allows it, in a browser."""


@record
class ClientCredentials:
    """The application acts for itself, with credentials it has."""


@record
class IdentityAssertion:
    """An enterprise's identity provider vouches for its user: RFC 8693 there, then RFC 7523.

    `client` is who we are at the provider.  The assertion (an ID token, or SAML) is asked of the application each time.
    """

    token_endpoint: str
    client: OAuthClient
    subject_token_type: str = "urn:ietf:params:oauth:token-type:id_token"


@record
class WorkloadIdentity:
    """The platform that a program runs on vouches for it, by a JWT that is asked of the application each time."""


Grant: TypeAlias = AuthorizationCode | ClientCredentials | IdentityAssertion | WorkloadIdentity


def _clients(given: Iterable[OAuthClient]) -> tuple[OAuthClient, ...]:
    if isinstance(given, OAuthClient):
        raise UsageError("clients is a list, also where there is one: clients=[OAuthClient(...)]")
    return tuple(given)


def _issuers(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(given)


def _scopes(given: Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return scopes_of(given if isinstance(given, str) else tuple(given))  # a text is a list of them, as OAuth writes it


@record
class Application:
    """The program that wants tokens, and what it has.

    `clients` are registrations made beforehand; `document_url` is where the application publishes what
    `client_document` makes; `key` signs client assertions, `dpop` proofs.  `scopes` are asked for where the server's
    challenge names none, instead of all it supports.  `prefers` are issuers in order, should a server name several.
    `offline`: refresh tokens are wanted.
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
            raise UsageError(f"a grant is one such as ClientCredentials(), not {self.grant!r}")
        if self.document_url is not None and (fault := client_id_fault(self.document_url)):
            raise UsageError(f"the document_url {shown(self.document_url)} {fault}")
        if self.dpop is not None and not self.dpop.jwk:
            raise UsageError("the dpop Key needs its public jwk, which goes into every proof")


def client_document(
    application: Application, redirect_uris: Sequence[str], jwks_uri: str | None = None
) -> dict[str, Json]:
    """auth-72: what is to be published at `application.document_url`."""
    if application.document_url is None:
        raise UsageError("a client metadata document needs the document_url that it is published at")
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
        # auth-92, auth-93: what listens on loopback is native, whatever it is made of.
        "application_type": "native" if all(is_loopback(each) for each in redirect_uris) else "web",
    }


# Which client id to use.


def given_client(application: Application, issuer: str, bound_to: Mapping[str, str]) -> OAuthClient | None:
    """What the application brings for this issuer.

    `bound_to` says at which issuer a client id without one was first used.  auth-97: where all that it brings is for
    other issuers, that is an error, and no reason to register.
    """
    for each in application.clients:
        if (each.issuer or bound_to.get(each.client_id, issuer)) == issuer:
            return attrs.evolve(each, issuer=issuer)
    if application.clients:
        others = ", ".join(shown(each.issuer or bound_to[each.client_id]) for each in application.clients)
        raise AuthorizationFailed(
            Blame.APPLICATION,
            f"the application is registered at {others}, and the MCP server now uses {shown(issuer)}",
            "credentials are not shown to another issuer, so it must be registered there too",
        )
    return None


def find_client(
    application: Application,
    server: ServerDocument,
    given: OAuthClient | None,
    known: OAuthClient | None,
    redirect_uri: str,
) -> OAuthClient | None:
    """The client to be for a user at this server; None where it must be registered first.

    `known` is what was registered at this issuer before, and is good for the redirect URIs it was registered with.
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
    """auth-77: the URL of the metadata document is a client id where the server says that it reads such."""
    if application.document_url is None or not server.takes_documents:
        return None
    signs = application.key is not None and ClientAuthMethod.KEY.value in (server.methods or ())
    return OAuthClient(
        application.document_url, server.issuer, method=ClientAuthMethod.KEY if signs else ClientAuthMethod.NONE
    )


def find_own_client(application: Application, server: ServerDocument, given: OAuthClient | None) -> OAuthClient:
    """The client to be where no user is asked: nobody registers one on the way."""
    client = given or _published(application, server)
    if client is None:
        raise _no_client(server.issuer)
    return client


def _no_client(issuer: str) -> AuthorizationFailed:
    return AuthorizationFailed(
        Blame.APPLICATION,
        f"the application has no client id at {shown(issuer)}, where it cannot get one by itself",
        "register it there by hand, and give it the client id",
    )


# Registering (RFC 7591).

_ASKED_FOR = (ClientAuthMethod.NONE, ClientAuthMethod.BASIC, ClientAuthMethod.POST)


def registration(
    application: Application, server: ServerDocument, redirect_uri: str, scopes: Sequence[str]
) -> dict[str, Json]:
    """The body of a registration request.  Some servers give no scope that was not named in it."""
    taken = server.methods
    method = next((each for each in _ASKED_FOR if taken is None or each.value in taken), ClientAuthMethod.NONE)
    named = {"scope": " ".join(scopes)} if scopes else {}
    return {**_described(application, (redirect_uri,), method, server.grants), **named}


def read_registration(said: Mapping[str, Json] | None, issuer: str, redirect_uri: str) -> OAuthClient:
    """What a server answered to a registration request; None stands for no object at all."""
    client_id = None if said is None else said.get("client_id")
    if said is None or not is_printable(client_id):
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"{shown(issuer)} took the registration and gave no client id",
            "its operator must mend it",
        )
    secret, method, until = (
        said.get(name) for name in ("client_secret", "token_endpoint_auth_method", "client_secret_expires_at")
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
    """Whether this is a text as RFC 6749 has them in ids, secrets and tokens."""
    return isinstance(value, str) and re.fullmatch(r"[ -~]{1,32768}", value) is not None


def _method(name: Json) -> ClientAuthMethod | None:
    return next((each for each in ClientAuthMethod if each.value == name), None)


def registration_refused(issuer: str, status: int, said: Mapping[str, Json] | None) -> AuthorizationFailed:
    """auth-94, auth-116: most are refused for their redirect URI, which is said."""
    reason = censored(words_of(said, status), ())
    if said is not None and said.get("error") == "invalid_redirect_uri":
        advice = "it takes no redirect URIs such as the application's, which must use another or be registered by hand"
    else:
        advice = "register the application there by hand, and give it the client id"
    return AuthorizationFailed(
        Blame.AUTHORIZATION_SERVER, f"{shown(issuer)} refused to register the application: {reason}", advice
    )


# Authenticating at the token endpoint.


def choose_method(client: OAuthClient, key: Key | None, taken: tuple[str, ...] | None) -> ClientAuthMethod:
    """The way both sides can: what the registration says, else the best of what the metadata lists (`taken`)."""
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
        f"{shown(client.issuer)} authenticates clients by {shown(', '.join(taken))}, for which the application lacks "
        "what is needed",
        "give it a secret or a key that is known there",
    )


def authenticated(
    client: OAuthClient, key: Key | None, audience: str, now: float, entropy: Entropy
) -> tuple[Fields, dict[str, str]]:
    """The header fields and the parameters that say who asks.  The client has its method by now."""
    match client.method:
        case ClientAuthMethod.BASIC:
            # RFC 6749, 2.3.1: each half is form-encoded first, so that a colon in one is none.
            pair = f"{quote_plus(client.client_id)}:{quote_plus(client.secret or '')}"
            fields = (("Authorization", f"Basic {b64encode(pair.encode()).decode()}"),)
            # 3.2.1: it may stand in the form as well, and authorization servers by the official SDK for Python look
            # for it there before they look at anything else.
            return fields, {"client_id": client.client_id}
        case ClientAuthMethod.POST:
            return (), {"client_id": client.client_id, "client_secret": client.secret or ""}
        case ClientAuthMethod.KEY:
            if key is None:
                raise AuthorizationFailed(
                    Blame.APPLICATION,
                    f"the client at {shown(client.issuer)} authenticates by a key, and the application has none now",
                    "give it the key that it was registered with",
                )
            assertion = client_assertion(key, client.client_id, audience, now, entropy)
            return (), {"client_assertion_type": _ASSERTION_TYPE, "client_assertion": assertion}
        case _:
            return (), {"client_id": client.client_id}
