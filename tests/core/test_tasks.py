"""Tasks: every cell of the table, every order of events, both forms on the wire, and stored records."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

import attrs
import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import (
    CORE_TASKS,
    EXTENSION_TASKS,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    MAX_MESSAGE,
    MISSING_CLIENT_CAPABILITY,
    POLL_MS,
    TASKS,
    TASKS_EXTENSION,
    TERMINAL,
    Question,
    RemoteProtocolError,
    RequestError,
    Response,
    TaskDeed,
    TaskEvent,
    TaskForm,
    TaskRecord,
    TaskState,
    TaskStatus,
    TaskStep,
    UsageError,
    cursor_of,
    encode,
    missing_extension,
    poll_seconds,
    prepare,
    read_created,
    read_cursor,
    read_task,
    read_task_id,
    related,
    requested_ttl,
    unknown_task,
)

WORKING, INPUT_REQUIRED, COMPLETED, FAILED, CANCELLED, GONE = TaskStatus
NOTHING, STORE, STOP, DELETE = TaskDeed
FORMS = [CORE_TASKS, EXTENSION_TASKS]

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
NAME = Question("name", "elicitation/create", {"mode": "form", "message": "Who?", "requestedSchema": SCHEMA})
SIZE = Question("size", "elicitation/create", {"mode": "form", "message": "Size?", "requestedSchema": SCHEMA})
ANN, BIG = ({"action": "accept", "content": {"name": name}} for name in ("Ann", "Big"))
RESULT: dict[str, Any] = {"content": [{"type": "text", "text": "done"}]}
TOOL_ERROR: dict[str, Any] = {"content": [{"type": "text", "text": "no disk"}], "isError": True}
BROKEN = RequestError(INTERNAL_ERROR, "the disk is on fire", {"sector": 7})

NEW = TaskRecord("t-1", "ann", 1000.0, 60_000, "tools/call", {"name": "report"}, {"revision": "2026-07-28"})
ASKING = NEW.ask([NAME, SIZE], 1001).task
DONE, BAD = NEW.finish(RESULT, 1002).task, NEW.finish(TOOL_ERROR, 1002).task
BURNT, STOPPED = NEW.fail(BROKEN, 1002).task, NEW.cancel(1002).task
BY_STATUS = {WORKING: NEW, INPUT_REQUIRED: ASKING, COMPLETED: DONE, FAILED: BURNT, CANCELLED: STOPPED}


# The table

STEPS: dict[TaskEvent, Callable[[TaskRecord], TaskStep]] = {
    TaskEvent.ASKED: lambda task: task.ask([attrs.evolve(NAME, key="later")], 1005),
    TaskEvent.ANSWERED: lambda task: task.answer({"name": ANN}, 1005),
    TaskEvent.SETTLED: lambda task: task.answer({"name": ANN, "size": BIG}, 1005),
    TaskEvent.NOTED: lambda task: task.note("half", 1005),
    TaskEvent.FINISHED: lambda task: task.finish({"content": []}, 1005),
    TaskEvent.FAILED: lambda task: task.fail(RequestError(-1, "no"), 1005),
    TaskEvent.CANCELLED: lambda task: task.cancel(1005),
    TaskEvent.EXPIRED: lambda task: task.expire(1060),
    TaskEvent.LOST: lambda task: task.lose(1005),
    TaskEvent.TAKEN_OVER: lambda task: task.take_over(1005),
    TaskEvent.TAKEN: lambda task: attrs.evolve(task, answers={"old": ANN}, updated=1005).take(["old"]),
}
# The same table written by hand: a row for each status, a word for each event.
LATE = "- - - - - - - gone:delete - - -"
EXPECTED = {
    WORKING: "input_required:store - - working:store completed:store failed:store cancelled:stop gone:delete "
    "failed:store working:store working:store",
    INPUT_REQUIRED: "input_required:store input_required:store working:store input_required:store completed:store "
    "failed:store cancelled:stop gone:delete failed:store input_required:store input_required:store",
    COMPLETED: LATE,
    FAILED: LATE,
    CANCELLED: LATE,
}
CELLS = [
    (status, event, word)
    for status, words in EXPECTED.items()
    for event, word in zip(TaskEvent, words.split(), strict=True)
]


@req("task-21", "task-22", "task-25", "task-31", "task-45", "task-46", "task-47", "xtask-19", "xtask-24")
@pytest.mark.parametrize(("status", "event", "word"), CELLS, ids=lambda each: getattr(each, "name", ""))
def test_each_step_has_the_outcome_of_its_cell(status: TaskStatus, event: TaskEvent, word: str) -> None:
    before = BY_STATUS[status]
    assert before.status is status
    step = STEPS[event](before)
    if word == "-":
        assert (step.task.status, step.deed) == (status, NOTHING)
        assert event is TaskEvent.TAKEN or step.task is before
        return
    to, deed = word.split(":")
    assert (step.task.status.value, step.deed.name.lower()) == (to, deed)
    assert step.task.updated == (1060 if event is TaskEvent.EXPIRED else 1005)
    assert (step.task.created, step.task.id, step.task.owner) == (before.created, before.id, before.owner)


def test_the_table_has_a_cell_for_each_status_and_event() -> None:
    assert set(TASKS) == set(TaskStatus) - {GONE}
    assert {status for status in TASKS if TASKS[status][TaskEvent.FINISHED][1] is NOTHING} == TERMINAL
    for status, row in TASKS.items():
        assert row.keys() == set(TaskEvent)
        assert BY_STATUS[status].terminal == (status in TERMINAL)
        for event, (to, deed) in row.items():
            words = EXPECTED[status].split()[list(TaskEvent).index(event)]
            assert words == ("-" if deed is NOTHING else f"{to.value}:{deed.name.lower()}")
            assert deed is not NOTHING or to is status


@pytest.mark.parametrize(("status", "event"), [(status, event) for status, event, _ in CELLS])
def test_a_changed_cell_changes_a_step(status: TaskStatus, event: TaskEvent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps obey the table: with any other cell, `test_each_step_has_the_outcome_of_its_cell` would fail."""
    honest = STEPS[event](BY_STATUS[status])
    to, deed = TASKS[status][event]
    others = [(other, STORE) for other in TaskStatus if (other, STORE) != (to, deed)]
    for cell in others:
        monkeypatch.setitem(TASKS, status, {**TASKS[status], event: cell})
        changed = STEPS[event](BY_STATUS[status])
        # A terminal task has no open question, so no answer reaches its row.
        reached = not (event in (TaskEvent.ANSWERED, TaskEvent.SETTLED) and status is not INPUT_REQUIRED)
        assert (changed != honest) == reached


