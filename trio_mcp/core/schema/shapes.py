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

Checks.  `Shape.fits` is the verdict of the schema, without its reasons.  The engine in `validation` gives the reasons;
it takes 20 ms to import, so only patterns, multiples, sets of other items than text, and classes that describe
themselves need it for a verdict.

Reading.  A reader checks the rules that a schema cannot express: that a text is a date, base64 or a UUID, and that no
item of a set comes twice.  Values are not converted to other types, with one exception: JSON has only one type of
number, so an `int` reads 1.0 as 1, and a `float` reads 3 as 3.0.  Of a union, the value becomes the first alternative
that it fits and that reads it.  Times, and dates with a time, are refused in both directions if they have no UTC
offset: RFC 3339 requires an offset, and programs that guess it do not guess the same one.

Writing.  A value is written by its own type, except in two cases where the hint decides: an object under a hint of its
base class is written as the base class, so that no undeclared member is sent, and a named tuple under `tuple[...]` is
an array.  A value that does not fit its hint is written by its own type too; the check of the result finds the fault.
A value without a JSON form raises `UsageError`, which names its type.  Examples are decimals, infinities and NaN, keys
that are not text, and a container that contains itself.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import itertools
import math
import operator
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import ABSENT, Absent, Json, JsonObject
from trio_mcp.core.schema.hints import (
    Field,
    Hint,
    Member,
    attributes_of,
    describe,
    members_of,
    parameters_of,
    resolved_alone,
    substituted,
    unsupported,
    wrapper_of,
)

if TYPE_CHECKING:
    from trio_mcp.core.schema.validation import CompiledSchema

__all__ = [
    "Mode", "Shape", "Unreadable", "arguments_shape", "describes_itself", "schema_of", "shape_of", "to_json_value",
]  # fmt: skip

T = TypeVar("T")
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
# Items of a set, or keys of a mapping, that may have the same hash as others.
_COLLISIONS = 100


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


# Writing by type.


def _same(value: Any) -> Json:
    return value


def _write(value: Any) -> Json:
    kind: Any = type(value)
    return (_EXACT_WRITERS.get(kind) or _writer_of_class(kind))(value)


def _write_float(value: float) -> float:
    if not math.isfinite(value):
        raise UsageError("a float that is not finite has no JSON form; use None")
    return float(value)


def _write_array(value: Iterable[Any]) -> list[Json]:
    return [_write(item) for item in value]


def _write_mapping(value: Mapping[Any, Any], writer_at: Callable[[str], Write] = lambda _: _write) -> JsonObject:
    result: JsonObject = {}
    for key, item in value.items():
        name = key if type(key) is str else _write(key)
        if type(name) is not str:
            raise UsageError(f"a key of type {_kind_of(key)} has no JSON form: keys must be text")
        result[name] = writer_at(name)(item)
    if len(result) != len(value):
        raise UsageError(f"two keys of a {_kind_of(value)} become the same text")
    return result


def _write_object(parts: Sequence[tuple[str, str, Write]], value: Any) -> JsonObject:
    return {name: write(getattr(value, attribute)) for name, attribute, write in parts}


def _write_self_described(value: Any, kind: Any = None) -> Json:
    """Write a model; as `kind`, if its class is derived from `kind`."""
    only = {}
    if kind is not None and type(value) is not kind:
        only = {"include": {*kind.model_fields, *kind.model_computed_fields}}
    return _write(value.model_dump(mode="json", by_alias=True, **only))  # `model_dump` keeps NaN


def _write_bytes(value: bytes) -> str:
    import base64

    return base64.b64encode(value).decode()


def _write_time(value: Any) -> str:
    """Write a datetime or a time.  RFC 3339 has offsets of whole minutes only."""
    offset = value.utcoffset()
    if offset is None:
        raise UsageError(f"a {_kind_of(value)} without an offset has no JSON form; give it a time zone")
    if offset.total_seconds() % 60:
        raise UsageError(f"a {_kind_of(value)} with seconds in its offset has no JSON form; use another time zone")
    return str(value.isoformat())


def _kind_of(value: object) -> str:
    return type(value).__name__


_EXACT_WRITERS: Mapping[type, Write] = {
    str: _same,
    bool: _same,
    NoneType: _same,
    int: _same,
    float: _write_float,
    dict: _write_mapping,
    list: _write_array,
    tuple: _write_array,
}
_WRITERS_BY_BASE: Sequence[tuple[Any, Write]] = (
    (enum.Enum, lambda value: _write(value.value)),
    (str, str.__str__),
    (int, int.__int__),
    (float, _write_float),
    (bytes | bytearray | memoryview, _write_bytes),
    (pathlib.PurePath, str),
)
_WRITERS_BY_NAME: Mapping[str, Write] = {
    "datetime.datetime": _write_time,
    "datetime.date": lambda value: value.isoformat(),
    "datetime.time": _write_time,
    "uuid.UUID": str,
}


