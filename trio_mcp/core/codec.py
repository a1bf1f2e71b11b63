"""Models to and from JSON, per revision.

`from_json` reads an object from a peer, `to_json` writes an object for a peer; `REQUESTS` says which classes belong to
which method.  JSON here means dicts, lists and scalars; `messages` reads and writes the bytes.

Reading is the same for every revision:

- Scalars are taken exactly: `True` is not an integer and `"1"` is not a number.  An integer is accepted as a number.
- Null counts as absent, unless null is a value in that place.
- Unknown members are no error and stay in `raw`.
- A value of the wrong shape becomes `MalformedContent` inside a list or a map of objects, so that one bad tool does not
  hide the others.  In any other place, and everywhere with `strict=True`, it raises a `RemoteProtocolError` that names
  the place.
- A list with very many bad elements keeps only the first `MAX_MALFORMED` of them.
- Errors do not repeat the peer's values, because they may be secret.

Writing is for one revision.  A class or field that the revision does not know is left out or refused, as its marks say.
An object that the revision spells in another way is converted first (`_CONVERSIONS`).  The unknown members of a
received object are written again.

The annotations of the models drive both directions.  Each class is compiled to one function on its first use, for each
direction and revision: most programs meet a few classes in one revision.  Types are checked in both directions, because
a program that builds an object may not run a type checker.
"""

from __future__ import annotations

import functools
import json
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from sys import intern
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, overload

import attrs

from trio_mcp.core import forms, models
from trio_mcp.core.content import (
    V2024_11,
    V2025_03,
    V2025_06,
    V2025_11,
    V2026_07,
    MalformedContent,
    Model,
    TextContent,
    ToolResultContent,
    UnknownContent,
)
from trio_mcp.core.errors import NotInThisRevision, RemoteProtocolError, UsageError
from trio_mcp.core.messages import ABSENT, KINDS, Json, JsonObject
from trio_mcp.core.revisions import Revision

__all__ = ["MAX_MALFORMED", "REQUESTS", "MethodModels", "ModelType", "from_json", "to_json"]

M = TypeVar("M", bound=Model)
ModelType: TypeAlias = type[Model] | UnionType
Write: TypeAlias = Callable[[Any], Json]


@overload
def from_json(model: type[M], data: Json, *, strict: bool = False) -> M: ...
@overload
def from_json(model: UnionType, data: Json, *, strict: bool = False) -> Model: ...
def from_json(model: Any, data: Json, *, strict: bool = False) -> Model:
    """Read `data` as `model`, a model or a union of models.  Raises `RemoteProtocolError` if it does not fit."""
    try:
        result: Model = _readers(strict)[model](data)
    except _Mismatch as mismatch:
        expected = " or ".join(member.__name__ for member in _members(model))
        raise RemoteProtocolError(f"{expected}: {mismatch}") from None
    return result


def to_json(value: Model, revision: Revision) -> JsonObject:
    """Write `value` for `revision`.  Raises `NotInThisRevision` if `revision` cannot express its meaning.

    Before 2025-06-18 there is no structured content, and before 2026-07-28 it is always an object.  For a revision that
    cannot carry the structured content, the text of `content` takes its place; if there is no text, a block with the
    JSON is added.
    """
    if not isinstance(revision, Revision):
        raise UsageError(f"to_json needs a Revision, for example REVISIONS[name], got {type(revision).__name__}")
    try:
        written: JsonObject = _writers(revision.name)[type(value)](value)
    except _Mismatch as mismatch:
        raise UsageError(f"{type(value).__name__}: {mismatch}") from None
    return written


class MethodModels(NamedTuple):
    """The models of one method."""

    params: ModelType
    result: ModelType


