"""Event ids, and the log from which a broken stream is resumed.

A session that supports resumption has one `EventLog`.  Each stream of the session has a name in the log.  Every event
is appended before it is sent (all events of one write together), and gets the id that the client later sends in
Last-Event-ID.  An id is ``<stream>-<number>``: the stream and the position in it.  So an id alone finds the events to
replay (http-45), no two events of a session share an id (http-40), and events of other streams are never replayed
(http-43).

What surprises: a log may forget.  It keeps the newest events, within limits.  A request to resume after a forgotten
event gets `NotReplayable`, never a replay with a gap.  And the log never learns which events the client has received,
so events are dropped by age only.

A log that outlives the process, or that several processes share, needs only these five methods.  In SQL: one table of
streams (session, stream, next number, finished) and one of events (session, stream, number, data), with `append` as one
transaction.  In Redis: a counter, and one stream each with MAXLEN.  An instance belongs to one session, as here.  Code
that waits for I/O belongs into the driver, not here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Protocol, TypeAlias

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import Limits, record
from trio_mcp.core.shares import Account

__all__ = ["EventLog", "LoggedEvent", "MemoryEventLog", "NotReplayable", "Replay", "Replayed"]


@record
class LoggedEvent:
    """One event as it was sent: its id, and its data (empty if the event only carries the id)."""

    id: str
    data: bytes


@record
class Replay:
    """The later events of one stream.  `finished`: no event will follow, so the connection ends after these."""

    stream: str
    events: tuple[LoggedEvent, ...]
    finished: bool


@record
class NotReplayable:
    """The stream cannot be resumed after this event.  Tell the client: some of its messages are lost."""

    why: str


Replayed: TypeAlias = Replay | NotReplayable


class EventLog(Protocol):
    """The events of one session.  The code that opens a stream must finish it: an open stream is never forgotten."""

    def open(self) -> str:
        """Open a stream and return its name, which is unique in this session."""
        ...

    def append(self, stream: str, data: Sequence[bytes]) -> Sequence[str]:
        """Log the events of one write on an open stream, and return the id of each."""
        ...

    def finish(self, stream: str) -> None:
        """End a stream.  Its events may still be replayed."""
        ...

    def replay(self, event_id: str) -> Replayed:
        """Return the events after this one, on the same stream."""
        ...

    def clear(self) -> None:
        """Forget everything, because the session has ended."""
        ...


_EVENT = 512  # bytes of memory for each event: most streams have two, and an empty stream takes 900 bytes


@attrs.define(eq=False, repr=False)
class _StreamLog:
    name: str
    events: deque[bytes] = attrs.field(factory=deque)  # the newest ones
    next: int = 0  # the number of the next event; the oldest one kept is `next - len(events)`
    finished: bool = False


class MemoryEventLog:
    """An `EventLog` in the memory of this process, limited in events and in bytes.

    The bytes are charged to `account`, with an overhead for each event.  If the account's holder needs the memory for
    other purposes, the oldest events are forgotten first.  The names of its streams begin with `prefix`.
    """

    def __init__(self, limits: Limits | None = None, account: Account | None = None, prefix: str = "") -> None:
        self._limits = limits or Limits()
        self._prefix = prefix
        self._account = account
        self._streams: dict[str, _StreamLog] = {}
        self._order: deque[_StreamLog] = deque()  # the stream of each kept event, oldest event first
        self._bytes = 0
        self._opened = 0

    def open(self) -> str:
        self._opened += 1
        name = f"{self._prefix}{self._opened}"
        self._streams[name] = _StreamLog(name)
        return name

    def append(self, stream: str, data: Sequence[bytes]) -> Sequence[str]:
        held = self._open_stream(stream)
        first, held.next = held.next, held.next + len(data)
        size = sum(map(len, data))
        if self._charge(size + len(data) * _EVENT):
            held.events.extend(data)
            self._order.extend([held] * len(data))
            self._bytes += size
            # An event larger than the whole log removes itself too: it was sent, and cannot be replayed.
            self._forget(len(self._order) - self._limits.replay_events, self._limits.replay_bytes)
        return [f"{stream}-{number}" for number in range(first, held.next)]

    def finish(self, stream: str) -> None:
        held = self._open_stream(stream)
        held.finished = True
        if not held.events:
            del self._streams[stream]

    def replay(self, event_id: str) -> Replayed:
        stream, _, digits = event_id.rpartition("-")
        held = self._streams.get(stream)
        # Ids of this log are short.  A longer one is unknown, and not worth converting.
        number = int(digits) if len(digits) < 20 and digits.isdecimal() else -1
        if held is None or event_id != f"{stream}-{number}" or number >= held.next:
            return NotReplayable("no event with this id is known in this session")
        oldest = held.next - len(held.events)
        if number + 1 < oldest:
            return NotReplayable("the events that followed this one are no longer kept")
        after = enumerate(held.events, oldest)
        events = tuple(LoggedEvent(f"{stream}-{n}", data) for n, data in after if n > number)
        return Replay(stream, events, held.finished)

    def clear(self) -> None:
        self._streams.clear()
        if self._account is not None:
            self._account.give(self._bytes + len(self._order) * _EVENT)
            self._account.budget.drop(self._account.holder, self.forget_oldest)
        self._order.clear()
        self._bytes = 0

    def __contains__(self, stream: str) -> bool:
        """Whether the stream is open, or some of its events are kept."""
        return stream in self._streams

    def __len__(self) -> int:
        """The number of kept events."""
        return len(self._order)

    def _open_stream(self, name: str) -> _StreamLog:
        held = self._streams.get(name)
        if held is None or held.finished:
            raise UsageError(f"stream {name!r} is not open in this log; call open() for a new one")
        return held

    def _charge(self, size: int) -> bool:
        """Charge `size` bytes, and forget old events if there is no room.  False if there is still no room.

        In that case no events are kept at all, so that no replay can have a gap.
        """
        account = self._account
        if account is None:
            return True
        while account.take(size) is not None:
            if not self.forget_oldest():
                return False
        account.budget.wrote(account.holder, self.forget_oldest)
        return True

    def forget_oldest(self) -> bool:
        """Forget the oldest event; False if there is none."""
        if not self._order:
            return False
        self._forget(1, inf)
        return True

    def _forget(self, events: int, most: float) -> None:
        """Forget at least `events` of the oldest events, and more while the rest has more than `most` bytes."""
        order, before = self._order, self._bytes
        forgotten = 0
        while forgotten < events or self._bytes > most:
            forgotten += 1
            held = order.popleft()
            self._bytes -= len(held.events.popleft())
            if held.finished and not held.events:
                del self._streams[held.name]
        if forgotten and self._account is not None:
            self._account.give(before - self._bytes + forgotten * _EVENT)