@functools.lru_cache(256)  # more classes than a program returns; bounded, so that no class is kept alive forever
def _writer_of_class(kind: Any) -> Write:
    for base, write in _WRITERS_BY_BASE:
        if issubclass(kind, base):
            return write
    for each in kind.__mro__:
        if (name := _full_name(each)) in _WRITERS_BY_NAME:
            return _WRITERS_BY_NAME[name]
    content = sys.modules.get("trio_mcp.core.content")  # if it is not loaded, no object of the protocol exists
    if content is not None and issubclass(kind, content.Model):
        raise UsageError(f"{kind.__name__} is an object of the protocol, not data")
    if describes_itself(kind):
        return _write_self_described
    if (attributes := attributes_of(kind)) is not None:
        return functools.partial(_write_object, [(*each, _write) for each in attributes.items()])
    if issubclass(kind, Mapping):
        return _write_mapping
    if issubclass(kind, Sequence | collections.abc.Set):
        return _write_array
    if issubclass(kind, collections.abc.Awaitable):
        raise UsageError(f"a {kind.__name__} is not a value: await it, and return its result")
    known = "text, a number, a list, a mapping, a dataclass, an attrs or a pydantic object"
    raise UsageError(f"{kind.__name__} has no JSON form here; make it {known}")


def _full_name(hint: Hint) -> str:
    """The name of a class with its module; empty for other hints."""
    return f"{hint.__module__}.{hint.__qualname__}" if isinstance(hint, type) else ""


# Shapes.

_JSON_TYPES = frozenset({NoneType, bool, int, float, str, list, dict})
_NUMBERS = frozenset({int, float})


class Shape(NamedTuple):
    """What one hint says about a value; see the head of this file.

    - `schema`: the JSON Schema, an object of its own for each shape.
    - `fits`: whether JSON fits the schema.
    - `read`: makes the Python value of JSON that fits; None if the JSON is the value.  Raises `Unreadable`.
    - `write`: makes JSON of a Python value.  Raises `UsageError`.
    - `json`: the types of the JSON values that can fit.
    - `kind`: the class of the Python values, if there is one.
    - `parts`: the alternatives of a union.
    """

    schema: JsonObject
    fits: Check
    read: Read | None = None
    write: Write = _write
    json: frozenset[type] = _JSON_TYPES
    kind: type | None = None
    parts: tuple[Shape, ...] = ()


def shape_of(hint: Hint, *, where: str = "the hint", mode: Mode = "validation") -> Shape:
    """Compile a type hint.  Raises `UsageError`, with a text that begins with `where`, if it has no JSON form."""
    walk = _Walk(mode)
    shape = walk.of(hint, where)
    schema = shape.schema
    for _ in walk.definitions:  # an alias may lead to a recursive class
        if "$ref" in schema:
            body = walk.definitions[schema.pop("$ref").removeprefix(_DEFINITIONS)]
            schema = {**body, **schema}
    return _finished(walk, shape._replace(schema=schema))


def arguments_shape(function: Callable[..., object], skip: Collection[str] = (), *, untyped: Hint = Any) -> Shape:
    """Compile the parameters that `function` takes by name, except those in `skip`, to one object.

    Its reader makes keyword arguments.  Arguments that a call leaves out stay out, so that the function's defaults
    apply.  `untyped` is the hint of parameters that have none, or Any.
    """
    walk = _Walk()
    members = [each._replace(hint=untyped) if each.hint is Any else each for each in parameters_of(function, skip)]
    return _finished(walk, walk.closed_object(members, describe(function).members)[0])


def schema_of(hint: Hint, *, where: str = "the hint", mode: Mode = "validation") -> JsonObject:
    """Return the schema of a type hint, as `shape_of` does."""
    return shape_of(hint, where=where, mode=mode).schema


def to_json_value(value: Any, hint: Hint | Absent = ABSENT) -> Json:
    """Write one value as plain JSON, as `Shape.write` does; without a hint by its own type."""
    return (_write_by_type if hint is ABSENT else shape_of(hint).write)(value)


def _finished(walk: _Walk, shape: Shape) -> Shape:
    shape = shape._replace(write=_guarded_writer(shape.write))
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


