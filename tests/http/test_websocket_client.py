"""The client's end of a WebSocket: connecting, the handshake, messages in both directions, and all kinds of ends."""

from __future__ import annotations

import itertools
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import h11
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked
from wsproto.utilities import generate_accept_token

from tests.client.matrix import no_tasks_left, tcp_connects_to
from tests.http.served import by_token
from tests.http.ws import BINARY, CLOSE, CONTINUED, PING, PONG, TEXT, close_frame, frame, serve_websocket
from tests.server.checkpoints import (
    Attempt,
    Pair,
    PipeEnd,
    any_task,
    cancel_at_each_step,
    one_byte_pipe,
    pipe_pair,
    unlimited_pipe,
    wait_or_fail,
)
from tests.server.raw_client import LATEST
from trio_mcp import Limits, Server, UsageError, open_client
from trio_mcp.client import dial_websocket
from trio_mcp.core import REVISIONS, ClientProtocol, Message, Notification, Offer, Role
from trio_mcp.core.http import WebSocketFrames
from trio_mcp.errors import ConnectionFailed, RemoteProtocolError, SessionClosed, UpgradeRefused
from trio_mcp.transport import CLOSING, CONNECTING, Duplex, open_nursery

URL = "ws://127.0.0.1:3000/ws"


@pytest.fixture(autouse=True, scope="module")
def no_proxies() -> Iterator[None]:
    """Remove the proxies of this machine from the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            patch.delenv(name)
        yield


def to_client(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    return frame(Role.CLIENT, opcode, payload, fin=fin)


def frames_sent_to(server: PipeEnd) -> list[tuple[int, bytes]]:
    """The frames that the client sent to a server, unmasked and without the handshake."""
    data = server.heard
    if data.startswith(b"GET "):
        data = data.partition(b"\r\n\r\n")[2]
    frames = []
    while len(data) > 1:
        assert data[1] & 0x80, "a client masks"
        size, at = data[1] & 0x7F, 2
        if size > 125:
            width = 2 if size == 126 else 8
            size, at = int.from_bytes(data[2 : 2 + width], "big"), 2 + width
        if len(data) < at + 4 + size:
            break  # an incomplete frame
        key, payload = data[at : at + 4], data[at + 4 : at + 4 + size]
        frames.append((data[0] & 15, bytes(byte ^ key[at % 4] for at, byte in enumerate(payload))))
        data = data[at + 4 + size :]
    return frames


async def handshake_request(server: PipeEnd) -> h11.Request:
    """Read the request of the handshake."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        received = await server.receive_some()
        assert received, "the client has gone"
        data += received
    http = h11.Connection(h11.SERVER)
    http.receive_data(data)
    event = http.next_event()
    assert isinstance(event, h11.Request)
    return event


def acceptance(request: h11.Request, **headers: str | None) -> bytes:
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


async def dial(
    ours: trio.abc.Stream, url: str = URL, *headers: tuple[str, str], limits: Limits | None = None
) -> tuple[trio.abc.Stream, bytes]:
    """Open a WebSocket over this stream."""

    async def connect() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return ours

    with tcp_connects_to(connect):
        return await dial_websocket(url, ssl_context=None, headers=headers, limits=limits or Limits())


# The handshake


