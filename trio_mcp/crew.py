"""The tasks that the handlers of one client run in.

While it runs, a handler has a task, a cancel scope and context variables to itself.  A task and a scope cost about as
much as all that the protocol asks for in a short call, so both are used again: when a call has ended, its task waits
for the next one of the same client.  It takes none after it was cancelled, or was left with something open.

Nothing here knows what is run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import trio
from trio.lowlevel import Abort, Task, reschedule, wait_task_rescheduled

__all__ = ["Crew", "Hand"]

_IDLE = "a handler's task, which waits for the next call"

# Nothing public tells that a task has left a scope or a nursery open, as by a generator that was dropped, or has a lock
# that it did not give back.  Such a task must end: then Trio says what is wrong, and to whoever waits for the lock.
_has_locks: Container[Task] = ()
with suppress(ImportError):
    from trio._core._parking_lot import GLOBAL_PARKING_LOT_BREAKER as _has_locks


class Crew:
    """Hands, in this nursery and with the variables of who makes it; up to `spare` of them wait for work."""

    def __init__(self, nursery: trio.Nursery, spare: int) -> None:
        self._nursery = nursery
        self._spare = spare
        self._variables = copy_context()
        self._idle: list[Hand] = []

    def hire(self) -> Hand:
        """A hand, to be started now."""
        return self._idle.pop() if self._idle else Hand(self)

    def start(self, hand: Hand, work: Callable[[Any], Awaitable[object]], argument: Any, name: str) -> None:
        """Do this, in variables of its own."""
        hand.work, hand.argument = work, argument
        if hand.task is None:
            start_soon: Callable[..., None] = self._nursery.start_soon
            self._variables.run(start_soon, hand.serve, name=name)
        else:
            hand.task.name, hand.task.context = name, self._variables.copy()
            reschedule(hand.task)

    def end(self) -> None:
        """Nothing more will be started soon: what waits for it ends, and who is at work will not wait."""
        self._spare = 0
        for hand in tuple(self._idle):  # which leave it at once
            hand.scope.cancel()

    def keep(self, hand: Hand, task: Task) -> bool:
        """Let it wait for what comes next; False if there are enough."""
        if len(self._idle) >= self._spare:
            return False
        task.name, task.context = _IDLE, self._variables  # those of the call may hold a lot
        self._idle.append(hand)
        return True

    def leave(self, hand: Hand) -> None:
        """It was cancelled while it waited."""
        self._idle.remove(hand)


class Hand:
    """One task, and the scope that what it does runs in; who cancels that later might hit something else."""

    __slots__ = ("_crew", "argument", "scope", "task", "work")

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.scope = trio.CancelScope()
        self.task: Task | None = None
        self.work: Callable[[Any], Awaitable[object]]
        self.argument: Any

    async def serve(self) -> None:
        task = self.task = trio.lowlevel.current_task()
        with self.scope:
            inside = task._cancel_status
            while True:
                await self.work(self.argument)
                if task._cancel_status is not inside or task in _has_locks or not await self._rest(task):
                    return

    @trio.lowlevel.enable_ki_protection  # or who is found idle might be nobody
    async def _rest(self, task: Task) -> bool:
        """Wait for work; False if it need not."""
        del self.work, self.argument
        if not self._crew.keep(self, task):
            return False
        await wait_task_rescheduled(self._give_up)
        return True

    def _give_up(self, _: Any) -> Abort:
        self._crew.leave(self)
        return Abort.SUCCEEDED
