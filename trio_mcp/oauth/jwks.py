"""Access tokens that are JWTs, verified by the keys that their issuer publishes.

    verify = JwksVerifier("https://auth.example.com/jwks.json", issuer="https://auth.example.com", audience=URL)
    server.protect(verify=verify, resource=URL, authorization_servers=["https://auth.example.com"])

It needs the extra `oauth`, for PyJWT, of which only signatures and keys are used.  They are where code of one's own
goes wrong without anybody noticing (two encodings of ECDSA, keys that are taken for another algorithm's, headers that
must be understood), and PyJWT is small, is kept well, and depends on `cryptography` alone.  What the claims mean is not
left to it: `core.resource_server` judges them, by a clock that a test can set.

The keys are fetched when the first token comes, when a token names an unknown key, and every `_FRESH` seconds, since an
issuer also withdraws keys.  That is done in a task of its own, one at a time, and at most every `_PAUSE` seconds,
whatever anybody sends: a request that waits for it may be cancelled, and tokens with a known key do not wait.

While the issuer cannot be reached the last keys stay good, but only for `max_age` seconds: a thief who has a withdrawn
key, and can keep this server from its issuer, could use that key for ever.  Beyond, no token can be verified.
"""

from __future__ import annotations

import json
import logging
import ssl
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trio

from trio_mcp.core.errors import RemoteProtocolError, UsageError, check_seconds, shown
from trio_mcp.core.jsonrpc import Limits
from trio_mcp.core.oauth.principals import Principal
from trio_mcp.core.oauth.resource import CannotVerify, canonical, claims_fault, scopes_in
from trio_mcp.transport.dial import is_ours, locate
from trio_mcp.transport.http_pool import HttpPool

if TYPE_CHECKING:
    import jwt

__all__ = ["JwksVerifier"]

_log = logging.getLogger("trio_mcp")
_refusals = logging.getLogger("trio_mcp.http")

