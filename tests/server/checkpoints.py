"""Cancellation at each checkpoint, and streams on which writes block.

`cancel_at_each_step(scenario, watch=...)` runs a scenario many times, each time in a new `trio.run` under a mock clock.
At the n-th step of the watched tasks it does its action: it cancels the scope of the window that the scenario has
opened, or does the action that the window was given (drop the link, send a cancellation).  n = 0 is before the first
checkpoint.  n increases until a run ends before its step n.  Trio's order of tasks is seeded, so step n is the same in
every run, and `only=n` repeats the run that failed.  If several tasks wake at the same time, try several seeds: each
seed is another order of these tasks.

    async def scenario(attempt: Attempt) -> None:
        async with connected(server, "2025-11-25", streams=attempt.streams(one_byte_pipe)) as wire:
            with attempt.window():
                await wire.call("tools/call", {"name": "echo"})
            assert await wire.call("ping") == {}  # the link still works

    assert cancel_at_each_step(scenario, watch="tools/call") > 10

`watch` is a part of a task's name, or a predicate.  (The task that runs the scenario has the name "the scenario".)  The
steps of one task are all places where it can be interrupted *between* two operations.  `watch=any_task` counts the
steps of all tasks.  So it also interrupts a task that waits, for example in the middle of a `send_all` that the peer
reads byte by byte.

After each run, the harness checks that the run left no task, no file descriptor and no busy thread, and that the bytes
sent to the peer's end of each pair from `attempt.streams` are complete lines of JSON.  The scenario itself checks the
rest, for example that the link still works or is closed: after the window, or in `after`.

A stream here is like a pipe of the operating system: when the sender is cancelled, the bytes that did not fit are never
sent.  (Trio's own lockstep streams still deliver them, so a test would not notice an incomplete line.)
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

# A server keeps idle tasks for later calls.  The supervisor of a busy worker is not idle, because the worker is not.
_IDLE = ("a worker that waits for the next call", "the supervisor of a worker")

PATIENCE = 86_400.0
"""Seconds after which a wait fails: longer than any deadline under test.  Under a mock clock they pass at once.  Under
the real clock the timeout of the test comes first."""


class Leak(AssertionError):
    """A task, a thread or a file descriptor is left after the run, or a partial line."""


class Stuck(AssertionError):
    """All tasks wait, and no event can come."""


# Tasks, threads and file descriptors of the run.


def running_tasks() -> set[Task]:
    """All tasks of this run, except Trio's own tasks, which exist during the whole run, and idle workers."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    found, ahead = set(), [root]
    while ahead:
        task = ahead.pop()
        found.add(task)
        ahead += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return {task for task in found if not task.name.startswith("<") and task.name not in _IDLE}


def busy_threads() -> set[str]:
    """The names of the busy threads, without the idle threads in Trio's cache and without daemon threads of others."""
    main = threading.main_thread()
    return {thread.name for thread in threading.enumerate() if thread is not main and _is_busy(thread)}


def _is_busy(thread: threading.Thread) -> bool:
    worker = getattr(getattr(thread, "_target", None), "__self__", None)
    if isinstance(worker, trio._core._thread_cache.WorkerThread):
        return worker not in trio._core._thread_cache.THREAD_CACHE._idle_workers
    return not thread.daemon


def awaiting_threads() -> bool:
    """Whether a task waits for a thread."""
    return any(
        frame.f_code.co_name == "to_thread_run_sync"
        for task in running_tasks()
        for frame, _ in task.iter_await_frames()
    )


def open_fds() -> set[tuple[int, str]]:
    """The open file descriptors and their targets; empty if the system has no /proc/self/fd."""
    found: set[tuple[int, str]] = set()
    if os.path.isdir("/proc/self/fd"):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor by which `listdir` read the directory
                found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def task_positions() -> str:
    """The tasks of this run and the lines at which they wait, innermost call last."""
    return "\n".join(sorted(f"  {task.name}: {_position(task)}" for task in running_tasks()))


