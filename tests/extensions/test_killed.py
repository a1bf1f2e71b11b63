"""Server processes that are killed at any moment, again and again, and lose no task that a client knows of."""

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

from tests.extensions.mortal import LEASE
from tests.redis_server import RedisServer, redis_server
from trio_mcp import Client, RequestError, open_client
from trio_mcp.client import ClientOptions
from trio_mcp.errors import ConnectionFailed, NoResponse, SessionClosed
from trio_mcp.extensions.tasks import ClientTask, TaskState, TaskStatus

ROOT = Path(__file__).parents[2]
CLIENTS = 4
YOUNG, LONGEST = 1.0, 3.0  # seconds: a life that may end before the server listens, and one with clients
LAST = 120.0  # seconds in which all tasks end, when the server is not killed any more
# Questions are answered by their keys, and not by this callback.
OPTIONS: ClientOptions = {"tasks": True, "revision": "2026-07-28", "elicitation": lambda form: {}}
TOOLS = ("once", "once", "again", "asks")
LOST = "the server stopped while this task ran"
AWAY = "the store of the tasks does not work"  # a machine that is very busy may let Redis wait for a second


@attrs.define(eq=False)
class Known:
    """A task that a client knows of."""

    id: str
    tool: str
    token: str
    ended: TaskState | None = None
    answered: set[str] = attrs.field(factory=set)


@attrs.define(eq=False)
class World:
    folder: Path
    dice: random.Random
    redis: RedisServer | None = None
    known: list[Known] = attrs.field(factory=list)
    wrong: list[str] = attrs.field(factory=list)
    begun: int = 0
    lives: int = 0  # in which the server has listened

    def see(self, task: Known, state: TaskState, ended: TaskState | None, answered: Set[str]) -> None:
        """A state of a task, as a client got it that knew this of it before."""
        if ended is not None and repr(state) != repr(ended):  # errors are compared by identity
            self.wrong.append(f"{task.token} was {ended}, and is {state}")
        if answered & {each.key for each in state.questions}:
            self.wrong.append(f"{task.token} asks {state.questions} again")
        if not state.terminal or task.ended is not None:
            return
        task.ended = state
        said = "" if state.result is None else state.result["content"][0]["text"]
        if state.status is TaskStatus.COMPLETED:
            wanted = f"done {task.token}" + (" 0 1" if task.tool == "asks" else "")
            if said != wanted:
                self.wrong.append(f"{task.token} returned {said!r}")
        elif state.status is TaskStatus.FAILED and (task.tool != "once" or LOST not in str(state.error)):
            self.wrong.append(f"{task.token} failed: {state.error}")


async def visit(world: World, url: str, life: trio.CancelScope, seconds: float) -> None:
    """Start tasks and look at tasks.  The life of the server ends so many seconds after a client was open."""
    try:
        async with open_client(url, **OPTIONS) as client:
            life.deadline = min(life.deadline, trio.current_time() + seconds)
            while True:
                with away():
                    await act(world, client)
                await trio.sleep(world.dice.uniform(0, 0.02))
    except (ConnectionFailed, SessionClosed):
        return  # it was killed


@contextmanager
def away() -> Iterator[None]:
    """What was asked for here is asked for again later if the store does not answer."""
    try:
        yield
    except (RequestError, NoResponse) as error:  # the latter after several polls
        if AWAY not in str(error):
            raise


async def act(world: World, client: Client) -> None:
    dice = world.dice
    deed = dice.random()
    if deed < 0.5 or not world.known:
        world.begun += 1
        tool, token = dice.choice(TOOLS), f"t{world.begun}"
        task = await client.start_task(tool, {"token": token, "seconds": dice.choice((0, 0.02, 0.3))})
        known = Known(task.id, tool, token)
        world.known.append(known)
        world.see(known, task.state, None, frozenset())
        return
    # More often a young one: a task that has ended does not change any more.
    number = len(world.known) - 1 - min(int(dice.expovariate(1 / 20)), len(world.known) - 1)
    known = world.known[number if deed < 0.9 else dice.randrange(len(world.known))]
    task = client.open_task(known.id)
    if deed > 0.97:
        await task.cancel()
    await look(world, known, task)


async def look(world: World, known: Known, task: ClientTask) -> None:
    """Look at a task, and answer it."""
    ended, answered = known.ended, frozenset(known.answered)  # other clients look at the same task
    state = await task.status()
    world.see(known, state, ended, answered)
    for each in state.questions:
        number = each.params["message"].split()[1].rstrip("?")
        await task.answer({each.key: {"action": "accept", "content": {"value": number}}})
        known.answered.add(each.key)