# Each with the kind of key that it takes (RFC 7518, 3.1 and 6.1): a key is never used for anything else, however it is
# asked for.  None of them is symmetric, for then a public key would be the secret, and "none" is no algorithm at all.
_ALGORITHMS: Mapping[str, tuple[str, str | None]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", None)),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
_PUBLIC = ("kty", "crv", "n", "e", "x", "y")  # all of a key that is looked at
# RFC 8725, 3.11: a JWT that was made for something else may be signed by the same key.
_TYPES = (None, "jwt", "at+jwt", "application/at+jwt")

_PAUSE = 10.0  # seconds between fetches at least: a key that is new is found this late at worst
_FRESH = 600.0  # seconds after which keys are fetched again, though none is missing
_AGE = 3600.0  # seconds, which most access tokens live: without its issuer nobody has a good one after that
_AGE_LEAST = 60.0  # seconds: several times `_PAUSE`, so that keys can be fetched before they are too old
_PATIENCE = 10.0  # seconds for all of a fetch: a request waits for the first
_MOST = 256 * 1024  # bytes; issuers have a handful of keys, of 500 bytes each


class JwksVerifier:
    """For `verify` of `Server.protect`: a token is good if `issuer` has signed it for `audience`, and its time is now.

    `url` is where the issuer's keys are, its `jwks_uri`: https, or with `http_on_loopback` also plain http on this
    machine, for development.  `audience` is what tokens for this server have for that: its URL as a rule, or several
    names.  `algorithms` are those that may have signed it; clocks may differ by `leeway` seconds.  The principal has
    the token's `sub` for a name, its `scope` (or `scp`) for scopes, and all of its claims.

    Keys are good for `max_age` seconds after they were last fetched, if the issuer cannot be reached meanwhile: an hour
    by default, at least a minute, and `math.inf` for ever.  Beyond that every token gets `CannotVerify`.

    Raises `UsageError` for what cannot be, and where PyJWT is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        issuer: str,
        audience: str | Collection[str],
        algorithms: Sequence[str] = tuple(_ALGORITHMS),
        leeway: float = 30.0,
        max_age: float = _AGE,
        http_on_loopback: bool = False,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        try:
            import jwt
        except ImportError:
            raise UsageError("JWTs are verified by PyJWT: pip install 'trio_mcp[oauth]'") from None
        self._jwt = jwt
        self._jws = jwt.PyJWS()
        self._url = _checked(url, http_on_loopback)
        self._issuer = issuer
        self._audiences = frozenset(map(canonical, [audience] if isinstance(audience, str) else audience))
        if not self._audiences or not all((*self._audiences, issuer)):
            raise UsageError("a token is verified for an issuer and an audience; say both")
        if unknown := set(algorithms) - _ALGORITHMS.keys():
            raise UsageError(f"{min(unknown)!r} is no algorithm for tokens; there are {', '.join(_ALGORITHMS)}")
        check_seconds("leeway", leeway)
        check_seconds("max_age", max_age)
        if max_age < _AGE_LEAST:
            raise UsageError(f"max_age must be at least {_AGE_LEAST:g} seconds, got {max_age:g}")
        self._algorithms = frozenset(algorithms)
        self._leeway = leeway
        self._max_age = max_age
        self._ssl_context = ssl_context
        self._keys: Sequence[Mapping[str, Any]] = ()
        self._made: dict[tuple[str | None, str], jwt.PyJWK] = {}
        self._asked = float("-inf")  # when the last fetch began
        self._fetched = float("-inf")  # when that began which has brought the keys
        self._current = False  # it has brought the keys
        self._fetching: trio.Event | None = None

    def __repr__(self) -> str:
        return f"<JwksVerifier for {self._issuer}>"

    async def __call__(self, token: str) -> Principal | None:
        """Raises `CannotVerify` while the keys cannot be had."""
        try:
            return await self._verified(token)
        except _TokenRejected as refused:
            _refusals.info("an access token is not accepted: %s", refused)  # auth-22: and nothing of what is in it
            return None

    async def _verified(self, token: str) -> Principal:
        kid, algorithm = self._head(token)
        key = self._key(kid, algorithm)
        if key is None or self._outdated():
            await self._look_again()
            key = self._key(kid, algorithm)
        elif not _lies_within(_FRESH, self._asked):
            self._fetch_soon()
        if self._outdated() or (key is None and not self._current):
            raise CannotVerify("the keys of the issuer cannot be had")
        if key is None:
            raise _TokenRejected("its issuer has no key for it")
        claims = self._claims(token, key, algorithm)
        now, leeway = time.time(), self._leeway
        fault = claims_fault(claims, issuer=self._issuer, audiences=self._audiences, now=now, leeway=leeway)
        if fault is not None:
            raise _TokenRejected(fault)
        return Principal(claims["sub"], scopes_in(claims), claims["exp"] + leeway, claims)

    # Tokens.

    def _head(self, token: str) -> tuple[str | None, str]:
        """What it says about its signature: the key's id, if it has one, and the algorithm."""
        try:
            head = self._jwt.get_unverified_header(token)
        except (self._jwt.PyJWTError, RecursionError):
            raise _TokenRejected("it is no signed JWT") from None
        kid, algorithm, kind = head.get("kid"), head.get("alg"), head.get("typ")
        if not isinstance(algorithm, str) or algorithm not in self._algorithms:
            raise _TokenRejected("its algorithm is not allowed (algorithms)")
        if (kind.lower() if isinstance(kind, str) else kind) not in _TYPES:
            raise _TokenRejected("it is a JWT for something else")
        return kid, algorithm

    def _claims(self, token: str, key: jwt.PyJWK, algorithm: str) -> dict[str, Any]:
        try:
            whole = self._jws.decode_complete(
                token, key, [algorithm], {"verify_signature": True, "enforce_minimum_key_length": True}
            )
            claims = json.loads(whole["payload"])
        except (self._jwt.PyJWTError, ValueError, RecursionError):
            raise _TokenRejected("its signature is no good, or it says nothing that can be read") from None
        if not isinstance(claims, dict):
            raise _TokenRejected("it has no claims")
        return claims

    # Keys.

    def _key(self, kid: str | None, algorithm: str) -> jwt.PyJWK | None:
        """The key with this id, or, for a token that names none, the only one for its algorithm."""
        if (made := self._made.get((kid, algorithm))) is not None:
            return made
        found = [each for each in self._keys if _suits(each, algorithm) and kid in (None, each.get("kid"))]
        if len(found) != 1:
            return None
        try:
            made = self._jwt.PyJWK({name: found[0][name] for name in _PUBLIC if name in found[0]}, algorithm)
        except (self._jwt.PyJWTError, ValueError, TypeError, KeyError):
            return None  # an issuer may have keys that we do not understand
        self._made[kid, algorithm] = made
        return made

    def _outdated(self) -> bool:
        return not _lies_within(self._max_age, self._fetched)

    async def _look_again(self) -> None:
        self._fetch_soon()
        if self._fetching is not None:
            await self._fetching.wait()

    def _fetch_soon(self) -> None:
        if self._fetching is not None or _lies_within(_PAUSE, self._asked):
            return
        self._asked = trio.current_time()
        self._fetching = trio.Event()
        # In no nursery of ours: the request that is the first to need it may be cancelled, and all others wait too.
        trio.lowlevel.spawn_system_task(self._fetch, self._fetching, name="the keys of an issuer")

    async def _fetch(self, done: trio.Event) -> None:
        self._current = False
        try:
            with trio.fail_after(_PATIENCE):
                self._keys = _read(await self._get())
            self._fetched = self._asked
            self._made.clear()
            self._current = True
        except Exception as error:  # noqa: BLE001  # what leaves a system task is Trio's end
            why = "it took too long" if isinstance(error, trio.TooSlowError) else error
            _log.warning(
                "the keys at %s cannot be fetched; known ones are good for %g seconds after the last fetch: %s",
                self._url,
                self._max_age,
                why,
            )
        finally:
            self._fetching = None
            done.set()

    async def _get(self) -> bytes:
        async with (
            HttpPool(ssl_context=self._ssl_context, limits=Limits()) as pool,
            pool.request("GET", self._url, (("Accept", "application/json"),), replayable=True) as reply,
        ):
            if reply.status != 200:  # no redirect is followed: keys come from where the author has said
                raise RemoteProtocolError(f"the status is {reply.status}")
            return await reply.read(_MOST)


class _TokenRejected(Exception):
    """Why a token is not, for the log alone."""


def _lies_within(seconds: float, since: float) -> bool:
    """Whether that was less than so many seconds ago.  It may lie ahead: each `trio.run` has a clock of its own."""
    return 0 <= trio.current_time() - since < seconds


def _checked(url: str, http_on_loopback: bool) -> str:
    """auth-24, auth-53."""
    origin, _ = locate(url)
    if origin.scheme != "https" and not (http_on_loopback and is_ours(origin.host)):
        raise UsageError(
            "the keys of an issuer are fetched by https, or anybody could sign tokens; http_on_loopback=True allows "
            f"plain http on this machine, for development: {shown(url)}"
        )
    return url


def _read(body: bytes) -> Sequence[Mapping[str, Any]]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise RemoteProtocolError("they are no JSON") from None
    keys = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list):
        raise RemoteProtocolError("they are no key set, which is an object with a list of keys")
    return [each for each in keys if isinstance(each, dict)]


def _suits(key: Mapping[str, Any], algorithm: str) -> bool:
    kind = (key.get("kty"), key.get("crv") if key.get("kty") != "RSA" else None)
    return kind == _ALGORITHMS[algorithm] and key.get("alg", algorithm) == algorithm and key.get("use", "sig") == "sig"
