"""The server side of a WebSocket, beginning with its HTTP upgrade request.

`HttpConnection` hands over the connection on which an upgrade request came.  Either the request is refused like any
other, with a status and a JSON-RPC error, or the connection becomes one duplex session, served like a byte stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trio_mcp.core.http.fields import HttpRequest, Reply
from trio_mcp.core.http.h1 import head_bytes
from trio_mcp.core.http.websocket import Upgrade, WebSocketFrames, judge_upgrade
from trio_mcp.core.revisions import Role
from trio_mcp.server.http.endpoint import log_refusal
from trio_mcp.server.run import Run
from trio_mcp.transport.wire import CLOSING, GONE, Tap

if TYPE_CHECKING:
    from trio_mcp.server.http.endpoint import Endpoint

__all__ = ["serve_upgrade"]

_INTERNAL = 1011


async def serve_upgrade(
    run: Run,
    endpoint: Endpoint,
    stream: trio.abc.Stream,
    request: HttpRequest,
    trailing: bytes,
    *,
    peer: str | None = None,
    tap: Tap | None = None,
) -> None:
    """Answer an upgrade request, serve the WebSocket until it ends, and close the stream.

    `trailing` holds the bytes that were read after the request: the first bytes of the WebSocket.  `peer` is the
    client's address, if it has one.  An idle client gets a ping as often as an idle event stream gets a keep-alive.

    Returns when the client has disconnected or the run has ended, and all handlers have ended.  Never raises because
    of the client.  Other exceptions of `tap` and of the stream propagate unchanged.
    """
    link = _WebSocketStream(stream, WebSocketFrames(Role.SERVER, run.limits), trailing)
    try:
        # A browser opens a WebSocket to any host without a preflight request.  Only the Origin header shows which page
        # did it, so `admit`, which checks that, comes first (http-03).
        admitted = await endpoint.admit(request, peer)
        verdict: Reply | Upgrade
        if isinstance(admitted, Reply):
            verdict = admitted
        elif isinstance(verdict := judge_upgrade(request), Reply):
            log_refusal(verdict, request, peer)
        data = verdict.head if isinstance(verdict, Upgrade) else _refusal(verdict)
        if tap is not None:
            tap("out", data)
        with trio.move_on_after(run.limits.write_seconds) as scope:
            await link.send_all(data)
        if scope.cancelled_caught:
            raise trio.BrokenResourceError("the client reads no data (Limits.write_seconds)")
    except BaseException as error:
        await trio.aclose_forcefully(link.stream)
        if isinstance(error, GONE):
            return
        raise
    if isinstance(verdict, Reply):
        with trio.move_on_after(CLOSING):
            await link.stream.aclose()
        return
    assert not isinstance(admitted, Reply)
    await endpoint.serve_websocket(admitted, link, link.frames, tap=tap, heartbeat=endpoint.keep_alive)


def _refusal(reply: Reply) -> bytes:
    """The bytes of a refusal.  It closes the connection, because the next bytes of the client may not be HTTP."""
    options = [value for name, value in reply.headers if name == "Connection" and value != "close"]
    fields = tuple((name, value) for name, value in reply.headers if name != "Connection")
    return head_bytes(reply.status, fields, None, f"Connection: {', '.join([*options, 'close'])}") + reply.body


class _WebSocketStream(trio.abc.Stream):
    """The connection as a stream for the driver: begins with the bytes already read, ends with a closing handshake.

    Usually the driver has already sent or answered a close frame.  The handshake here covers the other two cases: a
    client that broke the protocol, and may still be sending, and a session that has failed.
    """

    def __init__(self, stream: trio.abc.Stream, frames: WebSocketFrames, trailing: bytes) -> None:
        self.stream = stream
        self.frames = frames
        self._trailing = trailing
        self._gone = False  # the client has disconnected
        self._cut = False  # a frame was sent in part, so no other frame can follow it

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self._trailing:
            await trio.lowlevel.checkpoint()
            size = max_bytes or self.frames.stretch
            data, self._trailing = self._trailing[:size], self._trailing[size:]
            return data
        try:
            received = await self.stream.receive_some(max_bytes or self.frames.stretch)
        except GONE:
            self._gone = True
            raise
        self._gone = not received
        return received

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._cut = True
        await self.stream.send_all(data)
        self._cut = False

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        try:
            if not self._gone and not self._cut:
                if data := self.frames.close(_INTERNAL, "the server cannot go on with this connection"):
                    await self.send_all(data)
                # Closing a socket with unread bytes resets the connection, and then the client may lose the last
                # frame.  So read on.
                while not self._gone and not self.frames.over:
                    self.frames.texts(bytes(await self.receive_some()))
        except GONE:
            pass
        finally:
            self._gone = True
            await self.stream.aclose()
