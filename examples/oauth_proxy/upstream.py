"""The identity provider, as its client sees it: OpenID Connect with a client id that was entered by hand.

No token that an MCP client has comes here, and no token from here goes to an MCP client.
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

PATIENCE = 10.0  # seconds for each wait of a request
MOST = 256 * 1024  # bytes of an answer
NEEDED = ("authorization_endpoint", "token_endpoint", "userinfo_endpoint")


class Refused(Exception):
    """The provider does not stand by this user, or this answer, any more."""


class Down(Exception):
    """The provider cannot be asked now."""


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
        """Its metadata has to be its own, or its answers could come from anywhere.  Raises `Refused` and `Down`."""
        url = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
        status, metadata = await _ask("GET", url)
        if status != 200:
            raise Refused(f"there is no metadata at {url} (status {status})")
        if (itself := metadata.get("issuer")) != issuer:
            raise Refused(f"the metadata at {url} is that of {itself!r}; the issuer has to be the same, to the letter")
        if "S256" not in metadata.get("code_challenge_methods_supported", ()):
            raise Refused(f"{issuer} does not say that it has PKCE")
        if lacking := [each for each in NEEDED if not isinstance(metadata.get(each), str)]:
            raise Refused(f"{issuer} has no {', '.join(lacking)}")
        return cls(issuer, metadata, client_id, client_secret, redirect_uri)

    def page(self, state: str, verifier: str) -> str:
        """Where the user signs in."""
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

    def has_sent(self, fields: Mapping[str, str]) -> bool:
        """Whether what the browser brings is its answer, and not that of another server (RFC 9207)."""
        promised = self.metadata.get("authorization_response_iss_parameter_supported") is True
        return fields.get("iss", None if promised else self.issuer) == self.issuer

    async def redeem(self, code: str, verifier: str) -> Tokens:
        fields = {"grant_type": "authorization_code", "code": code, "code_verifier": verifier}
        return await self._tokens({**fields, "redirect_uri": self.redirect_uri})

    async def user(self, tokens: Tokens) -> str:
        """Who the user is, by a name that stays the same and is nobody else's."""
        status, said = await _ask("GET", self.metadata["userinfo_endpoint"], token=tokens.access)
        _check_up(status)
        user = said.get("sub")
        if status != 200 or not isinstance(user, str) or not user:
            raise Refused(f"the provider does not say who the user is ({status})")
        return user

    async def renewed(self, tokens: Tokens) -> Tokens:
        """Tokens that are good now.  Raises `Refused` when the user has lost, or withdrawn, what was granted."""
        if tokens.refresh is None:
            await self.user(tokens)  # which says at least that they are good
            return tokens
        new = await self._tokens({"grant_type": "refresh_token", "refresh_token": tokens.refresh})
        return new if new.refresh else Tokens(new.access, tokens.refresh)

    async def revoke(self, tokens: Tokens) -> None:
        if endpoint := self.metadata.get("revocation_endpoint"):
            await _ask("POST", endpoint, self._authenticated({"token": tokens.refresh or tokens.access}))

    async def _tokens(self, fields: Mapping[str, str]) -> Tokens:
        status, said = await _ask("POST", self.metadata["token_endpoint"], self._authenticated(fields))
        access, refresh = said.get("access_token"), said.get("refresh_token")
        _check_up(status)
        if status != 200 or not isinstance(access, str) or not isinstance(refresh, str | None):
            raise Refused(f"the provider gives no tokens ({status})")
        return Tokens(access, refresh)

    def _authenticated(self, fields: Mapping[str, str]) -> dict[str, str]:
        return {**fields, "client_id": self.client_id, "client_secret": self.client_secret}


def _check_up(status: int) -> None:
    if status >= 500 or status == 429:
        raise Down(f"the provider answers {status}")


async def _ask(
    method: str, url: str, form: Mapping[str, str] | None = None, token: str | None = None
) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of an answer.  No redirect is followed: secrets are for whom they were meant for."""
    return await trio.to_thread.run_sync(_ask_in_thread, method, url, form, token, abandon_on_cancel=True)


def _ask_in_thread(
    method: str, url: str, form: Mapping[str, str] | None, token: str | None
) -> tuple[int, dict[str, Any]]:
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1"):
        raise Refused(f"{url} is not https")
    connection = (HTTPSConnection if parts.scheme == "https" else HTTPConnection)(parts.netloc, timeout=PATIENCE)
    target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"  # some tell their tenants by a query
    headers = {"Accept": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    if form is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    try:
        connection.request(method, target, None if form is None else urlencode(form), headers)
        answer = connection.getresponse()
        said = json.loads(answer.read(MOST) or b"{}")
    except (OSError, HTTPException) as error:
        raise Down(f"the provider cannot be reached at {parts.netloc}: {type(error).__name__}") from error
    except (ValueError, RecursionError):
        said = None
    finally:
        connection.close()
    return answer.status, said if isinstance(said, dict) else {}
