"""WebSocket frames and the opening handshake, without I/O: each role against wsproto, and against the other role."""

from __future__ import annotations

import itertools
import re
import struct
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import wsproto
from hypothesis import given, settings
from hypothesis import strategies as st
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Event, Ping, Pong, TextMessage
from wsproto.extensions import PerMessageDeflate
from wsproto.frame_protocol import CloseReason

from tests.core.http_rules import EVIL
from tests.http.ws import BINARY, CLOSE, CONTINUED, HANDSHAKE, KEY, PING, PONG, TEXT, frame
from tests.requirements import req
from trio_mcp.core import InvalidMessage, Limits, Request, Role, decode, weight
from trio_mcp.core.http import (
    SUBPROTOCOL,
    HttpPolicy,
    HttpRequest,
    Reply,
    Upgrade,
    WebSocketFrames,
    judge_upgrade,
    screen,
    websocket,
)
from trio_mcp.server.http import websocket as websocket_server

both_roles = pytest.mark.parametrize("role", list(Role))


class WsprotoPeer:
    """The other side of the connection, by wsproto alone."""

    def __init__(self, role: Role) -> None:
        self.ws = Connection(ConnectionType.SERVER if role is Role.CLIENT else ConnectionType.CLIENT)

    def sends(self, *events: Event) -> bytes:
        return b"".join(self.ws.send(event) for event in events)

    def reads(self, data: bytes) -> list[Event]:
        self.ws.receive_data(data)
        return list(self.ws.events())


GOING = struct.pack("!H", 1001)


def feed_pieces(role: Role, pieces: Iterable[bytes], **limits: int) -> tuple[list[bytes], WebSocketFrames, bytes]:
    """Feed these pieces to a new `WebSocketFrames`.  Returns the messages, the object, and the bytes that it sent."""
    end = WebSocketFrames(role, Limits(**limits))
    texts: list[bytes] = []
    sent = b""
    for piece in pieces:
        texts += end.texts(piece)
        sent += end.pending()
    return texts, end, sent


def one_by_one(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


def sends_no_more(end: WebSocketFrames) -> bool:
    """Whether this side sends no more bytes."""
    end.ping()
    return b"".join((*end.frame([b"x"]), end.pending(), end.farewell(), end.close(1011))) == b""


# Messages.


@req("trans-04")
def test_the_documentation_of_the_transport_is_complete() -> None:
    """The tests of this file, of the server and of the client check the statements of that section."""
    documents = Path(__file__).parents[2] / "docs" / "http.md"
    section = documents.read_text(encoding="utf-8").partition("\n## WebSockets\n")[2].partition("\n## ")[0]
    for topic in ("Opening", "Messages", "Cancelling", "Signs of life", "The end"):
        assert f"| {topic} |" in section
    topics = ("RFC 6455", f"Sec-WebSocket-Protocol: {SUBPROTOCOL}", "notifications/cancelled", "Limits.message_bytes")
    assert [each for each in topics if each not in section] == []
    sources = [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (websocket, websocket_server)]
    codes = {str(CloseReason[name].value) for name in re.findall(r"CloseReason\.([A-Z_]+)", "".join(sources))}
    codes |= set(re.findall(r"\b10[01]\d\b", "".join(sources)))
    assert codes - set(re.findall(r"\b1\d{3}\b", section)) == {"1005", "1006"}  # these two are never sent


@both_roles
def test_a_message_is_a_text_frame_and_a_text_frame_a_message(role: Role) -> None:
    end, peer = WebSocketFrames(role, Limits()), WsprotoPeer(role)
    texts = [b'{"a": 1}', "ä€𝄞".encode(), b"", b"x" * 200, b"y" * 70_000]
    (data,) = end.frame(texts)
    assert peer.reads(data) == [TextMessage(data=text.decode()) for text in texts]
    assert end.texts(peer.sends(*(TextMessage(data=text.decode()) for text in texts))) == texts
    assert end.frame([]) == (b"",)
    assert (end.pending(), end.ended, end.over) == (b"", False, False)


def test_the_two_roles_understand_each_other() -> None:
    client, server = WebSocketFrames(Role.CLIENT, Limits()), WebSocketFrames(Role.SERVER, Limits())
    for one, other in [(client, server), (server, client)]:
        assert other.texts(*one.frame([b"a", b"bc"])) == [b"a", b"bc"]
        one.ping()
        assert other.texts(one.pending()) == []
        assert one.texts(other.pending()) == []
    assert client.texts(server.farewell()) == []
    assert server.texts(client.pending()) == []
    assert (client.code, server.code, client.over, server.over) == (1001, 1001, True, True)


def test_feed_decodes_messages() -> None:
    good, bad = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}', b"hello"
    end, peer = WebSocketFrames(Role.SERVER, Limits()), WsprotoPeer(Role.SERVER)
    messages = list(end.feed(peer.sends(*(TextMessage(data=text.decode()) for text in (good, bad, b"")))))
    assert messages == [Request(1, "ping"), decode(bad, Limits()), decode(b"", Limits())]
    assert isinstance(messages[2], InvalidMessage)
    assert not end.ended


