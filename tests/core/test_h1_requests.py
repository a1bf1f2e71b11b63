"""HTTP/1.1 requests from bytes: valid and refused requests, limits, any split into pieces; and writing a reply."""

from __future__ import annotations

import email.utils
import json
import time
import tracemalloc
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_mcp.core import Limits, UsageError
from trio_mcp.core.http import RequestHead, RequestReader, UnreadableRequest, chunk, date, head_bytes

# A reader parses a plain head itself, and any other head by h11.  Both give the same result; some tests check which.
from trio_mcp.core.http.h1 import _parse_plain

POST = b"POST /mcp HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

Seen = list[tuple[object, ...]]


def read(*pieces: bytes, limits: Limits | None = None) -> Seen:
    """The requests that a reader finds in these bytes, then a refusal or `waits`."""
    reader = RequestReader(limits or Limits())
    seen: Seen = []
    head = None
    try:
        for piece in pieces:
            reader.feed(piece)
            while True:
                if head is None and (head := reader.head()) is None:
                    break
                while (body := reader.body()) is None and reader.has_more:
                    pass
                if body is None:
                    break
                seen.append((head.method, head.target, dict(head.headers), head.keep_alive, head.length, body))
                head = None
    except UnreadableRequest as refused:
        seen.append((refused.reply.status, refused.reply.body))
    else:
        seen.append(("waits", head is not None))
    return seen


def refusal(*pieces: bytes, limits: Limits | None = None) -> tuple[int, str]:
    """The status and the message of the refusal that these bytes cause."""
    status, body = read(*pieces, limits=limits)[-1]
    assert isinstance(status, int), status
    assert isinstance(body, bytes)
    error = json.loads(body)
    assert error.keys() == {"jsonrpc", "error"}
    assert error["error"]["code"] == -32600
    return status, error["error"]["message"]


# Valid requests.


def test_requests_are_read_one_after_the_other() -> None:
    data = POST + b"Content-Length: 3\r\n\r\nabc" + b"GET /mcp?x=1 HTTP/1.1\r\nHOST: [::1]:80\r\n\r\n"
    one, two, end = read(data)
    assert one == ("POST", "/mcp", {"host": "localhost", "content-length": "3"}, True, 3, b"abc")
    assert two == ("GET", "/mcp?x=1", {"host": "[::1]:80"}, True, 0, b"")
    assert end == ("waits", False)


def test_chunks_are_joined_and_the_trailer_is_ignored() -> None:
    data = CHUNKED + b"3;name=value\r\nabc\r\n0A\r\n0123456789\r\n0\r\nHost: evil\r\n\r\n"
    ((_, _, headers, _, length, body), end) = read(data)
    assert (body, length) == (b"abc0123456789", None)
    assert headers == {"host": "localhost", "transfer-encoding": "chunked"}
    assert end == ("waits", False)


@pytest.mark.parametrize(
    ("version", "connection", "keeps"),
    [
        ("1.1", None, True),
        ("1.1", "close", False),
        ("1.1", "Keep-Alive, Close", False),
        ("1.1", "upgrade", True),
        ("1.2", None, True),
        ("1.0", None, False),
        ("1.0", "Keep-Alive", True),
        ("1.0", "keep-alive, close", False),
    ],
)
def test_keep_alive_depends_on_version_and_connection_header(version: str, connection: str | None, keeps: bool) -> None:
    wish = "" if connection is None else f"Connection: {connection}\r\n"
    ((_, _, _, keep, _, _), _) = read(f"GET / HTTP/{version}\r\nHost: a\r\n{wish}\r\n".encode())
    assert keep is keeps


@pytest.mark.parametrize(
    ("version", "expect", "expects"),
    [
        ("1.1", "100-continue", True),
        ("1.1", "100-Continue", True),
        ("1.1", "42", False),
        ("1.0", "100-continue", False),
    ],
)
def test_only_a_client_of_http_1_1_can_wait_for_100(version: str, expect: str, expects: bool) -> None:
    reader = RequestReader(Limits())
    reader.feed(f"POST / HTTP/{version}\r\nHost: a\r\nExpect: {expect}\r\nContent-Length: 1\r\n\r\n".encode())
    head = reader.head()
    assert head is not None
    assert head.expects_continue is expects
    assert head.accepts_chunks is (version == "1.1")


