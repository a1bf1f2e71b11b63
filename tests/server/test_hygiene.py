"""Rules of a Trio library: checkpoints, no global state, no leftovers, in each kind of event loop and each thread."""

from __future__ import annotations

import ast
import gc
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import (
    MockClock,
    assert_checkpoints,
    assert_no_checkpoints,
    memory_stream_pair,
    wait_all_tasks_blocked,
)

import trio_mcp
from tests.server.checkpoints import busy_threads, open_fds, unlimited_pipe
from tests.server.raw_client import LATEST, REVISION_NAMES, RawClient, connected
from trio_mcp import Context, ElicitUrl, ListRoots, RequestError, Server, ToolError, serve_stream

pytestmark = pytest.mark.usefixtures("frozen_heap")

ROOT = Path(__file__).parents[2]
ANSWERS: dict[str, Callable[[Any], Any]] = {
    "sampling/createMessage": lambda _: {"role": "assistant", "model": "m", "content": {"type": "text", "text": "1"}},
    "elicitation/create": lambda _: {"action": "decline"},
    "roots/list": lambda _: {"roots": []},
}
FORM = {"type": "object", "properties": {"x": {"type": "string"}}}


# Checkpoints.


async def progress(ctx: Context) -> None:
    await ctx.progress(1)


async def log(ctx: Context) -> None:
    await ctx.log("info", "x")


async def log_below_the_level(ctx: Context) -> None:
    await ctx.log("debug", "x")


async def elicit(ctx: Context) -> None:
    await ctx.elicit("Shall I?", FORM)


async def elicit_url(ctx: Context) -> None:
    await ctx.elicit_url("Go there", "https://example.com/")


async def sample(ctx: Context) -> None:
    await ctx.sample("How many?", max_tokens=5)


async def roots(ctx: Context) -> None:
    await ctx.roots()


async def roots_again(ctx: Context) -> None:
    await ctx.roots()
    with assert_checkpoints():
        await ctx.roots()


async def ask(ctx: Context) -> None:
    await ctx.ask(roots=ListRoots())


async def ask_nothing(ctx: Context) -> None:
    await ctx.ask()


async def completed(ctx: Context) -> None:
    page = ElicitUrl("Go there", "https://example.com/")
    await ctx.ask(page=page)
    with assert_checkpoints():
        await ctx.completed(page)


URLS = {"elicit_url", "completed"}
FORMS = {"elicit"}
METHODS: list[Callable[[Context], Awaitable[None]]] = [
    progress, log, log_below_the_level, elicit, elicit_url, sample, roots, roots_again, ask, ask_nothing, completed,
]  # fmt: skip


def exists(method: Callable[[Context], Awaitable[None]], revision: str) -> bool:
    if method.__name__ in URLS:
        return revision >= "2025-11-25"
    return revision >= "2025-06-18" or method.__name__ not in FORMS


CASES = [(revision, method) for revision in REVISION_NAMES for method in METHODS if exists(method, revision)]


@pytest.mark.parametrize(("revision", "method"), CASES)
@pytest.mark.parametrize("asked_for", [True, False], ids=["wanted", "not wanted"])
async def test_each_method_of_the_context_is_a_checkpoint(
    revision: str, asked_for: bool, method: Callable[[Context], Awaitable[None]], autojump_clock: MockClock
) -> None:
    server = Server("hygiene")

    @server.tool
    async def work(ctx: Context) -> str:
        with assert_checkpoints():
            await method(ctx)
        return "worked"

    level = "info" if asked_for else None
    async with connected(server, revision, answers=ANSWERS, log_level=level) as wire:
        result = await wire.call("tools/call", {"name": "work"}, progress="p" if asked_for else None)
        assert result["content"][0]["text"] == "worked"


@pytest.mark.parametrize(("revision", "method"), [case for case in CASES if case[1] not in (roots_again, completed)])
async def test_each_method_of_the_context_can_be_cancelled(
    revision: str, method: Callable[[Context], Awaitable[None]], autojump_clock: MockClock
) -> None:
    """By a cancel scope of the handler."""
    server = Server("hygiene")

    @server.tool
    async def work(ctx: Context) -> str:
        with trio.CancelScope() as scope:
            scope.cancel()
            await method(ctx)
        return f"cancelled: {scope.cancelled_caught}"

    async with connected(server, revision, answers=ANSWERS, log_level="info") as wire:
        result = await wire.call("tools/call", {"name": "work"}, progress="p")
        assert result["content"][0]["text"] == "cancelled: True"
        assert wire.asked == []


