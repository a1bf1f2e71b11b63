"""The client's half of HTTP, as decisions: which headers a message needs, and what a reply means.

One request and its reply are an `Exchange`.  `request_headers` says what to send with it; `read_reply` takes status,
headers and body and says what to do: hand a message on, read a stream, or one of the few things that HTTP adds to a
JSON-RPC answer (open the session anew, try another revision or transport, wait, ask for a token).  Nothing is ever
tried without end: what was a second attempt already (`again`) is not followed by a third.

An event stream is not read here: `read_reply` says `Streaming` as soon as it knows, and needs no body for it.  What the
stream then carries in answer to the request (`Exchange.answered_by` says what does) is judged by `read_answer`, like an
answer in a JSON body; the rest of it goes to the peer as it comes.  A stream that breaks is the business of
`StreamResumption`.

A body that answers something else than the request is no answer: whoever took it for one would wait for ever.

What surprises: no reply is good enough to be refused for its form alone.  An error is read from a body of any type
(http-05), an error without an id, or any error that comes with a refusal, is taken for the answer to the one request it
can mean, and 404 or 405 to a GET or a
DELETE means only that the server does without.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias
from urllib.parse import urljoin, urlsplit

import attrs

from trio_mcp.core import errors
from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.http.fields import (
    DRAFT_HEADER_MISMATCH,
    EVENT_STREAM,
    JSON,
    LAST_EVENT_ID,
    PROTOCOL_VERSION,
    SESSION_ID,
    Fields,
    Headers,
    Mirror,
    is_session_id,
    mirrored,
    standard_headers,
)
from trio_mcp.core.http.sse import EventReader, Oversized, SseEvent
from trio_mcp.core.jsonrpc import (
    Batch,
    Error,
    Id,
    InvalidMessage,
    Json,
    Limits,
    Message,
    Notification,
    Request,
    Response,
    decode,
)
from trio_mcp.core.records import record
from trio_mcp.core.revisions import META_VERSION, REVISIONS, Revision

__all__ = [
    "AnswerReceived",
    "Challenged",
    "Exchange",
    "KeepAlives",
    "NoStream",
    "Reconnect",
    "Redirected",
    "RefreshTools",
    "ReplyAccepted",
    "ReplyLost",
    "ReplyVerdict",
    "RetryAfter",
    "SessionGone",
    "StreamResumption",
    "Streaming",
    "TryInitialize",
    "TrySse",
    "TryVersion",
    "kind_of",
    "place_of",
    "read_answer",
    "read_endpoint",
    "read_reply",
    "request_headers",
]  # fmt: skip


@record
class Exchange:
    """One HTTP request of ours, and all that its reply is to be judged by.

    `revision` is the one the message is written in (for initialize, the one it proposes).  `probing`: nothing is known
    of this server yet.  `again`: this is the second attempt at the same thing.  `sse`: on the HTTP+SSE transport.
    """

    url: str
    revision: Revision
    message: Message | None = None  # None for GET and DELETE
    method: str = "POST"
    session: str | None = attrs.field(default=None, repr=False)  # http-61: never shown
    speaks: Sequence[Revision] = tuple(REVISIONS.values())  # what we could use instead
    probing: bool = False
    again: bool = False
    sse: bool = False

    @property
    def opening(self) -> bool:
        return isinstance(self.message, Request) and self.message.method == "initialize"

    @property
    def asked(self) -> frozenset[Id]:
        """The ids of the requests in it: one, mostly."""
        if type(self.message) is Request:
            return frozenset((self.message.id,))
        return frozenset(each.id for each in _items(self.message) if isinstance(each, Request))

    def answered_by(self, message: Message) -> frozenset[Id]:
        """Those of them that this message answers.  Some peers echo an integer as a string."""
        if type(message) is Response and type(self.message) is Request and message.id == self.message.id:
            return self.asked
        given = {each.id for each in _items(message) if isinstance(each, Response | Error)}
        given |= {each.answers for each in _items(message) if isinstance(each, InvalidMessage)}
        return frozenset(id for id in self.asked if id in given or str(id) in given)


def _items(message: Message | None) -> tuple[Message | None, ...]:
    return message.items if isinstance(message, Batch) else (message,)


# What to send.


def request_headers(exchange: Exchange, *, mirrors: Sequence[Mirror] = (), last_event_id: str = "") -> Fields:
    """The protocol's headers for this request.

    `mirrors` are the rules of the tool that is called, `last_event_id` what a GET resumes after.  Raises
    `UsageError` for a message that may not be posted in this revision, or an argument that no header can hold.
    """
    revision, rules, message = exchange.revision, exchange.revision.http, exchange.message
    if message is None:
        accept: Fields = (("Accept", EVENT_STREAM),) if exchange.method == "GET" else ()  # http-32
        after: Fields = ((LAST_EVENT_ID, last_event_id),) if last_event_id else ()  # http-41
        return (*accept, *_session_headers(exchange), *after)
    _check_message(revision, message)
    # http-09: "an Accept header, listing both application/json and text/event-stream".
    fields: Fields = (("Content-Type", JSON), ("Accept", f"{JSON}, {EVENT_STREAM}"))
    if rules is None or not rules.standard_headers or not isinstance(message, Request | Notification):
        # http-119: the POST that opens a session has none, and has agreed no version yet.
        return fields if exchange.opening else (*fields, *_session_headers(exchange))
    # http-68: the header equals the version in the body, because it is taken from there.
    meta = message.params.get("_meta")
    version = str(meta.get(META_VERSION, revision)) if isinstance(meta, dict) else revision.name
    fields = (*fields, (PROTOCOL_VERSION, version), *standard_headers(message))
    if message.method != "tools/call":
        return fields
    return (*fields, *mirrored(mirrors, message.params.get("arguments") or {}))


def _check_message(revision: Revision, message: Message) -> None:
    if isinstance(message, Batch) and not revision.batches:
        raise UsageError(f"{revision} has no batches: post each message by itself")  # http-11, http-12
    if isinstance(message, Response | Error) and not revision.handshake:
        raise UsageError(f"responses are never posted in {revision}")  # http-13


def _session_headers(exchange: Exchange) -> Fields:
    session: Fields = () if exchange.session is None else ((SESSION_ID, exchange.session),)  # http-55
    rules = exchange.revision.http
    named = rules is not None and rules.version_header
    return (*session, (PROTOCOL_VERSION, exchange.revision.name)) if named else session  # http-62, http-63


# What a reply means.


@record
class AnswerReceived:
    """An answer.  `session` is the id that the answer to initialize gave us, if any."""

    message: Message
    session: str | None = attrs.field(default=None, repr=False)


@record
class Streaming:
    """The body is an event stream: read it, and `read_answer` what answers the request."""

    session: str | None = attrs.field(default=None, repr=False)


@record
class ReplyAccepted:
    """Done, and nothing more will come on this response."""


@record
class SessionGone:
    """http-58: "it MUST start a new session by sending a new InitializeRequest without a session ID attached"."""


@record
class TryVersion:
    """The server is modern and does not serve this version, but serves that one of ours (ver-02)."""

    revision: Revision
    error: Error


@record
class RefreshTools:
    """The mirrored headers did not match: list the tools anew, then call again with the right ones (http-93)."""

    error: Error


@record
class TryInitialize:
    """The server is not modern: open a session by initialize.  `error` is what it said, if it was JSON-RPC."""

    why: str
    error: Error | None = None


@record
class TrySse:
    """The server may be one of HTTP+SSE: GET the same URL and expect an ``endpoint`` event."""

    why: str
    error: Error | None = None


@record
class RetryAfter:
    """The server is too busy.  Wait for so many seconds and send the same again, once."""

    seconds: int


@record
class Challenged:
    """401 or 403: authorization is missing or not enough.  `challenge` is WWW-Authenticate, with all its challenges."""

    status: int
    challenge: str
    why: str


@record
class Redirected:
    """Send the same request to this URL, which has the same origin.  How often is for the driver to bound."""

    url: str


@record
class NoStream:
    """The server offers no standalone stream.  That is no error."""


@record
class ReplyLost:
    """The request, or the stream, is lost: tell the peer by `Peer.fail`.  It may or may not have been carried out."""

    why: str
    status: int | None = None


ReplyVerdict: TypeAlias = (
    AnswerReceived
    | Streaming
    | ReplyAccepted
    | SessionGone
    | TryVersion
    | RefreshTools
    | TryInitialize
    | TrySse
    | RetryAfter
    | Challenged
    | Redirected
    | NoStream
    | ReplyLost
)


def kind_of(headers: Headers) -> str:
    """The media type of a body, without its parameters."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def read_reply(
    exchange: Exchange, status: int, headers: Headers, body: bytes = b"", limits: Limits | None = None
) -> ReplyVerdict:
    """What this reply means.  For a 2xx with an event stream the body is left alone; for all others it is needed."""
    limits = limits or Limits()
    if 300 <= status < 400:
        return _redirect(exchange, status, headers.get("Location"))
    if status in (401, 403):
        return Challenged(status, headers.get("WWW-Authenticate", ""), _said(status, body, limits))
    after = headers.get("Retry-After", "")
    # Seconds only: a date would need a clock, and servers that limit rates do not send one.
    if status in (429, 503) and not exchange.again and re.fullmatch(r"[0-9]{1,9}", after):
        return RetryAfter(int(after))
    gone = status == 404 or (status == 400 and _blames_session(body, limits))
    gone = gone and exchange.session is not None and exchange.revision.handshake
    if gone and exchange.method != "DELETE" and not _lacks_method(exchange, body, limits):
        return ReplyLost("the new session ended at once", status) if exchange.again else SessionGone()
    if exchange.method != "POST":
        return _read_other(exchange, status, headers, body, limits)
    if 200 <= status < 300:
        return _read_success(exchange, status, headers, body, limits)
    return _read_failure(exchange, status, body, limits)


