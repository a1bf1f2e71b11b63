"""One message to and from bytes, and the limits.

Bytes from the peer become a `Message`.  Nothing the peer can send raises: what is no message becomes `InvalidMessage`,
which carries the error the peer is owed, if any.  Bytes from us are compact UTF-8 without a newline, so that one
message is one line, one event or one frame; what cannot be sent raises `UsageError`.  Whoever queues a message prepares
it first, so that the mistake meets the one who made it, and what is queued can always be written.

The envelope is taken apart by hand: there are four shapes, every call passes here twice, and an error reply needs the
id even where the rest is wrong.  What stands inside params, results and error data is not looked at, only carried.

Which code for what: -32700 for bytes that are not JSON (bad UTF-8 and NaN included); -32600 for JSON that is no
message, or that we cannot carry (too long, itself or its id; too many values; too deep; a number without bounds; half a
surrogate pair); -32602 for params that are no object.  Whether a well-formed message is welcome (its method, its
revision, a batch at all) is the peer's business.

Three things surprise.  A byte order mark is skipped: RFC 8259 lets a parser ignore it, and the first line of a Windows
console has one.  Of two equal members the last counts, as everywhere in Python.  And what Python would have trouble to
write again is refused on reading, so that everything we hold can be answered, stored and passed on.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Hashable, Mapping
from json import JSONDecodeError
from math import inf
from typing import Any, Final, TypeAlias, TypeVar

import attrs

from trio_mcp.core.errors import INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR, UsageError, shown
from trio_mcp.core.glimpse import MessageKind, beginning, ending, holds_more_values
from trio_mcp.core.json_text import Json, UnreadableNumber, parse, plain_text, quoted, to_text, writable
from trio_mcp.core.records import record, thawed

__all__ = [
    "ABSENT",
    "KINDS",
    "PROGRESS",
    "Absent",
    "Batch",
    "CachedResult",
    "Error",
    "Event",
    "Id",
    "InvalidMessage",
    "Json",
    "JsonObject",
    "Limits",
    "Message",
    "Notification",
    "Request",
    "Response",
    "bare",
    "decode",
    "encode",
    "is_prepared",
    "prepare",
    "prepared_progress",
    "prepared_request",
    "prepared_result",
    "too_long",
]

Id: TypeAlias = int | str
JsonObject: TypeAlias = dict[str, Any]


class Absent(enum.Enum):
    """The type of `ABSENT`: a member that is not there, as opposed to one that is null."""

    ABSENT = enum.auto()

    def __repr__(self) -> str:
        return "ABSENT"

    def __bool__(self) -> bool:
        return False


ABSENT: Final = Absent.ABSENT


class Event:
    """Whatever `receive` reports.  A request or notification that came in is its own event."""

    __slots__ = ()


class _Sendable:
    """What can be sent.  It has its bytes once `prepare` has made them; they are no part of its value."""

    __slots__ = ("_bytes",)
    _bytes: bytes


@record
class Request(Event, _Sendable):
    id: Id
    method: str
    params: JsonObject = attrs.field(factory=dict)


@record
class Notification(Event, _Sendable):
    method: str
    params: JsonObject = attrs.field(factory=dict)


@record
class Response(_Sendable):
    id: Id
    result: JsonObject


class CachedResult(dict[str, Any]):
    """A result that is the answer to many requests, so that it is written once.  It must not be changed."""

    def __init__(self, result: JsonObject) -> None:
        super().__init__(result)
        self._more: dict[Hashable, tuple[object, CachedResult]] = {}

    @functools.cached_property
    def text(self) -> bytes:
        return to_text({**self})

    @functools.cached_property
    def continued(self) -> bytes:
        """Its text where that goes on with an object that has members already."""
        return b"," + self.text[1:]

    def with_more(self, key: Hashable, given: object, make: Callable[[], JsonObject]) -> CachedResult:
        """What `make` makes of it, kept too: under this key, for as long as the same object is `given`."""
        found = self._more.get(key)
        if found is None or found[0] is not given:
            found = self._more[key] = given, CachedResult(make())
        return found[1]


@record
class Error(_Sendable):
    """`id` is None when the request's own id could not be read."""

    id: Id | None
    code: int
    message: str
    data: Json | Absent = ABSENT


