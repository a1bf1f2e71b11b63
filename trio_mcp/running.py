"""What the connections of a running server share.

A server is a description; all that moves while it runs is here, or belongs to one connection.  Handlers run in the
nursery of the run, not in that of their connection: one that waits for the client's answer outlives the connection that
asked, since the answer may come on another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import trio

from trio_mcp.admission import Admission
from trio_mcp.core.jsonrpc import Limits
from trio_mcp.core.rounds import StateSealer
from trio_mcp.dispatch import Dispatcher, Features
from trio_mcp.parking import Parking
from trio_mcp.publishing import Publisher

if TYPE_CHECKING:
    from trio_mcp.catalog import Catalog
    from trio_mcp.core.session import Call, Offer

__all__ = ["Connection", "Run", "Statistics"]


class Connection(Protocol):
    """One that takes part in a run."""

    def stop(self) -> None:
        """The run is over: nobody is served any more."""


@attrs.frozen(eq=False)
class Statistics:
    """How much there is of what, now."""

    connections: int
    running: int
    """Requests that a handler is at work for."""
    waiting: int
    """Requests that wait their turn."""
    parked: int
    """Handlers that wait for a client's answer between two requests."""
    listeners: int
    """Subscriptions, and legacy sessions, that hear of changes."""


class Run:
    """One run of a server, from its lifespan's beginning to its end."""

    def __init__(
        self,
        features: Features,
        parts: Mapping[Catalog, Features],
        lifespans: Mapping[Catalog, Any],
        nursery: trio.Nursery,
        *,
        offer: Callable[[], Offer],
        limits: Limits,
        window: float,
        sealer: StateSealer,
        threads: int,
    ) -> None:
        self.nursery = nursery
        self.offer = offer
        self.limits = limits
        self.connections: set[Connection] = set()
        self.admission: Admission[Call] = Admission(limits)
        self.publisher = Publisher(limits, window)
        self.parking = Parking(sealer, limits)
        self.dispatcher = Dispatcher(
            features,
            parts,
            lifespans,
            parking=self.parking,
            publisher=self.publisher,
            threads=trio.CapacityLimiter(threads),
        )
        nursery.start_soon(self.publisher.run, name="changes of the server, merged")
        nursery.start_soon(self.parking.run, name="handlers whose client did not come back")

    def stop(self) -> None:
        """End all connections, before that ends on which their handlers stand."""
        for connection in tuple(self.connections):
            connection.stop()

    def statistics(self) -> Statistics:
        return Statistics(
            len(self.connections),
            self.admission.running,
            self.admission.waiting,
            len(self.parking),
            len(self.publisher.listeners),
        )
