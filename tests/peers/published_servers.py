"""Visits of our client to published servers: a table of actions, each with the result that it must have.

An action is a function of the visit.  A result that does not follow the protocol is a gap.  Gaps are in a table of
their own, with the actual result and the reason.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import pytest
import trio

from trio_mcp import Client, RequestError, open_client
from trio_mcp.core import CallToolResult, TextContent

__all__ = [
    "Action",
    "Gaps",
    "Table",
    "Visit",
    "check",
    "error_code",
    "list_names",
    "result_text",
    "tool_call",
    "visiting",
]

PATIENCE = 300.0  # seconds for all of one visit, on a busy machine

# The shell prints its process group and the exit status of the server.  A signal to the group ends both of them, and
# then no status is printed.
_SHELL = 'echo "group $$" >&2; "$@"; echo "ended with status $?" >&2'


@attrs.frozen
class Visit:
    """A client, the working folder of the server, its log messages, and the chunks of its standard error."""

    client: Client
    folder: Path
    logs: trio.MemoryReceiveChannel[Any]
    errors: list[bytes]


Action: TypeAlias = Callable[[Visit], Awaitable[Any]]
Table: TypeAlias = Mapping[str, tuple[Action, Any]]
Gaps: TypeAlias = Mapping[str, tuple[Any, str]]


@asynccontextmanager
async def visiting(target: str | Sequence[str], folder: Path, **options: Any) -> AsyncIterator[Visit]:
    """A visit.  After the block, the process of a command must exit by itself, with status 0, and leave no process."""
    report, logs = trio.open_memory_channel[Any](1000)
    errors: list[bytes] = []
    if not isinstance(target, str):
        target = ["sh", "-c", _SHELL, "sh", *target]
        options |= {"stderr": errors.append, "cwd": folder, "shutdown_timeout": PATIENCE}
    with trio.fail_after(PATIENCE):
        async with open_client(
            target, log_level="info", on_log=lambda each: report.send_nowait(each.data), **options
        ) as client:
            yield Visit(client, folder, logs, errors)
    if not isinstance(target, str):
        output = b"".join(errors).decode()
        group = int(output.partition("group ")[2].split()[0])
        assert output.endswith("ended with status 0\n"), output
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)


async def check(visit: Visit, table: Table, gaps: Gaps, deviations: Collection[str] = ()) -> None:
    """Run all actions in their order and compare the results.  The client must report exactly these deviations."""
    assert gaps.keys() <= table.keys()
    seen = {name: await action(visit) for name, (action, _) in table.items()}
    for name, result in seen.items():
        right = table[name][1]
        wanted, why = gaps.get(name, (right, ""))
        assert result == wanted, f"{name}: {result!r}, not {wanted!r}"
        assert not why or result != right, f"the gap of {name} is closed: {why}"
    assert visit.client.deviations == tuple(deviations), visit.client.deviations


def result_text(result: CallToolResult) -> str:
    """The texts of a result.  The text of a tool that has failed begins with ``failed:``."""
    texts = [each.text for each in result.content if isinstance(each, TextContent)]
    return "\n".join([*(["failed:"] if result.is_error else []), *texts])


def tool_call(name: str, **arguments: Any) -> Action:
    """An action that calls this tool: the text of the result, or the code of an error response."""

    async def action(visit: Visit) -> str | int:
        try:
            return result_text(await visit.client.call_tool(name, arguments))
        except RequestError as error:
            return error.code

    return action


def error_code(ask: Callable[[Client], Awaitable[object]]) -> Action:
    """An action: the code of the error response to this request."""

    async def action(visit: Visit) -> int:
        with pytest.raises(RequestError) as refused:
            await ask(visit.client)
        return refused.value.code

    return action


def list_names(kind: str) -> Action:
    """An action: the sorted names of all tools, resources, templates or prompts."""

    async def action(visit: Visit) -> list[str]:
        method = {"templates": "list_resource_templates"}.get(kind, f"list_{kind}")
        return sorted([each.name for each in await getattr(visit.client, method)()])

    return action
