"""Our server for the requests of `tests.bench.works`: ``ours_works.py json|orjson stdio|http``.

The other servers have the same tools.  It also has `echo`, and `announce`, which notifies listeners that the list of
tools has changed.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

CODEC, TRANSPORT = sys.argv[1], sys.argv[2]
if CODEC == "json":
    sys.modules["orjson"] = None  # type: ignore[assignment]  # as without the extra `speed`

from trio_mcp import Field, Server  # noqa: E402
from trio_mcp.types import TextContent  # noqa: E402

server = Server("bench", version="1")


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


@server.tool
async def echo(text: str) -> str:
    """Say the same again."""
    return text


@server.tool
async def blocks(city: str) -> list[TextContent]:
    """The weather in two blocks of content."""
    return [TextContent(f"Weather in {city}"), TextContent("Light wind from the west.")]


@server.tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool
async def weather(city: str) -> Weather:
    """The weather as data."""
    return Weather(city, 21.5, 40, False, Wind(3.5, "west"))


@server.tool
async def book(
    guest: Guest, room: Room, stay: Stay, wishes: Annotated[list[str], Field(max_length=10)], breakfast: bool
) -> str:
    """Book a room."""
    return f"booked for {guest.name}"


@server.tool
async def announce() -> str:
    """Tell that the list of tools has changed."""
    server.notify_list_changed("tools")
    return "announced"


@server.resource("bench://note", name="note", mime_type="text/plain")
async def note() -> str:
    """A text."""
    return "Mostly sunny, 21 degrees, light wind from the west."


@server.prompt
async def greet(name: str) -> str:
    """Greet by name."""
    return f"Say hello to {name}."


if __name__ == "__main__":
    if TRANSPORT == "stdio":
        server.run()
    else:
        os.dup2(1, 2)  # the server prints its port on standard error
        server.run(http="127.0.0.1:0")
