"""The store in an SQLite file: it survives its process, and several processes of one machine may share it.

`sqlite_file` has the file, its connections and its writes.  A process that has a lease also locks a file beside the
database.  The kernel frees the lock when the process dies, so its rows can be claimed at once, before the lease has
ended.

Another process is noticed by a look at the number of the last change, ten times a second, while `changes` waits.  One
of the receivers looks for new messages as often, for all of them.  Messages are a table that keeps the last `_LOG`
bytes; a receiver that is further behind has lost some.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from math import inf
from types import TracebackType

import trio

from trio_mcp.core.errors import UsageError, check_amount
from trio_mcp.stores.channels import Channels, Receiver
from trio_mcp.stores.rows import EVENT, ROW, SPARE, Row, Store, StoreFailed, StoreFull, check_room
from trio_mcp.stores.sqlite_file import SQLiteFile

__all__ = ["SQLiteStore"]

_LAYOUT = 2
_LOOK = 0.1  # seconds between two looks for changes of other processes; a person does not notice it
_SWEPT = 500  # rows in one sweep; other writers wait for it
_READ = 1000  # changed rows in one answer
_LOG = 4 * 1024 * 1024  # bytes of messages; those of 0.1 seconds are far fewer
_AGAIN = 1.0  # seconds until a receiver looks again into a file that does not work

# The number and the bytes of rows are counted by triggers, for each kind and for each owner of a kind, because a count
# of all rows would make each new row dearer than the last.
_SCHEMA = """CREATE TABLE rows (
    kind TEXT NOT NULL, key TEXT NOT NULL, owner TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
    holder TEXT NOT NULL, version INTEGER NOT NULL, changed INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (kind, key)
);
CREATE INDEX rows_by_owner ON rows (kind, owner, created, key);
CREATE INDEX rows_by_expiry ON rows (expires);
CREATE INDEX rows_by_holder ON rows (kind, holder) WHERE holder != '';
CREATE INDEX rows_by_change ON rows (changed);
CREATE TABLE counts (scope TEXT PRIMARY KEY, number INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE leases (holder TEXT PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE clock (number INTEGER NOT NULL);
INSERT INTO clock VALUES (0);
CREATE TABLE streams (
    name TEXT PRIMARY KEY, owner TEXT NOT NULL, expires REAL NOT NULL, number INTEGER NOT NULL, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX streams_by_expiry ON streams (expires);
CREATE TABLE events (stream TEXT NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (stream, number));
CREATE TABLE messages (place INTEGER PRIMARY KEY, channel TEXT NOT NULL, body BLOB NOT NULL);
INSERT INTO messages VALUES (0, '', x'');
CREATE TRIGGER added AFTER INSERT ON rows BEGIN
    INSERT INTO counts VALUES ('all', 1, length(new.body)), ('kind ' || new.kind, 1, 0),
            ('rows ' || new.kind || ' ' || new.owner, 1, 0), ('bytes ' || new.owner, 1, length(new.body))
        ON CONFLICT DO UPDATE SET number = number + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER grown AFTER UPDATE OF body ON rows BEGIN
    UPDATE counts SET bytes = bytes + length(new.body) - length(old.body)
        WHERE scope IN ('all', 'bytes ' || new.owner);
END;
CREATE TRIGGER removed AFTER DELETE ON rows BEGIN
    UPDATE counts SET number = number - 1 WHERE scope IN ('kind ' || old.kind, 'rows ' || old.kind || ' ' || old.owner);
    UPDATE counts SET number = number - 1, bytes = bytes - length(old.body)
        WHERE scope IN ('all', 'bytes ' || old.owner);
    DELETE FROM counts WHERE number = 0 AND scope IN ('rows ' || old.kind || ' ' || old.owner, 'bytes ' || old.owner);
END;
CREATE TRIGGER begun AFTER INSERT ON streams BEGIN
    INSERT INTO counts VALUES ('all', 1, new.bytes), ('bytes ' || new.owner, 1, new.bytes)
        ON CONFLICT DO UPDATE SET number = number + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER appended AFTER UPDATE OF bytes ON streams BEGIN
    UPDATE counts SET bytes = bytes + new.bytes - old.bytes WHERE scope IN ('all', 'bytes ' || new.owner);
END;
CREATE TRIGGER discarded AFTER DELETE ON streams BEGIN
    DELETE FROM events WHERE stream = old.name;
    UPDATE counts SET number = number - 1, bytes = bytes - old.bytes WHERE scope IN ('all', 'bytes ' || old.owner);
    DELETE FROM counts WHERE number = 0 AND scope = 'bytes ' || old.owner;
END;
"""
_COLUMNS = "kind, key, body, owner, created, expires, holder, version"


class SQLiteStore(Store):
    """A store in an SQLite file: ``SQLiteStore("tasks.db")``.

    Raises `UsageError` on opening if the file belongs to another program or to a newer version of this one, and
    `StoreFailed` if SQLite cannot use it.  The file must be on a local disk: SQLite cannot lock files of a network.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: float = 8 * 1024 * 1024 * 1024) -> None:
        check_amount("max_bytes", max_bytes, "bytes")
        if os.fspath(path) in ("", ":memory:"):
            raise UsageError("SQLiteStore needs the path of a file; write MemoryStore() for a store in memory")
        self._path = os.fspath(path)
        self._file = SQLiteFile(self._path, repr(self), _SCHEMA, _LAYOUT)
        self._max_bytes = max_bytes
        self._channels = Channels()
        self._looking = trio.Lock()
        self._place = 0  # the last message that was delivered to the receivers
        self._sent = trio.Event()

    def __repr__(self) -> str:
        return f"SQLiteStore({self._path!r})"

    async def __aenter__(self) -> SQLiteStore:
        """Open the file, and make it if it does not exist."""
        await self._file.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file with the last block; waits for a write that is at work."""
        await self._file.close()

    async def add(self, row: Row, *, each: float = inf, total: float = inf) -> bool:
        def job(connection: sqlite3.Connection) -> bool:
            if connection.execute("SELECT 1 FROM rows WHERE kind = ? AND key = ?", (row.kind, row.key)).fetchone():
                return False
            if _count(connection, f"rows {row.kind} {row.owner}")[0] >= each:
                raise StoreFull("each")
            if _count(connection, f"kind {row.kind}")[0] >= total:
                raise StoreFull("total")
            self._check_room(connection, ROW + len(row.body), row.owner)
            values = (row.kind, row.key, row.body, row.owner, row.created, row.expires, row.holder, _tick(connection))
            connection.execute(f"INSERT INTO rows ({_COLUMNS}, changed) VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?)", values)
            return True

        return await self._file.write(job)

    def _check_room(self, connection: sqlite3.Connection, growth: int, owner: str) -> None:
        (rows, owned), (every, held) = _count(connection, f"bytes {owner}"), _count(connection, "all")
        check_room(growth, ROW * rows + owned, ROW * every + held, owner, self._max_bytes)

    async def get(self, kind: str, key: str) -> Row | None:
        found = await self._file.query(f"SELECT {_COLUMNS} FROM rows WHERE kind = ? AND key = ?", kind, key)
        return Row(*found[0]) if found else None

    async def replace(self, row: Row) -> bool:
        def job(connection: sqlite3.Connection) -> bool:
            found = connection.execute(
                "SELECT owner, length(body) FROM rows WHERE kind = ? AND key = ? AND version = ?",
                (row.kind, row.key, row.version),
            ).fetchone()
            if found is None:
                return False
            owner, length = found
            if len(row.body) - length > SPARE:
                self._check_room(connection, len(row.body) - length, owner)
            connection.execute(
                "UPDATE rows SET body = ?, expires = ?, holder = ?, version = version + 1, changed = ? "
                "WHERE kind = ? AND key = ?",
                (row.body, row.expires, row.holder, _tick(connection), row.kind, row.key),
            )
            return True

        return await self._file.write(job)

    async def delete(self, kind: str, key: str) -> bool:
        return await self._file.execute("DELETE FROM rows WHERE kind = ? AND key = ?", kind, key) > 0

    async def list(self, kind: str, owner: str, after: tuple[float, str], limit: int) -> Sequence[Row]:
        query = (
            f"SELECT {_COLUMNS} FROM rows WHERE kind = ? AND owner = ? AND (created, key) > (?, ?) "
            "ORDER BY created, key LIMIT ?"
        )

        def job(connection: sqlite3.Connection) -> Sequence[Row]:
            found = connection.execute(query, (kind, owner, *after, limit))  # one long body at a time is in memory
            return [Row(kind, key, body.partition(b"\n")[0], *rest) for kind, key, body, *rest in found]

        return await self._file.read(job)

    async def sweep(self, now: float) -> int:
        removed = 0
        for table, name in ("rows", "rowid"), ("streams", "name"):
            expired = f"SELECT {name} FROM {table} WHERE expires <= ? ORDER BY expires LIMIT ?"
            if removed < _SWEPT and await self._file.query(expired, now, 1):  # no write for most sweeps
                removed += await self._file.execute(
                    f"DELETE FROM {table} WHERE {name} IN ({expired})", now, _SWEPT - removed
                )
        return removed

    async def lease(self, holder: str, until: float) -> None:
        if until > -inf:
            self._file.lock(holder)
        await self._file.execute("INSERT OR REPLACE INTO leases VALUES (?, ?)", holder, until)
        if until == -inf:
            self._file.unlock(holder)

    async def claim(
        self, kind: str, holder: str, now: float, limit: int, *, known: Collection[str] | None = None
    ) -> Sequence[Row]:
        names = (
            "SELECT kind, key FROM rows WHERE kind = ? AND holder != '' AND holder != ? AND "
            "NOT EXISTS (SELECT 1 FROM leases WHERE leases.holder = rows.holder AND until > ?) LIMIT ?"
        )
        claimed = (
            "UPDATE rows SET holder = ?, version = version + 1, changed = ? WHERE kind = ? AND key = ? "
            f"RETURNING {_COLUMNS}"
        )
        for (other,) in await self._file.query("SELECT holder FROM leases WHERE holder != ?", holder):
            if self._file.is_dead(other):
                await self._file.execute("DELETE FROM leases WHERE holder = ?", other)
        if known is None and not await self._file.query(names, kind, holder, now, 1):
            return []

        def job(connection: sqlite3.Connection) -> Sequence[Row]:
            rows, free = [], connection.execute(names, (kind, holder, now, limit)).fetchall()
            if known is not None:
                own = connection.execute("SELECT kind, key FROM rows WHERE kind = ? AND holder = ?", (kind, holder))
                free += [name for name in own if name[1] not in known]
            for name in free[:limit]:
                rows += connection.execute(claimed, (holder, _tick(connection), *name)).fetchall()
            connection.execute("DELETE FROM leases WHERE until <= ?", (now,))
            return [Row(*each) for each in rows]

        return await self._file.write(job)

    async def changes(self, after: int) -> tuple[int, Sequence[tuple[str, str]]]:
        if after < 0:
            return (await self._file.query("SELECT number FROM clock"))[0][0], ()
        query = "SELECT changed, kind, key FROM rows WHERE changed > ? ORDER BY changed LIMIT ?"
        while True:
            more = self._file.written
            if found := await self._file.query(query, after, _READ):
                return found[-1][0], [(kind, key) for _, kind, key in found]
            with trio.move_on_after(_LOOK):
                await more.wait()

    async def append(self, stream: str, body: bytes, *, owner: str, expires: float, max_bytes: int) -> int:
        def job(connection: sqlite3.Connection) -> int:
            found = connection.execute("SELECT owner, number, bytes FROM streams WHERE name = ?", (stream,)).fetchone()
            charged, number, held = found or (owner, 0, 0)
            number, size = number + 1, held + EVENT + len(body)
            dropped = 0
            oldest = "SELECT number, length(body) FROM events WHERE stream = ? ORDER BY number"
            with closing(connection.execute(oldest, (stream,))) as events:  # else it is open as long as a `StoreFull`
                while size > max_bytes:
                    dropped, length = events.fetchone() or (number, len(body))
                    size -= EVENT + length
            self._check_room(connection, size - held + (0 if found else ROW), charged)
            connection.execute(
                "INSERT INTO streams VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "expires = max(expires, excluded.expires), number = excluded.number, bytes = excluded.bytes",
                (stream, charged, expires, number, size),
            )
            connection.execute("INSERT INTO events VALUES (?, ?, ?)", (stream, number, body))
            if dropped:
                connection.execute("DELETE FROM events WHERE stream = ? AND number <= ?", (stream, dropped))
            _send(connection, stream, b"")
            return number

        appended = await self._file.write(job)
        self._sent.set()
        return appended

    async def read(self, stream: str, after: int, limit: int) -> tuple[int, Sequence[tuple[int, bytes]]]:
        def job(connection: sqlite3.Connection) -> tuple[int, Sequence[tuple[int, bytes]]]:
            connection.execute("BEGIN")  # both queries see the same moment
            try:
                oldest = connection.execute(
                    "SELECT ifnull((SELECT min(number) FROM events WHERE stream = name), number + 1) "
                    "FROM streams WHERE name = ?",
                    (stream,),
                ).fetchone()
                events = connection.execute(
                    "SELECT number, body FROM events WHERE stream = ? AND number > ? ORDER BY number LIMIT ?",
                    (stream, after, limit),
                ).fetchall()
            finally:
                connection.execute("ROLLBACK")
            return (oldest[0] if oldest else 0), events

        return await self._file.read(job)

    async def discard(self, stream: str) -> None:
        await self._file.execute("DELETE FROM streams WHERE name = ?", stream)

    async def send(self, channel: str, body: bytes) -> None:
        await self._file.write(partial(_send, channel=channel, body=body))
        self._sent.set()

    @asynccontextmanager
    async def receive(self, channels: Sequence[str]) -> AsyncIterator[Receiver]:
        last = await self._file.read(_last)
        if self._channels:
            await self._look()  # older messages go to those that receive already
        else:
            self._place = last
        with self._channels.open(channels, self._look_on) as receiver:
            yield receiver

    async def _look_on(self) -> None:
        """Look for messages until this is cancelled; one receiver looks for all."""
        async with self._looking:
            while True:
                self._sent = trio.Event()
                try:
                    await self._look()
                except StoreFailed:  # each write says why
                    await trio.sleep(_AGAIN)
                    self._channels.resync()
                with trio.move_on_after(_LOOK):
                    await self._sent.wait()

    async def _look(self) -> None:
        """Deliver the messages that have been sent since the last look."""
        after = self._place
        found = await self._file.query(
            "SELECT place, channel, body FROM messages WHERE place > ? ORDER BY place LIMIT ?", after, _READ
        )
        if after != self._place:
            return  # another look was faster
        for place, channel, body in found:
            if place - _size(channel, body) > self._place:
                self._channels.resync()
            self._place = place
            self._channels.deliver(channel, body)


def _tick(connection: sqlite3.Connection) -> int:
    """The number of the next change."""
    number: int = connection.execute("UPDATE clock SET number = number + 1 RETURNING number").fetchone()[0]
    return number


def _count(connection: sqlite3.Connection, scope: str) -> tuple[int, int]:
    """Rows and bytes of a scope, as the triggers count them."""
    query = "SELECT number, bytes FROM counts WHERE scope = ?"
    found: tuple[int, int] | None = connection.execute(query, (scope,)).fetchone()
    return found or (0, 0)


def _last(connection: sqlite3.Connection) -> int:
    """The place of the last message.  Places count bytes."""
    place: int = connection.execute("SELECT max(place) FROM messages").fetchone()[0]
    return place


def _size(channel: str, body: bytes) -> int:
    return EVENT + len(channel.encode()) + len(body)


def _send(connection: sqlite3.Connection, channel: str, body: bytes) -> None:
    place = _last(connection) + _size(channel, body)
    connection.execute("INSERT INTO messages VALUES (?, ?, ?)", (place, channel, body))
    connection.execute("DELETE FROM messages WHERE place <= ? AND place < ?", (place - _LOG, place))
