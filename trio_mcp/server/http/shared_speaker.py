"""The speaker of a session: the copy that tells the client of changes, and sends messages that belong to no request.

Only the speaker listens to changes for the session, so each message goes out once (http-39).  At first it is the copy
that was initialized, then one that the mail names, because the mail has one order for all copies.  Each copy has a
`Speaker`, whose `place` follows from the mail that this copy has read.  Two tables: places by `PlaceEvent`, and deeds.

| Event | `HERE` | `LEAVING` | `ELSEWHERE` | `OFFERED` | `NOWHERE` |
|---|---|---|---|---|---|
| `NAMED`: our `speaker` item, and a task waits for it | | HERE | HERE | HERE | HERE |
| `NAMED_LATE`: the same, but its task has failed | | | LEAVING | LEAVING | LEAVING |
| `REPLACED`: the `speaker` item of another copy | ELSEWHERE | ELSEWHERE | | ELSEWHERE | ELSEWHERE |
| `STOPPED`: a `silent` item of the speaker | NOWHERE | NOWHERE | NOWHERE | NOWHERE | |
| `NO_STREAM`: the same without `waiting`, because it goes on | | | OFFERED | | |
| `FAILED`: this copy cannot speak, or ends | LEAVING | | | | |
| `ROW_NAMES_US`: this copy has missed mail, and read the row | LEAVING | | LEAVING | LEAVING | LEAVING |
| `ROW_NAMES_OTHER`: the same | OFFERED | OFFERED | OFFERED | | OFFERED |
| `ROW_NAMES_NONE`: the same | NOWHERE | NOWHERE | NOWHERE | NOWHERE | |

| Then | `HERE` | `LEAVING` | `ELSEWHERE` | `OFFERED` | `NOWHERE` |
|---|---|---|---|---|---|
| A message (`say`) | is sent | waits | | | waits |
| A subscription (`watch`) | has its verdict | | | | |
| The client has a stream here | | | | speaks | speaks |
| Its last stream here has closed | posts `silent` | | | | |

- A copy listens to changes if and only if its place is HERE.  It then has all subscriptions of the row.
- The mail names this copy if and only if its place is HERE or LEAVING.  LEAVING ends, because a task posts `silent`,
  with all that waits here, until the store takes it.
- NOWHERE: each copy has the messages that have come since it joined, and the next speaker sends them.

A speaker that is replaced sends its successor the messages that still wait (`yielded`).  If it has died, the client is
told of every change that the session listens to.  A copy that has no room for the subscriptions does not speak, and its
client is told so.  A copy that has failed to speak tries again a while later, if it has a stream.

The row names the last copy that has tried to speak: it is written before the mail.  So a successor knows whether the
process of the last speaker lives, and a copy that has missed mail knows the speaker.  If several copies try at the same
time, or one fails, the row and the mail may name different copies.  So a `speaker` item tells its process, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_PARAMS, RequestError
from trio_mcp.core.messages import JsonObject, Notification, Request, decode
from trio_mcp.core.subscriptions import ChangeEvent, change_of
from trio_mcp.server.http.shared_row import ENDED, SessionRecord
from trio_mcp.server.http.shared_streams import SharedEventLog
from trio_mcp.server.replicas import QUICKLY, CannotContinue, text_for_clients
from trio_mcp.stores.rows import StoreFailed, StoreFull

if TYPE_CHECKING:
    from trio_mcp.server.http.shared_sessions import SharedSession
    from trio_mcp.server.replicas import Replica
    from trio_mcp.server.run import Run

__all__ = ["PlaceEvent", "Speaker", "SpeakerPlace"]

_HANDOVER: Final = 1.0  # seconds for the messages that wait at a speaker to reach its successor
_AGAIN: Final = 1.0  # seconds until a store that failed is tried again
_OPENING: Final = 5.0  # seconds from then on until a stream is open here, or will not be
_SUBSCRIBE: Final = "resources/subscribe"


class SpeakerPlace(Enum):
    """The place of the speaker, as far as one copy knows."""

    HERE = "this copy speaks"
    LEAVING = "the mail names this copy, but it does not speak; its `silent` item is on the way"
    ELSEWHERE = "another copy speaks"
    OFFERED = "another copy speaks, and one with a stream may take its place"
    NOWHERE = "no copy speaks"


PlaceEvent = Enum(
    "PlaceEvent",
    "NAMED NAMED_LATE REPLACED STOPPED NO_STREAM FAILED ROW_NAMES_US ROW_NAMES_OTHER ROW_NAMES_NONE",
)
_HERE, _LEAVING, _ELSEWHERE, _OFFERED, _NOWHERE = SpeakerPlace
_OURS: Final = (_HERE, _LEAVING)  # the mail names this copy
_NEXT: Final[Mapping[PlaceEvent, Mapping[SpeakerPlace, SpeakerPlace]]] = {
    PlaceEvent.NAMED: dict.fromkeys(SpeakerPlace, _HERE),
    PlaceEvent.NAMED_LATE: dict.fromkeys((_ELSEWHERE, _OFFERED, _NOWHERE), _LEAVING),
    PlaceEvent.REPLACED: dict.fromkeys(SpeakerPlace, _ELSEWHERE),
    PlaceEvent.STOPPED: dict.fromkeys(SpeakerPlace, _NOWHERE),
    PlaceEvent.NO_STREAM: {_ELSEWHERE: _OFFERED},
    PlaceEvent.FAILED: {_HERE: _LEAVING},
    PlaceEvent.ROW_NAMES_US: dict.fromkeys(SpeakerPlace, _LEAVING),
    PlaceEvent.ROW_NAMES_OTHER: dict.fromkeys(SpeakerPlace, _OFFERED),
    PlaceEvent.ROW_NAMES_NONE: dict.fromkeys(SpeakerPlace, _NOWHERE),
}
"""The next place.  A place that is left out stays."""


class Speaker:
    """The speaker of a session, as one copy knows it."""

    def __init__(self, session: SharedSession, run: Run, replica: Replica) -> None:
        self.place = _HERE
        self._session = session
        self._run = run
        self._replica = replica
        self._named = 0  # the number of the copy that the mail names; 0: none, or at first this one
        self._named_in = replica.name  # the replica of that copy; "" if there is none
        # LEAVING: the messages that go with our `silent` item.  NOWHERE: those that wait in each copy.
        self._waiting: Sequence[str] = ()
        self._changing = trio.Lock()  # held while the row and the mail are written
        self._wanted = False  # a task waits for our `speaker` item
        self._resigning = False  # a task is about to post our `silent` item
        self._seeking = False  # a task is about to speak, because no copy with a stream does
        self._speaks_from = -inf  # a time before which that task does not try again
        self._began = -inf  # when this copy last began to speak
        self._offered = True  # without a stream here, the others know that
        self._yielded = trio.Event()  # the speaker before this one has sent its messages
        self._asked = 0  # subscriptions that the speaker was asked for
        self._verdicts: dict[int, trio.MemorySendChannel[Sequence[Any] | None]] = {}  # those that wait

    # Its place.

    @property
    def here(self) -> bool:
        """Whether this copy speaks."""
        return self.place is _HERE

    @property
    def name(self) -> str:
        """The name of this copy in the row."""
        return f"{self._replica.name}.{self._session.mail.number}"

    def _move(self, event: PlaceEvent) -> Sequence[str]:
        """Change the place.  Returns messages that wait in this copy alone, for another one."""
        before, self.place = self.place, _NEXT[event].get(self.place, self.place)
        if self.place is before:
            return ()
        server_session = self._session.server_session
        waiting, self._waiting = self._waiting, ()
        if before is _HERE:
            self._run.leave(server_session)
            waiting = self._session.take_pending()
        if self.place is _HERE:
            self._offered = False
            self._run.join(server_session, server_session.session.declared(self._session.facts.revision))
            self.say(waiting)
        elif self.place is _LEAVING:
            self._waiting = waiting
            self._resign_soon()
        elif before is not _NOWHERE:
            return waiting
        return ()

    def learn(self, record: SessionRecord) -> None:
        """Learn from the row which copy speaks, because this one has not read all mail."""
        self._named_in, self._named = record.speaker
        names = {0: PlaceEvent.ROW_NAMES_NONE, self._session.mail.number: PlaceEvent.ROW_NAMES_US}
        self.say(self._move(names.get(self._named, PlaceEvent.ROW_NAMES_OTHER)))
        self._seek()

    async def look_again(self) -> SessionRecord:
        """Mail was lost: learn from the row, and return it.  Raises `StoreFailed`."""
        async with self._changing:
            record = await self._session.row.read()
            self.learn(record)
            return record

    # Its mail.

    def hear(self, item: JsonObject) -> None:
        """Process an item, also one of this copy.  One of a later version may be unknown here."""
        for name, process in _PROCESSES.items():
            if name in item:
                process(self, item)
                return

    def _hear_speaker(self, item: JsonObject) -> None:
        self._named, self._named_in = item["from"], item["speaker"]
        if self._named == self._session.mail.number:
            wanted = self._wanted and not self._session.over  # else its client was told that it failed
            self._move(PlaceEvent.NAMED if wanted else PlaceEvent.NAMED_LATE)
            return
        spoke, publisher, server_session = self.place in _OURS, self._run.publisher, self._session.server_session
        if self.here:  # of the changes that are untold, the other copy hears later
            publisher.tell(server_session, publisher.queued(server_session) - self._replica.untold)
        waiting = self._move(PlaceEvent.REPLACED)
        if spoke:
            self._session.retire_standalone(item["resumes"])
            self._session.later(self._hand_over, self._named, waiting)

    async def _hand_over(self, number: int, waiting: Sequence[str]) -> None:
        if isinstance(self._session.log, SharedEventLog):
            await self._session.log.all_written()
        self._session.mail.put({"yielded": number, "waiting": waiting})

    def _hear_yielded(self, item: JsonObject) -> None:
        if item["yielded"] == self._session.mail.number:
            # This copy tells of changes that were heard here since it began.
            told = self._replica.changes_since(self._began) if self.here else ()
            self.say(item["waiting"], told or ())
            self._yielded.set()

    def _hear_silent(self, item: JsonObject) -> None:
        waiting = item.get("waiting")
        if item["from"] == (self._named or self._session.mail.number):
            if waiting is None:
                self._move(PlaceEvent.NO_STREAM)
            else:
                self._named, self._named_in = 0, ""
                self.say(self._move(PlaceEvent.STOPPED))
        self._hear_messages(waiting or ())
        self._seek()

    def _hear_messages(self, texts: Sequence[str]) -> None:
        """Messages that all copies hear: the speaker sends them."""
        if self.here:
            self.say(texts)
        elif self.place in (_LEAVING, _NOWHERE):  # else another copy sends them
            limits, texts = self._run.limits, [*dict.fromkeys((*self._waiting, *texts))]
            sizes = itertools.accumulate(len(text.encode()) for text in texts)
            fits = [text for text, size in zip(texts, sizes, strict=True) if size <= limits.message_bytes]
            self._waiting = fits[: limits.outgoing + limits.listener_changes]

    def say(self, texts: Sequence[str], told: Collection[ChangeEvent] = ()) -> None:
        """Queue messages of another copy, or mail them on, if this one does not speak any more."""
        for text in texts:
            message = decode(text.encode(), self._run.limits)
            if isinstance(message, Request) or (isinstance(message, Notification) and change_of(message) not in told):
                self._session.put(message)
        self._session.pull()

    # Changes of its place that this copy makes.

    async def speak(self, resumes: str | None = None) -> None:
        """Become the speaker, because a standalone stream is about to open here.  Raises `StoreFailed`.

        With the name of a standalone stream that is resumed here, wait until its events are in the store.
        """
        async with self._changing:
            if resumes is not None:
                self._session.retire_standalone(None)
            if not self.here:
                self._wanted = True
                try:
                    await self._become_speaker(resumes)
                except BaseException as error:
                    # Without all subscriptions it must not speak, also if this request is cancelled.  A copy with a
                    # stream may speak.
                    pause = error.seconds if isinstance(error, CannotContinue) else _AGAIN
                    self._speaks_from = trio.current_time() + pause
                    self.give_up()
                    raise
                finally:
                    self._wanted = False
        if resumes is not None and isinstance(self._session.log, SharedEventLog):
            await self._replica.quickly(self._session.log.all_written())

    async def _become_speaker(self, resumes: str | None) -> None:
        """Become the speaker, unless another copy does at the same time: the mail decides, by its order."""
        session, publisher = self._session, self._run.publisher
        self._yielded, self._began = trio.Event(), trio.current_time()
        before = await session.row.change(lambda record: attrs.evolve(record, speaks_in=self.name))
        await session.mail.post({"speaker": self._replica.name, "resumes": resumes})
        await session.mail.read()
        record = await session.row.read()  # with all subscriptions up to now
        if session.over:
            raise CannotContinue(ENDED)
        for uri in record.uris:
            if self.here and (refused := self._subscribe(_SUBSCRIBE, uri)) is not None:
                raise CannotContinue(refused[1], seconds=30)
        if self.here:
            since = self._replica.changes_since(self._began)
            soon = publisher.queued(session.server_session)
            publisher.tell(session.server_session, None if since is None else {*since} - soon)
            if resumes is None:
                session.later(self._take_over, before)
            else:
                await self._take_over(before)

    async def _take_over(self, before: SessionRecord) -> None:
        """Get the messages that wait at the last speaker; if it has gone, tell the client of every change."""
        replica, number = before.speaker
        if number != self._session.mail.number and await self._replica.quickly(self._replica.alive(replica)):
            with trio.move_on_after(_HANDOVER):
                await self._yielded.wait()
                return
        if self.here:
            self._run.publisher.tell(self._session.server_session)

    def _seek(self) -> None:
        """Speak, if no other copy with a stream does."""
        if self._vacant and not self._seeking:
            self._seeking = True
            self._session.later(self._speak_again)

    @property
    def _vacant(self) -> bool:
        """Whether this copy may speak by itself."""
        return self.place in (_OFFERED, _NOWHERE) and self._session.has_stream and not self._session.over

    async def _speak_again(self) -> None:
        await trio.sleep_until(self._speaks_from)  # two copies without room would ask each other without a pause
        self._seeking = False
        if self._vacant:
            await self.speak()

    def offer(self) -> None:
        """Let a copy with a stream speak, if this one has none."""
        if self.here and not self._session.has_stream:
            self._offered = self._session.mail.put({"silent": True})

    async def keep(self) -> None:
        """Called every few seconds, for what no mail tells.  Raises `StoreFailed`.

        The client of a GET may have gone before its stream was open, and the process of the speaker may have died.
        """
        self._seek()
        if not self._offered and trio.current_time() > self._began + _OPENING:
            self.offer()
        waits = self.place is _ELSEWHERE and self._session.has_stream
        if waits and not await self._replica.quickly(self._replica.alive(self._named_in)):
            await self.look_again()

    def give_up(self) -> None:
        """This copy does not speak: one with a stream may, and gets the messages that wait here."""
        self._move(PlaceEvent.FAILED)
        self._resign_soon()

    def _resign_soon(self) -> None:
        if not self._resigning:
            self._resigning = True
            self._session.later(self._resign)

    async def _resign(self) -> None:
        """Say in the row and in the mail that this copy does not speak, unless it does by then."""
        session = self._session
        with trio.move_on_after(self._run.limits.session_idle_seconds):  # then the row has expired
            while not (self.here or session.over_everywhere):
                with suppress(StoreFailed, StoreFull):  # `Replica` logs that the store is away
                    async with self._changing:
                        await self._post_silent()
                    break
                self._resigning = True
                await trio.sleep(_AGAIN)
        self._resigning = False

    async def _post_silent(self) -> None:
        if self.here:
            return
        await self._session.row.name_no_speaker(self.name)
        self._resigning = False  # from here on, the item may be too old for the next event
        waiting: Sequence[str] = ()
        if self.place is _LEAVING:
            waiting, self._waiting = self._waiting, ()
        try:
            await self._session.mail.post({"silent": True, "waiting": waiting})
        except BaseException:
            if self.place is _LEAVING:
                self._waiting = [*waiting, *self._waiting]
            else:
                self.say(waiting)
            raise

    # Subscriptions.

    def _hear_watch(self, item: JsonObject) -> None:
        if not self.here:
            return
        refused = self._subscribe(item["watch"], item["uri"])
        verdict = {"watched": item["asked"], "by": item["from"], "refused": refused}
        if item["from"] == self._session.mail.number:
            self._hear_verdict(verdict)
        else:
            self._session.mail.put(verdict)

    def _hear_verdict(self, item: JsonObject) -> None:
        if item["by"] == self._session.mail.number and (asks := self._verdicts.get(item["watched"])) is not None:
            with suppress(trio.WouldBlock):  # another speaker has answered before
                asks.send_nowait(item["refused"])

    def _subscribe(self, method: str, uri: str) -> tuple[int, str] | None:
        """Subscribe or unsubscribe here.  Returns the code and the reason of a refusal."""
        try:
            self._run.publisher.subscribe(self._session.server_session, Request(0, method, {"uri": uri}))
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
        asked, row = self._asked, self._session.row
        self._verdicts[asked], verdict = trio.open_memory_channel[Sequence[Any] | None](1)
        try:
            watches = method == _SUBSCRIBE
            before = await row.change(lambda r: r.watching(uri, most) if watches else r.without(uri))
            await self._session.mail.post({"watch": method, "uri": uri, "asked": asked})
            refused = await self._read_verdict(verdict) if watches else None
            if refused is not None:
                if uri not in before.uris:  # else an earlier request was accepted
                    await row.change(lambda record: record.without(uri))
                raise refused
        except (StoreFailed, StoreFull) as error:
            raise RequestError(INTERNAL_ERROR, text_for_clients(error)) from error
        finally:
            del self._verdicts[asked]
        return {}

    async def _read_verdict(self, verdict: trio.MemoryReceiveChannel[Sequence[Any] | None]) -> RequestError | None:
        """Wait until the speaker has subscribed, and return its refusal.  If it has gone, this copy takes its place.

        So each subscription has had a place somewhere before it is accepted.
        """
        with trio.move_on_after(QUICKLY):
            refused = await verdict.receive()
            return None if refused is None else RequestError(*refused)
        if await self._replica.quickly(self._replica.alive(self._named_in)):
            return RequestError(INTERNAL_ERROR, "the process that tells of changes is busy; try again later")
        try:
            await self.speak()
        except CannotContinue as error:
            return RequestError(INTERNAL_ERROR, str(error))
        self.offer()
        return None


# The members by which the items of the mail are known.
_PROCESSES: Mapping[str, Callable[[Speaker, JsonObject], None]] = {
    "watch": Speaker._hear_watch,
    "watched": Speaker._hear_verdict,
    "speaker": Speaker._hear_speaker,
    "yielded": Speaker._hear_yielded,
    "say": lambda speaker, item: speaker._hear_messages([item["say"]]),
    "silent": Speaker._hear_silent,
}
