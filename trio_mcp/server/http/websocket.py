"""The server's end of a WebSocket, from the HTTP request for it on.

An HTTP server hands over the connection on which such a request came.  It is refused like any other request, with a
status and a JSON-RPC error; or from then on the connection is one duplex session, served as a byte stream is.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import trio

from trio_mcp.core.http.verdicts import HttpRequest, Reply
from trio_mcp.core.http.websocket import Upgrade, WebSocketFrames, judge_upgrade
from trio_mcp.core.revisions import Role
from trio_mcp.server.driver import converse
from trio_mcp.server.http.endpoint import tell_refusal
from trio_mcp.server.http.gate import seconds_left
from trio_mcp.server.run import Run
from trio_mcp.transport.duplex import Tap
from trio_mcp.transport.outbox import CLOSING, GONE

if TYPE_CHECKING:
    from trio_mcp.server.http.endpoint import AdmittedRequest, Endpoint

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
    """Answer a request for a WebSocket, and serve what comes of it until it ends; the stream is closed then.

    `trailing` was read after the request, and is the first of what the client says; `peer` is its address, if it has
    one.  A client that is silent is asked for a sign of life as often as a silent event stream gives one.

    Returns when the client has gone, or the run is over, and all its handlers have ended; never raises because of the
    client.  What `tap` or the stream raise otherwise leaves it unchanged.
    """
    link = _WebSocketStream(stream, WebSocketFrames(Role.SERVER, run.limits), trailing)
    try:
        verdict, admitted = await _judge(endpoint, request, peer)
        data = verdict.head if isinstance(verdict, Upgrade) else _refusal(verdict)
        if tap is not None:
            tap("out", data)
        with trio.move_on_after(run.limits.write_seconds) as scope:
            await link.send_all(data)
        if scope.cancelled_caught:
            raise trio.BrokenResourceError("the client takes nothing (Limits.write_seconds)")
    except BaseException as error:
        await trio.aclose_forcefully(link.stream)
        if isinstance(error, GONE):
            return
        raise
    if isinstance(verdict, Reply):
        with trio.move_on_after(CLOSING):
            await link.stream.aclose()
        return
    heartbeat = endpoint.keep_alive
    assert admitted is not None
    headers, principal = admitted.headers, admitted.caller
    with trio.move_on_after(seconds_left(principal)):  # every message is one in the name of its token
        account = endpoint.account(admitted.holder)
        await converse(
            run, link, link.frames,
            tap=tap, headers=headers, principal=principal, heartbeat=heartbeat, account=account,
        )  # fmt: skip


async def _judge(
    endpoint: Endpoint, request: HttpRequest, peer: str | None
) -> tuple[Reply | Upgrade, AdmittedRequest | None]:
    # A browser opens a WebSocket to anywhere without asking first: only the Origin tells, so it is looked at before
    # anything else (http-03).
    admitted = await endpoint.admit(request, peer)
    if isinstance(admitted, Reply):
        return admitted, None
    verdict = judge_upgrade(request)
    if isinstance(verdict, Reply):
        tell_refusal(verdict, request, peer)
    return verdict, admitted


def _refusal(reply: Reply) -> bytes:
    """The connection ends with it: whatever was to come on it next may be no HTTP."""
    options = [value for name, value in reply.headers if name == "Connection" and value != "close"]
    fields = [*((name, value) for name, value in reply.headers if name != "Connection")]
    fields.append(("Connection", ", ".join([*options, "close"])))
    first = f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}"
    head = "\r\n".join((first, *(f"{name}: {value}" for name, value in fields), "", ""))
    return head.encode("latin-1") + reply.body


class _WebSocketStream(trio.abc.Stream):
    """The connection as the driver has it: it begins with what was read already, and ends with the closing handshake.

    A driver that has said farewell, or has answered the client's, has taken part in that; what is left here is the end
    of whoever broke the rules, who may still be sending what nobody reads, and that of a session which has failed.
    """

    def __init__(self, stream: trio.abc.Stream, frames: WebSocketFrames, trailing: bytes) -> None:
        self.stream = stream
        self.frames = frames
        self._trailing = trailing
        self._gone = False  # the client
        self._cut = False  # something was sent in part, so that nothing can follow it

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
                # Who closes a socket with something unread in it may take back what was sent last.
                while not self._gone and not self.frames.over:
                    self.frames.texts(bytes(await self.receive_some()))
        except GONE:
            pass
        finally:
            self._gone = True
            await self.stream.aclose()
