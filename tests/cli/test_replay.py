"""`replay`: it sends the messages of the client again, and the recorded answers to the requests of the server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_mcp import Accepted, open_client
from trio_mcp.cli.main import main  # the command line has no public API
from trio_mcp.errors import RequestError

from .in_process import ROOT, run
from .test_cli import COMMAND, SERVER

CHANGED = '''
import tests.cli.servers as servers
from trio_mcp import Server
server = Server("weather", version="{version}")
@server.tool
async def forecast(city: str) -> str:
    """Another."""
    return "{text}"
'''
PAGES = '''
import uuid
from trio_mcp import Server
server = Server("pages")
handles = {}
@server.tool
def begin() -> str:
    """Return a handle."""
    handle = str(uuid.uuid4())
    handles[handle] = 7
    return handle
@server.tool
def use(handle: str) -> str:
    """Use a handle."""
    return f"{handle}: {handles[handle]}"
'''


@pytest.fixture(scope="module")
def modern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("talk") / "talk.jsonl", "2026-07-28")


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("talk") / "talk.jsonl", "2025-06-18")


@pytest.fixture(params=["modern", "legacy"])
def recorded(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def record(path: Path, revision: str) -> Path:
    """Make a recording with questions, calls at the same time, a cancellation and an error."""
    command = [*COMMAND, "tap", "-o", str(path), "--", *COMMAND, "run", SERVER]

    async def talk() -> None:
        def fill_in(_: object) -> Any:
            return Accepted({"size": "large", "count": 3})

        async with open_client(
            command, environment="inherit", env={"PYTHONPATH": str(ROOT)}, revision=revision, elicitation=fill_in
        ) as client:
            assert (await client.call_tool("order")).content[0].text == "3 large"  # type: ignore[union-attr]
            async with trio.open_nursery() as nursery:
                for city in ("Oslo", "Bergen"):
                    nursery.start_soon(client.call_tool, "forecast", {"city": city})
            with trio.CancelScope() as scope:
                await client.call_tool("forever", on_progress=lambda *_: scope.cancel())
            with pytest.raises(RequestError):
                await client.read_resource("notes://tomorrow")

    trio.run(talk)
    return path


def test_the_same_server_answers_the_same(recorded: Path) -> None:
    shown = run("replay", str(recorded), SERVER)
    assert (shown.stderr, shown.returncode) == ("", 0)
    lines = [line.partition(" #")[0] for line in shown.stdout.splitlines()]
    assert lines == [
        "✓ the server",
        "✓ tools/call order",
        "✓ tools/call forecast",
        "✓ tools/call forecast",
        "✓ resources/read notes://tomorrow",
        "✓ questions of the server",
        "6 compared, none different",
    ]


def test_differences_are_shown(modern: Path, tmp_path: Path) -> None:
    (tmp_path / "weather.py").write_text(CHANGED.format(version="2.0", text="rain"))
    shown = run("replay", str(modern), str(tmp_path / "weather.py"))
    assert shown.returncode == 1
    lines = shown.stdout.splitlines()
    assert '    -    "version": "1.0"' in lines
    assert '    +    "version": "2.0"' in lines
    assert any("there is no tool 'order'" in line for line in lines if line.startswith("    +"))
    assert '    -  "elicitation/create Which umbrella?"' in lines
    assert lines[-1].endswith(" different")
    found = json.loads(run("replay", str(modern), str(tmp_path / "weather.py"), "--json").stdout)
    assert (found["compared"], found["not sent"]) == (6, [])
    assert found["different"][0]["title"] == "the server"


def test_named_members_are_not_compared(modern: Path, tmp_path: Path) -> None:
    text = modern.read_text().replace("12.5", "13.5")
    (tmp_path / "t").write_text(text)
    ignored = ("--ignore", "degrees", "--ignore", "text")
    assert run("replay", str(tmp_path / "t"), SERVER, *ignored).returncode == 0
    assert run("replay", str(tmp_path / "t"), SERVER).returncode == 1


def test_generated_values_are_those_of_the_replay(tmp_path: Path) -> None:
    """The handle of the second run replaces the handle of the first run."""
    (tmp_path / "pages.py").write_text(PAGES)
    path = tmp_path / "talk.jsonl"
    command = [*COMMAND, "tap", "-o", str(path), "--", *COMMAND, "run", str(tmp_path / "pages.py")]

    async def talk() -> None:
        async with open_client(command, environment="inherit", env={"PYTHONPATH": str(ROOT)}) as client:
            handle = (await client.call_tool("begin")).content[0].text  # type: ignore[union-attr]
            await client.call_tool("use", {"handle": handle})

    trio.run(talk)
    shown = run("replay", str(path), str(tmp_path / "pages.py"))
    assert shown.stdout.splitlines()[-1] == "3 compared, none different"


def test_two_clients_of_one_recording(legacy: Path, tmp_path: Path) -> None:
    head, *entries = legacy.read_text().splitlines(keepends=True)
    late = [json.dumps({**json.loads(line), "at": json.loads(line)["at"] + 100}) + "\n" for line in entries]
    (tmp_path / "t").write_text("".join([head, *entries, *late]))
    shown = run("replay", str(tmp_path / "t"), SERVER)
    assert shown.stdout.splitlines()[-1] == "12 compared, none different"


def test_an_entry_that_is_no_message_is_not_sent(modern: Path, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(modern.read_text() + '{"at": 99, "from": "client", "text": "{bad"}\n')
    shown = run("replay", str(tmp_path / "t"), SERVER)
    assert "not sent: not JSON: {bad" in shown.stdout.splitlines()
    assert shown.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("absent", SERVER), 2, "absent cannot be read: No such file"),
        (("{}", "--", "/nonexistent/server"), 3, "/nonexistent/server"),
        (("{}", SERVER, "--revision", "2020-01-01"), 2, "2020-01-01"),
    ],
)
def test_mistakes_are_one_line(
    arguments: Sequence[str], status: int, message: str, modern: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *(each.format(modern) for each in arguments)]) == status
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("trio-mcp: ")


def test_over_http(recorded: Path) -> None:
    """The replay has a session of its own."""
    server = subprocess.Popen(
        [*COMMAND, "run", SERVER, "--http", "127.0.0.1:0"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        url = server.stderr.readline().split()[-1]
        shown = run("replay", str(recorded), url)
        assert shown.stdout.splitlines()[-1] == "6 compared, none different"
    finally:
        server.terminate()
        server.communicate(timeout=60)
