"""The way to a WebSocket: a connection, and on it the opening handshake (RFC 6455, 4.1).

What is opened is one stream for everything: `websocket.WebSocketFrames` knows how messages lie in it, and a
`duplex.Duplex` carries them.  A URL is read, and a connection made, as `http_proxy` does both for HTTP.

What surprises: through a proxy goes wss alone, by HTTPS_PROXY, as https does.  Proxies that let plain ws pass are rare,
and one that takes it for HTTP breaks it, so it goes straight to the server.
"""

from __future__ import annotations

import os
import re
import ssl
from base64 import b64encode
from contextlib import suppress

import h11
import trio
from wsproto.utilities import generate_accept_token

from trio_mcp.core.errors import McpError, RemoteProtocolError, SessionClosed, UsageError, shown
from trio_mcp.core.http.fields import Fields, Headers, without_credentials
from trio_mcp.core.http.websocket import SUBPROTOCOL
from trio_mcp.core.jsonrpc import Limits
from trio_mcp.transport.dial import CONNECTING, ConnectionFailed, Origin, Proxies, dial, locate
from trio_mcp.transport.outbox import CLOSING, GONE

__all__ = ["UpgradeRefused", "dial_websocket"]

_SHOWN = 400  # bytes of the body of a refusal: as much as says why


class UpgradeRefused(McpError):
    """The server answered the request for a WebSocket otherwise than by opening one for MCP.

    `status` is that of its answer, `headers` are its header fields, and `body` is the beginning of it.
    """

    def __init__(self, why: str, status: int, headers: Headers, body: bytes = b"") -> None:
        super().__init__(why)
        self.status = status
        self.headers = headers
        self.body = body


async def dial_websocket(
    url: str, *, ssl_context: ssl.SSLContext | None, headers: Fields, limits: Limits
) -> tuple[trio.abc.Stream, bytes]:
    """The connection of a WebSocket, and what came on it after the server's consent.

    Raises `UsageError` for what is no such URL or header, `ConnectionFailed` if there is no connection, or no
    answer within `CONNECTING` seconds in all, `SessionClosed` if it ends in the handshake, `UpgradeRefused` if the
    server answers otherwise, and `RemoteProtocolError` if that is no answer at all.  May be cancelled.
    """
    origin, target = _located(url)
    key = b64encode(os.urandom(16))
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.header_bytes)
    request = http.send(h11.Request(method="GET", target=target, headers=_fields(origin, key, headers))) or b""
    http.send(h11.EndOfMessage())
    name = _of_websockets(str(origin)) + target.partition("?")[0]  # what stands behind a ? may be a secret
    with trio.move_on_after(CONNECTING):
        stream = await _connected(origin, ssl_context, limits)
        try:
            return stream, await _agreed(stream, name, request, http, key, headers)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
    raise ConnectionFailed(
        f"no WebSocket to {name} within {CONNECTING:g} seconds; is it there, or is a firewall between?"
    )


# What is asked for, and of whom.

_SCHEME = re.compile(r"ws(s?)://", re.IGNORECASE)
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_OURS = re.compile(r"host|connection|upgrade|content-length|transfer-encoding|sec-websocket-.*", re.IGNORECASE)


def _located(url: str) -> tuple[Origin, str]:
    """The origin as it is called by HTTP, and the target to ask it for."""
    match = _SCHEME.match(url)
    if match is None:
        raise UsageError("a WebSocket has a URL like ws://127.0.0.1:3000/ws or wss://example.com/ws")
    try:
        return locate(f"http{match[1]}://{url[match.end() :]}")
    except UsageError as error:
        raise UsageError(_of_websockets(str(error))) from None


def _of_websockets(text: str) -> str:
    """What is said of a place by HTTP, as it is said of the same place by WebSocket."""
    return text.replace("https://", "wss://").replace("http://", "ws://").replace("/mcp", "/ws")