@both_roles
@pytest.mark.parametrize("between", [b"", b"ping", b"pong"])
def test_fragments_with_control_frames_between_them_are_joined(role: Role, between: bytes) -> None:
    control = {b"": b"", b"ping": frame(role, PING, b"?"), b"pong": frame(role, PONG, b"!")}[between]
    text = "ä€𝄞 and more".encode()
    for first, second in itertools.combinations(range(len(text) + 1), 2):  # also within a character
        pieces = [
            frame(role, TEXT, text[:first], fin=False),
            control,
            frame(role, CONTINUED, text[first:second], fin=False),
            control,
            frame(role, CONTINUED, text[second:]),
        ]
        texts, end, sent = feed_pieces(role, pieces)
        assert texts == [text]
        pongs = [Pong(payload=b"?")] * 2 if between == b"ping" else []
        assert WsprotoPeer(role).reads(sent) == pongs
        assert not end.ended


@both_roles
def test_empty_fragments_add_nothing(role: Role) -> None:
    pieces = [frame(role, TEXT, b"", fin=False), *[frame(role, CONTINUED, b"", fin=False)] * 1000]
    texts, end, _ = feed_pieces(role, [*pieces, frame(role, CONTINUED, b"x"), frame(role, TEXT, b"y")])
    assert texts == [b"x", b"y"]
    assert not end.ended


# Pings.


@both_roles
def test_a_pong_has_the_payload_of_the_ping(role: Role) -> None:
    texts, _, sent = feed_pieces(role, [WsprotoPeer(role).sends(Ping(payload=b"abc"))])
    assert (texts, WsprotoPeer(role).reads(sent)) == ([], [Pong(payload=b"abc")])


@both_roles
def test_of_several_pings_at_once_only_the_last_is_answered(role: Role) -> None:
    """So pongs do not pile up (RFC 6455, 5.5.3)."""
    pings = [Ping(payload=bytes([number] * 100)) for number in range(100)]
    _, end, sent = feed_pieces(role, [WsprotoPeer(role).sends(*pings)])
    assert WsprotoPeer(role).reads(sent) == [Pong(payload=pings[-1].payload)]
    assert end.pending() == b""


@both_roles
def test_an_unsolicited_pong_is_ignored(role: Role) -> None:
    texts, end, sent = feed_pieces(role, [WsprotoPeer(role).sends(Pong(payload=b"x"))])
    assert (texts, sent, end.ended) == ([], b"", False)


@both_roles
def test_a_ping_is_sent_unless_the_close_frame_was_sent(role: Role) -> None:
    end = WebSocketFrames(role, Limits())
    end.ping()
    assert WsprotoPeer(role).reads(end.pending()) == [Ping()]
    assert end.pending() == b""
    end.ping()
    assert WsprotoPeer(role).reads(end.farewell())[-1].__class__ is CloseConnection
    end.ping()
    assert end.pending() == b""


