"""An HTTP request, and what happens then: the verdicts of `core.http`, carried out for one running server.

Whoever has the connections, an HTTP server of ours or one behind ASGI, does for each request

1. `admit` with its head: sites, paths, types and sizes, how often this client asks, and who it is;
2. `serve` with its body and a `HttpResponse`, through which everything is written from then on, by whatever task has
   something to say.  Nothing is spawned for a request but its handler.

| Verdict | What its message is fed to |
|---|---|
| a modern request, or a legacy one where there are no sessions | a conversation of its own |
| `initialize` | a session that begins with it |
| whatever comes in a session | that session |

A request that stands alone is over when its response has ended.  When its client closes a modern one before that, it is
cancelled (cancel-14); a legacy one goes on, for as long as a session does whose client is absent.

While the server drains no new work is taken: such requests are refused with 503, so that the client asks another
server.  What belongs to the work that goes on still comes in: answers and cancellations, retries, and whoever comes
back to a stream.
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
from trio_mcp.core.http.fields import Fields, Headers, reply_headers
from trio_mcp.core.http.server_rules import check_session, judge, screen
from trio_mcp.core.http.sse import SseEvent, encode_event, encode_message
from trio_mcp.core.http.verdicts import (
    Deliver,
    EndSession,
    HttpRequest,
    OpenLegacyStream,
    OpenStream,
    Reply,
    Screened,
    Serve,
    endpoint_uri,
    refusal,
)
from trio_mcp.core.jsonrpc import Batch, Error, Id, Message, Request
from trio_mcp.core.shares import LONG, Account, holder_of, weight
from trio_mcp.core.state import LinkKind
from trio_mcp.core.terms import Terms
from trio_mcp.server.conversation import UNFINISHED, ServerSession
from trio_mcp.server.http.gate import Authenticator, Caller, name_of, seconds_left
from trio_mcp.server.http.lanes import HttpResponse, ResponseMode, ResponseStream, StreamCounts, StreamOwner
from trio_mcp.server.http.options import HttpOptions, keep_alive_of, policy_of, public_url_of
from trio_mcp.server.http.sessions import HttpSession, LegacyStream, Sessions, pull_all
from trio_mcp.server.http.silence import IdleOrder
from trio_mcp.server.rates import Rates
from trio_mcp.server.run import Run
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.workers import called

__all__ = ["AdmittedRequest", "Endpoint", "HttpOptions", "busy", "send_reply", "tell_refusal", "too_much"]

_log = logging.getLogger("trio_mcp")
_refusals = logging.getLogger("trio_mcp.http")

Gone = Callable[[], None]
_Good: TypeAlias = Serve | Deliver | OpenStream | OpenLegacyStream | EndSession

_BUSY = 30  # seconds after which it is worth asking a server again that is full, or is being replaced
_RETRY = 1.0  # seconds after which the client of a stream that ends with the server looks whether there is another one
_LOOK = 10.0  # seconds for which a stream may outlive the token in whose name it stands
_SHUTTING_DOWN = "the server is shutting down"


@attrs.define(eq=False, repr=False)  # one for each request, which frozen ones would make dearer
class AdmittedRequest:
    """A request whose head was good: its body may be read, and `serve` be called."""

    head: Screened
    caller: Caller
    holder: str | None
    """In whose name it takes of what all clients share."""
    peer: str | None
    headers: Headers
    """Those that handlers get to see."""


@attrs.define(eq=False, repr=False)
class _EndpointRequest:
    """One request, and what answers it."""

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
    """A request that brings everything with it, and leaves nothing behind."""

    def __init__(
        self,
        run: Run,
        traffic: StreamCounts,
        verdict: Serve,
        all: set[ServerSession],
        account: Account,
        absent: IdleOrder[ServerSession],
    ) -> None:
        revision = verdict.revision
        self._modern = revision is not None and not revision.handshake
        self._all = all
        self._absent = absent
        self.lane = ResponseStream(self, ResponseMode(verdict.answer, revision), traffic, _ids(verdict.message))
        link = LinkKind.EXCHANGE if self._modern else LinkKind.SESSION
        terms = None if self._modern or revision is None else Terms(revision)
        self.conversation = ServerSession(run, self.lane, account=account, link=link, terms=terms, changes=self._modern)
        all.add(self.conversation)

    def pull(self, lane: ResponseStream) -> None:
        pull_all(self.conversation, lane)

    def left(self, lane: ResponseStream, retry: float | None = None) -> None:
        if self._modern:
            self.conversation.connection_lost("the client has closed the response stream")  # cancel-14
        else:
            self._absent.touch(self.conversation)

    def ended(self, lane: ResponseStream) -> None:
        self._all.discard(self.conversation)
        if not self._modern:
            self._absent.forget(self.conversation)
            self.conversation.connection_lost("the response has ended")


class _GuardedLog:
    """An event log that raises nothing which ends more than what it is asked for."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(called, getattr(self._log, name))


