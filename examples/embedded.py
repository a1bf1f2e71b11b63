"""A Trio program that does its own work and at the same time serves any number of MCP clients.

python examples/embedded.py /tmp/house.sock       # a Unix socket
python examples/embedded.py 4000                  # or TCP, on this machine

Each line is one message, so `nc -U /tmp/house.sock` is a sufficient client.  Ctrl-C or SIGTERM ends the program.
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
    """The program's own work.  It does not depend on MCP."""

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
        """The temperature of the house.  Subscribe to get its changes."""
        return f"{house.degrees:.1f} °C"

    @server.tool
    async def set_temperature(degrees: Annotated[float, Field(ge=5, le=30)]) -> str:
        """Heat the house, or let it cool."""
        house.wanted = degrees
        return f"It is {house.degrees:.1f} °C, and will be {degrees:.1f} °C."

    return server


@asynccontextmanager
async def open_listeners(address: str) -> AsyncGenerator[list[trio.SocketListener], None]:
    if address.isdecimal():
        yield await trio.open_tcp_listeners(int(address), host="127.0.0.1")
        return
    socket = trio.socket.socket(trio.socket.AF_UNIX)
    await socket.bind(address)
    try:
        os.chmod(address, 0o600)  # only the owner may connect
        socket.listen()
        yield [trio.SocketListener(socket)]
    finally:
        os.unlink(address)


async def main(address: str) -> None:
    house = House()
    server = server_for(house)
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        # The connections are tasks of the inner nursery, so all of them have ended before the server ends.
        async with open_listeners(address) as listeners, server.running(), trio.open_nursery() as nursery:
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
