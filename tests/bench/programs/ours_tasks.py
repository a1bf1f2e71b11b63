"""Our server with a tool that runs as a task: ``ours_tasks.py json|orjson memory|sqlite|URL``, on stdio."""

from __future__ import annotations

import sys
import tempfile

CODEC, STORE = sys.argv[1:3]
if CODEC == "json":
    sys.modules["orjson"] = None  # type: ignore[assignment]  # as without the extra `speed`

from trio_mcp import Limits, Server  # noqa: E402
from trio_mcp.stores import MemoryStore, RedisStore, SQLiteStore, Store  # noqa: E402

with tempfile.TemporaryDirectory() as folder:
    store: Store
    match STORE:
        case "memory":
            store = MemoryStore()
        case "sqlite":
            store = SQLiteStore(f"{folder}/tasks.db")
        case url:
            store = RedisStore(url)
    server = Server("bench", version="1", store=store, limits=Limits(tasks=1_000_000))

    @server.tool(task="optional")
    async def echo(text: str) -> str:
        """Say the same again."""
        return text

    server.run()
