"""Subscriptions: which listener gets which change, in both eras.

A `ChangeEvent` is a change that a filter can name: a list of the server has changed, or one resource has.  The same
value is requested, agreed to, published and received.  The eras differ only in how a client subscribes:

- modern: a `subscriptions/listen` request carries a filter.  The server acknowledges the part of it that it supports,
  and each later notification carries the id of the request.  The subscription ends when the server answers the request,
  the client cancels it, or the stream is lost.
- legacy: a session gets the changes of every list that the server declares, and the updates of the resources that it
  named with `resources/subscribe`.

`Listeners` is the server's side: one registry for all connections.  It is an index from changes to listeners, so the
cost of a change does not depend on the listeners that did not request it.  It keeps nothing for a listener that has
lost its connection (sub-10).  The client's side is in `client_subscriptions`.

Resources are identified by their URIs, which are compared as strings.  A listener gets no updates of sub-resources:
whether one URI is below another depends on the scheme.  A server that knows its URIs publishes a change of the upper
resource too.

The caller decides when to publish and whether to merge the changes of a burst, because that takes a clock.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import attrs

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_PARAMS, RequestError, UsageError, shown
from trio_mcp.core.messages import ABSENT, Id, Json, JsonObject, Limits, Notification, Request, Response
from trio_mcp.core.revisions import LATEST, META_SUBSCRIPTION_ID, Role, declares
from trio_mcp.core.shares import Account, Shares

__all__ = [
    "ACKNOWLEDGED", "PROMPTS_CHANGED", "RESOURCES_CHANGED", "TOOLS_CHANGED", "ChangeEvent", "ChangeKind", "Listeners",
    "change_of", "filter_items", "listen_params", "resource_updated",
]  # fmt: skip

ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
_ENTRY_BYTES = 512  # memory that one item takes in the index, without its name


class ChangeKind(enum.Enum):
    """The kinds of changes: the field in a filter, the notification, and the param that names the changed item.

    A filter requests a kind without that param by true, and a kind with it by a list of names.
    """

    TOOLS = "toolsListChanged", "notifications/tools/list_changed", ""
    PROMPTS = "promptsListChanged", "notifications/prompts/list_changed", ""
    RESOURCES = "resourcesListChanged", "notifications/resources/list_changed", ""
    RESOURCE = "resourceSubscriptions", "notifications/resources/updated", "uri"

    def __init__(self, field: str, method: str, item: str) -> None:
        self.field = field
        self.method = method
        self.item = item

    def declared_in(self, capabilities: Mapping[str, Any]) -> bool:
        """Whether a server with these capabilities announces changes of this kind.  Both eras have the same rule."""
        row = LATEST.notification(Role.SERVER, self.method)
        return row is not None and declares(capabilities, row.needs)


@attrs.frozen(repr=False)
class ChangeEvent:
    """A change of a list, or of the one item that `item` names."""

    kind: ChangeKind
    item: str = ""

    def __repr__(self) -> str:
        return f"Change({self.kind.name}, {shown(self.item)})" if self.item else f"Change({self.kind.name})"

    def notification(self, id: Id | None = None) -> Notification:
        """The notification of this change for the subscription `id`; in the legacy era `id` is None."""
        params: JsonObject = {} if id is None else {"_meta": {META_SUBSCRIPTION_ID: id}}
        if self.kind.item:
            params[self.kind.item] = self.item
        return Notification(self.kind.method, params)


TOOLS_CHANGED = ChangeEvent(ChangeKind.TOOLS)
PROMPTS_CHANGED = ChangeEvent(ChangeKind.PROMPTS)
RESOURCES_CHANGED = ChangeEvent(ChangeKind.RESOURCES)

_KINDS = {kind.method: kind for kind in ChangeKind}


def resource_updated(uri: str) -> ChangeEvent:
    """The change of one resource."""
    return ChangeEvent(ChangeKind.RESOURCE, uri)


def change_of(notification: Notification) -> ChangeEvent | None:
    """The change that a notification announces, or None if it is another notification."""
    kind = _KINDS.get(notification.method)
    if kind is None:
        return None
    item = notification.params.get(kind.item) if kind.item else ""
    return ChangeEvent(kind, item) if isinstance(item, str) else None


# Filters, in their JSON form.


def listen_params(asked: Iterable[ChangeEvent]) -> JsonObject:
    """The params of a `subscriptions/listen` request for these changes."""
    return {"notifications": _to_filter(asked)}


def _to_filter(changes: Iterable[ChangeEvent]) -> JsonObject:
    filter: JsonObject = {}
    for change in changes:
        if change.kind.item:
            filter.setdefault(change.kind.field, []).append(change.item)
        else:
            filter[change.kind.field] = True
    return filter


def filter_items(filter: Json) -> dict[ChangeKind, Collection[str]]:
    """Read a filter: the requested items of each kind, without duplicates.

    Returns strings and no `ChangeEvent` objects, because there can be 200,000 of them.  Unknown fields are ignored.
    Raises RequestError if a known field is invalid.
    """
    if not isinstance(filter, dict):
        raise _malformed("notifications", "an object", filter)
    items: dict[ChangeKind, Collection[str]] = {}
    for kind in ChangeKind:
        asked = filter.get(kind.field, ABSENT)
        if asked is ABSENT:
            continue  # sub-14: "Omitting a field is equivalent to not subscribing"
        if kind.item:
            if not isinstance(asked, list) or not all(isinstance(item, str) for item in asked):
                raise _malformed(f"notifications.{kind.field}", "an array of strings", asked)
            items[kind] = dict.fromkeys(asked)
        elif not isinstance(asked, bool):
            raise _malformed(f"notifications.{kind.field}", "a boolean", asked)
        elif asked:
            items[kind] = ("",)
    return items


def _malformed(name: str, expected: str, got: Json) -> RequestError:
    return RequestError(INVALID_PARAMS, f"{name} must be {expected}; got {type(got).__name__}")


# The server's side.

K = TypeVar("K", bound=Hashable)


@attrs.define(eq=False, repr=False)
class _ListenRequest:
    id: Id | None  # of its listen request; None for a legacy session
    changes: tuple[ChangeEvent, ...]  # a tuple is small, and ten thousand idle listeners have one each
    account: Account | None
    slots: int  # taken slots; a legacy session has none until it subscribes to a resource


class Listeners(Generic[K]):
    """The registry of listeners, and an index from changes to listeners.

    A key identifies a listener: a listen request on a connection, or a legacy session.  The caller chooses the keys,
    and `publish` returns them with the notifications.  Methods that end a listener accept an unknown key: both sides
    can end it at the same time.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits if limits is not None else Limits()
        self._listeners: dict[K, _ListenRequest] = {}
        self._by_change: dict[ChangeEvent, dict[K, Id | None]] = {}
        self._slots = Shares(self._limits.subscriptions)  # one for each listener and for each of its changes

    def __len__(self) -> int:
        return len(self._listeners)

    def __contains__(self, key: K) -> bool:
        return key in self._listeners

    @property
    def changes(self) -> tuple[ChangeEvent, ...]:
        """All changes that have a listener."""
        return tuple(self._by_change)

    def changes_of(self, key: K) -> tuple[ChangeEvent, ...]:
        """The changes of one listener."""
        listener = self._listeners.get(key)
        return () if listener is None else listener.changes

    # Modern.

    def listen(
        self, key: K, request: Request, declared: Mapping[str, Any], account: Account | None = None
    ) -> Notification:
        """Serve a `subscriptions/listen` request.  Returns the acknowledgement; send it before any notification.

        `declared` are the server's capabilities under the terms of the request; changes that it does not declare are
        left out (sub-11).  The memory for the listener is charged to `account`.  Raises RequestError if the filter is
        malformed or a limit is reached; the listener is not added then.
        """
        asked = filter_items(request.params.get("notifications", ABSENT))
        items = {kind: each for kind, each in asked.items() if kind.declared_in(declared)}
        self._check_number(sum(map(len, items.values())))
        agreed = tuple(ChangeEvent(kind, item) for kind, each in items.items() for item in each)
        self._reserve(len(agreed), agreed, account, 1)
        self._add(key, request.id, agreed, account, 1 + len(agreed))
        meta = {META_SUBSCRIPTION_ID: request.id}
        return Notification(ACKNOWLEDGED, {"_meta": meta, "notifications": _to_filter(agreed)})

    def close(self, key: K) -> Response | None:
        """End a listener for the server.  Returns the answer to its listen request, which must be sent (sub-08).

        Returns None for a legacy session, and for a listener that has already ended.
        """
        listener = self._listeners.get(key)
        self.forget(key)
        if listener is None or listener.id is None:
            return None
        return Response(listener.id, {"resultType": "complete", "_meta": {META_SUBSCRIPTION_ID: listener.id}})

    # Legacy.

    def add_session(self, key: K, declared: Mapping[str, Any], account: Account | None = None) -> None:
        """Add an initialized legacy session.  It gets the changes of every list for which the server declares them."""
        lists = tuple(ChangeEvent(kind) for kind in ChangeKind if not kind.item and kind.declared_in(declared))
        self._add(key, None, lists, account, 0)

    def subscribe(self, key: K, params: JsonObject) -> JsonObject:
        """Serve a `resources/subscribe` request of a session.  Returns its result.

        The caller has checked that the server has the capability, as for every request.  Raises RequestError if the
        params are malformed or a limit is reached.
        """
        session, change = self._session(key), _resource_in(params)
        if key not in self._by_change.get(change, ()):
            extra = 0 if session.slots else 1
            self._reserve(len(session.changes) + 1, (change,), session.account, extra)
            session.changes += (change,)
            session.slots += 1 + extra
            self._index(key, None, change)
        return {}

    def unsubscribe(self, key: K, params: JsonObject) -> JsonObject:
        """Serve a `resources/unsubscribe` request; "unsubscribing an unknown URI does no harm"."""
        session, change = self._session(key), _resource_in(params)
        if key in self._by_change.get(change, ()):
            session.changes = tuple(each for each in session.changes if each != change)
            session.slots -= 1
            self._unindex(key, change)
            self._release(session.account, 1, (change,))
        return {}

    # Both.

    def forget(self, key: K) -> bool:
        """Remove a listener that was cancelled or disconnected, or whose session has ended.  False if it is unknown."""
        listener = self._listeners.pop(key, None)
        if listener is None:
            return False
        for change in listener.changes:
            self._unindex(key, change)
        if listener.slots:
            self._release(listener.account, listener.slots, listener.changes)
        return True

    def publish(self, change: ChangeEvent) -> list[tuple[K, Notification]]:
        """Return the listeners of this change, oldest first, each with the notification to send to it."""
        listeners = self._by_change.get(change)
        if listeners is None:
            return []
        untagged = change.notification()
        return [(key, untagged if id is None else change.notification(id)) for key, id in listeners.items()]

    # Limits, and the index.

    def _reserve(self, total: int, changes: tuple[ChangeEvent, ...], account: Account | None, extra: int) -> None:
        """Take a slot for each of `changes`, and `extra` slots, or raise RequestError.

        `total` is the number of changes that the listener then has.
        """
        limits, longest = self._limits, max((len(change.item) for change in changes), default=0)
        self._check_number(total)
        if longest > limits.uri_length:
            raise RequestError(INVALID_PARAMS, f"a URI may have {limits.uri_length} characters; one has {longest}")
        holder, slots, full = None if account is None else account.holder, len(changes) + extra, "subscriptions"
        if self._slots.take(holder, slots):
            limit = None if account is None else account.take(sum(map(_charge, changes)))
            if limit is None:
                return
            self._slots.give(holder, slots)
            full = limit
        raise RequestError(
            INTERNAL_ERROR, f"this server has no room for more subscriptions (Limits.{full}); try again later"
        )

    def _check_number(self, total: int) -> None:
        if total > self._limits.listener_changes:
            why = f"one listener may ask for {self._limits.listener_changes} changes; these would be {total}"
            raise RequestError(INVALID_PARAMS, why)

    def _release(self, account: Account | None, slots: int, changes: tuple[ChangeEvent, ...]) -> None:
        self._slots.give(None if account is None else account.holder, slots)
        if account is not None:
            account.give(sum(map(_charge, changes)))

    def _add(
        self, key: K, id: Id | None, changes: tuple[ChangeEvent, ...], account: Account | None, slots: int
    ) -> None:
        if key in self._listeners:
            raise UsageError(f"{key!r} listens already; forget it first, or choose another key")
        self._listeners[key] = _ListenRequest(id, changes, account, slots)
        for change in changes:
            self._index(key, id, change)

    def _index(self, key: K, id: Id | None, change: ChangeEvent) -> None:
        self._by_change.setdefault(change, {})[key] = id

    def _unindex(self, key: K, change: ChangeEvent) -> None:
        listeners = self._by_change[change]
        del listeners[key]
        if not listeners:
            del self._by_change[change]

    def _session(self, key: K) -> _ListenRequest:
        session = self._listeners.get(key)
        if session is None or session.id is not None:
            raise UsageError(f"{key!r} is not a legacy session; add it with add_session first")
        return session


def _charge(change: ChangeEvent) -> int:
    """The bytes to charge for a change of one item; changes of lists are free, as there are only three of them."""
    return _ENTRY_BYTES + len(change.item) if change.item else 0


def _resource_in(params: JsonObject) -> ChangeEvent:
    uri = params.get("uri", ABSENT)
    if not isinstance(uri, str):
        raise _malformed("uri", "a string", uri)
    return resource_updated(uri)
