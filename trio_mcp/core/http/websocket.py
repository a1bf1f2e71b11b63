"""WebSocket without I/O, both ends of it: the frames, and what a request for one is answered.

One JSON-RPC message is one text message, under the subprotocol ``mcp``.  MCP has no WebSocket transport of its own, so
this one is documented here (trans-04): a connection is opened by HTTP (RFC 6455) and is then one duplex link, as a pair
of pipes is.  Both eras may share it, a request is cancelled by ``notifications/cancelled``, a revision that has batches
may send one as one message, and there is no session id: the session is the connection.

wsproto reads and writes the frames.  What it leaves to its user is here: to put the pieces of a message together and to
bound them, to answer pings, to take part in the closing, and to stop when the other side breaks the rules.

| What came | What is sent | Code |
|---|---|---|
| a close frame | its code, once | as it came |
| a binary message | close | 1003 |
| text that is not UTF-8 | close | 1007 |
| a message longer than `Limits.message_bytes` | close, as soon as it is | 1009 |
| the beginning of one, when too much waits that its client has sent (`Limits.bytes_in_all`) | close | 1013 |
| the beginning of one that does not go on (`Limits.body_seconds`) | close | 1008 |
| what is no frame, is masked wrongly, or is compressed | close | 1002 |

Compression (permessage-deflate) is never agreed to.  It costs a window of 32 KiB for each connection and direction,
saves little on messages of some hundred bytes, and lets a peer send megabytes in a kilobyte.

What surprises: of several pings that came together only the last is answered, as RFC 6455 allows (5.5.3), so that a
peer that pings and does not read makes nothing pile up.  And of a message that is both too long and not UTF-8, the
pieces in which it comes decide which is said.
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
from trio_mcp.core.http.fields import Fields, Headers
from trio_mcp.core.http.verdicts import HttpRequest, Reply, refusal
from trio_mcp.core.jsonrpc import Error, InvalidMessage, Limits, Message, decode
from trio_mcp.core.records import record
from trio_mcp.core.revisions import Role
from trio_mcp.core.shares import weight

__all__ = ["SUBPROTOCOL", "Upgrade", "WebSocketFrames", "judge_upgrade"]

SUBPROTOCOL = "mcp"

_OTHER = {Role.CLIENT: "server", Role.SERVER: "client"}


class WebSocketFrames:
    """One end of an open WebSocket: messages to and from bytes.  A `Framing`, for both roles.

    Whoever has the connection feeds what it reads, sends `pending` afterwards, and goes on until `ended`.
    """

    ended = False
    """The other side has closed, or has broken the rules: no message will come any more."""

    stretch = 8 * 1024
    """They may be some thousand frames without content."""

    over = False
    """Both sides have closed, so that nothing at all is waited for any more."""

    why = "the connection was lost without a close frame"
    """Once `ended`: how that came."""

    code: int = CloseReason.ABNORMAL_CLOSURE
    """Once `ended`: the close code, theirs or, where they broke the rules, ours; 1005 is a close frame without one."""

    size = 0
    """What the message that `feed` has given last takes while it is held, in bytes."""

    def __init__(self, role: Role, limits: Limits) -> None:
        self._ws = Connection(ConnectionType.CLIENT if role is Role.CLIENT else ConnectionType.SERVER)
        self._role = role
        self._limits = limits
        self._message = bytearray()  # the pieces of one that is not at its end
        self._pong: bytes | None = None  # what the last ping that waits for its answer said
        self._asking = False
        self._control = b""  # a close frame
        self._deaf = False  # what comes cannot be read any more

    # What comes in.

    @property
    def held(self) -> int:
        """Bytes of a message that is not whole."""
        return len(self._message)

    def feed(self, data: bytes) -> Iterable[Message]:
        for text in self.texts(data):
            message = decode(text, self._limits)
            self.size = 0 if type(message) is InvalidMessage else weight(text, self._limits.values)
            yield message

    def texts(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, not yet decoded."""
        whole: list[bytes] = []
        if self.over or self._deaf:
            return whole
        self._ws.receive_data(data)
        for event in self._ws.events():
            if isinstance(event, CloseConnection):
                self._closed(event)
            elif self._ws.state is not ConnectionState.OPEN:
                pass  # we have closed, and what they sent before they saw it is for nobody
            elif isinstance(event, TextMessage):
                self._piece(event, whole)
            elif isinstance(event, Ping):
                self._pong = event.payload
            elif isinstance(event, BytesMessage):
                self._fail(CloseReason.UNSUPPORTED_DATA, "messages are text; this one is binary")
        return whole

    def _piece(self, event: TextMessage, whole: list[bytes]) -> None:
        text = event.data.encode()
        if len(self._message) + len(text) > self._limits.message_bytes:
            limit = f"{self._limits.message_bytes} bytes (Limits.message_bytes)"
            # No rule was broken, and who would take more can change it.
            ours = f"a message of the {_OTHER[self._role]} is longer than this side takes, which is {limit}"
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
            # So wsproto says that it cannot go on.  What its decoder says of bad text depends on how that came.
            self._deaf = True
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
        """Nothing they send can be believed, or understood: RFC 6455, 7.1.7.  `ours`: why, if they broke no rule."""
        self._close(code, why)
        self._message = bytearray()
        if not self.ended:
            self.ended = True
            self.code = code
            self.why = ours or f"the {_OTHER[self._role]} broke the rules of WebSocket ({int(code)}): {why}"

    def give_up(self, why: str, *, late: bool) -> None:
        """Wait no longer for the message that is not whole, and so for no other."""
        self._fail(CloseReason.POLICY_VIOLATION if late else CloseReason.TRY_AGAIN_LATER, why, why)

    # What goes out.

    def frame(self, texts: Sequence[bytes]) -> Sequence[bytes]:
        """One text frame for each; nothing once a close frame was sent."""
        if self._ws.state is not ConnectionState.OPEN:
            return ()
        return (b"".join([self._ws.send(TextMessage(data=text.decode())) for text in texts]),)

    def ping(self) -> None:
        """Ask whether the other side is there; the question is `pending`, and whatever comes then is the answer."""
        self._asking = True

    def pending(self) -> bytes:
        """What is to be said since the last time: a pong, a ping, or our part of the closing."""
        if self._ws.state is ConnectionState.OPEN:
            if self._pong is not None:
                self._control += self._ws.send(Pong(payload=self._pong))
            if self._asking:
                self._control += self._ws.send(Ping())
        self._pong, self._asking = None, False
        control, self._control = self._control, b""
        return control

    def farewell(self) -> bytes:
        """What is sent before an end in good order, unless it was: a server goes away, a client has what it wanted."""
        server = self._role is Role.SERVER
        return self.close(CloseReason.GOING_AWAY if server else CloseReason.NORMAL_CLOSURE)

    def close(self, code: int, reason: str = "") -> bytes:
        """A close frame, unless one was sent.  `reason` is cut after 123 bytes."""
        self._close(code, reason)
        return self.pending()

    def _close(self, code: int, reason: str = "") -> None:
        if self._ws.state in (ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING):
            self._control = self._ws.send(CloseConnection(code=code, reason=reason or None))


