"""From type hints to JSON Schema (2020-12), once, when a tool is registered.

`schema_of` takes one hint, `parameters_schema` a callable's parameters.  What they return says exactly what the
matching converter accepts and makes, no more and no less:

- bytes are base64 text; datetime, date and time are RFC 3339 text; a UUID or a Path is text; an Enum is its value;
- a set is an array of different items; a fixed tuple an array of that length; a mapping an object, its keys text;
- a TypedDict, NamedTuple, dataclass or attrs class is an object, closed: a member nobody reads is a mistake, which is
  told and not dropped in silence.  attrs members go by their alias, as in the call of the class;
- fields that `__init__` does not take do not exist;
- a class that describes itself, such as pydantic's models, is what it says (see `self_described`).

A parameter with a default is not required, which does not make null a value of it: only `X | None` does.  A default
that the schema would refuse is a mistake: hosts send what they are shown.

The description of a member comes from `Annotated[T, "text"]`, else from the docstring (Google, NumPy or Sphinx style);
bounds from `Annotated[T, Field(ge=1)]`, or from any object with attributes of those names: `annotated_types` has them,
and pydantic keeps a list of those.

What surprises: definitions are written out where they are used, because many hosts cannot follow a `$ref`; only
recursive ones stand in `$defs`, and the root never is a `$ref`.  Equal hints give equal schemas, to the order of keys.

Validating is `validation`'s business, converting the server's.
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
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.jsonrpc import ABSENT, Absent, Json, JsonObject
from trio_mcp.core.records import record
from trio_mcp.core.schema.self_described import Definition, Mode, describes_itself, own_schema

__all__ = [
    "Description", "Field", "describe", "hint_of", "members_of", "parameters_schema", "resolved_alone", "schema_of",
    "substituted", "unsupported", "wrapper_of",
]  # fmt: skip

Hint = Any  # Python has no type for all that may stand behind a colon


@record(kw_only=True)
class Field:
    """What a hint alone cannot say, for use in `Annotated`."""

    title: str | None = None
    description: str | None = None
    format: str | None = None  # a note for the reader, such as "email"; nobody checks it
    header: str | None = None  # the tool argument is repeated in the HTTP header Mcp-Param-<header> (2026-07-28)
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    multiple_of: float | None = None
    min_length: int | None = None  # of text, an array or a mapping
    max_length: int | None = None
    pattern: str | None = None


def schema_of(hint: Hint, *, where: str = "the hint", mode: Mode = "validation") -> JsonObject:
    """The schema of a type hint, with any root.  Raises `UsageError`, beginning with `where`.

    `mode` makes a difference to classes that describe themselves.
    """
    builder = _Builder(mode)
    schema = builder.build(hint, where)
    for _ in builder.definitions:  # an alias may lead to a recursive class
        if "$ref" in schema:
            body = builder.definitions[schema.pop("$ref").removeprefix(_DEFINITIONS)]
            schema = {**body, **schema}
    return _with_definitions(schema, builder)


def parameters_schema(function: Callable[..., object], skip: Collection[str] = ()) -> JsonObject:
    """The schema of the arguments that `function` takes by name, those in `skip` left out; always an object."""
    builder, said = _Builder(), describe(function).members
    members = []
    for parameter in _signature(function).parameters.values():
        if parameter.name in skip:
            continue
        where = f"parameter {parameter.name!r} of {_name(function)}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(f"{where} is {parameter.kind.description}; arguments come one by one, by name")
        hint = hint_of(function, parameter.name)
        default = ABSENT if parameter.default is parameter.empty else parameter.default
        members.append(_Member(parameter.name, Any if hint is ABSENT else hint, default is ABSENT, default, where))
    return _with_definitions(builder.closed_object(members, said), builder)


def hint_of(function: Callable[..., object], name: str) -> Hint | Absent:
    """The hint of the parameter `name`, or of "return": resolved, `Annotated` kept, `ABSENT` if there is none.

    Each is resolved by itself, so that a name imported for type checkers only does no harm elsewhere.
    """
    signature = _signature(function)
    hint = signature.return_annotation if name == "return" else signature.parameters[name].annotation
    if hint is signature.empty:
        return ABSENT
    where = f"the hint of {name!r} in {_name(function)}"
    return resolved_alone(hint, getattr(_inmost(function), "__globals__", {}), where)


def _name(function: Callable[..., object]) -> str:
    return getattr(_inmost(function), "__qualname__", repr(function))


def _signature(function: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{_name(function)} does not say what it takes: {error}; give the schema by hand") from None


def _inmost(function: Any) -> Any:
    """The function that was written down, behind decorators, partials, bound methods and callable objects."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(function, type):
            function = function.__init__  # type: ignore[misc]
        elif inspect.isroutine(function):
            return function
        else:
            function = type(function).__call__


