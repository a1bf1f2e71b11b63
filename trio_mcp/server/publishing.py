"""Publish changes to subscribers, in batches.

`core.subscriptions` decides which listener gets which change; this module decides when.  A change is published one
window after it happened, together with all other changes of that time.  The same change is published once, however
often it happened: the client reads the list again in any case, and its reading includes all earlier changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import trio

from trio_mcp.core.messages import Id, Limits, Notification
from trio_mcp.core.subscriptions import ChangeEvent, Listeners
from trio_mcp.server.registry import Catalog

__all__ = ["ListenerKey", "ListeningConnection", "Publisher", "Watcher"]

_BURST = 8  # notifications until other tasks have a turn: thousands of clients may listen


class ListeningConnection(Protocol):
    """A connection with listeners."""

    def tell_change(self, notification: Notification, about: Id | None) -> None:
        """Send the notification for the listen request `about`, if it is still open, or for the session if None."""


class ListenerKey(NamedTuple):
    """A listener: a listen request on a connection, or (with id None) the legacy session of the connection."""

    link: ListeningConnection
    id: Id | None


class Watcher(Protocol):
    """A server with entries of another server, where it must subscribe to the changes that its clients ask for."""

    def listeners(self, limits: Limits, catalog: Catalog, watchers: Sequence[Any]) -> Listeners[ListenerKey]:
        """Make the listeners of a run, which report their subscriptions to all watchers of the run."""


class Publisher:
    """All listeners of one running server, and the changes that are not published yet."""

    def __init__(self, limits: Limits, window: float, listeners: Listeners[ListenerKey] | None = None) -> None:
        self.listeners: Listeners[ListenerKey] = Listeners(limits) if listeners is None else listeners
        self._window = window
        self._changes: dict[tuple[ChangeEvent, Callable[[Any], bool] | None], None] = {}
        self._changed = trio.Event()
        self._thread = threading.get_ident()
        self._token = trio.lowlevel.current_trio_token()

    def publish(self, change: ChangeEvent, reaches: Callable[[Any], bool] | None = None) -> None:
        """Queue a change; from any thread.  It goes to the connections for which `reaches` returns True."""
        if threading.get_ident() != self._thread:
            with suppress(trio.RunFinishedError):  # all listeners have ended with the run
                self._token.run_sync_soon(self.publish, change, reaches, idempotent=True)
            return
        # Without listeners a change is dropped: a client that subscribes later reads the list after that.
        if self.listeners:
            self._changes[change, reaches] = None
            self._changed.set()

    async def run(self) -> None:
        """Publish queued changes, until it is cancelled."""
        while True:
            await self._changed.wait()
            await trio.sleep(self._window)
            self._changed = trio.Event()
            changes, self._changes = self._changes, {}
            for change, reaches in changes:
                for count, (key, notification) in enumerate(self.listeners.publish(change)):
                    if reaches is None or reaches(key.link):
                        key.link.tell_change(notification, key.id)
                    if count % _BURST == _BURST - 1:
                        await trio.lowlevel.checkpoint()
