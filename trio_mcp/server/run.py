"""Runs: the state that all connections of a running server share.

A server is a description.  All state of a running server belongs to its `Run` or to one connection.  Handlers run in
the nursery of the run and not of their connection: a handler that waits for the client's answer outlives the
connection that asked, because the answer may come on another one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import trio

from trio_mcp.core.messages import Limits
from trio_mcp.core.rounds import StateSealer
from trio_mcp.core.shares import ByteBudget, FairQueue, Shares
from trio_mcp.server.dispatch import Dispatcher
from trio_mcp.server.parking import Parking
from trio_mcp.server.publishing import Publisher, WatchedListeners
from trio_mcp.server.rates import Rates
from trio_mcp.server.threads import Threads
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.wire import CLOSING
from trio_mcp.transport.workers import WorkerPool

if TYPE_CHECKING:
    from types import TracebackType

    from trio_mcp.core.session import Offer
    from trio_mcp.server.publishing import Watcher
    from trio_mcp.server.registry import Catalog

__all__ = ["Admission", "Draining", "Run", "RunMember", "Runs", "Statistics", "WaitingRequests"]

_OF_CHANGES = ("listChanged", "subscribe")


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


class WaitingRequests(Hashable, Protocol):
    """The queue of one connection."""

    def start_next(self) -> None:
        """Start the oldest waiting request, for which a place has been taken."""


@attrs.frozen(eq=False)
class Statistics:
    """A snapshot of the load of a server, from `Server.statistics`."""

    connections: int
    """Clients: one for each stream and WebSocket; over HTTP, one for each session and for each running request without
    a session."""
    running: int
    """Requests whose handler runs."""
    waiting: int
    """Requests that wait for their turn."""
    parked: int
    """Handlers that wait for a client's answer between two requests."""
    listeners: int
    """Subscriptions and legacy sessions that are notified of changes."""
    bytes: int
    """Bytes that are held for clients (`Limits.bytes_in_all`)."""


