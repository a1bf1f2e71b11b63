"""The client's half of HTTP, as decisions: which headers a message needs, and what an HTTP response means.

One request and its response are an `Exchange`.  `request_headers` returns the headers to send.  `read_reply` takes the
status, the headers and the body, and returns the next step: pass a message on, read a stream, or one of the few steps
that HTTP adds to a JSON-RPC answer (open a new session, try another era or transport, wait, get a token).  The caller
limits how often it takes a step; if the next attempt has the same verdict, that is the error.

Event streams are not read here: `read_reply` returns `Streaming` as soon as it can, without the body.  If a message of
the stream answers the request (`Exchange.answered_by`), `read_answer` judges it, like an answer in a JSON body.  All
other messages of the stream go to the peer unchanged.  `StreamResumption` handles a stream that breaks.

A body that answers another request is not an answer: if it were accepted, the caller would wait for ever.

What surprises: no response is refused for its form alone.  An error is read from a body of any type (http-05).  An
error without an id, or any error in a refusal, is taken as the answer to the one request that it can mean.  And 404 or
405 to a GET or DELETE means only that the server does not support the method.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
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
    NO_NAMES,
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
from trio_mcp.core.messages import (
    Batch,
    Error,
    Id,
    InvalidMessage,
    Limits,
    Message,
    Notification,
    Request,
    Response,
    decode,
    record,
)
from trio_mcp.core.revisions import META_VERSION, Revision

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
    "kind_of",
    "read_answer",
    "read_endpoint",
    "read_reply",
    "reason",
    "request_headers",
    "url_without_secrets",
]  # fmt: skip


@record
class Exchange:
    """One HTTP request of the client, with the facts to judge its response by.

    `revision` is the revision of the message (for initialize, the proposed one).  `probing`: this is the first contact
    with the server.  `waited`: it was sent again after a `RetryAfter`.  `sse`: the transport is HTTP+SSE.
    `last_event_id`: the event after which a GET resumes.
    """

    url: str
    revision: Revision
    message: Message | None = None  # None for GET and DELETE
    method: str = "POST"
    session: str | None = attrs.field(default=None, repr=False)  # http-61: never in a repr
    probing: bool = False
    waited: bool = False
    sse: bool = False
    last_event_id: str = ""
    asked: frozenset[Id] = attrs.field(init=False, eq=False, repr=False)
    """The ids of the requests in the message: usually one."""

    @asked.default
    def _ids(self) -> frozenset[Id]:
        if type(self.message) is Request:
            return frozenset((self.message.id,))
        return frozenset(each.id for each in _items(self.message) if isinstance(each, Request))

    @property
    def opening(self) -> bool:
        return isinstance(self.message, Request) and self.message.method == "initialize"

    def answered_by(self, message: Message) -> frozenset[Id]:
        """The ids of our requests that this message answers.  Some peers echo an integer id as a string."""
        if type(message) is Response and type(self.message) is Request and message.id == self.message.id:
            return self.asked
        given = {each.id for each in _items(message) if isinstance(each, Response | Error)}
        given |= {each.answers for each in _items(message) if isinstance(each, InvalidMessage)}
        return frozenset(id for id in self.asked if id in given or str(id) in given)


def _items(message: Message | None) -> tuple[Message | None, ...]:
    return message.items if isinstance(message, Batch) else (message,)


# What to send.


def request_headers(
    exchange: Exchange, *, mirrors: Sequence[Mirror] = (), mcp_names: Mapping[str, str] = NO_NAMES
) -> Fields:
    """Return the protocol's headers for this request.

    `mirrors`: the header rules of the called tool.  `mcp_names`: see `Offer.mcp_names`.  Raises `UsageError` if this
    revision does not allow to post the message, or if an argument does not fit into a header.
    """
    revision, rules, message = exchange.revision, exchange.revision.http, exchange.message
    session: Fields = () if exchange.session is None else ((SESSION_ID, exchange.session),)  # http-55
    if rules is not None and rules.version_header:  # http-62, http-63
        session = (*session, (PROTOCOL_VERSION, revision.name))
    if message is None:
        accept: Fields = (("Accept", EVENT_STREAM),) if exchange.method == "GET" else ()  # http-32
        after: Fields = ((LAST_EVENT_ID, exchange.last_event_id),) if exchange.last_event_id else ()  # http-41
        return (*accept, *session, *after)
    if isinstance(message, Batch) and not revision.batches:
        raise UsageError(f"{revision} has no batches: post each message by itself")  # http-11, http-12
    if isinstance(message, Response | Error) and not revision.handshake:
        raise UsageError(f"responses are never posted in {revision}")  # http-13
    # http-09: "an Accept header, listing both application/json and text/event-stream".
    fields: Fields = (("Content-Type", JSON), ("Accept", f"{JSON}, {EVENT_STREAM}"))
    if rules is None or not rules.standard_headers or not isinstance(message, Request | Notification):
        # http-119: the POST that opens a session has no session id and no negotiated version.
        return fields if exchange.opening else (*fields, *session)
    # http-68: the header must equal the version in the body, so it is copied from there.
    meta = message.params.get("_meta")
    version = str(meta.get(META_VERSION, revision)) if isinstance(meta, dict) else revision.name
    fields = (*fields, (PROTOCOL_VERSION, version), *standard_headers(message, mcp_names))
    if message.method != "tools/call":
        return fields
    return (*fields, *mirrored(mirrors, message.params.get("arguments") or {}))


# What a response means.


@record
class AnswerReceived:
    """An answer.  `session`: the session id that came with the answer to initialize, or None."""

    message: Message
    session: str | None = attrs.field(default=None, repr=False)


@record
class Streaming:
    """The body is an event stream: read it, and pass the message that answers the request to `read_answer`."""

    session: str | None = attrs.field(default=None, repr=False)


@record
class ReplyAccepted:
    """The message was accepted, and this response carries nothing else."""


@record
class SessionGone:
    """http-58: "it MUST start a new session by sending a new InitializeRequest without a session ID attached"."""


@record
class RefreshTools:
    """The mirrored headers did not match: list the tools again, then repeat the call with the new rules (http-93)."""

    error: Error


@record
class TryInitialize:
    """The server is not modern: open a session by initialize."""

    why: str


@record
class TrySse:
    """The server may use HTTP+SSE: GET the same URL and expect an ``endpoint`` event."""

    why: str


@record
class RetryAfter:
    """The server is busy.  Wait this many seconds, then send the same request again, once."""

    seconds: int


@record
class Challenged:
    """401 or 403: the request needs (more) authorization.

    `challenge`: the WWW-Authenticate header, all challenges in it.
    """

    status: int
    challenge: str
    why: str


@record
class Redirected:
    """Send the same request to this URL, which has the same origin.  The driver must limit the number of redirects."""

    url: str


@record
class NoStream:
    """The server offers no standalone stream.  This is not an error."""


@record
class ReplyLost:
    """The request or the stream is lost: call `Peer.fail`.  The server may or may not have carried out the request."""

    why: str
    status: int | None = None


ReplyVerdict: TypeAlias = (
    AnswerReceived
    | Streaming
    | ReplyAccepted
    | SessionGone
    | RefreshTools
    | TryInitialize
    | TrySse
    | RetryAfter
    | Challenged
    | Redirected
    | NoStream
    | ReplyLost
)


def reason(verdict: ReplyVerdict) -> str:
    """Return why a GET has no stream, for an error message."""
    if isinstance(verdict, ReplyLost | Challenged):
        return verdict.why
    if isinstance(verdict, RetryAfter):
        return f"the server is busy for {verdict.seconds} seconds"
    return "the session has ended" if isinstance(verdict, SessionGone) else "the server does not serve GET"


def kind_of(headers: Headers) -> str:
    """Return the media type of a body, without parameters."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def read_reply(
    exchange: Exchange, status: int, headers: Headers, body: bytes = b"", limits: Limits | None = None
) -> ReplyVerdict:
    """Judge a response.  The body is not needed for an event stream with status 2xx, and needed for all others."""
    limits = limits or Limits()
    if 200 <= status < 300:
        return _read_success(exchange, status, headers, body, limits)
    if 300 <= status < 400:
        return _redirect(exchange, status, headers.get("Location"))
    message = decode(body, limits)
    error = message if isinstance(message, Error) else None
    why = _describe(status, body, error)
    if status in (401, 403):
        return Challenged(status, headers.get("WWW-Authenticate", ""), why)
    after = headers.get("Retry-After", "")
    # Seconds only: a date would need a clock, and servers with rate limits do not send dates.
    if status in (429, 503) and not exchange.waited and re.fullmatch(r"[0-9]{1,9}", after):
        return RetryAfter(int(after))
    # A 400 means an unknown session with servers of the Python SDK up to 1.12.
    blamed = isinstance(message, InvalidMessage) and b"session" in body[:_QUOTED_BYTES].lower()
    # A server that does not know the session has not read the method.
    unread = error is None or error.code != errors.METHOD_NOT_FOUND or not exchange.answered_by(error)
    gone = (status == 404 or (status == 400 and blamed)) and unread and exchange.method != "DELETE"
    if gone and exchange.session is not None and exchange.revision.handshake:
        return SessionGone()
    if exchange.method != "POST":  # GET and DELETE are optional for a server (http-33, http-60)
        if status in (404, 405):
            return ReplyAccepted() if exchange.method == "DELETE" else NoStream()
        return ReplyLost(f"{exchange.method} failed: {why}", status)
    if error is not None and isinstance(exchange.message, Request):
        # The id does not matter: the response refuses this request, and some servers use an id of their own here.
        return read_answer(exchange, attrs.evolve(error, id=exchange.message.id), status)
    return _fall_back(exchange, status, error) or ReplyLost(why, status)


