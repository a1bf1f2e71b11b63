"""Sessions that continue in any replica: every request of a legacy client may go to another process."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.http.client import Cut, HttpClient, notification, request, response
from tests.http.replicas import KEYS, ReplicaGroup, make_scripted, replicas
from tests.http.scripted_server import (
    TOOLS,
    UPDATED,
    B,
    C,
    D,
    ScriptedServer,
    methods,
    play_call,
    play_params,
    session_revisions,
    text_of,
)
from tests.http.served import MemoryListener
from trio_mcp.core import INTERNAL_ERROR, INVALID_PARAMS, Limits, Notification, encode
from trio_mcp.server.http import serve_http, serve_http_stream
from trio_mcp.server.http.shared_row import key_of  # the key of rows and streams
from trio_mcp.stores import MemoryStore, StoreFailed, StoreFull
from trio_mcp.stores import rows as clock  # the test replaces its clock

ANSWER = {"action": "accept", "content": {"size": 3}}
revisions_with_elicitation = pytest.mark.parametrize("revision", [C, D])


@pytest.fixture
def replica_group(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda **options: replicas(monkeypatch=monkeypatch, **options)


async def session_in(group: ReplicaGroup, revision: str = D, **how: Any) -> str:
    """Open a session at the first replica, and make it known to all clients of the group."""
    session = await group.webs[0].initialize(revision, **how)
    for web in (*group.webs[1:], group.web):
        web._revisions[session] = revision
    return session


async def fail(*args: Any, **options: Any) -> Any:
    raise StoreFailed("the store is away")


async def discard(*args: Any, **options: Any) -> Any:
    await trio.lowlevel.checkpoint()


@session_revisions
async def test_each_request_can_go_to_another_replica(
    revision: str, autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        session = await group.web.initialize(revision)
        for number in range(6):
            answer = await group.web.call("tools/call", play_params(f"say {number}"), session=session)
            assert text_of(answer.message) == str(number)
        assert [len(scripted.ended) for scripted in group.servers] == [2, 2, 2]
        assert (await group.web.end(session)).status == 204
        await wait_all_tasks_blocked()
        for web in group.webs:
            web._revisions[session] = revision
            assert (await web.post(request("ping", revision=revision), session=session)).status == 404


async def test_a_session_of_no_replica_is_unknown(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        answer = await group.web.post(request("ping", revision=D), session="unknown", revision=D)
        assert answer.status == 404


@revisions_with_elicitation
@pytest.mark.parametrize("at", [0, 1])
async def test_an_answer_reaches_the_replica_that_asked(
    revision: str, at: int, autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        session = await session_in(group, revision)
        for _ in range(2):
            stream = await group.webs[at].open(play_call("ask", revision=revision), session=session)
            question = await stream.message()
            assert question["method"] == "elicitation/create"
            assert (await group.webs[2].post(response(question["id"], ANSWER), session=session)).status == 202
            assert text_of(await stream.response()) == "done"
        assert [str(answer) for answer in group.servers[at].answers] == ["Accepted(value=Size(size=3))"] * 2


async def test_questions_of_two_replicas_have_different_ids(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        streams = [
            await web.open(play_call("ask", id=number), session=session) for number, web in enumerate(group.webs)
        ]
        questions = [await stream.message() for stream in streams]
        assert len({question["id"] for question in questions}) == 3
        for question in questions:
            await group.web.post(response(question["id"], ANSWER), session=session)
        for stream in streams:
            assert text_of(await stream.response()) == "done"


async def test_a_malformed_answer_reaches_the_replica_that_asked(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        stream = await group.webs[1].open(play_call("ask"), session=session)
        question = await stream.message()
        malformed = {"jsonrpc": "2.0", "id": question["id"], "result": 7}
        assert (await group.webs[0].post(malformed, session=session)).status == 400
        assert (await stream.response())["result"]["isError"] is True


@session_revisions
async def test_a_cancellation_reaches_the_call(revision: str, autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group, revision)
        stream = await group.webs[1].open(play_call("progress", "wait x", id=7, revision=revision), session=session)
        await stream.message()
        cancelled = notification("notifications/cancelled", {"requestId": 7})
        assert (await group.webs[2].post(cancelled, session=session)).status == 202
        assert await stream.rest() == []
        assert group.servers[1].cancelled == [""]


@session_revisions
async def test_the_log_level_applies_at_all_replicas(
    revision: str, autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        session = await session_in(group, revision)
        await group.webs[1].call("tools/call", play_params(), session=session)
        for level, expected in (("error", []), ("info", ["notifications/message"])):
            await group.webs[2].call("logging/setLevel", {"level": level}, session=session)
            await wait_all_tasks_blocked()
            for web in group.webs:
                stream = await web.post(play_call("log x", revision=revision), session=session)
                assert methods(stream.messages)[:-1] == expected


async def test_a_replica_learns_that_the_handshake_has_ended(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group, initialized=False)
        assert (
            await group.webs[2].call("ping", session=session)
        ).result == {}  # so the replica has a copy before the handshake ends
        await group.webs[1].post(notification("notifications/initialized"), session=session)
        stream = await group.webs[2].open(play_call("ask"), session=session)
        question = await stream.message()
        await group.webs[0].post(response(question["id"], ANSWER), session=session)
        assert text_of(await stream.response()) == "done"


# Streams


async def test_a_session_gets_a_change_once_at_each_replica(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        for number in (1, 2, 0, 1):
            stream = await group.webs[number].open(session=session)
            await trio.sleep(3)  # the time of a handover
            for scripted in group.servers:
                scripted.server.notify_list_changed("tools")
                await trio.sleep(1)
                assert (await stream.message())["method"] == TOOLS
            with trio.move_on_after(5):
                raise AssertionError(await stream.message())
            await stream.aclose()


async def test_of_streams_opened_at_once_only_one_gets_a_change(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        for _ in range(5):
            streams: list[Any] = []

            async def open_at(web: Any, streams: list[Any] = streams) -> None:
                streams.append(await web.open(session=session))

            async with trio.open_nursery() as nursery:
                for web in (*group.webs, *group.webs):
                    nursery.start_soon(open_at, web)
            await trio.sleep(5)
            assert (
                len([each for scripted in group.servers for run in scripted.server._runs for each in run._sessions])
                == 1
            )
            group.servers[1].server.notify_list_changed("tools")
            await trio.sleep(1)
            methods_received = []
            for stream in streams:
                with trio.move_on_after(1):
                    methods_received.append((await stream.message())["method"])
                await stream.aclose()
            assert methods_received == [TOOLS]


@session_revisions
async def test_a_subscription_at_any_replica_reaches_the_stream(
    revision: str, autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        session = await session_in(group, revision)
        await group.webs[1].call("resources/subscribe", {"uri": "r://1"}, session=session)
        stream = await group.webs[2].open(session=session)
        await group.webs[0].call("resources/subscribe", {"uri": "r://2"}, session=session)
        for number in (1, 2, 3):
            group.servers[0].server.notify_resource_updated(f"r://{number}")
        assert {(await stream.message())["params"]["uri"] for _ in range(2)} == {"r://1", "r://2"}
        await group.webs[1].call("resources/unsubscribe", {"uri": "r://1"}, session=session)
        for number in (1, 2):
            group.servers[1].server.notify_resource_updated(f"r://{number}")
        assert (await stream.message())["params"]["uri"] == "r://2"


async def test_changes_wait_for_a_stream_at_any_replica(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        group.servers[2].server.notify_list_changed("tools")
        await trio.sleep(1)
        stream = await group.webs[1].open(session=session)
        assert (await stream.message())["method"] == TOOLS


async def test_the_next_stream_after_a_crashed_speaker_gets_all_changes(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        await group.webs[1].call("resources/subscribe", {"uri": "r://1"}, session=session)
        stream = await group.webs[0].open(session=session)
        await group.crash(0)
        await trio.sleep(20)
        stream = await group.webs[1].open(session=session)
        assert {(await stream.message())["method"] for _ in range(3)} >= {TOOLS, UPDATED}


@pytest.mark.parametrize("revision", [B, D])
@pytest.mark.parametrize("resumed_at", [0, 1, 2])
async def test_the_stream_of_a_call_can_be_resumed_at_any_replica(
    revision: str, resumed_at: int, autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        session = await session_in(group, revision)
        steps = ("progress", "progress", "wait x", "progress", "wait y")
        stream = await group.webs[1].open(play_call(*steps, revision=revision), session=session)
        for _ in range(2):
            await stream.message()
        first = stream.last_event_id
        await stream.aclose()
        group.servers[1].go["x"].set()
        await trio.sleep(1)
        web = group.webs[resumed_at]
        web.expect(play_call(revision=revision), session)
        resumed = await web.open(session=session, after=first)
        assert (await resumed.message())["params"]["progress"] == 3
        group.servers[1].go["y"].set()
        assert text_of(await resumed.response()) == "done"
        assert resumed.ended
        # The stream has ended by now, and its events are still kept.
        web = group.webs[(resumed_at + 1) % 3]
        web.expect(play_call(revision=revision), session)
        again = await web.open(session=session, after=first)
        assert text_of(await again.response()) == "done"


@pytest.mark.parametrize("standalone", [False, True])
async def test_events_that_the_store_has_twice_are_sent_once(
    standalone: bool, autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store failed after it had written the events, so they were written again."""
    async with replica_group() as group:
        session = await session_in(group)
        append, failed = group.store.append, 0

        async def fail_late(stream: str, *args: Any, **options: Any) -> Any:
            nonlocal failed
            number = await append(stream, *args, **options)
            if stream.startswith("events of") and failed < 2:
                failed += 1
                raise StoreFailed("the answer was lost")
            return number

        if standalone:
            await subscribe(group.webs[0], "r://1", session)
            stream = await group.webs[1].open(session=session)
        else:
            stream = await group.webs[1].open(
                play_call("progress", "wait x", "progress", "sleep 3", "progress"), session=session
            )
        await stream.event()
        await trio.sleep(1)
        monkeypatch.setattr(group.store, "append", fail_late)
        group.servers[1].go["x"].set()
        group.servers[2].server.notify_resource_updated("r://1")
        await trio.sleep(2)
        await stream.aclose()
        assert failed == 2
        web, ids = group.webs[2], list[str | None]()
        web.expect(play_call(), session)
        resumed = await web.open(session=session, after=stream.last_event_id)
        with trio.move_on_after(5):
            async for event in resumed:
                ids.append(event.id)
        assert len(ids) == len(set(ids)) > 1


