"""Tasks: the life of a call that outlives its request, and the two forms in which the protocol shows it.

A task is one `TaskRecord`, whatever form its requestor knows.  The core feature of 2025-11-25 and the extension
`io.modelcontextprotocol/tasks` of 2026-07-28 are two views of it: a `TaskForm` writes the record for the wire.  `TASKS`
is the only place that knows what may happen to a task.  `task_states` reads both views.

A step is a method of the record.  It gets the time and returns a `TaskStep`: the new record, and the deed for the
caller.  A step that comes too late changes nothing, and its deed is NOTHING.  The caller stores the new record with
compare-and-set, and takes the step again on the newer record if another process was faster.

Two things surprise:

- *A tool result with isError.*  The record is completed and has the result.  Only the older form calls that `failed`
  (task-64); the extension keeps `failed` for JSON-RPC errors (xtask-09).
- *Times are wall-clock seconds.*  A record outlives its process, and `createdAt` is a date.

No other module of `core` imports these two: a program without tasks never loads them.
"""

from __future__ import annotations

import enum
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from math import inf
from typing import Any, Final

import attrs

from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    MISSING_CLIENT_CAPABILITY,
    RequestError,
    UsageError,
    shown,
)
from trio_mcp.core.messages import ABSENT, CachedResult, Json, JsonObject, Notification, record, to_text, writable
from trio_mcp.core.revisions import NOTHING, capability_object
from trio_mcp.core.rounds import Question, read_answers

__all__ = [
    "CORE_TASKS", "EXTENSION_TASKS", "IMMEDIATE_RESPONSE", "MAX_MESSAGE", "POLL_MS", "RELATED_TASK", "TASKS",
    "TASKS_EXTENSION", "TERMINAL", "TaskDeed", "TaskEvent", "TaskForm", "TaskRecord", "TaskStatus", "TaskStep",
    "cursor_of", "missing_extension", "read_cursor", "read_task_id", "related", "requested_ttl", "unknown_task",
]  # fmt: skip

TASKS_EXTENSION: Final = "io.modelcontextprotocol/tasks"
RELATED_TASK: Final = "io.modelcontextprotocol/related-task"
IMMEDIATE_RESPONSE: Final = "io.modelcontextprotocol/model-immediate-response"

POLL_MS = 1000
"""Milliseconds between two polls, as a suggestion to the requestor.  A person does not mind a second, and a poll costs
less than a millisecond."""

MAX_MESSAGE = 1024
"""Characters of a status message.  It is a line for a person or a model, and every poll repeats it."""

LONGEST_MS = 2**53 - 1  # milliseconds; a peer may send any number, and a larger one is not exact in JSON
_LAYOUT = 3  # of a stored record
_OF_THE_MESSAGE = ("_meta", "resultType")  # members of a result that each form writes in its own way


class TaskStatus(enum.Enum):
    """The status of a task, by its name on the wire."""

    WORKING = "working"
    INPUT_REQUIRED = "input_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    GONE = "gone"  # never on the wire: the record is deleted


class TaskEvent(enum.Enum):
    """An event in the life of a task."""

    ASKED = enum.auto()  # its handler asks the requestor
    ANSWERED = enum.auto()  # an answer came, or a question was withdrawn; other questions are open
    SETTLED = enum.auto()  # the same, and no question is open any more
    NOTED = enum.auto()  # its handler sets the status message
    FINISHED = enum.auto()  # its handler returned a result
    FAILED = enum.auto()  # its handler ended with a JSON-RPC error
    CANCELLED = enum.auto()  # the requestor cancels it
    EXPIRED = enum.auto()  # its ttl has passed
    LOST = enum.auto()  # the process that ran it has ended, and its tool cannot be run again
    TAKEN_OVER = enum.auto()  # the same, and its tool is run again here
    TAKEN = enum.auto()  # its handler has taken answers, and no process will need them again


class TaskDeed(enum.Enum):
    """The deed of a step for the caller."""

    NOTHING = enum.auto()  # the event came too late, or says nothing new
    STORE = enum.auto()
    STOP = enum.auto()  # store, and stop the handler
    DELETE = enum.auto()  # delete the record, and stop the handler if it runs


WORKING, INPUT_REQUIRED, COMPLETED, FAILED, CANCELLED, GONE = TaskStatus
_NOTHING, _STORE, _STOP, _DELETE = TaskDeed