REQUESTS: Mapping[str, MethodModels] = MappingProxyType(
    {
        "tools/list": MethodModels(models.PaginatedParams, models.ListToolsResult),
        "tools/call": MethodModels(models.CallToolParams, models.InputRequiredResult | models.CallToolResult),
        "prompts/list": MethodModels(models.PaginatedParams, models.ListPromptsResult),
        "prompts/get": MethodModels(models.GetPromptParams, models.InputRequiredResult | models.GetPromptResult),
        "resources/list": MethodModels(models.PaginatedParams, models.ListResourcesResult),
        "resources/templates/list": MethodModels(models.PaginatedParams, models.ListResourceTemplatesResult),
        "resources/read": MethodModels(
            models.ReadResourceParams, models.InputRequiredResult | models.ReadResourceResult
        ),
        "completion/complete": MethodModels(models.CompleteParams, models.CompleteResult),
        "sampling/createMessage": MethodModels(models.CreateMessageParams, models.CreateMessageResult),
        "roots/list": MethodModels(models.Params, models.ListRootsResult),
        "elicitation/create": MethodModels(forms.ElicitParams, forms.ElicitResult),
    }
)
"""The methods that programs serve and call; a session answers the others itself."""


def _wire(field: attrs.Attribute[Any]) -> str:
    """The name of a field on the wire: `_meta`, or the alias in camel case.  A private field has a public alias."""
    name = str(field.alias)
    first, *rest = name.split("_")
    return "_meta" if name == "meta" else first + "".join(part.capitalize() for part in rest)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _same(value: Any, _: object = None) -> Any:
    return value


# Reading

_JSON_NAMES = {kind: name.split()[-1] for kind, name in KINDS.items()}  # without articles
_SCALARS: Mapping[Any, tuple[type, ...]] = {
    str: (str,), int: (int,), float: (float, int), bool: (bool,), NoneType: (NoneType,),
}  # fmt: skip
_ReadersByType: TypeAlias = Mapping[type, Callable[[Any], Any]]  # a reader for each accepted type of JSON value

# A message has room for 200,000 zeros in the place of tools (`Limits.values`).  Each `MalformedContent` says where the
# fault is, and a client logs each one; a reader needs only some of them.
MAX_MALFORMED = 100
"""How many `MalformedContent` elements of one list are kept.  The others are left out."""


