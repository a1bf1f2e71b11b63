"""Turn the values that handlers return into results: JSON objects in the revision of the request.

Here are the results of tools, and the writing of content for all results; `prompts` and `resources` make the others.

| A tool returns | The result has |
|---|---|
| None | no content |
| text | a block of text |
| bytes | an embedded resource, `application/octet-stream` |
| content blocks, or a list with some | these blocks; text among them becomes a block, too |
| `CallToolResult` | its members |
| another value | its JSON as text, and as structured content if the tool has an output schema |

Structured content is checked against the output schema before it is sent.  A value that does not fit, or has no JSON
form, is a mistake of the server: `BadResult`.  So is a protocol object with members of wrong types, because types are
checked only if the author runs a type checker.  Content that the revision does not have raises `NotInThisRevision`.

Surprises:

- A list of only text, `["a", "b"]`, is data and not content.
- With an output schema the text is always JSON: a string is in quotes, so that text and structured content agree.

In 2025-06-18 and 2025-11-25 structured content must be an object.  There, data whose schema does not have
`"type": "object"` at its root is put into `{"result": ...}`, and so is its schema, because clients of the official SDKs
look for it there.  The schema decides, not the value: for `Forecast | None` forecasts are wrapped, too.

The models take 20 ms to import, and jsonschema_rs takes as long; a server that returns text needs neither.  So they are
imported where they are used, and a value is compared with the models only if their module has been imported.
"""

from __future__ import annotations

import functools
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trio_mcp.core.errors import (
    McpError,
    NotInThisRevision,
    RemoteProtocolError,
    UsageError,
    shown,
)
from trio_mcp.core.messages import ABSENT, PLAIN, Json, JsonObject, to_readable
from trio_mcp.core.revisions import REVISIONS, Revision

if TYPE_CHECKING:
    from trio_mcp.core.content import ContentBlock
    from trio_mcp.core.schema.shapes import Shape
    from trio_mcp.core.schema.validation import CompiledSchema
    from trio_mcp.server.questions import Inquiry

__all__ = ["BadResult", "InputRequired", "OutputSchema", "ToolError", "tool_failure", "tool_result"]

_2024_11, _2025_03, _2025_06, _2025_11, _2026_07 = REVISIONS  # their names, oldest first


# Errors that handlers raise, and the request for input that they return instead of a result.


class ToolError(McpError):
    """Raise this in a tool to tell the model about a failure.  The client gets a result with `isError`.

    `content` is text, or a list of content blocks and text; the client sees it, so it must not contain secrets.  In a
    resource, prompt or completion, which have no such results, the client gets the text as an error message.

    Raises `UsageError` if `content` has another type.
    """

    def __init__(self, content: str | Sequence[ContentBlock | str]) -> None:
        if not isinstance(content, str | list | tuple):
            raise UsageError(
                f"a ToolError takes text or a list of content, not {type(content).__name__}; give str(exception) only "
                "if clients may read it"
            )
        super().__init__(content)
        self.content = content


class InputRequired:
    """Return this to ask the client questions and be run again from the start.

    The answers are in `ctx.answers`, by the keys of `questions`.  `state` is a JSON value that comes back in
    `ctx.state`.  `await ctx.ask(...)` is simpler: it waits for the answers and does not run the handler again.
    """

    __slots__ = ("questions", "state")

    def __init__(self, questions: Mapping[str, Inquiry[Any]], state: Json = None) -> None:
        self.questions = questions
        self.state = state


class BadResult(McpError):
    """A handler returned a value that makes no valid result.  The message goes to the log and quotes no values."""


# Writing.

SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*:"
_FOUND: dict[str, Any] = {}


def model_class(name: str) -> Any:
    """A class or union of the protocol.  It is () if its module was never imported, so that no object can exist."""
    if name not in _FOUND:
        for module in ("trio_mcp.core.content", "trio_mcp.core.models"):
            if hasattr(sys.modules.get(module), name):
                _FOUND[name] = getattr(sys.modules[module], name)
    return _FOUND.get(name, ())


@functools.cache
def _codec() -> Any:
    from trio_mcp.core import codec

    return codec


def written(value: Any, revision: Revision) -> JsonObject:
    """Write an object of the protocol."""
    if isinstance(value, model_class("UnknownContent")):  # content of a known kind must not pass unchecked
        _codec().from_json(model_class("ContentBlock"), value.raw, strict=True)
    written: JsonObject = _codec().to_json(value, revision)
    return written


def _text(text: str) -> JsonObject:
    return {"type": "text", "text": str.__str__(text)}  # str() of a subclass may return another text


def block_of(value: Any, revision: Revision) -> JsonObject:
    """Write a content block, or text as a content block."""
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, model_class("ContentBlock")):
        raise UsageError(f"{type(value).__name__} is not content")
    return with_type(written(value, revision))


