"""The store in a file, beyond the contract of stores: files, locks, processes and failures."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import inf
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from tests.stores.shared import NOW, ROW, Make, opened, take
from trio_mcp import UsageError
from trio_mcp.stores import (
    Resync,
    Row,
    SQLiteStore,
    StoreFailed,
    StoreFull,
    sqlite,  # its bounds
    sqlite_file,  # the same
)


async def test_a_store_in_a_file_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SQLiteStore(path) as store:
        await store.add(ROW)
        await store.lease("me", 5.0)
    async with SQLiteStore(str(path)) as store:
        assert await store.get("task", "a") == ROW


async def test_a_store_that_has_not_been_opened_raises(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "x.db")
    with pytest.raises(UsageError, match="is not open; use it inside `async with`"):
        await store.get("task", "a")
    with pytest.raises(UsageError, match="is not open"):
        await store.add(ROW)
    assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize("path", ["", ":memory:"])
def test_a_store_in_a_file_needs_a_file(path: str) -> None:
    with pytest.raises(UsageError, match=r"write MemoryStore\(\)"):
        SQLiteStore(path)


@pytest.mark.parametrize("sql", ["CREATE TABLE theirs (a)", "PRAGMA user_version = 99"])
async def test_the_file_of_another_program_is_left_alone(tmp_path: Path, sql: str) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as theirs:
        theirs.execute(sql)
    theirs.close()
    with pytest.raises(UsageError, match="name another file"):
        async with SQLiteStore(path):
            pass
    with sqlite3.connect(path) as theirs:
        assert theirs.execute("SELECT name FROM sqlite_master WHERE name = 'rows'").fetchone() is None
    theirs.close()


async def test_a_file_that_cannot_be_used_raises_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="unable to open database file") as caught:
        async with SQLiteStore(tmp_path):
            pass
    assert isinstance(caught.value.__cause__, sqlite3.Error)
    with pytest.raises(StoreFailed) as caught:
        async with SQLiteStore("/dev/null"):
            pass
    assert "rollback" not in str(caught.value)  # the error names the cause, not the failed rollback
    (tmp_path / "text").write_text("Dear diary, " * 1000)
    with pytest.raises(StoreFailed, match="not a database"):
        async with SQLiteStore(tmp_path / "text"):
            pass


async def test_a_commit_that_fails_fails_each_of_its_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SQLiteStore(path) as store:
        await store.add(ROW)
        with sqlite3.connect(path) as other:
            other.execute("ALTER TABLE rows RENAME TO away")
        failed = []

        async def write(key: str) -> None:
            try:
                await store.add(attrs.evolve(ROW, key=key))
            except StoreFailed as error:
                failed.append(str(error))

        async with trio.open_nursery() as nursery:
            for key in "bcd":
                nursery.start_soon(write, key)
        assert len(failed) == 3
        with sqlite3.connect(path) as other:
            other.execute("ALTER TABLE away RENAME TO rows")
        other.close()
        assert await store.add(attrs.evolve(ROW, key="b"))  # the store still works


async def test_a_write_that_is_cancelled_while_it_waits_never_happens(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SQLiteStore(path) as store, trio.open_nursery() as nursery:
        with sqlite3.connect(path, isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")  # the first write waits for this transaction in its thread
            nursery.start_soon(store.add, ROW)
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0) as scope:
                await store.add(attrs.evolve(ROW, key="b"))
            assert scope.cancelled_caught
            other.execute("ROLLBACK")
        other.close()
        assert await store.add(attrs.evolve(ROW, key="c"))
        assert await store.get("task", "a") == ROW
        assert await store.get("task", "b") is None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A block during which another process has a write transaction."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


async def test_writes_to_a_locked_file_fail_together_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, failed = tmp_path / "x.db", list[str]()
    monkeypatch.setattr(sqlite_file, "_BUSY", inf)

    async def write(key: str) -> None:
        with pytest.raises(StoreFailed) as caught:
            await store.add(attrs.evolve(ROW, key=key))
        failed.append(str(caught.value))

    async with SQLiteStore(path) as store:
        await store.add(ROW)
        with locked(path):
            async with trio.open_nursery() as nursery:
                for key in "bcd":  # the second and the third fail with the first, without a wait of their own
                    nursery.start_soon(write, key)
                await trio.testing.wait_all_tasks_blocked()
                assert await store.get("task", "a") == ROW
                assert await store.list("task", "ann", (0.0, ""), 10) == [ROW]
                assert not failed
                monkeypatch.setattr(sqlite_file, "_BUSY", 0.0)
            await write("e")
            assert len(failed) == 4
            why = f"another process has locked the file of {store!r} for more than 0 seconds; end its transaction"
            assert set(failed) == {why}
        await trio.sleep(sqlite_file._TRY)
        assert await store.add(attrs.evolve(ROW, key="b"))


async def test_a_call_that_waits_for_a_locked_file_can_be_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SQLiteStore(path) as store, trio.open_nursery() as nursery:
        first = trio.CancelScope()

        async def write() -> None:
            with first:
                await store.add(ROW)

        with locked(path):
            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(store.add, attrs.evolve(ROW, key="b"))
            await trio.sleep(0.1)
            first.cancel()
            await trio.sleep(3 * sqlite_file._TRY)  # the second call waits in its place
        while await store.get("task", "b") is None:  # noqa: ASYNC110  # SQLite retries after some time
            await trio.sleep(0.01)
        assert await store.get("task", "a") is None


async def test_a_write_that_is_cancelled_behind_another_one_does_not_happen_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the lock is released, the other write must not commit the cancelled one together with its own."""
    path = tmp_path / "x.db"
    monkeypatch.setattr(sqlite_file, "_TRY", 0.05)
    async with SQLiteStore(path) as store, trio.open_nursery() as nursery:
        with locked(path):
            nursery.start_soon(store.add, ROW)
            with trio.move_on_after(sqlite_file._TRY / 2):
                async with trio.open_nursery() as others:
                    for key in "bc":
                        others.start_soon(store.add, attrs.evolve(ROW, key=key))
                    await trio.sleep_forever()
            nursery.start_soon(store.add, attrs.evolve(ROW, key="d"))
            await trio.sleep(3 * sqlite_file._TRY)
        while await store.get("task", "d") is None:  # noqa: ASYNC110  # SQLite retries after some time
            await trio.sleep(0.01)
        assert [await store.get("task", key) is None for key in "abc"] == [False, True, True]


