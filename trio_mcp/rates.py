"""How often one client may ask: a bucket of tokens for each, filled at a steady rate."""

from __future__ import annotations

import math

import trio

from trio_mcp.core.errors import LocalProtocolError

__all__ = ["Rates"]

_MOST = 10_000
"""Clients that are kept in mind.  Beyond: those are forgotten first that have been silent longest."""


class Rates:
    """Each client may ask `rate` times a second, and after a pause as often at once."""

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise LocalProtocolError(f"Limits.request_rate is a number of requests a second, above 0; not {rate!r}")
        self._rate = rate
        self.limited = rate != math.inf
        """Whether there is anything to count."""
        self._burst = max(rate, 1.0)
        self._buckets: dict[str, tuple[float, float]] = {}  # what was in it, and when

    def wait(self, client: str) -> float:
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