class Admission:
    """The running and waiting requests of all connections of a server.

    Both are resources that clients share (see `core.shares`).  Clients take turns: a client that floods the server
    waits only behind its own requests, however many connections it has.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = Shares(limits.calls_in_all)
        self.waiting = Shares(limits.waiting_in_all)
        # Connections that have waiting requests and may run one more.
        self.hungry: FairQueue[WaitingRequests] = FairQueue(self.running)

    def serve(self) -> None:
        """Start waiting requests while there are free places."""
        while (queue := self.hungry.next()) is not None:
            queue.start_next()


class Run:
    """One run of a server, from the start of its lifespan to the end."""

    def __init__(
        self,
        catalog: Catalog,
        lifespans: Mapping[Catalog, Any],
        nursery: trio.Nursery,
        *,
        offer: Callable[[], Offer],
        limits: Limits,
        window: float,
        sealer: StateSealer,
        threads: int,
        held: bool,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.held = held
        """True: the run ends explicitly, not with its last connection."""
        self.ended = trio.Event()
        """Set when the lifespan has ended, too."""
        self.nursery = nursery
        self.offer = offer
        self._quiet: tuple[Offer, Offer] | None = None
        self.limits = limits
        self.connections: dict[RunMember, None] = {}  # ordered, so that runs with one seed end them in the same order
        self.draining = False
        """True: new requests and connections are refused.  It is never reset."""
        self.dismissed = False
        """True: all requests are refused, even retries of parked calls."""
        self.workers = WorkerPool(nursery)
        self.bytes = ByteBudget(limits)
        self.calls = Rates(limits.call_rate, "call_rate")
        self.admission = Admission(limits)
        self.kinds = catalog.kinds
        """The capabilities that the entries need; the offer is made again when they have grown."""
        self.publisher = Publisher(limits, window, WatchedListeners(limits, catalog, watchers) if watchers else None)
        self.parking = Parking(sealer, limits)
        self.dispatcher = Dispatcher(
            catalog,
            lifespans,
            parking=self.parking,
            publisher=self.publisher,
            threads=Threads(threads),
        )
        nursery.start_soon(self.publisher.run, name="publish changes")
        nursery.start_soon(self.parking.run, name="expire parked handlers")

    def quiet_offer(self) -> Offer:
        """As `offer`, without change notifications; for clients that can only receive answers."""
        offer = self.offer()
        if self._quiet is None or self._quiet[0] is not offer:
            capabilities = {
                kind: {name: value for name, value in members.items() if name not in _OF_CHANGES}
                for kind, members in offer.capabilities.items()
            }
            self._quiet = offer, attrs.evolve(offer, capabilities=capabilities)
        return self._quiet[1]

    async def drain(self) -> None:
        """Refuse new requests from now on, and return when all connections have closed."""
        self.draining = True
        async with trio.open_nursery() as nursery:
            for connection in self.connections:
                nursery.start_soon(connection.drain)

    def abort_pending(self) -> None:
        """Answer unfinished calls with an error and cancel them; the time of `drain` is over."""
        self.dismissed = True
        for connection in self.connections:
            connection.abort_pending()
        self.parking.stop()

    def stop(self) -> None:
        """End all connections, before the lifespan that their handlers use."""
        for connection in tuple(self.connections):
            connection.stop()
        self.parking.stop()
        self.workers.end()

    def statistics(self) -> Statistics:
        return Statistics(
            sum(connection.clients for connection in self.connections),
            self.admission.running.held,
            self.admission.waiting.held,
            len(self.parking),
            len(self.publisher.listeners),
            self.bytes.shares.held,
        )


class Runs:
    """The current runs of one server."""

    def __init__(self) -> None:
        self._runs: set[Run] = set()
        self._drains = 0  # the number of `draining` blocks

    def add(self, run: Run) -> None:
        self._runs.add(run)
        if self._drains:
            run.draining = True

    def discard(self, run: Run) -> None:
        self._runs.discard(run)

    def begin_to_drain(self) -> tuple[Run, ...]:
        self._drains += 1
        for run in self._runs:
            run.draining = True
        return tuple(self._runs)

    def abort_pending(self) -> None:
        for run in self._runs:
            run.abort_pending()

    def stop(self) -> None:
        """End the drain that `begin_to_drain` began: stop the current runs; later runs serve."""
        self._drains -= 1
        for run in tuple(self._runs):
            run.stop()


async def _drained(run: Run) -> None:
    await run.drain()
    if not run.held:  # so that a program that cancels its nursery afterwards interrupts no lifespan
        await run.ended.wait()


class Draining:
    """The block of `Server.draining`: drains all runs, and stops them after the deadline.

    A class and not a generator, as `transport.nursery.open_nursery`.
    """

    __slots__ = ("_deadline", "_gone", "_runs", "_seconds", "_stack")

    def __init__(self, runs: Runs, seconds: float) -> None:
        self._runs = runs
        self._seconds = seconds

    async def __aenter__(self) -> None:
        self._deadline = trio.current_time() + self._seconds
        self._gone = trio.Event()
        async with AsyncExitStack() as stack:
            runs = self._runs.begin_to_drain()
            stack.callback(self._runs.stop)
            nursery = await stack.enter_async_context(open_nursery())
            nursery.start_soon(self._drain, runs)
            stack.push_async_exit(self._wait)
            self._stack = stack.pop_all()

    async def _drain(self, runs: tuple[Run, ...]) -> None:
        async with trio.open_nursery() as nursery:
            for run in runs:
                nursery.start_soon(_drained, run)
        self._gone.set()

    async def _wait(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            return
        with trio.move_on_at(self._deadline):
            await self._gone.wait()
            return
        self._runs.abort_pending()
        with trio.move_on_after(CLOSING):
            await self._gone.wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, traceback)
