"""Reading the messages of a peer and writing our own, in each revision."""

from __future__ import annotations

import enum
import functools
import subprocess
import sys
import types
from typing import Any, get_args

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.model_strategies import JSON, MODELS, Fixed, build, exists, instances
from tests.requirements import req
from trio_mcp.core import (
    ABSENT,
    MAX_MALFORMED,
    REQUESTS,
    REVISIONS,
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    CreateMessageResult,
    ImageContent,
    ListToolsResult,
    MalformedContent,
    Model,
    NotInThisRevision,
    RemoteProtocolError,
    Revision,
    Role,
    SamplingMessage,
    TextContent,
    Tool,
    UnknownContent,
    UsageError,
    codec,
    content,
    forms,
    from_json,
    messages,
    models,
    to_json,
)

V2024_11, V2025_03, V2025_06, V2025_11, V2026_07 = REVISIONS.values()
EVERY = pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
TEXT = {"type": "text", "text": "hi"}
TOOL = {"name": "add", "inputSchema": {"type": "object"}}
SCHEMA = {"type": "object"}


def classes(shape: Any) -> tuple[type[Model], ...]:
    return get_args(shape) or (shape,)


def read_or_error(cls: type[Model], data: Any) -> Model | str:
    try:
        return from_json(cls, data)
    except RemoteProtocolError as error:
        return str(error)


# Both sides


@EVERY
def test_a_written_value_is_read_as_the_same_value(revision: Revision, examples: Any) -> None:
    @examples(100)
    @given(instances(revision))
    def check(value: Model) -> None:
        written = to_json(value, revision)
        assert messages.decode(messages.encode(messages.Response(1, written)), messages.Limits()) == messages.Response(
            1, written
        )
        for strict in (False, True):
            read = from_json(type(value), written, strict=strict)
            assert read == value
            assert read.raw is written
            assert to_json(read, revision) == written

    check()


@given(st.sampled_from(MODELS), JSON)
@settings(max_examples=200, deadline=None)
def test_any_json_is_read_or_is_a_protocol_error(cls: type[Model], data: Any) -> None:
    read = read_or_error(cls, data)
    assert read.startswith(f"{cls.__name__}: ") if isinstance(read, str) else type(read) is cls


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_an_object_with_one_changed_member_is_read_or_is_a_protocol_error(data: Any) -> None:
    cls = data.draw(st.sampled_from([cls for cls in MODELS if exists(cls, V2026_07)]))
    written = to_json(build(cls, V2026_07, Fixed(full=True)), V2026_07)
    if not written:
        return
    key = data.draw(st.sampled_from(sorted(written)))
    spoilt = {**written, key: data.draw(JSON)}
    read = read_or_error(cls, spoilt)
    assert (
        f"{cls.__name__}: {key}" in read if isinstance(read, str) else to_json(read, V2026_07).keys() <= written.keys()
    )


# Reading: scalars


