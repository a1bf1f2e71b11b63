"""The shapes of classes and type aliases: their members, recursion, and classes that describe themselves.

The members of an attrs class have their aliases as names, as in the call of the class.  Fields that `__init__` does not
take are left out.
"""

from __future__ import annotations

import itertools
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import ABSENT, Json, JsonObject
from trio_mcp.core.schema.hints import (
    Hint,
    Member,
    describe,
    resolved,
    resolved_alone,
    substituted,
    unsupported,
    wrapper_of,
)
from trio_mcp.core.schema.shapes import (
    ANY,
    DEFINITIONS,
    JSON_TYPES,
    Shape,
    Unreadable,
    Verdict,
    Walk,
    is_anything,
    schema_of,
)
from trio_mcp.core.schema.writing import write_mapping, write_object, write_self_described, write_value

__all__ = ["attributes_of", "class_shape", "describes_itself", "members_of"]


def members_of(kind: type, where: str) -> list[Member] | None:
    """Return the members that `__init__` takes, or None if this module does not know this kind of class."""
    fields = _fields_of(kind)
    if fields is None:
        return None
    hints = resolved(kind, None, f"{where}: a hint in {kind.__name__}")
    return [
        Member(name, hint, _required(hint, default is ABSENT), default, f"{where}, member {name!r} of {kind.__name__}")
        for name, _, hint, default in fields(kind, hints)
    ]


def attributes_of(kind: type) -> dict[str, str] | None:
    """Return the attribute of each member, or None as `members_of`.  It resolves no hints."""
    fields = _fields_of(kind)
    return None if fields is None else {name: attribute for name, attribute, _, _ in fields(kind, {})}


# Name, attribute, hint and default of each member.  The default is ABSENT if the member is required, and None if it is
# optional without a default.
_Fields = Iterator[tuple[str, str, Hint, Any]]


def _of_typed_dict(kind: Any, hints: dict[str, Hint]) -> _Fields:
    for name, hint in hints.items():
        yield name, name, hint, ABSENT if name in kind.__required_keys__ else None


def _of_named_tuple(kind: Any, hints: dict[str, Hint]) -> _Fields:
    for name in kind._fields:
        yield name, name, hints.get(name, Any), kind._field_defaults.get(name, ABSENT)


def _of_attrs(kind: Any, hints: dict[str, Hint]) -> _Fields:
    for field in attrs.fields(kind):
        if field.init:
            default = ABSENT if field.default is attrs.NOTHING else field.default
            if field.converter is not None and default is not ABSENT:
                default = None  # the converted value is not known before the converter is called
            yield field.alias, field.name, hints.get(field.name, field.type or Any), default


