"""Tools that ask the user: with a form, and with a page that the user visits.

python examples/ask_user.py

Each handler runs once, from top to bottom, in every revision that has elicitation.  A client without it gets an error
that says so.
"""

import secrets
from dataclasses import dataclass
from typing import Annotated, Literal

from trio_mcp import Accepted, Context, Declined, Dismissed, Field, Server

server = Server("ask-user", version="1.0")


@dataclass
class Pizza:
    kind: Literal["margherita", "funghi", "marinara"]
    pieces: Annotated[int, Field(title="How many?", ge=1, le=10)] = 1
    remarks: Annotated[str | None, Field(title="Anything else?", max_length=200)] = None


@server.tool
async def order_pizza(ctx: Context) -> str:
    """Order pizza as the user wants it."""
    answer = await ctx.elicit("Which pizza shall it be?", Pizza)
    match answer:
        case Accepted(pizza):
            remarks = f" ({pizza.remarks})" if pizza.remarks else ""
            return f"Ordered: {pizza.pieces} {pizza.kind}{remarks}."
        case Declined():
            return "The user wants no pizza; do not ask again."
        case Dismissed():
            return "The user has not decided."


@server.tool
async def connect_calendar(ctx: Context) -> str:
    """Let the user give access to a calendar."""
    # Neither the client nor the model sees the data that the user enters on a page.
    page = f"https://calendar.example/connect?visit={secrets.token_urlsafe()}"
    if not ctx.supports("elicitation", "url"):
        return f"Please ask the user to open {page}"
    answer = await ctx.elicit_url("Your calendar asks you to sign in.", page)
    match answer:
        case Accepted():  # the user agrees to visit the page, but may not have signed in yet
            return "The user is about to sign in."
        case Declined() | Dismissed():
            return "The user does not want to sign in now."


if __name__ == "__main__":
    server.run()
