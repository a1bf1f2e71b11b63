"""Server sessions: run the requests of one client and ask it questions, on any transport.

Incoming messages go to `ServerSession.receive`.  Outgoing messages wait in the protocol object (`session`) until the
transport takes them, each under its wire: the wire of the request that it belongs to, or None for the wire of the
session.  On one stream these are the same; a session over HTTP has one wire for each request and one standalone wire.
While a request runs, it has its own task and cancel scope (see `transport.workers`); a cancellation of the client
reaches only this scope.

| Event of the protocol object | Action |
|---|---|
| `Call` | start a handler or refuse the request; or start a subscription |
| `RequestCancelled` | cancel the handler's scope, or end the subscription |
| the outcome of a request of the server | wake the handler that asked |
| `SessionAgreed` | notify the session of changes from now on |
| `Opened` | tell the changes that have waited for it |
| `Notice` that the roots have changed | ask for the roots again when they are needed |

Handlers that report progress or log wait for room on the wire.  A call that has ended still counts as running until
there is room for its answer.

`serve_stream` and `converse` serve one client over one byte stream: a `Duplex` reads and writes it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from contextvars import Context as Variables
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import trio

import trio_mcp.server as room  # it loads `held_reports` for the first client that reads too slowly
from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    RequestError,
    check_seconds,
    printable,
)
from trio_mcp.core.messages import (
    PROGRESS,
    Error,
    Event,
    Id,
    InvalidMessage,
    JsonObject,
    Message,
    Notification,
    Request,
)
from trio_mcp.core.requests import LinkKind, Outcome, RequestCancelled
from trio_mcp.core.revisions import NOTHING, Terms, in_protocol
from trio_mcp.core.session import Call, Notice, Opened, ServerProtocol, SessionAgreed
from trio_mcp.core.shares import LONG, Account, holder_of
from trio_mcp.server.context import ROOTS_CHANGED, Context
from trio_mcp.server.run import Run
from trio_mcp.transport.nursery import open_nursery, sole
from trio_mcp.transport.wire import CLOSING, Duplex, Framing, Lines, Tap, Wire, close_stream, keep_alive
from trio_mcp.transport.workers import Work, Worker, guarded, scope_of

if TYPE_CHECKING:
    from trio_mcp.core.messages import Json
    from trio_mcp.server.extensions import Listener
    from trio_mcp.server.held_reports import HeldReports
    from trio_mcp.server.parking import ParkedCall, PendingQuestion
    from trio_mcp.server.questions import Inquiry
    from trio_mcp.server.server import Server
    from trio_mcp.transport.paths import Roots

__all__ = [
    "CANCELLED_CALL",
    "UNFINISHED",
    "ChargedMessage",
    "ServerSession",
    "address_of",
    "converse",
    "serve_stream",
    "socket_of",
    "start_work",
]

_log = logging.getLogger("trio_mcp")
_LISTEN = "subscriptions/listen"
_UPDATED = "notifications/resources/updated"
# Seconds in which reports are batched: a turn of the loop and a write cost ten times as much as one report.
_BATCH_SECONDS = 0.001
_SHUTTING_DOWN = "the server is shutting down"
UNFINISHED = "the server has shut down before this call had finished"
"""The error message of calls that have not finished when the time for draining is over."""
_HALF_CLOSED = "the client has closed its side of the connection"
CANCELLED_CALL = RequestError(INTERNAL_ERROR, "cancelled")
"""The outcome of a call that was cancelled; it is not sent."""
# Requests that take effect in the order of their arrival: the last one decides whether there is a subscription.
_IN_TURN = frozenset({"resources/subscribe", "resources/unsubscribe"})


class ChargedMessage:
    """A long message.  Its bytes are charged to the client until the last call of the message has ended."""

    __slots__ = ("_account", "_size", "calls", "limit")

    def __init__(self, account: Account, size: int) -> None:
        self._account = account
        self._size = size
        self.calls = 1  # one for the reading of the message itself
        self.limit = account.take(size)
        """The limit that refuses the message, or None."""

    def drop(self) -> None:
        """A call of the message, or the reading of it, has ended."""
        self.calls -= 1
        if not self.calls and self.limit is None:
            self._account.give(self._size)


class ServerSession:
    """One client of a running server; see the module docstring.

    - `wire`: the wire of the session itself.
    - `account`: charged for the bytes that are held for the client; its holder is charged for shared resources.
    - `terms`: the session is open with these terms from the start, for a request that belongs to no session.
    - `changes`: False if `wire` cannot carry notifications; then no change notifications are declared.
    """

    detached: ClassVar[Literal[False]] = False
    """True for a `DetachedCall`, which takes the place of a session."""
    # Class attributes, because few sessions change these values, and over HTTP each modern request has its own session.
    noticing: dict[Context, None] | None = None
    """The running handlers of notifications, in order; None if there was none."""
    listeners: dict[Id, Listener] | None = None
    """The listen requests that extensions send notifications to; None if there was none."""
    name: str | None = None
    """A name of the session that all replicas have for it; None if it has only this process."""
    roots: Roots | None = None
    """The client's roots, if it has been asked for them and notifies of changes."""
    roots_changes = 0
    _opening: ChargedMessage | None = None  # the message that opened the session, if it is long
    _idle: trio.lowlevel.ParkingLot | None = None  # tasks that wait until no request has a place
    _turn: trio.Event | None = None  # set at the end of the newest request of `_IN_TURN`
    # The newest change of each resource to which the client has subscribed before its `notifications/initialized` came:
    # over HTTP that may take longer.
    _early_changes: dict[str, Notification] | None = None
    _last_yield = -math.inf  # when a reporting call last yielded to other tasks

    def __init__(
        self,
        run: Run,
        wire: Wire,
        *,
        account: Account | None = None,
        link: LinkKind = LinkKind.DUPLEX,
        terms: Terms | None = None,
        changes: bool = True,
    ) -> None:
        self.changes = changes
        # `receive` gives it the offer of the moment before each message.
        self.session = ServerProtocol(run.offer, link=link, limits=run.limits, terms=terms)
        self.session.account = self.account = run.bytes.account(None) if account is None else account
        self._run = run
        self.wire = wire
        self._alone = terms is not None
        self._running = 0  # requests that have a place, also those whose answer waits for room on the wire
        self._contexts: dict[Id, Context] = {}  # of the requests that run, by their ids
        self._asked: dict[Id, PendingQuestion] = {}
        # Change notifications that wait for room.  One stands for all of its kind, so listeners bound their number.
        self.held_changes: dict[tuple[str, str, Id | None], Notification] = {}
        self.held_reports: dict[Id, HeldReports] = {}  # reports that wait for room; a few for each call
        self._listening: dict[Id, Wire] = {}  # the wires of listen requests, which have no task
        self._variables = copy_context()  # the handlers of all requests begin with copies of these

    # Incoming messages.

    @trio.lowlevel.enable_ki_protection  # a message is handled as a whole
    def receive(
        self,
        message: Message,
        now: float,
        *,
        wire: Wire | None = None,
        principal: Any = None,
        headers: Mapping[str, str] = NOTHING,
        size: int = 0,
    ) -> None:
        """Handle a message of `size` bytes that came on `wire`, or on the wire of the session.

        Immediate answers are queued in `session` without a wake-up: the transport sends them after this call.
        """
        run = self._run
        if len(run.kinds) != run.offered:  # entries of a new kind have been added
            run.make_offers()
        self.session.offer = run.offer if self.changes else run.quiet_offer
        about = self.wire if wire is None else wire
        received, opens = None, False
        if size > LONG:
            received = ChargedMessage(self.account, size)
            opens = self.session.terms is None and type(message) is Request
            if opens and received.limit is not None and message.method == "initialize":  # type: ignore[union-attr]
                # Its params are held for the whole session.
                why = (
                    f"the server holds too many bytes of this client (Limits.{received.limit}); "
                    "end other sessions, or try again later"
                )
                message = InvalidMessage(why, Error(message.id, INTERNAL_ERROR, why))  # type: ignore[union-attr]
        for event in self.session.receive(message, now, about=about, principal=principal, headers=headers):
            if type(event) is Call:
                self._call(event, about, received)
            elif type(event) is Notice:
                self._notice(event, received)
            else:
                self._act(event)
        if received is not None:
            if opens and self.session.terms is not None:
                self._opening = received
            else:
                received.drop()

    def connection_lost(self, why: str) -> None:
        """The client has gone: cancel its handlers, and send no more messages.

        The owner of the session decides this: in a session over HTTP, the end of one wire does not end the others.
        """
        for event in self.session.connection_lost(why=why):
            self._act(event)
        self._stop_notices(why)
        if self.session.link is LinkKind.DUPLEX:  # only a stream carries many calls of one client at once
            self._run.workers.trim()
        self._run.leave(self)
        self._run.calls.forget(self.account)
        if self._opening is not None:
            self._opening.drop()
            self._opening = None

    def input_ended(self) -> None:
        """The client has closed its side, and may still read.

        Its calls go on.  Questions fail, and there are no more change notifications, because the client can neither
        read the changed lists nor end a subscription.
        """
        for event in self.session.input_ended(_HALF_CLOSED):
            self._act(event)
        self._end_subscriptions()
        self._run.leave(self)

    def abort_pending(self, why: str = UNFINISHED) -> None:
        """End the running calls, and answer them with an error."""
        running = list(self._contexts.values())
        for ctx in running:
            self.session.refuse(ctx.request.id, RequestError(INTERNAL_ERROR, why))
            ctx._cancel(why)
        for ctx in running:
            ctx._wire.wake()
        self._stop_notices(why)

    def _stop_notices(self, why: str) -> None:
        """Cancel the handlers of notifications, which no request names."""
        for ctx in tuple(self.noticing or ()):
            ctx._cancel(why)

    @property
    def busy(self) -> bool:
        """Whether a drain would have to wait for a call or end a subscription."""
        return bool(self._contexts or self._listening)

    @property
    def alone(self) -> bool:
        """Whether this serves one request of a client without a session or a stream."""
        return self._alone or self.session.link is LinkKind.EXCHANGE

    @property
    def at_work(self) -> bool:
        """Whether a handler runs and does not wait for the client."""
        return any(not ctx._waits for ctx in self._contexts.values())

    def undeliverable(self, id: Id) -> None:
        """A queued question cannot reach the client: fail it."""
        for event in self.session.fail(id, "the client has gone and cannot reconnect"):
            self._act(event)

    def questions_unread(self, wire: Wire) -> None:
        """The client has not come back for the questions on this wire: fail them."""
        for id in [id for id, asked in self._asked.items() if asked.wire is wire]:
            self.undeliverable(id)

    def _act(self, event: Event) -> None:
        if isinstance(event, RequestCancelled):
            self._cancel(event)
        elif isinstance(event, Outcome):
            asked = self._asked.pop(event.id)
            asked.outcome = event
            asked.done.set()
        elif isinstance(event, SessionAgreed):
            declared = self.session.declared(event.terms.revision)
            self._run.join(self, declared)
        elif isinstance(event, Opened):
            self.tell_early_changes()
        else:
            _log.debug("%s", event)

    def _call(self, call: Call, wire: Wire, received: ChargedMessage | None) -> None:
        request, run = call.request, self._run
        if run.dismissed or (run.draining and not self._served_while_draining(call)):
            why: str | None = _SHUTTING_DOWN
        elif run.calls.limited and (wait := self._wait_for_rate()):
            why = f"more than {run.limits.call_rate:g} calls a second (Limits.call_rate); try again in {wait:.3g} s"
        elif received is not None and received.limit is not None:
            why = f"the server holds too many bytes of this client's calls (Limits.{received.limit}); try again later"
        elif request.method == _LISTEN:
            why = self._listen(Context(self, request, call.terms, wire))
        else:
            why = self._take_place()
            if why is None:
                ctx = Context(self, request, call.terms, wire)
                if received is not None:
                    ctx._received = received
                    received.calls += 1
                _begin(self, ctx)
        if why is not None:
            self.session.refuse(request.id, RequestError(INTERNAL_ERROR, why))

    def _served_while_draining(self, call: Call) -> bool:
        request, terms = call.request, call.terms
        return _is_retry(request, terms) or self._run.serves_while_draining(request, terms.revision)

    def _notice(self, notice: Notice, received: ChargedMessage | None) -> None:
        """Start the handler of a notification, unless the server is too busy: a notification may be lost."""
        run, method = self._run, notice.notification.method
        if method == ROOTS_CHANGED:
            self.roots, self.roots_changes = None, self.roots_changes + 1
            return
        if in_protocol(method):  # the others of the protocol need no action
            return
        limited = run.calls.limited and self._wait_for_rate()
        too_long = received is not None and received.limit is not None
        if run.draining or limited or too_long or self._take_place() is not None:
            why = "the server is too busy, or is shutting down"
            _log.warning("the notification %s was dropped: %s", printable(method[:80]), why)
            return
        from trio_mcp.server.detached import notice_call

        ctx = notice_call(self, notice)
        if self.noticing is None:
            self.noticing = {}
        self.noticing[ctx] = None
        if received is not None:
            ctx._received = received
            received.calls += 1
        start_work(run, ctx, printable(method[:80]), self._variables.copy())

    def _wait_for_rate(self) -> float:
        """Count a call for `Limits.call_rate`; return 0, or the seconds to wait if there are too many.

        A client without a holder is known by its stream or session.  Requests without either count together.
        """
        client = self.account.holder
        return self._run.calls.wait(self.account if client is None and not self.alone else client)

    def _take_place(self) -> str | None:
        """Take a place for a request to run, and return None; or return the reason for refusing the request.

        It starts or is refused at once, so a busy server makes no client hang and no queue grows.  Clients share the
        places (see `core.shares`): a flood of one client leaves places for others, however many connections it has.
        """
        everywhere, holder = self._run.running, self.account.holder
        if self._running >= self._run.limits.calls:
            limit = "calls"
        elif holder is None and everywhere.held < everywhere.total:
            everywhere.held += 1  # as `take`, without the cost of a call for each request on stdio
            self._running += 1
            return None
        elif holder is not None and everywhere.take(holder):
            self._running += 1
            return None
        else:
            limit = "calls_in_all"
        return f"the server is overloaded: it runs as many requests as it may (Limits.{limit}); try again later"

    def _cancel(self, event: RequestCancelled) -> None:
        id = event.id
        ctx = self._contexts.get(id)
        if ctx is not None:
            ctx._cancel(event.reason or "the client cancelled the request")
            return
        wire = self._listening.pop(id, None)  # no handler will answer a subscription
        self._end_listener(id)
        self._run.publisher.forget(self, id)
        self.held_changes = {key: held for key, held in self.held_changes.items() if key[2] != id}
        self.session.refuse(id, RequestError(INTERNAL_ERROR, "cancelled"))
        if wire is not None:  # None: the handler was cancelled before, with the server
            wire.wake()

    # Requests.

    def _close(self, ctx: Context, outcome: JsonObject | RequestError) -> bool:
        """End the call with this answer; return False if it cannot reach the client."""
        received = ctx._received
        if received is not None:
            ctx._drop_message()  # its bytes are free for the answer
        del self._contexts[ctx.request.id]  # from now on another request may have the id
        queued = self._answer(ctx, outcome)
        if received is not None:  # drop the params, which are not charged any more
            ctx.request = Request(ctx.request.id, ctx.request.method)
        return queued

    def _answer(self, ctx: Context, outcome: JsonObject | RequestError) -> bool:
        """Answer the request; return False if the answer cannot reach the client.

        A result that cannot be written fails only this call.
        """
        id, session = ctx.request.id, self.session
        try:
            if isinstance(outcome, RequestError):
                return session.refuse(id, outcome)
            return session.answer(id, outcome)
        except RequestError as refused:  # by the protocol object: the client has too many unread bytes
            return session.refuse(id, refused)
        except Exception as error:  # noqa: BLE001  # writing an author's object may raise any exception
            failed = self._run.dispatcher.broken(ctx, error)
            return session.refuse(id, failed) if isinstance(failed, RequestError) else session.answer(id, failed)

    def _forget(self, ctx: Context) -> None:
        if self._contexts.get(ctx.request.id) is ctx:
            del self._contexts[ctx.request.id]
        if self.held_reports:
            self.held_reports.pop(ctx.request.id, None)
        self._running -= 1
        if self.account.holder is None:
            self._run.running.held -= 1
        else:
            self._run.running.give(self.account.holder)
        if not self._running and self._idle is not None:
            self._idle.unpark_all()

    async def quiet(self) -> None:
        """Wait until no handler of this client runs.  Parked handlers do not count."""
        if self._idle is None:
            self._idle = trio.lowlevel.ParkingLot()
        while self._running:
            await self._idle.park()

    # Reports to the client.

    async def report(self, ctx: Context, method: str, *report: Any) -> None:
        """Send a report of progress or a log message, or hold it until there is room.

        Reports may come in quick succession, so they are collected for up to a millisecond.
        """
        waits = ctx._wire.full or ctx.request.id in self.held_reports
        if waits and await room.hold_report(self, ctx, method, *report):
            sent = False
        elif method == PROGRESS:
            sent = self.session.progress(ctx.request.id, *report)
        else:
            sent = self.session.notify(method, *report, about=ctx.request.id)
        if not sent:
            await trio.lowlevel.checkpoint()
            return
        wire = ctx._wire
        ctx._last_write = wire.mark
        wire.wake()
        if trio.current_time() - self._last_yield < _BATCH_SECONDS:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await wire.room()
            self._last_yield = trio.current_time()

    async def _flush_reports(self, ctx: Context) -> None:
        """Wait until the reports of a call are written, so that they are not in one piece with its answer.

        Held reports are sent first, as fast as the client reads.  Some clients lose progress that they read in one
        piece with the result.
        """
        held = self.held_reports.get(ctx.request.id)
        while held is not None and held.send_next(self.session):
            await ctx._wire.room()
        self.held_reports.pop(ctx.request.id, None)
        if ctx._last_write:
            await ctx._wire.written(ctx._last_write)

    async def tell(self, ctx: Context) -> None:
        """Send the queued messages of `ctx`.  Waits while too much is queued."""
        ctx._last_write = ctx._wire.mark
        ctx._wire.wake()
        await ctx._wire.room()

    async def ask(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, Any]:
        """Return the client's answers, read, by the keys of `questions`."""
        return await self._run.parking.ask(ctx, questions)

    # Changes.

    def _listen(self, ctx: Context) -> str | None:
        """Start a subscription.  Return the reason for refusing it, or None if it was answered, or will be."""
        extensions = self.session.offer.extensions
        try:
            if extensions is not None and extensions.asked(ctx.request.params, ctx._terms):
                why = self._take_place()
                if why is None:
                    _begin(self, ctx)  # extensions agree to the filter, then it is started
                return why
        except RequestError as error:
            self._answer(ctx, error)
            return None
        return self.subscribe(ctx, NOTHING)

    async def watch(self, request: Request) -> JsonObject:
        """Serve a legacy request to subscribe or unsubscribe."""
        return self._run.publisher.subscribe(self, request)

    def subscribe(self, ctx: Context, agreed: Mapping[str, Json]) -> str | None:
        """Start a subscription, as `_listen`.  `agreed` has the members of the filter that belong to extensions."""
        try:
            acknowledged = self._run.publisher.listen(self, ctx, self._run.dispatcher.may_subscribe, agreed)
        except Exception as error:  # noqa: BLE001  # the filter may fail like a handler
            self._answer(ctx, self._run.dispatcher.failure(ctx, error))
            return None
        if acknowledged:
            self._listening[ctx.request.id] = ctx._wire
            return None
        return (
            "the subscription was not acknowledged: the client has too many bytes to read "
            "(Limits.bytes_each, Limits.bytes_in_all)"
        )

    def tell_change(self, notification: Notification, about: Id | None, key: str | None = None) -> None:
        """Send a change for the listen request `about`, if it is still open, or for the session if that is None.

        While there is no room, only the newest notification of a method and `key` is held.  The default key is the URI.
        """
        wire = self.wire if about is None else self._listening.get(about)
        if wire is None:
            return  # the subscription has ended since the change was published
        if about is None and not self.session.opened and notification.method == _UPDATED:
            if self._early_changes is None:
                self._early_changes = {}
            self._early_changes[notification.params["uri"]] = notification
            return
        if wire.full:
            key = str(notification.params.get("uri")) if key is None else key
            self.held_changes[notification.method, key, about] = notification
        else:
            self.session.notify(notification.method, notification.params, about=about)
            wire.wake()

    def tell_early_changes(self) -> None:
        """The session is open: tell the changes that could not be told before."""
        early, self._early_changes = self._early_changes, None
        for notification in (early or {}).values():
            self.tell_change(notification, None)

    def release(self) -> None:
        """Send held messages, because there is room again.

        Call it when the wire of the session is drained.  All held change notifications go there: sessions over HTTP
        have no subscriptions on other wires.
        """
        if self.held_reports:
            room.send_held(self, lambda _: self.session.queued < self._run.limits.outgoing)
        held, self.held_changes = self.held_changes, {}
        for (_, _, about), notification in held.items():
            self.session.notify(notification.method, notification.params, about=about)

    # The end.

    async def drain(self) -> None:
        """End the subscriptions and wait for running calls; the run refuses new requests already.

        While tasks run, clients listen for their ends.
        """
        while self._run.awaited:
            await self._run.detached_ended()
        self._end_subscriptions()
        while self._contexts or self._parked:
            await self.quiet()
            for parked in self._parked:
                await parked.resumed.wait()

    @property
    def _parked(self) -> list[ParkedCall]:
        """The parked handlers whose questions were sent on this connection."""
        return [parked for parked in self._run.parked if parked.link is self]

    def _end_listener(self, id: Id) -> None:
        """Tell extensions that a subscription has ended."""
        if self.listeners is not None and (listener := self.listeners.pop(id, None)) is not None:
            listener.ended.set()

    def _end_subscriptions(self) -> None:
        listening, self._listening = self._listening, {}
        for id, wire in listening.items():  # sub-08
            self._end_listener(id)
            self.session.answer(id, self._run.publisher.close(self, id))
            wire.wake()

    def stop(self) -> None:
        """Close all wires; the server and its handlers have stopped."""
        wires = {self.wire, *(ctx._wire for ctx in self._contexts.values())}
        self.connection_lost("the server has stopped")
        for wire in wires:
            wire.close()


