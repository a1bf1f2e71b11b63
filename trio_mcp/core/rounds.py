"""Multi round-trip requests: a server asks, the client answers and sends the request again.

In the modern revision a server cannot send requests.  When it needs something from the client it answers the call with
`input_required`: questions by key, and an opaque `requestState`.  The client gathers every answer and repeats the call
with both.  Each round is an ordinary request; nothing but the client's retry ties them together, and it may never come.

A server has three things here, which know nothing of each other:

- `input_required` builds that result and `read_answers` reads the retry, both against the `Question`s that were asked;
- `StateSealer` writes and reads `requestState`.  It passes through the hands of the client, so what comes back is the
  input of an attacker until its seal, its owner, its age and its request have been checked;
- `ParkedKeys` counts the handlers that wait in this process for a retry, by handle.  The handlers live outside.  A
state with a handle goes on where its handler stopped, once; a state without one carries the recorded answers, so that
any instance that shares the key can run the handler again from the start.

A client has `Rounds`, the machine for one call, from its original params to a complete result.

Two things surprise.  *Two clocks*: a sealed state may outlive the process that sealed it, so `StateSealer` takes the
time in seconds since the epoch; `ParkedKeys` lives and dies with the process and takes the loop's clock.  *Sealed is
not secret*: the holder of a state can read it, but not change it.  The standard library has no authenticated
encryption, and a state needs none for what is put into it here: the answers were given by the client that holds it, and
the principal is that client.  A handler that carries something of its own carries nothing that its client may not see.

`principal` is here always the stable name of one: text that tells whoever is behind the request from all others, today,
after a restart and on every instance (a user id, not a token).  None: nobody was authenticated.  An application whose
principals are objects gives a member of them.  Anything but a str or None raises `UsageError`, for what cannot
be written into a state and come back equal would lock its owner out.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    MISSING_CLIENT_CAPABILITY,
    InputUnavailable,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    UsageError,
    shown,
)
from trio_mcp.core.jsonrpc import ABSENT, Absent, Json, JsonObject, Limits
from trio_mcp.core.records import record
from trio_mcp.core.revisions import Capability, Revision, capability_object, missing_capabilities
from trio_mcp.core.shares import Shares
from trio_mcp.core.terms import stable_name

__all__ = [
    "MAX_PARKED",
    "MAX_PARKED_EACH",
    "MAX_ROUNDS",
    "MAX_STATE_CHARS",
    "STATE_TTL",
    "Answers",
    "Ask",
    "Complete",
    "ParkedKeys",
    "Question",
    "Rounds",
    "SealedState",
    "StateRefusal",
    "StateSealer",
    "input_required",
    "is_complete",
    "read_answers",
]

_LIMITS = Limits()
STATE_TTL = _LIMITS.parked_seconds
MAX_PARKED, MAX_PARKED_EACH = _LIMITS.parked, _LIMITS.parked_each

MAX_STATE_CHARS = 1024 * 1024
"""Recorded forms are a few KiB; a sampled picture may take most of this.  A state travels twice in every round and is
hashed once for each key, so it stays well below what a message may hold."""


MAX_ROUNDS = 32
"""Input-required results to one call before the client gives up.  The longest wizards ask about a dozen times; only a
loop gets here, and a loop without questions would be run through without a pause."""


# Questions and answers


@record
class Question:
    """One entry of `inputRequests`: what a server wants, and the key that its answer has to carry."""

    key: str
    method: str
    params: JsonObject = attrs.field(factory=dict)


def input_required(
    revision: Revision,
    method: str,
    declared: Mapping[str, Any],
    questions: Sequence[Question] = (),
    state: str | None = None,
) -> JsonObject:
    """The result that asks the client, as an answer to a request `method` whose client declared `declared`.

    Raises `NotInThisRevision` for a request that is never answered so, or a kind of question that does not exist;
    `UsageError` for a key used twice, or for nothing to ask and no state; and `RequestError` (-32021), ready
    to be the answer, when a question needs what the client did not declare.
    """
    # mrtr-04: "Servers MUST NOT send InputRequiredResult responses on any other client requests."
    if method not in revision.input_required:
        raise NotInThisRevision(f"input_required as the answer to {method}", revision.name)
    # mrtr-12: at least one of the two; a result with neither would say nothing.
    if not questions and state is None:
        raise UsageError("input_required needs a question, a request state, or both")
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
    lacking: list[Capability] = []
    for each in questions:
        if each.method not in revision.input_requests:  # mrtr-06
            raise NotInThisRevision(f"{each.method} as a question", revision.name)
        lacking += missing_capabilities(revision, revision.input_requests[each.method], each.params, declared)
    if lacking:  # mrtr-13; everything that is missing is named at once
        needed = capability_object(lacking)
        raise RequestError(
            MISSING_CLIENT_CAPABILITY,
            "This request needs client capabilities that were not declared with it",
            {"requiredCapabilities": needed},
        )


@record
class Answers:
    """What a retry brought: answers by key, and the questions that are still open and have to be asked again."""

    given: Mapping[str, JsonObject]
    missing: tuple[Question, ...]


def read_answers(questions: Iterable[Question], params: Mapping[str, Any]) -> Answers:
    """Take the answers to `questions` out of a retry's params.

    A missing answer is no error (mrtr-25: it is asked for again), and what was not asked is not looked at (mrtr-24).
    Raises `RequestError` (-32602), ready to be the answer, for responses of the wrong shape (mrtr-22, mrtr-23).  Read
    the answers before the state is spent: the client can then mend its retry.
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
    """What a JSON value is called in an error message, without showing the value."""
    return {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )


