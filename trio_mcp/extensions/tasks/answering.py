"""Tasks that a client keeps for its server, in 2025-11-25: questions that may be answered later.

The server adds `task` to a request for sampling or elicitation.  The client answers with a task at once, asks its
callback, and keeps the result until the server fetches it.  The tasks are in memory, and end with the client.

A question has its place until it is answered, as without a task.  Beyond the limits it is refused at once, because a
task that fails later would tell the server nothing sooner.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from trio_mcp.client.errors import too_large_questions, too_many_questions
from trio_mcp.core.messages import JsonObject, Limits, to_text
from trio_mcp.core.tasks import CORE_TASKS, TaskRecord, read_task_id, requested_ttl, unknown_task
from trio_mcp.stores.rows import wall_time

if TYPE_CHECKING:
    from trio_mcp.core.session import Call
    from trio_mcp.extensions.tasks.keeper import Keeper

__all__ = ["ClientAnswers"]


class ClientAnswers:
    """The tasks of one client."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open = self._bytes = 0  # the questions that are not answered yet
        self._keeper: Keeper | None = None

    async def answer(
        self, nursery: trio.Nursery, call: Call, ask: Callable[[JsonObject], Awaitable[JsonObject]]
    ) -> JsonObject:
        """Answer a request of the server: with a task, if it asks for one (task-33)."""
        params = call.request.params
        plain = {name: each for name, each in params.items() if name != "task"}
        if "task" not in params or call.terms.revision.name != CORE_TASKS.name:
            return await ask(plain)
        from trio_mcp.extensions.tasks.host import TaskHost  # hardly any server asks so

        limits, size = self._limits, len(to_text(plain))
        ttl = requested_ttl(params, limits.task_seconds)
        if self._open >= limits.questions + limits.questions_waiting:
            raise too_many_questions(limits)
        if self._open and self._bytes + size > limits.bytes_each:
            raise too_large_questions()
        task = TaskRecord(secrets.token_hex(16), None, wall_time(), ttl, call.request.method)
        keeper = self._started(nursery)
        self._open, self._bytes = self._open + 1, self._bytes + size
        try:
            await keeper.add(task, None)
        except BaseException:
            self._release(size)
            raise

        async def work(host: TaskHost) -> None:
            try:
                await host.run(partial(ask, plain))
            finally:
                self._release(size)

        nursery.start_soon(work, TaskHost(keeper, task), name=f"a task: {call.request.method}")
        return CORE_TASKS.created(task)

    def _release(self, size: int) -> None:
        self._open, self._bytes = self._open - 1, self._bytes - size

    def _started(self, nursery: trio.Nursery) -> Keeper:
        if self._keeper is None:
            from trio_mcp.extensions.tasks.keeper import Keeper
            from trio_mcp.stores.memory import MemoryStore

            self._keeper = Keeper(MemoryStore(), "client", self._limits)
            nursery.start_soon(self._keeper.run, name="tasks for the server")
        return self._keeper

    # The methods that the server calls.

    async def get(self, params: dict[str, Any]) -> JsonObject:
        """Serve tasks/get."""
        return await self._kept(params).get(params, None, CORE_TASKS)

    async def cancel(self, params: dict[str, Any]) -> JsonObject:
        """Serve tasks/cancel."""
        return await self._kept(params).cancel(params, None, CORE_TASKS)

    async def result(self, params: dict[str, Any]) -> JsonObject:
        """Serve tasks/result (task-36)."""
        keeper, id = self._kept(params), read_task_id(params)
        await keeper.watch(id, lambda task: task.terminal)
        return CORE_TASKS.outcome(await keeper.owned(id, None, whole=True))

    async def list(self, params: dict[str, Any]) -> JsonObject:
        """Serve tasks/list."""
        return {"tasks": []} if self._keeper is None else await self._keeper.list(params, None, lambda task: True)

    def _kept(self, params: Mapping[str, Any]) -> Keeper:
        if self._keeper is None:
            raise unknown_task(read_task_id(params))
        return self._keeper
