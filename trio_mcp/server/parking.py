"""Handlers that wait for a retry: how a handler asks straight through where a server cannot send requests.

A question of a handler answers the request at hand with `input_required` and parks the handler.  The answers come with
another request, on this connection or another one; that request is checked (seal, age, principal, method and params,
and the answers themselves) before anything is spent, and then the handler goes on under it.  The middleware that it was
started through is still round it; the retry passes through none.

A handler need not wait: one that gives up after a time of its own, or fails meanwhile, goes on without a request, and
the retry gets its result instead of another question.

A retry whose handler is not here, after a restart or on another replica, starts a handler that was declared
`replay=True` from the beginning, with the answers that its sealed state and the retry carry.  A retry of a handler that
returned `InputRequired` always starts it from the beginning: that is what it asked for.

What waits is bounded in number and time (`core.rounds`), and waiting costs no place among the running requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from trio_mcp.core.errors import (
    INVALID_PARAMS,
    McpError,
    NotDeclared,
    RemoteProtocolError,
    RequestError,
    UsageError,
)
from trio_mcp.core.jsonrpc import Json, JsonObject, Limits
from trio_mcp.core.revisions import Role, missing_capabilities
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
from trio_mcp.core.terms import NOTHING, stable_name
from trio_mcp.server.context import Context, ContextLink

if TYPE_CHECKING:
    from trio_mcp.server.questions import Inquiry

__all__ = ["ParkedCall", "Parking", "next_round", "read_answer", "volunteered", "worded"]

T = TypeVar("T")


def worded(ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> list[Question]:
    """The questions as the client of `ctx` is asked them.

    Raises `NotInThisRevision` and `NotDeclared` for one that it cannot be asked, so that none of them is sent.
    """
    from trio_mcp.server.questions import ElicitUrl, Inquiry

    terms, wire = ctx._terms, []
    for key, question in questions.items():
        if not isinstance(question, Inquiry):
            kinds = "Elicit(...), ElicitUrl(...), Sample(...) or ListRoots()"
            raise UsageError(f"{key!r} is no question; ask by {kinds}")
        params = question.params(terms.revision)
        method = terms.revision.request(Role.SERVER, question.method)
        method = method or terms.revision.input_requests[question.method]
        # What no table has comes last, and so does what says more: a client that lacks all of elicitation reads that it
        # needs its url mode.
        lacking = missing_capabilities(terms.revision, method, params, terms.capabilities)
        lacking += [need for need in question.needs(terms.revision) if not terms.declares(*need)]
        if lacking:
            raise NotDeclared(question.method, "client", lacking[-1])
        wire.append(Question(key, question.method, params))
    ctx._pages += tuple(question for question in questions.values() if isinstance(question, ElicitUrl))
    return wire


def read_answer(key: str, question: Inquiry[T], answer: JsonObject) -> T:
    """The answer that a retry brought.  Raises RequestError, for the retry, if it does not fit (mrtr-23)."""
    try:
        return question.read(answer)
    except RemoteProtocolError as error:
        raise RequestError(INVALID_PARAMS, f"inputResponses[{key!r}]: {error}") from None


def volunteered(ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, JsonObject]:
    """Answers to these questions that came with the request that began the call, though nobody had asked yet.

    The client would say the same when it is asked, so that this saves a round and gives it no more to decide.  Nobody
    agrees to visit a page of which only the question tells.
    """
    from trio_mcp.server.questions import ElicitUrl

    responses = ctx.request.params.get("inputResponses")
    if ctx._rounds or not isinstance(responses, dict):
        return NOTHING
    asked = [key for key, question in questions.items() if not isinstance(question, ElicitUrl)]
    return {key: responses[key] for key in asked if isinstance(responses.get(key), dict)}


def next_round(ctx: Context) -> int:
    """The number of the round that is about to begin."""
    if ctx._rounds >= MAX_ROUNDS:
        raise UsageError(f"{ctx.method} has asked {MAX_ROUNDS} times; no client goes on for so long")
    return ctx._rounds + 1


class ParkedCall:
    """Where one handler waits: for which answers, and what it got so far."""

    __slots__ = ("answers", "asked", "asker", "ctx", "handle", "left", "questions", "resumed")

    def __init__(self, ctx: Context, handle: str, asked: Mapping[str, Inquiry[Any]], questions: list[Question]) -> None:
        self.ctx = ctx
        self.asker = ctx._link
        self.handle = handle
        self.asked = asked
        self.questions = questions
        """The same as the client was asked them."""
        self.answers: dict[str, JsonObject] = {}
        self.left = False
        """The handler does not wait for the answers any more."""
        self.resumed = trio.Event()
        """The call has a request again, or nobody will ever come back."""

    @property
    def open(self) -> list[Question]:
        return [each for each in self.questions if each.key not in self.answers]


class Parking:
    """All handlers of one server that wait for a retry."""

    def __init__(self, sealer: StateSealer, limits: Limits, *, wall: Callable[[], float] | None = None) -> None:
        self._sealer = sealer
        self._ttl = limits.parked_seconds
        self._parked = ParkedKeys(
            secrets.token_urlsafe(12), ttl=self._ttl, limit=limits.parked, each=limits.parked_each
        )
        self._places: dict[str, ParkedCall] = {}
        # A sealed state may outlive the process, so its age is not measured by the loop's clock.
        self._wall = wall or time.time
        self._more = trio.Event()

    def __len__(self) -> int:
        return len(self._places)

    # Out.

    def park(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> tuple[ParkedCall, JsonObject]:
        """A place for `ctx`, and the result that asks its client.

        Raises what `worded` does, and RequestError when there is no room; then nothing is parked.
        """
        round, asked = next_round(ctx), worded(ctx, questions)
        asking = self._asking(ctx, asked)  # before a place is taken: it raises where nothing can be asked
        handle = self._parked.park(stable_name(ctx.principal), trio.current_time(), ctx._holder)
        place = self._places[handle] = ParkedCall(ctx, handle, questions, asked)
        self._more.set()
        try:
            asking["requestState"] = self._state_of(place, round)
        except McpError:  # what it would have to carry is too large
            self.give_up(place)
            raise
        return place, asking

    def ask_again(self, ctx: Context, questions: Mapping[str, Inquiry[Any]], carried: Json) -> JsonObject:
        """The result for a handler that will be started from the beginning with the answers."""
        round, asking = next_round(ctx), self._asking(ctx, worded(ctx, questions))
        again = [list(questions), dict(ctx.answers), carried]
        return {**asking, "requestState": self._seal(ctx, round, None, ctx._recorded, again)}

    @staticmethod
    def _asking(ctx: Context, questions: Sequence[Question]) -> JsonObject:
        return input_required(ctx._terms.revision, ctx.method, ctx._terms.capabilities, questions, "")

    def _state_of(self, place: ParkedCall, round: int) -> str:
        ctx = place.ctx
        if not ctx._replay:  # nothing but where it waits
            return self._seal(ctx, round, place.handle, NOTHING, None)
        again = [list(place.asked), dict(ctx.answers), ctx.state]
        return self._seal(ctx, round, place.handle, {**ctx._recorded, **place.answers}, again)

    def _seal(
        self, ctx: Context, round: int, handle: str | None, recorded: Mapping[str, JsonObject], again: Json
    ) -> str:
        """The request state.  `again` is for a handler that will be started from the beginning: the keys of what is
        asked, of which alone answers are taken (mrtr-24), and the `answers` and the `state` of its context."""
        state = SealedState(round, self._wall() + self._ttl, handle, recorded, again)
        sealed = self._sealer.seal(state, ctx.method, ctx.request.params, stable_name(ctx.principal))
        ctx._rounds = round
        return sealed

    # Back in.

    def retry(self, ctx: Context) -> ParkedCall | JsonObject | None:
        """What a request with a `requestState` is about: a handler that goes on now, or (as some answers are still
        missing) the result that asks for those, or (None) a handler to be started, with what `ctx` has got of it.

        Raises RequestError, ready to be the answer, for one that is not honoured; then nothing is spent.
        """
        request, principal = ctx.request, stable_name(ctx.principal)
        state = self._sealer.open(
            request.params["requestState"], request.method, request.params, principal, self._wall()
        )
        if isinstance(state, StateRefusal):
            raise state.error
        if state.handle is None:
            self._start_again(ctx, state)
            return None
        place = self._places.get(state.handle)
        if place is None:
            refusal = self._parked.take(state.handle)
            assert refusal is not None  # it knows of those that are here, and of no others
            if refusal is not StateRefusal.ELSEWHERE or state.carried is None:
                raise refusal.error
            ctx._elsewhere = refusal.error
            self._start_again(ctx, state)
            return None
        if not place.left and self._take_answers(place, request.params):
            return self._ask_for_the_rest(place, ctx)
        self.give_up(place)
        return place

    @staticmethod
    def _start_again(ctx: Context, state: SealedState) -> None:
        asked, answers, carried = state.carried
        responses = ctx.request.params.get("inputResponses", {})
        given = {key: responses[key] for key in asked if key in responses} if isinstance(responses, dict) else None
        # Who asked reads the answers; here only their shape is looked at (mrtr-22).
        if given is None or not all(isinstance(answer, dict) for answer in given.values()):
            raise RequestError(INVALID_PARAMS, "inputResponses must be an object of objects")
        ctx._rounds, ctx.state = state.round, carried
        if state.handle is None:
            ctx.answers, ctx._recorded = {**answers, **given}, dict(state.answers)
        else:
            ctx.answers, ctx._recorded = answers, {**state.answers, **given}

    @staticmethod
    def _take_answers(place: ParkedCall, params: JsonObject) -> bool:
        """Take what came; whether something is missing.  Each answer is read here, so that a bad one can be mended."""
        answers = read_answers(place.open, params)
        for key, answer in answers.given.items():
            read_answer(key, place.asked[key], answer)
        place.answers.update(answers.given)
        return bool(answers.missing)

    def _ask_for_the_rest(self, place: ParkedCall, ctx: Context) -> JsonObject:
        """mrtr-25: what is missing is asked for again, under the terms of this retry; what came is kept."""
        if place.ctx._rounds >= MAX_ROUNDS:
            raise RequestError(INVALID_PARAMS, f"answers are missing from inputResponses after {MAX_ROUNDS} rounds")
        asking = self._asking(ctx, place.open)
        return {**asking, "requestState": self._state_of(place, next_round(place.ctx))}

    def give_up(self, place: ParkedCall) -> None:
        """No retry is about this place any more."""
        if self._places.pop(place.handle, None) is not None:
            self._parked.take(place.handle)

    async def come_back_all(self) -> None:
        """Wait until every handler that waits now has its answers, or is given up."""
        for place in list(self._places.values()):
            await place.resumed.wait()

    def waits_for(self, asker: ContextLink) -> list[ParkedCall]:
        """Where handlers wait for answers to what they asked by this connection."""
        return [place for place in self._places.values() if place.asker is asker]

    async def come_back(self, asker: ContextLink) -> None:
        for place in self.waits_for(asker):
            await place.resumed.wait()

    # Time.

    async def run(self) -> None:
        """Cancel handlers whose client does not come back in time (mrtr-14), and in the end all of them."""
        try:
            while True:
                deadline = self._parked.next_deadline()
                if deadline is None:
                    self._more = trio.Event()
                    await self._more.wait()
                else:
                    await trio.sleep_until(deadline)
                    due = self._parked.expire(trio.current_time())
                    self._cancel(due, "the client did not come back with its answers in time")
        finally:
            # The tasks are cancelled anyway; but some may wait where that does not reach them.
            self.stop()

    def stop(self) -> None:
        """Nobody can come back any more."""
        self._cancel(list(self._places), "the server has stopped")

    def _cancel(self, handles: Collection[str], reason: str) -> None:
        for handle in handles:
            place = self._places.pop(handle)
            self._parked.take(handle)
            place.ctx._cancel(reason)
            place.resumed.set()
