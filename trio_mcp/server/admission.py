"""How many requests run at once, for one connection and for all; and the queue behind them.

A request is admitted, waits its turn, or is refused at once: nobody hangs because a server is busy, and no queue grows
without end.  Running and waiting are resources of which each client has a share (see `core.shares`), and turns go round
by client: one that floods the server waits behind its own requests only, however many connections it has.

Nothing here knows Trio or the protocol: a `Share` is one connection's part, with a function that starts what it is
given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from trio_mcp.core.jsonrpc import Limits
from trio_mcp.core.shares import FairQueue, Shares

__all__ = ["Admission", "Share"]

W = TypeVar("W")


class Share(Generic[W]):
    """What one connection of a holder has running and waiting."""

    __slots__ = ("_admission", "_start", "_waiting", "holder", "running")

    def __init__(self, admission: Admission[W], start: Callable[[W], None], holder: Hashable | None) -> None:
        self.holder = holder
        self._admission = admission
        self._start = start
        # An ordered dict: from its middle something can be taken, and its first entry is found at once.
        self._waiting: OrderedDict[Hashable, W] = OrderedDict()
        self.running = 0

    def enter(self, key: Hashable, work: W) -> str | None:
        """Start `work` now, or when its turn comes; or the reason why it is refused."""
        admission, limits = self._admission, self._admission.limits
        # Nothing waits for a place that this may take: whenever one is free, what waits has got it.
        if self.running < limits.calls and admission.running.take(self.holder):
            self.running += 1
            self._start(work)
            return None
        if len(self._waiting) >= limits.waiting:
            return f"the server is overloaded: {limits.waiting} requests wait already (Limits.waiting); try again later"
        if not admission.waiting.take(self.holder):
            waiting = admission.waiting.of(self.holder) or admission.waiting.held
            return f"the server is overloaded: {waiting} requests wait already (Limits.waiting_in_all); try again later"
        self._waiting[key] = work
        self._queue_up()
        return None

    def withdraw(self, key: Hashable) -> W | None:
        """What waits under this key, if anything does; it will not be started."""
        return self._take(key) if key in self._waiting else None

    def clear(self) -> list[W]:
        """What waits; it will not be started."""
        return [self._take(key) for key in list(self._waiting)]

    def leave(self) -> None:
        """Something that was started has ended."""
        self.running -= 1
        if self.holder is None:
            self._admission.running.held -= 1  # as `give`, without the price of a call for each request by stdio
        else:
            self._admission.running.give(self.holder)
        if self._waiting:
            self._queue_up()
        if self._admission.waiting.held:
            self._admission.serve()

    def next(self) -> None:
        """Start what has waited longest, in a place that has been taken for it, and stand behind the others."""
        self.running += 1
        self._start(self._take(next(iter(self._waiting))))
        self._queue_up()

    def _take(self, key: Hashable) -> W:
        work = self._waiting.pop(key)
        self._admission.waiting.give(self.holder)
        if not self._waiting:
            self._admission.hungry.discard(self.holder, self)
        return work

    def _queue_up(self) -> None:
        if self._waiting and self.running < self._admission.limits.calls:
            self._admission.hungry.add(self.holder, self)


class Admission(Generic[W]):
    """What all connections of a server have running and waiting."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = Shares(limits.calls_in_all)
        self.waiting = Shares(limits.waiting_in_all)
        # Connections that have something waiting, and room to run it.
        self.hungry: FairQueue[Share[W]] = FairQueue(self.running)

    def share(self, start: Callable[[W], None], holder: Hashable | None = None) -> Share[W]:
        return Share(self, start, holder)

    def serve(self) -> None:
        """Start what there is room for."""
        while (share := self.hungry.next()) is not None:
            share.next()
