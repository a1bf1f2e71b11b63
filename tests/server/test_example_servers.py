"""The example servers: each in its own process, as a user starts it, with a client of each revision.

`RawClient` checks each line: standard output has messages only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import trio

from tests.http.client import HttpClient
from tests.http.served import bearer
from tests.http.ws import Socket
from tests.server.raw_client import (
    LATEST,
    PROGRESS,
    REVISION_NAMES,
    ErrorResponse,
    RawClient,
    client_on,
    connected,
    every_revision,
    since,
    until,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
Object = dict[str, Any]
Headers = dict[str, str | None]


@asynccontextmanager
async def process_of(
    example: str | Path, *arguments: object, stdin: int = subprocess.PIPE
) -> AsyncIterator[trio.Process]:
    """A running example, which writes nothing to stderr, and in the end exits with status 0."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / example), *map(str, arguments)]
    process = await trio.lowlevel.open_process(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
        assert process.stderr is not None
        complaints = b"".join([bytes(data) async for data in process.stderr])
        assert (await process.wait(), complaints) == (0, b"")
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@asynccontextmanager
async def client_of(example: str, revision: str, *arguments: object, **options: Any) -> AsyncIterator[RawClient]:
    """A client of an example over pipes.  In the end it closes its side, which must end the process."""
    async with process_of(example, *arguments) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        async with client_on(trio.StapledStream(process.stdin, process.stdout), revision, **options) as wire:
            yield wire


async def first_line(process: trio.Process) -> str:
    assert process.stdout is not None
    return await line_of(process.stdout)


async def line_of(output: trio.abc.ReceiveStream) -> str:
    line = b""
    while not line.endswith(b"\n"):
        byte = bytes(await output.receive_some(1))
        assert byte, "it has ended"
        line += byte
    return line.decode()


@asynccontextmanager
async def until_sigterm(process: trio.Process, status: int) -> AsyncIterator[None]:
    """Send SIGTERM after the block.  The process must write nothing more to stderr, and exit with this status."""
    assert process.stderr is not None
    try:
        yield
        process.send_signal(signal.SIGTERM)
        complaints = b"".join([bytes(data) async for data in process.stderr])
        assert (await process.wait(), complaints) == (status, b"")
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def text_of(wire: RawClient, tool: str, /, **arguments: Any) -> str:
    """The text of a tool that does not fail."""
    result = await wire.call("tools/call", {"name": tool, "arguments": arguments})
    assert not result.get("isError"), result
    return text_in(result)


async def data_of(wire: RawClient, tool: str, /, **arguments: Any) -> Any:
    return json.loads(await text_of(wire, tool, **arguments))


async def failure_of(wire: RawClient, tool: str, /, **arguments: Any) -> str:
    """The text of a tool that fails."""
    result = await wire.call("tools/call", {"name": tool, "arguments": arguments})
    assert result["isError"]
    return text_in(result)


def text_in(result: Object) -> str:
    (block,) = result["content"]
    assert block["type"] == "text"
    text: str = block["text"]
    return text


def always(answer: Object) -> Callable[[Object], Object]:
    return lambda params: answer


async def tools_of(wire: RawClient) -> set[str]:
    return {tool["name"] for tool in (await wire.call("tools/list"))["tools"]}


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def module_of(example: str) -> Any:
    spec = importlib.util.spec_from_file_location(example.removesuffix(".py"), EXAMPLES / example)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# echo


@every_revision
async def test_the_echo_comes_back(revision: str) -> None:
    said = "Grüße\u2028und 🎺"
    async with client_of("echo.py", revision) as wire:
        assert await text_of(wire, "echo", message=said) == f"Tool echo: {said}"
        (read,) = (await wire.call("resources/read", {"uri": f"echo://{quote(said)}"}))["contents"]
        assert (read["uri"], read["text"]) == (f"echo://{quote(said)}", f"Resource echo: {said}")
        filled = await wire.call("prompts/get", {"name": "echo", "arguments": {"message": said}})
        content = {"type": "text", "text": f"Please process this message: {said}"}
        assert filled["messages"] == [{"role": "user", "content": content}]
        assert (await wire.about())["serverInfo"] == {"name": "echo", "version": "1.0"}


@every_revision
async def test_the_echo_has_a_tool_a_template_and_a_prompt(revision: str) -> None:
    async with client_of("echo.py", revision) as wire:
        listed = [
            (await wire.call(f"{method}/list", {}))[key]
            for method, key in (
                ("tools", "tools"),
                ("resources", "resources"),
                ("resources/templates", "resourceTemplates"),
                ("prompts", "prompts"),
            )
        ]
    (tool,), nothing, (template,), (prompt,) = listed
    assert (tool["name"], tool["inputSchema"]["required"]) == ("echo", ["message"])
    assert nothing == []
    assert (template["name"], template["uriTemplate"]) == ("echo", "echo://{message}")
    assert (prompt["name"], [each["name"] for each in prompt["arguments"]]) == ("echo", ["message"])


# SQLite


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "what is it?.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE notes (name TEXT, size INTEGER, blob BLOB)")
        connection.executemany(
            "INSERT INTO notes VALUES (?, ?, ?)", [("a'; --", 1, b"12"), ("b", None, None), ("c", 3, None)]
        )
        connection.commit()
    return path