async def test_serving_is_a_checkpoint_and_can_be_cancelled(autojump_clock: MockClock) -> None:
    for shared in (False, True):
        server = Server("hygiene")
        async with server.running() if shared else nullcontext():
            ours, theirs = unlimited_pipe()
            await ours.send_eof()
            with assert_checkpoints():
                await serve_stream(server, theirs)
            ours, theirs = unlimited_pipe()
            with trio.CancelScope() as scope:
                scope.cancel()
                await serve_stream(server, theirs)
            assert scope.cancelled_caught
            assert await ours.receive_some() == b""
            with trio.move_on_after(5) as scope:
                await serve_stream(server, unlimited_pipe()[1])
            assert scope.cancelled_caught


async def test_running_is_a_checkpoint_and_can_be_cancelled(autojump_clock: MockClock) -> None:
    server = Server("hygiene")
    with assert_checkpoints():
        async with server.running():
            pass
    with trio.CancelScope() as scope:
        scope.cancel()
        async with server.running():
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert not server._runs


async def test_the_sync_methods_of_a_server_are_no_checkpoints(autojump_clock: MockClock) -> None:
    server = Server("hygiene")
    async with server.running():
        with assert_no_checkpoints():
            server.notify_list_changed("tools")
            server.notify_resource_updated("it://changes")
            server.statistics()


# Leftovers.


def new_server() -> Server:
    server = Server("everything")

    @server.tool
    async def plain(x: int) -> str:
        return "plain"

    @server.tool
    async def tells(ctx: Context) -> str:
        await ctx.progress(1)
        await ctx.log("info", "x")
        return "tells"

    @server.tool
    async def fails() -> str:
        raise ValueError("fails")

    @server.tool
    async def refuses() -> str:
        raise RequestError(1, "refuses")

    @server.tool
    async def tells_the_model() -> str:
        raise ToolError("no")

    @server.tool
    async def fails_in_a_nursery() -> str:
        async with trio.open_nursery():
            raise ValueError("fails")

    @server.tool
    def thread() -> str:
        return "thread"

    @server.tool
    async def asks(ctx: Context) -> str:
        await ctx.sample("How many?", max_tokens=5)
        return "asks"

    @server.tool
    async def waits() -> str:
        await trio.sleep_forever()
        raise AssertionError

    @server.resource("it://{name}")
    def it(name: str) -> str:
        return name

    @server.prompt
    def prompt(name: str) -> str:
        return name

    return server


def _tool(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return "tools/call", {"name": name, "arguments": arguments}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a list": ("tools/list", {}),
    "a call": _tool("plain", x=1),
    "a call with invalid arguments": _tool("plain", x="1"),
    "a call of an unknown tool": _tool("nothing"),
    "a call that reports": _tool("tells"),
    "a call that fails": _tool("fails"),
    "a call that is refused": _tool("refuses"),
    "a call with a ToolError": _tool("tells_the_model"),
    "a call that fails in a nursery": _tool("fails_in_a_nursery"),
    "a call in a thread": _tool("thread"),
    "a call that asks": _tool("asks"),
    "a call that is cancelled": _tool("waits"),
    "a resource": ("resources/read", {"uri": "it://x"}),
    "an unknown resource": ("resources/read", {"uri": "that://x"}),
    "a prompt": ("prompts/get", {"name": "prompt", "arguments": {"name": "x"}}),
    "an unknown method": ("no/such/method", {}),
    "a subscription": ("subscriptions/listen", {"notifications": {"toolsListChanged": True}}),
}


