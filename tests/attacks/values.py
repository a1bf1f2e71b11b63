"""The time that one message delays all others, and the memory that it takes: ``python -m tests.attacks.values``.

``--against COMMIT`` also shows the figures of another commit.  Words choose the attacks that have them in their names.
Each server and client is its own process on loopback, without orjson, like a plain installation.  The unit is the time
of `json.loads` for 16 MiB of ``\\n`` escapes in one string, about 25 ms.

While a server receives the message, another client calls a tool many times.  The figures are the longest of these
calls, and the peak memory of the server.  The figure of a client is the longest time in which no other task of it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from decimal import Decimal, localcontext
from itertools import count, islice
from math import inf, nextafter
from pathlib import Path

import attrs
import trio

from tests.bench.subjects import BEFORE, ROOT, checked_out

__all__ = ["ANSWERS", "MESSAGES", "Figures", "attack_client", "attack_ids", "attack_server", "running"]

MIB = 1024 * 1024
PATIENCE = 60.0
"""Seconds after which the measurement gives up, and the attack has succeeded."""

SERVER = """
import sys
sys.modules["orjson"] = None
from typing import Any
import trio
from trio_mcp import Server, serve_http

server = Server("victim", version="1")

@server.tool
async def ok(a: Any = None) -> str:
    return "ok"

