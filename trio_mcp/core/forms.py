"""Elicitation: the forms that a server asks a user to fill in, the pages that it asks a user to visit, and the answers.

A form is a flat JSON Schema of a few primitive kinds, with one class for each kind.  A choice has many shapes on the
wire, with one class for each shape; all of them have `choices`: the pairs of value and title to show.

The package `schema` validates an answer against its form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal, TypeAlias

import attrs

from trio_mcp.core.content import V2025_06, V2025_11, MalformedContent, Meta, Model, UnknownContent, model, since, until

__all__ = [
    "BooleanSchema", "ElicitFormParams", "ElicitParams", "ElicitResult", "ElicitUrlParams", "ElicitValue",
    "EnumItems", "EnumOption", "EnumSchema", "FieldSchema", "IntegerSchema",
    "MultiSelectSchema", "NumberSchema", "RequestedSchema", "StringSchema", "TitledEnumItems", "TitledEnumSchema",
]  # fmt: skip

Choices: TypeAlias = list[tuple[str, str]]
ElicitValue: TypeAlias = str | int | float | bool | Sequence[str]


@model
class _FormField(Model, since=V2025_06):
    """The members that all form fields share."""

    title: str | None = attrs.field(default=None, kw_only=True)
    description: str | None = attrs.field(default=None, kw_only=True)


@model
class StringSchema(_FormField, type="string"):
    """A form field for text."""

    format: Literal["email", "uri", "date", "date-time"] | None = None
    min_length: int | None = None
    max_length: int | None = None
    default: str | None = attrs.field(default=None, metadata=since(V2025_11))


@model
class NumberSchema(_FormField, type="number"):
    """A form field for a number."""

    minimum: float | None = None
    maximum: float | None = None
    default: float | None = attrs.field(default=None, metadata=since(V2025_11))


@model
class IntegerSchema(NumberSchema, type="integer"):
    """A form field for a whole number."""


@model
class BooleanSchema(_FormField, type="boolean"):
    """A form field for yes or no."""

    default: bool | None = None


@model
class EnumSchema(_FormField, type="string", has="enum"):
    """A form field to choose one of several strings.

    `enum_names` are titles by position: the only way before 2025-11-25, and legal since.
    """

    enum: Sequence[str]
    enum_names: Sequence[str] | None = None
    default: str | None = attrs.field(default=None, metadata=since(V2025_11))

    @property
    def choices(self) -> Choices:
        """The pairs of value and title to show."""
        titled = zip_longest(self.enum, (self.enum_names or ())[: len(self.enum)])
        return [(value, title or value) for value, title in titled]


@model
class EnumOption(Model, since=V2025_11):
    """One choice: the value `const` and the `title` to show for it."""

    const: str
    title: str


@model
class TitledEnumSchema(_FormField, since=V2025_11, type="string", has="oneOf"):
    """A form field to choose one of several strings, each with a title.  2025-06-18 gets it as an `EnumSchema`."""

    one_of: Sequence[EnumOption]
    default: str | None = attrs.field(default=None, metadata=since(V2025_11))

    @property
    def choices(self) -> Choices:
        """The pairs of value and title to show."""
        return [(option.const, option.title) for option in self.one_of]


@model
class EnumItems(Model, since=V2025_11, type="string", has="enum"):
    """The values that a `MultiSelectSchema` offers, without titles."""

    enum: Sequence[str]

    @property
    def choices(self) -> Choices:
        """The pairs of value and title to show."""
        return [(value, value) for value in self.enum]


@model
class TitledEnumItems(Model, since=V2025_11, has="anyOf"):
    """The values that a `MultiSelectSchema` offers, each with a title."""

    any_of: Sequence[EnumOption]

    @property
    def choices(self) -> Choices:
        """The pairs of value and title to show."""
        return [(option.const, option.title) for option in self.any_of]


@model
class MultiSelectSchema(_FormField, since=V2025_11, type="array"):
    """A form field to choose several strings: at least `min_items`, at most `max_items`."""

    items: EnumItems | TitledEnumItems
    min_items: int | None = None
    max_items: int | None = None
    default: Sequence[str] | None = None

    @property
    def choices(self) -> Choices:
        """The pairs of value and title to show."""
        return self.items.choices


# The choices come first: they have the mark of a string field and one more.
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
    """A form: its fields by name, and the names of the required ones."""

    properties: Mapping[str, FieldSchema | MalformedContent]
    required: Sequence[str] | None = None


@model
class _ElicitBase(Model):
    """The members that both kinds of elicitation share."""

    message: str
    # In 2026-07-28 an elicitation is part of a result, not a request, and has no metadata.
    meta: Meta | None = attrs.field(default=None, kw_only=True, metadata=until(V2025_11))


@model
class ElicitFormParams(_ElicitBase, since=V2025_06):
    """Parameters of `elicitation/create`: ask the user to fill in a form."""

    requested_schema: RequestedSchema
    mode: Literal["form"] | None = attrs.field(default=None, metadata=since(V2025_11))  # elic-14: may be left out


@model
class ElicitUrlParams(_ElicitBase, since=V2025_11, mode="url"):
    """Parameters of `elicitation/create`: ask the user to visit a page."""

    url: str
    elicitation_id: str | None = attrs.field(default=None, metadata=until(V2025_11))  # elic-18, elic-19: required there


ElicitParams: TypeAlias = ElicitUrlParams | ElicitFormParams


@model
class ElicitResult(Model, since=V2025_06, has="action"):
    """The user's answer to an elicitation; `content` holds the values of an accepted form."""

    action: Literal["accept", "decline", "cancel"]
    content: Mapping[str, ElicitValue] | None = None
    meta: Meta | None = attrs.field(default=None, kw_only=True, metadata=until(V2025_11))
