"""Tasks of a server with several replicas: each request about a task may go to another one."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.http.client import request, response
from tests.http.replicas import Crew, replicas, staged
from tests.http.stage import D
from trio_mcp import Accepted, Context
from trio_mcp.core import META_CLIENT_CAPABILITIES, RELATED_TASK, TASKS_EXTENSION

# The clock of the records is an inner part.
from trio_mcp.stores import rows

META = {META_CLIENT_CAPABILITIES: {"elicitation": {"form": {}}, "extensions": {TASKS_EXTENSION: {}}}}


def working(store: Any) -> Any:
    stage = staged(store)

    @stage.server.tool(task="optional")
    async def job(ctx: Context) -> str:
        answer = await ctx.elicit("What?", str)
        return answer.value if isinstance(answer, Accepted) else "nothing"

    @stage.server.tool(task="optional")
    async def long() -> str:
        await trio.sleep(10_000)
        return "never"

    return stage


@pytest.fixture
def crew_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rows, "wall", trio.current_time)

    def make(**options: Any) -> Any:
        return replicas(working, monkeypatch=monkeypatch, **options)

    return make


async def ask(crew: Crew, number: int, method: str, params: Any) -> Any:
    web = crew.webs[number]
    web.check = False
    return (await web.call(method, params, meta=META)).result


async def test_a_listener_elsewhere_hears_of_a_task(autojump_clock: MockClock, crew_of: Any) -> None:
    async with crew_of() as crew:
        task = (await ask(crew, 0, "tools/call", {"name": "job"}))["taskId"]
        listen = request("subscriptions/listen", {"notifications": {"taskIds": [task]}}, meta=META)
        crew.webs[1].check = False
        stream = await crew.webs[1].open(listen)
        await stream.message()
        state = await ask(crew, 2, "tasks/get", {"taskId": task})
        assert state["status"] == "input_required"
        answers = {key: {"action": "accept", "content": {"value": "yes"}} for key in state["inputRequests"]}
        await ask(crew, 2, "tasks/update", {"taskId": task, "inputResponses": answers})
        told = ""
        while told != "completed":
            told = (await stream.message())["params"]["status"]
        assert (await ask(crew, 1, "tasks/get", {"taskId": task}))["result"]["content"][0]["text"] == "yes"


async def test_a_task_is_cancelled_where_it_does_not_run(autojump_clock: MockClock, crew_of: Any) -> None:
    async with crew_of() as crew:
        task = (await ask(crew, 0, "tools/call", {"name": "long"}))["taskId"]
        await ask(crew, 1, "tasks/cancel", {"taskId": task})
        await trio.sleep(1)
        assert crew.stages[0].server.statistics().running == 0
        assert (await ask(crew, 2, "tasks/get", {"taskId": task}))["status"] == "cancelled"


async def test_the_result_of_a_task_is_asked_for_in_another_replica(autojump_clock: MockClock, crew_of: Any) -> None:
    async with crew_of() as crew:
        for web in crew.webs:
            web.check = False
        session = await crew.webs[0].initialize(D)
        for web in crew.webs[1:]:
            web._revisions[session] = D
        told = await crew.webs[2].open(session=session)
        made = await crew.webs[0].call("tools/call", {"name": "job", "task": {}}, session=session)
        task = made.result["task"]["taskId"]
        listed = await crew.webs[1].call("tasks/list", {}, session=session)
        assert [each["taskId"] for each in listed.result["tasks"]] == [task]
        message = request("tasks/result", {"taskId": task}, 77, revision=D)
        stream = await crew.webs[1].open(message, session=session, revision=D)
        question = await stream.message()
        assert question["params"]["_meta"][RELATED_TASK] == {"taskId": task}
        answer = {"action": "accept", "content": {"value": "yes"}}
        await crew.webs[2].post(response(question["id"], answer), session=session)
        assert (await stream.response())["result"]["content"][0]["text"] == "yes"
        status = ""
        while status != "completed":
            note = await told.message()
            assert note["method"] == "notifications/tasks/status"
            status = note["params"]["status"]