@every_revision
async def test_the_model_reads_the_schema_and_queries_with_bound_values(revision: str, database: Path) -> None:
    async with client_of("sqlite_explorer.py", revision, database) as wire:
        (schema,) = (await wire.call("resources/read", {"uri": "sqlite://schema"}))["contents"]
        assert schema == {
            "uri": "sqlite://schema",
            "mimeType": "application/sql",
            "text": "CREATE TABLE notes (name TEXT, size INTEGER, blob BLOB);",
        }
        found = await data_of(wire, "query", sql="SELECT * FROM notes WHERE name = ?", parameters=["a'; --"])
        assert found == {"columns": ["name", "size", "blob"], "rows": [["a'; --", 1, "(2 bytes)"]], "more": False}
        found = await data_of(wire, "query", sql="SELECT size FROM notes ORDER BY size", limit=2)
        assert found == {"columns": ["size"], "rows": [[None], [1]], "more": True}


@pytest.mark.parametrize(
    ("sql", "parameters", "says"),
    [
        ("SELEC 1", [], 'near "SELEC": syntax error'),
        ("DELETE FROM notes", [], "not authorized"),
        ("ATTACH 'other.db' AS other", [], "not authorized"),
        ("PRAGMA query_only = 0", [], "not authorized"),
        ("SELECT 1; SELECT 2", [], "one statement at a time"),
        ("SELECT ?", [], "Incorrect number of bindings"),
        ("SELECT ?", [2**70], "too large"),
        ("SELECT hex(zeroblob(1000000000))", [], "too big"),
        ("SELECT char(55296)", [], "Could not decode to UTF-8"),
    ],
)
async def test_an_invalid_query_is_a_tool_error_with_its_reason(
    sql: str, parameters: list[Any], says: str, database: Path
) -> None:
    before = files_of(database.parent)
    async with connected(module_of("sqlite_explorer.py").explorer(database), REVISION_NAMES[-1]) as wire:
        assert says in await failure_of(wire, "query", sql=sql, parameters=parameters)
    assert files_of(database.parent) == before


async def test_the_database_is_opened_as_read_only(database: Path) -> None:
    module = module_of("sqlite_explorer.py")
    module.only_reading = lambda *about: sqlite3.SQLITE_OK
    async with connected(module.explorer(database), REVISION_NAMES[-1]) as wire:
        assert "readonly database" in await failure_of(wire, "query", sql="DELETE FROM notes")


async def test_an_endless_query_is_interrupted(database: Path) -> None:
    module = module_of("sqlite_explorer.py")
    module.SECONDS = 0.0
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    async with connected(module.explorer(database), REVISION_NAMES[-1]) as wire:
        assert await failure_of(wire, "query", sql=endless) == "SQLite says: interrupted"