# What each kind of answer must have before anybody looks closer.  Whether a form fits its schema, and whether a content
# block is a good one, is the business of those who read it.
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


# Request state


class StateRefusal(enum.Enum):
    """Why a `requestState` is not honoured.  `error` is what the client is told, which is less."""

    MALFORMED = enum.auto()  # no text of ours, whatever the key
    BAD_SEAL = enum.auto()  # tampered with, or sealed with a key that we do not have (any more)
    OTHER_PRINCIPAL = enum.auto()
    EXPIRED = enum.auto()
    OTHER_METHOD = enum.auto()
    OTHER_PARAMS = enum.auto()
    SPENT = enum.auto()  # its handler was here, and is not parked any more
    ELSEWHERE = enum.auto()  # its handler was parked by another instance, or before a restart

    @property
    def error(self) -> RequestError:
        return RequestError(INVALID_PARAMS, _REFUSALS[self])


# A forger must not learn how far it came, nor a thief that what it stole is genuine: these three look the same.  The
# others are told to a caller that has proven to own the state, and say what to do.
_NOT_YOURS = "requestState was not issued to this caller by this server"
_NOT_THIS = "requestState belongs to another request: a retry repeats the method and params of the original"
_REFUSALS: Mapping[StateRefusal, str] = {
    StateRefusal.MALFORMED: _NOT_YOURS,
    StateRefusal.BAD_SEAL: _NOT_YOURS,
    StateRefusal.OTHER_PRINCIPAL: _NOT_YOURS,
    StateRefusal.EXPIRED: "requestState has expired: send the request again without it",
    StateRefusal.OTHER_METHOD: _NOT_THIS,
    StateRefusal.OTHER_PARAMS: _NOT_THIS,
    StateRefusal.SPENT: "requestState has been used or has expired: send the request again without it",
    StateRefusal.ELSEWHERE: "The call of this requestState waits here no longer: send the request again without it",
}