# These functions start and run a call.  They hold no reference to a session, because the call may move to another one,
# and so that an HTTP request is freed at its end.


def _begin(session: ServerSession, ctx: Context) -> None:
    """Start the handler of a request that has a place."""
    request = ctx.request
    session._contexts[request.id] = ctx
    target = request.params.get("name") or request.params.get("uri")
    if not isinstance(target, str):
        target = ""
    name = f"{request.method} {target} #{request.id}"
    if len(name) > 160 or not name.isprintable():  # the client chose it
        name = " ".join([printable(part[:80]) for part in (request.method, target, f"#{request.id}")])
    work: Work = _work
    if request.method in _IN_TURN:
        before, session._turn = session._turn, trio.Event()
        work = partial(_work_in_turn, before=before, done=session._turn)
    ctx._scope = session._run.workers.start(work, ctx, name, session._variables.copy()).scope


def start_work(run: Run, ctx: Context, name: str, variables: Variables) -> None:
    """Start the handler of a call that has no request, and so no place in the table of its session."""
    ctx._scope = run.workers.start(_work, ctx, name, variables).scope


async def _work_in_turn(worker: Worker, ctx: Context, *, before: trio.Event | None, done: trio.Event) -> None:
    """Run subscribe and unsubscribe requests in the order of their arrival; tasks start in any order."""
    try:
        if before is not None:
            with trio.CancelScope(shield=True):  # the one before is cancelled too, when all are
                await before.wait()
        await _work(worker, ctx)
    finally:
        done.set()


