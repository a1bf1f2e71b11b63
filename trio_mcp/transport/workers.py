"""Workers: the tasks in which handlers run.  They limit a handler's mistake to its own call.

A running handler has its own task, cancel scope and context variables.  A task and a scope cost about as much as the
rest of a short call, so workers are reused: after a call, a worker waits for the next call of the same run.

A handler may leave a nursery or a cancel scope open.  For example, it leaves an `async for` by `return` or `break`, and
the async generator contains an open nursery; or it enters a scope and never exits it.  Trio cannot repair this: the
task fails when it ends, and the nursery around the task fails too.  Therefore each worker is the only task in its own
nursery.  A second task, its supervisor, owns this nursery and catches the failure.  A nursery for each call would also
limit the failure, but costs 12 µs a call.

| State after a call | Effect on the worker |
|---|---|
| no scope, nursery or lock is left | it waits for the next call |
| its scope was cancelled too late for the call | it ends |
| the handler did not release a lock | it ends, which breaks the lock for the tasks that wait for it |
| a nursery or a scope was left open | the call fails; the worker ends without waiting again, not even for a write |

When the worker ends, the tasks in a nursery that was left open are cancelled.  A shielded task continues.  The
supervisor waits for it, because Trio reports an internal error if a task outlives the run.

An exception that a handler raises is the failure of its call.  `Worker.judged` lists the few that are not.
"""

from __future__ import annotations

import gc
import inspect
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
from typing import Any, ParamSpec, TypeAlias, TypeVar

import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

from trio_mcp.transport.nursery import open_nursery, sole

__all__ = [
    "HandlerEscape", "LeftOpen", "RunStopped", "Work", "Worker", "WorkerPool", "called", "contained",
    "guarded", "scope_of", "stale", "watchdog",
]  # fmt: skip

_log = logging.getLogger("trio_mcp")

P = ParamSpec("P")
T = TypeVar("T")
Work: TypeAlias = Callable[["Worker", Any], Awaitable[object]]

_IDLE = "a worker that waits for the next call"
_SUPERVISOR = "the supervisor of a worker"
_SPARE = 64  # idle workers that are not ended: a busy client has about this many calls in flight
_MOST = 5_000  # the maximum of idle workers
_PERIOD = 20_000  # calls; at the end of each period, idle workers that no call needed in this period are ended
_LOOK = 0.05  # seconds between two looks whether the tasks of abandoned nurseries have ended
_HELD = 1_000  # dropped generators that a worker keeps for one call before they are closed

# This module uses two private names of Trio, because no public name gives the same information.  Both may be missing.
#
# The first is the scope that a task is in.  If it is missing, a scope around each call detects a scope that was left
# open, which costs 3.3 µs; a public name detects a nursery that was left open.
_HAS_SCOPES = hasattr(Task, "_cancel_status")
scope_of: Callable[[Any], object] = (
    attrgetter("_cancel_status") if _HAS_SCOPES else lambda task: task.child_nurseries or None
)
# The second is the tasks that hold a lock.  If it is missing, no worker is reused: a task that ends breaks its locks.
_UNKNOWN: Container[Task] = ()
_lock_holders = _UNKNOWN
with suppress(ImportError):
    from trio._core._parking_lot import GLOBAL_PARKING_LOT_BREAKER as _lock_holders


async def _guarded(work: Awaitable[T]) -> T:
    with trio.CancelScope():  # raises RuntimeError if the handler left a scope open, and is then current again
        return await work
    raise AssertionError  # this scope is never cancelled


guarded = None if _HAS_SCOPES else _guarded
"""Wrap each call of a handler in this function, if there is one: Trio's private name is missing, and it detects an open
scope."""


class LeftOpen(RuntimeError):
    """A handler has ended inside a nursery or a cancel scope that it had entered."""

    def __init__(self, task: Task) -> None:
        kind = "nursery" if task.child_nurseries else "cancel scope"
        super().__init__(
            f"a {kind} was left open: enter it with `with` or `async with`, and wrap an async generator that contains "
            "one in `async with contextlib.aclosing(...)`, which closes it also after `return` or `break`"
        )


class HandlerEscape(RuntimeError):
    """A handler raised an exception, such as SystemExit, that would end more than its call; it is the cause."""


class RunStopped(Exception):
    """The run has ended, and has stopped the function that a worker was running."""