@pytest.mark.parametrize("seconds", [1.05, 30.0])
async def test_a_stream_can_be_resumed_after_the_store_was_away(
    seconds: float, autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first events of the stream are stored later, and no replica counts as dead because of its old lease."""

    async with replica_group() as group:
        session = await session_in(group)
        for web in group.webs:
            await web.call("ping", session=session)
        with monkeypatch.context() as patch:
            for name in ("get", "add", "replace", "append", "read", "send", "delete", "lease", "claim", "sweep"):
                patch.setattr(group.store, name, fail)
            stream = await group.webs[1].open(play_call("progress", "wait x"), session=session)
            await stream.message()
            await stream.aclose()
            await trio.sleep(seconds)
        group.webs[2].expect(play_call(), session)
        resumed = await group.webs[2].open(session=session, after=stream.last_event_id)
        await trio.sleep(20)
        group.servers[1].go["x"].set()
        assert text_of(await resumed.response()) == "done"


async def test_an_unread_question_comes_on_the_resumed_stream(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        stream = await group.webs[1].open(play_call("progress", "wait x", "ask"), session=session)
        await stream.message()
        await stream.aclose()
        group.servers[1].go["x"].set()
        group.webs[2].expect(play_call(), session)
        resumed = await group.webs[2].open(session=session, after=stream.last_event_id)
        question = await resumed.message()
        await group.webs[0].post(response(question["id"], ANSWER), session=session)
        assert text_of(await resumed.response()) == "done"


@pytest.mark.parametrize("waits", [0, 30])
async def test_the_stream_of_a_call_at_a_crashed_replica_ends_with_an_error(
    waits: float, autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        stream = await group.webs[1].open(play_call("progress", "wait x", id=9), session=session)
        await stream.message()
        await trio.sleep(1)
        await group.crash(1)
        await trio.sleep(waits)
        group.webs[2].expect(play_call(id=9), session)
        resumed = await group.webs[2].open(session=session, after=stream.last_event_id)
        answer = await resumed.response()
        assert answer["id"] == 9
        assert "has ended before it was answered" in answer["error"]["message"]
        assert text_of((await group.webs[2].call("tools/call", play_params(), session=session)).message) == "done"


@pytest.mark.parametrize("after", ["nonsense", "x.y.1-0", "x.y.s1-0", "x.y.1-", "-1", "x.y.s1-x"])
async def test_an_unknown_event_cannot_be_resumed(after: str, autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        headers = {"Accept": "text/event-stream", "Mcp-Session-Id": session, "Last-Event-ID": after}
        for web in group.webs:
            assert (await web.send("GET", "/mcp", headers)).status == 400


async def test_a_standalone_stream_continues_at_another_replica(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        for number in range(3):
            await group.web.call("resources/subscribe", {"uri": f"r://{number}"}, session=session)
        stream = await group.webs[0].open(session=session)
        uris: list[str] = []
        for number in (1, 2, 2, 0, 1):  # the replica at which the stream is resumed
            group.servers[2].server.notify_resource_updated("r://0")
            uris.append((await stream.message())["params"]["uri"])
            after = stream.last_event_id
            await stream.aclose()
            group.servers[1].server.notify_resource_updated("r://1")
            await trio.sleep(1)
            stream = await group.webs[number].open(session=session, after=after)
            group.servers[0].server.notify_resource_updated("r://2")
            uris += [(await stream.message())["params"]["uri"] for _ in range(2)]
            # A client that has lost its connection before it has read this resumes after the same event.
            await stream.aclose()
            await trio.sleep(1)
            stream = await group.webs[(number + 1) % 3].open(session=session, after=after)
            uris += [(await stream.message())["params"]["uri"] for _ in range(2)]
        assert uris == ["r://0", "r://1", "r://2", "r://1", "r://2"] * 5


async def test_a_read_event_is_not_sent_again(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        stream = await group.webs[0].open(session=session)
        group.servers[2].server.notify_list_changed("tools")
        assert (await stream.message())["method"] == TOOLS
        await stream.aclose()
        resumed = await group.webs[1].open(session=session, after=stream.last_event_id)
        with trio.move_on_after(10):
            raise AssertionError(await resumed.message())


# The end of sessions


@pytest.mark.full
async def test_a_session_lives_while_its_client_uses_any_replica(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        idle = group.servers[0].server._limits.session_idle_seconds
        for _ in range(5):
            await trio.sleep(idle * 0.7)
            assert (await group.webs[1].call("ping", session=session)).result == {}
        assert (await group.webs[0].call("ping", session=session)).result == {}
        stream = await group.webs[2].open(session=session)
        await trio.sleep(idle * 3)
        assert (await group.webs[0].call("ping", session=session)).result == {}
        await stream.aclose()
        await trio.sleep(idle * 1.5)
        assert (await group.webs[0].post(request("ping", revision=D), session=session)).status == 404
        await trio.sleep(idle * 2)
        assert [row for row in group.store._rows if row[0].startswith("session")] == []
        assert list(group.store._streams) == []


async def test_a_session_outlives_the_replica_that_opened_it(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        await group.crash(0)
        for web in group.webs[1:]:
            assert text_of((await web.call("tools/call", play_params(), session=session)).message) == "done"


async def test_a_session_belongs_to_its_principal_at_all_replicas(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    from tests.http.served import bearer, by_token

    async with replica_group(authenticate=by_token) as group:
        ada, bob = bearer("ada"), bearer("bob")
        session = await group.webs[0].initialize(D, headers=ada)
        group.webs[1]._revisions[session] = D
        ping = request("ping", revision=D)
        assert (await group.webs[1].post(ping, session=session, headers=bob)).status == 403
        assert (await group.webs[1].post(ping, session=session, headers=ada)).status == 200
        assert session not in repr(group.store._rows)


@asynccontextmanager
async def endpoints_of_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[ScriptedServer, list[HttpClient], str]]:
    """A server with two endpoints in one run, a client for each, and a session that both clients know."""
    monkeypatch.setattr(clock, "wall", trio.current_time)
    scripted = make_scripted(MemoryStore())
    async with scripted.server.running(), trio.open_nursery() as nursery:
        webs = []
        for _ in range(2):
            listener = MemoryListener()
            await nursery.start(partial(serve_http, scripted.server, listeners=[listener], allowed_hosts=["127.0.0.1"]))
            webs.append(HttpClient(listener.connect))
        session = await webs[0].initialize(D)
        webs[1]._revisions[session] = D
        yield scripted, webs, session
        for web in webs:
            await web.aclose()
        nursery.cancel_scope.cancel()


async def test_two_endpoints_of_one_run_share_sessions(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with endpoints_of_one_run(monkeypatch) as (scripted, webs, session):
        stream = await webs[1].open(play_call("progress", "wait x", id=7), session=session)
        await stream.message()
        await webs[0].post(notification("notifications/cancelled", {"requestId": 7}), session=session)
        assert await stream.rest() == []
        standing = await webs[1].open(session=session)
        scripted.server.notify_list_changed("tools")
        assert (await standing.message())["method"] == TOOLS
        assert (await webs[0].end(session)).status == 204
        await wait_all_tasks_blocked()
        assert (await webs[1].post(request("ping", revision=D), session=session)).status == 404


async def test_an_ended_endpoint_has_no_handlers_for_mail(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "wall", trio.current_time)
    server = make_scripted(MemoryStore()).server
    async with server.running():
        for _ in range(3):
            ours, theirs = trio.testing.memory_stream_pair()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(serve_http_stream, server, theirs, allowed_hosts=["127.0.0.1"]))
                await wait_all_tasks_blocked()
                await ours.aclose()
        (run,) = server._runs
        assert run.replica is not None
        assert (run.replica.hears["session"], run.replica.hears["follow"], run.replica.on_gap) == ([], [], [])


# Subscriptions


def with_room_for(subscriptions: int) -> Any:
    return lambda store: ScriptedServer(store=store, state_keys=KEYS, limits=Limits(subscriptions=subscriptions))


async def subscribe(web: HttpClient, uri: str, session: str) -> Any:
    answer = await web.post(request("resources/subscribe", {"uri": uri}, revision=D), session=session)
    return answer.message.get("error", {}).get("code")


async def test_a_subscription_is_refused_if_the_speaker_has_no_room(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group(make=with_room_for(6)) as group:
        session = await session_in(group)
        codes = [
            await subscribe(web, f"r://{number}", session) for number, web in enumerate((*group.webs, *group.webs))
        ]
        assert codes == [None, None, None, None, None, INTERNAL_ERROR]
        (row,) = [row for row in group.store._rows.values() if row.key == key_of(session)]
        assert json.loads(row.body)["uris"] == [f"r://{number}" for number in range(5)]
        stream = await group.webs[0].open(session=session)
        for number in range(6):
            group.servers[2].server.notify_resource_updated(f"r://{number}")
        uris = {(await stream.message())["params"]["uri"] for _ in range(5)}
        assert uris == {f"r://{number}" for number in range(5)}


async def test_a_subscription_stays_when_the_same_request_is_refused_later(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        assert await subscribe(group.webs[1], "r://1", session) is None
        with monkeypatch.context() as patch:
            patch.setattr(
                copy_in(group, 0, session).speaker, "_subscribe", lambda method, uri: (INTERNAL_ERROR, "full")
            )
            for uri in ("r://1", "r://2"):
                assert await subscribe(group.webs[1], uri, session) == INTERNAL_ERROR
        (row,) = [row for row in group.store._rows.values() if row.key == key_of(session)]
        assert json.loads(row.body)["uris"] == ["r://1"]


@pytest.mark.parametrize("uri", [7, "r://" + "x" * 9000])
async def test_an_invalid_subscription_is_refused_at_all_replicas(
    uri: Any, autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        for web in group.webs:
            assert await subscribe(web, uri, session) == INVALID_PARAMS


async def test_a_copy_without_room_for_the_subscriptions_does_not_speak(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    """Its client gets 503, and the copy with a stream continues."""
    room = iter((100, 8, 100))

    def make(store: Any) -> ScriptedServer:
        return with_room_for(next(room))(store)  # type: ignore[no-any-return]

    async with replica_group(make=make) as group:
        session = await session_in(group)
        for number in range(10):
            assert await subscribe(group.webs[number % 3], f"r://{number}", session) is None
        stream = await group.webs[0].open(session=session)
        headers = {"Accept": "text/event-stream", "Mcp-Session-Id": session}
        for _ in range(2):
            refused = await group.webs[1].send("GET", "/mcp", headers)
            assert (refused.status, refused.headers["Retry-After"]) == (503, "30")
            assert b"Limits.subscriptions" in refused.body
            await trio.sleep(3)
            group.servers[2].server.notify_resource_updated("r://9")
            uris = [each["params"]["uri"] for each in [await stream.message()] if each["method"] == UPDATED]
            while "r://9" not in uris:
                message = await stream.message()
                uris += [message["params"]["uri"]] if message["method"] == UPDATED else []
        assert [each for run in group.servers[1].server._runs for each in run._sessions] == []


async def test_a_subscription_succeeds_after_a_copy_had_no_room(autojump_clock: MockClock, replica_group: Any) -> None:
    """The copy that spoke before has no stream, so it does not start to speak again without a request."""
    room = iter((100, 8, 100))

    def make(store: Any) -> ScriptedServer:
        return with_room_for(next(room))(store)  # type: ignore[no-any-return]

    async with replica_group(make=make) as group:
        session = await session_in(group)
        for number in range(10):
            assert await subscribe(group.webs[0], f"r://{number}", session) is None
        headers = {"Accept": "text/event-stream", "Mcp-Session-Id": session}
        assert (await group.webs[1].send("GET", "/mcp", headers)).status == 503
        await trio.sleep(3)
        assert await subscribe(group.webs[2], "r://10", session) is None


async def test_a_subscription_after_the_speaker_crashed_waits_for_its_lease(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    """The replica that listened has crashed, and no stream is open."""
    async with replica_group() as group:
        session = await session_in(group)
        await group.webs[1].call("ping", session=session)
        await group.crash(0)
        assert (
            await subscribe(group.webs[1], "r://1", session) == INTERNAL_ERROR
        )  # the crashed replica may only be slow
        await trio.sleep(20)
        assert await subscribe(group.webs[1], "r://2", session) is None
        stream = await group.webs[2].open(session=session)
        messages = []
        with trio.move_on_after(5):
            while True:
                messages.append(await stream.message())
        assert [each["params"]["uri"] for each in messages if each["method"] == UPDATED] == ["r://2"]


async def test_subscriptions_without_a_speaker_are_limited(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group(make=with_room_for(6)) as group:
        session = await session_in(group)
        await group.webs[1].call("ping", session=session)
        await group.crash(0)
        await trio.sleep(20)
        codes = [await subscribe(group.webs[1 + number % 2], f"r://{number}", session) for number in range(6)]
        assert codes == [None, None, None, None, None, INTERNAL_ERROR]
        stream = await group.webs[2].open(session=session)
        group.servers[1].server.notify_resource_updated("r://4")
        with trio.fail_after(5):
            while (await stream.message()).get("params") != {"uri": "r://4"}:
                pass


async def test_a_subscription_is_answered_after_the_speaker_ended(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        await group.webs[1].call("ping", session=session)
        copy_in(group, 0, session).end("for the test")
        await trio.sleep(1)
        assert await subscribe(group.webs[1], "r://1", session) is None


async def test_a_subscription_during_a_change_of_the_speaker_is_not_lost(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for each order of the two in the row and in the mail."""
    async with replica_group() as group:
        session = await session_in(group)
        for web in group.webs:
            await web.call("ping", session=session)
        get = group.store.get

        async def slow(*args: Any) -> Any:
            found = await get(*args)
            await trio.sleep(dice.choice((0.0, 0.05, 0.1)))
            return found

        monkeypatch.setattr(group.store, "get", slow)
        dice = random.Random(0)
        for step in range(30):
            opened: list[Any] = []

            async def open_at(web: HttpClient, opened: list[Any] = opened) -> None:
                opened.append(await web.open(session=session))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_at, group.webs[step % 2])
                await trio.sleep(dice.uniform(0.0, 0.3))
                assert await subscribe(group.webs[2], f"r://{step}", session) is None
            await trio.sleep(2)
            group.servers[1].server.notify_resource_updated(f"r://{step}")
            with trio.fail_after(5):
                while (await opened[0].message())["params"].get("uri") != f"r://{step}":
                    pass
            await opened[0].aclose()


