"""A Trio program that does its own work and serves MCP over HTTP: one URL for clients of every revision.

    python examples/over_http.py 3000    # http://127.0.0.1:3000/mcp, and WebSockets at ws://127.0.0.1:3000/ws

A script that only serves calls ``server.run(http="127.0.0.1:3000")`` and needs no `main`.  Ctrl-C or SIGTERM ends this
program; running calls get five seconds to finish.
"""

import signal
import sys
from typing import Annotated

import trio

from trio_mcp import Context, Field, Server, serve_http

BEATS = "heart://beats"

server = Server("heart", version="1.0", instructions="Subscribe to heart://beats to hear each beat.")
heart = {"beats": 0}


async def beat() -> None:
    """The program's own work.  It does not depend on the clients."""
    while True:
        await trio.sleep(0.1)
        heart["beats"] += 1
        server.notify_resource_updated(BEATS)


@server.resource(BEATS, mime_type="text/plain")
async def beats() -> str:
    """The number of beats."""
    return str(heart["beats"])


@server.tool
async def count(beats: Annotated[int, Field(ge=1, le=1000)], ctx: Context) -> str:
    """Wait for this number of beats."""
    first = heart["beats"]
    while (counted := heart["beats"] - first) < beats:
        await ctx.progress(counted, beats)  # sent at once, as an event of the response
        await trio.sleep(0.1)
    return f"{beats} beats"


async def main(port: int) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            address = await nursery.start(serve_http, server, "127.0.0.1", port)
            print("listening at", address.url, flush=True)
            await anext(signals)
            async with server.draining(5):
                print("no new calls", flush=True)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trio.run(main, int(sys.argv[1]))
