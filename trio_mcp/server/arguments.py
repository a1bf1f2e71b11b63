"""The arguments of a call: check them, and convert them to the parameters of the handler.

The shape of a function's parameters checks them.  The JSON Schema engine gives the reasons of a failure, and checks
arguments against a schema written by hand.  It takes 20 ms to import, and most servers that get only valid calls never
need it.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trio_mcp.core.errors import UsageError, name_of
from trio_mcp.core.messages import Json, JsonObject
from trio_mcp.server.handlers import Handler

if TYPE_CHECKING:
    from trio_mcp.core.schema.validation import CompiledSchema, Problem

__all__ = ["Arguments", "BadArguments", "arguments_of", "text_arguments"]


class BadArguments(Exception):
    """The arguments of a call do not fit the entry; a mistake of the client.  `problems` has one line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class Arguments:
    """The arguments of an entry: checks them against the schema, and converts them for the handler.

    `fits` and `read` belong to the shape of a function's parameters; `compiled` is a schema written by hand.
    """

    __slots__ = ("_compiled", "_fits", "_read", "schema")

    def __init__(
        self,
        schema: JsonObject,
        fits: Callable[[Json], bool] | None = None,
        read: Callable[[JsonObject], JsonObject] | None = None,
        *,
        compiled: CompiledSchema | None = None,
    ) -> None:
        self.schema = schema
        self._fits = fits
        self._read = read
        self._compiled = compiled

    def read(self, arguments: JsonObject) -> JsonObject:
        """Return the values for the handler.  Raises BadArguments."""
        fits = self._fits
        if (fits is None or not fits(arguments)) and (problems := self._problems(arguments)):
            raise BadArguments([_problem(each.path, each.message) for each in problems])
        if self._read is None:
            return arguments
        try:
            return self._read(arguments)
        except ValueError as error:
            from trio_mcp.core.schema.shapes import Unreadable  # the reader has loaded it

            if isinstance(error, Unreadable):
                raise BadArguments([_problem(error.path, error.why)]) from None
            raise

    def fit(self, arguments: JsonObject) -> bool:
        """Whether the arguments fit the schema."""
        return (self._fits is not None and self._fits(arguments)) or not self._problems(arguments)

    def _problems(self, arguments: JsonObject) -> list[Problem]:
        if self._compiled is None:
            from trio_mcp.core.schema.validation import compile_schema

            self._compiled = compile_schema(self.schema)
        return self._compiled.errors(arguments)


def _problem(path: str, message: str) -> str:
    return f"{path or 'arguments'}: {message}"


def arguments_of(function: Callable[..., Any], handler: Handler, *, untyped: Any = Any) -> Arguments:
    """The arguments of a function, which are converted to the types of its parameters.

    `untyped` is the type of parameters that have none, or Any.
    """
    from trio_mcp.core.schema.shapes import arguments_shape

    shape = arguments_shape(function, handler.skip, untyped=untyped)
    return Arguments(shape.schema, shape.fits, shape.read)


def text_arguments(function: Callable[..., Any], handler: Handler, subject: str) -> Arguments:
    """Arguments that are text in the protocol: arguments of prompts, and variables of templates (prm-17)."""
    from trio_mcp.core.schema.hints import parameters_of

    for each in parameters_of(function, handler.skip):
        if each.hint is not Any and not _is_text(each.hint):
            raise UsageError(
                f"parameter {each.name!r} of {name_of(function)}: {subject} are text; make it str, str | None, a "
                "Literal of strings or an Enum of strings, and convert it in the function"
            )
    return arguments_of(function, handler, untyped=str)


def _is_text(hint: Any) -> bool:
    from trio_mcp.core.schema.hints import alternatives_of

    values: list[Any] = []
    for each in alternatives_of(hint):
        origin: Any = typing.get_origin(each)
        if origin is typing.Literal:
            values += typing.get_args(each)
        elif hasattr(each, "__members__"):  # an Enum
            values += [member.value for member in each]
        elif each is not types.NoneType:
            values.append("" if each is str else each)
    return bool(values) and all(isinstance(value, str) for value in values)
