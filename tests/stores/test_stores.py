"""The contract of stores, for each of them, and the promises of the one in a file."""

from __future__ import annotations

import errno
import os
import random
import secrets
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import pytest
import trio
import trio.testing

from tests.ports import unclaimed_port
from tests.redis_server import RedisServer, redis_server
from trio_mcp import UsageError
from trio_mcp.stores import (
    MemoryStore,
    RedisStore,
    Resync,
    Row,
    SQLiteStore,
    Store,
    StoreFailed,
    StoreFull,
    sqlite,  # its bounds
)
from trio_mcp.stores.rows import EVENT, Message  # authors of servers need neither

Make: TypeAlias = Callable[[], Store]
NOW = 1000.0
ROW = Row("task", "a", b"{}", "ann", NOW)


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """One for all tests, each with stores of its own name.  As a cluster it refuses steps with keys of two slots."""
    with redis_server("--cluster-enabled", "yes", "--port", str(unclaimed_port())) as server:
        server.ask("CLUSTER ADDSLOTSRANGE 0 16383")
        while b"cluster_state:ok" not in server.ask("CLUSTER INFO"):
            time.sleep(0.01)
        yield server


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.full)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes the store of one more process: the file is shared, and the store in memory is the same object."""
    memory = MemoryStore(max_bytes=100_000)
    if request.param == "memory":
        return lambda: memory
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        return partial(RedisStore, server.url, name=secrets.token_hex(8), max_bytes=100_000)
    return partial(SQLiteStore, tmp_path / "store.db", max_bytes=100_000)


@asynccontextmanager
async def opened(make: Make, count: int = 1) -> AsyncIterator[tuple[Store, ...]]:
    async with AsyncExitStack() as stack:
        yield tuple([await stack.enter_async_context(make()) for _ in range(count)])


async def test_a_row_comes_back_as_it_was_written(make: Make) -> None:
    rows = [ROW, Row("task", "b", b"\x00\xff", "", 1.5, 99.25, "me"), Row("notice", "a", b"", "é", NOW)]
    async with opened(make, 2) as (store, other):
        for row in rows:
            assert await store.add(row)
        for row in rows:
            assert await other.get(row.kind, row.key) == row
        assert await store.get("task", "c") is None


async def test_a_key_exists_once(make: Make) -> None:
    async with opened(make) as (store,):
        assert await store.add(ROW)
        assert not await store.add(attrs.evolve(ROW, body=b"other", owner="bob"))
        assert await store.add(attrs.evolve(ROW, kind="notice"))
        assert await store.get("task", "a") == ROW


async def test_only_the_version_that_was_read_is_replaced(make: Make) -> None:
    async with opened(make, 2) as (store, other):
        await store.add(ROW)
        read = await other.get("task", "a")
        assert read is not None
        assert await store.replace(attrs.evolve(read, body=b"1", expires=5.0, holder="me"))
        assert not await other.replace(attrs.evolve(read, body=b"2"))
        now = await other.get("task", "a")
        assert now == attrs.evolve(ROW, body=b"1", expires=5.0, holder="me", version=2)
        assert not await store.replace(attrs.evolve(ROW, key="b"))


async def test_of_many_that_replace_at_the_same_time_one_wins(make: Make) -> None:
    won: list[int] = []

    async def write(store: Store, number: int) -> None:
        if await store.replace(attrs.evolve(ROW, body=str(number).encode())):
            won.append(number)

    async with opened(make, 2) as stores:
        await stores[0].add(ROW)
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(write, stores[number % 2], number)
        stored = await stores[0].get("task", "a")
        assert stored is not None
        assert [stored.body] == [str(number).encode() for number in won]


async def test_a_deleted_row_is_gone_and_makes_room(make: Make) -> None:
    async with opened(make) as (store,):
        await store.add(attrs.evolve(ROW, body=bytes(70_000)))
        assert await store.delete("task", "a")
        assert not await store.delete("task", "a")
        assert await store.get("task", "a") is None
        assert await store.add(attrs.evolve(ROW, body=bytes(70_000)), each=1, total=1)


async def test_numbers_of_rows_are_bounded(make: Make) -> None:
    async with opened(make) as (store,):
        for key, owner in ("a", "ann"), ("b", "ann"), ("c", "bob"):
            assert await store.add(attrs.evolve(ROW, key=key, owner=owner), each=2, total=3)
        with pytest.raises(StoreFull, match="each") as caught:
            await store.add(attrs.evolve(ROW, key="d"), each=2, total=9)
        assert caught.value.limit == "each"
        with pytest.raises(StoreFull, match="total"):
            await store.add(attrs.evolve(ROW, key="d", owner="bob"), each=2, total=3)
        assert await store.add(attrs.evolve(ROW, kind="notice"), each=1, total=1)  # each kind is counted by itself
        assert await store.get("task", "d") is None
        await store.delete("task", "a")
        assert await store.add(attrs.evolve(ROW, key="d"), each=2, total=3)


async def test_no_owner_takes_more_bytes_than_its_share(make: Make) -> None:
    async with opened(make) as (store,):
        assert await store.add(attrs.evolve(ROW, body=bytes(60_000)))
        assert await store.add(attrs.evolve(ROW, key="b", body=bytes(15_000)))  # three quarters of the room
        with pytest.raises(StoreFull, match="max_bytes"):
            await store.add(attrs.evolve(ROW, key="c", body=bytes(5_000)))
        assert await store.add(attrs.evolve(ROW, key="c", owner="bob", body=bytes(15_000)))
        with pytest.raises(StoreFull):
            await store.add(attrs.evolve(ROW, key="d", owner="eve", body=bytes(20_000)))
        assert not await store.delete("task", "d")
        with pytest.raises(StoreFull):
            await store.replace(attrs.evolve(ROW, body=bytes(70_000)))
        assert await store.replace(attrs.evolve(ROW, body=bytes(62_000)))  # it can still say that it failed
        assert await store.replace(attrs.evolve(ROW, body=b"", version=2))
        assert await store.add(attrs.evolve(ROW, key="d", body=bytes(40_000)))


async def test_rows_of_nobody_share_all_bytes(make: Make) -> None:
    async with opened(make) as (store,):
        assert await store.add(attrs.evolve(ROW, owner="", body=bytes(60_000)))
        assert await store.add(attrs.evolve(ROW, key="b", owner="", body=bytes(40_000)))
        with pytest.raises(StoreFull):
            await store.add(attrs.evolve(ROW, key="c", owner="", body=bytes(5_000)))


async def test_the_rows_of_an_owner_are_listed_in_pages(make: Make) -> None:
    rows = [
        attrs.evolve(ROW, key=key, created=created) for created in (1.0, 2.0) for key in (f"x{created}", f"y{created}")
    ]
    async with opened(make) as (store,):
        for row in reversed(rows):
            await store.add(row)
        await store.add(attrs.evolve(ROW, key="z", owner="bob"))
        await store.add(attrs.evolve(ROW, kind="notice"))
        assert list(await store.list("task", "ann", (-inf, ""), 3)) == rows[:3]
        assert list(await store.list("task", "ann", (rows[2].created, rows[2].key), 3)) == rows[3:]
        assert list(await store.list("task", "eve", (-inf, ""), 3)) == []


@pytest.mark.parametrize(
    ("body", "head"), [(b"one\ntwo\nthree", b"one"), (b"\ntwo", b""), (b"one", b"one"), (b"", b"")]
)
async def test_a_list_has_the_first_line_of_each_body(make: Make, body: bytes, head: bytes) -> None:
    row = attrs.evolve(ROW, body=body)
    async with opened(make) as (store,):
        await store.add(row)
        assert list(await store.list("task", "ann", (-inf, ""), 3)) == [attrs.evolve(row, body=head)]
        assert await store.get(ROW.kind, ROW.key) == row


async def test_rows_that_have_expired_are_swept(make: Make) -> None:
    async with opened(make) as (store,):
        for key, expires in ("a", 10.0), ("b", 20.0), ("c", inf), ("d", 5.0):
            await store.add(attrs.evolve(ROW, key=key, expires=expires))
        await store.replace(attrs.evolve(ROW, key="d", expires=30.0))  # moved
        await store.replace(attrs.evolve(ROW, key="b", expires=15.0))
        assert await store.sweep(9.9) == 0
        assert await store.sweep(15.0) == 2
        assert await store.sweep(15.0) == 0
        assert [row.key for row in await store.list("task", "ann", (-inf, ""), 9)] == ["c", "d"]
        assert await store.sweep(1e9) == 1


async def test_one_sweep_is_short(make: Make) -> None:
    async with opened(make) as (store,):
        async with trio.open_nursery() as nursery:
            for number in range(600):
                nursery.start_soon(store.add, attrs.evolve(ROW, key=str(number), expires=1.0))
        assert [await store.sweep(2.0) for _ in range(3)] == [500, 100, 0]


async def test_rows_of_a_process_that_has_gone_are_claimed_once(make: Make) -> None:
    async with opened(make, 3) as (gone, first, second):
        await gone.lease("gone", 1030.0)
        await first.lease("first", 1060.0)
        for key in "abc":
            await gone.add(attrs.evolve(ROW, key=key, holder="gone"))
        await gone.add(attrs.evolve(ROW, key="idle"))
        await gone.add(attrs.evolve(ROW, kind="notice", holder="gone"))
        await first.add(attrs.evolve(ROW, key="d", holder="first"))
        assert list(await first.claim("task", "first", 1029.9, 9)) == []
        taken = [*await first.claim("task", "first", 1030.0, 2), *await second.claim("task", "second", 1030.0, 2)]
        assert sorted(row.key for row in taken) == ["a", "b", "c"]
        assert {row.holder for row in taken} == {"first", "second"}
        assert all(row.version == 2 for row in taken)
        assert not await gone.replace(attrs.evolve(ROW, key="a", holder="gone", body=b"late"))  # fenced off
        assert await second.get("task", taken[0].key) == taken[0]


async def test_a_lease_can_be_renewed_and_ended(make: Make) -> None:
    async with opened(make) as (store,):
        await store.add(attrs.evolve(ROW, holder="me"))
        await store.lease("me", 1030.0)
        await store.lease("me", 1060.0)
        assert not await store.claim("task", "you", 1040.0, 9)
        await store.lease("me", -inf)
        assert [row.holder for row in await store.claim("task", "you", 1040.0, 9)] == ["you"]
        assert not await store.claim("task", "you", 1040.0, 9)  # they are its own


async def test_each_process_hears_of_changes(make: Make) -> None:
    async with opened(make, 2) as (store, other):
        number, names = await other.changes(-1)
        assert not names
        heard: list[tuple[str, str]] = []

        async def listen() -> None:
            nonlocal number
            while ("task", "b") not in heard:
                number, names = await other.changes(number)
                heard.extend(names)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            await store.add(ROW)
            await store.replace(ROW)
            await store.add(attrs.evolve(ROW, key="b"))
        assert heard[-1] == ("task", "b")
        assert set(heard) == {("task", "a"), ("task", "b")}
        assert (await other.changes(-1))[0] == number


async def test_a_reader_of_changes_that_is_far_behind_hears_of_each_row(make: Make) -> None:
    async with opened(make) as (store,):
        start, _ = await store.changes(-1)
        async with trio.open_nursery() as nursery:
            for number in range(1200):
                nursery.start_soon(store.add, attrs.evolve(ROW, key=str(number)))
        heard: set[tuple[str, str]] = set()
        while len(heard) < 1200:
            start, names = await store.changes(start)
            heard.update(names)


async def test_the_changes_that_memory_remembers_are_bounded() -> None:
    async with MemoryStore() as store:
        for number in range(10_050):
            await store.add(attrs.evolve(ROW, key=str(number)))
        assert len(store._changed) == 10_000
        number, names = await store.changes(3)
        assert (number, len(names)) == (10_050, 10_050)
        assert (await store.changes(10_049))[1] == [("task", "10049")]


async def test_a_cancelled_write_happens_as_a_whole_or_not_at_all(make: Make) -> None:
    async with opened(make) as (store,):
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.add(ROW)
        again = await store.add(ROW)
        assert (await store.get("task", "a")) == ROW
        assert again in (True, False)


async def test_a_store_may_be_opened_several_times(make: Make) -> None:
    store = make()
    async with store:
        async with store, store.receive(["a"]):
            await store.add(ROW)
        assert await store.get("task", "a") == ROW
    async with store, store.receive(["a"]) as messages:
        assert await store.get("task", "a") == ROW
        await store.send("a", b"")
        assert await take(messages, 1) == [("a", b"")]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))])
async def test_a_store_does_the_same_as_the_one_in_memory(make: Make, seed: int) -> None:
    dice, model = random.Random(seed), MemoryStore(max_bytes=100_000)
    async with opened(make, 2) as stores, model:
        for step in range(300):
            name, arguments, options = a_call(dice)
            want = await outcome(getattr(model, name)(*arguments, **options))
            # A holder is one process.
            holder = arguments[0] if name == "lease" else arguments[1] if name == "claim" else "pq"[step % 2]
            store = stores["pq".index(holder)]
            assert await outcome(getattr(store, name)(*arguments, **options)) == want, (step, name, arguments)


def a_call(dice: random.Random) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A method of a store, with few names and values, so that they meet."""
    kind, key, owner = (
        dice.choice(("k", "kk", "k:")),
        dice.choice(("a", "ka", "b:", "é")),
        dice.choice(("", "ann", "b")),
    )
    when, size, holder = dice.choice((1.5, 7.25, inf)), dice.choice((0, 10, 9_000, 40_000)), dice.choice(("", "p", "q"))
    body = dice.randbytes(size)
    row = Row(kind, key, body, owner, dice.choice((1.0, 2.5)), when, holder, dice.choice((1, 1, 2, 3)))
    number = dice.randrange(5)
    calls: dict[str, tuple[Any, ...]] = {
        "add": (row,),
        "get": (kind, key),
        "replace": (row,),
        "delete": (kind, key),
        "list": (kind, owner, (-inf, "") if number == 0 else (row.created, key), number),
        "sweep": (when if when < inf else 0.5,),
        "lease": (holder or "p", dice.choice((-inf, 5.0, 50.0))),
        "claim": (kind, holder or "p", 10.0, 99),
        "append": (key, body),
        "read": (key, number, number),
        "discard": (key,),
    }
    name = dice.choices([*calls], [9, 6, 9, 2, 4, 1, 2, 2, 9, 4, 1])[0]
    options: dict[str, Any] = {}
    if name == "add":
        options = {"each": dice.choice((1, 3, inf)), "total": dice.choice((4, inf))}
    elif name == "append":
        options = {"owner": owner, "expires": when, "max_bytes": dice.choice((100, 10_000, 60_000))}
    return name, calls[name], options


