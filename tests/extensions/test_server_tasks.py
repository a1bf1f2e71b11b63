"""Tasks of a server, in both forms, with a client that sends handwritten JSON."""

from __future__ import annotations

import gc
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.requirements import req
from tests.server.raw_client import ACKNOWLEDGED, CAPABILITIES, MESSAGE, PROGRESS, ErrorResponse, RawClient, connected
from tests.server.raw_client import client_on as on_stream
from trio_mcp import Context, Elicit, InputRequired, Limits, RequestError, Server, ToolError, UsageError, serve_stream
from trio_mcp.core import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    MISSING_CLIENT_CAPABILITY,
    RELATED_TASK,
    TASKS_EXTENSION,
    JsonObject,
    Revision,
    TaskRecord,
)

# The tasks of a run are internal.
from trio_mcp.extensions.tasks.keeper import Keeper
from trio_mcp.extensions.tasks.server import RunTasks  # internal, too
from trio_mcp.stores import MemoryStore, Row, StoreFailed, StoreFull

CORE, EXTENSION = "2025-11-25", "2026-07-28"
BOTH = pytest.mark.parametrize("revision", [CORE, EXTENSION])
NEWER = pytest.mark.parametrize("revision", [EXTENSION])
OLDER = pytest.mark.parametrize("revision", [CORE])


@dataclass
class Name:
    name: str


def task_server(**options: Any) -> Server:
    server = Server("tasks", **options)

    @server.tool
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    @server.tool(task="optional")
    async def compute(seconds: float, ctx: Context) -> str:
        for second in range(int(seconds)):
            await ctx.progress(second, seconds, f"second {second}")
            await ctx.log("info", {"second": second})
            await trio.sleep(1)
        return f"computed, {'a task' if ctx.task.id else 'no task'}"

    @server.tool(task="required")
    async def failing(kind: str) -> str:
        await trio.sleep(1)
        raise ToolError("no disk") if kind == "tool" else RequestError(-5, "no protocol", {"x": 1})

    @server.tool(task="optional")
    async def confirm(ctx: Context) -> str:
        answer = await ctx.elicit("Really?", bool)
        return f"confirmed: {answer!r}"

    @server.tool(task="optional")
    async def two(ctx: Context) -> str:
        answers = await ctx.ask(first=Elicit("First?", Name), second=Elicit("Second?", Name))
        return f"{answers['first'].value.name} and {answers['second'].value.name}"

    @server.tool(task="required", asks_first=True)
    async def ask_first(ctx: Context) -> str:
        answer = await ctx.elicit("Who?", Name)
        assert ctx.task.id is None
        await ctx.task.status("not a task yet")
        assert await ctx.task.start()
        assert await ctx.task.start()
        await ctx.task.status("half of it")
        await trio.sleep(1)
        return f"Hello, {answer.value.name}!"  # type: ignore[union-attr]

    return server


def capabilities(revision: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"extensions": {TASKS_EXTENSION: {}}} if revision == EXTENSION else {}
    return {**CAPABILITIES[revision], **extra}


@asynccontextmanager
async def raw_client(revision: str, server: Server | None = None, **options: Any) -> AsyncIterator[RawClient]:
    options.setdefault("capabilities", capabilities(revision))
    async with connected(server or task_server(), revision, check=False, **options) as wire:
        yield wire


@asynccontextmanager
async def client_in_open_run(revision: str, server: Server) -> AsyncIterator[RawClient]:
    """Like `raw_client`, but the run of the server continues after the block, maybe with tasks."""
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, theirs)
        async with on_stream(ours, revision, check=False, capabilities=capabilities(revision)) as wire:
            yield wire


async def begin(wire: RawClient, name: str, arguments: dict[str, Any] | None = None, **how: Any) -> str:
    """Call a tool as a task, and return the id of the task."""
    params: dict[str, Any] = {"name": name, "arguments": arguments or {}}
    if wire.revision == CORE:
        params["task"] = how.pop("task", {})
    result = await wire.call("tools/call", params, **how)
    if wire.revision == CORE:
        assert result.keys() <= {"task", "_meta"}
        return str(result["task"]["taskId"])
    assert result["resultType"] == "task"
    assert not {"task", "result", "requestState", "inputRequests"} & result.keys()
    return str(result["taskId"])


async def wait_for_status(wire: RawClient, id: str, *statuses: str) -> dict[str, Any]:
    while True:
        task = await wire.call("tasks/get", {"taskId": id})
        assert wire.revision == CORE or task["resultType"] == "complete"
        if task["status"] in (statuses or ("completed", "failed", "cancelled")):
            return task
        await trio.sleep(0.2)


def text(result: dict[str, Any]) -> str:
    return str(result["content"][0]["text"])


# Calls


