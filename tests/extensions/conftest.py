"""Virtual time for tasks, whose records have the time of the wall clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

# The clock of the records and the threads of SQLite are inner parts.
from trio_mcp.stores import rows, sqlite_file


@pytest.fixture(autouse=True)
def virtual_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock follows the clock of the test."""
    monkeypatch.setattr(rows, "wall", lambda: 1e9 + trio.current_time())


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """For virtual time, which runs on while a thread works: SQLite works in the event loop."""

    async def run(self: sqlite_file.SQLiteFile, job: Callable[..., Any], *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return job(*arguments)

    monkeypatch.setattr(sqlite_file.SQLiteFile, "_in_thread", run)
