"""Tasks of a server over HTTP, with handwritten requests: JSON responses, and streams that a client drops."""

from __future__ import annotations

from typing import Any

import trio
from trio.testing import MockClock

from tests.extensions.test_server_tasks import CORE, EXTENSION, task_server
from tests.http.client import Answer, HttpClient
from tests.http.served import served
from tests.requirements import req
from trio_mcp.core import META_CLIENT_CAPABILITIES, RELATED_TASK, TASKS_EXTENSION

META = {META_CLIENT_CAPABILITIES: {"extensions": {TASKS_EXTENSION: {}}}}


async def begin(web: HttpClient, session: str, name: str, arguments: dict[str, Any] | None = None) -> str:
    params = {"name": name, "arguments": arguments or {}, "task": {}}
    id: str = (await web.call("tools/call", params, session=session)).result["task"]["taskId"]
    return id


@req("task-24")
async def test_requests_about_tasks_are_answered_with_json(autojump_clock: MockClock) -> None:
    async with served(task_server(), check=False) as web:
        session = await web.initialize(CORE)
        task = await begin(web, session, "compute", {"seconds": 3})
        for method in ("tasks/get", "tasks/list", "tasks/cancel"):
            assert (await web.call(method, {"taskId": task}, session=session)).type == "application/json"


@req("task-11")
async def test_a_client_may_drop_the_stream_of_a_result(autojump_clock: MockClock) -> None:
    async with served(task_server(), check=False) as web:
        session = await web.initialize(CORE)
        task = await begin(web, session, "confirm")
        message = web.request("tasks/result", {"taskId": task}, revision=CORE)
        async with web.stream(message, session=session, revision=CORE) as stream:
            asked = await stream.message()
            assert asked["params"]["_meta"][RELATED_TASK] == {"taskId": task}
        assert (await web.call("tasks/get", {"taskId": task}, session=session)).result["status"] == "input_required"
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": {"action": "accept", "content": {"value": True}}}
        assert (await web.post(answer, session=session)).status == 202
        await trio.sleep(1)
        again: Answer = await web.call("tasks/result", {"taskId": task}, session=session)
        assert again.result["content"] == [{"type": "text", "text": "confirmed: Accepted(value=True)"}]


async def test_the_mcp_name_header_may_be_missing_but_not_wrong(autojump_clock: MockClock) -> None:
    async with served(task_server(), check=False) as web:
        params = {"name": "compute", "arguments": {"seconds": 1}}
        made = await web.call("tools/call", params, revision=EXTENSION, meta=META)
        task = {"taskId": made.result["taskId"]}
        for name, status in ((None, 200), (task["taskId"], 200), ("another", 400)):
            headers = {"Mcp-Name": name}
            got = await web.call("tasks/get", task, revision=EXTENSION, meta=META, headers=headers)
            assert got.status == status