# Every order

EVENTS = frozenset({"create", "get", "update", "cancel", "finish", "fail", "expire", "lost"})


@attrs.frozen
class World:
    """A task at one moment, and the terminal status that came first."""

    task: TaskRecord | None = None
    first: TaskStatus | None = None
    seen: tuple[TaskStatus, ...] = ()

    def play(self, event: str, now: float) -> World:
        task, ended = self.task, self.first is not None
        if event == "create":
            assert task is None
            return World(attrs.evolve(NEW, created=now, updated=now).ask([NAME], now).task)
        if task is None:  # not created yet, or deleted: a request about it finds no task
            return self
        if event == "get":
            status = read_task(EXTENSION_TASKS.detailed(task)).status
            assert status is (self.first or task.status)
            return attrs.evolve(self, seen=(*self.seen, status))
        step, deed = {
            "update": lambda: (task.answer({"name": ANN}, now), STORE if task.questions else NOTHING),
            "cancel": lambda: (task.cancel(now), NOTHING if ended else STOP),
            "finish": lambda: (task.finish(RESULT, now), NOTHING if ended else STORE),
            "fail": lambda: (task.fail(BROKEN, now), NOTHING if ended else STORE),
            "lost": lambda: (task.lose(now), NOTHING if ended else STORE),
            "expire": lambda: (task.expire(task.expires), DELETE),
        }[event]()
        assert step.deed is deed
        if deed is DELETE:
            return attrs.evolve(self, task=None)
        if deed is NOTHING:
            assert step.task is task
            return self
        return attrs.evolve(self, task=step.task, first=step.task.status if step.task.terminal else None)

    def check(self) -> None:
        for before, after in itertools.pairwise(self.seen):
            assert before is after or before not in TERMINAL  # terminal is final
        task = self.task
        if task is not None:
            assert (task.result is None) == (self.first is not COMPLETED)
            assert (task.error is None) == (self.first is not FAILED)
            assert (task.status is INPUT_REQUIRED) == bool(task.questions)