async def outcome(call: Awaitable[Any]) -> Any:
    """What a call returns, or the limit that it met.  Rows that are claimed have no order."""
    try:
        found = await call
    except StoreFull as full:
        return full.limit
    if isinstance(found, tuple):
        return found[0], list(found[1])
    return sorted(found, key=lambda row: (row.created, row.key)) if isinstance(found, list) else found


# Streams


async def append(store: Store, stream: str, *bodies: bytes, max_bytes: int = 10_000) -> list[int]:
    return [await store.append(stream, body, owner="ann", expires=NOW + 60, max_bytes=max_bytes) for body in bodies]


async def test_events_are_numbered_and_read_after_a_number(make: Make) -> None:
    async with opened(make, 2) as (store, other):
        assert await append(store, "s", b"one", b"") == [1, 2]
        assert await append(other, "s", b"\x00\xff") == [3]
        assert await append(other, "t", b"else") == [1]
        oldest, events = await other.read("s", 0, 9)
        assert (oldest, list(events)) == (1, [(1, b"one"), (2, b""), (3, b"\x00\xff")])
        assert list((await store.read("s", 1, 1))[1]) == [(2, b"")]
        oldest, events = await store.read("s", 3, 9)
        assert (oldest, list(events)) == (1, [])
        oldest, events = await store.read("none", 3, 9)
        assert (oldest, list(events)) == (0, [])


