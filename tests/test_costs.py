"""The cost of calls, counted and not timed, so that a more expensive path shows on any machine, however busy.

The count has each call of a function, of Python and of C, while a server serves or a client calls over an in-memory
stream.  The calls of the stream count, too; they are few.  The garbage collector is off, and the order of Trio's tasks
is fixed, so each count is the same every time.
"""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import trio
from trio.testing import MockClock

from trio_mcp import Context, Server, open_client, serve_http_stream, serve_stream

ROOT = Path(__file__).parent.parent
TOGETHER = 64
IN_A_ROW = 4 * TOGETHER  # calls of a client: the count includes the start and the end of its tasks

REPORTS = 1024  # of progress, in one call

# The most calls of functions for one `tools/call`, or for one report of progress: the count plus a twentieth, because
# versions of Python and of Trio differ.  A change that makes the path cheaper also lowers the figure;
# `python -m tests.test_costs` prints the counts.
CALLS = {
    "stdio, session, one after the other": 430,
    "stdio, session, together": 147,
    "stdio, modern, one after the other": 434,
    "stdio, modern, together": 151,
    "HTTP, session, one after the other": 713,
    "HTTP, modern, one after the other": 596,
    "client, session, one after the other": 407,
    "client, session, together": 132,
    "client, modern, one after the other": 412,
    "client, modern, together": 144,
    "reports, modern, in a row": 32.5,
}
# The most modules that are loaded, with those of Python and of the dependencies.
MODULES = {
    "import trio_mcp": 65,
    "stdio, one call": 285,
    "HTTP, one call": 305,
}
# The most files of this package, and the most lines in them, that a stdio server with one tool has loaded after its
# first answer.  These are the present figures, to be lowered as the code shrinks: no merge may make a small server
# larger.
FILES, LINES = 32, 12_500


class Counter:
    """The number of calls of functions inside `counting()`."""

    calls = 0

    def _seen(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")

    @contextmanager
    def counting(self) -> Iterator[None]:
        gc.disable()
        sys.setprofile(self._seen)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()


class InputStream(trio.abc.Stream):
    """The server's end of an in-memory stream.  It does very little, so that it adds few calls."""

    def __init__(self) -> None:
        self._input: list[bytes] = []
        self._waiting = trio.lowlevel.ParkingLot()
        self._output: list[bytes] = []
        self._missing = 0
        self._asking = trio.lowlevel.ParkingLot()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not self._input:
            await self._waiting.park()
        return self._input.pop()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._output.append(bytes(data))
        self._missing -= self._output[-1].count(b'"result"')
        if self._missing <= 0:
            self._asking.unpark_all()
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    async def exchange(self, data: bytes, answers: int = 1) -> bytes:
        """Give these bytes to the server.  Returns its output when it has sent so many results."""
        self._output.clear()
        self._missing = answers
        self._input.append(data)
        self._waiting.unpark()
        await self._asking.park()
        return b"".join(self._output)


class AnsweringStream(trio.abc.Stream):
    """The client's end of an in-memory stream that answers each request.  It does very little besides."""

    _ids = re.compile(rb'"id":(\d+)').findall

    def __init__(self) -> None:
        self._answers: list[bytes] = []
        self._waiting = trio.lowlevel.ParkingLot()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not self._answers:
            await self._waiting.park()
        return self._answers.pop()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if ids := self._ids(data):
            answer = ANSWERED if b'"tools/call"' in bytes(data) else OPENED
            self._answers.append(b"".join([answer % int(id) for id in ids]))
            self._waiting.unpark()
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


# Messages.

META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "costs", "version": "1"},
}
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "costs", "version": "1"}}
INITIALIZE = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": HELLO}
INITIALIZED = {"jsonrpc": "2.0", "method": "notifications/initialized"}
REVISIONS = {"session": "2025-11-25", "modern": "2026-07-28"}
OPENED = (
    b'{"jsonrpc":"2.0","id":%d,"result":{"protocolVersion":"2025-11-25","supportedVersions":["2026-07-28"],'
    b'"capabilities":{"tools":{}},"serverInfo":{"name":"costs","version":"1"}}}\n'
)
ANSWERED = b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"hello"}],"resultType":"complete"}}\n'


