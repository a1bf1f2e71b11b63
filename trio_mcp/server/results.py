"""What handlers return becomes results: JSON objects, as the revision of the request has them.

| A tool returns | and the result has |
|---|---|
| nothing | no content |
| text | a block of text |
| bytes | an embedded resource, `application/octet-stream` |
| content blocks, or a list that has some | these; text among them becomes a block, too |
| `CallToolResult` | what it says |
| anything else | its JSON as text, and as structured content if the tool has an output schema |

Structured content leaves only after it was judged by the output schema; what breaks it, or cannot be written at all, is
the server's own fault, `BadResult`.  So is an object of the protocol that was built of wrong things, since types are
only checked where somebody runs a type checker.  What the revision does not know at all is `NotInThisRevision`.

What surprises: a list of nothing but text is data, `["a", "b"]`, and no content.  A tool with an output schema has the
JSON as its text even where that is a string, in quotes: both say the same.  An empty list that a resource returns is
data as well, `[]`, and no missing resource: for that there is `ResourceNotFound`.

Where structured content had to be an object (2025-06-18, 2025-11-25), data whose schema does not begin with
`"type": "object"` stands in one, `{"result": ...}`, and so does its schema: as the official SDKs have it, whose clients
look for it there.  That goes by the schema and not by the value: of `Forecast | None` the forecasts are in it, too.

The models cost 20 ms to import, and jsonschema_rs as much: who returns text never needs them.  So they are imported
where they are used, and whether a value is a model is asked only where some model has been made.
"""

from __future__ import annotations

import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trio_mcp.core.errors import (
    McpError,
    NotInThisRevision,
    RemoteProtocolError,
    UsageError,
    shown,
)
from trio_mcp.core.json_text import to_readable
from trio_mcp.core.jsonrpc import ABSENT, Json, JsonObject
from trio_mcp.core.revisions import LATEST, REVISIONS, Revision

if TYPE_CHECKING:
    from trio_mcp.core.content import Annotations, AudioContent, ContentBlock, EmbeddedResource, ImageContent
    from trio_mcp.core.schema.validation import CompiledSchema
    from trio_mcp.server.questions import Inquiry

__all__ = [
    "BadResult",
    "InputRequired",
    "OutputSchema",
    "ToolError",
    "audio",
    "completion_result",
    "file",
    "image",
    "prompt_result",
    "resource_result",
    "tool_failure",
    "tool_result",
]

_2024_11, _2025_03, _2025_06, _2025_11, _2026_07 = REVISIONS  # their names, oldest first


# What handlers raise, and return instead of a result.


class ToolError(McpError):
    """Raised by a tool to tell the model what went wrong: `content` is text, or a list of content blocks and text.

    Where it is raised for a resource, a prompt or a completion, which have no such results, the client gets its text as
    the message of an error.
    """

    def __init__(self, content: str | Sequence[ContentBlock | str]) -> None:
        if not isinstance(content, str | list | tuple):
            raise UsageError(
                f"a ToolError takes text or a list of content, not {type(content).__name__}; of an exception only its "
                "text, if everybody may read that"
            )
        super().__init__(content)
        self.content = content


class InputRequired:
    """Returned by a handler that wants answers first, and is then run again from the start, with them in `ctx.answers`.

    `state` is JSON, and comes back in `ctx.state`.
    """

    __slots__ = ("questions", "state")

    def __init__(self, questions: Mapping[str, Inquiry[Any]], state: Json = None) -> None:
        self.questions = questions
        self.state = state


class BadResult(McpError):
    """What a handler returned is no result: the server's own fault, for its log.  It quotes no values."""


# Pictures, sound and files.


def image(
    source: bytes | str | os.PathLike[str], *, mime_type: str | None = None, annotations: Annotations | None = None
) -> ImageContent:
    """A picture, from its bytes or its path.  The suffix of a path tells the type; that of bytes has to be given."""
    from trio_mcp.core.content import ImageContent

    return ImageContent(*_media(source, mime_type, "image"), annotations=annotations)


