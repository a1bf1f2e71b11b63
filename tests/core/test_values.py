"""Conversion between JSON and Python values by type hints."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import subprocess
import sys
import types
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypedDict, TypeVar, Union

import attrs
import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from tests.core import test_schema as hints
from tests.core.test_schema import HINTS, Colour, Forecast, Level, Movie, Person, Point, Tree
from trio_mcp.core import TextContent, UsageError
from trio_mcp.core.schema import (
    Field,
    Unreadable,
    arguments_shape,
    compile_schema,
    schema_of,
    shape_of,
    to_json_value,
)

T = TypeVar("T")
UTC = datetime.UTC
NOON = datetime.datetime(2026, 1, 31, 12, tzinfo=UTC)
ID = uuid.UUID(int=1)


@dataclasses.dataclass(frozen=True)
class Base:
    a: int


@dataclasses.dataclass(frozen=True)
class Derived(Base):
    secret: str = "s"


@dataclasses.dataclass(frozen=True)
class Outer(Base):
    inner: Base


class One(TypedDict):
    a: int


class Two(TypedDict):
    a: int
    b: bytes


class TextAndNumber(TypedDict):
    b: str
    a: int


class Bytes(TypedDict):
    b: bytes


class Three(TypedDict):
    a: int
    c: typing.NotRequired[bytes]


@dataclasses.dataclass(frozen=True)
class Dog:
    kind: Literal["dog"]
    born: datetime.date


@dataclasses.dataclass(frozen=True)
class Cat:
    kind: Literal["cat"]
    born: str
    lives: int = 9


@dataclasses.dataclass(frozen=True)
class Names:
    """Members with names that generated code of other libraries uses."""

    cl: int
    converter: int
    self_: int = 0


@attrs.frozen
class Even:
    number: int = attrs.field()

    @number.validator
    def _check(self, _: object, value: int) -> None:
        if value % 2:
            raise ValueError(f"odd: {value}")


class Words(TypedDict):
    n: str


@dataclasses.dataclass
class Amount:
    """A stand-in for a pydantic model, which accepts "3" for 3.  `number` is called `n` in JSON."""

    number: float

    model_fields: ClassVar = {"number": None}
    model_computed_fields: ClassVar = {"double": None}

    @property
    def double(self) -> float:
        return 2 * self.number

    @classmethod
    def model_json_schema(cls, mode: str) -> Any:
        return {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        if (number := int(value["n"])) < 0:
            raise ValueError(f"below 0: {number}")
        return cls(number)

    def model_dump(self, *, mode: str, by_alias: bool, include: set[str] | None = None) -> Any:
        assert mode == "json"
        names = [*self.model_fields, *self.model_computed_fields]
        return {
            "n" if name == "number" and by_alias else name: getattr(self, name)
            for name in names
            if include is None or name in include
        }


@dataclasses.dataclass
class SecretAmount(Amount):
    secret: str = "s"

    model_fields: ClassVar = {"number": None, "secret": None}


@dataclasses.dataclass(frozen=True)
class Chain:
    """Each link can be read in two ways, and the first way fails at the last member."""

    inner: ChainA | ChainB | None
    when: datetime.date


@dataclasses.dataclass(frozen=True)
class ChainA(Chain):
    pass


@dataclasses.dataclass(frozen=True)
class ChainB:
    inner: ChainA | ChainB | None
    when: str


Node = typing_extensions.TypeAliasType("Node", "Leaf | Branch")


@dataclasses.dataclass(frozen=True)
class Leaf:
    value: datetime.date


@dataclasses.dataclass(frozen=True)
class Branch:
    left: Node | None
    right: Node | None = None


class Event(TypedDict):
    when: datetime.datetime
    title: typing.NotRequired[str]


class Stamps(NamedTuple):
    first: datetime.date
    second: datetime.date | None = None


MORE: dict[str, Any] = {
    "datetime or text": datetime.datetime | str,
    "date or datetime": datetime.date | datetime.datetime,
    "tagged classes": Dog | Cat,
    "lists of classes": list[Dog] | list[Cat],
    "path or UUID": Union[uuid.UUID, pathlib.Path],  # noqa: UP007
    "recursive union": Node,
    "bounded path or text": Annotated[pathlib.Path, Field(pattern="^/srv/")] | str,
    "bounded, in a union of objects": Annotated[list[Dog], Field(min_length=2)] | list[Cat],
    "names": Names,
    "a TypedDict with a date": Event,
    "a NamedTuple with dates": Stamps,
    "mapping of UUIDs": dict[uuid.UUID, datetime.date],
    "set of dates": set[datetime.date],
    "frozenset of classes": frozenset[Dog],
    "abstract sets": collections.abc.Set[int],
    "mutable sets": collections.abc.MutableSet[int],
    "tuples of tuples": tuple[tuple[datetime.date, int], ...],
    "int or float": int | float,
    "one of several enums": Colour | Level,
    "Literal or text": Literal["a"] | str,
    "Any in a union": Any | int,
    "a mapping of classes or a class": dict[str, Dog] | Dog,
    "PurePath": pathlib.PurePath,
    "an enum of several kinds or a date": hints.Mixed | datetime.date,
    "a Literal of several kinds or bytes": Literal["a", None, 1] | bytes | float,
}
ALL = {**HINTS, **MORE}


# Unions whose alternatives have the same JSON form: the first alternative is used.
AMBIGUOUS = {"Union[str, Path]"}

# Random values of a hint.


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
OFFSETS = st.integers(-14 * 60, 14 * 60).map(lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes)))
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    None: st.none(),
    type(None): st.none(),
    bool: st.booleans(),
    int: st.integers(-(2**53), 2**53),
    float: st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
    str: TEXT,
    bytes: st.binary(max_size=5),
    Any: JSON,
    object: JSON,
    datetime.datetime: st.datetimes(timezones=OFFSETS),
    datetime.date: st.dates(),
    datetime.time: st.times(timezones=OFFSETS),
    uuid.UUID: st.uuids(),
    pathlib.Path: TEXT.map(pathlib.Path),
    pathlib.PurePath: TEXT.map(pathlib.PurePath),
}
BARE: dict[Any, Any] = {list: list[Any], set: set[str], tuple: tuple[Any, ...], dict: dict[str, Any]}
MAKERS: dict[Any, Callable[[Any], Any]] = {
    list: list,
    tuple: tuple,
    collections.abc.Sequence: list,
    set: set,
    collections.abc.MutableSet: set,
    frozenset: frozenset,
    collections.abc.Set: frozenset,
}


def values(hint: Any, depth: int = 3) -> st.SearchStrategy[Any]:
    origin: Any = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is None or (not arguments and hint != tuple[()]):
        return simple(origin or hint, depth)
    if origin is Annotated:
        compiled = compile_schema(schema_of(hint))
        return values(arguments[0], depth).filter(lambda value: not compiled.errors(to_json_value(value, hint)))
    if origin in (Union, types.UnionType):
        return st.one_of([each for member in arguments if not (each := values(member, depth)).is_empty])
    if origin is Literal:
        return st.sampled_from(arguments)
    if str(origin).rpartition(".")[2] in ("Required", "NotRequired", "ReadOnly", "Final"):
        return values(arguments[0], depth)
    found = containers(origin, arguments, depth)
    return objects(hint, depth) if found is None else found


def simple(hint: Any, depth: int) -> st.SearchStrategy[Any]:
    if hint in BARE:
        return values(BARE[hint], depth)
    if isinstance(hint, typing.NewType):
        return values(hint.__supertype__, depth)
    if hint in SCALARS:
        return SCALARS[hint]
    return st.sampled_from(hint) if isinstance(hint, type) and issubclass(hint, enum.Enum) else objects(hint, depth)


def containers(origin: Any, arguments: Any, depth: int) -> st.SearchStrategy[Any] | None:
    if origin is tuple and arguments[1:] != (...,):
        return st.tuples(*[values(each, depth) for each in arguments])
    if origin in MAKERS:
        return arrays(arguments[0], depth, unique=MAKERS[origin] in (set, frozenset)).map(MAKERS[origin])
    if origin in (dict, collections.abc.Mapping):
        inside = values(arguments[1], depth - 1) if depth else st.nothing()
        return st.just({}) if inside.is_empty else st.dictionaries(values(arguments[0], depth), inside, max_size=3)
    return None


def arrays(item: Any, depth: int, unique: bool = False) -> st.SearchStrategy[Any]:
    inside = values(item, depth - 1) if depth else st.nothing()
    return st.just([]) if inside.is_empty else st.lists(inside, max_size=3, unique=unique)


BOUNDED: dict[str, st.SearchStrategy[Any]] = {
    "Annotated bounds": st.sampled_from([2, 4, 6, 8]),
    "Annotated float bounds": st.floats(0.5, 1, exclude_min=True),
    "Annotated text": st.from_regex("a[a-z]{0,4}", fullmatch=True),
    "Annotated by a pattern": st.from_regex("b[a-z]*", fullmatch=True),
    "bounded path or text": st.from_regex("/srv/[a-z]+", fullmatch=True).map(pathlib.Path) | st.just("/etc"),
}


def objects(hint: Any, depth: int) -> st.SearchStrategy[Any]:
    from trio_mcp.core.schema import members_of, resolved_alone, substituted

    kind = typing.get_origin(hint) or hint
    variables = dict(zip(getattr(kind, "__parameters__", ()), typing.get_args(hint), strict=False))
    if hasattr(kind, "__value__"):
        value = resolved_alone(kind.__value__, vars(sys.modules[kind.__module__]), "")
        return values(substituted(value, variables), depth)
    if depth == 0:
        return st.nothing()
    required, optional = {}, {}
    for member in members_of(kind, "") or ():
        into = required if member.required else optional
        into[member.name] = values(substituted(member.hint, variables), depth - 1)
    if any(each.is_empty for each in required.values()):
        return st.nothing()
    optional = {name: each for name, each in optional.items() if not each.is_empty}
    return st.fixed_dictionaries(required, optional=optional).map(lambda made: kind(**made))


@pytest.mark.parametrize("label", ALL)
def test_a_written_value_fits_the_schema_and_is_read_back_equal(label: str, examples: Any) -> None:
    hint = ALL[label]
    compiled, read = compile_schema(schema_of(hint)), shape_of(hint).read

    @examples(25)
    @given(BOUNDED[label] if label in BOUNDED else values(hint))
    def check(value: Any) -> None:
        written = to_json_value(value, hint)
        assert compiled.errors(written) == []
        assert plain(written)
        again = written if read is None else read(written)
        assert again == value or (label in AMBIGUOUS and to_json_value(again, hint) == written)

    check()


def plain(value: Any) -> bool:
    if type(value) is list:
        return all(map(plain, value))
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(plain, value.values()))
    return type(value) in (str, int, float, bool, type(None))


# Checking: the verdict of the schema, without the engine.


ODD = st.none() | st.booleans() | st.integers(-3, 3) | st.integers(2**52, 2**70) | st.just(2**1024)
ODD |= st.floats() | st.sampled_from(["a", "b", "red", "2026-01-31", "dog", "", 1.0, 2.0])
MEMBERS = st.sampled_from(["a", "b", "x", "y", "value", "children", "title", "kind", "born", "red", "inner", "when"])
ODD_JSON = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MEMBERS, inner, max_size=3), max_leaves=6
)


@pytest.mark.parametrize("label", ALL)
def test_the_check_agrees_with_the_schema(label: str, examples: Any) -> None:
    shape = shape_of(ALL[label])
    compiled = compile_schema(shape.schema)
    valid = BOUNDED[label] if label in BOUNDED else values(ALL[label])
    nearly_valid = st.one_of(valid.map(lambda value: to_json_value(value, ALL[label])), ODD_JSON)

    @examples(40)
    @given(nearly_valid | st.lists(nearly_valid, max_size=3) | st.dictionaries(MEMBERS, nearly_valid, max_size=4))
    def check(value: Any) -> None:
        if compiled.can_check(value):  # inside Any the check accepts numbers beyond the range of a double
            assert shape.fits(value) is (not compiled.errors(value))

    check()


@pytest.mark.parametrize(
    ("hint", "json", "fits"),
    [
        (int, 2**1022, True),
        (int, 2**1024, False),
        (int, 1e300, True),
        (int, math.inf, False),
        (float, math.nan, False),
        (float, -(2**1024), False),
        (set[int], [1, 1.0], False),
        (set, [[1], [1]], False),
        (set, [{"a": 1}, {"a": 2}], True),
        (Annotated[int | bytes, Field(ge=3)], 2, False),
        (Annotated[int | bytes, Field(ge=3)], "2", True),
        (Annotated[str | pathlib.Path, Field(min_length=2)], "a", False),
        (Annotated[list[str] | None, Field(max_length=1)], ["a", "b"], False),
        (Annotated[float, Field(multiple_of=0.1)], 0.3, True),
        (Annotated[dict[str, int], Field(max_length=1)], {"a": 1, "b": 2}, False),
    ],
)
def test_numbers_sets_and_bounds_are_checked(hint: Any, json: Any, fits: bool) -> None:
    assert shape_of(hint).fits(json) is fits


def test_ordinary_values_are_checked_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trio_mcp.core.schema.validation", None)
    hint = dict[str, list[Annotated[int, Field(ge=1, lt=9)]] | tuple[Colour, set[str]] | Cat | Literal[1.5] | None]
    shape = shape_of(hint)
    assert shape.fits({"a": [1, 8], "b": ["red", ["x", "y"]], "c": {"kind": "cat", "born": ""}, "d": 1.5, "e": None})
    for wrong in ([9], ["red", ["x", "x"]], {"kind": "cat"}, 1, "x"):
        assert not shape.fits({"a": wrong})


def test_a_check_of_unions_inside_each_other_takes_linear_time() -> None:
    json: Any = {"inner": None, "when": 3}
    for _ in range(60):
        json = {"inner": json, "when": "2026-01-31"}
    assert not shape_of(ChainA | ChainB).fits(json)


def test_json_that_is_nested_too_deep_does_not_fit() -> None:
    json: Any = {"value": 1, "children": []}
    for _ in range(400):
        json = {"value": 1, "children": [json]}
    assert not shape_of(Tree).fits(json)


# Reading.


WITHOUT_READER: list[Any] = [
    str,
    bool,
    None,
    Any,
    object,
    list,
    dict,
    list[str],
    list[list[bool]],
    Sequence[str],
    dict[str, Any],
]
WITHOUT_READER += [
    Mapping[str, list[str]],
    str | None,
    Literal["a", True, None],
    Annotated[str, "Text."],
    list[str | None],
]
WITHOUT_READER += [typing.NewType("Name", str), TypedDict("Plain", {"a": str}), str | list[str] | dict[str, str]]


@pytest.mark.parametrize("hint", WITHOUT_READER, ids=repr)
def test_hints_with_equal_json_and_values_need_no_reader(hint: Any) -> None:
    assert shape_of(hint).read is None


@pytest.mark.parametrize(
    ("hint", "json", "value"),
    [
        (int, 1.0, 1),
        (float, 3, 3.0),
        (Literal[1, 2], 2.0, 2),
        (Literal[True, 1], True, True),
        (Literal[True, 1], 1, 1),
        (Literal[Colour.RED, "blue"], "red", Colour.RED),
        (Literal[Colour.RED, "red"], "red", Colour.RED),
        (Level, 2.0, Level.HIGH),
        (list[int], [1.0, 2], [1, 2]),
        (int | str, 1.0, 1),
        (int | float, 1.5, 1.5),
        (float | int, 3, 3.0),
        (bytes, "aGk=", b"hi"),
        (bytes, "", b""),
        (datetime.datetime, "2026-01-31t12:00:00z", NOON),
        (datetime.datetime, "2026-01-31T14:30:00.0000+02:30", NOON),
        (datetime.date, "2026-01-31", datetime.date(2026, 1, 31)),
        (datetime.time, "12:00:00Z", datetime.time(12, tzinfo=UTC)),
        (uuid.UUID, "00000000-0000-0000-0000-000000000001", ID),
        (tuple, [1], (1,)),
        (set, [1, "a"], {1, "a"}),
        (tuple[int, bytes], [1.0, "aGk="], (1, b"hi")),
        (dict[Colour, int], {"red": 1.0}, {Colour.RED: 1}),
        (Person, {"name": "A", "years": 3, "colour": "blue"}, Person("A", 3, Colour.BLUE)),
        (Point, {"x": 1.0}, Point(1)),
        (Forecast, {"celsius": 3}, Forecast(3.0)),
        (Movie, {"title": "x", "year": 1.0}, {"title": "x", "year": 1}),
        (Names, {"cl": 1, "converter": 2}, Names(1, 2)),
        # Unions in which the JSON type does not decide the alternative.
        (datetime.datetime | str, "2026-01-31T12:00:00Z", NOON),
        (datetime.datetime | str, "tomorrow", "tomorrow"),
        (str | datetime.datetime, "2026-01-31T12:00:00Z", "2026-01-31T12:00:00Z"),
        (Dog | Cat, {"kind": "cat", "born": "long ago"}, Cat("cat", "long ago")),
        (Cat | Dog, {"kind": "dog", "born": "2026-01-31"}, Dog("dog", datetime.date(2026, 1, 31))),
        (list[Dog] | list[Cat], [{"kind": "cat", "born": "x"}], [Cat("cat", "x")]),
        (Base | Derived, {"a": 1, "secret": "x"}, Derived(1, "x")),
        (dict[str, Base] | Base, {"a": {"a": 1}}, {"a": Base(1)}),
        (Literal["a"] | bytes, "a", "a"),
        (Literal["a"] | bytes, "YQ==", b"a"),
        (Even | Base | dict[str, int], {"number": 3}, {"number": 3}),
        (Colour | Literal["green"], "green", "green"),
        (Literal[1, "a"] | bytes | bool, 1.0, 1),
        (One | Two, {"a": 1, "b": "YQ=="}, {"a": 1, "b": b"a"}),
        (Two | Three, {"a": 1, "c": "YQ=="}, {"a": 1, "c": b"a"}),
        (TextAndNumber | Bytes, {"b": "YQ=="}, {"b": b"a"}),
        (list[int] | list[float], [1, 2.5], [1.0, 2.5]),
        (list[int] | set[bytes], ["YQ=="], {b"a"}),
        (list[bool] | list[Level], [2], [Level.HIGH]),
        (list[Event] | tuple[datetime.date, Any], ["2026-01-31", 1], (datetime.date(2026, 1, 31), 1)),
        # Bounds decide, too: a text that breaks the bounds of the path is not a path.
        (Annotated[pathlib.Path, Field(pattern="^/srv/")] | str, "/etc", "/etc"),
        (Annotated[pathlib.Path, Field(pattern="^/srv/")] | str, "/srv/a", pathlib.Path("/srv/a")),
        (Annotated[list[Base], Field(min_length=2)] | list[Derived], [{"a": 1}], [Derived(1)]),
        (Annotated[dict[str, Base], Field(min_length=2)] | dict[str, Derived], {"b": {"a": 1}}, {"b": Derived(1)}),
        (Annotated[dict[str, Base], Field(min_length=1)] | dict[str, Derived], {"b": {"a": 1}}, {"b": Base(1)}),
        (Annotated[int | bytes, Field(ge=3)] | Level, 2, Level.HIGH),
        (Annotated[bytes, "Bytes."] | str, "!", "!"),
        (Node, {"left": {"value": "2026-01-31"}}, Branch(Leaf(datetime.date(2026, 1, 31)))),
        # If two classes can read a value, the one with the schema that it fits is used.
        (list[Amount], [{"n": 3}], [Amount(3)]),
        (Words | Amount, {"n": 3}, Amount(3)),
        (Amount | Words, {"n": "3"}, {"n": "3"}),
    ],
)
def test_a_value_is_read(hint: Any, json: Any, value: Any) -> None:
    assert compile_schema(schema_of(hint)).errors(json) == []
    read = shape_of(hint).read
    assert read is not None
    assert read(json) == value
    assert type(read(json)) is type(value)


SECRET = "s3cr3t"
UUID_WITH_A_LETTER = "00000000-0000-0000-0000-00000000000a"


@pytest.mark.parametrize(
    ("hint", "json", "path", "why"),
    [
        (bytes, SECRET, "", "must be base64"),
        (bytes, "aGk", "", "must be base64"),
        (bytes, "é===", "", "must be base64"),
        (datetime.datetime, "2026-01-31T12:00:00", "", "must be of the form 2026-01-31T12:00:00Z"),
        (datetime.datetime, "2026-01-31", "", "must be of the form 2026-01-31T12:00:00Z"),
        (datetime.datetime, "2026-02-30T12:00:00Z", "", "must be of the form 2026-01-31T12:00:00Z"),
        (datetime.datetime, "2026-01-31T24:00:00Z", "", "must be of the form 2026-01-31T12:00:00Z"),
        (datetime.datetime, "2026-01-31 12:00:00Z", "", "must be of the form 2026-01-31T12:00:00Z"),
        (datetime.datetime, "٢٠٢٦-01-31T12:00:00Z", "", "must be of the form 2026-01-31T12:00:00Z"),
        (datetime.date, "20260131", "", "must be of the form 2026-01-31"),
        (datetime.date, "2026-W05-6", "", "must be of the form 2026-01-31"),
        (datetime.time, "12:00:00", "", "must be of the form 12:00:00Z"),
        (uuid.UUID, "{00000000-0000-0000-0000-000000000001}", "", "must be of the form 8-4-4-4-12 hexadecimal digits"),
        (uuid.UUID, "0" * 32, "", "must be of the form 8-4-4-4-12 hexadecimal digits"),
        (list[bytes], ["", SECRET], "/1", "must be base64"),
        (tuple[int, bytes], [1, SECRET], "/1", "must be base64"),
        (tuple[bytes, ...], ["", SECRET], "/1", "must be base64"),
        (tuple[int, int], [1], "", "must have 2 items"),
        (dict[str, bytes], {"a/b~c": SECRET}, "/a~1b~0c", "must be base64"),
        (dict[str, bytes], {"x" * 100: SECRET}, f"/{'x' * 64}…", "must be base64"),
        (dict[uuid.UUID, str], {SECRET: ""}, f"/{SECRET}", "must be of the form 8-4-4-4-12 hexadecimal digits"),
        (
            dict[uuid.UUID, str],
            {UUID_WITH_A_LETTER: "", UUID_WITH_A_LETTER.upper(): ""},
            "",
            "must not have the same key twice",
        ),
        (set[datetime.datetime], ["2026-01-31T12:00:00Z", "2026-01-31T12:00:00z"], "", "the same item twice"),
        (set, [[1]], "", "must have no items that are arrays or objects"),
        (set, [1, True], "", "the same item twice"),
        (Dog, {"kind": "dog", "born": SECRET}, "/born", "must be of the form 2026-01-31"),
        (Event, {"when": SECRET}, "/when", "must be of the form 2026-01-31T12:00:00Z"),
        (Stamps, {"first": SECRET}, "/first", "must be of the form 2026-01-31"),
        (list[Dog], [{"kind": "dog", "born": SECRET}], "/0/born", "must be of the form 2026-01-31"),
        (Even, {"number": 3}, "", "does not meet the rules of Even"),
        (list[Even], [{"number": 3}], "/0", "does not meet the rules of Even"),
        (Dog | ChainB | None, {"kind": "dog", "born": SECRET}, "", "matches none of the alternatives"),
        (datetime.date | None, SECRET, "", "must be of the form 2026-01-31"),
        (datetime.date | uuid.UUID, SECRET, "", "matches none of the alternatives"),
        (list[datetime.date | uuid.UUID], [SECRET], "/0", "matches none of the alternatives"),
        (Colour, "green", "", "must be one of the allowed values"),
        (list[Amount], [{"n": 3}, {"n": -1}], "/1", "does not meet the rules of Amount"),
        (Amount | Words, {"n": -1}, "", "matches none of the alternatives"),
    ],
)
def test_the_error_names_the_place_and_the_reason_but_not_the_value(hint: Any, json: Any, path: str, why: str) -> None:
    read = shape_of(hint).read
    assert read is not None
    with pytest.raises(Unreadable) as caught:
        read(json)
    assert caught.value.path == path
    assert why in caught.value.why
    assert str(caught.value) == (f"{path}: {caught.value.why}" if path else caught.value.why)
    assert SECRET not in caught.value.why


def test_items_with_the_same_hash_are_refused_before_they_are_compared() -> None:
    few, many = ([step * (2**61 - 1) for step in range(number)] for number in (100, 20_000))
    read_set, read_mapping = shape_of(set[int]).read, shape_of(dict[uuid.UUID, int]).read
    assert read_set is not None
    assert read_mapping is not None
    assert read_set(few) == set(few)
    assert len(read_mapping({str(uuid.UUID(int=each)): 1 for each in few})) == len(few)
    with pytest.raises(Unreadable, match="has too many items with the same hash"):
        read_set(many)
    with pytest.raises(Unreadable, match="has too many items with the same hash"):
        read_mapping({str(uuid.UUID(int=each)): 1 for each in many})


def test_the_exception_of_a_class_is_the_cause_of_the_error() -> None:
    read = shape_of(dict[str, list[Even]]).read
    assert read is not None
    with pytest.raises(Unreadable) as caught:
        read({"a": [{"number": 3}]})
    assert caught.value.path == "/a/0"
    assert str(caught.value.__cause__) == "odd: 3"


def test_unions_inside_each_other_are_read_in_linear_time() -> None:
    json: Any = None
    for _ in range(40):
        json = {"inner": json, "when": "long ago"}
    read = shape_of(ChainA | ChainB).read
    assert read is not None
    made, reads = read(json), 0
    while made is not None:
        assert type(made) is ChainB
        made, reads = made.inner, reads + 1
    assert reads == 40  # with all attempts it would be 2**40


def test_an_alternative_that_failed_once_fails_each_time() -> None:
    json: Any = {"inner": None, "when": 3}
    for _ in range(3):
        json = {"inner": json, "when": "2026-01-31"}
    read = shape_of(ChainA | ChainB).read
    assert read is not None
    with pytest.raises(Unreadable, match="matches none of the alternatives"):
        read(json)
    assert read({"inner": None, "when": "x"}) == ChainB(None, "x")


def test_json_that_is_nested_too_deep_is_unreadable() -> None:
    json: Any = {"value": 1, "children": []}
    for _ in range(400):
        json = {"value": 1, "children": [json]}
    read = shape_of(Tree).read
    assert read is not None
    with pytest.raises(Unreadable, match="is nested too deep to be read"):
        read(json)


def test_json_of_the_depth_of_messages_is_read() -> None:
    tree: Any = {"value": 1, "children": []}
    link: Any = {"pong": None}
    for _ in range(60):
        tree = {"value": 1, "children": [tree]}
        link = {"pong": {"ping": link}}
    read_tree, read_link = shape_of(Tree).read, shape_of(hints.Ping).read
    assert read_tree is not None
    assert read_link is not None
    assert to_json_value(read_tree(tree)) == tree
    assert to_json_value(read_link(link)) == link


# Arguments.


def function_with_dates(a: int, b: datetime.date = datetime.date(2020, 1, 1), *, c: str = "", ctx: Any = None, d=None):  # type: ignore[no-untyped-def]
    raise NotImplementedError


def function_with_plain_types(a: str, ctx: int, b: bool = False, c: Any = None, d=None) -> None:  # type: ignore[no-untyped-def]
    raise NotImplementedError


def test_arguments_are_read_by_name_without_the_defaults() -> None:
    read = arguments_shape(function_with_dates, {"ctx"}).read
    assert read is not None
    arguments = {"a": 1.0, "c": "x", "d": [1]}
    made = read(arguments)
    assert made == {"a": 1, "c": "x", "d": [1]}
    assert type(made["a"]) is int
    assert arguments["a"] == 1.0
    assert read({"a": 1, "b": "2026-01-31"})["b"] == datetime.date(2026, 1, 31)
    with pytest.raises(Unreadable) as caught:
        read({"a": 1, "b": SECRET})
    assert caught.value.path == "/b"
    assert set(arguments_shape(function_with_dates, {"ctx"}).schema["properties"]) == {"a", "b", "c", "d"}


def test_arguments_of_plain_types_need_no_reader() -> None:
    assert arguments_shape(function_with_plain_types, {"ctx"}).read is None
    assert arguments_shape(lambda: None).read is None


# Writing.


class Text(str):
    def __str__(self) -> str:
        return "something else"


class Number(int):
    pass


class Ratio(float):
    pass


class Word(str, enum.Enum):  # noqa: UP042
    A = "a"


class Rows(collections.abc.Sequence[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return [1, 2][index]


@pytest.mark.parametrize(
    ("value", "json"),
    [
        (None, None),
        (True, True),
        (Text("a"), "a"),
        (Number(3), 3),
        (Ratio(1.5), 1.5),
        (Word.A, "a"),
        (Level.LOW, 1),
        (Colour.RED, "red"),
        (b"hi", "aGk="),
        (bytearray(b"hi"), "aGk="),
        (memoryview(b"hi"), "aGk="),
        (NOON, "2026-01-31T12:00:00+00:00"),
        (NOON.date(), "2026-01-31"),
        (NOON.timetz(), "12:00:00+00:00"),
        (ID, "00000000-0000-0000-0000-000000000001"),
        (pathlib.PurePosixPath("/a"), "/a"),
        ((1, (2,)), [1, [2]]),
        ({1}, [1]),
        (frozenset({"a"}), ["a"]),
        (range(2), [0, 1]),
        (collections.deque([1]), [1]),
        (Rows(), [1, 2]),
        ({"a": 1}.keys(), ["a"]),
        (collections.OrderedDict(a=NOON.date()), {"a": "2026-01-31"}),
        (collections.ChainMap({"a": 1}), {"a": 1}),
        ({Colour.RED: 1, pathlib.PurePosixPath("a"): 2, ID: 3}, {"red": 1, "a": 2, f"{ID}": 3}),
        (Point(1, 2), {"x": 1, "y": 2}),
        (Person("A", 3, friends=["B"]), {"name": "A", "years": 3, "colour": "red", "friends": ["B"]}),
        (Forecast(3.5, tags=["x"]), {"celsius": 3.5, "wind": None, "tags": ["x"]}),
        (Derived(1, "x"), {"a": 1, "secret": "x"}),
        ([Base(1), {"b": Point(1)}], [{"a": 1}, {"b": {"x": 1, "y": 0}}]),
        ([SecretAmount(1, "x")], [{"n": 1, "secret": "x", "double": 2}]),
    ],
)
def test_a_value_is_written_by_its_type(value: Any, json: Any) -> None:
    written = to_json_value(value)
    assert written == json
    assert plain(written)


@pytest.mark.parametrize(
    ("hint", "value", "json"),
    [
        # Members that the hint does not have are not written.
        (Base, Derived(1, "x"), {"a": 1}),
        (list[Base], [Derived(1, "x")], [{"a": 1}]),
        (list[Base], (Derived(1, "x"),), [{"a": 1}]),
        (set[Base], {Derived(1, "x")}, [{"a": 1}]),
        (tuple[Base, ...], [Derived(1, "x")], [{"a": 1}]),
        (dict[str, Base], {"a": Derived(1, "x")}, {"a": {"a": 1}}),
        (Base | None, Derived(1, "x"), {"a": 1}),
        (Base | None, None, None),
        (Base | Derived, Derived(1, "x"), {"a": 1, "secret": "x"}),
        (Base | str, Derived(1, "x"), {"a": 1}),
        (Base | Outer, Outer(1, Derived(1, "x")), {"a": 1, "inner": {"a": 1}}),
        (Annotated[typing.NewType("Id", Base) | int, "Text."], Derived(1, "x"), {"a": 1}),  # type: ignore[valid-newtype]
        (Annotated[typing.NewType("Id", Annotated[Base, 1]), 2] | int, Derived(1, "x"), {"a": 1}),  # type: ignore
        (TypedDict("Held", {"base": Base, "n": int}), {"base": Derived(1, "x"), "n": 1}, {"base": {"a": 1}, "n": 1}),
        (TypedDict("Held", {"base": Base}) | None, {"base": Derived(1, "x")}, {"base": {"a": 1}}),
        (Tree, Tree(1, [Tree(2, [])]), {"value": 1, "children": [{"value": 2, "children": []}]}),
        (tuple[int, int], Point(1, 2), [1, 2]),
        (tuple[int, ...], Point(1, 2), {"x": 1, "y": 2}),
        (list[Base] | list[Point], [Derived(1, "x")], [{"a": 1, "secret": "x"}]),
        (datetime.date, NOON.date(), "2026-01-31"),
        (Amount, Amount(1), {"n": 1, "double": 2}),
        (list[Amount], [SecretAmount(1, "x")], [{"n": 1, "double": 2}]),
        (Amount | None, SecretAmount(1, "x"), {"n": 1, "double": 2}),
        (SecretAmount, SecretAmount(1, "x"), {"n": 1, "secret": "x", "double": 2}),
        # A value that does not fit the hint is written by its type.
        (Amount, 3, 3),
        (SecretAmount, Amount(1), {"n": 1, "double": 2}),
        (Base, {"a": 1}, {"a": 1}),
        (Base, None, None),
        (Base | None, 3, 3),
        (list[Base], "text", "text"),
        (list[Base], 3, 3),
        (list[Base], b"hi", "aGk="),
        (dict[str, Base], [1], [1]),
        (TypedDict("Held", {"base": Base}), 3, 3),
        (TypedDict("Held", {"base": Base}), {"other": 1}, {"other": 1}),
        (tuple[int, int], (1, 2, 3), [1, 2, 3]),
        (tuple[int, int], "ab", "ab"),
        (hints.Maybe | Base, Derived(1, "x"), {"a": 1}),
        (Any, Derived(1, "x"), {"a": 1, "secret": "x"}),
    ],
)
def test_a_value_is_written_by_its_hint_if_it_fits(hint: Any, value: Any, json: Any) -> None:
    assert to_json_value(value, hint) == json


def circular_list() -> list[Any]:
    circular: list[Any] = []
    circular.append(circular)
    return circular


class Zone(datetime.tzinfo):
    """An offset with seconds, as local times had before time zones existed."""

    def utcoffset(self, _: Any) -> datetime.timedelta:
        return datetime.timedelta(minutes=9, seconds=21)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (decimal.Decimal(1), "Decimal has no JSON form here; make it text"),
        ({"a": [3j]}, "complex has no JSON form"),
        (object(), "object has no JSON form"),
        (Base, "type has no JSON form"),
        ((each for each in ()), "generator has no JSON form"),
        (float("nan"), "a float that is not finite"),
        ([float("-inf")], "a float that is not finite"),
        (Ratio("inf"), "a float that is not finite"),
        (Amount(float("nan")), "a float that is not finite"),
        ({1: "a"}, "a key of type int has no JSON form: keys must be text"),
        ({None: "a"}, "a key of type NoneType"),
        ({pathlib.PurePosixPath("a"): 1, "a": 2}, "two keys of a dict become the same text"),
        (circular_list(), "list is nested too deep for JSON, or contains itself"),
        (datetime.datetime(2026, 1, 31), "a datetime without an offset has no JSON form; give it a time zone"),
        (datetime.time(12), "a time without an offset"),
        (datetime.datetime(1890, 1, 1, tzinfo=Zone()), "a datetime with seconds in its offset has no JSON form"),
        (TextContent("a"), "TextContent is an object of the protocol, not data"),
        ({"a": [TextContent("a")]}, "TextContent is an object of the protocol"),
    ],
)
def test_a_value_without_a_json_form_is_refused(value: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        to_json_value(value)


def test_a_coroutine_is_refused_with_the_advice_to_await_it() -> None:
    async def answer() -> int:
        return 1

    forgotten = answer()
    for hint in (Any, int, list[int]):
        with pytest.raises(UsageError, match=r"^a coroutine is not a value: await it, and return its result"):
            to_json_value(forgotten, hint)
    forgotten.close()


def test_a_datetime_is_refused_as_a_date() -> None:
    with pytest.raises(UsageError, match=r"expected a date, got a datetime; use its date\(\)"):
        to_json_value([NOON], list[datetime.date])
    assert to_json_value(NOON, datetime.date | datetime.datetime) == "2026-01-31T12:00:00+00:00"


# Hints.


@pytest.mark.parametrize(
    ("hint", "why"),
    [
        (complex, "<class 'complex'> has no JSON form here; use a builtin type"),
        ([int], "has no JSON form here"),
        (list[Callable[[], int]], "has no JSON form here"),
        (hints.Growing[int], "contains ever larger forms of itself; end the recursion"),
    ],
)
def test_hints_without_a_schema_are_refused(hint: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        shape_of(hint)


@pytest.mark.parametrize("hint", ["list[int]", "dict[str, str | None]", "int | None"])
def test_plain_hints_load_no_unnecessary_modules(hint: str) -> None:
    script = (
        "import contextvars, pathlib, sys, trio_mcp.core.schema.hints\n"
        "before = set(sys.modules)\n"
        "from trio_mcp.core.schema import shape_of, to_json_value\n"
        f"shape_of({hint}).read; to_json_value([1], {hint}); to_json_value({{'a': 1}})\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = ("trio_mcp.core.schema.composites", "trio_mcp.core.schema.shapes", "trio_mcp.core.schema.writing")
    assert set(done.stdout.split()) <= set(modules)


def test_classes_are_made_without_cattrs() -> None:
    script = (
        "import dataclasses, sys\n"
        "from trio_mcp.core.schema import shape_of, to_json_value\n"
        "Pair = dataclasses.make_dataclass('Pair', [('a', int), ('b', 'list[int]')])\n"
        "print(shape_of(Pair).read(to_json_value(Pair(1, [2]), Pair)) == Pair(1, [2]), 'cattrs' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
