"""The HTTP rules of a server, without I/O: from a request they compute a verdict, which says what to do.

This module never uses a socket, so an h11 server, an ASGI or WSGI adapter and a test share the same rules.  The caller
does these steps in this order:

1. It calls `screen` with the head of the request, which checks Origin, Host, path, method, sizes and types.  A bad
   request is refused before a byte of its body is read, and a preflight is answered before authentication.
2. It authenticates the request itself, which gives a principal.
3. It calls `check_session`, which refuses a session id in the head if the session does not exist or belongs to another
   principal.  The body of a refused request is not read.  `judge` checks the same again, because the session may end
   while the body is read.
4. It calls `judge` with the body, which checks era, version and mirrored headers (headers that repeat a value of the
   body).  The verdict is the next step: send this `Reply`; pass the message to the session and send 202 (`Deliver`);
   pass the messages on and answer by JSON or by a stream (`Serve`); open or end a session or a stream.

A caller that does not need the earlier steps calls `judge` at once.  Its arguments have the facts that only the caller
knows: the open sessions, the header rules of the tools, the principal.  It makes an `HttpPolicy` from its settings and
an `HttpRequest` from each request.  The class of the `Verdict` tells it the next step.

WebSockets share step 1, because their rules about origins and paths are the same.  If `Screened.websocket` is true, the
caller authenticates, answers the WebSocket handshake and serves messages, and does not call this module again.  If a
request to the WebSocket path is not an upgrade request, the caller calls `judge`, which refuses it.

The rules in short.  A message is modern if its `_meta` names a version, or if its version header names a modern
revision.  Modern messages are stateless, use POST only, and need every mirrored header.  `initialize`, and every
message of its session, is legacy.  If no modern revision is served, all messages are legacy, and a modern message is
refused with the error of a legacy server.  With a modern error the client would take this server for a modern one, and
would never try `initialize` (ver-14).

Every refusal has a JSON-RPC error as its body.  The error names the received value, the expected value and the option
that decides, but never a session id or an argument.  In every revision it has the id of the request if the id could be
read, and otherwise no id ("a JSON-RPC error response that has no `id`").
"""

from __future__ import annotations

import enum
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from trio_mcp.core import errors
from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.http.fields import (
    DRAFT_HEADER_MISMATCH,
    EVENT_STREAM,
    JSON,
    LAST_EVENT_ID,
    LOOPBACK_HOSTS,
    NO_NAMES,
    PROTOCOL_VERSION,
    SESSION_ID,
    AllowList,
    Fields,
    HttpRequest,
    Mirror,
    Reply,
    cors_headers,
    empty,
    is_json,
    mirror_fault,
    preflight_headers,
    quality,
    refusal,
    split_target,
    standard_fault,
)
from trio_mcp.core.messages import (
    ABSENT,
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
    mutable_record,
    record,
)
from trio_mcp.core.requests import LinkKind
from trio_mcp.core.revisions import META_VERSION, REVISIONS, Revision, Terms
from trio_mcp.core.session import Offer, ServerProtocol

__all__ = [
    "LOOPBACK_ORIGINS", "SESSION_PARAMETER", "Answer", "Deliver", "EndSession", "HttpPolicy",
    "OpenLegacyStream", "OpenStream", "PathKind", "Screened", "Serve", "SessionFacts", "Verdict", "check_session",
    "endpoint_uri", "judge", "screen", "session_id", "status_for", "websocket_hint",
]  # fmt: skip

LOOPBACK_ORIGINS = tuple(f"{scheme}://{host}:*" for scheme in ("http", "https") for host in LOOPBACK_HOSTS)

SESSION_PARAMETER = "session"


class PathKind(enum.Enum):
    __hash__ = object.__hash__  # members are singletons; `Enum` hashes the name, in Python code

    ENDPOINT = enum.auto()
    SSE = enum.auto()
    MESSAGES = enum.auto()
    WEBSOCKET = enum.auto()
    MONITORING = enum.auto()