async def test_the_oldest_events_of_a_stream_go_first(make: Make) -> None:
    most = 3 * (EVENT + 10)
    async with opened(make) as (store,):
        await append(store, "s", *[b"0123456789"] * 5, max_bytes=most)
        oldest, events = await store.read("s", 1, 9)
        assert (oldest, [number for number, _ in events]) == (3, [3, 4, 5])
        await append(store, "s", bytes(20), max_bytes=most)  # takes the room of two
        assert [number for number, _ in (await store.read("s", 0, 9))[1]] == [5, 6]
        assert await append(store, "s", bytes(most), max_bytes=most) == [7]  # too large for itself
        oldest, events = await store.read("s", 6, 9)
        assert (oldest, list(events)) == (8, [])
        await append(store, "s", b"", max_bytes=most)
        oldest, events = await store.read("s", 6, 9)
        assert (oldest, list(events)) == (8, [(8, b"")])


async def test_of_many_that_append_at_the_same_time_each_gets_its_number(make: Make) -> None:
    numbers: list[int] = []

    async def write(store: Store) -> None:
        numbers.extend(await append(store, "s", b"x"))

    async with opened(make, 2) as stores:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(write, stores[number % 2])
        assert sorted(numbers) == list(range(1, 21))
        assert [number for number, _ in (await stores[0].read("s", 0, 99))[1]] == list(range(1, 21))


