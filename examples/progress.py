"""Work that takes long: it reports progress, and when the client cancels it, nothing of it is left behind.

python examples/progress.py FOLDER

Cancelling is Trio's: the handler is cancelled at the line where it waits, and its `finally` runs.
"""

import secrets
import sys
from pathlib import Path
from typing import Annotated

import trio

from trio_mcp import Context, Field, Server

Rows = Annotated[int, Field(ge=1, le=1_000_000)]

server = Server("progress", version="1.0")
folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")


@server.tool
async def export(rows: Rows, ctx: Context) -> str:
    """Write a table of numbers and their squares."""
    target, part = folder / "squares.csv", folder / f"{secrets.token_hex(8)}.part"
    try:
        async with await trio.open_file(part, "x") as file:
            for row in range(1, rows + 1):
                await file.write(f"{row},{row * row}\n")
                await ctx.progress(row, rows, f"row {row}")
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)  # no `await` here: in a cancelled task, that would be cancelled, too
    return f"{target} has {rows} rows"


@server.tool(abandon_on_cancel=False)
def count_primes(below: Rows, ctx: Context) -> int:
    """Count the primes below a number."""
    # A thread is not cancelled before it talks to Trio; `abandon_on_cancel=False` has the call wait for that, and end
    # with it.
    found = 0
    for number in range(2, below):
        found += all(number % divisor for divisor in range(2, int(number**0.5) + 1))
        if number % 100 == 0:
            trio.from_thread.run(ctx.progress, number, below)
    return found


if __name__ == "__main__":
    server.run()
