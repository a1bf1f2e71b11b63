"""The results that are made of the return values of handlers, in each revision."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import attrs
import jsonschema_rs
import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import (
    ABSENT,
    LATEST,
    REVISIONS,
    Annotations,
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    Completion,
    EmbeddedResource,
    GetPromptResult,
    ImageContent,
    NotInThisRevision,
    PromptMessage,
    ReadResourceResult,
    RequestError,
    Resource,
    ResourceLink,
    ResourceNotFound,
    Revision,
    TextContent,
    TextResourceContents,
    Tool,
    UnknownContent,
    UsageError,
    codec,
)
from trio_mcp.core.schema import InvalidSchema
from trio_mcp.server import (
    BadResult,
    InputRequired,
    OutputSchema,
    ToolError,
    audio,
    completion_result,
    file,
    image,
    prompt_result,
    resource_result,
    tool_failure,
    tool_result,
)

V2024_11, V2025_03, V2025_06, V2025_11, V2026_07 = REVISIONS.values()
REVISION = pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
STRUCTURED = pytest.mark.parametrize("revision", [V2025_06, V2025_11, V2026_07], ids=str)
PNG, WAV = b"\x89PNG\r\n\x1a\n", b"RIFF....WAVE"


class OfficialSchemas:
    """The official schema of each revision."""

    def __init__(self, folder: Path) -> None:
        self._whole = {name: json.loads((folder / "schema" / f"{name}.json").read_text()) for name in REVISIONS}
        # A mistake in the schema: the text of the specification says that null is a value.
        self._whole[LATEST.name]["$defs"]["JSONValue"]["anyOf"].append({"type": "null"})

    def check(self, kind: str, revision: Revision, method: str, result: Any) -> Any:
        """Check a result with the members that the session adds to each result of its method."""
        whole = self._whole[revision.name]
        key = "$defs" if "$defs" in whole else "definitions"
        result = {**revision.complete(method in revision.cacheable), **result}
        jsonschema_rs.validator_for({**whole, "$ref": f"#/{key}/{kind}"}, validate_formats=True).validate(result)
        return result


@pytest.fixture(scope="session")
def official(shared_schemas: Path) -> OfficialSchemas:
    return OfficialSchemas(shared_schemas)


@dataclasses.dataclass
class Forecast:
    city: str
    days: list[datetime.date]


class Movie(TypedDict):
    title: str


class Colour(enum.Enum):
    RED = "red"


class Word(str, enum.Enum):  # noqa: UP042
    A = "a"


OSLO = Forecast("Oslo", [datetime.date(2026, 1, 31)])
OSLO_JSON = {"city": "Oslo", "days": ["2026-01-31"]}
TEXT = {"type": "text", "text": "hi"}
IMAGE = {"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"}
NOTE = TextResourceContents("note:1", "hi", mime_type="text/plain")


def text(value: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}]}


# Tools: content.


CONTENT: list[tuple[Any, list[Any]]] = [
    (None, []),
    ("hi", [TEXT]),
    (Word.A, [{"type": "text", "text": "a"}]),
    (TextContent("hi"), [TEXT]),
    (ImageContent(PNG, "image/png"), [IMAGE]),
    ([ImageContent(PNG, "image/png"), "hi"], [IMAGE, TEXT]),
    (("hi", TextContent("hi")), [TEXT, TEXT]),
    ([TextContent("hi"), {"a": 1}, 3], [TEXT, {"type": "text", "text": '{"a": 1}'}, {"type": "text", "text": "3"}]),
    (
        EmbeddedResource(NOTE),
        [{"type": "resource", "resource": {"uri": "note:1", "mimeType": "text/plain", "text": "hi"}}],
    ),
    (["a", "b"], [{"type": "text", "text": '["a", "b"]'}]),
    ([], [{"type": "text", "text": "[]"}]),
    (3, [{"type": "text", "text": "3"}]),
    (True, [{"type": "text", "text": "true"}]),
    ("é\u2028", [{"type": "text", "text": "é\u2028"}]),
    ({"é": None}, [{"type": "text", "text": '{"é": null}'}]),
    (OSLO, [{"type": "text", "text": '{"city": "Oslo", "days": ["2026-01-31"]}'}]),
    (Colour.RED, [{"type": "text", "text": '"red"'}]),
]


@req("tool-05", "tool-39")
@REVISION
@pytest.mark.parametrize(("value", "content"), CONTENT)
def test_the_return_value_of_a_tool_becomes_content(
    official: OfficialSchemas, revision: Revision, value: Any, content: Any
) -> None:
    for output in (None, OutputSchema(), OutputSchema(str)):
        result = tool_result(value, output, "t", revision)
        assert result == {"content": content}
        official.check("CallToolResult", revision, "tools/call", result)


@req("tool-05")
@REVISION
def test_bytes_are_a_resource_inside_the_result(official: OfficialSchemas, revision: Revision) -> None:
    result = tool_result(b"hi", None, "my tool/é", revision)
    uri = "tool://my%20tool%2F%C3%A9/result"
    blob = {"type": "resource", "resource": {"uri": uri, "mimeType": "application/octet-stream", "blob": "aGk="}}
    assert result == {"content": [blob]}
    official.check("CallToolResult", revision, "tools/call", result)
    first, second = tool_result([TextContent("hi"), b"hi"], None, "t", revision)["content"]
    assert (first, second["resource"]["uri"]) == (TEXT, "tool://t/result/1")


@req("tool-11")
@REVISION
def test_links_are_content_in_revisions_that_have_them(official: OfficialSchemas, revision: Revision) -> None:
    link = ResourceLink("n", "a:b")
    if revision in (V2024_11, V2025_03):
        with pytest.raises(NotInThisRevision):
            tool_result(link, None, "t", revision)
    else:
        result = tool_result([link], None, "t", revision)
        assert result == {"content": [{"type": "resource_link", "name": "n", "uri": "a:b"}]}
        official.check("CallToolResult", revision, "tools/call", result)


def test_content_of_an_unknown_kind_is_sent() -> None:
    assert tool_result(UnknownContent({"type": "new"}), None, "t", LATEST) == {"content": [{"type": "new"}]}


@req("tool-39")
@REVISION
def test_an_explicit_result_is_sent_unchanged(official: OfficialSchemas, revision: Revision) -> None:
    value = CallToolResult([TextContent("hi")], is_error=True, meta={"com.example/a": 1})
    result = tool_result(value, None, "t", revision)
    assert result == {
        "content": [TEXT],
        "isError": True,
        "_meta": {"com.example/a": 1},
        **({"resultType": "complete"} if revision is LATEST else {}),
    }
    official.check("CallToolResult", revision, "tools/call", result)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (decimal.Decimal(1), "the result of the tool 't': Decimal has no JSON form here"),
        ([object()], "object has no JSON form"),
        (float("nan"), "a float that is not finite"),
        ({"a": TextContent("x")}, "TextContent is an object of the protocol"),
        (Tool("n", {"type": "object"}), "Tool is an object of the protocol"),
        ([TextContent("x"), Tool("n", {"type": "object"})], "Tool is an object of the protocol"),
        (ImageContent(b"", "png"), r"the mime_type of ImageContent must be a MIME type such as image/\.\.\."),
        (AudioContent(b"", ""), "the mime_type of AudioContent must be"),
        (EmbeddedResource(TextResourceContents("no uri", "")), "the uri of a resource must begin with a scheme"),
        pytest.param(10**5000, "it cannot be written as JSON", id="a number of 5000 digits"),
        (CallToolResult([], structured_content={"a": object()}), "object has no JSON form"),
        (CallToolResult([3]), "expected .*, got int"),  # type: ignore[list-item]
    ],
)
def test_a_value_without_a_json_form_is_a_bad_result(value: Any, why: str) -> None:
    with pytest.raises(BadResult, match=why):
        tool_result(value, None, "t", LATEST)


# Tools: structured content.


SCALARS: list[tuple[Any, Any, Any]] = [
    (Forecast, OSLO, OSLO_JSON),
    (Forecast | None, None, None),
    (int, 3, 3),
    (float | None, 1.5, 1.5),
    (list[str], ["a"], ["a"]),
    (list[Forecast], [], []),
    (dict[str, Any], {"a": None}, {"a": None}),
    (dict, {}, {}),
    (Movie, {"title": "x"}, {"title": "x"}),
    (str | int, "a", "a"),
    (bytes | int, b"hi", "aGk="),
    (Path, pathlib.PurePosixPath("/a"), "/a"),
    (Colour, Colour.RED, "red"),
    (typing.Literal["a"], "a", "a"),
    (tuple[int, str], (1, "a"), [1, "a"]),
]


@req("tool-13", "tool-14", "tool-34", "tool-35", "tool-36")
@REVISION
@pytest.mark.parametrize(("hint", "value", "structured"), SCALARS)
def test_data_is_structured_content_and_text(
    official: OfficialSchemas, revision: Revision, hint: Any, value: Any, structured: Any
) -> None:
    output = OutputSchema(hint)
    assert output.schema is not None
    result = tool_result(value, output, "t", revision)
    official.check("CallToolResult", revision, "tools/call", result)
    assert [block["type"] for block in result["content"]] == ["text"]
    assert json.loads(result["content"][0]["text"]) == structured
    boxed = revision in (V2025_06, V2025_11) and output.schema.get("type") != "object"
    assert output.boxed_in(revision) is boxed
    schema = output.boxed_schema() if boxed else output.schema
    tool = codec.to_json(Tool("t", {"type": "object"}, output_schema=schema), revision)
    if revision in (V2024_11, V2025_03):
        assert "structuredContent" not in result
        assert "outputSchema" not in tool
    else:
        assert result["structuredContent"] == ({"result": structured} if boxed else structured)
        jsonschema_rs.validator_for(tool["outputSchema"]).validate(result["structuredContent"])


@dataclasses.dataclass
class Tree:
    leaves: list[int]
    trees: list[Tree]


@req("tool-34", "tool-36")
@pytest.mark.parametrize("revision", [V2025_06, V2025_11], ids=str)
def test_a_value_is_boxed_if_its_schema_is_not_one_of_objects(revision: Revision) -> None:
    output = OutputSchema(Tree | None)
    schema = output.boxed_schema()
    assert output.schema is not None
    assert "$defs" in output.schema
    assert schema.keys() == {"type", "properties", "required", "$defs"}  # references point to "$defs" at the root
    validator = jsonschema_rs.validator_for(schema)
    tree = {"leaves": [], "trees": [{"leaves": [1], "trees": []}]}
    for value, written in ((Tree([], [Tree([1], [])]), tree), (None, None)):
        for returned in (value, CallToolResult([], structured_content=value)):
            result = tool_result(returned, output, "t", revision)
            assert result["structuredContent"] == {"result": written}
            assert json.loads(result["content"][0]["text"]) == written
            validator.validate(result["structuredContent"])
    assert not validator.is_valid({"result": {"leaves": [], "trees": [{"leaves": ["1"], "trees": []}]}})


@req("tool-36")
@STRUCTURED
def test_a_given_schema_is_never_boxed(revision: Revision) -> None:
    output = OutputSchema(schema={"type": "array", "items": {"$ref": "#/definitions/n"}, "definitions": {"n": {}}})
    assert not output.boxed_in(revision)
    assert ("structuredContent" in tool_result([1], output, "t", revision)) is (revision is V2026_07)


@req("tool-35")
def test_none_is_structured_content_only_if_the_hint_has_data() -> None:
    assert tool_result(None, OutputSchema(int | None), "t", LATEST) == {**text("null"), "structuredContent": None}
    assert tool_result(None, OutputSchema(None), "t", LATEST) == {"content": []}


def test_an_object_of_a_subclass_has_the_members_of_the_hint_only() -> None:
    @dataclasses.dataclass
    class More(Forecast):
        secret: str = "s3cr3t"

    assert tool_result(More("Oslo", []), OutputSchema(Forecast), "t", LATEST)["structuredContent"] == {
        "city": "Oslo",
        "days": [],
    }


RAW = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@req("tool-14")
@STRUCTURED
def test_results_are_checked_against_a_given_schema(revision: Revision) -> None:
    output = OutputSchema(schema=RAW)
    assert output.schema == RAW
    assert tool_result({"n": 1}, output, "t", revision) == {**text('{"n": 1}'), "structuredContent": {"n": 1}}
    with pytest.raises(BadResult, match="'t': it does not match the output schema: /n must be of type integer"):
        tool_result({"n": "s3cr3t"}, output, "t", revision)
    with pytest.raises(InvalidSchema):
        OutputSchema(schema={"type": 3})


@req("tool-14")
@REVISION
@pytest.mark.parametrize(
    ("hint", "value", "why"),
    [
        (Forecast, {"city": "s3cr3t"}, 'output schema: the whole lacks the member "days"'),
        (Forecast, {"city": 1, "days": 2}, "/city must be of type string, not an integer; /days must be of type array"),
        (Forecast, None, "output schema: the whole must be of type object"),
        (int, "s3cr3t", "must be of type integer"),
        (int, TextContent("s3cr3t"), "TextContent is an object of the protocol, not data"),
        (Forecast, [TextContent("s3cr3t")], "TextContent is an object of the protocol, not data"),
        (Forecast, CallToolResult([TextContent("s3cr3t")]), "it has no structured_content"),
        (Forecast, CallToolResult([], structured_content={"city": "s3cr3t"}), 'lacks the member "days"'),
    ],
)
def test_a_result_that_violates_its_schema_is_not_sent(revision: Revision, hint: Any, value: Any, why: str) -> None:
    with pytest.raises(BadResult, match=why) as caught:
        tool_result(value, OutputSchema(hint), "t", revision)
    assert "s3cr3t" not in str(caught.value)


@req("tool-13")
@STRUCTURED
def test_structured_content_of_an_explicit_result_is_checked_and_text(
    official: OfficialSchemas, revision: Revision
) -> None:
    output = OutputSchema(Forecast)
    for content in ([], [ImageContent(PNG, "image/png")]):
        result = tool_result(CallToolResult(content, structured_content=OSLO), output, "t", revision)
        assert result["structuredContent"] == OSLO_JSON
        assert json.loads(result["content"][-1]["text"]) == OSLO_JSON
        assert len(result["content"]) == len(content) + 1
        official.check("CallToolResult", revision, "tools/call", result)
    said = CallToolResult([TextContent("hi")], structured_content=OSLO)
    assert tool_result(said, output, "t", revision)["content"] == [TEXT]
    assert tool_result(said, None, "t", revision)["structuredContent"] == OSLO_JSON


@REVISION
def test_an_error_result_need_not_match_the_schema(revision: Revision) -> None:
    output = OutputSchema(Forecast)
    assert tool_result(CallToolResult([], is_error=True), output, "t", revision)["isError"] is True
    result = tool_result(CallToolResult([], structured_content=[1], is_error=True), output, "t", revision)
    assert result["content"] == [{"type": "text", "text": "[1]"}]


# Output schemas of hints.


Id = typing.NewType("Id", str)
Blocks = typing_extensions.TypeAliasType("Blocks", TextContent | ImageContent)
Anything = typing_extensions.TypeAliasType("Anything", Any)
UNSTRUCTURED: list[Any] = [ABSENT, None, Any, object, str, bytes, str | None, str | bytes, Annotated[str, "Text."], Id]
UNSTRUCTURED += [TextContent, ImageContent, list[TextContent], Sequence[TextContent | str], tuple[TextContent, ...]]
UNSTRUCTURED += [TextContent | str | None, list[TextContent] | str, CallToolResult, InputRequired, Blocks, list[Blocks]]
UNSTRUCTURED += [
    CallToolResult | InputRequired,
    str | InputRequired,
    list,
    tuple,
    list[Any],
    Any | int,
    typing.NoReturn,
]
UNSTRUCTURED += [EmbeddedResource | UnknownContent, list[str | Any], Anything, Annotated[Blocks | None, 1]]


@pytest.mark.parametrize("hint", UNSTRUCTURED, ids=repr)
def test_hints_of_content_have_no_output_schema(hint: Any) -> None:
    assert OutputSchema(hint).schema is None


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (list[str], {"type": "array", "items": {"type": "string"}}),
        (int | InputRequired, {"type": "integer"}),
        (int | CallToolResult, {"type": "integer"}),
        (int | CallToolResult | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (Annotated[int, "How many."], {"type": "integer", "description": "How many."}),
        (dict, {"type": "object"}),
        (dict[str, str], {"type": "object", "additionalProperties": {"type": "string"}}),
        (set[str], {"type": "array", "uniqueItems": True, "items": {"type": "string"}}),
    ],
)
def test_hints_of_data_have_an_output_schema(hint: Any, schema: Mapping[str, Any]) -> None:
    assert OutputSchema(hint).schema == schema


@pytest.mark.parametrize(
    ("hint", "why"),
    [
        (complex, "its return value: <class 'complex'> has no JSON form here; .*annotate the data that it returns, or"),
        (typing.Iterator[int], "has no JSON form here; .*give structured=False to return only content"),
        (Forecast | TextContent, "it returns content or data, .*; return CallToolResult, or annotate"),
        (dict[str, int] | list[TextContent], "it returns content or data"),
    ],
)
def test_an_ambiguous_or_unsupported_hint_is_refused_with_a_hint(hint: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        OutputSchema(hint)


# Failures.


@req("tool-30")
@REVISION
def test_a_tool_error_is_a_result(official: OfficialSchemas, revision: Revision) -> None:
    failed = {**text("no such city"), "isError": True}
    assert tool_failure("no such city", revision) == failed
    assert tool_failure(ToolError("no such city"), revision) == failed
    assert str(ToolError("no such city")) == "no such city"
    shown = tool_failure(ToolError([TextContent("hi"), ImageContent(PNG, "image/png"), "hi"]), revision)
    assert shown == {"content": [TEXT, IMAGE, TEXT], "isError": True}
    for result in (failed, shown):
        official.check("CallToolResult", revision, "tools/call", result)


def test_a_tool_error_without_valid_content_is_a_bad_result() -> None:
    with pytest.raises(BadResult, match="ToolError: int is not content"):
        tool_failure(ToolError([3]), LATEST)  # type: ignore[list-item]
    with pytest.raises(NotInThisRevision):
        tool_failure(ToolError([AudioContent(WAV, "audio/wav")]), V2024_11)


@REVISION
def test_the_error_of_a_missing_resource_has_its_uri(revision: Revision) -> None:
    error = ResourceNotFound("a:b")
    assert isinstance(error, RequestError)
    assert error.data == {"uri": "a:b"}
    assert error.message == "Resource not found: 'a:b'"
    assert ResourceNotFound("a:b", "there is no b").message == "there is no b"
    assert len(ResourceNotFound("a:\n" + "b" * 10_000).message) < 300
    assert "\n" not in ResourceNotFound("a:\nb").message
    assert revision.error_code(error.code) == (-32602 if revision is LATEST else -32002)


def test_input_required_keeps_its_questions_and_its_state() -> None:
    asked = InputRequired({}, {"step": 1})
    assert (asked.questions, asked.state) == ({}, {"step": 1})
    assert InputRequired({}).state is None


# Images, audio, files.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a b.PNG").write_bytes(PNG)
    (tmp_path / "a.wav").write_bytes(WAV)
    (tmp_path / "note.md").write_text("héllo", "utf-8")
    (tmp_path / "latin.txt").write_bytes("héllo".encode("latin-1"))
    (tmp_path / "zeros.txt").write_bytes(b"a\0b")
    (tmp_path / "data.json").write_text("{}")
    (tmp_path / "drawing.svg").write_text("<svg/>")
    (tmp_path / "a.zip").write_bytes(b"PK")
    (tmp_path / "what.ever").write_bytes(b"a")
    (tmp_path / "none").write_bytes(b"a")
    return tmp_path


def test_images_and_audio_from_bytes_or_a_path(folder: Path) -> None:
    seen = Annotations(priority=1)
    assert image(folder / "a b.PNG", annotations=seen) == ImageContent(PNG, "image/png", annotations=seen)
    assert image(str(folder / "a b.PNG"), mime_type="image/x-own") == ImageContent(PNG, "image/x-own")
    assert image(PNG, mime_type="image/png") == ImageContent(PNG, "image/png")
    assert audio(folder / "a.wav", annotations=seen) == AudioContent(WAV, "audio/x-wav", annotations=seen) or (
        audio(folder / "a.wav").mime_type == "audio/wav"  # from Python 3.14 on
    )
    assert audio(WAV, mime_type="audio/wav; codecs=1") == AudioContent(WAV, "audio/wav; codecs=1")


@pytest.mark.parametrize(
    ("name", "mime_type"),
    [("a.webp", "image/webp"), ("a.jpeg", "image/jpeg"), ("a.gif", "image/gif"), ("a.svg", "image/svg+xml")],
)
def test_the_suffix_decides_the_type_on_each_machine(tmp_path: Path, name: str, mime_type: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert image(tmp_path / name).mime_type == mime_type


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: image(PNG), "the MIME type of a file from bytes is unknown; give mime_type"),
        (lambda folder: image(folder / "none"), "MIME type of a file with the suffix '' is unknown; give mime_type"),
        (lambda folder: file(folder / "what.ever"), "a file with the suffix '.ever' is unknown; give mime_type"),
        (lambda folder: image(folder / "a.wav"), r"not a type of image; give mime_type='image/...', or use file\(\)"),
        (lambda folder: audio(PNG, mime_type="image/png"), "image/png is not a type of audio"),
        (lambda folder: image(PNG, mime_type="png"), "mime_type must be a MIME type such as image/png, got 'png'"),
        (lambda folder: image(PNG, mime_type="image/p ng"), "must be a MIME type such as image/png, got 'image/p ng'"),
        (lambda folder: file(b"a", mime_type="text/plain"), "a file from bytes needs a uri; give uri="),
    ],
)
def test_helpers_report_missing_or_wrong_arguments(folder: Path, make: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make(folder)


def test_a_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        image(tmp_path / "a.png")


@req("res-23")
@pytest.mark.parametrize(
    ("name", "mime_type", "content"),
    [
        ("note.md", "text/markdown", "héllo"),
        ("data.json", "application/json", "{}"),
        ("drawing.svg", "image/svg+xml", "<svg/>"),
        ("latin.txt", "text/plain", b"h\xe9llo"),
        ("zeros.txt", "text/plain", b"a\0b"),
        ("a.zip", "application/zip", b"PK"),
        ("a b.PNG", "image/png", PNG),
    ],
)
def test_a_file_is_text_only_if_it_can_be_decoded(
    folder: Path, name: str, mime_type: str, content: str | bytes
) -> None:
    uri = (folder / name).as_uri()
    assert " " not in uri
    wanted: Any = TextResourceContents if isinstance(content, str) else BlobResourceContents
    assert file(folder / name) == EmbeddedResource(wanted(uri, content, mime_type=mime_type))


@req("res-23")
def test_bytes_with_a_uri_are_a_file() -> None:
    assert file(b"hi", uri="note:1", mime_type="text/plain; charset=utf-8") == EmbeddedResource(
        TextResourceContents("note:1", "hi", mime_type="text/plain; charset=utf-8")
    )
    assert file(b"hi", uri="a:b", mime_type="application/x-own").resource == BlobResourceContents(
        "a:b", b"hi", mime_type="application/x-own"
    )


# Prompts.


HI = {"role": "user", "content": TEXT}
PROMPTS: list[tuple[Any, list[Any]]] = [
    ("hi", [HI]),
    (Word.A, [{"role": "user", "content": {"type": "text", "text": "a"}}]),
    (TextContent("hi"), [HI]),
    (PromptMessage("assistant", TextContent("hi")), [{"role": "assistant", "content": TEXT}]),
    (["hi", PromptMessage("assistant", TextContent("hi"))], [HI, {"role": "assistant", "content": TEXT}]),
    (("hi", ImageContent(PNG, "image/png")), [HI, {"role": "user", "content": IMAGE}]),
    ([], []),
]


@req("prm-17")
@REVISION
@pytest.mark.parametrize(("value", "messages"), PROMPTS)
def test_the_return_value_of_a_prompt_becomes_messages(
    official: OfficialSchemas, revision: Revision, value: Any, messages: list[Any]
) -> None:
    assert prompt_result(value, None, revision) == {"messages": messages}
    result = prompt_result(value, "What it is.", revision)
    assert result == {"messages": messages, "description": "What it is."}
    official.check("GetPromptResult", revision, "prompts/get", result)


@REVISION
def test_an_explicit_prompt_result_is_sent_unchanged(official: OfficialSchemas, revision: Revision) -> None:
    value = GetPromptResult([PromptMessage("user", TextContent("hi"))], "Its own.", meta={"com.example/a": 1})
    result = prompt_result(value, "Of the prompt.", revision)
    assert result["description"] == "Its own."
    assert result["messages"] == [HI]
    assert result["_meta"] == {"com.example/a": 1}
    official.check("GetPromptResult", revision, "prompts/get", result)
    assert "description" not in prompt_result(GetPromptResult([]), "Of the prompt.", revision)


@req("prm-16")
@pytest.mark.parametrize("revision", [V2025_06, V2025_11, V2026_07], ids=str)
def test_a_prompt_may_link_to_resources(official: OfficialSchemas, revision: Revision) -> None:
    result = prompt_result(ResourceLink("n", "a:b"), None, revision)
    assert result["messages"][0]["content"] == {"type": "resource_link", "name": "n", "uri": "a:b"}
    official.check("GetPromptResult", revision, "prompts/get", result)


@req("prm-05", "prm-06")
@REVISION
@pytest.mark.parametrize("wrap", [lambda block: block, lambda block: GetPromptResult([PromptMessage("user", block)])])
def test_images_and_audio_in_prompts_are_base64_with_a_valid_type(
    official: OfficialSchemas, revision: Revision, wrap: Any
) -> None:
    picture, sound = image(PNG, mime_type="image/png"), audio(WAV, mime_type="audio/wav")
    result = prompt_result(wrap(picture), None, revision)
    assert result["messages"][0]["content"] == IMAGE
    official.check("GetPromptResult", revision, "prompts/get", result)
    if revision is V2024_11:
        with pytest.raises(NotInThisRevision):
            prompt_result(wrap(sound), None, revision)
    else:
        result = prompt_result(wrap(sound), None, revision)
        assert result["messages"][0]["content"] == {
            "type": "audio",
            "data": "UklGRi4uLi5XQVZF",
            "mimeType": "audio/wav",
        }
        official.check("GetPromptResult", revision, "prompts/get", result)
    for bad in (ImageContent(PNG, "png"), ImageContent(PNG, "image/"), AudioContent(WAV, "a b/c")):
        with pytest.raises((BadResult, NotInThisRevision)):
            prompt_result(wrap(bad), None, revision)


@req("prm-07")
@REVISION
@pytest.mark.parametrize(
    ("contents", "written"),
    [
        (TextResourceContents("note:1", "hi"), {"uri": "note:1", "mimeType": "text/plain", "text": "hi"}),
        (NOTE, {"uri": "note:1", "mimeType": "text/plain", "text": "hi"}),
        (BlobResourceContents("a:b", b"hi"), {"uri": "a:b", "mimeType": "application/octet-stream", "blob": "aGk="}),
        (
            BlobResourceContents("a:b", PNG, mime_type="image/png"),
            {"uri": "a:b", "mimeType": "image/png", "blob": "iVBORw0KGgo="},
        ),
    ],
)
def test_a_resource_in_a_prompt_has_a_uri_a_type_and_a_content(
    official: OfficialSchemas, revision: Revision, contents: Any, written: Any
) -> None:
    for value in (EmbeddedResource(contents), GetPromptResult([PromptMessage("user", EmbeddedResource(contents))])):
        result = prompt_result(value, None, revision)
        assert result["messages"] == [{"role": "user", "content": {"type": "resource", "resource": written}}]
        official.check("GetPromptResult", revision, "prompts/get", result)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "the result of the prompt: NoneType is not a message; return text, content or PromptMessage"),
        (3, "int is not a message"),
        ([{"role": "user"}], "dict is not a message"),
        (Resource("n", "a:b"), "Resource is not a message"),
        (PromptMessage("system", TextContent("a")), "the role of a message must be user or assistant"),  # type: ignore
        (PromptMessage("user", [TextContent("a")]), "expected .*, got list|list is not content"),  # type: ignore
        (EmbeddedResource(TextResourceContents("/no/scheme", "")), "the uri of a resource must begin with a scheme"),
    ],
)
def test_a_value_that_is_no_message_is_a_bad_result(value: Any, why: str) -> None:
    with pytest.raises(BadResult, match=why):
        prompt_result(value, None, LATEST)


# Resources.


def contents(**members: Any) -> dict[str, Any]:
    return {"contents": [{"uri": "a:b", **members}]}


@req("res-12", "res-23")
@REVISION
@pytest.mark.parametrize(
    ("value", "mime_type", "result"),
    [
        ("hi", None, contents(mimeType="text/plain", text="hi")),
        ("hi", "text/markdown", contents(mimeType="text/markdown", text="hi")),
        (Word.A, None, contents(mimeType="text/plain", text="a")),
        (b"hi", None, contents(mimeType="application/octet-stream", blob="aGk=")),
        (b"hi", "image/png", contents(mimeType="image/png", blob="aGk=")),
        ({"a": 1}, None, contents(mimeType="application/json", text='{"a": 1}')),
        ([], None, contents(mimeType="application/json", text="[]")),
        ([1, "é"], "application/x+json", contents(mimeType="application/x+json", text='[1, "é"]')),
        (OSLO, None, contents(mimeType="application/json", text='{"city": "Oslo", "days": ["2026-01-31"]}')),
        (TextResourceContents("c:d", "hi"), "x/y", {"contents": [{"uri": "c:d", "text": "hi"}]}),
        (BlobResourceContents("c:d", b"hi"), None, {"contents": [{"uri": "c:d", "blob": "aGk="}]}),
    ],
)
def test_the_return_value_of_a_resource_becomes_contents(
    official: OfficialSchemas, revision: Revision, value: Any, mime_type: str | None, result: Any
) -> None:
    assert resource_result(value, "a:b", mime_type, revision) == result
    official.check("ReadResourceResult", revision, "resources/read", result)


@req("res-17")
@REVISION
@pytest.mark.parametrize("make", [list, tuple, ReadResourceResult])
def test_a_resource_may_have_contents_with_several_uris(
    official: OfficialSchemas, revision: Revision, make: Any
) -> None:
    value = make([NOTE, BlobResourceContents("c:d", b"hi")])
    result = resource_result(value, "a:b", None, revision)
    assert result["contents"] == [
        {"uri": "note:1", "mimeType": "text/plain", "text": "hi"},
        {"uri": "c:d", "blob": "aGk="},
    ]
    official.check("ReadResourceResult", revision, "resources/read", result)


def test_an_explicit_resource_result_keeps_its_cache_hints() -> None:
    result = resource_result(ReadResourceResult([NOTE], ttl_ms=5, cache_scope="public"), "a:b", None, LATEST)
    assert (result["ttlMs"], result["cacheScope"]) == (5, "public")


@req("res-09")
@REVISION
@pytest.mark.parametrize("value", [ReadResourceResult([]), None])
def test_a_resource_without_contents_is_a_bad_result(revision: Revision, value: Any) -> None:
    with pytest.raises(BadResult, match=r"the result of the resource 'a:b': .* raise ResourceNotFound if there"):
        resource_result(value, "a:b", None, revision)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([NOTE, "hi"], "it mixes contents with other values; return a list of contents only"),
        (TextContent("a"), "TextContent is an object of the protocol"),
        (decimal.Decimal(1), "Decimal has no JSON form"),
    ],
)
def test_a_value_that_is_no_resource_is_a_bad_result(value: Any, why: str) -> None:
    with pytest.raises(BadResult, match=why):
        resource_result(value, "a:b", None, LATEST)


# Completions.


@req("cmpl-01", "cmpl-07")
@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=3), max_size=250), st.sampled_from([list, tuple]))
def test_a_completion_has_the_first_hundred_values_in_order(values: list[str], make: Any) -> None:
    completion = completion_result(make(values))["completion"]
    assert completion == {"values": values[:100], "total": len(values), "hasMore": len(values) > 100}


@req("cmpl-07")
@REVISION
def test_a_completion_is_valid_in_every_revision(official: OfficialSchemas, revision: Revision) -> None:
    for value in ([], ["a"] * 101, (Word.A, "b"), Completion(["a"], total=3, has_more=True), Completion(["a"])):
        official.check("CompleteResult", revision, "completion/complete", completion_result(value))
    assert completion_result((Word.A, "b"))["completion"]["values"] == ["a", "b"]
    assert completion_result(Completion(["a"], total=3, has_more=True)) == {
        "completion": {"values": ["a"], "total": 3, "hasMore": True}
    }


@pytest.mark.parametrize("value", [None, "abc", [1], {"a"}, {"a": 1}, iter("abc")])
def test_a_completion_that_is_no_list_of_strings_is_a_bad_result(value: Any) -> None:
    with pytest.raises(BadResult, match="it must be a list of strings or a Completion, got"):
        completion_result(value)


# Objects with values of wrong types: without a type checker, the constructor accepts them.


WRONG: Any = object()
LOOP: dict[str, Any] = {}
LOOP["again"] = LOOP
BUILT_WRONG: list[tuple[str, Callable[[], Any], str]] = [
    ("text", lambda: TextContent(typing.cast(Any, 5)), "text: expected string, got integer"),
    ("bytes as text", lambda: TextContent(typing.cast(Any, b"hi")), "bytes cannot be part of a protocol object"),
    ("annotations", lambda: TextContent("hi", annotations=typing.cast(Any, "all")), "expected .*, got str"),
    ("audience", lambda: TextContent("hi", annotations=Annotations([WRONG])), "object cannot be part of a protocol"),
    ("speaker", lambda: TextContent("hi", annotations=Annotations(["all"])), "expected one of"),  # type: ignore
    ("keys", lambda: TextContent("hi", meta=typing.cast(Any, {5: 6})), "a key that is not text has no JSON form"),
    ("no number", lambda: TextContent("hi", meta={"a": float("nan")}), "a float that is not finite"),
    ("endless", lambda: TextContent("hi", meta=LOOP), "RecursionError"),
    ("picture", lambda: ImageContent(typing.cast(Any, "text"), "image/png"), "expected bytes, got str"),
    ("type", lambda: ImageContent(PNG, typing.cast(Any, None)), "mimeType: expected string, got null"),
    ("no type", lambda: ImageContent(PNG, "png"), "the mime_type of ImageContent must be"),
    ("link", lambda: ResourceLink(name=typing.cast(Any, 5), uri=typing.cast(Any, None)), "expected string, got"),
    ("link, swapped", lambda: ResourceLink("notes://a", "a"), "the uri of a ResourceLink must begin with a scheme"),
    ("size", lambda: ResourceLink("a", "a:b", size=typing.cast(Any, "5")), "size: expected integer, got string"),
    ("embedded", lambda: EmbeddedResource(TextResourceContents(*typing.cast(Any, (5, 5)))), "expected string"),
    ("embedded, no uri", lambda: EmbeddedResource(NO_URI), "the uri of a resource must begin with a scheme"),
    ("no resource", lambda: EmbeddedResource(typing.cast(Any, None)), "expected .*, got NoneType"),
    ("unknown", lambda: UnknownContent({"type": "image"}), "data: missing"),
    ("not even unknown", lambda: UnknownContent(typing.cast(Any, 5)), "expected object, got integer"),
]
NO_URI = TextResourceContents("no uri", "hi")
PLACES: dict[str, Callable[[Any], Any]] = {
    "tool": lambda block: tool_result(block, None, "t", LATEST),
    "list": lambda block: tool_result(["hi", block], None, "t", LATEST),
    "result": lambda block: tool_result(CallToolResult([block]), None, "t", LATEST),
    "structured": lambda block: tool_result(CallToolResult([block], structured_content={}), None, "t", LATEST),
    "failure": lambda block: tool_failure(ToolError([block]), LATEST),
    "prompt": lambda block: prompt_result(block, None, LATEST),
    "message": lambda block: prompt_result([PromptMessage("user", block)], None, LATEST),
    "messages": lambda block: prompt_result(GetPromptResult([PromptMessage("user", block)]), None, LATEST),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("make", "why"), [each[1:] for each in BUILT_WRONG], ids=[each[0] for each in BUILT_WRONG])
def test_content_with_values_of_wrong_types_is_a_bad_result(place: str, make: Callable[[], Any], why: str) -> None:
    with pytest.raises(BadResult, match=why):
        PLACES[place](make())


@pytest.mark.parametrize(
    ("make", "value", "why"),
    [
        (tool_result, lambda: CallToolResult(typing.cast(Any, "text")), "expected .*, got str"),
        (tool_result, lambda: CallToolResult([], is_error=typing.cast(Any, "no")), "isError: expected boolean"),
        (prompt_result, lambda: GetPromptResult([], typing.cast(Any, 5)), "description: expected string"),
        (
            prompt_result,
            lambda: GetPromptResult([PromptMessage(*typing.cast(Any, (5, NO_URI)))]),
            "role: expected string, got integer",
        ),
        (resource_result, lambda: TextResourceContents("no uri", typing.cast(Any, None)), "text: expected string"),
        (resource_result, lambda: NO_URI, "the uri of a resource must begin with a scheme"),
        (resource_result, lambda: [NOTE, NO_URI], "the uri of a resource must begin with a scheme"),
        (resource_result, lambda: ReadResourceResult([NO_URI]), "the uri of a resource must begin with a scheme"),
        (resource_result, lambda: ReadResourceResult([TextResourceContents(*typing.cast(Any, (5, 5)))]), "uri: exp"),
        (resource_result, lambda: BlobResourceContents("a:b", typing.cast(Any, "hi")), "expected bytes, got str"),
        (completion_result, lambda: Completion(typing.cast(Any, [5])), r"values\[0\]: expected string, got integer"),
        (completion_result, lambda: Completion(["a"], total=typing.cast(Any, "5")), "total: expected integer"),
    ],
)
def test_results_with_values_of_wrong_types_are_bad_results(make: Any, value: Any, why: str) -> None:
    with pytest.raises(BadResult, match=why):
        outcome_of(make, value(), LATEST)


def test_tuples_mappings_and_enums_become_plain_json() -> None:
    block = TextContent(
        Word.A,
        annotations=Annotations((Speaker.USER,), priority=Level.ONE),  # type: ignore[arg-type]
        meta=types.MappingProxyType({Word.A: (1, None, 1.5, True)}),
    )
    written = tool_result(CallToolResult((block,)), None, "t", LATEST)["content"][0]
    assert written == {
        "type": "text",
        "text": "a",
        "annotations": {"audience": ["user"], "priority": 1},
        "_meta": {"a": [1, None, 1.5, True]},
    }
    assert type(written["text"]) is type(written["annotations"]["audience"][0]) is str
    assert type(written["annotations"]["priority"]) is int


class Speaker(enum.StrEnum):
    USER = "user"


class Level(enum.IntEnum):
    ONE = 1


@attrs.define(repr=False)
class Unfinished:
    there: int


def outcome_of(make: Any, value: Any, revision: Revision) -> Any:
    match make.__name__:
        case "tool_result":
            return make(value, None, "t", revision)
        case "prompt_result":
            return make(value, None, revision)
        case "resource_result":
            return make(value, "a:b", None, revision)
        case "tool_failure":
            return make(ToolError([value]), revision)
        case _:
            return make(value)


class Odd(collections.UserDict[str, Any]):
    def __iter__(self) -> Any:
        raise KeyError("s3cr3t")


LEAVES = st.sampled_from(
    [
        None, True, 5, "a", "a:b", "image/png", b"a", 1.5, float("inf"), WRONG, Word.A, LOOP, Odd(a=1), {5: 6}, int,
        {"a": 1}, collections.deque(["a"]), range(2), decimal.Decimal(1), memoryview(b"a"), object.__new__(Unfinished),
    ]
)  # fmt: skip
MODELS: list[Callable[..., Any]] = [
    TextContent, ImageContent, AudioContent, EmbeddedResource, ResourceLink, TextResourceContents, UnknownContent,
    BlobResourceContents, PromptMessage, CallToolResult, GetPromptResult, ReadResourceResult, Completion, Annotations,
]  # fmt: skip


def built(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(model: Callable[..., Any], parts: list[Any]) -> Any:
        try:
            return model(*parts[: 1 if model is UnknownContent else 2])
        except (TypeError, UsageError):  # the constructor refuses these values
            return parts

    return st.builds(build, st.sampled_from(MODELS), st.lists(inside, min_size=1, max_size=2)) | st.lists(
        inside, max_size=3
    )


@REVISION
@pytest.mark.parametrize("make", [tool_result, prompt_result, resource_result, completion_result, tool_failure])
@settings(max_examples=60, deadline=None)
@given(value=st.recursive(LEAVES, built, max_leaves=6))
def test_each_object_is_a_json_result_or_a_bad_result(make: Any, revision: Revision, value: Any) -> None:
    try:
        result = outcome_of(make, value, revision)
    except (BadResult, NotInThisRevision):
        return
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_the_error_of_a_value_that_cannot_be_written_does_not_quote_it() -> None:
    with pytest.raises(BadResult, match=r"^the result of the tool 't': writing it failed with KeyError$"):
        tool_result(Odd(a=1), None, "t", LATEST)


# Costs.


def test_text_results_load_no_models() -> None:
    script = (
        "import sys\n"
        "sys.modules['orjson'] = None  # which brings dataclasses along\n"
        "from trio_mcp.core.revisions import LATEST\n"
        "import trio_mcp.core.schema.shapes\n"
        "from trio_mcp.server import OutputSchema, InputRequired, completion_result, prompt_result\n"
        "from trio_mcp.server import resource_result, tool_failure, tool_result\n"
        "output = OutputSchema(str)\n"
        "tool_result('a', output, 't', LATEST), tool_result(None, output, 't', LATEST), tool_failure('a', LATEST)\n"
        "tool_result({'a': 1}, None, 't', LATEST), tool_result(['a'], None, 't', LATEST)\n"
        "prompt_result('a', None, LATEST), resource_result('a', 'a:b', None, LATEST), completion_result(['a'])\n"
        "OutputSchema(int), OutputSchema(list[str]), OutputSchema(str | InputRequired)\n"
        "print([name for name in ('trio_mcp.core.content', 'trio_mcp.core.models', 'trio_mcp.core.codec', 'cattrs',\n"
        "    'jsonschema_rs', 'mimetypes', 'dataclasses') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
