"""Who asks by HTTP, and whether he may: the two ways in which a server can know.

| | What it knows | Where it is said |
|---|---|---|
| `authenticate` | a name, by whatever means | an option of HTTP |
| `Server.protect` | a principal with scopes, by its access token | the server, since its tools have scopes too |

With neither, everybody is nobody in particular, who has no scopes.
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
from trio_mcp.core.http.fields import Fields, Headers
from trio_mcp.core.http.verdicts import HttpRequest, Reply, refusal
from trio_mcp.core.jsonrpc import Error, Id
from trio_mcp.core.oauth.principals import Principal, covers
from trio_mcp.core.oauth.resource import CannotVerify, Protection, ResourceServer
from trio_mcp.core.terms import stable_name
from trio_mcp.server.http.options import HttpOptions, public_url_of
from trio_mcp.transport.workers import RunStopped, WorkerPool, called

__all__ = ["Authenticator", "Caller", "name_of", "seconds_left"]

_log = logging.getLogger("trio_mcp")
T = TypeVar("T")
_LATER = (("Retry-After", "5"),)  # where tokens come from, things change in seconds

Caller: TypeAlias = Principal | str | None


def seconds_left(caller: Caller) -> float:
    """For how long the token of whoever asks is good."""
    expires = caller.expires if isinstance(caller, Principal) else None
    return math.inf if expires is None else expires - time.time()


def name_of(caller: Caller) -> str | None:
    return caller.name if isinstance(caller, Principal) else caller


class _AuthenticateTimeout(Exception):
    """A function of the author has not ended in time."""


class Authenticator:
    """Raises `UsageError` for what cannot be.  `path` is that of the endpoint.

    Functions of the author run in `workers`, and have so many `seconds`.
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
                raise UsageError("authenticate has no say where the server is protected; take one of them away")
            self._resource = ResourceServer(protection, path=path, public_url=public_url_of(options))

    @property
    def places(self) -> frozenset[str]:
        """Paths at which something is beside the endpoint."""
        return frozenset() if self._resource is None else self._resource.places

    def document(self, request: HttpRequest) -> Reply | None:
        """What is for everybody."""
        return None if self._resource is None else self._resource.document(request)

    async def caller(self, request: HttpRequest, cors: Fields) -> Reply | Caller:
        """Who asks; or why that is not known, though it has to be."""
        if self._resource is not None:
            token = self._resource.token(request, cors)
            return token if isinstance(token, Reply) else await self._verified(self._resource, token, cors)
        if self._authenticate is None:
            return None
        try:
            name = await self._ask("authenticate", partial(_identified, self._authenticate, request))
        except (_AuthenticateTimeout, RunStopped):
            return _cannot_tell(cors)
        except Exception:  # noqa: BLE001  # an author's function may raise anything, and that costs this request only
            _log.exception("authenticate has failed")
            return _failed(cors)
        if name is not None:
            return name
        why = "who asks is not known; send credentials in the Authorization header"
        if "Authorization" in request.headers:
            why = "these credentials are not accepted; the Authorization header has to have others"
        return refusal(401, Error(None, INVALID_REQUEST, why), cors, (("WWW-Authenticate", "Bearer"),))

    async def _verified(self, resource: ResourceServer, token: str, cors: Fields) -> Reply | Principal:
        """auth-19, auth-47: before anything is done for the request."""
        protection = resource.protection
        try:
            found = called(protection.verify, token)
            principal = await self._ask("verify", partial(_awaited, found)) if isinstance(found, Awaitable) else found
            if not isinstance(principal, Principal | None):
                raise UsageError(f"verify gives a Principal or None, not {type(principal).__name__}")
        except CannotVerify as error:
            _log.warning("access tokens cannot be verified: %s", _without(token, str(error)))
            why = "the access token cannot be verified now; try again later"
            return refusal(503, Error(None, INTERNAL_ERROR, why), cors, _LATER)
        except (_AuthenticateTimeout, RunStopped):
            return _cannot_tell(cors)
        except Exception as error:  # noqa: BLE001  # as in `caller`
            # auth-22: whatever an author's function says of a token, the token itself is not for the log.
            _log.error("verify has failed\n%s", _without(token, "".join(traceback.format_exception(error))))
            return _failed(cors)
        # auth-21; a function that remembers what it has found need not look at the time.
        if principal is None or seconds_left(principal) <= 0:
            return resource.unauthorized(cors)
        return protection.granted(principal)

    async def _ask(self, name: str, function: Callable[[], Awaitable[T]]) -> T:
        with trio.move_on_after(self._seconds):
            return await self._workers.call(function, name)
        _log.warning("%s took longer than %g seconds (Limits.authenticate_seconds)", name, self._seconds)
        raise _AuthenticateTimeout

    def forbidden(self, caller: Caller, needed: Sequence[str], cors: Fields, id: Id | None = None) -> Reply | None:
        """Why a request is not served that needs these scopes."""
        if covers(caller, needed):
            return None
        if self._resource is not None:
            return self._resource.insufficient(needed, cors, id)
        why = f"this needs the scopes {' '.join(needed)}, and nobody has any, for the server is not protected (protect)"
        return refusal(403, Error(id, INVALID_REQUEST, why), cors)

    def passed_on(self, headers: Headers) -> Headers:
        """What handlers get to see.  auth-50: a token that they do not have they cannot send elsewhere."""
        return headers if self._resource is None else headers.without("Authorization")


async def _identified(authenticate: Callable[[HttpRequest], Awaitable[str | None]], request: HttpRequest) -> str | None:
    answer = authenticate(request)
    if not isinstance(answer, Awaitable):
        raise UsageError(f"authenticate is an async def; this one returned {type(answer).__name__}")
    return stable_name(await answer)


async def _awaited(found: Awaitable[T]) -> T:
    return await found


def _cannot_tell(cors: Fields) -> Reply:
    return refusal(503, Error(None, INTERNAL_ERROR, "authentication is not available; try again later"), cors, _LATER)


def _without(token: str, text: str) -> str:
    return text.replace(token, "(the token)")


def _failed(cors: Fields) -> Reply:
    return refusal(500, Error(None, INTERNAL_ERROR, "internal error"), cors)
