"""The HTTP endpoint of a replica: it finds the sessions of other replicas, and resumes their streams.

See `shared_sessions` for the sessions themselves.  The endpoint differs from that of a single process in four places:

- a request of a session that is unknown here looks for the row of the session, after it was authenticated;
- a GET with Last-Event-ID of a stream that is not here reads the events from the store: those of a call until its end,
  those of a standalone stream up to now;
- DELETE ends the session in all replicas;
- a store that fails gives 503, if the request needs it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final, Unpack, cast

import attrs
import trio

from trio_mcp.core.errors import INTERNAL_ERROR
from trio_mcp.core.http.event_log import NotReplayable
from trio_mcp.core.http.fields import SESSION_ID, Fields, HttpRequest, Reply
from trio_mcp.core.http.server_rules import OpenStream
from trio_mcp.core.http.sse import encode_message
from trio_mcp.core.messages import (
    Error,
    Id,
    JsonObject,
    encode,
)
from trio_mcp.core.shares import LONG
from trio_mcp.server.http.authentication import Caller
from trio_mcp.server.http.endpoint import (
    SHUTTING_DOWN,
    AdmittedRequest,
    Endpoint,
    OnDisconnect,
    cannot_resume,
    refuse,
    try_later,
)
from trio_mcp.server.http.responses import HttpResponse
from trio_mcp.server.http.sessions import HttpSession
from trio_mcp.server.http.shared_row import ENDED, SessionRecord, key_of
from trio_mcp.server.http.shared_sessions import SharedSession
from trio_mcp.server.http.shared_streams import (
    FollowedStream,
    LoggedStream,
    SharedEventLog,
    is_standalone,
    read_item,
)
from trio_mcp.server.replicas import LEASE, CannotContinue, Replica, text_for_clients
from trio_mcp.stores.rows import Row, StoreFailed, StoreFull, wall_time
from trio_mcp.transport.nursery import open_nursery

if TYPE_CHECKING:
    from trio_mcp.core.http.event_log import EventLog
    from trio_mcp.server.http.options import HttpOptions
    from trio_mcp.server.http.sessions import HttpSession
    from trio_mcp.server.run import Run

__all__ = ["SharedEndpoint"]

_log = logging.getLogger("trio_mcp")

_LOOK: Final = 5.0  # seconds between two looks at the row and the mail
_ARRIVAL: Final = 3.0  # seconds for the first events of a stream to reach the store, which may refuse one write
_GLANCE: Final = 0.25  # seconds between two looks for them
_ALIVE: Final = LEASE / 3  # seconds between two looks whether the replica of a followed stream lives
_ASK: Final = 1.0  # seconds until a followed stream is read again, if no message has come about it
_EVENTS: Final = 50  # items that are read at once
_ROOM: Final = 10  # times `Limits.sessions`: the sessions of all replicas together
_LINKS: Final = 100  # streams through which one standalone stream has gone
_CLOSING: Final = 2.0  # seconds for the events of the last calls to reach the store
_SESSION: Final = SESSION_ID.lower()
_VERSION: Final = "mcp-protocol-version"
_DIED: Final = "the process that ran this call has ended before it was answered; call again"


@attrs.define(eq=False)
class _Fetch:
    """A copy of a session that is being made.  Requests of the session that come meanwhile wait for it."""

    ended: trio.Event = attrs.field(factory=trio.Event)
    failure: str | None = None
    """Why the store has failed: the requests that wait fail with it, because one more try each would add up."""


class SharedEndpoint(Endpoint):
    """The HTTP endpoint of a replica."""

    def __init__(self, run: Run, replica: Replica, **options: Unpack[HttpOptions]) -> None:
        super().__init__(run, **options)
        self.replica = replica
        self.kind = f"session {replica.server_name}"
        """The kind of the rows of sessions."""
        self.copies: dict[str, SharedSession] = {}
        """The sessions that have a copy here, by their names in the store."""
        self._fetching: dict[str, _Fetch] = {}

    async def run(self) -> None:
        hears, on_gap = self.replica.hears, self.replica.on_gap
        sessions, followers = hears.setdefault("session", []), hears.setdefault("follow", [])
        sessions.append(self._hear)
        followers.append(self._hear_follower)
        on_gap.append(self._read_all_mail)
        try:
            async with open_nursery() as nursery:
                nursery.start_soon(self._keep_sessions)
                await super().run()
        finally:  # the replica may live longer
            sessions.remove(self._hear)
            followers.remove(self._hear_follower)
            on_gap.remove(self._read_all_mail)

    async def _keep_sessions(self) -> None:
        period = min(_LOOK, self.limits.session_idle_seconds / 8)
        while True:
            await trio.sleep(period)
            for session in tuple(self.copies.values()):
                try:
                    await session.keep()
                except CannotContinue:  # it has ended
                    continue
                except StoreFull as error:  # the store has no room for this client, and perhaps for others
                    _log.error("%s", error)
                except StoreFailed as error:
                    _log.error("%s", error)
                    break

    async def drain(self) -> None:
        logs = [session.log for session in self.copies.values()]
        await super().drain()
        with trio.move_on_after(_CLOSING):
            for log in logs:
                if isinstance(log, SharedEventLog):
                    await log.all_written()

    # Messages of other replicas.

    def _hear(self, message: JsonObject) -> None:
        if (session := self.copies.get(message["key"])) is not None:
            session.hear(message)

    def _hear_follower(self, message: JsonObject) -> None:
        """The client of a stream has resumed it in another replica."""
        session = self.copies.get(message["key"])
        stream = None if session is None else session.find(message["stream"])
        if isinstance(stream, LoggedStream):
            stream.follow_elsewhere()

    def _read_all_mail(self) -> None:
        for session in tuple(self.copies.values()):
            session.mail.catch_up()

    # Sessions.

    def mail_of(self, key: str) -> str:
        """The stream of the store with the mail of a session."""
        return f"mail of {self.kind} {key}"

    async def add(self, row: Row) -> None:
        """Add the row of a session.  If there is no room, the oldest session of its owner ends."""
        quickly, store, most = self.replica.quickly, self.replica.store, self.limits.sessions
        try:
            added = await quickly(store.add(row, each=most, total=_ROOM * most))
        except StoreFull:
            for oldest in await quickly(store.list(row.kind, row.owner, (-inf, ""), 1)):
                await quickly(store.delete(oldest.kind, oldest.key))
                await quickly(store.discard(self.mail_of(oldest.key)))  # its copies then end
            added = await quickly(store.add(row, each=most, total=_ROOM * most))
        assert added  # ids are random

    def _new_session(self, admitted: AdmittedRequest) -> HttpSession:
        return self._make(self._sessions.new_id(), admitted.principal, admitted.holder)

    def _make(self, id: str, principal: str | None, holder: str | None) -> SharedSession:
        log, changes = self._new_log(id, holder), not self.policy.json_only
        return SharedSession(
            self._run, self._streams, self._sessions, id, principal, log, self,
            account=self.account(holder), changes=changes,
        )  # fmt: skip

    def _new_log(self, id: str, holder: str | None) -> EventLog:
        if self._event_log is not None:
            return super()._new_log(id, holder)
        prefix = f"{self.replica.name}.{secrets.token_urlsafe(6)}."
        return SharedEventLog(
            self.replica, f"events of {self.kind} {key_of(id)}", self.limits, self.account(holder), prefix
        )

    async def admit(self, request: HttpRequest, peer: str | None = None) -> Reply | AdmittedRequest:
        id = request.headers.by_name.get(_SESSION)
        if id is not None:
            session = self._sessions.get(id)
            if session is None:
                self._usual.pop((request, peer), None)
            elif isinstance(session, SharedSession) and not session.ready:
                with suppress(StoreFailed):  # the request may need nothing of it
                    await self.replica.quickly(session.mail.read())  # others may read it, too
        return await super().admit(request, peer)

    async def _identify(self, request: HttpRequest, cors: Fields) -> Reply | Caller:
        """As `Endpoint._identify`.  Also makes a copy of the session of the request, if it has none here."""
        caller, id = await super()._identify(request, cors), self._session_of(request)
        if id is None or isinstance(caller, Reply):
            return caller
        try:
            refused = await self._fetch(id, cors)
        except (StoreFailed, StoreFull) as error:
            refused = _refusal_for(error, cors)
        return caller if refused is None else refused

    def _session_of(self, request: HttpRequest) -> str | None:
        """The id of the session that a request names; modern requests have none."""
        by_name = request.headers.by_name
        return (
            None if by_name.get(_VERSION) in self.policy.modern or not self.policy.sessions else by_name.get(_SESSION)
        )

    async def _fetch(self, id: str, cors: Fields) -> Reply | None:
        """Make a copy of a session of other replicas, if there is one.  Return the refusal, if there is no room."""
        while self._sessions.get(id) is None and (fetch := self._fetching.get(id)) is not None:
            await fetch.ended.wait()
            if fetch.failure is not None:
                raise StoreFailed(fetch.failure)
        if self._sessions.get(id) is not None:
            return None
        self._fetching[id] = fetch = _Fetch()
        try:
            row = await self.replica.quickly(self.replica.store.get(self.kind, key_of(id)))
            if row is None or row.expires <= wall_time():
                return None
            record, holder = SessionRecord.from_text(row.body), row.owner or None
            if record.revision not in self.policy.legacy:
                return None
            full = try_later(503, "too many sessions are in use here (Limits.sessions)", cors)
            if not self._sessions.make_room(holder):
                return full
            session = self._make(id, record.principal, holder)
            try:
                await session.join()
            except CannotContinue:  # it has ended in the meantime
                return None
            if not self._sessions.make_room(holder):  # others have come in the meantime
                session.end("there are too many sessions here (Limits.sessions)")
                return full
            self._sessions.add(id, session)
            return None
        except StoreFailed as error:
            fetch.failure = str(error)
            raise
        finally:
            del self._fetching[id]
            fetch.ended.set()

    async def serve(self, admitted: AdmittedRequest, request: HttpRequest, response: HttpResponse) -> OnDisconnect:
        id, cors = self._session_of(request), admitted.head.cors
        try:
            if id is not None and self._sessions.get(id) is None:  # its copy has ended since the head was read
                leaves = self._draining or self._run.draining
                refused = try_later(503, SHUTTING_DOWN, cors) if leaves else await self._fetch(id, cors)
                if refused is not None:
                    return await refuse(refused, admitted, response)
            return await super().serve(admitted, request, response)
        except (StoreFailed, StoreFull) as error:
            return await refuse(_refusal_for(error, cors), admitted, response)

    async def _end_session(self, id: str) -> None:
        if isinstance(session := self._sessions.get(id), SharedSession):
            await session.delete()
        await super()._end_session(id)

    # Streams.

    async def _open_stream(
        self, verdict: OpenStream, admitted: AdmittedRequest, response: HttpResponse
    ) -> OnDisconnect:
        session = self._session(verdict.session)
        if not isinstance(session, SharedSession) or not isinstance(session.log, SharedEventLog):
            return await super()._open_stream(verdict, admitted, response)
        name, _, digits = (verdict.after or "").rpartition("-")
        here = name in session.log and name not in session.log.moved
        if not name or (here and is_standalone(name)):
            await session.speaker.speak()
        elif not here:
            if not digits.isdecimal() or len(digits) >= 20:
                return await refuse(cannot_resume("no event has this id", verdict.cors), admitted, response)
            number = int(digits)
            resume = self._resume_standalone if is_standalone(name) else self._follow
            return await resume(session, name, number, verdict, admitted, response)
        if self._sessions.get(verdict.session) is not session:
            return await refuse(cannot_resume(ENDED, verdict.cors), admitted, response)
        return await super()._open_stream(verdict, admitted, response)

    async def _resume_standalone(
        self,
        session: SharedSession,
        name: str,
        number: int,
        verdict: OpenStream,
        admitted: AdmittedRequest,
        response: HttpResponse,
    ) -> OnDisconnect:
        """Send the events that a client has missed on a standalone stream, and go on with them here."""
        log = cast(SharedEventLog, session.log)
        await session.speaker.speak(name)
        found = await self._missed(log, name, number)
        if isinstance(found, NotReplayable):
            return await refuse(cannot_resume(found.why, verdict.cors), admitted, response)
        if self._sessions.get(verdict.session) is not session:  # it has ended meanwhile
            return await refuse(cannot_resume(ENDED, verdict.cors), admitted, response)
        last, missed = found
        if session.streams >= self.limits.streams:
            return await refuse(self._too_many_streams(verdict.cors), admitted, response)
        taken = len(missed) if len(missed) > LONG else 0
        if (limit := session.server_session.account.take(taken)) is not None:
            why = f"this client has too many unread bytes; try again later (Limits.{limit})"
            return await refuse(try_later(503, why, verdict.cors), admitted, response)
        stream = session.open_standalone()
        stream.name = log.open_standalone()
        log.link(last, stream.name)
        if isinstance(stream, LoggedStream) and stream.primes:  # the next time, the client resumes this stream
            missed += encode_message(b"", *log.append(stream.name, [b""]))
        self._close_with_token(stream, admitted)
        return await stream.begin(stream.attach(response, verdict.cors, missed, taken))

    async def _missed(self, log: SharedEventLog, name: str, number: int) -> tuple[str, bytes] | NotReplayable:
        """Read the events after one from the store, and from the streams with which its stream goes on.

        Returns the name of the last of these streams, and the events as the client gets them.
        """
        quickly, store = self.replica.quickly, self.replica.store
        missed: list[bytes] = []
        for _ in range(_LINKS):
            position, next, first, last = 0, None, None, number
            while True:
                oldest, items = await quickly(store.read(log.in_store(name), position, _EVENTS))
                if position and oldest > position + 1:
                    return NotReplayable("the events that followed this one are no longer kept")
                if not items:
                    break
                position = items[-1][0]
                for _, text in items:
                    item = read_item(text)
                    next = item.next or next
                    first = item.begins if first is None else first
                    missed += [encode_message(event.data, event.id) for event in item.after(name, last)]
                    last = max(last, item.last)
            if number >= 0 and (first is None or first > number + 1):
                return NotReplayable("this event is not known, or those that followed are no longer kept")
            if sum(map(len, missed)) > 2 * self.limits.replay_bytes:
                return NotReplayable("too many events have followed this one")
            if next is None:
                return name, b"".join(missed)
            name, number = next, -1
        return NotReplayable("this stream has gone on too often")

    async def _follow(
        self,
        session: SharedSession,
        name: str,
        number: int,
        verdict: OpenStream,
        admitted: AdmittedRequest,
        response: HttpResponse,
    ) -> OnDisconnect:
        """Resume the stream of a call that runs in another replica, or has ended."""
        log, origin = cast(SharedEventLog, session.log), name.partition(".")[0]
        in_store, quickly = log.in_store(name), self.replica.quickly
        tries = round(_ARRIVAL / _GLANCE)
        while True:
            await quickly(self.replica.send(origin, "follow", key=session.key, stream=name))
            _, items = await quickly(self.replica.store.read(in_store, 0, _EVENTS))
            tries -= 1
            if items or not tries or not await quickly(self.replica.alive(origin)):
                break
            await trio.sleep(_GLANCE)
        first = read_item(items[0][1]).begins if items else None
        if first is None or first > number + 1:
            why = "no event with this id is known in this session, or those that followed are no longer kept"
            return await refuse(cannot_resume(why, verdict.cors), admitted, response)
        if self._sessions.get(verdict.session) is not session:
            return await refuse(cannot_resume(ENDED, verdict.cors), admitted, response)
        if session.streams >= self.limits.streams:
            return await refuse(self._too_many_streams(verdict.cors), admitted, response)
        stream = session.follow()
        on_disconnect = stream.attach(response, verdict.cors)
        self.replica.start_soon(self._feed, session, stream, name, number, name="a followed stream")
        return await stream.begin(on_disconnect)

    async def _feed(self, session: SharedSession, stream: FollowedStream, name: str, number: int) -> None:
        """As `_send_events`.  If the store is away at the start, the client must resume once more."""
        try:
            await self._send_events(session, stream, name, number)
        except StoreFailed as error:
            _log.error("%s", error)
            stream.cut()

    async def _send_events(self, session: SharedSession, stream: FollowedStream, name: str, number: int) -> None:
        """Send the events of a stream of another replica, as they come, until its end or that of the response."""
        log, origin = cast(SharedEventLog, session.log), name.partition(".")[0]
        in_store, store = log.in_store(name), self.replica.store
        ids: Sequence[Id] = ()
        position, looked, died, failed = 0, -inf, False, False
        async with store.receive([in_store]) as news:
            while not stream.over:
                try:
                    oldest, items = await store.read(in_store, position, _EVENTS)
                    for item in [read_item(text) for _, text in items]:
                        if item.end:
                            stream.finish()
                            return
                        ids = item.ids or ids
                        stream.send_events([encode_message(each.data, each.id) for each in item.after(name, number)])
                        number = max(number, item.last)
                    if items:
                        position = items[-1][0]
                        await stream.room()
                        continue
                    if died or oldest > position + 1 or oldest == 0:
                        lost = [encode(Error(id, INTERNAL_ERROR, _DIED)) for id in ids]
                        stream.send_events([encode_message(each) for each in lost])
                        stream.finish()
                        return
                    if trio.current_time() - looked >= _ALIVE:
                        looked = trio.current_time()
                        died = not await self.replica.alive(origin)  # then read once more
                        await self.replica.send(origin, "follow", key=session.key, stream=name)
                    failed = False
                except StoreFailed as error:
                    if not failed:  # once for each time that it is away
                        _log.error("%s", error)
                    failed = True
                with trio.move_on_after(_ASK):
                    await anext(news)


def _refusal_for(error: StoreFailed | StoreFull, cors: Fields) -> Reply:
    seconds = error.seconds if isinstance(error, CannotContinue) else 1
    return try_later(503, text_for_clients(error), cors, seconds)