# Globals, because in Python 3.11 the lookup of an enum member is eight times slower than that of a global.
_ENDPOINT, _SSE, _MESSAGES, _WEBSOCKET, _MONITORING = PathKind
_MONITORING_PATHS = ("/healthz", "/readyz", "/metrics")


def _path(path: str) -> str:
    if not path.startswith("/") or "?" in path:
        raise UsageError(f"a path must begin with a slash and have no query; got {path!r}")
    return path.rstrip("/")


def _paths(policy: HttpPolicy) -> Mapping[str, PathKind]:
    if (policy.sse_path is None) is not (policy.message_path is None):
        raise UsageError("set sse_path and message_path together: HTTP+SSE needs both")
    beside = {"sse_path": _SSE, "message_path": _MESSAGES, "websocket_path": _WEBSOCKET}
    given = {"path": _ENDPOINT, **{name: kind for name, kind in beside.items() if getattr(policy, name) is not None}}
    paths = {getattr(policy, name): kind for name, kind in given.items()}
    if len(paths) < len(given):
        raise UsageError(f"{', '.join(given)} must all be different")
    if policy.monitoring:
        if taken := paths.keys() & _MONITORING_PATHS:
            raise UsageError(f"monitoring=True serves {min(taken)} itself; choose another path")
        paths |= dict.fromkeys(_MONITORING_PATHS, _MONITORING)
    return paths


def _derived(compute: Callable[[Any], Any]) -> Any:
    """Return a field that is computed once from the other fields."""
    return attrs.field(init=False, repr=False, eq=False, default=attrs.Factory(compute, takes_self=True))


@record
class HttpPolicy:
    """The settings of an HTTP server.  The defaults are for a server on loopback.

    Paths are served with and without a trailing slash.  `sse_path` and `message_path` enable the old HTTP+SSE
    transport, which is off by default (sse-13).  `websocket_path` is the path for WebSockets, if the driver supports
    them.  With `sessions=False` legacy clients are still served, but each POST stands alone.  With `json_only=True` no
    response is a stream.  A driver without an event log sets `resumable=False`; then a client that tries to resume a
    stream is refused.  With `monitoring=True` the driver serves /healthz, /readyz and /metrics.
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
    monitoring: bool = False
    limits: Limits = attrs.field(factory=Limits)
    paths: Mapping[str, PathKind] = _derived(_paths)
    hosts: AllowList = _derived(lambda policy: AllowList("allowed_hosts", policy.allowed_hosts, schemes=False))
    origins: AllowList = _derived(lambda policy: AllowList("allowed_origins", policy.allowed_origins, schemes=True))
    legacy: Mapping[str, Revision] = _derived(lambda policy: {r.name: r for r in policy.revisions if r.handshake})
    """The served revisions with a handshake, by name."""
    modern: Mapping[str, Revision] = _derived(lambda policy: {r.name: r for r in policy.revisions if not r.handshake})
    """The served revisions without a handshake, by name."""


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
class Deliver:
    """Feed this message to its session, then send `reply`.  If the session cannot take it, send a `refusal` instead.

    `reply` is 202, or 400 if there is a `fault`: a malformed response (the session is told, so that the request it
    answers fails), or invalid items in a batch without requests (they are left out of `message`).

    Without a `session`, as in the modern era, only notifications of extensions need a session, of their own.  A modern
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


@mutable_record  # one for each request
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
    ids: tuple[Id, ...] = attrs.field(init=False, eq=False, repr=False)
    """The ids of the requests in the message."""

    @ids.default
    def _ids(self) -> tuple[Id, ...]:
        message = self.message
        if isinstance(message, Request):
            return (message.id,)
        items = message.items if isinstance(message, Batch) else ()
        return tuple(item.id for item in items if isinstance(item, Request))

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

    websocket: bool = False
    """True if this is the path for WebSockets; see the head of `server_rules`."""


def status_for(revision: Revision, code: int) -> int:
    """The HTTP status of an error that answers a request, if it is the first message of the response."""
    return 200 if revision.http is None else revision.http.statuses.get(code, 200)


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


