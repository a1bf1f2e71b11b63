"""A user's function, and how it is run.

`typed` looks at the signature of a function that takes its arguments by name, `raw` at that of one that takes what the
protocol has, by position.  Both give a `Handler`: what kind of callable it is, which parameter takes the `Context`, and
`bind`, which makes a call without arguments of it.  Who runs the call reads `how`: await it, give it to a worker
thread, or just call it.

What surprises:
- What counts is what a call does, not what stands behind it: a callable object is as async as its `__call__`, a partial
  as its function.  Only a decorator that is no `async def` itself is taken for what it wraps, if it tells
  (`functools.wraps`), because most of those hand on the coroutine.
- What a `functools.partial` has bound by name is settled, and no argument that a client could give.
- The `Context` is found without resolving other hints, so that it may be imported for type checkers only.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trio_mcp.core.errors import UsageError, name_of

__all__ = ["Handler", "RunMode", "raw", "typed"]


class RunMode(enum.Enum):
    """How a handler is run."""

    ASYNC = enum.auto()  # awaited
    THREAD = enum.auto()  # called in a worker thread
    INLINE = enum.auto()  # called in the event loop, which stands still meanwhile


class Handler:
    """A function of the user, ready to be bound to arguments.

    `by_name`: whether it takes its arguments so; a raw handler takes all by position, the context first.
    `abandon_on_cancel`: whether a cancelled call leaves its worker thread behind, instead of waiting for it.
    `context`: the name of the parameter that takes the Context, if there is one.  `skip`: the parameters that are no
    arguments.
    """

    __slots__ = ("abandon_on_cancel", "by_name", "context", "function", "how", "skip")

    def __init__(
        self,
        function: Callable[..., Any],
        how: RunMode,
        *,
        abandon_on_cancel: bool,
        by_name: bool,
        context: str | None = None,
        skip: frozenset[str] = frozenset(),
    ) -> None:
        self.function = function
        self.how = how
        self.abandon_on_cancel = abandon_on_cancel
        self.by_name = by_name
        self.context = context
        self.skip = skip

    def bind(self, ctx: Any, named: Mapping[str, Any], *placed: Any) -> Callable[[], Any]:
        """A call with `named` by name, and the context where it is wanted; to a raw handler, with `placed` instead."""
        if not self.by_name:
            return functools.partial(self.function, ctx, *placed)
        if self.context is None:
            return functools.partial(self.function, **named)
        return functools.partial(self.function, **named, **{self.context: ctx})


def typed(function: Callable[..., Any], *, thread: bool = True, abandon_on_cancel: bool = True) -> Handler:
    """The handler that takes its arguments by name.  Raises UsageError for a signature that cannot be served.

    The hints of the arguments are left to those who make a schema of them.
    """
    if isinstance(function, type):
        raise UsageError(
            f"{name_of(function)} is a class, and a call of it would only make an object; register a method of one of "
            f"its objects, such as {function.__name__}(...).run, or a function that returns what the object says"
        )
    signature = _signature(function)
    settled = _settled(function)
    found = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.name not in settled and _takes_context(function, parameter)
    ]
    name = name_of(function)
    if len(found) > 1:
        both = " and ".join(repr(parameter.name) for parameter in found)
        raise UsageError(f"the parameters {both} of {name} both take the Context; keep one of them")
    for parameter in found:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(
                f"parameter {parameter.name!r} of {name} is {parameter.kind.description}, but the Context is given by "
                "name; make it an ordinary parameter"
            )
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.name in ("self", "cls") and first.annotation is first.empty:
        raise UsageError(
            f"parameter {first.name!r} of {name} would be an argument: this is a method without its object; register "
            "the method of an object instead, such as Notes().read"
        )
    for parameter in signature.parameters.values():
        if parameter not in found and parameter.name not in settled:
            _check_no_context(function, parameter)
    context = found[0].name if found else None
    skip = settled if context is None else settled | {context}
    how = _how(function, thread, abandon_on_cancel)
    return Handler(function, how, abandon_on_cancel=abandon_on_cancel, by_name=True, context=context, skip=skip)


def _check_no_context(function: Callable[..., Any], parameter: inspect.Parameter) -> None:
    """Refuse a parameter that is meant for the Context, and would be an argument that no client can give."""
    name, hint, where = parameter.name, parameter.annotation, f"parameter {parameter.name!r} of {name_of(function)}"
    if name == "context" and hint is parameter.empty and parameter.default is parameter.empty:
        raise UsageError(
            f"{where} has no type, so clients would have to give it; write {name}: Context for the Context of the "
            "call, or the type of the argument"
        )
    if isinstance(hint, str) and re.fullmatch(_WRITTEN_CONTEXT, hint):
        from trio_mcp.core.schema.schema import hint_of

        hint = hint_of(function, name)
    module = getattr(hint, "__module__", None) or ""
    if getattr(hint, "__name__", None) == "Context" and module.partition(".")[0] in ("mcp", "fastmcp"):
        raise UsageError(f"{where} is a Context of {module}; write from trio_mcp import Context")


def raw(
    function: Callable[..., Any], takes: Sequence[str], *, thread: bool = True, abandon_on_cancel: bool = True
) -> Handler:
    """The handler that is called with as many arguments by position; `takes` names them, for messages."""
    signature = _signature(function)
    try:
        signature.bind(*takes)
    except TypeError as error:
        raise UsageError(
            f"{name_of(function)} is called by position, with ({', '.join(takes)}), but takes {signature}: {error}"
        ) from None
    return Handler(
        function, _how(function, thread, abandon_on_cancel), abandon_on_cancel=abandon_on_cancel, by_name=False
    )


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if not callable(function):
        raise UsageError(f"a handler is a function or another callable, not {type(function).__name__}")
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name_of(function)} does not say what it takes: {error}; wrap it in a function that does"
        ) from None


# How it is run.


def _how(function: Callable[..., Any], thread: bool, abandon_on_cancel: bool) -> RunMode:
    name = name_of(function)
    callables = list(_callables(function))
    if inspect.isgeneratorfunction(callables[0]) or inspect.isasyncgenfunction(callables[0]):
        raise UsageError(
            f"{name} is a generator, which would give nothing but itself; return all of it at once, as a list"
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
    """What runs when `function` is called, and what each decorator says that it wraps.

    Ends: a decorator that wraps itself has no signature, and came no further than that.
    """
    while function is not None:
        while isinstance(function, functools.partial):
            function = function.func
        yield function if isinstance(function, type) or inspect.isroutine(function) else type(function).__call__
        function = getattr(function, "__wrapped__", None)


def _settled(function: Callable[..., Any]) -> frozenset[str]:
    """What a partial has bound by name: the signature goes on to show it, with a default."""
    return frozenset(function.keywords) if isinstance(function, functools.partial) else frozenset()


# Which parameter takes the Context.

# As it may be written in a hint that cannot be resolved.
_WRITTEN_CONTEXT = r"(None\s*\|\s*)?([\w.]*\bOptional\[\s*)?[\w.]*Context(\[.*\])?(\s*\])?(\s*\|\s*None)?"


def _takes_context(function: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    hint = parameter.annotation
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    if hint is parameter.empty:
        return parameter.name == "ctx"
    if isinstance(hint, type):  # the most common hints, without the price of resolving
        return _is_context(hint)
    from trio_mcp.core.schema.schema import hint_of  # 8 ms, and who registers raw handlers never needs it

    try:
        return _is_context(hint_of(function, parameter.name))
    except UsageError:
        # Not there while the program runs.  Whether that is a mistake is for who needs the hint to say.
        return _is_context(hint)


def _is_context(hint: Any) -> bool:
    from trio_mcp.server.context import Context

    hint = getattr(hint, "__forward_arg__", hint)
    if isinstance(hint, str):
        return re.fullmatch(_WRITTEN_CONTEXT, hint) is not None
    origin = typing.get_origin(hint)
    inside = typing.get_args(hint)
    if origin is typing.Annotated:
        return _is_context(inside[0])
    if origin in (typing.Union, types.UnionType):
        inside = tuple(each for each in inside if each is not types.NoneType)
        return len(inside) == 1 and _is_context(inside[0])
    return isinstance(origin or hint, type) and issubclass(origin or hint, Context)