class _Mismatch(Exception):
    """A value that breaks the protocol; `steps` lead to it."""

    def __init__(self, why: str, *steps: str | int) -> None:
        self.why = why
        self.steps = steps

    def within(self, step: str | int) -> _Mismatch:
        return _Mismatch(self.why, step, *self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return self.why  # all elements with this fault share one text
        # The peer chooses the keys of a map: show no more of a key than is needed to find the place.
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{ascii(step)[1:-1][:40]}" for step in self.steps)
        return f"{path.removeprefix('.')}: {self.why}"


def _construction(
    cls: type[Model], fields: Sequence[attrs.Attribute[Any]]
) -> tuple[Callable[[], Any], Sequence[Callable[[Any, Any], object]], Callable[[Any], Any]]:
    """How to make an object of a class: call the first, set each field in order, then call the last."""
    if "__attrs_post_init__" in dir(cls) or any(field.validator or field.converter for field in fields):
        # Its `__init__` checks or changes the values, and has to see `raw` with them.
        names = [str(field.alias) for field in fields]
        return list, [list.append] * len(fields), lambda values: cls(**dict(zip(names, values, strict=True)))
    # Its `__init__` would only set the fields, and this takes half as long.
    return partial(cls.__new__, cls), [getattr(cls, field.name).__set__ for field in fields], _same


class _Readers(dict[Any, Callable[..., Any]]):
    """A function that reads, for each model or union of models; it is made on the first use of that one."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict

    def __missing__(self, model: Any) -> Callable[..., Any]:
        if isinstance(model, type):
            read = self.model(model)
        else:
            readers, expected = self.by_type(_members(model))
            read = partial(self.read_one, readers, expected)
        self[model] = read if model is not models.CallToolResult else lambda data: _one_text(data) or read(data)
        return self[model]

    @staticmethod
    def read_one(readers: _ReadersByType, expected: str, value: Json) -> Any:
        read_value = readers.get(type(value))
        if read_value is None:
            raise _Mismatch(_wrong_type(expected, value))
        return read_value(value)

    def model(self, cls: type[Model]) -> Callable[..., Any]:
        fields = attrs.fields(attrs.resolve_types(cls))
        begin, setters, finish = _construction(cls, fields)
        set_raw = setters[0]
        parts = [
            (_wire(field), set_field, field.default, *self.by_type(_members(field.type)))
            for field, set_field in zip(fields, setters, strict=True)
        ][1:]
        required = [_wire(field) for field in fields if field.default is attrs.NOTHING]
        constants = [(key, constant) for key, constant in cls.MARKS.items() if constant]

        def read(data: Json) -> Any:
            if type(data) is not dict:
                raise _Mismatch(_wrong_type("object", data))
            for key, constant in constants:
                if data.get(key) != constant:
                    raise _Mismatch(f'expected "{constant}"', key)
            for key in required:
                if key not in data:
                    raise _Mismatch("missing", key)
            result = begin()
            set_raw(result, data)
            for key, set_field, default, readers, expected in parts:
                if key not in data:
                    set_field(result, default)
                    continue
                value = data[key]
                read_value = readers.get(type(value))
                if read_value is _same:
                    set_field(result, value)
                elif read_value is None:
                    raise _Mismatch(_wrong_type(expected, value), key)
                else:
                    try:
                        set_field(result, read_value(value))
                    except _Mismatch as mismatch:
                        raise mismatch.within(key) from None
            return result if finish is _same else finish(result)

        return read

    def by_type(self, members: Sequence[Any]) -> tuple[_ReadersByType, str]:
        """The readers for the members of a union, and the name of the expected type for errors."""
        readers: dict[type, Callable[[Any], Any]] = dict.fromkeys(_JSON_NAMES, _same) if Any in members else {}
        for member in members:
            readers |= dict.fromkeys(_SCALARS.get(member, ()), _same)
            origin = get_origin(member)
            if member is bytes:
                readers[str] = _bytes_from_base64
            elif origin is Literal:
                readers[str] = partial(_one_of, get_args(member))
            elif origin is Sequence:
                readers[list] = self.array(get_args(member)[0])
            elif origin is Mapping:
                readers[dict] = self.map(get_args(member)[1])
        classes = [member for member in members if isinstance(member, type) and issubclass(member, Model)]
        if classes:
            readers[dict] = self.object(classes, UnknownContent in members)
        return readers, " or ".join(_JSON_NAMES[kind] for kind in readers if kind is not NoneType)

    def element(self, annotation: Any) -> Callable[[str | int, Json], Any]:
        """A function that reads an element of a list or map, which stands at a step."""
        members = _members(annotation)
        readers, expected = self.by_type(members)
        lenient = self.lenient(members)

        def element(step: str | int, value: Json) -> Any:
            read_value = readers.get(type(value))
            if read_value is None and lenient:  # without an exception, because there can be millions
                return MalformedContent(value, _wrong_type(expected, value))
            try:
                return self.read_one(readers, expected, value) if read_value is None else read_value(value)
            except _Mismatch as mismatch:
                if lenient:
                    return MalformedContent(value, str(mismatch))
                raise mismatch.within(step) from None

        return element

    def lenient(self, members: Sequence[Any]) -> bool:
        return MalformedContent in members and not self.strict

    def array(self, annotation: Any) -> Callable[[list[Json]], list[Any]]:
        element = self.element(annotation)
        if not self.lenient(_members(annotation)):
            return lambda value: [element(index, item) for index, item in enumerate(value)]

        def array(value: list[Json]) -> list[Any]:
            items: list[Any] = []
            bad = 0
            for index, item in enumerate(value):
                read = element(index, item)
                bad += type(read) is MalformedContent
                if bad <= MAX_MALFORMED or type(read) is not MalformedContent:
                    items.append(read)
            return items

        return array

    def map(self, annotation: Any) -> Callable[[JsonObject], Mapping[str, Any]]:
        element = self.element(annotation)
        return _same if annotation is Any else lambda value: {key: element(key, item) for key, item in value.items()}

    def object(self, classes: Sequence[type[Model]], open_ended: bool) -> Callable[[JsonObject], Any]:
        """A function that chooses among `classes` by their marks; `open_ended`: unknown kinds are `UnknownContent`."""
        if len(classes) == 1:
            return lambda value: self[classes[0]](value)
        only_types = all(cls.MARKS.keys() == {"type"} for cls in classes)
        by_type = {cls.MARKS["type"]: cls for cls in classes} if only_types else {}
        marked = [] if by_type else [(cls, tuple(cls.MARKS.items())) for cls in classes]
        fits_none = "fits none of " + ", ".join(cls.__name__ for cls in classes)

        def pick(value: JsonObject) -> Any:
            if type(kind := value.get("type")) is str and (cls_of_type := by_type.get(kind)) is not None:
                return self[cls_of_type](value)
            for cls, marks in marked:
                if all(key in value and constant in (None, value[key]) for key, constant in marks):
                    return self[cls](value)
            if open_ended and isinstance(value.get("type", value.get("method")), str):
                return UnknownContent(value)
            raise _Mismatch(fits_none)

        return pick


def _mutable(cls: type) -> Any:
    """Return a subclass whose objects can be changed, and start without fields."""
    # With `__delattr__` of the frozen class, Python would call `__setattr__` by its name, ten times slower.
    methods = {name: getattr(object, name) for name in ("__init__", "__setattr__", "__delattr__")}
    return type(cls.__name__, (cls,), {"__slots__": (), **methods})


_MutableText, _MutableResult = _mutable(TextContent), _mutable(models.CallToolResult)


def _one_text(data: Json) -> Any:
    """Read a tool result that is one text, the most common kind; None for any other result.

    The general way takes five times as long, and that is a sixth of the client's cost of a call on a stream.
    """
    content = data.get("content") if type(data) is dict else None
    if type(content) is not list or len(content) != 1:
        return None
    (block,) = content
    if type(block) is not dict or len(block) != 2 or block.get("type") != "text" or type(block.get("text")) is not str:
        return None
    kind, meta = data.get("resultType"), data.get("_meta")
    if len(data) != 1 + (kind == "complete") + (type(meta) is dict):  # there are other members
        return None
    text = _MutableText()
    text.raw, text.annotations, text.meta, text.text = block, None, None, block["text"]
    text.__class__ = TextContent
    result = _MutableResult()
    result.raw, result.meta, result.result_type, result.content = data, meta, "complete", [text]
    result._structured_content, result._is_error = ABSENT, None
    result.__class__ = models.CallToolResult
    return result


def _wrong_type(expected: str, value: Json) -> str:
    kind = type(value)
    # Millions of elements share one text.
    return intern(f"expected {expected}, got {_JSON_NAMES.get(kind, kind.__name__)}")


def _one_of(values: tuple[str, ...], value: str) -> str:
    if value not in values:
        raise _Mismatch("expected one of " + ", ".join(values))
    return value


def _bytes_from_base64(text: str) -> bytes:
    with suppress(ValueError):
        return b64decode(text, validate=True)
    # The first releases of the official SDK for Python write resources in the alphabet for URLs.
    with suppress(ValueError):
        return b64decode(text, b"-_", validate=True)
    raise _Mismatch("expected base64")


_readers = functools.cache(_Readers)


# Writing


class _Writers(dict[type, Write]):
    """A function that writes, for each class; it is made on the first use of the class."""

    def __init__(self, revision: str) -> None:
        self.revision = revision

    def __missing__(self, cls: type) -> Write:
        if issubclass(cls, Model):
            write = own = self.model(cls) if cls.SINCE <= self.revision <= cls.UNTIL else self.refuse
            revisions, convert = _CONVERSIONS.get(cls, ((), _same))
            if self.revision in revisions:

                def write(value: Model) -> Json:
                    value = convert(value, self.revision)
                    return own(value) if type(value) is cls else self[type(value)](value)

        elif cls in (UnknownContent, MalformedContent):
            write = _raw
        else:
            raise UsageError(f"{cls.__name__} is not an object of the protocol")
        self[cls] = write
        return write

    def refuse(self, value: Model) -> Json:
        raise NotInThisRevision(type(value).__name__, self.revision)

    def model(self, cls: type[Model]) -> Write:
        parts = []
        vital = []
        known = {*cls.MARKS}
        for field in attrs.fields(attrs.resolve_types(cls))[1:]:
            wire = _wire(field)
            known.add(wire)
            if field.metadata.get("since", V2024_11) <= self.revision <= field.metadata.get("until", V2026_07):
                members = _members(field.type)
                plain = str if str in members else bool if bool in members else None
                absent = field.default if field.default in (None, ABSENT) else attrs.NOTHING
                parts.append((field.name, wire, absent, plain, self.member(field.type)))
            else:
                vital += [field.name] * ("vital" in field.metadata)
        constants = {key: constant for key, constant in cls.MARKS.items() if constant}

        def write(value: Model) -> JsonObject:
            for name in vital:
                if getattr(value, name) is not None:
                    raise NotInThisRevision(f"{cls.__name__}.{name}", self.revision)
            written: JsonObject = {**constants}
            wire = ""
            try:
                for name, wire, absent, plain, write_member in parts:
                    item = getattr(value, name)
                    if item is not absent:
                        written[wire] = item if type(item) is plain else write_member(item)
            except _Mismatch as mismatch:
                raise mismatch.within(wire) from None
            if value.raw is not None:
                written.update((key, _plain(item)) for key, item in value.raw.items() if key not in known)
            return written

        return write

    def member(self, annotation: Any) -> Write:
        """A function that writes a member, an item of a list, or a value of a map."""
        members = _members(annotation)
        if Any in members:
            return _plain
        if bytes in members:
            return _base64
        inside = {
            origin: self.member(get_args(each)[-1])
            for each in members
            if (origin := get_origin(each)) in (Sequence, Mapping)
        }
        write_item, write_value = inside.get(Sequence), inside.get(Mapping)
        objects = _objects(members)
        items = [each for member in members if get_origin(member) in inside for each in _members(get_args(member)[-1])]
        holds_objects = objects or _objects(items)
        readers, names = _readers(True).by_type([each for each in members if each not in objects])
        scalars = {kind: read for kind, read in readers.items() if kind not in (list, dict)}
        expected = re.sub(r"[\w.]+\.", "", str(annotation))
        scalar_types = tuple(scalars)

        def write(value: Any) -> Json:
            kind = type(value)
            if kind in objects:
                if kind is UnknownContent:  # content of a known kind must not pass unchecked
                    _readers(True)[annotation](value.raw)
                return self[kind](value)
            if write_item is not None and isinstance(value, Sequence) and (holds_objects or not isinstance(value, str)):
                return _write_each(write_item, value, range(len(value)))
            if write_value is not None and isinstance(value, Mapping):
                keys = list(map(_plain_key, value))
                return dict(zip(keys, _write_each(write_value, value.values(), keys), strict=True))
            if holds_objects and not isinstance(value, scalar_types):
                raise UsageError(f"expected {expected}, got {kind.__name__}")
            plain = _plain(value)
            read = scalars.get(type(plain))
            if read is None:
                raise _Mismatch(_wrong_type(names, plain))
            return read(plain)

        return write


def _objects(members: Sequence[Any]) -> set[type]:
    kinds = (Model, UnknownContent, MalformedContent)
    return {each for each in members if isinstance(each, type) and issubclass(each, kinds)}


def _write_each(write: Write, items: Iterable[Any], steps: Sequence[str | int]) -> list[Json]:
    result: list[Json] = []
    try:
        for item in items:
            result.append(write(item))
    except _Mismatch as mismatch:
        raise mismatch.within(steps[len(result)]) from None
    return result


def _plain(value: Any) -> Json:
    """Write any JSON as plain types: a program may use tuples, other mappings, and subclasses such as StrEnum."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool | None):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UsageError("a float that is not finite has no JSON form; use None")
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item) for item in value]
    raise UsageError(f"{type(value).__name__} cannot be part of a protocol object")


