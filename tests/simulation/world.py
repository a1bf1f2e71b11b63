"""One run of a plan: everything is put together, the faults happen, and nothing may be left.

A world goes through three phases.  While it is played, the clients make their moves and the faults happen.  Then it
is healed: no fault happens any more, what is dead is given up, and what the server keeps for absent clients expires.
Then it is ended.  After the second phase every account of the server must be empty, after the third every task gone and
every connection closed.

What a program gets from its computer is from the plan as well: the order of tasks, the time, and random bytes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import random
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any
from unittest import mock

import attrs
import trio
from trio.testing import MockClock

from tests.core.auth_server import CALLBACK, AuthServer
from tests.server.checkpoints import running_tasks, task_positions
from tests.simulation.book import Book, Call
from tests.simulation.host import (
    AUTHORITY,
    BEHIND,
    ISSUER,
    LIMITS,
    REPLICAS,
    SERVER,
    TIGHT,
    Host,
    always,
    authorize,
    build,
    hostile,
    protect,
    url_of,
)
from tests.simulation.network import Network
from tests.simulation.plan import HARMLESS, Fault, Plan
from tests.simulation.replicas import AWAY, Reached, Standstill, leftovers, sessions_of
from tests.simulation.tasks import audit
from tests.simulation.visitor import Visitor
from trio_mcp import McpError, OAuth, Server
from trio_mcp.client import ClientOptions
from trio_mcp.relay import open_relay
from trio_mcp.stores import MemoryStore, StoreFailed
from trio_mcp.testing import seeded

__all__ = ["Played", "play"]

LONGEST = 2 * 3600.0  # seconds for which a world is played; a longer wait is endless
CROSSED = 14  # times that a line is crossed until a session by HTTP+SSE is open and listens
HEALING = 300.0  # seconds after which nothing is kept for anybody
LEAVING = 5.0  # seconds for a program to end, and for others to notice
STEPS = 400_000  # of tasks; more means that some go round in circles
EPOCH = 1_800_000_000.0
_gmtime = time.gmtime
_IN_BYTES = frozenset({"cut", "end", "dead", "stall", "slow"})


@attrs.frozen
class Played:
    """What became of a world."""

    plan: Plan
    violations: tuple[str, ...]
    transcript: tuple[str, ...]
    outcomes: tuple[str, ...]
    moves: int
    fired: tuple[str, ...]
    steps: int


def play(plan: Plan) -> Played:
    """Run the world of a plan."""
    clock = MockClock(autojump_threshold=0)
    world = _World(plan, clock)
    with _computer(plan, clock), _logged(world.book), seeded(plan.order):
        try:
            trio.run(world.run, clock=clock, instruments=[_Steps(world), *world.instruments])
        except Exception as error:  # noqa: BLE001  # a finding, whatever it is
            world.book.unexpected("the world", error)
    book = world.book
    if not book.violations:
        book.check_calls()
    return Played(
        plan,
        tuple(book.violations),
        tuple(book.lines),
        tuple(call.outcome for call in book.calls.values()),
        sum(visitor.made for visitor in world.visitors),
        tuple(book.fired.elements()),
        world.steps,
    )


@contextlib.contextmanager
def _computer(plan: Plan, clock: MockClock) -> Iterator[None]:
    """Time and randomness of the whole process."""
    dice = random.Random(plan.order)

    def now() -> float:
        return EPOCH + clock.current_time()

    def gmtime(seconds: float | None = None) -> time.struct_time:
        return _gmtime(now() if seconds is None else seconds)

    collecting = gc.isenabled()
    gc.disable()  # what finalizers do would happen at any moment
    with (
        mock.patch("time.time", now),
        mock.patch("trio_mcp.stores.rows.wall", now),
        mock.patch("time.monotonic", clock.current_time),
        mock.patch("time.gmtime", gmtime),
        mock.patch("os.urandom", dice.randbytes),
        mock.patch("random._urandom", dice.randbytes),
        mock.patch.dict(os.environ, {"NO_PROXY": "*"}),
    ):
        try:
            yield
        finally:
            if collecting:
                gc.enable()


class _Errors(logging.Handler):
    def __init__(self, book: Book) -> None:
        super().__init__(logging.ERROR)
        self._book = book

    def emit(self, record: logging.LogRecord) -> None:
        about = record.args if isinstance(record.args, tuple) else ()
        # A record that is kept for long has the text of the error only.
        if self._book.harms and any(isinstance(each, StoreFailed) or each == AWAY for each in about):
            self._book.tell(f"the log says {record.getMessage()!r}")
        elif record.exc_info and record.exc_info[1] is not None:
            self._book.unexpected(f"the log says {record.getMessage()!r}:", record.exc_info[1])
        else:
            self._book.broken(f"the log says {record.getMessage()!r}")


@contextlib.contextmanager
def _logged(book: Book) -> Iterator[None]:
    """An error in the log breaks a rule."""
    handler = _Errors(book)
    loggers = [logging.getLogger(name) for name in ("trio_mcp", "trio")]
    before = [(logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, (propagate, level) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
            logger.setLevel(level)


class _Steps(trio.abc.Instrument):
    """Counts the steps of all tasks, and lets faults happen between two of them."""

    def __init__(self, world: _World) -> None:
        self._world = world

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        world = self._world
        world.steps += 1
        if world.steps >= world.next:
            world.step()


class _World:
    """A plan that runs."""

    def __init__(self, plan: Plan, clock: MockClock) -> None:
        self.plan = plan
        self.book = Book(clock.current_time)
        self.steps = 0
        self.visitors = [Visitor(f"c{number}", client.moves, self) for number, client in enumerate(plan.clients)]
        self._due = sorted((each for each in plan.faults if each.kind not in _IN_BYTES), key=lambda each: -each.at)
        self.next = STEPS
        self._open: list[tuple[Call, trio.CancelScope]] = []  # calls that run
        self._hosts: list[Host] = []
        self._authority = AuthServer(ISSUER, iss=ISSUER)
        self._refused: set[str] = set()
        self._auths: dict[str, OAuth] = {}
        self._scope = trio.CancelScope()
        self._standstill = Standstill()
        self.instruments = [self._standstill] if plan.replicas > 1 else []
        self._reached: dict[int, Reached] = {}  # the way of each replica to the store

    # What clients need.

    async def target(self) -> Any:
        if self.plan.transport == "stream":
            return await self._network.dial("127.0.0.1", SERVER)
        return url_of(self.plan.transport, SERVER)

    def options(self, client: str) -> ClientOptions:
        options: ClientOptions = {} if self.plan.probe else {"revision": self.plan.era}
        options["ping_seconds"] = self.plan.pings
        if self.plan.oauth:
            if client not in self._auths:
                self._auths[client] = OAuth(client, visit=self._visit, redirect_uri=CALLBACK, http_on_loopback=True)
            options["auth"] = self._auths[client]
        elif self._authenticates:
            options["headers"] = {"Authorization": f"Bearer {client}"}
        return options

    @property
    def tells(self) -> bool:
        """Whether a listener hears of every change.  A relay says that it listens before the server behind it has
        agreed, and cannot take it back when that refuses."""
        return self.plan.behind != "json"

    @property
    def crossing(self) -> float:
        """Seconds that a relay may need until it listens to the upstream server, and large answers for the line.

        A change waits behind large answers of the same connection, which have their text twice.
        """
        plan = self.plan
        large = sum(move.size for client in plan.clients for move in client.moves if move.kind == "big")
        windows = math.ceil(2 * large / plan.line.window)
        return plan.line.delay * (windows if plan.behind is None else 2 * windows + CROSSED)

    @property
    def _authenticates(self) -> bool:
        return self.plan.transport != "stream" and not self.plan.oauth

    async def _visit(self, url: str) -> str:
        await trio.sleep(3)
        return f"{CALLBACK}?{self._authority.browse(url)}"

    @contextlib.contextmanager
    def cancellable(self, call: Call, scope: trio.CancelScope) -> Iterator[None]:
        self._open.append((call, scope))
        try:
            yield
        finally:
            self._open.remove((call, scope))

    def start(self, function: Any, *args: Any) -> None:
        self._nursery.start_soon(function, *args)

    # The phases.

    async def run(self) -> None:
        before = running_tasks()
        with self._scope:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await self._play(nursery)
        await trio.testing.wait_all_tasks_blocked()
        left = running_tasks() - before
        self.book.check(not left, f"tasks are left: {sorted(task.name for task in left)}\n{task_positions()}")
        for connection in self._network.connections:
            ends = [name for name in ("client", "server") if not getattr(connection, name).closed]
            self.book.check(not ends, f"connection {connection.number} of {connection.who} is left open: {ends}")

    async def _play(self, nursery: trio.Nursery) -> None:
        plan, book = self.plan, self.book
        faults = [each for each in plan.faults if each.kind in _IN_BYTES]
        network = Network(plan.order, plan.line, faults, nursery, book.tell, self._happened)
        self._network = network
        with mock.patch.object(trio, "open_tcp_stream", network.dial):
            if plan.oauth:
                nursery.start_soon(authorize, self._authority, network.listen(AUTHORITY))
            await self._begin(nursery)
            with trio.move_on_after(LONGEST) as patience:
                async with trio.open_nursery() as playing:
                    for visitor in self.visitors:
                        playing.start_soon(visitor.run, name=f"client {visitor.name}")
            if patience.cancelled_caught:
                book.broken(f"the world does not end\n{task_positions()}")
            self.next = STEPS
            book.tell("the world heals")
            network.heal()
            for host in self._hosts:
                self._standstill.go_on(host.name)
            for reached in self._reached.values():
                reached.heal()
            await audit(book)
            await trio.sleep(HEALING)
            if self._reached:
                left = leftovers(book.store)
                book.check(not left, f"the store still has {left}")
            for host in reversed(self._hosts):  # a relay keeps sessions with the server behind it until it ends
                self._check_accounts(host)
                host.end()
                await trio.sleep(LEAVING)
            nursery.cancel_scope.cancel()

    async def _begin(self, nursery: trio.Nursery) -> None:
        plan, book = self.plan, self.book
        if plan.transport != "stream" and plan.behind is None:
            book.principals = lambda client: client
        if plan.transport != "stream":
            book.fronts = lambda client: client
        book.relayed = plan.behind is not None
        book.exchanges = not {plan.transport, plan.behind} <= {"stream", "websocket", "sse", None}
        # JSON has no streams; and in a legacy session a relay cannot know to which of several calls a question belongs.
        book.asks = plan.transport != "json" and plan.behind is None
        book.tells = "json" not in (plan.transport, plan.behind)
        book.harms = int(plan.tight)  # requests beyond its limits are refused
        front = self._relay if plan.behind is not None else self._server
        if plan.behind is not None:
            self._hosts.append(Host("behind", BEHIND, plan.behind, self._network, book, lambda: always(build(book))))
        if plan.replicas > 1:
            book.sessions = lambda client: sessions_of(book.store, client, time.time())
            book.shared = True
            ports = range(REPLICAS, REPLICAS + plan.replicas)
            self._network.balance(SERVER, ports)
            places = [(f"replica {place}", port, partial(self._replica, place)) for place, port in enumerate(ports)]
        else:
            places = [("server", SERVER, front)]
        for name, port, make in places:
            self._hosts.append(
                Host(
                    name,
                    port,
                    plan.transport,
                    self._network,
                    book,
                    make,
                    authenticate=self._authenticates,
                    single=plan.scattered,
                )
            )
        for host in self._hosts:
            nursery.start_soon(host.run, name=f"host {host.name}")
            await (host.joined if plan.replicas > 1 else host.up).wait()
        self._due = [attrs.evolve(each, at=each.at + self.steps) for each in self._due]
        self.next = self._due[-1].at if self._due else STEPS

    def _server(self) -> AbstractAsyncContextManager[Server]:
        if not self.plan.kept:
            self.book.store = MemoryStore()  # it ends with its process
        limits = TIGHT if self.plan.tight else LIMITS
        # Every fourth world has new servers with new keys; a protected server is always new, for it stays protected.
        return always(self._protected(build(self.book, limits, anew=self.plan.oauth or self.plan.order % 4 == 0)))

    def _replica(self, place: int) -> AbstractAsyncContextManager[Server]:
        before = self._reached.get(place)
        self._reached[place] = reached = Reached(self.book.store, self.book, self.plan.lag)
        if before is not None:
            reached.stay_away(before)
        limits = TIGHT if self.plan.tight else LIMITS
        return always(build(self.book, limits, anew=self.plan.order % 4 == 0, place=place, store=reached))

    def _protected(self, server: Server) -> Server:
        return protect(server, self._authority, self._refused) if self.plan.oauth else server

    @contextlib.asynccontextmanager
    async def _relay(self) -> Any:
        assert self.plan.behind is not None
        while True:
            try:
                relay = open_relay(
                    url_of(self.plan.behind, BEHIND),
                    revision=self.plan.behind_era,
                    limits=LIMITS,
                    state_keys=[bytes(32)],  # so that clients find their tasks again when it was restarted
                )
                server = await relay.__aenter__()
            except McpError as error:  # as a program that is started again until it can begin
                self.book.tell(f"the relay cannot begin: {error}"[:200])
                await trio.sleep(1)
                continue
            break
        try:
            yield self._protected(server)
        finally:
            await relay.__aexit__(None, None, None)

    def _check_accounts(self, host: Host) -> None:
        if host.server is None:
            self.book.broken(f"{host.name} is not up at the end")
            return
        left = {name: count for name, count in attrs.asdict(host.server.statistics()).items() if count}
        self.book.check(not left, f"{host.name} still has {left}\n{task_positions()}")

    # The faults.

    def step(self) -> None:
        """Between two steps of tasks: whatever is due happens."""
        if self.steps >= STEPS:
            self.next = 1 << 60
            self.book.broken(f"no end after {STEPS} steps\n{task_positions()}")
            self._scope.cancel()
            return
        fault = self._due[-1]
        if fault.kind == "cancel" and not self._open:
            self.next = self.steps + 1  # the next call is in time
            return
        self._due.pop()
        self.next = max(self._due[-1].at, self.steps + 1) if self._due else STEPS
        self._happen(fault)

    def _happened(self, fault: Fault) -> None:
        self.book.fired[fault.kind] += 1
        if fault.kind not in HARMLESS:
            self.book.harms += 1

    def _happen(self, fault: Fault) -> None:
        self.book.tell(f"{fault.kind} {fault.victim} {fault.seconds}")
        self._happened(fault)
        kind, seconds = fault.kind, fault.seconds
        if kind in ("pause", "away", "outage"):
            self._happen_to_replicas(fault)
            return
        host = self._hosts[fault.victim % len(self._hosts)]
        visitor = self.visitors[fault.victim % len(self.visitors)]
        if kind in ("crash", "restart", "drain"):
            self._standstill.go_on(host.name)
        if kind == "crash":
            host.die(seconds)
        elif kind == "restart":
            host.stop(seconds)
        elif kind == "drain":
            host.drain(seconds, 1.0)
        elif kind == "unreachable":
            ports = [each.port for each in self._hosts] + [AUTHORITY] * self.plan.oauth
            self._network.unreachable(ports[fault.victim % len(ports)], seconds, silent=fault.back)
        elif kind == "kill":
            self._network.crash(who=visitor.name)
            visitor.stop(seconds)
        elif kind == "leave":
            visitor.stop(seconds)
        elif kind == "revoke":
            self._refused |= self._authority.tokens.keys()
        elif kind == "cancel":
            call, scope = self._open[fault.victim % len(self._open)]
            call.touched = True
            scope.cancel()
        else:
            self._nursery.start_soon(
                partial(hostile, fault.victim, self.plan.transport, self._network, self._network.dial)
            )

    def _happen_to_replicas(self, fault: Fault) -> None:
        victim = fault.victim % len(self._hosts)
        if fault.kind == "pause":
            self._standstill.stop(self._hosts[victim].name)
            self.start(self._go_on_later, self._hosts[victim].name, fault.seconds)
            return
        for place, reached in self._reached.items():
            if fault.kind == "outage" or place == victim:
                reached.lose(fault.seconds, silent=fault.back)

    async def _go_on_later(self, name: str, seconds: float) -> None:
        await trio.sleep(seconds)
        self._standstill.go_on(name)
