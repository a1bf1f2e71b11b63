"""Differences between SDKs, and how our client handles them.

The same small server is built with old and new versions of the official Python SDK and with FastMCP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.peers.behaviours import Contains
from tests.peers.installed import PEERS, PROGRAMS, needs, python_of
from tests.peers.listening import listening
from tests.peers.published_servers import Gaps, Table, Visit, check, error_code, tool_call, visiting
from trio_mcp import ToolFailed
from trio_mcp.errors import NoResponse, SessionClosed, SubscriptionUnsupported

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the server

PATHS = {"http": "/mcp", "sse": "/sse"}
C, D, E = "2025-06-18", "2025-11-25", "2026-07-28"

# The SDK, the revision that the client finds, and its options; an older revision than the newest is pinned.
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
    command = [str(python), str(PROGRAMS / "small_server.py"), way]
    if way == "stdio":
        yield command
        return
    async with listening(command) as origin:
        yield origin + PATHS[way]


async def typed_call_error(visit: Visit) -> str:
    """The message of `ToolFailed`: a result with isError is for a model; a call that wants a value raises."""
    with pytest.raises(ToolFailed) as failed:
        await visit.client.call_tool("no-such-tool", returns=int)
    return str(failed.value)


async def can_subscribe(visit: Visit) -> bool:
    try:
        async with visit.client.listen(resources=["small://item/7"]):
            return True
    except SubscriptionUnsupported:
        return False


TABLE: Table = {
    "add": (tool_call("add", a=2, b=3), "5"),
    "bad arguments": (tool_call("add", a="two", b=3), Contains("failed:", "valid integer")),
    "crash": (tool_call("crash"), Contains("failed:")),
    "unknown tool": (tool_call("no-such-tool"), -32602),
    "unknown prompt": (error_code(lambda client: client.get_prompt("no-such-prompt")), -32602),
    "missing argument": (error_code(lambda client: client.get_prompt("greet")), -32602),
    "unknown resource": (error_code(lambda client: client.read_resource("small://no-such")), -32002),
    "listens": (can_subscribe, False),
}
IN_E: Table = {"unknown resource": (error_code(lambda client: client.read_resource("small://no-such")), -32602)}

AS_RESULT: Gaps = {"unknown tool": (Contains("failed:", "no-such-tool"), "it answers with a result with isError")}
NO_CODE = "it answers each exception with the code 0"
NO_CODES: Gaps = {"unknown prompt": (0, NO_CODE), "missing argument": (0, NO_CODE)}
NO_CODE_AT_ALL: Gaps = {**NO_CODES, "unknown resource": (0, NO_CODE)}
NEW_CODE: Gaps = {"unknown resource": (-32602, "it uses the code of 2026-07-28")}
INTERNAL = "it reports an internal error"
GAPS: dict[tuple[str, str], Gaps] = {
    ("python-1.12.4", C): {**AS_RESULT, **NO_CODE_AT_ALL},
    ("python-1.30.0", D): {**AS_RESULT, **NO_CODE_AT_ALL},
    ("python-2.3.0", D): {**AS_RESULT, **NO_CODES, **NEW_CODE},
    ("python-2.3.0", E): {
        **AS_RESULT,
        "unknown prompt": (-32603, INTERNAL),
        "missing argument": (-32603, INTERNAL),
        "listens": (True, "it accepts subscriptions of any resource"),
    },
    ("fastmcp-4.1.2", D): {**AS_RESULT, **NEW_CODE, "missing argument": (-32603, INTERNAL)},
    ("fastmcp-4.1.2", E): {**AS_RESULT, "missing argument": (-32603, INTERNAL)},
}

# It accepts requests of any size; the others accept 4 MiB.  It exits only after its calls have ended, or by a signal.
NO_LIMIT = "python-1.12.4"


@pytest.mark.parametrize(("builder", "revision", "options"), BUILDERS)
async def test_results_and_errors_of_a_small_sdk_server(
    builder: str, revision: str, options: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = {**TABLE, **(IN_E if revision == E else {})}
    async with served(builder, "stdio") as target, visiting(target, tmp_path, **options) as visit:
        assert visit.client.revision == revision
        await check(visit, table, GAPS[builder, revision])
        assert "no-such-tool" in await typed_call_error(visit)
    assert [each.getMessage() for each in caplog.records] == []


@pytest.mark.parametrize(
    ("builder", "revision", "options", "way"),
    [(*each, way) for each in BUILDERS for way in PATHS if (each[1], way) != (E, "sse")],  # 2026-07-28 has no HTTP+SSE
)
async def test_a_request_that_is_too_large_fails_only_its_call(
    builder: str, revision: str, options: Any, way: str, tmp_path: Path
) -> None:
    name = "x" * 5_000_000
    async with served(builder, way) as target, visiting(target, tmp_path, **options) as visit:
        client = visit.client
        if builder == NO_LIMIT:
            assert name in (await client.get_prompt("greet", {"name": name})).messages[0].content.text  # type: ignore[union-attr]
        else:
            with pytest.raises(NoResponse, match=r"HTTP 413.*too large"):
                await client.get_prompt("greet", {"name": name})
        assert await client.call_tool("add", {"a": 2, "b": 3}, returns=int) == 5


@pytest.mark.parametrize(("builder", "revision", "options"), [each for each in BUILDERS if each[0] != NO_LIMIT])
async def test_a_server_exits_after_the_client_closes_during_a_call(
    builder: str, revision: str, options: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some servers still answer the call then."""

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
