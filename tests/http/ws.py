"""WebSockets for tests: frames, a client on wsproto, and the server's end of one connection without an HTTP server.

`Socket` is a stream of lines over a WebSocket, so that the client of `tests.server.raw_client` speaks through it and
checks the messages:

    async with websocket(server, revision) as (wire, socket):
        await wire.call("tools/call", {"name": "echo", "arguments": {"text": "x"}})
        assert socket.closed is None
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import h11
import trio
import wsproto
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Event,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    TextMessage,
)
from wsproto.events import Request as UpgradeRequest

from tests.server.checkpoints import unlimited_pipe
from tests.server.raw_client import RawClient, connected
from trio_mcp.core import Role
from trio_mcp.core.http import HttpRequest
from trio_mcp.server.http import Endpoint, serve_upgrade

__all__ = [
    "BINARY", "CLOSE", "CONTINUED", "HANDSHAKE", "KEY", "PING", "PONG", "TEXT", "Socket", "close_frame", "frame",
    "serve_websocket", "upgrade_request", "websocket",
]  # fmt: skip

CONTINUED, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
KEY = "dGhlIHNhbXBsZSBub25jZQ=="  # RFC 6455, 1.3
HANDSHAKE: Mapping[str, str] = {
    "Host": "127.0.0.1:3000",
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": KEY,
    "Sec-WebSocket-Protocol": "mcp",
}


def frame(role: Role, opcode: int, payload: bytes = b"", *, fin: bool = True, masked: bool | None = None) -> bytes:
    """A frame for the end with this role; `masked` can be wrong for the role.  The mask is always the same."""
    masked = role is Role.SERVER if masked is None else masked
    size, first, mask = len(payload), opcode | (0x80 if fin else 0), 0x80 if masked else 0
    if size < 126:
        head = struct.pack("!BB", first, mask | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, mask | 126, size)
    else:
        head = struct.pack("!BBQ", first, mask | 127, size)
    key = b"\x01\x02\x03\x04"
    if masked:
        return head + key + bytes(byte ^ key[at % 4] for at, byte in enumerate(payload))
    return head + payload


def close_frame(role: Role, code: int, reason: str = "") -> bytes:
    return frame(role, CLOSE, struct.pack("!H", code) + reason.encode())


def upgrade_request(target: str = "/ws", **headers: str | None) -> bytes:
    """The HTTP request for a WebSocket; a header that is None is left out."""
    fields = {**HANDSHAKE, **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value is not None)]
    return "\r\n".join((*lines, "", "")).encode()


# The server's end


async def serve_websocket(server: Any, stream: trio.abc.Stream, *, tap: Any = None, **options: Any) -> None:
    """Serve one connection, which must ask for a WebSocket; `options` are those of an endpoint."""
    http = h11.Connection(h11.SERVER)
    try:
        while (event := http.next_event()) is h11.NEED_DATA:
            http.receive_data(bytes(await stream.receive_some()))
    except (h11.RemoteProtocolError, trio.BrokenResourceError):
        event = None
    if not isinstance(event, h11.Request):
        await stream.aclose()
        return
    request = HttpRequest(event.method.decode(), event.target.decode(), list(event.headers))
    http.next_event()
    async with server._joined() as run:
        endpoint = Endpoint(run, **{"keep_alive": 1e9, **options})
        await serve_upgrade(run, endpoint, stream, request, http.trailing_data[0], tap=tap)


# The client's end


class Socket(trio.abc.HalfCloseableStream):
    """A WebSocket client on wsproto as a stream of lines: each message is one line.

    `events` are the received control events, `closed` is the close frame among them, and `refused` the response that
    refused the WebSocket.  With ``pongs=False`` it does not answer pings.  `fragment` is the number of characters per
    frame.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        *,
        target: str = "/ws",
        pongs: bool = True,
        fragment: int = 1 << 60,
        **options: Any,
    ) -> None:
        self.stream = stream
        self.ws = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        self.events: list[Event] = []
        self.closed: CloseConnection | None = None
        self.refused: RejectConnection | None = None
        self.body = b""
        self.eof = False
        self._pongs = pongs
        self._fragment = fragment
        self._sending = trio.Lock()
        options.setdefault("subprotocols", ["mcp"])
        self._asked: bytes | None = self.ws.send(UpgradeRequest("127.0.0.1:3000", target, **options))
        self._open = trio.Event()
        self._lines = bytearray()

    async def _opened(self) -> None:
        if self._asked is not None:
            asked, self._asked = self._asked, None
            await self.stream.send_all(asked)

    async def send(self, *events: Event) -> None:
        await self._opened()
        await self._open.wait()
        await self._send(*events)

    async def _send(self, *events: Event) -> None:
        async with self._sending:
            await self.stream.send_all(b"".join(self.ws.send(event) for event in events))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send complete lines; each line is a message."""
        *lines, rest = bytes(data).decode().split("\n")
        assert not rest
        try:
            for line in lines:
                starts = range(0, len(line) or 1, self._fragment)
                parts = [line[start : start + self._fragment] for start in starts]
                await self.send(
                    *(TextMessage(data=each, message_finished=False) for each in parts[:-1]),
                    TextMessage(data=parts[-1]),
                )
        except wsproto.utilities.LocalProtocolError:
            raise trio.BrokenResourceError("the WebSocket is closed") from None

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        if self.ws.state is ConnectionState.OPEN:
            await self._send(CloseConnection(code=1000))

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await self._opened()
        while not self._lines and not self.eof:
            data = bytes(await self.stream.receive_some())
            if not data:
                self.eof = True
                break
            if self.ws.state not in (ConnectionState.CLOSED, ConnectionState.REMOTE_CLOSING):
                self.ws.receive_data(data)
            for event in self.ws.events():
                await self._handle(event)
        self._open.set()
        lines, self._lines = bytes(self._lines), bytearray()
        return lines

    async def _handle(self, event: Event) -> None:
        if isinstance(event, TextMessage):
            self._lines += event.data.encode()
            if event.message_finished:
                self._lines += b"\n"
            return
        self.events.append(event)
        if isinstance(event, AcceptConnection):
            self._open.set()
        elif isinstance(event, RejectConnection):
            self.refused = event
        elif isinstance(event, RejectData):
            self.body += event.data
        elif isinstance(event, Ping) and self._pongs and self.ws.state is ConnectionState.OPEN:
            await self._send(event.response())
        elif isinstance(event, CloseConnection):
            assert self.closed is None
            self.closed = event
            if self.ws.state is ConnectionState.REMOTE_CLOSING:
                with contextlib.suppress(trio.BrokenResourceError):
                    await self._send(event.response())

    @property
    def pongs(self) -> list[bytes]:
        return [bytes(event.payload) for event in self.events if isinstance(event, Pong)]

    async def aclose(self) -> None:
        await self.stream.aclose()


@contextlib.asynccontextmanager
async def websocket(
    server: Any,
    revision: str,
    *,
    streams: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]] = unlimited_pipe,
    endpoint: Mapping[str, Any] | None = None,
    socket: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[RawClient, Socket]]:
    """A client of `server` over a WebSocket.

    `endpoint` has options of the endpoint, `socket` has options of `Socket`, and `options` are those of `connected`.
    """
    made: list[Socket] = []

    def pair() -> tuple[trio.abc.Stream, trio.abc.Stream]:
        ours, theirs = streams()
        made.append(Socket(ours, **(socket or {})))
        return made[-1], theirs

    async def serve(server: Any, stream: trio.abc.Stream, **how: Any) -> None:
        await serve_websocket(server, stream, **(endpoint or {}), **how)

    async with connected(server, revision, streams=pair, serve=serve, **options) as wire:
        yield wire, made[-1]
