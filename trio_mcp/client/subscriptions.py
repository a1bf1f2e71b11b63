"""Subscriptions to changes of the server: the `listen` blocks of a client, in both eras and across sessions.

    async with manager.listen(tools=True, resources="notes://todo") as changes:
        async for change in changes:
            ...

A block is a `Subscription`; the `SubscriptionManager` of a client owns all of them.  Each block has an
`OpenSubscription` of its own as long as its session lives (sub-07).  The eras differ on the wire:

- modern: each block is one `subscriptions/listen` request.  Its acknowledgement opens the block, and cancelling the
  request ends the subscription.
- legacy: the server sends changes of its lists without a request, and changes of a resource between
  `resources/subscribe` and `resources/unsubscribe`, which are counted over all blocks.  Over HTTP all changes come on
  one stream: if it breaks, each block has a gap, and a server without this stream sends no changes.  Only one subscribe
  or unsubscribe of a URI is in flight at a time, because over HTTP a later one could overtake it; when it is answered,
  the next one is sent if it is still needed.

There are no background tasks.  Messages of the server come in through `receive`, and outcomes of requests through the
callbacks that were given with them.  Both do all their work at once, and requests are only queued.  So a block can be
left at any point without waiting, cancelled or not, and leaves no state behind.  Only a new attempt after a pause is
made by the task that waits in the block.

| The subscription ends because | The block |
|---|---|
| the server ends it normally | the iterator ends |
| the server refuses it | raises `RequestError`; `SubscriptionUnsupported` if the server does not know the request |
| the stream broke, the session lives | subscribes again after a pause; after the last attempt it raises |
| HTTP 401 or 403 | raises `Unauthorized` at once |
| the session is lost | subscribes on the next session; raises if there will be none |
| the client is closed | the iterator ends, or raises the error that closed the client |
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial

import trio

from trio_mcp.client.errors import Unauthorized, failure_of
from trio_mcp.client.options import copy_mapping
from trio_mcp.client.session import PAUSES, STABLE, ClientSession
from trio_mcp.core.client_subscriptions import (
    OpenSubscription,
    SubscriptionAcknowledged,
    Subscriptions,
    SubscriptionState,
)
from trio_mcp.core.errors import (
    METHOD_NOT_FOUND,
    McpError,
    RemoteProtocolError,
    SessionClosed,
    UsageError,
    repeated,
    shown,
)
from trio_mcp.core.messages import Id, Json, JsonObject, Limits
from trio_mcp.core.oauth.errors import is_final
from trio_mcp.core.requests import Answered, Outcome, Refused
from trio_mcp.core.revisions import NOTHING, Role
from trio_mcp.core.session import Notice
from trio_mcp.core.subscriptions import (
    ACKNOWLEDGED,
    PROMPTS_CHANGED,
    RESOURCES_CHANGED,
    TOOLS_CHANGED,
    ChangeEvent,
    ChangeKind,
    listen_params,
    resource_updated,
)

__all__ = ["Subscription", "SubscriptionManager", "SubscriptionUnsupported"]

_LISTEN, _SUBSCRIBE, _UNSUBSCRIBE = "subscriptions/listen", "resources/subscribe", "resources/unsubscribe"
_ABOUT_CHANGES = frozenset({ACKNOWLEDGED, *(kind.method for kind in ChangeKind)})


class SubscriptionUnsupported(McpError):
    """The server does not support any of the requested subscriptions, so a block would wait forever.

    `missing` are the requested changes.
    """

    def __init__(self, missing: tuple[ChangeEvent, ...], filters: Iterable[str] = ()) -> None:
        kinds = ", ".join(sorted({*filters, *(change.kind.field for change in missing)}))
        super().__init__(f"the server does not support these subscriptions ({kinds}); poll instead")
        self.missing = missing


class Subscription:
    """The changes of one `listen` block: an asynchronous iterator of `ChangeEvent`.  One task at a time may iterate.

    A change that happens twice before it is read is returned once, because one request for the new state shows both.
    After a gap (the stream or the session was lost) each subscribed change is returned once, because it may have been
    missed.  A subscription to a resource also returns changes of resources below its URI.

    The iterator ends when the server ends the subscription normally, and when the client is closed.  It raises:

    | Error | Reason |
    |---|---|
    | `RequestError` | the server refused the subscription after a gap |
    | `SubscriptionUnsupported` | the server no longer sends any of these changes |
    | `Unauthorized` | the server requires authentication, or refuses access |
    | `SessionClosed`, or the error that closed the client | the connection is lost |
    | `RemoteProtocolError` | an answer of the server is invalid |

    Changes received before are returned first.  Waiting may be cancelled, and no change is lost by that.
    """

    def __init__(
        self,
        asked: tuple[ChangeEvent, ...],
        manager: SubscriptionManager,
        limits: Limits,
        *,
        undeclared: bool = False,
        filters: Mapping[str, Json] = NOTHING,
    ) -> None:
        self.missing: tuple[ChangeEvent, ...] = ()
        """The requested changes that the server does not send.  They may differ after a gap."""
        self.agreed: Mapping[str, Json] = NOTHING
        """The members that extensions add to the filter, as far as the server confirmed them."""
        self._asked = dict.fromkeys(asked)
        self._filters = filters
        self._undeclared = undeclared  # also wait for changes that the server did not confirm
        self._manager = manager
        self._limits = limits
        self._unread: dict[ChangeEvent, None] = {}  # in order of arrival
        self._changed = trio.Event()
        self._subscription: OpenSubscription | None = None  # None if the session does not know it
        self._unconfirmed: set[str] = set()  # URIs whose `resources/subscribe` is not answered
        self._open = False  # the server has confirmed the subscription, which lives
        self._over = False  # with `_failure`, or else normally
        self._failure: McpError | None = None
        self._opened_at: float | None = None  # None: not yet
        self._breaks = 0  # in a row
        self._retry_at = math.inf  # time of the next attempt on this session
        self._being_read = False  # a task iterates

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> ChangeEvent:
        if self._being_read:
            raise UsageError("another task iterates over these changes; open a listen block in each task")
        self._being_read = True
        try:
            await trio.lowlevel.checkpoint()
            while not self._unread:
                if self._over and self._failure is None:
                    raise StopAsyncIteration
                await self._wait()
        finally:
            self._being_read = False
        change = next(iter(self._unread))
        del self._unread[change]
        return change

    async def _wait_until_open(self) -> None:
        """Wait until the server has confirmed the subscription."""
        while not (self._open or self._over):
            await self._wait()
        failure = self._failure
        if self._opened_at is None and failure is None and self._manager._ended is not None:
            failure = repeated(self._manager._ended)  # otherwise the server ended it normally
        if failure is not None:
            await trio.lowlevel.checkpoint_if_cancelled()  # the cancellation may be the reason why the client is closed
            raise failure

    async def _wait(self) -> None:
        """Wait until the state changes; at the time for a new attempt, subscribe again."""
        if self._failure is not None:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise self._failure
        with trio.CancelScope(deadline=self._retry_at):
            await self._changed.wait()
        if self._changed.is_set():
            self._changed = trio.Event()
        elif self._retry_at < math.inf:
            self._manager._subscribe(self)

    # Changes of state, called by the manager

    def _add(self, change: ChangeEvent) -> None:
        added = [change]
        # A server may send any number of URIs below the requested ones.  Above the limit, the requested changes are
        # added in their place.
        if change not in self._asked and (
            len(self._unread) >= self._limits.listener_changes or len(change.item) > self._limits.uri_length
        ):
            added = [each for each in self._asked if each.kind is change.kind]
        self._unread.update(dict.fromkeys(added))
        self._changed.set()

    def _agree(self, confirmed: Json) -> None:
        """Keep what the server confirmed of the members of extensions."""
        if isinstance(confirmed, dict):
            self.agreed = {name: confirmed[name] for name in self._filters if name in confirmed}

    def _begin(self, subscription: OpenSubscription) -> None:
        self._subscription, self._retry_at, self._open = subscription, math.inf, False

    def _confirm(self, uri: str | None = None) -> None:
        """Open the block when the server has confirmed the subscription, and in the legacy era each resource."""
        self._unconfirmed.discard(uri or "")
        if self._subscription is None or self._unconfirmed:
            return
        self.missing = self._subscription.missing
        self._open = True
        if self._opened_at is not None:
            self._mark_missed()
        self._opened_at = trio.current_time()
        self._changed.set()

    def _mark_missed(self) -> None:
        """Add all changes.  sub-10: the server keeps no changes for a client that is not connected, so any may be
        missed.
        """
        if self._open and self._subscription is not None:
            self._unread.update(dict.fromkeys(self._subscription.expected))
            self._changed.set()

    def _close(self, failure: McpError | None = None) -> None:
        """End the subscription; without `failure`, normally."""
        if not self._over:
            self._over, self._failure = True, failure
            self._changed.set()

    def _session_lost(self) -> None:
        """Wait for the next session."""
        self._subscription, self._open, self._retry_at, self._breaks = None, False, math.inf, 0

    def _stream_lost(self, failure: McpError, method: str) -> None:
        """Plan the next attempt on the same session."""
        if isinstance(failure, Unauthorized | UsageError) or is_final(failure):  # the program has to act
            self._close(failure)
            return
        now = trio.current_time()
        if self._open and self._opened_at is not None and now >= self._opened_at + STABLE:
            self._breaks = 0
        if self._breaks == len(PAUSES):
            error = failure
            if not isinstance(failure, RemoteProtocolError):  # which says which rule the server breaks at each attempt
                why = f"{method} ended without a result {len(PAUSES) + 1} times in a row"
                error = SessionClosed(f"{why}; last error: {failure}")
                error.__cause__ = failure
            self._close(error)
            return
        self._open = False
        self._retry_at = now + PAUSES[self._breaks]
        self._breaks += 1
        self._changed.set()


class SubscriptionManager:
    """All subscriptions of one client, across its sessions.

    There is a session between `attach` and `connection_lost`.  A session must be lost before the next is attached.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._caller: ClientSession | None = None
        self._ended: McpError | None = None  # the client is closed
        self._no_session: McpError | None = None  # set if no other session is expected
        self._blocks: dict[Subscription, None] = {}  # the open blocks, in order
        # State of the current session:
        self._subscriptions = Subscriptions()
        self._listeners: dict[Id, Subscription] = {}  # by id of their subscription
        # The resources that a legacy server knows of: whether it has answered, so that the next request may be sent.
        self._resources: dict[str, bool] = {}
        self._last_block_id = 0

    # Blocks

    def listen(
        self,
        *changes: ChangeEvent,
        tools: bool = False,
        prompts: bool = False,
        resources: bool | str | Iterable[str] = False,
        undeclared: bool = False,
        filters: Mapping[str, Json] | None = None,
    ) -> AbstractAsyncContextManager[Subscription]:
        """``async with manager.listen(...) as changes``: see `Client.listen`.

        If there is no session, entering waits for the next one; use a cancel scope to limit this.  The end of the block
        tells the server and does not wait.
        """
        limits = self._limits
        lists = ((TOOLS_CHANGED, tools), (PROMPTS_CHANGED, prompts), (RESOURCES_CHANGED, resources is True))
        uris = () if isinstance(resources, bool) else (resources,) if isinstance(resources, str) else resources
        asked = (*changes, *(each for each, wanted in lists if wanted), *map(resource_updated, uris))
        for change in asked:
            if not isinstance(change, ChangeEvent) or not isinstance(change.item, str):
                raise UsageError(f"expected a ChangeEvent, or the URI of a resource as a string; got {shown(change)}")
            if bool(change.item) is not bool(change.kind.item):
                expected = "needs a URI" if change.kind.item else "has no URI"
                raise UsageError(f"a ChangeEvent of ChangeKind.{change.kind.name} {expected}")
            if len(change.item) > limits.uri_length:
                raise UsageError(f"a URI has more than {limits.uri_length} characters (Limits.uri_length)")
        asked = tuple(dict.fromkeys(asked))
        filters = copy_mapping("filters", filters)
        if not asked and not filters:
            raise UsageError("listen needs at least one change: tools, prompts, resources or a ChangeEvent")
        if (most := limits.listener_changes) < len(asked):
            raise UsageError(f"a listen block may have {most} changes (Limits.listener_changes), got {len(asked)}")
        return self._block(Subscription(asked, self, limits, undeclared=undeclared, filters=filters))

    @asynccontextmanager
    async def _block(self, changes: Subscription) -> AsyncIterator[Subscription]:
        await trio.lowlevel.checkpoint()
        if self._ended is not None:
            raise repeated(self._ended)
        self._blocks[changes] = None
        try:
            self._subscribe(changes)
            await changes._wait_until_open()
            yield changes
        finally:
            del self._blocks[changes]
            self._unsubscribe(changes)
            changes._unread.clear()
            changes._close()

    # Called by the client

    def attach(self, caller: ClientSession) -> None:
        """Use a new session: subscribe each block on it (sub-10).  Does not wait."""
        self.connection_lost()
        self._caller = caller
        for changes in list(self._blocks):
            if changes._subscription is None and not changes._over:
                self._subscribe(changes)

    def receive(self, notice: Notice) -> bool:
        """Process a notification.  Returns False if no block waits for it."""
        notification = notice.notification
        if notification.method not in _ABOUT_CHANGES:
            return False
        events = self._subscriptions.receive(notification)
        for event in events:
            changes = self._listeners[event.subscription.id]
            if not isinstance(event, SubscriptionAcknowledged):
                changes._add(event.change)
                continue
            changes._agree(notification.params.get("notifications"))
            if event.subscription.expected or changes.agreed:
                changes._confirm()
            else:
                self._close_unsupported(changes)
        return bool(events)

    def missed(self, *, for_good: bool) -> None:
        """Process a gap: a legacy server sent notifications that were not received.

        `for_good`: no more of them will come in this session.
        """
        for changes in list(self._listeners.values()):
            if changes._subscription is not None and changes._subscription.attached:
                self._close_unsupported(changes) if for_good else changes._mark_missed()

    def connection_lost(self, failure: McpError | None = None) -> None:
        """The session is lost: each block waits for the next one.

        With `failure` no new session is expected: each block that waits raises it, until a session is attached after
        all.
        """
        self._caller, self._no_session = None, failure
        self._subscriptions.connection_lost()
        self._listeners.clear()
        self._resources.clear()
        for changes in self._blocks:
            changes._session_lost() if failure is None else changes._close(repeated(failure))

    def closed(self, failure: McpError | None = None) -> None:
        """The client is closed: every block ends, with this error if there is one."""
        if self._ended is None:
            self._ended = failure or SessionClosed("the client is closed")
            self.connection_lost()
            for changes in self._blocks:
                changes._close(None if failure is None else repeated(failure))

    # Internal

    def _uses(self, caller: ClientSession) -> bool:
        """Whether this is the present session.  If it is closed, `connection_lost` is about to be called."""
        return caller is self._caller and not caller.session.closed

    def _subscribe(self, changes: Subscription) -> None:
        """Subscribe a block, if there is a session; otherwise `attach` does it later."""
        caller = self._caller
        if caller is None or not self._uses(caller):
            changes._session_lost() if self._no_session is None else changes._close(repeated(self._no_session))
            return
        terms = caller.terms
        if terms.revision.request(Role.CLIENT, _LISTEN) is not None:
            on_end = partial(self._listen_ended, caller, changes)
            try:
                id: Id = caller.begin(_LISTEN, _listen_params(changes), on_end=on_end)
            except McpError as error:  # such as too many requests
                changes._close(error)
                return
            changes._begin(self._subscriptions.ask(id, changes._asked, undeclared=changes._undeclared))
            self._listeners[id] = changes
            caller.wake()
            return
        # A legacy server: subscribe to the changes that it has declared.
        self._last_block_id += 1
        id = f"block {self._last_block_id}"  # our requests have numbers as ids, so a string is unique
        capabilities = terms.capabilities
        subscription = self._subscriptions.attach(id, changes._asked, capabilities, undeclared=changes._undeclared)
        changes._begin(subscription)
        self._listeners[id] = changes
        if not subscription.expected or caller.notifications_lost:
            self._close_unsupported(changes)
            return
        uris = {each.item for each in subscription.expected if each.kind is ChangeKind.RESOURCE}
        changes._unconfirmed = {uri for uri in uris if not self._resources.get(uri)}
        if changes._unconfirmed:
            self._update_resources()
        else:
            changes._confirm()

    def _listen_ended(
        self, caller: ClientSession, changes: Subscription, outcome: Outcome, failure: McpError | None
    ) -> None:
        if not self._uses(caller) or (subscription := self._subscriptions.finish(outcome)) is None:
            return
        del self._listeners[subscription.id]
        changes._subscription = None  # the next session may reuse the id
        if subscription.state is SubscriptionState.ENDED:
            changes._close()
        elif isinstance(outcome, Refused) and outcome.error.code == METHOD_NOT_FOUND:
            # Servers whose lists never change do not implement the request: they send no changes.
            self._close_unsupported(changes, failure_of(outcome, failure))
        elif subscription.state is SubscriptionState.REFUSED:
            changes._close(failure_of(outcome, failure))
        else:
            changes._stream_lost(failure_of(outcome, failure), outcome.method)

    def _close_unsupported(self, changes: Subscription, cause: McpError | None = None) -> None:
        self._unsubscribe(changes)
        changes.missing = tuple(changes._asked)
        error = SubscriptionUnsupported(changes.missing, changes._filters)
        error.__cause__ = cause
        changes._close(error)

    def _unsubscribe(self, changes: Subscription) -> None:
        """End the subscription of a block, and tell the server."""
        subscription, changes._subscription = changes._subscription, None
        changes._unconfirmed.clear()
        if subscription is None or self._subscriptions.close(subscription.id) is None:
            return
        del self._listeners[subscription.id]
        if subscription.attached:
            self._update_resources()
        elif self._caller is not None:
            self._caller.cancel(subscription.id)  # sub-12

    def _update_resources(self) -> None:
        """Subscribe and unsubscribe resources at a legacy server until they are those that the blocks need.

        res-27: an unsubscribe is sent only after the answer to the subscribe, and a subscribe after that to the
        unsubscribe.
        """
        caller = self._caller
        if caller is None or not self._uses(caller):
            return
        wanted, failed = self._subscriptions.uris, []
        for uri in sorted(wanted - self._resources.keys()):  # sorted: every run sends the same
            try:  # a block may wait for undeclared changes
                on_end = partial(self._subscribe_answered, caller, uri)
                caller.begin(_SUBSCRIBE, {"uri": uri}, undeclared=True, on_end=on_end)
                self._resources[uri] = False
            except McpError as error:  # such as too many requests
                failed.append((uri, error))
        for uri in [each for each, answered in self._resources.items() if answered and each not in wanted]:
            with suppress(McpError):  # such as too many requests: tried again later
                on_end = partial(self._unsubscribe_answered, caller, uri)
                caller.begin(_UNSUBSCRIBE, {"uri": uri}, undeclared=True, on_end=on_end)
                self._resources[uri] = False
        caller.wake()
        for uri, failure in failed:
            for changes in self._waiting_for(uri):
                self._unsubscribe(changes)
                changes._close(failure)

    def _waiting_for(self, uri: str) -> list[Subscription]:
        return [each for each in self._blocks if uri in each._unconfirmed]

    def _subscribe_answered(self, caller: ClientSession, uri: str, outcome: Outcome, failure: McpError | None) -> None:
        if not self._uses(caller):
            return
        waiting, refused = self._waiting_for(uri), isinstance(outcome, Refused)
        unknown = isinstance(outcome, Refused) and outcome.error.code == METHOD_NOT_FOUND
        # Without an answer it may be subscribed nevertheless, so an unsubscribe is sent before the next subscribe.
        # If a block waits although the server does not know the request, that is not sent again.
        if not refused or (unknown and any(each._undeclared for each in waiting)):
            self._resources[uri] = True
        else:
            del self._resources[uri]
        for changes in waiting:
            if isinstance(outcome, Answered) or (unknown and changes._undeclared):
                changes._confirm(uri)
                continue
            self._unsubscribe(changes)
            if refused:
                changes._close(failure_of(outcome, failure))
            else:
                changes._stream_lost(failure_of(outcome, failure), _SUBSCRIBE)
        self._update_resources()

    def _unsubscribe_answered(
        self, caller: ClientSession, uri: str, outcome: Outcome, failure: McpError | None
    ) -> None:
        if self._uses(caller):
            del self._resources[uri]  # with any answer: an unsubscribe is not repeated
            self._update_resources()


def _listen_params(changes: Subscription) -> JsonObject:
    params = listen_params(changes._asked)
    return {"notifications": {**params["notifications"], **changes._filters}} if changes._filters else params