@req("task-20", "task-33", "task-34", "task-35", "xtask-01", "xtask-10", "xtask-16", "xtask-18", "xtask-22")
@BOTH
async def test_a_call_becomes_a_task_and_its_result_is_kept(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        start = trio.current_time()
        id = await begin(wire, "compute", {"seconds": 5})
        assert trio.current_time() == start
        assert (await wire.call("tasks/get", {"taskId": id}))["status"] == "working"
        task = await wait_for_status(wire, id)
        assert task["status"] == "completed"
        if revision == EXTENSION:
            result = task["result"]
        else:
            result = await wire.call("tasks/result", {"taskId": id})
            assert result["_meta"] == {RELATED_TASK: {"taskId": id}}
        assert text(result) == "computed, a task"


@req("task-35", "xtask-18")
@BOTH
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("id", [None, "a text"])
async def test_a_middleware_sees_the_results_of_tasks(
    wrapped: bool, revision: str, id: str | None, autojump_clock: MockClock
) -> None:
    """Without a middleware, the text of a stored result is sent unchanged."""
    seen: list[dict[str, Any]] = []

    async def record_result(ctx: Context, request: Any, call_next: Any) -> dict[str, Any]:
        result: dict[str, Any] = await call_next()
        if request.method in ("tasks/get", "tasks/result"):
            seen.append({**result, "x": 1})
            return seen[-1]
        return result

    async with raw_client(revision, task_server(middleware=[record_result] if wrapped else [])) as wire:
        task = await begin(wire, "compute", {"seconds": 0})
        await wait_for_status(wire, task)
        request = await wire.start("tasks/result" if revision == CORE else "tasks/get", {"taskId": task}, id=id)
        sent = (await wire.response(request))["result"]
        result = sent if revision == CORE else sent["result"]
        assert text(result) == "computed, a task"
        if wrapped:
            assert text(seen[-1] if revision == CORE else seen[-1]["result"]) == "computed, a task"
            assert sent["x"] == 1


@req("xtask-02", "task-03")
@BOTH
async def test_a_client_without_tasks_gets_an_ordinary_result(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision, capabilities=CAPABILITIES[revision]) as wire:
        result = await wire.call("tools/call", {"name": "compute", "arguments": {"seconds": 1}})
        assert text(result) == "computed, no task"


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-03-26", "2025-06-18"])
async def test_an_older_client_gets_an_ordinary_result(revision: str, autojump_clock: MockClock) -> None:
    async with connected(task_server(), revision, check=False) as wire:
        params = {"name": "compute", "arguments": {"seconds": 1}, "task": {}}
        assert text(await wire.call("tools/call", params)) == "computed, no task"
        for method in ("tasks/get", "tasks/list"):
            with pytest.raises(ErrorResponse) as caught:
                await wire.call(method, {"taskId": "x"})
            assert caught.value.code == METHOD_NOT_FOUND


@req("task-06", "task-09", "xtask-05", "task-17")
@BOTH
async def test_a_tool_says_whether_it_runs_as_a_task(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision, capabilities=CAPABILITIES[revision]) as wire:
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("tools/call", {"name": "failing", "arguments": {"kind": "tool"}})
        if revision == CORE:
            assert caught.value.code == METHOD_NOT_FOUND
        else:
            assert caught.value.code == MISSING_CLIENT_CAPABILITY
            assert caught.value.data == {"requiredCapabilities": {"extensions": {TASKS_EXTENSION: {}}}}
    async with raw_client(revision) as wire:
        params = {"name": "greet", "arguments": {"name": "Ann"}, "task": {"ttl": 5}}
        if revision == CORE:
            with pytest.raises(ErrorResponse) as caught:
                await wire.call("tools/call", params)
            assert caught.value.code == METHOD_NOT_FOUND
        else:
            assert text(await wire.call("tools/call", params)) == "Hello, Ann!"  # the param is ignored


@req("task-17")
@OLDER
async def test_a_server_without_tasks_ignores_the_param(revision: str, autojump_clock: MockClock) -> None:
    server = Server("plain")

    @server.tool
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    async with raw_client(revision, server) as wire:
        assert "tasks" not in wire.opening["capabilities"]
        params = {"name": "greet", "arguments": {"name": "Ann"}, "task": {}}
        assert text(await wire.call("tools/call", params)) == "Hello, Ann!"


@req("task-01", "task-66", "xtask-50")
@BOTH
async def test_the_server_declares_tasks(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        declared = (await wire.about())["capabilities"]
        if revision == CORE:
            assert declared["tasks"] == {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}}
            assert "experimental" not in declared
        else:
            assert declared["extensions"] == {TASKS_EXTENSION: {}}
            assert "tasks" not in declared
        tools = {tool["name"]: tool for tool in (await wire.call("tools/list"))["tools"]}
        support = {name: tool.get("execution") for name, tool in tools.items()}
        if revision == CORE:
            assert support["greet"] is None
            assert (support["compute"], support["failing"]) == (
                {"taskSupport": "optional"},
                {"taskSupport": "required"},
            )
        else:
            assert set(support.values()) == {None}


@req("task-64", "xtask-09", "xtask-20", "xtask-21", "task-54", "task-35")
@BOTH
async def test_failures_of_tools_and_of_the_protocol_differ(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        tool = await wait_for_status(wire, await begin(wire, "failing", {"kind": "tool"}))
        protocol = await wait_for_status(wire, await begin(wire, "failing", {"kind": "protocol"}))
        assert (protocol["status"], protocol["statusMessage"]) == ("failed", "no protocol")
        if revision == EXTENSION:
            assert (tool["status"], text(tool["result"]), tool["result"]["isError"]) == ("completed", "no disk", True)
            assert protocol["error"] == {"code": -5, "message": "no protocol", "data": {"x": 1}}
            assert "result" not in protocol
        else:
            assert (tool["status"], tool["statusMessage"]) == ("failed", "no disk")
            assert (await wire.call("tasks/result", {"taskId": tool["taskId"]}))["isError"] is True
            with pytest.raises(ErrorResponse) as caught:
                await wire.call("tasks/result", {"taskId": protocol["taskId"]})
            assert (caught.value.code, caught.value.message, caught.value.data) == (-5, "no protocol", {"x": 1})


@BOTH
@pytest.mark.parametrize("arguments", [[], "x"])
async def test_arguments_that_are_no_object_make_no_task(
    revision: str, arguments: Any, autojump_clock: MockClock
) -> None:
    async with raw_client(revision) as wire:
        with pytest.raises(ErrorResponse, match="arguments must be an object") as caught:
            await wire.call("tools/call", {"name": "confirm", "arguments": arguments, "task": {}})
        assert caught.value.code == INVALID_PARAMS


@BOTH
async def test_wrong_arguments_make_no_task(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        result = await wire.call("tools/call", {"name": "compute", "arguments": {"seconds": "x"}, "task": {}})
        assert result["isError"]
        with pytest.raises(ErrorResponse):
            await wire.call("tools/call", {"name": "unknown", "task": {}})


@req("xtask-42", "xtask-52", "xtask-41", "task-51", "xtask-31")
@BOTH
async def test_the_methods_of_each_form(revision: str, autojump_clock: MockClock) -> None:
    there = {CORE: ("get", "result", "cancel"), EXTENSION: ("get", "update", "cancel")}[revision]
    async with raw_client(revision) as wire:
        for name in ("get", "update", "result", "cancel"):
            with pytest.raises(ErrorResponse) as caught:
                await wire.call(f"tasks/{name}", {"taskId": "x", "inputResponses": {}})
            assert caught.value.code == (INVALID_PARAMS if name in there else METHOD_NOT_FOUND)
        if revision == EXTENSION:
            with pytest.raises(ErrorResponse) as caught:
                await wire.call("tasks/list")
            assert caught.value.code == METHOD_NOT_FOUND
    if revision == EXTENSION:
        async with raw_client(revision, capabilities=CAPABILITIES[revision]) as wire:
            for name in there:
                with pytest.raises(ErrorResponse) as caught:
                    await wire.call(f"tasks/{name}", {"taskId": "x"})
                assert caught.value.code == MISSING_CLIENT_CAPABILITY


@req("cancel-09", "task-45", "task-46", "task-44", "xtask-19", "xtask-29")
@BOTH
async def test_a_task_is_cancelled(revision: str, autojump_clock: MockClock) -> None:
    ended: list[str] = []
    server = task_server()

    @server.tool(task="optional")
    async def endless() -> str:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("stopped")

    async with raw_client(revision, server) as wire:
        id = await begin(wire, "endless")
        await trio.sleep(1)
        result = await wire.call("tasks/cancel", {"taskId": id})
        if revision == CORE:
            assert result["status"] == "cancelled"
        else:
            assert result.keys() <= {"resultType", "_meta"}
        assert (await wire.call("tasks/get", {"taskId": id}))["status"] == "cancelled"
        await trio.sleep(1)
        assert ended == ["stopped"]
        if revision == CORE:
            with pytest.raises(ErrorResponse, match="is cancelled and cannot be cancelled"):
                await wire.call("tasks/cancel", {"taskId": id})
            with pytest.raises(ErrorResponse, match="was cancelled and has no result"):
                await wire.call("tasks/result", {"taskId": id})
        else:
            assert (await wire.call("tasks/cancel", {"taskId": id})).keys() <= {"resultType", "_meta"}
        assert server.statistics().running == 0


@req("cancel-09", "xtask-34")
@BOTH
async def test_a_cancelled_notification_does_not_cancel_a_task(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        params: dict[str, Any] = {"name": "compute", "arguments": {"seconds": 2}, "task": {}}
        request = await wire.start("tools/call", params)
        result = (await wire.response(request))["result"]
        await wire.cancel(request)
        task = await wait_for_status(wire, result["taskId"] if revision == EXTENSION else result["task"]["taskId"])
        assert task["status"] == "completed"


# Questions


@req("xtask-17", "xtask-25", "xtask-32", "xtask-33", "xtask-29", "xtask-47")
@NEWER
async def test_questions_are_answered_by_updates(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        id = await begin(wire, "two")
        task = await wait_for_status(wire, id, "input_required")
        assert set(task["inputRequests"]) == {"first", "second"}
        assert task["inputRequests"]["first"]["method"] == "elicitation/create"
        answer = {"action": "accept", "content": {"name": "Ann"}}
        ack = await wire.call("tasks/update", {"taskId": id, "inputResponses": {"first": answer, "x": {"y": True}}})
        assert ack.keys() <= {"resultType", "_meta"}
        task = await wire.call("tasks/get", {"taskId": id})
        assert (task["status"], list(task["inputRequests"])) == ("input_required", ["second"])
        again = {"action": "accept", "content": {"name": "Eve"}}
        await wire.call("tasks/update", {"taskId": id, "inputResponses": {"first": again}})
        await wire.call("tasks/update", {"taskId": id, "inputResponses": {"second": again}})
        task = await wait_for_status(wire, id)
        assert text(task["result"]) == "Ann and Eve"


@req("task-23", "task-25", "task-26", "task-27", "task-36")
@OLDER
async def test_questions_come_on_the_stream_of_tasks_result(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        wire.answers["elicitation/create"] = lambda params: {
            "action": "accept",
            "content": {"name": params["message"].removesuffix("?")},
        }
        id = await begin(wire, "two")
        task = await wait_for_status(wire, id, "input_required")
        assert not wire.asked
        result = await wire.call("tasks/result", {"taskId": id})
        assert text(result) == "First and Second"
        assert [params["_meta"][RELATED_TASK] for _, params in wire.asked] == [{"taskId": id}] * 2
        assert "_meta" not in task


@OLDER
async def test_a_question_that_the_client_refuses_fails_in_the_handler(
    revision: str, autojump_clock: MockClock
) -> None:
    async with raw_client(revision) as wire:
        wire.answers["elicitation/create"] = lambda params: ErrorResponse(-1, "no user")
        id = await begin(wire, "confirm")
        result = await wire.call("tasks/result", {"taskId": id})
        assert result["isError"]
        assert "the client refused the question" in text(result)


@OLDER
async def test_a_question_waits_for_the_next_tasks_result(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        answered = trio.Event()

        async def slowly(params: dict[str, Any]) -> dict[str, Any]:
            await answered.wait()
            return {"action": "accept", "content": {"value": True}}

        wire.answers["elicitation/create"] = slowly
        id = await begin(wire, "confirm")
        first = await wire.start("tasks/result", {"taskId": id})
        await trio.sleep(1)
        assert len(wire.asked) == 1
        second = await wire.start("tasks/result", {"taskId": id})
        await trio.sleep(1)
        assert len(wire.asked) == 1  # the user is asked once
        await wire.cancel(first)
        await trio.sleep(30)
        assert len(wire.asked) == 2
        answered.set()
        result = (await wire.response(second))["result"]
        assert text(result) == "confirmed: Accepted(value=True)"


@NEWER
async def test_an_answer_of_the_wrong_shape_may_be_sent_again(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        id = await begin(wire, "confirm")
        await wait_for_status(wire, id, "input_required")
        wrong: list[Any] = [{"form": {"action": "perhaps"}}, {"form": 3}, [], None]
        for responses in wrong:
            with pytest.raises(ErrorResponse) as caught:
                await wire.call("tasks/update", {"taskId": id, "inputResponses": responses})
            assert caught.value.code == INVALID_PARAMS
        await wire.call("tasks/update", {"taskId": id, "inputResponses": {"form": {"action": "decline"}}})
        assert text((await wait_for_status(wire, id))["result"]) == "confirmed: Declined()"


@req("elic-45")
@NEWER
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"name": 3}, "/name must be of type string, not an integer"),
        ({"name": None}, ' lacks the member "name"'),
        (None, ' lacks the member "name"'),
        ({"value": "Ann"}, ' lacks the member "name"'),
    ],
)
async def test_an_answer_that_does_not_fit_its_form_may_be_sent_again(
    content: Any, why: str, revision: str, autojump_clock: MockClock
) -> None:
    async with raw_client(revision) as wire:
        id = await begin(wire, "two")
        await wait_for_status(wire, id, "input_required")
        fits = {"action": "accept", "content": {"name": "Ann"}}
        wrong = {"action": "accept"} if content is None else {"action": "accept", "content": content}
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("tasks/update", {"taskId": id, "inputResponses": {"first": fits, "second": wrong}})
        assert caught.value.code == INVALID_PARAMS
        assert caught.value.message == f"inputResponses['second']: the answer does not fit the form: content{why}"
        await wire.call("tasks/update", {"taskId": id, "inputResponses": {"first": fits, "second": fits}})
        assert text((await wait_for_status(wire, id))["result"]) == "Ann and Ann"


@NEWER
async def test_unknown_fields_do_not_make_an_answer_invalid(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        id = await begin(wire, "two")
        await wait_for_status(wire, id, "input_required")
        more = {"action": "accept", "content": {"name": "Ann", "more": [None]}}
        await wire.call("tasks/update", {"taskId": id, "inputResponses": {"first": more, "second": more}})
        assert text((await wait_for_status(wire, id))["result"]) == "Ann and Ann"


@NEWER
async def test_an_answer_to_a_form_with_an_unknown_schema_is_accepted(revision: str, autojump_clock: MockClock) -> None:
    class Strange(Elicit[Any]):
        def _params_in(self, revision: Revision) -> JsonObject:
            params = super()._params_in(revision)
            return {**params, "requestedSchema": {"type": "object", "properties": {"name": {"type": "odd"}}}}

    server = Server("strange")

    @server.tool(task="optional")
    async def strange(ctx: Context) -> str:
        return repr((await ctx.ask(form=Strange("Who?", Name)))["form"])

    async with raw_client(revision, server) as wire:
        id = await begin(wire, "strange")
        await wait_for_status(wire, id, "input_required")
        answer = {"action": "accept", "content": {"name": "Ann"}}
        await wire.call("tasks/update", {"taskId": id, "inputResponses": {"form": answer}})
        assert text((await wait_for_status(wire, id))["result"]) == "Accepted(value=Name(name='Ann'))"


@NEWER
@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_the_content_of_a_refused_question_is_not_checked(
    action: str, revision: str, autojump_clock: MockClock
) -> None:
    async with raw_client(revision) as wire:
        id = await begin(wire, "confirm")
        await wait_for_status(wire, id, "input_required")
        answer = {"action": action, "content": {"value": "no truth value"}}
        await wire.call("tasks/update", {"taskId": id, "inputResponses": {"form": answer}})
        expected = {"decline": "Declined()", "cancel": "Dismissed()"}[action]
        assert text((await wait_for_status(wire, id))["result"]) == f"confirmed: {expected}"


@BOTH
async def test_a_task_may_return_its_questions(revision: str, autojump_clock: MockClock) -> None:
    server = Server("returning")

    @server.tool(task="required")
    async def ask(ctx: Context) -> str | InputRequired:
        if "who" not in ctx.answers:
            return InputRequired({"who": Elicit("Who?", Name)}, state=[1])
        return f"{ctx.answers['who']['content']['name']} {ctx.state}"

    async with raw_client(revision, server) as wire:
        answer = {"action": "accept", "content": {"name": "Ann"}}
        wire.answers["elicitation/create"] = lambda params: answer
        id = await begin(wire, "ask")
        await wait_for_status(wire, id, "input_required")
        if revision == EXTENSION:
            await wire.call("tasks/update", {"taskId": id, "inputResponses": {"who": answer}})
            result = (await wait_for_status(wire, id))["result"]
        else:
            result = await wire.call("tasks/result", {"taskId": id})
        assert text(result) == "Ann [1]"


@req("xtask-28")
@BOTH
async def test_a_handler_that_returns_the_same_question_again_is_answered_again(
    revision: str, autojump_clock: MockClock
) -> None:
    server, runs = Server("asks"), []

    @server.tool(task="optional")
    async def insist(ctx: Context) -> str | InputRequired:
        runs.append(ctx.answers.get("who", {}).get("content"))
        return InputRequired({"who": Elicit("Who?", Name)}) if len(runs) < 3 else "done"

    async with raw_client(revision, server) as wire:
        names = iter(("Ann", "Bob"))
        wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"name": next(names)}}
        id = await begin(wire, "insist")
        if revision == EXTENSION:
            for key, name in ("who", "Ann"), ("who-2", "Bob"):
                assert list((await wait_for_status(wire, id, "input_required"))["inputRequests"]) == [key]
                answer = {"action": "accept", "content": {"name": name}}
                await wire.call("tasks/update", {"taskId": id, "inputResponses": {key: answer}})
                await trio.sleep(1)
        else:
            await wire.call("tasks/result", {"taskId": id})
        assert (await wait_for_status(wire, id))["status"] == "completed"
        assert runs == [None, {"name": "Ann"}, {"name": "Bob"}]


@req("xtask-11")
@BOTH
async def test_a_tool_may_ask_first_and_become_a_task_afterwards(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"name": "Alice"}}
        id = await begin(wire, "ask_first")
        assert len(wire.asked) == 1
        task = await wire.call("tasks/get", {"taskId": id})
        assert (task["status"], task["statusMessage"]) == ("working", "half of it")
        task = await wait_for_status(wire, id)
        result = task["result"] if revision == EXTENSION else await wire.call("tasks/result", {"taskId": id})
        assert text(result) == "Hello, Alice!"


@req("task-33")
@BOTH
async def test_a_requested_task_exists_if_the_tool_never_starts_it(revision: str, autojump_clock: MockClock) -> None:
    server = Server("lazy")

    @server.tool(task="optional", asks_first=True)
    async def lazy() -> str:
        return "done"

    async with raw_client(revision, server) as wire:
        if revision == EXTENSION:
            assert text(await wire.call("tools/call", {"name": "lazy"})) == "done"
        else:
            id = await begin(wire, "lazy")
            assert text(await wire.call("tasks/result", {"taskId": id})) == "done"


# Reports


@req("prog-11", "prog-12", "task-15", "task-26", "task-39")
@OLDER
async def test_progress_goes_on_until_the_task_ends(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        id = await begin(wire, "compute", {"seconds": 3}, progress="p")
        await wait_for_status(wire, id)
        reports = wire.noted(PROGRESS)
        assert [(each["progressToken"], each["progress"]) for each in reports] == [("p", 0), ("p", 1), ("p", 2)]
        for each in (*reports, *wire.noted(MESSAGE)):
            assert each["_meta"][RELATED_TASK] == {"taskId": id}
        assert len(wire.noted(MESSAGE)) == 3
        statuses = wire.noted("notifications/tasks/status")
        assert [(each["taskId"], each["status"]) for each in statuses][-1] == (id, "completed")
        assert all("_meta" not in each for each in statuses)
        await trio.sleep(30)
        assert wire.noted(PROGRESS) == reports


@req("xtask-39")
@NEWER
async def test_progress_becomes_the_status_message(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        id = await begin(wire, "compute", {"seconds": 3}, progress="p")
        await trio.sleep(1.5)
        assert (await wire.call("tasks/get", {"taskId": id}))["statusMessage"] == "second 1"
        await wait_for_status(wire, id)
        assert not wire.noted(PROGRESS)
        assert not wire.noted(MESSAGE)


@req("xtask-36", "xtask-37", "xtask-48", "xtask-49")
@NEWER
async def test_listeners_get_the_whole_task(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        id = await begin(wire, "confirm")
        listening = await wire.start("subscriptions/listen", {"notifications": {"taskIds": [id, "unknown", id]}})
        acknowledged = await wire.note(ACKNOWLEDGED)
        assert acknowledged["notifications"] == {"taskIds": [id]}
        await wait_for_status(wire, id, "input_required")
        await wire.call("tasks/update", {"taskId": id, "inputResponses": {"form": {"action": "cancel"}}})
        task = await wait_for_status(wire, id)
        await trio.sleep(1)
        notes = wire.noted("notifications/tasks")
        tag = {"io.modelcontextprotocol/subscriptionId": listening}
        assert all(each["_meta"] == tag for each in notes)
        last = {name: value for name, value in notes[-1].items() if name != "_meta"}
        assert last == {name: value for name, value in task.items() if name not in ("_meta", "resultType")}
        await wire.cancel(listening)
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("subscriptions/listen", {"notifications": {"taskIds": "x"}})
        assert caught.value.code == INVALID_PARAMS
    async with raw_client(revision, capabilities=CAPABILITIES[revision]) as wire:
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("subscriptions/listen", {"notifications": {"taskIds": ["x"]}})
        assert caught.value.code == MISSING_CLIENT_CAPABILITY


# Owners and lists


@req("task-40", "task-43", "task-58", "task-60", "task-56")
@OLDER
async def test_a_session_lists_its_own_tasks(revision: str, autojump_clock: MockClock) -> None:
    server = task_server()
    async with (
        server.running(),
        client_in_open_run(revision, server) as ann,
        client_in_open_run(revision, server) as bob,
    ):
        ids = [await begin(ann, "compute", {"seconds": 1}) for _ in range(3)]
        await begin(bob, "compute", {"seconds": 1})
        listed = await ann.call("tasks/list")
        assert sorted(task["taskId"] for task in listed["tasks"]) == sorted(ids)
        assert len((await bob.call("tasks/list"))["tasks"]) == 1
        assert (await bob.call("tasks/get", {"taskId": ids[0]}))["status"] == "working"  # the id alone gives access
        with pytest.raises(ErrorResponse) as caught:
            await ann.call("tasks/list", {"cursor": "x"})
        assert caught.value.code == INVALID_PARAMS


@req("task-10", "task-29", "task-30")
@OLDER
async def test_the_requested_ttl_is_bounded_by_the_limit(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        for asked, given in (({"ttl": 5_000}, 5_000), ({}, 86_400_000), ({"ttl": 10**12}, 86_400_000)):
            id = await begin(wire, "compute", {"seconds": 1}, task=asked)
            assert (await wire.call("tasks/get", {"taskId": id}))["ttl"] == given
        with pytest.raises(ErrorResponse):
            await begin(wire, "compute", {"seconds": 1}, task={"ttl": "long"})


def alive() -> list[RunTasks]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is RunTasks]


@BOTH
async def test_a_run_that_has_ended_is_freed(revision: str, autojump_clock: MockClock) -> None:
    before = len(alive())
    async with raw_client(revision) as wire:
        await wait_for_status(wire, await begin(wire, "compute", {"seconds": 1}))
        assert len(alive()) == before + 1
    del wire
    assert len(alive()) == before


@OLDER
async def test_a_task_that_expires_while_it_runs_leaves_no_data(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        id = await begin(wire, "compute", {"seconds": 3600}, task={"ttl": 1000})
        (tasks,) = [each for each in alive() if id in each._callers]
        await trio.sleep(30)
        assert id not in tasks._callers
        assert tasks.keeper._hosts == {}


@req("xtask-45", "task-57", "task-19")
@BOTH
async def test_ids_are_long_and_random(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision) as wire:
        ids = {await begin(wire, "compute", {"seconds": 1}) for _ in range(20)}
        assert len(ids) == 20
        assert min(map(len, ids)) >= 32


@req("task-62", "task-61")
@BOTH
async def test_limits_refuse_calls_before_their_handlers_start(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision, task_server(limits=Limits(tasks=1))) as wire:
        await begin(wire, "compute", {"seconds": 1})
        with pytest.raises(ErrorResponse, match=r"no room for more tasks \(Limits.tasks\)") as caught:
            await begin(wire, "compute", {"seconds": 1})
        assert caught.value.code == INTERNAL_ERROR
    async with raw_client(revision, task_server(limits=Limits(call_rate=2))) as wire:
        id = await begin(wire, "compute", {"seconds": 1})
        await wire.call("tasks/get", {"taskId": id})
        with pytest.raises(ErrorResponse, match=r"Limits\.call_rate"):
            await wire.call("tasks/get", {"taskId": id})


@NEWER
async def test_a_call_that_is_cancelled_while_its_task_is_stored_leaves_no_task(
    revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, add = MemoryStore(), MemoryStore.add

    async def slowly(self: MemoryStore, row: Row, **limits: float) -> bool:
        added = await add(self, row, **limits)
        await trio.sleep(5)
        return added

    monkeypatch.setattr(MemoryStore, "add", slowly)
    async with raw_client(revision, task_server(store=store)) as wire:
        request = await wire.start("tools/call", {"name": "compute", "arguments": {"seconds": 1}})
        await trio.sleep(1)
        await wire.cancel(request)
        await trio.sleep(10)
        assert not wire.answered(request)
        assert not store._rows


@BOTH
async def test_a_call_stores_its_arguments_and_answers_only_to_run_again(
    revision: str, autojump_clock: MockClock
) -> None:
    """Arguments and answers may be secrets: they are stored only if the call may run again, and deleted at its end."""
    store = MemoryStore()
    server = Server("stored", store=store)

    async def works(argument: str, ctx: Context) -> str:
        await ctx.elicit("Who?", Name)
        await trio.sleep(5)
        await ctx.elicit("Who else?", Name)
        return "done"

    server.tool(name="again", task="required", replay=True)(works)
    server.tool(name="once", task="required")(works)
    async with raw_client(revision, server) as wire:
        answer = {"action": "accept", "content": {"name": "An answer"}}
        wire.answers["elicitation/create"] = lambda params: answer
        for name in ("again", "once"):
            id = await begin(wire, name, {"argument": "An argument"})

            def stored_parts(id: str = id) -> list[bool]:
                (body,) = [row.body for row in store._rows.values() if row.key == id]
                return [each in body for each in (b"An argument", b"An answer", b"Who?")]

            await wait_for_status(wire, id, "input_required")
            if revision == CORE:
                await wire.start("tasks/result", {"taskId": id})
            else:
                await wire.call("tasks/update", {"taskId": id, "inputResponses": {"form": answer}})
            await trio.sleep(1)
            assert stored_parts() == ([True, True, True] if name == "again" else [False, False, True])
            await trio.sleep(6)
            if revision == EXTENSION:
                await wire.call("tasks/update", {"taskId": id, "inputResponses": {"form-2": answer}})
            assert (await wait_for_status(wire, id))["status"] == "completed"
            assert stored_parts() == [False, False, False]


def test_a_store_must_be_an_object() -> None:
    with pytest.raises(UsageError, match=r'store must be a store, got str; write SQLiteStore\("tasks.db"\)'):
        Server("x", store="tasks.db")  # type: ignore[arg-type]


# The end of a run


@BOTH
async def test_a_task_outlives_the_connection_that_began_it(revision: str, autojump_clock: MockClock) -> None:
    server = task_server()
    async with server.running():
        async with client_in_open_run(revision, server) as wire:
            id = await begin(wire, "compute", {"seconds": 3})
        await trio.sleep(5)
        async with client_in_open_run(revision, server) as wire:
            assert (await wait_for_status(wire, id))["status"] == "completed"


@BOTH
async def test_a_store_outlives_the_run(revision: str, autojump_clock: MockClock) -> None:
    store, runs = MemoryStore(), list[str]()

    def made() -> Server:
        server = Server("again", store=store)

        @server.tool(task="optional", replay=True)
        async def ask(ctx: Context) -> str:
            runs.append("ask")
            first = await ctx.elicit("First?", Name)
            second = await ctx.elicit("Second?", Name)
            return f"{first.value.name}, {second.value.name}"  # type: ignore[union-attr]

        @server.tool(task="optional")
        async def once() -> str:
            runs.append("once")
            await trio.sleep(1000)
            return "done"

        return server

    async with raw_client(revision, made()) as wire:
        wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"name": params["message"]}}
        asking, single = await begin(wire, "ask"), await begin(wire, "once")
        await wait_for_status(wire, asking, "input_required")
        if revision == EXTENSION:
            answer = {"action": "accept", "content": {"name": "First?"}}
            await wire.call("tasks/update", {"taskId": asking, "inputResponses": {"form": answer}})
            await trio.sleep(1)
            assert list((await wait_for_status(wire, asking, "input_required"))["inputRequests"]) == ["form-2"]
    async with raw_client(revision, made()) as wire:
        wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"name": params["message"]}}
        lost = await wait_for_status(wire, single)
        assert lost["status"] == "failed"
        assert "the server stopped while this task ran" in lost["statusMessage"]
        task = await wait_for_status(wire, asking, "input_required")
        if revision == EXTENSION:
            assert list(task["inputRequests"]) == ["form-2"]
            answer = {"action": "accept", "content": {"name": "Second?"}}
            await wire.call("tasks/update", {"taskId": asking, "inputResponses": {"form-2": answer}})
            result = (await wait_for_status(wire, asking))["result"]
        else:
            result = await wire.call("tasks/result", {"taskId": asking})
        assert text(result) == "First?, Second?"
    assert sorted(runs) == ["ask", "ask", "once"]


# Registration


def test_options_of_a_tool_are_checked() -> None:
    server = Server("x")
    with pytest.raises(UsageError, match="task"):
        server.tool(name="x", task="sometimes")(lambda: None)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="never becomes one"):

        @server.tool(asks_first=True)
        async def never() -> None: ...


@BOTH
async def test_a_task_that_is_started_twice_at_once_is_one_task(revision: str, autojump_clock: MockClock) -> None:
    store, started = MemoryStore(), list[bool]()
    server = Server("tasks", store=store)

    @server.tool(task="optional", asks_first=True)
    async def eager(ctx: Context) -> None:
        async def start() -> None:
            started.append(await ctx.task.start())

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(start)

    async with raw_client(revision, server) as wire:
        id = await begin(wire, "eager")
        assert (await wait_for_status(wire, id))["status"] == "completed"
        assert started == [True] * 3
        assert [key for _, key in store._rows] == [id]


@pytest.mark.parametrize("taken", ["extension", "filter", "tasks/get", "tasks/list"])
async def test_the_names_that_tasks_need_must_be_free(taken: str, autojump_clock: MockClock) -> None:
    server = Server("tasks")
    server.tool(name="plain")(lambda: "plain")
    if taken == "extension":
        server.extension(TASKS_EXTENSION)
    elif taken == "filter":
        server.extension("com.example/tasks").filter("taskIds")(no_part)
    else:
        server.method(taken)(lambda: {"by": "the program"})

    async with raw_client(EXTENSION, server) as wire:
        before = await wire.about()
        for _ in range(2):
            with pytest.raises(UsageError, match=r"already|twice"):
                server.tool(name="report", task="optional")(lambda: "done")
        # The refused registration has no effect, also not in the current run.
        assert await wire.about() == before
        assert text(await wire.call("tools/call", {"name": "plain"})) == "plain"
        if taken == "tasks/list":
            assert (await wire.call(taken))["by"] == "the program"
            with pytest.raises(ErrorResponse) as caught:
                await wire.call("tasks/get", {"taskId": "x"})
            assert caught.value.code == METHOD_NOT_FOUND
        assert not [each for each in gc.get_objects() if isinstance(each, RunTasks) and each._run.server is server]


async def no_part(*_: object) -> None:
    await trio.lowlevel.checkpoint()


async def test_a_tool_without_a_task_has_no_ctx_task(autojump_clock: MockClock) -> None:
    server = Server("x")

    @server.tool
    async def plain(ctx: Context) -> str:
        with pytest.raises(UsageError, match=r"this handler has no ctx\.task"):
            ctx.task  # noqa: B018
        return "plain"

    async with raw_client(EXTENSION, server) as wire:
        assert text(await wire.call("tools/call", {"name": "plain"})) == "plain"


@BOTH
async def test_tasks_of_a_mounted_server(revision: str, autojump_clock: MockClock) -> None:
    outer = Server("outer")
    outer.mount(task_server(), prefix="in_")
    async with raw_client(revision, outer) as wire:
        id = await begin(wire, "in_compute", {"seconds": 1})
        assert (await wait_for_status(wire, id))["status"] == "completed"


@BOTH
async def test_a_task_that_expires_before_its_handler_begins_is_stopped(
    revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ran = Server("tasks"), []

    @server.tool(task="required")
    async def late() -> str:
        await trio.sleep(5)
        ran.append("to its end")
        return "done"

    async def add(self: Keeper, task: TaskRecord, holder: object, *, add: Any = Keeper.add) -> None:
        await add(self, task, holder)
        self._hosts[task.id].stop("the ttl of the task has passed")

    monkeypatch.setattr(Keeper, "add", add)
    async with raw_client(revision, server) as wire:
        await begin(wire, "late")
        (run,) = [each for each in gc.get_objects() if isinstance(each, RunTasks) and each._run.server is server]
        await trio.sleep(10)
        assert (ran, run._callers) == ([], {})


@OLDER
async def test_the_caller_of_a_task_that_another_process_has_is_forgotten(
    revision: str, autojump_clock: MockClock
) -> None:
    store = MemoryStore()
    server = task_server(store=store, limits=Limits(task_seconds=60))
    async with raw_client(revision, server) as wire:
        id = await begin(wire, "confirm")
        (row,) = store._rows.values()
        await store.lease("another process", inf)
        await store.replace(attrs.evolve(row, holder="another process"))
        await trio.sleep(1)
        (run,) = [each for each in gc.get_objects() if isinstance(each, RunTasks) and each._run.server is server]
        assert (list(run._callers), run.keeper._hosts) == ([id], {})  # the caller gets the reports of the other process
        await trio.sleep(100)  # the ttl passes without a notification
        assert not store._rows
        assert run._callers == {}


@BOTH
@pytest.mark.parametrize("place", ["result", "status", "error"])
async def test_text_that_cannot_be_sent_fails_the_task(revision: str, place: str, autojump_clock: MockClock) -> None:
    server = Server("tasks")

    @server.tool(task="required")
    async def half(ctx: Context) -> str:
        if place == "status":
            await ctx.task.status("\ud800")
        if place == "error":
            raise RequestError(-5, "no", {"half": "\ud800"})
        return "\ud800"

    async with raw_client(revision, server) as wire:
        task = await wait_for_status(wire, await begin(wire, "half"))
        assert (task["status"] == "failed") or task["result"]["isError"]


@req("xtask-43", "task-52")
@BOTH
async def test_a_store_that_fails_is_an_internal_error(
    revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError("the disk is gone")

    async with raw_client(revision) as wire:
        id = await begin(wire, "compute", {"seconds": 1})
        await wait_for_status(wire, id)
        monkeypatch.setattr(MemoryStore, "get", broken)
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("tasks/get", {"taskId": id})
        assert caught.value.code == INTERNAL_ERROR
        assert "disk" not in caught.value.message


@req("xtask-43", "task-52", "task-53", "xtask-44")
@BOTH
async def test_a_client_gets_an_error_if_the_store_is_unavailable_or_full(
    revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise StoreFailed("/secret/tasks.db does not work")

    async def full(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise StoreFull("max_bytes")

    about: dict[str, dict[str, Any]] = {
        EXTENSION: {"tasks/get": {}, "tasks/update": {"inputResponses": {}}, "subscriptions/listen": {}},
        CORE: {"tasks/get": {}, "tasks/result": {}},
    }
    async with raw_client(revision) as wire:
        id = await begin(wire, "confirm")
        other = await begin(wire, "compute", {"seconds": 1})
        await wait_for_status(wire, other)
        with monkeypatch.context() as patch:
            for method, more in about[revision].items():
                patch.setattr(MemoryStore, "get", away)
                params = {"taskId": id, "notifications": {"taskIds": [id]}, **more}
                with pytest.raises(ErrorResponse, match="the store of the tasks does not work") as caught:
                    await wire.call(method, params)
                assert caught.value.code == INTERNAL_ERROR
                assert "secret" not in caught.value.message
        with monkeypatch.context() as patch:
            patch.setattr(MemoryStore, "replace", full)
            with pytest.raises(ErrorResponse, match="the store has no room") as caught:
                await wire.call("tasks/cancel", {"taskId": id})
        assert "Traceback" not in caplog.text


@OLDER
async def test_a_question_stays_open_if_its_answer_cannot_be_stored(
    revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = ["the first write"]
    replace = MemoryStore.replace

    async def fail_once(self: MemoryStore, row: Row) -> bool:
        if failing:
            raise StoreFailed(failing.pop())
        return await replace(self, row)

    async with raw_client(revision) as wire:
        wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"value": True}}
        id = await begin(wire, "confirm")
        await wait_for_status(wire, id, "input_required")
        monkeypatch.setattr(MemoryStore, "replace", fail_once)
        with pytest.raises(ErrorResponse, match="the store of the tasks does not work"):
            await wire.call("tasks/result", {"taskId": id})
        assert text(await wire.call("tasks/result", {"taskId": id})) == "confirmed: Accepted(value=True)"


@NEWER
async def test_the_tasks_that_listeners_follow_are_bounded(revision: str, autojump_clock: MockClock) -> None:
    async with raw_client(revision, task_server(limits=Limits(subscriptions=5))) as wire:
        ids = [await begin(wire, "confirm") for _ in range(3)]
        params: dict[str, Any] = {"notifications": {"taskIds": [*ids, ids[0]]}}
        first = await wire.start("subscriptions/listen", params)
        await trio.sleep(1)
        with pytest.raises(ErrorResponse, match=r"no room for more subscriptions \(Limits.subscriptions\)") as caught:
            await wire.call("subscriptions/listen", params)
        assert caught.value.code == INTERNAL_ERROR
        await wire.cancel(first)
        await trio.sleep(1)
        await wire.start("subscriptions/listen", params)
        await trio.sleep(1)
        assert [note["notifications"] for method, note in wire.notes if method == ACKNOWLEDGED] == [
            {"taskIds": ids}
        ] * 2


@req("xtask-48")
@NEWER
async def test_many_listeners_of_a_long_result_do_not_hold_up_the_server(
    revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, go, read = Server("tasks"), trio.Event(), list[int]()
    rows = [{"row": number} for number in range(2000)]
    from_text = TaskRecord.from_text

    @server.tool(task="required")
    async def long() -> list[dict[str, int]]:
        await go.wait()
        return rows

    def counted(text: str) -> TaskRecord:
        read.append(len(text))
        return from_text(text)

    async with raw_client(revision, server) as wire:
        id = await begin(wire, "long")
        for _ in range(20):
            await wire.start("subscriptions/listen", {"notifications": {"taskIds": [id]}})
        await trio.sleep(1)
        monkeypatch.setattr(TaskRecord, "from_text", counted)
        go.set()
        await trio.sleep(1)
        notifications = wire.noted("notifications/tasks")
        assert len(notifications) == 20
        assert all(note["result"]["structuredContent"] == rows for note in notifications)
        assert len({note["_meta"]["io.modelcontextprotocol/subscriptionId"] for note in notifications}) == 20
        assert max(read) < 1000  # the stored text of the result is sent unchanged


@NEWER
async def test_a_listener_whose_request_fails_is_forgotten(
    revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = task_server()
    async with raw_client(revision, server) as wire:
        ids = [await begin(wire, "confirm") for _ in range(2)]
        (run,) = [each for each in gc.get_objects() if isinstance(each, RunTasks) and each._run.server is server]
        find = run.keeper.find

        async def find_one(id: str, **how: Any) -> Any:
            if id == ids[1]:
                raise StoreFailed("the disk is gone")
            return await find(id, **how)

        monkeypatch.setattr(run.keeper, "find", find_one)
        with pytest.raises(ErrorResponse, match="the store of the tasks does not work"):
            await wire.call("subscriptions/listen", {"notifications": {"taskIds": ids}})
        await trio.sleep(1)
        assert not run._listeners


async def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sqlite_in_event_loop: None, autojump_clock: MockClock
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)), names)
    async with raw_client(EXTENSION, names["server"]) as wire:
        wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"value": "small"}}
        report, order = await begin(wire, "report", {"pages": 1}), await begin(wire, "order")
        assert "a pizza, Accepted(value='small')" in text((await wait_for_status(wire, order))["result"])
        await wait_for_status(wire, report, "input_required")
        answer = {"action": "accept", "content": {"value": True}}
        await wire.call("tasks/update", {"taskId": report, "inputResponses": {"form": answer}})
        assert text((await wait_for_status(wire, report))["result"]) == "1 pages, Accepted(value=True)"
    assert (tmp_path / "tasks.db").exists()
    await names["come_back"](names["server"], report)