@record
class InvalidMessage:
    """Bytes that are no message.

    `why` is for our own side.  `reply` is what the peer is owed, or None where the protocol forbids an answer (a
    malformed notification or response).  `answers` is the id of the request of ours that a malformed response meant, so
    that its caller can be told instead of waiting for ever.  `response` tells that it is one, also where its id could
    not be read.
    """

    why: str
    reply: Error | None = None
    answers: Id | None = None
    response: bool = False


@record
class Batch:
    """A JSON array of messages, in order.  Exists in 2025-03-26 only; whether it may be used is the peer's business."""

    items: tuple[Request | Notification | Response | Error | InvalidMessage, ...]


Message: TypeAlias = Request | Notification | Response | Error | InvalidMessage | Batch


@record
class Limits:
    """Every bound in one place.  What lies beyond one gets a defined answer, named beside it.

    Each is a number from 0 on, or `math.inf` for none; raises UsageError for anything else.
    """

    # Real hosts send results of several MiB, and 8 MiB must pass; twice that leaves room for escapes.
    # Beyond: the rest of that line, body, event or frame is skipped.  A request gets -32600, with a null id where its
    # own stands neither near its beginning nor at its end; a response fails the call that it answers.
    message_bytes: int = 16 * 1024 * 1024
    # Values in a message, counted before it is parsed: one, and one more for each bracket and comma outside strings.
    # A value of two bytes takes a hundred and more as an object of Python, and time in each step up to the answer, in
    # which nobody else is served.  Real hosts send some thousand; ten thousand rows of ten columns are half as many.
    # Numbers of more than 45 characters take long to read, and may have 64 Ki characters together.
    # Beyond: as for `message_bytes`.
    values: int = 200_000
    # Objects and arrays inside each other, the envelope being the first.  The deepest messages seen are JSON Schemas
    # about 20 deep; Python's own parser gives up near 1000.  Beyond: -32600.
    depth: int = 128
    # Characters of an id or a progress token.  Both are kept for as long as the request runs and repeated in answers,
    # and a UUID has 36 of them.  Beyond: -32600 with a null id; -32602 for the token.
    id_length: int = 1024
    # Messages in one batch.  Two bytes of nonsense in an array are owed an error of a hundred, so an array as long as a
    # message may be would be answered by one fifty times as long; no client known sends more than a few dozen.
    # Beyond: one -32600 with a null id for the whole batch.
    batch: int = 1000
    # Open at once, each way, on one link.  Hosts have been seen with 5,000; each costs about a KiB.
    # Beyond: theirs are answered with -32603, ours raise.
    requests: int = 10_000
    # What is "in all" below, and `sessions`, `parked`, `subscriptions` and `connections`, is shared fairly: a client,
    # which is a principal, else an address, may take as long as it then has at most three times what remains free.  So
    # one alone has three quarters.  One that cannot be told from others (stdio, a Unix socket) may have all.
    #
    # Handlers at work for one connection, and for all that a server has.  Hosts have been seen with 5,000 calls open; a
    # handler that waits costs some KiB.  Beyond: the call waits its turn.
    calls: int = 5_000
    calls_in_all: int = 20_000
    # Calls that wait their turn, of one connection and of all.  Beyond: -32603 at once, with the name of the limit.
    waiting: int = 5_000
    waiting_in_all: int = 20_000
    # Messages that wait for one wire.  A few dozen fill a packet; more only make what is said older.  Beyond: whoever
    # reports progress or logs waits, a notice of a change that waits already is not repeated, and beyond all calls
    # together with this nothing more is read.
    outgoing: int = 256
    # Handlers that wait for a client's answer between two of its requests, of all clients and of each principal.  One
    # costs some tens of KiB (its task, frames and request), and one person answers one form at a time.  Beyond: the
    # call is answered with -32603.
    parked: int = 1024
    parked_each: int = 64
    # Seconds for which one waits, and for which a request state is good.  "A short expiry", yet a person must find the
    # time to read, think and type.  Beyond: the handler is cancelled, and a late retry is refused with -32602.
    parked_seconds: float = 600.0
    # Questions of its server that a client answers at the same time: sampling, elicitation and roots, in both eras.
    # Each may be on the bill of the user's model; a host shows a few dialogues.  Beyond: the question waits its turn.
    questions: int = 32
    # Questions that wait their turn.  One round may ask a hundred.  Beyond, and beyond `bytes_each` of all that are not
    # answered: -32603 at once with the name of the limit; in 2026-07-28, where a call brings its questions in one
    # message, the call that the question belongs to raises InputUnavailable.
    questions_waiting: int = 256
    # Events kept by one session for clients that reconnect.  A client is away for seconds, in which even a busy tool
    # says a few hundred things; the bytes are what a thousand sessions may hold without filling a small machine.
    # Beyond: the oldest are forgotten, and who asks for what followed them is told so.
    replay_events: int = 1000
    replay_bytes: int = 4 * 1024 * 1024
    # Pages of one walk over a list: a million items, ten to a page.  Beyond: RemoteProtocolError, and the walk ends.
    pages: int = 100_000
    # What one server's listeners wait for, all of them taken together; each costs about half a KiB.  Beyond: -32603.
    subscriptions: int = 100_000
    # What one listener waits for.  An editor watches the files it has open.  Beyond: -32602.
    listener_changes: int = 1000
    # Of a URI that is remembered.  The longest that web servers take as a rule.  Beyond: -32602.
    uri_length: int = 8192
    # The head of one HTTP request: the request line and all of its fields.  Other servers stop at 8 to 64 KiB, and a
    # mirrored argument may be a long one.  Beyond: 431, and the connection is closed.
    header_bytes: int = 64 * 1024
    # Open to one HTTP server, WebSockets and streams included.  One that idles costs some tens of KiB; who expects more
    # gives the process more file descriptors too.  Beyond: an idle one is closed, chosen as for `sessions`, or if there
    # is none, 503, closed.
    connections: int = 10_000
    # HTTP requests per second of one client, which is its principal, else its address; so many at once are taken too.
    # The address is counted before it is asked who the client is, and gets that back if it is a principal: a refused
    # guess costs.  Off unless it is set: what stands behind one address (a proxy, a university) only the operator
    # knows.  Beyond: 429 with Retry-After.
    request_rate: float = inf
    # Requests per second, on any transport, that reach a handler: calls, lists, completions, subscriptions.  Of one
    # client as above, or of one connection where it cannot be told from others.  Off unless it is set: what a tool
    # costs only its author knows.  Beyond: -32603, before a handler begins.
    call_rate: float = inf
    # Seconds for the head of a request, from its first byte.  The slowest client seen needs one.  Beyond: 408, closed.
    head_seconds: float = 10.0
    # Seconds for `authenticate` or `verify`, which may ask another server.  Clients wait for a minute as a rule, and an
    # answer is to be there before.  Beyond: it is cancelled, 503 with Retry-After, and the log says which it was.
    authenticate_seconds: float = 30.0
    # A body, or a message over a network that has begun to come, must be whole within so many seconds, or in each such
    # window bring so many bytes a second: 30 seconds pass for a bad connection, and 16 MiB may take as long as a modem
    # needs, but who stops before the last byte has only one window.  Beyond: 408 or close code 1008, closed.
    body_seconds: float = 30.0
    body_rate: float = 4096.0
    # Bytes that are held for clients: messages that are not whole yet, requests until they are answered, answers and
    # notifications until they are written, logs kept for replay, what subscriptions name, and how a client has
    # introduced itself.  A request counts with what Python takes for it: 100 bytes for each value, and two or four for
    # each character where one in it needs so many.  Messages of up to 512 bytes, and requests of up to 4 KiB by that
    # count, are free, for their number is bounded elsewhere.  Of one connection or session, four of the longest
    # messages; in all, what a small machine has.  Where a client may take no more, its own logs forget their oldest
    # events.
    # Beyond: 503 or close code 1013 for what is not whole, else -32603 with the name of the limit, before a handler
    # begins or in place of the answer.
    bytes_each: int = 64 * 1024 * 1024
    bytes_in_all: int = 512 * 1024 * 1024
    # Seconds for which a connection is kept without a request.  Proxies close theirs after 60 as a rule; who closes
    # first loses no request.  Beyond: closed, without a word.
    idle_seconds: float = 75.0
    # Over a network, what waits to be written must get on: within so many seconds it is gone, or in each such window
    # so many bytes a second are.  The slowest modem takes five times as many.  Beyond: dropped.
    write_seconds: float = 60.0
    write_rate: float = 1024.0
    # Sessions of the legacy era, of all clients.  One that idles costs some KiB.  Beyond: the client's own that is idle
    # for longest makes room, else an idle one of a client that has more of them; or if there is none, 503 with
    # Retry-After.
    sessions: int = 10_000
    # Seconds for which a session, and a legacy call in none, is kept whose client is absent: no response to it is open,
    # and nothing is heard of it.  A person comes back from a meeting.  Beyond: it is ended, its handlers are cancelled,
    # and a request for it is answered by 404, as that of any that has ended.
    session_idle_seconds: float = 1800.0
    # Sessions that a relay has with the server behind it: one for each principal, or else for each connection.  Each is
    # a process where that is one, and takes some tens of MiB then.  One that idles for as long as above is closed.
    # Beyond: an idle one is closed, chosen as for `sessions`, or if there is none, -32603.
    relayed: int = 64
    # Response streams open at once in one session.  A host has one for changes and one for each call that takes long.
    # Beyond: 429.
    streams: int = 32

    def __attrs_post_init__(self) -> None:
        for name in Limits.__annotations__:
            value = getattr(self, name)
            if type(value) not in (int, float) or not value >= 0:  # NaN is neither more nor less
                raise UsageError(f"Limits.{name} is a number, 0 or more; not {value!r}")


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
"""What JSON gives, in words."""


