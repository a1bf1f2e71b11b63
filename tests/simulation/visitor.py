"""The programs that call: each is a client with moves, made beside each other, and opened again when it was lost."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import trio

from tests.simulation.book import ANSWERED, CANCELLED, FAILED, LATE, Book, Call, Listened, ToolSaysNo
from tests.simulation.host import KEYS, TOOLS
from tests.simulation.network import caller
from tests.simulation.plan import Move
from tests.simulation.tasks import TASK_MOVES, Errand
from trio_mcp import Client, McpError, open_client
from trio_mcp.client import ClientOptions
from trio_mcp.errors import NoResponse, SessionClosed, SessionLost
from trio_mcp.types import PromptReference

__all__ = ["Surroundings", "Visitor"]

LIVES = 6  # of one program; what it has not done then is left undone
RETRY = 2.0  # seconds after a connection that could not be opened
# Seconds in which a change reaches a listener: with harm, a dead line has to be noticed first, and a server that
# restarts has to be found again.
PROMPT, PATIENT = 10.0, 200.0


class Surroundings(Protocol):
    """What a client needs of its world."""

    book: Book

    @property
    def tells(self) -> bool: ...
    @property
    def crossing(self) -> float: ...

    async def target(self) -> Any: ...

    def options(self, client: str) -> ClientOptions: ...

    def cancellable(self, call: Call, scope: trio.CancelScope) -> Any: ...

    def start(self, function: Callable[..., Any], *args: Any) -> None: ...


class Visitor:
    """One program."""

    def __init__(self, name: str, moves: tuple[Move, ...], world: Surroundings) -> None:
        self.name = name
        self._moves = deque(moves)
        self._world = world
        self._book = world.book
        self._scope = trio.CancelScope()
        self._pause = 0.0
        self._lost = False
        self.made = 0
        self.errands: deque[Errand] = deque()
        """The tasks that it will come back for, also after its process was killed."""
        self._tasks = any(move.kind in (*TASK_MOVES, "job", "quiz") for move in moves)

    async def run(self) -> None:
        caller.set(self.name)
        for _ in range(LIVES):
            if not self._moves:
                return
            self._scope, self._lost, self._pause = trio.CancelScope(), False, 0.0
            with self._scope:
                await self._live()
            self._book.left[self.name].append(trio.current_time())
            self._book.tell(f"{self.name} has ended")
            await trio.sleep(self._pause)

    def stop(self, pause: float) -> None:
        """It is cancelled, wherever it is."""
        self._pause = pause
        self._scope.cancel()

    async def _live(self) -> None:
        opened = False
        try:
            async with open_client(await self._world.target(), **self._options()) as client:
                opened = True
                self._book.tell(f"{self.name} is open in {client.revision}")
                async with trio.open_nursery() as nursery:
                    while self._moves and not self._lost:
                        await trio.sleep(self._moves[0].wait)
                        nursery.start_soon(self._make, client, self._moves.popleft())
                for why in () if self._book.harms else client.deviations:
                    self._book.broken(f"{self.name} noticed of its server: {why}")
        except (McpError, OSError) as error:
            self._book.tell(f"{self.name} has no client: {type(error).__name__}: {error}"[:200])
            if opened:
                self._book.unexpected(f"the client of {self.name}", error)
            elif not self._book.harms:
                self._book.unexpected(f"to open the client of {self.name}, in a world without harm,", error)
            self._pause = RETRY
        except Exception as error:  # noqa: BLE001  # a finding, whatever it is
            self._book.unexpected(f"the client of {self.name}", error)

    def _options(self) -> ClientOptions:
        options = self._world.options(self.name)
        options.update(elicitation=self._fill_in, sampling=self._think, on_log=self._hear_log, log_level="info")
        options["tasks"] = self._tasks
        return options

    # What the server asks and tells.

    async def _fill_in(self, form: Any) -> dict[str, object]:
        return {"answer": await self._reply(form.message)}

    async def _think(self, asked: Any) -> tuple[str, str]:
        return await self._reply(asked.params.messages[0].content.text), "model"

    async def _reply(self, token: str) -> str:
        self._book.asked(self.name, token)
        await trio.sleep((0.0, 0.01, 5.0)[len(token) % 3])
        return f"answer to {token}"

    def _hear_log(self, said: Any) -> None:
        self._book.logged(self.name, said.data)

    # One move.

    async def _make(self, client: Client, move: Move) -> None:
        self.made += 1
        call = self._book.begin(self.name, move.kind, move.patience)
        along = {"timeout": move.patience} if move.by_option and move.patience is not None else {}
        deadline = math.inf if move.patience is None or move.by_option else trio.current_time() + move.patience
        if move.kind == "hold" and move.patience is None:
            deadline = trio.current_time() + move.size  # it would take for ever
        outcome, failure = CANCELLED, None
        scope = trio.CancelScope(deadline=deadline)
        try:
            with scope, self._world.cancellable(call, scope):
                await _DEEDS[move.kind](self, client, call, move, along)
                outcome = ANSWERED
        except trio.Cancelled:
            call.touched = True  # the whole client is cancelled, and not this scope
            raise
        except ToolSaysNo:
            outcome = FAILED
        except Exception as error:  # noqa: BLE001  # which outcome that is, the book says
            failure = error
        finally:
            if failure is not None:
                self._book.settle_with(call, failure)
            else:
                self._book.settle(call, outcome)
        # A stream and a WebSocket stay lost.
        if isinstance(failure, SessionClosed) and not isinstance(failure, NoResponse | SessionLost):
            self._lost = True
        if call.outcome in (CANCELLED, LATE) and move.kind not in TASK_MOVES:  # a task goes on
            self._world.start(self._book.watch, call)

    async def _tool(self, client: Client, call: Call, name: str, along: Any, **arguments: Any) -> None:
        def heard(progress: float, total: float | None, message: str | None) -> None:
            self._book.progressed(call, progress, message)

        reports = heard if name == "count" else None
        result = await client.call_tool(name, {"token": call.token, **arguments}, on_progress=reports, **along)
        self._take(call, result)

    def _take(self, call: Call, result: Any) -> None:
        text = result.content[0].text
        if result.is_error:
            self._book.tell(f"{call.token} failed: {text}"[:300])
            self._book.check(text == call.token or not call.fails, f"{call.token} failed with {text!r}")
            raise ToolSaysNo
        self._book.answered(call, json.loads(text))

    async def _echo(self, client: Client, call: Call, move: Move, along: Any) -> None:
        await self._tool(client, call, "echo", along, pad="x" * move.size)

    async def _big(self, client: Client, call: Call, move: Move, along: Any) -> None:
        await self._tool(client, call, "big", along, length=move.size)
        self._book.check(len(call.value["pad"]) == move.size, f"{call.token} got {len(call.value['pad'])} bytes")

    async def _plain(self, client: Client, call: Call, move: Move, along: Any) -> None:
        await self._tool(client, call, move.kind, along)

    async def _count(self, client: Client, call: Call, move: Move, along: Any) -> None:
        await self._tool(client, call, "count", along, to=move.size)

    async def _fail(self, client: Client, call: Call, move: Move, along: Any) -> None:
        await self._tool(client, call, "fail", along, politely=True)

    async def _ask(self, client: Client, call: Call, move: Move, along: Any) -> None:
        await self._tool(client, call, "ask", along, model=len(call.token) % 2 == 0)

    async def _put(self, client: Client, call: Call, move: Move, along: Any) -> None:
        uri = KEYS[len(self._book.calls) % 2]
        version = len(self._book.calls)
        await self._tool(client, call, "put", along, uri=uri, version=version)
        self._book.written[uri] = max(version, self._book.written.get(uri, 0))

    async def _read(self, client: Client, call: Call, move: Move, along: Any) -> None:
        for uri in KEYS:
            written = self._book.written.get(uri, 0)
            found = await client.read_resource(uri, **along)
            text = found.contents[0].text  # type: ignore[union-attr]  # all of it is text
            self._book.check(int(text) >= written, f"{call.token} read {text} of {uri}, where {written} was written")

    async def _tools(self, client: Client, call: Call, move: Move, along: Any) -> None:
        names = tuple([tool.name for tool in await client.list_tools()])
        self._book.check(names == TOOLS, f"{call.token} found {names}")

    async def _follow(self, client: Client, call: Call, move: Move, along: Any) -> None:
        async with client.stream_tool("count", {"token": call.token, "to": move.size}, **along) as followed:
            async for report in followed:
                self._book.progressed(call, report.progress, report.message)
            self._take(call, await followed.result())

    async def _prompt(self, client: Client, call: Call, move: Move, along: Any) -> None:
        filled = await client.get_prompt("say", {"token": call.token}, **along)
        self._book.answered(call, filled.messages[0].content.text)  # type: ignore[union-attr]

    async def _complete(self, client: Client, call: Call, move: Move, along: Any) -> None:
        found = await client.complete(PromptReference("say"), "token", call.token, **along)
        self._book.check(list(found.values) == [f"{call.token}!"], f"{call.token} was completed to {found.values}")

    async def _ping(self, client: Client, call: Call, move: Move, along: Any) -> None:
        await client.ping()

    async def _listen(self, client: Client, call: Call, move: Move, along: Any) -> None:
        async with client.listen(resources=KEYS) as changes:
            told = tuple(sorted(set(KEYS) - {change.item for change in changes.missing}))
            self._book.tell(f"{call.token} listens to {', '.join(told)}")
            block = Listened(self.name, told, self._book.tick)
            prompt = PROMPT + self._world.crossing
            with trio.move_on_after(move.size + prompt) as scope:
                await self._hear(changes, block)
            if self._book.harms and scope.cancelled_caught:
                with trio.move_on_after(PATIENT) as scope:
                    await self._hear(changes, block)
            if scope.cancelled_caught and self._world.tells:  # else the server has ended it
                self._book.listened(block, PATIENT if self._book.harms else prompt)

    async def _hear(self, changes: Any, block: Listened) -> None:
        async for change in changes:
            self._book.tell(f"{self.name} hears that {change.item} has changed")
            block.heard[change.item] = self._book.tick


_DEEDS: dict[str, Callable[..., Any]] = {
    "echo": Visitor._echo, "big": Visitor._big, "plain": Visitor._plain, "hold": Visitor._plain, "log": Visitor._plain,
    "away": Visitor._plain, "wizard": Visitor._plain,
    "count": Visitor._count, "fail": Visitor._fail, "ask": Visitor._ask, "put": Visitor._put, "read": Visitor._read,
    "tools": Visitor._tools, "follow": Visitor._follow, "prompt": Visitor._prompt, "complete": Visitor._complete,
    "ping": Visitor._ping, "listen": Visitor._listen, "job": Visitor._plain, "quiz": Visitor._plain, **TASK_MOVES,
}  # fmt: skip