async def test_opening_a_locked_file_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.db"
    monkeypatch.setattr(sqlite_file, "_BUSY", 0.2)
    async with SQLiteStore(path):
        pass
    with locked(path), pytest.raises(StoreFailed, match=r"another process has locked the file of .*x\.db"):
        async with SQLiteStore(path):
            pass
    async with SQLiteStore(path) as store:
        assert await store.add(ROW)


async def test_a_receiver_that_is_behind_in_the_file_gets_resync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_LOG", 1000)
    path = tmp_path / "x.db"
    async with SQLiteStore(path) as store, SQLiteStore(path) as other, store.receive(["a"]) as messages:
        for number in range(50):
            await other.send("a", str(number).encode())
        first, *rest = await take(messages, 10)
        assert first == Resync()
        assert rest[-1] != ("a", b"49")
        while rest[-1] != ("a", b"49"):
            rest += await take(messages, 1)
        assert len(rest) < 20
        await other.send("a", b"new")
        assert await take(messages, 1) == [("a", b"new")]


async def test_a_receiver_waits_for_a_file_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_AGAIN", 0.01)
    path = tmp_path / "x.db"
    async with SQLiteStore(path) as store, store.receive(["a"]) as messages:
        with sqlite3.connect(path) as other:
            other.execute("ALTER TABLE messages RENAME TO away")
        assert await take(messages, 2) == [Resync(), Resync()]
        with sqlite3.connect(path) as other:
            other.execute("ALTER TABLE away RENAME TO messages")
        other.close()
        await store.send("a", b"")
        while (message := (await take(messages, 1))[0]) == Resync():
            pass
        assert message == ("a", b"")


async def test_a_cancelled_write_does_not_cancel_other_writes(make: Make) -> None:
    async with opened(make) as (store,):
        for number in range(20):  # the order in which Trio starts the two tasks is random
            one, other = (attrs.evolve(ROW, key=f"{name}{number}") for name in ("one", "other"))
            scope, added = trio.CancelScope(), list[bool]()

            async def cancelled(row: Row = one, scope: trio.CancelScope = scope) -> None:
                with scope:
                    await store.add(row)

            async def write(row: Row = other, scope: trio.CancelScope = scope, added: list[bool] = added) -> None:
                scope.cancel()
                added.append(await store.add(row))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancelled)
                nursery.start_soon(write)
            assert added == [True]
            assert await store.get("task", other.key) == other


async def test_the_file_is_found_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = SQLiteStore("x.db")
    monkeypatch.chdir("/")
    async with store:
        await store.lease("me", 5.0)
    assert (tmp_path / "x.db").exists()
    assert repr(store) == "SQLiteStore('x.db')"