def _raw(value: UnknownContent | MalformedContent) -> Json:
    return _plain(value.raw)


def _plain_key(key: Any) -> str:
    if not isinstance(key, str):
        raise UsageError("a key that is not text has no JSON form")
    return str.__str__(key)


def _base64(value: Any) -> str:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise UsageError(f"expected bytes, got {type(value).__name__}")
    return b64encode(value).decode()


_writers = functools.cache(_Writers)


# Conversions of objects that some revisions write in another way, or cannot express


def _with_object_output(tool: models.Tool, _: str) -> models.Tool:
    """Leave out an output schema if its root is not an object, as these revisions require (tool-36).

    The schema only helps to validate.
    """
    if tool.output_schema is None or tool.output_schema.get("type") == "object":
        return tool
    return attrs.evolve(tool, output_schema=None)


def _with_object_or_text(result: Any, revision: str) -> Model:
    """Write structured content as text if the revision cannot carry it.

    In 2025-06-18 and 2025-11-25 it is always an object (tool-34); earlier it did not exist.  A server should send it as
    text in any case (tool-13).  If the server did not, clients of these revisions would get an empty result; with the
    text, a tool that is written for the newest revision works in all of them.
    """
    structured = result.structured_content
    if not result.has_structured_content or (revision >= V2025_06 and isinstance(structured, Mapping)):
        return result  # type: ignore[no-any-return]
    content = result.content
    if isinstance(content, Sequence) and not any(isinstance(block, TextContent) for block in content):
        content = [*content, TextContent(_text_of(structured))]
    return attrs.evolve(result, content=content, structured_content=ABSENT)  # type: ignore[no-any-return]


