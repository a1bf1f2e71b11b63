"""A server that lets a model list and read files, but only in the roots that the client exposes.

python examples/file_browser.py

It shows how a handler asks the client and continues with the answer, in every revision of the protocol.  Call it with a
client that has roots, such as `open_client(command, roots=[folder])`; `trio-mcp call` has none.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import trio

from trio_mcp import Context, Server, ToolError

MAX_ENTRIES = 1000
MAX_BYTES = 1_000_000

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
    """Return the path with all symbolic links resolved.  If it is outside the roots, the call fails here."""
    roots = await ctx.roots()
    return await trio.to_thread.run_sync(roots.path, path)


@server.tool
async def list_roots(ctx: Context) -> list[str]:
    """The folders that this server may read, as file: URIs."""
    return [root.uri for root in await ctx.roots()]


@server.tool
async def list_folder(path: str, ctx: Context) -> Folder:
    """The entries of a folder."""

    def read() -> Folder:
        entries = sorted(folder.iterdir())
        first = [Entry(entry.name, kind_of(entry)) for entry in entries[:MAX_ENTRIES]]
        return Folder(str(folder), first, len(entries) > MAX_ENTRIES)

    folder = await allowed(path, ctx)
    try:
        return await trio.to_thread.run_sync(read)
    except OSError as error:
        raise ToolError(f"{path} cannot be listed: {error.strerror}") from None


def kind_of(path: Path) -> Literal["file", "folder", "other"]:
    if path.is_symlink():  # `allowed` checks the target when the client asks for it
        return "other"
    return "folder" if path.is_dir() else "file" if path.is_file() else "other"


@server.tool
async def read_file(path: str, ctx: Context) -> str:
    """The text of a file."""

    def read() -> bytes:
        if not file.is_file():  # a read from a named pipe would block
            raise ToolError(f"{path} is no file; list_folder shows what there is.")
        with file.open("rb") as opened:
            return opened.read(MAX_BYTES + 1)

    file = await allowed(path, ctx)
    try:
        data = await trio.to_thread.run_sync(read)
    except OSError as error:
        raise ToolError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ToolError(f"{path} is larger than {MAX_BYTES} bytes.")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ToolError(f"{path} is no text.") from None


if __name__ == "__main__":
    server.run()
