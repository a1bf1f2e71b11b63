"""Classes that describe their own JSON, such as pydantic models.

They are recognised by three methods, so that pydantic is optional and never imported here: `model_json_schema` returns
the schema, `model_validate` makes an object from JSON that fits it, and `model_dump` makes JSON from an object.  The
model decides the details, for example whether it accepts unknown members.

A schema carries its definitions in `$defs`.  `Definition` stands for one of them, so that the builder in `schema` can
write it out at each use, as it does with classes, and refer to it where it contains itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import Json, JsonObject

__all__ = ["Definition", "Mode", "describes_itself", "own_schema"]

Mode: TypeAlias = Literal["validation", "serialization"]
"""Whether a schema is for reading or for writing; for example, the names of members can differ."""

_DEFINITIONS = "#/$defs/"
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas"})
_DATA = frozenset({"const", "enum", "default", "examples"})  # their values are not schemas
# `discriminator` is OpenAPI's list of definitions, which are not in `$defs` any more.
_LEFT_OUT = frozenset({"$defs", "$ref", "discriminator"})


def describes_itself(kind: object) -> bool:
    """Whether `kind` is a class with the three methods of a pydantic model."""
    return isinstance(kind, type) and all(
        callable(getattr(kind, name, None)) for name in ("model_json_schema", "model_validate", "model_dump")
    )


@attrs.frozen
class Definition:
    """One definition in the schema of `owner`.  Two objects are equal if owner and name are."""

    owner: type
    name: str
    _schema: JsonObject = attrs.field(eq=False, repr=False)
    _others: Mapping[str, Definition] = attrs.field(eq=False, repr=False)

    @property
    def __name__(self) -> str:
        """The name, under the attribute that classes have."""
        return self.name

    def written_out(self, refer: Callable[[Definition], JsonObject]) -> JsonObject:
        """Return the schema of this definition; `refer` returns the schema for a reference to another."""
        written: JsonObject = _written_out(self._schema, lambda reference: refer(self._find(reference)))
        return written

    def _find(self, reference: str) -> Definition:
        definition = self._others.get(reference.removeprefix(_DEFINITIONS))
        if definition is None:
            raise UsageError(f"the schema of {self.owner.__name__} refers to {reference!r}, but does not define it")
        return definition


def own_schema(kind: Any, where: str, mode: Mode) -> Definition:
    """Return the schema of a class that describes itself.  Raises `UsageError` if the class raises an exception."""
    try:
        schema: JsonObject = kind.model_json_schema(mode=mode)
    except Exception as error:  # the class may raise any exception
        raise UsageError(f"{where}: {kind.__name__} has no JSON Schema: {error}") from error
    definitions: dict[str, Definition] = {}
    for name, each in schema.get("$defs", {}).items():
        definitions[name] = Definition(kind, name, each, definitions)
    return Definition(kind, "", schema, definitions)  # the whole schema; no definition has an empty name


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
