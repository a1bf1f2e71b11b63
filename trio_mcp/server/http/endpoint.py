"""The HTTP endpoint of one server in one run: checks requests by the rules of `core.http`, and carries them out.

The endpoint uses no sockets.  For each request, the owner of the connection (`connection` or `asgi`) calls

1. `admit` with its head, which checks host, origin, path, type and size, and the request rate, and finds the caller
   (`authentication`);
2. `serve` with its body and an `HttpResponse`.  From then on, each task that produces a message for this response
   writes it there itself.  The handler is the only task that is started for a request.

| Request | Receiver of its message |
|---|---|
| a modern request, or a legacy request on a server without sessions | a `ServerSession` for this request alone |
| `initialize` | a new `HttpSession` |
| any other request in a session | that session |

A request outside a session, a single request, ends with its response.  If the client closes the response earlier, a
modern request is cancelled (cancel-14).  A legacy request continues for `Limits.session_idle_seconds`, like a session
whose client has no open response.

While the server drains, new requests are refused with 503, so that the client tries another server.  Requests that
belong to a running call are still accepted: answers, cancellations, retries, and requests to resume a stream.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, cast
from weakref import WeakKeyDictionary

import attrs
import trio

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_REQUEST, UsageError, shown
from trio_mcp.core.http.event_log import EventLog, MemoryEventLog, NotReplayable
from trio_mcp.core.http.fields import Fields, Headers, HttpRequest, Reply, refusal, reply_headers
from trio_mcp.core.http.h1 import RequestHead
from trio_mcp.core.http.server_rules import (
    Deliver,
    EndSession,
    OpenLegacyStream,
    OpenStream,
    PathKind,
    Screened,
    Serve,
    check_session,
    endpoint_uri,
    judge,
    screen,
)
from trio_mcp.core.http.sse import SseEvent, encode_event, encode_message
from trio_mcp.core.messages import Batch, Error, Id, Message, Notification, Request
from trio_mcp.core.oauth.resource import ResourceServer
from trio_mcp.core.principals import has_scopes, name_of_principal
from trio_mcp.core.shares import FEW, LONG, Account, holder_of, weight
from trio_mcp.server.http.authentication import Authenticator, Caller, seconds_left
from trio_mcp.server.http.options import HttpOptions, keep_alive_of, policy_of, public_url_of
from trio_mcp.server.http.responses import (
    EndpointStreams,
    HttpResponse,
    IdleOrder,
    ResponseStream,
    SingleRequest,
)
from trio_mcp.server.http.sessions import HttpSession, LegacyStream, Sessions
from trio_mcp.server.run import Rates, Run
from trio_mcp.server.session import UNFINISHED, ServerSession, converse
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.wire import Framing, Tap
from trio_mcp.transport.workers import called

if TYPE_CHECKING:
    from trio_mcp.server.http.monitoring import Monitoring

__all__ = [
    "SHUTTING_DOWN", "AdmittedRequest", "Endpoint", "OnDisconnect", "cannot_resume", "ignore_disconnect",
    "log_refusal", "open_endpoint", "over_limit", "refuse", "send_reply", "try_later",
]  # fmt: skip

_log = logging.getLogger("trio_mcp")
_refusals = logging.getLogger("trio_mcp.http")

OnDisconnect = Callable[[], None]
_Accepted: TypeAlias = Serve | Deliver | OpenStream | OpenLegacyStream | EndSession

_BUSY = 30  # seconds in Retry-After if the server is full or shuts down
_KEEP_ALIVES = 32  # comments that go out together
_RETRY = 1.0  # seconds that clients should wait before they reconnect, when the server ends their streams
_TOKEN_CHECK_INTERVAL = 10.0  # seconds by which a stream may outlive its access token
_REMEMBERED = 256  # admitted requests
SHUTTING_DOWN = "the server is shutting down"


@attrs.frozen(eq=False, repr=False)
class AdmittedRequest:
    """A request with an accepted head: read its body and call `serve`.  Equal requests of a client may share one."""

    head: Screened
    caller: Caller
    principal: str | None
    """The name of the caller."""
    holder: str | None
    """The principal or address whose limits on bytes, sessions and calls this request uses; see `core.shares`."""
    peer: str | None
    headers: Headers
    """The headers of the request, without those that handlers must not see."""
    request: HttpRequest
    """The request, without its body."""


async def send_reply(response: HttpResponse, reply: Reply) -> None:
    await response.begin(reply.status, reply.headers, reply.body, more=False)


class _GuardedLog:
    """Calls an author's event log through `called`, so that its exceptions do not end the server."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(called, getattr(self._log, name))


