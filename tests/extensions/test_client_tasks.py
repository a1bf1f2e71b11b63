"""The client of tasks, in both forms, on each transport in memory."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.client.matrix import Variant, client_of, each_transport_and_asgi
from tests.extensions.test_server_tasks import CORE, EXTENSION, Name, task_server
from tests.requirements import req
from trio_mcp import Client, Context, Elicit, RequestError, Server, TextContent, UsageError, open_client, serve_stream
from trio_mcp.client import CallNextRequest, ClientExtension, ExtensionCall
from trio_mcp.core import INTERNAL_ERROR, INVALID_PARAMS, RELATED_TASK, JsonObject, Question, Request
from trio_mcp.errors import ConnectionFailed, InputUnavailable, NoResponse, RemoteProtocolError
from trio_mcp.extensions.tasks import ClientTasks, TaskCancelled, TaskState, TaskStatus
from trio_mcp.types import CallNext, CallToolResult, FormElicitationRequest

BOTH = pytest.mark.parametrize("revision", [CORE, EXTENSION])
NEWER = pytest.mark.parametrize("revision", [EXTENSION])


def text(result: CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text


class User:
    """Fills in forms, and records the questions."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, request: FormElicitationRequest) -> dict[str, Any]:
        self.asked.append(request.message)
        return {name: True if name == "value" else request.message for name in request.fields}


