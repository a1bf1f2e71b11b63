"""`bridge`: each pair of transports, and the start and end of its process."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.cli.servers import server
from tests.cli.test_cli import on_terminal, run_apart
from tests.http.auth_site import auth_site, protected_by
from tests.peers.visits import served_by_process
from trio_mcp import open_client, serve_http
from trio_mcp.cli.bridge import _serve_http  # the command line has no public API
from trio_mcp.cli.target import ServerTarget  # the same
from trio_mcp.client import Client
from trio_mcp.errors import McpError
from trio_mcp.extensions.skills import Skills
from trio_mcp.server import ProcessLife
from trio_mcp.types import CallToolResult, FormElicitationRequest, HttpAddress, SamplingRequest

ROOT = Path(__file__).parents[2]
SERVER = str(Path(__file__).parent / "servers.py")
BRIDGE = (sys.executable, "-m", "trio_mcp", "bridge")
EVERYTHING = (sys.executable, str(ROOT / "tests" / "fixtures" / "everything_server.py"), "stdio")
WATCHED = "test://watched-resource"
D, E = "2025-11-25", "2026-07-28"


@contextmanager
def started(*arguments: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*BRIDGE, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def bridged(*arguments: str, **more: Any) -> Iterator[tuple[dict[str, str], subprocess.Popen[str]]]:
    """A bridge over HTTP in a process of its own, and its addresses."""
    with started("--http", "127.0.0.1:0", "--json", *arguments, **more) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(f"the bridge did not start:\n{process.communicate()[1]}")
        yield json.loads(line), process


def ended(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str]:
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def text(result: CallToolResult) -> str:
    words: str = result.content[0].text  # type: ignore[union-attr]
    return words


def fill_in(form: FormElicitationRequest) -> Mapping[str, Any]:
    return {"response": "blue"}


def sample(request: SamplingRequest) -> tuple[str, str]:
    return "a joke", "no-model"


# The steps that must succeed for each pair of transports.


async def elicitation(client: Client) -> None:
    result = await client.call_tool("test_elicitation", {"message": "Which?"})
    assert text(result) == 'action=accept content={"response": "blue"}'


async def sampling(client: Client) -> None:
    assert text(await client.call_tool("test_sampling", {"prompt": "?"})) == "LLM response: a joke"


async def progress(client: Client) -> None:
    reports: list[float] = []
    done = trio.Event()

    def report(progress: float, *_: Any) -> None:
        reports.append(progress)
        if progress == 100:
            done.set()

    async with trio.open_nursery() as nursery:

        async def call() -> None:
            assert text(await client.call_tool("interop_progress", on_progress=report)) == "heard"

        nursery.start_soon(call)
        await done.wait()
        await client.call_tool("interop_heard")
    assert reports == [0, 50, 100]


async def list_changed(client: Client) -> None:
    async with client.listen(tools=True, prompts=True, resources=True) as changes:
        for kind in ("tools", "prompts", "resources"):
            await client.call_tool("interop_toggle", {"kind": kind, "on": True})
            while (await anext(changes)).kind.name != kind.upper():
                pass  # the notification of the previous kind, which was switched off
            await client.call_tool("interop_toggle", {"kind": kind, "on": False})


async def resource_updates(client: Client) -> None:
    async with client.listen(resources=WATCHED) as changes, trio.open_nursery() as nursery:

        async def touch() -> None:  # over HTTP in 2026-07-28 the relay acknowledges before the server behind it has
            while True:
                await client.call_tool("interop_touch", {"uri": WATCHED})

        nursery.start_soon(touch)
        assert (await anext(changes)).item == WATCHED
        nursery.cancel_scope.cancel()


async def cancellation(client: Client) -> None:
    scope = trio.CancelScope()
    with scope:
        arguments = {"seconds": 60, "tag": "left"}
        await client.call_tool("interop_wait", arguments, on_progress=lambda *_: scope.cancel())
    assert scope.cancelled_caught
    while "left" not in text(await client.call_tool("interop_cancelled")):
        pass


# The cancellation comes last.  A server of an older revision may continue a cancelled call, so in a shared session the
# relay then refuses its requests.
STEPS = (elicitation, sampling, progress, list_changed, resource_updates, cancellation)
# The transport and the revision of the client.
FRONTS = [
    ("stdio", D), ("stdio", E), ("url", D), ("url", E), ("sse_url", D), ("websocket_url", D), ("websocket_url", E),
]  # fmt: skip
# The transport and the revision of the server.
BEHIND = FRONTS


@asynccontextmanager
async def connected(target: str | Sequence[str], revision: str) -> AsyncIterator[Client]:
    options: dict[str, Any] = {} if isinstance(target, str) else {"cwd": ROOT}
    async with open_client(target, revision=revision, elicitation=fill_in, sampling=sample, **options) as client:
        assert client.revision == revision
        yield client


async def failures(target: str | Sequence[str], revision: str) -> dict[str, str]:
    """The errors of the steps, by the name of the step."""
    wrong = {}
    async with connected(target, revision) as client:
        for kind in (client.list_tools, client.list_prompts, client.list_resources):
            await kind()  # only a list that the client has requested can become out of date
        for step in STEPS:
            try:
                with trio.fail_after(30):
                    await step(client)
            except (McpError, AssertionError, trio.TooSlowError) as error:
                wrong[step.__name__] = repr(error)
        if client.deviations:
            wrong["deviations"] = str(client.deviations)
    return wrong


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("behind", BEHIND)
async def test_the_bridge_connects_each_pair_of_transports(behind: tuple[str, str]) -> None:
    way, revision = behind
    with served_by_process(sse_path="/sse", message_path="/messages") as served:
        urls = {"url": served.url, "sse_url": served.sse_url, "websocket_url": served.websocket_url}
        target = ["--revision", revision, *(["--", *EVERYTHING] if way == "stdio" else [urls[way]])]
        wrong = {}
        with bridged(*map(str, target)) as (addresses, process):
            for front, client_revision in FRONTS:
                client_target = [*BRIDGE, *map(str, target)] if front == "stdio" else addresses[front]
                if found := await failures(client_target, client_revision):
                    wrong[front, client_revision] = found
            status, errors = ended(process)
    assert wrong == {}
    assert (status, errors) == (143, "")


# The process.


async def test_a_stdio_server_over_http() -> None:
    with bridged(SERVER) as (addresses, process), trio.fail_after(60):
        async with connected(addresses["url"], D) as one, connected(addresses["websocket_url"], E) as other:
            calls = [await client.call_tool("forecast", {"city": "Oslo"}) for client in (one, other)]
            assert [call.structured_content for call in calls] == [{"city": "Oslo", "degrees": 12.5}] * 2
        assert ended(process) == (143, "")
    assert addresses["sse_url"].endswith("/sse")


async def test_an_http_server_over_stdio() -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            address: HttpAddress = await nursery.start(serve_http, server, "127.0.0.1", 0)
            reports: list[float] = []
            command = [*BRIDGE, "--revision", E, address.url]
            async with connected(command, D) as client:
                result = await client.call_tool(
                    "forecast", {"city": "Oslo"}, on_progress=lambda *on: reports.append(on[0])
                )
                assert result.structured_content == {"city": "Oslo", "degrees": 12.5}
            assert reports == [1, 2]
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["http://127.0.0.1:9/mcp?key=sesame"], 3, "trio-mcp: "),
        (["--", sys.executable, "-c", "raise SystemExit('no licence')"], 3, "trio-mcp: "),
        (["--token-env", "NAME", SERVER], 2, "trio-mcp: --token-env needs --http HOST:PORT or --ws HOST:PORT"),
        (["--http", "127.0.0.1:0", "--token-env", "NO_SUCH", SERVER], 2, "trio-mcp: --token-env NO_SUCH: the variable"),
        (["--http", "0", "--allowed-origin", "a", SERVER], 2, "trio-mcp: --allowed-origin: 'a' is not valid"),
        (["--http", "0.0.0.0:0", SERVER], 2, "trio-mcp: other machines can reach 0.0.0.0; name the hosts"),
    ],
)
def test_mistakes_are_one_line(arguments: Sequence[str], status: int, message: str) -> None:
    with started(*arguments, stdin=subprocess.PIPE) as process:  # its standard input stays open
        assert process.stdout is not None
        assert process.stderr is not None
        output, errors = process.stdout.read(), process.stderr.read()
        assert (process.wait(timeout=60), output) == (status, "")
    assert errors.splitlines()[-1].startswith(message)
    assert "sesame" not in errors


@pytest.mark.full
async def test_hosts_and_origins_are_checked() -> None:
    with bridged("--allowed-host", "mcp.example.com", "--allowed-origin", "https://page.example", SERVER) as (at, _):
        host = {"Host": "mcp.example.com"}
        for headers, status in (
            ({}, 200),
            (host, 200),
            ({"Host": "evil.example"}, 421),
            ({"Origin": "https://page.example"}, 200),
            ({"Origin": "https://evil.example"}, 403),
        ):
            assert await status_of(at["url"], headers) == status, headers


async def status_of(url: str, headers: Mapping[str, str]) -> int:
    """The status of a plain request with these headers."""
    host, _, path = url.removeprefix("http://").partition("/")
    ping = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"a","version":"1"}}}'  # noqa: E501
    fields = {
        "Host": host, "Content-Type": "application/json", "Accept": "application/json, text/event-stream",
        "Content-Length": len(ping), "Connection": "close", **headers,
    }  # fmt: skip
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    name, _, port = host.partition(":")
    async with await trio.open_tcp_stream(name, int(port)) as stream:
        await stream.send_all(f"POST /{path} HTTP/1.1\r\n{head}\r\n".encode() + ping)
        return int((await stream.receive_some()).split()[1])


@pytest.mark.full
async def test_the_bridge_prints_its_https_and_websocket_urls(tmp_path: Path) -> None:
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(context)
    certificate = str(tmp_path / "both.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    with started("--ws", "127.0.0.1:0", "--tls-cert", certificate, SERVER) as process, trio.fail_after(60):
        assert process.stderr is not None
        line = process.stderr.readline()
        assert re.fullmatch(
            r"trio-mcp: the bridge is at (wss://\S+)/ws, also https://\S+/sse and https://\S+/mcp; Ctrl-C ends\n", line
        )
        async with open_client(line.split()[5].rstrip(","), ssl_context=context) as client:
            assert "forecast" in {tool.name for tool in await client.list_tools()}
        assert ended(process) == (143, "")


@pytest.mark.full
async def test_a_token_is_required_and_never_shown() -> None:
    environ = {**os.environ, "BRIDGE_TOKEN": "sesame"}
    with bridged("--token-env", "BRIDGE_TOKEN", "--verbose", SERVER, env=environ) as (addresses, process):
        with trio.fail_after(60):
            for header, status in (("Bearer sesame", 200), ("bearer sesame", 200), ("Bearer open", 401), ("", 401)):
                assert await status_of(addresses["url"], {"Authorization": header}) == status, header
        status, errors = ended(process)
    assert status == 143
    assert "sesame" not in errors


@pytest.mark.full
async def test_a_host_on_stdio_logs_in_once(tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.peers.programs.oauth_browser import Browser\nuser = Browser()\nuser.ask(user.visit(sys.argv[1]))\n"
    )
    browser.chmod(0o755)
    env = {"BROWSER": f"{browser} %s &", "HOME": str(tmp_path)}
    stderr = bytearray()
    async with auth_site() as site, protected_by(site) as url:
        with trio.fail_after(60):
            for _ in range(2):
                command = [*BRIDGE, url, "--oauth", "--verbose"]
                async with open_client(command, env=env, cwd=ROOT, stderr=stderr.extend) as client:
                    assert await client.call_tool("who", returns=str) == "notes:read"
                    site.server.expire()
                    assert await client.call_tool("who", returns=str) == "notes:read"
        grants = [each["grant_type"] for each in site.server.of("token")]
        assert grants == ["authorization_code", "refresh_token", "refresh_token"]
        assert not [token for token in site.server.tokens if token.encode() in stderr]
        assert stderr.count(f"trio-mcp: log in with the browser: {site.issuer}".encode()) == 1
    assert os.stat(f"{tmp_path}/.config/trio-mcp/tokens.json").st_mode & 0o777 == 0o600


async def test_a_login_that_is_required_names_the_options() -> None:
    async with auth_site() as site, protected_by(site) as url:
        shown = await trio.to_thread.run_sync(run_apart, "list", url)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.endswith("; use --oauth to log in, or --header 'Authorization: Bearer TOKEN'\n")


@pytest.mark.full
async def test_a_server_that_dies_is_started_again_for_the_next_call(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import os\nfrom trio_mcp import Server\nserver = Server('dies')\n"
        "@server.tool\nasync def pid() -> int:\n    return os.getpid()\n"
        "@server.tool\nasync def die() -> None:\n    os._exit(3)\n"
    )
    with bridged(str(script)) as (addresses, process), trio.fail_after(60):
        async with connected(addresses["url"], D) as one, connected(addresses["url"], D) as other:
            pids = [await client.call_tool("pid", returns=int) for client in (one, other)]
            assert len(set(pids)) == 2  # a process for each client
            with pytest.raises(McpError, match="it has ended, and is started again with the next request"):
                await one.call_tool("die")
            assert await one.call_tool("pid", returns=int) not in pids
            assert await other.call_tool("pid", returns=int) == pids[1]
        status, errors = ended(process)
    assert status == 143
    assert "tools/call got no answer from the upstream server" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(pids[1], 0)


@pytest.mark.full
@pytest.mark.parametrize("revision", [D, E])
async def test_skills_pages_and_tasks_pass_the_bridge(revision: str, tmp_path: Path) -> None:
    script = tmp_path / "extended.py"
    script.write_text(
        "from trio_mcp import Context, Server\nfrom trio_mcp.extensions.apps import add_page\n"
        "server = Server('extended')\n"
        f"server.skills({str(ROOT / 'tests' / 'fixtures' / 'skills')!r})\n"
        "add_page(server, 'ui://clock', '<p>noon</p>')\n"
        "@server.tool(task='optional')\nasync def job(ctx: Context) -> str:\n    return 'done'\n"
    )
    declared = {"io.modelcontextprotocol/ui": {"mimeTypes": ["text/html;profile=mcp-app"]}}
    with bridged(str(script)) as (addresses, _), trio.fail_after(60):
        async with open_client(addresses["url"], revision=revision, tasks=True, extensions=declared) as client:
            assert "ui://clock" in [each.uri for each in await client.list_resources()]
            task = await client.start_task("job")
            assert text(await task.result()) == "done"
            if revision == E:
                assert "io.modelcontextprotocol/ui" in client.extensions
                assert await Skills(client).list()


@pytest.mark.full
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_signal_ends_the_bridge_and_its_servers(number: int, status: int) -> None:
    with bridged(SERVER) as (addresses, process), trio.fail_after(60):
        begun = trio.Event()
        outcome: list[object] = []

        async def call(client: Client) -> None:
            try:
                outcome.append(await client.call_tool("forever", on_progress=lambda *_: begun.set()))
            except McpError as error:
                outcome.append(error)

        async with connected(addresses["websocket_url"], D) as client, trio.open_nursery() as nursery:
            nursery.start_soon(call, client)
            await begun.wait()
            found, errors = await trio.to_thread.run_sync(ended, process, number)
        assert found == status
        # Ctrl-C cancels the writes, too.  The end of its input and signals then end the upstream server.
        assert errors == ("cancelled\n" if number == signal.SIGTERM else "")
        assert isinstance(outcome[0], McpError)


@pytest.mark.full
def test_on_a_terminal_the_bridge_says_that_it_waits() -> None:
    shown, status = on_terminal(("bridge", SERVER), [("standard input; Ctrl-C ends\r\n", "\x03")])
    assert (shown, status) == ("trio-mcp: waiting for an MCP client on standard input; Ctrl-C ends\n^C", 130)


async def test_a_bridge_that_is_still_connecting_ends_at_once(autojump_clock: MockClock) -> None:
    silent, _ = memory_stream_pair()
    life = ProcessLife(server, math.inf, None)
    listen: Any = None  # it is never reached
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_serve_http, ServerTarget(silent), {}, listen, listen, life)  # type: ignore[arg-type]
        await wait_all_tasks_blocked()
        began = trio.current_time()
        life.unwanted("the end of standard input")
    assert trio.current_time() == began


@pytest.mark.full
def test_the_end_of_input_ends_a_bridge_that_is_still_connecting() -> None:
    with started("--", sys.executable, "-c", "import sys; sys.stdin.read()", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0
