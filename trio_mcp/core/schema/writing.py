"""Writing: the JSON of Python values.

A value is written by its own type, except in two cases where the hint decides: an object under a hint of its base class
is written as the base class, so that no undeclared member is sent, and a named tuple under `tuple[...]` is an array.
A value that does not fit its hint is written by its own type too; the check of the result finds the fault.  A value
without a JSON form raises `UsageError`, which names its type.  Examples are decimals, infinities and NaN, keys that are
not text, and a container that contains itself.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import trio_mcp.core.schema as room  # it loads what only classes need
from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import ABSENT, PLAIN, Absent, Json, JsonObject
from trio_mcp.core.schema.hints import Hint, full_name

__all__ = ["to_json_value", "write_guarded", "write_mapping", "write_object", "write_self_described", "write_value"]

Write: TypeAlias = Callable[[Any], Json]


def to_json_value(value: Any, hint: Hint | Absent = ABSENT) -> Json:
    """Write one value as plain JSON, as `Shape.write` does; without a hint by its own type."""
    write = None if hint is ABSENT else room.shape_of(hint).write
    return write_guarded(write_value, value) if write is None else write(value)


def write_guarded(write: Write, value: Any) -> Json:
    """Write a value that may contain itself."""
    try:
        return write(value)
    except RecursionError:
        raise UsageError(f"{_kind_of(value)} is nested too deep for JSON, or contains itself") from None


def write_value(value: Any) -> Json:
    """Write a value by its own type.  Raises `UsageError`."""
    kind: Any = type(value)
    if kind in PLAIN:
        return value
    return (_EXACT_WRITERS.get(kind) or _writer_of_class(kind))(value)


def _write_float(value: float) -> float:
    if not math.isfinite(value):
        raise UsageError("a float that is not finite has no JSON form; use None")
    return float(value)


def _write_array(value: Iterable[Any]) -> list[Json]:
    return [write_value(item) for item in value]


def write_mapping(value: Mapping[Any, Any], writer_at: Callable[[str], Write | None] = lambda _: None) -> JsonObject:
    """Write a mapping; `writer_at` says how to write the value of a key, or None."""
    result: JsonObject = {}
    for key, item in value.items():
        name = key if type(key) is str else write_value(key)
        if type(name) is not str:
            raise UsageError(f"a key of type {_kind_of(key)} has no JSON form: keys must be text")
        result[name] = (writer_at(name) or write_value)(item)
    if len(result) != len(value):
        raise UsageError(f"two keys of a {_kind_of(value)} become the same text")
    return result


def write_object(parts: Sequence[tuple[str, str, Write | None]], value: Any) -> JsonObject:
    """Write an object.  `parts` are the names of its members, their attributes, and their writers."""
    result: JsonObject = {}
    for name, attribute, write in parts:
        item = getattr(value, attribute)
        result[name] = item if type(item) in PLAIN else (write or write_value)(item)
    return result


def write_self_described(value: Any, kind: Any = None) -> Json:
    """Write a model; as `kind`, if its class is derived from `kind`."""
    only = {}
    if kind is not None and type(value) is not kind:
        only = {"include": {*kind.model_fields, *kind.model_computed_fields}}
    return write_value(value.model_dump(mode="json", by_alias=True, **only))  # `model_dump` keeps NaN


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
    float: _write_float,
    dict: write_mapping,
    list: _write_array,
    tuple: _write_array,
}
_WRITERS_BY_BASE: Sequence[tuple[Any, Write]] = (
    (enum.Enum, lambda value: write_value(value.value)),
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
        if (name := full_name(each)) in _WRITERS_BY_NAME:
            return _WRITERS_BY_NAME[name]
    content = sys.modules.get("trio_mcp.core.content")  # if it is not loaded, no object of the protocol exists
    if content is not None and issubclass(kind, content.Model):
        raise UsageError(f"{kind.__name__} is an object of the protocol, not data")
    if room.describes_itself(kind):
        return write_self_described
    if (attributes := room.attributes_of(kind)) is not None:
        return functools.partial(write_object, [(*each, None) for each in attributes.items()])
    if issubclass(kind, Mapping):
        return write_mapping
    if issubclass(kind, Sequence | collections.abc.Set):
        return _write_array
    if issubclass(kind, collections.abc.Awaitable):
        raise UsageError(f"a {kind.__name__} is not a value: await it, and return its result")
    known = "text, a number, a list, a mapping, a dataclass, an attrs or a pydantic object"
    raise UsageError(f"{kind.__name__} has no JSON form here; make it {known}")
