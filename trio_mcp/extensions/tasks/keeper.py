"""The tasks of one run of a server: created, run, asked about, and recovered after the end of another process.

A call of a tool with `task=` becomes a task before its handler starts, or when its handler says so.  Its request is
answered with CreateTaskResult, and the handler goes on with a `TaskHost` in place of its request (`ctx.detach`).

The store has the truth.  Every step reads the row of a task, asks `core.tasks` for the new record, and replaces the row
if no other process was faster.  `_follow` reads all rows that have changed, whichever process wrote them: it wakes the
handlers that wait for an answer, stops those whose task was cancelled, and tells listeners.

While a task runs, its row names this process as its holder.  A process renews its lease; if it dies, another one (or
the next one on the same file) claims its tasks, runs those again whose tool has `replay=True`, and fails the others.
A process that ends gives back its tasks: it fails those that cannot run again, and ends its lease.

A store may be away for a while.  Then the requests of clients fail, with an error that says so; handlers that ask and
outcomes wait until it is back; status messages are dropped.  All leases are old by then, so each process renews its own
before any claims the tasks of others.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trio_mcp.core.elicitation import FormCheck
from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_PARAMS, RequestError, UsageError
from trio_mcp.core.messages import JsonObject
from trio_mcp.core.revisions import stable_name
from trio_mcp.core.shares import ByteBudget
from trio_mcp.core.tasks import (
    CORE_TASKS,
    POLL_MS,
    TaskDeed,
    TaskForm,
    TaskRecord,
    TaskStatus,
    TaskStep,
    cursor_of,
    read_cursor,
    read_task_id,
    unknown_task,
)
from trio_mcp.stores.leases import Lease
from trio_mcp.stores.rows import Row, StoreFailed, StoreFull, wall_time
from trio_mcp.transport.nursery import open_nursery

if TYPE_CHECKING:
    from trio_mcp.core.messages import Limits
    from trio_mcp.extensions.tasks.host import TaskHost
    from trio_mcp.stores.rows import Store

__all__ = ["LEASE", "Keeper", "for_clients"]

_log = logging.getLogger("trio_mcp")

LEASE: Final = 30.0
"""Seconds after which a process that has not renewed its lease is taken for dead."""
_PERIOD: Final = LEASE / 3
_AGAIN: Final = 1.0  # seconds until a store that failed is tried again
_CLOSING: Final = 5.0  # seconds for the last writes of a run that ends
_ENDING: Final = 1.0  # seconds of these for handlers that clean up
_FETCHED: Final = 2 * POLL_MS / 1000  # seconds in which a client that polls comes for an outcome
_PAGE: Final = 50  # tasks on one page of tasks/list
_CLAIMED: Final = 50  # tasks that are recovered at once
_NO_PROCESS: Final = "given back"  # the holder of tasks for which a process has no room; it never has a lease
_FAILURE: Final = 4096  # bytes by which a task may be too large, so that its failure can be written down
_TIMES: Final = 64  # bytes by which the times of a task may grow


@contextmanager
def for_clients() -> Iterator[None]:
    """Tell a client that the store fails.  The cause is in the log alone: it may name machines and files."""
    try:
        yield
    except StoreFailed as error:
        _log.error("%s", error)
        raise RequestError(INTERNAL_ERROR, "the store of the tasks does not work; try again later") from error
    except StoreFull as error:
        raise RequestError(INTERNAL_ERROR, str(error)) from None


class Keeper:
    """Keeps tasks in a store, follows their changes, and recovers tasks of processes that have ended.

    `recover` is called with each task that another process ran; it says whether the task runs again here.  None: there
    is no room for it now.
    """

    def __init__(
        self, store: Store, name: str, limits: Limits, recover: Callable[[TaskRecord], bool | None] = lambda task: False
    ) -> None:
        self._store = store
        self._kind = f"task {name}"  # servers that share a store do not run each other's tasks
        self._limits = limits
        self._recover = recover
        self._holder = secrets.token_urlsafe(12)
        self._lease = Lease(store, self._holder, LEASE)
        self._hosts: dict[str, TaskHost] = {}
        self._adding: set[str] = set()  # tasks that are being stored
        self._unsure = False  # whether it may hold tasks without a host, because a call that failed had its effect
        self._watched: dict[str, set[trio.Event]] = {}
        self.bytes = ByteBudget(limits)
        """Charged for outcomes that wait for the store."""
        self._unseen: dict[str, trio.Event] = {}  # tasks that have ended while this process is about to end
        self._ready = trio.Event()
        self.followed: Container[str] = ()
        """The tasks of which `on_change` is to hear."""
        self.on_change: Callable[[TaskRecord, bytes], Awaitable[object]] = _no_listener
        """Awaited with a task of `followed` that has changed, in this process or in another one: the first line of its
        record, and the second one."""
        self.on_sweep: Callable[[float], object] = lambda now: None
        """Called from time to time with the time of the clock of records."""
        self.leaving: Callable[[], bool] = lambda: False
        """Whether this process is about to end, and takes over no tasks."""

    # The life of a run.

    async def run(self, handlers_ended: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint) -> None:
        """Keep the store open, follow its changes and recover tasks, until this is cancelled.

        The handlers are cancelled at the same time; `handlers_ended` waits for them.
        """
        async with self._store:
            try:
                await self._lease.renew(wall_time())
                number, _ = await self._store.changes(-1)
                self._ready.set()
                async with open_nursery() as nursery:  # a store with a fault of its own ends the run with this error
                    nursery.start_soon(self._follow, number)
                    while True:
                        works = await self._keep_up()
                        await trio.sleep(_PERIOD if works else _AGAIN)
            finally:
                with trio.CancelScope(deadline=trio.current_time() + _CLOSING, shield=True):
                    with trio.move_on_after(_ENDING):
                        await handlers_ended()
                    await self._give_back()

    async def _keep_up(self) -> bool:
        """Renew the lease, sweep, and recover the tasks of processes that have ended.  False if the store fails."""
        try:
            now = wall_time()
            for host in tuple(self._hosts.values()):  # whether the store works or not
                if host.expires <= now:
                    host.stop("the ttl of the task has passed")
            self.on_sweep(now)
            await self._lease.renew(now)
            while await self._store.sweep(now):
                pass
            if self._lease.may_claim and not self.leaving():
                await self._recover_all(now)
        except StoreFailed as error:
            _log.error("%s", error)
            self._unsure = True
            self._lease.spare_others()
            return False
        return True

    async def _recover_all(self, now: float) -> None:
        """Take over the tasks that no process runs, as long as there is room."""
        unsure, self._unsure, room = self._unsure, False, True
        while room:
            known = {*self._hosts, *self._adding} if unsure else None  # the store looks up each task that we hold
            rows = await self._store.claim(self._kind, self._holder, now, _CLAIMED, known=known)
            if not rows:
                return
            for row in rows:
                if row.key not in self._hosts and row.key not in self._adding:
                    room = await self._take_over(row.key) and room
        self._unsure = self._unsure or unsure

    async def _take_over(self, id: str) -> bool:
        """Run a task again that another process ran, or fail it.

        False: there is no room, or another version of this package wrote it, so it is given back.
        """
        try:
            step = await self.step(id, lambda task: task.take_over(wall_time()), ours=True)
        except UsageError as error:
            _log.error("%s", error)
            runs = None
        else:
            if step is None or step.task.terminal:
                return True
            runs = self._recover(step.task)
        if runs is False:
            await self.step(id, lambda task: task.lose(wall_time()), ours=True)
        row = await self._store.get(self._kind, id) if runs is None else None
        if row is not None and row.holder == self._holder:
            await self._store.replace(attrs.evolve(row, holder=_NO_PROCESS))
        return runs is not None

    async def _give_back(self) -> None:
        """Fail the tasks that cannot run again, and let other processes have the rest at once."""
        try:
            for host in tuple(self._hosts.values()):
                host.over = True
                if not host.recoverable:
                    with suppress(UsageError):  # another version of this package wrote it
                        await self.step(host.id, lambda task: task.lose(wall_time()), ours=True)
            await self._lease.end()
        except StoreFailed as error:
            _log.error("%s", error)

    async def _follow(self, number: int) -> None:
        """Act on each change in the store."""
        while True:
            try:
                last, names = await self._store.changes(number)
                for kind, key in names:
                    if kind == self._kind and (key in self._hosts or key in self._watched or key in self.followed):
                        try:
                            await self._see(key)
                        except UsageError as error:
                            _log.error("%s", error)
                number = last
            except StoreFailed as error:
                _log.error("%s", error)
                await trio.sleep(_AGAIN)

    async def _see(self, id: str) -> None:
        """Act on the present state of a task."""
        row = await self._store.get(self._kind, id)
        task, host = None if row is None else _read(row, whole=False), self._hosts.get(id)
        if host is not None and (row is None or task is None or (not task.terminal and row.holder != self._holder)):
            host.stop("the task has expired, or another process has taken it over")
        elif host is not None and task is not None and task.status is TaskStatus.CANCELLED:
            host.stop("the client cancelled the task")
        for event in self._watched.get(id, ()):
            event.set()
        if row is not None and task is not None and id in self.followed:
            await self.on_change(task, _second_line(row))

    # Tasks.

    async def add(self, task: TaskRecord, holder: object) -> None:
        """Store a new task.  `holder` is the client that is charged for it.  Raises `RequestError` if there is no room.

        The task runs in this process from now on; give it a host, or `drop` it.
        """
        await self._ready.wait()
        owner, each = ("", inf) if holder is None else (str(holder), self._limits.tasks_each)
        runs_in = "" if task.terminal else self._holder
        row = Row(self._kind, task.id, self._body(task), owner, task.created, task.expires, runs_in)
        self._adding.add(task.id)
        with for_clients():
            try:
                await self._store.add(row, each=each, total=self._limits.tasks)
            except (StoreFailed, trio.Cancelled):
                self._unsure = True
                raise
            except StoreFull as error:
                limit = {"each": "Limits.tasks_each", "total": "Limits.tasks"}.get(
                    error.limit, "max_bytes of the store"
                )
                why = f"there is no room for more tasks ({limit}); try again later"
                raise RequestError(INTERNAL_ERROR, why) from None
            finally:
                self._adding.discard(task.id)

    async def drop(self, id: str) -> None:
        """Delete a task of which no client knows."""
        self._unsure = True  # if it cannot be deleted, this process still holds it
        with trio.CancelScope(deadline=trio.current_time() + _CLOSING, shield=True), suppress(StoreFailed):
            await self._store.delete(self._kind, id)

    def host(self, host: TaskHost) -> None:
        self._hosts[host.id] = host

    def release(self, host: TaskHost) -> None:
        self._hosts.pop(host.id, None)

    def _body(self, task: TaskRecord, before: int = 0) -> bytes:
        """Write a task that had `before` bytes.  Limits may have become smaller, and the task must end all the same."""
        body = task.text().encode()
        spare = _FAILURE if task.terminal else _TIMES
        if task.result is not None or not before:  # it can be refused, and its failure is written down instead
            spare = 0
        if len(body) > max(self._limits.task_bytes, before) + spare:
            why = f"the task has {len(body)} bytes, and may have {self._limits.task_bytes:g} (Limits.task_bytes)"
            raise RequestError(INTERNAL_ERROR, why)
        return body

    async def step(self, id: str, take: Callable[[TaskRecord], TaskStep], *, ours: bool = False) -> TaskStep | None:
        """Take a step of a task, and store the new record.  None if the task does not exist any more.

        With `ours` also None if this process does not hold the task any more.  Raises what `take` raises,
        `RequestError` if the record is too large, and `StoreFull`.
        """
        await self._ready.wait()
        while True:
            row = await self._store.get(self._kind, id)
            if row is None or (ours and row.holder != self._holder):
                return None
            task = _read(row, whole=False)
            step = take(task if task.terminal else _read(row))  # a task that has ended takes no step
            if step.deed is TaskDeed.NOTHING:
                return step
            holder = "" if step.task.terminal else row.holder
            body = self._body(step.task, len(row.body))
            if await self._store.replace(attrs.evolve(row, body=body, expires=step.task.expires, holder=holder)):
                return step

    async def find(self, id: str, *, whole: bool = False) -> TaskRecord | None:
        """Return a task, or None if it does not exist or has expired.

        Unless it is `whole`, it is read from the first line alone; see `TaskRecord.from_text`.
        """
        await self._ready.wait()
        row = await self._store.get(self._kind, id)
        task = None if row is None else _read(row, whole=whole)
        return None if task is None or task.expires <= wall_time() else task

    async def owned(self, id: str, principal: Any, *, whole: bool = False) -> TaskRecord:
        """As `find`.  Raises `RequestError` if this principal has no task of this id (task-59, xtask-46)."""
        return (await self.stored(id, principal, whole=whole))[0]

    async def stored(self, id: str, principal: Any, *, whole: bool) -> tuple[TaskRecord, bytes | None]:
        """As `owned`, and the second line if the task is not `whole`: a result that is sent need not be read."""
        await self._ready.wait()
        row = await self._store.get(self._kind, id)
        task = None if row is None else _read(row, whole=whole)
        if row is None or task is None or task.expires <= wall_time() or task.owner != stable_name(principal):
            raise unknown_task(id)
        return task, None if whole else _second_line(row)

    async def watch(self, id: str, done: Callable[[TaskRecord], bool], *, whole: bool = False) -> TaskRecord | None:
        """Wait until `done` says so of the task, and return it; None if it does not exist any more.  As `find`."""
        watchers = self._watched.setdefault(id, set())
        try:
            while True:
                changed = trio.Event()
                watchers.add(changed)
                with suppress(StoreFailed):  # `_follow` logs it
                    task = await self.find(id, whole=whole)
                    if task is None or done(task):
                        return task
                with trio.move_on_after(_PERIOD):  # a task that expires changes no row
                    await changed.wait()
                watchers.discard(changed)
        finally:
            watchers.discard(changed)
            if not watchers:
                del self._watched[id]

    async def seen(self, id: str) -> None:
        """Wait until a client has seen how a task has ended, for as long as a client may take between two polls."""
        event = self._unseen.setdefault(id, trio.Event())
        with trio.move_on_after(_FETCHED):
            await event.wait()
        self._unseen.pop(id, None)

    def show(self, task: TaskRecord) -> None:
        """A client is shown this state, with the outcome if there is one."""
        if task.terminal and task.id in self._unseen:
            self._unseen[task.id].set()

    # The methods of the protocol, for the side that serves them.

    async def get(self, params: Mapping[str, Any], principal: Any, form: TaskForm, *, whole: bool = True) -> JsonObject:
        """Serve tasks/get.  Unless it is `whole`, the result of the task is in the text of this result alone."""
        with for_clients():
            task, rest = await self.stored(read_task_id(params), principal, whole=whole and form.inlined)
        if form.inlined:  # otherwise tasks/result has the outcome
            self.show(task)
        return form.detailed(task, rest)

    async def update(self, params: Mapping[str, Any], principal: Any) -> JsonObject:
        """Serve tasks/update."""
        with for_clients():
            task, responses = await self.owned(read_task_id(params), principal), params.get("inputResponses")
            if not isinstance(responses, dict):
                raise RequestError(INVALID_PARAMS, "inputResponses must be an object")
            await self.step(task.id, lambda task: _answered(task, responses))
        return {}

    async def cancel(self, params: Mapping[str, Any], principal: Any, form: TaskForm) -> JsonObject:
        """Serve tasks/cancel.  task-46: the record is cancelled when this returns."""
        with for_clients():
            task = await self.owned(read_task_id(params), principal)
            form.refuse_cancel(task)
            host = self._hosts.get(task.id)
            elsewhere = None if host is None else host.cancel_elsewhere
            if elsewhere is not None:
                await elsewhere()
            step = await self.step(task.id, lambda task: task.cancel(wall_time()))
        if step is None:
            raise unknown_task(task.id)
        if step.deed is TaskDeed.NOTHING:
            # It ended a moment ago; where its work is elsewhere, perhaps by this cancellation.
            if elsewhere is None or step.task.status is not TaskStatus.CANCELLED:
                form.refuse_cancel(step.task)
        elif (host := self._hosts.get(task.id)) is not None:
            host.stop("the client cancelled the task")
        return form.acknowledged(step.task)

    async def list(
        self, params: Mapping[str, Any], holder: object, belongs: Callable[[TaskRecord], bool]
    ) -> JsonObject:
        """Serve tasks/list: the tasks for which `belongs` returns True (task-60)."""
        cursor = params.get("cursor")
        after = (-inf, "") if cursor is None else read_cursor(cursor)
        await self._ready.wait()
        found: list[TaskRecord] = []
        more, now = True, wall_time()
        while more and len(found) <= _PAGE:
            with for_clients():
                rows = await self._store.list(self._kind, "" if holder is None else str(holder), after, _PAGE)
            more = len(rows) == _PAGE
            found += [task for task in _readable(rows) if task.expires > now and belongs(task)]
            after = (rows[-1].created, rows[-1].key) if rows else after
        result: JsonObject = {"tasks": [CORE_TASKS.task(task) for task in found[:_PAGE]]}
        if len(found) > _PAGE:  # task-41
            result["nextCursor"] = cursor_of(found[_PAGE - 1])
        return result


def _read(row: Row, *, whole: bool = True) -> TaskRecord:
    return TaskRecord.from_text((row.body if whole else _first_line(row)).decode())


def _first_line(row: Row) -> bytes:
    end = row.body.find(b"\n")  # `partition` would copy the second line, which may be long
    return row.body if end < 0 else row.body[:end]


def _second_line(row: Row) -> bytes:
    return row.body[len(_first_line(row)) + 1 :]


async def _no_listener(task: TaskRecord, rest: bytes) -> None:
    pass


def _readable(rows: Sequence[Row]) -> Iterator[TaskRecord]:
    """The tasks of rows, except those that another version of this package wrote."""
    for row in rows:
        try:
            yield _read(row, whole=False)
        except UsageError as error:
            _log.error("%s", error)


def _answered(task: TaskRecord, responses: JsonObject) -> TaskStep:
    """Take answers.  Those that do not fit their form are refused, so that the client can correct them (elic-45)."""
    step = task.answer(responses, wall_time())
    for each in task.questions:
        form, answer = each.params.get("requestedSchema"), responses.get(each.key, {})
        if not isinstance(form, dict) or answer.get("action") != "accept":
            continue
        given = {name: value for name, value in (answer.get("content") or {}).items() if value is not None}
        try:
            why = FormCheck(form).misfit(given)
        except UsageError:  # no form of `Elicit`: the question checks the answer itself
            continue
        if why:
            where = f"inputResponses[{each.key!r}]"
            raise RequestError(INVALID_PARAMS, f"{where}: the answer does not fit the form: {why}")
    return step
