"""Messages that are not parsed: how many values are in them, what they would be, and their ids, which are owed answers.

Counting values must not cost what it saves, so it is a few passes over the bytes in C.  A regular expression that knows
strings takes ten times as long.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping

__all__ = ["KEPT", "MessageKind", "beginning", "ending", "holds_more_values", "values_about"]

KEPT = 4096
"""Bytes at either end of it in which its id is looked for: what stands beside the id is short."""


class MessageKind(enum.Enum):
    """What it would be."""

    RESPONSE = enum.auto()
    REQUEST = enum.auto()
    UNKNOWN = enum.auto()


_SHAPE: Mapping[bytes, MessageKind] = {
    **dict.fromkeys((b"result", b"error"), MessageKind.RESPONSE),
    **dict.fromkeys((b"method", b"params"), MessageKind.REQUEST),
}
# Ids that are written plainly; others are as good as none.
_AN_ID = rb'(-?(?:0|[1-9][0-9]{0,18})|"[ !#-\[\]-~]{0,128}")'
_readable = re.compile(_AN_ID).fullmatch
# One member, and its value if that is no container and has ended.
_member = re.compile(rb'\s*[{,]\s*"(\w+)"\s*:\s*(?:("(?:[^"\\]|\\.)*"|[^\s",{}\[\]]+)\s*(?=[,}]))?').match
# The quote before `id` opens a string, or `id` would stand outside of one; so this is a member, and as the last brace
# is that of the message, it is one of the message itself.
_last_member = re.compile(rb'[{,]\s*"id"\s*:\s*' + _AN_ID + rb'\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z').search


def beginning(data: bytes, limit: int) -> tuple[MessageKind, int | str | None]:
    """What a message that begins so is, as far as its members up to the first object or array tell, and its id."""
    head = data[: min(KEPT, limit)].removeprefix(b"\xef\xbb\xbf")
    shape, id, at = MessageKind.UNKNOWN, None, 0
    while (member := _member(head, at)) is not None:
        name, value = member.groups()
        shape = _SHAPE.get(name, shape)
        if name == b"id" and value is not None and _readable(value):
            id = json.loads(value)
        if value is None:
            break
        at = member.end()
    return shape, id


def ending(data: bytes) -> int | str | None:
    """The id of a message that ends so, if it is its last member, as many implementations write it."""
    last = _last_member(data[-KEPT:])
    return None if last is None else json.loads(last[1])


_STRUCTURE = b"[{,"
_NOTHING_ELSE = bytes(each for each in range(256) if each not in b'"' + _STRUCTURE)
_SURE = 1000  # brackets and commas that are counted as they are, even if most of them may stand in strings
_QUOTES = 32 * 1024  # beyond which it takes too long to tell what stands in strings, where only a guess is wanted


def holds_more_values(data: bytes, most: int) -> bool:
    """Whether there are more values in `data`, if it is JSON: one, and one for each bracket and comma outside strings.

    An empty array counts as two.
    """
    if _structure(data) < most:  # strings and all: most messages have few of either
        return False
    data = _without_escapes(data)
    # A value has a string at most, and one more for its name.  More than that are not taken apart: each becomes an
    # object in the next line.
    return data.count(b'"') > 4 * most or _structure(_without_strings(data)) >= most


def values_about(data: bytes, most: float) -> float:
    """As many values, or some more, as there are in `data`, which holds not more than `most`."""
    count = _structure(data)
    if count > _SURE and data.count(b'"') <= 8 * _QUOTES:  # most of which may be escaped
        data = _without_escapes(data)
        if data.count(b'"') <= _QUOTES:
            count = _structure(_without_strings(data))
    return min(count, most)


def _without_escapes(data: bytes) -> bytes:
    """After this each quote begins or ends a string."""
    return data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data


def _without_strings(data: bytes) -> bytes:
    return b"".join(data.translate(None, _NOTHING_ELSE).split(b'"')[::2])


def _structure(data: bytes) -> int:
    return len(data) - len(data.translate(None, _STRUCTURE))