async def test_the_request_is_one_for_mcp_and_without_compression(autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    opened: list[Any] = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            opened.append(await dial(ours, "ws://Example.com:8080/a b?a=ä#c".replace(" ", "%20"), ("X-Colour", " ä ")))

        request = await handshake_request(theirs)
        fields = dict(request.headers)
        assert (request.method, request.target) == (b"GET", b"/a%20b?a=%C3%A4")
        assert len(fields.pop(b"sec-websocket-key")) == 24
        assert fields == {
            b"host": b"example.com:8080",
            b"upgrade": b"websocket",
            b"connection": b"Upgrade",
            b"sec-websocket-version": b"13",
            b"sec-websocket-protocol": b"mcp",
            b"x-colour": "ä".encode("latin-1"),
        }
        await theirs.send_all(acceptance(request) + b"and more")
    assert opened == [(ours, b"and more")]


BAD_URLS = [
    *(
        (url, "a WebSocket URL must be like ws://127.0.0.1:3000/ws")
        for url in ("http://a/ws", "a", "", " ws://a", "ws:a")
    ),
    *(
        (f"ws://{rest}", "it must be like ws://127.0.0.1:3000/ws")
        for rest in ("", "/ws", "a:0/", "a:70000/", "a:b/", "[::1/")
    ),
    ("wss://me:secret@a.test/ws", "send them in an Authorization header"),
    ("ws://a.test/w s", "white space"),
]


@pytest.mark.parametrize(("url", "why"), BAD_URLS)
async def test_an_invalid_websocket_url_is_a_usage_error(url: str, why: str) -> None:
    ours, theirs = unlimited_pipe()
    with pytest.raises(UsageError) as caught:
        await dial(ours, url)
    assert why in str(caught.value)
    assert "secret" not in str(caught.value)
    assert theirs.heard == b""


@pytest.mark.parametrize(
    ("field", "why"),
    [
        *(
            (each, "is invalid: the name")
            for each in [("X Y", "z"), ("X: Y", "z"), ("X", "secret\r\nb"), ("X", "secret€")]
        ),
        *(((each, "secret"), "is set by the connection") for each in ("Host", "UPGRADE", "sec-websocket-key")),
    ],
)
async def test_an_invalid_header_is_a_usage_error(field: tuple[str, str], why: str) -> None:
    ours, theirs = unlimited_pipe()
    with pytest.raises(UsageError, match=why) as caught:
        await dial(ours, URL, field)
    assert "secret" not in str(caught.value)
    assert theirs.heard == b""


async def dial_error(
    reply: Callable[[h11.Request], bytes], url: str = URL, *headers: tuple[str, str], ends: bool = True, **options: Any
) -> Exception:
    """The exception of a client if the server answers the handshake with this reply and sends no more."""
    ours, theirs = unlimited_pipe()
    caught: list[Exception] = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            try:
                await dial(ours, url, *headers, **options)
            except Exception as error:  # noqa: BLE001  # the test checks the exception
                caught.append(error)

        await theirs.send_all(reply(await handshake_request(theirs)))
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
    ("a long body", b"HTTP/1.1 403 No\r\nContent-Length: 9999\r\n\r\n" + b"x" * 500, 403, "answered 403", b"x" * 400),
    ("invalid UTF-8", b"HTTP/1.1 403 No\r\nContent-Length: 1\r\n\r\n\xff", 403, "answered 403", b"\xff"),
    ("a redirect", b"HTTP/1.1 307 Go\r\nContent-Length: 1\r\n\r\nx", 307, "answered 307.*Location", b"x"),
    (
        "an informational response",
        b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 401 Who\r\nWWW-Authenticate: Bearer\r\nContent-Length: 0\r\n\r\n",
        401,
        "answered 401",
        b"",
    ),
]


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(("about", "reply", "status", "expected", "body"), REPLIES, ids=[row[0] for row in REPLIES])
async def test_an_http_response_to_the_handshake_is_in_the_error(
    about: str, reply: bytes, status: int, expected: str, body: bytes, ends: bool, autojump_clock: MockClock
) -> None:
    error = await dial_error(lambda request: reply, "ws://a.example/ws?token=secret", ends=ends)
    assert trio.current_time() <= CLOSING  # the time to wait for the rest of a body
    assert isinstance(error, UpgradeRefused)
    with pytest.raises(UpgradeRefused, match=expected):
        raise error
    assert (error.status, error.body) == (status, body)
    assert "secret" not in str(error)
    if status == 401:
        assert error.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("before", [0, 380, 399])
async def test_the_error_has_no_part_of_the_token(before: int, autojump_clock: MockClock) -> None:
    token = "abcdefghijklmnopqrstuvwxyz" * 20
    body = b"x" * before + token.encode() + b"y" * 1000
    reply = b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    error = await dial_error(lambda request: reply, URL, ("Authorization", f"Bearer {token}"))
    assert isinstance(error, UpgradeRefused)
    assert len(error.body) == 400
    assert b"ab" not in error.body


