"""The contract of stores, for each of them: streams of events, and messages."""

from __future__ import annotations

from functools import partial
from math import inf

import attrs
import pytest
import trio
import trio.testing

from tests.stores.shared import NOW, ROW, Make, opened, take
from trio_mcp.stores import Resync, Store, StoreFull
from trio_mcp.stores.rows import EVENT, Message  # only authors of stores need them


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
        await append(store, "s", bytes(20), max_bytes=most)  # needs the room of two events
        assert [number for number, _ in (await store.read("s", 0, 9))[1]] == [5, 6]
        assert await append(store, "s", bytes(most), max_bytes=most) == [7]  # too large for itself
        oldest, events = await store.read("s", 6, 9)
        assert (oldest, list(events)) == (8, [])
        await append(store, "s", b"", max_bytes=most)
        oldest, events = await store.read("s", 6, 9)
        assert (oldest, list(events)) == (8, [(8, b"")])


async def test_simultaneous_appends_get_different_numbers(make: Make) -> None:
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
        await append(store, "s", bytes(2_400_000), max_bytes=2_404_000)
        with pytest.raises(StoreFull, match="max_bytes"):
            await append(store, "t", bytes(800_000), max_bytes=1_200_000)
        with pytest.raises(StoreFull, match="max_bytes"):
            await store.add(attrs.evolve(ROW, body=bytes(800_000)))
        assert await store.add(attrs.evolve(ROW, owner="bob", body=bytes(800_000)))
        assert (await store.read("t", 0, 9))[0] == 0
        assert await append(store, "s", bytes(2_400_000), max_bytes=2_404_000) == [2]  # replaces the first event
        await store.discard("s")
        assert await append(store, "t", bytes(1_600_000), max_bytes=2_000_000) == [1]
        await store.sweep(1e9)
        assert await store.add(attrs.evolve(ROW, key="b", owner="eve", body=bytes(3_190_000)))


async def test_an_owner_cannot_fill_the_store_with_many_rows(make: Make) -> None:
    async with opened(make) as (store,):
        for added in range(18):  # three quarters of the store
            assert await store.add(attrs.evolve(ROW, key=str(added), body=bytes(158_000)))
        with pytest.raises(StoreFull, match="max_bytes"):
            await store.add(attrs.evolve(ROW, key="18", body=bytes(158_000)))


# Messages


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


async def test_a_cancelled_receiver_does_not_stop_other_receivers(make: Make) -> None:
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


async def test_a_receiver_that_does_not_read_gets_resync(make: Make) -> None:
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