def _guarded_writer(write: Write) -> Write:
    def writer(value: Any) -> Json:
        try:
            return write(value)
        except RecursionError:
            raise UsageError(f"{_kind_of(value)} is nested too deep for JSON, or contains itself") from None

    return writer


_write_by_type = _guarded_writer(_write)


class _Verdict:
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


def _is_text(value: Json) -> bool:
    return type(value) is str


def _is_anything(value: Json) -> bool:
    return True


def _integer(value: Json) -> int:
    return value if type(value) is int else int(value)


def _bytes(text: str) -> bytes:
    import base64

    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise Unreadable("must be base64") from None


def _write_date(value: Any) -> Json:
    import datetime

    if isinstance(value, datetime.datetime):
        raise UsageError("expected a date, got a datetime; use its date()")
    return _write(value)


_ANY = Shape({}, _is_anything)
_NULL = Shape({"type": "null"}, lambda value: value is None, json=frozenset({NoneType}), kind=NoneType)
_TEXT = Shape({"type": "string"}, _is_text, json=frozenset({str}), kind=str)
_SCALARS: Mapping[Hint, Shape] = {
    Any: _ANY,
    object: _ANY,
    None: _NULL,
    NoneType: _NULL,
    bool: Shape({"type": "boolean"}, lambda value: type(value) is bool, json=frozenset({bool}), kind=bool),
    int: Shape({"type": "integer"}, _is_integer, _integer, json=_NUMBERS, kind=int),
    float: Shape({"type": "number"}, _is_number, float, json=_NUMBERS, kind=float),
    str: _TEXT,
    bytes: _TEXT._replace(schema={"type": "string", "contentEncoding": "base64"}, read=_bytes, kind=bytes),
    pathlib.Path: _TEXT._replace(read=pathlib.Path, kind=pathlib.Path),
    pathlib.PurePath: _TEXT._replace(read=pathlib.PurePath, kind=pathlib.PurePath),
}
_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"([01]\d|2[0-3]):\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)"
_UUID = r"[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}"
# By name, because only programs with these hints load their modules: format, pattern, and the form for messages.
_TEXTS: Mapping[str, tuple[str, str, str]] = {
    "datetime.datetime": ("date-time", f"{_DATE}T{_TIME}", "2026-01-31T12:00:00Z"),
    "datetime.date": ("date", _DATE, "2026-01-31"),
    "datetime.time": ("time", _TIME, "12:00:00Z"),
    "uuid.UUID": ("uuid", _UUID, "8-4-4-4-12 hexadecimal digits"),
}


def _text_in_form(kind: Any) -> Shape:
    """A class of `_TEXTS`.  Its own parser accepts much more than the standards, so the form is checked first."""
    format, pattern, form = _TEXTS[_full_name(kind)]
    parse = getattr(kind, "fromisoformat", kind)
    is_of_the_form = re.compile(pattern, re.ASCII).fullmatch

    def read(text: str) -> Any:
        try:
            if is_of_the_form(text.upper()):
                return parse(text.upper())
        except ValueError:  # for example the 30th of February
            pass
        raise Unreadable(f"must be of the form {form}")

    write = _write_date if format == "date" else _write
    return _TEXT._replace(schema={"type": "string", "format": format}, read=read, write=write, kind=kind)


def _choice(values: Collection[Any], where: str) -> Shape:
    """A Literal or an Enum."""
    plain = [value.value if isinstance(value, enum.Enum) else value for value in values]
    for value in plain:
        if type(value) not in _NAMES:
            raise unsupported(value, where)
    kinds = {_NAMES[type(value)] for value in plain}
    schema = {"type": kinds.pop(), "enum": plain} if len(kinds) == 1 else {"enum": plain}
    members: dict[tuple[bool, Any], Any] = {}
    for value, written in zip(values, plain, strict=True):
        members.setdefault((type(written) is bool, written), value)  # the key has the type, because True == 1
    json = frozenset(map(type, plain))
    json = json | _NUMBERS if json & _NUMBERS else json

    def read(value: Json) -> Any:
        try:
            return members[type(value) is bool, value]
        except KeyError:
            raise Unreadable("must be one of the allowed values") from None

    same = all(type(value) in (str, bool, NoneType) for value in values)  # a number needs a reader: 1.0 means 1
    return Shape(
        schema,
        lambda value: type(value) in json and (type(value) is bool, value) in members,
        None if same else read,
        json=json,
    )


