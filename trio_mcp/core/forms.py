"""Elicitation: the forms a server asks a user to fill in, the pages it asks them to visit, and the answers.

A form is a flat JSON Schema of a few primitive kinds, one class for each.  A choice has many shapes on the wire; here
each shape is a class too, and all of them say `choices`: the pairs of value and title to show.

Validating an answer against its form is the business of `schema`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal, TypeAlias

import attrs

from trio_mcp.core.content import V2025_06, V2025_11, MalformedContent, Meta, Model, UnknownContent, model, since, until

__all__ = [
    "BooleanSchema", "ElicitFormParams", "ElicitParams", "ElicitResult", "ElicitUrlParams", "ElicitValue",
    "ElicitationCompleteParams", "EnumItems", "EnumOption", "EnumSchema", "FieldSchema", "IntegerSchema",
    "MultiSelectSchema", "NumberSchema", "RequestedSchema", "StringSchema", "TitledEnumItems", "TitledEnumSchema",
]  # fmt: skip

Choices: TypeAlias = list[tuple[str, str]]
ElicitValue: TypeAlias = str | int | float | bool | Sequence[str]


@model
class _FormField(Model, since=V2025_06):
    title: str | None = attrs.field(default=None, kw_only=True)
    description: str | None = attrs.field(default=None, kw_only=True)


@model
class StringSchema(_FormField, type="string"):
    format: Literal["email", "uri", "date", "date-time"] | None = None
    min_length: int | None = None
    max_length: int | None = None
    default: str | None = attrs.field(default=None, metadata=since(V2025_11))


@model
class NumberSchema(_FormField, type="number"):
    minimum: float | None = None
    maximum: float | None = None
    default: float | None = attrs.field(default=None, metadata=since(V2025_11))


@model
class IntegerSchema(NumberSchema, type="integer"):
    """A number without a fraction."""


@model
class BooleanSchema(_FormField, type="boolean"):
    default: bool | None = None


@model
class EnumSchema(_FormField, type="string", has="enum"):
    """One of some strings.  `enum_names` are titles by position: the only way before 2025-11-25, and legal since."""

    enum: Sequence[str]
    enum_names: Sequence[str] | None = None
    default: str | None = attrs.field(default=None, metadata=since(V2025_11))

    @property
    def choices(self) -> Choices:
        named = zip_longest(self.enum, (self.enum_names or ())[: len(self.enum)])
        return [(value, title or value) for value, title in named]


@model
class EnumOption(Model, since=V2025_11):
    const: str
    title: str


@model
class TitledEnumSchema(_FormField, since=V2025_11, type="string", has="oneOf"):
    """One of some strings, each with a title.  2025-06-18 gets it as an `EnumSchema`."""

    one_of: Sequence[EnumOption]
    default: str | None = attrs.field(default=None, metadata=since(V2025_11))

    @property
    def choices(self) -> Choices:
        return [(option.const, option.title) for option in self.one_of]


@model
class EnumItems(Model, since=V2025_11, type="string", has="enum"):
    enum: Sequence[str]

    @property
    def choices(self) -> Choices:
        return [(value, value) for value in self.enum]


@model
class TitledEnumItems(Model, since=V2025_11, has="anyOf"):
    any_of: Sequence[EnumOption]

    @property
    def choices(self) -> Choices:
        return [(option.const, option.title) for option in self.any_of]


@model
class MultiSelectSchema(_FormField, since=V2025_11, type="array"):
    """Any of some strings, between `min_items` and `max_items` of them."""

    items: EnumItems | TitledEnumItems
    min_items: int | None = None
    max_items: int | None = None
    default: Sequence[str] | None = None

    @property
    def choices(self) -> Choices:
        return self.items.choices


# The choices stand first: they are strings with one mark more.
FieldSchema: TypeAlias = (
    EnumSchema
    | TitledEnumSchema
    | StringSchema
    | IntegerSchema
    | NumberSchema
    | BooleanSchema
    | MultiSelectSchema
    | UnknownContent
)


@model
class RequestedSchema(Model, since=V2025_06, type="object"):
    properties: Mapping[str, FieldSchema | MalformedContent]
    required: Sequence[str] | None = None


@model
class _ElicitBase(Model):
    message: str
    # An input request of 2026-07-28 is no request of its own, and has no metadata.
    meta: Meta | None = attrs.field(default=None, kw_only=True, metadata=until(V2025_11))


@model
class ElicitFormParams(_ElicitBase, since=V2025_06):
    requested_schema: RequestedSchema
    mode: Literal["form"] | None = attrs.field(default=None, metadata=since(V2025_11))  # elic-14: may be left out


@model
class ElicitUrlParams(_ElicitBase, since=V2025_11, mode="url"):
    url: str
    elicitation_id: str | None = attrs.field(default=None, metadata=until(V2025_11))  # elic-18, elic-19: required there


ElicitParams: TypeAlias = ElicitUrlParams | ElicitFormParams


@model
class ElicitResult(Model, since=V2025_06, has="action"):
    action: Literal["accept", "decline", "cancel"]
    content: Mapping[str, ElicitValue] | None = None
    meta: Meta | None = attrs.field(default=None, kw_only=True, metadata=until(V2025_11))


@model
class ElicitationCompleteParams(Model, since=V2025_11, until=V2025_11):
    elicitation_id: str
    meta: Meta | None = attrs.field(default=None, kw_only=True)