def _resolved(owner: Any, names: dict[str, Any] | None, where: str) -> dict[str, Hint]:
    try:
        return typing.get_type_hints(owner, names, include_extras=True)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        # Linters move imports that only hints need below `if TYPE_CHECKING`, which is never so when it runs.
        advice = "define or import it at module level, and not under TYPE_CHECKING"
        raise UsageError(f"{where} cannot be resolved: {error}; {advice}") from None


def resolved_alone(hint: Hint, names: dict[str, Any], where: str) -> Hint:
    return _resolved(types.SimpleNamespace(__annotations__={"it": hint}), names, where)["it"]


def _with_definitions(schema: JsonObject, builder: _Builder) -> JsonObject:
    return {**schema, "$defs": builder.definitions} if builder.definitions else schema


# What each hint becomes.

_DEFINITIONS = "#/$defs/"
# Classes inside each other.  People nest five; a generic class that contains a larger form of itself has no end.
_CLASSES = 50
_ARRAY: JsonObject = {"type": "array"}
_SET: JsonObject = {"type": "array", "uniqueItems": True}
_OBJECT: JsonObject = {"type": "object"}
_TEXT: JsonObject = {"type": "string"}

_PLAIN: dict[Hint, JsonObject] = {
    Any: {},
    object: {},
    None: {"type": "null"},
    type(None): {"type": "null"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: _TEXT,
    bytes: {"type": "string", "contentEncoding": "base64"},
    pathlib.Path: _TEXT,
    pathlib.PurePath: _TEXT,
    tuple: _ARRAY,
}
_ARRAYS: dict[Hint, JsonObject] = {
    list: _ARRAY,
    collections.abc.Sequence: _ARRAY,
    collections.abc.MutableSequence: _ARRAY,
    set: _SET,
    frozenset: _SET,
    collections.abc.Set: _SET,
    collections.abc.MutableSet: _SET,
}
# By name, so that only who writes such a hint has loaded the module.
_TEXTS: dict[str, JsonObject] = {
    "datetime.datetime": {"type": "string", "format": "date-time"},
    "datetime.date": {"type": "string", "format": "date"},
    "datetime.time": {"type": "string", "format": "time"},
    "uuid.UUID": {"type": "string", "format": "uuid"},
}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_PLAIN |= _ARRAYS | dict.fromkeys(_MAPPINGS, _OBJECT)

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class _Member(NamedTuple):
    name: str
    hint: Hint
    required: bool
    default: Any  # or ABSENT
    where: str


class _Builder:
    """One schema in the making: what is being built, and the definitions it needs."""

    def __init__(self, mode: Mode = "validation") -> None:
        self.definitions: dict[str, JsonObject] = {}
        self._mode = mode
        self._open: list[Hint] = []
        self._recursive: dict[Hint, str] = {}

    def build(self, hint: Hint, where: str) -> JsonObject:
        origin: Hint = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin is None or (not arguments and hint != tuple[()]):  # `List` alone is `list`
            return self._simple(origin or hint, where)
        if origin is typing.Annotated:
            return _annotated(self.build(arguments[0], where), arguments[1:], where)
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments, where)
        if origin is typing.Literal:
            return _choice(arguments, where)
        if origin is tuple:
            return self._tuple(arguments, where)
        if origin in _ARRAYS:
            return self._array(_ARRAYS[origin], arguments[0], where)
        if origin in _MAPPINGS:
            return self._mapping(*arguments, where=where)
        if wrapper_of(origin):
            return self.build(arguments[0], where)
        return self._once(hint, where)

    def _simple(self, hint: Hint, where: str) -> JsonObject:
        if not isinstance(hint, collections.abc.Hashable):  # `[int]` where `list[int]` was meant
            raise unsupported(hint, where)
        if isinstance(hint, typing.NewType):
            return self.build(hint.__supertype__, where)
        if hint in _PLAIN:
            return dict(_PLAIN[hint])
        if isinstance(hint, type) and (text := _TEXTS.get(f"{hint.__module__}.{hint.__qualname__}")):
            return dict(text)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _choice([member.value for member in hint], where)
        return self._once(hint, where)

    def _once(self, hint: Hint, where: str) -> JsonObject:
        """A class or an alias: written out, or by reference where it contains itself."""
        if hint not in self._recursive and hint not in self._open:
            if len(self._open) == _CLASSES:
                raise UsageError(f"{where}: more than {_CLASSES} classes inside each other; give them an end")
            self._open.append(hint)
            schema = self._written_out(hint, where)
            self._open.pop()
            if hint not in self._recursive:
                return schema
            self.definitions[self._recursive[hint]] = schema
        if hint not in self._recursive:
            name = (typing.get_origin(hint) or hint).__name__
            numbered = itertools.chain([name], (f"{name}{number}" for number in itertools.count(2)))
            self._recursive[hint] = next(each for each in numbered if each not in self._recursive.values())
        return {"$ref": _DEFINITIONS + self._recursive[hint]}

    def _written_out(self, hint: Hint, where: str) -> JsonObject:
        kind = typing.get_origin(hint) or hint
        variables = dict(zip(getattr(kind, "__parameters__", ()), typing.get_args(hint), strict=False))
        if not isinstance(kind, type) and hasattr(kind, "__value__"):  # type Alias = ...
            value = resolved_alone(kind.__value__, vars(sys.modules[kind.__module__]), f"{where}: {kind.__name__}")
            return self.build(substituted(value, variables), where)
        if describes_itself(kind):
            hint = own_schema(kind, where, self._mode)
        if isinstance(hint, Definition):
            return hint.written_out(lambda part: self._once(part, where))
        if not isinstance(kind, type) or (members := members_of(kind, where)) is None:
            raise unsupported(hint, where)
        said = describe(kind)
        schema = self.closed_object(
            [each._replace(hint=substituted(each.hint, variables)) for each in members], said.members
        )
        return {"type": "object", "description": said.text, **schema} if said.text else schema

    def closed_object(self, members: list[_Member], said: Mapping[str, str]) -> JsonObject:
        properties = {}
        for member in members:
            if isinstance(member.default, Field) or type(member.default).__name__ == _PYDANTICS:
                raise _misplaced(member)
            schema = self.build(member.hint, member.where)
            if member.name in said:
                schema.setdefault("description", said[member.name])
            if (default := _as_json(member.default)) is not ABSENT:
                if _breaks(default, schema):
                    hint = inspect.formatannotation(member.hint)
                    raise UsageError(
                        f"{member.where}: the default {member.default!r} is not what {hint} allows; change one of them"
                    )
                schema["default"] = default
            properties[member.name] = schema
        required = [member.name for member in members if member.required]
        schema = {"type": "object", "properties": properties}
        return {**schema, **({"required": required} if required else {}), "additionalProperties": False}

    def _union(self, alternatives: tuple[Hint, ...], where: str) -> JsonObject:
        branches: list[JsonObject] = []
        for alternative in sorted(alternatives, key=lambda each: each is type(None)):  # null last
            built = self.build(alternative, where)
            for branch in built["anyOf"] if built.keys() == {"anyOf"} else [built]:
                if branch not in branches:
                    branches.append(branch)
        return {"anyOf": branches} if len(branches) > 1 else branches[0]

    def _array(self, kind: JsonObject, item: Hint, where: str) -> JsonObject:
        items = self.build(item, where)
        return {**kind, "items": items} if items else dict(kind)

    def _tuple(self, arguments: tuple[Hint, ...], where: str) -> JsonObject:
        if arguments[1:] == (...,):
            return self._array(_ARRAY, arguments[0], where)
        if not arguments:
            return {"type": "array", "maxItems": 0}
        if any(getattr(each, "__unpacked__", False) for each in arguments):  # tuple[int, *tuple[str, ...]]
            raise unsupported(tuple[arguments], where)  # type: ignore[valid-type]
        items = [self.build(each, where) for each in arguments]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _mapping(self, key: Hint, value: Hint, *, where: str) -> JsonObject:
        names, values = self.build(key, where), self.build(value, where)
        if names.get("type") != "string":
            raise UsageError(f"{where}: keys are {key!r}, but in JSON they are text; use str or an Enum of str")
        schema = dict(_OBJECT)
        if names != _TEXT:
            schema["propertyNames"] = names
        if values:
            schema["additionalProperties"] = values
        return schema


