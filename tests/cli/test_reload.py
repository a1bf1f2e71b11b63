"""`run --reload`: a new server replaces the old one, and the clients stay connected."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.cli.in_process import ROOT, run
from tests.cli.test_cli import COMMAND
from trio_mcp import Client, RequestError, open_client
from trio_mcp.cli.reload import ChangedFiles  # the command line has no public API

FIRST = """\
import trio

import wording
from trio_mcp import Server

server = Server("weather")


@server.tool
def forecast() -> str:
    return wording.SUN


@server.tool
async def forever() -> str:
    await trio.sleep_forever()
    return ""
"""
SECOND = """
@server.resource("notes://today")
def today() -> str:
    return "Buy milk"
"""
ENVIRON = {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def weather(tmp_path: Path) -> Path:
    (tmp_path / "wording.py").write_text('SUN = "sun"\n')
    path = tmp_path / "weather.py"
    path.write_text(FIRST)
    return path


@contextlib.asynccontextmanager
async def by_stdio(weather: Path, revision: str, errors: list[bytes]) -> AsyncIterator[Client]:
    command = [*COMMAND, "run", weather.name, "--reload"]
    async with open_client(command, cwd=weather.parent, env=ENVIRON, revision=revision, stderr=errors.append) as client:
        yield client


@contextlib.contextmanager
def http_process(weather: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that serves over HTTP, and the URL that it prints."""
    process = subprocess.Popen(
        [*COMMAND, "run", weather.name, "--reload", "--http", "127.0.0.1:0"],
        cwd=weather.parent,
        env={**os.environ, **ENVIRON},
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    with process.stderr:
        try:
            line = process.stderr.readline().decode()
            assert line.startswith("trio-mcp: weather listens at http://127.0.0.1:")
            yield process, line.split()[4]
        finally:
            process.kill()
            process.wait(60)


@contextlib.asynccontextmanager
async def by_http(weather: Path, revision: str, errors: list[bytes]) -> AsyncIterator[Client]:
    with http_process(weather) as (process, url):
        async with open_client(url, revision=revision) as other, open_client(url, revision=revision) as client:
            assert await other.call_tool("forecast", returns=str) == "sun"
            yield client
            assert await other.call_tool("forecast", returns=str) == "moon"
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        errors.append(process.stderr.read())  # it ends after both processes have ended
        assert process.wait(60) == 130


def save(path: Path, text: str) -> None:
    path.write_text(text)


async def text_of(client: Client, tool: str = "forecast") -> str:
    """The text of a result; a tool that fails has a result, too."""
    (block,) = (await client.call_tool(tool)).content
    text: str = block.text  # type: ignore[union-attr]
    return text


async def until_text(client: Client, part: str) -> None:
    while True:
        with contextlib.suppress(RequestError):
            if part in await text_of(client):
                return
        await trio.sleep(0.05)


async def until_listed(client: Client, count: int, changes: AsyncIterator[Any]) -> None:
    """Wait for notifications until the server has this number of tools."""
    while len(await client.list_tools()) != count:
        await anext(changes)


@pytest.mark.parametrize(
    ("serve", "revision"),
    [
        (by_stdio, "2026-07-28"),
        pytest.param(by_stdio, "2025-11-25", marks=pytest.mark.full),
        pytest.param(by_http, "2026-07-28", marks=pytest.mark.full),
        pytest.param(by_http, "2025-11-25", marks=pytest.mark.full),
    ],
)
async def test_an_edited_server_replaces_the_old_one(serve: object, revision: str, weather: Path) -> None:
    errors: list[bytes] = []
    wording = weather.with_name("wording.py")
    with trio.fail_after(60):
        async with serve(weather, revision, errors) as client, client.listen(tools=True) as changes:  # type: ignore[operator]
            assert await text_of(client) == "sun"
            # A new tool and a new kind of entry.
            save(weather, FIRST + SECOND + "\n\n@server.tool\ndef more() -> str:\n    return 'more'\n")
            await until_listed(client, 3, changes)
            assert await text_of(client, "more") == "more"
            assert (await client.read_resource("notes://today")).contents[0].text == "Buy milk"  # type: ignore[union-attr]
            # A running call gets an error, and a server that does not start reports the reason.
            async with trio.open_nursery() as nursery:
                nursery.start_soon(break_file, wording, client)
                assert await text_of(client, "forever") == (
                    "the server was started again while tools/call ran, because wording.py has changed; send it again"
                )
            broken = await text_of(client)
            assert broken == (
                "the server could not be started: wording.py:1: SyntaxError: '(' was never closed. It is started again "
                "when a file changes."
            )
            with pytest.raises(RequestError, match=r"wording\.py:1: SyntaxError"):
                await client.list_tools()
            save(wording, 'SUN = "moon"\n')
            await until_text(client, "moon")
    seen = b"".join(errors).decode()
    assert "trio-mcp: weather.py has changed; the server is started again\ntrio-mcp: the server runs\n" in seen
    assert "SyntaxError: '(' was never closed\n" in seen
    assert "trio_mcp" not in seen  # the traceback has no frames of the command line


async def break_file(path: Path, client: Client) -> None:
    """Write a syntax error while the call runs."""
    while not await client.list_tools():
        await trio.lowlevel.checkpoint()
    save(path, "SUN = (\n")


@pytest.mark.full
async def test_a_call_waits_for_a_server_that_starts(weather: Path) -> None:
    errors: list[bytes] = []
    with trio.fail_after(60):
        async with by_stdio(weather, "2026-07-28", errors) as client:
            assert await text_of(client) == "sun"
            save(weather, "import time\ntime.sleep(1)\n" + FIRST.replace("wording.SUN", "'new'"))
            while b"is started again" not in b"".join(errors):  # noqa: ASYNC110  # another process writes it
                await trio.sleep(0.05)
            assert await text_of(client) == "new"


@pytest.mark.full
@pytest.mark.parametrize("revision", ["2026-07-28", "2025-11-25"])
async def test_a_request_that_only_reads_is_sent_again(revision: str, weather: Path) -> None:
    slow = FIRST + '\n\n@server.resource("notes://slow")\nasync def slow() -> str:\n    {}\n    return "read"\n'
    save(weather, slow.format("await trio.sleep_forever()"))
    with trio.fail_after(60):
        async with by_stdio(weather, revision, []) as client, trio.open_nursery() as nursery:
            nursery.start_soon(edit_later, weather, slow.format("pass"), client)
            assert (await client.read_resource("notes://slow")).contents[0].text == "read"  # type: ignore[union-attr]


async def edit_later(path: Path, text: str, client: Client) -> None:
    """Change the file after the previous requests have been read."""
    await client.list_tools()
    save(path, text)


@pytest.mark.full
async def test_a_module_that_is_written_later_is_noticed(weather: Path) -> None:
    with trio.fail_after(60):
        async with by_stdio(weather, "2025-11-25", []) as client, client.listen(tools=True) as changes:
            save(weather, f"import later\n{FIRST}\n\nserver.tool(later.tool)\n")
            await until_text(client, "No module named 'later'")
            save(weather.with_name("later.py"), "def tool() -> str:\n    return 'late'\n")
            await until_listed_again(client, changes)
            assert await text_of(client, "tool") == "late"


async def until_listed_again(client: Client, changes: AsyncIterator[Any]) -> None:
    async for _ in changes:
        with contextlib.suppress(RequestError):
            if len(await client.list_tools()) == 3:
                return


ANOTHER_SDK = """\
import json, sys


class Other:
    def run(self):
        for line in sys.stdin:
            asked = json.loads(line)
            answer = {"jsonrpc": "2.0", "id": asked.get("id")}
            if asked["method"] == "initialize":
                info = {"name": "other", "version": "1"}
                answer["result"] = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
            elif asked["method"] == "tools/list":
                answer["result"] = {"tools": [{"name": "first", "inputSchema": {"type": "object"}}]}
            else:
                answer["error"] = {"code": -32601, "message": "no"}
            if "id" in asked:
                print(json.dumps(answer), flush=True)


mcp = Other()
"""


@pytest.mark.full
async def test_a_server_of_another_sdk_may_declare_no_changes(weather: Path) -> None:
    save(weather, ANOTHER_SDK)
    with trio.fail_after(60):
        async with by_stdio(weather, "2026-07-28", []) as client, client.listen(tools=True) as changes:
            assert [tool.name for tool in await client.list_tools()] == ["first"]
            save(weather, ANOTHER_SDK.replace("first", "second"))
            async for _ in changes:
                if [tool.name for tool in await client.list_tools()] == ["second"]:
                    break


@pytest.mark.full
async def test_a_server_that_ends_by_itself_is_started_again(weather: Path) -> None:
    save(weather, FIRST + "\n\n@server.tool\ndef die() -> str:\n    import os\n    os._exit(3)\n")
    with trio.fail_after(60), http_process(weather) as (_, url):
        async with open_client(url) as client:
            with pytest.raises(RequestError, match="the upstream server did not answer"):
                await client.call_tool("die")
            # It has run for less than five seconds, so that only a change starts it.
            await until_text(client, "ended with status 3")
            save(weather, FIRST)
            await until_text(client, "sun")


@pytest.mark.full
def test_the_server_ends_with_a_parent_that_is_killed(weather: Path) -> None:
    with http_process(weather) as (process, _):
        process.kill()
        assert process.stderr is not None
        process.stderr.read()  # it ends after both processes have ended


@pytest.mark.full
def test_an_installed_server_has_no_files_to_watch() -> None:
    shown = run("run", "trio_mcp.cli.demo.server", "--reload")
    assert (shown.returncode, shown.stdout) == (0, "")
    name = "trio_mcp.cli.demo.server"
    assert shown.stderr == f"trio-mcp: no file is watched: {name} is in an installed package; use pip install -e\n"


PROTECTED = """\
from trio_mcp import Server

async def verify(token): ...

server = Server("p")
server.protect(verify=verify, resource="http://127.0.0.1/mcp", authorization_servers=["https://auth.example.com"])
"""
NO_TOKEN = "a server that requires access tokens has no --reload over HTTP, because the relay to it has none"


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit('no licence')", "it has ended by itself: no licence"),
        ("x = 1", "--http needs a Server of trio_mcp; weather.py has no server"),
        (PROTECTED, NO_TOKEN),
    ],
)
def test_over_http_a_first_start_that_fails_waits_for_a_change(text: str, message: str, weather: Path) -> None:
    save(weather, text)
    with reloading(weather, "--http", "0") as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        failure = f"the server could not be started: {message}. It is started again when a file changes."
        assert any(line == f"trio-mcp: {failure}\n" for line in lines)
        save(weather, FIRST)
        assert next(lines) == "trio-mcp: weather.py has changed; the server is started again\n"
        assert next(lines) == "trio-mcp: the server runs\n"
        shown = run("call", next(lines).split()[4], "forecast")
        process.send_signal(signal.SIGINT)
        assert (shown.stdout, process.wait(60)) == ("sun\n", 130)