_QUOTED_BYTES = 1000  # bytes of a free-text error body that are used
_MARKUP = re.compile(r"<(head|script|style)\b.*?</\1>|<[a-z/!?][^>]*>?", re.DOTALL | re.IGNORECASE)


def _describe(status: int, body: bytes, error: Error | None) -> str:
    """Describe a failure: by the message of its JSON-RPC error, else by the beginning of the body."""
    if error is not None:
        return f"HTTP {status}: {_error_text(error)}"
    text = body[:_QUOTED_BYTES].decode(errors="replace").strip()
    if text.startswith("<"):  # an HTML page: keep only its text
        text = " ".join(_MARKUP.sub(" ", text).split())
    return f"HTTP {status}, " + (f"with the text {shown(text, 200)}" if text else "without a JSON-RPC error")


def _error_text(error: Error) -> str:
    return f"{shown(error.message, 200)} ({error.code})"


def _read_success(exchange: Exchange, status: int, headers: Headers, body: bytes, limits: Limits) -> ReplyVerdict:
    kind = kind_of(headers)
    if exchange.method == "GET":
        why = _describe(status, body, None)
        return Streaming() if kind == EVENT_STREAM else ReplyLost(f"GET failed: {why}", status)
    if exchange.sse or not exchange.asked:
        return ReplyAccepted()
    session = headers.get(SESSION_ID) if exchange.opening else None
    if session is not None and not is_session_id(session):
        return ReplyLost("the server sent a session id that is not visible ASCII")
    if kind == EVENT_STREAM:
        return Streaming(session)
    if kind != JSON:
        came = shown(kind) if kind else "no Content-Type"
        return ReplyLost(f"a reply to a request must be {JSON} or {EVENT_STREAM}; this one ({status}) has {came}")
    verdict = read_answer(exchange, decode(body, limits))
    if not isinstance(verdict, AnswerReceived):
        return verdict
    if left := exchange.asked - exchange.answered_by(verdict.message):  # http-126: no other response will follow
        return ReplyLost(f"the answer to a batch lacks {len(left)} of {len(exchange.asked)} responses")
    return verdict if session is None else AnswerReceived(verdict.message, session)


