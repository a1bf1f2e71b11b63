"""Authentication and authorization of HTTP requests.

There are two ways to authenticate a request, and a server uses one of them:

| | Result | Configured |
|---|---|---|
| `authenticate` | a name, by any method that the author chooses | as an HTTP option |
| `Server.protect` | a principal with scopes, from its access token | on the server, because its tools have scopes too |

With neither, every request is anonymous and has no scopes.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import trio

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_REQUEST, UsageError
from trio_mcp.core.http.fields import Fields, Headers, Reply, refusal
from trio_mcp.core.http.server_rules import HttpRequest
from trio_mcp.core.messages import Error, Id
from trio_mcp.core.oauth.principals import Principal, has_scopes
from trio_mcp.core.oauth.resource import CannotVerify, Protection, ResourceServer
from trio_mcp.core.revisions import stable_name
from trio_mcp.server.http.options import HttpOptions, public_url_of
from trio_mcp.transport.workers import RunStopped, WorkerPool, called

__all__ = ["Authenticator", "Caller", "name_of", "seconds_left"]

_log = logging.getLogger("trio_mcp")
T = TypeVar("T")
_LATER = (("Retry-After", "5"),)  # an authorization server is often back within seconds

Caller: TypeAlias = Principal | str | None


def seconds_left(caller: Caller) -> float:
    """Seconds until the caller's access token expires."""
    expires = caller.expires if isinstance(caller, Principal) else None
    return math.inf if expires is None else expires - time.time()


def name_of(caller: Caller) -> str | None:
    return caller.name if isinstance(caller, Principal) else caller


class _AuthenticateTimeout(Exception):
    """A function of the author did not return in time."""


class Authenticator:
    """Authenticates the requests of one endpoint and checks their scopes.

    `path` is the path of the endpoint.  Functions of the author run in `workers`, for `seconds` at most.  Raises
    `UsageError` if `authenticate` and `Server.protect` are both used.
    """

    def __init__(
        self, options: HttpOptions, protection: Protection | None, path: str, workers: WorkerPool, seconds: float
    ) -> None:
        self._workers = workers
        self._seconds = seconds
        self._authenticate = options.get("authenticate")
        self._resource: ResourceServer | None = None
        if protection is not None:
            if self._authenticate is not None:
                raise UsageError("authenticate cannot be used together with Server.protect; remove one of them")
            self._resource = ResourceServer(protection, path=path, public_url=public_url_of(options))

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the metadata documents, which are served beside the endpoint."""
        return frozenset() if self._resource is None else self._resource.paths

    def document(self, request: HttpRequest) -> Reply | None:
        """The reply to a request for a public metadata document, or None for another request."""
        return None if self._resource is None else self._resource.document(request)

    async def caller(self, request: HttpRequest, cors: Fields) -> Reply | Caller:
        """Authenticate the request.  Returns the caller, or the reply that refuses the request."""
        if self._resource is not None:
            token = self._resource.token(request, cors)
            return token if isinstance(token, Reply) else await self._verified(self._resource, token, cors)
        if self._authenticate is None:
            return None
        try:
            name = await self._ask("authenticate", partial(_identified, self._authenticate, request))
        except (_AuthenticateTimeout, RunStopped):
            return _cannot_tell(cors)
        except Exception:  # noqa: BLE001  # an author's function may raise any exception; only this request fails
            _log.exception("authenticate has failed")
            return _failed(cors)
        if name is not None:
            return name
        why = "not authenticated; send credentials in the Authorization header"
        if "Authorization" in request.headers:
            why = "the credentials in the Authorization header are not accepted; send others"
        return refusal(401, Error(None, INVALID_REQUEST, why), cors, (("WWW-Authenticate", "Bearer"),))

    async def _verified(self, resource: ResourceServer, token: str, cors: Fields) -> Reply | Principal:
        """Verify the access token, before any other work for the request (auth-19, auth-47)."""
        protection = resource.protection
        try:
            found = called(protection.verify, token)
            principal = await self._ask("verify", partial(_awaited, found)) if isinstance(found, Awaitable) else found
            if not isinstance(principal, Principal | None):
                raise UsageError(f"verify must return a Principal or None, got {type(principal).__name__}")
        except CannotVerify as error:
            _log.warning("access tokens cannot be verified: %s", _without(token, str(error)))
            why = "the access token cannot be verified now; try again later"
            return refusal(503, Error(None, INTERNAL_ERROR, why), cors, _LATER)
        except (_AuthenticateTimeout, RunStopped):
            return _cannot_tell(cors)
        except Exception as error:  # noqa: BLE001  # as in `caller`
            # auth-22: the author's exception may quote the token, and the token must not get into the log.
            _log.error("verify has failed\n%s", _without(token, "".join(traceback.format_exception(error))))
            return _failed(cors)
        # auth-21.  The expiry is checked here, so that a `verify` that caches its results need not check it.
        if principal is None or seconds_left(principal) <= 0:
            return resource.unauthorized(cors)
        return protection.granted(principal)

    async def _ask(self, name: str, function: Callable[[], Awaitable[T]]) -> T:
        with trio.move_on_after(self._seconds):
            return await self._workers.call(function, name)
        _log.warning("%s took longer than %g seconds (Limits.authenticate_seconds)", name, self._seconds)
        raise _AuthenticateTimeout

    def forbidden(self, caller: Caller, needed: Sequence[str], cors: Fields, id: Id | None = None) -> Reply | None:
        """The refusal of a request that needs these scopes, or None if the caller has them."""
        if has_scopes(caller, needed):
            return None
        if self._resource is not None:
            return self._resource.insufficient(needed, cors, id)
        why = f"this request needs the scopes {' '.join(needed)}, but without Server.protect no caller has scopes"
        return refusal(403, Error(id, INVALID_REQUEST, why), cors)

    def visible_headers(self, headers: Headers) -> Headers:
        """The headers that handlers see: without the token, so that they cannot send it elsewhere (auth-50)."""
        return headers if self._resource is None else headers.without("Authorization")


async def _identified(authenticate: Callable[[HttpRequest], Awaitable[str | None]], request: HttpRequest) -> str | None:
    answer = authenticate(request)
    if not isinstance(answer, Awaitable):
        raise UsageError(f"authenticate must be an async function, but it returned {type(answer).__name__}")
    return stable_name(await answer)


async def _awaited(found: Awaitable[T]) -> T:
    return await found


def _cannot_tell(cors: Fields) -> Reply:
    return refusal(503, Error(None, INTERNAL_ERROR, "authentication is not available; try again later"), cors, _LATER)


def _without(token: str, text: str) -> str:
    return text.replace(token, "(the token)")


def _failed(cors: Fields) -> Reply:
    return refusal(500, Error(None, INTERNAL_ERROR, "internal error"), cors)
