"""Visits to servers that people use: a table of what is looked at, and what each look should show.

A look is a function of the visit.  What is not as the protocol has it is a gap: it stands in a table of its own, with
what is seen instead and why.
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

__all__ = ["Gaps", "Look", "Says", "Table", "Visit", "calls", "check", "code_of", "lists", "said", "visiting"]

PATIENCE = 300.0  # seconds for all of one visit, on a busy machine

# It says which process group it is, and how the server has ended: by itself, or the shell is killed with it.
_SHELL = 'echo "group $$" >&2; "$@"; echo "ended with status $?" >&2'


@attrs.frozen
class Visit:
    """A client, a folder that is the server's to work in, its log messages, and what it writes to standard error."""

    client: Client
    place: Path
    logs: trio.MemoryReceiveChannel[Any]
    errors: list[bytes]


Look: TypeAlias = Callable[[Visit], Awaitable[Any]]
Table: TypeAlias = Mapping[str, tuple[Look, Any]]
Gaps: TypeAlias = Mapping[str, tuple[Any, str]]


class Says:
    """Equal to each text that has these words in it."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def __eq__(self, text: object) -> bool:
        return isinstance(text, str) and all(each in text for each in self._words)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Says{self._words}"


@asynccontextmanager
async def visiting(target: str | Sequence[str], place: Path, **options: Any) -> AsyncIterator[Visit]:
    """A visit.  A command has to end by itself afterwards, with status 0, and to leave no process behind."""
    report, logs = trio.open_memory_channel[Any](1000)
    errors: list[bytes] = []
    if not isinstance(target, str):
        target = ["sh", "-c", _SHELL, "sh", *target]
        options |= {"stderr": errors.append, "cwd": place, "shutdown_timeout": PATIENCE}
    with trio.fail_after(PATIENCE):
        async with open_client(
            target, log_level="info", on_log=lambda each: report.send_nowait(each.data), **options
        ) as client:
            yield Visit(client, place, logs, errors)
    if not isinstance(target, str):
        said = b"".join(errors).decode()
        group = int(said.partition("group ")[2].split()[0])
        assert said.endswith("ended with status 0\n"), said
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)


async def check(visit: Visit, table: Table, gaps: Gaps, deviations: Collection[str] = ()) -> None:
    """All looks, in this order; beyond these deviations the server follows the protocol."""
    assert gaps.keys() <= table.keys()
    seen = {name: await look(visit) for name, (look, _) in table.items()}
    for name, what in seen.items():
        right = table[name][1]
        wanted, why = gaps.get(name, (right, ""))
        assert what == wanted, f"{name}: {what!r}, not {wanted!r}"
        assert not why or what != right, f"{name} is a gap no more: {why}"
    assert visit.client.deviations == tuple(deviations), visit.client.deviations


def said(result: CallToolResult) -> str:
    """The texts of a result; those of a tool that has failed begin with a word about it."""
    texts = [each.text for each in result.content if isinstance(each, TextContent)]
    return "\n".join([*(["failed:"] if result.is_error else []), *texts])


def calls(name: str, **arguments: Any) -> Look:
    """What a tool says; an error of the protocol is its code."""

    async def look(visit: Visit) -> str | int:
        try:
            return said(await visit.client.call_tool(name, arguments))
        except RequestError as error:
            return error.code

    return look


def code_of(ask: Callable[[Client], Awaitable[object]]) -> Look:
    """The code of the error that this is answered with."""

    async def look(visit: Visit) -> int:
        with pytest.raises(RequestError) as refused:
            await ask(visit.client)
        return refused.value.code

    return look


def lists(kind: str) -> Look:
    """The names of tools, resources, templates or prompts."""

    async def look(visit: Visit) -> list[str]:
        method = {"templates": "list_resource_templates"}.get(kind, f"list_{kind}")
        return sorted([each.name for each in await getattr(visit.client, method)()])

    return look
