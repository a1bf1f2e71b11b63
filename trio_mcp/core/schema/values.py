"""From JSON values to Python values, by type hint.

`reader_of` and `arguments_reader` read JSON that the schema of the same hint has accepted; the table at the head of
`schema` lists the hints.  They check the rules that a schema cannot express: that a text is a date, base64 or a UUID,
and that no item of a set comes twice.  They also find the alternative of a union that a value belongs to.  The other
direction, `to_json_value` and `writer_of`, is in `writing`.

A hint has no reader if its JSON is already the Python value.  Values are not converted to other types, with one
exception: JSON has only one type of number, so an `int` reads 1.0 as 1, and a `float` reads 3 as 3.0.  If the JSON type
fits several alternatives of a union, the value becomes the first alternative that accepts and reads it.

Two rules may surprise:

- Times, and dates with a time, are refused in both directions if they have no UTC offset: RFC 3339 requires an offset,
  and programs that guess it do not guess the same one.
- An object of a class is made by a call of the class with keyword arguments, without a library.  This is as fast as
  generated code, works for every member name, and saves an import of 10 ms before the first answer.
"""

from __future__ import annotations

import enum
import functools
import inspect
import pathlib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from types import NoneType
from typing import Any, TypeAlias

from trio_mcp.core.messages import ABSENT, Json, JsonObject
from trio_mcp.core.schema.hints import MAKERS, Hint, MemberHint, Walk, compiled, full_name, is_typed_dict
from trio_mcp.core.schema.schema import hint_of, schema_of
from trio_mcp.core.schema.writing import to_json_value, writer_of

__all__ = ["Unreadable", "arguments_reader", "reader_of", "to_json_value", "writer_of"]

Read: TypeAlias = Callable[[Json], Any]

# Longer names of members are cut in error messages, because the peer chooses the names.
_NAME_SHOWN = 64


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


def reader_of(hint: Hint) -> Read | None:
    """Return a function that reads JSON which fits the schema of `hint`.  It raises Unreadable.

    None means that the JSON is already the Python value.
    """
    return _reader(_Reading(), hint)


def _reader(reading: _Reading, hint: Hint) -> Read | None:
    read = compiled(reading, hint)
    if read is None or not reading.recursive:
        return read

    def guarded(value: Json) -> Any:
        try:
            return read(value)
        except RecursionError:  # a message has at most 128 levels, but one level can need many calls
            raise Unreadable("is nested too deep to be read") from None

    return guarded


def arguments_reader(
    function: Callable[..., object], skip: Collection[str] = ()
) -> Callable[[JsonObject], JsonObject] | None:
    """Return a function that turns the arguments of a call into keyword arguments of `function`.

    None means that they need no change.  Parameters in `skip` have no argument.  Arguments that the call leaves out
    stay out, so that the function's defaults apply.
    """
    reading, readers = _Reading(), {}
    for name in inspect.signature(function).parameters:
        hint = ABSENT if name in skip else hint_of(function, name)
        if hint is not ABSENT and (read := _reader(reading, hint)) is not None:
            readers[name] = read
    return functools.partial(_read_members, readers) if readers else None


# Reading.


def _same(value: Json) -> Any:
    return value


class _Reading(Walk):
    @functools.cached_property
    def _union_reading(self) -> _UnionReading:
        return _UnionReading()

    def annotated(self, hint: Hint, inner: Read | None) -> Read | None:
        return inner  # the schema has checked the bounds

    def scalar(self, hint: Hint) -> Read | None:
        return _READERS.get(hint) or _TEXT_READERS.get(full_name(hint)) or _made_by(hint, None)

    def choice(self, values: Collection[Any]) -> Read | None:
        if all(type(value) in (str, bool, NoneType) for value in values):
            return None  # a number needs a reader, because 1.0 means 1
        return _one_of(values)

    def union(self, alternatives: tuple[Hint, ...]) -> Read | None:
        readers = [(each, self.of(each), _json_types(schema_of(each))) for each in alternatives]
        by_type: dict[type, Read | None] = {}
        for json_type in _JSON_TYPES:
            candidates = [(hint, read) for hint, read, json_types in readers if json_type in json_types]
            if len(candidates) > 1 and any(read for _, read in candidates):
                by_type[json_type] = _first_of([self.strict(*each) for each in candidates])
            elif candidates:
                by_type[json_type] = candidates[0][1]
        if not any(by_type.values()):
            return None

        def read(value: Json) -> Any:
            read = by_type.get(type(value))
            return value if read is None else read(value)

        return read

    def strict(self, hint: Hint, read: Read | None) -> Read:
        """Return a reader that also checks the schema of `hint`.  `read` is the reader without this check."""
        return self._union_reading.of(hint)

    def array(self, origin: Hint, item: Read | None) -> Read | None:
        return _made_by(origin, None if item is None else functools.partial(_read_items, item))

    def tuple(self, items: tuple[Hint, ...]) -> Read | None:
        readers = [self.of(item) or _same for item in items]

        def read(value: Json) -> tuple[Any, ...]:
            if len(value) != len(readers):
                raise Unreadable(f"must have {len(readers)} items")
            each = iter(readers)
            return tuple(_read_items(lambda item: next(each)(item), value))

        return read

    def mapping(self, key: Read | None, value: Read | None) -> Read | None:
        if key is None and value is None:
            return None
        read_key, read_value = key or _same, value or _same

        def read(source: JsonObject) -> dict[Any, Any]:
            result, name = {}, ""
            try:
                for name, item in source.items():
                    result[read_key(name)] = read_value(item)
            except Unreadable as error:
                raise error.within(name) from error.__cause__
            if len(result) != len(source):
                raise Unreadable("must not have the same key twice")
            return result

        return read

    def members(self, kind: type, members: list[MemberHint]) -> Read | None:
        readers = {each.name: read for each in members if (read := self.of(each.hint)) is not None}
        if not is_typed_dict(kind):
            return functools.partial(_read_object, kind, readers)
        return functools.partial(_read_members, readers) if readers else None

    def self_described(self, kind: Any) -> Read:
        return functools.partial(_construct, kind, kind.model_validate)


