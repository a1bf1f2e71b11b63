"""Questions that a server asks by a task, in 2025-11-25: the client keeps the question, and answers it later.

`ctx.elicit(..., task=True)` adds the param `task` to its request, for a client that declares such tasks.  The client
answers with a task at once.  The server polls until the task has ended, and fetches its result.  It cancels the task
if its handler waits no longer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final

import trio

from trio_mcp.core.errors import INTERNAL_ERROR, McpError, RemoteProtocolError
from trio_mcp.core.messages import JsonObject
from trio_mcp.core.rounds import Question
from trio_mcp.core.task_states import TaskState, poll_seconds, read_created, read_task
from trio_mcp.core.tasks import TaskStatus
from trio_mcp.server.context import ClientError, ClientGone
from trio_mcp.server.parking import PendingQuestion
from trio_mcp.transport.nursery import open_nursery

if TYPE_CHECKING:
    from trio_mcp.server.context import Context
    from trio_mcp.server.session import ServerSession

__all__ = ["ask_by_task"]

_FAILURES: Final = 5  # refusals in a row, by a client that has no room for a request about a task
_CANCELLING: Final = 30.0  # seconds for the client's answer to a cancellation, which no handler waits for


async def ask_by_task(ctx: Context, asking: Sequence[Question]) -> dict[str, JsonObject]:
    """Send questions to the client of a session, those with the param `task` by a task.  Return the answers by key.

    Raises as `Parking.send`, and `ClientGone` if a task has not ended in time.
    """
    answers: dict[str, JsonObject] = {}

    async def ask(question: Question) -> None:
        answers[question.key] = await _answer(ctx, session, question)

    session = ctx._session("a question")
    with ctx._waiting():  # also between two polls
        async with open_nursery(wait=True) as nursery:
            for each in asking:
                nursery.start_soon(ask, each, name=f"a question: {each.method}")
    return answers


async def _answer(ctx: Context, session: ServerSession, question: Question) -> JsonObject:
    async def send(method: str, params: JsonObject) -> JsonObject:
        return (await run.parking.send(ctx, session, [Question("", method, params)]))[""]

    run, params = session._run, question.params
    longest = run.limits.task_seconds
    if "task" in params:
        params = {**params, "task": {} if longest == inf else {"ttl": int(longest * 1000)}}  # task-10
    result = await send(question.method, params)
    task = read_created(result)
    if task is None:
        return result  # task-17: this client has declared no tasks
    seconds = longest if task.ttl is None else min(longest, task.ttl / 1000)  # task-29
    try:
        with trio.move_on_after(seconds):
            return await _outcome(task, send)
        raise ClientGone(f"the client did not answer {question.method} within {seconds:g} seconds, the ttl of its task")
    except (trio.Cancelled, ClientGone, RemoteProtocolError):
        _cancel(ctx, session, task.id)
        raise


async def _outcome(task: TaskState, send: Callable[[str, JsonObject], Awaitable[JsonObject]]) -> JsonObject:
    """Poll until a task has ended, or has questions, which come on the stream of tasks/result (task-14, task-27).

    A client that has no room for a request refuses it with -32603, and says nothing of the task.  It is asked again.
    """
    params, refusals = {"taskId": task.id}, 0
    while True:
        try:
            if task.terminal or task.status is TaskStatus.INPUT_REQUIRED:
                return await send("tasks/result", params)
            await trio.sleep(poll_seconds(task))  # task-13
            task, refusals = read_task(await send("tasks/get", params)), 0
        except ClientError as error:
            refusals += 1
            if error.code != INTERNAL_ERROR or task.status is TaskStatus.FAILED or refusals == _FAILURES:
                raise
            await trio.sleep(poll_seconds(task))


def _cancel(ctx: Context, session: ServerSession, id: str) -> None:
    """Cancel a task of the client (cancel-09), without waiting: this runs in a scope that is cancelled.

    The request belongs to the session, because the call that asked may have ended.
    """
    if not ctx.supports("tasks", "cancel"):  # task-66
        return
    with suppress(McpError):  # the client has gone, or reads too slowly; its task ends with its ttl
        deadline = trio.current_time() + _CANCELLING
        request = session.session.request("tasks/cancel", {"taskId": id}, deadline=deadline)
        session._asked[request] = PendingQuestion(request)
        session.wire.wake()
