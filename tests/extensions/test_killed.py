"""Server processes are killed at random moments, many times, and lose no task that a client knows."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.extensions.killable_server import LEASE
from tests.redis_server import RedisServer, redis_server
from trio_mcp import Client, RequestError, open_client
from trio_mcp.client import ClientOptions
from trio_mcp.errors import ConnectionFailed, NoResponse, SessionClosed
from trio_mcp.extensions.tasks import ClientTask, TaskState, TaskStatus

ROOT = Path(__file__).parents[2]
CLIENTS = 4
SHORT_RUN, LONG_RUN = 1.0, 3.0  # maximum seconds of a run without clients, maybe before it listens, and with clients
LAST_RUN = 120.0  # seconds in which all tasks end, when the server is no longer killed
# The tests answer questions by their keys.  The callback only declares the capability.
OPTIONS: ClientOptions = {"tasks": True, "revision": "2026-07-28", "elicitation": lambda form: {}}
TOOLS = ("once", "once", "again", "asks")
LOST = "the server stopped while this task ran"
STORE_FAILED = "the store of the tasks does not work"  # on a very busy machine Redis may need a second


@attrs.define(eq=False)
class KnownTask:
    """A task that a client knows."""

    id: str
    tool: str
    token: str
    ended: TaskState | None = None
    answered: set[str] = attrs.field(factory=set)


@attrs.define(eq=False)
class Scenario:
    folder: Path
    dice: random.Random
    redis: RedisServer | None = None
    known: list[KnownTask] = attrs.field(factory=list)
    violations: list[str] = attrs.field(factory=list)
    begun: int = 0
    runs_with_clients: int = 0

    def check_state(self, task: KnownTask, state: TaskState, ended: TaskState | None, answered: Set[str]) -> None:
        """Check a state that a client has got; `ended` and `answered` are the facts before its request."""
        if ended is not None and repr(state) != repr(ended):  # by `repr`, because errors are equal only to themselves
            self.violations.append(f"{task.token} was {ended}, and is {state}")
        if answered & {each.key for each in state.questions}:
            self.violations.append(f"{task.token} asks {state.questions} again")
        if not state.terminal or task.ended is not None:
            return
        task.ended = state
        output = "" if state.result is None else state.result["content"][0]["text"]
        if state.status is TaskStatus.COMPLETED:
            wanted = f"done {task.token}" + (" 0 1" if task.tool == "asks" else "")
            if output != wanted:
                self.violations.append(f"{task.token} returned {output!r}")
        elif state.status is TaskStatus.FAILED and (task.tool != "once" or LOST not in str(state.error)):
            self.violations.append(f"{task.token} failed: {state.error}")


async def run_client(scenario: Scenario, url: str, life: trio.CancelScope, seconds: float) -> None:
    """Start tasks and check tasks.  The run of the server ends some `seconds` after this client is open."""
    try:
        async with open_client(url, **OPTIONS) as client:
            life.deadline = min(life.deadline, trio.current_time() + seconds)
            while True:
                with tolerate_outage():
                    await random_action(scenario, client)
                await trio.sleep(scenario.dice.uniform(0, 0.02))
    except (ConnectionFailed, SessionClosed):
        return  # the server was killed


@contextmanager
def tolerate_outage() -> Iterator[None]:
    """Ignore an error that says that the store does not answer; the caller tries again later."""
    try:
        yield
    except (RequestError, NoResponse) as error:  # `NoResponse` comes after several polls
        if STORE_FAILED not in str(error):
            raise


async def random_action(scenario: Scenario, client: Client) -> None:
    dice = scenario.dice
    choice = dice.random()
    if choice < 0.5 or not scenario.known:
        scenario.begun += 1
        tool, token = dice.choice(TOOLS), f"t{scenario.begun}"
        task = await client.start_task(tool, {"token": token, "seconds": dice.choice((0, 0.02, 0.3))})
        known = KnownTask(task.id, tool, token)
        scenario.known.append(known)
        scenario.check_state(known, task.state, None, frozenset())
        return
    # Mostly one of the newest tasks, because a task that has ended does not change any more.
    number = len(scenario.known) - 1 - min(int(dice.expovariate(1 / 20)), len(scenario.known) - 1)
    known = scenario.known[number if choice < 0.9 else dice.randrange(len(scenario.known))]
    task = client.open_task(known.id)
    if choice > 0.97:
        await task.cancel()
    await check_task(scenario, known, task)


async def check_task(scenario: Scenario, known: KnownTask, task: ClientTask) -> None:
    """Get and check the state of a task, and answer its questions."""
    ended, answered = known.ended, frozenset(known.answered)  # before the request: other clients use the same task
    state = await task.status()
    scenario.check_state(known, state, ended, answered)
    for each in state.questions:
        number = each.params["message"].split()[1].rstrip("?")
        await task.answer({each.key: {"action": "accept", "content": {"value": number}}})
        known.answered.add(each.key)


async def run_server_until_killed(scenario: Scenario) -> None:
    """One run of a server process, mostly with clients."""
    async with server_process(scenario) as process:
        if scenario.dice.random() < 0.2:
            await trio.sleep(scenario.dice.uniform(0, SHORT_RUN))
            return
        with trio.fail_after(LAST_RUN):
            url = await url_of(process)
        scenario.runs_with_clients += 1
        with trio.fail_after(LAST_RUN), trio.CancelScope() as life:
            async with trio.open_nursery() as nursery:
                for _ in range(CLIENTS):
                    nursery.start_soon(run_client, scenario, url, life, scenario.dice.uniform(0, LONG_RUN))


class server_process:
    """A server process, which is killed at the end of the block."""

    def __init__(self, scenario: Scenario) -> None:
        url = [] if scenario.redis is None else [scenario.redis.url]
        self._command = [sys.executable, "-m", "tests.extensions.killable_server", str(scenario.folder), *url]

    async def __aenter__(self) -> trio.Process:
        self._process = await trio.lowlevel.open_process(self._command, stdout=subprocess.PIPE, cwd=ROOT)
        return self._process

    async def __aexit__(self, *_: Any) -> None:
        assert self._process.poll() is None
        self._process.kill()
        with trio.CancelScope(shield=True):
            await self._process.wait()
            assert self._process.stdout is not None
            await self._process.stdout.aclose()


async def url_of(process: trio.Process) -> str:
    output = b""
    assert process.stdout is not None
    while not output.endswith(b"\n"):
        more = await process.stdout.receive_some()
        assert more, "the server did not start"
        output += more
    return output.decode().strip()


async def check_all_end(scenario: Scenario) -> None:
    """Run the server once more, without a kill, until each task has ended."""
    async with server_process(scenario) as process, open_client(await url_of(process), **OPTIONS) as client:
        left = scenario.known
        with trio.fail_after(LAST_RUN + len(left) / 20):
            while left:
                for known in left:
                    with tolerate_outage():
                        await check_task(scenario, known, client.open_task(known.id))
                left = [known for known in scenario.known if known.ended is None]
                await trio.sleep(0.1)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("rounds", "processes"),
    [
        pytest.param(4, 1, marks=pytest.mark.full),
        (3, 2),
        pytest.param(200, 1, marks=pytest.mark.long),
        pytest.param(100, 2, marks=pytest.mark.long),
    ],
)
async def test_a_server_that_is_killed_loses_no_task(rounds: int, processes: int, tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, random.Random(rounds))
    await kill_repeatedly(scenario, rounds, processes)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("rounds", "processes"),
    [pytest.param(5, 2, marks=pytest.mark.full), pytest.param(200, 2, marks=pytest.mark.long)],
)
async def test_a_server_that_is_killed_loses_no_task_in_redis(rounds: int, processes: int, tmp_path: Path) -> None:
    with redis_server() as redis:
        await kill_repeatedly(Scenario(tmp_path, random.Random(rounds), redis), rounds, processes)


async def kill_repeatedly(scenario: Scenario, rounds: int, processes: int) -> None:
    for _ in range(rounds):
        async with trio.open_nursery() as nursery:
            for _ in range(processes):  # on the same store; each has its own clients, which use all tasks
                nursery.start_soon(run_server_until_killed, scenario)
    await check_all_end(scenario)
    runs = Counter((scenario.folder / "runs").read_text().split())
    ended = Counter(f"{known.tool} {known.ended.status.value}" for known in scenario.known if known.ended)
    twice = sum(count > 1 for count in runs.values())
    figures = f"{len(scenario.known)} tasks, {dict(ended)}, {twice} ran again"
    sys.stdout.write(f"{rounds} rounds, {scenario.runs_with_clients} runs with clients: {figures}\n")
    assert scenario.violations == []
    # task-31: a task without replay has not run twice.
    assert [known.token for known in scenario.known if known.tool == "once" and runs[known.token] > 1] == []
    assert len(scenario.known) > rounds


@pytest.mark.full
async def test_a_stopped_process_does_not_finish_tasks_that_were_taken_over(tmp_path: Path) -> None:
    with redis_server() as redis, trio.fail_after(LAST_RUN):
        scenario = Scenario(tmp_path, random.Random(0), redis)
        async with server_process(scenario) as sleeper, open_client(await url_of(sleeper), **OPTIONS) as client:
            tasks = {
                tool: (await client.start_task(tool, {"token": tool, "seconds": 3 * LEASE})).id
                for tool in ("once", "again")
            }
            await wait_for_runs(scenario, "once", "again")
            sleeper.send_signal(signal.SIGSTOP)
            async with server_process(scenario) as other, open_client(await url_of(other), **OPTIONS) as another:
                once, again = (another.open_task(tasks[tool]) for tool in ("once", "again"))
                with pytest.raises(RequestError, match=LOST):
                    await once.result()
                await wait_for_runs(scenario, "once", "again", "again")
                sleeper.send_signal(signal.SIGCONT)
                # The handlers of the stopped process have now ended, or end soon.
                assert (await client.open_task(tasks["once"]).status()).status is TaskStatus.FAILED
                await trio.sleep(LEASE)
                assert (await again.status()).status is TaskStatus.WORKING
                assert (await again.result()).content[0].text == "done again"
                assert (await once.status()).status is TaskStatus.FAILED
        await wait_for_runs(scenario, "once", "again", "again")


async def wait_for_runs(scenario: Scenario, *tokens: str) -> None:
    """Wait until handlers have begun with exactly these tokens."""
    while (scenario.folder / "runs").read_text().split() != [*tokens]:  # noqa: ASYNC110  # other processes write it
        await trio.sleep(0.01)
