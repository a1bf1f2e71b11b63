"""Models to and from JSON, per revision.

`from_json` reads what a peer sent, `to_json` writes what we send; `REQUESTS` and `NOTIFICATIONS` say which classes
belong to which method.  JSON here means dicts, lists and scalars: bytes are `jsonrpc`'s.

Reading is the same for every revision.  Scalars are taken exactly (`True` is no integer, `"1"` no number; an integer
may stand where a number may), null counts as absence unless it is a value there, unknown members are no error and stay
in `raw`.  What does not fit is `MalformedContent` inside a list or a map of objects, so that one bad tool does not hide
the others, and a `RemoteProtocolError` that names the place anywhere else; with `strict=True` it is always that.  Of a
list with very many of them only the first are kept (`MAX_MALFORMED`), and how many there were.  Contents are not
repeated in errors, as they may be secret.

Writing is for one revision.  What it does not know is left out or refused as the marks on classes and fields say; what
it wants said differently stands in `_SAID_DIFFERENTLY`.  The unknown members of a received object go out again.

The annotations of the models drive both.  Each class becomes a function, on its first use in a direction and revision,
as most programs meet a few classes in one revision.  Those that write are made by cattrs, which is imported then, too.
"""

from __future__ import annotations

import functools
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
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
from trio_mcp.core.jsonrpc import ABSENT, Json, JsonObject
from trio_mcp.core.records import thawed
from trio_mcp.core.revisions import Revision

__all__ = ["MAX_MALFORMED", "NOTIFICATIONS", "REQUESTS", "Shape", "Shapes", "from_json", "to_json"]

M = TypeVar("M", bound=Model)
Shape: TypeAlias = type[Model] | UnionType
Write: TypeAlias = Callable[[Any], Json]


@overload
def from_json(shape: type[M], data: Json, *, strict: bool = False) -> M: ...
@overload
def from_json(shape: UnionType, data: Json, *, strict: bool = False) -> Model: ...
def from_json(shape: Any, data: Json, *, strict: bool = False) -> Model:
    """An object of `shape`, which is a model or a union of models.  Raises `RemoteProtocolError` if it is none."""
    try:
        found: Model = _readers(strict)[shape](data)
    except _Mismatch as misfit:
        wanted = " or ".join(member.__name__ for member in _members(shape))
        raise RemoteProtocolError(f"{wanted}: {misfit}") from None
    return found


def to_json(value: Model, revision: Revision) -> JsonObject:
    """`value` as `revision` has it.  Raises `NotInThisRevision` where that would lose the meaning.

    Structured content that `revision` cannot carry (before 2025-06-18 any, before 2026-07-28 what is no object) is
    said by the text of `content`; if there is no text, a block with the JSON is added.
    """
    if not isinstance(revision, Revision):
        raise UsageError(f"to_json writes for a Revision, such as REVISIONS[name], not {type(revision).__name__}")
    written: JsonObject = _writers(revision.name)[type(value)](value)
    return written


class Shapes(NamedTuple):
    params: Shape
    result: Shape


REQUESTS: Mapping[str, Shapes] = MappingProxyType(
    {
        "initialize": Shapes(models.InitializeParams, models.InitializeResult),
        "server/discover": Shapes(models.Params, models.DiscoverResult),
        "ping": Shapes(models.Params, models.Result),
        "tools/list": Shapes(models.PaginatedParams, models.ListToolsResult),
        "tools/call": Shapes(models.CallToolParams, models.InputRequiredResult | models.CallToolResult),
        "prompts/list": Shapes(models.PaginatedParams, models.ListPromptsResult),
        "prompts/get": Shapes(models.GetPromptParams, models.InputRequiredResult | models.GetPromptResult),
        "resources/list": Shapes(models.PaginatedParams, models.ListResourcesResult),
        "resources/templates/list": Shapes(models.PaginatedParams, models.ListResourceTemplatesResult),
        "resources/read": Shapes(models.ReadResourceParams, models.InputRequiredResult | models.ReadResourceResult),
        "resources/subscribe": Shapes(models.SubscribeParams, models.Result),
        "resources/unsubscribe": Shapes(models.SubscribeParams, models.Result),
        "completion/complete": Shapes(models.CompleteParams, models.CompleteResult),
        "logging/setLevel": Shapes(models.SetLevelParams, models.Result),
        "subscriptions/listen": Shapes(models.ListenParams, models.Result),
        "sampling/createMessage": Shapes(models.CreateMessageParams, models.CreateMessageResult),
        "roots/list": Shapes(models.Params, models.ListRootsResult),
        "elicitation/create": Shapes(forms.ElicitParams, forms.ElicitResult),
    }
)

