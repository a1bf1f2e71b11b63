"""The questions of a server to a client, in each revision that has them: forms, pages, sampling and roots."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    TypedDict,
    TypeVar,
    assert_type,
)

import attrs
import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.pairs import opened
from tests.requirements import req
from trio_mcp.core import (
    LATEST,
    LATEST_LEGACY,
    LEGACY,
    MISSING_CLIENT_CAPABILITY,
    REVISIONS,
    URL_ELICITATION_REQUIRED,
    Accepted,
    Declined,
    Dismissed,
    NotDeclared,
    NotInThisRevision,
    Question,
    RemoteProtocolError,
    RequestError,
    Revision,
    Role,
    UsageError,
    codec,
    content,
    forms,
    input_required,
    models,
)
from trio_mcp.core.schema import Field
from trio_mcp.server import Elicit, ElicitUrl, Inquiry, ListRoots, Sample, UrlElicitationRequired, questions
from trio_mcp.transport import Roots

FORMS_SINCE = [each for each in REVISIONS.values() if each.name >= "2025-06-18"]
URLS_SINCE = [each for each in REVISIONS.values() if each.name >= "2025-11-25"]
EVERY = pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
WITH_FORMS = pytest.mark.parametrize("revision", FORMS_SINCE, ids=str)
WITH_URLS = pytest.mark.parametrize("revision", URLS_SINCE, ids=str)
V2025_06 = REVISIONS["2025-06-18"]


class Colour(enum.Enum):
    RED = "red"
    DARK_BLUE = "db"


class Level(enum.Enum):  # the names are like the values, so the form needs no titles
    LOW = "low"
    VERY_HIGH = "very-high"


@dataclasses.dataclass
class Order:
    """An order.

    Args:
        name: Name of the buyer.
    """

    name: str
    count: Annotated[int, Field(ge=1, le=9, title="How many")] = 1
    price: float = 2.5
    gift: bool = False
    colour: Colour = Colour.RED
    level: Level = Level.LOW
    mail: Annotated[str, Field(format="email", min_length=3, max_length=99)] = "a@b"
    note: Annotated[str | None, Field(title="A note")] = None
    size: Literal["S", "L"] | None = None
    day: datetime.date | None = None


@dataclasses.dataclass
class Choices:
    extras: list[Literal["x", "y"]]
    colours: Annotated[set[Colour], Field(min_length=1, max_length=2)] = dataclasses.field(default_factory=set)


@attrs.frozen
class Attrs:
    _hue: Colour
    age: int | None


class Typed(TypedDict):
    name: str
    nick: str | None
    hue: NotRequired[Colour]


class Named(NamedTuple):
    name: str
    ready: bool = True


T = TypeVar("T")


@dataclasses.dataclass
class Boxed(Generic[T]):
    value: T


Alias = NewType("Alias", str)
COLOURS = [{"const": "red", "title": "Red"}, {"const": "db", "title": "Dark blue"}]
FIELDS: dict[str, Any] = {
    "name": {"type": "string", "description": "Name of the buyer."},
    "count": {"type": "integer", "title": "How many", "minimum": 1, "maximum": 9, "default": 1},
    "price": {"type": "number", "default": 2.5},
    "gift": {"type": "boolean", "default": False},
    "colour": {"type": "string", "oneOf": COLOURS, "default": "red"},
    "level": {"type": "string", "enum": ["low", "very-high"], "default": "low"},
    "mail": {"type": "string", "format": "email", "minLength": 3, "maxLength": 99, "default": "a@b"},
    "note": {"type": "string", "title": "A note"},
    "size": {"type": "string", "enum": ["S", "L"]},
    "day": {"type": "string", "format": "date"},
}


def accept(**values: Any) -> dict[str, Any]:
    return {"action": "accept", "content": values}


def form_fields(form: Any, revision: Revision = LATEST) -> dict[str, Any]:
    """The fields of a form as they are sent."""
    properties: dict[str, Any] = Elicit("?", form).params(revision)["requestedSchema"]["properties"]
    return properties


@functools.cache
def official_validator(folder: Path, revision: Revision, *places: str) -> Any:
    """A validator for the first of these places that the official schema of the revision has."""
    whole = json.loads((folder / "schema" / f"{revision}.json").read_text())
    key = "$defs" if "$defs" in whole else "definitions"
    place = next(each for each in places if each.partition("/")[0] in whole[key])
    return jsonschema_rs.validator_for({**whole, "$ref": f"#/{key}/{place}"}, validate_formats=True)


FORM_PARAMS = ("ElicitRequestFormParams", "ElicitRequest/properties/params")
SAMPLE_PARAMS = ("CreateMessageRequestParams", "CreateMessageRequest/properties/params")


# All kinds of questions

ONE_OF_EACH: list[tuple[Inquiry[Any], str]] = [
    (Elicit("?", bool), "2025-06-18"),
    (ElicitUrl("?", "https://a.example/"), "2025-11-25"),
    (Sample("hi", max_tokens=1), "2024-11-05"),
    (ListRoots(), "2024-11-05"),
]


@req("elic-47")
@EVERY
@pytest.mark.parametrize(("question", "since"), ONE_OF_EACH, ids=["form", "url", "sample", "roots"])
def test_a_question_is_refused_in_revisions_without_it(revision: Revision, question: Inquiry[Any], since: str) -> None:
    if revision.name < since:
        with pytest.raises(NotInThisRevision, match=f"{question.method}.* does not exist in {revision}"):
            question.params(revision)
        return
    params = question.params(revision)
    assert params == json.loads(json.dumps(params))
    assert params is not question.params(revision)  # the sender may add members
    if revision.handshake:
        opened(revision).server.request(question.method, params)
    else:
        declared: dict[str, Any] = {"elicitation": {"url": {}, "form": {}}, "sampling": {}, "roots": {}}
        result = input_required(revision, "tools/call", declared, [Question("q", question.method, params)])
        assert result["inputRequests"]["q"] == {"method": question.method, "params": params}


# The question, the declared capabilities, the missing capability, and the first revision with this question.
LACKING: list[tuple[Inquiry[Any], Any, Any, str]] = [
    (Elicit("?", bool), {}, {"elicitation": {"form": {}}}, "2025-06-18"),
    (Elicit("?", bool), {"elicitation": {"url": {}}}, {"elicitation": {"form": {}}}, "2025-11-25"),
    (ElicitUrl("?", "https://a"), {"elicitation": {}}, {"elicitation": {"url": {}}}, "2025-11-25"),
    (ElicitUrl("?", "https://a"), {"elicitation": {"form": {}}}, {"elicitation": {"url": {}}}, "2025-11-25"),
    (Sample("hi", max_tokens=1), {}, {"sampling": {}}, "2024-11-05"),
    (Sample("hi", max_tokens=1, tools=[]), {"sampling": {}}, {"sampling": {"tools": {}}}, "2025-11-25"),
    (
        Sample("hi", max_tokens=1, tool_choice=models.ToolChoice("auto")),
        {"sampling": {"context": {}}},
        {"sampling": {"tools": {}}},
        "2025-11-25",
    ),
    (ListRoots(), {"sampling": {}}, {"roots": {}}, "2024-11-05"),
]


@req("elic-12", "samp-12", "root-11")
@pytest.mark.parametrize(
    ("revision", "question", "declared", "missing"),
    [
        pytest.param(revision, *rest, id=f"{revision}-{number}")
        for number, (*rest, since) in enumerate(LACKING)
        for revision in REVISIONS.values()
        if revision.name >= since
    ],
)
def test_a_question_needs_the_declared_capability(
    revision: Revision, question: Inquiry[Any], declared: Any, missing: Any
) -> None:
    params = question.params(revision)
    if revision.handshake:
        link = opened(revision, declared)
        with pytest.raises(NotDeclared):
            link.server.request(question.method, params)
        link.pump()
        assert link.methods() == []
    else:
        with pytest.raises(RequestError) as caught:
            input_required(revision, "tools/call", declared, [Question("q", question.method, params)])
        assert caught.value.code == MISSING_CLIENT_CAPABILITY
        assert caught.value.data == {"requiredCapabilities": missing}


@req("root-14", "samp-26")
def test_deprecated_questions_work_and_their_docstrings_say_so() -> None:
    for question in (Sample("hi", max_tokens=1), ListRoots()):
        assert question.method in LATEST.input_requests
        question.params(LATEST)
        assert "Deprecated in 2026-07-28" in (type(question).__doc__ or "")


def test_the_module_loads_no_models() -> None:
    code = "import sys, trio_mcp.server.questions as q; q.Elicit; print([m for m in sys.modules if m in %r])"
    heavy = [
        "trio_mcp.core.models",
        "trio_mcp.core.content",
        "trio_mcp.core.codec",
        "trio_mcp.core.schema.shapes",
        "cattrs",
    ]
    done = subprocess.run([sys.executable, "-c", code % heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Forms as they are sent


@req("elic-13", "elic-16", "elic-54")
@WITH_URLS
def test_a_class_becomes_a_flat_form(revision: Revision, shared_schemas: Path) -> None:
    params = Elicit("Which?", Order).params(revision)
    assert params == {
        "message": "Which?",
        "mode": "form",
        "requestedSchema": {"type": "object", "properties": FIELDS, "required": ["name"]},
    }
    several = Elicit("Which?", Choices).params(revision)
    assert several["requestedSchema"] == {
        "type": "object",
        "properties": {
            "extras": {"type": "array", "items": {"type": "string", "enum": ["x", "y"]}},
            "colours": {"type": "array", "items": {"anyOf": COLOURS}, "minItems": 1, "maxItems": 2},
        },
        "required": ["extras"],
    }
    for each in (params, several):
        official_validator(shared_schemas, revision, *FORM_PARAMS).validate(each)


@req("elic-53")
def test_2025_06_18_gets_enum_names_only_boolean_defaults_and_no_mode(shared_schemas: Path) -> None:
    params = Elicit("Which?", Order).params(V2025_06)
    official_validator(shared_schemas, V2025_06, *FORM_PARAMS).validate(params)
    expected = {
        name: {key: each for key, each in field.items() if key != "default" or field["type"] == "boolean"}
        for name, field in FIELDS.items()
    }
    expected["colour"] = {"type": "string", "enum": ["red", "db"], "enumNames": ["Red", "Dark blue"]}
    assert params == {
        "message": "Which?",
        "requestedSchema": {"type": "object", "properties": expected, "required": ["name"]},
    }


@req("elic-53")
def test_2025_06_18_has_no_choice_of_several() -> None:
    with pytest.raises(NotInThisRevision):
        Elicit("?", Choices).params(V2025_06)


KINDS: list[tuple[Any, dict[str, Any], list[tuple[Any, Any]]]] = [
    (bool, {"type": "boolean"}, [(True, True)]),
    (str, {"type": "string"}, [("", "")]),
    (int, {"type": "integer"}, [(3, 3), (3.0, 3)]),
    (float, {"type": "number"}, [(3, 3.0), (0.5, 0.5)]),
    (Alias, {"type": "string"}, [("x", "x")]),
    (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}, [("b", "b")]),
    (Colour, {"type": "string", "oneOf": COLOURS}, [("db", Colour.DARK_BLUE)]),
    (Colour | None, {"type": "string", "oneOf": COLOURS}, [("db", Colour.DARK_BLUE), (None, None)]),
    (Level, {"type": "string", "enum": ["low", "very-high"]}, [("very-high", Level.VERY_HIGH)]),
    (list[Literal["a", "b"]], {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}, [(["b"], ["b"])]),
    (set[Colour], {"type": "array", "items": {"anyOf": COLOURS}}, [(["db"], {Colour.DARK_BLUE}), ([], set())]),
    (tuple[Level, ...], {"type": "array", "items": {"type": "string", "enum": ["low", "very-high"]}}, [([], ())]),
    (Annotated[int, Field(ge=3), "Why"], {"type": "integer", "minimum": 3, "description": "Why"}, [(3, 3)]),
    (datetime.date, {"type": "string", "format": "date"}, [("2026-01-31", datetime.date(2026, 1, 31))]),
]


@req("elic-16", "elic-45")
@pytest.mark.parametrize(("hint", "field", "values"), KINDS, ids=[str(hint) for hint, _, _ in KINDS])
@WITH_URLS
def test_a_single_hint_is_one_field_and_its_answer_is_the_bare_value(
    revision: Revision, hint: Any, field: Any, values: Any, shared_schemas: Path
) -> None:
    question = Elicit("?", hint)
    params = question.params(revision)
    official_validator(shared_schemas, revision, *FORM_PARAMS).validate(params)
    required = {} if (None, None) in values else {"required": ["value"]}
    assert params["requestedSchema"] == {"type": "object", "properties": {"value": field}, **required}
    for written, value in values:
        answer = question.read(accept(value=written))
        assert isinstance(answer, Accepted)
        assert (answer.value, type(answer.value)) == (value, type(value))


@req("elic-54", "elic-57")
def test_a_json_schema_is_sent_as_a_form_and_its_answer_is_a_dict() -> None:
    fields: dict[str, Any] = {
        "old": {"type": "string", "enum": ["a", "b"], "enumNames": ["Ay", "Bee"], "default": "a"},
        "one": {"type": "string", "oneOf": [{"const": "a", "title": "Ay"}]},
        "many": {"type": "array", "items": {"type": "string", "enum": ["x"]}, "uniqueItems": True, "default": ["x"]},
        # Generators of schemas write optional members like this.
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "Maybe"},
    }
    written: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "type": "object",
        "properties": fields,
        "required": ["one", "maybe"],
        "additionalProperties": False,
    }
    question = Elicit("?", written)
    expected = {**fields, "maybe": {"type": "integer", "title": "Maybe"}}
    expected["many"] = {key: each for key, each in fields["many"].items() if key != "uniqueItems"}
    schema = question.params(LATEST)["requestedSchema"]
    assert schema == {"type": "object", "properties": expected, "required": ["one"]}
    assert question.read(accept(one="a", old="b", more=1)) == Accepted({"one": "a", "old": "b"})
    again = Elicit("?", codec.from_json(forms.RequestedSchema, schema))
    assert again.params(LATEST) == question.params(LATEST)
    assert again.read(accept(one="a", many=["x"])) == Accepted({"one": "a", "many": ["x"]})
    fields["one"]["oneOf"] = []  # a later change of the dict does not change the question
    assert question.params(LATEST)["requestedSchema"] == schema


@pytest.mark.parametrize(
    ("form", "content", "value"),
    [
        (Attrs, {"hue": "db"}, Attrs(Colour.DARK_BLUE, None)),
        (Annotated[Attrs, "who"], {"hue": "red", "age": 3}, Attrs(Colour.RED, 3)),
        (Typed, {"name": "N"}, {"name": "N", "nick": None}),
        (Typed, {"name": "N", "nick": "n", "hue": "red"}, {"name": "N", "nick": "n", "hue": Colour.RED}),
        (Named, {"name": "N"}, Named("N")),
        (Boxed[Literal["a"]], {"value": "a"}, Boxed("a")),
        (Order, {"name": "N", "count": 2, "day": "2026-01-31"}, Order("N", 2, day=datetime.date(2026, 1, 31))),
        # A null counts as absent, and other members are ignored.
        (Order, {"name": "N", "note": None, "count": None, "evil": {"x": 1}}, Order("N")),
        (Choices, {"extras": ["y", "x"], "colours": ["db"]}, Choices(["y", "x"], {Colour.DARK_BLUE})),
    ],
)
@req("elic-45")
def test_an_answer_becomes_an_instance_of_the_class(form: Any, content: Any, value: Any) -> None:
    question = Elicit("?", form)
    for _ in range(2):  # an answer is read twice: to check it, and for the handler
        assert question.read({"action": "accept", "content": content}) == Accepted(value)
    assert json.loads(json.dumps(content)) == content


def test_choices_have_titles_for_each_kind_of_class() -> None:
    assert form_fields(Attrs)["hue"] == {"type": "string", "oneOf": COLOURS}
    assert form_fields(Typed)["hue"] == {"type": "string", "oneOf": COLOURS}
    assert form_fields(Annotated[Attrs, "who"])["hue"] == {"type": "string", "oneOf": COLOURS}


class Initials(enum.Enum):
    S = "s"
    XLarge = "xl"
    _odd = "o"


def test_enum_names_become_titles() -> None:
    titles = [option["title"] for option in form_fields(Initials)["value"]["oneOf"]]
    assert titles == ["S", "XLarge", "odd"]


@dataclasses.dataclass
class NoFields:
    pass


def test_a_form_may_have_no_fields_and_an_answer_no_content() -> None:
    question = Elicit("Sure?", NoFields)
    assert question.params(LATEST)["requestedSchema"] == {"type": "object", "properties": {}}
    assert question.read({"action": "accept"}) == Accepted(NoFields())
    assert question.read({"action": "accept", "content": None}) == Accepted(NoFields())


HINTS = st.sampled_from([hint for hint, _, _ in KINDS])


@req("elic-16", "elic-54")
@given(st.lists(HINTS, max_size=5), st.data())
def test_any_flat_class_makes_a_form_that_its_answers_fit(
    shared_schemas: Path, hints: list[Any], data: st.DataObject
) -> None:
    kind: Any = dataclasses.make_dataclass("kind", [(f"m{number}", hint) for number, hint in enumerate(hints)])
    question = Elicit("?", kind)
    values = {hint: choices for hint, _, choices in KINDS}
    drawn = [data.draw(st.sampled_from(values[hint])) for hint in hints]
    answer = question.read(accept(**{f"m{number}": written for number, (written, _) in enumerate(drawn)}))
    assert answer == Accepted(kind(*(value for _, value in drawn)))
    for revision in URLS_SINCE:
        official_validator(shared_schemas, revision, *FORM_PARAMS).validate(question.params(revision))


# Invalid forms


FLAT = "a form is flat: text, numbers, booleans, and choices of one or several strings"


@req("elic-16", "elic-53", "elic-54")
@pytest.mark.parametrize(
    ("form", "why"),
    [
        (Boxed[Order], FLAT),
        (Boxed[list[str]], FLAT),
        (dict[str, int], FLAT),
        (list[Order], FLAT),
        (list[list[Colour]], FLAT),
        (list[Literal[1, 2]], FLAT),
        (Literal[1, 2], FLAT),
        (Literal["a", None], FLAT),
        (str | int, FLAT),
        (str | int | None, FLAT),
        (Colour | str, FLAT),
        (None, FLAT),
        (object, FLAT),
        (Order | None, FLAT),
        (datetime.time, FLAT),
        (bytes, "cannot have contentEncoding in field 'value'; check it in the handler"),
        (Annotated[str, Field(pattern="a+")], "cannot have pattern in field 'value'"),
        (Annotated[int, Field(gt=1)], "cannot have exclusiveMinimum"),
        (Annotated[Colour, Field(pattern="d.*")], "cannot have pattern"),
        (complex, "the form: .* has no JSON form here"),
        ({}, '"type": "object"'),
        ({"type": "object"}, '"properties"'),
        ({"type": "object", "properties": {}, "required": "a"}, 'a list of "required"'),
        ({"type": "object", "properties": {}, "$defs": {}}, "cannot have \\$defs in its root"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "requires 'a', which is not among"),
        ({"type": "object", "properties": {"a": True}}, FLAT),
        ({"type": "object", "properties": {"a": {"anyOf": [True, {"type": "null"}]}}}, FLAT),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"type": "null"}]}}}, FLAT),
        ({"type": "object", "properties": {"a": {"type": ["string", "null"]}}}, FLAT),
        ({"type": "object", "properties": {"a": {"enum": ["a"]}}}, FLAT),
        ({"type": "object", "properties": {"a": {"type": "array"}}}, FLAT),
        ({"type": "object", "properties": {"a": {"type": "string", "title": 5}}}, FLAT),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": [["a"]]}, FLAT),
        ({"type": "object", "properties": {"a": {"type": "string", "minLength": -1}}}, "not valid under"),
        (
            {"type": "object", "properties": {"a": {"type": "string", "maxLength": 1, "default": "ab"}}},
            "default of 'a'",
        ),
    ],
)
def test_an_impossible_form_is_refused_with_advice(form: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Elicit("?", form)


@req("elic-13")
@pytest.mark.parametrize("message", ["", " \n", None, 5])
def test_an_elicitation_has_a_message(message: Any) -> None:
    with pytest.raises(UsageError, match="needs a message"):
        Elicit(message, bool)
    with pytest.raises(UsageError, match="needs a message"):
        ElicitUrl(message, "https://a.example")


def one_field(name: str, field: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: field}}


@req("elic-01", "elic-02")
@pytest.mark.parametrize(
    "name",
    [
        "password",
        "newPassword",
        "api_key",
        "apikey",
        "OPENAI_API_KEY",
        "access-token",
        "client secret",
        "credit_card",
        "Card number",
        "cvv",
    ],
)
def test_a_form_that_asks_for_a_secret_is_refused_in_favour_of_a_url(name: str) -> None:
    for kind in ("string", "integer", "number"):
        with pytest.raises(UsageError, match="use ElicitUrl"):
            Elicit("?", one_field(name, {"type": kind}))
    with pytest.raises(UsageError, match="use ElicitUrl"):
        Elicit("?", one_field("x", {"type": "string", "title": f"Your {name}"}))
    with pytest.raises(UsageError, match="use ElicitUrl"):
        Elicit("?", one_field(name, {"anyOf": [{"type": "string"}, {"type": "null"}]}))
    # A field that cannot hold a secret may have this name.
    assert form_fields(one_field(name, {"type": "boolean"}))
    assert form_fields(one_field(name, {"type": "string", "enum": ["keep", "rotate"]}))


@pytest.mark.parametrize("name", ["password_policy", "secret_name", "token_count", "keyboard", "compass", "monkey"])
def test_a_field_name_that_only_resembles_a_secret_is_allowed(name: str) -> None:
    assert form_fields(one_field(name, {"type": "string"}))


@req("elic-37")
@pytest.mark.parametrize(
    "text",
    ["[here](https://a.example)", "see <https://a.example>", "<a HREF='http://a'>x</a>", "[x]( http://a)"],
)
def test_a_form_has_no_clickable_links(text: str) -> None:
    with pytest.raises(UsageError, match="clickable link; use ElicitUrl"):
        Elicit(text, bool)
    for field in ({"type": "string", "description": text}, {"type": "string", "enum": ["a", text]}):
        with pytest.raises(UsageError, match="field 'x' of a form has a clickable link"):
            Elicit("?", one_field("x", field))


def test_a_form_may_be_about_a_url() -> None:
    assert Elicit("Fetch https://a.example/x (slow)?", bool).params(LATEST)


# Answers


@req("elic-59", "elic-49")
@pytest.mark.parametrize("question", [Elicit("?", bool), ElicitUrl("?", "https://a.example")], ids=["form", "url"])
def test_accept_decline_and_cancel_are_told_apart(question: Inquiry[Any]) -> None:
    def outcome(answer: Any) -> str:
        match question.read(answer):
            case Accepted(value):
                return f"accepted {value}"
            case Declined():
                return "declined"
            case Dismissed():
                return "dismissed"
            case _:
                return "?"

    value = True if isinstance(question, Elicit) else None
    assert outcome(accept(value=True)) == f"accepted {value}"
    # An answer that is not an acceptance has no value, even if it has content.
    assert outcome({"action": "decline", "content": {"value": True}}) == "declined"
    assert outcome({"action": "cancel", "content": {"value": True}}) == "dismissed"


def test_types_follow_the_form() -> None:
    answer = Elicit("?", Order).read(accept(name="N"))
    assert_type(answer, Accepted[Order] | Declined | Dismissed)
    assert_type(Elicit("?", Literal["a"]).read(accept(value="a")), Accepted[Any] | Declined | Dismissed)
    assert_type(ElicitUrl("?", "https://a").read(accept()), Accepted[None] | Declined | Dismissed)
    assert_type(ListRoots().read({"roots": []}), Roots)


@pytest.mark.parametrize("action", [None, "", "accepted", "ACCEPT", "Decline", 1, ["accept"], {}])
def test_the_action_of_an_answer_must_be_one_of_the_three(action: Any) -> None:
    for question in (Elicit("?", bool), ElicitUrl("?", "https://a")):
        for answer in ({"action": action}, {}):
            with pytest.raises(RemoteProtocolError, match="action must be accept, decline or cancel"):
                question.read(answer)


@req("elic-08", "elic-45")
@pytest.mark.parametrize(
    ("form", "content", "why"),
    [
        (bool, "hunter2", "content must be an object"),
        (bool, ["hunter2"], "content must be an object"),
        (bool, None, 'content lacks the member "value"'),
        (bool, {}, 'content lacks the member "value"'),
        (bool, {"value": None}, 'content lacks the member "value"'),
        (bool, {"value": "hunter2"}, "content/value must be of type boolean"),
        (int, {"value": True}, "content/value must be of type integer"),
        (int, {"value": "7"}, "content/value must be of type integer"),
        (int, {"value": 7.5}, "content/value must be of type integer"),
        (str, {"value": {"x": "hunter2"}}, "content/value must be of type string"),
        (Colour, {"value": "hunter2"}, "content/value must match exactly one of the alternatives"),
        (set[Colour], {"value": ["red", "red"]}, "content"),
        (Order, {"name": "N", "count": 10}, "content/count must be at most 9"),
        (Order, {"name": "N", "size": "M"}, 'content/size must be one of ["S", "L"]'),
        (Order, {"name": "N", "mail": "x"}, "content/mail must have at least 3 characters"),
        (Order, {"name": "N", "day": "hunter2"}, "content/day must be of the form"),
        (Order, {"name": 5, "count": 0}, "content/count must be at least 1"),
        (Choices, {"extras": ["x", "hunter2"]}, "content/extras/1 must be one of"),
        (Choices, {"extras": [], "colours": []}, "content/colours must have at least 1 items"),
    ],
)
def test_an_error_about_an_invalid_answer_has_its_path_and_no_values(form: Any, content: Any, why: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        Elicit("?", form).read({"action": "accept", "content": content})
    assert why in str(caught.value)
    assert "hunter2" not in str(caught.value)


# Pages


@req("elic-18", "elic-19", "elic-13", "elic-56")
def test_a_page_has_an_id_only_in_2025_11_25(shared_schemas: Path) -> None:
    question = ElicitUrl("Log in there", "https://a.example/login")
    page = {"mode": "url", "message": "Log in there", "url": "https://a.example/login"}
    assert question.params(LATEST_LEGACY) == {**page, "elicitationId": question.elicitation_id}
    assert question.params(LATEST) == page
    for revision in URLS_SINCE:
        official_validator(shared_schemas, revision, "ElicitRequestURLParams").validate(question.params(revision))


@req("elic-58")
def test_ids_of_pages_are_unique_and_cannot_be_guessed() -> None:
    ids = {ElicitUrl("?", "https://a.example").elicitation_id for _ in range(1000)}
    assert len(ids) == 1000
    assert min(map(len, ids)) >= 20  # 128 bits and more


@req("elic-21")
def test_completion_names_the_question_that_it_completes(shared_schemas: Path) -> None:
    first, second = ElicitUrl("?", "https://a.example"), ElicitUrl("?", "https://a.example")
    params = first.completed_params()
    assert params == {"elicitationId": first.params(LATEST_LEGACY)["elicitationId"]}
    assert params != second.completed_params()
    place = "ElicitationCompleteNotification/properties/params"
    official_validator(shared_schemas, LATEST_LEGACY, place).validate(params)


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example",
        "HTTPS://a.example/x?y=z&state=1#there",
        "https://xn--bcher-kva.example:8443/%C3%BC",
        "https://[2001:db8::1]/",
        "http://localhost:3000/x",
        "http://127.0.0.1/",
        "http://[::1]:80/",
    ],
)
@req("elic-20", "elic-37")
@WITH_URLS
def test_a_page_is_https_or_on_this_machine(revision: Revision, url: str) -> None:
    assert ElicitUrl("?", url).params(revision)["url"] == url


@req("elic-20", "elic-37")
@pytest.mark.parametrize(
    "url",
    [
        None,
        b"https://a.example",
        "",
        "a.example",
        "/login",
        "//a.example/x",
        "https:a.example",
        "https:///x",
        "https://:443/",
        "https://a.example:99999/",
        "https://a.example:x/",
        "https://a.example:0/",
        "https://[::1/",
        "https://a b.example",
        "https://a.example/x y",
        "https://a.example/ü",
        "https://a.example/%zz",
        "https://a.example\\@b.example",
        " https://a.example",
        "https://a.example\n",
        "ht\ntps://a.example",
        "http://a.example",
        "http://localhost.a.example",
        "http://127.0.0.1.a.example",
        "http://a.example/?host=localhost",
        "ftp://localhost",
        "javascript://a.example/%0aalert(1)",
        "data:text/html,x",
        "file:///etc/passwd",
    ],
)
def test_any_other_url_is_refused(url: Any) -> None:
    with pytest.raises(UsageError, match=r"the url to visit (is not a valid URL|must be https)"):
        ElicitUrl("?", url)


@req("elic-36")
@pytest.mark.parametrize(
    "url",
    [
        "https://user:hunter2@a.example/",
        "https://user@a.example/",
        "https://a.example/?access_token=hunter2",
        "https://a.example/?x=1&password=hunter2",
        "https://a.example/?api%5Fkey=hunter2",
        "https://a.example/?sessionToken=",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(UsageError, match="holds credentials") as caught:
        ElicitUrl("?", url)
    assert "hunter2" not in str(caught.value)


@req("elic-26", "elic-27", "elic-28")
def test_an_error_can_ask_for_pages(shared_schemas: Path) -> None:
    first, second = ElicitUrl("First", "https://a.example/1"), ElicitUrl("Then", "https://a.example/2")
    error = UrlElicitationRequired(first, second)
    assert isinstance(error, RequestError)
    assert error.code == URL_ELICITATION_REQUIRED
    assert error.questions == (first, second)
    assert error.data == {"elicitations": [first.params(LATEST_LEGACY), second.params(LATEST_LEGACY)]}
    assert all(each["mode"] == "url" and each["elicitationId"] for each in error.data["elicitations"])
    response = {"jsonrpc": "2.0", "id": 1, "error": {"code": error.code, "message": error.message, "data": error.data}}
    official_validator(shared_schemas, LATEST_LEGACY, "URLElicitationRequiredError").validate(response)
    assert str(UrlElicitationRequired(first, message="Log in")) == "Log in (-32042)"


@req("elic-27")
@pytest.mark.parametrize("wrong", [(), (Elicit("?", bool),), (ElicitUrl("?", "https://a"), "https://b")])
def test_the_error_url_elicitation_required_takes_only_pages(wrong: Any) -> None:
    with pytest.raises(UsageError, match="one ElicitUrl or more, and nothing else"):
        UrlElicitationRequired(*wrong)


@req("elic-56")
def test_the_modern_revision_has_no_url_elicitation_error_and_no_ids() -> None:
    assert LATEST.error_code(URL_ELICITATION_REQUIRED) != URL_ELICITATION_REQUIRED
    assert LATEST.notification(Role.SERVER, "notifications/elicitation/complete") is None
    [question] = UrlElicitationRequired(ElicitUrl("?", "https://a.example")).questions
    assert "elicitationId" not in question.params(LATEST)


# Sampling


def text(said: str) -> content.TextContent:
    return content.TextContent(said)


def message(role: Any, *blocks: Any) -> models.SamplingMessage:
    return models.SamplingMessage(role, list(blocks) if len(blocks) != 1 else blocks[0])


def use(id: str, name: str = "f") -> content.ToolUseContent:
    return content.ToolUseContent(id, name, {})


def result(id: str, **more: Any) -> content.ToolResultContent:
    return content.ToolResultContent(id, [text("r")], **more)


OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOL = models.Tool("f", {"type": "object"}, OBJECT)
ALL_OPTIONS: dict[str, Any] = {
    "max_tokens": 100,
    "system_prompt": "Be brief",
    "temperature": 0.5,
    "stop_sequences": ["END"],
    "model_preferences": models.ModelPreferences([models.ModelHint("small")], speed_priority=0.8),
    "include_context": "none",
    "metadata": {"vendor": {"x": 1}},
}


@req("samp-20")
@EVERY
def test_a_sampling_request_has_all_its_options(revision: Revision, shared_schemas: Path) -> None:
    params = Sample("Hello", **ALL_OPTIONS).params(revision)
    assert params == {
        "messages": [{"role": "user", "content": {"type": "text", "text": "Hello"}}],
        "maxTokens": 100,
        "systemPrompt": "Be brief",
        "temperature": 0.5,
        "stopSequences": ["END"],
        "modelPreferences": {"hints": [{"name": "small"}], "speedPriority": 0.8},
        "includeContext": "none",
        "metadata": {"vendor": {"x": 1}},
    }
    official_validator(shared_schemas, revision, *SAMPLE_PARAMS).validate(params)
    picture: list[Any] = [
        message("user", content.ImageContent(b"\xff", "image/png")),
        message("assistant", text("A dot")),
        "And now?",
    ]
    params = Sample(picture, max_tokens=1).params(revision)
    assert [each["role"] for each in params["messages"]] == ["user", "assistant", "user"]
    official_validator(shared_schemas, revision, *SAMPLE_PARAMS).validate(params)
    assert Sample(picture[0], max_tokens=1).params(revision)["messages"] == params["messages"][:1]


LOOP = [
    message("user", text("Do it")),
    message("assistant", text("I shall"), use("1"), use("2", "g")),
    message("user", result("2"), result("1", structured_content={"n": 1})),
]


@req("samp-14", "samp-15", "samp-18")
@WITH_URLS
def test_a_tool_loop_works_in_revisions_with_tools(revision: Revision, shared_schemas: Path) -> None:
    question = Sample(LOOP, max_tokens=1, tools=[TOOL], tool_choice=models.ToolChoice("required"))
    params = question.params(revision)
    official_validator(shared_schemas, revision, *SAMPLE_PARAMS).validate(params)
    assert params["toolChoice"] == {"mode": "required"}
    assert [tool["name"] for tool in params["tools"]] == ["f"]
    assert [block["toolUseId"] for block in params["messages"][2]["content"]] == ["2", "1"]


@pytest.mark.parametrize("revision", [each for each in LEGACY if each is not LATEST_LEGACY], ids=str)
@pytest.mark.parametrize(
    "question",
    [
        Sample("hi", max_tokens=1, tools=[TOOL]),
        Sample("hi", max_tokens=1, tool_choice=models.ToolChoice("none")),
        Sample(LOOP, max_tokens=1),
        Sample(message("user", text("a"), text("b")), max_tokens=1),
    ],
    ids=["tools", "choice", "results", "blocks"],
)
def test_sampling_options_of_later_revisions_are_refused_and_not_dropped(revision: Revision, question: Any) -> None:
    with pytest.raises(NotInThisRevision):
        question.params(revision)


@req("samp-18", "samp-32")
def test_an_answer_goes_back_as_a_message() -> None:
    answer = Sample("Do it", max_tokens=1, tools=[TOOL]).read(
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "7", "name": "f", "input": {}, "_meta": {"k": "v"}}],
            "model": "m",
            "stopReason": "toolUse",
        }
    )
    follow = Sample(["Do it", answer, message("user", result("7"))], max_tokens=1, tools=[TOOL])
    [_, said, _] = follow.params(LATEST)["messages"]
    assert said["role"] == "assistant"
    assert said["content"] == [{"type": "tool_use", "id": "7", "name": "f", "input": {}, "_meta": {"k": "v"}}]
    with pytest.raises(UsageError, match="the tool uses of the last message have no results"):
        Sample(["Do it", answer], max_tokens=1, tools=[TOOL])


BALANCE = "the message must have one result for each tool use of the message before it"
ALONE = "tool results must be in a user message without other content"


@req("samp-14", "samp-15", "samp-18", "samp-32")
@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([message("assistant", use("1")), message("user", result("1"), text("and"))], rf"messages\[1\]: {ALONE}"),
        ([message("assistant", use("1")), message("assistant", result("1"))], ALONE),
        ([message("user", use("1")), message("user", result("1"))], r"\[0\]: only an assistant message can use tools"),
        ([message("assistant", use("1"), use("2")), message("user", result("1"))], BALANCE),
        ([message("assistant", use("1")), message("user", result("1"), result("1"))], BALANCE),
        ([message("assistant", use("1")), message("user", result("2"))], BALANCE),
        ([message("assistant", use("1")), message("user", text("wait")), message("user", result("1"))], BALANCE),
        ([message("assistant", use("1")), message("assistant", text("wait")), message("user", result("1"))], BALANCE),
        ([message("user", result("1"))], rf"messages\[0\]: {BALANCE}"),
        ([message("assistant", use("1")), message("user", result("1")), message("user", result("1"))], BALANCE),
        ([message("assistant", use("1"))], "the tool uses of the last message have no results"),
    ],
)
def test_each_tool_use_must_have_one_result(messages: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Sample(messages, max_tokens=1)


@req("samp-33")
def test_structured_results_fit_the_output_schema_of_their_tool() -> None:
    def ask(tools: Sequence[models.Tool] | None = (TOOL,), **more: Any) -> Sample:
        return Sample([message("assistant", use("1")), message("user", result("1", **more))], max_tokens=1, tools=tools)

    with pytest.raises(UsageError, match=r"messages\[1\]: structuredContent/n does not fit .* 'f': it must be") as c:
        ask(structured_content={"n": "hunter2"})
    assert "hunter2" not in str(c.value)
    ask(structured_content={"n": 1})
    ask()  # no structured content
    ask(structured_content={"n": "x"}, is_error=True)  # an error has another form
    ask((models.Tool("f", {"type": "object"}), models.Tool("g", {"type": "object"}, OBJECT)), structured_content={})
    ask(None, structured_content={})


@req("samp-07", "samp-20")
@pytest.mark.parametrize(
    ("messages", "options", "why"),
    [
        ([], {}, "needs at least one message"),
        ([message("system", text("x"))], {}, r"messages\[0\].role: expected one of user, assistant"),
        ([models.SamplingMessage("user", [])], {}, r"messages\[0\] has no content"),
        ([5], {}, "expected .*, got int$"),
        (["hi", content.MalformedContent({"role": "user"}, "?")], {}, r"messages\[1\]"),
        ([models.SamplingMessage("user", "hi")], {}, "expected .*, got str$"),  # type: ignore[arg-type]
        ([message("user", content.ResourceLink(name="x", uri="file:///x"))], {}, "expected .*, got ResourceLink$"),
        ([message("user", content.TextContent(5))], {}, "text: expected string"),  # type: ignore[arg-type]
        ("hi", {"max_tokens": 0}, "max_tokens must be at least 1"),
        ("hi", {"max_tokens": -5}, "max_tokens must be at least 1"),
        ("hi", {"max_tokens": True}, "maxTokens: expected integer"),
        ("hi", {"max_tokens": 1.5}, "maxTokens: expected integer"),
        ("hi", {"temperature": "warm"}, "temperature: expected number"),
        ("hi", {"include_context": "all"}, "includeContext: expected one of"),
        ("hi", {"tool_choice": models.ToolChoice("must")}, "toolChoice.mode: expected one of"),  # type: ignore[arg-type]
        ("hi", {"stop_sequences": "END"}, "stopSequences"),
        ("hi", {"metadata": ["x"]}, "metadata: expected object"),
    ],
)
def test_an_invalid_sampling_request_is_refused_when_it_is_created(messages: Any, options: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Sample(messages, **{"max_tokens": 1, **options})


@req("samp-13")
@EVERY
def test_include_context_needs_its_capability_since_2025_11_25(revision: Revision) -> None:
    assert Sample("hi", max_tokens=1).needs(revision) == ()
    assert Sample("hi", max_tokens=1, include_context="none").needs(revision) == ()
    for wanted in ("thisServer", "allServers"):
        question = Sample("hi", max_tokens=1, include_context=wanted)
        assert question.needs(revision) == ((("sampling", "context"),) if revision in URLS_SINCE else ())
    assert "includeContext" not in Sample("hi", max_tokens=1).params(revision)  # absent by default
    assert ListRoots().needs(revision) == ()


@req("samp-21")
def test_each_sampling_request_has_its_own_messages() -> None:
    history = [message("user", text("one"))]
    tools = [TOOL]
    first = Sample(history, max_tokens=1, tools=tools)
    history.append(message("assistant", text("two")))
    tools.clear()
    second = Sample("three", max_tokens=1)
    assert [each["content"]["text"] for each in first.params(LATEST)["messages"]] == ["one"]
    assert len(first.params(LATEST)["tools"]) == 1
    assert [each["content"]["text"] for each in second.params(LATEST)["messages"]] == ["three"]


@req("samp-07", "samp-25")
@pytest.mark.parametrize("stop", [None, "endTurn", "stopSequence", "maxTokens", "toolUse", "content_filter", ""])
def test_an_answer_of_the_model_may_stop_for_any_reason(stop: str | None) -> None:
    said = {"role": "assistant", "content": {"type": "text", "text": "Hi"}, "model": "m"}
    answer = Sample("hi", max_tokens=1).read({**said, "stopReason": stop} if stop is not None else said)
    assert_type(answer, models.CreateMessageResult)
    assert (answer.role, answer.blocks, answer.model, answer.stop_reason) == ("assistant", [text("Hi")], "m", stop)


@req("samp-07", "samp-10")
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({}, "CreateMessageResult: model: missing|CreateMessageResult: role: missing"),
        ({"role": "system"}, "role: expected one of user, assistant"),
        ({"content": "hunter2"}, "content: expected"),
        ({"content": {"type": "text", "text": ["hunter2"]}}, "content.text: expected string"),
        ({"content": {"type": "image", "data": "hunter2!", "mimeType": "x"}}, "content.data: expected base64"),
        ({"content": [{"type": "text", "text": "x"}, "hunter2"]}, r"content\[1\]: expected"),
        ({"content": [{"type": "tool_use", "id": 1, "name": "hunter2", "input": {}}]}, r"content\[0\].id: expected"),
        ({"content": [{"type": "resource", "resource": {"uri": "hunter2"}}, {"text": "hunter2"}]}, r"content\[1\]"),
        ({"model": None}, "model: expected string"),
        ({"stopReason": 5}, "stopReason: expected string"),
    ],
)
def test_an_error_about_an_invalid_message_has_its_path_and_no_values(answer: Any, why: str) -> None:
    good = {"role": "assistant", "content": {"type": "text", "text": "hunter2"}, "model": "m"}
    with pytest.raises(RemoteProtocolError, match=why) as caught:
        Sample("hi", max_tokens=1).read({**good, **answer} if answer else {})
    assert "hunter2" not in str(caught.value)


@req("samp-10")
def test_the_repr_of_a_question_hides_its_text() -> None:
    for question in (
        Sample("hunter2", max_tokens=1, system_prompt="hunter2"),
        Elicit("hunter2", bool),
        ElicitUrl("hunter2", "https://hunter2.example"),
    ):
        assert "hunter2" not in f"{question} {question!r}"


# Roots


@req("root-08")
@EVERY
def test_invalid_roots_are_skipped(revision: Revision) -> None:
    question = ListRoots()
    assert question.params(revision) == {}
    roots = question.read({"roots": [{"uri": "file:///a", "name": "A"}, 5, {"name": "x"}, {"uri": "file:///b"}]})
    assert isinstance(roots, Roots)
    assert [(root.uri, root.name) for root in roots] == [("file:///a", "A"), ("file:///b", None)]
    assert list(question.read({"roots": []})) == []


@pytest.mark.parametrize("answer", [{}, {"roots": None}, {"roots": {}}, {"roots": "file:///a"}])
def test_an_answer_without_roots_is_an_error(answer: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="roots"):
        ListRoots().read(answer)


def test_all_questions_are_offered() -> None:
    offered = {getattr(questions, name) for name in questions.__all__}
    assert {type(question) for question, _ in ONE_OF_EACH} < offered
