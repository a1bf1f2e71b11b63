"""Our client with published servers, each in a process of its own, with a working folder.

The tests use the main features of each server, and also check its effects in the folder.
"""

from __future__ import annotations

import sqlite3
import subprocess
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.peers.behaviours import Contains
from tests.peers.installed import PUBLISHED_SERVERS, needs, tool
from tests.peers.published_servers import (
    Gaps,
    Table,
    Visit,
    check,
    error_code,
    list_names,
    result_text,
    tool_call,
    visiting,
)
from trio_mcp.errors import SubscriptionUnsupported
from trio_mcp.types import ChangeEvent, ChangeKind, ImageContent, TextResourceContents

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the server

# The arguments of a server and the options of the client; the function that returns them prepares the folder.
Start: TypeAlias = tuple[list[str], dict[str, Any]]

UNKNOWN_TOOL = {"unknown tool": (tool_call("no-such-tool"), -32602)}
# One red pixel.
PNG = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==")


async def text_of(visit: Visit, uri: str) -> str:
    [contents] = (await visit.client.read_resource(uri)).contents
    assert isinstance(contents, TextResourceContents)
    return contents.text


# Time.


@dataclass
class Time:
    timezone: str
    datetime: str
    day_of_week: str
    is_dst: bool


@dataclass
class Conversion:
    source: Time
    target: Time
    time_difference: str


async def convert(visit: Visit) -> tuple[str, str, str]:
    arguments = {"source_timezone": "Asia/Kolkata", "time": "16:30", "target_timezone": "Asia/Tokyo"}
    found = await visit.client.call_tool("convert_time", arguments, returns=Conversion)
    target = datetime.fromisoformat(found.target.datetime)
    return f"{target:%H:%M %z}", found.target.timezone, found.time_difference


async def now(visit: Visit) -> str:
    found = await visit.client.call_tool("get_current_time", {"timezone": "Etc/UTC"}, returns=Time)
    return f"{datetime.fromisoformat(found.datetime):%z}"


TIME: Table = {
    "tools": (list_names("tools"), ["convert_time", "get_current_time"]),
    "convert": (convert, ("20:00 +0900", "Asia/Tokyo", "+3.5h")),
    "now": (now, "+0000"),
    "no such zone": (tool_call("get_current_time", timezone="Mars/Base"), Contains("failed:", "Mars/Base")),
    **UNKNOWN_TOOL,
}


# Git.

GIT_IDENTITY = {"GIT_CONFIG_GLOBAL": "/dev/null"} | {
    f"GIT_{role}_{part}": f"{part}@peers.test".lower() for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")
}


