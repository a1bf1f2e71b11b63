"""Runs: the state that all connections of a running server share.

A server is a description.  All state of a running server belongs to its `Run` or to one connection.  Handlers run in
the nursery of the run and not of their connection: a handler that waits for the client's answer outlives the
connection that asked, because the answer may come on another one.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import trio

import trio_mcp.server as room  # it loads `threads` with the first call of a plain function
from trio_mcp.core.errors import UsageError
from trio_mcp.core.revisions import Role
from trio_mcp.core.shares import ByteBudget, Shares
from trio_mcp.server.dispatch import Dispatcher
from trio_mcp.transport.nursery import block, check_trio, open_nursery
from trio_mcp.transport.wire import CLOSING
from trio_mcp.transport.workers import WorkerPool, stale

if TYPE_CHECKING:
    from types import TracebackType

    from trio_mcp.core.messages import Request
    from trio_mcp.core.revisions import Revision
    from trio_mcp.core.subscriptions import ChangeEvent, Listeners
    from trio_mcp.server.detached import DetachedCall
    from trio_mcp.server.parking import ParkedCall, Parking
    from trio_mcp.server.publishing import ListenerKey, Publisher, Watcher
    from trio_mcp.server.registry import Catalog
    from trio_mcp.server.replicas import Replica
    from trio_mcp.server.server import Server
    from trio_mcp.server.session import ServerSession
    from trio_mcp.server.threads import Threads

__all__ = ["Rates", "Run", "RunMember", "Statistics", "drained", "running"]

_log = logging.getLogger("trio_mcp")
_OF_CHANGES = ("listChanged", "subscribe")
_MOST = 10_000  # clients with a token bucket; if there are more, those that have been silent longest are forgotten


class RunMember(Protocol):
    """A member of a run: one client, or all clients of an HTTP endpoint.

    It registers itself in `Run.connections` while it serves.
    """

    @property
    def clients(self) -> int:
        """The number of connected clients."""

    async def drain(self) -> None:
        """Refuse new requests, wait for running calls, close, and return.  May be called again."""

    def abort_pending(self) -> None:
        """Answer unfinished calls with an error and cancel them; `drain` then goes on."""

    def stop(self) -> None:
        """Stop serving at once, because the run is over."""


@attrs.frozen(eq=False)
class Statistics:
    """A snapshot of the load of a server, from `Server.statistics`."""

    connections: int
    """Clients: one for each stream and WebSocket; over HTTP, one for each session and for each running request without
    a session."""
    running: int
    """Requests whose handler runs."""
    parked: int
    """Handlers that wait for a client's answer between two requests."""
    listeners: int
    """Subscriptions and legacy sessions that are notified of changes."""
    bytes: int
    """Bytes that are held for clients (`Limits.bytes_in_all`)."""


