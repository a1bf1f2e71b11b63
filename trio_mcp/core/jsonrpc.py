"""One message to and from bytes, the line framer, and the limits.

Bytes from the peer become a `Message`.  Nothing the peer can send raises: what is no message becomes `Invalid`, which
carries the error the peer is owed, if any.  Bytes from us are compact UTF-8 without a newline, so that one message is
one line, one event or one frame.

The envelope is taken apart by hand: there are four shapes, every call passes here twice, and an error reply needs the
id even where the rest is wrong.
"""

from __future__ import annotations

import enum
from typing import Any, Final, TypeAlias

import attrs

__all__ = [
    "ABSENT",
    "Absent",
    "Batch",
    "Error",
    "Id",
    "Invalid",
    "Json",
    "JsonObject",
    "Limits",
    "LineFramer",
    "Message",
    "Notification",
    "Request",
    "Result",
    "decode",
    "encode",
]

Id: TypeAlias = int | str
Json: TypeAlias = Any
JsonObject: TypeAlias = dict[str, Any]


class Absent(enum.Enum):
    """The type of `ABSENT`: a member that is not there, as opposed to one that is null."""

    ABSENT = enum.auto()

    def __repr__(self) -> str:
        return "ABSENT"

    def __bool__(self) -> bool:
        return False


ABSENT: Final = Absent.ABSENT


@attrs.frozen
class Request:
    id: Id
    method: str
    params: JsonObject = attrs.field(factory=dict)


@attrs.frozen
class Notification:
    method: str
    params: JsonObject = attrs.field(factory=dict)


@attrs.frozen
class Result:
    id: Id
    result: JsonObject


@attrs.frozen
class Error:
    """`id` is None when the request's own id could not be read."""

    id: Id | None
    code: int
    message: str
    data: Json | Absent = ABSENT


@attrs.frozen
class Invalid:
    """Bytes that are no message.

    `reply` is what the peer is owed, or None where the protocol forbids an answer (a malformed notification or
    response).  `answers` is the id of the request of ours that a malformed response meant, so that its caller can be
    told instead of waiting for ever.
    """

    why: str
    reply: Error | None = None
    answers: Id | None = None


@attrs.frozen
class Batch:
    """A JSON array of messages, in order.  Exists in 2025-03-26 only; whether it may be used is the peer's business."""

    items: tuple[Request | Notification | Result | Error | Invalid, ...]


Message: TypeAlias = Request | Notification | Result | Error | Invalid | Batch


@attrs.frozen
class Limits:
    """Every bound in one place.  What lies beyond one gets a defined answer, named beside it."""

    # Real hosts send results of several MiB, and 8 MiB must pass; twice that leaves room for escapes.
    # Beyond: -32600 with a null id, and the rest of that line, body, event or frame is skipped.
    message_bytes: int = 16 * 1024 * 1024
    # The deepest messages seen are JSON Schemas about 20 deep; Python's own parser gives up near 1000.
    # Beyond: -32600.
    depth: int = 128
