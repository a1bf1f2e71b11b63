"""`tap`: all bytes pass unchanged, and the recording has all of them."""

from __future__ import annotations

import json
import marshal
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_mcp import Limits, open_client, serve_http
from trio_mcp.cli.main import main  # the command line has no public API
from trio_mcp.cli.recording import Heard, Recorder, RecordingFile, read_recording, summary_of  # its bounds
from trio_mcp.cli.tap import pass_through  # in this process, to measure its coverage
from trio_mcp.cli.tap_http import HttpTap  # in this loop, on any port
from trio_mcp.errors import McpError
from trio_mcp.transport.http_pool import HttpPool  # requests that no client of the protocol sends
from trio_mcp.types import HttpAddress

from .in_process import run
from .servers import server
from .test_cli import SERVER, on_terminal

ROOT = Path(__file__).parents[2]
# The recorder starts its process before `tap` has threads; in a test run there may be some.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
COMMAND = (sys.executable, "-m", "trio_mcp")
ECHO = "import sys; [sys.stdout.write(line) or sys.stdout.flush() for line in sys.stdin]"


def tap(file: Path, script: str, *options: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, "tap", "-o", str(file), *options, "--", sys.executable, "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, **more,
    )  # fmt: skip


def frames(file: Path) -> list[Any]:
    return [
        (entry.sender, entry.has.get("frame", entry.has.get("text", entry.has.get("stderr"))))
        for entry in read_recording(str(file)).entries
        if "end" not in entry.has
    ]


def test_each_start_has_a_file_of_its_own_in_a_folder(tmp_path: Path) -> None:
    for _ in range(2):
        tap(tmp_path, ECHO).communicate(b'{"id": 1}\n', timeout=60)
    paths = list(tmp_path.iterdir())
    assert [len(frames(path)) for path in paths] == [2, 2]
    assert {path.suffix for path in paths} == {".jsonl"}


def test_bytes_pass_unchanged_and_are_recorded(tmp_path: Path) -> None:
    sent = b'{"jsonrpc": "2.0",  "id": 1.0, "method": "a"}\r\nhello\n\xff\xfe\n[1, NaN]\n{"unfinished": 1}'
    out, err = (process := tap(tmp_path / "t", ECHO)).communicate(sent, timeout=60)
    assert (out, err, process.returncode) == (sent, b"", 0)
    texts = ["hello", "\udcff\udcfe", "[1, NaN]"]
    values = [{"jsonrpc": "2.0", "id": 1.0, "method": "a"}, *texts, {"unfinished": 1}]
    found = frames(tmp_path / "t")
    assert [value for sender, value in found if sender == "client"] == values
    assert [value for sender, value in found if sender == "server"] == values
    assert b'{"jsonrpc": "2.0",  "id": 1.0, "method": "a"}' in (tmp_path / "t").read_bytes()
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600


def test_each_frame_is_in_the_file_before_the_end(tmp_path: Path) -> None:
    process = tap(tmp_path / "t", ECHO)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(b'{"id": 1}\n')
        process.stdin.flush()
        assert process.stdout.readline() == b'{"id": 1}\n'
        while len(frames(tmp_path / "t")) < 2:
            pass
        process.kill()
    assert frames(tmp_path / "t") == [("client", {"id": 1}), ("server", {"id": 1})]


def test_standard_error_and_the_status_pass(tmp_path: Path) -> None:
    process = tap(tmp_path / "t", "import sys; sys.stderr.write('one\\ntwo'); sys.exit(7)")
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == (b"", b"one\ntwo", 7)
    recording = read_recording(str(tmp_path / "t"))
    assert [entry.has["stderr"] for entry in recording.entries if "stderr" in entry.has] == ["one", "two"]
    assert {"ended with status 7"} == {entry.has["end"] for entry in recording.entries if "end" in entry.has}
    assert recording.about["server"] == os.path.basename(sys.executable)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_pass(number: signal.Signals, tmp_path: Path) -> None:
    script = (
        f"import signal, sys; signal.signal({int(number)}, lambda *_: sys.exit(9)); print('ready', flush=True); "
        "signal.pause()"
    )
    process = tap(tmp_path / "t", script)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 9


