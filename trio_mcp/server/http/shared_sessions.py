"""Sessions that continue in any replica, for the clients of the legacy revisions.

A session is a row of the store (`SessionRecord`), and each replica that its requests come to has a copy of it, a
`SharedSession`.  A request is served where it arrives; a handler, its stream and its questions stay in that replica.
Facts for the other copies are items in the mail of the session (`shared_mail`), which each copy processes in order.

| Arrives | Where | Effect |
|---|---|---|
| `initialize` | any replica | the row, a copy; the answer goes out when the row is written |
| a request of a session without a copy here | any replica | a copy is made from the row; no row: 404 |
| `notifications/initialized`, `logging/setLevel` | any copy | the row and the mail; then the answer |
| `resources/subscribe` | any copy | the row and the mail; the speaker subscribes, or refuses; then the answer |
| a cancellation of a request that another copy serves | any copy | the mail; the copy that serves it cancels |
| an answer to a question that another copy asked | any copy | the mail; that copy has its answer |
| GET | any copy | that copy becomes the speaker |
| GET with Last-Event-ID, of a call | any copy | a `FollowedStream` of the stream in the store |
| GET with Last-Event-ID, of a standalone stream | any copy | the missed events, from the store; the copy speaks |
| DELETE | any copy | the row and the mail are deleted; all copies end |
| the client is absent here | a copy | the copy ends, if no handler runs; the row expires when no copy has renewed it |

One copy is the speaker (`shared_speaker`): it alone sends the messages that belong to no request.

- Ids of questions differ between copies: they begin with the number of the copy.
- Before a copy has heard of `notifications/initialized`, it reads its mail before each request.
- If mail was dropped, because too much of it waited, the questions of a copy fail: their answers may be lost.
- When a replica dies, its calls are lost.  A client that resumes the stream of such a call gets an error for each.
- A message of a client that concerns another copy is accepted when the mail has it, because this process may end.
- The store away: requests in a copy that needs nothing from it go on; all others get 503 within a second, and messages
  without a reply within `_HELD` seconds.  Those are still mailed when the store is back, because few clients send them
  twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs
import trio

from trio_mcp.core.http.server_rules import Answer
from trio_mcp.core.messages import Batch, InvalidMessage, JsonObject, Message, Notification, Request, decode, encode
from trio_mcp.core.requests import charged
from trio_mcp.core.revisions import REVISIONS, Terms
from trio_mcp.server.http.responses import OutgoingMessage, ResponseMode, ResponseStream
from trio_mcp.server.http.sessions import HttpSession
from trio_mcp.server.http.shared_mail import SessionMail
from trio_mcp.server.http.shared_row import ENDED, SessionRecord, SessionRow, key_of
from trio_mcp.server.http.shared_speaker import Speaker
from trio_mcp.server.http.shared_streams import FollowedStream, LoggedStream, SharedEventLog
from trio_mcp.server.replicas import CannotContinue
from trio_mcp.server.session import ServerSession
from trio_mcp.stores.rows import StoreFailed, StoreFull

if TYPE_CHECKING:
    from trio_mcp.core.http.event_log import EventLog
    from trio_mcp.core.shares import Account
    from trio_mcp.server.http.responses import EndpointStreams
    from trio_mcp.server.http.sessions import Sessions
    from trio_mcp.server.http.shared_endpoint import SharedEndpoint
    from trio_mcp.server.run import Run

__all__ = ["SharedServerSession", "SharedSession"]

# Seconds that a message without a reply waits for the store: some clients end their session if one is refused.
_HELD: Final = 5.0
_OF_STATE: Final = frozenset({"notifications/initialized", "logging/setLevel"})


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
        return await self.owner.speaker.watch(request)

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
        self.server_session: SharedServerSession
        self.server_session.owner = self
        self.server_session.name = self.key
        self._endpoint = endpoint
        self._run = run
        self._replica = replica
        owner = "" if account.holder is None else str(account.holder)
        self.row = SessionRow(replica, endpoint.kind, self.key, owner, run.limits.session_idle_seconds, self._end_here)
        self.mail = SessionMail(
            replica, self.key, endpoint.mail_of(self.key), run.limits, owner,
            process=self._process, lost=self._mail_lost, ended=self._end_here,
        )  # fmt: skip
        self.speaker = Speaker(self, run, replica)
        self._sorted: list[JsonObject] = []  # the items of the message in hand for other copies
        self._sets_state = False  # the message in hand may change the state
        self._lost = False  # mail was lost, and too much waits to look again
        self._active = True  # a request has come since the row was renewed
        self.over_everywhere = False
        """Whether the session has ended in all replicas, as far as this copy knows."""

    # Its row.

    @property
    def ready(self) -> bool:
        """Whether this copy knows that the client has sent `notifications/initialized`."""
        return self.server_session.session.opened

    async def settle(self, seconds: float = _HELD) -> None:
        """Tell the other copies of the changes that a message has made.  Raises `StoreFailed` and `StoreFull`.

        The message is accepted when the store has them, because this process may end.  If that takes too long, they are
        still written later, and the client may send the message again.
        """
        items, self._sorted = self._sorted, []
        sets_state, self._sets_state = self._sets_state, False
        if self.server_session.session.terms is not None and not self.mail.number:
            await self._create()
        if not (items or sets_state):
            return
        fits = all(self.mail.put(item) for item in items) and (not sets_state or self.mail.later(self._write_state))
        if fits and await self.mail.written(seconds):
            return
        if self._over:
            raise CannotContinue(ENDED if self.over_everywhere else "the session has ended in this process; try again")
        if not fits:
            raise StoreFailed("too many messages of one session wait for the store of the replicas")
        raise StoreFailed(f"the store of the replicas has not taken a message for {seconds:g} s")

    async def _write_state(self) -> None:
        """Write the present state into the row, and mail it."""
        protocol = self.server_session.session
        assert protocol.terms is not None  # the session is open
        opened, level = protocol.opened, protocol.terms.log_level
        await self.row.change(lambda record: attrs.evolve(record, opened=opened or record.opened, level=level))
        await self.mail.post({"opened": opened, "level": level})

    async def _create(self) -> None:
        """Write the row of a new session."""
        protocol = self.server_session.session
        terms = protocol.terms
        assert terms is not None  # `initialize` was served
        await self.mail.join()
        protocol.count_from(self.mail.first_id)
        identity = None if terms.identity is None else dict(terms.identity)
        record = SessionRecord(
            terms.revision.name, dict(terms.capabilities), identity, self._principal,
            opened=protocol.opened, level=terms.log_level, speaks_in=self.speaker.name,
        )  # fmt: skip
        try:
            await self.row.create(record, self._endpoint.add)
        except (StoreFailed, StoreFull):
            self.over_everywhere = True
            with suppress(StoreFailed):  # it expires
                await self.mail.discard()
            raise
        self._endpoint.copies[self.key] = self

    async def join(self) -> None:
        """Become a copy of this session.  Raises `StoreFailed` and `StoreFull`."""
        await self.mail.join()
        try:
            record = await self.row.read()
        except CannotContinue:
            await self.mail.discard()
            raise
        protocol = self.server_session.session
        revision = REVISIONS[record.revision]
        protocol.terms = Terms(revision, record.capabilities, record.identity, record.level)
        protocol.opened = record.opened
        protocol.count_from(self.mail.first_id)
        self.speaker.learn(record)
        self._endpoint.copies[self.key] = self

    async def keep(self) -> None:
        """Renew the row, if the client is here, and read the mail, if a call would wait for a message that was lost."""
        if self._lost:
            self._lost = not self.mail.later(self._look_again)
        await self.speaker.keep()
        if self.server_session.awaits_answers:
            await self.mail.read()
        if not self.row.due:
            return
        if isinstance(self.log, SharedEventLog):
            self.log.refresh()
        if await self.row.renew(self._active or super().present):
            self._active = False
            await self.mail.post({"kept": True})  # the mail stays as long as the row

    @property
    def present(self) -> bool:
        """As `HttpSession.present`.  While a handler runs, the client may also be present in another replica."""
        return super().present or (self.server_session.at_work and not self.row.expired)

    async def delete(self) -> None:
        """End the session in all replicas."""
        await self.row.delete()
        self.over_everywhere = True
        await self._replica.quickly(self._replica.send(None, "session", key=self.key, ended=True))
        await self.mail.discard()

    def _end_here(self) -> None:
        """The session has ended in another replica."""
        self.over_everywhere = True
        self._sessions.end(self.id, ENDED)

    def _finish(self, end: Callable[[ResponseStream], object]) -> None:
        if self._endpoint.copies.get(self.key) is self:
            del self._endpoint.copies[self.key]
        self.mail.close()
        if self.speaker.here and self.mail.number and not self.over_everywhere:
            self.speaker.give_up()
        super()._finish(end)

    def later(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Call a function that needs the store, in a task of its own."""

        async def call() -> None:
            try:
                await function(*args)
            except (StoreFailed, StoreFull) as error:
                self.mail.log(error)

        self._replica.start_soon(call, name="a session in several replicas")

    # Its mail.

    def hear(self, message: JsonObject) -> None:
        """A message of another replica about this session has come."""
        if message.get("ended"):
            self._end_here()
        else:
            self.mail.advance(message["number"], message["item"])

    def sort(self, message: Message) -> None:
        """Set aside the parts of a message from the client that concern other copies; `settle` mails them."""
        self._active = True
        for each in message.items if isinstance(message, Batch) else (message,):
            if isinstance(each, Request | Notification) and each.method in _OF_STATE:
                self._sets_state = True
            if (item := self.mail.item_of(each, self.server_session.session.serves)) is not None:
                self._sorted.append(item)

    def _process(self, item: JsonObject) -> None:
        """Process an item."""
        for name, process in _PROCESSES.items():
            if name in item:
                if item["from"] != self.mail.number:
                    process(self, item)
                return
        self.speaker.hear(item)

    def _mail_lost(self) -> None:
        """Items were dropped before this copy has read them: perhaps answers, the state, or a new speaker."""
        self.server_session.answers_lost()
        self._lost = not self.mail.later(self._look_again)

    async def _look_again(self) -> None:
        record = await self.speaker.look_again()
        self._set_state(record.opened, record.level)

    def _hear_message(self, item: JsonObject) -> None:
        self.server_session.hear(decode(item["message"].encode(), self._run.limits))

    def _hear_garbled(self, item: JsonObject) -> None:
        self.server_session.hear(InvalidMessage(item["garbled"], None, item["answers"], True))

    def _hear_state(self, item: JsonObject) -> None:
        self._set_state(item["opened"], item["level"])

    def _set_state(self, opened: bool, level: str | None) -> None:
        protocol = self.server_session.session
        assert protocol.terms is not None  # a copy has terms
        if opened and not protocol.opened:
            protocol.opened = True
            self.server_session.tell_early_changes()
        protocol.terms = attrs.evolve(protocol.terms, log_level=level)

    # Its streams.

    def follow(self) -> FollowedStream:
        """Make a stream for a client that resumes one of another replica."""
        stream = FollowedStream(self, ResponseMode(Answer.STREAM, self._revision), self._shared)
        self._response_streams.add(stream)
        return stream

    @property
    def over(self) -> bool:
        """Whether it has ended here."""
        return self._over

    @property
    def has_stream(self) -> bool:
        """Whether its client reads a standalone stream here."""
        return self._newest is not None

    def _queue(self, message: OutgoingMessage, size: int) -> int:
        if self.speaker.here:
            return super()._queue(message, size)
        self.mail.put({"say": encode(message).decode()})
        return 0

    def put(self, message: OutgoingMessage) -> None:
        """Send a message of another copy, or mail it on."""
        self._queue(message, 0)

    def take_pending(self) -> Sequence[str]:
        """Remove the messages that wait for a stream, and return them for another copy."""
        waiting = [encode(each).decode() for each in self._pending.values()]
        self.server_session.account.give(sum(map(charged, self._pending.values())))
        self._pending.clear()
        return waiting

    def retire_standalone(self, resumes: str | None) -> None:
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
        if stream.session_id is not None and self.mail.number:
            self.later(self.delete)  # its client did not read the response with the session id
        elif self.mail.number and stream in self._standalone:
            self.speaker.offer()


# The members by which the items of other copies are known.
_PROCESSES: Mapping[str, Callable[[SharedSession, JsonObject], None]] = {
    "message": SharedSession._hear_message,
    "garbled": SharedSession._hear_garbled,
    "opened": SharedSession._hear_state,
}
