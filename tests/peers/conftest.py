"""Settings for all visits.  At the end of a run their results are written into `INTEROP.md`."""

from __future__ import annotations

import math

import pytest

from tests.peers.interop import write_file


@pytest.fixture(autouse=True)
def no_warning_about_a_slow_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each log record of our client counts as a fault of the server.  A slow start on a busy machine is no fault."""
    monkeypatch.setattr("trio_mcp.client.session._SILENCE", math.inf)


def pytest_sessionfinish() -> None:
    write_file()