def read_answer(exchange: Exchange, message: Message, status: int = 200) -> ReplyVerdict:
    """Judge a message that answers the request, from a body or from a stream: usually `AnswerReceived`."""
    if isinstance(message, InvalidMessage):
        return ReplyLost(f"the answer cannot be read: {message.why}")
    if isinstance(message, Error) and message.id is None:
        if not isinstance(exchange.message, Request):
            return ReplyLost(f"the whole batch was refused: {_error_text(message)}")
        message = attrs.evolve(message, id=exchange.message.id)
    if isinstance(message, Batch) and not exchange.revision.batches:
        return ReplyLost(f"the answer is a batch, and {exchange.revision} has none")
    if not exchange.answered_by(message):
        return ReplyLost(f"the server sent a {type(message).__name__} that does not answer the request")
    if not isinstance(message, Error):
        return AnswerReceived(message)
    # draft-01: "A client may tolerate -32001 with 400."
    mismatch = message.code == errors.HEADER_MISMATCH or (message.code == DRAFT_HEADER_MISMATCH and status == 400)
    calling = isinstance(exchange.message, Request) and exchange.message.method == "tools/call"
    if mismatch and calling and not exchange.revision.handshake and not exchange.probing:
        return RefreshTools(message)
    return _fall_back(exchange, status, message) or AnswerReceived(message)