watchdog: trio.lowlevel.RunVar[Any] = trio.lowlevel.RunVar("the watchdog of the workers", default=None)
"""Detects that a handler blocks the event loop; see `trio_mcp.server.process`.

`watch(pool)` watches a pool.  While the watchdog is `asleep`, `wake()` tells it that a call begins.
"""


class WorkerPool:
    """The workers of one run, in its nursery.

    It keeps up to `_SPARE` idle workers.  While calls need more, it keeps more, but at most `_MOST`.
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

    def start(self, work: Work, argument: Any, name: str, variables: Variables) -> Worker:
        """Run `work(worker, argument)` in a worker, with these context variables; a new worker gets a copy of them.

        After the handler has ended, `work` must call `worker.check` or `worker.judged` before it waits again.
        """
        self._calls += 1
        if not self._calls % _PERIOD:
            self._dismiss(self._idle[_SPARE : self._unused])
            self._unused = len(self._idle)
        if self._idle:
            worker = self._idle.pop()
            if len(self._idle) < self._unused:
                self._unused = len(self._idle)
            assert worker.task is not None
            worker.task.name, worker.task.context = name, variables
            reschedule(worker.task)
        else:
            self.workers += 1
            worker = Worker(self)
            start_soon: Callable[..., None] = self._nursery.start_soon
            variables.copy().run(start_soon, worker.supervise, name, name=_SUPERVISOR)
        worker.work, worker.argument = work, argument
        # Last: a watchdog that was not asleep here looks for calls before it sleeps, and finds this one.
        if self._watchdog is not None and self._watchdog.asleep:
            self._watchdog.wake()
        return worker

    async def call(self, function: Callable[[], Awaitable[T]], name: str, *, joins: bool = False) -> T:
        """Call a function of the server's author in a worker, with the context variables of this task.

        Returns its result, or raises its exception.  Also raises LeftOpen, as for a handler, and RunStopped.  If this
        call is cancelled, the function is cancelled too.  The call then waits for it only if it `joins`: the function
        may be shielded.
        """
        variables, done, abandoned = current_task().context, trio.Event(), False
        results: list[T] = []
        error: Exception | None = RunStopped()

        async def work(worker: Worker, _: None) -> None:
            nonlocal error
            task = current_task()
            if task.context is not variables:  # the function sets the variables of the waiting task
                task.context = variables
                await trio.lowlevel.cancel_shielded_checkpoint()
            try:
                await trio.lowlevel.checkpoint_if_cancelled()  # if cancelled, the function is not called
                running = function()
                results.append(await (running if guarded is None else guarded(running)))
                worker.check()
                error = None
            except BaseException as raised:  # noqa: BLE001  # `judged` decides
                stopped, failed = worker.judged(raised)
                if stopped is None:
                    error = failed
                if failed is not None and (stopped is not None or abandoned):
                    # Do not log the text of the exception: it may contain a secret, such as an access token.
                    _log.error("%s failed while it was being stopped: %s", name, type(failed).__name__)
                if stopped is not None:
                    raise sole(stopped) from None
            finally:
                done.set()

        worker = self.start(work, None, name, variables)
        try:
            await done.wait()
        except trio.Cancelled:
            if not done.is_set():  # otherwise another call may run in the scope
                worker.scope.cancel()
            if not joins:
                abandoned = True
                raise
            with trio.CancelScope(shield=True):
                await done.wait()
        if error is None:
            return results[0]
        if isinstance(error, RunStopped):  # if this task was cancelled, raise Cancelled instead
            await trio.lowlevel.checkpoint_if_cancelled()
        try:
            raise error
        finally:
            error = None

    def trim(self) -> None:
        """End all idle workers except `_SPARE`: a connection has ended, so fewer calls are expected."""
        self._dismiss(self._idle[_SPARE:])

    def end(self) -> None:
        """End the idle workers now, and each busy worker after its call."""
        self._most = 0
        self.ended = True
        self._dismiss(self._idle)

    @staticmethod
    def _dismiss(workers: Collection[Worker]) -> None:
        for worker in tuple(workers):  # a copy: each cancelled worker leaves the list at once
            worker.scope.cancel()


class Worker:
    """One task, its supervisor, and the scope that a call runs in.

    Cancel the scope only during the call, because the next call of the worker has the same scope.
    """

    __slots__ = ("_error", "_held", "_left", "_pool", "argument", "inside", "scope", "spoilt", "task", "work")

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.scope = trio.CancelScope()
        self.task: Task | None = None
        self.work: Work
        self.argument: Any
        self.spoilt = False
        """True: a handler left a nursery or a scope open, so the task must not wait again."""
        self.inside: object = None
        """The scope that the task is in between calls.  After a call it is another if the handler left one open."""
        self._error: BaseException | None = None  # the exception that the supervisor raises if the task is spoilt
        self._left: frozenset[trio.Nursery] = frozenset()  # nurseries left open, or open when a generator was dropped
        self._held: list[Callable[[], object]] = []

    @property
    def name(self) -> str:
        """The name of the call that runs in this worker, without the id."""
        name = "" if self.task is None else self.task.name
        return name.rpartition(" #")[0] or name

    async def supervise(self, name: str) -> None:
        """Own the nursery of the task, and wait for the tasks in nurseries that a handler left open."""
        failed: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.serve, name=name)
        except BaseExceptionGroup as group:
            # If the task is spoilt, its call has already failed, and Trio's error adds no information.
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

    @trio.lowlevel.enable_ki_protection  # otherwise Ctrl-C could end a worker that is in the list `_idle`
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
        self._pool._idle.remove(self)
        return Abort.SUCCEEDED

    # The outcome of a call.

    def check(self) -> None:
        """Raise LeftOpen if the handler left a scope or nursery open: the task is then not in the scope `inside`."""
        task = self.task
        assert task is not None
        if scope_of(task) is not self.inside:
            self._spoil(task)
            raise LeftOpen(task)

    def judged(self, error: BaseException) -> tuple[BaseException | None, Exception | None]:
        """Split the exception of a handler in two: the part to raise again in the worker, and the failure of the call.

        | Exception, alone or in a group | Part |
        |---|---|
        | every exception while Python closes the coroutine of the task | raise again |
        | KeyboardInterrupt | raise again |
        | Cancelled, if a scope outside of the handler is cancelled | raise again |
        | Cancelled, if no such scope is cancelled: the handler raised an old exception again | failure |
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
        """Keep `close` of a dropped generator.  Call it when the worker waits for a call, or the task has ended."""
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
    """Call a plain function of the server's author.

    Exceptions and KeyboardInterrupt pass through; any other BaseException is raised as HandlerEscape.
    """
    try:
        return function(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        if _split(error, (KeyboardInterrupt,))[0] is not None:
            raise
        raise _as_failure(error) from error


async def contained(name: str, function: Callable[P, T | Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `WorkerPool.call`, for a task without a pool, and also for a `def`.  If cancelled, wait for its end."""

    async def call() -> T:
        result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async with open_nursery() as nursery:
        pool = WorkerPool(nursery)
        pool.end()
        return await pool.call(call, name, joins=True)
    raise AssertionError  # the nursery is not cancelled before the function has ended


# Nurseries that a handler left open.


async def _wait_for_tasks(nurseries: Collection[trio.Nursery]) -> None:
    """Wait until the nurseries have no tasks.  Their `async with` blocks were abandoned and cannot wait."""
    with trio.CancelScope(shield=True):
        # Otherwise only an instrument of Trio sees that a task ends, and it slows all tasks.
        while any(nursery.child_tasks for nursery in nurseries):  # noqa: ASYNC110
            await trio.sleep(_LOOK)


# When Python finalizes an async generator that was not closed, Trio closes it in another task.  If the generator
# contains an open nursery, this wakes the task that opened the nursery, although that task waits for another operation
# by then, and Trio ends with an internal error.  So if a worker drops a generator while its task has an open nursery,
# the generator is not closed before the call has succeeded or the task has ended.  If the cyclic garbage collector or
# another task drops a generator, this code searches the generator for a nursery of a worker.  The alternative is to
# keep every generator that is dropped while a handler has a nursery; this would also keep locks that they hold.
# The hook is set per thread, so each run of Trio has its own, and Trio restores the old hook at the end of the run.
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
    """Return the task that opened one of these nurseries inside this generator, or None."""
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


# The search is limited, because the nursery is near: it is a variable of the generator, or a variable of a context
# manager that the generator has entered.
_NEAR = 1_000
_FAR = (type, types.ModuleType, types.FunctionType, types.CodeType, Task)
