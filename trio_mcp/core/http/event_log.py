"""Event ids, and the log from which a broken stream is resumed.

A session that offers resumption has one `EventLog`.  Every stream it opens gets a name there, every event that is sent
on the stream is appended first (all of one write at once), and the id that comes back is what the client will name in
Last-Event-ID.  An id is ``<stream>-<number>``: the stream it belongs to and the place in it, so an id alone finds what
is to be replayed (http-45), no two events of a session share one (http-40), and no other stream can slip in (http-43).

What is surprising: a log may forget.  It holds the newest events, within limits, and asking for what followed a
forgotten event is answered by `NotReplayable`, never by a replay with a hole in it.  And a log is not told what the
client has received: it never is known, so only age throws events away.

A log that outlives the process, or is shared by several, needs no more than these five methods.  In SQL: a table of
streams (session, stream, next number, finished) and one of events (session, stream, number, data), `append` being one
transaction; in Redis: a counter, and one stream each with MAXLEN.  Such a log is made for one session, like this one.
What makes it wait belongs to whoever drives it, not here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.jsonrpc import Limits
from trio_mcp.core.records import record
from trio_mcp.core.shares import Account

__all__ = ["EventLog", "LoggedEvent", "MemoryEventLog", "NotReplayable", "Replay", "Replayed"]


@record
class LoggedEvent:
    """One event as it was sent: its id, and its data (empty for one that only hands out the id)."""

    id: str
    data: bytes


@record
class Replay:
    """What followed on one stream.  `finished`: nothing will be added, so the connection ends after these."""

    stream: str
    events: tuple[LoggedEvent, ...]
    finished: bool


@record
class NotReplayable:
    """The stream cannot be continued from there.  The client must be told: some of its messages are lost."""

    why: str


Replayed: TypeAlias = Replay | NotReplayable


class EventLog(Protocol):
    """The events of one session.  Whoever opens a stream finishes it: an open one is never forgotten."""

    def open(self) -> str:
        """Begin a stream and return its name, which is new in this session."""
        ...

    def append(self, stream: str, data: Sequence[bytes]) -> Sequence[str]:
        """Log the events of one write on an open stream, and return the id of each."""
        ...

    def finish(self, stream: str) -> None:
        """Nothing more will be sent on this stream; what it has may still be replayed."""
        ...

    def replay(self, event_id: str) -> Replayed:
        """What was sent after this event, on its stream."""
        ...

    def clear(self) -> None:
        """The session has ended."""
        ...


_EVENT = 512  # bytes of memory for each event: most streams have two, and one takes 900 bytes without any


@attrs.define(eq=False, repr=False)
class _StreamLog:
    name: str
    events: deque[bytes] = attrs.field(factory=deque)  # the newest ones
    next: int = 0  # the number of the event to come; the oldest one held is `next - len(events)`
    finished: bool = False


class MemoryEventLog:
    """An `EventLog` for as long as the process lives, with room for so many events and so many bytes.

    The bytes are charged to `account`, and what keeping an event takes beside them.  When its holder needs the room for
    something else, the oldest events go first.
    """

    def __init__(self, limits: Limits | None = None, account: Account | None = None) -> None:
        self._limits = limits or Limits()
        self._account = account
        self._streams: dict[str, _StreamLog] = {}
        self._order: deque[_StreamLog] = deque()  # that of each event held, oldest event first
        self._bytes = 0
        self._opened = 0

    def open(self) -> str:
        self._opened += 1
        name = str(self._opened)
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
            self._forget_beyond_limits()
        return [f"{stream}-{number}" for number in range(first, held.next)]

    def finish(self, stream: str) -> None:
        held = self._open_stream(stream)
        held.finished = True
        if not held.events:
            del self._streams[stream]

    def replay(self, event_id: str) -> Replayed:
        stream, _, digits = event_id.rpartition("-")
        held = self._streams.get(stream)
        # Ours are short: what is not cannot be one, and is not worth converting.
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
            self._account.budget.drop(self._account.holder, self)
        self._order.clear()
        self._bytes = 0

    def __len__(self) -> int:
        """How many events are held."""
        return len(self._order)

    def _open_stream(self, name: str) -> _StreamLog:
        held = self._streams.get(name)
        if held is None or held.finished:
            raise UsageError(f"stream {name!r} is not open in this log; open() gives a new one")
        return held

    def _charge(self, size: int) -> bool:
        """Take so many bytes, be it in the place of what is held; False if there is no room even so.

        Then nothing is held any more, so that no replay can have a hole.
        """
        account = self._account
        if account is None:
            return True
        while account.take(size) is not None:
            if not self.forget_oldest():
                return False
        account.budget.wrote(account.holder, self)
        return True

    def _forget_beyond_limits(self) -> None:
        # An event larger than the whole log pushes out itself too: it was sent, and cannot be sent again.
        while len(self._order) > self._limits.replay_events or self._bytes > self._limits.replay_bytes:
            self.forget_oldest()

    def forget_oldest(self) -> bool:
        """Forget the oldest event; False if there is none."""
        if not self._order:
            return False
        held = self._order.popleft()
        size = len(held.events.popleft())
        self._bytes -= size
        if self._account is not None:
            self._account.give(size + _EVENT)
        if held.finished and not held.events:
            del self._streams[held.name]
        return True
