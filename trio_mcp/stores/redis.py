"""The store in Redis: processes on several machines share it.

Redis does the work: each method is one step of `redis.lua`, which Redis runs as a whole.

All keys begin with ``trio_mcp:1:{NAME}``.  In a Redis Cluster they share the hash tag NAME, and so one node, because a
step changes a row, its indexes and the bytes of its owner together.  Any other node names that one.  After the prefix:

| Key | Value |
|---|---|
| ``row:…``, ``body:…`` | the fields of a row, and its body |
| ``owned:…``, ``changed``, ``expiring`` | rows of an owner by age, all rows by change, rows and streams by expiry |
| ``numbers``, ``bytes``, ``clock`` | rows of each kind, bytes of each owner, the number of the last change |
| ``held:…``, ``holders:…``, ``leases`` | rows that a process holds, the processes, their leases |
| ``stream:…``, ``events:…`` | the fields of a stream, and its events (a Redis Stream) |
| ``channel:…``, ``changes`` | channels of messages, and of the number of the last change |

Two things could be left to Redis alone, and are not:

- *A lease in place of a consumer group.*  XAUTOCLAIM would need a renewal for each task, not for each process, and the
  list of pending entries would be a second truth beside the holder in the row.  `claim` is one step, so each row is
  taken over once.  The version of a row is the fencing number: a process that slept has an old one.
- *A sweep beside the TTL.*  Redis tells nobody that a key has expired, so the bytes of its owner would never be given
  back.  Bodies and events also have a TTL, an hour later, for a store that no process sweeps any more.

One connection serves all calls, each with a deadline (`redis_link.py`).  Another one has the messages; it is opened
again when it breaks, and then the receivers get a `Resync`.
"""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import trio

from trio_mcp.core.errors import UsageError, check_amount
from trio_mcp.stores.channels import Channels, Receiver
from trio_mcp.stores.rows import Row, Store, StoreFailed, StoreFull

if TYPE_CHECKING:
    from trio_mcp.stores.redis_link import RedisLink

__all__ = ["RedisSilent", "RedisStore"]

_AT_ONCE: Final = 32  # calls that wait for an answer, each with one body; more of them are no faster
_WAIT: Final = 0.95  # seconds for a connection of messages
_AGAIN: Final = 0.5  # seconds until the connection of messages is opened again
_IDLE: Final = 10.0  # seconds until it is tried; a server that has gone does not say so
_OPENING: Final = 5.0  # seconds for the first such connection
_CLOSING: Final = 2.0
_SCRIPT: Final = Path(__file__).with_name("redis.lua").read_bytes()
_SHA: Final = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest()


class RedisSilent(StoreFailed):
    """Redis has not answered in time."""


