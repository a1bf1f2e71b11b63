"""orjson and the standard library read and write JSON with the same outcomes, so orjson is optional."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
import sys
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_mcp.core import messages, parse, to_readable, to_text, writable

orjson: Any = pytest.importorskip("orjson")


@contextmanager
def without_orjson() -> Iterator[None]:
    installed, messages._orjson = messages._orjson, None
    try:
        yield
    finally:
        messages._orjson = installed


def outcome(do: Callable[[Any], object], given: object) -> tuple[str, str]:
    """The value as repr, which shows the types inside it, or the class of the error."""
    try:
        return "value", repr(do(given))
    except (TypeError, ValueError, RecursionError) as error:
        return "error", type(error).__name__


def outcome_of_both(do: Callable[[Any], object], given: object) -> tuple[str, str]:
    with without_orjson():
        expected = outcome(do, given)
    assert outcome(do, given) == expected
    return expected


TEXTS = [
    "", " ", "{}", " {} \n", "\x0c{}", "\ufeff{}", "\ufeff\ufeff{}", "{} {}", "[1,]", "[1e999,]", '{"a":1,}', "nul",
    "NaN", "-Infinity", "[Infinity]",
    "0", "-0", "-0.0", "0.0", "01", "1.", ".5", "+1", "-", "1e", "1e5", "1E400", "-1e999", "1e-999", "5e-324",
    "2.4703282292062327e-324", "1.7976931348623157e308", "1.7976931348623159e308", "0.1234567890123456789012345",
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616",
    "-9223372036854775808", "-9223372036854775809", "123456789012345678901234567890", "9" * 400, "9" * 5000,
    '{"a":[123456789012345678901234567890]}', "1" + "0" * 400 + ".0", "123456789012345678901234567890.5",
    '"\\ud800"', '"\\udc00"', '"\\ud83d\\ude00"', '"\\ude00\\ud83d"', '"a\x00b"', '"\\u0000"',
    '"\t"', '"\x7f\u2028\u2029"', '"\\x"',
    '{"a":1,"b":2,"a":3}', '{"":null}', '{"a":{"a":{"a":[[[]]]}}}', "[" * 500 + "]" * 500, "[" * 5000, "{1:2}", "'a'",
    '"' + "9" * 30 + '"', '["' + "9" * 30 + '",1.5,-2,true,false,null]', "[" + "1.5," * 2000 + "18446744073709551616]",
    "[" + "1.5," * 2000 + "null]", "[" + '{"a":[1.5]},' * 500 + "18446744073709551614]",
]  # fmt: skip


def read(data: bytes) -> tuple[object, bool]:
    """The value, and whether it can be written again as a whole."""
    value, doubtful = parse(data)
    return value, not doubtful or writable(value)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[:30])
def test_both_libraries_read_a_text_to_the_same_outcome(text: str) -> None:
    outcome_of_both(read, text.encode())


@pytest.mark.parametrize(
    "data", [b"\xff", b'"\xc0\x80"', b'"\xed\xa0\x80"', b'{"a":"\xe2\x28\xa1"}', b'"\xf4\x90\x80\x80"']
)
def test_text_that_is_not_utf_8_is_a_unicode_decode_error(data: bytes) -> None:
    assert outcome_of_both(read, data) == ("error", "UnicodeDecodeError")


def test_an_integer_too_long_for_64_bits_is_read_exactly() -> None:
    for number in (2**64, -(2**63) - 1, 10**30):
        assert parse(str(number).encode()) == (number, False)
        assert parse(b" " * 5000 + str(number).encode()) == (number, False)


@pytest.mark.parametrize("beside", [[], ["x" * 5000], [[{"a": 1}]] * 300], ids=["alone", "text", "objects"])
def test_an_integer_too_long_for_64_bits_is_read_exactly_at_any_place(beside: list[Any]) -> None:
    for at in range(20):
        for number in (2**63, 2**64, -(2**63) - 1):
            value = [*beside, "x" * at, number]
            assert parse(json.dumps(value).encode()) == (value, False)
            assert parse(json.dumps({"a": [value]}).encode()) == ({"a": [value]}, False)


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 3


class Name(str, enum.Enum):  # noqa: UP042  # the form before StrEnum existed
    ANN = "ann"


class Text(str):
    __slots__ = ()


@dataclasses.dataclass
class Point:
    x: int = 1


Pair = namedtuple("Pair", "a b")
CIRCULAR: list[Any] = []
CIRCULAR.append(CIRCULAR)


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


VALUES = [
    None, True, 0, -0.0, 1.0, 0.1, 1e16, 1e22, 1e-5, 5e-324, 1.7976931348623157e308, math.nan, math.inf, -math.inf,
    2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, float(2**63), -float(2**70),
    "", "null", "\x00\x1f\x7f\b\f\n\r\t\"\\/", "é\u2028\u2029\U0001f600", "\ud800", "a\udc00",
    [], {}, (), (1, [2, {"a": (3.5,)}]), [None, "null"], {"a": None}, {"a": [math.nan]}, {"a": {"b": {"c": math.inf}}},
    {1: 2}, {None: 1}, {True: 1}, {1.5: 1}, {(1,): 1}, {Text("k"): 1}, {Name.ANN: 1}, {"\ud800": 1},
    Colour.RED, [Colour.RED], Size.BIG, {"a": Size.BIG}, Name.ANN, [Name.ANN], Text("q"), [Text("q")],
    uuid.UUID(int=1), {"a": uuid.UUID(int=1)}, datetime.datetime(2026, 1, 1), datetime.date(2026, 1, 1),
    Point(), [Point()], orjson.Fragment(b"{}"), [orjson.Fragment(b"{}")],
    Pair(1, 2), OrderedDict(a=1), {1, 2}, frozenset("a"), b"x", bytearray(b"x"),
    memoryview(b"x"), object(), 1j, CIRCULAR, deep(200), deep(300), range(3), {"a": 1}.values(),
]  # fmt: skip


def written_and_read(value: object) -> object:
    """The value after it is written and read, so that the spelling of numbers does not matter."""
    return json.loads(to_text(value))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_both_libraries_write_a_value_to_the_same_outcome(value: object) -> None:
    outcome_of_both(written_and_read, value)
    if outcome(to_text, value) not in (
        ("error", "TypeError"),
        ("error", "RecursionError"),
    ):  # JSON cannot hold the value
        outcome_of_both(writable, value)


scalars = st.none() | st.booleans() | st.integers() | st.integers(2**62, 2**66) | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
)


@given(values)
def test_both_libraries_write_and_read_any_value_alike(value: object) -> None:
    kind, _ = outcome_of_both(written_and_read, value)
    if kind == "value":
        outcome_of_both(read, to_text(value))
        assert repr(parse(to_text(value))[0]) == repr(value)


LONG = 10_000


@pytest.fixture
def lower_limit_of_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit of 2 Mi characters, because the comparison of texts of that length takes minutes."""
    assert messages._LONG > LONG
    monkeypatch.setattr(messages, "_LONG", LONG)


