"""The client's end of a WebSocket: the handshake, messages both ways, and every way to end."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked
from wsproto.utilities import generate_accept_token

from tests.http.served import by_token
from tests.http.ws import BINARY, CLOSE, CONTINUED, PING, PONG, TEXT, close_frame, frame, serve_here
from tests.server.checkpoints import Attempt, PipeEnd, cancel_everywhere, narrow, patiently, wide
from tests.server.wire import CAPABILITIES, CLIENT_INFO, LATEST, Object, Wire, everywhere
from trio_mcp import Context, Limits, LocalProtocolError, RemoteProtocolError, Server, SessionClosed
from trio_mcp.core.revisions import Role
from trio_mcp.outbox import CLOSING
from trio_mcp.websocket_client import UpgradeRefused, WebSocketLink, connect_websocket, open_websocket

URL = "ws://127.0.0.1:3000/ws"


def to_client(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    return frame(Role.CLIENT, opcode, payload, fin=fin)


def heard_by(server: PipeEnd) -> list[tuple[int, bytes]]:
    """The frames that a server has been sent after the handshake, unmasked."""
    data = server.heard.partition(b"\r\n\r\n")[2]
    frames = []
    while len(data) > 1:
        assert data[1] & 0x80, "a client masks"
        size, at = data[1] & 0x7F, 2
        if size > 125:
            width = 2 if size == 126 else 8
            size, at = int.from_bytes(data[2 : 2 + width], "big"), 2 + width
        if len(data) < at + 4 + size:
            break  # it is on its way
        key, payload = data[at : at + 4], data[at + 4 : at + 4 + size]
        frames.append((data[0] & 15, bytes(byte ^ key[at % 4] for at, byte in enumerate(payload))))
        data = data[at + 4 + size :]
    return frames


async def asked(server: PipeEnd) -> h11.Request:
    """The request of the handshake."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        data += await server.receive_some()
    http = h11.Connection(h11.SERVER)
    http.receive_data(data)
    event = http.next_event()
    assert isinstance(event, h11.Request)
    return event


def consent(request: h11.Request, **headers: str | None) -> bytes:
    key = dict(request.headers)[b"sec-websocket-key"]
    fields: dict[str, str | None] = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Accept": generate_accept_token(key).decode(),
        "Sec-WebSocket-Protocol": "mcp",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join(("HTTP/1.1 101 Switching Protocols", *lines, "", "")).encode()


@asynccontextmanager
async def linked(
    *, streams: Callable[[], tuple[PipeEnd, PipeEnd]] = wide, rest: bytes = b"", **options: Any
) -> AsyncIterator[tuple[WebSocketLink, PipeEnd]]:
    """A link, and the server's end of it, which the test plays."""
    ours, theirs = streams()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            await theirs.send_all(consent(await asked(theirs)) + rest)

        link = await open_websocket(ours, URL, **options)
    yield link, theirs
    await link.aclose()
    assert ours._into.no_receiver


async def received(link: WebSocketLink) -> list[bytes]:
    """Everything up to the end."""
    texts = []
    while (text := await patiently(link.receive, "a message")) is not None:
        texts.append(text)
    return texts


# With our own server.


class Serving:
    def __init__(self) -> None:
        self.server = server = Server("served", burst=0)

        @server.tool
        async def echo(text: str, ctx: Context) -> str:
            await ctx.progress(1)
            return text

        @server.tool
        async def stop(ctx: Context) -> str:
            await trio.sleep_forever()
            raise AssertionError


def messages(revision: str) -> list[Object]:
    """What a client asks, up to a call."""
    wire = Wire(wide()[0], revision)
    start = {"protocolVersion": revision, "capabilities": CAPABILITIES[revision], "clientInfo": CLIENT_INFO}
    note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    opening = [] if wire.modern else [wire.request("initialize", start), note]
    call = {"name": "echo", "arguments": {"text": "ä€𝄞\u2028"}}
    return [*opening, wire.request("tools/call", call, progress="p", id="call")]