def test_control_c_at_a_terminal_reaches_the_server_once(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\nseen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('ready', flush=True)\nwhile not seen: time.sleep(0.01)\ntime.sleep(0.2)\nsys.exit(10 + len(seen))"
    )
    command = ("tap", "-o", str(tmp_path / "t"), "--", sys.executable, "-c", script)
    assert on_terminal(command, [("ready", "\x03")])[1] == 11


def test_a_signal_that_ends_the_server_ends_tap_as_well(tmp_path: Path) -> None:
    process = tap(tmp_path / "t", "import os; os.abort()")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGABRT
    assert read_recording(str(tmp_path / "t")).entries[-1].has["end"] == "was ended by SIGABRT"


def test_the_host_sees_a_closed_output(tmp_path: Path) -> None:
    script = "import os, sys; os.close(1); sys.stdin.read()"
    process = tap(tmp_path / "t", script)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.read() == b""
        process.stdin.close()
    assert process.returncode == 0


def test_output_of_a_server_that_has_ended_is_not_lost(tmp_path: Path) -> None:
    process = tap(tmp_path / "t", "import os; [os.write(1, b'x' * 65535 + b'\\n') for _ in range(64)]")
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert len(process.stdout.read()) == 64 * 65536
    assert len(frames(tmp_path / "t")) == 64


def test_a_full_recording_does_not_end_the_exchange(tmp_path: Path) -> None:
    process = tap(tmp_path / "t", ECHO, "--limit", "0.001")
    sent = b'{"value": "0123456789"}\n' * 1000
    out, err = process.communicate(sent, timeout=60)
    assert (out, process.returncode) == (sent, 0)
    assert err.startswith(b"trio-mcp: the recording is full: ")
    assert err.count(b"\n") == 1
    recording = read_recording(str(tmp_path / "t"))
    assert recording.entries[-1].has["end"] == "the recording is full"
    assert (tmp_path / "t").stat().st_size < 1200


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-o", "/nonexistent/t", "--", "true"], 2, "trio-mcp: /nonexistent/t cannot be written: No such file"),
        (["-o", "{}/t", "--", "/nonexistent/server"], 3, "trio-mcp: /nonexistent/server cannot be started: No such"),
        (["-o", "{}/t", "https://example.com/mcp"], 2, "trio-mcp: a URL needs --http PORT, the port at which"),
        (
            ["-o", "{}/t", "--http", "0", "ftp://x"],
            2,
            "trio-mcp: the server must be an http, https, ws or wss URL, got 'ftp://x'",
        ),
    ],
)
def test_mistakes_are_one_line(arguments: Sequence[str], status: int, message: str, tmp_path: Path) -> None:
    given = [each.format(tmp_path) for each in arguments]
    shown = subprocess.run([*COMMAND, "tap", *given], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout) == (status, "")
    assert shown.stderr.startswith(message)
    assert shown.stderr.count("\n") == 1


def test_a_command_or_a_url_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tap", "-o", "t"])
    assert "the following arguments are required: TARGET; trio-mcp tap --help shows" in capsys.readouterr().err


