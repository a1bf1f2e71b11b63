"""The callbacks of a client: a question of a server reaches its callback, and is answered or refused."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import attrs
import pytest
import trio

from tests.core.pairs import opened
from tests.requirements import req
from tests.server.checkpoints import Attempt, cancel_at_each_step
from trio_mcp.client import Answering, FormElicitationRequest, RootLike, SamplingRequest, UrlElicitationRequest
from trio_mcp.core import (
    INVALID_PARAMS,
    LEGACY,
    META_CLIENT_CAPABILITIES,
    METHOD_NOT_FOUND,
    REVISIONS,
    Accepted,
    Call,
    Declined,
    Dismissed,
    ImageContent,
    InputUnavailable,
    JsonObject,
    MalformedContent,
    NotInThisRevision,
    Question,
    Refused,
    RemoteProtocolError,
    RequestError,
    Revision,
    Rounds,
    Terms,
    TextContent,
    ToolUseContent,
    UsageError,
    models,
)
from trio_mcp.server import Elicit, ElicitUrl, Inquiry, ListRoots, Sample

A, B, C, D, E = REVISIONS.values()
EVERY = pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
WITH_FORMS = pytest.mark.parametrize("revision", [C, D, E], ids=str)
WITH_PAGES = pytest.mark.parametrize("revision", [D, E], ids=str)
ELICIT, SAMPLE, ROOTS = "elicitation/create", "sampling/createMessage", "roots/list"


def terms(revision: Revision) -> Terms:
    return Terms(revision, identity={"name": "weather", "version": "1", "title": "The Weather"})


async def answered(answering: Answering, method: str, params: JsonObject, revision: Revision = D) -> JsonObject:
    return await answering.answer(method, params, terms(revision))


async def refused(answering: Answering, method: str, params: JsonObject, revision: Revision = D) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await answered(answering, method, params, revision)
    return caught.value


def callback_that_returns(answer: object, received: list[Any] | None = None) -> Callable[..., Any]:
    """A callback that returns `answer`, and keeps its arguments."""

    def callback(*given: Any) -> object:
        if received is not None:
            received.extend(given)
        return answer

    return callback


def never(*_: object) -> Any:
    raise AssertionError("this callback must not be called")


# Declared capabilities.

# The capabilities in the newest revision, and different ones for the revisions up to a revision.
OFFERS = pytest.mark.parametrize(
    ("offers", "newest", "by_revision"),
    [
        ({}, {}, {}),
        ({"sampling": never}, {"sampling": {}}, {}),
        ({"sampling": never, "sampling_tools": True}, {"sampling": {"tools": {}}}, {"2025-06-18": {"sampling": {}}}),
        ({"elicitation": never}, {"elicitation": {"form": {}}}, {"2025-03-26": {}, "2025-06-18": {"elicitation": {}}}),
        ({"elicitation_url": never}, {"elicitation": {"url": {}}}, {"2025-03-26": {}, "2025-06-18": {}}),
        (
            {"elicitation": never, "elicitation_url": never},
            {"elicitation": {"form": {}, "url": {}}},
            {"2025-03-26": {}, "2025-06-18": {"elicitation": {}}},
        ),
        ({"roots": []}, {"roots": {"listChanged": True}}, {"2026-07-28": {"roots": {}}}),
        ({"roots": never}, {"roots": {"listChanged": True}}, {"2026-07-28": {"roots": {}}}),
    ],
)


@OFFERS
@req("root-01", "samp-02", "elic-05", "elic-11")
@pytest.mark.parametrize("revision", LEGACY, ids=str)
def test_the_handshake_declares_exactly_the_offered_capabilities(
    revision: Revision, offers: dict[str, Any], newest: JsonObject, by_revision: dict[str, JsonObject]
) -> None:
    answering = Answering(**offers)
    assert answering.capabilities == newest
    pair = opened(revision, answering.capabilities)
    assert pair.server.terms is not None
    up_to = next((name for name in sorted(by_revision) if revision.name <= name < E.name), None)
    assert pair.server.terms.capabilities == (newest if up_to is None else by_revision[up_to])


@OFFERS
@req("root-02", "samp-03", "elic-06", "elic-11")
def test_a_modern_request_declares_the_offered_capabilities(
    offers: dict[str, Any], newest: JsonObject, by_revision: dict[str, JsonObject]
) -> None:
    pair = opened(E, Answering(**offers).capabilities)
    for _ in range(2):
        pair.client.request("tools/list")
    pair.pump()
    calls = [event for event in pair.server_saw if isinstance(event, Call)]
    said = [call.request.params["_meta"][META_CLIENT_CAPABILITIES] for call in calls]
    assert said == [by_revision.get(E.name, newest)] * 2


FORM: JsonObject = {
    "message": "Who are you?",
    "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}
PAGE: JsonObject = {"mode": "url", "message": "Log in", "url": "https://example.com/in", "elicitationId": "1"}
HELLO: JsonObject = {"messages": [{"role": "user", "content": {"type": "text", "text": "Hello"}}], "maxTokens": 10}
TOOLS: list[JsonObject] = [{"name": "add", "inputSchema": {"type": "object"}}]


@req("samp-34", "root-05", "elic-34", "samp-30", "samp-11")
@pytest.mark.parametrize(
    ("offers", "method", "params", "code", "why"),
    [
        ({}, SAMPLE, HELLO, METHOD_NOT_FOUND, "sampling/createMessage needs the client capability sampling"),
        ({}, ROOTS, {}, METHOD_NOT_FOUND, "roots/list needs the client capability roots"),
        ({}, ELICIT, FORM, METHOD_NOT_FOUND, "elicitation/create needs the client capability elicitation"),
        ({"elicitation": never}, ELICIT, PAGE, INVALID_PARAMS, "needs the client capability elicitation.url"),
        ({"elicitation_url": never}, ELICIT, FORM, INVALID_PARAMS, "needs the client capability elicitation.form"),
        ({"elicitation_url": never}, ELICIT, {"message": "?"}, INVALID_PARAMS, "requestedSchema: missing"),
        ({"sampling": never}, SAMPLE, {**HELLO, "tools": TOOLS}, INVALID_PARAMS, "capability sampling.tools"),
        ({"sampling": never}, SAMPLE, {**HELLO, "toolChoice": {}}, INVALID_PARAMS, "capability sampling.tools"),
        ({"roots": never}, "ping", {}, METHOD_NOT_FOUND, "a client of 2025-11-25 does not support 'ping'"),
        ({"roots": never}, "tasks/list", {}, METHOD_NOT_FOUND, "does not support 'tasks/list'"),
    ],
)
async def test_a_question_that_was_not_offered_is_refused_without_a_callback(
    offers: dict[str, Any], method: str, params: JsonObject, code: int, why: str
) -> None:
    error = await refused(Answering(**offers), method, params)
    assert error.code == code
    assert why in error.message


@req("samp-34", "root-05", "elic-34", "samp-30")
@pytest.mark.parametrize(
    ("offers", "method", "params", "code"),
    [
        ({}, SAMPLE, HELLO, METHOD_NOT_FOUND),
        ({}, ROOTS, {}, METHOD_NOT_FOUND),
        ({"elicitation": never}, ELICIT, PAGE, INVALID_PARAMS),
        ({"elicitation_url": never}, ELICIT, FORM, INVALID_PARAMS),
        ({"sampling": never}, SAMPLE, {**HELLO, "tools": TOOLS}, INVALID_PARAMS),
    ],
)
def test_a_session_refuses_a_question_that_was_not_offered(
    offers: dict[str, Any], method: str, params: JsonObject, code: int
) -> None:
    pair = opened(D, Answering(**offers).capabilities)
    pair.server.request(method, params, undeclared=True)  # a server that asks without the capability
    pair.pump()
    (outcome,) = [event for event in pair.server_saw if isinstance(event, Refused)]
    assert outcome.error.code == code
    assert not any(isinstance(event, Call) for event in pair.client_saw)


@pytest.mark.parametrize(("method", "revision"), [(ELICIT, A), (ELICIT, B), ("initialize", D), ("ping", E)])
async def test_a_question_of_another_revision_is_refused(method: str, revision: Revision) -> None:
    error = await refused(Answering(elicitation=never, elicitation_url=never), method, FORM, revision)
    assert error.code == METHOD_NOT_FOUND


@pytest.mark.parametrize(
    ("offers", "why"),
    [
        ({"sampling": "a model"}, "sampling must be a function, got str"),
        ({"elicitation": {}}, "elicitation must be a function, got dict"),
        ({"elicitation_url": True}, "elicitation_url must be a function, got bool"),
        ({"sampling_tools": True}, "sampling_tools needs the option sampling"),
        ({"roots": "/home"}, "roots must be a sequence of paths, file: URIs or Root objects, got str"),
    ],
)
def test_an_invalid_offer_is_refused_when_it_is_made(offers: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        Answering(**offers)


# Sampling.


@EVERY
async def test_the_answer_of_a_model_has_the_form_of_each_revision(revision: Revision) -> None:
    received: list[SamplingRequest] = []
    answering = Answering(sampling=callback_that_returns(("Hi", "gpt-9"), received))
    result = await answered(answering, SAMPLE, Sample("Hello", max_tokens=10).params(revision), revision)
    assert result == {"role": "assistant", "content": {"type": "text", "text": "Hi"}, "model": "gpt-9"}
    assert Sample("Hello", max_tokens=10).read(result).model == "gpt-9"
    (asked,) = received
    assert asked.params.messages == [models.SamplingMessage("user", TextContent("Hello"))]
    assert asked.params.max_tokens == 10
    assert asked.server is not None
    assert asked.server.display_name == "The Weather"


async def test_callbacks_may_be_async_or_plain_functions() -> None:
    async def later(_: SamplingRequest) -> tuple[str, str]:
        await trio.lowlevel.checkpoint()
        return "Hi", "m"

    for callback in (later, callback_that_returns(("Hi", "m"))):
        assert (await answered(Answering(sampling=callback), SAMPLE, HELLO))["model"] == "m"


@pytest.mark.parametrize(
    "answer",
    [
        models.CreateMessageResult("assistant", [TextContent("a"), TextContent("b")], "m", "maxTokens"),
        models.CreateMessageResult("assistant", ImageContent(b"\x89", "image/png"), "m"),
    ],
)
async def test_a_whole_result_is_sent_as_it_was_made(answer: models.CreateMessageResult) -> None:
    result = await answered(Answering(sampling=callback_that_returns(answer)), SAMPLE, HELLO)
    assert Sample("Hello", max_tokens=10).read(result) == answer


@pytest.mark.parametrize("answer", [Declined(), Dismissed()])
@req("samp-01", "samp-05", "samp-06")
async def test_a_user_may_reject_a_sampling_request(answer: object) -> None:
    error = await refused(Answering(sampling=callback_that_returns(answer)), SAMPLE, HELLO)
    assert (error.code, error.message) == (-1, "the user rejected the sampling request")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("Hi", r"a CreateMessageResult, \(text, model\) or Declined, got str"),
        (None, "got NoneType"),
        (("Hi", 5), "got tuple"),
        (("Hi", "m", "x"), "got tuple"),
        (models.CreateMessageResult("assistant", TextContent("Hi"), 5), "model: expected string, got integer"),  # type: ignore[arg-type]
        (models.CreateMessageResult("robot", TextContent("Hi"), "m"), "role: expected one of"),  # type: ignore[arg-type]
    ],
)
async def test_an_invalid_answer_of_a_model_is_not_sent(answer: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        await answered(Answering(sampling=callback_that_returns(answer)), SAMPLE, HELLO)


async def test_the_callback_gets_an_error_for_content_that_an_old_revision_lacks() -> None:
    answer = models.CreateMessageResult("assistant", [TextContent("a"), TextContent("b")], "m")
    with pytest.raises(NotInThisRevision, match="several blocks"):
        await answered(Answering(sampling=callback_that_returns(answer)), SAMPLE, HELLO, C)


def sampling_message(role: str, *content: JsonObject) -> JsonObject:
    return {"role": role, "content": list(content)}


TEXT: JsonObject = {"type": "text", "text": "secret"}
USE: JsonObject = {"type": "tool_use", "id": "u1", "name": "add", "input": {}}
RESULT: JsonObject = {"type": "tool_result", "toolUseId": "u1", "content": []}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"messages": 5}, "CreateMessageParams: messages: expected array, got integer"),
        ({"messages": []}, "a sampling request needs at least one message"),
        ({"messages": [{"role": "user"}]}, "CreateMessageParams: messages[0].content: missing"),
        ({"messages": [sampling_message("robot", TEXT)]}, "messages[0].role: expected one of user, assistant"),
        ({"messages": [sampling_message("user")]}, "messages[0] has no content"),
        ({"messages": [sampling_message("user", {"type": "text"})]}, "messages[0].content[0].text: missing"),
        ({"messages": [sampling_message("user", USE)]}, "only an assistant message can use tools"),
        ({"messages": [sampling_message("user", RESULT)]}, "one result for each tool use"),
        ({"messages": [sampling_message("assistant", USE)]}, "the tool uses of the last message have no results"),
        (
            {"messages": [sampling_message("assistant", USE), sampling_message("user", RESULT, TEXT)]},
            "without other content",
        ),
        (
            {"messages": [sampling_message("assistant", USE), sampling_message("user", TEXT)]},
            "one result for each tool use of the message",
        ),
        ({"maxTokens": "10"}, "maxTokens: expected integer, got string"),
        ({"maxTokens": 0}, "max_tokens must be at least 1"),
    ],
)
@req("samp-07", "samp-14", "samp-15", "samp-20", "samp-32")
async def test_the_refusal_of_an_invalid_sampling_request_names_the_member(change: JsonObject, why: str) -> None:
    error = await refused(Answering(sampling=never, sampling_tools=True), SAMPLE, {**HELLO, **change})
    assert error.code == INVALID_PARAMS
    assert why in error.message
    assert error.message.startswith("sampling/createMessage: ")
    assert "secret" not in error.message


@WITH_PAGES
@req("samp-31")
async def test_the_meta_of_tool_uses_and_results_is_kept(revision: Revision) -> None:
    """The callback gets it, and the answer has it, because the server sends it again with the next request."""
    mark: JsonObject = {"com.example/turn": 7}
    messages = [
        sampling_message("assistant", {**USE, "_meta": mark}),
        sampling_message("user", {**RESULT, "_meta": mark}),
    ]
    received: list[SamplingRequest] = []
    answer = models.CreateMessageResult("assistant", ToolUseContent("u2", "add", {}, meta=mark), "m", "toolUse")
    answering = Answering(sampling=callback_that_returns(answer, received), sampling_tools=True)
    result = await answered(answering, SAMPLE, {**HELLO, "messages": messages, "tools": TOOLS}, revision)
    blocks = [block for message in received[0].params.messages for block in message.content]
    assert [block.meta for block in blocks] == [mark, mark]  # type: ignore[union-attr]
    assert result["content"]["_meta"] == mark


@WITH_PAGES
@pytest.mark.parametrize("mode", ["auto", "required", "none", None])
@req("samp-11", "samp-16")
async def test_tools_and_their_choice_reach_the_callback_as_they_were_sent(
    mode: str | None, revision: Revision
) -> None:
    received: list[SamplingRequest] = []
    use = models.CreateMessageResult("assistant", ToolUseContent("u1", "add", {"a": 1}), "m", "toolUse")
    text = models.CreateMessageResult("assistant", TextContent("no"), "m")
    answering = Answering(
        sampling=callback_that_returns(text if mode == "none" else use, received), sampling_tools=True
    )
    choice: JsonObject = {} if mode is None else {"mode": mode}
    params = {**HELLO, "tools": TOOLS, "toolChoice": choice}
    result = await answered(answering, SAMPLE, params, revision)
    assert result["content"]["type"] == ("text" if mode == "none" else "tool_use")
    assert received[0].params.raw == params
    assert received[0].params.tool_choice == models.ToolChoice(mode)  # type: ignore[arg-type]
    assert received[0].params.tools == [models.Tool("add", {"type": "object"})]


@pytest.mark.parametrize(
    ("params", "answer", "stop", "why"),
    [
        ({"tools": TOOLS, "toolChoice": {"mode": "none"}}, ToolUseContent("1", "add", {}), None, "used the tool 'add'"),
        ({"tools": TOOLS, "toolChoice": {"mode": "required"}}, TextContent("x"), None, "used no tool"),
        ({"tools": TOOLS, "toolChoice": {"mode": "required"}}, TextContent("x"), "endTurn", "used no tool"),
        ({"tools": TOOLS, "toolChoice": {"mode": "required"}}, TextContent("x"), "maxTokens", None),
        ({"tools": TOOLS}, ToolUseContent("1", "subtract", {}), None, "used the tool 'subtract'"),
        ({"tools": TOOLS}, TextContent("x"), None, None),
        ({}, ToolUseContent("1", "add", {}), None, "used the tool 'add', which the request does not offer"),
    ],
)
@req("samp-16")
async def test_an_answer_against_the_tool_choice_is_an_error(
    params: JsonObject, answer: Any, stop: str | None, why: str | None
) -> None:
    result = models.CreateMessageResult("assistant", answer, "m", stop)
    answering = Answering(sampling=callback_that_returns(result), sampling_tools=True)
    if why is None:
        assert (await answered(answering, SAMPLE, {**HELLO, **params}))["model"] == "m"
        return
    with pytest.raises(UsageError, match=why):
        await answered(answering, SAMPLE, {**HELLO, **params})


async def test_tools_are_ignored_in_revisions_without_them() -> None:
    received: list[SamplingRequest] = []
    answering = Answering(sampling=callback_that_returns(("Hi", "m"), received))
    await answered(answering, SAMPLE, {**HELLO, "tools": TOOLS, "toolChoice": {"mode": "required"}}, C)
    assert (received[0].params.tools, received[0].params.tool_choice) == (None, None)


@pytest.mark.parametrize(
    ("preferences", "picked"),
    [
        ({"hints": [{"name": "sonnet"}, {"name": "gpt"}]}, "claude-3-sonnet"),
        ({"hints": [{"name": "gpt"}, {"name": "sonnet"}]}, "gpt-9"),
        ({"hints": [{"name": "gemini"}, {"name": "claude"}]}, "claude-3-opus"),
        ({"hints": [{"name": "CLAUDE-3"}]}, "claude-3-opus"),
        ({"hints": [{"name": "gpt"}], "costPriority": 1}, "gpt-9"),
        ({"hints": [{}, {"name": ""}]}, None),
        ({"hints": [{"name": "gemini"}]}, None),
        ({"costPriority": 1}, None),
        (None, None),
    ],
)
@req("samp-27", "samp-28", "samp-29", "samp-08")
async def test_the_first_hint_that_matches_picks_the_model(preferences: JsonObject | None, picked: str | None) -> None:
    received: list[SamplingRequest] = []
    params = HELLO if preferences is None else {**HELLO, "modelPreferences": preferences}
    await answered(Answering(sampling=callback_that_returns(("Hi", "m"), received)), SAMPLE, params)
    assert received[0].pick_model(["claude-3-opus", "claude-3-sonnet", "gpt-9"]) == picked


# Forms.

SIZES: JsonObject = {
    "message": "Your order?",
    "requestedSchema": {
        "type": "object",
        "properties": {
            "size": {"type": "string", "enum": ["S", "M"], "default": "M"},
            "count": {"type": "integer", "minimum": 1, "default": 0},  # does not fit
            "gift": {"type": "boolean", "default": False},
            "note": {"type": "string", "maxLength": 5, "default": None},
        },
        "required": ["size"],
    },
}
GIVEN: JsonObject = {"size": "M", "gift": False}


@WITH_FORMS
@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ({}, {"action": "accept", "content": GIVEN}),
        ({"size": "S", "count": 2}, {"action": "accept", "content": {"size": "S", "gift": False, "count": 2}}),
        ({"gift": None, "note": None}, {"action": "accept", "content": {"size": "M"}}),
        (Accepted({"gift": True}), {"action": "accept", "content": {"size": "M", "gift": True}}),
        (Declined(), {"action": "decline"}),
        (Dismissed(), {"action": "cancel"}),
        (None, {"action": "cancel"}),
    ],
)
@req("elic-51", "elic-52", "elic-04", "elic-17", "elic-07")
async def test_a_form_is_accepted_with_its_defaults_or_declined_or_dismissed(
    answer: object, result: JsonObject, revision: Revision
) -> None:
    assert await answered(Answering(elicitation=callback_that_returns(answer)), ELICIT, SIZES, revision) == result


@WITH_FORMS
@req("elic-04", "elic-10", "elic-15", "elic-17", "elic-03")
async def test_a_callback_gets_the_server_the_fields_and_the_message(revision: Revision) -> None:
    received: list[FormElicitationRequest] = []
    await answered(Answering(elicitation=callback_that_returns(None, received)), ELICIT, SIZES, revision)
    (form,) = received
    assert form.server is not None
    assert (form.server.name, form.server.display_name) == ("weather", "The Weather")
    assert form.message == "Your order?"
    assert form.defaults == GIVEN
    assert form.fields["size"].choices == [("S", "S"), ("M", "M")]  # type: ignore[union-attr]
    assert form.params.requested_schema.required == ["size"]


@WITH_FORMS
async def test_a_client_answers_the_forms_of_a_server(revision: Revision) -> None:
    question = Elicit("How many?", int)
    answering = Answering(elicitation=callback_that_returns({"value": 3}))
    assert question.read(await answered(answering, ELICIT, question.params(revision), revision)) == Accepted(3)


@pytest.mark.parametrize("identity", [None, {"name": 5}])
async def test_a_server_without_a_name_may_ask(identity: Mapping[str, Any] | None) -> None:
    received: list[FormElicitationRequest] = []
    answering = Answering(elicitation=callback_that_returns(None, received))
    await answering.answer(ELICIT, FORM, Terms(D, identity=identity))
    assert received[0].server is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"size": "secret"}, r'content/size must be one of \["S", "M"\]'),
        ({"count": 0}, "content/count must be at least 1"),
        ({"count": "secret"}, "content/count"),
        ({"note": "secret secret"}, "content/note"),
        ({"size": None}, 'content lacks the member "size"'),
        ({"sice": "S"}, r"the form has no field 'sice'; its fields are \('size', 'count', 'gift', 'note'\)"),
        ({"note": object()}, "the form field 'note' must be .*, got object"),
        ({"note": {"a": "secret"}}, "got dict"),
        ({"note": ["a", 1]}, "got list"),
        ({"count": float("nan")}, "the form field 'count' must be .*, got float"),
        (
            True,
            "return the values by field, an object with those fields, Accepted, Declined, Dismissed or None, got bool",
        ),
        (Accepted("secret"), "got str"),
        (Accepted(None), "got NoneType"),
    ],
)
@req("elic-44", "elic-08")
async def test_values_that_do_not_fit_the_form_are_an_error_and_are_not_sent(answer: object, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        await answered(Answering(elicitation=callback_that_returns(answer)), ELICIT, SIZES)
    assert "secret" not in str(caught.value)


SEVERAL: JsonObject = {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}


@pytest.mark.parametrize("answer", [["a", "b"], ("a", "b")])
async def test_several_choices_are_sent_as_a_list(answer: object) -> None:
    params = {"message": "?", "requestedSchema": {"type": "object", "properties": {"each": SEVERAL}}}
    answering = Answering(elicitation=callback_that_returns({"each": answer}))
    assert await answered(answering, ELICIT, params) == {"action": "accept", "content": {"each": ["a", "b"]}}
    with pytest.raises(NotInThisRevision, match="several values"):
        await answered(answering, ELICIT, params, C)


async def test_a_field_with_a_schema_outside_the_form_rules_can_be_answered() -> None:
    # The schema that pydantic makes of `str | None = None`.  Some servers send it.
    field = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    params = {"message": "?", "requestedSchema": {"type": "object", "properties": {"nick": field}}}
    received: list[FormElicitationRequest] = []
    answering = Answering(elicitation=callback_that_returns({"nick": "Al"}, received))
    assert (await answered(answering, ELICIT, params))["content"] == {"nick": "Al"}
    assert isinstance(received[0].fields["nick"], MalformedContent)
    assert received[0].fields["nick"].raw == field


async def test_a_default_of_an_impossible_type_is_ignored() -> None:
    fields = {"a": {"type": "object", "default": {}}, "b": {"type": "array", "default": [1]}}
    params = {"message": "?", "requestedSchema": {"type": "object", "properties": fields}}
    received: list[FormElicitationRequest] = []
    answering = Answering(elicitation=callback_that_returns({}, received))
    assert await answered(answering, ELICIT, params) == {"action": "accept", "content": {}}
    assert received[0].defaults == {}


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({}, "message: missing"),
        ({"message": "?"}, "requestedSchema: missing"),
        ({**FORM, "message": 5}, "message: expected string, got integer"),
        ({**FORM, "mode": "magic"}, "mode: expected one of form"),
        ({"message": "?", "requestedSchema": {"type": "array"}}, 'requestedSchema.type: expected "object"'),
        ({"message": "?", "requestedSchema": {"type": "object"}}, "requestedSchema.properties: missing"),
        (
            {"message": "?", "requestedSchema": {"type": "object", "properties": {"a": {"type": 5}}}},
            "requestedSchema: ",
        ),
        (
            {"message": "?", "requestedSchema": {"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}},
            "requestedSchema: ",
        ),
    ],
)
async def test_the_refusal_of_an_invalid_form_names_the_member(params: JsonObject, why: str) -> None:
    error = await refused(Answering(elicitation=never, elicitation_url=never), ELICIT, params)
    assert error.code == INVALID_PARAMS
    assert error.message.startswith("elicitation/create: ")
    assert why in error.message


# Pages.


@WITH_PAGES
@pytest.mark.parametrize(
    ("answer", "action"),
    [
        (True, "accept"),
        (Accepted(None), "accept"),
        (Accepted({"a": "secret"}), "accept"),
        (False, "decline"),
        (Declined(), "decline"),
        (Dismissed(), "cancel"),
        (None, "cancel"),
    ],
)
@req("elic-51")
async def test_the_answer_to_a_page_is_an_action_without_content(
    answer: object, action: str, revision: Revision
) -> None:
    answering = Answering(elicitation_url=callback_that_returns(answer))
    params = ElicitUrl("Log in", "https://example.com/in").params(revision)
    assert await answered(answering, ELICIT, params, revision) == {"action": action}


@pytest.mark.parametrize("answer", ["yes", 1, {"a": 1}])
async def test_an_invalid_answer_about_consent_is_an_error(answer: object) -> None:
    with pytest.raises(UsageError, match=f"Dismissed or None, got {type(answer).__name__}"):
        await answered(Answering(elicitation_url=callback_that_returns(answer)), ELICIT, PAGE)


@pytest.mark.parametrize(
    ("url", "host", "warnings"),
    [
        ("https://example.com/a?b=%20c#d", "example.com", []),
        ("HTTPS://EXAMPLE.com:8443/", "example.com", []),
        ("http://127.0.0.1:8000/x", "127.0.0.1", []),
        ("http://[::1]:8000/x", "::1", []),
        ("http://example.com/", "example.com", ["not encrypted"]),
        ("https://xn--pple-43d.com/", "xn--pple-43d.com", ["Punycode"]),
        ("https://www.XN--pple-43d.com/", "www.xn--pple-43d.com", ["Punycode"]),
        ("https://bank.example@evil.example/", "evil.example", ["before the @"]),
        ("http://bank.example:1@xn--pple-43d.com/", "xn--pple-43d.com", ["Punycode", "before the @", "not encrypted"]),
    ],
)
@req("elic-04", "elic-39", "elic-41")
async def test_a_page_request_has_the_whole_url_its_host_and_warnings(url: str, host: str, warnings: list[str]) -> None:
    received: list[UrlElicitationRequest] = []
    await answered(Answering(elicitation_url=callback_that_returns(False, received)), ELICIT, {**PAGE, "url": url})
    (page,) = received
    assert (page.url, page.host, page.message) == (url, host, "Log in")
    assert len(page.warnings) == len(warnings)
    assert all(part in warning for part, warning in zip(warnings, page.warnings, strict=True))
    assert page.server is not None
    assert page.server.name == "weather"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/in",
        "example.com",
        "https:///in",
        "https:example.com",
        "javascript:alert(1)",
        "javascript://example.com/%0aalert(1)",
        "ftp://example.com/",
        "file:///etc/passwd",
        "data:text/html,x",
        "https://ex ample.com/",
        "https://good.example\\@evil.example/",
        "https://good.example\t.evil.example/",
        "https://ap\u0440le.com/",
        "https://good%2eexample/",
        "https://example.com:x/",
        "https://example.com:0/",
        "https://[::1/",
        "https://example.com/%zz",
    ],
)
async def test_an_ambiguous_url_is_refused_without_a_callback(url: str) -> None:
    error = await refused(Answering(elicitation_url=never), ELICIT, {**PAGE, "url": url})
    assert error.code == INVALID_PARAMS
    assert error.message == (
        "elicitation/create: url: expected an absolute http or https URL, percent-encoded, its host in ASCII"
    )


@pytest.mark.parametrize(
    ("change", "why"), [({"url": 5}, "url: expected string"), ({"elicitationId": None}, "elicitationId: missing")]
)
async def test_an_invalid_page_is_refused(change: JsonObject, why: str) -> None:
    error = await refused(Answering(elicitation_url=never), ELICIT, {**PAGE, **change})
    assert error.code == INVALID_PARAMS
    assert why in error.message


_audited: list[str] | None = None


def _audit(event: str, _: object) -> None:
    if _audited is not None and event.startswith(("socket.", "subprocess.", "os.", "webbrowser.", "urllib.", "open")):
        _audited.append(event)


sys.addaudithook(_audit)  # cannot be removed, so it does nothing outside the test that uses it


@WITH_PAGES
@req("elic-38", "elic-39", "elic-40")
async def test_nothing_is_fetched_or_opened_for_a_page(revision: Revision) -> None:
    global _audited
    answering = Answering(elicitation_url=callback_that_returns(True))
    await answered(answering, ELICIT, PAGE, revision)  # the first call may import modules
    seen: list[str] = []
    _audited = seen
    try:
        await answered(answering, ELICIT, {**PAGE, "url": "https://localhost/in"}, revision)
        assert seen == []
        with pytest.raises(FileNotFoundError):
            os.listdir("/nonexistent")
    finally:
        _audited = None
    assert seen == ["os.listdir"]  # the hook works


@pytest.mark.parametrize("id", ["1", "", "550e8400-e29b", "../\x00\n{}", "é" * 500])
@req("elic-23", "elic-55")
async def test_a_page_is_completed_once_and_by_its_own_id(id: str) -> None:
    received: list[UrlElicitationRequest] = []
    answering = Answering(elicitation_url=callback_that_returns(True, received))
    await answered(answering, ELICIT, {**PAGE, "elicitationId": id})
    for params in ({}, {"elicitationId": None}, {"elicitationId": [id]}, {"elicitationId": id + " "}):
        assert answering.finished(params) is None
    assert answering.finished({"elicitationId": id}) is received[0]
    assert answering.finished({"elicitationId": id}) is None


async def test_a_page_may_be_completed_before_its_callback_has_returned() -> None:
    finished: list[object] = []

    def visit(page: UrlElicitationRequest) -> bool:
        finished.append(answering.finished({"elicitationId": "1"}))
        return page is finished[0]

    answering = Answering(elicitation_url=visit)
    assert await answered(answering, ELICIT, PAGE) == {"action": "accept"}
    assert answering.finished({"elicitationId": "1"}) is None


@pytest.mark.parametrize("answer", [False, None, "yes"])
@req("elic-23")
async def test_a_page_without_consent_is_not_remembered(answer: object) -> None:
    answering = Answering(elicitation_url=callback_that_returns(answer))
    try:
        await answered(answering, ELICIT, PAGE)
    except UsageError:
        assert answer == "yes"
    assert answering.finished({"elicitationId": "1"}) is None


async def test_a_repeated_id_belongs_to_the_later_page() -> None:
    answers = iter([True, True, False])
    received: list[UrlElicitationRequest] = []

    def visit(page: UrlElicitationRequest) -> bool:
        received.append(page)
        return next(answers)

    answering = Answering(elicitation_url=visit)
    for _ in range(2):
        await answered(answering, ELICIT, PAGE)
    assert answering.finished({"elicitationId": "1"}) is received[1]
    await answered(answering, ELICIT, PAGE)
    assert answering.finished({"elicitationId": "1"}) is None


async def test_declining_a_page_keeps_a_later_page_with_the_same_id() -> None:
    later: list[UrlElicitationRequest] = []

    async def visit(page: UrlElicitationRequest) -> bool:
        if later:
            return True
        later.append(page)
        await answered(answering, ELICIT, PAGE)
        return False

    answering = Answering(elicitation_url=visit)
    assert await answered(answering, ELICIT, PAGE) == {"action": "decline"}
    assert answering.finished({"elicitationId": "1"}) not in (None, later[0])


async def test_the_number_of_remembered_pages_has_a_limit() -> None:
    answering = Answering(elicitation_url=callback_that_returns(True))
    for number in range(150):
        await answered(answering, ELICIT, {**PAGE, "elicitationId": str(number)})
    known = [number for number in range(150) if answering.finished({"elicitationId": str(number)})]
    assert known == list(range(50, 150))


async def test_the_mode_is_ignored_in_revisions_without_pages() -> None:
    error = await refused(Answering(elicitation=never, elicitation_url=never), ELICIT, PAGE, C)
    assert (error.code, "requestedSchema: missing" in error.message) == (INVALID_PARAMS, True)


async def test_pages_have_no_ids_in_the_modern_era() -> None:
    answering = Answering(elicitation_url=callback_that_returns(True))
    await answered(answering, ELICIT, PAGE, E)
    assert answering.finished({"elicitationId": "1"}) is None


def test_the_repr_of_a_request_does_not_show_its_params() -> None:
    for kind in (SamplingRequest, FormElicitationRequest, UrlElicitationRequest):
        assert "params" not in repr(kind(*["secret"] * len(inspect.signature(kind).parameters)))  # type: ignore[arg-type]


# Roots.


@EVERY
@req("root-04", "root-07")
async def test_roots_are_exposed_as_file_uris(revision: Revision, tmp_path: Path) -> None:
    given: list[RootLike] = [
        str(tmp_path / "a b"),
        tmp_path / "é",
        PurePath("/"),
        "file:///etc/hosts",
        models.Root("file:///srv/x%20y", "X"),
    ]
    result = await answered(Answering(roots=given), ROOTS, {}, revision)
    assert result == {
        "roots": [
            {"uri": f"file://{tmp_path}/a%20b"},
            {"uri": f"file://{tmp_path}/%C3%A9"},
            {"uri": "file:///"},
            {"uri": "file:///etc/hosts"},
            {"uri": "file:///srv/x%20y", "name": "X"},
        ]
    }
    assert ListRoots().read(result)[1].uri == (tmp_path / "é").as_uri()


BAD_ROOTS = pytest.mark.parametrize(
    ("root", "why"),
    [
        ("src", "roots[1] must be an absolute path"),
        ("", "roots[1] must be an absolute path"),
        (Path("src"), "roots[1] must be an absolute path"),
        ("https://example.com/?token=secret", "roots[1] must be an absolute path"),
        ("file:/etc", "roots[1]: the URI must begin with file://"),
        (models.Root("https://example.com/secret"), "roots[1]: the URI must begin with file://"),
        (models.Root("FILE:///etc"), "roots[1]: the URI must begin with file://"),
        ("file://other-host/etc", "roots[1]: Not the URI of a file on this machine"),
        ("file:///a?b", "roots[1]: Not the URI of a file on this machine"),
        ("/srv/../etc", "roots[1]: The path must not contain '..'; use Path(...).resolve()"),
        (Path("/srv/../etc"), "roots[1]: The path must not contain '..'"),
        ("file:///srv/../etc", "roots[1]: The path must not contain '..'"),
        ("file:///srv/%2e%2e/etc", "roots[1]: The path must not contain '..'"),
        (models.Root("file:///srv/%252e%252e/etc"), "roots[1]: The path must not contain '..'"),
        ("/a\0b", "roots[1]: Not a path"),
        (5, "roots[1] must be a path, a file: URI or a Root, got int"),
        (b"/etc", "roots[1] must be a path, a file: URI or a Root, got bytes"),
    ],
)


@BAD_ROOTS
@req("root-04", "root-06")
async def test_an_invalid_root_is_refused_when_it_is_set(root: Any, why: str) -> None:
    for setting in (lambda roots: Answering(roots=roots), Answering(roots=[]).set_roots):
        with pytest.raises(UsageError) as caught:
            setting(["/", root])
        assert why in str(caught.value)
        assert "secret" not in str(caught.value)


@BAD_ROOTS
@req("root-06")
async def test_an_invalid_root_of_a_callback_is_not_exposed(root: Any, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        await answered(Answering(roots=callback_that_returns(["/", root])), ROOTS, {})
    assert why in str(caught.value)


async def test_a_callback_that_returns_no_list_of_roots_is_an_error() -> None:
    with pytest.raises(UsageError, match="roots must be a sequence"):
        await answered(Answering(roots=callback_that_returns(None)), ROOTS, {})


@req("root-07", "root-10")
async def test_a_roots_callback_is_called_for_each_request() -> None:
    permitted: list[str] = ["/a"]

    async def ask() -> list[str]:
        await trio.lowlevel.checkpoint()
        return permitted

    answering = Answering(roots=ask)
    assert await answered(answering, ROOTS, {}) == {"roots": [{"uri": "file:///a"}]}
    permitted.clear()
    assert await answered(answering, ROOTS, {}) == {"roots": []}


async def test_a_list_of_roots_is_copied() -> None:
    roots = ["/a"]
    answering = Answering(roots=roots)
    roots.append("/b")
    assert await answered(answering, ROOTS, {}) == {"roots": [{"uri": "file:///a"}]}


async def test_changed_roots_are_exposed_and_reported_as_changed() -> None:
    answering = Answering(roots=["/a"])
    assert not answering.set_roots([Path("/a")])
    assert answering.set_roots(["/b"])
    assert await answered(answering, ROOTS, {}) == {"roots": [{"uri": "file:///b"}]}
    ask = callback_that_returns(["/b"])
    assert answering.set_roots(ask)
    assert answering.set_roots(ask)  # the callback may return other roots now
    assert answering.set_roots(["/b"])
    with pytest.raises(UsageError):
        answering.set_roots(["b"])
    assert await answered(answering, ROOTS, {}) == {"roots": [{"uri": "file:///b"}]}


def test_roots_that_were_not_offered_cannot_be_set() -> None:
    with pytest.raises(UsageError, match=re.escape("did not declare roots; open it with the option roots=[]")):
        Answering().set_roots(["/a"])


@pytest.mark.parametrize(("method", "params", "offer"), [
    (SAMPLE, HELLO, "sampling"), (ELICIT, FORM, "elicitation"), (ELICIT, PAGE, "elicitation_url"), (ROOTS, {}, "roots"),
])  # fmt: skip
@pytest.mark.parametrize("error", [ValueError("x"), RequestError(-5, "x"), RemoteProtocolError("of another server")])
async def test_an_exception_of_a_callback_is_raised_unchanged(
    method: str, params: JsonObject, offer: str, error: Exception
) -> None:
    def fail(*_: object) -> Any:
        raise error

    offers: dict[str, Any] = {offer: fail}
    with pytest.raises(type(error)) as caught:
        await answered(Answering(**offers), method, params)
    assert caught.value is error
    assert error.__cause__ is None


# Several at once.

ROUND = [
    Question("name", ELICIT, FORM),
    Question("poem", SAMPLE, HELLO),
    Question("where", ROOTS),
    Question("in", ELICIT, PAGE),
]


def answering_all(**callbacks: Any) -> Answering:
    offers: dict[str, Any] = {
        "sampling": callback_that_returns(("Hi", "m")),
        "elicitation": callback_that_returns({"name": "Al"}),
        "elicitation_url": callback_that_returns(True),
        "roots": ["/a"],
    }
    return Answering(**offers | callbacks)


def rounds_of_call(answering: Answering) -> Rounds:
    """One call that the server has answered by the questions of `ROUND`."""
    rounds = Rounds(E, "tools/call", {"name": "t"}, answering.capabilities)
    requests = {each.key: {"method": each.method, "params": each.params} for each in ROUND}
    asked = rounds.receive({"resultType": "input_required", "inputRequests": requests})
    assert asked is not None
    assert list(asked) == ROUND
    return rounds


ANSWERS: JsonObject = {
    "name": {"action": "accept", "content": {"name": "Al"}},
    "poem": {"role": "assistant", "content": {"type": "text", "text": "Hi"}, "model": "m"},
    "where": {"roots": [{"uri": "file:///a"}]},
    "in": {"action": "accept"},
}


async def test_a_round_is_answered_by_the_keys_of_its_questions() -> None:
    answering = answering_all()
    rounds = rounds_of_call(answering)
    answers = await answering.answer_all(ROUND, terms(E), rounds.abandon)
    assert answers == ANSWERS
    assert rounds.retry(answers)["inputResponses"] == ANSWERS


async def test_a_round_without_questions_has_no_answers() -> None:
    assert await answering_all().answer_all([], terms(E), never) == {}


async def test_the_questions_of_a_round_are_answered_concurrently(autojump_clock: object) -> None:
    async def slowly(_: object) -> Any:
        await trio.sleep(10)

    start = trio.current_time()
    answering = answering_all(elicitation=slowly, elicitation_url=slowly)
    await answering.answer_all(ROUND, terms(E), never)
    assert trio.current_time() == start + 10


@pytest.mark.parametrize("error", [ValueError("x"), RequestError(-1, "no"), ExceptionGroup("x", [ValueError("y")])])
async def test_the_first_failing_question_ends_its_round_and_is_named(error: Exception, autojump_clock: object) -> None:
    ended: list[str] = []

    async def fail(_: object) -> Any:
        await trio.sleep(1)
        raise error

    async def wait(page: UrlElicitationRequest) -> Any:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(page.message)

    answering = answering_all(sampling=fail, elicitation_url=wait)
    rounds = rounds_of_call(answering)
    with pytest.raises(InputUnavailable) as caught:
        await answering.answer_all(ROUND, terms(E), rounds.abandon)
    assert caught.value.__cause__ is error
    assert caught.value.key == "poem"
    assert ended == ["Log in"]
    with pytest.raises(UsageError, match="is over"):
        rounds.retry(ANSWERS)


def divide_by_zero(*_: object) -> Any:
    return 1 / 0


FAILED = "the callback for {} has failed: "


@pytest.mark.parametrize(
    ("callbacks", "why"),
    [
        ({"sampling": divide_by_zero}, FAILED.format(SAMPLE) + "ZeroDivisionError('division by zero')"),
        ({"roots": divide_by_zero}, FAILED.format(ROOTS) + "ZeroDivisionError('division by zero')"),
        ({"elicitation": lambda context, params: {}}, FAILED.format(ELICIT) + "TypeError(\"<lambda>() missing 1 "),
        ({"sampling": callback_that_returns(Declined())}, "the user rejected the sampling request"),
        ({"sampling": callback_that_returns("Hi")},
         "the sampling callback must return a CreateMessageResult, (text, model) or Declined"),
        ({"elicitation": callback_that_returns(Declined)},
         "the elicitation callback must return the values by field, an object with those fields, Accepted, Declined, "
         "Dismissed or None, got the class Declined"),
        ({"elicitation": callback_that_returns({"name": ["x"]})},
         "the values of the elicitation callback do not fit the form: content/name must be of type string"),
        ({"roots": lambda: ["rel"]},
         "roots[0] must be an absolute path, such as Path(...).resolve(), or a file:// URI"),
    ],
)  # fmt: skip
async def test_the_error_of_a_failed_round_has_the_reason(callbacks: dict[str, Any], why: str) -> None:
    answering = answering_all(**callbacks)
    with pytest.raises(InputUnavailable) as caught:
        await answering.answer_all(ROUND, terms(E), rounds_of_call(answering).abandon)
    assert str(caught.value).startswith(f"tools/call was not completed: {why}")


async def test_a_long_message_of_a_callback_exception_is_shortened() -> None:
    def fail(*_: object) -> Any:
        raise ValueError("x" * 1_000_000)

    answering = answering_all(sampling=fail)
    with pytest.raises(InputUnavailable) as caught:
        await answering.answer_all(ROUND, terms(E), rounds_of_call(answering).abandon)
    assert len(str(caught.value)) < 350


@dataclasses.dataclass
class Named:
    name: str
    nick: str | None = None


@attrs.frozen
class Called:
    name: str


@pytest.mark.parametrize("values", [Named("Al"), Called("Al"), MappingProxyType({"name": "Al"})], ids=repr)
async def test_a_form_is_filled_in_by_an_object_with_its_fields(values: Any) -> None:
    form = {
        **FORM,
        "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}, "nick": {"type": "string"}}},
    }
    for said in (values, Accepted(values)):
        answer = await answered(Answering(elicitation=callback_that_returns(said)), ELICIT, form)
        assert answer == {"action": "accept", "content": {"name": "Al"}}


async def test_an_exception_during_the_cancellation_of_a_round_is_only_logged(
    caplog: pytest.LogCaptureFixture, autojump_clock: object
) -> None:
    async def fail(_: object) -> Any:
        await trio.sleep(1)
        raise ValueError("first")

    async def fail_later(_: object) -> Any:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("later")

    answering = answering_all(sampling=fail, elicitation=fail_later)
    with caplog.at_level(logging.ERROR), pytest.raises(InputUnavailable) as caught:
        await answering.answer_all(ROUND, terms(E), rounds_of_call(answering).abandon)
    assert str(caught.value.__cause__) == "first"
    (record,) = caplog.records
    assert record.getMessage() == "the callback for elicitation/create has failed while it was cancelled"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "later"


@pytest.mark.parametrize(("count", "fits"), [(100, True), (101, False)])
async def test_the_number_of_questions_in_a_round_has_a_limit(count: int, fits: bool) -> None:
    questions = [Question(str(number), ROOTS) for number in range(count)]
    if fits:
        assert len(await answering_all().answer_all(questions, terms(E), never)) == count
        return
    with pytest.raises(RemoteProtocolError, match="101 questions at once; the limit is 100"):
        await answering_all(roots=never).answer_all(questions, terms(E), never)


def test_a_round_can_be_cancelled_at_any_step() -> None:
    async def step_by_step(said: object) -> Any:
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        return said

    def steps(said: object) -> Callable[..., Awaitable[Any]]:
        return lambda *_: step_by_step(said)

    async def scenario(attempt: Attempt) -> None:
        answering = answering_all(
            sampling=steps(("Hi", "m")), elicitation=steps({"name": "Al"}), elicitation_url=steps(True)
        )
        answers = None
        questions = [each for each in ROUND if each.key != "in"]
        with attempt.window() as scope:
            answers = await answering.answer_all(questions, terms(E), never)
            page = await answering.answer(ELICIT, PAGE, terms(D))
            assert page == {"action": "accept"}
        assert scope.cancelled_caught or answers == {key: each for key, each in ANSWERS.items() if key != "in"}
        # The page is remembered exactly if the user consented.
        assert (answering.finished({"elicitationId": "1"}) is None) is scope.cancelled_caught

    for watch in ("the server asks", "the scenario"):
        assert cancel_at_each_step(scenario, watch=watch) > 3


@pytest.mark.parametrize("revision", LEGACY, ids=str)
@req("elic-04")
def test_legacy_questions_are_answered_as_separate_calls(revision: Revision) -> None:
    """`Answering.answer` takes the calls of a session, and the session takes its results."""
    received: list[Any] = []
    answering = answering_all(
        sampling=callback_that_returns(("Hi", "m"), received),
        elicitation=callback_that_returns({"name": "Al"}, received),
    )
    pair = opened(revision, answering.capabilities)
    questions: list[Inquiry[Any]] = [ListRoots(), Sample("Hello", max_tokens=10)]
    if revision in (C, D):
        questions.append(Elicit("Who?", {"type": "object", "properties": {"name": {"type": "string"}}}))
    for question in questions:
        id = pair.server.request(question.method, question.params(revision))
        pair.pump()
        (call,) = [event for event in pair.client_saw if isinstance(event, Call)]
        assert call.request.id == id
        result = trio.run(answering.answer, call.request.method, call.request.params, call.terms)
        assert pair.client.answer(id, result)
        pair.pump()
        assert question.read(result) is not None
        pair.forget()
    assert [asked.server.name for asked in received] == ["server"] * (len(questions) - 1)


@req("elic-04")
async def test_a_callback_gets_the_name_of_a_modern_server() -> None:
    received: list[FormElicitationRequest] = []
    answering = Answering(elicitation=callback_that_returns(None, received))
    pair = opened(E, answering.capabilities)
    assert pair.client.terms is not None
    await answering.answer(ELICIT, FORM, pair.client.terms)
    assert received[0].server is not None
    assert received[0].server.name == "server"
