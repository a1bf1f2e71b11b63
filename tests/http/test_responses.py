"""`ResponseStream`: the client gets all messages once and in order, also when HTTP responses fail or are replaced."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.http.recorder import Recorder, checked_responses
from tests.server.checkpoints import Attempt, any_task, cancel_at_each_step
from trio_mcp.core import REVISIONS, Batch, Error, Id, Notification, Request, Response
from trio_mcp.core.http import Answer, MemoryEventLog, Replay, encode_message
from trio_mcp.server.http import EndpointStreams, IdleOrder, OutgoingMessage, ResponseMode, ResponseStream, StreamOwner

B, D, E = REVISIONS["2025-03-26"], REVISIONS["2025-11-25"], REVISIONS["2026-07-28"]
CORS = (("Access-Control-Allow-Origin", "http://localhost"),)
EITHER, JSON, STREAM = Answer.EITHER, Answer.JSON, Answer.STREAM


class ScriptedOwner(StreamOwner):
    """An owner that emits the messages of the test; it also serves as its own session."""

    def __init__(self) -> None:
        self.server_session = cast("Any", self)
        self.session = self
        self.stream: ResponseStream
        self.outgoing: list[OutgoingMessage] = []
        self.open: set[Id] = set()
        self.changes: list[str] = []
        self.undelivered: list[Id] = []

    @property
    def queue(self) -> list[OutgoingMessage]:
        return self.outgoing

    def label_of(self, id: Id) -> ResponseStream | None:
        return self.stream if id in self.open else None

    def pull(self, stream: ResponseStream) -> None:
        assert stream is self.stream
        outgoing, self.outgoing = self.outgoing, []
        for message in outgoing:
            stream.put(message)

    def opened(self, stream: ResponseStream) -> None:
        self.changes.append("opened")

    def detached(self, stream: ResponseStream, retry: float | None = None) -> None:
        assert not stream.attached
        self.changes.append("detached")

    def ended(self, stream: ResponseStream) -> None:
        assert not stream.attached
        self.changes.append("ended")

    def undeliverable(self, id: Id) -> None:
        self.undelivered.append(id)

    # The messages of the test.

    def emit(self, *messages: OutgoingMessage | int) -> None:
        self.outgoing += [notification(each) if isinstance(each, int) else each for each in messages]
        self.stream.wake()

    def answer(self, id: Id = 1, message: OutgoingMessage | None = None) -> None:
        self.open.discard(id)
        self.emit(Response(id, {"n": "answer"}) if message is None else message)

    def prepare(self, *messages: OutgoingMessage) -> None:
        """Queue messages without a wake-up; all requests count as answered."""
        self.open.clear()
        self.outgoing += messages

    def cancel(self, id: Id = 1) -> None:
        self.open.discard(id)
        self.stream.wake()


class FailingLog(MemoryEventLog):
    """An event log with operations that fail; `fails` names them."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: set[str] = set()

    def open(self) -> str:
        self._check("open")
        return super().open()

    def append(self, stream: str, data: Sequence[bytes]) -> Sequence[str]:
        self._check("append")
        return super().append(stream, data)

    def finish(self, stream: str) -> None:
        self._check("finish")
        super().finish(stream)

    def _check(self, operation: str) -> None:
        if operation in self.fails:
            raise OSError(f"cannot {operation}")


class Bench:
    """A response stream, its owner, and the current response."""

    def __init__(self, nursery: trio.Nursery, mode: ResponseMode, ids: tuple[Id, ...], limit: int) -> None:
        self.owner = ScriptedOwner()
        self.shared = EndpointStreams(nursery, limit, IdleOrder(15.0), IdleOrder(60.0))
        self.mode = mode
        self.stream = self.owner.stream = ResponseStream(self.owner, mode, self.shared, ids)
        self.owner.open.update(ids)
        self.response = Recorder()
        self.on_disconnect: Callable[[], None] = lambda: None

    async def attach(self, after: str | None = None) -> Recorder:
        """Attach a new response.  Its client has all events up to the id `after`."""
        missed = b""
        if after is not None:
            assert self.mode.log is not None
            replay = self.mode.log.replay(after)
            assert isinstance(replay, Replay)
            assert replay.stream == self.stream.name
            missed = b"".join(encode_message(event.data, event.id) for event in replay.events)
        self.response = Recorder()
        self.on_disconnect = self.stream.attach(self.response, CORS, missed)
        await self.stream.flush()
        await wait_all_tasks_blocked()
        return self.response

    async def emit(self, *messages: OutgoingMessage | int) -> None:
        self.owner.emit(*messages)
        await wait_all_tasks_blocked()

    async def answer(self, id: Id = 1, message: OutgoingMessage | None = None) -> None:
        self.owner.answer(id, message)
        await wait_all_tasks_blocked()

    async def disconnect(self) -> None:
        self.response.cut()
        self.on_disconnect()
        await wait_all_tasks_blocked()

    @property
    def received(self) -> list[Any]:
        return numbers(self.response)


