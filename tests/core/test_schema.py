"""From type hints to JSON Schema.

The schemas themselves stand in golden_schemas.json, one for each hint in `HINTS` and each function in `FUNCTIONS`.
After a change that is meant to alter them: ``python -m tests.core.test_schema``, and read the difference.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import functools
import json
import math
import pathlib
import re
import typing
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, NotRequired, Optional, TypedDict, TypeVar, Union

import attrs
import jsonschema_rs
import pytest
import typing_extensions

from tests.requirements import req
from trio_mcp.core import ABSENT, UsageError
from trio_mcp.core.schema import (
    Description,
    Field,
    alternatives_of,
    arguments_shape,
    check_input_schema,
    compile_schema,
    describe,
    hint_of,
    schema_of,
)

if typing.TYPE_CHECKING:
    from somewhere import Context  # type: ignore[import-not-found]

GOLDEN = pathlib.Path(__file__).with_name("golden_schemas.json")
T = TypeVar("T")


# Hints of these classes are text, because of the import at the top.  The functional forms below have the objects.


class Colour(enum.Enum):
    """How it looks."""

    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(enum.Enum):
    WORD = "word"
    NUMBER = 1
    NOTHING = None


class Movie(TypedDict):
    """A film."""

    title: Annotated[str, "What it is called."]
    year: NotRequired[int]
    stars: Annotated[NotRequired[int], Field(ge=1, le=5)]


class Partial(TypedDict, total=False):
    a: typing.Required[int]
    b: Annotated[NotRequired[str], "May be missing."]
    c: typing_extensions.ReadOnly[float]


class PartialChild(Partial):
    d: bool


class Point(NamedTuple):
    x: int
    y: int = 0


@dataclasses.dataclass
class Forecast:
    """The weather of one day.

    Attributes:
        celsius: At noon.
        wind: No code reads this line.
    """

    celsius: float
    wind: Annotated[float | None, "In metres per second."] = None
    tags: list[str] = dataclasses.field(default_factory=list)
    seen: int = dataclasses.field(default=0, init=False)
    limit: typing.ClassVar[int] = 3


@dataclasses.dataclass
class Undocumented:
    a: int


@attrs.define
class Person:
    _name: str
    age: int = attrs.field(default=18, alias="years")
    colour: Colour = Colour.RED
    friends: list[str] = attrs.Factory(list)
    seen: int = attrs.field(default=0, init=False)


@dataclasses.dataclass
class Tree:
    """A tree."""

    value: int
    children: list[Tree]


@dataclasses.dataclass
class Ping:
    pong: Pong | None


@dataclasses.dataclass
class Pong:
    ping: Ping


@dataclasses.dataclass
class Loop:
    through: list[Through]
    again: list[Loop]


@dataclasses.dataclass
class Holder:
    first: Tree
    second: Annotated[Tree, "Another one."]


@dataclasses.dataclass
class Box(Generic[T]):
    content: T
    more: list[T]
    inner: Box[T] | None = None


@dataclasses.dataclass
class Everything:
    movie: Movie
    point: Point
    person: Person
    boxes: dict[str, Box[int]]


Count = typing.NewType("Count", int)
Email = typing.NewType("Email", Annotated[str, Field(format="email")])  # type: ignore[valid-newtype]
Loose = attrs.make_class("Loose", {"a": attrs.field(), "b": attrs.field(type=int, default=1)})
Pair = NamedTuple("Pair", [("left", int), ("right", str)])  # noqa: UP014
Record = TypedDict("Record", {"not a name": int, "class": str})
Old = collections.namedtuple("Old", ["a", "b"])
Json = typing_extensions.TypeAliasType("Json", "bool | float | str | list[Json] | dict[str, Json] | None")
Few = typing_extensions.TypeAliasType("Few", list[T], type_params=(T,))  # type: ignore[misc]
Other = typing_extensions.TypeAliasType("Other", Tree)
HERE = {"__module__": __name__}
Maybe = typing_extensions.TypeAliasType("Maybe", int | None)
Through = typing_extensions.TypeAliasType("Through", "Loop")
Other_Tree = dataclasses.make_dataclass("Tree", [("left", "Other_Tree | None"), ("tree", Tree)], namespace=HERE)
Tree2 = dataclasses.make_dataclass("Tree2", [("again", "Tree2 | None"), ("other", Other_Tree)], namespace=HERE)


@dataclasses.dataclass
class Ge:
    """A stand-in for the classes of annotated_types."""

    ge: Any


@dataclasses.dataclass
class Len:
    min_length: int = 0
    max_length: int | None = None


class FieldInfo:
    """A stand-in for the FieldInfo of pydantic, which keeps the bounds in a list of objects."""

    def __init__(self, *bounds: Any, default: Any = ..., description: str | None = None) -> None:
        self.default = default
        self.description = description
        self.metadata = list(bounds)


class Unit:
    title = "A class is no note."


class Marker:
    """Metadata of another library, although some of its names are the same."""

    title = 3
    pattern = staticmethod(len)


HINTS: dict[str, Any] = {
    "None": None,
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "bytes": bytes,
    "Any": Any,
    "object": object,
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "UUID": uuid.UUID,
    "Path": pathlib.Path,
    "list": list,
    "List": typing.List,  # noqa: UP006
    "list[Any]": list[Any],
    "list[int]": list[int],
    "list[list[str]]": list[list[str]],
    "Sequence[int]": collections.abc.Sequence[int],
    "set": set,
    "set[str]": set[str],
    "frozenset[int]": frozenset[int],
    "tuple": tuple,
    "Tuple": typing.Tuple,  # noqa: UP006
    "tuple[()]": tuple[()],
    "tuple[int, str]": tuple[int, str],
    "tuple[int, ...]": tuple[int, ...],
    "dict": dict,
    "dict[str, Any]": dict[str, Any],
    "dict[str, int]": dict[str, int],
    "dict[Colour, int]": dict[Colour, int],
    "dict[Literal, list[int]]": dict[Literal["a", "b"], list[int]],
    "Mapping[str, bytes]": collections.abc.Mapping[str, bytes],
    "Optional[int]": Optional[int],  # noqa: UP045
    "None | int": None | int,
    "int | str": int | str,
    "Union[str, Path]": Union[str, pathlib.Path],  # noqa: UP007
    "int | str | None": int | str | None,
    "list[int | None]": list[int | None],
    "Optional[Movie]": Movie | None,
    "str | Json": Union[Annotated[str, "Text."], Json],  # noqa: UP007
    "Literal['a']": Literal["a"],
    "Literal['a', 'b']": Literal["a", "b"],
    "Literal[1, 'a', None]": Literal[1, "a", None],
    "Literal[True, 1]": Literal[True, 1],
    "Literal[Colour.RED]": Literal[Colour.RED],
    "Enum of str": Colour,
    "IntEnum": Level,
    "Enum of several": Mixed,
    "TypedDict": Movie,
    "TypedDict, not total": Partial,
    "TypedDict, inherited": PartialChild,
    "TypedDict, functional": Record,
    "NamedTuple": Point,
    "NamedTuple, functional": Pair,
    "namedtuple": Old,
    "dataclass": Forecast,
    "dataclass without docstring": Undocumented,
    "attrs": Person,
    "attrs without hints": Loose,
    "recursive": Tree,
    "recursive, each other": Ping,
    "recursive, in a list": list[Tree],
    "recursive, used twice": Holder,
    "recursive, described": Annotated[Tree, "The root."],
    "recursive, by an alias": Other,
    "recursive, one name": Tree2,
    "generic": Box[str],
    "generic of a union": Box[int | None],
    "nested": Everything,
    "recursive, an alias and its class": Through,
    "alias": Json,
    "alias, in a union": str | Maybe,
    "alias, generic": Few[int],
    "NewType": Count,
    "NewType of Annotated": Email,
    "Final": Final[int],
    "Annotated description": Annotated[int, "How many."],
    "Annotated bounds": Annotated[int, Field(ge=1, lt=10, multiple_of=2)],
    "Annotated float bounds": Annotated[float, Field(gt=0.5, le=1)],
    "Annotated text": Annotated[str, Field(min_length=1, max_length=5, pattern="^a")],
    "Annotated list": Annotated[list[int], Field(min_length=1, max_length=5)],
    "Annotated mapping": Annotated[dict[str, int], Field(min_length=1)],
    "Annotated optional": Annotated[int | None, Field(ge=1), "Perhaps."],
    "Annotated items": list[Annotated[int, Field(ge=1)]],
    "Annotated twice": Annotated[Annotated[str, "Lost."], Field(title="Name", description="Kept.", format="email")],
    "Annotated header": Annotated[str, Field(header="Region")],
    "Annotated by others": Annotated[int, Ge(3), Unit, Marker(), object()],
    "Annotated by others, sizes": Annotated[set[int], Len(1, 3)],
    "Annotated by a pattern": Annotated[str, re.compile("^b")],
}


def nothing() -> None:
    pass


def forecast(city: str, days: int = 3, *, ctx: Context, exact: bool = False) -> Forecast:
    """The forecast for a city.

    For as many days as you like.

    Args:
        city: Where, as people
            call it: a name.
        days (int): How many.

    Returns:
        The weather.
    """
    raise NotImplementedError


def numpy_style(a, b: Annotated[int, "Not from the docstring."] = 1, c: int | None = None, d: int = None):  # type: ignore # noqa: RUF013
    """Add.

    Parameters
    ----------
    a, d : int
        The first

        and more.
    b : int
        The second.

    Returns
    -------
    int
        The sum.
    """


def sphinx_style(a: int, colour: Colour = Colour.BLUE, ratio: float = float("inf"), sizes: tuple[int, ...] = (1, 2)):  # type: ignore
    """Add.

    :param int a: The first
        and more.
    :param colour: See :class:`Colour`.
    :type ratio: float
    :returns: The sum.
    """


def defaults(
    a: str = "",
    b: list[Any] = [nothing],  # noqa: B006
    c: Person = None,  # type: ignore
    d: list[Colour] = [Colour.RED],  # noqa: B006
    e: Level = Level.LOW,
) -> None: ...


def recursive(tree: Tree, other: Tree | None = None) -> None: ...


class Service:
    """Adds."""

    def __init__(self, start: int, step: Annotated[int, "How far."] = 1) -> None:
        pass

    def method(self, a: int) -> str:
        """Do it."""
        return ""

    def __call__(self, b: str) -> None:
        """Call it."""


@functools.wraps(forecast)
def wrapped(*args: Any, **kwargs: Any) -> Any: ...


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "nothing": (nothing, ()),
    "Google style": (forecast, ("ctx",)),
    "NumPy style": (numpy_style, ()),
    "Sphinx style": (sphinx_style, ()),
    "defaults": (defaults, ()),
    "recursive": (recursive, ()),
    "a class": (Service, ()),
    "a bound method": (Service(1).method, ()),
    "a callable object": (Service(1), ()),
    "a partial": (functools.partial(forecast, days=4), ("ctx",)),
    "a decorated function": (wrapped, ("ctx",)),
    "a lambda": (lambda x, y=2: None, ()),
}


def make_schemas() -> dict[str, dict[str, Any]]:
    return {
        "hints": {label: schema_of(hint) for label, hint in HINTS.items()},
        "functions": {label: arguments_shape(function, skip).schema for label, (function, skip) in FUNCTIONS.items()},
    }


GOLDEN_SCHEMAS: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else {}
ALL = [(kind, label) for kind, schemas in GOLDEN_SCHEMAS.items() for label in schemas]


def test_the_golden_file_has_exactly_these_schemas_key_order_included() -> None:
    assert golden_text() == GOLDEN.read_text("utf-8")
    assert len(ALL) >= 60


@req("schema-04", "schema-07")
@pytest.mark.parametrize(("kind", "label"), ALL)
def test_every_golden_schema_is_valid_2020_12(kind: str, label: str) -> None:
    schema = GOLDEN_SCHEMAS[kind][label]
    assert "$schema" not in schema  # the default dialect
    jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
    compile_schema(schema)
    assert "$ref" not in schema


@pytest.mark.parametrize("label", FUNCTIONS)
def test_each_schema_of_parameters_is_an_input_schema(label: str) -> None:
    check_input_schema(GOLDEN_SCHEMAS["functions"][label])


@pytest.mark.parametrize(("kind", "label"), ALL)
def test_only_recursive_definitions_are_references(kind: str, label: str) -> None:
    recursive = any(word in label for word in ("recursive", "generic of", "generic", "alias", "Json", "nested"))
    assert recursive or "$ref" not in json.dumps(GOLDEN_SCHEMAS[kind][label])


def test_a_hint_gives_an_equal_schema_in_a_new_object_each_time() -> None:
    for hint in HINTS.values():
        first, second = schema_of(hint), schema_of(hint)
        assert json.dumps(first) == json.dumps(second)
        first["broken"] = True
        assert "broken" not in schema_of(hint)


FORECAST = {"celsius": 3.5}
ACCEPTED_AND_REFUSED: dict[str, tuple[list[Any], list[Any]]] = {
    "None": ([None], [0, ""]),
    "bool": ([True], [1, "true", None]),
    "int": ([3, -1], [True, "3", 3.5, None]),
    "float": ([3, 3.5], [True, "3.5"]),
    "str": (["", "x"], [1, None]),
    "bytes": (["", "aGk="], [[104, 105]]),
    "Any": ([None, {}, 1], []),
    "list[int]": ([[], [1, 2]], [["1"], {}, "12", None]),
    "set[str]": ([[], ["a", "b"]], [["a", "a"], [1]]),
    "tuple[()]": ([[]], [[1]]),
    "tuple[int, str]": ([[1, "a"]], [[1], [1, "a", 2], ["a", 1], []]),
    "tuple[int, ...]": ([[], [1, 2, 3]], [["a"]]),
    "dict[str, int]": ([{}, {"a": 1}], [{"a": "1"}, []]),
    "dict[Colour, int]": ([{"red": 1}], [{"green": 1}]),
    "Optional[int]": ([None, 1], ["1"]),
    "int | str": ([1, "a"], [None, 1.5]),
    "Literal[1, 'a', None]": ([1, "a", None], [2, True, "1"]),
    "Literal[True, 1]": ([True, 1], [False, 2]),
    "Enum of str": (["red"], ["RED", 1]),
    "TypedDict": (
        [{"title": "x"}, {"title": "x", "year": 1}],
        [{}, {"title": "x", "year": None}, {"title": "x", "z": 1}],
    ),
    "TypedDict, not total": ([{"a": 1}], [{}, {"b": "x"}]),
    "NamedTuple": ([{"x": 1}, {"x": 1, "y": 2}], [{}, [1, 2]]),
    "dataclass": (
        [FORECAST, {**FORECAST, "wind": None, "tags": ["a"]}],
        [{}, {**FORECAST, "seen": 1}, {"celsius": "3"}],
    ),
    "attrs": ([{"name": "A"}, {"name": "A", "years": 3}], [{"_name": "A"}, {"name": "A", "age": 3}]),
    "recursive": ([{"value": 1, "children": [{"value": 2, "children": []}]}], [{"value": 1, "children": [{}]}]),
    "alias": ([None, [1, {"a": [True]}]], []),
    "Annotated bounds": ([2, 8], [0, 1, 10, 3]),
    "Annotated text": (["a", "abcde"], ["", "b", "abcdef"]),
    "Annotated list": ([[1]], [[], [1] * 6]),
    "Annotated mapping": ([{"a": 1}], [{}]),
    "Annotated optional": ([None, 1], [0]),
}


@pytest.mark.parametrize("label", ACCEPTED_AND_REFUSED)
def test_a_schema_accepts_exactly_the_values_of_its_type(label: str) -> None:
    compiled = compile_schema(GOLDEN_SCHEMAS["hints"][label])
    accepted, refused = ACCEPTED_AND_REFUSED[label]
    for value in accepted:
        assert compiled.errors(value) == []
    for value in refused:
        assert compiled.errors(value) != [], value


def test_a_default_makes_a_parameter_optional_and_not_nullable() -> None:
    def take(a: int = 1, b: int | None = 2) -> None: ...

    compiled = compile_schema(arguments_shape(take).schema)
    assert compiled.errors({}) == compiled.errors({"b": None}) == []
    assert [problem.path for problem in compiled.errors({"a": None})] == ["/a"]


def as_default(hint: Any, default: Any) -> Callable[..., Any]:
    def take(x: Any = default) -> None: ...

    take.__annotations__["x"] = hint
    return take


REFUSED_DEFAULTS: list[tuple[Any, Any]] = [
    (int, "q"),
    (int, 1.5),
    (int, True),
    (bool, 1),
    (str, 0),
    (str, ["a"]),
    (float, "1"),
    (int | None, "q"),
    (list[int], ("1",)),
    (list[int], 1),
    (tuple[int, str], (1, 2)),
    (tuple[int, str], (1,)),
    (tuple[()], [1]),
    (Literal["a", "b"], "c"),
    (Literal["a", 1], True),
    (Literal[True, "a"], 1),
    (Colour, "green"),
    (Person, "Anna"),
    (Person | None, "Anna"),
    (Annotated[int, Field(ge=3)], 2),
    (Annotated[int, Field(gt=3)], 3),
    (Annotated[int, Field(le=3)], 4),
    (Annotated[float | None, Field(lt=3)], 3.0),
    (Annotated[str, Field(min_length=1)], ""),
    (Annotated[str, Field(max_length=1)], "ab"),
    (Annotated[list[int], Field(min_length=1)], []),
    (Annotated[list[int], Field(max_length=1)], [1, 2]),
]
TAKEN_DEFAULTS: list[tuple[Any, Any]] = [
    (int, 1),
    (int, 1.0),
    (int, None),
    (int, object()),
    (float, 1),
    (float, math.inf),
    (float, 1.5),
    (bool, False),
    (Any, "q"),
    (pathlib.Path, "here"),
    (list[int], (1, 2)),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2)),
    (tuple[()], ()),
    (set[int], {1}),
    (Literal["a", 1], 1),
    (Colour, Colour.RED),
    (list[Colour], [Colour.RED]),
    (Tree | None, None),
    (Annotated[int | None, Field(ge=3)], 3),
    (Annotated[str, Field(min_length=1, max_length=1)], "é"),
]


@pytest.mark.parametrize(("hint", "default"), REFUSED_DEFAULTS, ids=repr)
def test_a_default_that_the_hint_does_not_allow_is_refused(hint: Any, default: Any) -> None:
    where = r"parameter 'x' of as_default.<locals>.take: the default .* does not fit the hint .*; change one of them"
    with pytest.raises(UsageError, match=where):
        arguments_shape(as_default(hint, default))
    plain = list(default) if isinstance(default, tuple) else default
    assert compile_schema(schema_of(hint)).errors(plain) != []


@pytest.mark.parametrize(("hint", "default"), TAKEN_DEFAULTS, ids=range(len(TAKEN_DEFAULTS)))
def test_a_default_that_the_hint_allows_is_shown_if_it_has_a_json_form(hint: Any, default: Any) -> None:
    schema = arguments_shape(as_default(hint, default)).schema
    assert "required" not in schema
    if "default" in (shown := schema["properties"]["x"]):
        assert compile_schema(shown).errors(shown["default"]) == []


@attrs.define
class Converting:
    size: int = attrs.field(default="3", converter=int)


def test_a_default_that_a_converter_changes_is_not_checked() -> None:
    assert schema_of(Converting)["properties"]["size"] == {"type": "integer"}


def test_bounds_inside_a_field_info_of_pydantic_are_found() -> None:
    hint = Annotated[list[int], FieldInfo(Len(1, 3), Marker(), description="Sizes.")]
    assert schema_of(hint) == {
        "type": "array",
        "items": {"type": "integer"},
        "description": "Sizes.",
        "minItems": 1,
        "maxItems": 3,
    }


def fielded(x: int = Field(ge=3)) -> None: ...  # type: ignore[assignment]


def pydantic_fielded(x: int = FieldInfo(Ge(1), default=3, description="How many.")) -> None: ...  # type: ignore[assignment]


@dataclasses.dataclass
class Fielded:
    y: list[str] = Field(description="Words.", max_length=2)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "where", "instead"),
    [
        (
            lambda: arguments_shape(fielded).schema,
            "parameter 'x' of fielded has a Field",
            "write x: Annotated[int, Field(ge=3)], ",
        ),
        (
            lambda: arguments_shape(pydantic_fielded).schema,
            "parameter 'x' of pydantic_fielded has a FieldInfo",
            "write x: Annotated[int, Field(description='How many.', ge=1)], ",
        ),
        (
            lambda: schema_of(Fielded),
            "the hint, member 'y' of Fielded has a Field",
            "write y: Annotated[list[str], Field(description='Words.', max_length=2)], ",
        ),
    ],
)
def test_a_field_as_a_default_is_refused_with_the_annotated_form(
    make: Callable[[], Any], where: str, instead: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert str(caught.value).startswith(where)
    assert instead in str(caught.value)


def test_unknown_arguments_are_refused() -> None:
    (problem,) = compile_schema(arguments_shape(nothing).schema).errors({"a": 1})
    assert problem.path == "/a"


# Hints and functions without a schema.


def varied(*args: int) -> None: ...
def keyed(**kwargs: int) -> None: ...
def positional(a: int, /) -> None: ...
def unknown(a: Context) -> None: ...
def generic(a: T) -> T: ...
def misspelt(a: list[intt]) -> None: ...  # type: ignore # noqa: F821
def a_list(a: [int]) -> None: ...  # type: ignore


class Endless(Generic[T]):
    pass


@dataclasses.dataclass
class Growing(Generic[T]):
    inner: Growing[list[T]]


@dataclasses.dataclass
class Unresolved:
    a: Nowhere  # type: ignore # noqa: F821


@dataclasses.dataclass
class Outer:
    items: list[Undocumented | complex]


class Broken:
    __signature__ = 3

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("hint", "why"),
    [
        (complex, r"the hint: <class 'complex'> has no JSON form here; use a builtin .* or give the schema by hand"),
        (datetime.timedelta, "has no JSON form"),
        (Callable[[int], str], "has no JSON form"),
        (T, "~T has no JSON form"),
        (Endless[int], "has no JSON form"),
        (tuple[int, *tuple[str, ...]], "has no JSON form"),
        (3, "3 has no JSON form"),
        ([int], "has no JSON form"),
        (Literal[b"a"], "b'a' has no JSON form"),
        (enum.Enum("E", {"A": (1, 2)}), "has no JSON form"),
        (dict[int, str], "keys must be strings, got <class 'int'>"),
        (dict[Any, str], "keys must be strings"),
        (Outer, r"the hint, member 'items' of Outer: <class 'complex'> has no JSON form"),
        (Unresolved, "a hint in Unresolved cannot be resolved: name 'Nowhere' is not defined"),
        (Growing[int], "more than 50 nested classes"),
        (Annotated[str, Field(ge=1)], "ge=1 does not fit the type; it needs one of integer, number"),
        (Annotated[bytes, Field(min_length=1)], "min_length=1 does not fit"),
        (Annotated[str | None, Field(ge=1)], "ge=1 does not fit the type"),
        (Annotated[Any, Field(pattern="x")], "pattern='x' does not fit"),
        (Annotated[list[Tree], Field(pattern="x")], "does not fit"),
        (Annotated[int, Ge(datetime.date(2020, 1, 1))], "is not a bound of JSON Schema"),
        (Annotated[int, Ge(True)], "is not a bound of JSON Schema"),
        (Annotated[str, Field(pattern=3)], "is not a bound of JSON Schema"),  # type: ignore[arg-type]
    ],
)
def test_the_error_about_a_hint_without_a_schema_tells_what_to_do(hint: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        schema_of(hint)


# Classes that describe themselves.


def self_describing_class(name: str, schema: Any, written: Any = None) -> Any:
    """A class like a model of pydantic: with a schema, and optionally another schema for the written value."""

    class Model:
        @classmethod
        def model_json_schema(cls, mode: str) -> Any:
            described = written if mode == "serialization" and written else schema
            if isinstance(described, Exception):
                raise described
            return json.loads(json.dumps(described))

        @classmethod
        def model_validate(cls, value: Any) -> Any:
            return cls

        def model_dump(self) -> Any: ...

    Model.__name__ = name
    return Model


NAME = {"type": "string", "title": "Name"}
OWNED = {
    "type": "object",
    "title": "Owned",
    "properties": {
        "$ref": {"$ref": "#/$defs/Name", "description": "Whose."},  # a member may be called like a keyword
        "names": {"anyOf": [{"items": {"$ref": "#/$defs/Name"}, "type": "array"}, {"type": "null"}], "default": None},
        "discriminator": {"default": {"$ref": "data"}},
        "either": {"oneOf": [{"$ref": "#/$defs/Name"}], "discriminator": {"mapping": {"n": "#/$defs/Name"}}},
    },
    "$defs": {"Name": NAME, "Unused": {"type": "null"}},
}


def test_the_schema_of_a_class_that_describes_itself_is_inlined() -> None:
    found = schema_of(dict[str, self_describing_class("Owned", OWNED)])  # type: ignore[misc]
    assert found == {
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "title": "Owned",
            "properties": {
                "$ref": {**NAME, "description": "Whose."},
                "names": {"anyOf": [{"items": NAME, "type": "array"}, {"type": "null"}], "default": None},
                "discriminator": {"default": {"$ref": "data"}},
                "either": {"oneOf": [NAME]},
            },
        },
    }


def test_a_recursive_part_of_a_class_that_describes_itself_is_a_reference() -> None:
    def node(value: str) -> Any:
        members = {"value": {"type": value}, "next": {"$ref": "#/$defs/Node"}}
        body = {"type": "object", "properties": members, "required": ["value"]}
        return self_describing_class("Node", {"$defs": {"Node": body}, "$ref": "#/$defs/Node"})

    one, other = node("string"), node("integer")
    alone = schema_of(one)
    assert (alone["type"], alone["$defs"].keys()) == ("object", {"Node"})
    both = compile_schema(schema_of(tuple[one, other, one]))
    text, number = {"value": "a", "next": {"value": "b"}}, {"value": 1, "next": {"value": 2}}
    assert not both.errors([text, number, text])
    wrong = [each.path for each in both.errors([text, text, number])]
    assert wrong == ["/1/value", "/1/next/value", "/2/value", "/2/next/value"]


def test_a_class_may_have_different_schemas_for_reading_and_writing() -> None:
    kind = self_describing_class("Two", {"type": "object"}, {"type": "array"})
    assert schema_of(kind) == {"type": "object"}
    assert schema_of(list[kind], mode="serialization") == {"type": "array", "items": {"type": "array"}}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (ValueError("no schema for Callable"), "the hint: Odd has no JSON Schema: no schema for Callable"),
        ({"$ref": "#/$defs/Lost"}, "the schema of Odd refers to '#/.defs/Lost', but does not define it"),
        ({"items": {"$ref": "https://example.com/"}}, "the schema of Odd refers to 'https://example.com/'"),
    ],
)
def test_a_class_that_fails_to_describe_itself_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        schema_of(self_describing_class("Odd", schema))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (varied, "parameter 'args' of varied is variadic positional; declare each argument as a named parameter"),
        (keyed, "parameter 'kwargs' of keyed is variadic keyword"),
        (positional, "parameter 'a' of positional is positional-only"),
        (unknown, "the hint of 'a' in unknown cannot be resolved: name 'Context' is not defined; define or import it"),
        (misspelt, "the hint of 'a' in misspelt cannot be resolved: name 'intt' is not defined"),
        (generic, "parameter 'a' of generic: ~T has no JSON form"),
        (a_list, "parameter 'a' of a_list: .* has no JSON form"),
        (print, "parameter 'args' of print is variadic positional"),
        (dict, "the parameters of .* cannot be read"),
        (Broken(), "the parameters of .* cannot be read"),
    ],
)
def test_a_function_without_a_schema_is_refused_with_the_reason(function: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        arguments_shape(function)


# Hints and descriptions.


def test_one_hint_is_resolved_with_its_annotations() -> None:
    assert hint_of(forecast, "days") is int
    assert hint_of(forecast, "return") is Forecast
    assert hint_of(numpy_style, "b") == Annotated[int, "Not from the docstring."]
    assert hint_of(numpy_style, "a") is ABSENT
    assert hint_of(numpy_style, "return") is ABSENT
    assert hint_of(nothing, "return") is type(None)
    assert hint_of(Service(1).method, "return") is str


def test_the_hints_of_a_decorated_function_are_those_of_its_own_module() -> None:
    other_module: dict[str, Any] = {}
    exec("def decorated(function):\n    return lambda *args: function(*args)", other_module)
    decorated = functools.wraps(forecast)(other_module["decorated"](forecast))
    assert hint_of(decorated, "return") is Forecast


@pytest.mark.parametrize(
    ("hint", "alternatives"),
    [
        (int, [int]),
        (None, [None]),
        (list[int | str], [list[int | str]]),
        (Union[int, Annotated[str | None, "Text."]], [int, str, type(None)]),  # noqa: UP007
        (Count | Maybe, [int, int, type(None)]),
    ],
)
def test_the_alternatives_of_a_nested_union_are_found(hint: Any, alternatives: list[Any]) -> None:
    assert alternatives_of(hint) == alternatives


def test_a_description_is_the_docstring_without_its_parameters() -> None:
    assert describe(forecast) == Description(
        "The forecast for a city.\n\nFor as many days as you like.\n\nReturns:\n    The weather.",
        {"city": "Where, as people call it: a name.", "days": "How many."},
    )
    assert describe(sphinx_style) == Description(
        "Add.\n\n:returns: The sum.", {"a": "The first and more.", "colour": "See :class:`Colour`."}
    )
    assert describe(numpy_style).text == "Add.\n\nReturns\n-------\nint\n    The sum."
    assert describe(numpy_style).members == {"a": "The first and more.", "d": "The first and more.", "b": "The second."}


def test_callables_of_every_kind_are_described() -> None:
    assert describe(nothing) == Description()
    assert describe(Service) == Description("Adds.")
    assert describe(Service(1).method) == Description("Do it.")
    assert describe(Service(1)) == Description("Call it.")
    assert describe(functools.partial(forecast, days=1)) == describe(wrapped) == describe(forecast)
    assert describe(Undocumented) == Description()


def test_a_heading_at_the_end_of_a_docstring_is_text() -> None:
    def odd() -> None:
        """Odd.

        Parameters"""

    def empty() -> None:
        """Empty.

        Args:
        """

    def wild() -> None:
        """Wild.

        Args:
            loose words before any name
            *args: Not a name.
            a: The name.

        Parameters
        ----------
        b"""

    assert describe(odd) == Description("Odd.\n\nParameters")
    assert describe(empty) == Description("Empty.")
    assert describe(wild) == Description("Wild.", {"a": "The name.", "b": ""})


def golden_text() -> str:
    """One schema on each line, so that a difference can be read."""
    kinds = []
    for kind, schemas in make_schemas().items():
        lines = ",\n".join(f"  {json.dumps(label)}: {json.dumps(schema)}" for label, schema in schemas.items())
        kinds.append(f" {json.dumps(kind)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


if __name__ == "__main__":
    GOLDEN.write_text(golden_text(), "utf-8")