def _blames_session(body: bytes, limits: Limits) -> bool:
    """Whether this 400 says that there is no such session, as servers of the Python SDK up to 1.12 do."""
    return b"session" in body[:_QUOTED].lower() and isinstance(decode(body, limits), InvalidMessage)


_QUOTED = 1000  # bytes of a body that says in its own words what went wrong


def _lacks_method(exchange: Exchange, body: bytes, limits: Limits) -> bool:
    """Whether this 404 answers this very request: who does not know the session has not read what was asked in it."""
    message = decode(body, limits)
    lacking = isinstance(message, Error) and message.code == errors.METHOD_NOT_FOUND
    return lacking and bool(exchange.answered_by(message))


def _read_other(exchange: Exchange, status: int, headers: Headers, body: bytes, limits: Limits) -> ReplyVerdict:
    """GET and DELETE, both of which a server may do without (http-33, http-60)."""
    good = 200 <= status < 300
    if exchange.method == "DELETE" and (good or status in (404, 405)):
        return ReplyAccepted()
    if good and kind_of(headers) == EVENT_STREAM:
        return Streaming()
    if status in (404, 405):
        return NoStream()
    return ReplyLost(f"{exchange.method} failed: {_said(status, body, limits)}", status)


def _read_success(exchange: Exchange, status: int, headers: Headers, body: bytes, limits: Limits) -> ReplyVerdict:
    if exchange.sse or not exchange.asked:
        return ReplyAccepted()
    session = headers.get(SESSION_ID) if exchange.opening else None
    if session is not None and not is_session_id(session):
        return ReplyLost("the server gave a session id with other characters than visible ASCII")
    kind = kind_of(headers)
    if kind == EVENT_STREAM:
        return Streaming(session)
    if kind != JSON:
        came = shown(kind) if kind else "no Content-Type"
        return ReplyLost(f"a request is answered by {JSON} or {EVENT_STREAM}; the reply ({status}) has {came}")
    verdict = read_answer(exchange, decode(body, limits))
    if not isinstance(verdict, AnswerReceived):
        return verdict
    if left := exchange.asked - exchange.answered_by(verdict.message):  # http-126: nothing will follow
        return ReplyLost(f"the answer to a batch lacks {len(left)} of {len(exchange.asked)} responses")
    return verdict if session is None else AnswerReceived(verdict.message, session)


