"""The cases of the long suite are collected for the long suite only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.speeds import ALL, LONG


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    long = config.getoption("speed") in (LONG, ALL)
    return True if collection_path.name == "test_server_long.py" and not long else None