# The request for one.

_UPGRADE: Fields = (("Upgrade", "websocket"), ("Connection", "Upgrade"))


@record
class Upgrade:
    """Send `head`, and the connection is a WebSocket."""

    head: bytes


def judge_upgrade(request: HttpRequest) -> Reply | Upgrade:
    """What to do with a request for a WebSocket that `screen` has let through.  A `Reply` is final."""
    fault = _wrong_handshake(request)
    if fault is not None:
        return fault
    token = generate_accept_token(request.headers["Sec-WebSocket-Key"].encode()).decode()
    fields: Fields = (*_UPGRADE, ("Sec-WebSocket-Accept", token))
    if _listed(request.headers, "Sec-WebSocket-Protocol"):
        fields += (("Sec-WebSocket-Protocol", SUBPROTOCOL),)
    lines = ("HTTP/1.1 101 Switching Protocols", *(f"{name}: {value}" for name, value in fields), "", "")
    return Upgrade("\r\n".join(lines).encode())


def _wrong_handshake(request: HttpRequest) -> Reply | None:
    """RFC 6455, 4.2.1."""
    headers, version = request.headers, request.headers.get("Sec-WebSocket-Version")
    upgrades = {each.lower() for each in _listed(headers, "Upgrade")}
    if "websocket" not in upgrades or "upgrade" not in {each.lower() for each in _listed(headers, "Connection")}:
        why = "a WebSocket is opened with Upgrade: websocket and Connection: Upgrade"
        return _refused(426, why, *_UPGRADE)
    if version != "13":
        why = f"Sec-WebSocket-Version is {shown(version or '')}; served: 13"
        return _refused(426, why, *_UPGRADE, ("Sec-WebSocket-Version", "13"))
    if not _is_key(headers.get("Sec-WebSocket-Key", "")):
        return _refused(400, "Sec-WebSocket-Key must be 16 bytes in Base64")
    offered = _listed(headers, "Sec-WebSocket-Protocol")
    if offered and SUBPROTOCOL not in offered:
        came = shown(", ".join(offered))
        return _refused(400, f"the subprotocols {came} are not spoken here; offer {SUBPROTOCOL}, or none")
    return None


def _refused(status: int, why: str, *extra: tuple[str, str]) -> Reply:
    return refusal(status, Error(None, INVALID_REQUEST, why), extra=extra)


def _listed(headers: Headers, name: str) -> list[str]:
    return [each for part in headers.get(name, "").split(",") if (each := part.strip())]


def _is_key(text: str) -> bool:
    try:
        return len(a2b_base64(text, strict_mode=True)) == 16
    except (Base64Error, ValueError):
        return False