# Closing.

CLOSES: list[tuple[bytes, int, tuple[int, str], str]] = [
    (b"", 1005, (1005, ""), "without a code"),
    (struct.pack("!H", 1000), 1000, (1000, ""), "with code 1000"),
    (struct.pack("!H", 1001) + "weg für heute".encode(), 1001, (1001, ""), "with code 1001: 'weg für heute'"),
    (struct.pack("!H", 1008) + b"no\r\n\x1b[31mway", 1008, (1008, ""), r"with code 1008: 'no\r\n\x1b[31mway'"),
    (struct.pack("!H", 1011), 1011, (1011, ""), "with code 1011"),
    (struct.pack("!H", 3000), 3000, (3000, ""), "with code 3000"),
    (struct.pack("!H", 4999), 4999, (4999, ""), "with code 4999"),
    # Invalid close frames (RFC 6455, 5.5.1, 7.4).
    (b"\x03", 1002, (1002, "CLOSE with 1 byte payload"), "broke the rules"),
    *(
        (struct.pack("!H", code), 1002, (1002, why), "broke the rules")
        for code, why in [
            (0, "CLOSE with invalid code"),
            (999, "CLOSE with invalid code"),
            (1004, "CLOSE with unknown reserved code"),
            (1005, "remote CLOSE with local-only reason"),
            (1006, "remote CLOSE with local-only reason"),
            (1015, "remote CLOSE with local-only reason"),
            (2999, "CLOSE with unknown reserved code"),
            (5000, "CLOSE with invalid code"),
        ]
    ),
    (GOING + b"\xff", 1007, (1007, "the text is not UTF-8"), "broke the rules"),
]


@both_roles
@pytest.mark.parametrize(("payload", "code", "reply", "why"), CLOSES, ids=str)
def test_a_close_frame_is_answered_once_and_reported(
    role: Role, payload: bytes, code: int, reply: tuple[int, str], why: str
) -> None:
    data = frame(role, CLOSE, payload)
    for pieces in ([data], one_by_one(data), [data + frame(role, TEXT, b"late") + frame(role, PING)]):
        texts, end, sent = feed_pieces(role, pieces)
        assert texts == []
        assert WsprotoPeer(role).reads(sent) == [CloseConnection(code=reply[0], reason=reply[1])]
        assert (end.ended, end.over, end.code) == (True, "broke" not in why, code)
        assert why in end.why
        assert ("server" if role is Role.CLIENT else "client") in end.why
        assert sends_no_more(end)
        assert end.texts(data) == []


WRONG: list[tuple[str, int, str, list[tuple[int, bytes, dict[str, Any]]]]] = [
    ("binary", 1003, "binary", [(BINARY, b"{}", {})]),
    ("the first part of a binary message", 1003, "binary", [(BINARY, b"{}", {"fin": False})]),
    ("bad UTF-8", 1007, "UTF-8", [(TEXT, b"a\xff", {})]),
    ("half a character at the end", 1007, "UTF-8", [(TEXT, b"a\xc3", {})]),
    ("bad UTF-8 over two frames", 1007, "UTF-8", [(TEXT, b"a\xc3", {"fin": False}), (CONTINUED, b"\xff", {})]),
    ("half a surrogate pair", 1007, "UTF-8", [(TEXT, b"\xed\xa0\x80", {})]),
    ("too long", 1009, "10 bytes (Limits.message_bytes)", [(TEXT, b"x" * 11, {})]),
    (
        "too long in total",
        1009,
        "Limits.message_bytes",
        [(TEXT, b"x" * 6, {"fin": False}), (PING, b"", {}), (CONTINUED, b"x" * 5, {})],
    ),
    ("an unknown opcode", 1002, "opcode", [(3, b"", {})]),
    ("compressed", 1002, "Reserved bit", [(TEXT | 0x40, b"x", {})]),
    ("a continuation without a start", 1002, "CONTINUATION", [(CONTINUED, b"x", {})]),
    ("a message within a message", 1002, "CONTINUATION", [(TEXT, b"x", {"fin": False}), (TEXT, b"y", {})]),
    ("a ping in parts", 1002, "fragment", [(PING, b"", {"fin": False})]),
    ("a long ping", 1002, "125", [(PING, b"x" * 126, {})]),
    ("wrongly masked", 1002, "masked", [(TEXT, b"x", {"masked": ...})]),
]


