"""WebSocket without I/O, for both roles: the frames, and the answer to an upgrade request.

One JSON-RPC message is one text message, under the subprotocol ``mcp``.  MCP defines no WebSocket transport, so this
one is documented here (trans-04).  A connection is opened by HTTP (RFC 6455) and is then one duplex link, like a pair
of pipes.  Both eras may share it.  A request is cancelled by ``notifications/cancelled``.  A revision with batches may
send one as one message.  There is no session id: the connection is the session.

wsproto reads and writes the frames.  This file does the rest: it joins and bounds the pieces of a message, answers
pings, takes part in the closing handshake, and stops if the peer breaks the rules.

| Received | Sent | Code |
|---|---|---|
| a close frame | its code, once | the received one |
| a binary message | close | 1003 |
| text that is not UTF-8 | close | 1007 |
| a message longer than `Limits.message_bytes` | close, as soon as the limit is passed | 1009 |
| the beginning of a message, while the client's messages fill `Limits.bytes_in_all` | close | 1013 |
| the beginning of a message that stalls (`Limits.body_seconds`) | close | 1008 |
| bytes that are no frame, wrongly masked, or compressed | close | 1002 |

Compression (permessage-deflate) is never negotiated.  It costs a window of 32 KiB for each connection and direction,
saves little on messages of some hundred bytes, and lets a peer send megabytes in a kilobyte.

What surprises: of several pings that arrive together only the last is answered, as RFC 6455 (5.5.3) allows, so a peer
that pings but does not read fills no buffer.  And if a message is both too long and not UTF-8, the sizes of its pieces
decide which of the two codes is sent.
"""

from __future__ import annotations

from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Iterable, Sequence

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import generate_accept_token

from trio_mcp.core.errors import INVALID_REQUEST, shown
from trio_mcp.core.http.fields import Fields, HttpRequest, Reply, listed, refusal
from trio_mcp.core.http.h1 import head_bytes
from trio_mcp.core.messages import Error, InvalidMessage, Limits, Message, decode, record
from trio_mcp.core.revisions import Role
from trio_mcp.core.shares import weight

__all__ = ["SUBPROTOCOL", "Upgrade", "WebSocketFrames", "judge_upgrade"]

SUBPROTOCOL = "mcp"

_OTHER = {Role.CLIENT: "server", Role.SERVER: "client"}