def call(id: int, era: str) -> dict[str, Any]:
    meta = {"_meta": META} if era == "modern" else {}
    return {
        "jsonrpc": "2.0",
        "id": id,
        "method": "tools/call",
        "params": {"name": "echo", "arguments": {"text": "hello"}, **meta},
    }


def line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def post(message: Any, era: str, session: str = "") -> bytes:
    body = json.dumps(message).encode()
    fields = {
        "Host": "127.0.0.1",
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "MCP-Protocol-Version": "2026-07-28" if era == "modern" else "2025-11-25",
    }
    if era == "modern":
        fields |= {"Mcp-Method": "tools/call", "Mcp-Name": "echo"}
    if session:
        fields["Mcp-Session-Id"] = session
    return (
        "".join(("POST /mcp HTTP/1.1\r\n", *(f"{name}: {fields[name]}\r\n" for name in fields), "\r\n")).encode() + body
    )


# Calls.


def echo_server() -> Server:
    server = Server("costs", version="1")

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def report(*, ctx: Context) -> str:
        for done in range(REPORTS):
            await ctx.progress(done, REPORTS)
        return "reported"

    return server


async def by_stdio(era: str, together: int, count: Counter) -> None:
    stream = InputStream()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, echo_server(), stream)
        if era == "session":
            await stream.exchange(line(INITIALIZE) + line(INITIALIZED))
        lines = [line(call(id, era)) for id in range(1, 2 * TOGETHER + 1)]
        await stream.exchange(b"".join(lines[:TOGETHER]), TOGETHER)
        asked = [b"".join(lines[at : at + together]) for at in range(TOGETHER, 2 * TOGETHER, together)]
        with count.counting():
            for each in asked:
                await stream.exchange(each, together)
        nursery.cancel_scope.cancel()


async def by_reports(era: str, count: Counter) -> None:
    stream = InputStream()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, echo_server(), stream)
        if era == "session":
            await stream.exchange(line(INITIALIZE) + line(INITIALIZED))
        asking = [call(id, era) for id in (1, 2)]
        for each in asking:
            meta = {**each["params"].get("_meta", {}), "progressToken": 7}
            each["params"] = {"name": "report", "arguments": {}, "_meta": meta}
        await stream.exchange(line(asking[0]))
        with count.counting():
            said = await stream.exchange(line(asking[1]))
        assert said.count(b"notifications/progress") == REPORTS
        nursery.cancel_scope.cancel()


async def by_http(era: str, count: Counter) -> None:
    stream, session = InputStream(), ""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve_http_stream, echo_server(), stream, allowed_hosts=["127.0.0.1"]))
        if era == "session":
            head = await stream.exchange(post(INITIALIZE, era))
            (session,) = (
                each[16:].decode() for each in head.split(b"\r\n") if each.lower().startswith(b"mcp-session-id: ")
            )
            await stream.exchange(post(INITIALIZED, era, session), 0)
        requests = [post(call(id, era), era, session) for id in range(1, 2 * TOGETHER + 1)]
        for each in requests[:TOGETHER]:
            await stream.exchange(each)
        # The first response of each second computes its date, which takes more calls.  A fixed time prevents this.
        with patch("time.time", lambda: 0.0), count.counting():
            for each in requests[TOGETHER:]:
                answer = await stream.exchange(each)
        assert b"application/json" in answer.lower()
        nursery.cancel_scope.cancel()


