"""The README and the pages of docs/ are correct: their code runs, their links work, and their tables are complete.

The code of the pages in `SHARED` runs as one program.  The code of the others runs alone; `ALONE` says where.
`test_demo` runs the demo, `test_readme_table` tries the table of features, `test_errors_page` the error messages.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

import trio_mcp
import trio_mcp.asgi
import trio_mcp.errors
import trio_mcp.oauth
import trio_mcp.types
from tests.bench.__main__ import PAGES as BENCH_PAGES
from tests.bench.rows import ROWS, chosen
from tests.client.oauth_network import oauth_network
from tests.http.asgi_servers import hypercorn_of
from tests.http.client import HttpClient
from tests.peers.installed import needs, tool
from tests.ports import unclaimed_port
from tests.server.raw_client import LATEST, ErrorResponse, Object, client_on, connected, every_revision
from trio_mcp import Client, Context, Server, open_client, serve_http
from trio_mcp.client import connecting
from trio_mcp.testing import open_memory_pair
from trio_mcp.types import ClientOptions, HttpAddress, HttpOptions

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
README, SERVERS, HTTP, CLIENTS, OAUTH = (TEXTS[name] for name in ("README", "servers", "http", "clients", "oauth"))
TESTING, CORE, SPEED = (TEXTS[name] for name in ("testing", "core", "speed"))
# Pages with code that continues the code of the pages before, and the number of their blocks.
SHARED = {"README": 2, "servers": 5, "http": 4, "clients": 3, "oauth": 1, "testing": 2, "core": 3}
# Pages with code that runs alone, and the test that runs it.
ALONE = {
    "quickstart": (4, "test_the_quick_start_leads_to_a_tested_server"),
    "from_fastmcp": (1, "test_a_server_that_was_ported_from_fastmcp_runs"),
    "simulation": (3, "simulation.test_simulation"),
    "tasks": (4, "extensions.test_server_tasks"),
    "extensions": (1, "client.test_extensions"),
}
LENGTH = 150  # lines of the README


def code_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_code_of_every_page_runs() -> None:
    counts = {name: len(code_of(text)) for name, text in TEXTS.items() if code_of(text)}
    assert counts == SHARED | {name: count for name, (count, _) in ALONE.items()}


@pytest.fixture(scope="module")
def defined() -> dict[str, Any]:
    """The names that the code of the shared pages defines, one block after another."""
    blocks = [block for name in SHARED for block in code_of(TEXTS[name])]
    names: dict[str, Any] = {"__name__": "weather"}
    exec(compile("\n".join(blocks), "README.md", "exec", dont_inherit=True), names)
    return names


def marked(mark: str, language: str, text: str = README) -> str:
    """The one block of code with this comment above it."""
    (block,) = re.findall(rf"^<!-- {mark} -->\n```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert isinstance(block, str)
    return block


def test_the_readme_has_two_commands_a_server_and_a_client() -> None:
    assert len(README.splitlines()) <= LENGTH
    set_up = "python3 -m venv .venv && .venv/bin/pip install"
    assert marked("demo", "sh") == f"{set_up} -q -e . && .venv/bin/python -m trio_mcp demo\n"
    assert marked("tests", "sh") == f"{set_up} -e '.[test]' && .venv/bin/pytest -n auto\n"
    assert README.count("```sh") == 2
    assert marked("weather.py", "python")
    assert marked("client.py", "python")


def test_the_server_and_the_client_are_pasted_and_run(tmp_path: Path) -> None:
    for name in ("weather.py", "client.py"):
        (tmp_path / name).write_text(marked(name, "python"))
    shown = subprocess.run(
        [sys.executable, "client.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stderr == ""
    assert f"Run it: `{set_up_python()} client.py`" in README
    assert shown.stdout.splitlines() == [
        "2026-07-28 ['forecast']",
        *(f"{day} 3 day {day + 1}" for day in range(3)),
        "{'city': 'Oslo', 'degrees': [4.0, 5.0, 6.0]}",
    ]


def test_requests_are_piped_in_as_shown(tmp_path: Path) -> None:
    (tmp_path / "weather.py").write_text(marked("weather.py", "python"))
    line = marked("pipe", "sh", SERVERS)
    assert line.count("| python weather.py") == 1
    line = line.replace("| python", f"| {sys.executable}")
    shown = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    opened, called = map(json.loads, shown.stdout.splitlines())
    assert opened["result"]["protocolVersion"] == "2025-11-25"
    assert called["result"]["structuredContent"] == {"city": "Oslo", "degrees": [4.0, 5.0, 6.0]}


def test_the_commands_on_the_terminal_do_what_they_show(tmp_path: Path) -> None:
    (tmp_path / "weather.py").write_text(marked("weather.py", "python"))
    environ = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environ.pop("XDG_CONFIG_HOME", None)
    called, checked, installed = marked("cli", "console").split("$ trio-mcp ")[1:]
    for command in (called, checked, f"{installed.partition('#')[0]} --yes"):
        line, _, printed = command.partition("\n")
        shown = subprocess.run(
            [sys.executable, "-m", "trio_mcp", *shlex.split(line, comments=True)],
            cwd=tmp_path, env=environ, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        if printed:
            assert shown.stderr + shown.stdout == printed  # a terminal shows the progress as a bar
    (installed_file,) = tmp_path.rglob("claude_desktop_config.json")
    assert json.loads(installed_file.read_text())["mcpServers"]["weather"]["command"] == sys.executable


async def test_a_host_starts_the_server_as_shown(tmp_path: Path) -> None:
    (tmp_path / "weather.py").write_text(marked("weather.py", "python"))
    shown = json.loads(marked("host", "json"))["mcpServers"]["weather"]
    assert (shown["command"], shown["args"]) == (f"/path/to/{set_up_python()}", ["/path/to/weather.py"])
    async with open_client([sys.executable, str(tmp_path / "weather.py")], cwd="/") as client:
        assert [tool.name for tool in await client.list_tools()] == ["forecast"]


def set_up_python() -> str:
    """The Python that the first command of the README installs."""
    (python,) = re.findall(r"(\S+) -m trio_mcp demo", marked("demo", "sh"))
    assert isinstance(python, str)
    return python


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_to_a_page_and_a_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https:)([^)]+)\)", text):
        path, _, heading = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings], target


def test_the_index_links_every_page() -> None:
    pages = {page.stem for page in PAGES} - {"README", "CHANGELOG", "index"}
    assert set(re.findall(r"\| \[(\w+)\.md\]\(\1\.md\) \|$", TEXTS["index"], re.MULTILINE)) == pages
    assert "(docs/index.md)" in README


def test_the_quick_start_leads_to_a_tested_server(tmp_path: Path) -> None:
    text = TEXTS["quickstart"]
    for name in ("notes.py", "try_notes.py", "test_notes.py"):
        (tmp_path / name).write_text(marked(name, "python", text))
    command = [sys.executable, "try_notes.py"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == marked("printed", "text", text)
    assert shown.stderr == ""
    assert "1 passed" in pytest_in(tmp_path)
    # Its HTTP server replaces the last line.
    last = "    server.run()\n"
    assert marked("notes.py", "python", text).endswith(last)
    http = marked("http", "python", text).replace(":3000", f":{unclaimed_port()}")
    (tmp_path / "notes.py").write_text(marked("notes.py", "python", text).removesuffix(last) + http)
    trio.run(serves_http, tmp_path)


async def serves_http(folder: Path) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            start = partial(
                trio.run_process, [sys.executable, "notes.py"], cwd=folder, stderr=subprocess.PIPE, check=False
            )
            process = await nursery.start(start)
            printed = b""
            while not (found := re.search(rb"http://\S+/mcp", printed)):
                printed += await process.stderr.receive_some()
            async with open_client(found[0].decode()) as client:
                assert [tool.name for tool in await client.list_tools()] == ["write_note", "delete_note"]
            process.terminate()


async def test_a_server_that_was_ported_from_fastmcp_runs() -> None:
    names: dict[str, Any] = {"__name__": "weather"}
    exec("\n".join(code_of(TEXTS["from_fastmcp"])), names)
    async with open_client(names["server"]) as client:
        assert await client.call_tool("temperature", {"city": "Rome"}, returns=float) == 17.5
        assert (await client.call_tool("temperature", {"city": "Ur"})).is_error
        contents: Any = (await client.read_resource("stations://all")).contents
        assert json.loads(contents[0].text) == ["Oslo", "Rome"]


def test_every_host_gets_the_same_command() -> None:
    text = TEXTS["hosts"]
    languages = dict(re.findall(r"^<!-- ([\w-]+) -->\n```(\w+)$", text, re.MULTILINE))
    assert len(languages) == 7
    command, script = f"/path/to/{set_up_python()}", "/path/to/weather.py"
    for mark, language in languages.items():
        entry = marked(mark, language, text)
        if language == "sh":
            assert entry == f"claude mcp add weather -- {command} {script}\n"
            continue
        (servers,) = (json.loads(entry) if language == "json" else tomllib.loads(entry)).values()
        assert (servers["weather"]["command"], servers["weather"]["args"]) == (command, [script])
    assert list(json.loads(marked("vs-code", "json", text))) == ["servers"]


def test_the_figures_of_the_readme_are_measured() -> None:
    """Each row of the README is a row of docs/speed.md: the columns Python, TypeScript and trio_mcp, with the unit."""
    rows = {
        "CPU of a call, stdio server": "stdio, echo, modern, 64 in flight, µs",
        "CPU of a call, HTTP server, JSON": "HTTP, JSON, modern, 64 connections, µs",
        "CPU of a call, HTTP server, event streams": "HTTP, SSE, session, 64 connections, µs",
        "CPU of a call, stdio client": "client, stdio, modern, 32 in flight, µs",
        "Memory of an idle HTTP stream": "HTTP, memory of an idle GET stream, each of 5,000, KB",
        "Start of a stdio server, to the first answer": "stdio, cold start to the first answer, ms",
        "Memory of a stdio server": "stdio, memory after the first answer, MB",
    }
    measured = {row[0]: row[2:5] for row in cells(SPEED, "What | bare")}
    for label, *figures in cells(README, "Cost, on two cores"):
        row = rows.pop(label)
        typescript, python, ours = measured[row]
        unit = row.rsplit(" ", 1)[1]
        assert figures == [each if each == "–" else f"{each} {unit}" for each in (python, typescript, ours)], label
    assert not rows


def cells(text: str, head: str) -> list[list[str]]:
    """The rows of the table with this head."""
    (table,) = re.findall(rf"^\| {re.escape(head)}.*?\n\n", text, re.MULTILINE | re.DOTALL)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:-1]]


@every_revision
async def test_the_server_of_the_pages_answers_in_each_revision(
    revision: str, defined: dict[str, Any], autojump_clock: MockClock
) -> None:
    server = defined["server"]
    assert isinstance(server, Server)
    async with connected(server, revision, capabilities={"elicitation": {"form": {}}}) as wire:
        forecast = await wire.call("tools/call", {"name": "forecast", "arguments": {"city": "Oslo", "days": 2}})
        assert '"degrees"' in forecast["content"][0]["text"]
        unknown = await wire.call("tools/call", {"name": "forecast", "arguments": {"city": "Ur"}})
        assert unknown["isError"]
        note = await wire.call("resources/read", {"uri": "notes://Rome"})
        assert note["contents"][0]["text"] == "Nothing is known about Rome."
        prompt = await wire.call("prompts/get", {"name": "compare", "arguments": {"first": "Oslo", "second": "Rome"}})
        assert prompt["messages"][0]["content"]["text"].endswith("degrees C.")

        def large(params: Object) -> Object:
            return {"action": "accept", "content": {"size": "large"}}

        wire.answers["elicitation/create"] = large
        ordered = await wire.call("tools/call", {"name": "order"})
        asked = revision >= "2025-06-18"
        assert ordered["content"][0]["text"] == "One large, at once." if asked else ordered["isError"]


async def test_the_tcp_server_of_the_page_serves(defined: dict[str, Any]) -> None:
    port = unclaimed_port()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(defined["serve"], port)
        await trio.testing.wait_all_tasks_blocked()
        async with client_on(await trio.open_tcp_stream("127.0.0.1", port), LATEST) as wire:
            listed = await wire.call("tools/list")
        assert [tool["name"] for tool in listed["tools"]] == ["forecast", "order"]
        nursery.cancel_scope.cancel()


async def test_the_http_server_of_the_page_serves(defined: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    printed, prints = trio.open_memory_channel[str](1)
    monkeypatch.setitem(defined, "print", printed.send_nowait)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(defined["listen"])
        authority, _, path = (await prints.receive()).removeprefix("http://").partition("/")
        host, _, port = authority.partition(":")
        web = HttpClient(partial(trio.open_tcp_stream, host, int(port)), host=authority, path=f"/{path}")
        await tools_of(web, None)
        await tools_of(web, await web.initialize("2025-11-25"))
        await web.aclose()
        nursery.cancel_scope.cancel()


@pytest.mark.full  # curl is not on every machine
async def test_curl_calls_the_tool_as_shown(defined: dict[str, Any]) -> None:
    needs("curl", lambda: tool("curl"))
    line = marked("curl", "sh", HTTP)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, defined["server"])
        assert line.count("http://127.0.0.1:3000/mcp") == 1
        line = line.replace("http://127.0.0.1:3000/mcp", address.url)
        shown = await trio.run_process(["sh", "-c", line], capture_stdout=True, capture_stderr=True)
        assert shown.stderr == b""
        result = json.loads(shown.stdout.splitlines()[-1])["result"]
        assert result["structuredContent"] == {"city": "Oslo", "degrees": [4.0, 5.0, 6.0]}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("websocket", [False, True])
async def test_the_client_of_the_page_uses_the_server(
    websocket: bool, defined: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[Any] = []
    monkeypatch.setitem(defined, "print", lambda *values: printed.append(values))
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, defined["server"])
        await defined["use"](address.websocket_url if websocket else address.url)
        nursery.cancel_scope.cancel()
    revision, names = printed[0]
    assert (revision, names) == (LATEST, ["forecast", "order"])
    assert printed[1:5] == [(0, 3, "day 1"), (1, 3, "day 2"), (2, 3, "day 3"), ([4.0, 5.0, 6.0],)]
    assert printed[5] == ("Which size?", {"gift": False})
    assert "One small, at once." in str(printed[6])
    assert printed[7][0].item == "notes://Oslo"


async def test_the_relay_of_the_page_shows_the_tools(
    defined: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weather.py").write_text(marked("weather.py", "python"))
    started = StartedStatus()
    monkeypatch.setitem(defined, "serve_http", lambda relay, *_: serve_http(relay, port=0, task_status=started))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(defined["show"], [sys.executable, str(tmp_path / "weather.py")])
        async with open_client((await started.address()).url) as client:
            assert [tool.name for tool in await client.list_tools()] == ["forecast"]
        nursery.cancel_scope.cancel()


def test_the_test_of_the_page_passes(tmp_path: Path) -> None:
    (tmp_path / "weather.py").write_text(marked("weather.py", "python"))
    (tmp_path / "test_weather.py").write_text("from weather import server\n" + marked("test", "python", TESTING))
    (tmp_path / "pytest.ini").write_text(marked("pytest.ini", "ini", TESTING))
    assert "1 passed" in pytest_in(tmp_path, "-p", "pytest_trio.plugin")


def pytest_in(folder: Path, *options: str) -> str:
    # Autoloading would add plugins of this environment that these tests do not use.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    shown = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.returncode == 0, shown.stdout
    return shown.stdout


@every_revision
async def test_the_library_reports_missing_books(
    revision: str, defined: dict[str, Any], autojump_clock: MockClock
) -> None:
    library = defined["library"]
    async with connected(library, revision) as wire:
        found = await wire.call("resources/read", {"uri": "books://bees"})
        assert found["contents"][0]["text"].startswith("A hive in July")
        with pytest.raises(ErrorResponse, match="There is no ulysses; there are bees, tides") as missing:
            await wire.call("resources/read", {"uri": "books://ulysses"})
        assert missing.value.code == (-32602 if revision == LATEST else -32002)
        with pytest.raises(ErrorResponse, match="There is no ulysses") as missing:
            await wire.call("prompts/get", {"name": "discuss", "arguments": {"title": "ulysses"}})
        assert missing.value.code == -32602
        for ref in ({"type": "ref/prompt", "name": "discuss"}, {"type": "ref/resource", "uri": "books://{title}"}):
            done = await wire.call("completion/complete", {"ref": ref, "argument": {"name": "title", "value": "be"}})
            assert done["completion"]["values"] == ["bees"]


@every_revision
async def test_wrong_arguments_are_reported_as_the_page_says(
    revision: str, defined: dict[str, Any], autojump_clock: MockClock
) -> None:
    params = {"name": "forecast", "arguments": {"city": "Oslo", "days": "3"}}
    async with connected(defined["server"], revision) as wire:
        if revision >= "2025-11-25":
            result = await wire.call("tools/call", params)
            assert result["isError"]
            assert "/days" in result["content"][0]["text"]
        else:
            with pytest.raises(ErrorResponse, match="/days") as refused:
                await wire.call("tools/call", params)
            assert refused.value.code == -32602


@pytest.mark.parametrize("revision", ["2025-06-18", "2026-07-28"])
async def test_a_book_is_bound_in_two_rounds(revision: str, defined: dict[str, Any], autojump_clock: MockClock) -> None:
    async with open_memory_pair(
        defined["library"], revision=revision, elicitation=lambda form: {"leather": True}
    ) as pair:
        bound = await pair.client.call_tool("bind", {"title": "Bees"}, returns=str)
    assert bound == "Bees in leather, for 7."


async def test_the_timeout_of_an_opening_works_as_shown(defined: dict[str, Any], autojump_clock: MockClock) -> None:
    silent, _ = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        begun = trio.current_time()
        with pytest.raises(trio.TooSlowError):
            await defined["connect"](nursery, silent)
        assert trio.current_time() - begun == 10
        client = await defined["connect"](nursery, defined["server"])
        assert isinstance(client, Client)
        await client.aclose()


def test_the_timeouts_of_an_opening_are_those_of_the_page() -> None:
    text = " ".join(CLIENTS.split())
    assert f"{connecting.PROBE:g} seconds for the answer (`probe`)" in text
    assert f"up to {connecting.OPENING:g} seconds, because" in text


class StartedStatus:
    """A task status.  `address` waits until the server has started."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[HttpAddress](1)

    def started(self, value: HttpAddress | None = None) -> None:
        assert value is not None
        self._send.send_nowait(value)

    async def address(self) -> HttpAddress:
        return await self._receive.receive()


