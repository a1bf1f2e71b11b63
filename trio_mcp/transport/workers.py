"""Workers: the tasks that handlers run in, and what keeps a handler's mistake inside its own call.

While it runs, a handler has a task, a cancel scope and context variables to itself.  A task and a scope cost about as
much as the rest of a short call, so a worker is used again: after a call it waits for the next one of the same run.

A handler may leave a nursery or a cancel scope open: it drops an async generator that holds one, by `return` or `break`
in an `async for`, or enters one and never exits it.  Trio cannot repair that.  It lets the task fail at its end, and
the nursery around the task with it.  Therefore each worker is the only task in a nursery of its own, which a second
task, its supervisor, holds, and that failure ends there.  A nursery for each call would do the same for 12 µs a call.

| What a call leaves | What becomes of its worker |
|---|---|
| nothing | it waits for the next call |
| a cancellation that came too late | it ends |
| a lock that it has not released | it ends, which breaks the lock for the tasks that wait for it |
| a nursery or a scope | the call fails; the worker waits for nothing any more, not even a write, and ends |

The tasks in a nursery that was left open are cancelled when the worker ends.  One that shields itself goes on.  It must
not outlive the run, which Trio takes for an error of its own; so the supervisor waits for it.

What a handler raises is its failure, but for what passes on: see `Worker.judged`.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Container, Mapping
from contextlib import suppress
from contextvars import Context as Variables
from contextvars import copy_context
from functools import partial
from operator import attrgetter
from typing import Any, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

from trio_mcp.transport.nursery import open_nursery, sole

__all__ = [
    "HandlerEscape", "LeftOpen", "RunStopped", "Watchdog", "Work", "Worker", "WorkerPool", "called", "contained",
    "guarded", "scope_of", "stale", "watchdog",
]  # fmt: skip

_log = logging.getLogger("trio_mcp")

P = ParamSpec("P")
T = TypeVar("T")
Work: TypeAlias = Callable[["Worker", Any], Awaitable[object]]

_IDLE = "a worker that waits for the next call"
_SUPERVISOR = "the supervisor of a worker"
_SPARE = 64  # idle workers that are kept in any case: as many calls as a lively client has in flight
_MOST = 5_000  # idle workers that are kept at the most
_LATELY = 20_000  # calls in which a worker was wanted, or is not kept
_HELD = 1_000  # dropped generators that are held for one call

# Two names of Trio are private, and nothing public tells the same.
#
# The scope that a task is in.  Without it, a scope around each call finds another that was left open, for 3.3 µs; and a
# nursery that was left open is found by a public name.
_HAS_SCOPES = hasattr(Task, "_cancel_status")
scope_of: Callable[[Any], object] = (
    attrgetter("_cancel_status") if _HAS_SCOPES else lambda task: task.child_nurseries or None
)
# The tasks that hold a lock.  Without it no worker is used again: a task that ends breaks its locks.
_UNKNOWN: Container[Task] = ()
_lock_holders = _UNKNOWN
with suppress(ImportError):
    from trio._core._parking_lot import GLOBAL_PARKING_LOT_BREAKER as _lock_holders


def _unguarded(work: Awaitable[T]) -> Awaitable[T]:
    return work


async def _guarded(work: Awaitable[T]) -> T:
    with trio.CancelScope():  # raises RuntimeError where one inside was left open, and puts the task back here
        return await work
    raise AssertionError  # nobody cancels it


guarded: Callable[[Awaitable[T]], Awaitable[T]] = _unguarded if _HAS_SCOPES else _guarded
"""To be put around each call of a handler."""


class LeftOpen(RuntimeError):
    """A handler has ended inside a nursery or a cancel scope that it had entered."""

    def __init__(self, task: Task) -> None:
        what = "nursery" if task.child_nurseries else "cancel scope"
        super().__init__(
            f"a {what} was left open: enter it by `with` or `async with`, and wrap an async generator that has one in "
            "`async with contextlib.aclosing(...)`, which closes it also after `return` or `break`"
        )


class HandlerEscape(RuntimeError):
    """A handler has raised, as the cause of this, what would have ended more than its call."""


class RunStopped(Exception):
    """The run has ended, and what was called in one of its workers with it."""


class Watchdog(Protocol):
    """What sees that a handler holds the event loop; see `watchdog`."""

    asleep: bool

    def wake(self) -> None:
        """A call begins."""

    def watch(self, pool: WorkerPool) -> None:
        """It is there."""


watchdog: trio.lowlevel.RunVar[Watchdog | None] = trio.lowlevel.RunVar("what watches the workers", default=None)


class WorkerPool:
    """The workers of one run, in its nursery."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._variables = copy_context()
        self._idle: list[Worker] = []
        self._most = 0 if _lock_holders is _UNKNOWN else _MOST
        self._hired = 0
        self._unwanted = 0  # of those that are idle, the first so many have been since it was last looked
        self.workers = 0
        self._watchdog = watchdog.get()
        if self._watchdog is not None:
            self._watchdog.watch(self)
        self.ended = False
        self.serving = _guard_generators()

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def busy(self) -> bool:
        """Whether there is a call.  It may be asked from another thread."""
        return self.workers > len(self._idle)

    def hire(self) -> Worker:
        """A worker, to be started now."""
        if self._watchdog is not None and self._watchdog.asleep:
            self._watchdog.wake()
        self._hired += 1
        if not self._hired % _LATELY:
            self._dismiss(self._idle[_SPARE : self._unwanted])
            self._unwanted = len(self._idle)
        if not self._idle:
            self.workers += 1
            return Worker(self)
        worker = self._idle.pop()
        if len(self._idle) < self._unwanted:
            self._unwanted = len(self._idle)
        return worker

    def start(self, worker: Worker, work: Work, argument: Any, name: str, variables: Variables) -> None:
        """Have `work(worker, argument)` done with these variables, of which a new worker makes a copy.

        It must call `worker.check` or `worker.judged` when the handler has ended, before it waits for anything else.
        """
        worker.work, worker.argument = work, argument
        if worker.task is None:
            start_soon: Callable[..., None] = self._nursery.start_soon
            variables.run(start_soon, worker.supervise, name, name=_SUPERVISOR)
        else:
            worker.task.name, worker.task.context = name, variables
            reschedule(worker.task)

    async def call(self, function: Callable[[], Awaitable[T]], name: str) -> T:
        """What a function of the author returns or raises.  It runs in a worker, with the variables of this task.

        Raises LeftOpen as a handler's call would fail, and RunStopped.  When this is cancelled, so is the function, and
        nobody waits for it, for it may shield itself.
        """
        call = _WorkerCall(function, name, joins=False)
        await call.run(self)
        return call.outcome()

    def leave(self, worker: Worker) -> None:
        """It was cancelled while it was idle."""
        self._idle.remove(worker)

    def trim(self) -> None:
        """A connection has ended, and its burst of calls with it."""
        self._dismiss(self._idle[_SPARE:])

    def end(self) -> None:
        """Keep no idle worker any more: a busy one ends after its call."""
        self._most = 0
        self.ended = True
        self._dismiss(self._idle)

    @staticmethod
    def _dismiss(workers: Collection[Worker]) -> None:
        for worker in tuple(workers):  # each leaves at once
            worker.scope.cancel()


