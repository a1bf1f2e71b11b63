"""The tasks that the handlers of one client run in.

While it runs, a handler has a task, a cancel scope and context variables to itself.  A task and a scope cost about as
much as all that the protocol asks for in a short call, so both are used again: when a call has ended, its task waits
for the next one of the same client.  It takes none after it was cancelled, or was left with something open.

Who makes thousands of calls at once may soon do it again, so as many tasks wait as were wanted lately.  One holds some
5 KB.

Nothing here knows what is run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import trio
from trio.lowlevel import Abort, Task, reschedule, wait_task_rescheduled

__all__ = ["Crew", "Hand", "Idle"]

_IDLE = "a handler's task, which waits for the next call"
_IN_ALL = 5_000  # hands that wait in the crews of a run, with which no crew keeps more than its `spare`
_LATELY = 20_000  # calls in which a hand was wanted, or is not kept

# Nothing public tells that a task has left a scope or a nursery open, as by a generator that was dropped, or has a lock
# that it did not give back.  Such a task must end: then Trio says what is wrong, and to whoever waits for the lock.
_has_locks: Container[Task] = ()
with suppress(ImportError):
    from trio._core._parking_lot import GLOBAL_PARKING_LOT_BREAKER as _has_locks


class Idle:
    """How many hands wait for work, in all crews of a run."""

    __slots__ = ("hands",)

    def __init__(self) -> None:
        self.hands = 0


class Crew:
    """Hands, in this nursery and with the variables of who makes it; `spare` of them may always wait for work, and
    where that is any, so may more, as long as they are not too many `in_all`."""

    def __init__(self, nursery: trio.Nursery, spare: int, in_all: Idle) -> None:
        self._nursery = nursery
        self._spare = spare
        self._in_all = in_all
        self._variables = copy_context()
        self._idle: list[Hand] = []
        self._hired = 0
        self._unwanted = 0  # of those that wait, the first so many have waited since it was last looked

    def hire(self) -> Hand:
        """A hand, to be started now."""
        self._hired += 1
        if not self._hired % _LATELY:
            self._let_go()
        if not self._idle:
            return Hand(self)
        self._in_all.hands -= 1
        hand = self._idle.pop()
        if len(self._idle) < self._unwanted:
            self._unwanted = len(self._idle)
        return hand

    def _let_go(self) -> None:
        for hand in self._idle[self._spare : self._unwanted]:  # which leave it at once
            hand.scope.cancel()
        self._unwanted = len(self._idle)

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
        for hand in tuple(self._idle):
            hand.scope.cancel()

    def keep(self, hand: Hand, task: Task) -> bool:
        """Let it wait for what comes next; False if there are enough."""
        if len(self._idle) >= self._spare and (not self._spare or self._in_all.hands >= _IN_ALL):
            return False
        task.name, task.context = _IDLE, self._variables  # those of the call may hold a lot
        self._idle.append(hand)
        self._in_all.hands += 1
        return True

    def leave(self, hand: Hand) -> None:
        """It was cancelled while it waited."""
        self._idle.remove(hand)
        self._in_all.hands -= 1


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
