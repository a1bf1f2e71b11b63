"""Changes, merged into bursts, and told to whoever listens.

Who hears what is the business of `core.listen`; when, is that of this file.  A change is told one window after it
happened, together with all others of that time, and once however often it happened: a client reads the list again in
any case, and the last notice finds everything that came before it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import NamedTuple, Protocol

import trio

from trio_mcp.core.jsonrpc import Id, Limits, Notification
from trio_mcp.core.subscriptions import ChangeEvent, Listeners

__all__ = ["ListenerKey", "ListeningConnection", "Publisher"]


class ListeningConnection(Protocol):
    """A connection that listens."""

    def tell_change(self, notification: Notification, about: Id | None) -> None: ...


class ListenerKey(NamedTuple):
    """A listener: a listen request on a connection, or (without an id) the legacy session that the connection is."""

    link: ListeningConnection
    id: Id | None


class Publisher:
    """All listeners of one server, and what they are about to hear."""

    def __init__(self, limits: Limits, window: float) -> None:
        self.listeners: Listeners[ListenerKey] = Listeners(limits)
        self._window = window
        self._changes: dict[ChangeEvent, None] = {}
        self._changed = trio.Event()
        self._thread = threading.get_ident()
        self._token = trio.lowlevel.current_trio_token()

    def publish(self, change: ChangeEvent) -> None:
        """Tell of a change, from any thread."""
        if threading.get_ident() != self._thread:
            with suppress(trio.RunFinishedError):  # with it went all listeners
                self._token.run_sync_soon(self.publish, change, idempotent=True)
            return
        # What nobody listens to now is nobody's loss: who begins to listen later reads the list after that.
        if self.listeners:
            self._changes[change] = None
            self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            await trio.sleep(self._window)
            self._changed = trio.Event()
            changes, self._changes = self._changes, {}
            for change in changes:
                for key, notification in self.listeners.publish(change):
                    key.link.tell_change(notification, key.id)
