"""The client's side of subscriptions: which of them a notification is for, and how each of them ends.

A server does not load this module; the changes, the filters and the server's side are in `subscriptions`.  A client
accepts updates of resources that it did not name, because the specification lets a server send them for sub-resources.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from trio_mcp.core.errors import RequestError, UsageError
from trio_mcp.core.messages import ABSENT, Id, Json, Notification, record
from trio_mcp.core.requests import (
    Answered,
    ConnectionLost,
    InvalidAnswer,
    Outcome,
    Refused,
    SubscriptionEnded,
    TimedOut,
)
from trio_mcp.core.revisions import META_SUBSCRIPTION_ID
from trio_mcp.core.subscriptions import ACKNOWLEDGED, ChangeEvent, ChangeKind, change_of, filter_items

__all__ = ["ChangeReceived", "OpenSubscription", "SubscriptionAcknowledged", "SubscriptionState", "Subscriptions"]


class SubscriptionState(enum.Enum):
    """The states of a client's subscription, in their usual order."""

    ASKED = enum.auto()  # the request was sent
    OPEN = enum.auto()  # the server has acknowledged it
    ENDED = enum.auto()  # by the client, or by the server: with its result, or by notifications/cancelled
    REFUSED = enum.auto()  # with an error: the same request would be refused again
    BROKEN = enum.auto()  # sub-09: the stream or connection was lost; the client may subscribe again


# On stdio both a result and a cancellation can end a subscription.  The first one counts; the other comes too late.
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
    """One subscription of the client.  `agreed` is None until the server acknowledges it."""

    id: Id
    asked: tuple[ChangeEvent, ...]
    agreed: tuple[ChangeEvent, ...] | None = None
    state: SubscriptionState = SubscriptionState.ASKED
    attached: bool = False  # of the legacy era: there is no listen request
    undeclared: bool = False  # the server may announce changes that it has not agreed to

    @property
    def missing(self) -> tuple[ChangeEvent, ...]:
        """sub-04: the requested changes that the server did not agree to; empty before the acknowledgement."""
        if self.agreed is None:
            return ()
        agreed = frozenset(self.agreed)
        return tuple(change for change in self.asked if change not in agreed)

    @property
    def expected(self) -> tuple[ChangeEvent, ...]:
        """The changes that the server may announce."""
        return self.asked if self.undeclared else self.agreed or ()

    def accepts(self, change: ChangeEvent) -> bool:
        """Whether the client asked for changes of this kind; a requested resource includes its sub-resources."""
        return any(change.kind is each.kind for each in self.asked)


@record
class SubscriptionAcknowledged:
    """The server has agreed to a subscription, or to a part of it; see `subscription.missing`."""

    subscription: OpenSubscription


@record
class ChangeReceived:
    """A change, received for one subscription."""

    subscription: OpenSubscription
    change: ChangeEvent


class Subscriptions:
    """The client's subscriptions on one connection, by the ids of their listen requests (sub-07: any number at once).

    The legacy era has no listen request: `attach` makes a subscription under a name that the caller chooses.  When
    `uris` has changed, the caller sends the `resources/subscribe` and `resources/unsubscribe` requests.
    """

    def __init__(self) -> None:
        self._open: dict[Id, OpenSubscription] = {}

    def ask(self, id: Id, asked: Iterable[ChangeEvent], *, undeclared: bool = False) -> OpenSubscription:
        """Add a subscription for a listen request with this id and `listen_params(asked)`."""
        if id in self._open:
            raise UsageError(f"a subscription with the id {id!r} already exists")
        subscription = self._open[id] = OpenSubscription(id, tuple(dict.fromkeys(asked)), undeclared=undeclared)
        return subscription

    def attach(
        self, name: Id, asked: Iterable[ChangeEvent], declared: Mapping[str, Any], *, undeclared: bool = False
    ) -> OpenSubscription:
        """Add a subscription in the legacy era: the server agrees to the changes that it has declared."""
        subscription = self.ask(name, asked, undeclared=undeclared)
        subscription.agreed = tuple(change for change in subscription.asked if change.kind.declared_in(declared))
        subscription.state, subscription.attached = SubscriptionState.OPEN, True
        return subscription

    @property
    def uris(self) -> frozenset[str]:
        """The resources that need `resources/subscribe` for the subscriptions of the legacy era."""
        changes = [change for each in self._attached() for change in each.expected]
        return frozenset(change.item for change in changes if change.kind is ChangeKind.RESOURCE)

    def _attached(self) -> list[OpenSubscription]:
        return [each for each in self._open.values() if each.attached]

    def receive(self, notification: Notification) -> list[SubscriptionAcknowledged | ChangeReceived]:
        """Return the events of a notification, one for each of its subscriptions.

        Empty if there is no subscription for it: an unknown id, an ended subscription, or a change that was not
        requested.  A change before its acknowledgement is a mistake of the server, but is returned too.
        """
        meta = notification.params.get("_meta")
        id = meta.get(META_SUBSCRIPTION_ID, ABSENT) if isinstance(meta, dict) else ABSENT
        change = change_of(notification)
        if id is ABSENT:
            return [] if change is None else [ChangeReceived(each, change) for each in self._recipients(change)]
        # True and 1.0 are the same key as 1, but they are not ids.
        subscription = self._open.get(id) if type(id) is int or type(id) is str else None
        if subscription is None:
            return []
        if notification.method == ACKNOWLEDGED:
            return self._acknowledge(subscription, notification.params.get("notifications"))
        return [ChangeReceived(subscription, change)] if change is not None and subscription.accepts(change) else []

    def _recipients(self, change: ChangeEvent) -> list[OpenSubscription]:
        """The subscriptions that named the change; without one, all of its kind.

        The change is then of a sub-resource, and only the server knows the resource above it.
        """
        attached = self._attached()
        return [each for each in attached if change in each.asked] or [
            each for each in attached if each.accepts(change)
        ]

    def _acknowledge(
        self, subscription: OpenSubscription, filter: Json
    ) -> list[SubscriptionAcknowledged | ChangeReceived]:
        if subscription.state is not SubscriptionState.ASKED:
            return []
        try:
            agreed = filter_items(filter)
        except RequestError:
            agreed = {}  # an invalid filter agrees to no change
        subscription.agreed = tuple(each for each in subscription.asked if each.item in agreed.get(each.kind, ()))
        subscription.state = SubscriptionState.OPEN
        return [SubscriptionAcknowledged(subscription)]

    def close(self, id: Id) -> OpenSubscription | None:
        """End a subscription for the client; the caller cancels its request (sub-12).  None if it has already ended."""
        return self._end(id, SubscriptionState.ENDED)

    def finish(self, outcome: Outcome) -> OpenSubscription | None:
        """End the subscription of the request with this outcome, and set its `state`.

        Returns None if the outcome belongs to another request.
        """
        return self._end(outcome.id, _END[type(outcome)])

    def connection_lost(self) -> list[OpenSubscription]:
        """End and return all subscriptions; the client can subscribe again on the next connection (sub-10)."""
        broken = [self._end(id, SubscriptionState.BROKEN) for id in list(self._open)]
        return [each for each in broken if each is not None]

    def _end(self, id: Id, state: SubscriptionState) -> OpenSubscription | None:
        subscription = self._open.pop(id, None)
        if subscription is not None:
            subscription.state = state
        return subscription
