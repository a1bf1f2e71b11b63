"""What the two forms of tasks add to the protocol, for both roles."""

from __future__ import annotations

from typing import Final

import attrs

from trio_mcp.core.extensions import Extension, ExtensionMethod
from trio_mcp.core.revisions import REVISIONS, Role
from trio_mcp.core.tasks import CORE_TASKS, EXTENSION_TASKS, TASKS_EXTENSION

__all__ = ["CORE_FORM", "EXTENSION_FORM", "core_form_of_client"]

_CLIENT, _SERVER = Role.CLIENT, Role.SERVER

# xtask-50, xtask-52.  xtask-40: Mcp-Name is the id of the task.
EXTENSION_FORM: Final = Extension(
    TASKS_EXTENSION,
    methods=[
        *(
            ExtensionMethod(f"tasks/{name}", _CLIENT, mcp_name="taskId", while_draining=True)
            for name in ("get", "update", "cancel")
        ),
        ExtensionMethod(EXTENSION_TASKS.status_notification, _SERVER, notification=True, subscribed=True),
    ],
    result_types={"tools/call": ["task"]},
    revisions=[name for name, revision in REVISIONS.items() if not revision.handshake],
)

# task-01, task-66: what a server declares.
CORE_FORM: Final = Extension(
    TASKS_EXTENSION,
    {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}},
    methods=[
        *(
            ExtensionMethod(f"tasks/{name}", each, while_draining=True)
            for name in ("get", "result", "list", "cancel")
            for each in Role
        ),
        *(ExtensionMethod(CORE_TASKS.status_notification, each, notification=True) for each in Role),
    ],
    revisions=[CORE_TASKS.name],
    capability="tasks",
)


def core_form_of_client(*methods: str) -> Extension:
    """What a client declares that answers these methods of its server with tasks."""
    requests: dict[str, dict[str, object]] = {}
    for method in methods:
        kind, name = method.split("/")
        requests[kind] = {name: {}}
    return attrs.evolve(CORE_FORM, settings={"list": {}, "cancel": {}, "requests": requests} if requests else {})
