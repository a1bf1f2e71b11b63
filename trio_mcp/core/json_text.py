"""JSON text to Python values and back, with the same result whether orjson is installed or not.

orjson (the extra `speed`) is used only where it and the standard library give the same result.  `json` decides
everything else, as if orjson did not exist:

- `json` tries again if orjson refuses a text or a value.
- Three kinds of values are treated differently by orjson, and are found by a look at the value: integers of more than
  64 bits, which orjson reads as floats; NaN and infinity, which it writes as null; and objects that orjson knows and
  JSON does not, for example UUIDs.

Only the spelling of a number may differ: 1e-05 and 0.00001.

Of `json`, only the scanner and the encoder in C are used.  They are created once; `loads` and `dumps` would create an
encoder for each call.
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

from trio_mcp.core.glimpse import outside_strings

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
    """Return the value of `data`, and whether the value may hold a part that `to_text` cannot write.

    Raises UnicodeDecodeError, JSONDecodeError, `UnreadableNumber`, or RecursionError if the text is nested too deeply
    for Python.
    """
    if _orjson is not None:
        try:
            value = _orjson.loads(data)
        except JSONDecodeError:
            pass  # `json` may accept it: half a surrogate pair, a byte order mark, a number that overflows a float
        else:
            if (len(data) > _SHORT and _is_ordinary(value, _FEW)) or _short_numbers(data) or _is_ordinary(value):
                return value, False
    return _parse(data)


_BLANK = " \t\r\n"


def plain_text(data: bytes) -> str:
    """Decode `data`, without the byte order mark and white space around the JSON.  Raises UnicodeDecodeError.

    `json.loads` is different: it accepts surrogates in UTF-8, and guesses UTF-16.
    """
    return data.decode().removeprefix("\ufeff").strip(_BLANK)


def _refuse_constant(name: str) -> NoReturn:
    raise JSONDecodeError(f"{name} is not JSON", "", 0)


def _finite(digits: str) -> float:
    number = float(digits)
    if isinf(number):
        raise ValueError("a number that overflows a float")
    return number


_Scan: TypeAlias = Callable[[str, int], tuple[Json, int]]
_Decoder: Any = json.JSONDecoder  # `scan_once` is what `raw_decode` calls
_strict: _Scan = _Decoder(parse_constant=_refuse_constant, parse_float=_finite).scan_once

# One half of a surrogate pair.  Only the parser can tell whether the other half follows.
_half_pair = re.compile(r"\\u[dD][89a-fA-F]").search

LONG_NUMBERS = 64 * 1024
"""The limit for the long numbers of one text: how many characters they may have together.  A number is long if it has
more than 45 characters.  Python needs much time for long numbers: 17 ns for each character of an integer of 4,300
digits, the longest that it reads, and 35 ns for each character of a float with enough digits to lie exactly between two
doubles.  Floats of that length are never useful, and integers rarely."""
_LONG_NUMBER = 45  # characters: 40 digits, a sign, a point and an exponent; a shorter float costs at most 0.6 µs
_LARGE = 64 * 1024  # bytes; a shorter text cannot exceed `LONG_NUMBERS`


class UnreadableNumber(Exception):
    """A large text has a number that is too large, or long numbers of more than `LONG_NUMBERS` characters."""


class _Numbers:
    """Read the numbers of a text in which some numbers may be too long or too large."""

    def __init__(self) -> None:
        self._left = LONG_NUMBERS
        self.overflow = False
        """Whether a number was too large for Python; infinity took its place."""

    def integer(self, digits: str) -> float:
        self._count(digits)
        try:
            return int(digits)
        except ValueError:  # more digits than sys.get_int_max_str_digits() allows
            self.overflow = True
            return inf

    def double(self, digits: str) -> float:
        self._count(digits)
        number = float(digits)
        self.overflow = self.overflow or isinf(number)
        return number

    def _count(self, digits: str) -> None:
        if len(digits) > _LONG_NUMBER:
            self._left -= len(digits)
            if self._left < 0:
                raise UnreadableNumber(f"long numbers of more than {LONG_NUMBERS} characters in total")


def _parse(data: bytes) -> tuple[Json, bool]:
    text = plain_text(data)
    if len(data) > _LARGE and _long_numbers(data):
        return _parse_with_care(text)
    try:
        value, end = _strict(text, 0)
    except StopIteration as stop:  # the scanner's way to say where a value is missing
        raise JSONDecodeError("Expecting value", text, stop.value) from None
    except JSONDecodeError:
        raise
    except ValueError:
        if len(data) > _LARGE:  # a refusal must not take longer than the reading
            raise UnreadableNumber("a number that is too large") from None
        return _parse_with_care(text)  # read the rest: the id is needed for the error reply
    if end != len(text):
        raise JSONDecodeError("Extra data", text, end)
    return value, "\\" in text and _half_pair(text) is not None


def _parse_with_care(text: str) -> tuple[Json, bool]:
    numbers = _Numbers()
    decoder = _Decoder(parse_constant=_refuse_constant, parse_int=numbers.integer, parse_float=numbers.double)
    value = decoder.decode(text)  # raises the same errors as `_parse`
    return value, numbers.overflow or _half_pair(text) is not None


# Differences between orjson and json.

_SHORT = 4096  # bytes; up to this size, a search in the bytes is faster than a walk through the value
_FEW = 100  # objects and arrays; up to this number, a walk through the value is faster than a search in many bytes
_AS_DIGITS = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))


def _short_numbers(data: bytes) -> bool:
    """Return whether every number in `data` has fewer than 19 digits.  2**63 has 19; orjson reads shorter ones exactly.

    19 digits in a row are six digits in a row of every third byte.  That test is cheap and rarely wrong, so it is the
    first one.
    """
    return b"0" * 6 not in data[::3].translate(_AS_DIGITS) or b"0" * 19 not in data.translate(_AS_DIGITS)


def _long_numbers(data: bytes) -> bool:
    """Return whether `data` has 21 digits in a row, as every number with more than 40 significant digits has."""
    data = data if (outside := outside_strings(data)) is None else outside
    return b"0" * 3 in data[::7].translate(_AS_DIGITS) and b"0" * 21 in data.translate(_AS_DIGITS)


_INT64 = 2.0**63


def _is_ordinary(value: Json, most: float = inf) -> bool:
    """Return whether orjson and json treat the value alike.  False also if it has more than `most` containers."""
    return _longest_text(value, most) is not None


def _longest_text(value: Json, most: float = inf) -> int | None:
    """Return the length of the longest string in an ordinary value, keys excluded; None if it is not ordinary.

    A value that contains itself ends the walk only if `most` is finite.  orjson refuses these values itself.
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
                if not -_INT64 < each < _INT64:
                    return None
            elif kind is not int and kind is not bool and each is not None:
                return None
    return longest


