"""What outlives the process: registrations and tokens, as one JSON object for each MCP server.

It is enough for a cold process to renew its token with no discovery and no browser: the issuer, where its token
endpoint is, who we are there and how we prove it, what was asked for, and when the token ends, in absolute time.  It is
also full of secrets: whoever stores it keeps it from other users of the machine (auth-22), and no repr shows any.
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

_FORM = 1  # of the object; another number is from another version of this module
_REGISTERED = 8  # issuers of one MCP server that are remembered, of which there is one as a rule


@record
class Tokens:
    """What an authorization server gave.  `kind` is Bearer or DPoP, `expires_at` in Unix time."""

    access: str = attrs.field(repr=False)
    kind: str
    refresh: str | None = attrs.field(default=None, repr=False)
    expires_at: float | None = None
    scopes: tuple[str, ...] = ()


@record
class TokenGrant:
    """Tokens, and all that it takes to get the next.

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
    """What is known of one MCP server.

    `registered` are the clients that were registered on the way, by issuer.  `network` is where the server was when it
    last answered, if that is known: what it names may be there too.
    """

    server_url: str
    authorization: TokenGrant | None = None
    registered: tuple[OAuthClient, ...] = ()
    network: Network | None = None

    @property
    def issuers(self) -> dict[str, str]:
        """At which issuer each client id was used."""
        used = self.registered if self.authorization is None else (*self.registered, self.authorization.client)
        return {each.client_id: each.issuer for each in used if each.issuer is not None}

    def client_at(self, issuer: str, now: float) -> OAuthClient | None:
        """auth-95: what was registered at this issuer and no other, as long as it is good."""
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
        """The same, with nothing to renew it by."""
        if self.authorization is None:
            return self
        tokens = attrs.evolve(self.authorization.tokens, refresh=None)
        return attrs.evolve(self, authorization=attrs.evolve(self.authorization, tokens=tokens))


def as_json(record: ServerRecord) -> JsonObject:
    """The record as a JSON object: secrets in the clear."""
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


def read_record(said: Json) -> ServerRecord:
    """The record that `as_json` wrote.  Raises `UsageError`, without a value in its text, for anything else."""
    if not isinstance(said, dict) or said.get("form") != _FORM:
        _damaged("form")
    held = said.get("authorization")
    registered = said.get("registered")
    if not isinstance(registered, list):
        _damaged("registered")
    return ServerRecord(
        _text(said, "server_url"),
        None if held is None else _authorization(held),
        tuple(_client(each) for each in registered),
        None if said.get("network") is None else _network(said),
    )


def _authorization(said: Json) -> TokenGrant:
    if not isinstance(said, dict):
        _damaged("authorization")
    tokens = said.get("tokens")
    if not isinstance(tokens, dict):
        _damaged("tokens")
    return TokenGrant(
        _text(said, "issuer"),
        _text(said, "token_endpoint"),
        _client(said.get("client")),
        _text(said, "resource"),
        scopes_of(said.get("asked")),
        Tokens(
            _text(tokens, "access"),
            _text(tokens, "kind"),
            _optional(tokens, "refresh"),
            _time(tokens, "expires_at"),
            scopes_of(tokens.get("scopes")),
        ),
    )


def _client(said: Json) -> OAuthClient:
    if not isinstance(said, dict):
        _damaged("client")
    uris = said.get("redirect_uris")
    if not isinstance(uris, list):
        _damaged("redirect_uris")
    return OAuthClient(
        _text(said, "client_id"),
        _optional(said, "issuer"),
        _optional(said, "secret"),
        None if said.get("method") is None else _method(said),
        tuple(each for each in uris if isinstance(each, str)),
        _time(said, "secret_expires_at"),
    )


def _method(said: Mapping[str, Json]) -> ClientAuthMethod:
    try:
        return ClientAuthMethod(said.get("method"))
    except ValueError:
        _damaged("method")


def _text(said: Mapping[str, Json], name: str) -> str:
    value = said.get(name)
    if not isinstance(value, str):
        _damaged(name)
    return value


def _optional(said: Mapping[str, Json], name: str) -> str | None:
    return None if said.get(name) is None else _text(said, name)


def _time(said: Mapping[str, Json], name: str) -> float | None:
    value = said.get(name)
    if value is not None and type(value) not in (int, float):
        _damaged(name)
    return value if value is None else float(value)


def _network(said: Mapping[str, Json]) -> Network:
    try:
        return Network[_text(said, "network")]
    except KeyError:
        _damaged("network")


def _damaged(name: str) -> NoReturn:
    raise UsageError(f"what was stored of an authorization cannot be read: {shown(name)} is missing or wrong")
