"""Opening a WebSocket: the connection, and the opening handshake on it (RFC 6455, 4.1).

The result is one stream for all messages: `core.http.websocket.WebSocketFrames` reads and writes its frames, and a
`Duplex` carries them.  `transport.dial` reads the URL and connects, as for HTTP.

A surprise: only wss uses a proxy, from HTTPS_PROXY, like https.  Proxies that support plain ws are rare, and a proxy
that treats it as HTTP breaks it, so ws connects to the server directly.
"""

from __future__ import annotations

import os
import re
import ssl
from base64 import b64encode
from contextlib import suppress

import trio
from wsproto.utilities import generate_accept_token

from trio_mcp.core.errors import ConnectionFailed, McpError, RemoteProtocolError, SessionClosed, UsageError, shown
from trio_mcp.core.http.fields import TOKEN, Fields, Headers, without_credentials
from trio_mcp.core.http.h1 import ReplyReader
from trio_mcp.core.http.websocket import SUBPROTOCOL
from trio_mcp.core.messages import Limits
from trio_mcp.transport.dial import CONNECTING, Origin, Proxies, dial, locate
from trio_mcp.transport.wire import CLOSING, GONE

__all__ = ["UpgradeRefused", "dial_websocket"]

_BODY_SHOWN = 400  # bytes of the body of a refusal that an error shows


class UpgradeRefused(McpError):
    """The server did not open an MCP WebSocket.

    `status`, `headers` and `body` are those of its answer; `body` is only the beginning.
    """

    def __init__(self, why: str, status: int, headers: Headers, body: bytes = b"") -> None:
        super().__init__(why)
        self.status = status
        self.headers = headers
        self.body = body


async def dial_websocket(
    url: str, *, ssl_context: ssl.SSLContext | None, headers: Fields, limits: Limits
) -> tuple[trio.abc.Stream, bytes]:
    """Open a WebSocket.  Returns its stream, and the data that came after the server's acceptance.

    Raises `UsageError` if the URL or a header is invalid, `ConnectionFailed` if there is no connection, or no answer
    within `CONNECTING` seconds in all, `SessionClosed` if the connection ends in the handshake, `UpgradeRefused` if the
    server does not open a WebSocket, and `RemoteProtocolError` if its answer is not HTTP.  May be cancelled.
    """
    match = _SCHEME.match(url)
    if match is None:
        raise UsageError("a WebSocket URL must be like ws://127.0.0.1:3000/ws or wss://example.com/ws")
    try:
        origin, target = locate(f"http{match[1]}://{url[match.end() :]}")
    except UsageError as error:
        raise UsageError(_with_ws_schemes(str(error))) from None
    proxy = Proxies(os.environ).between(origin) if origin.scheme == "https" else None
    key = b64encode(os.urandom(16))
    request = _request(origin, target, key, headers)
    name = _with_ws_schemes(str(origin)) + target.partition("?")[0]  # the query may be a secret
    with trio.move_on_after(CONNECTING):
        try:
            context = ssl.create_default_context if ssl_context is None else lambda: ssl_context
            stream = await dial(origin, proxy, connect=trio.open_tcp_stream, context=context, limits=limits)
        except ConnectionFailed as error:
            if proxy is not None:
                raise  # the error may be about the URL of the proxy
            raise ConnectionFailed(_with_ws_schemes(str(error))) from error.__cause__
        try:
            return stream, await _shake_hands(stream, name, request, ReplyReader(limits, upgrades=True), key, headers)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
    raise ConnectionFailed(
        f"no WebSocket to {name} within {CONNECTING:g} seconds; check the server, and firewalls before it"
    )


# The request

_SCHEME = re.compile(r"ws(s?)://", re.IGNORECASE)
_NAME = re.compile(TOKEN)
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_RESERVED = re.compile(r"host|connection|upgrade|content-length|transfer-encoding|sec-websocket-.*", re.IGNORECASE)


def _with_ws_schemes(text: str) -> str:
    """Replace the http schemes in a text by those of WebSocket."""
    return text.replace("https://", "wss://").replace("http://", "ws://").replace("/mcp", "/ws")


