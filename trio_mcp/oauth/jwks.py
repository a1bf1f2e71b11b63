"""Verify access tokens that are JWTs, with the keys that their issuer publishes.

    verify = JwksVerifier("https://auth.example.com/jwks.json", issuer="https://auth.example.com", audience=URL)
    server.protect(verify=verify, resource=URL, authorization_servers=["https://auth.example.com"])

It needs the extra `oauth`, for PyJWT, and uses only its signatures and keys.  Hand-written code for these fails
unnoticed (two encodings of ECDSA, a key used for another algorithm, critical headers), and PyJWT is small, well
maintained, and depends only on `cryptography`.  PyJWT does not check the claims: `core.oauth.resource` does, with a
clock that a test can set.

The keys are fetched when the first token arrives, when a token names an unknown key, and every `_FRESH` seconds,
because an issuer also withdraws keys.  A separate task fetches them, one fetch at a time and at most every `_PAUSE`
seconds, no matter which tokens arrive.  So a request that waits for it can be cancelled, and tokens with a known key do
not wait.

While the issuer cannot be reached, the last keys stay valid for `max_age` seconds.  Without this limit, an attacker
with a withdrawn key who can cut this server off from its issuer could use the key for ever.  After that, no token can
be verified.
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
from trio_mcp.core.messages import Limits
from trio_mcp.core.oauth.discovery import read_object
from trio_mcp.core.oauth.resource import CannotVerify, canonical, claims_fault, scopes_in
from trio_mcp.core.principals import Principal
from trio_mcp.oauth.keys import ALGORITHMS, PUBLIC_MEMBERS
from trio_mcp.transport.dial import is_this_machine, locate
from trio_mcp.transport.http_pool import HttpPool

if TYPE_CHECKING:
    import jwt

__all__ = ["JwksVerifier"]

_log = logging.getLogger("trio_mcp")
_refusals = logging.getLogger("trio_mcp.http")

# RFC 8725, 3.11: a JWT for another purpose may be signed by the same key.
_TYPES = (None, "jwt", "at+jwt", "application/at+jwt")

_PAUSE = 10.0  # seconds at least between fetches: a new key is found this late at worst
_FRESH = 600.0  # seconds after which keys are fetched again, even if none is missing
_AGE = 3600.0  # seconds, the lifetime of most access tokens: if the issuer is down, they have all expired after that
_AGE_LEAST = 60.0  # seconds: several times `_PAUSE`, so that keys can be fetched before they are too old
_FETCH_SECONDS = 10.0  # for one whole fetch: a request waits for the first
_MAX_BYTES = 256 * 1024  # of a key set; issuers have a few keys, of 500 bytes each


class JwksVerifier:
    """Verifies tokens for `verify` of `Server.protect`: `issuer` must have signed them for `audience`, and they must be
    valid now.

    `url` is the URL of the issuer's keys, its `jwks_uri`: https, or with `http_on_loopback` also plain http on this
    machine, for development.  `audience` is the audience of tokens for this server: usually its URL; give several if
    tokens use several names.  `algorithms` are the accepted signature algorithms.  Clocks may differ by `leeway`
    seconds.  The principal's name is the token's `sub`, its scopes are the token's `scope` (or `scp`), and it has all
    claims of the token.

    If the issuer cannot be reached, its keys stay valid for `max_age` seconds after the last fetch: an hour by default,
    at least a minute, `math.inf` for ever.  After that, `CannotVerify` is raised for every token.

    Raises `UsageError` if an option is invalid, or if PyJWT is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        issuer: str,
        audience: str | Collection[str],
        algorithms: Sequence[str] = tuple(ALGORITHMS),
        leeway: float = 30.0,
        max_age: float = _AGE,
        http_on_loopback: bool = False,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        try:
            import jwt
        except ImportError:
            raise UsageError("JwksVerifier needs PyJWT: pip install 'trio_mcp[oauth]'") from None
        self._jwt = jwt
        self._jws = jwt.PyJWS()
        origin, _ = locate(url)
        if origin.scheme != "https" and not (http_on_loopback and is_this_machine(origin.host)):  # auth-24, auth-53
            raise UsageError(
                "the URL of an issuer's keys must be https, or an attacker could sign tokens; http_on_loopback=True "
                f"allows plain http on this machine, for development; got {shown(url)}"
            )
        self._url = url
        self._issuer = issuer
        self._audiences = frozenset(map(canonical, [audience] if isinstance(audience, str) else audience))
        if not self._audiences or not all((*self._audiences, issuer)):
            raise UsageError("issuer and audience must not be empty")
        if unknown := set(algorithms) - ALGORITHMS.keys():
            raise UsageError(f"algorithms must be of {', '.join(ALGORITHMS)}, got {min(unknown)!r}")
        check_seconds("leeway", leeway)
        check_seconds("max_age", max_age)
        if max_age < _AGE_LEAST:
            raise UsageError(f"max_age must be at least {_AGE_LEAST:g} seconds, got {max_age:g}")
        self._algorithms = frozenset(algorithms)
        self._leeway = leeway
        self._max_age = max_age
        self._ssl_context = ssl_context
        self._keys: Sequence[Mapping[str, Any]] = ()
        self._loaded_keys: dict[tuple[str | None, str], jwt.PyJWK] = {}
        self._fetch_began = float("-inf")  # the last fetch
        self._fetched = float("-inf")  # when the last successful fetch began
        self._fetching: trio.Event | None = None

    def __repr__(self) -> str:
        return f"<JwksVerifier for {self._issuer}>"

    async def __call__(self, token: str) -> Principal | None:
        """Return the token's principal, or None if the token is not valid.

        Raises `CannotVerify` while the keys cannot be fetched.
        """
        try:
            return await self._verified(token)
        except _TokenRejected as rejected:
            _refusals.info("access token rejected: %s", rejected)  # auth-22: log nothing of its content
            return None

    async def _verified(self, token: str) -> Principal:
        kid, algorithm = self._head(token)
        key = self._key(kid, algorithm)
        if key is None or self._outdated():
            self._fetch_soon()
            if self._fetching is not None:
                await self._fetching.wait()
            key = self._key(kid, algorithm)
        elif not _lies_within(_FRESH, self._fetch_began):
            self._fetch_soon()
        if self._outdated() or (key is None and self._fetched != self._fetch_began):
            raise CannotVerify("the keys of the issuer cannot be fetched")
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
        """Return the key's id, if the token's header has one, and the algorithm."""
        try:
            head = self._jwt.get_unverified_header(token)
        except (self._jwt.PyJWTError, RecursionError):
            raise _TokenRejected("it is not a signed JWT") from None
        kid, algorithm, kind = head.get("kid"), head.get("alg"), head.get("typ")
        if not isinstance(algorithm, str) or algorithm not in self._algorithms:
            raise _TokenRejected("its algorithm is not allowed (algorithms)")
        if (kind.lower() if isinstance(kind, str) else kind) not in _TYPES:
            raise _TokenRejected("it is a JWT for another purpose (typ)")
        return kid, algorithm

    def _claims(self, token: str, key: jwt.PyJWK, algorithm: str) -> dict[str, Any]:
        try:
            whole = self._jws.decode_complete(
                token, key, [algorithm], {"verify_signature": True, "enforce_minimum_key_length": True}
            )
        except (self._jwt.PyJWTError, ValueError):
            raise _TokenRejected("its signature is wrong") from None
        claims = read_object(whole["payload"], len(token))
        if claims is None:
            raise _TokenRejected("its payload is not a JSON object")
        return claims

    # Keys.

    def _key(self, kid: str | None, algorithm: str) -> jwt.PyJWK | None:
        """Return the key with this id; for a token without an id, return the only key for its algorithm."""
        if (loaded := self._loaded_keys.get((kid, algorithm))) is not None:
            return loaded
        found = [each for each in self._keys if _suits(each, algorithm) and kid in (None, each.get("kid"))]
        if len(found) != 1:
            return None
        try:
            loaded = self._jwt.PyJWK({name: found[0][name] for name in PUBLIC_MEMBERS if name in found[0]}, algorithm)
        except (self._jwt.PyJWTError, ValueError, TypeError, KeyError):
            return None  # an issuer may publish keys of a kind that we do not understand
        self._loaded_keys[kid, algorithm] = loaded
        return loaded

    def _outdated(self) -> bool:
        return not _lies_within(self._max_age, self._fetched)

    def _fetch_soon(self) -> None:
        if self._fetching is not None or _lies_within(_PAUSE, self._fetch_began):
            return
        self._fetch_began = trio.current_time()
        self._fetching = trio.Event()
        # Not in the nursery of a request: the first request may be cancelled while others wait for the keys too.
        trio.lowlevel.spawn_system_task(self._fetch, self._fetching, name="the keys of an issuer")

    async def _fetch(self, done: trio.Event) -> None:
        try:
            with trio.fail_after(_FETCH_SECONDS):
                self._keys = await self._get()
            self._fetched = self._fetch_began
            self._loaded_keys.clear()
        except Exception as error:  # noqa: BLE001  # an exception that leaves a system task crashes Trio
            why = "it took too long" if isinstance(error, trio.TooSlowError) else error
            _log.warning(
                "cannot fetch the keys at %s; known keys stay valid for %g seconds after the last fetch: %s",
                self._url,
                self._max_age,
                why,
            )
        finally:
            self._fetching = None
            done.set()

    async def _get(self) -> Sequence[Mapping[str, Any]]:
        async with (
            HttpPool(ssl_context=self._ssl_context, limits=Limits()) as pool,
            pool.request("GET", self._url, (("Accept", "application/json"),), replayable=True) as reply,
        ):
            if reply.status != 200:  # do not follow redirects: keys come only from the URL that the author gave
                raise RemoteProtocolError(f"the status is {reply.status}")
            body = await reply.read(_MAX_BYTES)
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            raise RemoteProtocolError("the response is not JSON") from None
        keys = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(keys, list):
            raise RemoteProtocolError('the response is not a key set, an object with a list "keys"')
        return [each for each in keys if isinstance(each, dict)]


class _TokenRejected(Exception):
    """The reason why a token is rejected, only for the log."""


def _lies_within(seconds: float, since: float) -> bool:
    """Whether `since` is less than `seconds` ago.  It may lie in the future: each `trio.run` has its own clock."""
    return 0 <= trio.current_time() - since < seconds


def _suits(key: Mapping[str, Any], algorithm: str) -> bool:
    kind = (key.get("kty"), key.get("crv") if key.get("kty") != "RSA" else None)
    return kind == ALGORITHMS[algorithm] and key.get("alg", algorithm) == algorithm and key.get("use", "sig") == "sig"
