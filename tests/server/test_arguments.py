"""Arguments of handlers: a fast check, the validation engine if it fails, and the conversion to the hinted types."""

from __future__ import annotations

import datetime
import enum
import sys
from typing import Annotated, Any, Literal, NewType, Optional, TypedDict

import attrs
import pytest

from tests.requirements import req
from trio_mcp.core import UsageError
from trio_mcp.core.schema import compile_schema
from trio_mcp.server import Arguments, BadArguments, arguments_of, text_arguments, typed


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


def typed_arguments(function: Any) -> Arguments:
    handler = typed(function)
    return arguments_of(function, handler)


# Conversion.


def forecast(city: str, days: int = 3, *, since: datetime.date | None = None, size: Size = Size.SMALL) -> None: ...


@req("tool-06")
def test_arguments_are_converted_to_the_types_of_the_function() -> None:
    arguments = typed_arguments(forecast)
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
        # Invalid, but not by the schema.
        ({"city": "Oslo", "since": "yesterday"}, ["/since: must be a date, such as 2025-06-18"]),
    ],
)
def test_a_problem_is_reported_with_its_place_and_without_the_value(given: Any, problems: list[str]) -> None:
    with pytest.raises(BadArguments) as caught:
        typed_arguments(forecast).read(given)
    if "since" not in given:
        assert caught.value.problems == problems
    assert [each.partition(":")[0] for each in caught.value.problems] == [each.partition(":")[0] for each in problems]
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert "yesterday" not in str(caught.value)


def test_a_given_schema_is_checked_by_the_engine_only() -> None:
    members = {"n": {"type": "string", "enum": ["a", 1]}, "free": True}
    schema = {"type": "object", "properties": members, "additionalProperties": False}
    arguments = Arguments(schema, compiled=compile_schema(schema))
    assert arguments.read({"n": "a", "free": 1}) == {"n": "a", "free": 1}
    assert not arguments.fit({"n": 1})
    with pytest.raises(BadArguments, match=r"^/n: must be of type string, not an integer$"):
        arguments.read({"n": 1})


def test_valid_arguments_do_not_load_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = typed_arguments(forecast)
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
def test_text_arguments_have_a_schema_of_strings() -> None:
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
def test_hints_of_text_arguments_other_than_text_are_refused(hint: Any) -> None:
    def greet(name: Any) -> None: ...

    greet.__annotations__["name"] = hint
    with pytest.raises(
        UsageError,
        match=r"^parameter 'name' of .*greet: the variables are text; make it str, str \| None, a Literal of strings "
        r"or an Enum of strings, and convert it in the function$",
    ):
        text_arguments(greet, typed(greet), "the variables")
