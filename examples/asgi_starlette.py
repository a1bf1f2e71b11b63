"""A Starlette application with pages of its own, and an MCP server under a prefix: http://127.0.0.1:8000/tools/mcp

    pip install starlette hypercorn
    python examples/asgi_starlette.py 8000
    hypercorn --worker-class trio asgi_starlette:app    # or so, in its folder; Trio is what the server runs on

Clients of HTTP and WebSocket (/tools/ws) are served, whichever revision they speak.
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
# To be asked from elsewhere: AsgiApp(server, public_url="https://example.com/tools").
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
    async with mcp.running():  # Starlette does not tell what is mounted when it starts and ends
        yield


app = Starlette(routes=[Route("/", page), Mount("/tools", mcp)], lifespan=lifespan)


async def main(port: int) -> None:
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.errorlog = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:

        async def asked_to_end() -> None:
            await anext(signals)
            async with server.draining(5):  # calls that run are finished before Hypercorn hangs up
                pass

        async with trio.open_nursery() as nursery:
            serving = partial(serve, app, config, shutdown_trigger=asked_to_end)  # type: ignore[arg-type]
            (url,) = await nursery.start(serving)
            print("listening at", f"{url}/tools/mcp", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trio.run(main, int(sys.argv[1]))
