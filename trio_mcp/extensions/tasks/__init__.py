"""Tasks: calls that outlive their requests, in a store; for servers and clients, in both forms of the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.core.task_states import TaskState as TaskState
    from trio_mcp.core.tasks import TaskStatus as TaskStatus
    from trio_mcp.extensions.tasks.client import ClientTask as ClientTask
    from trio_mcp.extensions.tasks.client import ClientTasks as ClientTasks
    from trio_mcp.extensions.tasks.client import TaskCancelled as TaskCancelled
    from trio_mcp.extensions.tasks.server import ToolTask as ToolTask
    from trio_mcp.extensions.tasks.server import add_tool as add_tool
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "core.task_states": "TaskState",
            "core.tasks": "TaskStatus",
            "extensions.tasks.client": "ClientTask ClientTasks TaskCancelled",
            "extensions.tasks.server": "ToolTask add_tool",
        },
        "trio_mcp",
    )
