"""What servers of others have their own way of, and what our client makes of it.

The same small server is built with the official Python SDK, old and new, and with FastMCP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.peers.installed import PEERS, PROGRAMS, needs, python_of
from tests.peers.listening import listening
from tests.peers.shelf import Gaps, Says, Table, Visit, calls, check, code_of, visiting
from trio_mcp import ToolFailed
from trio_mcp.errors import NoResponse, SessionClosed, SubscriptionUnsupported

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the server

PATHS = {"http": "/mcp", "sse": "/sse"}
C, D, E = "2025-06-18", "2025-11-25", "2026-07-28"

# Who built it, and which revision is found; pinned to it where it is not the newest.
BUILDERS: list[tuple[str, str, dict[str, str]]] = [
    ("python-1.12.4", C, {}),
    ("python-1.30.0", D, {}),
    ("python-2.3.0", D, {"revision": D}),
    ("python-2.3.0", E, {}),
    ("fastmcp-4.1.2", D, {"revision": D}),
    ("fastmcp-4.1.2", E, {}),
]


@asynccontextmanager
async def served(builder: str, way: str) -> AsyncIterator[Any]:
    """A target: the command, or the URL of a process that ends with the block."""
    python = needs(builder, lambda: python_of(builder, PEERS[builder].packages))
    command = [str(python), str(PROGRAMS / "small.py"), way]
    if way == "stdio":
        yield command
        return
    async with listening(command) as origin:
        yield origin + PATHS[way]


async def typed(visit: Visit) -> str:
    """A result is the model's to read, and an error for a program that wants a value."""
    with pytest.raises(ToolFailed) as failed:
        await visit.client.call_tool("no-such-tool", returns=int)
    return str(failed.value)


async def listens(visit: Visit) -> bool:
    try:
        async with visit.client.listen(resources=["small://item/7"]):
            return True
    except SubscriptionUnsupported:
        return False


TABLE: Table = {
    "add": (calls("add", a=2, b=3), "5"),
    "bad arguments": (calls("add", a="two", b=3), Says("failed:", "valid integer")),
    "crash": (calls("crash"), Says("failed:")),
    "unknown tool": (calls("no-such-tool"), -32602),
    "unknown prompt": (code_of(lambda client: client.get_prompt("no-such-prompt")), -32602),
    "missing argument": (code_of(lambda client: client.get_prompt("greet")), -32602),
    "unknown resource": (code_of(lambda client: client.read_resource("small://no-such")), -32002),
    "listens": (listens, False),
}
IN_E: Table = {"unknown resource": (code_of(lambda client: client.read_resource("small://no-such")), -32602)}

AS_RESULT: Gaps = {"unknown tool": (Says("failed:", "no-such-tool"), "it makes a result of it, with isError")}
NO_CODE = "it answers whatever is raised with the code 0"
NO_CODES: Gaps = {"unknown prompt": (0, NO_CODE), "missing argument": (0, NO_CODE)}
NO_CODE_AT_ALL: Gaps = {**NO_CODES, "unknown resource": (0, NO_CODE)}
NEW_CODE: Gaps = {"unknown resource": (-32602, "it has the code of 2026-07-28")}
INTERNAL = "it says that this is its own fault"
GAPS: dict[tuple[str, str], Gaps] = {
    ("python-1.12.4", C): {**AS_RESULT, **NO_CODE_AT_ALL},
    ("python-1.30.0", D): {**AS_RESULT, **NO_CODE_AT_ALL},
    ("python-2.3.0", D): {**AS_RESULT, **NO_CODES, **NEW_CODE},
    ("python-2.3.0", E): {
        **AS_RESULT,
        "unknown prompt": (-32603, INTERNAL),
        "missing argument": (-32603, INTERNAL),
        "listens": (True, "it agrees to tell of any resource"),
    },
    ("fastmcp-4.1.2", D): {**AS_RESULT, **NEW_CODE, "missing argument": (-32603, INTERNAL)},
    ("fastmcp-4.1.2", E): {**AS_RESULT, "missing argument": (-32603, INTERNAL)},
}

# It takes a request of any size, where others take 4 MiB, and ends only when its calls do, or by a signal.
PATIENT = "python-1.12.4"


@pytest.mark.parametrize(("builder", "revision", "options"), BUILDERS)
async def test_what_a_client_sees_of_their_habits(
    builder: str, revision: str, options: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = {**TABLE, **(IN_E if revision == E else {})}
    async with served(builder, "stdio") as target, visiting(target, tmp_path, **options) as visit:
        assert visit.client.revision == revision
        await check(visit, table, GAPS[builder, revision])
        assert "no-such-tool" in await typed(visit)
    assert [each.getMessage() for each in caplog.records] == []


@pytest.mark.parametrize(
    ("builder", "revision", "options", "way"),
    [(*each, way) for each in BUILDERS for way in PATHS if (each[1], way) != (E, "sse")],  # which there is none of
)
async def test_what_is_too_large_for_a_server_costs_its_call_alone(
    builder: str, revision: str, options: Any, way: str, tmp_path: Path
) -> None:
    name = "x" * 5_000_000
    async with served(builder, way) as target, visiting(target, tmp_path, **options) as visit:
        client = visit.client
        if builder == PATIENT:
            assert name in (await client.get_prompt("greet", {"name": name})).messages[0].content.text  # type: ignore[union-attr]
        else:
            with pytest.raises(NoResponse, match=r"HTTP 413.*too large"):
                await client.get_prompt("greet", {"name": name})
        assert await client.call_tool("add", {"a": 2, "b": 3}, returns=int) == 5


@pytest.mark.parametrize(("builder", "revision", "options"), [each for each in BUILDERS if each[0] != PATIENT])
async def test_a_server_that_is_left_in_the_middle_of_a_call_ends_by_itself(
    builder: str, revision: str, options: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some still answer it then."""

    async def wait() -> None:
        with pytest.raises(SessionClosed):
            await visit.client.call_tool("wait")

    async with (
        served(builder, "stdio") as target,
        trio.open_nursery() as nursery,
        visiting(target, tmp_path, **options) as visit,
    ):
        nursery.start_soon(wait)
        while not await visit.client.call_tool("ledger", returns=list[str]):
            pass
    assert b"Traceback" not in b"".join(visit.errors)
    assert visit.client.deviations == ()
    assert [each.getMessage() for each in caplog.records] == []