_RUNNING = {
    TaskEvent.ASKED: (INPUT_REQUIRED, _STORE),  # task-25
    TaskEvent.FINISHED: (COMPLETED, _STORE),
    TaskEvent.FAILED: (FAILED, _STORE),
    TaskEvent.CANCELLED: (CANCELLED, _STOP),  # task-45, task-46
    TaskEvent.EXPIRED: (GONE, _DELETE),  # task-31: whatever its status
    TaskEvent.LOST: (FAILED, _STORE),
}


def _final(status: TaskStatus) -> Mapping[TaskEvent, tuple[TaskStatus, TaskDeed]]:
    """The row of a terminal status: only its expiry leaves it (task-22, task-47)."""
    return dict.fromkeys(TaskEvent, (status, _NOTHING)) | {TaskEvent.EXPIRED: (GONE, _DELETE)}


# task-21.  No row for GONE: a deleted record takes no step.
TASKS: Mapping[TaskStatus, Mapping[TaskEvent, tuple[TaskStatus, TaskDeed]]] = {
    WORKING: {
        **_RUNNING,
        TaskEvent.ANSWERED: (WORKING, _NOTHING),  # xtask-32: no question is open
        TaskEvent.SETTLED: (WORKING, _NOTHING),
        TaskEvent.NOTED: (WORKING, _STORE),
        TaskEvent.TAKEN_OVER: (WORKING, _STORE),
        TaskEvent.TAKEN: (WORKING, _STORE),
    },
    INPUT_REQUIRED: {
        **_RUNNING,
        TaskEvent.ANSWERED: (INPUT_REQUIRED, _STORE),  # xtask-33
        TaskEvent.SETTLED: (WORKING, _STORE),
        TaskEvent.NOTED: (INPUT_REQUIRED, _STORE),
        # The open questions stay open: a requestor that has answered a key once does not look at it again (xtask-27).
        TaskEvent.TAKEN_OVER: (INPUT_REQUIRED, _STORE),
        TaskEvent.TAKEN: (INPUT_REQUIRED, _STORE),
    },
    COMPLETED: _final(COMPLETED),
    FAILED: _final(FAILED),
    CANCELLED: _final(CANCELLED),
}

TERMINAL = frozenset({COMPLETED, FAILED, CANCELLED})


# The record, and its steps


