"""Replicas: the runs of one server in several processes that share a store, behind a proxy that may pick any of them.

A run joins the replicas of its server when it begins to serve HTTP, if the server was given a store (`Run.share`).
This module has membership and messages.  `forwarding` has the retries of calls that wait in another replica.
`http.shared_sessions`, `http.shared_streams` and `http.shared_endpoint` have the sessions of the legacy revisions.

| Fact | Form | Writer |
|---|---|---|
| a replica, and the fingerprints of its keys | a row, held by a lease | itself; another one after its lease |
| a change of a list or a resource | a message to all | the replica where it happened |
| a fact that must not be lost | a row or a stream; a message wakes the reader | `forwarding`, `shared_sessions` |

Messages may be lost, while the store is away or this process does not read.  Then the store says so (`Resync`), and

- the listeners of this process are told of every change that they listen to, because each may have happened;
- the functions in `on_gap` read the rows and streams that they wait for.

A replica is *alive* as long as its row names it as the holder.  Its lease ends `LEASE` seconds after it has stopped,
or at once where the store notices the end of a process.  A replica that was suspended for longer finds its row gone: it
joins again, and takes this for a gap.  It does not finish calls that others have taken over (`forwarding`).

A call that needs nothing from another replica waits for no store.  Other calls wait for it for `QUICKLY` seconds.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import trio

from trio_mcp.core.errors import CannotServe
from trio_mcp.core.messages import JsonObject
from trio_mcp.core.subscriptions import ChangeEvent, ChangeKind
from trio_mcp.stores.leases import Lease
from trio_mcp.stores.rows import Resync, Row, StoreFailed, StoreFull, wall_time
from trio_mcp.transport.nursery import open_nursery

if TYPE_CHECKING:
    from trio_mcp.server.run import Run
    from trio_mcp.stores.rows import Store

__all__ = ["LEASE", "QUICKLY", "CannotContinue", "Replica", "text_for_clients"]

_log = logging.getLogger("trio_mcp")
T = TypeVar("T")

LEASE: Final = 15.0
"""Seconds after which a replica that has not renewed its lease is taken for dead."""
QUICKLY: Final = 1.0
"""Seconds that a request waits for the store."""
_PERIOD: Final = LEASE / 3
_AGAIN: Final = 1.0  # seconds until a store that failed is tried again
_CLOSING: Final = 2.0  # seconds for the last writes of a run that ends
_PAGE: Final = 100  # rows that are read at once
_KEPT: Final = 24 * 3600.0  # seconds for which the row of a replica stays without a renewal
_TOLD: Final = 64 * 1024  # characters of changes in one message; more of them are told as a gap
_MOST: Final = 1000  # changes in one message, or that are remembered
_RECENT: Final = 10.0  # seconds for which changes are remembered: a session is handed over in less


class CannotContinue(StoreFailed):
    """A session cannot continue here, for a reason that its client may know.  The store works.

    Its client may try again after `seconds`.
    """

    def __init__(self, why: str, *, seconds: int = 1) -> None:
        super().__init__(why)
        self.seconds = seconds


def text_for_clients(error: StoreFailed | StoreFull) -> str:
    """Tell a client that the store fails.  The cause is in the log alone: it may name machines and files."""
    if isinstance(error, StoreFull | CannotContinue):
        return str(error)
    _log.error("%s", error)
    return "the store of the replicas does not work; try again later"


class Replica:
    """The place of one run among the replicas of its server."""

    def __init__(self, run: Run) -> None:
        store = run.server._store
        assert store is not None  # `Run.share` has checked it
        self.store: Store = store
        self.name: str = secrets.token_urlsafe(9)
        self.server_name: str = run.server._info["name"]
        """The part of all names in the store that keeps servers apart that share it."""
        self.hears: dict[str, list[Callable[[JsonObject], object]]] = {}
        """The receivers of messages, by their subject; also of those that this replica sends to all."""
        self.on_gap: list[Callable[[], object]] = []
        """Called when messages may have been lost."""
        self._nursery: trio.Nursery | None = None  # while it runs
        self._lease = Lease(store, self.name, LEASE)
        self._run = run
        self._kind = f"replica {self.server_name}"
        self._to_all = f"replicas of {self.server_name}"
        self._changes: dict[ChangeEvent, None] = {}  # to be told to the others
        self._sending: dict[ChangeEvent, None] = {}  # those that are told at the moment
        self._recent: dict[ChangeEvent, float] = {}  # when each was told or heard of, the oldest first
        self._forgotten = -inf  # the time of the last one that is not in there
        self._changed = trio.Event()
        self.hears["change"] = [self._hear_changes]

    # The life of a replica.

    async def run(self, task_status: trio.TaskStatus[Replica] = trio.TASK_STATUS_IGNORED) -> None:
        """Be a replica until this is cancelled.  Raises `CannotServe` and `StoreFailed` before it has started."""
        async with self.store:
            try:
                await self._join()
                async with open_nursery() as nursery:
                    await nursery.start(self._receive)
                    nursery.start_soon(self._tell_changes)
                    self._nursery = nursery
                    task_status.started(self)
                    try:
                        await self._keep_up()
                    finally:
                        self._nursery = None
            finally:
                with trio.CancelScope(deadline=trio.current_time() + _CLOSING, shield=True):
                    await self._leave()

    async def _join(self) -> None:
        """Become a replica.  Raises `CannotServe` if another one has keys that do not fit ours."""
        now, known = wall_time(), set[str]()
        await self._lease.renew(now)
        await self._wait_for_fitting_keys(known)  # first, so that a wrong replica disturbs no other one
        body = json.dumps({"keys": self._fingerprints}).encode()
        await self.store.add(Row(self._kind, self.name, body, created=now, expires=now + _KEPT, holder=self.name))
        if (theirs := await self._wrong_keys(known)) is not None:  # of one that has joined at the same time
            raise self._wrong(theirs)

    async def _wait_for_fitting_keys(self, known: set[str]) -> None:
        """Compare the keys.  A replica with other keys may have died, as this one before a restart."""
        deadline = trio.current_time() + LEASE + _PERIOD
        waits = False
        while (theirs := await self._wrong_keys(known)) is not None:
            if trio.current_time() >= deadline:
                raise self._wrong(theirs)
            if not waits:
                _log.warning("%s; waiting for %g s, because it may have died", self._wrong(theirs), LEASE)
            waits = True
            await trio.sleep(_AGAIN)
            await self._lease.renew(wall_time())

    async def _leave(self) -> None:
        try:
            if self._changes:  # of the last moment
                await self.send(None, "change", changes=[])
            await self.store.delete(self._kind, self.name)
            await self._lease.end()
        except StoreFailed as error:
            _log.error("%s", error)

    @property
    def _fingerprints(self) -> list[str]:
        return list(self._run.server._sealer.fingerprints)

    async def _wrong_keys(self, known: set[str]) -> str | None:
        """Compare the keys with those of all replicas that are not `known`.  Return the fingerprint of wrong ones.

        Each must be able to open what the other seals.  In a change of keys both have both, in any order.
        """
        await self._bury()
        ours, after = self._fingerprints, (-inf, "")
        while rows := await self.store.list(self._kind, "", after, _PAGE):
            after = rows[-1].created, rows[-1].key
            for row in rows:
                theirs: list[str] = json.loads(row.body)["keys"]
                if row.key not in known and row.key != self.name and not (ours[0] in theirs and theirs[0] in ours):
                    return theirs[0]
                known.add(row.key)
        return None

    def _wrong(self, theirs: str) -> CannotServe:
        here = f"the first here has the fingerprint {self._fingerprints[0]}"
        if self._run.server._own_keys:
            here = "here are none"
        return CannotServe(
            f"{self.server_name} cannot join its replicas in {self.store!r}: another one has other state_keys "
            f"({here}, there {theirs}); give all of them the same Server(state_keys=...), or the same "
            "TRIO_MCP_STATE_KEYS in the environment"
        )

    async def _keep_up(self) -> None:
        """Renew the lease, sweep, and bury the dead, until this is cancelled."""
        works = True
        while True:
            await trio.sleep(_PERIOD if works else _AGAIN)
            try:
                now = wall_time()
                await self._lease.renew(now)
                await self._bury()
                while await self.store.sweep(now):
                    pass
                row = await self.store.get(self._kind, self.name)
                if row is None or row.holder != self.name:  # we were taken for dead
                    await self.store.delete(self._kind, self.name)
                    await self._join()
                    self._gap()
                elif row.expires < now + _KEPT / 2:
                    await self.store.replace(attrs.evolve(row, expires=now + _KEPT))
                works = True
            except (StoreFailed, StoreFull, CannotServe) as error:
                if works or isinstance(error, CannotServe):  # a store that is away is told of once
                    _log.error("%s", error)
                works = False
                self._lease.spare_others()

    async def _bury(self) -> None:
        """Delete the rows of replicas whose leases have ended, and tell all changes: their last ones may be lost."""
        if not self._lease.may_claim:
            return
        dead = await self.store.claim(self._kind, self.name, wall_time(), _PAGE)
        for row in dead:
            await self.store.delete(self._kind, row.key)
        if dead:
            self._all_changed()
            await self.send(None, "change", changes=[])

    async def alive(self, name: str) -> bool:
        """Whether this replica still has a lease.  Raises `StoreFailed`."""
        await self._bury()
        row = await self.store.get(self._kind, name)
        return row is not None and row.holder == name

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any, name: str) -> bool:
        """Start a task that ends with this replica.  False if it has ended."""
        if self._nursery is None:
            return False
        self._nursery.start_soon(function, *args, name=name)
        return True

    # Messages.

    async def quickly(self, call: Awaitable[T]) -> T:
        """Return the result of a call of the store.  Raises `StoreFailed` if it takes too long."""
        with trio.move_on_after(QUICKLY):
            return await call
        raise StoreFailed(f"the store of the replicas has not answered for {QUICKLY:g} s")

    async def send(self, to: str | None, subject: str, **members: Any) -> None:
        """Send a message to one replica, or with None to all others.  It may be lost.  Raises `StoreFailed`."""
        channel = self._to_all if to is None else f"{self._to_all}: {to}"
        await self.store.send(channel, json.dumps({"from": self.name, "subject": subject, **members}).encode())

    async def _receive(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        channels, started = [self._to_all, f"{self._to_all}: {self.name}"], False
        while True:
            try:
                async with self.store.receive(channels) as messages:
                    if started:
                        self._gap()
                    else:
                        started = True
                        task_status.started()
                    async for message in messages:
                        if isinstance(message, Resync):
                            self._gap()
                        else:
                            self._hear(message[1])
            except StoreFailed as error:
                if not started:
                    raise
                _log.error("%s", error)
                await trio.sleep(_AGAIN)

    def _hear(self, body: bytes) -> None:
        message = json.loads(body)
        # A replica of another version may have subjects that are unknown here.
        for receiver in self.hears.get(message["subject"], ()):
            receiver(message)

    def _gap(self) -> None:
        """Messages may have been lost."""
        self._all_changed()
        for look in tuple(self.on_gap):
            look()

    # Changes.

    @property
    def untold(self) -> set[ChangeEvent]:
        """The changes that this replica has not begun to tell the others, and will tell them."""
        return {*self._changes}

    def changes_since(self, time: float) -> Collection[ChangeEvent] | None:
        """The changes that this replica has told or heard of since then, or will tell of.  None: perhaps all."""
        if time <= self._forgotten:
            return None
        return {*self._changes, *self._sending, *(change for change, at in self._recent.items() if at >= time)}

    def _remember(self, changes: Iterable[ChangeEvent]) -> None:
        now = trio.current_time()
        for change in changes:
            self._recent.pop(change, None)
            self._recent[change] = now
        while self._recent:
            oldest, at = next(iter(self._recent.items()))
            if at >= now - _RECENT and len(self._recent) <= _MOST:
                break
            del self._recent[oldest]
            self._forgotten = at

    def _all_changed(self) -> None:
        """Notify the listeners of this process of every change."""
        self._forgotten = trio.current_time()
        self._run.publish_here(None)

    def announce(self, change: ChangeEvent) -> None:
        """Tell the other replicas of a change.  The changes that happen while the store is away are told afterwards."""
        if len(self._changes) < _MOST:
            self._changes[change] = None
        else:  # one more is told with them as a gap
            self._forgotten = trio.current_time()
        self._changed.set()

    async def _tell_changes(self) -> None:
        """Send the announced changes, each batch as one message."""
        while True:
            await self._changed.wait()
            await trio.sleep(self._run.server._change_debounce)
            self._changed = trio.Event()
            changes = self._sending = self._changes
            self._changes = {}
            told = [[each.kind.name, each.item] for each in changes]
            if len(changes) >= _MOST or sum(len(item) for _, item in told) > _TOLD:
                told = []  # all changes of the others may have happened
            sent = False
            try:
                await self.send(None, "change", changes=told)
                sent = True
                self._remember(changes)
            except StoreFailed as error:
                _log.error("%s", error)
                self._changed.set()
                await trio.sleep(_AGAIN)
            finally:
                if not sent:  # also if this replica ends; then `_leave` tells of them
                    self._changes = {**changes, **self._changes}
                self._sending = {}

    def _hear_changes(self, message: JsonObject) -> None:
        if message["from"] == self.name:
            return
        if not message["changes"]:
            self._all_changed()
        changes = [ChangeEvent(ChangeKind[kind], item) for kind, item in message["changes"]]
        self._remember(changes)
        for change in changes:
            self._run.publish_here(change)
