"""Subscriptions: who hears which change, in both eras.

A `ChangeEvent` is what a filter can ask for: a list of ours has changed, or one resource has.  The same value is
published, asked for, agreed to and heard.  What differs between the eras is only how interest is told:

- modern: a `subscriptions/listen` request brings a filter; what the server can keep of it is acknowledged, and each
  notification after that carries the id of the request.  It goes on until the server answers the request, the client
  cancels it, or the stream is lost.
- legacy: a session hears every list change that the server declares, and updates of what `resources/subscribe` names.

`Listeners` is the server's side: one registry for all its links, where a listener is whatever the caller can find the
way to it by.  It is an index from changes to hearers, so a change that nobody asked for costs nothing, however many
listen.  Nothing is kept for those who were cut off (sub-10).  `Subscriptions` is the client's side: one for each link.

A resource is known by its URI, compared as a string.  Updates of what lies below it are not sent: which URIs are below
which depends on the scheme.  A server that knows publishes the change of the upper one too.  A client, on the other
hand, takes updates it did not name, because the text lets a server send them for sub-resources.

When to publish, and whether to merge what comes in a burst, is the caller's business: it takes time.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import attrs

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_PARAMS, RequestError, UsageError, shown
from trio_mcp.core.jsonrpc import ABSENT, Id, Json, JsonObject, Limits, Notification, Request, Response
from trio_mcp.core.outcomes import (
    Answered,
    ConnectionLost,
    InvalidAnswer,
    Outcome,
    Refused,
    SubscriptionEnded,
    TimedOut,
)
from trio_mcp.core.records import record
from trio_mcp.core.revisions import LATEST, META_SUBSCRIPTION_ID, Role, declares
from trio_mcp.core.shares import Account, Shares

__all__ = [
    "ACKNOWLEDGED",
    "PROMPTS_CHANGED",
    "RESOURCES_CHANGED",
    "TOOLS_CHANGED",
    "ChangeEvent",
    "ChangeKind",
    "ChangeReceived",
    "Listeners",
    "OpenSubscription",
    "SubscriptionAcknowledged",
    "SubscriptionState",
    "Subscriptions",
    "change_of",
    "listen_params",
    "resource_updated",
]

ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
_KEPT = 512  # bytes that one thing takes in the index, beside its name


class ChangeKind(enum.Enum):
    """A row for each kind of change: its field in a filter, its notification, and the param that names the thing.

    A kind without such a param is asked for with true, one with it by a list of names.
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
        """Whether a server with these capabilities tells of such changes.  They stand on the same in both eras."""
        row = LATEST.notification(Role.SERVER, self.method)
        return row is not None and declares(capabilities, row.needs)


@attrs.frozen(repr=False)
class ChangeEvent:
    """Something that changed, or that somebody wants to hear of: a list, or the one thing named by `item`."""

    kind: ChangeKind
    item: str = ""

    def __repr__(self) -> str:
        return f"Change({self.kind.name}, {shown(self.item)})" if self.item else f"Change({self.kind.name})"

    def notification(self, id: Id | None = None) -> Notification:
        """The notification that tells of it, on the subscription with this id, or in the legacy era on none."""
        params: JsonObject = {} if id is None else {"_meta": {META_SUBSCRIPTION_ID: id}}
        if self.kind.item:
            params[self.kind.item] = self.item
        return Notification(self.kind.method, params)


TOOLS_CHANGED = ChangeEvent(ChangeKind.TOOLS)
PROMPTS_CHANGED = ChangeEvent(ChangeKind.PROMPTS)
RESOURCES_CHANGED = ChangeEvent(ChangeKind.RESOURCES)

_KINDS = {kind.method: kind for kind in ChangeKind}


def resource_updated(uri: str) -> ChangeEvent:
    return ChangeEvent(ChangeKind.RESOURCE, uri)