# Integers that can be ids.  Python hashes those that differ by a multiple of 2**61 - 1 alike, and finding one of
# thousands takes thousands of comparisons; of these at most nine are alike.  Peers count from 0, or take a time in
# nanoseconds or 64 random bits; 53 bits, which every JSON has, would keep out the latter.
_FIRST, _LAST = -(2**63), 2**64 - 1

_FEW = 4096  # bytes that are copied, and looked through, sooner than anything that would spare it is done


def decode(data: bytes, limits: Limits) -> Message:
    """The message in `data`.  Never raises: what is no message is `InvalidMessage`."""
    if len(data) > limits.message_bytes:
        return _unread(data, f"is longer than {limits.message_bytes} bytes (Limits.message_bytes)", limits)
    # Each value takes a byte at least, and the more there are the longer nobody else is served.
    if len(data) > limits.values and holds_more_values(data, limits.values):
        return _unread(data, f"has more than {limits.values} values (Limits.values)", limits)
    try:
        value, doubtful = parse(data)
    except UnreadableNumber as error:
        return _unread(data, f"holds {error}", limits)
    except UnicodeDecodeError as error:
        return _owed(f"the message is not UTF-8: {error.reason} at byte {error.start}", PARSE_ERROR)
    except JSONDecodeError as error:
        return _no_json(plain_text(data), error)
    except RecursionError:
        return _too_deep({}, limits.depth)
    # Fewer brackets than levels allowed cannot make too many levels, nor can fewer bytes, of which each level has two.
    deep = len(data) > 2 * limits.depth and _opens_more_than(limits.depth, data)
    if type(value) is not list:
        return _message(value, limits, deep, doubtful)
    if not value:
        return _owed("an empty array is no batch")
    if len(value) > limits.batch:
        return _owed(f"the batch has more than {limits.batch} messages (Limits.batch)")
    return Batch(tuple([_message(item, limits, deep, doubtful) for item in value]))