def audio(
    source: bytes | str | os.PathLike[str], *, mime_type: str | None = None, annotations: Annotations | None = None
) -> AudioContent:
    """Sound, from its bytes or its path, as `image`.  2024-11-05 has none."""
    from trio_mcp.core.content import AudioContent

    return AudioContent(*_media(source, mime_type, "audio"), annotations=annotations)


def file(
    source: bytes | str | os.PathLike[str], *, uri: str | None = None, mime_type: str | None = None
) -> EmbeddedResource:
    """A file with its content, from its bytes or its path.  Without `uri` a path is given its file: URI."""
    import pathlib

    from trio_mcp.core.content import BlobResourceContents, EmbeddedResource, TextResourceContents

    data, mime_type = _loaded(source, mime_type)
    if uri is None:
        if isinstance(source, bytes):
            raise UsageError("give the uri of a file that is made of bytes")
        uri = pathlib.Path(source).absolute().as_uri()
    text = _real_text(data, mime_type)
    if text is None:
        return EmbeddedResource(BlobResourceContents(uri, data, mime_type=mime_type))
    return EmbeddedResource(TextResourceContents(uri, text, mime_type=mime_type))


def _media(source: bytes | str | os.PathLike[str], mime_type: str | None, kind: str) -> tuple[bytes, str]:
    data, mime_type = _loaded(source, mime_type)
    if not mime_type.lower().startswith(f"{kind}/"):
        raise UsageError(f"{mime_type} is no type of {kind}; give mime_type={kind + '/...'!r}, or use file()")
    return data, mime_type


def _loaded(source: bytes | str | os.PathLike[str], mime_type: str | None) -> tuple[bytes, str]:
    mime_type = mime_type or (None if isinstance(source, bytes) else _type_of(os.fspath(source)))
    if mime_type is None:
        what = "of bytes" if isinstance(source, bytes) else f"with the suffix {os.path.splitext(source)[1]!r}"
        raise UsageError(f"nobody knows the type of a file {what}; give mime_type")
    if not _is_mime_type(mime_type):
        raise UsageError(f"{mime_type!r} is no MIME type, such as image/png")
    if isinstance(source, bytes):
        return source, mime_type
    with open(source, "rb") as opened:
        return opened.read(), mime_type


# Of what the standard library calls unofficial, or does not know before Python 3.13.
_TYPES = {
    ".flac": "audio/flac",
    ".gz": "application/gzip",
    ".m4a": "audio/mp4",
    ".md": "text/markdown",
    ".ogg": "audio/ogg",
    ".toml": "application/toml",
    ".webp": "image/webp",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
}


def _type_of(path: str) -> str | None:
    import mimetypes

    suffix = os.path.splitext(path)[1].lower()
    # Not `guess_type`, which reads the system's tables: the same file would be another thing elsewhere.
    return _TYPES.get(suffix) or mimetypes.MimeTypes().types_map[True].get(suffix)


_TEXTUAL = frozenset({"application/json", "application/toml", "application/xml", "application/yaml"})
_TEXTUAL |= {"application/javascript", "application/sql", "application/x-sh"}


def _real_text(data: bytes, mime_type: str) -> str | None:
    """res-23: "this must only be set if the item can actually be represented as text"."""
    mime_type = mime_type.lower().partition(";")[0].strip()
    if not (mime_type.startswith("text/") or mime_type.endswith(("+json", "+xml")) or mime_type in _TEXTUAL):
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _is_mime_type(text: object) -> bool:
    import re

    token = r"[\w!#$&^.+-]+"
    return isinstance(text, str) and re.fullmatch(rf"{token}/{token}(\s*;.*)?", text, re.ASCII) is not None


# Models, where there are any.


def _content() -> Any:
    """The module of the content blocks; None where it was never imported, so that there are none."""
    return sys.modules.get("trio_mcp.core.content")


