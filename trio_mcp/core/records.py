"""`@record`: a decorator for immutable classes that are compared by value.

Nearly every class of the core is a record.  `@record` is `@attrs.frozen`, but all records share one `==`, one hash and
one repr, which read the fields when they are called.  attrs would generate and compile three functions for each class.
That takes longer than the rest of the class, and programs start servers more often than they compare two events.  A
class that is compared often, for example as the key of a dict, has `@attrs.frozen`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs

__all__ = ["mutable_twin", "record"]

if TYPE_CHECKING:
    from attrs import frozen as record
else:

    def record(cls: type | None = None, **options: Any) -> Any:
        """Make a class a record.  A method that the class defines itself is kept."""
        if cls is None:
            return functools.partial(record, **options)
        for name, method in _SHARED.items():
            if name not in vars(cls):
                setattr(cls, name, method)
        return attrs.frozen(cls, eq=False, repr=False, **options)


def mutable_twin(cls: type) -> Any:
    """Return a mutable subclass of a record, whose objects start without fields.

    Create an object of it, set the fields, then set `__class__` to the record.  This takes half as long as the
    `__init__` of a frozen class, which must bypass `__setattr__` for each field.  It is worth the effort only for
    classes with one object per message.
    """
    methods = {name: getattr(object, name) for name in ("__init__", "__setattr__", "__delattr__")}
    return type(cls.__name__, (cls,), {"__slots__": (), **methods})


def _values(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, field.name) for field in attrs.fields(type(self)) if field.eq])


def _equal(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash((type(self), _values(self)))


def _repr(self: Any) -> str:
    fields = [f"{field.name}={getattr(self, field.name)!r}" for field in attrs.fields(type(self)) if field.repr]
    return f"{type(self).__name__}({', '.join(fields)})"


_SHARED = {"__eq__": _equal, "__hash__": _hash, "__repr__": _repr}