def _message(
    value: Json, limits: Limits, deep: bool, doubtful: bool
) -> Request | Notification | Response | Error | InvalidMessage:
    """What `value` is; `deep` and `doubtful` tell that it may have too many levels, or what cannot be written again."""
    if type(value) is not dict:
        return _owed(f"a message is an object, not {KINDS[type(value)]}")
    id = value.get("id")
    if not deep and not doubtful and type(id) is int and _FIRST <= id <= _LAST and value.get("jsonrpc") == "2.0":
        # Nearly every message is one of these; what is not is looked at member by member.
        if len(value) == 4:
            method, params = value.get("method"), value.get("params")
            if type(method) is str and type(params) is dict:
                return _request(id, method, params)
        elif len(value) == 3 and type(result := value.get("result")) is dict:
            return _result(id, result)
    if (why := _too_long_an_id(id, limits)) is not None:
        return _refused({**value, "id": None}, why)
    if deep and _deeper_than(limits.depth, value):
        return _too_deep(value, limits.depth)
    if doubtful and not writable(value):
        return _refused(value, "the message holds a number too large, or half a surrogate pair")
    # core-01: "a received message without it is not processed".
    if value.get("jsonrpc") != "2.0":
        return _refused(
            value, 'jsonrpc must be "2.0"' if "jsonrpc" in value else 'the member "jsonrpc": "2.0" is missing'
        )
    if "method" in value:
        return _call(value)
    if "result" in value or "error" in value:
        return _response(value)
    return _refused(value, "a message needs a method, a result or an error")


