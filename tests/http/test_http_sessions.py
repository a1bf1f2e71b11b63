"""Sessions over HTTP: the messages they keep, the streams they send them on, and how they end."""

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


class CheckedLog(MemoryEventLog):
    """An event log that keeps its events, counts `clear`, and refuses other calls after it."""

    made: list[CheckedLog]

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


def checked_logs() -> tuple[list[CheckedLog], Callable[[str], CheckedLog]]:
    made: list[CheckedLog] = []

    def make(session: str) -> CheckedLog:
        made.append(CheckedLog())
        return made[-1]

    return made, make


async def end_session(client: EndpointClient, session: str) -> RecordedExchange:
    exchange = await client.ask("DELETE", None, session)
    await wait_all_tasks_blocked()
    return exchange


async def change_tools(scripted: ScriptedServer) -> None:
    scripted.server.notify_list_changed("tools")
    await trio.sleep(1)


async def cancel(client: EndpointClient, session: str, id: Any) -> None:
    await client.post(notification(CANCELLED, {"requestId": id}), session)


# The stream of a session


@req("http-39", "http-35")
@session_revisions
async def test_the_newest_stream_that_is_open_gets_each_message(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        await change_tools(scripted)  # this change waits for a stream
        streams = [await client.get(session) for _ in range(3)]
        await change_tools(scripted)
        streams[2].disconnect()
        await change_tools(scripted)
        streams[0].disconnect()
        await change_tools(scripted)
        streams[1].disconnect()
        await change_tools(scripted)
        call = await client.post(play_call("tools", "sleep 1", "say x", revision=revision), session)
        await trio.sleep(2)
        assert (
            call.response.json["result"]["content"][0]["text"] == "x"
        )  # the change does not come on the stream of a call
        last = await client.get(session)
        received = [methods(each.response.messages) for each in (*streams, last)]
        assert received == [[TOOLS], [TOOLS, TOOLS], [TOOLS], [TOOLS]]
        # No change comes twice, although the three older streams are gone: `last` replaces them.
        assert streams[0].response.last_id != streams[1].response.last_id


@req("http-42", "http-43")
@session_revisions
async def test_a_resumed_older_stream_gets_no_messages_of_a_newer_one(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        older = await client.get(session)
        await change_tools(scripted)
        newer = await client.get(session)
        older.disconnect()
        again = await client.get(session, older.response.last_id)
        await change_tools(scripted)
        assert again.response.status == 200
        assert methods(newer.response.messages) == [TOOLS]
        assert again.response.messages == []
        newer.disconnect()
        await change_tools(scripted)
        assert methods(again.response.messages) == [TOOLS]
        # A client that opens another stream instead of resuming gives up the old one.
        await client.get(session)
        back = await client.get(session, newer.response.last_id)
        assert (back.response.status, back.response.events, back.response.ended) == (200, [], True)


@session_revisions
async def test_changes_that_wait_for_a_stream_are_merged_and_limited(revision: str, autojump_clock: MockClock) -> None:
    limits = Limits(outgoing=2, listener_changes=9)
    scripted = ScriptedServer(limits=limits)
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        for n in range(6):
            subscribe = request("resources/subscribe", {"uri": f"r://{n}"}, n, revision=revision)
            assert (await client.post(subscribe, session)).response.json["result"] == {}
        # Other notifications: each of these calls asks a question, and cancels it.
        for n in range(9):
            call = await client.post(play_call("roots", id=f"call {n}", revision=revision), session)
            call.disconnect()
            await cancel(client, session, f"call {n}")
        for _ in range(5):
            for n in range(6):
                scripted.server.notify_resource_updated(f"r://{n}")
            await change_tools(scripted)
        stream = await client.get(session)
        assert methods(stream.response.messages) == [CANCELLED] * 2 + [UPDATED] * 6 + [TOOLS]
        uris = [each["params"]["uri"] for each in stream.response.messages if each["method"] == UPDATED]
        assert uris == [f"r://{n}" for n in range(6)]
        # The same limits hold for a stream that the client does not read.
        stream.response.hold()
        for _ in range(9):
            await change_tools(scripted)
        stream.response.go_on()
        await trio.sleep(1)
        assert len(methods(stream.response.messages)) <= 9 + 1 + 2 + 1
        # Changes of resources that it unsubscribed from are limited too.
        stream.disconnect()
        for n in range(100, 130):
            for method in ("resources/subscribe", "resources/unsubscribe"):
                await client.post(request(method, {"uri": f"r://{n}"}, f"{method} {n}", revision=revision), session)
                scripted.server.notify_resource_updated(f"r://{n}")
                await trio.sleep(1)
        assert len(client.endpoint._sessions.get(session)._pending) == 2 + 9 + len(ChangeKind)


async def test_a_new_stream_ends_all_streams_that_could_be_resumed(
    autojump_clock: MockClock,
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(D)
        streams = [await client.get(session) for _ in range(3)]
        for stream in streams:
            stream.disconnect()
        another = await client.get(session)
        for stream in streams:
            back = await client.get(session, stream.response.last_id)
            assert (back.response.status, back.response.events, back.response.ended) == (200, [], True)
        assert not another.response.ended


@session_revisions
async def test_finished_streams_are_forgotten(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        for n in range(5):
            (await client.get(session)).disconnect()
            (await client.post(play_call("sleep 1", id=n, revision=revision), session)).disconnect()
            await client.post(play_call("progress", id=f"again {n}", revision=revision), session)
        await trio.sleep(2)
        held = client.endpoint._sessions.get(session)
        assert [len(held._response_streams), len(held._standalone), held.streams] == [1, 1, 0]


async def test_the_wire_of_a_session_never_waits(autojump_clock: MockClock) -> None:
    server, waited = Server("pages"), []

    @server.tool
    async def visit(ctx: Context) -> str:
        from trio_mcp import ElicitUrl

        page = ElicitUrl("Go there", "https://example.com/")
        await ctx.ask(page=page)
        later.append((ctx, page))
        return "done"

    later: list[Any] = []
    async with endpoint_of(server) as client:
        session = await client.initialize(D)
        call = await client.post(request("tools/call", {"name": "visit"}, revision=D), session)
        (question,) = call.response.messages
        await client.post(response(question["id"], {"action": "accept"}), session)
        ((ctx, page),) = later
        for _ in range(3):
            with trio.fail_after(1):
                waited.append(await ctx.completed(page))
        stream = await client.get(session)
        assert waited == [True] * 3
        assert methods(stream.response.messages) == ["notifications/elicitation/complete"]  # merged into one
        wire = ctx._link.wire
        assert (wire.mark, wire.answers_only, wire.full, wire.hang_up(1)) == (0, False, False, False)
        ctx._link.session.notify(TOOLS)
        for wait in (wire.flush, wire.room, lambda: wire.written(5)):
            with trio.testing.assert_checkpoints():
                await wait()
        await wait_all_tasks_blocked()
        assert methods(stream.response.messages)[1:] == [TOOLS]


# Calls


@req("http-28")
@session_revisions
async def test_a_call_in_a_session_continues_without_its_client(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        lost = await client.post(play_call("sleep 100", id=1, revision=revision), session)
        streamed = await client.post(play_call("progress", "sleep 100", "progress", id=2, revision=revision), session)
        lost.disconnect()
        streamed.disconnect()
        await trio.sleep(200)
        assert scripted.ended == ["", ""]
        rest = await client.get(session, streamed.response.last_id)
        assert methods(rest.response.messages) == [PROGRESS, "the answer"]
        assert rest.response.ended
        assert (await client.post(request("ping", id=1, revision=revision), session)).response.json["result"] == {}


@session_revisions
async def test_an_abandoned_call_ends_with_its_session(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        began = trio.current_time()
        call = await client.post(play_call("progress", "roots", revision=revision), session)
        await trio.sleep(10)
        call.disconnect()
        await trio.sleep(TIMEOUT - 1)
        assert not scripted.cancelled
        await trio.sleep(2)
        assert scripted.cancelled == [""]
        assert trio.current_time() - began == pytest.approx(TIMEOUT + 11)
        assert (await client.get(session, call.response.last_id)).response.status == 404


@session_revisions
async def test_a_running_handler_keeps_its_session_for_the_time_of_an_absence(
    revision: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        (await client.post(play_call("progress", f"sleep {TIMEOUT * 2.5}", revision=revision), session)).disconnect()
        await trio.sleep(TIMEOUT - 1)
        assert (await client.post(request("ping", id=7, revision=revision), session)).response.status == 200
        await trio.sleep(TIMEOUT - 1)
        assert not scripted.cancelled
        await trio.sleep(2)
        assert scripted.cancelled == [""]
        assert (await client.post(request("ping", id=8, revision=revision), session)).response.status == 404


@pytest.mark.parametrize("how", ["undecided", "json", "stream", "own stream"])
@session_revisions
async def test_a_session_expires_one_timeout_after_its_last_open_response(
    revision: str, how: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, keep_alive=1e6) as client:
        session = await client.initialize(revision)
        if how == "own stream":
            open = await client.get(session)
        else:
            accept = {"Accept": "application/json"} if how == "json" else {}
            steps = ["wait go"] if how != "stream" else ["progress", "wait go"]
            open = await client.post(play_call(*steps, revision=revision), session, **accept)
        await trio.sleep(TIMEOUT * 3 - 5)
        if how == "own stream":
            open.disconnect()
        else:
            scripted.go["go"].set()
        await trio.sleep(TIMEOUT - 5)
        assert (await client.post(request("ping", id=7, revision=revision), session)).response.status == 200
        await trio.sleep(TIMEOUT + 1)
        assert (await client.post(request("ping", id=8, revision=revision), session)).response.status == 404


@session_revisions
async def test_any_request_of_its_client_keeps_a_session(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        for n in range(3):
            await trio.sleep(TIMEOUT - 1)
            await client.post(notification("notifications/x"), session)
            await trio.sleep(TIMEOUT - 1)
            await client.post(request("ping", id=n, revision=revision), session)
            await trio.sleep(TIMEOUT - 1)
            assert (await client.get(session, "1-0")).response.status == 400
        await trio.sleep(TIMEOUT + 1)
        assert (await client.post(notification("notifications/x"), session)).response.status == 404


# Ids


@session_revisions
async def test_an_id_in_use_is_refused_for_a_second_request(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(revision)
        first = await client.post(play_call("progress", "wait go", id=5, revision=revision), session)
        second = await client.post(play_call("say second", id=5, revision=revision), session)
        assert second.response.ended
        assert second.response.json["error"]["code"] == -32600
        assert second.response.json.get("id") is None
        assert ("id" in second.response.json) is REVISIONS[revision].unreadable_id_is_null
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        assert first.response.messages[-1]["id"] == 5
        third = await client.post(play_call("say third", id=5, revision=revision), session)
        assert third.response.json["result"]["content"][0]["text"] == "third"


async def test_a_session_id_is_sent_in_its_header_only_and_not_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    _, make = checked_logs()
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, event_log=make, **SSE_PATHS) as client:
        session = await client.initialize(D)
        exchanges = [
            await client.get(session),
            await client.post(play_call("progress", "fail now"), session),
            await client.post(play_call("wait never", id=2), session),
            await client.get(session, "x"),
            await client.ask("GET", None, path="/sse", Accept="text/event-stream"),
            await client.post(notification("notifications/x"), "another"),
        ]
        held = client.endpoint._sessions.get(session)
        assert session not in repr(held) + repr(client.endpoint) + repr(client.endpoint._sessions) + repr(
            vars(held)["_response_streams"]
        )
        await end_session(client, session)
        await client.post(notification("notifications/x"), session)
        sent = b"".join(exchange.response.body for exchange in exchanges[:4] + exchanges[5:])
        assert session.encode() not in sent
        assert session not in caplog.text
        old = re.search(r"session=([\w-]+)", exchanges[4].response.body.decode())
        assert old is not None
        assert old[1] not in caplog.text


# Batches


def batch(*steps: str, ids: tuple[int, ...] = (1, 2)) -> list[Any]:
    return [play_call(*steps, id=id, revision=B, name=str(id)) for id in ids]


@req("http-126")
async def test_a_batch_with_a_cancelled_request_answers_the_others(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(B)
        for accept in ("application/json", "text/event-stream"):
            exchange = await client.post(batch("wait go"), session, Accept=accept)
            await cancel(client, session, 2)
            assert not exchange.response.ended
            scripted.go["go"].set()
            await wait_all_tasks_blocked()
            (answers,) = exchange.response.messages if exchange.response.streams else [exchange.response.json]
            assert [each["id"] for each in answers] == [1]
            assert exchange.response.ended
            scripted.go.clear()


async def test_a_batch_does_not_wait_for_a_cancelled_handler(autojump_clock: MockClock) -> None:
    server = Server("stubborn")

    @server.tool
    async def stubborn(seconds: int) -> str:
        try:
            await trio.sleep(1)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
        return "done"

    async with endpoint_of(server) as client:
        session = await client.initialize(B)
        message = [
            request("tools/call", {"name": "stubborn", "arguments": {"seconds": n}}, n, revision=B) for n in (0, 100)
        ]
        exchange = await client.post(message, session)
        await trio.sleep(2)
        await cancel(client, session, 100)
        assert [each["id"] for each in exchange.response.json] == [0]
        assert exchange.response.ended


async def test_a_batch_with_only_cancelled_requests_has_an_empty_response(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(B)
        for accept, status in (("application/json", 202), ("text/event-stream", 200), (None, 202)):
            exchange = await client.post(batch("wait go"), session, **({"Accept": accept} if accept else {}))
            for id in (1, 2):
                assert not exchange.response.ended
                await cancel(client, session, id)
            assert (exchange.response.status, exchange.response.body, exchange.response.ended) == (status, b"", True)


# The end of a session


@req("http-57", "http-51")
@pytest.mark.parametrize("how", ["DELETE", "expiry", "drain", "stop"])
@session_revisions
async def test_the_end_of_a_session_ends_its_calls_and_streams(
    how: str, revision: str, autojump_clock: MockClock
) -> None:
    scripted, (made, make) = ScriptedServer(), checked_logs()
    async with endpoint_of(scripted.server, event_log=make, keep_alive=1e6) as client:
        session = await client.initialize(revision)
        step = "roots" if how == "expiry" else "wait never"  # a running handler keeps its session
        standing = await client.get(session)
        undecided = await client.post(play_call("wait never", id=1, revision=revision), session)
        away = await client.post(play_call("progress", step, id=2, revision=revision), session)
        lost = await client.post(play_call(step, id=3, revision=revision), session)
        asking = await client.post(play_call("roots", id=4, revision=revision), session)
        away.disconnect()
        lost.disconnect()
        if how == "DELETE":
            assert (await end_session(client, session)).response.status == 204
        elif how == "expiry":
            await cancel(client, session, 1)
            for exchange in (standing, asking):
                exchange.disconnect()
            await trio.sleep(TIMEOUT + 1)
        elif how == "drain":
            with trio.move_on_after(10):
                await client.run.drain()
            assert not scripted.cancelled  # the drain cancels no call
            for id in (1, 2, 3, 4):
                await cancel(client, session, id)
            await client.run.drain()
        else:
            client.run.stop()
        await wait_all_tasks_blocked()
        assert len(scripted.cancelled) == 4
        assert made[0].cleared == 1
        if how == "stop":
            assert all(exchange.response.dropped for exchange in (standing, undecided, asking))
        elif how != "expiry":
            assert all(exchange.response.ended for exchange in (standing, undecided, asking))
            retry = [event.retry for event in standing.response.events if event.retry]
            assert retry == ([1000] if how == "drain" and revision == D else [])
        if how == "DELETE":
            for answer in (undecided.response.json, asking.response.messages[-1]):
                assert answer["error"] == {"code": -32603, "message": "the client has ended the session"}
        for exchange in (standing, undecided, away, lost, asking):
            exchange.on_disconnect()
        assert client.endpoint.clients == 0
        assert client.run.statistics().listeners == 0
        if how in ("DELETE", "expiry"):
            assert (await client.get(session, "1-0")).response.status == 404
            assert (await client.post(request("ping", id=9, revision=revision), session)).response.status == 404
            assert (await end_session(client, session)).response.status == 404
    assert made[0].cleared == 1


async def test_running_calls_get_an_error_when_their_session_ends(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session, other = await client.initialize(D), await client.initialize(D)
        first = await client.post(play_call("wait never", id=1), session)
        second = await client.post(play_call("wait never", id=2), session)
        unrelated = await client.post(play_call("say x", id=1), other)
        await end_session(client, session)
        for exchange in (first, second):
            assert exchange.response.json["error"] == {"code": -32603, "message": "the client has ended the session"}
        assert scripted.cancelled == ["", ""]
        assert scripted.began == ["", "", ""]
        assert unrelated.response.json["result"]
        assert client.run.statistics().running == 0


@pytest.mark.parametrize("leaves", [False, True])
async def test_an_ended_session_keeps_its_log_until_its_last_write(leaves: bool, autojump_clock: MockClock) -> None:
    scripted, (made, make) = ScriptedServer(), checked_logs()
    async with endpoint_of(scripted.server, event_log=make) as client:
        session = await client.initialize(D)
        call = await client.post(play_call("progress", "wait go", "progress", "wait never"), session)
        call.response.hold()
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        await end_session(client, session)
        assert scripted.cancelled == [""]
        assert not made[0].cleared
        if leaves:
            call.disconnect()
        call.response.go_on()
        await wait_all_tasks_blocked()
        assert made[0].cleared == 1
        assert call.response.ended is not leaves
        call.on_disconnect()
    assert made[0].cleared == 1


async def test_the_log_is_cleared_after_an_abandoned_json_response(
    autojump_clock: MockClock,
) -> None:
    scripted, (made, make) = ScriptedServer(), checked_logs()
    async with endpoint_of(scripted.server, event_log=make) as client:
        session = await client.initialize(D)
        call = await client.post(play_call("wait go"), session)
        call.response.hold()
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        await end_session(client, session)
        assert not made[0].cleared
        call.disconnect()
        await wait_all_tasks_blocked()
        assert made[0].cleared == 1


@pytest.mark.parametrize("how", ["DELETE", "drain"])
async def test_a_slow_reader_gets_the_messages_before_the_end_of_its_session(
    how: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(D)
        call = await client.post(play_call("progress", "wait go", "progress", "say all of it"), session)
        call.response.hold()
        scripted.go["go"].set()
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            if how == "drain":
                nursery.start_soon(client.run.drain)
            else:
                await end_session(client, session)
            await trio.sleep(100)
            call.response.go_on()
        await wait_all_tasks_blocked()
        assert call.response.ended
        assert methods(call.response.messages) == [PROGRESS, PROGRESS, "the answer"]
        answer = call.response.messages[-1]
        if how == "drain":
            assert answer["result"]["content"][0]["text"] == "all of it"
        else:  # the answer, or an error if the session ended during the report before it
            assert answer.get("error", {}).get("code") in (None, -32603)


@pytest.mark.parametrize("writing", ["a report", "a keep-alive comment"])
async def test_a_slow_reader_gets_the_error_of_a_call_in_an_ended_session(
    writing: str, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server) as client:
        session = await client.initialize(D)
        call = await client.post(play_call("progress", "wait go", "progress", "wait never"), session)
        call.response.hold()
        if writing == "a report":
            scripted.go["go"].set()
        await trio.sleep(20)
        assert call.response.writing
        await end_session(client, session)
        call.response.go_on()
        await wait_all_tasks_blocked()
        answer = call.response.messages[-1]
        assert (answer["id"], answer["error"]["message"]) == (1, "the client has ended the session")
        assert call.response.ended


async def test_a_failure_to_clear_a_log_is_only_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class UnclearableLog(MemoryEventLog):
        def __init__(self, session: str) -> None:
            super().__init__()

        def clear(self) -> None:
            raise OSError("cannot clear")

    async with endpoint_of(ScriptedServer().server, event_log=UnclearableLog) as client:
        session = await client.initialize(D)
        assert (await end_session(client, session)).response.status == 204
        assert "cannot clear" in caplog.text
        assert client.endpoint.clients == 0


async def test_a_session_ends_if_its_client_did_not_receive_the_id(autojump_clock: MockClock) -> None:
    made, make = checked_logs()
    async with endpoint_of(ScriptedServer().server, event_log=make) as client:
        for _ in range(3):
            response = Recorder()
            response.cut()
            params = {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
            await client.post(request("initialize", params, 0, revision=D), revision=D, response=response)
        assert client.endpoint.clients == 0
        assert [log.cleared for log in made] == [1, 1, 1]
        await client.initialize(D)
        assert client.endpoint.clients == 1


# HTTP+SSE


async def open_sse_stream(client: EndpointClient, **how: Any) -> tuple[RecordedExchange, str]:
    exchange = await client.ask("GET", None, path="/sse", revision="2024-11-05", **how)
    await wait_all_tasks_blocked()
    (event,) = exchange.response.events
    assert event.event == "endpoint"
    return exchange, event.data.decode()


def initialize_request(id: Any = 0) -> dict[str, Any]:
    params = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    return request("initialize", params, id, revision="2024-11-05")


def sse_messages(exchange: RecordedExchange) -> list[Any]:
    return [json.loads(event.data) for event in exchange.response.events if event.event == "message"]


async def test_an_sse_session_ends_with_its_stream(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, **SSE_PATHS) as client:
        stream, uri = await open_sse_stream(client)
        await client.post(initialize_request(), path=uri)
        await client.post(notification("notifications/initialized"), path=uri)
        posted = await client.post(play_call("progress", "wait never", revision="2024-11-05"), path=uri)
        assert (posted.response.status, posted.response.body) == (202, b"")
        assert methods(sse_messages(stream)) == ["the answer", PROGRESS]
        await trio.sleep(TIMEOUT * 2 + 1)
        assert stream.response.comments == TIMEOUT * 2 // 15
        assert not scripted.cancelled
        stream.disconnect()
        await wait_all_tasks_blocked()
        assert scripted.cancelled == [""]
        assert client.endpoint.clients == 0
        assert (await client.post(notification("notifications/x"), path=uri)).response.status == 404


async def test_posts_for_an_unread_sse_stream_are_limited(autojump_clock: MockClock) -> None:
    limits = Limits(outgoing=4, calls=10)
    async with endpoint_of(ScriptedServer(limits=limits).server, **SSE_PATHS) as client:
        stream, uri = await open_sse_stream(client)
        await client.post(initialize_request(), path=uri)
        stream.response.hold()
        status = []
        for n in range(30):
            posted = await client.post(request("ping", id=n, revision="2024-11-05"), path=uri)
            status.append(posted.response.status)
        assert status == [202] * 16 + [429] * 14
        assert "Limits.outgoing" in posted.response.json["error"]["message"]
        assert posted.response.headers["Retry-After"]
        stream.response.go_on()
        await wait_all_tasks_blocked()
        assert [each["id"] for each in sse_messages(stream)] == [0, *range(16)]
        assert (await client.post(request("ping", id=99, revision="2024-11-05"), path=uri)).response.status == 202


@pytest.mark.parametrize("how", ["drain", "stop"])
async def test_an_sse_stream_ends_with_the_server(how: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with endpoint_of(scripted.server, **SSE_PATHS) as client:
        stream, uri = await open_sse_stream(client)
        await client.post(initialize_request(), path=uri)
        await client.post(notification("notifications/initialized"), path=uri)
        await client.post(play_call("sleep 5", "say x", revision="2024-11-05"), path=uri)
        if how == "drain":
            stream.response.hold()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.run.drain)
                await trio.sleep(10)
                stream.response.go_on()
            assert stream.response.ended
            assert sse_messages(stream)[-1]["result"]["content"][0]["text"] == "x"
        else:
            client.run.stop()
            await wait_all_tasks_blocked()
            assert stream.response.dropped
            assert scripted.cancelled == [""]
        assert client.endpoint.clients == 0
        assert client.run.statistics().listeners == 0


async def test_pending_messages_of_an_sse_stream_are_sent_before_its_end(autojump_clock: MockClock) -> None:
    async with endpoint_of(ScriptedServer().server, **SSE_PATHS) as client:
        stream, uri = await open_sse_stream(client)
        await client.post(initialize_request(), path=uri)
        stream.response.hold()
        for n in range(1, 4):
            await client.post(request("ping", id=n, revision="2024-11-05"), path=uri)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run.drain)
            await trio.sleep(1)
            stream.response.go_on()
        assert [each["id"] for each in sse_messages(stream)] == [0, 1, 2, 3]
        assert stream.response.ended


async def test_changes_for_an_unread_sse_stream_are_merged_and_sent_later(autojump_clock: MockClock) -> None:
    """Changes that waited for a reader follow when the client reads the stream again."""
    scripted = ScriptedServer(limits=Limits(outgoing=1))
    async with endpoint_of(scripted.server, **SSE_PATHS) as client:
        stream, uri = await open_sse_stream(client)
        await client.post(initialize_request(), path=uri)
        await client.post(notification("notifications/initialized"), path=uri)
        stream.response.hold()
        for _ in range(9):
            await change_tools(scripted)
        stream.response.go_on()
        await trio.sleep(1)
        assert methods(sse_messages(stream)) == ["the answer"] + [TOOLS] * 3


# The registry of sessions


class FakeSession:
    """The parts of a session that the registry uses."""

    def __init__(self) -> None:
        self.server_session: Any = SimpleNamespace(account=SimpleNamespace(holder=None))
        self.present = self.in_use = False
        self.overrun = False
        self.ended: list[Any] = []
        self.facts = SessionFacts(REVISIONS[D])

    def wake(self) -> None:
        raise AssertionError("there are no messages")

    def end(self, reason: str, *, retry: float | None = None) -> None:
        self.ended.append((trio.current_time(), retry))


async def test_the_registry_ends_unused_sessions(autojump_clock: MockClock) -> None:
    sessions, fakes = Sessions(3, 100), {name: FakeSession() for name in "abc"}
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


async def test_the_registry_ends_all_sessions_or_hands_them_over(autojump_clock: MockClock) -> None:
    sessions, fakes = Sessions(9, 100), [FakeSession() for _ in range(4)]
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


async def test_the_session_idle_for_longest_makes_room_if_it_is_found_soon(autojump_clock: MockClock) -> None:
    sessions, fakes = Sessions(1002, 1e6), [FakeSession() for _ in range(1002)]
    for n, fake in enumerate(fakes):
        assert sessions.make_room(None)
        sessions.add(str(n), fake)
        fake.in_use = n < 1000
    assert not sessions.make_room(None)  # the search stops after a number of sessions
    assert sessions.make_room(None)  # the next search starts after the sessions seen before
    assert len(sessions) == 1001
    assert [n for n, fake in enumerate(fakes) if fake.ended] == [1000]
    assert sessions.make_room(None)
    assert len(sessions) == 1001


# Random sequences of actions

ACTIONS = st.tuples(
    st.sampled_from(["call", "report", "report", "ask", "disconnect", "resume", "end", "change", "get", "hold"]),
    st.integers(0, 3),
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SESSIONS), st.lists(ACTIONS, max_size=30), st.integers(2, 6))
def test_each_message_comes_on_its_own_stream_once_and_in_order(
    revision: str, actions: list[tuple[str, int]], limit: int
) -> None:
    async def main() -> None:
        server = Server("talk", limits=Limits(outgoing=limit), capabilities=["tools"])
        random_session = RandomSession(server, revision)
        async with endpoint_of(server) as random_session.client:
            random_session.session = await random_session.client.initialize(revision)
            for action, which in actions:
                await getattr(random_session, action)(which)
                await wait_all_tasks_blocked()
            for which in list(random_session.calls):
                await random_session.resume(which)
                await random_session.end(which)
            await wait_all_tasks_blocked()
            random_session.check()

    trio.run(main, clock=MockClock(autojump_threshold=0))


class RandomSession:
    """Random actions on calls in one session, with disconnecting and resuming clients."""

    client: EndpointClient
    session: str

    def __init__(self, server: Server, revision: str) -> None:
        self.revision = revision
        self.server = server
        self.orders: dict[int, trio.MemorySendChannel[Any]] = {}
        self.calls: dict[int, list[RecordedExchange]] = {}
        self.own: list[RecordedExchange] = []
        self.reported: defaultdict[int, list[Any]] = defaultdict(list)
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
            self.calls[which] = [await self.client.post(message, self.session)]

    async def report(self, which: int) -> None:
        if which in self.orders:
            self.number += 1
            self.reported[which].append(self.number)
            self.orders[which].send_nowait(self.number)

    async def ask(self, which: int) -> None:
        if which in self.orders:
            self.orders[which].send_nowait("ask")

    async def disconnect(self, which: int) -> None:
        if which in self.calls:
            self.calls[which][-1].disconnect()

    async def hold(self, which: int) -> None:
        if which in self.calls:
            self.calls[which][-1].response.hold()

    async def resume(self, which: int) -> None:
        if which in self.calls:
            seen = [
                exchange for exchange in self.calls[which] if exchange.response.streams and exchange.response.events
            ]
            ids = [event.id for exchange in seen for event in exchange.response.events if event.id]
            if ids:
                self.calls[which].append(await self.client.get(self.session, ids[-1]))

    async def end(self, which: int) -> None:
        if which in self.orders:
            self.orders.pop(which).close()

    async def change(self, which: int) -> None:
        self.server.notify_list_changed("tools")
        await trio.sleep(1)

    async def get(self, which: int) -> None:
        self.own.append(await self.client.get(self.session))

    def check(self) -> None:
        ids: list[str] = []
        for which, exchanges in self.calls.items():
            came: list[Any] = []
            streams = [exchange.response for exchange in exchanges if exchange.response.streams]
            for each in streams:
                ids += [event.id for event in each.events if event.id is not None]
                came += each.messages
            if not streams:
                continue  # JSON, or disconnected before the first event id
            assert all(
                each["params"]["progressToken"] == f"token {which}" for each in came if each.get("method") == PROGRESS
            )
            assert [each["params"]["progress"] for each in came if each.get("method") == PROGRESS] == self.reported[
                which
            ]
            assert came[-1]["result"]["content"][0]["text"] == f"end of {which}"
            assert sum("result" in each for each in came) == 1
            assert all(each.get("method") in (PROGRESS, "roots/list", CANCELLED, None) for each in came)
        for exchange in self.own:
            ids += [event.id for event in exchange.response.events if event.id is not None]
            assert set(methods(exchange.response.messages)) <= {TOOLS, CANCELLED}
        assert len(ids) == len(set(ids))