def _fall_back(exchange: Exchange, status: int, error: Error | None) -> ReplyVerdict | None:
    """The next step after a first contact that failed.  A 5xx says nothing about the kind of server."""
    # ver-14: "a recognised modern error identifies a modern server".
    if not exchange.probing or (error is not None and error.code in errors.MODERN_ERRORS):
        return None
    why = f"HTTP {status}" if error is None else f"HTTP {status}: {_error_text(error)}"
    rules = exchange.revision.http
    if exchange.opening:
        # sse-10..12.  2024-11-05 knows no other transport, so for it any refusal is a reason to try HTTP+SSE.
        falls = status in rules.sse_fallback if rules is not None else 400 <= status < 500
        return TrySse(why) if falls else None
    if exchange.revision.handshake or not _is_legacy(exchange.message, status, error):
        return None
    return TryInitialize(why)


def _is_legacy(message: Message | None, status: int, error: Error | None) -> bool:
    """http-109: "If the body is empty or is not a recognized modern JSON-RPC error, fall back to initialize"."""
    # Every modern server supports server/discover, so any other error means a legacy server.  A stream has no status.
    discovering = isinstance(message, Request) and message.method == "server/discover"
    # 408 and 429 are temporary, and say nothing about the server.
    if 400 <= status < 500 and status not in (408, 429):
        # http-71: a modern server sends 404 with this error if it does not support the method.
        lacking = error is not None and (status, error.code) == (404, errors.METHOD_NOT_FOUND)
        return discovering or not lacking
    return discovering and status < 300


def _redirect(exchange: Exchange, status: int, location: str | None) -> ReplyVerdict:
    if location is None:
        return ReplyLost(f"HTTP {status} without a Location")
    # 301 to 303 turn a POST into a GET, in practice or by definition.
    if status not in (307, 308) and (exchange.method != "GET" or status not in (301, 302, 303)):
        return ReplyLost(f"a {exchange.method} cannot follow a redirect with HTTP {status}")
    url = _same_origin(exchange.url, location)
    # http-61: the session, the token and the arguments of the request are meant for this origin only.
    if url is None:
        return ReplyLost(f"HTTP {status} redirects to another origin or to an invalid URL; use its URL if you trust it")
    return Redirected(url)


def _same_origin(base: str, reference: str) -> str | None:
    """Resolve the reference to a URL, if it has the origin of the base, else None.

    A URL must be visible ASCII: a parser would drop other characters, or a header could not hold them.  And it must not
    contain a user: only this side could know the password.
    """
    try:
        if not re.fullmatch("[!-~]*", reference) or "@" in urlsplit(reference).netloc:
            return None
        url = urljoin(base, reference)
        one, other = (
            (parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme))
            for parts in (urlsplit(url), urlsplit(base))
        )
    except ValueError:  # not a URL: for example a port that is not a number, or a single bracket
        return None
    return url if one == other else None


_PORTS = {"http": 80, "https": 443}


