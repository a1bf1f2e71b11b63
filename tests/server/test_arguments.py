"""Arguments: seen to be right quickly, judged where that does not do, and made into what functions take."""

from __future__ import annotations

import datetime
import enum
import sys
from typing import Annotated, Any, Literal, NewType, Optional, TypedDict

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import Json, UsageError
from trio_mcp.core.schema import Field, compile_schema, parameters_schema, schema_of
from trio_mcp.server import Arguments, BadArguments, arguments_of, text_arguments, typed

# Calls show the result of the check, and not whether the quick way was taken.
from trio_mcp.server.arguments import _quick_check


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


class Level(enum.IntEnum):
    LOW = 1


class Point(TypedDict):
    x: int
    y: float


@attrs.frozen
class Line:
    points: list[Point]
    size: Size = Size.SMALL
    label: str | None = None


Name = NewType("Name", str)


def of(function: Any) -> Arguments:
    handler = typed(function)
    return arguments_of(function, handler, parameters_schema(function, handler.skip))


# The quick check.

HINTS: list[Any] = [
    str, int, float, bool, None, Any, object, list, dict, bytes, datetime.datetime,
    str | None, int | str, Literal["a", "b"], Literal["a", None], Literal[1, 2], Size, Level,
    list[str], list[int | None], list[list[bool]], set[str], tuple[int, ...], tuple[int, str], dict[str, int],
    Point, Line, list[Line], Annotated[str, "said"], Annotated[int, Field(ge=1)], Annotated[str, Field(title="T")],
]  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.integers(2**52, 2**70)
SCALARS |= st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(["a", "b", "s", "l", "x", ""])
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "y", "points", "size", "label", "z"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("hint", HINTS, ids=repr)
@settings(max_examples=60)
@given(data=st.data())
def test_what_the_quick_check_passes_fits_the_schema(hint: Any, data: st.DataObject) -> None:
    schema = {"type": "object", "properties": {"it": schema_of(hint)}, "additionalProperties": False}
    quick = _quick_check(schema)
    value = {"it": data.draw(st.fixed_dictionaries({"x": JSON, "y": JSON}) if hint is Point else JSON)}
    if quick is not None and quick(value):
        assert not compile_schema(schema).errors(value)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (str, "a"),
        (int, 3),
        (float, 0.5),
        (float, 3),
        (bool, False),
        (None, None),
        (Any, {"anything": []}),
        (list, [1]),
        (dict, {}),
        (str | None, None),
        (Literal["a", "b"], "b"),
        (Size, "s"),
        (list[str], ["a", "b"]),
        (list[int | None], [1, None]),
        (Point, {"x": 1, "y": 2}),
        (Line, {"points": [{"x": 1, "y": 2.5}]}),
        (Annotated[str, Field(title="T", description="D", header="City")], "a"),
    ],
    ids=str,
)
def test_ordinary_arguments_are_seen_to_be_right_without_the_engine(hint: Any, value: Json) -> None:
    quick = _quick_check(schema_of(hint))
    assert quick is not None
    assert quick(value)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (str, 1),
        (int, True),
        (int, 1.0),
        (int, 2**53 + 1),
        (float, "1"),
        (float, 1e300),
        (bool, 1),
        (None, 0),
        (list, {}),
        (dict, []),
        (str | None, 1),
        (Literal["a", "b"], ["a"]),
        (Literal["a", "b"], "c"),
        (list[str], ["a", 1]),
        (list[str], "ab"),
        (Point, {"x": 1}),
        (Point, {"x": 1, "y": 2, "z": 3}),
        (Point, {"x": 1, "y": "2"}),
        (Point, [1, 2]),
    ],
    ids=str,
)
def test_what_the_quick_check_is_not_sure_of_is_left_to_the_engine(hint: Any, value: Json) -> None:
    quick = _quick_check(schema_of(hint))
    assert quick is not None
    assert not quick(value)


@pytest.mark.parametrize(
    "hint", [set[str], tuple[int, str], dict[str, int], Literal[1, 2], Annotated[int, Field(ge=1)]], ids=str
)
def test_schemas_that_say_more_have_no_quick_check(hint: Any) -> None:
    for schema in (schema_of(hint), schema_of(list[hint]), schema_of(hint | None)):
        assert _quick_check(schema) is None
        assert _quick_check({"type": "object", "properties": {"it": schema}, "additionalProperties": False}) is None


