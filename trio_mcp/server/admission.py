"""Admission: limit how many requests run at once, per connection and in all, and queue the others.

A request starts, waits for its turn, or is refused at once, so a busy server makes no client hang and no queue grows
without bound.  Running and waiting requests are resources that clients share (see `core.shares`).  Clients take turns:
a client that floods the server waits only behind its own requests, however many connections it has.

This module knows neither Trio nor the protocol: a `Share` is the part of one connection, with a function that starts
work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from trio_mcp.core.messages import Limits
from trio_mcp.core.shares import FairQueue, Shares

__all__ = ["Admission", "Share"]

W = TypeVar("W")


class Share(Generic[W]):
    """The running and waiting requests of one connection.  `holder` is its client."""

    __slots__ = ("_admission", "_all_running", "_all_waiting", "_start", "_waiting", "holder", "running")

    def __init__(self, admission: Admission[W], start: Callable[[W], None], holder: Hashable | None) -> None:
        self.holder = holder
        self._admission = admission
        self._all_running, self._all_waiting = admission.running, admission.waiting
        self._start = start
        # An OrderedDict, because it finds its first entry and removes any entry in constant time.
        self._waiting: OrderedDict[Hashable, W] = OrderedDict()
        self.running = 0

    def enter(self, key: Hashable, work: W) -> str | None:
        """Start `work` now or when its turn comes, and return None; or return the reason for refusing it."""
        limits = self._admission.limits
        # If a place is free here, no request waits for it: free places always go to waiting requests first.
        if self.running < limits.calls and self._all_running.take(self.holder):
            self.running += 1
            self._start(work)
            return None
        if len(self._waiting) >= limits.waiting:
            return f"the server is overloaded: {limits.waiting} requests wait already (Limits.waiting); try again later"
        if not self._all_waiting.take(self.holder):
            waiting = self._all_waiting.of(self.holder) or self._all_waiting.held
            return f"the server is overloaded: {waiting} requests wait already (Limits.waiting_in_all); try again later"
        self._waiting[key] = work
        self._queue_up()
        return None

    def withdraw(self, key: Hashable) -> W | None:
        """Remove the waiting request with this key and return it; None if there is none."""
        return self._take(key) if key in self._waiting else None

    def clear(self) -> list[W]:
        """Remove all waiting requests and return them."""
        return [self._take(key) for key in list(self._waiting)]

    def leave(self) -> None:
        """A request that was started has ended."""
        self.running -= 1
        if self.holder is None:
            self._all_running.held -= 1  # as `give`, without the cost of a call for each request on stdio
        else:
            self._all_running.give(self.holder)
        if self._waiting:
            self._queue_up()
        if self._all_waiting.held:
            self._admission.serve()

    def next(self) -> None:
        """Start the oldest waiting request, for which a place has been taken, and go to the end of the round."""
        self.running += 1
        self._start(self._take(next(iter(self._waiting))))
        self._queue_up()

    def _take(self, key: Hashable) -> W:
        work = self._waiting.pop(key)
        self._all_waiting.give(self.holder)
        if not self._waiting:
            self._admission.hungry.discard(self.holder, self)
        return work

    def _queue_up(self) -> None:
        if self._waiting and self.running < self._admission.limits.calls:
            self._admission.hungry.add(self.holder, self)


class Admission(Generic[W]):
    """The running and waiting requests of all connections of a server."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = Shares(limits.calls_in_all)
        self.waiting = Shares(limits.waiting_in_all)
        # Connections that have waiting requests and may run one more.
        self.hungry: FairQueue[Share[W]] = FairQueue(self.running)

    def share(self, start: Callable[[W], None], holder: Hashable | None = None) -> Share[W]:
        return Share(self, start, holder)

    def serve(self) -> None:
        """Start waiting requests while there are free places."""
        while (share := self.hungry.next()) is not None:
            share.next()