def test_a_file_is_a_target(tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    shown = run("read", "notes://today", "--", *COMMAND, "tap", "-o", str(talk), SERVER)
    assert (shown.stdout, shown.returncode) == ("Buy milk\n", 0)
    frames = [entry.has["frame"] for entry in read_recording(str(talk)).entries if "frame" in entry.has]
    assert [frame["method"] for frame in frames if "method" in frame] == ["server/discover", "resources/read"]


def test_a_summary_may_be_json(tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    command = [*COMMAND, "tap", "-o", str(talk), "--json", "--", sys.executable, "-c", ECHO]
    messages = '{"id": 1}\n{"id": ", \\"frame\\": "}\nno JSON\n'
    shown = subprocess.run(command, cwd=ROOT, input=messages, capture_output=True, text=True, timeout=60)
    assert (shown.stdout, shown.returncode) == (messages, 0)
    assert json.loads(shown.stderr) == {"file": str(talk), "frames": 4, "bytes": talk.stat().st_size}
    assert json.loads(summary_of(str(tmp_path / "removed"))) == {
        "file": str(tmp_path / "removed"), "frames": 0, "bytes": 0,
    }  # fmt: skip


def test_tap_loads_no_event_loop() -> None:
    script = "import sys, trio_mcp.cli.tap; print('trio' in sys.modules, 'attrs' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "False False\n"


def test_pass_through_in_this_process(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "t"), {"kind": "stdio"}, 2**20)
    (stdin, ours), (out, stdout), stderr = os.pipe(), os.pipe(), os.open(os.devnull, os.O_WRONLY)
    os.write(ours, b'{"id": 1}\n')
    os.close(ours)
    before = signal.getsignal(signal.SIGTERM)
    assert pass_through([sys.executable, "-c", ECHO], recorder, (stdin, stdout, stderr)) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    recorder.close()
    assert os.read(out, 100) == b'{"id": 1}\n'
    assert os.read(out, 100) == b""
    os.close(out)
    assert frames(tmp_path / "t") == [("client", {"id": 1}), ("server", {"id": 1})]


# The recorder.


@contextmanager
def recording(path: Path, most: int = 2**20) -> Iterator[RecordingFile]:
    file = RecordingFile(str(path), {"kind": "stdio"}, most)
    yield file
    file.close()


def heard(data: bytes | None, **more: Any) -> Heard:
    return Heard(0.5, "client", data, "frame", more)


def test_any_division_gives_the_same_frames(tmp_path: Path) -> None:
    data = b'{"a": 1}\r\n\n{"b":\r2}\n{"c": 3}'
    for at in range(1, len(data)):
        with recording(tmp_path / "t") as file:
            file.record(heard(data[:at]))
            file.record(heard(data[at:]))
        assert frames(tmp_path / "t") == [("client", {"a": 1}), ("client", {"b": 2}), ("client", {"c": 3})]


def test_a_slow_disk_drops_frames_and_does_not_delay_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_mcp.cli.recording._QUEUED", 30)
    gate = threading.Event()
    dumps = marshal.dumps
    monkeypatch.setattr("trio_mcp.cli.recording.marshal.dumps", lambda value: gate.wait() and dumps(value))
    recorder = Recorder(str(tmp_path / "t"), {"kind": "stdio"}, 2**20)
    recorder.lines("server", b'{"a": 1}\n{"b"')
    recorder.lines("server", b': 2, "long": "0123456789"}\n')
    gate.set()
    while recorder._queued:
        pass
    recorder.lines("server", b'rest of c}\n{"d": 4}\n')
    recorder.close()
    assert frames(tmp_path / "t") == [("server", {"a": 1}), ("server", None), ("server", {"d": 4})]
    assert read_recording(str(tmp_path / "t")).entries[1].has["lost"] == 27


def test_a_full_disk_ends_the_recording(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    (tmp_path / "t").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        Recorder(str(tmp_path / "t"), {"kind": "stdio"}, 2**20)


def test_a_recorder_that_has_died_does_not_end_the_exchange(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "t"), {"kind": "stdio"}, 2**30)
    os.kill(recorder._pid, signal.SIGKILL)
    for _ in range(1000):
        recorder.lines("client", b"x" * 10_000)
    recorder.close()
    assert not recorder._thread.is_alive()


def test_a_long_frame_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_mcp.cli.recording._LONGEST", 20)
    monkeypatch.setattr("trio_mcp.cli.recording._KEPT", 10)
    with recording(tmp_path / "t") as file:
        for _ in range(10):
            file.record(heard(b"0123456789"))
        file.record(heard(b'\n{"a": 1}\n'))
    first, second = read_recording(str(tmp_path / "t")).entries
    assert (first.has["cut"], first.has["text"]) == (101, "0123456789")
    assert (second.has["frame"], "cut" in second.has) == ({"a": 1}, False)


# Over HTTP.


async def _tapped(nursery: trio.Nursery, path: Path, url: str) -> tuple[str, Recorder]:
    recorder = Recorder(str(path), {"kind": "http"}, 2**24)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(HttpTap(url, recorder).serve_listeners, listeners)
    return f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", recorder


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-06-18", "2026-07-28"])
async def test_http_passes_through(revision: str, tmp_path: Path) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            address: HttpAddress = await nursery.start(serve_http, server, "127.0.0.1", 0)
            base, recorder = await _tapped(nursery, tmp_path / "t", f"{address.url}?key=sesame")
            reports: list[object] = []
            headers = {"Authorization": "Bearer sesame", "Cookie": "sesame"}
            async with open_client(f"{base}/mcp", revision=revision, headers=headers) as client:
                on_progress = lambda *report: reports.append(report)  # noqa: E731
                result = await client.call_tool("forecast", {"city": "Oslo"}, on_progress=on_progress)
                assert "12.5" in result.content[0].text  # type: ignore[union-attr]
            assert len(reports) == 2
            nursery.cancel_scope.cancel()
    recorder.close()
    text = (tmp_path / "t").read_text()
    assert "sesame" not in text
    entries = read_recording(str(tmp_path / "t")).entries
    methods = [entry.has["frame"]["method"] for entry in entries if "method" in entry.has.get("frame", {})]
    assert methods.count("tools/call") == 1
    assert methods.count("notifications/progress") == 2
    called = next(e.has["http"]["number"] for e in entries if e.has.get("frame", {}).get("method") == "tools/call")
    progress = [e.has for e in entries if e.has.get("frame", {}).get("method") == "notifications/progress"]
    assert {each["http"]["number"] for each in progress} == {called}
    assert {each["http"]["event"] for each in progress} == {"message"}
    if revision == "2025-06-18":
        assert "DELETE" in {entry.has["http"].get("method") for entry in entries if "http" in entry.has}


async def test_a_websocket_passes_through(tmp_path: Path) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            address: HttpAddress = await nursery.start(serve_http, server, "127.0.0.1", 0)
            assert address.websocket_url is not None
            base, recorder = await _tapped(nursery, tmp_path / "t", f"{address.websocket_url}?key=sesame")
            url = f"ws{base.removeprefix('http')}/ws"
            async with open_client(url, headers={"Authorization": "Bearer sesame"}) as client:
                result = await client.call_tool("forecast", {"city": "Oslo" * 10_000})
                assert "12.5" in result.content[0].text  # type: ignore[union-attr]
            nursery.cancel_scope.cancel()
    recorder.close()
    assert "sesame" not in (tmp_path / "t").read_text()
    entries = [entry.has for entry in read_recording(str(tmp_path / "t")).entries]
    assert [has["frame"]["method"] for has in entries if "method" in has.get("frame", {})] == [
        "server/discover",
        "tools/call",
    ]
    assert len([has for has in entries if "result" in has.get("frame", {})]) == 2
    assert [has["http"]["status"] for has in entries if "status" in has.get("http", {})] == [101]
    ends = {has["end"] for has in entries if "end" in has}
    assert "the server closed the connection with code 1000" in ends or "the client closed" in str(ends)


@pytest.mark.parametrize(
    ("head", "refused"),
    [
        ("Host: evil.example\r\nSec-WebSocket-Version: 13", 403),
        ("Host: localhost\r\nSec-WebSocket-Version: 12", 426),
    ],
)
async def test_a_refused_websocket(head: str, refused: int, tmp_path: Path) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            address: HttpAddress = await nursery.start(serve_http, server, "127.0.0.1", 0)
            base, recorder = await _tapped(nursery, tmp_path / "t", str(address.websocket_url))
            stream = await trio.open_tcp_stream("127.0.0.1", int(base.rpartition(":")[2]))
            fields = (
                f"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n{head}"
            )
            await stream.send_all(f"GET /ws HTTP/1.1\r\n{fields}\r\n\r\n".encode())
            assert (await stream.receive_some()).startswith(f"HTTP/1.1 {refused} ".encode())
            await stream.aclose()
            nursery.cancel_scope.cancel()
    recorder.close()
    entries = [entry.has for entry in read_recording(str(tmp_path / "t")).entries]
    assert [has["http"]["status"] for has in entries if "status" in has["http"]] == ([426] if refused == 426 else [])


async def test_a_websocket_server_that_is_not_there_is_a_bad_gateway(tmp_path: Path) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listeners[0].socket.getsockname()[1]
            await listeners[0].aclose()
            base, recorder = await _tapped(nursery, tmp_path / "t", f"ws://127.0.0.1:{port}/ws")
            with pytest.raises(McpError, match="502"):
                async with open_client(f"ws{base.removeprefix('http')}/ws"):
                    pass
            nursery.cancel_scope.cancel()
    recorder.close()
    assert "connection refused" in read_recording(str(tmp_path / "t")).entries[-1].has["end"]


async def test_a_disconnect_passes_through(tmp_path: Path) -> None:
    ended = trio.Event()

    async def serve_slowly(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\n")
        while await stream.receive_some():
            pass
        ended.set()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, serve_slowly, listeners)
            url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/mcp"
            base, recorder = await _tapped(nursery, tmp_path / "t", url)
            async with HttpPool(limits=Limits()) as pool, pool.request("GET", f"{base}/mcp", ()) as reply:
                assert await reply.receive() == b"data: {}\n\n"
            await ended.wait()
            nursery.cancel_scope.cancel()
    recorder.close()
    assert read_recording(str(tmp_path / "t")).entries[-1].has["end"] == "the client has disconnected"


async def test_other_paths_and_hosts(tmp_path: Path) -> None:
    async def serve_token(stream: trio.SocketStream) -> None:
        head = await stream.receive_some()
        assert b"Host: 127.0.0.1" in head
        await stream.send_all(b'HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\n{"access_token": "abcd"}')

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery, HttpPool(limits=Limits()) as pool:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, serve_token, listeners)
            port = listeners[0].socket.getsockname()[1]
            base, recorder = await _tapped(nursery, tmp_path / "t", f"http://127.0.0.1:{port}/mcp")
            async with pool.request("POST", f"{base}/token?code=sesame", (), b"secret=sesame") as reply:
                assert (reply.status, await reply.read(100)) == (200, b'{"access_token": "abcd"}')
            stream = await trio.open_tcp_stream("127.0.0.1", int(base.rpartition(":")[2]))
            await stream.send_all(b"GET /mcp HTTP/1.1\r\nHost: evil.example\r\n\r\n")
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 403 ")
            await stream.aclose()
            nursery.cancel_scope.cancel()
    recorder.close()
    text = (tmp_path / "t").read_text()
    assert "sesame" not in text
    assert "abcd" not in text
    assert '"path": "/token"' in text


