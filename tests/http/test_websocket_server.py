"""A server over WebSocket: from the upgrade request to the last close frame, in every revision."""

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

# Clients do not see its errors at the end of a connection, so the tests use it directly.
from trio_mcp.server.http.websocket import _WebSocketStream
from trio_mcp.transport import CLOSING

both_eras = pytest.mark.parametrize("revision", ["2025-11-25", LATEST])


class Bench:
    """A server with a tool `gate` that waits for a named event; `ended` has the names of cancelled calls."""

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


async def wait_for_end(wire: RawClient) -> None:
    await wait_or_fail(wire.ended.wait, "the end of the server's side")


# Sessions


@req("trans-02", "trans-03")
@every_revision
async def test_a_session_has_calls_progress_and_cancellations(revision: str, autojump_clock: MockClock) -> None:
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
    accepted = socket.events[0]
    assert isinstance(accepted, AcceptConnection)
    assert (accepted.subprotocol, accepted.extensions) == ("mcp", [])
    assert socket.closed == CloseConnection(code=1000, reason="")  # the answer to the close frame of the client
    assert socket.eof


async def test_legacy_and_modern_requests_share_a_connection(autojump_clock: MockClock) -> None:
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
async def test_a_batch_is_one_message_in_revisions_with_batches(revision: str, autojump_clock: MockClock) -> None:
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
async def test_an_invalid_message_is_answered_and_has_no_other_effect(revision: str, autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, revision) as (wire, _):
        for count, junk in enumerate(["hello", "", "{}"], 1):
            wire.post_bytes(junk.encode() + b"\n")
            await wire.call("tools/list")
            assert len(wire.unaddressed) == count


async def test_a_handler_has_the_principal_and_the_headers(autojump_clock: MockClock) -> None:
    headers = [(b"X-Colour", b"green"), (b"Authorization", b"Bearer ada")]
    how: Any = {"endpoint": {"authenticate": by_token}, "socket": {"extra_headers": headers}}
    async with websocket(Bench().server, LATEST, **how) as (wire, _):
        assert text(await wire.call("tools/call", call("who"))) == "ada with green"


async def test_a_client_can_omit_the_subprotocol(autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, LATEST, socket={"subprotocols": []}) as (wire, socket):
        await wire.call("tools/list")
        accepted = socket.events[0]
        assert isinstance(accepted, AcceptConnection)
        assert accepted.subprotocol is None


# Refused requests


