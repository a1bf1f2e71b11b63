"""How many requests run at once, for one connection and for all; and the queue behind them.

A request is admitted, waits its turn, or is refused at once: nobody hangs because a server is busy, and no queue grows
without end.  Turns go round by connection, so one that floods the server waits behind its own requests only.

Nothing here knows Trio or the protocol: a `Share` is one connection's part, with a function that starts what it is
given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from trio_mcp.core.jsonrpc import Limits

__all__ = ["Admission", "Share"]

W = TypeVar("W")

# Queues are ordered dicts: from the middle of one something can be taken, and the first is found at once, where a plain
# dict looks for it among all that were there before.


class Share(Generic[W]):
    """What one connection has running and waiting."""

    __slots__ = ("_admission", "_start", "_waiting", "running")

    def __init__(self, admission: Admission[W], start: Callable[[W], None]) -> None:
        self._admission = admission
        self._start = start
        self._waiting: OrderedDict[Hashable, W] = OrderedDict()
        self.running = 0

    def enter(self, key: Hashable, work: W) -> str | None:
        """Start `work` now, or when its turn comes; or the reason why it is refused."""
        admission, limits = self._admission, self._admission.limits
        if self.running < limits.calls and admission.running < limits.calls_in_all:
            self._run(work)  # nothing waits for this place: whenever one is free, who waits has got it
            return None
        for waiting, limit, name in (
            (len(self._waiting), limits.waiting, "waiting"),
            (admission.waiting, limits.waiting_in_all, "waiting_in_all"),
        ):
            if waiting >= limit:
                return f"the server is overloaded: {limit} requests wait already (Limits.{name}); try again later"
        self._waiting[key] = work
        admission.waiting += 1
        self._queue_up()
        return None

    def withdraw(self, key: Hashable) -> None:
        """What waits under this key, if anything does, will not be started."""
        if key in self._waiting:
            self._take(key)

    def clear(self) -> list[W]:
        """What waits will not be started."""
        return [self._take(key) for key in list(self._waiting)]

    def leave(self) -> None:
        """Something that was started has ended."""
        self.running -= 1
        self._admission.running -= 1
        if self._waiting:
            self._queue_up()
        if self._admission.hungry:
            self._admission.serve()

    def next(self) -> None:
        """Start what has waited longest, and stand behind the others."""
        self._run(self._take(next(iter(self._waiting))))
        self._queue_up()

    def _take(self, key: Hashable) -> W:
        work = self._waiting.pop(key)
        self._admission.waiting -= 1
        if not self._waiting:
            self._admission.hungry.pop(self, None)
        return work

    def _queue_up(self) -> None:
        if self._waiting and self.running < self._admission.limits.calls:
            self._admission.hungry.setdefault(self)

    def _run(self, work: W) -> None:
        self.running += 1
        self._admission.running += 1
        self._start(work)


class Admission(Generic[W]):
    """What all connections of a server have running and waiting."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = 0
        self.waiting = 0
        # Whose turn is next: shares that have something waiting and room to run it.
        self.hungry: OrderedDict[Share[W], None] = OrderedDict()

    def share(self, start: Callable[[W], None]) -> Share[W]:
        return Share(self, start)

    def serve(self) -> None:
        """Start what there is room for."""
        while self.hungry and self.running < self.limits.calls_in_all:
            share, _ = self.hungry.popitem(last=False)
            share.next()