def checked(block: JsonObject) -> JsonObject:
    """prm-05, prm-06, prm-07: invalid MIME types and URIs are not sent."""
    kind = block.get("type")
    if kind in ("image", "audio") and not is_mime_type(block["mimeType"]):
        raise UsageError(f"the mime_type of {kind.capitalize()}Content must be a MIME type such as {kind}/...")
    if kind == "resource":
        with_uri(block["resource"])
    if kind == "resource_link":
        with_uri(block, "a ResourceLink")
    return block


def with_uri(block: JsonObject, subject: str = "a resource") -> JsonObject:
    """Check the URI of contents."""
    if not re.match(SCHEME, block["uri"]):
        raise UsageError(f"the uri of {subject} must begin with a scheme, such as file:")
    return block


def with_type(block: JsonObject) -> JsonObject:
    """Check a block, and add the MIME type to an embedded resource without one (prm-07)."""
    if checked(block).get("type") != "resource":
        return block
    contents = block["resource"]
    mime_type = "text/plain" if "text" in contents else "application/octet-stream"
    return {**block, "resource": {"mimeType": mime_type, **contents}}


def is_mime_type(text: object) -> bool:
    """Whether it is text such as "image/png", possibly with parameters."""
    token = r"[\w!#$&^.+-]+"
    return isinstance(text, str) and re.fullmatch(rf"{token}/{token}(\s*;.*)?", text, re.ASCII) is not None


def blob(data: bytes, uri: str, mime_type: str | None) -> JsonObject:
    """Write the contents of a resource that are bytes."""
    import base64

    return {"uri": uri, "mimeType": mime_type or "application/octet-stream", "blob": base64.b64encode(data).decode()}


def _as_json(value: Any) -> Json:
    from trio_mcp.core.schema.writing import to_json_value

    return to_json_value(value)


def _as_text(value: Json) -> str:
    try:
        return to_readable(value)
    except ValueError as error:  # an integer with more digits than Python writes
        raise UsageError(f"it cannot be written as JSON: {error}") from None


def json_text(value: Any) -> str:
    """Write any value as the text of its JSON."""
    return _as_text(_as_json(value))


class HandlerFault:
    """A block that writes the value of a handler: its errors become BadResult, which names the subject."""

    __slots__ = ("_name", "_subject")

    def __init__(self, subject: str, name: str = "") -> None:
        self._subject = subject
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, NotInThisRevision):
            return  # the server made no mistake, and the client is told
        subject = f"{self._subject} {shown(self._name)}" if self._name else self._subject
        if isinstance(error, UsageError | RemoteProtocolError):
            raise BadResult(f"{subject}: {error}") from error
        if isinstance(error, _ERRORS_OF_VALUES):
            raise BadResult(f"{subject}: writing it failed with {type(error).__name__}") from error


# Exceptions of malformed values, such as an object that lacks one of its attributes.
_ERRORS_OF_VALUES = (TypeError, ValueError, AttributeError, LookupError, NameError, RecursionError)


# Tools.


class OutputSchema:
    """The output schema of a tool, made once when the tool is registered.

    `schema` is None if the tool returns only content.  Some revisions need the schema and the data in a wrapper; see
    the module docstring.
    """

    __slots__ = ("_compiled", "_is_object", "_shape", "_write", "schema")

    def __init__(self, hint: Any = ABSENT, schema: Mapping[str, Json] | None = None) -> None:
        self._compiled: CompiledSchema | None = None
        self._shape = _shape_for(hint) if schema is None else None
        self._write = (self._shape and self._shape.write) or _as_json
        self.schema: JsonObject | None = dict(schema) if schema is not None else self._shape and self._shape.schema
        # A schema written by hand is never wrapped, because its references may hold from its root only.
        self._is_object = schema is not None or self.schema is None or self.schema.get("type") == "object"
        if schema is not None:  # generated schemas are valid
            self._compile()

    def boxed_in(self, revision: Revision) -> bool:
        """Whether data and schema are put into `{"result": ...}` in `revision` (tool-34, tool-36)."""
        return not self._is_object and _2025_06 <= revision.name < _2026_07

    def boxed_schema(self) -> JsonObject:
        """Return the schema of `{"result": ...}`."""
        assert self.schema is not None  # only schemas are wrapped
        inside = dict(self.schema)
        # References begin at the root, so the definitions move to the new root.
        definitions = {"$defs": inside.pop("$defs")} if "$defs" in inside else {}
        return {"type": "object", "properties": {_BOX: inside}, "required": [_BOX], **definitions}

    def __call__(self, value: Any, *, error: bool = False) -> Json:
        """Write `value` as plain JSON, and check it against the schema unless it belongs to an `error`."""
        written = value if type(value) in PLAIN else self._write(value)
        if self._shape is not None and self._shape.fits(written):
            return written
        if self.schema is not None and not error and (problems := self._compile().errors(written)):
            raise UsageError(
                "it does not match the output schema: "
                + "; ".join(f"{each.path or 'the whole'} {each.message}" for each in problems)
            )
        return written

    def _compile(self) -> CompiledSchema:
        if self._compiled is None:
            from trio_mcp.core.schema.validation import compile_schema

            self._compiled = compile_schema(self.schema)
        return self._compiled