@everywhere
@pytest.mark.parametrize("streams", [wide, narrow])
async def test_a_session_with_our_own_server(revision: str, streams: Any, autojump_clock: MockClock) -> None:
    ours, theirs = streams()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_here, Serving().server, theirs)
        async with await open_websocket(ours, URL) as link:
            came: list[Object] = []
            for message in messages(revision):
                await link.send(json.dumps(message, ensure_ascii=False).encode())
            while not came or came[-1].get("id") != "call":
                text = await link.receive()
                assert text is not None
                came.append(json.loads(text))
        assert came[-1]["result"]["content"][0]["text"] == "ä€𝄞\u2028"
        assert [each["method"] for each in came if "method" in each] == ["notifications/progress"]
    assert (link.code, link.why) == (1000, "the server closed the connection with code 1000")


async def test_headers_go_with_the_request(autojump_clock: MockClock) -> None:
    ours, theirs = wide()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: serve_here(Serving().server, theirs, authenticate=by_token))
        link = await open_websocket(ours, URL, headers=(("Authorization", "Bearer ada"),))
        await link.aclose()


async def test_a_refusal_by_our_own_server_says_why(autojump_clock: MockClock) -> None:
    ours, theirs = wide()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: serve_here(Serving().server, theirs, authenticate=by_token))
        with pytest.raises(UpgradeRefused, match=r"ws://127.0.0.1:3000/ws answered 401") as caught:
            await open_websocket(ours, URL)
    assert caught.value.status == 401
    assert caught.value.headers["WWW-Authenticate"] == "Bearer"
    assert json.loads(caught.value.body)["error"]["message"] in str(caught.value)


# The handshake.


async def test_the_request_is_one_for_mcp_and_without_compression(autojump_clock: MockClock) -> None:
    ours, theirs = wide()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            await open_websocket(ours, "wss://me:secret@example.com:8443/ws?a=b", headers=(("X-Colour", "green"),))

        request = await asked(theirs)
        fields = {name.decode(): value.decode() for name, value in request.headers}
        assert (request.method, request.target) == (b"GET", b"/ws?a=b")
        assert len(fields.pop("sec-websocket-key")) == 24
        assert fields == {
            "host": "example.com:8443",
            "upgrade": "websocket",
            "connection": "Upgrade",
            "sec-websocket-version": "13",
            "sec-websocket-protocol": "mcp",
            "x-colour": "green",
        }
        await theirs.send_all(consent(request))


@pytest.mark.parametrize(
    "url", ["http://a/ws", "ws:///ws", "ws://", "a", "ws://a:0/", "ws://a:70000/", "ws://a:b/", "ws://[::1/", ""]
)
async def test_what_is_no_url_of_a_websocket_is_our_callers_mistake(url: str) -> None:
    with pytest.raises(LocalProtocolError, match=r"ws://127.0.0.1:3000/ws"):
        await connect_websocket(url)
    ours, theirs = wide()
    with pytest.raises(LocalProtocolError):
        await open_websocket(ours, url)
    assert (theirs.heard, ours._into.no_receiver) == (b"", True)


@pytest.mark.parametrize("field", [("X Y", "z"), ("X", "a\r\nb"), ("X", "ä€")])
async def test_what_is_no_header_is_our_callers_mistake(field: tuple[str, str]) -> None:
    ours, theirs = wide()
    with pytest.raises(LocalProtocolError, match=r"cannot be asked of ws://127.0.0.1:3000/ws"):
        await open_websocket(ours, URL, headers=(field,))
    assert (theirs.heard, ours._into.no_receiver) == (b"", True)


async def test_nobody_there_is_an_oserror() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    await listeners[0].aclose()
    with pytest.raises(OSError, match="connect"):
        await connect_websocket(f"ws://127.0.0.1:{port}/ws")


async def refused_by(reply: Callable[[h11.Request], bytes], url: str = URL, *, ends: bool = True) -> Exception:
    ours, theirs = wide()
    caught: list[Exception] = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            try:
                await open_websocket(ours, url)
            except Exception as error:  # noqa: BLE001
                caught.append(error)

        await theirs.send_all(reply(await asked(theirs)))
        if ends:
            await theirs.send_eof()
    [error] = caught
    assert ours._into.no_receiver
    return error


