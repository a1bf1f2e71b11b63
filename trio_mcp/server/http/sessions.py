"""The sessions of the legacy revisions, which live longer than one request.

A session is the `Wire` for messages that belong to no request.  They go out on the standalone stream that the client
opens by GET.  If it opened several, each message goes out on the newest one that is attached (http-39).  Without a
stream, messages are queued for the next one.

A session ends

- when its client ends it;
- when the client was absent for `Limits.session_idle_seconds`;
- when there are too many sessions, no handler works in this one, and it is idle for longest;
- with the server.

Then its handlers are cancelled, their requests are answered with errors, and its streams end.  A lost connection does
not end a session (http-28).

A client is absent while it has no open response and sends no request, except in the time after the server has asked it
to reconnect later.  Handlers continue while the client is absent, because it may reconnect for their answers.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import ClassVar, TypeAlias

import trio

import trio_mcp.server as room  # it has loaded `held_reports` for the first client that reads too slowly
from trio_mcp.core.http.event_log import EventLog
from trio_mcp.core.http.server_rules import Answer, SessionFacts, session_id
from trio_mcp.core.messages import Id, Notification, encode
from trio_mcp.core.requests import LinkKind, charged
from trio_mcp.core.revisions import REVISIONS, Revision
from trio_mcp.core.shares import Account, Shares
from trio_mcp.core.subscriptions import ChangeKind, change_of
from trio_mcp.core.turns import to_make_room
from trio_mcp.server.http.responses import (
    EndpointStreams,
    IdleOrder,
    OneStream,
    OutgoingMessage,
    ResponseMode,
    ResponseStream,
    StreamOwner,
)
from trio_mcp.server.run import Run
from trio_mcp.server.session import ServerSession
from trio_mcp.transport.wire import Wire

__all__ = ["HttpSession", "LegacyStream", "RegisteredSession", "Sessions"]

_log = logging.getLogger("trio_mcp")
_HTTP_SSE = next(iter(REVISIONS.values()))
_LATE = 1.0  # seconds by which a client may reconnect later than it was asked to
_LOOKED_AT = 1000  # sessions to look at for one to end: to look at all would make `initialize` a costly request


class HttpSession(StreamOwner, Wire):
    """One session of Streamable HTTP, and the `Wire` for its messages that belong to no request."""

    overrun = False
    """Whether its client sends requests but does not read the answers.  Here each request has a response of its own."""
    server_session_class: ClassVar[type[ServerSession]] = ServerSession
    stream_class: ClassVar[type[ResponseStream]] = ResponseStream

    def __init__(
        self,
        run: Run,
        shared: EndpointStreams,
        sessions: Sessions,
        id: str,
        principal: str | None,
        log: EventLog,
        *,
        account: Account,
        changes: bool = True,
    ) -> None:
        self.log = log
        self.server_session = self.server_session_class(
            run, self, account=account, link=LinkKind.SESSION, changes=changes
        )
        self._shared = shared
        self._sessions = sessions
        self.id = id
        self._principal = principal
        self._response_streams: set[ResponseStream] = set()
        self._event_streams: set[ResponseStream] = set()  # those whose response is an event stream
        self._standalone: list[ResponseStream] = []  # those opened by GET, the newest last
        # Messages that wait for a standalone stream.  The key is the text, because to send each text once is enough.
        self._pending: OrderedDict[bytes, OutgoingMessage] = OrderedDict()
        # Leaves room for a notification of each possible change.
        self._limit = shared.limit + run.limits.listener_changes + len(ChangeKind)
        self._over = False
        # The names of streams whose clients were asked to reconnect, with the deadlines for that.
        self._expected: dict[str, float] = {}
        self._returned = trio.lowlevel.ParkingLot()

    @property
    def facts(self) -> SessionFacts:
        """The facts that `server_rules` needs for a verdict."""
        return SessionFacts(self._revision, self._principal)

    @property
    def _revision(self) -> Revision:
        terms = self.server_session.session.terms
        assert terms is not None  # a session is registered after `initialize` has negotiated the terms
        return terms.revision

    @property
    def present(self) -> bool:
        """Whether its client has an open response, or was asked to reconnect and still has time to."""
        return any(stream.attached for stream in self._response_streams) or self._expected_until > trio.current_time()

    @property
    def in_use(self) -> bool:
        """Whether its client is present, or a handler works for it."""
        return self.server_session.at_work or self.present

    @property
    def streams(self) -> int:
        """The number of its responses that are event streams."""
        return len(self._event_streams)

    # Its streams.

    def answer(self, allowed: Answer, ids: Collection[Id]) -> ResponseStream:
        """Make a stream to answer these requests.  The caller passes them to the session next."""
        # Before the client has the answer to `initialize` it has no session id, and could not resume a stream.
        opened = self.server_session.session.terms is not None
        return self._add(ResponseMode(allowed, self._revision, self.log) if opened else ResponseMode(allowed), ids)

    def open_standalone(self) -> ResponseStream:
        """Make a stream for messages that belong to no request."""
        for older in tuple(self._standalone):
            if not older.attached:  # its client has opened a new stream instead of resuming this one
                older.finish()
        stream = self._add(ResponseMode(Answer.STREAM, self._revision, self.log))
        self._standalone.append(stream)
        return stream

    def _add(self, mode: ResponseMode, ids: Collection[Id] = ()) -> ResponseStream:
        stream = self.stream_class(self, mode, self._shared, ids)
        self._response_streams.add(stream)
        return stream

    def stream_resumed(self, name: str) -> None:
        """Record that a client has resumed this stream, perhaps after it was asked to."""
        if self._expected.pop(name, None) is not None:
            self._returned.unpark_all()

    @property
    def _expected_until(self) -> float:
        """The last deadline of clients that were asked to reconnect; in the past if there is none."""
        return max(self._expected.values(), default=-math.inf)

    async def wait_for_clients(self) -> None:
        """Wait until the clients that were asked to reconnect have done so, or their deadlines have passed."""
        while (until := self._expected_until) > trio.current_time():
            with trio.move_on_at(until):
                await self._returned.park()

    def find(self, name: str) -> ResponseStream | None:
        """The stream with this name in the event log, or None if it is over."""
        return next((stream for stream in self._response_streams if stream.name == name), None)

    def opened(self, stream: ResponseStream) -> None:
        self._event_streams.add(stream)

    def detached(self, stream: ResponseStream, retry: float | None = None) -> None:
        self._sessions.touch(self.id)
        self._event_streams.discard(stream)
        if retry is not None and stream.name is not None:
            now = trio.current_time()
            self._expected = {name: until for name, until in self._expected.items() if until > now}
            self._expected[stream.name] = now + retry + _LATE
        if stream.session_id is not None:
            self._sessions.end(self.id, "its client did not read the response with the session id")

    def client_absent(self, stream: ResponseStream) -> None:
        # Handlers at work go on as long as the session, but no other stream brings the answer to a question that the
        # client has never read.
        self.server_session.questions_unread(stream)

    def ended(self, stream: ResponseStream) -> None:
        self._sessions.touch(self.id)
        self._event_streams.discard(stream)
        self._response_streams.remove(stream)
        if stream in self._standalone:
            self._standalone.remove(stream)
        if self._over and not self._response_streams:
            self._clear()

    # The methods of a `Wire`.

    @property
    def _newest(self) -> ResponseStream | None:
        return next((stream for stream in reversed(self._standalone) if stream.attached), None)

    def pull(self, stream: ResponseStream | None = None) -> None:
        session = self.server_session.session
        woken: set[ResponseStream] = set()
        if self.server_session.held_reports:
            room.send_held(self.server_session, _has_room)
        if session.queued:
            outgoing, unsent = session.outgoing(), session.take_charge()
            for message, wire in outgoing:
                size = charged(message) if unsent else 0
                if isinstance(wire, ResponseStream):
                    unsent -= wire.put(message, size)
                    woken.add(wire)
                else:
                    unsent -= self._queue(message, size)
            if unsent:
                self.server_session.account.give(unsent)
        if self._pending and (newest := self._newest) is not None:
            woken.add(newest)
            while self._pending and not newest.crowded:
                _, message = self._pending.popitem(last=False)
                newest.put(message, charged(message))
        for each in woken:
            if each is not stream:
                each.wake()

    def _queue(self, message: OutgoingMessage, size: int) -> int:
        """Queue a message for the next standalone stream.  Returns its charge, `size`; 0 if it was dropped."""
        # Other messages than changes (a question was cancelled, a URL elicitation was completed) have the lower limit,
        # because they lose value with age.
        change = isinstance(message, Notification) and change_of(message) is not None
        text = encode(message)
        if len(self._pending) >= (self._limit if change else self._shared.limit) or text in self._pending:
            return 0
        self._pending[text] = message
        return size

    def wake(self) -> None:
        # A session may never get a standalone stream, so senders do not wait for one: it is never full.
        self.pull()

    def close(self) -> None:
        """The server has stopped."""
        self._finish(ResponseStream.close)

    # The end.

    def end(self, why: str, *, retry: float | None = None) -> None:
        """Cancel its handlers and end its streams properly.  Clients may reconnect after `retry` seconds."""
        self.server_session.abort_pending(why)
        self.pull()
        self.server_session.connection_lost(why)
        standing = tuple(self._standalone)
        self._finish(lambda stream: stream.finish(retry=retry if stream in standing else None))

    def _finish(self, end: Callable[[ResponseStream], object]) -> None:
        self._over = True
        streams = tuple(self._response_streams)
        if not streams:
            self._clear()
        for stream in streams:
            end(stream)

    def _clear(self) -> None:
        self.server_session.account.give(sum(map(charged, self._pending.values())))
        self._pending.clear()
        try:
            self.log.clear()
        except Exception:  # noqa: BLE001  # an author's log may raise any exception
            _log.exception("the event log of a session that has ended could not be cleared")


class LegacyStream(OneStream):
    """One stream of the old HTTP+SSE transport, which is also its session."""

    def __init__(
        self,
        run: Run,
        shared: EndpointStreams,
        sessions: Sessions,
        id: str,
        principal: str | None,
        opening: bytes,
        *,
        account: Account,
    ) -> None:
        self.stream = ResponseStream(self, ResponseMode(Answer.STREAM, opening=opening), shared)
        self.server_session = ServerSession(run, self.stream, account=account, link=LinkKind.DUPLEX)
        self._sessions = sessions
        self._id = id
        self._principal = principal
        self._limit = run.limits.calls + run.limits.outgoing  # as for a session on a byte stream

    @property
    def facts(self) -> SessionFacts:
        terms = self.server_session.session.terms
        return SessionFacts(_HTTP_SSE if terms is None else terms.revision, self._principal, legacy_stream=True)

    @property
    def present(self) -> bool:
        return self.stream.attached

    in_use = present

    @property
    def overrun(self) -> bool:
        return self.stream.waiting > self._limit

    def detached(self, stream: ResponseStream, retry: float | None = None) -> None:
        self._sessions.end(self._id, "the client has closed its stream")

    def wake(self) -> None:
        self.stream.wake()

    def end(self, why: str, *, retry: float | None = None) -> None:
        self.pull(self.stream)  # messages that are sent already still go out
        self.server_session.connection_lost(why)
        self.stream.finish()


RegisteredSession: TypeAlias = HttpSession | LegacyStream


def _has_room(wire: Wire) -> bool:
    return isinstance(wire, ResponseStream) and not wire.crowded


def _holder(session: RegisteredSession) -> Hashable | None:
    return session.server_session.account.holder


class Sessions:
    """All sessions of one endpoint.  Each holder (a principal or a client address) may have its share of them."""

    def __init__(self, limit: int, idle: float) -> None:
        self._shares = Shares(limit)
        self._all: dict[str, RegisteredSession] = {}
        self._idle: IdleOrder[str] = IdleOrder(idle)
        # The sessions of each holder, the least recently active first.  `_unused` moves sessions in use to the end.
        self._queues: dict[Hashable | None, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def make_room(self, holder: Hashable | None) -> bool:
        """Whether this holder may have one more session.  If needed, end the session that is idle for longest."""
        if self._shares.fits(holder):
            return True
        if (id := to_make_room(self._shares, holder, self._unused(holder))) is not None:
            self.end(id, "there are too many sessions, and this one was idle for longest (Limits.sessions)")
        return self._shares.fits(holder)

    def _unused(self, holder: Hashable | None) -> Iterator[tuple[str, Hashable | None]]:
        """Sessions that are not in use: first those of the holder, then those of the holder with the most sessions."""
        holders = [holder]
        if self._shares.full:
            holders.append(max(self._queues, key=self._shares.of, default=holder))  # no sessions if there may be none
        for each in dict.fromkeys(holders):
            queue = self._queues.get(each, OrderedDict())
            for id in tuple(itertools.islice(queue, _LOOKED_AT)):
                if self._all[id].in_use:
                    queue.move_to_end(id)  # so that the next search does not look at it first
                else:
                    yield id, each

    @property
    def server_sessions(self) -> list[ServerSession]:
        return [session.server_session for session in self._all.values()]

    def add(self, id: str, session: RegisteredSession) -> None:
        """Register a session.  `make_room` must have returned True just before."""
        self._shares.take(_holder(session))
        self._all[id] = session
        self._queues.setdefault(_holder(session), OrderedDict())[id] = None
        self.touch(id)

    def get(self, id: str) -> RegisteredSession | None:
        return self._all.get(id)

    def facts(self, id: str) -> SessionFacts | None:
        session = self._all.get(id)
        return None if session is None else session.facts

    def touch(self, id: str) -> None:
        """Record an activity of its client."""
        if id in self._all:
            self._idle.touch(id)
            self._queues[_holder(self._all[id])].move_to_end(id)

    def end(self, id: str, why: str, *, retry: float | None = None) -> None:
        session = self._all.pop(id, None)
        if session is not None:
            self._forget(id, session)
            session.end(why, retry=retry)

    def _forget(self, id: str, session: RegisteredSession) -> None:
        holder = _holder(session)
        self._shares.give(holder)
        self._idle.forget(id)
        queue = self._queues[holder]
        del queue[id]
        if not queue:
            del self._queues[holder]

    def take_all(self) -> list[ServerSession]:
        """Remove and return all sessions; the caller ends them."""
        sessions, self._all = self._all, {}
        for id, session in sessions.items():
            self._forget(id, session)
        return [session.server_session for session in sessions.values()]

    async def wait_for_clients(self) -> None:
        """Wait for the clients that were asked to reconnect to their streams."""
        for session in tuple(self._all.values()):
            if isinstance(session, HttpSession):
                await session.wait_for_clients()

    def end_all(self, why: str, *, retry: float | None = None) -> None:
        for id in tuple(self._all):
            self.end(id, why, retry=retry)

    async def expire(self) -> None:
        """End sessions whose clients are absent for too long; runs until it is cancelled."""
        while True:
            id = await self._idle.next()
            if not self._all[id].present:
                self.end(id, "the client was absent for too long (Limits.session_idle_seconds)")

    @staticmethod
    def new_id() -> str:
        return session_id(secrets.token_bytes(24))  # http-53
