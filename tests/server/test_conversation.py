"""What one client's calls leave behind when something else happens at the same time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.server.checkpoints import PipeEnd, narrow
from tests.server.wire import LATEST
from trio_mcp import Limits, Server, serve_stream
from trio_mcp.core.revisions import META_CLIENT_CAPABILITIES, META_VERSION


def call(id: int, name: str) -> bytes:
    meta = {META_VERSION: LATEST, META_CLIENT_CAPABILITIES: {}}
    message = {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": name, "_meta": meta}}
    return json.dumps(message).encode() + b"\n"


def working(**options: Any) -> Server:
    server = Server("working", **options)

    @server.tool
    async def quick() -> str:
        return "quick"

    @server.tool
    async def slow() -> str:
        await trio.sleep(5)
        return "slow"

    return server


@pytest.mark.parametrize("shared", [True, False])
async def test_to_cancel_a_connection_ends_what_is_at_work_for_it(shared: bool, autojump_clock: MockClock) -> None:
    server = working()
    ours, theirs = memory_stream_pair()
    start = trio.current_time()
    with trio.move_on_after(1):
        async with trio.open_nursery() as nursery:
            if shared:
                await nursery.start(_running, server)
            nursery.start_soon(serve_stream, server, theirs)
            await ours.send_all(call(1, "slow"))
            await trio.sleep_forever()
    assert trio.current_time() == start + 1
    assert (server.statistics().running, server.statistics().connections) == (0, 0)


async def _running(server: Server, task_status: trio.TaskStatus[None]) -> None:
    async with server.running():
        task_status.started()
        await trio.sleep_forever()


async def test_an_id_may_be_used_again_as_soon_as_its_answer_is_queued(autojump_clock: MockClock) -> None:
    """No client should; but none may bring a server down by it."""
    server = working(limits=Limits(outgoing=0))
    ours, theirs = narrow()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, theirs)
        # The first answer is stuck in the wire, so the other two calls keep their places until there is room.
        await ours.send_all(b"".join(call(id, "quick") for id in (1, 2, 3)))
        await wait_all_tasks_blocked()
        assert server.statistics().running == 3
        await ours.send_all(b"".join(call(id, "slow") for id in (2, 3)))
        await wait_all_tasks_blocked()
        assert server.statistics().running == 5
        answers = await _answers(ours, 5)
        assert sorted((each["id"], each["result"]["content"][0]["text"]) for each in answers) == [
            (1, "quick"), (2, "quick"), (2, "slow"), (3, "quick"), (3, "slow"),
        ]  # fmt: skip
        assert server.statistics().running == 0
        await ours.send_eof()


async def _answers(stream: PipeEnd, count: int) -> list[Any]:
    data = b""
    while data.count(b"\n") < count:
        data += await stream.receive_some()
    await wait_all_tasks_blocked()
    return [json.loads(line) for line in data.splitlines()]
