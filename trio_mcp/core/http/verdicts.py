"""What a server serves by HTTP, what it is asked, and what may come of that: the words of `http`, which decides.

A driver makes an `HttpPolicy` of its settings and an `HttpRequest` of what has come; it gets a `Verdict`, whose class
says what is to be done.  Most of a driver needs nothing but these.  Every reply that is made here has its
Content-Length, and one that refuses has a JSON-RPC error for a body.
"""

from __future__ import annotations

import enum
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.http.fields import AllowList, Fields, Headers, RawFields, reply_headers
from trio_mcp.core.jsonrpc import Error, Limits, Message, encode, prepare
from trio_mcp.core.records import record
from trio_mcp.core.revisions import REVISIONS, Revision
from trio_mcp.core.session import Offer, ServerProtocol
from trio_mcp.core.state import LinkKind
from trio_mcp.core.terms import Terms

__all__ = [
    "LOOPBACK_HOSTS", "LOOPBACK_ORIGINS", "SESSION_PARAMETER", "Answer", "Deliver", "EndSession", "HttpPolicy",
    "HttpRequest", "OpenLegacyStream", "OpenStream", "PathKind", "Reply", "Screened", "Serve", "SessionFacts",
    "Verdict", "empty", "endpoint_uri", "refusal", "session_id", "status_for", "where_websockets_are",
]  # fmt: skip

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
LOOPBACK_ORIGINS = tuple(f"{scheme}://{host}:*" for scheme in ("http", "https") for host in LOOPBACK_HOSTS)

SESSION_PARAMETER = "session"


class PathKind(enum.Enum):
    __hash__ = object.__hash__  # each is one of a kind; that of `Enum` hashes its name, by a function of Python's

    ENDPOINT = enum.auto()
    SSE = enum.auto()
    MESSAGES = enum.auto()
    WEBSOCKET = enum.auto()


_WEBSOCKET = PathKind.WEBSOCKET  # in Python 3.11 a member of an enum is looked up eight times as slowly

# What else than the endpoint there is, by the setting that gives its path.
_MORE_PLACES = {"sse_path": PathKind.SSE, "message_path": PathKind.MESSAGES, "websocket_path": PathKind.WEBSOCKET}


def _path(path: str) -> str:
    if not path.startswith("/") or "?" in path:
        raise UsageError(f"a path begins with a slash and has no query; got {path!r}")
    return path.rstrip("/")


@record
class HttpPolicy:
    """What a server serves by HTTP, and to whom.  The defaults are for a server on loopback.

    Paths are served with and without a trailing slash.  `sse_path` and `message_path` are those of the old HTTP+SSE
    transport, which is off unless they are given (sse-13); `websocket_path` is where WebSockets are, if the driver has
    any.  Without `sessions` legacy clients are served too, each POST for itself; with `json_only` nothing is ever
    answered by a stream.  A driver without an event log sets `resumable` to False: a client that wants to resume a
    stream is refused then.
    """

    path: str = attrs.field(default="/mcp", converter=_path)
    sse_path: str | None = attrs.field(default=None, converter=attrs.converters.optional(_path))
    message_path: str | None = attrs.field(default=None, converter=attrs.converters.optional(_path))
    websocket_path: str | None = attrs.field(default=None, converter=attrs.converters.optional(_path))
    allowed_hosts: Sequence[str] = LOOPBACK_HOSTS  # as `AllowList` understands them
    allowed_origins: Sequence[str] = LOOPBACK_ORIGINS
    revisions: Sequence[Revision] = tuple(REVISIONS.values())
    sessions: bool = True
    json_only: bool = False
    resumable: bool = True
    limits: Limits = attrs.field(factory=Limits)
    # Worked out once.
    hosts: AllowList = attrs.field(init=False, repr=False, eq=False)
    origins: AllowList = attrs.field(init=False, repr=False, eq=False)
    places: Mapping[str, PathKind] = attrs.field(init=False, repr=False, eq=False)
    _eras: frozenset[bool] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        more = {name: path for name in _MORE_PLACES if (path := getattr(self, name)) is not None}
        if ("sse_path" in more) is not ("message_path" in more):
            raise UsageError("sse_path and message_path come together: what one sends, the other takes")
        places = {self.path: PathKind.ENDPOINT, **{path: _MORE_PLACES[name] for name, path in more.items()}}
        if len(places) <= len(more):
            raise UsageError(f"path, {', '.join(more)} must all be different")
        # The way of attrs to set what a frozen object works out.
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "_eras", frozenset(each.handshake for each in self.revisions))
        object.__setattr__(self, "hosts", AllowList("allowed_hosts", self.allowed_hosts, schemes=False))
        object.__setattr__(self, "origins", AllowList("allowed_origins", self.allowed_origins, schemes=True))

    def serves(self, *, handshake: bool) -> bool:
        """Whether any revision of the legacy era (with a handshake), or of the modern one, is served."""
        return handshake in self._eras


def _headers(fields: RawFields) -> Headers:
    return fields if isinstance(fields, Headers) else Headers(fields)


@record
class HttpRequest:
    """`target` is the path and query as they came (or the whole URI that a proxy is sent)."""

    method: str
    target: str = attrs.field(repr=False)  # an HTTP+SSE client has its session there
    headers: Headers = attrs.field(converter=_headers)  # from pairs or a mapping, of bytes or strings
    body: bytes = attrs.field(default=b"", repr=False)


