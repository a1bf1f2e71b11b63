"""A report that takes longer than its request: a task with progress, a question and a result.

    python examples/long_report.py                        # the whole example in one process
    python examples/long_report.py serve                  # a server at http://127.0.0.1:3000/mcp
    python examples/long_report.py begin URL              # begins a report, and prints its id
    python examples/long_report.py fetch URL ID           # waits for the report, now or a day later

The tasks are in `reports.db`, in the current directory.  If the server is killed and starts again, it calls the
handlers of unfinished reports again (`replay=True`), and an answered question is not asked a second time.
"""

import sys
from dataclasses import dataclass
from typing import Literal

import trio

from trio_mcp import Accepted, Context, Server, open_client, serve_http
from trio_mcp.stores import SQLiteStore
from trio_mcp.types import FormElicitationRequest

server = Server("reports", version="1.0", store=SQLiteStore("reports.db"))


@dataclass
class Ending:
    tone: Literal["cheerful", "sober"]


@server.tool(task="optional", replay=True)
async def report(chapters: int, ctx: Context) -> str:
    """Write a report, chapter by chapter."""
    written = []
    for chapter in range(1, chapters + 1):
        await ctx.progress(chapter, chapters, f"chapter {chapter}")
        await trio.sleep(0.2)
        written.append(f"Chapter {chapter}.")
    answer = await ctx.elicit("How shall it end?", Ending)
    ending = answer.value.tone if isinstance(answer, Accepted) else "sudden"
    return " ".join([*written, f"A {ending} ending."])


def answer_form(request: FormElicitationRequest) -> dict[str, str]:
    print("asked:", request.message)
    return {"tone": "cheerful"}


async def begin(url: str) -> str:
    """Begin a report and disconnect."""
    # A task may ask only questions that the client that began it supports, so `elicitation` is needed here, too.
    async with open_client(url, tasks=True, elicitation=answer_form) as client:
        task = await client.start_task("report", {"chapters": 3})
        print("begun:", (await task.status()).status.value)
        return task.id


async def fetch(url: str, id: str) -> None:
    """Connect again and wait for the report."""
    async with open_client(url, tasks=True, elicitation=answer_form) as client:
        print("result:", await client.open_task(id).value(str))


async def run_all() -> None:
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, server)
        id = await begin(address.url)
        await trio.sleep(1)  # no client is connected during this time
        await fetch(address.url, id)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve"]:
            server.run(http="127.0.0.1:3000")
        case ["begin", url]:
            print(trio.run(begin, url))
        case ["fetch", url, id]:
            trio.run(fetch, url, id)
        case []:
            trio.run(run_all)
        case _:
            sys.exit(__doc__)