def test_empty_lines_before_a_request_are_skipped() -> None:
    assert read(b"\r\n\r\n" + POST + b"\r\n\r\n" + POST + b"\r\n")[-1] == ("waits", False)
    assert len(read(b"\r\n\r\n" + POST + b"\r\n\r\n" + POST + b"\r\n")) == 3


def test_http_1_0_needs_no_host() -> None:
    assert read(b"GET / HTTP/1.0\r\n\r\n")[0][:3] == ("GET", "/", {})


def test_bytes_after_a_request_are_available_for_another_protocol() -> None:
    reader = RequestReader(Limits())
    reader.feed(b"GET /ws HTTP/1.1\r\nHost: a\r\n\r\n\x81\x85frame")
    assert reader.head() is not None
    assert reader.rest() == b"\x81\x85frame"
    assert len(reader.buffer) == 0


def test_the_target_of_a_request_is_not_shown() -> None:
    reader = RequestReader(Limits())
    reader.feed(b"GET /messages?session=secret HTTP/1.1\r\nHost: a\r\nAuthorization: secret\r\n\r\n")
    assert "secret" not in repr(reader.head())


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/mcp", "/mcp"),
        ("/mcp?x=1?y=2", "/mcp"),
        ("/", "/"),
        ("*", "*"),
        ("http://a:80/mcp/x?y=1", "/mcp/x"),
        ("http://a", "/"),
        ("http://a?y=/1", "/"),
        ("/mcp?to=http://a/b", "/mcp"),
        ("/to/http://a/b", "/to/http://a/b"),
    ],
)
def test_the_path_of_a_request_is_its_target_without_host_and_query(target: str, path: str) -> None:
    reader = RequestReader(Limits())
    reader.feed(f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    head = reader.head()
    assert head is not None
    assert (head.target, head.path) == (target, path)


@pytest.mark.parametrize(
    ("framing", "has_body"),
    [
        (b"", False),
        (b"Content-Length: 0\r\n", False),
        (b"Content-Length: 1\r\n", True),
        (b"Transfer-Encoding: chunked\r\n", True),
    ],
)
def test_a_request_has_a_body_if_it_has_a_length_or_chunks(framing: bytes, has_body: bool) -> None:
    reader = RequestReader(Limits())
    reader.feed(POST + framing + b"\r\n")
    head = reader.head()
    assert head is not None
    assert head.has_body is has_body


# Refused requests.

SMUGGLED = {
    "a length and chunks": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "the same length twice": POST + b"Content-Length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "a list of lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "a negative length": POST + b"Content-Length: -3\r\n\r\nabc",
    "a length with a sign": POST + b"Content-Length: +3\r\n\r\nabc",
    "a length in hexadecimal": POST + b"Content-Length: 0x3\r\n\r\nabc",
    "a length of Arabic digits": POST + "Content-Length: ٣\r\n\r\nabc".encode(),
    "no length": POST + b"Content-Length: \r\n\r\nabc",
    "a length of 5000 digits": POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "another coding": POST + b"Transfer-Encoding: gzip\r\n\r\n",
    "another coding and chunks": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "chunks twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks, with a vertical tab": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no chunk size": CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "a chunk size that is not hexadecimal": CHUNKED + b"xyz\r\nabc\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    "a chunk size with 0x": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a chunk size of 21 digits": CHUNKED + b"F" * 21 + b"\r\nabc\r\n0\r\n\r\n",
    "a chunk that is longer than its size": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "a chunk size that ends with LF": CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "a chunk extension with LF": CHUNKED + b"3;\nabc\r\nabc\r\n0\r\n\r\n",
    "a last chunk that ends with LF": CHUNKED + b"0\r\n\n",
    "a trailer that ends with LF": CHUNKED + b"0\r\na: b\n\r\n",
    "a trailer that is no field": CHUNKED + b"0\r\nGET / HTTP/1.1\r\n\r\n",
    "a space before the colon": POST + b"Content-Length : 3\r\n\r\nabc",
    "a tab before the colon": POST + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "a field without a name": POST + b": 3\r\n\r\n",
    "a line without a colon": POST + b"Content-Length\r\n\r\n",
    "a folded field": POST + b"X: a\r\n b\r\n\r\n",
    "a field folded by a tab": POST + b"X: a\r\n\tb\r\n\r\n",
    "a first field that is indented": b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
    "a bare CR in a field": POST + b"X: a\rContent-Length: 3\r\n\r\n",
    "a bare CR at the end of a field": POST + b"X: a\r\r\n\r\n",
    "a bare LF in a field": POST + b"X: a\nContent-Length: 3\r\n\r\n",
    "lines that end with LF": b"GET / HTTP/1.1\nHost: a\n\n",
    "a head that ends with LF": POST + b"X: a\r\n\n",
    "a NUL in a field": POST + b"X: a\0b\r\n\r\n",
    "a control character in a field": POST + b"X: a\x01b\r\n\r\n",
    "a form feed in a field": POST + b"X:\x0ca\r\n\r\n",
    "DEL in a field": POST + b"X: a\x7f\r\n\r\n",
    "a NUL in the target": b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n",
    "a letter beyond ASCII in a name": POST + "Ä: a\r\n\r\n".encode("latin-1"),
    "a letter beyond ASCII in the target": "GET /ä HTTP/1.1\r\nHost: a\r\n\r\n".encode(),
    "no Host": b"GET / HTTP/1.1\r\nX: a\r\n\r\n",
    "no Host in HTTP/1.2": b"GET / HTTP/1.2\r\nX: a\r\n\r\n",
    "a Host with a path": b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "a Host with a user": b"GET / HTTP/1.1\r\nHost: a@b\r\n\r\n",
    "a list of Hosts": b"GET / HTTP/1.1\r\nHost: a, b\r\n\r\n",
    "two Hosts": POST + b"Host: localhost\r\n\r\n",
    "no version": b"GET /\r\nHost: a\r\n\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tab for a space": b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "a space at the end": b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
    "a space at the start": b" GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a version in small letters": b"GET / http/1.1\r\nHost: a\r\n\r\n",
    "a version with three digits": b"GET / HTTP/1.10\r\nHost: a\r\n\r\n",
    "an invalid method": b"GE(T / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01",
    "a byte order mark": b"\xef\xbb\xbfGET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("data", SMUGGLED.values(), ids=SMUGGLED)
def test_an_ambiguous_request_is_refused(data: bytes) -> None:
    assert refusal(data)[0] == 400
    assert len(read(data)) == 1  # no part was read as a request


@pytest.mark.parametrize("data", SMUGGLED.values(), ids=SMUGGLED)
def test_an_ambiguous_request_has_the_same_refusal_byte_by_byte(data: bytes) -> None:
    whole = read(data)
    assert read(*(data[at : at + 1] for at in range(len(data)))) == whole


def test_tls_at_a_plain_server_is_refused_with_advice() -> None:
    assert "ssl_context" in refusal(b"\x16\x03\x01")[1]


@pytest.mark.parametrize("version", ["0.9", "2.0", "3.0"])
def test_another_major_version_is_refused_by_name(version: str) -> None:
    status, why = refusal(f"GET / HTTP/{version}\r\nHost: a\r\n\r\n".encode())
    assert status == 505
    assert f"HTTP/{version} is not served here; HTTP/1.1" in why


def test_the_preface_of_http_2_is_refused() -> None:
    assert refusal(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")[0] == 505


@pytest.mark.parametrize("about", ["a space before the colon", "a NUL in a field", "no version", "a folded field"])
def test_a_refusal_does_not_repeat_parts_of_the_request(about: str) -> None:
    data = (
        SMUGGLED[about]
        .replace(b"/mcp", b"/mcp?secret")
        .replace(b"X: a", b"X: secret")
        .replace(b"GET /", b"GET /secret")
    )
    assert "secret" not in refusal(data)[1]


def test_cached_heads_are_read_like_new_ones() -> None:
    heads = [b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(300)]
    *first, _ = read(*heads)
    *again, _ = read(*heads, *heads[-9:], *heads)
    assert again == [*first, *first[-9:], *first]
    assert [target for _, target, *_ in first] == [f"/{number}" for number in range(300)]


def test_a_head_with_a_query_is_not_cached() -> None:
    """The query of HTTP+SSE has the session id, and most other queries come only once."""
    known: dict[bytes, Any] = {}
    for target in (b"/mcp", b"/messages?session=secret"):
        reader = RequestReader(Limits(), known)
        reader.feed(b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        assert reader.head() is not None
    assert len(known) == 1
    assert b"secret" not in b"".join(known)


# The two parsers of heads: the fast one reads a plain head, if h11 would read the same; h11 reads all other heads.

PLAIN = {
    "a call of 2026-07-28": (
        POST
        + b"Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\nContent-Length: 351\r\n"
        b"MCP-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\nMcp-Name: =?base64?w6Q=?=\r\n\r\n"
    ),
    "httpx": (
        b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:3000\r\nAccept: application/json, text/event-stream\r\n"
        b"Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nUser-Agent: python-httpx/0.28.1\r\n"
        b"content-type: application/json\r\nContent-Length: 154\r\n\r\n"
    ),
    "node": (
        b"POST /mcp HTTP/1.1\r\nhost: localhost:3000\r\nconnection: keep-alive\r\ncontent-type: application/json\r\n"
        b"accept: application/json, text/event-stream\r\nmcp-session-id: 8f3a\r\naccept-language: *\r\n"
        b"sec-fetch-mode: cors\r\nuser-agent: node\r\naccept-encoding: gzip, deflate\r\ncontent-length: 46\r\n\r\n"
    ),
    "a stream": b"GET /mcp HTTP/1.1\r\nHost:[::1]:80\r\nAccept:\ttext/event-stream \r\nX: \xe4\r\nEmpty:\r\n\r\n",
    "a request that waits for 100, and closes": POST
    + b"Content-Length: 3\r\nExpect: 100-Continue\r\nConnection: a, Close\r\n\r\n",
}

# Heads for h11: valid ones that mean more than a plain head, and invalid ones that need an error message.
NOT_PLAIN = {
    **{name: data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" for name, data in SMUGGLED.items() if CHUNKED not in data},
    "chunks": CHUNKED,
    "HTTP/1.0": b"GET / HTTP/1.0\r\nHost: a\r\n\r\n",
    "a later version": b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    "a field twice": POST + b"X: a\r\nx: a\r\n\r\n",
    "too many fields": POST + b"".join(b"X%d: x\r\n" % number for number in range(256)) + b"\r\n",
    "no fields": b"GET / HTTP/1.1\r\n\r\n",
}


def as_tuple(head: RequestHead) -> tuple[object, ...]:
    return (
        head.method,
        head.target,
        dict(head.headers),
        head.accepts_chunks,
        head.keep_alive,
        head.length,
        head.expects_continue,
    )


def read_by_both(raw: bytes) -> bool:
    """Whether these bytes are a plain head.  If they are, h11 must read the same values from them."""
    head = _parse_plain(raw)
    if head is None:
        return False
    reader = RequestReader(Limits())
    assert as_tuple(head) == as_tuple(reader._parse_by_h11(raw))
    return True


@pytest.mark.parametrize("raw", PLAIN.values(), ids=PLAIN)
def test_heads_of_real_clients_are_plain_and_h11_reads_the_same(raw: bytes) -> None:
    assert read_by_both(raw)


@pytest.mark.parametrize("raw", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_a_head_that_is_not_plain_is_left_to_h11(raw: bytes) -> None:
    assert _parse_plain(raw) is None


@pytest.mark.parametrize("raw", PLAIN.values(), ids=PLAIN)
def test_a_plain_head_with_a_changed_byte_is_left_to_h11_or_read_the_same(raw: bytes) -> None:
    plain = 0
    for at in range(len(raw)):
        for byte in (b"\0", b"\t", b"\n", b"\r", b" ", b":", b"\x7f", b"\xff", b""):
            plain += read_by_both(raw[:at] + byte + raw[at + 1 :])
            plain += read_by_both(raw[:at] + byte + raw[at:])
    assert plain > len(raw)


_NAMES = st.sampled_from(
    [
        b"Host",
        b"host",
        b"Content-Length",
        b"content-length",
        b"Transfer-Encoding",
        b"Connection",
        b"Expect",
        b"X",
        b"x-Y",
        b"Content-Length ",
        b" X",
        b"",
        b"Host\x00",
        b"\xc4",
        b"a:b",
    ]
)
_VALUES = st.one_of(
    st.sampled_from(
        [
            b"localhost",
            b"a:80",
            b"[::1]",
            b"a/b",
            b"a, b",
            b"3",
            b"+3",
            b"3, 3",
            b"0x3",
            b"\xb2",
            b"",
            b"9" * 18,
            b"9" * 19,
            b"chunked",
            b"identity",
            b"close",
            b"keep-alive",
            b"a,CLOSE",
            b"100-continue",
            b"\x0bclose",
            b"\x85",
            b"\xa0",
        ]
    ),
    st.binary(max_size=6),
)
_LINES = st.tuples(
    _NAMES, st.sampled_from([b":", b": ", b":\t", b" :", b""]), _VALUES, st.sampled_from([b"", b" ", b"\t "])
)
_STARTS = st.sampled_from(
    [
        b"POST /mcp HTTP/1.1",
        b"GET / HTTP/1.1",
        b"GET /?a=b HTTP/1.1",
        b"G\tT / HTTP/1.1",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/1.0",
        b"GET http://a/b HTTP/1.1",
        b"GET * HTTP/1.1",
        b"G(T / HTTP/1.1",
        b"GET /\xe4 HTTP/1.1",
        b"GET / http/1.1",
        b"!#|~ / HTTP/1.1",
    ]
)
_ENDS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\n "])


@given(_STARTS, st.lists(st.tuples(_LINES, _ENDS), max_size=6), st.booleans())
def test_any_plain_head_is_read_the_same_by_h11(
    start: bytes, lines: list[tuple[tuple[bytes, ...], bytes]], named: bool
) -> None:
    fields = b"".join(b"".join(line) + end for line, end in lines)
    read_by_both(start + b"\r\n" + (b"Host: a\r\n" if named else b"") + fields + b"\r\n")


@given(st.binary(max_size=120))
def test_any_bytes_that_are_a_plain_head_are_read_the_same_by_h11(data: bytes) -> None:
    read_by_both(POST + data + b"\r\n\r\n")


# Limits.


def head_of(size: int) -> bytes:
    return POST + b"X: " + b"x" * (size - len(POST) - 7) + b"\r\n\r\n"


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_the_limit_of_a_head_is_exact(pieces: int) -> None:
    limits = Limits(header_bytes=500)
    for size, whole in ((500, True), (501, False), (600, False)):
        data = head_of(size)
        assert len(data) == size
        cut = [data[at : at + pieces] for at in range(0, size, pieces)]
        if whole:
            assert read(*cut, limits=limits)[0][0] == "POST"
        else:
            status, why = refusal(*cut, limits=limits)
            assert status == 431
            assert "500 bytes (Limits.header_bytes)" in why


def test_a_head_with_more_than_256_headers_is_refused() -> None:
    assert read(POST + b"X: x\r\n" * 250 + b"\r\n")[0][0] == "POST"
    status, why = refusal(POST + b"X: x\r\n" * 257 + b"\r\n")
    assert (status, why) == (431, "the request has more than 256 headers")


def test_a_head_without_an_end_is_refused_at_its_limit() -> None:
    assert refusal(POST + b"X: " + b"x" * 500, limits=Limits(header_bytes=500))[0] == 431


def test_a_body_may_be_as_long_as_its_limit() -> None:
    limits = Limits(message_bytes=10)
    assert read(POST + b"Content-Length: 10\r\n\r\n0123456789", limits=limits)[0][-1] == b"0123456789"
    assert read(CHUNKED + b"5\r\n01234\r\n5\r\n56789\r\n0\r\n\r\n", limits=limits)[0][-1] == b"0123456789"


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: 11\r\n\r\n",  # before the first byte of the body
        CHUNKED + b"5\r\n01234\r\n5\r\n56789\r\n1\r\nX",
        CHUNKED + b"FFFFFF\r\n" + b"0123456789X",
    ],
)
def test_a_body_over_the_limit_is_refused_as_early_as_possible(data: bytes) -> None:
    status, why = refusal(data, limits=Limits(message_bytes=10))
    assert status == 413
    assert "10 are allowed (Limits.message_bytes)" in why


def test_leading_zeros_of_a_length_are_ignored() -> None:
    assert read(POST + b"Content-Length: " + b"0" * 17 + b"3\r\n\r\nabc")[0][-1] == b"abc"


def test_chunks_with_more_headers_than_content_are_refused() -> None:
    fair = b"1\r\nx\r\n" * 10_000  # the smallest possible chunks
    assert read(CHUNKED + fair + b"0\r\n\r\n")[0][-1] == b"x" * 10_000
    padded = b"1;" + b"." * 1000 + b"\r\nx\r\n"
    status, why = refusal(CHUNKED, *[padded] * 1000)
    assert status == 400
    assert why == "the chunks have more headers than content"


def test_the_limit_of_a_head_applies_to_the_header_of_a_chunk() -> None:
    assert refusal(CHUNKED + b"1;" + b"." * 1000, limits=Limits(header_bytes=500))[0] == 400


def test_the_limit_of_a_head_applies_to_a_trailer() -> None:
    assert refusal(CHUNKED + b"0\r\nX: " + b"." * 1000, limits=Limits(header_bytes=500))[0] == 400


def test_the_number_of_received_bytes_of_a_body() -> None:
    reader = RequestReader(Limits())
    reader.feed(POST + b"Content-Length: 9\r\n\r\nabc")
    reader.head()
    assert (reader.body(), reader.body_received) == (None, 3)
    reader.feed(b"def")
    assert (reader.body(), reader.body_received) == (None, 6)
    reader = RequestReader(Limits())
    reader.feed(CHUNKED + b"9\r\nabc")
    reader.head()
    assert (reader.body(), reader.body_received) == (None, 6)


def test_the_content_of_unfinished_chunks_counts_as_held() -> None:
    reader = RequestReader(Limits())
    reader.feed(CHUNKED)
    assert (len(reader.buffer), reader.held) == (len(CHUNKED), len(CHUNKED))
    assert reader.head() is not None
    assert (len(reader.buffer), reader.held) == (0, 0)
    reader.feed(b"3\r\nabc\r\n9\r\nde")
    assert (reader.body(), len(reader.buffer), reader.held) == (None, 0, 5)
    reader.feed(b"\r")  # one more byte of content
    assert (len(reader.buffer), reader.held) == (1, 6)
    reader.feed(b"ghijkl\r\n0\r\n\r\nGET")
    assert (reader.body(), len(reader.buffer), reader.held) == (b"abcde\rghijkl", 3, 3)


# Any split into pieces.

EXCHANGE = (
    POST + b"Content-Length: 3\r\n\r\nabc"
    b"\r\n" + POST + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n"
    b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\nGET / HT"
)


def test_every_split_into_two_or_three_gives_the_same_requests() -> None:
    whole = read(EXCHANGE)
    assert [each[0] for each in whole] == ["POST", "POST", "GET", "POST", "waits"]
    edges = range(1, len(EXCHANGE))
    for at in edges:
        assert read(EXCHANGE[:at], EXCHANGE[at:]) == whole, at
    for one, two in combinations(edges[::5], 2):
        assert read(EXCHANGE[:one], EXCHANGE[one:two], EXCHANGE[two:]) == whole, (one, two)


def test_bytes_that_come_one_by_one_give_the_same_requests() -> None:
    assert read(*(EXCHANGE[at : at + 1] for at in range(len(EXCHANGE)))) == read(EXCHANGE)


@given(st.binary(max_size=300), st.sets(st.integers(1, 299), max_size=4))
def test_any_bytes_are_read_or_refused(data: bytes, cuts: set[int]) -> None:
    data = POST + data
    edges = [0, *sorted(each for each in cuts if each < len(data)), len(data)]
    seen = read(*(data[one:two] for one, two in pairwise(edges)))
    assert seen[-1][0] in (400, 413, 431, 505, "waits")


@given(st.lists(st.sampled_from([b"\r\n", b"\n", b"\r", b"3", b"0", b"abc", b";x", b": ", b"a", b" "]), max_size=30))
def test_any_body_in_chunks_is_read_or_refused(parts: list[bytes]) -> None:
    seen = read(CHUNKED, *parts)
    assert seen == read(CHUNKED + b"".join(parts))
    assert seen[-1][0] in (400, 413, "waits")


@pytest.mark.full
def test_a_long_body_takes_time_in_proportion() -> None:
    # A quadratic reader would take minutes, byte by byte.
    limits = Limits()
    reader = RequestReader(limits)
    reader.feed(CHUNKED + b"80000\r\n")
    assert reader.head() is not None
    for _ in range(0x80000):
        reader.feed(b"x")
        reader.body()
    reader.feed(b"\r\n0\r\n\r\n")
    body = reader.body()
    assert body is not None
    assert len(body) == 0x80000


def test_a_body_is_copied_only_once() -> None:
    size = 4_000_000
    reader = RequestReader(Limits())
    reader.feed(POST + b"Content-Length: %d\r\n\r\n" % size)
    assert reader.head() is not None
    reader.feed(bytes(size))
    tracemalloc.start()
    try:
        body = reader.body()
        assert tracemalloc.get_traced_memory()[1] < 1.5 * size
    finally:
        tracemalloc.stop()
    assert body == bytes(size)


# Writing a reply.


def test_a_head_is_a_status_line_and_fields() -> None:
    head = head_bytes(404, (("Content-Type", "text/plain"), ("X", "ä")), "today", "Content-Length: 0")
    assert head == (
        b"HTTP/1.1 404 Not Found\r\nDate: today\r\nContent-Type: text/plain\r\nX: \xe4\r\nContent-Length: 0\r\n\r\n"
    )


def test_a_date_is_written_as_http_requires() -> None:
    assert date(1994, 11, 6, 8, 49, 37, 6) == "Sun, 06 Nov 1994 08:49:37 GMT"  # the example of RFC 9110, 5.6.7
    day = 24 * 60 * 60
    for seconds in range(0, 366 * day, day - 1):
        assert date(*time.gmtime(seconds)[:7]) == email.utils.formatdate(seconds, usegmt=True)


@pytest.mark.parametrize("value", ["a\r\nSet-Cookie: b", "a\nb", "a\rb"])
def test_a_line_break_in_a_header_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="line break"):
        head_bytes(200, (("X", value),), "today")
    with pytest.raises(UsageError, match="line break"):
        head_bytes(200, ((value, "X"),), "today")


def test_chunks_have_their_size_and_an_empty_one_does_not_end_the_body() -> None:
    assert chunk(b"0123456789abcdef", last=False) == b"10\r\n0123456789abcdef\r\n"
    assert chunk(b"a", last=True) == b"1\r\na\r\n0\r\n\r\n"
    assert chunk(b"", last=False) == b""
    assert chunk(b"", last=True) == b"0\r\n\r\n"
