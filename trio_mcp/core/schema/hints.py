"""Hints in their parts, as `core.schema` takes them apart: what reading and writing by hint have in common.

A `Walk` goes through a hint and makes one function of it, its form; what each part becomes is its subclasses' to say.
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

__all__ = ["MAKERS", "TEXTS", "Form", "Hint", "MemberHint", "Walk", "compiled", "full_name", "is_typed_dict"]

Hint: TypeAlias = Any
Form: TypeAlias = Callable[[Any], Any]


class MemberHint(NamedTuple):
    name: str
    hint: Hint
    required: bool


class _ForwardForm:
    """Stands for the form of a class while that is being made, for the places where it contains itself."""

    def __init__(self) -> None:
        self.form: Form | None = None
        self.done = False

    def __call__(self, value: Any) -> Any:
        assert self.form is not None  # what contains this is not plain
        return self.form(value)


class Walk(abc.ABC):
    """One hint in its parts.  A form of None is the plain one, which no hint is needed for."""

    def __init__(self) -> None:
        self.recursive = False
        self._known: dict[Hint, _ForwardForm] = {}

    def of(self, hint: Hint) -> Form | None:
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
        return self.of(arguments[0]) if wrapper_of(origin) else self._once(hint)

    def _simple(self, hint: Hint) -> Form | None:
        if isinstance(hint, typing.NewType):
            return self.of(hint.__supertype__)
        if not isinstance(hint, collections.abc.Hashable):  # `[int]` where `list[int]` was meant
            return self._of_class(hint)
        if hint in _PLAIN or full_name(hint) in TEXTS:
            return self.scalar(hint)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return self.choice(list(hint))
        return self._once(hint)

    def _once(self, hint: Hint) -> Form | None:
        if hint in self._known:
            later = self._known[hint]
            self.recursive = self.recursive or not later.done
            return later.form if later.done else later
        later = self._known[hint] = _ForwardForm()
        later.form = self._of_class(hint)
        later.done = True
        return later.form

    def _of_class(self, hint: Hint) -> Form | None:
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
    def annotated(self, hint: Hint, inner: Form | None) -> Form | None:
        """`hint` is all of it, with its bounds."""

    @abc.abstractmethod
    def scalar(self, hint: Hint) -> Form | None:
        """All that has no parts, and containers of whatever there is."""

    @abc.abstractmethod
    def choice(self, values: Collection[Any]) -> Form | None:
        """Of a Literal or an Enum."""

    @abc.abstractmethod
    def union(self, alternatives: tuple[Hint, ...]) -> Form | None: ...

    @abc.abstractmethod
    def array(self, origin: Hint, item: Form | None) -> Form | None: ...

    @abc.abstractmethod
    def tuple(self, items: tuple[Hint, ...]) -> Form | None:
        """One of fixed length."""

    @abc.abstractmethod
    def mapping(self, key: Form | None, value: Form | None) -> Form | None: ...

    @abc.abstractmethod
    def members(self, kind: type, members: list[MemberHint]) -> Form | None:
        """A class with named members; recognised by `schema`, in the same order as there."""

    @abc.abstractmethod
    def self_described(self, kind: Any) -> Form | None:
        """Such as a model of pydantic's."""


# Those made of an array; a sequence is a list already.
MAKERS: Mapping[Hint, Callable[[Iterable[Any]], Any]] = {
    tuple: tuple,
    set: set,
    collections.abc.MutableSet: set,
    frozenset: frozenset,
    collections.abc.Set: frozenset,
}
# By name, so that only who writes such a hint has loaded the module.
TEXTS = frozenset({"datetime.datetime", "datetime.date", "datetime.time", "uuid.UUID"})
_ARRAYS = frozenset({*MAKERS, list, collections.abc.Sequence, collections.abc.MutableSequence})
_MAPPINGS = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})
_PATHS = frozenset({pathlib.Path, pathlib.PurePath})
_PLAIN = frozenset({Any, object, None, NoneType, bool, int, float, str, bytes}) | _PATHS | _ARRAYS | _MAPPINGS


def full_name(hint: Hint) -> str:
    return f"{hint.__module__}.{hint.__qualname__}" if isinstance(hint, type) else ""


def is_typed_dict(kind: type) -> bool:
    return hasattr(kind, "__required_keys__")


def compiled(walk: Walk, hint: Hint) -> Form | None:
    try:
        return walk.of(hint)
    except RecursionError:
        raise UsageError(f"{hint!r} contains ever larger forms of itself; give them an end") from None
