"""Fixtures: each store, and the Redis server for all tests."""

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
    """One server for all tests, with another name in each test.  A cluster refuses commands with keys of two slots."""
    with redis_server(*cluster()) as server:
        server.ask("CLUSTER ADDSLOTSRANGE 0 16383")
        while b"cluster_state:ok" not in server.ask("CLUSTER INFO"):
            time.sleep(0.01)
        yield server


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.full)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A function that makes the store of another process.  Processes share a file; in memory they share the object."""
    memory = MemoryStore(max_bytes=MOST)
    if request.param == "memory":
        return lambda: memory
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        return partial(RedisStore, server.url, name=secrets.token_hex(8), max_bytes=MOST)
    return partial(SQLiteStore, tmp_path / "store.db", max_bytes=MOST)