def play_out(world: World, left: frozenset[str], now: float) -> int:
    """Play every order of the events that are left, and return the number of orders."""
    world.check()
    if not left:
        return 1
    count = 0
    for event in left:
        after = world.play(event, now)
        if event != "create":
            again = after.play(event, now)  # each message may come twice
            assert again.task == after.task
        count += play_out(after, left - {event}, now + 1)
    return count


@req("task-22", "task-47", "xtask-32")
def test_every_order_of_events_obeys_the_rules() -> None:
    assert play_out(World(), EVENTS, 1000.0) == 40_320


def test_a_task_that_does_not_end_expires() -> None:
    assert NEW.expires == 1060
    assert NEW.expire(1059.9) == TaskStep(NEW, NOTHING)
    assert NEW.expire(1060).task.status is GONE
    endless = attrs.evolve(NEW, ttl=None)
    assert endless.expires == inf
    assert endless.expire(1e12).deed is NOTHING


def test_the_time_of_the_last_update_never_goes_back() -> None:
    assert DONE.updated == 1002
    assert ASKING.note("x", 500).task.updated == 1001


# Questions


@req("xtask-28")
def test_a_key_always_names_the_same_question() -> None:
    assert ASKING.ask([NAME], 1002) == TaskStep(ASKING, NOTHING)
    other = attrs.evolve(NAME, params={"message": "When?"})
    for task in (ASKING, ASKING.answer({"name": ANN, "size": BIG}, 1002).task, ASKING.withdraw(["name"], 1002).task):
        with pytest.raises(UsageError, match="another question under the key 'name' before"):
            task.ask([other], 1003)
        assert task.ask([NAME], 1003).deed is NOTHING  # answered or withdrawn, it is not opened again


@req("xtask-17", "xtask-33", "task-25")
def test_answers_may_come_one_by_one() -> None:
    step = ASKING.answer({"size": BIG, "other": ANN}, 1002)
    assert (step.task.status, step.task.questions, dict(step.task.answers)) == (INPUT_REQUIRED, (NAME,), {"size": BIG})
    again = step.task.answer({"size": ANN}, 1003)
    assert again == TaskStep(step.task, NOTHING)
    last = step.task.answer({"name": ANN}, 1004).task
    assert (last.status, last.questions, dict(last.answers)) == (WORKING, (), {"size": BIG, "name": ANN})


def test_an_answer_of_the_wrong_shape_is_refused_without_effect() -> None:
    for responses in ({"name": 3}, {"name": {"action": "perhaps"}}, "name", [ANN]):
        with pytest.raises(RequestError) as caught:
            ASKING.answer(responses, 1002)
        assert caught.value.code == INVALID_PARAMS
    assert ASKING.answer({"other": {"ignored": True}}, 1002).deed is NOTHING


def test_a_question_is_withdrawn_when_no_handler_waits_for_it() -> None:
    step = ASKING.withdraw(["name"], 1002)
    assert (step.task.status, step.task.questions, step.deed) == (INPUT_REQUIRED, (SIZE,), STORE)
    assert step.task.withdraw(["name"], 1003).deed is NOTHING
    last = step.task.withdraw(["size"], 1003)
    assert (last.task.status, last.task.answers) == (WORKING, {})


def test_an_answer_from_before_the_task_counts() -> None:
    early = attrs.evolve(NEW, answers={"name": ANN})
    assert early.ask([NAME], 1001) == TaskStep(early, NOTHING)
    assert early.ask([NAME, SIZE], 1001).task.questions == (SIZE,)


