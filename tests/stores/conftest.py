"""The stores, one after the other."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.redis_server import RedisServer, cluster, redis_server
from tests.stores.shared import MOST, Make
from trio_mcp.stores import MemoryStore, RedisStore, SQLiteStore


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """One for all tests, each with stores of its own name.  As a cluster it refuses steps with keys of two slots."""
    with redis_server(*cluster()) as server:
        server.ask("CLUSTER ADDSLOTSRANGE 0 16383")
        while b"cluster_state:ok" not in server.ask("CLUSTER INFO"):
            time.sleep(0.01)
        yield server


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.full)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes the store of one more process: the file is shared, and the store in memory is the same object."""
    memory = MemoryStore(max_bytes=MOST)
    if request.param == "memory":
        return lambda: memory
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        return partial(RedisStore, server.url, name=secrets.token_hex(8), max_bytes=MOST)
    return partial(SQLiteStore, tmp_path / "store.db", max_bytes=MOST)
