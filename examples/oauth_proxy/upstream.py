"""The client of the identity provider: OpenID Connect with a client id that an administrator entered by hand.

This module never gets the tokens of an MCP client, and an MCP client never gets the tokens of this module.
"""

import json
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

import trio

TIMEOUT = 10.0  # seconds for each read and write of a request
MAX_BODY = 256 * 1024  # bytes of a response
REQUIRED = ("authorization_endpoint", "token_endpoint", "userinfo_endpoint")


class Refused(Exception):
    """The provider has refused a request, or its response is invalid."""


class Unavailable(Exception):
    """The provider cannot be reached, or cannot answer now."""


@dataclass(frozen=True)
class Tokens:
    access: str = field(repr=False)
    refresh: str | None = field(repr=False)


@dataclass(frozen=True)
class Upstream:
    issuer: str
    metadata: Mapping[str, Any] = field(repr=False)
    client_id: str
    client_secret: str = field(repr=False)
    redirect_uri: str
    scope: str = "openid"

    @classmethod
    async def discover(cls, issuer: str, client_id: str, client_secret: str, redirect_uri: str) -> "Upstream":
        """Fetch the metadata of the provider.  Raises `Refused` and `Unavailable`.

        The `issuer` in the metadata must equal the requested one, or another server could take its place.
        """
        url = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
        status, metadata = await _request("GET", url)
        if status != 200:
            raise Refused(f"there is no metadata at {url} (status {status})")
        if (found := metadata.get("issuer")) != issuer:
            raise Refused(f"the metadata at {url} is that of {found!r}; the issuer has to be the same, to the letter")
        if "S256" not in metadata.get("code_challenge_methods_supported", ()):
            raise Refused(f"{issuer} does not say that it has PKCE")
        if missing := [name for name in REQUIRED if not isinstance(metadata.get(name), str)]:
            raise Refused(f"{issuer} has no {', '.join(missing)}")
        return cls(issuer, metadata, client_id, client_secret, redirect_uri)

    def authorization_url(self, state: str, verifier: str) -> str:
        """Return the URL of the page at which the user signs in."""
        challenge = urlsafe_b64encode(sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        fields = {
            "response_type": "code",
            "client_id": self.client_id,
            "redirect_uri": self.redirect_uri,
            "scope": self.scope,
            "state": state,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        endpoint = self.metadata["authorization_endpoint"]
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(fields)}"

    def is_issuer_of(self, fields: Mapping[str, str]) -> bool:
        """Whether the parameters of the browser's return are from this provider, not another server (RFC 9207)."""
        promised = self.metadata.get("authorization_response_iss_parameter_supported") is True
        return fields.get("iss", None if promised else self.issuer) == self.issuer

    async def redeem(self, code: str, verifier: str) -> Tokens:
        fields = {"grant_type": "authorization_code", "code": code, "code_verifier": verifier}
        return await self._tokens({**fields, "redirect_uri": self.redirect_uri})

    async def user(self, tokens: Tokens) -> str:
        """Return the subject identifier of the user, which is unique and never changes."""
        status, userinfo = await _request("GET", self.metadata["userinfo_endpoint"], token=tokens.access)
        _check_available(status)
        user = userinfo.get("sub")
        if status != 200 or not isinstance(user, str) or not user:
            raise Refused(f"the provider does not say who the user is ({status})")
        return user

    async def renew(self, tokens: Tokens) -> Tokens:
        """Return valid tokens.  Raises `Refused` if the grant has ended at the provider."""
        if tokens.refresh is None:
            await self.user(tokens)  # checks at least that the access token is valid
            return tokens
        new = await self._tokens({"grant_type": "refresh_token", "refresh_token": tokens.refresh})
        return new if new.refresh else Tokens(new.access, tokens.refresh)

    async def revoke(self, tokens: Tokens) -> None:
        if endpoint := self.metadata.get("revocation_endpoint"):
            await _request("POST", endpoint, self._authenticated({"token": tokens.refresh or tokens.access}))

    async def _tokens(self, fields: Mapping[str, str]) -> Tokens:
        status, answer = await _request("POST", self.metadata["token_endpoint"], self._authenticated(fields))
        access, refresh = answer.get("access_token"), answer.get("refresh_token")
        _check_available(status)
        if status != 200 or not isinstance(access, str) or not isinstance(refresh, str | None):
            raise Refused(f"the provider gives no tokens ({status})")
        return Tokens(access, refresh)

    def _authenticated(self, fields: Mapping[str, str]) -> dict[str, str]:
        return {**fields, "client_id": self.client_id, "client_secret": self.client_secret}


def _check_available(status: int) -> None:
    if status >= 500 or status == 429:
        raise Unavailable(f"the provider answers {status}")


async def _request(
    method: str, url: str, form: Mapping[str, str] | None = None, token: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON of a response.  Redirects are not followed: they could leak secrets."""
    return await trio.to_thread.run_sync(_request_in_thread, method, url, form, token, abandon_on_cancel=True)


def _request_in_thread(
    method: str, url: str, form: Mapping[str, str] | None, token: str | None
) -> tuple[int, dict[str, Any]]:
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1"):
        raise Refused(f"{url} is not https")
    connection = (HTTPSConnection if parts.scheme == "https" else HTTPConnection)(parts.netloc, timeout=TIMEOUT)
    target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"  # with the query: it may name a tenant
    headers = {"Accept": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    if form is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    try:
        connection.request(method, target, None if form is None else urlencode(form), headers)
        response = connection.getresponse()
        content = json.loads(response.read(MAX_BODY) or b"{}")
    except (OSError, HTTPException) as error:
        raise Unavailable(f"the provider cannot be reached at {parts.netloc}: {type(error).__name__}") from error
    except (ValueError, RecursionError):
        content = None
    finally:
        connection.close()
    return response.status, content if isinstance(content, dict) else {}
