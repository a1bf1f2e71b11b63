"""Client assertions (RFC 7523) and DPoP proofs (RFC 9449): their claims and headers.

The core has no cryptography except hashes.  A `Key` brings the function that signs; this module decides the claims, the
audience and the lifetime.  Random values come in as bytes.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import TypeAlias
from urllib.parse import urlsplit

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.http.fields import Headers
from trio_mcp.core.jsonrpc import Json
from trio_mcp.core.oauth.places import origin_of
from trio_mcp.core.records import record

__all__ = ["Entropy", "Key", "Nonces", "base64url", "client_assertion", "dpop_proof", "token_text"]

Entropy: TypeAlias = Callable[[int], bytes]
"""Returns that many unpredictable bytes, like `os.urandom`."""

Sign: TypeAlias = Callable[[Mapping[str, Json], Mapping[str, Json]], str]
"""Makes a signed JWT of claims and a header."""

# Long enough for clocks that differ, and short enough that a stolen assertion is useless tomorrow.
_ASSERTION_SECONDS = 300
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


def base64url(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def token_text(entropy: Entropy, size: int = 32) -> str:
    """Return a random text that is safe in URLs: for a state, a verifier, the id of a proof."""
    return base64url(entropy(size))


def client_assertion(key: Key, client_id: str, audience: str, now: float, entropy: Entropy) -> str:
    """Make a signed JWT that authenticates the client to `audience`, the issuer."""
    header = {"typ": "JWT", "alg": key.algorithm, **({} if key.id is None else {"kid": key.id})}
    claims = {
        "iss": client_id,
        "sub": client_id,
        "aud": audience,
        "jti": token_text(entropy, 16),
        "iat": int(now),
        "exp": int(now) + _ASSERTION_SECONDS,
    }
    return key.sign(claims, header)


def dpop_proof(
    key: Key, method: str, url: str, now: float, entropy: Entropy, *, nonce: str | None = None, token: str | None = None
) -> str:
    """Prove, for one request, that the sender has the key.  `token`: the access token, for the MCP server only."""
    parts = urlsplit(url)
    claims: dict[str, Json] = {
        "jti": token_text(entropy, 16),
        "htm": method,
        "htu": parts._replace(query="", fragment="").geturl(),
        "iat": int(now),
    }
    if nonce is not None:
        claims["nonce"] = nonce
    if token is not None:
        claims["ath"] = base64url(sha256(token.encode()).digest())
    return key.sign(claims, {"typ": "dpop+jwt", "alg": key.algorithm, "jwk": dict(key.jwk)})


_NONCE_ORIGINS = 16  # an MCP server and its authorization server need two


class Nonces:
    """The newest DPoP nonce of each origin (RFC 9449, 8 and 9)."""

    def __init__(self) -> None:
        self._by_origin: dict[str, str] = {}

    def note(self, url: str, headers: Headers) -> bool:
        """Store the nonce in these response headers of `url`.  Returns whether there is one."""
        nonce = headers.get("DPoP-Nonce", "")
        if not 0 < len(nonce) <= 1024:
            return False
        self._by_origin.pop(origin_of(url), None)
        self._by_origin[origin_of(url)] = nonce
        if len(self._by_origin) > _NONCE_ORIGINS:
            del self._by_origin[next(iter(self._by_origin))]
        return True

    def of(self, url: str) -> str | None:
        return self._by_origin.get(origin_of(url))
