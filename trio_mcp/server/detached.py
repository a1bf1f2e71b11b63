"""Calls without a request: the request is answered, and the handler goes on with a host in place of its client.

`Context.detach` answers a request at once with a result of an extension.  From then on a `DetachedCall` is the session
and the wire of the context, and passes reports, questions and the outcome on to a `CallHost`.  Tasks are such calls.

A handler of a notification is detached from the start, because it has no request.  So is a call that an extension
starts by itself, such as one from before a restart of the server (`ExtensionRun.start`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import trio

from trio_mcp.core.errors import INTERNAL_ERROR, RequestError, UsageError
from trio_mcp.core.messages import PROGRESS, Id, Json, JsonObject, Request, encode, prepare
from trio_mcp.core.requests import LinkKind
from trio_mcp.core.revisions import Terms
from trio_mcp.core.rounds import Question
from trio_mcp.core.shares import LONG, holder_of
from trio_mcp.server.context import ClientGone, Context
from trio_mcp.server.session import CANCELLED_CALL, ChargedMessage, ServerSession, start_work
from trio_mcp.transport.wire import Wire

if TYPE_CHECKING:
    from trio_mcp.core.revisions import Revision
    from trio_mcp.core.session import Notice, ServerProtocol
    from trio_mcp.core.shares import Account
    from trio_mcp.server.questions import Inquiry
    from trio_mcp.server.run import Run
    from trio_mcp.transport.paths import Roots

__all__ = ["CallHost", "DetachedCall", "ExtensionRun", "detach", "notice_call", "session_for_notices"]

_log = logging.getLogger("trio_mcp")


class CallHost(Protocol):
    """The object of an extension that takes the place of the client of a detached call."""

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Take a progress report of the handler."""

    async def log(self, level: str, data: Json, logger: str | None) -> None:
        """Take a log message of the handler."""

    async def ask(self, questions: Sequence[Question]) -> Mapping[str, JsonObject]:
        """Return the answers to questions of the handler, by their keys."""

    async def finish(self, outcome: JsonObject | RequestError) -> None:
        """Take the result of the call, or its error.  Not called if the call was cancelled."""


class _NoClient:
    """The host of the handler of a notification."""

    def __init__(self, method: str) -> None:
        self._method = method

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        await trio.lowlevel.checkpoint()

    async def log(self, level: str, data: Json, logger: str | None) -> None:
        await trio.lowlevel.checkpoint()

    async def ask(self, questions: Sequence[Question]) -> Mapping[str, JsonObject]:
        raise UsageError(f"{self._method} is a notification: it has no answer, so its handler cannot ask the client")

    async def finish(self, outcome: JsonObject | RequestError) -> None:
        if isinstance(outcome, RequestError):
            _log.info("the notification %s was refused: %s", self._method, outcome.message)
        await trio.lowlevel.checkpoint()


class DetachedCall(Wire):
    """A call without a request.  It is the session and the wire of its context, and passes all on to a `CallHost`."""

    __slots__ = (
        "_ctx", "_host", "_outcome", "_place", "_run", "_session", "account", "held_reports", "roots", "roots_changes",
    )  # fmt: skip
    detached: ClassVar[Literal[True]] = True
    _running: ClassVar[int] = 0  # other calls that are about to end on this wire

    def __init__(
        self, ctx: Context, run: Run, host: CallHost, session: ServerSession | None, account: Account, *, place: bool
    ) -> None:
        self._ctx = ctx
        self._run = run
        self._host = host
        self._session = session
        self._place = place  # it has a place among the running requests of the session
        self._outcome: JsonObject | RequestError | None = None
        self.account = account
        self.held_reports: Mapping[Id, Any] = {}
        self.roots: Roots | None = None
        self.roots_changes = 0

    # For extensions.

    @property
    def host(self) -> CallHost:
        """The host of the call."""
        return self._host

    def cancel(self, reason: str) -> None:
        """Cancel the handler.  Does nothing after its end."""
        self._ctx._cancel(reason)

    def notify(self, method: str, params: Mapping[str, Json] | None = None) -> bool:
        """Send a notification in the session of the call.  False: there is no session, or the client has gone."""
        if (protocol := self._open_session()) is None or self._session is None:
            return False
        sent = protocol.notify(method, dict(params or {}))
        self._session.wire.wake()
        return sent

    def progress(
        self,
        token: Id,
        progress: float,
        total: float | None = None,
        message: str | None = None,
        meta: JsonObject | None = None,
    ) -> bool:
        """Report progress in the session of the call, under the token of its request (prog-11).  False: as `notify`."""
        if (protocol := self._open_session()) is None or self._session is None:
            return False
        sent = protocol.progress_later(token, progress, total, message, meta)
        self._session.wire.wake()
        return sent

    def _open_session(self) -> ServerProtocol | None:
        """The session that outlives the request, if there is one and the client has not gone."""
        protocol = None if self._session is None else self._session.session
        return None if protocol is None or protocol.closed or protocol.terms is None or self._alone else protocol

    @property
    def _alone(self) -> bool:
        return self._session is None or self._session.alone

    # As a session.

    @property
    def origin(self) -> ServerSession | None:
        """The session of the call or the notification."""
        return self._session

    @property
    def session(self) -> ServerProtocol | _Silence:
        return self._open_session() or _SILENCE

    @property
    def wire(self) -> Wire:
        return self if self._session is None else self._session.wire

    def report(self, ctx: Context, method: str, *report: Any) -> Awaitable[None]:
        if method == PROGRESS:
            return self._host.progress(*report)
        (params,) = report
        return self._host.log(params["level"], params["data"], params.get("logger"))

    async def tell(self, ctx: Context) -> None:
        self.wire.wake()
        await trio.lowlevel.checkpoint()

    async def ask(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, Any]:
        answers = await self.ask_raw(ctx, questions)
        return {key: question.read(answers[key]) for key, question in questions.items()}

    async def ask_raw(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, JsonObject]:
        await trio.lowlevel.checkpoint_if_cancelled()
        with ctx._waiting():
            return await self._host.ask(self._run.parking.write(ctx, questions))

    async def _flush_reports(self, ctx: Context) -> None:
        await trio.lowlevel.checkpoint()

    def _close(self, ctx: Context, outcome: JsonObject | RequestError) -> bool:
        self._outcome = None if outcome is CANCELLED_CALL else outcome
        return True

    def _forget(self, ctx: Context) -> None:
        self._run.detached.pop(self, None)
        if not self._run.detached:
            self._run.attached.unpark_all()
        if self._place and self._session is not None:
            self._place = False
            if self._session.noticing is not None:
                self._session.noticing.pop(ctx, None)
            self._session._forget(ctx)

    # As a wire.

    def wake(self) -> None:
        """Also called at the end of a handler whose task must not wait any more."""
        if self._outcome is not None:
            self._run.nursery.start_soon(self._finish, name="the end of a detached call")

    async def flush(self, batch: bool = False) -> None:
        if self._outcome is not None:
            await self._finish()

    async def _finish(self) -> None:
        outcome, self._outcome = self._outcome, None
        assert outcome is not None
        finishing = self._host.finish(outcome)
        del outcome  # the host may have to drop it
        try:
            await finishing
        except Exception:  # noqa: BLE001  # the host is code of an extension, and the server goes on
            _log.exception("the extension could not take the result of %s", self._ctx.method)

    def close(self) -> None:
        """Do nothing: the handler ends with the run of the server."""