def _read_failure(exchange: Exchange, status: int, body: bytes, limits: Limits) -> ReplyVerdict:
    message = decode(body, limits)
    error = message if isinstance(message, Error) else None
    if error is not None and isinstance(exchange.message, Request):
        # Whatever its id: the response refuses this request, and some servers have an id for "the transport says no".
        return read_answer(exchange, attrs.evolve(error, id=exchange.message.id), status)
    return _fall_back(exchange, status, error) or ReplyLost(_said(status, body, limits), status)


def read_answer(exchange: Exchange, message: Message, status: int = 200) -> ReplyVerdict:
    """What answers the request, from a body or from a stream: mostly just `AnswerReceived`."""
    if isinstance(message, InvalidMessage):
        return ReplyLost(f"the answer cannot be read: {message.why}")
    if isinstance(message, Error) and message.id is None:
        if not isinstance(exchange.message, Request):
            return ReplyLost(f"the whole batch was refused: {_in_words(message)}")
        message = attrs.evolve(message, id=exchange.message.id)
    if isinstance(message, Batch) and not exchange.revision.batches:
        return ReplyLost(f"the answer is a batch, and {exchange.revision} has none")
    if not exchange.answered_by(message):
        return ReplyLost(f"the request was not answered: a {type(message).__name__} about something else came instead")
    if not isinstance(message, Error):
        return AnswerReceived(message)
    remedy = None if exchange.again else _remedy(exchange, message, status)
    return remedy or _fall_back(exchange, status, message) or AnswerReceived(message)


