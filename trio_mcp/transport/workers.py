"""Workers: the tasks in which handlers run.  They limit a handler's mistake to its own call.

A running handler has its own task, cancel scope and context variables.  A task and a scope cost about as much as the
rest of a short call, so workers are reused: after a call, a worker waits for the next call of the same run.

A handler may leave a nursery or a cancel scope open: it drops an async generator that contains one, by `return` or
`break` in an `async for`, or enters one and never exits it.  Trio cannot repair that: the task fails at its end, and so
does the nursery around the task.  Therefore each worker is the only task in a nursery of its own.  A second task, its
supervisor, owns this nursery, and the failure ends there.  A nursery for each call would do the same for 12 µs a call.

| Left open after a call | Effect on the worker |
|---|---|
| no scope, nursery or lock | it waits for the next call |
| a cancellation that arrived too late | it ends |
| a lock that the handler did not release | it ends, which breaks the lock for the tasks that wait for it |
| a nursery or a scope | the call fails; the worker does not wait again, not even for a write, and ends |

The tasks in a nursery that was left open are cancelled when the worker ends.  A shielded task goes on.  It must not
outlive the run, which Trio would report as an internal error, so the supervisor waits for it.

An exception of a handler is the failure of its call, with a few exceptions: see `Worker.judged`.
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
_SPARE = 64  # idle workers that are always kept: as many calls as a busy client has in flight
_MOST = 5_000  # idle workers at most
_PERIOD = 20_000  # calls after which the idle workers that were not needed in this period end
_HELD = 1_000  # dropped generators that are held for one call

# Two names of Trio are private, and no public name gives the same information.
#
# The scope that a task is in.  Without this name, a scope around each call detects one left open, at a cost of 3.3 µs;
# a nursery left open is detected by a public name.
_HAS_SCOPES = hasattr(Task, "_cancel_status")
scope_of: Callable[[Any], object] = (
    attrgetter("_cancel_status") if _HAS_SCOPES else lambda task: task.child_nurseries or None
)
# The tasks that hold a lock.  Without this name no worker is reused: a task that ends breaks its locks.
_UNKNOWN: Container[Task] = ()
_lock_holders = _UNKNOWN
with suppress(ImportError):
    from trio._core._parking_lot import GLOBAL_PARKING_LOT_BREAKER as _lock_holders


def _unguarded(work: Awaitable[T]) -> Awaitable[T]:
    return work


async def _guarded(work: Awaitable[T]) -> T:
    with trio.CancelScope():  # if the handler left a scope open, raises RuntimeError and makes this scope current again
        return await work
    raise AssertionError  # this scope is never cancelled


guarded: Callable[[Awaitable[T]], Awaitable[T]] = _unguarded if _HAS_SCOPES else _guarded
"""Wrap each call of a handler in this."""


class LeftOpen(RuntimeError):
    """A handler has ended inside a nursery or a cancel scope that it had entered."""

    def __init__(self, task: Task) -> None:
        kind = "nursery" if task.child_nurseries else "cancel scope"
        super().__init__(
            f"a {kind} was left open: enter it with `with` or `async with`, and wrap an async generator that contains "
            "one in `async with contextlib.aclosing(...)`, which closes it also after `return` or `break`"
        )


class HandlerEscape(RuntimeError):
    """A handler raised an exception that would have ended more than its call.  That exception is the cause."""


class RunStopped(Exception):
    """The run has ended, and so has the function called in one of its workers."""


class Watchdog(Protocol):
    """Detects that a handler blocks the event loop.  `trio_mcp.server.watchdog` implements it."""

    asleep: bool

    def wake(self) -> None:
        """Start to watch: a call begins."""

    def watch(self, pool: WorkerPool) -> None:
        """Watch this pool too."""


watchdog: trio.lowlevel.RunVar[Watchdog | None] = trio.lowlevel.RunVar("the watchdog of the workers", default=None)


class WorkerPool:
    """The workers of one run, in its nursery.

    Keeps up to `_SPARE` idle workers, and more while calls need them, but at most `_MOST`.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._variables = copy_context()
        self._idle: list[Worker] = []
        self._most = 0 if _lock_holders is _UNKNOWN else _MOST
        self._calls = 0
        self._unused = 0  # the first `_unused` workers of `_idle` have been idle for the whole period
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
        """Whether a call is running.  May be read from another thread."""
        return self.workers > len(self._idle)

    def hire(self) -> Worker:
        """Return a worker, which the caller must `start` at once."""
        if self._watchdog is not None and self._watchdog.asleep:
            self._watchdog.wake()
        self._calls += 1
        if not self._calls % _PERIOD:
            self._dismiss(self._idle[_SPARE : self._unused])
            self._unused = len(self._idle)
        if not self._idle:
            self.workers += 1
            return Worker(self)
        worker = self._idle.pop()
        if len(self._idle) < self._unused:
            self._unused = len(self._idle)
        return worker

    def start(self, worker: Worker, work: Work, argument: Any, name: str, variables: Variables) -> None:
        """Run `work(worker, argument)` in the worker with these context variables; a new worker copies them.

        When the handler has ended, `work` must call `worker.check` or `worker.judged` before it waits again.
        """
        worker.work, worker.argument = work, argument
        if worker.task is None:
            start_soon: Callable[..., None] = self._nursery.start_soon
            variables.run(start_soon, worker.supervise, name, name=_SUPERVISOR)
        else:
            worker.task.name, worker.task.context = name, variables
            reschedule(worker.task)

    async def call(self, function: Callable[[], Awaitable[T]], name: str) -> T:
        """Call a function of the author in a worker, with the context variables of this task; return or raise its
        outcome.

        Raises LeftOpen like the call of a handler, and RunStopped.  A cancellation also cancels the function, and does
        not wait for it, because it may be shielded.
        """
        call = _WorkerCall(function, name, joins=False)
        await call.run(self)
        return call.outcome()

    def leave(self, worker: Worker) -> None:
        """Remove an idle worker that was cancelled."""
        self._idle.remove(worker)

    def trim(self) -> None:
        """End the idle workers above `_SPARE`, because a connection has ended, and its burst of calls with it."""
        self._dismiss(self._idle[_SPARE:])

    def end(self) -> None:
        """End the idle workers, and each busy one after its call."""
        self._most = 0
        self.ended = True
        self._dismiss(self._idle)

    @staticmethod
    def _dismiss(workers: Collection[Worker]) -> None:
        for worker in tuple(workers):  # each leaves at once
            worker.scope.cancel()


