"""The connection of a client to one server, over several sessions.

A `Keeper` opens a session with a target, runs it in a task of its own, and gives callers the current session.  If the
connection ends, all waiting calls and all later calls raise its error; no background task raises.  If an HTTP server
loses the session, it is not the end: a new session is opened in the same revision, once for all callers (http-58), and
all subscriptions are renewed on it.

A call waits for one attempt to open a new session, and raises its error.  Without a call there are several attempts
with pauses, because a server that restarts needs time, and a session is also needed to receive notifications.  If the
last attempt fails, the subscriptions raise its error.

`Keeper` also handles all messages that the server sends on its own: requests go to `Answering`, changes to
`SubscriptionManager`, and notifications to the callbacks of the program.
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
from trio_mcp.core.caching import ResponseCache
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
from trio_mcp.core.messages import JsonObject, Limits, Notification
from trio_mcp.core.models import LoggingMessageParams
from trio_mcp.core.oauth.errors import AuthorizationFailed
from trio_mcp.core.requests import Answered, Outcome
from trio_mcp.core.revisions import Terms
from trio_mcp.core.session import Call, Notice, Offer
from trio_mcp.core.subscriptions import ChangeKind, change_of
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.wire import Tap
from trio_mcp.transport.workers import called

__all__ = ["ClientParts", "Keeper", "terms_of"]

T = TypeVar("T")

_log = logging.getLogger("trio_mcp.client")

_SET_LEVEL = "logging/setLevel"
_DEVIATIONS = 100  # the newest that are kept; the log has all of them
# Seconds that a new session waits for the answer to `logging/setLevel`, because over HTTP a call could overtake it.
# After that the session is used with any answer.
_LOG_LEVEL_WAIT = 1.0
_CLOSE_TIMEOUT = 30.0  # limit for closing in seconds, in addition to the limits of its parts

# Seconds before each attempt to open a new session without a call.  Usually a server that has forgotten its sessions
# responds at once.  A server that restarts has a quarter of a minute.
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0)
# Seconds after which a session counts as stable.  As long as the longest pause, because otherwise the client would
# reopen forever if the server loses each session at once.
_STABLE = 8.0


@attrs.frozen(eq=False, repr=False)
class ClientParts:
    """The callbacks and options of a client that apply to every session."""

    answering: Answering
    on_log: Callable[[LoggingMessageParams], object] | None
    on_elicitation_complete: Callable[[UrlElicitationRequest], object] | None
    on_notification: Callable[[str, JsonObject], object] | None
    log_level: str | None
    ping_seconds: float | None
    caches: bool
    forget_tools: Callable[[], object]
    """Called when the stored data about tools may be outdated."""


class Keeper:
    """The connection of a client; see the head of this file.  It is the `ServerMessageHandler` of its sessions."""

    def __init__(
        self,
        connector: Connector,
        offer: Offer,
        limits: Limits,
        parts: ClientParts,
        *,
        headers: Callable[[], Fields],
        mirrors: Callable[[str], Sequence[Mirror]],
        tap: Tap | None,
    ) -> None:
        self._connector = connector
        self._parts = parts
        self._log_level = parts.log_level
        self._options = SessionOptions(offer, self, limits, headers, mirrors, tap)
        self._nursery: trio.Nursery | None = None
        self._trio_token: trio.lowlevel.TrioToken | None = None  # of the `trio.run` of this client
        self._connection: OpenSession | None = None
        self._session_closing = self._session_closed = trio.Event()  # of the current session
        self._opened_at = 0.0
        self._log_level_set = trio.Event()  # the server has answered, or there is no level to set
        self._reopening: trio.Event | None = None
        self._attempts = 0  # attempts without a call since the last stable session
        self._open_error: McpError | None = None  # the error of the last failed attempt
        self._closing = trio.Event()
        self._closed = trio.Event()
        self.gone = trio.Event()
        """Set when the connection has ended and no new session will be opened."""
        self.subscriptions = SubscriptionManager(limits)
        self.deviations: deque[str] = deque(maxlen=_DEVIATIONS)
        self._shared: dict[Hashable, _SharedRequest] = {}
        self._reported_methods: set[str] = set()  # methods of notifications that were reported for this session
        self.cache: ResponseCache | None = None
        """The cache of the current session; None if the option `cache` is off."""

    # Running

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        failure: Failure | None = None
        self._trio_token = trio.lowlevel.current_trio_token()
        try:
            async with open_nursery() as nursery:
                self._nursery = nursery
                await self._connect(self._options.offer)
                task_status.started()
                await self._closing.wait()
                await self._end_session()
        except McpError as error:
            failure = repeated(error)
            raise
        finally:
            self._closing.set()
            self.gone.set()
            self.subscriptions.closed(failure)
            self._closed.set()

    async def _connect(self, offer: Offer) -> None:
        assert self._nursery is not None
        closing, closed = trio.Event(), trio.Event()
        options = attrs.evolve(self._options, offer=offer, closing=closing)

        async def hold(task_status: trio.TaskStatus[OpenSession]) -> None:
            try:
                await self._connector(options, task_status)
            finally:
                closed.set()

        connection = await self._nursery.start(hold, name="a session with the server")
        self._connection, self._session_closing, self._session_closed = connection, closing, closed
        self._opened_at = trio.current_time()
        caller = connection.caller
        terms = terms_of(caller)
        self.cache = ResponseCache(terms.revision) if self._parts.caches else None
        self._parts.forget_tools()
        self._reported_methods.clear()
        if self._parts.ping_seconds is not None:
            self._nursery.start_soon(caller.watch, self._parts.ping_seconds, name="pings of the server")
        self._log_level_set = trio.Event()
        if caller.failure is None and self._log_level is not None and terms.declares("logging"):
            self._set_initial_log_level(caller, self._log_level)  # before other requests use up the limit of requests
        else:
            self._log_level_set.set()
        self.subscriptions.attach(caller)
        if caller.failure is not None:  # it was lost before it was attached
            self.connection_lost(caller.failure)
        with trio.move_on_after(_LOG_LEVEL_WAIT):
            await self._log_level_set.wait()

    def _set_initial_log_level(self, caller: Caller, level: str) -> None:
        if terms_of(caller).revision.handshake:
            caller.begin(_SET_LEVEL, {"level": level})
            caller.handle_events(())  # wakes the transport, which sends the request
        else:
            caller.session.log_level = level  # each later request has the level
            self._log_level_set.set()

    async def _end_session(self) -> None:
        self._session_closing.set()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_TIMEOUT):
            await self._session_closed.wait()

    async def aclose(self) -> None:
        self.check_run()
        self._closing.set()
        await self._closed.wait()

    # The current session

    @property
    def connection(self) -> OpenSession:
        assert self._connection is not None  # the client was opened
        return self._connection

    def check_run(self) -> None:
        """Raise UsageError outside of the `trio.run` of this client: its objects must not be used there."""
        try:
            token = trio.lowlevel.current_trio_token()
        except RuntimeError:
            token = None
        if token is not self._trio_token:
            raise UsageError(
                "this client belongs to another trio.run; from a thread, call it with "
                "trio.from_thread.run(client.call_tool, ..., trio_token=...)"
            )

    async def caller(self) -> Caller:
        """Return the current session.  If the server has lost it, a new one is opened first."""
        self.check_run()
        return self._open_caller() or await self._wait_for_caller()

    def _open_caller(self) -> Caller | None:
        """Return the open session, or None if it must be reopened first."""
        connection = self._connection
        if connection is None or connection.caller.failure is not None or self._closing.is_set():
            return None
        return connection.caller

    async def _wait_for_caller(self) -> Caller:
        reopened = False
        while True:
            if self._closing.is_set() or self.connection.caller.failure is not None:
                await trio.lowlevel.checkpoint_if_cancelled()  # the cancellation may be the reason
            if self._closing.is_set():
                raise _closed()
            failure = self.connection.caller.failure
            if failure is None:
                return self.connection.caller
            error = failure()
            # http-58: one new session per call, or a server that loses each one is asked forever.
            if reopened or not isinstance(error, SessionLost):
                raise error
            await self._wait_until_reopened()
            reopened = True

    async def _wait_until_reopened(self) -> None:
        """Wait for one attempt to open a new session; raise its error."""
        before = self._connection
        await self._reopen_once()
        if self._connection is before and not self._closing.is_set():
            raise self._reopen_error()

    def _reopen_error(self) -> SessionClosed:
        error = SessionClosed(f"the server lost the session, and a new one could not be opened: {self._open_error}")
        error.__cause__ = self._open_error
        return error

    async def _reopen_unasked(self, failure: Failure) -> None:
        """Open a new session without a call: for subscriptions, and for notifications and requests of the server."""
        lost = self._connection
        for pause in _PAUSES[self._attempts :]:
            self._attempts += 1
            await trio.sleep(pause)
            if self._connection is lost:
                await self._reopen_once()
            if self._connection is not lost:
                return
            if isinstance(self._open_error, AuthorizationFailed) and not self._open_error.passes:
                break  # the user has refused: ask again only for a call
        self.subscriptions.connection_lost(failure if self._open_error is None else self._reopen_error)

    async def _reopen_once(self) -> None:
        """Wait for the attempt in progress, or start one in a task of its own, which no caller can cancel."""
        if self._reopening is None:
            assert self._nursery is not None
            self._reopening = trio.Event()
            self._nursery.start_soon(self._reopen, self._reopening, name="reopening the session")
        await self._reopening.wait()

    async def _reopen(self, done: trio.Event) -> None:
        try:
            self._session_closing.set()
            revision = terms_of(self.connection.caller).revision
            await self._connect(attrs.evolve(self._options.offer, revisions=(revision,)))
        except McpError as error:
            _log.warning("the session was lost, and a new one could not be opened: %s", error)
            self._open_error = error
        finally:
            self._reopening = None
            done.set()

    async def request(
        self,
        method: str,
        params: JsonObject,
        on_progress: OnProgress | None = None,
        headers: Fields = (),
        timer: Timer | None = None,
    ) -> JsonObject:
        """Send a request.  It is sent once more only if it is known that the first one has not run."""
        if timer is not None and not timer.running:
            return await timer.run(method, lambda: self.request(method, params, on_progress, headers, timer))
        self.check_run()
        if not (on_progress is None or callable(on_progress)):
            raise UsageError(f"on_progress must be a function, got {type(on_progress).__name__}")
        repeated_once = False
        while True:
            caller = self._open_caller() or await self._wait_for_caller()
            try:
                return await caller.request(method, params, on_progress=on_progress, headers=headers, timer=timer)
            except RequestError as error:
                note_missing_options(error)
                raise
            except SessionLost as error:
                if repeated_once or error.request_may_have_run:
                    raise
            repeated_once = True
            await caller.closed.wait()  # until all other requests of that session have their outcomes

    # ServerMessageHandler

    async def answer(self, call: Call) -> JsonObject:
        return await self._parts.answering.answer(call.request.method, call.request.params, call.terms)

    def notice(self, notice: Notice) -> None:
        notification = notice.notification
        if self.cache is not None:
            self.cache.changed(notification.method, notification.params)
        if notification.method == ChangeKind.TOOLS.method:
            self._parts.forget_tools()
        parts = self._parts
        if notification.method == "notifications/message" and parts.on_log is not None:
            self._receive_log(notification.params)
        elif notification.method == "notifications/elicitation/complete" and parts.on_elicitation_complete is not None:
            _call(parts.on_elicitation_complete, parts.answering.finished(notification.params))
        elif not self.subscriptions.receive(notice):
            self._undelivered(notification, notice.terms)

    def _undelivered(self, notification: Notification, terms: Terms) -> None:
        """Handle a notification that no block and no callback waits for."""
        change = change_of(notification)
        method = notification.method
        if (
            change is not None
            and method not in self._reported_methods
            and not change.kind.declared_in(terms.capabilities)
        ):
            self._reported_methods.add(method)
            self.mistake(f"it sends {method} without declaring it; receive it with listen(..., undeclared=True)")
        callback = self._parts.on_notification
        if callback is not None:
            _call(lambda notification: callback(notification.method, notification.params), notification)

    def _receive_log(self, params: JsonObject) -> None:
        try:
            _call(self._parts.on_log, from_json(LoggingMessageParams, params))
        except RemoteProtocolError as error:
            self.mistake(str(error))

    async def set_log_level(self, level: str | None, timer: Timer | None) -> None:
        """Set the log level.

        Raises NotInThisRevision for None in the legacy era, in which logs cannot be turned off.
        """
        caller = await self.caller()
        revision = terms_of(caller).revision
        if level is None and revision.handshake:
            raise NotInThisRevision(f"{_SET_LEVEL} without a level", revision.name, 'set_log_level("emergency")')
        self._log_level = level
        if revision.handshake:
            await self.request(_SET_LEVEL, {"level": level}, timer=timer)
        else:
            caller.session.log_level = level  # each later request has the level

    async def share(self, key: Hashable, send: Callable[[], Awaitable[JsonObject]]) -> JsonObject:
        """Return the result of `send`, which is called once for all callers that wait with an equal key."""
        shared = self._shared.get(key)
        if shared is None:
            assert self._nursery is not None
            shared = self._shared[key] = _SharedRequest()
            self._nursery.start_soon(shared.run, send, name="a request for several callers")
        try:
            return await shared.wait()
        finally:
            if not shared.wanted and self._shared.get(key) is shared:
                del self._shared[key]

    def ended(self, outcome: Outcome, failure: Failure | None) -> None:
        if outcome.method != _SET_LEVEL:
            self.subscriptions.ended(outcome, failure)
            return
        self._log_level_set.set()
        if not isinstance(outcome, Answered) and self.connection.caller.failure is None:
            why = failure_of(outcome, failure)()
            self.mistake(f"it declares logging, but refused the log level: {why}")

    def missed(self, *, for_good: bool) -> None:
        if not for_good:
            self._parts.forget_tools()
        self.subscriptions.missed(for_good=for_good)

    def mistake(self, why: str) -> None:
        self.deviations.append(why)
        _log.info("deviation of the server: %s", why)

    def report_loss(self, why: str) -> None:
        """Report a violation of the protocol that makes an item of the server unusable (http-86)."""
        self.deviations.append(why)
        _log.warning("deviation of the server: %s", why)

    def connection_lost(self, failure: Failure) -> None:
        if self._closing.is_set() or self._connection is None or self._connection.caller.failure is not failure:
            return  # it was not the current session: its error is raised by the task that opens it
        if isinstance(failure(), SessionLost):
            self.subscriptions.connection_lost()
            if trio.current_time() >= self._opened_at + _STABLE:
                self._attempts = 0
            self._open_error = None
            assert self._nursery is not None
            self._nursery.start_soon(self._reopen_unasked, failure, name="reopening the session without a call")
        else:
            self.gone.set()
            self.subscriptions.closed(failure)


class _SharedRequest:
    """A request that several callers wait for.  It is cancelled when the last of them is cancelled."""

    def __init__(self) -> None:
        self._waiting = 0
        self._scope = trio.CancelScope()
        self._done = trio.Event()
        self._result: JsonObject | None = None
        self._failure: Failure = _closed

    @property
    def wanted(self) -> bool:
        """True if it has no outcome yet, and a caller waits for it."""
        return self._waiting > 0 and not self._done.is_set()

    async def run(self, send: Callable[[], Awaitable[JsonObject]]) -> None:
        try:
            with self._scope:
                self._result = await send()
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
                self._scope.cancel(reason="no caller waits for the answer")
        if self._result is None:
            await trio.lowlevel.checkpoint_if_cancelled()  # the cancellation may be the reason why the client is closed
            raise self._failure()
        return copy.deepcopy(self._result)


def _closed() -> McpError:
    return SessionClosed("the client has been closed")


def _call(callback: Callable[[T], object] | None, argument: T | None) -> None:
    if callback is None or argument is None:
        return
    try:
        called(callback, argument)
    except Exception:  # noqa: BLE001  # a callback may raise anything, and the connection continues
        _log.exception("a callback of the client has failed")


def terms_of(caller: Caller) -> Terms:
    """Return the terms of an open session."""
    terms = caller.session.terms
    assert terms is not None
    return terms
