"""A server for the tests of the command line: ``servers.py``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import trio

from trio_mcp import Accepted, Context, Field, Server, TextContent
from trio_mcp.types import ImageContent

server = Server("weather", version="1.0", instructions="Ask for a city.")


@dataclass
class Forecast:
    city: str
    degrees: float


@dataclass
class Order:
    size: Literal["small", "large"]
    count: Annotated[int, Field(ge=1)] = 1
    gift: bool = False


@server.tool
async def forecast(city: str, days: Annotated[int, Field(ge=0, le=14)] = 2, *, ctx: Context) -> Forecast:
    """The forecast for a city.

    Args:
        city: the name of the city
        days: how many days
    """
    for day in range(days):
        await ctx.progress(day + 1, days, message=f"day {day + 1}")
    await ctx.log("info", f"asked for {city}")
    return Forecast(city, 12.5)


@server.tool
async def order(ctx: Context) -> str:
    """Order an umbrella."""
    match await ctx.elicit("Which umbrella?", Order):
        case Accepted(Order(size, count, gift)):
            return f"{count} {size}{', wrapped' if gift else ''}"
    return "no order"


@server.tool
def picture() -> list[TextContent | ImageContent]:
    """A picture."""
    return [TextContent("a picture"), ImageContent(b"hello", "image/png")]


@server.tool
def fails() -> str:
    """A tool that fails."""
    raise ValueError("a secret reason")


@server.tool
async def forever(ctx: Context) -> str:
    """A call that ends only by a cancellation."""
    try:
        await ctx.progress(0, message="begun")
        await trio.sleep_forever()
    finally:
        sys.stderr.write("cancelled\n")
    return ""


@server.resource("notes://today")
def today() -> str:
    """Notes of today."""
    return "Buy milk"


@server.prompt
def review(code: str, style: str = "short") -> str:
    """Review code."""
    return f"Review {code}, {style}"


@server.completion("review", "style")
def styles(value: str) -> list[str]:
    return [each for each in ("short", "long") if each.startswith(value)]
