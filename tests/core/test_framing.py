"""The line framer: any chunks, any length of a line, and any end of a stream."""

from __future__ import annotations

import sys
from itertools import cycle, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_mcp.core import INVALID_REQUEST, InvalidMessage, LineFramer, Notification, decode, encode
from trio_mcp.core import Limits as Bounds


def frame(*chunks: bytes, limit: int = 8, close: bool = True) -> list[bytes | InvalidMessage]:
    framer = LineFramer(limit)
    lines = [line for chunk in chunks for line in framer.feed(chunk)]
    return lines + framer.close() if close else lines


def is_too_long(line: bytes | InvalidMessage, limit: int = 8) -> bool:
    if not isinstance(line, InvalidMessage):
        return False
    assert line.reply is not None
    assert (line.reply.code, line.reply.id, line.answers) == (INVALID_REQUEST, None, None)
    assert f"{limit} bytes" in line.why
    return True


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\n", [b"a"]),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"a\r\nb\n", [b"a", b"b"]),
        (b"\n\r\n \n\t\r\na\n\n", [b"a"]),
        # A CR alone does not end a line, and only the last CR before the LF belongs to the line end.
        (b"a\rb\n", [b"a\rb"]),
        # Lines that end like a message.
        (b"{}\n{1}\r\n\n{2}\n", [b"{}", b"{1}", b"{2}"]),
        (b"\r}\n}\n{", [b"\r}", b"}", b"{"]),
        (b"a\r\r\n", [b"a\r"]),
        (b"\ra\n", [b"\ra"]),
        # The other line ends of str.splitlines() do not end a line.
        ("a\u2028b\x0bc\n".encode(), ["a\u2028b\x0bc".encode()]),
        # Without a newline at the end.
        (b"a", [b"a"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r", [b"a"]),
        (b"a\n \r", [b"a"]),
    ],
)
def test_lines_end_with_lf_or_crlf_and_blank_ones_are_skipped(data: bytes, lines: list[bytes]) -> None:
    assert frame(data) == lines
    assert frame(*(data[at : at + 1] for at in range(len(data)))) == lines


def test_a_line_is_returned_when_its_newline_arrives() -> None:
    framer = LineFramer(8)
    assert framer.feed(b"abc") == []
    assert framer.feed(b"") == []
    assert framer.feed(b"d\ne") == [b"abcd"]
    assert framer.feed(b"f\n") == [b"ef"]
    assert framer.close() == []


def test_the_end_of_the_stream_ends_the_last_line_once() -> None:
    framer = LineFramer(8)
    assert framer.feed(b"abc") == []
    assert framer.close() == [b"abc"]
    assert framer.close() == []


def test_a_message_without_its_newline_is_read_and_a_cut_one_is_not() -> None:
    whole = encode(Notification("m", {"a": [1]}))
    for size in range(1, len(whole) + 1):
        (line,) = frame(whole[:size], limit=1000)
        assert isinstance(line, bytes)
        message = decode(line, Bounds())
        assert message == Notification("m", {"a": [1]}) if size == len(whole) else isinstance(message, InvalidMessage)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_line_of_exactly_the_limit_is_read_and_its_end_does_not_count(end: bytes) -> None:
    assert frame(b"12345678" + end) == [b"12345678"]
    assert frame(b"123456789" + end) == frame(b"123456789")
    assert is_too_long(frame(b"123456789" + end)[0])
    assert is_too_long(frame(b"12345678\rx" + end)[0])


def test_a_line_too_long_is_refused_once_and_the_next_line_is_read() -> None:
    framer = LineFramer(8)
    assert framer.feed(b"12345678") == []
    (invalid,) = framer.feed(b"9")
    assert is_too_long(invalid)
    assert framer.feed(b"0" * 100) == []
    assert framer.feed(b"0\rx\r") == []
    assert framer.feed(b"\nab\n") == [b"ab"]
    assert framer.feed(b"cd\n") == [b"cd"]


def test_a_line_too_long_that_never_ends_is_not_reported_again_at_the_end() -> None:
    framer = LineFramer(8)
    assert len(framer.feed(b"0" * 9)) == 1
    assert framer.close() == []


LONG = b'{"x":["' + b"y" * 10_000 + b'","id\\":7,"]}'
V = b'"jsonrpc":"2.0"'
REQUEST = (INVALID_REQUEST, 7)
NONE = (INVALID_REQUEST, None)
RESPONSE = "response"