ACCEPTANCES: list[tuple[str, dict[str, str | None], str]] = [
    ("no subprotocol", {"Sec_WebSocket_Protocol": None}, "with no subprotocol instead of mcp"),
    ("another subprotocol", {"Sec_WebSocket_Protocol": "soap"}, "the subprotocol 'soap' instead of mcp"),
    ("no token", {"Sec_WebSocket_Accept": None}, "Accept does not fit the key"),
    ("another token", {"Sec_WebSocket_Accept": "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="}, "Accept does not fit the key"),
    ("compression", {"Sec_WebSocket_Extensions": "permessage-deflate"}, "not offered: 'permessage-deflate'"),
    ("no upgrade", {"Upgrade": None}, "Upgrade is ''"),
    ("another upgrade", {"Upgrade": "h2c"}, "Upgrade is 'h2c'"),
    (
        "no upgrade in Connection",
        {"Connection": "keep-alive"},
        "Upgrade is 'websocket', and its Connection 'keep-alive'",
    ),
]


@pytest.mark.parametrize(("about", "headers", "expected"), ACCEPTANCES, ids=[row[0] for row in ACCEPTANCES])
async def test_an_invalid_acceptance_of_the_handshake_is_an_error(
    about: str, headers: dict[str, str | None], expected: str, autojump_clock: MockClock
) -> None:
    error = await dial_error(lambda request: acceptance(request, **headers))
    assert isinstance(error, UpgradeRefused)
    assert error.status == 101
    assert expected in str(error)


TLS_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"
JUNK: list[tuple[str, bytes, bool, type[Exception], str]] = [
    ("no bytes", b"", True, SessionClosed, "closed the connection in the handshake.*not wss://"),
    ("half of a head", b"HTTP/1.1 101 Switch", True, SessionClosed, "closed the connection"),
    ("another protocol", b"SSH-2.0-x\r\n\r\n", False, RemoteProtocolError, "did not answer the handshake"),
    ("TLS", TLS_ALERT, False, RemoteProtocolError, "the server uses TLS: use wss://"),
    (
        "an endless head",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
        False,
        RemoteProtocolError,
        "did not answer the handshake",
    ),
    (
        "a long bad line",
        b"HTTP/1.1 200 OK\r\n" + b"x" * 900 + b"\r\n\r\n",
        False,
        RemoteProtocolError,
        "did not answer the handshake",
    ),
]


@pytest.mark.parametrize(("about", "reply", "ends", "kind", "why"), JUNK, ids=[row[0] for row in JUNK])
async def test_an_invalid_answer_to_the_handshake_is_an_error(
    about: str, reply: bytes, ends: bool, kind: type[Exception], why: str, autojump_clock: MockClock
) -> None:
    error = await dial_error(lambda request: reply, ends=ends)
    assert type(error) is kind
    with pytest.raises(kind, match=why):
        raise error
    assert URL in str(error)
    assert len(str(error)) < 250
    assert trio.current_time() == 0


