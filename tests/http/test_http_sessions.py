"""Sessions over HTTP: what they keep, on which stream it goes out, and how they end."""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.http.client import notification, request, response
from tests.http.recorder import EndpointClient, RecordedExchange, Recorder, endpoint_of
from tests.http.scripted_server import (
    SESSIONS,
    SSE_PATHS,
    TOOLS,
    UPDATED,
    B,
    D,
    ScriptedServer,
    methods,
    play_call,
    session_revisions,
)
from tests.requirements import req
from tests.server.raw_client import CANCELLED, PROGRESS
from trio_mcp import Context, Limits, Server
from trio_mcp.core import REVISIONS, ChangeKind
from trio_mcp.core.http import MemoryEventLog, SessionFacts
from trio_mcp.server.http import Sessions

TIMEOUT = Limits().session_idle_seconds


class Log(MemoryEventLog):
    """What is done to it must make sense, and is counted."""

    made: list[Log]

    def __init__(self) -> None:
        super().__init__()
        self.cleared = 0
        self.events: list[bytes] = []

    def append(self, stream: str, data: Sequence[bytes]) -> Sequence[str]:
        assert not self.cleared
        self.events += data
        return super().append(stream, data)

    def open(self) -> str:
        assert not self.cleared
        return super().open()

    def finish(self, stream: str) -> None:
        assert not self.cleared
        super().finish(stream)

    def clear(self) -> None:
        self.cleared += 1
        super().clear()


def logs() -> tuple[list[Log], Callable[[str], Log]]:
    made: list[Log] = []

    def make(session: str) -> Log:
        made.append(Log())
        return made[-1]

    return made, make


async def close(door: EndpointClient, session: str) -> RecordedExchange:
    visit = await door.ask("DELETE", None, session)
    await wait_all_tasks_blocked()
    return visit


async def changed(scripted: ScriptedServer) -> None:
    scripted.server.notify_list_changed("tools")
    await trio.sleep(1)


async def cancelled(door: EndpointClient, session: str, id: Any) -> None:
    await door.post(notification(CANCELLED, {"requestId": id}), session)


# The stream of its own.


