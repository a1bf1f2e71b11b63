"""One run of a plan: it starts the programs, applies the faults, and checks that nothing is left at the end.

A world has three phases.  In the first, the clients make their moves and the faults happen.  In the second, no faults
happen any more, dead connections are reset, and the sessions and tasks of absent clients expire.  After it, every
account of the server must be empty.  In the third, the programs end.  After it, no task and no open connection may be
left.

The plan also decides the order of tasks, the time, and the random bytes of the operating system.
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
from tests.simulation.clients import ClientProgram
from tests.simulation.monitor import Call, Monitor
from tests.simulation.network import Network
from tests.simulation.plan import HARMLESS, Fault, Plan
from tests.simulation.replicas import UNAVAILABLE, ProcessPauser, ReplicaStore, leftovers, sessions_of
from tests.simulation.servers import (
    AUTHORITY_PORT,
    ISSUER,
    LIMITS,
    REPLICA_PORT,
    SERVER_PORT,
    TIGHT_LIMITS,
    UPSTREAM_PORT,
    Service,
    build_server,
    opened,
    protect,
    run_authorization_server,
    run_hostile_client,
    url_of,
)
from tests.simulation.tasks import check_tasks
from trio_mcp import McpError, OAuth, Server
from trio_mcp.client import ClientOptions
from trio_mcp.relay import open_relay
from trio_mcp.stores import MemoryStore, StoreFailed
from trio_mcp.testing import seeded

__all__ = ["Result", "play"]

MAX_SECONDS = 2 * 3600.0  # of the first phase; a longer wait is endless
RELAY_CROSSINGS = 14  # messages, one after another, until a session over HTTP+SSE is open and listens
EXPIRY_SECONDS = 300.0  # after which all sessions and tasks have expired
SHUTDOWN_SECONDS = 5.0  # for a program to end, and for its peers to notice
TASK_CANCEL_SECONDS = 2.0  # in which a client waits for the answer to tasks/cancel when its call is cancelled
MAX_STEPS = 400_000  # of tasks; a world with more steps has an endless loop
EPOCH = 1_800_000_000.0
_gmtime = time.gmtime
_BYTE_FAULTS = frozenset({"cut", "end", "dead", "stall", "slow"})


@attrs.frozen
class Result:
    """The result of a world."""

    plan: Plan
    violations: tuple[str, ...]
    transcript: tuple[str, ...]
    outcomes: tuple[str, ...]
    moves: int
    fired: tuple[str, ...]
    steps: int


def play(plan: Plan) -> Result:
    """Run the world of a plan."""
    clock = MockClock(autojump_threshold=0)
    world = _World(plan, clock)
    with _fake_computer(plan, clock), _watched_log(world.monitor), seeded(plan.order):
        try:
            trio.run(world.run, clock=clock, instruments=[_StepCounter(world), *world.instruments])
        except Exception as error:  # noqa: BLE001  # any exception breaks a rule
            world.monitor.unexpected("the world", error)
    monitor = world.monitor
    if not monitor.violations:
        monitor.check_calls()
    return Result(
        plan,
        tuple(monitor.violations),
        tuple(monitor.transcript),
        tuple(call.outcome for call in monitor.calls.values()),
        sum(program.moves_made for program in world.programs),
        tuple(monitor.fired.elements()),
        world.steps,
    )


@contextlib.contextmanager
def _fake_computer(plan: Plan, clock: MockClock) -> Iterator[None]:
    """Replace the time and the random bytes of the whole process."""
    dice = random.Random(plan.order)

    def now() -> float:
        return EPOCH + clock.current_time()

    def gmtime(seconds: float | None = None) -> time.struct_time:
        return _gmtime(now() if seconds is None else seconds)

    collecting = gc.isenabled()
    gc.disable()  # the garbage collector would run finalizers at moments that the seed does not decide
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


class _ErrorHandler(logging.Handler):
    def __init__(self, monitor: Monitor) -> None:
        super().__init__(logging.ERROR)
        self._monitor = monitor

    def emit(self, record: logging.LogRecord) -> None:
        about = record.args if isinstance(record.args, tuple) else ()
        # Some records have the text of the error only, so that they keep no references.
        if self._monitor.harmful_faults and any(isinstance(each, StoreFailed) or each == UNAVAILABLE for each in about):
            self._monitor.trace(f"the log says {record.getMessage()!r}")
        elif record.exc_info and record.exc_info[1] is not None:
            self._monitor.unexpected(f"the log says {record.getMessage()!r}:", record.exc_info[1])
        else:
            self._monitor.report(f"the log says {record.getMessage()!r}")


@contextlib.contextmanager
def _watched_log(monitor: Monitor) -> Iterator[None]:
    """Report each error in the log as a broken rule."""
    handler = _ErrorHandler(monitor)
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


class _StepCounter(trio.abc.Instrument):
    """Counts the steps of all tasks, and applies faults between two of them."""

    def __init__(self, world: _World) -> None:
        self._world = world

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        world = self._world
        world.steps += 1
        if world.steps >= world.next_fault_step:
            world.apply_due_fault()


class _World:
    """A plan that runs."""

    def __init__(self, plan: Plan, clock: MockClock) -> None:
        self.plan = plan
        self.monitor = Monitor(clock.current_time)
        self.steps = 0
        self.programs = [ClientProgram(f"c{number}", client.moves, self) for number, client in enumerate(plan.clients)]
        self._due = sorted((each for each in plan.faults if each.kind not in _BYTE_FAULTS), key=lambda each: -each.at)
        self.next_fault_step = MAX_STEPS
        self._running_calls: list[tuple[Call, trio.CancelScope]] = []
        self._services: list[Service] = []
        self._authority = AuthServer(ISSUER, iss=ISSUER)
        self._refused: set[str] = set()
        self._auths: dict[str, OAuth] = {}
        self._scope = trio.CancelScope()
        self._pauser = ProcessPauser()
        self.instruments = [self._pauser] if plan.replicas > 1 else []
        self._stores: dict[int, ReplicaStore] = {}  # by the number of the replica

    # For the clients.

    async def target(self) -> Any:
        if self.plan.transport == "stream":
            return await self._network.dial("127.0.0.1", SERVER_PORT)
        return url_of(self.plan.transport, SERVER_PORT)

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
    def notifies_of_all_changes(self) -> bool:
        """Whether a listener gets every change.

        A relay confirms a subscription before its upstream server does, and cannot withdraw the confirmation if that
        server refuses.
        """
        return self.plan.behind != "json"

    @property
    def extra_listen_seconds(self) -> float:
        """Seconds until a relay listens to its upstream server, and for the transfer of large answers.

        A change waits behind large answers on the same connection.  They contain their text twice.
        """
        plan = self.plan
        large = sum(move.size for client in plan.clients for move in client.moves if move.kind == "big")
        windows = math.ceil(2 * large / plan.line.window)
        return plan.line.delay * (windows if plan.behind is None else 2 * windows + RELAY_CROSSINGS)

    @property
    def _authenticates(self) -> bool:
        return self.plan.transport != "stream" and not self.plan.oauth

    async def _visit(self, url: str) -> str:
        await trio.sleep(3)
        return f"{CALLBACK}?{self._authority.browse(url)}"

    @contextlib.contextmanager
    def cancellable(self, call: Call, scope: trio.CancelScope) -> Iterator[None]:
        self._running_calls.append((call, scope))
        try:
            yield
        finally:
            self._running_calls.remove((call, scope))

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
        self.monitor.check(not left, f"tasks are left: {sorted(task.name for task in left)}\n{task_positions()}")
        for connection in self._network.connections:
            ends = [name for name in ("client", "server") if not getattr(connection, name).closed]
            self.monitor.check(not ends, f"connection {connection.number} of {connection.owner} is left open: {ends}")

    async def _play(self, nursery: trio.Nursery) -> None:
        plan, monitor = self.plan, self.monitor
        faults = [each for each in plan.faults if each.kind in _BYTE_FAULTS]
        network = Network(plan.order, plan.line, faults, nursery, monitor.trace, self._count_fault)
        self._network = network
        with mock.patch.object(trio, "open_tcp_stream", network.dial):
            if plan.oauth:
                nursery.start_soon(run_authorization_server, self._authority, network.listen(AUTHORITY_PORT))
            await self._start_services(nursery)
            with trio.move_on_after(MAX_SECONDS) as patience:
                async with trio.open_nursery() as playing:
                    for program in self.programs:
                        playing.start_soon(program.run, name=f"client {program.name}")
            if patience.cancelled_caught:
                monitor.report(f"the world does not end\n{task_positions()}")
            self.next_fault_step = MAX_STEPS
            monitor.trace("the world heals")
            network.heal()
            for service in self._services:
                self._pauser.resume(service.name)
            for store in self._stores.values():
                store.heal()
            await check_tasks(monitor)
            await trio.sleep(EXPIRY_SECONDS)
            if self._stores:
                left = leftovers(monitor.store)
                monitor.check(not left, f"the store still has {left}")
            for service in reversed(self._services):  # first the relay, which keeps sessions with its upstream server
                self._check_accounts(service)
                service.end()
                await trio.sleep(SHUTDOWN_SECONDS)
            nursery.cancel_scope.cancel()

    async def _start_services(self, nursery: trio.Nursery) -> None:
        plan, monitor = self.plan, self.monitor
        if plan.transport != "stream" and plan.behind is None:
            monitor.principals = lambda client: client
        if plan.transport != "stream":
            monitor.front_principals = lambda client: client
        monitor.has_relay = plan.behind is not None
        monitor.closable_responses = not {plan.transport, plan.behind} <= {"stream", "websocket", "sse", None}
        # It crosses the line as often as this: to connect, with the request, and with the answer.
        monitor.loses_cancellations_of_tasks = monitor.closable_responses and 3 * plan.line.delay > TASK_CANCEL_SECONDS
        # JSON responses have no room for questions.  In a legacy session a relay cannot know to which of several calls
        # a question belongs.
        monitor.can_ask = plan.transport != "json" and plan.behind is None
        monitor.can_notify = "json" not in (plan.transport, plan.behind)
        monitor.harmful_faults = int(plan.tight)  # requests beyond its limits are refused
        front = self._relay if plan.behind is not None else self._server
        if plan.behind is not None:
            self._services.append(
                Service(
                    "behind", UPSTREAM_PORT, plan.behind, self._network, monitor, lambda: opened(build_server(monitor))
                )
            )
        if plan.replicas > 1:
            monitor.sessions = lambda client: sessions_of(monitor.store, client, time.time())
            monitor.has_replicas = True
            ports = range(REPLICA_PORT, REPLICA_PORT + plan.replicas)
            self._network.balance(SERVER_PORT, ports)
            served = [(f"replica {number}", port, partial(self._replica, number)) for number, port in enumerate(ports)]
        else:
            served = [("server", SERVER_PORT, front)]
        for name, port, make in served:
            self._services.append(
                Service(
                    name,
                    port,
                    plan.transport,
                    self._network,
                    monitor,
                    make,
                    authenticate=self._authenticates,
                    single=plan.scattered,
                )
            )
        for service in self._services:
            nursery.start_soon(service.run, name=f"service {service.name}")
            await (service.serving if plan.replicas > 1 else service.up).wait()
        self._due = [attrs.evolve(each, at=each.at + self.steps) for each in self._due]
        self.next_fault_step = self._due[-1].at if self._due else MAX_STEPS

    def _server(self) -> AbstractAsyncContextManager[Server]:
        if not self.plan.kept:
            self.monitor.store = MemoryStore()  # the store ends with the process
        limits = TIGHT_LIMITS if self.plan.tight else LIMITS
        # Every fourth world has fresh servers with fresh keys.  A protected server is always fresh, because protection
        # cannot be removed for the next world.
        return opened(
            self._protected(build_server(self.monitor, limits, fresh=self.plan.oauth or self.plan.order % 4 == 0))
        )

    def _replica(self, number: int) -> AbstractAsyncContextManager[Server]:
        before = self._stores.get(number)
        self._stores[number] = store = ReplicaStore(self.monitor.store, self.monitor, self.plan.lag)
        if before is not None:
            store.copy_outage(before)
        limits = TIGHT_LIMITS if self.plan.tight else LIMITS
        return opened(build_server(self.monitor, limits, fresh=self.plan.order % 4 == 0, number=number, store=store))

    def _protected(self, server: Server) -> Server:
        return protect(server, self._authority, self._refused) if self.plan.oauth else server

    @contextlib.asynccontextmanager
    async def _relay(self) -> Any:
        assert self.plan.behind is not None
        while True:
            try:
                relay = open_relay(
                    url_of(self.plan.behind, UPSTREAM_PORT),
                    revision=self.plan.behind_era,
                    limits=LIMITS,
                    state_keys=[bytes(32)],  # the same after a restart, so that clients find their tasks again
                )
                server = await relay.__aenter__()
            except McpError as error:  # a supervisor starts the program again until it succeeds
                self.monitor.trace(f"the relay cannot begin: {error}"[:200])
                await trio.sleep(1)
                continue
            break
        try:
            yield self._protected(server)
        finally:
            await relay.__aexit__(None, None, None)

    def _check_accounts(self, service: Service) -> None:
        if service.server is None:
            self.monitor.report(f"{service.name} is not up at the end")
            return
        left = {name: count for name, count in attrs.asdict(service.server.statistics()).items() if count}
        self.monitor.check(not left, f"{service.name} still has {left}\n{task_positions()}")

    # The faults.

    def apply_due_fault(self) -> None:
        """Apply the fault that is due, between two steps of tasks."""
        if self.steps >= MAX_STEPS:
            self.next_fault_step = 1 << 60
            self.monitor.report(f"no end after {MAX_STEPS} steps\n{task_positions()}")
            self._scope.cancel()
            return
        fault = self._due[-1]
        if fault.kind == "cancel" and not self._running_calls:
            self.next_fault_step = self.steps + 1  # wait for a call that can be cancelled
            return
        self._due.pop()
        self.next_fault_step = max(self._due[-1].at, self.steps + 1) if self._due else MAX_STEPS
        self._apply(fault)

    def _count_fault(self, fault: Fault) -> None:
        self.monitor.fired[fault.kind] += 1
        if fault.kind not in HARMLESS:
            self.monitor.harmful_faults += 1

    def _apply(self, fault: Fault) -> None:
        self.monitor.trace(f"{fault.kind} {fault.victim} {fault.seconds}")
        self._count_fault(fault)
        kind, seconds = fault.kind, fault.seconds
        if kind in ("pause", "away", "outage"):
            self._apply_to_replicas(fault)
            return
        service = self._services[fault.victim % len(self._services)]
        program = self.programs[fault.victim % len(self.programs)]
        if kind in ("crash", "restart", "drain"):
            self._pauser.resume(service.name)
        if kind == "crash":
            service.kill(seconds)
        elif kind == "restart":
            service.stop(seconds)
        elif kind == "drain":
            service.drain(seconds, 1.0)
        elif kind == "unreachable":
            ports = [each.port for each in self._services] + [AUTHORITY_PORT] * self.plan.oauth
            self._network.unreachable(ports[fault.victim % len(ports)], seconds, silent=fault.back)
        elif kind == "kill":
            self._network.crash(owner=program.name)
            program.stop(seconds)
        elif kind == "leave":
            program.stop(seconds)
        elif kind == "revoke":
            self._refused |= self._authority.tokens.keys()
        elif kind == "cancel":
            call, scope = self._running_calls[fault.victim % len(self._running_calls)]
            call.cancelled_from_outside = True
            scope.cancel()
        else:
            self._nursery.start_soon(
                partial(run_hostile_client, fault.victim, self.plan.transport, self._network, self._network.dial)
            )

    def _apply_to_replicas(self, fault: Fault) -> None:
        victim = fault.victim % len(self._services)
        if fault.kind == "pause":
            self._pauser.pause(self._services[victim].name)
            self.start(self._resume_later, self._services[victim].name, fault.seconds)
            return
        for number, store in self._stores.items():
            if fault.kind == "outage" or number == victim:
                store.disconnect(fault.seconds, silent=fault.back)

    async def _resume_later(self, name: str, seconds: float) -> None:
        await trio.sleep(seconds)
        self._pauser.resume(name)
