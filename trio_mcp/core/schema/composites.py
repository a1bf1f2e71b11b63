"""The shapes of texts in a form, choices, unions, arrays and mappings; `shapes` tells the rules."""

from __future__ import annotations

import collections.abc
import enum
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import NoneType
from typing import Any, TypeAlias, TypeVar

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import Json, JsonObject
from trio_mcp.core.schema.hints import Hint, full_name, unsupported
from trio_mcp.core.schema.shapes import (
    ANY,
    NUMBERS,
    TEXT,
    Check,
    Read,
    Shape,
    Unreadable,
    Verdict,
    Walk,
    Write,
    is_anything,
    is_text,
)
from trio_mcp.core.schema.writing import write_mapping, write_value

__all__ = ["choice_shape", "container_shape", "union_shape"]

T = TypeVar("T")

# Items of a set, or keys of a mapping, that may have the same hash as others.
_COLLISIONS = 100


def _same(value: Any) -> Any:
    return value


# Texts in a form, and choices.

_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"([01]\d|2[0-3]):\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)"
_UUID = r"[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}"
# By name, because only programs with these hints load their modules: format, pattern, and the form for messages.
_FORMS: Mapping[str, tuple[str, str, str]] = {
    "datetime.datetime": ("date-time", f"{_DATE}T{_TIME}", "2026-01-31T12:00:00Z"),
    "datetime.date": ("date", _DATE, "2026-01-31"),
    "datetime.time": ("time", _TIME, "12:00:00Z"),
    "uuid.UUID": ("uuid", _UUID, "8-4-4-4-12 hexadecimal digits"),
}


def _text_in_form(kind: Any) -> Shape:
    """A class of `_FORMS`.  Its own parser accepts much more than the standards, so the form is checked first."""
    format, pattern, form = _FORMS[full_name(kind)]
    parse = getattr(kind, "fromisoformat", kind)
    is_of_the_form = re.compile(pattern, re.ASCII).fullmatch

    def read(text: str) -> Any:
        try:
            if is_of_the_form(text.upper()):
                return parse(text.upper())
        except ValueError:  # for example the 30th of February
            pass
        raise Unreadable(f"must be of the form {form}")

    write = _write_date if format == "date" else None
    return TEXT._replace(schema={"type": "string", "format": format}, read=read, write=write, kind=kind)


def _write_date(value: Any) -> Json:
    if full_name(type(value)) == "datetime.datetime":
        raise UsageError("expected a date, got a datetime; use its date()")
    return write_value(value)


def choice_shape(values: Collection[Any], where: str) -> Shape:
    """Compile a Literal or an Enum."""
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
    json = json | NUMBERS if json & NUMBERS else json

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


def union_shape(alternatives: Iterable[Shape]) -> Shape:
    """Compile a union."""
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


def _union_writer(parts: Sequence[Shape]) -> Write | None:
    if not any(part.write for part in parts):
        return None

    def write(value: Any) -> Json:
        fitting = [part for part in parts if part.kind is type(value)]
        fitting = fitting or [part for part in parts if part.kind is not None and isinstance(value, part.kind)]
        write = fitting[0].write if len(fitting) == 1 else None  # two kinds of list fit: write by type
        return (write or write_value)(value)

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


def container_shape(walk: Walk, hint: Hint, origin: Hint, arguments: Sequence[Hint], where: str) -> Shape | None:
    """Compile an array, a mapping or a text in a form; None for a hint of another kind."""
    if full_name(hint) in _FORMS:
        return _text_in_form(hint)
    if origin is tuple and hint is not tuple and arguments[1:] != (...,):
        if any(getattr(each, "__unpacked__", False) for each in arguments):  # tuple[int, *tuple[str, ...]]
            raise unsupported(hint, where)
        return _tuple([walk.of(each, where) for each in arguments])
    if origin not in _ARRAYS and origin not in _MAPPINGS:
        return None
    inside = [walk.of(each, where) for each in arguments if each is not ...]
    if origin in _ARRAYS:
        return _array(origin, inside[0] if inside else ANY)
    key, value = inside or (TEXT, ANY)
    if key.schema.get("type") != "string":
        raise UsageError(f"{where}: keys must be strings, got {arguments[0]!r}; use str or an Enum of str")
    return _mapping(origin, key, value)


def _array(origin: Any, item: Shape) -> Shape:
    make, item_fits, item_read, item_write = _ARRAYS[origin], item.fits, item.read, item.write
    different = make is not None and make is not tuple
    schema: JsonObject = {"type": "array", **({"uniqueItems": True} if different else {})}
    if item.schema:
        schema["items"] = item.schema

    def fits(value: Json) -> bool:
        return (
            type(value) is list
            and (item_fits is is_anything or all(map(item_fits, value)))
            and (not different or _are_different(value))
        )

    def read(value: list[Json]) -> Any:
        items = value if item_read is None else _read_items(item_read, value)
        return items if make is None else make(items) if make is tuple else _made_set(make, items)

    def write(value: Any) -> Json:
        write_item = item_write or write_value
        return [write_item(each) for each in value] if _is_array(value) else write_value(value)

    reads = make is not None or item_read is not None
    return Shape(schema, fits, read if reads else None, item_write and write, frozenset({list}), origin)


def _are_different(items: list[Json]) -> bool:
    # The engine has a bound on numbers that are costly to compare.
    return len(set(items)) == len(items) if all(map(is_text, items)) else _has_no_duplicates(items)


_has_no_duplicates = Verdict(lambda: {"uniqueItems": True})


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
            return write_value(value)
        return [(each.write or write_value)(item) for each, item in zip(items, value, strict=True)]

    return Shape(schema, fits, read, write, frozenset({list}), tuple)


def _mapping(origin: Any, key: Shape, value: Shape) -> Shape:
    schema: JsonObject = {"type": "object"}
    any_key = key.schema == TEXT.schema
    if not any_key:
        schema["propertyNames"] = key.schema
    if value.schema:
        schema["additionalProperties"] = value.schema

    def fits(source: Json) -> bool:
        return (
            type(source) is dict
            and (any_key or all(map(key.fits, source)))
            and (value.fits is is_anything or all(map(value.fits, source.values())))
        )

    read_key, read_value = key.read or _same, value.read or _same

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
        return write_mapping(source, lambda _: value.write) if isinstance(source, Mapping) else write_value(source)

    reads = key.read is not None or value.read is not None
    return Shape(schema, fits, read if reads else None, value.write and write, frozenset({dict}), origin)