class RecordedServer:
    """A server with a record of its requests."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.params: list[JsonObject] = []
        self.server = task_server(middleware=[self.watch])

    async def watch(self, ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        self.methods.append(request.method)
        self.params.append(request.params)
        return await call_next()


@asynccontextmanager
async def client_with_tasks(revision: str, server: Server | None = None, **options: Any) -> AsyncIterator[Client]:
    options.setdefault("tasks", True)
    async with open_client(server or task_server(), revision=revision, **options) as client:
        yield client


@req("xtask-03", "xtask-14", "xtask-51", "xtask-50", "task-08", "task-14", "task-16", "xtask-40", "task-12")
@each_transport_and_asgi(revisions=(CORE, EXTENSION), without=("child",), legacy_without=("http json",))
async def test_call_tool_waits_for_a_task(variant: Variant, autojump_clock: MockClock) -> None:
    user = User()
    async with client_of(variant, task_server(), tasks=True, elicitation=user) as client:
        with pytest.raises(RequestError, match="no protocol"):
            await client.call_tool("failing", {"kind": "protocol"})
        failed = await client.call_tool("failing", {"kind": "tool"})
        assert (failed.is_error, text(failed)) == (True, "no disk")
        assert await client.call_tool("greet", {"name": "Ann"}, returns=str) == "Hello, Ann!"
        asked = await client.call_tool("ask_first")
        assert text(asked) == "Hello, Who?!"
        assert user.asked == ["Who?"]
        task = await client.start_task("two")
        assert text(await task.result()) == "First? and Second?"


class LateStream(trio.abc.ReceiveStream):
    """A stream that delays data by half a second, and cancels the scopes in `cancels` when data arrives."""

    def __init__(self, stream: trio.abc.ReceiveStream, cancels: list[trio.CancelScope]) -> None:
        self._stream = stream
        self._cancels = cancels

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._stream.receive_some(max_bytes)
        await trio.sleep(0.5)
        for scope in self._cancels:
            scope.cancel()
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()


@req("cancel-09", "xtask-34")
@BOTH
@pytest.mark.parametrize("handle", [False, True])
@pytest.mark.parametrize("patience", [0.2, math.inf])
async def test_a_call_that_is_cancelled_as_its_task_begins_leaves_no_task(
    revision: str, handle: bool, patience: float, autojump_clock: MockClock
) -> None:
    """The client does not know the task when it is cancelled.  The answer comes later, or at that moment."""
    ended: list[str] = []
    server = Server("tasks")

    @server.tool(task="required")
    async def endless() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("stopped")

    @server.tool
    def plain() -> None: ...

    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, theirs)
        cancels: list[trio.CancelScope] = []
        stream = trio.StapledStream(ours, LateStream(ours, cancels))
        async with open_client(stream, revision=revision, tasks=True) as client:
            await client.list_tools()
            call: Any = client.start_task if handle else client.call_tool
            for tool in ("endless", "plain"):
                with trio.move_on_after(patience) as scope:
                    cancels[:] = [scope] if patience == math.inf else []
                    await call(tool)
                assert scope.cancelled_caught
                await trio.sleep(2)
                assert ended == ["stopped"]
            assert client.deviations == ()


@req("xtask-25", "xtask-26", "xtask-27", "task-27")
@BOTH
async def test_questions_are_answered_by_the_callbacks(revision: str, autojump_clock: MockClock) -> None:
    user = User()
    async with client_with_tasks(revision, elicitation=user) as client:
        task = await client.start_task("two")
        assert text(await task.result()) == "First? and Second?"
        assert sorted(user.asked) == ["First?", "Second?"]
        assert await task.value(str) == "First? and Second?"
        assert text(await task.result()) == "First? and Second?"  # the result can be read several times


@req("task-07", "task-05", "task-04", "task-02")
@pytest.mark.parametrize("revision", [CORE])
async def test_only_start_task_asks_for_a_task_if_the_tool_supports_it(
    revision: str, autojump_clock: MockClock
) -> None:
    recorded = RecordedServer()
    async with client_with_tasks(revision, recorded.server) as client:
        assert text(await client.call_tool("compute", {"seconds": 0})) == "computed, no task"
        assert text(await client.call_tool("greet", {"name": "Ann"})) == "Hello, Ann!"
        plain = await client.start_task("greet", {"name": "Ann"})
        assert (plain.id, plain.state.status) == ("", TaskStatus.COMPLETED)
        assert text(await plain.result()) == "Hello, Ann!"
        assert (await plain.status()).terminal
        with pytest.raises(UsageError, match="there is no task to cancel"):
            await plain.cancel()
        assert text(await (await client.start_task("compute", {"seconds": 0})).result()) == "computed, a task"
        calls = [
            params for method, params in zip(recorded.methods, recorded.params, strict=True) if method == "tools/call"
        ]
        assert ["task" in params for params in calls] == [False, False, False, True]
        assert recorded.methods.count("tools/list") == 1
    server = Server("plain")
    server.tool(name="plain")(lambda: "plain")
    async with client_with_tasks(revision, server) as client:
        assert text(await client.call_tool("plain")) == "plain"
        assert text(await (await client.start_task("plain")).result()) == "plain"


@req("xtask-15", "xtask-38", "task-63")
@BOTH
async def test_a_task_is_opened_again_by_its_id(revision: str, autojump_clock: MockClock) -> None:
    server = task_server()
    async with server.running():
        async with client_with_tasks(revision, server) as client:
            id = (await client.start_task("compute", {"seconds": 3})).id
        async with client_with_tasks(revision, server) as client:
            task = client.open_task(id)
            states = [state async for state in task]
            assert [state.status for state in (states[0], states[-1])] == [TaskStatus.WORKING, TaskStatus.COMPLETED]
            assert text(await task.result()) == "computed, a task"
            with pytest.raises(RequestError) as caught:
                await client.open_task("unknown").status()
            assert caught.value.code == INVALID_PARAMS


@req("cancel-09", "xtask-34", "xtask-35", "task-49")
@BOTH
async def test_cancelling_a_call_cancels_its_task(revision: str, autojump_clock: MockClock) -> None:
    recorded, ended = RecordedServer(), list[str]()

    @recorded.server.tool(task="required")
    async def endless() -> str:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("stopped")

    async with client_with_tasks(revision, recorded.server) as client:
        with trio.move_on_after(5) as scope:
            await client.call_tool("endless")
        assert scope.cancelled_caught
        await trio.sleep(1)
        assert ended == ["stopped"]
        assert recorded.methods.count("tasks/cancel") == 1
        with pytest.raises(trio.TooSlowError):
            await client.call_tool("endless", max_timeout=3)
        await trio.sleep(1)
        assert ended == ["stopped", "stopped"]
        task = await client.start_task("endless")
        with trio.move_on_after(5):
            await task.result()
        assert (await task.status()).status is TaskStatus.WORKING  # the timeout ends the wait, not the task
        await task.cancel()
        with pytest.raises(TaskCancelled, match="was cancelled"):
            await task.result()


@BOTH
async def test_a_question_without_a_callback_ends_the_call(revision: str, autojump_clock: MockClock) -> None:
    def refuse(request: FormElicitationRequest) -> None:
        raise RequestError(-1, "no user")

    recorded = RecordedServer()

    @recorded.server.tool(task="required")
    async def ask(ctx: Context) -> str:
        await ctx.ask(name=Elicit("Who?", Name))
        return "asked"

    async with client_with_tasks(revision, recorded.server, elicitation=refuse) as client:
        if revision == EXTENSION:
            with pytest.raises(InputUnavailable, match="no user"):
                await client.call_tool("ask")
            assert recorded.methods[-1] == "tasks/cancel"
        else:
            assert (await client.call_tool("ask")).is_error


@req("xtask-36", "xtask-12", "task-13")
@NEWER
async def test_the_client_listens_and_polls_seldom(revision: str, autojump_clock: MockClock) -> None:
    recorded = RecordedServer()
    start = trio.current_time()
    async with client_with_tasks(revision, recorded.server) as client:
        assert text(await client.call_tool("compute", {"seconds": 100})) == "computed, a task"
        assert trio.current_time() - start < 101
        assert recorded.methods.count("tasks/get") < 20
        assert client.open_task("x")._tasks._notices == {}


@req("xtask-47")
@NEWER
async def test_a_program_may_answer_the_questions_of_a_task(revision: str, autojump_clock: MockClock) -> None:
    async with client_with_tasks(revision, elicitation=User()) as client:
        task = await client.start_task("confirm")
        async for state in task:
            for question in state.questions:
                await task.answer({question.key: {"action": "accept", "content": {"value": True}}})
        assert text(await task.result()) == "confirmed: Accepted(value=True)"


@req("xtask-04")
@NEWER
async def test_a_task_in_answer_to_another_request_is_invalid(revision: str, autojump_clock: MockClock) -> None:
    server = task_server()

    @server.prompt
    def hello() -> str:
        return "hello"

    async with client_with_tasks(revision, server) as client:
        original = client._send

        async def altered(method: str, *args: Any, **how: Any) -> Any:
            result, params = await original(method, *args, **how)
            return ({**result, "resultType": "task", "taskId": "x", "status": "working"}, params)

        client._send = altered  # type: ignore[method-assign]
        with pytest.raises(RemoteProtocolError):
            await client.get_prompt("hello")


@NEWER
async def test_other_extensions_of_the_client_still_work(revision: str, autojump_clock: MockClock) -> None:
    other, seen = ClientExtension("com.example/other"), list[str]()

    @other.around("tools/call")
    async def watch(call: ExtensionCall, call_next: CallNextRequest) -> JsonObject:
        seen.append(call.method)
        return await call_next()

    server = task_server()
    server.extension("com.example/other")
    async with client_with_tasks(revision, server, extensions=[other]) as client:
        assert set(client.extensions) == {"com.example/other", "io.modelcontextprotocol/tasks"}
        assert text(await client.call_tool("compute", {"seconds": 1})) == "computed, a task"
        assert seen == ["tools/call"]


@BOTH
async def test_a_client_without_the_option_names_it_in_the_error(revision: str, autojump_clock: MockClock) -> None:
    async with client_with_tasks(revision, tasks=False) as client:
        with pytest.raises(UsageError, match="tasks=True"):
            client.open_task("x")
        with pytest.raises(RequestError) as caught:
            await client.call_tool("failing", {"kind": "tool"})
        if revision == EXTENSION:
            assert "these options of the client: tasks" in caught.value.__notes__[0]


@BOTH
async def test_a_poll_is_repeated_after_a_short_failure(revision: str, autojump_clock: MockClock) -> None:
    async with client_with_tasks(revision) as client:
        task = await client.start_task("compute", {"seconds": 3})
        waiting = task._waiting()
        original, failures = waiting.request, list[Exception]([ConnectionFailed("away")] * 3)

        async def request(method: str, params: JsonObject) -> JsonObject:
            if failures:
                raise failures.pop()
            return await original(method, params)

        waiting.request = request
        state: TaskState = await waiting.get()
        assert state.id == task.id
        failures += [ConnectionFailed("away")] * 5
        with pytest.raises(ConnectionFailed, match="away"):
            await waiting.get()
        waiting.failures = 0
        failures += [RequestError(INTERNAL_ERROR, "shutting down")] * 3
        assert (await waiting.get()).id == task.id
        failures += [RequestError(INTERNAL_ERROR, "shutting down")] * 5
        with pytest.raises(NoResponse, match=r"refuses tasks/get.*shutting down"):
            await waiting.get()


@BOTH
async def test_a_call_with_an_unreachable_task_may_have_run(revision: str, autojump_clock: MockClock) -> None:
    async with client_with_tasks(revision) as client:
        task = await client.start_task("compute", {"seconds": 3})

        async def request(method: str, params: JsonObject) -> JsonObject:
            raise ConnectionFailed("away")

        for cancels, kind, why in ((True, NoResponse, f"{task.id}.* goes on"), (False, ConnectionFailed, "away")):
            waiting = task._waiting()
            waiting.request = request
            with pytest.raises(kind, match=why) as caught:
                await waiting.drive(task.state, cancels=cancels)
            assert getattr(caught.value, "request_may_have_run", True)


@BOTH
async def test_a_cancelled_call_ends_also_if_the_server_cannot_cancel(revision: str, autojump_clock: MockClock) -> None:
    recorded = RecordedServer()
    server = recorded.server

    @server.tool(task="required")
    async def endless() -> None:
        await trio.sleep_forever()

    async def refuse_to_cancel(ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        if request.method == "tasks/cancel":
            raise RequestError(-1, "not today")
        return await call_next()

    server._catalog.middleware = (*server._catalog.middleware, refuse_to_cancel)
    async with client_with_tasks(revision, server) as client:
        with trio.move_on_after(5) as scope:
            await client.call_tool("endless")
        assert scope.cancelled_caught
        assert "tasks/cancel" in recorded.methods


@NEWER
async def test_a_server_without_listening_is_polled(revision: str, autojump_clock: MockClock) -> None:
    recorded = RecordedServer()

    async def refusing(ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        if request.method == "subscriptions/listen":
            raise RequestError(-1, "not here")
        return await call_next()

    recorded.server._catalog.middleware = (*recorded.server._catalog.middleware, refusing)
    async with client_with_tasks(revision, recorded.server) as client:
        assert text(await client.call_tool("compute", {"seconds": 10})) == "computed, a task"
        assert recorded.methods.count("tasks/get") >= 9


@pytest.mark.parametrize("meta", [None, [], "x", {RELATED_TASK: []}, {RELATED_TASK: {"taskId": "x" * 5000}}])
def test_progress_without_a_valid_task_id_is_dropped(meta: Any) -> None:
    tasks = ClientTasks()
    tasks.progressed({"progress": 1, "_meta": meta})
    assert not tasks._early


def test_early_progress_is_bounded() -> None:
    tasks = ClientTasks()
    for id in range(300):
        for progress in range(300):
            meta = {RELATED_TASK: {"taskId": str(id)}}
            tasks.progressed({"progress": progress, "message": "m" * 5000, "_meta": meta})
    assert sum(len(message or "") for kept in tasks._early.values() for *_, message in kept) <= 100 * 100 * 1024


@req("prog-11")
@pytest.mark.parametrize("revision", [CORE])
async def test_progress_of_a_task_reaches_the_caller(revision: str, autojump_clock: MockClock) -> None:
    server, got = task_server(), list[tuple[Any, ...]]()

    @server.tool(task="required")
    async def step_by_step(ctx: Context) -> str:
        for step in range(4):
            await ctx.progress(step, 4, f"step {step}" if step else None)
            await trio.sleep(0.4)
        return "done"

    async def report(*progress: Any) -> None:
        await trio.sleep(0.01)
        got.append(progress)

    async with client_with_tasks(revision, server) as client:
        assert text(await client.call_tool("step_by_step", on_progress=report)) == "done"
        assert got == [(0, 4, None), (1, 4, "step 1"), (2, 4, "step 2"), (3, 4, "step 3")]
        assert client.deviations == ()


@req("prog-11", "task-14", "task-27")
@BOTH
async def test_callbacks_get_the_states_and_progress_of_a_task_that_asks(
    revision: str, autojump_clock: MockClock
) -> None:
    server, states, got = task_server(), list[str](), list[float]()

    @server.tool(task="required")
    async def ask(ctx: Context) -> str:
        await ctx.elicit("Go on?", bool)
        for step in range(3):
            await ctx.progress(step)
            await trio.sleep(20)
        return "done"

    async def on_state(state: TaskState) -> None:
        states.append(state.status.value)

    def progressed(progress: float, total: float | None, message: str | None) -> None:
        got.append(progress)

    async with client_with_tasks(revision, server, elicitation=User()) as client:
        task = await client.start_task("ask", on_progress=progressed)
        result = await task.result(on_state=on_state, on_progress=progressed)
        assert text(result) == "done"
        assert list(dict.fromkeys(states)) == ["input_required", "working", "completed"]
        assert got == ([0, 1, 2] if revision == CORE else [])


@BOTH
async def test_a_task_that_is_cancelled_while_it_asks_has_no_result(revision: str, autojump_clock: MockClock) -> None:
    async def slowly(request: FormElicitationRequest) -> dict[str, Any]:
        await task.cancel()
        await trio.sleep(5)
        return {"value": True}

    async with client_with_tasks(revision, elicitation=slowly) as client:
        task = await client.start_task("confirm")
        with pytest.raises(TaskCancelled):
            await task.result()


# Tasks in the client, for requests of its server


def server_with_client_tasks(started: list[str]) -> Server:
    """A server that asks for a task of the client with its own requests, unlike the handlers of trio_mcp."""
    server = task_server()

    @server.tool
    async def ask(ctx: Context, cancel: bool = False) -> list[Any]:
        session = ctx._link
        assert session is not None
        schema = {"type": "object", "properties": {"name": {"type": "string"}}}
        params = {"message": "Who?", "requestedSchema": schema, "task": {"ttl": 60_000}}
        asking = Question("who", "elicitation/create", params)
        created = (await session._run.parking.send(ctx, session, [asking]))["who"]
        id = created["task"]["taskId"]
        got = await ctx.send_request("tasks/get", {"taskId": id})
        if cancel:
            got = await ctx.send_request("tasks/cancel", {"taskId": id})
            return [got["status"]]
        result = await ctx.send_request("tasks/result", {"taskId": id})
        listed = await ctx.send_request("tasks/list")
        return [got["status"], result["action"], result["content"], len(listed["tasks"]), got["ttl"]]

    return server


@req("task-01", "task-17", "task-33", "task-36", "task-46", "task-51")
@pytest.mark.parametrize("revision", [CORE])
async def test_the_client_keeps_tasks_for_its_server(revision: str, autojump_clock: MockClock) -> None:
    asked: list[str] = []

    async def slowly(request: FormElicitationRequest) -> dict[str, Any]:
        asked.append(request.message)
        await trio.sleep(5)
        asked.append("answered")
        return {"name": "Ann"}

    server = server_with_client_tasks(asked)

    @server.tool
    async def wrong(ctx: Context) -> str:
        for method in ("tasks/get", "tasks/result", "tasks/cancel"):
            with pytest.raises(RequestError, match="there is no task"):
                await ctx.send_request(method, {"taskId": "x"})
        assert await ctx.send_request("tasks/list") == {"tasks": []}
        return str(ctx.supports("tasks", "requests", "elicitation", "create"))

    async with client_with_tasks(revision, server, elicitation=slowly) as client:
        assert text(await client.call_tool("wrong")) == "True"
        result = await client.call_tool("ask", returns=list[Any])
        assert result == ["working", "accept", {"name": "Ann"}, 1, 60_000]
        assert await client.call_tool("ask", {"cancel": True}, returns=list[Any]) == ["cancelled"]
        await trio.sleep(10)
        assert asked == ["Who?", "answered", "Who?"]


@pytest.mark.parametrize("revision", [CORE])
async def test_a_callback_that_fails_fails_its_task(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: FormElicitationRequest) -> dict[str, Any]:
        raise ValueError("secret") if raises_value_error else RequestError(-7, "no user")

    raises_value_error = True
    async with client_with_tasks(revision, server_with_client_tasks([]), elicitation=fail) as client:
        failed = await client.call_tool("ask")
        assert failed.is_error
        assert "the task has failed" in text(failed)
        assert "secret" in caplog.text
        raises_value_error = False
        assert "no user" in text(await client.call_tool("ask"))
