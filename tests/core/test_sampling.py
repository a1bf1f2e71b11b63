"""The order of tool uses and results in the messages of a sampling request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import (
    SamplingMessage,
    TextContent,
    Tool,
    ToolResultContent,
    ToolUseContent,
    UsageError,
    check_sampling,
)

TEXT = TextContent("text")
OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ADD = Tool("add", {"type": "object"}, OBJECT)
UNTYPED = Tool("untyped", {"type": "object"})


def user(*blocks: Any) -> SamplingMessage:
    return SamplingMessage("user", blocks)


def assistant(*blocks: Any) -> SamplingMessage:
    return SamplingMessage("assistant", blocks)


def use(id: str, name: str = "add") -> ToolUseContent:
    return ToolUseContent(id, name, {})


def result(id: str, **more: Any) -> ToolResultContent:
    return ToolResultContent(id, [TEXT], **more)


@pytest.mark.parametrize(
    "messages",
    [
        [user(TEXT)],
        [SamplingMessage("user", TEXT)],  # one block without a list
        [SamplingMessage("assistant", use("1")), SamplingMessage("user", result("1"))],
        [user(TEXT, TEXT), user(TEXT), assistant(TEXT)],
        [assistant(TEXT, use("1"), use("2")), user(result("2"), result("1")), assistant(TEXT)],
        [assistant(use("1")), user(result("1")), assistant(use("1")), user(result("1"))],  # an id may return
    ],
)
def test_messages_with_a_result_for_each_tool_use_are_accepted(messages: Sequence[SamplingMessage]) -> None:
    check_sampling(messages)


BALANCE = "the message must have one result for each tool use of the message before it"
ALONE = "tool results must be in a user message without other content"
NOT_A_USER = "only an assistant message can use tools"
LAST = "the tool uses of the last message have no results"

# The messages, and the whole error.
FAULTS: dict[str, tuple[list[SamplingMessage], str]] = {
    "no message": ([], "a sampling request needs at least one message"),
    "an empty message": ([user(TEXT), user()], "messages[1] has no content"),
    "a result next to text": ([assistant(use("1")), user(result("1"), TEXT)], f"messages[1]: {ALONE}"),
    "a result of the assistant": ([assistant(use("1")), assistant(result("1"))], f"messages[1]: {ALONE}"),
    "a tool use of the user": ([user(use("1")), user(result("1"))], f"messages[0]: {NOT_A_USER}"),
    "one result too few": ([assistant(use("1"), use("2")), user(result("1"))], f"messages[1]: {BALANCE}"),
    "one result too many": ([assistant(use("1")), user(result("1"), result("1"))], f"messages[1]: {BALANCE}"),
    "a result of another id": ([assistant(use("1")), user(result("2"))], f"messages[1]: {BALANCE}"),
    "a result without a use": ([user(TEXT), user(result("1"))], f"messages[1]: {BALANCE}"),
    "a result one message late": ([assistant(use("1")), user(TEXT), user(result("1"))], f"messages[1]: {BALANCE}"),
    "the same result again": ([assistant(use("1")), user(result("1")), user(result("1"))], f"messages[2]: {BALANCE}"),
    "no result": ([assistant(use("1")), assistant(TEXT)], f"messages[1]: {BALANCE}"),
    "a use at the end": ([user(TEXT), assistant(use("1"))], LAST),
}


@req("samp-14", "samp-15", "samp-18", "samp-20", "samp-32")
@pytest.mark.parametrize("fault", FAULTS)
def test_other_messages_are_refused_with_their_place(fault: str) -> None:
    messages, error = FAULTS[fault]
    with pytest.raises(UsageError) as caught:
        check_sampling(messages)
    assert str(caught.value) == error


@req("samp-18", "samp-32")
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.permutations(range(3)), st.data())
def test_any_number_of_tool_uses_needs_as_many_results(uses: list[int], order: list[int], data: st.DataObject) -> None:
    messages = []
    for count in uses:
        messages.append(assistant(TEXT, *(use(str(each)) for each in range(count))))
        messages.append(user(*(result(str(each)) for each in order if each < count)) if count else user(TEXT))
    check_sampling(messages)
    places = [2 * turn + 1 for turn, count in enumerate(uses) if count]
    if places:
        place = data.draw(st.sampled_from(places))
        results = messages[place].blocks
        messages[place] = user(*data.draw(st.sampled_from([results[1:] or [TEXT], [*results, results[0]]])))
        with pytest.raises(UsageError, match=rf"^messages\[{place}\]: {BALANCE}$"):
            check_sampling(messages)


@req("samp-33")
def test_a_structured_result_that_does_not_fit_its_tool_is_refused_without_its_value() -> None:
    messages = [assistant(use("1", "untyped"), use("2")), user(result("1"), result("2", structured_content={"n": "x"}))]
    with pytest.raises(UsageError) as caught:
        check_sampling(messages, [UNTYPED, ADD])
    assert str(caught.value).startswith(
        "messages[1]: structuredContent/n does not fit the output schema of 'add': it must be"
    )
    assert "'x'" not in str(caught.value)


@req("samp-33")
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("add", {"structured_content": {"n": 1}}),
        ("add", {}),  # no structured content
        ("add", {"structured_content": {"n": "x"}, "is_error": True}),  # an error has another form
        ("untyped", {"structured_content": {"n": "x"}}),  # the tool has no output schema
        ("unknown", {"structured_content": {"n": "x"}}),  # a tool of an earlier request
    ],
)
def test_other_results_are_accepted(name: str, more: dict[str, Any]) -> None:
    check_sampling([assistant(use("1", name)), user(result("1", **more))], [UNTYPED, ADD])