def _fields(origin: Origin, key: bytes, headers: Fields) -> list[tuple[bytes, bytes]]:
    fields = [
        (b"Host", origin.authority.encode()),
        (b"Upgrade", b"websocket"),
        (b"Connection", b"Upgrade"),
        (b"Sec-WebSocket-Version", b"13"),
        (b"Sec-WebSocket-Key", key),
        (b"Sec-WebSocket-Protocol", SUBPROTOCOL.encode()),
    ]
    for name, value in headers:
        # What h11 says of a bad one repeats it, and it may be a secret.
        if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise UsageError(
                f"the field {shown(name)} cannot be sent: a name is a token, a value has characters of Latin-1, and "
                "neither has line breaks or other control characters"
            )
        if _OURS.fullmatch(name):
            raise UsageError(f"the field {name} is not the caller's to set: it is about the connection")
        fields.append((name.encode(), value.strip(" \t").encode("latin-1")))
    return fields


async def _connected(origin: Origin, ssl_context: ssl.SSLContext | None, limits: Limits) -> trio.abc.Stream:
    proxy = Proxies(os.environ).between(origin) if origin.scheme == "https" else None

    def context() -> ssl.SSLContext:
        return ssl_context or ssl.create_default_context()

    try:
        return await dial(origin, proxy, connect=trio.open_tcp_stream, context=context, limits=limits)
    except ConnectionFailed as error:
        if proxy is not None:
            raise  # it may tell how the URL of the proxy is written
        raise ConnectionFailed(_of_websockets(str(error))) from error.__cause__


# What is answered.


async def _agreed(
    stream: trio.abc.Stream, name: str, request: bytes, http: h11.Connection, key: bytes, sent: Fields
) -> bytes:
    """Open the WebSocket; what is returned came after the server's consent, and is of it."""
    try:
        await stream.send_all(request)
        status, reply, rest = await _reply(stream, http)
    except GONE as error:
        other = "ws" if name.startswith("wss") else "wss"
        raise SessionClosed(
            f"{name} broke the connection in the handshake; is that a server of WebSockets, and not {other}://?"
        ) from error
    except h11.RemoteProtocolError as error:
        tls = http.trailing_data[0][:1] in (b"\x15", b"\x16")  # an alert, or a handshake
        why = "it speaks TLS, so use wss://" if tls else shown(str(error))
        raise RemoteProtocolError(f"{name} gave no answer to the handshake: {why}") from error
    if status != 101:
        rest = without_credentials(rest, sent)
        why = f": {shown(rest.decode(errors='replace'), _SHOWN)}" if rest else ""
        if 300 <= status < 400:
            why = "; it has moved, and nothing is followed here: open the URL in its Location header"
        raise UpgradeRefused(f"{name} answered {status} instead of opening a WebSocket{why}", status, reply, rest)
    if (fault := _fault(reply, key)) is not None:
        raise UpgradeRefused(f"{name} opened a WebSocket, {fault}", status, reply)
    return rest


async def _reply(stream: trio.abc.Stream, http: h11.Connection) -> tuple[int, Headers, bytes]:
    """Its status and headers; and the beginning of its body, or after 101 what followed it."""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            data = bytes(await stream.receive_some())
            if not data:
                raise trio.BrokenResourceError("it has ended")
            http.receive_data(data)
        elif isinstance(event, h11.InformationalResponse):
            if event.status_code == 101:
                return 101, Headers(event.headers), http.trailing_data[0]
        else:
            assert isinstance(event, h11.Response)
            return event.status_code, Headers(event.headers), await _beginning(stream, http)


async def _beginning(stream: trio.abc.Stream, http: h11.Connection) -> bytes:
    """Of a body, as much as comes within a moment; that it is cut, or never ends, does not matter."""
    body = b""
    with trio.move_on_after(CLOSING), suppress(h11.RemoteProtocolError, *GONE):
        while len(body) < _SHOWN:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(bytes(await stream.receive_some()))
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                break
    return body[:_SHOWN]


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