@contextlib.contextmanager
def reloading(weather: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*COMMAND, "run", weather.name, "--reload", *options],
        cwd=weather.parent,
        env={**os.environ, **ENVIRON},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("revision", ["2026-07-28", pytest.param("2025-11-25", marks=pytest.mark.full)])
async def test_a_host_waits_for_a_first_start_that_fails(revision: str, weather: Path) -> None:
    wording = weather.with_name("wording.py")
    texts = ["SUN = (\n", "SUN = sun\n", 'SUN = "sun"\n']
    save(wording, texts.pop(0))
    errors: list[bytes] = []
    seen = b""

    async def edit() -> None:
        nonlocal seen
        while texts:
            while b"started again when a file changes" not in b"".join(errors):  # noqa: ASYNC110  # another process
                await trio.sleep(0.05)
            seen += b"".join(errors)
            errors.clear()
            save(wording, texts.pop(0))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(edit)
            async with by_stdio(weather, revision, errors) as client:
                assert await text_of(client) == "sun"
    for reason in ("SyntaxError: '(' was never closed", "NameError: name 'sun' is not defined"):
        start = f"trio-mcp: the server could not be started: wording.py:1: {reason}"
        assert f"{start}. It is started again when a file changes.\n" in seen.decode()
    assert b"".join(errors).endswith(b"started again\ntrio-mcp: the server runs\n")