def test_a_task_that_runs_again_keeps_its_questions_and_answers() -> None:
    half = ASKING.answer({"name": ANN}, 1002).task
    again = half.take_over(1003).task
    assert (again.status, again.questions, again.answers) == (INPUT_REQUIRED, (SIZE,), {"name": ANN})


def test_answers_that_were_taken_are_deleted() -> None:
    both = ASKING.answer({"name": ANN, "size": BIG}, 1002).task
    step = both.take(["name", "other"])
    assert (step.deed, dict(step.task.answers)) == (STORE, {"size": BIG})
    assert EXTENSION_TASKS.detailed(step.task) == EXTENSION_TASKS.detailed(both)
    assert step.task.take(["name"]) == TaskStep(step.task, NOTHING)
    assert step.task.ask([NAME], 1003).deed is NOTHING  # xtask-28: its key stays used


@pytest.mark.parametrize("task", [DONE, BAD, BURNT, STOPPED, ASKING.answer({"name": ANN}, 1002).task.lose(1003).task])
def test_a_task_that_has_ended_keeps_only_its_outcome(task: TaskRecord) -> None:
    assert not any((task.params, task.questions, task.answers, task.asked))
    assert (task.result is None) != (task.status is COMPLETED)


# Outcomes


@req("task-64", "xtask-09", "xtask-18", "xtask-20", "xtask-21", "task-54")
def test_each_form_has_its_own_rule_for_a_tool_that_failed() -> None:
    core, extension = CORE_TASKS.detailed(BAD), EXTENSION_TASKS.detailed(BAD)
    assert (core["status"], core["statusMessage"]) == ("failed", "no disk")
    assert (extension["status"], extension["result"]) == ("completed", {"resultType": "complete", **TOOL_ERROR})
    assert not {"statusMessage", "error"} & extension.keys()
    for form in FORMS:
        assert form.detailed(DONE)["status"] == "completed"
        burnt = form.detailed(BURNT)
        assert (burnt["status"], burnt["statusMessage"]) == ("failed", "the disk is on fire")
    error = {"code": INTERNAL_ERROR, "message": "the disk is on fire", "data": {"sector": 7}}
    assert EXTENSION_TASKS.detailed(BURNT)["error"] == error
    assert "result" not in EXTENSION_TASKS.detailed(BURNT)


TEXTS = {"": "half", "x": "x", "x" * 2000: "x" * (MAX_MESSAGE - 3) + "..."}
SAYS = [
    ([], "half"),
    ([{"type": "image"}], "half"),
    *(([{"type": "text", "text": text}], TEXTS[text]) for text in TEXTS),
]


@pytest.mark.parametrize(("content", "message"), SAYS)
def test_a_failed_tool_has_a_status_message_in_the_older_form(content: list[Any], message: str) -> None:
    task = NEW.note("half", 1001).task.finish({"content": content, "isError": True}, 1002).task
    assert CORE_TASKS.task(task)["statusMessage"] == message
    unnoted = NEW.finish({"content": content[:0], "isError": True}, 1002).task
    assert CORE_TASKS.task(unnoted)["statusMessage"] == "The tool returned an error."


@req("task-35", "task-50")
def test_tasks_result_is_the_result_or_the_error_of_the_request() -> None:
    outcome = CORE_TASKS.outcome(NEW.finish({"resultType": "complete", "_meta": {"a/b": 1}, **RESULT}, 1002).task)
    assert outcome == {**RESULT, "_meta": {"a/b": 1, **related("t-1")}}
    assert CORE_TASKS.outcome(BAD)["isError"] is True
    with pytest.raises(RequestError) as caught:
        CORE_TASKS.outcome(BURNT)
    assert (caught.value.code, caught.value.message, caught.value.data) == (INTERNAL_ERROR, BROKEN.message, BROKEN.data)
    with pytest.raises(RequestError, match="was cancelled and has no result"):
        CORE_TASKS.outcome(STOPPED)