# Reading.


def forecast(city: str, days: int = 3, *, since: datetime.date | None = None, size: Size = Size.SMALL) -> None: ...


@req("tool-06")
def test_arguments_become_what_the_function_takes() -> None:
    arguments = of(forecast)
    assert arguments.read({"city": "Oslo"}) == {"city": "Oslo"}
    assert arguments.read({"city": "Oslo", "days": 1.0, "since": "2025-06-18", "size": "l"}) == {
        "city": "Oslo",
        "days": 1,
        "since": datetime.date(2025, 6, 18),
        "size": Size.LARGE,
    }


@req("tool-06")
@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ({}, ['arguments: lacks the member "city"']),
        ({"city": 1}, ["/city: must be of type string, not an integer"]),
        ({"city": "Oslo", "days": "3"}, ["/days: must be of type integer, not a string"]),
        ({"city": "Oslo", "days": True}, ["/days: must be of type integer, not a boolean"]),
        ({"city": "Oslo", "dayz": 1}, ['/dayz: is not allowed; the allowed names are "city", "days", "since", "size"']),
        ({"city": None, "size": "m"}, ["/city: must be of type string, not null", '/size: must be one of ["s", "l"]']),
        # What no schema says.
        ({"city": "Oslo", "since": "yesterday"}, ["/since: must be a date, such as 2025-06-18"]),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_without_the_value(given: Any, problems: list[str]) -> None:
    with pytest.raises(BadArguments) as caught:
        of(forecast).read(given)
    if "since" not in given:
        assert caught.value.problems == problems
    assert [each.partition(":")[0] for each in caught.value.problems] == [each.partition(":")[0] for each in problems]
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert "yesterday" not in str(caught.value)


def test_a_schema_of_others_is_judged_by_the_engine_alone() -> None:
    members = {"n": {"type": "string", "enum": ["a", 1]}, "free": True}
    schema = {"type": "object", "properties": members, "additionalProperties": False}
    arguments = Arguments(schema, compiled=compile_schema(schema))
    assert arguments.read({"n": "a", "free": 1}) == {"n": "a", "free": 1}
    assert not arguments.fit({"n": 1})
    with pytest.raises(BadArguments, match=r"^/n: must be of type string, not an integer$"):
        arguments.read({"n": 1})


def test_good_arguments_do_not_load_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = of(forecast)
    monkeypatch.setitem(sys.modules, "jsonschema_rs", None)
    assert arguments.fit({"city": "Oslo"})
    assert arguments.read({"city": "Oslo", "size": "s"})["size"] is Size.SMALL
    with pytest.raises(ImportError):
        arguments.read({"city": 1})


# Text.


def review(
    code,  # type: ignore[no-untyped-def]
    anything: Any,
    language: str = "python",
    tone: Literal["kind", "harsh"] | None = None,
    size: Size = Size.SMALL,
    name: Name = Name("me"),
    note: Annotated[Optional[str], "a note"] = None,  # noqa: UP045
) -> None: ...


@req("prm-17")
def test_arguments_that_are_text_have_a_schema_of_texts() -> None:
    arguments = text_arguments(review, typed(review), "the arguments of a prompt")
    properties = arguments.schema["properties"]
    assert properties["code"] == properties["anything"] == {"type": "string"}
    assert arguments.schema["required"] == ["code", "anything"]
    assert arguments.read({"code": "x", "anything": "y", "size": "l"}) == {
        "code": "x",
        "anything": "y",
        "size": Size.LARGE,
    }
    with pytest.raises(BadArguments, match=r"^/code: must be of type string, not an integer$"):
        arguments.read({"code": 1, "anything": "y"})
    with pytest.raises(BadArguments, match=r"^/tone: "):
        arguments.read({"code": "", "anything": "", "tone": "sad"})


@req("prm-17")
@pytest.mark.parametrize("hint", [int, bytes, list[str], str | int, Literal["a", 1], Level, Line, datetime.date, None])
def test_other_hints_than_text_are_refused(hint: Any) -> None:
    def greet(name: Any) -> None: ...

    greet.__annotations__["name"] = hint
    with pytest.raises(
        UsageError,
        match=r"^parameter 'name' of .*greet: the variables are text; make it str, str \| None, a Literal of strings "
        r"or an Enum of strings, and convert it in the function$",
    ):
        text_arguments(greet, typed(greet), "the variables")