class _Silence:
    """The protocol object of a call whose session has ended: nothing is sent."""

    def notify(self, method: str, params: JsonObject, about: Id | None = None) -> bool:
        return False


_SILENCE = _Silence()


async def detach(ctx: Context, host: CallHost, result: JsonObject) -> DetachedCall:
    """Answer the request of a call with `result`, and let its handler go on without it; see `Context.detach`."""
    session = ctx._open_link("a result")
    if isinstance(session, DetachedCall):
        raise UsageError(f"{ctx.method} has been detached from its request already")
    if ctx._last_write:
        await session._flush_reports(ctx)
    await trio.lowlevel.checkpoint_if_cancelled()
    session, wire = ctx._session("a result"), ctx._wire
    if not session.session.answer(ctx.request.id, result):
        await trio.lowlevel.checkpoint_if_cancelled()
        raise ClientGone(f"{ctx.method} was not detached: the client has gone")
    session._forget(ctx)
    call = DetachedCall(ctx, session._run, host, session, session.account, place=False)
    _put(ctx, call)
    session._run.detached[call] = None
    wire.wake()
    return call


def _put(ctx: Context, call: DetachedCall) -> None:
    ctx._link, ctx._wire, ctx._last_write = call, call, 0


def notice_call(session: ServerSession, notice: Notice) -> Context:
    """Return the context for the handler of a notification, which has taken a place already."""
    note = notice.notification
    ctx = Context(session, Request("", note.method, note.params), notice.terms, session.wire)
    call = DetachedCall(ctx, session._run, _NoClient(note.method), session, session.account, place=True)
    _put(ctx, call)
    session._run.detached[call] = None
    return ctx


class _NoAnswers(Wire):
    """The wire of a notification that came alone over HTTP, whose response has no body, or of no message at all."""

    __slots__ = ()
    answers_only = True

    def wake(self) -> None: ...

    def close(self) -> None: ...


def session_for_notices(run: Run, account: Account, revision: Revision) -> ServerSession:
    """Return a session for one notification outside any session."""
    terms, link = (Terms(revision), LinkKind.SESSION) if revision.handshake else (None, LinkKind.EXCHANGE)
    return ServerSession(run, _NoAnswers(), account=account, link=link, terms=terms, changes=False)


class ExtensionRun:
    """One run of a server, for the background work of an extension."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def start(self, request: Request, terms: Terms, host: CallHost) -> DetachedCall:
        """Start the handler of a request that no client waits for, such as one from before a restart.

        Raises `RequestError` if the server holds too many bytes of calls.
        """
        ctx, call = self._detached(request, terms, host)
        if (size := len(encode(prepare(request)))) > LONG:
            ctx._received = ChargedMessage(call.account, size)
            if (limit := ctx._received.limit) is not None:
                raise RequestError(INTERNAL_ERROR, f"the server holds too many bytes of calls (Limits.{limit})")
        self._run.detached[call] = None
        start_work(self._run, ctx, f"{request.method}, detached", copy_context())
        return call

    def context(self, request: Request, terms: Terms, host: CallHost) -> Context:
        """Return the context of a detached call whose work is done by the extension, and not by a handler."""
        return self._detached(request, terms, host)[0]

    def _detached(self, request: Request, terms: Terms, host: CallHost) -> tuple[Context, DetachedCall]:
        ctx = Context(None, request, terms, _NoAnswers())
        account = self._run.bytes.account(holder_of(ctx.principal, None))
        call = DetachedCall(ctx, self._run, host, None, account, place=False)
        _put(ctx, call)
        return ctx, call