async def _work(worker: Worker, ctx: Context) -> None:
    """Run one call from start to end; it may end on another session."""
    session, outcome = ctx._link, None
    assert session is not None
    run = session._run
    try:
        try:
            await trio.lowlevel.checkpoint_if_cancelled()  # before the handler starts and a retry is spent
            result = await _result(run, worker, ctx)
            session = ctx._link
            if session is not None and not worker.spoilt and (ctx._last_write or session.held_reports):
                await session._flush_reports(ctx)
            outcome = result
        finally:
            ctx._over = True
            if ctx._waits:
                ctx._finish()
            session = ctx._link
            if outcome is None and worker.scope.cancel_called and session is not None:
                session._close(ctx, CANCELLED_CALL)
                ctx._wire.wake()
        if ctx._parked is not None:  # the handler did not wait for the client's answer; the retry gets its result
            if worker.spoilt:  # the task must not wait any more, so there is no request to answer
                run.parking.give_up(ctx._parked)
                ctx._parked.resumed.set()
            else:
                await ctx._parked.resumed.wait()
        session = ctx._link
        if session is not None:  # None: the client never retried
            queued = session._close(ctx, outcome)
            del result, outcome  # while a client reads slowly, its answer exists once, as bytes
            if queued and not worker.spoilt:
                await ctx._wire.flush(session._running > 1)
                if ctx._wire.full:
                    await ctx._wire.room()  # so that a client that does not read is not served without limit
            else:
                ctx._wire.wake()
    finally:  # also if it was cancelled together with the server; then there is no answer
        if ctx._received is not None:
            ctx._drop_message()
        session = ctx._link
        if session is not None:
            session._forget(ctx)


