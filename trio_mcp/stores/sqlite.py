"""The store in an SQLite file: it survives its process, and several processes of one machine may share it.

A write returns when SQLite has committed it to the log (WAL) and synced the log, so a process that is killed at any
moment has lost no write that returned.  All calls of `sqlite3` run in worker threads, at most one that writes and one
that reads.  Writes that wait for the writer are committed together: one sync for all of them.

A process that has a lease also locks a file beside the database.  The kernel frees the lock when the process dies, so
its rows can be claimed at once, before the lease has ended.

Two processes wait for each other, for at most `_BUSY` seconds from the moment at which a call has found the file
locked.  Then all calls that wait fail, and later ones fail at once until the lock is gone.  Another process is noticed
by a look at the number of the last change, ten times a second, while `changes` waits.  One of the receivers looks for
new messages as often, for all of them.  Messages are a table that keeps the last `_LOG` bytes; a receiver that is
further behind has lost some.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from math import inf
from types import TracebackType
from typing import Any, Generic, TypeVar

import attrs
import trio

from trio_mcp.core.errors import UsageError, check_amount
from trio_mcp.stores.channels import Channels, Receiver
from trio_mcp.stores.rows import EVENT, ROW, SPARE, Row, StoreFailed, StoreFull, check_room

__all__ = ["SQLiteStore"]

T = TypeVar("T")

_LAYOUT = 2
_BUSY = 5.0  # seconds; a commit takes milliseconds, and a hundred processes may be in the queue
_TRY = 0.25  # seconds of it that SQLite waits at once; a call that is cancelled must wait for that
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


@attrs.define(eq=False)
class _Write(Generic[T]):
    """A write that waits for the writer, and its outcome."""

    job: Callable[[sqlite3.Connection], T]
    given_up: bool = False  # cancelled while another task waits to commit it
    done: bool = False
    result: T | None = None
    error: BaseException | None = None


class _Locked(StoreFailed):
    """Another process has locked the file."""


class SQLiteStore:
    """A store in an SQLite file: ``SQLiteStore("tasks.db")``.

    Raises `UsageError` on opening if the file belongs to another program or to a newer version of this one, and
    `StoreFailed` if SQLite cannot use it.  The file must be on a local disk: SQLite cannot lock files of a network.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: float = 8 * 1024 * 1024 * 1024) -> None:
        check_amount("max_bytes", max_bytes, "bytes")
        if os.fspath(path) in ("", ":memory:"):
            raise UsageError("SQLiteStore needs the path of a file; write MemoryStore() for a store in memory")
        self._path = os.fspath(path)
        self._file = os.path.abspath(self._path)  # the program may change its directory
        self._identity: tuple[int, int] | None = None
        self._max_bytes = max_bytes
        self._opened = 0
        self._opening = trio.Lock()
        self._threads = trio.CapacityLimiter(2)
        self._reading, self._writing = trio.Lock(), trio.Lock()
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._queue: list[_Write[Any]] = []
        # For writes (True) and for reads: when the file was found locked, and when that was last tried.
        self._locked: dict[bool, tuple[float, float]] = {}
        self._locks: dict[str, int] = {}  # the descriptors of the files that are locked for our leases
        self._more = trio.Event()
        self._channels = Channels()
        self._looking = trio.Lock()
        self._place = 0  # the last message that was delivered to the receivers
        self._sent = trio.Event()

    def __repr__(self) -> str:
        return f"SQLiteStore({self._path!r})"

    # Opening and closing.

    async def __aenter__(self) -> SQLiteStore:
        """Open the file, and make it if it does not exist."""
        async with self._opening:
            if not self._opened:
                writer = await self._in_thread(self._open, True)
                try:
                    self._reader = await self._in_thread(self._open, False)
                except BaseException:
                    writer.close()
                    raise
                self._writer = writer
            self._opened += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file with the last block; waits for a write that is at work."""
        with trio.CancelScope(shield=True):
            async with self._opening:
                self._opened -= 1
                if self._opened:
                    return
                async with self._writing, self._reading:
                    both = self._reader, self._writer
                    self._reader = self._writer = None
                    for connection in both:
                        await self._in_thread(self._checked(connection).close)
                    for holder in tuple(self._locks):
                        self._unlock(holder)

    def _open(self, first: bool) -> sqlite3.Connection:
        with suppress(FileExistsError):  # for this user alone: results may be secret
            os.close(os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._file, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        try:
            _use_log(connection)
            connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk before it returns
            if first:
                self._make_tables(connection)
                self._identity = self._on_disk()
            connection.execute(f"PRAGMA busy_timeout = {int(1000 * _TRY)}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")  # two processes may open a new file at the same time
        try:
            (layout,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if layout not in (0, _LAYOUT) or (layout == 0 and tables):
                raise UsageError(
                    f"{self._path} is no store of this version of trio_mcp (its layout is {layout}); name another file"
                )
            if layout == 0:
                for statement in re.split(r"\n(?=[CI])", _SCHEMA):  # `executescript` would commit first
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_LAYOUT}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:  # SQLite itself has ended it after some errors
                connection.execute("ROLLBACK")

    def _on_disk(self) -> tuple[int, int]:
        """Tells the file from another one with its name."""
        status = os.stat(self._file)
        return status.st_dev, status.st_ino

    async def _in_thread(self, job: Callable[..., T], *arguments: Any) -> T:
        """Run a job in a thread.  It is not abandoned: its connection could be closed meanwhile."""
        with self._failing():
            return await trio.to_thread.run_sync(partial(job, *arguments), limiter=self._threads)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if not _is_locked(error):
                raise StoreFailed(f"{self!r} does not work: {error}") from error
            raise _Locked(self._why_locked) from error
        except (sqlite3.Error, OSError) as error:
            raise StoreFailed(f"{self!r} does not work: {error}") from error

    # Reading and writing.

    async def _read(self, job: Callable[[sqlite3.Connection], T]) -> T:
        async with self._reading:
            return await self._unless_locked(False, job, self._checked(self._reader))

    async def _unless_locked(self, writes: bool, job: Callable[..., T], *arguments: Any) -> T:
        """Run a job in a thread, again while another process has locked the file.

        The time counts from the first call that found it locked, so calls that wait for each other do not add up.
        """
        while True:
            begun = trio.current_time()
            since, last = self._locked.get(writes, (begun, -inf))
            if begun > last + _BUSY:  # no call has tried for a while
                since = begun
            if since + _BUSY <= begun < last + _TRY:  # another call has just tried in vain
                await trio.lowlevel.checkpoint()
                raise _Locked(self._why_locked)
            try:
                result = await self._in_thread(job, *arguments)
            except _Locked:
                now = trio.current_time()
                self._locked[writes] = since, now
                if now >= since + _BUSY:
                    raise
            else:
                self._locked.pop(writes, None)
                return result

    @property
    def _why_locked(self) -> str:
        return f"another process has locked the file of {self!r} for more than {_BUSY:g} seconds; end its transaction"

    async def _query(self, query: str, *values: Any) -> Sequence[Any]:
        return await self._read(lambda connection: connection.execute(query, values).fetchall())

    def _checked(self, connection: sqlite3.Connection | None) -> sqlite3.Connection:
        if connection is None:
            raise UsageError(f"{self!r} is not open; use it inside `async with`")
        return connection

    async def _write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Commit a write, together with those that wait at the same time."""
        write = _Write(job)
        self._checked(self._writer)
        self._queue.append(write)
        try:
            async with self._writing:
                if not write.done:
                    writer = self._checked(self._writer)
                    batch, self._queue = self._queue, []
                    try:
                        await self._unless_locked(True, self._commit, writer, batch)
                    except StoreFailed as error:
                        for each in batch:
                            if not each.done:
                                each.done, each.error = True, StoreFailed(str(error))
                        raise
                    finally:  # if this task was cancelled before the commit, another one commits
                        self._queue[:0] = [each for each in batch if not (each.done or each.given_up)]
        finally:
            write.given_up = not write.done  # cancelled while it waited: it must not happen later
            if write in self._queue:
                self._queue.remove(write)
        if write.error is not None:
            raise write.error
        self._more.set()
        self._more = trio.Event()
        return write.result  # type: ignore[return-value]  # the job has returned it

    async def _execute(self, statement: str, *values: Any) -> int:
        """Write with one statement, and return the number of rows that it changed."""
        return await self._write(lambda connection: connection.execute(statement, values).rowcount)

    def _commit(self, connection: sqlite3.Connection, batch: Sequence[_Write[Any]]) -> None:
        """Run the jobs in one transaction.

        A job without room, or with text that is no Unicode, undoes its own part only: the others are of other clients.
        """
        committed = False
        self._check_file()
        connection.execute("BEGIN IMMEDIATE")  # raises if another process has locked the file; then no job was run
        try:
            for write in batch:
                if write.given_up:
                    continue
                connection.execute("SAVEPOINT job")
                try:
                    write.result = write.job(connection)
                except (StoreFull, UnicodeEncodeError) as error:
                    write.error = error
                    connection.execute("ROLLBACK TO job")
                connection.execute("RELEASE job")
            connection.execute("COMMIT")
            committed = True
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            for write in batch:
                write.done = True
                if not committed:
                    write.error = StoreFailed("the store does not work: a commit has failed")

    def _check_file(self) -> None:
        """Raise `OSError` if the file has been deleted or replaced: SQLite would go on to write into the old one."""
        with suppress(FileNotFoundError):
            if self._on_disk() == self._identity:
                return
        raise FileNotFoundError("the file has been deleted or replaced; start the program again")

    # The methods of `Store`.

    async def add(self, row: Row, *, each: float = inf, total: float = inf) -> bool:
        """See `Store`."""

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

        return await self._write(job)

    def _check_room(self, connection: sqlite3.Connection, growth: int, owner: str) -> None:
        (rows, owned), (every, held) = _count(connection, f"bytes {owner}"), _count(connection, "all")
        check_room(growth, ROW * rows + owned, ROW * every + held, owner, self._max_bytes)

    async def get(self, kind: str, key: str) -> Row | None:
        """See `Store`."""
        found = await self._query(f"SELECT {_COLUMNS} FROM rows WHERE kind = ? AND key = ?", kind, key)
        return Row(*found[0]) if found else None

    async def replace(self, row: Row) -> bool:
        """See `Store`."""

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

        return await self._write(job)

    async def delete(self, kind: str, key: str) -> bool:
        """See `Store`."""
        return await self._execute("DELETE FROM rows WHERE kind = ? AND key = ?", kind, key) > 0

    async def list(self, kind: str, owner: str, after: tuple[float, str], limit: int) -> Sequence[Row]:
        """See `Store`."""
        query = (
            f"SELECT {_COLUMNS} FROM rows WHERE kind = ? AND owner = ? AND (created, key) > (?, ?) "
            "ORDER BY created, key LIMIT ?"
        )

        def job(connection: sqlite3.Connection) -> Sequence[Row]:
            found = connection.execute(query, (kind, owner, *after, limit))  # one long body at a time is in memory
            return [Row(kind, key, body.partition(b"\n")[0], *rest) for kind, key, body, *rest in found]

        return await self._read(job)

    async def sweep(self, now: float) -> int:
        """See `Store`."""
        removed = 0
        for table, name in ("rows", "rowid"), ("streams", "name"):
            expired = f"SELECT {name} FROM {table} WHERE expires <= ? ORDER BY expires LIMIT ?"
            if removed < _SWEPT and await self._query(expired, now, 1):  # no write for most sweeps
                removed += await self._execute(
                    f"DELETE FROM {table} WHERE {name} IN ({expired})", now, _SWEPT - removed
                )
        return removed

    async def lease(self, holder: str, until: float) -> None:
        """See `Store`."""
        if until > -inf:
            with self._failing():
                self._lock(holder)
        await self._execute("INSERT OR REPLACE INTO leases VALUES (?, ?)", holder, until)
        if until == -inf:
            self._unlock(holder)

    def _lock_file(self, holder: str) -> str:
        return f"{self._file}-{hashlib.blake2b(holder.encode(), digest_size=12).hexdigest()}"

    def _lock(self, holder: str) -> None:
        if holder not in self._locks:
            descriptor = os.open(self._lock_file(holder), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(descriptor)
                raise
            self._locks[holder] = descriptor

    def _unlock(self, holder: str) -> None:
        descriptor = self._locks.pop(holder, None)
        if descriptor is not None:
            with suppress(FileNotFoundError):  # another process took it for dead
                os.unlink(self._lock_file(holder))
            os.close(descriptor)

    def _is_dead(self, holder: str) -> bool:
        """Whether the process that has this lease has died.  Removes its file."""
        try:
            descriptor = os.open(self._lock_file(holder), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            with suppress(FileNotFoundError):
                os.unlink(self._lock_file(holder))
            return True
        finally:
            os.close(descriptor)

    async def claim(
        self, kind: str, holder: str, now: float, limit: int, *, known: Collection[str] | None = None
    ) -> Sequence[Row]:
        """See `Store`."""
        names = (
            "SELECT kind, key FROM rows WHERE kind = ? AND holder != '' AND holder != ? AND "
            "NOT EXISTS (SELECT 1 FROM leases WHERE leases.holder = rows.holder AND until > ?) LIMIT ?"
        )
        claimed = (
            "UPDATE rows SET holder = ?, version = version + 1, changed = ? WHERE kind = ? AND key = ? "
            f"RETURNING {_COLUMNS}"
        )
        for (other,) in await self._query("SELECT holder FROM leases WHERE holder != ?", holder):
            with self._failing():
                if self._is_dead(other):
                    await self._execute("DELETE FROM leases WHERE holder = ?", other)
        if known is None and not await self._query(names, kind, holder, now, 1):
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

        return await self._write(job)

    async def changes(self, after: int) -> tuple[int, Sequence[tuple[str, str]]]:
        """See `Store`."""
        if after < 0:
            return (await self._query("SELECT number FROM clock"))[0][0], ()
        query = "SELECT changed, kind, key FROM rows WHERE changed > ? ORDER BY changed LIMIT ?"
        while True:
            more = self._more
            if found := await self._query(query, after, _READ):
                return found[-1][0], [(kind, key) for _, kind, key in found]
            with trio.move_on_after(_LOOK):
                await more.wait()

    async def append(self, stream: str, body: bytes, *, owner: str, expires: float, max_bytes: int) -> int:
        """See `Store`."""

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

        appended = await self._write(job)
        self._sent.set()
        return appended

    async def read(self, stream: str, after: int, limit: int) -> tuple[int, Sequence[tuple[int, bytes]]]:
        """See `Store`."""

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

        return await self._read(job)

    async def discard(self, stream: str) -> None:
        """See `Store`."""
        await self._execute("DELETE FROM streams WHERE name = ?", stream)

    async def send(self, channel: str, body: bytes) -> None:
        """See `Store`."""
        await self._write(partial(_send, channel=channel, body=body))
        self._sent.set()

    @asynccontextmanager
    async def receive(self, channels: Sequence[str]) -> AsyncIterator[Receiver]:
        """See `Store`."""
        last = await self._read(_last)
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
        found = await self._query(
            "SELECT place, channel, body FROM messages WHERE place > ? ORDER BY place LIMIT ?", after, _READ
        )
        if after != self._place:
            return  # another look was faster
        for place, channel, body in found:
            if place - _size(channel, body) > self._place:
                self._channels.resync()
            self._place = place
            self._channels.deliver(channel, body)


def _is_locked(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _use_log(connection: sqlite3.Connection) -> None:
    """Choose the mode with a log (WAL).  SQLite does not wait there for another process that opens a new file, too."""
    deadline = time.monotonic() + _BUSY
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not _is_locked(error) or time.monotonic() > deadline:
                raise
        time.sleep(_LOOK / 10)


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