@record
class SealedState:
    """What a server needs in order to go on: all of it comes back with the retry, none of it is remembered.

    `round` counts the results sent for the call, so no two of its states are alike.  `expires` is in seconds since the
    epoch.  `handle` names a handler in `ParkedKeys`, if one waits.  `answers` are recorded for a handler that will be
    run again from the start; `carried` is any JSON that a handler which builds its own rounds wants back.
    """

    round: int
    expires: float
    handle: str | None = None
    answers: Mapping[str, JsonObject] = attrs.field(factory=dict)
    carried: Json = None


# The version of the layout is part of what is signed, and so is the purpose: neither an older state nor anything else
# that was ever signed with the same key can pass for a state of this layout.  So what bears our seal is well-formed.
_PURPOSE = b"trio_mcp requestState 1\0"
_SEAL_BYTES = 32
# A retry may change these three; everything else makes it another request.
_NOT_DIGESTED = frozenset({"_meta", "inputResponses", "requestState"})


class StateSealer:
    """Seals and opens `requestState`.

    mrtr-09: its integrity is kept by HMAC-SHA256.  mrtr-10: it is good for one principal, one method and its params,
    and until it expires.  The first key seals, every key opens: to change keys put the new one first, and drop the old
    one when the last of its states has expired.  Instances that share keys open each other's states (mrtr-27).

    Within these bounds a state without a handle may be presented again; what must happen only once has to be guarded
    by the handler.  Without authentication every caller has the principal None: whoever holds a state may use it.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        # A client holds states and may try keys at its leisure; a key shorter than the seal is the weaker part.
        # One key in the place of the sequence would be a sequence of numbers.
        if not keys or any(not isinstance(key, bytes) or len(key) < _SEAL_BYTES for key in keys):
            raise UsageError(
                f"sealing needs a sequence of keys, such as [key], each of at least {_SEAL_BYTES} random bytes"
            )
        self._keys = tuple(keys)

    def seal(self, state: SealedState, method: str, params: Mapping[str, Any], principal: str | None) -> str:
        """The `requestState` that lets `principal` retry this request.

        Raises `UsageError` for what is not JSON, and `RequestError`, ready to be the answer, when there is
        more to carry than a state may hold.
        """
        bounds = (stable_name(principal), method, _digest(params), state.expires)
        payload = _canonical((*bounds, state.round, state.handle, dict(state.answers), state.carried))
        text = base64.urlsafe_b64encode(_seal(self._keys[0], payload) + payload).decode()
        if len(text) > MAX_STATE_CHARS:
            raise RequestError(
                INTERNAL_ERROR,
                f"What this call has to remember is too large: {len(text)} characters, at most {MAX_STATE_CHARS}",
            )
        return text

    def open(
        self, text: Json, method: str, params: Mapping[str, Any], principal: str | None, now: float
    ) -> SealedState | StateRefusal:
        """Check what came as the `requestState` of a request.  Any JSON may come; none of it raises (mrtr-08)."""
        presenter = stable_name(principal)
        payload = self._unsealed(text)
        if isinstance(payload, StateRefusal):
            return payload
        owner, sealed_method, digest, expires, round, handle, answers, carried = json.loads(payload)
        # In this order: who does not own the state learns nothing else about it.
        if owner != presenter:
            return StateRefusal.OTHER_PRINCIPAL
        if now >= expires:
            return StateRefusal.EXPIRED
        if sealed_method != method:
            return StateRefusal.OTHER_METHOD
        if digest != _digest(params):
            return StateRefusal.OTHER_PARAMS
        return SealedState(round, expires, handle, answers, carried)

    def _unsealed(self, text: Json) -> bytes | StateRefusal:
        if not isinstance(text, str) or len(text) > MAX_STATE_CHARS:
            return StateRefusal.MALFORMED
        try:
            raw = base64.urlsafe_b64decode(text)
        except ValueError:  # wrong padding, or not ASCII
            return StateRefusal.MALFORMED
        # The decoder skips strange characters and ignores spare bits; here one state has one text, and no other passes.
        if base64.urlsafe_b64encode(raw).decode() != text:
            return StateRefusal.MALFORMED
        seal, payload = raw[:_SEAL_BYTES], raw[_SEAL_BYTES:]
        if not any(hmac.compare_digest(seal, _seal(key, payload)) for key in self._keys):
            return StateRefusal.BAD_SEAL
        return payload


def _seal(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + payload, "sha256")


def _canonical(value: Json) -> bytes:
    """One text for one value, whichever JSON library the process uses.  ASCII: lone surrogates must survive too."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"a request state holds JSON only: {error}") from None


