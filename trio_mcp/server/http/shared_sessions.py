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

One copy is the *speaker*: at first the one that was initialized, and then the one that the last `speaker` item in the
mail names.  It alone listens to changes for the session, so each message goes out once (http-39).  Messages of other
copies that belong to no request are mailed to the speaker.  A speaker that hears of another one sends it the messages
that still wait, and stops.  If it has died, the new speaker tells its client of every change that the session listens
to.  A copy that has no room for the subscriptions of the session does not speak, and its client is told so.  If no copy
speaks, those with a stream try to; each tries again a while after it has failed.

- Ids of questions differ between copies: they begin with the number of the copy.
- Before a copy has heard of `notifications/initialized`, it reads its mail before each request.
- If mail was dropped, because too much of it waited, the questions of a copy fail, because their answers may be lost,
  and it asks for its place as the speaker again.
- When a replica dies, its calls are lost.  A client that resumes the stream of such a call gets an error for each.
- A message of a client that concerns another copy is accepted when the mail has it, because this process may end.
- The store away: requests in a copy that needs nothing from it go on; all others get 503 within a second, and messages
  without a reply within `_HELD` seconds.  Those are still mailed when the store is back, because few clients send them
  twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs
import trio

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_PARAMS, RequestError
from trio_mcp.core.http.server_rules import Answer
from trio_mcp.core.messages import Batch, InvalidMessage, JsonObject, Message, Notification, Request, decode, encode
from trio_mcp.core.requests import charged
from trio_mcp.core.revisions import REVISIONS, Terms
from trio_mcp.server.http.responses import OutgoingMessage, ResponseMode, ResponseStream
from trio_mcp.server.http.sessions import HttpSession
from trio_mcp.server.http.shared_mail import SessionMail
from trio_mcp.server.http.shared_row import ENDED, SessionRecord, SessionRow, key_of
from trio_mcp.server.http.shared_streams import FollowedStream, LoggedStream, SharedEventLog
from trio_mcp.server.replicas import QUICKLY, CannotContinue, text_for_clients
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