async def test_a_discarded_stream_begins_again(make: Make) -> None:
    async with opened(make) as (store,):
        await append(store, "s", b"1", b"2")
        await store.discard("s")
        await store.discard("s")
        assert (await store.read("s", 0, 9))[0] == 0
        assert await append(store, "s", b"3") == [1]
        oldest, events = await store.read("s", 0, 9)
        assert (oldest, list(events)) == (1, [(1, b"3")])


async def test_a_stream_expires_as_a_whole_at_its_latest_expiry(make: Make) -> None:
    async with opened(make) as (store,):
        for expires in 10.0, 30.0, 20.0:
            await store.append("s", b"", owner="", expires=expires, max_bytes=1000)
        await store.append("t", b"", owner="", expires=inf, max_bytes=1000)
        await store.add(attrs.evolve(ROW, expires=29.0))
        assert await store.sweep(28.0) == 0
        assert (await store.read("s", 0, 9))[0] == 1
        assert await store.sweep(30.0) == 2
        assert await store.sweep(1e9) == 0
        assert (await store.read("s", 0, 9))[0] == 0
        assert (await store.read("t", 0, 9))[0] == 1


async def test_one_sweep_of_streams_is_short(make: Make) -> None:
    async with opened(make) as (store,):
        await store.add(attrs.evolve(ROW, expires=1.0))
        async with trio.open_nursery() as nursery:
            for number in range(600):
                nursery.start_soon(partial(store.append, str(number), b"", owner="", expires=1.0, max_bytes=99))
        assert [await store.sweep(2.0) for _ in range(3)] == [500, 101, 0]


