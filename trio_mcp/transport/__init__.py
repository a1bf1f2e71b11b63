"""Trio code for both roles: nurseries, workers, writers, stdio, child processes, HTTP connections, paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.transport.child import *
    from trio_mcp.transport.dial import *
    from trio_mcp.transport.http_pool import *
    from trio_mcp.transport.nursery import *
    from trio_mcp.transport.paths import *
    from trio_mcp.transport.stdio import *
    from trio_mcp.transport.wire import *
    from trio_mcp.transport.workers import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "child": "Child Command Environment MINIMAL ServerExited name_of start_child",
            "dial": "CONNECTING Connect Origin Proxies Proxy is_this_machine locate",
            "http_pool": "HttpPool HttpReply IDLE_SECONDS ReplyBroken ReplyTooLong",
            "nursery": "Block block check_trio contains_only open_nursery sole",
            "paths": "PathRefused Roots below file_path",
            "stdio": "Stderr block_signals owned_stdio unhindered_stderr",
            "wire": ("CLOSING Duplex Framing GONE Lines SessionHandler Tap Wire close_stream keep_alive write_now"),
            "workers": (
                "HandlerEscape LeftOpen RunStopped Work Worker WorkerPool called contained scope_of stale watchdog"
            ),
        },
    )
