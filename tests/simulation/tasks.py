"""Tasks in a world: the store, the tools, the moves of clients, and the rules.

| Rule | When it is checked |
|---|---|
| a task that a client knows exists until its ttl has passed, if the store has outlived the server | always |
| a task that has ended does not change any more, for every observer | with each state |
| only its principal sees a task | in `peek` and in tasks/list |
| an answered question is not asked again | with each state |
| a cancelled task ends | with the next state |
| each task ends, or waits for an answer | at the end |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs
import trio

from tests.simulation.monitor import Call, Monitor, ToolReportedFailure
from trio_mcp import Client, RequestError
from trio_mcp.core import INVALID_PARAMS

# The records of a store are internal.
from trio_mcp.core.tasks import TaskRecord
from trio_mcp.extensions.tasks import ClientTask, TaskState, TaskStatus
from trio_mcp.stores import MemoryStore, Row

if TYPE_CHECKING:
    from tests.simulation.clients import ClientProgram
    from tests.simulation.plan import Move

__all__ = ["TASK_MOVES", "TASK_SECONDS", "KnownTask", "ProcessStore", "check_tasks"]

TASK_SECONDS = 250.0  # for which tasks are kept
# Until each task has ended: the lease of a dead process expires, and the next process repeats the work.
SETTLE_SECONDS = 150.0


class ProcessStore:
    """The store of one process of a server.  A process that was killed does not write any more."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.killed = False

    async def __aenter__(self) -> ProcessStore:
        await self.store.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.store.__aexit__(kind, error, trace)

    async def _live_store(self) -> MemoryStore:
        if self.killed:
            await trio.sleep_forever()
        return self.store

    async def add(self, row: Row, *, each: float = inf, total: float = inf) -> bool:
        return await (await self._live_store()).add(row, each=each, total=total)

    async def get(self, kind: str, key: str) -> Row | None:
        return await (await self._live_store()).get(kind, key)

    async def replace(self, row: Row) -> bool:
        return await (await self._live_store()).replace(row)

    async def delete(self, kind: str, key: str) -> bool:
        return await (await self._live_store()).delete(kind, key)

    async def list(self, kind: str, owner: str, after: tuple[float, str], limit: int) -> Sequence[Row]:
        return await (await self._live_store()).list(kind, owner, after, limit)

    async def sweep(self, now: float) -> int:
        return await (await self._live_store()).sweep(now)

    async def lease(self, holder: str, until: float) -> None:
        await (await self._live_store()).lease(holder, until)

    async def claim(self, kind: str, holder: str, now: float, limit: int, **how: Any) -> Sequence[Row]:
        return await (await self._live_store()).claim(kind, holder, now, limit, **how)

    async def changes(self, after: int) -> tuple[int, Sequence[tuple[str, str]]]:
        return await (await self._live_store()).changes(after)


@attrs.define(eq=False)
class KnownTask:
    """A task that a client knows."""

    id: str
    token: str
    client: str
    store: Any  # the store with the task; None if that is uncertain
    since: float  # the time before it was created, on a slow line long before
    ended: str = ""  # the last state as text, if that is terminal
    outcome: str = ""  # the result or error as text, in revisions in which the state has them
    answered: set[str] = attrs.field(factory=set)
    cancelled: bool = False

    def snapshot(self) -> KnownTask:
        """Return a copy: the facts that clients know now."""
        return attrs.evolve(self, answered=set(self.answered))

    def expired(self) -> bool:
        return trio.current_time() >= self.since + TASK_SECONDS


