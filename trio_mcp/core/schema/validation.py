"""Validate JSON against a JSON Schema; both may be hostile.

`compile_schema` takes any schema once, checks it, and returns a `CompiledSchema`; its method `errors` lists where a
value breaks the schema.  The engine is jsonschema_rs, which is imported when the first schema is compiled.  This module
owns the rest: the list of dialects, the rule that nothing is fetched, and the limits on the cost of hostile schemas and
values, which `cost` estimates.

Dialects (`DIALECTS`): draft 4, 6, 7, 2019-09 and 2020-12.  A schema without `$schema` is 2020-12; other dialects are
refused.  `format` is an annotation and never checked, in every dialect: 2020-12 says so, the older ones permit it, and
a peer does not break its dialect by a wrong format.  Patterns run in time linear in the text, so look-around and
back-references, which need more, are refused when the schema is compiled.

Two things surprise:

- A verdict is cheap; its reasons cost a thousand times as much (measured).  So reasons are computed only if the cost
  allows it.  The verdict is always right.
- A problem names the place, the keyword and the requirement of the schema.  Of the value it names only the JSON type,
  because the value may be a secret.  Names of members are part of the place and do appear.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

import attrs

from trio_mcp.core.messages import KINDS, Json, record
from trio_mcp.core.schema.cost import (
    DEFAULT_DIALECT,
    DIALECTS,
    Analysis,
    Cost,
    InvalidSchema,
    Size,
    below_step,
    measure,
    shortened,
    shown_part,
)

if TYPE_CHECKING:
    import jsonschema_rs

__all__ = ["CompiledSchema", "Problem", "check_input_schema", "compile_schema"]

# Enough for a model to correct its call, and short for any schema and names.
_PROBLEMS = 20
_NAME_SHOWN = 64


@record
class Problem:
    """One way in which a value breaks a schema.

    `path` is a JSON Pointer into the value, with long names shortened.  `keyword` is the schema keyword, or empty if
    the value could not be checked.  `message` never quotes the value.
    """

    path: str
    keyword: str
    message: str


@attrs.frozen(eq=False)
class CompiledSchema:
    """A schema that is valid, self-contained and of limited cost.  Made by `compile_schema`."""

    dialect: str
    _schema: Json = attrs.field(repr=False)
    _validator: jsonschema_rs.Validator = attrs.field(repr=False)
    _cost: Cost = attrs.field(repr=False)

    def can_check(self, instance: Json) -> bool:
        """False if `errors` would refuse to check `instance`, because that is too much work."""
        return not isinstance(self._sized(instance), str)

    def fits(self, instance: Json) -> bool:
        """Whether `errors` would return none, without the cost of finding them.  Never raises."""
        try:
            return self.can_check(instance) and self._validator.is_valid(instance)
        except ValueError:  # as in `errors`
            return False

    def errors(self, instance: Json) -> list[Problem]:
        """Return at most 20 problems of `instance`; empty if it is valid.  Never raises."""
        size = self._sized(instance)
        if isinstance(size, str):
            return [Problem("", "", size)]
        try:
            if self._validator.is_valid(instance):
                return []
            if not self._cost.allows_reasons(measure(instance, text=True)):
                return [Problem("", "", "breaks the schema; it would take too much work to say where")]
            errors = self._validator.iter_errors(instance)
        except ValueError:  # half a surrogate pair, a set, a member with a name that is not a string
            return [Problem("", "", "is not JSON")]
        problems = chain.from_iterable(_problems(leaf, self._schema) for error in errors for leaf in _closest(error))
        return list(dict.fromkeys(problems))[:_PROBLEMS]

    def _sized(self, instance: Json) -> Size | str:
        size = measure(instance, text=self._cost.states > 0)
        if isinstance(size, str) or self._cost.allows_verdict(size):
            return size
        return "would take too much work to check against this schema"


def compile_schema(schema: Json) -> CompiledSchema:
    """Check `schema` and compile it.  Raises `InvalidSchema`.  Does no I/O."""
    if not isinstance(schema, dict | bool):
        raise InvalidSchema("invalid", f"a schema must be an object or a boolean, got {type(schema).__name__}")

    import jsonschema_rs  # 20 ms, only for programs that check schemas

    dialect = DEFAULT_DIALECT
    try:
        analysis = Analysis(schema)
        cost, dialect = analysis.cost(), analysis.dialect
        validator = getattr(jsonschema_rs, DIALECTS[dialect])(
            schema,
            validate_formats=False,
            offline=True,  # the engine would fetch; references out of the document have already been refused
            pattern_options=jsonschema_rs.RegexOptions(size_limit=analysis.pattern_bytes),
        )
    except jsonschema_rs.ValidationError as error:
        where, message = _pointer(error.instance_path), shortened(error.message)
        if error.kind.name == "format":
            why = "wrong, too large, or needs look-around or back-references, which do not run in linear time"
            raise InvalidSchema("pattern", f"the pattern at {where} is {why}: {message}") from None
        why = f"the schema is not valid under {dialect} at {where or 'its root'}: {message}"
        raise InvalidSchema("invalid", why) from None
    except ValueError as error:
        raise InvalidSchema("invalid", f"the schema is not JSON: {error}") from None
    return CompiledSchema(dialect, schema, validator, cost)


def check_input_schema(schema: Json) -> None:
    """Raise `InvalidSchema` unless `schema` can be a tool's input schema: an object with ``"type": "object"``."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise InvalidSchema("root", 'an input schema needs "type": "object" at its root: arguments have names')


