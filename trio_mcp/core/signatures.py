"""Signatures that show options, and checks of options by their annotations.

A function that passes `**options` on shows none of them in `help` and in editors at run time.  `show_options` gives it
the signature that its callers see.  The alternative, the same thirty parameters in each function, was turned down: the
copies would differ after the first change.

`check_options` checks the names and the types of options where they are written once, in a TypedDict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trio_mcp.core.errors import UsageError

__all__ = ["check_options", "show_options"]

F = TypeVar("F", bound=Callable[..., Any])

# For each type that is checked: its name in messages.  All other annotations are left to the callers.
_EXPECTED = {
    "str": "text",
    "bool": "True or False",
    "Mapping": "a mapping",
    "Callable": "a function",
    "Limits": "a Limits object",
    "CacheHints": "CacheHints",
    "Annotations": "Annotations",
    "ToolAnnotations": "ToolAnnotations",
    "Icon": "an Icon object",
}


class _Unset:
    """The default of an option whose real default is in its documentation."""

    def __repr__(self) -> str:
        return "..."


_UNSET = _Unset()


def show_options(function: F, options: Any) -> F:
    """Replace `**options` in the signature of `function` by the keys of a TypedDict, and return the function."""
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_UNSET, annotation=_source(annotation))
        for name, annotation in options.__annotations__.items()
    ]
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
    return function


def check_options(given: Mapping[str, Any], options: Any, owner: str = "") -> None:
    """Check options by the annotations of a TypedDict.

    Raises TypeError for an unknown name, and UsageError for a value that its annotation does not allow.  Checked are
    text, switches, mappings, functions, lists of objects and a few classes, each also with "| None"; the callers check
    bounds and all other types.  `owner` names the object that has the options, for the message.
    """
    annotations = options.__annotations__
    if unknown := given.keys() - annotations.keys():
        raise TypeError(f"unknown option {min(unknown)!r}; the options are {', '.join(annotations)}")
    for name, value in given.items():
        annotation = _source(annotations[name])
        word, _, inside = annotation.removesuffix(" | None").partition("[")
        item = inside.rstrip("]")
        if (value is None and annotation.endswith(" | None")) or _is_a(value, word, item):
            continue
        of, but = (f"the {name} of {owner}", "not") if owner else (name, "got")
        if word == "Sequence":
            raise UsageError(f"{of} must be a list of {item} objects")
        # Only a switch is shown: other values may be secrets.
        got = repr(value) if word == "bool" else type(value).__name__
        raise UsageError(f"{of} must be {_EXPECTED[word]}, {but} {got}")


def _is_a(value: object, word: str, item: str) -> bool:
    """Whether a value is of this type, or the type is not checked.

    Classes are compared by name, because the modules of some take 50 ms to import, and a value of such a class comes
    only from a program that has imported it.
    """
    if word == "Callable":
        return callable(value)
    if word == "Mapping":
        return isinstance(value, Mapping)
    if word == "Sequence" and item[:1].isupper():
        return isinstance(value, Sequence) and all(_is_a(each, item, "") for each in value)
    return word not in _EXPECTED or any(each.__name__ == word for each in type(value).__mro__)


def _source(annotation: Any) -> str:
    """The annotation as it is written: a TypedDict holds it as a ForwardRef."""
    source: str = getattr(annotation, "__forward_arg__", annotation)
    return source
