"""From Python values to plain JSON: dicts, lists and scalars.

`writer_of` and `to_json_value` write as the table at the head of `schema` says.  A value is written by its own type,
except in two cases where the hint decides: an object under a hint of its base class is written as the base class, so
that no undeclared member is sent, and a named tuple under `tuple[...]` is an array.  A value that does not fit its hint
is written by its own type too; the schema of the result then finds the fault.

A value without a JSON form raises `UsageError`, which names its type.  Examples are decimals, infinities and NaN, keys
that are not text, dates and times without an offset, and a container that contains itself.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import math
import pathlib
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeAlias

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import ABSENT, Absent, Json, JsonObject
from trio_mcp.core.schema.hints import Hint, MemberHint, Walk, compiled, full_name, is_typed_dict
from trio_mcp.core.schema.self_described import describes_itself

__all__ = ["Write", "to_json_value", "writer_of"]

Write: TypeAlias = Callable[[Any], Json]


def writer_of(hint: Hint | Absent = ABSENT) -> Write:
    """Return a function that writes values of `hint` as plain JSON.  It raises `UsageError` for other types."""
    write = _write if hint is ABSENT else compiled(_Writing(), hint) or _write

    def writer(value: Any) -> Json:
        try:
            return write(value)
        except RecursionError:
            raise UsageError(f"{_kind_of(value)} is nested too deep for JSON, or contains itself") from None

    return writer


def to_json_value(value: Any, hint: Hint | Absent = ABSENT) -> Json:
    """Write one value as plain JSON; use `writer_of` for several values of one hint."""
    return writer_of(hint)(value)


def _kind_of(value: object) -> str:
    return type(value).__name__


def _same(value: Any) -> Json:
    return value


# By hint.


class _Writing(Walk):
    def annotated(self, hint: Hint, inner: Write | None) -> Write | None:
        return inner

    def scalar(self, hint: Hint) -> Write | None:
        return _write_date if full_name(hint) == "datetime.date" else None

    def choice(self, values: Collection[Any]) -> Write | None:
        return None

    def union(self, alternatives: tuple[Hint, ...]) -> Write | None:
        writers = [(_python_type(each), self.of(each)) for each in alternatives]
        if not any(write for _, write in writers):
            return None

        def write(value: Any) -> Json:
            fitting = [each for each in writers if each[0] is type(value)]
            fitting = fitting or [each for each in writers if each[0] is not None and isinstance(value, each[0])]
            write = fitting[0][1] if len(fitting) == 1 else None  # two kinds of list fit: write by type
            return (write or _write)(value)

        return write

    def array(self, origin: Hint, item: Write | None) -> Write | None:
        if item is None:
            return None
        return lambda value: [item(each) for each in value] if _is_array(value) else _write(value)

    def tuple(self, items: tuple[Hint, ...]) -> Write | None:
        writers = [self.of(item) or _write for item in items]

        def write(value: Any) -> Json:
            if not _is_array(value) or len(value) != len(writers):
                return _write(value)
            return [each(item) for each, item in zip(writers, value, strict=True)]

        return write

    def mapping(self, key: Write | None, value: Write | None) -> Write | None:
        if value is None:
            return None
        return lambda source: _write_mapping(source, lambda _: value) if isinstance(source, Mapping) else _write(source)

    def members(self, kind: type, members: list[MemberHint]) -> Write | None:
        writers = {each.name: self.of(each.hint) or _write for each in members}
        if is_typed_dict(kind):

            def write(value: Any) -> Json:
                fits = isinstance(value, Mapping)
                return _write_mapping(value, lambda name: writers.get(name, _write)) if fits else _write(value)

            return None if all(each is _write for each in writers.values()) else write
        parts = [(name, attribute, writers[name]) for name, attribute in _attributes(kind) or ()]
        return lambda value: _write_object(parts, value) if isinstance(value, kind) else _write(value)

    def self_described(self, kind: Any) -> Write | None:
        return lambda value: _write_self_described(value, kind) if isinstance(value, kind) else _write(value)


def _python_type(hint: Hint) -> type | None:
    """The class of the values of `hint`, or None."""
    if isinstance(hint, typing.NewType):
        return _python_type(hint.__supertype__)
    origin: Any = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _python_type(hint.__origin__)
    kind: Any = origin or hint
    if not isinstance(kind, type):  # None needs no conversion; an alias can stand for any type
        return None
    return dict if is_typed_dict(kind) else kind


def _is_array(value: Any) -> bool:
    return isinstance(value, Sequence | collections.abc.Set) and not isinstance(
        value, str | bytes | bytearray | memoryview
    )


def _write_date(value: Any) -> Json:
    import datetime

    if isinstance(value, datetime.datetime):
        raise UsageError("expected a date, got a datetime; use its date()")
    return _write(value)


# By type.


def _write(value: Any) -> Json:
    kind: Any = type(value)
    return (_EXACT.get(kind) or _writer_of_class(kind))(value)


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


_EXACT: Mapping[type, Write] = {
    str: _same,
    bool: _same,
    NoneType: _same,
    int: _same,
    float: _write_float,
    dict: _write_mapping,
    list: _write_array,
    tuple: _write_array,
}
_BY_BASE: Mapping[str, Write] = {
    "datetime.datetime": _write_time,
    "datetime.date": lambda value: value.isoformat(),
    "datetime.time": _write_time,
    "uuid.UUID": str,
}


@functools.lru_cache(256)  # more classes than a program returns; bounded, so that no class is kept alive forever
def _writer_of_class(kind: Any) -> Write:
    for base, write in _BASES:
        if issubclass(kind, base):
            return write
    for each in kind.__mro__:
        if full_name(each) in _BY_BASE:
            return _BY_BASE[full_name(each)]
    if _of_the_protocol(kind):
        raise UsageError(f"{kind.__name__} is an object of the protocol, not data")
    if describes_itself(kind):
        return _write_self_described
    if (attributes := _attributes(kind)) is not None:
        return functools.partial(_write_object, [(*each, _write) for each in attributes])
    if issubclass(kind, Mapping):
        return _write_mapping
    if issubclass(kind, Sequence | collections.abc.Set):
        return _write_array
    if issubclass(kind, collections.abc.Awaitable):
        raise UsageError(f"a {kind.__name__} is not a value: await it, and return its result")
    known = "text, a number, a list, a mapping, a dataclass, an attrs or a pydantic object"
    raise UsageError(f"{kind.__name__} has no JSON form here; make it {known}")


_BASES: Sequence[tuple[Any, Write]] = (
    (enum.Enum, lambda value: _write(value.value)),
    (str, str.__str__),
    (int, int.__int__),
    (float, _write_float),
    (bytes | bytearray | memoryview, _write_bytes),
    (pathlib.PurePath, str),
)


def _of_the_protocol(kind: type) -> bool:
    content = sys.modules.get("trio_mcp.core.content")  # if it is not loaded, no object of it exists
    return content is not None and issubclass(kind, content.Model)


def _attributes(kind: Any) -> list[tuple[str, str]] | None:
    """Pairs of member name in JSON and attribute name; None if the class has no known members."""
    if issubclass(kind, tuple):
        return [(name, name) for name in kind._fields] if hasattr(kind, "_fields") else None
    if attrs.has(kind):
        return [(field.alias, field.name) for field in attrs.fields(kind) if field.init]
    if not hasattr(kind, "__dataclass_fields__"):
        return None
    import dataclasses  # a program with dataclasses has already imported it

    return [(field.name, field.name) for field in dataclasses.fields(kind) if field.init]
