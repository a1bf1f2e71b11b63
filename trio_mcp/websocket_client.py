"""The client's end of a WebSocket: the opening handshake, and then messages in both directions.

    async with await connect_websocket("ws://127.0.0.1:3000/ws") as link:
        await link.send(b'{"jsonrpc": "2.0", ...}')
        while (text := await link.receive()) is not None:
            ...

What the messages mean is for whoever uses the link.  There is no task behind it: pings are answered, and a server that
has fallen silent is noticed, while somebody receives.
"""

from __future__ import annotations

import ssl
from base64 import b64encode
from collections import deque
from contextlib import suppress
from os import urandom
from urllib.parse import SplitResult, urlsplit

import h11
import trio
from wsproto.utilities import generate_accept_token

from trio_mcp.core.errors import LocalProtocolError, McpError, RemoteProtocolError, SessionClosed, shown
from trio_mcp.core.headers import Fields, Headers
from trio_mcp.core.jsonrpc import Limits
from trio_mcp.core.revisions import Role
from trio_mcp.groups import open_nursery
from trio_mcp.outbox import CLOSING, GONE
from trio_mcp.websocket import SUBPROTOCOL, WebSocketFrames

__all__ = ["HEARTBEAT", "UpgradeRefused", "WebSocketLink", "connect_websocket", "dial_websocket", "open_websocket"]

HEARTBEAT = 20.0
"""Seconds of silence after which the server is asked whether it is there, and after which again it is given up."""

_SHOWN = 400  # bytes of the body of a refusal: as much as says why
_PORTS = {"ws": 80, "wss": 443}


class UpgradeRefused(McpError):
    """The server answered the request for a WebSocket otherwise than by opening one for MCP.

    `status` is that of its answer, `headers` are its header fields, and `body` is the beginning of it.
    """

    def __init__(self, why: str, status: int, headers: Headers, body: bytes = b"") -> None:
        super().__init__(why)
        self.status = status
        self.headers = headers
        self.body = body


async def connect_websocket(
    url: str,
    *,
    ssl_context: ssl.SSLContext | None = None,
    headers: Fields = (),
    limits: Limits | None = None,
    heartbeat: float = HEARTBEAT,
) -> WebSocketLink:
    """Open a WebSocket.  `headers` go with the request for it; ``heartbeat=math.inf`` asks nothing.

    Raises `LocalProtocolError` for what is no such URL or header, `OSError` (such as `ssl.SSLError`) if there is no
    connection, `SessionClosed` if it ends in the handshake, `UpgradeRefused` if the server answers otherwise, and
    `RemoteProtocolError` if that is no answer at all.  There is no time limit but the caller's own.
    """
    limits = limits or Limits()
    stream, rest = await dial_websocket(url, ssl_context=ssl_context, headers=headers, limits=limits)
    return WebSocketLink(stream, WebSocketFrames(Role.CLIENT, limits), rest, heartbeat)


async def dial_websocket(
    url: str, *, ssl_context: ssl.SSLContext | None, headers: Fields, limits: Limits
) -> tuple[trio.abc.Stream, bytes]:
    """The connection of a WebSocket, and what came on it after the server's consent.  Raises as `connect_websocket`."""
    place = _place(url)
    assert place.hostname is not None
    stream: trio.abc.Stream = await trio.open_tcp_stream(place.hostname, place.port or _PORTS[place.scheme])
    if place.scheme == "wss":
        stream = await _secured(stream, place.hostname, ssl_context or ssl.create_default_context())
    return stream, await _agreed(stream, url, headers, limits)


async def _secured(stream: trio.abc.Stream, host: str, context: ssl.SSLContext) -> trio.abc.Stream:
    # A frame says how long it is, so nothing is mistaken for whole if TLS is not ended in order.
    secure = trio.SSLStream(stream, context, server_hostname=host, https_compatible=True)
    try:
        await secure.do_handshake()
    except BaseException as error:
        await trio.aclose_forcefully(secure)
        if isinstance(error, trio.BrokenResourceError) and isinstance(error.__cause__, OSError):
            raise error.__cause__ from None  # which says what is wrong with the certificate
        raise
    return secure


async def open_websocket(
    stream: trio.abc.Stream,
    url: str,
    *,
    headers: Fields = (),
    limits: Limits | None = None,
    heartbeat: float = HEARTBEAT,
) -> WebSocketLink:
    """As `connect_websocket`, over a connection that stands already; it is closed when this raises."""
    limits = limits or Limits()
    rest = await _agreed(stream, url, headers, limits)
    return WebSocketLink(stream, WebSocketFrames(Role.CLIENT, limits), rest, heartbeat)


