"""Facts about a message that is not parsed: its number of values, its kind and its id.

A message that exceeds a limit is not parsed.  Its kind and its id are found in the bytes, so that its sender gets an
answer.

Counting the values must cost less than parsing them, so it is a few passes over the bytes in C.  A regular expression
that knows strings takes ten times as long.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping

__all__ = ["EDGE", "MessageKind", "beginning", "ending", "estimated_values", "holds_more_values", "outside_strings"]

EDGE = 4096
"""Bytes at each end of a message that are searched for its id: the members beside the id are short."""


class MessageKind(enum.Enum):
    """The kind of a message that is not parsed."""

    RESPONSE = enum.auto()
    REQUEST = enum.auto()
    UNKNOWN = enum.auto()


_KINDS: Mapping[bytes, MessageKind] = {
    **dict.fromkeys((b"result", b"error"), MessageKind.RESPONSE),
    **dict.fromkeys((b"method", b"params"), MessageKind.REQUEST),
}
# Integers, and strings without escapes.  Any other id is ignored.
_AN_ID = rb'(-?(?:0|[1-9][0-9]{0,18})|"[ !#-\[\]-~]{0,128}")'
_readable = re.compile(_AN_ID).fullmatch
# One member, with its value if the value is complete and is not an object or array.
_member = re.compile(rb'\s*[{,]\s*"(\w+)"\s*:\s*(?:("(?:[^"\\]|\\.)*"|[^\s",{}\[\]]+)\s*(?=[,}]))?').match
# The quote before `id` opens a string: if it closed one, `id` would be outside of a string.  So this is a member.  The
# last brace closes the message, so it is a member of the message itself.
_last_member = re.compile(rb'[{,]\s*"id"\s*:\s*' + _AN_ID + rb'\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z').search


def beginning(data: bytes, limit: int) -> tuple[MessageKind, int | str | None]:
    """Return the kind and the id of a message that begins with `data`.

    Only the members up to the first object or array are read.  The id is None if it is not one of them.
    """
    head = data[: min(EDGE, limit)].removeprefix(b"\xef\xbb\xbf")
    kind, id, at = MessageKind.UNKNOWN, None, 0
    while (member := _member(head, at)) is not None:
        name, value = member.groups()
        kind = _KINDS.get(name, kind)
        if name == b"id" and value is not None and _readable(value):
            id = json.loads(value)
        if value is None:
            break
        at = member.end()
    return kind, id


def ending(data: bytes) -> int | str | None:
    """Return the id of a message that ends with `data`, if the id is the last member.

    Many implementations write the id last.
    """
    last = _last_member(data[-EDGE:])
    return None if last is None else json.loads(last[1])


_STRUCTURE = b"[{,"
_OTHER_BYTES = bytes(each for each in range(256) if each not in b'"' + _STRUCTURE)
_FEW = 1000  # brackets and commas; up to this number the ones inside strings are counted too
_FAR = 4096  # bytes from string to string: the average, and the most, in a message that is nearly all strings
_RUN = 64  # backslashes in a row that are counted
_QUOTES = 32 * 1024  # with more quotes than this, excluding the strings takes too long for an estimate


def holds_more_values(data: bytes, most: int) -> bool:
    """Return whether `data` has more than `most` values, if it is JSON.

    The count is one, and one for each opening bracket and comma outside strings.  An empty array counts as two.
    """
    if (outside := outside_strings(data)) is not None:
        return _structure(outside) >= most
    if _structure(data) < most:  # strings included: most messages have few brackets and commas
        return False
    data = _without_escapes(data)
    # A value has at most two strings: itself and its name.  With more quotes than that, the next line does not split
    # the data, because each part becomes an object.
    return data.count(b'"') > 4 * most or _structure(_without_strings(data)) >= most


def estimated_values(data: bytes, most: float) -> float:
    """Return an upper estimate of the values in `data`, which has at most `most` values."""
    if (outside := outside_strings(data)) is not None:
        return min(_structure(outside), most)
    count = _structure(data)
    if count > _FEW and data.count(b'"') <= 8 * _QUOTES:  # eight times: most of the quotes may be escaped
        data = _without_escapes(data)
        if data.count(b'"') <= _QUOTES:
            count = _structure(_without_strings(data))
    return min(count, most)


def outside_strings(data: bytes) -> bytes | None:
    """Return the bytes outside strings of a large message that is nearly all strings; None for any other message.

    The search goes from quote to quote.  That takes a fiftieth of the time that a look at each byte takes.
    """
    pieces: list[bytes] = []
    at, inside = 0, False
    for _ in range(2 * len(data) // _FAR):
        quote = data.find(b'"', at)
        if quote < 0 and inside:
            return b"".join(pieces)
        if inside:
            run = data[max(at, quote - _RUN) : quote]
            escapes = len(run) - len(run.rstrip(b"\\"))
            if escapes == _RUN:
                return None
            inside = escapes % 2 == 1  # then the quote is part of the string
        else:
            end = len(data) if quote < 0 else quote
            if end - at > _FAR:
                return None
            pieces.append(data[at:end])
            if quote < 0:
                return b"".join(pieces)
            inside = True
        at = quote + 1
    return None


def _without_escapes(data: bytes) -> bytes:
    """Remove escaped quotes and backslashes.  Each quote that remains begins or ends a string."""
    return data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data


def _without_strings(data: bytes) -> bytes:
    return b"".join(data.translate(None, _OTHER_BYTES).split(b'"')[::2])


def _structure(data: bytes) -> int:
    return len(data) - len(data.translate(None, _STRUCTURE))
