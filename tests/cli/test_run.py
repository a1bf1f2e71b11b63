"""`run --http`, with TLS."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trio
import trustme

from tests.cli.in_process import ROOT, run
from tests.cli.test_cli import COMMAND, SERVER
from trio_mcp import open_client
from trio_mcp.cli.main import main  # the command line has no public API


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A certificate, its key, and both in one file."""
    folder, issued = tmp_path_factory.mktemp("tls"), authority.issue_cert("127.0.0.1", "localhost")
    found = {name: folder / f"{name}.pem" for name in ("cert", "key", "both")}
    for blob in issued.cert_chain_pems:
        blob.write_to_path(found["cert"], append=True)
    issued.private_key_pem.write_to_path(found["key"])
    issued.private_key_and_cert_chain_pem.write_to_path(found["both"])
    return found


@pytest.mark.parametrize(
    ("options", "reload"),
    [(("--tls-cert", "cert", "--tls-key", "key"), ()), (("--tls-cert", "both"), ("--reload",))],
    ids=["run", "reload"],
)
@pytest.mark.full
async def test_https_is_served(
    options: Sequence[str], reload: Sequence[str], files: dict[str, Path], trusting: ssl.SSLContext
) -> None:
    given = [*(str(files.get(each, each)) for each in options), "--allowed-host", "tools.example.com", *reload]
    with https_process(given) as url, trio.fail_after(60):
        assert statuses(url, trusting, ("127.0.0.1", "tools.example.com", "evil.example.com")) == [400, 400, 421]
        async with open_client(url, ssl_context=trusting) as client:
            assert (await client.call_tool("forecast", {"city": "Oslo"})).structured_content is not None
        by_websocket = url.replace("https", "wss").replace("/mcp", "/ws")
        async with open_client(by_websocket, ssl_context=trusting) as client:
            assert (await client.read_resource("notes://today")).contents


@contextlib.contextmanager
def https_process(options: Sequence[str]) -> Iterator[str]:
    """A process that serves until the end of the block, and its URL."""
    command = [*COMMAND, "run", SERVER, "--http", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        (url,) = [word for word in process.stderr.readline().split() if "://" in word]
        assert url.startswith("https://127.0.0.1:")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert (process.returncode, rest) == (130, "")


@pytest.mark.full
def test_workers_serve_a_file() -> None:
    command = [sys.executable, "-m", "trio_mcp", "run", SERVER, "--http", "127.0.0.1:0", "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        shown = process.stderr.readline()
        assert shown.endswith("/mcp, with 2 workers\n")
        url = shown.split(" listens at ")[1].partition(",")[0]
        tools = run("list", url)
        process.terminate()
        assert (tools.returncode, process.wait(timeout=60)) == (0, 143)


@pytest.mark.parametrize(
    "more",
    [(), pytest.param(("--workers", "2"), marks=pytest.mark.full), pytest.param(("--reload",), marks=pytest.mark.full)],
)
def test_the_address_may_be_json(more: Sequence[str]) -> None:
    command = [sys.executable, "-m", "trio_mcp", "run", SERVER, "--http", "0", "--json", *more]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        event = json.loads(process.stdout.readline())
        url = event.pop("url")
        assert event == {"event": "listening", "workers": 2 if "--workers" in more else 1, "pid": process.pid}
        tools = run("list", url)
        process.terminate()
        rest, _ = process.communicate(timeout=60)
        assert (tools.returncode, rest, process.returncode) == (0, "", 143)


def test_on_stdio_events_are_no_messages() -> None:
    ping = '{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n'
    shown = run("run", SERVER, "--json", input=ping)
    assert json.loads(shown.stdout)["id"] == 1
    event = json.loads(shown.stderr)
    assert (event.pop("pid") > 0, event) == (True, {"event": "serving"})


def statuses(url: str, context: ssl.SSLContext, hosts: Sequence[str]) -> list[int]:
    """The statuses of requests for these hosts."""
    found = []
    for host in hosts:
        connection = http.client.HTTPSConnection(urlsplit(url).netloc, context=context)
        connection.request("GET", "/mcp", headers={"Host": host, "Accept": "text/event-stream"})
        found.append(connection.getresponse().status)
        connection.close()
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tls-key", "key"), "--tls-key needs --tls-cert, the certificate of this key"),
        (("--tls-cert", "both"), "--tls-cert, --allowed-host and --workers need --http HOST:PORT"),
        (("--http", "127.0.0.1:0", "--tls-cert", "cert"), "no TLS with "),
        (("--http", "127.0.0.1:0", "--tls-cert", "absent"), "no TLS with absent: No such file or directory"),
        (("--http", "127.0.0.1:0", "--tls-cert", "locked"), "the private key is encrypted; write one without"),
        (("--http", "127.0.0.1:0", "--workers", "2", "--reload"), "--reload runs one process; leave --workers out"),
        (("--http", "0", "--allowed-host", "a b"), "--allowed-host: 'a b' is not valid; write it like 'example.com'"),
        (("--http", "0.0.0.0:0", "--reload"), "other machines can reach 0.0.0.0; name the hosts in their URLs"),
    ],
)
def test_wrong_options_are_one_line(
    options: Sequence[str],
    message: str,
    files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the command replaces it
    locked = tmp_path / "locked.pem"
    openssl = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", str(files["key"]), "-out", str(locked)]
    if "locked" in options:
        subprocess.run(openssl, check=True, capture_output=True)
        locked.write_text(files["cert"].read_text() + locked.read_text())
    known = {**files, "locked": locked}
    assert main(["run", SERVER, *[str(known.get(each, each)) for each in options]]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"trio-mcp: {message}")
    assert (shown.out, shown.err.count("\n")) == ("", 1)


@pytest.mark.full
def test_a_public_address_needs_an_option() -> None:
    shown = run("run", SERVER, "--http", "0.0.0.0:0")
    assert (shown.returncode, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert shown.stderr.startswith("trio-mcp: other machines can reach 0.0.0.0; ")
    assert shown.stderr.endswith("; on the command line: --allowed-host mcp.example.com\n")


@pytest.mark.full
def test_the_error_for_an_unknown_name_lists_the_names_of_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the command replaces it
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["run", f"{SERVER}:nothing"]) == 2
    assert capsys.readouterr().err == f"trio-mcp: {SERVER} has no 'nothing'; it has {SERVER}:server\n"


def test_a_script_without_a_server_has_no_http(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("x = 1\n")
    shown = run("run", str(script), "--http", "127.0.0.1:0")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == f"trio-mcp: --http needs a Server of trio_mcp; {script} has no server\n"
