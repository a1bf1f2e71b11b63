"""The clients of the bench that run on this interpreter: ``callers.py json|orjson ours|bare TARGET ERA NUMBER``.

TARGET is a URL or a command, as JSON; ERA is `modern` or `session`; NUMBER is the number of calls in flight.  When the
client is connected, it prints a line.  Then it reads numbers; for each it makes so many calls, and prints the seconds
by the clock and the seconds of its CPU.

`bare` does only the work that each client must do: write each call with json, parse each answer with json, and move the
bytes; over HTTP with Trio and h11.  It checks no answer except its text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Any

if sys.argv[1] == "json":
    sys.modules["orjson"] = None  # type: ignore[assignment]  # as without the extra `speed`

import trio

from tests.bench.http_load import EITHER
from tests.bench.messages import INITIALIZE, REVISIONS, TEXT, call, encoded


class Stopwatch:
    """Prints the time of a block."""

    def __enter__(self) -> Stopwatch:
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        print(self.wall, self.cpu, flush=True)


async def run_orders(callers: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """For each number read, make so many calls: all callers at the same time, each with one call at a time."""
    print("connected", flush=True)
    while order := await trio.to_thread.run_sync(sys.stdin.readline):
        left = iter(range(int(order)))

        async def work(ask: Callable[[], Awaitable[None]], left: Iterable[int] = left) -> None:
            for _ in left:
                await ask()

        with Stopwatch():
            async with trio.open_nursery() as nursery:
                for ask in callers:
                    nursery.start_soon(work, ask)


# Ours.


async def ours(target: Any, era: str, in_flight: int) -> None:
    from trio_mcp import open_client

    async with open_client(target, revision=REVISIONS[era]) as client:

        async def ask() -> None:
            (content,) = (await client.call_tool("echo", {"text": TEXT})).content
            assert content.text == TEXT

        await run_orders([ask] * in_flight)


# Bare.


async def bare_by_http(url: str, era: str, in_flight: int) -> None:
    """On Trio and h11, with a connection for each call that is in flight."""
    import h11

    port = int(url.rpartition(":")[2].partition("/")[0])
    fields = [("Host", f"127.0.0.1:{port}"), ("Accept", EITHER), ("Content-Type", "application/json")]
    fields.append(("MCP-Protocol-Version", REVISIONS[era]))
    fields += [("Mcp-Method", "tools/call"), ("Mcp-Name", "echo")] if era == "modern" else [("Mcp-Session-Id", "bench")]
    ids = count(1)

    async def ask(stream: trio.SocketStream, connection: Any) -> None:
        body = encoded({**call(era), "id": next(ids)})
        headers = [*fields, ("Content-Length", str(len(body)))]
        events = (h11.Request(method="POST", target="/mcp", headers=headers), h11.Data(data=body), h11.EndOfMessage())
        await stream.send_all(b"".join(connection.send(each) or b"" for each in events))
        output = b""
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some())
            elif isinstance(event, h11.Data):
                output += event.data
        assert json.loads(output)["result"]["content"][0]["text"] == TEXT
        connection.start_next_cycle()

    streams = [(await trio.open_tcp_stream("127.0.0.1", port), h11.Connection(h11.CLIENT)) for _ in range(in_flight)]
    await run_orders([partial(ask, *each) for each in streams])


def bare_by_stdio(command: list[str], era: str, in_flight: int) -> None:
    """With one read and one write for all messages that are ready together, and without an event loop."""
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

    print("connected", flush=True)
    for order in sys.stdin:
        with Stopwatch():
            run(int(order))


def _lines(fd: int) -> Iterator[list[bytes]]:
    """Lines that arrive together."""
    rest = b""
    while data := os.read(fd, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        yield lines


def main(which: str, target: str, era: str, in_flight: str) -> None:
    given = json.loads(target), era, int(in_flight)
    if which == "ours":
        trio.run(ours, *given)
    elif target.startswith("["):
        bare_by_stdio(*given)
    else:
        trio.run(bare_by_http, *given)


if __name__ == "__main__":
    main(*sys.argv[2:])
