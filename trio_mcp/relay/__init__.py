"""The relay: a server that forwards requests to another server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.relay.relay import open_relay as open_relay
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "relay.relay": "open_relay",
        },
        "trio_mcp",
    )
