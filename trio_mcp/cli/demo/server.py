"""An observatory: the server of the demo.

    python -m trio_mcp.cli.demo.server

Its lines are short because the demo shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import trio

from trio_mcp import Accepted, Context, Field, Server, ToolError

__all__ = ["SKY", "Booking", "Star", "expose", "find", "report", "reserve", "server", "tonight"]

SKY = "sky://tonight"

server = Server("observatory", version="1.0")
telescope = trio.Lock()
diary: list[str] = []
sightings = ["Saturn", "the Moon"]


@dataclass
class Star:
    name: str
    light_years: float


STARS = {star.name: star for star in (Star("Vega", 25.0), Star("Sirius", 8.6), Star("Deneb", 2615.0))}


@server.tool
async def find(name: str) -> Star:
    """Look a star up."""
    if name not in STARS:
        raise ToolError(f"No such star; try {', '.join(STARS)}.")
    return STARS[name]


@server.tool
async def expose(frames: int, ctx: Context) -> str:
    """Take a picture, frame by frame."""
    async with telescope:
        taken = 0
        try:
            while taken < frames:
                await trio.sleep(0.05)
                taken += 1
                await ctx.progress(taken, frames)
        finally:  # also when the client cancels
            diary.append(f"took {taken} of {frames} frames")
    return f"a picture of {frames} frames"


@server.tool
async def last_entry() -> str:
    """Read the diary's last entry, once the telescope is free."""
    async with telescope:
        return diary[-1]


@dataclass
class Booking:
    night: Literal["tonight", "tomorrow"]
    hours: Annotated[int, Field(ge=1, le=8)] = 2


@server.tool
async def reserve(ctx: Context) -> str:
    """Reserve the telescope."""
    match await ctx.elicit("Which night?", Booking):
        case Accepted(booking):
            return f"{booking.hours} hours {booking.night}, then."
        case _:  # Declined, or Dismissed
            return "Nothing is reserved."


@server.resource(SKY)
def tonight() -> str:
    """The objects visible tonight."""
    return ", ".join(sightings)


@server.tool
async def report(sighting: str) -> str:
    """Report a sighting."""
    sightings.append(sighting)
    server.notify_resource_updated("sky://tonight")
    return "Thank you!"


if __name__ == "__main__":
    server.run()
