"""JSON text into values and back: as quickly as this installation can, and with the same outcome on all.

Where orjson is installed (the extra `speed`) it reads and writes what both it and the standard library would; the rest
is judged by `json`, as if there were no other.  So orjson never has the last word: what it refuses is tried again, and
what it takes in its own way is found by a look at the value.  Those are integers of more than 64 bits, which become
floats; NaN and infinity, written as null; and objects of classes that it knows and JSON does not, such as UUIDs.  Only
how a number is spelled may differ, as 1e-05 and 0.00001 do.

`json` is kept to its scanner and encoder in C, which are made once: `loads` and `dumps` make an encoder for each call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from json import JSONDecodeError
from json.encoder import encode_basestring
from math import inf, isinf
from typing import Any, NoReturn, TypeAlias

__all__ = [
    "LONG_NUMBERS", "Json", "UnreadableNumber", "parse", "plain_text", "quoted", "to_readable", "to_text", "writable",
]  # fmt: skip

Json: TypeAlias = Any

_orjson: Any = None
with suppress(ImportError):
    import orjson

    _orjson = orjson

# From text.


def parse(data: bytes) -> tuple[Json, bool]:
    """The value of `data`, and whether it may hold something that cannot be written again.

    Raises UnicodeDecodeError, JSONDecodeError, RecursionError for what is nested too deep for Python, or
    `UnreadableNumber`.
    """
    if _orjson is not None:
        try:
            value = _orjson.loads(data)
        except JSONDecodeError:
            pass  # which `json` may know better: half a surrogate pair, a byte order mark, a number without bounds
        else:
            if (len(data) > _SHORT and _is_ordinary(value, _FEW)) or _short_numbers(data) or _is_ordinary(value):
                return value, False
    return _parse(data)


_BLANK = " \t\r\n"


def plain_text(data: bytes) -> str:
    """`data` as text, without what may stand before and after JSON.  Raises UnicodeDecodeError.

    Not as json.loads has it, which lets surrogates through and guesses at UTF-16.
    """
    return data.decode().removeprefix("\ufeff").strip(_BLANK)


def _no_constant(name: str) -> NoReturn:
    raise JSONDecodeError(f"{name} is no JSON", "", 0)


def _finite(digits: str) -> float:
    number = float(digits)
    if isinf(number):
        raise ValueError("a number without bounds")
    return number


_Scan: TypeAlias = Callable[[str, int], tuple[Json, int]]
_Decoder: Any = json.JSONDecoder  # `scan_once` is what `raw_decode` calls
_strict: _Scan = _Decoder(parse_constant=_no_constant, parse_float=_finite).scan_once

# Perhaps half of one: whether the other half is there, only the parser can tell.
_half_pair = re.compile(r"\\u[dD][89a-fA-F]").search

LONG_NUMBERS = 64 * 1024
"""Characters of all numbers of one text that have more than 45 of them.  Python takes time for these: 17 ns for each
character of an integer of 4,300 digits, the longest that it reads, and 35 ns for each of a double that is written out
to a point between two others.  Nobody needs the latter, and few the former."""
_LONG_NUMBER = 45  # what 40 digits, a sign, a point and an exponent take; up to here a double costs 0.6 µs at most
_LARGE = 64 * 1024  # bytes in which there is no room for more


class UnreadableNumber(Exception):
    """A large text has a number that is too large, or more than `LONG_NUMBERS` characters of long ones."""


class _Numbers:
    """Reads the numbers of a text in which some may be too long or too large."""

    def __init__(self) -> None:
        self._left = LONG_NUMBERS
        self.beyond = False
        """There was one that cannot be held; infinity stands in its place."""

    def integer(self, digits: str) -> float:
        self._count(digits)
        try:
            return int(digits)
        except ValueError:  # more digits than sys.get_int_max_str_digits() allows
            self.beyond = True
            return inf

    def double(self, digits: str) -> float:
        self._count(digits)
        number = float(digits)
        self.beyond = self.beyond or isinf(number)
        return number

    def _count(self, digits: str) -> None:
        if len(digits) > _LONG_NUMBER:
            self._left -= len(digits)
            if self._left < 0:
                raise UnreadableNumber(f"numbers with many digits, of more than {LONG_NUMBERS} characters in all")


def _parse(data: bytes) -> tuple[Json, bool]:
    text, large = plain_text(data), len(data) > _LARGE
    if large and _long_numbers(data):
        return _parse_with_care(text)
    try:
        value = _whole(_strict, text)
    except JSONDecodeError:
        raise
    except ValueError:
        if large:  # to refuse it must not take longer than to read it
            raise UnreadableNumber("a number too large") from None
        return _parse_with_care(text)  # the rest is still worth reading: the id is owed an answer
    return value, _may_hold_half_a_pair(text)


def _parse_with_care(text: str) -> tuple[Json, bool]:
    numbers = _Numbers()
    decoder = _Decoder(parse_constant=_no_constant, parse_int=numbers.integer, parse_float=numbers.double)
    value = _whole(decoder.scan_once, text)
    return value, numbers.beyond or _may_hold_half_a_pair(text)


def _whole(scan: _Scan, text: str) -> Json:
    try:
        value, end = scan(text, 0)
    except StopIteration as stop:  # so a scanner says where a value is missing
        raise JSONDecodeError("Expecting value", text, stop.value) from None
    if end != len(text):
        raise JSONDecodeError("Extra data", text, end)
    return value


def _may_hold_half_a_pair(text: str) -> bool:
    return "\\" in text and _half_pair(text) is not None


# Where orjson and json may differ.

_SHORT = 4096  # bytes that are sooner looked at than the value that they are
_FEW = 100  # objects and arrays that are sooner looked at than many bytes
_AS_DIGITS = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))


def _short_numbers(data: bytes) -> bool:
    """Whether no number in `data` has so many digits that orjson could take it for something else: 2**63 has 19.

    Six of them are among every third of the bytes, and nearly nothing else is.
    """
    return b"0" * 6 not in data[::3].translate(_AS_DIGITS) or b"0" * 19 not in data.translate(_AS_DIGITS)


def _long_numbers(data: bytes) -> bool:
    """Whether `data` has 21 digits in a row, as a number has of which more than 40 digits count."""
    return b"0" * 3 in data[::7].translate(_AS_DIGITS) and b"0" * 21 in data.translate(_AS_DIGITS)


_BEYOND = 2.0**63


def _is_ordinary(value: Json, most: float = inf) -> bool:
    """Whether a value means to orjson what it means to json, as far as that knows the types of all that is in it, and
    it does not hold more than so many others."""
    return _longest_text(value, most) is not None


def _longest_text(value: Json, most: float = inf) -> int | None:
    """Of an ordinary value, how long the longest text in it is, keys aside; None of any other.

    It has an end for what orjson has been through, and where there is a `most`.
    """
    todo, longest = [value], 0
    for value in todo:
        kind = type(value)
        if kind is dict:
            value = value.values()
        elif kind is not list and kind is not tuple:
            value = (value,)
        for each in value:
            kind = type(each)
            if kind is str:
                if len(each) > longest:
                    longest = len(each)
            elif kind is dict or kind is list or kind is tuple:
                todo.append(each)
                if len(todo) > most:
                    return None
            elif kind is float:
                if not -_BEYOND < each < _BEYOND:
                    return None
            elif kind is not int and kind is not bool and each is not None:
                return None
    return longest


# To text.


def to_text(value: Json) -> bytes:
    """`value` as compact JSON in UTF-8.

    Raises TypeError for an object or a key that has no form in JSON, UnicodeEncodeError for half a surrogate pair,
    other ValueErrors for NaN and for an integer of thousands of digits, and RecursionError.
    """
    if _orjson is not None:
        longest = _longest_text(value, _FEW)
        try:
            long = longest is not None and longest > _LONG
            data: bytes = _with_long_texts(value) if long else _orjson.dumps(value, None, _NO_OBJECTS)
        except TypeError:
            pass  # which `json` may know better: a long integer, a subclass, a key that is no text
        else:
            if longest is not None or _is_ordinary(value):
                return data
    return "".join(_pieces(value, 0)).encode()


# Characters of a text that are written at once.  orjson sets a dozen bytes aside for each.  Beyond 32 MiB the C library
# asks the system for them each time, and that hands out empty pages, which takes longer than to write the text.
_LONG = 256 * 1024


def _with_long_texts(value: Json) -> bytes:
    """What orjson makes of a value in which there are some."""
    texts: list[str] = []
    there = _orjson.Fragment(b"\n")  # where no newline is else
    start, *others = _orjson.dumps(_without_long_texts(value, texts, there), None, _NO_OBJECTS).split(b"\n")
    data = bytearray(start)
    for text, rest in zip(texts, others, strict=True):
        data += b'"'
        for at in range(0, len(text), _LONG):
            data += memoryview(_orjson.dumps(text[at : at + _LONG]))[1:-1]
        data += b'"'
        data += rest
    return bytes(data)


def _without_long_texts(value: Json, texts: list[str], instead: object) -> Json:
    """A copy that has something else where they were; `texts` gets them."""
    if type(value) is dict:
        return {key: _without_long_texts(each, texts, instead) for key, each in value.items()}
    if type(value) is list or type(value) is tuple:
        return [_without_long_texts(each, texts, instead) for each in value]
    if type(value) is not str or len(value) <= _LONG:
        return value
    texts.append(value)
    return instead


# But UUIDs, enums and fragments, for which there is no such option, are objects too.
_NO_OBJECTS = sum(getattr(_orjson, f"OPT_PASSTHROUGH_{each}", 0) for each in ("DATACLASS", "DATETIME", "SUBCLASS"))

_in_c = getattr(json.encoder, "c_make_encoder", None)


def _encoder(comma: str, colon: str) -> Any:
    """What gives a value in pieces of text."""
    # Without its own search for cycles: they end in a RecursionError all the same.
    slow = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(comma, colon))
    if _in_c is None:
        return slow.iterencode
    return _in_c(None, slow.default, encode_basestring, None, colon, comma, False, False, False)


_pieces = _encoder(",", ":")
_spaced = _encoder(", ", ": ")


def to_readable(value: Json) -> str:
    """`value` as JSON that is to be read as a text.  Raises as `to_text`, but not for half a surrogate pair."""
    return "".join(_spaced(value, 0))


quoted: Callable[[str], str] = encode_basestring
"""A text as JSON."""


def writable(value: Json) -> bool:
    """Whether `to_text` can write what was read, all of it: no infinity, and no half of a surrogate pair.

    By a look at it, for to write it would take longer than to read it.
    """
    todo = [value]
    try:
        for each in todo:
            kind = type(each)
            if kind is dict:
                todo += each
                todo += each.values()
            elif kind is list:
                todo += each
            elif kind is str:
                if not each.isascii():
                    each.encode()
            elif kind is float and isinf(each):
                return False
    except UnicodeEncodeError:
        return False
    return True