def _too_long_an_id(id: Json, limits: Limits) -> str | None:
    if type(id) is str and len(id) > limits.id_length:
        return f"the id is longer than {limits.id_length} characters (Limits.id_length)"
    if type(id) is int and not _FIRST <= id <= _LAST:
        return "the id is an integer of more than 64 bits"
    return None


_thawed_request, _thawed_result = thawed(Request), thawed(Response)


def _request(id: Id, method: str, params: JsonObject) -> Request:
    made = _thawed_request()
    made.id, made.method, made.params = id, method, params
    made.__class__ = Request
    return made  # type: ignore[no-any-return]


def _result(id: Id, result: JsonObject) -> Response:
    made = _thawed_result()
    made.id, made.result = id, result
    made.__class__ = Response
    return made  # type: ignore[no-any-return]


def _call(value: JsonObject) -> Request | Notification | InvalidMessage:
    method = value["method"]
    if type(method) is not str:
        return _refused(value, f"method must be a string, not {KINDS[type(method)]}")
    if "result" in value or "error" in value:
        return _refused(value, "a message with a method has neither result nor error")
    id = value.get("id", ABSENT)
    # core-06: null is an id that cannot be, which is not the same as having none.
    if id is not ABSENT and type(id) is not int and type(id) is not str:
        return _refused(value, f"id must be a string or an integer, not {KINDS[type(id)]}")
    params = value.get("params")
    if params is None:  # null is what careless serialisers write for "absent"
        params = {}
    elif type(params) is not dict:
        return _refused(value, f"params must be an object, not {KINDS[type(params)]}", INVALID_PARAMS)
    return Notification(method, params) if id is ABSENT else Request(id, method, params)


def _response(value: JsonObject) -> Response | Error | InvalidMessage:
    id = _readable_id(value)
    if "error" not in value:
        result = value["result"]
        if id is None:
            return _refused(value, "a result must carry the id of its request")
        if type(result) is not dict:
            return _refused(value, f"result must be an object, not {KINDS[type(result)]}")
        return Response(id, result)
    error = value["error"]
    if "result" in value:
        return _refused(value, "a response has either a result or an error, not both")
    # core-10: an error whose request could not be read has no id, or null in the older revisions.
    if id is None and value.get("id") is not None:
        return _refused(value, f"id must be a string or an integer, not {KINDS[type(value['id'])]}")
    if type(error) is not dict or type(error.get("code")) is not int or type(error.get("message")) is not str:
        return _refused(value, "error must be an object with an integer code and a string message")
    return Error(id, error["code"], error["message"], error.get("data", ABSENT))