# Problems and their messages.

_MESSAGES = {
    "additionalItems": "must have at most {} items",
    "anyOf": "matches none of the alternatives",
    "const": "must be {}",
    "contains": "does not have the required number of matching items",
    "enum": "must be one of {}",
    "exclusiveMaximum": "must be less than {}",
    "exclusiveMinimum": "must be more than {}",
    "falseSchema": "is not allowed",
    "maxItems": "must have at most {} items",
    "maxLength": "must have at most {} characters",
    "maxProperties": "must have at most {} members",
    "maximum": "must be at most {}",
    "minItems": "must have at least {} items",
    "minLength": "must have at least {} characters",
    "minProperties": "must have at least {} members",
    "minimum": "must be at least {}",
    "multipleOf": "must be a multiple of {}",
    "not": "matches the schema that is excluded",
    "oneOf": "must match exactly one of the alternatives",
    "pattern": "must match the pattern {}",
    "propertyNames": "has a member with a name that is not allowed",
    "required": "lacks the member {}",
    "type": "must be of type {}",
    "unevaluatedItems": "has items that are not allowed",
    "uniqueItems": "must not have the same item twice",
}


def _closest(error: jsonschema_rs.ValidationError) -> Iterator[jsonschema_rs.ValidationError]:
    """The reasons of the one alternative with the right type; the error itself, if there is not exactly one."""
    if error.kind.name in ("anyOf", "oneOf"):
        candidates = [
            branch
            for branch in error.kind.value
            if branch
            and not any(each.kind.name == "type" and each.instance_path == error.instance_path for each in branch)
        ]
        if len(candidates) == 1:
            for each in candidates[0]:
                yield from _closest(each)
            return
    yield error


def _problems(error: jsonschema_rs.ValidationError, schema: Json) -> Iterator[Problem]:
    keyword, value = error.kind.name, error.kind.value
    if keyword in ("additionalProperties", "unevaluatedProperties"):
        message = "is not allowed" + _allowed_names(error, schema)
        for name in value[:_PROBLEMS]:
            yield Problem(_pointer([*error.instance_path, name]), keyword, message)
        return
    message = _MESSAGES.get(keyword, f"breaks {keyword}")
    if keyword == "type":
        kind = KINDS.get(type(error.instance))
        message = message.format(" or ".join(value)) + (f", not {kind}" if kind else "")
    elif "{}" in message:  # `value` is then the schema's, and no secret
        message = message.format(shown_part(value))
    yield Problem(_pointer(error.instance_path), keyword, message)


def _allowed_names(error: jsonschema_rs.ValidationError, schema: Json) -> str:
    """The end of a message about an unknown member: the allowed names, or empty if they are not a simple list."""
    if error.kind.name != "additionalProperties" or error.absolute_keyword_location is not None:
        return ""  # the location is set if a part of the schema has an $id; the path begins at that part
    found = [schema]
    for step in error.schema_path[:-1]:
        found = [below for each in found for below in below_step(each, str(step))]
    if not found or "patternProperties" in found[0]:  # not found: the schema was changed after it was compiled
        return ""
    names = found[0].get("properties", ())
    shown = ", ".join(shown_part(name) for name in islice(names, _PROBLEMS)) + ("…" if len(names) > _PROBLEMS else "")
    return f"; the allowed names are {shortened(shown)}" if names else "; no members are allowed"


def _pointer(path: list[str | int]) -> str:
    steps = (shortened(str(step).replace("~", "~0").replace("/", "~1"), _NAME_SHOWN) for step in path)
    return "".join("/" + step for step in steps)
