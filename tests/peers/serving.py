"""The everything server over HTTP, with the options of a test: ``python -m tests.peers.serving OPTIONS``.

The options are those of `serve_http`, in JSON, and ``page_size``.  The server listens on a free port of loopback and
prints its URLs in one line of JSON.  SIGTERM ends it; it then prints how many calls and listeners were still active.
"""

from __future__ import annotations

import json
import signal
import sys
from functools import partial
from typing import Any

import trio

from tests.fixtures.everything_server import make_server
from trio_mcp import serve_http


async def main(page_size: int | None = None, **options: Any) -> None:
    server = make_server(page_size)
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            address = await nursery.start(partial(serve_http, server, **options))
            urls = {"url": address.url, "sse_url": address.sse_url, "websocket_url": address.websocket_url}
            print(json.dumps(urls), flush=True)
            await anext(signals)
        left = server.statistics()
        print(json.dumps({"running": left.running, "parked": left.parked, "listeners": left.listeners}), flush=True)
        async with server.draining(2):
            pass
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(partial(main, **json.loads(sys.argv[1])))
