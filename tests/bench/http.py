"""What a call by HTTP costs the server, and an idle stream: ``python -m tests.bench http [words of the rows wanted]``.

Each row is measured at three servers that take turns: ours, a bare Trio + h11 responder (`responders.py`), and the
official Python SDK under uvicorn (`official.py`, with httptools and uvloop), where it can be installed.  What counts is
the CPU time of the server process, all its threads, for one call: the wall clock says more about who else is on the
machine.  The load comes from this process, over plain sockets; how busy it was is printed, for a load that is itself
out of breath measures nothing.  Ratios are of the best rounds, the spread is that of the ratios of all rounds.

Memory is what the resident size of a fresh server process grows by for each idle stream.
"""

from __future__ import annotations

import json
import re
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).parent
ROUNDS, CALLS = 7, 1500
TEXT = b"light wind from the west"
REVISION = "2025-11-25"
MODERN = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
}
ARGUMENTS = {"city": "Oslo", "days": 3, "units": "metric"}
INITIALIZE = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
ACCEPT = "application/json, text/event-stream"
PATIENCE = 60.0

# Servers.


@attrs.frozen
class Subject:
    """A server process."""

    name: str
    port: int
    process: subprocess.Popen[str] = attrs.field(repr=False)

    def cpu(self) -> float:
        """The seconds of CPU that it has used, in all its threads."""
        return time.clock_gettime(~self.process.pid << 3 | 2)  # clock_getcpuclockid(3), as Linux numbers clocks

    def resident(self) -> float:
        """The KiB that it holds in memory."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 1024


def _await_port(port: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise RuntimeError(f"nothing listens on {port}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def serving(name: str, style: str) -> Iterator[Subject]:
    """The server of this name; what `official` answers calls by, `json` or `sse`, is said when it is started."""
    if name == "official":
        port = _free_port()
        # -P: beside the program lies a module named http, which is not the one that its libraries mean.
        command = [str(official_python()), "-P", str(HERE / "official.py"), str(port), style]
    else:
        port, command = 0, [sys.executable, "-m", "tests.bench.responders", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1]) as process:
        try:
            if port:
                _await_port(port, process)
            else:
                assert process.stdout is not None
                port = int(process.stdout.readline())
            yield Subject(name, port, process)
        finally:
            process.kill()


def official_python() -> Path:
    from tests.peers.installed import python_of

    return python_of("bench-python-2.3.0", ("mcp==2.3.0", "httptools", "uvloop"))


# Load.


class Refused(Exception):
    """A server has no stream for this client."""


class Caller:
    """One keep-alive connection, with one call at a time on it."""

    def __init__(self, port: int, *, modern: bool, streams: bool) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port, self.modern, self.streams = port, modern, streams
        self.number = 1_000_000  # ids of one length, so that all calls are as long
        self.heard = bytearray()
        self.session = None if modern else self.initialize()
        self.before, self.after = self.call()

    def initialize(self) -> str:
        hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE}
        head = self.ask(self.post(hello, {}))
        found = re.search(rb"(?i)\r\nmcp-session-id: *(\S+)", head)
        assert found is not None, head
        session = found[1].decode()
        done = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        self.ask(self.post(done, {"Mcp-Session-Id": session, "MCP-Protocol-Version": REVISION}))
        return session

    def headers(self) -> dict[str, str]:
        if self.session is not None:
            return {"Mcp-Session-Id": self.session, "MCP-Protocol-Version": REVISION}
        return {"MCP-Protocol-Version": "2026-07-28"}

    def post(self, message: Any, headers: dict[str, str]) -> bytes:
        body = json.dumps(message).encode()
        fields = {
            "Host": f"127.0.0.1:{self.port}",
            "Accept": ACCEPT,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **headers,
        }
        return b"POST /mcp HTTP/1.1\r\n" + self._head(fields) + body

    def _head(self, fields: dict[str, str]) -> bytes:
        return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode() + b"\r\n"

    def call(self) -> tuple[bytes, bytes]:
        """What comes before and after the id in a call."""
        name = "report" if self.streams else "forecast"
        meta: dict[str, Any] = {**(MODERN if self.modern else {}), **({"progressToken": 7} if self.streams else {})}
        params = {"name": name, "arguments": ARGUMENTS, **({"_meta": meta} if meta else {})}
        message = {"jsonrpc": "2.0", "id": 1_000_000, "method": "tools/call", "params": params}
        headers = {**self.headers(), **({"Mcp-Method": "tools/call", "Mcp-Name": name} if self.modern else {})}
        before, _, after = self.post(message, headers).partition(b"1000000")
        return before, after

    def ask(self, request: bytes) -> bytes:
        """The whole response to a request."""
        self.socket.sendall(request)
        self.heard.clear()
        while not self.whole():
            data = self.socket.recv(65536)
            assert data, bytes(self.heard)
            self.heard += data
        return bytes(self.heard)

    def next(self) -> None:
        self.number += 1
        self.heard.clear()
        self.socket.send(b"%b%d%b" % (self.before, self.number, self.after))

    def whole(self) -> bool:
        """Whether a whole response was heard."""
        end = self.heard.find(b"\r\n\r\n")
        if end < 0:
            return False
        found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", self.heard[:end])
        if found is None:
            return self.heard.endswith(b"0\r\n\r\n") or self.heard.startswith((b"HTTP/1.1 202", b"HTTP/1.1 204"))
        return len(self.heard) >= end + 4 + int(found[1])

    def stream(self, *, listen: bool) -> None:
        """Open a stream, and leave it open."""
        if listen:
            params = {"notifications": {"toolsListChanged": True}, "_meta": MODERN}
            message = {"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": params}
            request = self.post(message, {**self.headers(), "Mcp-Method": "subscriptions/listen"})
        else:
            fields = {"Host": f"127.0.0.1:{self.port}", "Accept": "text/event-stream", **self.headers()}
            request = b"GET /mcp HTTP/1.1\r\n" + self._head(fields)
        self.socket.sendall(request)
        head = self.socket.recv(65536)
        if not head.startswith(b"HTTP/1.1 200") or b"text/event-stream" not in head.lower():
            raise Refused(head.decode())


def call_all(callers: Sequence[Caller], calls: int) -> None:
    """So many calls, one at a time by each of these, as fast as they are answered."""
    by_fd = {each.socket.fileno(): each for each in callers}
    begun, ended = min(len(by_fd), calls), 0
    with select.epoll(len(by_fd)) as epoll:
        for caller in callers[:begun]:
            epoll.register(caller.socket, select.EPOLLIN)
            caller.next()
        while ended < begun:
            for fd, _ in epoll.poll(PATIENCE):
                caller = by_fd[fd]
                data = caller.socket.recv(65536)
                caller.heard += data
                if not data or not caller.whole():
                    assert data, bytes(caller.heard)
                    continue
                assert TEXT in caller.heard, bytes(caller.heard)
                ended += 1
                if begun < calls:
                    begun += 1
                    caller.next()


@attrs.frozen
class Load:
    """Some connections that call as fast as they are answered."""

    subject: Subject
    callers: Sequence[Caller]

    def measure(self, calls: int) -> tuple[float, float]:
        """The server's CPU time for one call, in microseconds; and how busy this process was meanwhile, from 0 to 1."""
        wall, own, theirs = time.monotonic(), time.process_time(), self.subject.cpu()
        call_all(self.callers, calls)
        theirs = self.subject.cpu() - theirs
        return theirs / calls * 1e6, (time.process_time() - own) / (time.monotonic() - wall)

    def close(self) -> None:
        for each in self.callers:
            each.socket.close()


