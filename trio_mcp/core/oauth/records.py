"""The stored state of one MCP server: its registrations and tokens, as one JSON object.

It is enough for a new process to renew a token without discovery and without a browser: the issuer and its token
endpoint, the client and its authentication, the requested scopes, and the absolute time when the token expires.  It is
also full of secrets: a store must hide it from other users of the machine (auth-22), and no repr shows a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import attrs

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.jsonrpc import Json, JsonObject
from trio_mcp.core.oauth.challenge import scopes_of
from trio_mcp.core.oauth.clients import ClientAuthMethod, OAuthClient
from trio_mcp.core.oauth.places import Network
from trio_mcp.core.records import record

__all__ = ["ServerRecord", "TokenGrant", "Tokens", "as_json", "read_record"]

_FORM = 1  # of the object; another version of this module may write another number
_REGISTERED = 8  # issuers of one MCP server that are remembered; usually there is one


@record
class Tokens:
    """The tokens that an authorization server issued.  `kind` is Bearer or DPoP; `expires_at` is Unix time."""

    access: str = attrs.field(repr=False)
    kind: str
    refresh: str | None = attrs.field(default=None, repr=False)
    expires_at: float | None = None
    scopes: tuple[str, ...] = ()


@record
class TokenGrant:
    """Tokens, and the facts that are needed to get the next ones.

    `asked` are the scopes requested so far, which may be more than were granted.
    """

    issuer: str
    token_endpoint: str
    client: OAuthClient
    resource: str
    asked: tuple[str, ...]
    tokens: Tokens


@record
class ServerRecord:
    """The known facts about one MCP server.

    `registered` are the clients that a flow has registered, one for each issuer.  `network` is the network of the
    server at its last response, if known: the URLs that it names may be in the same network.
    """

    server_url: str
    authorization: TokenGrant | None = None
    registered: tuple[OAuthClient, ...] = ()
    network: Network | None = None

    @property
    def issuers(self) -> dict[str, str]:
        """Maps each client id to the issuer where it was used."""
        used = self.registered if self.authorization is None else (*self.registered, self.authorization.client)
        return {each.client_id: each.issuer for each in used if each.issuer is not None}

    def client_at(self, issuer: str, now: float) -> OAuthClient | None:
        """auth-95: return the client that was registered at this issuer, unless its secret has expired."""
        for each in self.registered:
            if each.issuer == issuer and (each.secret_expires_at is None or now < each.secret_expires_at):
                return each
        return None

    def with_client(self, client: OAuthClient) -> ServerRecord:
        others = [each for each in self.registered if each.issuer != client.issuer]
        return attrs.evolve(self, registered=(client, *others)[:_REGISTERED])

    def without_client(self, client: OAuthClient) -> ServerRecord:
        return attrs.evolve(self, registered=tuple(each for each in self.registered if each != client))

    def without_refresh(self) -> ServerRecord:
        """Return a copy without the refresh token."""
        if self.authorization is None:
            return self
        tokens = attrs.evolve(self.authorization.tokens, refresh=None)
        return attrs.evolve(self, authorization=attrs.evolve(self.authorization, tokens=tokens))


def as_json(record: ServerRecord) -> JsonObject:
    """Return the record as a JSON object, with its secrets in plain text."""
    held = record.authorization
    return {
        "form": _FORM,
        "server_url": record.server_url,
        "network": None if record.network is None else record.network.name,
        "registered": [_client_as_json(each) for each in record.registered],
        "authorization": None
        if held is None
        else {
            **_plain(held, "issuer", "token_endpoint", "resource"),
            "client": _client_as_json(held.client),
            "asked": list(held.asked),
            "tokens": {
                **_plain(held.tokens, "access", "kind", "refresh", "expires_at"),
                "scopes": list(held.tokens.scopes),
            },
        },
    }


def _client_as_json(client: OAuthClient) -> JsonObject:
    return {
        **_plain(client, "client_id", "issuer", "secret", "secret_expires_at"),
        "method": None if client.method is None else client.method.value,
        "redirect_uris": list(client.redirect_uris),
    }


def _plain(one: object, *names: str) -> JsonObject:
    return {name: getattr(one, name) for name in names}


def read_record(data: Json) -> ServerRecord:
    """Read a record that `as_json` wrote.  Raises `UsageError` for other values, which the message does not repeat."""
    if not isinstance(data, dict) or data.get("form") != _FORM:
        _damaged("form")
    held = data.get("authorization")
    registered = data.get("registered")
    if not isinstance(registered, list):
        _damaged("registered")
    return ServerRecord(
        _text(data, "server_url"),
        None if held is None else _authorization(held),
        tuple(_client(each) for each in registered),
        None if data.get("network") is None else _network(data),
    )


def _authorization(data: Json) -> TokenGrant:
    if not isinstance(data, dict):
        _damaged("authorization")
    tokens = data.get("tokens")
    if not isinstance(tokens, dict):
        _damaged("tokens")
    return TokenGrant(
        _text(data, "issuer"),
        _text(data, "token_endpoint"),
        _client(data.get("client")),
        _text(data, "resource"),
        scopes_of(data.get("asked")),
        Tokens(
            _text(tokens, "access"),
            _text(tokens, "kind"),
            _optional(tokens, "refresh"),
            _time(tokens, "expires_at"),
            scopes_of(tokens.get("scopes")),
        ),
    )


def _client(data: Json) -> OAuthClient:
    if not isinstance(data, dict):
        _damaged("client")
    uris = data.get("redirect_uris")
    if not isinstance(uris, list):
        _damaged("redirect_uris")
    return OAuthClient(
        _text(data, "client_id"),
        _optional(data, "issuer"),
        _optional(data, "secret"),
        None if data.get("method") is None else _method(data),
        tuple(each for each in uris if isinstance(each, str)),
        _time(data, "secret_expires_at"),
    )


def _method(data: Mapping[str, Json]) -> ClientAuthMethod:
    try:
        return ClientAuthMethod(data.get("method"))
    except ValueError:
        _damaged("method")


def _text(data: Mapping[str, Json], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        _damaged(name)
    return value


def _optional(data: Mapping[str, Json], name: str) -> str | None:
    return None if data.get(name) is None else _text(data, name)


def _time(data: Mapping[str, Json], name: str) -> float | None:
    value = data.get(name)
    if value is not None and type(value) not in (int, float):
        _damaged(name)
    return value if value is None else float(value)


def _network(data: Mapping[str, Json]) -> Network:
    try:
        return Network[_text(data, "network")]
    except KeyError:
        _damaged("network")


def _damaged(name: str) -> NoReturn:
    raise UsageError(f"the stored authorization cannot be read: {shown(name)} is missing or wrong")