async def http_answer_to(data: bytes, *, bench: Bench | None = None, **how: Any) -> bytes:
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
@pytest.mark.parametrize(("data", "status", "expected"), REFUSED, ids=[str(row[1]) + row[2] for row in REFUSED])
async def test_a_refusal_is_an_http_response_with_a_json_rpc_error(
    data: bytes, status: int, expected: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trio_mcp.http")
    seen: list[tuple[str, bytes]] = []
    raw = await http_answer_to(data, tap=lambda *event: seen.append(event))
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *fields = head.decode().split("\r\n")
    assert first.startswith(f"HTTP/1.1 {status} ")
    assert "Connection: close" in fields or (status == 426 and "Connection: Upgrade, close" in fields)
    assert f"Content-Length: {len(body)}" in fields
    error = json.loads(body)
    assert (error["jsonrpc"], "id" in error, error["error"]["code"]) == ("2.0", False, -32600)
    assert expected in error["error"]["message"]
    assert seen == [("out", raw)]
    (record,) = caplog.messages
    assert record.endswith(f": {status}, {error['error']['message']}")


async def test_a_websocket_without_credentials_gets_401(autojump_clock: MockClock) -> None:
    raw = await http_answer_to(upgrade_request(), authenticate=by_token)
    assert raw.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
    assert b"\r\nWWW-Authenticate: Bearer\r\n" in raw


async def test_a_refused_origin_gets_403_without_authentication(autojump_clock: MockClock) -> None:
    raw = await http_answer_to(upgrade_request(Origin="http://evil.example"), authenticate=by_token)
    assert raw.startswith(b"HTTP/1.1 403 Forbidden\r\n")


async def test_requests_for_websockets_count_for_the_request_rate(autojump_clock: MockClock) -> None:
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


async def test_a_draining_server_refuses_websockets(autojump_clock: MockClock) -> None:
    bench = Bench()
    async with bench.server.running(), bench.server.draining(1):
        assert (await http_answer_to(upgrade_request(), bench=bench)).startswith(b"HTTP/1.1 503 ")


async def test_an_exception_of_authenticate_gives_500_and_is_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(request: HttpRequest) -> str:
        raise KeyError("a secret")

    raw = await http_answer_to(upgrade_request(), authenticate=fails)
    assert raw.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert b"secret" not in raw
    [record] = caplog.records
    head, *trace = record.message.splitlines()
    assert (head, trace[-1]) == ("authenticate has failed", "KeyError: 'a secret'")


async def test_an_exception_of_the_tap_propagates_and_closes_the_connection(autojump_clock: MockClock) -> None:
    def tap(direction: str, data: bytes) -> None:
        raise KeyError("x")

    ours, theirs = unlimited_pipe()
    await ours.send_all(upgrade_request())
    with pytest.raises(KeyError):
        await serve_websocket(Bench().server, theirs, tap=tap)
    assert (ours.heard, await ours.receive_some()) == (b"", b"")


async def test_a_client_that_disconnects_in_the_handshake_is_no_error(autojump_clock: MockClock) -> None:
    for data in (upgrade_request(), upgrade_request(Upgrade="h2c")):
        ours, theirs = unlimited_pipe()
        await ours.send_all(data)
        await ours.aclose()
        await serve_websocket(Bench().server, theirs)


@pytest.mark.parametrize("data", [upgrade_request(), upgrade_request(Upgrade="h2c")], ids=["acceptance", "refusal"])
async def test_an_unread_answer_to_the_handshake_has_a_deadline(data: bytes, autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    await ours.send_all(data)
    ours._into.capacity = 1
    await serve_websocket(Bench(limits=Limits(write_seconds=60)).server, theirs)
    assert trio.current_time() == 60
    assert theirs._into.no_receiver


# Bytes


def client_frames(revision: str) -> list[bytes]:
    """The frames of a client after its upgrade request: messages in fragments, with pings between the fragments."""
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


def server_frames_for(revision: str, pieces: list[bytes], closes: bool = True) -> tuple[list[bytes], list[Any]]:
    """The messages of a server for these pieces, sorted because calls end in any order; and its other frames."""

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

    raw = trio.run(main, clock=MockClock(autojump_threshold=0))
    _, _, frames = raw.partition(b"\r\n\r\n")
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
    whole = b"".join(client_frames(revision))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=12)))
    messages, controls = server_frames_for(revision, client_frames(revision))
    assert len(messages) == (2 if revision == LATEST else 3)
    assert controls[-1] == (CLOSE, (1000).to_bytes(2, "big"))
    cut = server_frames_for(revision, [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])])
    assert (cut[0], cut[1][-1]) == (messages, controls[-1])


@every_revision
def test_bytes_can_come_one_by_one(revision: str) -> None:
    pieces = client_frames(revision)
    assert server_frames_for(revision, [bytes([byte]) for byte in b"".join(pieces)]) == server_frames_for(
        revision, pieces
    )


@every_revision
def test_all_frames_can_come_with_the_upgrade_request(revision: str) -> None:
    pieces = client_frames(revision)
    # A close frame in the same piece would end the calls before their answers.
    messages, controls = server_frames_for(revision, [b"".join(pieces)])
    assert (messages, controls[-1]) == (server_frames_for(revision, pieces)[0], (CLOSE, (1000).to_bytes(2, "big")))


@both_eras
def test_the_client_can_disconnect_after_any_byte(revision: str, cuts: Cuts) -> None:
    whole = b"".join(client_frames(revision)) + close_frame(Role.SERVER, 1000)

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


# Closing

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
async def open_websocket(
    bench: Bench, *, streams: Any = unlimited_pipe, **how: Any
) -> AsyncIterator[tuple[PipeEnd, PipeEnd, trio.Event]]:
    """Both ends of an open WebSocket, and an event for the end of its server."""
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


