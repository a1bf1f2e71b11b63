"""Multi round-trip requests: a server asks, the client answers and sends the request again.

In the modern revision a server cannot send requests.  When it needs input from the client, it answers the call with
`input_required`: questions by key, and an opaque `requestState`.  The client gathers every answer and repeats the call
with the answers and the state.  Each round is an ordinary request; only the client's retry connects the rounds, and it
may never come.

The server's side is `input_required`, which builds that result, and `read_answers`, which reads the retry.  Both take
the `Question`s.  `request_state` writes and reads the state.

The client's side is `Rounds`: the state machine of one call, from its original params to a complete result.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from trio_mcp.core.errors import (
    INVALID_PARAMS,
    MISSING_CLIENT_CAPABILITY,
    InputUnavailable,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    UsageError,
    shown,
)
from trio_mcp.core.messages import ABSENT, KINDS, Absent, Json, JsonObject, record
from trio_mcp.core.revisions import Capability, Revision, capability_object, missing_capabilities

__all__ = ["MAX_ROUNDS", "Answers", "Question", "Rounds", "input_required", "is_complete", "read_answers"]

MAX_ROUNDS = 32
"""Input-required results to one call before the client gives up.  The longest wizards ask about a dozen times.  Only an
endless loop asks more often, and a loop without questions would run without a pause."""


# Questions and answers


@record
class Question:
    """One entry of `inputRequests`: the request, and the key for its answer."""

    key: str
    method: str
    params: JsonObject = attrs.field(factory=dict)


def input_required(
    revision: Revision,
    method: str,
    declared: Mapping[str, Any] | None,
    questions: Sequence[Question] = (),
    state: str | None = None,
) -> JsonObject:
    """Build the result of a request `method` that asks the client for input; `declared` are the client's capabilities.

    `declared` is None if the caller has checked the questions.

    Raises `NotInThisRevision` if the revision does not allow this result for `method`, or a kind of question;
    `UsageError` if two questions have the same key, or if there are neither questions nor a state; and `RequestError`
    (-32021) if a question needs a capability that the client did not declare.  The server can send that error as the
    answer.
    """
    # mrtr-04: "Servers MUST NOT send InputRequiredResult responses on any other client requests."
    if method not in revision.input_required:
        raise NotInThisRevision(f"input_required as the answer to {method}", revision.name)
    # mrtr-12: at least one of the two; a result with neither would be empty.
    if not questions and state is None:
        raise UsageError("input_required needs a question, a request state, or both")
    if declared is not None:
        _check_questions(revision, declared, questions)
    result: JsonObject = {"resultType": "input_required"}  # cache-26: and no caching hints, ever
    if questions:
        result["inputRequests"] = {each.key: {"method": each.method, "params": each.params} for each in questions}
    if state is not None:
        result["requestState"] = state
    return result


def _check_questions(revision: Revision, declared: Mapping[str, Any], questions: Sequence[Question]) -> None:
    keys = Counter(each.key for each in questions)
    if len(keys) < len(questions):  # mrtr-05
        raise UsageError(f"two questions have the same key {keys.most_common(1)[0][0]!r}")
    missing: list[Capability] = []
    for each in questions:
        if each.method not in revision.input_requests:  # mrtr-06
            raise NotInThisRevision(f"{each.method} as a question", revision.name)
        missing += missing_capabilities(revision, revision.input_requests[each.method], each.params, declared)
    if missing:  # mrtr-13; one error names all missing capabilities
        needed = capability_object(missing)
        raise RequestError(
            MISSING_CLIENT_CAPABILITY,
            "This request needs client capabilities that were not declared with it",
            {"requiredCapabilities": needed},
        )


@record
class Answers:
    """The contents of a retry: answers by key, and the questions without an answer, which must be asked again."""

    given: Mapping[str, JsonObject]
    missing: tuple[Question, ...]


def read_answers(questions: Iterable[Question], params: Mapping[str, Any]) -> Answers:
    """Read the answers to `questions` from the params of a retry.

    A missing answer is no error (mrtr-25: the question is asked again), and answers without a question are ignored
    (mrtr-24).  Raises `RequestError` (-32602), to be sent as the answer, for responses of the wrong shape (mrtr-22,
    mrtr-23).  Read the answers before you continue a handler, so that the client can correct its retry.
    """
    responses = params.get("inputResponses", {})
    if not isinstance(responses, dict):
        raise RequestError(INVALID_PARAMS, f"inputResponses must be an object, not {_kind(responses)}")
    given: dict[str, JsonObject] = {}
    missing: list[Question] = []
    for each in questions:
        if each.key in responses:
            given[each.key] = _check_answer(each, responses[each.key])
        else:
            missing.append(each)
    return Answers(given, tuple(missing))


def _check_answer(question: Question, answer: Json) -> JsonObject:
    where = f"inputResponses[{question.key!r}]"
    if not isinstance(answer, dict):
        raise RequestError(INVALID_PARAMS, f"{where} must be an object, not {_kind(answer)}")
    for member, (fits, expected) in _ANSWERS.get(question.method, {}).items():
        if not fits(answer.get(member, ABSENT)):
            raise RequestError(INVALID_PARAMS, f"{where}: the answer to {question.method} needs {member}: {expected}")
    return answer


def _kind(value: Json) -> str:
    """The type of a JSON value for an error message, without the value."""
    return "a number" if type(value) in (int, float) else KINDS[type(value)]


# The members that each kind of answer must have.  The caller checks whether a form fits its schema, and whether a
# content block is valid.
_ANSWERS: Mapping[str, Mapping[str, tuple[Callable[[Json], bool], str]]] = {
    "elicitation/create": {
        "action": (lambda value: value in ("accept", "decline", "cancel"), "accept, decline or cancel"),
        "content": (lambda value: value is ABSENT or isinstance(value, dict), "an object, if it is there"),
    },
    "sampling/createMessage": {
        "role": (lambda value: value in ("user", "assistant"), "user or assistant"),
        "content": (
            lambda value: all(isinstance(block, dict) for block in (value if isinstance(value, list) else [value])),
            "a content block or an array of them",
        ),
        "model": (lambda value: isinstance(value, str), "a string"),
    },
    "roots/list": {
        "roots": (
            lambda value: (
                isinstance(value, list)
                and all(isinstance(root, dict) and isinstance(root.get("uri"), str) for root in value)
            ),
            "an array of objects with a uri",
        ),
    },
}


# The client


def is_complete(result: JsonObject) -> bool:
    """Whether a call has ended with this result, in any revision.  `Rounds` processes all other results.

    rtype-04: "MUST treat the absent field as complete".
    """
    return result.get("resultType", "complete") == "complete"  # type: ignore[no-any-return]


class _Stage(enum.Enum):
    SENT = "waiting for a result"
    ASKED = "waiting for answers"
    ENDED = "over"


class Rounds:
    """One call of a client, over one or several rounds.

    Pass each result to `receive`.  If it returns questions, gather the answers and send the params that `retry`
    returns, under a new id; or `abandon` the call.  `params` are the original params, which every retry repeats.
    `declared` are the client's capabilities as this call carries them, and `extensions` the result types of the
    extensions that both sides declared (rtype-02).

    Questions and state belong to one call (mrtr-21), so each call has its own `Rounds`, which keeps `requestState`
    without reading or showing it (mrtr-02).
    """

    def __init__(
        self,
        revision: Revision,
        method: str,
        params: Mapping[str, Any],
        declared: Mapping[str, Any],
        *,
        extensions: frozenset[str] = frozenset(),
        limit: int = MAX_ROUNDS,
    ) -> None:
        self._revision = revision
        self._method = method
        self._params = {name: params[name] for name in params if name not in ("inputResponses", "requestState")}
        self._declared = declared
        self._extensions = extensions
        self._rounds_left = limit
        self._stage = _Stage.SENT
        self._questions: tuple[Question, ...] = ()
        self._state: str | Absent = ABSENT

    def receive(self, result: JsonObject) -> tuple[Question, ...] | None:
        """Process a result.  Returns None if the call has ended with it, otherwise the questions to answer.

        The questions are in the server's order; if there are none, send the call again at once.  If the result breaks
        the protocol, raises `RemoteProtocolError`, and the call has ended.
        """
        self._expect(_Stage.SENT)
        self._stage = _Stage.ENDED
        # In a revision without result types, a member of that name has no meaning.
        if is_complete(result) or not self._revision.result_type:
            return None
        kind = result["resultType"]
        if kind == "input_required":
            self._questions, self._state = self._read(result)
            self._stage = _Stage.ASKED
            return self._questions
        if not (isinstance(kind, str) and kind in self._extensions):  # rtype-03
            raise self._violation(f"a result of unknown type {shown(kind)}")
        return None

    def retry(self, answers: Mapping[str, JsonObject] | None = None) -> JsonObject:
        """Return the params of the next request.  `answers` has one answer per question, by key (mrtr-16, mrtr-26)."""
        self._expect(_Stage.ASKED)
        answers = answers or {}
        asked = {each.key for each in self._questions}
        if answers.keys() != asked:
            raise UsageError(
                f"every question needs an answer: missing {shown(sorted(asked - answers.keys()))}, "
                f"not asked {shown(sorted(answers.keys() - asked))}"
            )
        params = dict(self._params)
        if self._questions:
            params["inputResponses"] = {each.key: answers[each.key] for each in self._questions}
        if self._state is not ABSENT:  # mrtr-18: the same text; mrtr-19: never the text of an earlier round
            params["requestState"] = self._state
        self._stage = _Stage.SENT
        return params

    def abandon(self, key: str, why: str = "") -> InputUnavailable:
        """End the call, because the question `key` was not answered.  Returns the error for the caller (mrtr-28)."""
        self._expect(_Stage.ASKED)
        self._stage = _Stage.ENDED
        return InputUnavailable(self._method, key, why)

    def _expect(self, stage: _Stage) -> None:
        if self._stage is not stage:
            raise UsageError(f"this {self._method} is {self._stage.value}, not {stage.value}")

    def _read(self, result: JsonObject) -> tuple[tuple[Question, ...], str | Absent]:
        if self._method not in self._revision.input_required:
            raise self._violation(f"input_required, which {self._revision} does not allow")
        if not self._rounds_left:
            raise self._violation("input_required again, after the last round that the client allows")
        self._rounds_left -= 1
        requests, state = result.get("inputRequests", ABSENT), result.get("requestState", ABSENT)
        if requests is ABSENT and state is ABSENT:
            raise self._violation("input_required with neither inputRequests nor requestState")
        if not (state is ABSENT or isinstance(state, str)):
            raise self._violation(f"a requestState that is {_kind(state)}, not a string")
        if requests is ABSENT:
            return (), state
        if not isinstance(requests, dict):
            raise self._violation(f"inputRequests that are {_kind(requests)}, not an object")
        return tuple(self._question(key, entry) for key, entry in requests.items()), state

    def _question(self, key: str, entry: Json) -> Question:
        method = entry.get("method") if isinstance(entry, dict) else None
        kind = self._revision.input_requests.get(method) if isinstance(method, str) else None
        if kind is None:
            raise self._violation(f"an input request {shown(key)} that does not exist in {self._revision}")
        params = entry.get("params", {})
        if not isinstance(params, dict):
            raise self._violation(f"an input request {shown(key)} with params that are {_kind(params)}, not an object")
        missing = missing_capabilities(self._revision, kind, params, self._declared)
        if missing:  # mrtr-13, on the client
            names = ", ".join(map(".".join, missing))
            raise self._violation(
                f"a question that needs the client capability {names}, which the client did not declare"
            )
        return Question(key, kind.name, params)

    def _violation(self, answer: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"the server answered {self._method} with {answer}")