def _read_members(readers: Mapping[str, Read], source: JsonObject) -> JsonObject:
    result, name = dict(source), ""
    try:
        for name, read in readers.items():
            if name in result:
                result[name] = read(result[name])
    except Unreadable as error:
        raise error.within(name) from error.__cause__
    return result


def _read_object(kind: Any, readers: Mapping[str, Read], source: JsonObject) -> Any:
    return _construct(kind, lambda members: kind(**members), _read_members(readers, source))


def _construct(kind: Any, make: Callable[[Any], Any], source: Json) -> Any:
    try:
        return make(source)
    except (TypeError, ValueError) as error:  # validators and `__post_init__` raise these
        raise Unreadable(f"does not meet the rules of {kind.__name__}") from error


def _read_items(read: Read, source: list[Json]) -> list[Any]:
    result: list[Any] = []
    try:
        for item in source:
            result.append(read(item))  # the length of `result` is the index of the current item
    except Unreadable as error:
        raise error.within(len(result)) from error.__cause__
    return result


def _made_by(origin: Hint, items: Read | None) -> Read | None:
    make = MAKERS.get(origin)
    if make is None:
        return items
    if make is not tuple:
        make = functools.partial(_make_set, make)
    return make if items is None else lambda source: make(items(source))


def _make_set(make: Callable[[Iterable[Any]], Any], source: list[Any]) -> Any:
    try:
        result = make(source)
    except TypeError:
        raise Unreadable("must have no items that are arrays or objects") from None  # they cannot be in a set
    if len(result) != len(source):  # two texts can be the same date
        raise Unreadable("must not have the same item twice")
    return result


def _one_of(values: Collection[Any]) -> Read:
    members: dict[tuple[bool, Any], Any] = {}
    for value in values:
        written = value.value if isinstance(value, enum.Enum) else value
        members.setdefault((type(written) is bool, written), value)  # the key has the type, because True == 1

    def read(value: Json) -> Any:
        try:
            return members[type(value) is bool, value]
        except KeyError:
            raise Unreadable("must be one of the allowed values") from None

    return read


def _integer(value: Json) -> int:
    return value if type(value) is int else int(value)  # 1.0 is an integer in JSON Schema


def _bytes(text: str) -> bytes:
    import base64

    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise Unreadable("must be base64") from None


_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"([01]\d|2[0-3]):\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)"


def _in_form(pattern: str, text: str, example: str, make: Callable[[str], Any]) -> Any:
    """Check the form of `text` before `make` parses it: Python's parsers accept much more than the standards."""
    import re

    try:
        if re.fullmatch(pattern, text.upper(), re.ASCII):
            return make(text.upper())
    except ValueError:  # for example the 30th of February
        pass
    raise Unreadable(f"must be of the form {example}")


def _datetime(text: str) -> Any:
    import datetime

    return _in_form(f"{_DATE}T{_TIME}", text, "2026-01-31T12:00:00Z", datetime.datetime.fromisoformat)


def _date(text: str) -> Any:
    import datetime

    return _in_form(_DATE, text, "2026-01-31", datetime.date.fromisoformat)


def _time(text: str) -> Any:
    import datetime

    return _in_form(_TIME, text, "12:00:00Z", datetime.time.fromisoformat)


def _uuid(text: str) -> Any:
    import uuid

    return _in_form(r"[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}", text, "8-4-4-4-12 hexadecimal digits", uuid.UUID)


_READERS: Mapping[Hint, Read] = {
    int: _integer,
    float: float,
    bytes: _bytes,
    pathlib.Path: pathlib.Path,
    pathlib.PurePath: pathlib.PurePath,
}
# By name, so that only programs with these hints import the modules.
_TEXT_READERS: Mapping[str, Read] = {
    "datetime.datetime": _datetime,
    "datetime.date": _date,
    "datetime.time": _time,
    "uuid.UUID": _uuid,
}