class Endpoint:
    """The endpoint of one server in one run; see the head of this file.

    During its method `run`, the endpoint counts as one connection of its `Run`.  Raises `UsageError` for invalid
    options.
    """

    def __init__(self, run: Run, **options: Unpack[HttpOptions]) -> None:
        self.policy = policy_of(run, options)
        self.public_url = public_url_of(options)
        """The option `public_url` without a slash at its end, or None."""
        self.keep_alive = keep_alive_of(options)
        self.paths = frozenset(self.policy.paths)
        """All paths that are served, each without a slash at its end."""
        authenticate = options.get("authenticate")
        self._resource: ResourceServer | None = None
        if (protection := run.dispatcher.protection()) is not None:
            if authenticate is not None:
                raise UsageError("authenticate cannot be used together with Server.protect; remove one of them")
            self._resource = ResourceServer(protection, path=self.policy.path, public_url=self.public_url)
            self.paths |= self._resource.paths
        method = self._resource or authenticate
        self._authenticator = None if method is None else Authenticator(run, method)
        """None: every request is anonymous and has no scopes."""
        self._event_log = options.get("event_log")
        self._monitoring: Monitoring | None = None
        if self.policy.monitoring:
            from trio_mcp.server.http.monitoring import Monitoring

            self._monitoring = Monitoring(run, lambda: run.draining or self._draining or self.leaving)
        self._run = run
        self.limits = run.limits
        self._rates = Rates(run.limits.request_rate)
        # The admitted requests of usual heads by head and client, if nothing else decides.
        self._usual: dict[tuple[HttpRequest, str | None], AdmittedRequest] = {}
        self._remembers = self._authenticator is None and not self._rates.limited
        self._sessions = Sessions(run.limits.sessions, run.limits.session_idle_seconds)
        self._single_requests: set[ServerSession] = set()
        # These flags are for this endpoint alone.  The run has its own, because it may outlive the endpoint.
        self._draining = False
        self._aborting = False
        self.leaving = False
        """Requests are still served, and new connections go to other processes."""
        # The streams that end with their access tokens.
        self._token_deadlines: WeakKeyDictionary[ResponseStream, float] = WeakKeyDictionary()
        self._attached: IdleOrder[ResponseStream] = IdleOrder(self.keep_alive)
        # A second later than sessions end: a session that ends takes its streams along.
        detached: IdleOrder[ResponseStream] = IdleOrder(run.limits.session_idle_seconds + 1)
        self._streams = EndpointStreams(run.nursery, run.limits.outgoing, self._attached, detached)

    async def run(self) -> None:
        """Register with the run, send keep-alives and end idle sessions, until cancelled."""
        self._run.connections[self] = None
        try:
            async with open_nursery() as nursery:
                nursery.start_soon(self._sessions.expire)
                nursery.start_soon(self._end_detached)
                if self._resource is not None:
                    nursery.start_soon(self._end_with_tokens)
                while True:
                    (await self._attached.next()).send_keep_alive()
                    # A turn of the loop costs more than a comment, so others go out a little early.
                    for _ in range(_KEEP_ALIVES):
                        if (stream := self._attached.expired(self.keep_alive / 100)) is None:
                            break
                        stream.send_keep_alive()
                        del stream
        finally:
            self._run.connections.pop(self, None)
            self.stop()

    async def _end_detached(self) -> None:
        while True:
            stream = await self._streams.detached.next()
            stream.owner.client_absent(stream)
            del stream

    async def _end_with_tokens(self) -> None:
        """End subscription streams when their access tokens expire; the client reconnects with a new token.

        Calls that began before the token expired are not ended.
        """
        while True:
            await trio.sleep(_TOKEN_CHECK_INTERVAL)
            now = trio.current_time()
            for stream in [stream for stream, until in self._token_deadlines.items() if until <= now]:
                self._token_deadlines[stream] = math.inf  # until the client resumes the stream with a new token
                stream.cut()

    # The head.

    async def admit(self, request: HttpRequest, peer: str | None = None) -> Reply | AdmittedRequest:
        """Check the head of a request.  Return the refusal, or the admitted request.

        `peer` is the client's address, or None.
        """
        known = self._usual.get((request, peer))
        if known is not None:
            return known
        admitted = await self._admit(request, peer)
        if isinstance(admitted, Reply):
            log_refusal(admitted, request, peer)
        elif self._remembers and isinstance(request, RequestHead) and request.usual:
            if len(self._usual) >= _REMEMBERED:
                self._usual.clear()
            self._usual[request, peer] = admitted
        return admitted

    async def _identify(self, request: HttpRequest, cors: Fields) -> Reply | Caller:
        """Return the caller, or the reply that refuses the request."""
        return None if self._authenticator is None else await self._authenticator.identify(request, cors)

    async def _admit(self, request: HttpRequest, peer: str | None) -> Reply | AdmittedRequest:
        resource = self._resource
        if resource is not None and (document := resource.document(request)) is not None:
            return document
        head = screen(self.policy, request)
        if isinstance(head, Reply):
            return head
        if self._monitoring is not None and head.path_kind is PathKind.MONITORING:
            return await self._monitoring.answer(request)
        if head.websocket and (self._run.draining or self._draining):
            return try_later(503, SHUTTING_DOWN, head.cors)
        # The request first counts for the address; otherwise a client could guess credentials without limit.  If the
        # request has a principal, it then counts for the principal instead: many principals may use one proxy address.
        holder = holder_of(None, peer)
        if self._rates.limited and (wait := self._rates.wait(holder)):
            return self._too_often(wait, head.cors)
        caller = await self._identify(request, head.cors)
        if isinstance(caller, Reply):
            return caller
        name: str | None = name_of_principal(caller)
        if name is not None:
            address, holder = holder, holder_of(name, None)
            if self._rates.limited:
                self._rates.give_back(address)
                if wait := self._rates.wait(holder):
                    return self._too_often(wait, head.cors)
        unknown = check_session(self.policy, request, head, find_session=self._sessions.facts, principal=name)
        if unknown is not None:
            return unknown
        if head.websocket and (refused := self._without_scopes(caller, self._run.dispatcher.scopes, head.cors)):
            return refused
        # auth-50: handlers do not see the token, so that they cannot send it elsewhere.
        headers = request.headers if resource is None else request.headers.without("Authorization")
        return AdmittedRequest(head, caller, name, holder, peer, headers, request)

    def _too_often(self, wait: float, cors: Fields) -> Reply:
        why = f"more than {self.limits.request_rate:g} requests a second (Limits.request_rate)"
        return try_later(429, why, cors, math.ceil(wait))

    # The body.

    async def serve_websocket(
        self,
        admitted: AdmittedRequest,
        stream: trio.abc.Stream,
        frames: Framing,
        *,
        tap: Tap | None = None,
        heartbeat: float | None = None,
    ) -> None:
        """Serve the messages of a WebSocket until it ends.

        Every message uses the access token of the request, so none may come after it expires.
        """
        with trio.move_on_after(seconds_left(admitted.caller)):
            await converse(
                self._run, stream, frames,
                tap=tap, headers=admitted.headers, principal=admitted.caller, heartbeat=heartbeat,
                account=self.account(admitted.holder),
            )  # fmt: skip

    def account(self, holder: str | None) -> Account:
        """Return an account that counts the bytes of one connection of this holder."""
        return self._run.bytes.account(holder)

    async def serve(self, admitted: AdmittedRequest, request: HttpRequest, response: HttpResponse) -> OnDisconnect:
        """Carry out an admitted request, now with its body.

        Returns when all parts of the response that are ready have been written.  The tasks that produce the later parts
        write them.  If the client disconnects before the response has ended, the caller must call the returned
        function.  Raises `BrokenResourceError` if the client has already disconnected.
        """
        verdict = judge(
            self.policy, request,
            find_session=self._sessions.facts, find_mirrors=self._run.dispatcher.catalog.mirrors,
            principal=admitted.principal, screened=admitted.head, mcp_names=self._run.offer.mcp_names,
        )  # fmt: skip
        if isinstance(verdict, Reply):
            return await refuse(verdict, admitted, response)
        if (refused := self._forbidden(verdict, admitted) or self._refused(verdict, admitted)) is not None:
            return await refuse(refused, admitted, response)
        if isinstance(verdict, Serve):
            return await self._serve(verdict, admitted, response, request.body)
        if isinstance(verdict, OpenStream):
            return await self._open_stream(verdict, admitted, response)
        if isinstance(verdict, OpenLegacyStream):
            return await self._open_legacy_stream(verdict, admitted, response)
        if isinstance(verdict, EndSession):
            await self._end_session(verdict.session)
        elif verdict.session is not None and (session := self._sessions.get(verdict.session)) is not None:
            self._sessions.touch(verdict.session)
            self._receive(session.server_session, verdict.message, admitted, None, request.body)
            session.wake()
            await session.settle()
        elif self._run.offer.extensions is not None and isinstance(verdict.message, Notification):
            from trio_mcp.server.detached import session_for_notices

            alone = session_for_notices(self._run, self.account(admitted.holder), verdict.revision)
            self._receive(alone, verdict.message, admitted, None, request.body)
        await send_reply(response, verdict.reply)
        return ignore_disconnect

    async def _end_session(self, id: str) -> None:
        self._sessions.end(id, "the client has ended the session")

    def _forbidden(self, verdict: _Accepted, admitted: AdmittedRequest) -> Reply | None:
        """Return a refusal if the principal lacks scopes, otherwise None.

        A batch is refused as a whole.  The refusal names all scopes that the batch needs, so that the client has to
        authorize only once.
        """
        dispatcher, message = self._run.dispatcher, getattr(verdict, "message", None)
        if isinstance(message, Request):
            needed = dispatcher.scopes_for(message, admitted.principal)
        else:
            items = message.items if isinstance(message, Batch) else ()
            requests = [each for each in items if isinstance(each, Request)]
            each_needs = [dispatcher.scopes_for(each, admitted.principal) for each in requests]
            needed = [scope for scopes in each_needs or [dispatcher.scopes] for scope in scopes]
        if not needed:
            return None
        id = message.id if isinstance(message, Request) else None
        return self._without_scopes(admitted.caller, tuple(dict.fromkeys(needed)), verdict.cors, id)

    def _without_scopes(
        self, caller: Caller, needed: Sequence[str], cors: Fields, id: Id | None = None
    ) -> Reply | None:
        """Return the refusal of a request that needs these scopes, or None if the caller has them."""
        if has_scopes(caller, needed):
            return None
        if self._resource is not None:
            return self._resource.insufficient(needed, cors, id)
        why = f"this request needs the scopes {' '.join(needed)}, but without Server.protect no caller has scopes"
        return refusal(403, Error(id, INVALID_REQUEST, why), cors)

    def _refused(self, verdict: _Accepted, admitted: AdmittedRequest) -> Reply | None:
        """Return a refusal if a valid request cannot be accepted now, otherwise None."""
        serves = isinstance(verdict, Serve)
        opens = serves or isinstance(verdict, OpenLegacyStream)
        opens = opens or (isinstance(verdict, OpenStream) and verdict.after is None)
        if self._aborting and serves:
            return try_later(503, SHUTTING_DOWN, verdict.cors)
        if (self._draining or self._run.draining) and opens and not self._continues(verdict):
            return try_later(503, SHUTTING_DOWN, verdict.cors)
        if isinstance(verdict, OpenLegacyStream) or (isinstance(verdict, Serve) and verdict.opens_session):
            why = f"this client has its share of {self.limits.sessions} sessions, all in use (Limits.sessions)"
            return None if self._sessions.make_room(admitted.holder) else try_later(503, why, verdict.cors)
        if verdict.session is None:
            return None  # a single request
        session = self._sessions.get(verdict.session)
        if opens and isinstance(session, HttpSession) and session.streams >= self.limits.streams:
            return self._too_many_streams(verdict.cors)
        if session is not None and session.overrun:
            return try_later(
                429, "this client must first read the stream of its session (Limits.outgoing)", verdict.cors
            )
        return None

    def _continues(self, verdict: _Accepted) -> bool:
        """Whether a drain serves this request: a running call may wait for it, or it is about one."""
        message = getattr(verdict, "message", None)
        if not isinstance(verdict, Serve) or not isinstance(message, Request):
            return False
        return "requestState" in message.params or self._run.serves_while_draining(message, verdict.revision)

    def _too_many_streams(self, cors: Fields) -> Reply:
        return try_later(429, f"{self.limits.streams} streams are open in this session (Limits.streams)", cors)

    async def _serve(
        self, verdict: Serve, admitted: AdmittedRequest, response: HttpResponse, body: bytes
    ) -> OnDisconnect:
        """Serve the requests in a message."""
        session: HttpSession | None = None
        if verdict.opens_session:
            session = self._new_session(admitted)
        elif verdict.session is not None:
            session = self._session(verdict.session)
        if session is not None:
            server_session, stream = session.server_session, session.answer(verdict.answer, verdict.ids)
        else:
            account = self.account(admitted.holder)
            single = SingleRequest(self._run, self._streams, verdict, self._single_requests, account)
            server_session, stream = single.server_session, single.stream
        if getattr(verdict.message, "method", None) == "subscriptions/listen":  # it has no other end
            self._close_with_token(stream, admitted)
        on_disconnect = stream.attach(response, verdict.cors)
        self._receive(server_session, verdict.message, admitted, stream, body)
        if session is not None and verdict.opens_session and server_session.session.terms is not None:
            self._sessions.add(session.id, session)  # without terms, `initialize` was refused
            stream.session_id = session.id
        return await stream.begin(on_disconnect)

    def _new_session(self, admitted: AdmittedRequest) -> HttpSession:
        id, holder = self._sessions.new_id(), admitted.holder
        changes, account, log = not self.policy.json_only, self.account(holder), self._new_log(id, holder)
        return HttpSession(
            self._run, self._streams, self._sessions, id, admitted.principal, log, account=account, changes=changes
        )

    def _new_log(self, id: str, holder: str | None) -> EventLog:
        if self._event_log is None:
            return MemoryEventLog(self.limits, self.account(holder))
        return cast("EventLog", _GuardedLog(called(self._event_log, id)))

    def _receive(
        self,
        server_session: ServerSession,
        message: Message,
        admitted: AdmittedRequest,
        stream: ResponseStream | None,
        body: bytes,
    ) -> None:
        size = len(body)
        if size > FEW:
            size = weight(body, self.limits.values, message)
        server_session.receive(
            message, trio.current_time(),
            wire=stream, principal=admitted.caller, headers=admitted.headers, size=size,
        )  # fmt: skip

    async def _open_stream(
        self, verdict: OpenStream, admitted: AdmittedRequest, response: HttpResponse
    ) -> OnDisconnect:
        session = self._session(verdict.session)
        if verdict.after is None:
            stream = session.open_standalone()
            self._close_with_token(stream, admitted)
            return await stream.begin(stream.attach(response, verdict.cors))
        replay = session.log.replay(verdict.after)
        if isinstance(replay, NotReplayable):
            return await refuse(cannot_resume(replay.why, verdict.cors), admitted, response)
        session.stream_resumed(replay.stream)
        resumed = session.find(replay.stream)
        if resumed is None and not replay.finished:
            return await refuse(cannot_resume("the stream has failed", verdict.cors), admitted, response)
        if resumed is not None and not resumed.attached and session.streams >= self.limits.streams:
            return await refuse(self._too_many_streams(verdict.cors), admitted, response)
        missed = b"".join([encode_message(event.data, event.id) for event in replay.events])
        taken = len(missed) if len(missed) > LONG else 0
        account = session.server_session.account
        if (limit := account.take(taken)) is not None:
            why = f"this client has too many unread bytes; try again later (Limits.{limit})"
            return await refuse(try_later(503, why, verdict.cors), admitted, response)
        if resumed is None:  # the stream has ended, so no event follows the logged events
            try:
                await response.begin(200, reply_headers(verdict.cors, stream=True), missed, more=False)
            finally:
                account.give(taken)
            return ignore_disconnect
        if resumed in self._token_deadlines:
            self._close_with_token(resumed, admitted)
        return await resumed.begin(resumed.attach(response, verdict.cors, missed, taken))

    def _close_with_token(self, stream: ResponseStream, admitted: AdmittedRequest) -> None:
        self._token_deadlines[stream] = trio.current_time() + seconds_left(admitted.caller)

    async def _open_legacy_stream(
        self, verdict: OpenLegacyStream, admitted: AdmittedRequest, response: HttpResponse
    ) -> OnDisconnect:
        id = self._sessions.new_id()
        uri = endpoint_uri(self.policy, id, admitted.request.prefix if self.public_url is None else self.public_url)
        opening = encode_event(SseEvent(uri.encode(), event="endpoint"))  # sse-05
        account = self.account(admitted.holder)
        legacy = LegacyStream(
            self._run, self._streams, self._sessions, id, admitted.principal, opening, account=account
        )
        self._sessions.add(id, legacy)
        self._close_with_token(legacy.stream, admitted)
        return await legacy.stream.begin(legacy.stream.attach(response, verdict.cors))

    def _session(self, id: str) -> HttpSession:
        """Return the session that a verdict names, and count this as activity of its client.

        The session exists, because no checkpoint was passed since the verdict.
        """
        session = self._sessions.get(id)
        assert isinstance(session, HttpSession)
        self._sessions.touch(id)
        return session

    async def cut_subscriptions(self) -> None:
        """Close the streams of subscriptions without a result, so that their clients subscribe in another process.

        A result would tell them that their subscriptions have ended (sub-08, sub-09).  Sessions end their streams
        themselves.
        """
        for stream in tuple(self._token_deadlines):
            if isinstance(stream.owner, SingleRequest):
                stream.cut()
                await trio.lowlevel.checkpoint()  # there may be thousands

    # The methods of a connection, which the run calls.

    @property
    def clients(self) -> int:
        return len(self._sessions) + len(self._single_requests)

    async def drain(self) -> None:
        """Wait for running work, then end the sessions, and wait until every response has ended."""
        self._draining = True
        while True:
            # Repeat, because a retry is a new `ServerSession` that continues a call of an older one.
            async with trio.open_nursery() as nursery:
                for server_session in self._server_sessions:
                    nursery.start_soon(server_session.drain)
            for parked in self._run.parked:
                await parked.resumed.wait()
            while self._run.awaited:
                await self._run.detached_ended()
            await self._sessions.wait_for_clients()
            busy = any(server_session.busy for server_session in self._server_sessions)
            if not busy and not self._run.parked and not self._run.awaited:
                break
        self._sessions.end_all(SHUTTING_DOWN, retry=_RETRY)
        await self._attached.empty()

    def abort_pending(self) -> None:
        self._aborting = True
        for server_session in self._server_sessions:
            server_session.abort_pending(UNFINISHED)
        # Do not wait for all handlers: a handler that ignores its cancellation must not delay other clients.
        self._sessions.end_all(SHUTTING_DOWN, retry=_RETRY)

    @property
    def _server_sessions(self) -> tuple[ServerSession, ...]:
        return (*self._single_requests, *self._sessions.server_sessions)

    def stop(self) -> None:
        """End all sessions and streams at once, because the run has ended."""
        for server_session in (*self._single_requests, *self._sessions.take_all()):
            server_session.stop()
        for stream in tuple(self._attached):  # streams of sessions that ended earlier
            stream.close()


