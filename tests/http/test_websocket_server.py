"""A server by WebSocket: from the request for one to the last close frame, in every revision."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked
from wsproto.events import AcceptConnection, CloseConnection, Ping

from tests.cuts import Cuts
from tests.http.served import by_token, listening, served
from tests.http.ws import (
    CLOSE,
    HANDSHAKE,
    PING,
    TEXT,
    Socket,
    close_frame,
    frame,
    serve_websocket,
    upgrade_request,
    websocket,
)
from tests.requirements import req
from tests.server.checkpoints import PipeEnd, one_byte_pipe, running_tasks, unlimited_pipe, unwrapped, wait_or_fail
from tests.server.raw_client import (
    LATEST,
    PROGRESS,
    REVISION_NAMES,
    ErrorResponse,
    Object,
    RawClient,
    client_on,
    every_revision,
)
from trio_mcp import Context, Limits, Server
from trio_mcp.core import Role
from trio_mcp.core.http import HttpRequest, WebSocketFrames
from trio_mcp.server import Run, converse
from trio_mcp.server.http import Endpoint, serve_upgrade

# Its errors at the end of a connection reach no client.
from trio_mcp.server.http.websocket import _WebSocketStream
from trio_mcp.transport import CLOSING

ERAS = pytest.mark.parametrize("revision", ["2025-11-25", LATEST])


class Bench:
    """A server, and the gates at which its handlers wait."""

    def __init__(self, **options: Any) -> None:
        self.server = server = Server("bench", change_debounce=0, **options)
        self.gates: dict[str, trio.Event] = {}
        self.ended: list[str] = []

        @server.tool
        async def echo(text: str) -> str:
            return text

        @server.tool(thread=False)
        def much(size: int) -> str:
            return "x" * size

        @server.tool
        async def gate(name: str, ctx: Context) -> str:
            try:
                await ctx.progress(1)
                await self.open(name).wait()
                return name
            except trio.Cancelled:
                self.ended.append(name)
                raise

        @server.tool
        async def chatter(ctx: Context) -> str:
            for number in itertools.count():
                await ctx.progress(number)
            raise AssertionError

        @server.tool
        async def who(ctx: Context) -> str:
            return f"{ctx.principal} with {ctx.headers.get('X-Colour')}"

    def open(self, name: str) -> trio.Event:
        return self.gates.setdefault(name, trio.Event())


def call(tool: str, **arguments: Any) -> Object:
    return {"name": tool, "arguments": arguments}


def text(result: Object) -> str:
    found: str = result["content"][0]["text"]
    return found


async def gone(wire: RawClient) -> None:
    await wait_or_fail(wire.ended.wait, "the end of the server's side")


# Sessions.


@req("trans-02", "trans-03")
@every_revision
async def test_all_that_a_session_is(revision: str, autojump_clock: MockClock) -> None:
    bench = Bench()
    async with websocket(bench.server, revision) as (wire, socket):
        assert (await wire.about())["serverInfo"]["name"] == "bench"
        assert text(await wire.call("tools/call", call("echo", text="ä€𝄞\r\n\u2028"))) == "ä€𝄞\r\n\u2028"
        id = await wire.start("tools/call", call("gate", name="a"), progress="p")
        assert (await wire.note(PROGRESS))["progress"] == 1
        bench.open("a").set()
        assert text((await wire.response(id))["result"]) == "a"
        id = await wire.start("tools/call", call("gate", name="b"))
        await wait_all_tasks_blocked()
        await wire.cancel(id)
        await wait_all_tasks_blocked()
        assert bench.ended == ["b"]
        with pytest.raises(ErrorResponse):
            await wire.call("tools/call", call("nothing"))
        assert not wire.answered(id)
        assert socket.closed is None
    accepted = socket.heard[0]
    assert isinstance(accepted, AcceptConnection)
    assert (accepted.subprotocol, accepted.extensions) == ("mcp", [])
    assert socket.closed == CloseConnection(code=1000, reason="")  # the answer to the client's
    assert socket.eof


async def test_two_eras_share_a_link(autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, "2025-06-18") as (wire, _):
        modern = RawClient(wire.stream, LATEST)
        both = [
            wire.request("tools/call", call("echo", text="old"), id="old"),
            modern.request("tools/call", call("echo", text="new"), id="new"),
        ]
        results = {}
        for each in both:
            await wire.send(each)
        for id in ("old", "new"):
            results[id] = (await wire.response(id))["result"]
        assert [text(results[id]) for id in ("old", "new")] == ["old", "new"]
        assert ["resultType" in results[id] for id in ("old", "new")] == [False, True]


@every_revision
async def test_a_batch_is_one_message_where_there_are_batches(revision: str, autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, revision) as (wire, _):
        ids = ["x", "y"]
        await wire.send([wire.request("tools/call", call("echo", text=id), id=id) for id in ids])
        if revision == "2025-03-26":
            assert [text((await wire.response(id))["result"]) for id in ids] == ids
            assert sum(line.startswith(b"[") for line in wire.lines) <= 1
        else:
            await wait_all_tasks_blocked()
            assert [error["error"]["code"] for error in wire.unaddressed] == [-32600]


@every_revision
async def test_what_is_no_message_is_answered_and_costs_nothing_else(revision: str, autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, revision) as (wire, _):
        for count, junk in enumerate(["hello", "", "{}"], 1):
            wire.post_bytes(junk.encode() + b"\n")
            await wire.call("tools/list")
            assert len(wire.unaddressed) == count


async def test_a_handler_knows_who_asks_and_with_which_headers(autojump_clock: MockClock) -> None:
    headers = [(b"X-Colour", b"green"), (b"Authorization", b"Bearer ada")]
    how: Any = {"endpoint": {"authenticate": by_token}, "socket": {"extra_headers": headers}}
    async with websocket(Bench().server, LATEST, **how) as (wire, _):
        assert text(await wire.call("tools/call", call("who"))) == "ada with green"


async def test_a_client_may_do_without_a_subprotocol(autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, LATEST, socket={"subprotocols": []}) as (wire, socket):
        await wire.call("tools/list")
        accepted = socket.heard[0]
        assert isinstance(accepted, AcceptConnection)
        assert accepted.subprotocol is None


# Requests that are refused.


async def answer_to(data: bytes, *, bench: Bench | None = None, **how: Any) -> bytes:
    ours, theirs = unlimited_pipe()
    await ours.send_all(data)
    await serve_websocket((bench or Bench()).server, theirs, **how)
    return ours.heard


REFUSED: list[tuple[bytes, int, str]] = [
    (upgrade_request(Origin="http://evil.example"), 403, "allowed_origins"),
    (upgrade_request(Host="evil.example"), 421, "allowed_hosts"),
    (upgrade_request("/other"), 404, "/other"),
    (upgrade_request().replace(b"GET", b"DELETE"), 405, "DELETE"),
    (upgrade_request(Upgrade="h2c"), 426, "Upgrade: websocket"),
    (upgrade_request(Sec_WebSocket_Version="7"), 426, "13"),
    (upgrade_request(Sec_WebSocket_Key="x"), 400, "Sec-WebSocket-Key"),
    (upgrade_request(Sec_WebSocket_Protocol="soap"), 400, "offer mcp"),
]


@req("http-03", "http-04", "http-05")
@pytest.mark.parametrize(("data", "status", "says"), REFUSED, ids=[str(row[1]) + row[2] for row in REFUSED])
async def test_a_refusal_is_http_with_a_json_rpc_error_and_the_end_of_the_connection(
    data: bytes, status: int, says: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trio_mcp.http")
    seen: list[tuple[str, bytes]] = []
    heard = await answer_to(data, tap=lambda *what: seen.append(what))
    head, _, body = heard.partition(b"\r\n\r\n")
    first, *fields = head.decode().split("\r\n")
    assert first.startswith(f"HTTP/1.1 {status} ")
    assert "Connection: close" in fields or (status == 426 and "Connection: Upgrade, close" in fields)
    assert f"Content-Length: {len(body)}" in fields
    error = json.loads(body)
    assert (error["jsonrpc"], "id" in error, error["error"]["code"]) == ("2.0", False, -32600)
    assert says in error["error"]["message"]
    assert seen == [("out", heard)]
    (told,) = caplog.messages
    assert told.endswith(f": {status}, {error['error']['message']}")


async def test_who_does_not_say_who_he_is_is_not_let_in(autojump_clock: MockClock) -> None:
    heard = await answer_to(upgrade_request(), authenticate=by_token)
    assert heard.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
    assert b"\r\nWWW-Authenticate: Bearer\r\n" in heard


async def test_who_is_not_let_in_by_origin_is_not_asked_for_anything_else(autojump_clock: MockClock) -> None:
    heard = await answer_to(upgrade_request(Origin="http://evil.example"), authenticate=by_token)
    assert heard.startswith(b"HTTP/1.1 403 Forbidden\r\n")


async def test_requests_for_websockets_count_as_requests(autojump_clock: MockClock) -> None:
    bench = Bench(limits=Limits(request_rate=1))
    async with bench.server.running() as run:
        endpoint = Endpoint(cast("Run", run))
        answers = []
        for peer in ("one", "one", "other"):
            ours, theirs = unlimited_pipe()
            await ours.send_eof()
            request = HttpRequest("GET", "/ws", HANDSHAKE)
            await serve_upgrade(cast("Run", run), endpoint, theirs, request, b"", peer=peer)
            answers.append(ours.heard.split(b" ")[1])
    assert answers == [b"101", b"429", b"101"]


async def test_a_server_that_drains_takes_no_websocket(autojump_clock: MockClock) -> None:
    bench = Bench()
    async with bench.server.running(), bench.server.draining(1):
        assert (await answer_to(upgrade_request(), bench=bench)).startswith(b"HTTP/1.1 503 ")


async def test_what_authentication_raises_is_500_and_told_to_the_log_alone(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(request: HttpRequest) -> str:
        raise KeyError("a secret")

    heard = await answer_to(upgrade_request(), authenticate=fails)
    assert heard.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert b"secret" not in heard
    [record] = caplog.records
    head, *trace = record.message.splitlines()
    assert (head, trace[-1]) == ("authenticate has failed", "KeyError: 'a secret'")


async def test_what_the_tap_raises_leaves_and_closes_the_connection(autojump_clock: MockClock) -> None:
    def tap(direction: str, data: bytes) -> None:
        raise KeyError("x")

    ours, theirs = unlimited_pipe()
    await ours.send_all(upgrade_request())
    with pytest.raises(KeyError):
        await serve_websocket(Bench().server, theirs, tap=tap)
    assert (ours.heard, await ours.receive_some()) == (b"", b"")


async def test_a_client_that_went_during_the_handshake_is_no_error(autojump_clock: MockClock) -> None:
    for data in (upgrade_request(), upgrade_request(Upgrade="h2c")):
        ours, theirs = unlimited_pipe()
        await ours.send_all(data)
        await ours.aclose()
        await serve_websocket(Bench().server, theirs)


@pytest.mark.parametrize("data", [upgrade_request(), upgrade_request(Upgrade="h2c")], ids=["consent", "refusal"])
async def test_who_does_not_read_the_answer_is_not_waited_for_for_ever(data: bytes, autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    await ours.send_all(data)
    ours._into.capacity = 1
    await serve_websocket(Bench(limits=Limits(write_seconds=60)).server, theirs)
    assert trio.current_time() == 60
    assert theirs._into.no_receiver


# Bytes.


def exchange(revision: str) -> list[bytes]:
    """What a client sends, one frame after the other: messages in fragments, pings between, and a close frame."""
    wire = RawClient(unlimited_pipe()[0], revision)
    start = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    messages: list[Any] = [] if wire.modern else [wire.request("initialize", start), note]
    messages += [wire.request("tools/list"), wire.request("tools/call", call("echo", text="ä€𝄞\n\u2028"))]
    frames = [upgrade_request()]
    for message in messages:
        data = json.dumps(message, ensure_ascii=False).encode()
        frames += [
            frame(Role.SERVER, TEXT, data[:40], fin=False),
            frame(Role.SERVER, PING, b"between"),
            frame(Role.SERVER, 0, data[40:]),
        ]
    return frames


def answers_to(revision: str, pieces: list[bytes], closes: bool = True) -> tuple[list[bytes], list[Any]]:
    """What a server sends for these pieces: messages, sorted, as calls may end in any order; and the rest."""

    async def main() -> bytes:
        ours, theirs = unlimited_pipe()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_websocket, Bench().server, theirs)
            for piece in pieces:
                await ours.send_all(piece)
                await wait_all_tasks_blocked()
            if closes:
                await ours.send_all(close_frame(Role.SERVER, 1000, "done"))
            await ours.send_eof()
        return ours.heard

    heard = trio.run(main, clock=MockClock(autojump_threshold=0))
    _, _, frames = heard.partition(b"\r\n\r\n")
    messages: list[bytes] = []
    controls: list[Any] = []
    at = 0
    while at < len(frames):
        opcode, size = frames[at] & 15, frames[at + 1]
        at += 2
        if size == 126:
            size = int.from_bytes(frames[at : at + 2], "big")
            at += 2
        payload = frames[at : at + size]
        assert len(payload) == size
        at += size
        if opcode == TEXT:
            messages.append(payload)
        else:
            controls.append((opcode, payload))
    return sorted(messages), controls


@settings(max_examples=30)
@given(st.sampled_from(REVISION_NAMES), st.data())
def test_chunk_boundaries_do_not_matter(revision: str, data: st.DataObject) -> None:
    whole = b"".join(exchange(revision))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=12)))
    messages, controls = answers_to(revision, exchange(revision))
    assert len(messages) == (2 if revision == LATEST else 3)
    assert controls[-1] == (CLOSE, (1000).to_bytes(2, "big"))
    cut = answers_to(revision, [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])])
    assert (cut[0], cut[1][-1]) == (messages, controls[-1])


@every_revision
def test_bytes_may_come_one_by_one(revision: str) -> None:
    pieces = exchange(revision)
    assert answers_to(revision, [bytes([byte]) for byte in b"".join(pieces)]) == answers_to(revision, pieces)


@every_revision
def test_all_may_come_at_once_with_the_request(revision: str) -> None:
    pieces = exchange(revision)
    # With the close frame in the same piece nobody would wait for the answers.
    messages, controls = answers_to(revision, [b"".join(pieces)])
    assert (messages, controls[-1]) == (answers_to(revision, pieces)[0], (CLOSE, (1000).to_bytes(2, "big")))


@ERAS
def test_a_client_may_go_after_any_byte(revision: str, cuts: Cuts) -> None:
    whole = b"".join(exchange(revision)) + close_frame(Role.SERVER, 1000)

    async def main(size: int) -> None:
        ours, theirs = unlimited_pipe()
        before = running_tasks()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_websocket, Bench().server, theirs)
            await ours.send_all(whole[:size])
            await wait_all_tasks_blocked()
            await (ours.aclose() if size % 2 else ours.send_eof())
        assert theirs._into.no_receiver
        assert running_tasks() == before

    for size in cuts(whole[:-1]):
        trio.run(main, size, clock=MockClock(autojump_threshold=0))


# Closing.

FAULTS: list[tuple[bytes, int, str]] = [
    (frame(Role.SERVER, 2, b"{}"), 1003, "binary"),
    (frame(Role.SERVER, TEXT, b"\xff"), 1007, "UTF-8"),
    (frame(Role.SERVER, TEXT, b"x" * 2001), 1009, "Limits.message_bytes"),
    (frame(Role.SERVER, TEXT, b"x" * 2001, fin=False), 1009, "Limits.message_bytes"),
    (frame(Role.SERVER, TEXT, b"{}", masked=False), 1002, "unmasked"),
    (frame(Role.SERVER, 11), 1002, "opcode"),
    (frame(Role.SERVER, TEXT | 0x40, b"x"), 1002, "Reserved bit"),
]


@asynccontextmanager
async def opened(
    bench: Bench, *, streams: Any = unlimited_pipe, **how: Any
) -> AsyncIterator[tuple[PipeEnd, PipeEnd, trio.Event]]:
    """Both ends of a connection that is a WebSocket already, and when it has been served."""
    ours, theirs = streams()
    done = trio.Event()

    async def serving() -> None:
        await serve_websocket(bench.server, theirs, **how)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serving)
        await ours.send_all(upgrade_request())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await ours.receive_some()
        assert head.startswith(b"HTTP/1.1 101 ")
        yield ours, theirs, done
        await wait_or_fail(done.wait, "the end of the connection")


@pytest.mark.parametrize(("fault", "code", "says"), FAULTS, ids=[f"{row[1]} {row[2]}" for row in FAULTS])
async def test_who_breaks_the_rules_is_told_and_may_go_on_sending_until_he_has_heard(
    fault: bytes, code: int, says: str, autojump_clock: MockClock
) -> None:
    bench = Bench(limits=Limits(message_bytes=2000))
    ask = json.dumps(RawClient(unlimited_pipe()[0], LATEST).request("tools/call", call("gate", name="a"))).encode()
    async with opened(bench) as (ours, _, done):
        await ours.send_all(frame(Role.SERVER, TEXT, ask))
        await wait_all_tasks_blocked()
        await ours.send_all(fault)
        await wait_all_tasks_blocked()
        assert bench.ended == ["a"]
        heard = await ours.receive_some()
        assert heard[0] == 0x88
        assert int.from_bytes(heard[2:4], "big") == code
        assert says in heard[4:].decode()
        assert heard[1] == len(heard) - 2
        start = trio.current_time()
        for _ in range(100):  # what was on its way breaks no pipe
            await ours.send_all(frame(Role.SERVER, TEXT, b"late"))
        await wait_all_tasks_blocked()
        assert not done.is_set()
        await ours.send_all(close_frame(Role.SERVER, code))
        if code in (1002, 1007) or not fault[0] & 0x80:  # after that nothing can be told apart any more
            await ours.send_eof()
        await wait_or_fail(done.wait, "the end")
        assert trio.current_time() == start
        assert await ours.receive_some() == b""


async def test_who_does_not_answer_our_close_frame_is_not_waited_for(autojump_clock: MockClock) -> None:
    bench = Bench()
    start = trio.current_time()
    async with opened(bench) as (ours, theirs, _):
        await ours.send_all(frame(Role.SERVER, 2))
    assert trio.current_time() == start + CLOSING
    assert theirs._into.no_receiver


@pytest.mark.parametrize("code", [1000, 1001, 1011, 3000, 4999])
async def test_a_close_frame_is_answered_by_the_same_code_and_ends_what_runs(
    code: int, autojump_clock: MockClock
) -> None:
    bench = Bench()
    async with websocket(bench.server, LATEST) as (wire, socket):
        await wire.start("tools/call", call("gate", name="a"))
        await wait_all_tasks_blocked()
        await socket.send(CloseConnection(code=code, reason="because"))
        await gone(wire)
        assert bench.ended == ["a"]
    assert socket.closed == CloseConnection(code=code, reason="")


async def test_a_close_frame_right_after_a_request_is_answered_all_the_same(autojump_clock: MockClock) -> None:
    ask = json.dumps(RawClient(unlimited_pipe()[0], LATEST).request("tools/call", call("echo", text="x"))).encode()
    async with opened(Bench()) as (ours, _, _):
        await ours.send_all(frame(Role.SERVER, TEXT, ask) + close_frame(Role.SERVER, 1000))
        heard = b""
        while received := await ours.receive_some():
            heard += received
    assert heard.endswith(b"\x88\x02" + (1000).to_bytes(2, "big"))
    assert heard.count(b"\x88\x02") == 1


@every_revision
async def test_a_drain_lets_calls_end_and_then_says_1001(revision: str, autojump_clock: MockClock) -> None:
    bench = Bench()
    drain = trio.Event()
    async with websocket(bench.server, revision, drain=drain) as (wire, socket):
        id = await wire.start("tools/call", call("gate", name="a"))
        await wait_all_tasks_blocked()
        drain.set()
        await wait_all_tasks_blocked()
        assert socket.closed is None
        with pytest.raises(ErrorResponse):
            await wire.call("tools/call", call("echo", text="new"))
        bench.open("a").set()
        assert text((await wire.response(id))["result"]) == "a"
        await gone(wire)
    assert socket.closed is not None
    assert (socket.closed.code, bench.ended) == (1001, [])


@ERAS
async def test_a_server_that_stops_says_1001(revision: str, autojump_clock: MockClock) -> None:
    bench = Bench()
    ours, theirs = unlimited_pipe()
    socket = Socket(ours)
    async with trio.open_nursery() as nursery:
        async with bench.server.running():
            nursery.start_soon(serve_websocket, bench.server, theirs)
            wire = RawClient(socket, revision)
            nursery.start_soon(wire.run)
            await wire.open()
            await wire.start("tools/call", call("gate", name="a"))
            await wait_all_tasks_blocked()
        await gone(wire)
    assert bench.ended == ["a"]
    assert socket.closed is not None
    assert socket.closed.code == 1001


async def test_a_session_that_fails_says_1011(autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    frames = WebSocketFrames(Role.SERVER, Limits())
    link = _WebSocketStream(theirs, frames, b"")

    def tap(direction: str, data: bytes) -> None:
        if direction == "out":
            raise ValueError("a tap that fails")

    await ours.send_all(frame(Role.SERVER, TEXT, b"{}"))
    async with Bench().server.running() as run:
        with pytest.raises(ValueError, match="a tap that fails"), unwrapped():
            await converse(cast("Run", run), link, frames, tap=tap)
    assert ours.heard[:4] == b"\x88\x2e" + (1011).to_bytes(2, "big")


async def test_a_handler_hears_how_its_client_has_ended_the_connection(autojump_clock: MockClock) -> None:
    server, reasons = Server("test"), []

    @server.tool
    async def wait() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            reasons.append(cancelled.reason)
            raise

    async with websocket(server, LATEST) as (wire, socket):
        await wire.start("tools/call", call("wait"))
        await wait_all_tasks_blocked()
        await socket.send(CloseConnection(code=1001, reason="bye"))
        await gone(wire)
    assert reasons == ["the client closed the connection with code 1001: 'bye'"]


async def test_a_connection_that_is_closed_without_a_farewell_says_1011(autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    frames = WebSocketFrames(Role.SERVER, Limits())
    link = _WebSocketStream(theirs, frames, b"")
    await ours.send_all(close_frame(Role.SERVER, 1011))
    await link.aclose()
    assert ours.heard[:4] == b"\x88\x2e" + (1011).to_bytes(2, "big")
    assert frames.over
    assert theirs._into.no_receiver


async def test_nothing_follows_half_a_frame(autojump_clock: MockClock) -> None:
    ours, theirs = one_byte_pipe()
    link = _WebSocketStream(theirs, WebSocketFrames(Role.SERVER, Limits()), b"")
    with trio.move_on_after(60):
        await link.send_all(b"half a frame")
    ours._into.capacity = 100
    await link.aclose()
    assert (ours.heard, theirs._into.no_receiver) == (b"h", True)


@pytest.mark.parametrize("goes", [PipeEnd.aclose, PipeEnd.send_eof])
async def test_who_has_gone_is_told_nothing(goes: Any, autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    link = _WebSocketStream(theirs, WebSocketFrames(Role.SERVER, Limits()), b"before")
    await link.wait_send_all_might_not_block()
    assert [await link.receive_some(3), await link.receive_some(3)] == [b"bef", b"ore"]
    await goes(ours)
    assert await link.receive_some() == b""
    await link.aclose()
    assert (ours.heard, theirs._into.no_receiver) == (b"", True)


async def test_a_stream_that_breaks_ends_the_connection(autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    link = _WebSocketStream(theirs, WebSocketFrames(Role.SERVER, Limits()), b"")
    await theirs.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await link.receive_some()
    await link.aclose()
    other = _WebSocketStream(theirs, WebSocketFrames(Role.SERVER, Limits()), b"")
    await other.aclose()
    assert ours.heard == b""


async def test_a_tap_sees_all_frames(autojump_clock: MockClock) -> None:
    seen: dict[str, bytes] = {"in": b"", "out": b""}

    def tap(direction: str, data: bytes) -> None:
        seen[direction] += data

    ours, theirs = unlimited_pipe()
    async with websocket(Bench().server, LATEST, streams=lambda: (ours, theirs), tap=tap) as (wire, _):
        await wire.call("tools/list")
    assert seen["out"] == ours.heard
    assert theirs.heard.endswith(seen["in"])
    assert theirs.heard == opening_of(theirs.heard) + seen["in"]


def opening_of(data: bytes) -> bytes:
    return data[: data.index(b"\r\n\r\n") + 4]


# Pings.


@ERAS
async def test_pings_are_answered(revision: str, autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, revision) as (wire, socket):
        await socket.send(Ping(payload=b"one"))
        await wait_all_tasks_blocked()
        await socket.send(Ping(payload=b""), Ping(payload=b"two"))
        await wire.call("tools/list")
        assert (socket.pongs[0], socket.pongs[-1]) == (b"one", b"two")


async def test_a_quiet_client_is_asked_whether_it_is_there(autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, LATEST, endpoint={"keep_alive": 15}) as (wire, socket):
        await trio.sleep(100)
        pings = [event for event in socket.heard if isinstance(event, Ping)]
        assert len(pings) == 6
        assert await wire.call("tools/list")


@pytest.mark.parametrize("streams", [unlimited_pipe, one_byte_pipe])
async def test_a_dead_client_is_given_up(streams: Any, autojump_clock: MockClock) -> None:
    bench = Bench()
    start = trio.current_time()
    how: Any = {"endpoint": {"keep_alive": 15}, "socket": {"pongs": False}}
    async with websocket(bench.server, LATEST, streams=streams, **how) as (wire, _):
        await wire.start("tools/call", call("gate", name="a"))
        await gone(wire)
        assert bench.ended == ["a"]
        assert start + 30 <= trio.current_time() <= start + 30 + CLOSING


# Those who do not read.


@ERAS
async def test_a_client_that_does_not_read_costs_little_and_its_calls_wait(
    revision: str, autojump_clock: MockClock
) -> None:
    limits = Limits(outgoing=10, write_seconds=1e6)
    async with websocket(Bench(limits=limits).server, revision, streams=one_byte_pipe) as (wire, _):
        with wire.not_reading():
            await wire.start("tools/call", call("chatter"), progress="p", id="c")
            await wait_all_tasks_blocked()
            before = trio.current_time()
            await trio.sleep(100)
            assert trio.current_time() == before + 100  # nothing spins
        first = await wire.note(PROGRESS)
        assert first["progress"] == 0
        await wire.cancel("c")


async def test_a_client_that_takes_nothing_for_too_long_is_dropped(autojump_clock: MockClock) -> None:
    bench = Bench(limits=Limits(write_seconds=60))
    ask = json.dumps(RawClient(unlimited_pipe()[0], LATEST).request("tools/call", call("much", size=500_000))).encode()
    async with opened(bench, streams=one_byte_pipe) as (ours, _, done):
        start = trio.current_time()
        await ours.send_all(frame(Role.SERVER, TEXT, ask))
        await wait_or_fail(done.wait, "the end")
        assert start + 60 <= trio.current_time() <= start + 60 + CLOSING
        heard = b""
        while received := await ours.receive_some():
            heard += received
        assert len(heard) < 500_000  # and nothing after the half of a frame


async def test_no_more_is_read_at_once_than_can_be_looked_at_while_others_wait(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = unlimited_pipe()
    receive = theirs.receive_some
    asked: list[int | None] = []

    async def receive_some(max_bytes: int | None = None) -> bytes | bytearray:
        asked.append(max_bytes)
        return await receive(max_bytes)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_websocket, Server("reads"), theirs)
        await wait_all_tasks_blocked()
        monkeypatch.setattr(theirs, "receive_some", receive_some)
        await ours.send_all(upgrade_request())
        await wait_all_tasks_blocked()
        await ours.send_all(frame(Role.SERVER, PING) * 5000)
        await wait_all_tasks_blocked()
        await ours.aclose()
    assert len(asked) > 3
    assert {*asked} == {8 * 1024}


async def test_pings_without_end_make_nothing_pile_up(autojump_clock: MockClock) -> None:
    bench = Bench(limits=Limits(calls=10, outgoing=10, write_seconds=1e6))
    flood = frame(Role.SERVER, PING, b"x" * 100)
    async with opened(bench, streams=one_byte_pipe) as (ours, theirs, _):
        with trio.move_on_after(1000):
            while True:
                await ours.send_all(flood)
        # It is not read any more, once a few pongs wait.
        assert len(theirs.heard) < 200 * len(flood)
        await ours.aclose()


async def test_fragments_of_a_message_come_through_the_server(autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, LATEST, socket={"fragment": 7}) as (wire, _):
        assert text(await wire.call("tools/call", call("echo", text="ä" * 1000))) == "ä" * 1000


# On the port of HTTP.


@every_revision
async def test_one_port_serves_http_and_websockets(revision: str, autojump_clock: MockClock) -> None:
    async with served(Bench().server) as web:
        socket = Socket(await web.connect())
        async with client_on(socket, revision) as wire:
            assert text(await wire.call("tools/call", call("echo", text="by WebSocket"))) == "by WebSocket"
            session = None if revision == LATEST else await web.initialize(revision)
            answer = await web.call("tools/call", call("echo", text="by HTTP"), revision=revision, session=session)
            assert text(answer.result) == "by HTTP"
            await trio.sleep(100)
            assert sum(isinstance(event, Ping) for event in socket.heard) == 6  # the keep-alive of HTTP
        assert socket.closed == CloseConnection(code=1000, reason="")


@pytest.mark.parametrize("size", [None, 1])
async def test_frames_may_come_with_the_request_or_byte_by_byte(size: int | None, autojump_clock: MockClock) -> None:
    data = b"".join(exchange(LATEST))
    async with served(Bench().server) as web:
        stream = await web.connect()
        for at in range(0, len(data), size or len(data)):
            await stream.send_all(data[at : at + (size or len(data))])
            await wait_all_tasks_blocked()
        heard = b""
        while b'"ttlMs"' not in heard or "𝄞".encode() not in heard:
            heard += await stream.receive_some()
        await stream.send_all(close_frame(Role.SERVER, 1000))
        while received := await stream.receive_some():
            heard += received
        assert heard.startswith(b"HTTP/1.1 101 ")
        assert heard.endswith(b"\x88\x02" + (1000).to_bytes(2, "big"))


@pytest.mark.parametrize("path", ["/ws", "/ws/", "/ws?x=1"])
async def test_what_is_no_request_for_a_websocket_is_told_where_it_is(path: str, autojump_clock: MockClock) -> None:
    async with served(Bench().server) as web:
        answer = await web.send("GET", path, {"Host": "127.0.0.1:3000"})
        assert (answer.status, answer.headers["Upgrade"]) == (426, "websocket")
        assert "WebSocket" in answer.message["error"]["message"]


async def test_there_need_not_be_websockets(autojump_clock: MockClock) -> None:
    async with served(Bench().server, websocket_path=None) as web:
        stream = await web.connect()
        await stream.send_all(upgrade_request())
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 404 ")


@every_revision
async def test_a_drain_of_the_whole_server_lets_calls_end_and_then_says_1001(
    revision: str, autojump_clock: MockClock
) -> None:
    bench = Bench()
    async with served(bench.server, ends=False) as web:
        socket = Socket(await web.connect())
        async with trio.open_nursery() as nursery:
            wire = RawClient(socket, revision)
            nursery.start_soon(wire.run)
            await wire.open()
            id = await wire.start("tools/call", call("gate", name="a"))
            await wait_all_tasks_blocked()

            @nursery.start_soon
            async def _() -> None:
                async with bench.server.draining(60):
                    pass

            await wait_all_tasks_blocked()
            assert socket.closed is None
            bench.open("a").set()
            assert text((await wire.response(id))["result"]) == "a"
            await gone(wire)
        assert socket.closed is not None
        assert (socket.closed.code, bench.ended, trio.current_time() < 1) == (1001, [], True)


async def test_who_closes_while_a_large_answer_is_on_its_way_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server("test")

    @server.tool
    def big() -> str:
        return "x" * (8 * 1024 * 1024)

    ask = json.dumps(RawClient(unlimited_pipe()[0], LATEST).request("tools/call", call("big"))).encode()
    async with listening(server) as web:
        for _ in range(3):
            stream = await web.connect()
            await stream.send_all(upgrade_request(Host=web.headers["Host"]) + frame(Role.SERVER, TEXT, ask))
            heard = b""
            while not heard.endswith(b"x"):  # the answer is on its way, and is read no further
                heard += await stream.receive_some(4096)
            await trio.testing.wait_all_tasks_blocked(0.1)
            await stream.send_all(close_frame(Role.SERVER, 1000))
            await trio.testing.wait_all_tasks_blocked(0.1)
            while await stream.receive_some():
                pass
            await stream.aclose()
            assert (await web.call("server/discover")).status == 200
    assert not caplog.records