def url_without_secrets(url: str) -> str:
    """Return a URL without the parts that may be secret: the user, the query and the fragment."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def read_endpoint(url: str, event: SseEvent | Oversized) -> str | ReplyLost:
    """Return the URL to post to, from the first event of an HTTP+SSE stream (sse-06, sse-08, sse-14)."""
    if not isinstance(event, SseEvent) or event.event != "endpoint":
        return ReplyLost("an HTTP+SSE stream must begin with an endpoint event")
    target = _same_origin(url, event.data.decode("utf-8", "replace"))
    return ReplyLost("the endpoint event must name a URL of the stream's origin") if target is None else target


# Streams that break.

# Seconds.  A server that closes at once and says "retry: 0" would be polled as fast as the network allows.  No server
# means more than an hour, and a longer wait is as good as none.
_SHORTEST_WAIT, _LONGEST_WAIT = 0.1, 3600
_LONGEST_PAUSE = 30  # seconds, if the server does not say how long to wait: the pauses are 1, 2, 4 ... seconds
# Seconds after which a connection counts as stable.  A server that closes every connection at once is still given up.
_STABLE = 8.0

_MISSED = 3  # missing keep-alives in a row, after which the stream counts as dead: one may be late, and one lost
# Seconds.  Keep-alives closer than this count as one that came in pieces.  A proxy may hold several back and deliver
# them together; their interval would make the stream look dead too soon.
_DISTINCT = 1.0


class KeepAlives:
    """How long one connection of a stream may be silent: `_MISSED` intervals of its keep-alives.

    A dead connection is not noticed otherwise: no bytes arrive, and a client that only reads sends nothing that could
    fail.  A keep-alive is an event without a message: a comment, an event without data, an event with another name.
    Servers send them at fixed times, or after a period of silence.  So the interval is the longest of the last three
    between which nothing else arrived.  Before there is one, it is the interval of the last two keep-alives, which is
    never too short.
    """

    def __init__(self) -> None:
        self.timeout = math.inf
        """Seconds; infinite before the second keep-alive."""
        self._last = -math.inf
        self._silent = False  # nothing else has arrived since the last keep-alive
        self._intervals: deque[float] = deque(maxlen=3)  # a stalled connection makes one too long; it is replaced

    def received(self, now: float, *, keep_alive: bool) -> None:
        """Report that bytes arrived: keep-alives only, or other content too."""
        if not keep_alive:
            self._silent = False
        elif now - self._last >= _DISTINCT:
            interval = now - self._last
            if interval < math.inf:
                if self._silent:
                    self._intervals.append(interval)
                self.timeout = _MISSED * max(self._intervals, default=interval)
            self._last, self._silent = now, True


@record
class Reconnect:
    """Wait this many seconds, then GET the endpoint with this Last-Event-ID ("": without the header)."""

    seconds: float
    last_event_id: str


class StreamResumption:
    """One stream of a session over all its connections: the last event id, and the next step when a connection breaks.

    `standalone` is the stream that a GET opened.  It is reopened even without an id to resume from.  A stream is over,
    and this object with it, when the response to its request was read; this class need not be told.

    Attempts count from the last event, even an empty one.  So a server may close its connections on purpose ("polling")
    for ever, and a server that is gone is given up after `attempts`.  The count also restarts after a stable
    connection, because proxies cut streams that are idle or carry only comments.  A standalone stream that ever worked
    is not given up, but retried after the longest pause: no caller would reopen it.
    """

    def __init__(self, revision: Revision, *, standalone: bool = False, attempts: int = 5) -> None:
        self.last_event_id = ""
        self._resumable = revision.handshake  # http-114
        self._standalone = standalone
        self._attempts = attempts
        self._retry: int | None = None
        self._tried = 0
        self._proven = False  # True once a connection delivered an event or was stable
        self._productive = False  # True if the present connection delivered a message

    def received(self, reader: EventReader, events: Sequence[SseEvent | Oversized]) -> None:
        """Call this after each `feed` of the present connection's reader, with the events that it returned."""
        if events or reader.last_event_id or reader.retry is not None:
            self._tried, self._proven = 0, True
        self._productive |= any(isinstance(each, Oversized) or each.data != b"" for each in events)
        # If this connection sent no id, or no `retry`, the value of an earlier one stays.
        self.last_event_id = reader.last_event_id or self.last_event_id
        self._retry = self._retry if reader.retry is None else reader.retry

    def ended(self, held: float = 0) -> Reconnect | ReplyLost:
        """The connection was closed or lost after `held` seconds, or could not be opened.  Returns the next step."""
        if not self._resumable:
            return ReplyLost(
                "the stream ended before the answer, and this revision cannot resume streams; send a new request"
            )
        if not self.last_event_id and not self._standalone:
            return ReplyLost("the stream ended before the answer, and sent no event id to resume from")
        if held >= _STABLE:
            self._tried, self._proven = 0, True
        exhausted = self._tried >= self._attempts
        if exhausted and not (self._standalone and self._proven):
            return ReplyLost(f"the stream could not be resumed in {self._attempts} attempts")
        wait: float
        # http-50: "The client MUST respect the retry field".  Without it, double the wait each time.
        if self._retry is None:
            wait = min(2**self._tried, _LONGEST_PAUSE)
        else:
            wait = min(max(self._retry / 1000, 0 if self._productive else _SHORTEST_WAIT), _LONGEST_WAIT)
        wait = max(wait, _LONGEST_PAUSE) if exhausted else wait
        self._tried = min(self._tried + 1, self._attempts)
        self._productive = False
        return Reconnect(wait, self.last_event_id)

    def refused(self, verdict: ReplyVerdict) -> Reconnect | ReplyLost:
        """The GET was answered without a stream, and `read_reply` returned this verdict.  Returns the next step."""
        # 5xx: a proxy whose server is restarting.  408: a slow line.  409: a server that has not noticed the end of the
        # last connection.
        if (
            isinstance(verdict, ReplyLost)
            and verdict.status is not None
            and (verdict.status >= 500 or verdict.status in (408, 409))
        ):
            return self.ended()
        if isinstance(verdict, RetryAfter):
            # Half a minute in all: a server may say one second each time while its store is away.
            seconds = min(max(verdict.seconds, 2**self._tried), _LONGEST_WAIT)
            again = self.ended()
            return attrs.evolve(again, seconds=seconds) if isinstance(again, Reconnect) else again
        # A server may forget events; this is no breach of the protocol.
        status = verdict.status if isinstance(verdict, ReplyLost) else None
        return ReplyLost(f"the server does not resume the stream: {reason(verdict)}", status)
