"""One lane: what its client gets, whatever becomes of the responses that carry it."""

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


class Voice(StreamOwner):
    """Says what a test tells it to; also the session of its own conversation."""

    def __init__(self) -> None:
        self.server_session = cast("Any", self)
        self.session = self
        self.lane: ResponseStream
        self.said: list[OutgoingMessage] = []
        self.open: set[Id] = set()
        self.told: list[str] = []
        self.unsent: list[Id] = []

    @property
    def queue(self) -> list[OutgoingMessage]:
        return self.said

    def label_of(self, id: Id) -> ResponseStream | None:
        return self.lane if id in self.open else None

    def pull(self, lane: ResponseStream) -> None:
        assert lane is self.lane
        said, self.said = self.said, []
        for message in said:
            lane.put(message)

    def opened(self, lane: ResponseStream) -> None:
        self.told.append("opened")

    def detached(self, lane: ResponseStream, retry: float | None = None) -> None:
        assert not lane.attached
        self.told.append("left")

    def ended(self, lane: ResponseStream) -> None:
        assert not lane.attached
        self.told.append("ended")

    def undeliverable(self, id: Id) -> None:
        self.unsent.append(id)

    # What a test says.

    def say(self, *messages: OutgoingMessage | int) -> None:
        self.said += [note(each) if isinstance(each, int) else each for each in messages]
        self.lane.wake()

    def answer(self, id: Id = 1, message: OutgoingMessage | None = None) -> None:
        self.open.discard(id)
        self.say(Response(id, {"n": "answer"}) if message is None else message)

    def ready(self, *messages: OutgoingMessage) -> None:
        """What is there before anybody asks for it, all being answered."""
        self.open.clear()
        self.said += messages

    def cancel(self, id: Id = 1) -> None:
        self.open.discard(id)
        self.lane.wake()


class FailingLog(MemoryEventLog):
    """Fails to do what is in `fails`."""

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

    def _check(self, what: str) -> None:
        if what in self.fails:
            raise OSError(f"cannot {what}")


class Scene:
    """A lane, who speaks on it, and the clients that come."""

    def __init__(self, nursery: trio.Nursery, way: ResponseMode, ids: tuple[Id, ...], limit: int) -> None:
        self.voice = Voice()
        self.shared = EndpointStreams(nursery, limit, IdleOrder(15.0), IdleOrder(60.0))
        self.way = way
        self.lane = self.voice.lane = ResponseStream(self.voice, way, self.shared, ids)
        self.voice.open.update(ids)
        self.response = Recorder()
        self.gone: Callable[[], None] = lambda: None

    async def carry(self, after: str | None = None) -> Recorder:
        """Another response carries it; what its client has, counts from `after` on."""
        missed = b""
        if after is not None:
            assert self.way.log is not None
            replay = self.way.log.replay(after)
            assert isinstance(replay, Replay)
            assert replay.stream == self.lane.name
            missed = b"".join(encode_message(event.data, event.id) for event in replay.events)
        self.response = Recorder()
        self.gone = self.lane.attach(self.response, CORS, missed)
        await self.lane.flush()
        await wait_all_tasks_blocked()
        return self.response

    async def say(self, *messages: OutgoingMessage | int) -> None:
        self.voice.say(*messages)
        await wait_all_tasks_blocked()

    async def answer(self, id: Id = 1, message: OutgoingMessage | None = None) -> None:
        self.voice.answer(id, message)
        await wait_all_tasks_blocked()

    async def leave(self) -> None:
        self.response.cut()
        self.gone()
        await wait_all_tasks_blocked()

    @property
    def got(self) -> list[Any]:
        return numbers(self.response)


def note(n: int) -> Notification:
    return Notification("n", {"n": n})


def question(id: int) -> Request:
    return Request(id, "q", {"n": f"question {id}"})


def numbers(response: Recorder) -> list[Any]:
    """What was said, without what it was said in."""
    return [each.get("params", each.get("result", {})).get("n") for each in response.messages]


@asynccontextmanager
async def scene(
    answer: Answer = EITHER,
    revision: Any = D,
    *,
    ids: tuple[Id, ...] = (1,),
    log: Any = True,
    limit: int = 256,
    **way: Any,
) -> AsyncIterator[Scene]:
    events = MemoryEventLog() if log is True else None if log is False else log
    with checked_responses():
        async with trio.open_nursery() as nursery:
            yield Scene(nursery, ResponseMode(answer, revision, events, **way), ids, limit)
            # Whatever a test does, nobody who writes is left behind.


