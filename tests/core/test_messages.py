"""Messages read from bytes and written to bytes: each malformed shape with its error, and round trips."""

from __future__ import annotations

import json
import pickle
import sys
from bisect import bisect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import (
    ABSENT,
    INVALID_PARAMS,
    INVALID_REQUEST,
    PARSE_ERROR,
    REVISIONS,
    Batch,
    CachedResult,
    Error,
    InvalidMessage,
    Limits,
    Message,
    Notification,
    Peer,
    PeerMistake,
    Request,
    Response,
    Role,
    UsageError,
    decode,
    encode,
    holds_more_values,
    outside_strings,
    prepare,
    prepared_progress,
)
from trio_mcp.core import messages as core_messages

LIMITS = Limits()


@pytest.fixture(scope="module", params=["json", "orjson"], autouse=True)
def codec(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with the standard library and with orjson."""
    there = core_messages._orjson
    if request.param == "json":
        core_messages._orjson = None
    elif there is None:
        pytest.skip("orjson is not installed")
    yield
    core_messages._orjson = there


@pytest.mark.parametrize("value", [-1, "1 MB", None, True, float("nan")])
def test_a_limit_must_be_a_number_of_at_least_0(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^Limits\.message_bytes must be a number, 0 or more, got "):
        Limits(message_bytes=value)
    for good in (0, 1.5, float("inf")):
        assert Limits(parked_seconds=good).parked_seconds == good


def read(data: bytes | str, limits: Limits = LIMITS) -> Message:
    return decode(data.encode() if isinstance(data, str) else data, limits)


def refused(data: bytes | str, limits: Limits = LIMITS) -> InvalidMessage:
    message = read(data, limits)
    assert isinstance(message, InvalidMessage)
    return message


def error_of(data: bytes | str, limits: Limits = LIMITS) -> tuple[int, Any]:
    """The code and the id of the error that answers `data`."""
    message = refused(data, limits)
    assert message.reply is not None
    assert message.answers is None
    return message.reply.code, message.reply.id


def nested(levels: int) -> str:
    """A request `levels` deep, the envelope included."""
    return '{"jsonrpc":"2.0","id":7,"method":"m","params":{"a":' + "[" * (levels - 2) + "]" * (levels - 2) + "}}"


# Well-formed messages.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"jsonrpc":"2.0","id":1,"method":"m"}', Request(1, "m", {})),
        ('{"jsonrpc":"2.0","id":"1","method":"m","params":{}}', Request("1", "m", {})),
        ('{"jsonrpc":"2.0","id":"","method":"","params":{"a":[1,null]}}', Request("", "", {"a": [1, None]})),
        ('{"jsonrpc":"2.0","id":-0,"method":"m"}', Request(0, "m", {})),
        ('{"jsonrpc":"2.0","id":9007199254740993,"method":"m"}', Request(9007199254740993, "m", {})),
        ('{"params":{"b":2},"method":"m","id":1,"jsonrpc":"2.0"}', Request(1, "m", {"b": 2})),
        ('{"jsonrpc":"2.0","method":"m"}', Notification("m", {})),
        ('{"jsonrpc":"2.0","method":"m","params":{"a":1e308}}', Notification("m", {"a": 1e308})),
        ('{"jsonrpc":"2.0","id":1,"result":{}}', Response(1, {})),
        ('{"jsonrpc":"2.0","id":"x","result":{"a":{"b":[]}}}', Response("x", {"a": {"b": []}})),
        ('{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"no"}}', Error(1, -32601, "no")),
        ('{"jsonrpc":"2.0","id":"x","error":{"code":0,"message":"","data":1}}', Error("x", 0, "", 1)),
        # Whitespace, a byte order mark, escapes.
        (' \t\r\n{"jsonrpc":"2.0",\r\n"method":"m"}\n ', Notification("m", {})),
        ('\ufeff {"jsonrpc":"2.0","method":"m"}', Notification("m", {})),
        ('{"jsonrpc":"2.0","method":"m","params":{"a":"\\ud83d\\ude00"}}', Notification("m", {"a": "😀"})),
        ('{"jsonrpc":"2.0","method":"m","params":{"a":"\\uD83D\\uDE00"}}', Notification("m", {"a": "😀"})),
        ('{"jsonrpc":"2.0","method":"m","params":{"a":"C:\\\\ud800"}}', Notification("m", {"a": "C:\\ud800"})),
        ('{"jsonrpc":"2.0","method":"m","params":{"a":"\\u0000\x7f\u2028"}}', Notification("m", {"a": "\0\x7f\u2028"})),
        ('{"\\u006asonrpc":"2.0","method":"m"}', Notification("m", {})),
    ],
)
def test_well_formed_messages_of_every_kind_are_read(data: str, message: Message) -> None:
    assert read(data) == message


@req("core-05")
@pytest.mark.parametrize("id", [0, 1, -5, 2**64 - 1, -(2**63), "", "1", "ä"])
def test_an_id_keeps_its_value_and_its_type(id: int | str) -> None:
    request = read(json.dumps({"jsonrpc": "2.0", "id": id, "method": "m"}))
    assert isinstance(request, Request)
    answer = json.loads(encode(Response(request.id, {})))
    assert answer["id"] == id
    assert type(answer["id"]) is type(id)


@req("core-14")
def test_unknown_members_are_ignored_in_the_envelope_and_kept_inside() -> None:
    assert read('{"jsonrpc":"2.0","id":1,"result":{"new":[1,{"x":null}]},"trace":"t"}') == Response(
        1, {"new": [1, {"x": None}]}
    )
    assert read('{"jsonrpc":"2.0","id":1,"method":"m","params":{"_meta":{"a/b":1},"new":2},"x":{}}') == Request(
        1, "m", {"_meta": {"a/b": 1}, "new": 2}
    )


@req("core-17")
@pytest.mark.parametrize("data", [None, False, 0, 1.5, "", "text", [], [1], {}, {"a": None}])
def test_error_data_of_any_type_is_exposed_unchanged(data: Any) -> None:
    message = read(json.dumps({"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "m", "data": data}}))
    assert message == Error(1, 1, "m", data)
    assert isinstance(message, Error)
    assert type(message.data) is type(data)


def test_error_data_that_is_absent_is_not_null() -> None:
    assert read('{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"m"}}') == Error(1, 1, "m", ABSENT)
    assert read('{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"m","data":null}}') != Error(1, 1, "m", ABSENT)
    assert repr(ABSENT) == "ABSENT"
    assert not ABSENT


@req("core-10")
@pytest.mark.parametrize("id", ['"id":null,', ""])
def test_an_error_without_an_id_is_accepted(id: str) -> None:
    assert read(f'{{"jsonrpc":"2.0",{id}"error":{{"code":-32700,"message":"m"}}}}') == Error(None, -32700, "m")


def test_a_missing_and_a_wrong_jsonrpc_member_have_different_errors() -> None:
    for data, why in (('"jsonrpc":"1.0",', 'jsonrpc must be "2.0"'), ("", 'the member "jsonrpc": "2.0" is missing')):
        message = read(f'{{{data}"id":1,"method":"m"}}')
        assert isinstance(message, InvalidMessage)
        assert message.why == why


def test_null_params_count_as_absent() -> None:
    assert read('{"jsonrpc":"2.0","id":1,"method":"m","params":null}') == Request(1, "m", {})
    assert read('{"jsonrpc":"2.0","method":"m","params":null}') == Notification("m", {})


def test_the_last_of_two_members_with_the_same_name_counts() -> None:
    assert read('{"jsonrpc":"2.0","id":1,"id":2,"method":"m"}') == Request(2, "m", {})


# Text that is not JSON.


@req("core-27")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"\xef\xbb\xbf",
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        b"{",
        b"}",
        b"{}}",
        b"{} {}",
        b'{"jsonrpc":"2.0","id":1,"method":"m"',
        b'{"jsonrpc":"2.0","id":1,"method":"m",}',
        b"{'jsonrpc':'2.0'}",
        b'{"a":01}',
        b'{"a":.5}',
        b'{"a":+1}',
        b'{"a":0x1}',
        b'{"a":True}',
        b'{"a":"\n"}',
        b'{"a":"\x00"}',
        b'{"a":"\\x"}',
        b'{"a":"\\u12"}',
        b'{"a":1}//',
        b"Starting server on stdio...",
        b"\x0b{}",
        b"\xc2\xa0{}",
    ],
)
def test_text_that_is_not_json_is_a_parse_error_without_an_id(data: bytes) -> None:
    assert error_of(data) == (PARSE_ERROR, None)


@req("core-27")
@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_of_python_are_not_json(constant: str) -> None:
    assert error_of(f'{{"jsonrpc":"2.0","id":1,"method":"m","params":{{"a":{constant}}}}}') == (PARSE_ERROR, None)
    # The same after a number that needs a second reading.
    assert error_of(f'{{"jsonrpc":"2.0","id":1,"method":"m","params":{{"a":[1e999,{constant}]}}}}') == (
        PARSE_ERROR,
        None,
    )


@req("core-19", "core-27")
@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"\xc3",
        b"\xc0\xaf",
        b"\xed\xa0\x80",  # a surrogate
        b"\xed\xa0\xbd\xed\xb8\x80",  # a pair of surrogates, as in CESU-8
        b"\xf4\x90\x80\x80",
    ],
)
def test_bytes_that_are_not_utf_8_are_a_parse_error(text: bytes) -> None:
    assert error_of(b'{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":"' + text + b'"}}') == (PARSE_ERROR, None)


@req("core-19")
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_other_encodings_are_a_parse_error(encoding: str) -> None:
    assert error_of('{"jsonrpc":"2.0","id":1,"method":"m"}'.encode(encoding)) == (PARSE_ERROR, None)


# JSON that is not a message.

V = '"jsonrpc":"2.0"'


@req("core-28")
@pytest.mark.parametrize(
    ("data", "id"),
    [
        ("null", None),
        ("true", None),
        ("1", None),
        ("1.5", None),
        ('"text"', None),
        ("{}", None),
        (f"{{{V}}}", None),
        (f'{{{V},"id":1}}', 1),
        (f'{{{V},"id":"a","params":{{}}}}', "a"),
        (f'{{{V},"id":null}}', None),
        # The method.
        (f'{{{V},"id":1,"method":null}}', 1),
        (f'{{{V},"id":"a","method":1}}', "a"),
        (f'{{{V},"id":1,"method":["m"]}}', 1),
        (f'{{{V},"method":1,"params":"bar"}}', None),
        (f'{{{V},"method":null}}', None),
        # Both a method and an outcome.
        (f'{{{V},"id":1,"method":"m","result":{{}}}}', 1),
        (f'{{{V},"id":1,"method":"m","error":{{"code":1,"message":"m"}}}}', 1),
        (f'{{{V},"id":1,"method":null,"result":{{}}}}', 1),
        # An invalid id together with invalid params.
        (f'{{{V},"id":1.5,"method":"m","params":[]}}', None),
    ],
)
def test_json_that_is_not_a_message_is_an_invalid_request(data: str, id: int | str | None) -> None:
    assert error_of(data) == (INVALID_REQUEST, id)


@req("core-01", "core-28")
@pytest.mark.parametrize(
    "version", ["", '"jsonrpc":"1.0",', '"jsonrpc":2.0,', '"jsonrpc":2,', '"jsonrpc":null,', '"jsonrpc":["2.0"],']
)
def test_a_message_without_the_exact_jsonrpc_member_is_refused(version: str) -> None:
    assert error_of(f'{{{version}"id":1,"method":"m"}}') == (INVALID_REQUEST, 1)
    # Without the member this is not a notification either, so it gets an error.
    assert error_of(f'{{{version}"method":"m"}}') == (INVALID_REQUEST, None)
    assert refused(f'{{{version}"id":1,"result":{{}}}}').answers == 1


@req("core-05", "core-06", "core-28")
@pytest.mark.parametrize("id", ["null", "true", "false", "1.0", "1.5", "1e2", "[]", "[1]", "{}"])
def test_an_id_that_is_neither_string_nor_integer_is_refused(id: str) -> None:
    assert error_of(f'{{{V},"id":{id},"method":"m"}}') == (INVALID_REQUEST, None)


@req("core-30")
@pytest.mark.parametrize("params", ["[]", "[1]", '"text"', "1", "1.5", "true", "false"])
def test_params_that_are_not_an_object_are_invalid_params(params: str) -> None:
    assert error_of(f'{{{V},"id":1,"method":"m","params":{params}}}') == (INVALID_PARAMS, 1)


@req("core-16")
@pytest.mark.parametrize(
    "rest",
    ['"params":[]', '"params":"text"', '"params":1', '"params":{"a":1e999}', '"params":{"a":"\\ud800"}', '"result":{}'],
)
def test_a_malformed_notification_is_never_answered(rest: str) -> None:
    message = refused(f'{{{V},"method":"m",{rest}}}')
    assert message.reply is None
    assert message.answers is None
    assert message.why


@req("core-11", "core-12", "core-13")
@pytest.mark.parametrize(
    "outcome",
    [
        '"result":{},"error":{"code":1,"message":"m"}',
        '"result":{},"error":null',
        '"result":null,"error":{"code":1,"message":"m"}',
        '"result":null',
        '"result":[]',
        '"result":"text"',
        '"result":1',
        '"result":true',
        '"error":null',
        '"error":"text"',
        '"error":[1,"m"]',
        '"error":{}',
        '"error":{"code":1}',
        '"error":{"message":"m"}',
        '"error":{"code":"1","message":"m"}',
        '"error":{"code":1.0,"message":"m"}',
        '"error":{"code":true,"message":"m"}',
        '"error":{"code":null,"message":"m"}',
        '"error":{"code":1,"message":null}',
        '"error":{"code":1,"message":["m"]}',
    ],
)
def test_a_malformed_response_is_not_answered_and_keeps_its_id(outcome: str) -> None:
    for id, answers in (("7", 7), ('"a"', "a"), ("1.5", None), ("true", None), ("{}", None)):
        message = refused(f'{{{V},"id":{id},{outcome}}}')
        assert (message.reply, message.answers) == (None, answers)


@req("core-11")
@pytest.mark.parametrize("id", ["", '"id":null,', '"id":1.0,', '"id":true,', '"id":[1],'])
def test_a_result_without_a_usable_id_is_refused_without_a_reply(id: str) -> None:
    message = refused(f'{{{V},{id}"result":{{}}}}')
    assert (message.reply, message.answers) == (None, None)


@pytest.mark.parametrize("id", ["1.5", "false", "[]", "{}"])
def test_an_error_with_an_impossible_id_is_refused_without_a_reply(id: str) -> None:
    message = refused(f'{{{V},"id":{id},"error":{{"code":1,"message":"m"}}}}')
    assert (message.reply, message.answers) == (None, None)


@pytest.mark.parametrize(
    "data",
    ["{", "null", b"\xff", nested(200), f'{{{V},"id":null,"method":"sec\\nret"}}', f'{{{V},"id":1,"method":[]}}'],
)
def test_an_error_reply_is_one_line_without_the_text_of_the_message(data: bytes | str) -> None:
    message = refused(data)
    assert message.reply is not None
    assert message.reply.message == message.why
    assert message.reply.data is ABSENT
    assert len(message.why.splitlines()) == 1
    assert "ret" not in message.why
    assert read(encode(message.reply)) == message.reply


@pytest.mark.parametrize(
    ("data", "begins"),
    [
        ("Starting up...", "'Starting up...'"),
        ("\x1b[32mready\n", r"'\x1b[32mready'"),
        ('INFO {"jsonrpc":"2.0"}', """'INFO {"jsonrpc":"2.0"}'"""),
        ("x" * 1000, f"'{'x' * 56}..."),
        ("", None),
        ('{"token":"secret"', None),
        ('["secret"', None),
        ("null", None),
    ],
)
def test_the_start_of_text_that_is_not_json_is_shown_to_our_side_only(data: str, begins: str | None) -> None:
    message = refused(data)
    assert message.reply is not None
    shown = "" if begins is None else f"; it begins with {begins}"
    assert message.why == message.reply.message + shown
    (mistake,) = Peer(Role.CLIENT).receive(message, 0)
    assert mistake == PeerMistake(message.why)


# Values that we cannot represent.


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" * 400 + ".0", "1" * (sys.get_int_max_str_digits() + 1)])
def test_a_number_that_is_too_large_is_refused_with_the_id(number: str) -> None:
    assert error_of(f'{{{V},"id":7,"method":"m","params":{{"a":[{number},"x"]}}}}') == (INVALID_REQUEST, 7)
    assert refused(f'{{{V},"id":7,"result":{{"a":{number}}}}}').answers == 7
    assert error_of(f'{{{V},"id":{number},"method":"m"}}') == (INVALID_REQUEST, None)
    assert error_of(f'{{{V},"id":{number},"method":"m"') == (PARSE_ERROR, None)


@pytest.mark.parametrize("number", ["1e999", "1" * (sys.get_int_max_str_digits() + 1)])
@pytest.mark.parametrize("text", ["[%s,]", '{"a":%s,"b":}', '{"id":7,"params":[%s, nul]}', "\ufeff [[%s],'x']"])
def test_a_number_that_is_too_large_before_invalid_json_is_a_parse_error(text: str, number: str) -> None:
    assert error_of(text % number) == (PARSE_ERROR, None)


def test_a_number_that_is_too_large_does_not_affect_the_rest_of_a_batch() -> None:
    batch = read(f'[{{{V},"id":1,"method":"m","params":{{"a":1e999}}}},{{{V},"id":2,"method":"m","params":{{"a":5}}}}]')
    assert isinstance(batch, Batch)
    first, second = batch.items
    assert isinstance(first, InvalidMessage)
    assert first.reply is not None
    assert first.reply.id == 1
    assert second == Request(2, "m", {"a": 5})


def test_a_number_that_is_too_small_is_read_as_zero() -> None:
    assert read(f'{{{V},"method":"m","params":{{"a":1e-999}}}}') == Notification("m", {"a": 0.0})


@req("core-19")
@pytest.mark.parametrize(
    "text", ["\\ud800", "\\uDFFF", "\\ude00\\ud83d", "\\\\\\ud83d x", "\\\\\\\\\\ud83d", "\\ud83dä"]
)
def test_half_a_surrogate_pair_is_refused_with_the_id(text: str) -> None:
    assert error_of(f'{{{V},"id":7,"method":"m","params":{{"a":"{text}"}}}}') == (INVALID_REQUEST, 7)
    assert error_of(f'{{{V},"id":7,"method":"m","params":{{"{text}":1}}}}') == (INVALID_REQUEST, 7)
    assert error_of(f'{{{V},"id":7,"method":"{text}"}}') == (INVALID_REQUEST, 7)
    assert refused(f'{{{V},"id":7,"result":{{"a":["{text}"]}}}}').answers == 7


def test_an_id_that_cannot_be_sent_back_is_not_repeated() -> None:
    assert error_of(f'{{{V},"id":"\\ud800","method":"m"}}') == (INVALID_REQUEST, None)
    assert refused(f'{{{V},"id":"\\ud800","result":{{}}}}').answers is None


def test_the_length_of_a_message_is_limited() -> None:
    data = f'{{{V},"id":7,"method":"m"}}'
    assert read(data, Limits(message_bytes=len(data))) == Request(7, "m", {})
    assert error_of(data + " ", Limits(message_bytes=len(data))) == (INVALID_REQUEST, 7)
    assert f"{len(data)} bytes" in refused(data + " ", Limits(message_bytes=len(data))).why


def test_an_id_longer_than_the_limit_is_refused_and_not_repeated() -> None:
    limits = Limits(id_length=3)
    assert read(f'{{{V},"id":"äbc","method":"m"}}', limits) == Request("äbc", "m")
    assert read(f'{{{V},"id":123456,"method":"m"}}', limits) == Request(123456, "m")
    for rest in ('"method":"m"', '"method":5', '"method":"m","params":{"a":1e999}', '"method":"m","params":7', '"x":1'):
        assert error_of(f'{{{V},"id":"abcd",{rest}}}', limits) == (INVALID_REQUEST, None)
    assert "3 characters" in refused(f'{{{V},"id":"abcd","method":"m"}}', limits).why
    for rest in ('"result":{}', '"error":{"code":1,"message":"m"}', '"result":7'):
        message = refused(f'{{{V},"id":"abcd",{rest}}}', limits)
        assert (message.reply, message.answers) == (None, None)
    batch = read(f'[{{{V},"id":"abcd","method":"m"}},{{{V},"id":"abc","method":"m"}}]', limits)
    assert isinstance(batch, Batch)
    assert batch.items[1:] == (Request("abc", "m"),)


@pytest.mark.parametrize("id", [2**64, -(2**63) - 1, 10**30, 7 * 10**4000])
def test_an_id_beyond_64_bits_is_refused_and_not_repeated(id: int) -> None:
    for rest in ('"method":"m"', '"method":5', '"method":"m","params":{"a":1e999}', '"method":"m","params":7', '"x":1'):
        assert error_of(f'{{{V},"id":{id},{rest}}}') == (INVALID_REQUEST, None)
    assert "64 bits" in refused(f'{{{V},"id":{id},"method":"m"}}').why
    for rest in ('"result":{}', '"error":{"code":1,"message":"m"}', '"result":7'):
        message = refused(f'{{{V},"id":{id},{rest}}}')
        assert (message.reply, message.answers) == (None, None)


# Values.

ENVELOPE = 6  # the message, its four members and an array


def structured(inside: str) -> str:
    return f'{{{V},"id":7,"method":"m","params":{{"a":{inside}}}}}'


@pytest.mark.parametrize(
    ("inside", "values"),
    [
        ("1", 1),
        ("[]", 2),
        ("[1]", 2),
        ("[1,2]", 3),
        ("{}", 2),
        ('{"b":1}', 2),
        ('{"b":[],"c":""}', 4),
        ('[["a,b"]]', 3),
    ],
)
def test_a_message_with_too_many_values_is_refused_with_its_id(inside: str, values: int) -> None:
    data, most = structured(inside), ENVELOPE - 1 + values
    assert isinstance(read(data, Limits(values=most)), Request)
    message = refused(data, Limits(values=most - 1))
    assert message.why == f"the message has more than {most - 1} values (Limits.values)"
    assert message.reply == Error(7, INVALID_REQUEST, message.why)


@pytest.mark.parametrize(
    ("data", "reply", "answers"),
    [
        (f'{{{V},"id":"a","method":"m","params":[[],[],[],[],[]]}}', "a", None),
        (f'{{"method":"m","params":[[],[],[],[],[]],{V},"id":8}}', 8, None),
        (f'{{{V},"id":{"9" * 18},"method":"m","params":[[],[],[],[],[]]}}', int("9" * 18), None),
        (f'{{{V},"id":5,"result":{{"a":[[],[],[],[],[]]}}}}', ABSENT, 5),
        (f'{{{V},"result":{{"a":[[],[],[],[],[]]}},"id":5}}', ABSENT, 5),
        (f'{{{V},"error":{{"code":1,"message":"m","data":[[],[],[],[]]}}}}', ABSENT, None),
        ("[[],[],[],[],[],[],[]]", None, None),
        ("[[[[[[[[[[[[[", None, None),
        ('"a""b""c""d""e""f""g""h""i""j""k""l""m",,,,,,,,,,,,', None, None),
    ],
)
def test_the_id_is_found_in_a_message_with_too_many_values(data: str, reply: Any, answers: Any) -> None:
    message = refused(data, Limits(values=8))
    assert "more than 8 values" in message.why
    assert (ABSENT if message.reply is None else message.reply.id) == reply
    assert message.answers == answers


def test_the_values_of_a_batch_are_counted_together() -> None:
    batch = f'[{{{V},"method":"m"}},{{{V},"method":"m"}},{{{V},"method":"m"}}]'
    assert isinstance(read(batch, Limits(values=10)), Batch)
    assert "more than 9 values" in refused(batch, Limits(values=9)).why


def count_of_values(text: str) -> int:
    """The number of values as `decode` counts them, found with a slow scan of each character."""
    count, inside, escaped = 1, False, False
    for each in text:
        if escaped:
            escaped = False
        elif inside and each == "\\":
            escaped = True
        elif each == '"':
            inside = not inside
        elif not inside and each in "[{,":
            count += 1
    return count


counted = st.recursive(
    st.integers() | st.text('"\\[{,a', max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('"\\[{,a', max_size=3), inner, max_size=5),
)


@given(counted)
def test_values_are_counted_outside_strings_only(value: Any) -> None:
    text = json.dumps(value)
    count = count_of_values(text)
    assert not holds_more_values(text.encode(), count)
    assert holds_more_values(text.encode(), count - 1)


@given(counted, st.sampled_from(["x" * 200_000, "[{,\n" * 60_000, "x\\" * 200_000, "\\" * 3, '"' * 5_000]))
def test_values_are_counted_correctly_beside_a_long_text(value: Any, long: str) -> None:
    text = json.dumps([value, f"{long}{long}", value])
    count = count_of_values(json.dumps([value, "", value]))
    assert not holds_more_values(text.encode(), count)
    assert holds_more_values(text.encode(), count - 1)


@pytest.mark.parametrize(
    "text",
    ["x" * 100_000, '"' + "x" * 100_000, "[" * 20_000, '""' * 50_000, '"\\"' * 50_000, '["' + "\\" * 100_000 + '"]'],
)
def test_the_text_outside_strings_is_exact_or_unknown(text: str) -> None:
    found = outside_strings(text.encode())
    assert found is None or found.count(b"[") == count_of_values(text) - 1


@given(st.text('[]{}":,a1 ', max_size=30))
def test_at_least_the_values_in_the_structure_of_any_text_are_counted(text: str) -> None:
    for most in range(1, count_of_values(text)):
        assert holds_more_values(text.encode(), most)


def test_without_a_limit_values_are_not_counted() -> None:
    assert isinstance(read(structured("[" + "1," * 300_000 + "1]"), Limits(values=inf)), Request)  # type: ignore[arg-type]


LONG = "1." + "7" * 98 + "e-300"


@pytest.mark.parametrize("number", ["9" * 4000, LONG, "-0." + "1" * 3998])
def test_the_total_length_of_long_numbers_is_limited(number: str) -> None:
    few = structured(
        "[" + ",".join([number] * (core_messages.LONG_NUMBERS // len(number))) + ',"' + "x" * 70_000 + '"]'
    )
    assert isinstance(read(few), Request)
    # orjson reads doubles quickly at any length, so it has no limit for them.
    if core_messages._orjson is None or number.isdecimal():
        message = refused(structured("[" + ",".join([number] * (70_000 // len(number))) + "]"))
        assert "65536 characters" in message.why
        assert message.reply is not None
        assert message.reply.id == 7


def test_numbers_of_usual_length_have_no_limit_of_total_length() -> None:
    number = "-1." + "7" * 37 + "e-308"
    assert isinstance(read(structured("[" + ",".join([number] * 10_000) + "]")), Request)
    assert isinstance(read(structured("[" + ",".join(["9" * 40] * 10_000) + "]")), Request)


def test_a_number_that_is_too_large_in_a_long_message_is_refused_with_the_id() -> None:
    for number in ("1e999", "9" * 5000, f"{'9' * 30},1e999"):
        data = f'{{{V},"method":"m","params":{{"b":"{"x" * 70_000}","a":[{number}]}},"id":7}}'
        assert error_of(data) == (INVALID_REQUEST, 7)


def test_a_result_of_eight_mebibytes_is_read() -> None:
    result = Response(1, {"blob": "A" * (8 * 1024 * 1024)})
    assert read(encode(result)) == result


def test_a_message_that_is_nested_too_deep_is_refused_with_its_id() -> None:
    assert isinstance(read(nested(LIMITS.depth)), Request)
    assert error_of(nested(LIMITS.depth + 1)) == (INVALID_REQUEST, 7)
    assert f"{LIMITS.depth} levels" in refused(nested(LIMITS.depth + 1)).why
    too_deep = "[" * LIMITS.depth + "]" * LIMITS.depth
    assert refused(f'{{{V},"method":"m","params":{{"a":{too_deep}}}}}').reply is None
    assert refused(f'{{{V},"id":3,"result":{{"a":{too_deep}}}}}').answers == 3


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("levels", [LIMITS.depth - 1, LIMITS.depth, LIMITS.depth + 1])
def test_the_limit_of_depth_is_the_same_beside_a_long_text(opening: str, levels: int) -> None:
    inner = opening * (levels - 2) + "1" + ("]" if opening == "[" else "}") * (levels - 2)
    data = f'{{{V},"id":7,"method":"m","params":{{"a":{inner},"b":"{"x" * 10_000}"}}}}'
    assert isinstance(read(data), Request) == (levels <= LIMITS.depth)


@pytest.mark.parametrize("limit", range(1, 8))
def test_the_shortest_nested_objects_are_counted(limit: int) -> None:
    def levels(number: int) -> str:
        return '{"":' * (number - 1) + "{}" + "}" * (number - 1)

    for number in range(1, 12):
        why = refused(levels(number), Limits(depth=limit)).why
        assert ("levels" in why) == (number > limit)


def test_brackets_side_by_side_or_in_strings_do_not_count_as_depth() -> None:
    for times in (200, 5000):
        wide = {"a": [{"b": []}] * times, "c": "[{" * times}
        assert read(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "m", "params": wide})) == Request(1, "m", wide)


@pytest.mark.parametrize("levels", [1_000, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_that_is_too_deep_for_the_parser_is_refused(opening: str, levels: int) -> None:
    message = read(opening * levels + "1" + ("]" if opening == "[" else "}") * levels)
    if isinstance(message, Batch):  # newer parsers can follow; the array that they read has no valid message
        (message,) = message.items
    assert isinstance(message, InvalidMessage)
    assert message.reply is not None
    assert (message.reply.code, message.reply.id) == (INVALID_REQUEST, None)


def test_nesting_that_nearly_fills_the_stack_never_raises() -> None:
    limits = Limits(depth=1_000_000)

    def nest(levels: int) -> Message:
        return read(nested(levels).replace("[]", '["\\ud83d\\ude00"]'), limits)

    def try_depths_around_the_end() -> None:
        end = bisect(range(200_000), False, lo=10, key=lambda levels: isinstance(nest(levels), InvalidMessage))
        seen = set()
        for levels in range(end - 50, end + 50):
            message = nest(levels)
            seen.add(type(message))
            assert isinstance(message, Request) or (isinstance(message, InvalidMessage) and message.reply)
        assert seen == {Request, InvalidMessage}

    # In a thread the depth of the stack does not depend on the runner, and a tracer lost at its end is lost there only.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(try_depths_around_the_end).result()


# Batches.


@req("batch-01")
def test_an_array_is_a_batch_and_each_member_is_read_by_itself() -> None:
    batch = read(
        f'[{{{V},"id":1,"method":"a"}},{{{V},"method":"b"}},{{{V},"id":2,"result":{{}}}},'
        f'{{{V},"id":3,"error":{{"code":1,"message":"m"}}}},1,[],[{{{V},"method":"c"}}],{{"id":4,"method":"d"}}]'
    )
    assert isinstance(batch, Batch)
    assert batch.items[:4] == (Request(1, "a"), Notification("b"), Response(2, {}), Error(3, 1, "m"))
    replies = [item.reply for item in batch.items[4:] if isinstance(item, InvalidMessage)]
    assert [(reply.code, reply.id) for reply in replies if reply] == [
        (INVALID_REQUEST, None),
        (INVALID_REQUEST, None),
        (INVALID_REQUEST, None),
        (INVALID_REQUEST, 4),
    ]


def test_a_malformed_request_of_a_batch_is_answered_a_notification_is_not() -> None:
    batch = read(f'[{{{V},"method":"a"}},{{{V},"method":"b","params":1}},{{{V},"id":1,"method":"c","params":1}}]')
    assert isinstance(batch, Batch)
    ok, bad_note, bad_request = batch.items
    assert ok == Notification("a")
    assert isinstance(bad_note, InvalidMessage)
    assert bad_note.reply is None
    assert isinstance(bad_request, InvalidMessage)
    assert bad_request.reply is not None
    assert (bad_request.reply.code, bad_request.reply.id) == (INVALID_PARAMS, 1)


def test_an_empty_array_is_an_invalid_request() -> None:
    assert error_of("[]") == (INVALID_REQUEST, None)
    assert error_of(" [ ] ") == (INVALID_REQUEST, None)


def test_a_batch_longer_than_the_limit_is_refused_as_a_whole() -> None:
    limits = Limits(batch=2)
    note = f'{{{V},"method":"m"}}'
    assert read(f"[{note},{note}]", limits) == Batch((Notification("m"), Notification("m")))
    assert error_of(f"[{note},{note},{note}]", limits) == (INVALID_REQUEST, None)
    assert "2 messages" in refused(f"[{note},{note},{note}]", limits).why


def test_the_depth_of_each_message_of_a_batch_counts_separately() -> None:
    batch = read(f"[{nested(LIMITS.depth)},{nested(LIMITS.depth + 1)}]")
    assert isinstance(batch, Batch)
    assert isinstance(batch.items[0], Request)
    assert isinstance(batch.items[1], InvalidMessage)


# To bytes.


@req("core-01", "core-05", "core-12", "core-15")
@pytest.mark.parametrize(
    ("message", "data"),
    [
        (Request(1, "m"), b'{"jsonrpc":"2.0","id":1,"method":"m"}'),
        (Request("a", "m", {"b": 1.5}), b'{"jsonrpc":"2.0","id":"a","method":"m","params":{"b":1.5}}'),
        (Notification("m"), b'{"jsonrpc":"2.0","method":"m"}'),
        (Notification("m", {"b": None}), b'{"jsonrpc":"2.0","method":"m","params":{"b":null}}'),
        (Response(1, {}), b'{"jsonrpc":"2.0","id":1,"result":{}}'),
        (Error(1, -1, "no"), b'{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"no"}}'),
        (Error(1, -1, "no", None), b'{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"no","data":null}}'),
    ],
)
def test_every_kind_of_message_is_written_compactly(
    message: Request | Notification | Response | Error, data: bytes
) -> None:
    assert encode(message) == data
    assert encode(prepare(message, null_id=False)) == data


@req("core-10")
@pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
def test_an_error_without_an_id_has_null_only_before_2025_11_25(revision: Any) -> None:
    error = prepare(Error(None, PARSE_ERROR, "m"), null_id=revision.unreadable_id_is_null)
    written = json.loads(encode(error))
    assert ("id" in written) == (revision.name < "2025-11-25")
    assert written.get("id") is None
    assert json.loads(encode(Batch((error,)))) == [written]
    assert "id" in json.loads(encode(Error(None, PARSE_ERROR, "m")))


@req("batch-02")
def test_a_batch_is_written_as_one_array() -> None:
    batch = Batch((Request(1, "m"), Notification("n")))
    assert encode(batch) == b'[{"jsonrpc":"2.0","id":1,"method":"m"},{"jsonrpc":"2.0","method":"n"}]'


@req("core-19")
def test_text_is_written_as_utf_8_and_newlines_are_escaped() -> None:
    data = encode(Notification("m", {"a\n": "ä€😀\u2028\r\n"}))
    assert data == '{"jsonrpc":"2.0","method":"m","params":{"a\\n":"ä€😀\u2028\\r\\n"}}'.encode()
    assert b"\n" not in data
    assert b"\r" not in data


CIRCULAR: dict[str, Any] = {}
CIRCULAR["secret"] = CIRCULAR


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (Response(1, {"secret": float("nan")}), "JSON"),
        (Response(1, {"secret": [float("-inf")]}), "JSON"),
        (Response(1, {"secret": "secret\ud800"}), "surrogate"),
        (Response(1, {"secret\udfff": 1}), "surrogate"),
        (Response(1, {"content": [{"type": "text", "text": "secret\ud800"}]}), "surrogate"),
        (Request("secret\ud800", "m"), "surrogate"),
        (Response(1, {"secret": {1, 2}}), "set"),
        (Response(1, {"secret": b"secret"}), "bytes"),
        (Response(1, {"secret": {("secret",): 1}}), "tuple"),
        (Error(1, 1, "m", object()), "object"),
        (Notification("m", {"secret": ABSENT}), "Absent"),
        (Response(1, CIRCULAR), "contains itself"),
        (Response(1, {"secret": 10 ** (sys.get_int_max_str_digits() + 1)}), "digits"),
    ],
)
def test_a_value_that_cannot_be_written_is_named_but_not_shown(message: Any, names: str) -> None:
    with pytest.raises(UsageError, match=names) as caught:
        encode(message)
    assert type(message).__name__ in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None


BAD: Any = None


@req("core-05", "core-06", "core-13")
@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Request(BAD, "m"), "Request.id must be an integer or a string, not NoneType"),
        (Request(True, "m"), "Request.id must be an integer or a string, not bool"),
        (Request(1.0, "m"), "Request.id must be an integer or a string, not float"),  # type: ignore[arg-type]
        (Request(1, BAD), "Request.method must be a string, not NoneType"),
        (Request(1, "m", [1]), "Request.params must be an object, not list"),  # type: ignore[arg-type]
        (Notification(1), "Notification.method must be a string, not int"),  # type: ignore[arg-type]
        (Notification("m", BAD), "Notification.params must be an object, not NoneType"),
        (Response(BAD, {}), "Response.id must be an integer or a string, not NoneType"),
        (Response(1, "text"), "Response.result must be an object, not str"),  # type: ignore[arg-type]
        (Error(1.5, 1, "m"), "Error.id must be an integer or a string or null, not float"),  # type: ignore[arg-type]
        (Error(1, True, "m"), "Error.code must be an integer, not bool"),
        (Error(1, 1.0, "m"), "Error.code must be an integer, not float"),  # type: ignore[arg-type]
        (Error(1, 1, BAD), "Error.message must be a string, not NoneType"),
        (InvalidMessage("why"), "InvalidMessage is not a message that can be sent"),
        (Batch(()), "a batch must have at least one message"),
        (Batch((InvalidMessage("why"),)), "InvalidMessage is not a message that can be sent"),
        (Batch((Batch((Notification("m"),)),)), "Batch is not a message that can be sent"),  # type: ignore[arg-type]
        ({"jsonrpc": "2.0", "method": "m"}, "dict is not a message that can be sent"),
    ],
)
def test_an_outgoing_message_with_a_wrong_member_is_refused(message: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        encode(message)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    "message",
    [
        Request(1, "m", {"a": 1}),
        Notification("m", {"a": 1}),
        Response("x", {"a": 1}),
        Error(1, 2, "m", {"a": 1}),
        Error(None, 2, 'null, {"jsonrpc":"2.0","id":null,'),
        Response(1, {"quoted": {"jsonrpc": "2.0", "id": None, "error": {}}}),
    ],
)
def test_a_prepared_message_is_equal_and_has_the_same_bytes(message: Any) -> None:
    other = attrs.evolve(message)
    assert prepare(message) is message
    assert (message, repr(message)) == (other, repr(other))
    assert encode(message) == encode(other)
    assert decode(encode(message), LIMITS) == message
    assert encode(Batch((message, other))) == encode(Batch((other, message)))
    assert pickle.loads(pickle.dumps(message)) == message
    assert encode(attrs.evolve(prepare(Notification("m")), method="n")) == encode(Notification("n"))


def test_a_prepared_message_is_not_written_again() -> None:
    result: dict[str, Any] = {"a": [1]}
    message = prepare(Response(1, result))
    result["a"].append(float("nan"))
    assert encode(message) == b'{"jsonrpc":"2.0","id":1,"result":{"a":[1]}}'
    assert encode(Batch((message,))) == b'[{"jsonrpc":"2.0","id":1,"result":{"a":[1]}}]'
    with pytest.raises(UsageError, match="JSON"):
        prepare(message)


class InconsistentDict(dict[str, Any]):
    """A dict whose `get` does not agree with its content."""

    def get(self, name: str, default: Any = None) -> Any:
        return [{"type": "text", "text": "something else"}]


_LONE_TEXT = {"type": "text", "text": "t"}


@pytest.mark.parametrize(
    "result",
    [
        *[{"content": [{"type": "text", "text": text}]} for text in ("", 'é"\\\n\0\u2028\U0001f600', "t" * 5000)],
        {"content": [{"text": "members in the other order", "type": "text"}]},
        InconsistentDict(content=[{"type": "text", "text": "t"}]),
        {"content": []},
        {"content": [_LONE_TEXT, _LONE_TEXT]},
        {"content": (_LONE_TEXT,)},
        {"content": _LONE_TEXT},
        {"content": ["type"]},
        {"content": [InconsistentDict(_LONE_TEXT)]},
        {"contents": [_LONE_TEXT]},
        {"content": [_LONE_TEXT], "isError": True},
        {"content": [{**_LONE_TEXT, "_meta": {}}]},
        {"content": [{"type": "text", "text": 1}]},
        {"content": [{"type": "text", "tex": "t"}]},
        {"content": [{"type": "image", "text": "t"}]},
    ],
)
def test_a_result_with_one_text_is_written_like_any_result(result: dict[str, Any]) -> None:
    more = CachedResult({"_meta": {"m": 1}})
    assert json.loads(encode(Response(1, result)))["result"] == json.loads(json.dumps(result))
    if type(result) is dict:
        assert json.loads(encode(prepare(Response(1, result), more)))["result"] == json.loads(
            json.dumps({**result, **more})
        )


def test_an_answer_to_a_string_id_is_written_like_one_to_a_number() -> None:
    more = CachedResult({"_meta": {"m": 1}})
    for result in ({"content": []}, CachedResult({"content": []})):
        by_number, by_text = (encode(prepare(Response(id, result), more)) for id in (1, "é"))
        assert by_text == by_number.replace(b'"id":1', '"id":"é"'.encode())


@pytest.mark.parametrize("token", [7, -(10**30), "a", 'é"\\\n\u2028\U0001f600', ""])
@pytest.mark.parametrize("reached", [0, -1, 10**30, 0.0, -0.0, 1.5, 1e-05, 5e-324, 1e16, 1e22, 1.7976931348623157e308])
@pytest.mark.parametrize(("total", "text"), [(None, None), (10, None), (2.5, 'é"\\\n\x00\x7f'), (None, ""), (0, "")])
def test_progress_is_written_like_any_notification(
    token: int | str, reached: float, total: float | None, text: str | None
) -> None:
    note = prepared_progress(token, reached, total, text)
    given = {"progressToken": token, "progress": reached, "total": total, "message": text}
    params = {name: value for name, value in given.items() if value is not None}
    assert note._bytes
    assert note == Notification("notifications/progress", params)
    assert repr(json.loads(encode(note))) == repr(json.loads(encode(Notification(note.method, note.params))))
    assert b"\n" not in encode(note)


@pytest.mark.parametrize(
    ("token", "reached", "text"),
    [("\ud800", 1, None), (1, 1, "\udc00"), (1, 10**5000, None)],
    ids=["token", "text", "digits"],
)
def test_progress_that_cannot_be_written_is_refused_by_prepare(
    token: int | str, reached: int, text: str | None
) -> None:
    note = prepared_progress(token, reached, None, text)
    assert not note._bytes
    with pytest.raises(UsageError, match="this Notification cannot be written as JSON"):
        prepare(note)


def test_the_error_about_an_object_without_json_tells_how_to_write_it() -> None:
    with pytest.raises(UsageError, match=r"this Request cannot be written as JSON: .*object.*dataclasses\.asdict"):
        encode(Request(1, "tools/call", {"arguments": {"order": object()}}))


@pytest.mark.parametrize("more", [None, CachedResult({"_meta": {"é": 1}})])
@pytest.mark.parametrize("params", [{}, {"a": "é", "b": [1]}])
@pytest.mark.parametrize("method", ["m", "é", 'a"b\n'])
def test_a_request_that_is_written_in_parts_has_the_same_bytes(
    method: str, params: dict[str, Any], more: CachedResult | None
) -> None:
    whole = Request(7, method, {**params, **(more or {})})
    made = prepare(Request(7, method, params), more)
    assert made == whole
    assert encode(made) == encode(whole)
    assert decode(encode(made), LIMITS) == whole


@pytest.mark.parametrize("method", [5, None, ["m"], "\ud800"])
def test_a_method_that_is_not_text_is_refused_in_a_request_of_parts(method: Any) -> None:
    with pytest.raises(UsageError, match=r"Request\.method must be a string|surrogate"):
        prepare(Request(7, method, {"a": 1}))


# Any bytes, and round trips.

texts = st.text(st.characters(codec="utf-8"), max_size=8)
ids = st.integers(-(2**63), 2**64 - 1) | texts
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=3)
singles = st.one_of(
    st.builds(Request, ids, texts, objects),
    st.builds(Notification, texts, objects),
    st.builds(Response, ids, objects),
    st.builds(Error, ids | st.none(), st.integers(), texts, values | st.just(ABSENT)),
)
messages = singles | st.builds(Batch, st.lists(singles, min_size=1, max_size=3).map(tuple))


def written(message: Any, null_id: bool) -> bytes:
    for each in message.items if isinstance(message, Batch) else (message,):
        prepare(each, null_id=null_id)
    return encode(message)


@given(messages, st.booleans())
@settings(max_examples=150)
def test_a_message_that_is_written_is_read_back_equal(message: Any, null_id: bool) -> None:
    data = written(message, null_id)
    assert b"\n" not in data
    assert decode(data, LIMITS) == message
    # Python's equality is wider than that of JSON: the second writing distinguishes 1, 1.0 and true.
    assert written(decode(data, LIMITS), null_id) == data


@given(messages)
@settings(max_examples=60)
def test_escaped_and_spaced_json_is_read_the_same(message: Any) -> None:
    spaced = json.dumps(json.loads(encode(message)), ensure_ascii=True, indent=1)
    assert read(spaced) == message


@given(st.binary(max_size=60))
@settings(max_examples=150)
def test_any_bytes_are_read_to_a_message_without_an_exception(data: bytes) -> None:
    assert isinstance(decode(data, LIMITS), Message)


PIECES = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"\\",
    b"\\ud800",
    b"1e999",
    b"NaN",
    b"null",
    b"1.0",
    b"true",
    b"\xff",
]
PIECES += [b'"id"', b'"method"', b'"result"', b'"error"', b'"jsonrpc":"2.0"', b'"params":', b'"code"', b'"message"']


@given(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join) | st.lists(st.sampled_from(PIECES)).map(b",".join))
@settings(max_examples=150)
def test_any_pieces_of_json_are_read_to_a_message_without_an_exception(data: bytes) -> None:
    assert isinstance(decode(data, LIMITS), Message)


@given(values)
@settings(max_examples=100)
def test_any_json_is_read_to_a_message_without_an_exception(value: Any) -> None:
    assert isinstance(read(json.dumps(value)), Message)


@given(st.data(), messages)
@settings(max_examples=200)
def test_a_damaged_message_is_read_and_its_error_can_be_sent(data: st.DataObject, message: Any) -> None:
    text = encode(message)
    at = data.draw(st.integers(0, len(text)))
    removed = data.draw(st.integers(0, 4))
    inserted = data.draw(st.sampled_from([b"", *PIECES]) | st.binary(max_size=3))
    got = decode(text[:at] + inserted + text[at + removed :], LIMITS)
    for item in got.items if isinstance(got, Batch) else (got,):
        if isinstance(item, InvalidMessage):
            assert item.why
            if item.reply is not None:
                assert decode(encode(item.reply), LIMITS) == item.reply
                assert item.answers is None
        else:
            assert decode(encode(item), LIMITS) == item


keys = st.sampled_from(["jsonrpc", "id", "method", "params", "result", "error", "x"])
envelopes: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    keys, st.sampled_from(["2.0", "m", 1, 1.5, None, True, {}, [], {"code": 1, "message": "m"}])
)


@req("core-11", "core-16", "core-28")
@given(envelopes)
@settings(max_examples=300)
def test_each_malformed_envelope_gets_the_reply_that_is_due(value: dict[str, Any]) -> None:
    message = read(json.dumps(value))
    if not isinstance(message, InvalidMessage):
        assert json.loads(written(message, "id" in value)).items() <= {"params": {}, **value}.items()
        return
    response = "method" not in value and ("result" in value or "error" in value)
    notification = value.get("jsonrpc") == "2.0" and isinstance(value.get("method"), str) and "id" not in value
    assert (message.reply is None) == (response or notification)
    id = value.get("id") if type(value.get("id")) in (int, str) else None
    assert message.answers == (id if response else None)
    if message.reply is not None:
        assert message.reply.id == id


class Raises(dict[str, Any]):
    def __init__(self, error: BaseException) -> None:
        super().__init__(a=1)
        self._error = error

    def items(self) -> Any:
        raise self._error


def test_a_generator_exit_raised_while_writing_becomes_a_usage_error() -> None:
    with pytest.raises(UsageError, match="an object in it raised GeneratorExit"):
        prepare(Error(1, 1, "", Raises(GeneratorExit())))
    for error in (KeyError("a"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            prepare(Error(1, 1, "", Raises(error)))
