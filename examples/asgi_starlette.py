"""A Starlette application with its own pages and an MCP server under a prefix: http://127.0.0.1:8000/tools/mcp

    pip install starlette hypercorn
    python examples/asgi_starlette.py 8000
    hypercorn --worker-class trio asgi_starlette:app    # the same, in the folder of this file; the server needs Trio

It serves clients of every revision, over HTTP and over WebSocket (/tools/ws).
"""

import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from trio_mcp import Server
from trio_mcp.asgi import AsgiApp

server = Server("guestbook", version="1.0")
# To serve other machines: AsgiApp(server, public_url="https://example.com/tools").
mcp = AsgiApp(server)
guests: list[str] = []


@server.tool
async def sign(name: str) -> str:
    """Sign the guestbook."""
    guests.append(name)
    return f"{name} is guest number {len(guests)}."


async def page(request: Request) -> PlainTextResponse:
    return PlainTextResponse("\n".join(guests))


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
    async with mcp.running():  # Starlette does not pass its lifespan on to mounted applications
        yield


app = Starlette(routes=[Route("/", page), Mount("/tools", mcp)], lifespan=lifespan)


async def main(port: int) -> None:
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.errorlog = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:

        async def wait_for_shutdown() -> None:
            await anext(signals)
            async with server.draining(5):  # running calls may finish before Hypercorn closes their connections
                pass

        async with trio.open_nursery() as nursery:
            serving = partial(serve, app, config, shutdown_trigger=wait_for_shutdown)  # type: ignore[arg-type]
            (url,) = await nursery.start(serving)
            print("listening at", f"{url}/tools/mcp", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trio.run(main, int(sys.argv[1]))