async def test_a_server_that_is_not_there_is_a_bad_gateway(tmp_path: Path) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery, HttpPool(limits=Limits()) as pool:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listeners[0].socket.getsockname()[1]
            await listeners[0].aclose()
            base, recorder = await _tapped(nursery, tmp_path / "t", f"http://127.0.0.1:{port}/mcp")
            async with pool.request("POST", f"{base}/mcp", (), b"{}") as reply:
                assert reply.status == 502
                assert b"connection refused" in await reply.read(1000)
            nursery.cancel_scope.cancel()
    recorder.close()
    assert "connection refused" in read_recording(str(tmp_path / "t")).entries[-1].has["end"]


@pytest.mark.full
def test_http_tap_as_a_command_with_json(tmp_path: Path) -> None:
    talk = str(tmp_path / "t")
    command = [*COMMAND, "tap", "-o", talk, "--http", "localhost:0", "http://127.0.0.1:9/mcp?key=sesame", "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begun = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert re.fullmatch(r"http://localhost:\d+/mcp", begun.pop("url"))
    assert begun == {"server": "http://127.0.0.1:9/mcp", "file": talk}
    assert json.loads(rest) == {"file": talk, "frames": 0, "bytes": os.stat(talk).st_size}
    assert (errors, process.returncode) == ("", 130)


def test_http_tap_as_a_command(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "tap", "-o", str(tmp_path / "t"), "--http", "0", "http://127.0.0.1:9/mcp?key=sesame"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("trio-mcp: http://127.0.0.1:")
    assert "/mcp passes to http://127.0.0.1:9/mcp" in line
    assert "sesame" not in line
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads((tmp_path / "t").read_text())["server"] == "http://127.0.0.1:9/mcp"
