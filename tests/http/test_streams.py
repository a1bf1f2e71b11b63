"""Responses over HTTP: JSON or streams, resumption of broken streams, and slow readers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.http.client import Cut, notification
from tests.http.scripted_server import (
    KEEP_ALIVE,
    TOOLS,
    B,
    C,
    D,
    E,
    ScriptedServer,
    begin_post,
    methods,
    open_session,
    play_call,
    session_revisions,
    small_pipe,
    streamable_revisions,
    text_of,
    wait_until_idle,
)
from tests.http.served import served
from tests.requirements import req
from tests.server.raw_client import CANCELLED, PROGRESS
from trio_mcp import Limits
from trio_mcp.core.http import SseEvent

# JSON or a stream


@req("http-18", "http-121", "http-22", "http-20", "http-27")
@streamable_revisions
@pytest.mark.parametrize(
    ("steps", "kind", "before"),
    [
        ([], "application/json", []),
        (["wait soon"], "application/json", []),
        (["progress"], "text/event-stream", [PROGRESS]),
        (["progress", "progress", "wait soon", "progress"], "text/event-stream", [PROGRESS] * 3),
        (["wait soon", "progress"], "text/event-stream", [PROGRESS]),
        (["fail on purpose"], "application/json", []),
    ],
)
async def test_an_answer_is_a_stream_if_a_message_precedes_it(
    revision: str, steps: list[str], kind: str, before: list[str], autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web, trio.open_nursery() as nursery:
        session = await open_session(web, revision)

        async def go_on() -> None:
            await trio.sleep(5)
            scripted.go["soon"].set()

        nursery.start_soon(go_on)
        answer = await web.post(play_call(*steps, revision=revision), revision=revision, session=session)
        assert (answer.status, answer.type) == (200, kind)
        assert methods(answer.messages) == [*before, "the answer"]
        assert answer.result.get("isError", False) is ("fail on purpose" in steps)


@streamable_revisions
async def test_a_client_that_accepts_only_streams_gets_a_stream(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server) as web:
        session = await open_session(web, revision)
        how: dict[str, Any] = {"revision": revision, "session": session, "headers": {"Accept": "text/event-stream"}}
        answer = await web.post(play_call("say hello", revision=revision), **how)
        assert (answer.type, text_of(answer.message)) == ("text/event-stream", "hello")
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert "no-transform" in answer.headers["Cache-Control"]


@streamable_revisions
@pytest.mark.parametrize("how", ["the client accepts JSON only", "the server sends JSON only"])
async def test_json_responses_drop_reports_and_fail_questions(
    revision: str, how: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    options: dict[str, Any] = {"json_only": True} if how.startswith("the server") else {}
    headers = {} if options else {"Accept": "application/json"}
    async with served(scripted.server, **options) as web:
        session = await open_session(web, revision)
        more: dict[str, Any] = {"revision": revision, "session": session, "headers": headers}
        answer = await web.post(play_call("progress", "log x", "sleep 60", "progress", revision=revision), **more)
        assert (answer.type, text_of(answer.message)) == ("application/json", "done")
        if revision in (D, E):
            asked = await web.post(play_call("ask", id=2, revision=revision), **more)
            assert asked.type == "application/json"
            if revision == E:
                assert asked.result["resultType"] == "input_required"
            else:
                assert asked.code == -32603
                assert "json_only" in asked.message["error"]["message"]


@req("http-107")
@streamable_revisions
async def test_a_long_call_becomes_a_stream_at_the_first_keep_alive(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server) as web:
        session = await open_session(web, revision)
        began = trio.current_time()
        async with web.stream(play_call("sleep 50", revision=revision), revision=revision, session=session) as stream:
            assert trio.current_time() - began == KEEP_ALIVE
            assert stream.headers["X-Accel-Buffering"] == "no"
            assert text_of(await stream.response()) == "done"
        assert trio.current_time() - began == 50


@req("http-113")
@streamable_revisions
async def test_an_idle_stream_gets_a_comment_every_fifteen_seconds(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server) as web:
        session = await open_session(web, revision)
        began = trio.current_time()
        message = play_call("progress", "sleep 20", "progress", "sleep 50", revision=revision)
        async with web.stream(message, revision=revision, session=session) as stream:
            await stream.response()
            comments = [time - began for time, data in stream.link.chunks if data == b": keep-alive\n\n"]
        assert comments == [15, 35, 50, 65]  # the time starts again after each message


@req("http-113")
@pytest.mark.parametrize("keep_alive", [1.0, 7.5])
async def test_the_keep_alive_interval_is_an_option(keep_alive: float, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server, keep_alive=keep_alive) as web:
        session = await web.initialize(D)
        async with web.stream(session=session) as changes:
            with trio.move_on_after(10 * keep_alive + 0.1):
                await changes.message()
            assert changes.comments == 10


@streamable_revisions
async def test_the_head_of_a_certain_stream_is_sent_before_its_messages(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await open_session(web, revision)
        began = trio.current_time()
        how: dict[str, Any] = {"revision": revision, "session": session, "headers": {"Accept": "text/event-stream"}}
        async with web.stream(play_call("wait go", revision=revision), **how) as stream:
            assert trio.current_time() == began
            scripted.go["go"].set()
            assert text_of(await stream.response()) == "done"


@streamable_revisions
@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\U0001f600", "\xa0", "é"])
async def test_no_character_breaks_an_event_in_two(revision: str, character: str, autojump_clock: MockClock) -> None:
    """Some clients (httpx-sse 0.4.0) end a line at each character at which `str.splitlines` splits."""
    text = f"one{character}two"
    async with served(ScriptedServer().server) as web:
        session = await open_session(web, revision)
        message = play_call("progress", f"say {text}", revision=revision)
        answer = await web.post(message, revision=revision, session=session)
        assert answer.type == "text/event-stream"
        assert text_of(answer.message) == text
        lines = answer.body.decode().splitlines()
        assert all(line == "" or line.split(":")[0] in ("event", "data", "id") for line in lines), lines


@streamable_revisions
@pytest.mark.parametrize("steps", [[], ["progress"]], ids=["JSON", "a stream"])
async def test_eight_mebibytes_pass_in_both_directions(
    revision: str, steps: list[str], autojump_clock: MockClock
) -> None:
    text = "é" * (4 * 1024 * 1024)
    async with served(ScriptedServer().server) as web:
        session = await open_session(web, revision)
        message = play_call(*steps, f"say {text}", revision=revision)
        answer = await web.post(message, revision=revision, session=session)
        assert text_of(answer.message) == text


@streamable_revisions
async def test_a_too_long_message_is_refused_with_the_limit(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer(limits=Limits(message_bytes=100_000)).server) as web:
        session = await open_session(web, revision)
        message = play_call("say " + "x" * 100_000, revision=revision)
        answer = await web.post(message, revision=revision, session=session)
        assert answer.status == 413
        assert "Limits.message_bytes" in answer.json["error"]["message"]


# Revisions and their events


@req("http-46", "http-115", "http-123")
@pytest.mark.parametrize(
    ("revision", "shape"),
    [(B, ["1-0", "1-1", "1-2"]), (C, ["1-0", "1-1", "1-2"]), (D, ["1-0", "1-1", "1-2", "1-3"]), (E, [None] * 3)],
)
async def test_event_ids_and_priming_events_depend_on_the_revision(
    revision: str, shape: list[str | None], autojump_clock: MockClock
) -> None:
    async with served(ScriptedServer().server) as web:
        session = await open_session(web, revision)
        message = play_call("progress", "progress", revision=revision)
        answer = await web.post(message, revision=revision, session=session)
        assert [event.id for event in answer.events] == shape
        primes = [event for event in answer.events if not event.data]
        assert primes == ([SseEvent(b"", id="1-0")] if revision == D else [])
        assert all(event.event == "message" for event in answer.events)
        if revision == E:
            assert "Mcp-Session-Id" not in answer.headers


@req("http-46")
@session_revisions
async def test_a_standalone_stream_is_primed(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        async with web.stream(session=session) as changes:
            scripted.server.notify_list_changed("tools")
            events = [await changes.event()]
            if revision == D:
                assert events[0].data == b""
                events.append(await changes.event())
            assert json.loads(events[-1].data)["method"] == TOOLS
            assert events[-1].id is not None


@req("http-40", "http-39")
@session_revisions
async def test_no_two_events_of_a_session_share_an_id(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web, trio.open_nursery() as nursery:
        session = await web.initialize(revision)
        seen: list[str] = []

        async def read(message: Any) -> None:
            async with web.stream(message, session=session) as stream:
                async for event in stream:
                    assert event.id is not None
                    seen.append(event.id)
                    if message is None and event.data:
                        return

        nursery.start_soon(read, None)
        for id in range(1, 6):
            nursery.start_soon(read, play_call("progress", "wait go", "progress", "many 3", id=id))
        await wait_until_idle()
        scripted.go["go"].set()
        scripted.server.notify_list_changed("tools")
    primed = revision == D
    assert len(seen) == 5 * (1 + 1 + 3 + 1 + primed) + 1 + primed
    assert len(set(seen)) == len(seen)


# Resumption of broken streams


STEPS = ("progress", "progress", "progress", "say the end")


@req("http-30", "http-42", "http-43", "http-45")
@session_revisions
@pytest.mark.parametrize("waits", [False, True], ids=["finished", "running"])
@pytest.mark.parametrize("after", range(5))
async def test_a_stream_can_be_resumed_after_every_event(
    revision: str, after: int, waits: bool, autojump_clock: MockClock
) -> None:
    """The client disconnects after each event in turn, and resumes by GET: each message comes exactly once."""
    scripted = ScriptedServer()
    events: list[tuple[str | None, bytes]] = []
    steps = [*STEPS[:3], "wait go", *STEPS[3:]] if waits else list(STEPS)
    last = 4 if revision == D else 3  # events before the answer
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        stream = await web.open(play_call(*steps), session=session)
        count = min(after + 1, last if waits else last + 1)
        for _ in range(count):
            event = await stream.event()
            events.append((event.id, event.data))
        await stream.aclose()
        await wait_until_idle()
        if waits:
            assert scripted.ended == []
        async with web.stream(session=session, after=events[-1][0]) as rest:
            if waits:
                await wait_until_idle()
                scripted.go["go"].set()
            events += [(event.id, event.data) async for event in rest]
            assert rest.ended
        assert scripted.cancelled == []
    assert len({id for id, _ in events}) == last + 1
    assert [data for _, data in events if data][-1] == events[-1][1]
    messages = [json.loads(data) for _, data in events if data]
    assert methods(messages) == [PROGRESS] * 3 + ["the answer"]
    assert [each["params"]["progress"] for each in messages[:3]] == [1, 2, 3]
    assert text_of(messages[-1]) == "the end"


@req("http-42")
@session_revisions
async def test_a_stream_can_be_resumed_many_times(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        stream = await web.open(
            play_call(*(step for n in range(9) for step in ("progress", f"wait {n}"))), session=session
        )
        received: list[dict[str, Any]] = []
        for n in range(9):
            received.append(await stream.message())
            await stream.aclose()
            if n % 2:
                scripted.go[str(n)].set()  # the report is sent while the client is away
                await wait_until_idle()
            stream = await web.open(session=session, after=stream.last_event_id)
            scripted.go[str(n)].set()
        received += await stream.rest()
        assert [each["params"]["progress"] for each in received[:-1]] == list(range(1, 10))
        assert text_of(received[-1]) == "done"


@req("http-28")
@session_revisions
async def test_a_lost_connection_cancels_nothing_in_a_session(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        link, _ = await begin_post(web, play_call("wait go"), session)
        await link.aclose()
        await wait_until_idle()
        assert scripted.cancelled == []
        scripted.go["go"].set()
        await wait_until_idle()
        assert scripted.ended == [""]
        assert (await web.call("ping", session=session)).result == {}


@req("http-43")
@session_revisions
async def test_a_resumed_stream_has_no_messages_of_other_streams(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        one = await web.open(play_call("progress", "wait a", "progress", "say one", id="one"), session=session)
        two = await web.open(play_call("progress", "wait b", "progress", "say two", id="two"), session=session)
        changes = await web.open(session=session)
        scripted.server.notify_list_changed("tools")
        for stream in (one, two, changes):
            await stream.message()
            await stream.aclose()
        scripted.go["a"].set()
        scripted.go["b"].set()
        scripted.server.notify_list_changed("resources")
        await wait_until_idle()
        await trio.sleep(1)
        for stream, call in ((one, "one"), (two, "two")):
            async with web.stream(session=session, after=stream.last_event_id) as rest:
                messages = await rest.rest()
                assert methods(messages) == [PROGRESS, "the answer"]
                assert messages[0]["params"]["progressToken"] == f"token of {call}"
                assert (messages[1]["id"], text_of(messages[1])) == (call, call)
        async with web.stream(session=session, after=changes.last_event_id) as rest:
            assert (await rest.message())["method"] == "notifications/resources/list_changed"


@req("http-43", "http-42")
@session_revisions
@pytest.mark.parametrize("id", ["1-99", "99-0", "x", "1-0x", "-", "1--1", " 1-0 ", "1" * 900])
async def test_an_unknown_event_id_is_refused(revision: str, id: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server) as web:
        session = await web.initialize(revision)
        await web.post(play_call("progress"), session=session)
        fields = {**web.headers_for(None, revision, session), "Content-Type": None, "Last-Event-ID": id}
        if id == " 1-0 ":
            fields["Last-Event-ID"] = "1-0 1-0"
        answer = await web.send("GET", "/mcp", fields)
        assert answer.status == 400
        assert "Last-Event-ID" in answer.json["error"]["message"]


@req("http-42")
@session_revisions
async def test_a_resumption_after_discarded_events_is_refused(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer(limits=Limits(replay_events=5)).server) as web:
        session = await web.initialize(revision)
        stream = await web.open(play_call("many 20", "say the end"), session=session)
        first = (await stream.event()).id
        received = [each async for each in stream]
        fields = {**web.headers_for(None, revision, session), "Content-Type": None, "Last-Event-ID": first}
        answer = await web.send("GET", "/mcp", fields)
        assert answer.status == 400
        assert "no longer kept" in answer.json["error"]["message"]
        async with web.stream(session=session, after=received[-4].id) as rest:
            assert [event.id async for event in rest] == [each.id for each in received[-3:]]


@req("http-43")
@session_revisions
async def test_an_event_id_of_another_session_is_refused(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server) as web:
        mine, other = await web.initialize(revision), await web.initialize(revision)
        answer = await web.post(play_call("progress", "say a secret"), session=mine)
        fields = {**web.headers_for(None, revision, other), "Content-Type": None}
        refused = await web.send("GET", "/mcp", {**fields, "Last-Event-ID": answer.events[0].id})
        assert refused.status == 400
        assert b"secret" not in refused.body


@req("http-42")
@session_revisions
async def test_a_resumption_replaces_a_connection_that_seems_alive(revision: str, autojump_clock: MockClock) -> None:
    """If the network fails, the client can notice it before the server does."""
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        old = await web.open(play_call("progress", "wait go", "progress"), session=session)
        await old.message()
        async with web.stream(session=session, after=old.last_event_id) as new:
            await wait_until_idle()
            scripted.go["go"].set()
            assert methods(await new.rest()) == [PROGRESS, "the answer"]
        with pytest.raises(Cut):
            await old.message()


@req("http-47", "http-49")
@pytest.mark.parametrize("steps", [[], ["progress"]], ids=["at once", "in a stream"])
async def test_a_client_reconnects_after_a_hang_up(steps: list[str], autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(D)
        began = trio.current_time()
        async with web.stream(play_call(*steps, "hang-up 2.5", "sleep 60", "progress"), session=session) as stream:
            events = [event async for event in stream]
            assert stream.ended
            assert trio.current_time() == began
        assert scripted.answers == [True]
        assert stream.retry == 2500
        assert events[-1].data == b""
        assert events[-1].id == stream.last_event_id
        received = list(stream.seen)
        times = 0
        while not received or "result" not in received[-1]:
            await trio.sleep(2.5)
            with trio.move_on_after(1):
                async with web.stream(session=session, after=stream.last_event_id) as stream:
                    received += await stream.rest()
            times += 1
        assert methods(received) == [*([PROGRESS] * len(steps)), PROGRESS, "the answer"]
        assert times == 18


@streamable_revisions
async def test_a_client_that_cannot_resume_is_not_asked_to_reconnect(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    accepts = ["application/json"] if revision == D else ["application/json", "application/json, text/event-stream"]
    async with served(scripted.server) as web:
        session = await open_session(web, revision)
        for accept in accepts:
            message = play_call("hang-up 2", "progress", revision=revision)
            answer = await web.post(message, revision=revision, session=session, headers={"Accept": accept})
            assert text_of(answer.message) == "done"
    assert scripted.answers == [False] * len(accepts)


@req("http-111", "http-115")
async def test_the_modern_revision_has_no_resumption(autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server, check=False) as web:
        session = await web.initialize(D)
        answered = await web.post(play_call("progress"), session=session)
        fields = {"Mcp-Session-Id": session, "Last-Event-ID": answered.events[0].id}
        answer = await web.post(play_call("say hello", revision=E), revision=E, headers=fields)
        assert text_of(answer.message) == "hello"
        refused = await web.send("GET", "/mcp", {**fields, "MCP-Protocol-Version": E, "Accept": "text/event-stream"})
        assert refused.status == 405


# Slow readers


@req("http-20")
@streamable_revisions
async def test_a_slow_reader_gets_some_reports_and_the_last_one(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(write_seconds=10_000))
    async with served(scripted.server, streams=small_pipe) as web:
        session = await open_session(web, revision)
        stream = await web.open(play_call("many 2000", revision=revision), revision=revision, session=session)
        await stream.message()
        await trio.sleep(200)
        assert scripted.reported == 2000
        messages = await stream.rest()
        reports = [each["params"]["progress"] for each in messages[:-1]]
        assert reports == [*range(2, len(reports) + 1), 2000]
        assert len(reports) < 2 * Limits().outgoing + 10
        assert text_of(messages[-1]) == "done"


@streamable_revisions
async def test_a_reader_that_stops_for_too_long_is_dropped(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(write_seconds=60))
    async with served(scripted.server, streams=small_pipe) as web:
        session = await open_session(web, revision)
        steps = ("many 2000", "wait never") if revision == E else ("many 2000",)
        stream = await web.open(play_call(*steps, revision=revision), revision=revision, session=session)
        await stream.message()
        await trio.sleep(200)
        if revision == E:
            assert scripted.cancelled == [""]
        else:
            assert scripted.ended == [""]  # the log keeps the messages for a resumption
        with pytest.raises(Cut):
            await stream.rest()


@streamable_revisions
async def test_a_slow_reader_does_not_delay_other_requests(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, streams=small_pipe) as web:
        session = await open_session(web, revision)
        slow = await web.open(play_call("many 2000", revision=revision), revision=revision, session=session)
        for n in range(20):
            began = trio.current_time()
            message = play_call("progress", id=n + 2, revision=revision)
            answer = await web.post(message, revision=revision, session=session)
            assert answer.type == "text/event-stream"
            assert trio.current_time() == began
        await slow.aclose()


@req("http-30", "http-42")
@session_revisions
async def test_unwritten_messages_of_a_broken_connection_are_not_lost(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, streams=small_pipe) as web:
        session = await web.initialize(revision)
        stream = await web.open(play_call("many 100", "wait go"), session=session)
        received = [await stream.message() for _ in range(3)]
        await wait_until_idle()
        await stream.aclose()
        await wait_until_idle()
        scripted.go["go"].set()
        async with web.stream(session=session, after=stream.last_event_id) as rest:
            received += await rest.rest()
        assert [each["params"]["progress"] for each in received[:-1]] == list(range(1, 101))
        assert text_of(received[-1]) == "done"


@session_revisions
async def test_unwritten_messages_of_a_cancelled_call_are_dropped(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, streams=small_pipe) as web:
        session = await web.initialize(revision)
        stream = await web.open(play_call("many 300", "wait never", id=7), session=session)
        await stream.message()
        await wait_until_idle()
        await web.post(notification(CANCELLED, {"requestId": 7}), session=session)
        await stream.rest()
        assert scripted.reported == 300
        assert len(stream.seen) < 290  # the reports that still waited for room in the pipe are dropped


@req("http-71")
async def test_an_unknown_method_is_an_error_with_streams_only(autojump_clock: MockClock) -> None:
    headers = {"Accept": "text/event-stream"}
    async with served(ScriptedServer().server) as web:
        answer = await web.call("no/such", headers=headers)
        assert (answer.status, answer.type, answer.code) == (404, "application/json", -32601)
        session = await web.initialize(D)
        answer = await web.call("no/such", session=session, headers=headers)
        assert (answer.status, answer.type, answer.code) == (200, "text/event-stream", -32601)