class WebSocketFrames:
    """One end of an open WebSocket: messages to and from bytes.  A `Framing`, for both roles.

    The owner of the connection feeds the received bytes, sends `pending` after each feed, and stops once `ended`.
    """

    ended = False
    """True: the peer has closed or has broken the rules, so no message will arrive."""

    stretch = 8 * 1024
    """Bytes to feed at a time: they may be some thousand frames without content."""

    over = False
    """True: both sides have closed, so there is nothing left to read."""

    why = "the connection was lost without a close frame"
    """Once `ended`: the reason."""

    code: int = CloseReason.ABNORMAL_CLOSURE
    """Once `ended`: the close code.

    It is the peer's, or ours if the peer broke the rules; 1005: a close frame without one.
    """

    size = 0
    """The memory in bytes that the last message from `feed` takes while it is held."""

    def __init__(self, role: Role, limits: Limits) -> None:
        self._ws = Connection(ConnectionType.CLIENT if role is Role.CLIENT else ConnectionType.SERVER)
        self._role = role
        self._limits = limits
        self._message = bytearray()  # the pieces of an incomplete message
        self._pong: bytes | None = None  # the payload of the last unanswered ping
        self._ping_due = False
        self._control = b""  # control frames to send
        self._unreadable = False  # no frame can be found in the bytes any more

    # Receive.

    @property
    def held(self) -> int:
        """The number of bytes of an incomplete message."""
        return len(self._message)

    def feed(self, data: bytes) -> Iterable[Message]:
        for text in self.texts(data):
            message = decode(text, self._limits)
            self.size = 0 if type(message) is InvalidMessage else weight(text, self._limits.values, message)
            yield message

    def texts(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes, not yet decoded."""
        whole: list[bytes] = []
        if self.over or self._unreadable:
            return whole
        self._ws.receive_data(data)
        for event in self._ws.events():
            if isinstance(event, CloseConnection):
                self._closed(event)
            elif self._ws.state is not ConnectionState.OPEN:
                pass  # we have closed; messages that the peer sent before it saw that are dropped
            elif isinstance(event, TextMessage):
                self._add_piece(event, whole)
            elif isinstance(event, Ping):
                self._pong = event.payload
            elif isinstance(event, BytesMessage):
                self._fail(CloseReason.UNSUPPORTED_DATA, "messages are text; this one is binary")
        return whole

    def _add_piece(self, event: TextMessage, whole: list[bytes]) -> None:
        text = event.data.encode()
        if len(self._message) + len(text) > self._limits.message_bytes:
            limit = f"{self._limits.message_bytes} bytes (Limits.message_bytes)"
            # The peer broke no rule, and the local user can raise the limit.
            ours = f"the {_OTHER[self._role]} sent a message longer than the limit here, {limit}"
            self._fail(CloseReason.MESSAGE_TOO_BIG, f"the message is longer than {limit}", ours)
        elif not event.message_finished:
            self._message += text
        elif self._message:
            whole.append(bytes(self._message + text))
            self._message = bytearray()
        else:
            whole.append(text)

    def _closed(self, event: CloseConnection) -> None:
        if self._ws.state in (ConnectionState.OPEN, ConnectionState.LOCAL_CLOSING):
            # wsproto reports in this way that it cannot continue.  Its reason for bad text depends on how the text was
            # split.
            self._unreadable = True
            bad_text = event.code == CloseReason.INVALID_FRAME_PAYLOAD_DATA
            self._fail(event.code, "the text is not UTF-8" if bad_text else event.reason or "")
            return
        self.over = True
        if self._ws.state is ConnectionState.REMOTE_CLOSING:
            # "When sending a Close frame in response, the endpoint typically echos the status code it received."
            self._close(event.code)
        if not self.ended:
            self.ended = True
            self.code = event.code
            said = f"with code {int(event.code)}" if event.code != CloseReason.NO_STATUS_RCVD else "without a code"
            reason = f": {shown(event.reason, 200)}" if event.reason else ""
            self.why = f"the {_OTHER[self._role]} closed the connection {said}{reason}"

    def _fail(self, code: int, why: str, ours: str | None = None) -> None:
        """Stop reading: the peer's bytes are invalid or unreadable (RFC 6455, 7.1.7).

        `ours`: the reason if no rule was broken.
        """
        self._close(code, why)
        self._message = bytearray()
        if not self.ended:
            self.ended = True
            self.code = code
            self.why = ours or f"the {_OTHER[self._role]} broke the rules of WebSocket ({int(code)}): {why}"

    def give_up(self, why: str, *, late: bool) -> None:
        """Stop waiting for the rest of the incomplete message, and so for all later messages."""
        self._fail(CloseReason.POLICY_VIOLATION if late else CloseReason.TRY_AGAIN_LATER, why, why)

    # Send.

    def frame(self, texts: Sequence[bytes]) -> Sequence[bytes]:
        """Encode each text as one text frame.  Returns nothing after a close frame was sent."""
        if self._ws.state is not ConnectionState.OPEN:
            return ()
        return (b"".join([self._ws.send(TextMessage(data=text.decode())) for text in texts]),)

    def ping(self) -> None:
        """Queue a ping, which the next `pending` returns.  Any received byte counts as its answer."""
        self._ping_due = True

    def pending(self) -> bytes:
        """Return the queued control frames: a pong, a ping, or a close frame."""
        if self._ws.state is ConnectionState.OPEN:
            if self._pong is not None:
                self._control += self._ws.send(Pong(payload=self._pong))
            if self._ping_due:
                self._control += self._ws.send(Ping())
        self._pong, self._ping_due = None, False
        control, self._control = self._control, b""
        return control

    def farewell(self) -> bytes:
        """Return the close frame of an orderly end, unless one was sent: 1001 for a server, 1000 for a client."""
        server = self._role is Role.SERVER
        return self.close(CloseReason.GOING_AWAY if server else CloseReason.NORMAL_CLOSURE)

    def close(self, code: int, reason: str = "") -> bytes:
        """Return a close frame, unless one was sent.  `reason` is cut after 123 bytes."""
        self._close(code, reason)
        return self.pending()

    def _close(self, code: int, reason: str = "") -> None:
        if self._ws.state in (ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING):
            self._control = self._ws.send(CloseConnection(code=code, reason=reason or None))


# The upgrade request.

_UPGRADE: Fields = (("Upgrade", "websocket"), ("Connection", "Upgrade"))


@record
class Upgrade:
    """Send `head`; after it the connection is a WebSocket."""

    head: bytes


def judge_upgrade(request: HttpRequest) -> Reply | Upgrade:
    """Judge an upgrade request that `screen` has accepted.  A `Reply` is final."""
    fault = _handshake_fault(request)
    if fault is not None:
        return fault
    token = generate_accept_token(request.headers["Sec-WebSocket-Key"].encode()).decode()
    fields: Fields = (*_UPGRADE, ("Sec-WebSocket-Accept", token))
    if listed(request.headers.get("Sec-WebSocket-Protocol", "")):
        fields += (("Sec-WebSocket-Protocol", SUBPROTOCOL),)
    return Upgrade(head_bytes(101, fields, None))


def _handshake_fault(request: HttpRequest) -> Reply | None:
    """RFC 6455, 4.2.1."""
    headers, version = request.headers, request.headers.get("Sec-WebSocket-Version")
    upgrades, options = (listed(headers.get(name, "").lower()) for name in ("Upgrade", "Connection"))
    if "websocket" not in upgrades or "upgrade" not in options:
        why = "to open a WebSocket, send Upgrade: websocket and Connection: Upgrade"
        return _refused(426, why, *_UPGRADE)
    if version != "13":
        why = f"Sec-WebSocket-Version is {shown(version or '')}; the only supported version is 13"
        return _refused(426, why, *_UPGRADE, ("Sec-WebSocket-Version", "13"))
    if not _is_key(headers.get("Sec-WebSocket-Key", "")):
        return _refused(400, "Sec-WebSocket-Key must be 16 bytes in Base64")
    offered = listed(headers.get("Sec-WebSocket-Protocol", ""))
    if offered and SUBPROTOCOL not in offered:
        came = shown(", ".join(offered))
        return _refused(400, f"the subprotocols {came} are not supported; offer {SUBPROTOCOL}, or none")
    return None


def _refused(status: int, why: str, *extra: tuple[str, str]) -> Reply:
    return refusal(status, Error(None, INVALID_REQUEST, why), extra=extra)


def _is_key(text: str) -> bool:
    try:
        return len(a2b_base64(text, strict_mode=True)) == 16
    except (Base64Error, ValueError):
        return False
