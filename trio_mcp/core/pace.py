"""The minimum speed of the peer while data waits for it: a body that is received, or a write.

The rule is the same in both directions: in each window of `seconds` at least `rate` bytes per second must move, on
average over the window.  Two simpler rules were turned down:

- An average over the whole transfer.  A client that sends most of a body at once could then be silent for an hour.
- A limit for the time without any byte.  A client could then hold the connection with one byte per minute.

A window covers several writes or bodies if each follows the previous one immediately.  Otherwise a client that takes a
minute for each short event would get a new window with each event.

There is no clock: the time is an argument.
"""

from __future__ import annotations

import math

__all__ = ["Pace"]

_SAME_WINDOW = 0.1  # seconds; after a longer pause, the next wait starts a new window


class Pace:
    """The deadline of one direction of one connection."""

    __slots__ = ("_ended", "_enough", "_moved", "_seconds", "_window_end", "deadline")

    def __init__(self, seconds: float, rate: float) -> None:
        self._seconds = seconds
        # At least one byte, so that a rate of 0 still requires progress.  With an infinite rate one byte is enough.
        self._enough = max(1.0, seconds * rate) if rate < math.inf and seconds < math.inf else 1.0
        self._moved = 0
        self._window_end = math.inf
        self._ended = -math.inf
        self.deadline = math.inf
        """The time at which to give up the peer; `math.inf` while no data waits for it."""

    def begin(self, now: float) -> None:
        """Start to wait for the peer.  A second call has no effect."""
        if self.deadline < math.inf:
            return
        if now - self._ended > _SAME_WINDOW:
            self._moved = 0
            self._window_end = now + self._seconds
        self.deadline = self._window_end

    def move(self, size: int, now: float) -> None:
        """Count bytes that have moved.  A new window starts when there are enough of them."""
        self._moved += size
        if self._moved >= self._enough:
            self._moved = 0
            self.deadline = self._window_end = now + self._seconds

    def end(self, now: float) -> None:
        """Stop waiting for the peer."""
        self.deadline = math.inf
        self._ended = now
