"""Messages that are not parsed: their kind, their id, and the number of their values.

A message that exceeds a limit is not parsed.  Its kind and its id are found in the bytes, so that its sender gets an
answer.  This module is loaded with the first message of more than a few hundred bytes.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from math import inf

from trio_mcp.core.errors import INVALID_REQUEST
from trio_mcp.core.messages import EDGE, Error, Id, InvalidMessage, Limits

__all__ = [
    "MessageKind", "beginning", "ending", "estimated_values", "holds_more_values", "not_parsed",
    "outside_strings", "too_long",
]  # fmt: skip


class MessageKind(enum.Enum):
    """The kind of a message that is not parsed."""

    RESPONSE = enum.auto()
    REQUEST = enum.auto()
    UNKNOWN = enum.auto()


_MEMBER_KINDS: Mapping[bytes, MessageKind] = {
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
        kind = _MEMBER_KINDS.get(name, kind)
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


# Counting the values must cost less than parsing them, so it is a few passes over the bytes in C.  A regular expression
# that knows strings takes ten times as long.

_STRUCTURE = b"[{,"
_OTHER_BYTES = bytes(each for each in range(256) if each not in b'"' + _STRUCTURE)
_FEW_MARKS = 1000  # brackets and commas; up to this number the ones inside strings are counted too
_FAR = 4096  # bytes from string to string: the average, and the most, in a message that is nearly all strings
_TEXT = 8 * _FAR  # the envelope alone has so many strings
_RUN = 64  # backslashes in a row that are counted
_QUOTES = 32 * 1024  # with more quotes than this, excluding the strings takes too long for an estimate


def holds_more_values(data: bytes, most: int) -> bool:
    """Return whether `data` has more than `most` values, if it is JSON.

    The count is one, and one for each opening bracket and comma outside strings.  An empty array counts as two.
    """
    # A value has at most two strings: itself and its name.  With more quotes than that, the strings are not excluded,
    # because the pieces between the quotes would become an object each.
    return _marks(data, most - 1, 4 * most, inf) >= most


def estimated_values(data: bytes, most: float) -> float:
    """Return an upper estimate of the values in `data`, which has at most `most` values."""
    # Eight times: most of the quotes may be escaped.
    return min(_marks(data, _FEW_MARKS, _QUOTES, 8 * _QUOTES), most)


def _marks(data: bytes, few: int, quotes: int, all_quotes: float) -> int:
    """Count the opening brackets and commas in `data`.

    The ones inside strings count too if there are only `few` in all, or more than `quotes` quotes: then the strings
    cost too much to exclude.  `all_quotes` is the same limit, with the escaped quotes.
    """
    outside = outside_strings(data) if len(data) >= _TEXT else None
    if outside is None:
        count = _structure(data)  # strings included: most messages have few brackets and commas
        if count <= few or data.count(b'"') > all_quotes:
            return count
        if b"\\" in data:  # without escaped quotes and backslashes, each quote begins or ends a string
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        if data.count(b'"') > quotes:
            return count
        outside = b"".join(data.translate(None, _OTHER_BYTES).split(b'"')[::2])
    return _structure(outside)


def outside_strings(data: bytes) -> bytes | None:
    """Return the bytes outside strings of a large message; None unless it is nearly all strings.

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


def _structure(data: bytes) -> int:
    return len(data) - len(data.translate(None, _STRUCTURE))


# Refusals.


def not_parsed(data: bytes, why: str, limits: Limits) -> InvalidMessage:
    """Return the InvalidMessage for `data`, which exceeds a limit.  `why` begins with a verb."""
    kind, id = beginning(data, limits.message_bytes)
    return too_long(why, kind, ending(data) if id is None else id)


def too_long(why: str, kind: MessageKind, id: Id | None) -> InvalidMessage:
    """Return the InvalidMessage for a message that exceeds a limit and is not parsed.  `why` begins with a verb."""
    if kind is MessageKind.RESPONSE:
        return InvalidMessage(f"the answer {why}", answers=id, response=True)
    # If the kind is unknown, the id is ignored: it may be inside an array, or the bytes may not be JSON.
    why = f"the message {why}"
    return InvalidMessage(why, reply=Error(id if kind is MessageKind.REQUEST else None, INVALID_REQUEST, why))
