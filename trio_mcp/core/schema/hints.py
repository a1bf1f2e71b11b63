"""The walk over a type hint that reading (`values`) and writing (`writing`) share.

A `Walk` goes through a hint, in the same way as `schema`, and compiles it to one function, its converter.  A subclass
decides the converter of each kind of hint.
"""

from __future__ import annotations

import abc
import collections.abc
import enum
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

from trio_mcp.core.errors import UsageError
from trio_mcp.core.schema.schema import members_of, resolved_alone, substituted, unsupported, wrapper_of
from trio_mcp.core.schema.self_described import describes_itself

__all__ = ["MAKERS", "TEXTS", "Converter", "Hint", "MemberHint", "Walk", "compiled", "full_name", "is_typed_dict"]

Hint: TypeAlias = Any
Converter: TypeAlias = Callable[[Any], Any]


class MemberHint(NamedTuple):
    name: str
    hint: Hint
    required: bool


class _ForwardConverter:
    """Calls the converter of a class that contains itself, before that converter is complete."""

    def __init__(self) -> None:
        self.converter: Converter | None = None
        self.done = False

    def __call__(self, value: Any) -> Any:
        assert self.converter is not None  # a class with a forward converter inside always has a converter
        return self.converter(value)


class Walk(abc.ABC):
    """Compiles one hint.  A converter of None means that the value needs no conversion by its hint."""

    def __init__(self) -> None:
        self.recursive = False
        self._known: dict[Hint, _ForwardConverter] = {}

    def of(self, hint: Hint) -> Converter | None:
        origin: Hint = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin is None or (not arguments and hint != tuple[()]):  # `List` alone is `list`
            return self._simple(origin or hint)
        if origin is typing.Annotated:
            return self.annotated(hint, self.of(arguments[0]))
        if origin in (typing.Union, types.UnionType):
            return self.union(arguments)
        if origin is typing.Literal:
            return self.choice(arguments)
        if origin is tuple and arguments[1:] != (...,):
            return self.tuple(arguments)
        if origin in _ARRAYS:
            return self.array(origin, self.of(arguments[0]))
        if origin in _MAPPINGS:
            return self.mapping(*map(self.of, arguments))
        return self.of(arguments[0]) if wrapper_of(origin) else self._class_or_alias(hint)

    def _simple(self, hint: Hint) -> Converter | None:
        if isinstance(hint, typing.NewType):
            return self.of(hint.__supertype__)
        if not isinstance(hint, collections.abc.Hashable):  # `[int]` instead of `list[int]`
            return self._of_class(hint)
        if hint in _PLAIN or full_name(hint) in TEXTS:
            return self.scalar(hint)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return self.choice(list(hint))
        return self._class_or_alias(hint)

    def _class_or_alias(self, hint: Hint) -> Converter | None:
        if hint in self._known:
            forward = self._known[hint]
            self.recursive = self.recursive or not forward.done
            return forward.converter if forward.done else forward
        forward = self._known[hint] = _ForwardConverter()
        forward.converter = self._of_class(hint)
        forward.done = True
        return forward.converter

    def _of_class(self, hint: Hint) -> Converter | None:
        kind = typing.get_origin(hint) or hint
        variables = dict(zip(getattr(kind, "__parameters__", ()), typing.get_args(hint), strict=False))
        where = "the hint"
        if not isinstance(kind, type) and hasattr(kind, "__value__"):  # type Alias = ...
            value = resolved_alone(kind.__value__, vars(sys.modules[kind.__module__]), where)
            return self.of(substituted(value, variables))
        if describes_itself(kind):
            return self.self_described(kind)
        found = members_of(kind, where) if isinstance(kind, type) else None
        if found is None:
            raise unsupported(hint, where)
        return self.members(
            kind, [MemberHint(each.name, substituted(each.hint, variables), each.required) for each in found]
        )

    @abc.abstractmethod
    def annotated(self, hint: Hint, inner: Converter | None) -> Converter | None:
        """Convert an `Annotated`; `hint` includes its bounds."""

    @abc.abstractmethod
    def scalar(self, hint: Hint) -> Converter | None:
        """Convert a type without parts, or a container without hints for its items."""

    @abc.abstractmethod
    def choice(self, values: Collection[Any]) -> Converter | None:
        """Convert a Literal or an Enum."""

    @abc.abstractmethod
    def union(self, alternatives: tuple[Hint, ...]) -> Converter | None: ...

    @abc.abstractmethod
    def array(self, origin: Hint, item: Converter | None) -> Converter | None: ...

    @abc.abstractmethod
    def tuple(self, items: tuple[Hint, ...]) -> Converter | None:
        """Convert a tuple of fixed length."""

    @abc.abstractmethod
    def mapping(self, key: Converter | None, value: Converter | None) -> Converter | None: ...

    @abc.abstractmethod
    def members(self, kind: type, members: list[MemberHint]) -> Converter | None:
        """Convert a class with named members; they are in the same order as in its schema."""

    @abc.abstractmethod
    def self_described(self, kind: Any) -> Converter | None:
        """Convert a class that describes itself, such as a pydantic model."""


# The types to call with the items of an array; a list is missing, because JSON arrays are lists.
MAKERS: Mapping[Hint, Callable[[Iterable[Any]], Any]] = {
    tuple: tuple,
    set: set,
    collections.abc.MutableSet: set,
    frozenset: frozenset,
    collections.abc.Set: frozenset,
}
# By name: only programs with these hints load their modules.
TEXTS = frozenset({"datetime.datetime", "datetime.date", "datetime.time", "uuid.UUID"})
_ARRAYS = frozenset({*MAKERS, list, collections.abc.Sequence, collections.abc.MutableSequence})
_MAPPINGS = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})
_PATHS = frozenset({pathlib.Path, pathlib.PurePath})
_PLAIN = frozenset({Any, object, None, NoneType, bool, int, float, str, bytes}) | _PATHS | _ARRAYS | _MAPPINGS


def full_name(hint: Hint) -> str:
    """The name of a class with its module; empty for other hints."""
    return f"{hint.__module__}.{hint.__qualname__}" if isinstance(hint, type) else ""


def is_typed_dict(kind: type) -> bool:
    return hasattr(kind, "__required_keys__")


def compiled(walk: Walk, hint: Hint) -> Converter | None:
    """Compile `hint` with `walk`.  Raises `UsageError` if the hint has no JSON form, or nests without end."""
    try:
        return walk.of(hint)
    except RecursionError:
        raise UsageError(f"{hint!r} contains ever larger forms of itself; end the recursion") from None
