"""The clients of the bench that run on this interpreter: ``python -m tests.bench.callers ours|bare TARGET ERA NUMBER``.

TARGET is a URL or a command, as JSON; ERA `modern` or `session`; NUMBER how many calls are in flight at a time.  When
the client is connected it prints a line, and then for each number that it reads the seconds, by the clock and of its
CPU, that so many calls took.

`bare` is what any client must do: write each call with json, parse each answer with it, and move the bytes, in as few
reads and writes as they come and go together.  It checks nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import trio

from tests.bench.http import ARGUMENTS, INITIALIZE, MODERN, TEXT, Caller, call_all
from trio_mcp import TextContent, open_client

REVISIONS = {"modern": "2026-07-28", "session": "2025-11-25"}


class Stopwatch:
    """What the block took."""

    def __enter__(self) -> Stopwatch:
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        print(self.wall, self.cpu, flush=True)


# Ours.


async def ours(target: Any, era: str, in_flight: int) -> None:
    async with open_client(target, revision=REVISIONS[era]) as client:
        print("connected", flush=True)
        while order := await trio.to_thread.run_sync(sys.stdin.readline):
            left = iter(range(int(order)))

            async def call(left: Iterable[int] = left) -> None:
                for _ in left:
                    (content,) = (await client.call_tool("forecast", ARGUMENTS)).content
                    assert isinstance(content, TextContent)
                    assert TEXT.decode() in content.text

            with Stopwatch():
                async with trio.open_nursery() as nursery:
                    for _ in range(in_flight):
                        nursery.start_soon(call)


# Bare.


class JsonCaller(Caller):
    """One that writes each call and parses each answer."""

    def next(self) -> None:
        self.number += 1
        self.heard.clear()
        headers = {"Mcp-Method": "tools/call", "Mcp-Name": "forecast"} if self.modern else {}
        self.socket.send(self.post(_call(self.number, self.modern), {**self.headers(), **headers}))

    def whole(self) -> bool:
        if not super().whole():
            return False
        if self.heard.endswith(b"}"):
            json.loads(self.heard[self.heard.index(b"\r\n\r\n") :])
        return True


def _call(id: int, modern: bool) -> Any:
    params = {"name": "forecast", "arguments": ARGUMENTS, **({"_meta": MODERN} if modern else {})}
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}


def bare_by_http(url: str, modern: bool, in_flight: int) -> Callable[[int], None]:
    port = int(url.rpartition(":")[2].partition("/")[0])
    callers = [JsonCaller(port, modern=modern, streams=False) for _ in range(in_flight)]
    return lambda calls: call_all(callers, calls)


def bare_by_stdio(command: list[str], modern: bool, in_flight: int) -> Callable[[int], None]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    to, of = process.stdin.fileno(), process.stdout.fileno()
    if not modern:
        os.write(to, json.dumps({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE}).encode())
        os.write(to, b'\n{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
        next(_lines(of))

    def run(calls: int) -> None:
        ids = iter(range(1, calls + 1))

        def write(number: int) -> None:
            asked = [json.dumps(_call(id, modern)).encode() + b"\n" for id in islice(ids, number)]
            os.write(to, b"".join(asked))

        write(in_flight)
        ended = 0
        for lines in _lines(of):
            for line in lines:
                assert TEXT.decode() in json.loads(line)["result"]["content"][0]["text"]
            ended += len(lines)
            if ended == calls:
                return
            write(len(lines))

    return run


def _lines(fd: int) -> Iterator[list[bytes]]:
    """Those that come together."""
    rest = b""
    while data := os.read(fd, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        yield lines


def bare(target: Any, era: str, in_flight: int) -> None:
    connect: Any = bare_by_http if isinstance(target, str) else bare_by_stdio
    run = connect(target, era == "modern", in_flight)
    print("connected", flush=True)
    for order in sys.stdin:
        with Stopwatch():
            run(int(order))


def main(which: str, target: str, era: str, in_flight: str) -> None:
    given = json.loads(target), era, int(in_flight)
    if which == "bare":
        bare(*given)
    else:
        trio.run(ours, *given)


if __name__ == "__main__":
    main(*sys.argv[1:])