@record
class TaskRecord:
    """All that a server knows of a task, and its steps.

    `owner` is the name of its principal, None without authentication (task-55).  `method` and `params` are the request
    that created it, and `terms` the terms of that request, so that another process can run it again.  A task that has
    ended never runs again, so `params`, questions and answers, which may be secret, end with it.
    """

    id: str
    owner: str | None
    created: float
    ttl: int | None  # milliseconds from `created`; None: no limit
    method: str
    params: JsonObject = attrs.field(factory=dict)
    terms: JsonObject = attrs.field(factory=dict)
    status: TaskStatus = WORKING  # task-20
    updated: float = attrs.field(default=attrs.Factory(lambda self: self.created, takes_self=True))
    message: str | None = None
    questions: tuple[Question, ...] = ()
    """The open questions."""
    answers: Mapping[str, JsonObject] = NOTHING
    """The accepted answers, by key, until they are taken."""
    asked: Mapping[str, str] = NOTHING
    """Every question so far, by key, as text (xtask-28)."""
    result: JsonObject | None = None
    error: JsonObject | None = None
    poll: int = POLL_MS
    """Milliseconds between two polls, as suggested to the requestor."""

    @property
    def terminal(self) -> bool:
        """Whether the task has ended."""
        return self.status in TERMINAL

    @property
    def expires(self) -> float:
        """The time from which the task may be deleted; `inf` without a ttl."""
        return inf if self.ttl is None else self.created + self.ttl / 1000

    def ask(self, questions: Iterable[Question], now: float) -> TaskStep:
        """Open questions.  A question with a key that was asked before is the same question, or a mistake.

        A handler that is run again asks its questions again.  An answered one is not opened a second time.  Raises
        `UsageError` if a key names another question than before.
        """
        new = {}
        for each in questions:
            text = json.dumps([each.method, each.params], sort_keys=True, separators=(",", ":"))
            if self.asked.get(each.key, text) != text:
                raise UsageError(
                    f"the task asked another question under the key {each.key!r} before; "
                    "a tool with replay=True asks the same questions in the same order each time it runs"
                )
            if each.key not in self.asked and each.key not in self.answers:  # it may be answered before the task began
                new[each.key] = each, text
        if not new:
            return TaskStep(self, _NOTHING)
        asked = {**self.asked, **{key: text for key, (_, text) in new.items()}}
        open = (*self.questions, *(each for each, _ in new.values()))
        return self._step(TaskEvent.ASKED, now, questions=open, asked=asked)

    def answer(self, responses: Json, now: float) -> TaskStep:
        """Take answers by key.  Answers without an open question are ignored (xtask-32), and some may be missing.

        Raises `RequestError` (-32602), to be sent as the answer, if an answer to an open question has the wrong shape.
        """
        given = read_answers(self.questions, {"inputResponses": responses}).given
        return self._close(given, now, answers={**self.answers, **given})

    def withdraw(self, keys: Iterable[str], now: float) -> TaskStep:
        """Close questions without an answer, because no handler waits for it any more.  A late answer is ignored."""
        return self._close(keys, now)

    def _close(self, keys: Iterable[str], now: float, **changes: Any) -> TaskStep:
        gone = frozenset(keys)
        open = tuple(each for each in self.questions if each.key not in gone)
        if len(open) == len(self.questions):
            return TaskStep(self, _NOTHING)
        return self._step(TaskEvent.ANSWERED if open else TaskEvent.SETTLED, now, questions=open, **changes)

    def take(self, keys: Iterable[str]) -> TaskStep:
        """Forget answers that the handler has taken, if it never runs again.  No client sees a difference."""
        taken = frozenset(keys)
        left = {key: each for key, each in self.answers.items() if key not in taken}
        if len(left) == len(self.answers):
            return TaskStep(self, _NOTHING)
        return self._step(TaskEvent.TAKEN, self.updated, answers=left)

    def note(self, message: str, now: float) -> TaskStep:
        """Set the status message.  Raises `UsageError` if it is no text, or too long."""
        if not isinstance(message, str) or len(message) > MAX_MESSAGE or not writable(message):
            raise UsageError(f"a status message is a text of at most {MAX_MESSAGE} characters, got {shown(message)}")
        return self._step(TaskEvent.NOTED, now, message=message)

    def finish(self, result: JsonObject, now: float) -> TaskStep:
        """Take the result of the handler, also one with isError."""
        return self._end(TaskEvent.FINISHED, now, result=result)

    def fail(self, error: RequestError, now: float) -> TaskStep:
        """Take the JSON-RPC error with which the handler ended."""
        return self._fail(TaskEvent.FAILED, error, now)

    def lose(self, now: float) -> TaskStep:
        """Fail the task, because its process has ended and its tool cannot be run again."""
        why = "the server stopped while this task ran, and its tool cannot be run a second time (replay=True)"
        return self._fail(TaskEvent.LOST, RequestError(INTERNAL_ERROR, f"{why}; call the tool again"), now)

    def _fail(self, event: TaskEvent, error: RequestError, now: float) -> TaskStep:
        written: JsonObject = {"code": error.code, "message": error.message}
        if error.data is not None:
            written["data"] = error.data
        # task-54, xtask-21: a failed task says why.
        return self._end(event, now, error=written, message=_cut(error.message))

    def take_over(self, now: float) -> TaskStep:
        """Run the handler again in another process, from the start, with the answers so far."""
        return self._step(TaskEvent.TAKEN_OVER, now)

    def cancel(self, now: float) -> TaskStep:
        """Take the cancellation of the requestor."""
        return self._end(TaskEvent.CANCELLED, now, message="The task was cancelled.")

    def expire(self, now: float) -> TaskStep:
        """Look at the ttl: the deed is DELETE if it has passed."""
        return TaskStep(self, _NOTHING) if now < self.expires else self._step(TaskEvent.EXPIRED, now)

    def _end(self, event: TaskEvent, now: float, **changes: Any) -> TaskStep:
        return self._step(event, now, params={}, questions=(), answers=NOTHING, asked=NOTHING, **changes)

    def _step(self, event: TaskEvent, now: float, **changes: Any) -> TaskStep:
        status, deed = TASKS[self.status][event]
        if deed is _NOTHING:
            return TaskStep(self, deed)
        # The wall clock may be set back, and `lastUpdatedAt` must not be.
        return TaskStep(attrs.evolve(self, status=status, updated=max(self.updated, now), **changes), deed)

    def text(self) -> str:
        """Write the record for a store.

        The first line is what most readers need: the state of the task.  A second line has the result or, before the
        end, what a handler needs: params and answers.  Both may be long.  Raises as `to_text`, because a record that
        cannot be sent would fail each poll.
        """
        members = {name: getattr(self, name) for name in _FIRST_LINE}
        members |= {"layout": _LAYOUT, "status": self.status.value}
        members["questions"] = [[each.key, each.method, each.params] for each in self.questions]
        if self.result is None:
            rest = {"params": self.params, "answers": dict(self.answers), "asked": dict(self.asked)}
        else:
            members["result"] = _essence(self.result)
            rest = {name: each for name, each in self.result.items() if name not in _OF_THE_MESSAGE}
        if self.result is None and not any(rest.values()):
            return to_text(members).decode()
        return b"\n".join((to_text(members), to_text(rest))).decode()

    @classmethod
    def from_text(cls, text: str) -> TaskRecord:
        """Read a record of a store.  Raises `UsageError` if another version of this package wrote it.

        `text` may be the first line alone.  Then `result` has only the parts that `TaskForm.task` needs, and `params`,
        `answers` and `asked` are empty.
        """
        head, _, rest = text.partition("\n")
        members = json.loads(head)
        layout = members.pop("layout", None)
        if layout != _LAYOUT:
            raise UsageError(
                f"the store has a task of layout {layout!r}, and this version of trio_mcp reads layout {_LAYOUT}; "
                "use the version that wrote it, or a new store"
            )
        members["status"] = TaskStatus(members["status"])
        members["questions"] = tuple(Question(*each) for each in members["questions"])
        if rest and members["result"] is None:
            members |= json.loads(rest)
        elif rest:
            members["result"] = {**json.loads(rest), **_of_the_message(members["result"])}
        return cls(**members)


