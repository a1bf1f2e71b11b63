"""The values that pass between a driver and `server_rules`: settings, requests, and verdicts.

A driver makes an `HttpPolicy` from its settings and an `HttpRequest` from each request.  `server_rules` returns a
`Verdict`, whose class tells the driver the next step.  Most of a driver needs only these classes.  Every reply made
here has a Content-Length, and every refusal has a JSON-RPC error as its body.
"""

from __future__ import annotations

import enum
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.http.fields import AllowList, Fields, Headers, RawFields, reply_headers
from trio_mcp.core.messages import Error, Limits, Message, encode, prepare, record
from trio_mcp.core.requests import LinkKind
from trio_mcp.core.revisions import REVISIONS, Revision, Terms
from trio_mcp.core.session import Offer, ServerProtocol

__all__ = [
    "LOOPBACK_HOSTS", "LOOPBACK_ORIGINS", "SESSION_PARAMETER", "Answer", "Deliver", "EndSession", "HttpPolicy",
    "HttpRequest", "OpenLegacyStream", "OpenStream", "PathKind", "Reply", "Screened", "Serve", "SessionFacts",
    "Verdict", "empty", "endpoint_uri", "refusal", "session_id", "status_for", "websocket_hint",
]  # fmt: skip

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
LOOPBACK_ORIGINS = tuple(f"{scheme}://{host}:*" for scheme in ("http", "https") for host in LOOPBACK_HOSTS)

SESSION_PARAMETER = "session"


class PathKind(enum.Enum):
    __hash__ = object.__hash__  # members are singletons; `Enum` hashes the name, in Python code

    ENDPOINT = enum.auto()
    SSE = enum.auto()
    MESSAGES = enum.auto()
    WEBSOCKET = enum.auto()


_WEBSOCKET = PathKind.WEBSOCKET  # a global: in Python 3.11 the lookup of an enum member is eight times slower

# The paths beside the endpoint, by setting.
_OPTIONAL_PATHS = {"sse_path": PathKind.SSE, "message_path": PathKind.MESSAGES, "websocket_path": PathKind.WEBSOCKET}


def _path(path: str) -> str:
    if not path.startswith("/") or "?" in path:
        raise UsageError(f"a path must begin with a slash and have no query; got {path!r}")
    return path.rstrip("/")


@record
class HttpPolicy:
    """The settings of an HTTP server.  The defaults are for a server on loopback.

    Paths are served with and without a trailing slash.  `sse_path` and `message_path` enable the old HTTP+SSE
    transport, which is off by default (sse-13).  `websocket_path` is the path for WebSockets, if the driver supports
    them.  With `sessions=False` legacy clients are still served, but each POST stands alone.  With `json_only=True` no
    response is a stream.  A driver without an event log sets `resumable=False`; then a client that tries to resume a
    stream is refused.
    """

    path: str = attrs.field(default="/mcp", converter=_path)
    sse_path: str | None = attrs.field(default=None, converter=attrs.converters.optional(_path))
    message_path: str | None = attrs.field(default=None, converter=attrs.converters.optional(_path))
    websocket_path: str | None = attrs.field(default=None, converter=attrs.converters.optional(_path))
    allowed_hosts: Sequence[str] = LOOPBACK_HOSTS  # patterns of `AllowList`
    allowed_origins: Sequence[str] = LOOPBACK_ORIGINS
    revisions: Sequence[Revision] = tuple(REVISIONS.values())
    sessions: bool = True
    json_only: bool = False
    resumable: bool = True
    limits: Limits = attrs.field(factory=Limits)
    # Computed once.
    hosts: AllowList = attrs.field(init=False, repr=False, eq=False)
    origins: AllowList = attrs.field(init=False, repr=False, eq=False)
    paths: Mapping[str, PathKind] = attrs.field(init=False, repr=False, eq=False)
    _eras: frozenset[bool] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        more = {name: path for name in _OPTIONAL_PATHS if (path := getattr(self, name)) is not None}
        if ("sse_path" in more) is not ("message_path" in more):
            raise UsageError("set sse_path and message_path together: HTTP+SSE needs both")
        paths = {self.path: PathKind.ENDPOINT, **{path: _OPTIONAL_PATHS[name] for name, path in more.items()}}
        if len(paths) <= len(more):
            raise UsageError(f"path, {', '.join(more)} must all be different")
        # attrs sets attributes of a frozen object in this way.
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "_eras", frozenset(each.handshake for each in self.revisions))
        object.__setattr__(self, "hosts", AllowList("allowed_hosts", self.allowed_hosts, schemes=False))
        object.__setattr__(self, "origins", AllowList("allowed_origins", self.allowed_origins, schemes=True))

    def serves(self, *, handshake: bool) -> bool:
        """Return whether any legacy revision (with a handshake), or any modern one, is served."""
        return handshake in self._eras


def _headers(fields: RawFields) -> Headers:
    return fields if isinstance(fields, Headers) else Headers(fields)