def wrapper_of(origin: Hint) -> str | None:
    """Which of the forms that say something about a member, not its value.  By name: two modules have them."""
    name = str(origin).rpartition(".")[2]
    return name if name in ("Required", "NotRequired", "ReadOnly", "Final") else None


def unsupported(hint: Hint, where: str) -> UsageError:
    known = "a builtin type, a union, Literal, Enum, TypedDict, NamedTuple, a dataclass, an attrs or a pydantic class"
    return UsageError(f"{where}: {hint!r} has no JSON form here; use {known}, or give the schema by hand")


def _choice(values: Collection[Any], where: str) -> JsonObject:
    plain = [value.value if isinstance(value, enum.Enum) else value for value in values]
    for value in plain:
        if type(value) not in _JSON_TYPES:
            raise unsupported(value, where)
    kinds = {_JSON_TYPES[type(value)] for value in plain}
    return {"type": kinds.pop(), "enum": plain} if len(kinds) == 1 else {"enum": plain}


def _as_json(default: Any) -> Json | Absent:
    """A default worth showing.  None is not: it says no more than that the member may be left out."""
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


_PYDANTICS = "FieldInfo"  # what pydantic's `Field` makes, known by name: nobody need have that to use this


def _misplaced(member: _Member) -> UsageError:
    said: dict[str, Any] = {}
    for each in _with_what_it_keeps(member.default):
        said |= {name: value for name in _SAID if _is_said(value := getattr(each, name, None))}
    written = ", ".join(f"{name}={said[name]!r}" for name in _SAID if name in said)
    hint = inspect.formatannotation(member.hint)
    return UsageError(
        f"{member.where} has a {type(member.default).__name__} as its default; write {member.name}: Annotated[{hint}, "
        f"Field({written})], and its default, if it has one, after that"
    )