# Choosing among the alternatives of a union.

_JSON_TYPES = frozenset({NoneType, bool, int, float, str, list, dict})
_NUMBERS = frozenset({int, float})
_BY_NAME: Mapping[str, frozenset[type]] = {
    "null": frozenset({NoneType}),
    "boolean": frozenset({bool}),
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "string": frozenset({str}),
    "array": frozenset({list}),
    "object": frozenset({dict}),
}
_BOUNDS = frozenset({"type", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf", "pattern"})
_BOUNDS |= {f"{prefix}{suffix}" for prefix in ("min", "max") for suffix in ("Length", "Items", "Properties")}


def _json_types(schema: JsonObject, root: JsonObject | None = None) -> frozenset[type]:
    """Return the Python types of parsed JSON that `schema`, made by `schema_of`, accepts."""
    root = root or schema
    if "$ref" in schema:
        return _json_types(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return frozenset().union(*(_json_types(branch, root) for branch in schema["anyOf"]))
    if "type" in schema:
        return _BY_NAME[schema["type"]]
    if "enum" in schema:
        types = frozenset(map(type, schema["enum"]))
        return types | _NUMBERS if types & _NUMBERS else types
    return _JSON_TYPES


class _UnionReading(_Reading):
    """Makes the readers for alternatives of a union.  They refuse a value that the schema of the alternative refuses.

    They validate while they read.  The schema engine would validate the same members once for each enclosing union.
    """

    def of(self, hint: Hint) -> Read:
        read, json_types = super().of(hint), _json_types(schema_of(hint))

        def checked(value: Json) -> Any:
            if type(value) not in json_types:
                raise Unreadable("is of another type")
            return value if read is None else read(value)

        return checked

    def strict(self, hint: Hint, read: Read | None) -> Read:
        return read or _same

    def scalar(self, hint: Hint) -> Read | None:
        return _exact_integer if hint is int else super().scalar(hint)

    def choice(self, values: Collection[Any]) -> Read | None:
        return _one_of(values)

    def annotated(self, hint: Hint, inner: Read | None) -> Read | None:
        bounds = _bounds(schema_of(hint))
        if bounds == _bounds(schema_of(typing.get_args(hint)[0])):
            return inner
        from trio_mcp.core.schema.validation import compile_schema

        compiled = compile_schema(bounds)

        def read(value: Json) -> Any:
            if compiled.errors(_outline(value)):
                raise Unreadable("is out of bounds")
            return value if inner is None else inner(value)

        return read

    def members(self, kind: type, members: list[MemberHint]) -> Read | None:
        make = super().members(kind, members) or _same
        names = {each.name for each in members}
        required = {each.name for each in members if each.required}

        def read(source: JsonObject) -> Any:
            if not required <= source.keys() <= names:
                raise Unreadable(f"is not a {kind.__name__}")
            return make(source)

        return read

    def self_described(self, kind: Any) -> Read:
        from trio_mcp.core.schema.validation import compile_schema

        make, schema = super().self_described(kind), compile_schema(schema_of(kind))

        def read(source: Json) -> Any:
            if schema.errors(source):  # a model can accept more than its schema, such as "3" for 3
                raise Unreadable(f"is not a {kind.__name__}")
            return make(source)

        return read


def _exact_integer(value: Json) -> int:
    if value != value // 1:
        raise Unreadable("must be an integer")
    return int(value)


def _bounds(schema: JsonObject) -> JsonObject:
    """Return the keywords of a schema that limit the value itself, not its items and members."""
    bounds = {keyword: bound for keyword, bound in schema.items() if keyword in _BOUNDS}
    return {**bounds, "anyOf": [_bounds(branch) for branch in schema["anyOf"]]} if "anyOf" in schema else bounds


def _outline(value: Json) -> Json:
    """Return the part of a value that bounds limit: of an array its length, of an object its names."""
    if isinstance(value, list):
        return [None] * len(value)
    return dict.fromkeys(value) if isinstance(value, dict) else value


# The results of the unions inside the outermost one.  The key is the `id()` of the value and that of the union.  The
# entry keeps the value alive, so that no other value gets the same `id()`.  Without this table, the work would double
# at each level of nested unions.
_Trials: TypeAlias = dict[tuple[int, int], tuple[Json, Any, bool]]
_TRIALS: ContextVar[_Trials | None] = ContextVar("trials", default=None)


def _first_of(readers: list[Read]) -> Read:
    def attempt(value: Json) -> tuple[Json, Any, bool]:
        for read in readers:
            try:
                return value, read(value), True
            except Unreadable:
                pass
        return value, None, False

    def choose(value: Json) -> Any:
        trials = _TRIALS.get()
        if trials is None:
            token = _TRIALS.set({})
            try:
                return choose(value)
            finally:
                _TRIALS.reset(token)
        key = (id(value), id(readers))
        if key not in trials:
            trials[key] = attempt(value)
        _, result, fits = trials[key]
        if not fits:
            raise Unreadable("matches none of the alternatives")
        return result

    return choose