@record
class HttpRequest:
    """One HTTP request.  `target` is the path and query as received (or the absolute URI, if sent to a proxy)."""

    method: str
    target: str = attrs.field(repr=False)  # contains the session id of an HTTP+SSE client
    headers: Headers = attrs.field(converter=_headers)  # from pairs or a mapping, of bytes or strings
    body: bytes = attrs.field(default=b"", repr=False)


@record
class SessionFacts:
    """The facts about a session that the rules need.

    An HTTP+SSE session has revision 2024-11-05 before its handshake.
    """

    revision: Revision
    principal: Any = None
    legacy_stream: bool = False  # opened by HTTP+SSE: served on the message path, other sessions on the endpoint


class Answer(enum.Enum):
    """How requests may be answered, from the types that the client accepts and the server offers.

    EITHER: one JSON body, which is cheap and which every client can read.  It becomes a stream if another message
    precedes the answer, or if the answer takes longer than the interval of keep-alive comments: a proxy would close a
    response without any bytes.
    """

    EITHER = enum.auto()
    JSON = enum.auto()
    STREAM = enum.auto()


# The verdicts.  The driver adds the header fields `cors` to every response that follows from a verdict.


@record
class Reply:
    """Send this reply; nothing else follows.  `error` is the JSON-RPC error in the body, or None."""

    status: int
    headers: Fields
    body: bytes = b""
    error: Error | None = None


@record
class Deliver:
    """Feed this message to its session, then send `reply`.  If the session cannot take it, send a `refusal` instead.

    `reply` is 202, or 400 if there is a `fault`: a malformed response (the session is told, so that the request it
    answers fails), or invalid items in a batch without requests (they are left out of `message`).

    Without a `session` there is nothing to feed: only send `reply`.  This is so for modern notifications; a modern
    client cancels by closing its response stream.
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

    With `session`, feed it to that session, else to a `new_session`.  With `opens_session`, keep the new session under
    a `session_id` once it reports `SessionAgreed`.  `revision` is None for `initialize`, which negotiates the revision.
    A `ResponseEncoder` writes the answer.

    A client may close the response before the answer.  In the modern era this cancels the request: call
    `connection_lost()` of its session.  In the legacy era nothing is lost.
    """

    message: Message
    revision: Revision | None
    session: str | None = attrs.field(repr=False)
    opens_session: bool
    answer: Answer
    cors: Fields

    def new_session(self, offer: Offer, limits: Limits | None = None) -> ServerProtocol:
        """Make a session for this message, if `session` is None."""
        if self.revision is not None and not self.revision.handshake:
            return ServerProtocol(offer, link=LinkKind.EXCHANGE, limits=limits)  # the message brings its terms
        terms = None if self.revision is None else Terms(self.revision)
        return ServerProtocol(offer, link=LinkKind.SESSION, limits=limits, terms=terms)


@record
class OpenStream:
    """Open the standalone stream of this session, or resume one of its streams after the event with the id `after`."""

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
    """A request whose head passed all checks: read the body and call `judge` with it."""

    path_kind: PathKind
    answer: Answer
    cors: Fields

    @property
    def websocket(self) -> bool:
        """True if this is the path for WebSockets; see the head of `server_rules`."""
        return self.path_kind is _WEBSOCKET


# Make replies.


def status_for(revision: Revision, code: int) -> int:
    """The HTTP status of an error that answers a request, if it is the first message of the response."""
    return 200 if revision.http is None else revision.http.statuses.get(code, 200)


def refusal(status: int, error: Error, cors: Fields = (), extra: Fields = ()) -> Reply:
    """Make a refusal with a JSON-RPC body.  Drivers use it for their own refusals too (429, 503, forgotten events)."""
    body = encode(prepare(error, null_id=False))
    length = ("Content-Length", str(len(body)))
    return Reply(status, (*reply_headers(cors, stream=False), length, *extra), body, error)


def empty(status: int, fields: Fields) -> Reply:
    """Make a reply without a body."""
    length: Fields = () if status == 204 else (("Content-Length", "0"),)
    return Reply(status, (*length, *fields))


def session_id(random: bytes) -> str:
    """Make a session id from random bytes: visible ASCII, safe in a URI, as hard to guess as they (http-53, 54)."""
    if len(random) < 16:
        raise UsageError(f"session_id() needs at least 16 random bytes, got {len(random)}")
    return urlsafe_b64encode(random).rstrip(b"=").decode()


def endpoint_uri(policy: HttpPolicy, session: str, prefix: str = "") -> str:
    """The URI to which the client of an HTTP+SSE stream posts (sse-05).

    `prefix`: where the policy's paths are mounted.
    """
    return f"{prefix}{policy.message_path}?{SESSION_PARAMETER}={session}"


def websocket_hint(policy: HttpPolicy, prefix: str = "") -> str:
    """A hint for a client that requests a WebSocket at another path.

    `prefix`: where the policy's paths are mounted.
    """
    path = policy.websocket_path
    there = "this server offers no WebSockets" if path is None else f"WebSockets are at {prefix + path or '/'}"
    return f"{there} (websocket_path)"
