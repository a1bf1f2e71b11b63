"""One server, over as many sessions as it takes, and what a client has for it.

A `Keeper` opens a session with a target, has its own task hold it, and gives whoever asks the session of the moment.
What ends a connection is raised by the calls that wait, at once, and by each later one; nothing is raised in the
background.  One end is not for good: a session that an HTTP server has lost is opened anew, once for all who need it
(http-58), with everything that was listened to, in the revision that was spoken.

Who calls waits for one attempt, and hears what came of it.  Without a call there are some more, after a while each, as
a server that restarts may need it: a session is there to be heard, too.  Then those who listen hear what came of them.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import TypeVar

import attrs
import trio

from trio_mcp.client.answering import Answering
from trio_mcp.client.asked import UrlElicitationRequest
from trio_mcp.client.caller import Caller, Failure, OnProgress, SessionLost, Timer, failure_of
from trio_mcp.client.connecting import Connector, OpenSession, SessionOptions
from trio_mcp.client.options import note_missing_options
from trio_mcp.client.subscriptions import SubscriptionManager
from trio_mcp.core.cache import ResponseCache
from trio_mcp.core.codec import from_json
from trio_mcp.core.errors import (
    McpError,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    SessionClosed,
    UsageError,
    repeated,
)
from trio_mcp.core.http.fields import Fields, Mirror
from trio_mcp.core.jsonrpc import JsonObject, Limits, Notification
from trio_mcp.core.models import LoggingMessageParams
from trio_mcp.core.oauth.errors import AuthorizationFailed
from trio_mcp.core.outcomes import Answered, Outcome
from trio_mcp.core.session import Call, Notice, Offer
from trio_mcp.core.subscriptions import ChangeKind, change_of
from trio_mcp.core.terms import Terms
from trio_mcp.transport.duplex import Tap
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.workers import called

__all__ = ["ClientParts", "Keeper", "terms_of"]

T = TypeVar("T")

_log = logging.getLogger("trio_mcp.client")

_SET_LEVEL = "logging/setLevel"
_DEVIATIONS = 100  # that are kept, the newest; who wants all of them has the log
# Seconds that a session which has opened waits for the server to take the level of its log: by HTTP a call could
# overtake that.  Beyond it the session is of use all the same, whatever the server makes of it.
_LEVEL = 1.0
_CLOSING = 30.0  # seconds that closing may take at the very most, whatever its parts are bounded by

# Seconds from the loss of a session to each attempt to open another that nobody has called for.  A server that has
# forgotten its sessions is there at once as a rule, and one that restarts has a quarter of a minute.
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0)
# Seconds after which a session has held.  As long as the longest pause, or a server that loses each session at once
# would be asked for another without end.
_HELD = 8.0


@attrs.frozen(eq=False, repr=False)
class ClientParts:
    """What a client has for its server, and wants of it, in every session."""

    answering: Answering
    on_log: Callable[[LoggingMessageParams], object] | None
    on_elicitation_complete: Callable[[UrlElicitationRequest], object] | None
    on_notification: Callable[[str, JsonObject], object] | None
    log_level: str | None
    ping_seconds: float | None
    caches: bool
    forget_tools: Callable[[], object]
    """Called when what was learnt of the server's tools may not hold any more."""