@pytest.mark.parametrize("number", [0, 1])
async def test_a_change_before_the_end_of_the_handshake_is_sent_after_it(
    number: int, autojump_clock: MockClock, replica_group: Any
) -> None:
    """`notifications/initialized` can arrive after a subscription: over another connection, at another replica."""
    async with replica_group() as group:
        session = await session_in(group, initialized=False)
        stream = await group.webs[0].open(session=session)
        assert await subscribe(group.webs[0], "r://1", session) is None
        for _ in range(2):
            group.servers[2].server.notify_resource_updated("r://1")
            await trio.sleep(5)
        group.servers[2].server.notify_resource_updated("r://2")
        await group.webs[number].post(notification("notifications/initialized"), session=session)
        found = []
        with trio.move_on_after(5):
            while True:
                found.append((await stream.message())["params"])
        assert found == [{"uri": "r://1"}]


async def test_a_message_for_a_former_speaker_is_forwarded(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        await group.webs[1].call("ping", session=session)
        stream = await group.webs[0].open(session=session)
        completion = Notification("notifications/elicitation/complete", {"elicitationId": "7"})
        copy_in(group, 1, session).speaker.say([encode(completion).decode()])
        with trio.fail_after(5):
            assert (await stream.message())["params"]["elicitationId"] == "7"


async def test_a_copy_cancelled_while_it_starts_to_speak_does_not_speak(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        await subscribe(group.webs[0], "r://1", session)
        await group.webs[1].call("ping", session=session)
        copy, get, read = copy_in(group, 1, session), group.store.get, 0

        async def stop(*args: Any) -> Any:
            nonlocal read
            read += 1
            if read == 2:  # the second read is that of the row with the subscriptions
                await trio.sleep_forever()
            return await get(*args)

        with monkeypatch.context() as patch, trio.move_on_after(0.5):
            patch.setattr(group.store, "get", stop)
            await copy.speaker.speak()
        assert (read, copy.speaker.here) == (2, False)
        stream = await group.webs[1].open(session=session)
        await trio.sleep(5)
        group.servers[0].server.notify_resource_updated("r://1")
        with trio.fail_after(5):
            while (await stream.message()).get("params") != {"uri": "r://1"}:
                pass


async def test_copies_without_room_try_to_speak_again_later(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not ask each other in a loop, and a message that waits at one of them is not lost."""
    completion = encode(Notification("notifications/elicitation/complete", {"elicitationId": "7"})).decode()
    async with replica_group() as group:
        session = await session_in(group)
        assert await subscribe(group.webs[0], "r://1", session) is None
        streams = [await group.webs[number].open(session=session) for number in range(3)]
        await trio.sleep(3)
        append, items = group.store.append, 0

        async def counted(*args: Any, **options: Any) -> Any:
            nonlocal items
            items += 1
            assert items < 100
            return await append(*args, **options)

        monkeypatch.setattr(group.store, "append", counted)
        with monkeypatch.context() as patch:
            for number in (0, 1):
                patch.setattr(
                    copy_in(group, number, session).speaker, "_subscribe", lambda method, uri: (INTERNAL_ERROR, "full")
                )
            copy_in(group, 2, session).end("for the test")
            await trio.sleep(200)
        await trio.sleep(50)
        group.servers[2].server.notify_resource_updated("r://1")
        copy_in(group, 0, session).speaker.say([completion])
        found: set[str] = set()

        async def read(stream: Any) -> None:
            while len(found) < 2:
                found.update((await stream.message())["params"])

        with trio.move_on_after(5):
            async with trio.open_nursery() as nursery:
                for stream in streams[:2]:
                    nursery.start_soon(read, stream)
        assert found == {"uri", "elicitationId"}


async def test_a_copy_that_cannot_speak_forwards_its_messages(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion = encode(Notification("notifications/elicitation/complete", {"elicitationId": "7"})).decode()
    async with replica_group() as group:
        session = await session_in(group)
        assert await subscribe(group.webs[0], "r://1", session) is None
        await group.webs[1].call("ping", session=session)
        stream = await group.webs[0].open(session=session)
        await trio.sleep(3)
        copy = copy_in(group, 1, session)

        def refuse(method: str, uri: str) -> Any:
            copy.speaker.say([completion])  # it goes to the current speaker
            return INTERNAL_ERROR, "full"

        monkeypatch.setattr(copy.speaker, "_subscribe", refuse)
        with pytest.raises(StoreFailed, match="full"):
            await copy.speaker.speak()
        with trio.fail_after(5):
            while "elicitationId" not in (await stream.message()).get("params", {}):
                pass


async def test_a_copy_that_ends_while_the_store_is_away_resigns_later(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        await group.webs[1].call("ping", session=session)
        with monkeypatch.context() as patch:
            for name in ("get", "replace", "append"):
                patch.setattr(group.store, name, fail)
            copy = copy_in(group, 0, session)
            copy._sessions.end(session, "for the test")
            await trio.sleep(20)
        await trio.sleep(2)
        assert await subscribe(group.webs[1], "r://1", session) is None


async def test_a_copy_that_often_fails_to_speak_resigns_once(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        await group.webs[1].call("ping", session=session)
        copy, append, items = copy_in(group, 1, session), group.store.append, 0

        async def counted(*args: Any, **options: Any) -> Any:
            nonlocal items
            items += 1
            return await append(*args, **options)

        with monkeypatch.context() as patch:
            for name in ("get", "replace", "append"):
                patch.setattr(group.store, name, fail)
            for _ in range(100):
                with pytest.raises(StoreFailed):
                    await copy.speaker.speak()
        monkeypatch.setattr(group.store, "append", counted)
        await trio.sleep(10)
        assert items == 1
        assert not copy.speaker._resigning


# Failing stores


async def test_a_failing_store_gives_errors_and_ends_no_session(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        await group.webs[1].call("ping", session=session)
        with monkeypatch.context() as patch:
            for name in ("get", "add", "replace", "append", "read", "send", "delete"):
                patch.setattr(group.store, name, fail)
            assert text_of((await group.webs[1].call("tools/call", play_params(), session=session)).message) == "done"
            refused = await group.webs[2].post(request("ping", revision=D), session=session)
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            level = request("logging/setLevel", {"level": "info"}, revision=D)
            for _ in range(2):
                assert (await group.webs[1].post(level, session=session)).status == 503
            assert text_of((await group.webs[1].call("tools/call", play_params(), session=session)).message) == "done"
            assert (await group.webs[1].end(session)).status == 503
            params = {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
            assert (await group.webs[1].post(request("initialize", params, revision=D), revision=D)).status == 503
            assert (await group.webs[1].call("tools/call", play_params())).result["content"]
        for web in group.webs:
            assert text_of((await web.call("tools/call", play_params(), session=session)).message) == "done"


@pytest.mark.parametrize("stored", [True, False])
async def test_the_answer_to_initialize_waits_until_the_session_is_stored(
    stored: bool, autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keep-alive comment that is due in the meantime does not send the answer."""
    async with replica_group(keep_alive=0.1) as group:
        add, added = group.store.add, list[float]()

        async def slow(*args: Any, **options: Any) -> Any:
            await trio.sleep(0.8)
            added.append(trio.current_time())
            if not stored:
                raise StoreFailed("the store is away")
            return await add(*args, **options)

        monkeypatch.setattr(group.store, "add", slow)
        params = {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        answer = await group.webs[0].post(request("initialize", params, revision=D), revision=D)
        assert answer.status == (200 if stored else 503)
        assert added == [trio.current_time()]


async def test_an_answer_does_not_depend_on_lost_wake_ups(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        stream = await group.webs[1].open(play_call("ask"), session=session)
        question = await stream.message()
        monkeypatch.setattr(group.store, "send", discard)
        await group.webs[2].post(response(question["id"], ANSWER), session=session)
        assert text_of(await stream.response()) == "done"


async def test_a_copy_that_lost_mail_reads_the_state_and_the_speaker_again(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(store: Any) -> ScriptedServer:
        return ScriptedServer(store=store, state_keys=KEYS, limits=Limits(message_bytes=2_000))

    async with replica_group(make=make) as group:
        session = await session_in(group)
        first = copy_in(group, 0, session)
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "send", discard)
            stream = await group.webs[1].open(session=session)
            for number in range(101):
                level = "info" if number % 2 else "error"
                await group.webs[1].call("logging/setLevel", {"level": level}, session=session)
        first.mail.catch_up()
        await trio.sleep(2)
        assert not first.speaker.here
        assert first.server_session.session.terms.log_level == "error"
        group.servers[2].server.notify_list_changed("tools")
        while (await stream.message())["method"] != TOOLS:
            pass
        second = copy_in(group, 1, session)  # the copy with a stream loses mail too
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "send", discard)
            for _ in range(101):
                await group.webs[2].call("logging/setLevel", {"level": level}, session=session)
                level = "info" if level == "error" else "error"
        second.mail.catch_up()
        await trio.sleep(2)
        assert second.speaker.here
        group.servers[2].server.notify_list_changed("tools")
        while (await stream.message())["method"] != TOOLS:
            pass


async def test_the_end_of_a_handshake_waits_for_the_store(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_group() as group:
        session = await session_in(group, initialized=False)
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "replace", fail)
            await group.webs[0].post(notification("notifications/initialized"), session=session)
            await trio.sleep(3)
        await trio.sleep(3)
        stream = await group.webs[1].open(play_call("ask"), session=session)
        question = await stream.message()
        await group.webs[2].post(response(question["id"], ANSWER), session=session)
        assert text_of(await stream.response()) == "done"


async def test_a_copy_that_lost_mail_speaks_again_without_a_stream(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(store: Any) -> ScriptedServer:
        return ScriptedServer(store=store, state_keys=KEYS, limits=Limits(message_bytes=2_000))

    async with replica_group(make=make) as group:
        session = await session_in(group)
        await group.webs[1].call("ping", session=session)
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "send", discard)
            for number in range(101):
                level = "info" if number % 2 else "error"
                await group.webs[1].call("logging/setLevel", {"level": level}, session=session)
        copy_in(group, 0, session).mail.catch_up()
        await trio.sleep(2)
        for web in group.webs:
            assert await subscribe(web, "r://1", session) is None


async def test_a_copy_that_lost_mail_reads_the_row_when_there_is_room(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, too many items waited for the store."""

    async def look() -> None:
        looked.append(trio.current_time())

    looked: list[float] = []
    async with replica_group() as group:
        copy = copy_in(group, 0, await session_in(group))
        monkeypatch.setattr(copy, "_look_again", look)
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "append", fail)
            while copy.mail.put({"kept": True}):
                pass
            copy._mail_lost()
            await trio.sleep(20)
        assert looked == []
        await trio.sleep(10)
        assert len(looked) == 1


@pytest.mark.parametrize(("away", "status"), [(3, 202), (10, 503)])
async def test_an_answer_waits_for_the_store(
    away: float, status: int, autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def come_back() -> None:
        await trio.sleep(away)
        patch.undo()

    async with replica_group() as group, trio.open_nursery() as nursery:
        session = await session_in(group)
        await group.webs[2].call("ping", session=session)
        stream = await group.webs[1].open(play_call("ask"), session=session)
        question = await stream.message()
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "append", fail)
            nursery.start_soon(come_back)
            answered = await group.webs[2].post(response(question["id"], ANSWER), session=session)
            assert (answered.status, answered.headers.get("Retry-After")) == (status, "1" if status == 503 else None)
            await trio.sleep(away)
        assert text_of(await stream.response()) == "done"  # also if the client does not send the answer again


@pytest.mark.parametrize("operation", ["append", "replace"])
async def test_an_accepted_message_outlives_its_replica(
    operation: str, autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer needs the mail; the end of the handshake needs the row too."""

    async with replica_group() as group:
        session = await session_in(group, initialized=operation == "append")
        await group.webs[2].call("ping", session=session)
        if operation == "append":
            stream = await group.webs[1].open(play_call("ask"), session=session)
            message = response((await stream.message())["id"], ANSWER)
        else:
            message = notification("notifications/initialized")
        with monkeypatch.context() as patch:
            patch.setattr(group.store, operation, fail)
            for _ in range(2):  # also if the client sends it again
                status = (await group.webs[2].post(message, session=session)).status
            await group.crash(2)
        if status != 202:
            assert (await group.webs[0].post(message, session=session)).status == 202
        if operation == "replace":
            stream = await group.webs[1].open(play_call("ask"), session=session)
            await group.webs[0].post(response((await stream.message())["id"], ANSWER), session=session)
        with trio.fail_after(100):
            assert text_of(await stream.response()) == "done"


async def test_no_answer_is_sent_before_the_store_has_its_change(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another call of the session sends its messages in the meantime, and could send this answer too."""

    async def fail_late(*args: Any, **options: Any) -> Any:
        await trio.sleep(0.5)
        raise StoreFailed("the store is away")

    async with replica_group() as group:
        session = await session_in(group)
        stream = await group.webs[1].open(play_call("wait x", "progress", "wait y"), session=session)

        async def go_on() -> None:
            await trio.sleep(0.2)
            group.servers[1].go["x"].set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on)
            monkeypatch.setattr(group.store, "get", fail_late)
            level = request("logging/setLevel", {"level": "info"}, id=77, revision=D)
            assert (await group.webs[1].post(level, session=session)).status == 503
        group.servers[1].go["y"].set()
        assert text_of(await stream.response()) == "done"


async def test_a_slow_store_does_not_slow_a_stream(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = None

    async def slow(*args: Any, **options: Any) -> Any:
        await trio.sleep(100)
        return await append(*args, **options)  # type: ignore[misc]

    async with replica_group() as group:
        session = await session_in(group)
        append = group.store.append
        monkeypatch.setattr(group.store, "append", slow)
        start = trio.current_time()
        answer = await group.webs[0].post(play_call("many 50"), session=session)
        assert len(answer.messages) == 51
        assert trio.current_time() - start < 1


@pytest.mark.full
async def test_an_idle_stream_can_be_resumed_after_hours(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        stream = await group.webs[0].open(session=session)
        await stream.event()  # the priming event
        for number in (1, 1, 2, 0):
            after = stream.last_event_id
            await trio.sleep(2 * 3600)
            await stream.aclose()
            await trio.sleep(60)
            stream = await group.webs[number].open(session=session, after=after)
            with trio.move_on_after(5):
                assert (await stream.event()).data == b""  # another priming event, from another replica
        group.servers[1].server.notify_list_changed("tools")
        assert (await stream.message())["method"] == TOOLS


@pytest.mark.full
async def test_a_stream_that_was_resumed_too_often_cannot_be_resumed(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        session = await session_in(group, C)
        stream = await group.webs[0].open(session=session)
        group.servers[1].server.notify_list_changed("tools")
        await stream.message()
        after = stream.last_event_id
        headers = {"Accept": "text/event-stream", "Mcp-Session-Id": session, "Last-Event-ID": after}
        for number in range(101):
            await stream.aclose()
            stream = await group.webs[number % 2].open(session=session, after=after)
        await stream.aclose()
        assert (await group.webs[2].send("GET", "/mcp", headers)).status == 400


async def test_a_session_is_deleted_if_its_client_did_not_get_the_id(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        params = {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        message = request("initialize", params, revision=D)
        fields = group.webs[0].headers_for(message, D, None)
        link = await group.webs[0].link()
        await link.ask("POST", "/mcp", {**group.webs[0].headers, **fields}, json.dumps(message).encode())
        await link.aclose()
        await trio.sleep(1)
        assert [row for row in group.store._rows if row[0].startswith("session")] == []


def copy_in(group: ReplicaGroup, number: int, session: str) -> Any:
    """The copy of a session in one replica."""
    (run,) = group.servers[number].server._runs
    endpoints = [each for each in run.connections if hasattr(each, "copies")]
    return endpoints[0].copies[key_of(session)]


async def test_a_stream_resumed_while_the_store_is_away_is_cut(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(channels: Any) -> Any:
        raise StoreFailed("the store is away")

    async def away(*args: Any) -> Any:
        raise StoreFailed("the store is away")

    async with replica_group() as group:
        session = await session_in(group)
        stream = await group.webs[1].open(play_call("progress", "wait x"), session=session)
        await stream.message()
        await stream.aclose()
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "receive", fail)
            group.webs[2].expect(play_call(), session)
            resumed = await group.webs[2].open(session=session, after=stream.last_event_id)
            with pytest.raises(Cut):
                await resumed.response()
        resumed = await group.webs[2].open(session=session, after=stream.last_event_id)
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "read", away)
            await trio.sleep(20)
        assert [each.module for each in caplog.records].count("shared_endpoint") == 1
        group.servers[1].go["x"].set()
        assert text_of(await resumed.response()) == "done"


async def test_a_session_without_room_in_the_store_affects_no_other(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_group(number=1) as group:
        full, other = [await group.webs[0].initialize(D) for _ in range(2)]
        append = group.store.append

        async def refuse(stream: str, *args: Any, **options: Any) -> Any:
            if key_of(full) in stream:
                raise StoreFull("max_bytes")
            return await append(stream, *args, **options)

        monkeypatch.setattr(group.store, "append", refuse)
        (row,) = [row for row in group.store._rows.values() if row.key == key_of(other)]
        await trio.sleep(row.expires / 4 + 2)
        assert (await group.store.get(row.kind, key_of(full))).expires > row.expires
        assert (await group.store.get(row.kind, row.key)).expires > row.expires


@pytest.mark.parametrize("at", [0, 1])
async def test_requests_during_a_hanging_store_do_not_wait_for_each_other(
    at: int, autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a replica with a copy that does not know of the end of the handshake, and at one without a copy."""

    async def wait(*args: Any, **options: Any) -> Any:
        await trio.sleep_forever()

    async with replica_group() as group:
        session = await session_in(group, initialized=False)
        for name in ("get", "read", "append"):
            monkeypatch.setattr(group.store, name, wait)
        with trio.fail_after(1.5):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(partial(group.webs[at].post, request("ping", revision=D), session=session))


async def test_a_message_waits_only_for_the_messages_before_it(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the later ones, although they never stop."""
    completion = encode(Notification("notifications/elicitation/complete", {"elicitationId": "7"})).decode()
    async with replica_group() as group, trio.open_nursery() as nursery:
        session = await session_in(group)
        await group.webs[1].call("ping", session=session)
        append, mail = group.store.append, copy_in(group, 1, session).mail

        async def slow(*args: Any, **options: Any) -> Any:
            await trio.sleep(0.05)
            return await append(*args, **options)

        async def talk() -> None:
            while True:
                mail.put({"say": completion})
                await trio.sleep(0.04)

        monkeypatch.setattr(group.store, "append", slow)
        nursery.start_soon(talk)
        await trio.sleep(1)
        cancelled = notification("notifications/cancelled", {"requestId": 7})
        with trio.fail_after(2):
            assert (await group.webs[1].post(cancelled, session=session)).status == 202
        nursery.cancel_scope.cancel()


async def test_messages_that_wait_for_the_store_are_limited(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(store: Any) -> ScriptedServer:
        return ScriptedServer(store=store, state_keys=KEYS, limits=Limits(message_bytes=40_000))

    async with replica_group(make=make) as group:
        session = await session_in(group, B)
        await group.webs[2].call("ping", session=session)
        copy = copy_in(group, 2, session)
        monkeypatch.setattr(group.store, "append", fail)
        batch = [notification("notifications/cancelled", {"requestId": 1000 + number}) for number in range(150)]
        assert (await group.webs[2].post(batch, session=session)).status == 503
        assert len(copy.mail.waiting) == 100
        for _ in range(3):
            answer = response(1 << 30, {"content": "x" * 15_000})
            assert (await group.webs[2].post(answer, session=session)).status == 503
        assert len(copy.mail.waiting) == 100


async def test_one_task_writes_the_state_of_a_session(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0

    async def fail(*args: Any, **options: Any) -> Any:
        nonlocal tried
        tried += 1
        raise StoreFailed("the store is away")

    async with replica_group() as group:
        session = await session_in(group)
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "replace", fail)
            for number in range(20):
                level = request("logging/setLevel", {"level": ["info", "error"][number % 2]}, revision=D)
                assert (await group.webs[0].post(level, session=session)).status == 503
            tried = 0
            await trio.sleep(10)
            assert tried < 15
        await trio.sleep(2)
        (row,) = [row for row in group.store._rows.values() if row.key == key_of(session)]
        assert json.loads(row.body)["level"] == "error"


async def test_messages_of_a_copy_that_does_not_speak_keep_their_order(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        session = await session_in(group)
        await group.webs[1].call("ping", session=session)
        copy = copy_in(group, 1, session)
        stream = await group.webs[0].open(session=session)
        for number in range(10):
            copy._queue(Notification("notifications/elicitation/complete", {"elicitationId": str(number)}), 0)
        ids = [(await stream.message())["params"]["elicitationId"] for _ in range(10)]
        assert ids == [str(number) for number in range(10)]


async def test_a_session_that_makes_room_leaves_no_mail(autojump_clock: MockClock, replica_group: Any) -> None:
    def make(store: Any) -> ScriptedServer:
        return ScriptedServer(store=store, state_keys=KEYS, limits=Limits(sessions=4))

    async with replica_group(make=make) as group:
        for number in range(12):
            await group.webs[number % 3].initialize(D)
            await trio.sleep(1)
        mails = [name for name in group.store._streams if name.startswith("mail of")]
        assert len(mails) == 4


async def test_a_refused_session_leaves_no_mail(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*args: Any, **options: Any) -> Any:
        raise StoreFull("total")

    params = {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    async with replica_group() as group:
        monkeypatch.setattr(group.store, "add", full)
        for _ in range(3):
            assert (await group.web.post(request("initialize", params, revision=D), revision=D)).status == 503
        assert not group.store._streams


async def test_an_error_of_the_store_shows_no_address_to_clients(
    autojump_clock: MockClock, replica_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any, **options: Any) -> Any:
        raise StoreFailed("redis://secret:6379/0 does not work")

    async with replica_group() as group:
        session = await session_in(group)
        await group.webs[1].call("ping", session=session)
        for name in ("get", "add", "replace", "append", "read", "send", "delete"):
            monkeypatch.setattr(group.store, name, fail)
        params = {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        answers = [
            await group.webs[2].post(request("ping", revision=D), session=session),
            await group.webs[1].post(request("logging/setLevel", {"level": "info"}, revision=D), session=session),
            await group.webs[1].post(request("resources/subscribe", {"uri": "r://1"}, revision=D), session=session),
            await group.webs[1].end(session),
            await group.webs[1].post(request("initialize", params, revision=D), revision=D),
        ]
        for answer in answers:
            assert b"the store of the replicas does not work" in answer.body
            assert b"secret" not in answer.body
