"""What holds for all visits.  At the end of a run what they have seen goes into `INTEROP.md`."""

from __future__ import annotations

import math

import pytest

from tests.peers.interop import write_file


@pytest.fixture(autouse=True)
def a_server_that_is_slow_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """What our client logs is what a server does wrong; that a busy machine keeps it from starting is not."""
    monkeypatch.setattr("trio_mcp.client.session._SILENCE", math.inf)


def pytest_sessionfinish() -> None:
    write_file()