async def test_a_connection_that_breaks_in_the_handshake_is_an_error(autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    await theirs.aclose()
    with pytest.raises(SessionClosed, match=URL):
        await dial(ours)


@pytest.mark.parametrize("sent", ["no bytes", "informational responses", "half of the answer"])
async def test_a_handshake_without_an_answer_has_a_deadline(sent: str, autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    async with open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            if sent == "half of the answer":
                await theirs.send_all(b"HTTP/1.1 101 Switch")
            with suppress(trio.BrokenResourceError):
                while sent == "informational responses":
                    await theirs.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
                    await trio.sleep(1)

        with pytest.raises(ConnectionFailed, match=rf"no WebSocket to {URL} within 30 seconds"):
            await dial(ours)
    assert trio.current_time() == CONNECTING
    assert ours._into.no_receiver


@pytest.mark.parametrize(
    ("error", "why"),
    [(ConnectionRefusedError(111, "no"), "connection refused"), (OSError(113, "No route"), "No route")],
)
async def test_a_failed_connection_is_an_error_with_the_reason(error: OSError, why: str) -> None:
    async def connect() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        raise error

    with (
        tcp_connects_to(connect),
        pytest.raises(ConnectionFailed, match=f"no connection to 127.0.0.1:3000: {why}") as caught,
    ):
        await dial_websocket(URL, ssl_context=None, headers=(), limits=Limits())
    assert caught.value.__cause__ is error


async def test_a_server_without_tls_is_an_error_with_advice(autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    await theirs.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ConnectionFailed, match=r"does not speak TLS; is it ws:// instead of wss://\?") as caught:
        await dial(ours, "wss://a.test/ws")
    assert isinstance(caught.value.__cause__, ssl.SSLError)


async def test_wss_uses_the_proxy_for_https_and_ws_connects_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[tuple[str, int]] = []
    servers: list[PipeEnd] = []

    async def connect(host: str, port: int) -> trio.abc.Stream:
        asked_for.append((host, port))
        ours, theirs = unlimited_pipe()
        servers.append(theirs)
        await theirs.send_all(b"HTTP/1.1 407 Who\r\n\r\n")
        await theirs.send_eof()
        return ours

    monkeypatch.setattr(trio, "open_tcp_stream", connect)
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://me:secret@proxy.test:3128")
    monkeypatch.setenv("NO_PROXY", "b.test")
    wants = r"the proxy proxy.test:3128 .*407.*http://user:password@host:port"
    how: Any = {"ssl_context": None, "headers": (), "limits": Limits()}
    with pytest.raises(ConnectionFailed, match=wants) as caught:
        await dial_websocket("wss://a.test/ws", **how)
    assert "secret" not in str(caught.value)
    assert servers[0].heard.startswith(b"CONNECT a.test:443 HTTP/1.1\r\n")
    with pytest.raises(UpgradeRefused):
        await dial_websocket("ws://a.test/ws", **how)
    with pytest.raises(ConnectionFailed, match="does not speak TLS"):
        await dial_websocket("wss://b.test/ws", **how)
    assert asked_for == [("proxy.test", 3128), ("a.test", 80), ("b.test", 443)]


def test_a_handshake_can_be_cancelled_at_each_step() -> None:
    async def scenario(attempt: Attempt) -> None:
        ours, theirs = unlimited_pipe()
        opened = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_websocket, Server("served"), theirs)
            with attempt.window():
                await dial(ours)
                opened = True
            if theirs.heard:
                assert ours._into.no_receiver is not opened
            ours.close()

    assert cancel_at_each_step(scenario, watch="the scenario") > 2


# Frames


def notification(text: str) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "method": text}, ensure_ascii=False).encode()


_UNREAD = "the peer read less than 1024 bytes a second for 60 seconds (Limits.write_rate, Limits.write_seconds)"


class RecordingHandler:
    """The handler of a link that records the received messages, and the reason of the end."""

    def __init__(self, name: str, limits: Limits) -> None:
        info = {"name": name, "version": "1"}
        self.session = ClientProtocol(Offer(info, {}, (REVISIONS[LATEST],)), limits=limits)
        self.received: list[str] = []
        self.reason: str | None = None
        self.scope = trio.CancelScope()  # the scope of the task that runs the link
        self.closed = trio.Event()
        self.closed_at = -1.0

    def receive(self, message: Message, now: float) -> None:
        assert isinstance(message, Notification)
        self.received.append(message.method)

    def release(self) -> None:
        """No task waits for room."""

    def connection_lost(self, why: str) -> None:
        assert self.reason is None
        self.reason = why


@asynccontextmanager
async def linked(
    *,
    streams: Callable[[], Pair] = unlimited_pipe,
    received: bytes = b"",
    limits: Limits | None = None,
    name: str = "client",
    early: bool = False,
) -> AsyncIterator[tuple[RecordingHandler, PipeEnd, Duplex]]:
    """The client's end of an open WebSocket, and the server's end for the test.

    With `early` the client sends a request before the link runs.
    """
    limits = limits or Limits()
    ours, theirs = streams()
    handler = RecordingHandler(name, limits)
    frames = WebSocketFrames(Role.CLIENT, limits)
    async with open_nursery() as nursery:
        duplex = Duplex(handler, ours, frames, limits, nursery=nursery, received=received)

        async def carry() -> None:
            with handler.scope:
                await duplex.run(20)
            handler.closed_at = trio.current_time()
            handler.closed.set()

        if early:
            send_request(handler, duplex)
            await wait_all_tasks_blocked()
        nursery.start_soon(carry)
        yield handler, theirs, duplex
        await duplex.end()
        await wait_or_fail(handler.closed.wait, "the end of the link")
    assert ours._into.no_receiver
    assert handler.reason is not None


