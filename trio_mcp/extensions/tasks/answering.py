"""Tasks that a client keeps for its server, in 2025-11-25: questions that may be answered later.

The server adds `task` to a request for sampling or elicitation.  The client answers with a task at once, asks its
callback, and keeps the result until the server fetches it.  The tasks are in memory, and end with the client.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from trio_mcp.core.messages import JsonObject, Limits
from trio_mcp.core.tasks import CORE_TASKS, TaskRecord, read_task_id, requested_ttl, unknown_task
from trio_mcp.stores.rows import wall_time

if TYPE_CHECKING:
    from trio_mcp.core.session import Call
    from trio_mcp.extensions.tasks.keeper import Keeper

__all__ = ["ClientAnswers"]


class ClientAnswers:
    """The tasks of one client."""

    def __init__(self) -> None:
        self._limits = Limits()
        self._keeper: Keeper | None = None

    async def answer(
        self, nursery: trio.Nursery, call: Call, ask: Callable[[JsonObject], Awaitable[JsonObject]]
    ) -> JsonObject:
        """Answer a request of the server: with a task, if it asks for one (task-33)."""
        params = call.request.params
        plain = {name: each for name, each in params.items() if name != "task"}
        if "task" not in params or call.terms.revision.name != CORE_TASKS.name:
            return await ask(plain)
        from trio_mcp.extensions.tasks.keeper import TaskHost  # hardly any server asks so

        ttl = requested_ttl(params, self._limits.task_seconds)
        task = TaskRecord(secrets.token_hex(16), None, wall_time(), ttl, call.request.method)
        keeper = self._started(nursery)
        await keeper.add(task, None)
        host = TaskHost(keeper, task)
        nursery.start_soon(host.run, partial(ask, plain), name=f"a task: {call.request.method}")
        return CORE_TASKS.created(task)

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