def _remedy(exchange: Exchange, error: Error, status: int) -> ReplyVerdict | None:
    """What to do about an error that only HTTP and the version negotiation know the cure for."""
    calling = isinstance(exchange.message, Request) and exchange.message.method == "tools/call"
    if error.code == errors.UNSUPPORTED_VERSION:
        newest = _mutual(error.data, exchange.speaks)
        return None if newest is None else TryVersion(newest, error)
    # draft-01: "A client may tolerate -32001 with 400."
    mismatch = error.code == errors.HEADER_MISMATCH or (error.code == DRAFT_HEADER_MISMATCH and status == 400)
    if mismatch and calling and not exchange.revision.handshake and not exchange.probing:
        return RefreshTools(error)
    return None


def _mutual(data: Json, speaks: Sequence[Revision]) -> Revision | None:
    """The newest revision that both sides speak.  It may be the one just tried: some servers refuse only once."""
    supported = data.get("supported") if isinstance(data, dict) else None
    names = supported if isinstance(supported, list) else []
    return max((each for each in speaks if each.name in names), key=str, default=None)


def _fall_back(exchange: Exchange, status: int, error: Error | None) -> ReplyVerdict | None:
    """What a first contact that failed says about the server.  A 5xx says nothing: it may be any."""
    # ver-14: "a recognised modern error identifies a modern server".
    if not exchange.probing or (error is not None and error.code in errors.MODERN_ERRORS):
        return None
    why = f"HTTP {status}" if error is None else f"HTTP {status}: {_in_words(error)}"
    rules = exchange.revision.http
    if exchange.opening:
        # sse-10..12.  2024-11-05 knows no other transport, so there every refusal will do.
        falls = status in rules.sse_fallback if rules is not None else 400 <= status < 500
        return TrySse(why, error) if falls else None
    if exchange.revision.handshake or not _is_legacy(exchange.message, status, error):
        return None
    return TryInitialize(why, error)


def _is_legacy(message: Message | None, status: int, error: Error | None) -> bool:
    """http-109: "If the body is empty or is not a recognized modern JSON-RPC error, fall back to initialize"."""
    # Every modern server knows server/discover, so that any other error says the same; on a stream there is no status.
    discovering = isinstance(message, Request) and message.method == "server/discover"
    # 408 and 429 are about the moment, not about the server.
    if 400 <= status < 500 and status not in (408, 429):
        # http-71: 404 with this error is how a modern server says that it lacks the method.
        lacking = error is not None and (status, error.code) == (404, errors.METHOD_NOT_FOUND)
        return discovering or not lacking
    return discovering and status < 300


