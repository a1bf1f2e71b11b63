"""One client, whatever carries its messages: what it asks for is run, and what it is asked comes back.

Messages go in by `hear`; what is to be sent waits in the session until the transport takes it out, each message under
the wire that it belongs on: that of the request in whose course it is sent, or (None) that of the conversation itself.
On one stream those are the same; a session over HTTP has a wire for each request, and one that stands alone.  Each
request runs in a task and a cancel scope that are its own for as long as it runs (see `crew`), which the client's
cancellation reaches and nothing else.

| The session reports | What happens |
|---|---|
| Call | a handler is started, or waits its turn, or is refused; a subscription begins to listen |
| RequestCancelled | its handler's scope is cancelled; it leaves the queue; the subscription ends |
| an outcome of a request of ours | whoever asked goes on |
| Agreed | the session hears of changes from now on |
| Notice that the roots have changed | they are asked for again when needed |
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import trio

from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    NotDeclared,
    RemoteProtocolError,
    RequestError,
    UsageError,
    shown,
)
from trio_mcp.core.jsonrpc import (
    ABSENT,
    PROGRESS,
    Error,
    Event,
    Id,
    InvalidMessage,
    JsonObject,
    Message,
    Notification,
    Request,
    encode,
    prepare,
    prepared_progress,
)
from trio_mcp.core.outcomes import Answered, ConnectionLost, InvalidAnswer, Outcome, Refused, RequestCancelled
from trio_mcp.core.revisions import Role
from trio_mcp.core.session import Call, Notice, ServerProtocol, SessionAgreed
from trio_mcp.core.shares import LONG, Account
from trio_mcp.core.state import LinkKind
from trio_mcp.core.subscriptions import ChangeKind
from trio_mcp.core.terms import NOTHING, Terms
from trio_mcp.server.context import LOG, ClientError, ClientGone, Context
from trio_mcp.server.parking import ParkedCall, early_answers, next_round, read_answer, write_questions
from trio_mcp.server.publishing import ListenerKey
from trio_mcp.server.run import Run
from trio_mcp.transport.nursery import sole
from trio_mcp.transport.outbox import Wire
from trio_mcp.transport.workers import Work, Worker, guarded

if TYPE_CHECKING:
    from trio_mcp.server.questions import Inquiry
    from trio_mcp.transport.paths import Roots

__all__ = ["UNFINISHED", "ServerProtocol"]

_log = logging.getLogger("trio_mcp")
_LISTEN = "subscriptions/listen"
_ROOTS_CHANGED = "notifications/roots/list_changed"
# Seconds for which reports wait for each other: a turn of the loop and a write cost ten times as much as one of them.
_IN_A_ROW = 0.001
_ROOTS = 16 * 1024  # characters of roots that are kept for as long as a session lasts; others are asked for each time
_LOGS = 16  # log messages of one call that are kept for a client which has too much to read
# Seconds between two reports of one call that are kept: a loop that does nothing but report would take all of the CPU.
_APART = 0.05
_SHUTTING_DOWN = "the server is shutting down"
UNFINISHED = "the server has shut down before this call had finished"
"""What is said for a call that draining has given no more time."""
_HALF_CLOSED = "the client has closed its side of the connection"
_NOT_ASKED = f"the question was not asked: {_HALF_CLOSED}"
_JSON_ALONE = (
    "this response is JSON alone, which carries none: "
    "the server is set to json_only=True, or the request's Accept lacks text/event-stream"
)
_NO_SESSION = (
    "nothing could bring the answer back: the request came in no session, for the server is set to sessions=False"
)
_TO_NOBODY = RequestError(INTERNAL_ERROR, "cancelled")
_IN_TURN = frozenset({"resources/subscribe", "resources/unsubscribe"})


class _PendingQuestion:
    """A request of ours."""

    __slots__ = ("done", "id", "outcome")

    def __init__(self, id: Id) -> None:
        self.id = id
        self.done = trio.Event()
        self.outcome: Outcome | None = None

    async def result(self) -> JsonObject:
        await self.done.wait()
        outcome = self.outcome
        if isinstance(outcome, Answered):
            return outcome.result
        if isinstance(outcome, Refused):
            error = outcome.error
            data = None if error.data is ABSENT else error.data
            raise ClientError(outcome.method, error.code, error.message, data)
        if isinstance(outcome, InvalidAnswer):
            raise RemoteProtocolError(f"the client's answer to {outcome.method} is none: {outcome.why}")
        # With the client went the call, and its cancellation says so best; only under a shield it is not heard.
        await trio.lowlevel.checkpoint_if_cancelled()
        why = outcome.why if isinstance(outcome, ConnectionLost) else "the client went away"
        raise ClientGone(f"the question had no answer: {why}")


class _HeldReports:
    """What a call has reported while its client had too much to read: the last progress, and the first log messages."""

    __slots__ = ("_length", "at", "ctx", "dropped", "logs", "progress")

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.at = -math.inf  # when the last one was kept
        self.logs: deque[JsonObject] = deque()
        self._length = 0  # of all log messages that were ever kept
        self.dropped = 0  # log messages for which there was no place
        self.progress: tuple[float, float | None, str | None] | None = None

    def add_log(self, text: bytes) -> None:
        """Keep a message as it was written: what its author does with the data afterwards does not change it."""
        if len(self.logs) < _LOGS and self._length + len(text) <= LONG:
            self._length += len(text)
            self.logs.append(json.loads(text)["params"])
        else:
            self.dropped += 1

    def send_next(self, session: ServerProtocol) -> bool:
        """Send the next of them; False if there is nothing more."""
        id = self.ctx.request.id
        if self.logs:
            session.notify(LOG, self.logs.popleft(), about=id)
        elif self.dropped:
            said = f"{self.dropped} log messages of this call were dropped: the client did not read fast enough"
            self.dropped = 0
            session.notify(LOG, {"level": "warning", "data": said}, about=id)
        elif self.progress is not None:
            report, self.progress = self.progress, None
            session.progress(id, *report)
        else:
            return False
        self.ctx._last_write = self.ctx._wire.mark
        return True


class _ChargedMessage:
    """A long message, which is charged until the last call that it has brought has ended."""

    __slots__ = ("_account", "_size", "calls", "limit")

    def __init__(self, account: Account, size: int) -> None:
        self._account = account
        self._size = size
        self.calls = 1  # with the hearing of it
        self.limit = account.take(size)
        """The limit that does not allow it, if one does not."""

    def drop(self) -> None:
        """One of them has ended."""
        self.calls -= 1
        if not self.calls and self.limit is None:
            self._account.give(self._size)


class ServerSession:
    """One client of a running server; see the head of this file.

    `wire` is the conversation's own; without `changes` nothing can be told by it, and none are promised.  With `terms`
    the session is open under them from the start: that is how a request which comes in no session is served.  What is
    held for the client is in its `account`, whose holder is the one in whose name it takes of what all clients share.
    """

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
        self._offer = run.offer if changes else run.quiet_offer
        self.session = ServerProtocol(self._offer(), link=link, limits=run.limits, terms=terms)
        self.session.account = self.account = run.bytes.account(None) if account is None else account
        self._run = run
        self._wire = wire
        self._alone = terms is not None
        self._share = run.admission.share(self._begin, self.account.holder)
        self._opening: _ChargedMessage | None = None  # what opened the session, if that is long
        self._contexts: dict[Id, Context] = {}  # of the requests that are at work and wait for their answers
        self._asked: dict[Id, _PendingQuestion] = {}
        # Notices that found no room.  Each stands for all of its kind, so there are no more than there are listeners.
        self._held: dict[tuple[str, str, Id | None], Notification] = {}
        self._limited = run.calls.limited
        self._kept: dict[Id, _HeldReports] = {}  # reports of calls, likewise: of each call no more than a few
        # Where requests came in that no task is at work for: those that listen, and those that wait for their turn.
        self._listening: dict[Id, Wire] = {}
        self._waiting: dict[Id, Wire] = {}
        self._roots: Roots | None = None
        self._roots_changes = 0
        self._quiet = trio.lowlevel.ParkingLot()
        self._variables = copy_context()
        self._bursts = link is LinkKind.DUPLEX  # a client with many calls in flight has them on one stream
        self._turn: trio.Event | None = None
        self._reported = -math.inf  # when who reported something last let others have their turn

    # What comes in.

    @trio.lowlevel.enable_ki_protection  # what has come is taken in whole
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
        """Take in what came by this wire, or by the conversation's own; it takes so many bytes while it is held.

        What is answered at once waits in the session, and nobody is woken: the transport looks when it has been heard.
        """
        self.session.offer = self._offer()  # a kind of thing that the server lacked may have been added
        about = self._wire if wire is None else wire
        received = _ChargedMessage(self.account, size) if size > LONG else None
        opens = received is not None and self.session.terms is None and type(message) is Request
        if opens:
            message = self._without_room(message, received)
        for event in self.session.receive(message, now, about=about, principal=principal, headers=headers):
            if type(event) is Call:
                self._call(event, about, received)
            else:
                self._act(event)
        if received is not None:
            if opens and self.session.terms is not None:
                self._opening = received
            else:
                received.drop()

    def _without_room(self, message: Message, received: _ChargedMessage | None) -> Message:
        """A request to open the session, or its refusal: what the client says of itself is kept for as long as that."""
        limit = None if received is None else received.limit
        if limit is None or not isinstance(message, Request) or message.method != "initialize":
            return message
        why = f"too much is held that this client has sent (Limits.{limit}); end other sessions, or try again later"
        return InvalidMessage(why, Error(message.id, INTERNAL_ERROR, why))

    def connection_lost(self, why: str) -> None:
        """The client is gone: its handlers are cancelled, and nothing more is sent.

        That is for whoever owns the conversation to know: of a session, no wire of it takes the others with it.
        """
        for event in self.session.connection_lost(why=why):
            self._act(event)
        if self._bursts:
            self._run.workers.trim()
        self._run.publisher.listeners.forget(ListenerKey(self, None))
        self._run.calls.forget(self.account)
        if self._opening is not None:
            self._opening.drop()
            self._opening = None

    def input_ended(self) -> None:
        """The client sends nothing more, and may still read.

        Its calls go on; nothing can be asked any more, and of changes it is told nothing: it cannot ask for what has
        changed, nor end a subscription.
        """
        for event in self.session.input_ended(_HALF_CLOSED):
            self._act(event)
        self._end_subscriptions()
        self._run.publisher.listeners.forget(ListenerKey(self, None))

    def abort_pending(self, why: str) -> None:
        """What runs and what waits is ended, and the client, which is here, is told so."""
        error = RequestError(INTERNAL_ERROR, why)
        wires = self._waiting | {id: ctx._wire for id, ctx in self._contexts.items()}
        for id in wires:
            self.session.refuse(id, error)
            self._withdraw(id)
        self._waiting.clear()
        self._quiet.unpark_all()
        for ctx in self._contexts.values():
            ctx._cancel(why)
        for wire in wires.values():
            wire.wake()

    @property
    def busy(self) -> bool:
        """Whether there is something that a drain would have to wait for, or to end."""
        return bool(self._contexts or self._waiting or self._listening)

    @property
    def alone(self) -> bool:
        """Whether this is one request, of a client that has neither a session nor a stream of its own."""
        return self._alone or self.session.link is LinkKind.EXCHANGE

    @property
    def at_work(self) -> bool:
        """Whether a handler runs that is not waiting for its client."""
        return any(not ctx._asking for ctx in self._contexts.values())

    def undeliverable(self, id: Id) -> None:
        """A question of ours, which was to be sent, cannot reach the client."""
        for event in self.session.fail(id, "the client has left, and cannot come back for it"):
            self._act(event)

    def _act(self, event: Event) -> None:
        if isinstance(event, RequestCancelled):
            self._cancel(event)
        elif isinstance(event, Outcome):
            asked = self._asked.pop(event.id)
            asked.outcome = event
            asked.done.set()
        elif isinstance(event, SessionAgreed):
            declared = self.session.declared(event.terms.revision)
            self._run.publisher.listeners.add_session(ListenerKey(self, None), declared, self.account)
        elif isinstance(event, Notice):  # that the roots have changed: no other comes this far
            self._roots, self._roots_changes = None, self._roots_changes + 1
        else:
            _log.debug("%s", event)

    def _call(self, call: Call, wire: Wire, received: _ChargedMessage | None) -> None:
        id = call.request.id
        if self._run.dismissed or (self._run.draining and not _goes_on(call.request, call.terms)):
            self.session.refuse(id, RequestError(INTERNAL_ERROR, _SHUTTING_DOWN))
        elif self._limited and (wait := self._run.calls.wait(self.account.holder or self.account)):
            why = (
                f"more than {self._run.limits.call_rate:g} calls a second (Limits.call_rate); try again in {wait:.3g} s"
            )
            self.session.refuse(id, RequestError(INTERNAL_ERROR, why))
        elif received is not None and received.limit is not None:
            why = f"too much waits to be answered that this client has sent (Limits.{received.limit}); try again later"
            self.session.refuse(id, RequestError(INTERNAL_ERROR, why))
        elif call.request.method == _LISTEN:
            self._listen(call, wire)
        elif (full := self._share.enter(id, (self, call, wire, received))) is not None:
            self.session.refuse(id, RequestError(INTERNAL_ERROR, full))
        else:
            if received is not None:
                received.calls += 1
            if id not in self._contexts:
                self._waiting[id] = wire

    def _cancel(self, event: RequestCancelled) -> None:
        id = event.id
        ctx = self._contexts.get(id)
        if ctx is not None:
            ctx._cancel(event.reason or "the client cancelled the request")
            return
        # It waited its turn, or was a subscription; nobody else will say that it has ended.
        wire = self._waiting.pop(id, None) or self._listening.pop(id, None)
        self._withdraw(id)
        self._run.publisher.listeners.forget(ListenerKey(self, id))
        self._held = {key: held for key, held in self._held.items() if key[2] != id}
        self.session.refuse(id, RequestError(INTERNAL_ERROR, "cancelled"))
        if wire is not None:  # None: its handler was cancelled before, with the server
            wire.wake()

    def _withdraw(self, id: Id) -> None:
        """A request that waits its turn, if it does, will not be started."""
        admitted = self._share.withdraw(id)
        if admitted is not None and (received := admitted[3]) is not None:
            received.drop()

    # Requests.

    @staticmethod  # bound to nobody: a request by HTTP is freed at its end
    def _begin(admitted: tuple[ServerSession, Call, Wire, _ChargedMessage | None]) -> None:
        self, call, wire, received = admitted
        request = call.request
        if self._waiting:
            self._waiting.pop(request.id, None)
        worker = self._run.workers.hire()
        ctx = self._contexts[request.id] = Context(self, request, call.terms, wire, worker.scope)
        if received is not None:
            ctx._received = received
        name = request.params.get("name", request.params.get("uri"))
        if not isinstance(name, str):
            name = ""
        elif not name.isidentifier() or len(name) > 80:
            name = repr(name[:80])[1:-1]  # the client's words, on one line
        work: Work = self._work
        if request.method in _IN_TURN:
            before, self._turn = self._turn, trio.Event()
            work = partial(self._work_in_turn, before=before, done=self._turn)
        name = f"{request.method} {name} #{request.id}"
        self._run.workers.start(worker, work, ctx, name, self._variables.copy())

    async def _work_in_turn(self, worker: Worker, ctx: Context, *, before: trio.Event | None, done: trio.Event) -> None:
        """Of a subscription and its end, the one that was sent last is to count, and tasks begin in any order."""
        try:
            if before is not None:
                with trio.CancelScope(shield=True):  # whoever is before ends, too, when all do
                    await before.wait()
            await self._work(worker, ctx)
        finally:
            done.set()

    async def _work(self, worker: Worker, ctx: Context) -> None:
        """One call, from its beginning to its end, which may be on another link."""
        outcome: JsonObject | RequestError | None = None
        try:
            try:
                await trio.lowlevel.checkpoint_if_cancelled()  # then nothing is begun, and nothing spent
                result = await self._result(worker, ctx)
                if worker.spoilt:
                    outcome = result
                    self._end_now(ctx, outcome)
                    return
                link: Any = ctx._link
                if link is not None:
                    if link._kept:
                        await link._send_kept(ctx)
                    if ctx._last_write:
                        await link._part(ctx)
                outcome = result
            finally:
                ctx._finish()
                if outcome is None and ctx._is_cancelled and (link := _of(ctx)) is not None:
                    link._close(ctx, _TO_NOBODY)
                    ctx._wire.wake()
            if ctx._parked is not None:  # it did not wait for the client's answer; the retry gets what has come of it
                await ctx._parked.resumed.wait()
            at: Any = ctx._link
            if at is not None:  # None: the client never came back
                received = ctx._received
                if received is not None:
                    ctx._received = None
                    received.drop()  # its room is for the answer now
                said = at._close(ctx, outcome)
                if received is not None:
                    ctx.request = Request(ctx.request.id, ctx.request.method)  # without what is not charged any more
                del result, outcome  # while a client reads slowly, its answer is there once, as bytes
                await at._end(ctx, said)
        finally:  # also when it was cancelled together with the server; then nobody is told
            if ctx._received is not None:
                ctx._received.drop()
            at = ctx._link
            if at is not None:
                at._forget(ctx)

    async def _result(self, worker: Worker, ctx: Context) -> JsonObject | RequestError:
        # By itself: an error that is returned here is held by no frame of its own traceback, nor is a cancellation.
        try:
            if _goes_on(ctx.request, ctx._terms):
                back = self._run.parking.retry(ctx)
                if isinstance(back, ParkedCall):
                    self._hand_over(ctx, back)
                    return {}  # to nobody: another context has its request now
                if back is not None:
                    return back
            result = await guarded(self._run.dispatcher(ctx))
            worker.check()
            return result
        except BaseException as error:  # noqa: BLE001  # the one place where failures of handlers end
            stopped, failed = worker.judged(error)
            try:
                if stopped is None:
                    assert failed is not None
                    outcome = self._run.dispatcher.failure(ctx, failed)
                    error.__traceback__ = None  # an answer keeps no frame, for a frame might keep the answer
                    return outcome
                if failed is not None:
                    _log.error("a handler failed while it was being stopped", exc_info=failed)
                raise sole(stopped)
            finally:
                del stopped, failed  # or they would hold this frame, which holds them

    def _hand_over(self, ctx: Context, parked: ParkedCall) -> None:
        """From now on this request, and its place among the running ones, are those of the handler that waited."""
        ctx._detach(parked)
        ctx._received, parked.ctx._received = parked.ctx._received, ctx._received  # each keeps one of them for as long
        parked.ctx._attach(self, ctx.request, ctx._terms, ctx._wire)
        self._contexts[ctx.request.id] = parked.ctx
        parked.resumed.set()

    def _end_now(self, ctx: Context, outcome: JsonObject | RequestError) -> None:
        """As `_end`, in a task that must not wait any more."""
        if ctx._parked is not None:  # it did not wait for the client's answer, so that nobody would hear this before
            self._run.parking.give_up(ctx._parked)
            ctx._parked.resumed.set()
        link = _of(ctx)
        if link is not None:
            link._close(ctx, outcome)
            ctx._wire.wake()

    async def _end(self, ctx: Context, said: bool) -> None:
        if not said:
            ctx._wire.wake()
            return
        await ctx._wire.flush()
        if ctx._wire.full:
            await ctx._wire.room()  # so that who does not read is not served without end

    def _close(self, ctx: Context, outcome: JsonObject | RequestError) -> bool:
        """The call has ended with this; False if nobody hears it."""
        del self._contexts[ctx.request.id]  # from now on another may have the id
        return self._say(ctx, outcome)

    async def _part(self, ctx: Context) -> None:
        """Keep what was told in the course of a request apart from its answer.

        Some clients lose progress that they read in one piece with the result.
        """
        await ctx._wire.written(ctx._last_write)

    def _say(self, ctx: Context, outcome: JsonObject | RequestError) -> bool:
        """Answer the request; False if nobody hears it.  A result that cannot be written costs this call only."""
        try:
            return self._write_answer(ctx.request.id, outcome)
        except RequestError as refused:  # by the session: it finds no room among what the client has not read
            return self._write_answer(ctx.request.id, refused)
        except Exception as error:  # noqa: BLE001  # an author's object may raise anything when it is written
            return self._write_answer(ctx.request.id, self._run.dispatcher.broken(ctx, error))

    def _write_answer(self, id: Id, outcome: JsonObject | RequestError) -> bool:
        if isinstance(outcome, RequestError):
            return self.session.refuse(id, outcome)
        return self.session.answer(id, outcome)

    def _forget(self, ctx: Context) -> None:
        if self._contexts.get(ctx.request.id) is ctx:
            del self._contexts[ctx.request.id]
        if self._kept:
            self._kept.pop(ctx.request.id, None)
        self._share.leave()
        if self._quiet and not self._share.running:
            self._quiet.unpark_all()

    async def quiet(self) -> None:
        """Wait until no handler of this client is at work or about to be; those that wait for a retry are nobody's."""
        while self._share.running or self._waiting:
            await self._quiet.park()

    # Questions to the client.

    async def tell(self, ctx: Context) -> None:
        self._tell(ctx)
        await ctx._wire.room()

    def keeps(self, ctx: Context) -> bool:
        return ctx._wire.full or (bool(self._kept) and ctx.request.id in self._kept)

    async def keep(self, ctx: Context, method: str, *report: Any) -> bool:
        ctx._wire.wake()
        for _ in range(2):  # a writer that can write has had its turn then, whatever the order of tasks
            await trio.lowlevel.checkpoint()
        kept = self._kept.get(ctx.request.id)
        if kept is not None and ctx._wire.full:
            await trio.sleep_until(kept.at + _APART)
        id = ctx.request.id
        if self._contexts.get(id) is not ctx:
            return True  # meanwhile another task of the call has ended it, or it goes on in another conversation
        kept = self._kept.get(id)
        while kept is not None and not ctx._wire.full:  # in their order
            if not kept.send_next(self.session):
                del self._kept[id]
                kept = None
        if kept is None and not ctx._wire.full:
            return False
        if method == PROGRESS:
            progress, total, message = report
            if total is not None and type(total) is not int and not (type(total) is float and math.isfinite(total)):
                raise UsageError(f"a total is a number, not {shown(total)}")
            if not (message is None or isinstance(message, str)):
                raise UsageError(f"the message with progress is a string, not {type(message).__name__}")
            prepare(prepared_progress(0, progress, total, message))  # it raises for what cannot be written
            kept = self._kept.setdefault(id, _HeldReports(ctx))
            if message is not None and len(message) > LONG:
                message = None  # it may wait for long, beside those of thousands of calls
            kept.progress = progress, total, message
        else:
            (params,) = report
            text = encode(prepare(Notification(method, params)))
            if not ctx._terms.wants_log(params["level"]):
                return True
            kept = self._kept.setdefault(id, _HeldReports(ctx))
            kept.add_log(text)
        kept.at = trio.current_time()
        return True

    async def _send_kept(self, ctx: Context) -> None:
        """Send all that is kept of a call that is about to be answered, as fast as its client reads."""
        kept = self._kept.get(ctx.request.id)
        while kept is not None and kept.send_next(self.session):
            await ctx._wire.room()
        self._kept.pop(ctx.request.id, None)

    def send_kept(self, room: Callable[[Wire], bool]) -> None:
        """Send what calls have reported meanwhile, on wires that have room."""
        for id, kept in tuple(self._kept.items()):
            while room(kept.ctx._wire):
                if not kept.send_next(self.session):
                    del self._kept[id]
                    break

    async def report(self, ctx: Context) -> None:
        self._tell(ctx)
        if trio.current_time() - self._reported < _IN_A_ROW:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await ctx._wire.room()
            self._reported = trio.current_time()

    def _tell(self, ctx: Context) -> None:
        ctx._last_write = ctx._wire.mark
        ctx._wire.wake()

    async def tell_apart(self, method: str, params: JsonObject) -> bool:
        told = self.session.notify(method, params)
        self._wire.wake()
        await self._wire.room()
        return told

    async def ask(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, Any]:
        answers = await self.ask_raw(ctx, questions)
        if ctx._terms.revision.handshake:
            return {key: question.read(answers[key]) for key, question in questions.items()}
        return {key: read_answer(key, question, answers[key]) for key, question in questions.items()}

    async def ask_raw(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, JsonObject]:
        """The answers as they came."""
        await trio.lowlevel.checkpoint_if_cancelled()  # that the request is over would be an error
        with ctx._waiting():
            if ctx._terms.revision.handshake:
                return await self._by_requests(ctx, questions)
            return await self._by_rounds(ctx, questions)

    async def _by_requests(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, JsonObject]:
        """The legacy way: requests of ours, all at once, on the stream of the call that they belong to."""
        asked: dict[str, _PendingQuestion] = {}
        try:
            asking = write_questions(ctx, questions)
        except NotDeclared as error:
            if self._alone:  # where `initialize` leaves nothing behind, it is not the client that lacks it
                error.args = (f"{ctx.method} has a question, and {_NO_SESSION}",)
            raise
        if ctx._wire.answers_only or self._alone:
            why = f"{ctx.method} has a question, and {_NO_SESSION if self._alone else _JSON_ALONE}"
            _log.warning("%s", why)
            raise RequestError(INTERNAL_ERROR, why)
        if self.session.half_closed:
            raise ClientGone(_NOT_ASKED)
        if not self.session.opened:
            raise RemoteProtocolError("nothing can be asked before the client has sent notifications/initialized")
        if any("tools" in question.params for question in asking):
            ctx._rounds = next_round(ctx)  # samp-19; in 2026-07-28 the client counts, whatever it is asked
        try:
            for question in asking:
                id = self.session.request(question.method, question.params, about=ctx.request.id)
                asked[question.key] = self._asked[id] = _PendingQuestion(id)
            await self.tell(ctx)
            return {key: await each.result() for key, each in asked.items()}
        finally:
            for each in asked.values():
                if self._asked.pop(each.id, None) is not None:
                    self.session.cancel(each.id, "the call that asked has ended")
                    ctx._wire.wake()
                    self._wire.wake()  # the notice goes there when nothing more is sent for the call

    async def _by_rounds(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, JsonObject]:
        """The modern way: the question answers the request at hand, and the next request brings the answers."""
        ctx._recorded = {**ctx._recorded, **early_answers(ctx, questions)}
        unknown = {key: question for key, question in questions.items() if key not in ctx._recorded}
        if not unknown:  # a handler that is run again, or a client that knew what it would be asked
            await trio.lowlevel.checkpoint()
            return ctx._recorded
        # The answer may come on another connection of the run, or to another process.
        if self.session.half_closed and not (self._run.held or ctx._replay):
            raise ClientGone(_NOT_ASKED)
        if ctx._last_write:
            await self._part(ctx)
        # Meanwhile it may have been cancelled; and another task of it may have asked, and go on elsewhere.
        await trio.lowlevel.checkpoint_if_cancelled()
        parked = cast("ServerSession", ctx._open_link("a question"))._park(ctx, unknown)
        try:
            await parked.resumed.wait()
        except trio.Cancelled:
            parked.abandoned = True
            raise
        answers = {**ctx._recorded, **parked.answers}
        if ctx._replay:
            ctx._recorded = answers
        return answers

    def _park(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> ParkedCall:
        parked, asking = self._run.parking.park(ctx, questions)
        try:
            self._write_answer(ctx.request.id, asking)
        except Exception:  # what is asked cannot be written, as in `_say`
            self._run.parking.give_up(parked)
            raise
        self._forget(ctx)
        ctx._detach(parked)
        ctx._wire.wake()
        return parked

    async def roots(self, ctx: Context) -> Roots:
        """root-12, root-13: kept for as long as the client would tell of changes, or else for this call."""
        from trio_mcp.server.questions import ListRoots

        told = ctx._terms.revision.notification(Role.CLIENT, _ROOTS_CHANGED) is not None
        told = told and ctx._terms.declares("roots", "listChanged")
        kept, changes = self._roots if told else None, self._roots_changes
        if kept is not None:
            await trio.lowlevel.checkpoint()
            return kept
        roots: Roots = (await ctx.ask(roots=ListRoots()))["roots"]
        if not told:
            ctx._kept_roots = roots
        elif changes == self._roots_changes and len(repr(roots)) <= _ROOTS:
            self._roots = roots
        return roots

    # Changes.

    def _listen(self, call: Call, wire: Wire) -> None:
        request, id = call.request, call.request.id
        declared = self.session.declared(call.terms.revision)
        ctx = Context(self, request, call.terms, wire)
        try:
            listeners = self._run.publisher.listeners
            acknowledged = listeners.listen(ListenerKey(self, id), self._visible(ctx), declared, self.account)
        except Exception as error:  # noqa: BLE001  # a filter is asked, and may fail like a handler
            self._say(ctx, self._run.dispatcher.failure(ctx, error))
        else:
            if self.session.notify(acknowledged.method, acknowledged.params, about=id):
                self._listening[id] = ctx._wire
                return
            self._run.publisher.listeners.forget(ListenerKey(self, id))
            why = (
                "the subscription was not acknowledged: too much waits to be read by this client "
                "(Limits.bytes_each, Limits.bytes_in_all)"
            )
            self.session.refuse(id, RequestError(INTERNAL_ERROR, why))

    def _visible(self, ctx: Context) -> Request:
        """The request without the resources that are none for this principal; the acknowledgement leaves them out."""
        asked = ctx.request.params.get("notifications")
        uris = asked.get(ChangeKind.RESOURCE.field) if isinstance(asked, dict) else None
        if not isinstance(asked, dict) or not isinstance(uris, list) or not all(isinstance(uri, str) for uri in uris):
            return ctx.request
        uris = list(dict.fromkeys(uris))
        if len(uris) > self._run.limits.listener_changes:
            return ctx.request  # to be refused, before the filter is asked a million times
        kept = [uri for uri in uris if self._run.dispatcher.may_subscribe(ctx, uri)]
        params = {**ctx.request.params, "notifications": {**asked, ChangeKind.RESOURCE.field: kept}}
        return Request(ctx.request.id, ctx.request.method, params)

    def tell_change(self, notification: Notification, about: Id | None) -> None:
        wire = self._wire if about is None else self._listening[about]
        if wire.full:
            self._held[notification.method, str(notification.params.get("uri")), about] = notification
        else:
            self.session.notify(notification.method, notification.params, about=about)
            wire.wake()

    def release(self) -> None:
        """There is room again: what was held back follows.  To be called when the conversation's own wire is drained,
        which is where all of it goes: no session over HTTP has subscriptions on other wires.
        """
        self.send_kept(lambda _: self.session.queued < self._run.limits.outgoing)
        held, self._held = self._held, {}
        for (_, _, about), notification in held.items():
            self.session.notify(notification.method, notification.params, about=about)

    # The end.

    async def drain(self) -> None:
        """End the subscriptions in good order, and wait for what is running; the run takes nothing new any more."""
        self._waiting.clear()
        self._quiet.unpark_all()
        for _, call, wire, received in self._share.clear():
            self.session.refuse(call.request.id, RequestError(INTERNAL_ERROR, _SHUTTING_DOWN))
            wire.wake()
            if received is not None:
                received.drop()
        self._end_subscriptions()
        while self._contexts or self._run.parking.parked_by(self):
            await self.quiet()
            await self._run.parking.wait_for(self)

    def _end_subscriptions(self) -> None:
        listening, self._listening = self._listening, {}
        for id, wire in listening.items():  # sub-08
            result = self._run.publisher.listeners.close(ListenerKey(self, id))
            assert result is not None  # what has ended is not listed any more
            self.session.answer(id, result.result)
            wire.wake()

    def stop(self) -> None:
        """The server has stopped: so have all handlers, and nothing more goes out on any wire."""
        wires = {self._wire, *(ctx._wire for ctx in self._contexts.values())}
        self.connection_lost("the server has stopped")
        for wire in wires:
            wire.close()


def _of(ctx: Context) -> ServerSession | None:
    """The conversation that the request at hand belongs to, if there is one."""
    link: Any = ctx._link
    return link  # type: ignore[no-any-return]


def _goes_on(request: Request, terms: Terms) -> bool:
    """Whether a request is said to go on with a call that was begun before."""
    return "requestState" in request.params and request.method in terms.revision.input_required