async def live(world: World) -> None:
    """One life of the server, most often with clients."""
    async with serving(world) as process:
        if world.dice.random() < 0.2:
            await trio.sleep(world.dice.uniform(0, YOUNG))
            return
        with trio.fail_after(LAST):
            url = await address(process)
        world.lives += 1
        with trio.fail_after(LAST), trio.CancelScope() as life:
            async with trio.open_nursery() as nursery:
                for _ in range(CLIENTS):
                    nursery.start_soon(visit, world, url, life, world.dice.uniform(0, LONGEST))


class serving:
    """A server process, which is killed at the end of the block."""

    def __init__(self, world: World) -> None:
        url = [] if world.redis is None else [world.redis.url]
        self._command = [sys.executable, "-m", "tests.extensions.mortal", str(world.folder), *url]

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


async def address(process: trio.Process) -> str:
    said = b""
    assert process.stdout is not None
    while not said.endswith(b"\n"):
        more = await process.stdout.receive_some()
        assert more, "the server did not start"
        said += more
    return said.decode().strip()


async def all_end(world: World) -> None:
    """The last life, in which each task has to end."""
    async with serving(world) as process, open_client(await address(process), **OPTIONS) as client:
        left = world.known
        with trio.fail_after(LAST + len(left) / 20):
            while left:
                for known in left:
                    with away():
                        await look(world, known, client.open_task(known.id))
                left = [known for known in world.known if known.ended is None]
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
    world = World(tmp_path, random.Random(rounds))
    await lives(world, rounds, processes)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("rounds", "processes"),
    [pytest.param(5, 2, marks=pytest.mark.full), pytest.param(200, 2, marks=pytest.mark.long)],
)
async def test_a_server_that_is_killed_loses_no_task_in_redis(rounds: int, processes: int, tmp_path: Path) -> None:
    with redis_server() as redis:
        await lives(World(tmp_path, random.Random(rounds), redis), rounds, processes)


async def lives(world: World, rounds: int, processes: int) -> None:
    for _ in range(rounds):
        async with trio.open_nursery() as nursery:
            for _ in range(processes):  # on the same store; each has clients of its own, who look at all tasks
                nursery.start_soon(live, world)
    await all_end(world)
    runs = Counter((world.folder / "runs").read_text().split())
    ended = Counter(f"{known.tool} {known.ended.status.value}" for known in world.known if known.ended)
    twice = sum(count > 1 for count in runs.values())
    figures = f"{len(world.known)} tasks, {dict(ended)}, {twice} ran again"
    sys.stdout.write(f"{rounds} rounds, {world.lives} lives with clients: {figures}\n")
    assert world.wrong == []
    # task-31: only work that can be done again was done again, and none that had ended.
    assert [known.token for known in world.known if known.tool == "once" and runs[known.token] > 1] == []
    assert len(world.known) > rounds


@pytest.mark.full
async def test_a_process_that_slept_finishes_nothing_that_was_taken_over(tmp_path: Path) -> None:
    with redis_server() as redis, trio.fail_after(LAST):
        world = World(tmp_path, random.Random(0), redis)
        async with serving(world) as sleeper, open_client(await address(sleeper), **OPTIONS) as client:
            tasks = {
                tool: (await client.start_task(tool, {"token": tool, "seconds": 3 * LEASE})).id
                for tool in ("once", "again")
            }
            await has_run(world, "once", "again")
            sleeper.send_signal(signal.SIGSTOP)
            async with serving(world) as other, open_client(await address(other), **OPTIONS) as another:
                once, again = (another.open_task(tasks[tool]) for tool in ("once", "again"))
                with pytest.raises(RequestError, match=LOST):
                    await once.result()
                await has_run(world, "once", "again", "again")
                sleeper.send_signal(signal.SIGCONT)
                # Its handlers are at their ends, or about to be.
                assert (await client.open_task(tasks["once"]).status()).status is TaskStatus.FAILED
                await trio.sleep(LEASE)
                assert (await again.status()).status is TaskStatus.WORKING
                assert (await again.result()).content[0].text == "done again"
                assert (await once.status()).status is TaskStatus.FAILED
        await has_run(world, "once", "again", "again")


async def has_run(world: World, *tokens: str) -> None:
    """Wait until handlers have begun with these tokens."""
    while (world.folder / "runs").read_text().split() != [*tokens]:  # noqa: ASYNC110  # other processes write it
        await trio.sleep(0.01)