@req("task-44", "xtask-29")
def test_only_the_older_form_refuses_to_cancel_an_ended_task() -> None:
    assert EXTENSION_TASKS.acknowledged(STOPPED) == {}  # xtask-29: an empty result
    assert CORE_TASKS.acknowledged(STOPPED)["status"] == "cancelled"
    for task in (DONE, BAD, BURNT, STOPPED):
        EXTENSION_TASKS.refuse_cancel(task)
        with pytest.raises(RequestError, match=f"is {CORE_TASKS.status(task).value} and cannot be cancelled") as caught:
            CORE_TASKS.refuse_cancel(task)
        assert caught.value.code == INVALID_PARAMS
    CORE_TASKS.refuse_cancel(NEW)


def test_the_error_of_a_lost_task_tells_what_to_do() -> None:
    task = ASKING.lose(1002).task
    assert task.error is not None
    assert "the server stopped while this task ran" in task.error["message"]
    assert task.message == task.error["message"]
    assert task.questions == ()


def test_a_status_message_is_a_short_text() -> None:
    assert NEW.note("x" * MAX_MESSAGE, 1001).task.message == "x" * MAX_MESSAGE
    for message in ("x" * (MAX_MESSAGE + 1), None, 3, "half a pair: \ud800"):
        with pytest.raises(UsageError, match="a status message is a text of at most 1024 characters"):
            NEW.note(message, 1001)  # type: ignore[arg-type]
    assert len(NEW.fail(RequestError(-1, "x" * 5000), 1001).task.message or "") == MAX_MESSAGE
    assert NEW.fail(RequestError(-1, "x"), 1001).task.error == {"code": -1, "message": "x"}


# The wire


def validator(folder: Path, file: str, name: str) -> jsonschema_rs.Validator:
    schema = json.loads((folder / "schema" / f"{file}.json").read_text("utf-8"))
    return jsonschema_rs.validator_for({**schema, "$ref": f"#/$defs/{name}"})


ALL = [NEW, ASKING, DONE, BAD, BURNT, STOPPED, attrs.evolve(NEW, ttl=None), NEW.note("half", 1001).task]


@req("task-20", "task-28", "task-30", "task-32", "task-33", "xtask-07", "xtask-08", "xtask-16", "xtask-22", "xtask-48")
@pytest.mark.parametrize("task", ALL, ids=lambda task: task.status.value)
def test_each_message_fits_its_schema(task: TaskRecord, shared_schemas: Path) -> None:
    core, extension = ("2025-11-25", "ext-tasks")
    validator(shared_schemas, core, "CreateTaskResult").validate(CORE_TASKS.created(task, "soon"))
    validator(shared_schemas, core, "GetTaskResult").validate(CORE_TASKS.detailed(task))
    validator(shared_schemas, core, "CancelTaskResult").validate(CORE_TASKS.acknowledged(task))
    validator(shared_schemas, core, "TaskStatusNotificationParams").validate(CORE_TASKS.notification(task).params)
    created = EXTENSION_TASKS.created(task)
    validator(shared_schemas, extension, "CreateTaskResult").validate(created)
    assert not {"result", "error", "inputRequests", "requestState", "task", "ttl", "pollInterval"} & created.keys()
    validator(shared_schemas, extension, "DetailedTask").validate(EXTENSION_TASKS.detailed(task))
    complete = {"resultType": "complete"}
    validator(shared_schemas, extension, "GetTaskResult").validate({**complete, **EXTENSION_TASKS.detailed(task)})
    validator(shared_schemas, extension, "CancelTaskResult").validate(
        {**complete, **EXTENSION_TASKS.acknowledged(task)}
    )
    assert EXTENSION_TASKS.acknowledged(task) == {}
    assert "resultType" not in EXTENSION_TASKS.detailed(task)


@req("task-28", "task-32", "xtask-07", "xtask-08")
@pytest.mark.parametrize("task", ALL, ids=lambda task: task.status.value)
def test_a_creation_has_times_an_interval_and_a_type_of_its_own(task: TaskRecord) -> None:
    created, core = EXTENSION_TASKS.created(task), CORE_TASKS.created(task)["task"]
    assert created["resultType"] == "task"
    assert "task" not in (EXTENSION_TASKS.detailed(task).get("resultType"), core.get("resultType"))
    assert (created["pollIntervalMs"], core["pollInterval"]) == (POLL_MS, POLL_MS)
    for each in (created, core):
        assert datetime.fromisoformat(each["createdAt"]) <= datetime.fromisoformat(each["lastUpdatedAt"])


