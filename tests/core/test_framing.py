"""The line framer: any chunking, any line length, and what a stream may end with."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_mcp.core.errors import INVALID_REQUEST
from trio_mcp.core.jsonrpc import Invalid, LineFramer, Notification, decode, encode
from trio_mcp.core.jsonrpc import Limits as Bounds


def frame(*chunks: bytes, limit: int = 8, close: bool = True) -> list[bytes | Invalid]:
    framer = LineFramer(limit)
    lines = [line for chunk in chunks for line in framer.feed(chunk)]
    return lines + framer.close() if close else lines


def is_too_long(line: bytes | Invalid, limit: int = 8) -> bool:
    if not isinstance(line, Invalid):
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
        # A CR by itself ends no line, and only the last of several belongs to the end.
        (b"a\rb\n", [b"a\rb"]),
        (b"a\r\r\n", [b"a\r"]),
        (b"\ra\n", [b"\ra"]),
        # Nor does anything else that str.splitlines() would take for an end.
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


def test_a_line_is_handed_over_by_its_newline_and_not_before() -> None:
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
        assert message == Notification("m", {"a": [1]}) if size == len(whole) else isinstance(message, Invalid)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_line_of_just_the_limit_passes_and_the_terminator_does_not_count(end: bytes) -> None:
    assert frame(b"12345678" + end) == [b"12345678"]
    assert frame(b"123456789" + end) == frame(b"123456789")
    assert is_too_long(frame(b"123456789" + end)[0])
    assert is_too_long(frame(b"12345678\rx" + end)[0])


def test_a_line_too_long_is_answered_at_once_and_once_and_the_next_line_is_whole_again() -> None:
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


def test_too_many_blanks_are_a_line_too_long() -> None:
    (invalid,) = frame(b" " * 9 + b"\n")
    assert is_too_long(invalid)


def test_what_the_framer_lets_through_is_what_decode_lets_through() -> None:
    data = encode(Notification("m"))
    for limit in (len(data) - 1, len(data)):
        (line,) = frame(data + b"\r\n", limit=limit)
        whole = decode(data, Bounds(message_bytes=limit))
        assert (line == whole) if isinstance(line, Invalid) else (decode(line, Bounds(message_bytes=limit)) == whole)
        assert isinstance(line, Invalid) == (limit < len(data))


streams = st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b" ", b"a", b"bcd", b"12345678", b"123456789"]), max_size=12)


@given(streams.map(b"".join), st.lists(st.integers(0, 100)))
@settings(max_examples=300)
def test_chunk_boundaries_do_not_matter(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert frame(*(data[a:b] for a, b in pairwise(edges))) == frame(data)


@given(streams.map(b"".join))
@settings(max_examples=200)
def test_every_line_is_what_splitting_the_whole_stream_gives(data: bytes) -> None:
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
