"""Tasks in a world: the store, the tools, the moves of clients, and the rules.

| Rule | When it is checked |
|---|---|
| a task that a client knows of is there, until its ttl has passed, if the store has outlived the server | always |
| a task that has ended does not change any more, for every observer | with each look |
| a task is seen by its principal only | in `peek` and in tasks/list |
| an answered question is not asked again | with each look |
| a cancelled task ends | with the next look |
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

from tests.simulation.book import Book, Call, ToolSaysNo
from trio_mcp import Client, RequestError
from trio_mcp.core import INVALID_PARAMS

# The records of a store are an inner part.
from trio_mcp.core.tasks import TaskRecord
from trio_mcp.extensions.tasks import ClientTask, TaskState, TaskStatus
from trio_mcp.stores import MemoryStore, Row

if TYPE_CHECKING:
    from tests.simulation.plan import Move
    from tests.simulation.visitor import Visitor

__all__ = ["TASK_MOVES", "TASK_SECONDS", "Errand", "Mounted", "audit"]

TASK_SECONDS = 250.0  # for which tasks are kept
# Seconds after which each task has ended: a dead process has lost its lease, and the next one has done the work again.
SETTLED = 150.0


class Mounted:
    """The store as one life of a server has it: a process that was killed does not write any more."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.killed = False

    async def __aenter__(self) -> Mounted:
        await self.store.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.store.__aexit__(kind, error, trace)

    async def _alive(self) -> MemoryStore:
        if self.killed:
            await trio.sleep_forever()
        return self.store

    async def add(self, row: Row, *, each: float = inf, total: float = inf) -> bool:
        return await (await self._alive()).add(row, each=each, total=total)

    async def get(self, kind: str, key: str) -> Row | None:
        return await (await self._alive()).get(kind, key)

    async def replace(self, row: Row) -> bool:
        return await (await self._alive()).replace(row)

    async def delete(self, kind: str, key: str) -> bool:
        return await (await self._alive()).delete(kind, key)

    async def list(self, kind: str, owner: str, after: tuple[float, str], limit: int) -> Sequence[Row]:
        return await (await self._alive()).list(kind, owner, after, limit)

    async def sweep(self, now: float) -> int:
        return await (await self._alive()).sweep(now)

    async def lease(self, holder: str, until: float) -> None:
        await (await self._alive()).lease(holder, until)

    async def claim(self, kind: str, holder: str, now: float, limit: int, **how: Any) -> Sequence[Row]:
        return await (await self._alive()).claim(kind, holder, now, limit, **how)

    async def changes(self, after: int) -> tuple[int, Sequence[tuple[str, str]]]:
        return await (await self._alive()).changes(after)


@attrs.define(eq=False)
class Errand:
    """A task that a client knows of."""

    id: str
    token: str
    client: str
    store: Any  # that has it; None if it is not known
    since: float  # before the task was created, on a slow line long before
    ended: str = ""  # the last state, as text
    outcome: str = ""  # with it, if the client knows the newer form
    answered: set[str] = attrs.field(factory=set)
    cancelled: bool = False

    def known(self) -> Errand:
        """What clients know of it now."""
        return attrs.evolve(self, answered=set(self.answered))

    def expired(self) -> bool:
        return trio.current_time() >= self.since + TASK_SECONDS


def see(book: Book, errand: Errand, state: TaskState, before: Errand) -> None:
    """A client has got a state of a task, of which this was known before the client asked."""
    shown = attrs.evolve(state, result=None, error=None, immediate=None)
    if book.relayed:  # its times are those of a relay, which may have been started again and not know the last message
        shown = attrs.evolve(shown, created="", updated="", message=None)
    now = repr(shown)
    outcome = "" if state.result is None and state.error is None else f"{state.result} {state.error!r}"
    book.tell(f"{errand.token} is seen as {state.status.value}")
    book.check(before.ended in ("", now), f"{errand.token} was {before.ended}, and is {now}")
    same = not outcome or before.outcome in ("", outcome)
    book.check(same, f"{errand.token} had the outcome {before.outcome}, and has {outcome}")
    asked = before.answered & {each.key for each in state.questions}
    book.check(not asked, f"{errand.token} asks {asked} again")
    book.check(state.terminal or not before.cancelled, f"{errand.token} was cancelled, and is {state.status.value}")
    errand.outcome = outcome or errand.outcome
    if state.terminal:
        errand.ended = now


def lost(book: Book, errand: Errand) -> None:
    """The server says that it has no such task."""
    there = errand.store is book.store
    book.check(errand.expired() or not there, f"the task of {errand.token} is lost")


async def start(
    visitor: Visitor, client: Client, call: Call, tool: str, along: Any, **more: float
) -> tuple[ClientTask, Errand]:
    """Start a task.  The errand has no id if the server has answered at once, as a relay may."""
    book, store, begun = visitor._book, visitor._book.store, trio.current_time()
    task = await client.start_task(tool, {"token": call.token, **more}, **along)
    # If the server has been replaced meanwhile, with its store, each of the two may have created the task.
    errand = Errand(task.id, call.token, visitor.name, store if store is book.store else None, begun)
    if task.id:
        book.errands[call.token] = errand
        see(book, errand, task.state, errand.known())
    return task, errand


async def finish(visitor: Visitor, call: Call, task: ClientTask, errand: Errand) -> None:
    """Wait for the result of a task."""
    book = visitor._book
    try:
        result = await task.result()
    except RequestError as error:
        if error.code == INVALID_PARAMS:
            lost(book, errand)
        raise
    text = result.content[0].text  # type: ignore[union-attr]  # all of it is text
    if result.is_error:
        book.tell(f"{errand.token} failed: {text}"[:300])
        raise ToolSaysNo
    said = json.loads(text)["token"]
    book.check(said == errand.token, f"{call.token} got the result of {said!r}, not of {errand.token}")
    runs = book.runs[errand.token]
    book.check(any(run.ended == "done" for run in runs), f"{errand.token} has a result, and no handler has ended")