@record
class SessionFacts:
    """What the driver knows of a session.  Before the handshake of an HTTP+SSE stream, its revision is 2024-11-05."""

    revision: Revision
    principal: Any = None
    legacy_stream: bool = False  # opened by HTTP+SSE: it lives on the message path, the others on the endpoint


class Answer(enum.Enum):
    """How requests may be answered: what the client takes and the server offers.

    EITHER means JSON, which costs nothing and every client can read, unless something precedes the answer, or it takes
    so long that proxies would take the silence for death: after as long a stream would have its keep-alive comment.
    """

    EITHER = enum.auto()
    JSON = enum.auto()
    STREAM = enum.auto()


# The verdicts.  `cors` are header fields that belong on whatever reply the driver makes of them.


@record
class Reply:
    """Send this, and that is all.  `error` is what the body says, or None."""

    status: int
    headers: Fields
    body: bytes = b""
    error: Error | None = None


@record
class Deliver:
    """Feed this message to its session, then send `reply`; if it cannot be accepted after all, a `refusal` instead.

    `reply` is 202, or 400 where there is a `fault`: a malformed response, which still ends what it meant to answer, or
    nonsense in a batch without requests, which is taken out of it.

    Without a `session` the message stands alone and there is nothing to feed it to: send `reply`, that is all.  (So it
    is in the modern era, where a client cancels by closing its response stream.)
    """

    message: Message
    revision: Revision
    session: str | None = attrs.field(repr=False)
    cors: Fields
    fault: Error | None = None

    @property
    def reply(self) -> Reply:
        return empty(202, self.cors) if self.fault is None else refusal(400, self.fault, self.cors)  # http-16


@record
class Serve:
    """Feed this message, and answer its requests on this response: as JSON or as a stream, as `answer` allows.

    With `session` the message goes to that session, otherwise to a `new_session`.  With `opens_session` the driver
    keeps the new one under a `session_id` as soon as it reports `SessionAgreed`.  `revision` is None for `initialize`,
    which agrees the revision itself.  A `ResponseEncoder` carries the answer.

    A client may close the response before the answer.  In the modern era that cancels the request: call
    `connection_lost()` of its session.  In the legacy era it loses nothing.
    """

    message: Message
    revision: Revision | None
    session: str | None = attrs.field(repr=False)
    opens_session: bool
    answer: Answer
    cors: Fields

    def new_session(self, offer: Offer, limits: Limits | None = None) -> ServerProtocol:
        """A session for this message, if it is not for one that the driver has."""
        if self.revision is not None and not self.revision.handshake:
            return ServerProtocol(offer, link=LinkKind.EXCHANGE, limits=limits)  # the message brings its terms
        terms = None if self.revision is None else Terms(self.revision)
        return ServerProtocol(offer, link=LinkKind.SESSION, limits=limits, terms=terms)


@record
class OpenStream:
    """Open the standalone stream of this session, or resume one of its streams after the event with this id."""

    session: str = attrs.field(repr=False)
    revision: Revision
    after: str | None
    cors: Fields


@record
class EndSession:
    """End this session, then send `reply`."""

    session: str = attrs.field(repr=False)
    cors: Fields

    @property
    def reply(self) -> Reply:
        return empty(204, self.cors)


@record
class OpenLegacyStream:
    """Open an HTTP+SSE stream and its session.  The first event is ``endpoint``, its data `endpoint_uri`."""

    cors: Fields


Verdict: TypeAlias = Reply | Deliver | Serve | OpenStream | EndSession | OpenLegacyStream


@record
class Screened:
    """A request whose head was good: the body may be read, and `judge` be called with it."""

    place: PathKind
    answer: Answer
    cors: Fields

    @property
    def websocket(self) -> bool:
        """Whether this is where WebSockets are; see the head of this file."""
        return self.place is _WEBSOCKET


# Making replies.


def status_for(revision: Revision, code: int) -> int:
    """The HTTP status for an error that answers a request, before anything else was sent on its response."""
    return 200 if revision.http is None else revision.http.statuses.get(code, 200)


def refusal(status: int, error: Error, cors: Fields = (), extra: Fields = ()) -> Reply:
    """A refusal with its JSON-RPC body; also for what a driver refuses itself (429, 503, events no longer kept)."""
    body = encode(prepare(error, null_id=False))
    length = ("Content-Length", str(len(body)))
    return Reply(status, (*reply_headers(cors, stream=False), length, *extra), body, error)


def empty(status: int, fields: Fields) -> Reply:
    """A reply without a body."""
    length: Fields = () if status == 204 else (("Content-Length", "0"),)
    return Reply(status, (*length, *fields))


def session_id(random: bytes) -> str:
    """A session id made of random bytes: visible ASCII, safe in a URI, and as hard to guess as they (http-53, 54)."""
    if len(random) < 16:
        raise UsageError(f"a session id is made of at least 16 random bytes; got {len(random)}")
    return urlsafe_b64encode(random).rstrip(b"=").decode()


def endpoint_uri(policy: HttpPolicy, session: str, prefix: str = "") -> str:
    """Where the client of an HTTP+SSE stream posts to (sse-05).  `prefix` is where the policy's paths are mounted."""
    return f"{prefix}{policy.message_path}?{SESSION_PARAMETER}={session}"


def where_websockets_are(policy: HttpPolicy, prefix: str = "") -> str:
    """For who asks for one elsewhere.  `prefix` is where the policy's paths are mounted."""
    path = policy.websocket_path
    there = "no WebSockets are served" if path is None else f"WebSockets are at {prefix + path or '/'}"
    return f"{there} (websocket_path)"
