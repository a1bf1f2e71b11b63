"""The models by themselves, before any is written or read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest

from tests.core.model_strategies import MODELS, Fixed, build
from tests.requirements import req
from trio_mcp.core import (
    LATEST,
    REVISIONS,
    CacheableResult,
    CallToolResult,
    Icon,
    ImageContent,
    MalformedContent,
    Resource,
    Result,
    TextContent,
    Tool,
    ToolAnnotations,
    ToolResultContent,
    UnknownContent,
    UsageError,
    content,
    forms,
    models,
    well_formed,
)

SCHEMA = {"type": "object"}


@pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)
def test_a_model_is_frozen_slotted_and_compared_by_value(cls: type[content.Model]) -> None:
    revision = REVISIONS[cls.UNTIL]
    one, other = build(cls, revision, Fixed(full=True)), build(cls, revision, Fixed(full=True))
    assert one == other == copy.deepcopy(one) == pickle.loads(pickle.dumps(one))
    assert attrs.evolve(one, raw={"a": 1}) == one
    for field in attrs.fields(cls)[1:]:
        assert (
            attrs.evolve(one, raw={}, **{field.alias: "something else"} if not field.converter else {"ttl_ms": 8})
            != one
        )
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        one.raw = {}
    with pytest.raises(AttributeError):
        one.mispelt  # noqa: B018
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_models_of_different_classes_differ() -> None:
    assert TextContent("a") != ImageContent(b"a", "b")
    assert models.Params() != models.PaginatedParams()
    assert content.TextResourceContents("a", "b") != 1


def test_a_repr_shows_the_set_fields_and_the_length_of_binary_data() -> None:
    assert repr(TextContent("hi")) == "TextContent(text='hi')"
    assert repr(ImageContent(bytes(5000), "image/png", raw={"data": "AAAA"})) == (
        "ImageContent(data=<5000 bytes>, mime_type='image/png')"
    )
    assert repr(CallToolResult([])) == "CallToolResult(result_type='complete', content=[])"
    assert repr(CallToolResult([], None, is_error=False)) == (
        "CallToolResult(result_type='complete', content=[], structured_content=None, is_error=False)"
    )


@req("tool-40")
@pytest.mark.parametrize(
    ("named", "shown"),
    [
        (Tool("n", SCHEMA), "n"),
        (Tool("n", SCHEMA, annotations=ToolAnnotations()), "n"),
        (Tool("n", SCHEMA, annotations=ToolAnnotations(title="hint")), "hint"),
        (Tool("n", SCHEMA, annotations=ToolAnnotations(title="hint"), title="T"), "T"),
        (Resource("n", "a:b"), "n"),
        (models.Prompt("n", title="T"), "T"),
        (models.Implementation("n", "1", title="T"), "T"),
    ],
)
def test_the_display_name_is_the_title_then_the_annotated_title_then_the_name(named: Any, shown: str) -> None:
    assert named.display_name == shown


@req("tool-41")
def test_tool_annotations_have_the_documented_defaults() -> None:
    silent = ToolAnnotations()
    assert (silent.read_only, silent.destructive, silent.idempotent, silent.open_world) == (False, True, False, True)
    loud = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
    assert (loud.read_only, loud.destructive, loud.idempotent, loud.open_world) == (True, False, True, False)


@req("tool-39")
@pytest.mark.parametrize("make", [CallToolResult, partial(ToolResultContent, "id")])
def test_a_result_without_is_error_is_a_success(make: Callable[..., content.ToolOutcome]) -> None:
    assert make([]).is_error is make([], is_error=False).is_error is False
    assert make([], is_error=True).is_error is True


@pytest.mark.parametrize("make", [CallToolResult, partial(ToolResultContent, "id")])
def test_absent_structured_content_differs_from_null(make: Callable[..., content.ToolOutcome]) -> None:
    without, null = make([]), make([], structured_content=None)
    assert (without.structured_content, without.has_structured_content) == (None, False)
    assert (null.structured_content, null.has_structured_content) == (None, True)
    assert make([], {"a": 1}).structured_content == {"a": 1}


@pytest.mark.parametrize("src", ["https://example.com/a.png", "HTTPS://EXAMPLE.COM", "data:image/png;base64,AA=="])
def test_an_icon_may_have_a_safe_uri(src: str) -> None:
    assert Icon(src).src == src


@pytest.mark.parametrize("src", ["http://a/b.png", "javascript:alert(1)", "file:///a", "ftp://a", "ws://a", "/a", ""])
def test_an_unsafe_uri_of_an_icon_is_refused_unless_a_peer_sent_it(src: str) -> None:
    with pytest.raises(UsageError, match=r"^Icon\.src must be an https: or data: URI"):
        Icon(src)
    assert Icon(src, raw={"src": src}).src == src


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: content.Annotations(priority=1.5), "Annotations.priority must be between 0 and 1"),
        (lambda: models.ModelPreferences(cost_priority=-1), "ModelPreferences.cost_priority must be between 0 and 1"),
        (lambda: models.ModelPreferences(speed_priority=2), "speed_priority"),
        (lambda: models.ModelPreferences(intelligence_priority=2), "intelligence_priority"),
        (lambda: Tool("n", {"type": "array"}), 'Tool.input_schema must be a JSON Schema with "type": "object"'),
        (lambda: models.Completion(["a"] * 101), "Completion.values must be at most 100 values"),
        (lambda: models.InputRequiredResult(), "input_requests or request_state"),
        (lambda: models.InputRequiredResult({}), "input_requests or request_state"),
    ],
)
@req("type-01", "mrtr-12")
def test_a_model_that_no_revision_allows_is_refused_at_construction(make: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make()


def test_the_limits_of_the_allowed_values_are_accepted() -> None:
    assert len(models.Completion(["a"] * 100).values) == 100
    assert content.Annotations(priority=0) != content.Annotations(priority=1)
    assert models.InputRequiredResult(request_state="").request_state == ""


@req("cache-07", "cache-08", "cache-09", "cache-24")
def test_a_time_to_live_is_never_negative_and_the_default_scope_is_private() -> None:
    assert CacheableResult().ttl_ms == CacheableResult(ttl_ms=-5).ttl_ms == 0
    assert CacheableResult(ttl_ms=60_000).ttl_ms == 60_000
    assert CacheableResult().cache_scope == "private"
    assert not isinstance(models.InputRequiredResult(request_state="x"), CacheableResult)
    assert not isinstance(Result(), CacheableResult)


def test_well_formed_leaves_out_malformed_content() -> None:
    tool = Tool("n", SCHEMA)
    assert well_formed([tool, MalformedContent({"name": 1}, "name: expected string, got integer"), tool]) == [
        tool,
        tool,
    ]
    assert well_formed([UnknownContent({"type": "hologram"})]) == [UnknownContent({"type": "hologram"})]


def test_the_blocks_of_sampled_content_are_always_a_sequence() -> None:
    block = TextContent("a")
    assert models.SamplingMessage("user", block).blocks == [block]
    assert models.SamplingMessage("user", [block, block]).blocks == [block, block]
    assert models.CreateMessageResult("assistant", [], "m").blocks == []


OPTIONS = [forms.EnumOption("r", "Red"), forms.EnumOption("g", "Green")]


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        (forms.EnumSchema(["r", "g"]), [("r", "r"), ("g", "g")]),
        (forms.EnumSchema(["r", "g"], ["Red", "Green"]), [("r", "Red"), ("g", "Green")]),
        (forms.EnumSchema(["r", "g"], ["Red"]), [("r", "Red"), ("g", "g")]),
        (forms.EnumSchema(["r"], ["Red", "Green"]), [("r", "Red")]),
        (forms.TitledEnumSchema(OPTIONS), [("r", "Red"), ("g", "Green")]),
        (forms.MultiSelectSchema(forms.EnumItems(["r", "g"])), [("r", "r"), ("g", "g")]),
        (forms.MultiSelectSchema(forms.TitledEnumItems(OPTIONS)), [("r", "Red"), ("g", "Green")]),
    ],
)
def test_each_kind_of_choice_lists_its_choices(field: Any, choices: list[tuple[str, str]]) -> None:
    assert field.choices == choices


def test_each_class_is_known_to_at_least_one_revision() -> None:
    for cls in MODELS:
        assert list(REVISIONS).index(cls.SINCE) <= list(REVISIONS).index(cls.UNTIL)
        for field in attrs.fields(cls):
            first, last = field.metadata.get("since", cls.SINCE), field.metadata.get("until", LATEST.name)
            assert first in REVISIONS
            assert first <= last
