"""What `Annotated` adds to a shape: a title, a description and bounds.

They come from `Annotated[T, Field(ge=1)]`, or from any object with attributes of those names; see `hints`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from trio_mcp.core.errors import UsageError
from trio_mcp.core.schema.composites import union_shape
from trio_mcp.core.schema.hints import Member
from trio_mcp.core.schema.shapes import Check, Shape, Verdict

__all__ = ["annotated_shape", "misplaced"]

_KEYWORDS: Mapping[str, str] = {
    "title": "title",
    "description": "description",
    "format": "format",
    "header": "x-mcp-header",
}


def _for_sizes(prefix: str) -> dict[str, str]:
    return {"string": f"{prefix}Length", "array": f"{prefix}Items", "object": f"{prefix}Properties"}


def _for_numbers(keyword: str) -> dict[str, str]:
    return {"integer": keyword, "number": keyword}


# Attribute -> type in the schema -> keyword; and the check with the bound after another check, if it needs no engine.
_BOUNDS: Mapping[str, tuple[Mapping[str, str], Callable[[Check, Any], Check] | None]] = {
    "ge": (_for_numbers("minimum"), lambda fits, bound: lambda value: fits(value) and value >= bound),
    "gt": (_for_numbers("exclusiveMinimum"), lambda fits, bound: lambda value: fits(value) and value > bound),
    "le": (_for_numbers("maximum"), lambda fits, bound: lambda value: fits(value) and value <= bound),
    "lt": (_for_numbers("exclusiveMaximum"), lambda fits, bound: lambda value: fits(value) and value < bound),
    "multiple_of": (_for_numbers("multipleOf"), None),
    "min_length": (_for_sizes("min"), lambda fits, bound: lambda value: fits(value) and len(value) >= bound),
    "max_length": (_for_sizes("max"), lambda fits, bound: lambda value: fits(value) and len(value) <= bound),
    "pattern": ({"string": "pattern"}, None),
}
_ATTRIBUTES = (*_KEYWORDS, *_BOUNDS)


def _details(extra: Any) -> Iterator[tuple[str, Any]]:
    """The notes and bounds that an object in `Annotated` has."""
    metadata = getattr(extra, "metadata", None)  # pydantic keeps its bounds there
    for each in (extra, *(metadata if isinstance(metadata, list) else ())):
        if isinstance(each, str):
            yield "description", each
        elif not isinstance(each, type):
            for name in _ATTRIBUTES:
                if (value := getattr(each, name, None)) is not None and not callable(value):
                    yield name, value


def annotated_shape(shape: Shape, extras: Iterable[Any], where: str) -> Shape:
    """Add notes and bounds to a shape.  Raises `UsageError` for a bound that the type does not have."""
    for name, value in itertools.chain.from_iterable(map(_details, extras)):
        if name in _BOUNDS:
            at = f"{where}: {name}={value!r}"
            if type(value) not in ((str,) if name == "pattern" else (int, float)):
                raise UsageError(f"{at} is not a bound of JSON Schema; check it in the function")
            bounded = _bounded(shape, name, value)
            if bounded is None:
                raise UsageError(f"{at} does not fit the type; it needs one of {', '.join(_BOUNDS[name][0])}")
            shape = bounded
        elif isinstance(value, str):
            shape.schema[_KEYWORDS[name]] = value
    return shape


def _bounded(shape: Shape, name: str, bound: Any) -> Shape | None:
    """Add a bound to `shape`, or to its alternatives of the right type; None if there are none."""
    if shape.parts:
        parts = [_bounded(part, name, bound) for part in shape.parts]
        if not any(parts):
            return None
        # The schemas of the alternatives, which are parts of `shape.schema`, now have the bound.
        union = union_shape(new or old for new, old in zip(parts, shape.parts, strict=True))
        return union._replace(schema=shape.schema)
    keywords, with_bound = _BOUNDS[name]
    keyword = keywords.get(str(shape.schema.get("type")))
    if keyword is None or "contentEncoding" in shape.schema:  # a bound on bytes would count base64 characters
        return None
    shape.schema[keyword] = bound
    if with_bound is not None:
        return shape._replace(fits=with_bound(shape.fits, bound))
    by_engine = Verdict(lambda: {keyword: bound})
    return shape._replace(fits=lambda value: shape.fits(value) and by_engine(value))


def misplaced(member: Member) -> UsageError:
    """The error for details that stand in the place of a default."""
    given = ", ".join(f"{name}={value!r}" for name, value in dict(_details(member.default)).items())
    hint = inspect.formatannotation(member.hint)
    return UsageError(
        f"{member.where} has a {type(member.default).__name__} as its default; write {member.name}: Annotated[{hint}, "
        f"Field({given})], and its default, if it has one, after that"
    )