REPLIES: list[tuple[str, bytes, int, str, bytes]] = [
    ("404", b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nwhat", 404, "answered 404.*: 'what'", b"what"),
    ("without a body", b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", 500, "answered 500 instead.*WebSocket$", b""),
    ("a body to the end", b"HTTP/1.0 200 OK\r\n\r\n<html>", 200, "answered 200.*'<html>'", b"<html>"),
    ("a body that is cut", b"HTTP/1.1 502 No\r\nContent-Length: 9\r\n\r\nwhat", 502, "answered 502.*'what'", b"what"),
    (
        "a long body",
        b"HTTP/1.1 403 No\r\nContent-Length: 9999\r\n\r\n" + b"x" * 500,
        403,
        "answered 403",
        b"x" * 400,
    ),
    ("no UTF-8", b"HTTP/1.1 403 No\r\nContent-Length: 1\r\n\r\n\xff", 403, "answered 403", b"\xff"),
    (
        "something before",
        b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 401 Who\r\nWWW-Authenticate: Bearer\r\nContent-Length: 0\r\n\r\n",
        401,
        "answered 401",
        b"",
    ),
]


@pytest.mark.parametrize(("about", "reply", "status", "says", "body"), REPLIES, ids=[row[0] for row in REPLIES])
async def test_what_a_server_answers_otherwise_is_told(
    about: str, reply: bytes, status: int, says: str, body: bytes, autojump_clock: MockClock
) -> None:
    error = await refused_by(lambda request: reply, "ws://me:secret@a.example/ws?token=secret")
    assert isinstance(error, UpgradeRefused)
    with pytest.raises(UpgradeRefused, match=says):
        raise error
    assert (error.status, error.body) == (status, body)
    assert "secret" not in str(error)
    if status == 401:
        assert error.headers["WWW-Authenticate"] == "Bearer"


async def test_a_long_refusal_is_not_read_to_its_end(autojump_clock: MockClock) -> None:
    reply = b"HTTP/1.1 403 No\r\nContent-Length: 9999\r\n\r\n" + b"x" * 500
    assert isinstance(await refused_by(lambda request: reply, ends=False), UpgradeRefused)


CONSENTS: list[tuple[str, dict[str, str | None], str]] = [
    ("no subprotocol", {"Sec_WebSocket_Protocol": None}, "with no subprotocol instead of mcp"),
    ("another one", {"Sec_WebSocket_Protocol": "soap"}, "the subprotocol 'soap' instead of mcp"),
    ("no token", {"Sec_WebSocket_Accept": None}, "not in answer to our key"),
    ("another token", {"Sec_WebSocket_Accept": "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="}, "not in answer to our key"),
    ("compression", {"Sec_WebSocket_Extensions": "permessage-deflate"}, "not offered: 'permessage-deflate'"),
    ("no upgrade", {"Upgrade": None}, "Upgrade is ''"),
    ("another upgrade", {"Upgrade": "h2c"}, "Upgrade is 'h2c'"),
    ("an upgrade of nothing", {"Connection": "keep-alive"}, "Upgrade is 'websocket', and its Connection 'keep-alive'"),
]


@pytest.mark.parametrize(("about", "headers", "says"), CONSENTS, ids=[row[0] for row in CONSENTS])
async def test_a_consent_that_is_none_is_told(
    about: str, headers: dict[str, str | None], says: str, autojump_clock: MockClock
) -> None:
    error = await refused_by(lambda request: consent(request, **headers))
    assert isinstance(error, UpgradeRefused)
    assert error.status == 101
    assert says in str(error)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 101 Switch", b"SSH-2.0-x\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x46"])
async def test_what_is_no_answer_at_all_is_told(reply: bytes, autojump_clock: MockClock) -> None:
    error = await refused_by(lambda request: reply)
    assert isinstance(error, SessionClosed if reply in (b"", b"HTTP/1.1 101 Switch") else RemoteProtocolError)
    assert URL in str(error)


async def test_an_endless_head_is_not_kept(autojump_clock: MockClock) -> None:
    error = await refused_by(lambda request: b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, ends=False)
    assert isinstance(error, RemoteProtocolError)


async def test_a_connection_that_breaks_in_the_handshake_is_told(autojump_clock: MockClock) -> None:
    ours, theirs = wide()
    await theirs.aclose()
    with pytest.raises(SessionClosed, match=r"ws://127.0.0.1:3000/ws"):
        await open_websocket(ours, URL)


async def test_a_handshake_may_be_cancelled(autojump_clock: MockClock) -> None:
    ours, _ = wide()
    with trio.move_on_after(5) as scope:
        await open_websocket(ours, URL)
    assert scope.cancelled_caught
    assert ours._into.no_receiver


# Receiving.

FRAMES = [
    to_client(TEXT, b'{"a": 1}'),
    to_client(TEXT, "ä€".encode()[:3], fin=False),
    to_client(PING, b"between"),
    to_client(CONTINUED, "ä€".encode()[3:]),
    to_client(PONG, b"?"),
    to_client(TEXT),
    to_client(CLOSE, (1001).to_bytes(2, "big") + b"bye"),
]


async def take(pieces: list[bytes], rest: bytes = b"") -> tuple[list[bytes], int, str, list[tuple[int, bytes]]]:
    async with linked(rest=rest) as (link, server), trio.open_nursery() as nursery:
        got: list[bytes] = []

        @nursery.start_soon
        async def _() -> None:
            got.extend(await received(link))

        for piece in pieces:
            await server.send_all(piece)
            await wait_all_tasks_blocked()
    return got, link.code, link.why, heard_by(server)


EXPECTED = (
    [b'{"a": 1}', "ä€".encode(), b""],
    1001,
    "the server closed the connection with code 1001: 'bye'",
    [(PONG, b"between"), (CLOSE, (1001).to_bytes(2, "big"))],
)


@settings(max_examples=40)
@given(st.sets(st.integers(0, len(b"".join(FRAMES))), max_size=12))
def test_chunk_boundaries_do_not_matter(cuts: set[int]) -> None:
    whole = b"".join(FRAMES)
    pieces = [whole[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(whole)]) if a < b]
    got = trio.run(take, pieces, clock=MockClock(autojump_threshold=0))
    # A close frame in the same piece as the ping comes first: nothing is sent after it.
    assert (got[:3], got[3][-1]) == (EXPECTED[:3], EXPECTED[3][-1])


async def test_bytes_may_come_one_by_one(autojump_clock: MockClock) -> None:
    assert await take([bytes([byte]) for byte in b"".join(FRAMES)]) == EXPECTED


async def test_frames_may_come_with_the_consent(autojump_clock: MockClock) -> None:
    assert await take(FRAMES[3:], rest=b"".join(FRAMES[:3])) == EXPECTED
    assert (await take([], rest=b"".join(FRAMES)))[:3] == EXPECTED[:3]


CLOSES: list[tuple[bytes, int, str, bytes]] = [
    (close_frame(Role.CLIENT, 1000), 1000, "with code 1000", (1000).to_bytes(2, "big")),
    (to_client(CLOSE), 1005, "without a code", b""),
    (close_frame(Role.CLIENT, 1011, "no more"), 1011, "with code 1011: 'no more'", (1011).to_bytes(2, "big")),
    (close_frame(Role.CLIENT, 4000), 4000, "with code 4000", (4000).to_bytes(2, "big")),
    (to_client(BINARY, b"x"), 1003, "binary", (1003).to_bytes(2, "big") + b"messages are text; this one is binary"),
    (to_client(TEXT, b"\xff"), 1007, "UTF-8", (1007).to_bytes(2, "big") + b"the text is not UTF-8"),
    (
        to_client(TEXT, b"x" * 101),
        1009,
        "longer than 100 bytes",
        (1009).to_bytes(2, "big") + b"the message is longer than 100 bytes (Limits.message_bytes)",
    ),
    (frame(Role.CLIENT, TEXT, b"x", masked=True), 1002, "masked", b"\x03\xeaclient received unexpected masked frame"),
]


@pytest.mark.parametrize(("data", "code", "says", "reply"), CLOSES, ids=[f"{row[1]}" for row in CLOSES])
async def test_every_end_is_told_with_its_code(
    data: bytes, code: int, says: str, reply: bytes, autojump_clock: MockClock
) -> None:
    async with linked(limits=Limits(message_bytes=100)) as (link, server):
        await server.send_all(to_client(TEXT, b"before") + data + to_client(TEXT, b"after"))
        assert await received(link) == [b"before"]
        assert link.code == code
        assert says in link.why
        assert heard_by(server) == [(CLOSE, reply)]
        with pytest.raises(SessionClosed, match=r"closed|broke"):
            await link.send(b"x")
        assert await link.receive() is None
        assert heard_by(server) == [(CLOSE, reply)]


@pytest.mark.parametrize("size", range(sum(map(len, FRAMES))))
async def test_a_server_may_go_after_any_byte(size: int, autojump_clock: MockClock) -> None:
    data = b"".join(FRAMES)[:size]
    async with linked() as (link, server):
        await server.send_all(data)
        await server.send_eof()
        texts = await received(link)
        assert texts == EXPECTED[0][: len(texts)]
        assert (link.code, link.why) == (1006, "the connection was lost without a close frame")
        with pytest.raises(SessionClosed, match="lost"):
            await link.send(b"x")


async def test_receiving_may_be_cancelled_and_loses_nothing(autojump_clock: MockClock) -> None:
    async with linked() as (link, server):
        data = to_client(TEXT, b"one") + to_client(PING) + to_client(TEXT, b"two")
        texts = []
        for byte in data:
            with trio.move_on_after(1):
                texts.append(await link.receive())
            await server.send_all(bytes([byte]))
        texts.append(await link.receive())
        assert texts == [b"one", b"two"]


async def test_a_ping_is_answered_before_its_message_is_handed_over(autojump_clock: MockClock) -> None:
    async with linked() as (link, server):
        await server.send_all(to_client(PING, b"1") + to_client(TEXT, b"x"))
        assert await link.receive() == b"x"
        assert heard_by(server) == [(PONG, b"1")]


async def test_a_ping_that_came_with_the_consent_is_answered_at_once(autojump_clock: MockClock) -> None:
    async with linked(rest=to_client(PING, b"1")) as (link, server):
        with trio.move_on_after(5):
            await link.receive()
        assert heard_by(server) == [(PONG, b"1")]


# A sign of life.


async def test_a_silent_server_is_asked_and_then_given_up(autojump_clock: MockClock) -> None:
    async with linked(heartbeat=20) as (link, server):
        start = trio.current_time()
        assert await link.receive() is None
        assert trio.current_time() == start + 40
        assert link.why == "the server was silent for 40 seconds"
        assert heard_by(server) == [(PING, b"")]


async def test_a_server_that_asks_and_does_not_read_is_given_up(autojump_clock: MockClock) -> None:
    async with linked(streams=narrow, heartbeat=20) as (link, server), trio.open_nursery() as nursery:
        nursery.start_soon(server.send_all, to_client(PING, b"!" * 125))
        assert await link.receive() is None
        assert trio.current_time() == 20 + CLOSING
        assert link.why == "the server did not take all of what was sent"


@pytest.mark.parametrize("after", [10, 30])
async def test_closing_ends_the_wait_for_a_sign_of_life(after: float, autojump_clock: MockClock) -> None:
    async with linked(heartbeat=20) as (link, server), trio.open_nursery() as nursery:
        nursery.start_soon(received, link)
        await trio.sleep(after)
        await server.send_all(close_frame(Role.CLIENT, 1000))
        await link.aclose()
        assert trio.current_time() == after
        assert [opcode for opcode, _ in heard_by(server)] == ([CLOSE] if after < 20 else [PING, CLOSE])


async def test_any_sign_of_life_will_do(autojump_clock: MockClock) -> None:
    async with linked(heartbeat=20) as (link, server), trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            for sign in (to_client(PONG), to_client(PING), to_client(TEXT, b"x", fin=False)) * 3:
                await trio.sleep(39)
                await server.send_all(sign)
                if sign[0] == TEXT:
                    await server.send_all(to_client(CONTINUED, b"y"))
            await server.send_all(close_frame(Role.CLIENT, 1000))

        assert await received(link) == [b"xy"] * 3
        assert link.code == 1000


async def test_without_a_heartbeat_one_waits_for_ever(autojump_clock: MockClock) -> None:
    async with linked(heartbeat=math.inf) as (link, server):
        with trio.move_on_after(1e6) as scope:
            await link.receive()
        assert scope.cancelled_caught
        assert heard_by(server) == []


# Sending.


@pytest.mark.parametrize("streams", [wide, narrow])
async def test_many_may_send_and_no_frame_is_in_another(streams: Any, autojump_clock: MockClock) -> None:
    async with linked(streams=streams) as (link, server):
        texts = [bytes([65 + number]) * 300 for number in range(10)]
        async with trio.open_nursery() as nursery:
            for text in texts:
                nursery.start_soon(link.send, text)
            while len(server.heard) < server.heard.find(b"\r\n\r\n") + 4 + 308 * len(texts):
                await server.receive_some()
        assert sorted(heard_by(server)) == [(TEXT, text) for text in texts]
        server._into.capacity = math.inf  # so that it can close in time


async def test_one_that_waits_its_turn_may_be_cancelled_without_a_trace(autojump_clock: MockClock) -> None:
    async with linked(streams=narrow) as (link, server), trio.open_nursery() as nursery:
        nursery.start_soon(link.send, b"x" * 100)
        await wait_all_tasks_blocked()
        with trio.move_on_after(5) as scope:
            await link.send(b"y" * 100)
        assert scope.cancelled_caught
        server._into.capacity = math.inf
        while not heard_by(server):
            await server.receive_some()
        await link.send(b"z")
        assert heard_by(server) == [(TEXT, b"x" * 100), (TEXT, b"z")]


async def test_a_frame_that_was_begun_is_finished_when_it_is_cancelled(autojump_clock: MockClock) -> None:
    async with linked(streams=narrow) as (link, server), trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            await trio.sleep(5 + CLOSING / 2)
            server._into.capacity = math.inf
            await server.receive_some()

        with trio.move_on_after(5) as scope:
            await link.send(b"x" * 100)
        assert trio.current_time() == 5 + CLOSING / 2
        assert scope.cancelled_caught
        await link.send(b"y")
        assert heard_by(server) == [(TEXT, b"x" * 100), (TEXT, b"y")]


async def test_half_a_frame_ends_who_receives_too(autojump_clock: MockClock) -> None:
    async with linked(streams=narrow) as (link, _), trio.open_nursery() as nursery:
        ends: list[Any] = []

        @nursery.start_soon
        async def _() -> None:
            ends.append(await link.receive())

        with trio.move_on_after(5):
            await link.send(b"x" * 100)
        await wait_all_tasks_blocked()
        assert (ends, link.why) == ([None], "the server did not take all of what was sent")


async def test_half_a_frame_is_the_end(autojump_clock: MockClock) -> None:
    async with linked(streams=narrow) as (link, server):
        with trio.move_on_after(5) as scope:
            await link.send(b"x" * 100)
        assert scope.cancelled_caught
        assert trio.current_time() == 5 + CLOSING
        with pytest.raises(SessionClosed, match="did not take all"):
            await link.send(b"y")
        assert await link.receive() is None
        assert link.why == "the server did not take all of what was sent"
        sent = server.heard
        await link.aclose()
        assert server.heard == sent


async def test_a_server_that_has_gone_is_told_to_who_sends(autojump_clock: MockClock) -> None:
    async with linked() as (link, server):
        await server.aclose()
        with pytest.raises(SessionClosed, match="lost without a close frame") as caught:
            await link.send(b"x")
        assert isinstance(caught.value.__cause__, trio.BrokenResourceError)
        assert await link.receive() is None


async def test_pongs_wait_for_a_frame_that_is_being_sent(autojump_clock: MockClock) -> None:
    async with linked(streams=narrow) as (link, server), trio.open_nursery() as nursery:
        nursery.start_soon(link.send, b"x" * 100)
        await wait_all_tasks_blocked()
        nursery.start_soon(received, link)
        await server.send_all(to_client(PING, b"!"))
        await wait_all_tasks_blocked()
        server._into.capacity = math.inf
        await server.receive_some()
        await wait_all_tasks_blocked()
        assert heard_by(server) == [(TEXT, b"x" * 100), (PONG, b"!")]
        await link.aclose()


# Closing.


async def test_closing_says_so_and_waits_for_the_answer(autojump_clock: MockClock) -> None:
    async with linked() as (link, server), trio.open_nursery() as nursery:
        nursery.start_soon(link.aclose)
        await wait_all_tasks_blocked()
        assert heard_by(server) == [(CLOSE, (1000).to_bytes(2, "big"))]
        assert not server._out.no_receiver
        await server.send_all(to_client(TEXT, b"late") + close_frame(Role.CLIENT, 1000))
        await wait_all_tasks_blocked()
        assert server._out.no_receiver
        assert trio.current_time() == 0


async def test_closing_does_not_wait_for_ever(autojump_clock: MockClock) -> None:
    async with linked(streams=narrow) as (link, server):
        await link.aclose()
        assert trio.current_time() == CLOSING
        await link.aclose()
        assert server._out.no_receiver
        assert trio.current_time() == CLOSING


async def test_closing_ends_those_who_receive_and_send(autojump_clock: MockClock) -> None:
    async with linked(streams=narrow) as (link, _), trio.open_nursery() as nursery:
        ends: list[Any] = []

        @nursery.start_soon
        async def receiving() -> None:
            ends.append(await link.receive())

        @nursery.start_soon
        async def sending() -> None:
            with pytest.raises(SessionClosed):
                await link.send(b"x" * 100)
            ends.append("sent")

        await wait_all_tasks_blocked()
        await link.aclose()
        await wait_all_tasks_blocked()
        assert sorted(ends, key=str) == [None, "sent"]
        assert "from this side" in link.why
        with pytest.raises(SessionClosed, match="from this side"):
            await link.send(b"x")


async def test_closing_while_somebody_receives_is_as_polite(autojump_clock: MockClock) -> None:
    async with linked() as (link, server), trio.open_nursery() as nursery:
        nursery.start_soon(received, link)
        await wait_all_tasks_blocked()
        nursery.start_soon(link.aclose)
        await wait_all_tasks_blocked()
        await server.send_all(close_frame(Role.CLIENT, 1000))
        await wait_all_tasks_blocked()
        assert (server._out.no_receiver, trio.current_time()) == (True, 0)
        assert (link.code, heard_by(server)) == (1000, [(CLOSE, (1000).to_bytes(2, "big"))])


async def test_a_cancelled_close_closes_all_the_same(autojump_clock: MockClock) -> None:
    async with linked() as (link, server):
        with trio.CancelScope() as scope:
            scope.cancel()
            await link.aclose()
        assert server._out.no_receiver


def test_all_may_be_cancelled_anywhere() -> None:
    async def scenario(attempt: Attempt) -> None:
        ours, theirs = wide()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_here, Serving().server, theirs)
            with attempt.window():
                async with await open_websocket(ours, URL) as link:
                    for message in messages(LATEST):
                        await link.send(json.dumps(message).encode())
                    while (text := await link.receive()) and b'"result"' not in text:
                        pass
            assert ours._into.no_receiver

    assert cancel_everywhere(scenario, watch="the scenario") > 10
