"""What a client has learnt of its server's tools by listing them, and what follows for a call and its result.

- Arguments that go into headers as well, by Streamable HTTP in 2026-07-28.  A tool that says so wrongly cannot be
  called there, and is left out of the list (http-85, http-86).
- The schema of the result, by which a result is judged before it goes on to anybody's model (tool-08, tool-15).  A tool
  that was never listed has none that we know.

Everything is learnt anew with each list, and only a tool's name is ever looked for: what its annotations promise
decides nothing (tool-10).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import attrs

from trio_mcp.core.content import Malformed, TextContent
from trio_mcp.core.errors import McpError, RemoteProtocolError
from trio_mcp.core.headers import Mirror, find_mirrors
from trio_mcp.core.jsonrpc import ABSENT, Json, JsonObject
from trio_mcp.core.models import CallToolResult, Tool
from trio_mcp.core.schema import schema_of
from trio_mcp.core.validation import CompiledSchema, InvalidSchema, Problem, compile_schema

__all__ = ["ToolBook", "ToolFailed", "typed"]

T = TypeVar("T")

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
class _Page:
    rules: tuple[Mirror, ...]
    output: JsonObject | None
    compiled: CompiledSchema | None = None  # made for the first result


class ToolBook:
    """See the head of this file.  `mistake` hears of what is wrong with a tool."""

    def __init__(self, mistake: Callable[[str], object]) -> None:
        self._mistake = mistake
        self._pages: dict[str, _Page] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._pages

    def learn(self, tools: Iterable[Tool | Malformed], *, mirroring: bool) -> list[Tool]:
        """Take note of listed tools; returns those that can be called.  `mirroring`: the link has headers for them."""
        good = []
        for tool in tools:
            if isinstance(tool, Malformed):
                self._mistake(f"a tool is left out: {tool.why}")
                continue
            mirrors = find_mirrors(tool.input_schema)
            if mirroring and mirrors.faults:
                self._mistake(f"the tool {tool.name!r} is left out: {'; '.join(mirrors.faults)}")
                self._pages.pop(tool.name, None)
                continue
            if len(self._pages) < _TOOLS or tool.name in self._pages:
                output = None if tool.output_schema is None else dict(tool.output_schema)
                self._pages[tool.name] = _Page(() if mirrors.faults else mirrors.rules, output)
            good.append(tool)
        return good

    def forget(self) -> None:
        """Another session may have other tools."""
        self._pages.clear()

    def mirrors(self, name: str) -> Sequence[Mirror]:
        page = self._pages.get(name)
        return () if page is None else page.rules

    def judge(self, name: str, result: CallToolResult) -> None:
        """Raise RemoteProtocolError for a result that is not what its tool has promised."""
        page = self._pages.get(name)
        if page is None or page.output is None or result.is_error:
            return
        if result.structured_content is ABSENT:
            raise RemoteProtocolError(f"the result of the tool {name!r} has no structuredContent, and its schema has")
        if page.compiled is None:
            try:
                page.compiled = compile_schema(page.output)
            except InvalidSchema as error:
                self._mistake(
                    f"results of the tool {name!r} cannot be judged, for its outputSchema is no good: {error}"
                )
                page.output = None
                return
        _refuse(name, "its outputSchema", page.compiled.errors(result.structured_content))


def _refuse(name: str, what: str, problems: Sequence[Problem]) -> None:
    if problems:
        said = "; ".join(f"{each.path or 'it'} {each.message}" for each in problems)
        raise RemoteProtocolError(f"the result of the tool {name!r} does not fit {what}: {said}")


def typed(name: str, result: CallToolResult, hint: type[T]) -> T:
    """The result as a value of this type.

    Raises `ToolFailed` if the tool says that it has failed, and `RemoteProtocolError` if what it gave is no such value.
    """
    from trio_mcp.values import Unreadable, reader_of

    if result.is_error:
        raise ToolFailed(name, result)
    if hint is str and (text := _text(result)) is not None:
        return cast("T", text)
    schema = schema_of(hint, where="returns")
    value = _structured(name, result, schema)
    _refuse(name, "what is to be returned", compile_schema(schema).errors(value))
    read = reader_of(hint)
    try:
        made: Any = value if read is None else read(value)
    except Unreadable as error:
        raise RemoteProtocolError(f"the result of the tool {name!r} cannot be read: {error}") from error
    return cast("T", made)


def _text(result: CallToolResult) -> str | None:
    """The text that is all of the result."""
    said = result.content
    alone = said[0] if len(said) == 1 else None
    return alone.text if isinstance(alone, TextContent) else None


def _structured(name: str, result: CallToolResult, schema: JsonObject) -> Json:
    value: Any = result.structured_content
    if value is ABSENT:  # an old revision, or a value that it cannot carry: servers write it as text then
        try:
            return json.loads(_text(result) or "")
        except ValueError:
            raise RemoteProtocolError(f"the result of the tool {name!r} has no structured value") from None
    # Before 2026-07-28 it must be an object, and servers put what is none into one with this member.
    if schema.get("type") not in ("object", None) and isinstance(value, dict) and value.keys() == {"result"}:
        return value["result"]
    return value
