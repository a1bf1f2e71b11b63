"""A Trio program that does its own work, and lets any number of MCP clients look and take part meanwhile.

python examples/embedded.py /tmp/house.sock       # a Unix socket
python examples/embedded.py 4000                  # or TCP, on this machine

One message a line; `nc -U /tmp/house.sock` is enough to talk to it.  Ctrl-C or SIGTERM ends it.
"""

import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated

import trio

from trio_mcp import Field, Server, serve_stream

TEMPERATURE = "house://temperature"


class House:
    """What the program is about; it knows nothing of MCP."""

    def __init__(self) -> None:
        self.degrees = self.wanted = 18.0

    async def heat(self, changed: Callable[[], object]) -> None:
        while True:
            await trio.sleep(0.1)
            if self.degrees != self.wanted:
                self.degrees += max(-0.5, min(0.5, self.wanted - self.degrees))
                changed()


def server_for(house: House) -> Server:
    server = Server("house", version="1.0")

    @server.resource(TEMPERATURE, mime_type="text/plain")
    async def temperature() -> str:
        """How warm it is; subscribe to hear when that changes."""
        return f"{house.degrees:.1f} °C"

    @server.tool
    async def set_temperature(degrees: Annotated[float, Field(ge=5, le=30)]) -> str:
        """Heat the house, or let it cool."""
        house.wanted = degrees
        return f"It is {house.degrees:.1f} °C, and will be {degrees:.1f} °C."

    return server


@asynccontextmanager
async def listening(place: str) -> AsyncGenerator[list[trio.SocketListener], None]:
    if place.isdecimal():
        yield await trio.open_tcp_listeners(int(place), host="127.0.0.1")
        return
    socket = trio.socket.socket(trio.socket.AF_UNIX)
    await socket.bind(place)
    try:
        os.chmod(place, 0o600)  # who may connect
        socket.listen()
        yield [trio.SocketListener(socket)]
    finally:
        os.unlink(place)


async def main(place: str) -> None:
    house = House()
    server = server_for(house)
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        # The connections are tasks of the inner nursery, so that all have ended when the server does.
        async with listening(place) as listeners, server.running(), trio.open_nursery() as nursery:
            nursery.start_soon(house.heat, partial(server.notify_resource_updated, TEMPERATURE))
            await nursery.start(trio.serve_listeners, partial(serve_stream, server), listeners)
            print("listening on", listeners[0].socket.getsockname(), flush=True)
            await anext(signals)
            print("ended with", server.statistics().connections, "clients connected")
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trio.run(main, sys.argv[1])
