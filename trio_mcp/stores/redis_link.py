"""One connection to Redis, over coredis (the extra `redis`): calls with a deadline, and pushed messages.

coredis's pool is not used: a call that is cancelled while it connects would take one of its places for ever.  One
connection serves all calls, because Redis does one thing at a time anyway: beside rows of 1 MB a call waits for 4 ms,
beside rows of 10 MB for 90 ms.  A call is not tried again, since it may have happened.

coredis logs a traceback for each attempt to connect that fails or is given up.  `StoreFailed` says the same in a line.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from contextvars import ContextVar
from math import inf
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import trio
from anyio import BrokenResourceError, ClosedResourceError
from coredis.connection import (
    BaseConnection,
    TCPConnection,
    TCPLocation,
    UnixDomainSocketConnection,
    UnixDomainSocketLocation,
)
from coredis.exceptions import ConnectionError as RedisConnectionError
from coredis.exceptions import MovedError, NoScriptError, ReadOnlyError, RedisError

from trio_mcp.core.errors import UsageError
from trio_mcp.stores.redis import RedisSilent
from trio_mcp.stores.rows import StoreFailed

__all__ = ["DEADLINE", "MakeLink", "RedisLink", "read_redis_url"]

DEADLINE: Final = 0.95
"""Seconds for each call: its caller is told within a second that Redis is away."""
# Its parts.  The loop turns at least once in each, so a loop that is late does not take Redis for dead.  coredis needs
# a few turns for each call, and one more for each other call that it sends together with it.
_PARTS: Final = (0.35, *[0.01] * 60)
_CONNECT: Final = 10.0  # seconds for the handshake, which is several calls; those that wait for it fail earlier
_PENDING: Final = 1024  # calls without an answer; most of them were cancelled, and wait in a buffer
_BROKEN: Final = (RedisConnectionError, NoScriptError, ReadOnlyError)  # a new connection may help
_PORT: Final = 6379

_quiet = ContextVar("_quiet", default=False)
logging.getLogger("coredis").addFilter(lambda record: not _quiet.get())


class RedisLink:
    """A connection to Redis, from the attempt to its end.  `script` is loaded first."""

    def __init__(self, connection: BaseConnection, where: str, script: bytes) -> None:
        self.moved_to: tuple[str, int] | None = None
        """The node of the Redis Cluster that has the key of a call which failed."""
        self._connection = connection
        self._where = where
        self._script = script
        self._error: RedisError | None = None
        self._ready = trio.Event()
        self._scope = trio.CancelScope()
        connection.register_connect_callback(self._load)

    async def run(self) -> None:
        """Connect, and serve the connection until it ends."""
        _quiet.set(True)  # for this task
        self._scope.deadline = trio.current_time() + _CONNECT
        try:
            with self._scope:
                await self._connection.run(task_status=self)
        except RedisError as error:
            self._error = error
        finally:
            self.started()

    async def _load(self, connection: BaseConnection) -> None:
        await connection.create_request(b"SCRIPT LOAD", self._script)

    def started(self, value: object = None) -> None:
        """The handshake is over; coredis calls this."""
        self._scope.deadline = inf
        self._ready.set()

    @property
    def usable(self) -> bool:
        """Whether new calls may use it: it is open, or about to be."""
        if self._scope.cancel_called or self._connection.statistics.requests_pending > _PENDING:
            return False
        return self._connection.usable or not self._ready.is_set()

    def drop(self) -> None:
        """End the connection.  Calls that wait for an answer fail."""
        self._scope.cancel()

    async def connected(self) -> None:
        """Wait for the handshake.  Raises `StoreFailed`."""
        await self._ready.wait()
        if self._error is not None:
            raise self._failed(self._error) from self._error

    async def call(self, command: bytes, *arguments: str | bytes | int) -> Any:
        """Send a command, and return its answer.

        Raises `StoreFailed`, and `RedisSilent` after `DEADLINE` seconds.
        """
        request = None
        try:
            for seconds in _PARTS:
                with trio.move_on_after(seconds):
                    await self.connected()
                    if request is None:
                        request = self._connection.create_request(command, *arguments)
                    return await request
        except Exception as error:  # the exception that ends the reader of coredis reaches each call, and may be any
            if isinstance(error, MovedError):
                self.moved_to = error.node_addr
            elif isinstance(error, _BROKEN) or not isinstance(error, RedisError):
                self.drop()
            raise self._failed(error) from error
        if request is not None:
            self.drop()  # what waits in its buffer must not wait until Redis is back
        raise RedisSilent(f"{self._where} has not answered within {DEADLINE} seconds")

    def _failed(self, error: Exception) -> StoreFailed:
        reason: BaseException = error
        while reason.__cause__ is not None:  # coredis says that it cannot connect, and its cause says why
            reason = reason.__cause__
        return StoreFailed(f"{self._where} does not work: {str(reason) or repr(reason)}")

    def tell(self, command: bytes, *arguments: bytes) -> None:
        """Send a command that has no answer, if the connection is open."""
        with suppress(RedisError, BrokenResourceError, ClosedResourceError):  # of coredis, and of its buffer
            self._connection.send_command(command, *arguments)

    async def pushed(self) -> AsyncIterator[Any]:
        """The messages that Redis sends by itself.  Ends with the connection."""
        with suppress(RedisError):
            async for each in self._connection.push_messages:
                yield each


class MakeLink(Protocol):
    def __call__(self, script: bytes, node: tuple[str, int] | None = None) -> RedisLink:
        """Make a link to the server of a URL, or to another node of its cluster."""


def read_redis_url(url: str, ssl_context: ssl.SSLContext | None) -> tuple[MakeLink, str]:
    """Read a URL: what makes links, and the URL without its user and password.

    No error repeats the URL, because it may have a password.
    """
    example = "write redis://localhost:6379/0, rediss://user:password@host:6379 or unix:///run/redis.sock"
    try:
        parts = urlsplit(url + "")  # which bytes are not
        port, query = parts.port or _PORT, parse_qs(parts.query, strict_parsing=bool(parts.query))
    except (TypeError, ValueError, AttributeError):
        raise UsageError(f"RedisStore needs a URL; {example}") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise UsageError(f"RedisStore has no scheme {parts.scheme!r}; {example}")
    if ssl_context is not None and parts.scheme != "rediss":
        raise UsageError("ssl_context is for rediss:// URLs; with redis:// nothing is encrypted")
    database = query.pop("db", ["0"])[-1] if parts.scheme == "unix" else parts.path.strip("/") or "0"
    if query or not database.isdecimal():
        raise UsageError(f"RedisStore takes a database number as its only option; {example}")
    options: dict[str, Any] = {
        "username": None if parts.username is None else unquote(parts.username),
        "password": None if parts.password is None else unquote(parts.password),
        "db": int(database),
        "connect_timeout": _CONNECT,
    }
    if parts.scheme == "rediss":
        options["ssl_context"] = ssl_context or ssl.create_default_context()
    host, path = parts.hostname or "localhost", unquote(parts.path)
    shown = f"[{host}]" if ":" in host else host
    where = f"unix://{path}" if parts.scheme == "unix" else f"{parts.scheme}://{shown}:{port}/{database}"

    def make_link(script: bytes, node: tuple[str, int] | None = None) -> RedisLink:
        connection: BaseConnection
        if parts.scheme == "unix" and node is None:
            connection = UnixDomainSocketConnection(UnixDomainSocketLocation(path), **options)
        else:
            connection = TCPConnection(TCPLocation(*(node or (host, port))), **options)
        return RedisLink(connection, where if node is None else f"{node[0]}:{node[1]}", script)

    return make_link, where
