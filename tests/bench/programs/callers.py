"""The clients of the bench that run on this interpreter: ``callers.py json|orjson ours|bare TARGET ERA NUMBER``.

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
from itertools import count, islice
from typing import Any

if sys.argv[1] == "json":
    sys.modules["orjson"] = None  # type: ignore[assignment]  # as where the extra `speed` is not installed

import trio

from tests.bench.http_load import Caller, exchange
from tests.bench.messages import INITIALIZE, REVISIONS, TEXT, call, encoded


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
    from trio_mcp import open_client

    async with open_client(target, revision=REVISIONS[era]) as client:
        print("connected", flush=True)
        while order := await trio.to_thread.run_sync(sys.stdin.readline):
            left = iter(range(int(order)))

            async def one(left: Iterable[int] = left) -> None:
                for _ in left:
                    (content,) = (await client.call_tool("echo", {"text": TEXT})).content
                    assert content.text == TEXT

            with Stopwatch():
                async with trio.open_nursery() as nursery:
                    for _ in range(in_flight):
                        nursery.start_soon(one)


# Bare.


class JsonCaller(Caller):
    """One that writes each call and parses each answer."""

    def next(self) -> None:
        self.heard.clear()
        self.socket.sendall(self.post({**call(self.era), "id": next(self.ids)}))

    def whole(self) -> bool:
        if not super().whole():
            return False
        if self.heard.endswith(b"}"):
            json.loads(self.heard[self.heard.index(b"\r\n\r\n") :])
        return True


def bare_by_http(url: str, era: str, in_flight: int) -> Callable[[int], None]:
    port = int(url.rpartition(":")[2].partition("/")[0])
    callers = [JsonCaller(port, era) for _ in range(in_flight)]
    return lambda calls: exchange(callers, calls, TEXT.encode())


def bare_by_stdio(command: list[str], era: str, in_flight: int) -> Callable[[int], None]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    to, of = process.stdin.fileno(), process.stdout.fileno()
    ids = count(1)
    if era == "session":
        os.write(to, encoded({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE}) + b"\n")
        os.write(to, b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
        next(_lines(of))

    def run(calls: int) -> None:
        asking = islice(ids, calls)

        def write(number: int) -> None:
            os.write(to, b"".join(encoded({**call(era), "id": id}) + b"\n" for id in islice(asking, number)))

        write(in_flight)
        ended = 0
        for lines in _lines(of):
            for line in lines:
                assert json.loads(line)["result"]["content"][0]["text"] == TEXT
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
    run = connect(target, era, in_flight)
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
    main(*sys.argv[2:])
