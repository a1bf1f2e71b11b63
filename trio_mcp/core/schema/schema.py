"""From type hints to JSON Schema (2020-12), once, when a tool is registered.

`schema_of` takes one hint, and `parameters_schema` takes the parameters of a callable.  The schema describes exactly
the values that the readers in `values` accept and the writers in `writing` make:

| Type | Schema |
|---|---|
| bytes | base64 text |
| datetime, date, time | RFC 3339 text |
| UUID, Path | text |
| Enum | the values of its members |
| set | an array of different items |
| tuple of fixed length | an array of that length |
| mapping | an object; its keys are text |
| TypedDict, NamedTuple, dataclass, attrs class | an object without other members |
| a class that describes itself, such as a pydantic model | its own schema (see `self_described`) |

An unknown member of an object is refused, because it would be dropped silently otherwise.  The members of an attrs
class have their aliases as names, as in the call of the class.  Fields that `__init__` does not take are left out.

A parameter with a default is not required.  Null is a value of it only if the hint is `X | None`.  A default that the
schema would refuse raises `UsageError`, because hosts send the defaults that they see.

The description of a member comes from `Annotated[T, "text"]`, otherwise from the docstring (Google, NumPy or Sphinx
style).  Bounds come from `Annotated[T, Field(ge=1)]`, or from any object with attributes of those names: the classes of
`annotated_types` have them, and pydantic keeps a list of these.

Surprising: definitions are written out where they are used, because many hosts cannot follow a `$ref`.  Only recursive
definitions are in `$defs`, and the root is never a `$ref`.  Equal hints give equal schemas with the same order of keys.
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
from trio_mcp.core.messages import ABSENT, Absent, Json, JsonObject, record
from trio_mcp.core.schema.self_described import Definition, Mode, describes_itself, own_schema

__all__ = [
    "Description", "Field", "describe", "hint_of", "members_of", "parameters_schema", "resolved_alone", "schema_of",
    "substituted", "unsupported", "wrapper_of",
]  # fmt: skip

Hint = Any  # Python has no type for type hints


@record(kw_only=True)
class Field:
    """Details of a parameter or member that a type hint cannot express: `Annotated[int, Field(ge=1)]`."""

    title: str | None = None
    description: str | None = None
    format: str | None = None  # a note for the reader, such as "email"; it is not checked
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
    """Return the schema of a type hint.  Raises `UsageError`, with a text that begins with `where`.

    `mode` matters only for classes that describe themselves.
    """
    builder = _Builder(mode)
    schema = builder.build(hint, where)
    for _ in builder.definitions:  # an alias may lead to a recursive class
        if "$ref" in schema:
            body = builder.definitions[schema.pop("$ref").removeprefix(_DEFINITIONS)]
            schema = {**body, **schema}
    return _with_definitions(schema, builder)


def parameters_schema(function: Callable[..., object], skip: Collection[str] = ()) -> JsonObject:
    """Return the schema of the arguments that `function` takes by name, except those in `skip`.

    It is the schema of an object.
    """
    builder, descriptions = _Builder(), describe(function).members
    members = []
    for parameter in _signature(function).parameters.values():
        if parameter.name in skip:
            continue
        where = f"parameter {parameter.name!r} of {_name(function)}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(f"{where} is {parameter.kind.description}; declare each argument as a named parameter")
        hint = hint_of(function, parameter.name)
        default = ABSENT if parameter.default is parameter.empty else parameter.default
        members.append(_Member(parameter.name, Any if hint is ABSENT else hint, default is ABSENT, default, where))
    return _with_definitions(builder.closed_object(members, descriptions), builder)


def hint_of(function: Callable[..., object], name: str) -> Hint | Absent:
    """Return the resolved hint of the parameter `name`, or of "return", with its `Annotated`; `ABSENT` if it has none.

    Each hint is resolved by itself, so that a name that is imported for type checkers only does not affect the others.
    """
    signature = _signature(function)
    hint = signature.return_annotation if name == "return" else signature.parameters[name].annotation
    if hint is signature.empty:
        return ABSENT
    where = f"the hint of {name!r} in {_name(function)}"
    return resolved_alone(hint, getattr(_innermost(function), "__globals__", {}), where)


def _name(function: Callable[..., object]) -> str:
    return getattr(_innermost(function), "__qualname__", repr(function))


def _signature(function: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        why = f"the parameters of {_name(function)} cannot be read: {error}"
        raise UsageError(f"{why}; give the schema by hand") from None


def _innermost(function: Any) -> Any:
    """The function in the source code, behind decorators, partials, bound methods and callable objects."""
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
        # Linters move imports that only hints need below `if TYPE_CHECKING`, which is false at run time.
        advice = "define or import it at module level, and not under TYPE_CHECKING"
        raise UsageError(f"{where} cannot be resolved: {error}; {advice}") from None


def resolved_alone(hint: Hint, names: dict[str, Any], where: str) -> Hint:
    """Return one hint with its names resolved in `names`.  Raises `UsageError` if a name is unknown."""
    return _resolved(types.SimpleNamespace(__annotations__={"it": hint}), names, where)["it"]


def _with_definitions(schema: JsonObject, builder: _Builder) -> JsonObject:
    return {**schema, "$defs": builder.definitions} if builder.definitions else schema


# The schema of each kind of hint.

_DEFINITIONS = "#/$defs/"
# Nested classes.  Programs nest about five; a generic class that contains a larger form of itself nests without end.
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
# By name: only programs with these hints load their modules.
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
    """Builds one schema, and collects the definitions that it needs."""

    def __init__(self, mode: Mode = "validation") -> None:
        self.definitions: dict[str, JsonObject] = {}
        self._mode = mode
        self._building: list[Hint] = []  # the classes and aliases around the current one
        self._recursive: dict[Hint, str] = {}  # names in `definitions`

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
        return self._class_or_alias(hint, where)

    def _simple(self, hint: Hint, where: str) -> JsonObject:
        if not isinstance(hint, collections.abc.Hashable):  # `[int]` instead of `list[int]`
            raise unsupported(hint, where)
        if isinstance(hint, typing.NewType):
            return self.build(hint.__supertype__, where)
        if hint in _PLAIN:
            return dict(_PLAIN[hint])
        if isinstance(hint, type) and (text := _TEXTS.get(f"{hint.__module__}.{hint.__qualname__}")):
            return dict(text)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _choice([member.value for member in hint], where)
        return self._class_or_alias(hint, where)

    def _class_or_alias(self, hint: Hint, where: str) -> JsonObject:
        """The schema itself, or a reference if the class or alias contains itself."""
        if hint not in self._recursive and hint not in self._building:
            if len(self._building) == _CLASSES:
                raise UsageError(f"{where}: more than {_CLASSES} nested classes; end the recursion")
            self._building.append(hint)
            schema = self._written_out(hint, where)
            self._building.pop()
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
            return hint.written_out(lambda part: self._class_or_alias(part, where))
        if not isinstance(kind, type) or (members := members_of(kind, where)) is None:
            raise unsupported(hint, where)
        described = describe(kind)
        schema = self.closed_object(
            [each._replace(hint=substituted(each.hint, variables)) for each in members], described.members
        )
        return {"type": "object", "description": described.text, **schema} if described.text else schema

    def closed_object(self, members: list[_Member], descriptions: Mapping[str, str]) -> JsonObject:
        properties = {}
        for member in members:
            if isinstance(member.default, Field) or type(member.default).__name__ == _PYDANTIC_FIELD:
                raise _misplaced(member)
            schema = self.build(member.hint, member.where)
            if member.name in descriptions:
                schema.setdefault("description", descriptions[member.name])
            if (default := _as_json(member.default)) is not ABSENT:
                if _violates(default, schema):
                    hint = inspect.formatannotation(member.hint)
                    raise UsageError(
                        f"{member.where}: the default {member.default!r} does not fit the hint {hint}; "
                        "change one of them"
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
            raise UsageError(f"{where}: keys must be strings, got {key!r}; use str or an Enum of str")
        schema = dict(_OBJECT)
        if names != _TEXT:
            schema["propertyNames"] = names
        if values:
            schema["additionalProperties"] = values
        return schema


def wrapper_of(origin: Hint) -> str | None:
    """The name of a form that describes a member and not its value, or None.

    It is recognised by name, because `typing` and `typing_extensions` both have these forms.
    """
    name = str(origin).rpartition(".")[2]
    return name if name in ("Required", "NotRequired", "ReadOnly", "Final") else None


def unsupported(hint: Hint, where: str) -> UsageError:
    """The error for a hint without a schema."""
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


_PYDANTIC_FIELD = "FieldInfo"  # the class of pydantic's `Field`; by name, because pydantic is optional


def _misplaced(member: _Member) -> UsageError:
    given: dict[str, Any] = {}
    for each in _with_metadata(member.default):
        given |= {name: value for name in _FIELD_ATTRIBUTES if _is_given(value := getattr(each, name, None))}
    written = ", ".join(f"{name}={given[name]!r}" for name in _FIELD_ATTRIBUTES if name in given)
    hint = inspect.formatannotation(member.hint)
    return UsageError(
        f"{member.where} has a {type(member.default).__name__} as its default; write {member.name}: Annotated[{hint}, "
        f"Field({written})], and its default, if it has one, after that"
    )


_CHECKS: dict[str, Callable[[Any, Any], bool]] = {  # keyword -> whether a value satisfies it
    "enum": lambda value, allowed: any(value == each and _is_bool(value) == _is_bool(each) for each in allowed),
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
    "minLength": lambda value, minimum: len(value) >= minimum,
    "maxLength": lambda value, maximum: len(value) <= maximum,
    "minItems": lambda value, minimum: len(value) >= minimum,
    "maxItems": lambda value, maximum: len(value) <= maximum,
    "items": lambda value, item: item is False or not any(_violates(each, item) for each in value),
    "prefixItems": lambda value, items: len(value) == len(items) and not any(map(_violates, value, items)),
}


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _violates(default: Json, schema: JsonObject) -> bool:
    """True if a default certainly violates its schema.

    Some keywords are not checked here: the complete schema engine takes 20 ms to import.
    """
    if "anyOf" in schema:
        return all(_violates(default, each) for each in schema["anyOf"])
    types_of_default = {_JSON_TYPES.get(type(default), "array")}
    if type(default) in (int, float):
        types_of_default = {"number", "integer"} if default == int(default) else {"number"}
    if "type" in schema and schema["type"] not in types_of_default:
        return True
    return any(keyword in schema and not check(default, schema[keyword]) for keyword, check in _CHECKS.items())


def substituted(hint: Hint, variables: Mapping[Hint, Hint]) -> Hint:
    """Return `hint` with its type variables replaced: `list[T]` becomes `list[int]`."""
    if isinstance(hint, TypeVar):
        return variables.get(hint, hint)
    free = () if isinstance(hint, type) else getattr(hint, "__parameters__", ())
    if not variables or not free:
        return hint
    generic: Any = hint
    return generic[tuple(variables.get(each, each) for each in free)]


# The members of classes.


def members_of(kind: type, where: str) -> list[_Member] | None:
    """Return the members that `__init__` takes, or None if this module does not know this kind of class."""
    for recognises, members in _KINDS:
        if recognises(kind):
            hints = _resolved(kind, None, f"{where}: a hint in {kind.__name__}")
            result = []
            for name, hint, default in members(kind, hints):
                required = _required(hint, default is ABSENT)
                result.append(_Member(name, hint, required, default, f"{where}, member {name!r} of {kind.__name__}"))
            return result
    return None


# Name, hint and default; the default is ABSENT if the member is required, and None if it is optional without a default.
_Members = Iterator[tuple[str, Hint, Any]]


def _of_typed_dict(kind: Any, hints: dict[str, Hint]) -> _Members:
    for name, hint in hints.items():
        yield name, hint, ABSENT if name in kind.__required_keys__ else None


def _of_named_tuple(kind: Any, hints: dict[str, Hint]) -> _Members:
    for name in kind._fields:
        yield name, hints.get(name, Any), kind._field_defaults.get(name, ABSENT)


def _of_attrs(kind: Any, hints: dict[str, Hint]) -> _Members:
    for field in attrs.fields(kind):
        if field.init:
            default = ABSENT if field.default is attrs.NOTHING else field.default
            if field.converter is not None and default is not ABSENT:
                default = None  # the converted value is not known before the converter is called
            yield field.alias, hints.get(field.name, field.type or Any), default


def _of_dataclass(kind: Any, hints: dict[str, Hint]) -> _Members:
    import dataclasses  # a program with dataclasses has already imported it

    for field in dataclasses.fields(kind):
        if field.init:
            default = field.default
            if default is dataclasses.MISSING:
                default = ABSENT if field.default_factory is dataclasses.MISSING else None
            yield field.name, hints[field.name], default


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any, dict[str, Hint]], _Members]], ...] = (
    (lambda kind: hasattr(kind, "__required_keys__"), _of_typed_dict),
    (lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"), _of_named_tuple),
    (attrs.has, _of_attrs),
    (lambda kind: hasattr(kind, "__dataclass_fields__"), _of_dataclass),
)


def _required(hint: Hint, otherwise: bool) -> bool:
    # Read from the hint itself: if hints are text, `__required_keys__` was made before they were resolved.
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


_FIELD_ATTRIBUTES = (*_NOTES, *_BOUNDS)


def _is_given(value: Any) -> bool:
    return value is not None and not callable(value)


def _with_metadata(extra: Any) -> Iterator[Any]:
    yield extra
    if isinstance(metadata := getattr(extra, "metadata", None), list):  # pydantic keeps its bounds there
        yield from metadata


def _annotated(schema: JsonObject, extras: tuple[Any, ...], where: str) -> JsonObject:
    for extra in itertools.chain.from_iterable(map(_with_metadata, extras)):
        if isinstance(extra, str):
            schema["description"] = extra
            continue
        if isinstance(extra, type):
            continue
        for attribute, keyword in _NOTES.items():
            if isinstance(note := getattr(extra, attribute, None), str):
                schema[keyword] = note
        for attribute, keywords in _BOUNDS.items():
            if _is_given(bound := getattr(extra, attribute, None)):
                _add_bound(schema, keywords, bound, f"{where}: {attribute}={bound!r}")
    return schema


def _add_bound(schema: JsonObject, keywords: Mapping[str, str], bound: Any, name: str) -> None:
    """Add a bound to `schema`, or to those of its alternatives that have the right type."""
    if type(bound) not in ((str,) if keywords == _BOUNDS["pattern"] else (int, float)):
        raise UsageError(f"{name} is not a bound of JSON Schema; check it in the function")
    fitting = [
        branch
        for branch in schema.get("anyOf", [schema])
        # A bound on bytes would count base64 characters.
        if branch.get("type") in keywords and "contentEncoding" not in branch
    ]
    if not fitting:
        raise UsageError(f"{name} does not fit the type; it needs one of {', '.join(keywords)}")
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
    """A docstring in two parts: the text, and the description of each member or parameter."""

    text: str = ""
    members: Mapping[str, str] = attrs.field(factory=dict)


def describe(thing: object) -> Description:
    """Read a docstring.  The sections that describe parameters or attributes are not part of the text."""
    if isinstance(thing, type):
        text = vars(thing).get("__doc__") or ""
        # Dataclasses and named tuples without a docstring have their signature as `__doc__`.
        return _parsed("" if text.startswith(f"{thing.__name__}(") else inspect.cleandoc(text))
    return _parsed(inspect.getdoc(_innermost(thing)) or "")


def _parsed(text: str) -> Description:
    lines, paragraphs = deque(text.splitlines()), []
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
            paragraphs.append(line)
    return Description("\n".join(paragraphs).strip(), members)


def _indented(lines: deque[str]) -> Iterator[str]:
    while lines and (not lines[0] or lines[0][0].isspace()):
        yield lines.popleft()


def _up_to_heading(lines: deque[str]) -> Iterator[str]:
    while lines and not (len(lines) > 1 and re.fullmatch(_NUMPY_RULE, lines[1])):
        yield lines.popleft()


def _entries(section: Iterator[str], entry: str) -> dict[str, str]:
    entries: dict[str, list[str]] = {}
    names: list[str] = []
    for line in inspect.cleandoc("\n" + "\n".join(section)).splitlines():
        if begins := re.fullmatch(entry, line):  # at the margin; indented lines continue an entry
            names = begins["names"].split(", ")
            entries |= {name: [begins["text"]] for name in names}
        else:
            for name in names:
                entries[name].append(line)
    return {name: " ".join(" ".join(texts).split()) for name, texts in entries.items()}
