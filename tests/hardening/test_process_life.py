"""The process of a server: it answers its calls, keeps its memory small, never waits for stderr, and ends."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

import trio_mcp
from trio_mcp.core import META_CLIENT_CAPABILITIES, META_VERSION

LATEST = "2026-07-28"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    # The package under test.
    "PYTHONPATH": str(Path(trio_mcp.__file__).parents[1]),
}


def modern(id: int, method: str, **params: Any) -> dict[str, Any]:
    meta = {META_VERSION: LATEST, META_CLIENT_CAPABILITIES: {}}
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": {**params, "_meta": meta}}


def lines(messages: Iterable[object]) -> str:
    return "".join(f"{json.dumps(message)}\n" for message in messages)


# The end of the input.

PIPED_SERVER = """
import trio, trio_mcp

server = trio_mcp.Server("piped")

@server.tool
async def later(order: int) -> str:
    await trio.sleep(order / 100)
    return f"it was {order}"

@server.tool
async def ask(ctx: trio_mcp.Context) -> str:
    return str(await ctx.elicit("Which?", str))

server.run()
"""


def test_all_piped_requests_are_answered() -> None:
    calls = [modern(id, "tools/call", name="later", arguments={"order": id}) for id in (3, 2, 1)]
    asking = modern(4, "tools/call", name="ask")
    asking["params"]["_meta"][META_CLIENT_CAPABILITIES] = {"elicitation": {}}
    done = subprocess.run(
        [sys.executable, "-c", PIPED_SERVER],
        input=lines([*calls, asking]).removesuffix("\n"),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers = {answer["id"]: answer["result"] for answer in map(json.loads, done.stdout.splitlines())}
    assert {id: answers[id]["content"][0]["text"] for id in (1, 2, 3)} == {id: f"it was {id}" for id in (1, 2, 3)}
    assert answers[4]["isError"] is True
    assert "the client has closed its side of the connection" in answers[4]["content"][0]["text"]


# The last deadline.

ENDLESS_SERVER = """
import sys, time
import trio, trio_mcp

server = trio_mcp.Server("holding")

def began() -> None:
    print("<began>", file=sys.stderr)

@server.tool
async def shield() -> None:
    began()
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()

@server.tool(thread=False)
def block() -> None:
    began()
    while True:
        time.sleep(3600)

@server.tool(abandon_on_cancel=False)
def hold() -> None:
    began()
    while True:
        time.sleep(3600)

if sys.argv[1] == "stdio":
    server.run(shutdown_timeout=0.05)
else:
    server.run(http="127.0.0.1:0", shutdown_timeout=0.05)
