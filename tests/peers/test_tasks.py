"""Tasks with real peers: third-party clients with our server, and our client with third-party servers.

The official SDKs have the tasks of 2025-11-25, FastMCP 4 has the tasks of 2026-07-28.  A program in `programs` serves
tools that run as tasks, or calls tools as tasks and prints one JSON object.  A `Gap` has a result that differs, as in
`interop`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import pytest
import trio

from tests.peers.installed import PEERS, Peer, needs, visits
from tests.peers.interop import FILE, OUR_TASKS, PEER_TASKS, Gap, Pair
from tests.peers.listening import listening
from tests.peers.visits import ROOT, served_by_process
from trio_mcp import Client, RequestError, open_client, serve_http
from trio_mcp.extensions.tasks import ClientTask, TaskCancelled
from trio_mcp.relay import open_relay
from trio_mcp.transport import open_nursery

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the peer

PATIENCE = 120.0  # seconds for one visit, on a busy machine
OURS = [sys.executable, str(ROOT / "tests" / "fixtures" / "everything_server.py"), "stdio"]
PYTHON, TYPESCRIPT, FASTMCP = NAMES = ("python-1.30.0", "typescript-1.32.2", "fastmcp-tasks-4.1.2")
PROGRAMS = dict(zip(NAMES, ("tasks_python1.py", "tasks_typescript1.mjs", "tasks_fastmcp4.py"), strict=True))
WAYS = {PYTHON: ("stdio", "session"), TYPESCRIPT: ("stdio", "session"), FASTMCP: ("stdio-modern", "modern")}
VISITS: list[Pair] = [(name, way) for name in NAMES for way in WAYS[name]]


def peer_of(name: str) -> Peer:
    return attrs.evolve(PEERS[name], program=PROGRAMS[name])


# Third-party clients with our server.

# The results of clients with the everything server; for a task: its first and its last status, isError and the text.
CORE = {
    "capability": {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}},
    "support": {"slow_compute": "optional", "failing_job": "required", "confirm_delete": "optional"},
    "greet": "Hello, Ada!",
    "slow": ["working", "completed", False, "computed sum"],
    "asked": True,
    "confirm": ["working", "completed", False, "deleted a.txt"],
    "failing": ["working", "failed", True, "the job has failed"],
    "later": ["went on", 1],
    "related": True,
    "plain_required": -32601,
    "task_forbidden": -32601,
    "listed": True,
    "cancelled": "cancelled",
    "cancelled_twice": -32602,
    "unknown": -32602,
}
EXTENSION = {
    "greet": [False, "Hello, Ada!"],
    "slow": [False, "computed sum"],
    "confirm": [False, "deleted a.txt"],
    "failing": [True, "the job has failed"],
    "protocol_error": "ToolError",
    "started": "working",
    "cancelled": "cancelled",
}
SEEN: dict[str, dict[str, Any]] = {PYTHON: CORE, TYPESCRIPT: CORE, FASTMCP: EXTENSION}
CLIENT_GAPS: dict[str, dict[str, Gap]] = {
    TYPESCRIPT: {"plain_required": Gap(-32600, "it does not send a plain call of a tool that requires a task")},
}

OUR_TASKS.declare(VISITS, tuple({**CORE, **EXTENSION}))


def printed(command: Sequence[str], *target: str) -> dict[str, Any]:
    """Run a visit and return the object that it prints."""
    done = subprocess.run([*command, "visit", *target], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.mark.parametrize(("name", "way"), visits(VISITS))
def test_a_real_client_runs_our_tools_as_tasks(name: str, way: str) -> None:
    command = needs(name, peer_of(name).command)
    with ExitStack() as stack:
        over_stdio = way.startswith("stdio")
        target = OURS if over_stdio else [stack.enter_context(served_by_process()).target(way)]
        seen = printed(command, *target)
    wrong = OUR_TASKS.record((name, way), seen, SEEN[name], CLIENT_GAPS.get(name, {}))
    assert not wrong


def test_each_task_client_has_a_row_in_the_file() -> None:
    _, _, ours = FILE.read_text(encoding="utf-8").partition(f"## {OUR_TASKS.title}")
    assert OUR_TASKS.missing_rows(ours) == []


# Our client with third-party servers.

SLOW, LONG = {"seconds": 0.1, "label": "sum"}, {"seconds": 60, "label": "long"}
FILE_NAME = {"filename": "a.txt"}
# The results of our client, by the revision of the server.  For a call: isError and the text; for a task also its first
# and its last status.
CALLED = {
    "greet": [False, "Hello, Ada!"],
    "slow": [False, "sum took 0.1 seconds"],
    "confirm": [False, "a.txt: accept {'confirm': True}"],
    "failing": [True, "the job has failed"],
    "slow task": ["working", "completed", False, "sum took 0.1 seconds"],
    "confirm task": ["working", "completed", False, "a.txt: accept {'confirm': True}"],
    "failing task": ["working", "completed", True, "the job has failed"],
    "states": ["working", "completed"],
    "reopened": "working",
    "cancelled": "cancelled",
    "result of cancelled": "TaskCancelled",
    "unknown": -32602,
    "deviations": [],
}
CALLED_CORE = {
    **CALLED,
    "failing task": ["working", "failed", True, "the job has failed"],
    "cancelled twice": -32602,
    "listed": True,
}
CALLED_EXTENSION = {**CALLED, "answered": ["input_required", "completed"], "cancelled twice": None}
CALLED_BY = {PYTHON: CALLED_CORE, TYPESCRIPT: CALLED_CORE, FASTMCP: CALLED_EXTENSION}
ACCEPTS = 'a.txt: accept {"confirm":true}'  # as JavaScript writes it
SERVER_GAPS: dict[str, dict[str, Gap]] = {
    PYTHON: {
        "failing task": Gap(
            ["working", "completed", True, "the job has failed"],
            "it completes a task whose result has isError",
            "the server's",
        )
    },
    TYPESCRIPT: {
        "confirm": Gap([False, ACCEPTS], "its program writes compact JSON", "no fault"),
        # task-20.  Its handlers start before the request is answered.
        "confirm task": Gap(
            ["input_required", "completed", False, ACCEPTS],
            "its task begins with another status than working",
            "the server's",
        ),
        "failing task": Gap(
            ["failed", "failed", True, "the job has failed"],
            "its task begins with another status than working",
            "the server's",
        ),
    },
}
PEER_TASKS.declare(VISITS, tuple({**CALLED_CORE, **CALLED_EXTENSION}))


async def text_of(client: Client, name: str, given: dict[str, Any]) -> list[Any]:
    result = await client.call_tool(name, given)
    return [result.is_error, result.content[0].text]  # type: ignore[union-attr]  # all content is text


async def run(client: Client, name: str, given: dict[str, Any]) -> list[Any]:
    """Run a tool as a task: its first and its last status, and its result."""
    task = await client.start_task(name, given)
    assert task.id
    first, result = task.state.status.value, await task.result()
    return [first, (await task.status()).status.value, result.is_error, result.content[0].text]  # type: ignore[union-attr]


async def states_of(task: ClientTask) -> list[str]:
    """The states of a task; each of its questions is answered by its key."""
    states = []
    async for state in task:
        states.append(state.status.value)
        if state.questions:
            answer = {"action": "accept", "content": {"confirm": True}}
            await task.answer({each.key: answer for each in state.questions})
    return list(dict.fromkeys(states))  # equal states may repeat while the program continues


async def cancelled(client: Client) -> dict[str, Any]:
    """Start a task, list it, open it by its id, and cancel it twice."""
    seen: dict[str, Any] = {}
    task = await client.start_task("slow_compute", LONG)
    if client.revision == "2025-11-25":
        listed: Any = await client.request("tasks/list", {})
        seen["listed"] = task.id in [each["taskId"] for each in listed["tasks"]]
    again = client.open_task(task.id)
    seen["reopened"] = (await again.status()).status.value
    await again.cancel()
    seen["cancelled"] = (await task.status()).status.value
    try:
        seen["cancelled twice"] = await again.cancel()  # type: ignore[func-returns-value]
    except RequestError as error:
        seen["cancelled twice"] = error.code
    try:
        await task.result()
    except TaskCancelled as error:
        seen["result of cancelled"] = type(error).__name__
    return seen


async def observed(target: str | Sequence[str], **options: Any) -> dict[str, Any]:
    async with open_client(target, tasks=True, elicitation=lambda form: {"confirm": True}, **options) as client:
        seen = {
            "greet": await text_of(client, "greet", {"name": "Ada"}),
            "slow": await text_of(client, "slow_compute", SLOW),
            "confirm": await text_of(client, "confirm_delete", FILE_NAME),
            "failing": await text_of(client, "failing_job", {}),
            "slow task": await run(client, "slow_compute", SLOW),
            "confirm task": await run(client, "confirm_delete", FILE_NAME),
            "failing task": await run(client, "failing_job", {}),
            "states": await states_of(await client.start_task("slow_compute", {"seconds": 0.3, "label": "sum"})),
            **await cancelled(client),
        }
        if client.revision == "2026-07-28":
            states = await states_of(await client.start_task("confirm_delete", FILE_NAME))
            seen["answered"] = [state for state in states if state != "working"]  # it may ask before it is working
        try:
            await client.open_task("unknown").status()
        except RequestError as error:
            seen["unknown"] = error.code
        return {**seen, "deviations": list(client.deviations)}


@pytest.mark.parametrize(("name", "way"), visits(VISITS))
async def test_our_client_runs_tools_of_a_real_server_as_tasks(name: str, way: str) -> None:
    command = [*needs(name, peer_of(name).command), "serve"]
    with trio.fail_after(PATIENCE):
        if way.startswith("stdio"):
            seen = await observed(command, stderr=None)
        else:
            async with listening([*command, way]) as origin:
                seen = await observed(f"{origin}/mcp")
    wrong = PEER_TASKS.record((name, way), seen, CALLED_BY[name], SERVER_GAPS.get(name, {}))
    assert not wrong


def test_each_task_server_has_a_row_in_the_file() -> None:
    _, _, others = FILE.read_text(encoding="utf-8").partition(f"## {PEER_TASKS.title}")
    assert PEER_TASKS.missing_rows(others) == []


# Our relay between them, over HTTP: our client uses one form of tasks, and the server may use the other form.


@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
@pytest.mark.parametrize("name", [PYTHON, FASTMCP])
async def test_a_relay_carries_tasks_of_a_real_server(name: str, revision: str) -> None:
    command = [*needs(name, peer_of(name).command), "serve"]
    with trio.fail_after(PATIENCE):
        async with open_relay(command, stderr=None) as relay, open_nursery() as nursery:
            address = await nursery.start(serve_http, relay, "127.0.0.1", 0)
            options: Any = {"tasks": True, "revision": revision, "elicitation": lambda form: {"confirm": True}}
            async with open_client(address.url, **options) as client:
                seen = {
                    "greet": await text_of(client, "greet", {"name": "Ada"}),
                    "slow task": await run(client, "slow_compute", SLOW),
                    "confirm task": await run(client, "confirm_delete", FILE_NAME),
                    "failing task": await run(client, "failing_job", {}),
                    **await cancelled(client),
                    "deviations": list(client.deviations),
                }
    table = CALLED_CORE if revision == "2025-11-25" else CALLED_EXTENSION
    assert seen == {each: table[each] for each in seen}