class Run:
    """One run of a server, from the start of its lifespan to the end."""

    def __init__(
        self,
        server: Server,
        lifespans: Mapping[Catalog, Any],
        nursery: trio.Nursery,
        *,
        ended: trio.Event,
        held: bool,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        catalog, limits = server._catalog, server._limits
        self.server = server
        self.held = held
        """True: the run ends explicitly, not with its last connection."""
        self.ended = ended
        """Set when the lifespan has ended, too."""
        self.nursery = nursery
        self.limits = limits
        self.connections: dict[RunMember, None] = {}  # ordered, so that runs with one seed end them in the same order
        self.draining = server._drains > 0
        """True: new requests and connections are refused.  It is never reset."""
        self.dismissed = False
        """True: all requests are refused, even retries of parked calls."""
        self.workers = WorkerPool(nursery)
        self.bytes = ByteBudget(limits)
        self.calls = Rates(limits.call_rate, "call_rate")
        self.running = Shares(limits.calls_in_all)
        """The places of requests that run."""
        self.kinds = catalog.kinds
        """The capabilities that the entries need; it only grows."""
        self.make_offers()
        self.kept: dict[str, Any] = {}
        """The state that an extension has for this run, by its identifier."""
        self.detached: dict[DetachedCall, None] = {}
        """The calls that go on without their requests, such as tasks."""
        self.attached = trio.lowlevel.ParkingLot()
        """Tasks that wait until there are no such calls."""
        self.backgrounds: dict[trio.CancelScope, None] = {}
        """The background work of extensions."""
        self._sessions: dict[ServerSession, Mapping[str, Any]] = {}  # legacy ones, and what was declared to them
        self._publisher: Publisher | None = None
        self._subscribed = trio.Event()  # set when there is a publisher
        self._thread = threading.get_ident()
        self._token = trio.lowlevel.current_trio_token()
        self._sharing = trio.Lock()
        self.replica: Replica | None = None
        """The place of this run among the replicas of its server; see `share`."""
        self._parking: Parking | None = None
        self._asked = trio.Event()  # set when there is a `Parking`
        self.dispatcher = Dispatcher(self, catalog, lifespans)
        if watchers:  # they learn from the listeners which sessions there are
            self._make_publisher(watchers[0].listeners(limits, catalog, watchers))
        nursery.start_soon(self._publish_changes, name="publish changes")
        nursery.start_soon(self._expire_parked, name="expire parked handlers")
        for part in catalog.parts():
            if part.extended is not None:
                part.extended.start(self)

    @functools.cached_property
    def threads(self) -> Threads:
        """Runs the handlers that are plain functions."""
        return room.Threads(self.server._threads)

    # Changes.  Most servers have none, and need neither listeners nor a publisher.

    @property
    def publisher(self) -> Publisher:
        """All listeners of the run; made when a client subscribes, or at a change while there are sessions."""
        return self._make_publisher() if self._publisher is None else self._publisher

    def _make_publisher(self, listeners: Listeners[ListenerKey] | None = None) -> Publisher:
        from trio_mcp.server.publishing import Publisher

        self._publisher = Publisher(self.limits, self.server._change_debounce, listeners)
        for session, declared in self._sessions.items():
            self._publisher.add_session(session, declared)
        self._subscribed.set()
        return self._publisher

    async def _publish_changes(self) -> None:  # starts with the run, so that it has no variables of a handler
        await self._subscribed.wait()
        await self.publisher.run()

    def join(self, session: ServerSession, declared: Mapping[str, Any]) -> None:
        """A legacy session has begun: it is notified of changes of the lists that were declared to it."""
        self._sessions[session] = declared
        if self._publisher is not None:
            self._publisher.add_session(session, declared)

    def leave(self, session: ServerSession) -> None:
        """A session has ended, or is notified no more."""
        self._sessions.pop(session, None)
        if self._publisher is not None:
            self._publisher.forget(session)

    def publish(self, change: ChangeEvent, reaches: Callable[[Any], bool] | None = None) -> None:
        """Notify the listeners of a change, of the connections for which `reaches` returns True.  From any thread.

        Listeners of other replicas are notified, too.  A change with `reaches` came from another server, which notifies
        each replica itself.
        """
        if threading.get_ident() != self._thread:
            with suppress(trio.RunFinishedError):  # all listeners have ended with the run
                self._token.run_sync_soon(self.publish, change, reaches, idempotent=True)
            return
        if self.replica is not None and reaches is None:
            self.replica.announce(change)
        self.publish_here(change, reaches)

    def publish_here(self, change: ChangeEvent | None, reaches: Callable[[Any], bool] | None = None) -> None:
        """Notify the listeners of this process.  None stands for every change that has a listener."""
        if self._publisher is None and not self._sessions:
            return
        if change is None:
            self.publisher.publish_all()
        else:
            self.publisher.publish(change, reaches)

    # Replicas.

    async def share(self) -> None:
        """Join the replicas of this server, if it was given a store that they may share.

        Raises `CannotServe` if its keys differ from theirs, and `StoreFailed`.
        """
        async with self._sharing:
            if self.server._shares_store and self.replica is None:
                from trio_mcp.server.replicas import Replica

                self.replica = await self.nursery.start(Replica.run, Replica(self))

    # Questions.

    @property
    def parking(self) -> Parking:
        """Asks the questions of handlers; made with the first question or retry, because most servers ask nothing."""
        if self._parking is None:
            if self.replica is not None:
                from trio_mcp.server.forwarding import SharedParking

                self._parking = SharedParking(self, self.replica)
            else:
                from trio_mcp.server.parking import Parking

                self._parking = Parking(self.server._sealer, self.limits)
            self._asked.set()
        return self._parking

    async def _expire_parked(self) -> None:  # starts with the run, so that it has no variables of a handler
        await self._asked.wait()
        await self.parking.run()

    @property
    def parked(self) -> Sequence[ParkedCall]:
        """The handlers that wait for a retry."""
        return () if self._parking is None else tuple(self._parking.calls.values())

    @property
    def awaits_retries(self) -> bool:
        """Whether handlers wait for a retry, or the messages of one that is served for the store."""
        return self._parking is not None and self._parking.is_busy

    def make_offers(self) -> None:
        """Make the offer to clients, and the one to clients that can only receive answers: without changes."""
        self.offered = len(self.kinds)
        self.offer = self.server._current_offer()
        capabilities = {
            kind: {name: value for name, value in members.items() if name not in _OF_CHANGES}
            for kind, members in self.offer.capabilities.items()
        }
        self.quiet_offer = attrs.evolve(self.offer, capabilities=capabilities)

    async def drain(self) -> None:
        """Refuse new requests from now on, and return when all connections have closed and all calls have ended.

        A run that ends with its connections has then ended, too: a program that cancels its nursery afterwards
        interrupts no lifespan.
        """
        self.draining = True
        async with trio.open_nursery() as nursery:
            for connection in self.connections:
                nursery.start_soon(connection.drain)
        if self.held:
            await self.detached_ended()
        else:
            await self.ended.wait()

    def serves_while_draining(self, request: Request, revision: Revision | None) -> bool:
        """Whether a request is about calls that go on without their own requests, for which a drain waits."""
        extensions = self.offer.extensions
        if extensions is None or revision is None:
            return False
        row = extensions.find(Role.CLIENT, revision, request.method, notification=False)
        return row is not None and row.while_draining

    @property
    def awaited(self) -> bool:
        """Whether a drain waits for calls that go on without their requests, about which clients may ask."""
        return self.draining and bool(self.detached)

    async def detached_ended(self) -> None:
        """Wait for the calls that go on without their requests."""
        while self.detached:
            await self.attached.park()

    def abort_pending(self) -> None:
        """Answer unfinished calls with an error and cancel them; the time of `drain` is over."""
        self.dismissed = True
        for connection in self.connections:
            connection.abort_pending()
        self._stop_calls()

    def _stop_calls(self) -> None:
        """Cancel the calls of which no connection knows."""
        if self._parking is not None:
            self._parking.stop()
        for call in tuple(self.detached):
            call.cancel("the server has stopped")

    def stop(self) -> None:
        """End all connections, before the lifespan that their handlers use."""
        for connection in tuple(self.connections):
            connection.stop()
        self._stop_calls()
        for scope in self.backgrounds:
            scope.cancel(reason="the server has stopped")
        self.workers.end()

    def statistics(self) -> Statistics:
        return Statistics(
            sum(connection.clients for connection in self.connections),
            self.running.held,
            len(self.parked),
            len(self._sessions if self._publisher is None else self._publisher.listeners),
            self.bytes.shares.held,
        )


# The blocks of `Server`.


@block
async def running(stack: AsyncExitStack, server: Server, *, shared: bool) -> Run:
    """The block of one run: enter the lifespans, open the nursery, and stop the run at the end.

    All connections within a `shared` run use it; see `Server.running`.
    """
    check_trio()
    ended = trio.Event()
    stack.callback(ended.set)
    if shared:
        if server._sharing:
            raise UsageError(f"{server._info['name']} is running already")
        server._sharing = True
        stack.callback(setattr, server, "_sharing", False)
    parts, lifespans = dict.fromkeys((server, *server._parts())), {}
    for part in parts:
        if part._lifespan is not None:
            begun = part._lifespan(part)
            if not isinstance(begun, AbstractAsyncContextManager):
                raise UsageError(
                    f"lifespan must return an async context manager, got {type(begun).__name__}; "
                    "write @contextlib.asynccontextmanager above it"
                )
            lifespans[part._catalog] = await _enter_lifespan(stack, begun, part._info["name"])
    nursery = await stack.enter_async_context(open_nursery())
    watchers = [part._watcher for part in parts if part._watcher is not None]
    run = Run(server, lifespans, nursery, ended=ended, held=shared, watchers=watchers)
    for part in parts:
        part._runs.add(run)
        stack.callback(part._runs.discard, run)
    stack.callback(run.stop)

    async def finish(kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None and run.draining:  # `drained` stops the calls when their time is over
            await run.detached_ended()

    stack.push_async_exit(finish)
    if shared:
        server._shared = run
        stack.callback(setattr, server, "_shared", None)
    return run


async def _enter_lifespan(stack: AsyncExitStack, lifespan: AbstractAsyncContextManager[Any], name: str) -> Any:
    """Enter the author's lifespan.  If it ends the run by a cancellation, the server logs or raises this."""

    async def leave(
        kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        with _stale_as_failure():
            ended = await lifespan.__aexit__(kind, error, traceback)
        if ended and stale(error, "the lifespan") is not None:
            _log.warning("%s stops: its lifespan has cancelled the tasks inside it", name)
        return ended

    with _stale_as_failure():
        value = await lifespan.__aenter__()
    stack.push_async_exit(leave)
    return value


@contextmanager
def _stale_as_failure() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if (failure := stale(error, "the lifespan")) is None:
            raise
        raise failure from error


@block
async def drained(stack: AsyncExitStack, server: Server, seconds: float) -> None:
    """The block of `Server.draining`: drain the runs of the server, and stop them after the deadline."""
    deadline, gone = trio.current_time() + seconds, trio.Event()

    def current() -> list[Run]:
        return [run for run in server._runs if run.server is server]

    def stop() -> None:
        server._drains -= 1  # later runs serve
        for run in current():
            run.stop()

    server._drains += 1
    draining = current()
    for run in draining:
        run.draining = True
    stack.callback(stop)
    nursery = await stack.enter_async_context(open_nursery())

    async def drain() -> None:
        async with trio.open_nursery() as nursery:
            for run in draining:
                nursery.start_soon(run.drain)
        gone.set()

    async def wait(_: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            return
        with trio.move_on_at(deadline):
            await gone.wait()
            return
        for run in current():
            run.abort_pending()
        with trio.move_on_after(CLOSING):
            await gone.wait()

    nursery.start_soon(drain)
    stack.push_async_exit(wait)


# The limits that the clients of a run share.


class Rates:
    """Lets each client send `rate` requests a second, and as many at once after a pause: one token bucket for each.

    HTTP counts requests before it reads them.  `ServerSession` counts the requests that reach a handler, on every
    transport.  Both count by the holder of `core.shares`.
    """

    def __init__(self, rate: float, name: str = "request_rate") -> None:
        if not rate > 0:
            raise UsageError(f"Limits.{name} must be a number of requests a second, above 0, got {rate!r}")
        self._rate = rate
        self.limited = rate != math.inf
        """Whether requests are counted."""
        self._burst = max(rate, 1.0)
        # The tokens, and the time of the last change.  A plain dict would search for its first client through all that
        # have moved to the end.
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def forget(self, client: Hashable) -> None:
        """Drop the bucket of a client that will not come back."""
        self._buckets.pop(client, None)

    def give_back(self, client: Hashable) -> None:
        """Return the token of the last request."""
        if (found := self._buckets.get(client)) is not None:  # None: the client was forgotten, or there is no limit
            held, then = found
            self._buckets[client] = (min(self._burst, held + 1), then)

    def wait(self, client: Hashable) -> float:
        """Take a token and return 0, or return the seconds until this client has the next one."""
        if not self.limited:
            return 0.0
        now = trio.current_time()
        held, then = self._buckets.pop(client, (self._burst, now))
        held = min(self._burst, held + (now - then) * self._rate)
        allowed = held >= 1
        self._buckets[client] = (held - allowed, now)
        if len(self._buckets) > _MOST:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - held) / self._rate