class _RuleBroken(Exception):
    """Raised inside this module if a rule is broken; `screen` and `judge` turn it into a `Reply`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: int = errors.INVALID_REQUEST,
        data: Json = ABSENT,
        extra: Fields = (),
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.data, self.extra = status, code, message, data, extra

    def reply(self, policy: HttpPolicy, request: HttpRequest, cors: Fields, id: Id | None = None) -> Reply:
        message, headers = self.message, request.headers
        if request.method == "GET":  # the request was perhaps sent to the wrong URL
            path_kind = policy.paths.get(split_target(request.target)[1].rstrip("/"))
            browsing = SESSION_ID not in headers and "text/html" in headers.get("Accept", "").lower()
            if path_kind is not _WEBSOCKET and "websocket" in headers.get("Upgrade", "").lower():
                message = f"{message}; {websocket_hint(policy, request.prefix)}"
            elif path_kind is _ENDPOINT and browsing:
                message = f"this is an MCP endpoint, not a web page: give its URL to an MCP client ({message})"
        reply = refusal(self.status, Error(id, self.code, message, self.data), cors, self.extra)
        return attrs.evolve(reply, body=b"") if request.method == "HEAD" else reply


# Step one: the head.


def screen(policy: HttpPolicy, request: HttpRequest) -> Reply | Screened:
    """Check the head of a request.  A returned `Reply` is final: send it."""
    cors: Fields = ()
    try:
        cors, path = _check_sites(policy, request)
        path_kind = policy.paths.get(path.rstrip("/")) if path.startswith("/") else None
        if path_kind is None:
            raise _RuleBroken(404, f"nothing is served at {shown(path)}; {_endpoint_hint(policy, request)} (path)")
        if request.method != "POST" or path_kind is not _ENDPOINT:  # a POST to the endpoint is always served
            allowed, why = _methods(policy, path_kind, request)
            if request.method == "OPTIONS":
                asked = request.headers.get("Access-Control-Request-Headers", "")
                return empty(204, (("Allow", allowed), *cors, *(preflight_headers(asked, allowed) if cors else ())))
            if request.method not in allowed.split(", "):
                # http-120: a 405 names the methods that are allowed; http-33, http-60, http-110.
                what = f"the method {shown(request.method)} is not allowed here; the methods are {allowed}"
                raise _RuleBroken(405, what + (f" ({why})" if why else ""), extra=(("Allow", allowed),))
        _check_framing(request.headers.by_name)
        if request.method == "POST":
            _check_content(policy, request.headers.by_name)
        return Screened(path_kind, _acceptable(policy, path_kind, request), cors, path_kind is _WEBSOCKET)
    except _RuleBroken as refused:
        return refused.reply(policy, request, cors)


def _endpoint_hint(policy: HttpPolicy, request: HttpRequest) -> str:
    return f"the MCP endpoint is {request.prefix + policy.path or '/'}"


_OTHER_SITES = frozenset({"cross-site", "same-site"})  # same-site: another port or subdomain


def _check_sites(policy: HttpPolicy, request: HttpRequest) -> tuple[Fields, str]:
    """Check Origin and Host.  Return the CORS headers (only for a page of an allowed origin) and the path."""
    fields = request.headers.by_name
    origin = fields.get("origin")
    if origin is None:
        # If a page of another site embeds a URL, for example in <img>, browsers send this header instead of Origin.
        site = fields.get("sec-fetch-site")
        if site in _OTHER_SITES and not policy.origins.everything:
            why = f"a page of another site sent this request (Sec-Fetch-Site: {site}) without an Origin"
            raise _RuleBroken(403, f"{why}; it must use fetch() or EventSource, and be in allowed_origins")
    # http-03, http-04: "If the Origin header is present and invalid, servers MUST respond with HTTP 403 Forbidden."
    if origin is not None and not policy.origins.allows(origin):
        raise _RuleBroken(403, f"the origin {shown(origin)} is not allowed; add it to allowed_origins to serve it")
    host, path = split_target(request.target)
    if host is None:
        host = fields.get("host")
    # In a DNS rebinding attack, the browser sends the attacker's host name.  The HTTP status for "not the server of
    # this host" is 421 (RFC 9110, 15.5.20).  A request without a Host is HTTP/1.0, and no browser sends it.
    if host is not None and not policy.hosts.allows(host) and not _may_monitor(policy, path, host):
        raise _RuleBroken(421, f"the host {shown(host)} is not served here; add it to allowed_hosts to serve it")
    return () if origin is None else cors_headers(origin), path


def _may_monitor(policy: HttpPolicy, path: str, host: str) -> bool:
    """Return whether this is a path of monitoring, and the host an IP address.

    Orchestrators address a process in this way.  A page that uses DNS rebinding cannot: its host is a name.
    """
    if policy.paths.get(path.rstrip("/")) is not _MONITORING:
        return False
    import ipaddress  # takes 3 ms, which other servers should not pay

    try:
        ipaddress.ip_address(host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0])
    except ValueError:
        return False
    return True


def _methods(policy: HttpPolicy, path_kind: PathKind, request: HttpRequest) -> tuple[str, str]:
    """Return the methods of this path, as the Allow header lists them, and the reason if some are disabled."""
    if path_kind is not _ENDPOINT:
        allowed = {_MESSAGES: "POST, OPTIONS", _MONITORING: "GET, HEAD, OPTIONS"}.get(path_kind, "GET, OPTIONS")
        return allowed, _endpoint_hint(policy, request)
    # GET streams and DELETE need a session, and only legacy revisions have sessions (http-117).  So these methods are
    # not allowed if the version header names a modern revision.
    if not policy.sessions:
        return "POST, OPTIONS", "sessions=False"
    if not policy.legacy:
        return "POST, OPTIONS", "the served revisions have no sessions"
    if _is_modern(version := request.headers.get(PROTOCOL_VERSION)):
        return "POST, OPTIONS", f"{version} has no sessions"
    return ("POST, DELETE, OPTIONS", "json_only=True") if policy.json_only else ("GET, POST, DELETE, OPTIONS", "")


def _is_modern(version: str | None) -> bool:
    """Return whether the version header names a modern revision, served here or not."""
    named = REVISIONS.get(version or "")
    return named is not None and not named.handshake


def _check_framing(fields: Mapping[str, str]) -> None:
    """Refuse a head if a proxy could see the end of its body at another byte; otherwise requests could be smuggled.

    "A server MAY reject a request that contains both Content-Length and Transfer-Encoding" (RFC 9112, 6.3).  It must
    then close the connection, because the bytes that follow are ambiguous.
    """
    length = fields.get("content-length")
    if length is None:
        return
    if "transfer-encoding" in fields:
        why = "a request must have Content-Length or Transfer-Encoding, not both"
    elif not length.isdecimal():
        why = f"Content-Length must be one number; got {shown(length)}"
    else:
        return
    raise _RuleBroken(400, why, extra=(("Connection", "close"),))


def _check_content(policy: HttpPolicy, fields: Mapping[str, str]) -> None:
    length, kind, limit = fields.get("content-length", "0"), fields.get("content-type"), policy.limits.message_bytes
    if len(length) > 18 or int(length) > limit:
        came = length if len(length) <= 18 else "far too many"
        raise _RuleBroken(413, f"the body has {came} bytes; at most {limit} are allowed (Limits.message_bytes)")
    coding = fields.get("content-encoding")
    if coding is not None and coding.lower() != "identity":
        # RFC 9110, 15.5.16: the refusal names the accepted codings.
        what = f"post messages without compression; the Content-Encoding {shown(coding)} is not supported"
        raise _RuleBroken(415, what, extra=(("Accept-Encoding", "identity"),))
    # This is also a defence against web pages: a page cannot send this type to another origin without a preflight.
    if not is_json(kind):
        came = "no Content-Type" if kind is None else f"the Content-Type {shown(kind)}"
        raise _RuleBroken(415, f"post messages as {JSON} in UTF-8; got {came}")


_STREAMED = (_ENDPOINT, _SSE)
_ANSWERS = {(True, True): Answer.EITHER, (True, False): Answer.JSON, (False, True): Answer.STREAM}


def _acceptable(policy: HttpPolicy, path_kind: PathKind, request: HttpRequest) -> Answer:
    """Return the types that the response may have.  Accept need not list both types, only one that we offer."""
    if path_kind not in _STREAMED or request.method == "DELETE":
        return Answer.EITHER  # the response has no body, is a WebSocket, or has one type only
    accept = request.headers.by_name.get("accept")
    posted = request.method == "POST"
    json = posted and quality(accept, JSON) > 0
    stream = quality(accept, EVENT_STREAM) > 0 and not (posted and policy.json_only)
    if not json and not stream:
        offered = EVENT_STREAM if not posted else JSON if policy.json_only else f"{JSON} and {EVENT_STREAM}"
        why = " (json_only=True)" if posted and policy.json_only else ""
        raise _RuleBroken(406, f"Accept is {shown(accept or '')}; it must allow what is offered: {offered}{why}")
    return _ANSWERS[json, stream]


# Step two: the body.

_WITH_METHOD = (Request, Notification)
_VERSION, _SESSION = PROTOCOL_VERSION.lower(), SESSION_ID.lower()


@attrs.define(eq=False, repr=False)
class _RequestFacts:
    """One request, and the facts that the rules need."""

    policy: HttpPolicy
    request: HttpRequest
    head: Screened
    find_session: Callable[[str], SessionFacts | None]
    principal: Any
    version: str | None
    find_mirrors: Callable[[str], Sequence[Mirror] | None] = lambda tool: None
    mcp_names: Mapping[str, str] = NO_NAMES
    session: tuple[str, SessionFacts] | None = None  # the session that the head names
    id: Id | None = None  # of the request in the body, once it could be read


def check_session(
    policy: HttpPolicy,
    request: HttpRequest,
    screened: Screened,
    *,
    find_session: Callable[[str], SessionFacts | None],
    principal: Any = None,
) -> Reply | None:
    """Check the session that the head names.

    Returns None, or the refusal that `judge` would return for every body.
    """
    if _SESSION not in request.headers.by_name and screened.path_kind is not _MESSAGES:
        return None
    case = _RequestFacts(policy, request, screened, find_session, principal, request.headers.by_name.get(_VERSION))
    try:
        _check_session(case)
    except _RuleBroken as refused:
        return refused.reply(policy, request, screened.cors)
    return None


def judge(
    policy: HttpPolicy,
    request: HttpRequest,
    *,
    find_session: Callable[[str], SessionFacts | None] = lambda session: None,
    find_mirrors: Callable[[str], Sequence[Mirror] | None] = lambda tool: None,
    principal: Any = None,
    screened: Screened | None = None,
    mcp_names: Mapping[str, str] = NO_NAMES,
) -> Verdict:
    """Return the verdict on a request.  This function is pure: it remembers nothing and starts nothing.

    `find_session` looks up a session by its id, and `find_mirrors` the header rules of a tool by its name.  Each may be
    the `get` of a dict.  Without them there are no sessions and no header rules.  `screened` is the result of `screen`
    for this request, if `screen` was called before.  `mcp_names` are those of the extensions (`Offer.mcp_names`).  The
    docstring of each verdict says how to carry it out.  Send a `Reply` unchanged, including its Content-Length.
    """
    head = screened or screen(policy, request)
    if isinstance(head, Reply):
        return head
    version = request.headers.by_name.get(_VERSION)
    case = _RequestFacts(policy, request, head, find_session, principal, version, find_mirrors, mcp_names)
    try:
        _check_session(case)
        return _ROUTES[head.path_kind, request.method](case)
    except _RuleBroken as refused:
        return refused.reply(policy, request, head.cors, case.id)


def _check_session(case: _RequestFacts) -> None:
    """Look up the session that the head names, if it applies to this request."""
    path_kind, policy = case.head.path_kind, case.policy
    if path_kind is _MESSAGES:
        pairs = (each.partition("=") for each in case.request.target.partition("?")[2].split("&"))
        session = next((value for name, _, value in pairs if name == SESSION_PARAMETER), None)
        if session is None:
            raise _RuleBroken(400, f"the query has no {SESSION_PARAMETER}; post to the URI of the endpoint event")
        case.session = session, _facts(case, session)
        return
    session = case.request.headers.by_name.get(_SESSION)
    if session is None or path_kind is not _ENDPOINT or not policy.sessions or not policy.legacy:
        return
    if policy.modern and _is_modern(case.version):
        return  # modern messages have no session, even if the head names one
    facts = _facts(case, session)
    if case.version is not None:
        # A header that names another revision than that of the session is accepted: it breaks only a SHOULD (http-63).
        _legacy_revision(case)
    case.session = session, facts


def _get_or_delete(case: _RequestFacts) -> Verdict:
    """GET and DELETE, which both need an existing session."""
    session, facts = _session(case)
    if case.request.method == "DELETE":
        return EndSession(session, case.head.cors)
    after = case.request.headers.get(LAST_EVENT_ID) or None
    if after is not None and not case.policy.resumable:
        raise _RuleBroken(400, f"this server cannot resume streams; open a new stream, without {LAST_EVENT_ID}")
    return OpenStream(session, facts.revision, after, case.head.cors)


def _post(case: _RequestFacts) -> Verdict:
    message, policy = _message(case), case.policy
    meta = message.params.get("_meta") if isinstance(message, _WITH_METHOD) else None
    stated = meta.get(META_VERSION) if isinstance(meta, dict) else None  # a version, or any other JSON
    opening = isinstance(message, Request) and message.method == "initialize"
    # A version in `_meta` makes a message modern, whatever its headers are (http-117).  A version header that names a
    # modern revision does the same, except for an `initialize` without a version in `_meta`.
    modern = stated is not None or (not opening and _is_modern(case.version))
    if not policy.legacy or (modern and policy.modern):
        return _modern(case, message, stated)
    if isinstance(message, _WITH_METHOD):
        # Legacy revisions do not define these headers.  But a proxy may route by them, so they must equal the body.
        _check_mirrors(case, message, required=False, code=DRAFT_HEADER_MISMATCH)
    if opening:
        # `initialize` negotiates the version and opens a session, so its version header is ignored, and so is the id of
        # a session that lives.  An id that is unknown was refused before (http-57).
        return Serve(message, None, None, policy.sessions, case.head.answer, case.head.cors)
    return _legacy(case, message)


def _message(case: _RequestFacts) -> Message:
    body, limit = case.request.body, case.policy.limits.message_bytes
    if len(body) > limit:
        raise _RuleBroken(413, f"the body has more than {limit} bytes (Limits.message_bytes)")
    if not body:
        raise _RuleBroken(400, "the body is empty; a POST carries one JSON-RPC message", code=errors.PARSE_ERROR)
    message = decode(body, case.policy.limits)
    if isinstance(message, Request):
        case.id = message.id
    elif isinstance(message, InvalidMessage) and message.answers is None:
        # http-16, http-17.  An invalid notification is refused too, although JSON-RPC has no errors for notifications.
        error = message.reply or Error(None, errors.INVALID_REQUEST, message.why)
        case.id = error.id  # of a request that could be read in part
        raise _RuleBroken(400, error.message, code=error.code, data=error.data)
    return message


def _unsupported(case: _RequestFacts, requested: Json, code: int) -> _RuleBroken:
    supported = sorted((each.name for each in case.policy.revisions), reverse=True)
    data = {"supported": supported, "requested": requested[:120] if isinstance(requested, str) else ""}
    what = f"Unsupported protocol version {shown(data['requested'])}; served: {', '.join(supported)}"
    return _RuleBroken(400, what, code=code, data=data)


# Modern: each message has its own terms, and the headers repeat some values of its body.


def _modern(case: _RequestFacts, message: Message, stated: Json) -> Verdict:
    if not isinstance(message, _WITH_METHOD):  # http-12, http-13
        raise _RuleBroken(400, "post one request or one notification; this revision allows no other body")
    revision = _modern_revision(case, message, stated)
    required = isinstance(message, Request)
    _check_mirrors(case, message, required=required, code=errors.HEADER_MISMATCH)
    if not required:
        return Deliver(message, revision, None, case.head.cors)
    answer = case.head.answer
    if message.method in revision.teardown:
        if answer is Answer.JSON:
            why = f"{message.method} is answered by a stream; Accept or json_only=True excludes streams"
            raise _RuleBroken(406, why)
        answer = Answer.STREAM
    return Serve(message, revision, None, opens_session=False, answer=answer, cors=case.head.cors)


def _modern_revision(case: _RequestFacts, message: Request | Notification, stated: Json) -> Revision:
    """Return the revision that the header and `_meta` name.

    If they differ, that is the error, even if the version in the header is also unsupported.
    """
    version = case.version
    if version is None and message.method == "initialize" and stated is None:
        # ver-12: "name the protocol versions it supports in any error it returns to an initialize request".
        raise _unsupported(case, message.params.get("protocolVersion"), errors.UNSUPPORTED_VERSION)
    if version is None:
        # http-73
        if isinstance(stated, str):
            why = f"it repeats the version in _meta, {shown(stated)}"
        else:
            why = f"it names the version of the message, such as {max(each.name for each in case.policy.revisions)}"
        raise _RuleBroken(400, f"the {PROTOCOL_VERSION} header is missing; {why}", code=errors.HEADER_MISMATCH)
    if stated is not None and stated != version:
        why = f"the {PROTOCOL_VERSION} header says {shown(version)}, _meta says {shown(str(stated))}"
        raise _RuleBroken(400, why, code=errors.HEADER_MISMATCH)  # http-69
    revision = case.policy.modern.get(version)
    if revision is None:
        raise _unsupported(case, version, errors.UNSUPPORTED_VERSION)  # http-70, ver-01
    if isinstance(message, Request) and (fault := revision.meta_fault(message.params.get("_meta"))) is not None:
        raise _RuleBroken(400, fault, code=errors.INVALID_PARAMS)  # http-105
    return revision


def _check_mirrors(case: _RequestFacts, message: Request | Notification, *, required: bool, code: int) -> None:
    """http-91, http-95..102: compare the mirrored headers with the body."""
    headers = case.request.headers
    fault = standard_fault(headers, message, required=required, more=case.mcp_names)
    if fault is None and message.method == "tools/call":
        tool, arguments = message.params.get("name"), message.params.get("arguments")
        rules = case.find_mirrors(tool) if isinstance(tool, str) else None
        if rules:
            arguments = arguments if isinstance(arguments, dict) else {}
            fault = mirror_fault(rules, headers, arguments, required=required)
    if fault is not None:
        raise _RuleBroken(400, f"Header mismatch: {fault}", code=code)


# Legacy: the handshake, and the messages of its session.


def _legacy(case: _RequestFacts, message: Message) -> Verdict:
    session: str | None = None
    if case.policy.sessions:
        session, facts = _session(case)
        revision = facts.revision
    else:
        revision = _legacy_revision(case)
        if isinstance(message, Response | Error | InvalidMessage):
            # http-16: without sessions, this server never sends a request, so no response can belong to one.
            raise _RuleBroken(400, "this server has no sessions (sessions=False), so it accepts no responses")
    fault = _fault(message)
    if isinstance(message, Batch):
        message, fault = _check_batch(message, revision)
    serve = Serve(message, revision, session, opens_session=False, answer=case.head.answer, cors=case.head.cors)
    return serve if serve.ids else Deliver(message, revision, session, case.head.cors, fault)


def _fault(item: Message) -> Error | None:
    return Error(None, errors.INVALID_REQUEST, item.why) if isinstance(item, InvalidMessage) else None


def _check_batch(batch: Batch, revision: Revision) -> tuple[Batch, Error | None]:
    """Return the part of a batch that the session receives, and the error for the batch as a whole.

    If the batch has a request, the response has all answers, including the errors for invalid items.  Otherwise the
    session receives only the valid items, and the status of the response reports the invalid ones.
    """
    if not revision.batches:
        raise _RuleBroken(400, f"{revision} has no batches: post each message by itself")
    requests = [each for each in batch.items if isinstance(each, Request)]
    if any(each.method == "initialize" for each in requests):
        raise _RuleBroken(400, "initialize cannot be part of a batch")
    invalid = [each for each in batch.items if isinstance(each, InvalidMessage) and each.answers is None]
    if requests or not invalid:
        return batch, None
    if len(invalid) == len(batch.items):
        raise _RuleBroken(400, f"no item of this batch is a valid message: {invalid[0].why}")
    good = (each for each in batch.items if not isinstance(each, InvalidMessage) or each.answers is not None)
    return Batch(tuple(good)), _fault(invalid[0])


def _session(case: _RequestFacts) -> tuple[str, SessionFacts]:
    if case.session is None:  # http-56
        if case.version is not None and case.version not in REVISIONS:
            raise _unsupported(case, case.version, errors.INVALID_REQUEST)  # the more useful error
        why = f"the {SESSION_ID} header is missing; initialize opens a session and gives its id"
        modern = [each.name for each in case.policy.revisions if not each.handshake]
        if modern and case.request.method == "POST":
            why += f", or send {PROTOCOL_VERSION}: {max(modern)} and the _meta that goes with it"
        raise _RuleBroken(400, why)
    return case.session


def _facts(case: _RequestFacts, session: str) -> SessionFacts:
    facts = case.find_session(session)
    if facts is None or facts.legacy_stream is not (case.head.path_kind is _MESSAGES):  # http-57
        raise _RuleBroken(404, "this session is unknown or has ended; open a new one by initialize")
    if facts.principal != case.principal:
        raise _RuleBroken(403, "this session belongs to another principal")
    return facts


def _legacy_revision(case: _RequestFacts) -> Revision:
    """Return the legacy revision that the header names, or 2025-03-26 (http-64: "the server SHOULD assume")."""
    version = "2025-03-26" if case.version is None else case.version
    named = case.policy.legacy.get(version)
    if named is None:
        raise _unsupported(case, version, errors.INVALID_REQUEST)  # http-65
    return named


# HTTP+SSE (2024-11-05): a session uses one path for its stream and one for its POSTs.


def _legacy_post(case: _RequestFacts) -> Verdict:
    """Accept every message; the answers are sent on the stream of the session."""
    session, facts = _session(case)
    message = _message(case)
    return Deliver(message, facts.revision, session, case.head.cors, _fault(message))


def _no_upgrade(case: _RequestFacts) -> Verdict:
    # RFC 9110, 15.5.22: a 426 must have the field Upgrade, which must also be listed in Connection.
    extra = (("Upgrade", "websocket"), ("Connection", "Upgrade"))
    here = case.request.prefix + (case.policy.websocket_path or "") or "/"
    why = f"{here} accepts WebSockets only; {_endpoint_hint(case.policy, case.request)}"
    raise _RuleBroken(426, why, extra=extra)


_ROUTES: dict[tuple[PathKind, str], Callable[[_RequestFacts], Verdict]] = {
    (_ENDPOINT, "POST"): _post,
    (_ENDPOINT, "GET"): _get_or_delete,
    (_ENDPOINT, "DELETE"): _get_or_delete,
    (_SSE, "GET"): lambda case: OpenLegacyStream(case.head.cors),
    (_MESSAGES, "POST"): _legacy_post,
    (_WEBSOCKET, "GET"): _no_upgrade,
}
