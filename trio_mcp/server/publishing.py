"""Publish changes to subscribers, in batches.

`core.subscriptions` decides which listener gets which change; this module decides when.  A change is published one
window after it happened, together with all other changes of that time.  The same change is published once, however
often it happened: the client reads the list again in any case, and its reading includes all earlier changes.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import NamedTuple, Protocol

import trio

from trio_mcp.core.messages import Id, Limits, Notification
from trio_mcp.core.subscriptions import ChangeEvent, Listeners

__all__ = ["ListenerKey", "ListeningConnection", "Publisher"]


class ListeningConnection(Protocol):
    """A connection with listeners."""

    def tell_change(self, notification: Notification, about: Id | None) -> None:
        """Send the notification for the listen request `about`, or for the session if it is None."""


class ListenerKey(NamedTuple):
    """A listener: a listen request on a connection, or (with id None) the legacy session of the connection."""

    link: ListeningConnection
    id: Id | None


class Publisher:
    """All listeners of one running server, and the changes that are not published yet."""

    def __init__(self, limits: Limits, window: float) -> None:
        self.listeners: Listeners[ListenerKey] = Listeners(limits)
        self._window = window
        self._changes: dict[ChangeEvent, None] = {}
        self._changed = trio.Event()
        self._thread = threading.get_ident()
        self._token = trio.lowlevel.current_trio_token()

    def publish(self, change: ChangeEvent) -> None:
        """Queue a change; from any thread."""
        if threading.get_ident() != self._thread:
            with suppress(trio.RunFinishedError):  # all listeners have ended with the run
                self._token.run_sync_soon(self.publish, change, idempotent=True)
            return
        # Without listeners a change is dropped: a client that subscribes later reads the list after that.
        if self.listeners:
            self._changes[change] = None
            self._changed.set()

    async def run(self) -> None:
        """Publish queued changes, until it is cancelled."""
        while True:
            await self._changed.wait()
            await trio.sleep(self._window)
            self._changed = trio.Event()
            changes, self._changes = self._changes, {}
            for change in changes:
                for key, notification in self.listeners.publish(change):
                    key.link.tell_change(notification, key.id)
