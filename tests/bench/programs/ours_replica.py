"""One replica of our server, with a tool that announces a change: ``ours_replica.py json|orjson none|FILE|URL``."""

from __future__ import annotations

import os
import sys

CODEC, STORE = sys.argv[1:3]
if CODEC == "json":
    sys.modules["orjson"] = None  # type: ignore[assignment]  # as without the extra `speed`

from trio_mcp import Server  # noqa: E402
from trio_mcp.stores import RedisStore, SQLiteStore, Store  # noqa: E402

store: Store | None
match STORE:
    case "none":
        store = None
    case path if path.startswith("/"):
        store = SQLiteStore(path)
    case url:
        store = RedisStore(url)
server = Server("bench", version="1", store=store, state_keys=[bytes(32)])


@server.tool
async def announce() -> str:
    """Tell that the list of tools has changed."""
    server.notify_list_changed("tools")
    return "announced"


if __name__ == "__main__":
    os.dup2(1, 2)  # the server prints its port on standard error
    server.run(http="127.0.0.1:0")