@pytest.mark.parametrize(
    ("cls", "data", "why"),
    [
        (TextContent, {"type": "text", "text": 1}, "text: expected string, got integer"),
        (TextContent, {"type": "text", "text": None}, "text: expected string, got null"),
        (TextContent, {"type": "text", "text": True}, "text: expected string, got boolean"),
        (TextContent, {"type": "text", "text": ["a"]}, "text: expected string, got array"),
        (TextContent, {"type": "text", "text": {"a": 1}}, "text: expected string, got object"),
        (TextContent, {"type": "text"}, "text: missing"),
        (TextContent, {"text": "hi"}, 'type: expected "text"'),
        (TextContent, {"type": "image", "text": "hi"}, 'type: expected "text"'),
        (TextContent, [["type", "text"], ["text", "hi"]], "expected object, got array"),
        (TextContent, "text", "expected object, got string"),
        (TextContent, None, "expected object, got null"),
        (TextContent, ("text",), "expected object, got tuple"),
        (content.Resource, {"name": "a", "uri": "a:b", "size": True}, "size: expected integer, got boolean"),
        (content.Resource, {"name": "a", "uri": "a:b", "size": "1"}, "size: expected integer, got string"),
        (content.Resource, {"name": "a", "uri": "a:b", "size": 1.0}, "size: expected integer, got number"),
        (content.Annotations, {"priority": True}, "priority: expected number or integer, got boolean"),
        (content.Annotations, {"priority": "0.5"}, "priority: expected number or integer, got string"),
        (content.Annotations, {"audience": "user"}, "audience: expected array, got string"),
        (content.Annotations, {"audience": ["user", "cat"]}, "audience[1]: expected one of user, assistant"),
        (CallToolResult, {"structuredContent": {}}, "content: missing"),
        (models.ToolAnnotations, {"readOnlyHint": 1}, "readOnlyHint: expected boolean, got integer"),
        (models.ToolAnnotations, {"readOnlyHint": "true"}, "readOnlyHint: expected boolean, got string"),
        (models.GetPromptParams, {"name": "a", "arguments": {"n": 1}}, "arguments.n: expected string, got integer"),
        (models.CallToolParams, {"name": "a", "arguments": []}, "arguments: expected object, got array"),
        (models.LoggingMessageParams, {"level": "verbose", "data": 1}, "level: expected one of debug, info, notice"),
        (models.LoggingMessageParams, {"level": 3, "data": 1}, "level: expected string, got integer"),
        (models.Params, {"_meta": []}, "_meta: expected object, got array"),
        (models.CompleteParams, {"ref": {"type": "ref/tool"}, "argument": {}}, "ref: fits none of PromptReference"),
        (
            models.CompleteParams,
            {"ref": {"type": "ref/prompt", "name": "a"}, "argument": {"name": "a"}},
            "argument.value",
        ),
        (forms.ElicitResult, {"action": "accept", "content": {"a": None}}, "content.a: expected string or integer or"),
        (
            forms.ElicitResult,
            {"action": "accept", "content": {"a": ["b", 1]}},
            "content.a[1]: expected string, got int",
        ),
        (forms.ElicitResult, {"action": "yes"}, "action: expected one of accept, decline, cancel"),
        (ImageContent, {"type": "image", "data": "AA==", "mimeType": 1}, "mimeType: expected string, got integer"),
        (ImageContent, {"type": "image", "data": 1, "mimeType": "a/b"}, "data: expected string, got integer"),
        (models.PromptMessage, {"role": "user", "content": {"type": 1}}, "content: fits none of TextContent, Image"),
        (models.PromptMessage, {"role": "user", "content": {}}, "content: fits none of TextContent, ImageContent"),
        (models.PromptMessage, {"role": "user", "content": {"type": "text"}}, "content.text: missing"),
        (models.PromptMessage, {"role": "user", "content": [TEXT]}, "content: expected object, got array"),
    ],
)
def test_the_error_of_a_misfit_names_its_path_and_its_type(cls: Any, data: Any, why: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        from_json(cls, data)
    assert str(caught.value).startswith(f"{cls.__name__}: {why}")


@pytest.mark.parametrize("bad", ["A", "AA=", "AA", "A A=", "AA==\n", "-_-", "äöüß", "=AAA", "AA==AA=="])
def test_bad_base64_is_malformed(bad: str) -> None:
    picture = {"type": "image", "data": bad, "mimeType": "image/png"}
    with pytest.raises(RemoteProtocolError, match="ImageContent: data: expected base64"):
        from_json(ImageContent, picture)
    result = from_json(CallToolResult, {"content": [TEXT, picture]})
    assert result.content == [TextContent("hi"), MalformedContent(picture, "data: expected base64")]


def test_the_url_safe_alphabet_of_base64_is_read_too() -> None:
    contents = from_json(BlobResourceContents, {"uri": "a:b", "blob": "-_-_"})
    assert contents == BlobResourceContents("a:b", b"\xfb\xff\xbf")


def test_an_error_does_not_show_values_of_the_peer() -> None:
    for data in ({"type": "secret"}, {"type": "text", "text": ["secret"]}, {"type": "text", "text": {"secret": 1}}):
        with pytest.raises(RemoteProtocolError) as caught:
            from_json(TextContent, data)
        assert "secret" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_a_key_of_the_peer_is_shortened_and_escaped_in_an_error() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        from_json(models.GetPromptParams, {"name": "a", "arguments": {"\n" + "k" * 1000: 1}})
    assert str(caught.value) == f"GetPromptParams: arguments.\\n{'k' * 38}: expected string, got integer"


def test_an_integer_in_place_of_a_number_stays_an_integer() -> None:
    preferences = from_json(models.ModelPreferences, {"costPriority": 1, "speedPriority": 0.5})
    assert (preferences.cost_priority, preferences.speed_priority) == (1, 0.5)
    assert type(preferences.cost_priority) is int


def test_null_in_an_optional_field_is_read_as_absent() -> None:
    tool = from_json(
        Tool, {**TOOL, "title": None, "annotations": None, "icons": None, "outputSchema": None}, strict=True
    )
    assert tool == Tool("add", SCHEMA)
    assert to_json(tool, V2026_07) == TOOL


@req("tool-35")
@pytest.mark.parametrize("value", [None, 0, False, "", [], [1], {}, {"a": None}])
def test_structured_null_is_a_value_and_not_absence(value: Any) -> None:
    written = {"resultType": "complete", "content": [], "structuredContent": value}
    result = from_json(CallToolResult, written)
    assert result.structured_content == value
    assert to_json(result, V2026_07) == written
    assert to_json(CallToolResult([], structured_content=value), V2026_07) == written
    assert from_json(CallToolResult, written).has_structured_content


@req("tool-39")
@pytest.mark.parametrize("members", [{}, {"isError": False}, {"isError": True}, {"structuredContent": None}])
def test_absent_members_of_a_tool_result_are_not_written(members: dict[str, Any]) -> None:
    written = {"resultType": "complete", "content": [], **members}
    result = from_json(CallToolResult, written)
    assert result.is_error is bool(members.get("isError"))
    assert result.has_structured_content is ("structuredContent" in members)
    assert to_json(result, V2026_07) == written


# Reading: unknown elements, kinds and fields


@req("type-20")
def test_one_bad_element_does_not_hide_the_others() -> None:
    bad: list[Any] = [{"name": "x"}, {"name": 1, "inputSchema": {}}, "tool", {**TOOL, "annotations": {"title": 1}}]
    written = {"tools": [TOOL, *bad, TOOL]}
    result = from_json(ListToolsResult, written)
    assert content.well_formed(result.tools) == [Tool("add", SCHEMA), Tool("add", SCHEMA)]
    assert [tool.why for tool in result.tools if isinstance(tool, MalformedContent)] == [
        "inputSchema: missing",
        "name: expected string, got integer",
        "expected object, got string",
        "annotations.title: expected string, got integer",
    ]
    assert to_json(result, V2025_06)["tools"] == written["tools"]
    with pytest.raises(RemoteProtocolError, match=r"^ListToolsResult: tools\[1\]\.inputSchema: missing$"):
        from_json(ListToolsResult, written, strict=True)


@pytest.mark.parametrize("bad", [0, {}, {**TOOL, "title": 1}], ids=["a scalar", "an object", "a member"])
def test_only_a_limited_number_of_bad_elements_is_kept(bad: Any) -> None:
    def read(many: int) -> list[Any]:
        return list(from_json(ListToolsResult, {"tools": [TOOL, *[bad] * many, TOOL]}).tools)

    tool = Tool("add", SCHEMA)
    kept = read(MAX_MALFORMED)
    assert len(kept) == MAX_MALFORMED + 2
    why = kept[1].why
    assert kept == [tool, *[MalformedContent(bad, why)] * MAX_MALFORMED, tool]
    assert read(MAX_MALFORMED + 7) == kept
    with pytest.raises(RemoteProtocolError, match=r"tools\[1\]"):
        from_json(ListToolsResult, {"tools": [TOOL, *[bad] * 1000, TOOL]}, strict=True)


def test_bad_elements_of_one_kind_share_their_error_text() -> None:
    first, second = from_json(CallToolResult, {"content": [7, 8]}).content
    assert isinstance(first, MalformedContent)
    assert isinstance(second, MalformedContent)
    assert first.why is second.why


def test_one_bad_value_of_a_map_does_not_hide_the_others() -> None:
    answers = {"who": {"action": "accept"}, "what": {"action": "maybe"}, "where": {"roots": []}, "when": {"at": 1}}
    params = from_json(models.CallToolParams, {"name": "a", "inputResponses": answers})
    assert params.input_responses == {
        "who": forms.ElicitResult("accept"),
        "what": MalformedContent(answers["what"], "action: expected one of accept, decline, cancel"),
        "where": models.ListRootsResult([]),
        "when": MalformedContent(answers["when"], "fits none of ElicitResult, CreateMessageResult, ListRootsResult"),
    }
    with pytest.raises(RemoteProtocolError, match=r"^CallToolParams: inputResponses\.what\.action: expected one of"):
        from_json(models.CallToolParams, {"name": "a", "inputResponses": answers}, strict=True)


def test_a_bad_icon_or_nested_block_is_malformed_alone() -> None:
    tool = from_json(Tool, {**TOOL, "icons": [{"src": "https://a/b"}, {"src": 1}]})
    assert tool.icons == [
        content.Icon("https://a/b"),
        MalformedContent({"src": 1}, "src: expected string, got integer"),
    ]
    nested = {"type": "tool_result", "toolUseId": "1", "content": [TEXT, {"type": "audio"}]}
    message = from_json(SamplingMessage, {"role": "user", "content": [nested, 7]})
    result, seven = message.blocks
    assert isinstance(result, content.ToolResultContent)
    assert result.content == [TextContent("hi"), MalformedContent({"type": "audio"}, "data: missing")]
    assert seven == MalformedContent(7, "expected object, got integer")


@req("type-20", "core-14", "life-21", "meta-01")
@EVERY
def test_unknown_fields_and_kinds_are_kept_and_sent_on(revision: Revision) -> None:
    hologram = {"type": "hologram", "points": [1, 2]}
    block = {**TEXT, "x-colour": "red", "annotations": {"priority": 1, "mood": None}}
    written = {"content": [hologram, block], "extra": {"a": [None]}, "_meta": {"io.modelcontextprotocol/new": [1]}}
    for strict in (False, True):
        result = from_json(CallToolResult, written, strict=strict)
        assert result.content == [
            UnknownContent(hologram),
            TextContent("hi", annotations=content.Annotations(priority=1)),
        ]
        assert result.raw == written
        assert to_json(result, revision) == {**written, **({"resultType": "complete"} if revision is V2026_07 else {})}
    program = {"name": "a", "version": "1", "telepathy": {"range": 5}}
    assert to_json(from_json(models.Implementation, program, strict=True), revision) == program


def test_a_received_object_that_was_changed_keeps_unknown_members() -> None:
    tool = from_json(Tool, {**TOOL, "title": "Add", "vendor": 1})
    changed = attrs.evolve(tool, name="calc_add", title=None)
    assert to_json(changed, V2026_07) == {"name": "calc_add", "inputSchema": SCHEMA, "vendor": 1}
    assert "raw" not in to_json(from_json(Tool, {**TOOL, "\0raw": 1}), V2026_07)


def test_a_field_of_another_revision_is_read_but_not_sent_on() -> None:
    tool = from_json(Tool, {**TOOL, "icons": [{"src": "https://a/b"}], "execution": {"taskSupport": "optional"}})
    assert to_json(tool, V2025_06) == TOOL
    assert tool.raw is not None
    assert to_json(tool, V2025_11) == tool.raw
    assert to_json(tool, V2026_07) == {**TOOL, "icons": [{"src": "https://a/b"}]}


@req("type-08")
def test_content_that_a_message_does_not_allow_is_read_as_unknown() -> None:
    link = {"type": "resource_link", "name": "a", "uri": "a:b"}
    assert from_json(models.PromptMessage, {"role": "user", "content": link}).content == content.ResourceLink(
        "a", "a:b"
    )
    assert from_json(SamplingMessage, {"role": "user", "content": link}).content == UnknownContent(link)
    use = {"type": "tool_use", "id": "1", "name": "a", "input": {}}
    assert from_json(models.PromptMessage, {"role": "user", "content": use}).content == UnknownContent(use)
    with pytest.raises(UsageError, match=r"^expected TextContent \| ImageContent.*, got ResourceLink$"):
        to_json(SamplingMessage("user", content.ResourceLink("a", "a:b")), V2026_07)  # type: ignore[arg-type]


def test_binary_data_must_be_bytes() -> None:
    assert to_json(content.ImageContent(bytearray(b"\xff"), "image/png"), V2026_07)["data"] == "/w=="
    with pytest.raises(UsageError, match=r"^expected bytes, got str$"):
        to_json(content.ImageContent("/w==", "image/png"), V2026_07)  # type: ignore[arg-type]


@req("elic-57", "elic-15")
@pytest.mark.parametrize(
    ("written", "field"),
    [
        ({"type": "string", "format": "email", "pattern": "a"}, forms.StringSchema("email")),
        ({"type": "string", "enum": ["a"]}, forms.EnumSchema(["a"])),
        ({"type": "string", "enum": ["a"], "enumNames": ["A"]}, forms.EnumSchema(["a"], ["A"])),
        (
            {"type": "string", "oneOf": [{"const": "a", "title": "A"}]},
            forms.TitledEnumSchema([forms.EnumOption("a", "A")]),
        ),
        ({"type": "number", "minimum": 0.5}, forms.NumberSchema(0.5)),
        ({"type": "integer", "default": 3}, forms.IntegerSchema(default=3)),
        ({"type": "boolean", "default": True}, forms.BooleanSchema(True)),
        (
            {"type": "array", "items": {"type": "string", "enum": ["a"]}, "maxItems": 1},
            forms.MultiSelectSchema(forms.EnumItems(["a"]), max_items=1),
        ),
        (
            {"type": "array", "items": {"anyOf": [{"const": "a", "title": "A"}]}},
            forms.MultiSelectSchema(forms.TitledEnumItems([forms.EnumOption("a", "A")])),
        ),
        ({"type": "object", "properties": {}}, UnknownContent({"type": "object", "properties": {}})),
    ],
)
def test_the_kinds_of_form_fields_are_distinguished(written: Any, field: Any) -> None:
    form = {"message": "?", "requestedSchema": {"type": "object", "properties": {"a": written}, "required": ["a"]}}
    params = from_json(forms.ElicitParams, form)
    assert params == forms.ElicitFormParams("?", forms.RequestedSchema({"a": field}, ["a"]))
    assert to_json(params, V2026_07) == form


@req("elic-19")
def test_the_modes_of_elicitation_are_distinguished() -> None:
    page = {"mode": "url", "message": "?", "url": "https://a/b"}
    assert from_json(forms.ElicitParams, page) == forms.ElicitUrlParams("?", "https://a/b")
    assert to_json(forms.ElicitUrlParams("?", "https://a/b", "id-1"), V2026_07) == page
    with pytest.raises(RemoteProtocolError, match="ElicitUrlParams or ElicitFormParams: mode: expected one of form"):
        from_json(
            forms.ElicitParams,
            {"mode": "dream", "message": "?", "requestedSchema": {"type": "object", "properties": {}}},
        )


# Results


@req("rtype-01", "rtype-04", "cache-01", "cache-07", "cache-09", "type-02")
@EVERY
def test_results_have_exactly_the_members_that_their_revision_requires(revision: Revision) -> None:
    for sender in Role:
        for method in revision.requests[sender].keys() - BY_SESSIONS:
            for shape in classes(REQUESTS[method].result):
                if not exists(shape, revision):
                    continue
                written = to_json(build(shape, revision, Fixed(full=False)), revision)
                complete = shape is not models.InputRequiredResult
                assert ("resultType" in written) is revision.result_type
                assert written.get("resultType", "complete") == ("complete" if complete else "input_required")
                cached = method in revision.cacheable and complete
                assert ("ttlMs" in written, "cacheScope" in written) == (cached, cached)
                if cached:
                    assert (written["ttlMs"], written["cacheScope"]) == (0, "private")
                read = from_json(shape, {key: written[key] for key in written if key not in ("ttlMs", "cacheScope")})
                assert to_json(read, revision) == written


@req("rtype-03", "rtype-04")
def test_the_result_type_decides_and_a_result_without_one_is_complete() -> None:
    shape = REQUESTS["tools/call"].result
    assert from_json(shape, {"content": []}) == CallToolResult([])
    assert from_json(shape, {"content": [], "resultType": "complete"}) == CallToolResult([])
    asked = {"resultType": "input_required", "requestState": "s"}
    assert from_json(shape, asked) == models.InputRequiredResult(request_state="s")
    with pytest.raises(RemoteProtocolError, match=r"CallToolResult: resultType: expected one of complete"):
        from_json(shape, {"content": [], "resultType": "task"})


@req("cache-08")
def test_a_negative_time_to_live_counts_as_zero() -> None:
    assert from_json(ListToolsResult, {"tools": [], "ttlMs": -1, "cacheScope": "public"}).ttl_ms == 0
    assert to_json(from_json(ListToolsResult, {"tools": [], "ttlMs": -1}), V2026_07)["ttlMs"] == 0


@req("page-04", "page-08")
def test_only_a_missing_or_null_cursor_ends_a_list() -> None:
    assert from_json(ListToolsResult, {"tools": []}).next_cursor is None
    assert from_json(ListToolsResult, {"tools": [], "nextCursor": None}).next_cursor is None
    assert from_json(ListToolsResult, {"tools": [], "nextCursor": ""}).next_cursor == ""
    assert to_json(models.PaginatedParams(""), V2026_07) == {"cursor": ""}
    assert to_json(models.PaginatedParams(), V2026_07) == {}


@req("mrtr-06", "mrtr-12", "type-13", "cache-26")
def test_input_requests_have_a_method_and_input_responses_do_not() -> None:
    ask = models.InputRequiredResult(
        {
            "who": models.ElicitRequest(forms.ElicitFormParams("?", forms.RequestedSchema({}), meta={"a": 1})),
            "how": models.CreateMessageRequest(
                models.CreateMessageParams([SamplingMessage("user", TextContent("hi"))], 9)
            ),
            "where": models.ListRootsRequest(),
        }
    )
    form = {"message": "?", "requestedSchema": {"type": "object", "properties": {}}}
    sampling = {"messages": [{"role": "user", "content": TEXT}], "maxTokens": 9}
    written = {
        "resultType": "input_required",
        "inputRequests": {
            "who": {"method": "elicitation/create", "params": form},
            "how": {"method": "sampling/createMessage", "params": sampling},
            "where": {"method": "roots/list"},
        },
    }
    assert to_json(ask, V2026_07) == written
    answers: dict[str, Any] = {
        "who": forms.ElicitResult("decline"),
        "how": CreateMessageResult("assistant", TextContent("hi"), "m"),
        "where": models.ListRootsResult([models.Root("file:///a")]),
    }
    retry = to_json(models.CallToolParams("t", input_responses=answers, request_state="s"), V2026_07)
    assert retry == {
        "name": "t",
        "requestState": "s",
        "inputResponses": {
            "who": {"action": "decline"},
            "how": {"role": "assistant", "content": TEXT, "model": "m"},
            "where": {"roots": [{"uri": "file:///a"}]},
        },
    }
    assert from_json(models.CallToolParams, retry).input_responses == answers
    strange = {"resultType": "input_required", "inputRequests": {"x": {"method": "dream/create"}, "y": {"id": 1}}}
    read = from_json(models.InputRequiredResult, strange).input_requests
    assert read is not None
    assert read["x"] == UnknownContent({"method": "dream/create"})
    assert isinstance(read["y"], MalformedContent)


# Writing: values that a revision does not have


PICTURE = ImageContent(b"a", "image/png")
USE = content.ToolUseContent("1", "t", {})
RESULT = content.ToolResultContent("1", [])
ITEMS = forms.MultiSelectSchema(forms.EnumItems(["a"]))
REFUSED: list[tuple[Model, tuple[Revision, ...], str]] = [
    # (value, revisions that refuse it, its name in the error); all other revisions can write it
    (CallToolResult([AudioContent(b"a", "audio/wav")]), (V2024_11,), "AudioContent"),
    (models.PromptMessage("user", AudioContent(b"a", "audio/wav")), (V2024_11,), "AudioContent"),
    (SamplingMessage("user", AudioContent(b"a", "audio/wav")), (V2024_11,), "AudioContent"),
    (CallToolResult([content.ResourceLink("a", "a:b")]), (V2024_11, V2025_03), "ResourceLink"),
    (SamplingMessage("assistant", USE), (V2024_11, V2025_03, V2025_06), "ToolUseContent"),
    (SamplingMessage("user", [RESULT]), (V2024_11, V2025_03, V2025_06), "ToolResultContent"),
    (SamplingMessage("user", [PICTURE, PICTURE]), (V2024_11, V2025_03, V2025_06), "sampling content of several blocks"),
    (SamplingMessage("user", []), (V2024_11, V2025_03, V2025_06), "sampling content of several blocks"),
    (
        CreateMessageResult("assistant", [PICTURE, PICTURE], "m"),
        (V2024_11, V2025_03, V2025_06),
        "sampling content of several blocks",
    ),
    (models.CreateMessageParams([], 1, tools=[]), (V2024_11, V2025_03, V2025_06), "CreateMessageParams.tools"),
    (
        models.CreateMessageParams([], 1, tool_choice=models.ToolChoice()),
        (V2024_11, V2025_03, V2025_06),
        "CreateMessageParams.tool_choice",
    ),
    (forms.ElicitUrlParams("?", "https://a", "1"), (V2024_11, V2025_03, V2025_06), "ElicitUrlParams"),
    (forms.ElicitFormParams("?", forms.RequestedSchema({})), (V2024_11, V2025_03), "ElicitFormParams"),
    (forms.RequestedSchema({"a": ITEMS}), (V2024_11, V2025_03, V2025_06), "RequestedSchema|MultiSelectSchema"),
    (forms.ElicitResult("accept", {"a": "b"}), (V2024_11, V2025_03), "ElicitResult"),
    (
        forms.ElicitResult("accept", {"a": ["b"]}),
        (V2024_11, V2025_03, V2025_06),
        "ElicitResult|an answer of several values",
    ),
    (
        forms.ElicitResult("accept", {"a": ("b",)}),
        (V2024_11, V2025_03, V2025_06),
        "ElicitResult|an answer of several values",
    ),
    (content.ToolResultContent("1", [], {}), (V2024_11, V2025_03, V2025_06), "ToolResultContent"),
    (
        models.CallToolParams("t", request_state=""),
        (V2024_11, V2025_03, V2025_06, V2025_11),
        "CallToolParams.request_state",
    ),
    (
        models.CallToolParams("t", input_responses={}),
        (V2024_11, V2025_03, V2025_06, V2025_11),
        "CallToolParams.input_responses",
    ),
    (models.InputRequiredResult(request_state="a"), (V2024_11, V2025_03, V2025_06, V2025_11), "InputRequiredResult"),
]


@req("type-02", "type-07", "type-08", "type-09", "type-11", "type-12", "type-17", "type-18")
@EVERY
@pytest.mark.parametrize(("value", "refused", "named"), REFUSED)
def test_a_value_that_a_revision_lacks_is_refused_if_it_is_essential(
    revision: Revision, value: Model, refused: tuple[Revision, ...], named: str
) -> None:
    if revision not in refused:
        assert isinstance(to_json(value, revision), dict)
        return
    with pytest.raises(NotInThisRevision) as caught:
        to_json(value, revision)
    assert caught.value.method in named.split("|")
    assert caught.value.revision == revision.name


AS_AN_OBJECT = {"temperature": 22.5, "sky": "bewölkt"}
STRUCTURED: list[tuple[Any, str, tuple[Revision, ...]]] = [
    # (value, its text, revisions that need the text)
    (AS_AN_OBJECT, '{"temperature": 22.5, "sky": "bewölkt"}', (V2024_11, V2025_03)),
    ({}, "{}", (V2024_11, V2025_03)),
    ([1, None], "[1, null]", (V2024_11, V2025_03, V2025_06, V2025_11)),
    ("hi", '"hi"', (V2024_11, V2025_03, V2025_06, V2025_11)),
    (None, "null", (V2024_11, V2025_03, V2025_06, V2025_11)),
]


@req("tool-34", "type-09")
@EVERY
@pytest.mark.parametrize(("value", "text", "where"), STRUCTURED)
def test_structured_content_is_written_as_text_in_older_revisions(
    revision: Revision, value: Any, text: str, where: tuple[Revision, ...]
) -> None:
    picture, block = to_json(PICTURE, revision), {"type": "text", "text": text}
    alone = to_json(CallToolResult([], value, is_error=True), revision)
    beside_a_picture = to_json(CallToolResult((PICTURE,), value), revision)
    beside_a_text = to_json(CallToolResult([TextContent("hi")], value), revision)
    assert alone["isError"] is True
    assert [alone["content"], beside_a_picture["content"]] == (
        [[block], [picture, block]] if revision in where else [[], [picture]]
    )
    assert beside_a_text["content"] == [TEXT]  # the author has chosen this text, so no second one is added
    for written in (alone, beside_a_picture, beside_a_text):
        assert written.get("structuredContent", ABSENT) == (ABSENT if revision in where else value)


@req("tool-34")
def test_a_tool_result_in_a_message_is_written_as_text_too() -> None:
    used = {"type": "tool_result", "toolUseId": "1"}
    assert to_json(content.ToolResultContent("1", [], [1]), V2025_11) == {
        **used,
        "content": [{"type": "text", "text": "[1]"}],
    }
    assert to_json(content.ToolResultContent("1", [], [1]), V2026_07) == {
        **used,
        "content": [],
        "structuredContent": [1],
    }


def test_structured_content_of_a_newer_peer_is_forwarded_as_text() -> None:
    result = from_json(CallToolResult, {"content": [], "structuredContent": [1], "vendor": 2})
    assert to_json(result, V2025_11) == {"content": [{"type": "text", "text": "[1]"}], "vendor": 2}


@pytest.mark.parametrize(
    "value", [{1, 2}, float("nan"), [object()], functools.reduce(lambda x, _: [x], range(9999), 0)]
)
def test_structured_content_that_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="structured_content cannot be written as JSON: "):
        to_json(CallToolResult([], value), V2024_11)


