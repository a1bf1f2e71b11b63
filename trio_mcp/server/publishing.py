"""Subscribers: who is notified of changes, and when.  Changes are published in batches.

`core.subscriptions` decides which listener gets which change; this module decides when.  A change is published one
window after it happened, together with all other changes of that time.  The same change is published once, however
often it happened: the client reads the list again in any case, and its reading includes all earlier changes.

A run loads this module when a client subscribes, or when a change happens while a client is connected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import trio

from trio_mcp.core.messages import Id, Json, JsonObject, Limits, Request
from trio_mcp.core.subscriptions import ChangeEvent, ChangeKind, Listeners
from trio_mcp.server.registry import Catalog

if TYPE_CHECKING:
    from trio_mcp.server.context import Context
    from trio_mcp.server.session import ServerSession

__all__ = ["ListenerKey", "Publisher", "Watcher"]

_BURST = 8  # notifications until other tasks have a turn: thousands of clients may listen


class ListenerKey(NamedTuple):
    """A listener: a listen request on a connection, or (with id None) the legacy session of the connection."""

    link: ServerSession
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

    # Listeners.

    def add_session(self, session: ServerSession, declared: Mapping[str, Any]) -> None:
        self.listeners.add_session(ListenerKey(session, None), declared, session.account)

    def subscribe(self, session: ServerSession, request: Request) -> JsonObject:
        """Serve a legacy request to subscribe or unsubscribe.  A client that has closed its side is no listener."""
        key, listeners = ListenerKey(session, None), self.listeners
        serve = listeners.subscribe if request.method == "resources/subscribe" else listeners.unsubscribe
        return serve(key, request.params) if key in listeners else {}

    def listen(
        self,
        session: ServerSession,
        ctx: Context,
        may_subscribe: Callable[[Context, str], bool],
        agreed: Mapping[str, Json],
    ) -> bool:
        """Start the subscription of a listen request.  False if its acknowledgement cannot reach the client.

        Resources that this principal may not see are left out of it.  `agreed` is what extensions add to it.
        """
        request, id = ctx.request, ctx.request.id
        asked = request.params.get("notifications")
        uris = asked.get(ChangeKind.RESOURCE.field) if isinstance(asked, dict) else None
        if isinstance(asked, dict) and isinstance(uris, list) and all(isinstance(uri, str) for uri in uris):
            uris = list(dict.fromkeys(uris))
            # Too many are refused below, without a million calls of the filter.
            if len(uris) <= session.session.limits.listener_changes:
                visible = [uri for uri in uris if may_subscribe(ctx, uri)]
                filter = {**asked, ChangeKind.RESOURCE.field: visible}
                request = Request(id, request.method, {**request.params, "notifications": filter})
        declared = session.session.declared(ctx._terms.revision)
        acknowledged = self.listeners.listen(ListenerKey(session, id), request, declared, session.account)
        params = acknowledged.params
        if agreed:
            params = {**params, "notifications": {**params["notifications"], **agreed}}
        if session.session.notify(acknowledged.method, params, about=id):
            return True
        self.forget(session, id)
        return False

    def close(self, session: ServerSession, id: Id) -> JsonObject:
        """End the subscription of an open listen request, and return the result of the request (sub-08)."""
        response = self.listeners.close(ListenerKey(session, id))
        assert response is not None
        return response.result

    def forget(self, session: ServerSession, id: Id | None = None) -> None:
        self.listeners.forget(ListenerKey(session, id))

    # Changes.

    def publish(self, change: ChangeEvent, reaches: Callable[[Any], bool] | None = None) -> None:
        """Queue a change.  It goes to the connections for which `reaches` returns True."""
        # Without listeners a change is dropped: a client that subscribes later reads the list after that.
        if self.listeners:
            self._changes[change, reaches] = None
            self._changed.set()

    def publish_all(self) -> None:
        """Queue all changes that have a listener: notices were lost, so each of them may have happened."""
        for change in self.listeners.changes:
            self.publish(change)

    def tell(self, session: ServerSession, among: Collection[ChangeEvent] | None = None) -> None:
        """Tell a legacy session of all changes that it listens to; of these, if given."""
        for change in self.listeners.changes_of(ListenerKey(session, None)):
            if among is None or change in among:
                session.tell_change(change.notification(), None)

    def queued(self, session: ServerSession) -> set[ChangeEvent]:
        """The changes that are not published yet, and may reach this session."""
        return {change for change, reaches in self._changes if reaches is None or reaches(session)}

    async def run(self) -> None:
        """Publish queued changes, until it is cancelled."""
        while True:
            await self._changed.wait()
            await trio.sleep(self._window)
            self._changed = trio.Event()
            for change, reaches in tuple(self._changes):
                del self._changes[change, reaches]
                for count, (key, notification) in enumerate(self.listeners.publish(change)):
                    if reaches is None or reaches(key.link):
                        key.link.tell_change(notification, key.id)
                    if count % _BURST == _BURST - 1:
                        await trio.lowlevel.checkpoint()
