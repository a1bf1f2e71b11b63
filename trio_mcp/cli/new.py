"""``trio-mcp new``: make a project of a server, its tests, an entry for hosts, and a README."""

from __future__ import annotations

import argparse
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from trio_mcp.cli.output import Output
from trio_mcp.core.errors import UsageError

__all__ = ["add_arguments", "run"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")

_SERVER = '''\
"""@NAME@: an MCP server.  Docstrings and type hints become descriptions and schemas."""

from typing import Annotated

from trio_mcp import Context, Field, Server, ToolError
from trio_mcp.types import ToolAnnotations

server = Server("@NAME@", version="0.1")

notes = {"milk": "Buy milk."}


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def find(word: Annotated[str, Field(min_length=1)], *, ctx: Context) -> list[str]:
    """Find the notes that have a word.

    Args:
        word: the word, in any case
    """
    found = []
    for number, (name, text) in enumerate(notes.items(), 1):
        if word.lower() in text.lower():
            found.append(name)
        await ctx.progress(number, len(notes))
    return found


@server.tool
def write(name: str, text: str) -> str:
    """Write a note."""
    if not name.isidentifier():
        raise ToolError(f"A name is one word, got {name!r}.")  # the model reads this, and can correct it
    notes[name] = text
    return f"notes://{name}"


@server.resource("notes://{name}")
def note(name: str) -> str:
    """A note."""
    if name not in notes:
        raise ToolError(f"There is no note {name!r}.")
    return notes[name]


if __name__ == "__main__":
    server.run()  # on stdio; server.run(http="127.0.0.1:3000") serves HTTP
'''

_TESTS = '''\
"""Tests of the server, in memory: without a process and without a socket."""

from collections.abc import Awaitable, Callable

import trio
from server import notes, server

from trio_mcp import Client
from trio_mcp.testing import open_memory_pair
from trio_mcp.types import TextResourceContents


def with_client(test: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with open_memory_pair(server) as pair:
            await test(pair.client)

    trio.run(main)


def test_a_note_is_found() -> None:
    async def test(client: Client) -> None:
        result = await client.call_tool("find", {"word": "MILK"}, returns=list[str])
        assert result == ["milk"]

    with_client(test)


def test_a_note_is_written_and_read() -> None:
    async def test(client: Client) -> None:
        uri = await client.call_tool("write", {"name": "bread", "text": "Buy bread."}, returns=str)
        (contents,) = (await client.read_resource(uri)).contents
        assert isinstance(contents, TextResourceContents)
        assert contents.text == "Buy bread."
        del notes["bread"]

    with_client(test)


def test_a_name_is_one_word() -> None:
    async def test(client: Client) -> None:
        result = await client.call_tool("write", {"name": "two words", "text": ""})
        assert result.is_error

    with_client(test)
'''

_README = """\
# @NAME@

An MCP server. `server.py` is the server, `test_server.py` has its tests.

```sh
pip install pytest && python -m pytest    # run the tests
trio-mcp list server.py                   # what the server has
trio-mcp call server.py find word=milk    # call a tool
trio-mcp check server.py                  # test whether it obeys the protocol
trio-mcp install server.py --name @NAME@ --host claude-desktop
```

Other hosts are `claude-code`, `vscode`, `cursor`, `gemini` and `codex`. Claude Code reads `.mcp.json` when it is
started in this folder.
"""


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="NAME", help="the name of the server, and of the folder to make")
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder)
    name, output = folder.name, Output(arguments.json)
    if not _NAME.fullmatch(name):
        raise UsageError(f"a name begins with a letter and has 1 to 64 letters, digits, - and _, got {name!r}")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"{folder} exists already; choose another name")
    entry = {"command": sys.executable, "args": [str(folder.absolute() / "server.py")]}
    files = {
        "server.py": _SERVER,
        "test_server.py": _TESTS,
        ".mcp.json": json.dumps({"mcpServers": {name: entry}}, indent=2) + "\n",
        "README.md": _README,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text.replace("@NAME@", name), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error}") from None
    if output.as_json:
        output.json({"folder": str(folder.absolute()), "files": list(files)})
        return 0
    python = f"{Path(sys.executable).name} -m"
    install = "" if find_spec("pytest") else f"{python} pip install pytest && "
    output.line(f"{folder}/ has {', '.join(files)}.  Next:")
    output.line()
    output.table(
        [
            (f"cd {folder}", ""),
            ("trio-mcp call server.py find word=milk", "call a tool"),
            (f"{install}{python} pytest", "run the tests"),
            (f"trio-mcp install server.py --name {name} --host HOST", "add it to a host"),
        ]
    )
    return 0
