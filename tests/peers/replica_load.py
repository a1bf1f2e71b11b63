"""Clients of replicas behind nginx while a process is killed, suspended or restarted, or while their Redis is down.

Each client calls a tool that asks the user, in 2026-07-28 and in sessions of 2025-11-25.  After an error a client
acts like a host: it resumes a stream that was cut, and repeats an answer that was lost.  Every call must end, with a
result or with an error, within `PATIENCE` seconds.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import attrs
import trio

from tests.http.client import Answer, Cut, HttpClient, ProtocolViolation, Stream, response
from tests.http.scripted_server import D, play_call, play_params

__all__ = ["Load"]

PATIENCE = 60.0  # seconds; the other processes notice the end of a process when its lease expires
ANSWER = {"action": "accept", "content": {"size": 3}}


@attrs.define
class Load:
    """The clients of a proxy at this port, and a count of the outcomes of their calls."""

    port: int
    tally: Counter[str] = attrs.field(factory=Counter)
    stopped: bool = False

    async def run(self, clients: int, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Make calls until `stopped`."""
        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(self._client)
            task_status.started()

    async def _client(self) -> None:
        while not self.stopped:
            web = HttpClient(
                partial(trio.open_tcp_stream, "127.0.0.1", self.port),
                host=f"127.0.0.1:{self.port}",
                headers={"Connection": "close"},
                check=False,
            )
            visit = random.choice([self._modern, self._legacy])
            try:
                with trio.fail_after(PATIENCE):
                    await visit(web)
            except trio.TooSlowError:
                self.tally["no end"] += 1
            except (Cut, ProtocolViolation, OSError, trio.BrokenResourceError, AssertionError):  # a failed request
                self.tally["refused"] += 1
                await trio.sleep(0.1)
            finally:
                await web.aclose()

    def _count(self, answer: Answer) -> bool:
        """Count the response of a call, and return whether it is a result."""
        if answer.status != 200 or answer.type != "application/json" or "error" in answer.message:
            self.tally["refused"] += 1
            return False
        self.tally["answered"] += 1
        return True

    async def _modern(self, web: HttpClient) -> None:
        params: Any = play_params("sleep 0.05", "ask", "sleep 0.05")
        answer = await web.call("tools/call", params)
        if self._count(answer):
            answers = dict.fromkeys(answer.result["inputRequests"], ANSWER)
            again = {**params, "requestState": answer.result["requestState"], "inputResponses": answers}
            self._count(await web.call("tools/call", again))

    async def _legacy(self, web: HttpClient) -> None:
        session = await web.initialize(D)
        for _ in range(3):
            message = play_call("progress", "ask", "sleep 0.05", id=random.randrange(10**9))
            stream = await web.open(message, session=session)
            try:
                await self._read(web, stream, session)
            except Cut:
                await stream.aclose()
                stream = await web.open(session=session, after=stream.last_event_id)
                await self._read(web, stream, session)
            finally:
                await stream.aclose()
        await web.end(session)

    async def _read(self, web: HttpClient, stream: Stream, session: str) -> None:
        while "id" not in (message := await stream.message()) or "method" in message:
            if message["method"] != "elicitation/create":
                continue
            while not await self._send_answer(web, message["id"], session):  # noqa: ASYNC110
                await trio.sleep(0.5)
        self.tally["answered" if "result" in message else "refused"] += 1

    async def _send_answer(self, web: HttpClient, id: Any, session: str) -> bool:
        """Send the answer to a question; return whether it has arrived, or cannot arrive any more."""
        try:
            return (await web.post(response(id, ANSWER), session=session)).status not in (502, 503)
        except (Cut, OSError, trio.BrokenResourceError):
            return False
