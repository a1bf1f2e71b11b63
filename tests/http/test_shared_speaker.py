"""The copy of a session that speaks to the client: its table, its races, and random sequences of events."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.http.client import HttpClient
from tests.http.replicas import KEYS, ReplicaGroup, replicas
from tests.http.scripted_server import TOOLS, D, ScriptedServer
from tests.http.test_shared_sessions import copy_in, endpoints_of_one_run, fail, session_in, subscribe
from trio_mcp.core import Limits, Notification, encode
from trio_mcp.server.http import PlaceEvent, SessionRecord, SpeakerPlace, shared_speaker
from trio_mcp.stores import MemoryStore, StoreFailed

DONE = "notifications/elicitation/complete"


@pytest.fixture
def replica_group(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda **options: replicas(monkeypatch=monkeypatch, **options)


def completion(id: str) -> Notification:
    return Notification(DONE, {"elicitationId": id})


def change_listeners(group: ReplicaGroup) -> list[Any]:
    """The server sessions that get changes."""
    return [each for scripted in group.servers for run in scripted.server._runs for each in run._sessions]


async def copies_in_all_replicas(group: ReplicaGroup, session: str) -> list[Any]:
    """Make a copy of the session in each replica, and return the copies."""
    for web in group.webs:
        await web.call("ping", session=session)
    await trio.sleep(2)
    return [copy_in(group, number, session) for number in range(len(group.webs))]


@asynccontextmanager
async def session_with_copies(replica_group: Any) -> AsyncIterator[tuple[ReplicaGroup, str, list[Any]]]:
    """Replicas, a session, and its copies."""
    async with replica_group() as group:
        session = await session_in(group)
        yield group, session, await copies_in_all_replicas(group, session)


async def messages_within(stream: Any, seconds: float = 5) -> list[str]:
    """The ids, URIs or methods of the messages that the client reads within these seconds."""
    found = []
    with trio.move_on_after(seconds):
        while True:
            message = await stream.message()
            params = message.get("params", {})
            found.append(params.get("elicitationId") or params.get("uri") or message["method"])
    return found


# The table of places and events


def cells() -> dict[tuple[str, str], str]:
    """The next place for each event and place, from the docstring of the module."""
    header, _, *rows = re.findall(r"(?m)^\|(.*)\|$", (shared_speaker.__doc__ or "").split("\n\n")[2])
    places = re.findall(r"`(\w+)`", header)
    found = {}
    for row in rows:
        event, *nexts = row.split("|")
        (name,) = re.findall(r"^ `(\w+)`", event)
        for place, next in zip(places, nexts, strict=True):
            found[name, place] = next.strip() or place
    return found


CELLS = cells()


def test_the_table_is_that_of_the_docstring() -> None:
    table = shared_speaker._NEXT
    assert list(table) == list(PlaceEvent)
    assert {
        (event.name, place.name): table[event].get(place, place).name for event in PlaceEvent for place in SpeakerPlace
    } == CELLS


async def copy_in_place(group: ReplicaGroup, session: str, place: SpeakerPlace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy without a stream, with its speaker in this place; from then on the store refuses its items."""
    copies = await copies_in_all_replicas(group, session)
    copy = copies[0 if place in (SpeakerPlace.HERE, SpeakerPlace.LEAVING) else 1]
    if place is SpeakerPlace.ELSEWHERE or place is SpeakerPlace.OFFERED:
        await copies[2].speaker.speak()
        if place is SpeakerPlace.OFFERED:
            copies[2].speaker.offer()
    elif place is SpeakerPlace.NOWHERE:
        copies[0]._sessions.end(session, "for the test")
    await trio.sleep(2)
    monkeypatch.setattr(group.store, "append", fail)
    monkeypatch.setattr(group.store, "replace", fail)
    if place is SpeakerPlace.LEAVING:
        copy.speaker.give_up()
    assert copy.speaker.place is place
    return copy


