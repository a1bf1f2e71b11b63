"""The base class of all protocol objects, and the content that they carry.

This module owns the base class `Model`, the marks that say in which revisions a field or a class exists, the two
classes for data that could not be read (`UnknownContent`, `MalformedContent`), and all content that people or models
see: text, images, sound, resources, icons.

Conventions, for all models:

- None means absent.  If null has another meaning in the protocol, a property tells the two apart.
- Binary data is `bytes`; base64 exists on the wire only.
- An object from a peer keeps its original mapping in `raw`, so no field is lost.  An object that the program built has
  None there.
- A list from a peer may hold `MalformedContent` where an element could not be read; `well_formed` leaves those out.
- Limits that types cannot express, such as numbers between 0 and 1, are checked only in objects that the program
  builds.

The codec knows how an object is written on the wire; this module does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import ABSENT, Absent, Json, record
from trio_mcp.core.revisions import REVISIONS

if TYPE_CHECKING:
    from attrs import frozen as model
else:
    # All models share the `==` and the repr of `Model`: generated ones would double the import time of the classes.
    model = functools.partial(attrs.frozen, eq=False, repr=False)

__all__ = [
    "V2024_11", "V2025_03", "V2025_06", "V2025_11", "V2026_07", "VITAL", "Annotations", "AudioContent",
    "BlobResourceContents", "ContentBlock", "Described", "EmbeddedResource", "Icon", "ImageContent", "MalformedContent",
    "Meta", "Model", "Named", "Resource", "ResourceContents", "ResourceLink", "SamplingContent", "Speaker",
    "TextContent", "TextResourceContents", "ToolOutcome", "ToolResultContent", "ToolUseContent", "UnknownContent",
    "checked", "fraction", "model", "since", "until", "well_formed",
]  # fmt: skip

V2024_11, V2025_03, V2025_06, V2025_11, V2026_07 = REVISIONS  # the names of the revisions, oldest first
T = TypeVar("T")
Marks: TypeAlias = Mapping[str, str | None]
Meta: TypeAlias = Mapping[str, Json]
Speaker: TypeAlias = Literal["user", "assistant"]

# The marks that a field's metadata may carry.  A field without a mark is in every revision.  The codec leaves a field
# out when it writes for a revision that does not know it.  It refuses to write a VITAL field there, because without the
# field the message would have another meaning.
VITAL: dict[str, Any] = {"vital": True}


def since(revision: str) -> dict[str, Any]:
    """Mark a field that exists from `revision` on."""
    return {"since": revision}


def until(revision: str) -> dict[str, Any]:
    """Mark a field that exists up to `revision`."""
    return {"until": revision}


def checked(must: str, check: Callable[[Any], bool]) -> Callable[[Model, attrs.Attribute[Any], Any], None]:
    """Return a validator for objects that the program builds; it leaves objects from a peer alone."""

    def validate(instance: Model, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and instance.raw is None and not check(value):
            raise UsageError(f"{type(instance).__name__}.{attribute.name} must be {must}")

    return validate


fraction = checked("between 0 and 1", lambda value: 0 <= value <= 1)


@model
class Model:
    """The base class of all protocol objects: frozen, and compared by value.

    `raw` is the mapping that the peer sent, or None if the program built the object; comparison ignores it.  Models are
    not hashable, because they may hold dicts and lists.
    """

    SINCE: ClassVar[str] = V2024_11
    UNTIL: ClassVar[str] = V2026_07
    MARKS: ClassVar[Marks] = {}

    raw: Mapping[str, Json] | None = attrs.field(default=None, kw_only=True, eq=False)

    def __init_subclass__(
        cls, *, since: str | None = None, until: str | None = None, has: str | None = None, **marks: str
    ) -> None:
        """Set the first and last revision of the class, and the members that identify it among other classes.

        Such a member has a fixed value (`type="text"`), or it only has to be there (`has="text"`).
        """
        cls.SINCE = since or cls.SINCE
        cls.UNTIL = until or cls.UNTIL
        cls.MARKS = {**cls.MARKS, **marks, **({has: None} if has else {})}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        # All fields except `raw`, which is the first.
        return all(getattr(self, field.name) == getattr(other, field.name) for field in attrs.fields(type(self))[1:])

    def __repr__(self) -> str:
        fields = attrs.fields(type(self))[1:]
        # None means absent; in a field with the default `ABSENT`, None means null.
        values = [(field.alias, getattr(self, field.name), field.default is ABSENT) for field in fields]
        shown = [f"{name}={_shown(value)}" for name, value, null in values if value is not (ABSENT if null else None)]
        return f"{type(self).__name__}({', '.join(shown)})"


def _shown(value: object) -> str:
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else repr(value)  # an image would fill the log


@record
class UnknownContent:
    """Content, a form field or an input request of a kind that trio_mcp does not know; `raw` can be sent on."""

    raw: Mapping[str, Json]


@record
class MalformedContent:
    """An element that breaks the protocol, at its place in the list; `why` names the fault and where it is."""

    raw: Json
    why: str


def well_formed(items: Iterable[T | MalformedContent]) -> list[T]:
    """Return the elements that could be read."""
    return [item for item in items if not isinstance(item, MalformedContent)]


@model
class Annotations(Model):
    """Hints for showing content: its audience, its priority (0 to 1), and its last change."""

    audience: Sequence[Speaker] | None = None
    priority: float | None = attrs.field(default=None, validator=fraction)
    last_modified: str | None = attrs.field(default=None, metadata=since(V2025_06))  # ISO 8601


@model
class Icon(Model, since=V2025_11):
    """An icon to show beside a name.

    `src` must be an https: or data: URI in an icon that the program builds.  A peer can send any `src`: check it before
    you fetch it.
    """

    src: str = attrs.field(
        validator=checked("an https: or data: URI", lambda src: src.lower().startswith(("https:", "data:")))
    )
    mime_type: str | None = None
    sizes: Sequence[str] | None = None  # "48x48" or "any"; None: usable at any size
    theme: Literal["light", "dark"] | None = None


@model
class Named(Model):
    """The base of the objects that have a `name` for programs and a `title` for people."""

    name: str
    title: str | None = attrs.field(default=None, kw_only=True, metadata=since(V2025_06))

    @property
    def display_name(self) -> str:
        """The title if there is one, otherwise the name."""
        return self.title or self.name


@model
class Described(Named):
    """The base of the objects that a server lists: tools, prompts, resources and resource templates."""

    description: str | None = attrs.field(default=None, kw_only=True)
    icons: Sequence[Icon | MalformedContent] | None = attrs.field(default=None, kw_only=True, metadata=since(V2025_11))
    meta: Meta | None = attrs.field(default=None, kw_only=True, metadata=since(V2025_06))


@model
class Resource(Described):
    """A resource that a server lists: its URI, its name, and facts about it.  `resources/read` gives its contents."""

    uri: str
    mime_type: str | None = None
    size: int | None = None
    annotations: Annotations | None = None


@model
class _ContentsBase(Model):
    """The members that text and binary resource contents share."""

    uri: str
    mime_type: str | None = attrs.field(default=None, kw_only=True)
    meta: Meta | None = attrs.field(default=None, kw_only=True, metadata=since(V2025_06))


@model
class TextResourceContents(_ContentsBase, has="text"):
    """The contents of a resource that is text."""

    text: str


@model
class BlobResourceContents(_ContentsBase, has="blob"):
    """The contents of a resource that is binary data."""

    blob: bytes


ResourceContents: TypeAlias = TextResourceContents | BlobResourceContents


@model
class _AnnotatedContent(Model):
    """The members that most content blocks share."""

    annotations: Annotations | None = attrs.field(default=None, kw_only=True)
    meta: Meta | None = attrs.field(default=None, kw_only=True, metadata=since(V2025_06))


@model
class TextContent(_AnnotatedContent, type="text"):
    """A content block with text."""

    text: str


@model
class ImageContent(_AnnotatedContent, type="image"):
    """A content block with an image, as the bytes of the file."""

    data: bytes
    mime_type: str


@model
class AudioContent(_AnnotatedContent, since=V2025_03, type="audio"):
    """A content block with sound, as the bytes of the file."""

    data: bytes
    mime_type: str


@model
class EmbeddedResource(_AnnotatedContent, type="resource"):
    """A content block that holds a resource with its contents."""

    resource: ResourceContents


@model
class ResourceLink(Resource, since=V2025_06, type="resource_link"):
    """A content block that points to a resource by its URI; the resource need not be in a list of the server."""


ContentBlock: TypeAlias = TextContent | ImageContent | AudioContent | ResourceLink | EmbeddedResource | UnknownContent


@model
class ToolUseContent(Model, since=V2025_11, type="tool_use"):
    """A model asks, in a sampled message, to call the tool `name` with the arguments `input`."""

    id: str
    name: str
    input: Mapping[str, Json]
    meta: Meta | None = None


class ToolOutcome:
    """Properties to read the result of a tool.

    The private fields behind them also record whether a member was there at all, as it has to be written again.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # each model has these as fields, in its own order
        _structured_content: Json | Absent
        _is_error: bool | None

    @property
    def structured_content(self) -> Json:
        """The structured value, or None if it is absent or null; see `has_structured_content`."""
        return None if self._structured_content is ABSENT else self._structured_content

    @property
    def has_structured_content(self) -> bool:
        """True if the result has a structured value, even if that is null."""
        return self._structured_content is not ABSENT

    @property
    def is_error(self) -> bool:
        """Whether the tool has failed; the content then tells the model why."""
        return self._is_error is True


@model
class ToolResultContent(Model, ToolOutcome, since=V2025_11, type="tool_result"):
    """The result of a `ToolUseContent`, which `tool_use_id` names."""

    tool_use_id: str
    content: Sequence[ContentBlock | MalformedContent]
    _structured_content: Json | Absent = attrs.field(default=ABSENT, alias="structured_content")
    _is_error: bool | None = attrs.field(default=None, alias="is_error")
    meta: Meta | None = None


SamplingContent: TypeAlias = (
    TextContent | ImageContent | AudioContent | ToolUseContent | ToolResultContent | UnknownContent
)
