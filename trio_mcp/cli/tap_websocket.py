"""``trio-mcp tap --http PORT ws://...``: one WebSocket between a client and a server.

The bytes of both sides pass unchanged, in the pieces in which they come, so pings, close frames and mistakes pass too.
Readers of frames listen, and give the text messages to the recorder.  Only the handshake differs: the Host is that of
the server, and no extension is offered, because compressed messages could not be read.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import trio

from trio_mcp.cli.recording import Recorder
from trio_mcp.core.errors import ConnectionFailed, RemoteProtocolError, UsageError
from trio_mcp.core.http.fields import Headers, HttpRequest
from trio_mcp.core.http.h1 import ReplyReader, head_bytes
from trio_mcp.core.http.websocket import WebSocketFrames
from trio_mcp.core.messages import Limits
from trio_mcp.core.revisions import Role
from trio_mcp.transport.dial import Origin, Proxies, dial, locate
from trio_mcp.transport.wire import CLOSING, GONE

__all__ = ["WebSocketRecorder", "pass_websocket"]

_READ = 65536  # bytes of one read
_CHANGED = frozenset({"host", "sec-websocket-extensions"})


async def pass_websocket(
    client: trio.abc.Stream, request: HttpRequest, trailing: bytes, url: str, heard: WebSocketRecorder, limits: Limits
) -> None:
    """Connect a client that asks for a WebSocket to the server at `url`, until one of them disconnects.

    `trailing`: the bytes that the client has sent after its request.  Both connections are closed then.
    """
    streams = {"client": client}
    heard.request(request)
    try:
        server = streams["server"] = await _dial(url, limits)
        with suppress(*GONE):
            await server.send_all(_head(request, url) + trailing)
            heard.data("client", trailing)
        async with trio.open_nursery() as nursery:

            async def copy(sender: str, receiver: str) -> None:
                with suppress(*GONE):
                    while data := bytes(await streams[sender].receive_some(_READ)):
                        heard.data(sender, data)
                        await streams[receiver].send_all(data)
                heard.ended(sender, f"the {sender} has disconnected")
                # The other side may still send its close frame, which the sender does not wait for.
                nursery.cancel_scope.deadline = trio.current_time() + CLOSING

            nursery.start_soon(copy, "client", "server")
            nursery.start_soon(copy, "server", "client")
    except (ConnectionFailed, UsageError) as error:
        heard.ended("server", str(error), failed=True)
        text = f"trio-mcp tap: {error}\n".encode()
        with suppress(*GONE):
            await client.send_all(head_bytes(502, (), None, f"Content-Length: {len(text)}", "Connection: close") + text)
    finally:
        with trio.CancelScope(shield=True):  # closes both of them, and takes no time
            for stream in streams.values():
                await trio.aclose_forcefully(stream)


async def _dial(url: str, limits: Limits) -> trio.abc.Stream:
    origin, _ = _located(url)
    proxy = Proxies(os.environ).between(origin) if origin.scheme == "https" else None  # as clients of a WebSocket
    return await dial(origin, proxy, connect=trio.open_tcp_stream, context=ssl.create_default_context, limits=limits)


def _located(url: str) -> tuple[Origin, str]:
    return locate(f"http{url.removeprefix('ws')}")


def _head(request: HttpRequest, url: str) -> bytes:
    """The request of the client, for the server at `url`."""
    origin, target = _located(url)
    fields = [(name, value) for name, value in request.headers.items() if name.lower() not in _CHANGED]
    lines = [f"GET {target} HTTP/1.1", f"Host: {origin.authority}", *(f"{name}: {value}" for name, value in fields)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


class WebSocketRecorder:
    """Reads the bytes of both sides of one WebSocket, and records the handshake and the text messages.

    `recorded` returns the headers that may be written.
    """

    def __init__(
        self, recorder: Recorder, number: int, limits: Limits, recorded: Callable[[Headers], Mapping[str, str]]
    ) -> None:
        self._recorder = recorder
        self._http = {"number": number}
        self._recorded = recorded
        self._reply: ReplyReader | None = ReplyReader(limits, upgrades=True)  # None: the server has answered
        self._frames = {
            "client": WebSocketFrames(Role.SERVER, limits),
            "server": WebSocketFrames(Role.CLIENT, limits),
        }

    def request(self, request: HttpRequest) -> None:
        path = request.target.partition("?")[0]
        about = {**self._http, "method": "GET", "path": path, "headers": self._recorded(request.headers)}
        self._recorder.entry("client", http=about)

    def data(self, sender: str, data: bytes) -> None:
        """Record what this side has sent."""
        if sender == "server" and self._reply is not None:
            data = self._answer(self._reply, data)
        frames = self._frames[sender]
        if frames.ended:
            return
        for text in frames.texts(data):
            self._recorder.entry(sender, text, http=self._http)
        if frames.ended:
            self.ended(sender, frames.why)

    def ended(self, sender: str, why: str, **more: Any) -> None:
        self._recorder.entry(sender, http={**self._http, **more}, end=why)

    def _answer(self, reader: ReplyReader, data: bytes) -> bytes:
        """Read the server's answer to the handshake, and return the bytes after it."""
        reader.feed(data)
        try:
            head = reader.head()
        except RemoteProtocolError as error:
            self._reply = None
            self._frames["server"].ended = True
            self.ended("server", str(error), failed=True)
            return b""
        if head is None:
            return b""
        status, headers = head
        self._reply = None
        self._recorder.entry("server", http={**self._http, "status": status, "headers": self._recorded(headers)})
        self._frames["server"].ended = status != 101
        return reader.rest() if status == 101 else b""