def _request(origin: Origin, target: str, key: bytes, headers: Fields) -> bytes:
    lines = [
        f"GET {target} HTTP/1.1",
        f"Host: {origin.authority}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key.decode()}",
        f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
    ]
    for name, value in headers:
        if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise UsageError(
                f"the header {shown(name)} is invalid: the name must be a token, and the value must be Latin-1 text "
                "without line breaks and other control characters"
            )
        if _RESERVED.fullmatch(name):
            raise UsageError(f"the header {name} is set by the connection; leave it out")
        lines.append(name + ": " + value.strip(" \t"))
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


# The answer


async def _shake_hands(
    stream: trio.abc.Stream, name: str, request: bytes, reader: ReplyReader, key: bytes, sent: Fields
) -> bytes:
    """Do the opening handshake.  Returns the data that came after the server's acceptance."""
    try:
        await stream.send_all(request)
        while (head := reader.head()) is None:
            reader.feed(await _receive(stream))
        status, reply = head
        rest = reader.rest() if status == 101 else await _read_beginning(stream, reader, sent)
    except GONE as error:
        other = "ws" if name.startswith("wss") else "wss"
        raise SessionClosed(
            f"{name} closed the connection in the handshake; check that it is a WebSocket server, and not {other}://"
        ) from error
    except RemoteProtocolError as error:
        tls = reader.rest()[:1] in (b"\x15", b"\x16")  # an alert or a handshake of TLS
        why = "the server uses TLS: use wss://" if tls else str(error)
        raise RemoteProtocolError(f"{name} did not answer the handshake with HTTP: {why}") from error
    if status != 101:
        why = f": {shown(rest.decode(errors='replace'), _BODY_SHOWN)}" if rest else ""
        if 300 <= status < 400:
            why = "; redirects are not followed here: open the URL in its Location header"
        raise UpgradeRefused(f"{name} answered {status} instead of opening a WebSocket{why}", status, reply, rest)
    if (fault := _upgrade_fault(reply, key)) is not None:
        raise UpgradeRefused(f"{name} opened a WebSocket, {fault}", status, reply)
    return rest


async def _receive(stream: trio.abc.Stream) -> bytes:
    data = bytes(await stream.receive_some())
    if not data:
        raise trio.BrokenResourceError("the stream has ended")
    return data


async def _read_beginning(stream: trio.abc.Stream, reader: ReplyReader, sent: Fields) -> bytes:
    """Return the beginning of a body, without the credentials in `sent`.  It may be incomplete, or never end."""
    # More is read than is shown: half of a token would not be found.
    most = _BODY_SHOWN + max((len(value) for _, value in sent), default=0)
    body = b""
    with trio.move_on_after(CLOSING), suppress(RemoteProtocolError, *GONE):
        while len(body) < most and not reader.done:
            if not (data := reader.body()) and not reader.done:
                reader.feed(await _receive(stream))
            body += data
    return without_credentials(body, sent)[:_BODY_SHOWN]


def _upgrade_fault(reply: Headers, key: bytes) -> str | None:
    """Return the fault of a 101 response, or None."""
    upgrade, connection = reply.get("Upgrade", ""), reply.get("Connection", "")
    if upgrade.lower() != "websocket" or "upgrade" not in connection.lower():
        return f"but its Upgrade is {shown(upgrade)}, and its Connection {shown(connection)}"
    if reply.get("Sec-WebSocket-Accept") != generate_accept_token(key).decode():
        return "but its Sec-WebSocket-Accept does not fit the key: an intermediary may have answered"
    if (extensions := reply.get("Sec-WebSocket-Extensions", "")) != "":
        return f"with extensions that were not offered: {shown(extensions)}"
    if (chosen := reply.get("Sec-WebSocket-Protocol", "")) != SUBPROTOCOL:
        which = f"the subprotocol {shown(chosen)}" if chosen else "no subprotocol"
        return f"but with {which} instead of {SUBPROTOCOL}: check that it is an MCP server"
    return None
