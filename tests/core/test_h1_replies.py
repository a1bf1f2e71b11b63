"""HTTP/1.1 replies from bytes: each framing, each split, a break after each byte, and invalid replies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise

import h11
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trio_mcp import Limits
from trio_mcp.core.http import ReplyReader
from trio_mcp.errors import RemoteProtocolError

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"

# The bytes, the status, the body, and whether the connection can be reused.
REPLIES = {
    "a length": (OK + b"Content-Length: 5\r\n\r\nhello", 200, b"hello", True),
    "a length, twice the same": (OK + b"Content-Length: 2\r\ncontent-length: 2\r\n\r\nhi", 200, b"hi", True),
    "no body": (b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n", 202, b"", True),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "304 with a length": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 304, b"", True),
    "no reason": (b"HTTP/1.1 404\r\nContent-Length: 1\r\n\r\nx", 404, b"x", True),
    "chunks": (CHUNKED + b"3\r\nabc\r\n00A\r\n0123456789\r\n0\r\n\r\n", 200, b"abc0123456789", True),
    "chunks with extensions and a trailer": (
        CHUNKED + b'1;a="b"\r\nx\r\nB ;q\r\nhello\r\nhell\r\n0\r\nA: b\r\nC: d\r\n\r\n',
        200, b"xhello\r\nhell", True,
    ),
    "a long head, size and trailer": (
        OK + b"A: " + b"x" * 200 + b"\r\nTransfer-Encoding: chunked\r\n\r\n2;" + b"x" * 200 + b"\r\nhi\r\n0\r\n"
        b"A: " + b"x" * 200 + b"\r\n\r\n",
        200, b"hi", True,
    ),
    "no chunk": (CHUNKED + b"0\r\n\r\n", 200, b"", True),
    "until the end of the connection": (OK + b"\r\nall of it", 200, b"all of it", False),
    "1.0": (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi", False),
    "close": (OK + b"Connection: x, Close\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi", False),
    "two framings": (
        OK + b"Content-Length: 3\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        200, b"hi", False,
    ),
    "bytes after the reply": (OK + b"Content-Length: 2\r\n\r\nhiHTTP/1.1 408 Too late\r\n\r\n", 200, b"hi", False),
    "interim replies before it": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nhi",
        200, b"hi", True,
    ),
    "bare line feeds": (b"HTTP/1.1 200 OK\nContent-Length:2\n\nhi", 200, b"hi", True),
    "a field in two lines": (OK + b"A: b\r\n\tc\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi", True),
}  # fmt: skip

# The bytes, and a part of the error message.
FAULTS = {
    "no HTTP": (b"220 smtp.example ESMTP\r\n", "no HTTP reply"),
    "TLS": (b"\x15\x03\x01\x00\x02\x02\x46", "use https://"),
    "another version": (b"HTTP/2.0 200 OK\r\n\r\n", "status line"),
    "no status": (b"HTTP/1.1 OK\r\n\r\n", "status line"),
    "101": (b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\n\r\n", "another protocol"),
    "no colon": (OK + b"secret\r\n\r\n", "malformed"),
    "a space before the colon": (OK + b"Secret : x\r\n\r\n", "malformed"),
    "a control character": (OK + b"Secret: \0\r\n\r\n", "control character"),
    "a bare CR": (OK + b"Secret: a\rb\r\n\r\n", "control character"),
    "two lengths": (OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nhi", "not one number"),
    "no length": (OK + b"Content-Length: -1\r\n\r\n", "not one number"),
    "another coding": (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "only chunked"),
    "no size": (CHUNKED + b"2\r\nhi\r\nsecret\r\n", "hexadecimal"),
    "a wrong size": (CHUNKED + b"2\r\nhigh\r\n0\r\n\r\n", "as many bytes as its size says"),
    "a long head": (OK + b"A: " + b"x" * 500, "Limits.header_bytes"),
    "a long head at once": (OK + b"A: " + b"x" * 500 + b"\r\n\r\n", "Limits.header_bytes"),
    "endless interim replies": (b"HTTP/1.1 102 Processing\r\n\r\n" * 20, "Limits.header_bytes"),
    "a size in two lines": (CHUNKED + b"2\n\r\nhi\r\n0\r\n\r\n", "hexadecimal"),
    "an invalid trailer": (CHUNKED + b"0\r\nsecret\r\n\r\n", "after the last chunk"),
    "a long size": (CHUNKED + b"1;" + b"x" * 500, "Limits.header_bytes"),
    "a long trailer": (CHUNKED + b"0\r\n" + b"A: b\r\n" * 100, "trailer has more"),
}

LIMITS = Limits(header_bytes=300)


def splits(data: bytes) -> Iterator[list[bytes]]:
    """In one piece, in two pieces split at each place, and byte by byte."""
    yield [data]
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]
    yield [data[at : at + 1] for at in range(len(data))]


class ReadReply:
    """The result of reading these pieces.  If the reply is not complete by then, the connection ends."""

    def __init__(self, pieces: list[bytes], *, bodiless: bool = False, limits: Limits = LIMITS) -> None:
        self.reader = ReplyReader(limits, bodiless=bodiless)
        self.status = 0
        self.body = b""
        self.fault = ""
        head = None
        try:
            for piece in [*pieces, b""]:
                if piece or not self.reader.done:
                    self.reader.feed(piece)
                if head is None and (head := self.reader.head()) is None:
                    continue
                self.status = head.status
                while data := self.reader.body():
                    self.body += data
        except RemoteProtocolError as error:
            self.fault = str(error)


@pytest.mark.parametrize("which", REPLIES)
def test_a_reply_is_the_same_for_any_split(which: str) -> None:
    data, status, body, reusable = REPLIES[which]
    for pieces in splits(data):
        result = ReadReply(pieces)
        assert (result.fault, result.status, result.body, result.reader.reusable) == ("", status, body, reusable), (
            pieces
        )


@pytest.mark.parametrize("which", FAULTS)
def test_an_invalid_reply_has_the_same_error_for_any_split(which: str) -> None:
    data, fault = FAULTS[which]
    whole = ReadReply([data])
    assert fault in whole.fault
    assert "secret" not in whole.fault.lower()
    for pieces in splits(data):
        result = ReadReply(pieces)
        assert (result.fault, result.body) == (whole.fault, whole.body), pieces


@pytest.mark.parametrize("which", [each for each in REPLIES if each != "bytes after the reply"])
def test_a_reply_that_breaks_off_is_never_taken_as_complete(which: str) -> None:
    data, _, body, _ = REPLIES[which]
    for at in range(len(data)):
        result = ReadReply([data[:at]] if at else [])
        if which == "until the end of the connection" and at >= data.index(b"\r\n\r\n") + 4:
            assert (result.fault, result.body) == ("", data.partition(b"\r\n\r\n")[2][: at - len(data) or None])
        else:
            assert "the connection ended" in result.fault, at
            assert body.startswith(result.body)
            assert result.reader.began == (at > 0)


def test_a_reply_to_head_has_no_body_in_spite_of_its_length() -> None:
    result = ReadReply([OK + b"Content-Length: 5\r\n\r\n"], bodiless=True)
    assert (result.fault, result.body, result.reader.reusable) == ("", b"", True)


def test_a_body_is_returned_as_it_arrives() -> None:
    reader = ReplyReader(Limits())
    reader.feed(CHUNKED + b"5\r\nab")
    assert reader.head() is not None
    assert (reader.body(), reader.body(), reader.length) == (b"ab", b"", 3)
    reader.feed(b"cde\r\n1\r\nf\r\n0")
    assert (reader.body(), reader.done) == (b"cdef", False)
    reader.feed(b"\r\n\r\n")
    assert (reader.body(), reader.done, reader.reusable) == (b"", True, True)


def test_a_reader_is_ready_after_new_bytes_and_at_the_end() -> None:
    reader = ReplyReader(Limits())
    assert (reader.ready, reader.surplus) == (False, False)
    reader.feed(OK + b"Content-Length: 2\r\n\r\n")
    assert (reader.ready, reader.surplus) == (True, True)
    assert reader.head() is not None
    assert (reader.ready, reader.surplus) == (False, False)
    reader.feed(b"hi")
    assert reader.body() == b"hi"
    assert (reader.ready, reader.surplus) == (True, False)
    reader.feed(b"HTTP")
    assert (reader.ready, reader.surplus) == (True, True)
    ended = ReplyReader(Limits())
    ended.feed(b"")
    assert (ended.ready, ended.surplus) == (True, False)


def test_data_before_a_fault_is_returned_first() -> None:
    reader = ReplyReader(Limits())
    reader.feed(CHUNKED + b"2\r\nhi\r\nx\r\n")
    assert reader.head() is not None
    assert reader.body() == b"hi"
    with pytest.raises(RemoteProtocolError, match="hexadecimal"):
        reader.body()


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_bytes_are_a_reply_or_a_protocol_error(pieces: list[bytes]) -> None:
    for start in (b"", OK + b"A: b", CHUNKED):
        ReadReply([start, *pieces])


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(1, 400), max_size=8))
def test_chunks_written_by_h11_are_read(parts: list[bytes], cuts: list[int]) -> None:
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert isinstance(server.next_event(), h11.Request)
    data = server.send(h11.Response(status_code=200, headers=[("A", "b"), ("Transfer-Encoding", "chunked")])) or b""
    for part in parts:
        data += server.send(h11.Data(data=part)) or b""
    data += server.send(h11.EndOfMessage(headers=[("Trailer", "x")])) or b""
    edges = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    result = ReadReply([data[a:b] for a, b in pairwise(edges) if a < b])
    assert (result.fault, result.status, result.body, result.reader.reusable) == ("", 200, b"".join(parts), True)


MARKS = st.lists(st.sampled_from([b"\r\n", b"\r", b"\n", b"\0", b" ", b":", b";", b"0", b"1", b"a"]), max_size=8)


@given(MARKS.map(b"".join), st.integers(0, 30))
def test_a_body_that_h11_refuses_is_not_taken_as_complete(junk: bytes, at: int) -> None:
    good = b"5\r\nhello\r\n3;x\r\nabc\r\n0\r\n\r\n"
    data = good[:at] + junk + good[at:]
    assume(b" ;" not in data)  # "BWS", which a recipient "MUST" accept, but h11 does not
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    client.send(h11.EndOfMessage())
    client.receive_data(CHUNKED + data)
    with contextlib.suppress(h11.RemoteProtocolError):
        while (event := client.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.EndOfMessage):
                return
    assert not ReadReply([CHUNKED + data], limits=Limits()).reader.done
