"""The README and the pages beside it are true: their code runs, and their tables name everything there is.

`test_demo` runs the demo, and `test_readme_table` tries the table of what works in which revision.
"""

from __future__ import annotations

import inspect
import json
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.http.asgi_servers import hypercorn_of
from tests.http.client import Web
from tests.peers.installed import needs, tool
from tests.server.wire import LATEST, Object, connected, everywhere, speaking
from trio_mcp import ClientOptions, Context, HttpAddress, HttpOptions, Server, open_client, serve_http

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("servers", "http", "clients", "core"))]
README, SERVERS, HTTP, CLIENTS, CORE = TEXTS = [page.read_text(encoding="utf-8") for page in PAGES]
SCREEN = 90  # lines of the README, with which somebody begins


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What the code blocks define, run one after another, page after page."""
    blocks = re.findall(r"^```python\n(.*?)^```", "\n".join(TEXTS), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 10
    names: dict[str, Any] = {"__name__": "weather"}
    exec(compile("\n".join(blocks), "README.md", "exec", dont_inherit=True), names)
    return names


def marked(mark: str, language: str, text: str = README) -> str:
    """The one block of code with this remark above it."""
    (block,) = re.findall(rf"^<!-- {mark} -->\n```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert isinstance(block, str)
    return block


def test_the_first_screen_has_two_commands_a_server_and_a_client() -> None:
    screen = "\n".join(README.splitlines()[:SCREEN])
    set_up = "python3 -m venv .venv && .venv/bin/pip install -q -e "
    assert marked("demo", "sh", screen) == f"{set_up}. && .venv/bin/python -m trio_mcp demo\n"
    assert marked("tests", "sh", screen) == f"{set_up}'.[test]' && .venv/bin/pytest\n"
    assert README.count("```sh") == 2
    assert marked("weather.py", "python", screen)
    assert marked("client.py", "python", screen)


def test_the_server_and_the_client_are_pasted_and_run(tmp_path: Path) -> None:
    for name in ("weather.py", "client.py"):
        (tmp_path / name).write_text(marked(name, "python"))
    shown = subprocess.run(
        [sys.executable, "client.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stderr == ""
    assert shown.stdout.splitlines() == [
        "2026-07-28 ['forecast']",
        *(f"{day} 3 day {day + 1}" for day in range(3)),
        "{'city': 'Oslo', 'degrees': [4.0, 5.0, 6.0]}",
    ]


def test_what_is_linked_is_there() -> None:
    for page, text in zip(PAGES, TEXTS, strict=True):
        for target in re.findall(r"\]\((?!https:)([^)]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name} links {target}"


@everywhere
async def test_the_server_serves_what_it_says(revision: str, said: dict[str, Any], autojump_clock: MockClock) -> None:
    server = said["server"]
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


async def test_the_program_serves(said: dict[str, Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(said["serve"], port)
        await trio.testing.wait_all_tasks_blocked()
        async with speaking(await trio.open_tcp_stream("127.0.0.1", port), LATEST) as wire:
            listed = await wire.call("tools/list")
        assert [tool["name"] for tool in listed["tools"]] == ["forecast", "order"]
        nursery.cancel_scope.cancel()


async def test_the_server_listens(said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    printed, prints = trio.open_memory_channel[str](1)
    monkeypatch.setitem(said, "print", printed.send_nowait)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(said["listen"])
        authority, _, path = (await prints.receive()).removeprefix("http://").partition("/")
        host, _, port = authority.partition(":")
        web = Web(partial(trio.open_tcp_stream, host, int(port)), host=authority, path=f"/{path}")
        await tools_of(web, None)
        await tools_of(web, await web.initialize("2025-11-25"))
        await web.aclose()
        nursery.cancel_scope.cancel()


async def test_curl_calls_the_tool_as_shown(said: dict[str, Any]) -> None:
    needs("curl", lambda: tool("curl"))
    line = marked("curl", "sh", HTTP)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, said["server"])
        assert line.count("http://127.0.0.1:3000/mcp") == 1
        line = line.replace("http://127.0.0.1:3000/mcp", address.url)
        shown = await trio.run_process(["sh", "-c", line], capture_stdout=True, capture_stderr=True)
        assert shown.stderr == b""
        result = json.loads(shown.stdout.splitlines()[-1])["result"]
        assert result["structuredContent"] == {"city": "Oslo", "degrees": [4.0, 5.0, 6.0]}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("websocket", [False, True])
async def test_a_client_uses_it(websocket: bool, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    monkeypatch.setitem(said, "print", lambda *what: printed.append(what))
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, said["server"])
        await said["use"](address.websocket_url if websocket else address.url)
        nursery.cancel_scope.cancel()
    revision, names = printed[0]
    assert (revision, names) == (LATEST, ["forecast", "order"])
    assert printed[1:5] == [(0, 3, "day 1"), (1, 3, "day 2"), (2, 3, "day 3"), ([4.0, 5.0, 6.0],)]
    assert printed[5] == ("Which size?", {"gift": False})
    assert "One small, at once." in str(printed[6])
    assert printed[7][0].item == "notes://Oslo"


async def test_a_relay_shows_what_is_shown(
    said: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weather.py").write_text(marked("weather.py", "python"))
    started = Started()
    monkeypatch.setitem(said, "serve_http", lambda relay, *_: serve_http(relay, port=0, task_status=started))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(said["show"], [sys.executable, str(tmp_path / "weather.py")])
        async with open_client((await started.address()).url) as client:
            assert [tool.name async for tool in client.tools()] == ["forecast"]
        nursery.cancel_scope.cancel()


async def test_a_test_of_it_passes(said: dict[str, Any], autojump_clock: MockClock) -> None:
    await said["test_an_unknown_city_is_the_models_mistake"]()


class Started:
    """A task status that can be waited for."""

    def __init__(self) -> None:
        self._told, self._tells = trio.open_memory_channel[HttpAddress](1)

    def started(self, value: HttpAddress | None = None) -> None:
        assert value is not None
        self._told.send_nowait(value)

    async def address(self) -> HttpAddress:
        return await self._tells.receive()


async def test_the_lifespan_has_a_nursery_for_every_handler(said: dict[str, Any]) -> None:
    server, done = said["busy"], trio.Event()

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


async def test_the_application_serves(said: dict[str, Any]) -> None:
    async with hypercorn_of(said["app"]) as web:
        web.headers["Host"] = "mcp.example.com"
        await tools_of(web, None)


async def tools_of(web: Web, session: str | None) -> None:
    listed = (await web.call("tools/list", session=session)).result
    assert [tool["name"] for tool in listed["tools"]] == ["forecast", "order"]


def test_the_tables_name_every_option() -> None:
    named, of_clients = options_in(HTTP), options_in(CLIENTS)
    assert of_clients == ClientOptions.__annotations__.keys()
    own = {name for name in inspect.signature(serve_http).parameters if name in ("listeners", "unix", "ssl_context")}
    assert len(own) == 3
    assert named == HttpOptions.__annotations__.keys() | own


def options_in(page: str) -> set[str]:
    (table,) = re.findall(r"^\| Option.*?\n\n", page, re.MULTILINE | re.DOTALL)
    return {name for row in table.splitlines()[2:-1] for name in re.findall(r"`(\w+)", row.split("|")[1])}


def test_the_map_names_every_module_of_the_core() -> None:
    (table,) = re.findall(r"^\| Module.*?\n(?!\|)", CORE, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(\w+)`", table.split("\n", 2)[2]))
    assert named == {path.stem for path in (ROOT / "trio_mcp" / "core").glob("*.py")} - {"__init__"}
