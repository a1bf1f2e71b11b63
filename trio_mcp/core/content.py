"""What every object of the protocol has in common, and the content they carry.

Here stand the base class, the mark that says in which revisions a field or a class exists, the two stand-ins for what
could not be read, and everything that is shown to people or models: text, pictures, sound, resources, icons.

Conventions, for all models:

- None means absent.  Where the protocol gives null a meaning of its own, a property beside the field tells.
- Binary data is `bytes`; base64 exists on the wire only.
- What a peer sent keeps its original mapping in `raw`, so that no field is lost on us; what we built has None there.
- A list that came from a peer may hold `MalformedContent` where an element could not be read; `well_formed` leaves
those out.
- What we build is checked where the protocol draws a line that types cannot; what a peer built is delivered as it came.

Nothing here knows how an object is written on the wire: that is the codec's business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.jsonrpc import ABSENT, Absent, Json
from trio_mcp.core.records import record
from trio_mcp.core.revisions import REVISIONS

if TYPE_CHECKING:
    from attrs import frozen as model
else:
    # `Model` has one `==` and one repr for all: generated ones would double the time it takes to import the classes.
    model = functools.partial(attrs.frozen, eq=False, repr=False)

__all__ = [
    "V2024_11",
    "V2025_03",
    "V2025_06",
    "V2025_11",
    "V2026_07",
    "VITAL",
    "Annotations",
    "AudioContent",
    "BlobResourceContents",
    "ContentBlock",
    "Described",
    "EmbeddedResource",
    "Icon",
    "ImageContent",
    "MalformedContent",
    "Meta",
    "Model",
    "Named",
    "Resource",
    "ResourceContents",
    "ResourceLink",
    "SamplingContent",
    "Speaker",
    "TextContent",
    "TextResourceContents",
    "ToolOutcome",
    "ToolResultContent",
    "ToolUseContent",
    "UnknownContent",
    "model",
    "ours",
    "share",
    "since",
    "until",
    "well_formed",
]  # fmt: skip

V2024_11, V2025_03, V2025_06, V2025_11, V2026_07 = REVISIONS  # their names, oldest first
T = TypeVar("T")
Marks: TypeAlias = Mapping[str, str | None]
Meta: TypeAlias = Mapping[str, Json]
Speaker: TypeAlias = Literal["user", "assistant"]

# What a field's metadata may say.  Without a mark it is in every revision.  Towards a revision that does not know it, a
# field is left out: it decorates.  A field that is VITAL is refused there, as the message would mean something else.
VITAL: dict[str, Any] = {"vital": True}


def since(revision: str) -> dict[str, Any]:
    return {"since": revision}


def until(revision: str) -> dict[str, Any]:
    return {"until": revision}


def ours(must: str, check: Callable[[Any], bool]) -> Callable[[Model, attrs.Attribute[Any], Any], None]:
    """A validator for what we build."""

    def validate(instance: Model, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and instance.raw is None and not check(value):
            raise UsageError(f"{type(instance).__name__}.{attribute.name} must be {must}")

    return validate


share = ours("between 0 and 1", lambda value: 0 <= value <= 1)


@model
class Model:
    """The base of all.  Frozen, compared by value (`raw` apart), and, as it may hold dicts and lists, not hashable."""

    SINCE: ClassVar[str] = V2024_11
    UNTIL: ClassVar[str] = V2026_07
    MARKS: ClassVar[Marks] = {}

    raw: Mapping[str, Json] | None = attrs.field(default=None, kw_only=True, eq=False)

    def __init_subclass__(
        cls, *, since: str | None = None, until: str | None = None, has: str | None = None, **marks: str
    ) -> None:
        """The revisions that know the class, and what tells it from others in its place: members with one value
        (`type="text"`), or the one that `has` to be there."""
        cls.SINCE = since or cls.SINCE
        cls.UNTIL = until or cls.UNTIL
        cls.MARKS = {**cls.MARKS, **marks, **({has: None} if has else {})}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        # All but `raw`, which is the first.
        return all(getattr(self, field.name) == getattr(other, field.name) for field in attrs.fields(type(self))[1:])

    def __repr__(self) -> str:
        fields = attrs.fields(type(self))[1:]
        # None is absent; where absent is `ABSENT`, None is a null.
        held = [(field.alias, getattr(self, field.name), field.default is ABSENT) for field in fields]
        shown = [f"{name}={_shown(value)}" for name, value, null in held if value is not (ABSENT if null else None)]
        return f"{type(self).__name__}({', '.join(shown)})"


def _shown(value: object) -> str:
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else repr(value)  # a picture would fill the log


@record
class UnknownContent:
    """A kind of content, form field or question that we do not know.  It is kept as it is, and can be sent on."""

    raw: Mapping[str, Json]


@record
class MalformedContent:
    """An element that is not what the protocol says, in the place where it stood; `why` says where and what."""

    raw: Json
    why: str


def well_formed(items: Iterable[T | MalformedContent]) -> list[T]:
    """The elements that could be read."""
    return [item for item in items if not isinstance(item, MalformedContent)]


@model
class Annotations(Model):
    audience: Sequence[Speaker] | None = None
    priority: float | None = attrs.field(default=None, validator=share)
    last_modified: str | None = attrs.field(default=None, metadata=since(V2025_06))  # ISO 8601


@model
class Icon(Model, since=V2025_11):
    """An icon of ours is https: or data:.  A peer's may be anything: judge `src` before fetching it."""

    src: str = attrs.field(
        validator=ours("an https: or data: URI", lambda src: src.lower().startswith(("https:", "data:")))
    )
    mime_type: str | None = None
    sizes: Sequence[str] | None = None  # "48x48" or "any"; None: usable at any size
    theme: Literal["light", "dark"] | None = None