@pytest.mark.full
def test_changes_may_be_json(weather: Path) -> None:
    save(weather, "import nothing_of_this")
    with reloading(weather, "--json") as process:
        assert process.stderr is not None
        events = (json.loads(line) for line in process.stderr if line.startswith("{"))
        reason = "weather.py:1: ModuleNotFoundError: No module named 'nothing_of_this'"
        assert next(events) == {"event": "failed", "error": reason}
        save(weather, FIRST)
        assert next(events) == {"event": "changed", "file": "weather.py"}
        assert [next(events)["event"] for _ in range(2)] == ["started", "serving"]


@pytest.mark.full
def test_the_command_ends_with_a_host_that_does_not_wait(weather: Path) -> None:
    save(weather, "import nothing_of_this")
    with reloading(weather) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        assert any("started again when a file changes" in line for line in process.stderr)
        process.stdin.close()
        assert process.stderr.read() == "trio-mcp: the client has gone before the server could be started\n"
        assert process.wait(60) == 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("server.py", "server.py:1: ModuleNotFoundError: No module named 'nothing_of_this'"),  # there is no client
        ("absent.py", "there is no file absent.py"),
        ("absent:server", "there is no module absent"),
    ],
)
def test_without_a_client_or_a_file_a_first_start_that_fails_ends_the_command(
    target: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "server.py").write_text("import nothing_of_this")
    shown = run("run", target, "--reload", cwd=tmp_path)
    assert (shown.returncode, shown.stdout) == (3, "")
    assert shown.stderr.splitlines()[-1] == f"trio-mcp: the server could not be started: {message}"