LEFT_OUT: list[tuple[Model, Revision, dict[str, Any]]] = [
    (models.CreateMessageParams([], 1, meta={"a": 1}), V2026_07, {"messages": [], "maxTokens": 1}),
    (models.CreateMessageParams([], 1, meta={"a": 1}), V2025_11, {"messages": [], "maxTokens": 1, "_meta": {"a": 1}}),
    (
        Tool("t", SCHEMA, SCHEMA, models.ToolAnnotations("x"), title="T", meta={}, description="d"),
        V2024_11,
        {"name": "t", "description": "d", "inputSchema": SCHEMA},
    ),
    (Tool("t", SCHEMA, {"type": "array"}), V2025_06, {"name": "t", "inputSchema": SCHEMA}),
    (Tool("t", SCHEMA, {"type": "array"}), V2025_11, {"name": "t", "inputSchema": SCHEMA}),
    (
        Tool("t", SCHEMA, {"type": "array"}),
        V2026_07,
        {"name": "t", "inputSchema": SCHEMA, "outputSchema": {"type": "array"}},
    ),
    (Tool("t", SCHEMA, SCHEMA), V2025_11, {"name": "t", "inputSchema": SCHEMA, "outputSchema": SCHEMA}),
    (TextContent("hi", meta={"a": 1}), V2025_03, TEXT),
    (SamplingMessage("user", [TextContent("hi")]), V2024_11, {"role": "user", "content": TEXT}),
    (SamplingMessage("user", [TextContent("hi")]), V2025_11, {"role": "user", "content": [TEXT]}),
    (CreateMessageResult("user", [TextContent("hi")], "m"), V2025_06, {"role": "user", "content": TEXT, "model": "m"}),
    (CallToolResult([TextContent("hi")], structured_content=[1]), V2025_03, {"content": [TEXT]}),
    (forms.StringSchema(default="a"), V2025_06, {"type": "string"}),
    (forms.BooleanSchema(False), V2025_06, {"type": "boolean", "default": False}),
    (
        forms.ElicitUrlParams("?", "https://a", "1"),
        V2025_11,
        {"mode": "url", "message": "?", "url": "https://a", "elicitationId": "1"},
    ),
    (ImageContent(b"\xff\xfe", "a/b"), V2024_11, {"type": "image", "data": "//4=", "mimeType": "a/b"}),
]