def change_of(notification: Notification) -> ChangeEvent | None:
    """The change that a notification tells of, if it does."""
    kind = _KINDS.get(notification.method)
    if kind is None:
        return None
    item = notification.params.get(kind.item) if kind.item else ""
    return ChangeEvent(kind, item) if isinstance(item, str) else None


# Filters, as they stand on the wire.


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


def _from_filter(filter: Json) -> dict[ChangeKind, Collection[str]]:
    """What a filter asks for: the items of each kind, each once.  Not as changes, for there may be 200,000 of them.

    Unknown fields are kinds we have not; raises RequestError for bad ones.
    """
    if not isinstance(filter, dict):
        raise _malformed("notifications", "an object", filter)
    asked_for: dict[ChangeKind, Collection[str]] = {}
    for kind in ChangeKind:
        asked = filter.get(kind.field, ABSENT)
        if asked is ABSENT:
            continue  # sub-14: "Omitting a field is equivalent to not subscribing"
        if kind.item:
            if not isinstance(asked, list) or not all(isinstance(item, str) for item in asked):
                raise _malformed(f"notifications.{kind.field}", "an array of strings", asked)
            asked_for[kind] = dict.fromkeys(asked)
        elif not isinstance(asked, bool):
            raise _malformed(f"notifications.{kind.field}", "a boolean", asked)
        elif asked:
            asked_for[kind] = ("",)
    return asked_for


def _malformed(name: str, expected: str, got: Json) -> RequestError:
    return RequestError(INVALID_PARAMS, f"{name} must be {expected}; got {type(got).__name__}")


# The server's side.

K = TypeVar("K", bound=Hashable)


@attrs.define(eq=False, repr=False)
class _ListenRequest:
    id: Id | None  # of its listen request; None for a legacy session
    changes: tuple[ChangeEvent, ...]  # a tuple, because ten thousand idle listeners hold one each
    account: Account | None
    places: int  # that it has taken: of a legacy session none, until it subscribes to a resource