async def test_the_lifespan_has_a_nursery_for_every_handler(defined: dict[str, Any]) -> None:
    server, done = defined["busy"], trio.Event()

    async def work() -> None:
        done.set()
        await trio.sleep_forever()  # until the server ends

    async def begin(ctx: Context) -> str:
        ctx.lifespan.start_soon(work)
        return "begun"

    server.tool(begin)
    async with connected(server, LATEST) as wire:
        assert (await wire.call("tools/call", {"name": "begin"}))["content"][0]["text"] == "begun"
        await done.wait()


async def test_a_client_is_given_access(
    defined: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    async with oauth_network() as at:
        monkeypatch.setitem(defined, "OAuth", at.auth)
        for _ in range(2):
            await defined["use_with_access"](at.url)
        assert len(at.pages) == 1
    assert capsys.readouterr().out.count("'add'") == 2
    assert (tmp_path / ".config/my-app/tokens.json").stat().st_mode & 0o777 == 0o600


async def test_the_application_serves(defined: dict[str, Any]) -> None:
    async with hypercorn_of(defined["app"]) as web:
        web.headers["Host"] = "mcp.example.com"
        await tools_of(web, None)


async def tools_of(web: HttpClient, session: str | None) -> None:
    listed = (await web.call("tools/list", session=session)).result
    assert [tool["name"] for tool in listed["tools"]] == ["forecast", "order"]


def test_the_tables_name_every_option() -> None:
    named, of_clients = options_in(HTTP), options_in(CLIENTS)
    assert of_clients == ClientOptions.__annotations__.keys()
    own = {name for name in inspect.signature(serve_http).parameters if name in ("listeners", "unix", "ssl_context")}
    assert len(own) == 3
    assert named == HttpOptions.__annotations__.keys() | own


def test_the_table_names_every_option_of_the_decorators() -> None:
    makers = (Server.tool, Server.resource, Server.prompt, Server.completion)
    parameters = [each for maker in makers for each in inspect.signature(maker).parameters.values()]
    assert options_in(SERVERS) == {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}


def test_the_tables_name_every_option_of_a_server() -> None:
    for head, function in (("Of `Server", Server.__init__), ("Of `protect`", Server.protect)):
        parameters = [
            each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY
        ]
        page = SERVERS if "Server" in head else OAUTH
        assert options_in(page, head) == {each.name for each in parameters}
        for each in parameters:
            if type(each.default) in (int, float):
                assert f"| `{each.name}` | {each.default}: " in page


def test_the_table_of_the_context_names_existing_members() -> None:
    there = {*dir(Context), *Context.__slots__}
    assert {name for name in options_in(SERVERS, "Of `ctx`") if name != "await"} - there == set()
    assert set(re.findall(r"`await (\w+)\(", SERVERS)) - there == set()


def options_in(page: str, head: str = "Option") -> set[str]:
    (table,) = re.findall(rf"^\| {head}.*?\n\n", page, re.MULTILINE | re.DOTALL)
    return {name for row in table.splitlines()[2:-1] for name in re.findall(r"`(\w+)", row.split("|")[1])}


@pytest.mark.parametrize("page", ["from_official_sdk", "from_fastmcp"])
def test_the_equivalents_of_other_names_exist(page: str) -> None:
    homes = {
        "server": dir(Server),
        "client": dir(Client),
        "ctx": [*dir(Context), "lifespan"],
    }  # the names that objects have
    places = (trio_mcp, trio_mcp.types, trio_mcp.errors, trio_mcp.oauth, trio_mcp.asgi)
    rows = re.findall(r"^\| (?!There|---).*$", TEXTS[page], re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        here = row.split(" | ")[1]
        for home, name in re.findall(r"\b(server|client|ctx)\.(\w+)", here):
            assert name in homes[home], row
        for name in re.findall(r"`([A-Z]\w+)[(`]", here):
            assert any(hasattr(place, name) for place in places), row
        for module, names in re.findall(r"from (trio_mcp[\w.]*) import ([\w, ]+)", here):
            for name in names.split(", "):
                assert hasattr(importlib.import_module(module), name), row


def test_the_map_names_every_module_of_the_core() -> None:
    (table,) = re.findall(r"^\| Module.*?\n(?!\|)", CORE, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(\w+)`", table.split("\n", 2)[2]))
    assert named == {path.stem for path in (ROOT / "trio_mcp" / "core").glob("*.py")} - {"__init__"}


def test_the_benchmark_has_the_rows_of_the_pages() -> None:
    commands = re.findall(r"`python -m tests\.bench([^`-]*)`", " ".join("\n".join(TEXTS.values()).split()))
    assert len(commands) > 4
    assert all(words.strip() in BENCH_PAGES or chosen(words.split()) for words in commands)
    table = re.findall(r"^\| ([^|]*), [^ |]+ \|(?:[^|]*\|){7}$", SPEED, re.MULTILINE)
    names = {row.name for row in ROWS}
    assert {each.removesuffix(", with orjson") for each in table} <= names
    assert len(table) > 20
