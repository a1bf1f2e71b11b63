"""What type hints and docstrings say: resolved hints, the parameters of functions, bounds, descriptions.

The description of a member comes from `Annotated[T, "text"]`, otherwise from the docstring (Google, NumPy or Sphinx
style).  Bounds come from `Annotated[T, Field(ge=1)]`, or from any object with attributes of those names: the classes of
`annotated_types` have them, and pydantic keeps a list of these.

`shapes` compiles hints, and `classes` knows the members of classes.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import ABSENT, Absent, record

__all__ = [
    "Description", "Field", "Hint", "Member", "alternatives_of", "describe", "full_name", "hint_of", "parameters_of",
    "resolved", "resolved_alone", "substituted", "unsupported", "wrapper_of",
]  # fmt: skip

Hint: TypeAlias = Any  # Python has no type for type hints


@record(kw_only=True)
class Field:
    """Details of a parameter or member that a type hint cannot express: `Annotated[int, Field(ge=1)]`."""

    title: str | None = None
    description: str | None = None
    format: str | None = None  # a note for the reader, such as "email"; it is not checked
    header: str | None = None  # the tool argument is repeated in the HTTP header Mcp-Param-<header> (2026-07-28)
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    multiple_of: float | None = None
    min_length: int | None = None  # of text, an array or a mapping
    max_length: int | None = None
    pattern: str | None = None


class Member(NamedTuple):
    """A member of a class, or a parameter of a function; `where` names it in errors."""

    name: str
    hint: Hint
    required: bool
    default: Any  # or ABSENT
    where: str


def parameters_of(function: Callable[..., object], skip: Collection[str] = ()) -> list[Member]:
    """Return the parameters that `function` takes by name, except those in `skip`; a missing hint is Any."""
    members = []
    for parameter in _signature(function).parameters.values():
        if parameter.name in skip:
            continue
        where = f"parameter {parameter.name!r} of {_name(function)}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(f"{where} is {parameter.kind.description}; declare each argument as a named parameter")
        hint = hint_of(function, parameter.name)
        default = ABSENT if parameter.default is parameter.empty else parameter.default
        members.append(Member(parameter.name, Any if hint is ABSENT else hint, default is ABSENT, default, where))
    return members


def hint_of(function: Callable[..., object], name: str) -> Hint | Absent:
    """Return the resolved hint of the parameter `name`, or of "return", with its `Annotated`; `ABSENT` if it has none.

    Each hint is resolved by itself, so that a name that is imported for type checkers only does not affect the others.
    """
    signature = _signature(function)
    hint = signature.return_annotation if name == "return" else signature.parameters[name].annotation
    if hint is signature.empty:
        return ABSENT
    where = f"the hint of {name!r} in {_name(function)}"
    return resolved_alone(hint, getattr(_innermost(function), "__globals__", {}), where)


def _name(function: Callable[..., object]) -> str:
    return getattr(_innermost(function), "__qualname__", repr(function))


def _signature(function: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        why = f"the parameters of {_name(function)} cannot be read: {error}"
        raise UsageError(f"{why}; give the schema by hand") from None


def _innermost(function: Any) -> Any:
    """The function in the source code, behind decorators, partials, bound methods and callable objects."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(function, type):
            function = function.__init__  # type: ignore[misc]
        elif inspect.isroutine(function):
            return function
        else:
            function = type(function).__call__


def resolved(owner: Any, names: dict[str, Any] | None, where: str) -> dict[str, Hint]:
    """Return the hints of a class or function.  Raises `UsageError` if a name is unknown."""
    try:
        return typing.get_type_hints(owner, names, include_extras=True)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        # Linters move imports that only hints need below `if TYPE_CHECKING`, which is false at run time.
        advice = "define or import it at module level, and not under TYPE_CHECKING"
        raise UsageError(f"{where} cannot be resolved: {error}; {advice}") from None


def resolved_alone(hint: Hint, names: dict[str, Any], where: str) -> Hint:
    """Return one hint with its names resolved in `names`.  Raises `UsageError` if a name is unknown."""
    return resolved(types.SimpleNamespace(__annotations__={"it": hint}), names, where)["it"]


def alternatives_of(hint: Hint) -> list[Hint]:
    """The members of a union, also inside Annotated, NewType and type aliases; another hint is its only alternative."""
    origin: Hint = typing.get_origin(hint)
    if origin is typing.Annotated:
        return alternatives_of(hint.__origin__)
    if origin in (typing.Union, types.UnionType):
        return [each for member in typing.get_args(hint) for each in alternatives_of(member)]
    if isinstance(hint, typing.NewType):
        return alternatives_of(hint.__supertype__)
    alias = None if isinstance(hint, type) else getattr(hint, "__value__", None)
    return [hint] if alias is None else alternatives_of(alias)