def test_a_task_may_have_another_interval() -> None:
    task = attrs.evolve(NEW, poll=250)
    assert (CORE_TASKS.task(task)["pollInterval"], EXTENSION_TASKS.task(task)["pollIntervalMs"]) == (250, 250)
    assert TaskRecord.from_text(task.text()) == task


@req("task-39")
def test_a_status_notification_has_only_the_task() -> None:
    assert CORE_TASKS.notification(NEW).method == "notifications/tasks/status"
    assert EXTENSION_TASKS.notification(ASKING).method == "notifications/tasks"
    assert CORE_TASKS.notification(NEW).params == {
        "taskId": "t-1",
        "status": "working",
        "createdAt": "1970-01-01T00:16:40.000Z",
        "lastUpdatedAt": "1970-01-01T00:16:40.000Z",
        "ttl": 60_000,
        "pollInterval": POLL_MS,
    }
    assert EXTENSION_TASKS.notification(ASKING).params["inputRequests"]["size"] == {
        "method": "elicitation/create",
        "params": SIZE.params,
    }


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("task", ALL, ids=lambda task: task.status.value)
def test_a_task_that_is_written_can_be_read_by_the_other_side(form: TaskForm, task: TaskRecord) -> None:
    state, created = read_task(form.detailed(task)), read_created(form.created(task))
    assert created is not None
    assert (state.id, state.status, state.ttl, state.poll) == (task.id, form.status(task), task.ttl, POLL_MS)
    assert (created.id, created.status, created.created) == (task.id, form.status(task), state.created)
    assert state.terminal == task.terminal
    if form.inlined:
        assert state.questions == task.questions
        assert state.result == (None if task.result is None else {"resultType": "complete", **task.result})
        if task.error is not None:
            assert state.error is not None
            assert (state.error.code, state.error.message, state.error.data) == tuple(task.error.values())


@req("task-65")
def test_a_text_for_the_model_comes_with_the_task() -> None:
    with_text = read_created(CORE_TASKS.created(NEW, "It takes a minute."))
    without = read_created(
        {**CORE_TASKS.created(NEW), "_meta": {"io.modelcontextprotocol/model-immediate-response": 3}}
    )
    assert with_text is not None
    assert with_text.immediate == "It takes a minute."
    assert without is not None
    assert without.immediate is None


@pytest.mark.parametrize("meta", [None, [], "x", 3])
def test_metadata_of_the_wrong_type_is_ignored(meta: Any) -> None:
    created = read_created({**CORE_TASKS.created(NEW), "_meta": meta})
    assert created is not None
    assert (created.id, created.immediate) == (NEW.id, None)


@pytest.mark.parametrize("result", [RESULT, {**RESULT, "task": 3}, {**RESULT, "task": {}}, {"resultType": "complete"}])
def test_a_plain_result_is_not_read_as_a_task(result: dict[str, Any]) -> None:
    assert read_created(result) is None


