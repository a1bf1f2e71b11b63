"""Tasks of a client, in both forms, on each transport in memory."""

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
from tests.extensions.test_server_tasks import CORE, EXTENSION, Name, serving
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
    """Fills in forms, and remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, request: FormElicitationRequest) -> dict[str, Any]:
        self.asked.append(request.message)
        return {name: True if name == "value" else request.message for name in request.fields}


class Heard:
    """A server whose requests are remembered."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.params: list[JsonObject] = []
        self.server = serving(middleware=[self.watch])

    async def watch(self, ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        self.methods.append(request.method)
        self.params.append(request.params)
        return await call_next()


@asynccontextmanager
async def visit(revision: str, server: Server | None = None, **options: Any) -> AsyncIterator[Client]:
    options.setdefault("tasks", True)
    async with open_client(server or serving(), revision=revision, **options) as client:
        yield client


@req("xtask-03", "xtask-14", "xtask-51", "xtask-50", "task-08", "task-14", "task-16", "xtask-40", "task-12")
@each_transport_and_asgi(revisions=(CORE, EXTENSION), without=("child",), legacy_without=("http json",))
async def test_call_tool_waits_for_a_task(variant: Variant, autojump_clock: MockClock) -> None:
    user = User()
    async with client_of(variant, serving(), tasks=True, elicitation=user) as client:
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


class Late(trio.abc.ReceiveStream):
    """Data that arrives half a second late; each scope of `cancels` is cancelled in the step in which some arrives."""

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
    """The client does not know of the task yet; it hears of it when the late answer comes, or in this very step."""
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
        stream = trio.StapledStream(ours, Late(ours, cancels))
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
    async with visit(revision, elicitation=user) as client:
        task = await client.start_task("two")
        assert text(await task.result()) == "First? and Second?"
        assert sorted(user.asked) == ["First?", "Second?"]
        assert await task.value(str) == "First? and Second?"
        assert text(await task.result()) == "First? and Second?"  # as often as it is wanted


@req("task-07", "task-05", "task-04", "task-02")
@pytest.mark.parametrize("revision", [CORE])
async def test_a_task_is_asked_for_only_where_the_tool_has_one(revision: str, autojump_clock: MockClock) -> None:
    heard = Heard()
    async with visit(revision, heard.server) as client:
        assert text(await client.call_tool("compute", {"seconds": 0})) == "computed, no task"
        assert text(await client.call_tool("greet", {"name": "Ann"})) == "Hello, Ann!"
        plain = await client.start_task("greet", {"name": "Ann"})
        assert (plain.id, plain.state.status) == ("", TaskStatus.COMPLETED)
        assert text(await plain.result()) == "Hello, Ann!"
        assert (await plain.status()).terminal
        with pytest.raises(UsageError, match="there is no task to cancel"):
            await plain.cancel()
        assert text(await (await client.start_task("compute", {"seconds": 0})).result()) == "computed, a task"
        calls = [params for method, params in zip(heard.methods, heard.params, strict=True) if method == "tools/call"]
        assert ["task" in params for params in calls] == [False, False, False, True]
        assert heard.methods.count("tools/list") == 1
    server = Server("plain")
    server.tool(name="plain")(lambda: "plain")
    async with visit(revision, server) as client:
        assert text(await client.call_tool("plain")) == "plain"
        assert text(await (await client.start_task("plain")).result()) == "plain"


@req("xtask-15", "xtask-38", "task-63")
@BOTH
async def test_a_task_is_opened_again_by_its_id(revision: str, autojump_clock: MockClock) -> None:
    server = serving()
    async with server.running():
        async with visit(revision, server) as client:
            id = (await client.start_task("compute", {"seconds": 3})).id
        async with visit(revision, server) as client:
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
    heard, ended = Heard(), list[str]()

    @heard.server.tool(task="required")
    async def endless() -> str:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("stopped")

    async with visit(revision, heard.server) as client:
        with trio.move_on_after(5) as scope:
            await client.call_tool("endless")
        assert scope.cancelled_caught
        await trio.sleep(1)
        assert ended == ["stopped"]
        assert heard.methods.count("tasks/cancel") == 1
        with pytest.raises(trio.TooSlowError):
            await client.call_tool("endless", max_timeout=3)
        await trio.sleep(1)
        assert ended == ["stopped", "stopped"]
        task = await client.start_task("endless")
        with trio.move_on_after(5):
            await task.result()
        assert (await task.status()).status is TaskStatus.WORKING  # only the waiting has ended
        await task.cancel()
        with pytest.raises(TaskCancelled, match="was cancelled"):
            await task.result()


@BOTH
async def test_a_question_without_a_callback_ends_the_call(revision: str, autojump_clock: MockClock) -> None:
    def refuse(request: FormElicitationRequest) -> None:
        raise RequestError(-1, "no user")

    heard = Heard()

    @heard.server.tool(task="required")
    async def ask(ctx: Context) -> str:
        await ctx.ask(name=Elicit("Who?", Name))
        return "asked"

    async with visit(revision, heard.server, elicitation=refuse) as client:
        if revision == EXTENSION:
            with pytest.raises(InputUnavailable, match="no user"):
                await client.call_tool("ask")
            assert heard.methods[-1] == "tasks/cancel"
        else:
            assert (await client.call_tool("ask")).is_error


@req("xtask-36", "xtask-12", "task-13")
@NEWER
async def test_the_client_listens_and_polls_seldom(revision: str, autojump_clock: MockClock) -> None:
    heard = Heard()
    start = trio.current_time()
    async with visit(revision, heard.server) as client:
        assert text(await client.call_tool("compute", {"seconds": 100})) == "computed, a task"
        assert trio.current_time() - start < 101
        assert heard.methods.count("tasks/get") < 20
        assert client.open_task("x")._tasks._notices == {}


@req("xtask-47")
@NEWER
async def test_a_program_may_answer_itself(revision: str, autojump_clock: MockClock) -> None:
    async with visit(revision, elicitation=User()) as client:
        task = await client.start_task("confirm")
        async for state in task:
            for question in state.questions:
                await task.answer({question.key: {"action": "accept", "content": {"value": True}}})
        assert text(await task.result()) == "confirmed: Accepted(value=True)"


@req("xtask-04")
@NEWER
async def test_a_task_in_answer_to_another_request_is_invalid(revision: str, autojump_clock: MockClock) -> None:
    server = serving()

    @server.prompt
    def hello() -> str:
        return "hello"

    async with visit(revision, server) as client:
        original = client._send

        async def altered(method: str, *args: Any, **how: Any) -> Any:
            result, params = await original(method, *args, **how)
            return ({**result, "resultType": "task", "taskId": "x", "status": "working"}, params)

        client._send = altered  # type: ignore[method-assign]
        with pytest.raises(RemoteProtocolError):
            await client.get_prompt("hello")


@NEWER
async def test_other_extensions_stay(revision: str, autojump_clock: MockClock) -> None:
    other, seen = ClientExtension("com.example/other"), list[str]()

    @other.around("tools/call")
    async def watch(call: ExtensionCall, call_next: CallNextRequest) -> JsonObject:
        seen.append(call.method)
        return await call_next()

    server = serving()
    server.extension("com.example/other")
    async with visit(revision, server, extensions=[other]) as client:
        assert set(client.extensions) == {"com.example/other", "io.modelcontextprotocol/tasks"}
        assert text(await client.call_tool("compute", {"seconds": 1})) == "computed, a task"
        assert seen == ["tools/call"]


@BOTH
async def test_a_client_without_the_option_says_so(revision: str, autojump_clock: MockClock) -> None:
    async with visit(revision, tasks=False) as client:
        with pytest.raises(UsageError, match="tasks=True"):
            client.open_task("x")
        with pytest.raises(RequestError) as caught:
            await client.call_tool("failing", {"kind": "tool"})
        if revision == EXTENSION:
            assert "these options of the client: tasks" in caught.value.__notes__[0]


@BOTH
async def test_a_server_that_is_away_for_a_moment_is_asked_again(revision: str, autojump_clock: MockClock) -> None:
    async with visit(revision) as client:
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
async def test_a_call_whose_task_cannot_be_reached_does_not_say_that_it_has_not_run(
    revision: str, autojump_clock: MockClock
) -> None:
    async with visit(revision) as client:
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
    heard = Heard()
    server = heard.server

    @server.tool(task="required")
    async def endless() -> None:
        await trio.sleep_forever()

    async def deaf(ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        if request.method == "tasks/cancel":
            raise RequestError(-1, "not today")
        return await call_next()

    server._catalog.middleware = (*server._catalog.middleware, deaf)
    async with visit(revision, server) as client:
        with trio.move_on_after(5) as scope:
            await client.call_tool("endless")
        assert scope.cancelled_caught
        assert "tasks/cancel" in heard.methods


@NEWER
async def test_a_server_without_listening_is_polled(revision: str, autojump_clock: MockClock) -> None:
    heard = Heard()

    async def refusing(ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        if request.method == "subscriptions/listen":
            raise RequestError(-1, "not here")
        return await call_next()

    heard.server._catalog.middleware = (*heard.server._catalog.middleware, refusing)
    async with visit(revision, heard.server) as client:
        assert text(await client.call_tool("compute", {"seconds": 10})) == "computed, a task"
        assert heard.methods.count("tasks/get") >= 9


@pytest.mark.parametrize("meta", [None, [], "x", {RELATED_TASK: []}, {RELATED_TASK: {"taskId": "x" * 5000}}])
def test_progress_of_no_task_is_dropped(meta: Any) -> None:
    tasks = ClientTasks()
    tasks.progressed({"progress": 1, "_meta": meta})
    assert not tasks._early


def test_early_progress_is_kept_within_bounds() -> None:
    tasks = ClientTasks()
    for id in range(300):
        for progress in range(300):
            meta = {RELATED_TASK: {"taskId": str(id)}}
            tasks.progressed({"progress": progress, "message": "m" * 5000, "_meta": meta})
    assert sum(len(message or "") for kept in tasks._early.values() for *_, message in kept) <= 100 * 100 * 1024


@req("prog-11")
@pytest.mark.parametrize("revision", [CORE])
async def test_progress_of_a_task_reaches_the_caller(revision: str, autojump_clock: MockClock) -> None:
    server, got = serving(), list[tuple[Any, ...]]()

    @server.tool(task="required")
    async def step_by_step(ctx: Context) -> str:
        for step in range(4):
            await ctx.progress(step, 4, f"step {step}" if step else None)
            await trio.sleep(0.4)
        return "done"

    async def report(*progress: Any) -> None:
        await trio.sleep(0.01)
        got.append(progress)

    async with visit(revision, server) as client:
        assert text(await client.call_tool("step_by_step", on_progress=report)) == "done"
        assert got == [(0, 4, None), (1, 4, "step 1"), (2, 4, "step 2"), (3, 4, "step 3")]
        assert client.deviations == ()


@req("prog-11", "task-14", "task-27")
@BOTH
async def test_states_and_progress_are_seen_beside_the_questions(revision: str, autojump_clock: MockClock) -> None:
    server, states, got = serving(), list[str](), list[float]()

    @server.tool(task="required")
    async def ask(ctx: Context) -> str:
        await ctx.elicit("Go on?", bool)
        for step in range(3):
            await ctx.progress(step)
            await trio.sleep(20)
        return "done"

    async def seen(state: TaskState) -> None:
        states.append(state.status.value)

    def progressed(progress: float, total: float | None, message: str | None) -> None:
        got.append(progress)

    async with visit(revision, server, elicitation=User()) as client:
        task = await client.start_task("ask", on_progress=progressed)
        result = await task.result(on_state=seen, on_progress=progressed)
        assert text(result) == "done"
        assert list(dict.fromkeys(states)) == ["input_required", "working", "completed"]
        assert got == ([0, 1, 2] if revision == CORE else [])


@BOTH
async def test_a_task_that_is_cancelled_while_it_asks_has_no_result(revision: str, autojump_clock: MockClock) -> None:
    async def slowly(request: FormElicitationRequest) -> dict[str, Any]:
        await task.cancel()
        await trio.sleep(5)
        return {"value": True}

    async with visit(revision, elicitation=slowly) as client:
        task = await client.start_task("confirm")
        with pytest.raises(TaskCancelled):
            await task.result()


# Tasks that the client keeps for its server


def later(started: list[str]) -> Server:
    """A server that asks for a task of the client, as no handler of ours does."""
    server = serving()

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

    server = later(asked)

    @server.tool
    async def wrong(ctx: Context) -> str:
        for method in ("tasks/get", "tasks/result", "tasks/cancel"):
            with pytest.raises(RequestError, match="there is no task"):
                await ctx.send_request(method, {"taskId": "x"})
        assert await ctx.send_request("tasks/list") == {"tasks": []}
        return str(ctx.supports("tasks", "requests", "elicitation", "create"))

    async with visit(revision, server, elicitation=slowly) as client:
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
    def broken(request: FormElicitationRequest) -> dict[str, Any]:
        raise ValueError("secret") if broken_once else RequestError(-7, "no user")

    broken_once = True
    async with visit(revision, later([]), elicitation=broken) as client:
        failed = await client.call_tool("ask")
        assert failed.is_error
        assert "the task has failed" in text(failed)
        assert "secret" in caplog.text
        broken_once = False
        assert "no user" in text(await client.call_tool("ask"))