# A line, and the report about it: the code and id of the reply to send, or the id of our request that it answers.
FOUND: dict[bytes, tuple[object, object]] = {
    b'{%b,"id":7,"result":%b}' % (V, LONG): (RESPONSE, 7),
    b'\xef\xbb\xbf { %b , "id" : "a-1 [x]" , "error" : %b }' % (V, LONG): (RESPONSE, "a-1 [x]"),
    b'{"result":%b,%b,"id":7}' % (LONG, V): (RESPONSE, 7),
    b'{"result":%b, "id" : -7, %b }\t\r' % (LONG, V): (RESPONSE, -7),
    b'{%b,"error":{"code":1,"message":"%b"},"id":"a"}' % (V, b"y" * 10_000): (RESPONSE, "a"),
    b'{%b,"id":7,"method":"m\\"","params":%b}' % (V, LONG): REQUEST,
    b'{%b,"id":7,"params":%b,"method":"m"}' % (V, LONG): REQUEST,
    b'{"method":"m","params":%b,%b,"id":7}' % (LONG, V): REQUEST,
    # No id, or the id is in a place that is not searched.
    b'{"method":"m","params":%b,%b}' % (LONG, V): NONE,
    b'{"method":"m","params":{"a":%b,"id":7}}' % LONG: NONE,
    b'{"method":"m","params":{"id":7,"a":%b}}' % LONG: NONE,
    b'{"result":{"id":7,"a":%b}}' % LONG: (RESPONSE, None),
    b'{%b,"method":"m","params":%b,"id":7,"x":1}' % (V, LONG): NONE,
    b'{%b,"id":null,"method":"m","params":%b}' % (V, LONG): NONE,
    b'{%b,"id":1.5,"method":"m","params":%b}' % (V, LONG): NONE,
    b'{%b,"id":"%b","method":"m","params":%b}' % (V, b"i" * 129, LONG): NONE,
    b'{%b,"id":%b,"method":"m","params":%b}' % (V, b"1" * 20, LONG): NONE,
    b'{%b,"id":[7],"method":"m","params":%b}' % (V, LONG): NONE,
    b'{"result":%b,%b,"id":"\\u0061"}' % (LONG, V): (RESPONSE, None),
    b'{"result":"%b,\\"id":7}' % (b"y" * 10_000): (RESPONSE, None),
    b'{"id":7,"x":%b,"result":{}}' % LONG: NONE,
    b'[{%b,"id":7,"result":%b}]' % (V, LONG): NONE,
    b'DEBUG {"id":7,"result":%b}' % LONG: NONE,
    b'{"%b":7}' % (b"y" * 10_000): NONE,
    b'{"\\u0069d":7,"method":%b,"id":7}' % LONG: NONE,
}


def report_of(line: bytes | InvalidMessage) -> tuple[object, object]:
    assert isinstance(line, InvalidMessage)
    if not line.response:
        assert line.reply is not None
        assert (line.answers, line.why) == (None, "the message is longer than 9000 bytes (Limits.message_bytes)")
        return line.reply.code, line.reply.id
    assert line.why == "the answer is longer than 9000 bytes (Limits.message_bytes)"
    assert line.reply is None
    return RESPONSE, line.answers


@pytest.mark.parametrize("line", FOUND, ids=lambda line: f"{line[:30]!r}..{line[-20:]!r}")
@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_the_id_of_a_line_too_long_is_found_near_its_start_or_its_end(line: bytes, size: int) -> None:
    chunks = [line[at : at + size] for at in range(0, len(line), size)]
    first, second = frame(*chunks, b"\n", b"next\n", limit=9000)
    assert report_of(first) == FOUND[line]
    assert second == b"next"
    assert decode(line, Bounds(message_bytes=9000)) == first


@pytest.mark.parametrize(
    ("beginning", "reported"),
    [
        (b'{"result":{"', 0),
        (b'{"method":"m","params":{"', 0),
        (b'{"jsonrpc":"2.0","id":null,"result":{"', 0),
        (b'{"jsonrpc":"2.0","id":7,"result":{"', 1),
        (b'{"jsonrpc":"2.0","id":7,"x":{"', 1),
        (b'[{"id":7,"result":{"', 1),
        (b"{", 1),
        (b"", 1),
    ],
)
def test_a_line_too_long_is_reported_at_its_end_if_its_id_may_be_there(beginning: bytes, reported: int) -> None:
    framer = LineFramer(9000)
    assert framer.feed(beginning) == []
    assert len(framer.feed(b"x" * 9001)) == reported
    assert len(framer.feed(b"x" * 9000)) == 0
    assert len(framer.close()) == 1 - reported
    assert framer.close() == []


@pytest.mark.parametrize("limit", [1, 8, 20, 23, 24, 25, 30, 33, 34, 40])
def test_chunk_boundaries_do_not_matter_for_the_id_of_a_line_too_long(limit: int) -> None:
    line = b'{%b,"id":7,"method":"m","params":{}}' % V
    whole = frame(line + b"\n", limit=limit)
    assert frame(*(line[at : at + 1] for at in range(len(line))), b"\n", limit=limit) == whole
    assert whole == [decode(line, Bounds(message_bytes=limit))]