@pytest.mark.parametrize(
    "change",
    [
        {"taskId": 3},
        {"status": "gone"},
        {"status": []},
        {"status": "done"},
        {"status": "input_required", "inputRequests": []},
        {"status": "input_required", "inputRequests": {"a": []}},
        {"status": "input_required", "inputRequests": {"a": {"method": 1}}},
        {"status": "input_required", "inputRequests": {"a": {"method": "roots/list", "params": 1}}},
        {"status": "failed", "error": {"code": "1", "message": "x"}},
        {"status": "failed", "error": {"code": 1}},
    ],
    ids=str,
)
def test_a_malformed_task_is_an_error_of_the_peer(change: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        read_task({**EXTENSION_TASKS.detailed(NEW), **change})


def test_members_that_a_client_does_not_need_may_be_missing() -> None:
    assert read_task({"taskId": "x", "status": "working"}) == TaskState("x", WORKING)
    odd = {"statusMessage": 3, "createdAt": 4, "ttlMs": -1, "pollIntervalMs": True, "inputRequests": 5}
    assert read_task({"taskId": "x", "status": "working", **odd}) == TaskState("x", WORKING)
    assert read_task({"taskId": "x", "status": "completed", "result": 3, "error": {}}) == TaskState("x", COMPLETED)
    assert read_task({"taskId": "x", "status": "failed", "error": 3}) == TaskState("x", FAILED)
    asked = read_task({"taskId": "x", "status": "input_required", "inputRequests": {"r": {"method": "roots/list"}}})
    assert asked.questions == (Question("r", "roots/list", {}),)
    assert read_task({"taskId": "x", "status": "working", "ttl": 5.0, "pollInterval": 7}).ttl == 5
    assert poll_seconds(read_task({"taskId": "x", "status": "working", "pollInterval": 10**400})) == 86_400


@req("task-13", "xtask-12")
@pytest.mark.parametrize(("poll", "seconds"), [(None, 1.0), (0, 0.05), (200, 0.2), (5000, 5.0), (10**9, 86_400.0)])
def test_the_interval_of_polls_is_that_of_the_peer_within_limits(poll: int | None, seconds: float) -> None:
    assert poll_seconds(TaskState("x", WORKING, poll=poll)) == seconds


# Params


@req("task-37", "task-38")
def test_only_the_param_task_id_names_the_task() -> None:
    assert read_task_id({"taskId": "a", "_meta": related("b")}) == "a"
    for params in ({}, {"taskId": 3}, {"_meta": related("b")}):
        with pytest.raises(RequestError, match="taskId must be a string"):
            read_task_id(params)


@req("task-51", "task-53", "xtask-31", "xtask-41", "xtask-44", "xtask-05")
def test_the_errors_of_an_unknown_task_and_of_a_missing_extension() -> None:
    assert unknown_task("x").code == INVALID_PARAMS
    assert len(unknown_task("x" * 10_000).message) < 200
    error = missing_extension("tasks/get")
    assert error.code == MISSING_CLIENT_CAPABILITY
    assert error.data == {"requiredCapabilities": {"extensions": {TASKS_EXTENSION: {}}}}
    assert error.message.startswith("tasks/get needs the extension io.modelcontextprotocol/tasks")


@req("task-10", "task-29", "task-62")
def test_a_ttl_is_as_requested_up_to_the_longest() -> None:
    assert (
        requested_ttl({}, 60) == requested_ttl({"task": {}}, 60) == requested_ttl({"task": {"ttl": None}}, 60) == 60_000
    )
    assert requested_ttl({"task": {"ttl": 100}}, 60) == requested_ttl({"task": {"ttl": 100.7}}, inf) == 100
    assert requested_ttl({"task": {"ttl": 10**9}}, 60) == 60_000
    assert requested_ttl({"task": {"ttl": 10**400}}, inf) == requested_ttl({"task": {"ttl": 1e300}}, inf) == 2**53 - 1
    assert requested_ttl({}, inf) is None
    for task in (3, None, {"ttl": "1"}, {"ttl": -1}, {"ttl": True}, {"ttl": inf}):
        with pytest.raises(RequestError, match="its ttl a number of milliseconds"):
            requested_ttl({"task": task}, 60)


@req("task-42", "task-52")
def test_a_cursor_names_the_last_task_of_a_page() -> None:
    assert read_cursor(cursor_of(NEW)) == (1000.0, "t-1")
    for cursor in ("", "x", 3, "WzFd", "WyJhIiwgImIiXQ==", "WzEuMCwgMl0=", "Ww==", {"a": 1}):
        with pytest.raises(RequestError, match="the cursor is not from this server") as caught:
            read_cursor(cursor)
        assert caught.value.code == INVALID_PARAMS


# Stored records

TEXT = st.text(max_size=5)
OBJECT = st.dictionaries(TEXT, st.none() | st.booleans() | st.integers() | TEXT, max_size=3)
RECORDS = st.builds(
    TaskRecord,
    id=TEXT,
    owner=st.none() | TEXT,
    created=st.floats(0, 1e10),
    ttl=st.none() | st.integers(0, 10**9),
    method=TEXT,
    params=OBJECT,
    terms=OBJECT,
    status=st.sampled_from(list(TASKS)),
    message=st.none() | TEXT,
    questions=st.lists(st.builds(Question, TEXT, TEXT, OBJECT), max_size=2).map(tuple),
    answers=st.dictionaries(TEXT, OBJECT, max_size=2),
    asked=st.dictionaries(TEXT, TEXT, max_size=2),
    result=st.none() | OBJECT,
    error=st.none() | OBJECT,
)


@given(RECORDS)
def test_a_stored_record_comes_back_as_it_was(task: TaskRecord) -> None:
    if task.result is not None:  # as at its end
        task = attrs.evolve(task, params={}, answers={}, asked={})
    assert TaskRecord.from_text(task.text()) == task


def test_a_record_of_another_layout_is_refused() -> None:
    for text in ('{"layout": 1}', "{}"):
        with pytest.raises(UsageError, match=r"a task of layout (1|None), and this version of trio_mcp reads layout 3"):
            TaskRecord.from_text(text)


@pytest.mark.parametrize(
    "result",
    [
        {"content": [{"type": "text", "text": "one\ntwo"}], "structuredContent": {"n": 1}},
        {"isError": True, "content": [{"type": "image"}, {"type": "text", "text": "no disk"}]},
        {"isError": True, "content": []},
        {"action": "accept"},
    ],
)
def test_the_first_line_of_a_record_has_all_but_the_result(result: dict[str, Any]) -> None:
    task = TaskRecord("t", "ann", 1.0, 60_000, "tools/call").finish(result, 2.0).task
    head, _, rest = task.text().partition("\n")
    assert json.loads(rest) == result
    read = TaskRecord.from_text(head)
    assert attrs.evolve(read, result=result) == task
    for form in (CORE_TASKS, EXTENSION_TASKS):
        assert form.task(read) == form.task(task)


def test_the_first_line_of_a_running_task_has_all_that_requestors_see() -> None:
    task = ASKING.answer({"name": ANN}, 1002).task
    head, _, rest = task.text().partition("\n")
    assert json.loads(rest) == {"params": task.params, "answers": {"name": ANN}, "asked": dict(task.asked)}
    read = TaskRecord.from_text(head)
    assert attrs.evolve(read, params=task.params, answers=task.answers, asked=task.asked) == task
    for form in FORMS:
        assert form.detailed(read) == form.detailed(task)
    assert "\n" not in attrs.evolve(NEW, params={}).text()


@req("xtask-18", "task-35", "task-50")
@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
@pytest.mark.parametrize(
    "more", [{}, {"resultType": "complete"}, {"_meta": {"a/b": 1}, "isError": True}, {"content": []}]
)
def test_a_stored_result_is_passed_on_without_being_read(more: dict[str, Any], revision: str) -> None:
    for result in ({}, {"action": "accept"}, RESULT, {"structuredContent": {"rows": [[1, "é\n"]] * 3}}):
        task = NEW.finish({**result, **more}, 1002).task
        head, _, rest = task.text().partition("\n")
        read, form = TaskRecord.from_text(head), CORE_TASKS if revision == "2025-11-25" else EXTENSION_TASKS
        whole, spliced = (
            (form.outcome(task), form.outcome(read, rest.encode()))
            if form is CORE_TASKS
            else (form.detailed(task), form.detailed(read, rest.encode()))
        )
        assert "action" not in spliced
        for id in (1, "one"):
            assert json.loads(encode(Response(id, spliced)))["result"] == whole
            assert json.loads(encode(prepare(Response(id, spliced))))["result"] == whole


def test_no_other_module_of_the_core_loads_tasks() -> None:
    folder = Path(__file__).parents[2] / "trio_mcp" / "core"
    loads = re.compile(r"core\.(tasks|task_states) import").search
    users = [path.name for path in folder.rglob("*.py") if loads(path.read_text(encoding="utf-8"))]
    assert sorted(users) == ["__init__.py", "task_states.py"]