async def main():
    async with trio.open_nursery() as nursery:
        address = await nursery.start(lambda task_status: serve_http(server, "127.0.0.1", 0, task_status=task_status))
        print(address.listeners[0].socket.getsockname()[1], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()

trio.run(main)
"""

WAITING = """
import sys
sys.modules["orjson"] = None
import trio
from trio_mcp import Limits, Server

server = Server("victim", version="1", limits=Limits(calls=20_000, requests=20_000))

@server.tool
async def wait() -> str:
    await trio.sleep_forever()

server.run()
"""

CLIENT = """
import sys, time
sys.modules["orjson"] = None
import json, logging
import trio
from trio.testing import memory_stream_pair
from trio_mcp import open_client

logging.disable()
method, answer = sys.argv[1], sys.stdin.buffer.read()

async def play(stream):
    buffer = b""
    while data := await stream.receive_some():
        *lines, buffer = (buffer + data).split(b"\\n")
        for line in lines:
            message = json.loads(line)
            if message["method"] == "initialize":
                said = {"capabilities": {"tools": {}}, "serverInfo": {"name": "hostile", "version": "1"}}
                result = json.dumps({"protocolVersion": "2025-11-25", **said}).encode()
            elif message["method"] == method:
                result = answer
            elif message["method"] == "tools/list":
                pattern = {"type": "string", "pattern": "a[ab]{4000}[cde]"}
                schema = {"type": "object", "properties": {"slow": pattern}}
                tool = {"name": "t", "inputSchema": {"type": "object"}, "outputSchema": schema}
                result = json.dumps({"tools": [tool]}).encode()
            else:
                continue
            await stream.send_all(b'{"jsonrpc":"2.0","id":%d,"result":%b}\\n' % (message["id"], result))

async def tick(gaps):
    while True:
        before = time.perf_counter()
        await trio.sleep(0.001)
        gaps.append(time.perf_counter() - before)

async def main():
    ours, theirs = memory_stream_pair()
    gaps = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(play, theirs)
        async with open_client(ours, revision="2025-11-25") as client:
            if method == "tools/call":
                await client.list_tools_page()
            nursery.start_soon(tick, gaps)
            await trio.sleep(0.02)
            error = ""
            async def call():
                nonlocal error
                try:
                    await (client.call_tool("t") if method == "tools/call" else client.list_tools_page())
                except Exception as caught:
                    error = str(caught)[:80]
            async with trio.open_nursery() as calling:
                calling.start_soon(call)
            await trio.sleep(0.02)
        nursery.cancel_scope.cancel()
    print(json.dumps([max(gaps), error]))

trio.run(main)
"""


# Messages.


def _array(item: str, count: int) -> str:
    return "[" + ",".join([item] * count) + "]"


def _halfway() -> str:
    """A double that lies between two others, written out."""
    low = 2.3e-308
    with localcontext(prec=1200):
        return format((Decimal.from_float(low) + Decimal.from_float(nextafter(low, inf))) / 2, "e")


_MOST = 199_900  # values, beside those of the envelope
_ESCAPES = "\\n" * (8 * MIB - 1000)

MESSAGES: Mapping[str, Callable[[], str]] = {
    "text: 16 MiB of escapes": lambda: f'"{_ESCAPES}"',
    "refused: 6.6 million lists, 110 deep": lambda: _array("[" * 110 + "]" * 110, 60_000),
    "refused: 8 million numbers": lambda: _array("1", 8 * MIB - 1000),
    "refused: 5 million texts": lambda: _array('""', 16 * MIB // 3 - 1000),
    "refused: 3,900 integers of 4,300 digits": lambda: _array("9" * 4300, 3890),
    "refused: 21,000 doubles of 770 digits": lambda: _array(_halfway(), 21_000),
    "refused: 1e400 behind 16 MiB": lambda: f'["{_ESCAPES}",1e400]',
    "refused: half a pair behind 16 MiB": lambda: f'["{_ESCAPES}","\\ud800"]',
    "refused: no JSON behind 16 MiB": lambda: f'["{_ESCAPES}"',
    "refused: 200,000 objects, too deep": lambda: _array('{"a":' * 150 + "1" + "}" * 150, _MOST // 151),
    "taken: 200,000 numbers": lambda: _array("12345", _MOST),
    "taken: 100,000 objects": lambda: _array('{"a":1}', _MOST // 2),
    "taken: 200,000 lists, 110 deep": lambda: _array("[" * 110 + "]" * 110, _MOST // 111),
    "taken: 200,000 objects, 110 deep": lambda: _array('{"a":' * 110 + "1" + "}" * 110, _MOST // 111),
    "taken: 200,000 doubles": lambda: _array("1.2345678901234567e-300", _MOST),
    "taken: 200,000 members of one object": lambda: "{" + ",".join(f'"{i:070}":{i}' for i in range(_MOST)) + "}",
    "taken: the same, with escapes and commas": lambda: (
        "{" + ",".join(f'"{i:05}":"{_UGLY}"' for i in range(_MOST)) + "}"
    ),
}
_UGLY = '\\",\\n' * 12

_TEXT = '{"type":"text","text":"x"}'
ANSWERS: Mapping[str, tuple[str, Callable[[], str]]] = {
    "refused: 6.6 million lists, 110 deep": (
        "tools/call", lambda: f'{{"content":[],"structuredContent":{{"a":{_array("[" * 110 + "]" * 110, 60_000)}}}}}',
    ),
    "refused: 500,000 contents": ("tools/call", lambda: f'{{"content":{_array(_TEXT, 500_000)}}}'),
    "a pattern with 4,000 places for 1 MB": (
        "tools/call", lambda: f'{{"content":[],"structuredContent":{{"slow":"{"ab" * 500_000}"}}}}',
    ),
    "taken: 66,000 contents": ("tools/call", lambda: f'{{"content":{_array(_TEXT, _MOST // 3)}}}'),
    "taken: 99,000 contents that are none": ("tools/call", lambda: f'{{"content":{_array("{}", _MOST // 2)}}}'),
    "taken: 49,000 tools": (
        "tools/list",
        lambda: '{"tools":' + _array('{"name":"t","inputSchema":{"type":"object"}}', _MOST // 4) + "}",
    ),
}  # fmt: skip


# Processes.


@attrs.frozen
class Figures:
    """`waited`: seconds that another client or task waited.  `peak`: the peak memory of the victim, in bytes."""

    waited: float
    peak: int | None = None
    answer: str = ""

    def shown(self, unit: float) -> str:
        waited = f"{self.waited * 1000:9.0f} ms {self.waited / unit:6.1f}x"
        peak = "" if self.peak is None else f"{self.peak // MIB:6} MiB"
        return f"{waited}{peak:>11}  {self.answer[:60]}"


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


@contextmanager
def running(tree: Path) -> Iterator[tuple[int, int]]:
    """A server of this tree: its port and its process id."""
    command = [sys.executable, "-P", "-c", SERVER]
    with subprocess.Popen(
        command, env=environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


def request(body: bytes, tool: str) -> bytes:
    fields = {
        "Host": "127.0.0.1", "Content-Type": "application/json", "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": tool,
        "Content-Length": str(len(body)),
    }  # fmt: skip
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST /mcp HTTP/1.1\r\n{lines}\r\n".encode() + body


def call(argument: str) -> bytes:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "a", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    head = '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"ok","arguments":{"a":'
    return request(f'{head}{argument}}},"_meta":{json.dumps(meta)}}}}}'.encode(), "ok")


async def answer_of(stream: trio.SocketStream, data: bytes) -> bytes:
    """The whole body of the answer, which has a length.  If the connection closes, the bytes until then."""
    await stream.send_all(data)
    said = b""
    while more := await stream.receive_some():
        said += more
        head, gap, body = said.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if gap and len(body) >= length:
            return body
    return said.partition(b"\r\n\r\n")[2]


async def attack_server(port: int, pid: int, argument: str) -> Figures:
    """Send one message, while another client calls a tool."""
    small, large = call("1"), call(argument)
    waits: list[float] = []
    answer = b""
    _forget_peak(pid)
    with trio.move_on_after(PATIENCE) as scope:
        other = await trio.open_tcp_stream("127.0.0.1", port)
        attacker = await trio.open_tcp_stream("127.0.0.1", port)
        await answer_of(other, small)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                while True:
                    before = time.perf_counter()
                    waits.append(0.0)
                    try:
                        await answer_of(other, small)
                    finally:
                        waits[-1] = time.perf_counter() - before
                    await trio.sleep(0.002)

            nursery.start_soon(ask)
            await trio.sleep(0.05)
            answer = await answer_of(attacker, large)
            await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
        await attacker.aclose()
        await other.aclose()
    said = "gave up" if scope.cancelled_caught else _said(answer)
    return Figures(max(waits), _peak(pid), said)


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak(pid: int) -> int:
    """The peak memory of a process since `_forget_peak`, in bytes."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _said(answer: bytes) -> str:
    try:
        message = json.loads(answer)
    except ValueError:
        return ascii(answer[:60])
    return str(message["error"]["message"] if "error" in message else "answered")


def attack_client(tree: Path, method: str, result: str) -> Figures:
    """Answer the call of a client with this result."""
    command = [sys.executable, "-P", "-c", CLIENT, method]
    try:
        done = subprocess.run(
            command, env=environment(tree), input=result.encode(), stdout=subprocess.PIPE, timeout=PATIENCE, check=True
        )
    except subprocess.TimeoutExpired:
        return Figures(PATIENCE, None, "gave up")
    waited, error = json.loads(done.stdout)
    return Figures(waited, None, error or "taken")


def attack_ids(tree: Path, ids: Iterator[int]) -> float:
    """The CPU seconds of a server on standard input for 10,000 waiting calls with these ids."""
    first = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}}
    said = [{"id": "first", "method": "initialize", "params": first}]
    said += [{"id": id, "method": "tools/call", "params": {"name": "wait"}} for id in islice(ids, 10_000)]
    said += [{"id": "last", "method": "ping"}]
    lines = "".join(json.dumps({"jsonrpc": "2.0", **each}) + "\n" for each in said)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", WAITING], env=environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(lines)
            process.stdin.flush()
            while '"last"' not in process.stdout.readline():
                pass
            return _cpu(process.pid)
        finally:
            process.kill()


