"""What a client has learnt of its server's tools by listing them, and what follows for a call and its result.

- Arguments that go into headers as well, by Streamable HTTP in 2026-07-28.  A tool that says so wrongly cannot be
  called there, and is left out of the list (http-85, http-86).
- The schema of the result, by which a result is judged before it goes on to anybody's model (tool-08, tool-15).  A tool
  that was never listed has none that we know.

Everything is learnt anew with each list, and only a tool's name is ever looked for: what its annotations promise
decides nothing (tool-10).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, NewType, TypeVar, Union, cast, get_args, get_origin

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
from trio_mcp.core.glimpse import holds_more_values
from trio_mcp.core.http.fields import Mirror, find_mirrors
from trio_mcp.core.json_text import UnreadableNumber, parse
from trio_mcp.core.jsonrpc import ABSENT, Absent, Json, JsonObject, Limits
from trio_mcp.core.models import CallToolResult, Tool
from trio_mcp.core.schema.schema import schema_of
from trio_mcp.core.schema.validation import CompiledSchema, InvalidSchema, Problem, compile_schema

__all__ = ["ReturnType", "ToolBook", "ToolFailed"]

T = TypeVar("T")

_VALUES = Limits().values  # in a text that is read as JSON, as in a message
_TOOLS = 10_000  # that are known at the same time; beyond, a tool is called as one that was never listed


class ToolFailed(McpError):
    """The tool says that it has failed, and so gave nothing of the type that was asked for.  `result` is what it says.

    What it says is for the model, which may mend its call.
    """

    def __init__(self, name: str, result: CallToolResult) -> None:
        texts = [each.text for each in result.content if isinstance(each, TextContent)]
        super().__init__(f"the tool {name!r} has failed: " + (" ".join(texts) or "it does not say why"))
        self.result = result


@attrs.define(eq=False, repr=False)
class _KnownTool:
    rules: tuple[Mirror, ...]
    output: JsonObject | None
    compiled: CompiledSchema | None = None  # made for the first result


class ToolBook:
    """See the head of this file.  `mistake` hears of what is wrong with a tool."""

    def __init__(self, mistake: Callable[[str], object]) -> None:
        self._mistake = mistake
        self._tools: dict[str, _KnownTool] = {}
        self._walked = False
        self._forgotten = 0

    async def look_for(self, name: str, walk: Callable[[], Awaitable[object]]) -> None:
        """Have all lists walked for a tool that is not known: once, until they may have changed."""
        if name in self._tools or self._walked:
            return
        before = self._forgotten
        try:
            await walk()
        except (RequestError, RemoteProtocolError, SessionClosed) as error:
            self._mistake(f"the tools cannot be listed, so the results of {name[:80]!r} are not judged: {error}")
        else:
            self._walked = self._forgotten == before

    def learn(self, tools: Iterable[Tool | MalformedContent], *, mirroring: bool) -> list[Tool]:
        """Take note of listed tools; returns those that can be called.  `mirroring`: the link has headers for them."""
        good = []
        for tool in tools:
            if isinstance(tool, MalformedContent):
                self._mistake(f"a tool is left out: {tool.why}")
                continue
            mirrors = find_mirrors(tool.input_schema)
            if mirroring and mirrors.faults:
                self._mistake(f"the tool {tool.name!r} is left out: {'; '.join(mirrors.faults)}")
                self._tools.pop(tool.name, None)
                continue
            if len(self._tools) < _TOOLS or tool.name in self._tools:
                output = None if tool.output_schema is None else dict(tool.output_schema)
                self._tools[tool.name] = _KnownTool(() if mirrors.faults else mirrors.rules, output)
            good.append(tool)
        return good

    def forget(self) -> None:
        """Another session may have other tools."""
        self._tools.clear()
        self._walked = False
        self._forgotten += 1

    def mirrors(self, name: str) -> Sequence[Mirror]:
        tool = self._tools.get(name)
        return () if tool is None else tool.rules

    def boxes(self, name: str) -> bool:
        """Whether what a tool returns stands in an object for want of a better place: see `ReturnType`.

        A closed object is none of those that are made for this: one with such a member is what its tool returns.
        """
        tool = self._tools.get(name)
        schema = {} if tool is None or tool.output is None else tool.output
        members = schema.get("properties")
        only = isinstance(members, dict) and members.keys() == {"result"} and schema.get("required") == ["result"]
        return only and "additionalProperties" not in schema

    def judge(self, name: str, result: CallToolResult) -> None:
        """Raise RemoteProtocolError for a result that is not what its tool has promised."""
        tool = self._tools.get(name)
        if tool is None or tool.output is None or result.is_error:
            return
        if not result.has_structured_content:
            raise RemoteProtocolError(f"the result of the tool {name!r} has no structuredContent, and its schema has")
        if tool.compiled is None:
            try:
                tool.compiled = compile_schema(tool.output)
            except InvalidSchema as error:
                self._mistake(
                    f"results of the tool {name!r} cannot be judged, for its outputSchema is no good: {error}"
                )
                tool.output = None
                return
        _refuse(name, "its outputSchema", tool.compiled.errors(result.structured_content))


def _refuse(name: str, what: str, problems: Sequence[Problem]) -> None:
    if problems:
        said = "; ".join(f"{each.path or 'it'} {each.message}" for each in problems)
        raise RemoteProtocolError(f"the result of the tool {name!r} does not fit {what}: {said}")


class ReturnType(Generic[T]):
    """What `returns` asks for.  Made before the call: raises UsageError for what is no type to be read."""

    def __init__(self, hint: type[T]) -> None:
        from trio_mcp.core.schema.values import reader_of

        self._fits = compile_schema(schema_of(hint, where="returns"))
        self._read = reader_of(hint)
        kinds = list(_alternatives(hint))
        self._plain = all(each in (str, None, NoneType) for each in kinds)
        self._binary = bytes in kinds

    def value(self, name: str, result: CallToolResult, *, boxed: bool = False) -> T:
        """The result as a value of the type.  `boxed`: by its schema, it should be looked for in its member "result".

        Raises `ToolFailed` if the tool says that it has failed, and `RemoteProtocolError` if what it gave is no such
        value.
        """
        from trio_mcp.core.schema.values import Unreadable

        if result.is_error:
            raise ToolFailed(name, result)
        if self._binary and not result.has_structured_content and (data := _bytes(result)) is not None:
            return cast("T", data)
        value = self._chosen(name, result, boxed)
        try:
            made: Any = value if self._read is None else self._read(value)
        except Unreadable as error:
            raise RemoteProtocolError(f"the result of the tool {name!r} cannot be read: {error}") from error
        return cast("T", made)

    def _chosen(self, name: str, result: CallToolResult, boxed: bool) -> Json:
        """The first that fits; else an error that says what is wrong with the likeliest."""
        meant = self._meant(result, boxed)
        for value in meant:
            if not self._fits.errors(value):
                return value
        if not result.has_structured_content:
            raise RemoteProtocolError(
                f"the result of the tool {name!r} has no structured value, and its content is not what is to be "
                "returned; call it without `returns`, and look at its content"
            )
        _refuse(name, "what is to be returned", self._fits.errors(meant[0]))
        raise AssertionError("it has just been found not to fit")

    def _meant(self, result: CallToolResult, boxed: bool) -> list[Json]:
        """What the result may mean, the likeliest first."""
        value, text = result.structured_content, _text(result)
        texts = [] if text is None else [text]
        if result.has_structured_content:
            # Before 2026-07-28 it must be an object, and servers put what is none into one with this member; some do
            # so for a union that has objects in it, or in every revision.
            wrapped = [value["result"]] if isinstance(value, dict) and value.keys() == {"result"} else []
            either = [*wrapped, value] if boxed else [value, *wrapped]
            return [*either, *(texts if self._plain else [])]
        if not result.content:
            return [None]
        if text is None or self._plain:
            return list(texts)
        value = _written(text)
        return [text] if value is ABSENT else [value, text]


def _alternatives(hint: Any) -> Iterator[Any]:
    """The members of a union, through what only names or describes one."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for each in get_args(hint):
            yield from _alternatives(each)
    elif origin is Annotated:
        yield from _alternatives(get_args(hint)[0])
    elif isinstance(hint, NewType):
        yield from _alternatives(hint.__supertype__)
    else:
        yield hint


def _text(result: CallToolResult) -> str | None:
    """The text that is all of the result."""
    alone = result.content[0] if len(result.content) == 1 else None
    return alone.text if isinstance(alone, TextContent) else None


def _written(text: str) -> Json | Absent:
    """The JSON that is in a text, as servers write what an old revision, or the value, does not let them say otherwise.

    As in a message, there may be too many values in it, or numbers that take too long to read.
    """
    try:
        data = text.encode()
        return ABSENT if holds_more_values(data, _VALUES) else parse(data)[0]
    except (ValueError, RecursionError, UnreadableNumber):
        return ABSENT


def _bytes(result: CallToolResult) -> bytes | None:
    """The bytes that are all of the result."""
    alone = result.content[0] if len(result.content) == 1 else None
    if isinstance(alone, EmbeddedResource) and isinstance(alone.resource, BlobResourceContents):
        return alone.resource.blob
    return alone.data if isinstance(alone, ImageContent | AudioContent) else None
