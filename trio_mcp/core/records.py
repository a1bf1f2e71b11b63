"""What never changes and is compared by value: nearly every class here.

`@record` is `@attrs.frozen` with one `==`, one hash and one repr for all records, which look at the fields when they
are asked.  attrs would write and compile three functions for each class, which takes longer than all the rest of it,
and a server is started more often than two of its events are compared.  What is compared in earnest, as the key of a
table, has `@attrs.frozen`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs

__all__ = ["record", "thawed"]

if TYPE_CHECKING:
    from attrs import frozen as record
else:

    def record(cls: type | None = None, **options: Any) -> Any:
        """The class as attrs makes it, but for the three methods.  One that the class has of its own stays."""
        if cls is None:
            return functools.partial(record, **options)
        for name, method in _SHARED.items():
            if name not in vars(cls):
                setattr(cls, name, method)
        return attrs.frozen(cls, eq=False, repr=False, **options)


def thawed(cls: type) -> Any:
    """A class like this one, but for that its objects begin without fields and can be changed.  One that is given its
    fields one by one, and then this class as its own, takes half as long as one that is made by the `__init__` of a
    frozen class, which has to break the ice for each field.  That pays for what there is one of for each message.
    """
    of_any_object = {name: getattr(object, name) for name in ("__init__", "__setattr__", "__delattr__")}
    return type(cls.__name__, (cls,), {"__slots__": (), **of_any_object})


def _values(one: Any) -> tuple[Any, ...]:
    return tuple([getattr(one, field.name) for field in attrs.fields(type(one)) if field.eq])


def _equal(one: Any, other: object) -> bool:
    return _values(one) == _values(other) if type(other) is type(one) else NotImplemented


def _hash(one: Any) -> int:
    return hash((type(one), _values(one)))


def _repr(one: Any) -> str:
    shown = [f"{field.name}={getattr(one, field.name)!r}" for field in attrs.fields(type(one)) if field.repr]
    return f"{type(one).__name__}({', '.join(shown)})"


_SHARED = {"__eq__": _equal, "__hash__": _hash, "__repr__": _repr}