@req("type-03")
@EVERY
def test_a_tool_needs_only_a_name_and_an_input_schema(revision: Revision) -> None:
    assert to_json(Tool("add", SCHEMA), revision) == TOOL
    assert to_json(Tool("add", SCHEMA, description="sums"), revision) == {**TOOL, "description": "sums"}
    assert from_json(Tool, TOOL, strict=True) == Tool("add", SCHEMA)
    for missing in ("name", "inputSchema"):
        with pytest.raises(RemoteProtocolError, match=f"Tool: {missing}: missing"):
            from_json(Tool, {key: value for key, value in TOOL.items() if key != missing})


@req(
    "type-02",
    "type-04",
    "type-05",
    "type-10",
    "type-11",
    "type-19",
    "prog-14",
    "tool-36",
    "elic-53",
    "life-22",
)
@pytest.mark.parametrize(("value", "revision", "written"), LEFT_OUT)
def test_a_value_that_a_revision_lacks_is_omitted_if_it_is_optional(
    value: Model, revision: Revision, written: Any
) -> None:
    assert to_json(value, revision) == written


WIDE = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/short"}},
    "$defs": {"short": {"type": "string", "maxLength": 3}},
    "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    "if": {"required": ["a"]},
    "then": {"minProperties": 2},
    "unevaluatedProperties": False,
}


