"""Multi round-trip requests: the questions, the answers, and the sealed state that comes back."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import math
import os
from pathlib import Path
from typing import Any

import attrs
import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    LATEST,
    LEGACY,
    MAX_ROUNDS,
    MAX_STATE_CHARS,
    MISSING_CLIENT_CAPABILITY,
    MODERN,
    REVISIONS,
    Answered,
    InputUnavailable,
    NotInThisRevision,
    Peer,
    Question,
    RemoteProtocolError,
    Request,
    RequestError,
    Role,
    Rounds,
    SealedState,
    StateRefusal,
    StateSealer,
    UsageError,
    input_required,
    read_answers,
    read_keys,
)

EVERYTHING = {"elicitation": {"form": {}, "url": {}}, "sampling": {"tools": {}}, "roots": {}}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
FORM = Question("who", "elicitation/create", {"message": "Who?", "requestedSchema": SCHEMA})
LINK = Question("pay", "elicitation/create", {"mode": "url", "message": "Pay", "url": "https://example.com/pay"})
SAMPLE = Question("capital", "sampling/createMessage", {"messages": [], "maxTokens": 10})
TOOLS = Question("agent", "sampling/createMessage", {"messages": [], "maxTokens": 10, "tools": []})
ROOTS = Question("roots", "roots/list")
QUESTIONS = (FORM, LINK, SAMPLE, TOOLS, ROOTS)

ACCEPTED = {"action": "accept", "content": {"name": "Ann"}}
SAMPLED = {"role": "assistant", "content": {"type": "text", "text": "Paris"}, "model": "m"}
LISTED = {"roots": [{"uri": "file:///home"}]}
ANSWERS = {"who": ACCEPTED, "pay": {"action": "accept"}, "capital": SAMPLED, "agent": SAMPLED, "roots": LISTED}

MAY_ASK = sorted(LATEST.input_required)
CALL = ("tools/call", {"name": "greet", "arguments": {"n": 1}})
MAY_NOT_ASK = [
    (revision, method)
    for revision in REVISIONS.values()
    for method in revision.requests[Role.CLIENT]
    if method not in revision.input_required
]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
OBJECT = st.dictionaries(st.text(max_size=20), JSON, max_size=4)


def definition(folder: Path, name: str) -> jsonschema_rs.Validator:
    schema = json.loads((folder / "schema" / "2026-07-28.json").read_text("utf-8"))
    return jsonschema_rs.validator_for({**schema, "$ref": f"#/$defs/{name}"})


def ask(*questions: Question, state: str | None = None, method: str = "tools/call") -> dict[str, Any]:
    return input_required(LATEST, method, EVERYTHING, questions, state)


# Asking


@req("mrtr-03", "mrtr-06", "mrtr-12", "cache-26")
@pytest.mark.parametrize("method", MAY_ASK)
def test_the_questions_of_a_server_are_an_input_required_result(method: str, shared_schemas: Path) -> None:
    result = ask(*QUESTIONS, state="s", method=method)
    assert result["resultType"] == "input_required"
    assert list(result["inputRequests"]) == ["who", "pay", "capital", "agent", "roots"]
    assert result["inputRequests"]["who"] == {"method": "elicitation/create", "params": FORM.params}
    assert result.keys() == {"resultType", "inputRequests", "requestState"}
    definition(shared_schemas, "InputRequiredResult").validate(result)
    for entry in result["inputRequests"].values():
        definition(shared_schemas, "InputRequest").validate(entry)


@req("mrtr-04")
@pytest.mark.parametrize(("revision", "method"), MAY_NOT_ASK, ids=lambda value: getattr(value, "name", value))
def test_other_requests_cannot_be_answered_with_a_question(revision: Any, method: str) -> None:
    with pytest.raises(NotInThisRevision, match=f"{method} does not exist in {revision}"):
        input_required(revision, method, EVERYTHING, [FORM], "s")


@req("mrtr-07", "mrtr-12")
def test_a_round_needs_questions_or_a_state() -> None:
    assert ask(state="") == {"resultType": "input_required", "requestState": ""}
    assert ask(ROOTS) == {
        "resultType": "input_required",
        "inputRequests": {"roots": {"method": "roots/list", "params": {}}},
    }
    with pytest.raises(UsageError, match="a question, a request state, or both"):
        ask()


@req("mrtr-05")
def test_two_questions_cannot_have_one_key() -> None:
    with pytest.raises(UsageError, match="the same key 'who'"):
        ask(ROOTS, FORM, attrs.evolve(LINK, key="who"))


@req("mrtr-06")
@pytest.mark.parametrize("method", ["tools/call", "ping", "elicitation/delete", ""])
def test_only_three_methods_can_be_questions(method: str) -> None:
    with pytest.raises(NotInThisRevision, match="as a question does not exist"):
        ask(ROOTS, Question("x", method))


@req("mrtr-13", "meta-16")
@pytest.mark.parametrize(
    ("declared", "questions", "needed"),
    [
        ({}, [FORM], {"elicitation": {"form": {}}}),
        ({"elicitation": {}}, [LINK], {"elicitation": {"url": {}}}),
        ({"elicitation": {"url": {}}}, [FORM], {"elicitation": {"form": {}}}),
        ({"elicitation": {}}, [FORM, SAMPLE], {"sampling": {}}),
        ({"sampling": {}}, [TOOLS], {"sampling": {"tools": {}}}),
        ({"sampling": None}, [SAMPLE], {"sampling": {}}),
        ({"roots": False}, [ROOTS], {"roots": {}}),
        ({}, [ROOTS, TOOLS, LINK], {"roots": {}, "sampling": {"tools": {}}, "elicitation": {"url": {}}}),
    ],
)
def test_an_undeclared_question_is_refused_with_the_missing_capabilities(
    declared: dict[str, Any], questions: list[Question], needed: dict[str, Any], shared_schemas: Path
) -> None:
    with pytest.raises(RequestError) as caught:
        input_required(LATEST, "tools/call", declared, questions)
    assert (caught.value.code, caught.value.data) == (MISSING_CLIENT_CAPABILITY, {"requiredCapabilities": needed})
    error = {"code": caught.value.code, "message": caught.value.message, "data": caught.value.data}
    definition(shared_schemas, "MissingRequiredClientCapabilityError").validate(
        {"jsonrpc": "2.0", "id": 1, "error": error}
    )
    # With the missing capabilities declared in addition, the question is allowed.
    declared = {**declared, **{name: {**(declared.get(name) or {}), **value} for name, value in needed.items()}}
    input_required(LATEST, "tools/call", declared, questions)


def test_questions_that_were_checked_are_not_checked_again() -> None:
    assert input_required(LATEST, "tools/call", None, [FORM], "s") == ask(FORM, state="s")


# Reading the answers


@req("mrtr-22")
def test_answers_of_every_kind_are_read() -> None:
    answers = read_answers(QUESTIONS, {"name": "greet", "inputResponses": ANSWERS})
    assert (answers.given, answers.missing) == (ANSWERS, ())
    several = {**SAMPLED, "content": [SAMPLED["content"], SAMPLED["content"]]}
    assert read_answers([SAMPLE], {"inputResponses": {"capital": several}}).given == {"capital": several}


def test_the_official_example_of_answers_is_read(shared_schemas: Path) -> None:
    folder = shared_schemas / "examples" / "2026-07-28" / "InputResponses"
    responses = json.loads((folder / "elicitation-and-sampling-input-responses.json").read_text("utf-8"))
    asked = [attrs.evolve(FORM, key="github_login"), attrs.evolve(SAMPLE, key="capital_of_france")]
    assert read_answers(asked, {"inputResponses": responses}).given == responses


@pytest.mark.parametrize("action", ["decline", "cancel"])
def test_a_refusal_by_the_user_is_an_answer(action: str) -> None:
    assert read_answers([FORM], {"inputResponses": {"who": {"action": action}}}).given == {"who": {"action": action}}


@req("mrtr-24")
@pytest.mark.parametrize("extra", [ACCEPTED, 12345, None, [], {"action": []}])
def test_answers_to_unknown_questions_are_ignored(extra: Any) -> None:
    answers = read_answers([FORM], {"inputResponses": {"extra": extra, "who": ACCEPTED}})
    assert (answers.given, answers.missing) == ({"who": ACCEPTED}, ())


@req("mrtr-15", "mrtr-25")
@pytest.mark.parametrize("params", [{}, {"inputResponses": {}}, {"inputResponses": {"wrong_key": ACCEPTED}}])
def test_questions_without_an_answer_are_asked_again(params: dict[str, Any]) -> None:
    assert read_answers(QUESTIONS, params).missing == QUESTIONS
    partly = read_answers(QUESTIONS, {"inputResponses": {"who": ACCEPTED, "capital": SAMPLED}})
    assert partly.given.keys() == {"who", "capital"}
    assert list(ask(*partly.missing, state="again")["inputRequests"]) == ["pay", "agent", "roots"]


@req("mrtr-22", "mrtr-23")
@pytest.mark.parametrize("responses", [None, [], "who", 5, 0.5, True])
def test_responses_that_are_not_an_object_are_an_error(responses: Any) -> None:
    with pytest.raises(RequestError, match="inputResponses must be an object, not ") as caught:
        read_answers([FORM], {"inputResponses": responses})
    assert caught.value.code == INVALID_PARAMS


@req("mrtr-22", "mrtr-23")
@pytest.mark.parametrize(
    ("question", "answer", "complaint"),
    [
        (FORM, 12345, "must be an object, not a number"),
        (FORM, True, "must be an object, not a boolean"),
        (FORM, None, "must be an object, not null"),
        (FORM, [ACCEPTED], "must be an object, not an array"),
        (FORM, {}, "needs action"),
        (FORM, {"action": "maybe"}, "needs action"),
        (FORM, {"action": ["accept"]}, "needs action"),
        (FORM, {"action": "accept", "content": "Ann"}, "needs content"),
        (FORM, {"action": "accept", "content": None}, "needs content"),
        (SAMPLE, {**SAMPLED, "role": "system"}, "needs role"),
        (SAMPLE, {**SAMPLED, "content": "Paris"}, "needs content"),
        (SAMPLE, {**SAMPLED, "content": ["Paris"]}, "needs content"),
        (SAMPLE, {**SAMPLED, "model": None}, "needs model"),
        (SAMPLE, {"role": "assistant", "model": "m"}, "needs content"),
        (ROOTS, {}, "needs roots"),
        (ROOTS, {"roots": {}}, "needs roots"),
        (ROOTS, {"roots": ["file:///"]}, "needs roots"),
        (ROOTS, {"roots": [{"name": "home"}]}, "needs roots"),
        (ROOTS, {"roots": [{"uri": 5}]}, "needs roots"),
    ],
)
def test_an_answer_of_the_wrong_shape_is_an_error(question: Question, answer: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        read_answers([question], {"inputResponses": {question.key: answer}})
    assert caught.value.code == INVALID_PARAMS


@given(JSON)
def test_any_responses_give_answers_or_an_error(responses: Any) -> None:
    keyed = {"who": responses, "capital": responses, "roots": responses}
    for params in ({"inputResponses": responses}, {"inputResponses": keyed}):
        with contextlib.suppress(RequestError):
            answers = read_answers([FORM, SAMPLE, ROOTS], params)
            assert len(answers.given) + len(answers.missing) == 3


# The sealed state

KEY, OLD_KEY, FOREIGN_KEY = (hashlib.sha256(name).digest() for name in (b"key", b"old key", b"foreign key"))
SEALER = StateSealer([KEY])
STATE = SealedState(round=2, expires=1600.0, handle="i.7", answers={"who": ACCEPTED}, carried=[1, None])
TEXT = SEALER.seal(STATE, *CALL, "ann")


def opened(text: Any, sealer: StateSealer = SEALER, **changes: Any) -> SealedState | StateRefusal:
    usual = {"method": CALL[0], "params": CALL[1], "principal": "ann", "now": 1000.0}
    return sealer.open(text, **{**usual, **changes})


@req("mrtr-14", "mrtr-27")
def test_another_instance_with_the_same_key_opens_a_state() -> None:
    assert opened(TEXT, StateSealer([KEY])) == STATE


@given(
    st.builds(
        SealedState,
        round=st.integers(0, 99),
        expires=st.floats(1001, 1e12),
        handle=st.none() | st.text(),
        answers=st.dictionaries(st.text(), OBJECT, max_size=3),
        carried=JSON,
    ),
    st.none() | st.text(),
    OBJECT,
)
def test_a_state_is_opened_as_it_was_sealed(state: SealedState, principal: str | None, params: dict[str, Any]) -> None:
    text = SEALER.seal(state, "prompts/get", params, principal)
    assert text.isascii()
    assert not set(text) & set("+/ \n")
    assert opened(text, method="prompts/get", params=params, principal=principal) == state


def test_half_a_surrogate_pair_survives_the_seal() -> None:
    state = SealedState(1, 2000, answers={"\ud800": {"action": "\udfff"}})
    params = {"name": "\udc00"}
    assert opened(SEALER.seal(state, "tools/call", params, "\ud801"), params=params, principal="\ud801") == state


@req("mrtr-08", "mrtr-09")
@pytest.mark.parametrize("other", "A_-9+/=\n\0é")
def test_a_state_with_any_character_changed_is_refused(other: str) -> None:
    for at, was in enumerate(TEXT):
        if was != other:
            assert isinstance(opened(TEXT[:at] + other + TEXT[at + 1 :]), StateRefusal)
        assert isinstance(opened(TEXT[:at] + other + TEXT[at:]), StateRefusal)  # inserted, not changed


@req("mrtr-08", "mrtr-09")
def test_a_state_with_any_bit_flipped_is_refused() -> None:
    raw = base64.urlsafe_b64decode(TEXT)
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        assert opened(base64.urlsafe_b64encode(changed).decode()) is StateRefusal.BAD_SEAL


@req("mrtr-08", "mrtr-09")
def test_a_state_cut_short_or_made_longer_is_refused() -> None:
    for at in range(len(TEXT)):
        assert isinstance(opened(TEXT[:at]), StateRefusal)
        assert isinstance(opened(TEXT[at + 1 :]), StateRefusal)
    for tail in ("=", "==", "A", "AAAA", "\n", " ", "-TAMPERED", TEXT):
        assert isinstance(opened(TEXT + tail), StateRefusal)


def test_a_state_has_exactly_one_valid_text() -> None:
    # Other spare bits in the last character, or missing padding, would decode to the same bytes.
    for length in range(3):
        text = SEALER.seal(attrs.evolve(STATE, handle="i" * length), *CALL, "ann")
        assert isinstance(opened(text), SealedState)
        for variant in {text.rstrip("="), text.translate(str.maketrans("-_", "+/")), f"{text}\n", f" {text}"} - {text}:
            assert opened(variant) is StateRefusal.MALFORMED
        last = len(text.rstrip("=")) - 1
        for spare in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_":
            if spare != text[last]:
                assert isinstance(opened(text[:last] + spare + text[last + 1 :]), StateRefusal)


@req("mrtr-08")
@given(st.text() | JSON)
def test_any_json_as_a_state_is_refused_without_an_exception(value: Any) -> None:
    assert opened(value) in (StateRefusal.MALFORMED, StateRefusal.BAD_SEAL)


@req("mrtr-08")
@given(st.binary(max_size=200))
def test_any_bytes_in_base64_are_refused(raw: bytes) -> None:
    assert opened(base64.urlsafe_b64encode(raw).decode()) is StateRefusal.BAD_SEAL


@pytest.mark.parametrize(
    "hostile",
    [
        None,
        True,
        0,
        {},
        [TEXT],
        "",
        "=",
        "====",
        "\0",
        "\ud800",
        "A",
        "AAA",
        "A" * 43,
        "A" * (MAX_STATE_CHARS + 4),
        "é" * 64,
        TEXT.swapcase(),
        TEXT[::-1],
        json.dumps({"principal": "ann", "round": 1}),
        base64.urlsafe_b64encode(b"[]").decode(),
        base64.urlsafe_b64encode(bytes(32) + b"[[[[").decode(),
    ],
)
def test_hostile_states_are_refused(hostile: Any) -> None:
    assert opened(hostile) in (StateRefusal.MALFORMED, StateRefusal.BAD_SEAL)


@req("mrtr-09")
def test_a_seal_of_another_key_or_purpose_is_refused() -> None:
    payload = base64.urlsafe_b64decode(TEXT)[32:]
    for seal in (hmac.digest(KEY, payload, "sha256"), hashlib.sha256(payload).digest(), bytes(32)):
        assert opened(base64.urlsafe_b64encode(seal + payload).decode()) is StateRefusal.BAD_SEAL
    assert opened(TEXT, StateSealer([FOREIGN_KEY])) is StateRefusal.BAD_SEAL


def test_a_state_stays_valid_when_the_keys_are_changed() -> None:
    both = StateSealer([KEY, OLD_KEY])
    old_text = StateSealer([OLD_KEY]).seal(STATE, *CALL, "ann")
    assert opened(old_text) is StateRefusal.BAD_SEAL
    assert opened(old_text, both) == opened(TEXT, both) == STATE
    assert both.seal(STATE, *CALL, "ann") == TEXT  # the first key seals
    assert opened(TEXT, StateSealer([FOREIGN_KEY, OLD_KEY])) is StateRefusal.BAD_SEAL


@pytest.mark.parametrize("keys", [[], [b""], [b"k" * 31], [KEY, b"password"]])
def test_a_short_key_is_refused(keys: list[bytes]) -> None:
    with pytest.raises(UsageError, match="at least 32 random bytes"):
        StateSealer(keys)


@pytest.mark.parametrize("keys", [KEY, KEY.hex(), [KEY.hex()], b""])
def test_the_error_about_a_single_key_names_the_sequence(keys: Any) -> None:
    with pytest.raises(UsageError, match=r"a sequence of keys, such as \[key\]"):
        StateSealer(keys)


@pytest.mark.parametrize("principal", [("ann", "example.com"), 7, b"ann", {"sub": "ann"}, object()])
def test_a_principal_that_is_not_text_is_refused(principal: Any) -> None:
    """A tuple comes back from JSON as a list, so a state that is sealed for it could never be opened."""
    for use in (
        lambda: SEALER.seal(STATE, *CALL, principal),
        lambda: opened(TEXT, principal=principal),
        lambda: opened("no state at all", principal=principal),
    ):
        with pytest.raises(UsageError, match="principal must be a str or None, got "):
            use()


@req("mrtr-10")
def test_a_state_expires_exactly_at_its_time() -> None:
    assert opened(TEXT, now=math.nextafter(1600.0, 0)) == STATE
    for late in (1600.0, math.nextafter(1600.0, math.inf), 1e18):
        assert opened(TEXT, now=late) is StateRefusal.EXPIRED


@req("mrtr-10")
@pytest.mark.parametrize("principal", ["bob", "", "ANN", "ann ", None])
def test_a_state_of_another_principal_is_refused(principal: str | None) -> None:
    assert opened(TEXT, principal=principal) is StateRefusal.OTHER_PRINCIPAL


def test_no_principal_and_the_empty_name_are_different() -> None:
    assert opened(SEALER.seal(STATE, *CALL, None), principal=None) == STATE
    assert opened(SEALER.seal(STATE, *CALL, None), principal="") is StateRefusal.OTHER_PRINCIPAL
    assert opened(SEALER.seal(STATE, *CALL, ""), principal=None) is StateRefusal.OTHER_PRINCIPAL


@req("mrtr-10")
def test_a_state_of_another_request_is_refused() -> None:
    assert opened(TEXT, method="prompts/get") is StateRefusal.OTHER_METHOD
    for params in (
        {},
        {"name": "greet"},
        {"name": "greet", "arguments": {"n": 2}},
        {"name": "greet", "arguments": {"n": True}},
        {"name": "greet", "arguments": {"n": "1"}},
        {"name": "other", "arguments": {"n": 1}},
        {**CALL[1], "more": None},
    ):
        assert opened(TEXT, params=params) is StateRefusal.OTHER_PARAMS


def test_a_retry_may_change_the_answers_the_metadata_and_the_order() -> None:
    retry = {
        "requestState": TEXT,
        "inputResponses": {"who": ACCEPTED},
        "_meta": {"progressToken": 8},
        "arguments": {"n": 1},
        "name": "greet",
    }
    assert opened(TEXT, params=retry) == STATE


def test_the_error_tells_other_principals_nothing_about_a_state() -> None:
    assert opened(TEXT, principal="bob", now=1e9, method="prompts/get", params={}) is StateRefusal.OTHER_PRINCIPAL
    told = {each: (each.error.code, each.error.message) for each in StateRefusal}
    assert {code for code, _ in told.values()} == {INVALID_PARAMS}
    assert told[StateRefusal.MALFORMED] == told[StateRefusal.BAD_SEAL] == told[StateRefusal.OTHER_PRINCIPAL]
    assert told[StateRefusal.OTHER_METHOD] == told[StateRefusal.OTHER_PARAMS]
    assert len(set(told.values())) == 6
    assert all(each.error.data is None for each in StateRefusal)


def test_fingerprints_distinguish_keys_without_revealing_them() -> None:
    one, other = os.urandom(32), os.urandom(32)
    both = StateSealer([one, other]).fingerprints
    assert both == (*StateSealer([one]).fingerprints, *StateSealer([other]).fingerprints)
    assert len(set(both)) == 2
    assert one.hex()[:8] not in both[0]


def test_keys_are_read_from_hexadecimal_digits() -> None:
    assert read_keys("00ff, 0A\n", "KEYS") == [b"\0\xff", b"\n"]
    for wrong in ("secret", "0", "00ff,secret"):
        with pytest.raises(UsageError, match="KEYS must have keys in hexadecimal") as caught:
            read_keys(wrong, "KEYS")
        assert wrong not in str(caught.value) or wrong == "0"


def test_each_round_of_a_call_has_its_own_state() -> None:
    texts = {SEALER.seal(SealedState(number, 1600.0), *CALL, "ann") for number in range(5)}
    assert len(texts) == 5


def test_the_layout_of_a_sealed_state_is_fixed() -> None:
    # A new layout needs a new number in the signed bytes, so that instances of two versions refuse each other cleanly.
    digest = hashlib.sha256(b'{"arguments":{"n":1},"name":"greet"}').hexdigest()
    answers = '{"who":{"action":"accept","content":{"name":"Ann"}}}'
    payload = f'["ann","tools/call","{digest}",1600.0,2,"i.7",{answers},[1,null]]'
    seal = hmac.digest(KEY, b"trio_mcp requestState 1\0" + payload.encode(), "sha256")
    assert base64.urlsafe_b64decode(TEXT) == seal + payload.encode()


def test_the_size_of_a_state_is_limited() -> None:
    bare = len(base64.urlsafe_b64decode(SEALER.seal(SealedState(1, 1600.0, carried=""), *CALL, "ann")))
    most = MAX_STATE_CHARS // 4 * 3 - bare
    fits = SEALER.seal(SealedState(1, 1600.0, carried="x" * most), *CALL, "ann")
    assert len(fits) == MAX_STATE_CHARS
    assert isinstance(opened(fits), SealedState)
    with pytest.raises(RequestError, match=r"may have [0-9]+ characters; it has") as caught:
        SEALER.seal(SealedState(1, 1600.0, carried="x" * (most + 1)), *CALL, "ann")
    assert caught.value.code == INTERNAL_ERROR


@pytest.mark.parametrize("carried", [object(), b"bytes", {1, 2}, {("a",): 1}])
def test_a_carried_value_must_be_json(carried: Any) -> None:
    with pytest.raises(UsageError, match="must be JSON"):
        SEALER.seal(SealedState(1, 1600.0, carried=carried), *CALL, "ann")


# The client's rounds


def rounds(declared: dict[str, Any] = EVERYTHING, **options: Any) -> Rounds:
    return Rounds(LATEST, *CALL, declared, **options)


@req("rtype-04")
@pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
@pytest.mark.parametrize("result", [{}, {"content": []}, {"resultType": "complete", "content": []}])
def test_a_complete_result_or_one_without_a_type_ends_the_call(revision: Any, result: dict[str, Any]) -> None:
    assert Rounds(revision, *CALL, {}).receive(result) is None


UNKNOWN_TYPES = ["Complete", "task", "", "input-required", None, 0, True, [], {}, ["complete"]]


@req("rtype-03")
@pytest.mark.parametrize("kind", UNKNOWN_TYPES)
@pytest.mark.parametrize("revision", MODERN, ids=str)
def test_a_result_of_unknown_type_is_invalid(revision: Any, kind: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="tools/call with a result of unknown type"):
        Rounds(revision, *CALL, {}).receive({"resultType": kind, "content": []})


@pytest.mark.parametrize("kind", [*UNKNOWN_TYPES, "input_required"])
@pytest.mark.parametrize("revision", LEGACY, ids=str)
def test_legacy_revisions_ignore_a_result_type(revision: Any, kind: Any) -> None:
    result = {"resultType": kind, "content": [], "requestState": "s"}
    assert Rounds(revision, *CALL, {}).receive(result) is None


@req("rtype-02", "ver-06")
def test_the_types_of_agreed_extensions_are_known() -> None:
    result = {"resultType": "task", "taskId": "t"}
    assert rounds(extensions=frozenset({"task"})).receive(result) is None
    with pytest.raises(RemoteProtocolError):
        rounds(extensions=frozenset({"task"})).receive({"resultType": "other"})


def test_an_error_shows_only_the_start_of_a_long_result_type() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        rounds().receive({"resultType": "x" * 1_000_000})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("revision", "method"),
    [each for each in MAY_NOT_ASK if each[0].result_type],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_question_of_another_method_is_an_error_of_the_server(revision: Any, method: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{method} with input_required, which {revision} does not allow"):
        Rounds(revision, method, {}, EVERYTHING).receive(ask(FORM, state="s"))


@req("mrtr-16", "mrtr-18", "mrtr-26")
@pytest.mark.parametrize("method", MAY_ASK)
def test_a_retry_repeats_the_call_with_every_answer_and_the_state(method: str) -> None:
    params = {"name": "x", "uri": "y", "_meta": {"k": 1}}
    call = Rounds(LATEST, method, params, EVERYTHING)
    assert call.receive(ask(*QUESTIONS, state="s/1")) == QUESTIONS
    retry = call.retry(ANSWERS)
    assert retry == {**params, "inputResponses": ANSWERS, "requestState": "s/1"}
    assert list(retry["inputResponses"]) == list(ANSWERS)
    assert params == {"name": "x", "uri": "y", "_meta": {"k": 1}}
    assert call.receive({"resultType": "complete"}) is None


@req("mrtr-19")
def test_a_retry_has_no_members_of_an_earlier_round() -> None:
    call = Rounds(LATEST, "tools/call", {"name": "x", "requestState": "stale", "inputResponses": {"z": {}}}, EVERYTHING)
    call.receive(ask(FORM, state="one"))
    assert call.retry({"who": ACCEPTED}) == {
        "name": "x",
        "inputResponses": {"who": ACCEPTED},
        "requestState": "one",
    }
    call.receive(ask(ROOTS))
    assert call.retry({"roots": LISTED}) == {"name": "x", "inputResponses": {"roots": LISTED}}
    call.receive(ask(state="two"))
    assert call.retry() == {"name": "x", "requestState": "two"}


@req("mrtr-02", "mrtr-18")
@given(st.text())
def test_any_state_comes_back_as_it_was(state: str) -> None:
    call = rounds()
    call.receive({"resultType": "input_required", "requestState": state})
    assert call.retry()["requestState"] == state


@req("mrtr-17")
@pytest.mark.parametrize("asked", [{"requestState": "s"}, {"inputRequests": {}}, {"inputRequests": {}, "other": 1}])
def test_without_questions_the_call_may_be_sent_again_at_once(asked: dict[str, Any]) -> None:
    call = rounds()
    assert call.receive({"resultType": "input_required", **asked}) == ()
    assert call.retry().keys() == CALL[1].keys() | (asked.keys() & {"requestState"})


@req("mrtr-16", "mrtr-26")
@pytest.mark.parametrize(
    ("answers", "complaint"),
    [
        ({}, r"missing \['roots', 'who'\], not asked \[\]"),
        ({"who": ACCEPTED}, r"missing \['roots'\], not asked \[\]"),
        ({"who": ACCEPTED, "roots": LISTED, "Who": ACCEPTED}, r"missing \[\], not asked \['Who'\]"),
    ],
)
def test_a_retry_needs_exactly_the_requested_answers(answers: Any, complaint: str) -> None:
    call = rounds()
    call.receive(ask(FORM, ROOTS))
    with pytest.raises(UsageError, match=complaint):
        call.retry(answers)
    assert call.retry({"roots": LISTED, "who": ACCEPTED})["inputResponses"].keys() == {"who", "roots"}


@req("mrtr-21")
@given(st.permutations([0, 0, 1, 1]), st.permutations([0, 1]))
def test_parallel_calls_are_independent(order: list[int], last: list[int]) -> None:
    calls = [Rounds(LATEST, "tools/call", {"name": str(number)}, EVERYTHING) for number in (0, 1)]
    asked = [False, False]
    for number in order:
        if not asked[number]:
            asked[number] = True
            calls[number].receive(ask(attrs.evolve(FORM, key=f"k{number}"), state=f"s{number}"))
        else:
            answer = {"action": "accept", "content": {"n": number}}
            assert calls[number].retry({f"k{number}": answer}) == {
                "name": str(number),
                "inputResponses": {f"k{number}": answer},
                "requestState": f"s{number}",
            }
    for number in last:
        assert calls[number].receive({}) is None


def test_the_number_of_rounds_is_limited() -> None:
    call = rounds()
    for number in range(MAX_ROUNDS):
        call.receive(ask(state=str(number)))
        call.retry()
    with pytest.raises(RemoteProtocolError, match="input_required again, after the last round that the client allows"):
        call.receive(ask(state="again"))
    # The last retry may still get a complete result.
    call = rounds(limit=1)
    call.receive(ask(FORM))
    call.retry({"who": ACCEPTED})
    assert call.receive({"content": []}) is None


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({}, "neither inputRequests nor requestState"),
        ({"requestState": None}, "a requestState that is null"),
        ({"requestState": 5, "inputRequests": {}}, "a requestState that is a number"),
        ({"inputRequests": None}, "inputRequests that are null"),
        ({"inputRequests": [], "requestState": "s"}, "inputRequests that are an array"),
        ({"inputRequests": {"k": None}}, "an input request 'k' that does not exist"),
        ({"inputRequests": {"k": "roots/list"}}, "does not exist"),
        ({"inputRequests": {"k": {}}}, "does not exist"),
        ({"inputRequests": {"k": {"method": ["roots/list"]}}}, "does not exist"),
        ({"inputRequests": {"k": {"method": "tools/call", "params": {}}}}, "does not exist in 2026-07-28"),
        ({"inputRequests": {"k": {"method": "roots/list", "params": None}}}, "'k' with params that are null"),
        ({"inputRequests": {"k": {"method": "roots/list", "params": []}}}, "'k' with params that are an array"),
        ({"inputRequests": {"k" * 999: {"method": "ping"}}}, r"k\.\.\."),
    ],
)
def test_malformed_questions_are_an_error_of_the_server(asked: dict[str, Any], complaint: str) -> None:
    call = rounds()
    with pytest.raises(RemoteProtocolError, match=complaint) as caught:
        call.receive({"resultType": "input_required", **asked})
    assert len(str(caught.value)) < 200
    with pytest.raises(UsageError, match="tools/call is over"):
        call.retry()


@pytest.mark.parametrize(
    ("declared", "question", "names"),
    [
        ({}, ROOTS, "roots"),
        ({"sampling": {}}, FORM, "elicitation"),
        ({"elicitation": {}}, LINK, "elicitation.url"),
        ({"elicitation": {"url": {}}}, FORM, "elicitation.form"),
        ({"sampling": {}}, TOOLS, "sampling.tools"),
    ],
)
def test_a_question_that_we_did_not_declare_is_an_error_of_the_server(
    declared: dict[str, Any], question: Question, names: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=f"the client capability {names}.*did not declare"):
        rounds(declared).receive(ask(question))
    assert rounds().receive(ask(question)) == (question,)


def test_a_question_without_params_is_read_without_params() -> None:
    entry = {"method": "roots/list"}
    assert rounds().receive({"resultType": "input_required", "inputRequests": {"roots": entry}}) == (ROOTS,)


@req("mrtr-28")
def test_a_call_with_an_unanswered_question_can_be_abandoned() -> None:
    call = rounds()
    call.receive(ask(FORM, SAMPLE, state="s"))
    error = call.abandon("capital")
    assert isinstance(error, InputUnavailable)
    assert (error.method, error.key) == ("tools/call", "capital")
    assert str(error) == "tools/call was not completed: the server asked for input 'capital', and none was given"
    with pytest.raises(UsageError, match="tools/call is over, not waiting for answers"):
        call.retry({"who": ACCEPTED, "capital": SAMPLED})


def test_an_error_shows_only_the_start_of_a_long_key() -> None:
    call, key = rounds(), "k" * 1_000_000
    call.receive(ask(Question(key, "roots/list")))
    with pytest.raises(UsageError, match=r"missing .*kkk") as caught:
        call.retry({})
    error = call.abandon(key)
    assert error.key == key
    assert max(len(str(each)) for each in (caught.value, error)) < 250


STAGES = {
    "sent": [],
    "asked": [lambda call: call.receive(ask(FORM))],
    "sent again": [lambda call: call.receive(ask(FORM)), lambda call: call.retry({"who": ACCEPTED})],
    "complete": [lambda call: call.receive({})],
    "abandoned": [lambda call: call.receive(ask(FORM)), lambda call: call.abandon("who")],
}
MOVES = {
    "receive": lambda call: call.receive({}),
    "retry": lambda call: call.retry({"who": ACCEPTED}),
    "abandon": lambda call: call.abandon("who"),
}
ALLOWED = {"sent": {"receive"}, "asked": {"retry", "abandon"}, "sent again": {"receive"}}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("move", MOVES)
def test_a_call_of_the_wrong_stage_is_refused_and_changes_no_state(stage: str, move: str) -> None:
    call = rounds()
    for step in STAGES[stage]:
        step(call)
    allowed = ALLOWED.get(stage, set())
    if move not in allowed:
        with pytest.raises(UsageError, match="this tools/call is "):
            MOVES[move](call)
    for right in sorted(allowed)[-1:]:
        MOVES[right](call)


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "method": st.sampled_from([*LATEST.input_requests, "ping"]) | JSON,
        "params": st.dictionaries(st.sampled_from(["mode", "tools", "requestedSchema"]), JSON) | JSON,
    },
)
ASKED = st.fixed_dictionaries(
    {"resultType": st.sampled_from(["input_required", "complete"]) | JSON},
    optional={
        "inputRequests": st.dictionaries(st.text(max_size=5), ENTRY | JSON, max_size=3) | JSON,
        "requestState": st.text() | JSON,
    },
)


@settings(max_examples=200)
@given(ASKED | OBJECT)
def test_any_result_is_complete_a_question_or_an_error_of_the_server(result: dict[str, Any]) -> None:
    call = rounds()
    try:
        questions = call.receive(result)
    except RemoteProtocolError:
        return
    if questions is not None:
        retry = call.retry({each.key: {} for each in questions})
        assert retry.get("inputResponses", {}).keys() == result.get("inputRequests", {}).keys()
        assert retry.get("requestState") == result.get("requestState")


# Both sides


def replica(
    method: str, params: dict[str, Any], now: float, wanted: list[Question], ask_at_once: int
) -> dict[str, Any]:
    """A server process that knows its key and its handler, and has no memory of earlier rounds."""
    sealer = StateSealer([KEY])
    state: SealedState | StateRefusal = SealedState(0, now)
    if "requestState" in params:
        state = sealer.open(params["requestState"], method, params, "ann", now)
    assert isinstance(state, SealedState), state
    answered = {**state.answers, **read_answers(wanted, params).given}
    left = [each for each in wanted if each.key not in answered]
    if not left:
        return {"resultType": "complete", "structuredContent": answered}
    text = sealer.seal(SealedState(state.round + 1, now + 60, answers=answered), method, params, "ann")
    return input_required(LATEST, method, EVERYTHING, left[:ask_at_once], text)


@req("mrtr-14", "mrtr-15", "mrtr-27")
@pytest.mark.parametrize("method", MAY_ASK)
@settings(max_examples=40)
@given(kinds=st.lists(st.sampled_from(QUESTIONS), max_size=8), ask_at_once=st.integers(1, 3))
def test_any_instance_can_continue_a_call_from_a_retry(method: str, kinds: list[Question], ask_at_once: int) -> None:
    wanted = [attrs.evolve(each, key=f"{number}:{each.key}") for number, each in enumerate(kinds)]
    call = Rounds(LATEST, method, {"name": "n"}, EVERYTHING)
    params: dict[str, Any] = {"name": "n"}
    for number in range(len(wanted) + 1):
        # Every message goes over the wire, and every request meets a new server.
        result = json.loads(json.dumps(replica(method, params, 1000.0 + number, wanted, ask_at_once)))
        questions = call.receive(result)
        if questions is None:
            assert number == math.ceil(len(wanted) / ask_at_once)
            assert result["structuredContent"] == {each.key: ANSWERS[each.key[2:]] for each in wanted}
            break
        params = json.loads(json.dumps(call.retry({each.key: ANSWERS[each.key[2:]] for each in questions})))
    else:
        pytest.fail("the call did not complete")


@req("mrtr-20")
def test_every_retry_is_a_new_request_with_a_new_id() -> None:
    client, server, call, params, ids = Peer(Role.CLIENT), Peer(Role.SERVER), rounds(), CALL[1], []
    for result in (ask(FORM, state="1"), ask(ROOTS, state="2"), {"resultType": "complete"}):
        client.request("tools/call", params)
        [(request, _)] = client.outgoing()
        assert isinstance(request, Request)
        assert "id" not in request.params
        ids.append(request.id)
        server.receive(request, 0.0)
        server.answer(request.id, result)
        [(answer, _)] = server.outgoing()
        [answered] = client.receive(answer, 0.0)
        assert isinstance(answered, Answered)
        questions = call.receive(answered.result)
        params = {} if questions is None else call.retry({each.key: ANSWERS[each.key] for each in questions})
    assert len(set(ids)) == 3