@pytest.mark.parametrize(("fault", "code", "expected"), FAULTS, ids=[f"{row[1]} {row[2]}" for row in FAULTS])
async def test_a_protocol_error_is_answered_and_later_frames_are_discarded(
    fault: bytes, code: int, expected: str, autojump_clock: MockClock
) -> None:
    bench = Bench(limits=Limits(message_bytes=2000))
    ask = json.dumps(RawClient(unlimited_pipe()[0], LATEST).request("tools/call", call("gate", name="a"))).encode()
    async with open_websocket(bench) as (ours, _, done):
        await ours.send_all(frame(Role.SERVER, TEXT, ask))
        await wait_all_tasks_blocked()
        await ours.send_all(fault)
        await wait_all_tasks_blocked()
        assert bench.ended == ["a"]
        raw = await ours.receive_some()
        assert raw[0] == 0x88
        assert int.from_bytes(raw[2:4], "big") == code
        assert expected in raw[4:].decode()
        assert raw[1] == len(raw) - 2
        start = trio.current_time()
        for _ in range(100):  # further frames do not break the connection
            await ours.send_all(frame(Role.SERVER, TEXT, b"late"))
        await wait_all_tasks_blocked()
        assert not done.is_set()
        await ours.send_all(close_frame(Role.SERVER, code))
        if code in (1002, 1007) or not fault[0] & 0x80:  # after these errors the server cannot find the close frame
            await ours.send_eof()
        await wait_or_fail(done.wait, "the end")
        assert trio.current_time() == start
        assert await ours.receive_some() == b""


async def test_the_wait_for_the_answer_to_a_close_frame_has_a_deadline(autojump_clock: MockClock) -> None:
    bench = Bench()
    start = trio.current_time()
    async with open_websocket(bench) as (ours, theirs, _):
        await ours.send_all(frame(Role.SERVER, 2))
    assert trio.current_time() == start + CLOSING
    assert theirs._into.no_receiver


@pytest.mark.parametrize("code", [1000, 1001, 1011, 3000, 4999])
async def test_a_close_frame_is_answered_with_its_code_and_cancels_calls(code: int, autojump_clock: MockClock) -> None:
    bench = Bench()
    async with websocket(bench.server, LATEST) as (wire, socket):
        await wire.start("tools/call", call("gate", name="a"))
        await wait_all_tasks_blocked()
        await socket.send(CloseConnection(code=code, reason="because"))
        await wait_for_end(wire)
        assert bench.ended == ["a"]
    assert socket.closed == CloseConnection(code=code, reason="")


async def test_a_close_frame_directly_after_a_request_is_answered(autojump_clock: MockClock) -> None:
    ask = json.dumps(RawClient(unlimited_pipe()[0], LATEST).request("tools/call", call("echo", text="x"))).encode()
    async with open_websocket(Bench()) as (ours, _, _):
        await ours.send_all(frame(Role.SERVER, TEXT, ask) + close_frame(Role.SERVER, 1000))
        raw = b""
        while received := await ours.receive_some():
            raw += received
    assert raw.endswith(b"\x88\x02" + (1000).to_bytes(2, "big"))
    assert raw.count(b"\x88\x02") == 1


@every_revision
async def test_a_drain_lets_calls_finish_and_then_closes_with_1001(revision: str, autojump_clock: MockClock) -> None:
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
        await wait_for_end(wire)
    assert socket.closed is not None
    assert (socket.closed.code, bench.ended) == (1001, [])


@both_eras
async def test_a_server_that_stops_closes_with_1001(revision: str, autojump_clock: MockClock) -> None:
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
        await wait_for_end(wire)
    assert bench.ended == ["a"]
    assert socket.closed is not None
    assert socket.closed.code == 1001


async def test_a_failed_session_closes_with_1011(autojump_clock: MockClock) -> None:
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


async def test_the_cancellation_of_a_handler_has_the_reason_of_the_client(autojump_clock: MockClock) -> None:
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
        await wait_for_end(wire)
    assert reasons == ["the client closed the connection with code 1001: 'bye'"]


