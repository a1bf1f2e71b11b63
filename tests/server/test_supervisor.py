"""Which workers start and leave, decided without processes and without a clock; and mistakes in their options.

`tests/hardening/test_workers.py` has the processes.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trio_mcp import Server, UsageError
from trio_mcp.server import ConnectionCounts, Roster
from trio_mcp.stores import MemoryStore


class Town:
    """A roster, and workers that do what it says."""

    def __init__(self, size: int) -> None:
        self.roster = Roster(size)
        self.now = 0.0
        self.alive: dict[int, int] = {}  # the number of each process
        self.ready: set[int] = set()
        self.leaving: set[int] = set()
        self._pids = itertools.count(101)

    def starts(self) -> list[int]:
        """Start what is to start, and return the numbers."""
        numbers = self.roster.starts(self.now)
        for number in numbers:
            pid = next(self._pids)
            self.alive[pid] = number
            self.roster.started(number, pid)
        return numbers

    def becomes_ready(self, pid: int) -> int | None:
        leaves = self.roster.ready(pid, self.now)
        self.ready.add(pid)
        if leaves is not None:
            self.leaving.add(leaves)
        return leaves

    def ends(self, pid: int) -> float | None:
        del self.alive[pid]
        self.ready.discard(pid)
        self.leaving.discard(pid)
        return self.roster.ended(pid, self.now)

    def pid(self, number: int) -> int:
        """The newest process with this number."""
        return max(pid for pid, its in self.alive.items() if its == number)

    def open(self) -> None:
        """Start all workers."""
        while self.starts():
            for pid in self.alive.keys() - self.ready:
                self.becomes_ready(pid)


def opened(size: int) -> Town:
    town = Town(size)
    town.open()
    return town


def test_the_first_worker_starts_alone_and_the_others_when_it_is_ready() -> None:
    town = Town(3)
    assert town.starts() == [1]
    assert (town.starts(), town.roster.wakes_at()) == ([], math.inf)
    town.becomes_ready(101)
    assert town.starts() == [2, 3]
    assert (town.roster.serving, town.roster.wakes_at()) == (1, math.inf)


def test_a_first_worker_that_cannot_start_is_the_end() -> None:
    town = Town(3)
    town.starts()
    assert town.ends(101) is None
    assert (town.roster.hopeless, town.starts(), town.roster.wakes_at()) == (True, [], math.inf)


def test_a_worker_that_fails_again_and_again_is_replaced_after_longer_and_longer_pauses() -> None:
    town, pauses = opened(2), []
    for _ in range(9):
        pause = town.ends(town.pid(1))
        assert pause is not None
        pauses.append(pause)
        assert town.roster.wakes_at() == town.now + pause
        if pause:
            assert town.starts() == []  # not yet
        town.now += pause
        assert town.starts() == [1]
        town.becomes_ready(town.pid(1))
    assert pauses == [0, 0.5, 1, 2, 4, 8, 10, 10, 10]
    assert town.ends(town.pid(2)) == 0  # each worker for itself
    assert town.roster.failures == 10


@pytest.mark.parametrize(("served", "pause"), [(59.9, 0.5), (60.0, 0.0)])
def test_a_worker_that_has_served_for_a_minute_counts_as_sound(served: float, pause: float) -> None:
    town = opened(1)
    town.ends(town.pid(1))
    town.starts()
    town.becomes_ready(town.pid(1))
    town.now += served
    assert town.ends(town.pid(1)) == pause


def test_workers_that_cannot_start_any_more_are_the_end_after_some_tries() -> None:
    town = opened(2)
    for number in (1, 2):
        town.ends(town.pid(number))
    tries = 0
    while not town.roster.hopeless:
        town.now = max(town.now, town.roster.wakes_at())
        for number in town.starts():
            tries += 1
            town.ends(town.pid(number))
    assert tries == 10
    assert 7 < town.now < 20


def test_a_worker_that_cannot_start_is_tried_for_ever_while_another_one_serves() -> None:
    town = opened(2)
    town.ends(town.pid(1))
    for _ in range(50):
        town.now = town.roster.wakes_at()
        assert town.starts() == [1]
        assert town.ends(town.pid(1)) is not None
    assert (town.roster.hopeless, town.roster.serving) == (False, 1)


def test_a_restart_replaces_one_worker_after_the_other() -> None:
    town = opened(3)
    old = {number: town.pid(number) for number in (1, 2, 3)}
    town.roster.restart()
    for number in (1, 2, 3):
        assert town.starts() == [number]
        assert (town.starts(), town.roster.serving) == ([], 3)
        assert town.becomes_ready(town.pid(number)) == old[number]
        assert (town.starts(), len(town.alive)) == ([], 4)
        assert town.ends(old[number]) is None
    assert (town.starts(), town.roster.failures) == ([], 0)


def test_a_restart_whose_worker_cannot_start_leaves_the_old_ones() -> None:
    town = opened(3)
    before = set(town.alive)
    town.roster.restart()
    town.starts()
    assert town.ends(town.pid(1)) is None
    assert (town.starts(), set(town.alive), town.roster.hopeless) == ([], before, False)
    town.roster.restart()
    assert town.starts() == [1]


def test_a_restart_during_a_restart_replaces_the_new_ones_too() -> None:
    town = opened(2)
    town.roster.restart()
    replaced = []
    for turn in range(3):
        (number,) = town.starts()
        old = town.becomes_ready(town.pid(number))
        assert old is not None
        town.ends(old)
        replaced.append(number)
        if turn == 0:
            town.roster.restart()
    assert replaced == [1, 1, 2]
    assert town.starts() == []


def test_a_worker_that_fails_while_it_is_replaced_makes_room_for_the_new_one() -> None:
    town = opened(2)
    old = town.pid(1)
    town.roster.restart()
    town.starts()
    assert town.ends(old) == 0
    assert town.starts() == []  # it starts already
    assert town.becomes_ready(town.pid(1)) is None
    assert town.starts() == [2]


def test_nothing_starts_after_the_stop() -> None:
    town = opened(2)
    town.roster.restart()
    town.starts()
    town.roster.stop()
    for pid in tuple(town.alive):
        assert town.ends(pid) is None
    assert (town.starts(), town.roster.wakes_at(), town.roster.failures) == ([], math.inf, 0)


def test_a_worker_that_becomes_ready_after_the_stop_replaces_nothing() -> None:
    town = opened(1)
    old = town.pid(1)
    town.roster.restart()
    town.starts()
    town.roster.stop()
    town.ends(old)
    assert town.becomes_ready(town.pid(1)) is None
    assert town.roster.serving == 1


def move(town: Town, chance: random.Random) -> None:
    """Let one thing happen; at least one worker goes on."""
    sound = sorted(town.ready - town.leaving)
    starting = sorted(town.alive.keys() - town.ready)
    match chance.randrange(6):
        case 0:
            town.roster.restart()
        case 1 if len(sound) > 1:
            town.ends(chance.choice(sound))
        case 2 if town.leaving:
            town.ends(min(town.leaving))
        case 3 if starting:
            town.becomes_ready(chance.choice(starting))
        case 4 if starting:
            town.ends(chance.choice(starting))
        case 5:
            town.now += chance.choice([0.1, 1.0, 70.0])


@pytest.mark.parametrize("seed", range(100))
def test_any_order_of_events_ends_with_all_workers_in_place(seed: int) -> None:
    """At every moment there is one process more than workers at most, and no worker leaves before its successor."""
    chance, town = random.Random(seed), opened(3)
    for _ in range(60):
        move(town, chance)
        town.starts()
        assert len(town.alive) <= 4
        assert town.roster.serving == len(town.ready - town.leaving) >= 1
    for _ in range(20):
        town.now += 100
        town.starts()
        for pid in sorted(town.alive.keys() - town.ready):
            town.becomes_ready(pid)
        for pid in sorted(town.leaving):
            town.ends(pid)
    assert sorted(town.alive.values()) == [1, 2, 3]


# Mistakes.


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"workers": 0}, "workers must be a number of processes, 1 or more, got 0"),
        ({"workers": True}, "workers must be a number of processes, 1 or more, got True"),
        ({"workers": "4"}, "workers must be a number of processes, 1 or more, got '4'"),
        ({"workers": 2, "http": "0.0.0.0:0"}, "other machines can reach 0.0.0.0; give the host names"),
        ({"workers": 2, "shutdown_timeout": -1}, "shutdown_timeout must be"),
        ({"workers": 2, "sse_path": "/sse", "message_path": "/messages"}, "sse_path cannot be used with workers"),
    ],
)
def test_wrong_options_are_refused_before_a_process_starts(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Server("wrong").run(**{"http": "127.0.0.1:0", **options})


def test_a_store_in_memory_cannot_be_shared() -> None:
    with pytest.raises(UsageError, match="workers cannot share a MemoryStore; leave store= out"):
        Server("wrong", store=MemoryStore()).run(http="127.0.0.1:0", workers=2)


def test_workers_serve_http_only() -> None:
    with pytest.raises(TypeError, match="workers is an option for HTTP"):
        Server("wrong").run(workers=2)


async def test_workers_cannot_start_in_a_trio_program_or_in_a_thread() -> None:
    with pytest.raises(UsageError, match="in one already"):
        Server("wrong").run(http="127.0.0.1:0", workers=2)
    with pytest.raises(UsageError, match="must be called in the main thread"):
        await trio.to_thread.run_sync(lambda: Server("wrong").run(http="127.0.0.1:0", workers=2))


def test_a_system_without_fork_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(SystemExit, match="wrong: workers need fork, which this system does not have"):
        Server("wrong").run(http="127.0.0.1:0", workers=2)


@pytest.mark.parametrize(("leaves", "waited"), [(False, 0.001), (True, 0.0)])
async def test_a_worker_that_leaves_lets_no_other_one_wait(
    leaves: bool, waited: float, autojump_clock: MockClock
) -> None:
    counts = ConnectionCounts(2)
    counts.join(0)
    counts.join(1)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, await trio.open_tcp_stream(*listener.socket.getsockname()):
        if leaves:
            counts.leave(0)
        await counts.turn(0, listener.socket, lambda: 0)  # it accepts this one still
        begun = trio.current_time()
        await counts.turn(1, listener.socket, lambda: 5)
        assert trio.current_time() - begun == pytest.approx(waited)