class Listeners(Generic[K]):
    """Who hears which change.

    A key stands for a listener: a listen request on some link, or a legacy session.  The caller chooses it, and gets it
    back with each notification.  Keys that are not known (any more) are no error where something ends: the end may be
    seen from both sides at once.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits if limits is not None else Limits()
        self._listeners: dict[K, _ListenRequest] = {}
        self._hearers: dict[ChangeEvent, dict[K, Id | None]] = {}
        self._places = Shares(self._limits.subscriptions)  # listeners, and changes they wait for, taken together

    def __len__(self) -> int:
        return len(self._listeners)

    def __contains__(self, key: K) -> bool:
        return key in self._listeners

    # Modern.

    def listen(
        self, key: K, request: Request, declared: Mapping[str, Any], account: Account | None = None
    ) -> Notification:
        """Serve a `subscriptions/listen` request; returns the acknowledgement, to be sent before anything else.

        `declared` is what the server declares under the terms of the request; what it does not is left out (sub-11).
        What is kept for it is charged to `account`.  Raises RequestError for a malformed filter and beyond a limit;
        then nobody listens.
        """
        asked = _from_filter(request.params.get("notifications", ABSENT))
        items = {kind: each for kind, each in asked.items() if kind.declared_in(declared)}
        self._check_number(sum(map(len, items.values())))
        agreed = tuple(ChangeEvent(kind, item) for kind, each in items.items() for item in each)
        self._take_room(len(agreed), agreed, account, 1)
        self._add(key, request.id, agreed, account, 1 + len(agreed))
        meta = {META_SUBSCRIPTION_ID: request.id}
        return Notification(ACKNOWLEDGED, {"_meta": meta, "notifications": _to_filter(agreed)})

    def close(self, key: K) -> Response | None:
        """The server ends a listener.  The result is to be sent as the answer to its listen request (sub-08).

        None for a legacy session, and for a listener that has ended already.
        """
        listener = self._listeners.get(key)
        self.forget(key)
        if listener is None or listener.id is None:
            return None
        return Response(listener.id, {"resultType": "complete", "_meta": {META_SUBSCRIPTION_ID: listener.id}})

    def close_all(self) -> list[tuple[K, Response]]:
        """The server ends: every listener that is owed a result, with that result."""
        closed = [(key, self.close(key)) for key in list(self._listeners)]
        return [(key, result) for key, result in closed if result is not None]

    # Legacy.

    def add_session(self, key: K, declared: Mapping[str, Any], account: Account | None = None) -> None:
        """A legacy session that has been initialized.  It hears of every list that the server declares changes of."""
        lists = tuple(ChangeEvent(kind) for kind in ChangeKind if not kind.item and kind.declared_in(declared))
        self._add(key, None, lists, account, 0)

    def subscribe(self, key: K, params: JsonObject) -> JsonObject:
        """Serve a `resources/subscribe` request of a session; returns its result.

        Whether the server has the capability is checked before, as for every request.  Raises RequestError for
        malformed params and beyond a limit.
        """
        session, change = self._session(key), _resource_in(params)
        if key not in self._hearers.get(change, ()):
            more = 0 if session.places else 1
            self._take_room(len(session.changes) + 1, (change,), session.account, more)
            session.changes += (change,)
            session.places += 1 + more
            self._hear(key, None, change)
        return {}

    def unsubscribe(self, key: K, params: JsonObject) -> JsonObject:
        """Serve a `resources/unsubscribe` request; "unsubscribing an unknown URI does no harm"."""
        session, change = self._session(key), _resource_in(params)
        if key in self._hearers.get(change, ()):
            session.changes = tuple(each for each in session.changes if each != change)
            session.places -= 1
            self._unhear(key, change)
            self._give_room(session.account, 1, (change,))
        return {}

    # Both.

    def forget(self, key: K) -> bool:
        """A listener is gone: cancelled, disconnected, or its session ended.  False if it was not there."""
        listener = self._listeners.pop(key, None)
        if listener is None:
            return False
        for change in listener.changes:
            self._unhear(key, change)
        if listener.places:
            self._give_room(listener.account, listener.places, listener.changes)
        return True

    def publish(self, change: ChangeEvent) -> list[tuple[K, Notification]]:
        """Exactly those who asked to hear of this change, in the order they came, and what to send to each."""
        hearers = self._hearers.get(change)
        if hearers is None:
            return []
        untagged = change.notification()
        return [(key, untagged if id is None else change.notification(id)) for key, id in hearers.items()]

    # Within.

    def _take_room(self, own: int, changes: tuple[ChangeEvent, ...], account: Account | None, more: int) -> None:
        """Take places for so many `changes`, and `more`, of a listener that has `own` then; or raise RequestError."""
        limits, longest = self._limits, max((len(change.item) for change in changes), default=0)
        self._check_number(own)
        if longest > limits.uri_length:
            raise RequestError(INVALID_PARAMS, f"a URI may have {limits.uri_length} characters; one has {longest}")
        holder, places, full = None if account is None else account.holder, len(changes) + more, "subscriptions"
        if self._places.take(holder, places):
            limit = None if account is None else account.take(sum(map(_weight, changes)))
            if limit is None:
                return
            self._places.give(holder, places)
            full = limit
        raise RequestError(
            INTERNAL_ERROR, f"this server has no room for more subscriptions (Limits.{full}); try again later"
        )

    def _check_number(self, own: int) -> None:
        if own > self._limits.listener_changes:
            why = f"one listener may ask for {self._limits.listener_changes} changes; these would be {own}"
            raise RequestError(INVALID_PARAMS, why)

    def _give_room(self, account: Account | None, places: int, changes: tuple[ChangeEvent, ...]) -> None:
        self._places.give(None if account is None else account.holder, places)
        if account is not None:
            account.give(sum(map(_weight, changes)))

    def _add(
        self, key: K, id: Id | None, changes: tuple[ChangeEvent, ...], account: Account | None, places: int
    ) -> None:
        if key in self._listeners:
            raise UsageError(f"{key!r} listens already; forget it first, or choose another key")
        self._listeners[key] = _ListenRequest(id, changes, account, places)
        for change in changes:
            self._hear(key, id, change)

    def _hear(self, key: K, id: Id | None, change: ChangeEvent) -> None:
        self._hearers.setdefault(change, {})[key] = id

    def _unhear(self, key: K, change: ChangeEvent) -> None:
        hearers = self._hearers[change]
        del hearers[key]
        if not hearers:
            del self._hearers[change]

    def _session(self, key: K) -> _ListenRequest:
        session = self._listeners.get(key)
        if session is None or session.id is not None:
            raise UsageError(f"{key!r} is no legacy session here; add it with add_session first")
        return session


def _weight(change: ChangeEvent) -> int:
    """Bytes that a change of one thing is charged for; one of a list, of which there are three, costs nothing."""
    return _KEPT + len(change.item) if change.item else 0


def _resource_in(params: JsonObject) -> ChangeEvent:
    uri = params.get("uri", ABSENT)
    if not isinstance(uri, str):
        raise _malformed("uri", "a string", uri)
    return resource_updated(uri)


# The client's side.


class SubscriptionState(enum.Enum):
    ASKED = enum.auto()  # the request is out
    OPEN = enum.auto()  # it was acknowledged
    ENDED = enum.auto()  # by us, or by the server in good order: with its result, or by notifications/cancelled
    REFUSED = enum.auto()  # with an error: asking again the same way is no use
    BROKEN = enum.auto()  # sub-09: the stream or link is gone; it may be asked for again


# Of the result and the cancellation that end a subscription on stdio, either may come first; the other comes too late.
_END: Mapping[type[Outcome], SubscriptionState] = {
    Answered: SubscriptionState.ENDED,
    SubscriptionEnded: SubscriptionState.ENDED,
    Refused: SubscriptionState.REFUSED,
    InvalidAnswer: SubscriptionState.BROKEN,
    TimedOut: SubscriptionState.BROKEN,
    ConnectionLost: SubscriptionState.BROKEN,
}


@attrs.define(eq=False)
class OpenSubscription:
    """One subscription of ours.  `agreed` is None as long as it was not acknowledged."""

    id: Id
    asked: tuple[ChangeEvent, ...]
    agreed: tuple[ChangeEvent, ...] | None = None
    state: SubscriptionState = SubscriptionState.ASKED
    attached: bool = False  # of the legacy era, where no request stands for it
    undeclared: bool = False  # the server may tell of more than it has agreed to

    @property
    def missing(self) -> tuple[ChangeEvent, ...]:
        """sub-04: what we asked for and the server did not agree to; nothing before it has spoken."""
        if self.agreed is None:
            return ()
        agreed = frozenset(self.agreed)
        return tuple(change for change in self.asked if change not in agreed)

    @property
    def expected(self) -> tuple[ChangeEvent, ...]:
        """What the server may tell of."""
        return self.asked if self.undeclared else self.agreed or ()

    def may_hear(self, change: ChangeEvent) -> bool:
        """Whether we asked for changes of this kind; a named one may stand for what lies below it."""
        return any(change.kind is each.kind for each in self.asked)


@record
class SubscriptionAcknowledged:
    """The server has agreed to a subscription, or to a part of it; see `missing`."""

    subscription: OpenSubscription


@record
class ChangeReceived:
    """A change, heard by one subscription."""

    subscription: OpenSubscription
    change: ChangeEvent


class Subscriptions:
    """The subscriptions of ours on one link, by the ids of their listen requests (sub-07: any number at once).

    In the legacy era there is no such request: `attach` makes a subscription under a name that the caller chooses, and
    what is to be subscribed and unsubscribed on the wire is the change of `uris`.
    """

    def __init__(self) -> None:
        self._open: dict[Id, OpenSubscription] = {}

    def ask(self, id: Id, asked: Iterable[ChangeEvent], *, undeclared: bool = False) -> OpenSubscription:
        """A listen request with `listen_params(asked)` was made under this id."""
        return self._add(OpenSubscription(id, tuple(dict.fromkeys(asked)), undeclared=undeclared))

    def attach(
        self, name: Id, asked: Iterable[ChangeEvent], declared: Mapping[str, Any], *, undeclared: bool = False
    ) -> OpenSubscription:
        """A subscription in the legacy era: the server agrees to what it has declared."""
        asked = tuple(dict.fromkeys(asked))
        agreed = tuple(change for change in asked if change.kind.declared_in(declared))
        return self._add(OpenSubscription(name, asked, agreed, SubscriptionState.OPEN, True, undeclared))

    def _add(self, subscription: OpenSubscription) -> OpenSubscription:
        if subscription.id in self._open:
            raise UsageError(f"there is a subscription with the id {subscription.id!r} already")
        self._open[subscription.id] = subscription
        return subscription

    @property
    def uris(self) -> frozenset[str]:
        """What must be subscribed with `resources/subscribe` for the subscriptions of the legacy era."""
        changes = [change for each in self._attached() for change in each.expected]
        return frozenset(change.item for change in changes if change.kind is ChangeKind.RESOURCE)

    def _attached(self) -> list[OpenSubscription]:
        return [each for each in self._open.values() if each.attached]

    def receive(self, notification: Notification) -> list[SubscriptionAcknowledged | ChangeReceived]:
        """Who a notification is for.  Empty if it is for nobody here: not ours, ended, or never asked for.

        A change that comes before its acknowledgement is the server's mistake, but a change all the same.
        """
        meta = notification.params.get("_meta")
        id = meta.get(META_SUBSCRIPTION_ID, ABSENT) if isinstance(meta, dict) else ABSENT
        change = change_of(notification)
        if id is ABSENT:
            return [] if change is None else [ChangeReceived(each, change) for each in self._takers(change)]
        # True and 1.0 are the same key as 1, but no ids.
        subscription = self._open.get(id) if type(id) is int or type(id) is str else None
        if subscription is None:
            return []
        if notification.method == ACKNOWLEDGED:
            return self._acknowledge(subscription, notification.params.get("notifications"))
        return [ChangeReceived(subscription, change)] if change is not None and subscription.may_hear(change) else []

    def _takers(self, change: ChangeEvent) -> list[OpenSubscription]:
        """Those that named it; else it lies below something, and only the server knows what."""
        attached = self._attached()
        return [each for each in attached if change in each.asked] or [
            each for each in attached if each.may_hear(change)
        ]

    def _acknowledge(
        self, subscription: OpenSubscription, filter: Json
    ) -> list[SubscriptionAcknowledged | ChangeReceived]:
        if subscription.state is not SubscriptionState.ASKED:
            return []
        try:
            given = _from_filter(filter)
        except RequestError:
            given = {}  # what cannot be read is no promise
        subscription.agreed = tuple(each for each in subscription.asked if each.item in given.get(each.kind, ()))
        subscription.state = SubscriptionState.OPEN
        return [SubscriptionAcknowledged(subscription)]

    def close(self, id: Id) -> OpenSubscription | None:
        """We end a subscription; the caller cancels its request (sub-12).  None if it has ended already."""
        return self._end(id, SubscriptionState.ENDED)

    def over(self, outcome: Outcome) -> OpenSubscription | None:
        """A listen request has its outcome; `state` says what that means.  None if it was no subscription's."""
        return self._end(outcome.id, _END[type(outcome)])

    def connection_lost(self) -> list[OpenSubscription]:
        """The link is gone: every subscription that was still open, to be asked for again on the next (sub-10)."""
        broken = [self._end(id, SubscriptionState.BROKEN) for id in list(self._open)]
        return [each for each in broken if each is not None]

    def _end(self, id: Id, state: SubscriptionState) -> OpenSubscription | None:
        subscription = self._open.pop(id, None)
        if subscription is not None:
            subscription.state = state
        return subscription