LONG_TEXTS = [
    "x" * (LONG + 1), "\n" * 2 * LONG, "\U0001f600é\x00" * LONG, "x" * (LONG - 1) + "\U0001f600" * 2,
    "x" * (LONG - 1) + "\ud83d\ude00", "x" * LONG + "\udc00",
]  # fmt: skip


@pytest.mark.usefixtures("lower_limit_of_long_texts")
@pytest.mark.parametrize("text", LONG_TEXTS, ids=lambda text: ascii(text[LONG - 1 : LONG + 1]))
def test_both_libraries_write_a_long_text_to_the_same_bytes(text: str) -> None:
    for value in (
        text, [text], (text,), {"a": text}, {"a": [{}, {"b": text, "c": 2.5}, text, "\n"], "d": ["x" * LONG, text]},
        [[]] * 200 + [text], {text: text}, {"\n": text}, {1: text}, [text, 2**70], [text, math.nan], [Text(text)],
    ):  # fmt: skip
        outcome_of_both(to_text, value)


@pytest.mark.usefixtures("lower_limit_of_long_texts")
def test_a_circular_value_with_a_long_text_is_refused() -> None:
    endless: list[Any] = ["x" * 2 * LONG]
    endless.append(endless)
    assert outcome_of_both(to_text, endless) == ("error", "RecursionError")


@given(st.text('[]{}":,0123456789.eE+-\\ud8tfn \n\ufeff', max_size=30) | st.text(max_size=10))
def test_both_libraries_read_any_text_alike(text: str) -> None:
    outcome_of_both(read, text.encode("utf-8", "surrogatepass"))


def test_both_libraries_write_the_same_bytes_if_numbers_have_one_spelling() -> None:
    value = {"a": ['é\u2028\x00\x7f"\\/', 1, -7, True, None, {}, []], "": 2.5}
    with without_orjson():
        expected = to_text(value)
    assert to_text(value) == expected


def test_the_encoders_in_c_and_in_python_write_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"a": [1.5, "é", None]}
    with without_orjson():
        expected = to_text(value)
        monkeypatch.setattr(messages, "_in_c", None)
        monkeypatch.setattr(messages, "_pieces", messages._encoder(",", ":"))
        assert to_text(value) == expected


@pytest.mark.parametrize("value", [{"a": ['é"\n', 1, 2.5, None, {}, []]}, 1e-05, True, "a", 2**70])
def test_readable_json_has_blanks_and_only_necessary_escapes(value: object) -> None:
    assert to_readable(value) == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("value", [math.nan, {"a": math.inf}, 10**5000, {1, 2}, CIRCULAR], ids=type)
def test_readable_json_refuses_values_that_are_not_json(value: object) -> None:
    with pytest.raises((ValueError, TypeError, RecursionError)):
        to_readable(value)


def test_orjson_is_used_if_it_is_installed() -> None:
    assert messages._orjson is sys.modules["orjson"]