async def look(visitor: Visitor, task: ClientTask, errand: Errand) -> TaskState:
    before = errand.known()
    try:
        state = await task.status()
    except RequestError as error:
        if error.code == INVALID_PARAMS:
            lost(visitor._book, errand)
        raise
    see(visitor._book, errand, state, before)
    return state


# The moves.


async def task(visitor: Visitor, client: Client, call: Call, move: Move, along: Any) -> None:
    """Start a task, and wait for it."""
    started, errand = await start(visitor, client, call, "job", along)
    await finish(visitor, call, started, errand)


async def errand(visitor: Visitor, client: Client, call: Call, move: Move, along: Any) -> None:
    """Start a task, look at it, and leave it to a later move, which may be in another life of the client."""
    started, kept = await start(visitor, client, call, ("job", "quiz")[move.size % 2], along, seconds=move.size)
    if started.id:
        visitor.errands.append(kept)
        await look(visitor, started, kept)


async def fetch(visitor: Visitor, client: Client, call: Call, move: Move, along: Any) -> None:
    """Come back for the result of an errand, by its id."""
    if not visitor.errands:
        return
    kept = visitor.errands.popleft()
    if not kept.expired():
        await finish(visitor, call, client.open_task(kept.id), kept)


async def answer(visitor: Visitor, client: Client, call: Call, move: Move, along: Any) -> None:
    """Answer the questions of a task by their keys, twice."""
    started, kept = await start(visitor, client, call, "quiz", along)
    if client.revision < "2026-07-28" or not started.id:
        await finish(visitor, call, started, kept)
        return
    while not (state := await look(visitor, started, kept)).terminal:
        if state.questions:
            await started.answer({each.key: _reply(each) for each in state.questions})
            kept.answered |= {each.key for each in state.questions}
            await started.answer({each.key: {"action": "decline"} for each in state.questions})
        await trio.sleep(0.2)
    await finish(visitor, call, started, kept)


def _reply(question: Any) -> dict[str, Any]:
    """It tells its own call: a relay before a legacy session may show the question of another one."""
    if question.method == "sampling/createMessage":
        text = question.params["messages"][0]["content"]["text"]
        return {"role": "assistant", "content": {"type": "text", "text": f"answer to {text}"}, "model": "model"}
    return {"action": "accept", "content": {"answer": f"answer to {question.params['message']}"}}


async def drop(visitor: Visitor, client: Client, call: Call, move: Move, along: Any) -> None:
    """Start a task, look at it or list it, and cancel it."""
    started, kept = await start(visitor, client, call, "job", along)
    if not started.id:
        return
    if move.size % 2:
        await look(visitor, started, kept)
    if client.revision < "2026-07-28":
        listed: Any = await client.request("tasks/list", {})
        ids = {each["taskId"] for each in listed["tasks"]}
        strange = [each.token for each in visitor._book.errands.values() if each.id in ids and not _same(visitor, each)]
        visitor._book.check(not strange, f"{visitor.name} is told of the tasks {strange}")
    try:
        await started.cancel()
    except RequestError as error:
        if error.code != INVALID_PARAMS or not (await look(visitor, started, kept)).terminal:
            raise
    else:
        kept.cancelled = True
        await look(visitor, started, kept)


async def peek(visitor: Visitor, client: Client, call: Call, move: Move, along: Any) -> None:
    """Look at the task of another client, which only one of the same principal may see."""
    book = visitor._book
    for each in reversed(book.errands.values()):
        if each.client != visitor.name and _same(visitor, each) and not each.expired():
            await look(visitor, client.open_task(each.id), each)
            return
        if not _same(visitor, each):
            try:
                state = await client.open_task(each.id).status()
            except RequestError as error:
                if error.code != INVALID_PARAMS:  # no room for requests
                    raise
            else:
                book.broken(f"{visitor.name} sees the task of {each.token}: {state}")
            return


def _same(visitor: Visitor, errand: Errand) -> bool:
    """Whether the principal of this client may see the task."""
    return visitor._book.fronts(visitor.name) == visitor._book.fronts(errand.client)


TASK_MOVES = {"task": task, "errand": errand, "fetch": fetch, "answer": answer, "drop": drop, "peek": peek}


# At the end.


async def audit(book: Book) -> None:
    """After a while in which nothing goes wrong: no task is lost, and none goes on for ever."""
    await trio.sleep(SETTLED)
    for errand in book.errands.values():
        if errand.store is not book.store or errand.expired():
            continue
        id = errand.id.rpartition(".")[0] if book.relayed else errand.id
        rows = [row for (_, key), row in book.store._rows.items() if key == id]
        if not rows:
            book.broken(f"the task of {errand.token} is lost")
            continue
        record = TaskRecord.from_text(rows[0].body.decode())
        waits = record.status is TaskStatus.INPUT_REQUIRED
        book.check(record.terminal or waits, f"the task of {errand.token} is still {record.status.value}")
        statuses = {record.status.name}
        if record.result is not None and record.result.get("isError"):
            statuses.add("FAILED")  # as 2025-11-25 has it (task-64)
        same = not errand.ended or any(f"TaskStatus.{status}:" in errand.ended for status in statuses)
        book.check(same, f"the task of {errand.token} was {errand.ended}, and is {record.status.value}")
        if errand.cancelled:
            book.check(record.terminal, f"the task of {errand.token} was cancelled, and is {record.status.value}")