async def _result(run: Run, worker: Worker, ctx: Context) -> JsonObject | RequestError:
    # A function of its own, so that no frame of a traceback holds the error that is returned, or a cancellation.
    try:
        if _is_retry(ctx.request, ctx._terms):
            back = await run.parking.retry(ctx)
            if back is not None:
                # Nothing is sent for a handler that continues: its context has the request now.
                return back if isinstance(back, dict) else back.resume(ctx)
        work = run.dispatcher.serve(run.dispatcher.catalog, ctx, ctx.request)
        result = await (work if guarded is None else guarded(work))
        if scope_of(worker.task) is not worker.inside:  # compared here, because a call of `check` is slower
            worker.check()
        return result
    except BaseException as error:  # noqa: BLE001  # all failures of handlers end here
        stopped, failed = worker.judged(error)
        try:
            if stopped is None:
                assert failed is not None
                outcome = run.dispatcher.failure(ctx, failed)
                error.__traceback__ = None  # the error must not hold frames, because a frame might hold the error
                return outcome
            if failed is not None:
                _log.error("a handler failed while it was being stopped", exc_info=failed)
            raise sole(stopped)
        finally:
            del stopped, failed  # or they and this frame would hold each other


def _is_retry(request: Request, terms: Terms) -> bool:
    """Whether a request is a retry, which continues an earlier call."""
    return "requestState" in request.params and request.method in terms.revision.input_required


