"""What the core costs beside bare JSON: no process, no stream, no loop."""

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
"""Does something so many times."""


def prepare(unit: float, ours: str, bare: str, stack: ExitStack, subject: str) -> Measure:
    """CPU of the core, or of what it is compared with, in so many seconds; in a process of its own."""
    work = bare if subject == "bare" else ours
    process = stack.enter_context(running(core_command(subject.replace("bare", "ours"), work)))
    assert process.stdin is not None
    assert process.stdout is not None

    def measure(seconds: float) -> Figure:
        process.stdin.write(b"again\n")
        line = process.stdout.readline()
        assert line, "the program has ended"  # as at a commit that has no such program
        return Figure(float(line) / unit)

    measure(0)
    return measure


def cost(work: Work) -> float:
    """The seconds of CPU that one of its things takes."""
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


def served(era: str) -> Work:
    """Calls on an open link, from their bytes to the bytes of the answers."""
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


def parsed(era: str = "modern") -> Work:
    """Parsing the same bytes, and writing such answers, with nothing between."""
    lines = _lines(era)
    answer = {"jsonrpc": "2.0", "id": 1, "result": {**RESULT, "resultType": "complete"}}

    def work() -> int:
        for line in lines:
            json.loads(line)
            json.dumps(answer)
        return NUMBER

    return work


def born() -> Work:
    """Sessions that are born, hear one modern request and are dropped."""
    message = decode(encoded(call("modern")), LIMITS)

    def work() -> int:
        for _ in range(NUMBER):
            ServerProtocol(OFFER, link=LinkKind.EXCHANGE).receive(message, 0.0)
        return NUMBER

    return work


def loaded() -> Work:
    """Parsing that request."""
    data = encoded(call("modern"))

    def work() -> int:
        for _ in range(NUMBER):
            json.loads(data)
        return NUMBER

    return work


def fed(mebibytes: int) -> Work:
    """A line that comes byte by byte."""
    line = b"x" * (mebibytes * 1024 * 1024) + b"\n"

    def work() -> int:
        framer = LineFramer(len(line))
        for at in range(len(line)):
            framer.feed(line[at : at + 1])
        return 1

    return work


WORKS: dict[str, Callable[[], Work]] = {
    "serve modern": partial(served, "modern"),
    "serve session": partial(served, "session"),
    "parse modern": partial(parsed, "modern"),
    "parse session": partial(parsed, "session"),
    "begin a session": born,
    "parse a request": loaded,
    "feed 10 MiB": partial(fed, 10),
    "feed 5 MiB": partial(fed, 5),
}