print("never said", file=sys.stderr)
"""
WAYS: dict[str, tuple[int, list[signal.Signals]]] = {
    "the end of standard input": (0, []),
    "its client had gone": (0, []),
    "SIGTERM": (143, [signal.SIGTERM]),
    "Ctrl-C": (130, [signal.SIGINT]),
    "Ctrl-C, then SIGTERM": (130, [signal.SIGINT, signal.SIGTERM]),
}


class EndlessServer:
    """A server with a running handler that does not end."""

    def __init__(self, tool: str, way: str, kind: str, folder: Path) -> None:
        self.case = (tool, way, kind)
        self.way = way
        self.given: IO[bytes] | socket.socket | None = None
        self.connection: http.client.HTTPConnection | None = None
        call = lines([modern(1, "tools/call", name=tool)]).encode()
        stdin: Any = subprocess.PIPE
        if kind == "socket":
            self.given, stdin = socket.socketpair()
            self.given.sendall(call)
        elif kind == "file":
            (folder / tool).write_bytes(call)
            stdin = (folder / tool).open("rb")
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENDLESS_SERVER, "http" if kind == "http" else "stdio"],
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
        )  # fmt: skip
        if stdin is not subprocess.PIPE:
            stdin.close()
        if kind == "pipe":
            assert self.process.stdin is not None
            self.given = self.process.stdin
            self.process.stdin.write(call)
            self.process.stdin.flush()
        assert self.process.stderr is not None
        if kind == "http":
            output = self.process.stderr.readline().decode()
            self.connection = posted(int(output.rpartition(":")[2].partition("/")[0]), tool)
        assert self.process.stderr.readline() == b"<began>\n"

    def end_it(self) -> None:
        signals = WAYS[self.way][1]
        for number in signals:
            self.process.send_signal(number)
        if self.way == "its client had gone":  # the server notices this at a write
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process.stdin.write(lines([modern(2, "server/discover")]).encode())
            self.process.stdin.flush()
        elif not signals and isinstance(self.given, socket.socket):
            self.given.shutdown(socket.SHUT_WR)
        elif not signals and self.given is not None:
            self.given.close()

    def wait_for_end(self) -> tuple[int, list[str]]:
        assert self.process.stderr is not None
        output = self.process.stderr.read().decode().splitlines()
        return self.process.wait(), output

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for each in (self.given, self.process.stdin, self.process.stdout, self.process.stderr, self.connection):
            if each is not None:
                each.close()


def posted(port: int, tool: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"MCP-Protocol-Version": LATEST, "Mcp-Method": "tools/call", "Mcp-Name": tool}
    headers |= {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    connection.request("POST", "/mcp", json.dumps(modern(1, "tools/call", name=tool)), headers)
    return connection


TOOLS, END, GONE = ("shield", "block", "hold"), "the end of standard input", "its client had gone"
ENDINGS = [
    *((tool, way, "pipe") for tool in TOOLS for way in WAYS if way != GONE),
    *((tool, END, kind) for tool in TOOLS for kind in ("socket", "file")),
    *((tool, way, "http") for tool in TOOLS for way in WAYS if way not in (END, GONE)),
    # While the loop is blocked the server does not write, so it does not notice a lost client.
    *((tool, GONE, "pipe") for tool in TOOLS if tool != "block"),
]


@pytest.mark.full
def test_the_process_ends_even_if_a_handler_does_not(tmp_path: Path) -> None:
    """All cases run at once, because each takes three seconds."""
    servers: list[EndlessServer] = []
    try:
        for each in ENDINGS:
            servers.append(EndlessServer(*each, tmp_path))
        for each in servers:
            each.end_it()
        found = {each.case: each.wait_for_end() for each in servers}
    finally:
        for each in servers:
            each.close()
    line = "trio_mcp: a handler or the lifespan has not ended 3.05 seconds after {}; the process ends without it"
    for case, (status, output) in found.items():
        way = case[1]
        assert (case, status, output[-1]) == (case, WAYS[way][0], line.format(way.partition(",")[0]))
        assert (len(output) == 1) is (case[0] != "block")  # a handler that blocks the loop is named before


# The end of the input while the lifespan begins, and no task reads the input.

STARTING = """
import contextlib, math, sys
import trio, trio_mcp

@contextlib.asynccontextmanager
async def lifespan(server):
    print("<began>", file=sys.stderr)
    with trio.CancelScope(shield=sys.argv[1] == "shielded"):
        await trio.sleep(4 if sys.argv[1] == "slow" else math.inf)
    yield

trio_mcp.Server("beginning", lifespan=lifespan).run(shutdown_timeout=0.05)
"""


class StartingServer:
    """A server during the start of its lifespan."""

    def __init__(self, lifespan: str, *, unread: bool, gone: bool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", STARTING, lifespan],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        assert self.process.stderr.readline() == b"<began>\n"
        if unread:
            self.process.stdin.write(lines([modern(1, "server/discover")]).encode())
        if gone:
            self.process.stdout.close()
        self.process.stdin.close()

    def wait_for_end(self) -> tuple[int, str, str]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        output = "" if self.process.stdout.closed else self.process.stdout.read().decode()
        return self.process.wait(), output[:8], self.process.stderr.read().decode().partition(" seconds")[0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for each in (self.process.stdout, self.process.stderr):
            assert each is not None
            each.close()


@pytest.mark.full
def test_a_lifespan_that_does_not_start_ends_with_its_client() -> None:
    """All cases run at once, because each takes some seconds."""
    servers: list[StartingServer] = []
    try:
        for lifespan, unread, gone in (
            ("plain", False, False), ("plain", True, True), ("shielded", False, False), ("slow", True, False)
        ):  # fmt: skip
            servers.append(StartingServer(lifespan, unread=unread, gone=gone))
        found = [each.wait_for_end() for each in servers]
    finally:
        for each in servers:
            each.close()
    last = "trio_mcp: a handler or the lifespan has not ended 3.05"
    assert found == [(0, "", ""), (0, "", ""), (0, "", last), (0, '{"jsonrp', "")]


# Standard error that is not read.

LOUD_SERVER = """
import logging, sys, warnings
from sys import stderr
import trio_mcp