def _of_dataclass(kind: Any, hints: dict[str, Hint]) -> _Fields:
    import dataclasses  # a program with dataclasses has already imported it

    for field in dataclasses.fields(kind):
        if field.init:
            default = field.default
            if default is dataclasses.MISSING:
                default = ABSENT if field.default_factory is dataclasses.MISSING else None
            yield field.name, field.name, hints.get(field.name), default


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any, dict[str, Hint]], _Fields]], ...] = (
    (lambda kind: hasattr(kind, "__required_keys__"), _of_typed_dict),
    (lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"), _of_named_tuple),
    (attrs.has, _of_attrs),
    (lambda kind: hasattr(kind, "__dataclass_fields__"), _of_dataclass),
)


def _fields_of(kind: type) -> Callable[[Any, dict[str, Hint]], _Fields] | None:
    return next((fields for recognises, fields in _KINDS if recognises(kind)), None)


def _required(hint: Hint, otherwise: bool) -> bool:
    # Read from the hint itself: if hints are text, `__required_keys__` was made before they were resolved.
    origin: Hint = typing.get_origin(hint)
    wrapper = wrapper_of(origin)
    if wrapper in ("Required", "NotRequired"):
        return wrapper == "Required"
    if wrapper or origin is typing.Annotated:
        return _required(typing.get_args(hint)[0], otherwise)
    return otherwise


# Definitions.


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
        return (self.shape.write or write_value)(value)


def class_shape(walk: Walk, hint: Hint, where: str) -> Shape:
    """Compile a class or a type alias.  Raises `UsageError` for a hint of an unknown kind."""
    kind: Any = typing.get_origin(hint) or hint
    variables = dict(zip(getattr(kind, "__parameters__", ()), typing.get_args(hint), strict=False))
    if not isinstance(kind, type) and hasattr(kind, "__value__"):  # type Alias = ...

        def alias() -> Shape:
            names = vars(sys.modules[kind.__module__])
            value = resolved_alone(kind.__value__, names, f"{where}: {kind.__name__}")
            return walk.of(substituted(value, variables), where)

        return _defined(walk, hint, ANY, alias, where)
    if describes_itself(kind):
        return _defined(walk, hint, ANY._replace(kind=kind), lambda: _self_described(walk, kind, where), where)
    if not isinstance(kind, type):
        raise unsupported(hint, where)
    outside = Shape({}, is_anything, json=frozenset({dict}), kind=_class_of_values(kind))
    return _defined(walk, hint, outside, lambda: _members(walk, hint, kind, variables, where), where)


def _defined(walk: Walk, key: Hint, outside: Shape, make: Callable[[], Shape], where: str) -> Shape:
    """Return the shape itself, with a reference as its schema if the class or alias contains itself.

    `outside` says what is known of it before it is compiled.
    """
    named = walk.known.get(key)
    if named is None:
        if walk.depth == _CLASSES:
            raise UsageError(
                f"{where}: more than {_CLASSES} nested classes; one contains ever larger forms of itself; "
                "end the recursion"
            )
        named = walk.known[key] = _Definition()
        walk.depth += 1
        named.shape = make()
        walk.depth -= 1
        if named.name is None:
            del walk.known[key]
            return named.shape
        walk.definitions[named.name] = named.shape.schema
    elif named.name is None:
        name = key[1] if isinstance(key, tuple) else (typing.get_origin(key) or key).__name__
        taken = {each.name for each in walk.known.values()}
        numbered = itertools.chain([name], (f"{name}{number}" for number in itertools.count(2)))
        named.name = next(each for each in numbered if each not in taken)
    schema = {"$ref": DEFINITIONS + named.name}
    if named.shape is not None:
        return named.shape._replace(schema=schema, parts=())
    return outside._replace(schema=schema, fits=named.fits, read=named.read, write=named.write)


def _members(walk: Walk, hint: Hint, kind: type, variables: Mapping[Hint, Hint], where: str) -> Shape:
    found = members_of(kind, where)
    if found is None:
        raise unsupported(hint, where)
    described = describe(kind)
    members = [each._replace(hint=substituted(each.hint, variables)) for each in found]
    shape, parts = walk.closed_object(members, described.members)
    if described.text:
        shape = shape._replace(schema={"type": "object", "description": described.text, **shape.schema})
    writers = {name: part.write for name, part in parts.items()}
    if _class_of_values(kind) is dict:  # a TypedDict

        def write(value: Any) -> Json:
            fits = isinstance(value, Mapping)
            return write_mapping(value, writers.get) if fits else write_value(value)

        return shape._replace(write=write if any(writers.values()) else None, kind=dict)

    read_members = shape.read or dict

    def read(source: JsonObject) -> Any:
        members = read_members(source)
        try:
            return kind(**members)
        except (TypeError, ValueError) as error:  # validators and `__post_init__` raise these
            raise _broken_rules(kind) from error

    attributes = [(name, attribute, writers[name]) for name, attribute in (attributes_of(kind) or {}).items()]
    return shape._replace(
        read=read,
        write=lambda value: write_object(attributes, value) if isinstance(value, kind) else write_value(value),
        kind=kind,
    )


def _broken_rules(kind: Any) -> Unreadable:
    return Unreadable(f"does not meet the rules of {kind.__name__}")


# Classes that describe themselves.

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


def _self_described(walk: Walk, kind: Any, where: str) -> Shape:
    try:
        schema: JsonObject = kind.model_json_schema(mode=walk.mode)
    except Exception as error:  # the class may raise any exception
        raise UsageError(f"{where}: {kind.__name__} has no JSON Schema: {error}") from error
    definitions = schema.get("$defs", {})

    def refer(reference: str) -> JsonObject:
        name = reference.removeprefix(DEFINITIONS)
        if name not in definitions:
            raise UsageError(f"the schema of {kind.__name__} refers to {reference!r}, but does not define it")
        return _defined(walk, (kind, name), ANY, lambda: written(definitions[name]), where).schema

    def written(part: JsonObject) -> Shape:
        return Shape(_written_out(part, refer), is_anything)

    def read(source: Json) -> Any:
        try:
            return kind.model_validate(source)
        except (TypeError, ValueError) as error:
            raise _broken_rules(kind) from error

    return Shape(
        written(schema).schema,
        Verdict(lambda: schema_of(kind, mode=walk.mode)),
        read,
        lambda value: write_self_described(value, kind) if isinstance(value, kind) else write_value(value),
        frozenset({dict}) if schema.get("type") == "object" else JSON_TYPES,
        kind,
    )
