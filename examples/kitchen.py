"""A server with an example of each server feature; `client.py`, in the same folder, uses all of them.

python examples/kitchen.py
"""

from dataclasses import dataclass
from typing import Annotated

import trio

from trio_mcp import Accepted, CacheHints, Context, Field, ResourceNotFound, Server, ToolError
from trio_mcp.types import ToolAnnotations

MENU = "menu://today"

server = Server("kitchen", version="1.0", instructions="Read menu://today first.")
menu = ["salad"]
diary: list[str] = []
stove = trio.Lock()


@dataclass
class Dish:
    name: str
    minutes: int
    spicy: bool = False


DISHES = {dish.name: dish for dish in (Dish("salad", 10), Dish("laksa", 60, spicy=True), Dish("lasagne", 90))}


# Tools: actions for the model.


@server.tool(title="Cook a dish", annotations=ToolAnnotations(destructive_hint=False))
async def cook(name: str, ctx: Context) -> Dish:
    """Cook a dish, step by step."""
    if name not in DISHES:
        raise ToolError(f"Nobody here cooks {name}; try {', '.join(DISHES)}.")
    await ctx.log("info", f"{name} is begun")
    for done, step in enumerate(("wash", "chop", "heat")):
        await ctx.progress(done, 3, step)
    return DISHES[name]


@server.tool(task="optional")
async def bake(name: str) -> str:
    """Bake bread or a cake, as a task if the client supports tasks."""
    await trio.sleep(0.1)
    return f"{name} is done"


@server.tool
async def simmer(ctx: Context) -> None:
    """Keep the soup warm until the call is cancelled."""
    async with stove:
        try:
            await ctx.progress(0, message="it simmers")
            await trio.sleep_forever()
        finally:  # the client has cancelled the call or disconnected
            diary.append("the soup was taken off the stove")


@server.tool
async def read_diary() -> list[str]:
    """The diary of the kitchen, read when the stove is free."""
    async with stove:
        return diary


@server.tool
async def put_on_the_menu(name: str) -> str:
    """Offer a dish today."""
    menu.append(name)
    server.notify_resource_updated(MENU)  # for the clients that listen to this resource
    return f"There is {name} today."


# Tools that ask the user (with a form or a page), the model of the client, or the client.


@dataclass
class Table:
    guests: Annotated[int, Field(title="How many?", ge=1, le=12)]
    outside: bool = False


@server.tool
async def reserve(ctx: Context) -> str:
    """Reserve a table."""
    match await ctx.elicit("For how many, and where?", Table):
        case Accepted(Table(guests, outside)):
            return f"A table for {guests} {'outside' if outside else 'inside'}."
        case _:  # Declined, or Dismissed
            return "No table."


@server.tool
async def pay(ctx: Context) -> str:
    """Send the guest to the page of the bank."""
    match await ctx.elicit_url("The bill, please.", "https://bank.example/pay?bill=17"):
        case Accepted():
            return "The guest has gone to pay."
        case _:
            return "The guest washes the dishes."


@server.tool
async def invent(ctx: Context) -> str:
    """Ask the model of the client to invent a dish."""
    answer = await ctx.sample("Name a dish of rice and lime.", max_tokens=20)
    return f"{answer.model} says: {answer.blocks[0]}"


@server.tool
async def cookbooks(ctx: Context) -> list[str]:
    """The folders with recipes that the client exposes."""
    return [root.uri for root in await ctx.roots()]


# Resources: data for the model.  Prompts: templates for the user.  Completions: values for the arguments of both.


@server.resource(MENU, cache=CacheHints(ttl_ms=60_000))
def todays_menu() -> str:
    """The dishes of today."""
    return ", ".join(menu)


@server.resource("recipes://{dish}", mime_type="text/markdown")
def recipe(dish: str) -> str:
    """The recipe of a dish."""
    if dish not in DISHES:
        raise ResourceNotFound(f"recipes://{dish}")
    return f"# {dish}\n\nIt takes {DISHES[dish].minutes} minutes."


@server.prompt
def shopping_list(dish: str, guests: str = "2") -> str:
    """A shopping list for a dish."""
    return f"List what {dish} for {guests} takes."


@server.completion("shopping_list", "dish")
@server.completion("recipes://{dish}")
async def dishes(value: str) -> list[str]:
    return [name for name in DISHES if name.startswith(value)]


if __name__ == "__main__":
    server.run()
