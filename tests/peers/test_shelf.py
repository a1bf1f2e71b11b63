"""Our client at servers that people use, each in a process of its own, with a folder to work in.

They are asked for what they are there for, and what they did is looked at from outside, too.
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

from tests.peers.installed import SHELF, needs, tool
from tests.peers.shelf import Gaps, Says, Table, Visit, calls, check, code_of, lists, said, visiting
from trio_mcp.errors import SubscriptionUnsupported
from trio_mcp.types import ChangeEvent, ChangeKind, ImageContent, TextResourceContents

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the server

# Arguments, and options of the client, for a folder that is made ready.
Start: TypeAlias = tuple[list[str], dict[str, Any]]

UNKNOWN_TOOL = {"unknown tool": (calls("no-such-tool"), -32602)}
# A dot of red.
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
    "tools": (lists("tools"), ["convert_time", "get_current_time"]),
    "convert": (convert, ("20:00 +0900", "Asia/Tokyo", "+3.5h")),
    "now": (now, "+0000"),
    "no such zone": (calls("get_current_time", timezone="Mars/Base"), Says("failed:", "Mars/Base")),
    **UNKNOWN_TOOL,
}


# Git.

WHO = {"GIT_CONFIG_GLOBAL": "/dev/null"} | {
    f"GIT_{role}_{what}": f"{what}@peers.test".lower() for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}


def git(place: Path, *command: str) -> str:
    program = needs("git", lambda: tool("git"))
    done = subprocess.run([program, *command], cwd=place, check=True, capture_output=True, text=True)
    return done.stdout


def in_repository(place: Path) -> Start:
    git(place, "init", "-q", "-b", "main")
    (place / "poem.txt").write_text("roses\n")
    return ["--repository", str(place)], {"env": WHO}


def gits(name: str, **arguments: Any) -> Any:
    async def look(visit: Visit) -> Any:
        return await calls(f"git_{name}", repo_path=str(visit.place), **arguments)(visit)

    return look


async def committed(visit: Visit) -> list[str]:
    return git(visit.place, "log", "--format=%s by %an", "--name-only").split("\n")


GIT: Table = {
    "status": (gits("status"), Says("Untracked files", "poem.txt")),
    "nothing to commit": (gits("commit", message="nothing"), Says("failed:")),
    "add": (gits("add", files=["poem.txt"]), "Files staged successfully"),
    "staged": (gits("diff_staged"), Says("+roses")),
    "commit": (gits("commit", message="Begin a poem"), Says("committed successfully")),
    "committed": (committed, ["Begin a poem by name@peers.test", "", "poem.txt", ""]),
    "log": (gits("log"), Says("Begin a poem")),
    "branch": (gits("create_branch", branch_name="verse"), Says("Created branch 'verse'")),
    "outside": (calls("git_status", repo_path="/"), Says("failed:", "outside")),
    "no such revision": (gits("show", revision="no-such"), Says("failed:")),
    **UNKNOWN_TOOL,
}


# SQLite.


async def rows(visit: Visit) -> list[Any]:
    with sqlite3.connect(visit.place / "poems.db") as connection:
        found = connection.execute("SELECT * FROM poems").fetchall()
    connection.close()
    return found


async def insight(visit: Visit) -> str:
    assert "No business insights" in await text_of(visit, "memo://insights")
    # It tells of this unasked; nobody listens.
    await visit.client.call_tool("append_insight", {"insight": "roses sell"})
    return await text_of(visit, "memo://insights")


async def hears(visit: Visit) -> list[ChangeEvent]:
    async with visit.client.listen(resources=["memo://insights"], undeclared=True) as changes:
        await visit.client.call_tool("append_insight", {"insight": "violets do not"})
        return [await anext(changes)]


async def listens(visit: Visit) -> str:
    with pytest.raises(SubscriptionUnsupported) as refused:
        async with visit.client.listen(resources=["memo://insights"]):
            pass
    return str(refused.value)


async def seeded(visit: Visit) -> str:
    [message] = (await visit.client.get_prompt("mcp-demo", {"topic": "gardens"})).messages
    return message.content.text  # type: ignore[union-attr]


SQLITE: Table = {
    "tools": (
        lists("tools"),
        ["append_insight", "create_table", "describe_table", "list_tables", "read_query", "write_query"],
    ),
    "create": (calls("create_table", query="CREATE TABLE poems (line TEXT)"), "Table created successfully"),
    "write": (calls("write_query", query="INSERT INTO poems VALUES ('roses')"), "[{'affected_rows': 1}]"),
    "read": (calls("read_query", query="SELECT * FROM poems"), "[{'line': 'roses'}]"),
    "rows": (rows, [("roses",)]),
    "memo": (insight, Says("- roses sell")),
    "listen": (listens, Says("does not support these subscriptions", "resourceSubscriptions")),
    "hears": (hears, [ChangeEvent(ChangeKind.RESOURCE, "memo://insights")]),
    "prompt": (seeded, Says("gardens")),
    "bad query": (calls("read_query", query="SELECT * FROM prose"), Says("failed:", "no such table")),
    "unknown prompt": (code_of(lambda client: client.get_prompt("no-such-prompt")), -32602),
    "missing argument": (code_of(lambda client: client.get_prompt("mcp-demo")), -32602),
    "unknown resource": (code_of(lambda client: client.read_resource("memo://no-such")), -32002),
    "no templates": (code_of(lambda client: client.list_resource_templates_page()), -32601),
    **UNKNOWN_TOOL,
}
OWN_TEXT = "it catches what its tools raise, and returns it as a text like any other"
NO_CODE = "its kit answers whatever is raised with the code 0"
SQLITE_GAPS: Gaps = {
    "bad query": ("Database error: no such table: prose", OWN_TEXT),
    "unknown tool": ("Error: Missing arguments", OWN_TEXT),
    "unknown prompt": (0, NO_CODE),
    "missing argument": (0, NO_CODE),
    "unknown resource": (0, NO_CODE),
}
# Its kit declares no subscriptions, and has a method that sends this notification.
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
    return (visit.place / "memory.jsonl").read_text()


async def graph(visit: Visit) -> str:
    return await text_of(visit, GRAPH)


MEMORY: Table = {
    "resources": (lists("resources"), ["knowledge-graph"]),
    "remember": (remember, [{"entities": [ADA]}, ChangeEvent(ChangeKind.RESOURCE, GRAPH)]),
    "find": (find, [[ADA], []]),
    "remembered": (remembered, Says('"Ada"', "likes engines")),
    "graph": (graph, Says('"Ada"', "likes engines")),
    "stranger": (
        calls("add_observations", observations=[{"entityName": "Bob", "contents": ["is new"]}]),
        Says("failed:", "Bob not found"),
    ),
    "bad arguments": (calls("search_nodes", query=7), Says("failed:", "Input validation error")),
    "unknown resource": (code_of(lambda client: client.read_resource("memory://no-such")), -32002),
    **UNKNOWN_TOOL,
}
AS_RESULT = "its kit makes a result of it, with isError"
TYPESCRIPT_1: Gaps = {"unknown tool": (Says("failed:", "no-such-tool not found"), AS_RESULT)}
MEMORY_GAPS: Gaps = {**TYPESCRIPT_1, "unknown resource": (-32602, "its kit has the code of 2026-07-28")}


# Files.


async def work_in(visit: Visit, folder: str) -> str:
    """It asks for the roots when it has time; until then it works where it did before."""
    where = str(visit.place / folder)
    while where not in (allowed := said(await visit.client.call_tool("list_allowed_directories"))):
        pass
    return allowed.replace(f"{visit.place}/", "")


async def in_roots(visit: Visit) -> str:
    return await work_in(visit, "root")


async def in_other_roots(visit: Visit) -> str:
    await visit.client.set_roots([visit.place / "other"])
    return await work_in(visit, "other")


def files(name: str, path: str, **arguments: Any) -> Any:
    async def look(visit: Visit) -> Any:
        return await calls(name, path=str(visit.place / path), **arguments)(visit)

    return look


async def written(visit: Visit) -> bytes:
    return (visit.place / "root" / "poem.txt").read_bytes()


async def picture(visit: Visit) -> bytes:
    (visit.place / "root" / "dot.png").write_bytes(PNG)
    [image] = (await visit.client.call_tool("read_media_file", {"path": str(visit.place / "root/dot.png")})).content
    assert isinstance(image, ImageContent)
    assert image.mime_type == "image/png"
    return image.data


POEM = "roses\u2028are réd\n"
FILES: Table = {
    "roots": (in_roots, "Allowed directories:\nroot"),
    "write": (files("write_file", "root/poem.txt", content=POEM), Says("Successfully wrote")),
    "written": (written, POEM.encode()),
    "read": (files("read_text_file", "root/poem.txt"), POEM),
    "edit": (
        files("edit_file", "root/poem.txt", edits=[{"oldText": "roses", "newText": "violets"}]),
        Says("-roses", "+violets"),
    ),
    "folder": (files("list_directory", "root"), "[FILE] poem.txt"),
    "picture": (picture, PNG),
    "outside": (files("read_text_file", "other/poem.txt"), Says("failed:", "Access denied")),
    "other roots": (in_other_roots, "Allowed directories:\nother"),
    "outside now": (files("read_text_file", "root/poem.txt"), Says("failed:", "Access denied")),
    **UNKNOWN_TOOL,
}


def in_folders(place: Path) -> Start:
    for name in ("given", "root", "other"):
        (place / name).mkdir()
    return [str(place / "given")], {"roots": [place / "root"]}


D, E = "2025-11-25", "2026-07-28"
# The revision that is found, how it is started, what is looked at, and what is seen otherwise.
SERVERS: dict[str, tuple[str, Callable[[Path], Start], Table, Gaps]] = {
    "mcp-server-time": (E, lambda place: ([], {}), TIME, {}),
    "mcp-server-git": (E, in_repository, GIT, {}),
    "mcp-server-sqlite": (D, lambda place: (["--db-path", str(place / "poems.db")], {}), SQLITE, SQLITE_GAPS),
    "server-memory": (
        D,
        lambda place: ([], {"env": {"MEMORY_FILE_PATH": str(place / "memory.jsonl")}}),
        MEMORY,
        MEMORY_GAPS,
    ),
    "server-filesystem": (D, in_folders, FILES, TYPESCRIPT_1),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """As servers name it, which look through links."""
    return tmp_path.resolve()


@pytest.mark.parametrize("name", SERVERS)
async def test_what_a_client_does_with_a_server_that_people_use(
    name: str, place: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    revision, start, table, gaps = SERVERS[name]
    command = needs(name, SHELF[name].command)
    arguments, options = start(place)
    async with visiting([*command, *arguments], place, **options) as visit:
        assert visit.client.revision == revision
        await check(visit, table, gaps, SQLITE_DEVIATIONS if name == "mcp-server-sqlite" else ())
    assert b"Traceback" not in b"".join(visit.errors)
    assert [each.getMessage() for each in caplog.records] == []
    assert capfd.readouterr() == ("", "")
