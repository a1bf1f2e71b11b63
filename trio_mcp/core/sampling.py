"""The order of messages in a sampling request: each tool use is followed by its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trio_mcp.core.content import ToolResultContent, ToolUseContent
from trio_mcp.core.errors import UsageError
from trio_mcp.core.models import SamplingMessage, Tool

__all__ = ["check_sampling"]


def check_sampling(messages: Sequence[SamplingMessage], tools: Sequence[Tool] = ()) -> None:
    """Raise `UsageError` unless each tool use has its result in the next message.

    Requirements: samp-14, samp-15, samp-18, samp-32, samp-33.
    """
    if not messages:
        raise UsageError("a sampling request needs at least one message")
    unanswered: Mapping[str, str] = {}  # tool uses of the previous message: names by id
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        results = [block for block in message.blocks if isinstance(block, ToolResultContent)]
        uses = {block.id: block.name for block in message.blocks if isinstance(block, ToolUseContent)}
        if not message.blocks:
            raise UsageError(f"{where} has no content")  # samp-20
        if results and (message.role != "user" or len(results) < len(message.blocks)):
            raise UsageError(f"{where}: tool results must be in a user message without other content")
        if uses and message.role != "assistant":
            raise UsageError(f"{where}: only an assistant message can use tools")
        if sorted(result.tool_use_id for result in results) != sorted(unanswered):
            raise UsageError(f"{where}: the message must have one result for each tool use of the message before it")
        for result in results:
            _check_output(tools, unanswered[result.tool_use_id], result, where)
        unanswered = uses
    if unanswered:
        raise UsageError("the tool uses of the last message have no results")


def _check_output(tools: Sequence[Tool], name: str, result: ToolResultContent, where: str) -> None:
    from trio_mcp.core.schema.validation import compile_schema

    schema = next((tool.output_schema for tool in tools if tool.name == name), None)
    if schema is None or not result.has_structured_content or result.is_error:
        return
    for problem in compile_schema(schema).errors(result.structured_content):
        at = f"structuredContent{problem.path}"
        raise UsageError(f"{where}: {at} does not fit the output schema of {name!r}: it {problem.message}")
