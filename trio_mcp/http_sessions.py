"""The sessions of the legacy era: what lives on between the requests of one client.

A session is the wire of all that belongs to no request.  That goes out on a stream which the client opens by GET; of
several it is the newest one that a response carries, so each message goes out on exactly one (http-39).  While there is
none, it waits for one.

A session ends when its client says so, when nothing was heard of it for `Limits.session_idle_seconds` and it has no
stream open, or with the server.  Then its handlers are cancelled and its streams end.  A client that loses a connection
loses nothing by that (http-28).
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from trio_mcp.conversation import Conversation
from trio_mcp.core.headers import Fields
from trio_mcp.core.http import SessionFacts, session_id
from trio_mcp.core.replay import EventLog
from trio_mcp.core.revisions import REVISIONS
from trio_mcp.core.state import Link
from trio_mcp.lanes import Lane, Response, Spoken
from trio_mcp.running import Run
from trio_mcp.silence import Silence

__all__ = ["HttpSession", "LegacyStream", "Session", "Sessions", "everything_of"]

_RETRY = 1.0  # seconds after which the client of a stream that ends with the server looks whether there is another one
_HTTP_SSE = next(iter(REVISIONS.values()))


class Session(Protocol):
    """What the registry keeps."""

    conversation: Conversation

    @property
    def facts(self) -> SessionFacts:
        """What there is to know of it for a verdict."""

    @property
    def in_use(self) -> bool:
        """Whether its client is here, though nothing is heard of it."""

    def wake(self) -> None:
        """Send what it has to say."""

    def end(self, why: str) -> None:
        """Cancel what runs, and end its streams in good order."""


class HttpSession:
    """One session of Streamable HTTP; a `Wire` for what belongs to no request."""

    def __init__(self, run: Run, principal: str | None, log: EventLog, touched: Callable[[], object]) -> None:
        self.log = log
        self.conversation = Conversation(run, self, link=Link.SESSION)
        self._principal = principal
        self._touched = touched
        self._limit = run.limits.outgoing
        self._lanes: set[Lane] = set()
        self._standing: list[Lane] = []  # those that stand alone, the newest last
        self._kept: deque[Spoken] = deque()  # until there is a stream that it can go out on
        self._over = False

    @property
    def facts(self) -> SessionFacts:
        terms = self.conversation.session.terms
        assert terms is not None  # it is registered when initialize has agreed them
        return SessionFacts(terms.revision, self._principal)

    @property
    def in_use(self) -> bool:
        return self.streams > 0

    @property
    def streams(self) -> int:
        """How many responses are open."""
        return sum(lane.carried for lane in self._lanes)

    # Its lanes.

    def answer(self, lane: Lane, ids: list[str | int]) -> None:
        """Let this lane answer these requests, which are to be heard next."""
        self._lanes.add(lane)
        lane.attend(self.conversation.session, self.pull, ids)

    def stand(self, lane: Lane, response: Response, cors: Fields) -> Callable[[], None]:
        """Let this lane carry what belongs to no request."""
        for older in tuple(self._standing):
            if not older.carried:  # its client has opened another one instead of coming back to it
                older.finish()
        self._lanes.add(lane)
        self._standing.append(lane)
        lane.attend(self.conversation.session, self.pull)
        return lane.carry(response, cors)

    def find(self, name: str) -> Lane | None:
        """The lane that the log knows by this name, unless it has ended."""
        return next((lane for lane in self._lanes if lane.name == name), None)

    def ended(self, lane: Lane) -> None:
        self._lanes.discard(lane)
        if lane in self._standing:
            self._standing.remove(lane)
        if self._over and not self._lanes:
            self.log.clear()

    def left(self, lane: Lane) -> None:
        if lane.name is None:
            self.ended(lane)  # nobody can come back to it, though its requests go on (http-28)
        self._touched()

    # The wire.

    @property
    def _newest(self) -> Lane | None:
        return next((lane for lane in reversed(self._standing) if lane.carried), None)

    def pull(self, asking: Lane | None = None) -> None:
        """Move what the session has to send to where it belongs; whoever has got something, but who asks, is woken."""
        session = self.conversation.session
        woken: set[Lane] = set()
        while True:
            for message, wire in session.outgoing() if session.queued else ():
                if isinstance(wire, Lane):
                    wire.put(message)
                    woken.add(wire)
                else:
                    self._kept.append(message)
            newest = self._newest
            while newest is not None and self._kept and not newest.full:
                newest.put(self._kept.popleft())
                woken.add(newest)
            if not self.full:
                self.conversation.release()
            if not session.queued:
                break
        woken.discard(asking)  # type: ignore[arg-type]
        for lane in woken:
            lane.wake()

    def wake(self) -> None:
        self.pull()

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()
        self.pull()

    @property
    def mark(self) -> int:
        return 0

    async def written(self, mark: int) -> None:
        """What belongs to no request need not be kept apart from any answer."""
        await trio.lowlevel.checkpoint()

    @property
    def full(self) -> bool:
        return len(self._kept) >= self._limit

    async def room(self) -> None:
        await trio.lowlevel.checkpoint()

    @property
    def answers_only(self) -> bool:
        return False

    def close(self) -> None:
        """The server has stopped."""
        for lane in tuple(self._lanes):
            lane.close()

    # The end.

    def end(self, why: str) -> None:
        self._over = True
        self.conversation.lost(why)
        for lane in tuple(self._lanes):
            lane.finish(retry=_RETRY if lane in self._standing else None)
        if not self._lanes:
            self.log.clear()


class LegacyStream:
    """One stream of the old HTTP+SSE transport, which is its session: everything goes out on it."""

    def __init__(self, run: Run, principal: str | None, lane: Lane) -> None:
        self.conversation = Conversation(run, lane, link=Link.DUPLEX)
        self._principal = principal
        self._lane = lane
        lane.attend(self.conversation.session, everything_of(self.conversation))

    @property
    def facts(self) -> SessionFacts:
        terms = self.conversation.session.terms
        return SessionFacts(_HTTP_SSE if terms is None else terms.revision, self._principal, legacy_stream=True)

    @property
    def in_use(self) -> bool:
        return self._lane.carried

    def wake(self) -> None:
        self._lane.wake()

    def end(self, why: str) -> None:
        self.conversation.lost(why)
        self._lane.finish()


def everything_of(conversation: Conversation) -> Callable[[Lane], None]:
    """What moves all that a conversation has to say to the one lane that it has."""

    def pull(lane: Lane) -> None:
        session = conversation.session
        while True:
            for message, _ in session.outgoing() if session.queued else ():
                lane.put(message)
            if not lane.full:
                conversation.release()
            if not session.queued:
                return

    return pull


class Sessions:
    """All sessions that clients have with one endpoint."""

    def __init__(self, most: int, idle: float) -> None:
        self._most = most
        self._all: dict[str, Session] = {}
        self._idle: Silence[str] = Silence(idle)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def full(self) -> bool:
        return len(self._all) >= self._most

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

    def end(self, id: str, why: str) -> None:
        session = self._all.pop(id, None)
        if session is not None:
            self._idle.forget(id)
            session.end(why)

    def all(self) -> dict[str, Session]:
        return dict(self._all)

    async def expire(self) -> None:
        """End those that nobody uses any more."""
        while True:
            id = await self._idle.next()
            if not self._all[id].in_use:
                self.end(id, "the session was not used for too long")

    @staticmethod
    def new_id() -> str:
        return session_id(secrets.token_bytes(24))  # http-53