async def by_client(era: str, together: int, count: Counter) -> None:
    async with open_client(AnsweringStream(), revision=REVISIONS[era]) as client:

        async def calls(number: int) -> None:
            for _ in range(number):
                await client.call_tool("echo", {"text": "hello"})

        await calls(2)
        with count.counting():
            async with trio.open_nursery() as nursery:
                for _ in range(together):
                    nursery.start_soon(calls, IN_A_ROW // together)


def count_calls(row: str) -> float:
    """The calls of functions for one call of a tool, or for one of its reports."""
    transport, era, how = row.split(", ")
    count = Counter()
    together = TOGETHER if how == "together" else 1
    # Trio runs the tasks that are ready in a random order: the seed makes it the same each time.
    trio._core._run._r.seed(0)  # type: ignore[attr-defined]
    if transport == "reports":
        trio.run(by_reports, era, count, clock=MockClock())  # with this clock, all reports are sent in a row
        return count.calls / REPORTS
    if transport == "client":
        trio.run(by_client, era, together, count)
        return count.calls / IN_A_ROW
    if transport == "stdio":
        trio.run(by_stdio, era, together, count)
    else:
        with patch("time.time", lambda: 0.0):  # the date of responses changes once a second
            trio.run(by_http, era, count)
    return count.calls / TOGETHER


# Modules.

ONE_CALL = """
import json, sys
from trio_mcp import Server
server = Server("costs", version="1")
@server.tool
async def modules() -> str:
    return str(len(sys.modules))
"""
MESSAGE = {**call(1, "modern"), "params": {"name": "modules", "arguments": {}, "_meta": META}}
ASKED = post(MESSAGE, "modern").replace(b"Mcp-Name: echo", b"Mcp-Name: modules")
BY_STDIO = f"""{ONE_CALL}
server.run()
"""
BY_HTTP = f"""{ONE_CALL}
import trio
asked = {ASKED!r}
from trio_mcp import serve_http
async def main():
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, server, "127.0.0.1", 0)
        stream = await trio.open_tcp_stream(*address.listeners[0].socket.getsockname())
        await stream.send_all(asked)
        heard = b""
        while not heard.endswith(b"}}"):
            heard += await stream.receive_some()
        print(heard.splitlines()[-1].decode())
        nursery.cancel_scope.cancel()
trio.run(main)
"""


def count_modules(row: str) -> int:
    """The number of modules in a separate process."""
    scripts = {"stdio, one call": BY_STDIO, "HTTP, one call": BY_HTTP}
    script = scripts.get(row, f"{row}\nimport sys; print({{'text': str(len(sys.modules))}})")
    command = [sys.executable, "-c", f"{PLAIN}\n{script}"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line(MESSAGE) if row == "stdio, one call" else b"")
        process.stdin.flush()
        answer = process.stdout.readline()
        process.stdin.close()
    (found,) = re.findall(rb"[\"']text[\"']: ?[\"'](\d+)", answer)
    return int(found)


# The size of a small server.

TINY = """
import sys
from trio_mcp import Server
server = Server("tiny")
@server.tool
async def echo(text: str) -> str:
    return text
server.run()
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "trio_mcp"]
print(len(files), sum(len(open(each, "rb").readlines()) for each in files), file=sys.stderr)
"""


def small_server() -> tuple[int, int]:
    """The number of files of this package, and of their lines, that a server with one tool has loaded in the end."""
    asked = b"".join(map(line, (INITIALIZE, INITIALIZED, call(1, "session"))))
    done = subprocess.run([sys.executable, "-c", TINY], cwd=ROOT, input=asked, capture_output=True, check=True)
    assert b"hello" in done.stdout
    files, lines = done.stderr.split()
    return int(files), int(lines)


# The tests.

# Only required packages are loaded, without the optional orjson.
PLAIN = "import sys; sys.modules['orjson'] = None"


def counts() -> dict[str, float]:
    return {row: count_calls(row) for row in CALLS}


def counted_twice() -> list[dict[str, float]]:
    """The counts of two rounds in a separate process."""
    script = f"{PLAIN}; import json; from tests.test_costs import counts; print(json.dumps([counts(), counts()]))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True)
    both: list[dict[str, float]] = json.loads(done.stdout)
    return both


@pytest.fixture(scope="module")
def seen() -> list[dict[str, float]]:
    return counted_twice()


@pytest.mark.parametrize("row", CALLS)
def test_a_call_takes_few_calls_of_functions(row: str, seen: list[dict[str, float]]) -> None:
    assert seen[0][row] <= CALLS[row]


def test_the_count_is_the_same_every_time(seen: list[dict[str, float]]) -> None:
    assert seen[0] == seen[1]


@pytest.mark.parametrize("row", MODULES)
def test_few_modules_are_loaded(row: str) -> None:
    assert count_modules(row) <= MODULES[row]


def test_a_small_server_loads_few_files_and_lines() -> None:
    files, lines = small_server()
    assert files <= FILES
    assert lines <= LINES


if __name__ == "__main__":
    for row, count in counted_twice()[0].items():
        sys.stdout.write(f"{row}: {count:.1f}\n")
    for row in MODULES:
        sys.stdout.write(f"{row}: {count_modules(row)}\n")
    sys.stdout.write("a small server: {} files, {} lines\n".format(*small_server()))