# Rows.


@attrs.frozen
class Row:
    style: str  # json, sse
    modern: bool
    connections: int

    def __str__(self) -> str:
        many = "1 connection" if self.connections == 1 else f"{self.connections} connections"
        return f"{self.style.upper()}, {'modern' if self.modern else 'session'}, {many}"

    def measure(self, names: Sequence[str], rounds: int, calls: int) -> dict[str, list[tuple[float, float]]]:
        """For each server, what each round gave."""
        with ExitStack() as stack:
            loads = [self._load(stack.enter_context(serving(name, self.style))) for name in names]
            for load in loads:
                load.measure(max(200, self.connections))  # until everything is warm
            figures: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            for _ in range(rounds):
                for load in loads:
                    figures[load.subject.name].append(load.measure(calls))
            for load in loads:
                load.close()
        return figures

    def _load(self, subject: Subject) -> Load:
        streams = self.style == "sse"
        callers = [Caller(subject.port, modern=self.modern, streams=streams) for _ in range(self.connections)]
        answer = callers[0].ask(b"%b%d%b" % (callers[0].before, 1_000_000, callers[0].after))
        kind = b"text/event-stream" if streams else b"application/json"
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert kind in answer.lower(), answer
        assert answer.count(b"notifications/progress") == streams, answer
        return Load(subject, callers)