@pytest.mark.full
@pytest.mark.parametrize("place", SpeakerPlace)
@pytest.mark.parametrize("event", PlaceEvent)
async def test_each_event_in_each_place_leads_to_the_next_place(
    event: Any, place: SpeakerPlace, autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        copy = await copy_in_place(group, session, place, monkeypatch)
        speaker, number = copy.speaker, copy.mail.number
        named = {"from": speaker._named or number}
        record = SessionRecord(D, {}, None, None)
        match event.name:
            case "NAMED":
                speaker._wanted = True
                speaker.hear({"from": number, "speaker": "other", "resumes": None})
            case "NAMED_LATE":
                speaker.hear({"from": number, "speaker": "other", "resumes": None})
            case "REPLACED":
                speaker.hear({"from": 1000, "speaker": "other", "resumes": None})
            case "STOPPED":
                speaker.hear({**named, "silent": True, "waiting": []})
            case "NO_STREAM":
                speaker.hear({**named, "silent": True})
            case "FAILED":
                with suppress(StoreFailed):
                    await speaker.speak()
                if speaker.here:
                    speaker.give_up()
            case name:
                name_in_row = {"US": speaker.name, "OTHER": "other.1000", "NONE": ""}[name.removeprefix("ROW_NAMES_")]
                speaker.learn(attrs.evolve(record, speaks_in=name_in_row))
        assert speaker.place.name == CELLS[event.name, place.name]
        assert (copy.server_session in change_listeners(group)) is speaker.here
        assert speaker._resigning or speaker.place is not SpeakerPlace.LEAVING


@pytest.mark.parametrize("place", SpeakerPlace)
async def test_a_message_and_a_subscription_in_each_place(
    place: SpeakerPlace, autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        copy = await copy_in_place(group, session, place, monkeypatch)
        message = encode(completion("7")).decode()
        copy.speaker.hear({"from": 1000, "say": message})
        assert len(copy._pending) == (place is SpeakerPlace.HERE)
        assert list(copy.speaker._waiting) == (
            [message] if place in (SpeakerPlace.LEAVING, SpeakerPlace.NOWHERE) else []
        )
        copy.speaker.hear({"from": 1000, "watch": "resources/subscribe", "uri": "r://1", "asked": 1})
        assert len(copy.mail.waiting) == (place is SpeakerPlace.HERE)  # only the speaker answers with a verdict


async def test_messages_that_wait_for_a_speaker_are_limited(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(store: Any) -> ScriptedServer:
        return ScriptedServer(store=store, state_keys=KEYS, limits=Limits(message_bytes=10_000))

    async with replica_group(make=make) as group:
        session = await session_in(group)
        copy = await copy_in_place(group, session, SpeakerPlace.NOWHERE, monkeypatch)
        for number in range(1000):
            copy.speaker.hear({"from": 1000, "say": encode(completion(str(number))).decode()})
        assert 5_000 < sum(map(len, copy.speaker._waiting)) <= 10_000


# Races


async def test_a_copy_that_ends_while_it_starts_to_speak_resigns(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_group() as group, trio.open_nursery() as nursery:
        session = await session_in(group)
        copies = await copies_in_all_replicas(group, session)
        stream = await group.webs[0].open(session=session)
        await trio.sleep(2)
        append = group.store.append

        async def slow(*args: Any, **options: Any) -> Any:
            await trio.sleep(0.5)
            return await append(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(group.store, "append", slow)
            headers = {"Accept": "text/event-stream", "Mcp-Session-Id": session}
            nursery.start_soon(group.webs[1].send, "GET", "/mcp", headers)
            await trio.sleep(0.2)
            copies[1]._sessions.end(session, "for the test")
            await trio.sleep(2)
        await trio.sleep(5)
        group.servers[2].server.notify_list_changed("tools")
        assert TOOLS in await messages_within(stream)
        assert len(change_listeners(group)) == 1
        assert await subscribe(group.webs[2], "r://1", session) is None


async def test_a_message_mailed_just_before_its_copy_speaks_is_sent(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with session_with_copies(replica_group) as (group, session, copies):
        append = group.store.append

        async def late(stream: str, body: bytes, **options: Any) -> Any:
            if b'"say"' in body:
                await trio.sleep(0.5)
            return await append(stream, body, **options)

        monkeypatch.setattr(group.store, "append", late)
        copies[1]._queue(completion("7"), 0)
        stream = await group.webs[1].open(session=session)
        assert await messages_within(stream) == ["7"]


async def test_messages_of_a_copy_that_ends_are_sent_once(autojump_clock: MockClock, replica_group: Any) -> None:
    """Several other copies have streams, and each tries to speak."""
    async with session_with_copies(replica_group) as (group, session, copies):
        streams = [await group.webs[number].open(session=session) for number in (1, 2)]
        await trio.sleep(2)
        await copies[0].speaker.speak()
        copies[0]._queue(completion("7"), 0)
        copies[0]._sessions.end(session, "for the test")
        found = [each for stream in streams for each in await messages_within(stream)]
        assert found.count("7") == 1


async def test_messages_wait_while_no_copy_speaks(autojump_clock: MockClock, replica_group: Any) -> None:
    async with session_with_copies(replica_group) as (group, session, copies):
        copies[0]._queue(completion("1"), 0)
        copies[0]._sessions.end(session, "for the test")
        await trio.sleep(2)
        copies[1]._queue(completion("2"), 0)
        await trio.sleep(2)
        stream = await group.webs[2].open(session=session)
        assert [each for each in await messages_within(stream) if each in "12"] == ["1", "2"]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_copy_that_lost_the_mail_about_a_resignation_speaks(
    waits: bool, autojump_clock: MockClock, replica_group: Any
) -> None:
    """The copy has a stream, and a message may wait at the copy without a stream."""
    async with session_with_copies(replica_group) as (group, session, copies):
        stream = await group.webs[1].open(session=session)
        await trio.sleep(2)
        await copies[0].speaker.speak()
        await trio.sleep(2)
        hear, copies[1].mail._process = copies[1].mail._process, lambda item: None  # loses its mail
        if waits:
            copies[0]._queue(completion("7"), 0)
        else:
            copies[0]._sessions.end(session, "for the test")
        await trio.sleep(2)
        copies[1].mail._process = hear
        copies[1]._mail_lost()
        await trio.sleep(5)
        group.servers[2].server.notify_list_changed("tools")
        found = await messages_within(stream)
        assert TOOLS in found
        assert ("7" in found) is waits


async def test_messages_of_a_copy_that_lost_the_name_of_the_speaker_are_sent(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    async with session_with_copies(replica_group) as (group, session, copies):
        copies[0].mail._process = lambda item: None  # loses its mail
        stream = await group.webs[1].open(session=session)
        copies[0]._queue(completion("7"), 0)
        await trio.sleep(2)
        copies[0].mail._process = copies[0]._process
        copies[0]._mail_lost()
        await trio.sleep(2)
        assert "7" in await messages_within(stream)
        assert len(change_listeners(group)) == 1


async def test_a_copy_that_failed_to_speak_does_not_replace_the_speaker(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store failed before the mail named the copy: the speaker continues, and no other copy becomes the speaker."""
    async with session_with_copies(replica_group) as (group, session, copies):
        streams = [await group.webs[number].open(session=session) for number in (1, 2)]
        await trio.sleep(2)
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "append", fail)
            with pytest.raises(StoreFailed):
                await copies[0].speaker.speak()
        await trio.sleep(5)
        assert change_listeners(group) == [copies[2].server_session]
        group.servers[0].server.notify_list_changed("tools")
        assert [await messages_within(stream) for stream in streams] == [[], [TOOLS]]


async def test_a_late_item_does_not_make_a_silent_copy_the_speaker(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store writes the item after its failure, and after the copy reported that it does not speak."""
    async with session_with_copies(replica_group) as (group, session, copies):
        stream = await group.webs[1].open(session=session)
        await trio.sleep(2)
        append, late = group.store.append, list[Any]()

        async def fail_first(*args: Any, **options: Any) -> Any:
            if b'"speaker"' in args[1]:
                late.append(partial(append, *args, **options))
                raise StoreFailed("no answer")
            return await append(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(group.store, "append", fail_first)
            with pytest.raises(StoreFailed):
                await copies[0].speaker.speak()
            await trio.sleep(5)
        await late[0]()
        for copy in copies:
            copy.mail.catch_up()
        await trio.sleep(5)
        group.servers[2].server.notify_list_changed("tools")
        assert TOOLS in await messages_within(stream)


async def test_a_copy_that_resigns_late_leaves_the_row_of_its_successor(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both copies are in one replica."""
    async with session_with_copies(replica_group) as (group, session, copies):
        replace, held = group.store.replace, True

        async def hold(row: Any) -> Any:
            if held and b'"speaks_in": ""' in row.body:
                raise StoreFailed("away")
            return await replace(row)

        monkeypatch.setattr(group.store, "replace", hold)
        copies[0]._sessions.end(session, "for the test")
        await trio.sleep(1)
        stream = await group.webs[0].open(session=session)
        await trio.sleep(3)
        held = False
        await trio.sleep(5)
        assert (await copies[1].row.read()).speaks_in != ""
        group.servers[2].server.notify_list_changed("tools")
        assert TOOLS in await messages_within(stream)


async def test_a_copy_in_the_same_replica_hands_over_its_messages(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client does not get a notification for every possible change, because the speaker is alive."""
    async with endpoints_of_one_run(monkeypatch) as (_scripted, webs, session):
        assert await subscribe(webs[1], "r://1", session) is None
        await trio.sleep(20)
        stream = await webs[1].open(session=session)
        assert await messages_within(stream) == []


async def test_a_change_during_a_handover_is_sent_once(autojump_clock: MockClock, replica_group: Any) -> None:
    """At each replica and at each time: replicas report changes with a short delay."""
    dice = random.Random(0)
    async with replica_group() as group:
        session = await session_in(group)
        await copies_in_all_replicas(group, session)
        for step in range(40):
            await trio.sleep(10)
            uri = f"r://{step}"
            assert await subscribe(group.webs[step % 3], uri, session) is None
            await trio.sleep(10)

            async def change(uri: str = uri, step: int = step) -> None:
                await trio.sleep(dice.uniform(0.0, 0.3))
                group.servers[step % 3].server.notify_resource_updated(uri)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(change)
                await trio.sleep(dice.uniform(0.0, 0.3))
                stream = await group.webs[step % 2].open(session=session)
            assert await messages_within(stream) == [uri], step
            await stream.aclose()


async def test_a_copy_without_a_stream_lets_another_one_speak(autojump_clock: MockClock, replica_group: Any) -> None:
    async with session_with_copies(replica_group) as (group, session, copies):
        stream = await group.webs[1].open(session=session)
        await trio.sleep(2)
        await copies[2].speaker.speak()  # without a stream
        await trio.sleep(20)
        assert change_listeners(group) == [copies[1].server_session]
        group.servers[0].server.notify_list_changed("tools")
        assert await messages_within(stream) == [TOOLS]


async def test_a_crashed_speaker_is_replaced_by_a_copy_with_a_stream(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    async with session_with_copies(replica_group) as (group, session, copies):
        stream = await group.webs[1].open(session=session)
        await group.webs[0].open(session=session)
        await trio.sleep(2)
        await group.crash(0)
        await trio.sleep(30)
        assert change_listeners(group) == [copies[1].server_session]
        await messages_within(stream)
        group.servers[2].server.notify_list_changed("tools")
        assert await messages_within(stream) == [TOOLS]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_crashed_speaker_is_replaced_if_the_row_names_another_copy(
    fails: bool, autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy tried to speak: later by the row and earlier by the mail, or its item never reached the mail."""
    async with session_with_copies(replica_group) as (group, session, copies):
        await copies[2].speaker.speak()
        append = group.store.append

        async def late(stream: str, body: bytes, **options: Any) -> Any:
            if b'"speaker"' in body and b'"from": 1,' in body:
                await trio.sleep(0.3)
            elif fails and b'"speaker"' in body:
                raise StoreFailed("away")
            return await append(stream, body, **options)

        if fails:
            stream = await group.webs[1].open(session=session)
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "append", late)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(group.webs[0].open, session=session))
                await trio.sleep(0.1)
                if fails:
                    with pytest.raises(StoreFailed):
                        await copies[2].speaker.speak()
                else:
                    stream = await group.webs[1].open(session=session)
            await trio.sleep(5)
        assert change_listeners(group) == [copies[0].server_session]
        assert (await copies[1].row.read()).speaker[1] != copies[0].mail.number
        await group.crash(0)
        await trio.sleep(30)
        assert change_listeners(group) == [copies[1].server_session]
        await messages_within(stream)
        group.servers[2].server.notify_list_changed("tools")
        assert await messages_within(stream) == [TOOLS]


# Random sequences of events


class RandomEvents:
    """Random events at the copies of one session."""

    def __init__(self, group: ReplicaGroup, session: str, dice: random.Random) -> None:
        self.group = group
        self.session = session
        self.dice = dice
        self.streams: list[Any] = []
        self.queued: list[str] = []
        self.found: list[str] = []
        self.away = 0.0

    @property
    def copies(self) -> list[Any]:
        found = []
        for number in range(len(self.group.webs)):
            with suppress(KeyError):
                found.append(copy_in(self.group, number, self.session))
        return found

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call the store, which is slow and may fail before or after the operation."""
        await trio.sleep(self.dice.choice((0.0, 0.0, 0.02, 0.3)))
        fails = self.dice.random() < self.away
        if fails and self.dice.random() < 0.5:
            raise StoreFailed("the store is away")
        done = await getattr(MemoryStore, name)(self.group.store, *args, **options)
        if fails:
            raise StoreFailed("the answer was lost")
        return done

    async def read(self, stream: Any) -> None:
        with suppress(Exception):
            while True:
                message = await stream.message()
                self.found.append(message.get("params", {}).get("elicitationId") or message["method"])

    async def step(self, nursery: trio.Nursery) -> None:
        match self.dice.choice("oooccttteelpa"):
            case "o":
                nursery.start_soon(self.open, nursery, self.dice.choice(self.group.webs))
            case "c" if self.streams:
                await self.streams.pop(self.dice.randrange(len(self.streams))).aclose()
            case "t" if self.copies:
                self.queued.append(f"m{len(self.queued)}")
                self.dice.choice(self.copies)._queue(completion(self.queued[-1]), 0)
            case "e" if self.copies and self.dice.random() < 0.4:
                self.dice.choice(self.copies)._sessions.end(self.session, "for the test")
            case "l" if self.copies:
                copy = self.dice.choice(self.copies)
                copy.mail._position = self.group.store._streams[copy.mail._name].number
                copy._mail_lost()
            case "p":
                with trio.move_on_after(self.dice.uniform(0.0, 0.5)):
                    await self.group.webs[self.dice.randrange(3)].call("ping", session=self.session)
            case "a":
                self.away = self.dice.choice((0.0, 0.0, 0.5))
        await trio.sleep(self.dice.choice((0.0, 0.01, 0.1, 0.5, 2.0)))

    async def open(self, nursery: trio.Nursery, web: HttpClient) -> None:
        with suppress(Exception):
            with trio.move_on_after(self.dice.choice((0.1, 0.5, 100.0))):
                stream = await web.open(session=self.session)
                self.streams.append(stream)
                nursery.start_soon(self.read, stream)

    def check(self) -> None:
        """Check that all copies agree on the speaker; this holds after a time without events."""
        copies = self.copies
        speakers = [copy for copy in copies if copy.speaker.here]
        places = [
            (copy.mail.number, copy.speaker.place.name, copy.has_stream, copy.speaker._waiting) for copy in copies
        ]
        assert len(speakers) <= 1, places
        assert set(change_listeners(self.group)) == {copy.server_session for copy in speakers}, places
        for copy in copies:
            assert copy.speaker.place is not SpeakerPlace.LEAVING, places
            assert not copy.speaker._waiting or copy.speaker.place is SpeakerPlace.NOWHERE, places
            assert not copy._pending or copy.speaker.here, places
        if any(copy.has_stream for copy in copies):
            assert [copy.has_stream for copy in speakers] == [True], places


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 30))])
async def test_the_copies_agree_on_the_speaker_after_any_events(
    seed: int, autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    async with replica_group() as group:
        session = await session_in(group)
        await copies_in_all_replicas(group, session)
        events = RandomEvents(group, session, dice)
        for name in ("get", "replace", "append", "read"):
            monkeypatch.setattr(group.store, name, partial(events.call, name))
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                for _ in range(dice.randrange(1, 12)):
                    await events.step(nursery)
                events.away = 0.0
                await trio.sleep(30)
                events.check()
                if any(copy.has_stream for copy in events.copies):
                    events.found.clear()
                    group.servers[dice.randrange(3)].server.notify_list_changed("tools")
                    await trio.sleep(3)
                    assert TOOLS in events.found
            nursery.cancel_scope.cancel()