def _refused(value: JsonObject, why: str, code: int = INVALID_REQUEST) -> InvalidMessage:
    """What to do with an object that is no message: reply, tell the caller who waits for it, or only report it."""
    id = _readable_id(value)
    if not writable(id):
        id = None  # half a surrogate pair, which could not be sent back
    if "method" not in value and ("result" in value or "error" in value):
        # An answer is never answered, or two peers could go on for ever.
        return InvalidMessage(why, answers=id, response=True)
    if type(value.get("method")) is str and value.get("jsonrpc") == "2.0" and "id" not in value:
        return InvalidMessage(why)  # core-16: never an answer to a notification, "even an unknown or malformed one"
    return _owed(why, code, id)


def _owed(why: str, code: int = INVALID_REQUEST, id: Id | None = None) -> InvalidMessage:
    return InvalidMessage(why, reply=Error(id, code, why))


def _no_json(text: str, error: JSONDecodeError) -> InvalidMessage:
    why = f"the message is not JSON: {error.msg} at character {error.pos}"
    # Who looks for a stray print has to see it.  But what was meant for a message is nobody's to read, and the peer
    # knows what it has sent.
    seen = "" if text[:1] in ("", "{", "[") else f"; it begins with {shown(text, 60)}"
    return InvalidMessage(why + seen, reply=Error(None, PARSE_ERROR, why))


def _unread(data: bytes, what: str, limits: Limits) -> InvalidMessage:
    shape, id = beginning(data, limits.message_bytes)
    return _beyond(what, shape, ending(data) if id is None else id)


def too_long(limit: int, shape: MessageKind, id: Id | None) -> InvalidMessage:
    return _beyond(f"is longer than {limit} bytes (Limits.message_bytes)", shape, id)


def _beyond(what: str, shape: MessageKind, id: Id | None) -> InvalidMessage:
    """For a message of which only that much is known."""
    if shape is MessageKind.RESPONSE:
        return InvalidMessage(f"the answer {what}", answers=id, response=True)
    # An id in what is neither is no id: it may stand in an array, or in no JSON at all.
    return _owed(f"the message {what}", id=id if shape is MessageKind.REQUEST else None)


def _too_deep(value: JsonObject, limit: int) -> InvalidMessage:
    return _refused(value, f"the message is nested deeper than {limit} levels (Limits.depth)")


def _readable_id(value: JsonObject) -> Id | None:
    id = value.get("id")
    return id if type(id) is int or type(id) is str else None


# How deep a message is.

_CONTAINERS = frozenset({dict, list})


def _opens_more_than(limit: int, data: bytes) -> bool:
    """Whether more objects and arrays begin in `data`, or what looks so inside of text."""
    if len(data) <= 5 * limit and b"[" not in data:  # an object in another takes five bytes, with its key
        return False
    if len(data) <= _FEW:
        return data.count(b"{") + data.count(b"[") > limit
    for bracket in (b"{", b"["):  # `find` leaps from one to the next, and `count` looks at every byte
        at = data.find(bracket)
        while at >= 0:
            limit -= 1
            if limit < 0:
                return True
            at = data.find(bracket, at + 1)
    return False


def _deeper_than(limit: int, value: Json) -> bool:
    """Level by level, for a recursive walk would itself need a limit."""
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
_keep: Callable[[_Sendable, bytes], object] = vars(_Sendable)["_bytes"].__set__
_WITH_NULL_ID = b'{"jsonrpc":"2.0","id":null,'
_WITHOUT_ID = b'{"jsonrpc":"2.0",'