class Keeper:
    """See the head of this file.  It is the `Talk` of its sessions."""

    def __init__(
        self,
        connector: Connector,
        offer: Offer,
        limits: Limits,
        household: ClientParts,
        *,
        headers: Callable[[], Fields],
        mirrors: Callable[[str], Sequence[Mirror]],
        tap: Tap | None,
    ) -> None:
        self._connector = connector
        self._household = household
        self._log_level = household.log_level
        self._manner = SessionOptions(offer, self, limits, headers, mirrors, tap)
        self._nursery: trio.Nursery | None = None
        self._run: trio.lowlevel.TrioToken | None = None  # in which it lives
        self._connection: OpenSession | None = None
        self._ending = self._over = trio.Event()  # of the session at hand
        self._opened_at = 0.0
        self._levelled = trio.Event()  # the server has said what it makes of the level, or need not be told
        self._renewing: trio.Event | None = None
        self._attempts = 0  # to open a session that nobody has called for, since one has held
        self._unopened: McpError | None = None  # what came of the last attempt that failed
        self._closing = trio.Event()
        self._closed = trio.Event()
        self.gone = trio.Event()
        """Set when the connection has ended, and this client opens no other."""
        self.listening = SubscriptionManager(limits)
        self.deviations: deque[str] = deque(maxlen=_DEVIATIONS)
        self._shared: dict[Hashable, _SharedRequest] = {}
        self._told_of: set[str] = set()  # methods of notifications that are in `deviations` for this session
        self.cache: ResponseCache | None = None
        """Of the session at hand, unless the client wants none."""

    # Its life.

    async def live(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        failure: Failure | None = None
        self._run = trio.lowlevel.current_trio_token()
        try:
            async with open_nursery() as nursery:
                self._nursery = nursery
                await self._connect(self._manner.offer)
                task_status.started()
                await self._closing.wait()
                await self._part()
        except McpError as error:
            failure = repeated(error)
            raise
        finally:
            self._closing.set()
            self.gone.set()
            self.listening.closed(failure)
            self._closed.set()

    async def _connect(self, offer: Offer) -> None:
        assert self._nursery is not None
        ending, over = trio.Event(), trio.Event()
        manner = attrs.evolve(self._manner, offer=offer, closing=ending)

        async def hold(task_status: trio.TaskStatus[OpenSession]) -> None:
            try:
                await self._connector(manner, task_status)
            finally:
                over.set()

        connection = await self._nursery.start(hold, name="a session with the server")
        self._connection, self._ending, self._over = connection, ending, over
        self._opened_at = trio.current_time()
        caller = connection.caller
        terms = terms_of(caller)
        self.cache = ResponseCache(terms.revision) if self._household.caches else None
        self._household.forget_tools()
        self._told_of.clear()
        if self._household.ping_seconds is not None:
            self._nursery.start_soon(caller.watch, self._household.ping_seconds, name="pings of the server")
        self._levelled = trio.Event()
        if caller.failure is None and self._log_level is not None and terms.declares("logging"):
            self._ask_for_log(caller, self._log_level)  # before others take all the room for requests
        else:
            self._levelled.set()
        self.listening.attach(caller)
        if caller.failure is not None:  # so soon
            self.connection_lost(caller.failure)
        with trio.move_on_after(_LEVEL):
            await self._levelled.wait()

    def _ask_for_log(self, caller: Caller, level: str) -> None:
        if terms_of(caller).revision.handshake:
            caller.begin(_SET_LEVEL, {"level": level})
            caller.handle_events(())  # so that it is sent
        else:
            caller.session.log_level = level  # each request says so, from now on
            self._levelled.set()

    async def _part(self) -> None:
        self._ending.set()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSING):
            await self._over.wait()

    async def aclose(self) -> None:
        self.check_run()
        self._closing.set()
        await self._closed.wait()

    # The session of the moment.

    @property
    def connection(self) -> OpenSession:
        assert self._connection is not None  # nobody has a client that was not opened
        return self._connection

    def check_run(self) -> None:
        """Raise UsageError in another run of Trio, or in none: nothing here may be touched from there."""
        try:
            run = trio.lowlevel.current_trio_token()
        except RuntimeError:
            run = None
        if run is not self._run:
            raise UsageError(
                "this client lives in another trio.run; from a thread, have it called there: "
                "trio.from_thread.run(client.call_tool, ..., trio_token=...)"
            )

    async def caller(self) -> Caller:
        """Whom to ask now; a session that the server has lost is opened anew first."""
        self.check_run()
        return self._ready() or await self._usable()

    def _ready(self) -> Caller | None:
        """Whom to ask now, if there is somebody without further ado."""
        connection = self._connection
        if connection is None or connection.caller.failure is not None or self._closing.is_set():
            return None
        return connection.caller

    async def _usable(self) -> Caller:
        anew = False
        while True:
            if self._closing.is_set() or self.connection.caller.failure is not None:
                await trio.lowlevel.checkpoint_if_cancelled()  # for that may be why
            if self._closing.is_set():
                raise _closed()
            failure = self.connection.caller.failure
            if failure is None:
                return self.connection.caller
            error = failure()
            if anew or not isinstance(error, SessionLost):  # http-58: a server that loses each session has none
                raise error
            await self._renewed()
            anew = True

    async def _renewed(self) -> None:
        """Wait until the session was opened anew; raises if it could not be."""
        before = self._connection
        await self._attempt()
        if self._connection is before and not self._closing.is_set():
            raise self._not_renewed()

    def _not_renewed(self) -> SessionClosed:
        error = SessionClosed(f"the server has lost the session, and another could not be opened: {self._unopened}")
        error.__cause__ = self._unopened
        return error

    async def _persist(self, failure: Failure) -> None:
        """Have a session, whether anybody calls or not: for those who listen, and for what a server says unasked."""
        lost = self._connection
        for pause in _PAUSES[self._attempts :]:
            self._attempts += 1
            await trio.sleep(pause)
            if self._connection is lost:
                await self._attempt()
            if self._connection is not lost:
                return
            if isinstance(self._unopened, AuthorizationFailed) and not self._unopened.passes:
                break  # nobody is asked again who has said no, before somebody calls
        self.listening.connection_lost(failure if self._unopened is None else self._not_renewed)

    async def _attempt(self) -> None:
        """Wait for the one attempt, in a task that no caller's cancellation reaches, to open the session anew."""
        if self._renewing is None:
            assert self._nursery is not None
            self._renewing = trio.Event()
            self._nursery.start_soon(self._renew, self._renewing, name="the session is opened anew")
        await self._renewing.wait()

    async def _renew(self, done: trio.Event) -> None:
        try:
            self._ending.set()
            revision = terms_of(self.connection.caller).revision
            await self._connect(attrs.evolve(self._manner.offer, revisions=(revision,)))
        except McpError as error:
            _log.warning("the session was lost, and could not be opened anew: %s", error)
            self._unopened = error
        finally:
            self._renewing = None
            done.set()

    async def ask(
        self,
        method: str,
        params: JsonObject,
        on_progress: OnProgress | None = None,
        headers: Fields = (),
        timer: Timer | None = None,
    ) -> JsonObject:
        """One request, made a second time only where the first is known not to have been carried out."""
        if timer is not None and not timer.running:
            return await timer.run(method, lambda: self.ask(method, params, on_progress, headers, timer))
        self.check_run()
        if not (on_progress is None or callable(on_progress)):
            raise UsageError(f"on_progress is a function, not {type(on_progress).__name__}")
        again = False
        while True:
            caller = self._ready() or await self._usable()
            try:
                return await caller.request(method, params, on_progress=on_progress, headers=headers, timer=timer)
            except RequestError as error:
                note_missing_options(error)
                raise
            except SessionLost as error:
                if again or error.request_may_have_run:
                    raise
            again = True
            await caller.closed.wait()  # until it is known what has become of all others that were sent

    # As its sessions have it.

    async def answer(self, call: Call) -> JsonObject:
        return await self._household.answering.answer(call.request.method, call.request.params, call.terms)

    def notice(self, notice: Notice) -> None:
        note = notice.notification
        if self.cache is not None:
            self.cache.changed(note.method, note.params)
        if note.method == ChangeKind.TOOLS.method:
            self._household.forget_tools()
        household = self._household
        if note.method == "notifications/message" and household.on_log is not None:
            self._hear_log(note.params)
        elif note.method == "notifications/elicitation/complete" and household.on_elicitation_complete is not None:
            _tell(household.on_elicitation_complete, household.answering.finished(note.params))
        elif not self.listening.receive(notice):
            self._unheard(note, notice.terms)

    def _unheard(self, note: Notification, terms: Terms) -> None:
        """Nothing here waits for this."""
        change = change_of(note)
        if change is not None and note.method not in self._told_of and not change.kind.declared_in(terms.capabilities):
            self._told_of.add(note.method)
            self.mistake(f"it sends {note.method}, which it does not declare; listen(..., undeclared=True) hears that")
        callback = self._household.on_notification
        if callback is not None:
            _tell(lambda note: callback(note.method, note.params), note)

    def _hear_log(self, params: JsonObject) -> None:
        try:
            _tell(self._household.on_log, from_json(LoggingMessageParams, params))
        except RemoteProtocolError as error:
            self.mistake(str(error))

    async def set_log_level(self, level: str | None, timer: Timer | None) -> None:
        """Raises NotInThisRevision for None in the legacy era, whose servers cannot be told to stop."""
        caller = await self.caller()
        revision = terms_of(caller).revision
        if level is None and revision.handshake:
            raise NotInThisRevision(f"{_SET_LEVEL} without a level", revision.name, 'set_log_level("emergency")')
        self._log_level = level
        if revision.handshake:
            await self.ask(_SET_LEVEL, {"level": level}, timer=timer)
        else:
            caller.session.log_level = level  # each request says so, from now on

    async def share(self, key: Hashable, ask: Callable[[], Awaitable[JsonObject]]) -> JsonObject:
        """The result of `ask`, which is called once for all that wait under an equal key at the same time."""
        shared = self._shared.get(key)
        if shared is None:
            assert self._nursery is not None
            shared = self._shared[key] = _SharedRequest()
            self._nursery.start_soon(shared.run, ask, name="a request for several callers")
        try:
            return await shared.wait()
        finally:
            if not shared.wanted and self._shared.get(key) is shared:
                del self._shared[key]

    def ended(self, outcome: Outcome, failure: Failure | None) -> None:
        if outcome.method != _SET_LEVEL:
            self.listening.ended(outcome, failure)
            return
        self._levelled.set()
        if not isinstance(outcome, Answered) and self.connection.caller.failure is None:
            why = failure_of(outcome, failure)()
            self.mistake(f"it declares logging, and could not be told the level: {why}")

    def missed(self, *, for_good: bool) -> None:
        if not for_good:
            self._household.forget_tools()
        self.listening.missed(for_good=for_good)

    def mistake(self, why: str) -> None:
        self.deviations.append(why)
        _log.info("the server: %s", why)

    def loss(self, why: str) -> None:
        """A mistake by which something that the server has cannot be used (http-86)."""
        self.deviations.append(why)
        _log.warning("the server: %s", why)

    def connection_lost(self, failure: Failure) -> None:
        if self._closing.is_set() or self._connection is None or self._connection.caller.failure is not failure:
            return  # the one that is lost has not been opened: whoever tries to hears of it
        if isinstance(failure(), SessionLost):
            self.listening.connection_lost()
            if trio.current_time() >= self._opened_at + _HELD:
                self._attempts = 0
            self._unopened = None
            assert self._nursery is not None
            self._nursery.start_soon(self._persist, failure, name="a session that nobody has called for")
        else:
            self.gone.set()
            self.listening.closed(failure)