def test_changed_files_are_noticed_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    for path in (one, two):
        path.touch()
        os.utime(path, (1000, 1000))
    files, old = ChangedFiles(), {str(one): 2000.0}
    assert files.look(old) == ""
    os.utime(one, (1001, 1001))
    assert files.look(old) == "one.py"
    assert files.look(old) == ""
    # A file that is reported later is compared with the start of its program; a time in the future is ignored.
    assert files.look(old | {str(two): 2000.0}) == ""
    assert files.look({str(two): 999.0}) == ""
    assert files.look({str(one): 999.0}) == "one.py"
    os.utime(two, (2**33, 2**33))
    assert files.look({str(one): 999.0, str(two): 999.0}) == ""
    # A change of a remembered file is reported at the next look.
    folder = {str(tmp_path): float("inf")}
    files.remember(folder)
    assert files.look(folder) == ""
    (tmp_path / "three.py").touch()
    os.utime(tmp_path, (1002, 1002))
    assert files.look(folder) == tmp_path.name
    # An editor that replaces a file changes its folder, too.
    both = {str(one): 2000.0, **folder}
    files.look(both)
    os.utime(one, (1003, 1003))
    os.utime(tmp_path, (1004, 1004))
    assert files.look(both) == "one.py"
    files.look({str(one): 2000.0})
    one.unlink()
    assert files.look({str(one): 999.0}) == "one.py"
    assert files.look({str(one): 999.0}) == ""


@pytest.mark.parametrize("module", ["trio_mcp.cli.reload", "trio_mcp.cli.reloaded"])
def test_a_server_without_reload_does_not_import_its_modules(module: str) -> None:
    script = f"import sys; import trio_mcp.cli.serve; print({module!r} in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


@pytest.mark.full
@pytest.mark.parametrize(
    "command", [("run", "weather.py", "--reload"), ("tap", "-o", "talk.jsonl", "http://127.0.0.1:1/")]
)
def test_a_port_in_use_is_reported_before_a_server_starts(command: tuple[str, ...], weather: Path) -> None:
    weather.write_text("raise ValueError('not started')\n")
    with socket.create_server(("127.0.0.1", 0)) as used:
        address = f"127.0.0.1:{used.getsockname()[1]}"
        shown = run(*command, "--http", address, cwd=weather.parent)
    assert (shown.stdout, shown.returncode, shown.stderr.count("\n")) == ("", 1, 1)
    assert shown.stderr.startswith(f"trio-mcp: cannot listen at {address}: ")
    assert shown.stderr.endswith(
        "; another program listens there; stop it, or choose another port (0: any free port)\n"
    )