def _position(task: Task) -> str:
    own = [
        f"{os.path.basename(frame.f_code.co_filename)}:{line} {frame.f_code.co_name}"
        for frame, line in task.iter_await_frames()
        if f"{os.sep}trio{os.sep}" not in frame.f_code.co_filename
    ]
    return " > ".join(own[-4:]) or "(not started, or inside Trio)"


def stuck(why: str) -> Stuck:
    """The error that ends a run in which all tasks wait forever.  It removes all shields, because a shielded task would
    let the test hang instead of failing."""
    error = Stuck(f"{why}; the tasks:\n{task_positions()}")
    for task in running_tasks():
        status: Any = task._cancel_status
        while status is not None:
            status._scope.shield = False
            status = status._parent
    return error


async def wait_or_fail(wait: Callable[[], Awaitable[T]], what: str) -> T:
    """The result of `wait`, or `Stuck` instead of an endless wait.  `wait` may be called again, so it must have no side
    effects."""
    while True:
        with trio.move_on_after(PATIENCE):
            return await wait()
        # A mock clock also jumps while a thread works, because it considers only tasks.
        if not awaiting_threads():
            raise stuck(f"no event can end the wait for {what}")


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Remove the exception groups that nurseries put around a single exception."""
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
            one.__context__ = context  # the original one: `raise` has set the group


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
    """One end of a pair.  `heard` has all bytes that the other end has put into the pipe, read or not."""

    def __init__(self, out: _Pipe, into: _Pipe) -> None:
        self._out, self._into = out, into
        self._sending = self._receiving = False

    @property
    def heard(self) -> bytes:
        return bytes(self._into.passed)

    @contextlib.contextmanager
    def _exclusive(self, doing: str) -> Iterator[None]:
        if getattr(self, doing):
            raise trio.BusyResourceError("another task uses it")
        setattr(self, doing, True)
        try:
            yield
        finally:
            setattr(self, doing, False)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._exclusive("_sending"):
            await self._out.put(data)

    async def wait_send_all_might_not_block(self) -> None:
        with self._exclusive("_sending"):
            await self._out.wait_for_room()

    async def send_eof(self) -> None:
        with self._exclusive("_sending"):
            self._out.close_sender()
            await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        with self._exclusive("_receiving"):
            return await self._into.get(max_bytes)

    def close(self) -> None:
        self._out.close_sender()
        self._into.close_receiver()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()


Pair = tuple[PipeEnd, PipeEnd]


def pipe_pair(capacity: float) -> Pair:
    """The two ends of a stream with a buffer of `capacity` bytes in each direction."""
    there, back = _Pipe(capacity), _Pipe(capacity)
    return PipeEnd(there, back), PipeEnd(back, there)


def unlimited_pipe() -> Pair:
    """Writes never block."""
    return pipe_pair(math.inf)


def one_byte_pipe() -> Pair:
    """A buffer of one byte: a write blocks until the reader has read all its bytes except the last one."""
    return pipe_pair(1)


# The harness.


def any_task(task: Task) -> bool:
    """Watch every task."""
    return True


class Attempt(trio.abc.Instrument):
    """One run of a scenario, with the action at its n-th step."""

    def __init__(self, n: int, watch: str | Callable[[Task], bool]) -> None:
        self.n = n
        self.scope = trio.CancelScope()
        self.opened = False  # whether the scenario has opened its window
        self.fired = False  # whether the action was done in this run
        self.where = ""  # the task and the line at which it was done
        self.ends: list[PipeEnd] = []  # the peer's
        self._watched: Callable[[Task], bool] = watch if callable(watch) else lambda task: watch in task.name
        self._action: Callable[[], object] = self.scope.cancel
        self._window_open = False
        self._steps = 0
        self._reached = False

    @contextlib.contextmanager
    def window(self, action: Callable[[], object] | None = None) -> Iterator[trio.CancelScope]:
        """Steps count within this block.  At the n-th step its scope is cancelled, or `action` is called instead,
        between two steps and outside of any task."""
        assert not self.opened, "a run has one window"
        self.opened = True
        self._action = action or self._action
        with self.scope:
            self._window_open = True
            try:
                self._step("at the window")
                yield self.scope
            finally:
                self._window_open = False

    def streams(self, make: Callable[[], Pair] = unlimited_pipe) -> Callable[[], Pair]:
        """A function that makes pairs.  The harness checks the first end of each, the peer's, after the run."""

        def made() -> Pair:
            pair = make()
            self.ends.append(pair[0])
            return pair

        return made

    def before_task_step(self, task: Task) -> None:
        if self._window_open and not self._reached and self._watched(task):
            self._step(f"{task.name}: {_position(task)}" if self._steps == self.n else "")

    def _step(self, where: str) -> None:
        if self._steps == self.n and not self._reached:
            self._reached, self.where = True, where
            self._action()
            self.fired = True
        self._steps += 1

    def check(self, may_cut: bool) -> None:
        # If an instrument raises, Trio logs the exception and goes on without the instrument.
        assert self.fired == self._reached, "the action failed: see the log"
        assert self.opened, "the scenario opened no window"
        for end in self.ends:
            *lines, rest = end.heard.split(b"\n")
            for line in lines:
                json.loads(line)
            if rest and not may_cut:
                raise Leak(f"the peer received only a part of a line: {rest[:200]!r}")


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
    """Run `scenario` once for each step, with the action at that step; return the number of steps.

    `after` is called after each run.  `may_cut` permits an incomplete last line to the peer, for operations that are
    documented to cut a line.  A failure names the step, for `only`.
    """
    for n in range(most) if only is None else [only]:
        attempt = Attempt(n, watch)
        try:
            _run(scenario, attempt, seed)
            attempt.check(may_cut)
            if after is not None:
                after(attempt)
        except BaseException as error:
            error.add_note(f"with the action at step {n}, {attempt.where or 'which the run did not reach'}")
            raise
        if not attempt.fired:
            # The window itself is step 0.  If no watched task takes a step, the run has tested no cancellation.
            assert n > 1 or only is not None, f"no step of {watch} was seen"
            return n
    assert only is not None, f"not at its end after {most} steps"
    return 1