class Endpoint:
    """One server under one policy, in one run; see the head of this file.

    It takes part in the run as one connection, for as long as `run` runs.  Raises `UsageError` for options that
    cannot be.
    """

    def __init__(self, run: Run, **options: Unpack[HttpOptions]) -> None:
        self.policy = policy_of(run, options)
        self.public_url = public_url_of(options)
        """Without a slash at its end; None if none was given."""
        self.keep_alive = keep_alive_of(options)
        protection, seconds = run.dispatcher.protection(), run.limits.authenticate_seconds
        self._gate = Authenticator(options, protection, self.policy.path, run.workers, seconds)
        self.places = frozenset(self.policy.places) | self._gate.places
        """The paths at which something is, without a slash at their ends."""
        self._event_log = options.get("event_log")
        self._run = run
        self._limits = run.limits
        self._rates = Rates(run.limits.request_rate)
        self._sessions = Sessions(run.limits.sessions, run.limits.session_idle_seconds)
        self._alone: set[ServerSession] = set()  # requests that belong to no session
        self._absent: IdleOrder[ServerSession] = IdleOrder(
            run.limits.session_idle_seconds
        )  # those whose clients have gone
        # Beside those of the run, which may be shared with others and go on without this endpoint.
        self._draining = False
        self._dismissed = False
        self._standing: WeakKeyDictionary[ResponseStream, float] = (
            WeakKeyDictionary()
        )  # until when their tokens are good
        self._carried: IdleOrder[ResponseStream] = IdleOrder(self.keep_alive)
        self._traffic = StreamCounts(run.nursery, run.limits.outgoing, self._carried)

    async def run(self) -> None:
        """Take part in the run, tell that streams live, and end sessions that nobody uses; until it is cancelled."""
        self._run.connections[self] = None
        try:
            async with open_nursery() as nursery:
                nursery.start_soon(self._sessions.expire)
                nursery.start_soon(self._end_for_nobody)
                if self._run.dispatcher.protection() is not None:
                    nursery.start_soon(self._end_with_tokens)
                while True:
                    (await self._carried.next()).show_life()
        finally:
            self._run.connections.pop(self, None)
            self.stop()

    async def _end_for_nobody(self) -> None:
        while True:
            (await self._absent.next()).connection_lost(
                "the client was absent for too long (Limits.session_idle_seconds)"
            )

    async def _end_with_tokens(self) -> None:
        """Streams that stand open end with their tokens, for what they tell is for who has one; the client comes back
        with another.  A call that was begun in time may take longer."""
        while True:
            await trio.sleep(_LOOK)
            now = trio.current_time()
            for lane in [lane for lane, until in self._standing.items() if until <= now]:
                self._standing[lane] = math.inf  # unless another response carries it on
                lane.cut()

    # The head.

    async def admit(self, request: HttpRequest, peer: str | None = None, prefix: str = "") -> Reply | AdmittedRequest:
        """Judge what needs no body; a reply is final.  `peer` is the client's address, if it has one; `prefix` is where
        the paths of the policy are mounted."""
        admitted = await self._admit(request, peer, prefix)
        if isinstance(admitted, Reply):
            tell_refusal(admitted, request, peer)
        return admitted

    async def _admit(self, request: HttpRequest, peer: str | None, prefix: str) -> Reply | AdmittedRequest:
        if (document := self._gate.document(request)) is not None:
            return document
        head = screen(self.policy, request, prefix)
        if isinstance(head, Reply):
            return head
        if head.websocket and (self._run.draining or self._draining):
            return busy(503, _SHUTTING_DOWN, head.cors)
        # The address is counted first, or a client could guess credentials as often as it likes; it gets that back when
        # it is a principal, because many of those may come by one proxy.
        holder = holder_of(None, peer)
        if self._rates.limited and (wait := self._rates.wait(holder)):
            return self._too_often(wait, head.cors)
        caller = await self._gate.caller(request, head.cors)
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
        if head.websocket and (refused := self._gate.forbidden(caller, self._run.dispatcher.scopes, head.cors)):
            return refused
        return AdmittedRequest(head, caller, holder, peer, self._gate.passed_on(request.headers))

    def _too_often(self, wait: float, cors: Fields) -> Reply:
        why = f"more than {self._limits.request_rate:g} requests a second (Limits.request_rate)"
        return busy(429, why, cors, math.ceil(wait))

    # The body.

    def account(self, holder: str | None) -> Account:
        """Where the bytes are charged that one connection of this holder has sent."""
        return self._run.bytes.account(holder)

    async def serve(
        self, admitted: AdmittedRequest, request: HttpRequest, response: HttpResponse, prefix: str = ""
    ) -> Gone:
        """Do what the request asks for.  `prefix` is as for `admit`.

        Returns when there is nothing to be written at once; what comes later is written by whoever has it.  What is
        returned is to be called when the client has gone before the response has ended.  Raises `BrokenResourceError`
        if it has gone already.
        """
        case = _EndpointRequest(request, admitted, response, prefix)
        verdict = judge(
            self.policy, request,
            find_session=self._sessions.facts, find_mirrors=self._run.dispatcher.mirrors, principal=case.principal,
            screened=admitted.head, prefix=prefix,
        )  # fmt: skip
        refused = (
            verdict if isinstance(verdict, Reply) else self._forbidden(verdict, case) or self._refused(verdict, case)
        )
        if refused is not None:
            return await _refuse(refused, case)
        if isinstance(verdict, Serve):
            return await self._serve(verdict, case)
        if isinstance(verdict, OpenStream):
            return await self._open_stream(verdict, case)
        if isinstance(verdict, OpenLegacyStream):
            return await self._open_legacy_stream(verdict, case)
        assert isinstance(verdict, Deliver | EndSession)
        if isinstance(verdict, Deliver):
            self._deliver(verdict, case)
        else:
            self._sessions.end(verdict.session, "the client has ended the session")
        await send_reply(response, verdict.reply)
        return _nothing

    def _forbidden(self, verdict: _Good, case: _EndpointRequest) -> Reply | None:
        """Why this principal may not have it.  A batch is refused as a whole, so that one step up is enough for it."""
        dispatcher, message = self._run.dispatcher, getattr(verdict, "message", None)
        needed = list(dispatcher.scopes)
        for each in message.items if isinstance(message, Batch) else (message,):
            if isinstance(each, Request):
                needed += dispatcher.scopes_for(each, case.principal)
        if not needed:
            return None
        id = message.id if isinstance(message, Request) else None
        return self._gate.forbidden(case.admitted.caller, tuple(dict.fromkeys(needed)), verdict.cors, id)

    def _refused(self, verdict: _Good, case: _EndpointRequest) -> Reply | None:
        """What is said to a good request that cannot be taken on now."""
        draining = self._run.draining or self._draining
        if (draining and _is_new_work(verdict)) or (self._dismissed and isinstance(verdict, Serve)):
            return busy(503, _SHUTTING_DOWN, verdict.cors)
        if isinstance(verdict, Serve) and verdict.session is None and not verdict.opens_session:
            return None  # it stands alone
        if isinstance(verdict, OpenLegacyStream) or (isinstance(verdict, Serve) and verdict.opens_session):
            why = f"this client has its share of {self._limits.sessions} sessions, all in use (Limits.sessions)"
            return None if self._sessions.make_room(case.admitted.holder) else busy(503, why, verdict.cors)
        session = self._sessions.get(verdict.session or "")
        opens = isinstance(verdict, Serve) or (isinstance(verdict, OpenStream) and verdict.after is None)
        if opens and isinstance(session, HttpSession) and session.streams >= self._limits.streams:
            return self._too_many_streams(verdict.cors)
        if session is not None and session.overrun:
            return busy(429, "too much waits to be read on this session's stream (Limits.outgoing)", verdict.cors)
        return None

    def _too_many_streams(self, cors: Fields) -> Reply:
        return busy(429, f"{self._limits.streams} streams are open in this session (Limits.streams)", cors)

    async def _serve(self, verdict: Serve, case: _EndpointRequest) -> Gone:
        """Answer the requests in a message."""
        if verdict.opens_session:
            return await self._open_session(verdict, case)
        if verdict.session is not None:
            session = self._session(verdict.session)
            conversation, lane = session.conversation, session.answer(verdict.answer, _ids(verdict.message))
        else:
            account = self.account(case.admitted.holder)
            alone = _SingleRequest(self._run, self._traffic, verdict, self._alone, account, self._absent)
            conversation, lane = alone.conversation, alone.lane
        if getattr(verdict.message, "method", None) == "subscriptions/listen":  # which may go on for ever
            self._stand(lane, case)
        gone = lane.carry(case.response, verdict.cors)
        self._hear(conversation, verdict.message, case, lane)
        return await _begin(lane, gone)

    async def _open_session(self, verdict: Serve, case: _EndpointRequest) -> Gone:
        id = self._sessions.new_id()
        holder = case.admitted.holder
        log: EventLog
        if self._event_log is None:
            log = MemoryEventLog(self._limits, self.account(holder))
        else:
            log = cast("EventLog", _GuardedLog(called(self._event_log, id)))
        changes, account = not self.policy.json_only, self.account(holder)
        session = HttpSession(
            self._run, self._traffic, self._sessions, id, case.principal, log, account=account, changes=changes
        )
        lane = session.answer(verdict.answer, _ids(verdict.message))
        gone = lane.carry(case.response, verdict.cors)
        self._hear(session.conversation, verdict.message, case, lane)
        if session.conversation.session.terms is not None:  # else initialize was refused
            self._sessions.add(id, session)
            lane.session_id = id
        return await _begin(lane, gone)

    def _deliver(self, verdict: Deliver, case: _EndpointRequest) -> None:
        session = self._sessions.get(verdict.session or "")
        if session is not None:  # else it stands alone, and is nothing to anybody
            self._sessions.touch(verdict.session or "")
            self._hear(session.conversation, verdict.message, case, None)
            session.wake()

    def _hear(
        self, conversation: ServerSession, message: Message, case: _EndpointRequest, lane: ResponseStream | None
    ) -> None:
        conversation.receive(
            message, trio.current_time(),
            wire=lane, principal=case.admitted.caller, headers=case.admitted.headers,
            size=weight(case.request.body, self._limits.values),
        )  # fmt: skip

    async def _open_stream(self, verdict: OpenStream, case: _EndpointRequest) -> Gone:
        session = self._session(verdict.session)
        if verdict.after is None:
            lane = session.stand()
            self._stand(lane, case)
            return await _begin(lane, lane.carry(case.response, verdict.cors))
        replay = session.log.replay(verdict.after)
        if not isinstance(replay, NotReplayable):
            session.came_back(replay.stream)
        if isinstance(replay, NotReplayable):
            return await self._cannot_resume(replay.why, verdict, case)
        resumed = session.find(replay.stream)
        if resumed is None and not replay.finished:
            return await self._cannot_resume("the stream has broken off", verdict, case)
        if resumed is not None and not resumed.carried and session.streams >= self._limits.streams:
            return await _refuse(self._too_many_streams(verdict.cors), case)
        missed = b"".join([encode_message(event.data, event.id) for event in replay.events])
        taken = len(missed) if len(missed) > LONG else 0
        account = session.conversation.account
        if (limit := account.take(taken)) is not None:
            why = f"too much waits to be read by this client; try again later (Limits.{limit})"
            return await _refuse(busy(503, why, verdict.cors), case)
        if resumed is None:  # nothing is added to the stream any more
            try:
                await case.response.begin(200, reply_headers(verdict.cors, stream=True), missed, more=False)
            finally:
                account.give(taken)
            return _nothing
        if resumed in self._standing:
            self._stand(resumed, case)
        return await _begin(resumed, resumed.carry(case.response, verdict.cors, missed, taken))

    def _stand(self, lane: ResponseStream, case: _EndpointRequest) -> None:
        self._standing[lane] = trio.current_time() + seconds_left(case.admitted.caller)

    async def _cannot_resume(self, why: str, verdict: OpenStream, case: _EndpointRequest) -> Gone:
        error = Error(None, INVALID_REQUEST, f"{why}; open a new stream, without Last-Event-ID")
        return await _refuse(refusal(400, error, verdict.cors), case)

    async def _open_legacy_stream(self, verdict: OpenLegacyStream, case: _EndpointRequest) -> Gone:
        id = self._sessions.new_id()
        uri = endpoint_uri(self.policy, id, case.prefix if self.public_url is None else self.public_url)
        opening = encode_event(SseEvent(uri.encode(), event="endpoint"))  # sse-05
        account = self.account(case.admitted.holder)
        stream = LegacyStream(self._run, self._traffic, self._sessions, id, case.principal, opening, account=account)
        self._sessions.add(id, stream)
        self._stand(stream.lane, case)
        return await _begin(stream.lane, stream.lane.carry(case.response, verdict.cors))

    def _session(self, id: str) -> HttpSession:
        """The session that a verdict of this moment names; it is heard of by that."""
        session = self._sessions.get(id)
        assert isinstance(session, HttpSession)
        self._sessions.touch(id)
        return session

    # As a connection of the run.

    @property
    def clients(self) -> int:
        return len(self._sessions) + len(self._alone)

    async def drain(self) -> None:
        """Wait for what runs, then end the sessions, and wait until every response has ended."""
        self._draining = True
        while True:
            # Those with answers come in conversations of their own, and go on with calls that others have begun.
            async with trio.open_nursery() as nursery:
                for conversation in self._conversations:
                    nursery.start_soon(conversation.drain)
            await self._run.parking.come_back_all()
            await self._sessions.come_back()
            if not any(conversation.busy for conversation in self._conversations) and not self._run.parking:
                break
        self._sessions.end_all(_SHUTTING_DOWN, retry=_RETRY)
        await self._carried.empty()

    def abort_pending(self) -> None:
        self._dismissed = True
        for conversation in self._conversations:
            conversation.abort_pending(UNFINISHED)
        # One that does not end in this moment is not to cut off the streams of all others.
        self._sessions.end_all(_SHUTTING_DOWN, retry=_RETRY)

    @property
    def _conversations(self) -> tuple[ServerSession, ...]:
        return (*self._alone, *self._sessions.conversations)

    def stop(self) -> None:
        """The run is over: nobody is served any more."""
        for conversation in (*self._alone, *self._sessions.take_all()):
            conversation.stop()
        for lane in tuple(self._carried):  # of sessions that had ended already
            lane.close()


