"""Event streams: written events are read back in any chunks, and any stream is read by the rules of the format."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import Limits, Notification, UsageError, decode, encode
from trio_mcp.core.http import (
    KEEP_ALIVE,
    EventReader,
    Oversized,
    SseEvent,
    encode_event,
    encode_message,
    encode_messages,
    priming_event,
)


def read(data: bytes, limit: int = 1000) -> list[SseEvent | Oversized]:
    return EventReader(limit).feed(data)


# Writing.


@req("sse-07")
def test_a_message_is_written_as_a_message_event() -> None:
    assert encode_message(b'{"jsonrpc":"2.0"}') == b'event: message\ndata: {"jsonrpc":"2.0"}\n\n'


def test_a_message_without_an_id_writes_no_id_field_and_one_with_an_id_does() -> None:
    assert b"id:" not in encode_message(b"{}")
    assert encode_message(b"{}", "s/7") == b"event: message\nid: s/7\ndata: {}\n\n"


def test_a_priming_event_is_an_id_with_empty_data() -> None:
    assert priming_event("s/0") == b"event: message\nid: s/0\ndata: \n\n"
    assert priming_event("s/0", 500) == b"event: message\nid: s/0\nretry: 500\ndata: \n\n"


def test_every_other_event_has_its_own_name() -> None:
    assert encode_event(SseEvent(b"/messages?s=1", "endpoint")) == b"event: endpoint\ndata: /messages?s=1\n\n"


@pytest.mark.parametrize("text", ["a\u0085b", "a\u2028b", "a\u2029b", "\u2028\u2029\u0085", "ä€😀\u2028"])
def test_characters_that_old_clients_split_lines_at_are_escaped(text: str) -> None:
    message = Notification("notifications/message", {"data": text})
    written = encode_message(encode(message))
    assert len(written.decode().rstrip("\n").splitlines()) == 2  # those clients use str.splitlines() by mistake
    (event,) = read(written)
    assert isinstance(event, SseEvent)
    assert decode(event.data, Limits()) == message


@given(st.text())
@settings(max_examples=60)
def test_escaping_changes_no_other_character(text: str) -> None:
    message = Notification("m", {"text": text.encode("utf-8", "ignore").decode()})
    (event,) = read(encode_message(encode(message)), 100_000)
    assert isinstance(event, SseEvent)
    assert decode(event.data, Limits()) == message


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (SseEvent(b"", id="a\nb"), "an event id"),
        (SseEvent(b"", id="a\rb"), "an event id"),
        (SseEvent(b"", id="a\0b"), "an event id"),
        (SseEvent(b"", id="ä"), "an event id"),
        (SseEvent(b"", id="\ud800"), "an event id"),
        (SseEvent(b"", id="a "), "an event id"),
        (SseEvent(b"", id=" a"), "an event id"),
        (SseEvent(b"", id="a\x7f"), "an event id"),
        (SseEvent(b"", id="a" * 1025), "an event id"),
        (SseEvent(b"", event="a\nb"), "an event name"),
        (SseEvent(b"", event="a\rb"), "an event name"),
        (SseEvent(b"", event=""), "an event name"),
        (SseEvent(b"", retry=-1), "retry"),
    ],
)
def test_an_event_that_cannot_be_read_back_is_not_written(event: SseEvent, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        encode_event(event)


names = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=8)
ids = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=8).map(str.strip)
events = st.builds(
    SseEvent,
    data=st.binary(max_size=30).map(lambda data: data.replace(b"\r", b"")),
    event=names,
    id=st.none() | ids,
    retry=st.none() | st.integers(0, 10**15 - 1),
)


@given(st.lists(events, max_size=5), st.data())
@settings(max_examples=100)
def test_written_events_are_read_back_in_any_chunks(written: list[SseEvent], data: st.DataObject) -> None:
    stream = KEEP_ALIVE.join(map(encode_event, written))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    reader = EventReader(1000)
    found: list[SseEvent | Oversized] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert found == written


def test_line_ends_of_any_kind_in_data_come_back_as_lf() -> None:
    assert read(encode_event(SseEvent(b"a\r\nb\rc\nd\n"))) == [SseEvent(b"a\nb\nc\nd\n")]


# Reading any stream.

STREAMS: list[tuple[bytes, list[SseEvent]]] = [
    (b"data: x\n\n", [SseEvent(b"x")]),
    (b"data: x\r\n\r\n", [SseEvent(b"x")]),
    (b"data: x\r\r", [SseEvent(b"x")]),
    (b"data: x\r\n\r", [SseEvent(b"x")]),
    (b"data: x\n\rdata: y\r\n\n", [SseEvent(b"x"), SseEvent(b"y")]),
    (b"data: 1\rdata: 2\ndata: 3\r\n\r\n", [SseEvent(b"1\n2\n3")]),
    (b"\xef\xbb\xbfdata: x\n\n", [SseEvent(b"x")]),
    (b"\xef\xbb\xbf: comment\ndata: x\n\n", [SseEvent(b"x")]),
    (b"\xef\xbb\xbf\xef\xbb\xbfdata: x\n\n", []),  # only one byte order mark is removed
    (b"data: x\n\n\xef\xbb\xbfdata: y\n\n", [SseEvent(b"x")]),  # and only at the start
    (b"data:x\n\ndata: x\n\ndata:  x\n\n", [SseEvent(b"x"), SseEvent(b"x"), SseEvent(b" x")]),
    (b"data\n\ndata\ndata\n\ndata:\n\n", [SseEvent(b""), SseEvent(b"\n"), SseEvent(b"")]),
    (b"event: ping\ndata: x\n\ndata: y\n\n", [SseEvent(b"x", "ping"), SseEvent(b"y")]),
    (b"event: a\nevent: b\ndata: x\n\n", [SseEvent(b"x", "b")]),
    (b"event: a\nevent\ndata: x\n\n", [SseEvent(b"x")]),
    (b"event: ping\n\ndata: x\n\n", [SseEvent(b"x")]),  # without data there is no event, and the name is dropped
    (b"id: 1\nid: 2\ndata: x\n\n", [SseEvent(b"x", id="2")]),
    (b"id\ndata: x\n\n", [SseEvent(b"x", id="")]),
    (b"id: 1\nid: a\0b\ndata: x\n\n", [SseEvent(b"x", id="1")]),
    (b"Data: x\ndata : x\nfoo: x\nnonsense\n:data: x\n\n", []),  # field names are exact
    (b"data: a:b: c\n\n", [SseEvent(b"a:b: c")]),
    (b"data: a\x0bb\x0c\x1c\x85\xe2\x80\xa8c\n\n", [SseEvent(b"a\x0bb\x0c\x1c\x85\xe2\x80\xa8c")]),
    (b"data: x\n", []),
    (b"data: x\n\ndata: y", [SseEvent(b"x")]),
    (b"\n\n\n", []),
    (b"retry: 7\nretry: x\ndata: x\n\n", [SseEvent(b"x", retry=7)]),
]


@pytest.mark.parametrize(("stream", "expected"), STREAMS)
def test_streams_are_read_by_the_rules_of_the_format(stream: bytes, expected: list[SseEvent]) -> None:
    assert read(stream) == expected


@pytest.mark.parametrize(("stream", "expected"), STREAMS)
def test_streams_are_read_the_same_for_any_cut_and_byte_by_byte(stream: bytes, expected: list[SseEvent]) -> None:
    for cut in range(len(stream) + 1):
        reader = EventReader(1000)
        assert reader.feed(stream[:cut]) + reader.feed(b"") + reader.feed(stream[cut:]) == expected
    reader = EventReader(1000)
    assert [event for at in range(len(stream)) for event in reader.feed(stream[at : at + 1])] == expected


@req("http-112")
@pytest.mark.parametrize("comment", [b":", b": keep-alive", b":data: no", b":" + b"x" * 5000, b": \xff"])
def test_comments_of_any_length_are_ignored_in_any_place(comment: bytes) -> None:
    stream = comment + b"\n\n" + comment + b"\ndata: 1\n" + comment + b"\r\ndata: 2\n\n" + comment + b"\n"
    expected = [SseEvent(b"1\n2")]
    assert read(stream, limit=100) == expected
    reader = EventReader(100)
    assert [event for at in range(len(stream)) for event in reader.feed(stream[at : at + 1])] == expected
    assert reader.comments == 4


def test_data_that_is_not_utf8_is_refused_when_the_message_is_decoded() -> None:
    (event,) = read(b'data: {"x": "\xff\xfe"}\n\n')
    assert event == SseEvent(b'{"x": "\xff\xfe"}')
    assert isinstance(event, SseEvent)
    assert "not UTF-8" in getattr(decode(event.data, Limits()), "why", "")


def test_invalid_utf8_in_an_event_name_is_replaced() -> None:
    assert read(b"event: \xff\ndata: x\n\n") == [SseEvent(b"x", "\ufffd")]


@given(st.lists(st.sampled_from([b"data", b"id", b"event", b"retry", b": ", b":", b"\r", b"\n", b"\0", b"\xff", b"1"])))
@settings(max_examples=150)
def test_any_bytes_give_the_same_in_one_piece_and_byte_by_byte(pieces: list[bytes]) -> None:
    stream = b"".join(pieces)
    whole, single = EventReader(10), EventReader(10)
    assert whole.feed(stream) == [event for at in range(len(stream)) for event in single.feed(stream[at : at + 1])]
    assert (whole.last_event_id, whole.retry) == (single.last_event_id, single.retry)


# Resuming.


def test_the_last_event_id_starts_empty_and_survives_events_without_one() -> None:
    reader = EventReader(1000)
    assert reader.last_event_id == ""
    reader.feed(b"id: 1\ndata: x\n\n")
    reader.feed(b"data: y\n\n: comment\n\n")
    assert reader.last_event_id == "1"
    reader.feed(b"id\ndata: z\n\n")
    assert reader.last_event_id == ""


@pytest.mark.parametrize("id", [b"\xc3\xa4", b"\xff", b"a\x01", b"a\tb", b"a\x7f", b"a\0", b"a ", b"  a", b"a" * 1025])
def test_an_id_that_no_header_could_hold_is_ignored(id: bytes) -> None:
    reader = EventReader(10_000)
    reader.feed(b"id: 1\ndata: x\n\n")
    assert reader.feed(b"id: " + id + b"\ndata: y\n\n") == [SseEvent(b"y")]
    assert reader.last_event_id == "1"


@pytest.mark.parametrize("id", ["a b", "!~", "a" * 1024])
def test_an_id_that_a_header_can_hold_counts(id: str) -> None:
    reader = EventReader(10_000)
    assert reader.feed(priming_event(id)) == [SseEvent(b"", id=id)]
    assert reader.last_event_id == id


def test_an_id_counts_without_data_and_with_empty_data() -> None:
    reader = EventReader(1000)
    assert reader.feed(b"id: 1\n\n") == []
    assert reader.last_event_id == "1"
    assert reader.feed(priming_event("2")) == [SseEvent(b"", id="2")]
    assert reader.last_event_id == "2"


def test_an_id_does_not_count_before_its_event_has_ended() -> None:
    stream = b"id: 1\ndata: x\n\nid: 2\ndata: y\n\n"
    for cut in range(len(stream)):
        reader = EventReader(1000)
        seen = reader.feed(stream[:cut])
        assert reader.last_event_id == ("", "1", "2")[len(seen)]


def test_retry_is_surfaced_with_and_without_data() -> None:
    reader = EventReader(1000)
    assert reader.retry is None
    assert reader.feed(b"retry: 500\n\n") == []
    assert reader.retry == 500
    assert reader.feed(b"retry: 0\ndata: x\n\n") == [SseEvent(b"x", retry=0)]
    reader.feed(b"data: y\n\n")
    assert reader.retry == 0


@pytest.mark.parametrize("value", [b"", b"5s", b"-5", b"1.5", b" 5", "٣".encode(), b"9" * 16, b"9" * 5000])
def test_retry_that_is_no_plain_number_is_ignored(value: bytes) -> None:
    reader = EventReader(10_000)
    reader.feed(b"retry: 5\nretry: " + value + b"\n\n")
    assert reader.retry == 5


# Limits.


def read_in_chunks(stream: bytes, size: int, limit: int) -> tuple[EventReader, list[SseEvent | Oversized]]:
    reader = EventReader(limit)
    return reader, [event for at in range(0, len(stream), size) for event in reader.feed(stream[at : at + size])]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    "long",
    [
        b"data: " + b"x" * 11,
        b"data: 12345\ndata: 123456",
        b"id: " + b"x" * 100,
        b"nonsense" * 3,
        b"data\n" * 19 + b"data",
    ],
)
def test_an_event_over_the_limit_is_skipped_and_reported_once(size: int, long: bytes) -> None:
    stream = b"data: 1\n\nid: 7\n" + long + b"\n: comment\ndata: more\n" + long + b"\n\ndata: 2\n\n"
    reader, found = read_in_chunks(stream, size, limit=10)
    assert found == [SseEvent(b"1"), Oversized(10), SseEvent(b"2")]
    assert reader.last_event_id == "7"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_event_of_exactly_the_limit_is_read(size: int) -> None:
    stream = encode_event(SseEvent(b"0123456789"))
    assert read_in_chunks(stream, size, limit=10)[1] == [SseEvent(b"0123456789")]


def test_the_id_after_an_oversized_line_counts_too() -> None:
    reader, found = read_in_chunks(b"data: 01234567890\nid: 8\n\n", 3, limit=10)
    assert found == [Oversized(10)]
    assert reader.last_event_id == "8"


@pytest.mark.parametrize("id", [None, "7-1"])
@pytest.mark.parametrize("text", [b"{}", b"", b"a\nb", b"a\rb", b"a\r\nb\n", "\u2028\x85".encode()])
def test_encode_message_equals_encode_event(text: bytes, id: str | None) -> None:
    escaped = text.replace("\u2028".encode(), rb"\u2028").replace("\x85".encode(), rb"\u0085")
    assert encode_message(text, id) == encode_event(SseEvent(escaped, id=id))


TEXTS = [b"{}", b"", b"a\nb", b"a\rb", b"a\r\nb\n", b"[1]", "\u2028\x85".encode(), "\u00e4".encode()]


@given(st.lists(st.sampled_from(TEXTS), max_size=4), st.booleans())
def test_several_messages_are_encoded_like_single_ones(texts: list[bytes], named: bool) -> None:
    ids = [f"7-{number}" for number in range(len(texts))] if named else None
    each = map(encode_message, texts, ids or [None] * len(texts))
    assert encode_messages(texts, ids) == b"".join(each)


@pytest.mark.parametrize("ids", [[], ["7-0"], ["7-0", "7-1", "7-2"]])
def test_the_number_of_ids_must_match_the_number_of_messages(ids: list[str]) -> None:
    with pytest.raises(ValueError, match="zip"):
        encode_messages([b"{}", b"[]"], ids)


def test_an_id_that_no_header_could_hold_is_refused_for_a_message() -> None:
    for id in ("a\nb", "\u00e4", " a", "x" * 1025):
        with pytest.raises(UsageError, match="an event id"):
            encode_message(b"{}", id)
        with pytest.raises(UsageError, match="an event id"):
            encode_messages([b"{}", b"{}"], ["7-1", id])
        with pytest.raises(UsageError, match="an event id"):
            priming_event(id)