# Streams.


def socket_of(stream: trio.abc.Stream) -> trio.SocketStream | None:
    """The socket under a stream; None if it has none."""
    inner = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    return inner if isinstance(inner, trio.SocketStream) else None


def address_of(stream: trio.abc.Stream) -> str | None:
    """The IP address of the client; None if it has none, as on a Unix socket or a pipe."""
    if (inner := socket_of(stream)) is not None:
        with suppress(OSError):  # the client has gone already
            name = inner.socket.getpeername()
            return str(name[0]) if isinstance(name, tuple) else None
    return None


async def serve_stream(
    server: Server, stream: trio.abc.Stream, *, shutdown_timeout: float = 5.0, tap: Tap | None = None
) -> None:
    """Serve one client over a byte stream, one message on a line, then close the stream.

    `stream` is any Trio stream: a socket, a pipe, `trio.testing.memory_stream_pair`.  Inside ``async with
    server.running()`` all connections share one run; otherwise this connection has its own run, with its own lifespan.

    A client that closes its side of the stream may still read, as in ``printf ... | python server.py``.  Calls that run
    then have `shutdown_timeout` seconds to finish (`math.inf`: without a limit), and are answered.  Questions to the
    client fail at once.  A stream without half-close, such as TLS, ends as a whole.

    Returns when the client has gone, or the shared run has ended, and all handlers have ended.  A client that goes away
    raises no exception.  Exceptions of the lifespan, of `tap` and of `stream` pass through unchanged.  Raises
    `UsageError` if `shutdown_timeout` is not a number of seconds.

    It is safe to cancel: handlers are cancelled, and a line that was begun is finished.
    """
    check_seconds("shutdown_timeout", shutdown_timeout)
    keep_alive(stream)
    try:
        async with server._joined() as run:
            account = run.bytes.account(holder_of(None, address_of(stream)))
            network = socket_of(stream) is not None
            await converse(
                run,
                stream,
                Lines(run.limits),
                tap=tap,
                network=network,
                account=account,
                shutdown_timeout=shutdown_timeout,
            )
    finally:
        await close_stream(stream, trio.current_time() + CLOSING)  # if the server could not start, it is open still


