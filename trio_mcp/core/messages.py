"""JSON-RPC messages, their conversion from and to bytes, and the limits.

`decode` turns bytes of the peer into a `Message`.  It never raises: bytes that are not a message become an
`InvalidMessage`, with the error reply for the peer if there is one.  `encode` writes compact UTF-8 without a newline,
so one message is one line, one event or one frame.  It raises `UsageError` for a message that cannot be written.  A
message is prepared before it is queued, so that the error is raised at the call that made the message, and every queued
message can be written.

The envelope is parsed by hand: there are only four shapes, every call passes here twice, and an error reply needs the
id even if the rest is wrong.  Params, results and error data are not examined.

| Code | Reason |
|---|---|
| -32700 | the bytes are not JSON, or not UTF-8, or contain NaN |
| -32600 | the JSON is not a message, or the message or its id is too long |
| -32600 | too many values, too many levels, a number too large for a float, or half a surrogate pair |
| -32602 | the params are not an object |

`Peer` and the session decide whether a well-formed message is allowed: its method, its revision, batches.

Four rules may surprise:

- A byte order mark is skipped.  RFC 8259 allows it, and the first line of a Windows console has one.
- If a member appears twice, the last one counts, as everywhere in Python.
- A message that Python could not write again is refused when it is read.  So every message that we hold can be
  answered, stored and forwarded.
- orjson (the extra `speed`) is used only where it and the standard library give the same result.  `json` decides
  everything else, as if orjson did not exist.
"""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from json import JSONDecodeError
from json.encoder import encode_basestring
from math import inf, isinf
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypeVar

import attrs

import trio_mcp.core as room  # it loads `unparsed` with the first message that needs it
from trio_mcp.core.errors import INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR, RequestError, UsageError, shown

__all__ = [
    "ABSENT", "EDGE", "KINDS", "LONG_NUMBERS", "PLAIN", "PROGRESS", "Absent", "Batch", "CachedResult", "Error", "Event",
    "Id", "InvalidMessage", "Json", "JsonObject", "Limits", "Message", "Notification", "Request", "Response",
    "UnreadableNumber", "decode", "encode", "mutable_record", "parse", "prepare", "prepared_progress", "record",
    "to_readable", "to_text", "writable",
]  # fmt: skip

# Records: immutable classes that are compared by value.

if TYPE_CHECKING:
    from attrs import define as mutable_record
    from attrs import frozen as record
else:

    def record(cls: type | None = None, *, frozen: bool = True, **options: Any) -> Any:
        """Make a class a record.  A method that the class defines itself is kept.

        Nearly every class of the core is a record.  `@record` is `@attrs.frozen`, but all records share one `==`, one
        hash and one repr, which read the fields when they are called.  attrs would generate and compile three functions
        for each class.  That takes longer than the rest of the class, and programs start servers more often than they
        compare two events.  A class that is compared often, for example as the key of a dict, has `@attrs.frozen`.
        """
        if cls is None:
            return functools.partial(record, frozen=frozen, **options)
        for name, method in _SHARED.items():
            if name not in vars(cls):
                setattr(cls, name, method)
        return (attrs.frozen if frozen else attrs.define)(cls, eq=False, repr=False, **options)

    # For classes with an object per message: the `__init__` of a frozen class takes twice as long.
    mutable_record = functools.partial(record, frozen=False)


def _values(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, field.name) for field in attrs.fields(type(self)) if field.eq])


def _equal(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash((type(self), _values(self)))


def _repr(self: Any) -> str:
    fields = [f"{field.name}={getattr(self, field.name)!r}" for field in attrs.fields(type(self)) if field.repr]
    return f"{type(self).__name__}({', '.join(fields)})"


_SHARED = {"__eq__": _equal, "__hash__": _hash, "__repr__": _repr}


# JSON text to values.  Of `json`, only the scanner and the encoder in C are used.  They are created once; `loads` and
# `dumps` would create an encoder for each call.

Json: TypeAlias = Any
JsonObject: TypeAlias = dict[str, Any]
Id: TypeAlias = int | str

_orjson: Any = None
with suppress(ImportError):
    import orjson

    _orjson = orjson

LONG_NUMBERS = 64 * 1024
"""The limit for the long numbers of one text: how many characters they may have together.  A number is long if it has
more than 45 characters.  Python needs much time for long numbers: 17 ns for each character of an integer of 4,300
digits, the longest that it reads, and 35 ns for each character of a float with enough digits to lie exactly between two
doubles.  Floats of that length are never useful, and integers rarely."""
_LONG_NUMBER = 45  # characters: 40 digits, a sign, a point and an exponent; a shorter float costs at most 0.6 µs
_LARGE = 64 * 1024  # bytes; a shorter text cannot exceed `LONG_NUMBERS`
_AS_DIGITS = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))


