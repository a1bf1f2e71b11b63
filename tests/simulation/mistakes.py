"""Deliberate mistakes in trio_mcp: they show that the rules of the simulation find mistakes.

Each is a small patch, like a mistake that a change may introduce by accident.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock
from unittest.mock import AsyncMock

import attrs
import trio

from trio_mcp import Client, Context
from trio_mcp.core import Account, Listeners

# The patches need internal modules.
from trio_mcp.core.tasks import (
    TASKS,
    TaskDeed,
    TaskEvent,
    TaskForm,
    TaskRecord,
    TaskStatus,
    TaskStep,
)
from trio_mcp.errors import NoResponse, SessionLost

# The patches need internal modules.
from trio_mcp.extensions.tasks.keeper import Keeper
from trio_mcp.server import Dispatcher, Replica
from trio_mcp.server.entries import Entry  # internal, too
from trio_mcp.server.http.shared_endpoint import SharedEndpoint  # internal, too
from trio_mcp.server.http.shared_mail import SessionMail  # internal, too
from trio_mcp.server.http.shared_speaker import Speaker  # internal, too
from trio_mcp.stores import MemoryStore

__all__ = ["MISTAKES", "MISTAKES_OF_REPLICAS"]


def _replayed_call() -> AbstractContextManager[Any]:
    """A call without an answer is repeated once."""
    call = Client.call_tool

    async def again(self: Client, *args: Any, **options: Any) -> Any:
        try:
            return await call(self, *args, **options)
        except (NoResponse, SessionLost):
            return await call(self, *args, **options)

    return mock.patch.object(Client, "call_tool", again)


def _false_not_run() -> AbstractContextManager[Any]:
    """If a connection ends before the reply, the error claims that the request did not run."""
    init = NoResponse.__init__

    def claim(self: NoResponse, why: str, **options: Any) -> None:
        init(self, why, **{**options, "request_may_have_run": "ended before" not in why})

    return mock.patch.object(NoResponse, "__init__", claim)


def _kept_listener() -> AbstractContextManager[Any]:
    """A subscription outlives its client."""
    return mock.patch.object(Listeners, "forget", lambda self, key: key in self._listeners)


def _unheard_cancellation() -> AbstractContextManager[Any]:
    """The client cancels a call, and the handler continues."""
    return mock.patch.object(Context, "_cancel", return_value=None)


def _leaked_task() -> AbstractContextManager[Any]:
    """A cancelled call leaves a task behind."""
    cancel = Context._cancel

    def leak(self: Context, reason: str) -> None:
        trio.lowlevel.spawn_system_task(trio.sleep_forever, name="a leaked task")
        cancel(self, reason)

    return mock.patch.object(Context, "_cancel", leak)


def _lost_change() -> AbstractContextManager[Any]:
    """Of several listeners the last one does not get the change."""
    publish = Listeners.publish

    def publish_to_fewer(self: Listeners[Any], change: Any) -> Any:
        listeners = publish(self, change)
        return listeners[:-1] if len(listeners) > 1 else listeners

    return mock.patch.object(Listeners, "publish", publish_to_fewer)


def _kept_bytes() -> AbstractContextManager[Any]:
    """One byte of a large message is not given back to the shared account of all clients."""
    give = Account.give

    def keep(self: Account, amount: int) -> None:
        give(self, amount)
        if amount > 4096:
            self.budget.shares.held += 1

    return mock.patch.object(Account, "give", keep)


def _answer_of_another() -> AbstractContextManager[Any]:
    """Each fiftieth call gets the result of the call before."""
    call, last, count = Dispatcher._run_handler, list[Any](), itertools.count(1)

    async def mix_up(self: Dispatcher, *args: Any) -> Any:
        result = await call(self, *args)
        last.append(result)
        return last[-2] if next(count) % 50 == 0 else result

    return mock.patch.object(Dispatcher, "_run_handler", mix_up)


def _forgotten_principal() -> AbstractContextManager[Any]:
    """Handlers do not see the principal of a request."""
    return mock.patch.object(Context, "principal", property(lambda self: None))


def _unchecked_owner() -> AbstractContextManager[Any]:
    """The owner of a task is not compared with the caller."""
    return mock.patch("trio_mcp.extensions.tasks.keeper.stable_name", return_value=mock.ANY)


def _deleted_task() -> AbstractContextManager[Any]:
    """A task whose process has ended is deleted."""

    async def forget(self: Keeper, id: str) -> bool:
        await self.drop(id)
        return True

    return mock.patch.object(Keeper, "_take_over", forget)


def _changed_outcome() -> AbstractContextManager[Any]:
    """A task that has completed can still be cancelled."""
    late = {TaskEvent.CANCELLED: (TaskStatus.CANCELLED, TaskDeed.STOP)}
    return mock.patch.dict(TASKS, {TaskStatus.COMPLETED: {**TASKS[TaskStatus.COMPLETED], **late}})


def _repeated_question() -> AbstractContextManager[Any]:
    """An answer is accepted, and its question stays open."""
    close = TaskRecord._close

    def keep(self: TaskRecord, keys: Iterable[str], now: float, **changes: Any) -> TaskStep:
        step = close(self, keys, now, **changes)
        return attrs.evolve(step, task=attrs.evolve(step.task, questions=self.questions))

    return mock.patch.object(TaskRecord, "_close", keep)


def _uncancelled_task() -> AbstractContextManager[Any]:
    """The cancellation of a task is acknowledged, and has no effect."""

    async def acknowledge(self: Keeper, params: Any, principal: Any, form: TaskForm) -> dict[str, Any]:
        return form.acknowledged(await self.owned(params["taskId"], principal))

    return mock.patch.object(Keeper, "cancel", acknowledge)


MISTAKES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], int]] = {
    "a replayed tools/call": (_replayed_call, 3),
    "a false 'not run'": (_false_not_run, 100),
    "a kept listener": (_kept_listener, 0),
    "a cancellation that does not reach the handler": (_unheard_cancellation, 0),
    "a leaked task": (_leaked_task, 0),
    "a lost change": (_lost_change, 69),
    "kept bytes": (_kept_bytes, 1),
    "the answer of another call": (_answer_of_another, 2),
    "a forgotten principal": (_forgotten_principal, 0),
    "the task of another client": (_unchecked_owner, 0),
    "a forgotten task": (_deleted_task, 24),
    "an end that changes": (_changed_outcome, 2),
    "an answered question": (_repeated_question, 2),
    "an unheard end of a task": (_uncancelled_task, 15),
}
"""Each mistake, with the first seed that finds it.  The seed is a hint: if it no longer finds it, others are tried."""


# Mistakes that have an effect only with several replicas.


def _unknown_session() -> AbstractContextManager[Any]:
    """A replica does not fetch a session of another replica."""
    return mock.patch.object(SharedEndpoint, "_fetch", AsyncMock(return_value=None))


def _kept_answer() -> AbstractContextManager[Any]:
    """An answer to a question of another replica is not passed on."""
    return mock.patch.object(SessionMail, "_asked_here", return_value=True)


def _kept_cancellation() -> AbstractContextManager[Any]:
    """A cancellation of a call that another replica serves is not passed on."""
    return mock.patch("trio_mcp.server.http.shared_mail._CANCELLED", "")


def _early_acceptance() -> AbstractContextManager[Any]:
    """A message for another replica is accepted before the store has it."""
    return mock.patch.object(SessionMail, "written", AsyncMock(return_value=True))


def _unheard_subscription() -> AbstractContextManager[Any]:
    """A subscription is accepted before the replica that sends its notifications has it."""
    return mock.patch.object(Speaker, "_read_verdict", AsyncMock(return_value=None))


def _untold_change() -> AbstractContextManager[Any]:
    """A change is not announced to the other replicas."""
    return mock.patch.object(Replica, "announce", return_value=None)


def _unseen_gap() -> AbstractContextManager[Any]:
    """A replica does not notice that it has missed messages."""
    return mock.patch.object(Replica, "_gap", return_value=None)


@contextlib.contextmanager
def _outcome_by_another() -> Iterator[None]:
    """A process that was paused writes the outcome of a task that another process has taken over."""
    step = Keeper.step

    async def write(self: Keeper, id: str, take: Any, *, ours: bool = False) -> TaskStep | None:
        return await step(self, id, take)

    with mock.patch.object(Keeper, "step", write), mock.patch.object(Keeper, "_see", AsyncMock()):
        yield


@contextlib.contextmanager
def _two_outcomes() -> Iterator[None]:
    """The same, also after the other process has written an outcome."""
    late = {TaskEvent.FINISHED: (TaskStatus.COMPLETED, TaskDeed.STORE)}
    with _outcome_by_another(), mock.patch.dict(TASKS, {TaskStatus.FAILED: {**TASKS[TaskStatus.FAILED], **late}}):
        yield


def _run_again() -> AbstractContextManager[Any]:
    """A task of a dead process runs again, even if its tool does not allow that."""
    always = property(lambda self: True, lambda self, value: None)
    return mock.patch.object(Entry, "replay", always)


def _not_swept() -> AbstractContextManager[Any]:
    """Expired rows stay in the store."""
    return mock.patch.object(MemoryStore, "sweep", AsyncMock(return_value=0))


MISTAKES_OF_REPLICAS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "a session that another replica does not know": (_unknown_session, "has lost its session, and it is in the store"),
    "an answer that stays in a replica": (_kept_answer, "the world does not end"),
    "a cancellation that stays in a replica": (_kept_cancellation, "and its handler still runs"),
    "an answer that is accepted too early": (_early_acceptance, "the world does not end"),
    "a subscription that is accepted too early": (_unheard_subscription, "did not hear of the change"),
    "a change that stays in a replica": (_untold_change, "did not hear of the change"),
    "a gap that is not seen": (_unseen_gap, "did not hear of the change"),
    "a task that another replica holds": (_outcome_by_another, "that another one holds"),
    "an outcome over another": (_two_outcomes, "and is written again"),
    "a handler that runs again": (_run_again, "runs 2 times"),
    "a store that is not swept": (_not_swept, "the store still has"),
}
"""Each mistake, with a part of the message of the rule that it breaks."""