async def test_aclose_without_a_close_frame_closes_with_1011(autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    frames = WebSocketFrames(Role.SERVER, Limits())
    link = _WebSocketStream(theirs, frames, b"")
    await ours.send_all(close_frame(Role.SERVER, 1011))
    await link.aclose()
    assert ours.heard[:4] == b"\x88\x2e" + (1011).to_bytes(2, "big")
    assert frames.over
    assert theirs._into.no_receiver


async def test_no_bytes_follow_an_incomplete_frame(autojump_clock: MockClock) -> None:
    ours, theirs = one_byte_pipe()
    link = _WebSocketStream(theirs, WebSocketFrames(Role.SERVER, Limits()), b"")
    with trio.move_on_after(60):
        await link.send_all(b"half a frame")
    ours._into.capacity = 100
    await link.aclose()
    assert (ours.heard, theirs._into.no_receiver) == (b"h", True)


@pytest.mark.parametrize("goes", [PipeEnd.aclose, PipeEnd.send_eof])
async def test_a_disconnected_client_gets_no_close_frame(goes: Any, autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    link = _WebSocketStream(theirs, WebSocketFrames(Role.SERVER, Limits()), b"before")
    await link.wait_send_all_might_not_block()
    assert [await link.receive_some(3), await link.receive_some(3)] == [b"bef", b"ore"]
    await goes(ours)
    assert await link.receive_some() == b""
    await link.aclose()
    assert (ours.heard, theirs._into.no_receiver) == (b"", True)


async def test_a_broken_stream_ends_the_connection(autojump_clock: MockClock) -> None:
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
    assert theirs.heard == head_of(theirs.heard) + seen["in"]


def head_of(data: bytes) -> bytes:
    return data[: data.index(b"\r\n\r\n") + 4]


# Pings


@both_eras
async def test_pings_are_answered(revision: str, autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, revision) as (wire, socket):
        await socket.send(Ping(payload=b"one"))
        await wait_all_tasks_blocked()
        await socket.send(Ping(payload=b""), Ping(payload=b"two"))
        await wire.call("tools/list")
        assert (socket.pongs[0], socket.pongs[-1]) == (b"one", b"two")


async def test_an_idle_client_gets_pings(autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, LATEST, endpoint={"keep_alive": 15}) as (wire, socket):
        await trio.sleep(100)
        pings = [event for event in socket.events if isinstance(event, Ping)]
        assert len(pings) == 6
        assert await wire.call("tools/list")


@pytest.mark.parametrize("streams", [unlimited_pipe, one_byte_pipe])
async def test_a_client_that_does_not_answer_pings_is_dropped(streams: Any, autojump_clock: MockClock) -> None:
    bench = Bench()
    start = trio.current_time()
    how: Any = {"endpoint": {"keep_alive": 15}, "socket": {"pongs": False}}
    async with websocket(bench.server, LATEST, streams=streams, **how) as (wire, _):
        await wire.start("tools/call", call("gate", name="a"))
        await wait_for_end(wire)
        assert bench.ended == ["a"]
        assert start + 30 <= trio.current_time() <= start + 30 + CLOSING


# Clients that do not read


@both_eras
async def test_the_calls_of_a_client_that_does_not_read_wait(revision: str, autojump_clock: MockClock) -> None:
    limits = Limits(outgoing=10, write_seconds=1e6)
    async with websocket(Bench(limits=limits).server, revision, streams=one_byte_pipe) as (wire, _):
        with wire.not_reading():
            await wire.start("tools/call", call("chatter"), progress="p", id="c")
            await wait_all_tasks_blocked()
            before = trio.current_time()
            await trio.sleep(100)
            assert trio.current_time() == before + 100  # the clock advances only if no task is busy
        first = await wire.note(PROGRESS)
        assert first["progress"] == 0
        await wire.cancel("c")


async def test_a_client_that_does_not_read_for_too_long_is_dropped(autojump_clock: MockClock) -> None:
    bench = Bench(limits=Limits(write_seconds=60))
    ask = json.dumps(RawClient(unlimited_pipe()[0], LATEST).request("tools/call", call("much", size=500_000))).encode()
    async with open_websocket(bench, streams=one_byte_pipe) as (ours, _, done):
        start = trio.current_time()
        await ours.send_all(frame(Role.SERVER, TEXT, ask))
        await wait_or_fail(done.wait, "the end")
        assert start + 60 <= trio.current_time() <= start + 60 + CLOSING
        raw = b""
        while received := await ours.receive_some():
            raw += received
        assert len(raw) < 500_000  # and no bytes follow the incomplete frame


async def test_bytes_are_read_in_small_pieces(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_endless_pings_use_a_limited_amount_of_memory(autojump_clock: MockClock) -> None:
    bench = Bench(limits=Limits(calls=10, outgoing=10, write_seconds=1e6))
    flood = frame(Role.SERVER, PING, b"x" * 100)
    async with open_websocket(bench, streams=one_byte_pipe) as (ours, theirs, _):
        with trio.move_on_after(1000):
            while True:
                await ours.send_all(flood)
        # The server stops reading when a few pongs wait.
        assert len(theirs.heard) < 200 * len(flood)
        await ours.aclose()


async def test_a_fragmented_message_is_joined(autojump_clock: MockClock) -> None:
    async with websocket(Bench().server, LATEST, socket={"fragment": 7}) as (wire, _):
        assert text(await wire.call("tools/call", call("echo", text="ä" * 1000))) == "ä" * 1000


# On the port of HTTP


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
            assert sum(isinstance(event, Ping) for event in socket.events) == 6  # at the keep-alive interval of HTTP
        assert socket.closed == CloseConnection(code=1000, reason="")


@pytest.mark.parametrize("size", [None, 1])
async def test_frames_can_come_with_the_request_or_byte_by_byte(size: int | None, autojump_clock: MockClock) -> None:
    data = b"".join(client_frames(LATEST))
    async with served(Bench().server) as web:
        stream = await web.connect()
        for at in range(0, len(data), size or len(data)):
            await stream.send_all(data[at : at + (size or len(data))])
            await wait_all_tasks_blocked()
        raw = b""
        while b'"ttlMs"' not in raw or "𝄞".encode() not in raw:
            raw += await stream.receive_some()
        await stream.send_all(close_frame(Role.SERVER, 1000))
        while received := await stream.receive_some():
            raw += received
        assert raw.startswith(b"HTTP/1.1 101 ")
        assert raw.endswith(b"\x88\x02" + (1000).to_bytes(2, "big"))


@pytest.mark.parametrize("path", ["/ws", "/ws/", "/ws?x=1"])
async def test_a_plain_get_of_the_websocket_path_gets_426(path: str, autojump_clock: MockClock) -> None:
    async with served(Bench().server) as web:
        answer = await web.send("GET", path, {"Host": "127.0.0.1:3000"})
        assert (answer.status, answer.headers["Upgrade"]) == (426, "websocket")
        assert "WebSocket" in answer.message["error"]["message"]


async def test_websockets_can_be_switched_off(autojump_clock: MockClock) -> None:
    async with served(Bench().server, websocket_path=None) as web:
        stream = await web.connect()
        await stream.send_all(upgrade_request())
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 404 ")


@every_revision
async def test_a_drain_of_serve_http_lets_calls_finish_and_closes_with_1001(
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
            await wait_for_end(wire)
        assert socket.closed is not None
        assert (socket.closed.code, bench.ended, trio.current_time() < 1) == (1001, [], True)


async def test_a_close_during_a_large_answer_does_not_affect_other_clients(
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
            raw = b""
            while not raw.endswith(b"x"):  # the answer has begun, and the client reads no more of it
                raw += await stream.receive_some(4096)
            await trio.testing.wait_all_tasks_blocked(0.1)
            await stream.send_all(close_frame(Role.SERVER, 1000))
            await trio.testing.wait_all_tasks_blocked(0.1)
            while await stream.receive_some():
                pass
            await stream.aclose()
            assert (await web.call("server/discover")).status == 200
    assert not caplog.records
