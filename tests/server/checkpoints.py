"""Cancelling at every checkpoint, and streams on which writes block.

`cancel_everywhere(scenario, watch=...)` runs a scenario again and again, each time in a fresh `trio.run` under a mock
clock, and at the n-th step of the tasks it watches does the deed: it cancels the scope of the window that the scenario
has opened, or whatever the window was given to do (drop the link, send a cancellation).  n = 0 is before the first
checkpoint; it goes on until a run ends without having got to n.  Trio's order of tasks is seeded, so step n is the same
in every run, and `only=n` runs the one that failed.  Where several tasks are woken at once, try more seeds than one:
they are the orders in which those tasks may run.

    async def scenario(attempt: Attempt) -> None:
        async with connected(server, "2025-11-25", streams=attempt.streams(narrow)) as wire:
            with attempt.window():
                await something()
            assert await wire.call("ping") == {}  # the link still works

    assert cancel_everywhere(scenario, watch="tools/call") > 10

`watch` is a part of a task's name (that of the one which runs the scenario is "the scenario"), or a predicate.  The
steps of a task show every place where it can be interrupted *between* two deeds; `watch=anything` counts the steps of
all tasks, and so interrupts it also while it waits, such as in the middle of a `send_all` that the peer reads byte by
byte.

After each run: no task is left that was not there before, no file descriptor, no busy thread; and what the peer's end
of every pair from `attempt.streams` was sent consists of whole lines of JSON.  Whatever else must hold (the link still
works, or is closed) the scenario checks itself, after the window or in `after`.

A stream here is like a pipe of the operating system: what did not fit when the sender is cancelled is never sent.  (In
Trio's own lockstep streams it can still be read, so that a line cut in two would not be seen.)
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import trio
from trio.lowlevel import Task
from trio.testing import MockClock

__all__ = [
    "PATIENCE",
    "Attempt",
    "Leak",
    "Pair",
    "PipeEnd",
    "Stuck",
    "any_task",
    "awaiting_threads",
    "busy_threads",
    "cancel_at_each_step",
    "one_byte_pipe",
    "open_fds",
    "pipe_pair",
    "running_tasks",
    "stuck",
    "task_positions",
    "unlimited_pipe",
    "unwrapped",
    "wait_or_fail",
]

T = TypeVar("T")

# A server keeps tasks for calls that are to come.  The supervisor of a worker that is busy is as busy as the worker.
_IDLE = ("a worker that waits for the next call", "the supervisor of a worker")

PATIENCE = 86_400.0
"""Seconds after which something that was waited for does not come any more: longer than any deadline under test, and
under a mock clock no time at all.  Under the real clock the timeout of the test is sooner."""


class Leak(AssertionError):
    """Something outlived the run."""


class Stuck(AssertionError):
    """Everybody waits, and nothing will happen any more."""


# What is there.


def running_tasks() -> set[Task]:
    """Every task of this run but Trio's own, which are there from its first to its last step, and idle workers."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    found, ahead = set(), [root]
    while ahead:
        task = ahead.pop()
        found.add(task)
        ahead += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return {task for task in found if not task.name.startswith("<") and task.name not in _IDLE}


def busy_threads() -> set[str]:
    """The names of the threads that do something: not Trio's idle workers, which it keeps, nor daemons of others."""
    main = threading.main_thread()
    return {thread.name for thread in threading.enumerate() if thread is not main and _works(thread)}


def _works(thread: threading.Thread) -> bool:
    worker = getattr(getattr(thread, "_target", None), "__self__", None)
    if isinstance(worker, trio._core._thread_cache.WorkerThread):
        return worker not in trio._core._thread_cache.THREAD_CACHE._idle_workers
    return not thread.daemon


def awaiting_threads() -> bool:
    """Whether some task waits for a thread."""
    return any(
        frame.f_code.co_name == "to_thread_run_sync"
        for task in running_tasks()
        for frame, _ in task.iter_await_frames()
    )


def open_fds() -> set[tuple[int, str]]:
    """The open file descriptors and what they lead to; empty where the system does not tell."""
    found: set[tuple[int, str]] = set()
    if os.path.isdir("/proc/self/fd"):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one by which the directory was read
                found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def task_positions() -> str:
    """The tasks of this run and the lines at which they wait, innermost last."""
    return "\n".join(sorted(f"  {task.name}: {_stands(task)}" for task in running_tasks()))


def _stands(task: Task) -> str:
    own = [
        f"{os.path.basename(frame.f_code.co_filename)}:{line} {frame.f_code.co_name}"
        for frame, line in task.iter_await_frames()
        if f"{os.sep}trio{os.sep}" not in frame.f_code.co_filename
    ]
    return " > ".join(own[-4:]) or "(not started, or inside Trio)"


def stuck(why: str) -> Stuck:
    """The error that ends a run in which all wait for ever.  From now on no shield keeps anybody from being cancelled:
    otherwise the test would hang instead of failing."""
    error = Stuck(f"{why}; the tasks:\n{task_positions()}")
    for task in running_tasks():
        status: Any = task._cancel_status
        while status is not None:
            status._scope.shield = False
            status = status._parent
    return error


