"""The tools of the server, as far as the client has listed them, and the conversion of results to Python types.

`KnownTools` keeps of each listed tool:

- the arguments that are sent in HTTP headers, too (Streamable HTTP of 2026-07-28).  A tool that declares them wrongly
  cannot be called over that transport and is left out of the list (http-85, http-86);
- the schema of its results.  A result is checked before it goes on to a model (tool-08, tool-15).  The results of a
  tool that was never listed are not checked.

Each list replaces the stored data.  Tools are only looked up by name; no decision depends on their annotations
(tool-10).

`ReturnType` is the type given as `returns`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import NoneType
from typing import Generic, TypeVar, cast

import attrs

from trio_mcp.core.content import (
    AudioContent,
    BlobResourceContents,
    EmbeddedResource,
    ImageContent,
    MalformedContent,
    TextContent,
)
from trio_mcp.core.errors import McpError, RemoteProtocolError, RequestError, SessionClosed
from trio_mcp.core.http.fields import Mirror, find_mirrors
from trio_mcp.core.messages import ABSENT, Absent, Json, JsonObject, Limits, UnreadableNumber, parse
from trio_mcp.core.models import CallToolResult, Tool
from trio_mcp.core.schema.cost import InvalidSchema
from trio_mcp.core.schema.hints import alternatives_of
from trio_mcp.core.schema.shapes import Unreadable, shape_of
from trio_mcp.core.schema.validation import CompiledSchema, Problem, compile_schema
from trio_mcp.core.unparsed import holds_more_values

__all__ = ["KnownTools", "ReturnType", "ToolFailed"]

T = TypeVar("T")

_VALUES = Limits().values  # limit for a text that is read as JSON; the same as for a message
_TOOLS = 10_000  # the most tools that are stored; other tools are called as if they were never listed


class ToolFailed(McpError):
    """A tool has failed, so there is no value of the type given as `returns`.  `result` is the whole result.

    Its text is for the model, which may correct its call.
    """

    def __init__(self, name: str, result: CallToolResult) -> None:
        texts = [each.text for each in result.content if isinstance(each, TextContent)]
        super().__init__(f"the tool {name!r} has failed: " + (" ".join(texts) or "it gave no reason"))
        self.result = result


@attrs.define(eq=False, repr=False)
class _KnownTool:
    mirrors: tuple[Mirror, ...]
    output: JsonObject | None
    compiled: CompiledSchema | None = None  # compiled at the first result


class KnownTools:
    """The tools that were listed; see the head of this file.  `report` is called with each problem of a tool."""

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._tools: dict[str, _KnownTool] = {}
        self._all_listed = False
        self._forgotten = 0

    async def ensure_listed(self, name: str, list_all: Callable[[], Awaitable[object]]) -> None:
        """List all tools if this one is not known.  Does it only once, until the lists may have changed."""
        if name in self._tools or self._all_listed:
            return
        before = self._forgotten
        try:
            await list_all()
        except (RequestError, RemoteProtocolError, SessionClosed) as error:
            self._report(f"the results of {name[:80]!r} are not checked, because listing the tools failed: {error}")
        else:
            self._all_listed = self._forgotten == before

    def add(self, tools: Iterable[Tool | MalformedContent], *, mirroring: bool) -> list[Tool]:
        """Store listed tools, and return those that can be called.

        `mirroring`: the transport sends arguments in headers.
        """
        callable_tools = []
        for tool in tools:
            if isinstance(tool, MalformedContent):
                self._report(f"an invalid tool is left out: {tool.why}")
                continue
            mirrors = find_mirrors(tool.input_schema)
            if mirroring and mirrors.faults:
                self._report(f"the tool {tool.name!r} is left out: {'; '.join(mirrors.faults)}")
                self._tools.pop(tool.name, None)
                continue
            if len(self._tools) < _TOOLS or tool.name in self._tools:
                output = None if tool.output_schema is None else dict(tool.output_schema)
                self._tools[tool.name] = _KnownTool(() if mirrors.faults else mirrors.rules, output)
            callable_tools.append(tool)
        return callable_tools

    def forget(self) -> None:
        """Forget all tools: another session may have others."""
        self._tools.clear()
        self._all_listed = False
        self._forgotten += 1

    def mirrors(self, name: str) -> Sequence[Mirror]:
        tool = self._tools.get(name)
        return () if tool is None else tool.mirrors

    def wraps_result(self, name: str) -> bool:
        """True if the schema says that the tool's value is in the member "result" of an object; see `ReturnType`.

        Such a schema has no additionalProperties.  If it has, the object with this member is the value itself.
        """
        tool = self._tools.get(name)
        schema = {} if tool is None or tool.output is None else tool.output
        properties = schema.get("properties")
        only = isinstance(properties, dict) and properties.keys() == {"result"} and schema.get("required") == ["result"]
        return only and "additionalProperties" not in schema

    def check_result(self, name: str, result: CallToolResult) -> None:
        """Raise RemoteProtocolError if a result does not fit the output schema of its tool."""
        tool = self._tools.get(name)
        if tool is None or tool.output is None or result.is_error:
            return
        if not result.has_structured_content:
            raise RemoteProtocolError(f"the tool {name!r} has an outputSchema, but its result has no structuredContent")
        if tool.compiled is None:
            try:
                tool.compiled = compile_schema(tool.output)
            except InvalidSchema as error:
                self._report(
                    f"the results of the tool {name!r} are not checked, because its outputSchema is invalid: {error}"
                )
                tool.output = None
                return
        if problems := tool.compiled.errors(result.structured_content):
            raise _misfit(name, "its outputSchema", problems)


def _misfit(name: str, target: str, problems: Sequence[Problem]) -> RemoteProtocolError:
    details = "; ".join(f"{each.path or 'it'} {each.message}" for each in problems)
    return RemoteProtocolError(f"the result of the tool {name!r} does not fit {target}: {details}")


class ReturnType(Generic[T]):
    """The type given as `returns`.  Made before the call: raises UsageError if values of the type cannot be read."""

    def __init__(self, hint: type[T]) -> None:
        self._shape = shape_of(hint, where="returns")
        members = alternatives_of(hint)
        self._text_only = all(each in (str, None, NoneType) for each in members)
        self._binary = bytes in members

    def value(self, name: str, result: CallToolResult, *, wrapped: bool = False) -> T:
        """Return the result as a value of the type.  `wrapped`: look for it in the member "result" first.

        Raises `ToolFailed` if the tool has failed, and `RemoteProtocolError` if the result has no value of the type.
        """
        if result.is_error:
            raise ToolFailed(name, result)
        if self._binary and not result.has_structured_content and (data := _bytes(result)) is not None:
            return cast("T", data)
        candidates = self._candidates(result, wrapped)
        fitting = [each for each in candidates if self._shape.fits(each)]
        if fitting:
            read = self._shape.read
            try:
                return cast("T", fitting[0] if read is None else read(fitting[0]))
            except Unreadable as error:
                raise RemoteProtocolError(f"the result of the tool {name!r} cannot be read: {error}") from error
        if not result.has_structured_content:
            raise RemoteProtocolError(
                f"the result of the tool {name!r} has no structured value, and its content does not fit `returns`; "
                "call the tool without `returns` to see its content"
            )
        raise _misfit(name, "`returns`", compile_schema(self._shape.schema).errors(candidates[0]))

    def _candidates(self, result: CallToolResult, wrapped: bool) -> list[Json]:
        """Return the possible values of the result, the most likely first."""
        value, text = result.structured_content, _text(result)
        texts = [] if text is None else [text]
        if result.has_structured_content:
            # Before 2026-07-28 structuredContent must be an object, so servers wrap other values into one with this
            # member.  Some wrap unions that contain objects, or wrap in every revision.
            inner = [value["result"]] if isinstance(value, dict) and value.keys() == {"result"} else []
            values = [*inner, value] if wrapped else [value, *inner]
            return [*values, *(texts if self._text_only else [])]
        if not result.content:
            return [None]
        if text is None or self._text_only:
            return list(texts)
        value = _parse(text)
        return [text] if value is ABSENT else [value, text]


def _text(result: CallToolResult) -> str | None:
    """Return the text of the result if it is its only content."""
    alone = result.content[0] if len(result.content) == 1 else None
    return alone.text if isinstance(alone, TextContent) else None


def _parse(text: str) -> Json | Absent:
    """Return the JSON value in a text, or ABSENT if it is not JSON, has too many values, or has too long numbers.

    Servers write JSON into a text if an older revision, or the value, has no other place for it.
    """
    try:
        data = text.encode()
        return ABSENT if holds_more_values(data, _VALUES) else parse(data)[0]
    except (ValueError, RecursionError, UnreadableNumber):
        return ABSENT


def _bytes(result: CallToolResult) -> bytes | None:
    """Return the bytes of the result if they are its only content."""
    alone = result.content[0] if len(result.content) == 1 else None
    if isinstance(alone, EmbeddedResource) and isinstance(alone.resource, BlobResourceContents):
        return alone.resource.blob
    return alone.data if isinstance(alone, ImageContent | AudioContent) else None