def _digest(params: Mapping[str, Any]) -> str:
    salient = {name: value for name, value in params.items() if name not in _NOT_DIGESTED}
    return hashlib.sha256(_canonical(salient)).hexdigest()


class ParkedKeys:
    """Which handlers wait here for a retry, until when, and on whose behalf.

    mrtr-14: "Servers MUST NOT assume that clients will ... retry": what waits is bounded in number, for each principal
    too, and in time.  `instance` is random text that no other process has: a handle that begins with it was issued
    here, so one that is not in the table any more is spent (mrtr-11), and nothing needs to remember the dead.
    A handle is not a secret; it is believed because it comes out of a sealed state.
    `now` may not go back, so the table is in the order of its deadlines.
    """

    def __init__(
        self, instance: str, *, ttl: float = STATE_TTL, limit: int = MAX_PARKED, each: int = MAX_PARKED_EACH
    ) -> None:
        self._prefix = f"{instance}."
        self._ttl = ttl
        self._shares = Shares(limit)
        self._each = each
        self._last = 0
        self._waiting: dict[str, tuple[float, Hashable | None]] = {}  # handle -> deadline, holder

    def __len__(self) -> int:
        return len(self._waiting)

    def park(self, principal: str | None, now: float, holder: Hashable | None = None) -> str:
        """A handle for one more handler.  Raises `RequestError`, ready to be the answer, when there is no room.

        `holder` is the one of `core.shares`; without it the principal is.
        """
        parking = stable_name(principal)
        holder = parking if holder is None else holder
        # `each` is for persons; behind one address there may be many.
        if (parking is not None and self._shares.of(holder) >= self._each) or not self._shares.take(holder):
            raise RequestError(INTERNAL_ERROR, "Too many calls are waiting for input: try again later")
        self._last += 1
        handle = f"{self._prefix}{self._last}"
        self._waiting[handle] = (now + self._ttl, holder)
        return handle

    def take(self, handle: str) -> StateRefusal | None:
        """Take the handler back.  None: it was parked, it is the caller's now, and its state is spent."""
        if (found := self._waiting.pop(handle, None)) is not None:
            self._shares.give(found[1])
            return None
        return StateRefusal.SPENT if handle.startswith(self._prefix) else StateRefusal.ELSEWHERE

    def next_deadline(self) -> float | None:
        return next((deadline for deadline, _ in self._waiting.values()), None)

    def expire(self, now: float) -> list[str]:
        """The handles whose time has come, oldest first.  They are gone; their handlers are to be cancelled."""
        due: list[str] = []
        for handle, (deadline, _) in self._waiting.items():
            if now < deadline:
                break
            due.append(handle)
        for handle in due:
            self.take(handle)
        return due


# The client


@record
class Complete:
    """The call has ended with this result."""

    result: JsonObject


@record
class Ask:
    """The server wants these answered, in its order, before the call is sent again.  None: send it again at once."""

    questions: tuple[Question, ...]


def is_complete(result: JsonObject) -> bool:
    """Whether a call has ended with this result, in whatever revision; of any other result `Rounds` knows.

    rtype-04: "MUST treat the absent field as complete".
    """
    return result.get("resultType", "complete") == "complete"  # type: ignore[no-any-return]


class _Stage(enum.Enum):
    SENT = "waiting for a result"
    ASKED = "waiting for answers"
    ENDED = "over"


