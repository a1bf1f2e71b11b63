"""An HTTP request, and what happens then: the verdicts of `core.http`, carried out for one running server.

Whoever has the connections, an HTTP server of ours or one behind ASGI, does for each request

1. `admit` with its head: sites, paths, types and sizes, how often this client asks, and who it is;
2. `serve` with its body and a `Response`, through which everything is written from then on, by whatever task has
   something to say.  Nothing is spawned for a request but its handler.

| Verdict | What its message is fed to |
|---|---|
| a modern request, or a legacy one where there are no sessions | a conversation of its own |
| `initialize` | a session that begins with it |
| whatever comes in a session | that session |

A request that stands alone is over when its response has ended; when its client closes a modern one before that, it is
cancelled (cancel-14).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypedDict, Unpack

import attrs
import trio

from trio_mcp.conversation import Conversation
from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_REQUEST, LocalProtocolError
from trio_mcp.core.headers import Mirror, reply_headers
from trio_mcp.core.http import (
    LOOPBACK_HOSTS,
    Answer,
    Deliver,
    EndSession,
    HttpPolicy,
    HttpRequest,
    OpenLegacyStream,
    OpenStream,
    Reply,
    Screened,
    Serve,
    endpoint_uri,
    judge,
    refusal,
    screen,
)
from trio_mcp.core.jsonrpc import Batch, Error, Id, Message, Request
from trio_mcp.core.replay import EventLog, MemoryEventLog, NotReplayable
from trio_mcp.core.sse import SseEvent, encode_event, encode_message
from trio_mcp.core.state import Link
from trio_mcp.core.terms import Terms, stable_name
from trio_mcp.http_sessions import HttpSession, LegacyStream, Sessions, everything_of
from trio_mcp.lanes import Lane, Response, Way
from trio_mcp.rates import Rates
from trio_mcp.running import Run
from trio_mcp.silence import Silence

__all__ = ["Admitted", "Endpoint", "HttpOptions", "send_reply"]

Gone = Callable[[], None]

_BUSY = 30  # seconds after which it is worth asking a server again that is full, or is being replaced


class HttpOptions(TypedDict, total=False):
    """How a server is served by HTTP; the keyword options of `serve_http`, `Server.run` and the ASGI application."""

    path: str
    """Where the endpoint is, "/mcp" by default; served with and without a slash at its end."""
    sse_path: str
    """Where clients of 2024-11-05 open their stream, which is off by default.  Goes with `message_path`."""
    message_path: str
    """Where those clients post their messages."""
    websocket_path: str | None
    """Where WebSockets are, "/ws" by default; None: nowhere."""
    allowed_hosts: Sequence[str]
    """The names under which the server may be asked, as protection against DNS rebinding: those of loopback by default,
    and that of `public_url`.  A name without a port stands for all ports; "*" allows any."""
    allowed_origins: Sequence[str]
    """The origins of pages that may ask, such as "https://app.example.com": those of loopback by default.  The same
    list drives CORS."""
    public_url: str
    """The URL under which clients reach what is "/" here, where that is another than the one it listens at."""
    sessions: bool
    """False: clients of the legacy revisions get no session, and each of their requests stands alone."""
    json_only: bool
    """True: every answer is JSON, and there are no streams: no progress, no questions to legacy clients."""
    event_log: Callable[[], EventLog]
    """Makes the log of one session, from which its streams are resumed; in memory by default."""
    authenticate: Callable[[HttpRequest], Awaitable[str | None]]
    """Says who is behind a request, by a stable name; None is refused with 401.  Without it nobody is asked."""
    keep_alive: float
    """Seconds after which a silent stream gets a comment, 15 by default: proxies take longer silence for death."""


@attrs.frozen(eq=False, repr=False)
class Admitted:
    """A request whose head was good: its body may be read, and `serve` be called."""

    head: Screened
    principal: str | None


@attrs.frozen(eq=False, repr=False)
class _Case:
    """One request, and what answers it."""

    request: HttpRequest
    principal: str | None
    response: Response
    prefix: str


async def send_reply(response: Response, reply: Reply) -> None:
    await response.begin(reply.status, reply.headers, reply.body, more=False)


class Endpoint:
    """One server under one policy, in one run; see the head of this file.

    It takes part in the run as one connection, for as long as `run` runs.  Raises `LocalProtocolError` for options that
    cannot be.
    """

    def __init__(self, run: Run, **options: Unpack[HttpOptions]) -> None:
        self.keep_alive = options.pop("keep_alive", 15.0)
        if type(self.keep_alive) not in (int, float) or not 0 < self.keep_alive < math.inf:
            raise LocalProtocolError(f"keep_alive is a number of seconds, above 0; not {self.keep_alive!r}")
        self._authenticate = options.pop("authenticate", None)
        self._event_log = options.pop("event_log", None)
        self.public_url = _public_url(options.get("public_url"))
        """Without a slash at its end; None if none was given."""
        self.policy = _policy(run, options, self.public_url)
        self._run = run
        self._limits = run.limits
        self._rates = Rates(run.limits.request_rate)
        self._sessions = Sessions(run.limits.sessions, run.limits.session_idle_seconds)
        self._alone: set[Conversation] = set()  # requests that belong to no session
        self._signs: Silence[Lane] = Silence(self.keep_alive)  # of all lanes that a response carries
        self._quiet = trio.lowlevel.ParkingLot()

    async def run(self) -> None:
        """Take part in the run, tell that streams live, and end sessions that nobody uses; until it is cancelled."""
        self._run.connections.add(self)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sessions.expire)
                while True:
                    (await self._signs.next()).show_life()
        finally:
            self._run.connections.discard(self)
            self.stop()

    # The head.

    async def admit(self, request: HttpRequest, peer: str | None = None) -> Reply | Admitted:
        """Judge what needs no body; a reply is final.  `peer` is the client's address, if it has one."""
        head = screen(self.policy, request)
        if isinstance(head, Reply):
            return head
        if self._run.draining:
            return _busy(503, "the server is shutting down", head)
        principal = await self.authenticated(request, peer)
        if isinstance(principal, Reply):
            return attrs.evolve(principal, headers=(*principal.headers, *head.cors))
        return Admitted(head, principal)

    async def authenticated(self, request: HttpRequest, peer: str | None = None) -> Reply | str | None:
        """Who asks, None where nobody is asked; or why the request is not served."""
        principal = None
        if self._authenticate is not None:
            principal = stable_name(await self._authenticate(request))
            if principal is None:
                why = "who asks is not known; send credentials in the Authorization header"
                return refusal(401, Error(None, INVALID_REQUEST, why), (), (("WWW-Authenticate", "Bearer"),))
        client = peer if principal is None else f"principal {principal}"
        wait = self._rates.wait(client) if client is not None else 0.0
        if wait:
            why = f"more than {self._limits.request_rate:g} requests a second (Limits.request_rate)"
            return refusal(429, Error(None, INTERNAL_ERROR, why), (), (("Retry-After", str(math.ceil(wait))),))
        return principal

    # The body.

    async def serve(self, admitted: Admitted, request: HttpRequest, response: Response, prefix: str = "") -> Gone:
        """Do what the request asks for.  `prefix` is where the paths of the policy are mounted.

        Returns when there is nothing to be written at once; what comes later is written by whoever has it.  What is
        returned is to be called when the client has gone before the response has ended.  Raises `BrokenResourceError`
        if it has gone already.
        """
        case = _Case(request, admitted.principal, response, prefix)
        verdict = judge(
            self.policy, request,
            find_session=self._sessions.facts, find_mirrors=self._mirrors, principal=case.principal,
            screened=admitted.head,
        )  # fmt: skip
        if isinstance(verdict, Serve):
            if verdict.opens_session:
                return await self._open_session(verdict, case)
            if verdict.session is not None:
                return await self._serve_in_session(verdict, case)
            return await self._serve_alone(verdict, case)
        if isinstance(verdict, Deliver):
            return await self._deliver(verdict, case)
        if isinstance(verdict, OpenStream):
            return await self._open_stream(verdict, case)
        if isinstance(verdict, OpenLegacyStream):
            return await self._open_legacy_stream(verdict, case)
        if isinstance(verdict, EndSession):
            self._sessions.end(verdict.session, "the client has ended the session")
            verdict = verdict.reply
        await send_reply(response, verdict)
        return _nothing

    def _mirrors(self, tool: str) -> Sequence[Mirror] | None:
        return self._run.dispatcher.mirrors(tool)

    async def _serve_alone(self, verdict: Serve, case: _Case) -> Gone:
        """A request that brings everything with it, and leaves nothing behind."""
        revision = verdict.revision
        modern = revision is not None and not revision.handshake

        def ended(_lane: Lane) -> None:
            self._alone.discard(conversation)
            if not modern:
                conversation.lost("the response has ended")
            self._note_quiet()

        def left(_lane: Lane) -> None:
            if modern:
                conversation.lost("the client has closed the response stream")  # cancel-14
            self._note_quiet()

        lane = self._lane(Way(verdict.answer, revision), ended, left)
        terms = None if modern or revision is None else Terms(revision)
        conversation = Conversation(self._run, lane, link=Link.EXCHANGE if modern else Link.SESSION, terms=terms)
        self._alone.add(conversation)
        lane.attend(conversation.session, everything_of(conversation), _ids(verdict.message))
        gone = lane.carry(case.response, verdict.cors)
        self._hear(conversation, verdict.message, case, lane)
        await lane.flush()
        return gone

    async def _open_session(self, verdict: Serve, case: _Case) -> Gone:
        if self._sessions.full:
            why = f"{self._limits.sessions} sessions are open (Limits.sessions)"
            await send_reply(case.response, _busy(503, why, verdict))
            return _nothing
        id = self._sessions.new_id()
        session = HttpSession(self._run, case.principal, self._new_log(), lambda: self._sessions.touch(id))
        lane = self._lane(Way(verdict.answer), self._of(session.ended), self._of(session.left))
        session.answer(lane, _ids(verdict.message))
        gone = lane.carry(case.response, verdict.cors)
        self._hear(session.conversation, verdict.message, case, lane)
        if session.conversation.session.terms is not None:  # else initialize was refused
            self._sessions.add(id, session)
            lane.session_id = id
        await lane.flush()
        return gone

    async def _serve_in_session(self, verdict: Serve, case: _Case) -> Gone:
        session = self._session(verdict.session)
        if session.streams >= self._limits.streams:
            await send_reply(case.response, self._too_many_streams(verdict))
            return _nothing
        way = Way(verdict.answer, verdict.revision, session.log)
        lane = self._lane(way, self._of(session.ended), self._of(session.left))
        session.answer(lane, _ids(verdict.message))
        gone = lane.carry(case.response, verdict.cors)
        self._hear(session.conversation, verdict.message, case, lane)
        await lane.flush()
        return gone

    async def _deliver(self, verdict: Deliver, case: _Case) -> Gone:
        session = None if verdict.session is None else self._sessions.get(verdict.session)
        if session is not None:
            self._hear(session.conversation, verdict.message, case, None)
            session.wake()
        await send_reply(case.response, verdict.reply)
        return _nothing

    def _hear(self, conversation: Conversation, message: Message, case: _Case, lane: Lane | None) -> None:
        conversation.hear(
            message, trio.current_time(), wire=lane, principal=case.principal, headers=case.request.headers
        )

    async def _open_stream(self, verdict: OpenStream, case: _Case) -> Gone:
        session = self._session(verdict.session)
        replay = None if verdict.after is None else session.log.replay(verdict.after)
        if isinstance(replay, NotReplayable):
            why = f"{replay.why}; open a new stream, without Last-Event-ID"
            await send_reply(case.response, refusal(400, Error(None, INVALID_REQUEST, why), verdict.cors))
            return _nothing
        resumed = None if replay is None else session.find(replay.stream)
        if session.streams >= self._limits.streams and (resumed is None or not resumed.carried):
            await send_reply(case.response, self._too_many_streams(verdict))
            return _nothing
        self._sessions.touch(verdict.session)
        if replay is None:
            way = Way(Answer.STREAM, verdict.revision, session.log)
            lane = self._lane(way, self._of(session.ended), self._of(session.left))
            gone = session.stand(lane, case.response, verdict.cors)
        elif resumed is not None:
            lane = resumed
            gone = lane.carry(case.response, verdict.cors, replay)
        else:  # it has ended meanwhile: that was all
            missed = b"".join(encode_message(event.data, event.id) for event in replay.events)
            await case.response.begin(200, reply_headers(verdict.cors, stream=True), missed, more=False)
            return _nothing
        session.pull(lane)  # what waited for a stream
        await lane.flush()
        return gone

    async def _open_legacy_stream(self, verdict: OpenLegacyStream, case: _Case) -> Gone:
        if self._sessions.full:
            why = f"{self._limits.sessions} sessions are open (Limits.sessions)"
            await send_reply(case.response, _busy(503, why, verdict))
            return _nothing
        id = self._sessions.new_id()
        uri = endpoint_uri(self.policy, id, case.prefix if self.public_url is None else self.public_url)
        opening = encode_event(SseEvent(uri.encode(), event="endpoint"))  # sse-05

        def over(_lane: Lane) -> None:
            self._sessions.end(id, "the client has closed its stream")

        lane = self._lane(Way(Answer.STREAM, opening=opening), self._of(over), self._of(over))
        self._sessions.add(id, LegacyStream(self._run, case.principal, lane))
        gone = lane.carry(case.response, verdict.cors)
        await lane.flush()
        return gone

    def _session(self, id: str | None) -> HttpSession:
        session = self._sessions.get(id or "")
        assert isinstance(session, HttpSession)  # the verdict was made a moment ago
        self._sessions.touch(id or "")
        return session

    def _new_log(self) -> EventLog:
        return MemoryEventLog(self._limits) if self._event_log is None else self._event_log()

    def _lane(self, way: Way, ended: Callable[[Lane], object], left: Callable[[Lane], object]) -> Lane:
        return Lane(
            way, limit=self._limits.outgoing, nursery=self._run.nursery, signs=self._signs, ended=ended, left=left
        )

    def _of(self, then: Callable[[Lane], object]) -> Callable[[Lane], None]:
        def noted(lane: Lane) -> None:
            then(lane)
            self._note_quiet()

        return noted

    def _too_many_streams(self, verdict: Serve | OpenStream) -> Reply:
        return _busy(429, f"{self._limits.streams} streams are open in this session (Limits.streams)", verdict)

    # As a connection of the run.

    @property
    def clients(self) -> int:
        return len(self._sessions) + len(self._alone)

    async def drain(self) -> None:
        """Wait for what runs, then end the sessions, and wait until every response has ended."""
        sessions = self._sessions.all()
        async with trio.open_nursery() as nursery:
            for conversation in (*self._alone, *(session.conversation for session in sessions.values())):
                nursery.start_soon(conversation.drain)
        for id in self._sessions.all():
            self._sessions.end(id, "the server is shutting down")
        while len(self._signs):
            await self._quiet.park()

    def _note_quiet(self) -> None:
        if not len(self._signs):
            self._quiet.unpark_all()

    def stop(self) -> None:
        """The run is over: nobody is served any more."""
        for session in self._sessions.all().values():
            session.conversation.stop()
        for conversation in tuple(self._alone):
            conversation.stop()


