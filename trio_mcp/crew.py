"""The tasks that handlers run in.

While it runs, a handler has a task, a cancel scope and context variables to itself.  A task and a scope cost about as
much as all that the protocol asks for in a short call, so they are used again: when a call has ended, its task waits
for the next one, scope and all.  One that was cancelled, or was left with something open, takes no other.

Nothing here knows what is run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import Any

import trio
from trio.lowlevel import Abort, reschedule, wait_task_rescheduled

__all__ = ["Crew"]

_SPARE = 64  # hands that wait for work: as many as a lively client has calls in flight
_IDLE = "a handler's task, which waits for the next call"


class Crew:
    """Hands, in this nursery.  They end when they are cancelled with it, and not by themselves."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._variables = copy_context()
        self._idle: list[_Hand] = []

    def start_soon(
        self, work: Callable[..., Awaitable[object]], *args: object, variables: Context, name: str
    ) -> trio.CancelScope:
        """As `trio.Nursery.start_soon`, in a copy of these variables.

        What is given back is the scope that it runs in, for as long as it runs: who cancels it later might hit another.
        """
        if not self._idle:
            hand = _Hand(self, work, args)
            start: Callable[..., None] = self._nursery.start_soon
            variables.run(start, hand.serve, name=name)
            return hand.scope
        hand = self._idle.pop()
        hand.work, hand.args = work, args
        task = hand.task
        task.name, task.context = name, variables.copy()
        reschedule(task)
        return hand.scope

    def spare(self, hand: _Hand) -> bool:
        """Keep it for what comes next; False if there are enough."""
        if len(self._idle) >= _SPARE:
            return False
        hand.task.name, hand.task.context = _IDLE, self._variables  # those of the call may hold a lot
        self._idle.append(hand)
        return True

    def leave(self, hand: _Hand) -> None:
        """It was cancelled while it waited."""
        self._idle.remove(hand)


class _Hand:
    """One task and its scope."""

    __slots__ = ("_crew", "args", "scope", "task", "work")

    def __init__(self, crew: Crew, work: Callable[..., Awaitable[object]], args: tuple[object, ...]) -> None:
        self._crew = crew
        self.scope = trio.CancelScope()
        self.task: trio.lowlevel.Task
        self.work: Callable[..., Awaitable[object]] = work
        self.args = args

    async def serve(self) -> None:
        task = self.task = trio.lowlevel.current_task()
        with self.scope:
            # Nothing public tells whether a scope or a nursery was left open, as by a generator that was dropped; then
            # this task must end, and Trio says why.
            inside = task._cancel_status
            while True:
                await self.work(*self.args)
                if task._cancel_status is not inside:
                    return
                del self.work, self.args
                if not self._crew.spare(self):
                    return
                await wait_task_rescheduled(self._give_up)

    def _give_up(self, _: Any) -> Abort:
        self._crew.leave(self)
        return Abort.SUCCEEDED