NOTIFICATIONS: Mapping[str, type[Model]] = MappingProxyType(
    {
        "notifications/initialized": models.Params,
        "notifications/cancelled": models.CancelledParams,
        "notifications/progress": models.ProgressParams,
        "notifications/message": models.LoggingMessageParams,
        "notifications/tools/list_changed": models.Params,
        "notifications/prompts/list_changed": models.Params,
        "notifications/resources/list_changed": models.Params,
        "notifications/resources/updated": models.ResourceUpdatedParams,
        "notifications/roots/list_changed": models.Params,
        "notifications/elicitation/complete": forms.ElicitationCompleteParams,
        "notifications/subscriptions/acknowledged": models.AcknowledgedParams,
    }
)


def _wire(field: attrs.Attribute[Any]) -> str:
    """The one rule for names: `_meta`, and all others in camel case.  A field that is private goes by its alias."""
    name = str(field.alias)
    first, *rest = name.split("_")
    return "_meta" if name == "meta" else first + "".join(part.capitalize() for part in rest)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _same(value: Any, _: object = None) -> Any:
    return value


@functools.cache
def _converter() -> Any:
    from cattrs import BaseConverter

    return BaseConverter()


# Reading

_JSON_NAMES = {
    dict: "object", list: "array", str: "string", float: "number", int: "integer", bool: "boolean", NoneType: "null",
}  # fmt: skip
_SCALARS: Mapping[Any, tuple[type, ...]] = {
    str: (str,), int: (int,), float: (float, int), bool: (bool,), NoneType: (NoneType,),
}  # fmt: skip
_Takes: TypeAlias = Mapping[type, Callable[[Any], Any]]  # for each kind of JSON value, a function that takes it

# A message of 4 MiB has room for two million zeros in the place of tools.  Each `MalformedContent` says where to look,
# and nobody looks at more than some; beyond, only how many they are is kept.
MAX_MALFORMED = 100
"""How many `MalformedContent` elements of one list are kept.  The `why` of the last one tells how many more there
were."""