class Worker:
    """One task, its supervisor, and the scope that a call runs in.  To cancel that scope later may hit another call."""

    __slots__ = ("_error", "_held", "_left", "_pool", "argument", "inside", "scope", "spoilt", "task", "work")

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.scope = trio.CancelScope()
        self.task: Task | None = None
        self.work: Work
        self.argument: Any
        self.spoilt = False
        """A handler left something open: the task must not wait any more."""
        self.inside: object = None
        """The scope that the task is in if the handler left no scope and no nursery open."""
        self._error: BaseException | None = None  # what passes on although the task is spoilt
        self._left: frozenset[trio.Nursery] = frozenset()  # the nurseries that were open when something was dropped
        self._held: list[Callable[[], object]] = []

    @property
    def name(self) -> str:
        """That of its call, without the id."""
        name = "" if self.task is None else self.task.name
        return name.rpartition(" #")[0] or name

    async def supervise(self, name: str) -> None:
        """Hold the nursery of the task, and wait for what it leaves behind."""
        failed: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.serve, name=name)
        except BaseExceptionGroup as group:
            # Trio's complaint about a spoilt task adds nothing to the failure of its call.
            failed = self._error if self.spoilt else sole(group)
        finally:
            self._pool.workers -= 1
        if self._left:
            await _ended(self._left)
        self._let_go()
        if failed is not None:
            try:
                raise failed
            finally:
                del failed
                self._error = None

    async def serve(self) -> None:
        task = self.task = current_task()
        self._pool.serving[task] = self
        try:
            with self.scope:
                self.inside = scope_of(task)
                while True:
                    await self.work(self, self.argument)
                    if self.spoilt or task in _lock_holders or not await self._rest(task):
                        return
        finally:
            del self._pool.serving[task]

    @trio.lowlevel.enable_ki_protection  # or an idle worker that is found might not be there
    async def _rest(self, task: Task) -> bool:
        """Wait for the next call; return False if enough workers wait already."""
        del self.work, self.argument
        if self._held:
            self._let_go()
        pool = self._pool
        if len(pool._idle) >= pool._most:
            return False
        task.name, task.context = _IDLE, pool._variables  # the variables of the call may hold much memory
        pool._idle.append(self)
        await wait_task_rescheduled(self._give_up)
        return True

    def _give_up(self, _: Any) -> Abort:
        self._pool.leave(self)
        return Abort.SUCCEEDED

    # What a call of a handler has come to.

    def check(self) -> None:
        """Raise LeftOpen if the handler left a scope or nursery open: `scope_of` its task is not `inside`."""
        task = self.task
        assert task is not None
        if scope_of(task) is not self.inside:
            self._spoil(task)
            raise LeftOpen(task)

    def judged(self, error: BaseException) -> tuple[BaseException | None, Exception | None]:
        """Split what a handler raised: what passes on, and what is the failure of its call.

        | What was raised, alone or in a group | What it is |
        |---|---|
        | anything while Python closes the coroutine of the task | passes on |
        | KeyboardInterrupt | passes on |
        | Cancelled, when the task is cancelled outside of the scopes of the handler | passes on |
        | Cancelled otherwise: an exception that was kept, and raised again | failure |
        | anything else, such as GeneratorExit or SystemExit | failure |

        When something was left open, that is the failure, whatever was raised.
        """
        task = self.task
        assert task is not None
        if not trio.lowlevel.in_trio_task() or current_task() is not task:
            return error, None
        passing: tuple[type[BaseException], ...] = (KeyboardInterrupt,)
        spoilt = scope_of(task) is not self.inside
        if spoilt:
            self._spoil(task)
        elif trio.current_effective_deadline() == -math.inf:
            passing = (*passing, trio.Cancelled)
        stopped, rest = _split(error, passing)
        if not spoilt:
            return stopped, None if rest is None else _as_failure(rest)
        self._error = None if stopped is None else sole(stopped)
        if isinstance(rest, LeftOpen):
            return stopped, rest
        failed = LeftOpen(task)
        failed.__cause__ = rest
        return stopped, failed

    def _spoil(self, task: Task) -> None:
        self.spoilt = True
        self._left |= frozenset(task.child_nurseries)

    # Generators that were dropped.

    def hold(self, task: Task, close: Callable[[], object]) -> None:
        self._left |= frozenset(task.child_nurseries)
        self._held.append(close)
        if len(self._held) > _HELD:
            self._held.pop(0)()

    def _let_go(self) -> None:
        held, self._held, self._left = self._held, [], frozenset()
        for close in held:
            close()


