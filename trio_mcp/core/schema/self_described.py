"""Classes that say by themselves what they are in JSON, as pydantic's models do.

They are known by what they can do, so that nobody need have pydantic to use this, and nothing of it is imported here:
`model_json_schema` gives the schema, `model_validate` makes an object of JSON that fits it, and `model_dump` makes JSON
of an object.  A model decides what its schema leaves open: whether members that it does not know are a mistake, say.

A schema has its definitions beside it.  `Definition` names one of them, so that the builder in `schema` can write it
out where it is used, as it does with classes, and refer to it where it contains itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.jsonrpc import Json, JsonObject

__all__ = ["Definition", "Mode", "describes_itself", "own_schema"]

Mode: TypeAlias = Literal["validation", "serialization"]
"""Whether a schema is for what is read or for what is written; the names of members may differ, for one."""

_DEFINITIONS = "#/$defs/"
_OF_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas"})  # by names that are no keywords
_OF_DATA = frozenset({"const", "enum", "default", "examples"})
# Says a second time, for OpenAPI, where definitions are; and there they are no more.
_LEFT_OUT = frozenset({"$defs", "$ref", "discriminator"})


def describes_itself(kind: object) -> bool:
    return isinstance(kind, type) and all(
        callable(getattr(kind, name, None)) for name in ("model_json_schema", "model_validate", "model_dump")
    )


@attrs.frozen
class Definition:
    """One part of the schema of `owner`.  Equal to itself, whenever that schema was made."""

    owner: type
    name: str
    _schema: JsonObject = attrs.field(eq=False, repr=False)
    _others: Mapping[str, Definition] = attrs.field(eq=False, repr=False)

    @property
    def __name__(self) -> str:
        """As classes have it."""
        return self.name

    def written_out(self, refer: Callable[[Definition], JsonObject]) -> JsonObject:
        """The part, in which `refer` gives what stands for another."""
        written: JsonObject = _written_out(self._schema, lambda reference: refer(self._found(reference)))
        return written

    def _found(self, reference: str) -> Definition:
        found = self._others.get(reference.removeprefix(_DEFINITIONS))
        if found is None:
            raise UsageError(f"the schema of {self.owner.__name__} refers to {reference!r}, which is not in it")
        return found


def own_schema(kind: Any, where: str, mode: Mode) -> Definition:
    """The schema of a class that describes itself.  Raises `UsageError` where it cannot."""
    try:
        schema: JsonObject = kind.model_json_schema(mode=mode)
    except Exception as error:  # how a class fails to describe itself is its own affair
        raise UsageError(f"{where}: {kind.__name__} does not describe itself: {error}") from error
    definitions: dict[str, Definition] = {}
    for name, each in schema.get("$defs", {}).items():
        definitions[name] = Definition(kind, name, each, definitions)
    return Definition(kind, "", schema, definitions)  # the whole, which no part is named like


def _written_out(schema: Json, refer: Callable[[str], JsonObject]) -> Json:
    """`schema` without its definitions, which `refer` puts where they are referred to."""
    if isinstance(schema, list):
        return [_written_out(each, refer) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: JsonObject = refer(schema["$ref"]) if "$ref" in schema else {}
    for keyword, said in schema.items():
        if keyword in _OF_SCHEMAS:
            made[keyword] = {name: _written_out(each, refer) for name, each in said.items()}
        elif keyword not in _LEFT_OUT:
            made[keyword] = said if keyword in _OF_DATA else _written_out(said, refer)
    return made
