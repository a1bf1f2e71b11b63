"""Stores: tasks, and other rows and streams that outlive a call or a process, and messages between processes.

`MemoryStore()` is the default of a server.  `SQLiteStore("tasks.db")` survives the process.
`RedisStore("redis://host")` is for processes on several machines.  `Store` is the protocol for a store of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.stores.memory import MemoryStore as MemoryStore
    from trio_mcp.stores.redis import RedisStore as RedisStore
    from trio_mcp.stores.rows import Resync as Resync
    from trio_mcp.stores.rows import Row as Row
    from trio_mcp.stores.rows import Store as Store
    from trio_mcp.stores.rows import StoreFailed as StoreFailed
    from trio_mcp.stores.rows import StoreFull as StoreFull
    from trio_mcp.stores.sqlite import SQLiteStore as SQLiteStore
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "memory": "MemoryStore",
            "redis": "RedisStore",
            "rows": "Resync Row Store StoreFailed StoreFull",
            "sqlite": "SQLiteStore",
        },
    )
