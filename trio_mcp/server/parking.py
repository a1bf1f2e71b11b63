"""Parking: keep handlers that wait for a retry, so that `ctx.ask` works in revisions without server requests.

A parked handler is a handler that waits for answers and has no request.  When a handler asks a question, the server
answers the current request with `input_required` and parks the handler.  The client sends the answers in a new request,
the retry, on this connection or another one.  The server first checks the retry (seal, age, principal, method, params
and answers); a refused retry changes no state.  Then the handler continues, and its result answers the retry.  The
middleware still wraps the handler as it did at the first request, so it is not called for the retry.

A handler may stop waiting because of its own timeout or a failure.  It then continues without a request, and the next
retry gets its result instead of another question.

After a restart or on another replica, the handler of a retry is not in this process.  If it has `replay=True`, it is
started again with the answers of the sealed state and of the retry.  A handler that returned `InputRequired` is always
started again from the beginning.

The number of parked handlers and their time are limited (`core.rounds`).  They do not count as running requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from trio_mcp.core.errors import (
    INVALID_PARAMS,
    McpError,
    NotDeclared,
    RemoteProtocolError,
    RequestError,
    UsageError,
)
from trio_mcp.core.messages import Json, JsonObject, Limits
from trio_mcp.core.revisions import NOTHING, Role, missing_capabilities
from trio_mcp.core.rounds import (
    MAX_ROUNDS,
    ParkedKeys,
    Question,
    SealedState,
    StateRefusal,
    StateSealer,
    input_required,
    read_answers,
)
from trio_mcp.server.context import Context

if TYPE_CHECKING:
    from trio_mcp.server.questions import Inquiry
    from trio_mcp.server.session import ServerSession

__all__ = ["ParkedCall", "Parking", "next_round", "read_answer", "write_questions"]

T = TypeVar("T")


def write_questions(ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> list[Question]:
    """Write questions for the client of `ctx`.

    Raises `NotInThisRevision` or `NotDeclared` if the client does not support one of them; then none is sent.
    """
    from trio_mcp.server.questions import ElicitUrl, Inquiry

    terms, wire = ctx._terms, []
    for key, question in questions.items():
        if not isinstance(question, Inquiry):
            kinds = "Elicit(...), ElicitUrl(...), Sample(...) or ListRoots()"
            raise UsageError(f"{key!r} must be a question, got {type(question).__name__}; write {kinds}")
        params = question.params(terms.revision)
        method = terms.revision.request(Role.SERVER, question.method)
        method = method or terms.revision.input_requests[question.method]
        # The error names the last missing capability, which is the most specific: for a client without elicitation it
        # names the url mode.
        lacking = missing_capabilities(terms.revision, method, params, terms.capabilities)
        lacking += [need for need in question.needs(terms.revision) if not terms.declares(*need)]
        if lacking:
            raise NotDeclared(question.method, "client", lacking[-1])
        wire.append(Question(key, question.method, params))
    ctx._pages += tuple(question for question in questions.values() if isinstance(question, ElicitUrl))
    return wire


def read_answer(key: str, question: Inquiry[T], answer: JsonObject) -> T:
    """Read an answer of a retry.  If it does not fit the question, raise the RequestError for the retry (mrtr-23)."""
    try:
        return question.read(answer)
    except RemoteProtocolError as error:
        raise RequestError(INVALID_PARAMS, f"inputResponses[{key!r}]: {error}") from None


def next_round(ctx: Context) -> int:
    """Return the number of the next round.  Raises UsageError after `MAX_ROUNDS`."""
    if ctx._rounds >= MAX_ROUNDS:
        raise UsageError(f"{ctx.method} has asked {MAX_ROUNDS} times; clients stop after as many rounds")
    return ctx._rounds + 1


@attrs.define(eq=False)
class ParkedCall:
    """One parked handler: its questions, and the answers so far."""

    ctx: Context
    handle: str
    asked: Mapping[str, Inquiry[Any]]
    questions: list[Question]
    """The questions of `asked`, as they were sent."""
    link: ServerSession | None
    answers: dict[str, JsonObject] = attrs.field(factory=dict)
    values: dict[str, Any] = attrs.field(factory=dict)
    """The answers, as the handler gets them."""
    abandoned: bool = False
    """True: the handler has stopped waiting for the answers."""
    resumed: trio.Event = attrs.field(factory=trio.Event)
    """Set when a retry has given the call a request again, or when it can get no more retries."""

    @property
    def open(self) -> list[Question]:
        """The questions without an answer."""
        return [each for each in self.questions if each.key not in self.answers]


class Parking:
    """All handlers of one server that wait for a retry."""

    def __init__(self, sealer: StateSealer, limits: Limits, *, wall: Callable[[], float] | None = None) -> None:
        self._sealer = sealer
        self._ttl = limits.parked_seconds
        self._parked = ParkedKeys(
            secrets.token_urlsafe(12), ttl=self._ttl, limit=limits.parked, each=limits.parked_each
        )
        self._calls: dict[str, ParkedCall] = {}
        # A sealed state may outlive the process, so its age is measured by the wall clock.
        self._wall = wall or time.time
        self._more = trio.Event()

    def __len__(self) -> int:
        return len(self._calls)

    # Asking.

    def park(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> tuple[ParkedCall, JsonObject]:
        """Park the call of `ctx`.  Return the parked call and the `input_required` result for its client.

        Raises the errors of `write_questions`, and RequestError if too many calls are parked.  After an error the call
        is not parked.
        """
        round, asked = next_round(ctx), write_questions(ctx, questions)
        # Before the call is parked, because this may raise.  The questions are checked.
        asking = input_required(ctx._terms.revision, ctx.request.method, None, asked, "")
        handle = self._parked.park(ctx.principal, trio.current_time(), ctx._holder)
        parked = self._calls[handle] = ParkedCall(ctx, handle, questions, asked, ctx._link)
        self._more.set()
        try:
            asking["requestState"] = self._state_of(parked, round)
        except McpError:  # the state is too large
            self.give_up(parked)
            raise
        return parked, asking

    def ask_again(self, ctx: Context, questions: Mapping[str, Inquiry[Any]], carried: Json) -> JsonObject:
        """Return the `input_required` result for a handler that will be started again with the answers."""
        round, asked = next_round(ctx), write_questions(ctx, questions)
        asking = input_required(ctx._terms.revision, ctx.request.method, None, asked, "")
        again = [list(questions), dict(ctx.answers), carried]
        return {**asking, "requestState": self._seal(ctx, round, None, ctx._recorded, again)}

    def _state_of(self, parked: ParkedCall, round: int) -> str:
        ctx = parked.ctx
        if not ctx._replay:  # the handler is not started again, so the state needs only the handle
            return self._seal(ctx, round, parked.handle, NOTHING, None)
        again = [list(parked.asked), dict(ctx.answers), ctx.state]
        return self._seal(ctx, round, parked.handle, {**ctx._recorded, **parked.answers}, again)

    def _seal(
        self, ctx: Context, round: int, handle: str | None, recorded: Mapping[str, JsonObject], again: Json
    ) -> str:
        """Seal the request state.

        `again` is set if the handler may be started again.  It has the keys of the questions, because only answers to
        these keys are accepted (mrtr-24), and the `answers` and the `state` of the context.
        """
        state = SealedState(round, self._wall() + self._ttl, handle, recorded, again)
        sealed = self._sealer.seal(state, ctx.request.method, ctx.request.params, ctx.principal)
        ctx._rounds = round
        return sealed

    # Retries.

    def retry(self, ctx: Context) -> ParkedCall | JsonObject | None:
        """Process a retry: a request with a `requestState`.

        Returns the parked call that continues now, or a result that asks for missing answers.  Returns None if the
        caller must start the handler; `ctx` then has the answers and the state.

        Raises the RequestError for the client if the retry is refused; then no state has changed.
        """
        params = ctx.request.params
        state = self._sealer.open(params["requestState"], ctx.method, params, ctx.principal, self._wall())
        if isinstance(state, StateRefusal):
            raise state.error
        parked = None if state.handle is None else self._calls.get(state.handle)
        if parked is None:
            if state.handle is not None:
                refusal = self._parked.take(state.handle)
                assert refusal is not None  # `_parked` and `_calls` have the same handles
                if refusal is not StateRefusal.ELSEWHERE or state.carried is None:
                    raise refusal.error
                ctx._refusal = refusal.error
            self._start_again(ctx, state)
            return None
        if not parked.abandoned:
            answers = read_answers(parked.open, params)
            # Each answer is read here, so that an invalid answer is refused and the client can send it again.
            values = {key: read_answer(key, parked.asked[key], answer) for key, answer in answers.given.items()}
            parked.answers.update(answers.given)
            parked.values.update(values)
            if answers.missing:  # ask for them, under the terms of this retry; the other answers are kept (mrtr-25)
                if parked.ctx._rounds >= MAX_ROUNDS:
                    why = f"answers are missing from inputResponses after {MAX_ROUNDS} rounds"
                    raise RequestError(INVALID_PARAMS, why)
                asking = input_required(ctx._terms.revision, ctx.method, ctx._terms.capabilities, parked.open, "")
                return {**asking, "requestState": self._state_of(parked, next_round(parked.ctx))}
        self.give_up(parked)
        return parked

    @staticmethod
    def _start_again(ctx: Context, state: SealedState) -> None:
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

    def give_up(self, parked: ParkedCall) -> None:
        """Remove a parked call.  Later retries of it are refused."""
        if self._calls.pop(parked.handle, None) is not None:
            self._parked.take(parked.handle)

    async def wait_for_all(self) -> None:
        """Wait until every call that is parked now has been resumed or given up."""
        for parked in list(self._calls.values()):
            await parked.resumed.wait()

    def parked_by(self, link: ServerSession) -> list[ParkedCall]:
        """Return the parked calls whose questions were sent on this connection."""
        return [parked for parked in self._calls.values() if parked.link is link]

    # Time.

    async def run(self) -> None:
        """Cancel handlers whose client does not retry in time (mrtr-14).  At the end, cancel all parked handlers."""
        try:
            while True:
                deadline = self._parked.next_deadline()
                if deadline is None:
                    self._more = trio.Event()
                    await self._more.wait()
                else:
                    await trio.sleep_until(deadline)
                    due = self._parked.expire(trio.current_time())
                    self._cancel(due, "the client did not send its answers in time (Limits.parked_seconds)")
        finally:
            # The tasks are cancelled at the same time, but a shielded task would continue to wait for its answer.
            self.stop()

    def stop(self) -> None:
        """Cancel all parked handlers, because the server accepts no more retries."""
        self._cancel(list(self._calls), "the server has stopped")

    def _cancel(self, handles: Collection[str], reason: str) -> None:
        for handle in handles:
            parked = self._calls.pop(handle)
            self._parked.take(handle)
            parked.ctx._cancel(reason)
            parked.resumed.set()