class Worker:
    """One task, its supervisor, and the scope that a call runs in.  Cancel that scope only during the call: later it
    belongs to another one."""

    __slots__ = ("_error", "_held", "_left", "_pool", "argument", "inside", "scope", "spoilt", "task", "work")

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.scope = trio.CancelScope()
        self.task: Task | None = None
        self.work: Work
        self.argument: Any
        self.spoilt = False
        """A handler left a nursery or a scope open: the task must not wait any more."""
        self.inside: object = None
        """The scope that the task is in if the handler left no scope and no nursery open."""
        self._error: BaseException | None = None  # the exception that passes on although the task is spoilt
        self._left: frozenset[trio.Nursery] = frozenset()  # nurseries left open, or open when a generator was dropped
        self._held: list[Callable[[], object]] = []

    @property
    def name(self) -> str:
        """The name of its call, without the id."""
        name = "" if self.task is None else self.task.name
        return name.rpartition(" #")[0] or name

    async def supervise(self, name: str) -> None:
        """Own the nursery of the task, and wait for the tasks that it leaves behind."""
        failed: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.serve, name=name)
        except BaseExceptionGroup as group:
            # The call has failed already; Trio's error for a spoilt task adds no information.
            failed = self._error if self.spoilt else sole(group)
        finally:
            self._pool.workers -= 1
        if self._left:
            await _wait_for_tasks(self._left)
        self._close_held()
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

    @trio.lowlevel.enable_ki_protection  # otherwise Ctrl-C could end a worker that is in the list of idle ones
    async def _rest(self, task: Task) -> bool:
        """Wait for the next call; return False if enough workers wait already."""
        del self.work, self.argument
        if self._held:
            self._close_held()
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

    # The outcome of a call.

    def check(self) -> None:
        """Raise LeftOpen if the handler left a scope or nursery open: `scope_of` its task is not `inside`."""
        task = self.task
        assert task is not None
        if scope_of(task) is not self.inside:
            self._spoil(task)
            raise LeftOpen(task)

    def judged(self, error: BaseException) -> tuple[BaseException | None, Exception | None]:
        """Split the exception of a handler into the part that passes on, and the failure of its call.

        | Exception, alone or in a group | Part |
        |---|---|
        | every exception while Python closes the coroutine of the task | passes on |
        | KeyboardInterrupt | passes on |
        | Cancelled, if the task is cancelled by a scope outside of the handler | passes on |
        | Cancelled otherwise: the handler kept an earlier exception and raised it again | failure |
        | every other exception, such as GeneratorExit or SystemExit | failure |

        If a nursery or a scope was left open, the failure is LeftOpen, with the exception as its cause.
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

    # Dropped generators.

    def hold(self, task: Task, close: Callable[[], object]) -> None:
        """Call `close` when the call has ended well, or the task has ended."""
        self._left |= frozenset(task.child_nurseries)
        self._held.append(close)
        if len(self._held) > _HELD:
            self._held.pop(0)()

    def _close_held(self) -> None:
        held, self._held, self._left = self._held, [], frozenset()
        for close in held:
            close()


def _split(
    error: BaseException, kinds: tuple[type[BaseException], ...]
) -> tuple[BaseException | None, BaseException | None]:
    """Split an exception, which may be a group, into the part of these kinds and the rest."""
    if isinstance(error, BaseExceptionGroup):
        found, rest = error.split(kinds)
        return found, error if found is None else rest
    return (error, None) if isinstance(error, kinds) else (None, error)


def _as_failure(error: BaseException, where: str = "the call") -> Exception:
    """Wrap an exception that would end more than a call in HandlerEscape; return any other unchanged."""
    cancelled = _split(error, (trio.Cancelled,))[0] is not None
    if isinstance(error, Exception) and not cancelled:
        return error
    raised = "trio.Cancelled, although it was not cancelled" if cancelled else type(sole(error)).__name__
    failure = HandlerEscape(f"{where} raised {raised}")
    failure.__cause__ = error
    return failure


def stale(error: BaseException | None, where: str) -> Exception | None:
    """Return a failure of `where` if `error` contains a cancellation although this task is not cancelled."""
    if error is None or _split(error, (trio.Cancelled,))[0] is None or trio.current_effective_deadline() == -math.inf:
        return None
    return _as_failure(error, where)


def called(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a plain function of the author.  Every exception except KeyboardInterrupt is raised as an Exception."""
    try:
        return function(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        if _split(error, (KeyboardInterrupt,))[0] is not None:
            raise
        raise _as_failure(error) from error


class _WorkerCall(Generic[T]):
    """One call of a function in a worker, for a task that waits for it; with `joins`, even if cancelled."""

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
        if isinstance(self._error, RunStopped):  # the reason may be that this task was cancelled
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
        if task.context is not self._variables:  # the function must set variables for the waiting task
            task.context = self._variables
            await trio.lowlevel.cancel_shielded_checkpoint()
        error: Exception | None = RunStopped()
        try:
            await trio.lowlevel.checkpoint_if_cancelled()  # if cancelled, the function is not called
            self._result = await guarded(self._function())
            worker.check()
            error = None
        except BaseException as raised:  # noqa: BLE001  # `judged` decides
            stopped, failed = worker.judged(raised)
            if stopped is None:
                error = failed
            if failed is not None and (stopped is not None or self._waiting is None):
                # Log no text: it may contain a secret, such as an access token, and only the caller could remove it.
                _log.error("%s failed while it was being stopped: %s", self._name, type(failed).__name__)
            if stopped is not None:
                raise sole(stopped) from None
        finally:
            self._end(error)


async def contained(function: Callable[[], Awaitable[T]], name: str) -> T:
    """Like `WorkerPool.call`, for a task without a pool.  Waits for the function even if cancelled."""
    call = _WorkerCall(function, name, joins=True)
    async with open_nursery() as nursery:
        pool = WorkerPool(nursery)
        pool.end()
        await call.run(pool)
    return call.outcome()


# Nurseries that a handler left open.


async def _wait_for_tasks(nurseries: Collection[trio.Nursery]) -> None:
    """Wait until the nurseries have no tasks.  No `async with` block does that any more."""
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


# When an async generator is dropped, Trio closes it in another task.  A nursery inside it would be closed in that task,
# and would wake the task that had opened it, no matter which operation that task waits for by then: Trio's loop ends
# with an internal error.  So a generator that a worker drops while a nursery is open in its task is held until the task
# has ended, or the call has ended well.  If the cyclic collector or another task drops it, it is searched for the
# nursery of a worker; holding every generator dropped while a handler has a nursery would also keep their locks.
# The hook belongs to the thread, so each run of Trio has one, and Trio restores the old one at its end.
_serving: trio.lowlevel.RunVar[dict[Task, Worker]] = trio.lowlevel.RunVar("the workers that serve")


def _guard_generators() -> dict[Task, Worker]:
    """Install the hook for dropped generators once, and return the workers of this run of Trio by their tasks."""
    try:
        return _serving.get()
    except LookupError:
        workers: dict[Task, Worker] = {}
        _serving.set(workers)
    close = sys.get_asyncgen_hooks().finalizer
    if close is None:  # in guest mode, the host loop has replaced Trio's hooks
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
    """Return the task that opened one of these nurseries in this generator, or in an object that it holds."""
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


# The search is limited: a nursery of a generator is one of its variables, or belongs to a manager that it has entered.
_NEAR = 1_000
_FAR = (type, types.ModuleType, types.FunctionType, types.CodeType, Task)
