"""The client programs of a world.  Each makes its moves concurrently, and opens its client again if that was lost."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import trio

from tests.simulation.monitor import (
    ANSWERED,
    CANCELLED,
    FAILED,
    TIMED_OUT,
    Call,
    ListenBlock,
    Monitor,
    ToolReportedFailure,
)
from tests.simulation.network import caller
from tests.simulation.plan import Move
from tests.simulation.servers import KEYS, TOOLS
from tests.simulation.tasks import TASK_MOVES, KnownTask
from trio_mcp import Client, McpError, open_client
from trio_mcp.client import ClientOptions
from trio_mcp.errors import NoResponse, SessionClosed, SessionLost
from trio_mcp.types import PromptReference

__all__ = ["ClientProgram", "World"]

MAX_RUNS = 6  # of one program; it makes no more moves after the last run
RETRY_SECONDS = 2.0  # until the next run, if the client could not be opened
# Seconds in which a change reaches a listener.  After a harmful fault it takes longer, because the client must notice a
# dead connection or wait for a server that restarts.
CHANGE_SECONDS, CHANGE_SECONDS_WITH_HARM = 10.0, 200.0


class World(Protocol):
    """The part of a world that a client program uses."""

    monitor: Monitor

    @property
    def notifies_of_all_changes(self) -> bool: ...
    @property
    def extra_listen_seconds(self) -> float: ...

    async def target(self) -> Any: ...

    def options(self, client: str) -> ClientOptions: ...

    def cancellable(self, call: Call, scope: trio.CancelScope) -> Any: ...

    def start(self, function: Callable[..., Any], *args: Any) -> None: ...


class ClientProgram:
    """A program with one client."""

    def __init__(self, name: str, moves: tuple[Move, ...], world: World) -> None:
        self.name = name
        self._moves = deque(moves)
        self._world = world
        self._monitor = world.monitor
        self._scope = trio.CancelScope()
        self._downtime = 0.0
        self._lost = False
        self.moves_made = 0
        self.open_tasks: deque[KnownTask] = deque()
        """The tasks that a later move fetches, also after the process was killed."""
        self._uses_tasks = any(move.kind in (*TASK_MOVES, "job", "quiz") for move in moves)

    async def run(self) -> None:
        caller.set(self.name)
        for _ in range(MAX_RUNS):
            if not self._moves:
                return
            self._scope, self._lost, self._downtime = trio.CancelScope(), False, 0.0
            with self._scope:
                await self._run_once()
            self._monitor.closed_at[self.name].append(trio.current_time())
            self._monitor.trace(f"{self.name} has ended")
            await trio.sleep(self._downtime)

    def stop(self, downtime: float) -> None:
        """Cancel the client at any point."""
        self._downtime = downtime
        self._scope.cancel()

    async def _run_once(self) -> None:
        opened = False
        try:
            async with open_client(await self._world.target(), **self._options()) as client:
                opened = True
                self._monitor.trace(f"{self.name} is open in {client.revision}")
                async with trio.open_nursery() as nursery:
                    while self._moves and not self._lost:
                        await trio.sleep(self._moves[0].wait)
                        nursery.start_soon(self._run_move, client, self._moves.popleft())
                for why in () if self._monitor.harmful_faults else client.deviations:
                    self._monitor.report(f"{self.name} noticed of its server: {why}")
        except (McpError, OSError) as error:
            self._monitor.trace(f"{self.name} has no client: {type(error).__name__}: {error}"[:200])
            if opened:
                self._monitor.unexpected(f"the client of {self.name}", error)
            elif not self._monitor.harmful_faults:
                self._monitor.unexpected(f"to open the client of {self.name}, in a world without harm,", error)
            self._downtime = RETRY_SECONDS
        except Exception as error:  # noqa: BLE001  # any exception breaks a rule
            self._monitor.unexpected(f"the client of {self.name}", error)

    def _options(self) -> ClientOptions:
        options = self._world.options(self.name)
        options.update(elicitation=self._fill_in, sampling=self._sample, on_log=self._check_log, log_level="info")
        options["tasks"] = self._uses_tasks
        return options

    # Callbacks for requests and notifications of the server.

    async def _fill_in(self, form: Any) -> dict[str, object]:
        return {"answer": await self._answer(form.message)}

    async def _sample(self, asked: Any) -> tuple[str, str]:
        return await self._answer(asked.params.messages[0].content.text), "model"

    async def _answer(self, token: str) -> str:
        self._monitor.check_question(self.name, token)
        await trio.sleep((0.0, 0.01, 5.0)[len(token) % 3])
        return f"answer to {token}"

    def _check_log(self, log: Any) -> None:
        self._monitor.check_log(self.name, log.data)

    # One move.

    async def _run_move(self, client: Client, move: Move) -> None:
        self.moves_made += 1
        call = self._monitor.begin(self.name, move.kind, move.patience)
        options = {"timeout": move.patience} if move.by_option and move.patience is not None else {}
        deadline = math.inf if move.patience is None or move.by_option else trio.current_time() + move.patience
        if move.kind == "hold" and move.patience is None:
            deadline = trio.current_time() + move.size  # without a deadline it never ends
        outcome, failure = CANCELLED, None
        scope = trio.CancelScope(deadline=deadline)
        try:
            with scope, self._world.cancellable(call, scope):
                await _METHODS[move.kind](self, client, call, move, options)
                outcome = ANSWERED
        except trio.Cancelled:
            call.cancelled_from_outside = True  # the client is cancelled, not this scope
            raise
        except ToolReportedFailure:
            outcome = FAILED
        except Exception as error:  # noqa: BLE001  # the monitor maps it to an outcome
            failure = error
        finally:
            if failure is not None:
                self._monitor.settle_with(call, failure)
            else:
                self._monitor.settle(call, outcome)
        # A byte stream or a WebSocket that is lost stays lost.
        if isinstance(failure, SessionClosed) and not isinstance(failure, NoResponse | SessionLost):
            self._lost = True
        if call.outcome in (CANCELLED, TIMED_OUT) and move.kind not in TASK_MOVES:  # a task continues
            self._world.start(self._monitor.check_handler_ends, call)

    async def _tool(self, client: Client, call: Call, name: str, options: Any, **arguments: Any) -> None:
        def on_progress(progress: float, total: float | None, message: str | None) -> None:
            self._monitor.progressed(call, progress, message)

        callback = on_progress if name == "count" else None
        result = await client.call_tool(name, {"token": call.token, **arguments}, on_progress=callback, **options)
        self._check_result(call, result)

    def _check_result(self, call: Call, result: Any) -> None:
        text = result.content[0].text
        if result.is_error:
            self._monitor.trace(f"{call.token} failed: {text}"[:300])
            self._monitor.check(text == call.token or not call.fails, f"{call.token} failed with {text!r}")
            raise ToolReportedFailure
        self._monitor.answered(call, json.loads(text))

    async def _echo(self, client: Client, call: Call, move: Move, options: Any) -> None:
        await self._tool(client, call, "echo", options, pad="x" * move.size)

    async def _big(self, client: Client, call: Call, move: Move, options: Any) -> None:
        await self._tool(client, call, "big", options, length=move.size)
        self._monitor.check(len(call.value["pad"]) == move.size, f"{call.token} got {len(call.value['pad'])} bytes")

    async def _plain(self, client: Client, call: Call, move: Move, options: Any) -> None:
        await self._tool(client, call, move.kind, options)

    async def _count(self, client: Client, call: Call, move: Move, options: Any) -> None:
        await self._tool(client, call, "count", options, to=move.size)

    async def _fail(self, client: Client, call: Call, move: Move, options: Any) -> None:
        await self._tool(client, call, "fail", options, politely=True)

    async def _ask(self, client: Client, call: Call, move: Move, options: Any) -> None:
        await self._tool(client, call, "ask", options, model=len(call.token) % 2 == 0)

    async def _put(self, client: Client, call: Call, move: Move, options: Any) -> None:
        uri = KEYS[len(self._monitor.calls) % 2]
        version = len(self._monitor.calls)
        await self._tool(client, call, "put", options, uri=uri, version=version)
        self._monitor.written[uri] = max(version, self._monitor.written.get(uri, 0))

    async def _read(self, client: Client, call: Call, move: Move, options: Any) -> None:
        for uri in KEYS:
            written = self._monitor.written.get(uri, 0)
            found = await client.read_resource(uri, **options)
            text = found.contents[0].text  # type: ignore[union-attr]  # all of it is text
            self._monitor.check(int(text) >= written, f"{call.token} read {text} of {uri}, where {written} was written")

    async def _tools(self, client: Client, call: Call, move: Move, options: Any) -> None:
        names = tuple([tool.name for tool in await client.list_tools()])
        self._monitor.check(names == TOOLS, f"{call.token} found {names}")

    async def _follow(self, client: Client, call: Call, move: Move, options: Any) -> None:
        async with client.stream_tool("count", {"token": call.token, "to": move.size}, **options) as stream:
            async for report in stream:
                self._monitor.progressed(call, report.progress, report.message)
            self._check_result(call, await stream.result())

    async def _prompt(self, client: Client, call: Call, move: Move, options: Any) -> None:
        filled = await client.get_prompt("say", {"token": call.token}, **options)
        self._monitor.answered(call, filled.messages[0].content.text)  # type: ignore[union-attr]

    async def _complete(self, client: Client, call: Call, move: Move, options: Any) -> None:
        found = await client.complete(PromptReference("say"), "token", call.token, **options)
        self._monitor.check(list(found.values) == [f"{call.token}!"], f"{call.token} was completed to {found.values}")

    async def _ping(self, client: Client, call: Call, move: Move, options: Any) -> None:
        await client.ping()

    async def _listen(self, client: Client, call: Call, move: Move, options: Any) -> None:
        async with client.listen(resources=KEYS) as changes:
            uris = tuple(sorted(set(KEYS) - {change.item for change in changes.missing}))
            self._monitor.trace(f"{call.token} listens to {', '.join(uris)}")
            block = ListenBlock(self.name, uris, self._monitor.tick)
            delay = CHANGE_SECONDS + self._world.extra_listen_seconds
            with trio.move_on_after(move.size + delay) as scope:
                await self._note_changes(changes, block)
            if self._monitor.harmful_faults and scope.cancelled_caught:
                with trio.move_on_after(CHANGE_SECONDS_WITH_HARM) as scope:
                    await self._note_changes(changes, block)
            if scope.cancelled_caught and self._world.notifies_of_all_changes:  # otherwise the server has ended it
                self._monitor.check_changes(block, CHANGE_SECONDS_WITH_HARM if self._monitor.harmful_faults else delay)

    async def _note_changes(self, changes: Any, block: ListenBlock) -> None:
        async for change in changes:
            self._monitor.trace(f"{self.name} hears that {change.item} has changed")
            block.heard[change.item] = self._monitor.tick


_METHODS: dict[str, Callable[..., Any]] = {
    "echo": ClientProgram._echo, "big": ClientProgram._big, "plain": ClientProgram._plain,
    "hold": ClientProgram._plain, "log": ClientProgram._plain, "away": ClientProgram._plain,
    "wizard": ClientProgram._plain, "count": ClientProgram._count, "fail": ClientProgram._fail,
    "ask": ClientProgram._ask, "put": ClientProgram._put, "read": ClientProgram._read, "tools": ClientProgram._tools,
    "follow": ClientProgram._follow, "prompt": ClientProgram._prompt, "complete": ClientProgram._complete,
    "ping": ClientProgram._ping, "listen": ClientProgram._listen, "job": ClientProgram._plain,
    "quiz": ClientProgram._plain, **TASK_MOVES,
}  # fmt: skip