def notification(n: int) -> Notification:
    return Notification("n", {"n": n})


def question(id: int) -> Request:
    return Request(id, "q", {"n": f"question {id}"})


def numbers(response: Recorder) -> list[Any]:
    """The numbers in the messages of a response."""
    return [each.get("params", each.get("result", {})).get("n") for each in response.messages]


@asynccontextmanager
async def new_bench(
    answer: Answer = EITHER,
    revision: Any = D,
    *,
    ids: tuple[Id, ...] = (1,),
    log: Any = True,
    limit: int = 256,
    **mode: Any,
) -> AsyncIterator[Bench]:
    events = MemoryEventLog() if log is True else None if log is False else log
    with checked_responses():
        async with trio.open_nursery() as nursery:
            yield Bench(nursery, ResponseMode(answer, revision, events, **mode), ids, limit)
            # The end of the nursery waits for the writer tasks: no test may leave one behind.


# The choice between JSON and an event stream


@pytest.mark.parametrize("answer", [EITHER, JSON])
async def test_an_answer_without_earlier_messages_is_json(answer: Answer, autojump_clock: MockClock) -> None:
    async with new_bench(answer) as bench:
        response = await bench.attach()
        assert response.status is None
        assert len(bench.shared.attached) == 1
        await bench.answer()
        assert (response.status, response.json) == (200, {"jsonrpc": "2.0", "id": 1, "result": {"n": "answer"}})
        assert response.headers == {
            "Content-Type": "application/json", "Cache-Control": "no-store",
            "Access-Control-Allow-Origin": "http://localhost",
        }  # fmt: skip
        assert response.ended
        assert bench.owner.changes == ["ended"]
        assert not len(bench.shared.attached)
        bench.on_disconnect()
        assert bench.owner.changes == ["ended"]


@pytest.mark.parametrize(
    ("revision", "code", "status"),
    [(E, -32601, 404), (E, -32021, 400), (E, -32603, 200), (D, -32601, 200), (None, -1, 200)],
)
@pytest.mark.parametrize("answer", [EITHER, JSON, STREAM])
async def test_an_error_has_the_status_of_its_revision_for_each_accept(
    revision: Any, code: int, status: int, answer: Answer, autojump_clock: MockClock
) -> None:
    async with new_bench(answer, revision, log=False) as bench:
        bench.owner.prepare(Error(1, code, "no"))
        response = await bench.attach()
        assert (response.status, response.ended) == (status, True)
        assert response.streams is (answer is STREAM and status == 200)
        body = response.messages if response.streams else [response.json]
        assert body[0]["error"]["code"] == code


async def test_an_error_after_a_notification_is_part_of_the_stream(autojump_clock: MockClock) -> None:
    async with new_bench(revision=E, log=False) as bench:
        response = await bench.attach()
        await bench.emit(1)
        await bench.answer(message=Error(1, -32601, "no"))
        assert response.status == 200
        assert response.messages[-1]["error"]["code"] == -32601
        assert response.ended


