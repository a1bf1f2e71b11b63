"""Sessions that continue in any replica, for the clients of the legacy revisions.

A session is a row of the store (`SessionRecord`), and each replica that its requests come to has a copy of it, a
`SharedSession`.  A request is served where it arrives; a handler, its stream and its questions stay in that replica.
Facts for the other copies are items in the mail of the session: a stream of the store, which each copy reads in order
from the number at which it was made.  A message to all replicas brings each item at once; if it is lost, the copy reads
the stream.

| Arrives | Where | Effect |
|---|---|---|
| `initialize` | any replica | the row, a copy; the answer goes out when the row is written |
| a request of a session without a copy here | any replica | a copy is made from the row; no row: 404 |
| `notifications/initialized`, `logging/setLevel` | any copy | the row and the mail; then the answer |
| `resources/subscribe` | any copy | the row and the mail; the speaker subscribes |
| a cancellation of a request that another copy serves | any copy | the mail; the copy that serves it cancels |
| an answer to a question that another copy asked | any copy | the mail; that copy has its answer |
| GET | any copy | that copy becomes the speaker |
| GET with Last-Event-ID, of a call | any copy | a `FollowedStream` of the stream in the store |
| GET with Last-Event-ID, of a standalone stream | any copy | the missed events, from the store; the copy speaks |
| DELETE | any copy | the row and the mail are deleted; all copies end |
| the client is absent here | a copy | the copy ends, if no handler runs; the row expires when no copy has renewed it |

One copy is the *speaker*: the one that has opened a standalone stream last, at first the one that was initialized.  It
alone listens to changes for the session, so each message goes out once (http-39).  Messages of other copies that belong
to no request are mailed to the speaker.  A speaker that hears of another one sends it the messages that still wait, and
stops.  If it has died, the new speaker tells its client of every change that the session listens to.

- Ids of questions differ between copies: they begin with the number of the copy, which is that of its first mail.
- Before a copy has heard of `notifications/initialized`, it reads its mail before each request.
- If mail was dropped, because too much of it waited, the questions of a copy fail: their answers may be lost.
- When a replica dies, its calls are lost.  A client that resumes the stream of such a call gets an error for each.
- The store away: requests in a copy that needs nothing from it go on; all others get 503 within a second.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import attrs
import trio

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_PARAMS, RequestError
from trio_mcp.core.http.server_rules import Answer
from trio_mcp.core.messages import (
    Batch,
    Error,
    Id,
    InvalidMessage,
    JsonObject,
    Message,
    Notification,
    Request,
    Response,
    decode,
    encode,
)
from trio_mcp.core.requests import charged
from trio_mcp.core.revisions import REVISIONS, Terms
from trio_mcp.server.context import ROOTS_CHANGED
from trio_mcp.server.http.responses import OutgoingMessage, ResponseMode, ResponseStream
from trio_mcp.server.http.sessions import HttpSession
from trio_mcp.server.http.shared_streams import (
    FollowedStream,
    LoggedStream,
    SharedEventLog,
)
from trio_mcp.server.replicas import SessionEnded, text_for_clients
from trio_mcp.server.session import ServerSession
from trio_mcp.stores.rows import Row, StoreFailed, StoreFull, wall_time

if TYPE_CHECKING:
    from trio_mcp.core.http.event_log import EventLog
    from trio_mcp.core.shares import Account
    from trio_mcp.server.http.responses import EndpointStreams
    from trio_mcp.server.http.sessions import Sessions
    from trio_mcp.server.http.shared_endpoint import SharedEndpoint
    from trio_mcp.server.run import Run

__all__ = ["ENDED", "SessionRecord", "SharedServerSession", "SharedSession", "key_of"]

_log = logging.getLogger("trio_mcp")

_OWN_IDS: Final = 24  # bits of the id of a question below the number of its copy
_HANDOVER: Final = 1.0  # seconds for the messages that wait at a speaker to reach its successor
_TRIES: Final = 20  # to write a row that other replicas write too
_AGAIN: Final = 1.0  # seconds until a store that failed is tried again
_WAITING: Final = 100  # answers and cancellations that wait for the store
_EVENTS: Final = 50  # items that are read at once
_SHORT: Final = 16 * 1024  # bytes of an item that is sent to all replicas; a longer one they read
_CANCELLED: Final = "notifications/cancelled"
ENDED: Final = "the session has ended"
"""The reason that clients and logs get."""


@attrs.frozen
class SessionRecord:
    """The facts with which any replica can continue a session."""

    revision: str
    capabilities: JsonObject
    identity: JsonObject | None
    principal: str | None
    opened: bool = False
    level: str | None = None
    uris: Sequence[str] = ()
    speaker: int = 0
    """The number of the copy that is the speaker."""
    speaks_in: str = ""
    """The replica of that copy."""

    def text(self) -> bytes:
        return json.dumps(attrs.asdict(self)).encode()

    @staticmethod
    def from_text(text: bytes) -> SessionRecord:
        return SessionRecord(**json.loads(text))

    def watching(self, method: str, uri: str, most: int) -> SessionRecord:
        """Add or remove a subscription.  Raises `RequestError` if there are too many."""
        others = tuple(each for each in self.uris if each != uri)
        if method == "resources/unsubscribe":
            return attrs.evolve(self, uris=others)
        if len(others) >= most:
            why = f"one listener may ask for {most} changes; these would be more"
            raise RequestError(INVALID_PARAMS, why)
        return attrs.evolve(self, uris=(*others, uri))


def key_of(id: str) -> str:
    """The name of a session in the store.  Its id is a secret, which a reader of the store could use."""
    return hashlib.sha256(id.encode()).hexdigest()[:32]


class SharedServerSession(ServerSession):
    """The server session of one copy of a session."""

    owner: SharedSession

    def receive(self, message: Message, now: float, **how: Any) -> None:
        self.owner.sort(message)
        super().receive(message, now, **how)

    def hear(self, message: Message) -> None:
        """Process a message that came to another copy."""
        super().receive(message, trio.current_time())
        self.wire.wake()

    async def watch(self, request: Request) -> JsonObject:
        return await self.owner.watch(request)

    @property
    def awaits_answers(self) -> bool:
        """Whether a question waits for an answer, which may come to another copy."""
        return bool(self._asked)

    def answers_lost(self) -> None:
        """Fail the questions that wait."""
        for id in tuple(self._asked):
            for event in self.session.fail(id, "its answer may have been lost between two replicas"):
                self._act(event)


class SharedSession(HttpSession):
    """The copy of a session in one replica."""

    server_session_class: ClassVar[type[ServerSession]] = SharedServerSession
    stream_class: ClassVar[type[ResponseStream]] = LoggedStream

    def __init__(
        self,
        run: Run,
        shared: EndpointStreams,
        sessions: Sessions,
        id: str,
        principal: str | None,
        log: EventLog,
        endpoint: SharedEndpoint,
        *,
        account: Account,
        changes: bool,
    ) -> None:
        super().__init__(run, shared, sessions, id, principal, log, account=account, changes=changes)
        replica = endpoint.replica
        self.key = key_of(id)
        """Its name in the store, which does not tell its id."""
        self.speaks = True
        self.server_session: SharedServerSession
        self.server_session.owner = self
        self.server_session.name = self.key
        self._endpoint = endpoint
        self._run = run
        self._replica = replica
        self._store = replica.store
        self._mail = endpoint.mail_of(self.key)
        self._number = 0  # of this copy
        self._position = 0  # of the last mail that was read
        self._reading = trio.Lock()
        self._outbox: list[JsonObject] = []
        self._posting = trio.Lock()
        self._delivering = False  # a task tries to deliver the outbox
        self._unwritten = 0  # times that the state could not be written; then a task tries again
        self._shared_state: tuple[bool, str | None] | None = None  # as the row has it
        self._expires = inf  # of the row, when it was read last
        self._looked = -inf  # when the row was read or written last
        self._active = True  # a request has come since the row was renewed
        self._speaking = trio.Lock()
        self._announced = 0  # the last mail by which another copy has become the speaker
        self._yielded = trio.Event()  # the speaker before this one has sent its messages
        self._over_everywhere = False

    # Its row.

    @property
    def _idle_seconds(self) -> float:
        return self._run.limits.session_idle_seconds

    @property
    def _state(self) -> tuple[bool, str | None] | None:
        protocol = self.server_session.session
        return None if protocol.terms is None else (protocol.opened, protocol.terms.log_level)

    @property
    def ready(self) -> bool:
        """Whether this copy knows that the client has sent `notifications/initialized`."""
        return self.server_session.session.opened

    async def settle(self) -> None:
        """Tell the other copies of the changes that a message has made.  Raises `StoreFailed` and `StoreFull`.

        Answers and notifications are accepted while the store is away, because few clients send them twice.
        """
        if self._outbox and not self._delivering:
            try:
                await self._deliver()
            except (StoreFailed, StoreFull) as error:
                self._log_failure(error)
                self._delivering = self._replica.start_soon(self._repeat, self._deliver, name="mail of a session")
        if self._outbox_is_full:
            while self._outbox_is_full:
                del self._outbox[-1]
            raise StoreFailed("too many messages of one session wait for the store of the replicas")
        before, state = self._shared_state, self._state
        if state == before or state is None:
            return
        if not self._number:
            await self._create()
        self._shared_state = state  # also if it cannot be written now: other requests do not need that
        if before is None:
            return
        try:
            await self._write_state()
        except (StoreFailed, StoreFull) as error:
            self._log_failure(error)
            self._unwritten += 1
            if self._unwritten == 1:
                self._replica.start_soon(self._repeat, self._write_state, name="the state of a session")
            if before[1] != state[1]:
                raise

    @property
    def _outbox_is_full(self) -> bool:
        size = sum(len(text) for each in self._outbox for text in each.values() if isinstance(text, str))
        return len(self._outbox) > 1 and (len(self._outbox) > _WAITING or size > self._run.limits.message_bytes)

    def _log_failure(self, error: Exception) -> None:
        """Log a failure of the store.  If the session has ended in the meantime, there is none."""
        if not self._over:
            _log.error("%s", error)

    async def _deliver(self) -> None:
        """Mail the items of the outbox."""
        async with self._posting:
            while self._outbox:
                await self._post(self._outbox[0])
                del self._outbox[0]
        self._delivering = False

    async def _write_state(self) -> None:
        """Write the present state into the row, and mail it."""
        while True:
            assert self._state is not None  # the session is open
            (opened, level), failures = self._state, self._unwritten
            await self._change(partial(attrs.evolve, opened=opened, level=level))
            await self._post({"opened": opened, "level": level})
            if failures == self._unwritten:  # no later state waits
                self._unwritten = 0
                return

    async def _repeat(self, write: Callable[[], Awaitable[None]]) -> None:
        """Try to write until the store is back, or the session has ended."""
        while not self._over:
            await trio.sleep(_AGAIN)
            with suppress(StoreFailed, StoreFull):  # the first failure was logged
                await write()
                return

    async def _create(self) -> None:
        """Write the row of a new session."""
        protocol = self.server_session.session
        terms = protocol.terms
        assert terms is not None  # `initialize` was served
        self._number = await self._append({"joined": self._replica.name})
        self._position = self._number
        protocol.count_from(self._number << _OWN_IDS | 1)
        identity = None if terms.identity is None else dict(terms.identity)
        record = SessionRecord(
            terms.revision.name, dict(terms.capabilities), identity, self._principal,
            opened=protocol.opened, level=terms.log_level, speaker=self._number, speaks_in=self._replica.name,
        )  # fmt: skip
        now = wall_time()
        row = Row(self._endpoint.kind, self.key, record.text(), self._owner, now, now + self._idle_seconds)
        try:
            await self._endpoint.add(row)
        except (StoreFailed, StoreFull):
            self._over_everywhere = True
            with suppress(StoreFailed):  # it expires
                await self._quickly(self._store.discard(self._mail))
            raise
        self._looked, self._expires = now, row.expires
        self._endpoint.copies[self.key] = self

    async def join(self, row: Row) -> bool:
        """Become a copy of the session in this row; False if it has ended meanwhile."""
        self.speaks = False
        self._number = await self._append({"joined": self._replica.name})
        self._position = self._number
        again = await self._quickly(self._store.get(row.kind, row.key))
        if again is None:
            await self._store.discard(self._mail)
            return False
        record, protocol = SessionRecord.from_text(again.body), self.server_session.session
        revision = REVISIONS[record.revision]
        protocol.terms = Terms(revision, record.capabilities, record.identity, record.level)
        protocol.opened = record.opened
        protocol.count_from(self._number << _OWN_IDS | 1)
        self._shared_state, self._expires = self._state, again.expires
        self._endpoint.copies[self.key] = self
        return True

    @property
    def _owner(self) -> str:
        holder = self.server_session.account.holder
        return "" if holder is None else str(holder)

    async def _quickly(self, call: Awaitable[Any]) -> Any:
        return await self._replica.quickly(call)

    async def _change(self, change: Callable[[SessionRecord], SessionRecord]) -> tuple[SessionRecord, SessionRecord]:
        """Write the row, and return the record before and after.  Raises as `change`, and `StoreFailed`."""
        for _ in range(_TRIES):
            row = await self._quickly(self._store.get(self._endpoint.kind, self.key))
            if row is None:
                self._end_here()
                raise SessionEnded(ENDED)
            before = SessionRecord.from_text(row.body)
            after = change(before)
            row = attrs.evolve(row, body=after.text(), expires=wall_time() + self._idle_seconds)
            if await self._quickly(self._store.replace(row)):
                self._looked, self._expires = wall_time(), row.expires
                return before, after
        raise StoreFailed("too many replicas write one session at the same time; try again later")

    async def keep(self) -> None:
        """Renew the row, if the client is here, and read the mail, if a call would wait for a message that was lost."""
        if self.server_session.awaits_answers:
            await self.hear_mail()
        now = wall_time()
        if now - self._looked < self._idle_seconds / 4:
            return
        self._looked = now
        if isinstance(self.log, SharedEventLog):
            self.log.refresh()
        here = self._active or super().present
        row = await self._quickly(self._store.get(self._endpoint.kind, self.key))
        if row is None:
            self._end_here()
            return
        self._expires = row.expires
        if here:
            row = attrs.evolve(row, expires=now + self._idle_seconds)
            if await self._quickly(self._store.replace(row)):
                self._expires, self._active = row.expires, False
                await self._post({"kept": True})  # the mail stays as long as the row

    @property
    def present(self) -> bool:
        """As `HttpSession.present`.  While a handler runs, the client may also be present in another replica."""
        return super().present or (self.server_session.at_work and self._expires > wall_time())

    async def delete(self) -> None:
        """End the session in all replicas."""
        await self._quickly(self._store.delete(self._endpoint.kind, self.key))
        self._over_everywhere = True
        await self._quickly(self._replica.send(None, "session", key=self.key, ended=True))
        await self._quickly(self._store.discard(self._mail))

    def _end_here(self) -> None:
        """The session has ended in another replica."""
        self._over_everywhere = True
        self._sessions.end(self.id, ENDED)

    def _finish(self, end: Callable[[ResponseStream], object]) -> None:
        if self._endpoint.copies.get(self.key) is self:
            del self._endpoint.copies[self.key]
        if self.speaks and self._number and not self._over_everywhere:
            waiting = [encode(each).decode() for each in self._pending.values()]
            self._later(self._post, {"silent": True, "waiting": waiting})
        super()._finish(end)

    def _later(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Call a function that needs the store, in a task of its own."""

        async def call() -> None:
            try:
                await function(*args)
            except (StoreFailed, StoreFull) as error:
                self._log_failure(error)

        self._replica.start_soon(call, name="a session in several replicas")

    # Its mail.

    async def _append(self, item: JsonObject) -> int:
        return cast(
            int,
            await self._quickly(
                self._store.append(
                    self._mail,
                    json.dumps(item).encode(),
                    owner=self._owner,
                    # Longer than the row, because a mail that begins again would have numbers that were heard.
                    expires=wall_time() + 2 * self._idle_seconds,
                    max_bytes=2 * self._run.limits.message_bytes,
                )
            ),
        )

    async def _post(self, item: JsonObject) -> int:
        """Mail an item to the other copies, and return its number.  Raises `StoreFailed` and `StoreFull`."""
        item = {"from": self._number, **item}
        number = await self._append(item)
        self._advance(number, item)
        try:
            await self._announce(number, item if len(json.dumps(item)) <= _SHORT else None)
        except StoreFailed as error:  # the others have lost no message, so they do not look by themselves
            self._log_failure(error)
            again = partial(self._announce, number, None, late=True)
            self._replica.start_soon(self._repeat, again, name="news of mail")
        return number

    async def _announce(self, number: int, item: JsonObject | None, *, late: bool = False) -> None:
        """Tell the other copies of an item of the mail; without it, they read the mail."""
        await self._quickly(self._replica.send(None, "session", key=self.key, number=number, item=item, late=late))

    def hear(self, message: JsonObject) -> None:
        """A message of another replica about this session has come."""
        if message.get("ended"):
            self._end_here()
        elif message.get("late"):
            self.catch_up()
        else:
            self._advance(message["number"], message["item"])

    def _advance(self, number: int, item: JsonObject | None) -> None:
        """Process the next item, or read the mail if there are others before it."""
        if number <= self._position:
            return
        if number > self._position + 1 or item is None:
            self._later(self.hear_mail)
            return
        self._position = number
        if item.get("from") != self._number:
            self._process(item)

    def catch_up(self) -> None:
        """Read the mail, because messages about it may have been lost."""
        self._later(self._catch_up)

    async def _catch_up(self) -> None:
        tells = self._run.publisher.tells(self.server_session)
        await self.hear_mail()
        if self.speaks and not self._run.publisher.tells(self.server_session) <= tells:
            self._run.publisher.tell_all(self.server_session)  # of what has changed since the client subscribed

    async def hear_mail(self) -> None:
        """Read the mail that has not been heard of."""
        async with self._reading:
            while not self._over:
                after = self._position
                oldest, events = await self._quickly(self._store.read(self._mail, after, _EVENTS))
                if oldest == 0:
                    self._end_here()
                    return
                if oldest > self._position + 1:
                    self._position = oldest - 1
                    self.server_session.answers_lost()
                for number, body in events:
                    self._advance(number, json.loads(body))
                if not events:
                    return

    def sort(self, message: Message) -> None:
        """Put the parts of a message from the client that concern other copies into the outbox."""
        self._active = True
        for each in message.items if isinstance(message, Batch) else (message,):
            if not self._concerns_others(each):
                continue
            if isinstance(each, InvalidMessage):
                self._outbox.append({"garbled": each.why, "answers": each.answers})
            elif isinstance(each, Request | Notification | Response | Error):
                self._outbox.append({"message": encode(each).decode()})

    def _concerns_others(self, message: Message) -> bool:
        if isinstance(message, Notification):
            id = message.params.get("requestId")
            elsewhere = type(id) in (int, str) and not self.server_session.session.serves(cast(Id, id))
            return message.method == ROOTS_CHANGED or (message.method == _CANCELLED and elsewhere)
        if isinstance(message, InvalidMessage):
            return message.answers is not None and not self._asked_here(message.answers)
        return isinstance(message, Response | Error) and message.id is not None and not self._asked_here(message.id)

    def _asked_here(self, id: Id) -> bool:
        if isinstance(id, str):  # some clients send the id back as a string
            id = int(id) if id.isascii() and id.isdecimal() and len(id) < 20 else 0
        return id >> _OWN_IDS == self._number

    def _process(self, item: JsonObject) -> None:
        """Process an item of another copy.  One of a later version may be unknown here."""
        for name, process in _PROCESSES.items():
            if name in item:
                process(self, item)
                return

    def _hear_message(self, item: JsonObject) -> None:
        self.server_session.hear(decode(item["message"].encode(), self._run.limits))

    def _hear_garbled(self, item: JsonObject) -> None:
        self.server_session.hear(InvalidMessage(item["garbled"], None, item["answers"], True))

    def _hear_state(self, item: JsonObject) -> None:
        protocol = self.server_session.session
        assert protocol.terms is not None  # a copy has terms
        protocol.opened, protocol.terms = item["opened"], attrs.evolve(protocol.terms, log_level=item["level"])
        self._shared_state = self._state

    def _hear_watch(self, item: JsonObject) -> None:
        if self.speaks:
            self._subscribe(item["watch"], item["uri"])

    def _hear_speaker(self, item: JsonObject) -> None:
        self._announced = self._position
        if self.speaks:
            self._yield(item["speaker"], item["resumes"])

    def _hear_yielded(self, item: JsonObject) -> None:
        if item["yielded"] == self._number:
            self._say(item["waiting"])
            self._yielded.set()

    def _hear_say(self, item: JsonObject) -> None:
        if self.speaks:
            self._say([item["say"]])

    def _hear_silence(self, item: JsonObject) -> None:
        if self._newest is not None and not self.speaks:
            self._later(self._speak_again, item.get("waiting", ()))

    # Its streams.

    def follow(self) -> FollowedStream:
        """Make a stream for a client that resumes one of another replica."""
        stream = FollowedStream(self, ResponseMode(Answer.STREAM, self._revision), self._shared)
        self._response_streams.add(stream)
        return stream

    # Its speaker.

    def _queue(self, message: OutgoingMessage, size: int) -> int:
        if self.speaks:
            return super()._queue(message, size)
        if not self._outbox_is_full:
            self._outbox.append({"say": encode(message).decode()})
            self._later(self.settle)  # in order
        return 0

    def _say(self, texts: Sequence[str]) -> None:
        """Queue messages of another copy."""
        for text in texts:
            message = decode(text.encode(), self._run.limits)
            if isinstance(message, Request | Notification):
                super()._queue(message, 0)
        self.pull()

    def _subscribe(self, method: str, uri: str) -> None:
        try:
            self._run.publisher.subscribe(self.server_session, Request(0, method, {"uri": uri}))
        except RequestError as error:
            _log.warning("a subscription of another replica was refused here: %s", error)

    async def watch(self, request: Request) -> JsonObject:
        """Serve a request to subscribe or unsubscribe."""
        uri, most = request.params.get("uri"), self._run.limits.listener_changes
        if self.speaks or not isinstance(uri, str):
            self._run.publisher.subscribe(self.server_session, request)  # it also checks the params
        try:
            await self._change(lambda record: record.watching(request.method, str(uri), most))
            await self._post({"watch": request.method, "uri": uri})
        except (StoreFailed, StoreFull) as error:
            raise RequestError(INTERNAL_ERROR, text_for_clients(error)) from error
        return {}

    async def speak(self, resumes: str | None = None) -> None:
        """Become the speaker, because a standalone stream is about to open here.  Raises `StoreFailed`.

        With the name of a standalone stream that is resumed here, wait until its events are in the store.
        """
        async with self._speaking:
            if resumes is not None:
                self._retire_standalone(None)
            if not self.speaks:
                await self._become_speaker(resumes)
        if resumes is not None and isinstance(self.log, SharedEventLog):
            await self._quickly(self.log.all_written())

    async def _become_speaker(self, resumes: str | None) -> None:
        """Become the speaker, unless another copy does at the same time: the mail decides, by its order."""
        number, replica = self._number, self._replica.name
        self._yielded = trio.Event()
        before, _ = await self._change(lambda record: attrs.evolve(record, speaker=number, speaks_in=replica))
        announced = await self._post({"speaker": number, "resumes": resumes})
        await self.hear_mail()
        row = await self._quickly(self._store.get(self._endpoint.kind, self.key))  # with all subscriptions up to now
        terms = self.server_session.session.terms
        if row is None or self._over or terms is None:
            raise SessionEnded(ENDED)
        if self._announced > announced:
            return
        self.speaks = True
        self._run.join(self.server_session, self.server_session.session.declared(terms.revision))
        for uri in SessionRecord.from_text(row.body).uris:
            self._subscribe("resources/subscribe", uri)
        if resumes is None:
            self._later(self._take_over, before)
        else:
            await self._take_over(before)

    async def _speak_again(self, waiting: Sequence[str]) -> None:
        await self.speak()
        self._say(waiting)

    async def _take_over(self, before: SessionRecord) -> None:
        """Get the messages that wait at the last speaker; if it has gone, tell the client of every change."""
        elsewhere = before.speaks_in != self._replica.name
        if elsewhere and await self._quickly(self._replica.alive(before.speaks_in)):
            with trio.move_on_after(_HANDOVER):
                await self._yielded.wait()
                return
        if self.speaks:
            self._run.publisher.tell_all(self.server_session)

    def _yield(self, number: int, resumes: str | None) -> None:
        """Another copy speaks from now on."""
        self.speaks = False
        self._run.leave(self.server_session)
        self._retire_standalone(resumes)
        waiting = [encode(each).decode() for each in self._pending.values()]
        self.server_session.account.give(sum(map(charged, self._pending.values())))
        self._pending.clear()
        self._later(self._hand_over, number, waiting)

    async def _hand_over(self, number: int, waiting: Sequence[str]) -> None:
        if isinstance(self.log, SharedEventLog):
            await self.log.all_written()
        await self._post({"yielded": number, "waiting": waiting})

    def _retire_standalone(self, resumes: str | None) -> None:
        """End the standalone streams that are resumed elsewhere, and those whose clients have gone."""
        for stream in tuple(self._standalone):
            if stream.attached and (resumes is None or stream.name != resumes):
                continue
            if stream.name is not None and isinstance(self.log, SharedEventLog):
                self.log.move(stream.name)
            stream.cut()
            stream.finish()

    def detached(self, stream: ResponseStream, retry: float | None = None) -> None:
        super().detached(stream, retry)
        if stream.session_id is not None and self._number:
            self._later(self.delete)  # its client did not read the response with the session id
        elif self.speaks and self._number and stream in self._standalone and self._newest is None:
            self._later(self._post, {"silent": True})


# The members by which the items of the mail are known.
_PROCESSES: Mapping[str, Callable[[SharedSession, JsonObject], None]] = {
    "message": SharedSession._hear_message,
    "garbled": SharedSession._hear_garbled,
    "opened": SharedSession._hear_state,
    "watch": SharedSession._hear_watch,
    "speaker": SharedSession._hear_speaker,
    "yielded": SharedSession._hear_yielded,
    "say": SharedSession._hear_say,
    "silent": SharedSession._hear_silence,
}