def send_request(handler: RecordingHandler, duplex: Duplex) -> None:
    """Let the client send one request of a few hundred bytes."""
    handler.session.open()
    duplex.wake()


FRAMES = [
    to_client(TEXT, notification("a")),
    to_client(TEXT, notification("ä€")[:-4], fin=False),  # cut within a character
    to_client(PING, b"between"),
    to_client(CONTINUED, notification("ä€")[-4:]),
    to_client(PONG, b"?"),
    to_client(TEXT, notification("b")),
    to_client(CLOSE, (1001).to_bytes(2, "big") + b"bye"),
]
EXPECTED = (
    ["a", "ä€", "b"],
    "the server closed the connection with code 1001: 'bye'",
    [(PONG, b"between"), (CLOSE, (1001).to_bytes(2, "big"))],
)


async def receive_pieces(
    pieces: list[bytes], received: bytes = b""
) -> tuple[list[str], str | None, list[tuple[int, bytes]]]:
    async with linked(received=received) as (handler, server, _):
        for piece in pieces:
            await server.send_all(piece)
            await wait_all_tasks_blocked()
        await wait_or_fail(handler.closed.wait, "the end")
    return handler.received, handler.reason, frames_sent_to(server)


@settings(max_examples=40)
@given(st.sets(st.integers(0, len(b"".join(FRAMES))), max_size=12))
def test_chunk_boundaries_do_not_matter(cuts: set[int]) -> None:
    whole = b"".join(FRAMES)
    pieces = [whole[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(whole)]) if a < b]
    result = trio.run(receive_pieces, pieces, clock=MockClock(autojump_threshold=0))
    # If the ping and the close frame come in one piece, only the close frame is answered.
    assert (result[:2], result[2][-1]) == (EXPECTED[:2], EXPECTED[2][-1])


async def test_bytes_can_come_one_by_one(autojump_clock: MockClock) -> None:
    assert await receive_pieces([bytes([byte]) for byte in b"".join(FRAMES)]) == EXPECTED


async def test_frames_can_come_with_the_answer_to_the_handshake(autojump_clock: MockClock) -> None:
    assert await receive_pieces(FRAMES[3:], b"".join(FRAMES[:3])) == EXPECTED
    assert (await receive_pieces([], b"".join(FRAMES)))[:2] == EXPECTED[:2]


async def test_a_ping_is_answered_at_once(autojump_clock: MockClock) -> None:
    async with linked(received=to_client(PING, b"1")) as (_, server, _duplex):
        await wait_all_tasks_blocked()
        await server.send_all(to_client(PING, b"2"))
        await wait_all_tasks_blocked()
        assert frames_sent_to(server) == [(PONG, b"1"), (PONG, b"2")]
        await server.send_eof()


