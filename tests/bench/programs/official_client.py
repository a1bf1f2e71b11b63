"""The client of the official Python SDK, with the arguments and the output of `callers.py`:
``official_client.py TARGET ERA NUMBER``.

It runs in an environment of its own, without the packages of this project.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable
from typing import Any

import anyio
import anyio.to_thread
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

TEXT = "Mostly sunny, 21 degrees, light wind from the west."


async def main(target: Any, era: str, in_flight: int) -> None:
    server = target if isinstance(target, str) else StdioServerParameters(command=target[0], args=target[1:])
    async with Client(server, mode="auto" if era == "modern" else "legacy") as client:
        print("connected", flush=True)
        while order := await anyio.to_thread.run_sync(sys.stdin.readline):
            left = iter(range(int(order)))

            async def call(left: Iterable[int] = left) -> None:
                for _ in left:
                    result = await client.call_tool("echo", {"text": TEXT})
                    assert result.content[0].text == TEXT

            wall, cpu = time.perf_counter(), time.process_time()
            async with anyio.create_task_group() as group:
                for _ in range(in_flight):
                    group.start_soon(call)
            print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)


logging.getLogger().setLevel(logging.ERROR)
arguments = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
anyio.run(main, *arguments, backend_options={"use_uvloop": True})
