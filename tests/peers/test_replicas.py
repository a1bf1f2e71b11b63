"""Three processes of one server behind nginx, which sends each request to the next process.

The store is a file or Redis.  The clients close each connection after one response, so that consecutive requests reach
different processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.http.client import HttpClient, Stream, request, response
from tests.http.scripted_server import TOOLS, UPDATED, C, D, play_call, play_params, text_of
from tests.peers.replicas import Replicas, running_replicas
from tests.redis_server import redis_server
from trio_mcp import Accepted, open_client
from trio_mcp.core import META_CLIENT_CAPABILITIES, TASKS_EXTENSION

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]

ANSWER = {"action": "accept", "content": {"size": 3}}
TASKS = {META_CLIENT_CAPABILITIES: {"elicitation": {"form": {}}, "extensions": {TASKS_EXTENSION: {}}}}
PATIENCE = 60.0  # seconds, on a busy machine


@contextmanager
def started(kind: str, folder: Path) -> Iterator[Replicas]:
    if kind == "file":
        with running_replicas(str(folder / "store.db")) as replicas:
            yield replicas
    else:
        with redis_server() as redis, running_replicas(redis.url) as replicas:
            yield replicas


KINDS = ["file", "redis"]


@pytest.fixture(params=KINDS, scope="module")
def replicas(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with started(request.param, tmp_path_factory.mktemp("replicas")) as replicas:
        yield replicas


@asynccontextmanager
async def visiting(replicas: Replicas, *ports: int, check: bool = True) -> AsyncIterator[list[HttpClient]]:
    """A client of the proxy, and a client of each process at these ports."""
    with trio.fail_after(PATIENCE):
        async with AsyncExitStack() as stack:
            webs = []
            for port in (replicas.port, *ports):
                web = HttpClient(
                    partial(trio.open_tcp_stream, "127.0.0.1", port),
                    host=f"127.0.0.1:{replicas.port}",
                    headers={"Connection": "close"},
                    check=check,
                )
                webs.append(await stack.enter_async_context(aclosing(web)))
            yield webs


async def until_message(stream: Stream, *methods: str) -> list[Any]:
    """Return the messages of a stream, up to the point where all of these methods have come."""
    seen: list[Any] = []
    while not set(methods) <= {each["method"] for each in seen}:
        seen.append(await stream.message())
    return seen


async def test_modern_calls_reach_all_processes(replicas: Replicas) -> None:
    async with visiting(replicas) as (web,):
        seen = {text_of((await web.call("tools/call", {"name": "process"})).message) for _ in range(9)}
        assert seen == {str(process.pid) for process in replicas.processes}


async def test_an_elicitation_is_answered_through_another_process(replicas: Replicas) -> None:
    async with visiting(replicas) as (web,):
        for _ in range(4):
            params: Any = play_params("ask", "ask", "say done")
            result = (await web.call("tools/call", params)).result
            for _ in range(2):
                answers = dict.fromkeys(result["inputRequests"], ANSWER)
                again = {**params, "requestState": result["requestState"], "inputResponses": answers}
                result = (await web.call("tools/call", again)).result
            assert result["content"][0]["text"] == "done"


async def test_our_client_works_with_replicas(replicas: Replicas) -> None:
    async def answer(*_: Any) -> Any:
        return Accepted({"size": 5})

    for mode in ("2026-07-28", D):
        with trio.fail_after(PATIENCE):
            async with open_client(
                f"http://127.0.0.1:{replicas.port}/mcp", revision=mode, elicitation=answer
            ) as client:
                for number in range(4):
                    result = await client.call_tool("play", {"steps": ["progress", "ask", f"say {number}"]})
                    assert result.content[0].text == str(number)  # type: ignore[union-attr]


async def test_a_task_is_started_polled_answered_and_cancelled_in_any_process(replicas: Replicas) -> None:
    async with visiting(replicas, check=False) as (web,):

        async def ask(method: str, params: Any) -> Any:
            return (await web.call(method, params, meta=TASKS)).result

        tasks = [
            (await ask("tools/call", {"name": "job", "arguments": {"seconds": seconds}}))["taskId"]
            for seconds in (0.1, 1000)
        ]
        for task in tasks:
            while (state := await ask("tasks/get", {"taskId": task}))["status"] != "input_required":  # noqa: ASYNC110
                await trio.sleep(0.05)
            answers = {key: {"action": "accept", "content": {"value": "yes"}} for key in state["inputRequests"]}
            await ask("tasks/update", {"taskId": task, "inputResponses": answers})
        while (state := await ask("tasks/get", {"taskId": tasks[0]}))["status"] != "completed":  # noqa: ASYNC110
            await trio.sleep(0.05)
        assert state["result"]["content"][0]["text"] == "yes"
        await ask("tasks/cancel", {"taskId": tasks[1]})
        for _ in range(3):
            assert (await ask("tasks/get", {"taskId": tasks[1]}))["status"] == "cancelled"


async def test_listeners_of_all_processes_get_notifications(replicas: Replicas) -> None:
    async with visiting(replicas, *replicas.ports) as (web, *webs):
        filter = {"toolsListChanged": True, "resourceSubscriptions": ["r://1"]}
        streams = [await web.open(request("subscriptions/listen", {"notifications": filter})) for web in webs]
        for stream in streams:
            await stream.message()
        await web.call("tools/call", play_params("tools", "touch r://1"))
        for stream in streams:
            await until_message(stream, TOOLS, UPDATED)
            await stream.aclose()


@pytest.mark.parametrize("revision", [C, D])
async def test_a_session_continues_if_each_request_reaches_another_process(revision: str, replicas: Replicas) -> None:
    async with visiting(replicas, *replicas.ports) as (web, *webs):
        session = await web.initialize(revision)
        await web.call("resources/subscribe", {"uri": "r://1"}, session=session)
        standing = await web.open(session=session)
        stream = await web.open(play_call("ask", "progress", revision=revision), session=session)
        question = await stream.message()
        await web.post(response(question["id"], ANSWER), session=session)
        assert text_of(await stream.response()) == "done"
        await web.call("tools/call", play_params("tools", "touch r://1"), session=session)
        await until_message(standing, TOOLS, UPDATED)
        after = standing.last_event_id
        await standing.aclose()
        await web.call("tools/call", play_params("touch r://1"), session=session)
        await trio.sleep(0.5)
        standing = await web.open(session=session, after=after)
        await until_message(standing, UPDATED)
        await standing.aclose()
        # The stream of a call is cut, and resumed.
        steps = ["progress", *["sleep 0.1", "progress"] * 10]
        stream = await web.open(play_call(*steps, id=77, revision=revision), session=session)
        seen = [(await stream.message())["params"]["progress"] for _ in range(3)]
        after = stream.last_event_id
        await stream.aclose()
        web.expect(play_call(id=77, revision=revision), session)
        resumed = await web.open(session=session, after=after)
        assert text_of(await resumed.response()) == "done"
        seen += [each["params"]["progress"] for each in resumed.seen if "params" in each]
        assert seen == list(range(seen[0], seen[0] + 11))
        assert (await web.end(session)).status == 204
        await trio.sleep(0.5)
        for each in webs:
            ping = request("ping", revision=revision)
            assert (await each.post(ping, session=session, revision=revision)).status == 404


@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_survives_a_killed_process(kind: str, tmp_path: Path) -> None:
    with started(kind, tmp_path) as replicas:
        await check_session_after_a_killed_process(replicas)


async def check_session_after_a_killed_process(replicas: Replicas) -> None:
    async with visiting(replicas, *replicas.ports[:2]) as (_, first, second):
        session = await first.initialize(D)
        call = await first.open(play_call("progress", "sleep 1000", id=5), session=session)
        await call.message()
        parked = (await first.call("tools/call", play_params("ask"))).result
        await trio.sleep(1)  # until its event is in the store
        os.kill(replicas.processes[0].pid, signal.SIGKILL)
        second._revisions[session] = D
        second.expect(play_call(id=5), session)
        resumed = await second.open(session=session, after=call.last_event_id)
        assert "has ended before it was answered" in (await resumed.response())["error"]["message"]
        assert text_of((await second.call("tools/call", play_params(), session=session)).message) == "done"
        answers = dict.fromkeys(parked["inputRequests"], ANSWER)
        again = {**play_params("ask"), "requestState": parked["requestState"], "inputResponses": answers}
        assert "has ended" in (await second.call("tools/call", again)).message["error"]["message"]
