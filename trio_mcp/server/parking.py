"""Questions of handlers to their clients: requests on the wire of the call, or parked handlers that wait for a retry.

With a session a question is a request of the server, and the handler waits for the response.  In 2026-07-28 servers
send no requests.  When a handler asks a question there, the server answers the current request with `input_required`
and parks the handler.  The client sends the answers in a new request, the retry, on this connection or another one.
The server first checks the retry (seal, age, principal, method, params and answers); a refused retry changes no state.
Then the handler continues, and its result answers the retry.  The middleware still wraps the handler as it did at the
first request, so it is not called for the retry.

A handler may stop waiting because of its own timeout or a failure.  It then continues without a request, and the next
retry gets its result instead of another question.

After a restart or on another replica, the handler of a retry is not in this process.  If it has `replay=True`, it is
started again with the answers of the sealed state and of the retry.  A handler that returned `InputRequired` is always
started again from the beginning.

mrtr-14: "Servers MUST NOT assume that clients will ... retry": the number of parked handlers, in all and for each
principal, and their time are limited.  They do not count as running requests.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    NotDeclared,
    RemoteProtocolError,
    RequestError,
    UsageError,
)
from trio_mcp.core.messages import ABSENT, Id, Json, JsonObject, Limits
from trio_mcp.core.request_state import SealedState, StateRefusal, StateSealer
from trio_mcp.core.requests import Answered, ConnectionLost, InvalidAnswer, Outcome, Refused
from trio_mcp.core.revisions import LATEST_LEGACY, NOTHING, Role, missing_capabilities
from trio_mcp.core.rounds import MAX_ROUNDS, Question, input_required, read_answers
from trio_mcp.core.shares import Shares
from trio_mcp.server.context import ClientError, ClientGone, Context
from trio_mcp.server.questions import ElicitUrl, Inquiry, UrlElicitationRequired
from trio_mcp.server.results import InputRequired

if TYPE_CHECKING:
    from trio_mcp.server.session import ServerSession
    from trio_mcp.transport.wire import Wire

__all__ = ["ParkedCall", "Parking", "PendingQuestion"]

_log = logging.getLogger("trio_mcp")
T = TypeVar("T")

_ASKING = "trio_mcp.extensions.tasks.asking"  # loaded by the first question that is asked by a task
_NOT_ASKED = "the question was not asked: the client has closed its side of the connection"
_JSON_ALONE = (
    "its response is plain JSON, which cannot carry questions: "
    "the server is set to json_only=True, or the request's Accept lacks text/event-stream"
)
_NO_SESSION = (
    "its answer could not come back: the request belongs to no session, because the server is set to sessions=False"
)


@attrs.define(eq=False)
class PendingQuestion:
    """A request of the server that waits for the client's answer."""

    id: Id
    wire: Wire | None = None
    done: trio.Event = attrs.field(factory=trio.Event)
    outcome: Outcome | None = None

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
            raise RemoteProtocolError(f"the client's answer to {outcome.method} is invalid: {outcome.why}")
        # The call was cancelled with its client, and this raises the cancellation, except under a shield.
        await trio.lowlevel.checkpoint_if_cancelled()
        why = outcome.why if isinstance(outcome, ConnectionLost) else "the client went away"
        raise ClientGone(f"the question had no answer: {why}")


@attrs.define(eq=False)
class ParkedCall:
    """One parked handler: its questions, and the answers so far."""

    ctx: Context
    handle: str
    holder: Hashable | None
    """The client that is charged for the place."""
    deadline: float
    asked: Mapping[str, Inquiry[Any]]
    open: Sequence[Question]
    """The questions without an answer, as they were sent."""
    link: ServerSession | None
    answers: dict[str, JsonObject] = attrs.field(factory=dict)
    values: dict[str, Any] = attrs.field(factory=dict)
    """The answers, as the handler gets them."""
    abandoned: bool = False
    """True: the handler has stopped waiting for the answers."""
    resumed: trio.Event = attrs.field(factory=trio.Event)
    """Set when a retry has given the call a request again, or when it can get no more retries."""

    def resume(self, retry: Context) -> JsonObject:
        """Give the request of `retry`, and its place among the running requests, to the parked handler."""
        session = retry._session("a retry")
        self.ctx._continue_with(retry)
        retry._wait_in(self)
        session._contexts[self.ctx.request.id] = self.ctx
        self.resumed.set()
        return {}


