"""Virtual time for tasks: their records have the time of the wall clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

# The clock of the records and the threads of SQLite are internal.
from trio_mcp.stores import rows, sqlite_file


@pytest.fixture(autouse=True)
def virtual_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock follows the clock of the test."""
    monkeypatch.setattr(rows, "wall", lambda: 1e9 + trio.current_time())


@pytest.fixture
def sqlite_in_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run SQLite in the event loop, because virtual time does not wait for a thread."""

    async def run(self: sqlite_file.SQLiteFile, job: Callable[..., Any], *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return job(*arguments)

    monkeypatch.setattr(sqlite_file.SQLiteFile, "_in_thread", run)