async def test_events_count_as_bytes_of_their_owner(make: Make) -> None:
    async with opened(make) as (store,):
        await append(store, "s", bytes(60_000), max_bytes=60_100)
        with pytest.raises(StoreFull, match="max_bytes"):
            await append(store, "t", bytes(20_000), max_bytes=30_000)
        with pytest.raises(StoreFull, match="max_bytes"):
            await store.add(attrs.evolve(ROW, body=bytes(20_000)))
        assert await store.add(attrs.evolve(ROW, owner="bob", body=bytes(20_000)))
        assert (await store.read("t", 0, 9))[0] == 0
        assert await append(store, "s", bytes(60_000), max_bytes=60_100) == [2]  # in place of the first
        await store.discard("s")
        assert await append(store, "t", bytes(40_000), max_bytes=50_000) == [1]
        await store.sweep(1e9)
        assert await store.add(attrs.evolve(ROW, key="b", owner="eve", body=bytes(80_000)))


async def test_an_owner_with_little_cannot_fill_the_store_in_small_parts(make: Make) -> None:
    async with opened(make) as (store,):
        for added in range(18):  # three quarters
            assert await store.add(attrs.evolve(ROW, key=str(added), body=bytes(4000)))
        with pytest.raises(StoreFull, match="max_bytes"):
            await store.add(attrs.evolve(ROW, key="18", body=bytes(4000)))


# Messages


async def take(messages: AsyncIterator[Message], count: int) -> list[Message]:
    with trio.fail_after(5):
        return [await anext(messages) for _ in range(count)]


async def test_a_message_reaches_all_that_receive_on_its_channel(make: Make) -> None:
    async with opened(make, 2) as (store, other):
        await store.send("a", b"too early")
        async with (
            store.receive(["a"]) as first,
            other.receive(["b", "a", "a"]) as second,
            other.receive(["c"]) as third,
        ):
            await store.send("a", b"\x00\xff")
            await other.send("b", b"")
            await other.send("none", b"")
            await other.send("c", b"last")
            assert await take(third, 1) == [("c", b"last")]
            assert await take(first, 1) == [("a", b"\x00\xff")]
            assert await take(second, 2) == [("a", b"\x00\xff"), ("b", b"")]
            await other.send("a", b"again")
            assert await take(first, 1) == await take(second, 1) == [("a", b"again")]