def _run(scenario: Callable[[Attempt], Awaitable[None]], attempt: Attempt, seed: int) -> None:
    fds, threads = open_fds(), busy_threads()
    with _seeded_order(seed), unwrapped():
        trio.run(_run_scenario, scenario, attempt, clock=MockClock(autojump_threshold=0), instruments=[attempt])
    # A worker thread delivers its result shortly before it becomes idle.  Only this takes real time.
    until = time.monotonic() + 5
    while busy_threads() - threads and time.monotonic() < until:
        time.sleep(0.001)
    if left := busy_threads() - threads:
        raise Leak(f"threads were left: {sorted(left)}")
    if more := open_fds() - fds:
        raise Leak(f"file descriptors were left: {sorted(more)}")


async def _run_scenario(scenario: Callable[[Attempt], Awaitable[None]], attempt: Attempt) -> None:
    trio.lowlevel.current_task().name = "the scenario"
    before = running_tasks()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watchdog, name="the watchdog")
        await scenario(attempt)
        nursery.cancel_scope.cancel()
    # A task of Trio may be about to finalize an asynchronous generator.
    await trio.testing.wait_all_tasks_blocked()
    if left := running_tasks() - before:
        raise Leak(f"tasks were left: {sorted(task.name for task in left)}\n{task_positions()}")


async def _watchdog() -> None:
    days = 0
    while days < 30:  # a scenario may sleep, but not for a month
        await trio.sleep(PATIENCE)
        days = 0 if awaiting_threads() else days + 1
    raise stuck("the scenario does not end")


@contextlib.contextmanager
def _seeded_order(seed: int) -> Iterator[None]:
    """Seed the order in which Trio runs tasks that are ready at the same time, as pytest-trio does."""
    inside: Any = trio._core._run
    was, state = inside._ALLOW_DETERMINISTIC_SCHEDULING, inside._r.getstate()
    inside._ALLOW_DETERMINISTIC_SCHEDULING = True
    inside._r.setstate(random.Random(seed).getstate())
    try:
        yield
    finally:
        inside._ALLOW_DETERMINISTIC_SCHEDULING = was
        inside._r.setstate(state)