class _SharedRequest:
    """A request that several callers wait for; it is cancelled when the last of them leaves."""

    def __init__(self) -> None:
        self._waiting = 0
        self._scope = trio.CancelScope()
        self._done = trio.Event()
        self._result: JsonObject | None = None
        self._failure: Failure = _closed

    @property
    def wanted(self) -> bool:
        """Whether it has no outcome yet, and somebody waits for one."""
        return self._waiting > 0 and not self._done.is_set()

    async def run(self, ask: Callable[[], Awaitable[JsonObject]]) -> None:
        try:
            with self._scope:
                self._result = await ask()
        except McpError as error:
            self._failure = repeated(error)
        finally:
            self._done.set()

    async def wait(self) -> JsonObject:
        self._waiting += 1
        try:
            await self._done.wait()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._scope.cancel(reason="nobody waits for the answer")
        if self._result is None:
            await trio.lowlevel.checkpoint_if_cancelled()  # the client may be closed because of that
            raise self._failure()
        return copy.deepcopy(self._result)


def _closed() -> McpError:
    return SessionClosed("the client has been closed")


def _tell(callback: Callable[[T], object] | None, what: T | None) -> None:
    if callback is None or what is None:
        return
    try:
        called(callback, what)
    except Exception:  # noqa: BLE001  # an author's callback may raise anything, and the link goes on
        _log.exception("a callback of the client has failed")


def terms_of(caller: Caller) -> Terms:
    """Those of a session that is open."""
    terms = caller.session.terms
    assert terms is not None
    return terms
