"""How many requests run at once, for one connection and for all; and the queue behind them.

A request is admitted, waits its turn, or is refused at once: nobody hangs because a server is busy, and no queue grows
without end.  Turns go round by connection, so one that floods the server waits behind its own requests only.

Nothing here knows Trio or the protocol: a `Share` is one connection's part, with a function that starts what it is
given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from trio_mcp.core.jsonrpc import Limits

__all__ = ["Admission", "Share"]

W = TypeVar("W")


class Share(Generic[W]):
    """What one connection has running and waiting."""

    __slots__ = ("_admission", "_start", "_waiting", "running")

    def __init__(self, admission: Admission[W], start: Callable[[W], None]) -> None:
        self._admission = admission
        self._start = start
        self._waiting: dict[Hashable, W] = {}
        self.running = 0

    def enter(self, key: Hashable, work: W) -> str | None:
        """Start `work` now, or when its turn comes; or the reason why it is refused."""
        admission, limits = self._admission, self._admission.limits
        if self.running < limits.calls and admission.running < limits.calls_in_all:
            self._run(work)
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

    def withdraw(self, key: Hashable) -> bool:
        """What waits under this key will not be started.  False if it does not wait (any more)."""
        if key not in self._waiting:
            return False
        del self._waiting[key]
        self._admission.waiting -= 1
        if not self._waiting:
            self._admission.hungry.pop(self, None)
        return True

    def clear(self) -> list[W]:
        """What waits will not be started."""
        waiting = list(self._waiting.items())
        for key, _ in waiting:
            self.withdraw(key)
        return [work for _, work in waiting]

    def leave(self) -> None:
        """Something that was started has ended."""
        self.running -= 1
        self._admission.running -= 1
        self._queue_up()
        self._admission.serve()

    def _queue_up(self) -> None:
        if self._waiting and self.running < self._admission.limits.calls:
            self._admission.hungry.setdefault(self)

    def _run(self, work: W) -> None:
        self.running += 1
        self._admission.running += 1
        self._start(work)

    def next(self) -> None:
        """Start what has waited longest, and stand behind the others."""
        work = self._waiting.pop(next(iter(self._waiting)))
        self._admission.waiting -= 1
        self._run(work)
        self._queue_up()


class Admission(Generic[W]):
    """What all connections of a server have running and waiting."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = 0
        self.waiting = 0
        # Whose turn is next: shares that have something waiting and room to run it.
        self.hungry: dict[Share[W], None] = {}

    def share(self, start: Callable[[W], None]) -> Share[W]:
        return Share(self, start)

    def serve(self) -> None:
        while self.hungry and self.running < self.limits.calls_in_all:
            share = next(iter(self.hungry))
            del self.hungry[share]
            share.next()