@model
class Named(Model):
    name: str
    title: str | None = attrs.field(default=None, kw_only=True, metadata=since(V2025_06))

    @property
    def display_name(self) -> str:
        """What to show people; `name` is for programs."""
        return self.title or self.name


@model
class Described(Named):
    """What servers list."""

    description: str | None = attrs.field(default=None, kw_only=True)
    icons: Sequence[Icon | MalformedContent] | None = attrs.field(default=None, kw_only=True, metadata=since(V2025_11))
    meta: Meta | None = attrs.field(default=None, kw_only=True, metadata=since(V2025_06))


@model
class Resource(Described):
    uri: str
    mime_type: str | None = None
    size: int | None = None
    annotations: Annotations | None = None


@model
class _ContentsBase(Model):
    uri: str
    mime_type: str | None = attrs.field(default=None, kw_only=True)
    meta: Meta | None = attrs.field(default=None, kw_only=True, metadata=since(V2025_06))


@model
class TextResourceContents(_ContentsBase, has="text"):
    text: str


@model
class BlobResourceContents(_ContentsBase, has="blob"):
    blob: bytes


ResourceContents: TypeAlias = TextResourceContents | BlobResourceContents


@model
class _AnnotatedContent(Model):
    annotations: Annotations | None = attrs.field(default=None, kw_only=True)
    meta: Meta | None = attrs.field(default=None, kw_only=True, metadata=since(V2025_06))


@model
class TextContent(_AnnotatedContent, type="text"):
    text: str


@model
class ImageContent(_AnnotatedContent, type="image"):
    data: bytes
    mime_type: str


@model
class AudioContent(_AnnotatedContent, since=V2025_03, type="audio"):
    data: bytes
    mime_type: str


@model
class EmbeddedResource(_AnnotatedContent, type="resource"):
    resource: ResourceContents


@model
class ResourceLink(Resource, since=V2025_06, type="resource_link"):
    """A resource by its address; it need not be in any list."""


ContentBlock: TypeAlias = TextContent | ImageContent | AudioContent | ResourceLink | EmbeddedResource | UnknownContent


@model
class ToolUseContent(Model, since=V2025_11, type="tool_use"):
    id: str
    name: str
    input: Mapping[str, Json]
    meta: Meta | None = None


class ToolOutcome:
    """What a tool gave, as it is read.  The fields beneath keep what was said apart from what was not, for the wire."""

    __slots__ = ()

    if TYPE_CHECKING:  # each model has them as fields, in its own order
        _structured_content: Json | Absent
        _is_error: bool | None

    @property
    def structured_content(self) -> Json:
        """The structured value; None if there is none.  It may be null, which `has_structured_content` tells apart."""
        return None if self._structured_content is ABSENT else self._structured_content

    @property
    def has_structured_content(self) -> bool:
        return self._structured_content is not ABSENT

    @property
    def is_error(self) -> bool:
        """Whether the tool has failed; what it says then is for the model."""
        return self._is_error is True


@model
class ToolResultContent(Model, ToolOutcome, since=V2025_11, type="tool_result"):
    tool_use_id: str
    content: Sequence[ContentBlock | MalformedContent]
    _structured_content: Json | Absent = attrs.field(default=ABSENT, alias="structured_content")
    _is_error: bool | None = attrs.field(default=None, alias="is_error")
    meta: Meta | None = None


SamplingContent: TypeAlias = (
    TextContent | ImageContent | AudioContent | ToolUseContent | ToolResultContent | UnknownContent
)