def prepare(message: _Single, *, null_id: bool = True) -> _Single:
    """`message`, written now: `encode` will give these bytes, whatever becomes of the dicts in it until then.

    `null_id` is for an `Error` without an id: the member is written as null, or (from 2025-11-25 on) left out; see
    `Revision.unreadable_id_is_null`.  Raises UsageError for what no peer could read.
    """
    data = _write(message)
    _keep(message, data if null_id else _without_null_id(data))
    return message


def prepared_result(id: Id, result: JsonObject, more: CachedResult) -> Response:
    """The answer with `result` and the members of `more`, which it has not, prepared.  Raises as `prepare`."""
    message = _result(id, {**more, **result})
    _keep(message, _write(message, result, more))
    return message


PROGRESS = "notifications/progress"
_TO_PROGRESS = f'{{"jsonrpc":"2.0","method":"{PROGRESS}","params":{{'


def prepared_progress(token: Id, progress: float, total: float | None, message: str | None) -> Notification:
    """That a request has got so far, prepared if it can be written; if not, `prepare` says why.

    The numbers are finite, and of no other type than int or float.  One call may report thousands of times, so this is
    written without an encoder: it is known what there is, and Python writes such numbers as JSON does.
    """
    params: JsonObject = {"progressToken": token, "progress": progress}
    if total is not None:
        params["total"] = total
    if message is not None:
        params["message"] = message
    note = Notification(PROGRESS, params)
    try:
        name = quoted(token) if isinstance(token, str) else token
        of = "" if total is None else f',"total":{total!r}'
        said = "" if message is None else f',"message":{quoted(message)}'
        text = f'{_TO_PROGRESS}"progressToken":{name},"progress":{progress!r}{of}{said}}}}}'
        _keep(note, text.encode())
    except ValueError:
        pass  # half a surrogate pair, or an integer of thousands of digits
    return note


def prepared_request(id: int, method: str, params: JsonObject, more: CachedResult | None) -> Request:
    """The request with `params` and the members of `more`, which they lack, prepared.  Raises as `prepare`."""
    message = _request(id, method, params if more is None else {**params, **more})
    _keep(message, _write(message, params if message.params else None, more))
    return message


def bare(message: Response) -> Response:
    """An answer that is prepared, with nothing but its bytes: while it waits to be read, it is there once."""
    made = _result(message.id, {})
    _keep(made, message._bytes)
    return made


def is_prepared(message: _Sendable) -> bool:
    return getattr(message, "_bytes", None) is not None


def encode(message: Request | Notification | Response | Error | Batch) -> bytes:
    """The bytes of one message, or of one batch.

    Raises UsageError for what no peer could read; never for a prepared message.
    """
    if type(message) is not Batch:
        return _written(message)
    if not message.items:
        raise UsageError("a batch needs at least one message")
    return b"[" + b",".join(map(_written, message.items)) + b"]"


def _without_null_id(data: bytes) -> bytes:
    return _WITHOUT_ID + data[len(_WITH_NULL_ID) :] if data.startswith(_WITH_NULL_ID) else data


def _written(message: Message) -> bytes:
    prepared: bytes | None = getattr(message, "_bytes", None)
    return _write(message) if prepared is None else prepared