@req("tool-36", "tool-37")
@pytest.mark.parametrize("output", [WIDE, {}, {"type": "array"}, {"type": ["string", "null"]}, {"oneOf": [{}]}])
def test_an_input_schema_has_type_object_and_an_output_schema_any_type(output: Any) -> None:
    written = {"name": "t", "inputSchema": WIDE, "outputSchema": output}
    assert to_json(Tool("t", WIDE, output), V2026_07) == written
    assert from_json(Tool, written, strict=True) == Tool("t", WIDE, output)
    without = {key: value for key, value in WIDE.items() if key != "type"}
    for root in ({}, without, {**WIDE, "type": "array"}, {**WIDE, "type": ["object"]}):
        with pytest.raises(UsageError, match=r'Tool.input_schema must be a JSON Schema with "type": "object"'):
            Tool("t", root, output)


@req("elic-53")
@pytest.mark.parametrize("options", [[("r", "Red"), ("g", "Green")], []])
def test_a_titled_choice_is_written_as_enum_names_in_2025_06_18(options: list[tuple[str, str]]) -> None:
    choice = forms.TitledEnumSchema([forms.EnumOption(*each) for each in options], "r", title="Colour")
    form = forms.ElicitFormParams("?", forms.RequestedSchema({"colour": choice}))
    field = to_json(form, V2025_06)["requestedSchema"]["properties"]["colour"]
    values, names = [value for value, _ in options], [name for _, name in options]
    assert field == {"type": "string", "enum": values, "enumNames": names, "title": "Colour"}
    assert to_json(form, V2025_11)["requestedSchema"]["properties"]["colour"]["default"] == "r"