def check_state(monitor: Monitor, known: KnownTask, state: TaskState, before: KnownTask) -> None:
    """Check a state that a client has got; `before` are the facts that were known before the client asked."""
    shown = attrs.evolve(state, result=None, error=None, immediate=None)
    # The times are those of the relay.  A relay that was restarted does not know the last message.
    if monitor.has_relay:
        shown = attrs.evolve(shown, created="", updated="", message=None)
    now = repr(shown)
    outcome = "" if state.result is None and state.error is None else f"{state.result} {state.error!r}"
    monitor.trace(f"{known.token} is seen as {state.status.value}")
    monitor.check(before.ended in ("", now), f"{known.token} was {before.ended}, and is {now}")
    same = not outcome or before.outcome in ("", outcome)
    monitor.check(same, f"{known.token} had the outcome {before.outcome}, and has {outcome}")
    asked = before.answered & {each.key for each in state.questions}
    monitor.check(not asked, f"{known.token} asks {asked} again")
    monitor.check(state.terminal or not before.cancelled, f"{known.token} was cancelled, and is {state.status.value}")
    known.outcome = outcome or known.outcome
    if state.terminal:
        known.ended = now


def check_lost(monitor: Monitor, known: KnownTask) -> None:
    """Check a task that the server does not know: it has expired, or its store is gone."""
    stored = known.store is monitor.store
    monitor.check(known.expired() or not stored, f"the task of {known.token} is lost")


async def start_task(
    program: ClientProgram, client: Client, call: Call, tool: str, options: Any, **more: float
) -> tuple[ClientTask, KnownTask]:
    """Start a task.  The `KnownTask` has no id if the server has answered at once, as a relay may."""
    monitor, store, begun = program._monitor, program._monitor.store, trio.current_time()
    task = await client.start_task(tool, {"token": call.token, **more}, **options)
    # If the server and its store were replaced during the request, either of the two stores may have the task.
    known = KnownTask(task.id, call.token, program.name, store if store is monitor.store else None, begun)
    if task.id:
        monitor.tasks[call.token] = known
        check_state(monitor, known, task.state, known.snapshot())
    return task, known


async def await_result(program: ClientProgram, call: Call, task: ClientTask, known: KnownTask) -> None:
    """Wait for the result of a task."""
    monitor = program._monitor
    try:
        result = await task.result()
    except RequestError as error:
        if error.code == INVALID_PARAMS:
            check_lost(monitor, known)
        raise
    text = result.content[0].text  # type: ignore[union-attr]  # all of it is text
    if result.is_error:
        monitor.trace(f"{known.token} failed: {text}"[:300])
        raise ToolReportedFailure
    returned = json.loads(text)["token"]
    monitor.check(returned == known.token, f"{call.token} got the result of {returned!r}, not of {known.token}")
    runs = monitor.runs[known.token]
    monitor.check(any(run.ended == "done" for run in runs), f"{known.token} has a result, and no handler has ended")


async def fetch_state(program: ClientProgram, task: ClientTask, known: KnownTask) -> TaskState:
    before = known.snapshot()
    try:
        state = await task.status()
    except RequestError as error:
        if error.code == INVALID_PARAMS:
            check_lost(program._monitor, known)
        raise
    check_state(program._monitor, known, state, before)
    return state


# The moves.


async def run_task(program: ClientProgram, client: Client, call: Call, move: Move, options: Any) -> None:
    """Start a task, and wait for it."""
    started, known = await start_task(program, client, call, "job", options)
    await await_result(program, call, started, known)


async def leave_task(program: ClientProgram, client: Client, call: Call, move: Move, options: Any) -> None:
    """Start a task and get its state.  A later move fetches its result, maybe in another run of the program."""
    started, known = await start_task(program, client, call, ("job", "quiz")[move.size % 2], options, seconds=move.size)
    if started.id:
        program.open_tasks.append(known)
        await fetch_state(program, started, known)


async def fetch_task(program: ClientProgram, client: Client, call: Call, move: Move, options: Any) -> None:
    """Fetch the result of a task of an earlier move, by its id."""
    if not program.open_tasks:
        return
    known = program.open_tasks.popleft()
    if not known.expired():
        await await_result(program, call, client.open_task(known.id), known)


