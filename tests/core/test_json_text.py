"""orjson and the standard library: the same outcome on all, whichever of them is there."""

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
    there, messages._orjson = messages._orjson, None
    try:
        yield
    finally:
        messages._orjson = there


def outcome(do: Callable[[Any], object], given: object) -> tuple[str, str]:
    """What came of it, with the type of everything in it; of an error only its kind."""
    try:
        return "value", repr(do(given))
    except (TypeError, ValueError, RecursionError) as error:
        return "error", type(error).__name__


def both(do: Callable[[Any], object], given: object) -> tuple[str, str]:
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
    """The value, and whether all of it can be written again."""
    value, doubtful = parse(data)
    return value, not doubtful or writable(value)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[:30])
def test_a_text_is_read_to_the_same_value_or_refused_alike(text: str) -> None:
    both(read, text.encode())


@pytest.mark.parametrize(
    "data", [b"\xff", b'"\xc0\x80"', b'"\xed\xa0\x80"', b'{"a":"\xe2\x28\xa1"}', b'"\xf4\x90\x80\x80"']
)
def test_what_is_not_utf_8_is_refused_as_that(data: bytes) -> None:
    assert both(read, data) == ("error", "UnicodeDecodeError")


def test_an_integer_too_long_for_64_bits_is_read_exactly() -> None:
    for number in (2**64, -(2**63) - 1, 10**30):
        assert parse(str(number).encode()) == (number, False)
        assert parse(b" " * 5000 + str(number).encode()) == (number, False)


@pytest.mark.parametrize("beside", [[], ["x" * 5000], [[{"a": 1}]] * 300], ids=["alone", "text", "objects"])
def test_an_integer_too_long_for_64_bits_is_found_wherever_it_stands(beside: list[Any]) -> None:
    for at in range(20):
        for number in (2**63, 2**64, -(2**63) - 1):
            value = [*beside, "x" * at, number]
            assert parse(json.dumps(value).encode()) == (value, False)
            assert parse(json.dumps({"a": [value]}).encode()) == ({"a": [value]}, False)


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 3


class Name(str, enum.Enum):  # noqa: UP042  # as it was written before there was StrEnum
    ANN = "ann"


class Text(str):
    __slots__ = ()


@dataclasses.dataclass
class Point:
    x: int = 1


Pair = namedtuple("Pair", "a b")
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


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
    memoryview(b"x"), object(), 1j, ENDLESS, deep(200), deep(300), range(3), {"a": 1}.values(),
]  # fmt: skip


def said(value: object) -> object:
    """What is written, as a reader has it: of how a number is spelled nothing is left."""
    return json.loads(to_text(value))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_written_to_the_same_or_refused_alike(value: object) -> None:
    both(said, value)
    if outcome(to_text, value) not in (("error", "TypeError"), ("error", "RecursionError")):  # else it was never read
        both(writable, value)


scalars = st.none() | st.booleans() | st.integers() | st.integers(2**62, 2**66) | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
)


@given(values)
def test_any_value_is_written_and_read_alike(value: object) -> None:
    kind, _ = both(said, value)
    if kind == "value":
        both(read, to_text(value))
        assert repr(parse(to_text(value))[0]) == repr(value)


LONG = 10_000


@pytest.fixture
def texts_are_long_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit in use is 2 Mi characters, and comparing such texts takes minutes."""
    assert messages._LONG > LONG
    monkeypatch.setattr(messages, "_LONG", LONG)


LONG_TEXTS = [
    "x" * (LONG + 1), "\n" * 2 * LONG, "\U0001f600é\x00" * LONG, "x" * (LONG - 1) + "\U0001f600" * 2,
    "x" * (LONG - 1) + "\ud83d\ude00", "x" * LONG + "\udc00",
]  # fmt: skip


@pytest.mark.usefixtures("texts_are_long_sooner")
@pytest.mark.parametrize("text", LONG_TEXTS, ids=lambda text: ascii(text[LONG - 1 : LONG + 1]))
def test_a_long_text_is_written_to_the_same_byte_wherever_it_stands(text: str) -> None:
    for value in (
        text, [text], (text,), {"a": text}, {"a": [{}, {"b": text, "c": 2.5}, text, "\n"], "d": ["x" * LONG, text]},
        [[]] * 200 + [text], {text: text}, {"\n": text}, {1: text}, [text, 2**70], [text, math.nan], [Text(text)],
    ):  # fmt: skip
        both(to_text, value)


@pytest.mark.usefixtures("texts_are_long_sooner")
def test_a_long_text_is_found_in_what_has_no_end() -> None:
    endless: list[Any] = ["x" * 2 * LONG]
    endless.append(endless)
    assert both(to_text, endless) == ("error", "RecursionError")


@given(st.text('[]{}":,0123456789.eE+-\\ud8tfn \n\ufeff', max_size=30) | st.text(max_size=10))
def test_any_text_is_read_alike(text: str) -> None:
    both(read, text.encode("utf-8", "surrogatepass"))


def test_text_is_the_same_to_the_byte_where_numbers_have_one_spelling() -> None:
    value = {"a": ['é\u2028\x00\x7f"\\/', 1, -7, True, None, {}, []], "": 2.5}
    with without_orjson():
        expected = to_text(value)
    assert to_text(value) == expected


def test_without_the_encoder_in_c_the_slow_one_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"a": [1.5, "é", None]}
    with without_orjson():
        expected = to_text(value)
        monkeypatch.setattr(messages, "_in_c", None)
        monkeypatch.setattr(messages, "_pieces", messages._encoder(",", ":"))
        assert to_text(value) == expected


@pytest.mark.parametrize("value", [{"a": ['é"\n', 1, 2.5, None, {}, []]}, 1e-05, True, "a", 2**70])
def test_what_is_to_be_read_has_blanks_and_no_escapes_that_need_not_be(value: object) -> None:
    assert to_readable(value) == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("value", [math.nan, {"a": math.inf}, 10**5000, {1, 2}, ENDLESS], ids=type)
def test_what_is_to_be_read_is_json(value: object) -> None:
    with pytest.raises((ValueError, TypeError, RecursionError)):
        to_readable(value)


def test_it_is_used_where_it_is_installed() -> None:
    assert messages._orjson is sys.modules["orjson"]