@req("elic-18")
def test_a_url_elicitation_of_2025_11_25_needs_an_id() -> None:
    with pytest.raises(UsageError, match="elicitation_id is required in 2025-11-25"):
        to_json(forms.ElicitUrlParams("?", "https://a"), V2025_11)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (CallToolResult("hi"), "expected TextContent.*, got str"),  # type: ignore[arg-type]
        (CallToolResult(TextContent("hi"), 1), r"expected Sequence\[TextContent.*, got TextContent"),  # type: ignore[arg-type]
        (CallToolResult(["hi"]), "expected TextContent.*, got str"),  # type: ignore[list-item]
        (forms.RequestedSchema(5), "expected Mapping.*, got int"),  # type: ignore[arg-type]
        ({"content": []}, "dict is not an object of the protocol"),
        (TextContent(5), "^TextContent: text: expected string, got integer$"),  # type: ignore[arg-type]
        (TextContent(b"hi"), "^bytes cannot be part of a protocol object$"),  # type: ignore[arg-type]
        (
            CallToolResult([TextContent("hi"), TextContent("hi", annotations=content.Annotations(["all"]))]),  # type: ignore[list-item]
            r"^CallToolResult: content\[1\].annotations.audience\[0\]: expected one of user, assistant$",
        ),
        (CallToolResult([UnknownContent({"type": "image"})]), r"content\[0\].data: missing$"),
        (forms.ElicitResult("accept", {"a": ["x", 1]}), r"content.a\[1\]: expected string, got integer$"),  # type: ignore[dict-item]
        (forms.ElicitResult("accept", {"a": object()}), "^object cannot be part"),  # type: ignore[dict-item]
        (forms.EnumSchema("ab"), "enum: expected array, got string$"),
        (TextContent("hi", meta={"a": [float("nan")]}), "^a float that is not finite has no JSON form"),
        (TextContent("hi", meta={"a": {5: 6}}), "^a key that is not text has no JSON form"),  # type: ignore[dict-item]
        (TextContent("hi", meta={"a": {6}}), "^set cannot be part of a protocol object"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_before_it_is_sent(value: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        to_json(value, V2026_07)
    with pytest.raises(UsageError, match=why):
        to_json(value, V2025_11)


class Letters(enum.StrEnum):
    A = "a"


class Digits(enum.IntEnum):
    ONE = 1


def test_objects_of_tuples_mappings_and_enums_are_written_as_plain_json() -> None:
    meta = types.MappingProxyType({Letters.A: (Digits.ONE, None, 1.5, True)})
    written = to_json(TextContent(Letters.A, meta=meta), V2026_07)
    assert written == {"type": "text", "text": "a", "_meta": {"a": [1, None, 1.5, True]}}
    assert [type(each) for each in (written["text"], *written["_meta"], *written["_meta"]["a"])] == [
        str, str, int, type(None), float, bool,
    ]  # fmt: skip


@pytest.mark.parametrize("revision", ["2026-07-28", None, REVISIONS])
def test_writing_without_a_revision_is_a_usage_error(revision: Any) -> None:
    with pytest.raises(UsageError, match=r"needs a Revision, for example REVISIONS\[name\], got "):
        to_json(models.Result(), revision)


def test_sequences_other_than_lists_are_written_too() -> None:
    assert to_json(CallToolResult((TextContent("hi"),)), V2025_11) == {"content": [TEXT]}


# The index of methods

# A session, or its registry of subscriptions, reads and answers these methods.
BY_SESSIONS = {"initialize", "ping", "server/discover", "logging/setLevel", "subscriptions/listen"}
BY_SESSIONS |= {"resources/subscribe", "resources/unsubscribe"}


@EVERY
def test_each_method_that_the_session_does_not_answer_has_classes(revision: Revision) -> None:
    asked = {*revision.requests[Role.CLIENT], *revision.requests[Role.SERVER], *revision.input_requests}
    assert asked <= REQUESTS.keys() | BY_SESSIONS
    for method in asked - BY_SESSIONS:
        params, result = map(classes, REQUESTS[method])
        assert any(exists(cls, revision) for cls in params)
        assert any(exists(cls, revision) for cls in result)
        assert (models.InputRequiredResult in result) is (method in V2026_07.input_required)
        assert issubclass(result[-1], models.CacheableResult) is (method in V2026_07.cacheable)


def test_each_method_with_classes_exists_in_a_revision() -> None:
    every = [*REVISIONS.values()]
    asked = {name for each in every for role in Role for name in each.requests[role]}
    assert asked == REQUESTS.keys() | BY_SESSIONS
    assert not REQUESTS.keys() & BY_SESSIONS


def test_the_codec_needs_no_other_packages() -> None:
    program = """if True:
        import sys
        from trio_mcp.core import codec, models
        from trio_mcp.core.revisions import LATEST
        unwanted = {"cattrs", "jsonschema_rs", "trio", "h11", "wsproto", "ssl", "socket", "asyncio", "logging"}
        print(sorted(unwanted & sys.modules.keys()))
        codec.to_json(models.Result(), LATEST)
        print(sorted(unwanted & sys.modules.keys()))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


_LONE = {"type": "text", "text": "t"}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        {"content": [_LONE]},
        {"content": [{"text": "", "type": "text"}], "resultType": "complete"},
        {"_meta": {}, "content": [_LONE]},
        {"_meta": {"a": 1}, "resultType": "complete", "content": [_LONE]},
        {"content": [_LONE], "_meta": None},
        {"content": [_LONE], "_meta": 1},
        {"content": [_LONE], "resultType": None},
        {"content": [_LONE], "resultType": "another"},
        {"content": [_LONE], "isError": True},
        {"content": [_LONE], "structuredContent": None},
        {"content": [_LONE], "unknown": 1},
        {"content": [_LONE], "unknown": 1, "resultType": "complete", "_meta": {}},
        {"content": [{**_LONE, "_meta": {"a": 1}}]},
        {"content": [{**_LONE, "annotations": {"priority": 1}}]},
        {"content": [{"type": "text", "text": 1}]},
        {"content": [{"type": "text", "tex": "t"}]},
        {"content": [{"type": "another", "text": "t"}]},
        {"content": [{"type": ["text"], "text": "t"}]},
        {"content": [_LONE, _LONE]},
        {"content": [1]},
        {"content": []},
        {"content": {}},
        {},
        [_LONE],
        None,
    ],
)
def test_the_fast_path_for_one_text_reads_the_same_as_the_general_one(
    data: Any, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome() -> Any:
        try:
            read = from_json(CallToolResult, data, strict=strict)
        except RemoteProtocolError as error:
            return str(error)
        for each in (read, *read.content):
            assert type(each).__name__ != "MalformedContent" or not strict
            with pytest.raises(attrs.exceptions.FrozenInstanceError):
                each.raw = None  # type: ignore[misc, union-attr]
        fields = attrs.fields(CallToolResult)
        return type(read), [getattr(read, field.name) for field in fields], [(type(c), c.raw) for c in read.content]

    quickly = outcome()
    monkeypatch.setattr(codec, "_one_text", lambda data: None)
    assert outcome() == quickly