_HELD: dict[str, Callable[[Any, Any], bool]] = {
    "enum": lambda value, allowed: any(value == each and _is_bool(value) == _is_bool(each) for each in allowed),
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
    "minLength": lambda value, least: len(value) >= least,
    "maxLength": lambda value, most: len(value) <= most,
    "minItems": lambda value, least: len(value) >= least,
    "maxItems": lambda value, most: len(value) <= most,
    "items": lambda value, item: item is False or not any(_breaks(each, item) for each in value),
    "prefixItems": lambda value, items: len(value) == len(items) and not any(map(_breaks, value, items)),
}


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _breaks(default: Json, schema: JsonObject) -> bool:
    """Whether a default surely is not what its schema says; the engine that knows it all takes 20 ms to import."""
    if "anyOf" in schema:
        return all(_breaks(default, each) for each in schema["anyOf"])
    fitting = {_JSON_TYPES.get(type(default), "array")}
    if type(default) in (int, float):
        fitting = {"number", "integer"} if default == int(default) else {"number"}
    if "type" in schema and schema["type"] not in fitting:
        return True
    return any(keyword in schema and not held(default, schema[keyword]) for keyword, held in _HELD.items())


def substituted(hint: Hint, variables: Mapping[Hint, Hint]) -> Hint:
    """`hint` with type variables replaced: `list[T]` becomes `list[int]`."""
    if isinstance(hint, TypeVar):
        return variables.get(hint, hint)
    free = () if isinstance(hint, type) else getattr(hint, "__parameters__", ())
    if not variables or not free:
        return hint
    generic: Any = hint
    return generic[tuple(variables.get(each, each) for each in free)]


