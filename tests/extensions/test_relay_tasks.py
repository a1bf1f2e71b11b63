"""Tasks through a relay: each form of the client with each form of the server."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.client.matrix import Variant, client_of, each_transport_and_asgi
from tests.extensions import test_server_tasks as direct
from tests.extensions.test_client_tasks import User
from tests.extensions.test_client_tasks import text as text_of
from tests.extensions.test_server_tasks import CORE, EXTENSION, begin, capabilities, task_server, text, wait_for_status
from tests.requirements import req
from tests.server.raw_client import (
    ACKNOWLEDGED,
    CAPABILITIES,
    MESSAGE,
    PROGRESS,
    REVISION_NAMES,
    ErrorResponse,
    RawClient,
    client_on,
    connected,
)
from trio_mcp import Context, Limits, RequestError, Server, serve_stream
from trio_mcp.core import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    MISSING_CLIENT_CAPABILITY,
    RELATED_TASK,
    TASKS_EXTENSION,
)
from trio_mcp.errors import ConnectionFailed, SessionClosed
from trio_mcp.extensions.tasks import ClientTask, TaskCancelled
from trio_mcp.relay import open_relay

# The search of a relay for tasks is internal.
from trio_mcp.relay.tasks import RelayTasks

# The connection of one principal is internal.
from trio_mcp.server.session import converse
from trio_mcp.stores import MemoryStore

# The framing of its stream is internal, too.
from trio_mcp.transport.wire import Lines

each_server_revision = pytest.mark.parametrize("server_revision", [CORE, EXTENSION])
each_client_revision = pytest.mark.parametrize("client_revision", [CORE, EXTENSION])


@asynccontextmanager
async def client_through_relay(
    server_revision: str, client_revision: str, server: Server | None = None, **options: Any
) -> AsyncIterator[RawClient]:
    options.setdefault("capabilities", capabilities(client_revision))
    options.setdefault("check", False)
    async with (
        open_relay(server or task_server(), revision=server_revision) as relay,
        connected(relay, client_revision, **options) as wire,
    ):
        yield wire


# The tests of `test_server_tasks` that also run through a relay, in both forms between the relay and the server.
DIRECT_TESTS = (
    direct.test_a_call_becomes_a_task_and_its_result_is_kept,
    direct.test_a_client_without_tasks_gets_an_ordinary_result,
    direct.test_an_older_client_gets_an_ordinary_result,
    direct.test_a_server_without_tasks_ignores_the_param,
    direct.test_failures_of_tools_and_of_the_protocol_differ,
    direct.test_the_methods_of_each_form,
    direct.test_a_cancelled_notification_does_not_cancel_a_task,
    direct.test_questions_come_on_the_stream_of_tasks_result,
    direct.test_a_question_waits_for_the_next_tasks_result,
    direct.test_a_session_lists_its_own_tasks,
    direct.test_ids_are_long_and_random,
)


def cases() -> list[Any]:
    return [
        pytest.param(test, revision, id=f"{test.__name__.removeprefix('test_')}-{revision}")
        for test in DIRECT_TESTS
        for mark in test.pytestmark
        if mark.name == "parametrize"
        for revision in mark.args[1]
    ]


@each_server_revision
@pytest.mark.parametrize(("test", "revision"), cases())
async def test_tasks_through_a_relay_behave_as_at_the_server(
    server_revision: str, test: Callable[..., Awaitable[None]], revision: str, monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:  # fmt: skip
    @asynccontextmanager
    async def through(server: Server, revision: str, **options: Any) -> AsyncIterator[RawClient]:
        async with open_relay(server, revision=server_revision) as relay, connected(relay, revision, **options) as wire:
            yield wire

    monkeypatch.setattr(direct, "connected", through)
    given: dict[str, Any] = {"revision": revision, "autojump_clock": autojump_clock, "monkeypatch": monkeypatch}
    await test(**{name: given[name] for name in inspect.signature(test).parameters})


# Calls


@req("task-06", "task-08", "task-33", "xtask-01")
@each_server_revision
@each_client_revision
async def test_the_server_decides_which_calls_become_tasks(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server, runs = task_server(), list[bool]()

    @server.tool(task="optional")
    async def look(ctx: Context) -> str:
        runs.append(ctx.task.id is not None)
        return "looked"

    async with client_through_relay(server_revision, client_revision, server) as wire:
        id = await begin(wire, "look")
        assert (await wait_for_status(wire, id))["status"] == "completed"
        assert runs == [True]
        params: dict[str, Any] = {"name": "greet", "arguments": {"name": "Ann"}}
        if client_revision == EXTENSION:
            assert text(await wire.call("tools/call", params)) == "Hello, Ann!"
        elif server_revision == CORE:
            with pytest.raises(ErrorResponse) as caught:
                await wire.call("tools/call", {**params, "task": {}})
            assert caught.value.code == METHOD_NOT_FOUND
        else:  # the server has answered at once, and a client that asks for a task gets one
            id = await begin(wire, "greet", {"name": "Ann"})
            assert text(await wire.call("tasks/result", {"taskId": id})) == "Hello, Ann!"
        tools = {tool["name"]: tool.get("execution") for tool in (await wire.call("tools/list"))["tools"]}
        support = {name: each and each["taskSupport"] for name, each in tools.items()}
        if client_revision == EXTENSION:
            assert set(support.values()) == {None}
        elif server_revision == CORE:
            assert (support["greet"], support["look"], support["failing"]) == (None, "optional", "required")
        else:
            assert set(support.values()) == {"optional"}


async def test_a_malformed_tool_is_listed_unchanged(autojump_clock: MockClock) -> None:
    async def garble(ctx: Context, request: Any, call_next: Any) -> Any:
        result = await call_next()
        return {**result, "tools": [5, *result["tools"]]} if request.method == "tools/list" else result

    async with client_through_relay(EXTENSION, CORE, task_server(middleware=[garble])) as wire:
        tools = (await wire.call("tools/list"))["tools"]
        assert tools[0] == 5
        assert tools[1]["execution"] == {"taskSupport": "optional"}


@req("task-09", "xtask-05")
@each_server_revision
@pytest.mark.parametrize("client_revision", REVISION_NAMES)
async def test_a_call_without_a_task_behaves_as_at_the_server(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    async with client_through_relay(
        server_revision, client_revision, capabilities=CAPABILITIES[client_revision]
    ) as wire:
        result = await wire.call("tools/call", {"name": "compute", "arguments": {"seconds": 3}}, progress="p")
        assert text(result) == "computed, no task"
        assert [each["progress"] for each in wire.noted(PROGRESS)] == [0, 1, 2]
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("tools/call", {"name": "failing", "arguments": {"kind": "tool"}})
        if client_revision == EXTENSION:
            assert caught.value.code == MISSING_CLIENT_CAPABILITY
            assert caught.value.data == {"requiredCapabilities": {"extensions": {TASKS_EXTENSION: {}}}}
        else:
            assert caught.value.code == METHOD_NOT_FOUND
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("tools/call", {"name": "unknown"})
        assert caught.value.code == INVALID_PARAMS


@req("task-01", "task-66", "xtask-50")
@pytest.mark.parametrize("server_revision", REVISION_NAMES)
@each_client_revision
async def test_a_relay_declares_the_tasks_that_its_server_declares(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    async with client_through_relay(server_revision, client_revision) as wire:
        declared = (await wire.about())["capabilities"]
        has = server_revision in (CORE, EXTENSION)
        if client_revision == CORE:
            tasks = {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}}
            assert declared.get("tasks") == (tasks if has else None)
        else:
            assert declared.get("extensions") == ({TASKS_EXTENSION: {}} if has else None)
        if not has:
            for method in ("tasks/get", "tasks/cancel", "tasks/list"):
                with pytest.raises(ErrorResponse) as caught:
                    await wire.call(method, {"taskId": "x"})
                assert caught.value.code == METHOD_NOT_FOUND
            params = {"name": "compute", "arguments": {"seconds": 1}, "task": {}}
            assert text(await wire.call("tools/call", params)) == "computed, no task"


def test_a_relay_imports_the_records_of_tasks_only_if_it_has_tasks() -> None:
    program = (
        "import sys, trio; from trio_mcp import Server; from trio_mcp.relay import open_relay\n"
        "async def main(task):\n"
        "    server = Server('x'); server.tool(name='x', task=task)(lambda: 'x')\n"
        "    async with open_relay(server): print('trio_mcp.relay.tasks' in sys.modules)\n"
        "for task in ('forbidden', 'optional'): trio.run(main, task)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


async def test_a_relay_may_run_without_tasks(autojump_clock: MockClock) -> None:
    async with open_relay(task_server(), tasks=False) as relay, connected(relay, CORE) as wire:
        assert "tasks" not in wire.opening["capabilities"]
        params = {"name": "compute", "arguments": {"seconds": 1}, "task": {}}
        assert text(await wire.call("tools/call", params)) == "computed, no task"


@req("task-66")
async def test_a_relay_declares_no_cancellation_that_its_server_lacks(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = task_server()
    declared = {"list": {}, "requests": {"tools": {"call": {}}}}
    for extension in server._extended().extensions.values():
        extension.values = tuple(
            attrs.evolve(each, settings=declared) if each.capability else each for each in extension.values
        )
    async with client_through_relay(CORE, CORE, server) as wire:
        assert wire.opening["capabilities"]["tasks"] == declared


# Questions and reports


@req("task-26", "xtask-17", "xtask-25", "xtask-28", "xtask-32", "xtask-33")
@each_server_revision
@each_client_revision
async def test_questions_of_a_task_are_asked_at_the_same_time(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    async with client_through_relay(server_revision, client_revision) as wire:

        def named(params: dict[str, Any]) -> dict[str, Any]:
            return {"action": "accept", "content": {"name": params["message"].removesuffix("?")}}

        wire.answers["elicitation/create"] = named
        id = await begin(wire, "two")
        task = await wait_for_status(wire, id, "input_required")
        if client_revision == CORE:
            result = await wire.call("tasks/result", {"taskId": id})
            assert [params["_meta"][RELATED_TASK] for _, params in wire.asked] == [{"taskId": id}] * 2
        else:
            await trio.sleep(1)
            asked = (await wire.call("tasks/get", {"taskId": id}))["inputRequests"]
            assert len(asked) == 2
            answers = {key: named(each["params"]) for key, each in asked.items()}
            (first, answer), second = next(iter(answers.items())), list(answers)[1]
            await wire.call("tasks/update", {"taskId": id, "inputResponses": {first: answer, "x": answer}})
            await trio.sleep(3)
            task = await wire.call("tasks/get", {"taskId": id})
            assert list(task["inputRequests"]) == [second]
            await wire.call("tasks/update", {"taskId": id, "inputResponses": {second: answers[second]}})
            result = (await wait_for_status(wire, id))["result"]
        assert text(result) == "First and Second"


@each_server_revision
@pytest.mark.parametrize("client_revision", ["2025-06-18", CORE, EXTENSION])
async def test_a_relay_asks_a_question_that_may_be_answered_by_a_task(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server, states = Server("asking"), list[bool]()

    @server.tool
    async def ask(ctx: Context) -> str:
        states.append(ctx.supports("tasks", "requests", "elicitation", "create"))
        return repr(await ctx.elicit("Really?", bool, task=True))

    async def slowly(params: dict[str, Any]) -> dict[str, Any]:
        await trio.sleep(20)
        return {"action": "accept", "content": {"value": True}}

    async with client_through_relay(
        server_revision, client_revision, server, capabilities=CAPABILITIES[client_revision]
    ) as wire:
        wire.answers["elicitation/create"] = slowly
        result = await wire.call("tools/call", {"name": "ask"})
        assert text(result) == "Accepted(value=True)"
        assert states == [server_revision == CORE]  # the relay holds the task until its client has answered


@each_server_revision
@each_client_revision
async def test_a_tool_asks_in_its_call_and_becomes_a_task(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    async with client_through_relay(server_revision, client_revision) as wire:
        wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"name": "Alice"}}
        id = await begin(wire, "ask_first")
        assert len(wire.asked) == 1
        task = await wait_for_status(wire, id)
        result = task["result"] if client_revision == EXTENSION else await wire.call("tasks/result", {"taskId": id})
        assert text(result) == "Hello, Alice!"


async def test_a_filter_with_too_many_tasks_is_refused_by_the_relay(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted: list[str] = []

    async def record_adoption(self: object, id: str, ctx: Context) -> None:
        await trio.lowlevel.checkpoint()
        adopted.append(id)

    monkeypatch.setattr(RelayTasks, "_adopt", record_adoption)
    async with client_through_relay(EXTENSION, EXTENSION) as wire:
        ids = [f"{number}" for number in range(1001)]
        with pytest.raises(ErrorResponse, match="at most 1000 strings"):
            await wire.call("subscriptions/listen", {"notifications": {"taskIds": ids}})
        assert not adopted
        await wire.start("subscriptions/listen", {"notifications": {"taskIds": ids[:2]}})
        await trio.sleep(1)
        assert adopted == ids[:2]


@req("prog-11", "prog-12", "task-26", "xtask-39")
@each_server_revision
@each_client_revision
async def test_progress_and_status_messages_pass_until_the_end(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server = task_server()

    @server.tool(task="required")
    async def slowly(ctx: Context) -> str:
        await ctx.task.status("begun")
        for step in range(6):
            if step == 2:
                await ctx.elicit("Go on?", bool)
            await ctx.progress(step, 6, f"step {step}")
            await ctx.log("info", step)
            await trio.sleep(3)
        return "done"

    async with client_through_relay(server_revision, client_revision, server, log_level="info") as wire:
        wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"value": True}}
        id = await begin(wire, "slowly", progress="p")
        seen = list[str | None]()
        await wait_for_status(wire, id, "input_required")
        if client_revision == CORE:
            await wire.start("tasks/result", {"taskId": id})
        while (task := await wire.call("tasks/get", {"taskId": id}))["status"] not in ("completed", "failed"):
            seen.append(task.get("statusMessage"))
            for key in task.get("inputRequests", ()):
                answer = {"action": "accept", "content": {"value": True}}
                await wire.call("tasks/update", {"taskId": id, "inputResponses": {key: answer}})
            await trio.sleep(1)
        assert task["status"] == "completed"
        if server_revision == client_revision == CORE:
            assert [each["progress"] for each in wire.noted(PROGRESS)] == [0, 1, 2, 3, 4, 5]
            assert len(wire.noted(MESSAGE)) == 6
            assert seen[0] == "begun"
        else:
            assert not wire.noted(PROGRESS)
            assert not wire.noted(MESSAGE)
            assert {"step 3", "step 4", "step 5"} <= set(seen)
        for each in (*wire.noted(PROGRESS), *wire.noted(MESSAGE)):
            assert each["_meta"][RELATED_TASK] == {"taskId": id}


@req("xtask-36", "xtask-48", "xtask-49", "task-15")
@each_server_revision
@each_client_revision
async def test_listeners_get_the_changes_of_a_task(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    async with client_through_relay(server_revision, client_revision) as wire:
        id = await begin(wire, "compute", {"seconds": 3})
        method = "notifications/tasks/status"
        if client_revision == EXTENSION:
            method = "notifications/tasks"
            await wire.start("subscriptions/listen", {"notifications": {"taskIds": [id, "unknown"]}})
            assert (await wire.note(ACKNOWLEDGED))["notifications"] == {"taskIds": [id]}
        await wait_for_status(wire, id)
        await trio.sleep(1)
        assert [(each["taskId"], each["status"]) for each in wire.noted(method)][-1] == (id, "completed")


@each_server_revision
@each_client_revision
async def test_a_question_that_the_client_refuses_ends_the_task(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    declares = {name: each for name, each in capabilities(client_revision).items() if name != "elicitation"}
    ended = list[str]()
    server = task_server()

    @server.tool(task="required")
    async def ask(ctx: Context) -> str:
        try:
            await ctx.elicit("Who?", bool)
        finally:
            ended.append("ended")
        return "asked"

    async with client_through_relay(server_revision, client_revision, server, capabilities=declares) as wire:
        task = await wait_for_status(wire, await begin(wire, "ask"))
        assert task["status"] == ("completed" if (server_revision, client_revision) == (CORE, EXTENSION) else "failed")
        await trio.sleep(1)
        assert ended == ["ended"]


@each_client_revision
@pytest.mark.parametrize("later", [False, True])
async def test_a_question_is_not_asked_in_a_call_that_asks_for_a_task(
    client_revision: str, later: bool, autojump_clock: MockClock
) -> None:
    """In 2025-11-25 a question does not name its call, but the question of a task names its task."""
    server, results = task_server(), list[Any]()

    @server.tool
    async def ask(ctx: Context) -> str:
        await trio.sleep(1)
        return repr(await ctx.elicit("Really?", bool))

    @server.tool(task="optional", asks_first=True)
    async def newest(ctx: Context) -> str:
        await trio.sleep(2)
        if later:
            await ctx.task.start()
            await trio.sleep(2)
        return "done"

    async def slowly(params: dict[str, Any]) -> dict[str, Any]:
        await trio.sleep(5)
        return {"action": "accept", "content": {"value": True}}

    async with client_through_relay(CORE, client_revision, server) as wire, trio.open_nursery() as nursery:
        wire.answers["elicitation/create"] = slowly

        @nursery.start_soon
        async def asking() -> None:
            results.append(await wire.call("tools/call", {"name": "ask"}))

        await trio.sleep(0.5)
        start = trio.current_time()
        id = await begin(wire, "newest")
        task = await wait_for_status(wire, id)
        assert trio.current_time() - start < 5  # the question did not delay the task
        result = task["result"] if client_revision == EXTENSION else await wire.call("tasks/result", {"taskId": id})
        assert text(result) == "done"
    assert ["Accepted" in text(each) for each in results] == [True]


@each_client_revision
async def test_a_call_becomes_a_task_after_a_question_that_does_not_name_it(
    client_revision: str, autojump_clock: MockClock
) -> None:
    """The question still waits for its answer when the server of 2025-11-25 answers the call with the task."""
    server = task_server()

    @server.tool(task="optional", asks_first=True)
    async def hasty(ctx: Context) -> str:
        answers = list[Any]()

        async def ask() -> None:
            answers.append(await ctx.elicit("Really?", bool))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(1)
            await ctx.task.start()
        return repr(answers[0])

    async def slowly(params: dict[str, Any]) -> dict[str, Any]:
        await trio.sleep(5)
        return {"action": "accept", "content": {"value": True}}

    async with client_through_relay(CORE, client_revision, server) as wire:
        wire.answers["elicitation/create"] = slowly
        id = await begin(wire, "hasty")
        task = await wait_for_status(wire, id)
        result = task["result"] if client_revision == EXTENSION else await wire.call("tasks/result", {"taskId": id})
        assert "Accepted" in text(result)


@each_server_revision
@each_client_revision
async def test_each_client_of_a_shared_session_gets_its_own_task(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    """Before 2026-07-28 other questions are refused in a shared session, because they do not name their call."""
    server = task_server()

    @server.tool(task="required")
    async def ask(name: str, ctx: Context) -> str:
        await ctx.log("info", name)
        answer = await ctx.elicit(name, bool)
        return f"{name}: {type(answer).__name__}"

    ours, theirs = trio.testing.memory_stream_pair()
    options: Any = {"check": False, "capabilities": capabilities(client_revision), "log_level": "info"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, theirs)
        async with (
            open_relay(ours, revision=server_revision) as relay,
            connected(relay, client_revision, **options) as ann,
            connected(relay, client_revision, **options) as bob,
        ):
            actions = {"ann": "accept", "bob": "decline"}
            wires = {"ann": ann, "bob": bob}
            for name, wire in wires.items():
                answer = {"action": actions[name], "content": {"value": True}}
                wire.answers["elicitation/create"] = lambda params, answer=answer: answer
            ids = {name: await begin(wire, "ask", {"name": name}) for name, wire in wires.items()}
            for name, wire in wires.items():
                task = await wait_for_status(wire, ids[name], "input_required")
                if client_revision == EXTENSION:
                    ((key, question),) = task["inputRequests"].items()
                    assert question["params"]["message"] == name
                    answer = wire.answers["elicitation/create"](question["params"])
                    await wire.call("tasks/update", {"taskId": ids[name], "inputResponses": {key: answer}})
                    result = (await wait_for_status(wire, ids[name]))["result"]
                else:
                    result = await wire.call("tasks/result", {"taskId": ids[name]})
                    assert [params["message"] for _, params in wire.asked] == [name]
                assert text(result) == f"{name}: {'Accepted' if name == 'ann' else 'Declined'}"
                told = [name] if server_revision == client_revision == CORE else []
                assert [each["data"] for each in wire.noted(MESSAGE)] == told
        await ours.aclose()


@pytest.mark.parametrize("between", [CORE, EXTENSION])
@each_server_revision
@each_client_revision
async def test_tasks_pass_through_relays_in_a_row(
    server_revision: str, between: str, client_revision: str, autojump_clock: MockClock
) -> None:
    async with (
        open_relay(task_server(), revision=server_revision) as inner,
        client_through_relay(between, client_revision, inner) as wire,
    ):
        wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"value": True}}
        asking, running = await begin(wire, "confirm"), await begin(wire, "compute", {"seconds": 50})
        task = await wait_for_status(wire, asking, "input_required")
        if client_revision == EXTENSION:
            answers = {key: {"action": "accept", "content": {"value": True}} for key in task["inputRequests"]}
            await wire.call("tasks/update", {"taskId": asking, "inputResponses": answers})
            result = (await wait_for_status(wire, asking))["result"]
        else:
            result = await wire.call("tasks/result", {"taskId": asking})
        assert text(result) == "confirmed: Accepted(value=True)"
        await wire.call("tasks/cancel", {"taskId": running})
        assert (await wire.call("tasks/get", {"taskId": running}))["status"] == "cancelled"


@req("xtask-17", "task-25")
@each_server_revision
@each_client_revision
async def test_a_question_that_the_server_withdraws_is_withdrawn(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server = task_server()

    @server.tool(task="required")
    async def impatient(ctx: Context) -> str:
        with trio.move_on_after(10):
            await ctx.elicit("Quick?", bool)
        await trio.sleep(20)
        await ctx.task.status("going on")
        await trio.sleep(20)
        return "done"

    async def never(params: dict[str, Any]) -> None:
        await trio.sleep_forever()

    async with client_through_relay(server_revision, client_revision, server) as wire:
        wire.answers["elicitation/create"] = never
        id = await begin(wire, "impatient")
        await wait_for_status(wire, id, "input_required")
        if client_revision == CORE:
            await wire.start("tasks/result", {"taskId": id})
        begun = trio.current_time()
        await wait_for_status(wire, id, "working")
        # A handler that stores no messages withdraws a question only with its next step.
        assert trio.current_time() < begun + 40
        task = await wait_for_status(wire, id)
        assert task["status"] == "completed"
        assert trio.current_time() < begun + 60


# Ends


@req("task-45", "task-46", "task-44", "xtask-19", "xtask-29", "xtask-34")
@each_server_revision
@each_client_revision
async def test_a_cancellation_reaches_the_server(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server, ended = task_server(), list[str]()

    @server.tool(task="optional")
    async def endless() -> str:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("stopped")

    async with client_through_relay(server_revision, client_revision, server) as wire:
        id = await begin(wire, "endless")
        await trio.sleep(1)
        result = await wire.call("tasks/cancel", {"taskId": id})
        assert result.get("status") == ("cancelled" if client_revision == CORE else None)
        assert (await wire.call("tasks/get", {"taskId": id}))["status"] == "cancelled"
        await trio.sleep(1)
        assert ended == ["stopped"]
        again = await wire.exchange("tasks/cancel", {"taskId": id})
        assert again.get("error", {}).get("code") == (INVALID_PARAMS if client_revision == CORE else None)


@each_server_revision
@each_client_revision
async def test_a_task_that_is_cancelled_at_the_server_is_cancelled(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server = task_server()
    async with server.running(), client_through_relay(server_revision, client_revision, server) as wire:
        id = await begin(wire, "compute", {"seconds": 100})
        async with connected(
            server, server_revision, check=False, capabilities=capabilities(server_revision), drain=None
        ) as other:
            await other.call("tasks/cancel", {"taskId": id.rpartition(".")[0]})
        assert (await wait_for_status(wire, id))["status"] == "cancelled"


@req("task-10", "task-29", "task-30", "task-32", "xtask-24")
@each_server_revision
@each_client_revision
async def test_the_ttl_is_that_of_the_server(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server = task_server(limits=Limits(task_seconds=500))
    async with client_through_relay(server_revision, client_revision, server) as wire:
        name = "ttl" if client_revision == CORE else "ttlMs"
        for asked, given in (
            ({"ttl": 5_000}, 5_000 if server_revision == client_revision == CORE else 500_000),
            ({}, 500_000),
        ):
            id = await begin(wire, "compute", {"seconds": 100}, **({"task": asked} if client_revision == CORE else {}))
            assert (await wire.call("tasks/get", {"taskId": id}))[name] == given
        if client_revision == CORE:
            with pytest.raises(ErrorResponse) as caught:
                await begin(wire, "compute", {"seconds": 1}, task={"ttl": "long"})
            assert caught.value.code == INVALID_PARAMS


# Restarts


@req("xtask-15", "xtask-41", "task-22")
@each_server_revision
@each_client_revision
async def test_ids_outlive_the_relay(server_revision: str, client_revision: str, autojump_clock: MockClock) -> None:
    server = task_server()
    async with server.running():
        async with client_through_relay(server_revision, client_revision, server) as wire:
            wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"value": True}}
            running = await begin(wire, "compute", {"seconds": 50})
            asking = await begin(wire, "confirm")
            cancelled = await begin(wire, "compute", {"seconds": 50})
            await wire.call("tasks/cancel", {"taskId": cancelled})
            failed = [await begin(wire, "failing", {"kind": kind}) for kind in ("tool", "protocol")]
            done = await begin(wire, "compute", {"seconds": 1})
            ends = {id: await wait_for_status(wire, id) for id in (*failed, done)}
        async with client_through_relay(server_revision, client_revision, server) as wire:
            wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"value": True}}
            for id, end in ends.items():
                task = await wire.call("tasks/get", {"taskId": id})
                # The last message of progress is not known after a restart.
                for name in ("taskId", "status", "result", "error", *["statusMessage"] * (id in failed)):
                    assert task.get(name) == end.get(name), name
            assert (await wire.call("tasks/get", {"taskId": cancelled}))["status"] == "cancelled"
            assert (await wire.call("tasks/get", {"taskId": running}))["status"] == "working"
            if client_revision == CORE:
                result = await wire.call("tasks/result", {"taskId": asking})
                assert text(await wire.call("tasks/result", {"taskId": done})) == "computed, a task"
                listed = {task["taskId"] for task in (await wire.call("tasks/list"))["tasks"]}
                assert listed == {running, asking, cancelled, done, *failed}
            else:
                asked = (await wait_for_status(wire, asking, "input_required"))["inputRequests"]
                answer = {"action": "accept", "content": {"value": True}}
                responses = dict.fromkeys(asked, answer)
                await wire.call("tasks/update", {"taskId": asking, "inputResponses": responses})
                result = (await wait_for_status(wire, asking))["result"]
            assert text(result) == "confirmed: Accepted(value=True)"
            assert (await wait_for_status(wire, running))["status"] == "completed"
        async with client_through_relay(server_revision, client_revision, server) as wire:
            for id in (f"x{done}", f"{done}x", done.rpartition(".")[0], "unknown", "."):
                with pytest.raises(ErrorResponse) as caught:
                    await wire.call("tasks/get", {"taskId": id})
                assert caught.value.code == INVALID_PARAMS


@each_server_revision
@each_client_revision
async def test_requests_at_the_same_time_make_one_record(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    asked = list[str]()

    async def watch(ctx: Context, request: Any, call_next: Any) -> Any:
        asked.append(request.method)
        return await call_next()

    server = task_server(middleware=[watch])
    async with server.running():
        async with client_through_relay(server_revision, client_revision, server) as wire:
            id = await begin(wire, "compute", {"seconds": 50})
        async with client_through_relay(server_revision, client_revision, server) as wire:
            asked.clear()
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(wire.call, "tasks/get", {"taskId": id})
            await trio.sleep(0.5)
            assert asked == ["tasks/get", "tasks/get"]  # one to make the record, one to follow the task


@req("xtask-28")
@each_server_revision
async def test_the_keys_of_questions_are_new_after_a_restart(server_revision: str, autojump_clock: MockClock) -> None:
    server = Server("asking")

    @server.tool(task="required")
    async def ask(ctx: Context) -> str:
        return " ".join([type(await ctx.elicit("Again?", bool)).__name__ for _ in range(3)])

    keys, id = list[str](), ""
    async with server.running():
        for _ in range(3):
            async with client_through_relay(server_revision, EXTENSION, server) as wire:
                id = id or await begin(wire, "ask")
                (key,) = (await wait_for_status(wire, id, "input_required"))["inputRequests"]
                assert key not in keys
                keys.append(key)
                await wire.call("tasks/update", {"taskId": id, "inputResponses": {key: {"action": "decline"}}})
                await trio.sleep(5)
                task = await wire.call("tasks/get", {"taskId": id})
    assert text(task["result"]) == "Declined Declined Declined"


@each_server_revision
@each_client_revision
async def test_a_task_goes_on_when_its_connection_ends(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server = task_server()
    async with server.running(), open_relay(server, revision=server_revision) as relay, relay.running():
        options: Any = {"check": False, "capabilities": capabilities(client_revision)}
        async with raw_client_of(relay, client_revision, **options) as wire:
            id = await begin(wire, "compute", {"seconds": 3})
        await trio.sleep(10)
        async with raw_client_of(relay, client_revision, **options) as wire:
            assert (await wire.call("tasks/get", {"taskId": id}))["status"] == "completed"


@each_server_revision
@each_client_revision
async def test_a_task_goes_on_when_its_run_ends(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server = task_server()
    async with server.running(), open_relay(server, revision=server_revision) as relay:
        options: Any = {"check": False, "capabilities": capabilities(client_revision)}
        async with raw_client_of(relay, client_revision, **options) as wire:
            id = await begin(wire, "compute", {"seconds": 30})
        await trio.sleep(10)
        async with raw_client_of(relay, client_revision, **options) as wire:
            assert (await wire.call("tasks/get", {"taskId": id}))["status"] == "working"
            assert (await wait_for_status(wire, id))["status"] == "completed"


@asynccontextmanager
async def raw_client_of(
    server: Server, revision: str, principal: str | None = None, **options: Any
) -> AsyncIterator[RawClient]:
    """A client on a stream, with a principal."""
    ours, theirs = trio.testing.memory_stream_pair()

    async def serve() -> None:
        async with server._joined() as run:
            await converse(run, theirs, Lines(run.limits), principal=principal)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        async with client_on(ours, revision, **options) as wire:
            yield wire


@req("task-55", "task-59", "task-60", "xtask-46", "task-57", "xtask-45")
@each_server_revision
@each_client_revision
async def test_a_task_is_seen_by_its_principal_only(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server, keys = task_server(), [bytes(32)]
    options: Any = {"check": False, "capabilities": capabilities(client_revision)}
    async with server.running():
        async with (
            open_relay(server, revision=server_revision, state_keys=keys) as relay,
            raw_client_of(relay, client_revision, "ann", **options) as ann,
        ):
            id = await begin(ann, "compute", {"seconds": 1})
            await wait_for_status(ann, id)
        own = id.rpartition(".")[0]
        for principal, state_keys, seen in (
            ("bob", keys, False), (None, keys, False), ("ann", None, False), ("ann", [bytes(31) + b"x"], False),
            ("ann", keys, True), ("ann", [bytes(31) + b"x", *keys], True),
        ):  # fmt: skip
            async with (
                open_relay(server, revision=server_revision, state_keys=state_keys) as relay,
                raw_client_of(relay, client_revision, principal, **options) as wire,
            ):
                for method in (
                    "tasks/cancel",
                    "tasks/get",
                    "tasks/update" if client_revision == EXTENSION else "tasks/result",
                ):
                    for each in (id, own):
                        answer = await wire.exchange(method, {"taskId": each, "inputResponses": {}})
                        refused = "there is no task" in answer.get("error", {}).get("message", "")
                        assert refused is not (seen and each == id)
                if client_revision == CORE:
                    assert len((await wire.call("tasks/list"))["tasks"]) == seen


async def test_an_id_that_could_be_guessed_has_a_secret_tag(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_mcp.extensions.tasks.server.secrets.token_hex", lambda length: "7")
    server = task_server()
    async with server.running():
        async with client_through_relay(CORE, CORE, server) as wire:
            id = await begin(wire, "compute", {"seconds": 1})
            assert len(id) == 24
            assert (await wait_for_status(wire, id))["status"] == "completed"
        async with client_through_relay(CORE, CORE, server) as wire:
            with pytest.raises(ErrorResponse, match="there is no task"):
                await wire.call("tasks/get", {"taskId": id})


# Mounted relays


@each_server_revision
@each_client_revision
@pytest.mark.parametrize("own", [False, True])
async def test_tasks_of_mounted_relays(
    server_revision: str, client_revision: str, own: bool, autojump_clock: MockClock
) -> None:
    receivers = list[str]()

    def recording_server(name: str) -> Server:
        async def watch(ctx: Context, request: Any, call_next: Any) -> Any:
            if request.method.startswith("tasks/"):
                receivers.append(name)
            return await call_next()

        server = Server(name, middleware=[watch])

        @server.tool(task="optional")
        async def compute(seconds: float) -> str:
            await trio.sleep(seconds)
            return name

        return server

    one, two = recording_server("one"), recording_server("two")
    async with one.running(), two.running():
        ids = list[str]()
        for _ in range(2):
            outer = Server("outer")
            if own:
                outer.tool(name="own", task="optional")(lambda: "own")
            async with (
                open_relay(one, revision=server_revision) as first,
                open_relay(two, revision=server_revision) as second,
            ):
                outer.mount(first, prefix="a_")
                outer.mount(second, prefix="b_")
                options: Any = {"check": False, "capabilities": capabilities(client_revision)}
                async with raw_client_of(outer, client_revision, **options) as wire:
                    if not ids:
                        ids = [await begin(wire, name, {"seconds": 30}) for name in ("a_compute", "b_compute")]
                        for id in ids:
                            assert (await wire.call("tasks/get", {"taskId": id}))["status"] == "working"
                        continue
                    receivers.clear()
                    assert (await wait_for_status(wire, ids[1]))["status"] == "completed"
                    assert set(receivers) == {"two"}  # the id is not sent to the other server
                    await wire.call("tasks/get", {"taskId": ids[0]})
                    with pytest.raises(ErrorResponse) as caught:
                        await wire.call("tasks/get", {"taskId": "unknown"})
                    assert caught.value.code == INVALID_PARAMS


# Faults


@each_server_revision
@each_client_revision
async def test_a_relay_polls_again_after_a_failure_of_the_server(
    server_revision: str, client_revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = [SessionClosed("away"), ConnectionFailed("away"), trio.TooSlowError("away")]
    result = ClientTask.result

    async def failing(self: ClientTask, **how: Any) -> Any:
        if failures:
            raise failures.pop()
        return await result(self, **how)

    monkeypatch.setattr(ClientTask, "result", failing)
    async with client_through_relay(server_revision, client_revision) as wire:
        assert (await wait_for_status(wire, await begin(wire, "compute", {"seconds": 1})))["status"] == "completed"
        assert not failures


@req("xtask-43")
@each_server_revision
@each_client_revision
async def test_a_server_that_refuses_requests_does_not_fail_its_tasks(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    refused = list[str]()

    async def draining(ctx: Context, request: Any, call_next: Any) -> Any:
        if request.method.startswith("tasks/") and refuses(request.method):
            refused.append(request.method)
            raise RequestError(INTERNAL_ERROR, "the server is shutting down")
        return await call_next()

    def refuses(method: str) -> bool:
        return trio.current_time() < end or (method == "tasks/result" and refused.count(method) < 3)

    end = trio.current_time()
    async with client_through_relay(server_revision, client_revision, task_server(middleware=[draining])) as wire:
        id = await begin(wire, "compute", {"seconds": 3})
        end = trio.current_time() + 30
        with pytest.raises(ErrorResponse, match="shutting down") as caught:
            await wire.call("tasks/cancel", {"taskId": id})
        assert caught.value.code == INTERNAL_ERROR
        await trio.sleep(25)
        assert (await wire.call("tasks/get", {"taskId": id}))["status"] == "working"
        assert (await wait_for_status(wire, id))["status"] == "completed"
        assert trio.current_time() > end
        assert refused.count("tasks/result") == (3 if server_revision == CORE else 0)


@each_server_revision
@each_client_revision
async def test_a_task_that_the_server_forgets_fails(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    store = MemoryStore()
    async with client_through_relay(server_revision, client_revision, task_server(store=store)) as wire:
        id = await begin(wire, "compute", {"seconds": 100})
        await trio.sleep(5)
        (row,) = store._rows.values()
        await store.delete(row.kind, row.key)
        task = await wait_for_status(wire, id)
        assert task["status"] == "failed"
        assert "there is no task" in task["statusMessage"]


@each_server_revision
@each_client_revision
async def test_without_room_for_its_record_a_task_is_cancelled(
    server_revision: str, client_revision: str, autojump_clock: MockClock
) -> None:
    server, ended = task_server(), list[str]()

    @server.tool(task="required")
    async def endless() -> str:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("stopped")

    async with (
        open_relay(server, revision=server_revision, limits=Limits(tasks=0)) as relay,
        connected(relay, client_revision, check=False, capabilities=capabilities(client_revision)) as wire,
    ):
        with pytest.raises(ErrorResponse, match=r"Limits\.tasks"):
            await begin(wire, "endless")
        await trio.sleep(1)
        assert ended == ["stopped"]


@each_server_revision
@each_transport_and_asgi(revisions=(CORE, EXTENSION), without=("child",), legacy_without=("http json",))
async def test_the_trio_mcp_client_uses_tasks_through_a_relay(
    variant: Variant, server_revision: str, autojump_clock: MockClock
) -> None:
    user = User()
    async with (
        open_relay(task_server(), revision=server_revision) as relay,
        client_of(variant, relay, tasks=True, elicitation=user) as client,
    ):
        with pytest.raises(RequestError, match="no protocol"):
            await (await client.start_task("failing", {"kind": "protocol"})).result()
        failed = await (await client.start_task("failing", {"kind": "tool"})).result()
        assert (failed.is_error, text_of(failed)) == (True, "no disk")
        assert await client.call_tool("greet", {"name": "Ann"}, returns=str) == "Hello, Ann!"
        task = await client.start_task("two")
        assert text_of(await task.result()) == "First? and Second?"
        assert sorted(user.asked) == ["First?", "Second?"]
        task = await client.start_task("compute", {"seconds": 50})
        await task.cancel()
        with pytest.raises(TaskCancelled):
            await task.result()
