"""The states of a task, as its requestor reads them, in both forms of the protocol (see `tasks`)."""

from __future__ import annotations

from math import inf
from types import MappingProxyType

import attrs

from trio_mcp.core.errors import RemoteProtocolError, RequestError, shown
from trio_mcp.core.messages import Json, JsonObject, record
from trio_mcp.core.rounds import Question
from trio_mcp.core.tasks import GONE, IMMEDIATE_RESPONSE, LONGEST_MS, POLL_MS, TERMINAL, TaskStatus

__all__ = ["TaskState", "poll_seconds", "read_created", "read_task"]

_POLL_SECONDS = (0.05, 86_400.0)  # a peer may send any number; more than a day is longer than a client lives


@record
class TaskState:
    """One state of a task, as its requestor sees it.

    `result` and `error` are set if the form has them in the task; otherwise tasks/result returns them.  `created` and
    `updated` are ISO 8601 texts, as the peer wrote them.
    """

    id: str
    status: TaskStatus
    message: str | None = None
    created: str = ""
    updated: str = ""
    ttl: int | None = None
    poll: int | None = None
    questions: tuple[Question, ...] = ()
    result: JsonObject | None = None
    error: RequestError | None = None
    immediate: str | None = None
    """A text for the model while the task runs (task-65)."""

    @property
    def terminal(self) -> bool:
        """Whether the task has ended."""
        return self.status in TERMINAL


_STATUSES = MappingProxyType({each.value: each for each in TaskStatus if each is not GONE})


def read_created(result: JsonObject) -> TaskState | None:
    """Read CreateTaskResult in either form; None if the result is that of the call itself."""
    if result.get("resultType") == "task":
        return read_task(result)
    task = result.get("task")
    if not isinstance(task, dict) or "taskId" not in task:
        return None
    meta = result.get("_meta")
    immediate = meta.get(IMMEDIATE_RESPONSE) if isinstance(meta, dict) else None
    return attrs.evolve(read_task(task), immediate=immediate if isinstance(immediate, str) else None)


def read_task(task: JsonObject) -> TaskState:
    """Read a task in either form.  Raises `RemoteProtocolError` if a member that the requestor needs is invalid."""
    id, status = task.get("taskId"), task.get("status")
    if not isinstance(id, str) or not isinstance(status, str) or status not in _STATUSES:
        raise RemoteProtocolError(f"a task needs a taskId and a known status, got {shown(id)} and {shown(status)}")
    return TaskState(
        id,
        _STATUSES[status],
        _text(task.get("statusMessage")),
        _text(task.get("createdAt")) or "",
        _text(task.get("lastUpdatedAt")) or "",
        _milliseconds(task.get("ttlMs", task.get("ttl"))),
        _milliseconds(task.get("pollIntervalMs", task.get("pollInterval"))),
        _read_questions(task.get("inputRequests", {})) if status == "input_required" else (),
        *_read_outcome(task, status),
    )


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def _milliseconds(value: Json) -> int | None:
    return int(min(value, LONGEST_MS)) if type(value) in (int, float) and 0 <= value < inf else None


def _read_questions(requests: Json) -> tuple[Question, ...]:
    questions = []
    for key, each in requests.items() if isinstance(requests, dict) else [("", requests)]:
        method = each.get("method") if isinstance(each, dict) else None
        params = each.get("params", {}) if isinstance(each, dict) else None
        if not isinstance(method, str) or not isinstance(params, dict):
            raise RemoteProtocolError(f"inputRequests of a task: {shown(key)} must be a request with a method")
        questions.append(Question(key, method, params))
    return tuple(questions)


def _read_outcome(task: JsonObject, status: str) -> tuple[JsonObject | None, RequestError | None]:
    result, error = task.get("result"), task.get("error")
    if status == "completed" and isinstance(result, dict):
        return result, None
    if status != "failed" or not isinstance(error, dict):
        return None, None
    code, message = error.get("code"), error.get("message")
    if type(code) is not int or not isinstance(message, str):
        raise RemoteProtocolError("the error of a failed task needs a code and a message")
    return None, RequestError(code, message, error.get("data"))


def poll_seconds(state: TaskState) -> float:
    """Seconds until the next poll: the interval of the latest state (task-13, xtask-12)."""
    shortest, longest = _POLL_SECONDS
    return min(max((POLL_MS if state.poll is None else state.poll) / 1000, shortest), longest)
