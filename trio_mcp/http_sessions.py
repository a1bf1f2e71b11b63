"""The sessions of the legacy era: what lives on between the requests of one client.

A session is the wire of all that belongs to no request.  That goes out on a stream which the client opens by GET; of
several it is the newest one that a response carries, so each message goes out on exactly one (http-39).  While there is
none, it waits for one.

A session ends when its client says so, when nothing was heard of it for `Limits.session_idle_seconds` and neither was a
response open nor a handler at work, when it is the longest idle one of too many, or with the server.  Then its handlers
are cancelled, what they were to answer is refused, and its streams end.  A client that loses a connection loses nothing
by that (http-28).
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

import trio

from trio_mcp.conversation import Conversation
from trio_mcp.core.jsonrpc import Id, Notification, encode
from trio_mcp.core.listen import Kind, change_of
from trio_mcp.core.replay import EventLog
from trio_mcp.core.revisions import REVISIONS, Revision
from trio_mcp.core.state import Link
from trio_mcp.core.verdicts import Answer, SessionFacts, session_id
from trio_mcp.lanes import Lane, Owner, Spoken, Traffic, Way
from trio_mcp.running import Run
from trio_mcp.silence import Silence

__all__ = ["HttpSession", "LegacyStream", "Session", "Sessions", "pull_all"]

_log = logging.getLogger("trio_mcp")
_HTTP_SSE = next(iter(REVISIONS.values()))
_LATE = 1.0  # seconds by which a client may come back later than it was asked to
_LOOKED_AT = 100  # sessions, for one that makes room: to look at all would make `initialize` a costly request


class Session(Protocol):
    """What the registry keeps."""

    conversation: Conversation

    @property
    def facts(self) -> SessionFacts:
        """What there is to know of it for a verdict."""

    @property
    def in_use(self) -> bool:
        """Whether its client is here, or something runs for it, though nothing is heard of it."""

    @property
    def overrun(self) -> bool:
        """Whether its client says more than it is willing to hear, so that nothing should be taken from it."""

    def wake(self) -> None:
        """Send what it has to say."""

    def end(self, why: str, *, retry: float | None = None) -> None:
        """Cancel what runs, and end its streams in good order.  Their clients may come back after `retry` seconds."""


class HttpSession(Owner):
    """One session of Streamable HTTP; a `Wire` for what belongs to no request."""

    overrun = False  # each request has a response of its own

    def __init__(
        self,
        run: Run,
        traffic: Traffic,
        sessions: Sessions,
        id: str,
        principal: str | None,
        log: EventLog,
        *,
        changes: bool = True,
    ) -> None:
        self.log = log
        self.conversation = Conversation(run, self, link=Link.SESSION, changes=changes)
        self._traffic = traffic
        self._sessions = sessions
        self._id = id
        self._principal = principal
        self._lanes: set[Lane] = set()
        self._streams: set[Lane] = set()  # those whose response is a stream
        self._standing: list[Lane] = []  # those that stand alone, the newest last
        # Until there is a stream that it can go out on; by what it says, for to say it once is enough.
        self._kept: OrderedDict[bytes, Spoken] = OrderedDict()
        # With a notice of each change that there can be.
        self._most = traffic.limit + run.limits.listener_changes + len(Kind)
        self._over = False
        # Streams whose clients were asked to come back, and until when they may be on their way.
        self._awaited: dict[str, float] = {}
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
    def in_use(self) -> bool:
        return self.conversation.at_work or any(lane.carried for lane in self._lanes)

    @property
    def streams(self) -> int:
        """How many of its responses are streams."""
        return len(self._streams)

    # Its lanes.

    def answer(self, allowed: Answer, ids: Collection[Id]) -> Lane:
        """A lane that answers these requests, which are to be heard next."""
        # Who has not read the answer to initialize has no session to come back to.
        opened = self.conversation.session.terms is not None
        return self._add(Way(allowed, self._revision, self.log) if opened else Way(allowed), ids)

    def stand(self) -> Lane:
        """A lane for what belongs to no request."""
        for older in tuple(self._standing):
            if not older.carried:  # its client wants another one instead of coming back to it
                older.finish()
        lane = self._add(Way(Answer.STREAM, self._revision, self.log))
        self._standing.append(lane)
        return lane

    def _add(self, way: Way, ids: Collection[Id] = ()) -> Lane:
        lane = Lane(self, way, self._traffic, ids)
        self._lanes.add(lane)
        return lane

    def came_back(self, name: str) -> None:
        """The client is here that was asked to come back to this stream."""
        if self._awaited.pop(name, None) is not None:
            self._returned.unpark_all()

    async def come_back(self) -> None:
        """Wait for the clients that were asked to come back, as long as they may be on their way."""
        while (until := max(self._awaited.values(), default=-math.inf)) > trio.current_time():
            with trio.move_on_at(until):
                await self._returned.park()

    def find(self, name: str) -> Lane | None:
        """The lane that the log knows by this name, unless it is over."""
        return next((lane for lane in self._lanes if lane.name == name), None)

    def opened(self, lane: Lane) -> None:
        self._streams.add(lane)

    def left(self, lane: Lane, retry: float | None = None) -> None:
        self._sessions.touch(self._id)
        self._streams.discard(lane)
        if retry is not None and lane.name is not None:
            now = trio.current_time()
            self._awaited = {name: until for name, until in self._awaited.items() if until > now}
            self._awaited[lane.name] = now + retry + _LATE
        if lane.session_id is not None:
            self._sessions.end(self._id, "its client has not read which session it is")

    def ended(self, lane: Lane) -> None:
        self._sessions.touch(self._id)
        self._streams.discard(lane)
        self._lanes.remove(lane)
        if lane in self._standing:
            self._standing.remove(lane)
        if self._over and not self._lanes:
            self._clear()

    # The wire.

    @property
    def _newest(self) -> Lane | None:
        return next((lane for lane in reversed(self._standing) if lane.carried), None)

    def pull(self, lane: Lane | None = None) -> None:
        session = self.conversation.session
        woken: set[Lane] = set()
        for message, wire in session.outgoing() if session.queued else ():
            if isinstance(wire, Lane):
                wire.put(message)
                woken.add(wire)
            else:
                self._keep(message)
        if self._kept and (newest := self._newest) is not None:
            woken.add(newest)
            while self._kept and not newest.crowded:
                newest.put(self._kept.popitem(last=False)[1])
        for each in woken:
            if each is not lane:
                each.wake()

    def _keep(self, message: Spoken) -> None:
        # The rest (that a question is taken back, that a page was visited) is worth less the older it is.
        change = isinstance(message, Notification) and change_of(message) is not None
        if len(self._kept) < (self._most if change else self._traffic.limit):
            self._kept[encode(message)] = message

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
        self._finish(Lane.close)

    # The end.

    def end(self, why: str, *, retry: float | None = None) -> None:
        self.conversation.dismiss(why)
        self.pull()
        self.conversation.lost(why)
        standing = tuple(self._standing)
        self._finish(lambda lane: lane.finish(retry=retry if lane in standing else None))

    def _finish(self, end: Callable[[Lane], object]) -> None:
        self._over = True
        lanes = tuple(self._lanes)
        if not lanes:
            self._clear()
        for lane in lanes:
            end(lane)

    def _clear(self) -> None:
        try:
            self.log.clear()
        except Exception:  # noqa: BLE001  # an author's log may raise anything
            _log.exception("the event log of a session that has ended could not be cleared")


class LegacyStream(Owner):
    """One stream of the old HTTP+SSE transport, which is its session: everything goes out on it."""

    def __init__(
        self, run: Run, traffic: Traffic, sessions: Sessions, id: str, principal: str | None, opening: bytes
    ) -> None:
        self.lane = Lane(self, Way(Answer.STREAM, opening=opening), traffic)
        self.conversation = Conversation(run, self.lane, link=Link.DUPLEX)
        self._sessions = sessions
        self._id = id
        self._principal = principal
        self._most = run.limits.calls + run.limits.outgoing  # as on any stream that holds a session

    @property
    def facts(self) -> SessionFacts:
        terms = self.conversation.session.terms
        return SessionFacts(_HTTP_SSE if terms is None else terms.revision, self._principal, legacy_stream=True)

    @property
    def in_use(self) -> bool:
        return self.lane.carried

    @property
    def overrun(self) -> bool:
        return self.lane.waiting > self._most

    def pull(self, lane: Lane) -> None:
        pull_all(self.conversation, lane)

    def left(self, lane: Lane, retry: float | None = None) -> None:
        self._sessions.end(self._id, "the client has closed its stream")

    def wake(self) -> None:
        self.lane.wake()

    def end(self, why: str, *, retry: float | None = None) -> None:
        self.pull(self.lane)  # what was said already is said
        self.conversation.lost(why)
        self.lane.finish()


def pull_all(conversation: Conversation, lane: Lane) -> None:
    """Put all that a conversation has to say into the one lane that it has."""
    session = conversation.session
    while True:
        for message, _ in session.outgoing() if session.queued else ():
            lane.put(message)
        if not lane.crowded:
            conversation.release()
        if not session.queued:
            return


class Sessions:
    """All sessions that clients have with one endpoint."""

    def __init__(self, most: int, idle: float) -> None:
        self._most = most
        self._all: dict[str, Session] = {}
        self._idle: Silence[str] = Silence(idle)

    def __len__(self) -> int:
        return len(self._all)

    def make_room(self) -> bool:
        """Whether there may be one more, be it in the place of one that was idle for longest."""
        if len(self._all) < self._most:
            return True
        for id in itertools.islice(self._idle, _LOOKED_AT):
            if not self._all[id].in_use:
                self.end(id, "there are too many sessions, and this one was idle for longest (Limits.sessions)")
                return True
        return False

    @property
    def conversations(self) -> list[Conversation]:
        return [session.conversation for session in self._all.values()]

    def add(self, id: str, session: Session) -> None:
        self._all[id] = session
        self.touch(id)

    def get(self, id: str) -> Session | None:
        return self._all.get(id)

    def facts(self, id: str) -> SessionFacts | None:
        session = self._all.get(id)
        return None if session is None else session.facts

    def touch(self, id: str) -> None:
        """Its client was heard of."""
        if id in self._all:
            self._idle.hear(id)

    def end(self, id: str, why: str, *, retry: float | None = None) -> None:
        session = self._all.pop(id, None)
        if session is not None:
            self._idle.forget(id)
            session.end(why, retry=retry)

    def take_all(self) -> list[Conversation]:
        """Forget them all, and leave it to the caller to end them."""
        sessions, self._all = self._all, {}
        for id in sessions:
            self._idle.forget(id)
        return [session.conversation for session in sessions.values()]

    async def come_back(self) -> None:
        """Wait for the clients that were asked to come back to their streams."""
        for session in tuple(self._all.values()):
            if isinstance(session, HttpSession):
                await session.come_back()

    def end_all(self, why: str, *, retry: float | None = None) -> None:
        for id in tuple(self._all):
            self.end(id, why, retry=retry)

    async def expire(self) -> None:
        """End those that nobody uses any more."""
        while True:
            id = await self._idle.next()
            if not self._all[id].in_use:
                self.end(id, "the session was not used for too long")

    @staticmethod
    def new_id() -> str:
        return session_id(secrets.token_bytes(24))  # http-53
