"""What the core adds to bare JSON, and what a server costs to start: `python -m tests.bench`.

`python -m tests.bench http` is about servers by HTTP instead, and `python -m tests.bench client` about clients; see
`http.py` and `client.py`.

Each row is measured beside its own baseline, in rounds that take turns, and printed as a ratio: absolute times say more
about the machine than about the code.  The ratio is that of the best rounds, which noise can only make worse; the
spread is that of the ratios of all rounds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

from tests.bench import start
from trio_mcp.core.jsonrpc import Limits, LineFramer, decode, encode
from trio_mcp.core.session import Call, Offer, ServerSession
from trio_mcp.core.state import Link

MODERN = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
}
ARGUMENTS = {"city": "Oslo", "days": 3, "units": "metric"}
RESULT = {"content": [{"type": "text", "text": "Mostly sunny, 21 degrees, light wind from the west."}]}
OFFER = Offer({"name": "bench", "version": "1"}, {"tools": {}})
LIMITS = Limits()
INITIALIZE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}


def call_bytes(id: int, *, modern: bool) -> bytes:
    params: dict[str, object] = {"name": "forecast", "arguments": ARGUMENTS}
    if modern:
        params["_meta"] = MODERN
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}).encode()


def legacy_session() -> ServerSession:
    session = ServerSession(OFFER)
    for message in (
        {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
    ):
        session.receive(decode(json.dumps(message).encode(), LIMITS), 0.0)
    session.outgoing()
    return session


def serve(session: ServerSession, data: bytes) -> bytes:
    """One call, from its bytes to the bytes of its answer."""
    (event,) = session.receive(decode(data, LIMITS), 0.0)
    assert isinstance(event, Call)
    session.answer(event.request.id, RESULT)
    ((message, _),) = session.outgoing()
    return encode(message)


def calls(*, modern: bool, number: int = 3000) -> tuple[Callable[[], None], Callable[[], None]]:
    """Serving calls on an open link, and parsing and writing the same bytes with nothing between."""
    lines = [call_bytes(id, modern=modern) for id in range(1, number + 1)]
    answers = [json.loads(serve(legacy_session(), line)) for line in lines[:1]]

    def core() -> None:
        session = legacy_session()
        for line in lines:
            serve(session, line)

    def bare() -> None:
        for line in lines:
            json.loads(line)
            json.dumps(answers[0])

    return core, bare


def one_message_peers(number: int = 3000) -> tuple[Callable[[], None], Callable[[], None]]:
    """A session that is born, hears one modern request and is dropped; and parsing that request."""
    data = call_bytes(1, modern=True)
    message = decode(data, LIMITS)

    def core() -> None:
        for _ in range(number):
            ServerSession(OFFER, link=Link.EXCHANGE).receive(message, 0.0)

    def bare() -> None:
        for _ in range(number):
            json.loads(data)

    return core, bare


def byte_by_byte(mebibytes: int) -> Callable[[], None]:
    line = b"x" * (mebibytes * 1024 * 1024) + b"\n"

    def feed() -> None:
        framer = LineFramer(len(line))
        for at in range(len(line)):
            framer.feed(line[at : at + 1])

    return feed


def timed(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def ratios(one: Callable[[], None], other: Callable[[], None], rounds: int) -> tuple[float, float, float]:
    """The ratio of the best rounds, and the lowest and highest of all rounds."""
    pairs = [(timed(one), timed(other)) for _ in range(rounds)]
    each = sorted(a / b for a, b in pairs)
    return min(a for a, _ in pairs) / min(b for _, b in pairs), each[0], each[-1]


def rows() -> Iterator[tuple[str, str, float, tuple[float, float, float]]]:
    """What is measured, against what, at most how many times that, and the measured ratio."""
    for modern, era in ((False, "legacy"), (True, "modern")):
        name = f"tools/call, {era}: decode, receive, answer, encode"
        yield name, "json.loads + json.dumps", 3.0, ratios(*calls(modern=modern), rounds=9)
    yield "session built for one modern request", "json.loads", 10.0, ratios(*one_message_peers(), rounds=9)
    # Linear means 2; quadratic would mean 4.
    yield "a 10 MiB line byte by byte", "a 5 MiB line", 3.0, ratios(byte_by_byte(10), byte_by_byte(5), rounds=3)
    yield from start.rows()


def main() -> int:
    missed = 0
    print(f"{'measured':<52}{'against':<26}{'ratio':>7}{'spread':>14}{'aim':>8}")
    for name, baseline, aim, (ratio, low, high) in rows():
        missed += ratio > aim
        print(f"{name:<52}{baseline:<26}{ratio:>7.2f}{f'{low:.2f}-{high:.2f}':>14}{f'<= {aim:g}':>8}")
    return 1 if missed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        from tests.bench import http

        sys.exit(http.main(sys.argv[2:]))
    if sys.argv[1:2] == ["client"]:
        from tests.bench import client

        sys.exit(client.main(sys.argv[2:]))
    sys.exit(main())
