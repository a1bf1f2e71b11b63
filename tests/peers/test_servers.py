"""Our client at servers by the official Python SDK, old and new, and by FastMCP, on every transport that they have.

One table says what each behaviour looks like.  Where a server falls short, `GAPS` says how and why; a gap that has gone
must leave the table.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from tests.peers.installed import PEERS, PROGRAMS, needs, python_of
from tests.peers.listening import listening
from trio_mcp import Client, open_client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first visit installs the server

PATIENCE = 60.0  # seconds for all of one visit, on a busy machine
PATHS = {"streamable-http": "/mcp", "http": "/mcp", "sse": "/sse"}  # as the programs are told
A, D, E = "2024-11-05", "2025-11-25", "2026-07-28"

# What is served, by which program and way, and which revision is found; pinned to it where it is not the newest.
VISITS = [
    ("python-1.0.0", "server0.py", "stdio", A, {"probe": 0.5}),  # to which it says nothing
    *[("python-1.12.4", "server1.py", way, "2025-06-18", {}) for way in ("stdio", "streamable-http", "sse")],
    *[("python-1.30.0", "server1.py", way, D, {}) for way in ("stdio", "streamable-http", "sse")],
    *[("python-2.3.0", "server2.py", way, E, {}) for way in ("stdio", "streamable-http")],
    *[("python-2.3.0", "server2.py", way, D, {"revision": D}) for way in ("stdio", "streamable-http", "sse")],
    *[("fastmcp-4.1.2", "server_fastmcp4.py", way, E, {}) for way in ("stdio", "http")],
    *[("fastmcp-4.1.2", "server_fastmcp4.py", way, D, {"revision": D}) for way in ("stdio", "http", "sse")],
]

TABLE: dict[str, Any] = {
    "tools": ["add", "fail", "half", "ledger", "pid", "roots", "wait"],
    "prompts": ["greet"],
    "resources": [],
    "templates": ["peers://item/{name}"],
    "call": 5,
    "optional": [2, None],
    "progress": [(1, 2)],
    "log": ["hello"],
    "failure": True,
    "read": "item 7",
    "prompt": "Hello, Ada!",
    "roots": "file:///srv/a",
    "cancel": ["began", "cancelled"],
    "deviations": [],
}
# (peer, revision): what is seen instead of the table, and why.
LIST_ONLY = "it has a list of its own, and no templates"
NO_PROGRESS = "it does not show its tools the token of a request"
NO_CANCEL = "it cancels nothing, and takes no other request meanwhile"
NOTHING = object()
SILENT = "it declares no log messages there, and none are asked for"
WITH_MORE = "it has room for more than the text"
GAPS: dict[tuple[str, str], dict[str, tuple[Any, str]]] = {
    ("python-2.3.0", E): {"log": (NOTHING, SILENT)},
    ("python-1.0.0", A): {
        "tools": (["add", "fail", "half", "pid", "roots"], NO_CANCEL),
        "resources": (["peers://item/7"], LIST_ONLY),
        "templates": (NOTHING, LIST_ONLY),
        "cancel": (NOTHING, NO_CANCEL),
        "progress": ([], NO_PROGRESS),
    },
    **{("fastmcp-4.1.2", revision): {"log": ([{"msg": "hello", "extra": None}], WITH_MORE)} for revision in (D, E)},
}


@contextlib.asynccontextmanager
async def served(peer: str, program: str, way: str) -> AsyncIterator[Any]:
    """A target: the command, or the URL of a process that ends with the block."""
    python = needs(peer, lambda: python_of(peer, PEERS[peer].packages))
    command = [str(python), str(PROGRAMS / program), way]
    if way == "stdio":
        yield command
        return
    async with listening(command) as origin:
        yield origin + PATHS[way]


async def look(client: Client, logs: trio.MemoryReceiveChannel[Any], names: Any) -> dict[str, Any]:
    """All of these behaviours."""
    reports: list[Any] = []

    async def call() -> int:
        return await client.call_tool(
            "add", {"a": 2, "b": 3}, returns=int, on_progress=lambda *report: reports.append(report[:2])
        )

    async def log() -> list[Any]:
        return [await logs.receive()]  # it may come after the result, on a stream of its own

    async def progress() -> list[Any]:
        return reports

    async def prompt() -> str:
        return (await client.prompt("greet", {"name": "Ada"})).messages[0].content.text  # type: ignore[union-attr]

    looks: dict[str, Any] = {
        "tools": lambda: _sorted(client.tools(), "name"),
        "prompts": lambda: _sorted(client.prompts(), "name"),
        "resources": lambda: _sorted(client.resources(), "uri"),
        "templates": lambda: _sorted(client.templates(), "uri_template"),
        "call": call,
        "optional": lambda: _each(client, "half", [{"number": 4}, {"number": 3}], int | None),
        "progress": progress,
        "log": log,
        "failure": lambda: _failure(client),
        "read": lambda: _read(client),
        "prompt": prompt,
        "roots": lambda: client.call_tool("roots", returns=str),
        "cancel": lambda: _cancel(client),
        "deviations": lambda: _deviations(client),
    }
    return {name: await looks[name]() for name in TABLE if name in names}


async def _sorted(listed: Any, name: str) -> list[str]:
    return sorted([getattr(each, name) async for each in listed])


async def _each(client: Client, name: str, calls: list[dict[str, Any]], kind: Any) -> list[Any]:
    return [await client.call_tool(name, arguments, returns=kind) for arguments in calls]


async def _failure(client: Client) -> bool:
    result = await client.call_tool("fail")
    return bool(result.is_error) and "on purpose" in result.content[0].text  # type: ignore[union-attr]


async def _read(client: Client) -> str:
    return (await client.read("peers://item/7")).contents[0].text  # type: ignore[union-attr]


async def _cancel(client: Client) -> list[str]:
    async def wait() -> None:
        with scope:
            await client.call_tool("wait")

    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        while not await client.call_tool("ledger", returns=list[str]):
            pass
        scope.cancel()
    assert scope.cancelled_caught
    while len(ledger := await client.call_tool("ledger", returns=list[str])) < 2:
        pass
    return ledger


async def _deviations(client: Client) -> list[str]:
    return list(client.deviations)


@pytest.mark.parametrize(
    ("peer", "program", "way", "revision", "options"),
    VISITS,
    ids=[f"{peer} {way} {revision}" for peer, _, way, revision, _ in VISITS],
)
async def test_what_a_client_sees_of_a_real_server(
    peer: str, program: str, way: str, revision: str, options: Any
) -> None:
    gaps = {name: seen for name, (seen, _) in GAPS.get((peer, revision), {}).items()}
    wanted = {name: seen for name, seen in {**TABLE, **gaps}.items() if seen is not NOTHING}
    said, logs = trio.open_memory_channel[Any](10)
    async with served(peer, program, way) as target:
        with trio.fail_after(PATIENCE):
            async with open_client(
                target, roots=["/srv/a"], log_level="info", on_log=lambda each: said.send_nowait(each.data), **options
            ) as client:
                assert client.revision == revision
                seen = await look(client, logs, wanted)
                assert {name: what for name, what in seen.items() if what != wanted[name]} == {}
                pid = await client.call_tool("pid", returns=int)
        if way == "stdio":
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        else:  # which goes on for others
            os.kill(pid, 0)