async def answer_task(program: ClientProgram, client: Client, call: Call, move: Move, options: Any) -> None:
    """Answer the questions of a task by their keys, twice."""
    started, known = await start_task(program, client, call, "quiz", options)
    if client.revision < "2026-07-28" or not started.id:
        await await_result(program, call, started, known)
        return
    while not (state := await fetch_state(program, started, known)).terminal:
        if state.questions:
            await started.answer({each.key: _reply(each) for each in state.questions})
            known.answered |= {each.key for each in state.questions}
            await started.answer({each.key: {"action": "decline"} for each in state.questions})
        await trio.sleep(0.2)
    await await_result(program, call, started, known)


def _reply(question: Any) -> dict[str, Any]:
    """Answer with the token in the question: a relay before a legacy session may show the question of another call."""
    if question.method == "sampling/createMessage":
        text = question.params["messages"][0]["content"]["text"]
        return {"role": "assistant", "content": {"type": "text", "text": f"answer to {text}"}, "model": "model"}
    return {"action": "accept", "content": {"answer": f"answer to {question.params['message']}"}}


async def cancel_task(program: ClientProgram, client: Client, call: Call, move: Move, options: Any) -> None:
    """Start a task, get its state or list it, and cancel it."""
    started, known = await start_task(program, client, call, "job", options)
    if not started.id:
        return
    if move.size % 2:
        await fetch_state(program, started, known)
    if client.revision < "2026-07-28":
        listed: Any = await client.request("tasks/list", {})
        ids = {each["taskId"] for each in listed["tasks"]}
        foreign = [
            each.token
            for each in program._monitor.tasks.values()
            if each.id in ids and not _same_principal(program, each)
        ]
        program._monitor.check(not foreign, f"{program.name} is told of the tasks {foreign}")
    try:
        await started.cancel()
    except RequestError as error:
        if error.code != INVALID_PARAMS or not (await fetch_state(program, started, known)).terminal:
            raise
    else:
        known.cancelled = True
        await fetch_state(program, started, known)


async def peek_at_task(program: ClientProgram, client: Client, call: Call, move: Move, options: Any) -> None:
    """Get the state of the task of another client, which only a client of the same principal may see."""
    monitor = program._monitor
    for each in reversed(monitor.tasks.values()):
        if each.client != program.name and _same_principal(program, each) and not each.expired():
            await fetch_state(program, client.open_task(each.id), each)
            return
        if not _same_principal(program, each):
            try:
                state = await client.open_task(each.id).status()
            except RequestError as error:
                if error.code != INVALID_PARAMS:  # a limit of requests, for example
                    raise
            else:
                monitor.report(f"{program.name} sees the task of {each.token}: {state}")
            return


def _same_principal(program: ClientProgram, known: KnownTask) -> bool:
    """Whether the principal of this client may see the task."""
    return program._monitor.front_principals(program.name) == program._monitor.front_principals(known.client)


TASK_MOVES = {
    "task": run_task,
    "errand": leave_task,
    "fetch": fetch_task,
    "answer": answer_task,
    "drop": cancel_task,
    "peek": peek_at_task,
}


# At the end.


async def check_tasks(monitor: Monitor) -> None:
    """Check, after some time without faults, that no task is lost, and that each has ended or waits for an answer."""
    await trio.sleep(SETTLE_SECONDS)
    for known in monitor.tasks.values():
        if known.store is not monitor.store or known.expired():
            continue
        id = known.id.rpartition(".")[0] if monitor.has_relay else known.id
        rows = [row for (_, key), row in monitor.store._rows.items() if key == id]
        if not rows:
            monitor.report(f"the task of {known.token} is lost")
            continue
        record = TaskRecord.from_text(rows[0].body.decode())
        waits = record.status is TaskStatus.INPUT_REQUIRED
        monitor.check(record.terminal or waits, f"the task of {known.token} is still {record.status.value}")
        statuses = {record.status.name}
        if record.result is not None and record.result.get("isError"):
            statuses.add("FAILED")  # as 2025-11-25 has it (task-64)
        same = not known.ended or any(f"TaskStatus.{status}:" in known.ended for status in statuses)
        monitor.check(same, f"the task of {known.token} was {known.ended}, and is {record.status.value}")
        if known.cancelled:
            monitor.check(record.terminal, f"the task of {known.token} was cancelled, and is {record.status.value}")