# The members of classes.


def members_of(kind: type, where: str) -> list[_Member] | None:
    """What the class has to be made of, or None if it is of no kind known here."""
    for recognises, members in _KINDS:
        if recognises(kind):
            hints = _resolved(kind, None, f"{where}: a hint in {kind.__name__}")
            found = []
            for name, hint, default in members(kind, hints):
                required = _required(hint, default is ABSENT)
                found.append(_Member(name, hint, required, default, f"{where}, member {name!r} of {kind.__name__}"))
            return found
    return None


_Found = Iterator[tuple[str, Hint, Any]]  # name, hint, default: ABSENT if required, None if optional without one


def _of_typed_dict(kind: Any, hints: dict[str, Hint]) -> _Found:
    for name, hint in hints.items():
        yield name, hint, ABSENT if name in kind.__required_keys__ else None


def _of_named_tuple(kind: Any, hints: dict[str, Hint]) -> _Found:
    for name in kind._fields:
        yield name, hints.get(name, Any), kind._field_defaults.get(name, ABSENT)


def _of_attrs(kind: Any, hints: dict[str, Hint]) -> _Found:
    for field in attrs.fields(kind):
        if field.init:
            default = ABSENT if field.default is attrs.NOTHING else field.default
            if field.converter is not None and default is not ABSENT:
                default = None  # what the converter makes of it is not known before it is called
            yield field.alias, hints.get(field.name, field.type or Any), default