def _split(
    error: BaseException, kinds: tuple[type[BaseException], ...]
) -> tuple[BaseException | None, BaseException | None]:
    """What of an exception, which may be a group, is of these kinds, and the rest."""
    if isinstance(error, BaseExceptionGroup):
        found, rest = error.split(kinds)
        return found, error if found is None else rest
    return (error, None) if isinstance(error, kinds) else (None, error)


def _as_failure(error: BaseException, what: str = "the call") -> Exception:
    """An exception that must not end more than a call, as one that does not."""
    cancelled = _split(error, (trio.Cancelled,))[0] is not None
    if isinstance(error, Exception) and not cancelled:
        return error
    raised = "trio.Cancelled, and nothing had cancelled it" if cancelled else type(sole(error)).__name__
    failure = HandlerEscape(f"{what} has raised {raised}")
    failure.__cause__ = error
    return failure


def stale(error: BaseException | None, what: str) -> Exception | None:
    """As a failure of `what`: an exception with a cancellation in it, where nothing has cancelled this task."""
    if error is None or _split(error, (trio.Cancelled,))[0] is None or trio.current_effective_deadline() == -math.inf:
        return None
    return _as_failure(error, what)


def called(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a plain function of the author returns or raises, which is an Exception but for KeyboardInterrupt."""
    try:
        return function(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        if _split(error, (KeyboardInterrupt,))[0] is not None:
            raise
        raise _as_failure(error) from error


class _WorkerCall(Generic[T]):
    """One call of a function in a worker, from a task that waits for it; `joins`: in any case, also when cancelled."""

    def __init__(self, function: Callable[[], Awaitable[T]], name: str, *, joins: bool) -> None:
        self._function = function
        self._name = name
        self._joins = joins
        self._waiting: Task | None = None
        self._result: T
        self._error: Exception | None = None

    async def run(self, pool: WorkerPool) -> None:
        self._waiting = task = current_task()
        self._variables = task.context
        self._worker = worker = pool.hire()
        pool.start(worker, self._work, None, self._name, copy_context() if worker.task is None else task.context)
        await wait_task_rescheduled(self._cancel)
        if isinstance(self._error, RunStopped):  # perhaps because this was cancelled
            await trio.lowlevel.checkpoint_if_cancelled()

    def _cancel(self, _: Any) -> Abort:
        self._worker.scope.cancel()
        if self._joins:
            return Abort.FAILED
        self._waiting = None
        return Abort.SUCCEEDED

    def _end(self, error: Exception | None) -> None:
        if self._waiting is not None:
            self._error = error
            reschedule(self._waiting)
            self._waiting = None

    def outcome(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None
        return self._result

    async def _work(self, worker: Worker, _: None) -> None:
        task = current_task()
        if task.context is not self._variables:  # what the function sets in it is for the task that waits
            task.context = self._variables
            await trio.lowlevel.cancel_shielded_checkpoint()
        error: Exception | None = RunStopped()
        try:
            await trio.lowlevel.checkpoint_if_cancelled()  # then nothing is begun
            self._result = await guarded(self._function())
            worker.check()
            error = None
        except BaseException as raised:  # noqa: BLE001  # sorted by what it is
            stopped, failed = worker.judged(raised)
            if stopped is None:
                error = failed
            if failed is not None and (stopped is not None or self._waiting is None):
                # Its text may hold a secret, such as an access token, and whoever waited knew what to leave out.
                _log.error("%s failed while it was being stopped: %s", self._name, type(failed).__name__)
            if stopped is not None:
                raise sole(stopped) from None
        finally:
            self._end(error)


async def contained(function: Callable[[], Awaitable[T]], name: str) -> T:
    """As `WorkerPool.call`, for a task that has no pool at hand and that waits for the function in any case."""
    call = _WorkerCall(function, name, joins=True)
    async with open_nursery() as nursery:
        pool = WorkerPool(nursery)
        pool.end()
        await call.run(pool)
    return call.outcome()


# What a handler leaves behind.


async def _ended(nurseries: Collection[trio.Nursery]) -> None:
    """Wait until no task is left in them.  Nobody else can: they are not closed by anything that waits for them."""
    instrument = _Exits(nurseries)
    trio.lowlevel.add_instrument(instrument)
    try:
        with trio.CancelScope(shield=True):
            instrument.task_exited(current_task())
            await instrument.none_left.wait()
    finally:
        trio.lowlevel.remove_instrument(instrument)


class _Exits(trio.abc.Instrument):
    def __init__(self, nurseries: Collection[trio.Nursery]) -> None:
        self._nurseries = nurseries
        self.none_left = trio.Event()

    def task_exited(self, task: Task) -> None:
        if not any(nursery.child_tasks for nursery in self._nurseries):
            self.none_left.set()


# When an async generator is dropped, Trio closes it in another task.  A nursery that is inside it would then be closed
# in that task, and would wake the task that had opened it, whatever that is doing by now: Trio's loop ends by an error
# of its own.  So a generator that a worker drops, while a nursery is open in its task, is held until the task has
# ended, or the call well.  Where something else drops it, such as the cyclic collector, it is looked for the nursery of
# a worker; to hold all that is dropped while any handler has a nursery would keep what they hold, such as locks.
# The hook is that of the thread, so there is one for each run of Trio, which takes it back.
_serving: trio.lowlevel.RunVar[dict[Task, Worker]] = trio.lowlevel.RunVar("the workers that serve")


def _guard_generators() -> dict[Task, Worker]:
    """The workers of this run of Trio by their tasks, for which dropped generators are held."""
    try:
        return _serving.get()
    except LookupError:
        workers: dict[Task, Worker] = {}
        _serving.set(workers)
    close = sys.get_asyncgen_hooks().finalizer
    if close is None:  # the loop that Trio is a guest of has put its own hooks in the place of Trio's
        return workers
    token = trio.lowlevel.current_trio_token()

    @trio.lowlevel.enable_ki_protection
    def dropped(generator: AsyncGenerator[Any, Any]) -> None:
        if not trio.lowlevel.in_trio_run():  # in another thread
            try:
                token.run_sync_soon(dropped, generator)
            except trio.RunFinishedError:
                close(generator)
            return
        task = current_task() if trio.lowlevel.in_trio_task() else None
        if task not in workers or not task.child_nurseries:
            task = _opener(generator, {each: at for at in workers for each in at.child_nurseries})
        if task is None:
            close(generator)
        else:
            workers[task].hold(task, partial(close, generator))

    sys.set_asyncgen_hooks(finalizer=dropped)
    return workers


def _opener(generator: AsyncGenerator[Any, Any], nurseries: Mapping[object, Task]) -> Task | None:
    """The task that has opened one of these nurseries in this generator, or in what the generator holds."""
    if not nurseries:
        return None
    near: list[object] = [generator]
    seen = {id(generator)}
    for each in near:
        for one in gc.get_referents(each):
            if type(one) is trio.Nursery and one in nurseries:
                return nurseries[one]
            if id(one) not in seen and len(near) < _NEAR and not isinstance(one, _FAR):
                seen.add(id(one))
                near.append(one)
    return None


# A nursery of a generator is near: a variable, or behind the manager that waits to be exited.
_NEAR = 1_000
_FAR = (type, types.ModuleType, types.FunctionType, types.CodeType, Task)
