"""How often one client may ask: a bucket of tokens for each, filled at a steady rate.

HTTP counts requests before it knows what they are, and `Conversation` counts those that reach a handler, on every
transport.  Both count by the holder of `core.shares`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import trio

from trio_mcp.core.errors import UsageError

__all__ = ["Rates"]

_MOST = 10_000
"""Clients that are kept in mind.  Beyond: those are forgotten first that have been silent longest."""


class Rates:
    """Each client may ask `rate` times a second, and after a pause as often at once."""

    def __init__(self, rate: float, name: str = "request_rate") -> None:
        if not rate > 0:
            raise UsageError(f"Limits.{name} is a number of requests a second, above 0; not {rate!r}")
        self._rate = rate
        self.limited = rate != math.inf
        """Whether there is anything to count."""
        self._burst = max(rate, 1.0)
        self._buckets: dict[Hashable, tuple[float, float]] = {}  # what was in it, and when

    def forget(self, client: Hashable) -> None:
        """It will not come back."""
        self._buckets.pop(client, None)

    def give_back(self, client: Hashable) -> None:
        """What was counted last is not to count."""
        if (found := self._buckets.get(client)) is not None:  # else it was forgotten, or nothing is counted
            held, then = found
            self._buckets[client] = (min(self._burst, held + 1), then)

    def wait(self, client: Hashable) -> float:
        """Seconds until this client may ask again; 0: it may now, and that is counted."""
        if not self.limited:
            return 0.0
        now = trio.current_time()
        held, then = self._buckets.pop(client, (self._burst, now))
        held = min(self._burst, held + (now - then) * self._rate)
        allowed = held >= 1
        self._buckets[client] = (held - allowed, now)
        if len(self._buckets) > _MOST:
            del self._buckets[next(iter(self._buckets))]
        return 0.0 if allowed else (1 - held) / self._rate
