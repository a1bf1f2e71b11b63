"""Handlers that wait for a retry: how a handler asks straight through where a server cannot send requests.

A question of a handler answers the request at hand with `input_required` and parks the handler.  The answers come with
another request, on this connection or another one; that request is checked (seal, age, principal, method and params,
and the answers themselves) before anything is spent, and then the handler goes on under it.

A retry whose handler is not here, after a restart or on another replica, starts a handler that was declared
`replay=True` from the beginning, with the answers that its sealed state and the retry carry.  A retry of a handler that
returned `InputRequired` always starts it from the beginning: that is what it asked for.

What waits is bounded in number and time (`core.rounds`), and waiting costs no place among the running requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trio

from trio_mcp.context import Context
from trio_mcp.core.errors import INVALID_PARAMS, LocalProtocolError, McpError, RemoteProtocolError, RequestError
from trio_mcp.core.jsonrpc import Json, JsonObject
from trio_mcp.core.rounds import (
    MAX_ROUNDS,
    STATE_TTL,
    Parked,
    Question,
    Refusal,
    SealedState,
    StateSealer,
    input_required,
    read_answers,
)
from trio_mcp.core.session import Call
from trio_mcp.core.terms import stable_name

if TYPE_CHECKING:
    from trio_mcp.questions import Inquiry

__all__ = ["Parking", "Place", "Retry"]


class Place:
    """Where one handler waits: for which answers, and what it got so far."""

    __slots__ = ("answers", "asked", "ctx", "handle", "resumed")

    def __init__(self, ctx: Context, handle: str, asked: Mapping[str, Inquiry[Any]]) -> None:
        self.ctx = ctx
        self.handle = handle
        self.asked = asked
        self.answers: dict[str, JsonObject] = {}
        self.resumed = trio.Event()

    def wire(self) -> list[Question]:
        """What is still to be asked, as this request's revision writes it."""
        return wire_questions(self.ctx, {key: each for key, each in self.asked.items() if key not in self.answers})


class Retry:
    """What a retry brought for a handler that starts from the beginning."""

    __slots__ = ("answers", "carried", "elsewhere", "round")

    def __init__(
        self, answers: dict[str, JsonObject], carried: Json, round: int, elsewhere: RequestError | None
    ) -> None:
        self.answers = answers
        self.carried = carried
        self.round = round
        self.elsewhere = elsewhere
        """The refusal, unless the handler can be run again."""


