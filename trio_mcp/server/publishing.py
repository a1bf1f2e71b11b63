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
from trio_mcp.core.subscriptions import ChangeEvent, ChangeKind, Listeners
from trio_mcp.server.registry import Catalog

__all__ = ["ListenerKey", "ListeningConnection", "Publisher", "WatchedListeners", "Watcher"]

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

    def listen(self, link: Any, change: ChangeEvent, *, announced: bool = False) -> None:
        """A client has subscribed to this change.  `announced`: its subscription is acknowledged already."""

    def stop_listening(self, link: Any, change: ChangeEvent) -> None:
        """A client has ended its subscription to this change."""

    def client_disconnected(self, link: object) -> None:
        """This connection or session has ended."""


class WatchedListeners(Listeners[ListenerKey]):
    """Listeners whose subscriptions are reported to watchers, except those to resources of our own."""

    def __init__(self, limits: Limits, catalog: Catalog, watchers: Sequence[Watcher]) -> None:
        super().__init__(limits)
        self._catalog = catalog
        self._watchers = watchers

    def forget(self, key: ListenerKey) -> bool:
        known = super().forget(key)
        for watcher in self._watchers if key.id is None else ():
            watcher.client_disconnected(key.link)
        return known

    def _index(self, key: ListenerKey, id: Id | None, change: ChangeEvent) -> None:
        super()._index(key, id, change)
        for watcher in self._concerned(id, change):
            # A listen request, which has an id, is acknowledged at once.
            watcher.listen(key.link, change, announced=id is not None)

    def _unindex(self, key: ListenerKey, change: ChangeEvent) -> None:
        super()._unindex(key, change)
        for watcher in self._concerned(key.id, change):
            watcher.stop_listening(key.link, change)

    def _concerned(self, id: Id | None, change: ChangeEvent) -> Sequence[Watcher]:
        if change.kind is ChangeKind.RESOURCE:
            return self._watchers if self._catalog.find_resource(change.item) is None else ()
        return () if id is None else self._watchers  # a legacy session gets changes of lists without asking


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
