"""The server's half of the contract: the tests of `tests/server` with the mark `contract`, over every transport.

The default suite has the two newest revisions; over HTTP+SSE it has 2024-11-05, the revision of that transport, and
2025-11-25.
"""

from __future__ import annotations

from pathlib import Path

from trio.testing import MockClock

from tests.contract.cases import EXCEPTIONS, MODULES, copies, over_transports
from tests.server import raw_client
from tests.server.raw_client import connected, every_revision
from trio_mcp import Server

globals().update(copies(contract=True))


@every_revision
async def megabyte(revision: str, autojump_clock: MockClock) -> None:
    server, text = Server("large"), "\u00e6\U0001f3ba\u2028\n" * 2**17

    @server.tool
    async def turn(text: str) -> str:
        return text[::-1]

    async with connected(server, revision) as client:
        result = await client.call("tools/call", {"name": "turn", "arguments": {"text": text}})
        assert result["content"][0]["text"] == text[::-1]


test_a_megabyte_is_sent_in_both_directions = over_transports(megabyte, {})


def test_each_module_with_a_contract_test_is_in_modules() -> None:
    files = Path(raw_client.__file__).parent.glob("test_*.py")
    marked = {file.stem.removeprefix("test_") for file in files if "@pytest.mark.contract" in file.read_text()}
    assert marked - MODULES.keys() == set()


def test_each_exception_names_a_test() -> None:
    names = {name.removeprefix("test_") for module in MODULES.values() for name in vars(module)}
    assert EXCEPTIONS.keys() - names == set()