def wire_questions(ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> list[Question]:
    revision = ctx.terms.revision
    return [Question(key, each.method, each.params(revision)) for key, each in questions.items()]


class Parking:
    """All handlers of one server that wait for a retry."""

    def __init__(self, keys: Sequence[bytes], *, wall: Callable[[], float] = time.time) -> None:
        self._sealer = StateSealer(keys)
        self._parked = Parked(secrets.token_urlsafe(12))
        self._places: dict[str, Place] = {}
        self._wall = wall  # a sealed state may outlive the process, so its age is not measured by the loop's clock
        self._more = trio.Event()

    def __len__(self) -> int:
        return len(self._places)

    # Out.

    def park(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> tuple[Place, JsonObject]:
        """A place for `ctx`, and the result that asks its client.

        Raises what `input_required` does, and RequestError when there is no room; then nothing is parked.
        """
        self._next_round(ctx)
        wire = wire_questions(ctx, questions)
        asking = self._asking(ctx, wire, "")  # before a place is taken: it raises for what cannot be asked
        handle = self._parked.park(stable_name(ctx.principal), trio.current_time())
        place = self._places[handle] = Place(ctx, handle, questions)
        self._more.set()
        try:
            asking["requestState"] = self._state_of(place)
        except McpError:  # what it would have to carry is too large
            self.give_up(place)
            raise
        return place, asking

    def ask_again(self, ctx: Context, questions: Mapping[str, Inquiry[Any]], carried: Json) -> JsonObject:
        """The result for a handler that will be started from the beginning with the answers."""
        self._next_round(ctx)
        state = self._seal(ctx, SealedState(ctx.rounds, self._expiry(), None, dict(ctx.answers), carried))
        return self._asking(ctx, wire_questions(ctx, questions), state)

    @staticmethod
    def _next_round(ctx: Context) -> None:
        if ctx.rounds >= MAX_ROUNDS:
            raise LocalProtocolError(f"{ctx.method} has asked {MAX_ROUNDS} times; no client goes on for so long")
        ctx.rounds += 1

    @staticmethod
    def _asking(ctx: Context, questions: Sequence[Question], state: str) -> JsonObject:
        return input_required(ctx.terms.revision, ctx.method, ctx.terms.capabilities, questions, state)

    def _expiry(self) -> float:
        return self._wall() + STATE_TTL

    def _state_of(self, place: Place) -> str:
        ctx = place.ctx
        recorded = {**ctx.recorded, **place.answers} if ctx.replay else {}
        return self._seal(ctx, SealedState(ctx.rounds, self._expiry(), place.handle, recorded))

    def _seal(self, ctx: Context, state: SealedState) -> str:
        return self._sealer.seal(state, ctx.method, ctx.request.params, stable_name(ctx.principal))

    # Back in.

    def retry(self, call: Call) -> Place | Retry | JsonObject:
        """What a request with a `requestState` is about: a handler that goes on now, or one to be started, or (as some
        answers are still missing) the result that asks for those.

        Raises RequestError, ready to be the answer, for one that is not honoured; then nothing is spent.
        """
        request, principal = call.request, stable_name(call.terms.principal)
        state = self._sealer.open(
            request.params["requestState"], request.method, request.params, principal, self._wall()
        )
        if isinstance(state, Refusal):
            raise state.error
        if state.handle is None:
            return Retry({**state.answers, **_given(request.params)}, state.carried, state.round, None)
        place = self._places.get(state.handle)
        if place is not None:
            missing = self._take_answers(place, request.params)
            if missing:  # mrtr-25: asked for again; what came is kept
                self._next_round(place.ctx)
                return self._asking(place.ctx, missing, self._state_of(place))
        refusal = self._parked.take(state.handle)
        if refusal is Refusal.ELSEWHERE:
            return Retry({**state.answers, **_given(request.params)}, None, state.round, refusal.error)
        if refusal is not None or place is None:
            raise (refusal or Refusal.SPENT).error
        del self._places[state.handle]
        return place

    def _take_answers(self, place: Place, params: JsonObject) -> Sequence[Question]:
        """Take what came; each answer is read once here, so that the client can mend a bad one."""
        answers = read_answers(place.wire(), params)
        for key, answer in answers.given.items():
            try:
                place.asked[key].read(answer)
            except RemoteProtocolError as error:
                raise RequestError(INVALID_PARAMS, f"inputResponses[{key!r}]: {error}") from None
        place.answers.update(answers.given)
        return answers.missing

    def give_up(self, place: Place) -> None:
        """The handler does not wait any more; it was cancelled."""
        if self._places.pop(place.handle, None) is not None:
            self._parked.take(place.handle)

    # Time.

    async def run(self) -> None:
        """Cancel handlers whose client did not come back in time (mrtr-14)."""
        while True:
            deadline = self._parked.next_deadline()
            with trio.move_on_at(deadline if deadline is not None else trio.current_time() + STATE_TTL):
                await self._more.wait()
                self._more = trio.Event()
            self._cancel(self._parked.expire(trio.current_time()))

    def _cancel(self, handles: Iterable[str]) -> None:
        for handle in handles:
            self._places.pop(handle).ctx.scope.cancel(reason="the client did not come back with its answers in time")


def _given(params: JsonObject) -> dict[str, JsonObject]:
    """The answers of a retry, by key.  Who asked reads them; here only their shape is looked at (mrtr-22)."""
    responses = params.get("inputResponses", {})
    if not isinstance(responses, dict) or not all(isinstance(answer, dict) for answer in responses.values()):
        raise RequestError(INVALID_PARAMS, "inputResponses must be an object of objects")
    return responses
