"""A client that uses each feature of `Client` with the server `kitchen.py`, and prints the results.

    python examples/client.py               # in the newest revision
    python examples/client.py 2024-11-05    # in an older revision

A part prints an error if the revision lacks its feature.  This file is an example to read.  To look at other servers,
run `look.py`.
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


# Callbacks for requests and log messages of the server.  A client declares a capability only if it has the callback.


async def fill_in(form: FormElicitationRequest) -> dict[str, object]:
    print(f"  the server asks: {form.message} {', '.join(form.fields)}; the defaults: {dict(form.defaults)}")
    return {"guests": 4, "outside": True}  # or None if the user has closed the form, or Declined()


def visit_page(page: UrlElicitationRequest) -> bool:
    print(f"  the server asks: {page.message} {page.url} at {page.host} {list(page.warnings)}")
    return True  # the user agrees to visit the page


def sample(request: SamplingRequest) -> tuple[str, str]:
    print(f"  the server asks for at most {request.params.max_tokens} tokens")
    return "khao man manao", "a model of ours"  # the text, and the name of the model


def print_log(message: LoggingMessageParams) -> None:
    print(f"  the server logs, at {message.level}: {message.data}")


OPTIONS: ClientOptions = {
    "name": "guest",
    "version": "1.0",
    "elicitation": fill_in,
    "elicitation_url": visit_page,
    "sampling": sample,
    "roots": [HERE],
    "on_log": print_log,
    "log_level": "info",
    "tasks": True,
    "meta": lambda: {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
}


async def show_session(client: Client) -> None:
    """The server and the revision of the session"""
    print(f"  {client.server['name']} {client.server['version']} speaks {client.revision}: {client.negotiation.why}")
    print(f"  it has {', '.join(sorted(client.capabilities))}, and advises: {client.instructions}")


async def list_everything(client: Client) -> None:
    """The lists of the server"""
    print("  tools:", ", ".join([tool.name for tool in await client.list_tools()]))
    print("  resources:", ", ".join([resource.uri for resource in await client.list_resources()]))
    print("  templates:", ", ".join([template.uri_template for template in await client.list_resource_templates()]))
    print("  prompts:", ", ".join([prompt.name for prompt in await client.list_prompts()]))
    first = await client.list_tools_page()  # one page; the methods above return the entries of all pages
    print(f"  the first page has {len(first.tools)} tools; the next: {first.next_cursor}")


async def call(client: Client) -> None:
    """A call with progress, and its result as a dataclass"""
    dish = await client.call_tool("cook", {"name": "laksa"}, returns=Dish, on_progress=lambda *step: print(" ", *step))
    print(f"  {dish}")


async def iterate_over_progress(client: Client) -> None:
    """The same call in a block that iterates over its progress"""
    async with client.stream_tool("cook", {"name": "salad"}) as stream:
        async for report in stream:
            print(f"  {report.progress:g} of {report.total} {report.message or ''}")
        result = await stream.result()
    print(f"  {result.content[0]}")


async def use_a_task(client: Client) -> None:
    """A task: a call that outlives its request, and that another client of the same user may open by its id"""
    started = await client.start_task("bake", {"name": "bread"})
    task = client.open_task(started.id) if started.id else started  # a server without tasks has finished the call
    result = await task.result()
    print(f"  {result.content[0]}")


async def use_extensions(client: Client) -> None:
    """Extensions of the server, and a notification that is not part of the protocol"""
    print(f"  extensions: {', '.join(client.extensions)}; of greetings: {client.extension('com.example/greet')}")
    await client.notify("com.example/knock", {"times": 2})


async def time_out(client: Client) -> None:
    """A timeout is a cancel scope, and it cancels the handler in the server"""
    with trio.CancelScope() as scope:  # or trio.move_on_after(5); this one begins when the handler reports progress

        def start_timeout(*step: object) -> None:
            scope.deadline = trio.current_time() + 0.2

        await client.call_tool("simmer", on_progress=start_timeout)
    if client.has_unanswered_cancellations:  # the server does not report when the cancelled handler has ended
        await trio.lowlevel.checkpoint()
    diary = await client.call_tool("read_diary", returns=list[str])
    print(f"  given up: {scope.cancelled_caught}; the diary: {', '.join(diary)}")


async def handle_errors(client: Client) -> None:
    """Errors"""
    result = await client.call_tool("cook", {"name": "stones"})  # a mistake of the model is a result that it can read
    print(f"  is_error: {result.is_error}, {result.content[0]}")
    try:
        await client.call_tool("cook", {"name": "stones"}, returns=Dish)
    except ToolFailed as error:
        print(f"  {error}")
    try:
        await client.read_resource("recipes://stones")
    except RequestError as error:
        print(f"  {error}, {error.data}")


async def read_resources_and_prompts(client: Client) -> None:
    """Resources, prompts, and completions of their arguments"""
    for uri in (MENU, "recipes://laksa"):
        print(f"  {(await client.read_resource(uri)).contents[0]}")
    print(f"  {(await client.get_prompt('shopping_list', {'dish': 'laksa', 'guests': '3'})).messages[0]}")
    for ref in (PromptReference("shopping_list"), ResourceReference("recipes://{dish}")):
        print(f"  la... is {list((await client.complete(ref, 'dish', 'la')).values)}")


async def answer_questions(client: Client) -> None:
    """Tools that ask the user (with a form, with a page), the model of the client, and the client"""
    for tool in ("reserve", "pay", "invent", "cookbooks"):
        print(f"  {tool}: {(await client.call_tool(tool)).content[0]}")
    await client.set_roots([HERE.parent])
    print(f"  cookbooks, from now on: {(await client.call_tool('cookbooks')).content[0]}")


async def listen(client: Client) -> None:
    """Changes at the server, received during a block"""
    async with client.listen(tools=True, resources=[MENU]) as changes:
        await client.call_tool("put_on_the_menu", {"name": "laksa"})
        change = await anext(changes)
        print(f"  {change.item} has changed: {(await client.read_resource(change.item)).contents[0]}")


async def connect_in_a_nursery(client: Client) -> None:
    """A client in a nursery, which any task may close"""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):  # this timeout ends when the session is open
            other = await connect_client(nursery, KITCHEN, revision=client.revision)
        print(f"  another {other.server['name']}, for other guests")
        nursery.start_soon(other.aclose)
        await other.wait_closed()
        assert other.closed


async def send_raw_requests(client: Client) -> None:
    """A request by the name of its method, with `_meta` of its own; the log level; ping"""
    result = await client.request("prompts/list", meta={"com.example/visit": 7})
    print(f"  {result['prompts']}")
    await client.set_log_level("error")
    await client.call_tool("cook", {"name": "salad"})  # its log message is below this level
    await client.ping()  # raises an error in 2026-07-28, which has no ping
    print("  there it is")


PARTS = (
    show_session, list_everything, call, iterate_over_progress, use_a_task, use_extensions, time_out, handle_errors,
    read_resources_and_prompts, answer_questions, listen, connect_in_a_nursery, send_raw_requests,
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