class Parking:
    """Asks the questions of the handlers of one run, and keeps the handlers that wait for a retry."""

    def __init__(
        self, sealer: StateSealer, limits: Limits, *, wall: Callable[[], float] | None = None, name: str | None = None
    ) -> None:
        self._sealer = sealer
        self._ttl = limits.parked_seconds
        self._each = limits.parked_each
        self._shares = Shares(limits.parked)
        # A handle with this prefix was made here, so a spent one is known without a list of them.  It is not a secret:
        # it comes back in a sealed state.
        self._prefix = f"{secrets.token_urlsafe(12) if name is None else name}."
        self._last = 0
        self.calls: dict[str, ParkedCall] = {}
        """The parked handlers by their handles, in the order of their deadlines."""
        # A sealed state may outlive the process, so its age is measured by the wall clock.
        self._wall = wall or time.time
        self._more = trio.Event()

    # Asking.

    async def ask(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, Any]:
        """Return the client's answers, read, by the keys of `questions`."""
        await trio.lowlevel.checkpoint_if_cancelled()  # first, because a request that is over raises another error
        if ctx._terms.revision.handshake:
            answers = await self.ask_raw(ctx, questions)
            return {key: question.read(answers[key]) for key, question in questions.items()}
        with ctx._waiting():
            given = ctx.request.params.get("inputResponses")
            if not ctx._rounds and isinstance(given, dict):
                # The first request of the call may have answers already, which saves a round.  It is safe, because the
                # client could give the same answers to the questions.
                early = {key for key, each in questions.items() if each.early and isinstance(given.get(key), dict)}
                ctx._recorded = {**ctx._recorded, **{key: given[key] for key in early}}
            known, values = ctx._recorded, NOTHING
            # Answers are known if the handler is run again, or the client sent them early.
            if unknown := {key: each for key, each in questions.items() if key not in known}:
                parked = await self._wait_for_retry(ctx, unknown)
                known, values = {**known, **parked.answers}, parked.values
                if ctx._replay:
                    ctx._recorded = known
            else:
                await trio.lowlevel.checkpoint()
        return {
            key: values[key] if key in values else _read_answer(key, question, known[key])
            for key, question in questions.items()
        }

    async def _wait_for_retry(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> ParkedCall:
        """Answer the current request with the questions, and wait for the request that brings the answers."""
        session = ctx._session("a question")
        # The answer may come on another connection of the run, or to another process.  Otherwise it cannot come.
        if session.session.half_closed and not (session._run.held or ctx._replay):
            raise ClientGone(_NOT_ASKED)
        if ctx._last_write:
            await session._flush_reports(ctx)
        # Meanwhile the call may have been cancelled, or another of its tasks has asked and moved it to another session.
        await trio.lowlevel.checkpoint_if_cancelled()
        session = ctx._session("a question")
        parked, asking = self.park(ctx, questions)
        try:
            session.session.answer(ctx.request.id, asking)
        except Exception:  # the questions cannot be written, as in `ServerSession._answer`
            self.give_up(parked)
            raise
        session._forget(ctx)
        ctx._wait_in(parked)
        ctx._wire.wake()
        try:
            await parked.resumed.wait()
        except trio.Cancelled:
            parked.abandoned = True
            raise
        return parked

    async def ask_raw(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, JsonObject]:
        """Ask as legacy revisions do: send requests, all at once, on the wire of the call.  Return the answers."""
        await trio.lowlevel.checkpoint_if_cancelled()
        session = ctx._session("a question")
        with ctx._waiting():
            try:
                asking = self.write(ctx, questions)
            except NotDeclared as error:
                if session.alone:  # without sessions the server forgets `initialize`; the client may have it declared
                    error.args = (f"{ctx.method} has a question, and {_NO_SESSION}",)
                raise
            if any("task" in each.params for each in asking):
                answers: dict[str, JsonObject] = await import_module(_ASKING).ask_by_task(ctx, asking)
                return answers
            return await self.send(ctx, session, asking)

    async def send(self, ctx: Context, session: ServerSession, asking: Sequence[Question]) -> dict[str, JsonObject]:
        """Send requests to the client, all at once, on the wire of the call.  Return the answers by key."""
        with ctx._waiting():
            asked: dict[str, PendingQuestion] = {}
            if ctx._wire.answers_only or session.alone:
                why = f"{ctx.method} has a question, and {_NO_SESSION if session.alone else _JSON_ALONE}"
                _log.warning("%s", why)
                raise RequestError(INTERNAL_ERROR, why)
            protocol = session.session
            if protocol.half_closed:
                raise ClientGone(_NOT_ASKED)
            if not protocol.opened:
                raise RemoteProtocolError("nothing can be asked before the client has sent notifications/initialized")
            if any("tools" in question.params for question in asking):
                ctx._rounds = _next_round(ctx)  # samp-19; in 2026-07-28 the client counts all questions
            try:
                for question in asking:
                    id = protocol.request(question.method, question.params, about=ctx.request.id)
                    asked[question.key] = session._asked[id] = PendingQuestion(id, ctx._wire)
                await session.tell(ctx)
                return {key: await each.result() for key, each in asked.items()}
            finally:
                for each in asked.values():
                    if session._asked.pop(each.id, None) is not None:
                        protocol.cancel(each.id, "the call that asked has ended")
                        ctx._wire.wake()
                        session.wire.wake()  # the notice goes there if no more messages are sent for the call

    async def answers_to(self, ctx: Context, returned: InputRequired) -> JsonObject | None:
        """Ask the questions that a handler returned.

        Returns the `input_required` result for the client, or None if the handler is to be started again now: the
        context has the answers.
        """
        link = ctx._link
        detached = link is not None and link.detached
        if not (ctx._terms.revision.handshake or detached):
            return self.ask_again(ctx, returned.questions, returned.state)
        ctx._rounds = _next_round(ctx)
        if link is not None and link.detached:  # it has no request that could be answered with questions; its host asks
            keys = ctx._new_keys(returned.questions)  # xtask-28
            given = await link.ask_raw(ctx, {keys[name]: each for name, each in returned.questions.items()})
            ctx.answers = {**ctx.answers, **{name: given[key] for name, key in keys.items()}}
        else:
            ctx.answers = {**ctx.answers, **await self.ask_raw(ctx, returned.questions)}
        ctx.state = returned.state
        return None

    def pages_of(self, ctx: Context, error: RequestError) -> InputRequired | None:
        """Turn `UrlElicitationRequired` into questions, for revisions without this error code (elic-56).

        Returns None in revisions that have the code, and for other errors.  Raises as `ctx.elicit_url`, for a client
        that cannot be asked.
        """
        if not isinstance(error, UrlElicitationRequired):
            return None
        pages = {f"url-{number}": question for number, question in enumerate(error.questions, 1)}
        self.write(ctx, pages)  # elic-12
        if ctx._terms.revision.handshake:
            return None
        if any(ctx.answers.get(key, NOTHING).get("action") in ("decline", "cancel") for key in pages):
            raise RequestError(INTERNAL_ERROR, error.message)  # elic-50: the user has said no already
        return InputRequired(pages, ctx.state)

    def ask_again(self, ctx: Context, questions: Mapping[str, Inquiry[Any]], carried: Json) -> JsonObject:
        """Return the `input_required` result for a handler that will be started again with the answers."""
        round, asked = _next_round(ctx), self.write(ctx, questions)
        asking = input_required(ctx._terms.revision, ctx.request.method, None, asked, "")
        again = [list(questions), dict(ctx.answers), carried]
        asking["requestState"] = self._seal(ctx, round, None, again)
        ctx._rounds = round
        return asking

    def park(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> tuple[ParkedCall, JsonObject]:
        """Park the call of `ctx`.  Return the parked call and the `input_required` result for its client.

        Raises the errors of `write`, and RequestError if too many calls are parked, or the state is too large.  After
        an error the call is not parked.
        """
        round, asked = _next_round(ctx), self.write(ctx, questions)
        asking = input_required(ctx._terms.revision, ctx.request.method, None, asked, "")
        principal, link = ctx.principal, ctx._link
        assert link is None or not link.detached
        holder = principal if link is None or link.account.holder is None else link.account.holder
        self._last += 1
        handle = f"{self._prefix}{self._last}"
        deadline = trio.current_time() + self._ttl
        parked = ParkedCall(ctx, handle, holder, deadline, questions, asked, link)
        asking["requestState"] = self._seal(ctx, round, parked)
        # `each` limits one authenticated user; one address without authentication can have many users.
        if (principal is not None and self._shares.of(holder) >= self._each) or not self._shares.take(holder):
            raise RequestError(INTERNAL_ERROR, "Too many calls are waiting for input: try again later")
        ctx._rounds = round
        self.calls[handle] = parked
        self._more.set()
        return parked, asking

    def write(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> list[Question]:
        """Write questions for the client of `ctx`.

        Raises `NotInThisRevision` or `NotDeclared` if the client does not support one of them; then none is sent.
        """
        terms, written = ctx._terms, []
        for key, question in questions.items():
            if not isinstance(question, Inquiry):
                kinds = "Elicit(...), ElicitUrl(...), Sample(...) or ListRoots()"
                raise UsageError(f"{key!r} must be a question, got {type(question).__name__}; write {kinds}")
            params = question.params(terms.revision)
            method = terms.revision.request(Role.SERVER, question.method)
            method = method or terms.revision.input_requests[question.method]
            # The error names the last missing capability, which is the most specific: for a client without elicitation
            # it names the url mode.
            lacking = missing_capabilities(terms.revision, method, params, terms.capabilities)
            lacking += [need for need in question.needs(terms.revision) if not terms.declares(*need)]
            if lacking:
                raise NotDeclared(question.method, "client", lacking[-1])
            # task-02.  Only 2025-11-25 has tasks of clients.
            tasks = question.task and terms.revision is LATEST_LEGACY
            if tasks and terms.declares("tasks", "requests", *question.method.split("/")):
                params = {**params, "task": {}}
            written.append(Question(key, question.method, params))
        ctx._pages += tuple([question for question in questions.values() if isinstance(question, ElicitUrl)])
        return written

    def _seal(self, ctx: Context, round: int, parked: ParkedCall | None, again: Json = None) -> str:
        """Seal the request state of a parked handler, or of one that is started again.

        `again` is set if the handler may be started again.  It has the keys of the questions, because only answers to
        these keys are accepted (mrtr-24), and the `answers` and the `state` of the context.
        """
        handle, recorded = None, ctx._recorded
        if parked is not None:
            handle, recorded = parked.handle, NOTHING
            if ctx._replay:
                again = [list(parked.asked), dict(ctx.answers), ctx.state]
                recorded = {**ctx._recorded, **parked.answers}
        state = SealedState(round, self._wall() + self._ttl, handle, recorded, again)
        return self._sealer.seal(state, ctx.request.method, ctx.request.params, ctx.principal)

    # Retries.

    async def retry(self, ctx: Context) -> ParkedCall | JsonObject | None:
        """Process a retry: a request with a `requestState`.

        Returns the parked call that continues now, or a result that asks for missing answers.  Returns None if the
        caller must start the handler; `ctx` then has the answers and the state.

        Raises the RequestError for the client if the retry is refused; then no state has changed.  Not a checkpoint.
        """
        return self._continue(ctx, self._open(ctx))

    def _open(self, ctx: Context) -> SealedState:
        """Open the state of a retry.  Raises the RequestError for the client if it is refused."""
        params, method = ctx.request.params, ctx.request.method
        state = self._sealer.open(params["requestState"], method, params, ctx.principal, self._wall())
        if isinstance(state, StateRefusal):
            raise state.error
        return state

    def _continue(self, ctx: Context, state: SealedState) -> ParkedCall | JsonObject | None:
        params, method = ctx.request.params, ctx.request.method
        parked = None if state.handle is None else self.calls.get(state.handle)
        if parked is None:
            if state.handle is not None:
                if state.handle.startswith(self._prefix):  # mrtr-11
                    raise StateRefusal.SPENT.error
                if state.carried is None:
                    raise StateRefusal.ELSEWHERE.error
                ctx._refusal = StateRefusal.ELSEWHERE.error
            _start_again(ctx, state)
            return None
        if not parked.abandoned:
            answers = read_answers(parked.open, params)
            # Each answer is read here, so that an invalid answer is refused and the client can send it again.
            values = {key: _read_answer(key, parked.asked[key], answer) for key, answer in answers.given.items()}
            parked.answers.update(answers.given)
            parked.values.update(values)
            parked.open = answers.missing
            if parked.open:  # ask for them, under the terms of this retry; the other answers are kept (mrtr-25)
                if parked.ctx._rounds >= MAX_ROUNDS:
                    why = f"answers are missing from inputResponses after {MAX_ROUNDS} rounds"
                    raise RequestError(INVALID_PARAMS, why)
                asking = input_required(ctx._terms.revision, method, ctx._terms.capabilities, parked.open, "")
                asking["requestState"] = self._seal(parked.ctx, parked.ctx._rounds + 1, parked)
                parked.ctx._rounds += 1
                return asking
        self.give_up(parked)
        return parked

    def give_up(self, parked: ParkedCall) -> None:
        """Remove a parked call.  Later retries of it are refused."""
        if self.calls.pop(parked.handle, None) is not None:
            self._shares.give(parked.holder)

    # Time.

    async def run(self) -> None:
        """Cancel handlers whose client does not retry in time (mrtr-14).  At the end, cancel all parked handlers."""
        try:
            while True:
                first = next(iter(self.calls.values()), None)
                if first is None:
                    self._more = trio.Event()
                    await self._more.wait()
                elif first.deadline > trio.current_time():
                    await trio.sleep_until(first.deadline)
                else:
                    self._cancel(first, "the client did not send its answers in time (Limits.parked_seconds)")
        finally:
            # The tasks are cancelled at the same time, but a shielded task would continue to wait for its answer.
            self.stop()

    @property
    def is_busy(self) -> bool:
        return bool(self.calls)

    def stop(self) -> None:
        """Cancel all parked handlers, because the server accepts no more retries."""
        for parked in tuple(self.calls.values()):
            self._cancel(parked, "the server has stopped")

    def _cancel(self, parked: ParkedCall, reason: str) -> None:
        self.give_up(parked)
        parked.ctx._cancel(reason)
        parked.resumed.set()


def _next_round(ctx: Context) -> int:
    """Return the number of the next round.  Raises UsageError after `MAX_ROUNDS`."""
    if ctx._rounds >= MAX_ROUNDS:
        raise UsageError(f"{ctx.method} has asked {MAX_ROUNDS} times; clients stop after as many rounds")
    return ctx._rounds + 1


def _read_answer(key: str, question: Inquiry[T], answer: JsonObject) -> T:
    """Read an answer of a retry.  If it does not fit the question, raise the RequestError for the retry (mrtr-23)."""
    try:
        return question.read(answer)
    except RemoteProtocolError as error:
        raise RequestError(INVALID_PARAMS, f"inputResponses[{key!r}]: {error}") from None


def _start_again(ctx: Context, state: SealedState) -> None:
    """Give the context of a handler that is started again the answers of the state and of the retry."""
    asked, answers, carried = state.carried
    responses = ctx.request.params.get("inputResponses", {})
    given = {key: responses[key] for key in asked if key in responses} if isinstance(responses, dict) else None
    # Only the JSON types are checked here (mrtr-22), because the handler reads the answers.
    if given is None or not all(isinstance(answer, dict) for answer in given.values()):
        raise RequestError(INVALID_PARAMS, "inputResponses must be an object of objects")
    ctx._rounds, ctx.state = state.round, carried
    if state.handle is None:
        ctx.answers, ctx._recorded = {**answers, **given}, dict(state.answers)
    else:
        ctx.answers, ctx._recorded = answers, {**state.answers, **given}