async def test_received_bytes_are_processed_in_small_pieces(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty thousand pings come in one piece with the handshake, and as many after it."""
    flood = to_client(PING) * 30_000
    fed: list[int] = []
    feed = WebSocketFrames.feed

    def counted(self: WebSocketFrames, data: bytes) -> Iterable[Message]:
        fed.append(len(data))
        return feed(self, data)

    monkeypatch.setattr(WebSocketFrames, "feed", counted)
    async with linked(received=flood) as (_, server, _duplex):
        await server.send_all(flood)
        await wait_all_tasks_blocked()
        assert sum(fed) == 2 * len(flood)
        assert max(fed) <= 8 * 1024
        await server.send_eof()


CLOSES: list[tuple[bytes, str, bytes]] = [
    (close_frame(Role.CLIENT, 1000), "closed the connection with code 1000$", (1000).to_bytes(2, "big")),
    (to_client(CLOSE), "closed the connection without a code", b""),
    (close_frame(Role.CLIENT, 1011, "no more"), "with code 1011: 'no more'", (1011).to_bytes(2, "big")),
    (close_frame(Role.CLIENT, 4000), "with code 4000", (4000).to_bytes(2, "big")),
    (
        to_client(BINARY, b"x"),
        r"\(1003\): .*binary",
        (1003).to_bytes(2, "big") + b"messages are text; this one is binary",
    ),
    (to_client(TEXT, b"\xff"), r"\(1007\): .*UTF-8", (1007).to_bytes(2, "big") + b"the text is not UTF-8"),
    (
        to_client(TEXT, b"x" * 101),
        r"^the server sent a message longer than the limit here, 100 bytes \(Limits.message_bytes\)$",
        (1009).to_bytes(2, "big") + b"the message is longer than 100 bytes (Limits.message_bytes)",
    ),
    (
        frame(Role.CLIENT, TEXT, b"x", masked=True),
        r"broke the rules of WebSocket \(1002\): .*masked",
        (1002).to_bytes(2, "big") + b"client received unexpected masked frame",
    ),
]


@pytest.mark.parametrize(("data", "expected", "reply"), CLOSES, ids=[row[1] for row in CLOSES])
async def test_each_end_of_a_websocket_has_its_reason_and_its_answer(
    data: bytes, expected: str, reply: bytes, autojump_clock: MockClock
) -> None:
    async with linked(limits=Limits(message_bytes=100)) as (handler, server, duplex):
        await server.send_all(to_client(TEXT, notification("before")) + data + to_client(TEXT, notification("after")))
        await wait_or_fail(handler.closed.wait, "the end")
        assert (handler.received, trio.current_time()) == (["before"], 0)
        assert handler.reason is not None
        with pytest.raises(SessionClosed, match=expected):
            raise SessionClosed(handler.reason)
        send_request(handler, duplex)  # this message is discarded
        await wait_all_tasks_blocked()
        assert frames_sent_to(server) == [(CLOSE, reply)]


@pytest.mark.parametrize("breaks", [PipeEnd.send_eof, PipeEnd.aclose], ids=["ends", "breaks"])
async def test_the_server_can_disconnect_after_any_byte(breaks: Any, autojump_clock: MockClock) -> None:
    whole = b"".join(FRAMES)
    for size in range(len(whole)):
        async with linked() as (handler, server, _):
            await server.send_all(whole[:size])
            await breaks(server)
            await wait_or_fail(handler.closed.wait, "the end")
        assert handler.received == EXPECTED[0][: len(handler.received)]
        assert handler.reason == "the connection was lost without a close frame"
        assert (CLOSE, b"") not in frames_sent_to(server)
    assert trio.current_time() == 0


# Keep-alive


async def test_a_silent_server_gets_a_ping_and_then_loses_the_connection(autojump_clock: MockClock) -> None:
    async with linked() as (handler, server, _):
        await wait_or_fail(handler.closed.wait, "the end")
        assert (handler.closed_at, handler.reason) == (40, "the peer was silent for 40 seconds")
        assert frames_sent_to(server) == [(PING, b"")]  # without a close frame, because the server does not answer


async def test_any_frame_keeps_the_connection_alive(autojump_clock: MockClock) -> None:
    async with linked() as (handler, server, _):
        for sign in (to_client(PONG), to_client(PING), to_client(TEXT, notification("xy")[:9], fin=False)) * 3:
            await trio.sleep(39)
            await server.send_all(sign)
            if sign[0] == TEXT:
                await server.send_all(to_client(CONTINUED, notification("xy")[9:]))
        await server.send_all(close_frame(Role.CLIENT, 1000))
        await wait_or_fail(handler.closed.wait, "the end")
        assert (handler.received, handler.closed_at) == (["xy"] * 3, 39 * 9)


async def test_a_server_that_pings_and_does_not_read_is_dropped(autojump_clock: MockClock) -> None:
    async with linked(streams=one_byte_pipe) as (handler, server, _), trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            with suppress(trio.BrokenResourceError):
                while True:
                    await server.send_all(to_client(PING, b"?"))
                    await trio.sleep(5)

        await wait_or_fail(handler.closed.wait, "the end")
        assert (handler.closed_at, handler.reason) == (60, _UNREAD)
        assert server.heard[1:] == b""


@pytest.mark.parametrize("early", [True, False])
async def test_a_server_that_never_reads_is_dropped(early: bool, autojump_clock: MockClock) -> None:
    async with linked(streams=one_byte_pipe, early=early) as (handler, server, duplex):
        if not early:
            send_request(handler, duplex)
        while not handler.closed.is_set():
            with suppress(trio.BrokenResourceError):
                await server.send_all(to_client(PONG))
            await trio.sleep(5)
        assert (handler.closed_at, handler.reason) == (60, _UNREAD)


async def test_a_server_that_reads_slowly_is_not_dropped(autojump_clock: MockClock) -> None:
    piece = 64 * 1024
    async with linked(streams=lambda: pipe_pair(piece), name="x" * 5 * piece) as (handler, server, duplex):
        send_request(handler, duplex)
        while not frames_sent_to(server):
            await trio.sleep(30)
            await server.send_all(to_client(PONG))
            await server.receive_some(piece)
        assert 2 * Limits().write_seconds < trio.current_time() < 4 * Limits().write_seconds
        assert handler.reason is None
        assert b"x" * 5 * piece in frames_sent_to(server)[0][1]
        await server.send_all(close_frame(Role.CLIENT, 1000))


# Closing


async def test_closing_sends_a_close_frame_and_waits_for_the_answer(autojump_clock: MockClock) -> None:
    async with linked() as (handler, server, duplex):
        await wait_all_tasks_blocked()
        await duplex.end()
        await wait_all_tasks_blocked()
        assert frames_sent_to(server) == [(CLOSE, (1000).to_bytes(2, "big"))]
        assert not handler.closed.is_set()
        await server.send_all(to_client(TEXT, notification("late")) + to_client(PING) + close_frame(Role.CLIENT, 1000))
        await wait_or_fail(handler.closed.wait, "the end")
        assert (handler.received, handler.closed_at, len(frames_sent_to(server))) == ([], 0, 1)


@pytest.mark.parametrize("streams", [unlimited_pipe, one_byte_pipe])
@pytest.mark.parametrize("after", [10, 30])
async def test_closing_has_a_deadline(streams: Any, after: float, autojump_clock: MockClock) -> None:
    async with linked(streams=streams) as (handler, server, duplex):
        await trio.sleep(after)
        if streams is unlimited_pipe:
            await duplex.end()
        else:
            handler.scope.cancel()  # `end` would wait for the write in progress
        await wait_or_fail(handler.closed.wait, "the end")
        assert handler.closed_at == after + CLOSING
        assert server._out.no_receiver


async def test_no_bytes_follow_an_incomplete_frame(autojump_clock: MockClock) -> None:
    async with linked(streams=one_byte_pipe) as (handler, server, duplex):
        send_request(handler, duplex)
        await wait_all_tasks_blocked()
        handler.scope.cancel()
        await wait_or_fail(handler.closed.wait, "the end")
        assert (handler.closed_at, len(server.heard)) == (CLOSING, 1)


async def test_an_incomplete_frame_is_finished_before_the_close_frame(autojump_clock: MockClock) -> None:
    async with linked(streams=one_byte_pipe) as (handler, server, duplex):
        send_request(handler, duplex)
        await wait_all_tasks_blocked()
        handler.scope.cancel()
        await trio.sleep(CLOSING / 2)
        server._into.capacity = 10_000
        await server.receive_some()
        await wait_all_tasks_blocked()
        await server.send_all(close_frame(Role.CLIENT, 1000))
        await wait_or_fail(handler.closed.wait, "the end")
        assert [opcode for opcode, _ in frames_sent_to(server)] == [TEXT, CLOSE]
        assert handler.closed_at == CLOSING / 2


async def test_pongs_wait_for_the_frame_in_progress(autojump_clock: MockClock) -> None:
    async with linked(streams=one_byte_pipe) as (handler, server, duplex):
        send_request(handler, duplex)
        await wait_all_tasks_blocked()
        await server.send_all(to_client(PING, b"!"))
        await wait_all_tasks_blocked()
        server._into.capacity = 10_000
        await server.receive_some()
        await wait_all_tasks_blocked()
        assert [opcode for opcode, _ in frames_sent_to(server)] == [TEXT, PONG]
        await server.send_all(close_frame(Role.CLIENT, 1000))


def test_a_websocket_link_can_be_cancelled_at_each_step() -> None:
    async def scenario(attempt: Attempt) -> None:
        with attempt.window():
            async with linked(streams=attempt_streams, received=FRAMES[0]) as (handler, server, duplex):
                send_request(handler, duplex)
                for each in FRAMES[1:]:
                    await server.send_all(each)
                await handler.closed.wait()
        assert made[-1][0]._into.no_receiver

    made: list[Pair] = []

    def attempt_streams() -> Pair:
        made.append(unlimited_pipe())
        return made[-1]

    assert cancel_at_each_step(scenario, watch=any_task) > 10


# Calls


async def serve_one_call(server: PipeEnd, then: bytes, rest: bytes = b"") -> None:
    """Run a server that opens the session, and answers the first call with these bytes."""
    await server.send_all(acceptance(await handshake_request(server)) + rest)
    while not any(opcode == TEXT for opcode, _ in frames_sent_to(server)):
        await server.receive_some()
    [message] = [json.loads(payload) for opcode, payload in frames_sent_to(server) if opcode == TEXT]
    found = {"supportedVersions": [LATEST], "capabilities": {"tools": {}}, "resultType": "complete"}
    answer = {"jsonrpc": "2.0", "id": message["id"], "result": {**found, "ttlMs": 0, "cacheScope": "private"}}
    await server.send_all(to_client(TEXT, json.dumps(answer).encode()))
    while sum(opcode == TEXT for opcode, _ in frames_sent_to(server)) < 2:
        await server.receive_some()
    await server.send_all(then)


@pytest.mark.parametrize(
    ("then", "expected", "at"),
    [
        (close_frame(Role.CLIENT, 4001, "enough"), "the server closed the connection with code 4001: 'enough'", 0),
        (to_client(BINARY, b"x"), "broke the rules of WebSocket .1003.: messages are text", 0),
        (to_client(TEXT, b"{}")[:3], "the peer was silent for 40 seconds", 40),
    ],
)
async def test_a_waiting_call_fails_with_the_reason_of_the_end(
    then: bytes, expected: str, at: float, autojump_clock: MockClock
) -> None:
    ours, theirs = unlimited_pipe()

    async def connect() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return ours

    async with no_tasks_left(), trio.open_nursery() as nursery:
        nursery.start_soon(serve_one_call, theirs, then, to_client(PING, b"early"))
        with tcp_connects_to(connect):
            async with open_client(URL, revision=LATEST) as client:
                with pytest.raises(SessionClosed, match=expected):
                    await client.call_tool("wait")
                assert trio.current_time() == at
    assert (PONG, b"early") in frames_sent_to(theirs)
    assert ours._into.no_receiver


async def test_headers_are_sent_and_a_refusal_has_its_reason(autojump_clock: MockClock) -> None:
    async with no_tasks_left(), trio.open_nursery() as nursery:

        async def connect() -> trio.abc.Stream:
            ours, theirs = unlimited_pipe()
            nursery.start_soon(lambda: serve_websocket(Server("served"), theirs, authenticate=by_token))
            await trio.lowlevel.checkpoint()
            return ours

        with tcp_connects_to(connect):
            async with open_client(URL, headers={"Authorization": "Bearer ada"}):
                pass
            with pytest.raises(UpgradeRefused, match=r"ws://127.0.0.1:3000/ws answered 401") as caught:
                async with open_client(URL):
                    raise AssertionError("the connection was opened")
    assert caught.value.status == 401
    assert caught.value.headers["WWW-Authenticate"] == "Bearer"
    assert json.loads(caught.value.body)["error"]["message"] in str(caught.value)
