"""`Server.run` over HTTP: the life of the process.  `test_stdio` tests the parts that it shares with stdio."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import math
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import trio
import trustme

import trio_mcp
from tests.server.raw_client import LATEST
from trio_mcp import Server, UsageError
from trio_mcp.core import META_CLIENT_CAPABILITIES, META_VERSION
from trio_mcp.server import ProcessLife, live, parse_address

PROGRAM = """
import sys
import trio_mcp

server = trio_mcp.Server("processing")

@server.tool(abandon_on_cancel=False)
def wait_for(path: str) -> str:
    print("<waiting>", file=sys.stderr, flush=True)
    with open(path) as file:
        return file.read()

@server.tool
def echo() -> str:
    return "echo"

server.run(http="127.0.0.1:0", shutdown_timeout=float("inf"), path="/there", public_url="https://example.com/deep")
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:3000", ("127.0.0.1", 3000)),
        ("localhost:0", ("localhost", 0)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
        ("[::1]:3000", ("::1", 3000)),
        ("example.com:080", ("example.com", 80)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, found: tuple[str, int]) -> None:
    assert parse_address(text) == found


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("3000", "http must be a host and port"),
        ("localhost", "http must be a host and port"),
        ("localhost:", "http must be a host and port"),
        ("localhost:http", "http must be a host and port"),
        ("localhost:99999999999999999999", r"the port of http must be between 0 \(any free port\) and 65535"),
        ("localhost:65536", r"the port of http must be between 0 \(any free port\) and 65535"),
        ("localhost:-1", "http must be a host and port"),
        ("localhost:²", "http must be a host and port"),
        ("http://localhost:3000", "http must be a host and port"),
        ("localhost:3000/mcp", "http must be a host and port"),
        ("", "http must be a host and port"),
        (3000, "http must be a host and port"),
        (":3000", 'http needs a host: "127.0.0.1:3000" for this machine, "0.0.0.0:3000"'),
        ("[]:3000", 'http needs a host: "127.0.0.1:3000" for this machine, "0.0.0.0:3000"'),
        ("::1:3000", r'http="\[::1\]:3000"'),
    ],
)
def test_an_invalid_address_is_refused_with_a_hint(text: Any, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        parse_address(text)
    with pytest.raises(UsageError, match=hint):
        Server("nowhere").run(http=text)


def test_options_of_http_are_refused_for_stdio() -> None:
    with pytest.raises(TypeError, match="json_only is an option for HTTP; to serve HTTP, write run"):
        Server("stdio").run(json_only=True)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="run has no option 'jason_only'"):
        Server("mistaken").run(http="127.0.0.1:0", jason_only=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{}, {"http": "127.0.0.1:0"}], ids=["stdio", "http"])
async def test_run_inside_trio_names_the_functions_to_await(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"await serve_stdio\(server\), or serve_http\(server, host, port\)"):
        Server("inside").run(**options)


def test_a_public_address_needs_allowed_hosts() -> None:
    with pytest.raises(UsageError, match="allowed_hosts"):
        Server("open").run(http="0.0.0.0:0")


@pytest.mark.parametrize("shutdown_timeout", [-1, math.nan, "5", None])
def test_the_shutdown_timeout_is_a_number_of_seconds(shutdown_timeout: Any) -> None:
    async def serve(_: ProcessLife) -> None:
        pytest.fail("it began")

    with pytest.raises(UsageError, match="shutdown_timeout must be a number of seconds"):
        live(Server("impatient"), serve, shutdown_timeout=shutdown_timeout)


# Real processes.