# The report.


def unit() -> float:
    text = f'"{_ESCAPES}"'
    times = []
    for _ in range(5):
        before = time.perf_counter()
        json.loads(text)
        times.append(time.perf_counter() - before)
    return min(times)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.values", description=__doc__)
    parser.add_argument("words", nargs="*", help="words in the names of the attacks")
    parser.add_argument("--against", metavar="COMMIT", help="also show the figures of this commit")
    given = parser.parse_args(arguments)

    def wanted(name: str) -> bool:
        return all(word in name for word in given.words)

    with checked_out(given.against) if given.against else nullcontext():
        trees = {"before": BEFORE, "now": ROOT} if given.against else {"now": ROOT}
        one = unit()
        print(f"the unit is {one * 1000:.0f} ms")
        for name, make in MESSAGES.items():
            if wanted(f"server {name}"):
                for which, tree in trees.items():
                    with running(tree) as (port, pid):
                        figures = trio.run(attack_server, port, pid, make())
                    print(f"server  {name:<44} {which:<6} {figures.shown(one)}", flush=True)
        for name, ids in {"counted": count(1), "alike": count(2**61 - 1, 2**61 - 1)}.items():
            if wanted(f"ids {name}"):
                for which, tree in trees.items():
                    seconds = attack_ids(tree, ids)
                    print(f"ids     10,000 that are {name:<28} {which:<6} {seconds:9.2f} s of CPU", flush=True)
        for name, (method, make) in ANSWERS.items():
            if wanted(f"client {name}"):
                for which, tree in trees.items():
                    print(f"client  {name:<44} {which:<6} {attack_client(tree, method, make()).shown(one)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
