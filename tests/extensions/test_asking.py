"""Questions that the client answers with tasks: one handler for all revisions, and the tasks of 2025-11-25."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.client.matrix import Variant, client_of, each_transport_and_asgi
from tests.requirements import req
from tests.server.raw_client import CANCELLED, CAPABILITIES, ErrorResponse, RawClient, connected, every_revision
from trio_mcp import Context, Elicit, Limits, RequestError, Sample, Server, open_client
from trio_mcp.core import CORE_TASKS, INTERNAL_ERROR, INVALID_PARAMS, RELATED_TASK
from trio_mcp.errors import SessionClosed
from trio_mcp.relay import open_relay
from trio_mcp.types import FormElicitationRequest, SamplingRequest

CORE = CORE_TASKS.name
TASKS: dict[str, Any] = {
    "list": {},
    "cancel": {},
    "requests": {"elicitation": {"create": {}}, "sampling": {"createMessage": {}}},
}


def asking_server(**options: Any) -> Server:
    server = Server("asking", **options)

    @server.tool
    async def confirm(ctx: Context) -> str:
        """Ask the user, with an answer that may come later."""
        return repr(await ctx.elicit("Really?", bool, task=True))

    @server.tool
    async def summarize(ctx: Context) -> str:
        return (await ctx.sample("Why?", max_tokens=10, task=True)).content.text  # type: ignore[union-attr]

    @server.tool
    async def both(ctx: Context) -> str:
        answers = await ctx.ask(sure=Elicit("Sure?", bool, task=True), why=Sample("Why?", max_tokens=10, task=True))
        return f"{answers['sure'].value}, {answers['why'].content.text}"

    @server.tool
    async def confirm_with_timeout(ctx: Context) -> str:
        with trio.move_on_after(10):
            return repr(await ctx.elicit("Really?", bool, task=True))
        return "no answer"

    @server.tool
    async def confirm_or_error(ctx: Context) -> str:
        try:
            return repr(await ctx.elicit("Really?", bool, task=True))
        except (RequestError, SessionClosed) as error:
            return str(error)

    @server.tool(task="optional")
    async def inside(ctx: Context) -> str:
        return repr(await ctx.elicit("Really?", bool, task=True))

    return server


# The client of trio_mcp


@req("task-01", "task-02", "task-03", "task-33", "task-36", "task-12")
@each_transport_and_asgi(without=("child",), legacy_without=("http json",))
async def test_one_handler_asks_in_each_revision(variant: Variant, autojump_clock: MockClock) -> None:
    async def user(request: FormElicitationRequest) -> dict[str, Any]:
        await trio.sleep(100)
        return {"value": True}

    async def model(request: SamplingRequest) -> tuple[str, str]:
        await trio.sleep(50)
        return "because", "a model"

    async with client_of(variant, asking_server(), tasks=True, elicitation=user, sampling=model) as client:
        assert await client.call_tool("summarize", returns=str) == "because"
        if variant.revision >= "2025-06-18":
            assert await client.call_tool("confirm", returns=str) == "Accepted(value=True)"
            assert await client.call_tool("both", returns=str) == "True, because"
            assert await client.call_tool("inside", returns=str) == "Accepted(value=True)"
        assert client.deviations == ()


@pytest.mark.parametrize("by_task", [False, True])
@pytest.mark.parametrize("seconds", [0.5, 100])
async def test_the_limits_of_questions_are_the_same_with_and_without_tasks(
    by_task: bool, seconds: float, autojump_clock: MockClock
) -> None:
    server = Server("asking")
    outcomes: Counter[str] = Counter()

    @server.tool
    async def flood(ctx: Context) -> None:
        async def ask() -> None:
            try:
                outcomes[repr(await ctx.elicit("Really?", bool, task=by_task))] += 1
            except RequestError as error:
                outcomes[error.message[:49]] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(ask)

    async def user(request: FormElicitationRequest) -> dict[str, Any]:
        await trio.sleep(seconds)
        return {"value": True}

    limits = Limits(questions=4, questions_waiting=8)
    async with open_client(server, revision=CORE, tasks=True, elicitation=user, limits=limits) as client:
        await client.call_tool("flood")
        assert outcomes == {"Accepted(value=True)": 12, "the client answers 4 questions at once (Limits.qu": 38}
        outcomes.clear()
        await client.call_tool("flood")  # the limits are free again
        assert outcomes["Accepted(value=True)"] == 12


async def test_the_bytes_of_questions_that_are_answered_later_are_bounded(autojump_clock: MockClock) -> None:
    server, outcomes = Server("asking"), []

    @server.tool
    async def flood(ctx: Context) -> None:
        async def ask() -> None:
            try:
                outcomes.append(repr(await ctx.elicit("?" * 10_000, bool, task=True)))
            except RequestError as error:
                outcomes.append(error.message)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)

    async def user(request: FormElicitationRequest) -> dict[str, Any]:
        await trio.sleep(100)
        return {"value": True}

    limits = Limits(bytes_each=25_000)
    async with open_client(server, revision=CORE, tasks=True, elicitation=user, limits=limits) as client:
        await client.call_tool("flood")
        why = "the questions that the client holds are too large (Limits.bytes_each); ask again later"
        assert sorted(outcomes) == ["Accepted(value=True)"] * 2 + [why] * 3


async def test_a_refused_question_frees_its_place(autojump_clock: MockClock) -> None:
    limits = Limits(questions=1, questions_waiting=0, tasks=0)
    async with open_client(
        asking_server(), revision=CORE, tasks=True, elicitation=lambda _: {"value": True}, limits=limits
    ) as client:
        for _ in range(3):
            assert "Limits.tasks" in await client.call_tool("confirm_or_error", returns=str)


@every_revision
async def test_a_relay_answers_the_questions_of_its_server_with_tasks(revision: str, autojump_clock: MockClock) -> None:
    sent: list[bytes] = []

    async with (
        open_relay(asking_server(), revision=CORE, tap=lambda _, data: sent.append(data)) as relay,
        open_client(relay, revision=revision, sampling=lambda request: ("because", "a model")) as client,
    ):
        assert await client.call_tool("summarize", returns=str) == "because"
    assert any(b'"tasks/result"' in data for data in sent)


# A client with handwritten JSON


class HandwrittenTasks:
    """The tasks of a client, and the requests that it got.  Each task ends at its poll number `polls`."""

    def __init__(
        self, wire: RawClient, *, polls: int = 3, status: str = "completed", ttl: float | None = 60_000
    ) -> None:
        self.requests: list[tuple[str, dict[str, Any], float]] = []
        self._polls: dict[str, int] = {}
        self._after, self._status, self._ttl = polls, status, ttl
        self.outcome: Any = {"action": "accept", "content": {"value": True}}
        for method in ("elicitation/create", "tasks/get", "tasks/result", "tasks/cancel"):
            wire.answers[method] = lambda params, method=method: self._answer(method, params)  # type: ignore[misc]

    @property
    def methods(self) -> list[str]:
        return [method for method, _, _ in self.requests]

    def _answer(self, method: str, params: dict[str, Any]) -> Any:
        self.requests.append((method, params, trio.current_time()))
        if method == "elicitation/create":
            id = f"q-{len(self._polls)}"
            self._polls[id] = 0
            return {"task": self._task(id)}
        id = params["taskId"]
        if method == "tasks/get":
            self._polls[id] += 1
            return self._task(id)
        if method == "tasks/result" and isinstance(self.outcome, dict):
            return {**self.outcome, "_meta": {RELATED_TASK: {"taskId": id}}}
        return self.outcome if method == "tasks/result" else {**self._task(id), "status": "cancelled"}

    def _task(self, id: str) -> dict[str, Any]:
        date = "2026-01-01T00:00:00Z"
        status = self._status if self._polls[id] >= self._after else "working"
        return {
            "taskId": id, "status": status, "createdAt": date, "lastUpdatedAt": date,
            "ttl": self._ttl, "pollInterval": 2000,
        }  # fmt: skip


@asynccontextmanager
async def client_with_tasks(
    server: Server | None = None, tasks: dict[str, Any] = TASKS, **how: Any
) -> AsyncIterator[Any]:
    """A client that answers questions with tasks."""
    declared = {**CAPABILITIES[CORE], "tasks": tasks}
    async with connected(server or asking_server(), CORE, capabilities=declared) as wire:
        yield wire, HandwrittenTasks(wire, **how)


async def text_of(wire: RawClient, name: str) -> str:
    result = await wire.call("tools/call", {"name": name, "arguments": {}})
    return str(result["content"][0]["text"])


@req("task-02", "task-10", "task-13", "task-14", "task-16", "task-38")
async def test_the_server_polls_at_the_interval_and_fetches_the_result(autojump_clock: MockClock) -> None:
    async with client_with_tasks(asking_server(limits=Limits(task_seconds=100))) as (wire, client_tasks):
        begun = trio.current_time()
        assert await text_of(wire, "confirm") == "Accepted(value=True)"
        assert client_tasks.methods == ["elicitation/create", "tasks/get", "tasks/get", "tasks/get", "tasks/result"]
        assert [round(time - begun) for _, _, time in client_tasks.requests] == [0, 2, 4, 6, 6]
        (_, asked, _), *others = client_tasks.requests
        assert asked["task"] == {"ttl": 100_000}
        assert all(params == {"taskId": "q-0"} for _, params, _ in others)


@req("task-27")
async def test_the_server_requests_the_result_of_a_task_that_needs_input(autojump_clock: MockClock) -> None:
    async with client_with_tasks(
        asking_server(limits=Limits(task_seconds=float("inf"))), polls=1, status="input_required"
    ) as (
        wire,
        client_tasks,
    ):
        assert await text_of(wire, "confirm") == "Accepted(value=True)"
        assert client_tasks.methods == ["elicitation/create", "tasks/get", "tasks/result"]
        assert client_tasks.requests[0][1]["task"] == {}


@req("task-17", "task-03", "task-02")
@pytest.mark.parametrize("tasks", [{}, {"requests": {"sampling": {"createMessage": {}}}}, TASKS])
async def test_a_client_may_answer_without_a_task(tasks: Any, autojump_clock: MockClock) -> None:
    async with client_with_tasks(tasks=tasks) as (wire, client_tasks):
        asked: list[dict[str, Any]] = []

        def at_once(params: dict[str, Any]) -> Any:
            asked.append(params)
            return client_tasks.outcome

        wire.answers["elicitation/create"] = at_once
        assert await text_of(wire, "confirm") == "Accepted(value=True)"
        # A client may declare tasks and still answer at once.
        assert ["task" in params for params in asked] == [tasks is TASKS]


async def test_clients_of_older_revisions_have_no_tasks(autojump_clock: MockClock) -> None:
    declared = {"elicitation": {}, "tasks": TASKS}
    async with connected(asking_server(), "2025-06-18", capabilities=declared) as wire:
        wire.answers["elicitation/create"] = lambda params: {"action": "decline"}
        assert await text_of(wire, "confirm") == "Declined()"
        ((_, params),) = wire.asked
        assert "task" not in params


@req("cancel-09", "task-66")
@pytest.mark.parametrize("cancel", [True, False])
async def test_a_cancelled_question_cancels_its_task(cancel: bool, autojump_clock: MockClock) -> None:
    tasks = TASKS if cancel else {"requests": TASKS["requests"]}
    async with client_with_tasks(tasks=tasks, polls=1000) as (wire, client_tasks):
        assert await text_of(wire, "confirm_with_timeout") == "no answer"
        await trio.sleep(1)
        assert (client_tasks.methods[-1] == "tasks/cancel") is cancel
        assert not wire.noted(CANCELLED)
        id = await wire.start("tools/call", {"name": "confirm", "arguments": {}})
        await trio.sleep(5)
        await wire.cancel(id)
        await trio.sleep(1)
        assert (client_tasks.requests[-1][:2] == ("tasks/cancel", {"taskId": "q-1"})) is cancel
        seen = len(client_tasks.requests)
        await trio.sleep(100)
        assert len(client_tasks.requests) == seen


async def test_the_server_does_not_wait_for_the_answer_to_a_cancellation(autojump_clock: MockClock) -> None:
    async with client_with_tasks(polls=1000) as (wire, client_tasks):
        wire.answers["tasks/cancel"] = lambda params: trio.Event().wait()
        begun = trio.current_time()
        assert await text_of(wire, "confirm_with_timeout") == "no answer"
        assert trio.current_time() - begun == pytest.approx(10)
        await trio.sleep(60)
        await wire.call("tools/list")
        assert len(wire.noted(CANCELLED)) == 1  # the request has a deadline
        assert "tasks/cancel" not in client_tasks.methods


@req("task-29")
@pytest.mark.parametrize(("ttl", "seconds"), [(5000, 5), (None, 50), (10**9, 50)])
async def test_the_wait_for_an_answer_is_bounded(ttl: float | None, seconds: int, autojump_clock: MockClock) -> None:
    async with client_with_tasks(asking_server(limits=Limits(task_seconds=50)), polls=1000, ttl=ttl) as (
        wire,
        client_tasks,
    ):
        begun = trio.current_time()
        why = await text_of(wire, "confirm_or_error")
        assert why == f"the client did not answer elicitation/create within {seconds} seconds, the ttl of its task"
        assert trio.current_time() - begun == pytest.approx(seconds)
        await trio.sleep(1)
        assert client_tasks.methods[-1] == "tasks/cancel"


async def test_a_question_fails_if_the_client_does_not_know_its_task(autojump_clock: MockClock) -> None:
    async with client_with_tasks() as (wire, client_tasks):
        wire.answers["tasks/get"] = lambda params: ErrorResponse(INVALID_PARAMS, "no such task")
        assert "no such task" in await text_of(wire, "confirm_or_error")
        assert client_tasks.methods == ["elicitation/create"]


@req("task-35")
async def test_a_failed_task_fails_the_question_as_its_request_would(autojump_clock: MockClock) -> None:
    async with client_with_tasks(status="failed") as (wire, client_tasks):
        client_tasks.outcome = ErrorResponse(-1, "the user has left")
        assert "the user has left" in await text_of(wire, "confirm_or_error")


@pytest.mark.parametrize("refusals", [4, 5])
@pytest.mark.parametrize("method", ["tasks/get", "tasks/result"])
async def test_a_request_is_repeated_if_the_client_has_too_many_requests(
    method: str, refusals: int, autojump_clock: MockClock
) -> None:
    async with client_with_tasks() as (wire, _):
        left, answer = [refusals], wire.answers[method]

        def refuse(params: dict[str, Any]) -> Any:
            left[0] -= 1
            return answer(params) if left[0] < 0 else ErrorResponse(INTERNAL_ERROR, "too many requests")

        wire.answers[method] = refuse
        said = await text_of(wire, "confirm_or_error")
        assert said == "Accepted(value=True)" if refusals == 4 else "too many requests" in said


async def test_an_invalid_state_fails_the_question(autojump_clock: MockClock) -> None:
    async with client_with_tasks() as (wire, client_tasks):
        wire.answers["tasks/get"] = lambda params: {"taskId": "q-0", "status": "perhaps"}
        result = await wire.call("tools/call", {"name": "confirm_or_error", "arguments": {}})
        assert result["isError"]
        await trio.sleep(1)
        assert client_tasks.methods == ["elicitation/create", "tasks/cancel"]


async def test_a_failed_question_cancels_the_others(autojump_clock: MockClock) -> None:
    async with client_with_tasks(polls=1000) as (wire, client_tasks):
        wire.answers["sampling/createMessage"] = lambda params: ErrorResponse(-1, "no model")
        result = await wire.call("tools/call", {"name": "both", "arguments": {}})
        assert result["isError"]
        await trio.sleep(1)
        assert client_tasks.methods[-1] in ("tasks/cancel", "elicitation/create")
        assert "tasks/get" not in client_tasks.methods


@req("task-26")
async def test_a_task_asks_its_question_with_a_task(autojump_clock: MockClock) -> None:
    async with client_with_tasks() as (wire, client_tasks):
        created = await wire.call("tools/call", {"name": "inside", "arguments": {}, "task": {}})
        id = created["task"]["taskId"]
        result = await wire.call("tasks/result", {"taskId": id})
        assert result["content"][0]["text"] == "Accepted(value=True)"
        (_, asked, _), *others = client_tasks.requests
        assert asked["_meta"] == {RELATED_TASK: {"taskId": id}}
        assert asked["task"] == {"ttl": 86_400_000}
        assert all(params == {"taskId": "q-0"} for _, params, _ in others)


async def test_a_task_asks_again_with_the_next_tasks_result(autojump_clock: MockClock) -> None:
    async with client_with_tasks(polls=1000) as (wire, client_tasks):
        created = await wire.call("tools/call", {"name": "inside", "arguments": {}, "task": {}})
        id = created["task"]["taskId"]
        first = await wire.start("tasks/result", {"taskId": id})
        await trio.sleep(5)
        await wire.cancel(first)
        await trio.sleep(1)
        assert client_tasks.methods[-1] == "tasks/cancel"
        client_tasks._after = 1
        result = await wire.call("tasks/result", {"taskId": id})
        assert result["content"][0]["text"] == "Accepted(value=True)"
        assert client_tasks.methods.count("elicitation/create") == 2
