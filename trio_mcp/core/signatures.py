"""Signatures that show options.

A function that passes `**options` on shows none of them in `help` and in editors at run time.  `show_options` gives it
the signature that its callers see.  The alternative, the same thirty parameters in each function, was turned down: the
copies would differ after the first change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["show_options"]

F = TypeVar("F", bound=Callable[..., Any])


class _Unset:
    """The default of an option whose real default is in its documentation."""

    def __repr__(self) -> str:
        return "..."


_UNSET = _Unset()


def show_options(function: F, options: Any) -> F:
    """Replace `**options` in the signature of `function` by keyword parameters, and return the function.

    `options` is a TypedDict, or a function with the keyword-only parameters.
    """
    if isinstance(options, type):
        named = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_UNSET, annotation=_source(annotation))
            for name, annotation in options.__annotations__.items()
        ]
    else:
        parameters = inspect.signature(options).parameters.values()
        named = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
    return function


def _source(annotation: Any) -> Any:
    """The annotation as it is written: a TypedDict holds it as a ForwardRef."""
    return getattr(annotation, "__forward_arg__", annotation)