class _Mismatch(Exception):
    """Something is not as the protocol says; `steps` lead to it."""

    def __init__(self, why: str, *steps: str | int) -> None:
        self.why = why
        self.steps = steps

    def within(self, step: str | int) -> _Mismatch:
        return _Mismatch(self.why, step, *self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return self.why  # the same text for all elements of a kind
        # The keys of a map are a peer's own words: no more of them than finding the place takes.
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{ascii(step)[1:-1][:40]}" for step in self.steps)
        return f"{path.removeprefix('.')}: {self.why}"


class _Construction(NamedTuple):
    """How an object of a class is made: begun, then its fields are put into it, in order, then finished if need be."""

    begin: Callable[[], Any]
    puts: Sequence[Callable[[Any, Any], object]]
    finish: Callable[[Any], Any] | None


def _making(cls: type[Model], fields: Sequence[attrs.Attribute[Any]]) -> _Construction:
    if "__attrs_post_init__" in dir(cls) or any(field.validator or field.converter for field in fields):
        # It checks or changes what it is given, and wants to know at once that it was received.
        names = [str(field.alias) for field in fields]
        return _Construction(
            list, [list.append] * len(fields), lambda values: cls(**dict(zip(names, values, strict=True)))
        )
    # Nothing of its own would happen in its `__init__`, and this takes half as long.
    return _Construction(partial(cls.__new__, cls), [getattr(cls, field.name).__set__ for field in fields], None)


class _Readers(dict[Any, Callable[..., Any]]):
    """A function for each shape, made when it is first asked for."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict

    def __missing__(self, shape: Any) -> Callable[..., Any]:
        read = self.model(shape) if isinstance(shape, type) else self.of(shape)
        self[shape] = read if shape is not models.CallToolResult else lambda data: _one_text(data) or read(data)
        return self[shape]

    def model(self, cls: type[Model]) -> Callable[..., Any]:
        fields = attrs.fields(attrs.resolve_types(cls))
        begin, puts, finish = _making(cls, fields)
        put_raw = puts[0]
        parts = [
            (_wire(field), put, field.default, *self.field(field)) for field, put in zip(fields, puts, strict=True)
        ][1:]
        required = [_wire(field) for field in fields if field.default is attrs.NOTHING]
        constants = [(key, constant) for key, constant in cls.MARKS.items() if constant]

        def read(data: Json) -> Any:
            if type(data) is not dict:
                raise _Mismatch(_unlike("object", data))
            for key, constant in constants:
                if data.get(key) != constant:
                    raise _Mismatch(f'expected "{constant}"', key)
            for key in required:
                if key not in data:
                    raise _Mismatch("missing", key)
            found = begin()
            put_raw(found, data)
            for key, put, default, takes, expected in parts:
                if key not in data:
                    put(found, default)
                    continue
                value = data[key]
                take = _same if takes is None else takes.get(type(value))
                if take is _same:
                    put(found, value)
                elif take is None:
                    raise _Mismatch(_unlike(expected, value), key)
                else:
                    try:
                        put(found, take(value))
                    except _Mismatch as misfit:
                        raise misfit.within(key) from None
            return found if finish is None else finish(found)

        return read

    def field(self, field: attrs.Attribute[Any]) -> tuple[_Takes | None, str]:
        """What it takes, and what that is called; None: anything."""
        members = _members(field.type)
        return (None, "") if Any in members else self.takes(members)

    def of(self, annotation: Any) -> Callable[[Json], Any]:
        members = _members(annotation)
        if Any in members:
            return _same
        takes, expected = self.takes(members)

        def read(value: Json) -> Any:
            take = takes.get(type(value))
            if take is None:
                raise _Mismatch(_unlike(expected, value))
            return take(value)

        return read

    def takes(self, members: Sequence[Any]) -> tuple[_Takes, str]:
        """What takes the values that may stand there, and what they are called."""
        takes: dict[type, Callable[[Any], Any]] = {}
        for member in members:
            takes |= dict.fromkeys(_SCALARS.get(member, ()), _same)
            origin = get_origin(member)
            if member is bytes:
                takes[str] = _bytes_from_base64
            elif origin is Literal:
                takes[str] = partial(_one_of, get_args(member))
            elif origin is Sequence:
                takes[list] = self.array(get_args(member)[0])
            elif origin is Mapping:
                takes[dict] = self.map(get_args(member)[1])
        shapes = [member for member in members if isinstance(member, type) and issubclass(member, Model)]
        if shapes:
            takes[dict] = self.object(shapes, UnknownContent in members)
        return takes, " or ".join(_JSON_NAMES[kind] for kind in takes if kind is not NoneType)

    def element(self, annotation: Any) -> Callable[[str | int, Json], Any]:
        if self.lenient(annotation):
            return self.lenient_element(annotation)
        read = self.of(annotation)

        def element(step: str | int, value: Json) -> Any:
            try:
                return read(value)
            except _Mismatch as misfit:
                raise misfit.within(step) from None

        return element

    def lenient(self, annotation: Any) -> bool:
        return MalformedContent in _members(annotation) and not self.strict

    def lenient_element(self, annotation: Any) -> Callable[[str | int, Json], Any]:
        takes, expected = self.takes(_members(annotation))

        def element(_: str | int, value: Json) -> Any:
            take = takes.get(type(value))
            if take is None:  # without an exception, as there can be millions
                return MalformedContent(value, _unlike(expected, value))
            try:
                return take(value)
            except _Mismatch as misfit:
                return MalformedContent(value, str(misfit))

        return element

    def array(self, annotation: Any) -> Callable[[list[Json]], list[Any]]:
        element = self.element(annotation)
        if not self.lenient(annotation):
            return lambda value: [element(index, item) for index, item in enumerate(value)]

        def array(value: list[Json]) -> list[Any]:
            items: list[Any] = []
            bad = last = 0
            for index, item in enumerate(value):
                read = element(index, item)
                if type(read) is MalformedContent:
                    bad += 1
                    if bad > MAX_MALFORMED:
                        continue
                    last = index  # nothing is left out before it
                items.append(read)
            if bad > MAX_MALFORMED:
                why = f"{items[last].why} (and {bad - MAX_MALFORMED} more elements after it, which are not kept)"
                items[last] = MalformedContent(items[last].raw, why)
            return items

        return array

    def map(self, annotation: Any) -> Callable[[JsonObject], Mapping[str, Any]]:
        element = self.element(annotation)
        return _same if annotation is Any else lambda value: {key: element(key, item) for key, item in value.items()}

    def object(self, shapes: Sequence[type[Model]], open_ended: bool) -> Callable[[JsonObject], Any]:
        if len(shapes) == 1:
            return lambda value: self[shapes[0]](value)
        alike = all(cls.MARKS.keys() == {"type"} for cls in shapes)
        by_type = {cls.MARKS["type"]: cls for cls in shapes} if alike else {}
        marked = [] if by_type else [(cls, tuple(cls.MARKS.items())) for cls in shapes]
        fits_none = "fits none of " + ", ".join(cls.__name__ for cls in shapes)

        def pick(value: JsonObject) -> Any:
            if type(kind := value.get("type")) is str and (likely := by_type.get(kind)) is not None:
                return self[likely](value)
            for cls, marks in marked:
                if all(key in value and constant in (None, value[key]) for key, constant in marks):
                    return self[cls](value)
            if open_ended and isinstance(value.get("type", value.get("method")), str):
                return UnknownContent(value)
            raise _Mismatch(fits_none)

        return pick


_text_in_the_making, _result_in_the_making = thawed(TextContent), thawed(models.CallToolResult)


def _one_text(data: Json) -> Any:
    """The result of a tool that is one text, as those of most are; None of any other.  Member by member it takes five
    times as long, and that is a sixth of what a call by a stream costs a client."""
    content = data.get("content") if type(data) is dict else None
    if type(content) is not list or len(content) != 1:
        return None
    (block,) = content
    if type(block) is not dict or len(block) != 2 or block.get("type") != "text" or type(block.get("text")) is not str:
        return None
    kind, meta = data.get("resultType"), data.get("_meta")
    if len(data) != 1 + (kind == "complete") + (type(meta) is dict):  # there is nothing else
        return None
    text = _text_in_the_making()
    text.raw, text.annotations, text.meta, text.text = block, None, None, block["text"]
    text.__class__ = TextContent
    result = _result_in_the_making()
    result.raw, result.meta, result.result_type, result.content = data, meta, "complete", [text]
    result._structured_content, result._is_error = ABSENT, None
    result.__class__ = models.CallToolResult
    return result


def _unlike(expected: str, value: Json) -> str:
    kind = type(value)
    return intern(f"expected {expected}, got {_JSON_NAMES.get(kind, kind.__name__)}")  # one text for millions


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
    """A function for each class, made when it is first asked for."""

    def __init__(self, revision: str) -> None:
        self.revision = revision

    def __missing__(self, cls: type) -> Write:
        if issubclass(cls, Model):
            write = self.model(cls) if cls.SINCE <= self.revision <= cls.UNTIL else self.refuse
            where, say = _SAID_DIFFERENTLY.get(cls, ((), None))
            if say is not None and self.revision in where:
                write = self.differently(cls, write, say)
        elif cls in (UnknownContent, MalformedContent):
            write = attrgetter("raw")
        else:
            raise UsageError(f"{cls.__name__} is no object of the protocol")
        self[cls] = write
        return write

    def refuse(self, value: Model) -> Json:
        raise NotInThisRevision(type(value).__name__, self.revision)

    def differently(self, cls: type[Model], write: Write, say: Callable[[Any, str], Model]) -> Write:
        def differently(value: Model) -> Json:
            value = say(value, self.revision)
            return write(value) if type(value) is cls else self[type(value)](value)

        return differently

    def model(self, cls: type[Model]) -> Write:
        from cattrs.gen import make_dict_unstructure_fn, override

        hooks: dict[str, Any] = {"raw": override(omit=True)}
        vital = []
        known = {*cls.MARKS}
        for field in attrs.fields(attrs.resolve_types(cls))[1:]:
            wire = _wire(field)
            known.add(wire)
            if field.metadata.get("since", V2024_11) <= self.revision <= field.metadata.get("until", V2026_07):
                optional = field.default is None or field.default is ABSENT
                hooks[field.name] = override(rename=wire, unstruct_hook=self.of(field.type), omit_if_default=optional)
            else:
                hooks[field.name] = override(omit=True)
                vital += [field.name] * ("vital" in field.metadata)
        members = make_dict_unstructure_fn(cls, _converter(), **hooks)
        constants = {key: constant for key, constant in cls.MARKS.items() if constant}

        def write(value: Model) -> JsonObject:
            for name in vital:
                if getattr(value, name) is not None:
                    raise NotInThisRevision(f"{cls.__name__}.{name}", self.revision)
            written = {**constants, **members(value)}
            if value.raw is not None:
                written.update((key, item) for key, item in value.raw.items() if key not in known)
            return written

        return write

    def of(self, annotation: Any) -> Write:
        """What to do with a field.  cattrs reads past a field whose function is its own `identity`."""
        from cattrs.fns import identity

        members = _members(annotation)
        if bytes in members:
            return _base64
        inside = [get_args(member)[-1] for member in members if get_origin(member) in (Sequence, Mapping)]
        nested = self.of(inside[0]) if inside else identity
        allowed = frozenset(
            m for m in members if isinstance(m, type) and issubclass(m, Model | UnknownContent | MalformedContent)
        )
        if nested is identity and not allowed:
            return identity

        def write(value: Any) -> Json:
            if type(value) in allowed:
                return self[type(value)](value)
            if inside and isinstance(value, Sequence):
                return [nested(item) for item in value]
            if inside and isinstance(value, Mapping):
                return {key: nested(item) for key, item in value.items()}
            wanted = re.sub(r"[\w.]+\.", "", str(annotation))
            raise UsageError(f"{type(value).__name__} cannot stand where {wanted} is wanted")

        return write


def _base64(value: Any) -> str:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise UsageError(f"{type(value).__name__} cannot stand where bytes are wanted")
    return b64encode(value).decode()


_writers = functools.cache(_Writers)


# What some revisions want said differently, or cannot be told


def _with_object_output(tool: models.Tool, _: str) -> models.Tool:
    """The root of an output schema was an object (tool-36).  Another one is left out: it only helps to validate."""
    if tool.output_schema is None or tool.output_schema.get("type") == "object":
        return tool
    return attrs.evolve(tool, output_schema=None)


def _with_object_or_text(result: Any, revision: str) -> Model:
    """Structured content was an object (tool-34), and before that did not exist, when a text had to say it all.

    It should be there as text in any case (tool-13), and where it was not, the clients of these revisions would get
    nothing.  So whoever writes a tool for the newest revision is understood in all of them.
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


def _with_one_block(said: Any, revision: str) -> Model:
    if len(said.blocks) != 1:
        raise NotInThisRevision("sampling content of several blocks", revision, "several messages")  # type-11
    return attrs.evolve(said, content=said.blocks[0])  # type: ignore[no-any-return]


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


_SAID_DIFFERENTLY: Mapping[type, tuple[tuple[str, ...], Callable[[Any, str], Model]]] = {
    models.Tool: ((V2025_06, V2025_11), _with_object_output),
    models.CallToolResult: ((V2024_11, V2025_03, V2025_06, V2025_11), _with_object_or_text),
    ToolResultContent: ((V2025_11,), _with_object_or_text),
    models.SamplingMessage: ((V2024_11, V2025_03, V2025_06), _with_one_block),
    models.CreateMessageResult: ((V2024_11, V2025_03, V2025_06), _with_one_block),
    forms.ElicitResult: ((V2025_06,), _with_plain_answers),
    forms.TitledEnumSchema: ((V2025_06,), _with_enum_names),
    forms.ElicitUrlParams: ((V2025_11,), _with_id),
}
