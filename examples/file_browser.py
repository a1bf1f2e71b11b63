"""Files for a model to list and read: those that the client exposes as its roots, and no others.

python examples/file_browser.py

Shows how a handler asks the client and goes on with the answer, in every revision of the protocol.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import trio

from trio_mcp import Context, Server, ToolError

MOST_ENTRIES = 1000
LARGEST_FILE = 1_000_000

server = Server("file-browser", version="1.0", instructions="Begin with list_roots; paths are absolute, or file: URIs.")


@dataclass
class Entry:
    name: str
    kind: Literal["file", "folder", "other"]


@dataclass
class Folder:
    path: str
    entries: list[Entry]
    more: bool


async def allowed(path: str, ctx: Context) -> Path:
    """The path with all links followed; one that leads out of the roots is refused, and the call ends here."""
    roots = await ctx.roots()
    return await trio.to_thread.run_sync(roots.path, path)


@server.tool
async def list_roots(ctx: Context) -> list[str]:
    """The folders that may be looked into, as file: URIs."""
    return [root.uri for root in await ctx.roots()]


@server.tool
async def list_folder(path: str, ctx: Context) -> Folder:
    """What is in a folder."""

    def look() -> Folder:
        entries = sorted(folder.iterdir())
        first = [Entry(entry.name, kind_of(entry)) for entry in entries[:MOST_ENTRIES]]
        return Folder(str(folder), first, len(entries) > MOST_ENTRIES)

    folder = await allowed(path, ctx)
    try:
        return await trio.to_thread.run_sync(look)
    except OSError as error:
        raise ToolError(f"{path} cannot be listed: {error.strerror}") from None


def kind_of(path: Path) -> Literal["file", "folder", "other"]:
    if path.is_symlink():  # where it leads is seen when somebody asks for it
        return "other"
    return "folder" if path.is_dir() else "file" if path.is_file() else "other"


@server.tool
async def read_file(path: str, ctx: Context) -> str:
    """The text of a file."""

    def read() -> bytes:
        if not file.is_file():  # a pipe would keep us waiting
            raise ToolError(f"{path} is no file; list_folder shows what there is.")
        with file.open("rb") as opened:
            return opened.read(LARGEST_FILE + 1)

    file = await allowed(path, ctx)
    try:
        data = await trio.to_thread.run_sync(read)
    except OSError as error:
        raise ToolError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > LARGEST_FILE:
        raise ToolError(f"{path} is larger than {LARGEST_FILE} bytes.")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ToolError(f"{path} is no text.") from None


if __name__ == "__main__":
    server.run()