def _models() -> Any:
    return sys.modules.get("trio_mcp.core.models")


def _is_model(value: object) -> bool:
    content = _content()
    return content is not None and isinstance(value, content.Model | content.UnknownContent)


def _is_block(value: object) -> bool:
    return _is_model(value) and isinstance(value, _content().ContentBlock)


def _is_a(value: object, name: str) -> bool:
    models = _models()
    return models is not None and isinstance(value, getattr(models, name))


def _written(value: Any, revision: Revision) -> JsonObject:
    """A model as JSON, in which all is of the types that the protocol says."""
    from trio_mcp.core.codec import from_json, to_json
    from trio_mcp.core.content import ContentBlock, Model

    written: JsonObject = _plain(to_json(value, revision))
    from_json(type(value) if isinstance(value, Model) else ContentBlock, written, strict=True)
    return written


def _plain(value: Any) -> Json:
    """What was written from a model, in nothing but the types of JSON: one may be built of tuples and enums, too."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise UsageError("a key that is no text has no JSON form")
        return {str.__str__(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item) for item in value]
    if not isinstance(value, int | float | None):
        raise UsageError(f"{type(value).__name__} cannot stand in an object of the protocol")
    return _NO_PROMISE(value)


def _text(text: str) -> JsonObject:
    return {"type": "text", "text": str.__str__(text)}  # that of a subclass may be another text


def _block(value: Any, revision: Revision) -> JsonObject:
    """A content block or text."""
    if isinstance(value, str):
        return _text(value)
    if not _is_block(value):
        raise UsageError(f"{type(value).__name__} is no content")
    return _with_type(_written(value, revision))


def _with_type(block: JsonObject) -> JsonObject:
    """A block that was written, with the type of what is embedded in it (prm-07)."""
    _check_block(block)
    if block.get("type") != "resource":
        return block
    contents = block["resource"]
    mime_type = "text/plain" if "text" in contents else "application/octet-stream"
    return {**block, "resource": {"mimeType": mime_type, **contents}}


def _check_block(block: JsonObject) -> None:
    """prm-05, prm-06, prm-07: what is no type or no URI does not leave."""
    kind = block.get("type")
    if kind in ("image", "audio") and not _is_mime_type(block["mimeType"]):
        raise UsageError(f"the mime_type of {kind.capitalize()}Content is none, such as {kind}/...")
    if kind == "resource":
        _check_uri(block["resource"], "a resource")
    if kind == "resource_link":
        _check_uri(block, "a ResourceLink")


def _check_uri(of: JsonObject, what: str) -> None:
    import re

    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", of["uri"]):
        raise UsageError(f"the uri of {what} begins with a scheme, such as file:")


def _blob(data: bytes, uri: str, mime_type: str | None) -> JsonObject:
    import base64

    return {"uri": uri, "mimeType": mime_type or "application/octet-stream", "blob": base64.b64encode(data).decode()}


def _as_text(value: Json) -> str:
    try:
        return to_readable(value)
    except ValueError as error:  # an integer of more digits than Python writes
        raise UsageError(f"it cannot be written as JSON: {error}") from None


def _judged(what: str, make: Callable[..., JsonObject], *arguments: Any) -> JsonObject:
    try:
        return make(*arguments)
    except NotInThisRevision:
        raise  # nothing is wrong with the server, and the client is told
    except (UsageError, RemoteProtocolError) as error:
        raise BadResult(f"{what}: {error}") from error
    except _OF_ODD_VALUES as error:
        raise BadResult(f"{what}: writing it failed with {type(error).__name__}") from error


# What a value can raise that only looks like what it should be, such as an object that lacks one of its attributes.
_OF_ODD_VALUES = (TypeError, ValueError, AttributeError, LookupError, NameError, RecursionError)


# Tools.


class OutputSchema:
    """What a tool promises to return: made once, when it is registered.

    `schema` is its output schema, or None if it promises nothing but content; some revisions have it in a box.
    """

    __slots__ = ("_compiled", "_hint", "_is_object", "_write", "schema")

    def __init__(self, hint: Any = ABSENT, schema: Mapping[str, Json] | None = None) -> None:
        self._hint = hint
        self._compiled: CompiledSchema | None = None
        self._write: Callable[[Any], Json] | None = None
        self.schema: JsonObject | None = _promised(hint) if schema is None else dict(schema)
        # A schema by hand is shown as it was written or not at all: what it refers to may be found from its root only.
        self._is_object = schema is not None or self.schema is None or self.schema.get("type") == "object"
        if schema is not None:  # our own are right
            self._compile()

    def boxed_in(self, revision: Revision) -> bool:
        """Whether all that it promises stands in `{"result": ...}` there (tool-34, tool-36)."""
        return not self._is_object and _2025_06 <= revision.name < _2026_07

    def boxed_schema(self) -> JsonObject:
        assert self.schema is not None  # what promises nothing is in no box
        inside = dict(self.schema)
        # References begin at the root, which is the box now.
        definitions = {"$defs": inside.pop("$defs")} if "$defs" in inside else {}
        return {"type": "object", "properties": {_BOX: inside}, "required": [_BOX], **definitions}

    def __call__(self, value: Any, *, error: bool = False) -> Json:
        """`value` as plain JSON, which keeps the promise; that of an `error` need not."""
        if self._write is None:
            from trio_mcp.core.schema.writing import writer_of

            self._write = writer_of(self._hint)
        written = self._write(value)
        if self.schema is not None and not error and (problems := self._compile().errors(written)):
            raise UsageError(
                "it is not what the output schema promises: "
                + "; ".join(f"{each.path or 'the whole'} {each.message}" for each in problems)
            )
        return written

    def _compile(self) -> CompiledSchema:
        if self._compiled is None:
            from trio_mcp.core.schema.validation import compile_schema

            self._compiled = compile_schema(self.schema)
        return self._compiled


_BOX = "result"


def _promised(hint: Any) -> JsonObject | None:
    alternatives = [each for each in _alternatives(hint) if not _is_result(each)]
    content = [each for each in alternatives if _may_be_content(each)]
    if all(each in content or each in _NO_DATA for each in alternatives) or Any in alternatives:
        return None
    change = "annotate the data that it returns, or give structured=False to have it all as content"
    if content:  # tool-14: what has an output schema always keeps it
        raise UsageError(f"what it returns is content or data, {hint!r}; return CallToolResult, or {change}")
    from trio_mcp.core.schema.schema import schema_of

    try:
        unchanged = len(alternatives) == len(_alternatives(hint))
        data = hint if unchanged else typing.Union[tuple(alternatives)]  # noqa: UP007
        schema = schema_of(data, where="what it returns", mode="serialization")
    except UsageError as error:
        raise UsageError(f"{error}; {change}") from None
    return schema or None


_NO_DATA: tuple[Any, ...] = (ABSENT, None, types.NoneType, str, bytes, typing.NoReturn, typing.Never)


def _alternatives(hint: Any) -> list[Any]:
    """The members of a union, through all that only names or describes one."""
    if typing.get_origin(hint) is typing.Annotated:
        return _alternatives(hint.__origin__)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [each for member in typing.get_args(hint) for each in _alternatives(member)]
    if isinstance(hint, typing.NewType):
        return _alternatives(hint.__supertype__)
    alias = None if isinstance(hint, type) else getattr(hint, "__value__", None)
    return [hint] if alias is None else _alternatives(alias)


def _is_result(hint: Any) -> bool:
    """Whether it is never checked (questions), or has its own way to keep the promise."""
    models = _models()
    return hint is InputRequired or (models is not None and hint is models.CallToolResult)


def _may_be_content(hint: Any) -> bool:
    if (typing.get_origin(hint) or hint) in (list, tuple, Sequence):  # a list without more may hold anything
        inside = typing.get_args(hint) or (Any,)
        return any(_is_content(each) for member in inside for each in _alternatives(member))
    return _is_content(hint)


def _is_content(hint: Any) -> bool:
    content = _content()
    models = () if content is None else (content.Model, content.UnknownContent)
    is_model = isinstance(hint, type) and issubclass(hint, models)
    return hint is Any or hint is object or is_model


_NO_PROMISE = OutputSchema()


def tool_result(value: Any, output: OutputSchema | None, name: str, revision: Revision) -> JsonObject:
    """The result of the tool `name`, which returned `value`.  Raises `BadResult` or `NotInThisRevision`."""
    promised = output is not None and output.schema is not None
    if type(value) is str and not promised:
        return {"content": [{"type": "text", "text": value}]}
    what = f"the result of the tool {name!r}"
    return _judged(what, _tool_result, value, output if promised else _NO_PROMISE, name, revision)


def _tool_result(value: Any, output: OutputSchema, name: str, revision: Revision) -> JsonObject:
    if _is_a(value, "CallToolResult"):
        return _explicit(value, output, revision)
    if output.schema is None:
        if value is None:
            return {"content": []}
        if isinstance(value, list | tuple) and any(map(_is_block, value)):
            return {"content": [_item(each, f"{_uri(name)}/{index}", revision) for index, each in enumerate(value)]}
        if isinstance(value, str | bytes) or _is_block(value):
            return {"content": [_item(value, _uri(name), revision)]}
    structured = output(value)
    result: JsonObject = {"content": [_text(_as_text(structured))]}  # tool-13
    if output.boxed_in(revision):
        result["structuredContent"] = {_BOX: structured}
    elif output.schema is not None and _carries(structured, revision):
        result["structuredContent"] = structured
    return result


def _carries(structured: Json, revision: Revision) -> bool:
    """tool-34: what is no object has to be said by text alone.  tool-35: now it may be anything, null included."""
    return revision.name >= (_2025_06 if type(structured) is dict else _2026_07)


def _explicit(value: Any, output: OutputSchema, revision: Revision) -> JsonObject:
    if not value.has_structured_content:
        if output.schema is not None and not value.is_error:  # tool-14
            raise UsageError("it has no structured_content, which the output schema promises")
        return _checked(_written(value, revision))
    import attrs

    structured = output(value.structured_content, error=value.is_error)
    carried = {_BOX: structured} if output.boxed_in(revision) else structured
    result = _checked(_written(attrs.evolve(value, structured_content=carried), revision))
    if not any(block.get("type") == "text" for block in result["content"]):  # tool-13
        result["content"] = [*result["content"], _text(_as_text(structured))]
    return result


def _checked(result: JsonObject) -> JsonObject:
    for block in result["content"]:
        _check_block(block)
    return result


def _item(value: Any, uri: str, revision: Revision) -> JsonObject:
    if isinstance(value, bytes):
        return {"type": "resource", "resource": _blob(value, uri, None)}
    if isinstance(value, str) or _is_block(value):
        return _block(value, revision)
    return _text(_as_text(_NO_PROMISE(value)))


def _uri(name: str) -> str:
    from urllib.parse import quote

    return f"tool://{quote(name, safe='')}/result"


def tool_failure(error: ToolError | str, revision: Revision) -> JsonObject:
    """tool-30: a result, so that the model sees it.  Raises as `tool_result`."""
    content = error if isinstance(error, str) else error.content
    if isinstance(content, str):
        return {"content": [_text(content)], "isError": True}
    return _judged("ToolError", lambda: {"content": [_block(each, revision) for each in content], "isError": True})


# Prompts, resources, completions.


def prompt_result(value: Any, description: str | None, revision: Revision) -> JsonObject:
    """From text, a content block, a message or a list of these, or `GetPromptResult`.  Raises as `tool_result`."""
    if type(value) is str:
        result: JsonObject = {"messages": [{"role": "user", "content": {"type": "text", "text": value}}]}
    else:
        result = _judged("the result of the prompt", _prompt_result, value, revision)
        if _is_a(value, "GetPromptResult"):
            return result
    return result if description is None else {"description": description, **result}


def _prompt_result(value: Any, revision: Revision) -> JsonObject:
    if not _is_a(value, "GetPromptResult"):
        return {
            "messages": [_message(each, revision) for each in (value if isinstance(value, list | tuple) else [value])]
        }
    written = _written(value, revision)
    return {**written, "messages": [{**each, "content": _with_type(each["content"])} for each in written["messages"]]}


def _message(value: Any, revision: Revision) -> JsonObject:
    if not _is_a(value, "PromptMessage"):
        if isinstance(value, str) or _is_block(value):
            return {"role": "user", "content": _block(value, revision)}
        raise UsageError(f"{type(value).__name__} is no message; return text, content or PromptMessage")
    if value.role not in ("user", "assistant"):  # prm-17
        raise UsageError("the role of a message is user or assistant")
    written = _written(value, revision)
    return {**written, "content": _with_type(written["content"])}


def resource_result(value: Any, uri: str, mime_type: str | None, revision: Revision) -> JsonObject:
    """From text, bytes, contents or a list of these, `ReadResourceResult`, or data.  Raises as `tool_result`."""
    if type(value) is str:
        return {"contents": [{"uri": uri, "mimeType": mime_type or "text/plain", "text": value}]}
    return _judged(f"the result of the resource {shown(uri)}", _resource_result, value, uri, mime_type, revision)


def _resource_result(value: Any, uri: str, mime_type: str | None, revision: Revision) -> JsonObject:
    if value is None:
        raise UsageError("it is None; raise ResourceNotFound where there is nothing")
    if _is_a(value, "ReadResourceResult"):
        if not value.contents:  # res-09
            raise UsageError("it has no contents; raise ResourceNotFound where there is nothing")
        result = _written(value, revision)
        return {**result, "contents": [_with_uri(each) for each in result["contents"]]}
    if isinstance(value, bytes):
        return {"contents": [_blob(value, uri, mime_type)]}  # res-12
    if _is_contents(value):
        return {"contents": [_with_uri(_written(value, revision))]}
    if isinstance(value, list | tuple) and any(map(_is_contents, value)):
        if not all(map(_is_contents, value)):
            raise UsageError("it mixes contents with something else; make all of it contents")
        return {"contents": [_with_uri(_written(each, revision)) for each in value]}
    if isinstance(value, str):
        text, otherwise = _text(value)["text"], "text/plain"
    else:
        text, otherwise = _as_text(_NO_PROMISE(value)), "application/json"
    return {"contents": [{"uri": uri, "mimeType": mime_type or otherwise, "text": text}]}


def _with_uri(contents: JsonObject) -> JsonObject:
    _check_uri(contents, "a resource")
    return contents


def _is_contents(value: object) -> bool:
    return _is_model(value) and isinstance(value, _content().ResourceContents)


_COMPLETIONS = 100


def completion_result(value: Any) -> JsonObject:
    """From a list of texts, best first, or `Completion`.  Raises `BadResult`."""
    return _judged("the result of a completion", _completion_result, value)


def _completion_result(value: Any) -> JsonObject:
    if _is_a(value, "Completion"):
        return {"completion": _written(value, LATEST)}
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise UsageError(f"{type(value).__name__} is no list of texts, and no Completion")
    # cmpl-01: in the order in which they came.  cmpl-07: "must not exceed 100 items".
    first = [str.__str__(each) for each in list(value)[:_COMPLETIONS]]
    return {"completion": {"values": first, "total": len(value), "hasMore": len(value) > _COMPLETIONS}}
