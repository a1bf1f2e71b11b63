"""The connection of a client to one server, over several sessions.

A `ClientConnection` opens a session with a target, runs it in a task of its own, and gives callers the current session.
If the connection ends, all waiting calls and all later calls raise its error; no background task raises.  If an HTTP
server loses the session, it is not the end: a new session is opened in the same revision, once for all callers
(http-58), and all subscriptions are renewed on it.

A call waits for one attempt to open a new session, and raises its error.  Without a call there are several attempts
with pauses, because a server that restarts needs time, and a session is also needed to receive notifications.  If the
last attempt fails, the subscriptions raise its error.

`ClientConnection` also handles all messages that the server sends on its own: requests go to `Answering`, changes to
`SubscriptionManager`, and notifications to the callbacks of the program.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import attrs
import trio

from trio_mcp.client.callbacks import Answering
from trio_mcp.client.connecting import Connector, SessionOptions
from trio_mcp.client.errors import SessionLost, failure_of
from trio_mcp.client.session import PAUSES, STABLE, ClientSession, OnProgress, Timer
from trio_mcp.client.subscriptions import SubscriptionManager
from trio_mcp.client.tools import KnownTools
from trio_mcp.core.caching import ResponseCache
from trio_mcp.core.codec import from_json
from trio_mcp.core.errors import (
    MISSING_CLIENT_CAPABILITY,
    McpError,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    SessionClosed,
    UsageError,
    repeated,
)
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.messages import PROGRESS, JsonObject, Limits
from trio_mcp.core.models import LoggingMessageParams
from trio_mcp.core.oauth.errors import is_final
from trio_mcp.core.requests import Answered, Outcome
from trio_mcp.core.session import Call, Notice, Offer
from trio_mcp.core.subscriptions import ChangeKind, change_of
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.workers import called

if TYPE_CHECKING:
    from trio_mcp.client.extensions import ClientExtensions
    from trio_mcp.client.options import ClientOptions
    from trio_mcp.oauth.client import TokenSource

__all__ = ["ClientConnection"]

T = TypeVar("T")

_log = logging.getLogger("trio_mcp.client")

_SET_LEVEL = "logging/setLevel"
_DEVIATIONS = 100  # the newest that are kept; the log has all of them
_DEVIATION_LENGTH = 1000  # characters of one deviation
# Seconds that a new session waits for the answer to `logging/setLevel`, because over HTTP a call could overtake it.
# After that the session is used with any answer.
_LOG_LEVEL_WAIT = 1.0
_CANCELLING = 30.0  # seconds for the cancellation of a task that no caller waits for
_CLOSE_TIMEOUT = 30.0  # limit for closing in seconds, in addition to the limits of its parts

# The options that declare a capability and its members.  The key "" stands for the capability itself.
_DECLARED_BY = {
    "sampling": {"": "sampling", "tools": "sampling_tools"},
    "elicitation": {"": "elicitation", "form": "elicitation", "url": "elicitation_url"},
    "roots": {"": "roots"},
    "extensions": {"io.modelcontextprotocol/tasks": "tasks"},
}


class ClientConnection:
    """The connection of a client; see the head of this file.  It is the `ServerMessageHandler` of its sessions.

    `headers` returns the headers of the client; called for each HTTP request.
    """

    _nursery: trio.Nursery

    def __init__(
        self,
        connector: Connector,
        options: ClientOptions,
        offer: Offer,
        answering: Answering,
        *,
        headers: Callable[[], Fields],
        tokens: TokenSource | None,
        log_level: str | None,
        extensions: ClientExtensions | None,
    ) -> None:
        limits = options.get("limits") or Limits()
        self.tools = KnownTools(self.report_loss)
        self._connector = connector
        self._options = options
        self._session_options = SessionOptions(offer, self, limits, headers, self.tools.mirrors, options, tokens)
        self._answering = answering
        self._log_level = log_level
        self._extensions = extensions
        self._trio_token: trio.lowlevel.TrioToken | None = None  # of the `trio.run` of this client
        self._current: ClientSession | None = None
        self._session_closing = self._session_closed = trio.Event()  # of the current session
        self._opened_at = 0.0
        self._log_level_set = trio.Event()  # the server has answered, or there is no level to set
        self._wanted, self._attempted = trio.Event(), trio.Event()  # a call needs a session; an attempt has ended
        self._attempts = 0  # attempts without a call since the last stable session
        self._open_error: SessionClosed | None = None  # why the last attempt has failed
        self._open = trio.CancelScope()  # cancelled to close the client
        self._closing = False  # `cancel_called` of the scope looks at the clock, and would be 4 % of a call
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
        failure: McpError | None = None
        self._trio_token = trio.lowlevel.current_trio_token()
        try:
            async with open_nursery() as nursery:
                self._nursery = nursery
                await self._connect(self._session_options.offer)
                task_status.started()
                with self._open:
                    await self._keep_open()
                self._session_closing.set()
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_TIMEOUT):
                    await self._session_closed.wait()
        except McpError as error:
            failure = error
            raise
        finally:
            self._close()
            self.gone.set()
            self.subscriptions.closed(failure)
            self._closed.set()

    async def _connect(self, offer: Offer) -> None:
        closing, closed = trio.Event(), trio.Event()
        options = attrs.evolve(self._session_options, offer=offer, closing=closing)

        async def hold(task_status: trio.TaskStatus[ClientSession]) -> None:
            try:
                await self._connector(options, task_status)
            finally:
                closed.set()

        caller: ClientSession = await self._nursery.start(hold, name="a session with the server")
        self._current, self._session_closing, self._session_closed = caller, closing, closed
        self._opened_at = trio.current_time()
        revision = caller.terms.revision
        self.cache = ResponseCache(revision) if self._options.get("cache", True) else None
        self.tools.forget()
        self._reported_methods.clear()
        if (seconds := self._options.get("ping_seconds")) is not None:
            self._nursery.start_soon(caller.watch, seconds, name="pings of the server")
        self._log_level_set = trio.Event()
        if caller.failure is not None or self._log_level is None or not caller.terms.declares("logging"):
            self._log_level_set.set()
        elif revision.handshake:
            # Before other requests use up the limit of requests.
            caller.begin(_SET_LEVEL, {"level": self._log_level}, on_end=self._log_level_answered)
            caller.wake()
        else:
            caller.session.log_level = self._log_level  # each later request has the level
            self._log_level_set.set()
        self.subscriptions.attach(caller)
        if caller.failure is not None:  # it was lost before it was attached
            self.connection_lost(caller.failure)
        with trio.move_on_after(_LOG_LEVEL_WAIT):
            await self._log_level_set.wait()

    async def _keep_open(self) -> None:
        """Open a new session whenever one is lost: at once for a call, and otherwise after pauses.

        A call needs it for itself; subscriptions, notifications and requests of the server need it without a call.
        """
        refused = False  # the user has refused: ask again only for a call
        try:
            while True:
                await self.current.closed.wait()
                failure, pause = self.current.failure, math.inf
                if not isinstance(failure, SessionLost):
                    await trio.sleep_forever()
                elif refused or self._attempts == len(PAUSES):
                    self.subscriptions.connection_lost(self._open_error or failure)
                else:
                    pause = PAUSES[self._attempts]
                with trio.move_on_after(pause) as waiting:
                    await self._wanted.wait()
                self._attempts += waiting.cancelled_caught
                self._session_closing.set()
                try:
                    await self._connect(
                        attrs.evolve(self._session_options.offer, revisions=(self.current.terms.revision,))
                    )
                    self._open_error, refused = None, False
                except McpError as error:
                    _log.warning("the session was lost, and a new one could not be opened: %s", error)
                    why = f"the server lost the session, and a new one could not be opened: {error}"
                    self._open_error = SessionClosed(why)
                    self._open_error.__cause__ = error
                    refused = is_final(error)
                self._attempted.set()
                self._wanted, self._attempted = trio.Event(), trio.Event()
        finally:
            self._attempted.set()

    async def aclose(self) -> None:
        self.check_run()
        self._close()
        await self._closed.wait()

    def _close(self) -> None:
        self._closing = True
        self._open.cancel(reason="the client is closed")

    # The current session

    @property
    def current(self) -> ClientSession:
        """The current session, which may be lost."""
        assert self._current is not None  # the client was opened
        return self._current

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

    async def session(self) -> ClientSession:
        """Return the current session.  If the server has lost it, a new one is opened first."""
        self.check_run()
        reopened = False
        while True:
            caller = self._current
            if caller is not None and caller.failure is None and not self._closing:
                return caller
            await trio.lowlevel.checkpoint_if_cancelled()  # the cancellation may be the reason
            if caller is None or self._closing:
                raise SessionClosed("the client has been closed")
            assert caller.failure is not None
            # http-58: one new session per call, or a server that loses each one is asked forever.
            if reopened or not isinstance(caller.failure, SessionLost):
                raise caller.loss()
            self._wanted.set()
            await self._attempted.wait()
            if self._current is caller and not self._closing:
                raise repeated(self._open_error or caller.failure)
            reopened = True

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
            caller = self._current
            if caller is None or caller.failure is not None or self._closing:
                caller = await self.session()
            try:
                return await caller.request(method, params, on_progress=on_progress, headers=headers, timer=timer)
            except RequestError as error:
                _note_missing_options(error)
                raise
            except SessionLost as error:
                if repeated_once or error.request_may_have_run:
                    raise
            repeated_once = True
            await caller.closed.wait()  # until all other requests of that session have their outcomes

    async def set_log_level(self, level: str | None, timer: Timer | None) -> None:
        """Set the log level.

        Raises NotInThisRevision for None in the legacy era, in which logs cannot be turned off.
        """
        caller = await self.session()
        revision = caller.terms.revision
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
            shared = self._shared[key] = _SharedRequest(send)
            self._nursery.start_soon(shared.run, name="a request for several callers")
        shared.waiting += 1
        try:
            await shared.done.wait()
        finally:
            shared.waiting -= 1
            if not shared.waiting:
                shared.scope.cancel(reason="no caller waits for the answer")
            if (shared.done.is_set() or not shared.waiting) and self._shared.get(key) is shared:
                del self._shared[key]
        if isinstance(shared.outcome, Exception):
            await trio.lowlevel.checkpoint_if_cancelled()  # the cancellation may be the reason why the client is closed
            raise repeated(shared.outcome) if isinstance(shared.outcome, McpError) else shared.outcome
        return copy.deepcopy(shared.outcome)

    # ServerMessageHandler

    async def answer(self, call: Call) -> JsonObject:
        if self._extensions is not None:
            handler = self._extensions.handler(call.request.method, notification=False)
            if handler is not None:
                return await handler.answer(call.request.params)
            wrapper = self._extensions.answering.get(call.request.method)
            if wrapper is not None:
                ask = partial(self._answering.answer, call.request.method, terms=call.terms)
                return await wrapper(self._nursery, call, ask)
        return await self._answering.answer(call.request.method, call.request.params, call.terms)

    def notice(self, notice: Notice) -> None:
        method, params = notice.notification.method, notice.notification.params
        if self.cache is not None:
            self.cache.changed(method, params)
        if method == ChangeKind.TOOLS.method:
            self.tools.forget()
        on_log, on_complete = self._options.get("on_log"), self._options.get("on_elicitation_complete")
        handler = None if self._extensions is None else self._extensions.handler(method, notification=True)
        if handler is not None:
            self._hear(handler.hear, notice)
        elif method == PROGRESS and self._extensions is not None and self._extensions.tasks is not None:
            self._extensions.tasks.progressed(params)
        elif method == "notifications/message" and on_log is not None:
            try:
                _call(on_log, from_json(LoggingMessageParams, params))
            except RemoteProtocolError as error:
                self.mistake(str(error))
        elif method == "notifications/elicitation/complete" and on_complete is not None:
            if (page := self._answering.finished(params)) is not None:
                _call(on_complete, page)
        elif not self.subscriptions.receive(notice):
            change, capabilities = change_of(notice.notification), notice.terms.capabilities
            undeclared = change is not None and not change.kind.declared_in(capabilities)
            if undeclared and method not in self._reported_methods:
                self._reported_methods.add(method)
                self.mistake(f"it sends {method} without declaring it; receive it with listen(..., undeclared=True)")
            if (callback := self._options.get("on_notification")) is not None:
                _call(lambda params: callback(method, params), params)

    def _hear(self, handler: Callable[[JsonObject], None], notice: Notice) -> None:
        """Give a notification to an extension."""

        def hear(params: JsonObject) -> None:
            try:
                handler(params)
            except RemoteProtocolError as error:
                self.mistake(f"{notice.notification.method}: {error}")

        _call(hear, notice.notification.params)

    def _log_level_answered(self, outcome: Outcome, failure: McpError | None) -> None:
        self._log_level_set.set()
        if not isinstance(outcome, Answered) and self.current.failure is None:
            self.mistake(f"it declares logging, but refused the log level: {failure_of(outcome, failure)}")

    def answered_late(self, method: str, result: JsonObject) -> None:
        if method == "tools/call" and self._extensions is not None and self._extensions.tasks is not None:
            id = self._extensions.tasks.left_task(result)
            if id is not None:
                self._nursery.start_soon(self._cancel_task, id, name="cancel the task of a cancelled call")

    async def _cancel_task(self, id: str) -> None:
        with trio.move_on_after(_CANCELLING), suppress(McpError):  # the server has gone, or cannot cancel tasks
            await self.request("tasks/cancel", {"taskId": id})

    def missed(self, *, for_good: bool) -> None:
        if not for_good:
            self.tools.forget()
        self.subscriptions.missed(for_good=for_good)

    def mistake(self, why: str, level: int = logging.INFO) -> None:
        why = why[:_DEVIATION_LENGTH]  # it may repeat a text of the server, which may be as long as a message
        self.deviations.append(why)
        _log.log(level, "deviation of the server: %s", why)

    def report_loss(self, why: str) -> None:
        """Report a violation of the protocol that makes an item of the server unusable (http-86)."""
        self.mistake(why, logging.WARNING)

    def connection_lost(self, failure: McpError) -> None:
        if self._closing or self._current is None or self._current.failure is not failure:
            return  # it was not the current session: its error is raised by the task that opens it
        if not isinstance(failure, SessionLost):
            self.gone.set()
            self.subscriptions.closed(failure)
            return
        self.subscriptions.connection_lost()
        if trio.current_time() >= self._opened_at + STABLE:
            self._attempts = 0


@attrs.define(eq=False)
class _SharedRequest:
    """A request that several callers wait for.  It is cancelled when the last of them is cancelled."""

    send: Callable[[], Awaitable[JsonObject]]
    waiting: int = 0
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    done: trio.Event = attrs.field(factory=trio.Event)
    outcome: JsonObject | Exception = attrs.field(factory=lambda: SessionClosed("the client has been closed"))

    async def run(self) -> None:
        try:
            with self.scope:
                self.outcome = await self.send()
        except Exception as error:  # noqa: BLE001  # a wrapper of an extension may raise anything; the callers raise it
            self.outcome = error
        finally:
            self.done.set()


def _call(callback: Callable[[T], object], argument: T) -> None:
    try:
        called(callback, argument)
    except Exception:  # noqa: BLE001  # a callback may raise anything, and the connection continues
        _log.exception("a callback of the client has failed")


def _note_missing_options(error: RequestError) -> None:
    """Add a note to MISSING_CLIENT_CAPABILITY errors: the options of the client that declare the missing capability."""
    needed = error.data.get("requiredCapabilities") if isinstance(error.data, dict) else None
    if error.code != MISSING_CLIENT_CAPABILITY or not isinstance(needed, dict):
        return
    names = []
    for capability, options in _DECLARED_BY.items():
        inside = needed.get(capability)
        if isinstance(inside, dict):
            names += [name for member, name in options.items() if member in (inside or {"": {}})]
    if names:
        error.add_note(f"declare it with these options of the client: {', '.join(names)}")
