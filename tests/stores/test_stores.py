"""The contract of stores, for each of them: rows, leases and changes."""

from __future__ import annotations

import random
from collections.abc import Awaitable
from math import inf
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.stores.shared import MOST, NOW, ROW, Make, opened, take
from trio_mcp.stores import MemoryStore, Row, Store, StoreFull
from trio_mcp.stores.rows import ROW as HEAD  # only authors of stores need it


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


async def test_of_simultaneous_replacements_one_succeeds(make: Make) -> None:
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
        await store.add(attrs.evolve(ROW, body=bytes(2_800_000)))
        assert await store.delete("task", "a")
        assert not await store.delete("task", "a")
        assert await store.get("task", "a") is None
        assert await store.add(attrs.evolve(ROW, body=bytes(2_800_000)), each=1, total=1)


async def test_numbers_of_rows_are_bounded(make: Make) -> None:
    async with opened(make) as (store,):
        for key, owner in ("a", "ann"), ("b", "ann"), ("c", "bob"):
            assert await store.add(attrs.evolve(ROW, key=key, owner=owner), each=2, total=3)
        with pytest.raises(StoreFull, match="each") as caught:
            await store.add(attrs.evolve(ROW, key="d"), each=2, total=9)
        assert caught.value.limit == "each"
        with pytest.raises(StoreFull, match="total"):
            await store.add(attrs.evolve(ROW, key="d", owner="bob"), each=2, total=3)
        assert await store.add(attrs.evolve(ROW, kind="notice"), each=1, total=1)  # each kind has a count of its own
        assert await store.get("task", "d") is None
        await store.delete("task", "a")
        assert await store.add(attrs.evolve(ROW, key="d"), each=2, total=3)


async def test_no_owner_takes_more_bytes_than_its_share(make: Make) -> None:
    async with opened(make) as (store,):
        assert await store.add(attrs.evolve(ROW, body=bytes(2_400_000)))
        assert await store.add(attrs.evolve(ROW, key="b", body=bytes(590_000)))  # three quarters of the store
        with pytest.raises(StoreFull, match="max_bytes"):
            await store.add(attrs.evolve(ROW, key="c", body=bytes(200_000)))
        assert await store.add(attrs.evolve(ROW, key="c", owner="bob", body=bytes(600_000)))
        with pytest.raises(StoreFull):
            await store.add(attrs.evolve(ROW, key="d", owner="eve", body=bytes(800_000)))
        assert not await store.delete("task", "d")
        with pytest.raises(StoreFull):
            await store.replace(attrs.evolve(ROW, body=bytes(2_800_000)))
        assert await store.replace(attrs.evolve(ROW, body=bytes(2_402_000)))  # some bytes more, for example an error
        assert await store.replace(attrs.evolve(ROW, body=b"", version=2))
        assert await store.add(attrs.evolve(ROW, key="d", body=bytes(1_600_000)))


async def test_rows_without_an_owner_share_all_bytes(make: Make) -> None:
    async with opened(make) as (store,):
        assert await store.add(attrs.evolve(ROW, owner="", body=bytes(2_400_000)))
        assert await store.add(attrs.evolve(ROW, key="b", owner="", body=bytes(1_590_000)))
        with pytest.raises(StoreFull):
            await store.add(attrs.evolve(ROW, key="c", owner="", body=bytes(200_000)))


async def test_rows_and_streams_count_also_without_bodies(make: Make) -> None:
    async with opened(make) as (store,):
        empty = attrs.evolve(ROW, owner="", body=b"")
        await store.add(attrs.evolve(empty, body=bytes(MOST - 5 * HEAD)))
        for key in "bcde":
            assert await store.add(attrs.evolve(empty, key=key))
        with pytest.raises(StoreFull, match="max_bytes"):
            await store.add(attrs.evolve(empty, key="f"))
        assert await store.replace(attrs.evolve(empty, key="b"))  # the size stays the same
        for _ in range(2):
            with pytest.raises(StoreFull, match="max_bytes"):
                await store.append("s", b"", owner="", expires=NOW, max_bytes=0)
            await store.delete("task", "e")
            for number in (1, 2):
                assert await store.append("s", b"", owner="", expires=NOW, max_bytes=0) == number
            await store.discard("s")
            assert await store.add(attrs.evolve(empty, key="e"))


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
        assert not await gone.replace(attrs.evolve(ROW, key="a", holder="gone", body=b"late"))  # another holder has it
        assert await second.get("task", taken[0].key) == taken[0]