_SECOND_LINE = {"params", "answers", "asked"}
_FIRST_LINE = [field.name for field in attrs.fields(TaskRecord) if field.name not in _SECOND_LINE]


@record
class TaskStep:
    """The outcome of a step: the record after it, and the deed."""

    task: TaskRecord
    deed: TaskDeed


def _essence(result: JsonObject) -> JsonObject:
    """The parts of a result that differ between the forms, or decide the status and its message in the older one."""
    kept = _of_the_message(result)
    if result.get("isError") is not True:
        return kept
    text = _first_text(result)
    return {**kept, "isError": True, "content": [] if text is None else [{"type": "text", "text": text}]}


def _of_the_message(result: JsonObject) -> JsonObject:
    return {name: result[name] for name in _OF_THE_MESSAGE if name in result}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."


# The two forms


@record
class TaskForm:
    """One of the two forms in which a requestor sees a task."""

    name: str
    ttl: str  # the name of the member
    poll: str
    inlined: bool  # the outcome and the questions are part of the task; there is no tasks/result
    status_notification: str

    def status(self, task: TaskRecord) -> TaskStatus:
        """The status of a task in this form."""
        # task-64, xtask-09: only the older form counts a tool result with isError as a failure.
        if not self.inlined and task.result is not None and task.result.get("isError") is True:
            return FAILED
        return task.status

    def task(self, task: TaskRecord) -> JsonObject:
        """The members that each message about the task has."""
        status = self.status(task)
        written: JsonObject = {"taskId": task.id, "status": status.value}
        message = task.message
        if status is FAILED and task.status is COMPLETED:  # task-54
            message = _first_text(task.result or {}) or message or "The tool returned an error."
        if message is not None:
            written["statusMessage"] = message
        # task-28, task-30
        written |= {"createdAt": _date(task.created), "lastUpdatedAt": _date(task.updated), self.ttl: task.ttl}
        written[self.poll] = task.poll
        return written

    def created(self, task: TaskRecord, immediate: str | None = None) -> JsonObject:
        """CreateTaskResult.  `immediate` is a text for the model, which the older form can carry (task-65)."""
        if self.inlined:
            return {"resultType": "task", **self.task(task)}  # xtask-07
        result: JsonObject = {"task": self.task(task)}  # task-33
        if immediate is not None:
            result["_meta"] = {IMMEDIATE_RESPONSE: immediate}
        return result

    def detailed(self, task: TaskRecord, rest: bytes | None = None) -> JsonObject:
        """The result of tasks/get, and the params of a status notification (xtask-16..20, xtask-48).

        `rest` is the second line of the record, if `task` was read from the first line alone.  A result is then passed
        on as this text, and not read (`CachedResult`).
        """
        written = self.task(task)
        if self.inlined and task.status is INPUT_REQUIRED:
            written["inputRequests"] = {
                each.key: {"method": each.method, "params": each.params} for each in task.questions
            }
        if self.inlined and task.result is not None and rest is not None:
            kept = {"resultType": "complete", **_of_the_message(task.result)}
            return CachedResult(written, b'"result":' + CachedResult(kept, rest[1:-1]).text)
        if self.inlined and task.result is not None:
            written["result"] = {"resultType": "complete", **task.result}
        if self.inlined and task.error is not None:
            written["error"] = task.error
        return written

    def acknowledged(self, task: TaskRecord) -> JsonObject:
        """The result of tasks/cancel; in the extension it says nothing of the task (xtask-29)."""
        return {} if self.inlined else self.task(task)

    def notification(self, task: TaskRecord, rest: bytes | None = None) -> Notification:
        """The notification of the status.  task-39: without related-task metadata.  `rest`: see `detailed`."""
        return Notification(self.status_notification, self.detailed(task, rest))

    def refuse_cancel(self, task: TaskRecord) -> None:
        """Raise RequestError if this form refuses to cancel the task (task-44)."""
        if task.terminal and not self.inlined:
            raise RequestError(
                INVALID_PARAMS, f"the task {shown(task.id)} is {self.status(task).value} and cannot be cancelled"
            )

    def outcome(self, task: TaskRecord, rest: bytes | None = None) -> JsonObject:
        """The result of tasks/result for a task that has ended.  Raises RequestError as the request would have.

        task-35: the same result or the same error.  task-50: with related-task metadata.  `rest`: see `detailed`.
        """
        if task.error is not None:
            raise RequestError(task.error["code"], task.error["message"], task.error.get("data"))
        if task.result is None:
            raise RequestError(INVALID_PARAMS, f"the task {shown(task.id)} was cancelled and has no result")
        meta = {**task.result.get("_meta", {}), **related(task.id)}
        if rest is not None:
            return CachedResult({"_meta": meta}, rest[1:-1])
        return {**{name: each for name, each in task.result.items() if name != "resultType"}, "_meta": meta}