class UnreadableNumber(Exception):
    """A large text has a number that is too large, or long numbers of more than `LONG_NUMBERS` characters."""


def parse(data: bytes) -> tuple[Json, bool]:
    """Return the value of `data`, and whether the value may hold a part that `to_text` cannot write.

    Raises UnicodeDecodeError, JSONDecodeError, `UnreadableNumber`, or RecursionError if the text is nested too deeply
    for Python.
    """
    # orjson reads integers of more than 64 bits as floats.  2**63 has 19 digits.
    if _orjson is not None and not _has_digits(data, 19):
        try:
            return _orjson.loads(data), False
        except JSONDecodeError:
            pass  # `json` may accept it: half a surrogate pair, a byte order mark, a number that overflows a float
    text = _plain_text(data)
    if len(data) > _LARGE and _has_digits(data, 21):  # as every number with more than 40 significant digits has
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


def _plain_text(data: bytes) -> str:
    """Decode `data`, without the byte order mark and white space around the JSON.  Raises UnicodeDecodeError.

    `json.loads` is different: it accepts surrogates in UTF-8, and guesses UTF-16.
    """
    return data.decode().removeprefix("\ufeff").strip(" \t\r\n")


def _has_digits(data: bytes, count: int) -> bool:
    """Return whether `data` has this number of digits in a row, 9 or more.

    Every ninth byte then has a ninth of them in a row, and every third byte a third.  A test of few bytes is cheap and
    rarely wrong, so it comes first.
    """
    if len(data) > _LARGE and (outside := room.outside_strings(data)) is not None:
        data = outside
    return (
        b"0" * (count // 9) in data[::9].translate(_AS_DIGITS)
        and b"0" * (count // 3) in data[::3].translate(_AS_DIGITS)
        and b"0" * count in data.translate(_AS_DIGITS)
    )


def _refuse_constant(name: str) -> NoReturn:
    raise JSONDecodeError(f"{name} is not JSON", "", 0)


def _finite(digits: str) -> float:
    number = float(digits)
    if isinf(number):
        raise ValueError("a number that overflows a float")
    return number


_Decoder: Any = json.JSONDecoder  # `scan_once` is what `raw_decode` calls
_strict: Callable[[str, int], tuple[Json, int]] = _Decoder(
    parse_constant=_refuse_constant, parse_float=_finite
).scan_once

# One half of a surrogate pair.  Only the parser can tell whether the other half follows.
_half_pair = re.compile(r"\\u[dD][89a-fA-F]").search


def _parse_with_care(text: str) -> tuple[Json, bool]:
    """As `parse`, for a text in which some numbers may be too long or too large.  A number too large is infinity."""
    left, overflow = LONG_NUMBERS, False

    def read(kind: type[int | float], digits: str) -> float:
        nonlocal left, overflow
        if len(digits) > _LONG_NUMBER:
            left -= len(digits)
            if left < 0:
                raise UnreadableNumber(f"long numbers of more than {LONG_NUMBERS} characters in total")
        try:
            number: float = kind(digits)
        except ValueError:  # more digits than sys.get_int_max_str_digits() allows
            number = inf
        overflow = overflow or number in (inf, -inf)
        return number

    readers = {"parse_int": functools.partial(read, int), "parse_float": functools.partial(read, float)}
    value = _Decoder(parse_constant=_refuse_constant, **readers).decode(text)  # raises the same errors as `parse`
    return value, overflow or _half_pair(text) is not None


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


# Values to JSON text.


def to_text(value: Json) -> bytes:
    """Write `value` as compact JSON in UTF-8.

    Raises TypeError for an object or a key that JSON does not have, UnicodeEncodeError for half a surrogate pair,
    another ValueError for NaN, for infinity and for an integer of thousands of digits, and RecursionError.
    """
    if _orjson is not None:
        longest = _longest_text(value, _SIMPLE)
        try:
            long = longest is not None and longest > _LONG
            data: bytes = _with_long_texts(value) if long else _orjson.dumps(value, None, _NO_OBJECTS)
        except TypeError:
            pass  # `json` may accept it: a long integer, a subclass, a key that is not a string
        else:
            if longest is not None or _longest_text(value) is not None:
                return data
    return "".join(_pieces(value, 0)).encode()


_SIMPLE = 100  # objects and arrays; in a value with more, long strings are not searched
_INT64 = 2.0**63


def _longest_text(value: Json, most: float = inf) -> int | None:
    """Return the length of the longest string in a value, keys excluded; None if orjson and json may differ.

    orjson writes NaN and infinity as null, and knows objects that JSON does not have, for example UUIDs.  None also if
    the value has more than `most` objects and arrays.  A value that contains itself ends the walk only if `most` is
    finite.  orjson refuses these values itself.
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


# Characters of a string that orjson writes in one call.  orjson allocates a dozen bytes for each character.  Above
# 32 MiB the C library requests the memory from the system each time, and the system clears the pages, which takes
# longer than writing the string.
_LONG = 2 * 1024 * 1024


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


# Messages.


class Absent(enum.Enum):
    """The type of `ABSENT`, which stands for a missing member.  A member that is null is None."""

    ABSENT = enum.auto()

    def __repr__(self) -> str:
        return "ABSENT"

    def __bool__(self) -> bool:
        return False


ABSENT: Final = Absent.ABSENT


class Event:
    """The base class of all events that `receive` returns.  A received request or notification is an event itself."""

    __slots__ = ()


@mutable_record
class _Sendable:
    """A message that can be sent.  `prepare` sets its bytes, which are empty before.  Comparisons ignore them."""

    _bytes: bytes = attrs.field(default=b"", init=False, eq=False, repr=False)


@mutable_record
class Request(Event, _Sendable):
    """A request: a message with a method and an id, which waits for an answer."""

    id: Id
    method: str
    params: JsonObject = attrs.field(factory=dict)


@mutable_record
class Notification(Event, _Sendable):
    """A notification: a message with a method and without an id, which has no answer."""

    method: str
    params: JsonObject = attrs.field(factory=dict)


@mutable_record
class Response(_Sendable):
    """The answer to a request, with a result."""

    id: Id
    result: JsonObject


class CachedResult(dict[str, Any]):
    """A result that answers many requests, or params of a notification, written only once.  It must not be changed.

    `written` are further members as JSON, such as ``"a":1,"b":2``.  They are sent, and are not in the dict.
    """

    def __init__(self, result: JsonObject, written: bytes = b"") -> None:
        super().__init__(result)
        self._written = written
        self._more: dict[Hashable, tuple[object, CachedResult]] = {}

    @functools.cached_property
    def text(self) -> bytes:
        """The result as JSON."""
        text = to_text({**self})
        return b"".join((text[:-1], b"," if self else b"", self._written, b"}")) if self._written else text

    @functools.cached_property
    def continued(self) -> bytes:
        """The members as JSON, to be appended to an object that has other members before them."""
        return b"," + self.text[1:]

    def with_members(self, members: JsonObject) -> CachedResult:
        """Return a copy with these members, too."""
        return CachedResult({**self, **members}, self._written)

    def with_more(self, key: Hashable, given: object, make: Callable[[], JsonObject]) -> CachedResult:
        """Return the result of `make` as a `CachedResult`, cached under `key` while `given` is the same object."""
        found = self._more.get(key)
        if found is None or found[0] is not given:
            found = self._more[key] = given, CachedResult(make(), self._written)
        return found[1]


@mutable_record
class Error(_Sendable):
    """An error response.  `id` is None if the id of the request could not be read."""

    id: Id | None
    code: int
    message: str
    data: Json | Absent = ABSENT

    @property
    def exception(self) -> RequestError:
        """The exception for the call that this error answers."""
        return RequestError(self.code, self.message, None if self.data is ABSENT else self.data)


@record
class InvalidMessage:
    """Bytes that are not a valid message.

    `why` is the reason, for our own side.  `reply` is the error to send to the peer, or None if the protocol forbids an
    answer (to a malformed notification or response).  `answers` is the id of our request that a malformed response
    belongs to; without it the caller would wait for ever.  `response` is true for a malformed response, even if its id
    could not be read.
    """

    why: str
    reply: Error | None = None
    answers: Id | None = None
    response: bool = False


@record
class Batch:
    """A JSON array of messages, in order.  Only 2025-03-26 has batches; `Peer` checks that."""

    items: tuple[Request | Notification | Response | Error | InvalidMessage, ...]


Message: TypeAlias = Request | Notification | Response | Error | InvalidMessage | Batch


@record
class Limits:
    """All limits.  The comment beside each limit says what happens beyond it.

    Each limit is a number, 0 or more, or `math.inf` for no limit.  Raises UsageError for any other value.
    """

    # Bytes of one message.  Real hosts send results of several MiB, and 8 MiB must be possible; twice that leaves room
    # for escapes.
    # Beyond: the rest of the line, body, event or frame is skipped.  A request gets -32600, with a null id if its id is
    # neither near its beginning nor at its end.  The call that a response answers fails.
    message_bytes: int = 16 * 1024 * 1024
    # Values of one message, counted before it is parsed: one, and one for each opening bracket and comma outside
    # strings.  A value of two bytes takes 100 bytes or more as a Python object.  Each step up to the answer takes time
    # for it, and no other client is served in that time.  Real hosts send a few thousand; ten thousand rows of ten
    # columns have half as many.
    # Numbers of more than 45 characters take long to read, and may have 64 Ki characters together.
    # Beyond: as for `message_bytes`.
    values: int = 200_000
    # Levels of nested objects and arrays, including the envelope.  The deepest messages seen are JSON Schemas with
    # about 20 levels; Python's own parser fails near 1000.  Beyond: -32600.
    depth: int = 128
    # Characters of an id or a progress token.  Both are kept while the request runs, and repeated in answers.  A UUID
    # has 36.  Beyond: -32600 with a null id; -32602 for the token.
    id_length: int = 1024
    # Messages in one batch.  Two invalid bytes in an array cause an error of 100 bytes, so the reply to an array of
    # maximum size would be fifty times as long.  No known client sends more than a few dozen.
    # Beyond: one -32600 with a null id for the whole batch.
    batch: int = 1000
    # Open requests on one link, in each direction.  Hosts with 5,000 have been seen; each costs about 1 KiB.
    # Beyond: a request of the peer gets -32603, a request of ours raises.
    requests: int = 10_000
    # All limits with `in_all` below, and `sessions`, `parked`, `subscriptions` and `connections`, are shared fairly.  A
    # client is a principal, or an address without a principal.  It may take more if it then has at most three times
    # what remains free, so one client alone gets three quarters.  A client that cannot be distinguished from others
    # (stdio, a Unix socket) may take everything.
    #
    # Running handlers of one connection, and of the whole server.  Hosts with 5,000 open calls have been seen; a
    # handler that waits costs a few KiB.  In a client: handlers of requests of extensions, such as `tasks/get`.
    # Beyond: -32603 at once, with the name of the limit.
    calls: int = 5_000
    calls_in_all: int = 20_000
    # Messages that wait to be written to one transport.  A few dozen fill a packet; a longer queue only makes messages
    # older.  Beyond: handlers that report progress or log wait, and a change notice that is queued already is not
    # queued again.  Beyond the sum of this limit and all calls: no further message is read.
    outgoing: int = 256
    # Handlers that wait for a client's answer between two of its requests, of all clients and of each principal.  One
    # costs some tens of KiB (its task, frames and request), and one person answers one form at a time.  Beyond: the
    # call is answered with -32603.
    parked: int = 1024
    parked_each: int = 64
    # Seconds that a parked handler waits, and that a request state is valid.  "A short expiry", but a person needs time
    # to read, think and type.  Beyond: the handler is cancelled, and a late retry is refused with -32602.
    parked_seconds: float = 600.0
    # Questions of its server that a client answers at the same time: sampling, elicitation and roots, in both eras.
    # Each may cost the user model tokens, and a host shows only a few dialogs.  Beyond: the question waits its turn.
    questions: int = 32
    # Questions that wait their turn.  One round may ask a hundred.  Beyond, and beyond `bytes_each` of all unanswered
    # questions: -32603 at once, with the name of the limit.  In 2026-07-28 one message brings all questions of a call,
    # so the call raises InputUnavailable instead.
    questions_waiting: int = 256
    # Events kept by one session for clients that reconnect.  A client is away for seconds, in which even a busy tool
    # sends a few hundred messages.  A thousand sessions with this many bytes fit into a small machine.
    # Beyond: the oldest events are dropped, and a client that asks for later ones is told that events are missing.
    replay_events: int = 1000
    replay_bytes: int = 4 * 1024 * 1024
    # Pages of one list that a client reads: a million items with ten per page.  Beyond: RemoteProtocolError, and the
    # reading ends.
    pages: int = 100_000
    # Changes that all listeners of one server together subscribe to; each costs about half a KiB.  Beyond: -32603.
    subscriptions: int = 100_000
    # Changes that one listener subscribes to.  An editor watches its open files.  Beyond: -32602.
    listener_changes: int = 1000
    # Characters of a URI that is stored.  Most web servers accept no longer ones.  Beyond: -32602.
    uri_length: int = 8192
    # The head of one HTTP request: the request line and all fields.  Other servers stop at 8 to 64 KiB, and a mirrored
    # argument may be long.  Beyond: 431, and the connection is closed.
    header_bytes: int = 64 * 1024
    # Open connections of one HTTP server, including WebSockets and streams.  An idle one costs some tens of KiB.  To
    # allow more, also allow the process more file descriptors.  Beyond: an idle connection is closed, chosen as for
    # `sessions`; if there is no idle one, 503, and the new connection is closed.
    connections: int = 10_000
    # HTTP requests per second of one client, that is its principal, or its address without a principal.  The same
    # number may come at once.  Each request is charged to the address before authentication, and the address gets the
    # charge back if there is a principal.  So a guess that is refused is charged.  No limit by default: only the
    # operator knows how many clients one address has (a proxy, a university).  Beyond: 429 with Retry-After.
    request_rate: float = inf
    # Requests per second, on any transport, that reach a handler: calls, lists, completions, subscriptions.  They are
    # counted per client as above, or per connection if the client cannot be distinguished from others.  No limit by
    # default: only the author of a tool knows its cost.  Beyond: -32603, before a handler starts.
    call_rate: float = inf
    # Seconds for the head of a request, from its first byte.  The slowest client seen needs one.  Beyond: 408, and the
    # connection is closed.
    head_seconds: float = 10.0
    # Seconds for `authenticate` or `verify`, which may call another server.  Most clients wait for a minute, and the
    # answer must come before that.  Beyond: the function is cancelled, 503 with Retry-After, and the log names the
    # function.
    authenticate_seconds: float = 30.0
    # A body, or a message that has begun to arrive over a network, must be complete within `body_seconds`, or must
    # bring `body_rate` bytes per second in each window of that length.  30 seconds are enough for a bad connection, and
    # 16 MiB may take as long as a modem needs; but a client that stops before the last byte has only one window.
    # Beyond: 408 or close code 1008, and the connection is closed.
    body_seconds: float = 30.0
    body_rate: float = 4096.0
    # Bytes that the server holds for clients: incomplete messages, requests until they are answered, answers and
    # notifications until they are written, event logs for replay, the names in subscriptions, and the identities and
    # capabilities of clients.  A request counts with its size in Python: 100 bytes for each value, and two or four
    # bytes for each character if one character needs them.  Messages of up to 512 bytes, and requests of up to 4 KiB by
    # that count, are free, because other limits bound their number.  One connection or session may hold four messages
    # of maximum size; all together may hold the memory of a small machine.  When a client may take no more, its own
    # logs drop their oldest events.
    # Beyond: 503 or close code 1013 for an incomplete message, otherwise -32603 with the name of the limit, before a
    # handler starts or instead of the answer.
    bytes_each: int = 64 * 1024 * 1024
    bytes_in_all: int = 512 * 1024 * 1024
    # Seconds that a connection without a request is kept open.  Most proxies close theirs after 60; the side that
    # closes first loses no request.  Beyond: closed, without a response.
    idle_seconds: float = 75.0
    # Over a network, queued data must be written within `write_seconds`, or `write_rate` bytes per second must be
    # written in each window of that length.  The slowest modem takes five times as many.  Beyond: the connection is
    # dropped.
    write_seconds: float = 60.0
    write_rate: float = 1024.0
    # Legacy sessions of all clients.  An idle one costs a few KiB.  Beyond: the longest idle session of the same client
    # is closed; otherwise an idle one of a client with more sessions; if there is none, 503 with Retry-After.
    sessions: int = 10_000
    # Seconds that a session (or a legacy call without a session) is kept while its client is absent: it has no open
    # response, and sends no request.  A person comes back from a meeting.  Beyond: the session ends, its handlers are
    # cancelled, and a request for it gets 404, as for any session that has ended.
    session_idle_seconds: float = 1800.0
    # Sessions between a relay and the server behind it: one for each principal, or for each connection without a
    # principal.  If the server is a command, each session is a process and takes some tens of MiB.  A session that is
    # idle for `session_idle_seconds` is closed.  Beyond: an idle one is closed, chosen as for `sessions`; if there is
    # none, -32603.
    relayed: int = 64
    # Open response streams of one session.  A host has one for changes and one for each long call.  Beyond: 429.
    streams: int = 32
    # Tasks that are kept, of all principals and of each (without principals: of all together), while they run and until
    # their time is over.  Hosts with a hundred tasks of one user have been seen.  Beyond: -32603.
    tasks: int = 20_000
    tasks_each: int = 1000
    # Bytes of one task: the request, its questions and answers, and the result.  Results of several MiB must be
    # possible, as in `message_bytes`.  Beyond: the request is refused with -32603, or the task fails.
    task_bytes: int = 16 * 1024 * 1024
    # Seconds that a task is kept after its creation, also if a client asks for more.  A person comes back the next day.
    # Beyond: the task is deleted, and stopped if it runs; a request about it gets -32602.
    task_seconds: float = 86_400.0

    def __attrs_post_init__(self) -> None:
        for name in Limits.__annotations__:
            value = getattr(self, name)
            if type(value) not in (int, float) or not value >= 0:  # `not ... >=` catches NaN
                raise UsageError(f"Limits.{name} must be a number, 0 or more, got {value!r}")


# From bytes.

KINDS: Mapping[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "an integer",
    float: "a floating-point number",
    bool: "a boolean",
    type(None): "null",
}
"""The names of JSON types for error messages."""

PLAIN = frozenset({str, int, bool, type(None)})
"""The types whose values are JSON as they are; a float may be infinite."""

# The range of integer ids.  In Python, integers that differ by a multiple of 2**61 - 1 have the same hash, and a lookup
# among thousands of equal hashes takes thousands of comparisons.  In this range at most nine integers share a hash.
# Peers count from 0, or use a time in nanoseconds or 64 random bits.  A range of 53 bits, which every JSON parser
# supports, would exclude the random bits.
_FIRST, _LAST = -(2**63), 2**64 - 1

_FEW = 4096  # bytes; up to this size, copying and searching costs less than avoiding it
EDGE = 4096
"""Bytes at each end of a message that is not parsed that are searched for its id: the members beside it are short."""


def decode(data: bytes, limits: Limits) -> Message:
    """Return the message in `data`.  Never raises: invalid data gives an `InvalidMessage`."""
    size = len(data)
    if size > limits.message_bytes:
        return room.not_parsed(data, f"is longer than {limits.message_bytes} bytes (Limits.message_bytes)", limits)
    # Each value has at least one byte.  More values take longer, and no other client is served in that time.
    if size > limits.values and room.holds_more_values(data, limits.values):
        return room.not_parsed(data, f"has more than {limits.values} values (Limits.values)", limits)
    try:
        value, unwritable = parse(data)
    except UnreadableNumber as error:
        return room.not_parsed(data, f"holds {error}", limits)
    except UnicodeDecodeError as error:
        return _with_reply(f"the message is not UTF-8: {error.reason} at byte {error.start}", PARSE_ERROR)
    except JSONDecodeError as error:
        why = f"the message is not JSON: {error.msg} at character {error.pos}"
        # A stray print in the server is easier to find if its text is shown.  The text of a broken message is private,
        # so it is not shown.  The reply has neither, because the peer knows its own text.
        text = _plain_text(data)
        start = "" if text[:1] in ("", "{", "[") else f"; it begins with {shown(text, 60)}"
        return InvalidMessage(why + start, reply=Error(None, PARSE_ERROR, why))
    except RecursionError:
        return _too_deep({}, limits.depth)
    # Each level has an opening bracket and two bytes.  With fewer of either, the levels need not be counted.
    deep = size > 2 * limits.depth and _opens_more_than(limits.depth, data)
    if type(value) is not list:
        return _message(value, limits, deep, unwritable)
    if not value:
        return _with_reply("a batch must not be an empty array")
    if len(value) > limits.batch:
        return _with_reply(f"the batch has more than {limits.batch} messages (Limits.batch)")
    return Batch(tuple([_message(item, limits, deep, unwritable) for item in value]))


def _message(
    value: Json, limits: Limits, deep: bool, unwritable: bool
) -> Request | Notification | Response | Error | InvalidMessage:
    """Return the message that `value` represents.

    `deep`: it may have too many levels.  `unwritable`: it may hold a value that cannot be written again.
    """
    if type(value) is not dict:
        return _with_reply(f"a message must be an object, not {KINDS[type(value)]}")
    id = value.get("id")
    if not deep and not unwritable and type(id) is int and id.bit_length() < 64 and value.get("jsonrpc") == "2.0":
        # The fast path for nearly all messages.  The others are checked member by member.
        if len(value) == 4:
            method, params = value.get("method"), value.get("params")
            if type(method) is str and type(params) is dict:
                return Request(id, method, params)
        elif len(value) == 3 and type(result := value.get("result")) is dict:
            return Response(id, result)
    if type(id) is str and len(id) > limits.id_length:
        why = f"the id is longer than {limits.id_length} characters (Limits.id_length)"
        return _refused({**value, "id": None}, why)
    if type(id) is int and not _FIRST <= id <= _LAST:
        return _refused({**value, "id": None}, "the id is an integer of more than 64 bits")
    if deep and _deeper_than(limits.depth, value):
        return _too_deep(value, limits.depth)
    if unwritable and not writable(value):
        return _refused(value, "the message holds a number that is too large, or half a surrogate pair")
    # core-01: "a received message without it is not processed".
    if value.get("jsonrpc") != "2.0":
        why = 'jsonrpc must be "2.0"' if "jsonrpc" in value else 'the member "jsonrpc": "2.0" is missing'
        return _refused(value, why)
    return _call(value) if "method" in value else _response(value)


def _call(value: JsonObject) -> Request | Notification | InvalidMessage:
    method = value["method"]
    if type(method) is not str:
        return _refused(value, f"method must be a string, not {KINDS[type(method)]}")
    if "result" in value or "error" in value:
        return _refused(value, "a message with a method must have neither result nor error")
    id = value.get("id", ABSENT)
    # core-06: an id of null is invalid; it does not mean a notification.
    if id is not ABSENT and type(id) is not int and type(id) is not str:
        return _refused(value, f"id must be a string or an integer, not {KINDS[type(id)]}")
    params = value.get("params")
    if params is None:  # some serializers write null for an absent member
        params = {}
    elif type(params) is not dict:
        return _refused(value, f"params must be an object, not {KINDS[type(params)]}", INVALID_PARAMS)
    return Notification(method, params) if id is ABSENT else Request(id, method, params)


def _response(value: JsonObject) -> Response | Error | InvalidMessage:
    id = _readable_id(value)
    if "result" not in value and "error" not in value:
        return _refused(value, "a message must have a method, a result or an error")
    if "error" not in value:
        result = value["result"]
        if id is None:
            return _refused(value, "a result must carry the id of its request")
        if type(result) is not dict:
            return _refused(value, f"result must be an object, not {KINDS[type(result)]}")
        return Response(id, result)
    error = value["error"]
    if "result" in value:
        return _refused(value, "a response must have either a result or an error, not both")
    # core-10: an error has no id, or null in the older revisions, if the request could not be read.
    if id is None and value.get("id") is not None:
        return _refused(value, f"id must be a string or an integer, not {KINDS[type(value['id'])]}")
    if type(error) is not dict or type(error.get("code")) is not int or type(error.get("message")) is not str:
        return _refused(value, "error must be an object with an integer code and a string message")
    return Error(id, error["code"], error["message"], error.get("data", ABSENT))


def _readable_id(value: JsonObject) -> Id | None:
    id = value.get("id")
    return id if type(id) is int or type(id) is str else None


def _refused(value: JsonObject, why: str, code: int = INVALID_REQUEST) -> InvalidMessage:
    """Return the InvalidMessage for an object that is not a message.

    It has a reply, or the id of the call that fails, or only a reason to report.
    """
    id = _readable_id(value)
    if not writable(id):
        id = None  # half a surrogate pair, which the reply could not repeat
    if "method" not in value and ("result" in value or "error" in value):
        # A response is never answered, or two peers could exchange errors for ever.
        return InvalidMessage(why, answers=id, response=True)
    if type(value.get("method")) is str and value.get("jsonrpc") == "2.0" and "id" not in value:
        return InvalidMessage(why)  # core-16: never an answer to a notification, "even an unknown or malformed one"
    return _with_reply(why, code, id)


def _with_reply(why: str, code: int = INVALID_REQUEST, id: Id | None = None) -> InvalidMessage:
    return InvalidMessage(why, reply=Error(id, code, why))


def _too_deep(value: JsonObject, limit: int) -> InvalidMessage:
    return _refused(value, f"the message is nested deeper than {limit} levels (Limits.depth)")


_CONTAINERS = frozenset({dict, list})


def _opens_more_than(limit: int, data: bytes) -> bool:
    """Return whether `data` has more than `limit` opening brackets, including those inside strings."""
    if len(data) <= 5 * limit and b"[" not in data:  # an object inside another one takes five bytes, with its key
        return False
    if len(data) <= _FEW:
        return data.count(b"{") + data.count(b"[") > limit
    for bracket in (b"{", b"["):  # `find` jumps from one bracket to the next; `count` looks at every byte
        at = data.find(bracket)
        while at >= 0:
            limit -= 1
            if limit < 0:
                return True
            at = data.find(bracket, at + 1)
    return False


def _deeper_than(limit: int, value: Json) -> bool:
    """Return whether `value` has more than `limit` levels.  Not recursive: recursion would need a limit of its own."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) in _CONTAINERS
        ]
        if not level:
            return False
    return True


# To bytes.

_Single = TypeVar("_Single", bound=_Sendable)
_ID: tuple[type, ...] = (int, str)  # the types of an id
_NULL_ID = b'"id":null,'
_TO_TEXT = b'{"jsonrpc":"2.0","id":%b,"result":'  # the head of an answer to an id that is text


def prepare(message: _Single, more: CachedResult | None = None, *, null_id: bool = True) -> _Single:
    """Write the message now, and return it.  `encode` will return these bytes, even if the dicts in it change.

    `more` has further members for a result or for params, under other names; they are written only once for many
    messages.  `null_id` decides about an `Error` without an id: the member is null, or (since 2025-11-25) missing; see
    `Revision.unreadable_id_is_null`.  Raises UsageError if the message cannot be written as JSON.
    """
    own: JsonObject | None = None
    if more is not None:
        if isinstance(message, Response):
            own, message.result = message.result, {**more, **message.result}
        else:
            assert isinstance(message, Request)
            own, message.params = message.params, {**message.params, **more}
    data = _write(message, own, more)
    if not null_id and isinstance(message, Error) and message.id is None:
        data = data.replace(_NULL_ID, b"", 1)
    message._bytes = data
    return message


PROGRESS = "notifications/progress"
_PROGRESS_HEAD = f'{{"jsonrpc":"2.0","method":"{PROGRESS}","params":{{'


def prepared_progress(token: Id, progress: float, total: float | None, message: str | None) -> Notification:
    """Return a progress notification.  It is prepared if it can be written; if not, `prepare` raises the error.

    The numbers must be finite, and of exactly the type int or float.  One call may report thousands of times, so this
    does not use an encoder: the members are known, and Python writes these numbers as JSON does.
    """
    params: JsonObject = {"progressToken": token, "progress": progress}
    if total is not None:
        params["total"] = total
    if message is not None:
        params["message"] = message
    note = Notification(PROGRESS, params)
    try:
        name = encode_basestring(token) if isinstance(token, str) else token
        total_text = "" if total is None else f',"total":{total!r}'
        message_text = "" if message is None else f',"message":{encode_basestring(message)}'
        text = f'{_PROGRESS_HEAD}"progressToken":{name},"progress":{progress!r}{total_text}{message_text}}}}}'
        note._bytes = text.encode()
    except ValueError:
        pass  # half a surrogate pair, or an integer of thousands of digits
    return note


def encode(message: Request | Notification | Response | Error | Batch) -> bytes:
    """Return the bytes of one message or of one batch.

    Raises UsageError if the message cannot be written as JSON; a prepared message never raises.
    """
    if type(message) is not Batch:
        return getattr(message, "_bytes", b"") or _write(message)
    if not message.items:
        raise UsageError("a batch must have at least one message")
    return b"[" + b",".join([getattr(each, "_bytes", b"") or _write(each) for each in message.items]) + b"]"


def _write(message: Message | _Sendable, own: JsonObject | None = None, more: CachedResult | None = None) -> bytes:
    """Return the message as JSON; the id of an error without an id is null.

    `own` and `more` are the two parts of the result or params, if they are written separately.
    """
    try:
        if type(message) is Response and type(message.id) in _ID and isinstance(message.result, dict):
            # The fast path for nearly all messages of a server.
            id, whole = message.id, message.result
            head = b'{"jsonrpc":"2.0","id":%d,"result":' % id if type(id) is int else _TO_TEXT % to_text(id)
        elif (
            type(message) is Request and type(message.id) is int and type(message.method) is str
            and type(message.params) is dict and message.params
        ):  # fmt: skip
            head = b'{"jsonrpc":"2.0","id":%d,"method":%b,"params":' % (message.id, _method_text(message.method))
            whole = message.params
        elif type(message) is Notification and type(message.params) is CachedResult:
            head, whole = b'{"jsonrpc":"2.0","method":%b,"params":' % _method_text(message.method), message.params
        else:
            text = to_text(_envelope(message))
            return text if len(text) > _FEW else bytes(memoryview(text))  # bytes of orjson occupy at least 4 KiB each
        own = whole if own is None else own
        if more is None:
            return b"".join((head, own.text if type(own) is CachedResult else to_text(own), b"}"))
        if not own:
            return b"".join((head, more.text, b"}"))
        text = to_text(own)
        return b"".join((head, text[:-1] if len(text) <= _FEW else memoryview(text)[:-1], more.continued, b"}"))
    except UnicodeEncodeError:
        why = "it holds half a surrogate pair, which UTF-8 cannot encode"
    except RecursionError:
        why = "it is nested too deeply, or contains itself"
    except TypeError as error:  # an object or a key
        why = f"{error}; write it as a dict, a list, a text or a number, such as dataclasses.asdict(value)"
    except ValueError as error:  # NaN, or an integer of thousands of digits
        why = str(error)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # an object of the program may raise any exception, for example GeneratorExit
        why = f"an object in it raised {type(error).__name__}"
        raise UsageError(f"this {type(message).__name__} cannot be written as JSON: {why}") from error
    raise UsageError(f"this {type(message).__name__} cannot be written as JSON: {why}")


_method_text = functools.lru_cache(64)(to_text)  # the protocol has a few dozen methods


# The types of each member.  A bool never passes, although it is an int in Python.
_MEMBERS: dict[type, dict[str, tuple[type, ...]]] = {
    Request: {"id": _ID, "method": (str,), "params": (dict,)},
    Notification: {"method": (str,), "params": (dict,)},
    Response: {"id": _ID, "result": (dict,)},
    Error: {"id": (*_ID, type(None)), "code": (int,), "message": (str,)},
}


def _envelope(message: Message | _Sendable) -> JsonObject:
    """Return a message as a JSON object.  Raises UsageError if it or one of its members has the wrong type."""
    kind = type(message)
    if kind not in _MEMBERS:
        raise UsageError(f"{kind.__name__} is not a message that can be sent")
    members: JsonObject = {}
    for name, kinds in _MEMBERS[kind].items():
        value = members[name] = getattr(message, name)
        if type(value) not in kinds and (not isinstance(value, kinds) or isinstance(value, bool)):
            expected = " or ".join(KINDS[each] for each in kinds)
            raise UsageError(f"{kind.__name__}.{name} must be {expected}, not {type(value).__name__}")
    if isinstance(message, Error):
        error = {"code": message.code, "message": message.message}
        members = {"id": message.id, "error": error if message.data is ABSENT else {**error, "data": message.data}}
    elif not members.get("params", True):
        del members["params"]
    return {"jsonrpc": "2.0", **members}