server = trio_mcp.Server("shouting")
warnings.simplefilter("always")
logging.getLogger("configured").addHandler(logging.StreamHandler())
logging.getLogger("configured").propagate = False
SHOUT = {
    "print": print,
    "stderr": lambda line: print(line, file=stderr),
    "log": logging.getLogger("plain").warning,
    "configured log": logging.getLogger("configured").warning,
    "warning": lambda line: warnings.showwarning(line, Warning, "here", 1, line=""),
    "bytes": lambda line: sys.stdout.buffer.write(line.encode() + b"\\n"),
}

@server.tool(thread=False)
def shout(how: str, times: int) -> str:
    for number in range(times):
        SHOUT[how](f"<{how} {number}> " + "x" * 80)
    return "heard"

if sys.argv[1] == "stdio":
    server.run()
else:
    server.run(http="127.0.0.1:0")
"""
OUTPUTS = ("print", "stderr", "log", "configured log", "warning", "bytes")


class Host:
    """A host that starts a server, and reads its stderr only on demand."""

    def __init__(self, program: str, *arguments: str, kind: str = "pipe") -> None:
        if kind == "pipe":
            self.stderr, theirs = os.pipe()
            fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
        else:
            self.stderr, theirs = (each.detach() for each in socket.socketpair())
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, env=ENVIRONMENT, text=True,
        )  # fmt: skip
        os.close(theirs)
        self.ids = iter(range(1, 100_000))

    def call(self, tool: str, **arguments: Any) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        message = modern(next(self.ids), "tools/call", name=tool, arguments=arguments)
        self.process.stdin.write(lines([message]))
        self.process.stdin.flush()
        text: str = json.loads(self.process.stdout.readline())["result"]["content"][0]["text"]
        return text

    def read_stderr_until(self, text: str) -> str:
        """Read stderr up to and including the line with this text."""
        output = b""
        while text.encode() not in output:
            data = os.read(self.stderr, 65536)
            assert data, f"the server has ended after {output.decode()[-500:]}"
            output += data
        while not output.endswith(b"\n"):
            output += os.read(self.stderr, 1)
        return output.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.stderr)


@pytest.fixture
def host() -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def start(*how: str, **options: str) -> Host:
        hosts.append(Host(*how, **options))
        return hosts[-1]

    yield start
    for each in hosts:
        each.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe cannot be set")
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_host_that_does_not_read_stderr_blocks_no_call_and_loses_lines(host: Callable[..., Host], kind: str) -> None:
    times = 1000
    server = host(LOUD_SERVER, "stdio", kind=kind)
    for how in OUTPUTS:
        assert server.call("shout", how=how, times=times) == "heard"
    output = server.read_stderr_until(" dropped here because standard error was not read\n")
    dropped = re.findall(r"^trio_mcp: (\d+) lines were dropped here because standard error was not read$", output, re.M)
    assert len(dropped) == 1
    found = [(how, int(number)) for how, number in re.findall(r"<([a-z ]+) (\d+)> x{80}", output)]
    assert found == [(how, number) for how in OUTPUTS for number in range(times)][: len(found)]
    assert len(found) + int(dropped[0]) == len(OUTPUTS) * times
    assert server.call("shout", how="print", times=1) == "heard"
    assert server.read_stderr_until("\n").startswith("<print 0> ")  # later lines are written again


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe cannot be set")
def test_a_host_that_does_not_read_stderr_blocks_no_call_on_http(host: Callable[..., Host]) -> None:
    server = host(LOUD_SERVER, "http")
    port = int(server.read_stderr_until("\n").rpartition(":")[2].partition("/")[0])
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        message = modern(1, "tools/call", name="shout", arguments={"how": "log", "times": 5000})
        headers = {"MCP-Protocol-Version": LATEST, "Mcp-Method": "tools/call", "Mcp-Name": "shout"}
        headers |= {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        connection.request("POST", "/mcp", json.dumps(message), headers)
        assert b"heard" in connection.getresponse().read()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait() == 143


# Memory.

CYCLE_SERVER = """
import trio_mcp