def open_endpoint(run: Run, options: HttpOptions) -> Endpoint:
    """Make the endpoint of a run; among replicas, one whose sessions continue in the others.  Raises as `Endpoint`."""
    if run.replica is None:
        return Endpoint(run, **options)
    from trio_mcp.server.http.shared_endpoint import SharedEndpoint

    return SharedEndpoint(run, run.replica, **options)


async def refuse(reply: Reply, admitted: AdmittedRequest, response: HttpResponse) -> OnDisconnect:
    log_refusal(reply, admitted.request, admitted.peer)
    await send_reply(response, reply)
    return ignore_disconnect


def cannot_resume(why: str, cors: Fields) -> Reply:
    return refusal(400, Error(None, INVALID_REQUEST, f"{why}; open a new stream, without Last-Event-ID"), cors)


def log_refusal(reply: Reply, request: HttpRequest | None, peer: str | None) -> None:
    """Log a refusal for the operator.  `request` is None if no request could be read.

    The log line has no query, because HTTP+SSE clients send their session id in it.
    """
    if reply.error is None or not _refusals.isEnabledFor(logging.INFO):
        return
    subject = "a connection"
    if request is not None:
        subject = f"{shown(request.method)} {shown(request.target.partition('?')[0])}"
    _refusals.info("%s%s: %d, %s", f"{peer}: " if peer else "", subject, reply.status, reply.error.message)


def try_later(status: int, why: str, cors: Fields = (), wait: int = _BUSY) -> Reply:
    """Return a refusal for a request that the client may repeat after `wait` seconds."""
    return refusal(status, Error(None, INTERNAL_ERROR, why), cors, (("Retry-After", str(wait)),))


def over_limit(limit: str, cors: Fields = ()) -> Reply:
    """Return a refusal for a body, because too many bytes of its client wait to be processed."""
    return try_later(
        503, f"too many bytes from this client wait to be processed; try again later (Limits.{limit})", cors
    )


def ignore_disconnect() -> None:
    """Do nothing: the function for a disconnect if the response has no stream."""
