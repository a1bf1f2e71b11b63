"""Tasks of a server with several replicas: each request about a task may go to another one."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.http.client import request, response
from tests.http.replicas import ReplicaGroup, make_scripted, replicas
from tests.http.scripted_server import D
from trio_mcp import Accepted, Context
from trio_mcp.core import META_CLIENT_CAPABILITIES, RELATED_TASK, TASKS_EXTENSION

# The test replaces the clock of the records, which is not public.
from trio_mcp.stores import rows

META = {META_CLIENT_CAPABILITIES: {"elicitation": {"form": {}}, "extensions": {TASKS_EXTENSION: {}}}}


def server_with_tasks(store: Any) -> Any:
    scripted = make_scripted(store)

    @scripted.server.tool(task="optional")
    async def job(ctx: Context) -> str:
        answer = await ctx.elicit("What?", str)
        return answer.value if isinstance(answer, Accepted) else "nothing"

    @scripted.server.tool(task="optional")
    async def long() -> str:
        await trio.sleep(10_000)
        return "never"

    return scripted


@pytest.fixture
def replica_group(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rows, "wall", trio.current_time)

    def make(**options: Any) -> Any:
        return replicas(server_with_tasks, monkeypatch=monkeypatch, **options)

    return make


async def ask(group: ReplicaGroup, number: int, method: str, params: Any) -> Any:
    web = group.webs[number]
    web.check = False
    return (await web.call(method, params, meta=META)).result


async def test_a_listener_at_another_replica_gets_the_states_of_a_task(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        task = (await ask(group, 0, "tools/call", {"name": "job"}))["taskId"]
        listen = request("subscriptions/listen", {"notifications": {"taskIds": [task]}}, meta=META)
        group.webs[1].check = False
        stream = await group.webs[1].open(listen)
        await stream.message()
        state = await ask(group, 2, "tasks/get", {"taskId": task})
        assert state["status"] == "input_required"
        answers = {key: {"action": "accept", "content": {"value": "yes"}} for key in state["inputRequests"]}
        await ask(group, 2, "tasks/update", {"taskId": task, "inputResponses": answers})
        status = ""
        while status != "completed":
            status = (await stream.message())["params"]["status"]
        assert (await ask(group, 1, "tasks/get", {"taskId": task}))["result"]["content"][0]["text"] == "yes"


async def test_a_task_can_be_cancelled_at_another_replica(autojump_clock: MockClock, replica_group: Any) -> None:
    async with replica_group() as group:
        task = (await ask(group, 0, "tools/call", {"name": "long"}))["taskId"]
        await ask(group, 1, "tasks/cancel", {"taskId": task})
        await trio.sleep(1)
        assert group.servers[0].server.statistics().running == 0
        assert (await ask(group, 2, "tasks/get", {"taskId": task}))["status"] == "cancelled"


async def test_the_result_of_a_task_is_available_at_another_replica(
    autojump_clock: MockClock, replica_group: Any
) -> None:
    async with replica_group() as group:
        for web in group.webs:
            web.check = False
        session = await group.webs[0].initialize(D)
        for web in group.webs[1:]:
            web._revisions[session] = D
        changes = await group.webs[2].open(session=session)
        made = await group.webs[0].call("tools/call", {"name": "job", "task": {}}, session=session)
        task = made.result["task"]["taskId"]
        listed = await group.webs[1].call("tasks/list", {}, session=session)
        assert [each["taskId"] for each in listed.result["tasks"]] == [task]
        message = request("tasks/result", {"taskId": task}, 77, revision=D)
        stream = await group.webs[1].open(message, session=session, revision=D)
        question = await stream.message()
        assert question["params"]["_meta"][RELATED_TASK] == {"taskId": task}
        answer = {"action": "accept", "content": {"value": "yes"}}
        await group.webs[2].post(response(question["id"], answer), session=session)
        assert (await stream.response())["result"]["content"][0]["text"] == "yes"
        status = ""
        while status != "completed":
            note = await changes.message()
            assert note["method"] == "notifications/tasks/status"
            status = note["params"]["status"]