_NAMES: Mapping[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


# Unions.


def _union(alternatives: Iterable[Shape]) -> Shape:
    parts: list[Shape] = []
    branches: list[JsonObject] = []
    for each in alternatives:
        for part in each.parts if each.schema.keys() == {"anyOf"} else (each,):
            parts.append(part)
            if part.schema not in branches:
                branches.append(part.schema)
    schema = {"anyOf": branches} if len(branches) > 1 else branches[0]
    fits: dict[type, Check] = {}
    readers: dict[type, Read | None] = {}
    for kind in frozenset().union(*(part.json for part in parts)):
        fits[kind], readers[kind] = _first_of([part for part in parts if kind in part.json], kind in (list, dict))

    def read(value: Json) -> Any:
        read = readers[type(value)]
        return value if read is None else read(value)

    return Shape(
        schema,
        lambda value: type(value) in fits and fits[type(value)](value),
        read if any(readers.values()) else None,
        _union_writer(parts),
        frozenset(fits),
        parts=tuple(parts),
    )


def _first_of(parts: Sequence[Shape], nests: bool) -> tuple[Check, Read | None]:
    """The check and the reader for alternatives that the type of the JSON does not tell apart."""
    if len(parts) == 1:
        return parts[0].fits, parts[0].read

    def fits_any(value: Json) -> bool:
        return any(part.fits(value) for part in parts)

    def choose_first(value: Json) -> tuple[bool, Any]:
        for part in parts:
            if part.fits(value):
                try:
                    return True, value if part.read is None else part.read(value)
                except Unreadable:
                    pass
        return False, None

    fits: Check = _remembering(fits_any) if nests else fits_any
    choose = _remembering(choose_first) if nests else choose_first

    def read(value: Json) -> Any:
        found, result = choose(value)
        if not found:
            raise Unreadable("matches none of the alternatives")
        return result

    return fits, read if any(part.read for part in parts) else None


# The results inside the outermost call.  The key is the `id()` of the value and that of the function.  The entry keeps
# the value alive, so that no other value gets the same `id()`.
_Results: TypeAlias = dict[tuple[int, int], tuple[Json, Any]]
_RESULTS: ContextVar[_Results | None] = ContextVar("results", default=None)


def _remembering(function: Callable[[Json], T]) -> Callable[[Json], T]:
    """Without this memory, the work would double at each level of nested unions."""

    def remember(value: Json) -> T:
        results = _RESULTS.get()
        if results is None:
            token = _RESULTS.set({})
            try:
                return remember(value)
            finally:
                _RESULTS.reset(token)
        key = (id(value), id(function))
        if key not in results:
            results[key] = value, function(value)
        result: T = results[key][1]
        return result

    return remember


def _union_writer(parts: Sequence[Shape]) -> Write:
    if all(part.write is _write for part in parts):
        return _write

    def write(value: Any) -> Json:
        fitting = [part for part in parts if part.kind is type(value)]
        fitting = fitting or [part for part in parts if part.kind is not None and isinstance(value, part.kind)]
        return (fitting[0].write if len(fitting) == 1 else _write)(value)  # two kinds of list fit: write by type

    return write


# Containers.

# The types to call with the items of an array; None: a JSON array is the value.
_ARRAYS: Mapping[Hint, Callable[[Iterable[Any]], Any] | None] = {
    list: None,
    collections.abc.Sequence: None,
    collections.abc.MutableSequence: None,
    tuple: tuple,
    set: set,
    collections.abc.MutableSet: set,
    frozenset: frozenset,
    collections.abc.Set: frozenset,
}
_MAPPINGS = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})


def _array(origin: Any, item: Shape) -> Shape:
    make, item_fits, item_read, item_write = _ARRAYS[origin], item.fits, item.read, item.write
    different = make is not None and make is not tuple
    schema: JsonObject = {"type": "array", **({"uniqueItems": True} if different else {})}
    if item.schema:
        schema["items"] = item.schema

    def fits(value: Json) -> bool:
        return (
            type(value) is list
            and (item_fits is _is_anything or all(map(item_fits, value)))
            and (not different or _are_different(value))
        )

    def read(value: list[Json]) -> Any:
        items = value if item_read is None else _read_items(item_read, value)
        return items if make is None else make(items) if make is tuple else _made_set(make, items)

    def write(value: Any) -> Json:
        return [item_write(each) for each in value] if _is_array(value) else _write(value)

    reads = make is not None or item_read is not None
    return Shape(
        schema, fits, read if reads else None, _write if item_write is _write else write, frozenset({list}), origin
    )


def _are_different(items: list[Json]) -> bool:
    # The engine has a bound on numbers that are costly to compare.
    return len(set(items)) == len(items) if all(map(_is_text, items)) else _has_no_duplicates(items)


