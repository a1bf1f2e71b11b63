"""Channels within a process: who receives on which, and a bounded queue for each receiver.

All stores deliver messages here.  They differ in where the messages come from: the store in memory has them, and the
others look for those of other processes while a receiver waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

import trio

from trio_mcp.stores.rows import EVENT, Message, Resync

__all__ = ["Channels", "Receiver"]

_QUEUED = 1024 * 1024  # bytes in the queue of a receiver; one message may be larger


class Receiver:
    """The messages of one block of `Store.receive`: an iterator."""

    def __init__(self, look: Callable[[], Awaitable[None]]) -> None:
        self._look = look
        self._queue: deque[tuple[str, bytes]] = deque()
        self._bytes = 0
        self._lost = False
        self._waiting = trio.CancelScope()

    def __aiter__(self) -> Receiver:
        return self

    async def __anext__(self) -> Message:
        await trio.lowlevel.checkpoint()
        while not (self._lost or self._queue):
            with trio.CancelScope() as self._waiting:  # one scope, because `look` may look for all receivers
                await self._look()
        if self._lost:
            self._lost = False
            return Resync()
        channel, body = self._queue.popleft()
        self._bytes -= EVENT + len(body)
        return channel, body

    def put(self, channel: str, body: bytes) -> None:
        """Queue a message.  If there is no room, it and those before it are replaced by a `Resync`."""
        self._queue.append((channel, body))
        self._bytes += EVENT + len(body)
        if self._bytes > _QUEUED and len(self._queue) > 1:
            self.lose()
        self._waiting.cancel()

    def lose(self) -> None:
        """Let the next message be a `Resync`, in place of those that wait."""
        self._queue.clear()
        self._bytes = 0
        self._lost = True
        self._waiting.cancel()


class Channels:
    """The receivers of a store in this process, by channel."""

    def __init__(self) -> None:
        self._receivers: dict[str, dict[Receiver, None]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._receivers)

    def __contains__(self, name: object) -> bool:
        return name in self._receivers

    def __len__(self) -> int:
        return len(self._receivers)

    @contextmanager
    def open(
        self, names: Collection[str], look: Callable[[], Awaitable[None]] = trio.sleep_forever
    ) -> Iterator[Receiver]:
        """Receive on these channels in a block.  A receiver awaits `look` while it has no message."""
        receiver, names = Receiver(look), frozenset(names)
        for name in names:
            self._receivers.setdefault(name, {})[receiver] = None
        try:
            yield receiver
        finally:
            for name in names:
                receivers = self._receivers[name]
                del receivers[receiver]
                if not receivers:
                    del self._receivers[name]

    def deliver(self, name: str, body: bytes) -> None:
        """Give a message to those that receive on its channel."""
        for receiver in self._receivers.get(name, ()):
            receiver.put(name, body)

    def resync(self) -> None:
        """Tell all receivers that messages may have been lost."""
        for receivers in self._receivers.values():
            for receiver in receivers:
                receiver.lose()
