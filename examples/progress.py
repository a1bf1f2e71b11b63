"""Tools that run for a long time: they report progress, and clean up when the client cancels them.

python examples/progress.py FOLDER

Cancellation is that of Trio: it reaches the handler at the `await` where it waits, and its `finally` blocks run.
"""

import secrets
import sys
from pathlib import Path
from typing import Annotated

import trio

from trio_mcp import Context, Field, Server

Rows = Annotated[int, Field(ge=1, le=1_000_000)]

server = Server("progress", version="1.0")
folder = Path(".")


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
        part.unlink(missing_ok=True)  # without `await`, because an `await` in a cancelled task is cancelled, too
    return f"{target} has {rows} rows"


@server.tool(abandon_on_cancel=False)
def count_primes(below: Rows, ctx: Context) -> int:
    """Count the primes below a number."""
    # A thread notices a cancellation only when it calls into Trio.  With `abandon_on_cancel=False` a cancelled call
    # waits until the thread has done so and has ended.
    found = 0
    for number in range(2, below):
        found += all(number % divisor for divisor in range(2, int(number**0.5) + 1))
        if number % 100 == 0:
            trio.from_thread.run(ctx.progress, number, below)
    return found


if __name__ == "__main__":
    # Only here: under `trio-mcp`, the arguments of the process are those of `trio-mcp`.
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    server.run()