def _policy(run: Run, options: HttpOptions, public_url: str | None) -> HttpPolicy:
    known = {"path", "sse_path", "message_path", "websocket_path", "allowed_hosts", "allowed_origins"}
    given = {name: value for name, value in options.items() if name in known}
    if unknown := options.keys() - HttpOptions.__annotations__.keys():
        raise TypeError(f"there is no option {min(unknown)!r}; there are {', '.join(HttpOptions.__annotations__)}")
    given.setdefault("websocket_path", "/ws")
    if public_url is not None:
        host = public_url.partition("://")[2].partition("/")[0]
        given["allowed_hosts"] = (*options.get("allowed_hosts", LOOPBACK_HOSTS), host)
    return HttpPolicy(
        **given,  # type: ignore[arg-type]  # each is what its annotation says
        revisions=run.offer().revisions,
        sessions=options.get("sessions", True),
        json_only=options.get("json_only", False),
        limits=run.limits,
    )


def _public_url(url: str | None) -> str | None:
    if url is None:
        return None
    scheme, mark, rest = url.partition("://")
    if scheme not in ("http", "https") or not mark or not rest.partition("/")[0] or set("?# ") & set(rest):
        raise LocalProtocolError(
            f"public_url is like 'https://example.com' or 'https://example.com/tools'; not {url!r}"
        )
    return url.rstrip("/")


def _ids(message: Message) -> list[Id]:
    """The requests in it."""
    each = message.items if isinstance(message, Batch) else (message,)
    return [item.id for item in each if isinstance(item, Request)]


def _busy(status: int, why: str, verdict: Any) -> Reply:
    return refusal(status, Error(None, INTERNAL_ERROR, why), verdict.cors, (("Retry-After", str(_BUSY)),))


def _nothing() -> None:
    """What is to be done when the client has gone, where it had nothing to lose."""
