"""The mail of a session: the items that its copies tell each other, in an order that is the same for all.

The mail is a stream of the store.  Each copy of the session processes its items in order, from the one by which the
copy joined; the number of that one is the number of the copy.  A message to all replicas brings each item at once.  If
it is lost, the copy reads the stream.

| Call | Returns | If the store fails |
|---|---|---|
| `post` | when the item is in the store | raises |
| `put`, `later` | at once; a task writes all that waits, in order | the task tries again each second |

`written` waits for all items that were put so far.  So a message of a client is in the mail before its client is told
that it was accepted, and outlives this process.

The items that wait are bounded in number and in bytes.  An item that is written twice, because the store had it
although it failed, is processed twice: items must allow that.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import trio

from trio_mcp.core.messages import Error, Id, InvalidMessage, JsonObject, Notification, Response, encode
from trio_mcp.server.context import ROOTS_CHANGED
from trio_mcp.stores.rows import StoreFailed, StoreFull, wall_time

if TYPE_CHECKING:
    from trio_mcp.core.messages import Limits, Message
    from trio_mcp.server.replicas import Replica

__all__ = ["SessionMail"]

_log = logging.getLogger("trio_mcp")

_OWN_IDS: Final = 24  # bits of the id of a question below the number of its copy
_CANCELLED: Final = "notifications/cancelled"
_WAITING: Final = 100  # writes that wait for the store
_EVENTS: Final = 50  # items that are read at once
_SHORT: Final = 16 * 1024  # bytes of an item that is sent to all replicas; a longer one they read
_AGAIN: Final = 1.0  # seconds until a store that failed is tried again


class SessionMail:
    """The mail of a session, as one copy has it.

    `process` gets each item; `lost` is called if some were dropped, because too much of them waited; `ended` is called
    if there is no mail any more.
    """

    number = 0
    """The number of this copy, from `join` on."""

    def __init__(
        self,
        replica: Replica,
        key: str,
        name: str,
        limits: Limits,
        owner: str,
        *,
        process: Callable[[JsonObject], object],
        lost: Callable[[], object],
        ended: Callable[[], object],
    ) -> None:
        self._replica = replica
        self._store = replica.store
        self._key = key  # of the session
        self._name = name  # of the stream in the store
        self._owner = owner
        # Longer than the row, because a mail that begins again would have numbers that were processed.
        self._seconds = 2 * limits.session_idle_seconds
        self._bytes = limits.message_bytes
        self._process, self._lost, self._ended = process, lost, ended
        self._position = 0  # of the last item that was processed
        self._reading = trio.Lock()
        self._due = False  # a task is about to read it
        self.waiting: deque[tuple[Callable[[], Awaitable[object]], int]] = deque()
        """The writes that wait, each with its size."""
        self._size = 0  # of all that waits
        self._done = 0  # writes that have waited, and are done
        self._writing = False  # a task writes all that waits
        self._written = trio.lowlevel.ParkingLot()  # tasks that wait for a write
        self._closed = False

    # Items.

    @property
    def first_id(self) -> int:
        """The first id of a question of this copy."""
        return self.number << _OWN_IDS | 1

    def item_of(self, message: Message, serves: Callable[[Id], bool]) -> JsonObject | None:
        """The item for a message of the client that concerns other copies; None if it concerns this one alone.

        `serves` says whether this copy serves the request with an id.
        """
        if isinstance(message, InvalidMessage):
            asked_elsewhere = message.answers is not None and not self._asked_here(message.answers)
            return {"garbled": message.why, "answers": message.answers} if asked_elsewhere else None
        if isinstance(message, Notification):
            id = message.params.get("requestId")
            elsewhere = type(id) in (int, str) and not serves(cast(Id, id))
            concerns = message.method == ROOTS_CHANGED or (message.method == _CANCELLED and elsewhere)
        elif isinstance(message, Response | Error):
            concerns = message.id is not None and not self._asked_here(message.id)
        else:
            return None
        return {"message": encode(message).decode()} if concerns else None

    def _asked_here(self, id: Id) -> bool:
        if isinstance(id, str):  # some clients send the id back as a string
            id = int(id) if id.isascii() and id.isdecimal() and len(id) < 20 else 0
        return id >> _OWN_IDS == self.number

    # Writing.

    async def join(self) -> None:
        """Take a number.  Raises `StoreFailed` and `StoreFull`."""
        self.number = self._position = await self._append({"joined": self._replica.name})

    async def post(self, item: JsonObject) -> None:
        """Write an item, and tell the other copies.  Raises `StoreFailed` and `StoreFull`; it may be there even so."""
        item = {"from": self.number, **item}
        number = await self._append(item)
        self.advance(number, item)
        try:
            await self._announce(number, item if len(json.dumps(item)) <= _SHORT else None)
        except StoreFailed as error:  # the others have lost no message, so they do not look by themselves
            self.log(error)
            self.later(partial(self._announce, number, None))

    def put(self, item: JsonObject) -> bool:
        """Write an item when the store allows it.  False if too many wait."""
        return self.later(partial(self.post, item), len(json.dumps(item)))

    def later(self, write: Callable[[], Awaitable[object]], size: int = 0) -> bool:
        """Call this function when all that waits is written, again and again until it does not fail.

        False if too much waits.
        """
        if self.waiting and (len(self.waiting) >= _WAITING or self._size + size > self._bytes):
            return False
        if not self._writing:
            if self._closed or not self._replica.start_soon(self._write, name="the mail of a session"):
                return False
            self._writing = True
        self.waiting.append((write, size))
        self._size += size
        return True

    async def written(self, seconds: float) -> bool:
        """Wait until all that waits now is written.  False if that takes longer, or the mail is closed."""
        last = self._done + len(self.waiting)
        with trio.move_on_after(seconds):
            while self._done < last and self._writing:
                await self._written.park()
        return self._done >= last

    def close(self) -> None:
        """The copy has ended: give up all that waits, but for a write that has begun."""
        self._closed = True

    async def _write(self) -> None:
        failed = False
        try:
            while self.waiting and not self._closed:
                write, size = self.waiting[0]
                try:
                    await write()
                except (StoreFailed, StoreFull) as error:
                    if not failed:  # once for each time that it is away
                        self.log(error)
                    failed = True
                    await trio.sleep(_AGAIN)
                    continue
                failed = False
                self.waiting.popleft()
                self._size -= size
                self._done += 1
                self._written.unpark_all()
        finally:
            self._writing = False
            self._written.unpark_all()

    async def _append(self, item: JsonObject) -> int:
        return await self._replica.quickly(
            self._store.append(
                self._name,
                json.dumps(item).encode(),
                owner=self._owner,
                expires=wall_time() + self._seconds,
                max_bytes=2 * self._bytes,
            )
        )

    async def _announce(self, number: int, item: JsonObject | None) -> None:
        """Tell the other copies of an item; without it, they read the mail."""
        await self._replica.quickly(self._replica.send(None, "session", key=self._key, number=number, item=item))

    def log(self, error: Exception) -> None:
        """Log a failure of the store.  If the session has ended in the meantime, there is none."""
        if not self._closed:
            _log.error("%s", error)

    async def discard(self) -> None:
        """Delete the mail, because the session has ended.  Raises `StoreFailed`."""
        await self._replica.quickly(self._store.discard(self._name))

    # Reading.

    def advance(self, number: int, item: JsonObject | None) -> None:
        """Process the next item, or read the mail if there are others before it, or the item is not known."""
        if number <= self._position:
            return
        if number > self._position + 1 or item is None:
            self.catch_up()
            return
        self._position = number
        self._process(item)

    def catch_up(self) -> None:
        """Read the mail in a task, because messages about it may have been lost."""
        if self._due:
            return
        self._due = True

        async def read() -> None:
            try:
                await self.read()
            except StoreFailed as error:
                self.log(error)

        self._replica.start_soon(read, name="the mail of a session")

    async def read(self) -> None:
        """Process all mail up to now.  Raises `StoreFailed`."""
        async with self._reading:
            self._due = False
            while not self._closed:
                after = self._position
                oldest, events = await self._replica.quickly(self._store.read(self._name, after, _EVENTS))
                if oldest == 0:
                    self._ended()
                    return
                if oldest > self._position + 1:
                    self._position = oldest - 1
                    self._lost()
                for number, body in events:
                    self.advance(number, json.loads(body))
                if not events:
                    return
