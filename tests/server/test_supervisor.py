"""The decisions of the supervisor, without processes and without a clock, and mistakes in the options of workers.

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


class FakeWorkers:
    """A roster, and fake workers that follow its decisions."""

    def __init__(self, size: int) -> None:
        self.roster = Roster(size)
        self.now = 0.0
        self.alive: dict[int, int] = {}  # the number of each process
        self.ready: set[int] = set()
        self.leaving: set[int] = set()
        self._pids = itertools.count(101)

    def starts(self) -> list[int]:
        """Start the workers that the roster wants, and return their numbers."""
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


def started_workers(size: int) -> FakeWorkers:
    fake = FakeWorkers(size)
    fake.open()
    return fake


def test_the_first_worker_starts_alone_and_the_others_when_it_is_ready() -> None:
    fake = FakeWorkers(3)
    assert fake.starts() == [1]
    assert (fake.starts(), fake.roster.wakes_at()) == ([], math.inf)
    fake.becomes_ready(101)
    assert fake.starts() == [2, 3]
    assert (fake.roster.serving, fake.roster.wakes_at()) == (1, math.inf)


def test_a_first_worker_that_cannot_start_ends_the_supervisor() -> None:
    fake = FakeWorkers(3)
    fake.starts()
    assert fake.ends(101) is None
    assert (fake.roster.hopeless, fake.starts(), fake.roster.wakes_at()) == (True, [], math.inf)


def test_repeated_failures_of_a_worker_lengthen_the_pause_before_a_start() -> None:
    fake, pauses = started_workers(2), []
    for _ in range(9):
        pause = fake.ends(fake.pid(1))
        assert pause is not None
        pauses.append(pause)
        assert fake.roster.wakes_at() == fake.now + pause
        if pause:
            assert fake.starts() == []  # not yet
        fake.now += pause
        assert fake.starts() == [1]
        fake.becomes_ready(fake.pid(1))
    assert pauses == [0, 0.5, 1, 2, 4, 8, 10, 10, 10]
    assert fake.ends(fake.pid(2)) == 0  # each worker has its own pause
    assert fake.roster.failures == 10


@pytest.mark.parametrize(("served", "pause"), [(59.9, 0.5), (60.0, 0.0)])
def test_a_minute_of_service_resets_the_pause(served: float, pause: float) -> None:
    fake = started_workers(1)
    fake.ends(fake.pid(1))
    fake.starts()
    fake.becomes_ready(fake.pid(1))
    fake.now += served
    assert fake.ends(fake.pid(1)) == pause


def test_the_supervisor_ends_after_some_failed_starts_of_all_workers() -> None:
    fake = started_workers(2)
    for number in (1, 2):
        fake.ends(fake.pid(number))
    tries = 0
    while not fake.roster.hopeless:
        fake.now = max(fake.now, fake.roster.wakes_at())
        for number in fake.starts():
            tries += 1
            fake.ends(fake.pid(number))
    assert tries == 10
    assert 7 < fake.now < 20


def test_a_worker_that_cannot_start_is_retried_while_another_one_serves() -> None:
    fake = started_workers(2)
    fake.ends(fake.pid(1))
    for _ in range(50):
        fake.now = fake.roster.wakes_at()
        assert fake.starts() == [1]
        assert fake.ends(fake.pid(1)) is not None
    assert (fake.roster.hopeless, fake.roster.serving) == (False, 1)


def test_a_restart_replaces_one_worker_after_the_other() -> None:
    fake = started_workers(3)
    old = {number: fake.pid(number) for number in (1, 2, 3)}
    fake.roster.restart()
    for number in (1, 2, 3):
        assert fake.starts() == [number]
        assert (fake.starts(), fake.roster.serving) == ([], 3)
        assert fake.becomes_ready(fake.pid(number)) == old[number]
        assert (fake.starts(), len(fake.alive)) == ([], 4)
        assert fake.ends(old[number]) is None
    assert (fake.starts(), fake.roster.failures) == ([], 0)


def test_a_restart_keeps_the_old_workers_if_a_new_one_cannot_start() -> None:
    fake = started_workers(3)
    before = set(fake.alive)
    fake.roster.restart()
    fake.starts()
    assert fake.ends(fake.pid(1)) is None
    assert (fake.starts(), set(fake.alive), fake.roster.hopeless) == ([], before, False)
    fake.roster.restart()
    assert fake.starts() == [1]


def test_a_restart_during_a_restart_replaces_the_new_ones_too() -> None:
    fake = started_workers(2)
    fake.roster.restart()
    replaced = []
    for turn in range(3):
        (number,) = fake.starts()
        old = fake.becomes_ready(fake.pid(number))
        assert old is not None
        fake.ends(old)
        replaced.append(number)
        if turn == 0:
            fake.roster.restart()
    assert replaced == [1, 1, 2]
    assert fake.starts() == []


def test_a_worker_that_fails_during_its_replacement_needs_no_second_one() -> None:
    fake = started_workers(2)
    old = fake.pid(1)
    fake.roster.restart()
    fake.starts()
    assert fake.ends(old) == 0
    assert fake.starts() == []  # its successor starts already
    assert fake.becomes_ready(fake.pid(1)) is None
    assert fake.starts() == [2]


def test_no_worker_starts_after_the_stop() -> None:
    fake = started_workers(2)
    fake.roster.restart()
    fake.starts()
    fake.roster.stop()
    for pid in tuple(fake.alive):
        assert fake.ends(pid) is None
    assert (fake.starts(), fake.roster.wakes_at(), fake.roster.failures) == ([], math.inf, 0)


def test_a_worker_that_is_ready_after_the_stop_replaces_no_other() -> None:
    fake = started_workers(1)
    old = fake.pid(1)
    fake.roster.restart()
    fake.starts()
    fake.roster.stop()
    fake.ends(old)
    assert fake.becomes_ready(fake.pid(1)) is None
    assert fake.roster.serving == 1


def move(fake: FakeWorkers, rng: random.Random) -> None:
    """Make one random event happen, after which at least one worker still serves."""
    sound = sorted(fake.ready - fake.leaving)
    starting = sorted(fake.alive.keys() - fake.ready)
    match rng.randrange(6):
        case 0:
            fake.roster.restart()
        case 1 if len(sound) > 1:
            fake.ends(rng.choice(sound))
        case 2 if fake.leaving:
            fake.ends(min(fake.leaving))
        case 3 if starting:
            fake.becomes_ready(rng.choice(starting))
        case 4 if starting:
            fake.ends(rng.choice(starting))
        case 5:
            fake.now += rng.choice([0.1, 1.0, 70.0])


@pytest.mark.parametrize("seed", range(100))
def test_any_order_of_events_ends_with_all_workers_running(seed: int) -> None:
    """There is never more than one extra process, and no worker leaves before its successor is ready."""
    rng, fake = random.Random(seed), started_workers(3)
    for _ in range(60):
        move(fake, rng)
        fake.starts()
        assert len(fake.alive) <= 4
        assert fake.roster.serving == len(fake.ready - fake.leaving) >= 1
    for _ in range(20):
        fake.now += 100
        fake.starts()
        for pid in sorted(fake.alive.keys() - fake.ready):
            fake.becomes_ready(pid)
        for pid in sorted(fake.leaving):
            fake.ends(pid)
    assert sorted(fake.alive.values()) == [1, 2, 3]


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


def test_a_system_without_fork_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(SystemExit, match="wrong: workers need fork, which this system does not have"):
        Server("wrong").run(http="127.0.0.1:0", workers=2)


@pytest.mark.parametrize(("leaves", "waited"), [(False, 0.001), (True, 0.0)])
async def test_a_worker_that_leaves_does_not_delay_the_others(
    leaves: bool, waited: float, autojump_clock: MockClock
) -> None:
    counts = ConnectionCounts(2)
    counts.join(0)
    counts.join(1)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, await trio.open_tcp_stream(*listener.socket.getsockname()):
        if leaves:
            counts.leave(0)
        await counts.turn(0, listener.socket, lambda: 0)  # it still accepts this connection
        begun = trio.current_time()
        await counts.turn(1, listener.socket, lambda: 5)
        assert trio.current_time() - begun == pytest.approx(waited)
