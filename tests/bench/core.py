"""The cost of the core compared with bare JSON: without streams and without an event loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from tests.bench.measures import Figure, Measure
from tests.bench.messages import INITIALIZE, TEXT, call, encoded
from tests.bench.subjects import core_command, running
from trio_mcp.core import Call, Limits, LineFramer, LinkKind, Offer, ServerProtocol, decode, encode

__all__ = ["WORKS", "cost", "prepare"]

RESULT = {"content": [{"type": "text", "text": TEXT}]}
OFFER = Offer({"name": "bench", "version": "1"}, {"tools": {}})
LIMITS = Limits()
NUMBER = 3000
Work = Callable[[], int]
"""Does its work several times, and returns how many times."""


def prepare(unit: float, ours: str, bare: str, stack: ExitStack, subject: str) -> Measure:
    """CPU of the core, or of the bare work, in units of so many seconds.  It runs in a process of its own."""
    work = bare if subject == "bare" else ours
    process = stack.enter_context(running(core_command(subject.replace("bare", "ours"), work)))
    assert process.stdin is not None
    assert process.stdout is not None

    def measure(seconds: float) -> Figure:
        process.stdin.write(b"again\n")
        line = process.stdout.readline()
        assert line, "the program has ended"  # for example at a commit without this program
        return Figure(float(line) / unit)

    measure(0)
    return measure


def cost(work: Work) -> float:
    """The seconds of CPU for doing the work once."""
    begun = time.process_time()
    times = work()
    return (time.process_time() - begun) / times


def _lines(era: str) -> list[bytes]:
    return [encoded({**call(era), "id": id}) for id in range(1, NUMBER + 1)]


def _session() -> ServerProtocol:
    session = ServerProtocol(OFFER)
    for message in (
        {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
    ):
        session.receive(decode(json.dumps(message).encode(), LIMITS), 0.0)
    session.outgoing()
    return session


def serve_calls(era: str) -> Work:
    """Calls in an open session, from their bytes to the bytes of the responses."""
    lines = _lines(era)

    def work() -> int:
        session = _session()
        for line in lines:
            (event,) = session.receive(decode(line, LIMITS), 0.0)
            assert isinstance(event, Call)
            session.answer(event.request.id, RESULT)
            ((message, _),) = session.outgoing()
            encode(message)
        return NUMBER

    return work


def parse_calls(era: str = "modern") -> Work:
    """Parsing the same bytes and writing the same responses with json alone."""
    lines = _lines(era)
    answer = {"jsonrpc": "2.0", "id": 1, "result": {**RESULT, "resultType": "complete"}}

    def work() -> int:
        for line in lines:
            json.loads(line)
            json.dumps(answer)
        return NUMBER

    return work


def create_sessions() -> Work:
    """Sessions that are created, receive one modern request and are dropped."""
    message = decode(encoded(call("modern")), LIMITS)

    def work() -> int:
        for _ in range(NUMBER):
            ServerProtocol(OFFER, link=LinkKind.EXCHANGE).receive(message, 0.0)
        return NUMBER

    return work


def parse_request() -> Work:
    """Parsing that request with json alone."""
    data = encoded(call("modern"))

    def work() -> int:
        for _ in range(NUMBER):
            json.loads(data)
        return NUMBER

    return work


def feed_bytes(mebibytes: int) -> Work:
    """A line that arrives byte by byte."""
    line = b"x" * (mebibytes * 1024 * 1024) + b"\n"

    def work() -> int:
        framer = LineFramer(len(line))
        for at in range(len(line)):
            framer.feed(line[at : at + 1])
        return 1

    return work


WORKS: dict[str, Callable[[], Work]] = {
    "serve modern": partial(serve_calls, "modern"),
    "serve session": partial(serve_calls, "session"),
    "parse modern": partial(parse_calls, "modern"),
    "parse session": partial(parse_calls, "session"),
    "begin a session": create_sessions,
    "parse a request": parse_request,
    "feed 10 MiB": partial(feed_bytes, 10),
    "feed 5 MiB": partial(feed_bytes, 5),
}