def _of_dataclass(kind: Any, hints: dict[str, Hint]) -> _Found:
    import dataclasses  # who comes here has paid for it

    for field in dataclasses.fields(kind):
        if field.init:
            default = field.default
            if default is dataclasses.MISSING:
                default = ABSENT if field.default_factory is dataclasses.MISSING else None
            yield field.name, hints[field.name], default


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any, dict[str, Hint]], _Found]], ...] = (
    (lambda kind: hasattr(kind, "__required_keys__"), _of_typed_dict),
    (lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"), _of_named_tuple),
    (attrs.has, _of_attrs),
    (lambda kind: hasattr(kind, "__dataclass_fields__"), _of_dataclass),
)


def _required(hint: Hint, otherwise: bool) -> bool:
    # Seen on the hint itself: where hints are text, __required_keys__ was made before anybody could read them.
    origin: Hint = typing.get_origin(hint)
    wrapper = wrapper_of(origin)
    if wrapper in ("Required", "NotRequired"):
        return wrapper == "Required"
    if wrapper or origin is typing.Annotated:
        return _required(typing.get_args(hint)[0], otherwise)
    return otherwise


# Annotated.

_NOTES = {"title": "title", "description": "description", "format": "format", "header": "x-mcp-header"}
_SIZES = {"string": "{}Length", "array": "{}Items", "object": "{}Properties"}


def _for_numbers(keyword: str) -> dict[str, str]:
    return {"integer": keyword, "number": keyword}


_BOUNDS: dict[str, dict[str, str]] = {  # attribute -> type in the schema -> keyword
    "ge": _for_numbers("minimum"),
    "gt": _for_numbers("exclusiveMinimum"),
    "le": _for_numbers("maximum"),
    "lt": _for_numbers("exclusiveMaximum"),
    "multiple_of": _for_numbers("multipleOf"),
    "min_length": {kind: keyword.format("min") for kind, keyword in _SIZES.items()},
    "max_length": {kind: keyword.format("max") for kind, keyword in _SIZES.items()},
    "pattern": {"string": "pattern"},
}


_SAID = (*_NOTES, *_BOUNDS)


def _is_said(value: Any) -> bool:
    return value is not None and not callable(value)


def _with_what_it_keeps(extra: Any) -> Iterator[Any]:
    yield extra
    if isinstance(kept := getattr(extra, "metadata", None), list):  # where pydantic has its bounds
        yield from kept


def _annotated(schema: JsonObject, extras: tuple[Any, ...], where: str) -> JsonObject:
    for extra in itertools.chain.from_iterable(map(_with_what_it_keeps, extras)):
        if isinstance(extra, str):
            schema["description"] = extra
            continue
        if isinstance(extra, type):
            continue
        for attribute, keyword in _NOTES.items():
            if isinstance(note := getattr(extra, attribute, None), str):
                schema[keyword] = note
        for attribute, keywords in _BOUNDS.items():
            if _is_said(bound := getattr(extra, attribute, None)):
                _bind(schema, keywords, bound, f"{where}: {attribute}={bound!r}")
    return schema


def _bind(schema: JsonObject, keywords: Mapping[str, str], bound: Any, what: str) -> None:
    """Write a bound into `schema`, or into those of its alternatives that it fits."""
    if type(bound) not in ((str,) if keywords == _BOUNDS["pattern"] else (int, float)):
        raise UsageError(f"{what} is no bound that JSON Schema has; check it in the function")
    fitting = [
        branch
        for branch in schema.get("anyOf", [schema])
        # A bound on bytes would count base64 characters.
        if branch.get("type") in keywords and "contentEncoding" not in branch
    ]
    if not fitting:
        raise UsageError(f"{what} does not fit the type; it needs one of {', '.join(keywords)}")
    for branch in fitting:
        branch[keywords[branch["type"]]] = bound


# Docstrings.

_GOOGLE = frozenset({"Args:", "Arguments:", "Parameters:", "Keyword Args:", "Attributes:"})
_GOOGLE_ENTRY = r"(?P<names>\w+)\s*(\(.*?\))?\s*:\s*(?P<text>.*)"
_NUMPY = frozenset({"Parameters", "Other Parameters", "Attributes"})
_NUMPY_ENTRY = r"(?P<names>\w+(, \w+)*)(\s*:.*)?(?P<text>)"
_NUMPY_RULE = r"-{3,}\s*"
_SPHINX = r":(param|parameter|arg|argument|type|var|ivar)\b([^:]*\s)?(?P<names>\w+):\s*(?P<text>.*)"


@record
class Description:
    """A docstring in two parts: the text, and what it says of each member or parameter."""

    text: str = ""
    members: Mapping[str, str] = attrs.field(factory=dict)


def describe(thing: object) -> Description:
    """What a docstring says.  The sections that describe parameters or attributes are not part of the text."""
    if isinstance(thing, type):
        text = vars(thing).get("__doc__") or ""
        # Dataclasses and named tuples without a docstring are given their signature.
        return _parsed("" if text.startswith(f"{thing.__name__}(") else inspect.cleandoc(text))
    return _parsed(inspect.getdoc(_inmost(thing)) or "")


def _parsed(text: str) -> Description:
    lines, kept = deque(text.splitlines()), []
    members: dict[str, str] = {}
    while lines:
        line = lines.popleft()
        if line.rstrip() in _GOOGLE:
            members |= _entries(_indented(lines), _GOOGLE_ENTRY)
        elif line.rstrip() in _NUMPY and lines and re.fullmatch(_NUMPY_RULE, lines[0]):
            lines.popleft()
            members |= _entries(_up_to_heading(lines), _NUMPY_ENTRY)
        elif line.startswith(":") and (sphinx := re.fullmatch(_SPHINX, line)):
            rest = " ".join([sphinx["text"], *_indented(lines)])
            if sphinx[1] != "type":
                members[sphinx["names"]] = " ".join(rest.split())
        else:
            kept.append(line)
    return Description("\n".join(kept).strip(), members)


def _indented(lines: deque[str]) -> Iterator[str]:
    while lines and (not lines[0] or lines[0][0].isspace()):
        yield lines.popleft()


def _up_to_heading(lines: deque[str]) -> Iterator[str]:
    while lines and not (len(lines) > 1 and re.fullmatch(_NUMPY_RULE, lines[1])):
        yield lines.popleft()


def _entries(section: Iterator[str], entry: str) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in inspect.cleandoc("\n" + "\n".join(section)).splitlines():
        if begins := re.fullmatch(entry, line):  # at the margin; what is indented goes on
            names = begins["names"].split(", ")
            found |= {name: [begins["text"]] for name in names}
        else:
            for name in names:
                found[name].append(line)
    return {name: " ".join(" ".join(texts).split()) for name, texts in found.items()}