async def test_other_users_cannot_read_the_file(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        async with SQLiteStore(tmp_path / "x.db") as store:
            await store.add(ROW)
            modes = {each.name: each.stat().st_mode & 0o777 for each in os.scandir(tmp_path)}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("x.db", "x.db-wal", "x.db-shm"), 0o600)
    (tmp_path / "x.db").chmod(0o640)
    async with SQLiteStore(tmp_path / "x.db"):
        assert (tmp_path / "x.db").stat().st_mode & 0o777 == 0o640  # the mode that the operator has set


async def test_the_lock_file_of_a_process_that_died_long_ago_is_deleted(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "x.db") as store, SQLiteStore(tmp_path / "x.db") as other:
        await other.lease("dead", NOW)
        await store.lease("me", NOW + 1000)
        assert len(os.listdir(tmp_path)) == 5
        os.close(other._file.locks.pop("dead"))  # like the kernel at the end of a process
        assert not await store.claim("task", "me", NOW + 100, 9)
        assert len(os.listdir(tmp_path)) == 4


async def test_a_write_to_a_deleted_file_fails(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "x.db") as store:
        (tmp_path / "x.db").unlink()
        with pytest.raises(StoreFailed, match="deleted or replaced"):
            await store.add(ROW)
        async with SQLiteStore(tmp_path / "x.db"):
            with pytest.raises(StoreFailed, match="deleted or replaced"):
                await store.add(ROW)


async def test_a_process_without_descriptors_fails_its_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async with SQLiteStore(tmp_path / "x.db") as store, SQLiteStore(tmp_path / "x.db") as other:
        await other.lease("other", 9.0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", no_descriptor)
            with pytest.raises(StoreFailed, match="Too many open files"):
                await store.lease("me", 9.0)
            with pytest.raises(StoreFailed, match="Too many open files"):
                await store.claim("task", "me", 1.0, 9)
        await store.lease("me", 9.0)
        assert not await store.claim("task", "me", 1.0, 9)


async def test_the_rows_of_a_killed_process_can_be_claimed_at_once(tmp_path: Path) -> None:
    path, script = tmp_path / "x.db", tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys, trio\n"
        "from trio_mcp.stores import Row, SQLiteStore\n"
        "async def main():\n"
        "    async with SQLiteStore(sys.argv[1]) as store:\n"
        "        await store.lease('killed', 1e12)\n"
        "        await store.add(Row('task', 'a', b'{}', 'ann', 1000.0, holder='killed'))\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "trio.run(main)\n"
    )
    done = await trio.run_process([sys.executable, script, path], check=False)
    assert done.returncode == -signal.SIGKILL
    async with SQLiteStore(path) as store, SQLiteStore(path) as alive:
        await alive.lease("alive", 1e12)
        await alive.add(attrs.evolve(ROW, key="b", holder="alive"))
        (claimed,) = await store.claim("task", "me", NOW, 9)
        assert claimed == attrs.evolve(ROW, holder="me", version=2)
        await alive.lease("alive", -inf)
        assert [row.key for row in await store.claim("task", "me", NOW, 9)] == ["b"]
    assert sorted(os.listdir(tmp_path)) == ["killed.py", "x.db"]


async def test_a_full_store_refuses_one_write_of_a_commit(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "x.db") as store:
        outcomes: dict[str, object] = {}

        async def write(key: str, each: float) -> None:
            try:
                outcomes[key] = await store.add(attrs.evolve(ROW, key=key), each=each)
            except StoreFull as error:
                outcomes[key] = error.limit

        async with trio.open_nursery() as nursery:
            for key, each in ("a", 9), ("b", 0), ("c", 9):
                nursery.start_soon(write, key, each)
        assert outcomes == {"a": True, "b": "each", "c": True}


async def test_text_that_cannot_be_written_fails_only_its_write(tmp_path: Path) -> None:
    added: list[bool] = []
    async with SQLiteStore(tmp_path / "x.db") as store, trio.open_nursery() as nursery:

        async def add(key: str) -> None:
            added.append(await store.add(attrs.evolve(ROW, key=key)))

        async def refused() -> None:
            with pytest.raises(UnicodeEncodeError):
                await store.add(attrs.evolve(ROW, key="half a pair", owner="\ud800"))

        for number in range(3):
            nursery.start_soon(add, str(number))
            nursery.start_soon(refused)
    assert added == [True] * 3