def rows() -> Iterator[Row]:
    for style in ("json", "sse"):
        for modern in (False, True):
            for connections in (1, 16, 64):
                yield Row(style, modern, connections)


def ratio(one: Sequence[float], other: Sequence[float]) -> str:
    """That of the best rounds, and the spread of those of all rounds."""
    each = sorted(a / b for a, b in zip(one, other, strict=True))
    return f"{min(one) / min(other):.2f} ({each[0]:.2f}-{each[-1]:.2f})"


def show(row: Row, figures: dict[str, list[tuple[float, float]]]) -> None:
    cpu = {name: [each for each, _ in rounds] for name, rounds in figures.items()}
    busy = statistics.median(share for each in figures.values() for _, share in each)
    theirs = ratio(cpu["official"], cpu["ours"]) if "official" in cpu else "-"
    costs = "/".join(f"{min(each):.0f}" for each in cpu.values())
    print(f"{row!s:<32}{ratio(cpu['ours'], cpu['bare']):>18}{theirs:>22}{costs:>16}{busy:>8.0%}", flush=True)


# Memory.


def memory(name: str, number: int, *, listen: bool) -> float:
    """The KiB for each of so many idle streams; sessions of their own with them, where they have such."""
    with serving(name, "sse") as subject, ExitStack() as stack:

        def open_streams(many: int) -> None:
            for _ in range(many):
                caller = Caller(subject.port, modern=listen, streams=False)
                stack.callback(caller.socket.close)
                caller.stream(listen=listen)

        open_streams(50)  # what is made once is made
        before = subject.resident()
        open_streams(number)
        return (subject.resident() - before) / number


def show_memory(names: Sequence[str], number: int, *, listen: bool) -> None:
    title = f"{number:,} idle {'listen streams' if listen else 'GET streams of sessions'}"
    figures, refused = {}, ""
    for name in names:
        try:
            # A responder that knows no messages has nothing like listening: its stream is a GET in both rows.
            figures[name] = memory(name, number, listen=listen and name != "bare")
        except Refused:
            refused = f"  {name} has no place for so many"
    theirs = f"{figures['official'] / figures['ours']:.2f}" if "official" in figures else "-"
    costs = "/".join(f"{each:.1f}" for each in figures.values())
    print(f"{title:<40}{figures['ours'] / figures['bare']:>10.2f}{theirs:>22}{costs:>16}{refused}", flush=True)


def main(wanted: Sequence[str]) -> int:
    from tests.peers.installed import NotHere

    names = ["ours", "bare", "official"]
    try:
        official_python()
    except NotHere as reason:
        names.remove("official")
        print(f"without the official SDK, which cannot be installed here: {reason}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # which the servers inherit
    resource.setrlimit(resource.RLIMIT_NOFILE, (16_384 if hard == resource.RLIM_INFINITY else min(hard, 16_384), hard))

    def asked(title: str) -> bool:
        return all(word.lower() in title.lower().replace(",", " ").split() for word in wanted)

    shown = [row for row in rows() if asked(str(row))]
    if shown:
        print(
            f"{'CPU of the server for a call':<32}{'ours / bare':>18}{'official / ours':>22}{'µs, each':>16}{'load':>8}"
        )
    for row in shown:
        show(row, row.measure(names, ROUNDS, CALLS))
    idle = [(number, listen) for number in (1000, 5000) for listen in (False, True)]
    idle = [each for each in idle if asked(f"memory {each[0]} {'listen' if each[1] else 'get'}")]
    if idle:
        print(f"{'memory of the server for a stream':<40}{'ours / bare':>10}{'official / ours':>22}{'KiB, each':>16}")
    for number, listen in idle:
        show_memory(names, number, listen=listen)
    return 0