async def converse(
    run: Run,
    stream: trio.abc.Stream,
    framing: Framing,
    *,
    tap: Tap | None = None,
    headers: Mapping[str, str] = NOTHING,
    principal: Any = None,
    heartbeat: float | None = None,
    network: bool = False,
    account: Account | None = None,
    shutdown_timeout: float | None = None,
) -> None:
    """Serve one client in an existing run, with any framing, then close the stream.

    `headers` and `principal` hold for every message.  After `heartbeat` seconds without a byte the client is pinged,
    and after as many seconds more the connection is closed.  With `network`, a client that does not read, or does not
    finish a message, is disconnected.  `account` is charged for the bytes that the server holds for the client.
    Without `shutdown_timeout` the end of input ends the connection, as in framings that have a close message.
    """
    account = run.bytes.account(None) if account is None else account
    session = _StreamSession(run, stream, framing, tap, account, headers, principal, shutdown_timeout)
    await session.serve(heartbeat, network)


class _StreamSession(ServerSession):
    """The session of a client on a byte stream: the `SessionHandler` of its `Duplex`, and a `RunMember` of its run."""

    clients = 1

    def __init__(
        self,
        run: Run,
        stream: trio.abc.Stream,
        framing: Framing,
        tap: Tap | None,
        account: Account,
        headers: Mapping[str, str],
        principal: Any,
        shutdown_timeout: float | None,
    ) -> None:
        self._headers = headers
        self._principal = principal
        self._shutdown_timeout = shutdown_timeout
        self._framing = framing
        finish = None if shutdown_timeout is None else self._finish_calls
        self._duplex = Duplex(
            self, stream, framing, run.limits, nursery=run.nursery, tap=tap, account=account, input_ended=finish
        )
        super().__init__(run, self._duplex, account=account)
        self._over = trio.Event()

    async def serve(self, heartbeat: float | None, network: bool) -> None:
        self._run.connections[self] = None
        try:
            async with open_nursery() as nursery:
                if self._run.draining:
                    nursery.start_soon(self._drain_and_end)
                await self._duplex.run(heartbeat, network=network)
        finally:
            with trio.CancelScope(shield=True):
                await self.quiet()
            self._run.connections.pop(self, None)
            self._over.set()
        if self._duplex.failure is not None:
            raise self._duplex.failure

    def receive(self, message: Message, now: float, **_: Any) -> None:
        super().receive(message, now, headers=self._headers, principal=self._principal, size=self._framing.size)

    async def _finish_calls(self) -> None:
        """The client has closed its side: give its calls `shutdown_timeout` seconds, and answer them."""
        self.input_ended()
        assert self._shutdown_timeout is not None
        with trio.move_on_after(self._shutdown_timeout):
            await self._all_answered()
            return
        self.abort_pending(
            f"this call had not finished {self._shutdown_timeout:g} seconds after the end of the client's input"
        )
        with trio.move_on_after(CLOSING):
            await self._all_answered()

    async def _all_answered(self) -> None:
        await self.quiet()
        await self._duplex.empty()

    async def drain(self) -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(self._drain_and_end)
            await self._over.wait()

    async def _drain_and_end(self) -> None:
        await super().drain()
        await self._duplex.end()