@req("http-39", "http-35")
@session_revisions
async def test_the_newest_stream_that_is_open_gets_each_message(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        await changed(scripted)  # waits for a stream
        streams = [await door.get(session) for _ in range(3)]
        await changed(scripted)
        streams[2].leave()
        await changed(scripted)
        streams[0].leave()
        await changed(scripted)
        streams[1].leave()
        await changed(scripted)
        call = await door.post(play_call("tools", "sleep 1", "say x", revision=revision), session)
        await trio.sleep(2)
        assert call.response.json["result"]["content"][0]["text"] == "x"  # not on the stream of a call
        last = await door.get(session)
        told = [methods(each.response.messages) for each in (*streams, last)]
        assert told == [[TOOLS], [TOOLS, TOOLS], [TOOLS], [TOOLS]]
        # None of it twice, though three streams are no longer open; and the first is not: its client has another one.
        assert streams[0].response.last_id != streams[1].response.last_id


@req("http-42", "http-43")
@session_revisions
async def test_an_older_stream_that_is_resumed_takes_nothing_from_a_newer_one(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        older = await door.get(session)
        await changed(scripted)
        newer = await door.get(session)
        older.leave()
        again = await door.get(session, older.response.last_id)
        await changed(scripted)
        assert again.response.status == 200
        assert methods(newer.response.messages) == [TOOLS]
        assert again.response.messages == []
        newer.leave()
        await changed(scripted)
        assert methods(again.response.messages) == [TOOLS]
        # A client that opens another stream instead of coming back has left the old one.
        await door.get(session)
        back = await door.get(session, newer.response.last_id)
        assert (back.response.status, back.response.events, back.response.ended) == (200, [], True)


@session_revisions
async def test_what_waits_for_a_stream_is_merged_and_bounded(revision: str, autojump_clock: MockClock) -> None:
    limits = Limits(outgoing=2, listener_changes=9)
    scripted = ScriptedServer(limits=limits)
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        for n in range(6):
            subscribe = request("resources/subscribe", {"uri": f"r://{n}"}, n, revision=revision)
            assert (await door.post(subscribe, session)).response.json["result"] == {}
        # Notices of no change: each of these has asked something, and takes its question back.
        for n in range(9):
            call = await door.post(play_call("roots", id=f"call {n}", revision=revision), session)
            call.leave()
            await cancelled(door, session, f"call {n}")
        for _ in range(5):
            for n in range(6):
                scripted.server.notify_resource_updated(f"r://{n}")
            await changed(scripted)
        stream = await door.get(session)
        assert methods(stream.response.messages) == [CANCELLED] * 2 + [UPDATED] * 6 + [TOOLS]
        uris = [each["params"]["uri"] for each in stream.response.messages if each["method"] == UPDATED]
        assert uris == [f"r://{n}" for n in range(6)]
        # And likewise for a stream that is not read.
        stream.response.hold()
        for _ in range(9):
            await changed(scripted)
        stream.response.go_on()
        await trio.sleep(1)
        assert len(methods(stream.response.messages)) <= 9 + 1 + 2 + 1
        # What it no longer listens for is no more than there is room for, either.
        stream.leave()
        for n in range(100, 130):
            for method in ("resources/subscribe", "resources/unsubscribe"):
                await door.post(request(method, {"uri": f"r://{n}"}, f"{method} {n}", revision=revision), session)
                scripted.server.notify_resource_updated(f"r://{n}")
                await trio.sleep(1)
        assert len(door.endpoint._sessions.get(session)._pending) == 2 + 9 + len(ChangeKind)


async def test_who_opens_another_stream_has_left_all_those_that_it_could_come_back_to(
    autojump_clock: MockClock,
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(D)
        streams = [await door.get(session) for _ in range(3)]
        for stream in streams:
            stream.leave()
        another = await door.get(session)
        for stream in streams:
            back = await door.get(session, stream.response.last_id)
            assert (back.response.status, back.response.events, back.response.ended) == (200, [], True)
        assert not another.response.ended


@session_revisions
async def test_streams_that_are_over_leave_nothing(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        for n in range(5):
            (await door.get(session)).leave()
            (await door.post(play_call("sleep 1", id=n, revision=revision), session)).leave()
            await door.post(play_call("progress", id=f"again {n}", revision=revision), session)
        await trio.sleep(2)
        held = door.endpoint._sessions.get(session)
        assert [len(held._response_streams), len(held._standalone), held.streams] == [1, 1, 0]


async def test_the_wire_of_a_session_makes_nobody_wait(autojump_clock: MockClock) -> None:
    server, waited = Server("pages"), []

    @server.tool
    async def visit(ctx: Context) -> str:
        from trio_mcp import ElicitUrl

        page = ElicitUrl("Go there", "https://example.com/")
        await ctx.ask(page=page)
        later.append((ctx, page))
        return "done"

    later: list[Any] = []
    async with endpoint_of(server) as door:
        session = await door.initialize(D)
        call = await door.post(request("tools/call", {"name": "visit"}, revision=D), session)
        (asked,) = call.response.messages
        await door.post(response(asked["id"], {"action": "accept"}), session)
        ((ctx, page),) = later
        for _ in range(3):
            with trio.fail_after(1):
                waited.append(await ctx.completed(page))
        stream = await door.get(session)
        assert waited == [True] * 3
        assert methods(stream.response.messages) == ["notifications/elicitation/complete"]  # once is enough
        wire = ctx._link.wire
        assert (wire.mark, wire.answers_only, wire.full, wire.hang_up(1)) == (0, False, False, False)
        ctx._link.session.notify(TOOLS)
        for wait in (wire.flush, wire.room, lambda: wire.written(5)):
            with trio.testing.assert_checkpoints():
                await wait()
        await wait_all_tasks_blocked()
        assert methods(stream.response.messages)[1:] == [TOOLS]


# Calls.


@req("http-28")
@session_revisions
async def test_a_call_goes_on_without_its_client_and_a_session_it_is_in(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        lost = await door.post(play_call("sleep 100", id=1, revision=revision), session)
        told = await door.post(play_call("progress", "sleep 100", "progress", id=2, revision=revision), session)
        lost.leave()
        told.leave()
        await trio.sleep(200)
        assert scripted.ended == ["", ""]
        rest = await door.get(session, told.response.last_id)
        assert methods(rest.response.messages) == [PROGRESS, "the answer"]
        assert rest.response.ended
        assert (await door.post(request("ping", id=1, revision=revision), session)).response.json["result"] == {}


@session_revisions
async def test_a_call_that_nobody_comes_back_for_ends_with_its_session(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        began = trio.current_time()
        call = await door.post(play_call("progress", "roots", revision=revision), session)
        await trio.sleep(10)
        call.leave()
        await trio.sleep(TIMEOUT - 1)
        assert not scripted.cancelled
        await trio.sleep(2)
        assert scripted.cancelled == [""]
        assert trio.current_time() - began == pytest.approx(TIMEOUT + 11)
        assert (await door.get(session, call.response.last_id)).response.status == 404


@session_revisions
async def test_a_handler_at_work_keeps_a_session_for_as_long_as_its_client_may_be_absent(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        (await door.post(play_call("progress", f"sleep {TIMEOUT * 2.5}", revision=revision), session)).leave()
        await trio.sleep(TIMEOUT - 1)
        assert (await door.post(request("ping", id=7, revision=revision), session)).response.status == 200
        await trio.sleep(TIMEOUT - 1)
        assert not scripted.cancelled
        await trio.sleep(2)
        assert scripted.cancelled == [""]
        assert (await door.post(request("ping", id=8, revision=revision), session)).response.status == 404


@pytest.mark.parametrize("how", ["undecided", "json", "stream", "own stream"])
@session_revisions
async def test_a_session_does_not_expire_while_a_response_is_open_nor_soon_after(
    revision: str, how: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, keep_alive=1e6) as door:
        session = await door.initialize(revision)
        if how == "own stream":
            open = await door.get(session)
        else:
            accept = {"Accept": "application/json"} if how == "json" else {}
            steps = ["wait go"] if how != "stream" else ["progress", "wait go"]
            open = await door.post(play_call(*steps, revision=revision), session, **accept)
        await trio.sleep(TIMEOUT * 3 - 5)
        if how == "own stream":
            open.leave()
        else:
            scripted.go["go"].set()
        await trio.sleep(TIMEOUT - 5)
        assert (await door.post(request("ping", id=7, revision=revision), session)).response.status == 200
        await trio.sleep(TIMEOUT + 1)
        assert (await door.post(request("ping", id=8, revision=revision), session)).response.status == 404


@session_revisions
async def test_whatever_its_client_does_keeps_a_session(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        for n in range(3):
            await trio.sleep(TIMEOUT - 1)
            await door.post(notification("notifications/x"), session)
            await trio.sleep(TIMEOUT - 1)
            await door.post(request("ping", id=n, revision=revision), session)
            await trio.sleep(TIMEOUT - 1)
            assert (await door.get(session, "1-0")).response.status == 400
        await trio.sleep(TIMEOUT + 1)
        assert (await door.post(notification("notifications/x"), session)).response.status == 404


# Ids.


@session_revisions
async def test_an_id_that_is_used_twice_at_once_is_refused_the_second_time(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(revision)
        first = await door.post(play_call("progress", "wait go", id=5, revision=revision), session)
        second = await door.post(play_call("say second", id=5, revision=revision), session)
        assert second.response.ended
        assert second.response.json["error"]["code"] == -32600
        assert second.response.json.get("id") is None
        assert ("id" in second.response.json) is REVISIONS[revision].unreadable_id_is_null
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        assert first.response.messages[-1]["id"] == 5
        third = await door.post(play_call("say third", id=5, revision=revision), session)
        assert third.response.json["result"]["content"][0]["text"] == "third"


async def test_an_id_is_nowhere_but_in_its_header(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    _, make = logs()
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, event_log=make, **SSE_PATHS) as door:
        session = await door.initialize(D)
        visits = [
            await door.get(session),
            await door.post(play_call("progress", "fail now"), session),
            await door.post(play_call("wait never", id=2), session),
            await door.get(session, "x"),
            await door.ask("GET", None, path="/sse", Accept="text/event-stream"),
            await door.post(notification("notifications/x"), "another"),
        ]
        held = door.endpoint._sessions.get(session)
        assert session not in repr(held) + repr(door.endpoint) + repr(door.endpoint._sessions) + repr(
            vars(held)["_response_streams"]
        )
        await close(door, session)
        await door.post(notification("notifications/x"), session)
        sent = b"".join(visit.response.body for visit in visits[:4] + visits[5:])
        assert session.encode() not in sent
        assert session not in caplog.text
        old = re.search(r"session=([\w-]+)", visits[4].response.body.decode())
        assert old is not None
        assert old[1] not in caplog.text


# Batches.


def batch(*steps: str, ids: tuple[int, ...] = (1, 2)) -> list[Any]:
    return [play_call(*steps, id=id, revision=B, name=str(id)) for id in ids]


@req("http-126")
async def test_of_a_batch_of_which_some_is_cancelled_the_rest_is_answered(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(B)
        for accept in ("application/json", "text/event-stream"):
            visit = await door.post(batch("wait go"), session, Accept=accept)
            await cancelled(door, session, 2)
            assert not visit.response.ended
            scripted.go["go"].set()
            await wait_all_tasks_blocked()
            (answers,) = visit.response.messages if visit.response.streams else [visit.response.json]
            assert [each["id"] for each in answers] == [1]
            assert visit.response.ended
            scripted.go.clear()


async def test_a_batch_does_not_wait_for_what_is_winding_down(autojump_clock: MockClock) -> None:
    server = Server("stubborn")

    @server.tool
    async def stubborn(seconds: int) -> str:
        try:
            await trio.sleep(1)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
        return "done"

    async with endpoint_of(server) as door:
        session = await door.initialize(B)
        message = [
            request("tools/call", {"name": "stubborn", "arguments": {"seconds": n}}, n, revision=B) for n in (0, 100)
        ]
        visit = await door.post(message, session)
        await trio.sleep(2)
        await cancelled(door, session, 100)
        assert [each["id"] for each in visit.response.json] == [0]
        assert visit.response.ended


async def test_of_a_batch_of_which_all_is_cancelled_nothing_is_said(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(B)
        for accept, status in (("application/json", 202), ("text/event-stream", 200), (None, 202)):
            visit = await door.post(batch("wait go"), session, **({"Accept": accept} if accept else {}))
            for id in (1, 2):
                assert not visit.response.ended
                await cancelled(door, session, id)
            assert (visit.response.status, visit.response.body, visit.response.ended) == (status, b"", True)


# The end of a session.


@req("http-57", "http-51")
@pytest.mark.parametrize("how", ["DELETE", "expiry", "drain", "stop"])
@session_revisions
async def test_with_a_session_everything_ends_that_it_had(how: str, revision: str, autojump_clock: MockClock) -> None:
    scripted, (made, make) = ScriptedServer(), logs()
    async with endpoint_of(scripted.server, event_log=make, keep_alive=1e6) as door:
        session = await door.initialize(revision)
        what = "roots" if how == "expiry" else "wait never"  # a handler at work keeps its session
        standing = await door.get(session)
        undecided = await door.post(play_call("wait never", id=1, revision=revision), session)
        away = await door.post(play_call("progress", what, id=2, revision=revision), session)
        lost = await door.post(play_call(what, id=3, revision=revision), session)
        asking = await door.post(play_call("roots", id=4, revision=revision), session)
        away.leave()
        lost.leave()
        if how == "DELETE":
            assert (await close(door, session)).response.status == 204
        elif how == "expiry":
            await cancelled(door, session, 1)
            for visit in (standing, asking):
                visit.leave()
            await trio.sleep(TIMEOUT + 1)
        elif how == "drain":
            with trio.move_on_after(10):
                await door.run.drain()
            assert not scripted.cancelled  # they had all the time that there was
            for id in (1, 2, 3, 4):
                await cancelled(door, session, id)
            await door.run.drain()
        else:
            door.run.stop()
        await wait_all_tasks_blocked()
        assert len(scripted.cancelled) == 4
        assert made[0].cleared == 1
        if how == "stop":
            assert all(visit.response.dropped for visit in (standing, undecided, asking))
        elif how != "expiry":
            assert all(visit.response.ended for visit in (standing, undecided, asking))
            retry = [event.retry for event in standing.response.events if event.retry]
            assert retry == ([1000] if how == "drain" and revision == D else [])
        if how == "DELETE":
            for answer in (undecided.response.json, asking.response.messages[-1]):
                assert answer["error"] == {"code": -32603, "message": "the client has ended the session"}
        for visit in (standing, undecided, away, lost, asking):
            visit.gone()
        assert door.endpoint.clients == 0
        assert door.run.statistics().listeners == 0
        if how in ("DELETE", "expiry"):
            assert (await door.get(session, "1-0")).response.status == 404
            assert (await door.post(request("ping", id=9, revision=revision), session)).response.status == 404
            assert (await close(door, session)).response.status == 404
    assert made[0].cleared == 1


async def test_what_runs_is_answered_when_its_session_ends(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session, other = await door.initialize(D), await door.initialize(D)
        first = await door.post(play_call("wait never", id=1), session)
        second = await door.post(play_call("wait never", id=2), session)
        elsewhere = await door.post(play_call("say x", id=1), other)
        await close(door, session)
        for visit in (first, second):
            assert visit.response.json["error"] == {"code": -32603, "message": "the client has ended the session"}
        assert scripted.cancelled == ["", ""]
        assert scripted.began == ["", "", ""]
        assert elsewhere.response.json["result"]
        assert door.run.statistics().running == 0


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_session_that_ends_while_somebody_writes_keeps_its_log_until_then(
    leaves: bool, autojump_clock: MockClock
) -> None:
    scripted, (made, make) = ScriptedServer(), logs()
    async with endpoint_of(scripted.server, event_log=make) as door:
        session = await door.initialize(D)
        call = await door.post(play_call("progress", "wait go", "progress", "wait never"), session)
        call.response.hold()
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        await close(door, session)
        assert scripted.cancelled == [""]
        assert not made[0].cleared
        if leaves:
            call.leave()
        call.response.go_on()
        await wait_all_tasks_blocked()
        assert made[0].cleared == 1
        assert call.response.ended is not leaves
        call.gone()
    assert made[0].cleared == 1


async def test_a_json_response_that_is_left_while_its_session_ends_clears_the_log_too(
    autojump_clock: MockClock,
) -> None:
    scripted, (made, make) = ScriptedServer(), logs()
    async with endpoint_of(scripted.server, event_log=make) as door:
        session = await door.initialize(D)
        call = await door.post(play_call("wait go"), session)
        call.response.hold()
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        await close(door, session)
        assert not made[0].cleared
        call.leave()
        await wait_all_tasks_blocked()
        assert made[0].cleared == 1


@pytest.mark.parametrize("how", ["DELETE", "drain"])
async def test_what_was_said_before_the_end_is_sent_also_to_who_reads_slowly(
    how: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(D)
        call = await door.post(play_call("progress", "wait go", "progress", "say all of it"), session)
        call.response.hold()
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            if how == "drain":
                nursery.start_soon(door.run.drain)
            else:
                await close(door, session)
            await trio.sleep(100)
            call.response.go_on()
        await wait_all_tasks_blocked()
        assert call.response.ended
        assert methods(call.response.messages) == [PROGRESS, PROGRESS, "the answer"]
        answer = call.response.messages[-1]
        if how == "drain":
            assert answer["result"]["content"][0]["text"] == "all of it"
        else:  # it was said, or it was cut off while the report before it was under way
            assert answer.get("error", {}).get("code") in (None, -32603)


@pytest.mark.parametrize("writing", ["a report", "a sign of life"])
async def test_who_reads_slowly_is_told_too_why_its_call_ends_with_its_session(
    writing: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as door:
        session = await door.initialize(D)
        call = await door.post(play_call("progress", "wait go", "progress", "wait never"), session)
        call.response.hold()
        if writing == "a report":
            scripted.go["go"].set()
        await trio.sleep(20)
        assert call.response.writing
        await close(door, session)
        call.response.go_on()
        await wait_all_tasks_blocked()
        answer = call.response.messages[-1]
        assert (answer["id"], answer["error"]["message"]) == (1, "the client has ended the session")
        assert call.response.ended


async def test_a_log_that_cannot_be_cleared_is_told_of_and_nothing_else(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(MemoryEventLog):
        def __init__(self, session: str) -> None:
            super().__init__()

        def clear(self) -> None:
            raise OSError("cannot clear")

    async with endpoint_of(ScriptedServer().server, event_log=Stuck) as door:
        session = await door.initialize(D)
        assert (await close(door, session)).response.status == 204
        assert "cannot clear" in caplog.text
        assert door.endpoint.clients == 0


async def test_a_client_that_has_not_read_which_session_it_is_has_none(autojump_clock: MockClock) -> None:
    made, make = logs()
    async with endpoint_of(ScriptedServer().server, event_log=make) as door:
        for _ in range(3):
            response = Recorder()
            response.cut()
            params = {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
            await door.post(request("initialize", params, 0, revision=D), revision=D, response=response)
        assert door.endpoint.clients == 0
        assert [log.cleared for log in made] == [1, 1, 1]
        await door.initialize(D)
        assert door.endpoint.clients == 1


# The old transport.


async def old_stream(door: EndpointClient, **how: Any) -> tuple[RecordedExchange, str]:
    visit = await door.ask("GET", None, path="/sse", revision="2024-11-05", **how)
    await wait_all_tasks_blocked()
    (event,) = visit.response.events
    assert event.event == "endpoint"
    return visit, event.data.decode()


def opening(id: Any = 0) -> dict[str, Any]:
    params = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    return request("initialize", params, id, revision="2024-11-05")


def said(visit: RecordedExchange) -> list[Any]:
    return [json.loads(event.data) for event in visit.response.events if event.event == "message"]


async def test_an_old_stream_is_its_session(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, **SSE_PATHS) as door:
        stream, uri = await old_stream(door)
        await door.post(opening(), path=uri)
        await door.post(notification("notifications/initialized"), path=uri)
        posted = await door.post(play_call("progress", "wait never", revision="2024-11-05"), path=uri)
        assert (posted.response.status, posted.response.body) == (202, b"")
        assert methods(said(stream)) == ["the answer", PROGRESS]
        await trio.sleep(TIMEOUT * 2 + 1)
        assert stream.response.comments == TIMEOUT * 2 // 15
        assert not scripted.cancelled
        stream.leave()
        await wait_all_tasks_blocked()
        assert scripted.cancelled == [""]
        assert door.endpoint.clients == 0
        assert (await door.post(notification("notifications/x"), path=uri)).response.status == 404


async def test_who_never_reads_an_old_stream_is_not_listened_to_without_end(autojump_clock: MockClock) -> None:
    limits = Limits(outgoing=4, calls=10)
    async with endpoint_of(ScriptedServer(limits=limits).server, **SSE_PATHS) as door:
        stream, uri = await old_stream(door)
        await door.post(opening(), path=uri)
        stream.response.hold()
        status = []
        for n in range(30):
            posted = await door.post(request("ping", id=n, revision="2024-11-05"), path=uri)
            status.append(posted.response.status)
        assert status == [202] * 16 + [429] * 14
        assert "Limits.outgoing" in posted.response.json["error"]["message"]
        assert posted.response.headers["Retry-After"]
        stream.response.go_on()
        await wait_all_tasks_blocked()
        assert [each["id"] for each in said(stream)] == [0, *range(16)]
        assert (await door.post(request("ping", id=99, revision="2024-11-05"), path=uri)).response.status == 202


@pytest.mark.parametrize("how", ["drain", "stop"])
async def test_an_old_stream_ends_with_the_server(how: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, **SSE_PATHS) as door:
        stream, uri = await old_stream(door)
        await door.post(opening(), path=uri)
        await door.post(notification("notifications/initialized"), path=uri)
        await door.post(play_call("sleep 5", "say x", revision="2024-11-05"), path=uri)
        if how == "drain":
            stream.response.hold()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(door.run.drain)
                await trio.sleep(10)
                stream.response.go_on()
            assert stream.response.ended
            assert said(stream)[-1]["result"]["content"][0]["text"] == "x"
        else:
            door.run.stop()
            await wait_all_tasks_blocked()
            assert stream.response.dropped
            assert scripted.cancelled == [""]
        assert door.endpoint.clients == 0
        assert door.run.statistics().listeners == 0


async def test_what_was_said_on_an_old_stream_is_sent_before_it_ends(autojump_clock: MockClock) -> None:
    async with endpoint_of(ScriptedServer().server, **SSE_PATHS) as door:
        stream, uri = await old_stream(door)
        await door.post(opening(), path=uri)
        stream.response.hold()
        for n in range(1, 4):
            await door.post(request("ping", id=n, revision="2024-11-05"), path=uri)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(door.run.drain)
            await trio.sleep(1)
            stream.response.go_on()
        assert [each["id"] for each in said(stream)] == [0, 1, 2, 3]
        assert stream.response.ended


async def test_an_old_stream_is_no_place_for_modern_questions_only(autojump_clock: MockClock) -> None:
    """What is asked on it is answered by a POST, and what held back changes follows when it is read again."""
    scripted = ScriptedServer(limits=Limits(outgoing=1))
    async with endpoint_of(scripted.server, **SSE_PATHS) as door:
        stream, uri = await old_stream(door)
        await door.post(opening(), path=uri)
        await door.post(notification("notifications/initialized"), path=uri)
        stream.response.hold()
        for _ in range(9):
            await changed(scripted)
        stream.response.go_on()
        await trio.sleep(1)
        assert methods(said(stream)) == ["the answer"] + [TOOLS] * 3


# The registry.


class Fake:
    """A session as the registry knows it."""

    def __init__(self) -> None:
        self.server_session: Any = SimpleNamespace(account=SimpleNamespace(holder=None))
        self.present = self.in_use = False
        self.overrun = False
        self.ended: list[Any] = []
        self.facts = SessionFacts(REVISIONS[D])

    def wake(self) -> None:
        raise AssertionError("nobody says anything")

    def end(self, why: str, *, retry: float | None = None) -> None:
        self.ended.append((trio.current_time(), retry))


async def test_the_registry_ends_what_is_not_used(autojump_clock: MockClock) -> None:
    sessions, fakes = Sessions(3, 100), {name: Fake() for name in "abc"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sessions.expire)
        for name, fake in fakes.items():
            assert sessions.make_room(None)
            sessions.add(name, fake)
            await trio.sleep(10)
        assert len(sessions) == len(sessions.server_sessions) == 3
        fakes["b"].present = True
        sessions.touch("c")
        sessions.touch("never there")
        await trio.sleep(100.5)  # 130.5
        assert [fake.ended for fake in fakes.values()] == [[(100, None)], [], [(130, None)]]
        assert (sessions.get("a"), sessions.facts("a")) == (None, None)
        assert sessions.facts("b") is fakes["b"].facts
        fakes["b"].present = False
        await trio.sleep(100)
        assert fakes["b"].ended == [(210, None)]
        assert not len(sessions)
        sessions.touch("b")
        sessions.end("b", "again")
        await trio.sleep(1000)
        nursery.cancel_scope.cancel()
    assert len(fakes["b"].ended) == 1


async def test_the_registry_ends_all_or_gives_them_away(autojump_clock: MockClock) -> None:
    sessions, fakes = Sessions(9, 100), [Fake() for _ in range(4)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sessions.expire)
        for n in range(2):
            sessions.add(str(n), fakes[n])
        sessions.end_all("the end", retry=2.0)
        for n in range(2, 4):
            sessions.add(str(n), fakes[n])
        assert sessions.take_all() == [fake.server_session for fake in fakes[2:]]
        await trio.sleep(1000)
        nursery.cancel_scope.cancel()
    assert [fake.ended for fake in fakes] == [[(0, 2.0)], [(0, 2.0)], [], []]
    assert len({Sessions.new_id() for _ in range(100)}) == 100


async def test_the_one_that_is_idle_for_longest_makes_room_if_it_is_soon_found(autojump_clock: MockClock) -> None:
    sessions, fakes = Sessions(1002, 1e6), [Fake() for _ in range(1002)]
    for n, fake in enumerate(fakes):
        assert sessions.make_room(None)
        sessions.add(str(n), fake)
        fake.in_use = n < 1000
    assert not sessions.make_room(None)  # to look at all would cost too much
    assert sessions.make_room(None)  # those that were looked at are in nobody's way now
    assert len(sessions) == 1001
    assert [n for n, fake in enumerate(fakes) if fake.ended] == [1000]
    assert sessions.make_room(None)
    assert len(sessions) == 1001


# Any order of anything.

DEEDS = st.tuples(
    st.sampled_from(["call", "tell", "tell", "ask", "leave", "back", "end", "change", "get", "hold"]), st.integers(0, 3)
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SESSIONS), st.lists(DEEDS, max_size=30), st.integers(2, 6))
def test_every_message_comes_on_its_own_stream_once_and_in_order(
    revision: str, deeds: list[tuple[str, int]], limit: int
) -> None:
    async def main() -> None:
        server = Server("talk", limits=Limits(outgoing=limit), capabilities=["tools"])
        play = Play(server, revision)
        async with endpoint_of(server) as play.door:
            play.session = await play.door.initialize(revision)
            for deed, which in deeds:
                await getattr(play, deed)(which)
                await wait_all_tasks_blocked()
            for which in list(play.calls):
                await play.back(which)
                await play.end(which)
            await wait_all_tasks_blocked()
            play.check()

    trio.run(main, clock=MockClock(autojump_threshold=0))


class Play:
    """Calls in one session, whose clients come and go."""

    door: EndpointClient
    session: str

    def __init__(self, server: Server, revision: str) -> None:
        self.revision = revision
        self.server = server
        self.orders: dict[int, trio.MemorySendChannel[Any]] = {}
        self.calls: dict[int, list[RecordedExchange]] = {}
        self.own: list[RecordedExchange] = []
        self.said: defaultdict[int, list[Any]] = defaultdict(list)
        self.number = 0
        server.tool(self.talk)

    async def talk(self, which: int, ctx: Context) -> str:
        send, receive = trio.open_memory_channel[Any](100)
        self.orders[which] = send
        async with trio.open_nursery() as nursery:
            async for order in receive:
                if order == "ask":
                    nursery.start_soon(ctx.roots)
                else:
                    await ctx.progress(order)
            nursery.cancel_scope.cancel()
        return f"end of {which}"

    async def call(self, which: int) -> None:
        if which not in self.calls:
            self.number += 1
            message = request(
                "tools/call", {"name": "talk", "arguments": {"which": which}}, self.number, revision=self.revision,
                progress=f"token {which}",
            )  # fmt: skip
            self.calls[which] = [await self.door.post(message, self.session)]

    async def tell(self, which: int) -> None:
        if which in self.orders:
            self.number += 1
            self.said[which].append(self.number)
            self.orders[which].send_nowait(self.number)

    async def ask(self, which: int) -> None:
        if which in self.orders:
            self.orders[which].send_nowait("ask")

    async def leave(self, which: int) -> None:
        if which in self.calls:
            self.calls[which][-1].leave()

    async def hold(self, which: int) -> None:
        if which in self.calls:
            self.calls[which][-1].response.hold()

    async def back(self, which: int) -> None:
        if which in self.calls:
            seen = [visit for visit in self.calls[which] if visit.response.streams and visit.response.events]
            ids = [event.id for visit in seen for event in visit.response.events if event.id]
            if ids:
                self.calls[which].append(await self.door.get(self.session, ids[-1]))

    async def end(self, which: int) -> None:
        if which in self.orders:
            self.orders.pop(which).close()

    async def change(self, which: int) -> None:
        self.server.notify_list_changed("tools")
        await trio.sleep(1)

    async def get(self, which: int) -> None:
        self.own.append(await self.door.get(self.session))

    def check(self) -> None:
        ids: list[str] = []
        for which, visits in self.calls.items():
            came: list[Any] = []
            streams = [visit.response for visit in visits if visit.response.streams]
            for each in streams:
                ids += [event.id for event in each.events if event.id is not None]
                came += each.messages
            if not streams:
                continue  # JSON, or gone before there was an id
            assert all(
                each["params"]["progressToken"] == f"token {which}" for each in came if each.get("method") == PROGRESS
            )
            assert [each["params"]["progress"] for each in came if each.get("method") == PROGRESS] == self.said[which]
            assert came[-1]["result"]["content"][0]["text"] == f"end of {which}"
            assert sum("result" in each for each in came) == 1
            assert all(each.get("method") in (PROGRESS, "roots/list", CANCELLED, None) for each in came)
        for visit in self.own:
            ids += [event.id for event in visit.response.events if event.id is not None]
            assert set(methods(visit.response.messages)) <= {TOOLS, CANCELLED}
        assert len(ids) == len(set(ids))