_has_no_duplicates = _Verdict(lambda: {"uniqueItems": True})


def _made_set(make: Callable[[Iterable[Any]], Any], items: list[Any]) -> Any:
    try:
        _check_hashes(items)
        result = make(items)
    except TypeError:
        raise Unreadable("must have no items that are arrays or objects") from None  # they cannot be in a set
    if len(result) != len(items):  # two texts can be the same date
        raise Unreadable("must not have the same item twice")
    return result


def _check_hashes(items: Collection[Any]) -> None:
    """Raise `Unreadable` for many items with one hash, which Python compares in pairs.

    A peer can choose integers and UUIDs with the same hash: those that differ by a multiple of 2**61 - 1.
    """
    if len(items) - len(set(map(hash, items))) > _COLLISIONS:
        raise Unreadable("has too many items with the same hash")


def _read_items(read: Read, source: list[Json]) -> list[Any]:
    result: list[Any] = []
    try:
        for item in source:
            result.append(read(item))  # the length of `result` is the index of the current item
    except Unreadable as error:
        raise error.within(len(result)) from error.__cause__
    return result


def _is_array(value: Any) -> bool:
    return isinstance(value, Sequence | collections.abc.Set) and not isinstance(
        value, str | bytes | bytearray | memoryview
    )


def _tuple(items: Sequence[Shape]) -> Shape:
    """A tuple of fixed length."""
    schema: JsonObject = {"type": "array", "maxItems": 0}
    if items:
        prefix = [each.schema for each in items]
        schema = {"type": "array", "prefixItems": prefix, "items": False, "minItems": len(items)}

    def fits(value: Json) -> bool:
        return (
            type(value) is list
            and len(value) == len(items)
            and all(each.fits(item) for each, item in zip(items, value, strict=True))
        )

    def read(value: list[Json]) -> tuple[Any, ...]:
        if len(value) != len(items):
            raise Unreadable(f"must have {len(items)} items")
        readers = iter(items)
        return tuple(_read_items(lambda item: (next(readers).read or _same)(item), value))

    def write(value: Any) -> Json:
        if not _is_array(value) or len(value) != len(items):
            return _write(value)
        return [each.write(item) for each, item in zip(items, value, strict=True)]

    return Shape(schema, fits, read, write, frozenset({list}), tuple)


def _mapping(origin: Any, key: Shape, value: Shape) -> Shape:
    schema: JsonObject = {"type": "object"}
    any_key = key.schema == _TEXT.schema
    if not any_key:
        schema["propertyNames"] = key.schema
    if value.schema:
        schema["additionalProperties"] = value.schema

    def fits(source: Json) -> bool:
        return (
            type(source) is dict
            and (any_key or all(map(key.fits, source)))
            and (value.fits is _is_anything or all(map(value.fits, source.values())))
        )

    read_key, read_value, write_value = key.read or _same, value.read or _same, value.write

    def read(source: JsonObject) -> dict[Any, Any]:
        keys, values, name = [], [], ""
        try:
            for name, item in source.items():
                keys.append(read_key(name))
                values.append(read_value(item))
        except Unreadable as error:
            raise error.within(name) from error.__cause__
        if key.read is not None:
            _check_hashes(keys)
        result = dict(zip(keys, values, strict=True))
        if len(result) != len(source):
            raise Unreadable("must not have the same key twice")
        return result

    def write(source: Any) -> Json:
        return _write_mapping(source, lambda _: write_value) if isinstance(source, Mapping) else _write(source)

    reads = key.read is not None or value.read is not None
    return Shape(
        schema, fits, read if reads else None, _write if write_value is _write else write, frozenset({dict}), origin
    )


# Objects.


def _members_fit(shapes: Mapping[str, Shape], required: Sequence[str]) -> Check:
    checks = {name: shape.fits for name, shape in shapes.items()}

    def fits(value: Json) -> bool:  # written as loops for speed: it runs for each call
        if type(value) is not dict:
            return False
        for name in required:
            if name not in value:
                return False
        for name, item in value.items():
            check = checks.get(name)
            if check is None or not check(item):
                return False
        return True

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


def _construct(kind: Any, make: Callable[[Any], Any], source: Json) -> Any:
    try:
        return make(source)
    except (TypeError, ValueError) as error:  # validators and `__post_init__` raise these
        raise Unreadable(f"does not meet the rules of {kind.__name__}") from error


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


def _misplaced(member: Member) -> UsageError:
    given = ", ".join(f"{name}={value!r}" for name, value in dict(_details(member.default)).items())
    hint = inspect.formatannotation(member.hint)
    return UsageError(
        f"{member.where} has a {type(member.default).__name__} as its default; write {member.name}: Annotated[{hint}, "
        f"Field({given})], and its default, if it has one, after that"
    )