# Undecided.


@pytest.mark.parametrize("answer", [EITHER, JSON])
async def test_an_answer_that_nothing_precedes_is_json(answer: Answer, autojump_clock: MockClock) -> None:
    async with scene(answer) as it:
        response = await it.carry()
        assert response.status is None
        assert len(it.shared.attached) == 1
        await it.answer()
        assert (response.status, response.json) == (200, {"jsonrpc": "2.0", "id": 1, "result": {"n": "answer"}})
        assert response.headers == {
            "Content-Type": "application/json", "Cache-Control": "no-store",
            "Access-Control-Allow-Origin": "http://localhost",
        }  # fmt: skip
        assert response.ended
        assert it.voice.told == ["ended"]
        assert not len(it.shared.attached)
        it.gone()
        assert it.voice.told == ["ended"]


@pytest.mark.parametrize(
    ("revision", "code", "status"),
    [(E, -32601, 404), (E, -32021, 400), (E, -32603, 200), (D, -32601, 200), (None, -1, 200)],
)
@pytest.mark.parametrize("answer", [EITHER, JSON, STREAM])
async def test_an_error_has_the_status_of_its_revision_whatever_the_client_takes(
    revision: Any, code: int, status: int, answer: Answer, autojump_clock: MockClock
) -> None:
    async with scene(answer, revision, log=False) as it:
        it.voice.ready(Error(1, code, "no"))
        response = await it.carry()
        assert (response.status, response.ended) == (status, True)
        assert response.streams is (answer is STREAM and status == 200)
        body = response.messages if response.streams else [response.json]
        assert body[0]["error"]["code"] == code


async def test_an_error_after_something_else_is_a_part_of_the_stream(autojump_clock: MockClock) -> None:
    async with scene(revision=E, log=False) as it:
        response = await it.carry()
        await it.say(1)
        await it.answer(message=Error(1, -32601, "no"))
        assert response.status == 200
        assert response.messages[-1]["error"]["code"] == -32601
        assert response.ended