async def _refuse(reply: Reply, case: _EndpointRequest) -> Gone:
    tell_refusal(reply, case.request, case.admitted.peer)
    await send_reply(case.response, reply)
    return _nothing


def tell_refusal(reply: Reply, request: HttpRequest | None, peer: str | None) -> None:
    """Tell whoever runs the server what it refuses, and to whom; `request` is None where none could be read.

    Without the query, where HTTP+SSE clients have their session.
    """
    if reply.error is None or not _refusals.isEnabledFor(logging.INFO):
        return
    what = "a connection"
    if request is not None:
        what = f"{shown(request.method)} {shown(request.target.partition('?')[0])}"
    _refusals.info("%s%s: %d, %s", f"{peer}: " if peer else "", what, reply.status, reply.error.message)


async def _begin(lane: ResponseStream, gone: Gone) -> Gone:
    """Write what there is at once; what comes later is written by whoever has it."""
    try:
        await lane.begin()
    except BaseException:  # a cancelled caller cannot be told whom to tell that the client has gone
        gone()
        raise
    return gone


def _is_new_work(verdict: _Good) -> bool:
    """Whether nothing that runs waits for this."""
    if isinstance(verdict, Serve):
        return not (isinstance(verdict.message, Request) and "requestState" in verdict.message.params)
    return isinstance(verdict, OpenLegacyStream) or (isinstance(verdict, OpenStream) and verdict.after is None)


def _ids(message: Message) -> tuple[Id, ...]:
    """The requests in it."""
    if isinstance(message, Request):
        return (message.id,)
    assert isinstance(message, Batch)  # nothing else has any
    return tuple(item.id for item in message.items if isinstance(item, Request))


def busy(status: int, why: str, cors: Fields = (), wait: int = _BUSY) -> Reply:
    """What is said where a request cannot be taken on now, and may be later."""
    return refusal(status, Error(None, INTERNAL_ERROR, why), cors, (("Retry-After", str(wait)),))


def too_much(limit: str, cors: Fields = ()) -> Reply:
    """What is said where a body is not read any further, because its client has sent too much that waits."""
    return busy(503, f"too much waits that this client has sent; try again later (Limits.{limit})", cors)


def _nothing() -> None:
    """What is to be done when the client has gone, where it had nothing to lose."""
