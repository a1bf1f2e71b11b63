"""Rate limits: one token bucket for each client, filled at a steady rate.

HTTP counts requests before it reads them.  `ServerSession` counts the requests that reach a handler, on every
transport.  Both count by the holder of `core.shares`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import trio

from trio_mcp.core.errors import UsageError

__all__ = ["Rates"]

_MOST = 10_000
"""The number of clients with a bucket.  If there are more, the clients that have been silent longest are forgotten."""


class Rates:
    """Lets each client send `rate` requests a second, and as many at once after a pause."""

    def __init__(self, rate: float, name: str = "request_rate") -> None:
        if not rate > 0:
            raise UsageError(f"Limits.{name} must be a number of requests a second, above 0, got {rate!r}")
        self._rate = rate
        self.limited = rate != math.inf
        """Whether requests are counted."""
        self._burst = max(rate, 1.0)
        self._buckets: dict[Hashable, tuple[float, float]] = {}  # the tokens, and the time of the last change

    def forget(self, client: Hashable) -> None:
        """Drop the bucket of a client that will not come back."""
        self._buckets.pop(client, None)

    def give_back(self, client: Hashable) -> None:
        """Return the token of the last request."""
        if (found := self._buckets.get(client)) is not None:  # None: the client was forgotten, or there is no limit
            held, then = found
            self._buckets[client] = (min(self._burst, held + 1), then)

    def wait(self, client: Hashable) -> float:
        """Take a token and return 0, or return the seconds until this client has the next one."""
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