@both_roles
@pytest.mark.parametrize(("about", "code", "why", "parts"), WRONG, ids=[row[0] for row in WRONG])
def test_a_violation_is_reported_to_the_peer_and_ends_reading(
    role: Role, about: str, code: int, why: str, parts: list[tuple[int, bytes, dict[str, Any]]]
) -> None:
    def made(opcode: int, payload: bytes, options: dict[str, Any]) -> bytes:
        if "masked" in options:
            options = {"masked": role is Role.CLIENT}
        return frame(role, opcode, payload, **options)

    good = frame(role, TEXT, b"good")
    data = good + b"".join(made(*part) for part in parts) + good
    for pieces in ([data], one_by_one(data)):
        texts, end, sent = feed_pieces(role, pieces, message_bytes=10)
        assert texts == [b"good"]
        *pongs, close = WsprotoPeer(role).reads(sent)
        assert isinstance(close, CloseConnection)
        assert close.code == code
        assert why in (close.reason or "")
        assert all(isinstance(each, Pong) for each in pongs)
        assert (end.ended, end.code) == (True, code)
        assert why in end.why
        assert sends_no_more(end)


@both_roles
def test_the_limit_of_a_message_is_exact_and_counts_bytes(role: Role) -> None:
    for text in ["x" * 10, "ä" * 5, "𝄞𝄞xy"]:
        assert feed_pieces(role, [frame(role, TEXT, text.encode())], message_bytes=10)[0] == [text.encode()]
        assert feed_pieces(role, [frame(role, TEXT, text.encode() + b"x")], message_bytes=10)[1].code == 1009


@both_roles
def test_a_message_over_the_limit_is_refused_early_and_not_kept(role: Role) -> None:
    whole = frame(role, TEXT, b"x" * 100_000)
    end = WebSocketFrames(role, Limits(message_bytes=1000))
    head = len(whole) - 100_000
    assert end.texts(whole[: head + 1000]) == []
    assert not end.ended
    assert end.texts(whole[head + 1000 : head + 1001]) == []
    assert end.ended
    [close] = WsprotoPeer(role).reads(end.pending())
    assert isinstance(close, CloseConnection)
    assert close.code == 1009
    assert end.texts(whole[head + 1001 :] + frame(role, CLOSE, struct.pack("!H", 1009))) == []
    assert end.over
    assert len(end._message) == 0


@both_roles
def test_the_close_frame_of_the_peer_does_not_change_the_fault(role: Role) -> None:
    end = WebSocketFrames(role, Limits(message_bytes=10))
    assert end.texts(frame(role, TEXT, b"x" * 11)) == []
    why = end.why
    assert "Limits.message_bytes" in why
    assert end.texts(frame(role, CLOSE, struct.pack("!H", 1000))) == []
    assert (end.over, end.code, end.why) == (True, 1009, why)


@pytest.mark.parametrize(("late", "code"), [(False, 1013), (True, 1008)])
def test_an_incomplete_message_is_held_until_it_ends_or_is_given_up(late: bool, code: int) -> None:
    end = WebSocketFrames(Role.SERVER, Limits())
    text = b'{"jsonrpc":"2.0","method":"' + b"x" * 70_000
    assert end.texts(frame(Role.SERVER, TEXT, text, fin=False)) == []
    assert end.held == len(text)
    assert list(end.feed(frame(Role.SERVER, CONTINUED, b'"}')))
    assert end.held == 0
    assert end.size == weight(text + b'"}', Limits().values) > 70_000
    assert end.texts(frame(Role.SERVER, TEXT, b"x" * 500, fin=False)) == []
    end.give_up("no more", late=late)
    assert (end.ended, end.code, end.why, end.held) == (True, code, "no more", 0)
    [close] = WsprotoPeer(Role.SERVER).reads(end.pending())
    assert isinstance(close, CloseConnection)
    assert close.code == code