def _said(status: int, body: bytes, limits: Limits) -> str:
    """A failure in words: the error's own, if there is one."""
    message = decode(body, limits)
    if isinstance(message, Error):
        return f"HTTP {status}: {_in_words(message)}"
    text = body[:_QUOTED].decode(errors="replace").strip()
    if text.startswith("<"):  # a page, of which the words are told
        text = " ".join(_MARKUP.sub(" ", text).split())
    return f"HTTP {status}, " + (f"which says {shown(text, 200)}" if text else "without a JSON-RPC error")


_MARKUP = re.compile(r"<(head|script|style)\b.*?</\1>|<[a-z/!?][^>]*>?", re.DOTALL | re.IGNORECASE)


def _in_words(error: Error) -> str:
    return f"{shown(error.message, 200)} ({error.code})"


def _redirect(exchange: Exchange, status: int, location: str | None) -> ReplyVerdict:
    if location is None:
        return ReplyLost(f"HTTP {status} without a Location")
    # 301 to 303 turn a POST into a GET, in practice or by definition.
    if status not in (307, 308) and (exchange.method != "GET" or status not in (301, 302, 303)):
        return ReplyLost(f"HTTP {status} cannot be followed for a {exchange.method}")
    url = _same_origin(exchange.url, location)
    # http-61: what we send along (session, token, arguments) is for this origin alone.
    if url is None:
        return ReplyLost(f"HTTP {status} leads to another origin, or to no URL at all; use its URL if you trust it")
    return Redirected(url)


def _same_origin(base: str, reference: str) -> str | None:
    """The reference as a URL, if it has the origin of the base.

    A URL is visible ASCII: what else is in it, a parser would drop or a header not hold.  And it names no user: whose
    password it is, only we could say.
    """
    try:
        if not re.fullmatch("[!-~]*", reference) or "@" in urlsplit(reference).netloc:
            return None
        url = urljoin(base, reference)
        return url if _origin(url) == _origin(base) else None
    except ValueError:  # no URL at all: a port that is no number, half a bracket
        return None