def _place(url: str) -> SplitResult:
    try:
        place = urlsplit(url)
        if place.scheme in _PORTS and place.hostname and place.port != 0:
            return place
    except ValueError:  # the port is no number, or the brackets do not match
        pass
    raise LocalProtocolError("a WebSocket has a URL like ws://127.0.0.1:3000/ws or wss://example.com/ws")


# The handshake: RFC 6455, 4.1.


async def _agreed(stream: trio.abc.Stream, url: str, headers: Fields, limits: Limits) -> bytes:
    try:
        return await _handshake(stream, _place(url), headers, limits)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise


async def _handshake(stream: trio.abc.Stream, place: SplitResult, headers: Fields, limits: Limits) -> bytes:
    """Open the WebSocket; what is returned came after the server's consent, and is of it."""
    host = place.netloc.rpartition("@")[2]
    name = f"{place.scheme}://{host}{place.path or '/'}"  # what stands before an @ or behind a ? may be a secret
    key = b64encode(urandom(16))
    fields = {
        "Host": host,
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key.decode(),
        "Sec-WebSocket-Protocol": SUBPROTOCOL,
    }
    target = (place.path or "/") + (f"?{place.query}" if place.query else "")
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.header_bytes)
    try:
        request = http.send(h11.Request(method="GET", target=target, headers=[*fields.items(), *headers])) or b""
    except (h11.LocalProtocolError, UnicodeError) as error:
        raise LocalProtocolError(f"this cannot be asked of {name}: {error}") from error
    http.send(h11.EndOfMessage())
    try:
        await stream.send_all(request)
        status, reply, rest = await _reply(stream, http)
    except GONE as error:
        raise SessionClosed(f"{name} broke the connection in the handshake") from error
    except h11.RemoteProtocolError as error:
        raise RemoteProtocolError(f"{name} gave no answer to the handshake: {error}") from error
    if status != 101:
        why = f"{name} answered {status} instead of opening a WebSocket"
        why += f": {shown(rest.decode(errors='replace'), _SHOWN)}" if rest else ""
        raise UpgradeRefused(why, status, reply, rest)
    if (fault := _fault(reply, key)) is not None:
        raise UpgradeRefused(f"{name} opened a WebSocket, {fault}", status, reply)
    return rest


async def _reply(stream: trio.abc.Stream, http: h11.Connection) -> tuple[int, Headers, bytes]:
    """Its status and headers; and the beginning of its body, or after 101 what followed it."""
    head: h11.Response | None = None
    body = b""
    while True:
        try:
            event = http.next_event()
        except h11.RemoteProtocolError:
            if head is None:
                raise
            event = h11.PAUSED  # the body was cut, and the beginning is all that is wanted
        if event is h11.NEED_DATA:
            data = bytes(await stream.receive_some())
            if not data and head is None:
                raise trio.BrokenResourceError("it has ended")
            http.receive_data(data)
        elif isinstance(event, h11.InformationalResponse):
            if event.status_code == 101:
                return 101, Headers(event.headers), http.trailing_data[0]
        elif isinstance(event, h11.Response):
            head = event
        else:
            body += event.data if isinstance(event, h11.Data) else b""
            if not isinstance(event, h11.Data) or len(body) >= _SHOWN:
                assert head is not None
                return head.status_code, Headers(head.headers), body[:_SHOWN]


def _fault(reply: Headers, key: bytes) -> str | None:
    """What is wrong with a 101."""
    upgrade, connection = reply.get("Upgrade", ""), reply.get("Connection", "")
    if upgrade.lower() != "websocket" or "upgrade" not in connection.lower():
        return f"but its Upgrade is {shown(upgrade)}, and its Connection {shown(connection)}"
    if reply.get("Sec-WebSocket-Accept") != generate_accept_token(key).decode():
        return "but not in answer to our key: something in between has answered"
    if (extensions := reply.get("Sec-WebSocket-Extensions", "")) != "":
        return f"with extensions that were not offered: {shown(extensions)}"
    if (chosen := reply.get("Sec-WebSocket-Protocol", "")) != SUBPROTOCOL:
        which = f"the subprotocol {shown(chosen)}" if chosen else "no subprotocol"
        return f"but with {which} instead of {SUBPROTOCOL}: is it an MCP server?"
    return None


# Afterwards.