async def test_every_value_can_be_shown(database: Path) -> None:
    async with connected(module_of("sqlite_explorer.py").explorer(database), REVISION_NAMES[-1]) as wire:
        sql = "SELECT 9e999, -9e999, printf('%.*c', 20000, 'x'), 9223372036854775807, NULL, 0.5"
        (row,) = (await data_of(wire, "query", sql=sql))["rows"]
        assert row == ["inf", "-inf", "x" * 10_000 + "…", 2**63 - 1, None, 0.5]
        assert await data_of(wire, "query", sql="") == {"columns": [], "rows": [], "more": False}


def test_without_a_database_the_program_shows_its_usage(tmp_path: Path) -> None:
    for arguments in ([], [tmp_path / "none.db"]):
        ended = subprocess.run(
            [sys.executable, EXAMPLES / "sqlite_explorer.py", *arguments], capture_output=True, timeout=60, check=False
        )
        assert (ended.returncode, ended.stdout) == (1, b"")
        assert ended.stderr.startswith(b"usage: ")


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that the client exposes.  Beside it there is a secret."""
    folder = tmp_path.resolve() / "a folder"
    (folder / "below").mkdir(parents=True)
    (folder / "text.txt").write_text("Grüße\n", encoding="utf-8")
    (folder / "bytes").write_bytes(b"\xff")
    (folder / "large").write_bytes(b"x" * 1_000_001)
    (tmp_path / "secret").write_text("secret")
    (folder / "way out").symlink_to(tmp_path / "secret")
    (folder / "below" / "around").symlink_to(folder / "text.txt")
    return folder


def exposing(folder: Path) -> dict[str, Callable[[Object], Object]]:
    return {"roots/list": always({"roots": [{"uri": folder.as_uri()}]})}


@every_revision
async def test_files_below_the_roots_are_listed_and_read(revision: str, folder: Path) -> None:
    async with client_of("file_browser.py", revision, answers=exposing(folder)) as wire:
        assert await data_of(wire, "list_roots") == [folder.as_uri()]
        found = await data_of(wire, "list_folder", path=folder.as_uri())
        assert found["path"] == str(folder)
        assert not found["more"]
        assert {entry["name"]: entry["kind"] for entry in found["entries"]} == {
            "below": "folder",
            "bytes": "file",
            "large": "file",
            "text.txt": "file",
            "way out": "other",
        }
        assert await text_of(wire, "read_file", path=str(folder / "text.txt")) == "Grüße\n"
        assert await text_of(wire, "read_file", path=str(folder / "below" / "around")) == "Grüße\n"


@every_revision
async def test_no_path_leads_out_of_the_roots(revision: str, folder: Path) -> None:
    async with client_of("file_browser.py", revision, answers=exposing(folder)) as wire:
        for path in ("../secret", "way%20out", "below/../../secret", "%2e%2e/secret"):
            for whole in (f"{folder}/{path.replace('%20', ' ')}", f"{folder.as_uri()}/{path}"):
                for tool in ("read_file", "list_folder"):
                    why = await failure_of(wire, tool, path=whole)
                    assert "path" in why.lower()
                    assert "secret" not in why


async def test_a_path_that_cannot_be_read_is_a_tool_error(folder: Path) -> None:
    async with client_of("file_browser.py", REVISION_NAMES[-1], answers=exposing(folder)) as wire:
        assert "is no file" in await failure_of(wire, "read_file", path=f"{folder}/below")
        assert "is no file" in await failure_of(wire, "read_file", path=f"{folder}/none")
        assert "is no text" in await failure_of(wire, "read_file", path=f"{folder}/bytes")
        assert "is larger" in await failure_of(wire, "read_file", path=f"{folder}/large")
        assert "Not a directory" in await failure_of(wire, "list_folder", path=f"{folder}/bytes")


@until("2025-11-25")
async def test_an_old_client_without_roots_gets_a_tool_error(revision: str, folder: Path) -> None:
    async with client_of("file_browser.py", revision, capabilities={}) as wire:
        assert "roots" in await failure_of(wire, "read_file", path=f"{folder}/text.txt")


async def test_a_modern_client_without_roots_gets_the_missing_capability(folder: Path) -> None:
    async with client_of("file_browser.py", REVISION_NAMES[-1], capabilities={}) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await text_of(wire, "read_file", path=f"{folder}/text.txt")
        assert (refused.value.code, refused.value.data) == (-32021, {"requiredCapabilities": {"roots": {}}})


# Progress


@every_revision
async def test_an_export_reports_each_row(revision: str, tmp_path: Path) -> None:
    async with client_of("progress.py", revision, tmp_path) as wire:
        await wire.call("tools/call", {"name": "export", "arguments": {"rows": 3}}, progress="p")
        assert [(note["progress"], note["total"]) for note in wire.noted(PROGRESS)] == [(1, 3), (2, 3), (3, 3)]
        assert files_of(tmp_path) == {"squares.csv": b"1,1\n2,4\n3,9\n"}


@every_revision
async def test_a_cancelled_export_leaves_no_file(revision: str, tmp_path: Path) -> None:
    async with client_of("progress.py", revision, tmp_path) as wire:
        export = {"name": "export", "arguments": {"rows": 1_000_000}}
        id = await wire.start("tools/call", export, progress="p")
        await wire.note(PROGRESS)
        (part,) = names_in(tmp_path)
        assert part.endswith(".part")
        await wire.cancel(id)
        while names_in(tmp_path):
            await wire.call("tools/list")
        assert not wire.answered(id)


@every_revision
async def test_primes_are_counted_in_a_thread_that_ends_with_its_call(revision: str, tmp_path: Path) -> None:
    async with client_of("progress.py", revision, tmp_path) as wire:
        primes = {"name": "count_primes", "arguments": {"below": 1000}}
        assert text_in(await wire.call("tools/call", primes, progress="p")) == "168"
        assert [note["progress"] for note in wire.noted(PROGRESS)] == list(range(100, 1000, 100))
        # A thread that continues to count would keep the process alive.
        id = await wire.start("tools/call", {**primes, "arguments": {"below": 1_000_000}}, progress="q")
        while (await wire.note(PROGRESS))["progressToken"] != "q":
            pass
        await wire.cancel(id)


# Questions


ORDERS: list[tuple[Object, str]] = [
    ({"action": "accept", "content": {"kind": "funghi"}}, "Ordered: 1 funghi."),
    (
        {"action": "accept", "content": {"kind": "marinara", "pieces": 2, "remarks": "hot"}},
        "Ordered: 2 marinara (hot).",
    ),
    ({"action": "decline"}, "The user wants no pizza; do not ask again."),
    ({"action": "cancel"}, "The user has not decided."),
]


@since("2025-06-18")
async def test_the_user_fills_in_a_form(revision: str) -> None:
    async with client_of("ask_user.py", revision) as wire:
        for answer, said in ORDERS:
            wire.answers["elicitation/create"] = always(answer)
            assert await text_of(wire, "order_pizza") == said
        method, params = wire.asked[0]
        assert (method, params["message"]) == ("elicitation/create", "Which pizza shall it be?")
        assert params["requestedSchema"]["properties"]["kind"]["enum"] == ["margherita", "funghi", "marinara"]
        assert params["requestedSchema"]["required"] == ["kind"]


@since("2025-11-25")
async def test_the_user_is_sent_to_a_page(revision: str) -> None:
    async with client_of("ask_user.py", revision) as wire:
        for action, said in (("accept", "is about to sign in"), ("decline", "does not want"), ("cancel", "not want")):
            wire.answers["elicitation/create"] = always({"action": action})
            assert said in await text_of(wire, "connect_calendar")
        pages = {params["url"] for _, params in wire.asked}
        assert len(pages) == 3
        assert all(page.startswith("https://calendar.example/connect?visit=") for page in pages)


@until("2025-03-26")
async def test_a_client_without_elicitation_gets_a_tool_error(revision: str) -> None:
    async with client_of("ask_user.py", revision) as wire:
        assert "elicitation/create" in await failure_of(wire, "order_pizza")
        assert "https://calendar.example/" in await text_of(wire, "connect_calendar")


# Tools that are added and removed


@every_revision
async def test_the_client_is_notified_of_added_and_removed_tools(revision: str) -> None:
    async with client_of("dynamic_tools.py", revision) as wire:
        assert await tools_of(wire) == {"learn", "forget"}
        await wire.subscribe(tools=True)
        await text_of(wire, "learn", name="greet", text="Hello!")
        assert await wire.changed() == ("tools", None)
        assert await tools_of(wire) == {"learn", "forget", "greet"}
        assert await text_of(wire, "greet") == "Hello!"
        await text_of(wire, "forget", name="greet")
        assert await wire.changed() == ("tools", None)
        assert await tools_of(wire) == {"learn", "forget"}
        with pytest.raises(ErrorResponse, match="there is no tool"):
            await text_of(wire, "greet")


async def test_an_invalid_phrase_is_a_tool_error() -> None:
    async with client_of("dynamic_tools.py", REVISION_NAMES[-1]) as wire:
        assert "learn" in await failure_of(wire, "learn", name="learn", text="")
        assert "the name of a tool must have 1 to 128" in await failure_of(wire, "learn", name="no name", text="")
        assert "no such phrase" in await failure_of(wire, "forget", name="learn")
        for number in range(100):
            await text_of(wire, "learn", name=f"phrase{number}", text="")
        assert "no room" in await failure_of(wire, "learn", name="another", text="")


# Embedded in a larger program


async def unix(line: str, place: Path) -> trio.SocketStream:
    return await trio.open_unix_socket(place)


async def tcp(line: str, place: Path) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", int(line.rpartition(" ")[2].strip(")\n")))


@pytest.mark.parametrize("connect", [unix, tcp])
async def test_a_program_serves_clients_of_all_revisions_at_once(
    connect: Callable[[str, Path], Awaitable[trio.SocketStream]], tmp_path: Path
) -> None:
    place = tmp_path / "house.sock"
    async with process_of("embedded.py", place if connect is unix else 0, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        line = await first_line(process)
        assert line.startswith("listening on ")
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(client_on(await connect(line, place), revision))
                for revision in REVISION_NAMES
            ]
            for wire in clients:
                await wire.subscribe(uris=["house://temperature"])
            assert "will be 20.0 °C" in await text_of(clients[0], "set_temperature", degrees=20)
            for wire in clients:
                while True:
                    assert await wire.changed() == ("updated", "house://temperature")
                    (read,) = (await wire.call("resources/read", {"uri": "house://temperature"}))["contents"]
                    if read["text"] == "20.0 °C":
                        break
            assert "/degrees" in str(await clients[-1].exchange("tools/call", too_hot()))
            process.send_signal(signal.SIGTERM)
            for wire in clients:
                await wire.ended.wait()
        rest = b"".join([bytes(data) async for data in process.stdout])
        assert rest == b"ended with 5 clients connected\n"
    assert not place.exists()


def too_hot() -> Object:
    return {"name": "set_temperature", "arguments": {"degrees": 100}}


# Over HTTP


@asynccontextmanager
async def web_of(example: str) -> AsyncIterator[tuple[HttpClient, trio.Process]]:
    """A client of an example that listens, and its process, which the test ends by SIGTERM."""
    async with process_of(example, 0, stdin=subprocess.DEVNULL) as process:
        line = await first_line(process)
        authority, slash, path = line.removeprefix("listening at http://").strip().partition("/")
        host, _, port = authority.partition(":")
        web = HttpClient(partial(trio.open_tcp_stream, host, int(port)), host=authority, path=slash + path)
        yield web, process
        await web.aclose()


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"])
async def test_a_call_over_http_finishes_before_the_program_ends(revision: str) -> None:
    async with web_of("over_http.py") as (web, process):
        session = None if revision == LATEST else await web.initialize(revision)
        message = web.request(
            "tools/call", {"name": "count", "arguments": {"beats": 3}}, revision=revision, progress="p"
        )
        async with web.stream(message, session=session, revision=revision) as stream:
            assert (await stream.message())["params"] == {"progressToken": "p", "progress": 0, "total": 3}
            process.send_signal(signal.SIGTERM)
            assert text_in((await stream.response())["result"]) == "3 beats"
        assert process.stdout is not None
        assert b"".join([bytes(data) async for data in process.stdout]) == b"no new calls\n"


async def test_each_beat_is_sent_over_http() -> None:
    async with web_of("over_http.py") as (web, process):
        wanted = {"notifications": {"resourceSubscriptions": ["heart://beats"]}}
        async with web.stream(web.request("subscriptions/listen", wanted)) as stream:
            for _ in range(3):
                said = await stream.message()
            assert said["method"] == "notifications/resources/updated"
        process.send_signal(signal.SIGTERM)


@asynccontextmanager
async def web_with_tokens(**tokens: str) -> AsyncIterator[HttpClient]:
    """A client of `bearer.py`, which listens until SIGTERM."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / "bearer.py"), "127.0.0.1:0"]
    known = {f"{user.upper()}_TOKEN": token for user, token in tokens.items()}
    process = await trio.lowlevel.open_process(command, stderr=subprocess.PIPE, env={**os.environ, **known})
    assert process.stderr is not None
    async with until_sigterm(process, 143):
        line = await line_of(process.stderr)
        authority = line.removeprefix("notes listens at http://").removesuffix("/mcp\n")
        host, _, port = authority.partition(":")
        web = HttpClient(partial(trio.open_tcp_stream, host, int(port)), host=authority)
        async with aclosing(web):
            yield web


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"])
async def test_a_token_identifies_its_user(revision: str) -> None:
    async with web_with_tokens(alice="sesame", bob="open") as web:
        alice, bob = (bearer(token) for token in ("sesame", "open"))
        sessions: dict[str, str | None] = {"alice": None, "bob": None}
        for user, headers in (("alice", alice), ("bob", bob)):
            if revision != LATEST:
                sessions[user] = await web.initialize(revision, headers=headers)

            async def ask(tool: str, user: str = user, headers: Headers = headers, **arguments: str) -> str:
                params = {"name": tool, "arguments": arguments}
                how: Any = {"session": sessions[user], "revision": revision, "headers": headers}
                return text_in((await web.call("tools/call", params, **how)).result)

            assert await ask("who_am_i") == f"You are {user}."
            assert json.loads(await ask("note", text=f"{user} was here")) == [f"{user} was here"]
        if revision != LATEST:
            other = await web.call("tools/list", session=sessions["alice"], revision=revision, headers=bob)
            assert other.status == 403


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Basic sesame"}, {"Authorization": "Bearer"}, *map(bearer, ("sesam", "sesame2"))]
)
async def test_a_request_without_a_valid_token_is_refused(headers: Headers) -> None:
    async with web_with_tokens(alice="sesame", bob="open") as web:
        refused = await web.call("tools/list", headers=headers)
        assert refused.status == 401
        assert refused.headers["WWW-Authenticate"] == "Bearer"