class RedisStore(Store):
    """A store in Redis 7 or later: ``RedisStore("redis://localhost:6379/0")``.

    The URL may be ``redis://``, ``rediss://`` (TLS), or ``unix:///run/redis.sock?db=0``, with ``user:password@`` before
    the host; special characters in the password are written as ``%2F``.  With TLS the certificate is verified, by
    `ssl_context` if one is given.  `name` separates stores that share a database.  Redis must keep its data itself:
    ``appendonly yes``, ``maxmemory-policy noeviction``.

    Raises `UsageError` for a bad URL or if coredis is missing.  Its methods raise `StoreFailed` within a second when
    Redis is away.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "default",
        max_bytes: float = 1024 * 1024 * 1024,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        try:
            from trio_mcp.stores.redis_link import read_redis_url
        except ImportError:
            raise UsageError("RedisStore needs coredis: pip install 'trio_mcp[redis]'") from None
        check_amount("max_bytes", max_bytes, "bytes")
        if not name or set(name) & set("{}"):
            raise UsageError(f"name must be a word without braces, got {name!r}")
        self._make_link, self._where = read_redis_url(url, ssl_context)
        self._prefix = f"trio_mcp:1:{{{name}}}"
        self._changes = f"{self._prefix}:changes".encode()
        self._max_bytes = max_bytes
        self._opened = 0
        self._opening = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._closed = trio.Event()
        self._calls = 0  # under way
        self._answered = 0
        self._silences = 0  # calls in whose time Redis has answered none
        self._turns = trio.lowlevel.ParkingLot()
        self._link: RedisLink | None = None
        self._listener: RedisLink | None = None
        self._listening = trio.Event()
        self._channels = Channels()
        self._more = trio.Event()

    def __repr__(self) -> str:
        return f"RedisStore({self._where!r})"

    # Opening and closing.

    async def __aenter__(self) -> RedisStore:
        """Connect."""
        async with self._opening:
            if not self._opened:
                opened = trio.Event()
                # The connections are in no nursery of a block, because the block that was first may end first.
                trio.lowlevel.spawn_system_task(self._run, opened, name=f"connections of {self!r}")
                with trio.CancelScope(shield=True):  # it is there at once, and must be closed
                    await opened.wait()
                try:
                    await self._renew_link().connected()
                    await self._step("changes", -1)
                    await self._get_listener(_OPENING)
                except BaseException:
                    await self._close()
                    raise
            self._opened += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect with the last block."""
        with trio.CancelScope(shield=True):
            async with self._opening:
                self._opened -= 1
                if not self._opened:
                    await self._close()

    async def _close(self) -> None:
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()
        self._nursery = self._link = self._listener = None
        self._listening = trio.Event()
        with trio.CancelScope(deadline=trio.current_time() + _CLOSING, shield=True):
            await self._closed.wait()

    async def _run(self, opened: trio.Event) -> None:
        self._closed = closed = trio.Event()
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._listen)
                opened.set()
        finally:
            closed.set()

    def _open_link(self, node: tuple[str, int] | None = None) -> RedisLink:
        if self._nursery is None:
            raise UsageError(f"{self!r} is not open; use it inside `async with`")
        link = self._make_link(_SCRIPT, node)
        self._nursery.start_soon(link.run)
        return link

    def _renew_link(self, node: tuple[str, int] | None = None) -> RedisLink:
        if self._link is not None:
            self._link.drop()
        self._link = self._open_link(node)
        return self._link

    # Calls.

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """A block for one of `_AT_ONCE` calls.  Those that wait for theirs have no clock: there may be thousands.

        Raises `StoreFailed` if Redis answers none of the calls that are under way.
        """
        silences, parked = self._silences, False
        while self._calls == _AT_ONCE or (self._turns and not parked):
            parked = True
            await self._turns.park()
            if self._silences != silences:
                raise StoreFailed(f"{self!r} has not answered any of {_AT_ONCE} calls")
        self._calls += 1
        answered = self._answered
        try:
            yield
        except RedisSilent:
            if self._answered == answered:
                self._silences += 1
                self._turns.unpark_all()
            raise
        finally:
            self._calls -= 1
            self._turns.unpark()

    async def _step(self, name: str, *arguments: str | bytes | float) -> Any:
        """Run a step of the script.  Raises `StoreFull` if it says so."""
        # As bytes, because coredis ends the connection of all calls at text that is no Unicode.
        texts = [each if isinstance(each, str | bytes) else repr(each) for each in arguments]
        given = [each.encode() if isinstance(each, str) else each for each in texts]
        async with self._turn():
            link = self._link
            if link is None or not link.usable:
                link = self._renew_link()
            try:
                result = await link.call(b"EVALSHA", _SHA, 1, self._prefix, name, *given)
            except StoreFailed:
                if link.moved_to is None:
                    raise
                there = self._link
                if there is None or there is link:  # this is the first call that was told so
                    there = self._renew_link(link.moved_to)
                result = await there.call(b"EVALSHA", _SHA, 1, self._prefix, name, *given)
            self._answered += 1
        if isinstance(result, bytes):
            raise StoreFull(result.decode())
        return result

    async def add(self, row: Row, *, each: float = inf, total: float = inf) -> bool:
        fields = row.kind, row.key, row.body, row.owner, row.created, row.expires, row.holder
        return bool(await self._step("add", *fields, each, total, self._max_bytes))

    async def get(self, kind: str, key: str) -> Row | None:
        found = await self._step("get", kind, key)
        return None if found is None else _row(found)

    async def replace(self, row: Row) -> bool:
        fields = row.kind, row.key, row.version, row.body, row.expires, row.holder
        return bool(await self._step("replace", *fields, self._max_bytes))

    async def delete(self, kind: str, key: str) -> bool:
        return bool(await self._step("delete", kind, key))

    async def list(self, kind: str, owner: str, after: tuple[float, str], limit: int) -> Sequence[Row]:
        return [_row(each) for each in await self._step("list", kind, owner, *after, limit)]

    async def sweep(self, now: float) -> int:
        return int(await self._step("sweep", now))

    async def lease(self, holder: str, until: float) -> None:
        await self._step("lease", holder, until)

    async def claim(
        self, kind: str, holder: str, now: float, limit: int, *, known: Collection[str] | None = None
    ) -> Sequence[Row]:
        keys = "" if known is None else json.dumps([*known])
        return [_row(each) for each in await self._step("claim", kind, holder, now, limit, keys)]

    async def changes(self, after: int) -> tuple[int, Sequence[tuple[str, str]]]:
        while True:
            more = self._more
            number, names = await self._step("changes", after)
            if number > after:
                return number, [_kind_and_key(name) for name in names]
            await more.wait()  # also if the connection of messages breaks, and when it is back

    async def append(self, stream: str, body: bytes, *, owner: str, expires: float, max_bytes: int) -> int:
        return int(await self._step("append", stream, body, owner, expires, max_bytes, self._max_bytes))

    async def read(self, stream: str, after: int, limit: int) -> tuple[int, Sequence[tuple[int, bytes]]]:
        oldest, *events = await self._step("read", stream, after, limit)
        return oldest, [(number, body) for number, body in events]

    async def discard(self, stream: str) -> None:
        await self._step("discard", stream)

    async def send(self, channel: str, body: bytes) -> None:
        await self._step("send", channel, body)

    # Messages.

    def _channel(self, name: str) -> bytes:
        return f"{self._prefix}:channel:{name}".encode()

    @asynccontextmanager
    async def receive(self, channels: Sequence[str]) -> AsyncIterator[Receiver]:
        """See `Store`.  Raises `StoreFailed` if Redis is away when the block begins."""
        try:
            with self._channels.open(channels) as receiver:
                listener = await self._get_listener()
                listener.tell(b"SUBSCRIBE", *map(self._channel, channels))
                await listener.call(b"PING")  # answered in order, so Redis has the subscriptions
                yield receiver
        finally:
            gone = [self._channel(name) for name in channels if name not in self._channels]
            if gone and self._listener is not None:
                self._listener.tell(b"UNSUBSCRIBE", *gone)

    async def _get_listener(self, seconds: float = _WAIT) -> RedisLink:
        with trio.move_on_after(seconds):
            while self._listener is None:
                await self._listening.wait()
        if self._listener is None:
            raise StoreFailed(f"{self!r} has no connection for messages")
        return self._listener

    async def _listen(self) -> None:
        """Hand out messages, and connect again when the connection breaks."""
        while True:
            link = self._open_link()
            with suppress(StoreFailed):  # each call says so
                await link.connected()
                link.tell(b"SUBSCRIBE", self._changes, *map(self._channel, self._channels))
                await link.call(b"PING")
                self._listener = link
                self._listening.set()
                self._channels.resync()
                self._wake()
                await self._hand_out(link)
            self._listener, self._listening = None, trio.Event()
            self._wake()  # `changes` finds out whether Redis is away
            await trio.sleep(_AGAIN)

    async def _hand_out(self, link: RedisLink) -> None:
        """Hand out messages until the connection breaks; then raises `StoreFailed`."""
        prefix = self._channel("")
        while True:
            with trio.move_on_after(_IDLE):
                async for pushed in link.pushed():
                    match pushed:
                        case [b"message", self._changes, _]:
                            self._wake()
                        case [b"message", channel, body]:
                            self._channels.deliver(channel.removeprefix(prefix).decode(), body)
            await link.call(b"PING")

    def _wake(self) -> None:
        self._more.set()
        self._more = trio.Event()


def _row(found: Sequence[Any]) -> Row:
    kind, key, body, owner, created, expires, holder, version = found
    return Row(
        *(kind.decode(), key.decode(), body, owner.decode()),
        *(float(created), float(expires), holder.decode(), int(version)),
    )


def _kind_and_key(name: bytes) -> tuple[str, str]:
    length, _, both = name.partition(b":")
    return both[: int(length)].decode(), both[int(length) :].decode()