_HANDOVER: Final = 1.0  # seconds for the messages that wait at a speaker to reach its successor
# Seconds that a message without a reply waits for the store: some clients end their session if one is refused.
_HELD: Final = 5.0
_AGAIN: Final = 1.0  # seconds until a store that failed is tried again
_SUBSCRIBE: Final = "resources/subscribe"
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
        owner = "" if account.holder is None else str(account.holder)
        self.row = SessionRow(replica, endpoint.kind, self.key, owner, run.limits.session_idle_seconds, self._end_here)
        self.mail = SessionMail(
            replica, self.key, endpoint.mail_of(self.key), run.limits, owner,
            process=self._process, lost=self._mail_lost, ended=self._end_here,
        )  # fmt: skip
        self._sorted: list[JsonObject] = []  # the items of the message in hand for other copies
        self._sets_state = False  # the message in hand may change the state
        self._lost = False  # mail was lost, and too much waits to look again
        self._active = True  # a request has come since the row was renewed
        self._speaking = trio.Lock()
        self._silent = False  # no copy speaks, as far as this one knows
        self._speaks_from = -inf  # a time before which this copy does not try again to speak
        self._silences: list[
            Sequence[str]
        ] = []  # while a task gives up the place of the speaker: the messages that waited, each time
        self._to_say: list[str] | None = None  # while a task waits to speak: messages of copies that have stopped
        self._yielded = trio.Event()  # the speaker before this one has sent its messages
        self._asked = 0  # subscriptions that the speaker was asked for
        self._verdicts: dict[int, trio.MemorySendChannel[Sequence[Any] | None]] = {}  # those that wait
        self._over_everywhere = False

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
            raise CannotContinue(ENDED if self._over_everywhere else "the session has ended in this process; try again")
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
            opened=protocol.opened, level=terms.log_level, speaks_in=self._replica.name,
        )  # fmt: skip
        try:
            await self.row.create(record, self._endpoint.add)
        except (StoreFailed, StoreFull):
            self._over_everywhere = True
            with suppress(StoreFailed):  # it expires
                await self.mail.discard()
            raise
        self._endpoint.copies[self.key] = self

    async def join(self) -> None:
        """Become a copy of this session.  Raises `StoreFailed` and `StoreFull`."""
        self.speaks = False
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
        self._endpoint.copies[self.key] = self

    async def keep(self) -> None:
        """Renew the row, if the client is here, and read the mail, if a call would wait for a message that was lost."""
        if self._lost:
            self._lost = not self.mail.later(self._look_again)
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
        self._over_everywhere = True
        await self._replica.quickly(self._replica.send(None, "session", key=self.key, ended=True))
        await self.mail.discard()

    def _end_here(self) -> None:
        """The session has ended in another replica."""
        self._over_everywhere = True
        self._sessions.end(self.id, ENDED)

    def _finish(self, end: Callable[[ResponseStream], object]) -> None:
        if self._endpoint.copies.get(self.key) is self:
            del self._endpoint.copies[self.key]
        self.mail.close()
        if self.speaks and self.mail.number and not self._over_everywhere:
            self._give_up_place([encode(each).decode() for each in self._pending.values()])
        super()._finish(end)

    def _later(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
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
        """Process an item.  One of a later version may be unknown here."""
        ours = item.get("from") == self.mail.number
        for name, (process, of_all) in _PROCESSES.items():
            if name in item and (of_all or not ours):
                process(self, item)
                return

    def _mail_lost(self) -> None:
        """Items were dropped before this copy has read them: perhaps answers, the state, or a new speaker."""
        self.server_session.answers_lost()
        self._lost = not self.mail.later(self._look_again)

    async def _look_again(self) -> None:
        record = await self.row.read()
        self._set_state(record.opened, record.level)
        if self.speaks:
            self._stop_speaking()
            self._silent = True
            # Without a stream it speaks again if the row names this replica, because no other copy would do.
            if self._newest is not None or record.speaks_in == self._replica.name:
                self._seek_to_speak()

    def _hear_message(self, item: JsonObject) -> None:
        self.server_session.hear(decode(item["message"].encode(), self._run.limits))

    def _hear_garbled(self, item: JsonObject) -> None:
        self.server_session.hear(InvalidMessage(item["garbled"], None, item["answers"], True))

    def _hear_state(self, item: JsonObject) -> None:
        self._set_state(item["opened"], item["level"])

    def _set_state(self, opened: bool, level: str | None) -> None:
        protocol = self.server_session.session
        assert protocol.terms is not None  # a copy has terms
        protocol.opened = protocol.opened or opened
        protocol.terms = attrs.evolve(protocol.terms, log_level=level)

    def _hear_speaker(self, item: JsonObject) -> None:
        self._silent = False
        if item["from"] != self.mail.number:
            if self.speaks:
                self._yield(item["from"], item["resumes"])
        elif self._speaking.locked() and not self.speaks and not self._over:  # else its client was told that it failed
            self.speaks = True
            self._run.join(self.server_session, self.server_session.session.declared(self._revision))

    def _hear_yielded(self, item: JsonObject) -> None:
        if item["yielded"] == self.mail.number:
            self._say(item["waiting"])
            self._yielded.set()

    def _hear_say(self, item: JsonObject) -> None:
        if self.speaks:
            self._say([item["say"]])

    def _hear_silence(self, item: JsonObject) -> None:
        """No copy speaks."""
        self._silent = not self.speaks
        if self._newest is not None and not self.speaks and not self._over:
            self._seek_to_speak(item.get("waiting", ()))

    def _seek_to_speak(self, waiting: Sequence[str] = ()) -> None:
        if self._to_say is None:
            self._to_say = []
            self._later(self._speak_again)
        self._to_say += waiting

    def _hear_watch(self, item: JsonObject) -> None:
        if not self.speaks:
            return
        refused = self._subscribe(item["watch"], item["uri"])
        verdict = {"watched": item["asked"], "by": item["from"], "refused": refused}
        if item["from"] == self.mail.number:
            self._hear_verdict(verdict)
        else:
            self.mail.put(verdict)

    def _hear_verdict(self, item: JsonObject) -> None:
        if item["by"] == self.mail.number and (asks := self._verdicts.get(item["watched"])) is not None:
            with suppress(trio.WouldBlock):  # another speaker has answered before
                asks.send_nowait(item["refused"])

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
        self.mail.put({"say": encode(message).decode()})
        return 0

    def _say(self, texts: Sequence[str]) -> None:
        """Queue messages of another copy, or mail them on, if this one does not speak any more."""
        for text in texts:
            message = decode(text.encode(), self._run.limits)
            if isinstance(message, Request | Notification):
                self._queue(message, 0)
        self.pull()

    def _subscribe(self, method: str, uri: str) -> tuple[int, str] | None:
        """Subscribe or unsubscribe here.  Returns the code and the reason of a refusal."""
        try:
            self._run.publisher.subscribe(self.server_session, Request(0, method, {"uri": uri}))
        except RequestError as error:
            return error.code, error.message
        return None

    async def watch(self, request: Request) -> JsonObject:
        """Serve a request to subscribe or unsubscribe.

        The row has the subscription before the speaker hears of it.  So a speaker that comes later has it, too.
        """
        method, uri, most = request.method, request.params.get("uri"), self._run.limits.listener_changes
        if not isinstance(uri, str):
            raise RequestError(INVALID_PARAMS, f"uri must be a string; got {type(uri).__name__}")
        self._asked += 1
        asked = self._asked
        self._verdicts[asked], verdict = trio.open_memory_channel[Sequence[Any] | None](1)
        try:
            watches = method == _SUBSCRIBE
            before = await self.row.change(lambda r: r.watching(uri, most) if watches else r.without(uri))
            await self.mail.post({"watch": method, "uri": uri, "asked": asked})
            refused = await self._read_verdict(verdict, before.speaks_in) if watches else None
            if refused is not None:
                if uri not in before.uris:  # else an earlier request was accepted
                    await self.row.change(lambda record: record.without(uri))
                raise refused
        except (StoreFailed, StoreFull) as error:
            raise RequestError(INTERNAL_ERROR, text_for_clients(error)) from error
        finally:
            del self._verdicts[asked]
        return {}

    async def _read_verdict(
        self, verdict: trio.MemoryReceiveChannel[Sequence[Any] | None], speaks_in: str
    ) -> RequestError | None:
        """Wait until the speaker has subscribed, and return its refusal.  If it has gone, this copy takes its place.

        So each subscription has had a place somewhere before it is accepted.
        """
        with trio.move_on_after(QUICKLY):
            refused = await verdict.receive()
            return None if refused is None else RequestError(*refused)
        if await self._replica.quickly(self._replica.alive(speaks_in)):
            return RequestError(INTERNAL_ERROR, "the process that tells of changes is busy; try again later")
        try:
            await self.speak()
        except CannotContinue as error:
            return RequestError(INTERNAL_ERROR, str(error))
        if self._newest is None:
            self.mail.put({"silent": True})
        return None

    async def speak(self, resumes: str | None = None) -> None:
        """Become the speaker, because a standalone stream is about to open here.  Raises `StoreFailed`.

        With the name of a standalone stream that is resumed here, wait until its events are in the store.
        """
        async with self._speaking:
            if resumes is not None:
                self._retire_standalone(None)
            if not self.speaks:
                try:
                    await self._become_speaker(resumes)
                except BaseException as error:
                    # Without all subscriptions it must not speak, also if this request is cancelled.  A copy with a
                    # stream may speak.
                    self._stop_speaking()
                    pause = error.seconds if isinstance(error, CannotContinue) else _AGAIN
                    self._speaks_from = trio.current_time() + pause
                    self._give_up_place(self._take_pending())
                    raise
        if resumes is not None and isinstance(self.log, SharedEventLog):
            await self._replica.quickly(self.log.all_written())

    async def _become_speaker(self, resumes: str | None) -> None:
        """Become the speaker, unless another copy does at the same time: the mail decides, by its order."""
        self._yielded, began = trio.Event(), trio.current_time()
        before = await self.row.change(lambda record: attrs.evolve(record, speaks_in=self._replica.name))
        await self.mail.post({"speaker": True, "resumes": resumes})
        await self.mail.read()
        if not self.speaks:
            return
        record = await self.row.read()  # with all subscriptions up to now
        if self._over:
            raise CannotContinue(ENDED)
        for uri in record.uris:
            if self.speaks and (refused := self._subscribe(_SUBSCRIBE, uri)) is not None:
                raise CannotContinue(refused[1], seconds=30)
        self._run.publisher.tell(self.server_session, self._replica.changes_since(began))
        if resumes is None:
            self._later(self._take_over, before)
        else:
            await self._take_over(before)

    async def _speak_again(self) -> None:
        """Speak, because no copy does."""
        await trio.sleep_until(self._speaks_from)  # two copies without room would ask each other without a pause
        waiting, self._to_say = self._to_say or (), None
        try:
            if self._silent:
                await self.speak()
        finally:
            self._say(waiting)

    async def _take_over(self, before: SessionRecord) -> None:
        """Get the messages that wait at the last speaker; if it has gone, tell the client of every change."""
        elsewhere = before.speaks_in != self._replica.name
        if elsewhere and await self._replica.quickly(self._replica.alive(before.speaks_in)):
            with trio.move_on_after(_HANDOVER):
                await self._yielded.wait()
                return
        if self.speaks:
            self._run.publisher.tell(self.server_session)

    def _yield(self, number: int, resumes: str | None) -> None:
        """Another copy speaks from now on."""
        self._run.publisher.tell_queued(self.server_session)
        self._stop_speaking()
        self._retire_standalone(resumes)
        self._later(self._hand_over, number, self._take_pending())

    def _take_pending(self) -> Sequence[str]:
        """Remove the messages that wait for a stream, and return them for another copy."""
        waiting = [encode(each).decode() for each in self._pending.values()]
        self.server_session.account.give(sum(map(charged, self._pending.values())))
        self._pending.clear()
        return waiting

    async def _hand_over(self, number: int, waiting: Sequence[str]) -> None:
        if isinstance(self.log, SharedEventLog):
            await self.log.all_written()
        self.mail.put({"yielded": number, "waiting": waiting})

    def _stop_speaking(self) -> None:
        self.speaks = False
        self._run.leave(self.server_session)

    def _give_up_place(self, waiting: Sequence[str]) -> None:
        """This copy does not speak any more: one with a stream may speak, and gets the messages that wait here."""
        if not self._silences:
            self._later(self._resign)
        self._silences.append(waiting)

    async def _resign(self) -> None:
        with trio.move_on_after(self._run.limits.session_idle_seconds):  # then the row has expired
            while self._silences and not self._over_everywhere:
                with suppress(StoreFailed, StoreFull):  # `Replica` logs that the store is away
                    await self.row.name_no_speaker()
                    silences = tuple(self._silences)
                    await self.mail.post({"silent": True, "waiting": [text for each in silences for text in each]})
                    del self._silences[: len(silences)]
                    continue
                await trio.sleep(_AGAIN)

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
        if stream.session_id is not None and self.mail.number:
            self._later(self.delete)  # its client did not read the response with the session id
        elif self.speaks and self.mail.number and stream in self._standalone and self._newest is None:
            self.mail.put({"silent": True})


# The members by which the items of the mail are known, and whether a copy processes its own ones.
_PROCESSES: Mapping[str, tuple[Callable[[SharedSession, JsonObject], None], bool]] = {
    "message": (SharedSession._hear_message, False),
    "garbled": (SharedSession._hear_garbled, False),
    "opened": (SharedSession._hear_state, False),
    "watch": (SharedSession._hear_watch, True),
    "watched": (SharedSession._hear_verdict, False),
    "speaker": (SharedSession._hear_speaker, True),
    "yielded": (SharedSession._hear_yielded, False),
    "say": (SharedSession._hear_say, False),
    "silent": (SharedSession._hear_silence, True),
}