class LineClient:
    """A client that keeps no messages."""

    def __init__(self, stream: Any, wire: RawClient) -> None:
        self.stream = stream
        self.wire = wire
        self.buffer = b""

    async def send(self, message: dict[str, Any]) -> None:
        await self.stream.send_all(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        while b"\n" not in self.buffer:
            data = await self.stream.receive_some()
            assert data
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    async def open(self) -> None:
        if self.wire.modern:
            return
        params = {
            "protocolVersion": self.wire.revision,
            "capabilities": self.wire.capabilities,
            "clientInfo": {"name": "c", "version": "1"},
        }
        await self.send(self.wire.request("initialize", params))
        assert "result" in await self.receive()
        await self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def exchange(self, method: str, params: dict[str, Any], cancelled: bool) -> None:
        request = self.wire.request(method, params, progress="p")
        await self.send(request)
        if cancelled:
            await wait_all_tasks_blocked()
            note = {"method": "notifications/cancelled", "params": {"requestId": request["id"]}}
            await self.send({"jsonrpc": "2.0", **note})
            await wait_all_tasks_blocked()
            if method == "subscriptions/listen" and self.wire.modern:
                await self.receive()  # its acknowledgement
            if method != "subscriptions/listen" or self.wire.modern:
                return
        while (message := await self.receive()).get("id") != request["id"] or "method" in message:
            if "id" in message:
                answer = {"jsonrpc": "2.0", "id": message["id"], "result": ANSWERS[message["method"]]({})}
                await self.send(answer)
        result = message.get("result", {})
        if "inputRequests" in result:
            given = {key: ANSWERS[question["method"]]({}) for key, question in result["inputRequests"].items()}
            again = {**params, "inputResponses": given, "requestState": result["requestState"]}
            await self.exchange(method, again, cancelled)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("revision", ["2025-11-25", LATEST])
@pytest.mark.parametrize("case", REQUESTS)
async def test_requests_leave_no_objects_to_the_garbage_collector(
    case: str, revision: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    """While the garbage collector is off, the number of its objects stays the same."""
    caplog.set_level(100, "trio_mcp")  # pytest would keep the log records
    method, params = REQUESTS[case]
    cancelled = case in ("a call that is cancelled", "a subscription")
    times = 100
    server = new_server()
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, theirs)
        lines = LineClient(ours, RawClient(ours, revision))
        await lines.open()
        for _ in range(20):
            await lines.exchange(method, params, cancelled)
        await wait_all_tasks_blocked()
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            for _ in range(times):
                await lines.exchange(method, params, cancelled)
            await wait_all_tasks_blocked()
            assert len(gc.get_objects()) < before + times // 2
        finally:
            gc.enable()
        await ours.send_stream.aclose()


async def test_connections_and_runs_leave_no_objects_behind(autojump_clock: MockClock) -> None:
    """Here the garbage collector is on: a connection and its tasks have reference cycles."""
    server = new_server()

    async def one_connection() -> None:
        ours, theirs = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_stream, server, theirs)
            lines = LineClient(ours, RawClient(ours, LATEST))
            await lines.exchange(*REQUESTS["a call"], False)
            await lines.exchange(*REQUESTS["a call that is cancelled"], True)
            await lines.exchange(*REQUESTS["a subscription"], True)
            await ours.send_stream.aclose()

    for shared in (True, False):
        async with server.running() if shared else nullcontext():
            counts = []
            for _ in range(4):
                for _ in range(25):
                    await one_connection()
                await wait_all_tasks_blocked()
                gc.collect()
                counts.append(len(gc.get_objects()))
            assert counts[-1] < counts[0] + 25


@pytest.mark.filterwarnings("error")
async def test_file_descriptors_and_threads_are_released(autojump_clock: MockClock) -> None:
    fds, threads = open_fds(), busy_threads()
    for _ in range(3):
        async with connected(new_server(), LATEST, answers=ANSWERS) as wire:
            for name in ("thread", "asks"):
                await wire.call(*_tool(name))
    gc.collect()
    assert open_fds() == fds
    assert busy_threads() == threads


# Threads and event loops.


def exchange(server: Server) -> Callable[[], Awaitable[str]]:
    """An exchange in the running event loop, without a mock clock or other tools of tests."""

    async def main() -> str:
        ours, theirs = memory_stream_pair()
        lines = LineClient(ours, RawClient(ours, LATEST))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_stream, server, theirs)
            for name in ("a call", "a call in a thread", "a call that asks", "a resource", "a call that is refused"):
                await lines.exchange(*REQUESTS[name], False)
            await lines.exchange(*REQUESTS["a call that is cancelled"], True)
            await ours.send_stream.aclose()
        return "done"

    return main


def test_a_server_runs_in_guest_mode() -> None:
    todo: queue.Queue[Callable[[], Any]] = queue.Queue()
    outcomes: list[Any] = []

    trio.lowlevel.start_guest_run(
        exchange(new_server()),
        run_sync_soon_threadsafe=todo.put,
        done_callback=outcomes.append,
        host_uses_signal_set_wakeup_fd=True,
    )
    while not outcomes:
        todo.get(timeout=30)()
    assert outcomes[0].unwrap() == "done"


def test_a_server_runs_outside_the_main_thread() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(trio.run(exchange(new_server()))))
    thread.start()
    thread.join(30)
    assert found == ["done"]