async def test_an_answer_that_is_being_written_does_not_count_as_waiting(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        response.hold()
        await bench.answer()
        assert bench.stream.waiting == 0
        response.go_on()


async def test_a_wake_up_without_messages_starts_no_task(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        await bench.attach()
        bench.stream.wake()
        assert not bench.shared.nursery.child_tasks
        await bench.emit(1)
        bench.stream.wake()
        assert not bench.shared.nursery.child_tasks
        await bench.answer()


async def test_the_session_is_named_in_the_head_of_the_answer(autojump_clock: MockClock) -> None:
    for answer in (JSON, STREAM):
        async with new_bench(answer, None, log=False) as bench:
            bench.stream.session_id = "the session"
            bench.owner.prepare(Response(1, {}))
            response = await bench.attach()
            assert response.headers["Mcp-Session-Id"] == "the session"


@pytest.mark.parametrize("queued", [False, True])
async def test_a_response_is_empty_when_all_its_requests_were_cancelled(
    queued: bool, autojump_clock: MockClock
) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        if queued:
            # cancel-18: the notification has not been sent, and is not sent after the cancellation.
            bench.owner.outgoing.append(notification(1))
        bench.owner.cancel()
        await wait_all_tasks_blocked()
        assert (response.status, response.body, response.ended) == (202, b"", True)
        assert bench.owner.changes == ["ended"]
        assert response.headers == dict(CORS)
    async with new_bench(STREAM, E, log=False) as bench:
        bench.owner.prepare()
        response = await bench.attach()
        assert (response.status, response.body, response.ended) == (200, b"", True)
    async with new_bench() as bench:
        response = await bench.attach()
        await bench.emit(1)
        response.hold()
        await bench.emit(2)
        bench.owner.outgoing.append(notification(3))
        bench.owner.cancel()
        response.go_on()
        await wait_all_tasks_blocked()
        assert bench.received == [1, 2]
        assert response.ended


async def test_a_json_response_drops_all_messages_but_the_answer(autojump_clock: MockClock) -> None:
    async with new_bench(JSON) as bench:
        response = await bench.attach()
        assert bench.stream.answers_only
        await bench.emit(1, question(7))
        await trio.sleep(100)
        bench.stream.send_keep_alive()
        assert not bench.stream.hang_up(1)
        await wait_all_tasks_blocked()
        assert response.status is None
        await bench.answer()
        assert response.json["id"] == 1


async def test_a_message_before_the_answer_makes_a_stream(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        await bench.emit(1)
        assert bench.owner.changes == ["opened"]
        assert (response.status, response.streams, response.ended) == (200, True, False)
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Access-Control-Allow-Origin"] == "http://localhost"
        await bench.emit(2, question(7))
        await bench.answer()
        assert bench.received == [1, 2, "question 7", "answer"]
        assert [event.id for event in response.events] == ["1-0", "1-1", "1-2", "1-3", "1-4"]
        assert response.ended
        assert bench.owner.changes == ["opened", "ended"]
        assert events_after(bench, "1-0") == 4


def events_after(bench: Bench, after: str) -> int:
    """The number of events after this one in the log of a stream that is over."""
    assert bench.mode.log is not None
    replay = bench.mode.log.replay(after)
    assert isinstance(replay, Replay)
    assert replay.finished
    return len(replay.events)


async def test_an_answer_and_the_messages_before_it_can_share_a_write(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        bench.owner.prepare(notification(1), Response(1, {"n": "answer"}))
        response = await bench.attach()
        assert len(response.writes) == 1
        assert bench.received == [1, "answer"]


async def test_a_batch_is_answered_by_one_array(autojump_clock: MockClock) -> None:
    answers = Batch((Response(1, {}), Response("b", {})))
    for revision, stream in ((B, False), (B, True)):
        async with new_bench(STREAM if stream else EITHER, revision, ids=(1, "b")) as bench:
            response = await bench.attach()
            bench.owner.open.discard(1)
            bench.stream.wake()
            await wait_all_tasks_blocked()
            assert not response.ended
            await bench.answer("b", answers)
            body = response.messages[0] if stream else response.json
            assert [each["id"] for each in body] == [1, "b"]
            assert response.ended


# Keep-alive


async def test_an_idle_response_becomes_a_stream_with_keep_alive_comments(autojump_clock: MockClock) -> None:
    async with new_bench(revision=B) as bench:
        response = await bench.attach()

        async def watch() -> None:
            while True:
                (await bench.shared.attached.next()).send_keep_alive()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await trio.sleep(40)
            assert (response.status, response.comments, response.times) == (200, 2, [15, 30])
            await bench.emit(1)
            await trio.sleep(20)
            assert response.times == [15, 30, 40, 55]
            await bench.answer()
            nursery.cancel_scope.cancel()
        assert response.comments == 3
        assert bench.received == [1, "answer"]


async def test_a_keep_alive_comment_is_not_added_to_another_write(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        bench.stream.send_keep_alive()
        await wait_all_tasks_blocked()
        assert [event.id for event in response.events] == ["1-0"]  # the priming event also keeps the connection alive
        assert response.comments == 0
        response.hold()
        bench.stream.send_keep_alive()
        await wait_all_tasks_blocked()
        for _ in range(5):  # while the first comment cannot be written
            bench.stream.send_keep_alive()
        response.go_on()
        await wait_all_tasks_blocked()
        assert response.comments == 2
        response.hold()
        await bench.emit(1)
        bench.stream.send_keep_alive()
        await bench.answer()
        response.go_on()
        await wait_all_tasks_blocked()
        assert (response.comments, bench.received) == (2, [1, "answer"])


# The client disconnects and reconnects


@pytest.mark.parametrize("revision", [B, D])
async def test_a_client_without_an_event_id_cannot_resume(revision: Any, autojump_clock: MockClock) -> None:
    async with new_bench(revision=revision) as bench:
        await bench.attach()
        await bench.disconnect()
        assert bench.owner.changes == ["detached"]
        assert bench.stream.name is None
        await bench.emit(1, question(7))
        assert bench.owner.undelivered == [7]
        assert (bench.stream.mark, bench.stream.full, bench.stream.waiting) == (0, False, 0)
        await bench.stream.room()
        await bench.stream.written(3)
        assert not bench.stream.hang_up(1)
        bench.owner.open.clear()
        await bench.stream.flush()
        assert bench.owner.changes == ["detached", "ended"]


async def test_a_comment_has_no_event_id(autojump_clock: MockClock) -> None:
    async with new_bench(revision=B) as bench:
        response = await bench.attach()
        bench.stream.send_keep_alive()
        await wait_all_tasks_blocked()
        assert response.comments == 1
        await bench.disconnect()
        assert bench.stream.name is None
        await bench.emit(question(7))
        assert bench.owner.undelivered == [7]


async def test_an_undelivered_question_fails_if_the_client_cannot_resume(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        await bench.attach()
        bench.owner.outgoing.append(question(7))
        bench.on_disconnect()
        assert bench.owner.undelivered == [7]
    async with new_bench() as bench:  # it stays pending if the client can reconnect for it
        response = await bench.attach()
        response.hold()
        await bench.emit(question(7))
        bench.owner.outgoing.append(question(8))
        await bench.disconnect()
        assert bench.owner.undelivered == []
        await bench.attach("1-0")
        assert bench.received == ["question 7", "question 8"]


@pytest.mark.parametrize("seen", range(4))
async def test_missed_events_are_sent_before_new_events(seen: int, autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        await bench.attach()
        await bench.emit(1, 2)
        await bench.disconnect()
        assert bench.owner.changes == ["opened", "detached"]
        await bench.emit(3)
        response = await bench.attach(f"1-{seen}")
        assert bench.owner.changes == ["opened", "detached", "opened"]
        assert bench.received == [1, 2, 3][seen:]
        await bench.emit(4)
        await bench.answer()
        assert bench.received == [*[1, 2, 3, 4][seen:], "answer"]
        assert [event.id for event in response.events] == [f"1-{n}" for n in range(seen + 1, 6)]
        assert response.ended


async def test_an_answer_is_kept_for_a_disconnected_client(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        await bench.attach()
        await bench.emit(1)
        await bench.disconnect()
        await bench.answer()
        assert bench.owner.changes == ["opened", "detached", "ended"]
        assert events_after(bench, "1-1") == 1


async def test_waiting_messages_are_kept_in_order_after_a_disconnection(autojump_clock: MockClock) -> None:
    async with new_bench(limit=2) as bench:
        response = await bench.attach()
        await bench.emit(1)
        response.hold()
        await bench.emit(2)  # this one is being written
        bench.owner.outgoing += [notification(3), notification(4)]
        assert bench.stream.full  # `full` takes the messages out of the session
        bench.owner.outgoing.append(notification(5))
        await bench.disconnect()
        await bench.emit(6)
        await bench.attach("1-1")
        await bench.answer()
        assert bench.received == [2, 3, 4, 5, 6, "answer"]


@pytest.mark.parametrize("held", [False, True], ids=["idle", "in the middle of a write"])
async def test_a_new_connection_of_the_client_takes_over_the_stream(held: bool, autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        first, first_gone = await bench.attach(), bench.on_disconnect
        await bench.emit(1)
        if held:
            first.hold()
        await bench.emit(2)
        bench.owner.outgoing.append(notification(3))
        second = await bench.attach("1-1")
        assert first.dropped
        assert numbers(second) == [2, 3]
        first_gone()
        assert bench.stream.attached
        assert len(bench.shared.attached) == 1
        third = await bench.attach("1-3")  # a second time
        assert second.dropped
        await bench.answer()
        assert numbers(third) == ["answer"]
        assert "detached" not in bench.owner.changes


async def test_a_new_connection_can_get_the_end_of_the_stream(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        first = await bench.attach()
        await bench.emit(1)
        first.hold()
        await bench.answer()
        second = await bench.attach("1-1")
        assert (numbers(second), second.ended) == (["answer"], True)
        assert bench.owner.changes == ["opened", "opened", "ended"]


# Failing writes


@pytest.mark.parametrize("begun", [False, True])
async def test_a_failing_write_counts_as_a_disconnection(begun: bool, autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        if begun:
            await bench.emit(1)
        response.cut()
        await bench.emit(2)
        assert bench.owner.changes == [*["opened"] * begun, *["opened"] * (not begun), "detached"]
        bench.on_disconnect()
        await bench.answer()
        assert bench.owner.changes[-1] == "ended"
        assert events_after(bench, "1-0") == 2 + begun


async def test_an_unexpected_exception_of_a_write_is_logged_and_drops_the_response(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        response.failure = RuntimeError("a bug")
        await bench.emit(1)
        assert response.dropped
        assert "a bug" in caplog.text
        assert bench.owner.changes == ["opened", "detached"]
        assert caplog.records[0].levelno == logging.ERROR
        await bench.attach("1-0")
        assert bench.received == [1]
        await bench.answer()


async def test_a_due_keep_alive_comment_is_not_sent_on_the_next_response(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        await bench.emit(1)
        response.hold()
        await bench.emit(2)
        bench.stream.send_keep_alive()  # the comment cannot be written
        await bench.disconnect()
        again = await bench.attach("1-2")
        assert (again.status, again.body) == (200, b"")
        await bench.answer()


# Hanging up: the server asks the client to reconnect


async def test_hang_up_asks_the_client_to_reconnect_for_the_rest(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        assert bench.stream.hang_up(2.5)
        await wait_all_tasks_blocked()
        assert response.ended
        assert [(event.id, event.data, event.retry) for event in response.events] == [
            ("1-0", b"", None), ("1-1", b"", 2500),
        ]  # fmt: skip
        assert bench.owner.changes == ["opened", "detached"]
        await bench.emit(1)
        again = await bench.attach("1-1")
        assert not again.ended
        await bench.answer()
        assert bench.received == [1, "answer"]


async def test_messages_during_a_hang_up_are_kept(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        await bench.emit(1)
        response.hold()
        bench.stream.hang_up(1)
        await wait_all_tasks_blocked()
        bench.owner.outgoing.append(notification(2))
        assert bench.stream.waiting == 1
        bench.owner.answer()
        response.go_on()
        await wait_all_tasks_blocked()
        assert numbers(response) == [1]
        assert bench.owner.changes == ["opened", "detached", "ended"]
        assert events_after(bench, response.last_id) == 2


async def test_hang_up_has_no_effect_if_the_answer_is_already_there(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        await bench.emit(1)
        response.hold()
        await bench.emit(2)
        assert bench.stream.hang_up(1)
        bench.owner.answer()
        response.go_on()
        await wait_all_tasks_blocked()
        assert bench.received == [1, 2, "answer"]
        assert not any(event.retry for event in response.events)
        assert bench.owner.changes == ["opened", "ended"]


async def test_a_client_that_reconnects_before_the_hang_up_stays(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        await bench.emit(1)
        response.hold()
        await bench.emit(2)
        bench.stream.hang_up(1)
        again = await bench.attach("1-1")
        assert not again.ended
        await bench.answer()
        assert (bench.received, again.events[-1].retry) == ([2, "answer"], None)


@pytest.mark.parametrize(
    ("answer", "revision", "log"), [(EITHER, B, True), (EITHER, E, False), (JSON, D, True), (EITHER, None, False)]
)
async def test_hang_up_is_for_resumable_streams_only(
    answer: Answer, revision: Any, log: bool, autojump_clock: MockClock
) -> None:
    async with new_bench(answer, revision, log=log) as bench:
        await bench.attach()
        assert not bench.stream.hang_up(1)
        await bench.answer()
        assert bench.response.json


# Streams without requests


@pytest.mark.parametrize("revision", [B, D])
@pytest.mark.parametrize("retry", [None, 3.0])
async def test_a_stream_without_requests_ends_after_finish(
    revision: Any, retry: float | None, autojump_clock: MockClock
) -> None:
    async with new_bench(STREAM, revision, ids=()) as bench:
        response = await bench.attach()
        primed = ["1-0"] if revision is D else []
        assert [event.id for event in response.events] == primed
        await bench.emit(1)
        response.hold()
        await bench.emit(2)
        bench.owner.outgoing.append(notification(3))
        bench.stream.finish(retry=retry)
        response.go_on()
        await wait_all_tasks_blocked()
        assert bench.received == [1, 2, 3]
        assert response.ended
        assert response.events[-1].retry == (3000 if retry and revision is D else None)
        assert bench.owner.changes == ["opened", "ended"]


async def test_a_stream_without_requests_ends_while_its_client_is_away(autojump_clock: MockClock) -> None:
    async with new_bench(STREAM, ids=()) as bench:
        await bench.attach()
        await bench.disconnect()
        bench.stream.finish(retry=1)
        bench.stream.finish()
        assert bench.owner.changes == ["opened", "detached", "ended"]


async def test_a_stream_begins_with_its_opening_bytes(autojump_clock: MockClock) -> None:
    async with new_bench(STREAM, None, ids=(), log=False, opening=b"event: endpoint\ndata: /x\n\n") as bench:
        response = await bench.attach()
        assert response.body == b"event: endpoint\ndata: /x\n\n"
        await bench.emit(1)
        assert [(event.event, event.id) for event in response.events] == [("endpoint", None), ("message", None)]
        await bench.disconnect()
        bench.stream.finish()


# The end of the server


@pytest.mark.parametrize("state", ["new", "stream", "writing", "away", "over"])
async def test_the_server_can_stop_at_any_time(state: str, autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        if state != "new":
            await bench.emit(1)
        if state == "writing":
            response.hold()
            await bench.emit(2)
        if state == "away":
            await bench.disconnect()
        if state == "over":
            await bench.answer()
        bench.stream.close()
        bench.stream.close()
        assert response.dropped is (state not in ("away", "over"))
        assert bench.owner.changes.count("ended") == 1
        assert not len(bench.shared.attached)
        bench.on_disconnect()
        bench.stream.wake()
        await bench.stream.flush()
        bench.owner.stream.put(notification(3))
        await wait_all_tasks_blocked()
        assert bench.owner.changes.count("ended") == 1
        assert not bench.stream.full


async def test_close_discards_waiting_messages_so_that_no_task_waits(autojump_clock: MockClock) -> None:
    async with new_bench(limit=1) as bench:
        response = await bench.attach()
        await bench.emit(1)
        response.hold()
        await bench.emit(2)
        bench.owner.outgoing += [notification(3), notification(4)]
        assert (bench.stream.waiting, bench.stream.full) == (2, True)
        bench.stream.close()
        assert (bench.stream.waiting, bench.stream.full) == (0, False)


async def test_messages_on_a_finished_stream_are_discarded(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        await bench.attach()
        await bench.emit(1)
        await bench.answer()
        bench.stream.put(notification(2))
        bench.stream.put(question(7))
        assert events_after(bench, "1-0") == 2
        assert bench.owner.undelivered == []


async def test_close_after_a_failing_log_reports_the_end_once(autojump_clock: MockClock) -> None:
    log = FailingLog()
    async with new_bench(log=log) as bench:
        await bench.attach()
        log.fails = {"append"}
        await bench.emit(1)
        assert bench.owner.changes[-1] == "ended"
        bench.stream.close()
        assert bench.owner.changes.count("ended") == 1


async def test_a_finished_stream_is_not_referenced(autojump_clock: MockClock) -> None:
    gc.collect()
    gc.disable()
    try:
        for numbers_before in ([], [1]):
            async with trio.open_nursery() as nursery:
                bench = Bench(nursery, ResponseMode(EITHER, E), (1,), 9)
                await bench.attach()
                await bench.emit(*numbers_before)
                await bench.answer()
            kept = [weakref.ref(bench.stream), weakref.ref(bench.owner)]
            bench.owner.server_session = bench.owner.session = None  # type: ignore[assignment]  # breaks a reference cycle that only the test has
            del bench
            await trio.lowlevel.checkpoint()
            assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


# Failing event logs


@pytest.mark.parametrize("fails", ["open", "append"])
@pytest.mark.parametrize("away", [False, True])
async def test_a_failing_log_ends_its_stream_only(
    fails: str, away: bool, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = FailingLog()
    async with new_bench(revision=B, log=log) as bench:
        response = await bench.attach()
        if fails == "append" or away:
            await bench.emit(1)
        if away:
            await bench.disconnect()
        log.fails = {fails} if not away else {"append"}
        await bench.emit(2, question(7))
        assert response.dropped is not away
        assert bench.owner.changes[-1] == "ended"
        assert bench.owner.undelivered == [7]
        assert "cannot" in caplog.text
        assert len(caplog.records) == 1
        # The request continues, but its messages are not delivered.
        await bench.emit(3, question(8))
        await bench.answer()
        assert bench.owner.undelivered == [7, 8]
        assert bench.owner.changes.count("ended") == 1


async def test_an_invalid_event_id_counts_as_a_failing_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class InvalidIdLog(MemoryEventLog):
        invalid = False

        def append(self, stream: str, data: Sequence[bytes]) -> Sequence[str]:
            return [id + "\n" * self.invalid for id in super().append(stream, data)]

    log = InvalidIdLog()
    for away in (False, True):
        async with new_bench(log=log) as bench:
            log.invalid = False
            response = await bench.attach()
            await bench.emit(1)
            if away:
                await bench.disconnect()
            log.invalid = True
            await bench.emit(2)
            assert "an event id must be" in caplog.text
            assert response.dropped is not away
            assert bench.owner.changes[-1] == "ended"
            caplog.clear()


async def test_waiting_messages_are_logged_once_if_the_log_fails_in_between(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = FailingLog()
    async with new_bench(log=log) as bench:
        response = await bench.attach()
        await bench.emit(1)
        response.hold()
        await bench.emit(2)
        bench.owner.outgoing += [notification(3), notification(4), question(7)]
        assert bench.stream.waiting == 3
        append, left = MemoryEventLog.append, 1

        def once(stream: str, data: Sequence[bytes]) -> Sequence[str]:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError("cannot append")
            return append(log, stream, data)

        log.append = once  # type: ignore[method-assign]
        await bench.disconnect()
        assert bench.owner.changes == ["opened", "ended"]
        assert bench.owner.undelivered == [7]
        replay = log.replay("1-0")
        assert isinstance(replay, Replay)
        assert [json.loads(event.data)["params"]["n"] for event in replay.events] == [1, 2, 3]


async def test_a_failure_of_finish_in_the_log_is_only_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = FailingLog()
    log.fails = {"finish"}
    async with new_bench(log=log) as bench:
        response = await bench.attach()
        await bench.emit(1)
        await bench.answer()
        assert response.ended
        assert bench.owner.changes == ["opened", "ended"]
        assert "cannot finish" in caplog.text


# `ResponseStream` as the `Wire` of a session


async def test_a_notification_can_be_written_separately_from_the_answer(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        bench.owner.outgoing.append(notification(1))
        mark = bench.stream.mark
        await bench.stream.written(mark)
        bench.owner.open.clear()
        bench.owner.outgoing.append(Response(1, {}))
        await bench.stream.flush()
        assert len(response.writes) == 2
        assert response.ended


async def test_senders_wait_for_a_client_that_does_not_read(autojump_clock: MockClock) -> None:
    async with new_bench(limit=3) as bench:
        response = await bench.attach()
        response.hold()
        waited: list[float] = []

        async def report(n: int) -> None:
            bench.owner.emit(n)
            await bench.stream.room()
            waited.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            for n in range(1, 10):
                await trio.sleep(1)
                nursery.start_soon(report, n)
            await trio.sleep(1)
            assert waited == [1, 2, 3, 4]
            assert bench.stream.full
            assert bench.stream.crowded
            response.go_on()
        assert waited == [1, 2, 3, 4, *[10] * 5]
        await bench.answer()
        assert bench.received == [*range(1, 10), "answer"]


async def test_senders_continue_after_a_disconnection_or_a_new_response(autojump_clock: MockClock) -> None:
    for leaves in (True, False):
        async with new_bench(limit=1) as bench:
            response = await bench.attach()
            await bench.emit(0)
            response.hold()
            await bench.emit(1)
            bench.owner.outgoing += [notification(2), notification(3), notification(4)]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.stream.room)
                nursery.start_soon(bench.stream.written, bench.stream.mark)
                await wait_all_tasks_blocked()
                if leaves:
                    bench.on_disconnect()  # while the write is in progress
                else:
                    await bench.attach("1-1")
            if leaves:
                response.cut()
                await bench.attach("1-1")
            await bench.answer()
            assert bench.received == [1, 2, 3, 4, "answer"]


async def test_a_stream_is_full_at_its_limit(autojump_clock: MockClock) -> None:
    async with new_bench(limit=2) as bench:
        response = await bench.attach()
        await bench.emit(0)
        response.hold()
        await bench.emit(1)
        for waiting in range(3):
            assert (bench.stream.waiting, bench.stream.full, bench.stream.crowded) == (
                waiting,
                waiting == 2,
                waiting == 2,
            )
            bench.owner.outgoing.append(notification(2 + waiting))
        response.go_on()
        await bench.answer()


async def test_senders_continue_when_the_server_stops(autojump_clock: MockClock) -> None:
    async with new_bench(limit=1) as bench:
        response = await bench.attach()
        await bench.emit(0)
        response.hold()
        await bench.emit(1)
        bench.owner.outgoing += [notification(2), notification(3)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.stream.room)
            nursery.start_soon(bench.stream.written, bench.stream.mark)
            await wait_all_tasks_blocked()
            bench.stream.close()


async def test_a_flush_without_messages_writes_nothing(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        response = await bench.attach()
        await bench.stream.flush()
        assert response.status is None
        await bench.emit(1)
        await bench.stream.flush()
        assert len(response.writes) == 1
        await bench.answer()


async def test_a_write_that_succeeds_after_the_disconnection_has_no_effect(
    autojump_clock: MockClock,
) -> None:
    for last in (True, False):
        async with new_bench() as bench:
            response = await bench.attach()
            await bench.emit(1)
            response.hold()
            await (bench.answer() if last else bench.emit(2))
            bench.on_disconnect()
            response.go_on()
            await wait_all_tasks_blocked()
            assert bench.owner.changes == ["opened", "detached", "ended"][: 2 + last]
            assert not len(bench.shared.attached)
            if not last:
                await bench.answer()
            assert events_after(bench, "1-1") == 1 + (not last)


async def test_all_waits_of_a_stream_are_checkpoints(autojump_clock: MockClock) -> None:
    async with new_bench() as bench:
        for carried in (True, False):
            if carried:
                await bench.attach()
            else:
                await bench.disconnect()
            for wait in (bench.stream.flush, bench.stream.room):
                with trio.testing.assert_checkpoints():
                    await wait()
        bench.owner.open.clear()
        bench.stream.wake()


@pytest.mark.parametrize("seed", range(3))
def test_senders_can_be_cancelled_at_each_step(seed: int) -> None:
    """The writer task is shielded from cancellation, so a cancelled caller loses no message."""

    async def scenario(attempt: Attempt) -> None:
        async with new_bench(limit=2) as bench:
            response = await bench.attach()

            async def speak() -> None:
                with attempt.window():
                    for n in range(1, 4):
                        bench.owner.outgoing.append(notification(n))
                        mark = bench.stream.mark
                        await bench.stream.flush()
                        await bench.stream.room()
                        await bench.stream.written(mark)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(speak)
                for _ in range(3):
                    response.hold()
                    await trio.sleep(1)
                    response.go_on()
                    await trio.sleep(1)
            bench.owner.open.clear()
            bench.owner.outgoing.append(Response(1, {"n": "answer"}))
            await bench.stream.flush()
            await wait_all_tasks_blocked()
            assert response.ended
            if response.streams:
                received = numbers(response)
                assert received == [*range(1, len(received)), "answer"]

    assert cancel_at_each_step(scenario, watch=any_task, seed=seed) > 5


# Random sequences of actions

ACTIONS = st.sampled_from([
    "emit", "emit", "ask", "keep alive", "disconnect", "reconnect", "reconnect with an older id", "hold", "cut",
    "hang up", "step",
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([B, D]), st.sampled_from([EITHER, STREAM]), st.lists(ACTIONS, max_size=40), st.integers(1, 5))
def test_a_reconnecting_client_gets_each_message_once_and_in_order(
    revision: Any, answer: Answer, actions: list[str], limit: int
) -> None:
    async def main() -> None:
        async with new_bench(answer, revision, limit=limit) as bench:
            client = ModelClient(bench)
            await bench.attach()
            for action in actions:
                await client.run(action)
            bench.owner.answer()
            await client.check_all()

    trio.run(main, clock=MockClock(autojump_threshold=0))


class ModelClient:
    """A model of the client: it runs random actions, and checks that it received each message once and in order."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.sent: list[Any] = []
        self.received: list[
            tuple[str, Any]
        ] = []  # the ids and numbers of events; the number is None if the event has an id only

    async def run(self, action: str) -> None:
        bench = self.bench
        if action in ("emit", "ask"):
            n = len(self.sent) + 1
            self.sent.append(n)
            bench.owner.emit(n if action == "emit" else Request(n, "q", {"n": n}))
        elif action == "keep alive":
            bench.stream.send_keep_alive()
        elif action == "disconnect":
            bench.response.cut()
            bench.on_disconnect()
        elif action == "reconnect":
            await self.reconnect()
        elif action == "reconnect with an older id":
            await self.reconnect(back=2)
        elif action == "hold":
            bench.response.hold()
        elif action == "cut":
            bench.response.cut()
        elif action == "hang up":
            bench.stream.hang_up(1)
        else:
            await wait_all_tasks_blocked()

    async def reconnect(self, *, back: int = 0) -> None:
        """Attach a new response with the last event id, or with an earlier one."""
        self.take_events()
        if self.received:  # a client without an id cannot resume
            del self.received[max(1, len(self.received) - back) :]
            if not self.rest().finished:
                await self.bench.attach(self.received[-1][0])

    def take_events(self) -> None:
        """Take the events of the current response; later calls do not see them again."""
        if self.bench.response.streams:
            for event in self.bench.response.events:
                assert event.id is not None
                self.received.append((event.id, number_in(event.data)))
            self.bench.response.writes.clear()

    def rest(self) -> Replay:
        """The events that a reconnection would get."""
        assert self.bench.mode.log is not None
        replay = self.bench.mode.log.replay(self.received[-1][0])
        assert isinstance(replay, Replay)
        return replay

    async def check_all(self) -> None:
        """After the answer: check the received events together with those that a reconnection would get."""
        bench = self.bench
        bench.response.go_on()
        await wait_all_tasks_blocked()
        assert bench.owner.changes.count("ended") == 1
        assert bench.owner.changes[-1] == "ended"
        self.sent.append("answer")
        if bench.response.status is not None and not bench.response.streams:
            assert bench.response.json["result"]["n"] == "answer"
            assert self.sent == ["answer"]
            return
        self.take_events()
        if self.received:
            rest = self.rest()
            assert rest.finished
            received = [*self.received, *((event.id, number_in(event.data)) for event in rest.events)]
            assert [number for _, number in received if number is not None] == self.sent
            assert len({id for id, _ in received}) == len(received)


def number_in(data: bytes) -> Any:
    message = json.loads(data or b"{}")
    return message.get("params", message.get("result", {})).get("n")