def place_of(url: str) -> str:
    """Where a URL leads, without what may be a secret: who asks, and what for."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def read_endpoint(url: str, event: SseEvent | Oversized) -> str | ReplyLost:
    """Where to post on an HTTP+SSE stream, from its first event (sse-06, sse-08, sse-14)."""
    if not isinstance(event, SseEvent) or event.event != "endpoint":
        return ReplyLost("an HTTP+SSE stream begins with an endpoint event, and this one does not")
    target = _same_origin(url, event.data.decode("utf-8", "replace"))
    return ReplyLost("the endpoint event names no URL of the stream's own origin") if target is None else target


# Streams that break.


# Seconds.  A server that closes at once and says "retry: 0" would be asked as fast as the wire allows; an hour is more
# than any server means, and what lies beyond is as good as never.
_SHORTEST_WAIT, _LONGEST_WAIT = 0.1, 3600
# Seconds after which a connection has held: a server that closes each at once is still given up.
_HELD = 8.0


_MISSED = 3  # keep-alives in a row, after which nothing more is expected: one may be late, and one lost on the way
# Seconds between two keep-alives, or they are one that came in pieces.  A proxy that held them back gives several at
# once, and what it says of their interval would have the stream taken for dead.
_APART = 1.0


class KeepAlives:
    """For how long one connection of a stream may be silent: `_MISSED` intervals of its keep-alives.

    A dead line is not seen otherwise: nothing comes on it, and whoever only listens sends nothing that could fail.  A
    keep-alive is whatever brings no message: a comment, an event without data, an event of another name.  Servers send
    them at fixed times, or after so many seconds of silence.  So the interval is the longest of the last three between
    which nothing else came; before there is one, that of the last two, which is never too short.
    """

    def __init__(self) -> None:
        self.patience = math.inf
        """Seconds; for ever, as long as fewer than two keep-alives have come."""
        self._last = -math.inf
        self._only = False  # nothing else has come since
        self._intervals: deque[float] = deque(maxlen=3)  # a stalled line makes one too long, and is forgotten

    def heard(self, now: float, *, keep_alive: bool) -> None:
        """Something has come: a keep-alive and nothing else, or something else."""
        if not keep_alive:
            self._only = False
        elif now - self._last >= _APART:
            interval = now - self._last
            if interval < math.inf:
                if self._only:
                    self._intervals.append(interval)
                self.patience = _MISSED * max(self._intervals, default=interval)
            self._last, self._only = now, True


@record
class Reconnect:
    """After so many seconds, GET the endpoint with this Last-Event-ID ("": there was none)."""

    seconds: float
    last_event_id: str


class StreamResumption:
    """One stream of a session over all its connections: what was seen of it, and what to do when one breaks.

    `standalone` is the stream that a GET opened, which is worth opening again even without an id to resume from.  A
    stream is over, and this object with it, when the response to its request was read; nothing here needs to know.

    Attempts count from the last event, even an empty one, so a server that closes its connections on purpose
    ("polling") can do so for ever, and one that is gone is given up after `attempts`.  They count anew, too, after a
    connection that has held, as a proxy cuts streams that are idle or carry nothing but comments.  A standalone stream
    that ever was of use is not given up, but tried again after the longest of the pauses: nobody would ask for it anew.
    """

    def __init__(
        self,
        revision: Revision,
        *,
        standalone: bool = False,
        attempts: int = 5,
        delay: float = 1.0,
        longest: float = 30,
    ) -> None:
        self.last_event_id = ""
        self._resumable = revision.handshake  # http-114
        self._standalone = standalone
        self._attempts = attempts
        self._delay = delay
        self._longest = longest
        self._retry: int | None = None
        self._tried = 0
        self._proven = False  # whether any connection was one to hear something by
        self._fruitful = False  # whether the present connection brought a message

    def heard(self, reader: EventReader, events: Sequence[SseEvent | Oversized]) -> None:
        """Call this after each `feed` of the present connection's reader, with what that gave."""
        if events or reader.last_event_id or reader.retry is not None:
            self._tried, self._proven = 0, True
        self._fruitful |= any(isinstance(each, Oversized) or each.data != b"" for each in events)
        # A connection that brings no id, or no `retry`, leaves what an earlier one said.
        self.last_event_id = reader.last_event_id or self.last_event_id
        self._retry = self._retry if reader.retry is None else reader.retry

    def ended(self, held: float = 0) -> Reconnect | ReplyLost:
        """The connection was closed or lost after so many seconds, or could not be made."""
        if not self._resumable:
            return ReplyLost("the stream ended before the answer, and this revision resumes none; send a new request")
        if not self.last_event_id and not self._standalone:
            return ReplyLost("the stream ended before the answer, and gave no event id to resume from")
        if held >= _HELD:
            self._tried, self._proven = 0, True
        exhausted = self._tried >= self._attempts
        if exhausted and not (self._standalone and self._proven):
            return ReplyLost(f"the stream could not be resumed in {self._attempts} attempts")
        # http-50: "The client MUST respect the retry field".  Without one, wait longer each time.
        if self._retry is None:
            wait = min(self._delay * 2**self._tried, self._longest)
        else:
            wait = min(max(self._retry / 1000, 0 if self._fruitful else _SHORTEST_WAIT), _LONGEST_WAIT)
        wait = max(wait, self._longest) if exhausted else wait
        self._tried = min(self._tried + 1, self._attempts)
        self._fruitful = False
        return Reconnect(wait, self.last_event_id)

    def refused(self, verdict: ReplyVerdict) -> Reconnect | ReplyLost:
        """The GET was answered, but not by a stream: `read_reply` said this instead."""
        # A proxy whose server is just starting again; a server that has not seen yet that the last connection is gone.
        if (
            isinstance(verdict, ReplyLost)
            and verdict.status is not None
            and (verdict.status >= 500 or verdict.status == 409)
        ):
            return self.ended()
        if isinstance(verdict, RetryAfter):
            again = self.ended()
            seconds = min(verdict.seconds, _LONGEST_WAIT)
            return attrs.evolve(again, seconds=seconds) if isinstance(again, Reconnect) else again
        # A server may have forgotten what was said, which is no breach of the protocol.
        status = verdict.status if isinstance(verdict, ReplyLost) else None
        return ReplyLost(f"the server does not resume the stream: {getattr(verdict, 'why', verdict)}", status)