async def test_what_is_being_written_waits_no_more(autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        response.hold()
        await it.answer()
        assert it.lane.waiting == 0
        response.go_on()


async def test_nobody_is_woken_for_nothing(autojump_clock: MockClock) -> None:
    async with scene() as it:
        await it.carry()
        it.lane.wake()
        assert not it.shared.nursery.child_tasks
        await it.say(1)
        it.lane.wake()
        assert not it.shared.nursery.child_tasks
        await it.answer()


async def test_the_session_is_named_in_the_head_of_the_answer(autojump_clock: MockClock) -> None:
    for answer in (JSON, STREAM):
        async with scene(answer, None, log=False) as it:
            it.lane.session_id = "the session"
            it.voice.ready(Response(1, {}))
            response = await it.carry()
            assert response.headers["Mcp-Session-Id"] == "the session"


@pytest.mark.parametrize("queued", [False, True])
async def test_where_all_was_cancelled_nothing_is_said(queued: bool, autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        if queued:
            it.voice.said.append(note(1))  # cancel-18: it was not sent, and will not be
        it.voice.cancel()
        await wait_all_tasks_blocked()
        assert (response.status, response.body, response.ended) == (202, b"", True)
        assert it.voice.told == ["ended"]
        assert response.headers == dict(CORS)
    async with scene(STREAM, E, log=False) as it:
        it.voice.ready()
        response = await it.carry()
        assert (response.status, response.body, response.ended) == (200, b"", True)
    async with scene() as it:
        response = await it.carry()
        await it.say(1)
        response.hold()
        await it.say(2)
        it.voice.said.append(note(3))
        it.voice.cancel()
        response.go_on()
        await wait_all_tasks_blocked()
        assert it.got == [1, 2]
        assert response.ended


async def test_what_is_only_json_drops_all_but_the_answer(autojump_clock: MockClock) -> None:
    async with scene(JSON) as it:
        response = await it.carry()
        assert it.lane.answers_only
        await it.say(1, question(7))
        await trio.sleep(100)
        it.lane.send_keep_alive()
        assert not it.lane.hang_up(1)
        await wait_all_tasks_blocked()
        assert response.status is None
        await it.answer()
        assert response.json["id"] == 1


async def test_what_precedes_the_answer_makes_a_stream(autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        await it.say(1)
        assert it.voice.told == ["opened"]
        assert (response.status, response.streams, response.ended) == (200, True, False)
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Access-Control-Allow-Origin"] == "http://localhost"
        await it.say(2, question(7))
        await it.answer()
        assert it.got == [1, 2, "question 7", "answer"]
        assert [event.id for event in response.events] == ["1-0", "1-1", "1-2", "1-3", "1-4"]
        assert response.ended
        assert it.voice.told == ["opened", "ended"]
        assert replayed(it, "1-0") == 4


def replayed(it: Scene, after: str) -> int:
    """How many events there are after this one on a stream that is over."""
    assert it.way.log is not None
    replay = it.way.log.replay(after)
    assert isinstance(replay, Replay)
    assert replay.finished
    return len(replay.events)


async def test_an_answer_and_what_precedes_it_may_go_out_together(autojump_clock: MockClock) -> None:
    async with scene() as it:
        it.voice.ready(note(1), Response(1, {"n": "answer"}))
        response = await it.carry()
        assert len(response.writes) == 1
        assert it.got == [1, "answer"]


async def test_a_batch_is_answered_by_one_array(autojump_clock: MockClock) -> None:
    answers = Batch((Response(1, {}), Response("b", {})))
    for revision, stream in ((B, False), (B, True)):
        async with scene(STREAM if stream else EITHER, revision, ids=(1, "b")) as it:
            response = await it.carry()
            it.voice.open.discard(1)
            it.lane.wake()
            await wait_all_tasks_blocked()
            assert not response.ended
            await it.answer("b", answers)
            body = response.messages[0] if stream else response.json
            assert [each["id"] for each in body] == [1, "b"]
            assert response.ended


# Silence.


async def test_silence_makes_a_stream_and_comments_keep_it_alive(autojump_clock: MockClock) -> None:
    async with scene(revision=B) as it:
        response = await it.carry()

        async def watch() -> None:
            while True:
                (await it.shared.attached.next()).send_keep_alive()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await trio.sleep(40)
            assert (response.status, response.comments, response.times) == (200, 2, [15, 30])
            await it.say(1)
            await trio.sleep(20)
            assert response.times == [15, 30, 40, 55]
            await it.answer()
            nursery.cancel_scope.cancel()
        assert response.comments == 3
        assert it.got == [1, "answer"]


async def test_a_sign_of_life_is_not_needed_beside_anything_else(autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        it.lane.send_keep_alive()
        await wait_all_tasks_blocked()
        assert [event.id for event in response.events] == ["1-0"]  # the priming event tells it too
        assert response.comments == 0
        response.hold()
        it.lane.send_keep_alive()
        await wait_all_tasks_blocked()
        for _ in range(5):  # while it cannot be written
            it.lane.send_keep_alive()
        response.go_on()
        await wait_all_tasks_blocked()
        assert response.comments == 2
        response.hold()
        await it.say(1)
        it.lane.send_keep_alive()
        await it.answer()
        response.go_on()
        await wait_all_tasks_blocked()
        assert (response.comments, it.got) == (2, [1, "answer"])


# The client leaves, and comes back.


@pytest.mark.parametrize("revision", [B, D])
async def test_who_leaves_before_there_was_an_id_cannot_come_back(revision: Any, autojump_clock: MockClock) -> None:
    async with scene(revision=revision) as it:
        await it.carry()
        await it.leave()
        assert it.voice.told == ["left"]
        assert it.lane.name is None
        await it.say(1, question(7))
        assert it.voice.unsent == [7]
        assert (it.lane.mark, it.lane.full, it.lane.waiting) == (0, False, 0)
        await it.lane.room()
        await it.lane.written(3)
        assert not it.lane.hang_up(1)
        it.voice.open.clear()
        await it.lane.flush()
        assert it.voice.told == ["left", "ended"]


async def test_a_comment_is_no_id(autojump_clock: MockClock) -> None:
    async with scene(revision=B) as it:
        response = await it.carry()
        it.lane.send_keep_alive()
        await wait_all_tasks_blocked()
        assert response.comments == 1
        await it.leave()
        assert it.lane.name is None
        await it.say(question(7))
        assert it.voice.unsent == [7]


async def test_a_question_that_nobody_has_got_fails_with_the_response(autojump_clock: MockClock) -> None:
    async with scene() as it:
        await it.carry()
        it.voice.said.append(question(7))
        it.gone()
        assert it.voice.unsent == [7]
    async with scene() as it:  # but one that the client may come back for, does not
        response = await it.carry()
        response.hold()
        await it.say(question(7))
        it.voice.said.append(question(8))
        await it.leave()
        assert it.voice.unsent == []
        await it.carry("1-0")
        assert it.got == ["question 7", "question 8"]


@pytest.mark.parametrize("seen", range(4))
async def test_what_was_missed_comes_first_and_then_the_rest(seen: int, autojump_clock: MockClock) -> None:
    async with scene() as it:
        await it.carry()
        await it.say(1, 2)
        await it.leave()
        assert it.voice.told == ["opened", "left"]
        await it.say(3)
        response = await it.carry(f"1-{seen}")
        assert it.voice.told == ["opened", "left", "opened"]
        assert it.got == [1, 2, 3][seen:]
        await it.say(4)
        await it.answer()
        assert it.got == [*[1, 2, 3, 4][seen:], "answer"]
        assert [event.id for event in response.events] == [f"1-{n}" for n in range(seen + 1, 6)]
        assert response.ended


async def test_what_is_answered_meanwhile_is_kept(autojump_clock: MockClock) -> None:
    async with scene() as it:
        await it.carry()
        await it.say(1)
        await it.leave()
        await it.answer()
        assert it.voice.told == ["opened", "left", "ended"]
        assert replayed(it, "1-1") == 1


async def test_what_waits_when_the_client_leaves_is_kept_in_its_order(autojump_clock: MockClock) -> None:
    async with scene(limit=2) as it:
        response = await it.carry()
        await it.say(1)
        response.hold()
        await it.say(2)  # on its way
        it.voice.said += [note(3), note(4)]
        assert it.lane.full  # which takes them out of the session
        it.voice.said.append(note(5))
        await it.leave()
        await it.say(6)
        await it.carry("1-1")
        await it.answer()
        assert it.got == [2, 3, 4, 5, 6, "answer"]


@pytest.mark.parametrize("held", [False, True], ids=["idle", "in the middle of a write"])
async def test_who_comes_back_by_another_connection_takes_the_lane_along(held: bool, autojump_clock: MockClock) -> None:
    async with scene() as it:
        first, first_gone = await it.carry(), it.gone
        await it.say(1)
        if held:
            first.hold()
        await it.say(2)
        it.voice.said.append(note(3))
        second = await it.carry("1-1")
        assert first.dropped
        assert numbers(second) == [2, 3]
        first_gone()
        assert it.lane.attached
        assert len(it.shared.attached) == 1
        third = await it.carry("1-3")  # and once more
        assert second.dropped
        await it.answer()
        assert numbers(third) == ["answer"]
        assert "left" not in it.voice.told


async def test_what_is_taken_along_may_be_the_end(autojump_clock: MockClock) -> None:
    async with scene() as it:
        first = await it.carry()
        await it.say(1)
        first.hold()
        await it.answer()
        second = await it.carry("1-1")
        assert (numbers(second), second.ended) == (["answer"], True)
        assert it.voice.told == ["opened", "opened", "ended"]


# Writes that fail.


@pytest.mark.parametrize("begun", [False, True])
async def test_a_write_that_fails_is_a_client_that_left(begun: bool, autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        if begun:
            await it.say(1)
        response.cut()
        await it.say(2)
        assert it.voice.told == [*["opened"] * begun, *["opened"] * (not begun), "left"]
        it.gone()
        await it.answer()
        assert it.voice.told[-1] == "ended"
        assert replayed(it, "1-0") == 2 + begun


async def test_what_fails_otherwise_is_told_and_the_response_dropped(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene() as it:
        response = await it.carry()
        response.failure = RuntimeError("a bug")
        await it.say(1)
        assert response.dropped
        assert "a bug" in caplog.text
        assert it.voice.told == ["opened", "left"]
        assert caplog.records[0].levelno == logging.ERROR
        await it.carry("1-0")
        assert it.got == [1]
        await it.answer()


async def test_who_comes_back_is_not_told_that_the_response_before_had_been_silent(autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        await it.say(1)
        response.hold()
        await it.say(2)
        it.lane.send_keep_alive()  # cannot be written
        await it.leave()
        again = await it.carry("1-2")
        assert (again.status, again.body) == (200, b"")
        await it.answer()


# Hanging up.


async def test_a_client_is_asked_to_come_back_for_the_rest(autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        assert it.lane.hang_up(2.5)
        await wait_all_tasks_blocked()
        assert response.ended
        assert [(event.id, event.data, event.retry) for event in response.events] == [
            ("1-0", b"", None), ("1-1", b"", 2500),
        ]  # fmt: skip
        assert it.voice.told == ["opened", "left"]
        await it.say(1)
        again = await it.carry("1-1")
        assert not again.ended
        await it.answer()
        assert it.got == [1, "answer"]


async def test_what_comes_while_it_is_hung_up_is_kept(autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        await it.say(1)
        response.hold()
        it.lane.hang_up(1)
        await wait_all_tasks_blocked()
        it.voice.said.append(note(2))
        assert it.lane.waiting == 1
        it.voice.answer()
        response.go_on()
        await wait_all_tasks_blocked()
        assert numbers(response) == [1]
        assert it.voice.told == ["opened", "left", "ended"]
        assert replayed(it, response.last_id) == 2


async def test_an_answer_that_is_there_already_is_not_worth_coming_back_for(autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        await it.say(1)
        response.hold()
        await it.say(2)
        assert it.lane.hang_up(1)
        it.voice.answer()
        response.go_on()
        await wait_all_tasks_blocked()
        assert it.got == [1, 2, "answer"]
        assert not any(event.retry for event in response.events)
        assert it.voice.told == ["opened", "ended"]


async def test_who_comes_back_before_is_not_sent_away(autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        await it.say(1)
        response.hold()
        await it.say(2)
        it.lane.hang_up(1)
        again = await it.carry("1-1")
        assert not again.ended
        await it.answer()
        assert (it.got, again.events[-1].retry) == ([2, "answer"], None)


@pytest.mark.parametrize(
    ("answer", "revision", "log"), [(EITHER, B, True), (EITHER, E, False), (JSON, D, True), (EITHER, None, False)]
)
async def test_only_who_can_come_back_is_hung_up(
    answer: Answer, revision: Any, log: bool, autojump_clock: MockClock
) -> None:
    async with scene(answer, revision, log=log) as it:
        await it.carry()
        assert not it.lane.hang_up(1)
        await it.answer()
        assert it.response.json


# What stands alone.


@pytest.mark.parametrize("revision", [B, D])
@pytest.mark.parametrize("retry", [None, 3.0])
async def test_what_stands_alone_ends_when_it_is_told_to(
    revision: Any, retry: float | None, autojump_clock: MockClock
) -> None:
    async with scene(STREAM, revision, ids=()) as it:
        response = await it.carry()
        primed = ["1-0"] if revision is D else []
        assert [event.id for event in response.events] == primed
        await it.say(1)
        response.hold()
        await it.say(2)
        it.voice.said.append(note(3))
        it.lane.finish(retry=retry)
        response.go_on()
        await wait_all_tasks_blocked()
        assert it.got == [1, 2, 3]
        assert response.ended
        assert response.events[-1].retry == (3000 if retry and revision is D else None)
        assert it.voice.told == ["opened", "ended"]


async def test_what_stands_alone_ends_also_when_its_client_is_away(autojump_clock: MockClock) -> None:
    async with scene(STREAM, ids=()) as it:
        await it.carry()
        await it.leave()
        it.lane.finish(retry=1)
        it.lane.finish()
        assert it.voice.told == ["opened", "left", "ended"]


async def test_a_stream_may_begin_with_something_of_its_own(autojump_clock: MockClock) -> None:
    async with scene(STREAM, None, ids=(), log=False, opening=b"event: endpoint\ndata: /x\n\n") as it:
        response = await it.carry()
        assert response.body == b"event: endpoint\ndata: /x\n\n"
        await it.say(1)
        assert [(event.event, event.id) for event in response.events] == [("endpoint", None), ("message", None)]
        await it.leave()
        it.lane.finish()


# The end.


@pytest.mark.parametrize("state", ["new", "stream", "writing", "away", "over"])
async def test_the_server_may_stop_at_any_time(state: str, autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        if state != "new":
            await it.say(1)
        if state == "writing":
            response.hold()
            await it.say(2)
        if state == "away":
            await it.leave()
        if state == "over":
            await it.answer()
        it.lane.close()
        it.lane.close()
        assert response.dropped is (state not in ("away", "over"))
        assert it.voice.told.count("ended") == 1
        assert not len(it.shared.attached)
        it.gone()
        it.lane.wake()
        await it.lane.flush()
        it.voice.lane.put(note(3))
        await wait_all_tasks_blocked()
        assert it.voice.told.count("ended") == 1
        assert not it.lane.full


async def test_what_waits_when_the_server_stops_makes_nobody_wait_any_more(autojump_clock: MockClock) -> None:
    async with scene(limit=1) as it:
        response = await it.carry()
        await it.say(1)
        response.hold()
        await it.say(2)
        it.voice.said += [note(3), note(4)]
        assert (it.lane.waiting, it.lane.full) == (2, True)
        it.lane.close()
        assert (it.lane.waiting, it.lane.full) == (0, False)


async def test_what_is_said_on_a_lane_that_is_over_is_for_nobody(autojump_clock: MockClock) -> None:
    async with scene() as it:
        await it.carry()
        await it.say(1)
        await it.answer()
        it.lane.put(note(2))
        it.lane.put(question(7))
        assert replayed(it, "1-0") == 2
        assert it.voice.unsent == []


async def test_to_stop_what_a_failing_log_has_ended_ends_it_no_second_time(autojump_clock: MockClock) -> None:
    log = FailingLog()
    async with scene(log=log) as it:
        await it.carry()
        log.fails = {"append"}
        await it.say(1)
        assert it.voice.told[-1] == "ended"
        it.lane.close()
        assert it.voice.told.count("ended") == 1


async def test_nothing_keeps_a_lane_alive_that_is_over(autojump_clock: MockClock) -> None:
    gc.collect()
    gc.disable()
    try:
        for says in ([], [1]):
            async with trio.open_nursery() as nursery:
                it = Scene(nursery, ResponseMode(EITHER, E), (1,), 9)
                await it.carry()
                await it.say(*says)
                await it.answer()
            kept = [weakref.ref(it.lane), weakref.ref(it.voice)]
            it.voice.server_session = it.voice.session = None  # type: ignore[assignment]  # the test's own cycle
            del it
            await trio.lowlevel.checkpoint()
            assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


# A log that fails.


@pytest.mark.parametrize("fails", ["open", "append"])
@pytest.mark.parametrize("away", [False, True])
async def test_a_log_that_fails_ends_the_stream_and_nothing_else(
    fails: str, away: bool, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = FailingLog()
    async with scene(revision=B, log=log) as it:
        response = await it.carry()
        if fails == "append" or away:
            await it.say(1)
        if away:
            await it.leave()
        log.fails = {fails} if not away else {"append"}
        await it.say(2, question(7))
        assert response.dropped is not away
        assert it.voice.told[-1] == "ended"
        assert it.voice.unsent == [7]
        assert "cannot" in caplog.text
        assert len(caplog.records) == 1
        # The request goes on; nobody will hear of it.
        await it.say(3, question(8))
        await it.answer()
        assert it.voice.unsent == [7, 8]
        assert it.voice.told.count("ended") == 1


async def test_an_id_that_cannot_be_sent_is_a_log_that_fails(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(MemoryEventLog):
        odd = False

        def append(self, stream: str, data: Sequence[bytes]) -> Sequence[str]:
            return [id + "\n" * self.odd for id in super().append(stream, data)]

    log = Odd()
    for away in (False, True):
        async with scene(log=log) as it:
            log.odd = False
            response = await it.carry()
            await it.say(1)
            if away:
                await it.leave()
            log.odd = True
            await it.say(2)
            assert "an event id must be" in caplog.text
            assert response.dropped is not away
            assert it.voice.told[-1] == "ended"
            caplog.clear()


async def test_what_waits_is_not_logged_twice_when_the_log_fails_between(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = FailingLog()
    async with scene(log=log) as it:
        response = await it.carry()
        await it.say(1)
        response.hold()
        await it.say(2)
        it.voice.said += [note(3), note(4), question(7)]
        assert it.lane.waiting == 3
        append, left = MemoryEventLog.append, 1

        def once(stream: str, data: Sequence[bytes]) -> Sequence[str]:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError("cannot append")
            return append(log, stream, data)

        log.append = once  # type: ignore[method-assign]
        await it.leave()
        assert it.voice.told == ["opened", "ended"]
        assert it.voice.unsent == [7]
        replay = log.replay("1-0")
        assert isinstance(replay, Replay)
        assert [json.loads(event.data)["params"]["n"] for event in replay.events] == [1, 2, 3]


async def test_a_log_that_cannot_end_a_stream_is_told_of_and_nothing_else(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = FailingLog()
    log.fails = {"finish"}
    async with scene(log=log) as it:
        response = await it.carry()
        await it.say(1)
        await it.answer()
        assert response.ended
        assert it.voice.told == ["opened", "ended"]
        assert "cannot finish" in caplog.text


# The wire of a conversation.


async def test_what_was_told_can_be_kept_apart_from_the_answer(autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        it.voice.said.append(note(1))
        mark = it.lane.mark
        await it.lane.written(mark)
        it.voice.open.clear()
        it.voice.said.append(Response(1, {}))
        await it.lane.flush()
        assert len(response.writes) == 2
        assert response.ended


async def test_who_does_not_read_makes_others_wait(autojump_clock: MockClock) -> None:
    async with scene(limit=3) as it:
        response = await it.carry()
        response.hold()
        waited: list[float] = []

        async def report(n: int) -> None:
            it.voice.say(n)
            await it.lane.room()
            waited.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            for n in range(1, 10):
                await trio.sleep(1)
                nursery.start_soon(report, n)
            await trio.sleep(1)
            assert waited == [1, 2, 3, 4]
            assert it.lane.full
            assert it.lane.crowded
            response.go_on()
        assert waited == [1, 2, 3, 4, *[10] * 5]
        await it.answer()
        assert it.got == [*range(1, 10), "answer"]


async def test_those_who_wait_go_on_when_the_client_leaves_or_another_comes(autojump_clock: MockClock) -> None:
    for leaves in (True, False):
        async with scene(limit=1) as it:
            response = await it.carry()
            await it.say(0)
            response.hold()
            await it.say(1)
            it.voice.said += [note(2), note(3), note(4)]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(it.lane.room)
                nursery.start_soon(it.lane.written, it.lane.mark)
                await wait_all_tasks_blocked()
                if leaves:
                    it.gone()  # while the write still goes on
                else:
                    await it.carry("1-1")
            if leaves:
                response.cut()
                await it.carry("1-1")
            await it.answer()
            assert it.got == [1, 2, 3, 4, "answer"]


async def test_a_lane_is_full_with_as_much_as_its_limit(autojump_clock: MockClock) -> None:
    async with scene(limit=2) as it:
        response = await it.carry()
        await it.say(0)
        response.hold()
        await it.say(1)
        for waiting in range(3):
            assert (it.lane.waiting, it.lane.full, it.lane.crowded) == (waiting, waiting == 2, waiting == 2)
            it.voice.said.append(note(2 + waiting))
        response.go_on()
        await it.answer()


async def test_those_who_wait_go_on_when_the_server_stops(autojump_clock: MockClock) -> None:
    async with scene(limit=1) as it:
        response = await it.carry()
        await it.say(0)
        response.hold()
        await it.say(1)
        it.voice.said += [note(2), note(3)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(it.lane.room)
            nursery.start_soon(it.lane.written, it.lane.mark)
            await wait_all_tasks_blocked()
            it.lane.close()


async def test_to_flush_where_there_is_nothing_writes_nothing(autojump_clock: MockClock) -> None:
    async with scene() as it:
        response = await it.carry()
        await it.lane.flush()
        assert response.status is None
        await it.say(1)
        await it.lane.flush()
        assert len(response.writes) == 1
        await it.answer()


async def test_a_write_that_ends_well_after_its_client_was_seen_to_leave_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    for last in (True, False):
        async with scene() as it:
            response = await it.carry()
            await it.say(1)
            response.hold()
            await (it.answer() if last else it.say(2))
            it.gone()
            response.go_on()
            await wait_all_tasks_blocked()
            assert it.voice.told == ["opened", "left", "ended"][: 2 + last]
            assert not len(it.shared.attached)
            if not last:
                await it.answer()
            assert replayed(it, "1-1") == 1 + (not last)


async def test_every_way_to_wait_is_a_checkpoint(autojump_clock: MockClock) -> None:
    async with scene() as it:
        for carried in (True, False):
            if carried:
                await it.carry()
            else:
                await it.leave()
            for wait in (it.lane.flush, it.lane.room):
                with trio.testing.assert_checkpoints():
                    await wait()
        it.voice.open.clear()
        it.lane.wake()


@pytest.mark.parametrize("seed", range(3))
def test_whoever_writes_may_be_cancelled_anywhere(seed: int) -> None:
    """The writer at hand is shielded; whoever only wanted to write loses nothing of what was said."""

    async def scenario(attempt: Attempt) -> None:
        async with scene(limit=2) as it:
            response = await it.carry()

            async def speak() -> None:
                with attempt.window():
                    for n in range(1, 4):
                        it.voice.said.append(note(n))
                        mark = it.lane.mark
                        await it.lane.flush()
                        await it.lane.room()
                        await it.lane.written(mark)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(speak)
                for _ in range(3):
                    response.hold()
                    await trio.sleep(1)
                    response.go_on()
                    await trio.sleep(1)
            it.voice.open.clear()
            it.voice.said.append(Response(1, {"n": "answer"}))
            await it.lane.flush()
            await wait_all_tasks_blocked()
            assert response.ended
            if response.streams:
                told = numbers(response)
                assert told == [*range(1, len(told)), "answer"]

    assert cancel_at_each_step(scenario, watch=any_task, seed=seed) > 5


# Any order of anything.

DEEDS = st.sampled_from(
    ["say", "say", "ask", "life", "leave", "come", "come from before", "hold", "cut", "hang up", "step"]
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([B, D]), st.sampled_from([EITHER, STREAM]), st.lists(DEEDS, max_size=40), st.integers(1, 5))
def test_a_client_that_comes_back_gets_all_that_was_said_once_and_in_order(
    revision: Any, answer: Answer, deeds: list[str], limit: int
) -> None:
    async def main() -> None:
        async with scene(answer, revision, limit=limit) as it:
            client = Client(it)
            await it.carry()
            for deed in deeds:
                await client.do(deed)
            it.voice.answer()
            await client.answered()

    trio.run(main, clock=MockClock(autojump_threshold=0))


class Client:
    """One that does what a client may, and knows what it must have got."""

    def __init__(self, it: Scene) -> None:
        self.it = it
        self.said: list[Any] = []
        self.got: list[tuple[str, Any]] = []  # with the id; None: nothing but an id

    async def do(self, deed: str) -> None:
        it = self.it
        if deed in ("say", "ask"):
            n = len(self.said) + 1
            self.said.append(n)
            it.voice.say(n if deed == "say" else Request(n, "q", {"n": n}))
        elif deed == "life":
            it.lane.send_keep_alive()
        elif deed == "leave":
            it.response.cut()
            it.gone()
        elif deed == "come":
            await self.come()
        elif deed == "come from before":
            await self.come(back=2)
        elif deed == "hold":
            it.response.hold()
        elif deed == "cut":
            it.response.cut()
        elif deed == "hang up":
            it.lane.hang_up(1)
        else:
            await wait_all_tasks_blocked()

    async def come(self, *, back: int = 0) -> None:
        """By another connection, with the last id that came, or an earlier one."""
        self.take()
        if self.got:  # else there is no way back
            del self.got[max(1, len(self.got) - back) :]
            if not self.rest().finished:
                await self.it.carry(self.got[-1][0])

    def take(self) -> None:
        """What has come on the response at hand, which is no longer looked at."""
        if self.it.response.streams:
            for event in self.it.response.events:
                assert event.id is not None
                self.got.append((event.id, said_in(event.data)))
            self.it.response.writes.clear()

    def rest(self) -> Replay:
        """What there is to come back for."""
        assert self.it.way.log is not None
        replay = self.it.way.log.replay(self.got[-1][0])
        assert isinstance(replay, Replay)
        return replay

    async def answered(self) -> None:
        """All was said; look at what has come, and what there is to come back for."""
        it = self.it
        it.response.go_on()
        await wait_all_tasks_blocked()
        assert it.voice.told.count("ended") == 1
        assert it.voice.told[-1] == "ended"
        self.said.append("answer")
        if it.response.status is not None and not it.response.streams:
            assert it.response.json["result"]["n"] == "answer"
            assert self.said == ["answer"]
            return
        self.take()
        if self.got:
            rest = self.rest()
            assert rest.finished
            got = [*self.got, *((event.id, said_in(event.data)) for event in rest.events)]
            assert [said for _, said in got if said is not None] == self.said
            assert len({id for id, _ in got}) == len(got)


def said_in(data: bytes) -> Any:
    message = json.loads(data or b"{}")
    return message.get("params", message.get("result", {})).get("n")
