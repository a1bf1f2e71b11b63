"""A client that uses all that a client has, at a server with one of everything (`kitchen.py`), and prints what came.

    python examples/client.py               # in the newest revision
    python examples/client.py 2024-11-05    # in an older one: what that lacks says so, and the rest goes on

`look.py` is for servers of other people; this is for reading.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import trio

from trio_mcp import Client, McpError, RequestError, ToolFailed, connect_client, open_client
from trio_mcp.types import (
    ClientOptions,
    FormElicitationRequest,
    LoggingMessageParams,
    PromptReference,
    ResourceReference,
    SamplingRequest,
    UrlElicitationRequest,
)

HERE = Path(__file__).resolve().parent
KITCHEN = [sys.executable, str(HERE / "kitchen.py")]  # or a URL, a Server, a stream
MENU = "menu://today"


@dataclass
class Dish:
    name: str
    minutes: int
    spicy: bool = False


# What the server may ask, and tell.  What is not given to the client is not declared, and never asked.


async def fill_in(form: FormElicitationRequest) -> dict[str, object]:
    print(f"  the server asks: {form.message} {', '.join(form.fields)}; where nothing is said: {dict(form.defaults)}")
    return {"guests": 4, "outside": True}  # or None: the user has closed the form; or Declined()


def visit(page: UrlElicitationRequest) -> bool:
    print(f"  the server asks: {page.message} {page.url} at {page.host} {list(page.warnings)}")
    return True  # the user agrees to go there


def think(request: SamplingRequest) -> tuple[str, str]:
    print(f"  the server asks for at most {request.params.max_tokens} tokens")
    return "khao man manao", "a model of ours"  # what it says, and which it is


def hear(message: LoggingMessageParams) -> None:
    print(f"  the server logs, at {message.level}: {message.data}")


OPTIONS: ClientOptions = {
    "name": "guest",
    "version": "1.0",
    "elicitation": fill_in,
    "elicitation_url": visit,
    "sampling": think,
    "roots": [HERE],
    "on_log": hear,
    "log_level": "info",
    "tasks": True,
    "meta": lambda: {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
}


async def introduce(client: Client) -> None:
    """Who is there, and what was agreed on"""
    print(f"  {client.server['name']} {client.server['version']} speaks {client.revision}: {client.negotiation.why}")
    print(f"  it has {', '.join(sorted(client.capabilities))}, and advises: {client.instructions}")


async def list_everything(client: Client) -> None:
    """All lists, page after page"""
    print("  tools:", ", ".join([tool.name for tool in await client.list_tools()]))
    print("  resources:", ", ".join([resource.uri for resource in await client.list_resources()]))
    print("  templates:", ", ".join([template.uri_template for template in await client.list_resource_templates()]))
    print("  prompts:", ", ".join([prompt.name for prompt in await client.list_prompts()]))
    first = await client.list_tools_page()  # one page, for who wants to turn them by hand
    print(f"  the first page has {len(first.tools)} tools; the next: {first.next_cursor}")


async def call(client: Client) -> None:
    """A call, with its value as a type, and its progress"""
    dish = await client.call_tool("cook", {"name": "laksa"}, returns=Dish, on_progress=lambda *step: print(" ", *step))
    print(f"  {dish}")


async def follow(client: Client) -> None:
    """The same beside a block, which iterates over the progress"""
    async with client.stream_tool("cook", {"name": "salad"}) as following:
        async for report in following:
            print(f"  {report.progress:g} of {report.total} {report.message or ''}")
        result = await following.result()
    print(f"  {result.content[0]}")


async def come_back(client: Client) -> None:
    """A call that outlives its request: a task, which another client of the same user may open by its id"""
    started = await client.start_task("bake", {"name": "bread"})
    task = client.open_task(started.id) if started.id else started  # without tasks the call has ended already
    result = await task.result()
    print(f"  {result.content[0]}")


async def extend(client: Client) -> None:
    """What the protocol does not have: extensions of the server, and a notification of our own"""
    print(f"  extensions: {', '.join(client.extensions)}; of greetings: {client.extension('com.example/greet')}")
    await client.notify("com.example/knock", {"times": 2})


async def give_up(client: Client) -> None:
    """A timeout is a cancel scope: the handler is cancelled, too"""
    with trio.CancelScope() as patience:  # or trio.move_on_after(5); this one begins once the soup is on the stove

        def wait_a_moment(*step: object) -> None:
            patience.deadline = trio.current_time() + 0.2

        await client.call_tool("simmer", on_progress=wait_a_moment)
    if client.has_unanswered_cancellations:  # the handler may still be clearing up, which the server does not tell
        await trio.lowlevel.checkpoint()
    diary = await client.call_tool("read_diary", returns=list[str])
    print(f"  given up: {patience.cancelled_caught}; the diary: {', '.join(diary)}")


async def fail(client: Client) -> None:
    """What goes wrong"""
    result = await client.call_tool("cook", {"name": "stones"})  # the model's mistake: a result, for the model to read
    print(f"  is_error: {result.is_error}, {result.content[0]}")
    try:
        await client.call_tool("cook", {"name": "stones"}, returns=Dish)
    except ToolFailed as error:
        print(f"  {error}")
    try:
        await client.read_resource("recipes://stones")
    except RequestError as error:
        print(f"  {error.code}: {error}, {error.data}")


async def read(client: Client) -> None:
    """Resources, prompts, and completions of their arguments"""
    for uri in (MENU, "recipes://laksa"):
        print(f"  {(await client.read_resource(uri)).contents[0]}")
    print(f"  {(await client.get_prompt('shopping_list', {'dish': 'laksa', 'guests': '3'})).messages[0]}")
    for ref in (PromptReference("shopping_list"), ResourceReference("recipes://{dish}")):
        print(f"  la... is {list((await client.complete(ref, 'dish', 'la')).values)}")


async def be_asked(client: Client) -> None:
    """Tools that ask: the user by a form, and by a page; the model; the client"""
    for tool in ("reserve", "pay", "invent", "cookbooks"):
        print(f"  {tool}: {(await client.call_tool(tool)).content[0]}")
    await client.set_roots([HERE.parent])
    print(f"  cookbooks, from now on: {(await client.call_tool('cookbooks')).content[0]}")


async def listen(client: Client) -> None:
    """What changes, for as long as a block"""
    async with client.listen(tools=True, resources=[MENU]) as changes:
        await client.call_tool("put_on_the_menu", {"name": "laksa"})
        change = await anext(changes)
        print(f"  {change.item} has changed: {(await client.read_resource(change.item)).contents[0]}")


async def live_elsewhere(client: Client) -> None:
    """A client in a nursery, which any task may close"""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):  # bounds the opening, and nothing else
            other = await connect_client(nursery, KITCHEN, revision=client.revision)
        print(f"  another {other.server['name']}, for other guests")
        nursery.start_soon(other.aclose)
        await other.wait_closed()
        assert other.closed


async def do_by_hand(client: Client) -> None:
    """Requests as they are written, with something that goes along with this one; ping"""
    said = await client.request("prompts/list", meta={"com.example/visit": 7})
    print(f"  {said['prompts']}")
    await client.set_log_level("error")
    await client.call_tool("cook", {"name": "salad"})  # of which nothing is heard now
    await client.ping()  # 2026-07-28 has none, and says so
    print("  there it is")


PARTS = (
    introduce, list_everything, call, follow, come_back, extend, give_up, fail, read, be_asked, listen, live_elsewhere,
    do_by_hand,
)  # fmt: skip


async def main(options: ClientOptions) -> None:
    async with open_client(KITCHEN, **options) as client:
        for part in PARTS:
            print(f"{part.__doc__}:")
            try:
                await part(client)
            except McpError as error:
                print(f"  {type(error).__name__}: {error}")
        print(f"Off the protocol: {', '.join(client.deviations) or 'nothing'}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        OPTIONS["revision"] = sys.argv[1]
    trio.run(main, OPTIONS)