@both_roles
def test_bytes_after_an_invalid_frame_are_not_kept(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    end = WebSocketFrames(role, Limits())
    assert end.texts(frame(role, 3)) == []
    assert end.ended
    monkeypatch.setattr(end, "_ws", None)  # wsproto would keep the bytes
    assert end.texts(b"x" * 1000) == []


@both_roles
def test_frames_between_our_close_and_that_of_the_peer_are_dropped(role: Role) -> None:
    end, peer = WebSocketFrames(role, Limits()), WsprotoPeer(role)
    data = end.close(1011, "x" * 200)
    [close] = peer.reads(data)
    assert close == CloseConnection(code=1011, reason="x" * 123)
    assert (end.ended, end.over) == (False, False)
    assert sends_no_more(end)
    late = frame(role, TEXT, b"late") + frame(role, PING, b"late") + frame(role, BINARY, b"late")
    assert (end.texts(late), end.pending(), end.over) == ([], b"", False)
    assert end.texts(peer.sends(CloseConnection(code=1011))) == []
    assert (end.pending(), end.ended, end.over, end.code) == (b"", True, True, 1011)


@both_roles
def test_both_may_close_at_once(role: Role) -> None:
    end, peer = WebSocketFrames(role, Limits()), WsprotoPeer(role)
    theirs = peer.sends(CloseConnection(code=4000, reason="mine"))
    ours = end.farewell()
    assert end.texts(theirs) == []
    assert (end.pending(), end.ended, end.over) == (b"", True, True)
    [close] = peer.reads(ours)
    assert isinstance(close, CloseConnection)
    assert close.code == (1000 if role is Role.CLIENT else 1001)


@both_roles
def test_invalid_bytes_after_our_close_end_the_connection_silently(role: Role) -> None:
    end = WebSocketFrames(role, Limits())
    assert end.farewell()
    assert end.texts(b"\xff" * 20) == []
    assert (end.pending(), end.ended, end.over) == (b"", True, False)


def test_a_connection_without_a_close_frame_has_code_1006() -> None:
    end = WebSocketFrames(Role.CLIENT, Limits())
    assert (end.code, end.why) == (1006, "the connection was lost without a close frame")


# Any pieces, any bytes.

_payloads = st.text(max_size=40).map(str.encode)
_controls = st.tuples(st.sampled_from([PING, PONG]), st.binary(max_size=125))


@st.composite
def conversations(draw: st.DrawFn, role: Role) -> bytes:
    """Messages in any fragments, with control frames between them, and possibly an end."""
    data = b""
    for text in draw(st.lists(_payloads, max_size=5)):
        cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=3)))
        parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        for number, part in enumerate(parts):
            for opcode, payload in draw(st.lists(_controls, max_size=1)):
                data += frame(role, opcode, payload)
            data += frame(role, CONTINUED if number else TEXT, part, fin=number == len(parts) - 1)
    end = st.sampled_from([b"", frame(role, CLOSE, GOING + b"bye"), frame(role, BINARY, b"x"), frame(role, 5)])
    return data + draw(end)


@settings(max_examples=200)
@given(st.sampled_from(list(Role)), st.data())
def test_chunk_boundaries_do_not_matter(role: Role, data: st.DataObject) -> None:
    whole = data.draw(conversations(role))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=12)))
    results = []
    for pieces in ([whole], [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])], one_by_one(whole)):
        texts, end, sent = feed_pieces(role, pieces)
        events = [each for each in WsprotoPeer(role).reads(sent) if not isinstance(each, Pong)]
        results.append((texts, events, end.ended, end.over, end.code, end.why))
    assert results[0] == results[1] == results[2]