def git(folder: Path, *command: str) -> str:
    program = needs("git", lambda: tool("git"))
    done = subprocess.run([program, *command], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def start_in_repository(folder: Path) -> Start:
    git(folder, "init", "-q", "-b", "main")
    (folder / "poem.txt").write_text("roses\n")
    return ["--repository", str(folder)], {"env": GIT_IDENTITY}


def git_call(name: str, **arguments: Any) -> Any:
    async def action(visit: Visit) -> Any:
        return await tool_call(f"git_{name}", repo_path=str(visit.folder), **arguments)(visit)

    return action


async def committed(visit: Visit) -> list[str]:
    return git(visit.folder, "log", "--format=%s by %an", "--name-only").split("\n")


GIT: Table = {
    "status": (git_call("status"), Contains("Untracked files", "poem.txt")),
    "nothing to commit": (git_call("commit", message="nothing"), Contains("failed:")),
    "add": (git_call("add", files=["poem.txt"]), "Files staged successfully"),
    "staged": (git_call("diff_staged"), Contains("+roses")),
    "commit": (git_call("commit", message="Begin a poem"), Contains("committed successfully")),
    "committed": (committed, ["Begin a poem by name@peers.test", "", "poem.txt", ""]),
    "log": (git_call("log"), Contains("Begin a poem")),
    "branch": (git_call("create_branch", branch_name="verse"), Contains("Created branch 'verse'")),
    "outside": (tool_call("git_status", repo_path="/"), Contains("failed:", "outside")),
    "no such revision": (git_call("show", revision="no-such"), Contains("failed:")),
    **UNKNOWN_TOOL,
}


# SQLite.


async def rows(visit: Visit) -> list[Any]:
    with sqlite3.connect(visit.folder / "poems.db") as connection:
        found = connection.execute("SELECT * FROM poems").fetchall()
    connection.close()
    return found


async def insight(visit: Visit) -> str:
    assert "No business insights" in await text_of(visit, "memo://insights")
    # The server sends an update without a subscription; the client ignores it here.
    await visit.client.call_tool("append_insight", {"insight": "roses sell"})
    return await text_of(visit, "memo://insights")


async def undeclared_update(visit: Visit) -> list[ChangeEvent]:
    async with visit.client.listen(resources=["memo://insights"], undeclared=True) as changes:
        await visit.client.call_tool("append_insight", {"insight": "violets do not"})
        return [await anext(changes)]


async def refused_subscription(visit: Visit) -> str:
    with pytest.raises(SubscriptionUnsupported) as refused:
        async with visit.client.listen(resources=["memo://insights"]):
            pass
    return str(refused.value)


async def prompt_text(visit: Visit) -> str:
    [message] = (await visit.client.get_prompt("mcp-demo", {"topic": "gardens"})).messages
    return message.content.text  # type: ignore[union-attr]


SQLITE: Table = {
    "tools": (
        list_names("tools"),
        ["append_insight", "create_table", "describe_table", "list_tables", "read_query", "write_query"],
    ),
    "create": (tool_call("create_table", query="CREATE TABLE poems (line TEXT)"), "Table created successfully"),
    "write": (tool_call("write_query", query="INSERT INTO poems VALUES ('roses')"), "[{'affected_rows': 1}]"),
    "read": (tool_call("read_query", query="SELECT * FROM poems"), "[{'line': 'roses'}]"),
    "rows": (rows, [("roses",)]),
    "memo": (insight, Contains("- roses sell")),
    "listen": (refused_subscription, Contains("does not support these subscriptions", "resourceSubscriptions")),
    "hears": (undeclared_update, [ChangeEvent(ChangeKind.RESOURCE, "memo://insights")]),
    "prompt": (prompt_text, Contains("gardens")),
    "bad query": (tool_call("read_query", query="SELECT * FROM prose"), Contains("failed:", "no such table")),
    "unknown prompt": (error_code(lambda client: client.get_prompt("no-such-prompt")), -32602),
    "missing argument": (error_code(lambda client: client.get_prompt("mcp-demo")), -32602),
    "unknown resource": (error_code(lambda client: client.read_resource("memo://no-such")), -32002),
    "no templates": (error_code(lambda client: client.list_resource_templates_page()), -32601),
    **UNKNOWN_TOOL,
}
OWN_TEXT = "it catches the exceptions of its tools, and returns them as ordinary text"
NO_CODE = "its SDK answers each exception with the code 0"
SQLITE_GAPS: Gaps = {
    "bad query": ("Database error: no such table: prose", OWN_TEXT),
    "unknown tool": ("Error: Missing arguments", OWN_TEXT),
    "unknown prompt": (0, NO_CODE),
    "missing argument": (0, NO_CODE),
    "unknown resource": (0, NO_CODE),
}
# Its SDK does not declare subscriptions, but has a method that sends this notification.
SQLITE_DEVIATIONS = (
    "it sends notifications/resources/updated without declaring it; receive it with listen(..., undeclared=True)",
)


# Memory.

ADA = {"name": "Ada", "entityType": "person", "observations": ["likes engines"]}
GRAPH = "memory://knowledge-graph"


@dataclass
class Graph:
    entities: list[dict[str, Any]]
    relations: list[dict[str, Any]]


async def remember(visit: Visit) -> list[Any]:
    async with visit.client.listen(resources=[GRAPH]) as changes:
        made = await visit.client.call_tool("create_entities", {"entities": [ADA]})
        return [made.structured_content, await anext(changes)]


async def find(visit: Visit) -> list[Any]:
    found = [
        await visit.client.call_tool("search_nodes", {"query": query}, returns=Graph) for query in ("engine", "loom")
    ]
    return [each.entities for each in found]


async def remembered(visit: Visit) -> str:
    return (visit.folder / "memory.jsonl").read_text()


async def graph(visit: Visit) -> str:
    return await text_of(visit, GRAPH)


MEMORY: Table = {
    "resources": (list_names("resources"), ["knowledge-graph"]),
    "remember": (remember, [{"entities": [ADA]}, ChangeEvent(ChangeKind.RESOURCE, GRAPH)]),
    "find": (find, [[ADA], []]),
    "remembered": (remembered, Contains('"Ada"', "likes engines")),
    "graph": (graph, Contains('"Ada"', "likes engines")),
    "stranger": (
        tool_call("add_observations", observations=[{"entityName": "Bob", "contents": ["is new"]}]),
        Contains("failed:", "Bob not found"),
    ),
    "bad arguments": (tool_call("search_nodes", query=7), Contains("failed:", "Input validation error")),
    "unknown resource": (error_code(lambda client: client.read_resource("memory://no-such")), -32002),
    **UNKNOWN_TOOL,
}
AS_RESULT = "its SDK answers with a result with isError"
TYPESCRIPT_1: Gaps = {"unknown tool": (Contains("failed:", "no-such-tool not found"), AS_RESULT)}
MEMORY_GAPS: Gaps = {**TYPESCRIPT_1, "unknown resource": (-32602, "its SDK uses the code of 2026-07-28")}


# Files.


async def work_in(visit: Visit, folder: str) -> str:
    """Wait until the server uses this folder.  It requests the roots later, and uses the old folders until then."""
    where = str(visit.folder / folder)
    while where not in (allowed := result_text(await visit.client.call_tool("list_allowed_directories"))):
        pass
    return allowed.replace(f"{visit.folder}/", "")


async def in_roots(visit: Visit) -> str:
    return await work_in(visit, "root")


async def in_other_roots(visit: Visit) -> str:
    await visit.client.set_roots([visit.folder / "other"])
    return await work_in(visit, "other")


def file_call(name: str, path: str, **arguments: Any) -> Any:
    async def action(visit: Visit) -> Any:
        return await tool_call(name, path=str(visit.folder / path), **arguments)(visit)

    return action


async def written(visit: Visit) -> bytes:
    return (visit.folder / "root" / "poem.txt").read_bytes()


async def picture(visit: Visit) -> bytes:
    (visit.folder / "root" / "dot.png").write_bytes(PNG)
    [image] = (await visit.client.call_tool("read_media_file", {"path": str(visit.folder / "root/dot.png")})).content
    assert isinstance(image, ImageContent)
    assert image.mime_type == "image/png"
    return image.data


POEM = "roses\u2028are réd\n"
FILES: Table = {
    "roots": (in_roots, "Allowed directories:\nroot"),
    "write": (file_call("write_file", "root/poem.txt", content=POEM), Contains("Successfully wrote")),
    "written": (written, POEM.encode()),
    "read": (file_call("read_text_file", "root/poem.txt"), POEM),
    "edit": (
        file_call("edit_file", "root/poem.txt", edits=[{"oldText": "roses", "newText": "violets"}]),
        Contains("-roses", "+violets"),
    ),
    "folder": (file_call("list_directory", "root"), "[FILE] poem.txt"),
    "picture": (picture, PNG),
    "outside": (file_call("read_text_file", "other/poem.txt"), Contains("failed:", "Access denied")),
    "other roots": (in_other_roots, "Allowed directories:\nother"),
    "outside now": (file_call("read_text_file", "root/poem.txt"), Contains("failed:", "Access denied")),
    **UNKNOWN_TOOL,
}


def start_in_folders(folder: Path) -> Start:
    for name in ("given", "root", "other"):
        (folder / name).mkdir()
    return [str(folder / "given")], {"roots": [folder / "root"]}


D, E = "2025-11-25", "2026-07-28"
# The revision that the client finds, the function that prepares the start, the actions, and the gaps.
SERVERS: dict[str, tuple[str, Callable[[Path], Start], Table, Gaps]] = {
    "mcp-server-time": (E, lambda folder: ([], {}), TIME, {}),
    "mcp-server-git": (E, start_in_repository, GIT, {}),
    "mcp-server-sqlite": (D, lambda folder: (["--db-path", str(folder / "poems.db")], {}), SQLITE, SQLITE_GAPS),
    "server-memory": (
        D,
        lambda folder: ([], {"env": {"MEMORY_FILE_PATH": str(folder / "memory.jsonl")}}),
        MEMORY,
        MEMORY_GAPS,
    ),
    "server-filesystem": (D, start_in_folders, FILES, TYPESCRIPT_1),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder with symbolic links resolved: servers resolve them in their messages."""
    return tmp_path.resolve()


@pytest.mark.parametrize("name", SERVERS)
async def test_our_client_uses_a_published_server(
    name: str, folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    revision, start, table, gaps = SERVERS[name]
    command = needs(name, PUBLISHED_SERVERS[name].command)
    arguments, options = start(folder)
    async with visiting([*command, *arguments], folder, **options) as visit:
        assert visit.client.revision == revision
        await check(visit, table, gaps, SQLITE_DEVIATIONS if name == "mcp-server-sqlite" else ())
    assert b"Traceback" not in b"".join(visit.errors)
    assert [each.getMessage() for each in caplog.records] == []
    assert capfd.readouterr() == ("", "")
