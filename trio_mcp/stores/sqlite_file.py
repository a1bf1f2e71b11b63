"""One SQLite file: its connections, its writes, and the processes that share it.

A write returns when SQLite has committed it to the log (WAL) and synced the log, so a process that is killed at any
moment has lost no write that returned.  All calls of `sqlite3` run in worker threads, at most one that writes and one
that reads.  Writes that wait for the writer are committed together: one sync for all of them.

Two processes wait for each other, for at most `_BUSY` seconds from the moment at which a call has found the file
locked.  Then all calls that wait fail, and later ones fail at once until the lock is gone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import Any, Generic, TypeVar

import attrs
import trio

from trio_mcp.core.errors import UsageError
from trio_mcp.stores.rows import StoreFailed, StoreFull

__all__ = ["SQLiteFile"]

T = TypeVar("T")

_BUSY = 5.0  # seconds; a commit takes milliseconds, and a hundred processes may be in the queue
_TRY = 0.25  # seconds of it that SQLite waits at once; a call that is cancelled must wait for that
_NEW = 0.01  # seconds until a file that another process opens, too, is tried again


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


class SQLiteFile:
    """A file with the tables of `schema`, which has the number `layout`.  `name` is that of the store, for errors.

    It may be opened several times, and closes with the last block.
    """

    def __init__(self, path: str, name: str, schema: str, layout: int) -> None:
        self.locks: dict[str, int] = {}
        """The descriptors of the files that are locked for our leases."""
        self.written = trio.Event()
        """Set, and replaced, after each write of this process."""
        self._shown = path
        self._path = os.path.abspath(path)  # the program may change its directory
        self._name = name
        self._schema = schema
        self._layout = layout
        self._identity: tuple[int, int] | None = None
        self._opened = 0
        self._opening = trio.Lock()
        self._threads = trio.CapacityLimiter(2)
        self._reading, self._writing = trio.Lock(), trio.Lock()
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._queue: list[_Write[Any]] = []
        # For writes (True) and for reads: when the file was found locked, and when that was last tried.
        self._locked: dict[bool, tuple[float, float]] = {}

    # Opening and closing.

    async def open(self) -> None:
        """Open the file, and make it if it does not exist."""
        async with self._opening:
            if not self._opened:
                writer = await self._in_thread(self._connect, True)
                try:
                    self._reader = await self._in_thread(self._connect, False)
                except BaseException:
                    writer.close()
                    raise
                self._writer = writer
            self._opened += 1

    async def close(self) -> None:
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
                    for holder in tuple(self.locks):
                        self.unlock(holder)

    def _connect(self, first: bool) -> sqlite3.Connection:
        with suppress(FileExistsError):  # for this user alone: results may be secret
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
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
            if layout not in (0, self._layout) or (layout == 0 and tables):
                raise UsageError(
                    f"{self._shown} is no store of this version of trio_mcp (its layout is {layout}); name another file"
                )
            if layout == 0:
                for statement in re.split(r"\n(?=[CI])", self._schema):  # `executescript` would commit first
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {self._layout}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:  # SQLite itself has ended it after some errors
                connection.execute("ROLLBACK")

    def _on_disk(self) -> tuple[int, int]:
        """Tells the file from another one with its name."""
        status = os.stat(self._path)
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
                raise StoreFailed(f"{self._name} does not work: {error}") from error
            raise _Locked(self._why_locked) from error
        except (sqlite3.Error, OSError) as error:
            raise StoreFailed(f"{self._name} does not work: {error}") from error

    # Reading and writing.

    async def read(self, job: Callable[[sqlite3.Connection], T]) -> T:
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
        return (
            f"another process has locked the file of {self._name} for more than {_BUSY:g} seconds; end its transaction"
        )

    async def query(self, query: str, *values: Any) -> Sequence[Any]:
        return await self.read(lambda connection: connection.execute(query, values).fetchall())

    def _checked(self, connection: sqlite3.Connection | None) -> sqlite3.Connection:
        if connection is None:
            raise UsageError(f"{self._name} is not open; use it inside `async with`")
        return connection

    async def write(self, job: Callable[[sqlite3.Connection], T]) -> T:
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
        self.written.set()
        self.written = trio.Event()
        return write.result  # type: ignore[return-value]  # the job has returned it

    async def execute(self, statement: str, *values: Any) -> int:
        """Write with one statement, and return the number of rows that it changed."""
        return await self.write(lambda connection: connection.execute(statement, values).rowcount)

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

    # Leases.

    def _lock_file(self, holder: str) -> str:
        return f"{self._path}-{hashlib.blake2b(holder.encode(), digest_size=12).hexdigest()}"

    def lock(self, holder: str) -> None:
        """Lock the file of a lease of this process.  The kernel frees the lock when the process dies."""
        if holder in self.locks:
            return
        with self._failing():
            descriptor = os.open(self._lock_file(holder), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(descriptor)
                raise
        self.locks[holder] = descriptor

    def unlock(self, holder: str) -> None:
        descriptor = self.locks.pop(holder, None)
        if descriptor is not None:
            with suppress(FileNotFoundError):  # another process took it for dead
                os.unlink(self._lock_file(holder))
            os.close(descriptor)

    def is_dead(self, holder: str) -> bool:
        """Whether the process that has this lease has died.  Removes its file."""
        with self._failing():
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
        time.sleep(_NEW)