def _write(message: Message | _Sendable, own: JsonObject | None = None, more: CachedResult | None = None) -> bytes:
    """With a null id, where it is an error without one.  `own` and `more` are the parts of its result or params."""
    try:
        if type(message) is Response and type(message.id) is int:  # nearly all that a server sends
            head = b'{"jsonrpc":"2.0","id":%d,"result":' % message.id
            parts = (_result_text(message),) if own is None else _joined(own, more)
            return b"".join((head, *parts, b"}"))
        if type(message) is Request and own is not None and type(message.id) is int and type(message.method) is str:
            head = b'{"jsonrpc":"2.0","id":%d,"method":%b,"params":' % (message.id, _method_text(message.method))
            return b"".join((head, *_joined(own, more), b"}"))
        _check(message)
        text = to_text(_envelope(message))
        return text if len(text) > _FEW else bytes(memoryview(text))  # orjson keeps 4 KiB for each, used or not
    except UnicodeEncodeError:
        why = "it holds half a surrogate pair, which UTF-8 cannot carry"
    except RecursionError:
        why = "it is nested too deeply, or contains itself"
    except (TypeError, ValueError) as error:  # an object, a key, NaN, or an integer of thousands of digits
        why = str(error)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # an author's object may raise anything, such as GeneratorExit
        why = f"an object in it has raised {type(error).__name__}"
        raise UsageError(f"this {type(message).__name__} cannot be written as JSON: {why}") from error
    raise UsageError(f"this {type(message).__name__} cannot be written as JSON: {why}")


_method_text = functools.lru_cache(64)(to_text)  # there are some dozens

# What each member must be; a bool, being an int in Python only, never passes.
_ID: tuple[type, ...] = (int, str)
_SHAPES: dict[type, tuple[tuple[str, tuple[type, ...]], ...]] = {
    Request: (("id", _ID), ("method", (str,)), ("params", (dict,))),
    Notification: (("method", (str,)), ("params", (dict,))),
    Response: (("id", _ID), ("result", (dict,))),
    Error: (("id", (*_ID, type(None))), ("code", (int,)), ("message", (str,))),
}


def _result_text(message: Response) -> bytes:
    result = message.result
    if type(result) is CachedResult:
        return result.text
    if type(result) is not dict:
        _check(message)
    return _lone_text(result) or to_text(result)


def _lone_text(result: JsonObject) -> bytes | None:
    """A result that is one text and nothing else, as those of most tools are: that needs no encoder, and no proof that
    there is nothing else in it.  None of what it is not, and of a text that is long or has half a surrogate pair.
    """
    if type(result) is not dict or len(result) != 1:
        return None
    content = result.get("content")
    if type(content) is not list or len(content) != 1:
        return None
    block = content[0]
    if type(block) is not dict or len(block) != 2 or block.get("type") != "text" or type(block.get("text")) is not str:
        return None
    text = block["text"]
    try:
        return b'{"content":[{"type":"text","text":%b}]}' % quoted(text).encode() if len(text) <= _FEW else None
    except UnicodeEncodeError:
        return None


def _joined(own: JsonObject, more: CachedResult | None) -> tuple[bytes | memoryview, ...]:
    """The pieces of one object made of two, of which the first may be empty."""
    text = _lone_text(own) or to_text(own)
    if more is None:
        return (text,)
    if not own:
        return (more.text,)
    return (text if len(text) <= _FEW else memoryview(text))[:-1], more.continued


def _envelope(message: Message | _Sendable) -> JsonObject:
    if isinstance(message, Notification):
        envelope: JsonObject = {"jsonrpc": "2.0", "method": message.method}
        return {**envelope, "params": message.params} if message.params else envelope
    if isinstance(message, Response):
        return {"jsonrpc": "2.0", "id": message.id, "result": message.result}
    if isinstance(message, Error):
        error: JsonObject = {"code": message.code, "message": message.message}
        if message.data is not ABSENT:
            error["data"] = message.data
        return {"jsonrpc": "2.0", "id": message.id, "error": error}
    assert isinstance(message, Request)
    envelope = {"jsonrpc": "2.0", "id": message.id, "method": message.method}
    return {**envelope, "params": message.params} if message.params else envelope


def _check(message: Message | _Sendable) -> None:
    kind = type(message)
    if kind not in _SHAPES:
        raise UsageError(f"{kind.__name__} is not a message that can be sent")
    for name, kinds in _SHAPES[kind]:
        value = getattr(message, name)
        if type(value) in kinds:
            continue
        if not isinstance(value, kinds) or isinstance(value, bool):
            expected = " or ".join(KINDS[each] for each in kinds)
            raise UsageError(f"{kind.__name__}.{name} must be {expected}, not {type(value).__name__}")
