"""The callers of an HTTP server: it names them itself, or verifies their access tokens.

| | Result | Configured |
|---|---|---|
| `authenticate` | a name, by any method that the author chooses | as an HTTP option |
| `Server.protect` | a principal with scopes, from its access token | on the server, because its tools have scopes too |

A server uses one of them.  With neither, every request is anonymous and has no scopes.
"""

from __future__ import annotations

import logging
import math
import re
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import trio

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_REQUEST, UsageError, redacted
from trio_mcp.core.http.fields import CREDENTIALS, Fields, Headers, HttpRequest, Reply, refusal
from trio_mcp.core.messages import Error
from trio_mcp.core.oauth.resource import CannotVerify, ResourceServer
from trio_mcp.core.principals import Principal
from trio_mcp.core.revisions import stable_name
from trio_mcp.server.run import Run
from trio_mcp.transport.workers import RunStopped, called

__all__ = ["Authenticator", "Caller", "seconds_left"]

_log = logging.getLogger("trio_mcp")

T = TypeVar("T")
Caller: TypeAlias = Principal | str | None

_LATER = (("Retry-After", "5"),)  # an authorization server is often back within seconds
_SEPARATOR = re.compile(r"[\s;,=\"]+")
_SCHEMES = ("Basic", "Bearer", "Digest")


def seconds_left(caller: Caller) -> float:
    """Seconds until the caller's access token expires."""
    expires = caller.expires if isinstance(caller, Principal) else None
    return math.inf if expires is None else expires - time.time()


class _AuthenticateTimeout(Exception):
    """A function of the author did not return in time."""


class Authenticator:
    """Authenticates the requests of one endpoint, by access tokens or by the function `authenticate`."""

    def __init__(self, run: Run, method: ResourceServer | Callable[[HttpRequest], Awaitable[Any]]) -> None:
        self._run = run
        self._method = method

    async def identify(self, request: HttpRequest, cors: Fields) -> Reply | Caller:
        """Return the caller, or the reply that refuses the request (auth-19, auth-47)."""
        method = self._method
        try:
            if isinstance(method, ResourceServer):
                return await self._holder_of_token(method, request, cors)
            name = stable_name(await self._wait_for("authenticate", partial(_named, method, request)))
            # `Principal` raises for a name that no store can keep.
            return _not_authenticated(request, cors) if name is None else Principal(name).name
        except (CannotVerify, _AuthenticateTimeout, RunStopped) as error:
            why = "authentication is not available; try again later"
            if isinstance(error, CannotVerify):
                _log.warning("access tokens cannot be verified: %s", _without_credentials(str(error), request.headers))
                why = "the access token cannot be verified now; try again later"
            return refusal(503, Error(None, INTERNAL_ERROR, why), cors, _LATER)
        except Exception as error:  # noqa: BLE001  # an author's function may raise any exception; only this request fails
            trace = _without_credentials("".join(traceback.format_exception(error)), request.headers)
            _log.error("%s has failed\n%s", "verify" if isinstance(method, ResourceServer) else "authenticate", trace)
            return refusal(500, Error(None, INTERNAL_ERROR, "internal error"), cors)

    async def _holder_of_token(self, resource: ResourceServer, request: HttpRequest, cors: Fields) -> Reply | Principal:
        token = resource.token(request, cors)
        if isinstance(token, Reply):
            return token
        found = called(resource.protection.verify, token)
        principal = await self._wait_for("verify", partial(_awaited, found)) if isinstance(found, Awaitable) else found
        if not isinstance(principal, Principal | None):
            raise UsageError(f"verify must return a Principal or None, got {type(principal).__name__}")
        # auth-21.  The expiry is checked here, so that a `verify` that caches its results need not check it.
        if principal is None or seconds_left(principal) <= 0:
            return resource.unauthorized(cors)
        return resource.protection.granted(principal)

    async def _wait_for(self, name: str, function: Callable[[], Awaitable[T]]) -> T:
        seconds = self._run.limits.authenticate_seconds
        # The worker calls the function: a coroutine that is made here would never run if the run has stopped.
        with trio.move_on_after(seconds):
            return await self._run.workers.call(function, name)
        _log.warning("%s took longer than %g seconds (Limits.authenticate_seconds)", name, seconds)
        raise _AuthenticateTimeout


async def _named(authenticate: Callable[[HttpRequest], Awaitable[Any]], request: HttpRequest) -> Any:
    found: object = called(authenticate, request)
    if not isinstance(found, Awaitable):
        raise UsageError(f"authenticate must be an async function, but it returned {type(found).__name__}")
    return await found


async def _awaited(found: Awaitable[T]) -> T:
    return await found


def _not_authenticated(request: HttpRequest, cors: Fields) -> Reply:
    why = "not authenticated; send credentials in the Authorization header"
    if "Authorization" in request.headers:
        why = "the credentials in the Authorization header are not accepted; send others"
    return refusal(401, Error(None, INVALID_REQUEST, why), cors, (("WWW-Authenticate", "Bearer"),))


def _without_credentials(text: str, headers: Headers) -> str:
    """auth-22: an author's exception may quote what the client has sent, and that must not get into the log."""
    values = [value for name, value in headers.items() if CREDENTIALS.search(name)]
    # The author may have taken a value apart: into a scheme and a token, or into the pairs of a cookie.
    parts = {part for value in values for part in (value, *_SEPARATOR.split(value, 32)) if part not in _SCHEMES}
    longest_first: list[str] = sorted(parts, key=len, reverse=True)
    return redacted(text, longest_first)