server = trio_mcp.Server("leaving")

class Node:
    pass

@server.tool(thread=False)
def leave(size: int) -> str:
    node = Node()
    node.itself, node.data = node, bytes(size)
    return "left"

@server.tool(thread=False)
def resident() -> str:
    with open("/proc/self/statm") as file:
        return file.read().split()[1]

server.run(shutdown_timeout=60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("size", "rounds"),
    [
        (60_000, (2, 4)),
        pytest.param(60_000, (2, 12), marks=pytest.mark.full),
        pytest.param(1_000_000, (2, 4), marks=pytest.mark.full),
    ],
)
def test_cycles_of_handlers_are_collected(size: int, rounds: tuple[int, int]) -> None:
    """`rounds` are multiples of the threshold of Python's garbage collector.  Each call leaves one cycle."""
    young = gc.get_threshold()[0]
    leaving = [modern(0, "tools/call", name="leave", arguments={"size": size})] * young
    asking = modern(1, "tools/call", name="resident")
    output = subprocess.run(
        [sys.executable, "-c", CYCLE_SERVER],
        input=lines(
            each | {"id": id}
            for id, each in enumerate([*leaving * rounds[0], asking, *leaving * (rounds[1] - rounds[0]), asking], 1)
        ),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    texts = [json.loads(line)["result"]["content"][0]["text"] for line in output.splitlines()]
    first, last = (int(text) * os.sysconf("SC_PAGE_SIZE") for text in texts if text != "left")
    assert last - first < 1.5 * young * size  # up to `young` cycles wait for the next collection


# A process that cannot start.

CANNOT_START = """
import sys, trio_mcp

server = trio_mcp.Server("eager")
server.run(**{name: value for name, _, value in [sys.argv[1].partition("=")] if name})
"""


@pytest.mark.parametrize("fd", [0, 1])
def test_a_closed_standard_stream_is_an_error_of_one_line(fd: int) -> None:
    shell = f"exec {shlex.join([sys.executable, '-c', CANNOT_START, ''])} {fd}>&-"
    done = subprocess.run(
        ["sh", "-c", shell], env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    which = "output" if fd else "input"
    why = f"standard {which} is closed; start the server with a pipe, socket or file there"
    assert (done.returncode, done.stderr) == (1, f"eager: {why}\n")


@pytest.mark.parametrize("at", ["a port", "a socket file", "a file that is no socket"])
def test_an_address_in_use_is_an_error_of_one_line(at: str, tmp_path: Path) -> None:
    path = tmp_path / "mcp"
    with socket.socket(socket.AF_INET if at == "a port" else socket.AF_UNIX) as other:
        if at == "a port":
            other.bind(("127.0.0.1", 0))
            other.listen()
            where = f"127.0.0.1:{other.getsockname()[1]}"
            option, why = f"http={where}", "another program listens there; stop it, or choose another port"
        elif at == "a socket file":
            other.bind(str(path))
            other.listen()
            where = str(path)
            option, why = f"unix={path}", "another program listens there; stop it, or choose another port"
        else:
            path.touch()
            where = str(path)
            option, why = f"unix={path}", "it exists and is not a socket; choose another path"
        done = subprocess.run(
            [sys.executable, "-c", CANNOT_START, option], env=ENVIRONMENT, capture_output=True, text=True
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"eager: cannot listen at {where}: ")
    assert why in line
