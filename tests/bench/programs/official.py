"""The server of the official Python SDK with the tools of the bench: ``official.py stdio|http TOOLS json|sse [works]``.

With `works` it also serves the requests of `tests.bench.works`.

Over HTTP it runs under uvicorn, with httptools and uvloop, and prints its port.  It runs in an environment of its own,
without the packages of this project.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import TextContent
from pydantic import Field

TRANSPORT, TOOLS, STYLE, *MORE = sys.argv[1:]
server = MCPServer("bench", log_level="ERROR")


@server.tool(structured_output=False)
async def echo(text: str) -> str:
    """Say the same again."""
    return text


@server.tool(structured_output=False)
async def wait(seconds: float) -> str:
    """Take that long."""
    await anyio.sleep(seconds)
    return "waited"


@server.tool(structured_output=False)
async def report(number: int, ctx: Context) -> str:
    """Report progress so many times."""
    for done in range(1, number + 1):
        await ctx.report_progress(done, number)
    return "reported"


async def forecast(city: str, days: int = 3, units: str = "metric") -> str:
    """One of many tools that make the list very long."""
    return city


for each in range(3, int(TOOLS)):
    title = f"The forecast by the station {each}"
    server.add_tool(forecast, name=f"forecast_{each}", title=title, structured_output=False)


# The works.


@dataclass
class Wind:
    speed: float
    direction: str


@dataclass
class Weather:
    city: str
    degrees: float
    humidity: int
    rain: bool
    wind: Wind


@dataclass
class Guest:
    name: Annotated[str, Field(min_length=1, max_length=100)]
    age: Annotated[int, Field(ge=0, le=150)]
    email: Annotated[str, Field(max_length=200)]


@dataclass
class Room:
    beds: Annotated[int, Field(ge=1, le=8)]
    floor: Annotated[int, Field(ge=-2, le=100)]
    view: Literal["sea", "garden"]


@dataclass
class Stay:
    nights: Annotated[int, Field(ge=1, le=30)]
    price: Annotated[float, Field(ge=0)]


def add_works() -> None:
    @server.tool(structured_output=False)
    async def blocks(city: str) -> list[TextContent]:
        """The weather in two blocks of content."""
        texts = (f"Weather in {city}", "Light wind from the west.")
        return [TextContent(type="text", text=each) for each in texts]

    @server.tool()
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    async def weather(city: str) -> Weather:
        """The weather as data."""
        return Weather(city, 21.5, 40, False, Wind(3.5, "west"))

    @server.tool(structured_output=False)
    async def book(
        guest: Guest, room: Room, stay: Stay, wishes: Annotated[list[str], Field(max_length=10)], breakfast: bool
    ) -> str:
        """Book a room."""
        return f"booked for {guest.name}"

    @server.resource("bench://note", name="note", mime_type="text/plain")
    async def note() -> str:
        """A text."""
        return "Mostly sunny, 21 degrees, light wind from the west."

    @server.prompt()
    async def greet(name: str) -> str:
        """Greet by name."""
        return f"Say hello to {name}."


if MORE:
    add_works()


def by_http() -> None:
    import uvicorn

    # Its default limit is smaller than the largest message of the bench.
    app = server.streamable_http_app(json_response=STYLE == "json", max_request_body_size=16 * 1024 * 1024)
    with socket.create_server(("127.0.0.1", 0), backlog=5000) as listener:
        print(listener.getsockname()[1], flush=True)
        # The subjects take turns, so connections may be idle for so long.
        quiet = {"log_level": "warning", "access_log": False, "timeout_keep_alive": 600}
        config = uvicorn.Config(app, loop="uvloop", http="httptools", **quiet)
        uvicorn.Server(config).run(sockets=[listener])


if TRANSPORT == "stdio":
    anyio.run(server.run_stdio_async, backend_options={"use_uvloop": True})
else:
    by_http()
