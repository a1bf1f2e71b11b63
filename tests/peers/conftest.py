"""At the end of a run, what its visits have seen goes into `INTEROP.md`."""

from __future__ import annotations

from tests.peers.interop import write_file


def pytest_sessionfinish() -> None:
    write_file()
