"""The stored state of one MCP server: its registrations and tokens, as one JSON object.

It is enough for a new process to renew a token without discovery and without a browser: the issuer and its token
endpoint, the client and its authentication, the requested scopes, and the absolute time when the token expires.  It is
also full of secrets: a store must hide it from other users of the machine (auth-22), and no repr shows a secret.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import attrs

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.messages import Json, JsonObject, record
from trio_mcp.core.oauth.discovery import Network

__all__ = ["ClientAuthMethod", "OAuthClient", "ServerRecord", "TokenGrant", "Tokens", "as_json", "read_record"]

_FORM = 1  # of the object; another version of this module may write another number
_REGISTERED = 8  # issuers of one MCP server that are remembered; usually there is one


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
        """Return a copy without this client, if a flow has registered it; the application's own clients stay."""
        name = client.issuer, client.client_id
        kept = [each for each in self.registered if (each.issuer, each.client_id) != name or not each.redirect_uris]
        return attrs.evolve(self, registered=tuple(kept))

    def without_refresh(self) -> ServerRecord:
        """Return a copy without the refresh token."""
        if self.authorization is None:
            return self
        tokens = attrs.evolve(self.authorization.tokens, refresh=None)
        return attrs.evolve(self, authorization=attrs.evolve(self.authorization, tokens=tokens))


def as_json(record: ServerRecord) -> JsonObject:
    """Return the record as a JSON object, with its secrets in plain text."""
    return {"form": _FORM, **_shape().write(record)}


def read_record(data: Json) -> ServerRecord:
    """Read a record that `as_json` wrote.  Raises `UsageError` for other values, which the message does not repeat."""
    place = "form"
    if isinstance(data, dict) and data.get("form") == _FORM:
        shape, members = _shape(), {name: value for name, value in data.items() if name != "form"}
        if shape.fits(members):
            record: ServerRecord = shape.read(members)
            return record
        from trio_mcp.core.schema.validation import compile_schema  # costly, and only for the reason

        path = compile_schema(shape.schema).errors(members)[0].path
        place = path.rpartition("/")[2] or "record"
    raise UsageError(f"the stored authorization cannot be read: {shown(place)} is missing or wrong")


@functools.cache
def _shape() -> Any:
    from trio_mcp.core.schema.shapes import shape_of

    return shape_of(ServerRecord)
