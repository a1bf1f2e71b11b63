"""The HTTP endpoint of one server in one run: checks each request by the rules of `core.http`, and carries it out.

The endpoint uses no sockets.  For each request, the owner of the connection (`connection` or `asgi`) calls

1. `admit` with its head, which checks host, origin, path, type and size, the request rate, and authentication;
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
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, Unpack, cast
from weakref import WeakKeyDictionary

import attrs
import trio

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_REQUEST, shown
from trio_mcp.core.http.event_log import EventLog, MemoryEventLog, NotReplayable
from trio_mcp.core.http.fields import Fields, Headers, Reply, refusal, reply_headers
from trio_mcp.core.http.server_rules import (
    Deliver,
    EndSession,
    HttpRequest,
    OpenLegacyStream,
    OpenStream,
    Screened,
    Serve,
    check_session,
    endpoint_uri,
    judge,
    screen,
)
from trio_mcp.core.http.sse import SseEvent, encode_event, encode_message
from trio_mcp.core.messages import Batch, Error, Id, Message, Request
from trio_mcp.core.requests import LinkKind
from trio_mcp.core.revisions import Terms
from trio_mcp.core.shares import LONG, Account, holder_of, weight
from trio_mcp.server.http.gate import Authenticator, Caller, name_of, seconds_left
from trio_mcp.server.http.options import HttpOptions, keep_alive_of, policy_of, public_url_of
from trio_mcp.server.http.responses import EndpointStreams, HttpResponse, ResponseMode, ResponseStream, StreamOwner
from trio_mcp.server.http.sessions import HttpSession, LegacyStream, Sessions, pull_all
from trio_mcp.server.http.silence import IdleOrder
from trio_mcp.server.rates import Rates
from trio_mcp.server.run import Run
from trio_mcp.server.session import UNFINISHED, ServerSession
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.workers import called

__all__ = ["AdmittedRequest", "Endpoint", "HttpOptions", "busy", "log_refusal", "over_limit", "send_reply"]

_log = logging.getLogger("trio_mcp")
_refusals = logging.getLogger("trio_mcp.http")

OnDisconnect = Callable[[], None]
_Accepted: TypeAlias = Serve | Deliver | OpenStream | OpenLegacyStream | EndSession

_BUSY = 30  # seconds in Retry-After if the server is full or shuts down
_RETRY = 1.0  # seconds that clients should wait before they reconnect, when the server ends their streams
_TOKEN_CHECK_INTERVAL = 10.0  # seconds by which a stream may outlive its access token
_SHUTTING_DOWN = "the server is shutting down"


@attrs.define(eq=False, repr=False)  # one for each request; frozen classes are slower to make
class AdmittedRequest:
    """A request with an accepted head: read its body and call `serve`."""

    head: Screened
    caller: Caller
    holder: str | None
    """The principal or address whose limits on bytes, sessions and calls this request uses; see `core.shares`."""
    peer: str | None
    headers: Headers
    """The headers of the request, without those that handlers must not see."""


@attrs.define(eq=False, repr=False)
class _HttpCall:
    """One admitted request, its body and its response."""

    request: HttpRequest
    admitted: AdmittedRequest
    response: HttpResponse
    prefix: str

    @property
    def principal(self) -> str | None:
        return name_of(self.admitted.caller)


async def send_reply(response: HttpResponse, reply: Reply) -> None:
    await response.begin(reply.status, reply.headers, reply.body, more=False)


class _SingleRequest(StreamOwner):
    """A request outside any session: its `ServerSession` ends with its response."""

    def __init__(
        self,
        run: Run,
        shared: EndpointStreams,
        verdict: Serve,
        single_requests: set[ServerSession],
        account: Account,
    ) -> None:
        revision = verdict.revision
        self._modern = revision is not None and not revision.handshake
        self._single_requests = single_requests
        self.stream = ResponseStream(self, ResponseMode(verdict.answer, revision), shared, _ids(verdict.message))
        link = LinkKind.EXCHANGE if self._modern else LinkKind.SESSION
        terms = None if self._modern or revision is None else Terms(revision)
        self.server_session = ServerSession(
            run, self.stream, account=account, link=link, terms=terms, changes=self._modern
        )
        single_requests.add(self.server_session)

    def pull(self, stream: ResponseStream) -> None:
        pull_all(self.server_session, stream)

    def detached(self, stream: ResponseStream, retry: float | None = None) -> None:
        if self._modern:
            self.server_session.connection_lost("the client has closed the response stream")  # cancel-14

    def client_absent(self, stream: ResponseStream) -> None:
        self.server_session.connection_lost("the client was absent for too long (Limits.session_idle_seconds)")

    def ended(self, stream: ResponseStream) -> None:
        self._single_requests.discard(self.server_session)
        if not self._modern:
            self.server_session.connection_lost("the response has ended")


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
        protection, seconds = run.dispatcher.protection(), run.limits.authenticate_seconds
        self._authenticator = Authenticator(options, protection, self.policy.path, run.workers, seconds)
        self.paths = frozenset(self.policy.paths) | self._authenticator.paths
        """All paths that are served, each without a slash at its end."""
        self._event_log = options.get("event_log")
        self._run = run
        self._limits = run.limits
        self._rates = Rates(run.limits.request_rate)
        self._sessions = Sessions(run.limits.sessions, run.limits.session_idle_seconds)
        self._single_requests: set[ServerSession] = set()
        # These flags are for this endpoint alone.  The run has its own, because it may outlive the endpoint.
        self._draining = False
        self._aborting = False
        # The streams that end with their access tokens.
        self._token_deadlines: WeakKeyDictionary[ResponseStream, float] = WeakKeyDictionary()
        self._attached: IdleOrder[ResponseStream] = IdleOrder(self.keep_alive)
        # A second later than sessions end: a session that ends takes its streams along.
        self._detached: IdleOrder[ResponseStream] = IdleOrder(run.limits.session_idle_seconds + 1)
        self._streams = EndpointStreams(run.nursery, run.limits.outgoing, self._attached, self._detached)

    async def run(self) -> None:
        """Register with the run, send keep-alives and end idle sessions, until cancelled."""
        self._run.connections[self] = None
        try:
            async with open_nursery() as nursery:
                nursery.start_soon(self._sessions.expire)
                nursery.start_soon(self._end_detached)
                if self._run.dispatcher.protection() is not None:
                    nursery.start_soon(self._end_with_tokens)
                while True:
                    (await self._attached.next()).send_keep_alive()
        finally:
            self._run.connections.pop(self, None)
            self.stop()

    async def _end_detached(self) -> None:
        while True:
            (await self._detached.next()).client_absent()

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

    async def admit(self, request: HttpRequest, peer: str | None = None, prefix: str = "") -> Reply | AdmittedRequest:
        """Check the head of a request.  Return the refusal, or the admitted request.

        `peer` is the client's address, or None.  `prefix` is the path under which the application is mounted.
        """
        admitted = await self._admit(request, peer, prefix)
        if isinstance(admitted, Reply):
            log_refusal(admitted, request, peer)
        return admitted

    async def _admit(self, request: HttpRequest, peer: str | None, prefix: str) -> Reply | AdmittedRequest:
        if (document := self._authenticator.document(request)) is not None:
            return document
        head = screen(self.policy, request, prefix)
        if isinstance(head, Reply):
            return head
        if head.websocket and (self._run.draining or self._draining):
            return busy(503, _SHUTTING_DOWN, head.cors)
        # The request first counts for the address; otherwise a client could guess credentials without limit.  If the
        # request has a principal, it then counts for the principal instead: many principals may use one proxy address.
        holder = holder_of(None, peer)
        if self._rates.limited and (wait := self._rates.wait(holder)):
            return self._too_often(wait, head.cors)
        caller = await self._authenticator.caller(request, head.cors)
        if isinstance(caller, Reply):
            return caller
        if (name := name_of(caller)) is not None:
            address, holder = holder, holder_of(name, None)
            if self._rates.limited:
                self._rates.give_back(address)
                if wait := self._rates.wait(holder):
                    return self._too_often(wait, head.cors)
        unknown = check_session(
            self.policy, request, head, find_session=self._sessions.facts, principal=name_of(caller), prefix=prefix
        )
        if unknown is not None:
            return unknown
        if head.websocket and (
            refused := self._authenticator.forbidden(caller, self._run.dispatcher.scopes, head.cors)
        ):
            return refused
        return AdmittedRequest(head, caller, holder, peer, self._authenticator.visible_headers(request.headers))

    def _too_often(self, wait: float, cors: Fields) -> Reply:
        why = f"more than {self._limits.request_rate:g} requests a second (Limits.request_rate)"
        return busy(429, why, cors, math.ceil(wait))

    # The body.

    def account(self, holder: str | None) -> Account:
        """Return an account that counts the bytes of one connection of this holder."""
        return self._run.bytes.account(holder)

    async def serve(
        self, admitted: AdmittedRequest, request: HttpRequest, response: HttpResponse, prefix: str = ""
    ) -> OnDisconnect:
        """Carry out an admitted request.  `prefix` is as for `admit`.

        Returns when all parts of the response that are ready have been written.  The tasks that produce the later parts
        write them.  If the client disconnects before the response has ended, the caller must call the returned
        function.  Raises `BrokenResourceError` if the client has already disconnected.
        """
        exchange = _HttpCall(request, admitted, response, prefix)
        verdict = judge(
            self.policy, request,
            find_session=self._sessions.facts, find_mirrors=self._run.dispatcher.mirrors, principal=exchange.principal,
            screened=admitted.head, prefix=prefix,
        )  # fmt: skip
        refused = (
            verdict
            if isinstance(verdict, Reply)
            else self._forbidden(verdict, exchange) or self._refused(verdict, exchange)
        )
        if refused is not None:
            return await _refuse(refused, exchange)
        if isinstance(verdict, Serve):
            return await self._serve(verdict, exchange)
        if isinstance(verdict, OpenStream):
            return await self._open_stream(verdict, exchange)
        if isinstance(verdict, OpenLegacyStream):
            return await self._open_legacy_stream(verdict, exchange)
        assert isinstance(verdict, Deliver | EndSession)
        if isinstance(verdict, Deliver):
            self._deliver(verdict, exchange)
        else:
            self._sessions.end(verdict.session, "the client has ended the session")
        await send_reply(response, verdict.reply)
        return _ignore_disconnect

    def _forbidden(self, verdict: _Accepted, exchange: _HttpCall) -> Reply | None:
        """Return a refusal if the principal lacks scopes, otherwise None.

        A batch is refused as a whole.  The refusal names all scopes that the batch needs, so that the client has to
        authorize only once.
        """
        dispatcher, message = self._run.dispatcher, getattr(verdict, "message", None)
        needed = list(dispatcher.scopes)
        for each in message.items if isinstance(message, Batch) else (message,):
            if isinstance(each, Request):
                needed += dispatcher.scopes_for(each, exchange.principal)
        if not needed:
            return None
        id = message.id if isinstance(message, Request) else None
        return self._authenticator.forbidden(exchange.admitted.caller, tuple(dict.fromkeys(needed)), verdict.cors, id)

    def _refused(self, verdict: _Accepted, exchange: _HttpCall) -> Reply | None:
        """Return a refusal if a valid request cannot be accepted now, otherwise None."""
        draining = self._run.draining or self._draining
        if (draining and _is_new_work(verdict)) or (self._aborting and isinstance(verdict, Serve)):
            return busy(503, _SHUTTING_DOWN, verdict.cors)
        if isinstance(verdict, Serve) and verdict.session is None and not verdict.opens_session:
            return None  # a single request
        if isinstance(verdict, OpenLegacyStream) or (isinstance(verdict, Serve) and verdict.opens_session):
            why = f"this client has its share of {self._limits.sessions} sessions, all in use (Limits.sessions)"
            return None if self._sessions.make_room(exchange.admitted.holder) else busy(503, why, verdict.cors)
        session = self._sessions.get(verdict.session or "")
        opens = isinstance(verdict, Serve) or (isinstance(verdict, OpenStream) and verdict.after is None)
        if opens and isinstance(session, HttpSession) and session.streams >= self._limits.streams:
            return self._too_many_streams(verdict.cors)
        if session is not None and session.overrun:
            return busy(429, "this client must first read the stream of its session (Limits.outgoing)", verdict.cors)
        return None

    def _too_many_streams(self, cors: Fields) -> Reply:
        return busy(429, f"{self._limits.streams} streams are open in this session (Limits.streams)", cors)

    async def _serve(self, verdict: Serve, exchange: _HttpCall) -> OnDisconnect:
        """Serve the requests in a message."""
        if verdict.opens_session:
            return await self._open_session(verdict, exchange)
        if verdict.session is not None:
            session = self._session(verdict.session)
            server_session, stream = session.server_session, session.answer(verdict.answer, _ids(verdict.message))
        else:
            account = self.account(exchange.admitted.holder)
            single = _SingleRequest(self._run, self._streams, verdict, self._single_requests, account)
            server_session, stream = single.server_session, single.stream
        if getattr(verdict.message, "method", None) == "subscriptions/listen":  # it has no other end
            self._close_with_token(stream, exchange)
        on_disconnect = stream.attach(exchange.response, verdict.cors)
        self._receive(server_session, verdict.message, exchange, stream)
        return await _begin(stream, on_disconnect)

    async def _open_session(self, verdict: Serve, exchange: _HttpCall) -> OnDisconnect:
        id = self._sessions.new_id()
        holder = exchange.admitted.holder
        log: EventLog
        if self._event_log is None:
            log = MemoryEventLog(self._limits, self.account(holder))
        else:
            log = cast("EventLog", _GuardedLog(called(self._event_log, id)))
        changes, account = not self.policy.json_only, self.account(holder)
        session = HttpSession(
            self._run, self._streams, self._sessions, id, exchange.principal, log, account=account, changes=changes
        )
        stream = session.answer(verdict.answer, _ids(verdict.message))
        on_disconnect = stream.attach(exchange.response, verdict.cors)
        self._receive(session.server_session, verdict.message, exchange, stream)
        if session.server_session.session.terms is not None:  # otherwise `initialize` was refused
            self._sessions.add(id, session)
            stream.session_id = id
        return await _begin(stream, on_disconnect)

    def _deliver(self, verdict: Deliver, exchange: _HttpCall) -> None:
        session = self._sessions.get(verdict.session or "")
        if session is not None:  # a notification outside a session has no receiver
            self._sessions.touch(verdict.session or "")
            self._receive(session.server_session, verdict.message, exchange, None)
            session.wake()

    def _receive(
        self, server_session: ServerSession, message: Message, exchange: _HttpCall, stream: ResponseStream | None
    ) -> None:
        server_session.receive(
            message, trio.current_time(),
            wire=stream, principal=exchange.admitted.caller, headers=exchange.admitted.headers,
            size=weight(exchange.request.body, self._limits.values, message),
        )  # fmt: skip

    async def _open_stream(self, verdict: OpenStream, exchange: _HttpCall) -> OnDisconnect:
        session = self._session(verdict.session)
        if verdict.after is None:
            stream = session.open_standalone()
            self._close_with_token(stream, exchange)
            return await _begin(stream, stream.attach(exchange.response, verdict.cors))
        replay = session.log.replay(verdict.after)
        if not isinstance(replay, NotReplayable):
            session.stream_resumed(replay.stream)
        if isinstance(replay, NotReplayable):
            return await self._cannot_resume(replay.why, verdict, exchange)
        resumed = session.find(replay.stream)
        if resumed is None and not replay.finished:
            return await self._cannot_resume("the stream has failed", verdict, exchange)
        if resumed is not None and not resumed.attached and session.streams >= self._limits.streams:
            return await _refuse(self._too_many_streams(verdict.cors), exchange)
        missed = b"".join([encode_message(event.data, event.id) for event in replay.events])
        taken = len(missed) if len(missed) > LONG else 0
        account = session.server_session.account
        if (limit := account.take(taken)) is not None:
            why = f"this client has too many unread bytes; try again later (Limits.{limit})"
            return await _refuse(busy(503, why, verdict.cors), exchange)
        if resumed is None:  # the stream has ended, so no event follows the logged events
            try:
                await exchange.response.begin(200, reply_headers(verdict.cors, stream=True), missed, more=False)
            finally:
                account.give(taken)
            return _ignore_disconnect
        if resumed in self._token_deadlines:
            self._close_with_token(resumed, exchange)
        return await _begin(resumed, resumed.attach(exchange.response, verdict.cors, missed, taken))

    def _close_with_token(self, stream: ResponseStream, exchange: _HttpCall) -> None:
        self._token_deadlines[stream] = trio.current_time() + seconds_left(exchange.admitted.caller)

    async def _cannot_resume(self, why: str, verdict: OpenStream, exchange: _HttpCall) -> OnDisconnect:
        error = Error(None, INVALID_REQUEST, f"{why}; open a new stream, without Last-Event-ID")
        return await _refuse(refusal(400, error, verdict.cors), exchange)

    async def _open_legacy_stream(self, verdict: OpenLegacyStream, exchange: _HttpCall) -> OnDisconnect:
        id = self._sessions.new_id()
        uri = endpoint_uri(self.policy, id, exchange.prefix if self.public_url is None else self.public_url)
        opening = encode_event(SseEvent(uri.encode(), event="endpoint"))  # sse-05
        account = self.account(exchange.admitted.holder)
        legacy = LegacyStream(
            self._run, self._streams, self._sessions, id, exchange.principal, opening, account=account
        )
        self._sessions.add(id, legacy)
        self._close_with_token(legacy.stream, exchange)
        return await _begin(legacy.stream, legacy.stream.attach(exchange.response, verdict.cors))

    def _session(self, id: str) -> HttpSession:
        """Return the session that a verdict names, and count this as activity of its client.

        The session exists, because no checkpoint was passed since the verdict.
        """
        session = self._sessions.get(id)
        assert isinstance(session, HttpSession)
        self._sessions.touch(id)
        return session

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
            await self._run.parking.wait_for_all()
            await self._sessions.wait_for_clients()
            if not any(server_session.busy for server_session in self._server_sessions) and not self._run.parking:
                break
        self._sessions.end_all(_SHUTTING_DOWN, retry=_RETRY)
        await self._attached.empty()

    def abort_pending(self) -> None:
        self._aborting = True
        for server_session in self._server_sessions:
            server_session.abort_pending(UNFINISHED)
        # Do not wait for all handlers: a handler that ignores its cancellation must not delay other clients.
        self._sessions.end_all(_SHUTTING_DOWN, retry=_RETRY)

    @property
    def _server_sessions(self) -> tuple[ServerSession, ...]:
        return (*self._single_requests, *self._sessions.server_sessions)

    def stop(self) -> None:
        """End all sessions and streams at once, because the run has ended."""
        for server_session in (*self._single_requests, *self._sessions.take_all()):
            server_session.stop()
        for stream in tuple(self._attached):  # streams of sessions that ended earlier
            stream.close()


async def _refuse(reply: Reply, exchange: _HttpCall) -> OnDisconnect:
    log_refusal(reply, exchange.request, exchange.admitted.peer)
    await send_reply(exchange.response, reply)
    return _ignore_disconnect


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


async def _begin(stream: ResponseStream, on_disconnect: OnDisconnect) -> OnDisconnect:
    """Write the parts of the response that are ready.  Return `on_disconnect`."""
    try:
        await stream.begin()
    except BaseException:  # the caller does not get `on_disconnect`, so it is called here
        on_disconnect()
        raise
    return on_disconnect


def _is_new_work(verdict: _Accepted) -> bool:
    """Return whether this request starts new work, so that no running call waits for it."""
    if isinstance(verdict, Serve):
        return not (isinstance(verdict.message, Request) and "requestState" in verdict.message.params)
    return isinstance(verdict, OpenLegacyStream) or (isinstance(verdict, OpenStream) and verdict.after is None)


def _ids(message: Message) -> tuple[Id, ...]:
    """Return the ids of the requests in a message."""
    if isinstance(message, Request):
        return (message.id,)
    assert isinstance(message, Batch)  # other messages contain no requests
    return tuple(item.id for item in message.items if isinstance(item, Request))


def busy(status: int, why: str, cors: Fields = (), wait: int = _BUSY) -> Reply:
    """Return a refusal for a request that the client may repeat after `wait` seconds."""
    return refusal(status, Error(None, INTERNAL_ERROR, why), cors, (("Retry-After", str(wait)),))


def over_limit(limit: str, cors: Fields = ()) -> Reply:
    """Return a refusal for a body, because too many bytes of its client wait to be processed."""
    return busy(503, f"too many bytes from this client wait to be processed; try again later (Limits.{limit})", cors)


def _ignore_disconnect() -> None:
    """Do nothing: the function for a disconnect if the response has no stream."""
