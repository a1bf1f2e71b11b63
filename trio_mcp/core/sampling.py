"""The order of messages in a sampling request: tool uses and their results."""

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
        raise UsageError("sampling needs a message to answer")
    unanswered: Mapping[str, str] = {}  # the tool uses of the message before: names by id
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        results = [block for block in message.blocks if isinstance(block, ToolResultContent)]
        uses = {block.id: block.name for block in message.blocks if isinstance(block, ToolUseContent)}
        if not message.blocks:
            raise UsageError(f"{where} has no content")  # samp-20
        if results and (message.role != "user" or len(results) < len(message.blocks)):
            raise UsageError(f"{where}: tool results stand in a message of the user that holds nothing else")
        if uses and message.role != "assistant":
            raise UsageError(f"{where}: only the assistant uses tools")
        if sorted(result.tool_use_id for result in results) != sorted(unanswered):
            raise UsageError(f"{where}: every tool use in the message before needs its one result here")
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
