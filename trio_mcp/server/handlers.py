"""Handlers: the functions of an author, how to run them, and how to check and convert their arguments.

`typed` reads the signature of a function that takes its arguments by name; `raw` checks a function that takes the
objects of the protocol by position.  Both return a `Handler`, which knows how to run the function (`how`: await it,
call it in a worker thread, or call it in the event loop) and which parameter takes the `Context`.  `Handler.bind` makes
a call without arguments.

Surprises:

- A callable object is async if its `__call__` is, and a partial if its function is.  A decorator that is no
  `async def` itself counts as async if it wraps an async function (`functools.wraps`), because most decorators return
  the coroutine of the function.
- Keyword arguments of a `functools.partial` are fixed: clients cannot set them.
- The `Context` parameter is found without resolving other annotations, so that these may name imports that exist only
  for type checkers.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from trio_mcp.core.errors import UsageError, name_of
from trio_mcp.core.messages import Json, JsonObject

if TYPE_CHECKING:
    from trio_mcp.core.schema.validation import CompiledSchema, Problem

__all__ = ["Arguments", "BadArguments", "Handler", "RunMode", "arguments_of", "raw", "typed"]


class RunMode(enum.Enum):
    """How to run a handler."""

    ASYNC = enum.auto()  # awaited
    THREAD = enum.auto()  # called in a worker thread
    INLINE = enum.auto()  # called in the event loop, which stands still meanwhile


@attrs.define(eq=False)
class Handler:
    """A function of an author, checked, and ready to be bound to arguments."""

    function: Callable[..., Any]
    how: RunMode
    abandon_on_cancel: bool
    """Whether a cancelled call abandons its worker thread instead of waiting for it."""
    by_name: bool
    """Whether it takes its arguments by name; a raw handler takes all by position, the context first."""
    context: str | None = None
    """The name of the parameter that takes the Context, or None."""
    skip: frozenset[str] = frozenset()
    """The parameters that are not arguments of clients."""

    def bind(self, ctx: Any, named: Mapping[str, Any], *placed: Any) -> Callable[[], Any]:
        """Return a call without arguments.

        It passes `named` by name, and the context if a parameter takes it.  A raw handler gets `ctx` and `placed`
        instead.
        """
        if not self.by_name:
            return functools.partial(self.function, ctx, *placed)
        if self.context is None:
            return functools.partial(self.function, **named)
        return functools.partial(self.function, **named, **{self.context: ctx})


def typed(function: Callable[..., Any], *, thread: bool = True, abandon_on_cancel: bool = True) -> Handler:
    """Make the handler for a function that takes its arguments by name.

    Raises UsageError for a signature that cannot be called.  The annotations of the arguments are checked later, when
    their schema is made.
    """
    if isinstance(function, type):
        raise UsageError(
            f"{name_of(function)} is a class, and a call of it would only make an object; register a method of an "
            f"object, such as {function.__name__}(...).run, or a function"
        )
    signature = _signature(function)
    # The parameters that a partial has bound by name.  The signature still shows them, with defaults.
    bound = frozenset(function.keywords) if isinstance(function, functools.partial) else frozenset[str]()
    name, context = name_of(function), None
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.name in ("self", "cls") and first.annotation is first.empty:
        raise UsageError(
            f"parameter {first.name!r} of {name} would be an argument: this is a method without its object; register "
            "a method of an object, such as Notes().read"
        )
    for parameter in signature.parameters.values():
        if parameter.name in bound:
            continue
        if not _takes_context(function, parameter):
            _check_no_context(function, parameter)
        elif context is not None:
            both = f"{context!r} and {parameter.name!r}"
            raise UsageError(f"the parameters {both} of {name} both take the Context; keep one of them")
        elif parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(
                f"parameter {parameter.name!r} of {name} is {parameter.kind.description}, but the Context is given by "
                "name; make it an ordinary parameter"
            )
        else:
            context = parameter.name
    skip = bound if context is None else bound | {context}
    how = _run_mode(function, thread, abandon_on_cancel)
    return Handler(function, how, abandon_on_cancel=abandon_on_cancel, by_name=True, context=context, skip=skip)


def _check_no_context(function: Callable[..., Any], parameter: inspect.Parameter) -> None:
    """Raise UsageError for a parameter that looks like a Context but would become an argument of clients."""
    name, hint, where = parameter.name, parameter.annotation, f"parameter {parameter.name!r} of {name_of(function)}"
    if name == "context" and hint is parameter.empty and parameter.default is parameter.empty:
        raise UsageError(
            f"{where} has no type, so it would be an argument of clients; write {name}: Context for the Context of the "
            "call, or the type of the argument"
        )
    if isinstance(hint, str) and re.fullmatch(_CONTEXT_TEXT, hint):
        from trio_mcp.core.schema.hints import hint_of

        hint = hint_of(function, name)
    module = getattr(hint, "__module__", None) or ""
    if getattr(hint, "__name__", None) == "Context" and module.partition(".")[0] in ("mcp", "fastmcp"):
        raise UsageError(f"{where} is a Context of {module}; write from trio_mcp import Context")


def raw(
    function: Callable[..., Any], takes: Sequence[str], *, thread: bool = True, abandon_on_cancel: bool = True
) -> Handler:
    """Make the handler for a function that is called by position; `takes` names the arguments, for messages."""
    signature = _signature(function)
    try:
        signature.bind(*takes)
    except TypeError as error:
        raise UsageError(
            f"{name_of(function)} is called by position, with ({', '.join(takes)}), but takes {signature}: {error}"
        ) from None
    return Handler(
        function, _run_mode(function, thread, abandon_on_cancel), abandon_on_cancel=abandon_on_cancel, by_name=False
    )


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if not callable(function):
        raise UsageError(f"a handler must be a function or another callable, got {type(function).__name__}")
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name_of(function)} has no signature: {error}; wrap it in a function that has one") from None


# How to run it.


def _run_mode(function: Callable[..., Any], thread: bool, abandon_on_cancel: bool) -> RunMode:
    name = name_of(function)
    callables = list(_callables(function))
    if inspect.isgeneratorfunction(callables[0]) or inspect.isasyncgenfunction(callables[0]):
        raise UsageError(
            f"{name} is a generator function, whose call returns only a generator; return all items at once, as a list"
        )
    if any(inspect.iscoroutinefunction(each) for each in callables):
        for option, given in (("thread", thread), ("abandon_on_cancel", abandon_on_cancel)):
            if not given:
                raise UsageError(f"{name} is async, so no thread runs it; drop {option}=False, or the async")
        return RunMode.ASYNC
    if thread:
        return RunMode.THREAD
    if not abandon_on_cancel:
        raise UsageError(f"{name} has thread=False, so no thread runs it; drop abandon_on_cancel=False")
    return RunMode.INLINE


def _callables(function: Any) -> Iterator[Callable[..., Any]]:
    """Yield the function that runs when `function` is called, then each function that a decorator says it wraps.

    It ends: a decorator that wraps itself has no signature, so it was refused before.
    """
    while function is not None:
        while isinstance(function, functools.partial):
            function = function.func
        yield function if isinstance(function, type) or inspect.isroutine(function) else type(function).__call__
        function = getattr(function, "__wrapped__", None)


# Which parameter takes the Context.

# The text of an annotation that cannot be resolved.
_CONTEXT_TEXT = r"(None\s*\|\s*)?([\w.]*\bOptional\[\s*)?[\w.]*Context(\[.*\])?(\s*\])?(\s*\|\s*None)?"


def _takes_context(function: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    hint = parameter.annotation
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    if hint is parameter.empty:
        return parameter.name == "ctx"
    if isinstance(hint, type):  # the most common annotations, without the cost of resolving
        return _is_context(hint)
    from trio_mcp.core.schema.hints import hint_of  # takes 8 ms, and raw handlers never need it

    try:
        return _is_context(hint_of(function, parameter.name))
    except UsageError:
        # The name does not exist at run time.  If the annotation is needed, the code that makes its schema will raise.
        return _is_context(hint)


def _is_context(hint: Any) -> bool:
    from trio_mcp.core.schema.hints import alternatives_of
    from trio_mcp.server.context import Context

    kinds = [each for each in alternatives_of(hint) if each is not types.NoneType]
    if len(kinds) != 1:
        return False
    kind = getattr(kinds[0], "__forward_arg__", kinds[0])
    if isinstance(kind, str):
        return re.fullmatch(_CONTEXT_TEXT, kind) is not None
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, Context)


# Arguments.  The shape of a function's parameters checks them.  The JSON Schema engine gives the reasons of a failure,
# and checks arguments against a schema written by hand.  It takes 20 ms to import, and most servers that get only valid
# calls never need it.


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