def substituted(hint: Hint, variables: Mapping[Hint, Hint]) -> Hint:
    """Return `hint` with its type variables replaced: `list[T]` becomes `list[int]`."""
    if isinstance(hint, TypeVar):
        return variables.get(hint, hint)
    free = () if isinstance(hint, type) else getattr(hint, "__parameters__", ())
    if not variables or not free:
        return hint
    generic: Any = hint
    return generic[tuple(variables.get(each, each) for each in free)]


def wrapper_of(origin: Hint) -> str | None:
    """The name of a form that describes a member and not its value, or None.

    It is recognised by name, because `typing` and `typing_extensions` both have these forms.
    """
    name = str(origin).rpartition(".")[2]
    return name if name in ("Required", "NotRequired", "ReadOnly", "Final") else None


def full_name(hint: Hint) -> str:
    """The name of a class with its module; empty for other hints."""
    return f"{hint.__module__}.{hint.__qualname__}" if isinstance(hint, type) else ""


def unsupported(hint: Hint, where: str) -> UsageError:
    """The error for a hint without a schema."""
    known = "a builtin type, a union, Literal, Enum, TypedDict, NamedTuple, a dataclass, an attrs or a pydantic class"
    return UsageError(f"{where}: {hint!r} has no JSON form here; use {known}, or give the schema by hand")


# Docstrings.

_GOOGLE = frozenset({"Args:", "Arguments:", "Parameters:", "Keyword Args:", "Attributes:"})
_GOOGLE_ENTRY = r"(?P<names>\w+)\s*(\(.*?\))?\s*:\s*(?P<text>.*)"
_NUMPY = frozenset({"Parameters", "Other Parameters", "Attributes"})
_NUMPY_ENTRY = r"(?P<names>\w+(, \w+)*)(\s*:.*)?(?P<text>)"
_NUMPY_RULE = r"-{3,}\s*"
_SPHINX = r":(param|parameter|arg|argument|type|var|ivar)\b([^:]*\s)?(?P<names>\w+):\s*(?P<text>.*)"


@record
class Description:
    """A docstring in two parts: the text, and the description of each member or parameter."""

    text: str = ""
    members: Mapping[str, str] = attrs.field(factory=dict)


def describe(thing: object) -> Description:
    """Read a docstring.  The sections that describe parameters or attributes are not part of the text."""
    if isinstance(thing, type):
        text = vars(thing).get("__doc__") or ""
        # Dataclasses and named tuples without a docstring have their signature as `__doc__`.
        return _parsed("" if text.startswith(f"{thing.__name__}(") else inspect.cleandoc(text))
    return _parsed(inspect.getdoc(_innermost(thing)) or "")


def _parsed(text: str) -> Description:
    lines, paragraphs = deque(text.splitlines()), []
    members: dict[str, str] = {}
    while lines:
        line = lines.popleft()
        if line.rstrip() in _GOOGLE:
            members |= _entries(_indented(lines), _GOOGLE_ENTRY)
        elif line.rstrip() in _NUMPY and lines and re.fullmatch(_NUMPY_RULE, lines[0]):
            lines.popleft()
            members |= _entries(_up_to_heading(lines), _NUMPY_ENTRY)
        elif line.startswith(":") and (sphinx := re.fullmatch(_SPHINX, line)):
            rest = " ".join([sphinx["text"], *_indented(lines)])
            if sphinx[1] != "type":
                members[sphinx["names"]] = " ".join(rest.split())
        else:
            paragraphs.append(line)
    return Description("\n".join(paragraphs).strip(), members)


def _indented(lines: deque[str]) -> Iterator[str]:
    while lines and (not lines[0] or lines[0][0].isspace()):
        yield lines.popleft()


def _up_to_heading(lines: deque[str]) -> Iterator[str]:
    while lines and not (len(lines) > 1 and re.fullmatch(_NUMPY_RULE, lines[1])):
        yield lines.popleft()


def _entries(section: Iterator[str], entry: str) -> dict[str, str]:
    entries: dict[str, list[str]] = {}
    names: list[str] = []
    for line in inspect.cleandoc("\n" + "\n".join(section)).splitlines():
        if begins := re.fullmatch(entry, line):  # at the margin; indented lines continue an entry
            names = begins["names"].split(", ")
            entries |= {name: [begins["text"]] for name in names}
        else:
            for name in names:
                entries[name].append(line)
    return {name: " ".join(" ".join(texts).split()) for name, texts in entries.items()}