def _text_of(structured: Json) -> str:
    try:
        return json.dumps(structured, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"structured_content cannot be written as JSON: {error}") from None


def _with_one_block(message: Any, revision: str) -> Model:
    if len(message.blocks) != 1:
        raise NotInThisRevision("sampling content of several blocks", revision, "several messages")  # type-11
    return attrs.evolve(message, content=message.blocks[0])  # type: ignore[no-any-return]


def _with_plain_answers(result: forms.ElicitResult, revision: str) -> forms.ElicitResult:
    if any(isinstance(value, list | tuple) for value in (result.content or {}).values()):
        raise NotInThisRevision("an answer of several values", revision)  # type-17
    return result


def _with_enum_names(titled: forms.TitledEnumSchema, _: str) -> forms.EnumSchema:
    values, names = zip(*titled.choices, strict=True) if titled.one_of else ((), ())
    return forms.EnumSchema(list(values), list(names), title=titled.title, description=titled.description)


def _with_id(params: forms.ElicitUrlParams, revision: str) -> forms.ElicitUrlParams:
    if params.elicitation_id is None:
        raise UsageError(f"ElicitUrlParams.elicitation_id is required in {revision}")  # elic-18
    return params


_CONVERSIONS: Mapping[type, tuple[tuple[str, ...], Callable[[Any, str], Model]]] = {
    models.Tool: ((V2025_06, V2025_11), _with_object_output),
    models.CallToolResult: ((V2024_11, V2025_03, V2025_06, V2025_11), _with_object_or_text),
    ToolResultContent: ((V2025_11,), _with_object_or_text),
    models.SamplingMessage: ((V2024_11, V2025_03, V2025_06), _with_one_block),
    models.CreateMessageResult: ((V2024_11, V2025_03, V2025_06), _with_one_block),
    forms.ElicitResult: ((V2025_06,), _with_plain_answers),
    forms.TitledEnumSchema: ((V2025_06,), _with_enum_names),
    forms.ElicitUrlParams: ((V2025_11,), _with_id),
}
