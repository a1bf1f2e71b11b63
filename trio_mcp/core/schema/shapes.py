"""Type hints, compiled once: `shape_of` takes one hint, and `arguments_shape` the parameters of a callable.

One walk over a hint makes its `Shape`: the JSON Schema (2020-12), a check of JSON against it, a reader from JSON to
Python values, and a writer in the other direction.  They agree: the writer makes JSON that fits the schema, and the
reader accepts it.

| Type | JSON |
|---|---|
| bytes | base64 text |
| datetime, date, time | RFC 3339 text |
| UUID, Path | text |
| Enum | the values of its members |
| set | an array of different items |
| tuple of fixed length | an array of that length |
| mapping | an object; its keys are text |
| TypedDict, NamedTuple, dataclass, attrs class | an object without other members |
| a class that describes itself, such as a pydantic model | its own schema |

Schemas.  An unknown member of an object is refused, because it would be dropped silently otherwise.  A parameter with a
default is not required.  Null is a value of it only if the hint is `X | None`.  A default that the schema would refuse
raises `UsageError`, because hosts send the defaults that they see.  Definitions are written out where they are used,
because many hosts cannot follow a `$ref`.  Only recursive definitions are in `$defs`, and the root is never a `$ref`.
Equal hints give equal schemas with the same order of keys.

Here are the walk, the scalars and closed objects.  `composites`, `classes` and `annotated` have the other kinds of
hints, and are loaded with the first such hint.

Checks.  `Shape.fits` is the verdict of the schema, without its reasons.  The engine in `validation` gives the reasons;
it takes 20 ms to import, so only patterns, multiples, sets of other items than text, and classes that describe
themselves need it for a verdict.

Reading.  A reader checks the rules that a schema cannot express: that a text is a date, base64 or a UUID, and that no
item of a set comes twice.  Values are not converted to other types, with one exception: JSON has only one type of
number, so an `int` reads 1.0 as 1, and a `float` reads 3 as 3.0.  Of a union, the value becomes the first alternative
that it fits and that reads it.  Times, and dates with a time, are refused in both directions if they have no UTC
offset: RFC 3339 requires an offset, and programs that guess it do not guess the same one.

Writing.  A value is written by its own type (`writing`), unless its hint decides.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import math
import pathlib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import trio_mcp.core.schema as room  # it loads a module of the room when one of its names is used for the first time
from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import ABSENT, Absent, Json, JsonObject
from trio_mcp.core.schema.hints import Field, Hint, Member, describe, parameters_of, unsupported, wrapper_of

if TYPE_CHECKING:
    from trio_mcp.core.schema.validation import CompiledSchema

__all__ = ["Mode", "Shape", "Unreadable", "arguments_shape", "schema_of", "shape_of"]

Check: TypeAlias = Callable[[Json], bool]
Read: TypeAlias = Callable[[Json], Any]
Write: TypeAlias = Callable[[Any], Json]
Mode: TypeAlias = Literal["validation", "serialization"]
"""Whether the schema of a class that describes itself is for reading or for writing; names of members can differ."""

# Longer names of members are cut in error messages, because the peer chooses the names.
_NAME_SHOWN = 64
# Larger integers have no exact double.
_EXACT = 2**53
_BITS_OF_A_DOUBLE = 1024


class Unreadable(ValueError):
    """Raised for JSON that fits its schema but cannot be read as a Python value of the hint.

    `path` is a JSON Pointer to the value, and `why` says what was expected.  Neither contains the value, which may be a
    secret.  If the constructor of a class raised an exception, that exception is the cause.
    """

    def __init__(self, why: str, path: str = "") -> None:
        super().__init__(why, path)
        self.why = why
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.why}" if self.path else self.why

    def within(self, step: str | int) -> Unreadable:
        shown = str(step).replace("~", "~0").replace("/", "~1")
        shown = shown if len(shown) <= _NAME_SHOWN else shown[:_NAME_SHOWN] + "…"
        return Unreadable(self.why, f"/{shown}{self.path}")


# Shapes.

JSON_TYPES = frozenset({NoneType, bool, int, float, str, list, dict})
NUMBERS = frozenset({int, float})


class Shape(NamedTuple):
    """What one hint says about a value; see the head of this file.

    - `schema`: the JSON Schema, an object of its own for each shape.
    - `fits`: whether JSON fits the schema.
    - `read`: makes the Python value of JSON that fits; None if the JSON is the value.  Raises `Unreadable`.
    - `write`: makes JSON of a Python value; None if its own type says how.  Raises `UsageError`.
    - `json`: the types of the JSON values that can fit.
    - `kind`: the class of the Python values, if there is one.
    - `parts`: the alternatives of a union.
    """

    schema: JsonObject
    fits: Check
    read: Read | None = None
    write: Write | None = None
    json: frozenset[type] = JSON_TYPES
    kind: type | None = None
    parts: tuple[Shape, ...] = ()


def shape_of(hint: Hint, *, where: str = "the hint", mode: Mode = "validation") -> Shape:
    """Compile a type hint.  Raises `UsageError`, with a text that begins with `where`, if it has no JSON form."""
    walk = Walk(mode)
    shape = walk.of(hint, where)
    schema = shape.schema
    for _ in walk.definitions:  # an alias may lead to a recursive class
        if "$ref" in schema:
            body = walk.definitions[schema.pop("$ref").removeprefix(DEFINITIONS)]
            schema = {**body, **schema}
    return _finished(walk, shape._replace(schema=schema))


def arguments_shape(function: Callable[..., object], skip: Collection[str] = (), *, untyped: Hint = Any) -> Shape:
    """Compile the parameters that `function` takes by name, except those in `skip`, to one object.

    Its reader makes keyword arguments.  Arguments that a call leaves out stay out, so that the function's defaults
    apply.  `untyped` is the hint of parameters that have none, or Any.
    """
    walk = Walk()
    members = [each._replace(hint=untyped) if each.hint is Any else each for each in parameters_of(function, skip)]
    return _finished(walk, walk.closed_object(members, describe(function).members)[0])


def schema_of(hint: Hint, *, where: str = "the hint", mode: Mode = "validation") -> JsonObject:
    """Return the schema of a type hint, as `shape_of` does."""
    return shape_of(hint, where=where, mode=mode).schema


def _finished(walk: Walk, shape: Shape) -> Shape:
    if shape.write is not None:
        shape = shape._replace(write=functools.partial(room.write_guarded, shape.write))
    if not walk.definitions:
        return shape

    def fits(value: Json) -> bool:
        try:
            return shape.fits(value)
        except RecursionError:
            return False

    def read(value: Json) -> Any:
        try:
            return value if shape.read is None else shape.read(value)
        except RecursionError:  # a message has at most 128 levels, but one level can need many calls
            raise Unreadable("is nested too deep to be read") from None

    return shape._replace(schema={**shape.schema, "$defs": walk.definitions}, fits=fits, read=shape.read and read)


class Verdict:
    """A check by the schema engine, which is compiled at the first use."""

    __slots__ = ("_compiled", "_make")

    def __init__(self, make: Callable[[], JsonObject]) -> None:
        self._make = make
        self._compiled: CompiledSchema | None = None

    def __call__(self, value: Json) -> bool:
        if self._compiled is None:
            from trio_mcp.core.schema.validation import compile_schema

            self._compiled = compile_schema(self._make())
        return self._compiled.fits(value)


# Scalars.


def _is_integer(value: Json) -> bool:
    if type(value) is int:
        return -_EXACT <= value <= _EXACT or value.bit_length() < _BITS_OF_A_DOUBLE
    return type(value) is float and value.is_integer()  # 1.0 is an integer in JSON Schema; infinity is none


def _is_number(value: Json) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and value.bit_length() < _BITS_OF_A_DOUBLE


def is_text(value: Json) -> bool:
    return type(value) is str


def is_anything(value: Json) -> bool:
    return True


def _integer(value: Json) -> int:
    return value if type(value) is int else int(value)


def _bytes(text: str) -> bytes:
    import base64

    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise Unreadable("must be base64") from None


ANY = Shape({}, is_anything)
_NULL = Shape({"type": "null"}, lambda value: value is None, json=frozenset({NoneType}), kind=NoneType)
TEXT = Shape({"type": "string"}, is_text, json=frozenset({str}), kind=str)
_SCALARS: Mapping[Hint, Shape] = {
    Any: ANY,
    object: ANY,
    None: _NULL,
    NoneType: _NULL,
    bool: Shape({"type": "boolean"}, lambda value: type(value) is bool, json=frozenset({bool}), kind=bool),
    int: Shape({"type": "integer"}, _is_integer, _integer, json=NUMBERS, kind=int),
    float: Shape({"type": "number"}, _is_number, float, json=NUMBERS, kind=float),
    str: TEXT,
    bytes: TEXT._replace(schema={"type": "string", "contentEncoding": "base64"}, read=_bytes, kind=bytes),
    pathlib.Path: TEXT._replace(read=pathlib.Path, kind=pathlib.Path),
    pathlib.PurePath: TEXT._replace(read=pathlib.PurePath, kind=pathlib.PurePath),
}


# Objects.


def _members_fit(shapes: Mapping[str, Shape], required: Set[str]) -> Check:
    checks = {name: shape.fits for name, shape in shapes.items()}

    def fits(value: Json) -> bool:  # written as loops for speed: it runs for each call
        if type(value) is not dict:
            return False
        for name, item in value.items():
            check = checks.get(name)
            if check is None or not check(item):
                return False
        return len(value) == len(checks) or value.keys() >= required

    return fits


def _read_members(readers: Mapping[str, Read], source: JsonObject) -> JsonObject:
    result, name = dict(source), ""
    try:
        for name, read in readers.items():
            if name in result:
                result[name] = read(result[name])
    except Unreadable as error:
        raise error.within(name) from error.__cause__
    return result


def _as_json(default: Any) -> Json | Absent:
    """A default to show in the schema, or ABSENT.  None is not shown: it only means that the member is optional."""
    if default is ABSENT:
        return ABSENT
    if isinstance(default, enum.Enum):
        return _as_json(default.value)
    if isinstance(default, float) and not math.isfinite(default):
        return ABSENT
    if isinstance(default, list | tuple):
        items = [_as_json(item) for item in default]
        return ABSENT if ABSENT in items else items
    return default if type(default) in (str, int, float, bool) else ABSENT


# The walk.

_PYDANTIC_FIELD = "FieldInfo"  # the class of pydantic's `Field`; by name, because pydantic is optional
DEFINITIONS = "#/$defs/"


class Walk:
    """Compiles one hint, and collects the definitions that its schema needs; `classes` adds to them."""

    def __init__(self, mode: Mode = "validation") -> None:
        self.definitions: dict[str, JsonObject] = {}
        self.mode = mode
        self.depth = 0
        self.known: dict[Hint, Any] = {}  # those around the current one, and those in `definitions`

    def of(self, hint: Hint, where: str) -> Shape:
        """Compile a part of the hint."""
        origin: Hint = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin is None or (not arguments and hint != tuple[()]):  # `List` alone is `list`
            return self._simple(origin or hint, where)
        if origin is typing.Annotated:
            return room.annotated_shape(self.of(arguments[0], where), arguments[1:], where)
        if origin in (typing.Union, types.UnionType):
            null_last = sorted(arguments, key=lambda each: each is NoneType)
            return room.union_shape([self.of(each, where) for each in null_last])
        if origin is typing.Literal:
            return room.choice_shape(arguments, where)
        if wrapper_of(origin):
            return self.of(arguments[0], where)
        return room.container_shape(self, hint, origin, arguments, where) or room.class_shape(self, hint, where)

    def _simple(self, hint: Hint, where: str) -> Shape:
        if not isinstance(hint, collections.abc.Hashable):  # `[int]` instead of `list[int]`
            raise unsupported(hint, where)
        if isinstance(hint, typing.NewType):
            return self.of(hint.__supertype__, where)
        if hint in _SCALARS:
            return _SCALARS[hint]._replace(schema=dict(_SCALARS[hint].schema))
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return room.choice_shape(list(hint), where)._replace(kind=hint)
        return room.container_shape(self, hint, hint, (), where) or room.class_shape(self, hint, where)

    def closed_object(
        self, members: Sequence[Member], descriptions: Mapping[str, str]
    ) -> tuple[Shape, Mapping[str, Shape]]:
        """Return an object with these members and no others, and the shapes of the members."""
        shapes: dict[str, Shape] = {}
        for member in members:
            if isinstance(member.default, Field) or type(member.default).__name__ == _PYDANTIC_FIELD:
                raise room.misplaced(member)
            shape = shapes[member.name] = self.of(member.hint, member.where)
            if member.name in descriptions:
                shape.schema.setdefault("description", descriptions[member.name])
            if (default := _as_json(member.default)) is not ABSENT:
                if not shape.fits(default):
                    hint = inspect.formatannotation(member.hint)
                    raise UsageError(
                        f"{member.where}: the default {member.default!r} does not fit the hint {hint}; "
                        "change one of them"
                    )
                shape.schema["default"] = default
        required = [member.name for member in members if member.required]
        schema: JsonObject = {"type": "object", "properties": {name: each.schema for name, each in shapes.items()}}
        schema |= {**({"required": required} if required else {}), "additionalProperties": False}
        readers = {name: each.read for name, each in shapes.items() if each.read is not None}
        read = functools.partial(_read_members, readers) if readers else None
        return Shape(schema, _members_fit(shapes, frozenset(required)), read, json=frozenset({dict})), shapes