CORE_TASKS = TaskForm(
    "2025-11-25", "ttl", "pollInterval", inlined=False, status_notification="notifications/tasks/status"
)
EXTENSION_TASKS = TaskForm(
    TASKS_EXTENSION, "ttlMs", "pollIntervalMs", inlined=True, status_notification="notifications/tasks"
)


def related(task_id: str) -> JsonObject:
    """The `_meta` of a message that belongs to a task (task-26)."""
    return {RELATED_TASK: {"taskId": task_id}}


def _date(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _first_text(result: JsonObject) -> str | None:
    texts = [block.get("text") for block in result.get("content", ()) if block.get("type") == "text"]
    return _cut(texts[0]) if texts and texts[0] else None


# Params of a requestor


def read_task_id(params: Mapping[str, Any]) -> str:
    """The task that a request names.  task-37: only this param counts, not its metadata."""
    id = params.get("taskId")
    if not isinstance(id, str):
        raise RequestError(INVALID_PARAMS, "taskId must be a string")
    return id


def unknown_task(id: str) -> RequestError:
    """The error for a task that does not exist, has expired, or belongs to another principal (task-51, xtask-41).

    The three cases get the same error, so that a caller learns nothing of the tasks of others.
    """
    return RequestError(INVALID_PARAMS, f"there is no task {shown(id)} for this caller; it may have expired")


def missing_extension(reason: str) -> RequestError:
    """The error for a client that must declare the extension (xtask-05, xtask-37, xtask-42)."""
    needed = {"requiredCapabilities": capability_object([("extensions", TASKS_EXTENSION)])}
    return RequestError(MISSING_CLIENT_CAPABILITY, f"{reason} needs the extension {TASKS_EXTENSION}", needed)


def requested_ttl(params: Mapping[str, Any], longest: float) -> int | None:
    """The ttl of a task in milliseconds: as requested in `params.task` (task-10), and at most `longest` seconds.

    Raises `RequestError` (-32602) if the request is malformed.
    """
    augmented = params.get("task", NOTHING)
    limit = None if longest == inf else int(longest * 1000)
    ttl: Any = augmented.get("ttl") if isinstance(augmented, Mapping) else ABSENT
    if ttl is None:
        return limit
    if type(ttl) not in (int, float) or not 0 <= ttl < inf:
        raise RequestError(INVALID_PARAMS, "task must be an object, and its ttl a number of milliseconds, 0 or more")
    return int(min(ttl, LONGEST_MS if limit is None else limit))


def cursor_of(task: TaskRecord) -> str:
    """The cursor of tasks/list for the tasks after this one."""
    return urlsafe_b64encode(json.dumps([task.created, task.id]).encode()).decode()


def read_cursor(cursor: Json) -> tuple[float, str]:
    """Read a cursor: the time and the id of the last task of the page before.  Raises `RequestError` (task-52)."""
    try:
        created, id = json.loads(urlsafe_b64decode(cursor))
    except (TypeError, ValueError, RecursionError):
        created = id = None
    if type(created) is not float or not isinstance(id, str):
        raise RequestError(INVALID_PARAMS, "the cursor is not from this server; list again without a cursor")
    return created, id