async def test_a_receiver_waits_for_a_message_of_another_process(make: Make) -> None:
    got: list[Message] = []

    async def receive(store: Store, *, task_status: trio.TaskStatus[None]) -> None:
        async with store.receive(["a"]) as messages:
            task_status.started()
            got.extend(await take(messages, 2))

    async with opened(make, 2) as (store, other):
        async with trio.open_nursery() as nursery:
            for each in store, store, other, other:
                await nursery.start(receive, each)
            for body in b"1", b"2":
                await store.send("a", body)
        assert sorted(got, key=str) == [("a", b"1")] * 4 + [("a", b"2")] * 4


async def test_a_receiver_that_is_cancelled_leaves_the_others(make: Make) -> None:
    async with opened(make, 2) as (store, other):
        async with store.receive(["a"]) as first, store.receive(["a"]) as second, trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                nursery.start_soon(take, second, 1)
                nursery.start_soon(_cancel_when_blocked, scope)
                await anext(first)
            assert scope.cancelled_caught
            await other.send("a", b"")
        async with store.receive(["a"]) as third:
            await store.send("a", b"new")
            assert await take(third, 1) == [("a", b"new")]


async def _cancel_when_blocked(scope: trio.CancelScope) -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)
    scope.cancel()


async def test_an_event_wakes_those_that_receive_on_its_stream(make: Make) -> None:
    async with opened(make, 2) as (store, other), other.receive(["s"]) as messages:
        await append(store, "s", b"1")
        assert await take(messages, 1) == [("s", b"")]
        assert list((await other.read("s", 0, 9))[1]) == [(1, b"1")]


async def test_a_receiver_that_does_not_read_is_told_to_look_again(make: Make) -> None:
    async with opened(make) as (store,):
        async with store.receive(["a"]) as slow, store.receive(["b"]) as fast:
            for _ in range(5):
                await store.send("a", bytes(300_000))
            await store.send("b", b"")
            assert await take(fast, 1) == [("b", b"")]
            await store.send("a", b"later")
            await store.send("b", b"")
            assert await take(fast, 1) == [("b", b"")]
            assert (await take(slow, 1)) == [Resync()]
            assert (await take(slow, 2))[-1] == ("a", b"later")
        async with store.receive(["a"]) as messages:
            await store.send("a", bytes(2_000_000))  # one message may be larger than the queue
            (message,) = await take(messages, 1)
            assert isinstance(message, tuple)
            assert len(message[1]) == 2_000_000


# The file


async def test_a_store_in_a_file_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SQLiteStore(path) as store:
        await store.add(ROW)
        await store.lease("me", 5.0)
    async with SQLiteStore(str(path)) as store:
        assert await store.get("task", "a") == ROW


async def test_a_store_that_is_not_open_says_so(tmp_path: Path) -> None:
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


async def test_a_file_that_cannot_be_used_is_no_mistake_of_the_program(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="unable to open database file") as caught:
        async with SQLiteStore(tmp_path):
            pass
    assert isinstance(caught.value.__cause__, sqlite3.Error)
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
        assert await store.add(attrs.evolve(ROW, key="b"))  # the store goes on


async def test_a_write_that_is_cancelled_while_it_waits_never_happens(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SQLiteStore(path) as store, trio.open_nursery() as nursery:
        with sqlite3.connect(path, isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")  # the first write waits for it in its thread
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


async def test_a_receiver_that_is_behind_the_messages_of_a_file_is_told(
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


async def test_a_write_that_is_cancelled_takes_no_other_with_it(make: Make) -> None:
    async with opened(make) as (store,):
        for number in range(20):  # Trio decides which of the two begins
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


async def test_a_file_that_is_gone_takes_no_writes(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "x.db") as store:
        (tmp_path / "x.db").unlink()
        with pytest.raises(StoreFailed, match="deleted or replaced"):
            await store.add(ROW)
        async with SQLiteStore(tmp_path / "x.db"):
            with pytest.raises(StoreFailed, match="deleted or replaced"):
                await store.add(ROW)


async def test_a_process_without_descriptors_fails_its_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async with SQLiteStore(tmp_path / "x.db") as store, SQLiteStore(tmp_path / "x.db") as other:
        await other.lease("other", 9.0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", no_more)
            with pytest.raises(StoreFailed, match="Too many open files"):
                await store.lease("me", 9.0)
            with pytest.raises(StoreFailed, match="Too many open files"):
                await store.claim("task", "me", 1.0, 9)
        await store.lease("me", 9.0)
        assert not await store.claim("task", "me", 1.0, 9)


async def test_the_rows_of_a_process_that_was_killed_are_free_at_once(tmp_path: Path) -> None:
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