def post(port: int, path: str, method: str, params: dict[str, Any]) -> http.client.HTTPConnection:
    """Send a request of the modern era, and return the connection without the answer."""
    headers = {
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
        "MCP-Protocol-Version": LATEST,
        "Mcp-Method": method,
        "Mcp-Name": params.get("name"),
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    connection.request("POST", path, body, {name: value for name, value in headers.items() if value is not None})
    return connection


class Process:
    def __init__(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stderr is not None
        self.popen = popen
        self.stderr: IO[str] = popen.stderr
        said = self.stderr.readline()
        found = re.fullmatch(
            r"processing listens at http://127\.0\.0\.1:(\d+)/there, for https://example\.com/deep/there\n", said
        )
        assert found, said
        self.port = int(found[1])

    def begin(self, tool: str, **arguments: str) -> http.client.HTTPConnection:
        """Call a tool, and return the connection without the answer."""
        meta = {META_VERSION: LATEST, META_CLIENT_CAPABILITIES: {}}
        return post(self.port, "/there", "tools/call", {"name": tool, "arguments": arguments, "_meta": meta})

    def expect_stderr(self, line: str) -> None:
        assert self.stderr.readline() == f"{line}\n"


@pytest.fixture
def process() -> Iterator[Process]:
    popen = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(Path(trio_mcp.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Process(popen)
    finally:
        popen.kill()
        popen.communicate()


def test_a_server_prints_its_address_and_sigterm_lets_calls_finish(process: Process, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    first = process.begin("wait_for", path=str(tmp_path / "go"))
    process.expect_stderr("<waiting>")
    process.popen.send_signal(signal.SIGTERM)
    with contextlib.suppress(ConnectionError):
        # The system decides when the signal arrives.  After that, no other client is served.
        status = 200
        while status == 200:
            with contextlib.closing(process.begin("echo")) as late:
                status = late.getresponse().status
        assert status == 503  # the connection existed before the signal
    (tmp_path / "go").write_text("finished")
    answer = first.getresponse()
    assert answer.status == 200
    assert "finished" in answer.read().decode()
    first.close()
    assert process.popen.wait() == 143
    assert process.popen.communicate() == ("", "")


def test_one_ctrl_c_ends_the_server_at_once(process: Process) -> None:
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.wait() == 130
    assert process.popen.communicate() == ("", "")


BUSY = """
import sys, time
import trio, trio_mcp

server = trio_mcp.Server("busy")

@server.tool
async def wait(ctx: trio_mcp.Context) -> None:
    await ctx.progress(1)
    await trio.sleep_forever()

@server.tool
def work() -> None:
    print("<working>", file=sys.stderr, flush=True)
    time.sleep(3600)

server.run(http="127.0.0.1:0")
"""


def test_one_ctrl_c_also_ends_open_streams_and_running_tools() -> None:
    popen = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", BUSY],
        env={**os.environ, "PYTHONPATH": str(Path(trio_mcp.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert popen.stderr is not None
        found = re.fullmatch(r"busy listens at http://127\.0\.0\.1:(\d+)/mcp\n", popen.stderr.readline())
        assert found
        terms: dict[str, Any] = {META_VERSION: LATEST, META_CLIENT_CAPABILITIES: {}}
        streams = [
            post(int(found[1]), "/mcp", method, params)
            for method, params in (
                ("tools/call", {"name": "wait", "_meta": {**terms, "progressToken": 1}}),
                ("subscriptions/listen", {"notifications": {"toolsListChanged": True}, "_meta": terms}),
            )
        ]
        for each in streams:
            assert each.getresponse().getheader("Content-Type") == "text/event-stream"
        streams.append(post(int(found[1]), "/mcp", "tools/call", {"name": "work", "_meta": terms}))
        assert popen.stderr.readline() == "<working>\n"
        popen.send_signal(signal.SIGINT)
        assert popen.wait() == 130
        assert popen.stderr.read() == ""
        for each in streams:
            each.close()
    finally:
        popen.kill()
        popen.communicate()


UNIX_AND_TLS = """
import ssl, sys
import trio_mcp

server = trio_mcp.Server("elsewhere")

@server.tool
def echo() -> str:
    return "echo"

context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1])
server.run(unix=sys.argv[2], ssl_context=context, tap=lambda way, data: print(way, file=sys.stderr, flush=True))
"""


def test_a_server_serves_on_a_unix_socket_with_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, place = tmp_path / "server.pem", str(tmp_path / "mcp.sock")
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(certificate)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    popen = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", UNIX_AND_TLS, str(certificate), place],
        env={**os.environ, "PYTHONPATH": str(Path(trio_mcp.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert popen.stderr is not None
        assert popen.stderr.readline() == f"elsewhere listens at {place}, for https://localhost/mcp\n"
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(place)
            with trusting.wrap_socket(plain, server_hostname="localhost") as sock:
                connection = http.client.HTTPConnection("localhost")
                connection.sock = sock
                body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "server/discover", "params": {"_meta": {
                    META_VERSION: LATEST, META_CLIENT_CAPABILITIES: {}}}})  # fmt: skip
                headers = {"Content-Type": "application/json", "MCP-Protocol-Version": LATEST}
                connection.request("POST", "/mcp", body, {**headers, "Mcp-Method": "server/discover"})
                assert connection.getresponse().status == 200
                assert "out\n" in iter(popen.stderr.readline, "")
        popen.send_signal(signal.SIGTERM)
        assert popen.wait() == 143
        assert not os.path.exists(place)
    finally:
        popen.kill()
        popen.communicate()


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [((700, 9, 10), (700, 9, 50)), ((2000, 9, 10), (2000, 9, 50)), ((700, 9, 8), (700, 9, 8))],
)
def test_full_collections_are_rarer_while_a_server_runs(
    before: tuple[int, int, int], meanwhile: tuple[int, int, int]
) -> None:
    async def serve(_: ProcessLife) -> None:
        seen.append(gc.get_threshold())

    seen: list[tuple[int, int, int]] = []
    here = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        live(Server("collecting"), serve, shutdown_timeout=1)
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*here)
    assert seen == [meanwhile]


def test_a_gc_threshold_that_the_program_sets_meanwhile_is_kept() -> None:
    async def serve(_: ProcessLife) -> None:
        gc.set_threshold(1234, 5, 6)

    here = gc.get_threshold()
    try:
        live(Server("collecting"), serve, shutdown_timeout=1)
        assert gc.get_threshold() == (1234, 5, 6)
    finally:
        gc.set_threshold(*here)


def test_a_run_that_has_ended_does_not_end_the_process_later() -> None:
    async def serve(life: ProcessLife) -> None:
        life.ends("the end of standard input")
        assert deadline_threads()

    live(Server("ended"), serve, shutdown_timeout=1)
    while deadline_threads():  # the thread of the deadline ends with the run, not a second later
        pass


@pytest.mark.parametrize(("way", "status"), [("unwanted", 0), ("terminate", 143)])
def test_a_process_that_prepares_to_serve_ends_at_once(way: str, status: int) -> None:
    async def serve(life: ProcessLife) -> None:
        with trio.CancelScope() as life.opening:
            getattr(life, way)("the end of standard input")
            await trio.sleep_forever()

    with pytest.raises(SystemExit) if status else contextlib.nullcontext() as ended:
        live(Server("opening"), serve, shutdown_timeout=math.inf)
    assert not status or ended.value.code == status


def deadline_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "trio_mcp: the last deadline"]


@pytest.mark.parametrize("shutdown_timeout", [5, math.inf])
def test_outside_the_main_thread_the_process_is_not_ended(shutdown_timeout: float) -> None:
    async def serve(life: ProcessLife) -> None:
        life.ends("the end of standard input")
        seen.append((life.patience, deadline_threads()))

    seen: list[object] = []
    thread = threading.Thread(
        target=live, args=(Server("beside"), serve), kwargs={"shutdown_timeout": shutdown_timeout}
    )
    thread.start()
    thread.join()
    assert seen == [(math.inf, [])]
