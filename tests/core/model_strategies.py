"""Instances of every model that are valid in one revision, built from the annotations that the codec reads.

`build(cls, revision, Fixed(full=False))` sets only the required fields, `Fixed(full=True)` sets all fields, and
`Drawn(draw)` lets Hypothesis choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from hypothesis import strategies as st

from trio_mcp.core import Absent, MalformedContent, Model, Revision, UnknownContent, content, forms, models

BASES = {"Model", "Named", "Described", "CacheableResult", "RetryParams"}
MODELS: list[type[Model]] = [
    each
    for module in (content, forms, models)
    for name in module.__all__
    if isinstance(each := getattr(module, name), type) and issubclass(each, Model) and name not in BASES
]

TEXT = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
SCALARS: dict[Any, tuple[st.SearchStrategy[Any], Any]] = {
    str: (TEXT, "text"),
    int: (st.integers(0, 10**6), 7),
    float: (st.floats(0, 1) | st.integers(0, 1), 0.5),
    bool: (st.booleans(), False),
    bytes: (st.binary(max_size=8), b"\x00\xffdata"),
    Any: (JSON, {"any": [None, True, 0.5]}),
}
# Values for fields that have a wider type than the protocol allows.
OBJECT_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
BY_NAME: dict[str, Any] = {
    "uri": "file:///a/b",
    "src": "https://example.com/icon.png",
    "ElicitUrlParams.url": "https://example.com/form",
    "website_url": "https://example.com",
    "uri_template": "file:///{path}",
    "last_modified": "2025-01-12T15:00:58Z",
    "input_schema": OBJECT_SCHEMA,
    "output_schema": OBJECT_SCHEMA,
}


class Fixed:
    def __init__(self, *, full: bool) -> None:
        self.full = full

    def wanted(self) -> Any:
        return self.full

    def scalar(self, kind: Any) -> Any:
        return SCALARS[kind][1]

    def one(self, options: Sequence[Any]) -> Any:
        return options[0]

    def several(self, options: Sequence[Any]) -> Any:
        return options if self.full else ()


@attrs.frozen
class Drawn:
    draw: Any

    def wanted(self) -> Any:
        return self.draw(st.booleans())

    def scalar(self, kind: Any) -> Any:
        return self.draw(SCALARS[kind][0])

    def one(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(options))

    def several(self, options: Sequence[Any]) -> Any:
        return self.draw(st.lists(st.sampled_from(options), max_size=2))


Choose = Fixed | Drawn


def exists(cls: type[Model], revision: Revision) -> bool:
    return cls.SINCE <= revision.name <= cls.UNTIL


def known(field: attrs.Attribute[Any], revision: Revision) -> bool:
    return bool(field.metadata.get("since", "") <= revision.name <= field.metadata.get("until", "9"))


def build(cls: type[Model], revision: Revision, choose: Choose) -> Any:
    fields = attrs.fields(attrs.resolve_types(cls))[1:]
    needed = {"request_state"} if cls is models.InputRequiredResult else set()
    if revision.name == "2025-11-25":
        needed.add("elicitation_id")
    return cls(
        **{
            field.alias: BY_NAME.get(field.alias)
            or BY_NAME.get(f"{cls.__name__}.{field.alias}")
            or value(cls, field, revision, choose)
            for field in fields
            if known(field, revision) and (field.default is attrs.NOTHING or field.name in needed or choose.wanted())
        }
    )


def value(cls: type[Model], field: attrs.Attribute[Any], revision: Revision, choose: Choose) -> Any:
    if field.alias == "structured_content" and revision.name < "2026-07-28":
        return {"a": choose.scalar(Any)}
    options = alternatives(field.type, revision)
    if cls in (models.SamplingMessage, models.CreateMessageResult) and revision.name < "2025-11-25":
        options = [option for option in options if get_origin(option) is not Sequence]
    return make(options, revision, choose)


def alternatives(annotation: Any, revision: Revision) -> list[Any]:
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if annotation == forms.ElicitValue and revision.name == "2025-06-18":
        members = (str, int, float, bool)
    return [
        member
        for member in members
        if member not in (MalformedContent, UnknownContent, Absent, type(None))
        and not (isinstance(member, type) and issubclass(member, Model) and not exists(member, revision))
    ]


def make(options: Sequence[Any], revision: Revision, choose: Choose) -> Any:
    annotation = choose.one(options)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return choose.one(args)
    if origin is Sequence:
        return [make([option], revision, choose) for option in choose.several(alternatives(args[0], revision))]
    if origin is Mapping:
        inside = choose.several(alternatives(args[1], revision))
        return {f"key{index}": make([option], revision, choose) for index, option in enumerate(inside)}
    if annotation in SCALARS:
        return choose.scalar(annotation)
    return build(annotation, revision, choose)


def one_of(shape: Any, revision: Revision, choose: Choose) -> Any:
    """An instance of a class, or of one class of a union."""
    return make(alternatives(shape, revision), revision, choose)


def instances(revision: Revision) -> st.SearchStrategy[Model]:
    @st.composite
    def drawn(draw: Any) -> Any:
        return build(draw(st.sampled_from([cls for cls in MODELS if exists(cls, revision)])), revision, Drawn(draw))

    return drawn()


def without_raw_data(value: Any) -> Any:
    """The same value without the raw data that the peer sent, so that only modelled fields are left."""
    if isinstance(value, Model):
        return type(value)(
            **{field.alias: without_raw_data(getattr(value, field.name)) for field in attrs.fields(type(value))[1:]}
        )
    if isinstance(value, Mapping):
        return {key: without_raw_data(held) for key, held in value.items()}
    if isinstance(value, list):
        return [without_raw_data(held) for held in value]
    return value