def test_only_the_ends_of_a_line_too_long_are_kept() -> None:
    framer = LineFramer(100_000)
    assert framer.feed(b'{"result":"' + b"x" * 100_000) == []
    for size in (1, 5000, 100_000) * 3:
        assert framer.feed(b"x" * size) == []
        assert len(framer._line) <= 8192
    [end] = framer.feed(b'","id":7}\n')
    assert isinstance(end, InvalidMessage)
    assert end.answers == 7


def test_a_line_of_too_many_blanks_is_refused() -> None:
    (invalid,) = frame(b" " * 9 + b"\n")
    assert is_too_long(invalid)


def test_the_framer_and_decode_have_the_same_limit() -> None:
    data = encode(Notification("m"))
    for limit in (len(data) - 1, len(data)):
        (line,) = frame(data + b"\r\n", limit=limit)
        whole = decode(data, Bounds(message_bytes=limit))
        assert (
            (line == whole)
            if isinstance(line, InvalidMessage)
            else (decode(line, Bounds(message_bytes=limit)) == whole)
        )
        assert isinstance(line, InvalidMessage) == (limit < len(data))


streams = st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b" ", b"a", b"bcd", b"12345678", b"123456789"]), max_size=12)


@given(streams.map(b"".join), st.lists(st.integers(0, 100)))
@settings(max_examples=300)
def test_chunk_boundaries_do_not_matter(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert frame(*(data[a:b] for a, b in pairwise(edges))) == frame(data)


@given(streams.map(b"".join))
@settings(max_examples=200)
def test_the_lines_are_the_same_as_by_splitting_the_whole_stream(data: bytes) -> None:
    lines = frame(data)
    expected = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    kept = [line for line in expected if line.strip() or len(line) > 8]
    assert len(lines) == len(kept)
    for line, whole in zip(lines, kept, strict=True):
        assert is_too_long(line) if len(whole) > 8 else line == whole


def test_a_long_line_byte_by_byte_is_one_line() -> None:
    framer = LineFramer(1 << 18)
    assert not any(framer.feed(b"x") for _ in range(1 << 18))
    assert framer.feed(b"\n") == [b"x" * (1 << 18)]


# The framer stores short pieces and long pieces in different ways.
pieces = st.lists(st.sampled_from([1, 100, 4096, 4097, 10_000]), min_size=1, max_size=10)


@given(st.lists(st.sampled_from([b"\n", b"\r\n", b"x", b"y" * 5000, b"z" * 13_000]), max_size=8), pieces)
@settings(max_examples=300)
def test_the_length_of_the_chunks_does_not_matter(parts: list[bytes], sizes: list[int]) -> None:
    data, chunks, at = b"".join(parts), [], 0
    while at < len(data):
        chunks.append(data[at : at + sizes[len(chunks) % len(sizes)]])
        at += len(chunks[-1])
    limit = 17_999  # 5000 + 13,000 bytes exceed it
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    found = frame(*chunks, limit=limit)
    assert len(found) == len([line for line in lines if line])
    for line, whole in zip(found, filter(None, lines), strict=True):
        assert is_too_long(line, limit) if len(whole) > limit else line == whole


@pytest.mark.parametrize("size", [8, 5000])
def test_a_cr_at_the_limit_is_judged_by_the_byte_that_follows(size: int) -> None:
    framer = LineFramer(size)
    assert framer.feed(b"x" * size + b"\r") == []
    assert framer.feed(b"") == []
    assert framer.feed(b"\n") == [b"x" * size]
    assert framer.feed(b"x" * size + b"\r") == []
    (invalid,) = framer.feed(b"x")
    assert is_too_long(invalid, size)


@pytest.mark.parametrize("sizes", [(1,), (10, 4097), (4096,), (5000, 5000, 1)])
def test_a_line_in_pieces_takes_little_more_memory_than_its_bytes(sizes: tuple[int, ...]) -> None:
    framer, length = LineFramer(1 << 18), 0
    for size in cycle(sizes):
        if length + size > 1 << 18:
            break
        assert framer.feed(b"x" * size) == []
        length += size
    assert sum(map(sys.getsizeof, (*framer._pieces, framer._line))) < 1.15 * length
    assert framer.feed(b"\n") == [b"x" * length]
    assert framer._pieces == []


@pytest.mark.parametrize("cut", range(25))
def test_several_lines_in_one_chunk_are_checked_for_length_one_by_one(cut: int) -> None:
    data = b"{123456}\n{1234567}\n{1}\n{}\n"
    first, second, *others = frame(data[:cut], data[cut:])
    assert first == b"{123456}"
    assert is_too_long(second)
    assert others == [b"{1}", b"{}"]


def test_a_framer_holds_the_bytes_of_the_line_that_has_not_ended() -> None:
    framer = LineFramer(100)
    assert framer.feed(b"{}\nabc") == [b"{}"]
    assert framer.held == 3
    assert framer.feed(b"\n") == [b"abc"]
    assert framer.held == 0
