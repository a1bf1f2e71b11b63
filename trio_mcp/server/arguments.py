"""The arguments of a call: check them, and convert them to the parameters of the handler.

Most valid arguments pass a quick check (`_quick_check`).  Others go to the JSON Schema engine, which also gives the
reasons of a failure.  The engine takes 20 ms to import, and a server that gets only valid calls never needs it.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trio_mcp.core.errors import UsageError, name_of
from trio_mcp.core.messages import ABSENT, Json, JsonObject
from trio_mcp.server.handlers import Handler

if TYPE_CHECKING:
    from trio_mcp.core.schema.validation import CompiledSchema, Problem

__all__ = ["Arguments", "BadArguments", "arguments_of", "text_arguments"]

_Function = Callable[..., Any]
_Read = Callable[[JsonObject], JsonObject]


class BadArguments(Exception):
    """The arguments of a call do not fit the entry; a mistake of the client.  `problems` has one line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


# Keywords that describe a value and do not restrict it.
_NOTES = frozenset({"title", "description", "default", "format", "contentEncoding", "x-mcp-header"})
_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties"})
# Larger numbers go to the engine, because they may not fit into a double.
_EXACT = 2**53
_SIMPLE: Mapping[Json, Callable[[Json], bool]] = {
    None: lambda value: True,
    "object": lambda value: type(value) is dict,
    "array": lambda value: type(value) is list,
    "string": lambda value: type(value) is str,
    "boolean": lambda value: type(value) is bool,
    "null": lambda value: value is None,
    "integer": lambda value: type(value) is int and -_EXACT <= value <= _EXACT,
    "number": lambda value: type(value) in (int, float) and -_EXACT <= value <= _EXACT,
}


def _quick_check(schema: Mapping[str, Json]) -> Callable[[Json], bool] | None:
    """Make a quick check for a generated schema; None if the schema is too complex for one.

    The check passes most valid values and no invalid one.  The engine must check the values that it does not pass.
    """
    keywords, kind = schema.keys() - _NOTES, schema.get("type")
    if keywords <= {"type"}:
        return _SIMPLE.get(kind)
    if keywords == {"type", "enum"} and kind == "string":
        allowed: list[str] = schema["enum"]
        return allowed.__contains__
    if keywords == {"anyOf"}:
        return _quick_check_any(schema["anyOf"])
    if keywords == {"type", "items"} and kind == "array":
        item = _quick_check(schema["items"])
        return None if item is None else lambda value: type(value) is list and all(map(item, value))
    if kind == "object" and keywords <= _OBJECT_KEYWORDS and schema.get("additionalProperties") is False:
        return _quick_check_members(schema)
    return None


def _quick_check_any(alternatives: Sequence[Mapping[str, Json]]) -> Callable[[Json], bool] | None:
    checks = [check for check in map(_quick_check, alternatives) if check is not None]
    return (lambda value: any(check(value) for check in checks)) if len(checks) == len(alternatives) else None


def _quick_check_members(schema: Mapping[str, Json]) -> Callable[[Json], bool] | None:
    members = {name: check for name, each in schema["properties"].items() if (check := _quick_check(each)) is not None}
    if len(members) < len(schema["properties"]):
        return None
    required = tuple(schema.get("required", ()))

    def fits(value: Json) -> bool:  # written as loops for speed: it runs for each call
        if type(value) is not dict:
            return False
        for name in required:
            if name not in value:
                return False
        for name, each in value.items():
            check = members.get(name)
            if check is None or not check(each):
                return False
        return True

    return fits


class Arguments:
    """The arguments of an entry: checks them against the schema, and converts them for the handler."""

    __slots__ = ("_compiled", "_quick_check", "_read", "schema")

    def __init__(self, schema: JsonObject, read: _Read | None = None, compiled: CompiledSchema | None = None) -> None:
        self.schema = schema
        self._read = read
        self._compiled = compiled
        # A schema written by hand may have keywords that the quick check does not know.
        self._quick_check = _quick_check(schema) if compiled is None else None

    def read(self, arguments: JsonObject) -> JsonObject:
        """Return the values for the handler.  Raises BadArguments."""
        quick_check = self._quick_check
        if (quick_check is None or not quick_check(arguments)) and not self.fit(arguments):
            raise BadArguments([_problem(each.path, each.message) for each in self._problems(arguments)])
        return arguments if self._read is None else self._read(arguments)

    def fit(self, arguments: JsonObject) -> bool:
        """Whether the arguments fit the schema."""
        return (self._quick_check is not None and self._quick_check(arguments)) or not self._problems(arguments)

    def _problems(self, arguments: JsonObject) -> list[Problem]:
        if self._compiled is None:
            from trio_mcp.core.schema.validation import compile_schema

            self._compiled = compile_schema(self.schema)
        return self._compiled.errors(arguments)


def _problem(path: str, message: str) -> str:
    return f"{path or 'arguments'}: {message}"


def arguments_of(function: _Function, handler: Handler, schema: JsonObject) -> Arguments:
    """The arguments of a function, which are converted to the types of its parameters."""
    from trio_mcp.core.schema.values import Unreadable, arguments_reader

    read = arguments_reader(function, handler.skip)
    if read is None:
        return Arguments(schema)

    def convert(arguments: JsonObject) -> JsonObject:
        try:
            return read(arguments)
        except Unreadable as error:
            raise BadArguments([_problem(error.path, error.why)]) from None

    return Arguments(schema, convert)


def text_arguments(function: _Function, handler: Handler, subject: str) -> Arguments:
    """Arguments that are text in the protocol: arguments of prompts, and variables of templates (prm-17)."""
    from trio_mcp.core.schema.schema import hint_of, parameters_schema

    schema = parameters_schema(function, handler.skip)
    for name, each in schema["properties"].items():
        hint = hint_of(function, name)
        if hint is ABSENT or hint is Any:
            each["type"] = "string"
        elif not _is_text(hint):
            raise UsageError(
                f"parameter {name!r} of {name_of(function)}: {subject} are text; make it str, str | None, a Literal of "
                "strings or an Enum of strings, and convert it in the function"
            )
    return arguments_of(function, handler, schema)


def _is_text(hint: Any) -> bool:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _is_text(inside[0])
    if origin in (typing.Union, types.UnionType):
        return all(each is types.NoneType or _is_text(each) for each in inside)
    if origin is typing.Literal:
        return all(isinstance(each, str) for each in inside)
    if isinstance(hint, typing.NewType):
        return _is_text(hint.__supertype__)
    members = getattr(hint, "__members__", None)  # of an Enum
    if members is not None:
        return all(isinstance(member.value, str) for member in members.values())
    return hint is str