# To text.


def to_text(value: Json) -> bytes:
    """Write `value` as compact JSON in UTF-8.

    Raises TypeError for an object or a key that JSON does not have, UnicodeEncodeError for half a surrogate pair,
    another ValueError for NaN, for infinity and for an integer of thousands of digits, and RecursionError.
    """
    if _orjson is not None:
        longest = _longest_text(value, _FEW)
        try:
            long = longest is not None and longest > _LONG
            data: bytes = _with_long_texts(value) if long else _orjson.dumps(value, None, _NO_OBJECTS)
        except TypeError:
            pass  # `json` may accept it: a long integer, a subclass, a key that is not a string
        else:
            if longest is not None or _is_ordinary(value):
                return data
    return "".join(_pieces(value, 0)).encode()


# Characters of a string that orjson writes in one call.  orjson allocates a dozen bytes for each character.  Above
# 32 MiB the C library requests the memory from the system each time, and the system clears the pages, which takes
# longer than writing the string.
_LONG = 256 * 1024


def _with_long_texts(value: Json) -> bytes:
    """Write a value that has long strings, with orjson."""
    texts: list[str] = []
    mark = _orjson.Fragment(b"\n")  # compact JSON has no other newline
    start, *others = _orjson.dumps(_without_long_texts(value, texts, mark), None, _NO_OBJECTS).split(b"\n")
    data = bytearray(start)
    for text, rest in zip(texts, others, strict=True):
        data += b'"'
        for at in range(0, len(text), _LONG):
            data += memoryview(_orjson.dumps(text[at : at + _LONG]))[1:-1]
        data += b'"'
        data += rest
    return bytes(data)


def _without_long_texts(value: Json, texts: list[str], instead: object) -> Json:
    """Return a copy with `instead` in place of each long string.  The strings are added to `texts`."""
    if type(value) is dict:
        return {key: _without_long_texts(each, texts, instead) for key, each in value.items()}
    if type(value) is list or type(value) is tuple:
        return [_without_long_texts(each, texts, instead) for each in value]
    if type(value) is not str or len(value) <= _LONG:
        return value
    texts.append(value)
    return instead


# orjson has no option to refuse UUIDs, enums and fragments; `_longest_text` finds those.
_NO_OBJECTS = sum(getattr(_orjson, f"OPT_PASSTHROUGH_{each}", 0) for each in ("DATACLASS", "DATETIME", "SUBCLASS"))

_in_c = getattr(json.encoder, "c_make_encoder", None)


def _encoder(comma: str, colon: str) -> Any:
    """Return a function that writes a value as pieces of text."""
    # Without the encoder's own search for cycles: a cycle raises RecursionError anyway.
    slow = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(comma, colon))
    if _in_c is None:
        return slow.iterencode
    return _in_c(None, slow.default, encode_basestring, None, colon, comma, False, False, False)


_pieces = _encoder(",", ":")
_spaced = _encoder(", ", ": ")


def to_readable(value: Json) -> str:
    """Write `value` as JSON for people, with spaces.  Raises as `to_text`, except for half a surrogate pair."""
    return "".join(_spaced(value, 0))


quoted: Callable[[str], str] = encode_basestring
"""Write a string as JSON."""


def writable(value: Json) -> bool:
    """Return whether `to_text` can write a value that `parse` read: no infinity, and no half of a surrogate pair.

    This walks through the value, because writing it would take longer than reading it.
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