async def wait_or_fail(wait: Callable[[], Awaitable[T]], what: str) -> T:
    """What `wait` returns; `Stuck` instead of waiting for ever.  It may be called again, so it must have no effects."""
    while True:
        with trio.move_on_after(PATIENCE):
            return await wait()
        # A mock clock jumps also while a thread works, for it knows only tasks.
        if not awaiting_threads():
            raise stuck(f"waited in vain for {what}")


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Takes the groups off that nurseries put around a single exception."""
    try:
        yield
    except BaseExceptionGroup as group:
        one: BaseException = group
        while isinstance(one, BaseExceptionGroup) and len(one.exceptions) == 1:
            one = one.exceptions[0]
        context = one.__context__
        try:
            raise one
        finally:
            one.__context__ = context  # as it was, not the group


# Streams.


class _Pipe:
    """One direction: a buffer of `capacity` bytes, and all that has ever been put into it."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.buffer = bytearray()
        self.passed = bytearray()
        self.no_sender = self.no_receiver = False
        self.changed = trio.lowlevel.ParkingLot()

    async def put(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        await trio.lowlevel.checkpoint()
        while True:
            if self.no_sender:
                raise trio.ClosedResourceError
            if self.no_receiver:
                raise trio.BrokenResourceError
            room = min(len(rest), self.capacity - len(self.buffer))
            if room > 0:
                self.buffer += rest[: int(room)]
                self.passed += rest[: int(room)]
                rest = rest[int(room) :]
                self.changed.unpark_all()
            if not rest:
                return
            await self.changed.park()

    async def wait_for_room(self) -> None:
        await trio.lowlevel.checkpoint()
        while len(self.buffer) >= self.capacity and not self.no_sender and not self.no_receiver:
            await self.changed.park()
        if self.no_sender:
            raise trio.ClosedResourceError

    async def get(self, max_bytes: int | None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError("max_bytes must be at least 1")
        await trio.lowlevel.checkpoint()
        while not self.buffer and not self.no_sender and not self.no_receiver:
            await self.changed.park()
        if self.no_receiver:
            raise trio.ClosedResourceError
        data = bytes(self.buffer[:max_bytes])
        del self.buffer[:max_bytes]
        self.changed.unpark_all()
        return data

    def close_sender(self) -> None:
        self.no_sender = True
        self.changed.unpark_all()

    def close_receiver(self) -> None:
        self.no_receiver = True
        self.changed.unpark_all()


class PipeEnd(trio.abc.HalfCloseableStream):
    """One end of a pair.  `heard` is all that the other end has put on the way to here, whether it was read or not."""

    def __init__(self, out: _Pipe, into: _Pipe) -> None:
        self._out, self._into = out, into
        self._sending = self._receiving = False

    @property
    def heard(self) -> bytes:
        return bytes(self._into.passed)

    @contextlib.contextmanager
    def _alone(self, doing: str) -> Iterator[None]:
        if getattr(self, doing):
            raise trio.BusyResourceError("another task is at it")
        setattr(self, doing, True)
        try:
            yield
        finally:
            setattr(self, doing, False)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._alone("_sending"):
            await self._out.put(data)

    async def wait_send_all_might_not_block(self) -> None:
        with self._alone("_sending"):
            await self._out.wait_for_room()

    async def send_eof(self) -> None:
        with self._alone("_sending"):
            self._out.close_sender()
            await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        with self._alone("_receiving"):
            return await self._into.get(max_bytes)

    def close(self) -> None:
        self._out.close_sender()
        self._into.close_receiver()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()


Pair = tuple[PipeEnd, PipeEnd]


def pipe_pair(capacity: float) -> Pair:
    """The two ends of a stream that holds `capacity` bytes each way."""
    there, back = _Pipe(capacity), _Pipe(capacity)
    return PipeEnd(there, back), PipeEnd(back, there)


def unlimited_pipe() -> Pair:
    """Writes never block."""
    return pipe_pair(math.inf)


def one_byte_pipe() -> Pair:
    """One byte at a time: a write blocks until the reader has taken all of it but its last byte."""
    return pipe_pair(1)


# The harness.


def any_task(task: Task) -> bool:
    """Watch every task."""
    return True


class Attempt(trio.abc.Instrument):
    """One run of a scenario, at whose n-th step the deed is done."""

    def __init__(self, n: int, watch: str | Callable[[Task], bool]) -> None:
        self.n = n
        self.scope = trio.CancelScope()
        self.opened = False  # whether the scenario has opened its window
        self.fired = False  # whether the deed was done in this run
        self.where = ""  # the task and line it was done at
        self.ends: list[PipeEnd] = []  # the peer's
        self._watched: Callable[[Task], bool] = watch if callable(watch) else lambda task: watch in task.name
        self._deed: Callable[[], object] = self.scope.cancel
        self._open = False
        self._steps = 0
        self._began = False

    @contextlib.contextmanager
    def window(self, deed: Callable[[], object] | None = None) -> Iterator[trio.CancelScope]:
        """Steps count while this is open.  Its scope is cancelled at the n-th, unless there is another `deed`, which
        is called between two steps, outside of any task."""
        assert not self.opened, "a run has one window"
        self.opened = True
        self._deed = deed or self._deed
        with self.scope:
            self._open = True
            try:
                self._step("at the window")
                yield self.scope
            finally:
                self._open = False

    def streams(self, make: Callable[[], Pair] = unlimited_pipe) -> Callable[[], Pair]:
        """Makes pairs whose first end, the peer's, is looked at after the run."""

        def made() -> Pair:
            pair = make()
            self.ends.append(pair[0])
            return pair

        return made

    def before_task_step(self, task: Task) -> None:
        if self._open and not self._began and self._watched(task):
            self._step(f"{task.name}: {_stands(task)}" if self._steps == self.n else "")

    def _step(self, where: str) -> None:
        if self._steps == self.n and not self._began:
            self._began, self.where = True, where
            self._deed()
            self.fired = True
        self._steps += 1

    def check(self, may_cut: bool) -> None:
        # Trio logs what an instrument raises, and goes on without the instrument.
        assert self.fired == self._began, "the deed failed: see the log"
        assert self.opened, "the scenario opened no window"
        for end in self.ends:
            *lines, rest = end.heard.split(b"\n")
            for line in lines:
                json.loads(line)
            if rest and not may_cut:
                raise Leak(f"the peer was left with a part of a line: {rest[:200]!r}")


def cancel_at_each_step(
    scenario: Callable[[Attempt], Awaitable[None]],
    *,
    watch: str | Callable[[Task], bool],
    after: Callable[[Attempt], None] | None = None,
    only: int | None = None,
    most: int = 5000,
    may_cut: bool = False,
    seed: int = 0,
) -> int:
    """Run `scenario` with the deed done at every step; returns at how many it was.

    `after` is called when a run is over.  `may_cut` allows the last line to the peer to be cut short, for what is
    documented to do so.  What fails says at which step it did, for `only`.
    """
    for n in range(most) if only is None else [only]:
        attempt = Attempt(n, watch)
        try:
            _run(scenario, attempt, seed)
            attempt.check(may_cut)
            if after is not None:
                after(attempt)
        except BaseException as error:
            error.add_note(f"with the deed at step {n}, {attempt.where or 'which did not come'}")
            raise
        if not attempt.fired:
            # The window itself is step 0: a watched task that never takes a step means that nothing was tried.
            assert n > 1 or only is not None, f"no step of {watch} was seen"
            return n
    assert only is not None, f"not at an end after {most} steps"
    return 1


def _run(scenario: Callable[[Attempt], Awaitable[None]], attempt: Attempt, seed: int) -> None:
    fds, threads = open_fds(), busy_threads()
    with _ordered(seed), unwrapped():
        trio.run(_guarded, scenario, attempt, clock=MockClock(autojump_threshold=0), instruments=[attempt])
    # A worker thread hands over its result just before it is idle: the only thing here that happens in real time.
    until = time.monotonic() + 5
    while busy_threads() - threads and time.monotonic() < until:
        time.sleep(0.001)
    if left := busy_threads() - threads:
        raise Leak(f"threads were left: {sorted(left)}")
    if more := open_fds() - fds:
        raise Leak(f"file descriptors were left: {sorted(more)}")


async def _guarded(scenario: Callable[[Attempt], Awaitable[None]], attempt: Attempt) -> None:
    trio.lowlevel.current_task().name = "the scenario"
    before = running_tasks()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watchdog, name="the watchdog")
        await scenario(attempt)
        nursery.cancel_scope.cancel()
    # A task of Trio's may still be about to run an asynchronous generator to its end.
    await trio.testing.wait_all_tasks_blocked()
    if left := running_tasks() - before:
        raise Leak(f"tasks were left: {sorted(task.name for task in left)}\n{task_positions()}")


async def _watchdog() -> None:
    days = 0
    while days < 30:  # a scenario may sleep, though not for a month
        await trio.sleep(PATIENCE)
        days = 0 if awaiting_threads() else days + 1
    raise stuck("the scenario does not end")


@contextlib.contextmanager
def _ordered(seed: int) -> Iterator[None]:
    """The order in which Trio runs tasks that could run at the same time, from a seed; as pytest-trio has it."""
    inside: Any = trio._core._run
    was, state = inside._ALLOW_DETERMINISTIC_SCHEDULING, inside._r.getstate()
    inside._ALLOW_DETERMINISTIC_SCHEDULING = True
    inside._r.setstate(random.Random(seed).getstate())
    try:
        yield
    finally:
        inside._ALLOW_DETERMINISTIC_SCHEDULING = was
        inside._r.setstate(state)