def test_one_server_runs_in_two_loops_at_once() -> None:
    server, found = new_server(), []
    threads = [
        threading.Thread(target=lambda: found.append(trio.run(exchange(server))))  # type: ignore[arg-type]
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == ["done", "done"]


def output_of(program: str, *options: str) -> str:
    command, env = [sys.executable, *options, "-c", program], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_server_imports_no_other_event_loop_and_no_transport() -> None:
    """The modules that the use of a server imports, without those that the test itself needs."""
    program = """
import json, sys
import trio_mcp
from trio_mcp import Server, serve_stream, Context
import trio

server = Server("clean")

@server.tool
async def plain(x: int) -> str:
    return "plain"

@server.tool
def thread(ctx: Context) -> str:
    return "thread"

@server.resource("it://x")
async def it() -> str:
    return "x"

opening = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
requests = [
    ("initialize", opening), ("tools/list", {}), ("tools/call", {"name": "plain", "arguments": {"x": 1}}),
    ("tools/call", {"name": "thread"}), ("resources/read", {"uri": "it://x"}), ("tools/call", {"name": "none"}),
]

async def main():
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, theirs)
        for id, (method, params) in enumerate(requests):
            await ours.send_all(json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).encode())
            await ours.send_all(b"\\n")
            assert json.loads(await ours.receive_some())["id"] == id
        await ours.send_stream.aclose()

import trio.testing
trio.run(main)
unwanted = {"asyncio", "anyio", "curio", "pydantic", "httpx", "h11", "wsproto", "requests", "starlette"}
print(json.dumps(sorted(unwanted & {name.partition(".")[0] for name in sys.modules})))
"""
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == []


def test_http_and_websocket_import_no_other_event_loop() -> None:
    program = """
import json, sys
import trio
from trio_mcp import Server, open_client, serve_http

server = Server("clean")

@server.tool
async def echo(text: str) -> str:
    return text

async def main():
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, server)
        for url in (address.url, address.websocket_url):
            for revision in ("2025-11-25", "2026-07-28"):
                async with open_client(url, revision=revision) as client:
                    assert await client.call_tool("echo", {"text": "x"}, returns=str) == "x"
                    assert [tool.name for tool in await client.list_tools()] == ["echo"]
        nursery.cancel_scope.cancel()

trio.run(main)
unwanted = {"asyncio", "anyio", "curio", "pydantic", "httpx", "requests", "starlette"}
print(json.dumps(sorted(unwanted & {name.partition(".")[0] for name in sys.modules})))
"""
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "*"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == []


# The functions with a shield without a deadline, and the reason why each ends in time.
ENDS = {
    ("child", "aclose"): "it waits for `_run`",
    ("child", "_run"): "each step of the end has a deadline",
    ("workers", "_wait_for_tasks"): "the tasks are cancelled; a task with its own shield ends like a shielded handler",
    ("workers", "call"): "the function has been cancelled, and only a caller that joins waits for it",
    ("session", "_work_in_turn"): "the requests before it have been cancelled, too",
    ("session", "serve"): "the tasks have been cancelled",
    ("wire", "run"): "the write that it waits for has a deadline by then",
    ("sqlite_file", "close"): "SQLite waits for other processes for five seconds",
    ("redis", "__aenter__"): "it waits for a task of this process to start",
    ("redis", "__aexit__"): "the start of a block and the end of the connections have deadlines",
    ("tap_websocket", "pass_websocket"): "a forceful close of a stream takes no time",
    ("listener", "serve_http"): "the close of a listener takes no time",
    ("connection", "write"): "its pace has a deadline, which moves while the client reads",
}


def test_each_shield_without_a_deadline_is_known() -> None:
    package = Path(trio_mcp.__file__).parent
    forever = set()
    for path in package.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                options = {keyword.arg for keyword in call.keywords}
                if "shield" in options and "deadline" not in options:
                    forever.add((path.stem, function.name))
    assert forever == ENDS.keys()


def test_the_import_changes_no_global_state() -> None:
    program = """
import signal, sys, threading, warnings, logging, gc
def state():
    return (
        [signal.getsignal(n) for n in signal.valid_signals()], sys.excepthook, sys.unraisablehook,
        threading.active_count(), list(warnings.filters), logging.root.handlers[:], gc.isenabled(),
        sys.getrecursionlimit(), gc.get_threshold(), sys.get_asyncgen_hooks(), sys.stdout, sys.stderr,
    )
import trio, json, attrs
before = state()
import trio_mcp, trio_mcp.server.session, trio_mcp.server.server, trio_mcp.server.process
assert state() == before, (state(), before)
"""
    assert output_of(program) == ""