def test_a_user_without_a_token_is_reported_at_the_start() -> None:
    known = {**os.environ, "ALICE_TOKEN": "sesame", "BOB_TOKEN": ""}
    command = [sys.executable, str(EXAMPLES / "bearer.py"), "127.0.0.1:0"]
    ended = subprocess.run(command, env=known, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "BOB_TOKEN=..." in ended.stderr


@pytest.mark.parametrize("example", ["over_http.py", "asgi_starlette.py"])
@every_revision
async def test_a_websocket_of_an_example_serves_every_revision(revision: str, example: str) -> None:
    async with web_of(example) as (web, process):
        socket = Socket(await web.connect(), target=web.path.removesuffix("mcp") + "ws")
        async with client_on(socket, revision) as wire:
            assert await tools_of(wire) == {"count" if example == "over_http.py" else "sign"}
        process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"])
async def test_starlette_has_pages_beside_the_server(revision: str) -> None:
    async with web_of("asgi_starlette.py") as (web, process):
        assert web.path == "/tools/mcp"
        session = None if revision == LATEST else await web.initialize(revision)
        params = {"name": "sign", "arguments": {"name": "Ada"}}
        signed = await web.call("tools/call", params, session=session, revision=revision)
        assert text_in(signed.result) == "Ada is guest number 1."
        assert (await web.send("GET", "/")).body == b"Ada"
        process.send_signal(signal.SIGTERM)
