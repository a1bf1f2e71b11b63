"""The progress that the other side must make while something waits for it.

One rule for both directions: in each window of `seconds` at least `rate` bytes a second must move, on average over the
window.  A total would not do: a client that sends most of a body at once would have earned an hour of silence.  A time
without any byte would not do either: one byte a minute would hold everything.

A window goes on over several writes, or bodies, as long as each follows the one before at once.  Else a client that
takes a minute for each short event would have a new window with each of them.

Nothing here has a clock: the time is an argument.
"""

from __future__ import annotations

import math

__all__ = ["Pace"]

_AT_ONCE = 0.1  # seconds after which what begins to wait is no part of what waited before


class Pace:
    """One direction of one connection."""

    __slots__ = ("_ended", "_enough", "_moved", "_seconds", "_window", "deadline")

    def __init__(self, seconds: float, rate: float) -> None:
        self._seconds = seconds
        # At least one byte, so that a rate of 0 still asks for progress; without a rate any progress is enough.
        self._enough = max(1.0, seconds * rate) if rate < math.inf and seconds < math.inf else 1.0
        self._moved = 0
        self._window = math.inf  # its end
        self._ended = -math.inf
        self.deadline = math.inf
        """When the other side is given up; `math.inf` while nothing waits for it."""

    def begin(self, now: float) -> None:
        """Something waits for the other side from now on; nothing changes if it did already."""
        if self.deadline < math.inf:
            return
        if now - self._ended > _AT_ONCE:
            self._moved = 0
            self._window = now + self._seconds
        self.deadline = self._window

    def move(self, size: int, now: float) -> None:
        """So many bytes have moved.  Enough of them begin a new window."""
        self._moved += size
        if self._moved >= self._enough:
            self._moved = 0
            self.deadline = self._window = now + self._seconds

    def end(self, now: float) -> None:
        """Nothing waits any more."""
        self.deadline = math.inf
        self._ended = now