# Annotated.

_KEYWORDS: Mapping[str, str] = {
    "title": "title",
    "description": "description",
    "format": "format",
    "header": "x-mcp-header",
}


def _for_sizes(prefix: str) -> dict[str, str]:
    return {"string": f"{prefix}Length", "array": f"{prefix}Items", "object": f"{prefix}Properties"}


def _for_numbers(keyword: str) -> dict[str, str]:
    return {"integer": keyword, "number": keyword}


# Attribute -> type in the schema -> keyword; and the check of the bound, if it needs no engine.
_BOUNDS: Mapping[str, tuple[Mapping[str, str], Callable[[Any, Any], bool] | None]] = {
    "ge": (_for_numbers("minimum"), operator.ge),
    "gt": (_for_numbers("exclusiveMinimum"), operator.gt),
    "le": (_for_numbers("maximum"), operator.le),
    "lt": (_for_numbers("exclusiveMaximum"), operator.lt),
    "multiple_of": (_for_numbers("multipleOf"), None),
    "min_length": (_for_sizes("min"), lambda value, bound: len(value) >= bound),
    "max_length": (_for_sizes("max"), lambda value, bound: len(value) <= bound),
    "pattern": ({"string": "pattern"}, None),
}
_ATTRIBUTES = (*_KEYWORDS, *_BOUNDS)
_PYDANTIC_FIELD = "FieldInfo"  # the class of pydantic's `Field`; by name, because pydantic is optional


def _details(extra: Any) -> Iterator[tuple[str, Any]]:
    """The notes and bounds that an object in `Annotated` has."""
    metadata = getattr(extra, "metadata", None)  # pydantic keeps its bounds there
    for each in (extra, *(metadata if isinstance(metadata, list) else ())):
        if isinstance(each, str):
            yield "description", each
        elif not isinstance(each, type):
            for name in _ATTRIBUTES:
                if (value := getattr(each, name, None)) is not None and not callable(value):
                    yield name, value


def _annotated(shape: Shape, extras: Iterable[Any], where: str) -> Shape:
    for name, value in itertools.chain.from_iterable(map(_details, extras)):
        if name in _BOUNDS:
            at = f"{where}: {name}={value!r}"
            if type(value) not in ((str,) if name == "pattern" else (int, float)):
                raise UsageError(f"{at} is not a bound of JSON Schema; check it in the function")
            bounded = _bounded(shape, name, value)
            if bounded is None:
                raise UsageError(f"{at} does not fit the type; it needs one of {', '.join(_BOUNDS[name][0])}")
            shape = bounded
        elif isinstance(value, str):
            shape.schema[_KEYWORDS[name]] = value
    return shape


def _bounded(shape: Shape, name: str, bound: Any) -> Shape | None:
    """Add a bound to `shape`, or to its alternatives of the right type; None if there are none."""
    if shape.parts:
        parts = [_bounded(part, name, bound) for part in shape.parts]
        if not any(parts):
            return None
        # The schemas of the alternatives, which are parts of `shape.schema`, now have the bound.
        union = _union(new or old for new, old in zip(parts, shape.parts, strict=True))
        return union._replace(schema=shape.schema)
    keywords, compare = _BOUNDS[name]
    keyword = keywords.get(str(shape.schema.get("type")))
    if keyword is None or "contentEncoding" in shape.schema:  # a bound on bytes would count base64 characters
        return None
    shape.schema[keyword] = bound
    inner = shape.fits
    if compare is None:
        by_engine = _Verdict(lambda: {keyword: bound})
        return shape._replace(fits=lambda value: inner(value) and by_engine(value))
    return shape._replace(fits=lambda value: inner(value) and compare(value, bound))


# Classes that describe themselves.

_DEFINITIONS = "#/$defs/"
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas"})
_DATA = frozenset({"const", "enum", "default", "examples"})  # their values are not schemas
# `discriminator` is OpenAPI's list of definitions, which are not in `$defs` any more.
_LEFT_OUT = frozenset({"$defs", "$ref", "discriminator"})


def describes_itself(kind: object) -> bool:
    """Whether `kind` is a class with the three methods of a pydantic model.

    pydantic is optional and never imported: `model_json_schema` returns the schema, `model_validate` makes an object
    from JSON that fits it, and `model_dump` makes JSON from an object.  The model decides the details, for example
    whether it accepts unknown members.
    """
    return isinstance(kind, type) and all(
        callable(getattr(kind, name, None)) for name in ("model_json_schema", "model_validate", "model_dump")
    )


