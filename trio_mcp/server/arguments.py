"""The arguments of a call: seen to be right, and made into what the handler takes.

Most arguments are seen to be right by a quick check (`_fitting`).  What it does not pass is judged by the engine that
knows JSON Schema, which alone has the reasons; it takes 20 ms to import, and a server that is called as it should be
never needs it.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trio_mcp.core.errors import UsageError, name_of
from trio_mcp.core.jsonrpc import ABSENT, Json, JsonObject
from trio_mcp.server.handlers import Handler

if TYPE_CHECKING:
    from trio_mcp.core.schema.validation import CompiledSchema, Problem

__all__ = ["Arguments", "BadArguments", "arguments_of", "text_arguments"]

_Function = Callable[..., Any]
_Read = Callable[[JsonObject], JsonObject]


class BadArguments(Exception):
    """The arguments of a call are not what the entry takes: the client's mistake.  `problems`: a line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


# They say something about a value, and do not restrict it.
_NOTES = frozenset({"title", "description", "default", "format", "contentEncoding", "x-mcp-header"})
_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties"})
# Beyond, numbers are for those who know what fits into a double.
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


def _fitting(schema: Mapping[str, Json]) -> Callable[[Json], bool] | None:
    """A quick check that passes only what fits `schema`, and most of it; None where there is none as simple.

    For schemas of our own making.  What it does not pass has to be judged by the engine, which also knows why.
    """
    said, kind = schema.keys() - _NOTES, schema.get("type")
    if said <= {"type"}:
        return _SIMPLE.get(kind)
    if said == {"type", "enum"} and kind == "string":
        allowed: list[str] = schema["enum"]
        return allowed.__contains__
    if said == {"anyOf"}:
        return _fitting_one(schema["anyOf"])
    if said == {"type", "items"} and kind == "array":
        item = _fitting(schema["items"])
        return None if item is None else lambda value: type(value) is list and all(map(item, value))
    if kind == "object" and said <= _OBJECT_KEYWORDS and schema.get("additionalProperties") is False:
        return _fitting_members(schema)
    return None


def _fitting_one(alternatives: Sequence[Mapping[str, Json]]) -> Callable[[Json], bool] | None:
    checks = [check for check in map(_fitting, alternatives) if check is not None]
    return (lambda value: any(check(value) for check in checks)) if len(checks) == len(alternatives) else None


def _fitting_members(schema: Mapping[str, Json]) -> Callable[[Json], bool] | None:
    members = {name: check for name, each in schema["properties"].items() if (check := _fitting(each)) is not None}
    if len(members) < len(schema["properties"]):
        return None
    required = tuple(schema.get("required", ()))

    def fits(value: Json) -> bool:  # in loops, for each call comes here
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
    """What an entry takes: checking it, and what it becomes."""

    __slots__ = ("_compiled", "_fits", "_read", "schema")

    def __init__(self, schema: JsonObject, read: _Read | None = None, compiled: CompiledSchema | None = None) -> None:
        self.schema = schema
        self._read = read
        self._compiled = compiled
        # Others' schemas may say more than ours ever do.
        self._fits = _fitting(schema) if compiled is None else None

    def read(self, arguments: JsonObject) -> JsonObject:
        """The values to give to the handler.  Raises BadArguments."""
        fits = self._fits
        if (fits is None or not fits(arguments)) and not self.fit(arguments):
            raise BadArguments([_problem(each.path, each.message) for each in self._judged(arguments)])
        return arguments if self._read is None else self._read(arguments)

    def fit(self, arguments: JsonObject) -> bool:
        """Whether they are what the schema says."""
        return (self._fits is not None and self._fits(arguments)) or not self._judged(arguments)

    def _judged(self, arguments: JsonObject) -> list[Problem]:
        if self._compiled is None:
            from trio_mcp.core.schema.validation import compile_schema

            self._compiled = compile_schema(self.schema)
        return self._compiled.errors(arguments)


def _problem(path: str, what: str) -> str:
    return f"{path or 'arguments'}: {what}"


def arguments_of(function: _Function, handler: Handler, schema: JsonObject) -> Arguments:
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


def text_arguments(function: _Function, handler: Handler, what: str) -> Arguments:
    """Arguments that are text on the wire: those of prompts, and the variables of templates (prm-17)."""
    from trio_mcp.core.schema.schema import hint_of, parameters_schema

    schema = parameters_schema(function, handler.skip)
    for name, each in schema["properties"].items():
        hint = hint_of(function, name)
        if hint is ABSENT or hint is Any:
            each["type"] = "string"
        elif not _is_text(hint):
            raise UsageError(
                f"parameter {name!r} of {name_of(function)}: {what} are text; make it str, str | None, a Literal of "
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
