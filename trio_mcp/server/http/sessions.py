"""The sessions of the legacy era: what lives on between the requests of one client.

A session is the wire of all that belongs to no request.  That goes out on a stream which the client opens by GET; of
several it is the newest one that a response carries, so each message goes out on exactly one (http-39).  While there is
none, it waits for one.

A session ends when its client says so, when the client was absent for `Limits.session_idle_seconds`, when it is the
longest idle one of too many and no handler is at work, or with the server.  Then its handlers are cancelled, what they
were to answer is refused, and its streams end.  A client that loses a connection loses nothing by that (http-28).

A client is absent while no response to it is open and nothing is heard of it, unless it was asked to come back later.
Its handlers go on, for it may come back for their answers, but not for longer than that.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Protocol

import trio

from trio_mcp.core.http.event_log import EventLog
from trio_mcp.core.http.verdicts import Answer, SessionFacts, session_id
from trio_mcp.core.jsonrpc import Id, Notification, encode
from trio_mcp.core.peer import charged
from trio_mcp.core.revisions import REVISIONS, Revision
from trio_mcp.core.shares import Account, Shares, to_make_room
from trio_mcp.core.state import LinkKind
from trio_mcp.core.subscriptions import ChangeKind, change_of
from trio_mcp.server.conversation import ServerSession
from trio_mcp.server.http.lanes import EndpointStreams, ResponseMode, ResponseStream, Spoken, StreamOwner
from trio_mcp.server.http.silence import IdleOrder
from trio_mcp.server.run import Run
from trio_mcp.transport.outbox import Wire

__all__ = ["HttpSession", "LegacyStream", "RegisteredSession", "Sessions", "pull_all"]

_log = logging.getLogger("trio_mcp")
_HTTP_SSE = next(iter(REVISIONS.values()))
_LATE = 1.0  # seconds by which a client may come back later than it was asked to
_LOOKED_AT = 1000  # sessions, for one that makes room: to look at all would make `initialize` a costly request


class RegisteredSession(Protocol):
    """What the registry keeps."""

    conversation: ServerSession

    @property
    def facts(self) -> SessionFacts:
        """What there is to know of it for a verdict."""

    @property
    def present(self) -> bool:
        """Whether its client is here, or was asked to come back later, though nothing is heard of it."""

    @property
    def in_use(self) -> bool:
        """Whether its client is present, or something runs for it."""

    @property
    def overrun(self) -> bool:
        """Whether its client says more than it is willing to hear, so that nothing should be taken from it."""

    def wake(self) -> None:
        """Send what it has to say."""

    def end(self, why: str, *, retry: float | None = None) -> None:
        """Cancel what runs, and end its streams in good order.  Their clients may come back after `retry` seconds."""


class HttpSession(StreamOwner):
    """One session of Streamable HTTP; a `Wire` for what belongs to no request."""

    overrun = False  # each request has a response of its own

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
        self.conversation = ServerSession(run, self, account=account, link=LinkKind.SESSION, changes=changes)
        self._endpoint_streams = shared
        self._sessions = sessions
        self._id = id
        self._principal = principal
        self._response_streams: set[ResponseStream] = set()
        self._event_streams: set[ResponseStream] = set()  # those whose response is a stream
        self._standalone: list[ResponseStream] = []  # those that stand alone, the newest last
        # Until there is a stream that it can go out on; by what it says, for to say it once is enough.
        self._pending: OrderedDict[bytes, Spoken] = OrderedDict()
        # With a notice of each change that there can be.
        self._limit = shared.limit + run.limits.listener_changes + len(ChangeKind)
        self._over = False
        # Streams whose clients were asked to come back, and until when they may be on their way.
        self._expected: dict[str, float] = {}
        self._returned = trio.lowlevel.ParkingLot()

    @property
    def facts(self) -> SessionFacts:
        return SessionFacts(self._revision, self._principal)

    @property
    def _revision(self) -> Revision:
        terms = self.conversation.session.terms
        assert terms is not None  # it is registered when initialize has agreed them
        return terms.revision

    @property
    def present(self) -> bool:
        return any(stream.attached for stream in self._response_streams) or self._expected_until > trio.current_time()

    @property
    def in_use(self) -> bool:
        return self.conversation.at_work or self.present

    @property
    def streams(self) -> int:
        """How many of its responses are streams."""
        return len(self._event_streams)

    # Its streams.

    def answer(self, allowed: Answer, ids: Collection[Id]) -> ResponseStream:
        """A stream that answers these requests, which are to be heard next."""
        # Who has not read the answer to initialize has no session to come back to.
        opened = self.conversation.session.terms is not None
        return self._add(ResponseMode(allowed, self._revision, self.log) if opened else ResponseMode(allowed), ids)

    def open_standalone(self) -> ResponseStream:
        """A stream for what belongs to no request."""
        for older in tuple(self._standalone):
            if not older.attached:  # its client wants another one instead of coming back to it
                older.finish()
        stream = self._add(ResponseMode(Answer.STREAM, self._revision, self.log))
        self._standalone.append(stream)
        return stream

    def _add(self, mode: ResponseMode, ids: Collection[Id] = ()) -> ResponseStream:
        stream = ResponseStream(self, mode, self._endpoint_streams, ids)
        self._response_streams.add(stream)
        return stream

    def stream_resumed(self, name: str) -> None:
        """The client is here that was asked to come back to this stream."""
        if self._expected.pop(name, None) is not None:
            self._returned.unpark_all()

    @property
    def _expected_until(self) -> float:
        """Until when clients that were asked to come back may be on their way."""
        return max(self._expected.values(), default=-math.inf)

    async def wait_for_clients(self) -> None:
        """Wait for the clients that were asked to come back, as long as they may be on their way."""
        while (until := self._expected_until) > trio.current_time():
            with trio.move_on_at(until):
                await self._returned.park()

    def find(self, name: str) -> ResponseStream | None:
        """The stream that the log knows by this name, unless it is over."""
        return next((stream for stream in self._response_streams if stream.name == name), None)

    def opened(self, stream: ResponseStream) -> None:
        self._event_streams.add(stream)

    def detached(self, stream: ResponseStream, retry: float | None = None) -> None:
        self._sessions.touch(self._id)
        self._event_streams.discard(stream)
        if retry is not None and stream.name is not None:
            now = trio.current_time()
            self._expected = {name: until for name, until in self._expected.items() if until > now}
            self._expected[stream.name] = now + retry + _LATE
        if stream.session_id is not None:
            self._sessions.end(self._id, "its client has not read which session it is")

    def ended(self, stream: ResponseStream) -> None:
        self._sessions.touch(self._id)
        self._event_streams.discard(stream)
        self._response_streams.remove(stream)
        if stream in self._standalone:
            self._standalone.remove(stream)
        if self._over and not self._response_streams:
            self._clear()

    # The wire.

    @property
    def _newest(self) -> ResponseStream | None:
        return next((stream for stream in reversed(self._standalone) if stream.attached), None)

    def pull(self, stream: ResponseStream | None = None) -> None:
        session = self.conversation.session
        woken: set[ResponseStream] = set()
        self.conversation.send_kept(_has_room)
        outgoing = session.outgoing() if session.queued else ()
        unsent = session.take_charge()
        for message, wire in outgoing:
            if isinstance(wire, ResponseStream):
                unsent -= wire.put(message)
                woken.add(wire)
            else:
                unsent -= self._queue(message)
        if unsent:
            self.conversation.account.give(unsent)
        if self._pending and (newest := self._newest) is not None:
            woken.add(newest)
            while self._pending and not newest.crowded:
                newest.put(self._pending.popitem(last=False)[1])
        for each in woken:
            if each is not stream:
                each.wake()

    def _queue(self, message: Spoken) -> int:
        """Keep it for the next stream.  Returns the bytes that it is charged for, if it was kept."""
        # The rest (that a question is taken back, that a page was visited) is worth less the older it is.
        change = isinstance(message, Notification) and change_of(message) is not None
        text = encode(message)
        if len(self._pending) >= (self._limit if change else self._endpoint_streams.limit) or text in self._pending:
            return 0
        self._pending[text] = message
        return charged(message)

    def wake(self) -> None:
        self.pull()

    async def flush(self) -> None:
        self.pull()
        await trio.lowlevel.checkpoint()

    @property
    def mark(self) -> int:
        return 0

    async def written(self, mark: int) -> None:
        """What belongs to no request need not be kept apart from any answer."""
        await trio.lowlevel.checkpoint()

    @property
    def full(self) -> bool:
        """There may be no stream for as long as the session lasts, so nothing waits for one but what is kept."""
        return False

    async def room(self) -> None:
        await trio.lowlevel.checkpoint()

    @property
    def answers_only(self) -> bool:
        return False

    def hang_up(self, retry: float) -> bool:
        return False

    def close(self) -> None:
        """The server has stopped."""
        self._finish(ResponseStream.close)

    # The end.

    def end(self, why: str, *, retry: float | None = None) -> None:
        self.conversation.abort_pending(why)
        self.pull()
        self.conversation.connection_lost(why)
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
        self.conversation.account.give(sum(map(charged, self._pending.values())))
        self._pending.clear()
        try:
            self.log.clear()
        except Exception:  # noqa: BLE001  # an author's log may raise anything
            _log.exception("the event log of a session that has ended could not be cleared")


class LegacyStream(StreamOwner):
    """One stream of the old HTTP+SSE transport, which is its session: everything goes out on it."""

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
        self.conversation = ServerSession(run, self.stream, account=account, link=LinkKind.DUPLEX)
        self._sessions = sessions
        self._id = id
        self._principal = principal
        self._limit = run.limits.calls + run.limits.outgoing  # as on any stream that holds a session

    @property
    def facts(self) -> SessionFacts:
        terms = self.conversation.session.terms
        return SessionFacts(_HTTP_SSE if terms is None else terms.revision, self._principal, legacy_stream=True)

    @property
    def present(self) -> bool:
        return self.stream.attached

    in_use = present

    @property
    def overrun(self) -> bool:
        return self.stream.waiting > self._limit

    def pull(self, stream: ResponseStream) -> None:
        pull_all(self.conversation, stream)

    def detached(self, stream: ResponseStream, retry: float | None = None) -> None:
        self._sessions.end(self._id, "the client has closed its stream")

    def wake(self) -> None:
        self.stream.wake()

    def end(self, why: str, *, retry: float | None = None) -> None:
        self.pull(self.stream)  # what was said already is said
        self.conversation.connection_lost(why)
        self.stream.finish()


def pull_all(conversation: ServerSession, stream: ResponseStream) -> None:
    """Put all that a conversation has to say into the one stream that it has."""
    session = conversation.session
    while True:
        outgoing = session.outgoing() if session.queued else ()
        unsent = session.take_charge()
        for message, _ in outgoing:
            unsent -= stream.put(message)
        if unsent:
            conversation.account.give(unsent)
        if not stream.crowded:
            conversation.release()
        if not session.queued:
            return


def _has_room(wire: Wire) -> bool:
    return isinstance(wire, ResponseStream) and not wire.crowded


def _holder(session: RegisteredSession) -> Hashable | None:
    return session.conversation.account.holder


class Sessions:
    """All sessions that clients have with one endpoint, of which each has its share."""

    def __init__(self, most: int, idle: float) -> None:
        self._shares = Shares(most)
        self._all: dict[str, RegisteredSession] = {}
        self._idle: IdleOrder[str] = IdleOrder(idle)
        # Those of each client, from the one that was heard of least recently; those found in use stand behind.
        self._queues: dict[Hashable | None, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def make_room(self, holder: Hashable | None) -> bool:
        """Whether this holder may have one more, be it in the place of one that was idle for longest."""
        if self._shares.fits(holder):
            return True
        if (id := to_make_room(self._shares, holder, self._unused(holder))) is not None:
            self.end(id, "there are too many sessions, and this one was idle for longest (Limits.sessions)")
        return self._shares.fits(holder)

    def _unused(self, holder: Hashable | None) -> Iterator[tuple[str, Hashable | None]]:
        """Sessions that are not in use: first those of the holder, then those of the one that has most."""
        for each in {holder: None, max(self._queues, key=self._shares.of): None} if self._shares.full else (holder,):
            queue = self._queues.get(each, OrderedDict())
            for id in tuple(itertools.islice(queue, _LOOKED_AT)):
                if self._all[id].in_use:
                    queue.move_to_end(id)  # so that it is not in the way of others the next time
                else:
                    yield id, each

    @property
    def conversations(self) -> list[ServerSession]:
        return [session.conversation for session in self._all.values()]

    def add(self, id: str, session: RegisteredSession) -> None:
        """There is room for it: it was made just before."""
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
        """Its client was heard of."""
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
        """Forget them all, and leave it to the caller to end them."""
        sessions, self._all = self._all, {}
        for id, session in sessions.items():
            self._forget(id, session)
        return [session.conversation for session in sessions.values()]

    async def wait_for_clients(self) -> None:
        """Wait for the clients that were asked to come back to their streams."""
        for session in tuple(self._all.values()):
            if isinstance(session, HttpSession):
                await session.wait_for_clients()

    def end_all(self, why: str, *, retry: float | None = None) -> None:
        for id in tuple(self._all):
            self.end(id, why, retry=retry)

    async def expire(self) -> None:
        """End those whose clients are absent for too long."""
        while True:
            id = await self._idle.next()
            if not self._all[id].present:
                self.end(id, "the client was absent for too long (Limits.session_idle_seconds)")

    @staticmethod
    def new_id() -> str:
        return session_id(secrets.token_bytes(24))  # http-53