@settings(max_examples=300)
@given(st.sampled_from(list(Role)), st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_are_messages_or_a_violation_by_the_peer(role: Role, pieces: Sequence[bytes]) -> None:
    _, end, sent = feed_pieces(role, pieces, message_bytes=50)
    events = WsprotoPeer(role).reads(sent)
    assert end.ended == any(isinstance(each, CloseConnection) for each in events)


def test_a_long_message_byte_by_byte_takes_time_in_proportion() -> None:
    # Quadratic, this would take minutes.
    whole = frame(Role.SERVER, TEXT, b"x" * 300_000)
    assert feed_pieces(Role.SERVER, one_by_one(whole))[0] == [b"x" * 300_000]


# The opening handshake.


def upgrade_verdict(
    method: str = "GET", target: str = "/ws", policy: Mapping[str, Any] | None = None, **headers: str | None
) -> Reply | Upgrade:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    fields = {**HANDSHAKE, **named}
    pairs = [(name, value) for name, value in fields.items() if value is not None]
    request = HttpRequest(method, target, pairs)
    screened = screen(HttpPolicy(websocket_path="/ws", **(policy or {})), request)
    if isinstance(screened, Reply):
        return screened
    assert screened.websocket
    return judge_upgrade(request)


ACCEPTED: list[tuple[str, dict[str, Any], bool]] = [
    ("a usual request", {}, True),
    ("among other subprotocols", {"Sec_WebSocket_Protocol": "soap, mcp,wamp"}, True),
    ("without a subprotocol", {"Sec_WebSocket_Protocol": None}, False),
    ("with an empty subprotocol", {"Sec_WebSocket_Protocol": " , "}, False),
    ("with an offer to compress", {"Sec_WebSocket_Extensions": "permessage-deflate; client_max_window_bits"}, True),
    ("Firefox", {"Connection": "keep-alive, Upgrade"}, True),
    ("in another case", {"Connection": "upgrade", "Upgrade": "WebSocket"}, True),
    ("with a query", {"target": "/ws?x=1"}, True),
    ("a whole URI", {"target": "http://localhost/ws", "Host": "localhost"}, True),
    ("a page on loopback", {"Origin": "http://localhost:5173"}, True),
    ("a page that is allowed", {"Origin": EVIL, "policy": {"allowed_origins": [EVIL]}}, True),
    ("a host that is allowed", {"Host": "a.example", "policy": {"allowed_hosts": ["a.example"]}}, True),
    ("the endpoint at the root", {"policy": {"path": "/"}}, True),
]


@pytest.mark.parametrize(("about", "row", "named"), ACCEPTED, ids=[row[0] for row in ACCEPTED])
def test_an_upgrade_is_accepted(about: str, row: dict[str, Any], named: bool) -> None:
    verdict = upgrade_verdict(**row)
    assert isinstance(verdict, Upgrade)
    # The accept token of RFC 6455, 1.3.  The reply has no extensions, so no extension is agreed.
    assert verdict.head.decode() == (
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"
        + ("Sec-WebSocket-Protocol: mcp\r\n" if named else "")
        + "\r\n"
    )


REFUSED: list[tuple[str, int, dict[str, Any], tuple[str, ...], Mapping[str, str]]] = [
    ("another origin", 403, {"Origin": EVIL}, (EVIL, "allowed_origins"), {}),
    ("the origin null", 403, {"Origin": "null"}, ("null", "allowed_origins"), {}),
    ("another origin, checked first", 403, {"Origin": EVIL, "Host": "evil.example", "method": "POST"}, (EVIL,), {}),
    ("another host", 421, {"Host": "evil.example"}, ("evil.example", "allowed_hosts"), {}),
    (
        "another host in the target",
        421,
        {"target": "ws://evil.example/ws", "Host": "localhost"},
        ("evil.example", "allowed_hosts"),
        {},
    ),
    ("another host, checked before the method", 421, {"Host": "evil.example", "method": "POST"}, ("evil.example",), {}),
    ("POST", 405, {"method": "POST"}, ("'POST'", "GET"), {"Allow": "GET, OPTIONS"}),
    ("no upgrade", 426, {"Upgrade": None}, ("Upgrade: websocket",), {"Upgrade": "websocket"}),
    ("another upgrade", 426, {"Upgrade": "h2c"}, ("Upgrade: websocket",), {"Upgrade": "websocket"}),
    ("no Connection: Upgrade", 426, {"Connection": "keep-alive"}, ("Connection",), {"Upgrade": "websocket"}),
    ("no version", 426, {"Sec_WebSocket_Version": None}, ("13",), {"Sec-WebSocket-Version": "13"}),
    ("another version", 426, {"Sec_WebSocket_Version": "8"}, ("'8'", "13"), {"Sec-WebSocket-Version": "13"}),
    ("two versions", 426, {"Sec_WebSocket_Version": "8, 13"}, ("13",), {"Sec-WebSocket-Version": "13"}),
    ("no key", 400, {"Sec_WebSocket_Key": None}, ("Sec-WebSocket-Key", "16 bytes"), {}),
    ("a short key", 400, {"Sec_WebSocket_Key": b64encode(b"x" * 15).decode()}, ("Sec-WebSocket-Key",), {}),
    ("two keys", 400, {"Sec_WebSocket_Key": f"{KEY}, {KEY}"}, ("Sec-WebSocket-Key",), {}),
    ("a key that is not ASCII", 400, {"Sec_WebSocket_Key": "äöü"}, ("Sec-WebSocket-Key",), {}),
    ("other subprotocols", 400, {"Sec_WebSocket_Protocol": "soap, wamp"}, ("soap, wamp", "offer mcp"), {}),
    ("mcp in capitals", 400, {"Sec_WebSocket_Protocol": "MCP"}, ("'MCP'", "offer mcp"), {}),
]


@req("http-03", "http-04", "http-05")
@pytest.mark.parametrize(("about", "status", "row", "says", "fields"), REFUSED, ids=[row[0] for row in REFUSED])
def test_an_upgrade_is_refused(
    about: str, status: int, row: dict[str, Any], says: tuple[str, ...], fields: Mapping[str, str]
) -> None:
    verdict = upgrade_verdict(**row)
    assert isinstance(verdict, Reply)
    assert verdict.status == status
    assert verdict.error is not None
    assert (verdict.error.id, verdict.error.code) == (None, -32600)
    for part in says:
        assert part in verdict.error.message
    sent = dict(verdict.headers)
    assert fields.items() <= sent.items()
    assert sent["Content-Type"] == "application/json"
    assert sent["Content-Length"] == str(len(verdict.body))
    assert decode(verdict.body, Limits()) == verdict.error


def test_the_key_is_not_shown() -> None:
    verdict = upgrade_verdict(Sec_WebSocket_Key="a secret key")
    assert isinstance(verdict, Reply)
    assert b"secret" not in verdict.body


def test_wsproto_agrees_with_the_handshake_and_with_no_compression() -> None:
    client = wsproto.WSConnection(ConnectionType.CLIENT)
    offer = wsproto.events.Request("127.0.0.1:3000", "/ws", extensions=[PerMessageDeflate()], subprotocols=["mcp"])
    lines = client.send(offer).decode().split("\r\n")[1:-2]
    request = HttpRequest("GET", "/ws", [tuple(line.split(": ", 1)) for line in lines])  # type: ignore[misc]
    assert "permessage-deflate" in request.headers["Sec-WebSocket-Extensions"]
    verdict = judge_upgrade(request)
    assert isinstance(verdict, Upgrade)
    client.receive_data(verdict.head)
    [accepted] = client.events()
    assert isinstance(accepted, wsproto.events.AcceptConnection)
    assert (accepted.subprotocol, accepted.extensions) == ("mcp", [])
    server = WebSocketFrames(Role.SERVER, Limits())
    assert server.texts(client.send(TextMessage(data="hello"))) == [b"hello"]
