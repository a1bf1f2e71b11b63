"""Event streams that any replica can resume: each event of a session is also in the store.

The replica that runs a call writes the events of its stream.  It gives them their ids and sends them without waiting
for the store; a task appends them to a stream of the store afterwards, in order, all that wait at once.  So an event
that a client has read may not be in the store yet, but no event is there that lacks an earlier one.

The name of a stream begins with the name of its replica: ``<replica>.<session copy>.<number>``, with an "s" before the
number of a standalone stream.  One item in the store is one line of JSON and then the data of its events:

| Member | Meaning |
|---|---|
| `first`, `sizes` | the number of the first event in this item, and the length of each |
| `ids` | the requests that the stream answers; they fail if their replica dies |
| `next` | instead of events: the standalone stream goes on as this one, perhaps in another replica |
| `end` | instead of events: no event follows |

An item may be there twice, because the store had it although it failed; a reader skips events that it has had.

A client that resumes a stream elsewhere gets a `FollowedStream`: it sends the events in the store, then those that are
appended.
If the store is slow or away, items wait, up to the bytes that a session keeps for replay (`Limits.replay_bytes`).  With
more the stream cannot be resumed elsewhere any more, and is discarded there; its own client notices nothing.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trio_mcp.core.http.event_log import LoggedEvent, MemoryEventLog, NotReplayable, Replayed
from trio_mcp.core.http.sse import KEEP_ALIVE
from trio_mcp.core.messages import Id
from trio_mcp.server.http.responses import ResponseStream
from trio_mcp.server.replicas import QUICKLY, Replica
from trio_mcp.stores.rows import StoreFailed, StoreFull, wall_time

if TYPE_CHECKING:
    from trio_mcp.core.messages import Limits
    from trio_mcp.core.shares import Account

__all__ = ["FollowedStream", "LoggedStream", "SharedEventLog", "StreamItem", "is_standalone", "read_item"]

_log = logging.getLogger("trio_mcp")
_AGAIN: Final = 1.0  # seconds until a store that failed is tried again
_STANDALONE: Final = "s"
_OVERHEAD: Final = 256  # bytes of an item in the queue beside its data


@attrs.frozen
class StreamItem:
    """One item of a stream in the store."""

    first: int = 0
    data: Sequence[bytes] = ()
    ids: Sequence[Id] = ()
    next: str | None = None
    end: bool = False

    @property
    def begins(self) -> int | None:
        """The number of its first event, or of the next one; None if it has no events."""
        return None if self.end or self.next is not None else self.first

    @property
    def last(self) -> int:
        """The number of its last event, or of the one before it if it has no events."""
        return self.first + len(self.data) - 1

    def text(self) -> bytes:
        if self.next is not None or self.end:
            return json.dumps({"next": self.next, "end": self.end}).encode() + b"\n"
        head = {"first": self.first, "sizes": list(map(len, self.data)), "ids": list(self.ids)}
        return json.dumps(head).encode() + b"\n" + b"".join(self.data)

    def after(self, stream: str, number: int) -> list[LoggedEvent]:
        """The events of this item that come after an event."""
        numbered = enumerate(self.data, self.first)
        return [LoggedEvent(f"{stream}-{n}", data) for n, data in numbered if n > number]


def read_item(text: bytes) -> StreamItem:
    head, _, rest = text.partition(b"\n")
    members = json.loads(head)
    if "sizes" not in members:
        return StreamItem(next=members["next"], end=members["end"])
    data, at = [], 0
    for size in members["sizes"]:
        data.append(rest[at : at + size])
        at += size
    return StreamItem(members["first"], data, members["ids"])


@attrs.define(eq=False)
class _Unwritten:
    """The items of one stream that are not in the store yet."""

    items: deque[StreamItem] = attrs.field(factory=deque)
    size: int = 0
    written: trio.Event = attrs.field(factory=trio.Event)  # set when all are there


class SharedEventLog(MemoryEventLog):
    """The event log of one copy of a session, which also writes to the store.

    `name` is that of the session in the store.
    """

    def __init__(self, replica: Replica, name: str, limits: Limits, account: Account, prefix: str) -> None:
        super().__init__(limits, account, prefix)
        self.ids: dict[str, Sequence[Id]] = {}
        """The requests that each open stream answers."""
        self.moved: set[str] = set()
        """The standalone streams whose events are kept here, but which go on in another replica."""
        self._replica = replica
        self._name = name
        self._most = limits.replay_bytes
        self._kept = limits.session_idle_seconds
        self._holder = "" if account.holder is None else str(account.holder)
        self._numbers: dict[str, int] = {}  # of the next event of each open stream
        self._waiting: dict[str, _Unwritten] = {}
        self._broken: set[str] = set()  # open streams that are not in the store any more

    def open_standalone(self) -> str:
        """Open a stream for messages that belong to no request."""
        prefix, self._prefix = self._prefix, f"{self._prefix}{_STANDALONE}"
        try:
            return self.open()
        finally:
            self._prefix = prefix

    def append(self, stream: str, data: Sequence[bytes]) -> Sequence[str]:
        ids = super().append(stream, data)
        first = self._numbers.get(stream, 0)
        self._numbers[stream] = first + len(data)
        self._put(stream, StreamItem(first, list(data), self.ids.get(stream, ())), sum(map(len, data)))
        return ids

    def finish(self, stream: str) -> None:
        super().finish(stream)
        self.ids.pop(stream, None)
        self._numbers.pop(stream, None)
        self._put(stream, StreamItem(end=True))
        self._broken.discard(stream)

    def move(self, stream: str) -> None:
        """A standalone stream of this replica goes on in another one."""
        self.moved = {each for each in self.moved if each in self} | {stream}

    def refresh(self) -> None:
        """Let the open streams stay in the store, although they have no new events."""
        for stream, number in self._numbers.items():
            self._put(stream, StreamItem(number, (), self.ids.get(stream, ())))

    def link(self, stream: str, next: str) -> None:
        """A standalone stream, of this replica or another one, goes on as the stream `next`."""
        self._put(stream, StreamItem(next=next))

    def replay(self, event_id: str) -> Replayed:
        if event_id.rpartition("-")[0] in self.moved:
            return NotReplayable("this stream goes on in another process")
        return super().replay(event_id)

    def in_store(self, stream: str) -> str:
        """The name of a stream in the store."""
        return f"{self._name} {stream}"

    async def written(self, stream: str) -> None:
        """Wait until all events of a stream are in the store."""
        while (waiting := self._waiting.get(stream)) is not None:
            await waiting.written.wait()

    async def all_written(self) -> None:
        for stream in tuple(self._waiting):
            await self.written(stream)

    def _put(self, stream: str, item: StreamItem, size: int = 0) -> None:
        if stream in self._broken:
            return
        waiting = self._waiting.get(stream)
        if waiting is None:
            waiting = _Unwritten()
            if not self._replica.start_soon(self._write, stream, waiting, name="events to the store"):
                return
            self._waiting[stream] = waiting
        waiting.items.append(item)
        waiting.size += size + _OVERHEAD
        if waiting.size > self._most:
            self._break(stream, waiting)

    def _break(self, stream: str, waiting: _Unwritten) -> None:
        _log.warning("a stream cannot be resumed in other replicas: the store is too slow (Limits.replay_bytes)")
        waiting.items.clear()
        if stream in self:
            self._broken.add(stream)

    async def _write(self, stream: str, waiting: _Unwritten) -> None:
        """Append the items of a stream until none waits."""
        store, name, failed = self._replica.store, self.in_store(stream), False
        try:
            while waiting.items:
                item = waiting.items[0]
                try:
                    await store.append(
                        name, item.text(),
                        owner=self._holder, expires=wall_time() + self._kept, max_bytes=self._most + _OVERHEAD,
                    )  # fmt: skip
                except StoreFailed as error:
                    if not failed:  # once for each stream
                        _log.error("%s", error)
                    failed = True
                    await trio.sleep(_AGAIN)
                    continue
                except StoreFull:
                    self._break(stream, waiting)
                if waiting.items and waiting.items[0] is item:
                    waiting.items.popleft()
                    waiting.size -= sum(map(len, item.data)) + _OVERHEAD
            if stream in self._broken:
                with suppress(StoreFailed):  # it expires
                    await store.discard(name)
        finally:
            del self._waiting[stream]
            waiting.written.set()


def is_standalone(stream: str) -> bool:
    """Whether a name is that of a standalone stream."""
    return stream.rpartition(".")[2].startswith(_STANDALONE)


class LoggedStream(ResponseStream):
    """A stream whose events go to the store."""

    async def begin(self, on_disconnect: Any) -> Any:
        # The store must have the session first, so no other task may write: also not because a keep-alive is due.
        held = self._writing = self._response
        try:
            await self.owner.settle(QUICKLY)
        except BaseException:
            on_disconnect()
            raise
        finally:
            if self._writing is held:
                self._writing = None
            if self._written is not None:
                self._written.unpark_all()
        await super().begin(on_disconnect)
        self.wake()  # for messages queued meanwhile
        return on_disconnect

    @property
    def primes(self) -> bool:
        """Whether its client knows events without data."""
        return self._mode.primes

    def follow_elsewhere(self) -> None:
        """Its client has resumed it in another replica, which reads its events from the store."""
        self.cut()
        if self._absent:
            self._shared.detached.touch(self)  # its client is there

    def _encode_and_log(self, texts: Sequence[bytes], retry: float | None = None) -> bytes:
        if self.name is None and isinstance(log := self._mode.log, SharedEventLog):
            self.name = log.open() if self._ids else log.open_standalone()
            log.ids[self.name] = tuple(self._ids)
        return super()._encode_and_log(texts, retry)


class FollowedStream(ResponseStream):
    """The response to a client that resumes a stream of another replica.

    It sends events as they are, and is over with its response, because the stream itself goes on elsewhere.
    """

    _events_waiting: Sequence[bytes] = ()

    def send_events(self, events: Sequence[bytes]) -> None:
        """Send these bytes, each of which is one event."""
        self._events_waiting = [*self._events_waiting, *events]
        self.wake()

    @property
    def waiting(self) -> int:
        return 0 if self._over else len(self._events_waiting)

    @property
    def over(self) -> bool:
        """Whether its client has gone, or the stream has ended."""
        return self._over

    def _events(self, done: bool) -> bytes:
        parts, self._events_waiting = [self._missed, *self._events_waiting], ()
        if self._keep_alive_due and not any(parts):
            parts.append(KEEP_ALIVE)
        self._missed, self._keep_alive_due = b"", False
        return b"".join(parts)

    def _take(self) -> Any:
        if not (self._events_waiting or self._keep_alive_due or self._done or not self._begun):
            return None
        return self._stream_part(self._done)

    def _detach_and_log(self) -> None:
        if not self._over:
            self._end()
