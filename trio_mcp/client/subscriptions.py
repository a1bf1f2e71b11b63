"""Subscriptions at the server, heard in blocks of code; the same in both eras, and across sessions.

    async with listening.listen(tools=True, resources="notes://todo") as changes:
        async for change in changes:
            ...

A block says what it wants to hear of, and each has an `OpenSubscription` of its own for as long as a session knows of
it (sub-07).  What that costs on the wire is the business of the era:

- modern: one `subscriptions/listen` request for each block.  Its acknowledgement opens the block, and giving it up ends
  the subscription, as its carrier has it.
- legacy: the server tells of its lists unasked, and of a resource from `resources/subscribe` to
  `resources/unsubscribe`, which are counted over all blocks.  By HTTP it does so on one stream for all: a break of
  that is a gap for each block, and a server without one tells of nothing.  For one URI only one of the two is under
  way at a time, because by HTTP a later one could overtake; whatever is wanted by the time it is answered is sent then.

There is no task behind this.  What the server says arrives through `heard` and `ended`, within which everything is
settled, and asking is queueing.  So a block can be left anywhere without waiting, cancelled or not, and nothing is left
behind.  Only what takes time, asking again after a while, is done by the task that waits in the block.

| What ends a subscription | What becomes of its block |
|---|---|
| the server, in good order | the iterator ends |
| the server refuses it | `RequestError`; `SubscriptionUnsupported` if it knows no such request |
| the stream broke, the session lives | it is asked for again, after a while; in the end that raises |
| HTTP 401 or 403 | `Unauthorized`, at once |
| the session is lost | it is asked for on the next one; if there is to be none, that raises |
| the client is closed | the iterator ends, or raises what closed it |
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import attrs
import trio

from trio_mcp.client.caller import Caller, Failure, Unauthorized, failure_of, worn_out
from trio_mcp.core.errors import METHOD_NOT_FOUND, McpError, SessionClosed, UsageError, repeated, shown
from trio_mcp.core.jsonrpc import Id, Limits
from trio_mcp.core.oauth.errors import AuthorizationFailed
from trio_mcp.core.outcomes import Answered, Outcome, Refused
from trio_mcp.core.revisions import Role
from trio_mcp.core.session import Notice
from trio_mcp.core.subscriptions import (
    ACKNOWLEDGED,
    PROMPTS_CHANGED,
    RESOURCES_CHANGED,
    TOOLS_CHANGED,
    ChangeEvent,
    ChangeKind,
    OpenSubscription,
    SubscriptionAcknowledged,
    Subscriptions,
    SubscriptionState,
    listen_params,
    resource_updated,
)

__all__ = ["Subscription", "SubscriptionManager", "SubscriptionUnsupported"]

_LISTEN, _SUBSCRIBE, _UNSUBSCRIBE = "subscriptions/listen", "resources/subscribe", "resources/unsubscribe"
_ABOUT_CHANGES = frozenset({ACKNOWLEDGED, *(kind.method for kind in ChangeKind)})

# Seconds from a break to asking again on the same session, one for each break in a row.  A proxy that cuts idle streams
# costs nothing, a server that restarts has a quarter of a minute; who breaks off once more is not listened to.
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0)
# Seconds after which a subscription has held, and a break is the first again.  As long as the longest pause, or a
# server that breaks off at once would be asked without end.
_HELD = 8.0

# What asking again does not mend: somebody has to do something about it, and the sooner it is raised the better.
_FINAL = (Unauthorized, UsageError)

_WAITING = frozenset({SubscriptionState.ASKED, SubscriptionState.BROKEN})


class SubscriptionUnsupported(McpError):
    """The server tells of nothing that was asked for, so that a block would wait in vain.

    `missing` is what was asked for.
    """

    def __init__(self, missing: tuple[ChangeEvent, ...]) -> None:
        kinds = ", ".join(sorted({change.kind.field for change in missing}))
        super().__init__(f"the server tells of nothing that was asked for ({kinds}); look again from time to time")
        self.missing = missing


class Subscription:
    """What one block hears: an asynchronous iterator of `ChangeEvent`, for one task at a time.

    A change that happens again before it was taken is told once, as one look at the thing finds everything that came
    before.  After a gap, when the stream or the session was lost and something may have been missed, every change that
    is listened to is told once, whether it happened or not.  Of a resource, that of something below it may be told too.

    The iterator ends when the server ends the subscription in good order, and when the client is closed.  It raises
    `RequestError` when the server refuses to go on after a gap, `SubscriptionUnsupported` when it tells of nothing any
    more, `Unauthorized` when it wants to know who asks, `SessionClosed` (or what else the client was closed with) when
    the link is gone for good, and `RemoteProtocolError` for answers that are none.  What was heard until then is told
    first.  Waiting may be cancelled; no change is lost by it.
    """

    def __init__(
        self,
        asked: tuple[ChangeEvent, ...],
        listening: SubscriptionManager,
        limits: Limits,
        *,
        undeclared: bool = False,
    ) -> None:
        self.missing: tuple[ChangeEvent, ...] = ()
        """What the server did not agree to tell of (sub-04); it may be another after a gap."""
        self._asked = dict.fromkeys(asked)
        self._undeclared = undeclared  # it waits for more than the server has agreed to
        self._listening = listening
        self._limits = limits
        self._heard: dict[ChangeEvent, None] = {}  # and not yet taken, in order
        self._news = trio.Event()
        self._state = SubscriptionState.BROKEN
        self._subscription: OpenSubscription | None = None  # as long as the session knows of it
        self._owed: set[str] = set()  # URIs whose `resources/subscribe` has no answer yet
        self._failure: Failure | None = None
        self._opened_at: float | None = None  # None: never
        self._breaks = 0  # in a row
        self._again_at: float | None = None  # when to ask again; None: on the next session
        self._taken = False  # by a task that waits

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> ChangeEvent:
        if self._taken:
            raise UsageError("another task waits for these changes; let each listen for itself")
        self._taken = True
        try:
            await trio.lowlevel.checkpoint()
            while not self._heard:
                if self._state is SubscriptionState.ENDED:
                    raise StopAsyncIteration
                await self._go_on()
        finally:
            self._taken = False
        change = next(iter(self._heard))
        del self._heard[change]
        return change

    async def _opened(self) -> None:
        """Wait until the server has said what it agrees to."""
        while self._state in _WAITING:
            await self._go_on()
        failure = self._failure
        if self._opened_at is None and failure is None:
            failure = self._listening._closed  # None: the server has ended it in good order
        if failure is not None:
            await trio.lowlevel.checkpoint_if_cancelled()  # the client may be closed because of that
            raise failure()

    async def _go_on(self) -> None:
        """Wait until something has changed; when it is time to ask again, do."""
        if self._failure is not None:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise self._failure()
        with trio.CancelScope(deadline=math.inf if self._again_at is None else self._again_at):
            await self._news.wait()
        if self._news.is_set():
            self._news = trio.Event()
        elif self._again_at is not None:
            self._listening._ask(self)

    # What happens to it.

    def _hear(self, change: ChangeEvent) -> None:
        told = [change]
        # A server may name any number of things below those that were asked for.  Beyond this, these stand for them.
        if change not in self._asked and (
            len(self._heard) >= self._limits.listener_changes or len(change.item) > self._limits.uri_length
        ):
            told = [each for each in self._asked if each.kind is change.kind]
        self._heard.update(dict.fromkeys(told))
        self._news.set()

    def _ask(self, subscription: OpenSubscription) -> None:
        self._subscription = subscription
        self._again_at = None
        self._state = SubscriptionState.ASKED

    def _open(self, subscription: OpenSubscription) -> None:
        self.missing = subscription.missing
        self._state = SubscriptionState.OPEN
        if self._opened_at is not None:
            self._miss()
        self._opened_at = trio.current_time()
        self._news.set()

    def _miss(self) -> None:
        """sub-10: nothing is kept for those who were cut off, so anything may have happened."""
        if self._state is SubscriptionState.OPEN and self._subscription is not None:
            self._heard.update(dict.fromkeys(self._subscription.expected))
            self._news.set()

    def _close(self, failure: Failure | None = None) -> None:
        """It is over, well or not."""
        if self._state is SubscriptionState.OPEN or self._state in _WAITING:
            self._state = SubscriptionState.ENDED if failure is None else SubscriptionState.REFUSED
            self._failure = failure
            self._news.set()

    def _lose(self) -> None:
        """The session is gone; the next one is waited for."""
        if self._state is SubscriptionState.OPEN or self._state in _WAITING:
            self._subscription = None
            self._state = SubscriptionState.BROKEN
            self._again_at = None
            self._breaks = 0

    def _break(self, failure: Failure, method: str) -> None:
        """The session goes on, without this."""
        error = failure()
        if isinstance(error, _FINAL) or (isinstance(error, AuthorizationFailed) and not error.passes):
            self._close(failure)
            return
        now = trio.current_time()
        held = self._state is SubscriptionState.OPEN and self._opened_at is not None and now >= self._opened_at + _HELD
        self._breaks = 0 if held else self._breaks
        if self._breaks == len(_PAUSES):
            self._close(worn_out(failure, f"{method} broke off {len(_PAUSES) + 1} times in a row"))
            return
        self._state = SubscriptionState.BROKEN
        self._again_at = now + _PAUSES[self._breaks]
        self._breaks += 1
        self._news.set()


@attrs.define(eq=False)
class _WatchedResource:
    """One that a legacy server was asked to tell of."""

    uri: str
    subscribed: bool = False  # as far as we know, or fear
    asking: Id | None = None  # the request that will change it


class SubscriptionManager:
    """Everything that one client listens to, whatever session it is in; see the head of this file.

    Between `attach` and `connection_lost` there is a session.  The caller of the one before must be lost before another
    is attached, for the outcomes that come by `ended` do not say whose they are.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._caller: Caller | None = None
        self._closed: Failure | None = None
        self._hopeless: Failure | None = None  # why no other session is expected
        self._blocks: dict[Subscription, None] = {}  # that have been entered and not left
        # Of the session:
        self._subscriptions = Subscriptions()
        self._listeners: dict[Id, Subscription] = {}  # by the ids of their subscriptions
        self._resources: dict[str, _WatchedResource] = {}
        self._asking: dict[Id, _WatchedResource] = {}
        self._wanted: frozenset[str] = frozenset()  # URIs
        self._names = 0

    # For the blocks.

    def listen(
        self,
        *changes: ChangeEvent,
        tools: bool = False,
        prompts: bool = False,
        resources: bool | str | Iterable[str] = False,
        undeclared: bool = False,
    ) -> AbstractAsyncContextManager[Subscription]:
        """Hear of changes for as long as the block runs: of these, of lists, and of resources with these URIs.

        ``resources=True`` is the list of resources, URIs are what the resources hold; who wants both adds
        `RESOURCES_CHANGED`.  Raises `UsageError` if nothing is asked for, or too much.

        With `undeclared` the block also waits for what the server does not declare, or agree to: some send it all the
        same, as mcp up to 1.30 does, also without `resources/subscribe`.

        The block is entered when the server has agreed; what it has not agreed to is `Subscription.missing`.  Entering
        it raises `RequestError` if the server refuses, `SubscriptionUnsupported` if it tells of nothing of all that,
        and otherwise as the iterator does.  Without a session the next one is waited for.  How long, is for the
        caller's cancel scope to say.  Leaving the block tells the server, and waits for nothing.
        """
        lists = ((TOOLS_CHANGED, tools), (PROMPTS_CHANGED, prompts), (RESOURCES_CHANGED, resources is True))
        uris = () if isinstance(resources, bool) else (resources,) if isinstance(resources, str) else resources
        asked = (*changes, *(each for each, wanted in lists if wanted), *map(resource_updated, uris))
        return self._block(Subscription(self._checked(asked), self, self._limits, undeclared=undeclared))

    def _checked(self, asked: tuple[ChangeEvent, ...]) -> tuple[ChangeEvent, ...]:
        limits = self._limits
        for change in asked:
            if not isinstance(change, ChangeEvent) or not isinstance(change.item, str):
                raise UsageError(f"{shown(change)} is no change; resources are named by their URIs, as strings")
            if bool(change.item) is not bool(change.kind.item):
                how = "by its URI" if change.kind.item else "without a URI"
                raise UsageError(f"Kind.{change.kind.name} is listened to {how}")
            if len(change.item) > limits.uri_length:
                raise UsageError(f"a URI may have {limits.uri_length} characters (Limits.uri_length)")
        asked = tuple(dict.fromkeys(asked))
        if not asked:
            raise UsageError("there is nothing to listen to; ask for tools, prompts or resources")
        if (most := limits.listener_changes) < len(asked):
            raise UsageError(f"a block may ask for {most} changes (Limits.listener_changes), not {len(asked)}")
        return asked

    @asynccontextmanager
    async def _block(self, changes: Subscription) -> AsyncIterator[Subscription]:
        await trio.lowlevel.checkpoint()
        if self._closed is not None:
            raise self._closed()
        self._blocks[changes] = None
        try:
            self._ask(changes)
            await changes._opened()
            yield changes
        finally:
            del self._blocks[changes]
            self._drop(changes)
            changes._heard.clear()
            changes._close()

    # For the client.

    def attach(self, caller: Caller) -> None:
        """A session is open: everything that is listened to is asked for on it (sub-10).  Waits for nothing."""
        self.connection_lost()
        self._caller = caller
        for changes in list(self._blocks):
            if changes._state is SubscriptionState.BROKEN:
                self._ask(changes)

    def heard(self, notice: Notice) -> bool:
        """Take in what the server has told; False if no block waits for it."""
        note = notice.notification
        if note.method not in _ABOUT_CHANGES:
            return False
        events = self._subscriptions.receive(note)
        for event in events:
            changes = self._listeners[event.subscription.id]
            if not isinstance(event, SubscriptionAcknowledged):
                changes._hear(event.change)
            elif event.subscription.expected:
                changes._open(event.subscription)
            else:
                self._nothing(changes)
        return bool(events)

    def ended(self, outcome: Outcome, failure: Failure | None) -> None:
        """Take in the outcome of a request that was made by `Caller.begin`; those of others are ignored."""
        if self._caller is None or self._caller.session.closed:
            return  # `connection_lost` follows
        resource = self._asking.pop(outcome.id, None)
        if resource is not None:
            self._answered(resource, outcome, failure_of(outcome, failure))
        elif (subscription := self._subscriptions.over(outcome)) is not None:
            changes = self._listeners.pop(subscription.id)
            changes._subscription = None  # its id may be another's in the next session
            if subscription.state is SubscriptionState.ENDED:
                changes._close()
            elif isinstance(outcome, Refused) and outcome.error.code == METHOD_NOT_FOUND:
                # Servers whose lists never change do not serve it at all: they tell of nothing.
                self._nothing(changes, failure_of(outcome, failure))
            elif subscription.state is SubscriptionState.REFUSED:
                changes._close(failure_of(outcome, failure))
            else:
                changes._break(failure_of(outcome, failure), outcome.method)

    def missed(self, *, for_good: bool) -> None:
        """What a legacy server tells unasked was not heard for a while, or will not be in this session."""
        for changes in list(self._listeners.values()):
            if changes._subscription is not None and changes._subscription.attached:
                self._nothing(changes) if for_good else changes._miss()

    def connection_lost(self, failure: Failure | None = None) -> None:
        """The session is gone; every block waits for the next.

        With `failure` none is on its way, and until one is attached after all each block that waits raises that.
        """
        self._caller, self._hopeless = None, failure
        self._subscriptions.connection_lost()
        self._listeners.clear()
        self._resources.clear()
        self._asking.clear()
        for changes in self._blocks:
            changes._lose() if failure is None else changes._close(failure)

    def closed(self, failure: Failure | None = None) -> None:
        """The client is gone: every block ends, with this error, or after an orderly end (None) without one."""
        if self._closed is None:
            self._closed = failure or _client_closed
            self.connection_lost()
            for changes in self._blocks:
                changes._close(failure)

    # Within.

    def _ask(self, changes: Subscription) -> None:
        """Ask for what a block wants to hear, if there is a session; else the next one will be asked."""
        caller = self._caller
        if caller is None or caller.session.closed:
            changes._lose() if self._hopeless is None else changes._close(self._hopeless)
            return
        terms = caller.session.terms
        assert terms is not None  # it was attached when it was open
        if terms.revision.request(Role.CLIENT, _LISTEN) is None:
            self._names += 1  # no string is the id of a request of ours
            subscription = self._subscriptions.attach(
                f"block {self._names}", changes._asked, terms.capabilities, undeclared=changes._undeclared
            )
            self._watch(caller, changes, subscription)
        else:
            try:
                id = caller.begin(_LISTEN, listen_params(changes._asked))
            except McpError as error:  # such as one request too many
                changes._close(repeated(error))
                return
            subscription = self._subscriptions.ask(id, changes._asked, undeclared=changes._undeclared)
            changes._ask(subscription)
            self._listeners[id] = changes
            caller.act(())  # so that it is sent

    def _watch(self, caller: Caller, changes: Subscription, subscription: OpenSubscription) -> None:
        """Subscribe to what a legacy server has declared."""
        changes._ask(subscription)
        self._listeners[subscription.id] = changes
        if not subscription.expected or caller.deaf:
            self._nothing(changes)
            return
        changes._owed = {each.item for each in subscription.expected if each.kind is ChangeKind.RESOURCE}
        changes._owed -= {each.uri for each in self._resources.values() if each.subscribed and each.asking is None}
        self._settle()
        self._check(changes)

    def _nothing(self, changes: Subscription, cause: Failure | None = None) -> None:
        self._drop(changes)
        missing = changes.missing = tuple(changes._asked)

        def failure() -> McpError:
            error = SubscriptionUnsupported(missing)
            error.__cause__ = None if cause is None else cause()
            return error

        changes._close(failure)

    def _check(self, changes: Subscription) -> None:
        """Open a block of the legacy era that is owed nothing any more."""
        if changes._state is SubscriptionState.ASKED and not changes._owed and changes._subscription is not None:
            changes._open(changes._subscription)

    def _drop(self, changes: Subscription) -> None:
        """A block wants nothing of the server any more; tell it."""
        subscription, changes._subscription = changes._subscription, None
        changes._owed.clear()
        if subscription is None or self._subscriptions.close(subscription.id) is None:
            return
        del self._listeners[subscription.id]
        if subscription.attached:
            self._settle()
        elif self._caller is not None:
            self._caller.give_up(subscription.id)  # sub-12

    def _settle(self) -> None:
        """Bring what a legacy server was told of resources in line with what is wanted."""
        if self._caller is None or self._caller.session.closed:
            return
        self._wanted = self._subscriptions.uris
        for uri in sorted(self._wanted - self._resources.keys()):  # so that the same is sent in every run
            self._resources[uri] = _WatchedResource(uri)
        for resource in list(self._resources.values()):
            self._step(self._caller, resource)
        self._caller.act(())

    def _step(self, caller: Caller, resource: _WatchedResource) -> None:
        """Send what is due for one resource, unless something is under way."""
        wanted = resource.uri in self._wanted
        if resource.asking is not None:
            return
        if wanted is resource.subscribed:
            if not wanted:
                self._resources.pop(resource.uri, None)
            return
        try:
            # res-27: an unsubscribe follows a subscribe, whose answer has come.
            method = _SUBSCRIBE if wanted else _UNSUBSCRIBE
            resource.asking = caller.begin(method, {"uri": resource.uri}, undeclared=True)  # a block may want it so
        except McpError as error:  # such as one request too many; what is to be unsubscribed is tried the next time
            if wanted:
                self._blame(resource, repeated(error), again=False)
            return
        self._asking[resource.asking] = resource

    def _answered(self, resource: _WatchedResource, outcome: Outcome, failure: Failure) -> None:
        """A `resources/subscribe` or `resources/unsubscribe` has its outcome."""
        resource.asking = None
        if resource.subscribed:
            resource.subscribed = False  # whatever the server says to it, it is not asked again
        elif isinstance(outcome, Refused):
            if outcome.error.code == METHOD_NOT_FOUND:
                self._wait_unasked(resource)
            self._blame(resource, failure, again=False)
        else:
            # Without an answer it may have been carried out all the same, and is taken back before it is asked again.
            resource.subscribed = True
            if isinstance(outcome, Answered):
                for changes in [each for each in self._blocks if resource.uri in each._owed]:
                    changes._owed.discard(resource.uri)
                    self._check(changes)
            else:
                self._blame(resource, failure, again=True)
        if self._caller is not None:
            self._step(self._caller, resource)  # whoever has handed in the outcome sees to it that this is sent

    def _wait_unasked(self, resource: _WatchedResource) -> None:
        """Blocks with `undeclared` wait for a resource although the server serves no subscriptions.

        It counts as subscribed, so that it is not asked for again.
        """
        for changes in [each for each in self._blocks if each._undeclared and resource.uri in each._owed]:
            resource.subscribed = True
            changes._owed.discard(resource.uri)
            self._check(changes)

    def _blame(self, resource: _WatchedResource, failure: Failure, *, again: bool) -> None:
        """The blocks that wait for this resource do so in vain."""
        for changes in [each for each in self._blocks if resource.uri in each._owed]:
            self._drop(changes)
            if again:
                changes._break(failure, _SUBSCRIBE)
            else:
                changes._close(failure)


def _client_closed() -> McpError:
    return SessionClosed("the client is closed")