def _written_out(schema: Json, refer: Callable[[str], JsonObject]) -> Json:
    """Return `schema` without its definitions; `refer` returns the schema for each reference."""
    if isinstance(schema, list):
        return [_written_out(each, refer) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result: JsonObject = refer(schema["$ref"]) if "$ref" in schema else {}
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME:
            result[keyword] = {name: _written_out(each, refer) for name, each in value.items()}
        elif keyword not in _LEFT_OUT:
            result[keyword] = value if keyword in _DATA else _written_out(value, refer)
    return result


# The walk.


def _class_of_values(kind: type) -> type:
    return dict if hasattr(kind, "__required_keys__") else kind  # a TypedDict makes dicts


# Nested classes.  Programs nest about five; a generic class that contains a larger form of itself nests without end.
_CLASSES = 50


class _Definition:
    """A class, an alias or a definition, which may contain itself: the shape is missing while it is compiled.

    `name` is its name in `$defs`, if it contains itself.
    """

    def __init__(self) -> None:
        self.shape: Shape | None = None
        self.name: str | None = None

    def fits(self, value: Json) -> bool:
        return self.shape is None or self.shape.fits(value)  # it is missing for a default inside the class itself

    def read(self, value: Json) -> Any:
        assert self.shape is not None
        return value if self.shape.read is None else self.shape.read(value)

    def write(self, value: Any) -> Json:
        assert self.shape is not None
        return self.shape.write(value)


class _Walk:
    """Compiles one hint, and collects the definitions that its schema needs."""

    def __init__(self, mode: Mode = "validation") -> None:
        self.definitions: dict[str, JsonObject] = {}
        self._mode = mode
        self._depth = 0
        self._known: dict[Hint, _Definition] = {}  # those around the current one, and those in `definitions`

    def of(self, hint: Hint, where: str) -> Shape:
        origin: Hint = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin is None or (not arguments and hint != tuple[()]):  # `List` alone is `list`
            return self._simple(origin or hint, where)
        if origin is typing.Annotated:
            return _annotated(self.of(arguments[0], where), arguments[1:], where)
        if origin in (typing.Union, types.UnionType):
            null_last = sorted(arguments, key=lambda each: each is NoneType)
            return _union([self.of(each, where) for each in null_last])
        if origin is typing.Literal:
            return _choice(arguments, where)
        if origin is tuple and arguments[1:] != (...,):
            if any(getattr(each, "__unpacked__", False) for each in arguments):  # tuple[int, *tuple[str, ...]]
                raise unsupported(hint, where)
            return _tuple([self.of(each, where) for each in arguments])
        if origin in _ARRAYS:
            return _array(origin, self.of(arguments[0], where))
        if origin in _MAPPINGS:
            key, value = self.of(arguments[0], where), self.of(arguments[1], where)
            if key.schema.get("type") != "string":
                raise UsageError(f"{where}: keys must be strings, got {arguments[0]!r}; use str or an Enum of str")
            return _mapping(origin, key, value)
        return self.of(arguments[0], where) if wrapper_of(origin) else self._class_or_alias(hint, where)

    def _simple(self, hint: Hint, where: str) -> Shape:
        if not isinstance(hint, collections.abc.Hashable):  # `[int]` instead of `list[int]`
            raise unsupported(hint, where)
        if isinstance(hint, typing.NewType):
            return self.of(hint.__supertype__, where)
        if hint in _SCALARS:
            return _SCALARS[hint]._replace(schema=dict(_SCALARS[hint].schema))
        if hint in _ARRAYS:
            return _array(hint, _ANY)
        if hint in _MAPPINGS:
            return _mapping(hint, _TEXT, _ANY)
        if _full_name(hint) in _TEXTS:
            return _text_in_form(hint)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _choice(list(hint), where)._replace(kind=hint)
        return self._class_or_alias(hint, where)

    def _class_or_alias(self, hint: Hint, where: str) -> Shape:
        kind: Any = typing.get_origin(hint) or hint
        variables = dict(zip(getattr(kind, "__parameters__", ()), typing.get_args(hint), strict=False))
        if not isinstance(kind, type) and hasattr(kind, "__value__"):  # type Alias = ...

            def alias() -> Shape:
                names = vars(sys.modules[kind.__module__])
                value = resolved_alone(kind.__value__, names, f"{where}: {kind.__name__}")
                return self.of(substituted(value, variables), where)

            return self._defined(hint, _ANY, alias, where)
        if describes_itself(kind):
            return self._defined(hint, _ANY._replace(kind=kind), lambda: self._self_described(kind, where), where)
        if not isinstance(kind, type):
            raise unsupported(hint, where)
        outside = Shape({}, _is_anything, json=frozenset({dict}), kind=_class_of_values(kind))
        return self._defined(hint, outside, lambda: self._members(hint, kind, variables, where), where)

    def _defined(self, key: Hint, outside: Shape, make: Callable[[], Shape], where: str) -> Shape:
        """Return the shape itself, with a reference as its schema if the class or alias contains itself.

        `outside` says what is known of it before it is compiled.
        """
        named = self._known.get(key)
        if named is None:
            if self._depth == _CLASSES:
                raise UsageError(
                    f"{where}: more than {_CLASSES} nested classes; one contains ever larger forms of itself; "
                    "end the recursion"
                )
            named = self._known[key] = _Definition()
            self._depth += 1
            named.shape = make()
            self._depth -= 1
            if named.name is None:
                del self._known[key]
                return named.shape
            self.definitions[named.name] = named.shape.schema
        elif named.name is None:
            name = key[1] if isinstance(key, tuple) else (typing.get_origin(key) or key).__name__
            taken = {each.name for each in self._known.values()}
            numbered = itertools.chain([name], (f"{name}{number}" for number in itertools.count(2)))
            named.name = next(each for each in numbered if each not in taken)
        schema = {"$ref": _DEFINITIONS + named.name}
        if named.shape is not None:
            return named.shape._replace(schema=schema, parts=())
        return outside._replace(schema=schema, fits=named.fits, read=named.read, write=named.write)

    def _members(self, hint: Hint, kind: type, variables: Mapping[Hint, Hint], where: str) -> Shape:
        found = members_of(kind, where)
        if found is None:
            raise unsupported(hint, where)
        described = describe(kind)
        members = [each._replace(hint=substituted(each.hint, variables)) for each in found]
        shape, parts = self.closed_object(members, described.members)
        if described.text:
            shape = shape._replace(schema={"type": "object", "description": described.text, **shape.schema})
        writers = {name: part.write for name, part in parts.items()}
        if _class_of_values(kind) is dict:  # a TypedDict

            def write_mapping(value: Any) -> Json:
                fits = isinstance(value, Mapping)
                return _write_mapping(value, lambda name: writers.get(name, _write)) if fits else _write(value)

            by_type = all(each is _write for each in writers.values())
            return shape._replace(write=_write if by_type else write_mapping, kind=dict)

        def make(members: JsonObject) -> Any:
            return kind(**members)

        read_members = shape.read or dict
        attributes = [(name, attribute, writers[name]) for name, attribute in (attributes_of(kind) or {}).items()]
        return shape._replace(
            read=lambda source: _construct(kind, make, read_members(source)),
            write=lambda value: _write_object(attributes, value) if isinstance(value, kind) else _write(value),
            kind=kind,
        )

    def closed_object(
        self, members: Sequence[Member], descriptions: Mapping[str, str]
    ) -> tuple[Shape, Mapping[str, Shape]]:
        """Return an object with these members and no others, and the shapes of the members."""
        shapes: dict[str, Shape] = {}
        for member in members:
            if isinstance(member.default, Field) or type(member.default).__name__ == _PYDANTIC_FIELD:
                raise _misplaced(member)
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
        return Shape(schema, _members_fit(shapes, required), read, json=frozenset({dict})), shapes

    def _self_described(self, kind: Any, where: str) -> Shape:
        try:
            schema: JsonObject = kind.model_json_schema(mode=self._mode)
        except Exception as error:  # the class may raise any exception
            raise UsageError(f"{where}: {kind.__name__} has no JSON Schema: {error}") from error
        definitions = schema.get("$defs", {})

        def refer(reference: str) -> JsonObject:
            name = reference.removeprefix(_DEFINITIONS)
            if name not in definitions:
                raise UsageError(f"the schema of {kind.__name__} refers to {reference!r}, but does not define it")
            return self._defined((kind, name), _ANY, lambda: written(definitions[name]), where).schema

        def written(part: JsonObject) -> Shape:
            return Shape(_written_out(part, refer), _is_anything)

        return Shape(
            written(schema).schema,
            _Verdict(lambda: schema_of(kind, mode=self._mode)),
            functools.partial(_construct, kind, kind.model_validate),
            lambda value: _write_self_described(value, kind) if isinstance(value, kind) else _write(value),
            frozenset({dict}) if schema.get("type") == "object" else _JSON_TYPES,
            kind,
        )