class WebSocketLink(trio.abc.AsyncResource):
    """An open WebSocket.  One task receives; any task may send, and any may close it."""

    def __init__(self, stream: trio.abc.Stream, frames: WebSocketFrames, rest: bytes, heartbeat: float) -> None:
        self._stream = stream
        self._frames = frames
        self._heartbeat = heartbeat
        self._texts = deque(frames.texts(rest))  # never more than one read has brought
        self._sending = trio.Lock()
        self._receiving = trio.Lock()
        self._reading = trio.CancelScope()
        self._ended = ""  # how, if the frames do not know
        self._lost = False  # there is nobody to close it with

    @property
    def why(self) -> str:
        """Once it has ended: how that came, and by which close code."""
        return self._frames.why if self._frames.ended else self._ended or self._frames.why

    @property
    def code(self) -> int:
        """Once it has ended: the close code; 1006 if there was none, since the connection was lost."""
        return self._frames.code

    async def send(self, text: bytes) -> None:
        """Send one message.  Raises `SessionClosed` if the link has ended.

        May be cancelled while another is being sent.  A frame that was begun is finished; if that takes longer than
        `CLOSING` seconds the link is closed, since nothing can follow half a frame.
        """
        async with self._sending:
            data = self._frames.frame([text])
            await self._write(data)
            await self._settle()
        if not data:
            raise SessionClosed(self.why)

    async def receive(self) -> bytes | None:
        """The next message, or None when there will be none: then `why` says how it ended, and it is closed.

        May be cancelled; no message is lost by it.
        """
        async with self._receiving:
            while not self._texts:
                if self._ended or self._frames.ended:
                    await self._part()
                    return None
                await self._read()
            return self._texts.popleft()

    async def aclose(self) -> None:
        """Close the connection, after the closing handshake if that takes no longer than `CLOSING` seconds.

        Whoever receives meanwhile ends with None.
        """
        self._end("it was closed from this side")
        self._reading.cancel(reason="the link is closed")
        try:
            with trio.move_on_after(CLOSING):
                async with self._receiving:
                    await self._part()
        finally:
            await trio.aclose_forcefully(self._stream)

    def _end(self, why: str, *, lost: bool = False) -> None:
        self._ended = self._ended or why
        self._lost = self._lost or lost

    async def _part(self) -> None:
        """Take part in the closing handshake, and close."""
        try:
            if not self._lost:
                with trio.move_on_after(CLOSING):
                    async with self._sending:
                        await self._stream.send_all(self._frames.farewell())
                    while not self._frames.over and (data := bytes(await self._stream.receive_some())):
                        self._frames.texts(data)
            await self._stream.aclose()
        except GONE:
            pass
        finally:
            await trio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        await self._reply()
        data = await self._listen()
        if data:
            self._texts += self._frames.texts(data)
        elif data is not None:
            self._end(self._frames.why, lost=True)
        await self._reply()

    async def _listen(self) -> bytes | None:
        """What comes next: nothing at the end, None if the wait for it has ended."""
        for asking in (False, True):
            if asking and not self._ended:
                self._frames.ping()
                await self._reply()
            if self._ended:  # closed meanwhile
                return None
            with trio.move_on_after(self._heartbeat) as self._reading:
                with suppress(*GONE):
                    return bytes(await self._stream.receive_some())
                return b""
        if not self._ended:
            self._end(f"the server was silent for {2 * self._heartbeat:g} seconds", lost=True)
        return None

    async def _reply(self) -> None:
        """Send what the frames have to say, unless somebody is sending, who does it then.

        Nothing is read meanwhile, so a server that pings and does not read is given up as a silent one is.
        """
        if not self._sending.locked():
            with suppress(SessionClosed), trio.move_on_after(self._heartbeat):
                async with self._sending:
                    await self._settle()

    async def _settle(self) -> None:
        while not self._lost and (owed := self._frames.pending()):
            await self._write(owed)

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        whole = False
        try:
            async with open_nursery() as nursery:
                with trio.CancelScope(shield=True) as scope:
                    nursery.start_soon(_hurry, scope)
                    await self._stream.send_all(data)
                    whole = True
        except GONE as error:
            self._end(self._frames.why, lost=True)
            raise SessionClosed(self.why) from error
        finally:
            if not whole:
                self._end("the server did not take all of what was sent", lost=True)
                await trio.aclose_forcefully(self._stream)


async def _hurry(scope: trio.CancelScope) -> None:
    """What is being sent when it is cancelled may still be finished, but not for ever."""
    try:
        await trio.sleep_forever()
    finally:
        scope.deadline = trio.current_time() + CLOSING