_BOX = "result"


def _shape_for(hint: Any) -> Shape | None:
    from trio_mcp.core.schema.hints import alternatives_of
    from trio_mcp.core.schema.shapes import shape_of

    found = alternatives_of(hint)
    alternatives = [each for each in found if not _is_result(each)]
    content = [each for each in alternatives if _may_be_content(each)]
    if all(each in content or each in _NO_DATA for each in alternatives) or Any in alternatives:
        return None
    change = "annotate the data that it returns, or give structured=False to return only content"
    if content:  # tool-14: a tool with an output schema must always return structured content
        raise UsageError(f"it returns content or data, {hint!r}; return CallToolResult, or {change}")
    try:
        data = hint if alternatives == found else typing.Union[tuple(alternatives)]  # noqa: UP007
        shape = shape_of(data, where="its return value", mode="serialization")
    except UsageError as error:
        raise UsageError(f"{error}; {change}") from None
    return shape if shape.schema else None


_NO_DATA: tuple[Any, ...] = (ABSENT, None, types.NoneType, str, bytes, typing.NoReturn, typing.Never)


def _is_result(hint: Any) -> bool:
    """Whether it is no part of the output schema: questions are not checked, CallToolResult is checked separately."""
    return hint is InputRequired or hint is model_class("CallToolResult")


def _may_be_content(hint: Any) -> bool:
    from trio_mcp.core.schema.hints import alternatives_of

    hints = [hint]
    if (typing.get_origin(hint) or hint) in (list, tuple, Sequence):  # a list without an item type may hold any value
        hints = [each for member in typing.get_args(hint) or (Any,) for each in alternatives_of(member)]
    models = (model_class("Model"), model_class("UnknownContent"))
    return any(each in (Any, object) or (isinstance(each, type) and issubclass(each, models)) for each in hints)


def tool_result(value: Any, output: OutputSchema | None, name: str, revision: Revision) -> JsonObject:
    """Make the result of the tool `name`, which returned `value`.  Raises `BadResult` or `NotInThisRevision`."""
    if output is not None and output.schema is None:
        output = None
    if type(value) is str and output is None:
        return {"content": [{"type": "text", "text": value}]}
    with HandlerFault("the result of the tool", name):
        if isinstance(value, model_class("CallToolResult")):
            return _explicit_result(value, output, revision)
        if output is not None:
            structured = output(value)
            result: JsonObject = {"content": [_text(_as_text(structured))]}  # tool-13
            _add_structured(result, structured, output, revision)
            return result
        if value is None:
            return {"content": []}
        block = model_class("ContentBlock")
        for each in value if isinstance(value, (list, tuple)) else ():
            if isinstance(each, block):
                return {"content": [_item(each, name, f"/{index}", revision) for index, each in enumerate(value)]}
        return {"content": [_item(value, name, "", revision)]}


def _add_structured(result: JsonObject, structured: Json, output: OutputSchema | None, revision: Revision) -> None:
    if output is not None and output.boxed_in(revision):
        result["structuredContent"] = {_BOX: structured}
    # tool-34: data that is not an object is sent as text only.  tool-35: since 2026-07-28 it may be any JSON value.
    elif revision.name >= (_2025_06 if type(structured) is dict else _2026_07):
        result["structuredContent"] = structured


def _explicit_result(value: Any, output: OutputSchema | None, revision: Revision) -> JsonObject:
    if not value.has_structured_content:
        if output is not None and not value.is_error:  # tool-14
            raise UsageError("it has no structured_content, but the tool has an output schema")
        result = written(value, revision)
    else:
        import attrs

        data = value.structured_content
        structured = _as_json(data) if output is None else output(data, error=value.is_error)
        result = written(attrs.evolve(value, structured_content=ABSENT), revision)
        if not any(block.get("type") == "text" for block in result["content"]):  # tool-13
            result["content"].append(_text(_as_text(structured)))
        _add_structured(result, structured, output, revision)
    for block in result["content"]:
        checked(block)
    return result


def _item(value: Any, name: str, index: str, revision: Revision) -> JsonObject:
    if isinstance(value, model_class("ContentBlock")):
        return with_type(written(value, revision))
    if isinstance(value, bytes):
        from urllib.parse import quote

        return {"type": "resource", "resource": blob(value, f"tool://{quote(name, safe='')}/result{index}", None)}
    return _text(value if isinstance(value, str) else json_text(value))


def tool_failure(error: ToolError | str, revision: Revision) -> JsonObject:
    """Make the result of a failed tool: a result and not an error, so that the model sees it (tool-30).

    Raises as `tool_result`.
    """
    content = error if isinstance(error, str) else error.content
    if isinstance(content, str):
        return {"content": [_text(content)], "isError": True}
    with HandlerFault("ToolError"):
        return {"content": [block_of(each, revision) for each in content], "isError": True}