async def test_rows_of_its_own_that_a_process_does_not_know_are_claimed(make: Make) -> None:
    async with opened(make, 2) as (store, other):
        await store.lease("me", 1060.0)
        await other.lease("you", 1060.0)
        for key in ("a", "b", "c", "d\n", "é"):
            await store.add(attrs.evolve(ROW, key=key, holder="me"))
        await store.add(attrs.evolve(ROW, key="idle"))
        await store.add(attrs.evolve(ROW, kind="notice", holder="me"))
        await other.add(attrs.evolve(ROW, key="yours", holder="you"))
        await other.add(attrs.evolve(ROW, key="theirs", holder="gone"))
        assert [row.key for row in await store.claim("task", "me", 1000.0, 9)] == ["theirs"]
        rows = await store.claim("task", "me", 1000.0, 9, known="abcd")
        assert sorted(row.key for row in rows) == ["d\n", "theirs", "é"]
        assert len(await store.claim("task", "me", 1000.0, 2, known=())) == 2
        known = ["a", "b", "d\n", "é", "theirs"]
        (row,) = await store.claim("task", "me", 1000.0, 9, known=known)
        assert (row.key, row.holder) == ("c", "me")
        assert await store.get("task", "c") == row
        assert not await store.claim("task", "me", 1000.0, 9, known=[*known, "c"])
        for number in range(20):  # rows of several holders: the order in which a store examines them is free
            await other.add(attrs.evolve(ROW, key=f"their {number}", holder=f"gone {number}"))
        rows = await store.claim("task", "me", 1000.0, 99, known=known)
        assert sorted(row.key for row in rows) == sorted(["c", *(f"their {number}" for number in range(20))])


async def test_a_lease_can_be_renewed_and_ended(make: Make) -> None:
    async with opened(make) as (store,):
        await store.add(attrs.evolve(ROW, holder="me"))
        await store.lease("me", 1030.0)
        await store.lease("me", 1060.0)
        assert not await store.claim("task", "you", 1040.0, 9)
        await store.lease("me", -inf)
        assert [row.holder for row in await store.claim("task", "you", 1040.0, 9)] == ["you"]
        assert not await store.claim("task", "you", 1040.0, 9)  # the rows are its own


async def test_each_process_receives_changes(make: Make) -> None:
    async with opened(make, 2) as (store, other):
        number, names = await other.changes(-1)
        assert not names
        received: list[tuple[str, str]] = []

        async def listen() -> None:
            nonlocal number
            while ("task", "b") not in received:
                number, names = await other.changes(number)
                received.extend(names)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            await store.add(ROW)
            await store.replace(ROW)
            await store.add(attrs.evolve(ROW, key="b"))
        assert received[-1] == ("task", "b")
        assert set(received) == {("task", "a"), ("task", "b")}
        assert (await other.changes(-1))[0] == number


async def test_a_late_reader_of_changes_receives_each_row(make: Make) -> None:
    async with opened(make) as (store,):
        start, _ = await store.changes(-1)
        async with trio.open_nursery() as nursery:
            for number in range(1200):
                nursery.start_soon(store.add, attrs.evolve(ROW, key=str(number)))
        received: set[tuple[str, str]] = set()
        while len(received) < 1200:
            start, names = await store.changes(start)
            received.update(names)


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
async def test_each_store_behaves_like_the_store_in_memory(make: Make, seed: int) -> None:
    dice, model = random.Random(seed), MemoryStore(max_bytes=MOST)
    async with opened(make, 2) as stores, model:
        for step in range(300):
            name, arguments, options = a_call(dice)
            want = await outcome(getattr(model, name)(*arguments, **options))
            # Each holder is one process.
            holder = arguments[0] if name == "lease" else arguments[1] if name == "claim" else "pq"[step % 2]
            store = stores["pq".index(holder)]
            assert await outcome(getattr(store, name)(*arguments, **options)) == want, (step, name, arguments)


def a_call(dice: random.Random) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A random call of a store, with few names and values, so that calls affect the same rows."""
    kind, key, owner = (
        dice.choice(("k", "kk", "k:")),
        dice.choice(("a", "ka", "b:", "é")),
        dice.choice(("", "ann", "b")),
    )
    when, size, holder = (
        dice.choice((1.5, 7.25, inf)),
        dice.choice((0, 10, 360_000, 1_600_000)),
        dice.choice(("", "p", "q")),
    )
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
        options = {"owner": owner, "expires": when, "max_bytes": dice.choice((100, 400_000, 2_400_000))}
    return name, calls[name], options


async def outcome(call: Awaitable[Any]) -> Any:
    """The result of a call, or the limit of its `StoreFull`.  Claimed rows are sorted, because they have no order."""
    try:
        found = await call
    except StoreFull as full:
        return full.limit
    if isinstance(found, tuple):
        return found[0], list(found[1])
    return sorted(found, key=lambda row: (row.created, row.key)) if isinstance(found, list) else found
