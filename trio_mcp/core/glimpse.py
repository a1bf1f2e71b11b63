"""What is too long to be read, without reading it: what it would be, and its id, which is owed an answer."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping

__all__ = ["KEPT", "Shape", "beginning", "ending"]

KEPT = 4096
"""Bytes at either end of it in which its id is looked for: what stands beside the id is short."""


class Shape(enum.Enum):
    """What it would be."""

    RESPONSE = enum.auto()
    REQUEST = enum.auto()
    UNKNOWN = enum.auto()


_SHAPE: Mapping[bytes, Shape] = {
    **dict.fromkeys((b"result", b"error"), Shape.RESPONSE),
    **dict.fromkeys((b"method", b"params"), Shape.REQUEST),
}
# Ids that are written plainly; others are as good as none.
_AN_ID = rb'(-?(?:0|[1-9][0-9]{0,18})|"[ !#-\[\]-~]{0,128}")'
_readable = re.compile(_AN_ID).fullmatch
# One member, and its value if that is no container and has ended.
_member = re.compile(rb'\s*[{,]\s*"(\w+)"\s*:\s*(?:("(?:[^"\\]|\\.)*"|[^\s",{}\[\]]+)\s*(?=[,}]))?').match
# The quote before `id` opens a string, or `id` would stand outside of one; so this is a member, and as the last brace
# is that of the message, it is one of the message itself.
_last_member = re.compile(rb'[{,]\s*"id"\s*:\s*' + _AN_ID + rb'\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z').search


def beginning(data: bytes, limit: int) -> tuple[Shape, int | str | None]:
    """What a message that begins so is, as far as its members up to the first object or array tell, and its id."""
    head = data[: min(KEPT, limit)].removeprefix(b"\xef\xbb\xbf")
    shape, id, at = Shape.UNKNOWN, None, 0
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