class Rounds:
    """One call of a client, over as many rounds as it takes.

    `receive` each result; on `Ask`, gather the answers and send what `retry` returns, under a new id; or `abandon`.
    `params` are the original ones, and every retry repeats them.  `declared` are our capabilities as this call carries
    them, `extensions` the result types of the extensions that both sides declared (rtype-02).

    What a server says belongs to this call alone (mrtr-21), so each call has its own machine, and `requestState` is
    kept here without being looked at or shown (mrtr-02).
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

    def receive(self, result: JsonObject) -> Complete | Ask:
        """Take the result of the last request.  Raises `RemoteProtocolError`, and is over, if it breaks the rules."""
        self._expect(_Stage.SENT)
        self._stage = _Stage.ENDED
        # Where results have no type, a member of that name means nothing.
        if is_complete(result) or not self._revision.result_type:
            return Complete(result)
        kind = result["resultType"]
        if kind == "input_required":
            self._questions, self._state = self._read(result)
            self._stage = _Stage.ASKED
            return Ask(self._questions)
        if not (isinstance(kind, str) and kind in self._extensions):  # rtype-03
            raise self._blame(f"a result of unknown type {shown(kind)}")
        return Complete(result)

    def retry(self, answers: Mapping[str, JsonObject] | None = None) -> JsonObject:
        """The params of the next request.  `answers` holds one for each question, by its key (mrtr-16, mrtr-26)."""
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
        if self._state is not ABSENT:  # mrtr-18: the same text; mrtr-19: no text of an earlier round
            params["requestState"] = self._state
        self._stage = _Stage.SENT
        return params

    def abandon(self, key: str, why: str = "") -> InputUnavailable:
        """Give up, because the question `key` was not answered.  Returns what to tell the caller (mrtr-28)."""
        self._expect(_Stage.ASKED)
        self._stage = _Stage.ENDED
        return InputUnavailable(self._method, key, why)

    def _expect(self, stage: _Stage) -> None:
        if self._stage is not stage:
            raise UsageError(f"this {self._method} is {self._stage.value}, not {stage.value}")

    def _read(self, result: JsonObject) -> tuple[tuple[Question, ...], str | Absent]:
        if self._method not in self._revision.input_required:
            raise self._blame(f"input_required, which {self._revision} does not allow")
        if not self._rounds_left:
            raise self._blame("input_required once more, after more rounds than we take part in")
        self._rounds_left -= 1
        requests, state = result.get("inputRequests", ABSENT), result.get("requestState", ABSENT)
        if requests is ABSENT and state is ABSENT:
            raise self._blame("input_required with neither inputRequests nor requestState")
        if not (state is ABSENT or isinstance(state, str)):
            raise self._blame(f"a requestState that is {_kind(state)}, not a string")
        if requests is ABSENT:
            return (), state
        if not isinstance(requests, dict):
            raise self._blame(f"inputRequests that are {_kind(requests)}, not an object")
        return tuple(self._question(key, entry) for key, entry in requests.items()), state

    def _question(self, key: str, entry: Json) -> Question:
        method = entry.get("method") if isinstance(entry, dict) else None
        kind = self._revision.input_requests.get(method) if isinstance(method, str) else None
        if kind is None:
            raise self._blame(f"an input request {shown(key)} that is no question of {self._revision}")
        params = entry.get("params", {})
        if not isinstance(params, dict):
            raise self._blame(f"an input request {shown(key)} whose params are {_kind(params)}, not an object")
        lacking = missing_capabilities(self._revision, kind, params, self._declared)
        if lacking:  # mrtr-13, seen from here
            names = ", ".join(map(".".join, lacking))
            raise self._blame(f"a question that needs the client capability {names}, which we did not declare")
        return Question(key, kind.name, params)

    def _blame(self, what: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"the server answered {self._method} with {what}")
